//! What the program does with its memory: touches, and changes of mappings, with the messages that
//! they cause.

use zfolio_sys::Errno;
use zfolio_sys::uffd::Message;

use zfolio_core::page::PAGE_BYTES;

use super::{Event, Here, Page, Space, bytes_of, copy_page, fill, pages};
use crate::config::Mode;
use crate::sim::schedule;
use crate::system::Side;

/// The result of a touch of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sim) enum Access {
    /// The access was made.
    Done,
    /// The page is missing, and the engine has to bring it.
    Fault,
    /// Nothing is mapped, or the page may not be written to.
    Refused,
}

impl Space {
    /// Touches a page: `act` gets its bytes if it is present. A missing page that is not registered
    /// is filled with zeros first.
    #[allow(unsafe_code, reason = "the program's access")]
    pub(in crate::sim) fn touch(
        &self,
        address: usize,
        write: bool,
        act: impl FnOnce(&mut [u8]),
    ) -> Access {
        let mut state = self.lock();
        let Some(page) = state.get_mut(address).filter(|page| page.mapping != 0) else {
            return Access::Refused;
        };
        if write && page.read_only {
            return Access::Refused;
        }
        if page.here == Here::Missing && page.registered {
            return Access::Fault;
        }
        if page.here == Here::Missing {
            page.here = Here::Zero;
            fill(address, 0);
        }
        if page.here == Here::Swapped || write {
            page.here = Here::Own;
        }
        page.shared &= !write;
        // SAFETY: the page is present, and its memory is mapped for the whole run. By SCHED-1 no
        // other thread looks at it now, and the engine has no reference into the program's memory
        // (ENG-2).
        act(unsafe { std::slice::from_raw_parts_mut(bytes_of(address), PAGE_BYTES) });
        Access::Done
    }

    /// Waits until the engine has served the fault of the calling thread, which touched a missing
    /// page.
    pub(in crate::sim) fn wait_for_page(&self, address: usize) {
        let state = self.lock();
        let missing = state.get(address).is_some_and(|page| page.here == Here::Missing);
        if missing && state.get(address).is_some_and(|page| page.registered) {
            self.sleep_for(state, Side::Program, address);
        }
    }

    /// A thread of the program reads the staging area. Returns the address if the page is missing.
    pub(in crate::sim) fn look_at_staging(&self, random: usize) -> Option<usize> {
        let state = self.lock();
        let at = state.staging.start + random % state.staging.pages.len() * PAGE_BYTES;
        if state.get(at).is_none_or(|page| page.here != Here::Missing) {
            return None;
        }
        if self.mode == Mode::Handler {
            self.sleep_for(state, Side::Staging, at);
        }
        Some(at)
    }

    /// Maps a range in which nothing is mapped.
    pub(in crate::sim) fn map(&self, start: usize, end: usize) {
        let mut state = self.lock();
        // Adjacent ranges may become one mapping.
        let mapping = if state.random.one_in(2) { 1 } else { state.mappings + 2 };
        state.mappings += 1;
        let (first, count) = (self.page(start) as u64, ((end - start) / PAGE_BYTES) as u64);
        self.schedule.note("mmap", [first, count, u64::from(mapping)]);
        for at in pages(start, end - start) {
            let page = state.get_mut(at).expect("of the program's memory");
            assert_eq!(page.mapping, 0, "the range is free");
            *page = Page { mapping, ..Page::UNMAPPED };
        }
    }

    /// Makes a change by `act`, and sends its message if the range is registered. As in the kernel,
    /// `act` comes before the message, or for `Remove` some time after the message was read.
    fn change(&self, start: usize, bytes: usize, message: Message, act: impl FnOnce()) {
        self.change_all(&[(start, bytes, message)], act);
    }

    /// The same for a change with several messages, each about its range.
    fn change_all(&self, all: &[(usize, usize, Message)], act: impl FnOnce()) {
        let before = matches!(all[0].2, Message::Remove { .. });
        let mut state = self.lock();
        let is_told = |(start, bytes, _): &&(usize, usize, Message)| {
            pages(*start, *bytes).filter_map(|at| state.get(at)).any(|page| page.registered)
        };
        let told: Vec<_> = all.iter().filter(is_told).copied().collect();
        if self.mode == Mode::Inline || told.is_empty() {
            drop(state);
            return act();
        }
        let thread = schedule::me();
        state.changing += told.len();
        drop(state);
        let act = if before {
            Some(act)
        } else {
            act();
            None
        };
        for (_, _, message) in told {
            schedule::point();
            let mut state = self.lock();
            state.events.push_back(Event { thread, message });
            self.ring(&mut state);
            while state.events.iter().any(|event| event.thread == thread) {
                drop(state);
                schedule::wait("its event to be read".to_owned(), None);
                state = self.lock();
            }
            state.changing -= 1;
        }
        let Some(act) = act else { return };
        let (start, bytes, _) = all[0];
        let mut state = self.lock();
        state.dropping.push((start, start + bytes));
        let slow = state.random.one_in(4);
        drop(state);
        if slow {
            schedule::freeze()
        } else {
            schedule::point()
        }
        act();
        self.lock().dropping.retain(|range| *range != (start, start + bytes));
    }

