//! Whatever the kernel asks a queue of a block device for.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_block::ublk::script::play(data));
