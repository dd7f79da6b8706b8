//! What each sector of a disk may hold while several threads write to it.
//!
//! A sector is a **register**: a write has its effect at some moment between its begin and its end, and a read
//! returns the value of some moment. So a register keeps all values that it may have. A write that has succeeded ends
//! the values of the writes that had ended before it began; one that has failed may have had its effect, or not. What a
//! read has found ends the values of all other writes that had ended before the read began: so later reads agree with
//! it, and once nothing is under way, one look leaves one value.
//!
//! Each write has a number, and the contents of a sector follow from the number: what is found says whose it is. The
//! sectors of one unit are read and written in one step ([`zfolio_core::zram`]). So of two writes that a unit shows,
//! one is the later one everywhere: a unit that shows each of them where the other one was too is **torn**.

use std::collections::BTreeSet;
use std::ops::Range;

use super::super::random::mixed;

pub(super) const SECTOR_BYTES: usize = 512;

/// The number of a write. 0: zeros, whoever wrote them.
pub(super) type Id = u32;

/// A moment: how many begins and ends of requests came before.
type Moment = u64;

const NEVER: Moment = Moment::MAX;

/// A value that a register may have.
#[derive(Debug, Clone, Copy)]
struct May<T> {
    value: T,
    began: Moment,
    ended: Moment,
    /// From then on no read begins that finds it.
    gone: Moment,
}

/// See the module.
#[derive(Debug, Clone)]
struct Register<T>(Vec<May<T>>);

impl<T: Copy + PartialEq> Register<T> {
    fn new(value: T) -> Register<T> {
        Register(vec![May { value, began: 0, ended: 0, gone: NEVER }])
    }

    fn begin(&mut self, value: T, now: Moment) {
        self.0.push(May { value, began: now, ended: NEVER, gone: NEVER });
    }

    /// The write ends that began then. Forgets what no read can find that began at `oldest` or later.
    fn end(&mut self, value: T, began: Moment, now: Moment, is_done: bool, oldest: Moment) {
        for may in &mut self.0 {
            if may.value == value && may.began == began {
                may.ended = now;
            } else if is_done && may.ended < began {
                may.gone = may.gone.min(now);
            }
        }
        self.0.retain(|may| may.gone > oldest);
    }

    /// What it may have had at some moment of a look.
    fn values(&self, look: Look) -> impl Iterator<Item = &May<T>> {
        self.0.iter().filter(move |may| may.gone > look.since && may.began < look.until)
    }

    /// Notes what a look has found. False: it cannot be.
    fn found(&mut self, value: T, look: Look, now: Moment) -> bool {
        let began = self.values(look).filter(|may| may.value == value).map(|may| may.began).min();
        let Some(began) = began else { return false };
        let before = look.since.max(began);
        for may in &mut self.0 {
            if may.value != value && may.ended < before {
                may.gone = may.gone.min(now);
            }
        }
        true
    }
}

/// A read: what it finds was there at some moment after `since` and before `until`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    since: Moment,
    until: Moment,
}

/// A write that is under way.
#[derive(Debug, Clone)]
pub(super) struct Write {
    pub(super) id: Id,
    pub(super) sectors: Range<usize>,
    began: Moment,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Model {
    now: Moment,
    sectors: Vec<Register<Id>>,
    /// Sectors of the disk.
    size: Register<usize>,
    unit_sectors: usize,
    /// The sectors of each write, by its number.
    writes: Vec<Range<usize>>,
    /// When the reads began that are under way.
    reads: BTreeSet<Moment>,
}

impl Model {
    /// A disk of zeros, which may grow to `sectors_max`.
    pub(super) fn new(sectors: usize, sectors_max: usize, unit_sectors: usize) -> Model {
        Model {
            now: 1,
            sectors: vec![Register::new(0); sectors_max],
            size: Register::new(sectors),
            unit_sectors,
            writes: std::iter::once(0..0).collect(),
            reads: BTreeSet::new(),
        }
    }

    pub(super) fn sectors_max(&self) -> usize {
        self.sectors.len()
    }

    fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    fn oldest(&self) -> Moment {
        self.reads.first().copied().unwrap_or(self.now)
    }

    /// A write of new contents begins.
    pub(super) fn begin_write(&mut self, sectors: Range<usize>) -> Write {
        let id = Id::try_from(self.writes.len()).expect("few writes");
        self.writes.push(sectors.clone());
        self.begin(sectors, id)
    }

    /// The last write that is known of a sector begins again.
    pub(super) fn begin_again(&mut self, sector: usize) -> Option<Write> {
        let last = self.sectors[sector].0.last()?.value;
        let sectors = self.writes[usize::try_from(last).ok()?].clone();
        (last != 0).then(|| self.begin(sectors, last))
    }

    /// A write of zeros begins.
    pub(super) fn begin_zeros(&mut self, sectors: Range<usize>) -> Write {
        self.begin(sectors, 0)
    }

    fn begin(&mut self, sectors: Range<usize>, id: Id) -> Write {
        let began = self.tick();
        self.sectors[sectors.clone()].iter_mut().for_each(|sector| sector.begin(id, began));
        Write { id, sectors, began }
    }

