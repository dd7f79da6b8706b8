//! What the messages of a front end say, and the queues that run.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::fs::FileType;
use rustix::net::Shutdown;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandler};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::GuestAddress;
use zfolio_core::sync::Mutex;

use super::features;
use super::marks::Marks;
use super::memory::Memory;
use super::ring::{Place, Ring, Stop, join};
use super::worker::Worker;
use super::{QUEUE_ENTRIES_MAX, QUEUES_MAX};
use crate::device::Device;

/// The rank of a session's lock. Only its connection's thread takes it.
const RANK_SESSION: u8 = 1;

/// The front end negotiates [`protocol_features`], and enables each queue by a message.
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// See the module.
pub(super) struct Session {
    device: Arc<dyn Device>,
    name: String,
    /// The connection, which a broken queue ends.
    stream: Arc<UnixStream>,
    /// Where other connections have left their queues.
    marks: Arc<Marks>,
    state: Mutex<RANK_SESSION, State>,
}

struct State {
    /// What the driver has accepted.
    features: u64,
    memory: Option<Arc<Memory>>,
    queues: Vec<QueueState>,
    unknown: Option<Unknown>,
}

/// A queue that goes on where this disk has left none (`VU-7`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Unknown {
    queue: u16,
    next: u16,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unknown { queue, next } = self;
        write!(f, "queue {queue} goes on at request {next}")
    }
}

/// What the messages say of a queue.
#[derive(Default)]
struct QueueState {
    entries: u16,
    /// The places of descriptors, available and used ring, by the front end's addresses.
    places: Option<[u64; 3]>,
    /// The next entry of the available ring.
    next_available: u16,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    is_enabled: bool,
    /// It goes on with this disk: it has run in this connection, or has taken a mark.
    is_known: bool,
    running: Option<Running>,
}

/// A thread that serves a queue.
struct Running {
    stop: Arc<Stop>,
    /// Returns the next entry of the available ring.
    thread: JoinHandle<u16>,
}

fn refused<T>() -> Result<T> {
    Err(Error::InvalidParam)
}

fn failed(why: impl Into<io::Error>) -> Error {
    Error::ReqHandlerError(why.into())
}

/// Has the thread that waits for messages return. The front end notices nothing before the connection is closed, which
/// is once its queues have stopped: it reads from the used rings how far they have come.
pub(super) fn end_input(stream: &UnixStream) {
    // It fails if the front end is gone, and then there is nothing to end.
    rustix::net::shutdown(stream, Shutdown::Read).ok();
}

/// An event descriptor of a front end, made so that nobody waits for it.
fn event(file: File) -> Result<Arc<OwnedFd>> {
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    // Event descriptors have no type, as others without a name. Files, sockets and pipes are refused: a write to one
    // of them does what a front end could do by itself, but a pipe without a reader raises a signal.
    if FileType::from_raw_mode(stat.st_mode) != FileType::Unknown {
        return refused();
    }
    rustix::io::ioctl_fionbio(&file, true).map_err(failed)?;
    Ok(Arc::new(file.into()))
}

impl Session {
    pub(super) fn new(
        device: Arc<dyn Device>,
        name: &str,
        stream: Arc<UnixStream>,
        marks: Arc<Marks>,
    ) -> Session {
        let queues = (0..QUEUES_MAX).map(|_| QueueState::default()).collect();
        let state = State { features: 0, memory: None, queues, unknown: None };
        Session { device, name: name.to_owned(), stream, marks, state: Mutex::new(state) }
    }

    /// Stops all queues at the end of the connection: none of them touches the guest's memory any more. They leave
    /// their marks. Returns what the front end was refused for.
    pub(super) fn stop(&self) -> Option<Unknown> {
        let mut state = self.state.lock();
        state.stop_all();
        for (index, queue) in (0..).zip(&state.queues).filter(|(_, queue)| queue.is_known) {
            self.marks.leave(index, queue.next_available);
        }
        state.unknown
    }

