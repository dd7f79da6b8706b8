//! A work queue of the hardware. **Never run**: no machine of ours has the device, or the instructions.

#[cfg(target_arch = "x86_64")]
mod instructions;

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{Portal, Submitted};
use crate::layout::Descriptor;
use zfolio_sys::Errno;
use zfolio_sys::device_memory::DeviceMemory;

/// The kind of a work queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It belongs to one client, who counts what is in it: `movdir64b`.
    Dedicated,
    /// Anybody may submit, and is told if it is full: `enqcmd`.
    Shared,
}

/// A mapped work queue of type `user`.
#[derive(Debug)]
pub struct Hardware {
    page: DeviceMemory,
    mode: Mode,
}

/// Why a work queue cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub enum Error {
    /// The processor lacks the instruction; no processor with the device does.
    Instruction(Mode),
    /// The device cannot be opened or mapped. `ACCESS`: the user needs write permission; `NOENT`: there is no such file
    /// here; `NOTTY`: the file is none of a device.
    Map(Errno),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Instruction(Mode::Dedicated) => f.write_str("this processor has no movdir64b"),
            Error::Instruction(Mode::Shared) => f.write_str("this processor has no enqcmd"),
            Error::Map(Errno::NOTTY) => f.write_str("it is no character device"),
            Error::Map(errno) => write!(f, "it cannot be opened or mapped: {errno}"),
        }
    }
}

impl std::error::Error for Error {}

const WAITPKG: u32 = 1 << 5;
const MOVDIR64B: u32 = 1 << 28;
const ENQCMD: u32 = 1 << 29;

impl Hardware {
    /// Maps the portal of a queue, `/dev/iax/wq*`.
    ///
    /// # Errors
    ///
    /// [`Error`]; nothing is kept.
    pub fn open(path: &Path, mode: Mode) -> Result<Hardware, Error> {
        let wanted = match mode {
            Mode::Dedicated => MOVDIR64B,
            Mode::Shared => ENQCMD,
        };
        if instructions::features() & wanted == 0 {
            return Err(Error::Instruction(mode));
        }
        let page = DeviceMemory::open(path).map_err(Error::Map)?;
        Ok(Hardware { page, mode })
    }
}

// SAFETY: the device accesses what descriptors name through the process's page tables, by its specification.
unsafe impl Portal for Hardware {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submitted {
        let portal = self.page.base().as_ptr();
        match self.mode {
            Mode::Dedicated => {
                // SAFETY: `open` has seen the instruction; the page is the device's.
                unsafe { instructions::movdir64b(portal, descriptor) };
                Submitted::Accepted
            }
            Mode::Shared => {
                // SAFETY: the same.
                let is_accepted = unsafe { instructions::enqcmd(portal, descriptor) };
                if is_accepted { Submitted::Accepted } else { Submitted::Full }
            }
        }
    }
}

/// Waits a moment for a write to the cache line of `status`: by `umwait` where the processor has it, else by `pause`.
#[derive(Debug, Clone, Copy)]
pub struct Pause {
    has_umwait: bool,
    /// How many polls a wait counts as.
    polls: u32,
}

impl Pause {
    /// Looks at the processor.
    #[must_use]
    pub fn new() -> Pause {
        let has_umwait = instructions::features() & WAITPKG != 0;
        Pause { has_umwait, polls: if has_umwait { UMWAIT_POLLS } else { 1 } }
    }

    /// By `pause`, but counted as so many polls.
    #[cfg(test)]
    pub(crate) fn counted(polls: u32) -> Pause {
        Pause { has_umwait: false, polls }
    }

    /// How many polls a wait counts as: a job is given up after so many, however it is waited for.
    pub(crate) fn polls(self) -> u32 {
        self.polls
    }

    /// Waits, unless `status` is not zero any more. It is read once the line is watched, so that no write is missed.
    pub fn wait(self, status: &AtomicU8) {
        if !self.has_umwait {
            return std::hint::spin_loop();
        }
        // SAFETY: WAITPKG was seen.
        unsafe { instructions::umonitor(status.as_ptr()) };
        if status.load(Ordering::Relaxed) == 0 {
            // SAFETY: the same.
            unsafe { instructions::umwait(CYCLES_MAX) };
        }
    }
}

impl Default for Pause {
    fn default() -> Self {
        Pause::new()
    }
}

/// The longest wait, some microseconds: a job takes less, or much more.
const CYCLES_MAX: u64 = 10_000;

/// The polls that fit into it with `pause`, which takes 140 cycles: so a device that never answers holds a fault up for
/// 50 ms in both cases, and not for some seconds.
const UMWAIT_POLLS: u32 = 71;

const _: () = assert!(CYCLES_MAX / 140 == UMWAIT_POLLS as u64);

/// Other processors have no such device: nothing is called but `features`.
#[cfg(not(target_arch = "x86_64"))]
mod instructions {
    use crate::layout::Descriptor;

    pub(super) fn features() -> u32 {
        0
    }

    pub(super) unsafe fn movdir64b(_portal: *mut u8, _descriptor: &Descriptor) {}

    pub(super) unsafe fn enqcmd(_portal: *mut u8, _descriptor: &Descriptor) -> bool {
        false
    }

    pub(super) unsafe fn umonitor(_address: *const u8) {}

    pub(super) unsafe fn umwait(_cycles: u64) {}
}
