//! The library in inline mode: contents are verified, not exit codes.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::Write as _;

use zfolio_pager::{Error, Pager};

const MIB: usize = 1 << 20;

/// xorshift64: the tests' only source of chance.
struct Random(u64);

impl Random {
    fn from_env() -> Random {
        let seed = std::env::var("SEED").map_or(42, |text| text.parse().expect("SEED is a u64"));
        println!("SEED={seed}");
        Random(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }
}

/// A byte that depends on the place and the round in which it is written; a row of them compresses.
fn byte_at(index: usize, round: u8) -> u8 {
    u8::try_from((index / 97) % 251).unwrap().wrapping_add(round)
}

fn fill(region: &mut [u8], round: u8) {
    for (index, byte) in region.iter_mut().enumerate() {
        *byte = byte_at(index, round);
    }
}

fn verify(region: &[u8], round: u8) {
    for (index, byte) in region.iter().enumerate() {
        assert_eq!(*byte, byte_at(index, round), "byte {index} of round {round}");
    }
}

fn figure(pager: &Pager, name: &str) -> u64 {
    pager.stats().figures.get(name).unwrap()
}

/// Goal: a region four times as large as the limit keeps what is written to it. Method: every
/// algorithm and several unit sizes, two rounds.
#[test]
fn a_region_larger_than_its_limit_keeps_its_bytes() {
    for algorithm in ["lz4", "zstd", "deflate"] {
        for unit in [4096, 16384, 65536, 2 * MIB] {
            let pager =
                Pager::builder().limit(16 << 20).algorithm(algorithm).unit(unit).build().unwrap();
            let mut region = pager.map(64 * MIB).unwrap();
            for round in 0..2 {
                fill(&mut region, round);
                verify(&region, round);
            }
            assert!(
                figure(&pager, "faults_stored") > 0,
                "{algorithm} {unit}: nothing was compressed"
            );
            assert!(figure(&pager, "resident_bytes_max") < 20 << 20, "{algorithm} {unit}");
        }
    }
}

/// Goal: a region never disagrees with a plain vector. Method: seeded random writes, reads and clears.
#[test]
fn a_region_agrees_with_a_vector() {
    let mut random = Random::from_env();
    let pager = Pager::builder().limit(8 << 20).unit(16384).build().unwrap();
    let mut region = pager.map(32 * MIB).unwrap();
    let mut model = vec![0_u8; 32 * MIB];
    for step in 0..20_000 {
        let at = random.below(model.len() - 5000);
        let length = random.below(5000);
        match random.below(10) {
            0..5 => {
                let byte = random.next().to_le_bytes()[0];
                region[at..at + length].fill(byte);
                model[at..at + length].fill(byte);
            }
            5 => {
                let range = at..at + 16 * length;
                region.clear(range.clone());
                let (from, to) = (
                    range.start.next_multiple_of(16384),
                    range.end.min(model.len()) / 16384 * 16384,
                );
                if from < to {
                    model[from..to].fill(0);
                }
            }
            _ => assert_eq!(region[at..at + length], model[at..at + length], "step {step}"),
        }
    }
    assert!(region[..] == model[..]);
    assert!(figure(&pager, "faults_stored") > 0);
}

/// Goal: a program that uses one page here and there needs memory for these pages and not for the zeros beside them,
/// and finds all of them. Method: one page of each 64 KiB, then zeros over half of them.
#[test]
fn a_page_here_and_there_takes_no_more_than_itself() {
    const STEP: usize = 64 << 10;
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(256 * MIB).unwrap();
    let used = |place: usize| place * STEP + place % 16 * 4096;
    let places = region.len() / STEP;
    for place in 0..places {
        // Not one word repeated, which would take no object.
        fill(&mut region[used(place)..][..4096], 1);
    }
    // 16 MiB are in use; without the zeros beside them it would be 256.
    let demand = figure(&pager, "demand_bytes_max");
    assert!(demand < 48 << 20, "{demand}");
    // Of 61,440 units.
    let zeros = figure(&pager, "same_filled_units");
    assert!(zeros < 4096, "{zeros}");
    for place in (0..places).step_by(2) {
        region[used(place)..][..4096].fill(0);
    }
    for place in 0..places {
        let (zeros, page) = region[place * STEP..][..STEP].split_at(place % 16 * 4096);
        let (page, more_zeros) = page.split_at(4096);
        match place % 2 {
            0 => assert!(page.iter().all(|found| *found == 0), "{place}"),
            _ => verify(page, 1),
        }
        assert!(zeros.iter().chain(more_zeros).all(|found| *found == 0), "{place}");
    }
    assert!(figure(&pager, "resident_bytes_max") < 9 << 20);
    assert!(figure(&pager, "faults_stored") > 0);
}

/// Goal: zeros that a program writes are memory that it needs, as any other.
#[test]
fn zeros_that_are_written_are_needed() {
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(64 * MIB).unwrap();
    region.fill(0);
    assert!(region.iter().all(|byte| *byte == 0));
    let demand = figure(&pager, "demand_bytes_max");
    assert!(demand > 60 << 20, "{demand}");
}

/// Goal: several threads can use one region. Method: each thread writes and verifies its part.
#[test]
fn threads_fault_side_by_side() {
    let pager = Pager::builder().limit(16 << 20).algorithm("zstd").build().unwrap();
    let mut region = pager.map(64 * MIB).unwrap();
    std::thread::scope(|scope| {
        for part in region.chunks_mut(16 * MIB) {
            scope.spawn(|| {
                for round in 0..3 {
                    fill(part, round);
                    verify(part, round);
                }
            });
        }
    });
}

/// Goal: a fault leaves `errno` as it was. Method: threads that fault on the same folios by turns, so that they wait
/// for each other's locks, each between a call that fails and its look at the error.
#[test]
fn a_fault_leaves_errno_alone() {
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(32 * MIB).unwrap();
    fill(&mut region, 1);
    let region = &region[..];
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for at in (0..region.len()).step_by(4096).cycle().take(30_000) {
                    assert!(std::fs::metadata("/nowhere").is_err());
                    let byte = std::hint::black_box(&region[at]);
                    let byte = std::hint::black_box(*byte);
                    let error = std::io::Error::last_os_error();
                    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{at} {byte}");
                }
            });
        }
    });
    assert!(figure(&pager, "faults_stored") > 0);
}

