//! Makes a device, serves it, and takes it away.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use zfolio_sys::Errno;
use zfolio_sys::clock::monotonic_ns;
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::process;
use zfolio_sys::ublk::{
    ANY_NUMBER, Basic, DEPTH_MAX, DeviceInfo, Discard, FEATURE_IOCTL_ENCODE, STATE_DEAD, attribute,
};

use super::kernel::{Kernel, Linux, Queue, Unstarted};
use super::node::Node;
use super::{
    BLOCK_BYTES, QUEUE_BYTES, QUEUES_MAX, RANGE_BYTES_MAX, REQUEST_BYTES, REQUEST_BYTES_MAX, worker,
};
use crate::clients::Counts;
use crate::device::{Device, SECTOR_BYTES};

/// The upper half of the note of our devices; the lower half is the process that serves it.
const NOTE: u64 = 0x7A66_6F6C << 32;

/// The note of a device of this process.
fn note() -> u64 {
    NOTE | u64::from(process::id())
}

/// What a server is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The number of the device; `None`: the kernel chooses one.
    pub number: Option<u32>,
    /// So many queues, [`QUEUES_MAX`] at most, and one for each CPU at most.
    pub queues: u16,
    /// The time that each step of the end has. A file system on the device is written back in it.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Config {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let queues = u16::try_from(cpus).unwrap_or(QUEUES_MAX).min(QUEUES_MAX);
        Config { number: None, queues, drain: Duration::from_secs(10) }
    }
}

/// A device that is served. Dropping it takes the device away.
#[derive(Debug)]
pub struct Server(Life<Linux>);

impl Server {
    /// Makes a device of the kernel that is `device`.
    ///
    /// # Errors
    ///
    /// See [`Unstarted`].
    pub fn start(device: Arc<dyn Device>, config: Config) -> Result<Server, Unstarted> {
        Life::start(Linux::open()?, device, config).map(Server)
    }

    /// The block device.
    #[must_use]
    pub fn node(&self) -> Node {
        Node::of(self.0.number)
    }

    /// What it has counted: the kernel is its one client.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.0.counts()
    }

    /// Whether the device has gone though nobody has stopped the server: somebody else has deleted it.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }

    /// Who uses the block device, in words; see [`Node::user`]. `None` once nothing of it is served: a number that is
    /// free may be another program's device.
    #[must_use]
    pub fn user(&self) -> Option<String> {
        if self.0.counts().live == 0 { None } else { self.node().user() }
    }

    /// Takes the device away, once what is under way is done. Returns how many queues are not done in time; they may
    /// still write to the disk.
    pub fn stop(&mut self) -> usize {
        self.0.stop()
    }

    /// Waits for queues that were not done when [`Server::stop`] returned, for this time at most. Returns how many
    /// still are not.
    pub fn wait(&mut self, time: Duration) -> usize {
        self.0.wait(time)
    }
}

/// The threads of the queues.
#[derive(Debug)]
struct Threads {
    live: AtomicUsize,
    /// Rings when one has ended.
    ended: EventFd,
}

/// A thread of a queue, which is counted as long as it lives.
struct Counted(Arc<Threads>);

impl Counted {
    fn new(threads: &Arc<Threads>) -> Counted {
        threads.live.fetch_add(1, Relaxed);
        Counted(Arc::clone(threads))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `Life::live`.
        self.0.live.fetch_sub(1, Release);
        self.0.ended.ring();
    }
}

/// The life of a device; see the module `ublk`.
pub(super) struct Life<K: Kernel> {
    kernel: K,
    pub(super) number: u32,
    threads: Arc<Threads>,
    handles: Vec<JoinHandle<()>>,
    drain: Duration,
    is_stopped: bool,
    /// The stop took too long, so the device is to be deleted once its threads have ended.
    is_left: bool,
}

impl<K: Kernel> std::fmt::Debug for Life<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ublk").field("number", &self.number).finish_non_exhaustive()
    }
}

fn step(name: &'static str) -> impl Fn(Errno) -> Unstarted {
    move |error| Unstarted::System(name, error)
}

fn no_thread(error: &io::Error) -> Unstarted {
    Unstarted::System("a thread of a queue", Errno::from_io_error(error).unwrap_or(Errno::NOMEM))
}

