//! `mmap` and its family.
//!
//! ```text
//! no manageable memory near the range      -> the system call, at once
//! the engine manages none of the range     -> the system call and a note, under the lock of `candidates`
//! the engine may manage some of the range  -> ask the mapping proxy
//! ```
//!
//! New mappings are handed to the engine some MiB at a time. So a program that often maps and unmaps small
//! ranges pays only for the lock, and the kernel has joined small neighbours to one mapping by then.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use zfolio_pager::Engine;
use zfolio_sys::{Errno, files, map, maps};

use crate::candidates::{self, Candidates, may_be_managed};
use crate::interpose::{interpose, set_errno};
use crate::lifecycle;
use crate::mapping_proxy::{Call, ask};
use crate::{settings, share};

/// Whether the program ever said that a child is not to have some memory.
static NOT_ALL_INHERITED: AtomicBool = AtomicBool::new(false);

/// Whether a child may lack memory that its parent has (`MADV_DONTFORK`).
pub(crate) fn is_not_all_inherited() -> bool {
    NOT_ALL_INHERITED.load(Ordering::Relaxed)
}

/// Whether the program ever said that a child is to find some memory empty.
static IS_ANY_WIPED: AtomicBool = AtomicBool::new(false);

/// Before the program gives the kernel this advice: what of it concerns children.
pub(crate) fn note_for_children(advice: c_int, start: usize, end: usize) {
    match advice {
        libc::MADV_DONTFORK => NOT_ALL_INHERITED.store(true, Ordering::Relaxed),
        libc::MADV_WIPEONFORK => {
            IS_ANY_WIPED.store(true, Ordering::Relaxed);
            // A child must read zeros there, and the engine would give it the parent's contents.
            give_up_anywhere(start, end);
        }
        _ => {}
    }
}

/// Before a fork: gives up what the child is to find empty, as the kernel has it now. It was given up when the program
/// said so; but a raw `mremap` may since have moved it to addresses that are still noted, or will be (`CAND-2`).
pub(crate) fn give_up_wiped(engine: &Engine) {
    if IS_ANY_WIPED.load(Ordering::Relaxed) {
        maps::each_wiped(&mut |start, end| engine.pin(start, end));
    }
}

/// Linux 6.13: drops the contents of a range, and makes each access a SIGSEGV. userfaultfd reports no event.
const MADV_GUARD_INSTALL: c_int = 102;
/// As `MADV_DONTNEED`, also of locked pages.
const MADV_DONTNEED_LOCKED: c_int = 24;

/// Notes a new mapping. Once the fresh mappings reach a 32nd of the limit (1 to 16 MiB), hands all of them to
/// the engine, unless that has given up.
fn hand_over(mut ours: Candidates, start: usize, end: usize) {
    ours.insert(start, end);
    if candidates::has_given_up() {
        return;
    }
    let limit = settings::get().map_or(0, share::limit_bytes);
    let most = usize::try_from(limit / 32).unwrap_or(usize::MAX).clamp(1 << 20, 16 << 20);
    let adopted = ours.adopt_fresh(most);
    drop(ours);
    if adopted > 0 {
        // The kernel has served these pages without regard to the limit, so this thread now waits for room.
        ask(Call::MakeRoom, [adopted, 0, 0, 0, 0, 0]).ok();
    }
}

/// The old range of `mremap` is still mapped (`MREMAP_DONTUNMAP`), and empty: new mappings of what was noted there.
fn hand_over_left(mut ours: Candidates, taken: &candidates::Taken) {
    if let Some(((start, end), others)) = taken.noted().split_last() {
        others.iter().for_each(|(from, to)| ours.insert(*from, *to));
        hand_over(ours, *start, *end);
    }
}

/// Mappings with any of these flags are never managed: stacks, huge pages, locked pages, shared memory.
const NEVER: c_int = libc::MAP_SHARED
    | libc::MAP_STACK
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_LOCKED
    | libc::MAP_32BIT;

/// `PROT_NONE`: address space that the program reserves for later.
const NO_ACCESS: usize = libc::PROT_NONE.unsigned_abs() as usize;

