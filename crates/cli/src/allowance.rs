//! How much memory this machine, or the memory cgroup that we are in, allows.
//!
//! A cgroup's limit holds for everything below it, so the whole path up to the root counts, and the
//! smallest limit on it decides. Both versions are read: in v2 `memory.max` (beyond which the kernel
//! kills) and `memory.high` (beyond which it slows down), in v1 `memory.limit_in_bytes`.
//!
//! Paths are taken below a root directory, so that tests can bring a tree of their own.

use std::fs;
use std::path::{Path, PathBuf};

/// What allows how much.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Allowance {
    /// Bytes.
    pub(crate) bytes: u64,
    /// The file that says so.
    pub(crate) source: PathBuf,
}

impl Allowance {
    /// What is allowed here.
    pub(crate) fn here() -> Option<Allowance> {
        Allowance::below(Path::new("/"))
    }

    /// The same, in the tree below `root`.
    fn below(root: &Path) -> Option<Allowance> {
        let machine = machine(root);
        cgroup_limits(root).into_iter().chain(machine).min_by_key(|allowance| allowance.bytes)
    }
}

/// The memory of the machine.
fn machine(root: &Path) -> Option<Allowance> {
    let source = PathBuf::from("/proc/meminfo");
    let text = fs::read_to_string(below(root, &source)).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Allowance { bytes: kib.checked_mul(1024)?, source })
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A mounted hierarchy: the directory it shows, where, and the names of its limits.
struct Hierarchy {
    shown: PathBuf,
    mounted: PathBuf,
    files: &'static [&'static str],
}

/// Every limit on the way from our cgroup to the root, of both versions.
fn cgroup_limits(root: &Path) -> Vec<Allowance> {
    let read = |path: &str| fs::read_to_string(below(root, Path::new(path))).unwrap_or_default();
    let mounts = read("/proc/self/mountinfo");
    let mut limits = Vec::new();
    for line in read("/proc/self/cgroup").lines() {
        // hierarchy:controllers:path; the controllers of v2 are empty.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let version_2 = controllers.is_empty();
        if !version_2 && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        for hierarchy in mounts.lines().filter_map(|line| hierarchy(line, version_2)) {
            limits.extend(limits_of(root, &hierarchy, Path::new(path)));
        }
    }
    limits
}

/// The memory hierarchy that a line of `mountinfo` mounts, if it does.
fn hierarchy(line: &str, version_2: bool) -> Option<Hierarchy> {
    // 36 35 98:0 /shown /mounted options [tags] - type source super-options
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (shown, mounted) = (PathBuf::from(mount.next()?), PathBuf::from(mount.next()?));
    let mut kind = kind.split(' ');
    let (kind, options) = (kind.next()?, kind.nth(1)?);
    let files: &[&str] = match kind {
        "cgroup2" if version_2 => &["memory.max", "memory.high"],
        "cgroup" if !version_2 && options.split(',').any(|option| option == "memory") => {
            &["memory.limit_in_bytes"]
        }
        _ => return None,
    };
    Some(Hierarchy { shown, mounted, files })
}

/// The limits of the cgroup `path` and those above it.
fn limits_of(root: &Path, hierarchy: &Hierarchy, path: &Path) -> Vec<Allowance> {
    // In a container the path may lie outside of what is mounted: then its mount is our cgroup.
    let inside = path.strip_prefix(&hierarchy.shown).unwrap_or(Path::new(""));
    let mut limits = Vec::new();
    for directory in inside.ancestors() {
        for file in hierarchy.files {
            let source = hierarchy.mounted.join(directory).join(file);
            // "max", or no such file: no limit here.
            let Ok(text) = fs::read_to_string(below(root, &source)) else { continue };
            let Ok(bytes) = text.trim().parse() else { continue };
            limits.push(Allowance { bytes, source });
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::Allowance;
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

        fn allows(&self) -> Option<(u64, PathBuf)> {
            Allowance::below(&self.0).map(|allowance| (allowance.bytes, allowance.source))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:        1048576 kB\nMemFree: 1 kB\n");
    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "33 25 0:29 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";

    #[test]
    fn without_a_cgroup_the_machine_decides() {
        let tree = Tree::new("machine", &[MEMINFO]);
        assert_eq!(tree.allows(), Some((1 << 30, PathBuf::from("/proc/meminfo"))));
    }

    #[test]
    fn the_smallest_limit_up_to_the_root_decides() {
        let tree = Tree::new(
            "v2",
            &[
                MEMINFO,
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
                MEMINFO,
                ("proc/self/mountinfo", V1),
                ("proc/self/cgroup", cgroup),
                ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "134217728\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
        assert_eq!(tree.allows().map(|(bytes, _)| bytes), Some(128 << 20));
    }

    #[test]
    fn a_container_whose_path_is_not_mounted_uses_its_mount() {
        let mounts = "29 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let tree = Tree::new(
            "container",
            &[
                MEMINFO,
                ("proc/self/mountinfo", mounts),
                ("proc/self/cgroup", "0::/docker/abc\n"),
                ("sys/fs/cgroup/memory.max", "67108864\n"),
            ],
        );
        assert_eq!(tree.allows().map(|(bytes, _)| bytes), Some(64 << 20));
    }

    #[test]
    fn this_machine_allows_something() {
        assert!(Allowance::here().is_some_and(|allowance| allowance.bytes > 1 << 20));
    }
}
