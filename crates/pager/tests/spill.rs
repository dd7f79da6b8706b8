//! The library with a directory to spill to: contents are verified, and the limit is held, for data that does not
//! compress.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use zfolio_pager::{Builder, Error, Mode, Pager};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// A directory whose files are on a disk; `None` if there is none.
fn directory() -> Option<PathBuf> {
    let candidates = [std::env::temp_dir(), PathBuf::from("/var/tmp"), PathBuf::from(".")];
    let builds = |path: &PathBuf| builder().spill(path).build().is_ok();
    candidates.into_iter().find(builds)
}

fn builder() -> Builder {
    Pager::builder().limit(16 << 20).algorithm("lz4")
}

/// The word at an index of page `page`, in a round: noise.
fn word(page: usize, index: usize, round: u64) -> u64 {
    let seed =
        (page as u64) << 20 ^ (index as u64) << 8 ^ round.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let seed = (seed ^ seed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let seed = (seed ^ seed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    seed ^ seed >> 31
}

fn fill(bytes: &mut [u8], page: usize, round: u64) {
    for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&word(page, index, round).to_le_bytes());
    }
}

fn verify(bytes: &[u8], page: usize, round: u64) {
    for (index, chunk) in bytes.chunks_exact(8).enumerate() {
        let found = u64::from_le_bytes(chunk.try_into().unwrap());
        assert_eq!(found, word(page, index, round), "page {page}, word {index}");
    }
}

fn figure(pager: &Pager, name: &str) -> u64 {
    pager.stats().figures.get(name).unwrap()
}

/// Goal: four times the limit of noise is all there, and the limit is held. Method: written and read in order, then
/// read and changed at random, by several threads; both modes.
#[test]
fn noise_of_four_times_the_limit_is_held_and_comes_back() {
    let Some(directory) = directory() else { return eprintln!("SKIPPED: no directory on a disk") };
    for mode in [Mode::Inline, Mode::Handler] {
        if let Err(why) = mode.check() {
            eprintln!("SKIPPED: {why}");
            continue;
        }
        let pager = builder().mode(mode).spill(&directory).build().unwrap();
        let mut region = pager.map(64 * MIB).unwrap();
        for (page, bytes) in region.chunks_exact_mut(PAGE).enumerate() {
            fill(bytes, page, 0);
        }
        region.chunks_exact(PAGE).enumerate().for_each(|(page, bytes)| verify(bytes, page, 0));
        std::thread::scope(|scope| {
            for (thread, part) in region.chunks_mut(16 * MIB).enumerate() {
                scope.spawn(move || change(part, thread * 16 * MIB / PAGE));
            }
        });
        println!("{}", pager.stats());
        assert!(figure(&pager, "written_back_units") > 4000, "{}", pager.stats());
        assert!(figure(&pager, "read_back_units") > 4000, "{}", pager.stats());
        assert_eq!(figure(&pager, "read_back_fail"), 0);
        // Three of four pages are away when they are touched.
        let stats = pager.stats();
        assert!(stats.figures.faults_disk > 4000, "{stats}");
        assert_eq!(stats.faults_disk.count, stats.figures.faults_disk);
        let over = figure(&pager, "over_limit_bytes_max");
        // What counts as passed (`OverLimit`): on a busy machine some of it is on its way for a moment.
        assert!(over <= 16 * MIB as u64 / 16, "{over} bytes over the limit");
        drop(region);
        // What was on its way is forgotten once it has arrived.
        let gone = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            figure(&pager, "spilled_units") == 0
        });
        assert!(gone, "units of nobody are on the disk");
        // Nothing is written any more, and the disk has its room back, but for clusters of 2 MiB that are used next.
        let has_room = (0..2000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            file_bytes(&directory) <= 8 * MIB as u64
        });
        assert!(has_room, "{} bytes of nobody are in the file", file_bytes(&directory));
    }
}

/// What the files take on the disk that this process has open in `directory`, and that have no name.
fn file_bytes(directory: &Path) -> u64 {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let is_ours = |link: &PathBuf| {
        let target = std::fs::read_link(link).unwrap_or_default();
        target.starts_with(directory) && target.to_string_lossy().ends_with("(deleted)")
    };
    let files = links.filter(is_ours).filter_map(|link| std::fs::metadata(link).ok());
    files.map(|about| about.blocks() * 512).sum()
}

/// Pages here and there, read and written.
fn change(part: &mut [u8], first: usize) {
    let pages = part.len() / PAGE;
    let mut rounds = vec![0_u64; pages];
    for step in 0..4000_usize {
        let page = usize::try_from(word(first, step, 7) % pages as u64).unwrap();
        let bytes = &mut part[page * PAGE..][..PAGE];
        verify(bytes, first + page, rounds[page]);
        if step % 4 == 0 {
            rounds[page] = step as u64 + 1;
            fill(bytes, first + page, rounds[page]);
        }
    }
    for (page, round) in rounds.into_iter().enumerate() {
        verify(&part[page * PAGE..][..PAGE], first + page, round);
    }
}

/// Goal: a place that cannot be spilled to is refused with one line that names it.
#[test]
fn a_bad_place_is_refused_by_name() {
    if let Err(why) = Mode::Inline.check() {
        return eprintln!("SKIPPED: {why}");
    }
    let refused = |builder: Builder| match builder.build() {
        Err(error @ Error::Spill(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let text = refused(builder().spill("/nowhere/at/all"));
    assert!(text.contains("/nowhere/at/all") && !text.contains('\n'), "{text}");
    let text = refused(builder().spill("/etc/passwd"));
    assert!(text.contains("/etc/passwd"), "{text}");
    let text = refused(builder().spill("/var/tmp").spill_limit(4096));
    assert!(text.contains("4096") && text.contains("16777216"), "{text}");
    let text = refused(builder().spill("/var/tmp").max_pool_percent(101));
    assert!(text.contains("max_pool_percent 101") && text.contains("1 to 100"), "{text}");
    let text = refused(builder().spill("/var/tmp").write_budget("10G/week"));
    assert!(text.contains("'10G/week' is not a budget; accepted: "), "{text}");
    for nowhere in [builder().accept_threshold_percent(80), builder().write_budget("1G")] {
        let text = refused(nowhere);
        assert!(text.contains("a place to spill to is needed"), "{text}");
    }
    if std::path::Path::new("/dev/shm").exists() {
        let text = refused(builder().spill("/dev/shm"));
        assert!(text.contains("/dev/shm"), "{text}");
    }
}
