//! The values of arguments: sizes, units, algorithms, process ids, times.

use std::path::PathBuf;
use std::sync::Arc;

use zfolio_core::budget::WriteBudget;
use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::size::{self, SizeError, parse_stall};
use zfolio_core::swap::AREAS_MAX;
use zfolio_core::zcomp::{self, Choice, Zcomp};
use zfolio_iaa::accelerate::{Accelerate, Named};
use zfolio_pager::spill::{self, Places, PoolLimit};

use super::{Accelerator, Limit, Setting};
use crate::allowance::Allowance;
use crate::dictionary;
use crate::run::RUN_LIMIT_BYTES_MIN;

pub(crate) fn parse_limit_or_auto(given: &str) -> Result<Limit, String> {
    match given {
        "auto" => Ok(Limit::Auto),
        _ => parse_limit(given, "N% or auto").map(Limit::Bytes),
    }
}

/// `else_accepted`: what is, beside a size.
fn parse_limit(given: &str, else_accepted: &str) -> Result<u64, String> {
    let bytes = match given.trim().strip_suffix('%') {
        Some(percent) => Allowance::percentage(given, percent)?,
        None => size::parse(given).map_err(|error| match error {
            SizeError::Malformed { .. } => format!("{error}; or {else_accepted}"),
            _ => error.to_string(),
        })?,
    };
    if bytes < RUN_LIMIT_BYTES_MIN {
        let least = size::display(RUN_LIMIT_BYTES_MIN);
        let size = if given.contains('%') {
            format!(" ({})", size::display(bytes))
        } else {
            String::new()
        };
        return Err(format!("'{given}'{size} is too small; accepted: {least} or more"));
    }
    Ok(bytes)
}

pub(crate) fn parse_accelerator(given: &str) -> Result<Accelerator, String> {
    if given == "none" {
        return Ok(Accelerator(None));
    }
    let parsed = Accelerate::parse(given).map_err(|error| format!("{error}; or none"))?;
    Ok(Accelerator(Some(parsed)))
}

/// Whether so many places can be written to; `option` is what named them.
pub(crate) fn check_places(option: &str, given: usize) -> Result<(), String> {
    let is_few = given <= AREAS_MAX;
    is_few
        .then_some(())
        .ok_or_else(|| format!("{option}: {given} places; accepted: {AREAS_MAX} at most"))
}

/// A place to spill to. Whether it is of use is seen later.
pub(crate) fn parse_spill(given: &str) -> Result<(PathBuf, i32), String> {
    Places::parse(given).map_err(|priority| {
        format!("'{priority}' is not a priority; accepted: -1 to 32767, as in /var/tmp,prio=5")
    })
}

pub(crate) fn parse_spill_limit(given: &str) -> Result<u64, String> {
    spill::parse_bytes(given)
}

pub(crate) fn parse_percent(given: &str) -> Result<u8, String> {
    let percent = PoolLimit::parse_percent(given);
    percent.ok_or_else(|| format!("'{given}' is not a percentage; accepted: 1 to 100"))
}

pub(crate) fn parse_write_budget(given: &str) -> Result<WriteBudget, String> {
    given.parse()
}

pub(crate) fn parse_unit(given: &str) -> Result<UnitOrder, String> {
    let bytes = size::parse(given).map_err(|error| error.to_string())?;
    let order = usize::try_from(bytes).ok().and_then(UnitOrder::from_bytes);
    order.ok_or_else(|| format!("'{given}' is not a unit; accepted: a power of two, 4K to 2M"))
}

/// The same, or one by the accelerator's name.
pub(crate) fn parse_named(given: &str) -> Result<Named<Choice>, String> {
    Named::parse(given, parse_algorithm)
}

/// An algorithm and its parameters. A dictionary is read and tried now, so that the user gets the error.
pub(crate) fn parse_algorithm(given: &str) -> Result<Choice, String> {
    let choice: Choice = given.parse().map_err(|error: zcomp::Error| error.to_string())?;
    choice.try_map(|mut params| {
        if let Some(named) = &params.dictionary {
            let dictionary = dictionary::read(named.path())?;
            params.dictionary = Some(Arc::new(dictionary));
            let smallest = UnitOrder::from_bytes(PAGE_BYTES).expect("a page is a unit");
            Zcomp::new(params.clone(), smallest, 1).map_err(|error| error.to_string())?;
        }
        Ok(params)
    })
}

pub(super) fn parse_pid(given: &str) -> Result<u32, String> {
    match given.parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err(format!(
            "'{given}' is not a process id; accepted: a number, as 'zfolio stat' lists"
        )),
    }
}

/// A setting; what is wrong with its value is said behind its name.
pub(super) fn parse_setting(given: &str) -> Result<Setting, String> {
    let (name, value) = given.split_once('=').unwrap_or_default();
    let setting = match name {
        "limit" => parse_limit(value, "N%").map(Setting::Limit),
        "stall" => parse_stall(value).map(Setting::Stall),
        "max_pool_percent" => parse_percent(value).map(Setting::MaxPoolPercent),
        "accept_threshold_percent" => parse_percent(value).map(Setting::AcceptThresholdPercent),
        "write_budget" => parse_write_budget(value).map(Setting::WriteBudget),
        "algorithm" => parse_asked(value).map(Setting::Algorithm),
        _ => {
            return Err(format!(
                "'{given}' is not a setting; accepted: limit=SIZE|N%, stall=N%, max_pool_percent=N, \
                 accept_threshold_percent=N, write_budget=SIZE[/PERIOD], algorithm=NAME[,level=N][,window=N]"
            ));
        }
    };
    setting.map_err(|error| format!("{name}: {error}"))
}

/// An algorithm that is asked for while a program runs, as a word.
fn parse_asked(given: &str) -> Result<u64, String> {
    let choice: Choice = given.parse().map_err(|error: zcomp::Error| error.to_string())?;
    zcomp::asked::to_word(&choice).ok_or_else(|| {
        format!(
            "'{given}': a dictionary is read when a program starts; accepted: NAME[,level=N][,window=N]"
        )
    })
}

pub(super) fn parse_seconds(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{given}' is not a time; accepted: seconds, 0.01 to 86400")),
    }
}