impl<K: Kernel> Life<K> {
    pub(super) fn start(
        mut kernel: K,
        device: Arc<dyn Device>,
        config: Config,
    ) -> Result<Life<K>, Unstarted> {
        let features = kernel.features().map_err(step("GET_FEATURES"))?;
        if features & FEATURE_IOCTL_ENCODE == 0 {
            return Err(Unstarted::System("GET_FEATURES", Errno::OPNOTSUPP));
        }
        delete_left(&mut kernel, config.drain);
        let ended = EventFd::new().map_err(step("an event"))?;
        let mut info = wanted(&*device, config);
        kernel.add(&mut info).map_err(|error| match (error, config.number) {
            (Errno::EXIST, Some(number)) => Unstarted::Taken(number),
            (Errno::PERM, _) => Unstarted::Denied,
            (error, _) => Unstarted::System("ADD_DEV", error),
        })?;
        let threads = Arc::new(Threads { live: AtomicUsize::new(0), ended });
        let (number, handles) = (info.number, Vec::new());
        // From here on dropping it takes the device away (UB-4).
        let drain = config.drain;
        let (is_stopped, is_left) = (false, false);
        let mut life = Life { kernel, number, threads, handles, drain, is_stopped, is_left };
        life.serve(&info, &device)?;
        Ok(life)
    }

    /// Has all queues served, and the block device made.
    fn serve(&mut self, info: &DeviceInfo, device: &Arc<dyn Device>) -> Result<(), Unstarted> {
        let is_good = (1..=DEPTH_MAX).contains(&info.depth)
            && (1..=QUEUES_MAX).contains(&info.queues)
            && (BLOCK_BYTES..=QUEUE_BYTES).contains(&info.buffer_bytes);
        if !is_good {
            return Err(Unstarted::System("ADD_DEV", Errno::PROTO));
        }
        let (basic, discard) = params(&**device, info.buffer_bytes);
        let set = self.kernel.set_params(self.number, &basic, discard.as_ref());
        set.map_err(step("SET_PARAMS"))?;
        let queues = self.kernel.queues(info).map_err(step("/dev/ublkc"))?;
        let count = queues.len();
        let (report, reports) = mpsc::channel();
        for queue in queues {
            self.spawn(queue, Arc::clone(device), report.clone())?;
        }
        drop(report);
        for _ in 0..count {
            // A thread that has ended without a report has panicked.
            reports.recv().unwrap_or(Err(Errno::IO)).map_err(step("FETCH_REQ"))?;
        }
        self.kernel.start(self.number).map_err(step("START_DEV"))
    }

    /// Starts the thread of a queue. It reports how the first fetch went.
    fn spawn(
        &mut self,
        mut queue: K::Queue,
        device: Arc<dyn Device>,
        report: mpsc::Sender<Result<(), Errno>>,
    ) -> Result<(), Unstarted> {
        let counted = Counted::new(&self.threads);
        let thread = std::thread::Builder::new().name("ublk".to_owned());
        let spawned = thread.spawn(move || {
            let fetched = queue.fetch();
            report.send(fetched).ok();
            drop(report);
            if fetched.is_ok() {
                // An error ends the queue; the kernel then fails what is asked of the device.
                worker::run(&mut queue, &*device).ok();
            }
            // It has the device open.
            drop(queue);
            drop(counted);
        });
        self.handles.push(spawned.map_err(|error| no_thread(&error))?);
        Ok(())
    }

    pub(super) fn counts(&self) -> Counts {
        let live = self.threads.live.load(Relaxed);
        Counts { accepted: 1, live: u64::from(live > 0), ..Counts::default() }
    }

    pub(super) fn is_gone(&self) -> bool {
        !self.is_stopped && self.threads.live.load(Relaxed) < self.handles.len()
    }

    pub(super) fn stop(&mut self) -> usize {
        if !self.is_stopped {
            self.is_stopped = true;
            let is_ours = self.is_ours();
            let stopped =
                if is_ours { self.kernel.stop(self.number, self.drain_ms()) } else { Ok(()) };
            self.wait_for_threads(self.drain);
            // If it is still being stopped, a deletion would wait for that too: the end of this process ends it, and
            // the next server deletes what is left. When the threads have ended, it is nearly stopped.
            self.is_left = is_ours && stopped == Err(Errno::TIME) && self.live() > 0;
            if is_ours && !self.is_left {
                self.delete();
            }
        }
        self.live()
    }

    pub(super) fn wait(&mut self, time: Duration) -> usize {
        self.wait_for_threads(time);
        if self.is_left && self.live() == 0 {
            self.is_left = false;
            self.delete();
        }
        self.live()
    }

