//! `zfolio suggest`: runs a program once, and estimates how long it would take at other limits.
//!
//! A limit far below the need shows most and takes longest, and the need is not known beforehand.
//! So the limit follows the program: it is a share of what the program needs at each moment, and
//! more while the program mostly waits (`zfolio_pager`'s `follow.rs`). The rest is computed from
//! what it waited for, by distance ([`curve`]).
//!
//! The program runs under `zfolio run`, as a child of this process: signals, exit status and
//! refusals are those of that command.

mod curve;
mod observe;

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use zfolio_bench::plot::{Axis, Plot, STRONG, WEAK};
use zfolio_core::size;
use zfolio_sys::files;
use zfolio_sys::probe::child::{self, Change, Signals};

use crate::arguments::SuggestArgs;
use crate::duration;
use crate::failure::Failure;
use crate::output::escaped;
use crate::table::Table;
use curve::{Curve, Point};
use observe::Observed;

/// The limit at the start of a run; a program that stays below it is not analysed.
const FIRST_LIMIT_BYTES: u64 = 64 << 20;

/// The result of a second run at the recommended limit.
struct Verified {
    elapsed_ns: u64,
    stall_ns: u64,
}

/// Runs a program once, and recommends a limit for it.
///
/// # Errors
///
/// If it cannot be run, or if a result cannot be written.
pub(crate) fn suggest(arguments: &SuggestArgs) -> Result<ExitCode, Failure> {
    if let Some(file) = &arguments.plot {
        check_writable(file).map_err(|error| {
            let shown = file.display();
            Failure::argument(format!(
                "--plot: '{shown}' cannot be written: {error}; accepted: a file that can be"
            ))
        })?;
    }
    let signals = observe::signals()?;
    // With --json, standard output contains only JSON; the program writes to standard error.
    let json = arguments.json.then(files::lend_output).transpose();
    let json = json.map_err(|error| Failure::machine(format!("standard output: {error}")))?;
    let start = FIRST_LIMIT_BYTES;
    let observed = observed(&signals, arguments, start, u64::from(arguments.share) * 10)?;
    let Some(report) = &observed.report else {
        // The program was not run; `zfolio run` has printed why.
        return Ok(status(observed.change));
    };
    let name = arguments.program.first().map(|name| name.to_string_lossy().into_owned());
    let name = escaped(&name.unwrap_or_default());
    let kernel_max = report["kernel_resident_bytes_max"].as_u64().unwrap_or(0);
    let change = observed.change;
    let curve = Curve::new(observed.processes, observed.elapsed_ns, observed.ran_ns);
    if curve.need_bytes() == 0 {
        let story = below_the_first(&name, kernel_max);
        let result = as_json(&curve, &[], None, None);
        return finish(json, &result, &story, change);
    }
    let best = curve.recommended(u64::from(arguments.slowdown) * 10);
    if let Some(file) = &arguments.plot {
        let drawn = fs::write(file, draw(&name, &curve, best));
        drawn.map_err(|error| {
            Failure::output(format!("--plot: '{}' cannot be written: {error}", file.display()))
        })?;
    }
    let verified = match arguments.verify {
        true => Some(verify(&signals, arguments, best)?),
        false => None,
    };
    let points = curve.points(u64::from(arguments.points));
    let result = as_json(&curve, &points, Some(best), verified.as_ref());
    let story = story(&name, arguments, &curve, &points, best, verified.as_ref());
    finish(json, &result, &story, change)
}

/// Whether a file can be written. What is there stays, and nothing is made, until there is a curve: the program may be
/// refused.
fn check_writable(file: &Path) -> io::Result<()> {
    match fs::OpenOptions::new().append(true).create_new(true).open(file) {
        Ok(_) => fs::remove_file(file),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::OpenOptions::new().append(true).create(true).open(file).map(drop)
        }
        Err(error) => Err(error),
    }
}

fn observed(
    signals: &Signals,
    arguments: &SuggestArgs,
    limit_bytes: u64,
    follow_per_mille: u64,
) -> Result<Observed, Failure> {
    let mut options: Vec<OsString> = vec![
        "--per-process".into(),
        "--limit".into(),
        limit_bytes.to_string().into(),
        "--algorithm".into(),
        arguments.algorithm.to_string().into(),
    ];
    // A unit that is given takes the choice between several sizes from the run.
    if let Some(unit) = arguments.unit {
        options.extend(["--unit".into(), unit.bytes().to_string().into()]);
    }
    observe::run(signals, options, &arguments.program, follow_per_mille)
}

fn verify(signals: &Signals, arguments: &SuggestArgs, best: Point) -> Result<Verified, Failure> {
    let again = observed(signals, arguments, best.limit_bytes, 0)?;
    let processes = again.report.as_ref().and_then(|report| report["processes"].as_array());
    let stall = |process: &Value| process["figures"]["stall_ns"].as_u64().unwrap_or(0);
    let stall_ns = processes.map_or(0, |processes| processes.iter().map(stall).sum());
    Ok(Verified { elapsed_ns: again.elapsed_ns, stall_ns })
}

/// The end of the program as an exit status. This process does not die of the program's signal,
/// since it has printed its result.
fn status(change: Change) -> ExitCode {
    let status = match change {
        Change::Exited(status) => status,
        Change::Died(signal) | Change::Dumped(signal) | Change::Stopped(signal) => 128 + signal,
    };
    ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX))
}

