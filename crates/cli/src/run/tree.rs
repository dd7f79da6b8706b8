//! The processes of a run, observed from outside while they run.
//!
//! A process counts its own figures only if the library is in it, and only as far as it can see
//! itself. A static program started by another one does not count, nor one that drops its
//! environment, nor one in another root directory. So the parent looks at the whole tree from time
//! to time, and keeps the kernel's peak of each process (`VmHWM`), which also covers the time
//! between two looks.
//!
//! The tree is walked from the program down, by `/proc/PID/task/TID/children`. Orphans go to init,
//! as they would without zfolio (if zfolio became their parent, their `getppid` would change).
//! before are still known, and a managed one is found by its file.
//!
//! # Invariants
//!
//! - `TREE-1` `execve` changes the program of a PID, but not its file of figures. So all records
//!   belong to an image (the executed file), and each new image is judged again.
//! - `TREE-2` A process is called unmanaged if its image has been without the library, or without
//!   figures, for a while ([`SETTLED`]), or can never have the library. Between `fork` and `execve`
//!   no process has it.
//!
//! # Cost
//!
//! About 0.1 ms for each process and look. Ten looks a second; fewer if they would take more than a
//! 50th of a CPU.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::ledger::Owner;
use zfolio_core::stats::Stats;
use zfolio_sys::{clock, process};

use super::proc::{self, Memory, Stat};
use crate::stats_file::{self, StatsFile};

/// The time before the first look; it doubles with each look up to [`LOOK`].
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// The pause between two looks is at least this many times as long as a look.
const REST: u32 = 50;

/// After this time a process is no longer between `fork` and `execve`, even on a busy machine.
const SETTLED: Duration = Duration::from_millis(250);

/// A process, by process id and start time.
pub(super) type Key = (u32, u64);

/// The memory of a managed process at its peak.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Peak {
    /// The most memory of a look, without pages of files.
    bytes: u64,
    /// The kernel's own peak, with pages of files, and the most of these at a look.
    kernel_bytes: u64,
    file_bytes: u64,
    /// The kinds of memory at the look that found the most.
    pub(super) memory: Memory,
    /// What zfolio counted for the process at that look.
    pub(super) held_bytes: u64,
}

impl Peak {
    /// The most memory, without pages of files; the process itself has seen so many of these.
    ///
    /// How many of them there were at the kernel's peak is not known, and the most may have been between two looks: the
    /// process itself looks more often.
    pub(super) fn most(&self, file_bytes: u64) -> u64 {
        self.bytes.max(self.kernel_bytes.saturating_sub(self.file_bytes.max(file_bytes)))
    }

    fn note(&mut self, memory: &Memory) {
        self.bytes = self.bytes.max(memory.counted_bytes());
        self.kernel_bytes = self.kernel_bytes.max(memory.peak_bytes);
        self.file_bytes = self.file_bytes.max(memory.file_bytes);
    }
}

/// Processes that are not managed, or whose figures are unknown, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// The name of their program.
    pub(super) command: String,
    /// The reason, as text.
    pub(super) reason: String,
    /// Whether the library is in them, so that only the figures are missing.
    pub(super) managed: bool,
    /// How many there were.
    pub(super) processes: u64,
    /// The most that one of them had resident, without pages of files.
    pub(super) peak_bytes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Standing {
    Unknown,
    /// The process counts its own figures.
    Managed,
    /// It does not, for this reason; true if the library is in it.
    Other(String, bool),
    /// It has its parent's address space (`vfork`, `clone` with `CLONE_VM`), and no memory of its own.
    Part,
}

/// The record of one image of one process.
#[derive(Debug)]
struct Member {
    start_ticks: u64,
    command: String,
    image: Option<(u64, u64)>,
    /// When this image was first seen.
    seen_ns: u64,
    standing: Standing,
    peak: Peak,
    inner_pid: u32,
    /// At the last look.
    memory: Memory,
}

