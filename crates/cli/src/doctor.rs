//! `zfolio doctor`: everything that zfolio needs of a machine, whether it is there, and what to do
//! if not.

use std::borrow::Cow;
use std::env;
use std::fmt::{Display, Write as _};
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use zfolio_block::ublk;
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::size;
use zfolio_iaa::discover;
use zfolio_pager::spill;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::probe::{self, Feature};
use zfolio_sys::{Errno, uring};

use crate::allowance::Allowance;
use crate::arguments::DoctorArgs;
use crate::failure::Failure;
use crate::output::print;
use crate::requirements::Findings;
use crate::run::{self, spill_directory};
use crate::stats_file;

/// The fewest mappings that are enough for a process with many managed regions.
const MAPPINGS_MIN: u64 = 65_530;

/// `CAP_SYS_PTRACE`, by its number.
const CAP_SYS_PTRACE: u64 = 19;

/// How serious a finding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// As needed.
    Good,
    /// Worth knowing; nothing fails because of it.
    Note,
    /// Something is slower, or one command cannot work.
    Warn,
    /// `zfolio run` cannot work.
    Bad,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Good => "ok",
            State::Note => "note",
            State::Warn => "warn",
            State::Bad => "FAIL",
        }
    }

    /// `Good` if `good`, and otherwise `otherwise`.
    fn unless(good: bool, otherwise: State) -> State {
        if good { State::Good } else { otherwise }
    }
}

/// One check and its result.
#[derive(Debug)]
struct Check {
    what: String,
    state: State,
    found: String,
    why: &'static str,
    todo: Cow<'static, str>,
}

