//! What is printed while the program runs: a warning if it mostly waits, and its progress if
//! requested.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::size;
use zfolio_core::stats::Stats;
use zfolio_sys::clock;

use super::proc;
use super::summary::advice;
use super::tree::{Key, Live, Tree};
use crate::output::escaped;

const SECOND_NS: u64 = 1_000_000_000;

/// How often the figures are read.
const INTERVAL_NS: u64 = SECOND_NS;

/// How long a program must have mostly waited before a warning.
const SUSTAINED_NS: u64 = 5 * SECOND_NS;

/// The pause after the first warning; it doubles with each further one.
const SILENCE_NS: u64 = 30 * SECOND_NS;

/// The time between two lines of progress if there is no terminal.
const LINE_INTERVAL_NS: u64 = 10 * SECOND_NS;

/// The most columns of a line of progress: it must not wrap, or it could not be erased.
const COLUMNS: usize = 79;

/// Moves to the start of the line, and erases it.
const CLEAR: &str = "\r\x1b[K";

/// The figures of one process at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Moment {
    at_ns: u64,
    /// How long all its threads together have waited for memory.
    waited_ns: u64,
    /// How long all its threads together have run.
    ran_ns: u64,
    /// The limit that it has, or that all processes share.
    limit_bytes: u64,
}

/// The recent history of one process.
#[derive(Debug)]
struct Track {
    last: Moment,
    /// The share of its time that it waited for memory between the last two readings, in percent.
    waiting: u64,
    /// Since when it has mostly waited.
    stuck_since_ns: Option<u64>,
}

impl Track {
    fn new(first: Moment) -> Track {
        Track { last: first, waiting: 0, stuck_since_ns: None }
    }

    /// Adds a later reading. The process is stuck if its threads waited for memory for more than
    /// half of the time that they ran or waited, and at least one thread waited for half of the
    /// elapsed time. A program that waits for input is not stuck, and what was waited at a lower limit says nothing.
    fn update(&mut self, now: Moment) {
        let waited = now.waited_ns.saturating_sub(self.last.waited_ns);
        let ran = now.ran_ns.saturating_sub(self.last.ran_ns);
        let passed = now.at_ns.saturating_sub(self.last.at_ns);
        // The rest of the elapsed time is input, sleep, or CPU time of other processes.
        let whole = (waited + ran).max(passed);
        self.waiting = (waited * 100).checked_div(whole).unwrap_or(0);
        let busy = (waited + ran).max(1);
        let stuck = waited * 2 > passed && waited * 2 > busy;
        let stuck = stuck && now.limit_bytes <= self.last.limit_bytes;
        self.stuck_since_ns = match (stuck, self.stuck_since_ns) {
            (false, _) => None,
            (true, since) => since.or(Some(self.last.at_ns)),
        };
        self.last = now;
    }

    /// Whether it has been stuck long enough for a warning.
    fn is_stuck(&self) -> bool {
        let long = |since: u64| self.last.at_ns.saturating_sub(since) >= SUSTAINED_NS;
        self.stuck_since_ns.is_some_and(long)
    }
}

/// The watch. See the module.
#[derive(Debug)]
pub(super) struct Watch {
    /// The limit that all processes share, if they do: as of the last look.
    shared_limit: Option<u64>,
    warns: bool,
    progress: bool,
    terminal: bool,
    /// Whether a line of progress is on the terminal.
    shown: bool,
    began_ns: u64,
    next_ns: u64,
    next_line_ns: u64,
    silent_until_ns: u64,
    silence_ns: u64,
    tracks: BTreeMap<Key, Track>,
}

impl Watch {
    /// Makes a watch; `warns` and `progress` say what it prints.
    pub(super) fn new(warns: bool, progress: bool) -> Watch {
        let now = clock::monotonic_ns();
        Watch {
            shared_limit: None,
            warns,
            progress,
            terminal: progress && io::stderr().is_terminal(),
            shown: false,
            began_ns: now,
            next_ns: now + INTERVAL_NS,
            next_line_ns: now,
            silent_until_ns: 0,
            silence_ns: SILENCE_NS,
            tracks: BTreeMap::new(),
        }
    }

    /// Reads the figures and prints what is due, if a reading is due.
    pub(super) fn look_if_due(&mut self, tree: &Tree, shared_limit: Option<u64>) {
        let now = clock::monotonic_ns();
        if now < self.next_ns || !(self.warns || self.progress) {
            return;
        }
        self.next_ns = now + INTERVAL_NS;
        self.shared_limit = shared_limit;
        let live = tree.live();
        self.tracks.retain(|key, _| live.iter().any(|one| one.key() == *key));
        for one in live.iter().filter(|one| one.is_engaged()) {
            let ran_ns = proc::program_cpu_ns(one.pid).unwrap_or(0);
            let waited_ns = one.stats.figures.stall_ns.load(Relaxed);
            let own = one.stats.figures.limit_bytes.load(Relaxed);
            let limit_bytes = shared_limit.unwrap_or(own);
            let moment = Moment { at_ns: now, waited_ns, ran_ns, limit_bytes };
            self.tracks
                .entry(one.key())
                .and_modify(|track| track.update(moment))
                .or_insert_with(|| Track::new(moment));
        }
        if let Some(line) = self.warning(&live, now) {
            self.print(&line);
        }
        self.show_progress(&live, now);
    }

