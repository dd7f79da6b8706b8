//! How much memory this machine, or this process's memory cgroup, allows.
//!
//! A cgroup's limit applies to all cgroups below it. So the whole path up to the root is read, and
//! the smallest limit on it counts. Both versions are read: in v2 `memory.max` (above which the
//! kernel kills) and `memory.high` (above which it slows down), in v1 `memory.limit_in_bytes`.
//!
//! Paths are relative to a root directory, so that tests can use a tree of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The file with the machine's memory.
const MEMINFO: &str = "/proc/meminfo";

/// The file with the machine's pressure.
const PRESSURE: &str = "/proc/pressure/memory";

/// A limit, and where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Allowance {
    /// Bytes.
    pub(crate) bytes: u64,
    /// The file with this limit.
    pub(crate) source: PathBuf,
}

impl Allowance {
    /// The lowest limit that applies to this process.
    pub(crate) fn here() -> Option<Allowance> {
        Allowance::below(Path::new("/"), here())
    }

    /// Whether this is the memory of the machine, and not a cgroup's limit.
    pub(crate) fn is_machine(&self) -> bool {
        self.source == Path::new(MEMINFO)
    }

    /// A percentage of what is allowed here, in whole MiB: `percent` is its number, `given` the
    /// text for messages.
    ///
    /// # Errors
    ///
    /// A message: the text is not a percentage, or the allowed memory is not known.
    pub(crate) fn percentage(given: &str, percent: &str) -> Result<u64, String> {
        let digits = percent.trim();
        // Rust reads a sign and an exponent, too.
        let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number = digits.parse::<f64>().ok().filter(|percent| (1.0..=100.0).contains(percent));
        let Some(percent) = number.filter(|_| is_plain) else {
            return Err(format!(
                "'{given}' is not a share; accepted: 1% to 100%, as in 50% or 12.5%, or a size"
            ));
        };
        let here = Allowance::here();
        let here = here.ok_or_else(|| {
            format!("'{given}' of what? /proc/meminfo cannot be read; accepted: a size, as in 2G")
        })?;
        Ok(here.share(percent))
    }

    /// `percent` of this limit, in whole MiB.
    pub(crate) fn share(&self, percent: f64) -> u64 {
        // Hundredths of a percent are exact enough, and integers do not round the size of a memory.
        #[allow(clippy::cast_possible_truncation, reason = "0 to 10000")]
        #[allow(clippy::cast_sign_loss, reason = "0 to 10000")]
        let parts = (percent * 100.0).round() as u64;
        let bytes = u128::from(self.bytes) * u128::from(parts) / 10_000;
        u64::try_from(bytes).unwrap_or(u64::MAX) & !((1 << 20) - 1)
    }

    /// The lowest limit of the machine and of these cgroups, read in the tree below `root`.
    fn below(root: &Path, cgroups: &[Cgroup]) -> Option<Allowance> {
        let limits = cgroups.iter().flat_map(|cgroup| cgroup.limits(root));
        limits.chain(machine(root)).min_by_key(|allowance| allowance.bytes)
    }
}

/// What is left of the memory of the machine and of the cgroups, and how hard the kernel works for
/// it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Left {
    /// Bytes that can be had without taking them from a program: the least of all limits on the way
    /// up.
    pub(crate) bytes: u64,
    /// The share of the last 10 seconds in which some task waited for memory (PSI), the highest of
    /// machine and cgroup; 0 where the kernel does not tell.
    pub(crate) pressure_percent: f64,
}

/// What is left here.
pub(crate) fn left() -> Option<Left> {
    left_below(Path::new("/"), here())
}

fn left_below(root: &Path, cgroups: &[Cgroup]) -> Option<Left> {
    let text = fs::read_to_string(below(root, Path::new(MEMINFO))).ok()?;
    let kib = number_after(&text, "MemAvailable:")?;
    let inside = cgroups.iter().flat_map(|cgroup| cgroup.left(root));
    let bytes = inside.chain([kib.saturating_mul(1024)]).min()?;
    let pressures = cgroups.iter().filter_map(|cgroup| cgroup.pressure_file());
    let pressures = pressures.chain([PathBuf::from(PRESSURE)]);
    let pressures = pressures.filter_map(|file| pressure_percent(&below(root, &file)));
    Some(Left { bytes, pressure_percent: pressures.fold(0.0, f64::max) })
}

