//! The block device itself, and who uses it.

use std::fmt;
use std::path::{Path, PathBuf};

use zfolio_sys::disk;

/// The kernel has a directory for each block device here.
const BLOCK_DEVICES: &str = "/sys/block";

/// `/dev/ublkbN`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node(PathBuf);

impl Node {
    pub(super) fn of(number: u32) -> Node {
        Node(PathBuf::from(format!("/dev/ublkb{number}")))
    }

    /// Who uses the device or a part of it, in words: a file system, swap, a loop device, a process. What opens it a
    /// moment later is not known, nor what the kernel opens for itself and says nothing of.
    #[must_use]
    pub fn user(&self) -> Option<String> {
        self.user_beside(Path::new(BLOCK_DEVICES))
    }

    /// The same; `devices` has a directory for each block device.
    fn user_beside(&self, devices: &Path) -> Option<String> {
        if disk::is_claimed(&self.0) {
            return Some("it is mounted, in use as swap, or a part of another device".to_owned());
        }
        if let Some(device) = self.loop_device(devices) {
            return Some(format!("the loop device {device} is on it"));
        }
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
        let process = processes.filter_map(number).find(|number| self.is_open_in(*number))?;
        let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        Some(format!("process {process} ({}) has it open", name.trim()))
    }

    /// The loop device that is on the device or on a partition of it. The kernel has the file for it, and no process;
    /// and it claims the loop device, but not what that is on.
    fn loop_device(&self, devices: &Path) -> Option<String> {
        let mut entries = std::fs::read_dir(devices).into_iter().flatten().flatten();
        let is_on_it = |entry: &std::fs::DirEntry| {
            let file = std::fs::read_to_string(entry.path().join("loop/backing_file"));
            file.is_ok_and(|file| self.has(Path::new(file.trim_end_matches('\n'))))
        };
        let entry = entries.find(is_on_it)?;
        Some(format!("/dev/{}", entry.file_name().to_string_lossy()))
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
    use std::path::Path;

    use rustix::fs::inotify;
    use rustix::io::Errno;

    use super::Node;

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

    /// Goal: who looks whether the device is in use is not counted as a user a moment later: where a descriptor is
    /// closed that may write, udev opens the device to look at it again. Method: a watch on a file in its place.
    #[test]
    fn a_look_wakes_nobody() {
        let path = std::env::temp_dir().join(format!("zfolio-look-{}", std::process::id()));
        drop(std::fs::File::create(&path).unwrap());
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watch, &path, inotify::WatchFlags::CLOSE_WRITE).unwrap();
        assert_eq!(Node(path.clone()).user(), None);
        let mut events = [0; 256];
        assert_eq!(rustix::io::read(&watch, &mut events), Err(Errno::AGAIN));
        // The watch does see what udev would.
        drop(std::fs::File::options().write(true).open(&path).unwrap());
        assert!(rustix::io::read(&watch, &mut events).unwrap() > 0);
        std::fs::remove_file(&path).unwrap();
    }

    /// Goal: a disk below a loop device is in use: a reset made zeros of the file system that was mounted there. The
    /// program that sets the loop device up has ended by then. Method: a directory as the kernel's.
    #[test]
    fn a_loop_device_that_is_on_it_is_named() {
        let devices = std::env::temp_dir().join(format!("zfolio-loops-{}", std::process::id()));
        let node = Node::of(4_000_000);
        let user = || node.user_beside(&devices);
        assert_eq!(user(), None, "there is no such directory");
        std::fs::create_dir_all(devices.join("loop0/loop")).unwrap();
        std::fs::create_dir_all(devices.join("loop1")).unwrap();
        let file = devices.join("loop0/loop/backing_file");
        for (backing, is_user) in [
            ("/dev/ublkb4000000\n", true),
            ("/dev/ublkb4000000p1\n", true),
            ("/dev/ublkb40000001\n", false),
            ("/var/disk\n", false),
            ("\n", false),
        ] {
            std::fs::write(&file, backing).unwrap();
            let expected = is_user.then(|| "the loop device /dev/loop0 is on it".to_owned());
            assert_eq!(user(), expected, "{backing:?}");
        }
        std::fs::remove_dir_all(&devices).unwrap();
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
