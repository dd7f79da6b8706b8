//! Tests against a naive decoder with its own table of operations and rings, against streams
//! written bit by bit, and against the kernel's library if one is given.

use std::ffi::{CString, c_char, c_int, c_void};

use super::super::tests::{Random, seed};
use super::crc::crc;
use super::decoder::decode;
use super::encoder::{Dictionary, encode};

/// The operations from 0 on, as published.
const OPERATIONS: [&str; 26] = [
    "D8",
    "D4 D2 I2",
    "D4 I2 D2",
    "D4 I2 I2",
    "D4 I4",
    "D2 I2 D4",
    "D2 I2 D2 I2",
    "D2 I2 I2 D2",
    "D2 I2 I2 I2",
    "D2 I2 I4",
    "I2 D2 D4",
    "I2 D4 I2",
    "I2 D2 I2 D2",
    "I2 D2 I2 I2",
    "I2 D2 I4",
    "I2 I2 D4",
    "I2 I2 D2 I2",
    "I2 I2 I2 D2",
    "I2 I2 I2 I2",
    "I2 I2 I4",
    "I4 D4",
    "I4 D2 I2",
    "I4 I2 D2",
    "I4 I2 I2",
    "I4 I4",
    "I8",
];

/// The CRC, a bit at a time.
fn naive_crc(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte) << 24, |crc: u32, _| {
            (crc << 1) ^ if crc >> 31 == 1 { 0x04C1_1DB7 } else { 0 }
        })
    })
}

/// The bytes of a string of `0` and `1`, filled up to a multiple of 8 bytes.
fn bytes_of(bits: &str) -> Vec<u8> {
    let bits: String = bits.split_whitespace().collect();
    let mut bytes: Vec<u8> = bits
        .as_bytes()
        .chunks(8)
        .map(|byte| byte.iter().enumerate().map(|(at, bit)| (bit - b'0') << (7 - at)).sum())
        .collect();
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

fn bits_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:08b}")).collect()
}

/// `bits`, followed by the end and the CRC of `dest`.
fn ended(bits: &str, dest: &[u8]) -> Vec<u8> {
    bytes_of(&format!("{bits} 11110 {:032b}", naive_crc(dest)))
}

/// The rest of a stream, for the model.
struct Bits(Vec<u8>);

impl Bits {
    fn take(&mut self, count: usize) -> Option<usize> {
        let taken = self.0.get(..count)?;
        let number = taken.iter().fold(0, |number, bit| number << 1 | usize::from(bit - b'0'));
        self.0.drain(..count);
        Some(number)
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        (0..count).map(|_| self.take(8).and_then(|byte| u8::try_from(byte).ok())).collect()
    }
}

/// The contents of the slots of 2, 4 and 8 bytes.
type Rings = [Vec<Option<Vec<u8>>>; 3];

/// The bytes that the operations of `source` write, and the bits after the end. The rings are
/// filled slot by slot after each phrase. With `forgets`, the slots that a phrase fills are empty
/// while it is decoded.
fn operations(source: &[u8], forgets: bool) -> Option<(Vec<u8>, Bits)> {
    let (mut bits, mut dest) = (Bits(bits_of(source).into_bytes()), Vec::new());
    let mut rings: Rings = [vec![None; 256], vec![None; 512], vec![None; 256]];
    let fill = |rings: &mut Rings, at: usize, phrase: Option<&[u8]>| {
        for (ring, slot_bytes) in rings.iter_mut().zip([2, 4, 8]) {
            for part in 0..8 / slot_bytes {
                let slot = (at / slot_bytes + part) % ring.len();
                ring[slot] = phrase.map(|phrase| phrase[part * slot_bytes..][..slot_bytes].into());
            }
        }
    };
    loop {
        let mut phrases = vec![];
        if forgets {
            fill(&mut rings, dest.len(), None);
        }
        match bits.take(5)? {
            operation @ 0..=25 => {
                let mut phrase = vec![];
                for action in OPERATIONS[operation].split(' ') {
                    phrase.extend(match action {
                        "I2" => rings[0][bits.take(8)?].clone()?,
                        "I4" => rings[1][bits.take(9)?].clone()?,
                        "I8" => rings[2][bits.take(8)?].clone()?,
                        data => bits.bytes(data[1..].parse().expect("a number"))?,
                    });
                }
                phrases.push(phrase);
            }
            27 => {
                let before = dest.get(dest.len().checked_sub(8)?..)?.to_vec();
                phrases.resize(bits.take(6)? + 1, before);
            }
            28 => phrases.push(vec![0; 8]),
            29 => {
                let count = bits.take(3).filter(|count| *count > 0)?;
                dest.extend(bits.bytes(count)?);
                if bits.take(5)? != 30 {
                    return None;
                }
                break;
            }
            30 => break,
            _ => return None,
        }
        for phrase in phrases {
            assert_eq!(phrase.len(), 8);
            fill(&mut rings, dest.len(), Some(&phrase));
            dest.extend(phrase);
        }
    }
    Some((dest, bits))
}

