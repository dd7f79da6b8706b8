//! The accelerator of a run: the real driver of `zfolio-iaa` as the codec, on modelled devices.
//!
//! A device does its jobs at once, or when the thread of the devices has a turn. It answers late or never, misses
//! pages, lies, and says that it is full. At moments that the seed chooses it is reset, or disabled: the driver learns
//! of that by the next job, by a look, or by being told, and the device comes back, also at once and under the same
//! name.
//!
//! Two things of the driver would not be the same in each run, and are not used: how long `umwait` waits (streams wait
//! at a point of the schedule instead, and each poll counts as one), and the CPU (there is one).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::{
    Answer, BATCH_MAX, Backend, Compressor, Corrupt, Decompressor, Error, Job, Unpack,
};
use zfolio_iaa::model::{Faults, Model, Setup};
use zfolio_iaa::{Codes, Driver, Iaa, Settings, WhenBusy, WorkQueue};

use super::random::Random;
use super::schedule::{self, Schedule};

/// What the driver's software writes, and devices read.
pub(super) const FORMAT: &str = "deflate,window=12";

/// Something happens to a device in one of so many turns of their thread.
const CHANGE_IN: usize = 12;

/// Late records come in one of so many turns.
const LATE_IN: usize = 20;

/// All runs of this process.
pub(super) static PLAYED: Played = Played([const { AtomicU64::new(0) }; 6]);

/// Runs, jobs, jobs that were never answered, queues that were forgotten, jobs that were given up, and those of them
/// whose records came all the same.
pub(super) struct Played([AtomicU64; 6]);

impl fmt::Display for Played {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sums = self.0.each_ref().map(|sum| sum.load(Relaxed));
        let [runs, jobs, unanswered, forgotten, timeouts, late] = sums;
        write!(
            f,
            "{runs} runs, {jobs} jobs, {unanswered} never answered, {timeouts} given up of which {late} came late, \
             {forgotten} queues forgotten"
        )
    }
}

/// Where a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The driver uses its queue.
    There,
    /// The system has disabled it, and the driver may not know.
    Disabled,
    /// The driver has forgotten its queue: one of the same name may come.
    Forgotten,
}

#[derive(Debug)]
struct Device {
    /// Of its name.
    number: usize,
    model: Model,
    state: State,
}

/// The name of the queue of the device with this number.
fn queue_name(number: usize) -> String {
    format!("wq{number}.0")
}

/// What the thread of the devices has.
#[derive(Debug)]
struct Devices {
    all: Vec<Device>,
    /// Those whose places others have taken.
    past: Vec<Model>,
    forgotten: u64,
    /// Whether any of them lies.
    lies: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Accelerator {
    driver: Arc<Driver>,
    codes: Codes,
    schedule: Arc<Schedule>,
    /// The lock of nobody else: the thread of the devices, and the end of the run.
    devices: Mutex<1, Devices>,
    /// The number of the thread of the devices, once it runs.
    thread: AtomicUsize,
}

impl Accelerator {
    /// Some devices, and a driver for them.
    pub(super) fn new(
        schedule: &Arc<Schedule>,
        when_busy: WhenBusy,
        mut random: Random,
    ) -> Arc<Accelerator> {
        let lies = random.one_in(2);
        let settings = Settings {
            comp_wqs_per_iaa: 0,
            distribute_comps: random.one_in(2),
            distribute_decomps: random.one_in(2),
            is_sync: false,
            // The store finds a unit that was compressed to something else when it is too late.
            verify_compress: lies || random.one_in(4),
            check_crc: random.one_in(2),
            when_busy,
            polls_max: random.of(&[2, 30, 300]),
        };
        let accelerator = Accelerator {
            driver: Arc::new(Driver::new(settings, vec![0])),
            codes: random.of(&[Codes::Fixed, Codes::Fixed, Codes::Fixed, Codes::Dynamic]),
            schedule: Arc::clone(schedule),
            devices: Mutex::new(Devices { all: Vec::new(), past: Vec::new(), forgotten: 0, lies }),
            thread: AtomicUsize::new(usize::MAX),
        };
        let mut devices = accelerator.devices.lock();
        for place in 0..1 + random.below(3) {
            let number = 2 * place + 1;
            let model = accelerator.come(number, lies, &mut random);
            devices.all.push(Device { number, model, state: State::There });
        }
        drop(devices);
        Arc::new(accelerator)
    }

    /// A device comes, with one queue.
    fn come(&self, number: usize, lies: bool, random: &mut Random) -> Model {
        let depth = random.of(&[4, 64]);
        let mut faults = faults(random);
        faults.lie *= u16::from(lies);
        let model = Model::new(Setup {
            depth: usize::try_from(depth).expect("a short queue"),
            is_shared: random.one_in(2),
            is_stepped: random.one_in(2),
            faults,
            seed: random.next(),
            ..Setup::default()
        });
        let (name, portal) = (queue_name(number), Box::new(model.clone()));
        let queue = WorkQueue { name, device: number, package: 0, depth, portal };
        self.driver.add([queue]).expect("its name is free, and there are few");
        model
    }

    /// The life of the thread of the devices. Whoever gives them jobs wakes it.
    pub(super) fn live(&self, random: Random, is_over: impl Fn() -> bool) {
        self.thread.store(schedule::me(), Relaxed);
        schedule::take_turns(random, is_over, |random| self.turn(random));
    }

    fn turn(&self, random: &mut Random) {
        let devices = &mut *self.devices.lock();
        let jobs_max = random.of(&[1, 8, 64]);
        for device in &devices.all {
            let done = (0..jobs_max).take_while(|_| device.model.step()).count();
            if done < jobs_max && random.one_in(LATE_IN) {
                device.model.finish_late();
            }
        }
        if random.one_in(CHANGE_IN) {
            self.change(devices, random);
        }
    }

