//! The engine's calls to the simulated kernel, answered as `userfaultfd(2)` says and as Linux 6.18
//! was seen to answer.

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;
use zfolio_sys::maps::FileMapping;
use zfolio_sys::process::Resident;
use zfolio_sys::uffd::{Message, Messages, Progress};

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, MutexGuard};

use super::{Halt, Here, POISON, Page, Space, State, bytes_of, copy_page, fill, is_filled, pages};
use crate::sim::schedule;
use crate::system::{Side, System};

/// The longest sleep of a handler.
const WAIT_NS: u64 = 20_000_000;

/// The answer of a call that did nothing.
fn refused(error: Errno) -> Progress {
    Progress { bytes: 0, stopped: Some(error) }
}

impl Space {
    /// Begins a call; other threads may run before it.
    fn enter(&self) -> MutexGuard<'_, State> {
        schedule::point();
        let slow = self.lock().is_slow(self.refusals.slow);
        if slow {
            schedule::freeze();
        }
        let mut state = self.lock();
        if state.random.one_in(self.refusals.swap) {
            state.swap_out();
        }
        state
    }

    /// Begins a call that puts pages somewhere. The kernel first checks whether mappings change,
    /// then finds the mapping, and then checks again for changes (since 6.9). A change can come in
    /// between.
    fn enter_to_put(&self, side: Side) -> Result<MutexGuard<'_, State>, Progress> {
        self.stop(if side == Side::Program { Halt::Before } else { Halt::Capture });
        let mut state = self.enter();
        if side == Side::Program && state.changing > 0 {
            self.schedule.note("again", [0; 3]);
            return Err(refused(Errno::AGAIN));
        }
        drop(state);
        if side == Side::Program {
            self.stop(Halt::Between);
        }
        state = self.lock();
        if state.random.one_in(8) {
            drop(state);
            schedule::point();
            state = self.lock();
        }
        Ok(state)
    }

    /// Does the pages of a range until one is refused, and wakes the threads that wait for them.
    /// Like the kernel it returns `EAGAIN` if only a part was done, for whatever reason.
    fn each_page(
        &self,
        state: &mut State,
        (side, to, bytes): (Side, usize, usize),
        wakes: bool,
        mut step: impl FnMut(&mut State, usize) -> Result<(), Errno>,
    ) -> Progress {
        if side == Side::Program && state.changing > 0 || state.random.one_in(self.refusals.again) {
            return refused(Errno::AGAIN);
        }
        let mut most = bytes;
        if state.random.one_in(self.refusals.short) {
            most = (1 + state.random.below(bytes / PAGE_BYTES)) * PAGE_BYTES;
        }
        let mut done = 0;
        let mut stopped = None;
        while done < most && stopped.is_none() {
            match step(state, done) {
                Ok(()) => done += PAGE_BYTES,
                Err(error) => stopped = Some(error),
            }
        }
        if done > 0 && wakes {
            self.wake_range(state, side, to, done);
        }
        match (done, stopped) {
            (done, None) if done == bytes => Progress { bytes, stopped: None },
            (0, Some(error)) => refused(error),
            (done, _) => Progress { bytes: done, stopped: Some(Errno::AGAIN) },
        }
    }

    /// Notes a call and its answer in the trace: source, target, pages and error.
    fn noted(
        &self,
        state: &State,
        call: &str,
        (from, to): (usize, usize),
        answer: Progress,
    ) -> Progress {
        let error = answer.stopped.map_or(0, |error| error.raw_os_error().unsigned_abs());
        let done = u64::from(error) << 32 | (answer.bytes / PAGE_BYTES) as u64;
        self.schedule.note(call, [self.place(state, from), self.place(state, to), done]);
        answer
    }
}

impl State {
    /// The system needs memory and swaps a page out.
    fn swap_out(&mut self) {
        let area = if self.random.one_in(3) { &self.staging } else { &self.program };
        if area.pages.is_empty() {
            return;
        }
        let (start, count) = (area.start, area.pages.len());
        let at = start + self.random.below(count) * PAGE_BYTES;
        let page = self.get_mut(at).expect("of an area");
        if page.here == Here::Own && !page.pinned && !page.shared {
            page.here = Here::Swapped;
        }
    }

