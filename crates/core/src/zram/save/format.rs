//! The bytes of a saved disk.
//!
//! ```text
//! header   16  "zfolio disk\r\n\x1a\n\0"
//!           4  version, 1
//!           4  bytes of the header, its check included
//!           8  bytes of the disk
//!         192  the key of the checksums
//!           1  log2 of the pages of a unit
//!           1  number of algorithms
//!              for each a byte with the length of its name, and the name with its parameters: `zstd,level=9`
//!              notes: bytes of the servers of the disk, up to the check; mostly none
//!           8  check
//! record    1  what: 1 one machine word, 2 compressed, 3 did not shrink, 4 the end
//!           1  the algorithm, by its place in the header
//!           2  1: no algorithm of the disk could shrink it; 2: it could not be read any more, and has no object
//!           4  bytes of the object; 0 of one machine word, and of what could not be read
//!           8  index of the unit; at the end the number of records before
//!          16  checksum of the unit, or its word
//!              the object
//!           8  check
//! ```
//!
//! Numbers are little-endian. Records have rising indices; what is not there reads as zeros. The last record is the
//! end, and nothing follows it.
//!
//! A check is the lower half of the 128-bit XXH3 of what is before it in its header or record, seeded with the check
//! before. So each byte counts for all checks behind it: a byte that was altered, bytes that are missing, and records
//! that were left out, repeated or exchanged are found.

use std::fmt;
use std::io::{self, Read, Write};

use twox_hash::XxHash3_128;

use crate::page::{PAGE_BYTES, UNIT_ORDER_MAX, UnitOrder};
use crate::store::{Checksum, CodecId, Form, Key};
use crate::zcomp::Params;
use crate::zram::{ALGORITHMS_MAX, is_size};

/// What a file begins with. The line breaks do not survive a transfer as text.
const MAGIC: [u8; 16] = *b"zfolio disk\r\n\x1a\n\0";

/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;

/// Bytes in front of the names of the algorithms.
const HEADER_FIXED: usize = MAGIC.len() + 4 + 4 + 8 + Key::BYTES + 2;

const CHECK_BYTES: usize = 8;

/// Bytes of the longest notes.
pub const NOTES_BYTES_MAX: usize = 4096;

/// Bytes of the longest header.
const HEADER_MAX: usize =
    HEADER_FIXED + ALGORITHMS_MAX * (1 + u8::MAX as usize) + NOTES_BYTES_MAX + CHECK_BYTES;

/// Bytes of a record in front of its object.
const HEAD_BYTES: usize = 32;

const _: () = assert!(HEAD_BYTES == 1 + 1 + 2 + 4 + 8 + Checksum::BYTES);

const SAME_FILLED: u8 = 1;
const COMPRESSED: u8 = 2;
const INCOMPRESSIBLE: u8 = 3;
const END: u8 = 4;

/// The flag of a unit that no algorithm could shrink.
const NO_CODEC: u16 = 1;

/// The flag of a unit that could not be read.
const LOST: u16 = 2;

/// What the disk was made of.
#[derive(Clone, Debug)]
pub struct Header {
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// The unit.
    pub unit: UnitOrder,
    /// The algorithms, by their priority.
    pub algorithms: Vec<Params>,
    /// With which the checksums were taken.
    pub key: Key,
    /// What the servers of the disk have to know when it is loaded: bytes that mean nothing to the disk itself,
    /// [`NOTES_BYTES_MAX`] at most.
    pub notes: Vec<u8>,
}

/// A unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record<'b> {
    pub(super) unit: u64,
    pub(super) form: Form,
    pub(super) has_no_codec: bool,
    /// It could not be read when it was saved. No unit has its checksum.
    pub(super) is_lost: bool,
    pub(super) checksum: Checksum,
    pub(super) object: &'b [u8],
}

