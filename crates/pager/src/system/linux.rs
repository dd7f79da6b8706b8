//! The real system: two userfaultfds, `madvise`, `mincore`, the clock.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use zfolio_sys::maps::FileMapping;
use zfolio_sys::process::{Resident, ResidentMeter};
use zfolio_sys::uffd::{Message, Messages, Progress, Reach, Uffd, feature};
use zfolio_sys::{Errno, clock, cpu, futex, map, maps, pagemap};

use super::{Side, System};
use crate::config::{Error, Mode};
use crate::fatal;

/// See the module.
#[derive(Debug)]
pub(crate) struct Linux {
    mode: Mode,
    program: Uffd,
    staging: Uffd,
    meter: ResidentMeter,
}

/// The features that the two userfaultfds need: the program's and the staging area's.
fn needs(mode: Mode) -> [(Reach, u64); 2] {
    let program = match mode {
        Mode::Inline => (Reach::Program, feature::SIGBUS | feature::MOVE),
        Mode::Handler => {
            let events = feature::EVENT_REMOVE | feature::EVENT_UNMAP | feature::EVENT_REMAP;
            let told = feature::THREAD_ID | feature::EXACT_ADDRESS;
            (Reach::Kernel, told | feature::MOVE | events)
        }
    };
    let staging = match mode {
        Mode::Inline => feature::SIGBUS | feature::MOVE,
        Mode::Handler => feature::MOVE,
    };
    [program, (Reach::Program, staging)]
}

impl Linux {
    /// Opens both userfaultfds, in the calling thread's table of files.
    pub(crate) fn open(mode: Mode) -> Result<Linux, Error> {
        let open = |(reach, features)| {
            Uffd::open(reach, features).map_err(|errno| Error::Userfaultfd { mode, errno })
        };
        let [program, staging] = needs(mode);
        let meter = ResidentMeter::new();
        Ok(Linux { mode, program: open(program)?, staging: open(staging)?, meter })
    }

    fn uffd(&self, side: Side) -> &Uffd {
        match side {
            Side::Program => &self.program,
            Side::Staging => &self.staging,
        }
    }
}

#[allow(unsafe_code, reason = "passes each contract on")]
impl System for Linux {
    fn open_again(&self) -> Result<(), Errno> {
        let [program, staging] = needs(self.mode);
        self.program.reopen(program.0, program.1)?;
        self.staging.reopen(staging.0, staging.1)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.program.file())
    }

    fn can_open_again(&self) -> bool {
        let [program, _] = needs(self.mode);
        Uffd::open(program.0, program.1).is_ok()
    }

    fn register(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno> {
        self.uffd(side).register(start, bytes)?;
        match side {
            Side::Program => Ok(()),
            // A child must not share staged pages: a shared page cannot be moved (EBUSY).
            Side::Staging => map::keep_from_children(start, bytes),
        }
    }

    fn unregister(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        self.program.unregister(start, bytes)
    }

    fn wake(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno> {
        self.uffd(side).wake(start, bytes)
    }

    unsafe fn move_pages(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress {
        // SAFETY: the caller keeps this function's contract, which is that of `Uffd::move_pages`.
        unsafe { self.uffd(side).move_pages(from, to, bytes) }
    }

    unsafe fn copy(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress {
        // SAFETY: the caller keeps this function's contract, which is that of `Uffd::copy`.
        unsafe { self.uffd(side).copy(from, to, bytes) }
    }

    fn zero(&self, side: Side, start: usize, bytes: usize) -> Progress {
        self.uffd(side).zero(start, bytes)
    }

    fn read<'a>(&self, side: Side, into: &'a mut Messages) -> &'a [Message] {
        match self.uffd(side).read(into) {
            Ok(messages) => messages,
            // The thread that waits for an answer would wait for ever.
            Err(error) if fatal::is_forbidden(error) => fatal::forbidden("read", error),
            // EBADF and the like cannot happen: the userfaultfd lives as long as the engine (UFFD-1).
            Err(_) => &[],
        }
    }

    fn wait(&self, milliseconds: u16, also: Option<BorrowedFd<'_>>) -> bool {
        self.program.wait(&self.staging, also, milliseconds)
    }

    fn has_message(&self) -> bool {
        self.program.has_message()
    }

    fn is_changing(&self) -> Result<bool, Errno> {
        match self.mode {
            Mode::Handler => self.program.is_changing(),
            // No events are sent, so the kernel answers that none waits to be read.
            Mode::Inline => Ok(false),
        }
    }

    fn residency(&self, start: usize, bytes: usize, present: &mut [u8]) -> Result<(), Errno> {
        match map::residency(start, bytes, present) {
            // A filter of the program's own forbids `mincore`. The other way says of what is not mapped only that it is
            // not resident.
            Err(error) if error != Errno::NOMEM => {
                if map::check_mapped(start, bytes) == Err(Errno::NOMEM) {
                    return Err(Errno::NOMEM);
                }
                pagemap::present(start, present)
            }
            answer => answer,
        }
    }

    fn is_unreadable(&self, page: usize) -> bool {
        pagemap::is_elsewhere(page)
    }

    fn each_resident(&self, start: usize, end: usize, each: &mut dyn FnMut(usize, usize, bool)) {
        pagemap::for_each_resident(start, end, each);
    }

    fn unshare(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        map::unshare_pages(start, bytes)
    }

    fn shared(&self, start: usize, pages: &mut [u8]) -> Result<(), Errno> {
        pagemap::shared(start, pages)
    }

    unsafe fn discard(&self, start: usize, bytes: usize) {
        // SAFETY: the caller keeps this function's contract, which implies that of `map::release`.
        match unsafe { map::release(start, bytes) } {
            // A page that stays in its slot would be taken for one of the next folio there.
            Err(error) if fatal::is_forbidden(error) => fatal::forbidden("madvise", error),
            released => debug_assert!(released.is_ok(), "{released:?}"),
        }
    }

    fn now_ns(&self) -> u64 {
        clock::monotonic_ns()
    }

    fn cpu(&self) -> usize {
        cpu::current()
    }

    fn resident(&self) -> Option<Resident> {
        self.meter.read()
    }

    fn run_delay_ns(&self) -> u64 {
        cpu::run_delay_ns().unwrap_or(0)
    }

    fn each_file_mapping(&self, each: &mut dyn FnMut(&FileMapping) -> bool) {
        maps::each_file_mapping(each);
    }

    fn page_out(&self, start: usize, bytes: usize) {
        // It fails where the mapping has just changed, or the file is not the caller's: nothing is given back then.
        map::page_out(start, bytes).ok();
    }

    fn wait_for(&self, word: &AtomicU32, heard: u32) {
        futex::wait(word, heard, Some(Duration::from_millis(1)));
    }

    fn wake_all(&self, word: &AtomicU32) {
        futex::wake(word, u32::MAX >> 1);
    }

    fn pause(&self) {
        zfolio_core::sync::pause();
    }
}
