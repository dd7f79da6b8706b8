//! Which process of a line of forks this one is: what belongs to a process alone (work that a device does in its
//! address space, mappings that a child does not get) is kept with this number, and a child sees that it is not its
//! own.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::Advice;

use crate::map::{PAGE_BYTES, Reservation};

/// What [`current`] returns where the kernel gives no memory: no process has this number.
pub const UNKNOWN: u64 = 0;

/// A word that reads as 0 in a child of `fork`, however it was forked. Null: there is none yet.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// The last number given out. A child goes on from its parent's.
static LAST: AtomicU64 = AtomicU64::new(UNKNOWN);

/// The number of this process: never that of a process from which it was forked. [`UNKNOWN`]: the kernel gives no
/// memory to know it by.
#[must_use]
pub fn current() -> u64 {
    // Acquire: pairs with the Release in make_word().
    let word = WORD.load(Ordering::Acquire);
    // SAFETY: null, or a page that make_word() made and nobody unmaps.
    let Some(word) = (unsafe { word.as_ref() }).or_else(make_word) else { return UNKNOWN };
    // Relaxed: the number means nothing but itself.
    match word.load(Ordering::Relaxed) {
        UNKNOWN => choose(word),
        number => number,
    }
}

/// No lock: a child must not find one that another thread of its parent held.
#[cold]
fn make_word() -> Option<&'static AtomicU64> {
    let page = Reservation::new(PAGE_BYTES, PAGE_BYTES).ok()?;
    // SAFETY: the page is ours, and empty.
    unsafe {
        rustix::mm::madvise(page.base().as_ptr().cast(), PAGE_BYTES, Advice::LinuxWipeOnFork)
    }
    .ok()?;
    let word = page.base().cast::<AtomicU64>().as_ptr();
    // Release: pairs with the Acquire in current().
    let made =
        WORD.compare_exchange(std::ptr::null_mut(), word, Ordering::Release, Ordering::Acquire);
    let word = match made {
        Ok(_) => page.leak().cast::<AtomicU64>().as_ptr(),
        // Another thread was faster; this page goes.
        Err(other) => other,
    };
    // SAFETY: a page of zeros, which is an atomic word, and which nobody unmaps once it is in WORD.
    unsafe { word.as_ref() }
}

#[cold]
fn choose(word: &AtomicU64) -> u64 {
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let chosen = word.compare_exchange(UNKNOWN, number, Ordering::Relaxed, Ordering::Relaxed);
    chosen.map_or_else(|other| other, |_| number)
}

#[cfg(test)]
mod tests {
    use super::{UNKNOWN, current};
    use crate::testing::in_child;

    /// Goal: a number stays in a process and its threads, and differs from those of all its ancestors.
    #[test]
    fn each_process_of_a_line_has_a_number_of_its_own() {
        let ours = current();
        assert!(ours != UNKNOWN && current() == ours);
        assert_eq!(std::thread::spawn(current).join().unwrap(), ours);
        let differs = in_child(|| {
            let childs = current();
            childs != ours && childs != UNKNOWN && in_child(|| ![ours, childs].contains(&current()))
        });
        assert!(differs && current() == ours);
    }
}