    fn live(&self) -> usize {
        // Acquire: pairs with the Release of `Counted`, so what the threads have written is there when none is left.
        self.threads.live.load(Acquire)
    }

    fn drain_ms(&self) -> u64 {
        u64::try_from(self.drain.as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether the device of this number is still ours. If somebody else has deleted ours, the kernel gives the number
    /// to the next one.
    fn is_ours(&mut self) -> bool {
        match self.kernel.info(self.number) {
            Ok(info) => info.note == note(),
            Err(error) => error != Errno::NODEV,
        }
    }

    fn delete(&mut self) {
        if self.is_ours() {
            self.kernel.delete(self.number, self.drain_ms()).ok();
        }
    }

    /// Waits until all threads have ended, for this time at most.
    fn wait_for_threads(&mut self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let deadline_ns = monotonic_ns().saturating_add(time_ns);
        while self.live() > 0 {
            let left_ms = deadline_ns.saturating_sub(monotonic_ns()).div_ceil(1_000_000);
            if left_ms == 0 {
                return;
            }
            if self.threads.ended.wait(u16::try_from(left_ms).unwrap_or(u16::MAX)) {
                self.threads.ended.clear();
            }
        }
        // They do nothing any more. One that has panicked has said so.
        self.handles.drain(..).for_each(|handle| _ = handle.join().is_ok());
    }
}

impl<K: Kernel> Drop for Life<K> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The device that is asked for.
fn wanted(device: &dyn Device, config: Config) -> DeviceInfo {
    let buffer_bytes = device.preferred_bytes().clamp(REQUEST_BYTES, REQUEST_BYTES_MAX);
    let depth = u16::try_from(QUEUE_BYTES / buffer_bytes).expect("32 at most");
    DeviceInfo {
        queues: config.queues.clamp(1, QUEUES_MAX),
        depth,
        buffer_bytes,
        number: config.number.unwrap_or(ANY_NUMBER),
        flags: FEATURE_IOCTL_ENCODE,
        note: note(),
        ..DeviceInfo::default()
    }
}

/// What the kernel is told about a disk.
pub(super) fn params(device: &dyn Device, buffer_bytes: u32) -> (Basic, Option<Discard>) {
    let size_bytes = device.size_bytes();
    let unit = device.preferred_bytes().clamp(SECTOR_BYTES, REQUEST_BYTES_MAX);
    let shift = |bytes: u32| u8::try_from(bytes.ilog2()).expect("32 at most");
    let is_whole = unit >= BLOCK_BYTES && size_bytes % u64::from(BLOCK_BYTES) == 0;
    let logical = if is_whole { BLOCK_BYTES } else { SECTOR_BYTES };
    let read_only = if device.is_read_only() { attribute::READ_ONLY } else { 0 };
    let sectors_max = buffer_bytes / SECTOR_BYTES;
    let basic = Basic {
        attributes: attribute::VOLATILE_CACHE | attribute::FUA | read_only,
        logical_shift: shift(logical),
        physical_shift: shift(unit.min(BLOCK_BYTES).max(logical)),
        optimal_shift: shift(unit.max(logical)),
        minimal_shift: shift(unit.min(BLOCK_BYTES).max(logical)),
        sectors_max,
        // Requests end where buffers would, so that units are whole in them: the kernel cuts what is longer.
        chunk_sectors: if sectors_max.is_power_of_two() { sectors_max } else { 0 },
        sectors: size_bytes / u64::from(SECTOR_BYTES),
        boundary_mask: 0,
    };
    let range = RANGE_BYTES_MAX / SECTOR_BYTES;
    let discard = Discard {
        alignment_bytes: 0,
        granularity_bytes: unit.max(logical),
        sectors_max: range,
        zero_sectors_max: range,
        segments_max: 1,
        reserved: 0,
    };
    (basic, (!device.is_read_only()).then_some(discard))
}

/// Deletes the devices of servers whose processes were killed: their block devices are gone already (`UB-5`).
fn delete_left<K: Kernel>(kernel: &mut K, drain: Duration) {
    let milliseconds = u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
    for number in kernel.numbers() {
        let Ok(info) = kernel.info(number) else { continue };
        let process = u32::try_from(info.note & u64::from(u32::MAX)).expect("masked");
        let is_ours = info.note >> 32 == NOTE >> 32;
        let is_left = is_ours && info.state == STATE_DEAD && !kernel.lives(process);
        // A process of another PID namespace, which is not known here, has it open.
        if is_left && !kernel.is_served(number) {
            kernel.delete(number, milliseconds).ok();
        }
    }
}
