//! What the device offers to a driver, and its configuration space.

use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::{QUEUES_MAX, RANGE_BYTES_MAX, RANGES_MAX, SEGMENT_BYTES_TOLD, SEGMENTS_TOLD};
use crate::device::{Device, SECTOR_BYTES};

/// More than the configuration space of any version.
const CONFIG_BYTES: usize = 256;

/// A block that is written as a whole at least as fast as parts of it, whatever the unit: what file systems take for
/// the size of a physical sector, which few of them can have above 4 KiB.
const PHYSICAL_BYTES_MAX: u32 = 4096;

/// Where the fields of the configuration space are (virtio 1.3, 5.2.4); all of them are little-endian.
mod field {
    pub(super) const CAPACITY: usize = 0;
    pub(super) const SIZE_MAX: usize = 8;
    pub(super) const SEG_MAX: usize = 12;
    pub(super) const BLK_SIZE: usize = 20;
    pub(super) const PHYSICAL_BLOCK_EXP: usize = 24;
    pub(super) const MIN_IO_SIZE: usize = 26;
    pub(super) const OPT_IO_SIZE: usize = 28;
    pub(super) const NUM_QUEUES: usize = 34;
    pub(super) const MAX_DISCARD_SECTORS: usize = 36;
    pub(super) const MAX_DISCARD_SEG: usize = 40;
    pub(super) const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    pub(super) const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    pub(super) const MAX_WRITE_ZEROES_SEG: usize = 52;
    pub(super) const WRITE_ZEROES_MAY_UNMAP: usize = 56;
}

/// The features of a device, as bits.
pub(super) fn offered(device: &dyn Device) -> u64 {
    let mut bits = vec![
        blk::VIRTIO_BLK_F_SIZE_MAX,
        blk::VIRTIO_BLK_F_SEG_MAX,
        blk::VIRTIO_BLK_F_BLK_SIZE,
        blk::VIRTIO_BLK_F_FLUSH,
        blk::VIRTIO_BLK_F_TOPOLOGY,
        blk::VIRTIO_BLK_F_MQ,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_F_VERSION_1,
    ];
    if device.is_read_only() {
        bits.push(blk::VIRTIO_BLK_F_RO);
    } else {
        bits.extend([blk::VIRTIO_BLK_F_DISCARD, blk::VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    bits.into_iter().fold(0, |all, bit| all | 1 << bit)
}

/// Whether a driver that has accepted these features expects writes to be durable when they are done, since it cannot
/// flush them.
pub(super) fn writes_through(accepted: u64) -> bool {
    accepted & 1 << blk::VIRTIO_BLK_F_FLUSH == 0
}

/// A part of the configuration space as it is now. Beyond its end there are zeros.
pub(super) fn config(device: &dyn Device, offset: u32, bytes: u32) -> Vec<u8> {
    let mut space = [0; CONFIG_BYTES];
    let mut set = |at: usize, value: &[u8]| space[at..at + value.len()].copy_from_slice(value);
    let sectors = |bytes: u64| bytes / u64::from(SECTOR_BYTES);
    let word = |number: u64| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let preferred = device.preferred_bytes().max(SECTOR_BYTES);
    let physical = (preferred.min(PHYSICAL_BYTES_MAX) / SECTOR_BYTES).ilog2();
    let preferred = sectors(u64::from(preferred));
    let (range, ranges) = (word(sectors(RANGE_BYTES_MAX)), word(RANGES_MAX as u64));
    set(field::CAPACITY, &sectors(device.size_bytes()).to_le_bytes());
    set(field::SIZE_MAX, &SEGMENT_BYTES_TOLD.to_le_bytes());
    set(field::SEG_MAX, &SEGMENTS_TOLD.to_le_bytes());
    set(field::BLK_SIZE, &SECTOR_BYTES.to_le_bytes());
    set(field::PHYSICAL_BLOCK_EXP, &[u8::try_from(physical).unwrap_or(0)]);
    set(field::MIN_IO_SIZE, &u16::try_from(preferred).unwrap_or(u16::MAX).to_le_bytes());
    set(field::OPT_IO_SIZE, &word(preferred));
    set(field::NUM_QUEUES, &QUEUES_MAX.to_le_bytes());
    set(field::MAX_DISCARD_SECTORS, &range);
    set(field::MAX_DISCARD_SEG, &ranges);
    set(field::DISCARD_SECTOR_ALIGNMENT, &word(preferred));
    set(field::MAX_WRITE_ZEROES_SECTORS, &range);
    set(field::MAX_WRITE_ZEROES_SEG, &ranges);
    set(field::WRITE_ZEROES_MAY_UNMAP, &[1]);
    let beyond = std::iter::repeat(0);
    space.into_iter().chain(beyond).skip(offset as usize).take(bytes as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::{config, offered, writes_through};
    use crate::testing::Memory;

    /// Goal: the fields are where a driver looks for them.
    #[test]
    fn the_configuration_space_has_its_layout() {
        let disk = Memory::new(3 << 20).preferring(64 << 10);
        let space = config(&disk, 0, 60);
        assert_eq!(space.len(), 60);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(space[at..at + 2].try_into().unwrap());
        assert_eq!((word(0), word(4)), (3 << 11, 0), "capacity");
        assert_eq!((word(8), word(12), word(20)), (1 << 20, 126, 512), "segments, sector");
        assert_eq!((space[24], half(26), word(28)), (3, 128, 128), "topology");
        assert_eq!(half(34), 64, "queues");
        assert_eq!((word(36), word(40), word(44)), (1 << 21, 64, 128), "discard");
        assert_eq!((word(48), word(52), space[56]), (1 << 21, 64, 1), "zeroes");
        assert_eq!(config(&disk, 20, 4), 512_u32.to_le_bytes());
        assert_eq!(config(&disk, 255, 3), [0; 3]);
    }

    #[test]
    fn a_read_only_disk_offers_no_changes() {
        let (disk, frozen) = (Memory::new(1 << 20), Memory::new(1 << 20).read_only());
        assert_eq!(offered(&disk) ^ offered(&frozen), 1 << 5 | 1 << 13 | 1 << 14);
        assert!(!writes_through(offered(&disk)) && writes_through(0));
    }
}
