//! The settings of a run: from its options, else from the environment, else the defaults.
//!
//! | variable | option |
//! | --- | --- |
//! | `ZFOLIO_LIMIT` | `--limit` |
//! | `ZFOLIO_STALL` | `--stall` |
//! | `ZFOLIO_ALGORITHM` | `--algorithm` |
//! | `ZFOLIO_UNIT` | `--unit` |
//! | `ZFOLIO_ACCELERATE` | `--accelerate` |
//! | `ZFOLIO_SPILL`, `ZFOLIO_SPILL_LIMIT` | `--spill`, one a line, or `none` for `--no-spill`; `--spill-limit` |
//! | `ZFOLIO_MAX_POOL_PERCENT`, `ZFOLIO_ACCEPT_THRESHOLD_PERCENT` | `--max-pool-percent`, `--accept-threshold-percent` |
//! | `ZFOLIO_WRITE_BUDGET` | `--write-budget` |
//! | `ZFOLIO_PER_PROCESS` | `--per-process`, if it is 1 |
//! | `ZFOLIO_STRICT`, `ZFOLIO_QUIET` | `--strict`, `--quiet`, if they are 1 |
//!
//! The library that is loaded into a program reads the same variables. So a `zfolio run` inside
//! another finds the settings of the outer one there. It inherits all but the last row: its
//! program would also have had them without the inner command. But whether to be quiet or strict is
//! decided for each command alone: inside another run (`ZFOLIO_RUN` is set) `ZFOLIO_STRICT` and
//! `ZFOLIO_QUIET` are ignored.

use std::env;

use zfolio_core::page::UnitOrder;
use zfolio_core::size;
use zfolio_core::zcomp::Choice;
use zfolio_iaa::Codes;
use zfolio_iaa::accelerate::{self, Accelerate, Named};

use super::spill::Spill;
use super::{RUN_LIMIT_BYTES_MIN, auto};
use crate::allowance::Allowance;
use crate::arguments::{
    Limit, RunArgs, parse_accelerator, parse_limit_or_auto, parse_named, parse_stall, parse_unit,
};
use crate::failure::Failure;

/// The settings of a run.
#[derive(Debug)]
pub(super) struct Settings {
    /// The limit.
    pub(super) limit_bytes: u64,
    /// The limit follows what machine and cgroup have left; `limit_bytes` is the first.
    pub(super) auto: bool,
    /// The limit is that of all processes together, and not each process's own.
    pub(super) tree: bool,
    /// The share of its time that the program may wait, in millionths; 0: only the limit counts.
    pub(super) stall_ppm: u32,
    /// The algorithm and its parameters.
    pub(super) algorithm: Named<Choice>,
    /// The size of the units that are compressed, if it was given.
    pub(super) unit: Option<UnitOrder>,
    /// What compresses beside the engine's threads.
    pub(super) accelerate: Option<Accelerate>,
    /// Where to spill to.
    pub(super) spill: Spill,
    /// Whether to end a program that cannot be held below its limit.
    pub(super) strict: bool,
    /// Whether to print nothing but errors.
    pub(super) quiet: bool,
    /// The option or variable that set the limit, for a message.
    limit_from: &'static str,
}

impl Settings {
    /// The settings from these options and this process's environment.
    ///
    /// # Errors
    ///
    /// A variable has a value that is not accepted, or the default limit cannot be determined.
    pub(super) fn of(arguments: &RunArgs) -> Result<Settings, Failure> {
        Settings::resolve(arguments, &|name| {
            let value = env::var_os(name)?.to_string_lossy().into_owned();
            Some(value).filter(|value| !value.is_empty())
        })
    }

