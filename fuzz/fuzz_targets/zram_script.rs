//! Any sequence of requests to a compressed disk, with a page source that fails, beside plain bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::zram::script::play(data));
