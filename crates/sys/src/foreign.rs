//! Mappings of files that another process can shorten.
//!
//! A page of such a mapping that is beyond the file's end raises SIGBUS in the thread that touches it, which would end
//! this process for what the other one did. [`Watched`] says that a range of addresses is such a mapping: a page of it
//! that cannot be read becomes a page of zeros, the thread goes on, and [`Watched::has_lost_pages`] says so from then
//! on. libwayland treats the memory of its clients in the same way.
//!
//! # Invariants
//!
//! - `FOR-1` Only a page whose access has failed is replaced, so no contents that could be read are changed.
//! - `FOR-2` A SIGBUS outside of all ranges goes to the handler that was installed before this one.
//!
//! # Concurrency
//!
//! The handler finds the ranges in a table of atomics, without a lock: it may run at any time, in several threads at
//! once.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// How many ranges can be watched at once.
pub const RANGES_MAX: usize = 1024;

/// Sizes of pages that a mapping may have: a page of a huge mapping is replaced as a whole.
const PAGE_SIZES: [usize; 3] = [4 << 10, 2 << 20, 1 << 30];

/// `start` of a slot that is taken and has no range yet. No address is above it.
const TAKEN: usize = usize::MAX;

struct Slot {
    /// The first address; 0: the slot is free.
    start: AtomicUsize,
    end: AtomicUsize,
    has_lost: AtomicBool,
}

static SLOTS: [Slot; RANGES_MAX] = [const {
    Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), has_lost: AtomicBool::new(false) }
}; RANGES_MAX];

static INSTALL: Once = Once::new();

/// The action of SIGBUS before ours was installed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// A range that is watched while this lives. See the module.
#[derive(Debug)]
pub struct Watched(usize);

impl Watched {
    /// Watches a range, which must be a mapping of a file. `None`: it is empty, or [`RANGES_MAX`] are watched.
    #[must_use]
    pub fn new(range: Range<usize>) -> Option<Watched> {
        if range.start == 0 || range.start >= range.end {
            return None;
        }
        INSTALL.call_once(install);
        let index = SLOTS.iter().position(|slot| {
            let (free, order) = (0, Ordering::Relaxed);
            slot.start.compare_exchange(free, TAKEN, Ordering::Acquire, order).is_ok()
        })?;
        let slot = &SLOTS[index];
        slot.has_lost.store(false, Ordering::Relaxed);
        slot.end.store(range.end, Ordering::Relaxed);
        // Release: pairs with the Acquire in note(): who sees the start sees the end.
        slot.start.store(range.start, Ordering::Release);
        Some(Watched(index))
    }

    /// Whether a page of it could not be read, and became zeros.
    #[must_use]
    pub fn has_lost_pages(&self) -> bool {
        SLOTS[self.0].has_lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let slot = &SLOTS[self.0];
        slot.start.store(TAKEN, Ordering::Relaxed);
        slot.end.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire of whoever takes the slot next.
        slot.start.store(0, Ordering::Release);
    }
}

fn install() {
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    let mut previous = Box::new(action);
    // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for, and only does what a handler may; `previous` is a
    // valid place.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut *previous) };
    PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
}

/// Notes that a page of the range of `address` is lost. False: no range has it.
fn note(address: usize) -> bool {
    SLOTS.iter().any(|slot| {
        // Acquire: pairs with the Release in Watched::new().
        let start = slot.start.load(Ordering::Acquire);
        let is_inside =
            start != 0 && start <= address && address < slot.end.load(Ordering::Relaxed);
        if is_inside {
            slot.has_lost.store(true, Ordering::Relaxed);
        }
        is_inside
    })
}

/// Puts zeros where a page cannot be read.
fn replace(address: usize) -> Result<(), Errno> {
    let mut failed = Errno::INVAL;
    for bytes in PAGE_SIZES {
        let page = (address / bytes * bytes) as *mut std::ffi::c_void;
        let (access, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::FIXED);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
        // SAFETY: by FOR-1 the page has no contents: a mapping has pages of one size, a smaller part of a huge page is
        // refused by the kernel (EINVAL), and the first size that is accepted is that of the page that failed.
        match unsafe { rustix::mm::mmap_anonymous(page, bytes, access, flags) } {
            Ok(_) => return Ok(()),
            Err(why) => failed = why,
        }
        if failed != Errno::INVAL {
            break;
        }
    }
    Err(failed)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let about = unsafe { &*info };
    // SAFETY: SIGBUS has an address.
    let address = unsafe { about.si_addr() } as usize;
    // A signal that was sent by a process has no address.
    if about.si_code > 0 && note(address) && replace(address).is_ok() {
        return;
    }
    pass_on(signal, info, context);
}

/// Hands a SIGBUS that is not ours to the previous handler (`FOR-2`).
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: null, or leaked by install() and never changed.
    let previous = unsafe { previous.as_ref() };
    let (handler, flags) =
        previous.map_or((libc::SIG_DFL, 0), |action| (action.sa_sigaction, action.sa_flags));
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let was_sent = unsafe { &*info }.si_code <= 0;
    match handler {
        libc::SIG_IGN if was_sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the default action; on return the access is repeated, which ends the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            if was_sent {
                // SAFETY: no precondition. The signal is blocked until this handler returns.
                unsafe { libc::raise(signal) };
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            type Action = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the program registered it as a three-argument handler.
            let handler = unsafe { std::mem::transmute::<usize, Action>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: the program registered it as a one-argument handler.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;
    use rustix::mm::{MapFlags, ProtFlags};

    use super::Watched;

    const PAGE: usize = 4096;

    /// Goal: who touches pages beyond the end of a file that was shortened goes on with zeros and is told so; what is
    /// left of the file stays; ranges that are no longer watched leave room for others.
    #[test]
    fn a_file_that_is_shortened_ends_nobody() {
        for round in 0..1100_u64 {
            let file = rustix::fs::memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 4 * PAGE as u64).unwrap();
            let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            let null = std::ptr::null_mut();
            // SAFETY: a new mapping at an address of the kernel's choice.
            let start =
                unsafe { rustix::mm::mmap(null, 4 * PAGE, access, flags, &file, 0) }.unwrap();
            let watched = Watched::new(start as usize..start as usize + 4 * PAGE).unwrap();
            let at = |page: usize| start.cast::<u64>().wrapping_byte_add(page * PAGE);
            // SAFETY: the first word of a page of the mapping, as all below.
            unsafe { at(0).write_volatile(round) };
            // SAFETY: as above.
            unsafe { at(2).write_volatile(round) };
            assert!(!watched.has_lost_pages());
            rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
            // SAFETY: as above; the page is replaced.
            assert_eq!(unsafe { at(2).read_volatile() }, 0);
            assert!(watched.has_lost_pages());
            // SAFETY: as above.
            unsafe { at(3).write_volatile(7) };
            // SAFETY: as above.
            assert_eq!(unsafe { at(3).read_volatile() }, 7);
            // SAFETY: as above.
            assert_eq!(unsafe { at(0).read_volatile() }, round);
            drop(watched);
            // SAFETY: nothing refers to the mapping any more.
            unsafe { rustix::mm::munmap(start, 4 * PAGE) }.unwrap();
        }
    }

    #[test]
    fn an_empty_range_is_refused() {
        assert!(Watched::new(0..PAGE).is_none());
        assert!(Watched::new(PAGE..PAGE).is_none());
    }
}
