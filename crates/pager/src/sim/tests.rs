//! Runs seeds, in a child process: if the engine ends that process, this is a failure like any
//! other.

use std::os::unix::fs::FileExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::store::CodecId;
use zfolio_sys::{clock, cpu};

use super::accelerator;
use super::areas::Ground;
use super::program::Program;
use super::random::{Random, mixed};
use super::schedule::{self, Body, Trace};
use super::settings::{Damage, Settings};
use super::world::World;
use super::zram;
use crate::config::Mode;
use crate::fatal;

/// Seeds that every run begins with. Seeds that once failed are added here. Together they write to areas, return and
/// read, also what comes damaged: if they miss one of these after a change of the simulator, choose others.
const SEEDS: [u64; 7] = [1, 2, 3, 4, 1025, 97_393_126, 758_683_186];

/// One of so many seeds is run twice, to check that both runs are the same.
const TWICE: u64 = 8;

/// How long seeds are run by default, in processor time.
const SECONDS: u64 = 5;

/// How many seeds run for each kind of damage.
const DAMAGED_SEEDS: u32 = 24;

/// The file in which the child notes the seed that it runs.
const NOTE: &str = "ZFOLIO_SIMULATE_NOTE";

/// Set if stored data is to be damaged: `bits`, `decoder`, `disk` or `slots`.
const DAMAGE: &str = "ZFOLIO_SIMULATE_DAMAGE";

/// Set to `disk` or `pager` if each seed is to run only that.
const ONLY: &str = "ZFOLIO_SIMULATE_ONLY";

/// Units written to the backing, returned there, and read from it, in all runs of this process; how often the pool was
/// full, a budget used up, and a read tried again; slots that came damaged; runs on areas, and areas that were emptied
/// and replaced.
static SPILLED: [AtomicU64; 9] = [const { AtomicU64::new(0) }; 9];

/// The numbers of [`SPILLED`].
fn spilled() -> [u64; 9] {
    SPILLED.each_ref().map(|sum| sum.load(Relaxed))
}

/// A number from the environment.
fn from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// The engine's threads, as `Pager` starts them; instead of sleeping on a bell each waits for a
/// random time.
fn engine_threads(world: &World, seed: u64) -> Vec<Body<'_>> {
    let background = move |name: &str, stream: u64, turn: fn(&World, &mut Random)| -> Body<'_> {
        let random = Random::new(seed, stream);
        let is_over = || world.is_over();
        let life = move || schedule::take_turns(random, is_over, |random| turn(world, random));
        (name.to_owned(), Box::new(life))
    };
    let mut threads = vec![
        background("reclaimer", 8, |world, random| {
            let density = &world.engine.work.density;
            if density.has_choice() && random.one_in(4) {
                density.use_dense(random.one_in(2));
            }
            if random.one_in(8) {
                let codecs = world.engine.store.codecs();
                let codecs = codecs.filter(|(_, codec)| codec.unit() == world.settings.unit);
                let all: Vec<CodecId> = codecs.map(|(id, _)| id).collect();
                density.pin(if random.one_in(2) { None } else { Some(random.of(&all)) });
            }
            world.engine.reclaim_turn();
            if world.settings.proactive {
                world.engine.reclaim_ahead(random.below(40) as u64);
            }
        }),
        background("prefetch", 9, |world, _| while world.engine.prefetch_turn() {}),
    ];
    if world.areas.is_some() {
        threads.push(background("areas", 14, |world, random| {
            world.areas.iter().for_each(|areas| areas.turn(&world.engine, random));
        }));
    }
    if let Some(accelerator) = &world.accelerator {
        let life = move || accelerator.live(Random::new(seed, 19), || world.is_over());
        threads.push(("devices".to_owned(), Box::new(life)));
    }
    if world.settings.mode == Mode::Handler {
        threads.push(("handler".to_owned(), Box::new(|| handle(world))));
        let number = |index: usize| 20 + index as u64;
        threads.extend((0..world.settings.assistants).map(|index| {
            let turn = |world: &World, _: &mut Random| while world.engine.assist_turn() {};
            background(&format!("assistant{index}"), number(index), turn)
        }));
    }
    threads
}

/// The life of a handler, like `Engine::handle_faults`, without following the faulting thread.
fn handle(world: &World) {
    let mover = &world.engine.mover;
    while !world.is_over() {
        if mover.inbox.first().is_none() && mover.system.wait(world.engine.wait_ms(), None) {
            mover.answer_strangers();
        }
        if !world.engine.handle_turn(&mut |_| ()) {
            mover.system.pause();
        }
    }
}