/// A process at the last look.
#[derive(Debug)]
pub(super) struct Seen<'t> {
    /// Its process id here.
    pub(super) pid: u32,
    inner_pid: u32,
    pub(super) start_ticks: u64,
    /// What it had resident.
    pub(super) memory: &'t Memory,
    /// Whether it is no longer between `fork` and `execve`.
    pub(super) settled: bool,
}

impl Seen<'_> {
    /// Whether it is the process that calls itself `owner`.
    pub(super) fn is(&self, owner: Owner) -> bool {
        let start_is_known = owner.start_ticks != 0;
        self.inner_pid == owner.pid && (!start_is_known || self.start_ticks == owner.start_ticks)
    }
}

/// The tree. See the module.
#[derive(Debug)]
pub(super) struct Tree {
    first: u32,
    /// The file name of our library.
    library: String,
    /// The directory of the files of figures, if there is one.
    directory: Option<PathBuf>,
    members: BTreeMap<u32, Member>,
    /// Managed processes, including those that have ended.
    pub(super) peaks: BTreeMap<Key, Peak>,
    groups: BTreeMap<(String, String), Group>,
    /// All processes that were ever seen.
    seen: BTreeSet<Key>,
    /// The most that all processes together had resident, without pages of files; shared pages count for each of
    /// them.
    pub(super) together_bytes_max: u64,
    /// The most pages of files of any process.
    pub(super) file_bytes_max: u64,
    next_ns: u64,
    wait: Duration,
    /// The time between the last look and the next.
    pub(super) pause_ns: u64,
}

/// A managed process that is running.
pub(super) struct Live {
    /// Its process id.
    pub(super) pid: u32,
    /// When it started, in clock ticks.
    pub(super) start_ticks: u64,
    /// Its present figures.
    pub(super) stats: Box<Stats>,
}

impl Tree {
    /// The tree of the program `first`, which has just been started.
    pub(super) fn new(first: u32, library: String, directory: Option<PathBuf>) -> Tree {
        Tree {
            first,
            library,
            directory,
            members: BTreeMap::new(),
            peaks: BTreeMap::new(),
            groups: BTreeMap::new(),
            seen: BTreeSet::new(),
            together_bytes_max: 0,
            file_bytes_max: 0,
            next_ns: clock::monotonic_ns() + nanoseconds(FIRST_LOOK),
            wait: FIRST_LOOK,
            pause_ns: nanoseconds(FIRST_LOOK),
        }
    }

    /// The time until the next look.
    pub(super) fn rest(&self) -> Duration {
        Duration::from_nanos(self.next_ns.saturating_sub(clock::monotonic_ns()))
    }

    /// Looks at all processes, if a look is due.
    pub(super) fn look_if_due(&mut self) {
        if clock::monotonic_ns() < self.next_ns {
            return;
        }
        // CPU time, not elapsed time: on a busy machine a look would seem expensive, and looks
        // would be too rare.
        let began = clock::thread_ns();
        self.look();
        let took = Duration::from_nanos(clock::thread_ns() - began);
        self.wait = (self.wait * 2).min(LOOK);
        self.pause_ns = nanoseconds(self.wait.max(took * REST));
        self.next_ns = clock::monotonic_ns() + self.pause_ns;
    }

    /// Looks at all processes.
    pub(super) fn look(&mut self) {
        // Start with the known processes too, whose parents may have ended. A PID that was used
        // again is not related to the run.
        let mut wave: Vec<(u32, Option<u64>)> = vec![(self.first, None)];
        wave.extend(self.members.iter().map(|(pid, member)| (*pid, Some(member.start_ticks))));
        let (mut alive, mut together) = (BTreeSet::new(), 0);
        while let Some((pid, known_start)) = wave.pop() {
            if alive.contains(&pid) {
                continue;
            }
            let Some(stat) = proc::stat(pid) else { continue };
            if known_start.is_some_and(|start| start != stat.start_ticks) {
                continue;
            }
            alive.insert(pid);
            wave.extend(proc::children(pid, &stat).into_iter().map(|child| (child, None)));
            if let Some(memory) = proc::memory(pid) {
                let is_part = self.is_part(pid, stat.parent);
                let memory = if is_part { memory.without_sizes() } else { memory };
                together += memory.counted_bytes();
                self.note(pid, stat, memory, is_part);
            }
        }
        self.together_bytes_max = self.together_bytes_max.max(together);
        let gone: Vec<u32> =
            self.members.keys().filter(|pid| !alive.contains(pid)).copied().collect();
        gone.into_iter().for_each(|pid| self.end(pid));
    }

