//! io_uring: requests that the kernel carries out while the thread goes on.
//!
//! A [`Ring`] is what system calls name; its [`Queues`] lie in memory that the kernel shares. They are apart so that
//! a thread can be in a call on the ring while another one has the queues to itself.
//!
//! The kernel reports the end of a request by way of the thread that submitted it: that thread runs the report when
//! it next enters or leaves the kernel, and is woken for it if it sleeps. So a sleep of that thread that the kernel
//! does not restart (`epoll_wait`) ends with `EINTR`, and while it is in an uninterruptible wait nobody learns that
//! the request has ended.
//!
//! # Invariants
//!
//! - `RING-1` `head <= tail <= head + entries`, modulo 2^32, in both queues. The kernel moves the head of the
//!   requests and the tail of the answers, we move the others.
//! - `RING-2` Each request that the kernel has taken has one answer, and there is room for all: whoever pushes has
//!   no more than `entries` requests without an answer.
//!
//! # Cost
//!
//! Two pages, and some memory of the kernel's. The pages are ours (`IORING_SETUP_NO_MMAP`): the kernel would put its
//! own beside the program's mappings, and refuses to be told a better place.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::io_uring::{
    IoringEnterFlags, IoringFeatureFlags, IoringOp, IoringRegisterOp, IoringSetupFlags,
    addr_or_splice_off_in_union, io_uring_cqe, io_uring_enter, io_uring_enter_arg,
    io_uring_getevents_arg, io_uring_params, io_uring_ptr, io_uring_register, io_uring_setup,
    io_uring_sqe, io_uring_user_data, len_union, off_or_addr2_union,
};
use rustix::time::Timespec;

use crate::descriptor::Descriptor;
use crate::map::{PAGE_BYTES, Reservation};

/// The most requests that a ring has room for.
pub const ENTRIES_MAX: u32 = 64;

/// The bytes of a request in the queue, as a shift: of the usual kind, and with room for a long command.
const NARROW_SHIFT: u32 = 6;
const WIDE_SHIFT: u32 = 7;

/// The most that a command says.
pub const COMMAND_BYTES: usize = 32;

/// Where it begins in a request. One that is not wide has room for 16 bytes of it.
const COMMAND_AT: usize = 48;

const _: () = {
    assert!(COMMAND_AT + 16 == 1 << NARROW_SHIFT);
    assert!(COMMAND_AT + COMMAND_BYTES <= 1 << WIDE_SHIFT);
    assert!(std::mem::offset_of!(io_uring_sqe, addr3_or_cmd) == COMMAND_AT);
    assert!(size_of::<io_uring_sqe>() == 64 && size_of::<io_uring_cqe>() == 16);
    // Each part fits in a page: before Linux 6.10 the kernel takes no more. There are two answers for each request,
    // behind words that take two cache lines, up to four.
    assert!(ENTRIES_MAX as usize * size_of::<io_uring_sqe>() <= PAGE_BYTES);
    assert!(4 * 64 + 2 * ENTRIES_MAX as usize * size_of::<io_uring_cqe>() <= PAGE_BYTES);
};

/// What the kernel shall do.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// Read into this memory.
    Read(*mut u8, u32),
    /// Write from this memory.
    Write(*const u8, u32),
    /// Free the blocks of so many bytes, as [`crate::disk::punch`].
    Punch(u64),
    /// A command for a driver, which the driver alone understands. Its last 16 bytes reach it by a wide ring only
    /// ([`Ring::open_wide`]); elsewhere they are zeros.
    Command(u32, [u8; COMMAND_BYTES]),
    /// Answer.
    Nothing,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// What the answer will name.
    pub token: u64,
    /// The file, if the operation has one.
    pub file: Option<BorrowedFd<'a>>,
    /// The first byte in the file.
    pub offset: u64,
    /// What shall be done.
    pub operation: Operation,
}

/// The kernel's answer to one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// That of the request.
    pub token: u64,
    /// What the system call would have returned.
    pub result: Result<u32, Errno>,
}

/// See the module.
#[derive(Debug)]
pub struct Ring(Descriptor);

