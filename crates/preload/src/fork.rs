//! `fork`: the child gets a copy of all memory, by copy-on-write, and its own engine.
//!
//! ```text
//! prepare   brings staged folios back, and what the C library uses in the child before our handler runs
//!           (the open `FILE`s); has the allocator's locks free; opens the files that are spilled to, for the
//!           child; then holds the engine, the candidates and the heap still
//! parent    releases them
//! child     makes new userfaultfds and threads, keeps the tables; then releases
//! ```
//!
//! The child's engine must exist before the child touches managed memory: until then such memory reads as
//! zeros. The handlers of `pthread_atfork` run in the child in the order of registration, and ours is first.
//!
//! Between `prepare` and the system call, and in the child before our handler, the C library's `fork` uses
//! memory that it allocated with `malloc`: the open `FILE`s, whose locks it resets; the state of the name
//! service; a list of handlers if there are many. `prepare` makes all of that resident. The C library's `fork`
//! also waits for two locks, and no holder of either may wait for a fault then:
//!
//! - the lock of the list of `FILE`s, held while a thread uses them: `prepare` takes it first ([`Files`]);
//! - the lock of the name service's state: its holders touch that state only, which is resident.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use zfolio_core::stats::add;
use zfolio_pager::Quiet;
use zfolio_pager::fatal::print_here;
use zfolio_pager::spill::Lent;
use zfolio_sys::map::{self, Reservation};
use zfolio_sys::signal::{self, Mask};

use crate::allocator_locks::{self, AllocatorLocks};
use crate::candidates::{self, Candidates};
use crate::heap::{self, Held, Lock};
use crate::interpose::{interpose, next, set_errno};
use crate::mapping_proxy::{Call, ask};
use crate::{lifecycle, mappings, settings};

/// One fork at a time.
static ONE: Lock = Lock::new();
static STILL: Still = Still(UnsafeCell::new(None));

struct Still(UnsafeCell<Option<Everything>>);

// SAFETY: reached between prepare() and parent() or child() only, by the one thread that forks.
unsafe impl Sync for Still {}

/// All that is held during the call. Fields drop in this order: the outermost lock last.
struct Everything {
    heap: Held<'static>,
    quiet: Option<Quiet<'static>>,
    candidates: Candidates,
    allocator: AllocatorLocks,
    _one: Held<'static>,
    files: Option<Files>,
    mask: Mask,
}

type Handler = extern "C" fn();
#[allow(non_camel_case_types, reason = "named after its function")]
type __register_atfork = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// Registers the three handlers with the C library itself, by its `__register_atfork`.
///
/// `pthread_atfork` would call `__register_atfork` by name, and a program may define that function. Firefox does:
/// it keeps a list of its own, and calls the handlers around its `clone` as well. Our `clone` prepares too, so
/// that the thread would wait for itself.
pub(crate) fn install() {
    let register = next!(__register_atfork);
    // SAFETY: the handlers are functions of this library, which is never unloaded: no handle is needed.
    unsafe { register(prepare, parent, child, std::ptr::null_mut()) };
}

/// Address space that a child needs in addition to its copy of the parent's: four stacks, a little heap.
const CHILD_BYTES: usize = 2 << 20;

/// Whether a child could have the address space that it needs. If not, sets the `errno` for `fork` to fail with.
///
/// Without this test the child would have to end where address space is short (`RLIMIT_AS`, `RLIMIT_DATA`),
/// after `fork` has succeeded in the parent. If another thread uses the space up after the test, the child
/// still ends, with a message.
pub(crate) fn child_has_room() -> bool {
    let room =
        candidates::engine().is_none() || Reservation::new(CHILD_BYTES, map::PAGE_BYTES).is_ok();
    if !room {
        set_errno(libc::ENOMEM);
    }
    room
}

interpose! {
    /// `fork(3)`: the handlers do the work, as for the forks inside the C library. Only here can the fork be
    /// made to fail.
    fn fork() -> libc::pid_t {
        if !child_has_room() {
            return -1;
        }
        let next = next!(fork);
        // SAFETY: it has no precondition.
        unsafe { next() }
    }

    /// `_Fork(3)`: as `fork`, but the C library runs no handlers.
    fn _Fork() -> libc::pid_t {
        if !child_has_room() {
            return -1;
        }
        let next = next!(_Fork);
        prepare_bare();
        // SAFETY: it has no precondition.
        let answer = unsafe { next() };
        if answer == 0 { child() } else { parent() }
        answer
    }
}

/// Runs `work` while nobody forks, with every signal blocked.
pub(crate) fn while_nobody_forks<R>(work: impl FnOnce() -> R) -> R {
    let mask = signal::block_all();
    let one = ONE.lock();
    let answer = work();
    drop(one);
    signal::restore(&mask);
    answer
}

