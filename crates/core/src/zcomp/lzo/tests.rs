//! Tests against a naive decoder that follows the description word by word, and against liblzo2 if
//! it is installed (Debian: `liblzo2-2`).

mod liblzo2;
mod speed;

use super::super::tests::{Random, seed};
use super::decoder::decode;
use super::{LzoCompressor, Version};
use liblzo2::Liblzo2;

const VERSIONS: [Version; 2] = [Version::Original, Version::Runs];

/// The rest of a stream, for the model.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> Option<usize> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(usize::from(*first))
    }

    fn literals(&mut self, count: usize, dest: &mut Vec<u8>) -> Option<()> {
        dest.extend_from_slice(self.0.get(..count)?);
        self.0 = &self.0[count..];
        Some(())
    }

    /// A length whose first `bits` bits were in the code.
    fn length(&mut self, bits: usize, bits_max: usize) -> Option<usize> {
        let (mut length, mut byte) = (0, bits);
        if bits == 0 {
            length = bits_max;
            byte = self.next()?;
            while byte == 0 {
                (length, byte) = (length + 255, self.next()?);
            }
        }
        Some(length + byte)
    }
}

/// The bytes that the stream `source` stands for, by the description.
fn model(source: &[u8], newest: Version) -> Option<Vec<u8>> {
    let (mut bytes, mut dest) = (Bytes(source), Vec::new());
    let (mut state, mut runs) = (0, false);
    if newest == Version::Runs && source.len() >= 5 && source[0] == 17 {
        bytes.next()?;
        runs = [false, true].get(bytes.next()?).copied()?;
    }
    if let Some(count @ 1..) = bytes.0.first()?.checked_sub(17) {
        bytes.next()?;
        bytes.literals(usize::from(count), &mut dest)?;
        state = usize::from(count.min(4));
    }
    loop {
        let code = bytes.next()?;
        if code < 16 && state == 0 {
            let count = 3 + bytes.length(code, 15)?;
            bytes.literals(count, &mut dest)?;
            state = 4;
            continue;
        }
        let (distance, length);
        if code < 16 {
            let nearest = if state == 4 { 2049 } else { 1 };
            distance = (bytes.next()? << 2) + (code >> 2) + nearest;
            length = if state == 4 { 3 } else { 2 };
            state = code & 3;
        } else if code < 32 {
            // The two bytes after the code mark a run, even if they might be part of a length.
            if let ([first, 0xFF, ..], true) = (bytes.0, runs && code & 8 != 0) {
                if first & 0xFC == 0xFC {
                    state = usize::from(first & 3);
                    bytes.next()?;
                    bytes.next()?;
                    dest.resize(dest.len() + ((bytes.next()? << 3) | (code & 7)) + 4, 0);
                    bytes.literals(state, &mut dest)?;
                    continue;
                }
            }
            length = 2 + bytes.length(code & 7, 7)?;
            let word = bytes.next()? | bytes.next()? << 8;
            distance = 16384 + ((code & 8) << 11) + (word >> 2);
            state = word & 3;
            if distance == 16384 {
                return (code == 17 && word == 0 && bytes.0.is_empty()).then_some(dest);
            }
        } else if code < 64 {
            length = 2 + bytes.length(code & 31, 31)?;
            let word = bytes.next()? | bytes.next()? << 8;
            distance = (word >> 2) + 1;
            state = word & 3;
        } else {
            distance = (bytes.next()? << 3) + (code >> 2 & 7) + 1;
            length = (code >> 5) + 1;
            state = code & 3;
        }
        for _ in 0..length {
            dest.push(dest[dest.len().checked_sub(distance)?]);
        }
        bytes.literals(state, &mut dest)?;
    }
}

/// The length of a destination that can hold any stream of `source_bytes` bytes.
fn stream_bytes_max(source_bytes: usize) -> usize {
    source_bytes + source_bytes / 16 + 67
}

fn encode(source: &[u8], version: Version) -> Vec<u8> {
    let mut dest = vec![0; stream_bytes_max(source.len())];
    let mut compressor = LzoCompressor::new(version);
    let bytes = compressor.encode(source, &mut dest).expect("fits");
    dest.truncate(bytes);
    dest
}

/// Decodes to exactly `dest_bytes` between guards.
fn decoded(source: &[u8], dest_bytes: usize, newest: Version) -> Option<Vec<u8>> {
    let mut guarded = vec![0xA5; dest_bytes + 128];
    let result = decode(source, &mut guarded[64..64 + dest_bytes], newest);
    let mut guards = guarded[..64].iter().chain(&guarded[64 + dest_bytes..]);
    assert!(guards.all(|byte| *byte == 0xA5), "ZC-4: wrote outside of the destination");
    result.is_ok().then(|| guarded[64..64 + dest_bytes].to_vec())
}

