//! Which pages of this process are resident, and which of them another process has too: `/proc/self/pagemap`.

use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::io::Errno;

use crate::map::{PAGE_BYTES, residency};

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
/// The page is the zero page, which all processes share: it was read but never written.
const PAGE_IS_PFNZERO: u64 = 1 << 5;

const _: () = assert!(size_of::<Scan>() == 96 && size_of::<ScanRegion>() == 24);

/// Calls `each` for each run of resident pages in a range, in rising order, and whether they are
/// the shared zero page.
///
/// By `PAGEMAP_SCAN` (Linux 6.7), which skips address space without page tables; page by page where
/// that is not available.
pub fn for_each_resident(start: usize, end: usize, mut each: impl FnMut(usize, usize, bool)) {
    let mut regions = [ScanRegion { start: 0, end: 0, categories: 0 }; 64];
    let Ok(file) = crate::files::open_read(c"/proc/self/pagemap") else {
        return each_resident_page(start, end, each);
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
        let Ok(found) = usize::try_from(found) else { return each_resident_page(at, end, each) };
        let place = |address: u64| usize::try_from(address).unwrap_or(end);
        for region in &regions[..found] {
            let zero = region.categories & PAGE_IS_PFNZERO != 0;
            each(place(region.start), place(region.end), zero);
        }
        at = place(scan.walk_end).max(at + PAGE_BYTES);
    }
}

fn each_resident_page(start: usize, end: usize, mut each: impl FnMut(usize, usize, bool)) {
    let mut present = [0_u8; 512];
    for from in (start..end).step_by(512 * PAGE_BYTES) {
        let bytes = (end - from).min(512 * PAGE_BYTES);
        // A range that cannot be examined counts as resident.
        if residency(from, bytes, &mut present).is_err() {
            present.fill(1);
        }
        for page in (0..bytes / PAGE_BYTES).filter(|page| present[*page] & 1 == 1) {
            each(from + page * PAGE_BYTES, from + (page + 1) * PAGE_BYTES, false);
        }
    }
}

/// In an entry of `pagemap`: the page is in memory.
const PRESENT: u64 = 1 << 63;
/// It is in swap; also the mark of a page with a memory error.
const ELSEWHERE: u64 = 1 << 62;
/// No other process has it mapped.
const EXCLUSIVE: u64 = 1 << 56;

/// Sets one byte for each page from `start` on: 1 if it is resident, and mapped in another process too (or the page of
/// zeros, which all have), else 0.
///
/// # Errors
///
/// There is no `/proc`, or it is forbidden.
pub fn shared(start: usize, pages: &mut [u8]) -> Result<(), Errno> {
    each_entry(start, pages, |entry| entry & (PRESENT | EXCLUSIVE) == PRESENT)
}

/// Sets one byte for each page from `start` on: 1 if it is resident, else 0. As [`residency`], for where `mincore` is
/// forbidden; what is not mapped is not resident.
///
/// # Errors
///
/// As [`shared`].
pub fn present(start: usize, pages: &mut [u8]) -> Result<(), Errno> {
    each_entry(start, pages, |entry| entry & PRESENT != 0)
}

/// Whether there is a page that is not in memory: it was swapped out, or has a memory error. Where that cannot be
/// asked, there is none.
#[must_use]
pub fn is_elsewhere(page: usize) -> bool {
    let mut found = [0];
    each_entry(page, &mut found, |entry| entry & ELSEWHERE != 0).is_ok() && found == [1]
}

