//! Whole connections: a server, and front ends that come, go, and do wrong.

use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd};
use vhost::VhostBackend as _;
use zfolio_core::testing::{Random, seed};
use zfolio_sys::clock::monotonic_ns;

use super::frontend::{FrontEnd, MEMORY_BYTES, STEPS, Step};
use crate::address::Address;
use crate::device::Device;
use crate::listen::Listener;
use crate::testing::Memory;
use crate::vhost_user::guest::range;
use crate::vhost_user::ring::join;
use crate::vhost_user::{Config, GUEST_BYTES_MAX, Marks, Server};

const SIZE: u64 = 4 << 20;

/// A server at a path.
pub(super) struct Stage {
    pub(super) path: PathBuf,
    pub(super) server: Server,
    lines: mpsc::Receiver<String>,
}

impl Stage {
    pub(super) fn new(name: &str) -> Stage {
        Stage::of(name, Arc::new(Memory::new(SIZE)))
    }

    pub(super) fn of(name: &str, device: Arc<dyn Device>) -> Stage {
        Stage::with(name, device, Config::default(), Marks::default())
    }

    /// A disk that is not new.
    pub(super) fn going_on(name: &str, device: Arc<dyn Device>, marks: Marks) -> Stage {
        Stage::with(name, device, Config::default(), marks)
    }

    fn with(name: &str, device: Arc<dyn Device>, config: Config, marks: Marks) -> Stage {
        let path = std::env::temp_dir().join(format!("zfolio-vhost-{name}-{}", std::process::id()));
        let listeners = Listener::open(&Address::Unix(path.clone())).unwrap();
        let (sender, lines) = mpsc::channel();
        let report = Box::new(move |line: &str| sender.send(line.to_owned()).unwrap());
        let server = Server::start_with(listeners, device, name, config, marks, report).unwrap();
        Stage { path, server, lines }
    }

