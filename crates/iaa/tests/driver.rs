//! The driver on modelled devices: what each event does to a unit, and to the figures.

mod common;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use common::{UNIT, World, compress, compress_one, decompress, queue, software, unit};
use zfolio_core::page::UnitOrder;
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{
    Answer, BATCH_MAX, Compressor, Corrupt, Decompressor, Job, Outcome, Unpack, Zcomp, conformance,
    software as codec,
};
use zfolio_iaa::layout::status;
use zfolio_iaa::model::{Faults, Model, Setup};
use zfolio_iaa::queues::{QUEUES_MAX, Refused};
use zfolio_iaa::{Codes, Iaa, Settings, WhenBusy};
use zfolio_sys::testing::in_child;

const ALWAYS: u16 = u16::MAX;

fn setup(faults: Faults) -> Setup {
    Setup { faults, ..Setup::default() }
}

fn quick() -> Settings {
    Settings { polls_max: 50, ..Settings::default() }
}

fn units(count: usize) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed());
    (0..count).map(|_| unit(&mut random, UNIT)).collect()
}

type Streams = (Box<dyn Compressor>, Box<dyn Decompressor>);

/// Compresses units and decompresses the results; returns whether the units have come back. All have to shrink.
fn come_back(streams: &mut Streams, units: &[Vec<u8>], between: fn()) -> bool {
    let places = || vec![vec![0xC3; units[0].len()]; units.len()];
    let mut dests = places();
    let answers = compress(&mut *streams.0, units, &mut dests, between);
    let packed: Vec<&[u8]> = answers
        .iter()
        .zip(&dests)
        .map(|(answer, dest)| match answer {
            Answer::Compressed(bytes) => &dest[..*bytes],
            other => panic!("{other:?}"),
        })
        .collect();
    let mut back = places();
    let results = decompress(&mut *streams.1, &packed, &mut back, between);
    results.iter().all(Result::is_ok) && back == units
}

fn zcomp(world: &World, codes: Codes, unit: usize) -> Zcomp {
    let order = UnitOrder::from_bytes(unit).expect("a unit's size");
    Zcomp::with_backend(&Iaa::new(&world.driver, codes), order, 1).expect("there is memory")
}

/// The units, compressed.
fn packed(codec: &Zcomp, units: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let sources: Vec<&[u8]> = units.iter().map(Vec::as_slice).collect();
    let mut packed = vec![Vec::new(); units.len()];
    codec.compress(0, &sources, &mut |elements| {
        for element in elements {
            let Outcome::Compressed(bytes) = element.outcome else { panic!("{element:?}") };
            packed[element.index] = bytes.to_vec();
        }
    });
    packed
}

/// The units, decompressed in batches.
fn unpacked(codec: &Zcomp, packed: &[Vec<u8>], unit: usize) -> Vec<Vec<u8>> {
    let mut places = vec![vec![0xC3; unit]; packed.len()];
    let mut jobs: Vec<Unpack<'_>> =
        packed.iter().zip(&mut places).map(|(from, to)| Unpack::new(from, to)).collect();
    codec.unpack(0, &mut jobs);
    assert!(jobs.iter().all(|job| job.result.is_ok()));
    places
}

/// Goal: the accelerator keeps the promises of a backend, and software reads what it writes and the other way round.
#[test]
fn the_driver_keeps_the_promises_of_a_backend() {
    for codes in [Codes::Fixed, Codes::Dynamic] {
        let settings = Settings { check_crc: true, ..Settings::default() };
        let world = World::new(settings, &[Setup::default(), Setup::default()]);
        let iaa = Iaa::new(&world.driver, codes);
        for unit in [UnitOrder::DEFAULT, UnitOrder::FOLIO] {
            let software = codec(&"deflate,window=12".parse().unwrap(), unit).unwrap();
            conformance::check(&iaa, &[unit]).unwrap();
            conformance::check_format(&iaa, &*software, &[unit]).unwrap();
            conformance::check_format(&*software, &iaa, &[unit]).unwrap();
        }
        assert!(world.driver.global_stats().total_comp_calls > 1000, "the device did the work");
        assert_eq!(world.driver.driver_stats().in_flight, 0);
    }
}

