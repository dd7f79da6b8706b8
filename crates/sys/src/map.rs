//! Memory mappings: reserving address space, giving pages back, asking what is resident.

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a page of this kernel.
pub const PAGE_BYTES: usize = 4096;

/// Address space of our own: private, anonymous, readable and writable; pages come with first touch.
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

    /// Likewise, for what a program keeps there: in pages of whatever size the kernel is set to give.
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

    /// Maps the same range anew, in a child of `fork` that did not inherit it.
    ///
    /// # Errors
    ///
    /// `NOMEM`, or `EXIST` if the range is taken: nothing of anybody's is ever unmapped.
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
        // SAFETY: the mapping is ours, and dropping the value ends every borrow of it.
        let gone = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(gone.is_ok(), "munmap of our own mapping failed: {gone:?}");
    }
}

/// Maps `bytes` of anonymous memory at a multiple of `align`, without touching a page, far from where
/// the kernel puts what the program maps. Never in huge pages: what we have must take the memory that it
/// uses and no more, also where the kernel is set to give huge pages to all (Debian's is).
///
/// A program may unmap a range and map another at that very place a moment later. It has every right
/// to take the hole for its own, but a mapping that some thread of ours made in between would be
/// replaced.
///
/// # Errors
///
/// As [`Reservation::new`].
pub fn map_aligned(bytes: usize, align: usize) -> Result<NonNull<u8>, Errno> {
    let base = reserve(bytes, align)?;
    refuse_huge_pages(base, bytes);
    Ok(base)
}

/// Has a fresh mapping of ours in pages of 4 KiB.
fn refuse_huge_pages(base: NonNull<u8>, bytes: usize) {
    // SAFETY: changes no contents. A kernel that has no huge pages refuses, and is right.
    unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) }.ok();
}

/// [`map_aligned`], in pages of any size.
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

/// The part of the address space that we ask for: above position-independent programs and their
/// heap (0x55.. to 0x57..), below what the kernel gives (from 0x7f.. downwards).
const APART: usize = 0x6000_0000_0000;

/// 16 TiB, of which the start is up to 8 TiB in.
const APART_BYTES: usize = 1 << 44;

/// A place for `bytes`, which nobody had yet.
pub fn apart(bytes: usize) -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // As hard to guess as the place of this library.
    let start = (&raw const NEXT as usize).next_multiple_of(PAGE_BYTES) % (APART_BYTES / 2);
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    // Relaxed: a place that two get is a worse hint, no more.
    let next = NEXT.fetch_add(bytes, Ordering::Relaxed).wrapping_add(start);
    (APART + next % APART_BYTES) as *mut c_void
}

/// Unmaps what map_aligned asked for too much.
fn trim(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the range is an end of the mapping just made, which nobody else knows of.
        let gone = unsafe { rustix::mm::munmap(start as *mut c_void, bytes) };
        debug_assert!(gone.is_ok());
    }
}

/// Gives the pages of a range back; their contents are gone.
///
/// # Errors
///
/// Those of `madvise`.
///
/// # Safety
///
/// The range is the caller's, and nobody needs its contents.
pub unsafe fn release(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller's contract.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxDontNeed) }
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

/// Makes every present page of a range this process's own, as if each were written to.
///
/// # Errors
///
/// Those of `madvise`.
pub fn unshare_pages(address: usize, bytes: usize) -> Result<(), Errno> {
    // SAFETY: populating changes no contents.
    unsafe { rustix::mm::madvise(address as *mut c_void, bytes, Advice::LinuxPopulateWrite) }
}

/// Makes a range resident, as reading it would, but fails where that would be a signal.
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

/// The calling process's memory as a file. A write to it also succeeds in private mappings that the program may only
/// read, or may not touch at all.
#[derive(Debug)]
pub struct OwnMemory(OwnedFd);

impl OwnMemory {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// `NOENT`: `/proc` is not mounted. `MFILE`: no descriptor is left.
    pub fn open() -> Result<OwnMemory, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/self/mem", flags, rustix::fs::Mode::empty()).map(OwnMemory)
    }

    /// Writes `bytes` at `address`, all of them.
    ///
    /// # Errors
    ///
    /// `IO`: something there is not mapped, or is a shared mapping that may only be read, or memory is short.
    pub fn write(&self, address: usize, bytes: &[u8]) -> Result<(), Errno> {
        // `pwrite` names the address by a number, and the contract of whoever has managed memory covers it: no
        // reference to these bytes is alive.
        let written = rustix::io::pwrite(&self.0, bytes, address as u64)?;
        if written == bytes.len() { Ok(()) } else { Err(Errno::IO) }
    }
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    wanted: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u32 = 0xC060_6610;
const PAGE_IS_PRESENT: u64 = 1 << 3;
/// The page of zeros that all processes share: it was read, and never written.
const PAGE_IS_PFNZERO: u64 = 1 << 5;

const _: () = assert!(size_of::<Scan>() == 96 && size_of::<ScanRegion>() == 24);

/// Tells each run of resident pages in a range, in rising order, and whether they are the shared page
/// of zeros.
///
/// By `PAGEMAP_SCAN` (Linux 6.7), which skips address space without page tables; where that is not
/// to be had, page by page.
pub fn for_each_resident(start: usize, end: usize, mut tell: impl FnMut(usize, usize, bool)) {
    let mut regions = [ScanRegion { start: 0, end: 0, categories: 0 }; 64];
    let Ok(file) = crate::files::open_read(c"/proc/self/pagemap") else {
        return each_resident_page(start, end, tell);
    };
    let mut at = start;
    while at < end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags: 0,
            start: at as u64,
            end: end as u64,
            walk_end: 0,
            regions: regions.as_mut_ptr() as u64,
            regions_count: regions.len() as u64,
            pages_max: 0,
            inverted: 0,
            all_of: PAGE_IS_PRESENT,
            any_of: 0,
            wanted: PAGE_IS_PRESENT | PAGE_IS_PFNZERO,
        };
        // SAFETY: the structure is laid out as the kernel's (asserted above), and `regions` has room
        // for `regions_count` regions.
        let found = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN.into(), &raw mut scan) };
        let Ok(found) = usize::try_from(found) else { return each_resident_page(at, end, tell) };
        let place = |address: u64| usize::try_from(address).unwrap_or(end);
        for region in &regions[..found] {
            let zero = region.categories & PAGE_IS_PFNZERO != 0;
            tell(place(region.start), place(region.end), zero);
        }
        at = place(scan.walk_end).max(at + PAGE_BYTES);
    }
}