    /// Something happens to a device.
    fn change(&self, devices: &mut Devices, random: &mut Random) {
        let device = random.below(devices.all.len());
        let device = &mut devices.all[device];
        match device.state {
            State::There if random.one_in(3) => return device.model.reset(),
            State::There => {
                device.model.disable();
                device.state = State::Disabled;
                match random.below(3) {
                    0 => return,
                    1 => return self.driver.refresh(),
                    _ => {}
                }
                self.forget(device, &mut devices.forgotten);
            }
            State::Disabled => self.forget(device, &mut devices.forgotten),
            State::Forgotten => {}
        }
        if device.state == State::Forgotten && random.one_in(2) {
            let model = self.come(device.number, devices.lies, random);
            devices.past.push(std::mem::replace(&mut device.model, model));
            device.state = State::There;
        }
    }

    fn forget(&self, device: &mut Device, forgotten: &mut u64) {
        self.driver.forget(&[queue_name(device.number)]);
        device.state = State::Forgotten;
        *forgotten += 1;
    }

    /// Counts what happened in a run that is over. A dedicated queue was never given more than it holds.
    pub(super) fn end(&self) {
        let devices = self.devices.lock();
        let models = devices.all.iter().map(|device| &device.model).chain(&devices.past);
        let counts: Vec<_> = models.map(Model::counts).collect();
        assert!(counts.iter().all(|count| count.overruns == 0), "QUEUE-2: {counts:?}");
        let jobs = counts.iter().map(|count| count.accepted).sum();
        let unanswered = counts.iter().map(|count| count.forgotten + count.faults[3]).sum();
        let timeouts = self.driver.global_stats().total_completion_timeout_errors;
        let late = self.driver.driver_stats().late_records;
        let all = [1, jobs, unanswered, devices.forgotten, timeouts, late];
        PLAYED.0.iter().zip(all).for_each(|(sum, more)| _ = sum.fetch_add(more, Relaxed));
    }

    /// There are jobs.
    fn wake(&self) {
        let thread = self.thread.load(Relaxed);
        if thread != usize::MAX {
            self.schedule.wake(thread);
        }
    }
}

/// What goes wrong at a device: each kind in half of them.
fn faults(random: &mut Random) -> Faults {
    let mut chance = |most: u16| random.of(&[0, most]);
    Faults {
        full: chance(4000),
        page: chance(2000),
        status: chance(2000),
        late: chance(2000),
        never: chance(300),
        lie: chance(2000),
        gone: chance(100),
        reset: chance(300),
    }
}

/// The accelerator as a codec, whose streams wait at points of the schedule.
pub(super) struct Codec(pub(super) Arc<Accelerator>);

/// One direction of one stream.
struct Stream<T: ?Sized> {
    stream: Box<T>,
    accelerator: Arc<Accelerator>,
}

impl Codec {
    fn iaa(&self) -> Iaa {
        Iaa::new(&self.0.driver, self.0.codes)
    }
}

impl Backend for Codec {
    fn name(&self) -> &'static str {
        self.0.codes.name()
    }

    fn batch_max(&self) -> usize {
        BATCH_MAX
    }

    fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, Error> {
        let stream = self.iaa().compressor(unit_bytes)?;
        Ok(Box::new(Stream { stream, accelerator: Arc::clone(&self.0) }))
    }

    fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, Error> {
        let stream = self.iaa().decompressor(unit_bytes)?;
        Ok(Box::new(Stream { stream, accelerator: Arc::clone(&self.0) }))
    }
}

#[allow(unsafe_code, reason = "forwards a contract")]
impl Compressor for Stream<dyn Compressor> {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        let mut jobs = [Job::default()];
        (jobs[0].source, jobs[0].dest) = (source, dest);
        // SAFETY: until `poll` returns true only it and `wait` are called, with the same jobs.
        unsafe { self.submit(&mut jobs) };
        while !self.poll(&mut jobs) {
            self.wait();
        }
        jobs[0].answer
    }

    unsafe fn submit(&mut self, jobs: &mut [Job<'_>]) {
        // SAFETY: the caller's contract.
        unsafe { self.stream.submit(jobs) };
        self.accelerator.wake();
    }

    fn poll(&mut self, jobs: &mut [Job<'_>]) -> bool {
        self.stream.poll(jobs)
    }

    fn wait(&mut self) {
        schedule::point();
    }

    fn memory_bytes(&self) -> usize {
        self.stream.memory_bytes()
    }
}

#[allow(unsafe_code, reason = "forwards a contract")]
impl Decompressor for Stream<dyn Decompressor> {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let mut jobs = [Unpack::new(source, dest)];
        // SAFETY: until `poll` returns true only it and `wait` are called, with the same jobs.
        unsafe { self.submit(&mut jobs) };
        while !self.poll(&mut jobs) {
            self.wait();
        }
        jobs[0].result
    }

    fn decompress_by_software(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        self.stream.decompress_by_software(source, dest)
    }

    unsafe fn submit(&mut self, jobs: &mut [Unpack<'_>]) {
        // SAFETY: the caller's contract.
        unsafe { self.stream.submit(jobs) };
        self.accelerator.wake();
    }

    fn poll(&mut self, jobs: &mut [Unpack<'_>]) -> bool {
        self.stream.poll(jobs)
    }

    fn wait(&mut self) {
        schedule::point();
    }

    fn memory_bytes(&self) -> usize {
        self.stream.memory_bytes()
    }
}
