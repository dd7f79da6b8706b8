//! The arguments of `zfolio bench programs`.

use std::path::PathBuf;

use clap::Args;
use zfolio_core::number;

use super::share::Share;
use super::workload::Program;
use crate::compare::Against;
use crate::compare::setting::{self, Compression};
use crate::kernel::KernelSetting;

pub(crate) const HELP: &str = "\
Each program first runs alone. The peak of its anonymous and shared memory is its need. Then it runs
under 'zfolio run' with limits of 3/4, 1/2, 1/3 and 1/4 of the need. Its output must be the same each
time. A program that is not installed is skipped.

With --limit the limits are sizes instead. --scale makes a program larger: the input of sort is 118 MB, and
sort needs 309 MiB, with --scale 200.

With --against kernel it also runs in a memory cgroup with the kernel's zram swap, with as much memory
in all: the cgroup's limit and what zram held beside it. That needs root and zram, and everything that
is changed is put back.

Examples:
  zfolio bench programs
  zfolio bench programs --program sort --program redis --share 1/2 --rounds 3
  zfolio bench programs --program sort --scale 200 --limit 128M
  zfolio bench programs --languages --share 1/2
  sudo zfolio bench programs --against kernel --json > programs.json";

pub(crate) const AUTO_HELP: &str = "\
This is 'zfolio bench programs' with auto and the settings that 'zfolio bench usemem' compares, or those
of --setting. One more table compares the best of the fixed settings with 'auto': 0.95 means that a fixed one
took 0.95 of the time of 'auto'; 'ended', that only 'auto' took too long.

Examples:
  zfolio bench auto --share 1/2
  zfolio bench auto --program node --setting auto:16K --setting lz4:16K --setting zstd:16K";

/// The least limit that `zfolio run` accepts.
pub(crate) const LIMIT_BYTES_MIN: u64 = 32 << 20;

/// Arguments of `zfolio bench programs`.
#[derive(Args, Debug)]
pub(crate) struct ProgramsArgs {
    /// Only this program; may be repeated [default: objects to perl]
    #[arg(long, value_enum, value_name = "NAME")]
    pub(crate) program: Vec<Program>,
    /// Only perl, ruby, guile, go, luajit, php and mono, and those of --program
    #[arg(long)]
    pub(crate) languages: bool,
    /// Only this share of the need, as in 1/2, 50% or 0.5; may be repeated
    /// [default: 3/4 1/2 1/3 1/4]
    #[arg(long, value_name = "SHARE")]
    pub(crate) share: Vec<Share>,
    /// This limit, as in 128M, instead of shares of the need; may be repeated
    #[arg(long, value_name = "SIZE", value_parser = super::share::size, conflicts_with = "share")]
    pub(crate) limit: Vec<Share>,
    /// How zfolio compresses: ALGORITHM[,level=N]:UNIT, or auto; may be repeated
    /// [default: that of 'zfolio run'; of 'bench auto': auto and the fixed ones]
    #[arg(long, value_name = "SETTING")]
    pub(crate) setting: Vec<Compression>,
    /// Compare with it
    #[arg(long, value_enum)]
    pub(crate) against: Option<Against>,
    /// How the kernel compresses: an algorithm of zram, and folios of 4K or 64K
    #[arg(long, default_value = "lz4:4K", value_name = "ALGORITHM:FOLIO")]
    pub(crate) kernel: KernelSetting,
    /// Rounds; each time is the median
    #[arg(short, long, default_value_t = 1, value_parser = number::within(1_u32..=1000))]
    pub(crate) rounds: u32,
    /// End a run after so many seconds [default: 30 times the time alone, and 10]
    #[arg(long, value_name = "SECONDS", value_parser = number::within(1..=u32::MAX))]
    pub(crate) timeout: Option<u32>,
    /// One JSON object, with every run, instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// How much work, in percent of the usual amount: the need grows with it
    #[arg(long, default_value_t = 100, value_name = "PERCENT", value_parser = number::within(1_u32..=1000))]
    pub(crate) scale: u32,
    /// The program zfolio
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) zfolio: Option<PathBuf>,
}

impl ProgramsArgs {
    /// `auto` and the fixed settings, unless there are settings already.
    pub(crate) fn set_all_settings(&mut self) {
        if self.setting.is_empty() {
            let all = ["auto"].into_iter().chain(setting::DEFAULTS);
            let all = all.map(str::parse).collect::<Result<_, _>>();
            self.setting = all.expect("a test reads them all");
        }
    }

    /// The shares or limits, the largest first.
    pub(crate) fn shares(&self) -> Vec<Share> {
        let mut shares = [&self.share[..], &self.limit].concat();
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
        if self.languages {
            programs.extend(Program::LANGUAGES);
        }
        if programs.is_empty() {
            programs.extend(Program::DEFAULTS);
        }
        programs.sort_unstable();
        programs.dedup();
        programs
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::workload::Program;
    use super::ProgramsArgs;

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        args: ProgramsArgs,
    }

    #[test]
    fn the_default_programs_are_eight_and_others_run_if_they_are_named() {
        let programs = |line: &[&str]| Command::parse_from(line).args.programs();
        assert_eq!(programs(&["bench"]), Program::DEFAULTS);
        assert_eq!(
            programs(&["bench", "--program", "go", "--program", "sort"]),
            [Program::Sort, Program::Go]
        );
        assert_eq!(programs(&["bench", "--languages"]), Program::LANGUAGES);
        let more = programs(&["bench", "--languages", "--program", "ocaml", "--program", "go"]);
        assert_eq!(more.len(), 8, "{more:?}");
    }

    #[test]
    fn limits_replace_shares() {
        let shares = |line: &[&str]| {
            let shares = Command::parse_from(line).args.shares();
            shares.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(shares(&["bench"]), ["3/4", "1/2", "1/3", "1/4"]);
        assert_eq!(shares(&["bench", "--limit", "60M", "--limit", "85M"]), ["85M", "60M"]);
        let both = Command::try_parse_from(["bench", "--limit", "60M", "--share", "1/2"]);
        assert!(both.is_err());
        assert!(Command::try_parse_from(["bench", "--limit", "1/2"]).is_err());
    }

    /// Goal: `bench auto` compares `auto` with all fixed settings, or what was asked for.
    #[test]
    fn auto_is_compared_with_all_settings() {
        let settings = |line: &[&str]| {
            let mut args = Command::parse_from(line).args;
            args.set_all_settings();
            args.setting.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(settings(&["auto"])[0], "auto");
        assert_eq!(settings(&["auto"]).len(), 5);
        assert_eq!(settings(&["auto", "--setting", "lzo:4K"]), ["lzo 4K"]);
    }
}