    /// The warning for the process that waits most, if there is one and a warning is due.
    fn warning(&mut self, live: &[Live], now_ns: u64) -> Option<String> {
        if !self.warns || now_ns < self.silent_until_ns {
            return None;
        }
        let stuck = live.iter().filter_map(|one| {
            let track = self.tracks.get(&one.key())?;
            track.is_stuck().then_some((track.last.waited_ns, track.waiting, one))
        });
        let (_, waiting, one) = stuck.max_by_key(|(waited, ..)| *waited)?;
        let line = warning_line(&one.stats, waiting, live.len() - 1, self.shared_limit);
        self.silent_until_ns = now_ns + self.silence_ns;
        self.silence_ns *= 2;
        Some(line)
    }

    /// Prints a line; first erases a line of progress.
    fn print(&mut self, line: &str) {
        self.clear();
        // The reader may have closed the pipe; the program continues.
        writeln!(io::stderr(), "zfolio: {line}").ok();
    }

    fn show_progress(&mut self, live: &[Live], now_ns: u64) {
        let Some(line) = self.progress(live, now_ns) else { return };
        if self.terminal {
            write!(io::stderr(), "{CLEAR}{line}").ok();
            self.shown = true;
        } else {
            writeln!(io::stderr(), "{line}").ok();
        }
    }

    /// The line of progress, if it is requested and due.
    fn progress(&mut self, live: &[Live], now_ns: u64) -> Option<String> {
        if !self.progress || (!self.terminal && now_ns < self.next_line_ns) {
            return None;
        }
        self.next_line_ns = now_ns + LINE_INTERVAL_NS;
        let largest = live.iter().max_by_key(|one| one.stats.figures.process_bytes.load(Relaxed));
        let passed = (now_ns - self.began_ns) / SECOND_NS;
        let line = match largest {
            None => format!("zfolio: {passed}s, nothing is managed yet"),
            Some(one) => {
                let waiting = self.tracks.get(&one.key()).map(|track| track.waiting);
                let others = live.len() - 1;
                progress_line(passed, &one.stats, waiting, others, self.shared_limit)
            }
        };
        Some(if self.terminal { line.chars().take(COLUMNS).collect() } else { line })
    }

    /// Erases the line of progress, if there is one on the terminal.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            write!(io::stderr(), "{CLEAR}").ok();
        }
    }
}

impl Live {
    fn key(&self) -> Key {
        (self.pid, self.start_ticks)
    }

    fn is_engaged(&self) -> bool {
        self.stats.figures.engaged.load(Relaxed) != 0
    }
}

/// The warning for a process that waits `waiting` percent of its time, beside `others`.
fn warning_line(stats: &Stats, waiting: u64, others: usize, shared_limit: Option<u64>) -> String {
    let own = stats.figures.limit_bytes.load(Relaxed);
    let limit = match shared_limit {
        Some(_) if others > 0 => format!("its share of the limit, {},", size::display(own)),
        all => format!("the limit of {}", size::display(all.unwrap_or(own))),
    };
    let about = match advice(stats) {
        Some(advice) => format!("; about {} would do", size::display(advice.limit_bytes)),
        None => String::new(),
    };
    format!(
        "{} waits {waiting} % of its time for memory: {limit} is far below what it uses{about}",
        escaped(&stats.command())
    )
}

