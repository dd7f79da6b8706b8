//! Decompression with deflate with a small window of bytes that anyone may have written.

#![no_main]

use std::sync::LazyLock;

use zfolio_fuzz::zcomp::Target;

static TARGET: LazyLock<Target> =
    LazyLock::new(|| Target::with("deflate,level=6,window=9".parse().expect("parameters")));

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET.run(data));
