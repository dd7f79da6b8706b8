//! userfaultfd, with our own declarations: no crate has `UFFDIO_MOVE`.
//!
//! Layouts and numbers are those of `linux/userfaultfd.h`; the block of assertions at the end of the
//! declarations proves each one at compile time.
//!
//! # Invariants
//!
//! - `UFFD-1` When the last descriptor of a userfaultfd is closed, every missing page of its
//!   regions silently reads as zeros. So a [`Uffd`] lives as long as the regions that are
//!   registered with it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl;

use crate::files;

/// `UFFD_FEATURE_*`: what the kernel supports, or what is requested.
pub mod feature {
    /// A `MADV_DONTNEED`, `MADV_FREE` or `MADV_REMOVE` is reported before it happens.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// A `munmap` is reported after it happened.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// A `mremap` is reported after it happened, and the registration moves along.
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// A fault raises SIGBUS in the faulting thread instead of a message.
    pub const SIGBUS: u64 = 1 << 7;
    /// A fault message names the faulting thread.
    pub const THREAD_ID: u64 = 1 << 8;
    /// A fault message has the address that was touched, and not that of its page; Linux 5.18.
    pub const EXACT_ADDRESS: u64 = 1 << 11;
    /// `UFFDIO_MOVE`, Linux 6.8.
    pub const MOVE: u64 = 1 << 16;
}

const UFFD_API: u64 = 0xAA;
const UFFD_USER_MODE_ONLY: u32 = 1;
const REGISTER_MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct Zeropage {
    range: Range,
    mode: u64,
    done: i64,
}

/// `struct uffd_msg`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawMessage {
    event: u8,
    reserved1: u8,
    reserved2: u16,
    reserved3: u32,
    words: [u64; 3],
}

/// The kernel's generic encoding of an ioctl (x86, arm64, riscv): direction, size, type, number.
#[allow(clippy::cast_possible_truncation, reason = "structures of 16 to 40 bytes")]
const fn encode(direction: u32, number: u32, bytes: usize) -> ioctl::Opcode {
    ((direction << 30) | ((bytes as u32) << 16) | (0xAA << 8) | number) as ioctl::Opcode
}

/// `_IOWR(0xAA, number, bytes)`.
const fn iowr(number: u32, bytes: usize) -> ioctl::Opcode {
    encode(3, number, bytes)
}

/// `_IOR(0xAA, number, bytes)`.
const fn ior(number: u32, bytes: usize) -> ioctl::Opcode {
    encode(2, number, bytes)
}

const UFFDIO_API: ioctl::Opcode = iowr(0x3F, size_of::<Api>());
const UFFDIO_REGISTER: ioctl::Opcode = iowr(0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: ioctl::Opcode = ior(0x01, size_of::<Range>());
const UFFDIO_WAKE: ioctl::Opcode = ior(0x02, size_of::<Range>());
const UFFDIO_COPY: ioctl::Opcode = iowr(0x03, size_of::<Copy>());
const UFFDIO_ZEROPAGE: ioctl::Opcode = iowr(0x04, size_of::<Zeropage>());
const UFFDIO_MOVE: ioctl::Opcode = iowr(0x05, size_of::<Copy>());
/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: ioctl::Opcode = 0xAA00;

const _: () = {
    assert!(UFFDIO_API == 0xC018_AA3F);
    assert!(UFFDIO_REGISTER == 0xC020_AA00);
    assert!(UFFDIO_UNREGISTER == 0x8010_AA01);
    assert!(UFFDIO_WAKE == 0x8010_AA02);
    assert!(UFFDIO_COPY == 0xC028_AA03);
    assert!(UFFDIO_ZEROPAGE == 0xC020_AA04);
    assert!(UFFDIO_MOVE == 0xC028_AA05);
    assert!(size_of::<RawMessage>() == 32);
};

/// Whose faults are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Also the kernel's own accesses (`read(2)` into a region). Needs a privilege.
    Kernel,
    /// Only the program's accesses; allowed to everybody.
    Program,
}