/// The bytes that the stream `source` stands for.
fn model(source: &[u8]) -> Option<Vec<u8>> {
    let (dest, mut bits) = operations(source, false)?;
    let crc = bits.take(32)?;
    let is_whole = crc == naive_crc(&dest) as usize && source.len() % 8 == 0;
    let is_padded = bits.0.len() < 64 && bits.0.iter().all(|bit| *bit == b'0');
    (is_whole && is_padded).then_some(dest)
}

fn stream_bytes_max(source_bytes: usize) -> usize {
    source_bytes + source_bytes / 8 + 24
}

fn encoded(source: &[u8]) -> Vec<u8> {
    let mut dest = vec![0xA5; stream_bytes_max(source.len())];
    let bytes = encode(source, &mut dest, &mut Dictionary::new()).expect("fits");
    dest.truncate(bytes);
    dest
}

/// Decodes to exactly `dest_bytes` between guards.
fn decoded(source: &[u8], dest_bytes: usize) -> Option<Vec<u8>> {
    let mut guarded = vec![0xA5; dest_bytes + 128];
    let result = decode(source, &mut guarded[64..64 + dest_bytes]);
    let mut guards = guarded[..64].iter().chain(&guarded[64 + dest_bytes..]);
    assert!(guards.all(|byte| *byte == 0xA5), "ZC-4: wrote outside of the destination");
    result.is_ok().then(|| guarded[64..64 + dest_bytes].to_vec())
}

/// Values of each length that repeat near and far, zeros, and repeated phrases.
fn contents(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut contents: Vec<u8> = Vec::with_capacity(bytes + 1000);
    let values = [2, 40, 256][random.below(3)];
    while contents.len() < bytes {
        let length = [2, 4, 8][random.below(3)];
        match random.below(8) {
            0 => contents.resize(contents.len() + [8, 16, 24, 32, 600][random.below(5)], 0),
            1 if contents.len() >= 8 => {
                let phrase = contents[contents.len() - 8..].to_vec();
                (0..1 + random.below(70)).for_each(|_| contents.extend_from_slice(&phrase));
            }
            2..=6 if contents.len() >= 8 => {
                let nearest = [64, 530, 2100][random.below(3)].min(contents.len() - length + 1);
                let from = contents.len() - length - random.below(nearest);
                let value = contents[from / length * length..][..length].to_vec();
                contents.extend_from_slice(&value);
            }
            _ => (0..8).for_each(|_| {
                contents.push(u8::try_from(random.below(values)).expect("below 256"));
            }),
        }
    }
    contents.truncate(bytes);
    contents
}

type Transform = unsafe extern "C" fn(*const u8, u32, *mut u8, *mut u32, *mut c_void) -> c_int;

/// A library with the interface of the kernel's `linux/sw842.h`, named by the environment variable
/// `SW842_LIBRARY`. No distribution has one; the kernel's `lib/842` compiles in user space with a
/// page of macros. It is under the GPL, so nothing is built with it.
struct Kernel {
    compress: Transform,
    /// It has one argument less, and ignores the last one.
    decompress: Transform,
    /// `SW842_MEM_COMPRESS`, 0xF000 bytes.
    scratch: Vec<u64>,
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

impl Kernel {
    /// `None` if there is none, with a message.
    fn load() -> Option<Kernel> {
        let Ok(name) = std::env::var("SW842_LIBRARY") else {
            eprintln!("SKIPPED: SW842_LIBRARY is not set, nothing was compared with the kernel's");
            return None;
        };
        let name = CString::new(name).expect("a path");
        // SAFETY: a name that ends in 0, and RTLD_NOW.
        let library = unsafe { dlopen(name.as_ptr(), 2) };
        assert!(!library.is_null(), "{name:?} can be loaded");
        let function = |name: &std::ffi::CStr| {
            // SAFETY: a library that is open, and a name that ends in 0.
            let function = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!function.is_null(), "it has {name:?}");
            // SAFETY: both functions have this type, or this one without its last argument, which
            // the calling convention of C lets a caller pass.
            unsafe { std::mem::transmute::<*mut c_void, Transform>(function) }
        };
        Some(Kernel {
            compress: function(c"sw842_compress"),
            decompress: function(c"sw842_decompress"),
            scratch: vec![0; 0xF000 / 8],
        })
    }

