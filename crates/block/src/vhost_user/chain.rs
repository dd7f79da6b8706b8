//! A chain of descriptors, taken apart: what the guest wants, and where in its memory the bytes are.
//!
//! Everything here is a function of the guest's memory and of the size of the disk. The guest may change its memory at
//! any time: what was read once is not read again, and ranges that were checked stay where they are, since the map of
//! the memory does not change under a request.

use rustix::io::Errno;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemory, Permissions};

use super::{RANGE_BYTES_MAX, RANGES_MAX, SEGMENTS_MAX};
use crate::device::SECTOR_BYTES;

/// Type, a reserved word, and the sector (virtio 1.3, 5.2.6).
const HEADER_BYTES: usize = 16;

/// Sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;

/// A range of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Segment {
    at: GuestAddress,
    bytes: u32,
}

/// Bytes of the guest's memory, in several segments.
#[derive(Debug)]
pub(super) struct Segments {
    list: Vec<Segment>,
    /// All of them together.
    bytes: u64,
}

/// An empty list with room for so many.
fn with_room<T>(most: usize) -> Result<Vec<T>, Errno> {
    let mut list = Vec::new();
    list.try_reserve_exact(most).map_err(|_| Errno::NOMEM)?;
    Ok(list)
}

impl Segments {
    fn new() -> Result<Segments, Errno> {
        Ok(Segments { list: with_room(SEGMENTS_MAX)?, bytes: 0 })
    }

    fn clear(&mut self) {
        self.list.clear();
        self.bytes = 0;
    }

    fn push(&mut self, segment: Segment) {
        self.bytes += u64::from(segment.bytes);
        self.list.push(segment);
    }

    /// How many bytes it has.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes the last byte off.
    fn pop_byte(&mut self) -> Option<GuestAddress> {
        let last = self.list.last_mut()?;
        last.bytes -= 1;
        let at = last.at.unchecked_add(u64::from(last.bytes));
        if last.bytes == 0 {
            self.list.pop();
        }
        self.bytes -= 1;
        Some(at)
    }

    /// Its bytes from the first one on.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { rest: &self.list, done: 0 }
    }
}

/// A place in [`Segments`], which moves on with what is read or written.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'s> {
    rest: &'s [Segment],
    /// Bytes of the first segment that are behind it.
    done: u32,
}

impl Cursor<'_> {
    /// The next range, `most` bytes long at most.
    fn next(&mut self, most: usize) -> Option<(GuestAddress, usize)> {
        let (first, others) = self.rest.split_first()?;
        let left = first.bytes - self.done;
        let bytes = u32::try_from(most).unwrap_or(u32::MAX).min(left);
        let at = first.at.unchecked_add(u64::from(self.done));
        if bytes == left {
            (self.rest, self.done) = (others, 0);
        } else {
            self.done += bytes;
        }
        Some((at, bytes as usize))
    }

    /// Fills `into` with the next bytes.
    pub(super) fn read(
        &mut self,
        memory: &impl GuestMemory,
        into: &mut [u8],
    ) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < into.len() {
            let (at, bytes) = self.next(into.len() - filled).ok_or(Failure::Io)?;
            let part = &mut into[filled..filled + bytes];
            memory.read_slice(part, at).map_err(|_| Failure::Io)?;
            filled += bytes;
        }
        Ok(())
    }

    /// Writes all of `from` to the next bytes.
    pub(super) fn write(
        &mut self,
        memory: &impl GuestMemory,
        mut from: &[u8],
    ) -> Result<(), Failure> {
        while !from.is_empty() {
            let (at, bytes) = self.next(from.len()).ok_or(Failure::Io)?;
            let (part, rest) = from.split_at(bytes);
            memory.write_slice(part, at).map_err(|_| Failure::Io)?;
            from = rest;
        }
        Ok(())
    }
}

/// What the guest is told about a request that was not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// The request is wrong, or the device has failed.
    Io,
    /// The same to the guest: the range is not aligned, or beyond the end of the disk.
    Range,
    /// There is no such request.
    Unsupported,
}

impl Failure {
    /// The status byte.
    pub(super) fn status(self) -> u8 {
        let status = match self {
            Failure::Io | Failure::Range => blk::VIRTIO_BLK_S_IOERR,
            Failure::Unsupported => blk::VIRTIO_BLK_S_UNSUPP,
        };
        u8::try_from(status).expect("a status is a byte")
    }
}

/// A range of the disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// Zeroes need no room: they may be discarded.
    pub(super) may_unmap: bool,
}

/// What a guest asks for. It is checked against the disk: the range is in it, and a read-only one is not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// The data go to [`Chain::writable`].
    Read { at: u64, bytes: u64 },
    /// The data come from [`Chain::data`].
    Write { at: u64, bytes: u64 },
    /// All that was written is made durable.
    Flush,
    /// The name of the disk goes to [`Chain::writable`].
    Id,
    /// Of [`Chain::ranges`].
    Discard,
    /// Of [`Chain::ranges`].
    WriteZeroes,
}

/// What a request is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Disk {
    pub(super) size_bytes: u64,
    pub(super) is_read_only: bool,
}

impl Disk {
    /// A range from a sector on, if it is on the disk.
    fn range(self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let at = sector.checked_mul(u64::from(SECTOR_BYTES)).ok_or(Failure::Range)?;
        let end = at.checked_add(bytes).ok_or(Failure::Range)?;
        let is_good = end <= self.size_bytes && bytes % u64::from(SECTOR_BYTES) == 0;
        is_good.then_some(at).ok_or(Failure::Range)
    }

    fn check_change(self) -> Result<(), Failure> {
        if self.is_read_only { Err(Failure::Io) } else { Ok(()) }
    }
}