/// A message of a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// A thread waits for the page at `address`.
    Fault {
        /// The address that was touched.
        address: usize,
        /// The id of the thread, as from `gettid`.
        thread: u32,
    },
    /// The contents of a range are about to be dropped.
    Remove {
        /// Its first byte.
        start: usize,
        /// The byte after its last.
        end: usize,
    },
    /// A range was unmapped.
    Unmap {
        /// Its first byte.
        start: usize,
        /// The byte after its last.
        end: usize,
    },
    /// A range was moved.
    Remap {
        /// Its old start.
        from: usize,
        /// Its new start.
        to: usize,
        /// Its length.
        bytes: usize,
    },
    /// A kind of message that this code does not know, and did not request.
    Other,
}

/// The result of a move or copy: the bytes done, and why it stopped early, if it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes done, from the start of the range.
    pub bytes: usize,
    /// Why it stopped early. `AGAIN` means: try the rest again.
    pub stopped: Option<Errno>,
}

/// A userfaultfd.
///
/// The descriptor can be replaced in place, for a child of `fork`: the parent's number is
/// meaningless in the child's table of files, and must not be closed there.
#[derive(Debug)]
pub struct Uffd(AtomicI32);

impl Drop for Uffd {
    fn drop(&mut self) {
        // SAFETY: only this value has the descriptor (open, reopen), and this is its last use.
        drop(unsafe { OwnedFd::from_raw_fd(*self.0.get_mut()) });
    }
}

impl Uffd {
    /// Opens a userfaultfd, and agrees on `features` with the kernel. Reads never block;
    /// [`Uffd::wait`] does.
    ///
    /// # Errors
    ///
    /// `PERM` or `ACCESS`: not allowed ([`Reach::Kernel`] needs root, `CAP_SYS_PTRACE`,
    /// `vm.unprivileged_userfaultfd=1`, or access to `/dev/userfaultfd`). `INVAL`: a feature that this
    /// kernel does not have. `NOSYS`: no userfaultfd at all.
    pub fn open(reach: Reach, features: u64) -> Result<Uffd, Errno> {
        open_file(reach, features).map(|file| Uffd(AtomicI32::new(file.into_raw_fd())))
    }

    /// Replaces the descriptor by a new one, opened by this thread, and forgets the old one.
    ///
    /// # Errors
    ///
    /// As [`Uffd::open`].
    pub fn reopen(&self, reach: Reach, features: u64) -> Result<(), Errno> {
        let file = open_file(reach, features)?;
        self.0.store(file.into_raw_fd(), Ordering::Relaxed);
        Ok(())
    }

