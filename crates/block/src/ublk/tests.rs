//! The front end against a kernel that the tests play.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use zfolio_core::sync::Mutex;
use zfolio_core::testing::{Random, seed};
use zfolio_sys::Errno;
use zfolio_sys::ublk::{
    Basic, DeviceInfo, Discard, Event, FEATURE_IOCTL_ENCODE, IoDescriptor, STATE_DEAD, attribute,
    operation,
};

use super::kernel::{Kernel, Queue, Unstarted, refusal};
use super::script::{play, play_requests};
use super::server::{Config, Life, params};
use super::{QUEUE_BYTES, REQUEST_BYTES_MAX};
use crate::device::Device;
use crate::testing::Memory;

/// What the kernel says to a queue.
enum Said {
    Request(u16, IoDescriptor, Vec<u8>),
    Gone,
}

/// What a queue has answered: the tag, the result, and the buffer.
type Answer = (u16, i32, Vec<u8>);

struct PlayedQueue {
    said: mpsc::Receiver<Said>,
    answers: mpsc::Sender<Answer>,
    depth: u16,
    descriptor: IoDescriptor,
    buffer: Vec<u8>,
    events: Vec<Event>,
    fetched: Result<(), Errno>,
}

impl Queue for PlayedQueue {
    fn depth(&self) -> u16 {
        self.depth
    }

    fn fetch(&mut self) -> Result<(), Errno> {
        self.fetched
    }

    fn wait(&mut self) -> Result<(), Errno> {
        match self.said.recv() {
            Ok(Said::Request(tag, descriptor, data)) => {
                self.descriptor = descriptor;
                self.buffer[..data.len()].copy_from_slice(&data);
                self.events.push(Event::Request(tag));
            }
            Ok(Said::Gone) | Err(_) => {
                self.events = (0..self.depth).map(|tag| Event::Failed(tag, Errno::NODEV)).collect();
            }
        }
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    fn request(&mut self, _: u16) -> (IoDescriptor, &mut [u8]) {
        (self.descriptor, &mut self.buffer)
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.answers.send((tag, result, self.buffer.clone())).ok();
    }
}

/// What the played kernel has.
#[derive(Default)]
struct State {
    log: Vec<String>,
    devices: BTreeMap<u32, DeviceInfo>,
    queues: Vec<mpsc::Sender<Said>>,
    answers: Option<mpsc::Receiver<Answer>>,
    params: Option<(Basic, Option<Discard>)>,
}

#[derive(Clone, Default)]
struct Played {
    state: Arc<Mutex<1, State>>,
    /// The command that fails, and with what.
    fails: Option<(&'static str, Errno)>,
    living: Vec<u32>,
    served: Vec<u32>,
    /// Which fetch fails, counted from 0.
    fetches: Arc<AtomicU32>,
}

impl Played {
    fn note(&self, command: &'static str, number: u32) -> Result<(), Errno> {
        self.state.lock().log.push(format!("{command} {number}"));
        match self.fails {
            Some((name, error)) if name == command => Err(error),
            _ => Ok(()),
        }
    }

    /// Asks a queue for something, and returns the result and the buffer.
    fn ask(&self, queue: usize, descriptor: IoDescriptor, data: &[u8]) -> (i32, Vec<u8>) {
        let state = self.state.lock();
        state.queues[queue].send(Said::Request(1, descriptor, data.to_vec())).unwrap();
        let answers = state.answers.as_ref().unwrap();
        let (tag, result, buffer) = answers.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(tag, 1);
        (result, buffer)
    }

    fn log(&self) -> String {
        self.state.lock().log.join(", ")
    }
}

impl Kernel for Played {
    type Queue = PlayedQueue;

    fn features(&mut self) -> Result<u64, Errno> {
        self.note("features", 0).map(|()| FEATURE_IOCTL_ENCODE)
    }

    fn add(&mut self, info: &mut DeviceInfo) -> Result<(), Errno> {
        self.note("add", info.number)?;
        info.number = if info.number == u32::MAX { 5 } else { info.number };
        // As on a machine with two CPUs.
        info.queues = info.queues.min(2);
        self.state.lock().devices.insert(info.number, *info);
        Ok(())
    }

    fn info(&mut self, number: u32) -> Result<DeviceInfo, Errno> {
        self.state.lock().devices.get(&number).copied().ok_or(Errno::NODEV)
    }