impl Ring {
    /// A ring for `entries` requests (a power of two), which rings `ended` with every answer.
    ///
    /// # Errors
    ///
    /// `NOSYS`: the kernel has no io_uring. `PERM`: `kernel.io_uring_disabled`. Either: a seccomp filter.
    /// `INVAL`: a kernel before 6.6. `NOMEM`, `MFILE`.
    pub fn open(entries: u32, ended: Option<BorrowedFd<'_>>) -> Result<(Ring, Queues), Errno> {
        let (file, queues) = open(entries, ended, NARROW_SHIFT)?;
        Ok((Ring(Descriptor::new(file)), queues))
    }

    /// The same with room for long commands in each request, and so for half as many requests at most.
    ///
    /// # Errors
    ///
    /// As [`Ring::open`].
    pub fn open_wide(entries: u32) -> Result<(Ring, Queues), Errno> {
        let (file, queues) = open(entries, None, WIDE_SHIFT)?;
        Ok((Ring(Descriptor::new(file)), queues))
    }

    /// Has the kernel take the next `count` requests that were published; returns how many it has taken.
    ///
    /// # Errors
    ///
    /// `AGAIN`, `BUSY`, `NOMEM`, `INTR`: not now. `NOSYS`, `PERM`: a filter that was installed since the ring was
    /// opened.
    pub fn submit(&self, count: u32) -> Result<u32, Errno> {
        // SAFETY: what the requests name is valid until they are answered: the contract of `Queues::push`.
        unsafe { io_uring_enter(self.0.file(), count, 0, IoringEnterFlags::empty()) }
    }

    /// Has the kernel take the next `count` requests, as [`Ring::submit`], and waits in the same call until there is an
    /// answer.
    ///
    /// # Errors
    ///
    /// As [`Ring::submit`]. Requests may have been taken: [`Queues::untaken`] knows.
    pub fn submit_and_wait(&self, count: u32) -> Result<(), Errno> {
        // SAFETY: as in `submit`.
        unsafe { io_uring_enter(self.0.file(), count, 1, IoringEnterFlags::GETEVENTS) }.map(drop)
    }

    /// Waits until there is an answer, `milliseconds` at most.
    ///
    /// # Errors
    ///
    /// `TIME`: none came. `INTR`: a signal. Others as for [`Ring::submit`].
    pub fn wait(&self, milliseconds: u16) -> Result<(), Errno> {
        let mut timeout = timespec(milliseconds);
        let argument = io_uring_getevents_arg {
            ts: io_uring_ptr::new((&raw mut timeout).cast()),
            ..io_uring_getevents_arg::default()
        };
        let flags = IoringEnterFlags::GETEVENTS | IoringEnterFlags::EXT_ARG;
        // SAFETY: nothing is submitted, and the argument and the time outlive the call.
        unsafe { io_uring_enter_arg(self.0.file(), 0, 1, flags, Some(&argument)) }.map(drop)
    }

    /// As [`Ring::wait`], by a call that a filter which forbids io_uring allows.
    pub fn wait_readable(&self, milliseconds: u16) {
        let timeout = timespec(milliseconds);
        let mut poll = [PollFd::from_borrowed_fd(self.0.file(), PollFlags::IN)];
        // Ready, timed out or interrupted: the caller looks in any case.
        rustix::event::poll(&mut poll, Some(&timeout)).ok();
    }
}

/// Whether this process may use io_uring: the same calls as [`Ring::open`].
///
/// # Errors
///
/// As [`Ring::open`].
pub fn probe() -> Result<(), Errno> {
    open(2, None, NARROW_SHIFT).map(drop)
}

fn timespec(milliseconds: u16) -> Timespec {
    Timespec {
        tv_sec: i64::from(milliseconds) / 1000,
        tv_nsec: i64::from(milliseconds) % 1000 * 1_000_000,
    }
}