    fn resolve(
        arguments: &RunArgs,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Settings, Failure> {
        let nested = variable("ZFOLIO_RUN").is_some();
        let flag = |given: bool, name: &'static str| match given || nested {
            true => Ok(given),
            false => from_variable(variable, name, parse_flag).map(|set| set.unwrap_or(false)),
        };
        let per_process = match arguments.per_process {
            true => true,
            false => from_variable(variable, "ZFOLIO_PER_PROCESS", parse_flag)?.unwrap_or(false),
        };
        let (limit, limit_from) = match arguments.limit {
            Some(limit) => (Some(limit), "--limit"),
            None => (from_variable(variable, "ZFOLIO_LIMIT", parse_limit_or_auto)?, "ZFOLIO_LIMIT"),
        };
        let stall_ppm = match arguments.stall {
            Some(ppm) => ppm,
            None => from_variable(variable, "ZFOLIO_STALL", parse_stall)?.unwrap_or(0),
        };
        let algorithm = match &arguments.algorithm {
            Some(algorithm) => Some(algorithm.clone()),
            None => from_variable(variable, "ZFOLIO_ALGORITHM", parse_named)?,
        };
        let unit = match arguments.unit {
            Some(unit) => Some(unit),
            None => from_variable(variable, "ZFOLIO_UNIT", parse_unit)?,
        };
        let accelerate = match arguments.accelerate {
            Some(accelerator) => Some(accelerator),
            None => from_variable(variable, "ZFOLIO_ACCELERATE", parse_accelerator)?,
        };
        let accelerate = accelerate.and_then(|chosen| chosen.0);
        let algorithm = algorithm.unwrap_or(Named { algorithm: Choice::Auto, codes: None });
        let algorithm = match (accelerate, &algorithm.algorithm) {
            (Some(Accelerate::Iaa(..)), Choice::Auto) => Named::on_iaa(Codes::Fixed),
            _ => algorithm,
        };
        let codecs = algorithm.algorithm.codecs();
        accelerate::check(accelerate, algorithm.codes, &codecs, "this run")
            .map_err(Failure::argument)?;
        Ok(Settings {
            accelerate,
            limit_bytes: match limit {
                Some(Limit::Bytes(limit)) => limit,
                Some(Limit::Auto) => auto::first_limit().map_or_else(|| default_limit(50.0), Ok)?,
                None => default_limit(if stall_ppm > 0 { 100.0 } else { 50.0 })?,
            },
            auto: limit == Some(Limit::Auto),
            tree: !per_process,
            stall_ppm,
            algorithm,
            unit,
            spill: Spill::resolve(arguments, variable)?,
            strict: flag(arguments.strict, "ZFOLIO_STRICT")?,
            // --verbose overrides a quiet default.
            quiet: flag(arguments.quiet, "ZFOLIO_QUIET")? && !arguments.verbose,
            limit_from,
        })
    }

    /// Whether the accelerator is there: each process of the run sets it up for itself.
    ///
    /// # Errors
    ///
    /// It is not; what to do.
    pub(super) fn check_accelerator(&self) -> Result<(), Failure> {
        accelerate::open(self.accelerate, self.algorithm.codes).map(drop).map_err(Failure::machine)
    }

    /// A message if the limit is more than the machine or the cgroup allows.
    pub(super) fn excess(&self) -> Option<String> {
        let allowance = Allowance::here().filter(|here| here.bytes < self.limit_bytes)?;
        let (limit, allowed) = (size::display(self.limit_bytes), size::display(allowance.bytes));
        let (from, source) = (self.limit_from, allowance.source.display());
        Some(match allowance.is_machine() {
            true => format!(
                "{from}: {limit} is more than this machine has ({allowed}): it limits nothing"
            ),
            false => format!(
                "{from}: {limit} is more than {source} allows ({allowed}): the kernel may kill the \
                 program before zfolio compresses anything"
            ),
        })
    }
}

/// The value of a variable; an error names the variable.
pub(super) fn from_variable<T>(
    variable: &impl Fn(&str) -> Option<String>,
    name: &'static str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let read = variable(name).map(|value| parse(&value));
    read.transpose()
        .map_err(|error| Failure::argument(format!("{name}: {error} (in the environment)")))
}

fn parse_flag(given: &str) -> Result<bool, String> {
    match given {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err(format!("'{given}' is not a switch; accepted: 1 or 0")),
    }
}

