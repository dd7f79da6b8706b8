//! Any sequence of operations on the slots of an area, compared with a `bool` for each slot.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_core::swap::slots::script::play(data));