    /// A write ends, which has written the sectors in `done`, and may have written its others.
    pub(super) fn end_write(&mut self, write: &Write, done: &Range<usize>) {
        let (now, oldest) = (self.tick(), self.oldest());
        for at in write.sectors.clone() {
            self.sectors[at].end(write.id, write.began, now, done.contains(&at), oldest);
        }
    }

    /// A read begins.
    pub(super) fn begin_read(&mut self) -> Look {
        let since = self.tick();
        self.reads.insert(since);
        Look { since, until: NEVER }
    }

    /// The read ends; what it has found is still to be compared.
    pub(super) fn end_read(&mut self, look: Look) -> Look {
        Look { until: self.tick(), ..look }
    }

    /// All that a read has found was compared.
    pub(super) fn forget(&mut self, look: Look) {
        self.reads.remove(&look.since);
    }

    /// Compares what a read has found from a sector on.
    ///
    /// # Panics
    ///
    /// If a sector has what it cannot have, or a unit is torn.
    pub(super) fn compare(&mut self, first: usize, found: &[u8], look: Look) {
        let sectors = (first..).zip(found.chunks_exact(SECTOR_BYTES));
        let ids: Vec<Id> = sectors.map(|(at, bytes)| self.number_of(at, bytes)).collect();
        (first..).zip(&ids).for_each(|(at, id)| self.is(at, *id, look));
        let mut from = 0;
        while from < ids.len() {
            let end = ((first + from) / self.unit_sectors + 1) * self.unit_sectors - first;
            let unit = from..end.min(ids.len());
            self.check_whole(first + from, &ids[unit.clone()]);
            from = unit.end;
        }
    }

    /// Fails if these sectors of one unit are not those of one moment.
    fn check_whole(&self, first: usize, ids: &[Id]) {
        let sectors = |id: &Id| &self.writes[usize::try_from(*id).expect("few writes")];
        for (at, one) in (first..).zip(ids) {
            let is_later = |(beside, other): (usize, &Id)| {
                other != one && sectors(one).contains(&beside) && sectors(other).contains(&at)
            };
            if let Some((beside, other)) = (first..).zip(ids).find(|pair| is_later(*pair)) {
                panic!("a torn unit: write {one} is in sector {at}, and {other} in {beside}");
            }
        }
    }

    /// Whose contents these are.
    fn number_of(&self, sector: usize, found: &[u8]) -> Id {
        let (word, _) = found.split_first_chunk().expect("a sector");
        let id = Id::from_le_bytes(*word);
        let is_known = usize::try_from(id).is_ok_and(|id| id < self.writes.len());
        let mut expected = [0; SECTOR_BYTES];
        fill(sector, id, &mut expected);
        let shown = &found[..16];
        assert!(is_known && found == expected, "sector {sector}: nobody wrote {shown:02x?}");
        id
    }

    /// Notes that these sectors read as zeros.
    ///
    /// # Panics
    ///
    /// If one of them cannot.
    pub(super) fn are_zeros(&mut self, sectors: Range<usize>, look: Look) {
        sectors.for_each(|at| self.is(at, 0, look));
    }

    /// Notes what a sector has.
    fn is(&mut self, at: usize, id: Id, look: Look) {
        let sector = &mut self.sectors[at];
        if !sector.found(id, look, self.now) {
            let may: Vec<Id> = sector.values(look).map(|may| may.value).collect();
            panic!("sector {at}: write {id} is there, which is none of {may:?}");
        }
    }

    /// The size is about to be changed.
    pub(super) fn begin_resize(&mut self, sectors: usize) -> Look {
        let look = self.begin_read();
        self.size.begin(sectors, look.since);
        look
    }

    /// It was changed: what was cut off was zeros. Or it was not, but for a moment.
    pub(super) fn end_resize(&mut self, sectors: usize, look: Look, is_done: bool) {
        let (look, oldest) = (self.end_read(look), self.oldest());
        self.size.end(sectors, look.since, look.until, is_done, oldest);
        if is_done {
            self.are_zeros(sectors..self.sectors_max(), look);
        }
        self.forget(look);
    }

    /// Notes the size that was found.
    pub(super) fn is_size(&mut self, sectors: usize, look: Look) {
        let may_be = self.size.found(sectors, look, self.now);
        assert!(may_be, "the disk cannot have {sectors} sectors: {:?}", self.size);
    }

    /// The least that the disk may have now: less than it has while it is about to shrink.
    pub(super) fn least_size(&self) -> usize {
        let now = Look { since: self.now, until: NEVER };
        self.size.values(now).map(|may| may.value).min().expect("a register has a value")
    }

