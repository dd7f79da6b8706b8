//! The model's codecs against zlib and libdeflate, and against the error codes of the documents.

use zfolio_core::page::UnitOrder;
use zfolio_core::testing::{Random, seed};
use zfolio_core::zcomp::{Bare, Extent, Packed, Zcomp};

use super::inflate::{Limits, Stop, inflate};
use super::{deflate, engine};
use crate::checksum::{crc, xor};
use crate::layout::{Descriptor, FIXED, Record};
use crate::layout::{compress, decompress, error, flag, opcode, status};

/// Units that are longer than the window are zlib's, others libdeflate's.
const LARGE: usize = 65536;

fn order(bytes: usize) -> UnitOrder {
    UnitOrder::from_bytes(bytes).expect("a unit's size")
}

fn bare(params: &str, bytes: usize) -> Bare {
    Bare::new(&params.parse().expect("parameters"), order(bytes)).expect("there is memory")
}

fn limits(output_bytes_max: usize) -> Limits {
    Limits { output_bytes_max, steps_max: 1 << 24, is_last_block_meant: true }
}

/// Data of many kinds: noise, runs, text, copies from near and far.
fn data(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut data = Vec::new();
    let kind = random.below(4);
    while data.len() < bytes {
        let run = 1 + random.below(300);
        match random.below(4) {
            0 if kind > 0 => data.extend(vec![random.byte(); run]),
            1 if kind > 1 && !data.is_empty() => {
                let start = random.below(data.len());
                data.extend(data[start..(start + run).min(data.len())].to_vec());
            }
            2 if kind > 0 => data.extend((0..run).map(|_| b'a' + random.byte() % 16)),
            _ => data.extend(random.bytes(run)),
        }
    }
    data.truncate(bytes);
    data
}

/// Goal: what the model writes, zlib and libdeflate and the model itself read; matches stay inside of the window.
/// Method: data of all kinds and lengths, both ways to compress.
#[test]
fn both_libraries_read_what_the_model_writes() {
    let mut random = Random::new(seed());
    let mut readers = [bare("deflate", 4096), bare("deflate,window=12", LARGE)];
    for round in 0..2000 {
        let bytes = 1 + random.below(if round % 50 == 0 { 40_000 } else { 4096 });
        let data = data(&mut random, bytes);
        let fixed = deflate::with_aecs(&data, &FIXED, true).expect("all symbols have codes");
        for stream in [fixed, deflate::with_header(&data, true)] {
            let ours = inflate(&stream, limits(data.len())).expect("the window is kept");
            assert!(ours == (data.clone(), stream.len()), "seed {}, round {round}", seed());
            for reader in &mut readers {
                let mut theirs = vec![0; data.len()];
                assert!(reader.decompress(&stream, &mut theirs), "seed {}, {round}", seed());
                assert!(theirs == data, "seed {}, round {round}", seed());
            }
        }
    }
}

/// Goal: the model reads what software writes with a window of 4 KiB, in several blocks too; and refuses a longer one.
#[test]
fn model_reads_what_software_writes_for_it() {
    let mut random = Random::new(seed());
    for unit in [4096, LARGE] {
        let mut writer = bare("deflate,window=12", unit);
        for round in 0..if unit == LARGE { 40 } else { 500 } {
            let data = data(&mut random, unit);
            let mut stream = vec![0; unit];
            let Some(bytes) = writer.compress(&data, &mut stream) else { continue };
            let read = inflate(&stream[..bytes], limits(unit)).expect("the window is kept");
            assert!(read == (data, bytes), "seed {}, round {round}", seed());
        }
    }
    let noise = random.bytes(5000);
    let data = [&noise[..], &vec![0; 10_000], &noise[..]].concat();
    let mut stream = vec![0; LARGE];
    let bytes = bare("deflate,level=9", LARGE).compress(&data, &mut stream).expect("it repeats");
    let stop = inflate(&stream[..bytes], limits(LARGE)).err().map(|(stop, _)| stop);
    assert_eq!(stop, Some(Stop::Refused(error::BAD_DISTANCE)));
}

