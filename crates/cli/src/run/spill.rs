//! Where a run spills to, and how much: `--spill`, `--spill-limit`, `--no-spill`, `--max-pool-percent`,
//! `--accept-threshold-percent`, `--write-budget`, and what they are when nobody says.
//!
//! Each process opens a file of its own there, or takes a part of the device, once it needs one. What all processes
//! have on disk together stays below the limit, and what they write within the budget.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use zfolio_core::budget::WriteBudget;
use zfolio_pager::spill::{self, Places, PoolLimit, Refusal};

use crate::arguments::{
    RunArgs, check_places, parse_percent, parse_spill, parse_spill_limit, parse_write_budget,
};
use crate::failure::Failure;

use super::settings::from_variable;

/// Where files go that nobody has chosen a place for: not `/tmp`, which is often in memory.
const DEFAULT: &str = "/var/tmp";

/// The directory where nobody has chosen one: `TMPDIR`, if that is set.
pub(crate) fn directory(temporary: Option<String>) -> PathBuf {
    temporary.filter(|path| !path.is_empty()).map_or_else(|| DEFAULT.into(), PathBuf::from)
}

/// How much of the limit compressed memory may take, and how much may be written.
fn rules(
    arguments: &RunArgs,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<(PoolLimit, WriteBudget), Failure> {
    let percent = |given: Option<u8>, name: &'static str, default: u8| match given {
        Some(percent) => Ok(percent),
        None => from_variable(variable, name, parse_percent).map(|set| set.unwrap_or(default)),
    };
    let RunArgs { max_pool_percent, accept_threshold_percent, write_budget, .. } = arguments;
    let pool = PoolLimit::default();
    let pool = PoolLimit {
        max_pool_percent: percent(
            *max_pool_percent,
            "ZFOLIO_MAX_POOL_PERCENT",
            pool.max_pool_percent,
        )?,
        accept_threshold_percent: percent(
            *accept_threshold_percent,
            "ZFOLIO_ACCEPT_THRESHOLD_PERCENT",
            pool.accept_threshold_percent,
        )?,
    };
    let budget = match write_budget {
        Some(budget) => Some(*budget),
        None => from_variable(variable, "ZFOLIO_WRITE_BUDGET", parse_write_budget)?,
    };
    Ok((pool, budget.unwrap_or_default()))
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Spill {
    /// Directories and devices, with priorities. None: what does not compress stays in memory.
    pub(super) paths: Vec<(PathBuf, i32)>,
    /// How much may be there in all.
    pub(super) limit_bytes: u64,
    /// How much of the limit compressed memory may take.
    pub(super) pool: PoolLimit,
    /// How much may be written.
    pub(super) write_budget: WriteBudget,
    /// Why there is none, if nobody has said so.
    pub(super) why_not: Option<String>,
}

impl Spill {
    /// From the options, else from the environment, else the default directory.
    ///
    /// # Errors
    ///
    /// What was given cannot be spilled to.
    pub(super) fn resolve(
        arguments: &RunArgs,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Spill, Failure> {
        let (pool, write_budget) = rules(arguments, variable)?;
        let spill = Spill { pool, write_budget, ..Spill::resolve_places(arguments, variable)? };
        let given = [
            ("--max-pool-percent", arguments.max_pool_percent.is_some()),
            ("--accept-threshold-percent", arguments.accept_threshold_percent.is_some()),
            ("--write-budget", arguments.write_budget.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given && !spill.is_any()) {
            None => Ok(spill),
            Some((name, _)) => {
                let why = spill.why_not.as_deref().unwrap_or("ZFOLIO_SPILL is none");
                Err(Failure::argument(format!(
                    "{name}: there is no disk to write to ({why}); accepted: with --spill DIR"
                )))
            }
        }
    }

    fn resolve_places(
        arguments: &RunArgs,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Spill, Failure> {
        let limit_bytes = match arguments.spill_limit {
            Some(bytes) => Some(bytes),
            None => from_variable(variable, "ZFOLIO_SPILL_LIMIT", parse_spill_limit)?,
        };
        if arguments.no_spill {
            return Ok(Spill::default());
        }
        if !arguments.spill.is_empty() {
            return Spill::given(arguments.spill.clone(), limit_bytes, "--spill");
        }
        match variable("ZFOLIO_SPILL") {
            Some(none) if none == Places::NONE => Ok(Spill::default()),
            Some(lines) => {
                let paths = lines.lines().map(parse_spill).collect::<Result<Vec<_>, _>>();
                let paths =
                    paths.map_err(|error| Failure::argument(format!("ZFOLIO_SPILL: {error}")))?;
                match Spill::given(paths, limit_bytes, "ZFOLIO_SPILL") {
                    // A run in a run: the outer one has the device, and nobody has asked the inner one to use it.
                    Err(_) if variable("ZFOLIO_RUN").is_some() => {
                        Ok(Spill::by_default(variable("TMPDIR"), limit_bytes))
                    }
                    given => given,
                }
            }
            None => Ok(Spill::by_default(variable("TMPDIR"), limit_bytes)),
        }
    }

    fn given(
        paths: Vec<(PathBuf, i32)>,
        limit_bytes: Option<u64>,
        from: &str,
    ) -> Result<Spill, Failure> {
        check_places(from, paths.len()).map_err(Failure::argument)?;
        let spill = Spill::of(paths, limit_bytes);
        spill.map_err(|refusal| Failure::argument(format!("{from}: {refusal}")))
    }

    fn of(paths: Vec<(PathBuf, i32)>, limit_bytes: Option<u64>) -> Result<Spill, String> {
        let absolute = |(path, priority): (PathBuf, i32)| {
            (std::path::absolute(&path).unwrap_or(path), priority)
        };
        let paths: Vec<_> = paths.into_iter().map(absolute).collect();
        let mut room = 0_u64;
        for (path, _) in &paths {
            // The library reads the paths from ZFOLIO_SPILL, one a line.
            if path.as_os_str().as_bytes().contains(&b'\n') {
                let shown = path.display();
                return Err(format!("'{shown}' has a line break; accepted: a path without one"));
            }
            let refused = |refusal: Refusal| refusal.to_string();
            room = room.saturating_add(spill::room(path).map_err(refused)?);
        }
        Ok(Spill { paths, limit_bytes: limit_bytes.unwrap_or(room), ..Spill::default() })
    }

    /// What nobody has asked for is left out where it cannot be had.
    fn by_default(directory: Option<String>, limit_bytes: Option<u64>) -> Spill {
        let path = self::directory(directory);
        Spill::of(vec![(path, 0)], limit_bytes)
            .unwrap_or_else(|why| Spill { why_not: Some(why), ..Spill::default() })
    }

    /// Claims the devices for this run, as long as the answer or a copy of it is open. They are opened only once a
    /// process needs them.
    ///
    /// # Errors
    ///
    /// Somebody else has one.
    pub(super) fn claim(&self, arguments: &RunArgs) -> Result<Vec<Option<OwnedFd>>, Failure> {
        let from = if arguments.spill.is_empty() { "ZFOLIO_SPILL" } else { "--spill" };
        let refused = |refusal| Failure::argument(format!("{from}: {refusal}"));
        self.paths.iter().map(|(path, _)| spill::claim(path).map_err(refused)).collect()
    }

    /// Whether there is a place.
    pub(super) fn is_any(&self) -> bool {
        !self.paths.is_empty()
    }

    /// As the library reads it.
    pub(super) fn variable(&self) -> OsString {
        let mut lines = OsString::new();
        for (path, priority) in &self.paths {
            let line = if lines.is_empty() { "" } else { "\n" };
            lines.push(line);
            lines.push(path);
            if *priority != 0 {
                lines.push(format!(",prio={priority}"));
            }
        }
        if lines.is_empty() { Places::NONE.into() } else { lines }
    }
}
