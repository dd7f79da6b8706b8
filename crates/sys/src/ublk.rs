//! ublk: block devices of the kernel that a process serves.
//!
//! The words are those of `linux/ublk_cmd.h`. `/dev/ublk-control` makes a device ([`Control`]), which is then
//! `/dev/ublkcN` for the process that serves it ([`Door`]), and `/dev/ublkbN` for everybody once it has started. A
//! device has **queues**, and each has as many requests under way as it is deep, each with a **tag**. The process
//! **fetches**: the kernel answers when there is a request, whose **descriptor** is in memory that both share, and
//! whose data the kernel has copied to the tag's buffer. A **commit** ends the request and fetches the next one of the
//! tag.
//!
//! # Invariants
//!
//! - `UC-1` The buffer of a tag is accessed by one side: by the kernel from fetch or commit to its answer, by us from
//!   there to the commit.
//! - `UC-2` Buffers stay mapped as long as the kernel has a tag: a queue that is dropped before that leaves them.
//! - `UC-3` A command with memory is waited for, however long it takes.
//!
//! # Cost
//!
//! A system call for all requests that are there; two copies by the kernel, of which one is between it and the buffer.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use crate::clock::monotonic_ns;
use crate::device_memory::DeviceMemory;
use crate::map::{PAGE_BYTES, Reservation};
use crate::uring::{Answer, COMMAND_BYTES, ENTRIES_MAX, Operation, Queues, Request, Ring};

/// The most requests of a queue that may be under way: as many as a ring has room for.
pub const DEPTH_MAX: u16 = 64;

/// The kernel's limit, by which the descriptors of queues are apart.
const KERNEL_DEPTH_MAX: usize = 4096;

/// The number of a device that the kernel chooses.
pub const ANY_NUMBER: u32 = u32::MAX;

/// Numbers of devices are below it.
pub const NUMBERS: u32 = 1 << 20;

/// Commands have the numbers of today, which all kernels have whose rings we can use.
pub const FEATURE_IOCTL_ENCODE: u64 = 1 << 6;

/// [`DeviceInfo::state`]: it was not started, or was stopped.
pub const STATE_DEAD: u16 = 0;

/// What a device is for everybody.
pub mod attribute {
    /// It may not be written to.
    pub const READ_ONLY: u32 = 1 << 0;
    /// What was written is durable once it was flushed.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// A write may ask for that itself.
    pub const FUA: u32 = 1 << 3;
}

/// What a request is: the lowest byte of [`IoDescriptor::op_flags`].
pub mod operation {
    #[expect(missing_docs, reason = "the words of the kernel's header")]
    mod all {
        pub const READ: u8 = 0;
        pub const WRITE: u8 = 1;
        pub const FLUSH: u8 = 2;
        pub const DISCARD: u8 = 3;
        pub const WRITE_ZEROES: u8 = 5;
    }
    pub use all::*;
}