    /// Whether a process has its parent's address space. One with figures of its own has none of another's.
    fn is_part(&self, pid: u32, parent: u32) -> bool {
        let is_managed =
            self.members.get(&pid).is_some_and(|one| one.standing == Standing::Managed);
        !is_managed && pid != self.first && process::share_memory(pid, parent)
    }

    /// Records the present memory of a process.
    fn note(&mut self, pid: u32, stat: Stat, memory: Memory, is_part: bool) {
        let image = proc::image(pid);
        let same =
            |member: &Member| member.start_ticks == stat.start_ticks && member.image == image;
        if self.members.get(&pid).is_some_and(|member| !same(member)) {
            self.end(pid);
        }
        let member = match self.members.entry(pid) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                self.seen.insert((memory.inner_pid, stat.start_ticks));
                entry.insert(Member {
                    start_ticks: stat.start_ticks,
                    command: String::new(),
                    image,
                    seen_ns: clock::monotonic_ns(),
                    standing: Standing::Unknown,
                    peak: Peak::default(),
                    inner_pid: memory.inner_pid,
                    memory,
                })
            }
        };
        member.command = stat.command;
        member.memory = memory;
        member.peak.note(&memory);
        self.file_bytes_max = self.file_bytes_max.max(memory.file_bytes);
        let figures = |member: &Member| {
            let directory = self.directory.as_deref()?;
            stats_file::of_start(directory, (pid, member.inner_pid), member.start_ticks)
        };
        if is_part != (member.standing == Standing::Part) {
            member.standing = if is_part { Standing::Part } else { Standing::Unknown };
            member.seen_ns = clock::monotonic_ns();
        }
        let has_figures = || figures(member).is_some();
        if member.standing == Standing::Unknown {
            let settled = clock::monotonic_ns() - member.seen_ns > nanoseconds(SETTLED);
            member.standing = judge(pid, settled, &memory, &self.library, has_figures);
        } else if matches!(member.standing, Standing::Other(_, true)) && has_figures() {
            // Its loader took long, as with many libraries from a slow disk.
            member.standing = Standing::Managed;
        }
        if memory.counted_bytes() > member.peak.memory.counted_bytes() {
            member.peak.memory = memory;
            let held = figures(member).filter(|_| member.standing == Standing::Managed);
            member.peak.held_bytes = held.map_or(0, |file| held_bytes(&file.stats));
        }
    }

    /// Adds the record of a process whose image has gone to the results.
    fn end(&mut self, pid: u32) {
        let Some(member) = self.members.remove(&pid) else { return };
        let key = (member.inner_pid, member.start_ticks);
        let (reason, managed) = match member.standing {
            // The figures of the image before are lost, since the library made its file anew.
            Standing::Managed => {
                self.peaks.insert(key, member.peak);
                return;
            }
            // Too short to judge; almost always a process that was about to be managed.
            Standing::Unknown => {
                self.peaks.entry(key).or_insert(member.peak);
                return;
            }
            Standing::Other(reason, managed) => (reason, managed),
            Standing::Part => return,
        };
        let group = Group {
            command: member.command.clone(),
            reason: reason.clone(),
            managed,
            processes: 0,
            peak_bytes: 0,
        };
        let group = self.groups.entry((member.command, reason)).or_insert(group);
        group.processes += 1;
        group.peak_bytes = group.peak_bytes.max(member.peak.most(0));
    }

    /// At the end of the run: adds all remaining records to the results. `kernel_bytes_max` is the
    /// peak of the program, or of a process that it waited for, by the kernel's count.
    pub(super) fn finish(&mut self, kernel_bytes_max: u64) {
        // The program may have grown after the last look. If there was only one process, the peak
        // is its own.
        let alone = self.seen.len() == 1;
        let first = self.members.get_mut(&self.first).filter(|_| alone);
        if let Some(member) = first.filter(|one| matches!(one.standing, Standing::Other(..))) {
            member.peak.kernel_bytes = member.peak.kernel_bytes.max(kernel_bytes_max);
        }
        let pids: Vec<u32> = self.members.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.end(pid));
    }

    /// The processes without figures, largest first.
    pub(super) fn groups(&self) -> Vec<&Group> {
        let mut groups: Vec<&Group> = self.groups.values().collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.peak_bytes));
        groups
    }

    /// The managed processes that are running, with their figures.
    pub(super) fn live(&self) -> Vec<Live> {
        let Some(directory) = self.directory.as_deref() else { return Vec::new() };
        let managed = self.members.iter().filter(|(_, one)| one.standing == Standing::Managed);
        let live = managed.filter_map(|(pid, member)| {
            let start_ticks = member.start_ticks;
            let numbers = (*pid, member.inner_pid);
            let file = stats_file::of_start(directory, numbers, start_ticks)?;
            Some(Live { pid: *pid, start_ticks, stats: file.stats })
        });
        live.collect()
    }

    /// All processes of the last look.
    pub(super) fn alive(&self) -> impl Iterator<Item = Seen<'_>> {
        let now_ns = clock::monotonic_ns();
        self.members.iter().map(move |(pid, member)| Seen {
            pid: *pid,
            inner_pid: member.inner_pid,
            start_ticks: member.start_ticks,
            memory: &member.memory,
            settled: now_ns.saturating_sub(member.seen_ns) > nanoseconds(SETTLED),
        })
    }

    /// Whether the library is certainly not in a process: it executes a program that does not load it.
    pub(super) fn is_without_library(&self, pid: u32) -> bool {
        let member = self.members.get(&pid);
        member.is_some_and(|one| matches!(one.standing, Standing::Other(_, false)))
            && proc::loads(pid, &self.library) == Some(false)
    }

    /// How many processes there were: those that were seen, and those of `files` that ended between two looks.
    pub(super) fn count(&self, files: &[StatsFile]) -> usize {
        let unseen = files.iter().filter(|file| !self.seen.contains(&file.key()));
        self.seen.len() + unseen.count()
    }

    /// Whether the process that left `file` was there at the last look.
    pub(super) fn has(&self, file: &StatsFile) -> bool {
        let key = |one: &Member| (one.inner_pid, one.start_ticks);
        self.members.values().any(|one| key(one) == file.key())
    }

    /// Whether the program itself left `file`.
    pub(super) fn is_first(&self, file: &StatsFile) -> bool {
        file.pid == self.first
    }

    /// Forgets the peak of a process that is only counted from now on. False: it was never seen.
    pub(super) fn forget(&mut self, file: &StatsFile) -> bool {
        self.peaks.remove(&file.key());
        self.seen.contains(&file.key())
    }

    /// The most that the process which left `file` had resident, without pages of files: by its own count, and as seen
    /// from outside.
    pub(super) fn peak_bytes(&self, file: &StatsFile) -> u64 {
        let figures = &file.stats.figures;
        let seen = self.peak_of(file).most(figures.file_bytes_max.load(Relaxed));
        seen.max(figures.process_bytes_max.load(Relaxed))
    }

    /// The peak of the process that left `file`; the default if it was never seen.
    pub(super) fn peak_of(&self, file: &StatsFile) -> Peak {
        self.peaks.get(&file.key()).copied().unwrap_or_default()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Judges an image, by TREE-2.
fn judge(
    pid: u32,
    settled: bool,
    memory: &Memory,
    library: &str,
    has_figures: impl Fn() -> bool,
) -> Standing {
    let other = |(reason, certain): (String, bool), managed| match certain || settled {
        true => Standing::Other(reason, managed),
        false => Standing::Unknown,
    };
    match proc::loads(pid, library) {
        Some(false) => other(proc::reason_without_library(pid, memory, library), false),
        _ if has_figures() => Standing::Managed,
        Some(true) => other((proc::reason_without_figures(pid), false), true),
        None => other(proc::reason_without_library(pid, memory, library), false),
    }
}

/// What zfolio counts for a process: resident and managed, staged, compressed, and tables.
fn held_bytes(stats: &Stats) -> u64 {
    let figures = &stats.figures;
    let of = |figure: &AtomicU64| figure.load(Relaxed);
    if of(&figures.engaged) == 0 {
        return 0;
    }
    [&figures.resident_bytes, &figures.staged_bytes, &figures.pool_bytes, &figures.metadata_bytes]
        .into_iter()
        .map(of)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::{Memory, Peak, Tree};
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// Goal: pages of files are in no peak, also those that came and went between two looks. Method: 48 MiB of the
    /// program's own and 75 of a file, of which a look saw 10 and the process 75.
    #[test]
    fn a_peak_is_without_pages_of_files() {
        const MIB: u64 = 1 << 20;
        let mut peak = Peak::default();
        let mut look = |anonymous: u64, file: u64, most: u64| {
            let mut memory = Memory::default();
            memory.anonymous_bytes = anonymous * MIB;
            memory.file_bytes = file * MIB;
            memory.peak_bytes = most * MIB;
            peak.note(&memory);
        };
        look(40, 10, 50);
        look(48, 2, 123);
        assert_eq!((peak.most(0), peak.most(75 * MIB)), (113 * MIB, 48 * MIB));
        assert_eq!(peak.most(80 * MIB), 48 * MIB, "never below what was seen");
    }

    /// Goal: one address space counts once. Method: a program with 32 MiB waits for a child that has the same ones, as
    /// after `vfork`.
    #[test]
    fn a_shared_address_space_counts_once() {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let (clone, write, exit) = (libc::SYS_clone, libc::SYS_write, libc::SYS_exit_group);
        // The child does not return from where its parent waits, whose stack it has; the parent is killed there.
        let script = format!(
            "my ($all, $line, $end) = ('x' x (32 << 20), \"\\n\", ''); \
             if (syscall({clone}, {flags}, 0, 0, 0, 0) == 0) \
             {{ syscall({write}, 1, $line, 1); sysread(STDIN, $end, 1); syscall({exit}, 0); }}"
        );
        let mut perl = Command::new("perl")
            .args(["-e", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        perl.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let mut tree = Tree::new(perl.id(), "no-such-library.so".to_owned(), None);
        for _ in 0..100 {
            tree.look();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let most = tree.together_bytes_max;
        let own = super::proc::memory(perl.id()).unwrap().counted_bytes();
        perl.kill().unwrap();
        drop(perl.stdin.take());
        perl.wait().unwrap();
        tree.finish(0);
        assert_eq!((tree.count(&[]), tree.groups().len()), (2, 1), "{:?}", tree.groups());
        assert!(own >= 32 << 20 && (own..own / 2 * 3).contains(&most), "{most} of {own}");
    }

    /// Goal: a process without the library is reported some time after it was first seen, with the
    /// kernel's peak, and still after its end.
    #[test]
    fn a_tree_of_strangers_is_seen() {
        // It says a word once its child executes `sleep`: before that, the child is the shell's image.
        let script = "sleep 30 & until grep -q sleep /proc/$!/comm; do :; done; \
                      echo; read line; kill $!";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let mut tree = Tree::new(shell.id(), "no-such-library.so".to_owned(), None);
        while tree.count(&[]) < 2 {
            tree.look();
            std::thread::yield_now();
        }
        for _ in 0..100 {
            tree.look();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(shell.stdin.take());
        shell.wait().unwrap();
        tree.finish(0);
        let groups = tree.groups();
        let sleep = groups.iter().find(|group| group.command == "sleep").expect("it was seen");
        assert!(sleep.peak_bytes > 100 << 10 && !sleep.managed, "{sleep:?}");
        assert!(sleep.reason.contains("without LD_PRELOAD") || sleep.reason.contains("ZFOLIO"));
        assert!(tree.together_bytes_max >= sleep.peak_bytes && tree.peaks.is_empty());
    }
}
