//! Memory mappings: reserve address space, return pages, find out what is resident.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a page of this kernel.
pub const PAGE_BYTES: usize = 4096;

/// Address space that this value owns: private, anonymous, readable and writable. A page exists
/// from the first access on.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory that belongs to the value; nothing in it is tied to a thread.
unsafe impl Send for Reservation {}
// SAFETY: `&Reservation` gives out an address and a length only.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `bytes` (rounded up to pages), aligned to `align` (a power of two), never in huge pages.
    ///
    /// # Errors
    ///
    /// `ENOMEM`: no address space (`ulimit -v`), or too many mappings (`vm.max_map_count`).
    pub fn new(bytes: usize, align: usize) -> Result<Reservation, Errno> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let base = map_aligned(bytes, align)?;
        Ok(Reservation { base, bytes })
    }

    /// The same for memory that a program uses: with huge pages if the system is set to give them.
    ///
    /// # Errors
    ///
    /// As [`Reservation::new`].
    pub fn for_program(bytes: usize, align: usize) -> Result<Reservation, Errno> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        Ok(Reservation { base: reserve(bytes, align)?, bytes })
    }

    /// The first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps the same range again, in a child of `fork` that did not inherit it.
    ///
    /// # Errors
    ///
    /// `NOMEM`, or `EXIST` if the range is in use: no other mapping is ever replaced.
    pub fn map_again(&self) -> Result<(), Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: MAP_FIXED_NOREPLACE takes free address space only.
        unsafe {
            rustix::mm::mmap_anonymous(self.base.as_ptr().cast(), self.bytes, protection, flags)
        }?;
        refuse_huge_pages(self.base, self.bytes);
        Ok(())
    }

    /// Keeps the mapping for the life of the process.
    #[must_use]
    pub fn leak(self) -> NonNull<u8> {
        let base = self.base;
        std::mem::forget(self);
        base
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and dropping the value ends every borrow of
        // it.
        let gone = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        if gone.is_err() {
            // The kernel has made one mapping of neighbours, and the process has as many as it may have. The pages can
            // be given back without one more.
            // SAFETY: as above.
            let released = unsafe { release(self.base.as_ptr() as usize, self.bytes) };
            debug_assert!(
                released.is_ok(),
                "our own mapping is not given back: {gone:?}, {released:?}"
            );
        }
    }
}

/// Maps `bytes` of anonymous memory at a multiple of `align`, without touching a page, and far from
/// where the kernel puts the program's mappings. Never in huge pages: the engine must take only the
/// memory that it uses, even if the system is set to give huge pages to everybody (as Debian is).
///
/// The distance matters because a program may unmap a range and map another at the same address a
/// moment later, with MAP_FIXED. If a thread of the engine had made a mapping there in between, it
/// would be replaced.
///
/// # Errors
///
/// As [`Reservation::new`].
pub fn map_aligned(bytes: usize, align: usize) -> Result<NonNull<u8>, Errno> {
    let base = reserve(bytes, align)?;
    refuse_huge_pages(base, bytes);
    Ok(base)
}

/// Makes a new mapping use pages of 4 KiB only.
fn refuse_huge_pages(base: NonNull<u8>, bytes: usize) {
    // SAFETY: this changes no contents. A kernel without huge pages returns an error, which does
    // not matter.
    unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) }.ok();
}

/// As [`map_aligned`], but with pages of any size.
fn reserve(bytes: usize, align: usize) -> Result<NonNull<u8>, Errno> {
    assert!(align.is_power_of_two());
    let slack = align.saturating_sub(PAGE_BYTES);
    let wanted = bytes.checked_add(slack).ok_or(Errno::NOMEM)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the place is a hint. Without MAP_FIXED the kernel takes free address space only.
    let base = unsafe { rustix::mm::mmap_anonymous(apart(wanted), wanted, protection, flags) }?;
    let start = base as usize;
    let aligned = start.next_multiple_of(align);
    trim(start, aligned - start);
    trim(aligned + bytes, start + wanted - (aligned + bytes));
    NonNull::new(aligned as *mut u8).ok_or(Errno::NOMEM)
}

