//! Raw deflate (RFC 1951) as the device reads it: matches at most 4 KiB back, and an error code for everything else.

use super::huffman::Decoder;
use crate::layout::{WINDOW_BYTES, error};

/// Why a stream was not decompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It is no stream that the device reads: a code of [`error`].
    Refused(u8),
    /// It has more bytes than there is room for.
    Overflow,
    /// It took more steps than are allowed.
    Watchdog,
}

/// The limits of one job.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Room for output.
    pub output_bytes_max: usize,
    /// Headers, lengths and symbols that may be read.
    pub steps_max: usize,
    /// Whether the stream ends with its last block. Otherwise with the first.
    pub is_last_block_meant: bool,
}

/// Lengths and extra bits of the symbols from 257 on; the last one is the longest match alone.
pub(super) const LENGTHS: [(u16, u8); 29] = {
    let mut lengths = values(3, 4);
    lengths[28] = (258, 0);
    lengths
};

/// Distances and extra bits of their symbols.
pub(super) const DISTANCES: [(u16, u8); 30] = values(1, 2);

/// First values and extra bits of symbols (RFC 1951, 3.2.5): two groups without extra bits, then one more bit for each
/// group.
#[expect(clippy::cast_possible_truncation, reason = "13 bits at most")]
const fn values<const N: usize>(first: u16, group: usize) -> [(u16, u8); N] {
    let mut values = [(0, 0); N];
    let (mut symbol, mut next) = (0, first);
    while symbol < N {
        let bits = (symbol / group).saturating_sub(1) as u8;
        values[symbol] = (next, bits);
        next = next.wrapping_add(1 << bits);
        symbol += 1;
    }
    values
}

const _: () = {
    assert!(LENGTHS[8].0 == 11 && LENGTHS[8].1 == 1 && LENGTHS[27].0 == 227 && LENGTHS[27].1 == 5);
    assert!(DISTANCES[29].0 == 24577 && DISTANCES[29].1 == 13 && DISTANCES[4].0 == 5);
};

/// The order in which a header has the lengths of the code of lengths.
pub(super) const LENGTHS_ORDER: [usize; 19] =
    [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// The symbol of the end of a block.
pub(super) const END_OF_BLOCK: u16 = 256;

/// Decompresses one stream. Returns the data and how many bytes of `source` it used.
///
/// # Errors
///
/// Why not, and the data before that point.
pub fn inflate(source: &[u8], limits: Limits) -> Result<(Vec<u8>, usize), (Stop, Vec<u8>)> {
    let mut state = State { source, at: 0, output: Vec::new(), steps: 0, limits };
    match state.blocks() {
        Ok(()) => Ok((state.output, state.at.div_ceil(8))),
        Err(stop) => Err((stop, state.output)),
    }
}

struct State<'a> {
    source: &'a [u8],
    /// In bits.
    at: usize,
    output: Vec<u8>,
    steps: usize,
    limits: Limits,
}