/// Whether a new mapping can be managed.
pub(crate) fn is_manageable(bytes: usize, protection: usize, flags: c_int) -> bool {
    let wanted = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let executable = protection & libc::PROT_EXEC.unsigned_abs() as usize != 0;
    settings::get().is_some()
        && bytes > 0
        && flags & wanted == wanted
        && flags & NEVER == 0
        && !executable
}

/// Fails as the C library does.
fn fail(error: Errno) -> *mut c_void {
    set_errno(error.raw_os_error());
    libc::MAP_FAILED
}

fn answer_pointer(answer: Result<usize, Errno>) -> *mut c_void {
    answer.map_or_else(fail, |address| address as *mut c_void)
}

fn answer_int(answer: Result<usize, Errno>) -> c_int {
    match answer {
        Ok(_) => 0,
        Err(error) => {
            fail(error);
            -1
        }
    }
}

/// A signed argument as the word that the kernel takes.
fn word(value: i64) -> usize {
    usize::from_ne_bytes(value.to_ne_bytes())
}

/// The end of a range, rounded up to a page and at most [`ADDRESSES_END`].
///
/// If the end overflows, the result is `start`: an empty range here, and an error of the kernel.
pub(crate) fn page_end(start: usize, bytes: usize) -> usize {
    let end =
        start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(map::PAGE_BYTES));
    end.map_or(start, |end| end.min(ADDRESSES_END.max(start)))
}

/// No mapping is above this address: 47 bits.
const ADDRESSES_END: usize = 1 << 47;

/// Bytes of a folio; of a page where nothing is managed.
pub(crate) fn folio_bytes() -> usize {
    settings::get().map_or(map::PAGE_BYTES, |settings| settings.config.unit.folio().bytes())
}

/// Makes a mapping. Aligns it to a folio if the program leaves its address to the kernel.
fn make(mut words: [usize; 6], flags: c_int, manageable: bool) -> Result<usize, Errno> {
    if manageable {
        // MAP_POPULATE is a hint, and would exceed the limit at once.
        words[3] &= !word(libc::MAP_POPULATE.into());
    }
    if manageable && words[0] == 0 && flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == 0 {
        let folio = folio_bytes();
        // Alignment costs two more system calls: worth it only for a few folios or more.
        if words[1] >= 4 * folio {
            return map::map_aligned_for(words, folio);
        }
    }
    // SAFETY: the program's own call, with its own words.
    unsafe { map::forward(libc::SYS_mmap, words) }
}

fn mmap_words(words: [usize; 6]) -> *mut c_void {
    lifecycle::wake_up();
    let [start, bytes, protection, flags, ..] = words;
    let flags = i32::try_from(flags).unwrap_or(0);
    let manageable = is_manageable(bytes, protection, flags);
    // MAP_FIXED_NOREPLACE wins over MAP_FIXED.
    let replaces = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED
        && may_be_managed(start, page_end(start, bytes));
    if !manageable && !replaces {
        // SAFETY: the program's own call, with its own words.
        return answer_pointer(unsafe { map::forward(libc::SYS_mmap, words) });
    }
    let mut ours = candidates::lock();
    let end = page_end(start, bytes);
    if replaces && ours.is_engines(start, end) {
        if is_devices(words, flags) {
            drop(ours);
            // What is there comes back, also over the limit: the kernel may refuse the call, and then it stays.
            give_up(start, end);
            // SAFETY: the program's own call, with its own words.
            return answer_pointer(unsafe { map::forward(libc::SYS_mmap, words) });
        }
        // Removed before the call: after it, another thread might map and note the same addresses.
        let taken = ours.take(start, end);
        let blocked = ours.release();
        let placed = replace(words, flags, manageable);
        if placed.is_err() {
            candidates::lock().put_back(&taken);
        } else if manageable {
            candidates::lock().note(start, end);
        }
        drop(taken);
        drop(blocked);
        return answer_pointer(placed);
    }
    let answer = make(words, flags, manageable);
    if let Ok(at) = answer {
        ours.remove(at, page_end(at, bytes));
    }
    match answer {
        Ok(at) if manageable && protection == NO_ACCESS && ours.engine().is_none() => {
            ours.reserve(at, page_end(at, bytes));
            drop(ours);
        }
        Ok(at) if manageable => hand_over(ours, at, page_end(at, bytes)),
        _ => drop(ours),
    }
    lifecycle::start_if_needed();
    answer_pointer(answer)
}