    /// The lines that were reported since the last call.
    pub(super) fn lines(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    fn front_end(&self) -> FrontEnd {
        FrontEnd::new(&self.path, 2)
    }

    /// Waits until this many connections are left.
    pub(super) fn wait_for(&self, count: u64) {
        let began = monotonic_ns();
        while self.server.counts().live != count {
            assert!(monotonic_ns() - began < 10_000_000_000, "{:?}", self.server.counts());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Goal: all kinds of requests, on two queues.
#[test]
fn requests_are_served() {
    let disk = Arc::new(Memory::new(SIZE));
    let stage = Stage::of("kinds", disk.clone());
    let mut front_end = stage.front_end();
    assert_eq!(front_end.config().unwrap(), SIZE / 512);
    for queue in [0, 1] {
        let contents: Vec<u8> = (0..64 << 10).map(|at: u32| (at * 7 / 8 % 251) as u8).collect();
        assert_eq!(front_end.write(queue, 100, &contents), 0);
        assert!(front_end.read(1 - queue, 100, contents.len()) == contents);
        assert_eq!(front_end.ask(queue, 4, 0, 0), 0);
        assert_eq!(front_end.read(queue, 0, 512), [0; 512]);
        for kind in [11, 13] {
            assert_eq!(front_end.write(queue, 7, &[3; 512]), 0);
            let memory = &front_end.memory;
            let data = vm_memory::GuestAddress((queue as u64) * (1 << 20) + (68 << 10));
            vm_memory::Bytes::write_slice(memory, &range(7, 1, 0), data).unwrap();
            assert_eq!(front_end.ask(queue, kind, 0, 16), 0);
            assert_eq!(front_end.read(queue, 7, 512), [0; 512]);
        }
        assert_eq!(front_end.ask(queue, 8, 0, 20), 0);
        assert_eq!(front_end.ask(queue, 99, 0, 0), 2);
    }
    assert_eq!(disk.flushes.load(std::sync::atomic::Ordering::Relaxed), 2);
}

/// Goal: queues that are busy at once see one disk. Method: a thread for each front end and queue, each with sectors
/// of its own.
#[test]
fn several_queues_and_front_ends_share_a_disk() {
    let stage = Stage::new("several");
    let seed = seed();
    std::thread::scope(|scope| {
        for index in 0..4_u64 {
            let path = &stage.path;
            scope.spawn(move || {
                let mut random = Random::new(seed + index);
                let mut front_end = FrontEnd::new(path, 2);
                let (first, mut model) = (index * 2048, vec![[0; 4096]; 64]);
                for _ in 0..300 {
                    let (block, queue) = (random.below(64), random.below(2));
                    let sector = first + 8 * block as u64;
                    if random.below(2) == 0 {
                        model[block] = [random.byte(); 4096];
                        assert_eq!(front_end.write(queue, sector, &model[block]), 0);
                    } else {
                        let found = front_end.read(queue, sector, 4096);
                        assert!(found == model[block], "seed {seed}, block {block}");
                    }
                }
            });
        }
    });
    stage.wait_for(0);
}

/// Goal: wherever a front end vanishes, the next one finds the disk. Method: each step, with the connection closed
/// behind it.
#[test]
fn a_front_end_that_comes_back_finds_the_disk() {
    let stage = Stage::new("again");
    let mut front_end = stage.front_end();
    assert_eq!(front_end.write(0, 8, &[7; 4096]), 0);
    drop(front_end);
    for last in STEPS {
        let mut front_end = FrontEnd::connect(&stage.path, 2).unwrap();
        front_end.go(last).unwrap();
        drop(front_end);
        let mut again = stage.front_end();
        assert!(again.read(1, 8, 4096) == [7; 4096], "behind {last:?}");
    }
    stage.wait_for(0);
    assert_eq!(stage.server.counts().accepted, 1 + 2 * STEPS.len() as u64);
}

/// Goal: a queue that is stopped says where it stood, and goes on from there; what changes while it runs loses no
/// request.
#[test]
fn a_queue_goes_on_where_it_stood() {
    let stage = Stage::new("stopped");
    let mut front_end = stage.front_end();
    for round in 1..=20_u16 {
        assert_eq!(front_end.write(0, 0, &[1; 512]), 0);
        // What a front end changes while its guest runs.
        front_end.offer(0, 0, 0, 512);
        match round % 4 {
            0 => front_end.messages.set_vring_call(0, &front_end.queues[0].call).unwrap(),
            1 => front_end.share(MEMORY_BYTES).unwrap(),
            2 => front_end.messages.set_features(front_end.features).unwrap(),
            _ => {
                front_end.enable(false).unwrap();
                front_end.enable(true).unwrap();
            }
        }
        assert_eq!(front_end.wait(0), 0, "round {round}");
        // As when its guest is started again.
        let base = front_end.messages.get_vring_base(0).unwrap();
        assert_eq!(base, 3 * u32::from(round) - 1);
        front_end.offer(0, 0, 0, 512);
        front_end.place_rings(0, u16::try_from(base).unwrap()).unwrap();
        let queue = &front_end.queues[0];
        front_end.messages.set_vring_call(0, &queue.call).unwrap();
        front_end.messages.set_vring_kick(0, &queue.kick).unwrap();
        assert_eq!(front_end.wait(0), 0, "round {round}: what waited");
    }
}

/// Goal: a front end that lies about its memory, its rings or its descriptors loses its connection; another one that
/// is there at the same time notices nothing.
#[test]
fn a_front_end_that_lies_is_left() {
    let stage = Stage::new("lies");
    let mut honest = stage.front_end();
    let is_left = |what: &str, lie: &dyn Fn(&mut FrontEnd) -> bool| {
        let mut liar = FrontEnd::connect(&stage.path, 1).unwrap();
        liar.go(Step::Kicks).unwrap();
        assert!(lie(&mut liar), "{what}: the message was accepted");
        stage.wait_for(1);
    };
    is_left("more memory than the file has", &|liar| liar.share(MEMORY_BYTES * 2).is_err());
    is_left("more memory than there may be", &|liar| liar.share(GUEST_BYTES_MAX + 4096).is_err());
    is_left("a ring that is too long", &|liar| liar.messages.set_vring_num(0, 2048).is_err());
    is_left("a ring of an odd length", &|liar| liar.messages.set_vring_num(0, 100).is_err());
    is_left("features that were not offered", &|liar| {
        liar.messages.set_features(u64::MAX).is_err()
    });
    is_left("rings outside of memory", &|liar| {
        liar.queues[0].driver.used += MEMORY_BYTES;
        liar.place_rings(0, 0).is_ok() && liar.enable(true).is_err()
    });
    is_left("rings that are not aligned", &|liar| {
        liar.queues[0].driver.descriptors += 1;
        liar.place_rings(0, 0).is_err()
    });
    is_left("a ring with too many chains", &|liar| {
        liar.enable(true).unwrap();
        liar.queues[0].driver.publish(&liar.memory, 5000);
        liar.queues[0].kick.write(1).is_ok()
    });
    is_left("memory that it takes away", &|liar| {
        liar.enable(true).unwrap();
        assert_eq!(liar.ask(0, 0, 0, 512), 0);
        rustix::fs::ftruncate(liar.file.as_fd(), 0).unwrap();
        liar.queues[0].kick.write(1).is_ok()
    });
    assert_eq!(honest.write(0, 0, &[5; 512]), 0);
    assert_eq!(honest.read(1, 0, 512), [5; 512]);
}

/// Goal: only event descriptors are taken for events. Method: the message is written by hand.
#[test]
fn a_file_is_no_event() {
    let stage = Stage::new("files");
    let (reader, _writer) = UnixStream::pair().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let event = zfolio_sys::eventfd::EventFd::new().unwrap();
    for (file, is_taken) in [(reader.as_fd(), false), (file.as_fd(), false), (event.file(), true)] {
        let client = UnixStream::connect(&stage.path).unwrap();
        // SET_VRING_CALL of queue 0, then GET_FEATURES, which is answered.
        let call = [[13, 1, 8].map(u32::to_le_bytes).concat(), vec![0; 8]].concat();
        let files = [file];
        let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let bytes = [std::io::IoSlice::new(&call)];
        rustix::net::sendmsg(&client, &bytes, &mut control, SendFlags::empty()).unwrap();
        (&client).write_all(&[1, 1, 0].map(u32::to_le_bytes).concat()).ok();
        let answered = std::io::Read::read(&mut &client, &mut [0; 20]).unwrap_or(0);
        assert_eq!(answered == 20, is_taken);
    }
}

/// Goal: clients that say nothing, half a message or noise keep nobody else waiting; more than there may be are sent
/// away; a stop ends them all, and removes the socket.
#[test]
fn idle_and_odd_clients_keep_nobody_waiting() {
    let config = Config { connections_max: 4, ..Config::default() };
    let mut stage = Stage::with("idle", Arc::new(Memory::new(SIZE)), config, Marks::default());
    let silent = UnixStream::connect(&stage.path).unwrap();
    let mut half = UnixStream::connect(&stage.path).unwrap();
    half.write_all(&[1, 0, 0, 0, 1]).unwrap();
    let mut noise = UnixStream::connect(&stage.path).unwrap();
    noise.write_all(&[0xff; 500]).ok();
    stage.wait_for(2);
    let mut front_end = stage.front_end();
    let _fourth = UnixStream::connect(&stage.path).unwrap();
    stage.wait_for(4);
    let mut fifth = UnixStream::connect(&stage.path).unwrap();
    assert_eq!(std::io::Read::read(&mut fifth, &mut [0; 1]).unwrap_or(0), 0, "it is sent away");
    assert_eq!(front_end.write(0, 0, &[1; 512]), 0);
    let began = monotonic_ns();
    assert_eq!(stage.server.stop(), 0);
    assert!(monotonic_ns() - began < 3_000_000_000);
    assert!(!stage.path.exists());
    assert!(front_end.config().is_err());
    drop((silent, half));
    assert!(UnixStream::connect(&stage.path).is_err());
}

/// Goal: a front end that never reads its replies keeps neither others nor the end of the server waiting.
#[test]
fn a_front_end_that_never_reads_waits_alone() {
    let config = Config { drain: Duration::from_millis(200), ..Config::default() };
    let mut stage = Stage::with("deaf", Arc::new(Memory::new(SIZE)), config, Marks::default());
    let mut deaf = UnixStream::connect(&stage.path).unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let questions = [1, 1, 0].map(u32::to_le_bytes).concat().repeat(1000);
    while deaf.write_all(&questions).is_ok() {}
    let mut front_end = stage.front_end();
    assert_eq!(front_end.write(0, 0, &[1; 512]), 0);
    assert!(stage.server.stop() <= 1);
    stage.wait_for(0);
    assert!(front_end.has_ended(10_000));
}

/// Goal: front ends that come and go leave no descriptor and no thread. Method: some that say nothing, and some that
/// vanish with a request under way.
#[test]
fn many_front_ends_in_turn_leave_nothing() {
    let stage = Stage::new("thousand");
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    stage.front_end().read(0, 0, 512);
    stage.wait_for(0);
    let before = files();
    for _ in 0..10_000 {
        drop(UnixStream::connect(&stage.path).unwrap());
    }
    for _ in 0..100 {
        let mut front_end = FrontEnd::new(&stage.path, 1);
        front_end.offer(0, 0, 0, 65536);
    }
    stage.wait_for(0);
    // Other tests of this process have descriptors too.
    assert!(files() < before + 200, "{before} descriptors before, {} now", files());
}

/// Goal: a front end that makes its event descriptors wait, and their counters full or empty, holds up nobody; its
/// queue goes on, and stops.
#[test]
fn event_descriptors_that_wait_hold_up_nobody() {
    let stage = Stage::new("waiting");
    let mut front_end = stage.front_end();
    let queue = &mut front_end.queues[0];
    while queue.call.read().is_ok() {}
    queue.call.write(u64::MAX - 1).unwrap();
    let here = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    for event in [&queue.call, &queue.kick] {
        let event = pidfd_getfd(&here, event.as_raw_fd(), PidfdGetfdFlags::empty()).unwrap();
        rustix::fs::fcntl_setfl(event, OFlags::empty()).unwrap();
    }
    for served in 1..4 {
        front_end.offer(0, 0, 0, 4096);
        let began = monotonic_ns();
        while front_end.used()[0] != served {
            assert!(monotonic_ns() - began < 10_000_000_000, "the queue does not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(front_end.messages.get_vring_base(0).unwrap(), 3);
    drop(front_end);
    stage.wait_for(0);
}

/// Goal: the thread of a queue ends also if the front end has filled the counter in the middle of a call. Method: a
/// thread that waits in `write`.
#[test]
fn a_call_that_waits_ends() {
    let call = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let other = rustix::io::dup(&call).unwrap();
    let waits = std::thread::spawn(move || rustix::io::write(&other, &1_u64.to_ne_bytes()));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waits.is_finished(), "the counter is full");
    assert_eq!(join(waits, Some(&call)).unwrap(), Ok(8));
}