/// Opens a ring and has it answer one request: a filter may allow the first call and not the next.
fn open(
    entries: u32,
    ended: Option<BorrowedFd<'_>>,
    shift: u32,
) -> Result<(OwnedFd, Queues), Errno> {
    assert!(entries.is_power_of_two() && entries << shift <= ENTRIES_MAX << NARROW_SHIFT);
    let memory = Shared::new()?;
    let mut about = io_uring_params::default();
    about.flags =
        IoringSetupFlags::SUBMIT_ALL | IoringSetupFlags::NO_MMAP | IoringSetupFlags::NO_SQARRAY;
    about.flags.set(IoringSetupFlags::SQE128, shift == WIDE_SHIFT);
    about.cq_off.user_addr = io_uring_ptr::new(memory.at(WORDS_AT, 0).as_ptr().cast());
    about.sq_off.user_addr = io_uring_ptr::new(memory.at(REQUESTS_AT, 0).as_ptr().cast());
    // SAFETY: ATTACH_WQ is not set. The memory belongs to the queues, which live as long as somebody uses the ring.
    let file = unsafe { io_uring_setup(entries, &mut about) }?;
    let needed = IoringFeatureFlags::NODROP
        | IoringFeatureFlags::EXT_ARG
        | IoringFeatureFlags::NATIVE_WORKERS;
    if !about.features.contains(needed) || about.sq_entries != entries {
        return Err(Errno::INVAL);
    }
    let mut queues = Queues { memory, places: Places::new(&about), shift, pushed: 0 };
    let nothing = Request { token: 0, file: None, offset: 0, operation: Operation::Nothing };
    // SAFETY: it names no memory.
    let has_room = unsafe { queues.push(&nothing) };
    debug_assert!(has_room, "the queue is empty");
    queues.publish();
    // SAFETY: there is only the request above.
    let taken = unsafe { io_uring_enter(&file, 1, 1, IoringEnterFlags::GETEVENTS) }?;
    if taken != 1 || queues.pop().is_none() {
        return Err(Errno::AGAIN);
    }
    if let Some(ended) = ended {
        let number = ended.as_raw_fd();
        let operation = IoringRegisterOp::RegisterEventfd;
        // SAFETY: the kernel reads one descriptor.
        unsafe { io_uring_register(&file, operation, (&raw const number).cast(), 1) }?;
    }
    Ok((file, queues))
}

/// Where the two pages of a ring lie in its memory: the words of both queues and the answers, and the requests.
const WORDS_AT: u32 = 0;
const REQUESTS_AT: u32 = 4096;

/// Memory that is shared with the kernel; children do not inherit it.
#[derive(Debug)]
struct Shared(Reservation);

impl Shared {
    fn new() -> Result<Shared, Errno> {
        let memory = Reservation::new(2 * PAGE_BYTES, PAGE_BYTES)?;
        crate::map::keep_from_children(memory.address(), memory.bytes())?;
        Ok(Shared(memory))
    }

    /// A word of the queues.
    fn word(&self, offset: u32) -> &AtomicU32 {
        let place = self.at(WORDS_AT + offset, size_of::<AtomicU32>()).cast::<u32>();
        // SAFETY: the word lies in the mapping (`at`), aligned as the kernel's, and both sides access it atomically.
        unsafe { AtomicU32::from_ptr(place.as_ptr()) }
    }

    /// `bytes` at an offset.
    fn at(&self, offset: u32, bytes: usize) -> NonNull<u8> {
        let offset = offset as usize;
        assert!(offset + bytes <= self.0.bytes(), "the kernel names a place outside of the memory");
        // SAFETY: the place is inside of the mapping (above).
        unsafe { self.0.base().add(offset) }
    }
}

/// What the kernel says of the queues: offsets of words, and lengths.
#[derive(Clone, Copy, Debug)]
struct Places {
    request_head: u32,
    request_tail: u32,
    requests: u32,
    answer_head: u32,
    answer_tail: u32,
    answers_at: u32,
    answers: u32,
}

impl Places {
    fn new(about: &io_uring_params) -> Places {
        Places {
            request_head: about.sq_off.head,
            request_tail: about.sq_off.tail,
            requests: about.sq_entries,
            answer_head: about.cq_off.head,
            answer_tail: about.cq_off.tail,
            answers_at: about.cq_off.cqes,
            answers: about.cq_entries,
        }
    }
}