/// More about a request: the other bits of [`IoDescriptor::op_flags`].
pub mod flag {
    /// What it writes is durable when it ends.
    pub const FUA: u32 = 1 << 13;
    /// Zeroes keep their room.
    pub const NO_UNMAP: u32 = 1 << 15;
    /// The data are somewhere else than in the buffer: of features that nobody has asked for.
    pub const DATA_ELSEWHERE: u32 = 1 << 17 | 1 << 18 | 1 << 19;
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct DeviceInfo {
    /// How many queues it has: as many as were asked for, one for each CPU at most.
    pub queues: u16,
    /// How many requests of a queue may be under way.
    pub depth: u16,
    /// Such as [`STATE_DEAD`].
    pub state: u16,
    /// Zero.
    pub pad0: u16,
    /// The bytes of a tag's buffer.
    pub buffer_bytes: u32,
    /// Its number.
    pub number: u32,
    /// The process that serves it.
    pub process: i32,
    /// Zero.
    pub pad1: u32,
    /// Features.
    pub flags: u64,
    /// Anything: the kernel keeps it.
    pub note: u64,
    /// The user that has made it.
    pub owner_uid: u32,
    /// Its group.
    pub owner_gid: u32,
    /// Zeros.
    pub reserved: [u64; 2],
}

/// `struct ublk_param_basic`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Basic {
    /// See [`attribute`].
    pub attributes: u32,
    /// Requests are multiples of it.
    pub logical_shift: u8,
    /// What is written as a whole.
    pub physical_shift: u8,
    /// What requests had best be multiples of.
    pub optimal_shift: u8,
    /// What they had best be at least.
    pub minimal_shift: u8,
    /// The most of a request.
    pub sectors_max: u32,
    /// Requests end where these do.
    pub chunk_sectors: u32,
    /// The size of the device.
    pub sectors: u64,
    /// No boundary.
    pub boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Discard {
    /// Where granules begin.
    pub alignment_bytes: u32,
    /// What is discarded as a whole.
    pub granularity_bytes: u32,
    /// The most of a discard; 0: none is taken.
    pub sectors_max: u32,
    /// The same of zeroing.
    pub zero_sectors_max: u32,
    /// Ranges of one discard: 1, or 0.
    pub segments_max: u16,
    /// Zero.
    pub reserved: u16,
}

/// The beginning of `struct ublk_params`, as far as we know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
struct Params {
    bytes: u32,
    types: u32,
    basic: Basic,
    discard: Discard,
}

/// Up to the end of `discard`; the kernel's structure goes on there.
const PARAMS_BYTES: u16 = 60;
const PARAM_BASIC: u32 = 1 << 0;
const PARAM_DISCARD: u32 = 1 << 1;

/// `struct ublksrv_io_desc`: a request, as the kernel describes it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct IoDescriptor {
    /// An [`operation`] and [`flag`]s.
    pub op_flags: u32,
    /// How long it is.
    pub sectors: u32,
    /// Where it begins.
    pub sector: u64,
    /// The buffer, which we know.
    pub address: u64,
}

/// `_IOR('u', ..)` and `_IOWR('u', ..)`.
const fn code(directions: u32, number: u32, bytes: u32) -> u32 {
    directions << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const CONTROL_BYTES: u32 = 32;
const IO_BYTES: u32 = 16;
const GET_DEV_INFO: u32 = code(READ, 0x02, CONTROL_BYTES);
const ADD_DEV: u32 = code(READ_WRITE, 0x04, CONTROL_BYTES);
const DEL_DEV: u32 = code(READ_WRITE, 0x05, CONTROL_BYTES);
const START_DEV: u32 = code(READ_WRITE, 0x06, CONTROL_BYTES);
const STOP_DEV: u32 = code(READ_WRITE, 0x07, CONTROL_BYTES);
const SET_PARAMS: u32 = code(READ_WRITE, 0x08, CONTROL_BYTES);
const GET_FEATURES: u32 = code(READ, 0x13, CONTROL_BYTES);
const DEL_DEV_ASYNC: u32 = code(READ, 0x14, CONTROL_BYTES);
const FETCH: u32 = code(READ_WRITE, 0x20, IO_BYTES);
const COMMIT_AND_FETCH: u32 = code(READ_WRITE, 0x21, IO_BYTES);

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<DeviceInfo>() == 64 && offset_of!(DeviceInfo, buffer_bytes) == 8);
    assert!(offset_of!(DeviceInfo, number) == 12 && offset_of!(DeviceInfo, process) == 16);
    assert!(offset_of!(DeviceInfo, flags) == 24 && offset_of!(DeviceInfo, note) == 32);
    assert!(offset_of!(DeviceInfo, owner_uid) == 40 && offset_of!(DeviceInfo, reserved) == 48);
    assert!(size_of::<Basic>() == 32 && offset_of!(Basic, logical_shift) == 4);
    assert!(offset_of!(Basic, sectors_max) == 8 && offset_of!(Basic, sectors) == 16);
    assert!(size_of::<Discard>() == 20 && offset_of!(Discard, segments_max) == 16);
    assert!(offset_of!(Params, basic) == 8 && offset_of!(Params, discard) == 40);
    assert!(PARAMS_BYTES as usize == offset_of!(Params, discard) + size_of::<Discard>());
    assert!(size_of::<IoDescriptor>() == 24 && offset_of!(IoDescriptor, sector) == 8);
    assert!(offset_of!(IoDescriptor, address) == 16);
    assert!(ADD_DEV == 0xC020_7504 && GET_FEATURES == 0x8020_7513 && FETCH == 0xC010_7520);
    assert!(CONTROL_BYTES as usize <= COMMAND_BYTES && IO_BYTES == 16);
    assert!(DEPTH_MAX as u32 <= ENTRIES_MAX && DEPTH_MAX as usize <= KERNEL_DEPTH_MAX);
    assert!(KERNEL_DEPTH_MAX * size_of::<IoDescriptor>() % PAGE_BYTES == 0);
};