    /// One page of a move.
    fn move_page(&mut self, from: usize, to: usize) -> Result<(), Errno> {
        let (source, target) =
            (*self.get(from).ok_or(Errno::INVAL)?, *self.get(to).ok_or(Errno::INVAL)?);
        if target.here != Here::Missing {
            return Err(Errno::EXIST);
        }
        if source.here == Here::Missing {
            return Err(Errno::NOENT);
        }
        // A page that is about to be dropped could in reality be moved away just now, and would then
        // not be dropped: see "What is not simulated" in docs/simulation.md.
        let is_leaving = self.dropping.iter().any(|(start, end)| (*start..*end).contains(&from));
        if source.shared || source.pinned || is_leaving {
            return Err(Errno::BUSY);
        }
        self.expect_untouched(to);
        copy_page(from, to);
        // A shared page of zeros that the engine has written to has become a page of its own.
        let own = source.here == Here::Zero && !is_filled(to, 0);
        self.bring(to, if own { Here::Own } else { source.here });
        self.take_away(from);
        Ok(())
    }

    /// Fails if the engine has written to a missing page of the staging area: in reality the thread
    /// would have waited for ever.
    fn expect_untouched(&self, at: usize) {
        let untouched = !self.staging.contains(at) || is_filled(at, POISON);
        assert!(untouched, "STAGE-3: a missing page of the staging area was written to");
    }
}

/// Whether a call of `side` may put pages at `to`.
fn may_put(state: &State, side: Side, to: usize, bytes: usize) -> bool {
    let area = match side {
        Side::Program => &state.program,
        Side::Staging => &state.staging,
    };
    area.contains(to)
        && state.is_one_mapping(to, bytes)
        && state.get(to).is_some_and(|page| page.registered)
}