/// Whether a mapping is of a device, whose driver may want it just there: NVIDIA's for unified memory refuses it at
/// another address than its offset, and one that was moved.
fn is_devices([start, _, _, _, file, _]: [usize; 6], flags: c_int) -> bool {
    let file = i32::try_from(file).unwrap_or(-1);
    // The kernel refuses an address within a page.
    let is_file = flags & libc::MAP_ANONYMOUS == 0 && start % map::PAGE_BYTES == 0;
    is_file && files::is_character_device(file)
}

/// Makes a mapping over managed memory. This thread makes it elsewhere, because the file descriptor may be in
/// this thread's table only; the mapping proxy then moves it into place.
fn replace(words: [usize; 6], flags: c_int, manageable: bool) -> Result<usize, Errno> {
    let [start, bytes, ..] = words;
    if start % map::PAGE_BYTES != 0 {
        return Err(Errno::INVAL);
    }
    let mut elsewhere = words;
    // `mremap` fails if source and target overlap, so the mapping must not be made inside the target.
    elsewhere[0] = map::apart(bytes) as usize;
    let anywhere = flags & !(libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_32BIT);
    elsewhere[3] = word(anywhere.into());
    let made = make(elsewhere, anywhere, manageable)?;
    let placed = ask(Call::Replace, [start, bytes, made, usize::from(manageable), 0, 0]);
    if placed.is_err() {
        // SAFETY: the mapping made above, whose address no other code has.
        unsafe { map::forward(libc::SYS_munmap, [made, bytes, 0, 0, 0, 0]) }.ok();
    }
    placed
}

/// Stops managing a range for good: it is no longer noted, and if the engine manages it, its contents come
/// back and stay resident.
pub(crate) fn give_up(start: usize, end: usize) {
    if may_be_managed(start, end) {
        give_up_if(start, end, |ours| ours.is_engines(start, end));
    }
}

/// As [`give_up`], also where the program has moved managed memory by a raw `mremap`: only the engine knows of that
/// (`CAND-2`). For calls that the kernel reports to nobody, and that are rare.
pub(crate) fn give_up_anywhere(start: usize, end: usize) {
    if start < end {
        give_up_if(start, end, |ours| ours.engine().is_some());
    }
}

/// Notes a range no longer, in whole pages; asks the engine to give it up if it may be the engine's.
fn give_up_if(start: usize, end: usize, is_asked: impl FnOnce(&mut Candidates) -> bool) {
    let (start, end) = (start & !(map::PAGE_BYTES - 1), page_end(end, 0));
    let mut ours = candidates::lock();
    let is_asked = is_asked(&mut ours);
    ours.remove(start, end);
    drop(ours);
    if is_asked {
        // Call::Pin does not fail.
        ask(Call::Pin, [start, end - start, 0, 0, 0, 0]).ok();
    }
}

/// After a change of protection: notes that a reserved range may have become accessible.
///
/// It must be after the change: the first test reads without the lock, and nothing is in use before.
fn allow([start, bytes, protection, ..]: [usize; 6]) {
    let end = page_end(start, bytes);
    if protection == NO_ACCESS || !candidates::has_reserved() || !may_be_managed(start, end) {
        return;
    }
    candidates::lock().allow(start, end);
    lifecycle::start_if_needed();
}