/// Runs one seed: a disk and the pager, or what is wanted of them. Where stored data is damaged it is the pager's.
fn run(seed: u64, trace: bool) -> Result<[Trace; 2], String> {
    let (is_damaged, only) = (std::env::var_os(DAMAGE).is_some(), std::env::var(ONLY));
    let wants = |what| only.as_ref().map_or(true, |only| only == what);
    let none = Ok(Trace::default());
    let disk = if wants("disk") && !is_damaged { zram::run(seed, trace) } else { none.clone() }?;
    Ok([disk, if wants("pager") { run_pager(seed, trace) } else { none }?])
}

fn run_pager(seed: u64, trace: bool) -> Result<Trace, String> {
    let damage = match std::env::var(DAMAGE).as_deref() {
        Ok("bits") => Some(Damage::Bits),
        Ok("disk") => Some(Damage::Disk),
        Ok("slots") => Some(Damage::Slots),
        Ok(_) => Some(Damage::Decoder),
        Err(_) => None,
    };
    let world = World::new(seed, Settings::of(seed).with_damage(damage), trace);
    let schedule = std::sync::Arc::clone(&world.schedule);
    let mut threads = engine_threads(&world, seed);
    for thread in 0..world.settings.threads {
        let world = &world;
        let life = move || Program::new(world, seed, thread).live(thread == 0);
        threads.push((format!("program{thread}"), Box::new(life)));
    }
    if let Some(tree) = &world.tree {
        let world = &world;
        let life = move || tree.live(world, Random::new(seed, 10));
        threads.push(("supervisor".to_owned(), Box::new(life)));
    }
    let done = schedule.run(threads).map_err(|why| format!("{why}; {:?}", world.settings));
    if done.is_ok() {
        world.accelerator.iter().for_each(|accelerator| accelerator.end());
    }
    let spill = world.engine.store.spill_stats();
    let figures = world.engine.figures().snapshot();
    let (full, used_up) = (figures.pool_limit_hit, figures.write_budget_used_up);
    let on_areas = u64::from(world.areas.is_some());
    let of_areas = |what: fn(&Ground) -> u64| world.areas.as_deref().map_or(0, what);
    let replaced = of_areas(|areas| areas.replaced() as u64);
    let damaged = of_areas(Ground::damaged);
    let units = [spill.written, spill.returned, spill.read];
    let times = [full, used_up, figures.read_back_retry, damaged, on_areas, replaced];
    let all = units.into_iter().chain(times);
    for (sum, more) in SPILLED.iter().zip(all) {
        sum.fetch_add(more, Relaxed);
    }
    done
}

/// Goal: no byte is lost or wrong, whatever the kernel refuses and in whatever order threads run.
/// Method: many seeds in a child process, which notes each seed before its run.
#[test]
fn simulated_programs_find_their_bytes() {
    let (status, last) = run_child(&[]);
    assert!(status.success(), "{last} failed ({status})");
}

/// Goal: the program never gets bytes that changed in the pool. Method: bits of the pool flip until
/// the engine ends the process, as it must before the model sees a wrong byte.
#[test]
fn a_flipped_bit_of_the_pool_ends_the_process() {
    expect_end("bits");
}

/// Goal and method: the same with a codec that does not decompress a unit, or not to what it was.
#[test]
fn a_codec_that_cannot_decompress_ends_the_process() {
    expect_end("decoder");
}

/// Goal: the program never gets bytes that were not read, and does not wait for ever for a disk that fails for good.
/// Method: from some read on nothing can be read, until the engine ends the process.
#[test]
fn a_disk_that_stays_broken_ends_the_process() {
    expect_end("disk");
}

/// Goal: the program never gets bytes that the disk has changed. Method: bits flip on the disks, slots have the bytes
/// of others or those they had before, or a read finds the file shorter, until the engine ends the process.
#[test]
fn a_disk_with_other_bytes_ends_the_process() {
    expect_end("slots");
}

/// Runs seeds with this damage, each in a process, and expects that the engine ends it. Many seeds, since
/// damage can be noticed in several ways: it often cannot be decompressed at all.
fn expect_end(damage: &str) {
    let mut ended = 0;
    for seed in 0..DAMAGED_SEEDS {
        let (status, last) =
            run_child(&[(DAMAGE, damage), ("ZFOLIO_SIMULATE_SEED", &seed.to_string())]);
        let is_noticed = status.code() == Some(fatal::STATUS);
        assert!(is_noticed || status.success(), "{damage}, {last}");
        ended += u32::from(is_noticed);
    }
    assert!(
        ended >= DAMAGED_SEEDS / 4,
        "{damage}: {ended} of {DAMAGED_SEEDS} seeds met any damage"
    );
}

