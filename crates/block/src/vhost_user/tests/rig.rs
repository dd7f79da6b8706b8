//! A ring without a socket or a thread: a disk, the memory of a guest, and its driver.

use std::sync::Arc;

use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::device::Device;
use crate::testing::Memory;
use crate::vhost_user::QUEUE_ENTRIES_MAX;
use crate::vhost_user::guest::{Driver, Entry, linked};
use crate::vhost_user::ring::{Broken, Ring};
use crate::vhost_user::worker::Worker;

/// The memory of the guest, in two regions that meet.
pub(super) const MEMORY_BYTES: u64 = 8 << 20;
const SEAM: u64 = 3 << 20;

/// Everything below is rings; buffers are behind it.
pub(super) const BUFFERS: u64 = 64 << 10;

const ENTRIES: u16 = 256;

/// What the status is before the device writes it.
pub(super) const UNTOUCHED: u8 = 0xa5;

pub(super) const OK: u8 = 0;
pub(super) const IO_ERROR: u8 = 1;
pub(super) const UNSUPPORTED: u8 = 2;

pub(super) struct Rig {
    pub(super) memory: GuestMemoryMmap<()>,
    pub(super) driver: Driver,
    pub(super) ring: Ring,
    next: u16,
}

impl Rig {
    pub(super) fn new(disk: &Arc<Memory>) -> Rig {
        Rig::with(disk, true, false)
    }

    pub(super) fn with<D: Device + 'static>(
        disk: &Arc<D>,
        event_idx: bool,
        writes_through: bool,
    ) -> Rig {
        let (second, first) = (5 << 20, 3 << 20);
        let regions = [(GuestAddress(0), first), (GuestAddress(SEAM), second)];
        let memory = GuestMemoryMmap::from_ranges(&regions).unwrap();
        let driver = Driver::new(4096, ENTRIES);
        assert!(driver.end() <= BUFFERS);
        let mut queue = Queue::new(QUEUE_ENTRIES_MAX).unwrap();
        queue.try_set_size(ENTRIES).unwrap();
        queue.try_set_desc_table_address(GuestAddress(driver.descriptors)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(driver.available)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(driver.used)).unwrap();
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        let device: Arc<dyn Device> = disk.clone();
        let worker =
            Worker::new(device, "a disk of a name that is too long", writes_through).unwrap();
        Rig { memory, driver, ring: Ring { queue, worker }, next: 0 }
    }

    /// Puts a chain of ranges into the table, and makes it available. Returns its head.
    pub(super) fn offer(&mut self, ranges: &[(u64, u32, bool)]) -> u16 {
        let count = u16::try_from(ranges.len()).unwrap();
        if self.next + count > ENTRIES {
            self.next = 0;
        }
        let head = self.next;
        Driver::put(&self.memory, self.driver.descriptors, head, &linked(ranges, head));
        self.next += count;
        self.driver.offer(&self.memory, head);
        head
    }

    /// The same with entries of the caller's, at the beginning of the table.
    pub(super) fn offer_entries(&mut self, entries: &[Entry]) -> u16 {
        Driver::put(&self.memory, self.driver.descriptors, 0, entries);
        self.driver.offer(&self.memory, 0);
        0
    }

    pub(super) fn serve(&mut self) -> Result<(), Broken> {
        self.ring.serve(&self.memory, || true, || ())
    }

    /// Serves one chain, and returns how much was written.
    pub(super) fn serve_one(&mut self, head: u16) -> u32 {
        self.serve().unwrap();
        let (found, written) = self.driver.take(&self.memory).unwrap();
        assert_eq!((found, self.driver.take(&self.memory)), (u32::from(head), None));
        written
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(super) fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        self.memory.read_slice(&mut found, GuestAddress(at)).unwrap();
        found
    }
}
