//! The disks that are compared: zfolio's in this process, and the kernel's device.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use zfolio_core::page::UnitOrder;
use zfolio_core::store::Key;
use zfolio_core::zcomp::{Params, Zcomp};
use zfolio_core::zram::Zram;
use zfolio_pager::PoolMappings;
use zfolio_sys::cpu;

use crate::kernel::journal::Journal;
use crate::kernel::zram;

/// How much memory the contents of a disk take.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    /// `compr_data_size`.
    pub(crate) compressed_bytes: u64,
    /// `mem_used_total`. zfolio's contains the table of the units; the kernel does not count its own.
    pub(crate) used_bytes: u64,
}

/// A disk. Offsets, lengths and addresses of buffers are multiples of the page, as `O_DIRECT` needs them.
pub(crate) trait Disk: Sync {
    /// Its column in the table.
    fn name(&self) -> &'static str;

    /// Fills `into` with the contents at `at`.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String>;

    /// Writes `from` to `at`.
    fn write(&self, at: u64, from: &[u8]) -> Result<(), String>;

    /// How much memory the contents take now.
    fn sizes(&self) -> Result<Sizes, String>;
}

/// zfolio's disk.
pub(crate) struct Engine {
    name: &'static str,
    pub(crate) zram: Zram<PoolMappings>,
}

impl Engine {
    /// A disk of `bytes`, a multiple of the unit, with so many streams of each codec.
    pub(crate) fn new(
        name: &'static str,
        codecs: &[Params],
        unit: UnitOrder,
        bytes: u64,
        streams: usize,
    ) -> Result<Engine, String> {
        let first = codecs[0].clone();
        let codecs = codecs.iter().map(|params| Zcomp::new(params.clone(), unit, streams));
        let codecs = codecs.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        // The speed does not depend on the key.
        let key = Key::new([0xA5; Key::BYTES]);
        let zram = Zram::new(codecs, PoolMappings::default(), key, bytes, streams);
        let zram = zram.map_err(|error| error.to_string())?.with_pages_apart(first);
        Ok(Engine { name, zram: zram.map_err(|error| error.to_string())? })
    }
}

impl Disk for Engine {
    fn name(&self) -> &'static str {
        self.name
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String> {
        self.zram.read(cpu::current(), at, into).map_err(|error| error.to_string())
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), String> {
        self.zram.write(cpu::current(), at, from).map_err(|error| error.to_string())
    }

    fn sizes(&self) -> Result<Sizes, String> {
        let stat = self.zram.mm_stat();
        Ok(Sizes { compressed_bytes: stat.compr_data_size, used_bytes: stat.mem_used_total })
    }
}

/// The kernel's disk: a zram device, behind the page with our label.
pub(super) struct Device {
    device: zram::Disk,
    file: File,
}

impl Device {
    /// A new device with room for `bytes`. It must be dropped before the journal undoes its making.
    pub(super) fn new(journal: &Journal, algorithm: &str, bytes: u64) -> io::Result<Device> {
        let device = zram::Disk::set_up(journal, zram::Disk::LABEL_BYTES + bytes, algorithm)?;
        let file = device.open()?;
        Ok(Device { device, file })
    }
}

impl Disk for Device {
    fn name(&self) -> &'static str {
        "kernel"
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String> {
        let done = self.file.read_exact_at(into, zram::Disk::LABEL_BYTES + at);
        done.map_err(|error| error.to_string())
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), String> {
        let done = self.file.write_all_at(from, zram::Disk::LABEL_BYTES + at);
        done.map_err(|error| error.to_string())
    }

    fn sizes(&self) -> Result<Sizes, String> {
        let sizes = self.device.compressed_and_used().map_err(|error| error.to_string())?;
        Ok(Sizes { compressed_bytes: sizes.0, used_bytes: sizes.1 })
    }
}
