//! Carries requests out: bytes of the guest's memory to the device, and back.

use std::sync::Arc;

use rustix::io::Errno;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestMemory};
use zfolio_sys::zeroed::zeroed;

use super::chain::{Chain, Disk, Failure, Request};
use crate::device::{Device, Error};
use crate::pieces::Pieces;

/// The name of a disk as a driver gets it, filled up with zeros.
pub(super) const ID_BYTES: usize = 20;

/// See the module.
pub(crate) struct Worker {
    device: Arc<dyn Device>,
    id: [u8; ID_BYTES],
    /// The driver cannot flush: what it has written has to be durable at once.
    writes_through: bool,
    chain: Chain,
    pieces: Pieces,
    /// What the device reads from and writes to (`VU-2`): room for the longest of the pieces.
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
    /// `NOMEM`: there is no memory for its buffers.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        name: &str,
        writes_through: bool,
    ) -> Result<Worker, Errno> {
        let mut id = [0; ID_BYTES];
        id.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
        let pieces = Pieces::of(&*device);
        let (piece, chain) = (zeroed(pieces.bytes_max())?, Chain::new()?);
        Ok(Worker { device, id, writes_through, chain, pieces, piece })
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
        if request == Err(Failure::Range) {
            self.device.note_invalid();
        }
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
            let length = self.pieces.next(at + done, bytes - done);
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
            let length = self.pieces.next(at + done, bytes - done);
            let piece = &mut self.piece[..length];
            from.read(memory, piece)?;
            self.device.write(at + done, piece)?;
            done += length as u64;
        }
        Ok(())
    }
}
