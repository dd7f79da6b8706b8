//! Goal: a disk that was saved and loaded is the disk; a file that is not what was saved is refused, and so is a disk
//! that cannot be saved.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::format::{Error, reseal};
use super::script::{load, play};
use super::{LoadError, NOTES_BYTES_MAX, Reader, SaveError, Unread};
use crate::budget::WriteBudget;
use crate::store::Key;
use crate::store::backing::faulty::{Breakable, Faulty};
use crate::store::backing::sealed::Sealed;
use crate::testing::{Random, seed};
use crate::zcomp::Zcomp;
use crate::zram::{Chosen, Recompression, What, Zram};
use crate::zsmalloc::world::{World, bytes, unit};

type Disk = Zram<Arc<World>>;

fn disk(order: u8, units: u64, algorithms: &[&str]) -> Disk {
    let codec = |name: &&str| Zcomp::new(name.parse().unwrap(), unit(order), 2).unwrap();
    let secret = bytes(seed(), Key::BYTES).try_into().unwrap();
    let codecs = algorithms.iter().map(codec).collect();
    let disk_bytes = units * unit(order).bytes() as u64;
    Zram::new(codecs, World::new(), Key::new(secret), disk_bytes, 2).unwrap()
}

fn saved(disk: &Disk) -> Vec<u8> {
    let mut file = Vec::new();
    let done = disk.save(0, &[], &mut file).unwrap();
    assert_eq!(done.bytes, file.len() as u64);
    assert_eq!(done.units * disk.unit().bytes() as u64, disk.mm_stat().orig_data_size);
    file
}

fn contents(disk: &Disk) -> Vec<u8> {
    let mut all = vec![0; usize::try_from(disk.disk_bytes()).unwrap()];
    disk.read(1, 0, &mut all).unwrap();
    all
}

/// The letters of each unit, without where it is and whether it is idle.
fn forms(disk: &Disk) -> Vec<String> {
    let mut state = String::new();
    disk.block_state(&mut state).unwrap();
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let unit = words.next().unwrap();
        format!("{unit} {}", words.nth(1).unwrap().replace(['w', 'i'], "."))
    };
    state.lines().map(line).collect()
}

/// Fills a disk with units of every kind.
fn fill(disk: &Disk, random: &mut Random) {
    let unit_bytes = disk.unit().bytes();
    for at in 0..disk.disk_bytes() / unit_bytes as u64 {
        let mut unit = random.bytes(unit_bytes);
        match random.below(6) {
            0 => continue,
            1 => unit.fill(random.byte()),
            2 => {}
            3 => unit.iter_mut().for_each(|byte| *byte = b'a' + *byte % 16),
            part => unit[unit_bytes * part / 8..].fill(0),
        }
        disk.write(0, at * unit_bytes as u64, &unit).unwrap();
    }
}

/// Goal: whatever is in a disk, wherever it is, is in the file, and the loaded disk is saved as the same file.
#[test]
fn a_disk_survives_its_file() {
    let seed = seed();
    for turn in 0..12 {
        let mut random = Random::new(seed.wrapping_mul(64) + turn);
        let order = [0, 2, 4][random.below(3)];
        let before = disk(order, 1 + random.below_u64(80), &["lz4", "deflate,level=3", "zstd"]);
        let backing = Sealed::new(64 << 20);
        let before = before.with_backing(Box::new(backing.clone()), WriteBudget::NONE);
        fill(&before, &mut random);
        for priority in [2, 1] {
            let what = Recompression { what: What::Huge, priority, ..Recompression::default() };
            before.recompress(0, what).unwrap();
        }
        let first = random.below_u64(40);
        before.write_back(0, &Chosen::Indices(vec![first..=first + 30]));
        let away = || (before.bd_stat().bd_count, before.store.spill_stats().units);
        let was_away = away();
        let file = saved(&before);
        assert_eq!(away(), was_away, "what is away stays there, and is not in memory too");
        let after = load(&file).unwrap();
        assert!(contents(&after) == contents(&before), "seed {seed}, turn {turn}");
        assert_eq!(forms(&after), forms(&before), "seed {seed}, turn {turn}");
        let [was, is] = [before.mm_stat(), after.mm_stat()];
        assert_eq!((was.orig_data_size, was.same_pages), (is.orig_data_size, is.same_pages));
        assert!(saved(&after) == file, "seed {seed}, turn {turn}: another file");
    }
}

