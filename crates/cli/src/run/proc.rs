//! What `/proc` says about a process of the run.
//!
//! A process may end at any moment, and may belong to another user, so everything here returns an
//! `Option`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::program;

/// The kernel reports CPU time in hundredths of a second, whatever its own clock is.
const TICK_NS: u64 = 10_000_000;

/// The variable that the library reads.
const LIMIT: &str = "ZFOLIO_LIMIT";

/// A program is managed only if it has both variables in its environment.
const VARIABLES: [&str; 2] = ["LD_PRELOAD", LIMIT];

/// The contents of `/proc/PID/stat`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Stat {
    /// Its name.
    pub(super) command: String,
    /// Its parent.
    pub(super) parent: u32,
    /// CPU time so far.
    cpu_ns: u64,
    /// Threads.
    threads: u64,
    /// When it started, in clock ticks.
    pub(super) start_ticks: u64,
}

/// The resident memory in `/proc/PID/status`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Memory {
    /// The most since the last `execve`, by the kernel's count.
    pub(super) peak_bytes: u64,
    /// Anonymous memory now.
    pub(super) anonymous_bytes: u64,
    /// Pages of files now: code, libraries, mapped data.
    pub(super) file_bytes: u64,
    /// Shared memory now.
    pub(super) shared_bytes: u64,
    /// The user id of the process.
    uid: u32,
    /// The process id in its innermost PID namespace.
    pub(super) inner_pid: u32,
}

impl Memory {
    /// Of the same process, whose memory is another's.
    pub(super) fn without_sizes(self) -> Memory {
        Memory { uid: self.uid, inner_pid: self.inner_pid, ..Memory::default() }
    }

    /// What counts against a limit: all but pages of files.
    pub(super) fn counted_bytes(&self) -> u64 {
        self.anonymous_bytes + self.shared_bytes
    }
}

fn read(pid: u32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads `/proc/PID/stat`; `None` if the process has ended.
pub(super) fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&read(pid, "stat")?)
}

/// The fields of `/proc/PID/stat` after the name.
struct Fields<'t>(Vec<&'t str>);

impl<'t> Fields<'t> {
    fn of(text: &'t str) -> Option<Fields<'t>> {
        // The name, in parentheses, may contain anything; it ends at the last closing one.
        let fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
        Some(Fields(fields.collect()))
    }

    /// The field with this number in `proc(5)`: the first after the name is 3, the state.
    fn number(&self, number: usize) -> Option<u64> {
        self.0.get(number - 3)?.parse().ok()
    }

    /// Whether the first thread has ended.
    fn is_over(&self) -> bool {
        self.0.first().is_none_or(|state| matches!(*state, "Z" | "X"))
    }
}

/// Whether a process that started then has threads left. Its first thread may have ended before the others.
pub(super) fn is_alive(pid: u32, start_ticks: u64) -> bool {
    let text = read(pid, "stat").unwrap_or_default();
    let Some(fields) = Fields::of(&text) else { return false };
    let is_same = start_ticks == 0 || fields.number(22) == Some(start_ticks);
    is_same && (!fields.is_over() || fields.number(20).is_some_and(|threads| threads > 1))
}

/// The parent of a process.
pub(super) fn parent(pid: u32) -> Option<u32> {
    let text = read(pid, "stat")?;
    u32::try_from(Fields::of(&text)?.number(4)?).ok()
}

/// How many page faults a process had, and its size then.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Faults {
    /// Faults that the kernel has served without a device.
    pub(super) minor: u64,
    /// All that was resident, with pages of files.
    pub(super) resident_bytes: u64,
}

/// Reads the number of page faults.
pub(super) fn faults(pid: u32) -> Option<Faults> {
    let text = read(pid, "stat")?;
    let fields = Fields::of(&text)?;
    let resident_bytes = fields.number(24)? * zfolio_sys::map::PAGE_BYTES as u64;
    Some(Faults { minor: fields.number(10)?, resident_bytes })
}

/// The anonymous pages of a process and its shared memory, by who else has them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Pages {
    /// All.
    pub(super) resident_bytes: u64,
    /// Those that it alone has.
    pub(super) private_bytes: u64,
    /// Each divided by the number of processes that have it.
    pub(super) proportional_bytes: u64,
}

