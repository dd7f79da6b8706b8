//! `zfolio bench replacement`: how often replacement policies miss, on the accesses of programs.
//!
//! # What is counted
//!
//! A trace is a list of accesses to pages. Each policy gets room for a share of the trace's pages,
//! and the accesses one after the other. The first access to a page misses with every policy; the
//! other misses are **refaults**. The table has the optimum's refaults, and those of each policy
//! divided by the optimum's. The counts depend on the traces alone: neither the machine nor its
//! load matters.
//!
//! LRU, CLOCK, S3-FIFO, ARC and LIRS see every access, or a bit that every access sets. zfolio sees
//! only faults.

mod arc;
mod clock;
mod generate;
mod lirs;
mod lru;
mod opt;
mod order;
mod policy;
mod programs;
mod record;
mod s3_fifo;
mod table;
mod trace;
mod zfolio;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use zfolio_core::number;
use zfolio_core::testing::recording;

use crate::compare::{Failure, go_on, print};
use crate::corpus::Output;
use crate::os;
use crate::scratch::Scratch;
use policy::Name;
use table::{Row, Table};
use trace::Trace;
use zfolio::Rule;

pub(crate) const HELP: &str = "\
Without --trace the traces are generated ones (loop, uniform, zipf, scan and hot set, phases), and,
if valgrind is installed, recordings of small runs of python3, sort, perl and sqlite3.

--policy zfolio may have parameters that try other rules, each after a comma: enter=probation|main
(where a page goes that did not come back soon), ghosts=both|probation|all, staging=N and
probation=N (1/N of the capacity), folio=N (pages of a folio), rescue=folio|page, watch=N (what is
written while it is among the oldest 1/N of a queue stays for another turn).

Examples:
  zfolio bench replacement
  zfolio bench replacement --record perl.trace -- perl -e 'print 1 for 1 .. 1000'
  zfolio bench replacement --trace perl.trace --share 1/2 --policy lru --policy zfolio,staging=16";

/// Arguments of `zfolio bench replacement`.
#[derive(Args, Debug)]
pub(crate) struct ReplacementArgs {
    /// Record the accesses of PROGRAM with valgrind, and write them to a file
    #[arg(long, value_name = "FILE", requires = "program")]
    record: Option<PathBuf>,
    /// How long each recording may take: by default there is one for each program that is installed
    #[arg(long, default_value_t = 30, value_parser = number::within(1_u64..=86_400))]
    seconds: u64,
    /// A recorded trace to use; may be repeated [default: generated and newly recorded ones]
    #[arg(long, value_name = "FILE", conflicts_with = "record")]
    trace: Vec<PathBuf>,
    /// Record nothing, use the generated traces only
    #[arg(long, conflicts_with_all = ["record", "trace"])]
    generated: bool,
    /// What chooses the accesses of the generated traces
    #[arg(long, default_value_t = 1, value_parser = number::within(0..=u64::MAX))]
    seed: u64,
    /// How much of the trace's pages fits, as N/M; may be repeated [default: 1/2 1/3 1/4]
    #[arg(long, value_name = "SHARE")]
    share: Vec<Share>,
    /// lru, clock, s3-fifo, arc, lirs, zfolio[,PARAMETER=VALUE]...; may be repeated
    /// [default: all of them, and zfolio,enter=main: the rule for single units of a folio]
    #[arg(long, value_name = "POLICY")]
    policy: Vec<Name>,
    /// One JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// The program to record, and its arguments
    #[arg(last = true, requires = "record")]
    program: Vec<OsString>,
}

/// A part of a trace's pages: a fraction below 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Share {
    parts: u32,
    of: u32,
}

impl Share {
    /// So many of `pages`, at least 2: a policy with room for one page has no choice.
    fn of(self, pages: usize) -> usize {
        (pages * self.parts as usize / self.of as usize).max(2)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let share = text.split_once('/').and_then(|(parts, of)| {
            Some(Share { parts: parts.parse().ok()?, of: of.parse().ok()? })
        });
        let share = share.filter(|share| share.parts > 0 && share.parts <= share.of);
        share.ok_or_else(|| {
            format!("'{text}' is not a share; accepted: a fraction of at most 1, such as 1/3")
        })
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.parts, self.of)
    }
}

/// Runs `zfolio bench replacement`.
pub(crate) fn replacement(args: &ReplacementArgs) -> Result<bool, Failure> {
    // A signal ends the program that is recorded, and removes the folder with its input.
    os::catch_stop_signals();
    if let Some(file) = &args.record {
        record_to(file, &args.program, args.seconds)?;
        return Ok(true);
    }
    let mut notes = Vec::new();
    let traces = if args.trace.is_empty() {
        default_traces(args, &mut notes)?
    } else {
        args.trace.iter().map(|file| open(file)).collect::<Result<_, _>>()?
    };
    let table = compare(args, &traces, notes)?;
    if args.json {
        print(&format!("{:#}\n", table.json()))?;
    } else {
        print(&table.text())?;
    }
    Ok(true)
}