    /// Changes a queue, which stands still meanwhile.
    fn change(
        &self,
        index: usize,
        change: impl FnOnce(&mut QueueState) -> Result<()>,
    ) -> Result<()> {
        let state = &mut *self.state.lock();
        let queue = state.queues.get_mut(index).ok_or(Error::InvalidParam)?;
        queue.stop();
        change(queue)?;
        self.start(state, index)
    }

    /// Changes what all queues depend on.
    fn change_all(&self, change: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        let state = &mut *self.state.lock();
        state.stop_all();
        change(state)?;
        (0..state.queues.len()).try_for_each(|index| self.start(state, index))
    }

    /// Starts a queue, if everything that it needs is there.
    fn start(&self, state: &mut State, index: usize) -> Result<()> {
        let features = state.features;
        let queue = &mut state.queues[index];
        let (Some(memory), Some(places), Some(kick)) = (&state.memory, queue.places, &queue.kick)
        else {
            return Ok(());
        };
        let is_enabled = queue.is_enabled || features & PROTOCOL_FEATURES == 0;
        if !is_enabled || queue.entries == 0 {
            return Ok(());
        }
        let rings = queue.rings(memory, places, features)?;
        let through = features::writes_through(features);
        let worker = Worker::new(Arc::clone(&self.device), &self.name, through).map_err(failed)?;
        let mut ring = Ring { queue: rings, worker };
        let stop = Arc::new(Stop::new().map_err(failed)?);
        let place = Place {
            memory: Arc::clone(memory),
            kick: Arc::clone(kick),
            call: queue.call.clone(),
            stop: Arc::clone(&stop),
        };
        let stream = Arc::clone(&self.stream);
        let thread = std::thread::Builder::new().name(format!("vhost-queue-{index}"));
        let thread = thread.spawn(move || {
            if place.run(&mut ring).is_err() {
                // The connection's thread finds out.
                end_input(&stream);
            }
            ring.queue.next_avail()
        });
        queue.running = Some(Running { stop, thread: thread.map_err(failed)? });
        queue.is_known = true;
        Ok(())
    }
}

impl State {
    fn stop_all(&mut self) {
        // All of them are told first, so that the waits for their requests overlap.
        for running in self.queues.iter().filter_map(|queue| queue.running.as_ref()) {
            running.stop.set();
        }
        self.queues.iter_mut().for_each(QueueState::stop);
    }
}

impl QueueState {
    /// Waits until the request that is under way is done.
    fn stop(&mut self) {
        if let Some(Running { stop, thread }) = self.running.take() {
            stop.set();
            // It can only have panicked, and then its requests stay as they are.
            self.next_available = join(thread, self.call.as_deref()).unwrap_or(self.next_available);
        }
    }

    /// The rings, at their places in the guest's memory.
    fn rings(&self, memory: &Memory, places: [u64; 3], features: u64) -> Result<Queue> {
        let mut queue = Queue::new(QUEUE_ENTRIES_MAX).map_err(|_| Error::InvalidParam)?;
        let place = |at: u64| memory.guest_address(at).map(GuestAddress).ok_or(Error::InvalidParam);
        let [descriptors, available, used] = places;
        queue
            .try_set_size(self.entries)
            .and(queue.try_set_desc_table_address(place(descriptors)?))
            .and(queue.try_set_avail_ring_address(place(available)?))
            .and(queue.try_set_used_ring_address(place(used)?))
            .map_err(|_| Error::InvalidParam)?;
        queue.set_event_idx(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        queue.set_next_avail(self.next_available);
        queue.set_ready(true);
        if !queue.is_valid(memory.guest()) {
            return refused();
        }
        // The used ring says itself how far it is, after a restart of the guest as well as after one of this queue.
        let used = queue.used_idx(memory.guest(), std::sync::atomic::Ordering::Acquire);
        queue.set_next_used(used.map_err(|_| Error::InvalidParam)?.0);
        Ok(queue)
    }
}

/// What is offered besides the features of the device. The crate answers `REPLY_ACK` by itself.
fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
}

