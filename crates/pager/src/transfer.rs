//! Moves bytes between regions and files, sockets, or other readers and writers.
//!
//! In inline mode the kernel cannot touch compressed pages, so the bytes go through a buffer that
//! is not managed. In handler mode the reader or writer gets the region itself.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::{Bound, Range, RangeBounds};

use crate::config::Mode;
use crate::region::Region;

/// The most bytes that one call of a reader or writer moves; the size of the buffer.
const CHUNK_BYTES: usize = 256 << 10;

/// A transfer ended early: `bytes` were moved, in order and without a gap, before `error`.
#[derive(Debug)]
pub struct TransferError {
    /// How many bytes were moved. The rest of the range is as it was ([`Region::read_from`]), or
    /// was not written ([`Region::write_to`]).
    pub bytes: usize,
    /// Why the transfer ended.
    pub error: io::Error,
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} bytes: {}", self.bytes, self.error)
    }
}

impl std::error::Error for TransferError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<TransferError> for io::Error {
    fn from(error: TransferError) -> io::Error {
        io::Error::new(error.error.kind(), error)
    }
}

impl Region {
    /// Fills `range` from `reader`, and returns the number of bytes read: the length of the range,
    /// or less if the reader ended before (its `read` returned 0). The rest of the range is as it
    /// was.
    ///
    /// Like [`Read::read_exact`], it continues after a short read, and after
    /// [`ErrorKind::Interrupted`]. It never reads more than the range can hold, and at most 256 KiB
    /// in one call of `read`.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// # let path = std::env::temp_dir().join(format!("zfolio-doc-read-{}", std::process::id()));
    /// # std::fs::write(&path, b"hello")?;
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut region = pager.map(64 << 20)?;
    /// let mut file = std::fs::File::open(&path)?;
    /// let length = region.read_from(.., &mut file)?;
    /// assert_eq!(&region[..length], b"hello");
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The reader's first other error, including `WouldBlock` of a socket that does not block: the
    /// transfer can continue from [`TransferError::bytes`]. `InvalidData` if the reader claims more
    /// bytes than it was asked for. `OutOfMemory` with [`Builder::strict`](crate::Builder::strict)
    /// while the limit is passed.
    ///
    /// # Panics
    ///
    /// If `range` is not within the region.
    pub fn read_from<R: Read + ?Sized>(
        &mut self,
        range: impl RangeBounds<usize>,
        reader: &mut R,
    ) -> Result<usize, TransferError> {
        let range = within(&range, self.len());
        let (start, wanted) = (range.start, range.len());
        let mut buffer = self.buffer(wanted);
        let mut done = 0;
        while done < wanted {
            let stopped = |error| TransferError { bytes: done, error };
            self.core.check_strict().map_err(|error| stopped(error.into()))?;
            let asked = CHUNK_BYTES.min(wanted - done);
            let place = start + done..start + done + asked;
            let answer = match &mut buffer {
                None => reader.read(&mut self[place.clone()]),
                Some(buffer) => reader.read(&mut buffer[..asked]),
            };
            match answer {
                Ok(0) => break,
                Ok(count) if count > asked => {
                    let told =
                        format!("the reader claims {count} bytes where {asked} were asked for");
                    return Err(stopped(io::Error::new(ErrorKind::InvalidData, told)));
                }
                Ok(count) => {
                    if let Some(buffer) = &buffer {
                        self[place][..count].copy_from_slice(&buffer[..count]);
                    }
                    done += count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(stopped(error)),
            }
        }
        Ok(done)
    }

    /// Writes all of `range` to `writer`.
    ///
    /// Like [`Write::write_all`], it continues after a short write, and after
    /// [`ErrorKind::Interrupted`]. It does not flush the writer, and passes at most 256 KiB to one
    /// call of `write`.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// # let path = std::env::temp_dir().join(format!("zfolio-doc-write-{}", std::process::id()));
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut region = pager.map(64 << 20)?;
    /// region[..5].copy_from_slice(b"hello");
    /// region.write_to(..5, &mut std::fs::File::create(&path)?)?;
    /// assert_eq!(std::fs::read(&path)?, b"hello");
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The writer's first other error; `WriteZero` if the writer accepts no more bytes;
    /// `InvalidData` if it claims more bytes than it was given. [`TransferError::bytes`] bytes were
    /// written.
    ///
    /// # Panics
    ///
    /// If `range` is not within the region.
    pub fn write_to<W: Write + ?Sized>(
        &self,
        range: impl RangeBounds<usize>,
        writer: &mut W,
    ) -> Result<(), TransferError> {
        let bytes = &self[within(&range, self.len())];
        let mut buffer = self.buffer(bytes.len());
        let mut done = 0;
        for piece in bytes.chunks(CHUNK_BYTES) {
            let mut rest = match &mut buffer {
                None => piece,
                Some(buffer) => {
                    buffer[..piece.len()].copy_from_slice(piece);
                    &buffer[..piece.len()]
                }
            };
            while !rest.is_empty() {
                let stopped = |error| TransferError { bytes: done, error };
                match writer.write(rest) {
                    Ok(0) => return Err(stopped(ErrorKind::WriteZero.into())),
                    Ok(count) if count > rest.len() => {
                        let told = format!(
                            "the writer claims {count} bytes where {} were given",
                            rest.len()
                        );
                        return Err(stopped(io::Error::new(ErrorKind::InvalidData, told)));
                    }
                    Ok(count) => {
                        rest = &rest[count..];
                        done += count;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(stopped(error)),
                }
            }
        }
        Ok(())
    }

    /// A buffer that system calls use instead of the region, if they cannot reach the region.
    fn buffer(&self, bytes: usize) -> Option<Vec<u8>> {
        let inline = self.core.engine.config().mode == Mode::Inline;
        inline.then(|| vec![0; bytes.min(CHUNK_BYTES)])
    }
}

/// A range of indices below `length`.
#[track_caller]
fn within(range: &impl RangeBounds<usize>, length: usize) -> Range<usize> {
    let after = |index: usize| index.checked_add(1).expect("an index below usize::MAX");
    let start = match range.start_bound() {
        Bound::Included(&index) => index,
        Bound::Excluded(&index) => after(index),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&index) => after(index),
        Bound::Excluded(&index) => index,
        Bound::Unbounded => length,
    };
    assert!(
        start <= end && end <= length,
        "bytes {start}..{end} are not within a region of {length}"
    );
    start..end
}