/// Before the C library's `fork`, which does more than the system call.
extern "C" fn prepare() {
    prepare_to(true);
}

/// Before a system call that forks.
pub(crate) fn prepare_bare() {
    prepare_to(false);
}

fn prepare_to(fork_by_library: bool) {
    if settings::get().is_none() {
        return;
    }
    let mask = signal::block_all();
    pin_own_stack();
    let files = fork_by_library.then(Files::lock);
    let one = ONE.lock();
    let allocator = allocator_locks::hold();
    let (candidates, quiet) = loop {
        if candidates::engine().is_none() {
            let candidates = candidates::lock();
            if candidates.engine().is_none() {
                break (candidates, None);
            }
            continue;
        }
        // Faults are still served. Make the memory resident, hold the engine still, and then check that all
        // of the memory is still resident. From Settle on this thread touches no managed memory: what is on
        // the disk would not be read (`SPILL-4`).
        let mut touched = Vec::new();
        if let Some(files) = &files {
            files.touch(|at| touched.push(at));
            touch_kept(|at| touched.push(at));
        }
        // Told from here: the engine's threads need descriptors for that, and there may be none.
        if ask(Call::Settle, [0; 6]) == Ok(1) {
            print_here(format_args!(
                "this process may no longer open a userfaultfd: the limit is not held from here on"
            ));
        }
        let Some(lent) = lend() else { continue };
        let candidates = candidates::lock();
        let quiet = candidates.engine().and_then(|engine| engine.quiet(lent));
        if let Some(mut quiet) = quiet {
            if touched.iter().all(|at| quiet.is_resident(*at)) {
                break (candidates, Some(quiet));
            }
        }
    };
    let everything =
        Everything { heap: heap::hold(), quiet, candidates, allocator, _one: one, files, mask };
    // SAFETY: `ONE` is held: no other thread is between prepare() and parent().
    unsafe { *STILL.0.get() = Some(everything) };
}

/// Opens the files for the child. If that fails, everything is brought back, and nothing is managed from here on:
/// `None`.
fn lend() -> Option<Lent> {
    match candidates::engine().map_or_else(|| Ok(Lent::default()), zfolio_pager::Engine::lend) {
        Ok(lent) => Some(lent),
        Err(errno) => {
            if ask(Call::GiveUp, [0; 6]) == Ok(1) {
                print_here(format_args!(
                    "the spill file cannot be opened for a child ({}): the limit is not held from here on",
                    zfolio_sys::errno_text::ErrnoText(errno)
                ));
            }
            None
        }
    }
}

/// Makes this thread's stack resident for good, and what it needs to find its thread-local variables: it must not fault
/// while the thread holds the engine still. Most stacks are not managed anyway.
fn pin_own_stack() {
    const AROUND: usize = 64 << 10;
    /// 16 bytes for each module with such variables.
    const TABLE_BYTES: usize = 1 << 10;
    let here = 0_u8;
    let stack = std::ptr::from_ref(std::hint::black_box(&here)) as usize;
    mappings::give_up(stack - AROUND, stack + AROUND);
    // The thread's control block: the kernel writes the state of its restartable sequence there.
    // SAFETY: a call without arguments; the answer is the block's address.
    let block = unsafe { libc::pthread_self() };
    if let Ok(block) = usize::try_from(block) {
        mappings::give_up(block, block + map::PAGE_BYTES);
        // Its second word leads to the table of thread-local variables by module (`dtv`), which is in the program's
        // heap: pthread_create() has made it. The ranks of locks, which are checked in tests, are such a variable.
        // SAFETY: `tcbhead_t` of the C library on x86-64: a pointer to itself, and this one.
        let table = unsafe { *((block + size_of::<usize>()) as *const usize) };
        mappings::give_up(table, table + TABLE_BYTES);
    }
}

/// Returns what prepare() holds.
fn take() -> Option<Everything> {
    // SAFETY: this is the thread that forked, or its copy in the child.
    unsafe { (*STILL.0.get()).take() }
}

pub(crate) extern "C" fn parent() {
    if let Some(Everything { heap, quiet, candidates, allocator, _one, files, mask }) = take() {
        drop(heap);
        drop(quiet);
        if let Some(engine) = candidates.engine() {
            add(&engine.figures().forks, 1);
        }
        drop(candidates);
        drop(allocator);
        drop(_one);
        drop(files);
        signal::restore(&mask);
    }
}