/// Goal: on damaged streams the model and zlib agree whether it is a stream, and on all of the data up to there.
#[test]
fn model_and_zlib_agree_on_damaged_streams() {
    let mut random = Random::new(seed());
    let zlib = Zcomp::new("deflate,window=12".parse().unwrap(), order(LARGE), 1).unwrap();
    let mut refusals = std::collections::BTreeSet::new();
    for round in 0..20_000 {
        let bytes = 1 + random.below(600);
        let data = data(&mut random, bytes);
        let mut stream = match round % 3 {
            0 => deflate::with_aecs(&data, &FIXED, true).expect("all symbols have codes"),
            1 => deflate::with_header(&data, true),
            _ => random.bytes(bytes.min(60)),
        };
        for _ in 0..random.below(3) {
            let at = random.below(stream.len().min(40));
            stream[at] ^= 1 << random.below(8);
        }
        let ours = inflate(&stream, limits(8192));
        let (data, refused) = match &ours {
            Ok((data, used)) => {
                stream.truncate(*used);
                (data, None)
            }
            Err((Stop::Refused(code), data)) => (data, Some(*code)),
            Err(_) => continue,
        };
        refusals.extend(refused);
        let mut theirs = vec![0; data.len()];
        let mut is_prefix = false;
        let one = Packed { source: &stream, dest: &mut [&mut theirs], extent: Extent::Prefix };
        zlib.decompress_batch(0, &mut [one], &mut |_, result| is_prefix = result.is_ok());
        assert!(is_prefix || refused.is_some(), "seed {}, round {round}", seed());
        assert!(!is_prefix || theirs == *data, "seed {}, round {round}", seed());
        let whole = zlib.decompress(0, &stream, &mut theirs).is_ok();
        if refused != Some(error::BAD_DISTANCE) {
            assert_eq!(whole, refused.is_none(), "seed {}, round {round}: {refused:?}", seed());
        }
    }
    assert!(refusals.len() >= 8, "few kinds of damage: {refusals:?}");
}

/// A stream of bits, written as text, first bit first.
fn bits(text: &str) -> Vec<u8> {
    let bits: Vec<u8> = text.bytes().filter(|byte| *byte != b' ').map(|byte| byte - b'0').collect();
    bits.chunks(8).map(|byte| byte.iter().rev().fold(0, |sum, bit| sum << 1 | bit)).collect()
}