/// What a control command says: `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Default, Debug)]
struct Said {
    number: u32,
    address: usize,
    bytes: u16,
    data: u64,
}

impl Said {
    fn encode(self) -> [u8; COMMAND_BYTES] {
        let mut text = [0; COMMAND_BYTES];
        text[..4].copy_from_slice(&self.number.to_ne_bytes());
        // For no queue.
        text[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        text[6..8].copy_from_slice(&self.bytes.to_ne_bytes());
        text[8..16].copy_from_slice(&(self.address as u64).to_ne_bytes());
        text[16..24].copy_from_slice(&self.data.to_ne_bytes());
        text
    }
}

/// What a command for a tag says: `struct ublksrv_io_cmd`.
fn encode_io(queue: u16, tag: u16, result: i32, address: usize) -> [u8; COMMAND_BYTES] {
    let mut text = [0; COMMAND_BYTES];
    text[..2].copy_from_slice(&queue.to_ne_bytes());
    text[2..4].copy_from_slice(&tag.to_ne_bytes());
    text[4..8].copy_from_slice(&result.to_ne_bytes());
    text[8..16].copy_from_slice(&(address as u64).to_ne_bytes());
    text
}

/// Control commands at once: one, and those that were not answered in time.
const CONTROL_ENTRIES: u32 = 8;

/// Between two looks at the clock.
const TURN_MS: u16 = 100;

/// `/dev/ublk-control`.
#[derive(Debug)]
pub struct Control {
    file: OwnedFd,
    ring: Ring,
    queues: Queues,
    /// The number of the last command, which its answer has too.
    sent: u64,
    /// Commands without an answer.
    unanswered: u32,
}

impl Control {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// `NOENT`, `NODEV`, `NXIO`: the kernel has no ublk, or its module is not loaded. `ACCESS`: not for this user.
    pub fn open() -> Result<Control, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(c"/dev/ublk-control", flags, Mode::empty())?;
        let (ring, queues) = open_ring()?;
        Ok(Control { file, ring, queues, sent: 0, unanswered: 0 })
    }

    /// The features of the kernel's driver.
    ///
    /// # Errors
    ///
    /// `OPNOTSUPP`: an older one.
    pub fn features(&mut self) -> Result<u64, Errno> {
        let mut features = 0_u64;
        let address = &raw mut features as usize;
        self.send(GET_FEATURES, Said { address, bytes: 8, ..Said::default() })?;
        Ok(features)
    }

    /// Makes a device as `info` says, and writes to `info` what it has become.
    ///
    /// # Errors
    ///
    /// `EXIST`: there is one of that number. `PERM`: it needs `CAP_SYS_ADMIN`. `INVAL`, `NOMEM`.
    pub fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Errno> {
        let number = info.number;
        self.send_info(ADD_DEV, number, info)
    }