/// The room for one chain, which the next one uses again.
#[derive(Debug)]
pub(super) struct Chain {
    readable: Segments,
    writable: Segments,
    ranges: Vec<Range>,
    status: Option<GuestAddress>,
}

impl Chain {
    /// `NOMEM`.
    pub(super) fn new() -> Result<Chain, Errno> {
        let (readable, writable) = (Segments::new()?, Segments::new()?);
        Ok(Chain { readable, writable, ranges: with_room(RANGES_MAX)?, status: None })
    }

    /// Where the status goes. `None`: the chain is so wrong that nobody can say.
    pub(super) fn status(&self) -> Option<GuestAddress> {
        self.status
    }

    /// What the device may write, but for the status.
    pub(super) fn writable(&self) -> &Segments {
        &self.writable
    }

    /// What the guest has sent behind the header.
    pub(super) fn data(&self, memory: &impl GuestMemory) -> Result<Cursor<'_>, Failure> {
        let mut cursor = self.readable.cursor();
        cursor.read(memory, &mut [0; HEADER_BYTES])?;
        Ok(cursor)
    }

    /// The ranges of a discard or of a zeroing.
    pub(super) fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Reads a chain of a guest.
    pub(super) fn read<M: GuestMemory>(
        &mut self,
        memory: &M,
        descriptors: impl Iterator<Item = Descriptor>,
        disk: Disk,
    ) -> Result<Request, Failure> {
        self.collect(memory, descriptors)?;
        if self.readable.bytes() < HEADER_BYTES as u64 {
            return Err(Failure::Io);
        }
        let mut header = [0; HEADER_BYTES];
        self.readable.cursor().read(memory, &mut header)?;
        let (kind, rest) = header.split_at(4);
        let kind = u32::from_le_bytes(kind.try_into().expect("four bytes"));
        let sector = u64::from_le_bytes(rest[4..].try_into().expect("eight bytes"));
        match kind {
            blk::VIRTIO_BLK_T_IN => {
                let bytes = self.writable.bytes();
                Ok(Request::Read { at: disk.range(sector, bytes)?, bytes })
            }
            blk::VIRTIO_BLK_T_OUT => {
                disk.check_change()?;
                let bytes = self.readable.bytes() - HEADER_BYTES as u64;
                Ok(Request::Write { at: disk.range(sector, bytes)?, bytes })
            }
            blk::VIRTIO_BLK_T_FLUSH => Ok(Request::Flush),
            blk::VIRTIO_BLK_T_GET_ID => Ok(Request::Id),
            blk::VIRTIO_BLK_T_DISCARD => {
                self.read_ranges(memory, disk, 0)?;
                Ok(Request::Discard)
            }
            blk::VIRTIO_BLK_T_WRITE_ZEROES => {
                self.read_ranges(memory, disk, blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)?;
                Ok(Request::WriteZeroes)
            }
            _ => Err(Failure::Unsupported),
        }
    }

    /// Sorts the descriptors, and checks that all of them are in the guest's memory (`VU-3`).
    fn collect<M: GuestMemory>(
        &mut self,
        memory: &M,
        descriptors: impl Iterator<Item = Descriptor>,
    ) -> Result<(), Failure> {
        self.readable.clear();
        self.writable.clear();
        self.ranges.clear();
        self.status = None;
        let (mut count, mut is_whole) = (0, false);
        for descriptor in descriptors {
            count += 1;
            let (at, bytes) = (descriptor.addr(), descriptor.len());
            let is_writable = descriptor.is_write_only();
            // What the device writes comes behind what it reads.
            let is_ordered = is_writable || self.writable.bytes() == 0;
            let access = if is_writable { Permissions::Write } else { Permissions::Read };
            let is_there = bytes == 0 || memory.check_range(at, bytes as usize, access);
            if count > SEGMENTS_MAX || !is_ordered || !is_there {
                return Err(Failure::Io);
            }
            is_whole = !descriptor.has_next();
            let segments = if is_writable { &mut self.writable } else { &mut self.readable };
            if bytes > 0 {
                segments.push(Segment { at, bytes });
            }
        }
        // A chain that loops, or that leads out of its table, ends with a descriptor that names another one.
        if !is_whole {
            return Err(Failure::Io);
        }
        self.status = self.writable.pop_byte();
        self.status.map(|_| ()).ok_or(Failure::Io)
    }

    /// Reads the ranges of a request.
    fn read_ranges<M: GuestMemory>(
        &mut self,
        memory: &M,
        disk: Disk,
        flags_known: u32,
    ) -> Result<(), Failure> {
        disk.check_change()?;
        let bytes = self.readable.bytes() - HEADER_BYTES as u64;
        let count = usize::try_from(bytes / RANGE_BYTES as u64).unwrap_or(usize::MAX);
        if bytes % RANGE_BYTES as u64 != 0 || count == 0 || count > RANGES_MAX {
            return Err(Failure::Io);
        }
        let mut cursor = self.readable.cursor();
        cursor.read(memory, &mut [0; HEADER_BYTES])?;
        for _ in 0..count {
            let mut range = [0; RANGE_BYTES];
            cursor.read(memory, &mut range)?;
            let word =
                |at: usize| u32::from_le_bytes(range[at..at + 4].try_into().expect("four bytes"));
            let (sectors, flags) = (word(8), word(12));
            if flags & !flags_known != 0 {
                return Err(Failure::Unsupported);
            }
            let sector = u64::from_le_bytes(range[..8].try_into().expect("eight bytes"));
            let bytes = u64::from(sectors) * u64::from(SECTOR_BYTES);
            if bytes > RANGE_BYTES_MAX {
                return Err(Failure::Io);
            }
            let may_unmap = flags & blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            self.ranges.push(Range { at: disk.range(sector, bytes)?, bytes, may_unmap });
        }
        Ok(())
    }
}
