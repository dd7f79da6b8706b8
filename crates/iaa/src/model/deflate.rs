//! Raw deflate as the device writes it: one block, matches at most 4 KiB back.

use super::huffman;
use super::inflate::{DISTANCES, END_OF_BLOCK, LENGTHS, LENGTHS_ORDER};
use crate::layout::{AecsCompress, WINDOW_BYTES, error};

/// The shortest and the longest match of deflate.
const MATCH_BYTES: std::ops::RangeInclusive<usize> = 3..=258;

const HASH_BITS: u32 = 12;

/// A literal, or a match.
#[derive(Debug, Clone, Copy)]
enum Token {
    Literal(u8),
    Match { bytes: usize, distance: usize },
}

/// Codes of literals and lengths, and of distances: their bits, first bit highest, and their length.
#[derive(Debug)]
struct Codes {
    literals: Vec<(u16, u8)>,
    distances: Vec<(u16, u8)>,
}

/// Compresses with the codes and after the bits of `aecs`.
///
/// # Errors
///
/// A code of [`error`]: the AECS cannot be used.
pub(super) fn with_aecs(source: &[u8], aecs: &AecsCompress, ends: bool) -> Result<Vec<u8>, u8> {
    let bits = usize::try_from(aecs.output_bits).unwrap_or(usize::MAX);
    if bits > aecs.output.len() * 8 {
        return Err(error::BAD_AECS);
    }
    let mut writer = Writer::default();
    (0..bits).for_each(|bit| writer.push(aecs.output[bit / 8] >> (bit % 8) & 1 == 1));
    let split = |code: &u32| {
        let [low, high, ..] = (code & 0x7FFF).to_le_bytes();
        (u16::from_le_bytes([low, high]), (code >> 15).to_le_bytes()[0] & 0xF)
    };
    let codes = Codes {
        literals: aecs.literals.iter().map(split).collect(),
        distances: aecs.distances.iter().map(split).collect(),
    };
    writer.block(&tokens(source), &codes, ends)?;
    Ok(writer.bytes)
}

/// Compresses with the best codes for `source`, as a last block with their header.
pub(super) fn with_header(source: &[u8], ends: bool) -> Vec<u8> {
    let tokens = tokens(source);
    let (mut literals, mut distances) = ([0_u32; 286], [0_u32; 30]);
    literals[usize::from(END_OF_BLOCK)] = 1;
    for token in &tokens {
        match token {
            Token::Literal(byte) => literals[usize::from(*byte)] += 1,
            Token::Match { bytes, distance } => {
                literals[257 + entry(&LENGTHS, *bytes)] += 1;
                distances[entry(&DISTANCES, *distance)] += 1;
            }
        }
    }
    let lengths = [&literals[..], &distances].map(|of| huffman::lengths(of, huffman::LENGTH_MAX));
    let code = |lengths: &[u8]| huffman::codes(lengths).into_iter().zip(lengths.to_vec()).collect();
    let codes = Codes { literals: code(&lengths[0]), distances: code(&lengths[1]) };
    let mut writer = Writer::default();
    // The last block, type 2.
    writer.bits(0b101, 3);
    writer.header(&lengths);
    writer.block(&tokens, &codes, ends).expect("every symbol that is used has a code");
    writer.bytes
}

/// Cuts `source` into literals and the first match found of each place.
fn tokens(source: &[u8]) -> Vec<Token> {
    let mut last = vec![usize::MAX; 1 << HASH_BITS];
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < source.len() {
        let found = seen(&mut last, source, at).filter(|before| at - before <= WINDOW_BYTES);
        let bytes = found.map_or(0, |before| common_bytes(source, before, at));
        match found {
            Some(before) if bytes >= *MATCH_BYTES.start() => {
                tokens.push(Token::Match { bytes, distance: at - before });
                (at + 1..at + bytes).for_each(|at| _ = seen(&mut last, source, at));
                at += bytes;
            }
            _ => {
                tokens.push(Token::Literal(source[at]));
                at += 1;
            }
        }
    }
    tokens
}

/// Where the three bytes at `at` may have been before; remembers this place.
fn seen(last: &mut [usize], source: &[u8], at: usize) -> Option<usize> {
    let [a, b, c] = *source.get(at..at + 3)? else { return None };
    let hash = u32::from_le_bytes([a, b, c, 0]).wrapping_mul(0x9E37_79B1) >> (32 - HASH_BITS);
    let place = &mut last[usize::try_from(hash).expect("12 bits")];
    let before = std::mem::replace(place, at);
    (before != usize::MAX).then_some(before)
}