    /// What there is to know of a device.
    ///
    /// # Errors
    ///
    /// `NODEV`: there is none of that number. `PERM`.
    pub fn info(&mut self, number: u32) -> Result<DeviceInfo, Errno> {
        let mut info = DeviceInfo::default();
        self.send_info(GET_DEV_INFO, number, &mut info)?;
        Ok(info)
    }

    fn send_info(&mut self, code: u32, number: u32, info: &mut DeviceInfo) -> Result<(), Errno> {
        let bytes = u16::try_from(size_of::<DeviceInfo>()).expect("64");
        let address = &raw mut *info as usize;
        self.send(code, Said { number, address, bytes, data: 0 }).map(drop)
    }

    /// Says how large a device is that was not started, and what else it can.
    ///
    /// # Errors
    ///
    /// `INVAL`: the kernel does not accept that. `ACCESS`: it was started.
    pub fn set_params(
        &mut self,
        number: u32,
        basic: &Basic,
        discard: Option<&Discard>,
    ) -> Result<(), Errno> {
        let types = PARAM_BASIC | if discard.is_some() { PARAM_DISCARD } else { 0 };
        let discard = discard.copied().unwrap_or_default();
        let params = Params { bytes: PARAMS_BYTES.into(), types, basic: *basic, discard };
        let address = &raw const params as usize;
        let said = Said { number, address, bytes: PARAMS_BYTES, data: 0 };
        self.send(SET_PARAMS, said).map(drop)
    }

    /// Makes the block device, which `process` serves. It waits until all queues have fetched, and reads the device:
    /// the queues have to be served meanwhile.
    ///
    /// # Errors
    ///
    /// `INVAL`: the kernel does not accept the parameters, or the process. `EXIST`: it was started.
    pub fn start(&mut self, number: u32, process: u32) -> Result<(), Errno> {
        self.send(START_DEV, Said { number, data: process.into(), ..Said::default() }).map(drop)
    }