    /// Whether the disk may have ended before `end` at some moment of a look, and whether behind it.
    pub(super) fn may_end(&self, end: usize, look: Look) -> (bool, bool) {
        let sizes = || self.size.values(look).map(|may| may.value);
        (sizes().any(|size| size < end), sizes().any(|size| size >= end))
    }
}

/// The contents of a sector by the number of their write: noise; text that shrinks; one word, the same in all of the
/// write's sectors; or a mixture.
pub(super) fn fill(sector: usize, id: Id, into: &mut [u8]) {
    if id == 0 {
        return into.fill(0);
    }
    let chance = mixed(id.into());
    let is_mixture = chance % 6 == 0;
    let kind = if is_mixture { mixed(chance ^ sector as u64) } else { chance / 6 } % 5;
    let (is_noise, is_word) = (kind < 2, kind == 4);
    for (index, bytes) in (0_u64..).zip(into.chunks_exact_mut(8)) {
        let number = match index {
            _ if index % 8 == 0 || is_word => id.into(),
            1 => sector as u64,
            _ if is_noise => mixed(u64::from(id) << 32 ^ (sector as u64) << 8 ^ index),
            _ => mixed(index % 8),
        };
        bytes.copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::{Look, Model, SECTOR_BYTES, Write, fill};

    /// A disk of four units of four sectors.
    fn model() -> Model {
        Model::new(16, 16, 4)
    }

    /// What sectors from 0 on have if these writes are in them.
    fn contents(ids: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; ids.len() * SECTOR_BYTES];
        let sectors = bytes.chunks_exact_mut(SECTOR_BYTES).zip(ids).enumerate();
        sectors.for_each(|(at, (sector, id))| fill(at, *id, sector));
        bytes
    }

    /// A read that begins and ends at once. False: it found what cannot be.
    fn finds(model: &mut Model, ids: &[u32]) -> bool {
        let look = model.begin_read();
        let look = model.end_read(look);
        model.forget(look);
        agrees(model, ids, look)
    }

    fn agrees(model: &mut Model, ids: &[u32], look: Look) -> bool {
        catch_unwind(AssertUnwindSafe(|| model.compare(0, &contents(ids), look))).is_ok()
    }

    fn end(model: &mut Model, write: &Write) {
        model.end_write(write, &write.sectors.clone());
    }

    /// Goal: a write may be seen from its begin on, and must be from its end on; one that has failed need not be.
    #[test]
    fn a_write_that_has_ended_is_there() {
        let mut model = model();
        let one = model.begin_write(0..2);
        assert!(finds(&mut model, &[0, 0]) && finds(&mut model, &[one.id, one.id]));
        assert!(!finds(&mut model, &[0, 0]), "it was there already");
        end(&mut model, &one);
        let failed = model.begin_write(0..1);
        model.end_write(&failed, &(0..0));
        let other = model.begin_write(1..2);
        end(&mut model, &other);
        assert!(finds(&mut model, &[one.id, other.id]) && !finds(&mut model, &[failed.id]));
        assert!(!finds(&mut model, &[one.id, other.id + 1]), "nobody wrote that");
    }

    /// Goal: of writes that overlap in time either may be the last one, and all reads agree which.
    #[test]
    fn reads_agree_on_the_last_of_two_writes() {
        for (last, lost) in [(1, 2), (2, 1)] {
            let mut model = model();
            let [one, two] = [(), ()].map(|()| model.begin_write(0..1));
            end(&mut model, &one);
            end(&mut model, &two);
            assert!(!finds(&mut model, &[0]) && finds(&mut model, &[last]));
            assert!(!finds(&mut model, &[lost]) && finds(&mut model, &[last]));
        }
    }

    /// Goal: a read that is under way may find what was replaced since it began, and no later read may.
    #[test]
    fn a_slow_read_may_find_what_is_gone() {
        let mut model = model();
        let slow = model.begin_read();
        for _ in 0..2 {
            let write = model.begin_write(0..1);
            end(&mut model, &write);
        }
        let slow = model.end_read(slow);
        let write = model.begin_write(0..1);
        assert!(agrees(&mut model, &[0], slow) && agrees(&mut model, &[1], slow));
        assert!(!agrees(&mut model, &[write.id], slow), "that began later");
        model.forget(slow);
        assert!(!finds(&mut model, &[1]) && finds(&mut model, &[2]));
    }

    /// Goal: a unit does not show two writes each of which lies over the other; two units may.
    #[test]
    fn a_torn_unit_is_found() {
        let mut model = model();
        let writes = [0..4, 0..4, 4..8, 4..8].map(|sectors| model.begin_write(sectors));
        assert!(!finds(&mut model, &[1, 1, 2, 1]));
        assert!(finds(&mut model, &[1, 1, 1, 1, 4, 4, 4, 4]));
        writes.iter().for_each(|write| end(&mut model, write));
    }

    /// Goal: what is cut off was zeros, and requests behind the end of the disk are outside.
    #[test]
    fn a_disk_that_shrinks_was_empty_there() {
        let mut model = model();
        let look = model.begin_resize(8);
        assert_eq!((model.least_size(), model.may_end(12, look)), (8, (true, true)));
        model.end_resize(8, look, true);
        let look = model.begin_read();
        assert_eq!(model.may_end(12, look), (true, false));
        let write = model.begin_write(4..8);
        end(&mut model, &write);
        let look = model.begin_resize(4);
        let shrink = AssertUnwindSafe(|| model.end_resize(4, look, true));
        assert!(catch_unwind(shrink).is_err());
    }
}