/// The two queues of a ring, and the requests themselves.
#[derive(Debug)]
pub struct Queues {
    memory: Shared,
    places: Places,
    /// [`NARROW_SHIFT`] or [`WIDE_SHIFT`].
    shift: u32,
    /// The tail of the requests, as far as they were pushed; the kernel sees it from `publish` on.
    pushed: u32,
}

impl Queues {
    /// Appends a request; the kernel does not see it before [`Queues::publish`]. False: the queue is full.
    ///
    /// # Safety
    ///
    /// The memory that the request names is valid, and nobody else accesses it, until the request was answered or
    /// taken back; and until the kernel has taken the request, its file stays open.
    #[must_use]
    pub unsafe fn push(&mut self, request: &Request<'_>) -> bool {
        if !self.has_room() {
            return false;
        }
        let place = self.request_at(self.pushed);
        // SAFETY: the place is valid (above), and the kernel does not read it: by RING-1 it lies behind the tail.
        unsafe { place.write(encode(request)) };
        if let Operation::Command(_, text) = &request.operation {
            self.put_command(self.pushed, text);
        }
        self.pushed = self.pushed.wrapping_add(1);
        true
    }

    /// Shows the kernel what was pushed; it takes the requests at the next [`Ring::submit`].
    pub fn publish(&mut self) {
        // Release: pairs with the kernel's Acquire, which then sees the requests.
        self.memory.word(self.places.request_tail).store(self.pushed, Ordering::Release);
    }

    /// Whether a request can be pushed. While a thread is in [`Ring::submit`], requests that were answered already may
    /// still have their places ([`Queues::untaken`]).
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.untaken() < self.places.requests
    }

    /// How many requests the kernel has not taken yet. It says what it has taken only at the end of a call, which may
    /// be after their answers: while a thread is in [`Ring::submit`], requests may count here that were answered.
    #[must_use]
    pub fn untaken(&self) -> u32 {
        self.pushed.wrapping_sub(self.head())
    }

    /// Takes the requests back that the kernel has not taken, from the last one on: calls `each` with each token.
    ///
    /// # Safety
    ///
    /// No thread is in [`Ring::submit`] on this ring.
    pub unsafe fn take_back(&mut self, mut each: impl FnMut(u64)) {
        while self.untaken() > 0 {
            self.pushed = self.pushed.wrapping_sub(1);
            let place = self.request_at(self.pushed);
            // SAFETY: push() has written this request.
            each(unsafe { place.read() }.user_data.u64_());
        }
        self.publish();
    }

    /// The oldest answer that was not read yet.
    pub fn pop(&mut self) -> Option<Answer> {
        let words = self.places;
        let head = self.memory.word(words.answer_head).load(Ordering::Relaxed);
        // Acquire: pairs with the kernel's Release; the answer, and what it says was read, are seen.
        if head == self.memory.word(words.answer_tail).load(Ordering::Acquire) {
            return None;
        }
        // 16 bytes each.
        let offset = words.answers_at + ((head & (words.answers - 1)) << 4);
        let place = self.memory.at(WORDS_AT + offset, size_of::<io_uring_cqe>());
        let place = place.cast::<io_uring_cqe>();
        // SAFETY: by RING-1 the kernel has written this answer, and writes no other before the head is moved.
        let answer = unsafe { place.as_ref() };
        let (token, result) = (answer.user_data.u64_(), answer.res);
        // Release: pairs with the kernel's Acquire; it may write another answer here from now on.
        self.memory.word(words.answer_head).store(head.wrapping_add(1), Ordering::Release);
        let result =
            u32::try_from(result).map_err(|_| Errno::from_raw_os_error(result.wrapping_neg()));
        Some(Answer { token, result })
    }

    /// Whether there is an answer.
    #[must_use]
    pub fn has_answer(&self) -> bool {
        let words = self.places;
        let word = |offset| self.memory.word(offset).load(Ordering::Acquire);
        word(words.answer_head) != word(words.answer_tail)
    }

    /// Writes what a command says to the request of this number, which the kernel does not read yet.
    fn put_command(&mut self, number: u32, text: &[u8; COMMAND_BYTES]) {
        let bytes = (1 << self.shift) - COMMAND_AT;
        let text = &text[..bytes.min(COMMAND_BYTES)];
        let at = u32::try_from(COMMAND_AT).expect("48");
        let place = self.memory.at(self.request_offset(number) + at, text.len());
        // SAFETY: the place has room for the text (`at`), and the kernel does not read it: by RING-1 it lies behind the
        // tail.
        unsafe { place.copy_from_nonoverlapping(NonNull::from(text).cast(), text.len()) };
    }

    /// The place of the request of this number.
    fn request_at(&self, number: u32) -> NonNull<io_uring_sqe> {
        self.memory.at(self.request_offset(number), size_of::<io_uring_sqe>()).cast()
    }

    /// Where it is in the memory. All of them have 4096 bytes at most.
    fn request_offset(&self, number: u32) -> u32 {
        REQUESTS_AT + ((number & (self.places.requests - 1)) << self.shift)
    }

    /// Up to where the kernel has taken requests.
    fn head(&self) -> u32 {
        // Acquire: pairs with the kernel's Release, after which it reads the requests before this one no more.
        self.memory.word(self.places.request_head).load(Ordering::Acquire)
    }
}