fn each_resident_page(start: usize, end: usize, mut tell: impl FnMut(usize, usize, bool)) {
    let mut present = [0_u8; 512];
    for from in (start..end).step_by(512 * PAGE_BYTES) {
        let bytes = (end - from).min(512 * PAGE_BYTES);
        // What cannot be asked about counts as resident.
        if residency(from, bytes, &mut present).is_err() {
            present.fill(1);
        }
        for page in (0..bytes / PAGE_BYTES).filter(|page| present[*page] & 1 == 1) {
            tell(from + page * PAGE_BYTES, from + (page + 1) * PAGE_BYTES, false);
        }
    }
}

/// The error of the `libc::syscall` that has just failed on this thread.
fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::INVAL, Errno::from_raw_os_error)
}

/// One system call as the program asked for it: six words in, a word or an error out.
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
    // An address is a word, whatever its highest bit.
    if answer == -1 { Err(last_error()) } else { Ok(usize::from_ne_bytes(answer.to_ne_bytes())) }
}

/// An `mmap` as the program asked for it, with no place wanted, at a multiple of `align`.
///
/// # Errors
///
/// The kernel's.
pub fn map_aligned_for(words: [usize; 6], align: usize) -> Result<usize, Errno> {
    let bytes = words[1].checked_next_multiple_of(PAGE_BYTES).ok_or(Errno::NOMEM)?;
    let mut larger = words;
    larger[1] = bytes.checked_add(align - PAGE_BYTES).ok_or(Errno::NOMEM)?;
    // SAFETY: no address is asked for, so nothing of anybody's changes.
    let start = unsafe { forward(libc::SYS_mmap, larger) }?;
    let at = start.next_multiple_of(align);
    trim(start, at - start);
    trim(at + bytes, start + larger[1] - (at + bytes));
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags of the mapping at `address`, as the kernel shortens them.
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

    /// Goal: no huge page in what is ours, whatever the system's setting, also in a child; a program's own
    /// memory is as the system has it. Method: the flag that a mapping has against huge pages.
    #[test]
    fn a_reservation_has_no_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let refused = |space: &Reservation| flags(space.address()).iter().any(|flag| flag == "nh");
        let space = Reservation::new(4 << 20, 2 << 20).unwrap();
        assert!(refused(&space));
        // SAFETY: nobody has a reference into it.
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

    /// Goal: both ways of looking find the same pages.
    #[test]
    fn runs_of_resident_pages_are_found() {
        let space = Reservation::new(4 << 20, PAGE_BYTES).unwrap();
        let (start, end) = (space.address(), space.address() + space.bytes());
        for page in [3, 4, 5, 100, 600, 1023] {
            let at = space.base().as_ptr().wrapping_add(page * PAGE_BYTES);
            // SAFETY: a page of our own mapping.
            unsafe { at.write(1) };
        }
        let mut found = Vec::new();
        for_each_resident(start, end, |from, to, zero| {
            assert!(!zero);
            found.extend((from..to).step_by(PAGE_BYTES).map(|at| (at - start) / PAGE_BYTES));
        });
        let mut slowly = Vec::new();
        each_resident_page(start, end, |from, _, _| slowly.push((from - start) / PAGE_BYTES));
        assert_eq!(found, [3, 4, 5, 100, 600, 1023]);
        assert_eq!(found, slowly);
    }
}
