//! What the engine asks of the system: pages moved, copied and dropped, messages, the time.
//!
//! The engine reaches the kernel through this trait alone, for what a simulation must decide about: so the same
//! folio table, queues, reclaim, faults and mover run on a simulated kernel, where every refusal that the
//! real one is known for comes when a seed says so.
//!
//! Two sides take pages: the program's memory, and the staging area. On Linux each is a userfaultfd of its own:
//! giving staged pages back is then never an event that somebody must read.

mod linux;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

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
    /// In a child of `fork`, which inherits no registration: sets up the calls anew, for the calling thread's
    /// table of files. Nothing is registered.
    ///
    /// # Errors
    ///
    /// The kernel refuses what it granted the parent.
    fn open_again(&self) -> Result<(), Errno>;

    /// The file that makes missing pages of the program's side a message and not zeros, if there is one.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether [`System::open_again`] would succeed for the program's side.
    fn can_open_again(&self) -> bool;

    /// From now on a touch of a missing page of the range becomes a message, and pages can be put there.
    ///
    /// # Errors
    ///
    /// As [`zfolio_sys::uffd::Uffd::register`].
    fn register(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Undoes that on the program's side: missing pages read as zeros from now on. Nothing happens where nothing is
    /// registered.
    fn unregister(&self, start: usize, bytes: usize);

    /// Wakes the threads that wait for pages of a range, to try again.
    ///
    /// # Errors
    ///
    /// As [`zfolio_sys::uffd::Uffd::wake`].
    fn wake(&self, side: Side, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Moves pages to `to`, which lies on `side` and is registered, and wakes who waits there.
    ///
    /// # Safety
    ///
    /// Nobody relies on finding anything at `from` afterwards, except through a message.
    unsafe fn move_pages(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress;

    /// Copies bytes to new pages at `to`, which lies on `side` and is registered, and wakes who waits there.
    ///
    /// # Safety
    ///
    /// `from` is readable for `bytes`.
    unsafe fn copy(&self, side: Side, from: usize, to: usize, bytes: usize) -> Progress;

    /// Gives a registered range pages of zeros, and wakes who waits there.
    fn zero(&self, side: Side, start: usize, bytes: usize) -> Progress;

    /// Takes the next messages of a side, without waiting.
    fn read<'a>(&self, side: Side, into: &'a mut Messages) -> &'a [Message];

    /// Sleeps until there is a message, at most `milliseconds`. True: there is one of the staging area.
    fn wait(&self, milliseconds: u16) -> bool;

    /// Whether a message of the program's side waits to be read.
    fn has_message(&self) -> bool;

    /// Sets the lowest bit of one byte for each page that is resident.
    ///
    /// # Errors
    ///
    /// `NOMEM`: part of the range is not mapped.
    fn residency(&self, start: usize, bytes: usize, present: &mut [u8]) -> Result<(), Errno>;

    /// Calls `each` with start, end and "is the page of zeros that all processes share" of each run of resident pages.
    fn each_resident(&self, start: usize, end: usize, each: &mut dyn FnMut(usize, usize, bool));

    /// Makes present pages this process's own, as if each were written to.
    ///
    /// # Errors
    ///
    /// They cannot be written to, or are not mapped.
    fn unshare(&self, start: usize, bytes: usize) -> Result<(), Errno>;

    /// Gives pages back: the range is empty afterwards.
    ///
    /// # Safety
    ///
    /// Nobody relies on what the range holds.
    unsafe fn discard(&self, start: usize, bytes: usize);

    /// Time that only rises.
    fn now_ns(&self) -> u64;

    /// The CPU of the calling thread, for choosing a stream: any number will do.
    fn cpu(&self) -> usize;

    /// What the kernel counts as resident of the whole process; `None` if it is not known.
    fn resident(&self) -> Option<Resident>;

    /// Calls `each` for the mappings of files, in rising order, until it returns false.
    fn each_file_mapping(&self, each: &mut dyn FnMut(&FileMapping) -> bool);

    /// Asks for pages of a file to be given back; they are read from the file again when they are touched.
    fn page_out(&self, start: usize, bytes: usize);

    /// Lets another thread run: it has what the caller waits for.
    fn pause(&self);
}
