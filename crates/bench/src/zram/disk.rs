//! The disks that are compared: zfolio's in this process, the kernel's device, and a codec without a disk.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use zfolio_core::page::UnitOrder;
use zfolio_core::store::Key;
use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::{Bare, Params, Zcomp};
use zfolio_core::zram::Zram;
use zfolio_pager::PoolMappings;
use zfolio_sys::cpu;

use crate::codecs::{pack, unpack};
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

/// The lock of a place, and that of a codec, which is taken below it.
const RANK_PLACE: u8 = 2;
const RANK_CODEC: u8 = 3;

/// The codec alone, so that nobody's disk around this codec can be faster: each unit has a place of its own in memory
/// that exists already. There is no checksum, no pool and no allocation.
pub(super) struct Alone {
    unit_bytes: usize,
    places: Vec<Mutex<RANK_PLACE, Place>>,
    /// One for each CPU, with room for a unit that is read or written in part.
    codecs: Vec<Mutex<RANK_CODEC, (Bare, Vec<u8>)>>,
}

/// Where a unit is.
struct Place {
    bytes: Vec<u8>,
    /// As many of them, or all if the unit is not compressed.
    length: usize,
}

impl Place {
    fn compress(&mut self, codec: &mut Bare, unit: &[u8]) {
        self.length = pack(codec, unit, &mut self.bytes);
    }

    fn decompress(&self, codec: &mut Bare, unit: &mut [u8]) -> Result<(), String> {
        let is_good = unpack(codec, &self.bytes[..self.length], unit);
        is_good.then_some(()).ok_or_else(|| "a unit does not decompress".to_owned())
    }
}

impl Alone {
    /// A disk of `bytes`, a multiple of the unit, with a codec for each CPU.
    pub(super) fn new(params: &Params, unit: UnitOrder, bytes: usize) -> Result<Alone, String> {
        let unit_bytes = unit.bytes();
        let codec = |_| {
            let codec = Bare::new(params, unit).map_err(|error| error.to_string())?;
            Ok(Mutex::new((codec, vec![0; unit_bytes])))
        };
        // Written once, so that the pages exist.
        let place = |_| Mutex::new(Place { bytes: vec![1; unit_bytes], length: unit_bytes });
        let codecs = (0..cpu::online()).map(codec).collect::<Result<_, String>>()?;
        let places = (0..bytes / unit_bytes).map(place).collect();
        Ok(Alone { unit_bytes, places, codecs })
    }

    /// Calls `part` for each unit that the `bytes` bytes from `at` touch, with its place, a codec, room for a unit, and
    /// the part that is touched: where that is in the unit, and where in the request.
    fn each(
        &self,
        at: u64,
        bytes: usize,
        mut part: impl FnMut(&mut Place, &mut Bare, &mut [u8], [Range<usize>; 2]) -> Result<(), String>,
    ) -> Result<(), String> {
        let at = usize::try_from(at).map_err(|error| error.to_string())?;
        let mut done = 0;
        while done < bytes {
            let (unit, first) = ((at + done) / self.unit_bytes, (at + done) % self.unit_bytes);
            let length = (self.unit_bytes - first).min(bytes - done);
            let mut place = self.places[unit].lock();
            let mut codec = self.codecs[cpu::current() % self.codecs.len()].lock();
            let (codec, room) = &mut *codec;
            part(&mut place, codec, room, [first..first + length, done..done + length])?;
            done += length;
        }
        Ok(())
    }
}

impl Disk for Alone {
    fn name(&self) -> &'static str {
        "codec"
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String> {
        self.each(at, into.len(), |place, codec, room, [of_unit, of_request]| {
            let into = &mut into[of_request];
            if into.len() == room.len() {
                return place.decompress(codec, into);
            }
            place.decompress(codec, room)?;
            into.copy_from_slice(&room[of_unit]);
            Ok(())
        })
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), String> {
        self.each(at, from.len(), |place, codec, room, [of_unit, of_request]| {
            let from = &from[of_request];
            if from.len() == room.len() {
                place.compress(codec, from);
                return Ok(());
            }
            place.decompress(codec, room)?;
            room[of_unit].copy_from_slice(from);
            place.compress(codec, room);
            Ok(())
        })
    }

    fn sizes(&self) -> Result<Sizes, String> {
        let compressed_bytes = self.places.iter().map(|place| place.lock().length as u64).sum();
        Ok(Sizes { compressed_bytes, used_bytes: (self.places.len() * self.unit_bytes) as u64 })
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