/// A small disk with a word, a unit that shrinks, and one that does not.
fn small() -> Vec<u8> {
    let small = disk(0, 64, &["lz4", "zstd,level=2"]);
    small.write(0, 0, &[7; 4096]).unwrap();
    small.write(0, 5 << 12, &bytes(1, 128).repeat(32)).unwrap();
    small.write(0, 9 << 12, &bytes(2, 4096)).unwrap();
    saved(&small)
}

/// Reads to the end, without a disk.
fn read_all(file: &[u8]) -> Result<u64, Error> {
    let mut reader = Reader::open(file)?;
    let mut units = 0;
    while reader.next()?.is_some() {
        units += 1;
    }
    Ok(units)
}

/// Goal: no byte can be altered, missing or added without notice, and the message says where.
#[test]
fn every_altered_byte_is_noticed() {
    let file = small();
    assert_eq!(read_all(&file).unwrap(), 3);
    let mut random = Random::new(seed());
    for at in 0..file.len() {
        let mut other = file.clone();
        other[at] ^= u8::try_from(1 + random.below(255)).unwrap();
        let error = read_all(&other).expect_err("an altered byte");
        match (&error, at) {
            (Error::Magic, 0..16) | (Error::Version { .. }, 16..20) => {}
            (Error::Truncated { at: ends }, 20..) => assert!(*ends >= at as u64 || at < 400),
            (Error::Damaged { at: begins, .. }, 20..) => assert!(*begins <= at as u64, "{error}"),
            _ => panic!("byte {at}: {error}"),
        }
        let cut = read_all(&file[..at]).expect_err("a short file");
        let is_short = matches!(cut, Error::Truncated { at: ends } if ends == at as u64);
        assert!(is_short || at < 16 && matches!(cut, Error::Magic), "{at} bytes: {cut}");
    }
    let longer = read_all(&[&file[..], &[0]].concat()).unwrap_err().to_string();
    assert!(longer.ends_with("it has bytes behind its end"), "{longer}");
    // Records exchanged, left out, repeated: each is whole by itself.
    let [first, second, third] = records(&file);
    let header = &file[..first.start];
    let parts = |order: &[&std::ops::Range<usize>]| {
        let parts: Vec<&[u8]> = order.iter().map(|part| &file[(*part).clone()]).collect();
        [header, &parts.concat()[..], &file[third.end..]].concat()
    };
    assert!(parts(&[&first, &second, &third]) == file);
    for order in
        [&[&second, &first, &third][..], &[&first, &third], &[&first, &first, &second, &third]]
    {
        assert!(matches!(read_all(&parts(order)), Err(Error::Damaged { .. })));
    }
}

/// Where the three records of [`small`] are.
fn records(file: &[u8]) -> [std::ops::Range<usize>; 3] {
    let length = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let mut at = length(20);
    [(); 3].map(|()| {
        let begin = at;
        at += 32 + length(at + 4) + 8;
        begin..at
    })
}

/// Goal: the notes of a disk's servers come back as they were, of any length that is allowed, and change nothing else.
#[test]
fn notes_survive_the_file() {
    let before = disk(0, 8, &["lz4", "zstd"]);
    before.write(0, 0, &bytes(1, 8192)).unwrap();
    let without = saved(&before);
    assert!(Reader::open(&without[..]).unwrap().header().notes.is_empty());
    for length in [1, 4, 255, NOTES_BYTES_MAX] {
        let (notes, mut file) = (bytes(2, length), Vec::new());
        let done = before.save(0, &notes, &mut file).unwrap();
        assert_eq!(done.bytes, (without.len() + length) as u64);
        assert!(Reader::open(&file[..]).unwrap().header().notes == notes);
        let after = load(&file).unwrap();
        assert!(contents(&after) == contents(&before));
        assert!(saved(&after) == without, "{length} bytes: notes are the servers', not the disk's");
    }
    // Longer than any: the header has room for that if the names of its algorithms are short.
    let mut longer = without.clone();
    let names = 16 + 4 + 4 + 8 + 192 + 2 + "lz4".len() + "zstd".len() + 2;
    longer.splice(names..names, vec![0; NOTES_BYTES_MAX + 1]);
    let length = u32::from_le_bytes(longer[20..24].try_into().unwrap());
    let length = length + u32::try_from(NOTES_BYTES_MAX).unwrap() + 1;
    longer[20..24].copy_from_slice(&length.to_le_bytes());
    reseal(&mut longer);
    assert!(load(&longer).unwrap_err().to_string().contains("the length of its notes"));
}