/// The number after a name, as in `MemAvailable:   1024 kB` or `inactive_file 4096`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_ascii_whitespace().next()?.parse().ok()
}

/// `some avg10=12.34 avg60=...`
fn pressure_percent(file: &Path) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let some = text.lines().find_map(|line| line.strip_prefix("some avg10="))?;
    some.split_ascii_whitespace().next()?.parse().ok()
}

/// How much memory this machine has.
pub(crate) fn memory_bytes() -> Option<u64> {
    Some(machine(Path::new("/"))?.bytes)
}

/// The memory of the machine.
fn machine(root: &Path) -> Option<Allowance> {
    let source = PathBuf::from(MEMINFO);
    let text = fs::read_to_string(below(root, &source)).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Allowance { bytes: kib.checked_mul(1024)?, source })
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A mounted hierarchy: the directory that is mounted, where, and the names of its limits.
struct Hierarchy {
    shown: PathBuf,
    mounted: PathBuf,
    files: &'static [&'static str],
    /// The file that counts kills.
    kills: &'static str,
    /// The file with what is used, and the name in `memory.stat` of the part that the kernel gives
    /// up first.
    used: &'static str,
    inactive: &'static str,
    /// The file with the pressure, which only version 2 has.
    pressure: Option<&'static str>,
}

/// A memory cgroup of this process: the hierarchy, and the path from its mounted directory.
struct Cgroup {
    hierarchy: Hierarchy,
    inside: PathBuf,
}

impl Cgroup {
    /// The limits of this cgroup, and of those above it.
    fn limits(&self, root: &Path) -> Vec<Allowance> {
        let mut limits = Vec::new();
        for directory in self.inside.ancestors() {
            for file in self.hierarchy.files {
                let source = self.hierarchy.mounted.join(directory).join(file);
                // "max", or no such file: there is no limit here.
                let Ok(text) = fs::read_to_string(below(root, &source)) else { continue };
                let Ok(bytes) = text.trim().parse() else { continue };
                limits.push(Allowance { bytes, source });
            }
        }
        limits
    }

    /// What is left of each limit of this cgroup and of those above it.
    fn left(&self, root: &Path) -> Vec<u64> {
        let hierarchy = &self.hierarchy;
        let left = |limit: Allowance| {
            let directory = limit.source.parent()?;
            let read = |file| fs::read_to_string(below(root, &directory.join(file))).ok();
            let used: u64 = read(hierarchy.used)?.trim().parse().ok()?;
            let stat = read("memory.stat").unwrap_or_default();
            let pages = |name: &str| number_after(&stat, name).unwrap_or(0);
            // As the kernel's `MemAvailable` does: what is in use of a file may be dropped too, but not all of it.
            let inactive = pages(hierarchy.inactive);
            let active = pages(&hierarchy.inactive.replacen("inactive", "active", 1));
            let needed = used.saturating_sub(inactive + active / 2);
            Some(limit.bytes.saturating_sub(needed))
        };
        self.limits(root).into_iter().filter_map(left).collect()
    }

    /// The file with this cgroup's pressure.
    fn pressure_file(&self) -> Option<PathBuf> {
        Some(self.hierarchy.mounted.join(&self.inside).join(self.hierarchy.pressure?))
    }

