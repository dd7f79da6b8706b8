//! The other side, for tests and the fuzz target: a driver that makes chains in the memory of a guest.

use std::sync::atomic::Ordering::{Acquire, Release};

use vm_memory::{Bytes as _, GuestAddress, GuestMemory};

/// Flags of descriptors (virtio 1.3, 2.7.5).
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

const DESCRIPTOR_BYTES: u64 = 16;

/// A descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) at: u64,
    pub(super) bytes: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

/// Makes a chain of ranges in a table from `first` on: each is its address, its length, and whether the device writes.
#[cfg(test)]
pub(super) fn linked(ranges: &[(u64, u32, bool)], first: u16) -> Vec<Entry> {
    let last = ranges.len().wrapping_sub(1);
    let entry = |(index, (at, bytes, is_written)): (usize, &(u64, u32, bool))| {
        let next = first.wrapping_add(u16::try_from(index).expect("a chain")).wrapping_add(1);
        let flags = if *is_written { WRITE } else { 0 } | if index < last { NEXT } else { 0 };
        Entry { at: *at, bytes: *bytes, flags, next }
    };
    ranges.iter().enumerate().map(entry).collect()
}

/// The header of a request.
pub(super) fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

/// A range of a discard or of a zeroing.
pub(super) fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut range = [0; 16];
    range[..8].copy_from_slice(&sector.to_le_bytes());
    range[8..12].copy_from_slice(&sectors.to_le_bytes());
    range[12..].copy_from_slice(&flags.to_le_bytes());
    range
}

/// The rings of a queue as its driver sees them.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) entries: u16,
    next_available: u16,
    next_used: u16,
}

impl Driver {
    /// Rings from `at` on, which is a multiple of a page.
    pub(super) fn new(at: u64, entries: u16) -> Driver {
        let available = at + DESCRIPTOR_BYTES * u64::from(entries);
        let used = (available + 6 + 2 * u64::from(entries)).next_multiple_of(64);
        Driver { descriptors: at, available, used, entries, next_available: 0, next_used: 0 }
    }

    /// The address behind the rings.
    pub(super) fn end(&self) -> u64 {
        self.used + 6 + 8 * u64::from(self.entries)
    }

    /// Writes descriptors to a table.
    pub(super) fn put(memory: &impl GuestMemory, table: u64, first: u16, entries: &[Entry]) {
        for (index, entry) in entries.iter().enumerate() {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&entry.at.to_le_bytes());
            bytes[8..12].copy_from_slice(&entry.bytes.to_le_bytes());
            bytes[12..14].copy_from_slice(&entry.flags.to_le_bytes());
            bytes[14..].copy_from_slice(&entry.next.to_le_bytes());
            let at = table + DESCRIPTOR_BYTES * (u64::from(first) + index as u64);
            memory.write_slice(&bytes, GuestAddress(at)).expect("a table in memory");
        }
    }

    /// Makes a chain available.
    pub(super) fn offer(&mut self, memory: &impl GuestMemory, head: u16) {
        let slot = self.available + 4 + 2 * u64::from(self.next_available % self.entries);
        memory.write_obj(head, GuestAddress(slot)).expect("a ring in memory");
        self.next_available = self.next_available.wrapping_add(1);
        self.publish(memory, self.next_available);
    }

    /// Whether the device wants to be told of the chain that was made available last (`VIRTIO_RING_F_EVENT_IDX`).
    #[cfg(test)]
    pub(super) fn wants_kick(&self, memory: &impl GuestMemory) -> bool {
        // The chain is published before the wish is read.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let at = GuestAddress(self.used + 4 + 8 * u64::from(self.entries));
        let wish: u16 = memory.load(at, Acquire).expect("a ring in memory");
        wish == self.next_available.wrapping_sub(1)
    }

    /// Says how far the available ring is filled.
    pub(super) fn publish(&self, memory: &impl GuestMemory, index: u16) {
        let at = GuestAddress(self.available + 2);
        memory.store(index, at, Release).expect("a ring in memory");
    }

    /// The next chain that the device has returned: its head, and how much was written.
    pub(super) fn take(&mut self, memory: &impl GuestMemory) -> Option<(u32, u32)> {
        let index: u16 = memory.load(GuestAddress(self.used + 2), Acquire).expect("in memory");
        if index == self.next_used {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.next_used % self.entries);
        self.next_used = self.next_used.wrapping_add(1);
        let number = |at| memory.read_obj::<u32>(GuestAddress(at)).expect("a ring in memory");
        Some((number(at), number(at + 4)))
    }
}
