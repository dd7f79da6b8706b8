//! What block devices are in use for: mounted, or swap.
//!
//! The kernel's lists name what this process may see. A device that another mount namespace has mounted is in
//! neither list; opening it exclusively fails all the same ([`crate::disk::open_device`]).

use std::path::{Path, PathBuf};

use crate::disk::DeviceNumber;
use crate::files;

/// The longest list that is read.
const BYTES_MAX: usize = 16 << 20;

/// Where the device is mounted, if it is.
#[must_use]
pub fn mounted_at(device: DeviceNumber) -> Option<PathBuf> {
    // Threads may have mounts of their own.
    let list = files::read_whole("/proc/thread-self/mountinfo", BYTES_MAX).ok()?;
    find_mount(&String::from_utf8_lossy(&list), device)
}

/// Whether the device is in use as swap.
#[must_use]
pub fn is_swap(device: DeviceNumber) -> bool {
    let Ok(list) = files::read_whole("/proc/swaps", BYTES_MAX) else { return false };
    swaps(&String::from_utf8_lossy(&list))
        .any(|path| crate::disk::device_number(&path).is_some_and(|number| number == device))
}

/// The mount point of a device, in a text such as `/proc/thread-self/mountinfo`: number, parent, `major:minor`, root,
/// mount point, and more.
fn find_mount(list: &str, device: DeviceNumber) -> Option<PathBuf> {
    let wanted = format!("{}:{}", device.major, device.minor);
    list.lines().find_map(|line| {
        let mut words = line.split(' ').skip(2);
        let is_it = words.next()? == wanted;
        let place = words.nth(1)?;
        is_it.then(|| unescape(place))
    })
}

/// The files and devices in a text such as `/proc/swaps`, which has a line of titles.
fn swaps(list: &str) -> impl Iterator<Item = PathBuf> {
    list.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next()).map(unescape)
}

/// A path as the kernel's lists write it: space, tab, end of line and backslash as three octal digits.
fn unescape(word: &str) -> PathBuf {
    let mut path = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('\\') {
        path.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                path.push(char::from(code));
                rest = &after[3..];
            }
            None => {
                path.push('\\');
                rest = after;
            }
        }
    }
    path.push_str(rest);
    Path::new(&path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::{find_mount, swaps};
    use crate::disk::DeviceNumber;
    use std::path::{Path, PathBuf};

    const MOUNTS: &str = "\
22 27 0:20 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 254:16 /sub /mnt/two\\040words\\134x rw,noatime - xfs /dev/vdb rw
32 27 254:160 / /srv rw - xfs /dev/vdk rw
";

    const SWAPS: &str = "\
Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority
/dev/vdc                                partition\t8388604\t\t0\t\t-2
/swap\\040file                          file\t\t1048572\t\t0\t\t-3
";

    /// Goal: a device is found by its number alone, and its mount point is the path itself. Method: texts as the
    /// kernel writes them.
    #[test]
    fn a_mounted_device_is_found_by_its_number() {
        let at = |major, minor| find_mount(MOUNTS, DeviceNumber { major, minor });
        assert_eq!(at(254, 0), Some(PathBuf::from("/")));
        assert_eq!(at(254, 16), Some(PathBuf::from("/mnt/two words\\x")));
        assert_eq!(at(254, 1), None);
        assert_eq!(at(25, 4), None);
        assert_eq!(find_mount("", DeviceNumber { major: 0, minor: 0 }), None);
        assert_eq!(find_mount("nonsense\n1 2", DeviceNumber { major: 0, minor: 0 }), None);
    }

    #[test]
    fn swap_is_listed_by_path() {
        let all: Vec<PathBuf> = swaps(SWAPS).collect();
        assert_eq!(all, [Path::new("/dev/vdc"), Path::new("/swap file")]);
        assert_eq!(swaps("").count(), 0);
    }
}