fn mremap_words(words: [usize; 6]) -> Result<usize, Errno> {
    let [start, bytes, new_bytes, ..] = words;
    let (end, new_length) = (page_end(start, bytes), page_end(0, new_bytes));
    // SAFETY: the program's own call, with its own words.
    let forward = || unsafe { map::forward(libc::SYS_mremap, words) };
    let flags = i32::try_from(words[3]).unwrap_or(0);
    let onto = if flags & libc::MREMAP_FIXED != 0 { words[4] } else { start };
    // The kernel refuses an address within a page.
    if bytes == 0
        || start % map::PAGE_BYTES != 0
        || onto % map::PAGE_BYTES != 0
        || !(candidates::engine().is_some()
            || may_be_managed(start, end)
            || may_be_managed(onto, onto.saturating_add(new_length)))
    {
        return forward();
    }
    let onto_end = if onto == start { end } else { onto.saturating_add(new_length) };
    let mut ours = candidates::lock();
    // Whatever range it is: what a raw `mremap` has moved only the engine knows (`CAND-2`).
    if ours.engine().is_some() {
        let taken = ours.take(start, end);
        let target = if onto == start { None } else { Some(ours.take(onto, onto_end)) };
        let blocked = ours.release();
        let [.., to, _] = words;
        let noted = &raw const taken as usize;
        let answer = ask(Call::Remap, [start, bytes, new_bytes, words[3], to, noted]);
        match answer {
            // What was given up stays so.
            Ok(at) => {
                let mut ours = candidates::lock();
                let moved = taken.moved((start, end), (at, at + new_length));
                moved.for_each(|(from, to)| ours.note(from, to));
                if flags & libc::MREMAP_DONTUNMAP != 0 {
                    hand_over_left(ours, &taken);
                }
            }
            Err(_) => {
                let mut ours = candidates::lock();
                ours.put_back(&taken);
                target.iter().for_each(|target| ours.put_back(target));
            }
        }
        drop((taken, target));
        drop(blocked);
        return answer;
    }
    let at = forward()?;
    let taken = ours.take(start, end);
    ours.remove(at, at + new_length);
    if flags & libc::MREMAP_DONTUNMAP != 0 {
        ours.put_back(&taken);
    }
    taken.moved((start, end), (at, at + new_length)).for_each(|(from, to)| ours.note(from, to));
    drop(taken);
    drop(ours);
    lifecycle::start_if_needed();
    Ok(at)
}