    /// Takes the block device away, once all requests are done, and answers all fetches with `NODEV`. Whoever has it
    /// open gets errors from then on.
    ///
    /// # Errors
    ///
    /// `TIME`: it is still at it after so many milliseconds. `NODEV`: there is no such device.
    pub fn stop(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno> {
        self.send_within(STOP_DEV, number, milliseconds)
    }

    /// Removes a device. Its number is free once nobody has it open; nobody waits for that where the kernel can do so.
    ///
    /// # Errors
    ///
    /// As for [`Control::stop`].
    pub fn delete(&mut self, number: u32, milliseconds: u64) -> Result<(), Errno> {
        match self.send_within(DEL_DEV_ASYNC, number, milliseconds) {
            // Linux 6.6.
            Err(Errno::OPNOTSUPP) => self.send_within(DEL_DEV, number, milliseconds),
            done => done,
        }
    }

    /// Sends a command and waits for its answer, however long that takes (`UC-3`).
    fn send(&mut self, code: u32, said: Said) -> Result<u32, Errno> {
        self.submit(code, said)?;
        loop {
            if let Some(answer) = self.answer() {
                return answer;
            }
            self.wait();
        }
    }

    /// The same for a command without memory, which may be answered when nobody waits any more.
    fn send_within(&mut self, code: u32, number: u32, milliseconds: u64) -> Result<(), Errno> {
        let deadline_ns = monotonic_ns().saturating_add(milliseconds.saturating_mul(1_000_000));
        self.submit(code, Said { number, ..Said::default() })?;
        loop {
            if let Some(answer) = self.answer() {
                return answer.map(drop);
            }
            if monotonic_ns() >= deadline_ns {
                return Err(Errno::TIME);
            }
            self.wait();
        }
    }

    fn submit(&mut self, code: u32, said: Said) -> Result<(), Errno> {
        if self.unanswered >= CONTROL_ENTRIES {
            return Err(Errno::BUSY);
        }
        self.sent += 1;
        let operation = Operation::Command(code, said.encode());
        let file = Some(self.file.as_fd());
        let request = Request { token: self.sent, file, offset: 0, operation };
        // SAFETY: the memory that the command names belongs to the caller, who waits in `send` for the answer (UC-3),
        // or there is none (`send_within`). The file is open as long as this value.
        if !unsafe { self.queues.push(&request) } {
            return Err(Errno::BUSY);
        }
        self.queues.publish();
        while self.queues.untaken() > 0 {
            match self.ring.submit(self.queues.untaken()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => self.wait(),
                Err(error) => {
                    // SAFETY: only this thread uses the ring: `&mut self`.
                    unsafe { self.queues.take_back(|_| ()) };
                    return Err(error);
                }
            }
        }
        self.unanswered += 1;
        Ok(())
    }

    /// The answer to the last command, if it is there.
    fn answer(&mut self) -> Option<Result<u32, Errno>> {
        while let Some(Answer { token, result }) = self.queues.pop() {
            self.unanswered -= 1;
            // Others are for commands that nobody waits for any more.
            if token == self.sent {
                return Some(result);
            }
        }
        None
    }

    fn wait(&self) {
        match self.ring.wait(TURN_MS) {
            Ok(()) | Err(Errno::TIME | Errno::INTR) => {}
            Err(_) => self.ring.wait_readable(TURN_MS),
        }
    }
}

/// The ring of control commands. A kernel without io_uring, or that is told to forbid it, has no ublk for us.
fn open_ring() -> Result<(Ring, Queues), Errno> {
    Ring::open_wide(CONTROL_ENTRIES)
}

/// `/dev/ublkcN`: the side of a device that serves it. One process has it open, and its queues share it.
#[derive(Clone, Debug)]
pub struct Door {
    file: Arc<OwnedFd>,
    /// What the kernel says of the device: how much it copies to a buffer follows from it, so nobody else may say it.
    info: DeviceInfo,
}

/// Whether a process has `/dev/ublkcN` open.
#[must_use]
pub fn is_served(number: u32) -> bool {
    open_door(number).is_err_and(|error| error == Errno::BUSY)
}

fn open_door(number: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(format!("/dev/ublkc{number}"), flags, Mode::empty())
}

impl Door {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// `BUSY`: another process serves the device. `NOENT`: there is no such device, or `/dev` does not show it.
    /// `INVAL`: it is deeper than [`DEPTH_MAX`].
    pub fn open(control: &mut Control, number: u32) -> Result<Door, Errno> {
        let file = Arc::new(open_door(number)?);
        // Asked for behind it: as long as the file is open its number belongs to no other device.
        let info = control.info(number)?;
        let is_good = (1..=DEPTH_MAX).contains(&info.depth) && info.buffer_bytes > 0;
        if is_good { Ok(Door { file, info }) } else { Err(Errno::INVAL) }
    }

