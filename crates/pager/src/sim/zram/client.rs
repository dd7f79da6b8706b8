//! A client of the disk: one request after the other, most of them where other clients have theirs.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::zram::Error;

use super::super::random::Random;
use super::super::schedule;
use super::model::{self, Look, SECTOR_BYTES, Write};
use super::{PLAYED, World};

const PAGE_SECTORS: usize = PAGE_BYTES / SECTOR_BYTES;

/// How often a request is tried again that fails for now.
const TRIES: usize = 8;

/// See the module.
pub(super) struct Client<'w> {
    pub(super) world: &'w World,
    pub(super) random: Random,
}

/// Bytes of some sectors.
pub(super) fn bytes_of(sectors: usize) -> u64 {
    (sectors * SECTOR_BYTES) as u64
}

impl Client<'_> {
    /// The whole life of a client. The last one ends the run.
    pub(super) fn live(&mut self) {
        for _ in 0..self.world.settings.steps {
            schedule::point();
            if self.random.one_in(3) {
                let pause = self.random.of(&[20_000, 500_000, 2_000_000]);
                let pause = self.random.below(pause) as u64;
                schedule::wait("its next request".to_owned(), Some(pause));
            }
            self.step();
            self.world.schedule.progress();
        }
        if self.world.clients_left.fetch_sub(1, Relaxed) == 1 {
            self.world.end(&mut self.random);
        }
    }

    fn step(&mut self) {
        let cpu = self.random.below(self.world.settings.cpus);
        let sectors = self.sectors();
        match self.random.below(16) {
            0..7 => self.write(cpu, sectors),
            7 => self.write_again(cpu, sectors.start),
            8 => self.write_zeroes(cpu, sectors),
            9 => self.world.discard(cpu, sectors),
            10 => self.look_for_holes(sectors),
            _ => _ = self.world.read(cpu, sectors),
        }
    }

    /// Any sectors, whole pages, or whole units; most of them in the first units.
    fn sectors(&mut self) -> Range<usize> {
        let settings = &self.world.settings;
        let (unit, most) = (settings.unit_sectors(), settings.sectors_max());
        // Few requests are beyond the end.
        let now = usize::try_from(self.world.zram.disk_bytes()).expect("small") / SECTOR_BYTES;
        let most = if self.random.one_in(16) { most } else { now };
        let hot = (settings.hot_units * unit).min(most);
        let bound = if self.random.one_in(4) { most } else { hot };
        // What is just being cut off is aimed at.
        let least = self.world.model().least_size();
        let (least, bound) = if least < most { (least, most - least) } else { (0, bound) };
        let (grain, count) = match self.random.below(8) {
            0..3 => (1, unit / 2 * 3),
            3..6 => (PAGE_SECTORS, PAGE_SECTORS * 2),
            _ => (unit, unit * 4),
        };
        let start = least + self.random.below(bound / grain) * grain;
        let count = (1 + self.random.below(count / grain)) * grain;
        start..(start + count).min(most)
    }

    fn write(&mut self, cpu: usize, sectors: Range<usize>) {
        let write = self.world.model().begin_write(sectors);
        self.world.write(cpu, &write);
    }

    /// What is there already, if nobody else is faster.
    fn write_again(&mut self, cpu: usize, sector: usize) {
        let write = self.world.model().begin_again(sector);
        write.iter().for_each(|write| self.world.write(cpu, write));
    }

    fn write_zeroes(&mut self, cpu: usize, sectors: Range<usize>) {
        let write = self.world.model().begin_zeros(sectors.clone());
        let (at, bytes) = (bytes_of(sectors.start), bytes_of(sectors.len()));
        self.world.requested("write zeroes", &write, sectors, |world| {
            world.zram.write_zeroes(cpu, at, bytes)
        });
    }

    /// Holes read as zeros.
    fn look_for_holes(&mut self, sectors: Range<usize>) {
        let world = self.world;
        let look = world.model().begin_read();
        let (mut holes, mut at) = (Vec::new(), sectors.start);
        let mut note = |bytes: u64, is_hole: bool| {
            let end = at + usize::try_from(bytes).expect("a small disk") / SECTOR_BYTES;
            if is_hole {
                holes.push(at..end);
            }
            at = end;
            true
        };
        let (start, bytes) = (bytes_of(sectors.start), bytes_of(sectors.len()));
        let done = world.zram.runs(start, bytes, &mut note);
        let look = world.model().end_read(look);
        if world.check_end(&done, sectors.end, look) {
            assert_eq!(at, sectors.end, "the runs together are the range");
            holes.into_iter().for_each(|hole| world.model().are_zeros(hole, look));
        }
        world.model().forget(look);
    }
}

