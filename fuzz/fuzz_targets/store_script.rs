//! Any sequence of operations on a store, with a page source, a codec and a backing that fail, beside a map.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::store::script::play(data));
