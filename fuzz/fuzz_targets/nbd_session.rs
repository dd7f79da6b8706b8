//! Whatever a client of the NBD server sends: options, requests and noise, cut anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_block::nbd::script::play(data));
