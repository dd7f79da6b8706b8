//! Decompression with lz4 and a dictionary of bytes that anyone may have written.

#![no_main]

use std::sync::LazyLock;

use zfolio_fuzz::zcomp::Target;

static TARGET: LazyLock<Target> =
    LazyLock::new(|| Target::with("lz4,dict=d".parse().expect("parameters")));

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET.run(data));
