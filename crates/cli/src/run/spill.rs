//! Where a run spills to: `--spill`, `--spill-limit`, `--no-spill`, and what they are when nobody says.
//!
//! Each process opens a file of its own there, once it needs one. What all processes have on disk together stays
//! below the limit.

use std::ffi::OsString;
use std::path::PathBuf;

use zfolio_pager::spill::{self, Places, Refusal};

use crate::arguments::{RunArgs, parse_spill, parse_spill_limit};
use crate::failure::Failure;

use super::settings::from_variable;

/// Where files go that nobody has chosen a place for: not `/tmp`, which is often in memory.
const DEFAULT: &str = "/var/tmp";

/// The directory where nobody has chosen one: `TMPDIR`, if that is set.
pub(crate) fn directory(temporary: Option<String>) -> PathBuf {
    temporary.filter(|path| !path.is_empty()).map_or_else(|| DEFAULT.into(), PathBuf::from)
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Spill {
    /// Directories and devices, with priorities. None: what does not compress stays in memory.
    pub(super) paths: Vec<(PathBuf, i32)>,
    /// How much may be there in all.
    pub(super) limit_bytes: u64,
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
                Spill::given(paths, limit_bytes, "ZFOLIO_SPILL")
            }
            None => Ok(Spill::by_default(variable("TMPDIR"), limit_bytes)),
        }
    }

    fn given(
        paths: Vec<(PathBuf, i32)>,
        limit_bytes: Option<u64>,
        from: &str,
    ) -> Result<Spill, Failure> {
        let spill = Spill::of(paths, limit_bytes);
        spill.map_err(|refusal| Failure::argument(format!("{from}: {refusal}")))
    }

    fn of(paths: Vec<(PathBuf, i32)>, limit_bytes: Option<u64>) -> Result<Spill, Refusal> {
        let absolute = |(path, priority): (PathBuf, i32)| {
            (std::path::absolute(&path).unwrap_or(path), priority)
        };
        let paths: Vec<_> = paths.into_iter().map(absolute).collect();
        let mut room = 0_u64;
        for (path, _) in &paths {
            room = room.saturating_add(spill::room(path)?);
        }
        Ok(Spill { paths, limit_bytes: limit_bytes.unwrap_or(room), why_not: None })
    }

    /// What nobody has asked for is left out where it cannot be had.
    fn by_default(directory: Option<String>, limit_bytes: Option<u64>) -> Spill {
        let path = self::directory(directory);
        let why_not = |refusal: Refusal| Some(refusal.to_string());
        Spill::of(vec![(path, 0)], limit_bytes)
            .unwrap_or_else(|refusal| Spill { why_not: why_not(refusal), ..Spill::default() })
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
