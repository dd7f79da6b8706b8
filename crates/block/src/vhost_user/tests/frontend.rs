//! A front end of its own, by the other half of the crate: it negotiates, shares memory, and drives queues.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{Result, VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zfolio_sys::clock::monotonic_ns;

use super::rig::UNTOUCHED;
use crate::vhost_user::guest::{Driver, header, linked};

/// The memory of a guest.
pub(super) const MEMORY_BYTES: u64 = 4 << 20;

/// What each queue has of it: rings, header, status, and data behind them.
const QUEUE_BYTES: u64 = 1 << 20;
const BUFFERS: u64 = 64 << 10;

const ENTRIES: u16 = 128;

/// Where the front end has the guest's memory, in its own addresses.
const FRONT_END: u64 = 0x7f00_0000_0000;

/// So long a queue has to answer.
const PATIENCE_NS: u64 = 10_000_000_000;

/// How far a front end has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Step {
    Connected,
    Features,
    ProtocolFeatures,
    Config,
    Memory,
    Rings,
    Calls,
    Kicks,
    Enabled,
    Offered,
    Served,
}

pub(super) const STEPS: [Step; 11] = [
    Step::Connected,
    Step::Features,
    Step::ProtocolFeatures,
    Step::Config,
    Step::Memory,
    Step::Rings,
    Step::Calls,
    Step::Kicks,
    Step::Enabled,
    Step::Offered,
    Step::Served,
];

/// A queue and its event descriptors.
pub(super) struct Queue {
    pub(super) driver: Driver,
    pub(super) kick: EventFd,
    pub(super) call: EventFd,
    at: u64,
}

pub(super) struct FrontEnd {
    pub(super) messages: Frontend,
    socket: UnixStream,
    pub(super) memory: GuestMemoryMmap<()>,
    pub(super) file: Arc<File>,
    pub(super) queues: Vec<Queue>,
    pub(super) features: u64,
}

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

impl FrontEnd {
    /// Connects and has some queues run.
    pub(super) fn new(path: &Path, queues: usize) -> FrontEnd {
        let mut front_end = FrontEnd::connect(path, queues).unwrap();
        front_end.go(Step::Enabled).unwrap();
        front_end
    }

    pub(super) fn connect(path: &Path, queues: usize) -> Result<FrontEnd> {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        let file = Arc::new(File::from(file));
        let place = Some(FileOffset::from_arc(Arc::clone(&file), 0));
        let region = (GuestAddress(0), usize::try_from(MEMORY_BYTES).unwrap(), place);
        let memory = GuestMemoryMmap::from_ranges_with_files([region]).unwrap();
        let queue = |index| {
            let at = index as u64 * QUEUE_BYTES;
            Queue { driver: Driver::new(at, ENTRIES), kick: event(), call: event(), at }
        };
        let queues = (0..queues).map(queue).collect();
        let (messages, socket) = FrontEnd::socket(path);
        Ok(FrontEnd { messages, socket, memory, file, queues, features: 0 })
    }

    fn socket(path: &Path) -> (Frontend, UnixStream) {
        let socket = UnixStream::connect(path).unwrap();
        (Frontend::from_stream(socket.try_clone().unwrap(), 64), socket)
    }

    /// Ends the connection, and makes a new one while the guest goes on.
    pub(super) fn connect_again(&mut self, path: &Path) {
        (self.messages, self.socket) = FrontEnd::socket(path);
    }

