//! A new memory cgroup, by version 1 or 2 of the interface.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::journal::{Journal, Undo, at};

/// Its name, in the root of the hierarchy.
const NAME: &str = "zfolio-bench";

/// The interface of the memory controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Hierarchy {
    /// `memory.limit_in_bytes`.
    V1(PathBuf),
    /// `memory.max`.
    V2(PathBuf),
}

impl fmt::Display for Hierarchy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hierarchy::V1(root) => write!(f, "v1 at {}", root.display()),
            Hierarchy::V2(root) => write!(f, "v2 at {}", root.display()),
        }
    }
}

impl Hierarchy {
    /// The memory controller, according to the text of `/proc/self/mounts`.
    fn find_in(mounts: &str) -> Option<Hierarchy> {
        let mut v2 = None;
        for line in mounts.lines() {
            let mut fields = line.split(' ').skip(1);
            let (Some(root), Some(kind), Some(options)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            match kind {
                "cgroup" if options.split(',').any(|option| option == "memory") => {
                    return Some(Hierarchy::V1(root.into()));
                }
                "cgroup2" => v2 = v2.or(Some(PathBuf::from(root))),
                _ => {}
            }
        }
        v2.map(Hierarchy::V2)
    }

    /// The memory controller, or what is missing.
    pub(crate) fn find() -> Result<Hierarchy, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let missing = || "no memory cgroup controller is mounted (v1) or enabled (v2)".to_owned();
        let found = Hierarchy::find_in(&mounts).ok_or_else(missing)?;
        let Hierarchy::V2(root) = &found else { return Ok(found) };
        let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        let has_memory = controllers.split_whitespace().any(|name| name == "memory");
        if has_memory { Ok(found) } else { Err(missing()) }
    }
}

/// A cgroup with a limit on resident memory, and none on swap.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    peak: &'static str,
}

impl Cgroup {
    /// Makes it, and records the undo.
    pub(crate) fn set_up(
        journal: &Journal,
        hierarchy: &Hierarchy,
        limit_bytes: u64,
    ) -> io::Result<Cgroup> {
        let (root, limit, peak) = match hierarchy {
            Hierarchy::V1(root) => (root, "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
            Hierarchy::V2(root) => {
                enable_memory(journal, root)?;
                (root, "memory.max", "memory.peak")
            }
        };
        let path = root.join(NAME);
        if path.exists() {
            let error = io::Error::other("exists already, and is not in our journal: remove it");
            return Err(at(&path, &error));
        }
        let limit = path.join(limit);
        journal.change(&Undo::Cgroup(path.clone()), || {
            fs::create_dir(&path).map_err(|error| at(&path, &error))?;
            fs::write(&limit, limit_bytes.to_string()).map_err(|error| at(&limit, &error))
        })?;
        Ok(Cgroup { path, peak })
    }

    /// The file into which a process writes itself.
    pub(crate) fn members(&self) -> io::Result<File> {
        let path = self.path.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).map_err(|error| at(&path, &error))
    }

    /// The most that was charged; 0 if this kernel does not report it.
    pub(crate) fn bytes_max(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.peak)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

/// In version 2, children of the root have the memory controller only if the root enables it.
fn enable_memory(journal: &Journal, root: &Path) -> io::Result<()> {
    let path = root.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).map_err(|error| at(&path, &error))?;
    if enabled.split_whitespace().any(|name| name == "memory") {
        return Ok(());
    }
    journal.write(&path, "-memory", "+memory")
}

#[cfg(test)]
mod tests {
    use super::Hierarchy;

    #[test]
    fn the_memory_controller_is_found_on_either_version() {
        let hybrid = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        let v1 = Hierarchy::V1("/sys/fs/cgroup/memory".into());
        assert_eq!(Hierarchy::find_in(hybrid), Some(v1));
        let unified = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(Hierarchy::find_in(unified), Some(Hierarchy::V2("/sys/fs/cgroup".into())));
        assert_eq!(Hierarchy::find_in("proc /proc proc rw 0 0\n"), None);
    }
}