    fn set_params(
        &mut self,
        number: u32,
        basic: &Basic,
        discard: Option<&Discard>,
    ) -> Result<(), Errno> {
        self.note("params", number)?;
        self.state.lock().params = Some((*basic, discard.copied()));
        Ok(())
    }

    fn queues(&mut self, info: &DeviceInfo) -> Result<Vec<PlayedQueue>, Errno> {
        self.note("queues", info.number)?;
        let (answers, received) = mpsc::channel();
        let mut state = self.state.lock();
        state.answers = Some(received);
        let mut queue = |_| {
            let (say, said) = mpsc::channel();
            state.queues.push(say);
            let is_bad = self.fetches.fetch_add(1, Relaxed) == 1;
            let fetched = match self.fails {
                Some(("fetch", error)) if is_bad => Err(error),
                _ => Ok(()),
            };
            PlayedQueue {
                said,
                answers: answers.clone(),
                depth: info.depth,
                descriptor: IoDescriptor::default(),
                buffer: vec![0; info.buffer_bytes as usize],
                events: Vec::new(),
                fetched,
            }
        };
        Ok((0..info.queues).map(&mut queue).collect())
    }

    fn start(&mut self, number: u32) -> Result<(), Errno> {
        self.note("start", number)?;
        // It looks for partitions: queues are served meanwhile.
        let (result, _) = self.ask(0, request(operation::READ, 0, 8), &[]);
        assert_eq!(result, 4096);
        Ok(())
    }

    fn stop(&mut self, number: u32, _: u64) -> Result<(), Errno> {
        let noted = self.note("stop", number);
        if noted != Err(Errno::TIME) {
            self.state.lock().queues.drain(..).for_each(|queue| _ = queue.send(Said::Gone).is_ok());
        }
        noted
    }

    fn delete(&mut self, number: u32, _: u64) -> Result<(), Errno> {
        self.note("delete", number)?;
        self.state.lock().devices.remove(&number).map(|_| ()).ok_or(Errno::NODEV)
    }

    fn numbers(&self) -> Vec<u32> {
        self.state.lock().devices.keys().copied().collect()
    }

    fn lives(&self, process: u32) -> bool {
        self.living.contains(&process)
    }

