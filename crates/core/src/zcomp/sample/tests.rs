//! Tests of the look at a sample: what it skips, compared with what the codecs would have done.

use super::super::backend::{Answer, Compressor};
use super::super::tests::{Random, seed, text, zcomp};
use super::super::{Algorithm, Outcome, compressed_bytes_max};
use super::is_incompressible;
use crate::page::same_filled;

/// The unit sizes in the tables of the design notes, and the smallest and largest size.
const SIZES: [usize; 5] = [4 << 10, 8 << 10, 16 << 10, 64 << 10, 2 << 20];

/// A codec without the sample before it.
struct Judge {
    compressor: Box<dyn Compressor>,
    dest: Vec<u8>,
}

impl Judge {
    fn new(algorithm: Algorithm, level: i32, unit_bytes: usize) -> Judge {
        let compressor = (algorithm.backend().compressor)(level, unit_bytes);
        let compressor = compressor.expect("there is memory");
        Judge { compressor, dest: vec![0; compressed_bytes_max(unit_bytes)] }
    }

    fn shrinks(&mut self, unit: &[u8]) -> bool {
        let answer = self.compressor.compress_unit(unit, &mut self.dest);
        matches!(answer, Answer::Compressed(_))
    }
}

/// Codecs that decide whether a skipped unit would have shrunk: zstd also at a level with a
/// thorough search.
fn judges(unit_bytes: usize) -> [Judge; 3] {
    [(Algorithm::Lz4, 1), (Algorithm::Zstd, 1), (Algorithm::Zstd, 9)]
        .map(|(algorithm, level)| Judge::new(algorithm, level, unit_bytes))
}

fn any_shrinks(judges: &mut [Judge], unit: &[u8]) -> bool {
    judges.iter_mut().any(|judge| judge.shrinks(unit))
}

fn base64(random: &mut Random, bytes: usize) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    (0..bytes).map(|_| DIGITS[random.below(64)]).collect()
}

fn utf_16(random: &mut Random, bytes: usize) -> Vec<u8> {
    let text = String::from_utf8(text(random, bytes)).expect("ASCII");
    text.encode_utf16().flat_map(u16::to_le_bytes).take(bytes).collect()
}

/// As many addresses in one region as fit.
fn pointers(random: &mut Random, bytes: usize) -> Vec<u8> {
    let base = 0x7F3A_0000_0000 + ((random.word() & 0xFF) << 24);
    (0..bytes / 8).flat_map(|_| (base + (random.word() & 0xFF_FFF0)).to_le_bytes()).collect()
}

/// Doubles with 52 random bits: 2 of 8 bytes shrink.
fn doubles(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes / 8)
        .flat_map(|_| f64::from_bits(0x3FF << 52 | random.word() >> 12).to_le_bytes())
        .collect()
}

/// The output of deflate for text: already compressed.
fn gzipped(random: &mut Random, bytes: usize) -> Vec<u8> {
    let deflate = zcomp(Algorithm::Deflate.into(), 64 << 10, 1);
    let mut gzipped = Vec::new();
    while gzipped.len() < bytes {
        let source = base64(random, 64 << 10);
        deflate.compress(0, &[&source], &mut |elements| {
            if let Outcome::Compressed(compressed) = elements[0].outcome {
                gzipped.extend_from_slice(compressed);
            }
        });
    }
    gzipped.truncate(bytes);
    gzipped
}

/// Compressed bytes in which a 0 follows each 0xFF, as in a JPEG.
fn jpeg_like(random: &mut Random, bytes: usize) -> Vec<u8> {
    let packed = gzipped(random, bytes);
    let stuffed = packed.into_iter().flat_map(|byte| match byte {
        0xFF => vec![0xFF, 0],
        _ => vec![byte],
    });
    stuffed.take(bytes).collect()
}

