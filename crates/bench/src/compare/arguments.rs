//! The arguments of `zfolio bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use zfolio_core::number;
use zfolio_core::size;

use super::Failure;
use super::setting::Compression;
use crate::codecs::{self, CodecsArgs};
use crate::corpus::parse_size;
use crate::iaa::{self, IaaArgs};
use crate::programs::{self, ProgramsArgs};
use crate::recompress::{self, RecompressArgs};
use crate::replacement::{self, ReplacementArgs};
use crate::spill::{self, SpillArgs};
use crate::swap::{self, SwapArgs};
use crate::zram::{self, ZramArgs};

/// Arguments of `zfolio bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(super) what: What,
}

#[derive(Subcommand, Debug)]
pub(super) enum What {
    /// Fill memory with the pages of real processes, use it, check every byte; compare settings
    #[command(after_help = "\
With --against kernel the same program is run under the kernel's zram swap in a memory cgroup, with
4 KiB and with 64 KiB folios, with lz4 and with lzo-rle. That needs root and zram; without, the rest is
run. A zram device of its own is used, never one that is in use, and everything that is changed (swap,
cgroup, huge pages) is put back, also after Ctrl-C or a failure.

zfolio gets as much memory in all as the kernel's most frugal setting needed: the cgroup's limit and
what zram held beside it.

With --zswap DIR it also runs with zswap, whose pool may have 1 % of the machine's memory (the kernel has
no smaller bound), and what does not fit goes to a swap file in DIR. --limit and --bytes are chosen so that
zfolio, which gets the limit and what the pool had, has to spill too. In a small cgroup the kernel may
kill the program.

Examples:
  sudo zfolio bench usemem --against kernel
  sudo zfolio bench usemem --zswap /var/tmp --bytes 1536M --limit 256M --setting auto --without inline
  sudo zfolio bench usemem --against kernel --bytes 4G --limit 1G -n 4 -r 5 --json > result.json
  zfolio bench usemem --corpus corpus.bin --total 512M --setting lz4:64K --setting zstd,level=3:64K")]
    Usemem(Box<UsememArgs>),
    /// Run real programs with less memory than they need; compare their times
    #[command(after_help = programs::HELP)]
    Programs(Box<ProgramsArgs>),
    /// Run real programs with 'auto' and with each fixed algorithm and unit; compare their times
    #[command(after_help = programs::AUTO_HELP)]
    Auto(Box<ProgramsArgs>),
    /// Compress units of the memory of real processes with each algorithm; recommend settings
    #[command(after_help = codecs::HELP)]
    Codecs(Box<CodecsArgs>),
    /// Count what replacement policies miss, on the accesses of programs, beside the optimum
    #[command(after_help = replacement::HELP)]
    Replacement(Box<ReplacementArgs>),
    /// Fill memory with noise, far above a limit: zfolio, the kernel's swap, and the file system itself
    #[command(after_help = spill::HELP)]
    Spill(Box<SpillArgs>),
    /// Measure the slot allocator of swap areas: speed, fragmentation, whole folios against split ones
    #[command(after_help = swap::HELP)]
    Swap(Box<SwapArgs>),
    /// Write and read a compressed disk of zfolio, beside the kernel's zram device
    #[command(after_help = zram::HELP)]
    Zram(Box<ZramArgs>),
    /// Recompress the idle part of a compressed disk while another part is read
    #[command(after_help = recompress::HELP)]
    Recompress(Box<RecompressArgs>),
    /// Simulate accelerators and their queues; predict the published figures of the kernel's driver
    #[command(after_help = iaa::HELP)]
    Iaa(IaaArgs),
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Against {
    /// The kernel's zram swap in a memory cgroup
    Kernel,
}

/// The ways of running the workload.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Without any limit
    Free,
    /// Under zfolio run
    Run,
    /// In a region of the library
    Inline,
}

/// Arguments of `zfolio bench usemem`.
#[derive(Args, Debug)]
pub(super) struct UsememArgs {
    /// Compare with it
    #[arg(long, value_enum)]
    pub(super) against: Option<Against>,
    /// Compare with the kernel's zswap over a swap file in this directory; zfolio spills there too
    #[arg(long, value_name = "DIR")]
    pub(super) zswap: Option<PathBuf>,
    /// Pages of real processes [default: made once, with 'zfolio corpus make', in ~/.cache/zfolio]
    #[arg(long, value_name = "FILE")]
    pub(super) corpus: Option<PathBuf>,
    /// How much memory the workload uses in all
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = parse_size)]
    pub(super) bytes: u64,
    /// The memory cgroup's limit, for the kernel
    #[arg(long, default_value = "256M", value_name = "SIZE", value_parser = parse_size)]
    pub(super) limit: u64,
    /// zfolio's limit, for everything [default: what the kernel needed; without it, half of --bytes]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) total: Option<u64>,
    /// How zfolio compresses: ALGORITHM[,level=N]:UNIT, or auto; may be repeated
    /// [default: lz4:4K lz4:16K zstd,level=1:4K zstd,level=1:16K]
    #[arg(long, value_name = "SETTING")]
    pub(super) setting: Vec<Compression>,
    /// Leave out a way of running; may be repeated
    #[arg(long, value_enum, value_name = "WAY")]
    pub(super) without: Vec<Way>,
    /// Threads that share the memory
    #[arg(short = 'n', default_value_t = 1, value_parser = number::within(1_u32..=1024))]
    pub(super) workers: u32,
    /// Workers are processes (no inline rows then)
    #[arg(long)]
    pub(super) processes: bool,
    /// Rounds; each figure is the median
    #[arg(short, long, default_value_t = 3, value_parser = number::within(1_u32..=1000))]
    pub(super) repeats: u32,
    /// What chooses the pages of the random reads
    #[arg(long, default_value_t = 1, value_parser = number::within(0..=u64::MAX))]
    pub(super) seed: u64,
    /// Random reads
    #[arg(long, default_value_t = 50_000, value_parser = number::within(1..=u32::MAX))]
    pub(super) reads: u32,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    pub(super) json: bool,
    /// The program usemem [default: beside this program, in ../lib/zfolio, then in PATH]
    #[arg(long, value_name = "FILE")]
    pub(super) usemem: Option<PathBuf>,
    /// The program zfolio
    #[arg(long, value_name = "FILE", hide = true)]
    pub(super) zfolio: Option<PathBuf>,
    /// Run the workload inline, in this process, with the first --setting and --total
    #[arg(long, hide = true)]
    pub(super) inline_child: bool,
}

impl UsememArgs {
    /// Refuses sizes that are too small to run with.
    pub(super) fn check_sizes(&self) -> Result<(), Failure> {
        let refuse = |name: &str, given: u64, accepted: &str| {
            let given = size::display(given);
            Err(Failure::Refused(format!("{name} {given}: accepted: {accepted}")))
        };
        if self.bytes < 1 << 20 {
            return refuse("--bytes", self.bytes, "1M or more");
        }
        // With less, the program itself does not fit, and the kernel kills it.
        if self.limit < 4 << 20 {
            return refuse("--limit", self.limit, "4M or more");
        }
        match self.total {
            Some(total) if total < 4 << 20 => refuse("--total", total, "4M or more"),
            _ => Ok(()),
        }
    }
}