    fn call(&mut self, function: Transform, source: &[u8], dest_bytes: usize) -> Option<Vec<u8>> {
        let mut dest = vec![0; dest_bytes];
        let source_bytes = u32::try_from(source.len()).expect("a test's");
        let mut bytes = u32::try_from(dest_bytes).expect("a test's");
        let (from, to) = (source.as_ptr(), dest.as_mut_ptr());
        let scratch = self.scratch.as_mut_ptr().cast();
        // SAFETY: both buffers have the lengths that are given, and the scratch the one it needs.
        let result = unsafe { function(from, source_bytes, to, &raw mut bytes, scratch) };
        dest.truncate(bytes as usize);
        (result == 0).then_some(dest)
    }

    fn compress(&mut self, source: &[u8]) -> Vec<u8> {
        self.call(self.compress, source, stream_bytes_max(source.len())).expect("fits")
    }

    fn decompress(&mut self, source: &[u8], dest_bytes: usize) -> Option<Vec<u8>> {
        self.call(self.decompress, source, dest_bytes)
    }
}

fn check(source: &[u8], kernel: Option<&mut Kernel>) {
    let what = || format!("{} bytes, seed {}", source.len(), seed());
    let stream = encoded(source);
    assert!(decoded(&stream, source.len()).as_deref() == Some(source), "ours, {}", what());
    assert!(model(&stream).as_deref() == Some(source), "the model, {}", what());
    assert!(operations(&stream, true).is_some(), "P8-1, {}", what());
    if let Some(kernel) = kernel {
        let read = kernel.decompress(&stream, source.len());
        assert!(read.as_deref() == Some(source), "the kernel's decoder, {}", what());
        let theirs = kernel.compress(source);
        let read = decoded(&theirs, source.len());
        assert!(read.as_deref() == Some(source), "the kernel's encoder, {}", what());
        assert!(model(&theirs).as_deref() == Some(source), "the kernel's encoder, {}", what());
        assert!(stream.len() <= theirs.len() + theirs.len() / 16 + 8, "{}", what());
    }
}

/// Goal: the CRC is the published one. Method: the check value of CRC-32/CKSUM, which inverts the
/// result; then bit by bit, at every length around the block.
#[test]
fn crc_is_the_published_one() {
    assert_eq!(crc(b"123456789"), !0x765E_7680);
    let bytes: Vec<u8> = (0..100_u8).map(|at| at.wrapping_mul(37)).collect();
    for length in 0..bytes.len() {
        assert_eq!(crc(&bytes[..length]), naive_crc(&bytes[..length]), "{length} bytes");
    }
}

