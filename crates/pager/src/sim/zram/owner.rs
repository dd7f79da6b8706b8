//! What happens to a disk beside its clients: its owner's work, and attributes that are set.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::zram::{Chosen, Error, Recompression, What};

use super::super::random::Random;
use super::super::schedule;
use super::client::bytes_of;
use super::model::SECTOR_BYTES;
use super::{PLAYED, World};

impl World {
    /// A part of what the owner of a disk does all the time; one second passes in a millisecond.
    pub(super) fn work(&self, random: &mut Random) {
        let (zram, cpu) = (&self.zram, random.below(self.settings.cpus));
        let now_s = self.schedule.now_ns() / 1_000_000;
        zram.set_now(u32::try_from(now_s).expect("a run of a few minutes"));
        zram.tidy();
        let mut age_s = || random.of(&[0, 1, 10, 1000]);
        let ages = [age_s(), age_s(), age_s()];
        zram.write_ahead();
        zram.write_back_old(ages[0]);
        zram.join_old(cpu, ages[1], 8);
        self.check_done(zram.recompress_old(cpu, ages[2], 4).error.map_or(Ok(()), Err));
        zram.compact_if_wasteful();
    }

    fn check_done(&self, done: Result<(), Error>) {
        if let Err(error) = done {
            self.check_error(&error);
        }
    }

    /// Sets an attribute, or has something done that is asked for by one.
    pub(super) fn set_something(&self, random: &mut Random) {
        let (zram, cpu) = (&self.zram, random.below(self.settings.cpus));
        match random.below(13) {
            0 | 1 if self.settings.limits => {
                let more = random.of(&[0, 20_000, 200_000]);
                let limit = if random.one_in(3) { 0 } else { zram.used_bytes() + more };
                zram.set_mem_limit(limit);
            }
            2 => {
                let pages = random.below(64) as u64;
                zram.set_writeback_limit(pages);
                zram.enable_writeback_limit(random.one_in(2));
                zram.set_writeback_batch(random.below(40));
            }
            3 | 4 if self.settings.algorithms.len() > 1 => {
                let what = random.of(&[What::All, What::Idle, What::Huge, What::HugeIdle]);
                let max_pages = random.of(&[4, u64::MAX]);
                let request = Recompression { what, max_pages, ..Recompression::default() };
                self.check_done(zram.recompress(cpu, request).map(drop));
            }
            5 | 6 => {
                let first = random.below(self.settings.units_max) as u64;
                let some = Chosen::Indices(vec![first..=first + random.below(9) as u64, 0..=1]);
                let all = [some.clone(), some, Chosen::Huge, Chosen::Idle, Chosen::HugeIdle];
                zram.write_back(cpu, &all[random.below(all.len())]);
            }
            7 => zram.mark_idle(random.of(&[None, Some(1)])),
            8 => zram.compact(),
            9 | 10 if self.settings.resizes => self.resize(random),
            11 if self.settings.resets => self.reset(),
            _ => self.look_at_figures(),
        }
    }

    /// Changes the size. What is to be cut off is dropped first, in most cases: else hardly any disk could shrink.
    fn resize(&self, random: &mut Random) {
        let units = 1 + random.below(self.settings.units_max);
        let sectors = units * self.settings.unit_sectors();
        let end = usize::try_from(self.zram.disk_bytes()).expect("a small disk") / SECTOR_BYTES;
        if sectors < end && !random.one_in(4) {
            self.discard(random.below(self.settings.cpus), sectors..end);
        }
        if random.one_in(2) {
            schedule::mix();
        }
        let look = self.model().begin_resize(sectors);
        let done = self.zram.resize(bytes_of(sectors));
        PLAYED.resizes.fetch_add(done.is_ok().into(), Relaxed);
        self.schedule.note("resize", [units as u64, done.is_ok().into(), 0]);
        self.model().end_resize(sectors, look, done.is_ok());
        assert!(matches!(done, Ok(()) | Err(Error::Busy { .. })), "{done:?}");
    }

    /// Drops all contents.
    pub(super) fn reset(&self) {
        let all = 0..self.settings.sectors_max();
        let write = self.model().begin_zeros(all.clone());
        self.zram.reset();
        self.model().end_write(&write, &all);
        self.schedule.note("reset", [0; 3]);
    }

    fn look_at_figures(&self) {
        let (zram, mut state) = (&self.zram, String::new());
        zram.block_state(&mut state).expect("a string takes everything");
        let stat = zram.mm_stat();
        assert!(stat.mem_used_max >= stat.mem_used_total, "{stat:?}");
        let away = zram.bd_stat().bd_count + zram.writeback_stat().asked_units;
        assert!(away == 0 || self.disk.is_some(), "there is no backing");
        zram.reset_mem_used_max();
    }
}