/// Why a saved disk is not read.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file is none.
    Magic,
    /// It is of another version.
    Version {
        /// Which one.
        found: u32,
    },
    /// It ends too early.
    Truncated {
        /// Where.
        at: u64,
    },
    /// It is not what was written.
    Damaged {
        /// Where the header or record begins that is not.
        at: u64,
        /// What about it is wrong.
        what: &'static str,
    },
    /// An algorithm is not known here.
    Algorithm {
        /// Its name.
        name: String,
    },
    /// The system's.
    Io(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Magic => f.write_str("not a saved disk"),
            Error::Version { found } => {
                write!(f, "saved as version {found}; accepted: {VERSION}")
            }
            Error::Truncated { at } => write!(f, "the file ends at byte {at}, in the middle"),
            Error::Damaged { at, what } => write!(f, "damaged from byte {at} on: {what}"),
            Error::Algorithm { name } => write!(f, "the algorithm '{name}' is not known"),
            Error::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

/// The check of bytes that follow others.
fn check(before: u64, bytes: &[u8]) -> u64 {
    let hash = XxHash3_128::oneshot_with_seed(before, bytes);
    u64::try_from(hash & u128::from(u64::MAX)).expect("64 bits")
}

/// Writes a saved disk.
pub(super) struct Writer<'w> {
    to: &'w mut dyn Write,
    check: u64,
    /// What is written next, but for its check.
    bytes: Vec<u8>,
    records: u64,
    written: u64,
}

impl<'w> Writer<'w> {
    /// Writes the header.
    ///
    /// # Errors
    ///
    /// The system's.
    ///
    /// # Panics
    ///
    /// If there are more algorithms than a disk has, or longer notes than [`NOTES_BYTES_MAX`].
    pub(super) fn begin(header: &Header, to: &'w mut dyn Write) -> io::Result<Writer<'w>> {
        assert!(header.algorithms.len() <= ALGORITHMS_MAX, "{header:?}");
        assert!(header.notes.len() <= NOTES_BYTES_MAX, "{header:?}");
        let mut names = Vec::new();
        for params in &header.algorithms {
            let name = params.to_string();
            names.push(u8::try_from(name.len()).expect("a name of some words"));
            names.extend(name.bytes());
        }
        let length = HEADER_FIXED + names.len() + header.notes.len() + CHECK_BYTES;
        let length = u32::try_from(length).expect("HEADER_MAX");
        let counts = [header.unit.get(), u8::try_from(header.algorithms.len()).expect("four")];
        let parts: [&[u8]; 8] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &length.to_le_bytes(),
            &header.disk_bytes.to_le_bytes(),
            header.key.secret(),
            &counts,
            &names,
            &header.notes,
        ];
        let mut writer = Writer { to, check: 0, bytes: parts.concat(), records: 0, written: 0 };
        writer.put()?;
        Ok(writer)
    }

    /// Notes a unit. It is written by the next [`Writer::put`]: so the caller need not hold the unit meanwhile.
    pub(super) fn note(&mut self, record: &Record<'_>) {
        let (what, codec) = match record.form {
            Form::SameFilled => (SAME_FILLED, CodecId::FIRST),
            Form::Compressed(codec) => (COMPRESSED, codec),
            Form::Incompressible(codec) => (INCOMPRESSIBLE, codec),
        };
        let flags =
            (u16::from(record.has_no_codec) * NO_CODEC) | (u16::from(record.is_lost) * LOST);
        self.head(
            (what, codec),
            flags,
            record.object.len(),
            record.unit,
            record.checksum.to_bytes(),
        );
        self.bytes.extend_from_slice(record.object);
        self.records += 1;
    }

    fn head(
        &mut self,
        (what, codec): (u8, CodecId),
        flags: u16,
        length: usize,
        number: u64,
        checksum: [u8; Checksum::BYTES],
    ) {
        debug_assert!(self.bytes.is_empty(), "put() comes between");
        let codec = u8::try_from(codec.get()).expect("16 codecs");
        self.bytes.extend([what, codec]);
        self.bytes.extend(flags.to_le_bytes());
        self.bytes.extend(u32::try_from(length).expect("a unit has 2 MiB").to_le_bytes());
        self.bytes.extend(number.to_le_bytes());
        self.bytes.extend(checksum);
    }

    /// Writes what was noted.
    ///
    /// # Errors
    ///
    /// The system's.
    pub(super) fn put(&mut self) -> io::Result<()> {
        self.check = check(self.check, &self.bytes);
        self.bytes.extend(self.check.to_le_bytes());
        self.to.write_all(&self.bytes)?;
        self.written += self.bytes.len() as u64;
        self.bytes.clear();
        Ok(())
    }

