//! The end of a run: nothing is under way, and everything can be compared.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::zram::ApartStat;

use super::super::random::Random;
use super::super::schedule;
use super::model::SECTOR_BYTES;
use super::{PLAYED, World};

/// How often is tried at the end what memory may be refused for.
const TRIES: usize = 100;

impl World {
    /// The last client is done: waits for the others, and has everything compared.
    pub(super) fn end(&self, random: &mut Random) {
        while self.background_left.load(Relaxed) > 0 {
            schedule::wait("the background".to_owned(), Some(1_000_000));
        }
        self.disk.iter().for_each(|disk| disk.hurry(true));
        self.zram.set_mem_limit(0);
        self.zram.audit();
        let (back, apart) = (self.zram.writeback_stat(), self.zram.apart_stat());
        let written_back = back.asked_units + back.old_units + back.room_units;
        PLAYED.written_back.fetch_add(written_back, Relaxed);
        PLAYED.joined.fetch_add(apart.joined_units, Relaxed);
        // Where writes have met, the second look has to find what the first one has found.
        self.read_all();
        self.read_all();
        self.zram.audit();
        assert!((0..TRIES).any(|_| self.save(random, usize::MAX)), "the disk cannot be saved");
        self.zram.audit();
        self.reset();
        self.read_all();
        self.check_empty();
    }

    fn read_all(&self) {
        let end = usize::try_from(self.zram.disk_bytes()).expect("a small disk") / SECTOR_BYTES;
        for at in (0..end).step_by(self.settings.unit_sectors()) {
            let unit = at..at + self.settings.unit_sectors();
            let is_read = (0..TRIES).any(|_| self.read(0, unit.clone()));
            assert!(is_read, "sectors {unit:?} cannot be read");
        }
    }

    /// After everything was dropped: fails if anything is still kept.
    fn check_empty(&self) {
        self.zram.tidy();
        self.zram.audit();
        let stat = self.zram.mm_stat();
        let kept = [stat.orig_data_size, stat.compr_data_size, stat.same_pages, stat.huge_pages];
        assert_eq!(kept, [0; 4], "{stat:?}");
        assert_eq!(self.zram.apart_stat(), ApartStat::default());
        assert_eq!(self.zram.bd_stat().bd_count, 0, "the backing keeps something for nobody");
        if let Some(disk) = &self.disk {
            assert_eq!(disk.contents(), (0, 0), "the backing keeps something for nobody");
        }
    }
}