fn each_entry(start: usize, pages: &mut [u8], is_one: impl Fn(u64) -> bool) -> Result<(), Errno> {
    const AT_ONCE: usize = 64;
    let file = crate::files::open_read(c"/proc/self/pagemap")?;
    for (at, pages) in pages.chunks_mut(AT_ONCE).enumerate() {
        let mut entries = [[0_u8; 8]; AT_ONCE];
        let entries = &mut entries[..pages.len()];
        let offset = (start / PAGE_BYTES + at * AT_ONCE) * 8;
        let read = rustix::io::pread(file.as_fd(), entries.as_flattened_mut(), offset as u64)?;
        // What lies above all mappings has no entries.
        entries.as_flattened_mut()[read..].fill(0);
        for (page, entry) in pages.iter_mut().zip(entries) {
            *page = u8::from(is_one(u64::from_ne_bytes(*entry)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{each_resident_page, for_each_resident, is_elsewhere, present, shared};
    use std::os::fd::AsRawFd as _;

    use crate::map::{PAGE_BYTES, Reservation, residency};
    use crate::uffd::{Reach, Uffd};

    /// Goal: both methods find the same resident pages.
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

    /// Goal: a page that cannot be read is told from one that is missing. Method: the kernel marks a page as one with a
    /// memory error for us (`UFFDIO_POISON`, Linux 6.6).
    #[test]
    fn a_page_with_an_error_is_elsewhere() {
        let uffd = match Uffd::open(Reach::Program, 1 << 14) {
            Ok(uffd) => uffd,
            Err(errno) => return eprintln!("SKIPPED: no userfaultfd that marks pages: {errno}"),
        };
        let space = Reservation::new(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let start = space.address();
        // SAFETY: a page of our own mapping.
        unsafe { space.base().as_ptr().write(1) };
        uffd.register(start, space.bytes()).unwrap();
        // `struct uffdio_poison`: the range, a mode, and the bytes that were marked.
        let mut poison = [(start + PAGE_BYTES) as u64, PAGE_BYTES as u64, 0, 0];
        let call = 0xC020_AA08;
        // SAFETY: the argument is laid out as the kernel's, and the page is ours and not used.
        let answer = unsafe { libc::ioctl(uffd.file().as_raw_fd(), call, poison.as_mut_ptr()) };
        assert_eq!((answer, poison[3]), (0, PAGE_BYTES as u64));
        let found = [0, 1, 2].map(|page| is_elsewhere(start + page * PAGE_BYTES));
        assert_eq!(found, [false, true, false]);
    }

    /// Goal: a page is shared while a child has it too, and not before and after. Method: three pages, of which the
    /// parent writes to one while the child lives; in a process of its own, of which no other test makes children.
    #[test]
    fn pages_are_shared_with_a_child() {
        assert!(crate::testing::in_child(|| {
            share_with_a_child();
            true
        }));
    }

    fn share_with_a_child() {
        let space = Reservation::new(80 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let write = |page: usize| {
            let at = space.base().as_ptr().wrapping_add(page * PAGE_BYTES);
            // SAFETY: a page of our own mapping.
            unsafe { at.write(1) };
        };
        let found = || {
            let mut pages = [7_u8; 80];
            shared(space.address(), &mut pages).unwrap();
            assert!(pages.iter().all(|page| *page < 2));
            pages.iter().enumerate().filter(|(_, page)| **page == 1).map(|(at, _)| at).collect()
        };
        let found = || -> Vec<usize> { found() };
        [2, 70, 79].into_iter().for_each(write);
        let (mut pages, mut as_told) = ([7_u8; 80], [7_u8; 80]);
        present(space.address(), &mut pages).unwrap();
        residency(space.address(), space.bytes(), &mut as_told).unwrap();
        assert_eq!(pages, as_told.map(|page| page & 1));
        assert!(found().is_empty());
        let mut pipe = [0; 2];
        // SAFETY: two descriptors are written to an array of two.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = 0_u8;
            // SAFETY: the child's own descriptors; it waits until the parent closes its end.
            unsafe { libc::close(pipe[1]) };
            // SAFETY: as above, into one byte.
            unsafe { libc::read(pipe[0], (&raw mut byte).cast(), 1) };
            // SAFETY: no precondition.
            unsafe { libc::_exit(0) };
        }
        assert_eq!(found(), [2, 70, 79]);
        write(70);
        assert_eq!(found(), [2, 79]);
        for end in pipe {
            // SAFETY: our own descriptor.
            unsafe { libc::close(end) };
        }
        // SAFETY: our own child; its status is not asked for.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        assert!(found().is_empty(), "the child has let go of them");
    }
}