/// Goal: units written by the device are read by software and the other way round, in all modes and sizes, and the
/// device did the work. Method: 21 units, whose batches are not full, by the device and by `deflate,window=12`.
#[test]
fn device_and_software_read_each_other() {
    for (unit, is_sync) in [(UNIT, false), (UNIT, true), (65536, false)] {
        let mut random = Random::new(seed());
        let units: Vec<Vec<u8>> = (0..21).map(|_| common::unit(&mut random, unit)).collect();
        let order = UnitOrder::from_bytes(unit).expect("a unit's size");
        let software = Zcomp::new("deflate,window=12".parse().unwrap(), order, 1).unwrap();
        for codes in [Codes::Fixed, Codes::Dynamic] {
            let settings = Settings { is_sync, verify_compress: true, check_crc: true, ..quick() };
            let world = World::new(settings, &[Setup::default(), Setup::default()]);
            let device = zcomp(&world, codes, unit);
            let (by_device, by_software) = (packed(&device, &units), packed(&software, &units));
            let is_long = codes == Codes::Dynamic && unit > UNIT;
            assert_eq!(by_device == by_software, is_long, "long units have no header in one pass");
            for packed in [&by_device, &by_software] {
                assert!(unpacked(&software, packed, unit) == units);
                assert!(unpacked(&device, packed, unit) == units);
            }
            let stats = world.driver.global_stats();
            let by_software = if is_long { 21 } else { 0 };
            assert_eq!((stats.total_sw_comp_calls, stats.total_sw_decomp_calls), (by_software, 0));
            // Each compressed unit is decompressed to verify it, which is no call.
            let (compressed, verified) = (21 - by_software, 21 - by_software);
            assert_eq!(stats.total_comp_calls, compressed);
            assert_eq!(stats.total_decomp_calls, 42);
            let accepted = world.count(|counts| counts.accepted);
            assert_eq!(accepted, compressed + verified + 42);
            assert_eq!(world.driver.driver_stats().in_flight, 0);
        }
    }
}