pub(crate) extern "C" fn child() {
    if let Some(everything) = take() {
        let Everything { heap, mut quiet, mut candidates, allocator, _one, files, mask } =
            everything;
        drop(heap);
        if let Some(files) = files {
            files.forget_in_child();
        }
        if let Some(settings) = settings::get() {
            lifecycle::start_over(settings, &mut candidates, quiet.as_mut());
        }
        drop(quiet);
        drop(candidates);
        allocator.forget_in_child();
        drop(_one);
        signal::restore(&mask);
        lifecycle::start_if_needed();
    }
}

/// The part of `struct _IO_FILE` that the C library's public header declares.
#[repr(C)]
struct File {
    flags: i32,
    read: [usize; 3],
    /// Output that was not sent yet: from `write_base` to `write_next`.
    write_base: usize,
    write_next: usize,
    write_end: usize,
    buffer: [usize; 5],
    markers: usize,
    chain: *mut File,
    number: AtomicI32,
    flags2: i32,
    old_offset: i64,
    column: u16,
    vtable: i8,
    short: u8,
    lock: usize,
}

const _: () = {
    assert!(std::mem::offset_of!(File, write_base) == 32);
    assert!(std::mem::offset_of!(File, chain) == 104);
    assert!(std::mem::offset_of!(File, lock) == 136);
};

unsafe extern "C" {
    /// The C library's list of open files.
    static _IO_list_all: *mut File;
    /// Locks the list; recursive. A thread that opens, closes or flushes files takes this lock before a file's.
    fn _IO_list_lock();
    fn _IO_list_unlock();
    fn _IO_list_resetlock();
}

/// The guard of the list of open `FILE`s: while it lives, none is opened, closed or freed.
///
/// It is taken before `ONE`, because a thread that flushes all files holds this lock, and may fork in a function
/// of the program (`fopencookie`). The C library's `fork` takes the lock again, after `prepare`; so no other
/// thread can hold it then and wait for a fault.
///
/// A `FILE` is in the list before its file is open. So another thread may open it between the moments at which the
/// system call copies the descriptors and the memory. Then the child has a `FILE` without its descriptor, or with
/// a descriptor that means another file by the time the child writes. With the C library's `malloc` such a `FILE`
/// has no output, since `fork` holds the locks of `malloc`, and no thread can get a buffer meanwhile; with ours it
/// may have some. So the child forgets that output, which is the parent's to write.
struct Files {
    /// `FILE`s without a descriptor when the list was locked.
    without_number: Vec<*mut File>,
}

impl Files {
    fn lock() -> Files {
        // SAFETY: no preconditions; the same thread unlocks it.
        unsafe { _IO_list_lock() };
        let mut files = Files { without_number: Vec::new() };
        // SAFETY: a member of the list.
        let number_of = |file: *mut File| unsafe { &(*file).number }.load(Ordering::Relaxed);
        files.without_number = files.list().filter(|file| number_of(*file) < 0).collect();
        files
    }

    /// The open `FILE`s. They stay in the list, and so alive, while it is locked.
    fn list(&self) -> impl Iterator<Item = *mut File> {
        let some = |file: *mut File| (!file.is_null()).then_some(file);
        // SAFETY: a variable of the C library, read under its lock.
        let first = some(unsafe { _IO_list_all });
        // SAFETY: a member of the list; the link to the next one changes under the lock only.
        std::iter::successors(first, move |file| some(unsafe { (**file).chain }))
    }

    /// Makes every open `FILE` and its lock resident, and passes their addresses to `note`.
    fn touch(&self, mut note: impl FnMut(usize)) {
        for file in self.list() {
            note(file as usize);
            note(file as usize + size_of::<File>());
            // SAFETY: a member of the list; the address of its lock never changes.
            let lock = unsafe { (*file).lock };
            if lock != 0 {
                // SAFETY: the file's lock, a word at least.
                std::hint::black_box(unsafe { (lock as *const u32).read_volatile() });
                note(lock);
            }
        }
    }

    /// In a child: forgets the output of files that were opened during the fork.
    fn forget_output(&self) {
        for &file in &self.without_number {
            // SAFETY: a member of the list, which was locked since it was noted; a child has no thread that uses it.
            let file = unsafe { &mut *file };
            if *file.number.get_mut() >= 0 {
                file.write_next = file.write_base;
            }
        }
    }

    /// In a child: resets the lock. The C library does this only if the process had more than one thread.
    fn forget_in_child(mut self) {
        self.forget_output();
        drop(std::mem::take(&mut self.without_number));
        std::mem::forget(self);
        // SAFETY: the child's only thread, which holds the lock or finds it free.
        unsafe { _IO_list_resetlock() };
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // SAFETY: this thread took it in lock().
        unsafe { _IO_list_unlock() };
    }
}