/// `percent` of what the machine or the cgroup allows, in whole MiB.
fn default_limit(percent: f64) -> Result<u64, Failure> {
    let allowance = Allowance::here().ok_or_else(|| {
        Failure::argument(
            "--limit: not given, and /proc/meminfo cannot be read; give one, as in 2G",
        )
    })?;
    let share = allowance.share(percent);
    if share < RUN_LIMIT_BYTES_MIN {
        return Err(Failure::argument(format!(
            "--limit: not given, and {percent} % of what {} allows is {}; accepted: {} or more",
            allowance.source.display(),
            size::display(share),
            size::display(RUN_LIMIT_BYTES_MIN)
        )));
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::Settings;
    use crate::allowance::Allowance;
    use crate::arguments::{Command, RunArgs, parse};
    use crate::failure::Failure;

    fn arguments(line: &str) -> RunArgs {
        let words = ["zfolio"].into_iter().chain(line.split_whitespace()).map(Into::into);
        let Command::Run(run) = parse(words).expect(line).command else { panic!("{line}") };
        run
    }

    fn resolve(line: &str, variables: &[(&str, &str)]) -> Result<Settings, Failure> {
        let variable = |name: &str| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        };
        Settings::resolve(&arguments(line), &variable)
    }

    #[test]
    fn an_option_beats_a_variable_and_a_variable_the_default() {
        let variables = [
            ("ZFOLIO_LIMIT", "64M"),
            ("ZFOLIO_ALGORITHM", "lz4"),
            ("ZFOLIO_UNIT", "8K"),
            ("ZFOLIO_STRICT", "1"),
            ("ZFOLIO_QUIET", "1"),
        ];
        let values = |settings: &Settings| {
            let unit = settings.unit.map_or(0, |unit| unit.bytes() >> 10);
            let algorithm = settings.algorithm.to_string();
            (settings.limit_bytes >> 20, algorithm, unit, settings.strict, settings.quiet)
        };
        let settings = resolve("run true", &variables).unwrap();
        assert_eq!(values(&settings), (64, "lz4".into(), 8, true, true));
        let line = "run -l 1G -a zstd,level=3 -u 64K -v true";
        let settings = resolve(line, &variables).unwrap();
        assert_eq!(values(&settings), (1024, "zstd,level=3".into(), 64, true, false));
        let settings = resolve("run -l 32M true", &[]).unwrap();
        assert_eq!(values(&settings), (32, "auto".into(), 0, false, false));
        let switched_off = [("ZFOLIO_STRICT", "0"), ("ZFOLIO_QUIET", "0")];
        assert!(!resolve("run -l 32M true", &switched_off).unwrap().strict);
        let stall = |line: &str, set: &[(&str, &str)]| resolve(line, set).unwrap().stall_ppm;
        assert_eq!(stall("run -l 32M --stall 0.5% true", &[("ZFOLIO_STALL", "2%")]), 5000);
        assert_eq!(stall("run -l 32M true", &[("ZFOLIO_STALL", "2%")]), 20_000);
        let alone = resolve("run --stall 1% true", &[]).unwrap();
        let auto = resolve("run -l auto true", &[]).unwrap();
        let all = Allowance::here().unwrap().share(100.0);
        assert_eq!((alone.limit_bytes, alone.auto), (all, false));
        assert!(auto.auto && auto.limit_bytes < all, "some is left to others");
        let tree = |line: &str, set: &[(&str, &str)]| resolve(line, set).unwrap().tree;
        assert!(tree("run -l 32M true", &[]) && !tree("run -l 32M --per-process true", &[]));
        assert!(!tree("run -l 32M true", &[("ZFOLIO_PER_PROCESS", "1")]));
    }

    #[test]
    fn an_inner_run_has_the_outer_ones_limit_and_a_voice_of_its_own() {
        let outer = [
            ("ZFOLIO_RUN", "4711"),
            ("ZFOLIO_LIMIT", "67108864"),
            ("ZFOLIO_PER_PROCESS", "1"),
            ("ZFOLIO_STRICT", "1"),
            ("ZFOLIO_QUIET", "1"),
        ];
        let inner = resolve("run true", &outer).unwrap();
        assert_eq!((inner.limit_bytes, inner.strict, inner.quiet), (64 << 20, false, false));
        assert!(!inner.tree);
        let asked = resolve("run --strict -q true", &outer).unwrap();
        assert!(asked.strict && asked.quiet);
    }

    #[test]
    fn no_accelerator_is_a_choice_against_the_environment() {
        let accelerate = |line: &str, value: &str| {
            resolve(line, &[("ZFOLIO_ACCELERATE", value)]).unwrap().accelerate.is_some()
        };
        assert!(accelerate("run -l 32M true", "cpu"));
        assert!(!accelerate("run -l 32M --accelerate none true", "cpu"));
        assert!(!accelerate("run -l 32M true", "none"));
    }

    #[test]
    fn an_accelerator_brings_its_algorithm() {
        let algorithm = |line: &str, set: &[(&str, &str)]| {
            resolve(line, set).map(|settings| settings.algorithm.to_string())
        };
        let line = "run -l 32M --accelerate iaa";
        assert_eq!(algorithm(&format!("{line} true"), &[]).unwrap(), "deflate-iaa");
        // An inner run finds the outer one's default in its environment.
        let outer = [("ZFOLIO_ALGORITHM", "auto")];
        assert_eq!(algorithm(&format!("{line} true"), &outer).unwrap(), "deflate-iaa");
        for own in ["deflate-iaa-dynamic", "deflate,level=3,window=12"] {
            assert_eq!(algorithm(&format!("{line} -a {own} true"), &[]).unwrap(), own);
        }
        for (line, set) in [
            ("run -l 32M --accelerate iaa -a zstd true", &[][..]),
            ("run -l 32M true", &[("ZFOLIO_ACCELERATE", "iaa"), ("ZFOLIO_ALGORITHM", "zstd")][..]),
            ("run -l 32M -a deflate-iaa true", &[]),
            ("run -l 32M -a deflate-iaa --accelerate cpu true", &[]),
        ] {
            let failure = algorithm(line, set).expect_err(line);
            let told = failure.to_string();
            assert!(failure.status() == 2 && told.contains("deflate,window=12"), "{told}");
        }
    }

    #[test]
    fn a_bad_variable_is_named() {
        let cases = [
            ("ZFOLIO_LIMIT", "12Q", "'12Q' is not a size; accepted:"),
            ("ZFOLIO_LIMIT", "1M", "'1M' is too small; accepted: 32M or more"),
            ("ZFOLIO_LIMIT", "200%", "'200%' is not a share; accepted: 1% to 100%"),
            ("ZFOLIO_ALGORITHM", "rar", "'rar'"),
            ("ZFOLIO_UNIT", "5K", "'5K' is not a unit; accepted: a power of two, 4K to 2M"),
            ("ZFOLIO_PER_PROCESS", "yes", "'yes' is not a switch; accepted: 1 or 0"),
            ("ZFOLIO_STRICT", "yes", "'yes' is not a switch; accepted: 1 or 0"),
            ("ZFOLIO_QUIET", "2", "'2' is not a switch"),
        ];
        for (name, value, expected) in cases {
            let failure = resolve("run true", &[(name, value)]).expect_err(name);
            assert_eq!(failure.status(), 2);
            let line = failure.to_string();
            assert!(
                line.starts_with(&format!("zfolio: {name}: ")) && line.contains(expected),
                "{line}"
            );
        }
        // A variable that an option overrides is not read.
        assert!(resolve("run -l 64M true", &[("ZFOLIO_LIMIT", "12Q")]).is_ok());
    }

    #[test]
    fn a_limit_above_the_machine_is_worth_a_line() {
        let excess = resolve("run -l 500T true", &[]).unwrap().excess().expect("no such machine");
        assert!(excess.starts_with("--limit: 500T is more than"), "{excess}");
        assert_eq!(resolve("run -l 32M true", &[]).unwrap().excess(), None);
    }
}
