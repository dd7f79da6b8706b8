//! Decompression with 842 of bytes that anyone may have written.

#![no_main]

use std::sync::LazyLock;

use zfolio_core::zcomp::Algorithm;
use zfolio_fuzz::zcomp::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| Target::new(Algorithm::Sw842));

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET.run(data));
