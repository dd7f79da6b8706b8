//! Any bytes as a saved disk, and any changes of a good one: refused, or all of it can be read.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::zram::save_script::play(data));