/// Looks at all pages of a process: some milliseconds for each GiB.
pub(super) fn pages(pid: u32) -> Option<Pages> {
    let text = read(pid, "smaps_rollup")?;
    let has_shared = bytes(&text, "Pss_Shmem").is_some_and(|shared| shared > 0);
    // The sum has no such line: how much it is with that of other processes.
    let shared = if has_shared { memory(pid)?.shared_bytes } else { 0 };
    parse_pages(&text, shared)
}

/// `shared_bytes`: the shared memory among these pages.
fn parse_pages(text: &str, shared_bytes: u64) -> Option<Pages> {
    let resident_bytes = bytes(text, "Anonymous")? + shared_bytes;
    let shared_part = if shared_bytes > 0 { bytes(text, "Pss_Shmem")? } else { 0 };
    Some(Pages {
        resident_bytes,
        // Private pages of files are clean; one that was written to is anonymous. Shared memory that has contents is
        // dirty.
        private_bytes: bytes(text, "Private_Dirty")?.min(resident_bytes),
        proportional_bytes: bytes(text, "Pss_Anon")? + shared_part,
    })
}

fn parse_stat(text: &str) -> Option<Stat> {
    let (open, close) = (text.find('(')?, text.rfind(')')?);
    let fields = Fields::of(text)?;
    if fields.is_over() {
        return None;
    }
    Some(Stat {
        command: text.get(open + 1..close)?.to_owned(),
        parent: u32::try_from(fields.number(4)?).ok()?,
        cpu_ns: (fields.number(14)? + fields.number(15)?) * TICK_NS,
        threads: fields.number(20)?,
        start_ticks: fields.number(22)?,
    })
}

/// Reads the memory in `/proc/PID/status`; `None` if the process has ended, or has no memory any
/// more.
pub(super) fn memory(pid: u32) -> Option<Memory> {
    parse_memory(&read(pid, "status")?)
}

fn parse_memory(text: &str) -> Option<Memory> {
    let line = |name: &str| line(text, name);
    Some(Memory {
        peak_bytes: bytes(text, "VmHWM")?,
        anonymous_bytes: bytes(text, "RssAnon").unwrap_or(0),
        file_bytes: bytes(text, "RssFile").unwrap_or(0),
        shared_bytes: bytes(text, "RssShmem").unwrap_or(0),
        // Real, effective, saved, of the file system.
        uid: line("Uid")?.split_ascii_whitespace().nth(1)?.parse().ok()?,
        // One for each namespace, the innermost last.
        inner_pid: line("NSpid").or(line("Pid"))?.split_ascii_whitespace().last()?.parse().ok()?,
    })
}

/// What stands after `name:` in a file of such lines.
fn line<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// A size in such a file, where it is in KiB.
fn bytes(text: &str, name: &str) -> Option<u64> {
    let number: u64 = line(text, name)?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(number.saturating_mul(1024))
}

/// The children of all threads of a process.
pub(super) fn children(pid: u32, stat: &Stat) -> Vec<u32> {
    let of = |thread: u32| {
        let text = read(pid, &format!("task/{thread}/children")).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    };
    if stat.threads == 1 { of(pid) } else { threads(pid).flat_map(of).collect() }
}

fn threads(pid: u32) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The device and number of the file that a process executes. They change when it calls `execve`.
pub(super) fn image(pid: u32) -> Option<(u64, u64)> {
    let file = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
    Some((file.dev(), file.ino()))
}

/// Whether a library of this file name is mapped; `None` if the mappings cannot be read.
pub(super) fn loads(pid: u32, library: &str) -> Option<bool> {
    let maps = read(pid, "maps").filter(|maps| !maps.is_empty())?;
    Some(maps.lines().any(|line| line.ends_with(library)))
}

/// CPU time of the program's own threads, without those of zfolio.
pub(super) fn program_cpu_ns(pid: u32) -> Option<u64> {
    let all = stat(pid)?.cpu_ns;
    let ours = threads(pid).filter_map(|thread| {
        let stat = parse_stat(&read(pid, &format!("task/{thread}/stat"))?)?;
        stat.command.starts_with("zfolio-").then_some(stat.cpu_ns)
    });
    Some(all.saturating_sub(ours.sum()))
}

/// Whether a process had a variable when it started; `None` if its environment cannot be read.
fn has_variable(pid: u32, name: &str) -> Option<bool> {
    let environment = read(pid, "environ")?;
    let is_it = |one: &str| one.strip_prefix(name).is_some_and(|rest| rest.starts_with('='));
    Some(environment.split('\0').any(is_it))
}