/// Literals, repetitions at any distance, and runs of zeros.
fn contents(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut contents: Vec<u8> = Vec::with_capacity(bytes + 5000);
    let (values, longest) = ([2, 40, 256][random.below(3)], [12, 300, 5000][random.below(3)]);
    while contents.len() < bytes {
        let count = 1 + random.below(longest);
        match random.below(4) {
            0 => contents.resize(contents.len() + count, 0),
            1 if !contents.is_empty() => {
                let nearest = [16, 2100, 17_000, 70_000][random.below(4)].min(contents.len());
                let distance = 1 + random.below(nearest);
                (0..count).for_each(|_| contents.push(contents[contents.len() - distance]));
            }
            _ => (0..count.min(40)).for_each(|_| {
                contents.push(u8::try_from(random.below(values)).expect("below 256"));
            }),
        }
    }
    contents.truncate(bytes);
    contents
}

/// Checks one source in both versions against the model and liblzo2.
fn check(source: &[u8], liblzo2: Option<&mut Liblzo2>) {
    let what = || format!("{} bytes, seed {}", source.len(), seed());
    for version in VERSIONS {
        let stream = encode(source, version);
        assert!(decoded(&stream, source.len(), version).as_deref() == Some(source), "{}", what());
        assert!(model(&stream, version).as_deref() == Some(source), "{version:?}, {}", what());
        let has_version = stream.len() > 4 && stream[..2] == [17, 1];
        assert_eq!(has_version, version == Version::Runs && source.len() > 3, "{}", what());
        if has_version {
            assert_eq!(decoded(&stream, source.len(), Version::Original), None, "{}", what());
        } else {
            let by_newer = decoded(&stream, source.len(), Version::Runs);
            assert!(by_newer.as_deref() == Some(source), "version 1 reads version 0, {}", what());
        }
        // A destination of the exact length is enough; a shorter one is not.
        let mut dest = vec![0; stream.len()];
        let mut compressor = LzoCompressor::new(version);
        assert_eq!(compressor.encode(source, &mut dest), Ok(stream.len()), "{}", what());
        assert!(dest == stream);
        assert!(compressor.encode(source, &mut dest[1..]).is_err(), "{}", what());
    }
    let Some(liblzo2) = liblzo2 else { return };
    let ours = encode(source, Version::Original);
    let mut dest = vec![0xA5; source.len()];
    assert!(liblzo2.decompress(&ours, &mut dest), "liblzo2 refuses ours, {}", what());
    assert!(dest == source, "liblzo2 reads ours otherwise, {}", what());
    let mut theirs = vec![0; stream_bytes_max(source.len())];
    for which in 0..3 {
        let bytes = liblzo2.compress(which, source, &mut theirs);
        for newest in VERSIONS {
            let back = decoded(&theirs[..bytes], source.len(), newest);
            assert!(back.as_deref() == Some(source), "of compressor {which}, {}", what());
        }
        assert!(model(&theirs[..bytes], Version::Runs).as_deref() == Some(source), "{}", what());
    }
}

