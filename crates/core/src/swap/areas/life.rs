//! Areas come and go, and are held still for a fork.
//!
//! # Fork
//!
//! Both processes have the same table of objects, so neither may change what the other may read.
//!
//! 1. The parent lets all requests end ([`Store::drain`](crate::store::Store::drain)), calls [`Areas::freeze`],
//!    and forks. Areas that have objects are frozen then: no slot is written, none is punched out (`SWAP-5`).
//! 2. In the parent an area that was empty goes on as before; it adds another if there is none. If the fork
//!    failed, [`Areas::thaw`].
//! 3. The child calls [`Areas::leave_to_parent`], which ends every area that is not frozen: it was empty, and its
//!    slots and generations are the parent's now (`SWAP-2`). It gives each frozen one a disk of its own
//!    ([`Areas::replace_disk`]) and locks the memory of its key, which a child does not inherit locked
//!    ([`Areas::lock_keys_again`]).
//! 4. Both call [`Areas::take_done`] now and then: a frozen area without objects is handed to its owner, who
//!    closes it. Once a process knows that no other has the disk any more, it may write there again
//!    ([`Areas::thaw`]).

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::super::disk::Disk;
use super::super::location::{AreaId, SLOTS_MAX};
use super::super::seal::Seal;
use super::{Area, Areas};

/// What an area is made of.
#[derive(Debug)]
pub struct NewArea {
    /// What it is written to.
    pub disk: Box<dyn Disk>,
    /// Slots of the disk, at most [`SLOTS_MAX`].
    pub slots: u32,
    /// Higher ones are filled first, equal ones in turn.
    pub priority: i32,
    /// Its key, which no other area has.
    pub seal: Seal,
}

/// The areas that one [`Areas::freeze`] has frozen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "after a fork that failed, thaw() needs it"]
pub struct Frozen(u16);

impl Frozen {
    /// One of them.
    pub fn only(id: AreaId) -> Frozen {
        Frozen(1 << id.get())
    }

    /// Which.
    pub fn areas(self) -> impl Iterator<Item = AreaId> {
        AreaId::all().filter(move |id| self.0 >> id.get() & 1 == 1)
    }
}

impl Areas {
    /// Adds an area. Allocates.
    ///
    /// # Errors
    ///
    /// There are as many as there can be: the area is given back.
    ///
    /// # Panics
    ///
    /// If it has no slot, or more than [`SLOTS_MAX`].
    pub fn add(&self, new: NewArea) -> Result<AreaId, NewArea> {
        assert!((1..=SLOTS_MAX).contains(&new.slots), "{} slots", new.slots);
        // Only who adds fills cells, so a cell that is empty now is empty below, but for another who adds.
        let Some(id) = AreaId::all().find(|id| self.cells[id.get()].read().is_none()) else {
            return Err(new);
        };
        let NewArea { disk, slots, priority, seal } = new;
        let area = Arc::new(Area::new(id, disk, slots, priority, seal));
        let mut cell = self.cells[id.get()].write();
        assert!(cell.is_none(), "two threads add areas at once");
        *cell = Some(area);
        // Release: pairs with the Acquire in all().
        self.present.fetch_or(1 << id.get(), Release);
        Ok(id)
    }

    /// Adds slots at the end of an area. Allocates.
    pub fn grow(&self, id: AreaId, slots: u32) {
        if let Some(area) = self.area(id) {
            assert!(slots <= SLOTS_MAX - area.slots.total(), "{slots} slots more");
            area.slots.grow(slots);
        }
    }

    /// Begins to empty an area: nothing more is written there. Its owner has the objects that are there fetched
    /// ([`AreaId::of`] a location says which), until [`Areas::take_done`] hands the area back.
    pub fn drain(&self, id: AreaId) {
        let Some(area) = self.area(id) else { return };
        let mut inner = self.inner.lock();
        // What was accepted is written.
        Areas::close(&mut inner);
        inner.end_run();
        area.set_draining(true);
    }

    /// Ends the emptying: the area is used again.
    pub fn end_drain(&self, id: AreaId) {
        if let Some(area) = self.area(id) {
            area.set_draining(false);
        }
    }