/// Goal: behind the checks too nothing is taken on trust: with all checks made right, an altered file is refused, or
/// what it has can be read. Method: scripts as the fuzzer writes them.
#[test]
fn no_file_does_harm() {
    let seed = seed();
    for turn in 0..3000 {
        let mut random = Random::new(seed.wrapping_mul(4096) + turn);
        let length = 1 + 3 * random.below(5);
        let mut script = random.bytes(length);
        script[0] |= 1;
        play(&script);
        script[0] &= !1;
        play(&script);
    }
    let file = small();
    for (at, value, part) in [
        (16 + 4 + 4 + 8 + 192, 10, "its unit"),
        (16 + 4 + 4, 1, "the size of the disk"),
        (16 + 4 + 4 + 8 + 192 + 1, 0, "the number of its algorithms"),
        (16 + 4 + 4 + 8 + 192 + 1, 5, "the number of its algorithms"),
        (16 + 4 + 4 + 8 + 192 + 1, 3, "the name of an algorithm"),
        (records(&file)[0].start, 9, "the form of a unit"),
        (records(&file)[1].start + 1, 2, "the algorithm of a unit"),
        (records(&file)[1].start + 2, 2, "the length, flags or index of a unit"),
        (records(&file)[1].start + 8, 64, "the length, flags or index of a unit"),
        (records(&file)[1].start + 8, 0, "the length, flags or index of a unit"),
        (records(&file)[1].start + 31, 1, "the checksum of a unit"),
        (records(&file)[2].end + 8, 2, "the number of units"),
    ] {
        let mut other = file.clone();
        other[at] = value;
        reseal(&mut other);
        let line = load(&other).expect_err(part).to_string();
        assert!(line.contains(part), "{line}, not '{part}'");
    }
    let mut other = file.clone();
    other[records(&file)[2].start + 32 + 7] ^= 1;
    reseal(&mut other);
    assert!(matches!(load(&other), Err(LoadError::Unit { unit: 9, .. })), "contents");
    let name = file.windows(4).position(|word| word == b"zstd").unwrap();
    other.clone_from(&file);
    other[name..name + 4].copy_from_slice(b"rust");
    reseal(&mut other);
    assert_eq!(load(&other).unwrap_err().to_string(), "the algorithm 'rust,level=2' is not known");
}

/// Goal: clients go on while a disk is saved, and the file has each unit as it was at some moment of the save. Method:
/// a unit is its index and a number that only grows; the numbers of before and after are the bounds.
#[test]
fn clients_go_on_meanwhile() {
    const UNITS: u64 = 400;
    let backing = Faulty::new(64 << 20);
    let before = disk(0, UNITS, &["lz4", "zstd"]);
    let before = before.with_backing(Box::new(backing), WriteBudget::NONE);
    let unit = |at: u64, version: u64| {
        [at, version, at ^ 0x5555, version].map(u64::to_le_bytes).concat().repeat(128)
    };
    let versions: Vec<AtomicU64> = (0..UNITS).map(|_| AtomicU64::new(0)).collect();
    for at in 0..UNITS {
        before.write(0, at << 12, &unit(at, 0)).unwrap();
    }
    before.write_back(0, &Chosen::Indices(vec![100..=300]));
    let ends = AtomicBool::new(false);
    let (file, bounds) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut random = Random::new(seed());
            while !ends.load(Relaxed) {
                // The last hundred are left alone.
                let at = random.below_u64(UNITS - 100);
                let version = versions[usize::try_from(at).unwrap()].load(Relaxed) + 1;
                before.write(1, at << 12, &unit(at, version)).unwrap();
                versions[usize::try_from(at).unwrap()].store(version, Relaxed);
                before.write_back(0, &Chosen::Indices(vec![at..=at]));
            }
        });
        let now = || versions.iter().map(|version| version.load(Relaxed)).collect::<Vec<_>>();
        while now().iter().sum::<u64>() < 200 {
            std::thread::yield_now();
        }
        let least = now();
        let mut file = Vec::new();
        before.save(0, &[], &mut file).unwrap();
        let most = now();
        ends.store(true, Relaxed);
        writer.join().unwrap();
        (file, least.into_iter().zip(most).collect::<Vec<_>>())
    });
    let after = load(&file).unwrap();
    let mut found = vec![0; 4096];
    for (at, (least, most)) in (0..UNITS).zip(bounds) {
        after.read(0, at << 12, &mut found).unwrap();
        let version = u64::from_le_bytes(found[8..16].try_into().unwrap());
        assert!(found == unit(at, version), "unit {at} is none that was written");
        // One more may be written and not yet counted.
        assert!((least..=most + 1).contains(&version), "unit {at}: {least} {version} {most}");
        assert!(at < UNITS - 100 || version == 0);
    }
}