#[allow(unsafe_code, reason = "the contracts of moving and dropping pages")]
impl System for Arc<Space> {
    fn open_again(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn can_open_again(&self) -> bool {
        true
    }

    fn register(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut state = self.enter();
        if side == Side::Staging {
            let page = Page { mapping: 1, registered: true, ..Page::UNMAPPED };
            (state.staging.start, state.staging.pages) = (start, vec![page; bytes / PAGE_BYTES]);
            pages(start, bytes).for_each(|page| fill(page, POISON));
            return Ok(());
        }
        let mapped = |state: &State, at| state.get(at).is_some_and(|page| page.mapping != 0);
        let wanted = state.refused_next > 0;
        state.refused_next -= usize::from(wanted);
        let refused = wanted
            || state.random.one_in(self.refusals.register)
            || !pages(start, bytes).any(|at| mapped(&state, at));
        let (first, count) = (self.page(start) as u64, (bytes / PAGE_BYTES) as u64);
        self.schedule.note("register", [first, count, u64::from(refused)]);
        if refused {
            return Err(Errno::NOMEM);
        }
        for at in pages(start, bytes) {
            if let Some(page) = state.get_mut(at).filter(|page| page.mapping != 0) {
                page.registered = true;
            }
        }
        Ok(())
    }

    fn unregister(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut state = self.enter();
        // Where the program has mapped nothing a file may be mapped: then the kernel refuses the whole range.
        let mapped = |at| state.get(at).is_some_and(|page| page.mapping != 0);
        if state.changing == 0 && !pages(start, bytes).all(mapped) {
            return Err(Errno::INVAL);
        }
        for at in pages(start, bytes) {
            if let Some(page) = state.get_mut(at) {
                page.registered = false;
            }
        }
        self.schedule.note("unregister", [self.page(start) as u64, (bytes / PAGE_BYTES) as u64, 0]);
        self.wake_range(&mut state, Side::Program, start, bytes);
        Ok(())
    }

    fn wake(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut state = self.enter();
        self.wake_range(&mut state, side, start, bytes);
        Ok(())
    }

    unsafe fn move_pages(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress {
        let mut state = match self.enter_to_put(side) {
            Ok(state) => state,
            Err(again) => return again,
        };
        let read_only = |at| state.get(at).is_none_or(|page| page.read_only);
        if !may_put(&state, side, to, bytes)
            || !state.is_one_mapping(from, bytes)
            || read_only(from)
            || read_only(to)
        {
            return self.noted(&state, "move", (from, to), refused(Errno::INVAL));
        }
        // MOVE-3: pages are moved, no thread is woken, and the answer is an error.
        let denied = state.random.one_in(self.refusals.denied);
        let step = |state: &mut State, done| state.move_page(from + done, to + done);
        let mut answer = self.each_page(&mut state, (side, to, bytes), !denied, step);
        if denied && answer.bytes > 0 {
            answer = refused(Errno::EXIST);
        }
        let answer = self.noted(&state, "move", (from, to), answer);
        drop(state);
        if side == Side::Staging {
            self.stop(Halt::Captured);
        }
        answer
    }

    unsafe fn copy(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress {
        let mut state = match self.enter_to_put(side) {
            Ok(state) => state,
            Err(again) => return again,
        };
        if !may_put(&state, side, to, bytes) {
            return self.noted(&state, "copy", (from, to), refused(Errno::NOENT));
        }
        let step = |state: &mut State, done: usize| {
            if state.get(to + done).is_some_and(|page| page.here != Here::Missing) {
                return Err(Errno::EXIST);
            }
            if state.get(from + done).is_some_and(|page| page.here == Here::Missing) {
                return Err(Errno::FAULT);
            }
            state.expect_untouched(to + done);
            copy_page(from + done, to + done);
            state.bring(to + done, Here::Own);
            Ok(())
        };
        let answer = self.each_page(&mut state, (side, to, bytes), true, step);
        self.noted(&state, "copy", (from, to), answer)
    }

    fn zero(&self, side: Side, start: usize, bytes: usize) -> Progress {
        let mut state = match self.enter_to_put(side) {
            Ok(state) => state,
            Err(again) => return again,
        };
        if !may_put(&state, side, start, bytes) {
            return self.noted(&state, "zero", (start, start), refused(Errno::NOENT));
        }
        let step = |state: &mut State, done: usize| {
            if state.get(start + done).is_some_and(|page| page.here != Here::Missing) {
                return Err(Errno::EXIST);
            }
            state.expect_untouched(start + done);
            fill(start + done, 0);
            state.bring(start + done, Here::Zero);
            Ok(())
        };
        let answer = self.each_page(&mut state, (side, start, bytes), true, step);
        self.noted(&state, "zero", (start, start), answer)
    }

    fn read<'a>(&self, side: Side, into: &'a mut Messages) -> &'a [Message] {
        let mut state = self.enter();
        let waiters = state.waiters[side as usize].iter_mut().filter(|waiter| !waiter.is_read);
        let mut messages: Vec<Message> = waiters
            .map(|waiter| {
                waiter.is_read = true;
                let thread = u32::try_from(waiter.thread).expect("few threads");
                Message::Fault { address: waiter.address, thread }
            })
            .collect();
        if side == Side::Program {
            let events: Vec<_> = state.events.drain(..).collect();
            for event in events {
                messages.push(event.message);
                self.schedule.wake(event.thread);
            }
        }
        assert!(messages.len() <= zfolio_sys::uffd::MESSAGES, "few threads, a message each");
        self.schedule.note("read", [side as u64, messages.len() as u64, 0]);
        drop(state);
        into.fill(messages.into_iter())
    }

    fn wait(&self, _milliseconds: u16, _also: Option<BorrowedFd<'_>>) -> bool {
        let mut state = self.enter();
        let waits = |side: Side| state.waiters[side as usize].iter().any(|waiter| !waiter.is_read);
        if !waits(Side::Program) && !waits(Side::Staging) && state.events.is_empty() {
            state.sleepers.push(schedule::me());
            drop(state);
            schedule::wait("a message".to_owned(), Some(WAIT_NS));
            state = self.lock();
        }
        state.waiters[Side::Staging as usize].iter().any(|waiter| !waiter.is_read)
    }

    fn has_message(&self) -> bool {
        let state = self.lock();
        let waits = state.waiters[Side::Program as usize].iter().any(|waiter| !waiter.is_read);
        waits || !state.events.is_empty()
    }

    fn is_changing(&self) -> Result<bool, Errno> {
        Ok(self.enter().changing > 0)
    }

    fn residency(&self, start: usize, bytes: usize, present: &mut [u8]) -> Result<(), Errno> {
        let state = self.enter();
        for (byte, at) in present.iter_mut().zip(pages(start, bytes)) {
            let page = state.get(at).filter(|page| page.mapping != 0).ok_or(Errno::NOMEM)?;
            *byte = u8::from(matches!(page.here, Here::Zero | Here::Own));
        }
        Ok(())
    }

    fn is_unreadable(&self, _: usize) -> bool {
        false
    }

    fn each_resident(&self, start: usize, end: usize, each: &mut dyn FnMut(usize, usize, bool)) {
        let state = self.enter();
        let here = |at| state.get(at).map_or(Here::Missing, |page| page.here);
        let all: Vec<(usize, Here)> = pages(start, end - start).map(|at| (at, here(at))).collect();
        drop(state);
        for run in all.chunk_by(|one, next| one.1 == next.1) {
            let (first, here) = run[0];
            if matches!(here, Here::Zero | Here::Own) {
                each(first, first + run.len() * PAGE_BYTES, here == Here::Zero);
            }
        }
    }

    fn unshare(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut state = self.enter();
        for at in pages(start, bytes) {
            let page = state.get_mut(at).filter(|page| page.mapping != 0).ok_or(Errno::NOMEM)?;
            if page.read_only || page.here == Here::Missing && page.registered {
                return Err(Errno::FAULT);
            }
            let fresh = page.here == Here::Missing;
            (page.here, page.shared) = (Here::Own, false);
            if fresh {
                fill(at, 0);
            }
        }
        Ok(())
    }

    fn shared(&self, start: usize, into: &mut [u8]) -> Result<(), Errno> {
        let mut state = self.enter();
        if state.random.one_in(self.refusals.again) {
            return Err(Errno::NOENT);
        }
        let all = pages(start, into.len() * PAGE_BYTES);
        for (byte, at) in into.iter_mut().zip(all) {
            let shared = |page: &Page| match page.here {
                Here::Zero => true,
                Here::Own => page.shared && state.has_child,
                Here::Missing | Here::Swapped => false,
            };
            *byte = u8::from(state.get(at).is_some_and(shared));
        }
        Ok(())
    }

    unsafe fn discard(&self, start: usize, bytes: usize) {
        let mut state = self.enter();
        assert!(state.staging.contains(start), "the engine gives back what is its own");
        pages(start, bytes).for_each(|at| state.take_away(at));
        self.schedule.note("discard", [self.place(&state, start), (bytes / PAGE_BYTES) as u64, 0]);
    }

    fn now_ns(&self) -> u64 {
        self.schedule.now_ns()
    }

    fn cpu(&self) -> usize {
        schedule::me() % self.cpus
    }

    fn resident(&self) -> Option<Resident> {
        None
    }

    fn run_delay_ns(&self) -> u64 {
        0
    }

    fn each_file_mapping(&self, _: &mut dyn FnMut(&FileMapping) -> bool) {}

    fn page_out(&self, _: usize, _: usize) {}

    fn wait_for(&self, _word: &AtomicU32, _heard: u32) {
        self.schedule.waits_for_disk();
        schedule::wait("another thread's look at the disk".to_owned(), Some(1_000_000));
    }

    fn wake_all(&self, _word: &AtomicU32) {}

    fn pause(&self) {
        schedule::point();
    }
}

impl Space {
    /// Reads the bytes of a page without a fault. False: the page is missing.
    #[allow(unsafe_code, reason = "a copy of bytes that nobody changes now")]
    pub(in crate::sim) fn contents(&self, address: usize, into: &mut [u8]) -> bool {
        let there = self.lock().get(address).is_some_and(|page| page.here != Here::Missing);
        // SAFETY: the page is mapped for the whole run, and by SCHED-1 nobody writes to it now.
        let bytes = unsafe { std::slice::from_raw_parts(bytes_of(address), PAGE_BYTES) };
        into.copy_from_slice(bytes);
        there
    }
}