    /// How often the kernel has killed a process of this cgroup because memory ran out.
    fn oom_kills(&self, root: &Path) -> Option<u64> {
        let file = self.hierarchy.mounted.join(&self.inside).join(self.hierarchy.kills);
        let text = fs::read_to_string(below(root, &file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
    }
}

/// How often the kernel has killed a process of this memory cgroup because memory ran out, in the
/// cgroup or in the machine. `None` if no file counts it.
pub(crate) fn oom_kills() -> Option<u64> {
    here().iter().find_map(|cgroup| cgroup.oom_kills(Path::new("/")))
}

/// The memory cgroups of this process. `zfolio run` asks three times, and the list of mounts is
/// slow to read: the first answer is kept.
fn here() -> &'static [Cgroup] {
    static HERE: OnceLock<Vec<Cgroup>> = OnceLock::new();
    HERE.get_or_init(|| own_cgroups(Path::new("/")))
}

/// This process's cgroup in each memory hierarchy.
fn own_cgroups(root: &Path) -> Vec<Cgroup> {
    let read = |path: &str| fs::read_to_string(below(root, Path::new(path))).unwrap_or_default();
    let mounts = read("/proc/self/mountinfo");
    let mut cgroups = Vec::new();
    for line in read("/proc/self/cgroup").lines() {
        // hierarchy:controllers:path; the controllers of v2 are empty.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let version_2 = controllers.is_empty();
        if !version_2 && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        for hierarchy in mounts.lines().filter_map(|line| hierarchy(line, version_2)) {
            // In a container the path may lie outside of the mounted directory: then the mount is
            // the cgroup itself.
            let inside = Path::new(path).strip_prefix(&hierarchy.shown).unwrap_or(Path::new(""));
            cgroups.push(Cgroup { inside: inside.to_owned(), hierarchy });
        }
    }
    cgroups
}

/// The memory hierarchy that this line of `mountinfo` mounts, if it mounts one.
fn hierarchy(line: &str, version_2: bool) -> Option<Hierarchy> {
    // 36 35 98:0 /shown /mounted options [tags] - type source super-options
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (shown, mounted) = (PathBuf::from(mount.next()?), PathBuf::from(mount.next()?));
    let mut kind = kind.split(' ');
    let (kind, options) = (kind.next()?, kind.nth(1)?);
    match kind {
        "cgroup2" if version_2 => Some(Hierarchy {
            shown,
            mounted,
            files: &["memory.max", "memory.high"],
            kills: "memory.events",
            used: "memory.current",
            inactive: "inactive_file ",
            pressure: Some("memory.pressure"),
        }),
        "cgroup" if !version_2 && options.split(',').any(|option| option == "memory") => {
            Some(Hierarchy {
                shown,
                mounted,
                files: &["memory.limit_in_bytes"],
                kills: "memory.oom_control",
                used: "memory.usage_in_bytes",
                inactive: "total_inactive_file ",
                pressure: None,
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Allowance, Left, left_below, own_cgroups};
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A tree of files in the temporary directory, removed when dropped.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("zfolio-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(root)
        }

        fn oom_kills(&self) -> Option<u64> {
            own_cgroups(&self.0).iter().find_map(|cgroup| cgroup.oom_kills(&self.0))
        }

        fn allows(&self) -> Option<(u64, PathBuf)> {
            let cgroups = own_cgroups(&self.0);
            Allowance::below(&self.0, &cgroups).map(|allowance| (allowance.bytes, allowance.source))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:        1048576 kB\nMemFree: 1 kB\n");
    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "33 25 0:29 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";

    #[test]
    fn without_a_cgroup_the_machine_decides() {
        let tree = Tree::new("machine", &[MACHINE]);
        assert_eq!(tree.allows(), Some((1 << 30, PathBuf::from("/proc/meminfo"))));
    }

    #[test]
    fn the_smallest_limit_up_to_the_root_decides() {
        let tree = Tree::new(
            "v2",
            &[
                MACHINE,
                ("proc/self/mountinfo", V2),
                ("proc/self/cgroup", "0::/user.slice/app.scope\n"),
                ("sys/fs/cgroup/user.slice/app.scope/memory.max", "max\n"),
                ("sys/fs/cgroup/user.slice/memory.max", "536870912\n"),
                ("sys/fs/cgroup/user.slice/memory.high", "268435456\n"),
            ],
        );
        let source = Path::new("/sys/fs/cgroup/user.slice/memory.high").to_owned();
        assert_eq!(tree.allows(), Some((256 << 20, source)));
    }

    #[test]
    fn version_1_is_read_too_and_its_no_limit_is_none() {
        let cgroup = "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n";
        let tree = Tree::new(
            "v1",
            &[
                MACHINE,
                ("proc/self/mountinfo", V1),
                ("proc/self/cgroup", cgroup),
                ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "134217728\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
        assert_eq!(tree.allows().map(|(bytes, _)| bytes), Some(128 << 20));
    }

    #[test]
    fn kills_are_counted_in_ones_own_cgroup() {
        let events = "low 0\nhigh 7\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n";
        let version_2 = Tree::new(
            "kills-v2",
            &[
                ("proc/self/mountinfo", V2),
                ("proc/self/cgroup", "0::/app\n"),
                ("sys/fs/cgroup/app/memory.events", events),
                ("sys/fs/cgroup/memory.events", "oom_kill 99\n"),
            ],
        );
        assert_eq!(version_2.oom_kills(), Some(2));
        let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n";
        let version_1 = Tree::new(
            "kills-v1",
            &[
                ("proc/self/mountinfo", V1),
                ("proc/self/cgroup", "4:memory:/\n"),
                ("sys/fs/cgroup/memory/memory.oom_control", control),
            ],
        );
        assert_eq!(version_1.oom_kills(), Some(5));
        assert_eq!(Tree::new("kills-no", &[MACHINE]).oom_kills(), None);
    }

    #[test]
    fn the_least_that_is_left_on_the_way_up_counts() {
        let machine = "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable:  524288 kB\n";
        let files = [
            ("proc/meminfo", machine),
            ("proc/pressure/memory", "some avg10=1.50 avg60=0.00 total=9\nfull avg10=9.00\n"),
            ("proc/self/mountinfo", V2),
            ("proc/self/cgroup", "0::/up/app\n"),
            ("sys/fs/cgroup/up/app/memory.max", "268435456\n"),
            ("sys/fs/cgroup/up/app/memory.high", "max\n"),
            ("sys/fs/cgroup/up/app/memory.current", "200000000\n"),
            ("sys/fs/cgroup/up/app/memory.stat", "anon 1\ninactive_file 100000000\n"),
            ("sys/fs/cgroup/up/app/memory.pressure", "some avg10=12.25 avg60=0.00 total=9\n"),
            ("sys/fs/cgroup/up/memory.high", "300000000\n"),
            ("sys/fs/cgroup/up/memory.current", "250000000\n"),
        ];
        let of = |tree: &Tree| left_below(&tree.0, &own_cgroups(&tree.0)).unwrap();
        let inside = of(&Tree::new("left", &files));
        assert_eq!(inside, Left { bytes: 50_000_000, pressure_percent: 12.25 });
        // Pages of files in the upper one: 1 MB that is not in use, and half of 8 MB that is.
        let pages = "inactive_file 1000000\nactive_file 8000000\n";
        let with_pages = [&files[..], &[("sys/fs/cgroup/up/memory.stat", pages)]].concat();
        assert_eq!(of(&Tree::new("left-pages", &with_pages)).bytes, 55_000_000);
        let outside = of(&Tree::new("left-machine", &files[..2]));
        assert_eq!(outside, Left { bytes: 512 << 20, pressure_percent: 1.5 });
    }

    #[test]
    fn a_container_whose_path_is_not_mounted_uses_its_mount() {
        let mounts = "29 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let tree = Tree::new(
            "container",
            &[
                MACHINE,
                ("proc/self/mountinfo", mounts),
                ("proc/self/cgroup", "0::/docker/abc\n"),
                ("sys/fs/cgroup/memory.max", "67108864\n"),
            ],
        );
        assert_eq!(tree.allows().map(|(bytes, _)| bytes), Some(64 << 20));
    }

    #[test]
    fn a_share_is_whole_mebibytes() {
        let of = |bytes| Allowance { bytes, source: PathBuf::new() };
        assert_eq!(of(1 << 30).share(50.0), 512 << 20);
        assert_eq!(of((1 << 30) + 4096).share(100.0), 1 << 30);
        assert_eq!(of(u64::MAX).share(12.5), (1 << 61) - (1 << 20));
        let half = Allowance::here().map(|here| here.share(50.0));
        assert_eq!(Allowance::percentage("50%", "50").ok(), half);
        for wrong in ["", "0", "0.5", "-5", "+50", "1e1", "100.5", ".", "NaN", "inf", "ten"] {
            assert!(Allowance::percentage("?", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn this_machine_allows_something() {
        assert!(Allowance::here().is_some_and(|allowance| allowance.bytes > 1 << 20));
    }
}