/// Takes so many bytes.
struct Short(usize);

impl Write for Short {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.0);
        self.0 -= count;
        if count == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(count) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Goal: a disk that was full to its limit, or had most of its contents on a backing with a budget, can be loaded with
/// the same limit and budget.
#[test]
fn a_full_disk_can_be_loaded_again() {
    let limit = 2 << 20;
    for (order, budget) in [(0, None), (4, None), (0, Some("1G")), (4, Some("64K/s"))] {
        let with_limit = |disk: Disk, budget: Option<&str>| {
            let backing = |text: &str| (Box::new(Sealed::new(64 << 20)), text.parse().unwrap());
            let backing = budget.map(backing);
            let disk = match backing {
                Some((backing, budget)) => disk.with_backing(backing, budget),
                None => disk,
            };
            disk.set_mem_limit(limit);
            disk
        };
        // It is filled whatever the budget.
        let full = with_limit(disk(order, 4096 >> order, &["lz4"]), budget.map(|_| "none"));
        let unit_bytes = full.unit().bytes();
        for at in 0..4096_u64 >> order {
            let unit: Vec<u8> = bytes(at, unit_bytes).iter().map(|byte| byte % 16).collect();
            if full.write(0, at * unit_bytes as u64, &unit).is_err() {
                break;
            }
        }
        let file = saved(&full);
        let mut reader = Reader::open(&file[..]).unwrap();
        let header = reader.header().clone();
        let codec =
            |params: &crate::zcomp::Params| Zcomp::new(params.clone(), header.unit, 1).unwrap();
        let codecs = header.algorithms.iter().map(codec).collect();
        let empty = Zram::new(codecs, World::new(), header.key.clone(), header.disk_bytes, 1);
        let loaded = with_limit(empty.unwrap(), budget);
        loaded.load_saved(0, &mut reader).unwrap();
        let used = loaded.used_bytes();
        assert!(used <= limit + (128 << 10), "{used} bytes, order {order}, budget {budget:?}");
        assert!(contents(&loaded) == contents(&full), "order {order}, budget {budget:?}");
    }
}

/// Regression: while a disk was loaded, pages that the pool keeps when objects leave it for the backing counted as
/// used: a load failed although all units were on the backing (here below 350 KiB; the pool may keep 64 KiB for each
/// size of objects). Fix: they are given back before the load fails.
#[test]
fn what_has_left_makes_room_for_a_load() {
    let saved_disk = disk(3, 32, &["lz4"]);
    let unit_bytes = saved_disk.unit().bytes();
    for at in 0..32 {
        // Objects of many sizes, for each of which the pool keeps pages of their own.
        let mut unit = vec![0; unit_bytes];
        unit[..unit_bytes / 32 * at].copy_from_slice(&bytes(at as u64, unit_bytes / 32 * at));
        saved_disk.write(0, (at * unit_bytes) as u64, &unit).unwrap();
    }
    let file = saved(&saved_disk);
    let mut reader = Reader::open(&file[..]).unwrap();
    let codec = Zcomp::new("lz4".parse().unwrap(), unit(3), 1).unwrap();
    let (key, disk_bytes) = (reader.header().key.clone(), reader.header().disk_bytes);
    let loaded = Zram::new(vec![codec], World::new(), key, disk_bytes, 1).unwrap();
    let loaded = loaded.with_backing(Box::new(Faulty::new(64 << 20)), WriteBudget::NONE);
    loaded.set_mem_limit(250 << 10);
    loaded.load_saved(0, &mut reader).unwrap();
    assert!(contents(&loaded) == contents(&saved_disk));
}

/// Goal: what a save that failed had fetched goes back to where it was. Up to 1 MiB stayed in memory until somebody
/// read it, since the save had said that it waits for each.
#[test]
fn what_a_failed_save_has_fetched_goes_back() {
    let disk = disk(0, 1000, &["lz4"]);
    let disk = disk.with_backing(Box::new(Sealed::new(64 << 20)), WriteBudget::NONE);
    (0..600).for_each(|at| disk.write(0, at << 12, &bytes(at, 4096)).unwrap());
    assert_eq!(disk.write_back(0, &Chosen::Indices(vec![0..=599])).units, 600);
    let written = disk.bd_stat().bd_writes;
    assert!(disk.save(0, &[], &mut Short(5000)).is_err());
    // What was fetched lately stays for two walks that find nothing else.
    for _ in 0..4 {
        disk.write_back(0, &Chosen::Indices(vec![0..=599]));
    }
    let away = disk.store.spill_stats().units;
    assert_eq!((away, disk.bd_stat().bd_writes), (600, written), "units that are away");
}

