//! Any sequence of operations on a pool, with a source that refuses, beside a map.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::zsmalloc::script::play(data));