/// Runs seeds in a child; returns how the child ended, and a line about the seed that it ran last.
fn run_child(environment: &[(&str, &str)]) -> (ExitStatus, String) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
    let path = std::env::temp_dir().join(format!("zfolio-simulate-{process}-{count}"));
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", "sim::tests::runs_of_seeds", "--nocapture"]).env(NOTE, &path);
    child.envs(environment.iter().copied()).stderr(Stdio::inherit());
    // Of the child's output only the lines of runs_of_seeds() are shown.
    let output = child.output().expect("this program runs");
    let note = std::fs::read_to_string(&path).unwrap_or_default();
    std::fs::remove_file(&path).ok();
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with("simulated")).for_each(|line| println!("{line}"));
    let (seed, count) = note.trim().split_once(' ').unwrap_or_default();
    (output.status, format!("seed {seed}, after {count} seeds (again: make simulate SEED={seed})"))
}

/// The seeds to run: the one seed of the environment, or `SEEDS` and fresh ones; and the first
/// fresh seed.
fn seeds() -> (Box<dyn Iterator<Item = u64>>, u64) {
    if let Some(seed) = from_environment("ZFOLIO_SIMULATE_SEED") {
        return (Box::new(std::iter::once(seed)), seed);
    }
    let fresh = from_environment("ZFOLIO_SIMULATE_FROM").unwrap_or_else(|| {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO);
        mixed(u64::from(since.subsec_nanos()) ^ since.as_secs()) % 1_000_000_000
    });
    (Box::new(SEEDS.into_iter().chain(fresh..)), fresh)
}

/// What run_child() runs: many seeds, for some time. Without the child's environment it does
/// nothing.
#[test]
fn runs_of_seeds() {
    let Some(path) = std::env::var_os(NOTE) else { return };
    // Switching between threads that take turns is faster on one CPU.
    cpu::pin(cpu::current());
    let note = std::fs::File::create(path).unwrap();
    let trace = std::env::var_os("ZFOLIO_SIMULATE_TRACE").is_some();
    let seconds = from_environment("ZFOLIO_SIMULATE_SECONDS").unwrap_or(SECONDS);
    let (began, (seeds, fresh)) = (clock::process_ns(), seeds());
    let spent = || Duration::from_nanos(clock::process_ns() - began);
    let (mut count, mut points) = (0_u64, 0);
    for seed in seeds {
        note.write_all_at(format!("{seed} {count:<20}").as_bytes(), 0).unwrap();
        let done = run(seed, trace).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        if count % TWICE == 0 {
            assert_eq!(run(seed, false), Ok(done), "seed {seed} does not give the same run twice");
        }
        (count, points) = (count + 1, points + done.iter().map(|trace| trace.points).sum::<u64>());
        if count == SEEDS.len() as u64 && std::env::var(ONLY).map_or(true, |only| only != "disk") {
            let [written, returned, read, .., damaged, on_areas, _] = spilled();
            let met = [written, returned, read, damaged, on_areas];
            assert!(!met.contains(&0), "the first seeds no longer meet what they are for: {met:?}");
        }
        if spent() > Duration::from_secs(seconds) {
            break;
        }
    }
    let seconds = spent().as_secs_f64();
    let [written, returned, read, full, used_up, again, damaged, on_areas, replaced] = spilled();
    println!(
        "\nsimulated {count} seeds, from {fresh} on, {points} points, {written} units spilled, {returned} \
         returned and {read} read, {again} pauses before reads, {damaged} damaged slots read, {full} pools full and \
         {used_up} budgets used up, {on_areas} runs on areas, of which {replaced} were replaced, in {seconds:.1} s \
         of CPU time\n\
         simulated accelerators: {}\nsimulated disks: {}",
        accelerator::PLAYED,
        zram::PLAYED
    );
}

/// Goal: a run in which a thread waits for ever fails, and the failure names the thread.
#[test]
fn a_thread_that_waits_for_ever_is_found() {
    let schedule = schedule::Schedule::new(1, 1, false);
    let body: Body<'_> =
        ("sleeper".to_owned(), Box::new(|| schedule::wait("nothing".into(), None)));
    let failure = schedule.run(vec![body]).unwrap_err();
    assert!(failure.contains("sleeper waits for nothing"), "{failure}");
}