/// The part of the address space that is requested: above position-independent programs and their
/// heap (0x55.. to 0x57..), below the kernel's own choice (from 0x7f.. downwards).
const APART: usize = 0x6000_0000_0000;

/// 16 TiB. The first request is up to 8 TiB above its start.
const APART_BYTES: usize = 1 << 44;

/// An address for `bytes` that no earlier call returned.
pub fn apart(bytes: usize) -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // As hard to guess as the address of this library.
    let start = (&raw const NEXT as usize).next_multiple_of(PAGE_BYTES) % (APART_BYTES / 2);
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    // Relaxed: if two threads got the same address, it would only be a worse hint.
    let next = NEXT.fetch_add(bytes, Ordering::Relaxed).wrapping_add(start);
    (APART + next % APART_BYTES) as *mut c_void
}

/// Unmaps the excess of map_aligned().
fn trim(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the range is one end of the mapping just made, whose address no other code has.
        let gone = unsafe { rustix::mm::munmap(start as *mut c_void, bytes) };
        debug_assert!(gone.is_ok());
    }
}

/// Returns the pages of a range to the kernel; their contents are lost.
///
/// # Errors
///
/// Those of `madvise`.
///
/// # Safety
///
/// The range belongs to the caller, and its contents are no longer needed.
pub unsafe fn release(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller's contract.
    let released =
        unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxDontNeed) };
    match released {
        // The pages may be locked (`process::lock_memory`).
        Err(Errno::INVAL) => {
            let advice = Advice::LinuxDontneedLocked;
            // SAFETY: the caller's contract.
            unsafe { rustix::mm::madvise(address as *mut c_void, bytes, advice) }
        }
        released => released,
    }
}

/// Makes a child of `fork` not inherit a range.
///
/// # Errors
///
/// Those of `madvise`.
pub fn keep_from_children(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: it changes what a child inherits, nothing in this process.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxDontFork) }
}

/// Gives this process its own copy of every page of a range, as if each page were written to.
///
/// # Errors
///
/// Those of `madvise`.
pub fn unshare_pages(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: populating changes no contents.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxPopulateWrite) }
}

/// Has the kernel reclaim a range now: dirty pages are written back, and what is touched is read again. No
/// contents are lost, whatever is mapped there.
///
/// # Errors
///
/// Those of `madvise`.
pub fn page_out(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: reclaim changes no contents.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxPageOut) }
}

/// Makes a range resident, as reading it would; returns an error where reading would raise a
/// signal.
///
/// # Errors
///
/// `NOMEM`: part of it is not mapped. `FAULT`: it may not be read, or is poisoned.
pub fn populate_read(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: populating changes no contents.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxPopulateRead) }
}

