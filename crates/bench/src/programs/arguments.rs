//! The arguments of `zfolio bench programs`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::share::Share;
use super::workload::Program;
use crate::compare::Against;
use crate::compare::setting::Compression;
use crate::kernel::KernelSetting;

pub(crate) const HELP: &str = "\
Each program first runs alone. The peak of its anonymous and shared memory is its need. Then it runs
under 'zfolio run' with limits of 3/4, 1/2, 1/3 and 1/4 of the need. Its output must be the same each
time. A program that is not installed is skipped.

With --against kernel it also runs in a memory cgroup with the kernel's zram swap, with as much memory
in all: the cgroup's limit and what zram held beside it. That needs root and zram, and everything that
is changed is put back.

Examples:
  zfolio bench programs
  zfolio bench programs --program sort --program redis --share 1/2 --rounds 3
  sudo zfolio bench programs --against kernel --json > programs.json";

/// The least limit that `zfolio run` accepts.
pub(crate) const LIMIT_BYTES_MIN: u64 = 32 << 20;

/// Arguments of `zfolio bench programs`.
#[derive(Args, Debug)]
pub(crate) struct ProgramsArgs {
    /// Only this program; may be repeated
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) program: Vec<Program>,
    /// Only this share of the need, as in 1/2, 50% or 0.5; may be repeated
    /// [default: 3/4 1/2 1/3 1/4]
    #[arg(long, value_name = "SHARE")]
    pub(crate) share: Vec<Share>,
    /// How zfolio compresses: ALGORITHM[,level=N]:UNIT; may be repeated
    /// [default: that of 'zfolio run']
    #[arg(long, value_name = "SETTING")]
    pub(crate) setting: Vec<Compression>,
    /// Compare with it
    #[arg(long, value_enum)]
    pub(crate) against: Option<Against>,
    /// How the kernel compresses: an algorithm of zram, and folios of 4K or 64K
    #[arg(long, default_value = "lz4:4K", value_name = "ALGORITHM:FOLIO")]
    pub(crate) kernel: KernelSetting,
    /// Rounds; each time is the median
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// End a run after so many seconds [default: 30 times the time alone, and 10]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: Option<u32>,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// How much work, in percent of the usual amount
    #[arg(long, default_value_t = 100, hide = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) scale: u32,
    /// The program zfolio
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) zfolio: Option<PathBuf>,
}

impl ProgramsArgs {
    /// The shares, the largest first.
    pub(crate) fn shares(&self) -> Vec<Share> {
        let mut shares = self.share.clone();
        if shares.is_empty() {
            let defaults = super::share::DEFAULTS.iter().map(|text| text.parse());
            shares = defaults.collect::<Result<_, _>>().expect("a test reads them all");
        }
        shares.sort_unstable();
        shares.dedup();
        shares.reverse();
        shares
    }

    /// The programs, in the order of the table.
    pub(crate) fn programs(&self) -> Vec<Program> {
        let mut programs = self.program.clone();
        if programs.is_empty() {
            programs = Program::value_variants().to_vec();
        }
        programs.sort_unstable();
        programs.dedup();
        programs
    }
}