/// Why the library is not in a process; and whether this is certain at the first look.
pub(super) fn reason_without_library(pid: u32, memory: &Memory, library: &str) -> (String, bool) {
    if let Some(why) = program::unfit(Path::new(&format!("/proc/{pid}/exe"))) {
        return (why, true);
    }
    let dropped = VARIABLES.iter().find(|name| has_variable(pid, name) == Some(false));
    let elsewhere = fs::read_link(format!("/proc/{pid}/root"));
    let why = if let Some(name) = dropped {
        format!("started without {name} in its environment")
    } else if memory.uid != zfolio_sys::probe::effective_uid() {
        format!("runs as another user, uid {}", memory.uid)
    } else if elsewhere.is_ok_and(|root| root != Path::new("/")) {
        format!("in a root directory without {library}")
    } else {
        format!("{library} was not loaded into it")
    };
    (why, false)
}

/// Why a process that has the library left no figures.
pub(super) fn reason_without_figures(pid: u32) -> String {
    if has_variable(pid, LIMIT) == Some(false) {
        return format!("started without {LIMIT} in its environment");
    }
    if !Path::new(&format!("/proc/{pid}/root/dev/shm")).exists() {
        return "its figures are unknown: it has no /dev/shm".to_owned();
    }
    "its figures are unknown: no file of them was found in /dev/shm".to_owned()
}

#[cfg(test)]
mod tests {
    use super::{
        children, faults, image, is_alive, loads, memory, pages, parent, parse_memory, parse_pages,
        parse_stat, stat,
    };
    use crate::stats_file;

    #[test]
    fn a_process_is_read() {
        let pid = std::process::id();
        let about = stat(pid).expect("we run");
        assert_eq!(Some(about.start_ticks), stats_file::start_ticks(pid));
        let memory = memory(pid).expect("we have memory");
        assert!(memory.peak_bytes >= memory.counted_bytes() / 2 && memory.inner_pid == pid);
        assert!(image(pid).is_some() && loads(pid, "libc.so.6").is_some());
        assert_eq!(loads(pid, "no-such-library.so"), Some(false));
        let mut child = std::process::Command::new("sleep").arg("9").spawn().unwrap();
        assert!(children(pid, &about).contains(&child.id()));
        assert_eq!(parent(child.id()), Some(pid));
        let before = faults(pid).expect("we run");
        let touched = std::hint::black_box(vec![1_u8; 8 << 20]);
        let after = faults(pid).expect("we run");
        assert!(after.minor > before.minor && before.resident_bytes > 0 && touched[9] == 1);
        let start_ticks = stats_file::start_ticks(child.id()).unwrap();
        assert!(is_alive(child.id(), start_ticks) && !is_alive(child.id(), start_ticks + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(stat(child.id()), None);
        assert!(!is_alive(child.id(), start_ticks));
    }

    #[test]
    fn pages_are_counted_by_who_has_them() {
        let text = "55d0-7ffe ---p 0 0 [rollup]\nRss: 60 kB\nPss: 24 kB\nPss_Anon: 20 kB\n\
                    Pss_Shmem: 3 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty: 8 kB\nAnonymous: 40 kB\n";
        let all = |shared| {
            let found = parse_pages(text, shared).expect("whole");
            (found.resident_bytes, found.private_bytes, found.proportional_bytes)
        };
        assert_eq!(all(0), (40 << 10, 8 << 10, 20 << 10));
        assert_eq!(all(12 << 10), (52 << 10, 8 << 10, 23 << 10));
        let mine = pages(std::process::id()).expect("we have memory");
        assert!(mine.private_bytes <= mine.resident_bytes && mine.proportional_bytes > 0);
    }

    #[test]
    fn a_name_may_hold_anything_and_the_dead_are_none() {
        let rest = "1 2 3 0 -1 4194560 1 0 0 0 7 5 0 0 20 0 3 0 12345 1 1";
        let stat = parse_stat(&format!("7 (a) (b\n) S {rest}")).expect("whole");
        assert_eq!((stat.command.as_str(), stat.threads, stat.start_ticks), ("a) (b\n", 3, 12345));
        assert_eq!(stat.cpu_ns, 120_000_000);
        for text in [format!("7 (a) Z {rest}"), "7 (a) S 1".into(), ")(".into(), String::new()] {
            assert_eq!(parse_stat(&text), None, "{text}");
        }
        assert_eq!(parse_memory("Name:\tkthreadd\nUid:\t0\t0\t0\t0\n"), None);
    }
}