/// Writes to `present` one byte per page of the range: bit 0 says whether it is resident.
///
/// # Errors
///
/// `ENOMEM` if part of the range is not mapped.
pub fn residency(address: usize, bytes: usize, present: &mut [u8]) -> Result<(), Errno> {
    assert!(present.len() >= bytes.div_ceil(PAGE_BYTES));
    // SAFETY: the kernel writes one byte per page, for which there is room (above).
    let answer = unsafe { libc::syscall(libc::SYS_mincore, address, bytes, present.as_mut_ptr()) };
    if answer == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether all of a range is mapped, for where `mincore` is forbidden.
///
/// # Errors
///
/// `NOMEM`: a part is not. Others: this call is forbidden too.
pub fn check_mapped(address: usize, bytes: usize) -> Result<(), Errno> {
    let at = ptr::with_exposed_provenance_mut(address);
    // SAFETY: MS_ASYNC changes neither memory nor mappings, and writes nothing to a file: the kernel only looks whether
    // all is mapped.
    unsafe { rustix::mm::msync(at, bytes, rustix::mm::MsyncFlags::ASYNC) }
}

/// The calling process's memory, to be written past what the program may do with it: as a file, which can also write to
/// private mappings that the program may only read, or may not access at all; and by plain stores where that file
/// cannot be opened (a sandbox, no `/proc`).
#[derive(Debug)]
pub struct OwnMemory(Option<OwnedFd>);

impl OwnMemory {
    /// Opens it.
    #[must_use]
    pub fn open() -> OwnMemory {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        OwnMemory(rustix::fs::open(c"/proc/self/mem", flags, rustix::fs::Mode::empty()).ok())
    }

    /// Writes the bytes of one page, at its `address`.
    ///
    /// # Errors
    ///
    /// `IO`: nothing is mapped there, or it is a read-only shared mapping, or memory is short.
    ///
    /// # Safety
    ///
    /// No reference to these bytes is alive. They are in a mapping of the program's that the kernel serves: where there
    /// is no file, a store to one that the program may only read ends the process.
    pub unsafe fn write(&self, address: usize, page: &[u8]) -> Result<(), Errno> {
        debug_assert!(address % PAGE_BYTES == 0 && page.len() == PAGE_BYTES);
        if let Some(file) = &self.0 {
            let written = rustix::io::pwrite(file, page, address as u64)?;
            return if written == page.len() { Ok(()) } else { Err(Errno::IO) };
        }
        // Where even this is refused, nothing is known, and the page is taken to be there.
        if residency(address, PAGE_BYTES, &mut [0]) == Err(Errno::NOMEM) {
            return Err(Errno::IO);
        }
        // SAFETY: a page of a mapping (just seen), without references into it, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), address as *mut u8, PAGE_BYTES) };
        Ok(())
    }
}

/// The error of the `libc::syscall` that has just failed in this thread.
pub(crate) fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::INVAL, Errno::from_raw_os_error)
}

/// Makes one system call with the program's six arguments; returns the result or the error.
///
/// # Errors
///
/// The kernel's.
///
/// # Safety
///
/// That of the call.
pub unsafe fn forward(number: libc::c_long, words: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = words;
    // SAFETY: the caller's contract.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    // An address may have its highest bit set, so only -1 is an error.
    if answer == -1 { Err(last_error()) } else { Ok(usize::from_ne_bytes(answer.to_ne_bytes())) }
}

