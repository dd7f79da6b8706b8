//! The kernel's side of a device, as traits: the kernel itself, or what tests play.

use std::fmt;

use zfolio_sys::Errno;
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::ublk::{self, Basic, Control, DeviceInfo, Discard, Door, Event, IoDescriptor};
use zfolio_sys::{probe, process, uring};

/// A queue of a device. What its methods do, `zfolio_sys::ublk::Queue` says.
pub(super) trait Queue: Send + 'static {
    fn depth(&self) -> u16;
    fn fetch(&mut self) -> Result<(), Errno>;
    fn wait(&mut self) -> Result<(), Errno>;
    fn event(&mut self) -> Option<Event>;
    fn request(&mut self, tag: u16) -> (IoDescriptor, &mut [u8]);
    fn commit(&mut self, tag: u16, result: i32);
}

/// The commands about devices. What they do, `zfolio_sys::ublk::Control` says.
pub(super) trait Kernel: Send + Sync {
    type Queue: Queue;

    fn features(&mut self) -> Result<u64, Errno>;
    fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Errno>;
    fn info(&mut self, number: u32) -> Result<DeviceInfo, Errno>;
    fn set_params(
        &mut self,
        number: u32,
        basic: &Basic,
        discard: Option<&Discard>,
    ) -> Result<(), Errno>;
    /// Opens all queues of a device.
    fn queues(&mut self, info: &DeviceInfo) -> Result<Vec<Self::Queue>, Errno>;
    fn start(&mut self, number: u32) -> Result<(), Errno>;
    fn stop(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno>;
    fn delete(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno>;
    /// The devices that there are.
    fn numbers(&self) -> Vec<u32>;
    /// Whether there is a process of this number.
    fn lives(&self, process: u32) -> bool;
    /// Whether a process has the device open to serve it.
    fn is_served(&self, number: u32) -> bool;
}

impl Queue for ublk::Queue {
    fn depth(&self) -> u16 {
        self.depth()
    }

    fn fetch(&mut self) -> Result<(), Errno> {
        // Without the right to do so it is served all the same, and swap on it may wait for itself when memory is full.
        process::serve_disk().ok();
        self.fetch()
    }

    fn wait(&mut self) -> Result<(), Errno> {
        self.wait()
    }

    fn event(&mut self) -> Option<Event> {
        self.event()
    }

    fn request(&mut self, tag: u16) -> (IoDescriptor, &mut [u8]) {
        self.request(tag)
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.commit(tag, result);
    }
}

/// The kernel of this machine.
#[derive(Debug)]
pub(super) struct Linux(Control);

impl Linux {
    /// Opens the way to it, unless it is one that must not be asked.
    pub(super) fn open() -> Result<Linux, Unstarted> {
        let release = probe::kernel_release();
        if let Some(why) = refusal(&release) {
            return Err(Unstarted::Kernel { release, why });
        }
        let missing = |error| Unstarted::Missing { release: probe::kernel_release(), error };
        if !std::path::Path::new("/dev/ublk-control").exists() {
            return Err(missing(Errno::NOENT));
        }
        uring::probe().map_err(Unstarted::Ring)?;
        Control::open().map(Linux).map_err(|error| match error {
            Errno::ACCESS | Errno::PERM => Unstarted::Denied,
            error => missing(error),
        })
    }
}

impl Kernel for Linux {
    type Queue = ublk::Queue;

    fn features(&mut self) -> Result<u64, Errno> {
        self.0.features()
    }

    fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Errno> {
        self.0.add(info)
    }

    fn info(&mut self, number: u32) -> Result<DeviceInfo, Errno> {
        self.0.info(number)
    }

    fn set_params(
        &mut self,
        number: u32,
        basic: &Basic,
        discard: Option<&Discard>,
    ) -> Result<(), Errno> {
        self.0.set_params(number, basic, discard)
    }

    fn queues(&mut self, info: &DeviceInfo) -> Result<Vec<ublk::Queue>, Errno> {
        let door = Door::open(&mut self.0, info.number)?;
        (0..door.info().queues).map(|queue| ublk::Queue::open(&door, queue)).collect()
    }

    fn start(&mut self, number: u32) -> Result<(), Errno> {
        self.0.start(number, process::id())
    }

    fn stop(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno> {
        self.0.stop(number, milliseconds)
    }

    fn delete(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno> {
        self.0.delete(number, milliseconds)
    }

    fn numbers(&self) -> Vec<u32> {
        let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| {
            entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok()
        };
        entries.filter_map(number).collect()
    }

    fn lives(&self, process: u32) -> bool {
        process::exists(process.into())
    }

    fn is_served(&self, number: u32) -> bool {
        ublk::is_served(number)
    }
}

/// Kernels that stop with a NULL pointer at the first `ADD_DEV`: they have the change 529d4d632788, and not its repair
/// 011af85ccd87. The beginning of the release, what has to follow it if that matters, and what is accepted instead.
const PANICS: [(&str, &[&str], &str); 6] = [
    ("6.18.4", &[], "6.18.6 or newer"),
    ("6.18.5", &[], "6.18.6 or newer"),
    ("6.17.0-1015", &["-azure"], "6.17.0-1019-azure or newer"),
    ("6.17.0-1016", &["-azure"], "6.17.0-1019-azure or newer"),
    ("6.17.0-1017", &["-azure", "-aws"], "a newer one"),
    ("6.17.0-1018", &["-azure"], "6.17.0-1019-azure or newer"),
];

/// Why this release of Linux must not be asked for a device. `None`: nothing is known against it.
#[must_use]
pub fn refusal(release: &str) -> Option<String> {
    let is_it = |(start, ends, _): &&(&str, &[&str], &str)| {
        release.strip_prefix(start).is_some_and(|rest| match ends {
            [] => !rest.starts_with(|letter: char| letter.is_ascii_digit()),
            ends => ends.contains(&rest),
        })
    };
    let found = PANICS.iter().find(is_it);
    found.map(|(_, _, repaired)| {
        format!("it stops with a NULL pointer when a ublk device is made; accepted: {repaired}")
    })
}

/// Why there is no device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unstarted {
    /// A kernel that must not be asked.
    Kernel {
        /// Its release.
        release: String,
        /// See [`refusal`].
        why: String,
    },
    /// The kernel has no ublk.
    Missing {
        /// Its release.
        release: String,
        /// What opening it says.
        error: Errno,
    },
    /// This user may not.
    Denied,
    /// There is no io_uring here.
    Ring(Errno),
    /// The number is taken. The user may choose another one.
    Taken(u32),
    /// Something else has failed.
    System(&'static str, Errno),
}

impl fmt::Display for Unstarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const OTHERS: &str = "--nbd and --vhost-user do without";
        match self {
            Unstarted::Kernel { release, why } => write!(f, "Linux {release}: {why}; {OTHERS}"),
            Unstarted::Missing { release, error } => write!(
                f,
                "/dev/ublk-control: {}; Linux {release} has no ublk, or 'modprobe ublk_drv' loads it (6.6 or newer, \
                 CONFIG_BLK_DEV_UBLK); {OTHERS}",
                ErrnoText(*error)
            ),
            Unstarted::Denied => {
                write!(f, "a device of the kernel is made by root, with CAP_SYS_ADMIN; {OTHERS}")
            }
            Unstarted::Ring(error) => write!(
                f,
                "io_uring: {}; it needs Linux 6.6 or newer, kernel.io_uring_disabled=0, and a seccomp profile that \
                 allows it; {OTHERS}",
                ErrnoText(*error)
            ),
            Unstarted::Taken(number) => {
                write!(f, "/dev/ublkb{number} is there already; accepted: another number, or auto")
            }
            Unstarted::System(step, error) => write!(f, "{step}: {}", ErrnoText(*error)),
        }
    }
}

impl std::error::Error for Unstarted {}
