//! What the posted series "zswap compression batching" of the Linux kernel publish of `deflate-iaa`: without the series
//! and with it. The messages are listed in docs/benchmarks/2026-11-25-iaa.md.

use zfolio_core::page::PAGE_BYTES;

use super::{change, error};

/// Seconds by `deflate-iaa`: without the series, where pages are compressed one by one, and with it, in batches.
pub(super) struct Published {
    series: &'static str,
    pub(super) folio: Folio,
    elapsed_s: [f64; 2],
    sys_s: [f64; 2],
}

/// The sizes of folio that were published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Folio {
    Of64K,
    Of2M,
}

impl Folio {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Folio::Of64K => "64K",
            Folio::Of2M => "2M",
        }
    }

    pub(super) const fn bytes(self) -> usize {
        match self {
            Folio::Of64K => 64 << 10,
            Folio::Of2M => 2 << 20,
        }
    }

    /// Pages in so many folios.
    const fn pages(self, folios: u64) -> u64 {
        folios * (self.bytes() / PAGE_BYTES) as u64
    }
}

const fn published(
    series: &'static str,
    folio: Folio,
    elapsed_s: [f64; 2],
    sys_s: [f64; 2],
) -> Published {
    Published { series, folio, elapsed_s, sys_s }
}

impl Published {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.series, self.folio.name())
    }

    /// Whether its throughput with the series is what the work per page was computed from.
    pub(super) fn is_fitted(&self) -> bool {
        self.series == "v9"
    }

    /// Seconds without the series and with it.
    #[cfg(test)]
    pub(super) fn seconds(&self) -> [[f64; 2]; 2] {
        [self.elapsed_s, self.sys_s]
    }

    /// Without the series.
    pub(super) fn elapsed_alone_s(&self) -> f64 {
        self.elapsed_s[0]
    }

    /// Elapsed and system time: what batching changed as published, what it changes if it saves these seconds, and the
    /// error, in percent.
    pub(super) fn times(&self, elapsed_saved_s: f64, sys_saved_s: f64) -> [[f64; 3]; 2] {
        let row = |[from, to]: [f64; 2], saved| error(change(from, to), change(from, from - saved));
        [row(self.elapsed_s, elapsed_saved_s), row(self.sys_s, sys_saved_s)]
    }
}

/// A row of `usemem --init-time -w -O -b 1 -s 10 -n 30 10g` under `memory.high=150G`.
pub(super) struct Usemem {
    pub(super) row: Published,
    /// KB/s of all processes together, as usemem counts them.
    pub(super) kb_s: [u64; 2],
    /// Pages that went out of memory (`zswpout`).
    pub(super) out: [u64; 2],
    /// With the series a CPU uses the devices of its package by turns; v6 maps it to one of them.
    pub(super) distributes: bool,
}

/// Processes of each row.
pub(super) const PROCESSES: u16 = 30;

/// Pages that the processes write.
pub(super) const WRITTEN: u64 = PROCESSES as u64 * (10 << 30) / PAGE_BYTES as u64;

/// Pages that there may be in memory, compressed ones with their compressed size.
pub(super) const HIGH: u64 = (150 << 30) / PAGE_BYTES as u64;

const fn usemem(row: Published, kb_s: [u64; 2], out: [u64; 2]) -> Usemem {
    Usemem { row, kb_s, out, distributes: true }
}

/// v6 has two runs with the series, of which these are the means. Its count of pages out without the series is
/// misprinted for 2M, so it is taken from the folios. v14 has no counters: that they are v13's is assumed.
pub(super) const USEMEM: [Usemem; 10] = [
    Usemem {
        distributes: false,
        ..usemem(
            published("v6", Folio::Of64K, [100.74, 70.24], [2446.53, 1561.48]),
            [6_039_595, 9_608_646],
            [58_342_295, 61_629_084],
        )
    },
    Usemem {
        distributes: false,
        ..usemem(
            published("v6", Folio::Of2M, [87.68, 64.30], [2031.84, 1412.90]),
            [6_334_585, 10_149_448],
            [Folio::Of2M.pages(115_321), 62_191_008],
        )
    },
    usemem(
        published("v9", Folio::Of64K, [100.46, 69.70], [2416.97, 1648.37]),
        [6_091_607, 10_174_344],
        [58_146_954, 64_508_450],
    ),
    usemem(
        published("v9", Folio::Of2M, [87.15, 63.04], [2011.56, 1450.45]),
        [6_371_048, 11_282_935],
        [59_815_486, 64_509_928],
    ),
    usemem(
        published("v12", Folio::Of64K, [93.21, 69.98], [2190.52, 1651.51]),
        [7_191_949, 10_702_115],
        [61_577_440, 71_448_317],
    ),
    usemem(
        published("v12", Folio::Of2M, [82.26, 69.30], [1901.90, 1634.78]),
        [7_237_676, 11_228_928],
        [63_470_927, 71_773_688],
    ),
    usemem(
        published("v13", Folio::Of64K, [98.94, 70.90], [2379.29, 1686.18]),
        [6_118_675, 9_901_216],
        [58_174_008, 64_508_622],
    ),
    usemem(
        published("v13", Folio::Of2M, [88.70, 67.84], [2059.83, 1581.07]),
        [6_309_635, 10_558_225],
        [59_880_021, 64_509_854],
    ),
    usemem(
        published("v14", Folio::Of64K, [99.19, 67.45], [2356.19, 1580.47]),
        [6_226_967, 10_551_714],
        [58_174_008, 64_508_622],
    ),
    usemem(
        published("v14", Folio::Of2M, [88.14, 63.37], [2025.53, 1455.23]),
        [6_347_201, 11_315_500],
        [59_880_021, 64_509_854],
    ),
];

/// A kernel's `allmodconfig` by 32 threads under `memory.max=2G`, with the pages that went out in whole folios without
/// the series: single pages are no batch. v14 compiles a `defconfig` in 1.7 GiB and has no counters. Assumed: as many
/// pages go out in whole folios for each second of system time as in v9.
pub(super) const COMPILATION: [(Published, u64); 8] = [
    (
        published("v9", Folio::Of64K, [835.31, 837.75], [3705.03, 3642.59]),
        Folio::Of64K.pages(2_958_806),
    ),
    (published("v9", Folio::Of2M, [790.66, 789.01], [4307.92, 4184.09]), Folio::Of2M.pages(8_810)),
    (
        published("v12", Folio::Of64K, [874.74, 821.59], [3834.35, 3791.12]),
        Folio::Of64K.pages(3_007_705),
    ),
    (
        published("v12", Folio::Of2M, [808.10, 794.85], [4351.01, 4266.95]),
        Folio::Of2M.pages(16_661),
    ),
    (
        published("v13", Folio::Of64K, [836.64, 806.94], [3897.57, 3661.83]),
        Folio::Of64K.pages(3_088_473),
    ),
    (
        published("v13", Folio::Of2M, [818.48, 779.67], [4226.52, 4245.18]),
        Folio::Of2M.pages(15_600),
    ),
    (
        published("v14", Folio::Of64K, [100.10, 98.74], [308.72, 301.23]),
        Folio::Of64K.pages(2_958_806) * 30_872 / 370_503,
    ),
    (
        published("v14", Folio::Of2M, [95.29, 93.44], [346.21, 344.48]),
        Folio::Of2M.pages(8_810) * 34_621 / 430_792,
    ),
];

pub(super) const COMPILATION_THREADS: u16 = 32;