/// An `mmap` of the program without an address, made at a multiple of `align`.
///
/// # Errors
///
/// The kernel's.
pub fn map_aligned_for(words: [usize; 6], align: usize) -> Result<usize, Errno> {
    let bytes = words[1].checked_next_multiple_of(PAGE_BYTES).ok_or(Errno::NOMEM)?;
    let mut larger = words;
    larger[1] = bytes.checked_add(align - PAGE_BYTES).ok_or(Errno::NOMEM)?;
    // SAFETY: no address is requested, so no existing mapping changes.
    let start = unsafe { forward(libc::SYS_mmap, larger) }?;
    let at = start.next_multiple_of(align);
    trim(start, at - start);
    trim(at + bytes, start + larger[1] - (at + bytes));
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping at `address`, in the kernel's abbreviations.
    fn flags(address: usize) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let ours = |line: &str| {
            let (start, rest) = line.split_once('-')?;
            let end = rest.split(' ').next()?;
            let number = |hex| usize::from_str_radix(hex, 16).ok();
            Some((number(start)?..number(end)?).contains(&address))
        };
        let mut lines = smaps.lines().skip_while(|line| ours(line) != Some(true));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect()
    }

    /// Goal: a page is written with and without the file, and one that is not there is told. Method: both ways write to
    /// a page; the file also to one that may only be read; then to one that was unmapped.
    #[test]
    fn own_memory_is_written_with_and_without_a_file() {
        let with = OwnMemory::open();
        assert!(with.0.is_some(), "/proc is mounted");
        for (memory, byte) in [(with, 3), (OwnMemory(None), 5)] {
            let space = Reservation::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
            let (address, base) = (space.address(), space.base().as_ptr());
            // SAFETY: no reference into the mapping is alive.
            unsafe { memory.write(address, &[byte; PAGE_BYTES]) }.unwrap();
            // SAFETY: the byte is in the mapping.
            assert_eq!(unsafe { base.wrapping_add(PAGE_BYTES - 1).read() }, byte);
            if memory.0.is_some() {
                // SAFETY: nobody writes to it any more.
                unsafe {
                    rustix::mm::mprotect(base.cast(), PAGE_BYTES, rustix::mm::MprotectFlags::READ)
                }
                .unwrap();
                // SAFETY: as above.
                unsafe { memory.write(address, &[byte + 1; PAGE_BYTES]) }.unwrap();
                // SAFETY: the byte is in the mapping.
                assert_eq!(unsafe { base.read() }, byte + 1);
            }
            // SAFETY: a page of the mapping, without references.
            unsafe { rustix::mm::munmap(base.wrapping_add(PAGE_BYTES).cast(), PAGE_BYTES) }
                .unwrap();
            // SAFETY: no reference into the mapping is alive.
            let missing = unsafe { memory.write(address + PAGE_BYTES, &[byte; PAGE_BYTES]) };
            assert_eq!(missing, Err(Errno::IO));
            // Its second page may be somebody else's by now.
            _ = space.leak();
        }
    }

    /// Goal: locked memory is given back too, as that of a disk which the kernel must not swap out. Method: a few pages
    /// are written to, locked and released; they read as zeros.
    #[test]
    fn locked_pages_are_released() {
        let memory = Reservation::new(4 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let base = memory.base().as_ptr();
        for page in 0..4 {
            // SAFETY: the byte is in the mapping, which nobody else has.
            unsafe { base.wrapping_add(page * PAGE_BYTES).write(7) };
        }
        // SAFETY: it changes no contents.
        let locked = unsafe { rustix::mm::mlock(base.cast(), memory.bytes()) };
        if let Err(error) = locked {
            eprintln!("SKIPPED: 16 KiB may not be locked here: {error}");
            return;
        }
        // SAFETY: the range is ours.
        unsafe { super::release(memory.address() + PAGE_BYTES, PAGE_BYTES) }.unwrap();
        // SAFETY: the byte is in the mapping, which nobody else has.
        let bytes = [0, 1, 2, 3].map(|page| unsafe { base.wrapping_add(page * PAGE_BYTES).read() });
        assert_eq!(bytes, [7, 0, 7, 7]);
    }

    /// Goal: our own memory has no huge pages, whatever the system's setting, also in a child;
    /// memory for the program follows the system. Method: the flag of a mapping against huge pages.
    #[test]
    fn a_reservation_has_no_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let refused = |space: &Reservation| flags(space.address()).iter().any(|flag| flag == "nh");
        let space = Reservation::new(4 << 20, 2 << 20).unwrap();
        assert!(refused(&space));
        // SAFETY: no reference into it exists.
        unsafe { rustix::mm::munmap(space.base().as_ptr().cast(), space.bytes()) }.unwrap();
        space.map_again().unwrap();
        assert!(refused(&space));
        assert!(!refused(&Reservation::for_program(4 << 20, 2 << 20).unwrap()));
    }

    #[test]
    fn a_reservation_is_aligned_and_comes_with_first_touch() {
        let space = Reservation::new(1 << 20, 1 << 20).unwrap();
        assert_eq!(space.address() % (1 << 20), 0);
        let second = space.base().as_ptr().wrapping_add(PAGE_BYTES);
        // SAFETY: the second page of our own mapping.
        unsafe { second.write(1) };
        let mut present = [9_u8; 256];
        residency(space.address(), 1 << 20, &mut present).unwrap();
        assert_eq!(present.iter().filter(|page| **page & 1 == 1).count(), 1);
        assert_eq!(present[1] & 1, 1);
        // SAFETY: our own mapping, whose contents the test no longer needs.
        unsafe { release(space.address(), space.bytes()) }.unwrap();
        residency(space.address(), 1 << 20, &mut present).unwrap();
        assert!(present.iter().all(|page| page & 1 == 0));
    }
}
