//! The summary of a run: a few lines for the user.
//!
//! They describe the process that needed the most memory: with `zfolio run -- make` that is a
//! compiler, not `make`. All other managed processes share one line; those that were not managed
//! have one line per program. Every peak was measured, by the process itself or by the kernel.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use zfolio_core::refault::{Advice, Measured};
use zfolio_core::size;
use zfolio_core::stats::{Figures, Stats};
use zfolio_sys::disk::{self, Kind};
use zfolio_sys::probe::child::Change;

use super::End;
use super::detail::{self, of, ratio};
use super::ended::Counted;
use super::settings::Settings;
use super::supervisor::Supervisor;
use super::tree::{Group, Tree};
use super::waits;
use crate::allowance::Allowance;
use crate::duration;
use crate::output::escaped;
use crate::stats_file::StatsFile;

/// Waiting that is not worth advice: less than this, or less than a 20th of the run.
const WAITING_SHOWN_NS: u64 = 500_000_000;
const WAITING_TOLD_SHARE: u64 = 20;

/// An excess over the limit that is not worth a line: less than the kernel's counting varies.
const EXCESS_SHOWN: u64 = 8 << 20;

/// Pages of files that are worth a line: more than the code of a large program.
const FILES_SHOWN_MIN: u64 = 64 << 20;

/// A run that has ended.
pub(super) struct Story<'a> {
    /// Its settings.
    pub(super) settings: &'a Settings,
    /// The program and its arguments.
    pub(super) program: &'a [OsString],
    /// Whether to print every detail.
    pub(super) verbose: bool,
    /// The program's process id.
    pub(super) pid: i32,
    /// How it ended.
    pub(super) end: End,
    /// The figures that its processes left.
    pub(super) files: &'a [StatsFile],
    /// Processes whose figures were not kept.
    pub(super) counted: &'a Counted,
    /// What was seen of its processes from outside.
    pub(super) tree: &'a Tree,
    /// If the limit is the tree's.
    pub(super) supervisor: Option<&'a Supervisor>,
    /// Whether the kernel killed processes of this cgroup during the run because memory ran out.
    pub(super) out_of_memory: bool,
}

/// Whether any memory was compressed. The engine takes over early if a program grows fast, and may
/// then have nothing to do.
pub(super) fn was_compressed(file: &StatsFile) -> bool {
    let figures = &file.stats.figures;
    let reclaimed = [
        &figures.reclaim_clean,
        &figures.reclaim_compressed,
        &figures.reclaim_same_filled,
        &figures.reclaim_incompressible,
    ];
    // A child of fork has what its parent had compressed.
    let inherited = of(&figures.demand_stored_bytes) > 0;
    of(&figures.engaged) != 0 && (inherited || reclaimed.into_iter().any(|figure| of(figure) > 0))
}

/// A higher limit at which the process would have waited for a tenth of the time; `None` if no
/// limit gains that.
pub(super) fn advice(stats: &Stats) -> Option<Advice> {
    let measured = stats.measured();
    // A process that is over its limit waits as one whose limit is higher by the excess: the forecast begins there.
    let had_bytes = measured.limit_bytes.saturating_add(stats.excess_bytes());
    let measured = Measured { limit_bytes: had_bytes, ..measured };
    stats.refaults.advice(&measured, of(&stats.figures.stall_ns) / 10)
}

/// Whether a peak is so far above a limit that it is told.
pub(super) fn is_over(bytes: u64, limit_bytes: u64) -> bool {
    bytes > limit_bytes + EXCESS_SHOWN.min(limit_bytes / 16)
}

/// A message about what is missing from a core file of the program: the kernel writes zeros for
/// memory that is compressed, and nothing else reports it.
pub(super) fn core_message(pid: i32, change: Change, files: &[StatsFile]) -> Option<String> {
    let Change::Dumped(_) = change else { return None };
    let file = files.iter().find(|file| i64::from(file.pid) == i64::from(pid))?;
    let figures = &file.stats.figures;
    let missing = of(&figures.demand_stored_bytes) + of(&figures.staged_bytes);
    (missing > 0).then(|| {
        format!(
            "zfolio: the core lacks {} that were compressed: they are zeros in it",
            size::display(missing)
        )
    })
}