impl World {
    /// Writes what the model says.
    fn write(&self, cpu: usize, write: &Write) {
        let mut bytes = vec![0; write.sectors.len() * SECTOR_BYTES];
        for (at, sector) in write.sectors.clone().zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            model::fill(at, write.id, sector);
        }
        let at = bytes_of(write.sectors.start);
        let sectors = write.sectors.clone();
        self.requested("write", write, sectors, |world| world.zram.write(cpu, at, &bytes));
    }

    /// Whole units are zeros afterwards, and the rest is zeros or what it was.
    pub(super) fn discard(&self, cpu: usize, sectors: Range<usize>) {
        let write = self.model().begin_zeros(sectors.clone());
        let (at, bytes) = (bytes_of(sectors.start), bytes_of(sectors.len()));
        let unit = self.settings.unit_sectors();
        let whole = sectors.start.next_multiple_of(unit)..sectors.end / unit * unit;
        self.requested("discard", &write, whole, |world| world.zram.discard(cpu, at, bytes));
    }

    /// Makes a request that writes. If it succeeds these sectors are `done`.
    fn requested(
        &self,
        what: &str,
        write: &Write,
        done: Range<usize>,
        request: impl FnOnce(&World) -> Result<(), Error>,
    ) {
        let Range { start, end } = write.sectors;
        self.schedule.note(what, [start as u64, end as u64, write.id.into()]);
        let look = self.model().begin_read();
        let result = request(self);
        let look = self.model().end_read(look);
        PLAYED.requests.fetch_add(1, Relaxed);
        PLAYED.failed.fetch_add(result.is_err().into(), Relaxed);
        let is_inside = self.check_end(&result, end, look);
        let done = if is_inside && result.is_ok() { done } else { start..start };
        self.model().end_write(write, &done);
        self.model().forget(look);
        self.schedule.note("done", [start as u64, end as u64, result.is_ok().into()]);
        if let (true, Err(error)) = (is_inside, &result) {
            self.check_error(error);
        }
    }

    /// Whether a request was inside the disk, which the model has to agree with.
    pub(super) fn check_end<T>(&self, done: &Result<T, Error>, end: usize, look: Look) -> bool {
        let (may_be_outside, may_be_inside) = self.model().may_end(end, look);
        let is_outside = matches!(done, Err(Error::Invalid { .. }));
        let may_be = if is_outside { may_be_outside } else { may_be_inside };
        assert!(may_be, "a request up to sector {end}: is it outside? {is_outside}");
        !is_outside
    }

    /// Reads sectors and compares them, if they can be read in a few tries.
    pub(super) fn read(&self, cpu: usize, sectors: Range<usize>) -> bool {
        let mut found = vec![0xEE; sectors.len() * SECTOR_BYTES];
        for _ in 0..TRIES {
            let look = self.model().begin_read();
            let done = self.zram.read(cpu, bytes_of(sectors.start), &mut found);
            let look = self.model().end_read(look);
            self.schedule
                .note("read", [sectors.start as u64, sectors.end as u64, done.is_ok().into()]);
            PLAYED.requests.fetch_add(1, Relaxed);
            PLAYED.failed.fetch_add(done.is_err().into(), Relaxed);
            let is_inside = self.check_end(&done, sectors.end, look);
            if done.is_ok() {
                self.model().compare(sectors.start, &found, look);
            }
            self.model().forget(look);
            match done {
                Err(error) if is_inside => self.check_error(&error),
                _ => return is_inside,
            }
        }
        false
    }
}