#[test]
fn figures_have_the_kernels_form() {
    let world = World::new(quick(), &[Setup::default()]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let (answer, packed) = compress_one(&mut *stream, &units(1)[0]);
    assert_eq!(answer, Answer::Compressed(packed.len()));
    let bytes = packed.len();
    assert_eq!(
        world.driver.global_stats().to_string(),
        format!(
            "global stats:\n  total_comp_calls: 1\n  total_decomp_calls: 0\n  \
             total_sw_comp_calls: 0\n  total_sw_decomp_calls: 0\n  \
             total_comp_bytes_out: {bytes}\n  total_decomp_bytes_in: 0\n  \
             total_completion_einval_errors: 0\n  total_completion_timeout_errors: 0\n  \
             total_completion_comp_buf_overflow_errors: 0\n"
        )
    );
    assert_eq!(
        world.driver.wq_stats()[0].to_string(),
        format!(
            "iaa device:\n  id: 1\n  n_wqs: 1\n  comp_calls: 1\n  comp_bytes: {bytes}\n  \
             decomp_calls: 0\n  decomp_bytes: 0\n  wqs:\n    name: wq1.0\n    comp_calls: 1\n    \
             comp_bytes: {bytes}\n    decomp_calls: 0\n    decomp_bytes: 0\n\n"
        )
    );
}

/// Goal: the figures of a queue are what the kernel's would be: compressed bytes, once they have succeeded, and each
/// unit once. Method: a verified unit there and back; then the same where a page is missing every other time; then a
/// unit that does not shrink, and one whose decompression fails.
#[test]
fn queues_count_as_the_kernel_does() {
    let settings = Settings { verify_compress: true, ..quick() };
    let world = World::new(settings, &[Setup::default()]);
    let mut streams = (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
    let unit = &units(1)[0];
    let figures = || {
        let [device] = &world.driver.wq_stats()[..] else { panic!("there is one device") };
        let (wq, all) = (&device.wqs[0], world.driver.global_stats());
        let counted = [wq.comp_calls, wq.comp_bytes, wq.decomp_calls, wq.decomp_bytes];
        let comps = [all.total_comp_calls, all.total_comp_bytes_out];
        assert_eq!(counted[..2], comps);
        assert_eq!(counted[2..], [all.total_decomp_calls, all.total_decomp_bytes_in]);
        counted
    };
    let missing = || world.count(|counts| counts.faults[0]);
    let set = |faults| world.models[0].set_faults(faults);
    let mut packed = Vec::new();
    for round in 1..=4 {
        let answer;
        (answer, packed) = compress_one(&mut *streams.0, unit);
        assert_eq!(answer, Answer::Compressed(packed.len()));
        assert_eq!(streams.1.decompress(&packed, &mut [0; UNIT]), Ok(()));
        let bytes = u64::try_from(packed.len()).expect("a unit is short");
        assert_eq!(figures(), [round, round * bytes, round, round * bytes]);
        assert_eq!(missing() > 0, round > 1, "round {round}");
        set(Faults { page: 0x8000, ..Faults::default() });
    }
    let [_, comp_bytes, _, decomp_bytes] = figures();
    set(Faults::default());
    compress_one(&mut *streams.0, &Random::new(seed()).bytes(UNIT));
    assert_eq!(figures(), [5, comp_bytes, 4, decomp_bytes]);
    set(Faults { status: ALWAYS, ..Faults::default() });
    assert_eq!(streams.1.decompress(&packed, &mut [0; UNIT]), Ok(()));
    assert_eq!(figures(), [5, comp_bytes, 5, decomp_bytes]);
}

#[test]
fn noise_is_incompressible_and_no_error() {
    let world = World::new(quick(), &[Setup::default()]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let noise = Random::new(seed()).bytes(UNIT);
    assert_eq!(compress_one(&mut *stream, &noise).0, Answer::Incompressible);
    let stats = world.driver.global_stats();
    assert_eq!(stats.total_completion_comp_buf_overflow_errors, 1);
    assert_eq!((stats.total_sw_comp_calls, stats.total_completion_einval_errors), (0, 0));
}

/// Goal: a stream that is longer or shorter than the unit, or has bytes behind it, is no unit, whoever decompresses it.
#[test]
fn a_unit_of_another_length_is_corrupt() {
    let world = World::new(quick(), &[Setup::default()]);
    let (_, packed) = compress_one(&mut *world.compressor(Codes::Fixed, UNIT), &units(1)[0]);
    let mut stream = world.decompressor(UNIT);
    let trailing = [&packed[..], &[0]].concat();
    for (source, bytes) in [(&packed, UNIT - 1), (&packed, 100), (&trailing, UNIT)] {
        assert_eq!(stream.decompress(source, &mut vec![0; bytes]), Err(Corrupt), "{bytes}");
    }
    assert_eq!(stream.decompress(&packed[..packed.len() - 1], &mut [0; UNIT]), Err(Corrupt));
    let (_, packed) = compress_one(&mut *world.compressor(Codes::Fixed, UNIT), &units(1)[0][..600]);
    assert_eq!(stream.decompress(&packed, &mut [0; 601]), Err(Corrupt));
    assert_eq!(stream.decompress(&packed, &mut [0; 600]), Ok(()));
    assert_eq!(world.driver.global_stats().total_sw_decomp_calls, 5);
}

/// Goal: without room in time a compression is refused or done by software, as set, and a decompression is done by
/// software; both are counted.
#[test]
fn full_queues_end_as_configured() {
    let unit = &units(1)[0];
    let full = setup(Faults { full: ALWAYS, ..Faults::default() });
    for (when_busy, codes, tries) in
        [(WhenBusy::Reject, Codes::Fixed, 1000), (WhenBusy::Software, Codes::Dynamic, 2000)]
    {
        let world = World::new(Settings { when_busy, ..quick() }, std::slice::from_ref(&full));
        let (answer, packed) = compress_one(&mut *world.compressor(codes, UNIT), unit);
        let is_done = answer == Answer::Compressed(packed.len());
        assert_eq!(is_done, when_busy == WhenBusy::Software, "{answer:?}");
        let stats = world.driver.driver_stats();
        // A model that is always full still accepts one of 65536.
        assert_eq!((stats.busy_comps, stats.full_retries), (1, tries));
        assert_eq!(world.driver.global_stats().total_sw_comp_calls, u64::from(is_done));
        if is_done {
            let mut place = vec![0; UNIT];
            assert!(world.decompressor(UNIT).decompress(&packed, &mut place).is_ok());
            assert!(place == *unit);
            let stats = world.driver.driver_stats();
            assert_eq!((stats.busy_decomps, stats.full_retries), (1, tries + 500));
        }
    }
}

/// Goal: a batch that is larger than its queue is done by the device all the same, in parts.
#[test]
fn a_batch_waits_for_room_in_a_short_queue() {
    for is_shared in [false, true] {
        let stepped = Setup { depth: 3, is_stepped: true, is_shared, ..Setup::default() };
        let world = World::new(Settings::default(), &[stepped]);
        let (units, mut dests) = (units(8), vec![vec![0; UNIT]; 8]);
        let mut stream = world.compressor(Codes::Fixed, UNIT);
        let step = || _ = world.models[0].step();
        let answers = compress(&mut *stream, &units, &mut dests, step);
        assert!(answers.iter().all(|answer| matches!(answer, Answer::Compressed(_))));
        assert_eq!(world.driver.global_stats().total_comp_calls, 8);
        assert_eq!(world.driver.driver_stats().in_flight, 0);
        assert_eq!(world.count(|counts| counts.overruns), 0);
    }
}

/// Goal: a job without a record ends in software; its buffers are not used until the record comes, and then they are.
/// A stream may end before that. Method: a device that is stepped by the test, and late by design.
#[test]
fn a_late_record_finds_its_memory() {
    let stepped = Setup { is_stepped: true, ..Setup::default() };
    let world = World::new(quick(), &[stepped]);
    let units = units(8);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let mut reader = software(UNIT);
    for (round, lost) in [(0, 8), (1, 8), (2, 16)] {
        let mut dests = vec![vec![0; UNIT]; 8];
        if round == 2 {
            // All records come; the slots are used again, and are lost again.
            while world.models[0].step() {}
        }
        let answers = compress(&mut *stream, &units, &mut dests, || {});
        for ((answer, dest), unit) in answers.iter().zip(&dests).zip(&units) {
            let Answer::Compressed(bytes) = answer else { panic!("{answer:?}") };
            let mut place = vec![0; UNIT];
            assert!(reader.decompress(&dest[..*bytes], &mut place) && place == *unit);
        }
        let stats = world.driver.global_stats();
        assert_eq!(stats.total_completion_timeout_errors, lost, "round {round}");
        assert_eq!(stats.total_sw_comp_calls, 8 * (round + 1));
        assert_eq!(world.driver.driver_stats().in_flight, 8);
    }
    assert_eq!(world.driver.driver_stats().late_records, 8);
    // Half of the records come before the stream ends. The device writes the others to memory that nobody has.
    (0..4).for_each(|_| assert!(world.models[0].step()));
    drop(stream);
    assert_eq!(world.driver.driver_stats().in_flight, 4);
    while world.models[0].step() {}
    assert_eq!(world.driver.driver_stats().in_flight, 4, "nobody looks for these any more");
}

/// Goal: missing pages are touched and the job is submitted again; a device that never stops ends in software.
#[test]
fn page_faults_are_resolved() {
    let unit = &units(1)[0];
    let sometimes = setup(Faults { page: 0x8000, ..Faults::default() });
    let world = World::new(quick(), &[sometimes]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    for _ in 0..100 {
        let (answer, packed) = compress_one(&mut *stream, unit);
        let mut place = vec![0; UNIT];
        assert_eq!(answer, Answer::Compressed(packed.len()));
        assert!(world.decompressor(UNIT).decompress(&packed, &mut place).is_ok());
        assert!(place == *unit);
    }
    let faults = world.count(|counts| counts.faults[0]);
    assert_eq!(world.driver.driver_stats().page_faults, faults);
    assert!(faults > 100, "{faults}");
    world.models[0].set_faults(Faults { page: ALWAYS, ..Faults::default() });
    let before = world.driver.global_stats();
    let accepted = || world.count(|counts| counts.accepted);
    let accepted_before = accepted();
    assert!(matches!(compress_one(&mut *stream, unit).0, Answer::Compressed(_)));
    let stats = world.driver.global_stats();
    assert_eq!(stats.total_sw_comp_calls, before.total_sw_comp_calls + 1);
    assert_eq!(stats.total_comp_calls, before.total_comp_calls + 1, "it is one unit");
    assert_eq!(accepted(), accepted_before + 11, "two pages, and 8, and one");
    // After the last one it was not submitted again.
    assert_eq!(world.driver.driver_stats().page_faults, faults + 10);
}

/// Goal: a device that is gone is not full: its figure does not grow.
#[test]
fn a_device_that_is_gone_is_not_counted_as_full() {
    let world = World::new(quick(), &[Setup::default()]);
    world.models[0].disable();
    let (answer, packed) = compress_one(&mut *world.compressor(Codes::Fixed, UNIT), &units(1)[0]);
    assert_eq!(answer, Answer::Compressed(packed.len()));
    let stats = world.driver.driver_stats();
    assert_eq!((stats.full_retries, stats.busy_comps, stats.wq_removed), (0, 0, 1));
    assert_eq!(world.driver.global_stats().total_sw_comp_calls, 1);
}

/// Goal: a device that writes other bytes than it says is found out by verification and checksum, and its units are
/// done by software.
#[test]
fn lies_are_found_out() {
    let settings = Settings { verify_compress: true, check_crc: true, ..quick() };
    let lying = setup(Faults { lie: 0x4000, ..Faults::default() });
    let world = World::new(settings, &[lying]);
    let mut compressor = world.compressor(Codes::Dynamic, UNIT);
    let mut decompressor = world.decompressor(UNIT);
    let mut reader = software(UNIT);
    for unit in units(300) {
        let (answer, packed) = compress_one(&mut *compressor, &unit);
        let mut place = vec![0; UNIT];
        if let Answer::Compressed(_) = answer {
            assert!(reader.decompress(&packed, &mut place) && place == unit);
            place.fill(0xC3);
            assert_eq!(decompressor.decompress(&packed, &mut place), Ok(()));
            assert!(place == unit);
        }
    }
    let stats = world.driver.driver_stats();
    assert!(stats.checksum_errors > 5 && stats.implausible_records > 50, "{stats}");
}

/// Goal: a device that is disabled in the middle of a batch costs time and no unit; the driver goes on with the others,
/// and uses one that comes.
#[test]
fn devices_vanish_and_come_in_the_middle_of_a_batch() {
    let stepped = Setup { is_stepped: true, ..Setup::default() };
    let mut world = World::new(quick(), &[stepped, Setup::default()]);
    let units = units(8);
    let mut dests = vec![vec![0; UNIT]; 8];
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let vanish = || world.models[0].disable();
    let answers = compress(&mut *stream, &units, &mut dests, vanish);
    assert!(answers.iter().all(|answer| matches!(answer, Answer::Compressed(_))));
    let stats = world.driver.global_stats();
    let lost = stats.total_completion_timeout_errors;
    assert!((1..8).contains(&lost) && stats.total_sw_comp_calls == lost, "{stats}");
    // The next try closes the queue. It stays in the list, since jobs of it were never answered.
    compress(&mut *stream, &units, &mut dests, || {});
    world.driver.refresh();
    assert_eq!(world.driver.wq_stats().len(), 2);
    world.models[1].disable();
    let before = world.driver.global_stats();
    compress(&mut *stream, &units, &mut dests, || {});
    let all_by_software = world.driver.global_stats().total_sw_comp_calls;
    assert_eq!(all_by_software - before.total_sw_comp_calls, 8);
    world.driver.refresh();
    assert_eq!(world.driver.wq_stats().len(), 1, "the second is idle, and gone");
    world.add(Setup::default());
    drop(stream);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    compress(&mut *stream, &units, &mut dests, || {});
    assert_eq!(world.driver.global_stats().total_sw_comp_calls, all_by_software);
}

/// Goal: a device that is reset in the middle of a batch costs time and no unit. It is used on, but for the places of
/// the jobs that it forgot: their records may still come.
#[test]
fn a_device_that_is_reset_goes_on() {
    let stepped = Setup { is_stepped: true, depth: 10, is_shared: false, ..Setup::default() };
    let world = World::new(quick(), &[stepped]);
    let units = units(8);
    let mut dests = vec![vec![0; UNIT]; 8];
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let answers = compress(&mut *stream, &units, &mut dests, || world.models[0].reset());
    assert!(answers.iter().all(|answer| matches!(answer, Answer::Compressed(_))));
    let stats = world.driver.global_stats();
    assert_eq!((stats.total_completion_timeout_errors, stats.total_sw_comp_calls), (8, 8));
    assert_eq!(world.count(|counts| counts.forgotten), 8);
    stream = world.compressor(Codes::Fixed, UNIT);
    compress(&mut *stream, &units, &mut dests, || _ = world.models[0].step());
    let stats = world.driver.global_stats();
    assert_eq!((stats.total_comp_calls, stats.total_sw_comp_calls), (16, 8), "two at a time");
    assert_eq!(world.driver.driver_stats().in_flight, 8);
    assert_eq!(world.count(|counts| counts.overruns), 0);
}

/// Goal: with many threads, dedicated queues that run at the same time are not overrun, devices come and go, and every
/// byte comes back. Method: a thread executes descriptors, another one removes and adds a device.
#[test]
fn threads_share_devices_that_work_at_the_same_time() {
    let setup = Setup { depth: 5, is_shared: false, is_stepped: true, ..Setup::default() };
    let shared = Setup { depth: 5, is_stepped: true, ..Setup::default() };
    let settings = Settings { comp_wqs_per_iaa: 1, polls_max: 1 << 30, ..Settings::default() };
    let world = World::new(settings, &[setup.clone(), shared]);
    let is_done = AtomicBool::new(false);
    let guest = Model::new(setup.clone());
    let work = |number: u64| {
        let mut random = Random::new(seed() + number);
        let mut streams = (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
        for round in 0..100 {
            let units: Vec<Vec<u8>> = (0..8).map(|_| unit(&mut random, 600)).collect();
            let is_same = come_back(&mut streams, &units, std::thread::yield_now);
            assert!(is_same, "{number}, {round}");
        }
    };
    std::thread::scope(|scope| {
        let device = scope.spawn(|| {
            while !is_done.load(Relaxed) {
                let models = world.models.iter().chain([&guest]);
                if models.filter(|model| model.step()).count() == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let changer = scope.spawn(|| {
            while !is_done.load(Relaxed) {
                drop(world.driver.add([queue(9, setup.depth, &guest)]));
                std::thread::yield_now();
                world.driver.remove(9);
                std::thread::yield_now();
            }
        });
        let workers = [0, 1, 2].map(|number| scope.spawn(move || work(number)));
        let results = workers.map(std::thread::ScopedJoinHandle::join);
        is_done.store(true, Relaxed);
        assert!(results.iter().all(Result::is_ok));
        device.join().unwrap();
        changer.join().unwrap();
    });
    assert_eq!(world.count(|counts| counts.overruns) + guest.counts().overruns, 0);
    assert_eq!(world.driver.driver_stats().in_flight, 0);
    assert!(world.driver.global_stats().total_comp_calls > 0);
}

/// Goal: a queue that is refused costs none of those behind it, and the caller is told. In a child of `fork` the
/// child's own queues take the names of the parent's, also of one at which the parent had given up jobs.
#[test]
fn a_queue_that_is_refused_costs_no_other() {
    let world = World::new(quick(), &[setup(Faults { never: ALWAYS, ..Faults::default() })]);
    let units = units(8);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    compress(&mut *stream, &units, &mut vec![vec![0; UNIT]; 8], || {});
    assert_eq!(world.driver.driver_stats().in_flight, 8);
    let is_good = in_child(|| {
        let models = [1, 1, 3].map(|device| (device, Model::new(Setup::default())));
        let opened = models.each_ref().map(|(device, model)| queue(*device, 128, model));
        let is_told = world.driver.add(opened) == Err(Refused::InUse { name: "wq1.0".to_owned() });
        let mut streams = (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
        let is_same = come_back(&mut streams, &units, || {});
        let [used, refused, also_used] = models.map(|(_, model)| model.counts().accepted);
        is_told && is_same && refused == 0 && used > 0 && also_used > 0
    });
    assert!(is_good);
}

/// Goal: a child of `fork` can make streams of software, whatever the other threads of its parent were doing. Method:
/// another thread makes such streams all the time.
#[test]
fn a_child_waits_for_no_thread_of_its_parent() {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !is_done.load(Relaxed) {
                software(UNIT);
            }
        });
        let is_good = (0..100).all(|_| {
            in_child(|| {
                software(UNIT);
                true
            })
        });
        is_done.store(true, Relaxed);
        other.join().unwrap();
        assert!(is_good);
    });
}

/// Goal: a child that is forked in the middle of a batch neither waits for the parent's jobs nor adds to them: software
/// ends its copy of the batch. In the parent nothing has happened.
#[test]
fn a_child_in_the_middle_of_a_batch_goes_on_by_software() {
    let stepped = Setup { depth: 2, is_stepped: true, ..Setup::default() };
    let world = World::new(Settings::default(), &[stepped]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let (units, mut dests) = (units(8), vec![vec![0; UNIT]; 8]);
    let mut jobs: [Job<'_>; BATCH_MAX] = Default::default();
    for ((job, unit), dest) in jobs.iter_mut().zip(&units).zip(&mut dests) {
        (job.source, job.dest) = (unit, dest);
    }
    let is_done = |jobs: &[Job<'_>]| {
        let mut reader = software(UNIT);
        let mut place = vec![0; UNIT];
        jobs.iter().zip(&units).all(|(job, unit)| {
            let Answer::Compressed(bytes) = job.answer else { return false };
            reader.decompress(&job.dest[..bytes], &mut place) && place == *unit
        })
    };
    let accepted = || world.count(|counts| counts.accepted);
    // SAFETY: until `poll` is true nothing else is called, with the same jobs; the child has copies of them.
    unsafe { stream.submit(&mut jobs) };
    let inherited = RefCell::new(Some((stream, jobs)));
    let is_good = in_child(|| {
        let (mut stream, mut jobs) = inherited.take().expect("the parent's");
        let is_at_once = stream.poll(&mut jobs) && is_done(&jobs);
        let stats = world.driver.global_stats();
        let by = [stats.total_sw_comp_calls, stats.total_completion_timeout_errors];
        let in_flight = world.driver.driver_stats().in_flight;
        drop(stream);
        is_at_once && (by, in_flight, accepted()) == ([8, 0], 0, 2)
    });
    assert!(is_good);
    let (mut stream, mut jobs) = inherited.take().expect("it is still here");
    while !stream.poll(&mut jobs) {
        world.models[0].step();
    }
    assert!(is_done(&jobs));
    assert_eq!((world.driver.global_stats().total_sw_comp_calls, accepted()), (0, 8));
}

/// Goal: where software is not to help a busy device, it still does the work of one that has taken all memory of a
/// stream and never answers: later there would be no more room than now.
#[test]
fn a_stream_without_buffers_is_not_refused_for_ever() {
    let settings = Settings { when_busy: WhenBusy::Reject, ..quick() };
    let world = World::new(settings, &[setup(Faults { never: ALWAYS, ..Faults::default() })]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    for (round, unit) in units(10).iter().enumerate() {
        let (answer, packed) = compress_one(&mut *stream, unit);
        assert_eq!(answer, Answer::Compressed(packed.len()), "{round}");
    }
    let stats = world.driver.global_stats();
    assert_eq!((stats.total_completion_timeout_errors, stats.total_sw_comp_calls), (8, 10));
}

/// Goal: a device that writes a stream which is longer than the unit has failed; the unit is not incompressible.
/// Method: the record of the verification says that its output does not fit.
#[test]
fn a_result_that_is_too_long_when_verified_is_no_overflow() {
    let settings = Settings { verify_compress: true, ..quick() };
    // Nothing is changed of the first job; of the second one the record, whose status comes first.
    let script = vec![0, 1, status::OUTPUT_OVERFLOW];
    let world = World::new(settings, &[Setup { script, ..Setup::default() }]);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    let (answer, packed) = compress_one(&mut *stream, &units(1)[0]);
    assert_eq!(answer, Answer::Compressed(packed.len()));
    let stats = world.driver.global_stats();
    assert_eq!(stats.total_sw_comp_calls, 1);
    assert_eq!(stats.total_completion_comp_buf_overflow_errors, 0);
    assert_eq!(stats.total_completion_einval_errors, 1);
}

/// Goal: a stream whose memory is all with a device that was disabled is the new device's when that is back.
#[test]
fn a_stream_is_used_again_when_its_device_is_back() {
    let world = World::new(quick(), &[setup(Faults { never: ALWAYS, ..Faults::default() })]);
    let mut streams = (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
    let units = units(8);
    assert!(come_back(&mut streams, &units, || {}));
    assert!(come_back(&mut streams, &units, || {}));
    let by_software = |world: &World| {
        let stats = world.driver.global_stats();
        (stats.total_sw_comp_calls, stats.total_sw_decomp_calls)
    };
    assert_eq!((by_software(&world), world.driver.driver_stats().in_flight), ((16, 16), 16));
    let disabled = "wq1.0".to_owned();
    world.driver.forget(&[disabled]);
    assert!(come_back(&mut streams, &units, || {}));
    assert_eq!(by_software(&world), (24, 24));
    let back = Model::new(Setup::default());
    world.driver.add([queue(1, 128, &back)]).expect("the name is free");
    for round in 1..=2 {
        assert!(come_back(&mut streams, &units, || {}));
        assert_eq!((by_software(&world), back.counts().accepted), ((24, 24), 16 * round));
    }
    // What was never answered has its memory still, but no place at a queue that is gone.
    assert_eq!(world.driver.driver_stats().in_flight, 0);
}

/// Goal: however often a device is reset with jobs in it, its queue has a place again. Once each reset used up a place
/// of the table, and after 64 of them there was no accelerator any more. Method: a device that never answers, more
/// often than there are places, by streams that last, and by streams that end before the reset and after it.
#[test]
fn resets_use_up_no_places() {
    let world = World::new(quick(), &[]);
    let units = units(8);
    let streams = || (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
    for lasts in [Some(true), Some(false), None] {
        let mut kept = streams();
        for round in 0..=QUEUES_MAX {
            let device = Model::new(setup(Faults { never: ALWAYS, ..Faults::default() }));
            let added = world.driver.add([queue(1, 128, &device)]);
            assert_eq!(added, Ok(()), "{lasts:?}, reset {round}");
            assert!(come_back(&mut kept, &units, || {}));
            assert!(device.counts().accepted > 0, "{lasts:?}, reset {round}: it is not used");
            if lasts == Some(false) {
                kept = streams();
            }
            world.driver.forget(&["wq1.0".to_owned()]);
            if lasts.is_none() {
                kept = streams();
            }
        }
    }
}

/// Goal: a slot that is lost at a queue in use keeps no other slot from being used again.
#[test]
fn slots_are_renewed_one_by_one() {
    let never = setup(Faults { never: ALWAYS, ..Faults::default() });
    let world = World::new(quick(), std::slice::from_ref(&never));
    let units = units(7);
    let mut stream = world.compressor(Codes::Fixed, UNIT);
    compress_one(&mut *stream, &units[0]);
    let sound = world.models[0].clone();
    sound.set_faults(Faults::default());
    let lossy = Model::new(never);
    world.driver.add([queue(3, 128, &lossy)]).expect("there is room");
    let mut batch = || {
        let before = sound.counts().accepted;
        let mut dests = vec![vec![0; UNIT]; 7];
        let answers = compress(&mut *stream, &units, &mut dests, || {});
        assert!(answers.iter().all(|answer| matches!(answer, Answer::Compressed(_))));
        sound.counts().accepted - before
    };
    let mut rounds = 0;
    while batch() > 0 {
        rounds += 1;
        assert!(rounds < 20, "the other device takes its part");
    }
    assert_eq!(lossy.counts().accepted, 7, "all slots are lost, one of them at the first device");
    world.driver.forget(&["wq3.0".to_owned()]);
    assert_eq!([batch(), batch()], [7, 7]);
    assert_eq!(world.driver.driver_stats().in_flight, 1);
}

/// Goal: a child of `fork` gives nothing to the parent's devices, not even a slot that the parent has given up;
/// software does its work, and its own devices once it has some. The parent goes on as if nothing had happened.
#[test]
fn a_child_goes_on_by_software_until_it_has_devices() {
    let world = World::new(quick(), &[setup(Faults { never: ALWAYS, ..Faults::default() })]);
    let parents = world.models[0].clone();
    let mut streams = (world.compressor(Codes::Fixed, UNIT), world.decompressor(UNIT));
    let units = units(8);
    let exchange = |streams: &mut Streams| come_back(streams, &units, || {});
    // All slots are lost, and so are the tickets of their jobs.
    assert!(exchange(&mut streams));
    assert_eq!(world.driver.driver_stats().in_flight, 16);
    parents.set_faults(Faults::default());
    let accepted = parents.counts().accepted;
    let inherited = RefCell::new(Some((world, streams)));
    let is_good = in_child(|| {
        let (mut world, mut streams) = inherited.take().expect("the parent's");
        let by_software = exchange(&mut streams);
        let driver = world.driver.driver_stats();
        parents.finish_late();
        let untouched = parents.counts().accepted == accepted && driver.in_flight == 0;
        world.add(setup(Faults::default()));
        let by_devices = exchange(&mut streams);
        let stats = world.driver.global_stats();
        let calls = [stats.total_comp_calls, stats.total_decomp_calls, stats.total_sw_comp_calls];
        let grandchild = in_child(|| {
            let is_same = exchange(&mut streams);
            drop((streams, world));
            is_same
        });
        by_software && untouched && by_devices && calls == [8, 8, 0] && grandchild
    });
    assert!(is_good);
    let (world, mut streams) = inherited.take().expect("it is still here");
    // The parent's slots are at its device as before.
    assert!(exchange(&mut streams));
    let stats = world.driver.global_stats();
    assert_eq!((stats.total_comp_calls, stats.total_sw_comp_calls), (8, 16));
    assert_eq!(world.driver.driver_stats().in_flight, 16);
}