/// A count of something, with its noun.
fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The subject of the first line.
#[derive(Clone, Copy)]
enum Subject<'a> {
    /// A process that left its figures.
    Managed(&'a StatsFile),
    /// Processes without figures, above the limit.
    Other(&'a Group),
    Nobody,
}

impl fmt::Display for Story<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subject = self.subject();
        match subject {
            Subject::Managed(file) if was_compressed(file) => self.write_compressed(f, file)?,
            Subject::Managed(file) if self.is_over(self.peak_bytes(file)) => {
                self.write_over(f, file)?;
            }
            Subject::Managed(file) => self.write_below(f, file)?,
            Subject::Other(group) => {
                write!(f, "zfolio: ")?;
                self.write_group(f, group)?;
            }
            Subject::Nobody => self.write_nothing(f)?,
        }
        for group in self.tree.groups() {
            if !matches!(subject, Subject::Other(subject) if std::ptr::eq(subject, group)) {
                write!(f, "  besides     ")?;
                self.write_group(f, group)?;
            }
        }
        self.write_unseen(f, subject)?;
        self.write_others(f, subject)?;
        self.write_tree(f)?;
        self.write_budget(f)?;
        self.write_refused(f)?;
        self.write_killed(f)
    }
}

impl Story<'_> {
    fn subject(&self) -> Subject<'_> {
        let groups = self.tree.groups();
        let worst = groups.first().filter(|group| self.is_over(group.peak_bytes));
        match (self.largest(), worst) {
            (Some(file), _) if was_compressed(file) || self.is_over(self.peak_bytes(file)) => {
                Subject::Managed(file)
            }
            (_, Some(group)) => Subject::Other(group),
            (Some(file), None) => Subject::Managed(file),
            (None, None) => Subject::Nobody,
        }
    }

    /// The managed process that needed the most memory; of those that needed about as much the program itself, or the
    /// one that has waited most: a child of `fork` begins with what its parent has, and may have lived for a moment.
    pub(super) fn largest(&self) -> Option<&StatsFile> {
        let need =
            |file: &StatsFile| of(&file.stats.figures.demand_bytes_max).max(self.peak_bytes(file));
        let most = self.files.iter().map(need).max()?;
        let large = self.files.iter().filter(|file| need(file) >= most - most / 16);
        let waited = |file: &StatsFile| of(&file.stats.figures.stall_ns);
        large.max_by_key(|file| (self.tree.is_first(file), waited(file), need(file)))
    }

    /// How many processes there were.
    fn count(&self) -> usize {
        self.tree.count(self.files) + self.counted.unseen
    }

    /// The most that a process had resident, without pages of files: the larger of its own count and the kernel's.
    pub(super) fn peak_bytes(&self, file: &StatsFile) -> u64 {
        let alone = self.files.len() == 1 && self.count() == 1 && self.tree.groups().is_empty();
        // `wait4` returns the peak of the program and of all children that it waited for. If that
        // is above the limit, another process may have had it (`write_unseen`).
        let files = of(&file.stats.figures.file_bytes_max);
        let kernel = self.end.resident_bytes_max.saturating_sub(files);
        let kernel =
            if alone && self.tree.is_first(file) && !self.is_over(kernel) { kernel } else { 0 };
        self.tree.peak_bytes(file).max(kernel)
    }

    fn is_over(&self, bytes: u64) -> bool {
        // A limit that follows the machine may have been higher meanwhile.
        !self.settings.auto && is_over(bytes, self.limit_bytes())
    }

    /// The limit: that of the settings, or a higher one that was asked for meanwhile.
    fn limit_bytes(&self) -> u64 {
        let asked = self.files.iter().map(|file| of(&file.stats.limit_asked));
        let of_all = self.supervisor.map_or(0, Supervisor::asked_bytes_max);
        asked.chain([self.settings.limit_bytes, of_all]).max().unwrap_or(0)
    }

    fn limit(&self) -> String {
        match self.settings.auto {
            true => "auto".to_owned(),
            false => size::display(self.limit_bytes()),
        }
    }

    /// The limit behind the words `of`; one that follows the machine behind its option.
    fn of_limit(&self, of: &str) -> String {
        let of = if self.settings.auto { "with --limit" } else { of };
        format!("{of} {}", self.limit())
    }

    /// The process needed more than its limit, and memory was compressed.
    fn write_compressed(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile) -> fmt::Result {
        let (stats, peak) = (&*file.stats, self.peak_bytes(file));
        let need = of(&stats.figures.demand_bytes_max).max(peak);
        write!(
            f,
            "zfolio: {} needed {} and ran in {} (limit {})",
            escaped(&stats.command()),
            size::display(need),
            size::display(peak),
            self.limit()
        )?;
        match ratio(need, peak) {
            Some(times) if need > peak + peak / 20 => writeln!(f, ": {times} times less")?,
            _ => writeln!(f)?,
        }
        self.write_time(f, stats)?;
        if self.settings.stall_ppm > 0 {
            self.write_saved(f, stats)?;
        } else {
            self.write_advice(f, file)?;
        }
        if self.is_over(peak) {
            self.write_excess(f, file, peak)?;
        }
        self.write_spilled(f, stats)?;
        self.write_file_pages(f, stats)?;
        if self.verbose { detail::write(f, stats) } else { Ok(()) }
    }

    fn elapsed_ns(&self) -> u64 {
        u64::try_from(self.end.elapsed.as_nanos()).unwrap_or(u64::MAX)
    }

    fn write_time(&self, f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
        let (elapsed, waited) = (self.elapsed_ns(), of(&stats.figures.stall_ns));
        let (took, lost) = (duration::display(elapsed), duration::display(waited));
        let command = escaped(&stats.command());
        match waited <= elapsed {
            // The time is that of the run, and the waits are those of one process.
            _ if self.count() > 1 => writeln!(
                f,
                "  time        {took} for all processes; the threads of {command} waited {lost} for memory"
            )?,
            true => writeln!(f, "  time        {took}, of which {lost} waiting for memory")?,
            false => writeln!(
                f,
                "  time        {took}, in which its threads together waited {lost} for memory"
            )?,
        }
        match self.waited_long(stats) {
            true => writeln!(f, "  waiting     {}", waits::text(&stats.figures)),
            false => Ok(()),
        }
    }

    /// How much less memory it had on average than it would have had without compression.
    fn write_saved(&self, f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
        let ms = u64::try_from(self.end.elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
        let demand = of(&stats.figures.demand_kib_ms);
        let saved = demand.saturating_sub(of(&stats.figures.process_kib_ms));
        let percent = u128::from(saved) * 100 / u128::from(demand.max(1));
        // In hundredths of a percent.
        let waited = u128::from(stats.waited_ns()) * 10_000 / u128::from(self.elapsed_ns().max(1));
        writeln!(
            f,
            "  saved       {} of {} on average, {percent} %; it waited {}.{:02} % of the time (--stall {})",
            size::display(saved.saturating_mul(1 << 10) / ms),
            size::display(demand.saturating_mul(1 << 10) / ms),
            waited / 100,
            waited % 100,
            size::display_stall(self.settings.stall_ppm)
        )
    }

    /// Whether its threads waited long enough for reasons and advice.
    fn waited_long(&self, stats: &Stats) -> bool {
        let least = WAITING_SHOWN_NS.max(self.elapsed_ns() / WAITING_TOLD_SHARE);
        of(&stats.figures.stall_ns) >= least
    }

    /// As [`advice`], for the limit of the run: with what the other processes had, where they share it.
    pub(super) fn advice(&self, file: &StatsFile) -> Option<Advice> {
        let advice = advice(&file.stats)?;
        Some(Advice { limit_bytes: advice.limit_bytes + self.others_bytes(file), ..advice })
    }

    /// The highest sum of what all processes charged, where they share the limit.
    pub(super) fn sum_bytes_max(&self) -> Option<u64> {
        self.supervisor.map(Supervisor::sum_bytes_max)
    }

    /// What the other processes had, where they share the limit with this one.
    fn others_bytes(&self, file: &StatsFile) -> u64 {
        let sum = self.sum_bytes_max().filter(|_| self.count() > 1).unwrap_or(0);
        sum.saturating_sub(self.peak_bytes(file))
    }

    fn write_advice(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile) -> fmt::Result {
        let stats = &*file.stats;
        if !self.waited_long(stats) {
            return writeln!(f, "  limit       a higher one would gain little");
        }
        let need = of(&stats.figures.demand_bytes_max) + self.others_bytes(file);
        match self.advice(file) {
            Some(Advice { limit_bytes, .. }) if limit_bytes >= need => {
                writeln!(
                    f,
                    "  limit       at {} this run would not have waited: that is all it needs",
                    size::display(limit_bytes)
                )
            }
            Some(Advice { limit_bytes, waiting_ns }) => writeln!(
                f,
                "  limit       at {} this run would have waited about {} instead of {}",
                size::display(limit_bytes),
                duration::display(waiting_ns),
                duration::display(of(&stats.figures.stall_ns))
            ),
            None => writeln!(f, "  limit       a higher one would gain little"),
        }
    }

    /// By how much it was over its limit, and which memory that was.
    fn write_excess(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile, peak: u64) -> fmt::Result {
        let excess = size::display(peak.saturating_sub(self.limit_bytes()));
        write!(f, "  over limit  by {excess}")?;
        let at = self.tree.peak_of(file);
        if at.memory.counted_bytes() == 0 {
            return writeln!(f);
        }
        let small = at.memory.anonymous_bytes.saturating_sub(at.held_bytes);
        writeln!(
            f,
            "; not managed were {} of stacks, small and executable mappings{}, {} of shared memory",
            size::display(small),
            if of(&file.stats.figures.pinned_bytes) > 0 { " and what was given up" } else { "" },
            size::display(at.memory.shared_bytes)
        )
    }

    /// What went to disk; or why nothing could, where that would have held the limit.
    fn write_spilled(&self, f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
        let (figures, spill) = (&stats.figures, &self.settings.spill);
        if of(&figures.written_back_units) > 0 {
            return writeln!(
                f,
                "  on disk     {} at most, by {}{}; {} were written and {} read",
                size::display(of(&figures.spilled_bytes_max)),
                if of(&figures.spill_way) == 2 { "plain calls" } else { "io_uring" },
                if of(&figures.spill_buffered) == 1 { " through the page cache" } else { "" },
                size::display(of(&figures.spill_written_bytes)),
                size::display(of(&figures.spill_read_bytes))
            );
        }
        match spill.why_not.as_ref().filter(|_| of(&figures.over_limit) > 0) {
            Some(why) => writeln!(f, "  on disk     nothing: {why} (--spill)"),
            None => Ok(()),
        }
    }

    /// It was over its limit, and nothing could be compressed.
    fn write_over(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile) -> fmt::Result {
        let peak = self.peak_bytes(file);
        writeln!(
            f,
            "zfolio: {} went over its limit: peak {} {}; nothing was compressed",
            escaped(&file.stats.command()),
            size::display(peak),
            self.of_limit("of")
        )?;
        self.write_excess(f, file, peak)
    }

    /// It stayed below its limit.
    fn write_below(&self, f: &mut fmt::Formatter<'_>, file: &StatsFile) -> fmt::Result {
        let peak = self.peak_bytes(file);
        let where_it_stayed = if peak > self.limit_bytes() { "at" } else { "below" };
        writeln!(
            f,
            "zfolio: {} stayed {where_it_stayed} its limit: peak {} {}; nothing was compressed",
            escaped(&file.stats.command()),
            size::display(peak),
            self.of_limit("of")
        )?;
        self.write_file_pages(f, &file.stats)
    }

    /// The pages of files, where they are many: whoever looks at the process sees them as resident memory.
    fn write_file_pages(&self, f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
        let most = of(&stats.figures.file_bytes_max);
        if most < FILES_SHOWN_MIN.max(self.limit_bytes() / 8) {
            return Ok(());
        }
        write!(
            f,
            "  files       up to {} of mapped files, which do not count",
            size::display(most)
        )?;
        match of(&stats.figures.file_paged_out_bytes) {
            0 => writeln!(f),
            back => writeln!(f, "; {} were given back", size::display(back)),
        }
    }

    fn write_nothing(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.program.first().map(|name| name.to_string_lossy()).unwrap_or_default();
        let name = escaped(&name);
        writeln!(
            f,
            "zfolio: {name} left no statistics: it was not managed, or ended while it started; peak {} {}",
            size::display(self.end.resident_bytes_max),
            self.of_limit("of")
        )
    }

    /// A line for the processes of one program that left no figures.
    fn write_group(&self, f: &mut fmt::Formatter<'_>, group: &Group) -> fmt::Result {
        let command = escaped(&group.command);
        let who = match group.processes {
            1 => format!("{command} was"),
            count => format!("{count} processes {command} were"),
        };
        let (what, reason) = (if group.managed { "managed" } else { "not managed" }, &group.reason);
        let (peak, limit) = (group.peak_bytes, self.limit_bytes());
        write!(f, "{who} {what} ({reason}): peak {}", size::display(peak))?;
        match peak.saturating_sub(limit) {
            0 => writeln!(f),
            over => {
                let over = size::display(over);
                writeln!(f, ", {over} over the limit {}", self.of_limit("of"))
            }
        }
    }

    /// The kernel counted a higher peak than any look found: it lasted less than the time between
    /// two looks.
    fn write_unseen(&self, f: &mut fmt::Formatter<'_>, subject: Subject<'_>) -> fmt::Result {
        // This count includes pages of files, as many as at that time.
        let figures = self.files.iter().map(|file| of(&file.stats.figures.file_bytes_max));
        let pages =
            figures.chain([self.counted.file_bytes, self.tree.file_bytes_max]).max().unwrap_or(0);
        let kernel = self.end.resident_bytes_max.saturating_sub(pages);
        let files = self.files.iter().map(|file| self.peak_bytes(file));
        let groups = self.tree.groups();
        let others = groups.iter().map(|group| group.peak_bytes);
        let known = files.chain(others).chain([self.counted.peak_bytes]).max().unwrap_or(0);
        let explained = matches!(subject, Subject::Nobody) || kernel <= known + EXCESS_SHOWN;
        if explained || !self.is_over(kernel) {
            return Ok(());
        }
        writeln!(
            f,
            "  over limit  by the kernel's count one of its processes had a peak of {}",
            size::display(kernel)
        )
    }

    /// A line for the managed processes that are not described above.
    fn write_others(&self, f: &mut fmt::Formatter<'_>, subject: Subject<'_>) -> fmt::Result {
        let is_told = |file: &StatsFile| match subject {
            Subject::Managed(subject) => std::ptr::eq(subject, file),
            Subject::Other(_) | Subject::Nobody => false,
        };
        let others = || self.files.iter().filter(|file| !is_told(file));
        let count = others().count() + self.counted.processes;
        if count == 0 {
            return Ok(());
        }
        let compressed =
            others().filter(|file| was_compressed(file)).count() + self.counted.compressed;
        let over = others().filter(|file| self.is_over(self.peak_bytes(file))).count();
        // As of the limit at the start; one that follows the machine may have been higher.
        let over = over + if self.settings.auto { 0 } else { self.counted.over };
        let live = others().filter(|file| file.live).count();
        let largest =
            others().map(|file| self.peak_bytes(file)).chain([self.counted.peak_bytes]).max();
        let plural = if count == 1 { "process" } else { "processes" };
        write!(f, "  and         {count} more {plural}, {compressed} of them compressed")?;
        // Processes that ended at once have no known peak.
        if let Some(largest) = largest.filter(|largest| *largest > 0) {
            write!(f, "; largest peak {}", size::display(largest))?;
        }
        if over > 0 {
            write!(f, "; {over} over the limit")?;
        }
        if live > 0 { writeln!(f, "; {live} still running") } else { writeln!(f) }
    }
}