/// Every error ends the connection.
impl VhostUserBackendReqHandler for Session {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        // The text recommends no more than this, since front ends meant different things by it.
        let state = &mut *self.state.lock();
        state.stop_all();
        state.queues.iter_mut().for_each(|queue| queue.is_enabled = false);
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        self.reset_owner()
    }

    fn get_features(&self) -> Result<u64> {
        Ok(features::offered(&*self.device) | PROTOCOL_FEATURES)
    }

    fn set_features(&self, features: u64) -> Result<()> {
        if features & !self.get_features()? != 0 {
            return refused();
        }
        self.change_all(|state| {
            state.features = features;
            Ok(())
        })
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let memory = Arc::new(Memory::map(regions, files)?);
        self.change_all(|state| {
            state.memory = Some(memory);
            Ok(())
        })?;
        Ok(None)
    }

    fn set_vring_num(&self, index: u32, entries: u32) -> Result<()> {
        let good = u16::try_from(entries).ok();
        let good =
            good.filter(|entries| *entries <= QUEUE_ENTRIES_MAX && entries.is_power_of_two());
        let entries = good.ok_or(Error::InvalidParam)?;
        self.change(index as usize, |queue| {
            queue.entries = entries;
            Ok(())
        })
    }

    fn set_vring_addr(
        &self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.change(index as usize, |queue| {
            queue.places = Some([descriptors, available, used]);
            Ok(())
        })
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        let next = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        let state = &mut *self.state.lock();
        let (place, number) = (index as usize, u16::try_from(index).unwrap_or(u16::MAX));
        let queue = state.queues.get_mut(place).ok_or(Error::InvalidParam)?;
        queue.stop();
        if !queue.is_known && !self.marks.wait_for(number, next) {
            state.unknown = Some(Unknown { queue: number, next });
            return refused();
        }
        queue.is_known |= next != 0;
        queue.next_available = next;
        self.start(state, place)
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let state = &mut *self.state.lock();
        let queue = state.queues.get_mut(index as usize).ok_or(Error::InvalidParam)?;
        queue.stop();
        (queue.kick, queue.call) = (None, None);
        Ok(VhostUserVringState::new(index, u32::from(queue.next_available)))
    }

    fn set_vring_kick(&self, index: u8, file: Option<File>) -> Result<()> {
        // Without a file the queue would have to be polled.
        let kick = event(file.ok_or(Error::InvalidParam)?)?;
        self.change(usize::from(index), |queue| {
            queue.kick = Some(kick);
            Ok(())
        })
    }

    fn set_vring_call(&self, index: u8, file: Option<File>) -> Result<()> {
        let call = file.map(event).transpose()?;
        self.change(usize::from(index), |queue| {
            queue.call = call;
            Ok(())
        })
    }

    fn set_vring_err(&self, _index: u8, _file: Option<File>) -> Result<()> {
        // An error ends the connection.
        Ok(())
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(protocol_features())
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        if features & !protocol_features().bits() != 0 { refused() } else { Ok(()) }
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(u64::from(QUEUES_MAX))
    }

    fn set_vring_enable(&self, index: u32, is_enabled: bool) -> Result<()> {
        self.change(index as usize, |queue| {
            queue.is_enabled = is_enabled;
            Ok(())
        })
    }

    fn get_config(&self, offset: u32, bytes: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Ok(features::config(&*self.device, offset, bytes))
    }

    fn set_config(&self, _offset: u32, _bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // There is nothing to set. A guest can have its front end send this at any time.
        Ok(())
    }

    fn set_gpu_socket(&self, _socket: GpuBackend) -> Result<()> {
        refused()
    }

    fn get_shared_object(&self, _object: VhostUserSharedMsg) -> Result<File> {
        refused()
    }

    fn get_inflight_fd(&self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        refused()
    }

    fn set_inflight_fd(&self, _: &VhostUserInflight, _: File) -> Result<()> {
        refused()
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        refused()
    }

    fn add_mem_region(
        &self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        refused()
    }

    fn remove_mem_region(&self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        refused()
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        refused()
    }

    fn check_device_state(&self) -> Result<()> {
        refused()
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        refused()
    }

    fn set_log_base(&self, _log: &VhostUserLog, _file: File) -> Result<()> {
        refused()
    }
}