/// A disk of which unit 3 was lost when it was saved: only that cannot be read, also after another save and load; once
/// the contents that were lost are written again, it is what it was.
fn lost_units_stay_lost(partial: &[u8], whole: &[u8]) {
    let mut file = partial.to_vec();
    for _ in 0..3 {
        let disk = load(&file).unwrap();
        let mut found = vec![0; 4096];
        for at in (0..600).filter(|at| *at != 3) {
            disk.read(0, at << 12, &mut found).unwrap();
            assert!(found == bytes(at, 4096), "unit {at}");
        }
        let lost = disk.read(0, 3 << 12, &mut found).unwrap_err();
        assert!(matches!(lost, crate::zram::Error::Lost { unit: 3, .. }), "{lost}");
        file.clear();
        let done = disk.save(0, &[], &mut file).unwrap();
        assert_eq!((done.lost, done.units), (1, 600));
        assert_eq!(file, partial);
        disk.write(0, 3 << 12, &bytes(3, 4096)).unwrap();
        assert!(saved(&disk) == whole);
    }
}

/// Goal: what cannot be saved or loaded is told, and harms neither the disk nor a later try.
#[test]
fn failures_are_told() {
    let before = disk(0, 1000, &["lz4", "zstd"]);
    let backing = Sealed::new(64 << 20);
    let before = before.with_backing(Box::new(backing.clone()), WriteBudget::NONE);
    (0..600).for_each(|at| before.write(0, at << 12, &bytes(at, 4096)).unwrap());
    for bytes in [0, 100, 300, 5000, 1 << 20] {
        let full = before.save(0, &[], &mut Short(bytes)).unwrap_err();
        assert!(matches!(full, SaveError::Io(_)), "{full}");
    }
    let file = saved(&before);
    // Memory for a quarter: only with a backing.
    let make = || {
        let reader = Reader::open(&file[..]).unwrap();
        let header = reader.header().clone();
        let codec =
            |params: &crate::zcomp::Params| Zcomp::new(params.clone(), header.unit, 1).unwrap();
        let codecs = header.algorithms.iter().map(codec).collect();
        let empty = Zram::new(codecs, World::new(), header.key, header.disk_bytes, 1).unwrap();
        empty.set_mem_limit(600 << 10);
        (empty, reader)
    };
    let (poor, mut reader) = make();
    let refused = poor.load_saved(0, &mut reader).unwrap_err();
    assert!(matches!(refused, LoadError::NoSpace { .. }), "{refused}");
    let (rich, mut reader) = make();
    let rich = rich.with_backing(Box::new(Sealed::new(64 << 20)), WriteBudget::NONE);
    assert_eq!(rich.load_saved(0, &mut reader).unwrap().units, 600);
    assert!(rich.bd_stat().bd_count > 400 && contents(&rich) == contents(&before));
    assert!(saved(&rich) == file);
    // A unit that is lost.
    before.write_back(0, &Chosen::Indices(vec![3..=3]));
    let faults = backing.faults();
    faults.is_final.store(true, Relaxed);
    faults.fail.store(100, Relaxed);
    let mut partial = Vec::new();
    assert_eq!(before.save(0, &[], &mut partial).unwrap().lost, 1);
    backing.behave();
    before.write(0, 3 << 12, &bytes(3, 4096)).unwrap();
    assert!(saved(&before) == file);
    lost_units_stay_lost(&partial, &file);
    // One that cannot be read now.
    before.write_back(0, &Chosen::Indices(vec![3..=3]));
    faults.is_final.store(false, Relaxed);
    faults.fail.store(100, Relaxed);
    let unread = before.save(0, &[], &mut Vec::new()).unwrap_err();
    assert!(matches!(unread, SaveError::Unread { unit: 3, .. }), "{unread}");
    // Nor later, as far as this save can know: the others are saved.
    let mut last = Vec::new();
    assert_eq!(before.save_as(0, &[], Unread::IsLost, &mut last).unwrap().lost, 1);
    assert_eq!(last, partial);
    backing.behave();
    assert!(saved(&before) == file);
    before.halt();
    assert!(matches!(before.save(0, &[], &mut Vec::new()), Err(SaveError::Halted)));
}