/// Random bytes, except that `shares` of 64 stretches of 256 bytes, chosen at random, come from
/// `other`.
fn mixed(random: &mut Random, other: &[u8], shares: usize) -> Vec<u8> {
    let mut mixed = random.bytes(other.len());
    for at in (0..other.len()).step_by(256) {
        if random.below(64) < shares {
            mixed[at..at + 256].copy_from_slice(&other[at..at + 256]);
        }
    }
    mixed
}

/// Random bytes, one stretch of which is repeated at another place.
fn copied(random: &mut Random, bytes: usize, share: usize) -> Vec<u8> {
    let mut copied = random.bytes(bytes);
    let stretch = bytes / share;
    let (from, to) = (random.below(bytes / 2 - stretch + 1), random.below(bytes / 2 - stretch + 1));
    copied.copy_within(from..from + stretch, bytes / 2 + to);
    copied
}

/// Objects of 64 bytes: a random key of 8 bytes, and a state that is mostly zeros.
fn objects(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut objects = vec![0; bytes];
    for object in objects.chunks_exact_mut(64) {
        object[..8].copy_from_slice(&random.bytes(8));
        object[40] = random.byte();
    }
    objects
}

/// A unit of each kind that shrinks, with how many of 1000 such units may be skipped wrongly.
fn kinds(random: &mut Random, bytes: usize) -> Vec<(&'static str, usize, Vec<u8>)> {
    let zeros = vec![0; bytes];
    let words = text(random, bytes);
    let values_181 = (0..bytes).map(|_| u8::try_from(random.below(181)).expect("below")).collect();
    vec![
        ("text", 0, words.clone()),
        ("base64", 0, base64(random, bytes)),
        ("UTF-16", 0, utf_16(random, bytes)),
        ("pointers", 0, pointers(random, bytes)),
        ("doubles", 0, doubles(random, bytes)),
        ("objects with a random key", 0, objects(random, bytes)),
        ("1/8 zeros", 0, mixed(random, &zeros, 8)),
        ("1/4 text", 1, mixed(random, &words, 16)),
        ("even over 181 values", 1, values_181),
        ("1/2 copied", 0, copied(random, bytes, 2)),
        ("1/8 copied", 100, copied(random, bytes, 8)),
    ]
}

/// Goal: units that shrink reach the codec. Method: many units of each kind; those that are skipped
/// go to the codecs, and are counted if a codec shrinks them.
#[test]
fn what_shrinks_is_not_skipped() {
    let mut random = Random::new(seed());
    for unit_bytes in SIZES {
        let mut judges = judges(unit_bytes);
        let rounds = ((8 << 20) / unit_bytes).clamp(2, 300);
        let mut wrong: Vec<(&str, usize, usize)> = Vec::new();
        for _ in 0..rounds {
            for (at, (kind, allowed, unit)) in
                kinds(&mut random, unit_bytes).into_iter().enumerate()
            {
                let is_wrong = is_incompressible(&unit) && any_shrinks(&mut judges, &unit);
                if wrong.len() == at {
                    wrong.push((kind, allowed, 0));
                }
                wrong[at].2 += usize::from(is_wrong);
            }
        }
        for (kind, allowed, wrong) in wrong {
            println!("{unit_bytes} {kind}: {wrong} of {rounds} skipped that shrink");
            assert!(wrong <= (allowed * rounds).div_ceil(1000), "{kind}, seed {}", seed());
        }
    }
}

/// Goal: units that do not shrink are skipped. Method: random and compressed bytes; at least 95 of
/// 100 are skipped, and none of these would have shrunk.
#[test]
fn what_does_not_shrink_is_skipped() {
    let mut random = Random::new(seed());
    for unit_bytes in SIZES {
        let mut judges = judges(unit_bytes);
        let rounds = ((8 << 20) / unit_bytes).clamp(2, 300);
        type Kind = fn(&mut Random, usize) -> Vec<u8>;
        let kinds: [(&str, Kind); 3] =
            [("random", Random::bytes), ("gzip", gzipped), ("JPEG", jpeg_like)];
        for (name, kind) in kinds {
            let units: Vec<_> = (0..rounds).map(|_| kind(&mut random, unit_bytes)).collect();
            let skipped: Vec<_> = units.iter().filter(|unit| is_incompressible(unit)).collect();
            let wrong = skipped.iter().filter(|unit| any_shrinks(&mut judges, unit)).count();
            println!("{unit_bytes} {name}: {} of {rounds} skipped, {wrong} shrink", skipped.len());
            assert!(skipped.len() * 100 >= rounds * 95, "{name}, seed {}", seed());
            assert_eq!(wrong, 0, "{name}, seed {}", seed());
        }
    }
}