/// Goal: data that does not compress is never lost; the limit is passed instead.
#[test]
fn incompressible_data_goes_over_the_limit_and_is_kept() {
    let mut random = Random(7);
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(24 * MIB).unwrap();
    let mut model = vec![0_u8; 24 * MIB];
    for chunk in model.chunks_exact_mut(8) {
        chunk.copy_from_slice(&random.next().to_le_bytes());
    }
    region.copy_from_slice(&model);
    assert!(region[..] == model[..]);
    assert!(figure(&pager, "over_limit") > 0);
}

/// Goal: while all regions fit into the limit, nothing is registered, and no fault is served.
#[test]
fn below_the_limit_nothing_faults() {
    let pager = Pager::builder().limit(64 << 20).build().unwrap();
    let mut region = pager.map(32 * MIB).unwrap();
    fill(&mut region, 1);
    assert_eq!(figure(&pager, "faults_zero"), 0);
    // With a second region they no longer fit into the limit. The contents of the first one stay.
    let mut second = pager.map(64 * MIB).unwrap();
    fill(&mut second, 2);
    verify(&region, 1);
    verify(&second, 2);
    assert!(figure(&pager, "faults_zero") > 0);
}

/// Goal: system calls can read pinned and prefaulted parts. Method: `write(2)` fails for a compressed
/// part, and succeeds for a pinned one.
#[test]
fn the_kernel_reaches_pinned_memory() {
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(64 * MIB).unwrap();
    fill(&mut region, 3);
    let mut null = std::fs::File::options().write(true).open("/proc/self/comm").unwrap();
    assert_eq!(null.write(&region[..8]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    region.pin(0..MIB);
    verify(&region[..MIB], 3);
    assert!(null.write(&region[..8]).is_ok());
    // Pinned memory stays resident while the rest is filled again.
    fill(&mut region, 4);
    assert!(null.write(&region[..8]).is_ok());
    verify(&region, 4);
}

/// Goal: what is pinned while everything still fits stays resident later. Method: pin a part of a region, then map a
/// second one, with which they no longer fit, and fill both; the kernel reads the pinned part, and not the rest.
/// `engage` registered the whole region, and the pinned part was compressed like the rest.
#[test]
fn what_is_pinned_before_the_limit_matters_stays() {
    const FOLIO: usize = 64 << 10;
    let pager = Pager::builder().limit(8 << 20).unit(4096).build().unwrap();
    let mut region = pager.map(6 * MIB).unwrap();
    region.pin(MIB + 5..MIB + 6);
    region.pin(6 * MIB - 1..usize::MAX);
    assert_eq!(figure(&pager, "engaged"), 0);
    assert_eq!(figure(&pager, "pinned_bytes"), 2 * FOLIO as u64);
    let mut second = pager.map(32 * MIB).unwrap();
    assert_eq!(figure(&pager, "engaged"), 1);
    let mut null = std::fs::File::options().write(true).open("/proc/self/comm").unwrap();
    for round in 0..2 {
        fill(&mut region, round);
        fill(&mut second, round);
        for pinned in [MIB..MIB + FOLIO, 6 * MIB - FOLIO..6 * MIB] {
            for page in region[pinned].chunks(4096) {
                null.write_all(&page[..8]).unwrap();
            }
        }
        let missing = |page: &[u8]| (&null).write(&page[..8]).is_err();
        assert!(region[2 * MIB..5 * MIB].chunks(4096).any(missing), "nothing was compressed");
        verify(&region, round);
        verify(&second, round);
    }
}

/// Goal: `prefault` touches every page of a range that begins and ends anywhere. Method: ask the kernel which pages
/// are there. The last page was left out if the range was cut off at the region's end.
#[test]
fn prefault_touches_the_last_page_too() {
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    for range in [4000..usize::MAX, 4000..2 * 4096 + 1, 5000..5000, 2 * 4096 + 200..usize::MAX] {
        let region = pager.map(2 * 4096 + 100).unwrap();
        region.prefault(range.clone());
        let (start, end) = (range.start, range.end.min(region.len()));
        let mut there = [9_u8; 3];
        let place = region.as_ptr().cast_mut();
        // SAFETY: three pages of the region, and a byte for each.
        assert_eq!(unsafe { libc::mincore(place.cast(), 3 * 4096, there.as_mut_ptr()) }, 0);
        for (page, found) in there.iter().enumerate() {
            let touched = start < end && start < (page + 1) * 4096 && page * 4096 < end;
            assert_eq!(found & 1 == 1, touched, "page {page} of {range:?}");
        }
    }
}

/// Goal: a dropped pager gives all of its memory back. Method: compare the process's memory after many
/// pagers.
#[test]
fn dropping_gives_everything_back() {
    let resident = || zfolio_sys::process::ResidentMeter::new().read().unwrap().memory_bytes;
    let once = || {
        let pager = Pager::builder().limit(16 << 20).build().unwrap();
        let mut region = pager.map(64 * MIB).unwrap();
        fill(&mut region, 0);
        let clone = pager.clone();
        drop(pager);
        verify(&region, 0);
        drop(region);
        drop(clone);
    };
    once();
    let before = resident();
    (0..8).for_each(|_| once());
    let grown = resident().saturating_sub(before);
    assert!(
        grown < 60 << 20,
        "{grown} bytes more after 8 pagers: other tests run beside, but not so many"
    );
}

/// Goal: each of several pagers serves its own memory, and what was pinned in any of them is left to the kernel.
/// Method: three pagers, whose regions are used by turns, while parts of them are pinned.
#[test]
fn several_pagers_keep_to_their_own() {
    let pagers = [(); 3].map(|()| Pager::builder().limit(8 << 20).build().unwrap());
    let mut regions = [0, 1, 2].map(|index| pagers[index].map(16 * MIB).unwrap());
    for round in 0..3 {
        regions.iter_mut().for_each(|region| fill(region, round));
        regions.iter().for_each(|region| verify(region, round));
        let part = usize::from(round) * 2 * MIB..usize::from(round) * 2 * MIB + MIB / 2;
        regions.iter().for_each(|region| region.pin(part.clone()));
    }
    for pager in &pagers {
        assert!(figure(pager, "faults_stored") > 0);
    }
}

#[test]
fn lengths_out_of_all_bounds_are_refused_or_do_nothing() {
    let pager = Pager::builder().limit(16 << 20).build().unwrap();
    for bytes in [usize::MAX, usize::MAX - 4095, isize::MAX as usize, 1 << 62] {
        assert!(matches!(pager.map(bytes), Err(Error::Memory { .. })), "{bytes:#x}");
    }
    let mut region = pager.map(8 * MIB).unwrap();
    fill(&mut region, 3);
    for range in [usize::MAX - 5..usize::MAX, 8 * MIB..usize::MAX, 9 * MIB..usize::MAX] {
        region.clear(range);
        verify(&region, 3);
    }
    region.clear(4 * MIB..usize::MAX);
    verify(&region[..4 * MIB], 3);
    assert!(region[4 * MIB..].iter().all(|byte| *byte == 0));
}

#[test]
fn bad_settings_are_refused_by_name() {
    let told = |result: Result<Pager, Error>| result.unwrap_err().to_string();
    assert!(told(Pager::builder().limit(1).build()).contains("limit 1:"));
    assert!(told(Pager::builder().limit(1 << 30).unit(5000).build()).contains("unit 5000"));
    let message = told(Pager::builder().limit(1 << 30).algorithm("rot13").build());
    assert!(message.contains("rot13") && message.contains("zstd"), "{message}");
}
