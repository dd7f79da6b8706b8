//! The memory of a guest: files that its front end has sent, mapped here.

use std::fs::File;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vhost::vhost_user::{Error, Result};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use zfolio_sys::foreign::Watched;

use super::GUEST_BYTES_MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Memory {
    /// Dropped first: what is watched is always a mapping of ours.
    watched: Vec<Watched>,
    guest: GuestMemoryMmap<()>,
    /// For each region: its address in the front end, its length, and its address in the guest.
    regions: Vec<(u64, u64, u64)>,
}

impl Memory {
    /// Maps what a front end has sent.
    ///
    /// # Errors
    ///
    /// More than [`GUEST_BYTES_MAX`], regions that overlap, or what the system says.
    pub(super) fn map(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<Memory> {
        let total = regions.iter().try_fold(0_u64, |sum, region| {
            sum.checked_add(region.memory_size).filter(|sum| *sum <= GUEST_BYTES_MAX)
        });
        if total.is_none() || regions.is_empty() || files.len() != regions.len() {
            return Err(Error::InvalidParam);
        }
        let (mut watched, mut mapped) = (Vec::new(), Vec::new());
        for (region, file) in regions.iter().zip(files) {
            check_length(&file, region.mmap_offset, region.memory_size)?;
            let mapping = region.mmap_region(file)?;
            let start = mapping.as_ptr() as usize;
            watched.push(Watched::new(start..start + mapping.size()).ok_or(Error::InvalidParam)?);
            let at = GuestAddress(region.guest_phys_addr);
            mapped.push(GuestRegionMmap::new(mapping, at).ok_or(Error::InvalidParam)?);
        }
        mapped.sort_by_key(vm_memory::GuestMemoryRegion::start_addr);
        let guest = GuestMemoryMmap::from_regions(mapped).map_err(|_| Error::InvalidParam)?;
        let place = |region: &VhostUserMemoryRegion| {
            (region.user_addr, region.memory_size, region.guest_phys_addr)
        };
        Ok(Memory { watched, guest, regions: regions.iter().map(place).collect() })
    }

    /// The memory by the guest's addresses.
    pub(super) fn guest(&self) -> &GuestMemoryMmap<()> {
        &self.guest
    }

    /// Whether a part of it could not be read, since a file was shortened (`VU-6`).
    pub(super) fn has_lost_pages(&self) -> bool {
        self.watched.iter().any(Watched::has_lost_pages)
    }

    /// The guest's address of what the front end has at an address of its own.
    pub(super) fn guest_address(&self, front_end: u64) -> Option<u64> {
        self.regions.iter().find_map(|(start, bytes, at)| {
            let offset = front_end.checked_sub(*start).filter(|offset| offset < bytes)?;
            at.checked_add(offset)
        })
    }
}

/// Refuses a file that is shorter than what is mapped of it. It may still become so.
fn check_length(file: &File, offset: u64, bytes: u64) -> Result<()> {
    let about = file.metadata().map_err(Error::ReqHandlerError)?;
    let is_long = offset.checked_add(bytes).is_some_and(|end| end <= about.len());
    // Devices have no length.
    if is_long || !about.is_file() { Ok(()) } else { Err(Error::InvalidParam) }
}