fn compare(args: &ReplacementArgs, traces: &[Trace], notes: Vec<String>) -> Result<Table, Failure> {
    let policies = if args.policy.is_empty() {
        let rules = [Rule::PRODUCT, Rule::SINGLE].map(Name::Zfolio);
        let others = [Name::Lru, Name::Clock, Name::S3Fifo, Name::Arc, Name::Lirs];
        others.into_iter().chain(rules).collect()
    } else {
        args.policy.clone()
    };
    let shares = [2, 3, 4].map(|of| Share { parts: 1, of });
    let shares = if args.share.is_empty() { &shares[..] } else { &args.share };
    let mut rows = Vec::new();
    for trace in traces {
        for share in shares {
            let capacity = share.of(trace.pages.len());
            let opt = policy::count(&Name::Opt, trace, capacity);
            let mut row = Row::new(trace, share.to_string(), capacity, opt);
            for name in &policies {
                row.counts.push(policy::count(name, trace, capacity));
                go_on()?;
            }
            rows.push(row);
        }
    }
    Ok(Table { policies, rows, notes })
}

/// The generated traces, and recordings of programs if that is possible.
fn default_traces(args: &ReplacementArgs, notes: &mut Vec<String>) -> Result<Vec<Trace>, Failure> {
    let mut traces = generate::all(args.seed);
    if args.generated {
        return Ok(traces);
    }
    if !record::is_possible() {
        notes.push("nothing was recorded: valgrind is not installed".to_owned());
        return Ok(traces);
    }
    let failed = |error: std::io::Error| Failure::Failed(format!("temporary folder: {error}"));
    let folder = Scratch::create("traces").map_err(failed)?;
    for program in programs::installed(folder.path()).map_err(failed)? {
        eprintln!("zfolio: recording {}", program.name);
        let recorded = record::record(&program.words, args.seconds, true);
        go_on()?;
        match recorded {
            Ok(touches) => {
                traces.push(Trace::of_touches(program.name, &touches));
            }
            Err(line) => notes.push(format!("{} was left out: {line}", program.name)),
        }
    }
    Ok(traces)
}

fn record_to(file: &Path, program: &[OsString], seconds: u64) -> Result<(), Failure> {
    let mut output = Output::create("--record", file)?;
    let recorded = record::record(program, seconds, false);
    go_on()?;
    let touches = recorded.map_err(Failure::Failed)?;
    let written = recording::write(&mut output.writer, &touches);
    written.map_err(|error| Failure::Failed(format!("{}: {error}", file.display())))?;
    output.finish()?;
    let pages = Trace::of_touches("", &touches).pages.len();
    let writes = touches.iter().filter(|touch| touch.write).count();
    eprintln!(
        "{}: {} accesses, {writes} of them writes, to {pages} pages",
        file.display(),
        touches.len()
    );
    Ok(())
}

fn open(file: &Path) -> Result<Trace, Failure> {
    let refused = |why| Failure::Refused(format!("--trace: '{}': {why}", file.display()));
    let bytes = std::fs::read(file).map_err(|error| refused(error.to_string()))?;
    let touches = recording::read(&bytes).map_err(refused)?;
    if touches.is_empty() {
        return Err(refused("it has no access; accepted: what --record writes".to_owned()));
    }
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    Ok(Trace::of_touches(&name, &touches))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{ReplacementArgs, Share, Trace, compare};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ReplacementArgs,
    }

    fn parse(line: &str) -> Result<ReplacementArgs, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.args)
    }

    #[test]
    fn arguments_that_contradict_each_other_are_refused() {
        for line in ["x", "x --record f -- true", "x --trace a --trace b --share 1/2 --json"] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for line in
            ["x --record f", "x -- true", "x --record f --trace a -- true", "x --policy mru"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    /// Goal: by default all policies are counted at three shares. Method: a loop over 100 pages:
    /// LRU misses always, the optimum and zfolio do not.
    #[test]
    fn a_loop_is_counted_at_three_shares() {
        let traces = [Trace::of("loop", (0..100).cycle().take(2_000))];
        let table = compare(&parse("x").unwrap(), &traces, Vec::new()).ok().unwrap();
        let shares: Vec<&str> = table.rows.iter().map(|row| row.share.as_str()).collect();
        assert_eq!(shares, ["1/2", "1/3", "1/4"]);
        for row in &table.rows {
            let misses = |name: &str| {
                let name = name.parse().unwrap();
                let at = table.policies.iter().position(|other| *other == name).unwrap();
                row.counts[at].misses
            };
            assert_eq!(misses("lru"), 2_000);
            assert!(row.opt.misses < 1_900 && misses("zfolio") < 1_900, "{row:?}");
        }
    }

    #[test]
    fn a_share_is_a_fraction() {
        let share: Share = "2/3".parse().unwrap();
        assert_eq!((share.of(90), share.of(1), share.to_string()), (60, 2, "2/3".to_owned()));
        for text in ["", "1", "0/2", "3/2", "1/0", "-1/2", "a/b"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }
}