/// Goal: the documented error for each kind of bad stream. Method: streams written by hand.
#[test]
fn bad_streams_have_the_documented_errors() {
    // The literal 0 with fixed codes, and a match of three bytes.
    let (zero, three) = ("00110000", "0000001");
    let refused = |text: &str| match inflate(&bits(text), limits(100)) {
        Err((Stop::Refused(code), _)) => code,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(refused("1 11"), error::BLOCK_TYPE);
    assert_eq!(refused(&format!("1 00 00000{}", "0".repeat(32))), error::STORED_LENGTH);
    assert_eq!(refused(&format!("1 10 {zero}")), error::BAD_END);
    assert_eq!(refused(&format!("1 10 {zero} {three} 00001")), error::BEFORE_START);
    assert_eq!(refused(&format!("1 10 {zero} {three} 11000 00000000000")), error::BAD_DISTANCE);
    assert_eq!(refused(&format!("1 10 {zero} {three} 11110")), error::UNDEFINED_DISTANCE);
    assert_eq!(refused("1 10 11000110"), error::UNDEFINED_LITERAL);
    assert_eq!(refused("1 01 01111 00000 0000"), error::TOO_MANY_LITERALS);
    assert_eq!(refused("1 01 00000 01111 0000"), error::TOO_MANY_DISTANCES);
    assert_eq!(
        refused(&format!("1 01 00000 00000 0000 {}", "100".repeat(4))),
        error::BAD_LENGTHS_CODE
    );
    // Codes of length 1 for the lengths 16 and 0: the first repeats nothing.
    let two_codes = "1 01 00000 00000 0000 100 000 000 100";
    assert_eq!(refused(&format!("{two_codes} 1")), error::FIRST_LITERAL_REPEATS);
    // All lengths are 0.
    let no_codes = format!("{two_codes} {}", "0".repeat(258));
    assert_eq!(refused(&no_codes), error::NO_LITERAL_CODE);
    let endless = inflate(&bits(&format!("1 10 {}", zero.repeat(50))), limits(10));
    assert_eq!(endless.expect_err("ten bytes").0, Stop::Overflow);
    let few = Limits { steps_max: 20, ..limits(100) };
    let slow = inflate(&bits(&format!("1 10 {}", zero.repeat(50))), few);
    assert_eq!(slow.expect_err("twenty steps").0, Stop::Watchdog);
}

const FLAGS: u32 = flag::RECORD_VALID | flag::RECORD_WANTED;

fn descriptor(opcode: u8, codec_flags: u16, lengths: [u32; 2]) -> Descriptor {
    Descriptor {
        flags_opcode: u32::from(opcode) << 24 | FLAGS,
        source: 0x10000,
        dest: 0x20000,
        source_bytes: lengths[0],
        dest_bytes_max: lengths[1],
        codec_flags,
        ..Descriptor::default()
    }
}

#[test]
fn descriptors_are_refused_for_what_is_wrong_with_them() {
    let good = descriptor(opcode::COMPRESS, compress::ONE_PASS_LAST, [100, 100]);
    let aecs = FLAGS | flag::READ_AECS | u32::from(opcode::COMPRESS) << 24;
    for (bad, why) in [
        (descriptor(0x56, 0, [1, 1]), status::BAD_OPCODE),
        (Descriptor { flags_opcode: good.flags_opcode | 1 << 9, ..good }, status::INVALID_FLAGS),
        (Descriptor { source_bytes: 0, ..good }, status::INVALID_SIZE),
        (Descriptor { dest_bytes_max: (2 << 20) + 1, ..good }, status::INVALID_SIZE),
        (Descriptor { dest: 0x10020, ..good }, status::OVERLAPPING),
        (Descriptor { flags_opcode: aecs, ..good }, status::INVALID_SIZE),
        (
            Descriptor { flags_opcode: aecs, aecs: 16, aecs_bytes: 1568, ..good },
            status::ADDRESS_ALIGNMENT,
        ),
        (Descriptor { codec_flags: 1 << 9, ..good }, status::INVALID_CODEC_FLAGS),
        (Descriptor { inputs: 1, ..good }, status::INVALID_FILTER_FLAGS),
    ] {
        assert_eq!(engine::refusal(&bad), Some(why), "{bad:?}");
    }
    assert_eq!(engine::refusal(&good), None);
}

/// Goal: records have the counts and checksums of the documents, for a compression, its decompression, one without
/// output, and one that does not fit.
#[test]
fn records_have_counts_and_checksums() {
    let data = b"to be or not to be or to be".repeat(10);
    let ends = compress::FLUSH_OUTPUT | compress::APPEND_END;
    let one_pass = descriptor(opcode::COMPRESS, ends | compress::ONE_PASS_LAST, [270, 270]);
    let packed = engine::execute(&one_pass, &data, None, 1000);
    let expected = Record {
        status: status::SUCCESS,
        bytes_completed: 270,
        output_bytes: u32::try_from(packed.output.len()).unwrap(),
        crc: crc(&data),
        xor: xor(&data),
        ..Record::default()
    };
    assert_eq!(packed.record, expected);
    let flags = decompress::ENABLE | decompress::STOP_AND_CHECK | decompress::LAST_BLOCK;
    let unpack = descriptor(opcode::DECOMPRESS, flags, [expected.output_bytes, 270]);
    let trailing = [&packed.output[..], b"more"].concat();
    let unpacked = engine::execute(&unpack, &trailing, None, 1000);
    let swapped = Record { bytes_completed: expected.output_bytes, output_bytes: 270, ..expected };
    assert!(unpacked.record == swapped && unpacked.output == data);
    let silent = Descriptor { codec_flags: flags | decompress::SUPPRESS_OUTPUT, ..unpack };
    let silent = engine::execute(&silent, &trailing, None, 1000);
    assert!(silent.record == swapped && silent.output.is_empty());
    let short = Descriptor { dest_bytes_max: 20, ..one_pass };
    let short = engine::execute(&short, &data, None, 1000);
    let why = (short.record.status, short.record.error, short.output.len());
    assert_eq!(why, (status::ANALYTICS_ERROR, error::OUTPUT_OVERFLOW, 20));
    let slow = engine::execute(&unpack, &packed.output, None, 5);
    assert_eq!(slow.record.status, status::WATCHDOG);
}
