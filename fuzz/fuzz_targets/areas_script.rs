//! Any sequence of operations on areas over disks that fail, dawdle and lie, beside a map.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::swap::script::play(data));