/// Goal: the bits of a stream have the places that the format requires. Method: streams written by
/// hand.
#[test]
fn streams_by_hand_are_written_and_read() {
    let zero = [0xE7, 0x80, 0, 0, 0, 0, 0, 0];
    // 11100 11110 and a CRC of 0.
    assert_eq!(bytes_of(&format!("11100 11110 {:032b}", 0)), zero);
    let text = bits_of(b"abcdefgh");
    for (source, bits) in [
        (vec![], String::new()),
        (vec![0; 8], "11100".into()),
        (vec![0; 16], "11100 11100".into()),
        (vec![0; 24], "11100 11100 11100".into()),
        (vec![0; 32], "11100 11011 000010".into()),
        (vec![0; 8 * 66], "11100 11011 111111 11100".into()),
        (b"abcdefgh".to_vec(), format!("00000 {text}")),
        (b"abcdefgh".repeat(3), format!("00000 {text} 11011 000001")),
        (
            b"abcdefgh\0\0\0\0\0\0\0\0abcdefgh".to_vec(),
            format!("00000 {text} 11100 11001 00000000"),
        ),
        // A four from slot 1, and bytes: 4, 0.
        (
            b"abcdefghefghABCD".to_vec(),
            format!("00000 {text} 10100 000000001 {}", bits_of(b"ABCD")),
        ),
        // Bytes and a two from slot 2; a two from slot 1 and bytes: 1, 2.
        (
            b"abcdefghABefcdAB".to_vec(),
            format!("00000 {text} 00111 {} 00000010 00000001 {}", bits_of(b"AB"), bits_of(b"AB")),
        ),
        // Two twos; a four: 3, 4.
        (b"abcdefghcdababcd".to_vec(), format!("00000 {text} 10011 00000001 00000000 000000000")),
        (b"abc".to_vec(), format!("11101 011 {}", bits_of(b"abc"))),
        (b"abcdefghi".to_vec(), format!("00000 {text} 11101 001 {}", bits_of(b"i"))),
    ] {
        let stream = ended(&bits, &source);
        assert_eq!(encoded(&source), stream, "{source:?}");
        assert_eq!(decoded(&stream, source.len()), Some(source.clone()), "{bits}");
        assert_eq!(model(&stream), Some(source), "{bits}");
    }
}

/// Goal: streams of the kernel are decoded. Method: a stream that its `sw842_compress` (6.1) made,
/// with phrases of all kinds, a repetition and short data.
#[test]
fn a_stream_of_the_kernels_is_read() {
    let text = b"compressed memory, compressed swap, compressed store: 8, 4 and 2.";
    let source = [&text[..], &[0; 24], &b"compress".repeat(5), b"tail"].concat();
    let stream = "031b7b6b83932b9b981959081b595b5bdc80f25840c6dedae0e4065737365642\
                  07377230b81610002c010420732ba378a1d101c160080d08185b99080c805c00\
                  000000000001cd80800630a0b0c4b9b19685f6176b9ba30b4b67a77272110000";
    let hex = |at| u8::from_str_radix(&stream[at..at + 2], 16).expect("two digits");
    let stream: Vec<u8> = (0..stream.len()).step_by(2).map(hex).collect();
    assert_eq!(model(&stream).as_deref(), Some(&source[..]));
    assert_eq!(decoded(&stream, source.len()), Some(source));
}

/// Goal: each operation is decoded as published. Method: after 4 phrases of distinct values each
/// operation, with arguments that name all slots in turn.
#[test]
fn every_operation_is_read() {
    let past: Vec<u8> = (1..=32).collect();
    let mut random = Random::new(seed());
    for (operation, actions) in OPERATIONS.iter().enumerate() {
        for _ in 0..50 {
            let (mut bits, mut expected) = (String::new(), past.clone());
            past.chunks(8).for_each(|phrase| bits += &format!("00000{}", bits_of(phrase)));
            bits += &format!("{operation:05b}");
            for action in actions.split(' ') {
                let length: usize = action[1..].parse().expect("a number");
                let slot = random.below(32 / length);
                let value: Vec<u8> = match &action[..1] {
                    "I" => past[slot * length..][..length].to_vec(),
                    _ => (0..length).map(|_| random.byte()).collect(),
                };
                bits += &match (&action[..1], length) {
                    ("I", 4) => format!("{slot:09b}"),
                    ("I", _) => format!("{slot:08b}"),
                    _ => bits_of(&value),
                };
                expected.extend(value);
            }
            let stream = ended(&bits, &expected);
            assert_eq!(decoded(&stream, expected.len()), Some(expected.clone()), "{actions}");
            assert_eq!(model(&stream), Some(expected), "{actions}");
        }
    }
}