/// Goal: each encoding of the description is decoded as described. Method: streams written by hand,
/// at least one for each instruction, with the bytes that they stand for.
#[test]
fn every_instruction_is_read() {
    let bytes = |parts: &[&[u8]]| parts.concat();
    let zeros = |count: usize| vec![0_u8; count];
    let counted: Vec<u8> = (1..=255).collect();
    let mut random = Random::new(seed());
    let noise: Vec<u8> = (0..2100).map(|_| random.byte()).collect();
    let end: &[u8] = &[0x11, 0, 0];
    let cases: Vec<(&str, Vec<u8>, Vec<u8>)> = vec![
        ("nothing", end.to_vec(), vec![]),
        ("first byte: 3 literals", bytes(&[&[20], b"abc", end]), b"abc".to_vec()),
        ("first byte: 238", bytes(&[&[255], &counted[..238], end]), counted[..238].to_vec()),
        ("4 literals", bytes(&[&[1], b"abcd", end]), b"abcd".to_vec()),
        ("18 literals", bytes(&[&[15], &counted[..18], end]), counted[..18].to_vec()),
        ("19 literals", bytes(&[&[0, 1], &counted[..19], end]), counted[..19].to_vec()),
        ("18 + 255 + 1 literals", bytes(&[&[0, 0, 1], &zeros(274), end]), zeros(274)),
        (
            "2 bytes, 3 literals",
            bytes(&[&[19], b"ab", &[0b0111, 0], b"xyz", end]),
            b"ababxyz".to_vec(),
        ),
        (
            "3 to 4 bytes",
            bytes(&[&[21], b"abcd", &[0b0110_1101, 0], b"!", end]),
            b"abcdabcd!".to_vec(),
        ),
        (
            "5 to 8 bytes",
            bytes(&[&[21], b"abcd", &[0b1110_0000, 0], end]),
            b"abcddddddddd".to_vec(),
        ),
        (
            "within 16 KiB",
            bytes(&[&[21], b"abcd", &[0b0010_0011, 0b1100, 0], end]),
            b"abcdabcda".to_vec(),
        ),
        (
            "within 16 KiB, 33 + 255 + 2 bytes, 2 literals",
            bytes(&[&[18, 7], &[0b0010_0000, 0, 2, 2, 0], b"ab", end]),
            [vec![7; 1 + 33 + 257], b"ab".to_vec()].concat(),
        ),
        (
            "3 bytes from 2049 + 9 back, after 18 + 8 * 255 + 42 literals",
            bytes(&[&[0, 0, 0, 0, 0, 0, 0, 0, 0, 42], &noise, &[0b0100, 2], end]),
            bytes(&[&noise, &noise[42..45]]),
        ),
        (
            "a run of 4 + 8 + 1 zeros, 1 literal",
            bytes(&[&[17, 1, 1], b"abcd", &[0x19, 0xFD, 0xFF, 1], b"x", end]),
            [b"abcd".to_vec(), zeros(13), b"x".to_vec()].concat(),
        ),
        (
            "the longest run, then the shortest",
            bytes(&[&[17, 1, 1], b"abcd", &[0x1F, 0xFC, 0xFF, 0xFF, 0x18, 0xFC, 0xFF, 0], end]),
            [b"abcd".to_vec(), zeros(2051 + 4)].concat(),
        ),
        ("a version, without runs", bytes(&[&[17, 0, 1], b"abcd", end]), b"abcd".to_vec()),
    ];
    for (name, stream, expected) in cases {
        let read = model(&stream, Version::Runs);
        assert_eq!(read.as_ref(), Some(&expected), "{name}: the model");
        assert_eq!(decoded(&stream, expected.len(), Version::Runs), Some(expected), "{name}");
    }
}

/// Goal: everything that the description calls invalid is refused. Method: a stream for each such
/// thing.
#[test]
fn what_is_no_stream_is_refused() {
    for refused in [
        // A later version, a distance of 1 before the first byte, no end, and a false end.
        &[17, 2, 1, 0, 0, 0, 0, 0x11, 0, 0][..],
        &[0b0100_0000, 0, 0x11, 0, 0],
        &[21, 0, 0, 0, 0],
        &[21, 0, 0, 0, 0, 0x12, 0, 0],
        &[21, 0, 0, 0, 0, 0x11, 1, 0],
        &[21, 0, 0, 0, 0, 0x11, 0, 0, 0],
        &[16, 0, 0],
        &[],
    ] {
        for dest_bytes in [0, 4, 7] {
            assert_eq!(decoded(refused, dest_bytes, Version::Runs), None, "{refused:?}");
        }
    }
}

/// Goal: all data comes back, from our decoder, the model and liblzo2; and our decoder reads the
/// streams of liblzo2. Method: every length up to 700, then steps of 7 up to 4096 and random
/// lengths; literals, repetitions and runs.
#[test]
fn every_length_comes_back_everywhere() {
    let mut random = Random::new(seed());
    let mut liblzo2 = Liblzo2::load();
    for bytes in (0..700).chain((700..=4096).step_by(7)).chain([4095, 4096, 4097]) {
        check(&contents(&mut random, bytes), liblzo2.as_mut());
        let noise: Vec<u8> = (0..bytes).map(|_| random.byte()).collect();
        check(&noise, None);
        check(&vec![0; bytes], None);
    }
}