    /// What the kernel says of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

/// The descriptors of a queue: memory of the kernel's, which it writes.
#[derive(Debug)]
struct Descriptors(DeviceMemory);

impl Descriptors {
    fn map(door: &Door, queue: u16, depth: u16) -> Result<Descriptors, Errno> {
        let bytes = (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(PAGE_BYTES);
        let apart = KERNEL_DEPTH_MAX * size_of::<IoDescriptor>();
        let offset = (usize::from(queue) * apart) as u64;
        DeviceMemory::map(&*door.file, offset, bytes, ProtFlags::READ).map(Descriptors)
    }

    fn read(&self, tag: u16) -> IoDescriptor {
        let end = (usize::from(tag) + 1) * size_of::<IoDescriptor>();
        assert!(end <= self.0.bytes(), "tag {tag}");
        // SAFETY: the place is in the mapping (above).
        let place = unsafe { self.0.base().cast::<IoDescriptor>().add(tag.into()) };
        // SAFETY: it is valid and aligned, any bytes are a descriptor, and the kernel has written them before it
        // answered.
        unsafe { place.read_volatile() }
    }
}

/// What the kernel says about a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// There is a request.
    Request(u16),
    /// The fetch or the commit has failed. `NODEV`: the device goes, and there are no more requests with this tag.
    Failed(u16, Errno),
}

/// Who may access the buffer of a tag (`UC-1`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Kernel,
    Us,
}

/// A queue of a device. The thread that has fetched first is the one to serve it: the kernel refuses others.
#[derive(Debug)]
pub struct Queue {
    number: u16,
    // The ring is closed before anything else goes.
    ring: Ring,
    queues: Queues,
    descriptors: Descriptors,
    /// `None` only in `drop`.
    buffers: Option<Reservation>,
    buffer_bytes: usize,
    owners: Vec<Owner>,
    door: Door,
}

impl Queue {
    /// A queue of a device.
    ///
    /// # Errors
    ///
    /// `NOMEM`, `MFILE`, or as [`Ring::open`].
    pub fn open(door: &Door, number: u16) -> Result<Queue, Errno> {
        let (depth, buffer_bytes) = (door.info.depth, door.info.buffer_bytes as usize);
        let buffers = Reservation::new(usize::from(depth) * buffer_bytes, PAGE_BYTES)?;
        let (ring, queues) = Ring::open(u32::from(depth).next_power_of_two(), None)?;
        let descriptors = Descriptors::map(door, number, depth)?;
        let owners = vec![Owner::Us; depth.into()];
        let (buffers, door) = (Some(buffers), door.clone());
        Ok(Queue { number, ring, queues, descriptors, buffers, buffer_bytes, owners, door })
    }

    /// How many tags it has.
    #[must_use]
    pub fn depth(&self) -> u16 {
        u16::try_from(self.owners.len()).expect("DEPTH_MAX")
    }

    /// Fetches the first request of every tag.
    ///
    /// # Errors
    ///
    /// The kernel refuses it.
    pub fn fetch(&mut self) -> Result<(), Errno> {
        (0..self.depth()).for_each(|tag| self.send(FETCH, tag, -1));
        self.queues.publish();
        while self.queues.untaken() > 0 {
            match self.ring.submit(self.queues.untaken()) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => {}
                Err(error) => return Err(error),
            }
        }
        // There can be no request before the device has started, but a refusal is answered at once.
        match self.event() {
            Some(Event::Failed(_, error)) => Err(error),
            Some(Event::Request(_)) => Err(Errno::PROTO),
            None => Ok(()),
        }
    }

