//! The figures of a library's pager, where `zfolio stat` finds them:
//! `/dev/shm/zfolio-UID/PID.NUMBER`.
//!
//! # Invariants
//!
//! - `PUB-1` A number belongs to one pager of the process at a time: its bit in [`TAKEN`] is set.
//! - `PUB-2` The file is removed with its pager, or when the process exits normally. If the process
//!   is killed, the next `zfolio stat` sees that the process is gone, and removes the file.

use std::ops::Deref;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Once};

use zfolio_core::stats::Stats;
use zfolio_sys::{Errno, files, process, shared};

use crate::charge::OverLimit;
use crate::engine::StatsHome;
use crate::fatal;
use crate::notice::Notice;

/// The numbers in use, 1 to 64, a bit each. Further pagers keep their figures in private memory.
static TAKEN: AtomicU64 = AtomicU64::new(0);

static AT_EXIT: Once = Once::new();

/// A number among the pagers of this process, and its file.
#[derive(Debug)]
struct Number(u32);

impl Number {
    fn take() -> Option<Number> {
        let lowest = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
        let before = TAKEN.fetch_update(Relaxed, Relaxed, lowest).ok()?;
        Some(Number(before.trailing_ones() + 1))
    }

    fn name(&self) -> String {
        format!("{}.{}", process::id(), self.0)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        shared::remove(&self.name());
        TAKEN.fetch_and(!(1 << (self.0 - 1)), Relaxed);
    }
}

/// Removes the files of the pagers that still live. In a child of `fork` the names contain the
/// child's own process number, so the parent's files stay.
extern "C" fn remove_all() {
    let taken = TAKEN.load(Relaxed);
    for bit in (0..u64::BITS).filter(|bit| taken >> bit & 1 == 1) {
        // Not dropped, since the number is in use while its pager lives.
        shared::remove(&std::mem::ManuallyDrop::new(Number(bit + 1)).name());
    }
}

/// A pager's figures, in memory that other processes may read.
pub(crate) struct Published {
    page: *mut Stats,
    number: Option<Number>,
    notice: Option<Arc<Notice>>,
}

#[allow(unsafe_code, reason = "a pointer to atomics")]
// SAFETY: `page` is a mapping of atomics that the value owns; nothing in it is tied to a thread.
unsafe impl Send for Published {}
#[allow(unsafe_code, reason = "a pointer to atomics")]
// SAFETY: a shared `Published` gives out `&Stats` only, which is all atomics.
unsafe impl Sync for Published {}

impl Published {
    /// Makes the page of figures: in a file if `listed`, else in private memory.
    ///
    /// Without `/dev/shm` it is in private memory too: everything works, but `zfolio stat` does not
    /// list the pager.
    #[allow(unsafe_code, reason = "maps a file")]
    pub(crate) fn new(listed: bool, notice: Option<Arc<Notice>>) -> Result<Published, Errno> {
        let bytes = size_of::<Stats>();
        let number = if listed { Number::take() } else { None };
        let file = number.as_ref().and_then(|number| shared::create(&number.name(), bytes));
        let number = number.filter(|_| file.is_some());
        if number.is_some() {
            AT_EXIT.call_once(|| {
                // SAFETY: remove_all() is a function without arguments that does not unwind. If it
                // cannot be registered, the files are removed later (PUB-2).
                unsafe { libc::atexit(remove_all) };
            });
        }
        // SAFETY: the address is null, so the kernel chooses addresses that are not in use.
        let page = unsafe { shared::map(file.as_ref(), bytes, std::ptr::null_mut()) }?;
        Ok(Published { page: page.cast(), number, notice })
    }
}

impl Deref for Published {
    type Target = Stats;
    #[allow(unsafe_code, reason = "the view of the mapping")]
    fn deref(&self) -> &Stats {
        // SAFETY: the mapping is as long as a `Stats`, page-aligned, lives as long as `self`, and
        // holds atomics: any bytes are a valid value, and other processes may change them.
        unsafe { &*self.page }
    }
}

impl StatsHome for Published {
    fn publish_tables(&self, text: &str) {
        if let Some(number) = &self.number {
            shared::replace_tail(&number.name(), size_of::<Stats>(), text);
        }
    }

    /// With a function to call, the bell is rung. A line on standard error may have to wait for who reads it.
    fn is_told_at_once(&self) -> bool {
        self.notice.is_some()
    }

    /// Whoever reads standard error may have stopped.
    fn can_tell(&self) -> bool {
        self.notice.is_some() || files::has_room(std::io::stderr().as_fd())
    }

    fn over_limit(&self, over: &OverLimit, first: bool) {
        match &self.notice {
            Some(notice) => notice.ring(over),
            None if first => fatal::print_here(format_args!("{over}")),
            None => {}
        }
    }
}

impl Drop for Published {
    #[allow(unsafe_code, reason = "unmaps what new() mapped")]
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and dropping the value ends every borrow of it.
        unsafe { shared::unmap(self.page.cast(), size_of::<Stats>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::{Number, Published};

    /// Goal: no two pagers share a file, and a freed number is used again. Method: 64 pagers and
    /// one more.
    #[test]
    fn each_pager_has_a_number_of_its_own() {
        let mut all: Vec<Number> = std::iter::from_fn(Number::take).collect();
        let mut numbers: Vec<u32> = all.iter().map(|number| number.0).collect();
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]) && numbers.len() <= 64);
        assert!(numbers.iter().all(|number| (1..=64).contains(number)), "{numbers:?}");
        assert!(Published::new(true, None).unwrap().number.is_none(), "it counts all the same");
        let freed = all.swap_remove(0).0;
        assert_eq!(Number::take().unwrap().0, freed);
    }
}
