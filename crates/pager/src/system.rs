//! The interface to the system: moves, copies and drops pages, reads messages, returns the time.
//!
//! All calls of the engine that a simulation must control go through this trait. So the same folio
//! table, queues, reclaim, faults and mover also run on a simulated kernel, where a seed decides
//! when each refusal occurs that the real kernel is known for.
//!
//! Pages can be put on two sides: the program's memory, and the staging area. On Linux each side
//! has a userfaultfd of its own. So when staged pages are given back, there is no event that must
//! be read.

mod linux;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

use zfolio_sys::Errno;
use zfolio_sys::maps::FileMapping;
use zfolio_sys::process::Resident;
use zfolio_sys::uffd::{Message, Messages, Progress};

pub(crate) use linux::Linux;

/// Whose memory a call is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// The program's managed memory: a touch of a missing page becomes a message.
    Program,
    /// The staging area.
    Staging,
}

/// See the module. Addresses and lengths are multiples of a page.
#[allow(unsafe_code, reason = "the contracts of moving and dropping pages")]
pub(crate) trait System: Send + Sync + Debug {
    /// In a child of `fork`, which inherits no registration: opens the userfaultfds anew, in the
    /// calling thread's table of files. Nothing is registered yet.
    ///
    /// # Errors
    ///
    /// The kernel refuses what it granted the parent.
    fn open_again(&self) -> Result<(), Errno>;

    /// The userfaultfd of the program's side, if there is one: while it is open, the touch of a
    /// missing page becomes a message and does not read zeros.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether [`System::open_again`] would succeed for the program's side.
    fn can_open_again(&self) -> bool;

    /// From now on a touch of a missing page of the range becomes a message, and pages can be put
    /// there.
    ///
    /// # Errors
    ///
    /// As [`zfolio_sys::uffd::Uffd::register`].
    fn register(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Ends the registration of a range on the program's side: missing pages read as zeros from now
    /// on. Parts that are not registered stay as they are.
    ///
    /// # Errors
    ///
    /// As [`zfolio_sys::uffd::Uffd::unregister`]: nothing was changed.
    fn unregister(&self, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Wakes the threads that wait for pages of a range; they repeat their access.
    ///
    /// # Errors
    ///
    /// As [`zfolio_sys::uffd::Uffd::wake`].
    fn wake(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Moves pages to `to`, which lies on `side` and is registered, and wakes the threads that wait
    /// there.
    ///
    /// # Safety
    ///
    /// Nobody relies on the bytes at `from` afterwards, except through a message.
    unsafe fn move_pages(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress;

    /// Copies bytes to new pages at `to`, which lies on `side` and is registered, and wakes the
    /// threads that wait there.
    ///
    /// # Safety
    ///
    /// `from` is readable for `bytes`.
    unsafe fn copy(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress;

    /// Puts pages of zeros into a registered range, and wakes the threads that wait there.
    fn zero(&self, side: Side, start: usize, bytes: usize) -> Progress;

    /// Reads the next messages of a side, without waiting.
    fn read<'a>(&self, side: Side, into: &'a mut Messages) -> &'a [Message];

    /// Sleeps until there is a message, or `also` is readable, at most `milliseconds`. True: the staging
    /// area has a message.
    fn wait(&self, milliseconds: u16, also: Option<BorrowedFd<'_>>) -> bool;

    /// Whether a message of the program's side waits to be read.
    fn has_message(&self) -> bool;

    /// Whether a change of the program's mappings is under way whose message was not read yet: moves and copies are
    /// refused meanwhile.
    ///
    /// # Errors
    ///
    /// A sandbox of the program forbids to ask.
    fn is_changing(&self) -> Result<bool, Errno>;

    /// Sets the lowest bit of one byte for each page that is resident.
    ///
    /// # Errors
    ///
    /// `NOMEM`: part of the range is not mapped.
    fn residency(&self, start: usize, bytes: usize, present: &mut [u8]) -> Result<(), Errno>;

    /// Whether there is a page of ours that the kernel could not read: after `FAULT` for a copy from there.
    fn is_unreadable(&self, page: usize) -> bool;

    /// Calls `each` for each run of resident pages, with its start, its end, and whether its pages
    /// are the shared page of zeros.
    fn each_resident(&self, start: usize, end: usize, each: &mut dyn FnMut(usize, usize, bool));

    /// Makes the pages of a range this process's own, as if each were written to.
    ///
    /// # Errors
    ///
    /// The pages cannot be written to, or are not mapped.
    fn unshare(&self, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Sets one byte for each page from `start` on: 1 if it is resident, and another process has it too, else 0.
    ///
    /// # Errors
    ///
    /// It is not known.
    fn shared(&self, start: usize, pages: &mut [u8]) -> Result<(), Errno>;

    /// Gives pages back: the range is empty afterwards.
    ///
    /// # Safety
    ///
    /// Nobody relies on what the range holds.
    unsafe fn discard(&self, start: usize, bytes: usize);

    /// The time, which never falls.
    fn now_ns(&self) -> u64;

    /// The CPU of the calling thread, to choose a stream. A wrong number costs time only.
    fn cpu(&self) -> usize;

    /// What the kernel counts as resident of the whole process; `None` if it is not known.
    fn resident(&self) -> Option<Resident>;

    /// How long the calling thread could have run since its start, but had no CPU; 0 if it is not known.
    fn run_delay_ns(&self) -> u64;

    /// Calls `each` for the mappings of files, in rising order, until it returns false.
    fn each_file_mapping(&self, each: &mut dyn FnMut(&FileMapping) -> bool);

    /// Asks for pages of a file to be given back; they are read from the file again when they are touched.
    fn page_out(&self, start: usize, bytes: usize);

    /// Sleeps while `word` is `heard`, a millisecond at most.
    fn wait_for(&self, word: &AtomicU32, heard: u32);

    /// Wakes all threads that sleep on `word`.
    fn wake_all(&self, word: &AtomicU32);

    /// Lets another thread run, since the caller waits for something that another thread has.
    fn pause(&self);
}