    /// The first slot from `from` on that objects are in. A look, for tables and tests: others come and go.
    #[must_use]
    pub fn in_use(&self, id: AreaId, from: u32) -> Option<u32> {
        let area = self.area(id)?;
        let mut next = area.slots.in_use(from)?;
        while !area.is_live(next) {
            next = area.slots.in_use(next + 1)?;
        }
        Some(next)
    }

    /// Freezes all areas that have objects (`SWAP-5`), and says which were not frozen before. `None`: requests are
    /// in flight, and nothing was done.
    ///
    /// The caller holds everybody still who uses the areas, from before this call until after the fork.
    pub fn freeze(&self) -> Option<Frozen> {
        let mut inner = self.inner.lock();
        let is_idle = inner.open.is_none()
            && inner.free_frames.len() == inner.frames.len()
            && inner.free_reads.len() == inner.reads.len()
            && inner.queue.is_empty();
        if !is_idle {
            return None;
        }
        inner.end_run();
        let mut frozen = 0;
        for area in self.all() {
            let has_objects = area.objects.load(Acquire) > 0;
            if has_objects && !area.is_frozen() {
                area.set_frozen(true);
                frozen |= 1 << area.id.get();
            }
        }
        Some(Frozen(frozen))
    }

    /// These areas are written again. No other process reads them: the fork failed, or the child has ended or
    /// executes another program.
    pub fn thaw(&self, frozen: Frozen) {
        for id in frozen.areas() {
            if let Some(area) = self.area(id) {
                area.set_frozen(false);
            }
        }
    }

    /// In a child, after its parent's [`Areas::freeze`]: ends all areas that are not frozen, and hands the disk of
    /// each to its owner.
    ///
    /// # Panics
    ///
    /// If an area has objects and is not frozen: both processes would write there.
    pub fn leave_to_parent(&self, each: &mut dyn FnMut(AreaId, Box<dyn Disk>)) {
        let is_the_parents = |area: &Area| {
            let has_objects = area.objects.load(Acquire) > 0;
            assert!(area.is_frozen() || !has_objects, "SWAP-2: a fork without a freeze");
            !area.is_frozen()
        };
        self.take(is_the_parents, each);
    }

    /// In a child: locks the memory of all keys. False: the system refuses.
    #[must_use]
    pub fn lock_keys_again(&self) -> bool {
        self.all().all(|area| area.lock_key_again())
    }

    /// Ends all areas that are frozen or drained and have no object any more, and hands the disk of each to its
    /// owner.
    pub fn take_done(&self, each: &mut dyn FnMut(AreaId, Box<dyn Disk>)) {
        self.take(Area::is_done, each);
    }

    /// Ends those of the areas that nobody uses just now.
    fn take(&self, is_wanted: impl Fn(&Area) -> bool, each: &mut dyn FnMut(AreaId, Box<dyn Disk>)) {
        for id in AreaId::all() {
            let mut inner = self.inner.lock();
            let mut cell = self.cells[id.get()].write();
            let Some(area) = cell.take_if(|area| is_wanted(area)) else { continue };
            if inner.open.is_none() && inner.run.as_ref().is_some_and(|run| run.area.id == id) {
                inner.end_run();
            }
            match Arc::try_unwrap(area) {
                Ok(area) => {
                    self.present.fetch_and(!(1 << id.get()), Release);
                    drop(cell);
                    drop(inner);
                    // The key ends here.
                    let Area { disk, .. } = area;
                    each(id, disk);
                }
                // Somebody looks at it: the next call finds it again.
                Err(area) => *cell = Some(area),
            }
        }
    }

    /// Exchanges the disk of an area, and returns the one that it had. For a child, whose disk has the same contents
    /// and other descriptors.
    ///
    /// # Errors
    ///
    /// There is no such area, or somebody uses it: the disk is given back.
    pub fn replace_disk(
        &self,
        id: AreaId,
        disk: Box<dyn Disk>,
    ) -> Result<Box<dyn Disk>, Box<dyn Disk>> {
        let mut cell = self.cells[id.get()].write();
        match cell.as_mut().and_then(Arc::get_mut) {
            Some(area) => Ok(std::mem::replace(&mut area.disk, disk)),
            None => Err(disk),
        }
    }
}