fn finish(
    json: Option<fs::File>,
    result: &Value,
    story: &str,
    change: Change,
) -> Result<ExitCode, Failure> {
    match json {
        Some(mut output) => writeln!(output, "{result:#}")
            .map_err(|error| Failure::output(format!("standard output: {error}")))?,
        // The reader may have closed the pipe.
        None => io::stderr().write_all(story.as_bytes()).unwrap_or_default(),
    }
    match change {
        // Ctrl-C was meant for the program; the user wants the curve of the run so far.
        Change::Died(signal) | Change::Dumped(signal) if signal != libc::SIGINT => {
            child::die_of(signal)
        }
        change => Ok(status(change)),
    }
}

fn below_the_first(name: &str, kernel_max: u64) -> String {
    format!(
        "zfolio: {name} stayed below {}: peak {}. Nothing was compressed, so that nothing is known \
         about lower limits; recommended: --limit {}\n",
        size::display(FIRST_LIMIT_BYTES),
        size::display(kernel_max),
        size::display(FIRST_LIMIT_BYTES)
    )
}

/// A limit as on the command line, in whole MiB.
fn limit(bytes: u64) -> String {
    format!("{}M", bytes >> 20)
}

/// The time as a multiple of the time without a limit, with two decimals.
fn slower(time_ns: u64, work_ns: u64) -> String {
    let hundredths = u128::from(time_ns) * 100 / u128::from(work_ns.max(1));
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

fn story(
    name: &str,
    arguments: &SuggestArgs,
    curve: &Curve,
    points: &[Point],
    best: Point,
    verified: Option<&Verified>,
) -> String {
    let work_ns = curve.work_ns();
    let mut text = format!(
        "zfolio: {name} needed {} and was observed with {} of it at the end: it took {}, and its \
         threads waited {}\n",
        limit(curve.need_bytes()),
        limit(curve.observed()),
        duration::display(curve.elapsed_ns),
        duration::display(curve.stall_ns()),
    );
    let mut table = Table::new(&["LIMIT", "TIME", "SLOWER", "WAITING", "<"]);
    let mut rows = points.to_vec();
    if !rows.contains(&best) {
        rows.push(best);
        rows.sort_by_key(|point| point.limit_bytes);
    }
    for point in rows {
        table.push(vec![
            limit(point.limit_bytes),
            duration::display(point.time_ns),
            slower(point.time_ns, work_ns),
            duration::display(point.waiting_ns),
            if point == best { "<- recommended".to_owned() } else { String::new() },
        ]);
    }
    text += &table.to_string();
    // Each process was observed with a limit of its own.
    let per_process = if curve.processes().count() > 1 { "--per-process " } else { "" };
    text += &format!(
        "zfolio: recommended: {per_process}--limit {}, at most {} % slower than with all its memory ({} expected)\n",
        limit(best.limit_bytes),
        arguments.slowdown,
        duration::display(best.time_ns)
    );
    if best.limit_bytes == curve.observed() && arguments.share > 10 {
        text += &format!(
            "zfolio: a lower limit may do as well: --share {} shows more\n",
            arguments.share / 2
        );
    }
    if let Some(verified) = verified {
        text += &format!(
            "zfolio: run again with {per_process}--limit {}: it took {} ({} expected) and waited {} ({} expected)\n",
            limit(best.limit_bytes),
            duration::display(verified.elapsed_ns),
            duration::display(best.time_ns),
            duration::display(verified.stall_ns),
            duration::display(best.waiting_ns)
        );
    }
    text
}

/// `best`: none if the program stayed below the first limit, so that nothing is known of other limits.
fn as_json(
    curve: &Curve,
    points: &[Point],
    best: Option<Point>,
    verified: Option<&Verified>,
) -> Value {
    let point = |point: &Point| {
        json!({
            "limit_bytes": point.limit_bytes,
            "time_ns": point.time_ns,
            "waiting_ns": point.waiting_ns,
        })
    };
    let known = |value: u64| best.map(|_| value);
    json!({
        "need_bytes": known(curve.need_bytes()),
        "observed_bytes": known(curve.observed()),
        "elapsed_ns": curve.elapsed_ns,
        "stall_ns": known(curve.stall_ns()),
        "ran_ns": curve.ran_ns,
        "without_limit_ns": known(curve.work_ns()),
        "points": points.iter().map(point).collect::<Vec<_>>(),
        "recommended": best.as_ref().map(point),
        "recommended_bytes": best.map_or(FIRST_LIMIT_BYTES, |best| best.limit_bytes),
        "verified": verified.map(|verified| {
            json!({ "time_ns": verified.elapsed_ns, "waiting_ns": verified.stall_ns })
        }),
    })
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The curve in fine steps, with the recommended limit, as a drawing.
fn draw(name: &str, curve: &Curve, best: Point) -> String {
    let points = curve.points(200);
    let longest = points.iter().map(|point| point.time_ns).max().unwrap_or(0);
    let x = Axis {
        name: "limit, MiB",
        from: mib(curve.observed()),
        to: mib(curve.ample()),
        logarithmic: false,
    };
    let y = Axis { name: "seconds", from: 0.0, to: seconds(longest) * 1.1, logarithmic: false };
    let title =
        format!("{name}: time expected at each limit (needs {} MiB)", mib(curve.need_bytes()));
    let mut plot = Plot::new(&title, x, y);
    let without = seconds(curve.work_ns());
    plot.line(&[(x.from, without), (x.to, without)], WEAK);
    let line: Vec<(f64, f64)> =
        points.iter().map(|point| (mib(point.limit_bytes), seconds(point.time_ns))).collect();
    plot.line(&line, STRONG);
    let label = format!("--limit {}", limit(best.limit_bytes));
    plot.point(mib(best.limit_bytes), seconds(best.time_ns), STRONG, &label);
    plot.finish()
}