/// A request in the kernel's form.
fn encode(request: &Request<'_>) -> io_uring_sqe {
    let (opcode, address, length) = match request.operation {
        Operation::Read(into, bytes) => (IoringOp::Read, in_memory(into.cast()), bytes),
        Operation::Write(from, bytes) => {
            (IoringOp::Write, in_memory(from.cast_mut().cast()), bytes)
        }
        // The length is where others have an address, and the mode where they have a length.
        Operation::Punch(bytes) => {
            let mode =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            let length = addr_or_splice_off_in_union { splice_off_in: bytes };
            (IoringOp::Fallocate, length, mode.bits())
        }
        Operation::Command(..) => (IoringOp::UringCmd, in_memory(std::ptr::null_mut()), 0),
        Operation::Nothing => (IoringOp::Nop, in_memory(std::ptr::null_mut()), 0),
    };
    // The number of a command is where others have an offset: the lower half of it, on little-endian machines.
    let offset = match request.operation {
        Operation::Command(code, _) => u64::from(code),
        _ => request.offset,
    };
    io_uring_sqe {
        opcode,
        fd: request.file.map_or(-1, |file| file.as_raw_fd()),
        off_or_addr2: off_or_addr2_union { off: offset },
        addr_or_splice_off_in: address,
        len: len_union { len: length },
        user_data: io_uring_user_data::from_u64(request.token),
        ..io_uring_sqe::default()
    }
}