    /// `MADV_DONTNEED`, one mapping after the other; it stops at the `sealed` page. `each` is
    /// called for each page.
    pub(in crate::sim) fn drop_contents(
        &self,
        start: usize,
        bytes: usize,
        sealed: Option<usize>,
        each: &dyn Fn(usize),
    ) -> Result<(), Errno> {
        let mut unmapped = false;
        let mut at = start;
        while at < start + bytes {
            let state = self.lock();
            let kind = state.get(at).map(Page::kind);
            let alike = |at: &usize| state.get(*at).map(Page::kind) == kind && sealed != Some(*at);
            let length = pages(at, start + bytes - at).take_while(alike).count() * PAGE_BYTES;
            drop(state);
            if length == 0 {
                return Err(Errno::INVAL);
            }
            if kind.is_none_or(|kind| kind.0 == 0) {
                (unmapped, at) = (true, at + length);
                continue;
            }
            let message = Message::Remove { start: at, end: at + length };
            self.change(at, length, message, || {
                for page in pages(at, length) {
                    self.lock().take_away(page);
                    each(page);
                }
            });
            self.schedule.note("dontneed", [self.page(at) as u64, (length / PAGE_BYTES) as u64, 0]);
            at += length;
        }
        if unmapped { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// `munmap`. `each` is called for each page.
    pub(in crate::sim) fn unmap(&self, start: usize, bytes: usize, each: &dyn Fn(usize)) {
        self.schedule.note("munmap", [self.page(start) as u64, (bytes / PAGE_BYTES) as u64, 0]);
        let message = Message::Unmap { start, end: start + bytes };
        self.change(start, bytes, message, || self.leave_empty(start, bytes, each));
    }

    fn leave_empty(&self, start: usize, bytes: usize, each: &dyn Fn(usize)) {
        for at in pages(start, bytes) {
            let mut state = self.lock();
            state.take_away(at);
            if let Some(page) = state.get_mut(at) {
                *page = Page::UNMAPPED;
            }
            each(at);
        }
    }

    /// `mremap` to a range where nothing is mapped; `each` is called for each page, with its old
    /// and new address. `FAULT`: the range is not one mapping.
    pub(in crate::sim) fn remap(
        &self,
        from: usize,
        to: usize,
        bytes: usize,
        each: &dyn Fn(usize, usize),
    ) -> Result<(), Errno> {
        self.remap_onto(from, to, bytes, &|_| {}, each)
    }

    /// `mremap` with `MREMAP_FIXED`: what is there ends. `ends` is called for each page of it.
    pub(in crate::sim) fn remap_onto(
        &self,
        from: usize,
        to: usize,
        bytes: usize,
        ends: &dyn Fn(usize),
        each: &dyn Fn(usize, usize),
    ) -> Result<(), Errno> {
        if !self.lock().is_one_mapping(from, bytes) {
            return Err(Errno::FAULT);
        }
        self.schedule.note(
            "mremap",
            [self.page(from) as u64, self.page(to) as u64, (bytes / PAGE_BYTES) as u64],
        );
        let changes = [
            (to, bytes, Message::Unmap { start: to, end: to + bytes }),
            (from, bytes, Message::Remap { from, to, bytes }),
        ];
        self.change_all(&changes, || {
            self.leave_empty(to, bytes, ends);
            for (from, to) in pages(from, bytes).zip(pages(to, bytes)) {
                let mut state = self.lock();
                let page = state.get_mut(from).expect("mapped");
                let moved = std::mem::replace(page, Page::UNMAPPED);
                *state.get_mut(to).expect("of the program's memory") = moved;
                copy_page(from, to);
                fill(from, super::POISON);
                each(from, to);
            }
        });
        Ok(())
    }

    /// `mremap` by which the mapping that ends at `start` grows to `end`, where nothing is mapped.
    pub(in crate::sim) fn grow(&self, start: usize, end: usize) {
        let mut state = self.lock();
        self.schedule
            .note("grow", [self.page(start) as u64, ((end - start) / PAGE_BYTES) as u64, 0]);
        let Page { mapping, registered, read_only, .. } =
            *state.get(start - PAGE_BYTES).expect("mapped");
        for at in pages(start, end - start) {
            let page = state.get_mut(at).expect("of the program's memory");
            assert_eq!(page.mapping, 0, "the range is free");
            *page = Page { mapping, registered, read_only, ..Page::UNMAPPED };
        }
    }

    /// `mprotect`.
    pub(in crate::sim) fn protect(&self, start: usize, bytes: usize, read_only: bool) {
        let mut state = self.lock();
        for at in pages(start, bytes) {
            if let Some(page) = state.get_mut(at) {
                page.read_only = read_only;
            }
        }
    }

    /// A device begins or ends to write to a page that is present.
    pub(in crate::sim) fn pin(&self, address: usize, pinned: bool) {
        if let Some(page) = self.lock().get_mut(address) {
            page.pinned = pinned && matches!(page.here, Here::Own) && !page.shared;
        }
    }

    /// A child is made: it shares every page except pinned ones, of which it gets copies.
    pub(in crate::sim) fn share_all(&self) {
        let mut state = self.lock();
        for page in &mut state.program.pages {
            page.shared |= page.here == Here::Own && !page.pinned;
        }
        state.has_child = true;
    }

    /// The child ends.
    pub(in crate::sim) fn end_child(&self) {
        self.lock().has_child = false;
    }

    /// Whether a range lies in one mapping, and all its pages are of the same kind.
    pub(in crate::sim) fn is_one_mapping(&self, start: usize, bytes: usize) -> bool {
        self.lock().is_one_mapping(start, bytes)
    }

    /// Whether a range would lie in one mapping if nothing of it were registered.
    pub(in crate::sim) fn is_one_without_engine(&self, start: usize, bytes: usize) -> bool {
        self.lock().is_all_of(start, bytes, |page| (page.mapping, page.read_only))
    }

    /// Whether a page is mapped.
    pub(in crate::sim) fn is_mapped(&self, address: usize) -> bool {
        self.lock().get(address).is_some_and(|page| page.mapping != 0)
    }

    /// Whether a page is in the memory of the process.
    pub(in crate::sim) fn is_here(&self, address: usize) -> bool {
        self.lock().get(address).is_some_and(|page| page.here != Here::Missing)
    }
}
