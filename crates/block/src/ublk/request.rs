//! A request, taken apart: a function of its descriptor and of the disk.

use zfolio_sys::Errno;
use zfolio_sys::ublk::{IoDescriptor, flag, operation};

use crate::device::SECTOR_BYTES;

/// What a request is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Limits {
    pub(super) size_bytes: u64,
    pub(super) is_read_only: bool,
    /// The room for data.
    pub(super) buffer_bytes: usize,
}

/// What is asked for. Ranges are in the disk, data have room in the buffer, and a read-only disk is not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// The beginning of the buffer is filled.
    Read {
        at: u64,
        bytes: usize,
    },
    /// The beginning of the buffer is written.
    Write {
        at: u64,
        bytes: usize,
        is_durable: bool,
    },
    Flush,
    Discard {
        at: u64,
        bytes: u64,
    },
    WriteZeroes {
        at: u64,
        bytes: u64,
        keeps_room: bool,
        is_durable: bool,
    },
}

impl Request {
    /// Reads a descriptor.
    ///
    /// # Errors
    ///
    /// `INVAL`: out of range. `OPNOTSUPP`: not known. `ROFS`: the disk is read-only.
    pub(super) fn read(descriptor: &IoDescriptor, limits: Limits) -> Result<Request, Errno> {
        let [operation, ..] = descriptor.op_flags.to_le_bytes();
        let is_durable = descriptor.op_flags & flag::FUA != 0;
        // Other flags, of today and of later kernels, are hints.
        if descriptor.op_flags & flag::DATA_ELSEWHERE != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        match operation {
            operation::READ => {
                let (at, bytes) = limits.data(descriptor)?;
                Ok(Request::Read { at, bytes })
            }
            operation::WRITE => {
                limits.check_change()?;
                let (at, bytes) = limits.data(descriptor)?;
                Ok(Request::Write { at, bytes, is_durable })
            }
            operation::FLUSH => Ok(Request::Flush),
            operation::DISCARD => {
                limits.check_change()?;
                let (at, bytes) = limits.range(descriptor)?;
                Ok(Request::Discard { at, bytes })
            }
            operation::WRITE_ZEROES => {
                limits.check_change()?;
                let (at, bytes) = limits.range(descriptor)?;
                let keeps_room = descriptor.op_flags & flag::NO_UNMAP != 0;
                Ok(Request::WriteZeroes { at, bytes, keeps_room, is_durable })
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

impl Limits {
    fn check_change(self) -> Result<(), Errno> {
        if self.is_read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// The range of a request, which is on the disk and not empty.
    fn range(self, descriptor: &IoDescriptor) -> Result<(u64, u64), Errno> {
        let sector_bytes = u64::from(SECTOR_BYTES);
        let at = descriptor.sector.checked_mul(sector_bytes).ok_or(Errno::INVAL)?;
        let bytes = u64::from(descriptor.sectors) * sector_bytes;
        let end = at.checked_add(bytes).ok_or(Errno::INVAL)?;
        if bytes > 0 && end <= self.size_bytes { Ok((at, bytes)) } else { Err(Errno::INVAL) }
    }

    /// The same of a request with data.
    fn data(self, descriptor: &IoDescriptor) -> Result<(u64, usize), Errno> {
        let (at, bytes) = self.range(descriptor)?;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::INVAL)?;
        if bytes <= self.buffer_bytes { Ok((at, bytes)) } else { Err(Errno::INVAL) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Limits, Request};
    use zfolio_sys::Errno;
    use zfolio_sys::ublk::{IoDescriptor, operation};

    /// Goal: `UB-2` at the edges, without a device that would refuse as well. Method: ranges that end where the disk
    /// and the buffer do, and a sector behind.
    #[test]
    fn ranges_end_where_disk_and_buffer_do() {
        let limits = Limits { size_bytes: 512 * 100, is_read_only: false, buffer_bytes: 512 * 8 };
        let read = |kind: u8, sector, sectors| {
            let op_flags = kind.into();
            Request::read(&IoDescriptor { op_flags, sectors, sector, address: 0 }, limits)
        };
        for kind in [operation::READ, operation::WRITE] {
            assert!(read(kind, 92, 8).is_ok(), "{kind}");
            assert_eq!(read(kind, 93, 8), Err(Errno::INVAL), "{kind}: behind the disk");
            assert_eq!(read(kind, 0, 9), Err(Errno::INVAL), "{kind}: behind the buffer");
            assert_eq!(read(kind, 0, 0), Err(Errno::INVAL), "{kind}: nothing");
        }
        for kind in [operation::DISCARD, operation::WRITE_ZEROES] {
            assert!(read(kind, 0, 100).is_ok(), "{kind}");
            assert_eq!(read(kind, 1, 100), Err(Errno::INVAL), "{kind}: behind the disk");
        }
        assert_eq!(read(operation::READ, u64::MAX / 512, 8), Err(Errno::INVAL));
        assert_eq!(read(4, 0, 8), Err(Errno::OPNOTSUPP));
        let read_only = Limits { is_read_only: true, ..limits };
        for kind in [operation::WRITE, operation::DISCARD, operation::WRITE_ZEROES] {
            let descriptor =
                IoDescriptor { op_flags: kind.into(), sectors: 8, ..IoDescriptor::default() };
            assert_eq!(Request::read(&descriptor, read_only), Err(Errno::ROFS), "{kind}");
        }
    }
}