interpose! {
    /// `mmap(2)`.
    fn mmap(
        start: *mut c_void,
        bytes: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64
    ) -> *mut c_void {
        mmap_words([
            start as usize,
            bytes,
            word(protection.into()),
            word(flags.into()),
            word(file.into()),
            word(offset),
        ])
    }

    /// `mmap64(2)`.
    fn mmap64(
        start: *mut c_void,
        bytes: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64
    ) -> *mut c_void {
        // SAFETY: the same function on 64-bit Linux.
        unsafe { mmap(start, bytes, protection, flags, file, offset) }
    }

    /// `munmap(2)`.
    fn munmap(start: *mut c_void, bytes: usize) -> c_int {
        let (first, words) = (start as usize, [start as usize, bytes, 0, 0, 0, 0]);
        let end = page_end(first, bytes);
        // SAFETY: the program's own call, with its own words.
        let forward = || unsafe { map::forward(libc::SYS_munmap, words) };
        // The kernel refuses a bad range.
        if first % map::PAGE_BYTES != 0 || bytes == 0 || !may_be_managed(first, end) {
            return answer_int(forward());
        }
        let mut ours = candidates::lock();
        if ours.is_engines(first, end) {
            // Removed before the call: after it, another thread might map and note the same addresses.
            let taken = ours.take(first, end);
            let blocked = ours.release();
            let answer = ask(Call::Unmap, words);
            if answer.is_err() {
                candidates::lock().put_back(&taken);
            }
            drop(taken);
            drop(blocked);
            return answer_int(answer);
        }
        let answer = forward();
        if answer.is_ok() {
            ours.remove(first, end);
        }
        answer_int(answer)
    }

    /// `madvise(2)`.
    fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int {
        let first = start as usize;
        let mut words = [first, bytes, word(advice.into()), 0, 0, 0];
        let end = page_end(first, bytes);
        let managed = first % map::PAGE_BYTES == 0 && bytes > 0 && may_be_managed(first, end);
        match advice {
            libc::MADV_DONTNEED
            | MADV_DONTNEED_LOCKED
            | libc::MADV_FREE
            | libc::MADV_REMOVE
            | MADV_GUARD_INSTALL
                if managed =>
            {
                let mut ours = candidates::lock();
                if !ours.is_engines(first, end) {
                    // Under the lock, so that the engine does not take the range over before the call.
                    // SAFETY: the program's own call, with its own words.
                    return answer_int(unsafe { map::forward(libc::SYS_madvise, words) });
                }
                drop(ours);
                if advice == libc::MADV_FREE {
                    // Freed now: the kernel's lazy freeing does not know the stored copies.
                    words[2] = word(libc::MADV_DONTNEED.into());
                }
                return answer_int(ask(Call::Discard, words));
            }
            _ => note_for_children(advice, first, end),
        }
        // SAFETY: the program's own call, with its own words.
        answer_int(unsafe { map::forward(libc::SYS_madvise, words) })
    }

    /// `mprotect(2)`.
    fn mprotect(start: *mut c_void, bytes: usize, protection: c_int) -> c_int {
        let words = [start as usize, bytes, word(protection.into()), 0, 0, 0];
        // SAFETY: the program's own call, with its own words.
        let answer = unsafe { map::forward(libc::SYS_mprotect, words) };
        if answer.is_ok() {
            allow(words);
        }
        answer_int(answer)
    }

    /// `pkey_mprotect(2)`.
    fn pkey_mprotect(start: *mut c_void, bytes: usize, protection: c_int, key: c_int) -> c_int {
        let words = [start as usize, bytes, word(protection.into()), word(key.into()), 0, 0];
        // As in glibc: without a key this is `mprotect`, which also works on a kernel without keys.
        let call = if key == -1 { libc::SYS_mprotect } else { libc::SYS_pkey_mprotect };
        // SAFETY: the program's own call, with its own words.
        let answer = unsafe { map::forward(call, words) };
        if answer.is_ok() {
            allow(words);
        }
        answer_int(answer)
    }

    /// `mremap(2)`.
    fn mremap(
        start: *mut c_void,
        bytes: usize,
        new_bytes: usize,
        flags: c_int,
        to: *mut c_void
    ) -> *mut c_void {
        // A program passes `to` with that flag only; without, it is whatever was in the register. The kernel looks at
        // it with `MREMAP_DONTUNMAP`, too.
        let to = if flags & libc::MREMAP_FIXED == 0 { 0 } else { to as usize };
        answer_pointer(mremap_words([start as usize, bytes, new_bytes, word(flags.into()), to, 0]))
    }

    /// `shmat(2)`. With `SHM_REMAP` it replaces what is mapped there, of which the kernel tells no userfaultfd.
    fn shmat(segment: c_int, start: *const c_void, flags: c_int) -> *mut c_void {
        // SAFETY: all zeros are a value of it.
        let mut told: libc::shmid_ds = unsafe { std::mem::zeroed() };
        let replaces = flags & libc::SHM_REMAP != 0 && !start.is_null();
        // SAFETY: IPC_STAT fills the structure.
        if replaces && unsafe { libc::shmctl(segment, libc::IPC_STAT, &raw mut told) } == 0 {
            give_up_anywhere(start as usize, page_end(start as usize, told.shm_segsz));
        }
        let words = [word(segment.into()), start as usize, word(flags.into()), 0, 0, 0];
        // SAFETY: the program's own call, with its own words.
        answer_pointer(unsafe { map::forward(libc::SYS_shmat, words) })
    }

    /// `mlock(2)`.
    fn mlock(start: *const c_void, bytes: usize) -> c_int {
        give_up_anywhere(start as usize, page_end(start as usize, bytes));
        // SAFETY: the program's own call, with its own words.
        answer_int(unsafe { map::forward(libc::SYS_mlock, [start as usize, bytes, 0, 0, 0, 0]) })
    }

    /// `mlock2(2)`.
    fn mlock2(start: *const c_void, bytes: usize, flags: u32) -> c_int {
        give_up_anywhere(start as usize, page_end(start as usize, bytes));
        let words = [start as usize, bytes, flags as usize, 0, 0, 0];
        // SAFETY: the program's own call, with its own words.
        answer_int(unsafe { map::forward(libc::SYS_mlock2, words) })
    }

    /// `mlockall(2)`.
    fn mlockall(flags: c_int) -> c_int {
        if settings::get().is_none() {
            let words = [word(flags.into()), 0, 0, 0, 0, 0];
            // SAFETY: the program's own call, with its own words.
            return answer_int(unsafe { map::forward(libc::SYS_mlockall, words) });
        }
        zfolio_pager::fatal::print_here(format_args!(
            "mlockall is refused: memory under a limit cannot all be locked (mlock of a part works)"
        ));
        answer_int(Err(Errno::NOMEM))
    }
}

const _: () = {
    assert!(size_of::<c_long>() == size_of::<usize>());
    // Two constants, because neither crate depends on the other.
    assert!(zfolio_core::page::PAGE_BYTES == map::PAGE_BYTES);
};
