//! Decompression with zstd and a dictionary of bytes that anyone may have written.

#![no_main]

use std::sync::LazyLock;

use zfolio_fuzz::zcomp::Target;

static TARGET: LazyLock<Target> =
    LazyLock::new(|| Target::with("zstd,dict=d".parse().expect("parameters")));

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET.run(data));