/// Goal: the same for units longer than every distance of the format, when the base moves, and when
/// a match or a run spans the whole window. Method: random contents; then a few special ones.
#[test]
fn long_units_come_back_everywhere() {
    let mut random = Random::new(seed());
    let mut liblzo2 = Liblzo2::load();
    for bytes in [16 << 10, 0xBFFF, 0xC000, 0xC020, 64 << 10, 128 << 10, 256 << 10, 2 << 20] {
        for _ in 0..(4 << 20) / bytes / 4 {
            check(&contents(&mut random, bytes), liblzo2.as_mut());
        }
    }
    let noise: Vec<u8> = (0..300_000).map(|_| random.byte()).collect();
    check(&noise, liblzo2.as_mut());
    check(&[&noise[..1000], &vec![0; 400_000], &noise[..60_000]].concat(), liblzo2.as_mut());
    check(&[&noise[..1000], &vec![9; 400_000], &noise[..60_000]].concat(), liblzo2.as_mut());
    check(&[&noise[..70_000], &noise[..70_000]].concat(), liblzo2.as_mut());
}

/// Goal: no match is read as a run (`LE-3`). Method: matches of every length around 261 to 264 at
/// distances around those with the bits `0x803F`, against the model, which looks for a run first.
#[test]
fn no_match_reads_as_a_run() {
    let mut random = Random::new(seed());
    let noise: Vec<u8> = (0..50_000).map(|_| random.byte()).collect();
    for distance in [0x803E, 0x803F, 0x8040, 0x807F, 0x9ABF, 0xBFBF, 0xBFFD, 0xBFFE, 0xBFFF, 0xC000]
    {
        for length in [260, 261, 262, 263, 264, 265, 515, 516, 519] {
            let mut source = noise[..distance].to_vec();
            source.extend_from_slice(&noise[..length]);
            // Different bytes must follow, and literals that set each of the two bits.
            source.push(noise[length] ^ 0x55);
            source.extend_from_slice(&noise[distance + 1..distance + 1 + length % 4]);
            source.extend_from_slice(&noise[100..150]);
            check(&source, None);
        }
    }
}

/// Goal: `ZC-4`: for any input the decoder agrees with the model, and with liblzo2 on every stream
/// that liblzo2 accepts. Method: streams of all kinds with bytes changed, removed or inserted;
/// shorter and longer destinations; noise.
#[test]
fn damaged_streams_are_read_as_by_the_model() {
    let mut random = Random::new(seed());
    let mut liblzo2 = Liblzo2::load();
    let mut read = 0;
    for round in 0..30_000 {
        let source_bytes = 1 + random.below(400);
        let source = contents(&mut random, source_bytes);
        let mut stream = match liblzo2.as_mut() {
            Some(liblzo2) if round % 2 == 0 => {
                let mut stream = vec![0; stream_bytes_max(source.len())];
                let bytes = liblzo2.compress(2, &source, &mut stream);
                stream.truncate(bytes);
                stream
            }
            _ => encode(&source, VERSIONS[round % 4 / 2]),
        };
        for _ in 0..random.below(4) {
            let at = random.below(stream.len());
            match random.below(6) {
                0 => drop(stream.remove(at)),
                1 => stream.insert(at, random.byte()),
                2 => stream[at] = [0, 0x11, 0x18, 0xFF, 0xFC, 0x20][random.below(6)],
                _ => stream[at] ^= 1 << random.below(8),
            }
            if stream.is_empty() {
                stream.push(random.byte());
            }
        }
        for newest in VERSIONS {
            let expected = model(&stream, newest);
            let bytes = expected.as_ref().map_or(source.len(), Vec::len);
            read += usize::from(expected.is_some());
            let back = decoded(&stream, bytes, newest);
            assert!(back == expected, "{newest:?}: {stream:x?} fills {bytes}, seed {}", seed());
            for other in [bytes.wrapping_sub(1), bytes + 1, bytes + 40] {
                if other < 1 << 20 {
                    assert_eq!(decoded(&stream, other, newest), None, "{stream:x?}, {other}");
                }
            }
        }
        if let (Some(liblzo2), Some(ours)) = (&liblzo2, model(&stream, Version::Original)) {
            let mut dest = vec![0; ours.len()];
            assert!(!liblzo2.decompress(&stream, &mut dest) || dest == ours, "{stream:x?}");
        }
    }
    assert!(read > 10_000, "only {read} of 60000 could be read");
}

/// Goal: the purpose of the variant: a page with runs of zeros is smaller with `lzo-rle`.
#[test]
fn runs_of_zeros_shrink_more_with_runs() {
    let mut random = Random::new(seed());
    let mut page = vec![0; 4096];
    for at in [0, 700, 1900, 3000] {
        page[at..at + 60].fill_with(|| random.byte());
    }
    let [original, runs] = VERSIONS.map(|version| encode(&page, version).len());
    assert!(runs < original, "{runs} bytes with runs, {original} without");
}