    /// The descriptor.
    pub fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open from open() or reopen() until drop().
        unsafe { BorrowedFd::borrow_raw(self.0.load(Ordering::Relaxed)) }
    }

    /// Registers a range: from now on each access to a missing page in it is a fault for us to
    /// serve.
    ///
    /// # Errors
    ///
    /// `INVAL`: not anonymous memory, or not page-aligned. `BUSY`: registered with another
    /// userfaultfd. `NOMEM`: too many mappings (`vm.max_map_count`), or the range is not mapped.
    pub fn register(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        let range = Range { start: start as u64, length: bytes as u64 };
        let mut register = Register { range, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER takes a `struct uffdio_register`, checked above.
        unsafe { call::<UFFDIO_REGISTER, Register>(self.file(), &mut register) }
    }

    /// Undoes [`Uffd::register`]: missing pages read as zeros from now on.
    ///
    /// # Errors
    ///
    /// `INVAL` where nothing is mapped, or a part is a mapping that cannot be registered, as of a file.
    pub fn unregister(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut range = Range { start: start as u64, length: bytes as u64 };
        // SAFETY: UFFDIO_UNREGISTER takes a `struct uffdio_range`, checked above.
        unsafe { call::<UFFDIO_UNREGISTER, Range>(self.file(), &mut range) }
    }

    /// Wakes the threads that wait in a range; they try their access again.
    ///
    /// # Errors
    ///
    /// `INVAL` for a range that is not page-aligned.
    pub fn wake(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        let mut range = Range { start: start as u64, length: bytes as u64 };
        // SAFETY: UFFDIO_WAKE takes a `struct uffdio_range`, checked above.
        unsafe { call::<UFFDIO_WAKE, Range>(self.file(), &mut range) }
    }

    /// Moves pages from `from` to `to`, which is registered here and has no page yet, in one atomic
    /// step per page; wakes the threads that wait there.
    ///
    /// # Safety
    ///
    /// No code relies on the contents of `from` afterwards, except through a userfaultfd.
    #[must_use]
    pub unsafe fn move_pages(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let mut copy = transfer(from, to, bytes);
        // SAFETY: UFFDIO_MOVE takes a `struct uffdio_move`, laid out as Copy, checked above.
        let answer = unsafe { call::<UFFDIO_MOVE, Copy>(self.file(), &mut copy) };
        progress(answer, copy.done, bytes)
    }

    /// Copies bytes to new pages at `to`, which is registered here; wakes the threads that wait
    /// there.
    ///
    /// # Safety
    ///
    /// `from` is readable for `bytes`.
    #[must_use]
    pub unsafe fn copy(&self, from: usize, to: usize, bytes: usize) -> Progress {
        let mut copy = transfer(from, to, bytes);
        // SAFETY: UFFDIO_COPY takes a `struct uffdio_copy`, checked above.
        let answer = unsafe { call::<UFFDIO_COPY, Copy>(self.file(), &mut copy) };
        progress(answer, copy.done, bytes)
    }

    /// Maps the zero page over a range that is registered here; wakes the threads that wait there.
    #[must_use]
    pub fn zero(&self, start: usize, bytes: usize) -> Progress {
        let range = Range { start: start as u64, length: bytes as u64 };
        let mut zero = Zeropage { range, mode: 0, done: 0 };
        // SAFETY: UFFDIO_ZEROPAGE takes a `struct uffdio_zeropage`, checked above.
        let answer = unsafe { call::<UFFDIO_ZEROPAGE, Zeropage>(self.file(), &mut zero) };
        progress(answer, zero.done, bytes)
    }

    /// Whether a change of registered mappings is under way whose message was not read yet. The kernel answers that
    /// first, before it looks at the range.
    ///
    /// # Errors
    ///
    /// Those of a seccomp filter that forbids the call.
    pub fn is_changing(&self) -> Result<bool, Errno> {
        // Of no length: INVAL if nothing is under way.
        match self.zero(0, 0).stopped {
            Some(Errno::AGAIN) => Ok(true),
            Some(Errno::INVAL) | None => Ok(false),
            Some(error) => Err(error),
        }
    }

    /// Reads the next messages: as many as exist and fit, possibly none.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub fn read<'a>(&self, into: &'a mut Messages) -> Result<&'a [Message], Errno> {
        let mut raw = [const {
            RawMessage { event: 0, reserved1: 0, reserved2: 0, reserved3: 0, words: [0; 3] }
        }; MESSAGES];
        // SAFETY: RawMessage is plain integers, so any bytes are a value; the slice spans the array.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(raw.as_mut_ptr().cast::<u8>(), size_of_val(&raw))
        };
        let length = match rustix::io::read(self.file(), bytes) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(error),
        };
        let count = length / size_of::<RawMessage>();
        for (message, raw) in into.0.iter_mut().zip(&raw[..count]) {
            *message = decode(raw);
        }
        Ok(&into.0[..count])
    }

    /// Whether a message waits to be read.
    pub fn has_message(&self) -> bool {
        let mut poll = [PollFd::from_borrowed_fd(self.file(), PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Sleeps until there is a message here or at `other`, or `also` is readable, at most `milliseconds`. Returns
    /// whether there is one at `other`.
    pub fn wait(&self, other: &Uffd, also: Option<BorrowedFd<'_>>, milliseconds: u16) -> bool {
        let timeout = rustix::time::Timespec {
            tv_sec: i64::from(milliseconds) / 1000,
            tv_nsec: i64::from(milliseconds) % 1000 * 1_000_000,
        };
        let watch = |uffd| PollFd::from_borrowed_fd(uffd, PollFlags::IN);
        let third = watch(also.unwrap_or(self.file()));
        let mut poll = [watch(self.file()), watch(other.file()), third];
        let count = 2 + usize::from(also.is_some());
        // Ready, timed out or interrupted: the caller reads in any case.
        rustix::event::poll(&mut poll[..count], Some(&timeout)).ok();
        poll[1].revents().contains(PollFlags::IN)
    }
}

/// Messages read at once.
pub const MESSAGES: usize = 16;

/// Room for the messages of one [`Uffd::read`].
#[derive(Debug)]
pub struct Messages([Message; MESSAGES]);

impl Default for Messages {
    fn default() -> Self {
        Messages([Message::Other; MESSAGES])
    }
}

impl Messages {
    /// Takes messages from `from`, as many as fit: as [`Uffd::read`], for a source other than the
    /// kernel.
    pub fn fill(&mut self, from: impl Iterator<Item = Message>) -> &[Message] {
        let mut count = 0;
        for (place, message) in self.0.iter_mut().zip(from) {
            *place = message;
            count += 1;
        }
        &self.0[..count]
    }
}

fn decode(raw: &RawMessage) -> Message {
    let [first, second, third] = raw.words.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
    match raw.event {
        // `flags`, `address`, and the thread in the lower half of the third word.
        EVENT_PAGEFAULT => {
            let thread = u32::try_from(raw.words[2] & 0xFFFF_FFFF).unwrap_or(0);
            Message::Fault { address: second, thread }
        }
        EVENT_REMOVE => Message::Remove { start: first, end: second },
        EVENT_UNMAP => Message::Unmap { start: first, end: second },
        EVENT_REMAP => Message::Remap { from: first, to: second, bytes: third },
        _ => Message::Other,
    }
}

fn open_file(reach: Reach, features: u64) -> Result<OwnedFd, Errno> {
    let file = files::open_first(|| match reach {
        // The call is allowed to everybody; where a container's seccomp profile forbids it, use the
        // device.
        Reach::Program => by_call(UFFD_USER_MODE_ONLY).or_else(|_| by_device(UFFD_USER_MODE_ONLY)),
        // The device takes two descriptors for a moment.
        Reach::Kernel => by_device(0).or_else(|errno| {
            by_call(0).map_err(|other| if errno == Errno::MFILE { errno } else { other })
        }),
    })?;
    let mut api = Api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API takes a `struct uffdio_api`, whose layout is checked above.
    unsafe { call::<UFFDIO_API, Api>(file.as_fd(), &mut api) }?;
    Ok(file)
}

fn by_call(mode: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).bits() | mode;
    // SAFETY: userfaultfd takes flags and returns a new descriptor or -1.
    let answer = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    match i32::try_from(answer) {
        // SAFETY: the kernel has just returned this descriptor: no other code owns it.
        Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS)),
    }
}

