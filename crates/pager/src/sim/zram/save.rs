//! Saves of a disk in use, each of which is loaded into another disk and compared.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::budget::WriteBudget;
use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{Params, Zcomp};
use zfolio_core::zram::{Header, Reader, SaveError, Zram};

use super::super::disk::{Disk, Faults, Shared};
use super::super::random::Random;
use super::super::schedule;
use super::super::source::Source;
use super::client::bytes_of;
use super::model::{Look, SECTOR_BYTES};
use super::{PLAYED, World, with_pages_apart};

/// The disk is saved in one of so many turns.
const SAVES: usize = 8;

/// The most that a file takes before it is full, where it is.
const FILE_BYTES: usize = 256 << 10;

/// What a loaded disk may use beside half of its file, where its memory is limited: the tables of the pool, and units
/// that are on their way.
const LEAST_BYTES: usize = 128 << 10;
const LEAST_UNITS: usize = 2;

/// A file: other threads run while it is written, and it may be full.
struct File {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl io::Write for File {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        schedule::point();
        if self.bytes.len() + from.len() > self.bytes_max {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(from);
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl World {
    /// Saves the disk, and loads what was saved.
    pub(super) fn save_now_and_then(&self, random: &mut Random) {
        if random.one_in(SAVES) {
            let is_short = random.one_in(4);
            let bytes_max = if is_short { random.below(FILE_BYTES) } else { usize::MAX };
            self.save(random, bytes_max);
        }
    }

    /// Saves the disk in a file of so many bytes at most, loads it into another one, and compares that with what each
    /// unit may have been during the save. False: the disk could not be saved now.
    pub(super) fn save(&self, random: &mut Random, bytes_max: usize) -> bool {
        let cpu = random.below(self.settings.cpus);
        let mut file = File { bytes: Vec::new(), bytes_max };
        let look = self.model().begin_read();
        let saved = self.zram.save(cpu, b"notes", &mut file);
        let look = self.model().end_read(look);
        self.schedule.note("save", [file.bytes.len() as u64, saved.is_ok().into(), 0]);
        match &saved {
            Ok(saved) => {
                assert_eq!((saved.bytes, saved.lost), (file.bytes.len() as u64, 0));
                PLAYED.saves.fetch_add(1, Relaxed);
                self.compare_saved(&file.bytes, look, random);
            }
            Err(SaveError::Unread { error, .. }) => {
                assert!(error.is_transient() && self.disk.is_some(), "{error}");
            }
            Err(SaveError::Io(_)) if bytes_max < usize::MAX => {}
            Err(error) => panic!("{error}"),
        }
        self.model().forget(look);
        saved.is_ok()
    }

    fn compare_saved(&self, file: &[u8], look: Look, random: &mut Random) {
        let mut reader = Reader::open(file).expect("what was saved can be opened");
        let header = reader.header().clone();
        assert_eq!(header.notes, b"notes");
        let source = Arc::new(Source::new(random.clone(), 0, usize::MAX));
        let is_limited = random.one_in(3);
        let loaded = self.empty(&header, &source, is_limited);
        if is_limited {
            let limit = file.len() / 2 + LEAST_BYTES + LEAST_UNITS * header.unit.bytes();
            loaded.set_mem_limit(limit as u64);
        }
        loaded.load_saved(0, &mut reader).unwrap_or_else(|error| {
            panic!("not loaded: {error}; {:?}, {:?}", loaded.mm_stat(), loaded.bd_stat())
        });
        loaded.audit();
        let sectors = usize::try_from(header.disk_bytes).expect("a small disk") / SECTOR_BYTES;
        self.model().is_size(sectors, look);
        let mut found = vec![0xEE; header.unit.bytes()];
        for at in (0..sectors).step_by(self.settings.unit_sectors()) {
            loaded.read(0, bytes_of(at), &mut found).expect("what was loaded can be read");
            self.model().compare(at, &found, look);
        }
        // When the save has begun the disk ended there.
        self.model().are_zeros(sectors..self.settings.sectors_max(), look);
        drop(loaded);
        assert_eq!(source.pages(), 0, "pages that were not given back");
    }

    /// An empty disk for what has this header; with a backing that is slow, and does not fail.
    fn empty(&self, header: &Header, source: &Arc<Source>, is_backed: bool) -> Zram<Arc<Source>> {
        let codecs = codecs(&header.algorithms, header.unit);
        let (source, key) = (Arc::clone(source), header.key.clone());
        let disk = Zram::new(codecs, source, key, header.disk_bytes, 1).expect("a good size");
        let disk = with_pages_apart(disk, self.settings.apart);
        if !is_backed {
            return disk;
        }
        let faults = Faults { refuses: 0, outages: 0, is_lasting: false, stalls: 0 };
        let random = Random::new(self.seed, 48);
        let backing = Disk::new(Arc::clone(&self.schedule), random, usize::MAX, faults);
        disk.with_backing(Box::new(Shared(Arc::new(backing))), WriteBudget::NONE)
    }
}

/// The codecs of a disk that is loaded.
fn codecs(algorithms: &[Params], unit: UnitOrder) -> Vec<Zcomp> {
    let codec = |params: &Params| Zcomp::new(params.clone(), unit, 1).expect("streams");
    algorithms.iter().map(codec).collect()
}