fn progress_line(
    passed: u64,
    stats: &Stats,
    waiting: Option<u64>,
    others: usize,
    shared_limit: Option<u64>,
) -> String {
    let figures = &stats.figures;
    let of = |figure: &std::sync::atomic::AtomicU64| size::display(figure.load(Relaxed));
    let limit = size::display(shared_limit.unwrap_or(figures.limit_bytes.load(Relaxed)));
    let mut line = format!("zfolio: {passed}s {}: ", escaped(&stats.command()));
    line += &match waiting {
        None => format!("{} of {limit}", of(&figures.process_bytes)),
        Some(waiting) => format!(
            "needs {}, {} resident, {} compressed, limit {limit}, waits {waiting} %",
            of(&figures.demand_bytes),
            of(&figures.resident_bytes),
            of(&figures.pool_bytes),
        ),
    };
    if others > 0 {
        line += &format!("; {others} more");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::{COLUMNS, Moment, SECOND_NS, Track, Watch, progress_line, warning_line};
    use std::sync::atomic::Ordering::Relaxed;
    use zfolio_core::ledger::Owner;
    use zfolio_core::stats::Stats;

    /// A process that waits and runs this many milliseconds in each second.
    fn after(seconds: u64, waits_ms: u64, runs_ms: u64) -> Track {
        let at = |second: u64| Moment {
            at_ns: second * SECOND_NS,
            waited_ns: second * waits_ms * 1_000_000,
            ran_ns: second * runs_ms * 1_000_000,
            limit_bytes: 7,
        };
        let mut track = Track::new(at(0));
        (1..=seconds).for_each(|second| track.update(at(second)));
        track
    }

    #[test]
    fn who_waits_most_of_five_seconds_is_stuck() {
        assert!(!after(4, 860, 140).is_stuck(), "not yet");
        let stuck = after(5, 860, 140);
        assert!(stuck.is_stuck() && stuck.waiting == 86);
        assert!(!after(60, 400, 600).is_stuck(), "it runs more than it waits");
        assert!(!after(60, 40, 10).is_stuck(), "it sleeps");
        assert!(!after(60, 2000, 6000).is_stuck(), "eight threads, of which two wait");
        let threads = after(60, 7000, 1000);
        assert!(threads.is_stuck() && threads.waiting == 87, "eight threads, of which seven wait");
    }

    #[test]
    fn a_pause_begins_the_count_anew() {
        let mut track = after(4, 900, 100);
        track.update(Moment { at_ns: track.last.at_ns + SECOND_NS, ..track.last });
        assert!(track.stuck_since_ns.is_none() && track.waiting == 0);
    }

    #[test]
    fn a_higher_limit_begins_the_count_anew() {
        for (limit_bytes, is_stuck) in [(8, false), (7, true), (6, true)] {
            let mut track = after(6, 900, 100);
            let Moment { at_ns, waited_ns, ran_ns, .. } = track.last;
            let at_ns = at_ns + SECOND_NS;
            track.update(Moment { at_ns, waited_ns: waited_ns + SECOND_NS, ran_ns, limit_bytes });
            assert_eq!(track.is_stuck(), is_stuck, "{limit_bytes} after 7");
        }
    }

    #[test]
    fn lines_name_the_program_and_what_would_do() {
        let stats = Stats::default();
        let owner = Owner { pid: 1, namespace: 0, start_ticks: 2 };
        stats.publish(owner, 3, "zstd", "python3");
        let figures = &stats.figures;
        figures.limit_bytes.store(96 << 20, Relaxed);
        figures.demand_bytes_max.store(400 << 20, Relaxed);
        figures.stall_ns.store(50 * SECOND_NS, Relaxed);
        (0..50).for_each(|_| stats.count_refault(80 << 20, SECOND_NS, false));
        let line = warning_line(&stats, 86, 0, None);
        let expected =
            "python3 waits 86 % of its time for memory: the limit of 96M is far below what it uses";
        assert!(
            line.starts_with(expected) && line.contains("; about ") && line.ends_with("would do")
        );
        let share = warning_line(&stats, 86, 2, Some(512 << 20));
        assert!(share.contains(": its share of the limit, 96M, is far below"), "{share}");
        let alone = warning_line(&stats, 86, 0, Some(128 << 20));
        assert!(alone.contains(": the limit of 128M is far below"), "{alone}");
        let line = progress_line(12, &stats, Some(86), 3, None);
        assert!(
            line.contains("12s python3: needs") && line.contains("waits 86 %; 3 more"),
            "{line}"
        );
        assert!(progress_line(1, &stats, None, 0, None).ends_with("0 of 96M"));
        assert!(progress_line(1, &stats, None, 0, Some(1 << 30)).ends_with("0 of 1G"));
    }

    /// Goal: if the output is not a terminal, lines are few. Method: a look each second for half a
    /// minute.
    #[test]
    fn progress_is_told_each_second_on_a_terminal_and_else_every_ten() {
        for (terminal, expected) in [(true, (1..31).collect()), (false, vec![1, 11, 21])] {
            let mut watch = Watch { terminal, ..Watch::new(false, true) };
            let looks: Vec<u64> = (1..31).collect();
            let printed = looks.into_iter().filter(|second| {
                let line = watch.progress(&[], watch.began_ns + second * SECOND_NS);
                line.is_some_and(|line| {
                    assert_eq!(line, format!("zfolio: {second}s, nothing is managed yet"));
                    line.len() <= COLUMNS
                })
            });
            assert_eq!(printed.collect::<Vec<u64>>(), expected);
        }
        let mut watch = Watch::new(true, false);
        assert_eq!(watch.progress(&[], watch.began_ns + SECOND_NS), None, "nobody asked for it");
    }
}
