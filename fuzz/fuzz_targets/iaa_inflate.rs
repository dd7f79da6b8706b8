//! The decoder of the modelled accelerator, next to zlib: any bytes are refused by both or give the same.

#![no_main]

use std::sync::LazyLock;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::Zcomp;
use zfolio_iaa::layout::error;
use zfolio_iaa::model::{Limits, Stop, inflate};

static ZLIB: LazyLock<Zcomp> = LazyLock::new(|| {
    let order = UnitOrder::from_bytes(65536).expect("a unit's size");
    Zcomp::new("deflate,window=12".parse().expect("parameters"), order, 1).expect("memory")
});

libfuzzer_sys::fuzz_target!(|source: &[u8]| {
    let limits = Limits { output_bytes_max: 65536, steps_max: 1 << 20, is_last_block_meant: true };
    match inflate(source, limits) {
        Ok((data, used)) => {
            let mut theirs = vec![0; data.len()];
            let theirs_is_ok = ZLIB.decompress(0, &source[..used], &mut theirs).is_ok();
            assert!(theirs_is_ok && theirs == data);
        }
        // zlib reads further back.
        Err((Stop::Refused(error::BAD_DISTANCE), _)) => {}
        Err((Stop::Refused(code), data)) => {
            let mut theirs = vec![0; data.len()];
            assert!(ZLIB.decompress(0, source, &mut theirs).is_err(), "{code}");
        }
        Err(_) => {}
    }
});