fn by_device(mode: u32) -> Result<OwnedFd, Errno> {
    let device =
        rustix::fs::open(c"/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).bits() | mode;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and returns a new descriptor or -1.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), u64::from(USERFAULTFD_IOC_NEW), flags) };
    if answer < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    // SAFETY: the kernel has just returned this descriptor: no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(answer) })
}

fn transfer(from: usize, to: usize, bytes: usize) -> Copy {
    Copy { to: to as u64, from: from as u64, length: bytes as u64, mode: 0, done: 0 }
}

/// Calls an ioctl that reads and writes `argument`, even if it fails.
///
/// # Safety
///
/// `OPCODE` takes a pointer to a value with the layout of `T`.
unsafe fn call<const OPCODE: ioctl::Opcode, T>(
    file: BorrowedFd<'_>,
    argument: &mut T,
) -> Result<(), Errno> {
    // SAFETY: the caller's contract.
    let updater = unsafe { ioctl::Updater::<OPCODE, T>::new(argument) };
    // SAFETY: the same.
    unsafe { ioctl::ioctl(file, updater) }
}

fn progress(answer: Result<(), Errno>, done: i64, bytes: usize) -> Progress {
    match answer {
        Ok(()) => Progress { bytes, stopped: None },
        // `done` holds the bytes, or a negated error if no byte was done.
        Err(error) => Progress { bytes: usize::try_from(done).unwrap_or(0), stopped: Some(error) },
    }
}
