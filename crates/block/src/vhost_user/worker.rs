//! Carries requests out: bytes of the guest's memory to the device, and back.

use std::sync::Arc;

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestMemory};

use super::PIECE_BYTES;
use super::chain::{Chain, Disk, Failure, Request};
use crate::device::{Device, Error, SECTOR_BYTES};

/// The name of a disk as a driver gets it, filled up with zeros.
pub(super) const ID_BYTES: usize = 20;

/// See the module.
pub(super) struct Worker {
    device: Arc<dyn Device>,
    id: [u8; ID_BYTES],
    /// The driver cannot flush: what it has written has to be durable at once.
    writes_through: bool,
    chain: Chain,
    /// What the device reads from and writes to (`VU-2`).
    piece: Box<[u8]>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("chain", &self.chain).finish_non_exhaustive()
    }
}

impl From<Error> for Failure {
    /// A driver knows no other reasons.
    fn from(_: Error) -> Failure {
        Failure::Io
    }
}

impl Worker {
    pub(super) fn new(device: Arc<dyn Device>, name: &str, writes_through: bool) -> Worker {
        let mut id = [0; ID_BYTES];
        id.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
        // Zeroed memory that nobody has touched takes no pages.
        let piece = vec![0; PIECE_BYTES].into_boxed_slice();
        Worker { device, id, writes_through, chain: Chain::new(), piece }
    }

    /// Serves a chain. Returns how many bytes of what the device may write were written, the status included.
    pub(super) fn serve<M: GuestMemory>(
        &mut self,
        memory: &M,
        descriptors: impl Iterator<Item = Descriptor>,
    ) -> u32 {
        let disk =
            Disk { size_bytes: self.device.size_bytes(), is_read_only: self.device.is_read_only() };
        let request = self.chain.read(memory, descriptors, disk);
        let done = request.and_then(|request| self.carry_out(memory, request));
        let Some(status_at) = self.chain.status() else { return 0 };
        let status = done.map_or_else(Failure::status, |()| 0);
        if memory.write_obj(status, status_at).is_err() {
            return 0;
        }
        // Bytes are counted from the first that the device may write, and the status is the last one.
        let filled = match request {
            Ok(Request::Read { .. } | Request::Id) => self.chain.writable().bytes(),
            _ => 0,
        };
        u32::try_from(filled + 1).unwrap_or(u32::MAX)
    }

    fn carry_out<M: GuestMemory>(&mut self, memory: &M, request: Request) -> Result<(), Failure> {
        match request {
            Request::Read { at, bytes } => self.read(memory, at, bytes),
            Request::Write { at, bytes } => {
                self.write(memory, at, bytes)?;
                self.finish_change()
            }
            Request::Flush => Ok(self.device.flush()?),
            Request::Id => {
                let most = usize::try_from(self.chain.writable().bytes()).unwrap_or(usize::MAX);
                self.chain.writable().cursor().write(memory, &self.id[..ID_BYTES.min(most)])
            }
            Request::Discard => {
                for range in self.chain.ranges().iter().filter(|range| range.bytes > 0) {
                    self.device.discard(range.at, range.bytes)?;
                }
                self.finish_change()
            }
            Request::WriteZeroes => {
                for range in self.chain.ranges().iter().filter(|range| range.bytes > 0) {
                    self.device.write_zeroes(range.at, range.bytes, !range.may_unmap)?;
                }
                self.finish_change()
            }
        }
    }

    fn finish_change(&self) -> Result<(), Failure> {
        if self.writes_through { Ok(self.device.flush()?) } else { Ok(()) }
    }

    fn read<M: GuestMemory>(&mut self, memory: &M, at: u64, bytes: u64) -> Result<(), Failure> {
        let (mut to, mut done) = (self.chain.writable().cursor(), 0);
        while done < bytes {
            let length = piece_bytes(&*self.device, at + done, bytes - done);
            let piece = &mut self.piece[..length];
            self.device.read(at + done, piece)?;
            to.write(memory, piece)?;
            done += length as u64;
        }
        Ok(())
    }

    fn write<M: GuestMemory>(&mut self, memory: &M, at: u64, bytes: u64) -> Result<(), Failure> {
        let (mut from, mut done) = (self.chain.data(memory)?, 0);
        while done < bytes {
            let length = piece_bytes(&*self.device, at + done, bytes - done);
            let piece = &mut self.piece[..length];
            from.read(memory, piece)?;
            self.device.write(at + done, piece)?;
            done += length as u64;
        }
        Ok(())
    }
}

/// How long the piece at `at` is of a request with `left` bytes from there on: pieces end where the device's units do,
/// so that a unit is compressed once, unless units are larger than a piece.
fn piece_bytes(device: &dyn Device, at: u64, left: u64) -> usize {
    let most = PIECE_BYTES as u64;
    let unit = u64::from(device.preferred_bytes().max(SECTOR_BYTES)).min(most);
    let whole = (at + most) / unit * unit - at;
    usize::try_from(whole.min(left)).expect("no more than a piece")
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, piece_bytes};
    use crate::testing::Memory;

    #[test]
    fn pieces_end_where_units_do() {
        let disk = Memory::new(8 << 20).preferring(64 << 10);
        assert_eq!(piece_bytes(&disk, 0, 4096), 4096);
        assert_eq!(piece_bytes(&disk, 0, 1 << 20), PIECE_BYTES);
        assert_eq!(piece_bytes(&disk, 512, 1 << 20), PIECE_BYTES - 512);
        assert_eq!(piece_bytes(&disk, (64 << 10) - 512, 1 << 20), (192 << 10) + 512);
        let large = Memory::new(8 << 20).preferring(2 << 20);
        assert_eq!(piece_bytes(&large, 512, 1 << 20), PIECE_BYTES - 512);
        assert_eq!(piece_bytes(&large, PIECE_BYTES as u64, 1 << 20), PIECE_BYTES);
    }
}
