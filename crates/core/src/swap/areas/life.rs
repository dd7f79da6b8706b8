//! Areas come and go, and are held still for a fork.
//!
//! # Fork
//!
//! Both processes have the same table of objects, so neither may change what the other may read.
//!
//! 1. The parent lets all requests end ([`Store::drain`](crate::store::Store::drain)), calls [`Areas::share`],
//!    and forks. It goes on with its areas, but writes no slot that has objects at the fork, also when these
//!    have ended in the parent (`SWAP-5`).
//! 2. The child calls [`Areas::leave_to_parent`]. The areas without objects end. The others are frozen: the
//!    child writes nothing there, for the slots and generations are the parent's (`SWAP-2`). It gives each a disk of
//!    its own ([`Areas::replace_disk`]), locks the memory of the keys, which a child does not inherit locked
//!    ([`Areas::lock_keys_again`]), and adds areas of its own for what it writes.
//! 3. A frozen area whose last object ends is handed out by [`Areas::take_done`], and closed.
//! 4. Once no child of the parent has the disk any more, or if the fork failed, [`Areas::unshare`].

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

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
        self.present.add(id);
        Ok(id)
    }

    /// Adds slots at the end of an area. Allocates.
    pub fn grow(&self, id: AreaId, slots: u32) {
        if let Some(area) = self.area(id) {
            assert!(slots <= SLOTS_MAX - area.slots.total(), "{slots} slots more");
            area.slots.grow(slots);
        }
    }

    /// Whether the owner is about to add slots ([`Areas::grow`]) where a write finds none.
    pub fn set_growing(&self, is_growing: bool) {
        self.is_growing.store(is_growing, Relaxed);
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

    /// Shares all areas that have objects with a child that is about to be forked (`SWAP-5`). False: requests are in
    /// flight, and nothing was done.
    ///
    /// The caller holds everybody still who uses the areas, from before this call until after the fork.
    #[must_use]
    pub fn share(&self) -> bool {
        let is_idle = self.end_run();
        if is_idle {
            let has_objects = |area: &Arc<Area>| area.objects.load(Acquire) > 0;
            self.all().filter(has_objects).for_each(|area| area.share());
        }
        is_idle
    }

    /// Gives back what is left of the run that is being filled. False: requests are in flight.
    pub(in crate::swap) fn end_run(&self) -> bool {
        let mut inner = self.inner.lock();
        let is_idle = inner.open.is_none()
            && inner.free_frames.len() == inner.frames.len()
            && inner.free_reads.len() == inner.reads.len()
            && inner.queue.is_empty();
        if is_idle {
            inner.end_run();
        }
        is_idle
    }

    /// No other process has the disk of this area: the children that it was shared with have ended, or execute other
    /// programs; or the fork failed.
    pub fn unshare(&self, id: AreaId) {
        if let Some(area) = self.area(id).filter(|area| area.is_shared()) {
            area.unshare();
        }
    }

    /// In a child, after its parent's [`Areas::share`]: freezes the areas that have objects, ends the others, and hands
    /// their disks to their owner. What the areas did before is counted by the parent, and here from zero on.
    ///
    /// # Panics
    ///
    /// If an area has objects and was not shared: both processes would write there.
    pub fn leave_to_parent(&self, each: &mut dyn FnMut(AreaId, Box<dyn Disk>)) {
        for area in self.all().filter(|area| area.objects.load(Acquire) > 0) {
            assert!(area.is_shared() || area.is_frozen(), "SWAP-2: a fork without share()");
            area.freeze();
        }
        self.take(|area| area.objects.load(Acquire) == 0, each);
        assert!(self.all().all(|area| area.is_frozen()), "SWAP-2: a parent's area is in use");
        self.counters.start_over();
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
                    self.present.remove(id);
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