fn common_bytes(source: &[u8], before: usize, at: usize) -> usize {
    let pairs = source[at..].iter().zip(&source[before..]).take(*MATCH_BYTES.end());
    pairs.take_while(|(a, b)| a == b).count()
}

/// The entry of a table of lengths or distances that has `value`.
fn entry(table: &[(u16, u8)], value: usize) -> usize {
    table.partition_point(|(first, _)| usize::from(*first) <= value) - 1
}

/// Bits, first bit lowest in the first byte; the last byte is filled with zeros.
#[derive(Debug, Default)]
struct Writer {
    bytes: Vec<u8>,
    /// Bits in the last byte, 0 if it is full.
    used: u32,
}

impl Writer {
    fn push(&mut self, bit: bool) {
        if self.used == 0 {
            self.bytes.push(0);
        }
        let last = self.bytes.last_mut().expect("pushed above, or not full");
        *last |= u8::from(bit) << self.used;
        self.used = (self.used + 1) % 8;
    }

    /// A number, lowest bit first.
    fn bits(&mut self, number: usize, count: u8) {
        (0..count).for_each(|bit| self.push(number >> bit & 1 == 1));
    }

    /// A code, first bit first.
    fn code(&mut self, (code, length): (u16, u8)) -> Result<(), u8> {
        if length == 0 {
            return Err(error::INVALID_CODE);
        }
        (0..length).rev().for_each(|bit| self.push(code >> bit & 1 == 1));
        Ok(())
    }

    fn block(&mut self, tokens: &[Token], codes: &Codes, ends: bool) -> Result<(), u8> {
        for token in tokens {
            match token {
                Token::Literal(byte) => self.code(codes.literals[usize::from(*byte)])?,
                Token::Match { bytes, distance } => {
                    let length = entry(&LENGTHS, *bytes);
                    self.code(codes.literals[257 + length])?;
                    self.bits(bytes - usize::from(LENGTHS[length].0), LENGTHS[length].1);
                    let place = entry(&DISTANCES, *distance);
                    self.code(codes.distances[place])?;
                    self.bits(distance - usize::from(DISTANCES[place].0), DISTANCES[place].1);
                }
            }
        }
        if ends { self.code(codes.literals[usize::from(END_OF_BLOCK)]) } else { Ok(()) }
    }

    /// The lengths of both codes, with runs.
    fn header(&mut self, [literals, distances]: &[Vec<u8>; 2]) {
        let trimmed = |lengths: &[u8], least: usize| {
            lengths.iter().rposition(|length| *length > 0).map_or(least, |last| least.max(last + 1))
        };
        let counts = (trimmed(literals, 257), trimmed(distances, 1));
        let runs = runs(&[&literals[..counts.0], &distances[..counts.1]].concat());
        let mut frequencies = [0; 19];
        runs.iter().for_each(|(symbol, ..)| frequencies[usize::from(*symbol)] += 1);
        let lengths = huffman::lengths(&frequencies, 7);
        let codes = huffman::codes(&lengths);
        let last = LENGTHS_ORDER.iter().rposition(|place| lengths[*place] > 0).unwrap_or(0);
        let count = (last + 1).max(4);
        self.bits(counts.0 - 257, 5);
        self.bits(counts.1 - 1, 5);
        self.bits(count - 4, 4);
        LENGTHS_ORDER[..count].iter().for_each(|place| self.bits(lengths[*place].into(), 3));
        for (symbol, extra, extra_bits) in runs {
            let symbol = usize::from(symbol);
            self.code((codes[symbol], lengths[symbol])).expect("it was counted");
            self.bits(extra, extra_bits);
        }
    }
}

/// Lengths as symbols of the code of lengths: with the number after each, and its bits.
fn runs(lengths: &[u8]) -> Vec<(u8, usize, u8)> {
    let mut runs = Vec::new();
    for run in lengths.chunk_by(|a, b| a == b) {
        let mut left = run.len();
        while left > 0 {
            let is_first = left == run.len();
            let (symbol, times) = match (run[0], left) {
                (0, 11..) => ((18, left.min(138) - 11, 7), left.min(138)),
                (0, 3..) => ((17, left - 3, 3), left),
                (1.., 3..) if !is_first => ((16, left.min(6) - 3, 2), left.min(6)),
                (length, _) => ((length, 0, 0), 1),
            };
            runs.push(symbol);
            left -= times;
        }
    }
    runs
}