fn in_memory(address: *mut std::ffi::c_void) -> addr_or_splice_off_in_union {
    addr_or_splice_off_in_union { addr: io_uring_ptr::new(address) }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Operation, Queues, Request, Ring};
    use crate::testing::{IO_URING, forbid_calls};
    use rustix::io::Errno;
    use std::collections::BTreeMap;
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    fn ring() -> Option<(Ring, Queues)> {
        let opened = Ring::open(8, None);
        if let Err(error @ (Errno::NOSYS | Errno::PERM)) = opened {
            eprintln!("SKIPPED: no io_uring here: {error}");
            return None;
        }
        Some(opened.unwrap())
    }

    fn submit(ring: &Ring, queues: &mut Queues) {
        queues.publish();
        while queues.untaken() > 0 {
            ring.submit(queues.untaken()).unwrap();
        }
    }

    fn answers(
        ring: &Ring,
        queues: &mut Queues,
        count: usize,
    ) -> BTreeMap<u64, Result<u32, Errno>> {
        let mut answers = BTreeMap::new();
        while answers.len() < count {
            while let Some(Answer { token, result }) = queues.pop() {
                assert_eq!(answers.insert(token, result), None, "one answer for each");
            }
            if answers.len() < count {
                ring.wait(1000).ok();
            }
        }
        answers
    }

    /// Goal: while the kernel has not said what it took, nothing is pushed over it, although all was answered. Method:
    /// the word in which it says so is put back, as another thread sees it that looks before the call has ended.
    #[test]
    fn what_was_answered_may_still_have_its_place() {
        let Some((ring, mut queues)) = ring() else { return };
        let nothing =
            |token| Request { token, file: None, offset: 0, operation: Operation::Nothing };
        for token in 0..8 {
            // SAFETY: it names no memory.
            assert!(unsafe { queues.push(&nothing(token)) });
        }
        submit(&ring, &mut queues);
        assert_eq!(answers(&ring, &mut queues, 8).len(), 8);
        let taken = queues.memory.word(queues.places.request_head);
        let said = taken.swap(queues.pushed.wrapping_sub(8), Ordering::Relaxed);
        assert_eq!((queues.untaken(), queues.has_room()), (8, false));
        // SAFETY: it names no memory.
        assert!(!unsafe { queues.push(&nothing(8)) });
        queues.memory.word(queues.places.request_head).store(said, Ordering::Relaxed);
        assert_eq!((queues.untaken(), queues.has_room()), (0, true));
        // SAFETY: it names no memory.
        assert!(unsafe { queues.push(&nothing(9)) });
        submit(&ring, &mut queues);
        assert_eq!(answers(&ring, &mut queues, 1).into_keys().collect::<Vec<_>>(), [9]);
    }

    /// Goal: what is written is read, a hole reads as zeros, and an error comes with its request. Method: several
    /// requests of each kind together, many times, so that the queues wrap.
    #[test]
    fn requests_are_carried_out_and_answered() {
        let Some((ring, mut queues)) = ring() else { return };
        let file = crate::disk::open_unlinked(&std::env::temp_dir()).unwrap();
        crate::disk::set_bytes(file.as_fd(), 1 << 20).unwrap();
        for round in 0..20_u8 {
            let out: Vec<Vec<u8>> = (0..4).map(|part| vec![round + part; 4096]).collect();
            let mut back = vec![vec![0xEE_u8; 4096]; 4];
            for (token, bytes) in out.iter().enumerate() {
                let operation = Operation::Write(bytes.as_ptr(), 4096);
                let (token, file) = (token as u64, Some(file.as_fd()));
                let request = Request { token, file, offset: token * 4096, operation };
                // SAFETY: `out` lives, and is not changed, until all answers have come.
                assert!(unsafe { queues.push(&request) });
            }
            submit(&ring, &mut queues);
            let written = answers(&ring, &mut queues, 4);
            assert!(written.values().all(|result| *result == Ok(4096)), "{written:?}");
            let operation = Operation::Punch(4096);
            let request = Request { token: 9, file: Some(file.as_fd()), offset: 4096, operation };
            // SAFETY: it names no memory.
            assert!(unsafe { queues.push(&request) });
            submit(&ring, &mut queues);
            let punched = answers(&ring, &mut queues, 1)[&9];
            for (token, bytes) in back.iter_mut().enumerate() {
                let operation = Operation::Read(bytes.as_mut_ptr(), 4096);
                let (token, file) = (token as u64, Some(file.as_fd()));
                let request = Request { token, file, offset: token * 4096, operation };
                // SAFETY: `back` lives, and is not accessed, until all answers have come.
                assert!(unsafe { queues.push(&request) });
            }
            submit(&ring, &mut queues);
            let read = answers(&ring, &mut queues, 4);
            assert!(read.values().all(|result| *result == Ok(4096)), "{read:?}");
            let hole = if punched.is_ok() { &vec![0; 4096] } else { &out[1] };
            assert_eq!([&back[0], &back[1], &back[2], &back[3]], [&out[0], hole, &out[2], &out[3]]);
        }
        let operation = Operation::Nothing;
        let read = Operation::Read(std::ptr::null_mut(), 0);
        for (token, operation) in [(1, operation), (2, read)] {
            let request = Request { token, file: None, offset: 0, operation };
            // SAFETY: they name no memory.
            assert!(unsafe { queues.push(&request) });
        }
        submit(&ring, &mut queues);
        let mixed = answers(&ring, &mut queues, 2);
        assert_eq!(mixed[&1], Ok(0));
        assert_eq!(mixed[&2], Err(Errno::BADF));
    }

    /// Goal: what was not submitted can be taken back, and a full queue says so. Method: more requests than there are
    /// places, of which the kernel takes three.
    #[test]
    fn untaken_requests_are_taken_back() {
        let Some((ring, mut queues)) = ring() else { return };
        let push = |queues: &mut Queues, token| {
            let request = Request { token, file: None, offset: 0, operation: Operation::Nothing };
            // SAFETY: it names no memory.
            unsafe { queues.push(&request) }
        };
        for token in 0..8 {
            assert!(push(&mut queues, token));
        }
        assert!(!push(&mut queues, 8), "full");
        queues.publish();
        assert_eq!(ring.submit(3), Ok(3));
        let mut back = Vec::new();
        // SAFETY: there is no other thread.
        unsafe { queues.take_back(|token| back.push(token)) };
        assert_eq!(back, [7, 6, 5, 4, 3]);
        assert_eq!(queues.untaken(), 0);
        assert!(push(&mut queues, 9));
        submit(&ring, &mut queues);
        let answered: Vec<u64> = answers(&ring, &mut queues, 4).into_keys().collect();
        assert_eq!(answered, [0, 1, 2, 9]);
        assert!(!queues.has_answer());
        assert_eq!(ring.wait(1), Err(Errno::TIME));
    }

    /// Goal: a command comes where a driver reads it, in rings of both kinds. Method: the bytes of the requests in
    /// memory; then a file whose driver knows no commands answers each of them.
    #[test]
    fn commands_lie_where_drivers_read_them() {
        let Some((ring, mut queues)) = ring() else { return };
        let (wide_ring, mut wide) = Ring::open_wide(8).unwrap();
        let text: [u8; 32] = std::array::from_fn(|at| u8::try_from(at + 1).unwrap());
        let mut narrow_text = text;
        narrow_text[16..].fill(0);
        let event = crate::eventfd::EventFd::new().unwrap();
        for (ring, queues, text) in
            [(&ring, &mut queues, narrow_text), (&wide_ring, &mut wide, text)]
        {
            for token in 0..20 {
                let operation = Operation::Command(0xC020_7504, text);
                let request = Request { token, file: Some(event.file()), offset: 0, operation };
                let place = queues.request_offset(queues.pushed);
                // SAFETY: it names no memory.
                assert!(unsafe { queues.push(&request) });
                let bytes: Vec<u8> = (0..1 << queues.shift)
                    // SAFETY: the byte is in the request, and the kernel does not write to requests.
                    .map(|at| unsafe { queues.memory.at(place + at, 1).read() })
                    .collect();
                assert_eq!(bytes[0], 46, "IORING_OP_URING_CMD");
                assert_eq!(bytes[8..16], [4, 0x75, 0x20, 0xC0, 0, 0, 0, 0]);
                assert_eq!(
                    bytes[48..].iter().take(32).copied().collect::<Vec<_>>(),
                    text[..bytes.len().min(80) - 48]
                );
                submit(ring, queues);
                assert_eq!(answers(ring, queues, 1)[&token], Err(Errno::OPNOTSUPP));
            }
        }
    }

    /// Goal: where io_uring is forbidden, the probe says how, whichever of the calls it is. Method: filters as in a
    /// container, each on a thread of its own.
    #[test]
    fn a_probe_sees_each_forbidden_call() {
        if super::probe().is_err() {
            eprintln!("SKIPPED: no io_uring here");
            return;
        }
        for (call, error) in IO_URING.into_iter().zip([Errno::NOSYS, Errno::PERM, Errno::ACCESS]) {
            let thread = std::thread::spawn(move || {
                forbid_calls(&[call], error).unwrap();
                let event = crate::eventfd::EventFd::new().unwrap();
                Ring::open(2, Some(event.file())).err()
            });
            assert_eq!(thread.join().unwrap(), Some(error));
        }
    }
}