/// Goal: invalid streams are refused. Method: a stream for each reason.
#[test]
fn what_is_no_stream_is_refused() {
    let text = bits_of(b"abcdefgh");
    let whole = ended(&format!("00000 {text}"), b"abcdefgh");
    assert!(decoded(&whole, 8).is_some());
    let mut refused = vec![
        // Operations that do not exist, a slot that was never filled, nothing to repeat.
        ended(&format!("00000 {text} 11010"), b"abcdefgh"),
        ended(&format!("00000 {text} 11111"), b"abcdefgh"),
        ended(&format!("00000 {text} 11001 00000001"), b"abcdefghabcdefgh"),
        ended("11001 00000000", &[0; 8]),
        ended("11011 000000", &[0; 8]),
        // A slot of the phrase itself.
        ended(&format!("00000 {text} 00001 {} 00000100", bits_of(b"ABCDEF")), b"abcdefghABCDEFAB"),
        // Short operations that are empty, or not last.
        ended(&format!("00000 {text} 11101 000"), b"abcdefgh"),
        ended(&format!("11101 001 01100001 00000 {text}"), b"aabcdefgh"),
        // A wrong CRC, bits after the end, one more word, one more byte.
        ended(&format!("00000 {text}"), b"abcdefgi"),
        bytes_of(&format!("00000 {text} 11110 {:032b} 1", naive_crc(b"abcdefgh"))),
        [&whole[..], &[0; 8]].concat(),
        [&whole[..], &[0]].concat(),
        vec![],
    ];
    refused.extend((0..whole.len()).map(|length| whole[..length].to_vec()));
    for refused in refused {
        for dest_bytes in [0, 1, 8, 9, 16] {
            assert_eq!(decoded(&refused, dest_bytes), None, "{refused:x?}");
        }
        assert_eq!(model(&refused), None, "{refused:x?}");
    }
}

/// Goal: all data comes back, from our decoder, the model and the kernel's; our decoder reads the
/// kernel's streams; and `P8-1`, by a model that forgets. Method: every length up to 300, random
/// lengths up to 5000, units of 4 to 64 KiB.
#[test]
fn every_length_comes_back_everywhere() {
    let mut random = Random::new(seed());
    let mut kernel = Kernel::load();
    let lengths: Vec<usize> = (0..300).chain((0..150).map(|_| random.below(5000))).collect();
    for bytes in lengths.into_iter().chain([4096, 4096, 4096, 16 << 10, 64 << 10]) {
        check(&contents(&mut random, bytes), kernel.as_mut());
    }
    let noise: Vec<u8> = (0..5000).map(|_| random.byte()).collect();
    check(&noise, kernel.as_mut());
    // A repetition that covers a whole ring, and a value that lies exactly one ring back.
    check(&[&noise[..16], &vec![0; 6000], &noise[..16]].concat(), kernel.as_mut());
    for distance in [504, 512, 520, 2040, 2048, 2056] {
        check(&[&noise[..distance], &noise[..64]].concat(), kernel.as_mut());
    }
}

/// Goal: `ZC-4`: for any input the decoder agrees with the model. Method: streams with bits
/// changed, bytes removed or inserted, with and without a corrected CRC; other destinations.
#[test]
fn damaged_streams_are_read_as_by_the_model() {
    let mut random = Random::new(seed());
    let mut read = 0;
    for _ in 0..6000 {
        let source_bytes = 8 * (1 + random.below(80));
        let source = contents(&mut random, source_bytes);
        let mut stream = encoded(&source);
        for _ in 0..random.below(4) {
            let at = random.below(stream.len());
            match random.below(8) {
                0 => drop(stream.remove(at)),
                1 => stream.insert(at, random.byte()),
                _ => stream[at] ^= 1 << random.below(8),
            }
        }
        let mut streams = vec![(stream.clone(), model(&stream))];
        // A wrong CRC would hide how the operations are decoded.
        if let Some((dest, rest)) = operations(&stream, false) {
            let bits = bits_of(&stream);
            let bits = &bits[..bits.len() - rest.0.len()];
            streams.push((bytes_of(&format!("{bits}{:032b}", naive_crc(&dest))), Some(dest)));
        }
        for (stream, expected) in streams {
            let bytes = expected.as_ref().map_or(source.len(), Vec::len);
            read += usize::from(expected.is_some());
            assert!(decoded(&stream, bytes) == expected, "{stream:x?}, seed {}", seed());
            for other in [bytes.wrapping_sub(8), bytes.wrapping_sub(1), bytes + 1, bytes + 8] {
                if other < 1 << 20 {
                    assert_eq!(decoded(&stream, other), None, "{stream:x?}, {other}");
                }
            }
        }
    }
    assert!(read > 3000, "only {read} of 12000 could be read");
}
