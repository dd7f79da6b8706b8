//! Recorded accesses to pages, in a file: `zfolio bench replacement --record` writes it.
//!
//! # The file
//!
//! ```text
//! magic     8 bytes, "zfoliotr"
//! version   1 byte, 1
//! access    1 byte of flags: 0 a read, 1 a write;
//!           then the difference to the page number before (0 at first),
//!           folded to even numbers for 0, 1, 2, ..., odd ones for -1, -2, ...,
//!           7 bits a byte, the lowest first, with bit 7 set in each byte but the last
//! ...
//! end       1 byte, 255; then the number of accesses, 7 bits a byte as above
//! ```
//!
//! A page number is an address divided by 4096.
//!
//! # Cost
//!
//! 2 to 4 bytes for most accesses in the file, and 16 bytes for each in memory.

use std::io::{self, Write};

const MAGIC: &[u8; 8] = b"zfoliotr";
const VERSION: u8 = 1;
const WRITE: u8 = 1;
const END: u8 = 255;

/// The most accesses of a recording: 4 GiB in memory.
pub const ACCESSES_MAX: usize = 1 << 28;

/// Page numbers are below this: addresses have 64 bits.
const PAGE_MAX: u64 = 1 << 52;

/// One access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touch {
    /// The number of the page: its address divided by 4096.
    pub page: u64,
    /// Whether it writes.
    pub write: bool,
}

/// Writes a file.
///
/// # Errors
///
/// Those of `out`.
pub fn write(out: &mut impl Write, touches: &[Touch]) -> io::Result<()> {
    out.write_all(MAGIC)?;
    out.write_all(&[VERSION])?;
    let mut before = 0;
    for touch in touches {
        let down = touch.page < before;
        let distance = touch.page.abs_diff(before);
        let folded = if down { 2 * distance - 1 } else { 2 * distance };
        out.write_all(&[if touch.write { WRITE } else { 0 }])?;
        write_number(out, folded)?;
        before = touch.page;
    }
    out.write_all(&[END])?;
    write_number(out, touches.len() as u64)
}

fn write_number(out: &mut impl Write, mut number: u64) -> io::Result<()> {
    while let high @ 1.. = number >> 7 {
        out.write_all(&[number.to_le_bytes()[0] | 0x80])?;
        number = high;
    }
    out.write_all(&[number.to_le_bytes()[0]])
}

/// Reads the bytes of a file.
///
/// # Errors
///
/// What is wrong with them, and where.
pub fn read(bytes: &[u8]) -> Result<Vec<Touch>, String> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("not a trace: the first 8 bytes differ")?;
    let rest = match rest.split_first() {
        Some((&VERSION, rest)) => rest,
        Some((version, _)) => return Err(format!("version {version}; accepted: {VERSION}")),
        None => return Err("the file ends before its version".to_owned()),
    };
    let mut input = Input { rest, total: bytes.len() };
    let (mut touches, mut page) = (Vec::new(), 0);
    loop {
        let at = input.offset();
        let flags = input.byte()?;
        let number = input.number()?;
        match flags {
            END if number != touches.len() as u64 => {
                let found = touches.len();
                return Err(format!("byte {at}: {number} accesses were written, {found} read"));
            }
            END if input.rest.is_empty() => return Ok(touches),
            END => return Err(format!("byte {}: bytes after the end", input.offset())),
            0 | WRITE => {}
            _ => return Err(format!("byte {at}: flags {flags}; accepted: 0, 1, 255")),
        }
        let distance = number.div_ceil(2);
        let moved = if number % 2 == 0 {
            Some(distance).and_then(|distance| distance.checked_add(page))
        } else {
            u64::checked_sub(page, distance)
        };
        page = moved
            .filter(|page| *page < PAGE_MAX)
            .ok_or_else(|| format!("byte {at}: the page is outside of all addresses"))?;
        if touches.len() == ACCESSES_MAX {
            return Err(format!("byte {at}: more than {ACCESSES_MAX} accesses"));
        }
        touches.push(Touch { page, write: flags == WRITE });
    }
}

/// The bytes not read yet.
struct Input<'b> {
    rest: &'b [u8],
    total: usize,
}

impl Input<'_> {
    fn offset(&self) -> usize {
        self.total - self.rest.len()
    }

    fn byte(&mut self) -> Result<u8, String> {
        let Some((byte, rest)) = self.rest.split_first() else {
            return Err(format!("the file ends too early, after {} bytes", self.total));
        };
        self.rest = rest;
        Ok(*byte)
    }

    fn number(&mut self) -> Result<u64, String> {
        let at = self.offset();
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for one bit.
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(format!("byte {at}: a number of more than 64 bits"))
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE_MAX, Touch, read, write};
    use crate::testing::{Random, seed};

    fn written(touches: &[Touch]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, touches).unwrap();
        bytes
    }

    fn random_touches(random: &mut Random, count: usize) -> Vec<Touch> {
        let mut touch = |_| {
            let bits = 1 + random.below_u64(52);
            let page = random.below_u64(1 << bits);
            Touch { page, write: random.below(2) == 0 }
        };
        (0..count).map(&mut touch).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let seed = seed();
        let mut random = Random::new(seed);
        for count in [0, 1, 2, 1_000] {
            let touches = random_touches(&mut random, count);
            assert_eq!(read(&written(&touches)), Ok(touches), "seed {seed}");
        }
        let far = [PAGE_MAX - 1, 0, PAGE_MAX - 1].map(|page| Touch { page, write: true });
        assert_eq!(read(&written(&far)), Ok(far.to_vec()));
    }

    /// Goal: no damaged file is read as a whole one or makes the reader panic. Method: every
    /// prefix, extra bytes, and random changes of bytes; a change may give another valid file, but
    /// never one with another number of accesses than its end says.
    #[test]
    fn damaged_files_are_refused() {
        let seed = seed();
        let mut random = Random::new(seed);
        let touches = random_touches(&mut random, 50);
        let bytes = written(&touches);
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "seed {seed}, {length} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(read(&longer).is_err());
        for _ in 0..5_000 {
            let mut damaged = bytes.clone();
            let at = random.below(damaged.len());
            damaged[at] = random.byte();
            if let Ok(found) = read(&damaged) {
                assert!(at > 8 && found.len() <= damaged.len(), "seed {seed}, byte {at}");
                assert!(found.iter().all(|touch| touch.page < PAGE_MAX));
            }
        }
    }

    /// Goal: each check of the reader has a case.
    #[test]
    fn each_damage_has_its_message() {
        let cases: [(&[u8], &str); 8] = [
            (b"zfolio", "not a trace"),
            (b"zfoliotr", "ends before its version"),
            (b"zfoliotr\x02", "version 2"),
            (b"zfoliotr\x01\x07\x00", "byte 9: flags 7"),
            (b"zfoliotr\x01\x00\x01", "byte 9: the page is outside"),
            (b"zfoliotr\x01\xff\x01", "byte 9: 1 accesses were written, 0 read"),
            (b"zfoliotr\x01\xff\x00\x00", "byte 11: bytes after"),
            (b"zfoliotr\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "more than 64 bits"),
        ];
        for (bytes, message) in cases {
            let error = read(bytes).unwrap_err();
            assert!(error.contains(message), "{error:?} lacks {message:?}");
        }
    }
}
