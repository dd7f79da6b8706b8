//! The settings of `zfolio run`, read from the environment.

use std::path::PathBuf;
use std::sync::OnceLock;

use zfolio_core::page::UnitOrder;
use zfolio_core::size;
use zfolio_core::zcomp::{Choice, Params};
use zfolio_iaa::Codes;
use zfolio_iaa::accelerate::{self, Accelerate, Named};
use zfolio_pager::spill::{Places, PoolLimit};
use zfolio_pager::{Config, Mode, fatal};
use zfolio_workers::Accelerated;

/// The settings, or `None` inside if this process is not to be managed.
static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();

/// What the variables of the environment say. `zfolio run` has checked them already.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Without what accelerates: [`Settings::accelerated`] has it.
    pub(crate) config: Config,
    accelerate: Option<Accelerate>,
    /// How an accelerator is to compress.
    codes: Option<Codes>,
    /// The PID of `zfolio run`.
    pub(crate) run: u64,
    /// For `zfolio suggest`: the limit follows the need, at this many thousandths of it. 0: the limit stays.
    pub(crate) follow_per_mille: u64,
    /// The limit is that of all processes of the run together.
    pub(crate) tree: bool,
    /// The limit may fall far while the program runs (`--limit auto`).
    pub(crate) falls: bool,
}

impl Settings {
    /// The algorithm as it was given: by its own name, or by the accelerator's.
    pub(crate) fn algorithm(&self) -> String {
        let (algorithm, codes) = (self.config.algorithm.clone(), self.codes);
        Named { algorithm, codes }.to_string()
    }

    /// The engine's settings, with what accelerates set up, on a thread of the engine's: devices are opened in its
    /// table of files. Without a device that was there when the run began, software does its work until there is one.
    pub(crate) fn accelerated(&self) -> Config {
        let (accelerated, found) = accelerate::prepare(self.accelerate, self.codes);
        if let Err(why) = found {
            fatal::print(format_args!("{why}: compressed by software until a queue can be used"));
        }
        Config { accelerated, ..self.config.clone() }
    }

    /// Whether a process may give memory back long before it has half of its limit.
    pub(crate) fn is_early(&self) -> bool {
        self.falls || self.config.stall_ppm > 0
    }
}

/// Reads the environment, once.
pub(crate) fn read() {
    SETTINGS.get_or_init(from_environment);
}

/// The settings, if this process is managed.
pub(crate) fn get() -> Option<&'static Settings> {
    SETTINGS.get().and_then(Option::as_ref)
}

fn from_environment() -> Option<Settings> {
    let text = |name| std::env::var(name).ok();
    let percent = |name| text(name).and_then(|value| PoolLimit::parse_percent(&value));
    let number = |name| text(name).and_then(|value| value.parse::<u64>().ok());
    let limit_bytes = number("ZFOLIO_LIMIT")?;
    // No message from here: it would need a system call that Valgrind does not know, and reports.
    // `zfolio run` prints that the tool was not managed.
    if text("LD_PRELOAD").is_some_and(|preload| is_valgrind(&preload)) {
        return None;
    }
    let unit =
        number("ZFOLIO_UNIT").and_then(|bytes| UnitOrder::from_bytes(usize::try_from(bytes).ok()?));
    let named = |name: String| Named::<Choice>::parse(&name, str::parse).ok();
    let named = text("ZFOLIO_ALGORITHM").and_then(named);
    let codes = named.as_ref().and_then(|named| named.codes);
    let algorithm = named.map(|named| usable(named.algorithm)).unwrap_or_default();
    let accelerate = text("ZFOLIO_ACCELERATE")
        .and_then(|accelerator| Accelerate::parse(&accelerator).ok())
        .filter(|it| accelerate::check(Some(*it), codes, &algorithm.codecs(), "").is_ok());
    let config = Config {
        limit_bytes,
        algorithm,
        unit: unit.unwrap_or(UnitOrder::DEFAULT),
        wide_units: unit.is_none(),
        mode: Mode::Handler,
        whole_process: true,
        strict: text("ZFOLIO_STRICT").is_some_and(|value| value == "1"),
        stall_ppm: text("ZFOLIO_STALL")
            .and_then(|value| size::parse_stall(&value).ok())
            .unwrap_or(0),
        spill: Places {
            paths: paths(text("ZFOLIO_SPILL")),
            limit_bytes: number("ZFOLIO_SPILL_LIMIT"),
            pool: PoolLimit {
                max_pool_percent: percent("ZFOLIO_MAX_POOL_PERCENT")
                    .unwrap_or(PoolLimit::default().max_pool_percent),
                accept_threshold_percent: percent("ZFOLIO_ACCEPT_THRESHOLD_PERCENT")
                    .unwrap_or(PoolLimit::default().accept_threshold_percent),
            },
            write_budget: text("ZFOLIO_WRITE_BUDGET")
                .and_then(|budget| budget.parse().ok())
                .unwrap_or_default(),
        },
        accelerated: Accelerated::NONE,
        // For tests and measurements; the number of CPUs says how many there are.
        assistants: number("ZFOLIO_ASSISTANTS").and_then(|count| usize::try_from(count).ok()),
    };
    let run = number("ZFOLIO_RUN").unwrap_or(0);
    let follow_per_mille = number("ZFOLIO_FOLLOW").unwrap_or(0).min(1000);
    let per_process = text("ZFOLIO_PER_PROCESS").is_some_and(|value| value == "1");
    let tree = !per_process && run != 0 && follow_per_mille == 0;
    let falls = text("ZFOLIO_FALLS").is_some_and(|value| value == "1");
    Some(Settings { config, accelerate, codes, run, follow_per_mille, tree, falls })
}

/// Where to spill to: a path a line.
fn paths(paths: Option<String>) -> Vec<(PathBuf, i32)> {
    let paths = paths.filter(|paths| paths != Places::NONE).unwrap_or_default();
    paths.lines().filter_map(|line| Places::parse(line).ok()).collect()
}

/// Whether `LD_PRELOAD` contains a library of Valgrind.
///
/// Valgrind's tools replace `malloc`, and keep their own record of the mappings. This library would not see the
/// program's memory, and its raw system calls would contradict that record.
fn is_valgrind(preload: &str) -> bool {
    preload
        .split([':', ' '])
        .any(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("vgpreload_")))
}

/// The algorithm with its dictionary, or without it if the file cannot be read. `zfolio run` has read the file
/// before, so its absence now is reported, but does not stop the program.
fn usable(algorithm: Choice) -> Choice {
    let without = match &algorithm {
        Choice::Fixed(params) => Choice::Fixed(Params { dictionary: None, ..params.clone() }),
        Choice::Auto => Choice::Auto,
    };
    algorithm.try_map(zfolio_pager::with_dictionary).unwrap_or_else(|error| {
        fatal::print(format_args!("{error}; compressed without it"));
        without
    })
}

#[cfg(test)]
mod tests {
    use super::is_valgrind;

    #[test]
    fn valgrind_is_known_by_the_names_of_its_libraries() {
        let tool = "/usr/libexec/valgrind/vgpreload_memcheck-amd64-linux.so";
        assert!(is_valgrind(tool));
        assert!(is_valgrind(&format!("/lib/one.so:{tool}")));
        assert!(is_valgrind(&format!("/lib/one.so {tool}")));
        assert!(!is_valgrind(""));
        assert!(!is_valgrind("/opt/vgpreload_/libzfolio_preload.so"));
    }
}