/// Nanoseconds per call of `look` on `units` that are in the cache, since in the real path they
/// were hashed just before.
#[allow(clippy::disallowed_methods, reason = "a measurement; nothing depends on the time")]
fn ns_each(units: &[&[u8]], mut look: impl FnMut(&[u8]) -> bool) -> f64 {
    let mut ns = 0.0;
    for group in units.chunks(((256 << 10) / units[0].len()).max(1)) {
        let lines = group.iter().flat_map(|unit| unit.chunks(64));
        std::hint::black_box(lines.map(|line| u64::from(line[0])).sum::<u64>());
        let begin = std::time::Instant::now();
        for unit in group {
            std::hint::black_box(look(unit));
        }
        ns += begin.elapsed().as_nanos() as f64;
    }
    ns / units.len() as f64
}

/// Prints what the sample costs compared with the codecs, how much it skips, and how much of that
/// would have shrunk; also what it costs to detect a same-filled unit. Run it as `ZCOMP_FILE=corpus
/// cargo test --release -p zfolio-core sample_speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement: needs ZCOMP_FILE and a quiet machine"]
fn sample_speed() {
    let path = std::env::var("ZCOMP_FILE").expect("ZCOMP_FILE names a file to compress");
    let data = std::fs::read(&path).expect("ZCOMP_FILE can be read");
    let random = Random::new(seed()).bytes(16 << 20);
    let codecs =
        [(Algorithm::Lz4, 1), (Algorithm::Zstd, 1), (Algorithm::Deflate, 1), (Algorithm::Lz4hc, 9)];
    println!("ns/unit    unit    look codec     alone       %  skipped  wrong");
    for (name, data) in [("corpus", &data), ("random", &random)] {
        for unit_bytes in [4 << 10, 16 << 10, 64 << 10] {
            let units: Vec<&[u8]> =
                data.chunks_exact(unit_bytes).filter(|unit| same_filled(unit).is_none()).collect();
            let skipped: Vec<_> = units.iter().filter(|unit| is_incompressible(unit)).collect();
            let mut judges = judges(unit_bytes);
            let wrong = skipped.iter().filter(|unit| any_shrinks(&mut judges, unit)).count();
            let share = skipped.len() as f64 / units.len() as f64;
            for (algorithm, level) in codecs {
                let mut judge = Judge::new(algorithm, level, unit_bytes);
                let mut rounds: Vec<(f64, f64)> = (0..5)
                    .map(|_| {
                        (
                            ns_each(&units, is_incompressible),
                            ns_each(&units, |unit| judge.shrinks(unit)),
                        )
                    })
                    .collect();
                rounds.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
                let (look, alone) = rounds[rounds.len() / 2];
                let percent = 100.0 * look / alone;
                println!(
                    "{name:<8} {unit_bytes:>6} {look:>7.0} {:<8} {alone:>6.0} {percent:>7.2} {share:>8.4} {wrong:>6}",
                    algorithm.name()
                );
            }
        }
    }
    for unit_bytes in [4 << 10, 16 << 10, 64 << 10] {
        let unit = 0x0102_0304_0506_0708_u64.to_ne_bytes().repeat(unit_bytes / 8);
        let units = vec![unit.as_slice(); 4096];
        let ns = ns_each(&units, |unit| same_filled(unit).is_some());
        println!("same-filled {unit_bytes:>6} {:>5.1} GB/s", unit_bytes as f64 / ns);
    }
}
