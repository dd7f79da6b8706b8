//! Any text as files that name disks: refused line by line, or read as what it says.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_block::conf::script::play(data));