/// Checks the machine; the status is success if `zfolio run` can work.
///
/// # Errors
///
/// If the findings cannot be written.
pub(crate) fn doctor(arguments: &DoctorArgs) -> Result<ExitCode, Failure> {
    let findings = Findings::gather();
    let mut checks = Vec::new();
    kernel(&mut checks, &findings);
    ways_in(&mut checks, &findings);
    features(&mut checks, &findings);
    process(&mut checks);
    memory(&mut checks);
    disk(&mut checks);
    for_bench(&mut checks);
    for_device(&mut checks);
    accelerators(&mut checks, Path::new("/sys"), Path::new("/dev/iax"));
    let obstacle = findings.obstacle();
    let good = obstacle.is_none() && checks.iter().all(|check| check.state != State::Bad);
    let text = if arguments.json {
        format!("{:#}\n", as_json(&checks, obstacle.as_deref(), good))
    } else {
        as_text(&checks, obstacle.as_deref(), good)
    };
    print(&text)?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn as_json(checks: &[Check], obstacle: Option<&str>, good: bool) -> Value {
    let check = |check: &Check| {
        json!({
            "check": check.what,
            "state": check.state.name(),
            "found": check.found,
            "why": check.why,
            "todo": if check.state == State::Good { "" } else { &check.todo },
        })
    };
    json!({
        "run_works": good,
        "obstacle": obstacle,
        "checks": checks.iter().map(check).collect::<Vec<_>>(),
    })
}

fn as_text(checks: &[Check], obstacle: Option<&str>, good: bool) -> String {
    let width = checks.iter().map(|check| check.what.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { what, state, found, why, todo } in checks {
        let line = format!("{:4}  {what:width$}  {found}\n", state.name());
        text.push_str(&line);
        if *state != State::Good {
            writeln!(text, "{:width$}        {why}", "").expect("writing to a string");
            writeln!(text, "{:width$}        -> {todo}", "").expect("writing to a string");
        }
    }
    match (good, obstacle) {
        (true, _) => text.push_str("\n'zfolio run' works here.\n"),
        (false, Some(obstacle)) => {
            writeln!(text, "\n'zfolio run' cannot work here: {obstacle}.")
                .expect("writing to a string");
        }
        (false, None) => text.push_str("\n'zfolio run' cannot work here: see FAIL above.\n"),
    }
    text
}

fn kernel(checks: &mut Vec<Check>, findings: &Findings) {
    checks.push(Check {
        what: "kernel".to_owned(),
        state: State::unless(at_least(&findings.release, 6, 8), State::Note),
        found: findings.release.clone(),
        why: "UFFDIO_MOVE came with Linux 6.8; some kernels have it backported.",
        todo: "boot 6.8 or newer if MOVE below is missing (Debian 12: bookworm-backports)".into(),
    });
    checks.push(Check {
        what: "page size".to_owned(),
        state: State::unless(findings.page_bytes == PAGE_BYTES, State::Bad),
        found: format!("{} bytes", findings.page_bytes),
        why: "zfolio is built for pages of 4096 bytes.",
        todo: "boot a kernel with pages of 4096 bytes".into(),
    });
}

/// Whether a release such as `6.12.3-amd64` is at least `major.minor`.
fn at_least(release: &str, major: u32, minor: u32) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let found: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    found >= (major, minor)
}

fn answer(result: Result<u64, Errno>) -> String {
    match result {
        Ok(features) => format!("open, features {features:#x}"),
        Err(error) => format!("closed: {error}"),
    }
}

/// One of the first three ways is enough, so each that is closed is only a note.
fn ways_in(checks: &mut Vec<Check>, findings: &Findings) {
    let open = findings.device.or(findings.syscall).is_ok();
    let closed = if open { State::Note } else { State::Bad };
    checks.push(Check {
        what: "/dev/userfaultfd".to_owned(),
        state: State::unless(findings.device.is_ok(), closed),
        found: answer(findings.device),
        why: "The device is one way to serve faults of the kernel too; file permissions decide.",
        todo: "sudo usermod -aG zfolio $USER, then log in again (where zfolio's udev rule is \
               installed: docs/recipes.md, also below share/doc/zfolio); or sudo setfacl -m \
               u:$USER:rw /dev/userfaultfd (package acl), until the next boot; in a container \
               --device /dev/userfaultfd"
            .into(),
    });
    checks.push(Check {
        what: "userfaultfd(2)".to_owned(),
        state: State::unless(findings.syscall.is_ok(), closed),
        found: answer(findings.syscall),
        why: "The system call is the other way: for root, CAP_SYS_PTRACE, or with the sysctl.",
        todo: "sudo sysctl vm.unprivileged_userfaultfd=1, or the device above".into(),
    });
    checks.push(Check {
        what: "userfaultfd(2), user mode".to_owned(),
        state: State::unless(findings.user_mode.is_ok(), State::Warn),
        found: answer(findings.user_mode),
        why: "What the library (inline mode) uses; anybody may, unless seccomp forbids the call.",
        todo: "allow userfaultfd in the container's seccomp profile".into(),
    });
    let sysctl = read("/proc/sys/vm/unprivileged_userfaultfd");
    checks.push(Check {
        what: "vm.unprivileged_userfaultfd".to_owned(),
        state: State::unless(sysctl.as_deref() == Some("1") || open, State::Note),
        found: sysctl.unwrap_or("not there".to_owned()),
        why: "1 opens the system call to everybody.",
        todo: "sudo sysctl vm.unprivileged_userfaultfd=1".into(),
    });
    let capable = status("CapEff:")
        .and_then(|text| u64::from_str_radix(&text, 16).ok())
        .is_some_and(|set| (set >> CAP_SYS_PTRACE) & 1 == 1);
    checks.push(Check {
        what: "CAP_SYS_PTRACE".to_owned(),
        state: State::unless(capable || open, State::Note),
        found: (if capable { "yes" } else { "no" }).to_owned(),
        why: "Opens the system call without the sysctl.",
        todo: "run as root, or with --cap-add SYS_PTRACE in a container".into(),
    });
    let filter = status("Seccomp:").unwrap_or_default();
    checks.push(Check {
        what: "seccomp".to_owned(),
        state: State::unless(filter != "2", State::Note),
        found: (if filter == "2" { "a filter is active" } else { "none" }).to_owned(),
        why: "Container profiles usually hide userfaultfd(2); the device is not affected.",
        todo: "--device /dev/userfaultfd, or a profile that allows userfaultfd".into(),
    });
}

fn features(checks: &mut Vec<Check>, findings: &Findings) {
    let word = findings.features().unwrap_or(0);
    let needed = [
        (Feature::MOVE, State::Bad, "Takes a page out and puts one in without a copy."),
        (Feature::THREAD_ID, State::Bad, "Lets a handler follow the thread that waits."),
        (Feature::EVENT_REMOVE, State::Bad, "madvise of managed memory must be seen."),
        (Feature::EVENT_UNMAP, State::Bad, "munmap of managed memory must be seen."),
        (Feature::EVENT_REMAP, State::Bad, "mremap of managed memory must be seen."),
        (Feature::SIGBUS, State::Warn, "Inline mode of the library serves faults this way."),
    ];
    for (feature, otherwise, why) in needed {
        let found = feature.is_in(word);
        checks.push(Check {
            what: format!("UFFD_FEATURE_{}", feature.name),
            state: State::unless(found, otherwise),
            found: (if found { "yes" } else { "no" }).to_owned(),
            why,
            todo: if feature == Feature::MOVE {
                "boot Linux 6.8 or newer".into()
            } else {
                "boot Linux 4.14 or newer".into()
            },
        });
    }
    checks.push(Check {
        what: "a page moved on trial".to_owned(),
        state: State::unless(findings.moved.is_ok(), State::Bad),
        found: findings.moved.map_or_else(|error| error.to_string(), |()| "yes".to_owned()),
        why: "The proof: opened, registered and moved as 'zfolio run' does it.",
        todo: "see what failed above".into(),
    });
}

fn process(checks: &mut Vec<Check>) {
    let library = run::find_preload();
    checks.push(Check {
        what: "library".to_owned(),
        state: State::unless(library.is_ok(), State::Bad),
        found: library
            .map_or_else(|why| why.message().to_owned(), |path| path.display().to_string()),
        why: "It is loaded into the program.",
        todo: "make build, or install zfolio with its library, in a place without spaces".into(),
    });
    let directory = stats_file::prepare_directory(probe::effective_uid());
    checks.push(Check {
        what: "/dev/shm".to_owned(),
        state: State::unless(directory.is_ok(), State::Warn),
        found: directory.map_or_else(|error| error, |path| path.display().to_string()),
        why: "The statistics of a process live there; without it 'stat' and 'run' have no figures.",
        todo: "mount a tmpfs on /dev/shm, or remove what is in the way".into(),
    });
    let rseq = probe::has_rseq();
    checks.push(Check {
        what: "rseq".to_owned(),
        state: State::unless(rseq, State::Warn),
        found: (if rseq { "registered by the C library" } else { "no" }).to_owned(),
        why: "Tells the CPU of a waiting thread at once; without it, handlers do not follow it.",
        todo: "use glibc 2.35 or newer, and do not set GLIBC_TUNABLES=glibc.pthread.rseq=0".into(),
    });
    let limit = probe::address_space_limit();
    checks.push(Check {
        what: "ulimit -v".to_owned(),
        state: State::unless(limit.is_none(), State::Warn),
        found: limit.map_or_else(|| "unlimited".to_owned(), size::display),
        why: "zfolio reserves address space, which costs no memory but counts here.",
        todo: "ulimit -v unlimited".into(),
    });
    let mappings = read("/proc/sys/vm/max_map_count");
    let enough = mappings.as_deref().and_then(|text| text.parse::<u64>().ok());
    checks.push(Check {
        what: "vm.max_map_count".to_owned(),
        state: State::unless(enough.is_some_and(|count| count >= MAPPINGS_MIN), State::Warn),
        found: mappings.unwrap_or("unknown".to_owned()),
        why: "Each managed region and each hole in one is a mapping.",
        todo: "sudo sysctl vm.max_map_count=262144".into(),
    });
}

/// What `zfolio run` spills to where nobody says.
fn disk(checks: &mut Vec<Check>) {
    let directory = spill_directory(env::var("TMPDIR").ok());
    let room = spill::room(&directory);
    checks.push(Check {
        what: "room on disk".to_owned(),
        state: State::unless(room.is_ok(), State::Note),
        found: match &room {
            Ok(bytes) => {
                format!("{} may be spilled to {}", size::display(*bytes), directory.display())
            }
            Err(refusal) => refusal.to_string(),
        },
        why: "What does not fit compressed goes there; without it the limit is passed.",
        todo: "zfolio run --spill DIR, or TMPDIR=DIR, with a directory on a disk".into(),
    });
    if let Ok(is_direct) = spill::is_direct(&directory) {
        checks.push(Check {
            what: "direct I/O".to_owned(),
            state: State::unless(is_direct, State::Note),
            found: (if is_direct { "yes" } else { "no" }).to_owned(),
            why: "What is spilled goes past the page cache; without it, it takes the machine's memory until written.",
            todo: "zfolio run --spill DIR, with a directory on another file system (ext4, XFS, btrfs)".into(),
        });
    }
    let ring = uring::probe();
    checks.push(Check {
        what: "io_uring".to_owned(),
        state: State::unless(ring.is_ok(), State::Note),
        found: ring.map_or_else(|errno| ErrnoText(errno).to_string(), |()| "yes".to_owned()),
        why: "Reads and writes the disk; plain system calls do it where it is forbidden, slower.",
        todo:
            "allow io_uring_setup and io_uring_enter in the container's seccomp profile, and see \
               kernel.io_uring_disabled"
                .into(),
    });
}

fn memory(checks: &mut Vec<Check>) {
    let overcommit = read("/proc/sys/vm/overcommit_memory");
    checks.push(Check {
        what: "vm.overcommit_memory".to_owned(),
        state: State::unless(overcommit.as_deref() != Some("2"), State::Warn),
        found: overcommit.unwrap_or("unknown".to_owned()),
        why: "2 counts address space as if it were memory: a program that needs more than there is \
              gets none.",
        todo: "sudo sysctl vm.overcommit_memory=0".into(),
    });
    let huge = read("/sys/kernel/mm/transparent_hugepage/enabled");
    checks.push(Check {
        what: "transparent huge pages".to_owned(),
        state: State::Good,
        found: chosen(huge.as_deref()),
        why: "",
        todo: Cow::default(),
    });
    let allowance = Allowance::here();
    let found = allowance.as_ref().map(|allowance| {
        format!("{} by {}", size::display(allowance.bytes), allowance.source.display())
    });
    checks.push(Check {
        what: "memory allowed here".to_owned(),
        state: State::unless(allowance.is_some(), State::Warn),
        found: found.unwrap_or("unknown".to_owned()),
        why: "'zfolio run' takes half of it unless --limit is given.",
        todo: "mount /proc, or always give --limit".into(),
    });
}

/// The selected word of a text such as `always [madvise] never`.
fn chosen(text: Option<&str>) -> String {
    let inside = |text: &str| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
    text.and_then(inside).unwrap_or("not there".to_owned())
}

/// Checks what only `zfolio bench` needs, to compare with the kernel.
fn for_bench(checks: &mut Vec<Check>) {
    let zram = Path::new("/sys/class/zram-control").exists() || module("zram");
    checks.push(Check {
        what: "zram (for bench)".to_owned(),
        state: State::unless(zram, State::Note),
        found: (if zram { "yes" } else { "no" }).to_owned(),
        why: "'zfolio bench --against kernel' compares with the kernel's own compressed swap.",
        todo: "sudo modprobe zram, if you want the comparison".into(),
    });
    let controller = |path: &str, line: &str| {
        read(path).is_some_and(|text| text.split_whitespace().any(|word| word == line))
    };
    let version_2 = controller("/sys/fs/cgroup/cgroup.controllers", "memory");
    let version_1 = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists();
    checks.push(Check {
        what: "memory cgroup (for bench)".to_owned(),
        state: State::unless(version_1 || version_2, State::Note),
        found: match (version_2, version_1) {
            (true, _) => "version 2",
            (_, true) => "version 1",
            _ => "no",
        }
        .to_owned(),
        why: "The comparison needs one to put the kernel under the same limit.",
        todo: "mount a cgroup hierarchy with the memory controller".into(),
    });
    let root = probe::effective_uid() == 0;
    checks.push(Check {
        what: "root (for bench)".to_owned(),
        state: State::unless(root, State::Note),
        found: (if root { "yes" } else { "no" }).to_owned(),
        why: "Setting up zram and a cgroup needs root; nothing else here does.",
        todo: "sudo zfolio bench, if you want the comparison".into(),
    });
}

/// Checks what only `zfolio device --ublk` needs.
fn for_device(checks: &mut Vec<Check>) {
    let refusal = ublk::refusal(&probe::kernel_release());
    let is_there = Path::new("/dev/ublk-control").exists() || module("ublk_drv");
    checks.push(Check {
        what: "ublk (for device)".to_owned(),
        state: State::unless(is_there && refusal.is_none(), State::Note),
        found: refusal.unwrap_or_else(|| (if is_there { "yes" } else { "no" }).to_owned()),
        why: "'zfolio device add --ublk' makes a disk a block device of this machine.",
        todo: "boot Linux 6.6 or newer with CONFIG_BLK_DEV_UBLK and sudo modprobe ublk_drv, or use --nbd or \
               --vhost-user"
            .into(),
    });
}

/// The hardware that compresses, and what programs may use of it.
fn accelerators(checks: &mut Vec<Check>, sysfs: &Path, dev: &Path) {
    let devices = discover::devices(sysfs);
    checks.push(Check {
        what: "IAA devices".to_owned(),
        state: State::unless(!devices.is_empty(), State::Note),
        found: if devices.is_empty() { "no".to_owned() } else { devices.len().to_string() },
        why: "Intel's In-Memory Analytics Accelerator compresses in hardware; without it, processors do.",
        todo: "nothing, unless the machine has one: then sudo modprobe idxd".into(),
    });
    if devices.is_empty() {
        return;
    }
    let (mut usable, mut closed, mut other) = (0, None, None);
    for queue in devices.iter().flat_map(|device| device.usable(dev)) {
        match queue.map(|found| found.may_open()) {
            Ok(Ok(())) => usable += 1,
            Ok(Err(refused)) => _ = closed.get_or_insert(refused.why),
            Err(refused) => {
                _ = other.get_or_insert_with(|| format!("{}: {}", refused.name, refused.why));
            }
        }
    }
    checks.push(Check {
        what: "IAA queues".to_owned(),
        state: State::unless(usable > 0, State::Note),
        found: format!("{usable} for programs of this user"),
        why: "A program needs a queue of type user, and permission; 'zfolio iaa list' shows all.",
        // A queue that is meant for programs, and is closed to this user, says more than those that are not set up.
        todo: closed.or(other).map_or("sudo zfolio iaa setup".into(), Cow::from),
    });
}

/// Whether the kernel module `name` can be loaded.
fn module(name: impl Display) -> bool {
    let list = format!("/lib/modules/{}/modules.dep", probe::kernel_release());
    let file = format!("/{name}.ko");
    fs::read_to_string(list).is_ok_and(|text| {
        text.lines().any(|line| line.split(':').next().is_some_and(|path| path.contains(&file)))
    })
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The value of a line of `/proc/self/status`.
fn status(name: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Check, State, accelerators, at_least, chosen};

    #[test]
    fn releases_are_compared_as_numbers() {
        assert!(at_least("6.8.0", 6, 8) && at_least("6.12.3-amd64", 6, 8) && at_least("7.0", 6, 8));
        assert!(!at_least("6.1.0-40-amd64", 6, 8) && !at_least("5.15", 6, 8));
        assert!(!at_least("unknown", 6, 8));
    }

    /// Goal: queues count only if this user may open them, and the advice is about the first one that is meant for
    /// programs. Method: a made-up sysfs, in which files are missing, as in a container.
    #[test]
    fn queues_that_cannot_be_opened_do_not_count() {
        let root = std::env::temp_dir().join(format!("zfolio-doctor-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let queues = || {
            let mut checks: Vec<Check> = Vec::new();
            accelerators(&mut checks, &root, &root.join("dev"));
            let last = checks.pop().unwrap();
            assert_eq!(last.what, "IAA queues");
            (last.state, last.found, last.todo.into_owned())
        };
        write("bus/dsa/devices/iax1/numa_node", "0");
        let none = "0 for programs of this user".to_owned();
        assert_eq!(queues(), (State::Note, none.clone(), "sudo zfolio iaa setup".to_owned()));
        for queue in ["wq1.0", "wq1.1"] {
            for (attribute, value) in [("type", "user"), ("mode", "dedicated"), ("size", "8")] {
                write(&format!("bus/dsa/devices/{queue}/{attribute}"), value);
            }
            write(&format!("bus/dsa/devices/{queue}/state"), "disabled");
        }
        let todo = "wq1.0: its state is 'disabled': run 'zfolio iaa setup' as root".to_owned();
        assert_eq!(queues(), (State::Note, none.clone(), todo));
        write("bus/dsa/devices/wq1.1/state", "enabled");
        let (state, found, todo) = queues();
        assert_eq!((state, found), (State::Note, none));
        assert!(todo.contains("dev/wq1.1: ") && todo.ends_with("container or sandbox"), "{todo}");
        write("dev/wq1.1", "");
        let (state, found, _) = queues();
        assert_eq!((state, &*found), (State::Good, "1 for programs of this user"));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(chosen(Some("always [madvise] never")), "madvise");
        assert_eq!(chosen(Some("nonsense")), "not there");
        assert_eq!(chosen(None), "not there");
    }
}
