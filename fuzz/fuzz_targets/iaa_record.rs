//! Completion records and output of a hostile accelerator: they harm only its own units.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_iaa::model::script::play(data));