    /// Hands over what was committed, and waits until there is an event.
    ///
    /// # Errors
    ///
    /// No ring any more: a filter that was installed since.
    pub fn wait(&mut self) -> Result<(), Errno> {
        self.queues.publish();
        let untaken = self.queues.untaken();
        if untaken == 0 && self.queues.has_answer() {
            return Ok(());
        }
        match self.ring.submit_and_wait(untaken) {
            Ok(()) | Err(Errno::INTR) => Ok(()),
            Err(Errno::AGAIN | Errno::BUSY | Errno::NOMEM) => {
                self.ring.wait(1).ok();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The next event that is there.
    pub fn event(&mut self) -> Option<Event> {
        let Answer { token, result } = self.queues.pop()?;
        let tag = u16::try_from(token).expect("the kernel returns our number");
        let owner = &mut self.owners[usize::from(tag)];
        assert_eq!(*owner, Owner::Kernel, "two answers for tag {tag}");
        *owner = Owner::Us;
        Some(match result {
            Ok(0) => Event::Request(tag),
            // Of a feature that nobody has asked for.
            Ok(_) => Event::Failed(tag, Errno::PROTO),
            Err(error) => Event::Failed(tag, error),
        })
    }

    /// The request of a tag, and its buffer.
    ///
    /// # Panics
    ///
    /// There is no event of the tag, or it was committed (`UC-1`).
    pub fn request(&mut self, tag: u16) -> (IoDescriptor, &mut [u8]) {
        assert_eq!(self.owners[usize::from(tag)], Owner::Us, "the kernel has tag {tag} (UC-1)");
        let place = self.buffer(tag);
        // SAFETY: the place is in `buffers`, which is mapped, zeroed memory; by UC-1 the kernel does not access it, and
        // the borrow of `self` rules out another reference.
        let buffer = unsafe { std::slice::from_raw_parts_mut(place, self.buffer_bytes) };
        (self.descriptors.read(tag), buffer)
    }

    /// Ends the request of a tag with so many bytes, or an error below 0, and fetches the next one. The kernel sees it
    /// in the next [`Queue::wait`].
    ///
    /// # Panics
    ///
    /// As [`Queue::request`].
    pub fn commit(&mut self, tag: u16, result: i32) {
        self.send(COMMIT_AND_FETCH, tag, result);
    }

    fn send(&mut self, code: u32, tag: u16, result: i32) {
        assert_eq!(self.owners[usize::from(tag)], Owner::Us, "the kernel has tag {tag} (UC-1)");
        let text = encode_io(self.number, tag, result, self.buffer(tag) as usize);
        let operation = Operation::Command(code, text);
        let file = Some(self.door.file.as_fd());
        let request = Request { token: tag.into(), file, offset: 0, operation };
        // SAFETY: from here on nobody accesses the buffer before the answer (UC-1), and it stays mapped (UC-2). The
        // file is open as long as this value.
        let has_room = unsafe { self.queues.push(&request) };
        assert!(has_room, "there is room for each tag");
        self.owners[usize::from(tag)] = Owner::Kernel;
    }

    /// The first byte of the buffer of a tag.
    fn buffer(&self, tag: u16) -> *mut u8 {
        let buffers = self.buffers.as_ref().expect("until it is dropped");
        let offset = usize::from(tag) * self.buffer_bytes;
        assert!(offset + self.buffer_bytes <= buffers.bytes(), "tag {tag}");
        // SAFETY: the place is in the mapping (above).
        unsafe { buffers.base().add(offset) }.as_ptr()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let is_out = self.owners.contains(&Owner::Kernel);
        if let Some(buffers) = self.buffers.take().filter(|_| is_out) {
            // UC-2: the kernel may still write to them.
            std::mem::forget(buffers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Control, DEPTH_MAX, Said, encode_io};
    use rustix::io::Errno;

    /// Goal: commands have the bytes of the kernel's structures. Method: written out by hand from `linux/ublk_cmd.h`.
    #[test]
    fn commands_have_the_bytes_of_the_header() {
        let said = Said { number: 0x0102_0304, address: 0x1122_3344_5566, bytes: 64, data: 7 };
        let expected = [
            4, 3, 2, 1, 0xFF, 0xFF, 64, 0, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0, 7, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(said.encode(), expected);
        let text = encode_io(2, DEPTH_MAX - 1, -5, 0x1000);
        assert_eq!(text[..16], [2, 0, 63, 0, 0xFB, 0xFF, 0xFF, 0xFF, 0, 0x10, 0, 0, 0, 0, 0, 0]);
        assert_eq!(text[16..], [0; 16], "a ring that is not wide has no room for more");
    }

    /// Goal: a machine without ublk says so, and one with it has features.
    #[test]
    fn a_machine_without_ublk_says_so() {
        match Control::open() {
            Ok(mut control) => {
                assert!(control.features().is_ok());
                assert_eq!(control.info(0xF_FFFF), Err(Errno::NODEV));
                assert_eq!(control.stop(0xF_FFFF, 1000), Err(Errno::NODEV));
            }
            Err(error) => {
                eprintln!("SKIPPED: no ublk here: {error}");
                let expected =
                    [Errno::NOENT, Errno::NODEV, Errno::NXIO, Errno::ACCESS, Errno::PERM];
                assert!(expected.contains(&error), "{error}");
            }
        }
    }
}