    /// Whether the other side has ended the connection, within a time.
    pub(super) fn has_ended(&self, ms: i64) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let time = Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
        poll(&mut polled, Some(&time)).unwrap() > 0
    }

    /// Connects again while the guest goes on, and has its queues run from where they stand.
    pub(super) fn reconnect(&mut self, path: &Path, bases: &[u16]) -> Result<()> {
        self.connect_again(path);
        self.go(Step::Memory)?;
        (0..bases.len()).try_for_each(|index| self.place_rings(index, bases[index]))?;
        [Step::Calls, Step::Kicks, Step::Enabled].into_iter().try_for_each(|step| self.step(step))
    }

    /// Where each queue stands, as the used rings say.
    pub(super) fn used(&self) -> Vec<u16> {
        let used = |queue: &Queue| self.memory.read_obj(GuestAddress(queue.driver.used + 2));
        self.queues.iter().map(|queue| used(queue).unwrap()).collect()
    }

    /// Makes all steps up to this one.
    pub(super) fn go(&mut self, last: Step) -> Result<()> {
        STEPS.iter().filter(|step| **step <= last).try_for_each(|step| self.step(*step))
    }

    fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Connected => Ok(()),
            Step::Features => {
                self.messages.set_owner().unwrap();
                self.features = self.messages.get_features()?;
                self.messages.set_features(self.features)
            }
            Step::ProtocolFeatures => {
                let offered = self.messages.get_protocol_features()?;
                let wanted = VhostUserProtocolFeatures::MQ
                    | VhostUserProtocolFeatures::CONFIG
                    | VhostUserProtocolFeatures::REPLY_ACK;
                assert_eq!(offered, wanted);
                self.messages.set_protocol_features(wanted)?;
                // From now on each message is answered.
                self.messages.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                assert_eq!(self.messages.get_queue_num()?, 64);
                Ok(())
            }
            Step::Config => self.config().map(|_| ()),
            Step::Memory => self.share(MEMORY_BYTES),
            Step::Rings => (0..self.queues.len()).try_for_each(|index| self.place_rings(index, 0)),
            Step::Calls => {
                self.each(|messages, index, queue| messages.set_vring_call(index, &queue.call))
            }
            Step::Kicks => {
                self.each(|messages, index, queue| messages.set_vring_kick(index, &queue.kick))
            }
            Step::Enabled => self.enable(true),
            Step::Offered => {
                self.offer(0, 0, 0, 4096);
                Ok(())
            }
            Step::Served => {
                assert_eq!(self.wait(0), 0);
                Ok(())
            }
        }
    }

    fn each(&self, tell: impl Fn(&Frontend, usize, &Queue) -> Result<()>) -> Result<()> {
        let mut queues = self.queues.iter().enumerate();
        queues.try_for_each(|(index, queue)| tell(&self.messages, index, queue))
    }

    /// Sends the map of the memory.
    pub(super) fn share(&self, bytes: u64) -> Result<()> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: bytes,
            userspace_addr: FRONT_END,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.messages.set_mem_table(&[region]).map(|_| ())
    }

    /// Says where the rings of a queue are, and how far the available one was served.
    pub(super) fn place_rings(&self, index: usize, base: u16) -> Result<()> {
        let driver = &self.queues[index].driver;
        let places = VringConfigData {
            queue_max_size: ENTRIES,
            queue_size: ENTRIES,
            flags: 0,
            desc_table_addr: FRONT_END + driver.descriptors,
            used_ring_addr: FRONT_END + driver.used,
            avail_ring_addr: FRONT_END + driver.available,
            log_addr: None,
        };
        self.messages.set_vring_num(index, ENTRIES)?;
        self.messages.set_vring_base(index, base)?;
        self.messages.set_vring_addr(index, &places)
    }

    pub(super) fn enable(&mut self, is_enabled: bool) -> Result<()> {
        let count = self.queues.len();
        (0..count).try_for_each(|index| self.messages.set_vring_enable(index, is_enabled))
    }

    /// The size of the disk in sectors.
    pub(super) fn config(&mut self) -> Result<u64> {
        let (bytes, flags) = ([0; 60], VhostUserConfigFlags::WRITABLE);
        let (_, space) = self.messages.get_config(0, 60, flags, &bytes)?;
        Ok(u64::from_le_bytes(space[..8].try_into().unwrap()))
    }

    /// Where the data of a queue's requests are.
    fn data(&self, index: usize) -> u64 {
        self.queues[index].at + BUFFERS + 4096
    }

    /// Makes a request available and kicks; its data are at a fixed place of its queue.
    pub(super) fn offer(&mut self, index: usize, kind: u32, sector: u64, bytes: u32) {
        let (header_at, data) = (self.queues[index].at + BUFFERS, self.data(index));
        self.put(header_at, &header(kind, sector));
        self.put(header_at + 16, &[UNTOUCHED]);
        let is_read = matches!(kind, 0 | 8);
        let mut ranges = vec![(header_at, 16, false)];
        if bytes > 0 {
            ranges.push((data, bytes, is_read));
        }
        ranges.push((header_at + 16, 1, true));
        let queue = &mut self.queues[index];
        let table = queue.driver.descriptors;
        Driver::put(&self.memory, table, 0, &linked(&ranges, 0));
        queue.driver.offer(&self.memory, 0);
        queue.kick.write(1).unwrap();
    }

    /// Waits for the request of a queue, as its interrupt says. Returns the status.
    pub(super) fn wait(&mut self, index: usize) -> u8 {
        let status = self.queues[index].at + BUFFERS + 16;
        let queue = &mut self.queues[index];
        let began = monotonic_ns();
        loop {
            if queue.driver.take(&self.memory).is_some() {
                return self.memory.read_obj(GuestAddress(status)).unwrap();
            }
            assert!(monotonic_ns() - began < PATIENCE_NS, "queue {index} does not answer");
            // The first call is that of the start.
            if queue.call.read().is_err() {
                std::thread::yield_now();
            }
        }
    }

    pub(super) fn ask(&mut self, index: usize, kind: u32, sector: u64, bytes: u32) -> u8 {
        self.offer(index, kind, sector, bytes);
        self.wait(index)
    }

    pub(super) fn write(&mut self, index: usize, sector: u64, contents: &[u8]) -> u8 {
        self.put(self.data(index), contents);
        self.ask(index, 1, sector, u32::try_from(contents.len()).unwrap())
    }

    pub(super) fn read(&mut self, index: usize, sector: u64, bytes: usize) -> Vec<u8> {
        assert_eq!(self.ask(index, 0, sector, u32::try_from(bytes).unwrap()), 0);
        let mut found = vec![0; bytes];
        self.memory.read_slice(&mut found, GuestAddress(self.data(index))).unwrap();
        found
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }
}