    fn is_served(&self, number: u32) -> bool {
        self.served.contains(&number)
    }
}

fn request(operation: u8, sector: u64, sectors: u32) -> IoDescriptor {
    IoDescriptor { op_flags: operation.into(), sectors, sector, address: 0 }
}

fn config() -> Config {
    Config { number: None, queues: 3, drain: Duration::from_secs(20) }
}

fn disk() -> Arc<dyn Device> {
    Arc::new(Memory::new(1 << 20))
}

/// Goal: a device is made, served by as many queues as the kernel has made, and taken away, in the kernel's order.
#[test]
fn a_device_is_made_served_and_taken_away() {
    let kernel = Played::default();
    let disk = Arc::new(Memory::new(1 << 20));
    let mut life = Life::start(kernel.clone(), disk.clone(), config()).unwrap();
    assert_eq!(life.number, 5);
    assert_eq!((life.counts().live, life.is_gone()), (1, false));
    let (written, _) = kernel.ask(1, request(operation::WRITE, 16, 8), &[7; 4096]);
    let (read, contents) = kernel.ask(0, request(operation::READ, 16, 8), &[]);
    assert_eq!((written, read), (4096, 4096));
    assert!(contents[..4096] == [7; 4096]);
    let (outside, _) = kernel.ask(0, request(operation::READ, 2048, 8), &[]);
    assert_eq!(outside, -Errno::INVAL.raw_os_error());
    assert_eq!(disk.invalid.load(Relaxed), 1);
    assert_eq!(life.stop(), 0);
    assert_eq!((life.counts().live, life.is_gone()), (0, false));
    drop(life);
    let log = "features 0, add 4294967295, params 5, queues 5, start 5, stop 5, delete 5";
    assert_eq!(kernel.log(), log);
}

/// Goal: `UB-4`. Method: each step fails in turn; no device and no thread is left, and the step is named.
#[test]
fn whatever_fails_leaves_nothing() {
    for (step, named) in [
        ("features", "GET_FEATURES"),
        ("add", "ADD_DEV"),
        ("params", "SET_PARAMS"),
        ("queues", "/dev/ublkc"),
        ("fetch", "FETCH_REQ"),
        ("start", "START_DEV"),
    ] {
        let kernel = Played { fails: Some((step, Errno::NOMEM)), ..Played::default() };
        let error = Life::start(kernel.clone(), disk(), config()).unwrap_err();
        assert_eq!(error, Unstarted::System(named, Errno::NOMEM), "{step}");
        assert!(kernel.numbers().is_empty(), "{step}: {}", kernel.log());
        // Each thread had a sender, and has dropped it with its queue.
        let answers = kernel.state.lock().answers.take();
        let ended = answers.map(|answers| answers.try_iter().count());
        assert!(ended.unwrap_or(0) == 0, "{step}");
    }
}

/// Goal: errors that a user can do something about have their own lines.
#[test]
fn numbers_and_rights_are_told() {
    let chosen = Config { number: Some(3), ..config() };
    for (config, error, expected) in [
        (chosen, Errno::EXIST, Unstarted::Taken(3)),
        (config(), Errno::PERM, Unstarted::Denied),
        (config(), Errno::EXIST, Unstarted::System("ADD_DEV", Errno::EXIST)),
    ] {
        let kernel = Played { fails: Some(("add", error)), ..Played::default() };
        assert_eq!(Life::start(kernel, disk(), config).unwrap_err(), expected);
    }
    let line = Unstarted::Taken(3).to_string();
    assert_eq!(line, "/dev/ublkb3 is there already; accepted: another number, or auto");
}

/// Goal: a device that somebody else deletes is noticed, and its server ends in order.
#[test]
fn a_device_that_goes_is_noticed() {
    let kernel = Played::default();
    let mut life = Life::start(kernel.clone(), disk(), config()).unwrap();
    kernel.clone().stop(5, 0).unwrap();
    while !life.is_gone() {
        std::thread::yield_now();
    }
    assert_eq!(life.stop(), 0);
    assert!(kernel.log().ends_with("stop 5, stop 5, delete 5"), "{}", kernel.log());
}

/// Goal: a server whose device somebody else has deleted leaves the device alone that has the number now. It stopped
/// and deleted that one. Method: none, and those of another program and of another process, in its place.
#[test]
fn a_foreign_device_of_the_same_number_is_left_alone() {
    for note in [None, Some(0), Some(0x7A66_6F6C << 32)] {
        let kernel = Played::default();
        let mut life = Life::start(kernel.clone(), disk(), config()).unwrap();
        let mut others = kernel.clone();
        others.stop(5, 0).unwrap();
        others.delete(5, 0).unwrap();
        let device = note.map(|note| DeviceInfo { number: 5, note, ..DeviceInfo::default() });
        kernel.state.lock().devices.extend(device.map(|device| (5, device)));
        assert_eq!((life.stop(), life.wait(Duration::ZERO)), (0, 0));
        drop(life);
        assert_eq!(
            kernel.log().matches(" 5").count(),
            "params queues start stop delete".split(' ').count()
        );
        assert_eq!(kernel.numbers().len(), usize::from(note.is_some()));
    }
}

/// Goal: a stop that takes too long ends; the device is left to the next server, and threads are counted.
#[test]
fn a_stop_that_takes_too_long_is_left() {
    let kernel = Played { fails: Some(("stop", Errno::TIME)), ..Played::default() };
    let config = Config { drain: Duration::from_millis(30), ..config() };
    let mut life = Life::start(kernel.clone(), disk(), config).unwrap();
    assert_eq!(life.stop(), 2);
    assert_eq!(kernel.numbers(), [5]);
    assert!(kernel.log().ends_with("stop 5"), "{}", kernel.log());
}

/// Goal: whoever saves the disk can wait until no queue writes any more, also after a stop that took too long; and then
/// the device is deleted. Method: a kernel that goes on to write after its time.
#[test]
fn queues_that_take_longer_are_waited_for() {
    let kernel = Played { fails: Some(("stop", Errno::TIME)), ..Played::default() };
    let config = Config { drain: Duration::from_millis(1), ..config() };
    let mut life = Life::start(kernel.clone(), disk(), config).unwrap();
    assert_eq!((life.stop(), life.wait(Duration::from_millis(1))), (2, 2));
    let (written, _) = kernel.ask(1, request(operation::WRITE, 16, 8), &[7; 4096]);
    assert_eq!(written, 4096);
    kernel.state.lock().queues.drain(..).for_each(|queue| queue.send(Said::Gone).unwrap());
    assert_eq!(life.wait(Duration::from_secs(20)), 0);
    drop(life);
    assert!(kernel.log().ends_with("start 5, stop 5, delete 5"), "{}", kernel.log());
    assert!(kernel.numbers().is_empty());
}

/// Goal: `UB-5`. Method: devices of every kind; only one of ours that is dead and that nobody has is deleted.
#[test]
fn devices_of_dead_processes_are_deleted() {
    let ours = 0x7A66_6F6C << 32;
    let kernel = Played { living: vec![11], served: vec![4], ..Played::default() };
    let device = |number, note, state| DeviceInfo { number, note, state, ..DeviceInfo::default() };
    let devices = [
        device(0, ours | 10, STATE_DEAD),
        // Its process lives, and is about to start it.
        device(1, ours | 11, STATE_DEAD),
        // It is served.
        device(2, ours | 10, 1),
        // Of another program.
        device(3, 10, STATE_DEAD),
        // A process that is not known here has it open.
        device(4, ours | 10, STATE_DEAD),
    ];
    kernel.state.lock().devices.extend(devices.map(|device| (device.number, device)));
    let life = Life::start(kernel.clone(), disk(), config()).unwrap();
    assert_eq!(kernel.numbers(), [1, 2, 3, 4, 5]);
    drop(life);
    assert_eq!(kernel.numbers(), [1, 2, 3, 4]);
}

/// Goal: what the kernel is told fits the disk, and passes the checks of its driver. Method: every unit, and a disk
/// that is none of ours.
#[test]
fn a_disk_is_described() {
    for shift in 9..=21 {
        let unit = 1_u32 << shift;
        let disk = Memory::new(8 << 20).preferring(unit);
        let buffer_bytes = unit.clamp(256 << 10, REQUEST_BYTES_MAX);
        let (basic, discard) = params(&disk, buffer_bytes);
        let discard = discard.unwrap();
        assert_eq!(basic.logical_shift, if shift < 12 { 9 } else { 12 }, "{unit}");
        assert_eq!(basic.physical_shift, shift.min(12), "{unit}");
        assert_eq!(basic.optimal_shift, shift, "{unit}");
        assert_eq!((basic.sectors, basic.sectors_max), (16 << 10, buffer_bytes / 512));
        assert!(basic.logical_shift <= basic.physical_shift && basic.chunk_sectors >= 512);
        assert_eq!((discard.granularity_bytes, discard.segments_max), (unit, 1));
        let depth = QUEUE_BYTES / buffer_bytes;
        assert!((4..=32).contains(&depth), "UB-1: {depth}");
    }
    let (basic, discard) = params(&Memory::new(512 * 9).read_only(), 256 << 10);
    assert_eq!((basic.logical_shift, basic.sectors, discard), (9, 9, None));
    assert!(basic.attributes & attribute::READ_ONLY != 0);
}

/// Goal: contents as a naive disk has them, `UB-2` and `UB-3`, whatever the kernel asks for. Method: random scripts,
/// whose requests are mostly good ones.
#[test]
fn a_queue_agrees_with_a_naive_disk() {
    let seed = seed();
    let mut random = Random::new(seed);
    let mut done = 0;
    for _ in 0..60 {
        let length = 100 + random.below(3000);
        let (chosen, script) = (random.byte(), random.bytes(length));
        done += play_requests(chosen, &script);
    }
    assert!(done > 600, "seed {seed}: only {done} requests were carried out");
    play(&[]);
}

/// Goal: kernels that stop at a new device are not asked, and others are.
#[test]
fn kernels_that_stop_are_refused() {
    for refused in [
        "6.18.4",
        "6.18.5",
        "6.18.5+deb14-amd64",
        "6.18.4-arch1-1",
        "6.17.0-1015-azure",
        "6.17.0-1018-azure",
        "6.17.0-1017-aws",
    ] {
        let why = refusal(refused).unwrap_or_default();
        assert!(why.contains("NULL pointer") && why.contains("; accepted: "), "{refused}: {why}");
    }
    for good in [
        "6.18.6",
        "6.18.44",
        "6.18.40-1",
        "6.18.3",
        "6.12.95+deb12-cloud-amd64",
        "6.17.0-1014-azure",
        "6.17.0-1019-azure",
        "6.17.0-1015-aws",
        "6.17.0-1017-gcp",
        "16.18.4",
        "",
    ] {
        assert_eq!(refusal(good), None, "{good}");
    }
}