impl Story<'_> {
    /// What all processes together had, if there was more than one. Nothing, if all ended before they were
    /// looked at.
    fn write_tree(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(sum) = self.sum_bytes_max().filter(|sum| *sum > 0 && self.count() > 1) else {
            return Ok(());
        };
        writeln!(
            f,
            "  together    its {} processes had {} at most, {}",
            self.count(),
            size::display(sum),
            self.of_limit("of the limit of")
        )
    }

    /// How often nothing could be written, because the budget was used up.
    fn write_budget(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used_up = |file: &StatsFile| of(&file.stats.figures.write_budget_used_up);
        let times: u64 = self.files.iter().map(used_up).sum();
        if times == 0 {
            return Ok(());
        }
        write!(f, "  budget      the write budget")?;
        let budget = self.settings.spill.write_budget;
        if !budget.is_none() {
            write!(f, " of {budget}")?;
        }
        writeln!(f, " was used up {}", plural(times, "time"))
    }

    /// Why memory that was to be written to disk stayed where it was, in any of the processes.
    fn write_refused(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spill = &self.settings.spill;
        let places: Vec<_> = spill.paths.iter().map(|(path, _)| path.to_string_lossy()).collect();
        let places = places.join(", ");
        let is_device =
            |(path, _): &(PathBuf, i32)| matches!(disk::kind(path), Ok(Kind::Device(_)));
        let sum = |figure: fn(&Figures) -> &AtomicU64| -> u64 {
            self.files.iter().map(|file| of(figure(&file.stats.figures))).sum()
        };
        let line = |f: &mut fmt::Formatter<'_>, label, why| {
            writeln!(f, "  {label:<11} {why}; what was to be written stayed in memory")
        };
        let limit = sum(|figures| &figures.written_back_limit);
        if limit > 0 {
            let (bytes, times) = (size::display(spill.limit_bytes), plural(limit, "time"));
            let is_any_device = spill.paths.iter().any(is_device);
            let or_device = if is_any_device { " (or the size of a device)" } else { "" };
            line(f, "disk full", format!("--spill-limit {bytes}{or_device} was reached {times}"))?;
        }
        let full = sum(|figures| &figures.written_back_full);
        if full > 0 {
            let writes = plural(full, "write");
            // The program inherited it from here, and may have lowered it.
            let limit = disk::file_bytes_limit().filter(|bytes| *bytes < spill.limit_bytes);
            let limit = limit.map(|bytes| format!(" (ulimit -f allows {})", size::display(bytes)));
            // One that a program has set itself is not known here. A device has none.
            let limit =
                limit.unwrap_or_else(|| " (or the program's ulimit -f had none)".to_owned());
            let limit = if spill.paths.iter().all(is_device) { "" } else { &limit };
            let why = format!("{places} had no room for {writes}{limit}");
            line(f, "disk full", why)?;
        }
        let failed = sum(|figures| &figures.written_back_fail);
        if failed > 0 {
            line(f, "disk errors", format!("{} to {places} failed", plural(failed, "write")))?;
        }
        Ok(())
    }

    /// The kernel killed the program, and reported the reason only in its log.
    fn write_killed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let killed = self.end.change == Change::Died(libc::SIGKILL);
        if !killed || !self.out_of_memory {
            return Ok(());
        }
        write!(f, "  killed      by the kernel, because memory ran out")?;
        match Allowance::here() {
            Some(here) => writeln!(
                f,
                ": {} allows {}; a lower --limit leaves room for the rest",
                here.source.display(),
                size::display(here.bytes)
            ),
            None => writeln!(f),
        }
    }
}
