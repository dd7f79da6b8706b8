//! Any sequence of operations on a pool whose source may refuse memory, compared with a map.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::zsmalloc::script::play(data));
