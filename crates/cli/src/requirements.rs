//! What `zfolio run` requires, and the message if it is missing.

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::probe::{self, Door, Feature};
use zfolio_sys::uffd::Reach;

use crate::failure::Failure;

/// The results of the tests of the kernel.
#[derive(Debug)]
pub(crate) struct Findings {
    /// The release of the kernel.
    pub(crate) release: String,
    /// Bytes of a page.
    pub(crate) page_bytes: usize,
    /// The features of a userfaultfd from `/dev/userfaultfd`.
    pub(crate) device: Result<u64, Errno>,
    /// The same from the system call.
    pub(crate) syscall: Result<u64, Errno>,
    /// The same from the system call, for faults of the program only.
    pub(crate) user_mode: Result<u64, Errno>,
    /// Whether a page could be moved, by a userfaultfd that also serves the kernel's own faults.
    pub(crate) moved: Result<(), Errno>,
}

impl Findings {
    /// Tests the kernel.
    pub(crate) fn gather() -> Findings {
        let features = |door| {
            probe::userfaultfd_features(door)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        Findings {
            release: probe::kernel_release(),
            page_bytes: probe::page_bytes(),
            device: features(Door::Device),
            syscall: features(Door::Syscall),
            user_mode: features(Door::SyscallUserMode),
            moved: probe::move_a_page(Reach::Kernel),
        }
    }

    /// The features of a userfaultfd opened in any way, even one that `run` cannot use.
    pub(crate) fn features(&self) -> Option<u64> {
        [self.device, self.syscall, self.user_mode].into_iter().find_map(Result::ok)
    }

    /// Why `zfolio run` cannot work here, and what to do; `None` if it can.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let release = &self.release;
        if self.page_bytes != PAGE_BYTES {
            return Some(format!(
                "this kernel's pages have {} bytes; zfolio is built for {PAGE_BYTES}: use a kernel \
                 with {PAGE_BYTES}-byte pages",
                self.page_bytes
            ));
        }
        let Some(features) = self.features() else {
            let todo = match self.device {
                Err(Errno::ACCESS) => {
                    "/dev/userfaultfd is there: in a container, add --group-add with the number of its group \
                     (stat -c %g /dev/userfaultfd); otherwise be in that group"
                }
                _ => {
                    "in a container, add --device /dev/userfaultfd (systemd: DeviceAllow=/dev/userfaultfd rw); \
                     otherwise use a kernel with CONFIG_USERFAULTFD"
                }
            };
            return Some(format!(
                "userfaultfd is not to be had (system call: {}); this is kernel {release}: {todo}",
                reason(self.user_mode)
            ));
        };
        if !Feature::MOVE.is_in(features) {
            return Some(format!(
                "kernel {release} has no UFFDIO_MOVE; zfolio run needs Linux {} or newer: boot one \
                 (Debian 12 has it in bookworm-backports)",
                Feature::MOVE.since
            ));
        }
        if self.device.or(self.syscall).is_err() {
            return Some(format!(
                "userfaultfd is not permitted (/dev/userfaultfd: {}; system call: {}); allow it with \
                 one of: sudo usermod -aG zfolio $USER, then log in again (where zfolio's udev rule is \
                 installed), or sudo setfacl -m u:$USER:rw /dev/userfaultfd (package acl; until the \
                 next boot), or sudo sysctl vm.unprivileged_userfaultfd=1, or run as root",
                reason(self.device),
                reason(self.syscall)
            ));
        }
        self.moved.err().map(|error| {
            format!(
                "kernel {release} says that it has UFFDIO_MOVE, but a page could not be moved \
                 ({error}); 'zfolio doctor' shows more"
            )
        })
    }
}

fn reason(answer: Result<u64, Errno>) -> String {
    match answer {
        Ok(_) => "found".to_owned(),
        Err(Errno::NOSYS) => "not there, or hidden by seccomp".to_owned(),
        Err(Errno::NOENT) => "not there".to_owned(),
        Err(Errno::ACCESS | Errno::PERM) => "no permission".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Refuses to start if `zfolio run` cannot work. One trial is enough if it can; only otherwise are
/// the reasons examined.
///
/// # Errors
///
/// 125, with what is missing and what to do.
pub(crate) fn check() -> Result<(), Failure> {
    if probe::page_bytes() == PAGE_BYTES && probe::move_a_page(Reach::Kernel).is_ok() {
        return Ok(());
    }
    let obstacle = Findings::gather().obstacle();
    obstacle.map_or(Ok(()), |obstacle| Err(Failure::machine(obstacle)))
}

#[cfg(test)]
mod tests {
    use super::Findings;
    use zfolio_sys::Errno;

    const ALL: u64 = 0x1ffff;
    const UNTIL_6_1: u64 = 0x1fff;

    fn findings() -> Findings {
        Findings {
            release: "6.12.1".to_owned(),
            page_bytes: 4096,
            device: Ok(ALL),
            syscall: Ok(ALL),
            user_mode: Ok(ALL),
            moved: Ok(()),
        }
    }

    #[test]
    fn one_way_in_is_enough() {
        assert_eq!(findings().obstacle(), None);
        let device = Findings { syscall: Err(Errno::PERM), ..findings() };
        assert_eq!(device.obstacle(), None);
        let syscall = Findings { device: Err(Errno::NOENT), ..findings() };
        assert_eq!(syscall.obstacle(), None);
    }

    #[test]
    fn each_obstacle_says_what_to_do() {
        let closed = |error| Findings {
            device: Err(Errno::ACCESS),
            syscall: Err(error),
            moved: Err(error),
            ..findings()
        };
        let cases = [
            (Findings { page_bytes: 65536, ..findings() }, "65536", "4096-byte pages"),
            (
                Findings {
                    device: Err(Errno::NOENT),
                    user_mode: Err(Errno::NOSYS),
                    ..closed(Errno::NOSYS)
                },
                "hidden by seccomp",
                "--device /dev/userfaultfd",
            ),
            (
                Findings { user_mode: Err(Errno::PERM), ..closed(Errno::PERM) },
                "no permission",
                "--group-add with the number of its group",
            ),
            (
                Findings {
                    device: Err(Errno::PERM),
                    user_mode: Err(Errno::PERM),
                    ..closed(Errno::PERM)
                },
                "no permission",
                "DeviceAllow=/dev/userfaultfd rw",
            ),
            (
                Findings {
                    device: Ok(UNTIL_6_1),
                    release: "6.1.0-40".to_owned(),
                    moved: Err(Errno::INVAL),
                    ..findings()
                },
                "6.1.0-40 has no UFFDIO_MOVE",
                "6.8 or newer",
            ),
            (closed(Errno::PERM), "not permitted", "vm.unprivileged_userfaultfd=1"),
            (closed(Errno::PERM), "udev rule", "usermod -aG zfolio"),
            (Findings { moved: Err(Errno::INVAL), ..findings() }, "could not be moved", "doctor"),
        ];
        for (findings, what, todo) in cases {
            let obstacle = findings.obstacle().expect("an obstacle");
            assert!(obstacle.contains(what) && obstacle.contains(todo), "{obstacle}");
        }
    }
}
