//! The block device itself, and who uses it.

use std::fmt;
use std::path::{Path, PathBuf};

use zfolio_sys::Errno;
use zfolio_sys::disk;

/// `/dev/ublkbN`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node(PathBuf);

impl Node {
    pub(super) fn of(number: u32) -> Node {
        Node(PathBuf::from(format!("/dev/ublkb{number}")))
    }

    /// Who uses the device or a part of it, in words: a file system, swap, a process. What opens it a moment later is
    /// not known.
    #[must_use]
    pub fn user(&self) -> Option<String> {
        if disk::open_device(&self.0).is_err_and(|error| error == Errno::BUSY) {
            return Some("it is mounted, in use as swap, or a part of another device".to_owned());
        }
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
        let process = processes.filter_map(number).find(|number| self.is_open_in(*number))?;
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        Some(format!("process {process} ({}) has it open", name.trim()))
    }

    /// Whether a process has the device open, or a partition of it.
    fn is_open_in(&self, process: u32) -> bool {
        let files = std::fs::read_dir(format!("/proc/{process}/fd"));
        // The text of the link only: nothing is asked of the file that it leads to.
        let targets = files.into_iter().flatten().flatten().map(|file| file.path().read_link());
        targets.flatten().any(|target| self.has(&target))
    }

    /// Whether a path is that of the device, or of a partition of it.
    fn has(&self, path: &Path) -> bool {
        let text = |path: &Path| path.to_str().map(str::to_owned).unwrap_or_default();
        let (own, other) = (text(&self.0), text(path));
        let is_partition = |rest: &str| {
            let number = rest.strip_prefix('p').unwrap_or("");
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        other.strip_prefix(&own).is_some_and(|rest| rest.is_empty() || is_partition(rest))
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::Node;
    use std::path::Path;

    /// Goal: a process that has the device open is named, and nobody else. Method: a file in its place.
    #[test]
    fn a_process_that_has_it_open_is_named() {
        let path = std::env::temp_dir().join(format!("zfolio-node-{}", std::process::id()));
        let node = Node(path.clone());
        assert_eq!(node.user(), None, "there is no such file");
        let file = std::fs::File::create(&path).unwrap();
        let user = node.user().unwrap();
        assert!(user.contains(&format!("process {} (", std::process::id())), "{user}");
        drop(file);
        assert_eq!(node.user(), None);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn partitions_belong_to_a_device() {
        let node = Node::of(1);
        for (path, belongs) in [
            ("/dev/ublkb1", true),
            ("/dev/ublkb1p2", true),
            ("/dev/ublkb12", false),
            ("/dev/ublkb1p", false),
            ("/dev/ublkb1px", false),
            ("/dev/ublkc1", false),
        ] {
            assert_eq!(node.has(Path::new(path)), belongs, "{path}");
        }
    }
}