/// The address ranges of the C library's variables.
static VARIABLES: OnceLock<Vec<(usize, usize)>> = OnceLock::new();

/// Bytes to make resident behind each pointer among these variables. The state of the name service has 200. Of the
/// list of handlers only the first is needed, which is ours: once it has run, faults are served.
const KEPT_BYTES: usize = 256;

/// Finds the C library's variables. Called in the constructor, when no thread holds a lock of the loader.
pub(crate) fn learn() {
    let mut found: Vec<(usize, usize)> = Vec::new();
    let found_at = (&raw mut found).cast();
    // SAFETY: note_variables() takes a vector of ranges, and keeps no reference to it.
    unsafe { libc::dl_iterate_phdr(Some(note_variables), found_at) };
    VARIABLES.set(found).ok();
}

/// Notes the writable segments of the module that `_IO_list_lock` is in.
unsafe extern "C" fn note_variables(
    about: *mut libc::dl_phdr_info,
    _bytes: usize,
    found: *mut libc::c_void,
) -> c_int {
    // SAFETY: dl_iterate_phdr passes a description of a module.
    let about = unsafe { &*about };
    // SAFETY: learn() passes a vector of ranges, which it does not touch meanwhile.
    let found = unsafe { &mut *found.cast::<Vec<(usize, usize)>>() };
    // SAFETY: the module's own table of so many segments.
    let segments =
        unsafe { std::slice::from_raw_parts(about.dlpi_phdr, usize::from(about.dlpi_phnum)) };
    let address = |word: u64| usize::try_from(word).unwrap_or(0);
    let loaded = segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD).map(|segment| {
        let start = address(about.dlpi_addr) + address(segment.p_vaddr);
        (start, start + address(segment.p_memsz), segment.p_flags & libc::PF_W != 0)
    });
    let inside = _IO_list_lock as *const () as usize;
    if loaded.clone().any(|(start, end, _)| (start..end).contains(&inside)) {
        found.extend(loaded.filter(|segment| segment.2).map(|(start, end, _)| (start, end)));
        return 1;
    }
    0
}

/// Makes the memory that the C library's variables point to resident, and passes its addresses to `note`.
///
/// It is not documented which variables `fork` uses. So each word is treated as an address, and used if it lies
/// in managed memory: of 8000 words some tens do.
fn touch_kept(note: impl FnMut(usize)) {
    let variables = VARIABLES.get().map_or(&[][..], |ranges| ranges);
    let mut pages = Vec::new();
    for &(start, end) in variables {
        for at in (start.next_multiple_of(size_of::<usize>())..end).step_by(size_of::<usize>()) {
            if at + size_of::<usize>() > end {
                break;
            }
            // SAFETY: a word of the C library's variables, which are never unmapped. If another thread writes
            // it at the same time, the result is the old or the new value.
            let word = unsafe { (at as *const usize).read_volatile() };
            if candidates::may_be_managed(word, word.saturating_add(1)) {
                let page = word & !(map::PAGE_BYTES - 1);
                pages.extend((page..word + KEPT_BYTES).step_by(map::PAGE_BYTES));
            }
        }
    }
    pages.sort_unstable();
    pages.dedup();
    // A page without a mapping, or without access, cannot be populated, and `fork` cannot use it either.
    let populated = |page: &usize| map::populate_read(*page, map::PAGE_BYTES).is_ok();
    pages.into_iter().filter(populated).for_each(note);
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::Ordering;

    use super::{File, Files};

    #[test]
    fn a_child_forgets_the_output_of_files_opened_during_the_fork() {
        let path = std::env::temp_dir().join(format!("zfolio-fork-{}", std::process::id()));
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: two strings that end with a zero.
        let [early, late] = [(), ()].map(|()| unsafe { libc::fopen(name.as_ptr(), c"a".as_ptr()) });
        // SAFETY: an open file, whose public part is a `File`.
        let number = unsafe { &(*late.cast::<File>()).number };
        // SAFETY: both are open.
        assert!(unsafe { libc::fputs(c"early\n".as_ptr(), early) } >= 0);
        let open = number.swap(-1, Ordering::Relaxed);
        let files = Files::lock();
        number.store(open, Ordering::Relaxed);
        // SAFETY: as above.
        assert!(unsafe { libc::fputs(c"late\n".as_ptr(), late) } >= 0);
        files.forget_output();
        drop(files);
        for file in [early, late] {
            // SAFETY: as above; it is not used afterwards.
            assert_eq!(unsafe { libc::fclose(file) }, 0);
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "early\n");
        fs::remove_file(&path).unwrap();
    }
}