    /// Writes the end. Returns how many bytes there are in all.
    ///
    /// # Errors
    ///
    /// The system's.
    pub(super) fn end(mut self) -> io::Result<u64> {
        let none = [0; Checksum::BYTES];
        self.head((END, CodecId::FIRST), 0, 0, self.records, none);
        self.put()?;
        self.to.flush()?;
        Ok(self.written)
    }
}

/// Reads a saved disk.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    header: Header,
    check: u64,
    /// The header or record that was read last.
    bytes: Vec<u8>,
    at: u64,
    records: u64,
    /// No record may have a lower index.
    next_unit: u64,
}

/// Takes a number off the front of bytes of which there are enough.
fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (first, rest) = bytes.split_first_chunk().expect("the caller has looked");
    *bytes = rest;
    *first
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn open(from: R) -> Result<Reader<R>, Error> {
        let mut reader = Reader {
            from,
            header: Header {
                disk_bytes: 0,
                unit: UnitOrder::DEFAULT,
                algorithms: Vec::new(),
                key: Key::new([0; Key::BYTES]),
                notes: Vec::new(),
            },
            check: 0,
            bytes: Vec::new(),
            at: 0,
            records: 0,
            next_unit: 0,
        };
        reader.header = reader.read_header()?;
        Ok(reader)
    }

    /// What the disk was made of.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How many bytes were read, of whole records.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Reads so many bytes more of the present header or record.
    fn read(&mut self, count: usize) -> Result<(), Error> {
        let have = self.bytes.len();
        self.bytes.resize(have + count, 0);
        let mut filled = have;
        while filled < self.bytes.len() {
            match self.from.read(&mut self.bytes[filled..]) {
                Ok(0) => return Err(Error::Truncated { at: self.at + filled as u64 }),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Io(error)),
            }
        }
        Ok(())
    }

    fn damaged<T>(&self, what: &'static str) -> Result<T, Error> {
        Err(Error::Damaged { at: self.at, what })
    }

    /// The present header or record is whole: its check is right.
    fn close(&mut self) -> Result<(), Error> {
        let (bytes, found) = self.bytes.split_last_chunk::<CHECK_BYTES>().expect("it was read");
        let expected = check(self.check, bytes);
        if u64::from_le_bytes(*found) != expected {
            return self.damaged("its check is wrong");
        }
        self.check = expected;
        Ok(())
    }

    fn read_header(&mut self) -> Result<Header, Error> {
        match self.read(HEADER_FIXED) {
            Err(Error::Truncated { .. }) if !self.bytes.starts_with(&MAGIC) => {
                return Err(Error::Magic);
            }
            other => other?,
        }
        let (magic, rest) = self.bytes.split_at(MAGIC.len());
        let mut rest = rest;
        if magic != MAGIC {
            return Err(Error::Magic);
        }
        let found = u32::from_le_bytes(take(&mut rest));
        if found != VERSION {
            return Err(Error::Version { found });
        }
        let length = usize::try_from(u32::from_le_bytes(take(&mut rest))).unwrap_or(usize::MAX);
        if !(HEADER_FIXED + CHECK_BYTES..=HEADER_MAX).contains(&length) {
            return self.damaged("the length of its header");
        }
        self.read(length - HEADER_FIXED)?;
        self.close()?;
        let (mut rest, end) = (&self.bytes[MAGIC.len() + 4 + 4..], length - CHECK_BYTES);
        let disk_bytes = u64::from_le_bytes(take(&mut rest));
        let key = Key::new(take(&mut rest));
        let [order, count] = take(&mut rest);
        let unit = (order <= UNIT_ORDER_MAX).then(|| UnitOrder::from_bytes(PAGE_BYTES << order));
        let Some(unit) = unit.flatten() else { return self.damaged("its unit") };
        if !is_size(disk_bytes, unit) {
            return self.damaged("the size of the disk");
        }
        if !(1..=ALGORITHMS_MAX).contains(&usize::from(count)) {
            return self.damaged("the number of its algorithms");
        }
        let mut names = &self.bytes[HEADER_FIXED..end];
        let mut algorithms = Vec::new();
        for _ in 0..count {
            let name = names.split_first();
            let name = name.and_then(|(length, after)| after.split_at_checked((*length).into()));
            let Some((name, after)) = name else {
                return self.damaged("the name of an algorithm");
            };
            let name = String::from_utf8_lossy(name).into_owned();
            let params: Params =
                name.parse().map_err(|_| Error::Algorithm { name: name.clone() })?;
            if params.dictionary.is_some() {
                return Err(Error::Algorithm { name });
            }
            algorithms.push(params);
            names = after;
        }
        let notes = names.to_vec();
        if notes.len() > NOTES_BYTES_MAX {
            return self.damaged("the length of its notes");
        }
        self.advance();
        Ok(Header { disk_bytes, unit, algorithms, key, notes })
    }

    fn advance(&mut self) {
        self.at += self.bytes.len() as u64;
        self.bytes.clear();
    }

    /// The next unit. `None`: that was the last, and the file ends there.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub(super) fn next(&mut self) -> Result<Option<Record<'_>>, Error> {
        self.advance();
        self.read(HEAD_BYTES)?;
        let mut head = &self.bytes[..];
        let [what, codec] = take(&mut head);
        let flags = u16::from_le_bytes(take(&mut head));
        let length = usize::try_from(u32::from_le_bytes(take(&mut head))).unwrap_or(usize::MAX);
        let number = u64::from_le_bytes(take(&mut head));
        let checksum = take(&mut head);
        // Before it is known to be right: so much is read at most.
        let unit_bytes = self.header.unit.bytes();
        if length > unit_bytes {
            return self.damaged("the length of an object");
        }
        self.read(length + CHECK_BYTES)?;
        self.close()?;
        if what == END {
            return self.read_end(number);
        }
        let is_lost = flags & LOST != 0;
        let codec = CodecId::new(codec.into());
        let Some(codec) = codec.filter(|codec| codec.get() < self.header.algorithms.len()) else {
            return self.damaged("the algorithm of a unit");
        };
        let (form, has_length) = match what {
            SAME_FILLED => (Form::SameFilled, length == 0),
            COMPRESSED => (Form::Compressed(codec), (1..unit_bytes).contains(&length)),
            INCOMPRESSIBLE if is_lost => (Form::Incompressible(codec), length == 0),
            INCOMPRESSIBLE => (Form::Incompressible(codec), length == unit_bytes),
            _ => return self.damaged("the form of a unit"),
        };
        let checksum = Checksum::from_bytes(checksum);
        let Some(checksum) = checksum.filter(|sum| sum.is_of_word() == (what == SAME_FILLED))
        else {
            return self.damaged("the checksum of a unit");
        };
        let units = self.header.disk_bytes / unit_bytes as u64;
        let is_flagged = flags & !(NO_CODEC | LOST) == 0 && (!is_lost || what == INCOMPRESSIBLE);
        if !has_length || !is_flagged || !(self.next_unit..units).contains(&number) {
            return self.damaged("the length, flags or index of a unit");
        }
        (self.records, self.next_unit) = (self.records + 1, number + 1);
        let object = &self.bytes[HEAD_BYTES..HEAD_BYTES + length];
        let has_no_codec = flags & NO_CODEC != 0;
        Ok(Some(Record { unit: number, form, has_no_codec, is_lost, checksum, object }))
    }

    /// The end says how many records there were, and nothing follows it.
    fn read_end(&mut self, records: u64) -> Result<Option<Record<'_>>, Error> {
        if records != self.records {
            return self.damaged("the number of units");
        }
        self.advance();
        match self.read(1) {
            Err(Error::Truncated { .. }) => Ok(None),
            Ok(()) => self.damaged("it has bytes behind its end"),
            Err(error) => Err(error),
        }
    }
}

/// Makes all checks right, as far as the bytes have records: so that a fuzzer gets past them.
#[cfg(any(test, fuzzing))]
pub(super) fn reseal(bytes: &mut [u8]) {
    let word = |bytes: &[u8], at: usize| -> Option<usize> {
        let four = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(four)).ok()
    };
    let (mut at, mut seed) = (0, 0);
    let mut length = word(bytes, MAGIC.len() + 4).and_then(|all| all.checked_sub(CHECK_BYTES));
    while let Some(sealed) = length {
        let Some(record) =
            bytes.get_mut(at..).and_then(|rest| rest.get_mut(..sealed + CHECK_BYTES))
        else {
            return;
        };
        let (bare, end) = record.split_at_mut(sealed);
        seed = check(seed, bare);
        end.copy_from_slice(&seed.to_le_bytes());
        at += sealed + CHECK_BYTES;
        length = word(bytes, at + 4).map(|object| HEAD_BYTES + object);
    }
}