impl State<'_> {
    fn blocks(&mut self) -> Result<(), Stop> {
        loop {
            self.step()?;
            let is_last = self.bits(1)? == 1;
            match self.bits(2)? {
                0 => self.stored()?,
                1 => self.coded(&fixed_codes())?,
                2 => {
                    let codes = self.codes()?;
                    self.coded(&codes)?;
                }
                _ => return Err(Stop::Refused(error::BLOCK_TYPE)),
            }
            if is_last || !self.limits.is_last_block_meant {
                return Ok(());
            }
        }
    }

    fn step(&mut self) -> Result<(), Stop> {
        self.steps += 1;
        if self.steps > self.limits.steps_max { Err(Stop::Watchdog) } else { Ok(()) }
    }

    /// The next `count` bits, at most 16, first bit lowest.
    fn bits(&mut self, count: u8) -> Result<u16, Stop> {
        let end = self.at + usize::from(count);
        if end > self.source.len() * 8 {
            return Err(Stop::Refused(error::BAD_END));
        }
        let byte = |at: usize| u32::from(self.source.get(at).copied().unwrap_or(0));
        let first = self.at / 8;
        let word = byte(first) | byte(first + 1) << 8 | byte(first + 2) << 16;
        let bits = word >> (self.at % 8) & ((1 << count) - 1);
        self.at = end;
        Ok(u16::try_from(bits).expect("16 bits at most"))
    }

    fn symbol(&mut self, code: &Decoder, undefined: u8) -> Result<u16, Stop> {
        self.step()?;
        code.symbol(|| self.bits(1))?.ok_or(Stop::Refused(undefined))
    }

    fn push(&mut self, byte: u8) -> Result<(), Stop> {
        if self.output.len() == self.limits.output_bytes_max {
            return Err(Stop::Overflow);
        }
        self.output.push(byte);
        Ok(())
    }

    fn stored(&mut self) -> Result<(), Stop> {
        self.at = self.at.next_multiple_of(8);
        let (length, inverse) = (self.bits(16)?, self.bits(16)?);
        if length != !inverse {
            return Err(Stop::Refused(error::STORED_LENGTH));
        }
        let start = self.at / 8;
        let source = self.source;
        let bytes = &source[start..(start + usize::from(length)).min(source.len())];
        bytes.iter().try_for_each(|byte| self.push(*byte))?;
        if bytes.len() < usize::from(length) {
            return Err(Stop::Refused(error::BAD_END));
        }
        self.at += 8 * bytes.len();
        Ok(())
    }

    /// Reads the codes of a block: of literals and lengths, and of distances.
    fn codes(&mut self) -> Result<[Decoder; 2], Stop> {
        let literals = usize::from(self.bits(5)?) + 257;
        let distances = usize::from(self.bits(5)?) + 1;
        let count = usize::from(self.bits(4)?) + 4;
        if literals > 286 {
            return Err(Stop::Refused(error::TOO_MANY_LITERALS));
        }
        if distances > 30 {
            return Err(Stop::Refused(error::TOO_MANY_DISTANCES));
        }
        let mut lengths = [0_u8; 19];
        for place in &LENGTHS_ORDER[..count] {
            lengths[*place] = self.bits(3)?.to_le_bytes()[0];
        }
        let refused = |code| move |_| Stop::Refused(code);
        let code = Decoder::new(&lengths, false).map_err(refused(error::BAD_LENGTHS_CODE))?;
        let lengths = self.lengths(&code, literals + distances)?;
        let (of_literals, of_distances) = lengths.split_at(literals);
        if of_literals[usize::from(END_OF_BLOCK)] == 0 {
            return Err(Stop::Refused(error::NO_LITERAL_CODE));
        }
        Ok([
            Decoder::new(of_literals, true).map_err(refused(error::BAD_LITERALS_CODE))?,
            Decoder::new(of_distances, true).map_err(refused(error::BAD_DISTANCES_CODE))?,
        ])
    }

    /// Reads the lengths of `count` symbols.
    fn lengths(&mut self, code: &Decoder, count: usize) -> Result<Vec<u8>, Stop> {
        let mut lengths = Vec::with_capacity(count);
        while lengths.len() < count {
            let (length, times) = match self.symbol(code, error::UNDEFINED_LENGTH_CODE)? {
                16 => {
                    let last = lengths.last().copied();
                    let last = last.ok_or(Stop::Refused(error::FIRST_LITERAL_REPEATS))?;
                    (last, 3 + self.bits(2)?)
                }
                17 => (0, 3 + self.bits(3)?),
                18 => (0, 11 + self.bits(7)?),
                length => (length.to_le_bytes()[0], 1),
            };
            lengths.resize(lengths.len() + usize::from(times), length);
        }
        if lengths.len() > count {
            return Err(Stop::Refused(error::WRONG_CODE_COUNT));
        }
        Ok(lengths)
    }

    /// Reads the symbols of one block to its end.
    fn coded(&mut self, [literals, distances]: &[Decoder; 2]) -> Result<(), Stop> {
        loop {
            let symbol = self.symbol(literals, error::UNDEFINED_LITERAL)?;
            match symbol {
                0..END_OF_BLOCK => self.push(symbol.to_le_bytes()[0])?,
                END_OF_BLOCK => return Ok(()),
                _ => {
                    let length = self.value(&LENGTHS, symbol - 257, error::UNDEFINED_LITERAL)?;
                    let symbol = self.symbol(distances, error::UNDEFINED_DISTANCE)?;
                    let distance = self.value(&DISTANCES, symbol, error::UNDEFINED_DISTANCE)?;
                    self.copy(usize::from(length), usize::from(distance))?;
                }
            }
        }
    }

    fn value(&mut self, table: &[(u16, u8)], symbol: u16, undefined: u8) -> Result<u16, Stop> {
        let entry = table.get(usize::from(symbol)).ok_or(Stop::Refused(undefined))?;
        Ok(entry.0 + self.bits(entry.1)?)
    }

    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Stop> {
        if distance > WINDOW_BYTES {
            return Err(Stop::Refused(error::BAD_DISTANCE));
        }
        let Some(start) = self.output.len().checked_sub(distance) else {
            return Err(Stop::Refused(error::BEFORE_START));
        };
        (start..start + length).try_for_each(|at| self.push(self.output[at]))
    }
}

/// The codes of a block of type 1.
fn fixed_codes() -> [Decoder; 2] {
    let mut literals = [8; 288];
    literals[144..256].fill(9);
    literals[256..280].fill(7);
    let code = |lengths: &[u8]| Decoder::new(lengths, false).expect("these are complete");
    [code(&literals), code(&[5; 32])]
}
