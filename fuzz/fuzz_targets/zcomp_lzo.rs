//! Decompression with lzo and lzo-rle of bytes that anyone may have written. The first byte chooses
//! between them.

#![no_main]

use std::sync::LazyLock;

use zfolio_core::zcomp::Algorithm;
use zfolio_fuzz::zcomp::Target;

static LZO: LazyLock<Target> = LazyLock::new(|| Target::new(Algorithm::Lzo));
static LZO_RLE: LazyLock<Target> = LazyLock::new(|| Target::new(Algorithm::LzoRle));

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((which, data)) = data.split_first() else { return };
    if which % 2 == 0 { LZO.run(data) } else { LZO_RLE.run(data) }
});
