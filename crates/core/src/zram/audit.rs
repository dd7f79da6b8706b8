//! What holds while no request is under way, for tests and simulations: the figures are those of a count of all units.

use std::sync::atomic::Ordering::Relaxed;

use super::Zram;
use super::table::UNITS_MAX;
use crate::stats::Figures;
use crate::store::{EntryId, Form, Store};
use crate::zsmalloc::PageSource;
use crate::zsmalloc::check::check_rows;

/// Sums over entries, in the order of `figures`: their number, the bytes of their objects wherever these are, those
/// that are one word, and those that did not shrink.
type Sums = [u64; 4];

fn figures(figures: &Figures) -> Sums {
    let Figures { stored_units, compressed_bytes, same_filled_units, incompressible_units, .. } =
        figures;
    [stored_units, compressed_bytes, same_filled_units, incompressible_units]
        .map(|figure| figure.load(Relaxed))
}

/// Sums over these entries, and how many of them are on the backing.
fn count<'e, S: PageSource>(
    store: &Store<S>,
    entries: impl Iterator<Item = &'e EntryId>,
) -> (Sums, u64) {
    let (mut sums, mut away) = ([0; 4], 0);
    for entry in entries {
        let form = store.form(entry);
        let is_raw = matches!(form, Form::Incompressible(_));
        let more =
            [1, store.object_bytes(entry) as u64, (form == Form::SameFilled).into(), is_raw.into()];
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        away += u64::from(store.away(entry).is_some());
    }
    (sums, away)
}

impl<S: PageSource> Zram<S> {
    /// Waits until the backing is at rest, and compares all figures with a count of what there is.
    ///
    /// # Panics
    ///
    /// If they differ, an invariant is broken, or there is a unit beyond the end of the disk.
    #[doc(hidden)]
    pub fn audit(&self) {
        self.store.drain();
        let unit_bytes = self.unit.bytes() as u64;
        let end = self.disk_bytes() / unit_bytes;
        let (mut all, mut all_away, mut units) = ([0; 4], 0, 0);
        for (unit, lock) in self.table.slots(0, UNITS_MAX) {
            let slot = lock.lock();
            assert!(unit < end || slot.is_empty(), "ZRAM-4: unit {unit} is beyond the end");
            self.check_apart(unit, &slot);
            let (sums, away) = count(&self.store, slot.entry.iter());
            all.iter_mut().zip(sums).for_each(|(all, more)| *all += more);
            all_away += away;
            units += u64::from(!slot.is_empty());
        }
        assert_eq!(all, figures(&self.figures), "units that were counted, and the figures");
        let (pages, same_apart) = self.check_all_apart();
        let spilled = self.store.spill_stats();
        assert_eq!(all_away, spilled.units, "units on the backing");
        let stat = self.mm_stat();
        assert_eq!(stat.orig_data_size, units * unit_bytes, "{stat:?}");
        let here = all[1] + pages - spilled.bytes;
        assert_eq!(stat.compr_data_size, here, "{stat:?}");
        assert_eq!(stat.same_pages, all[2], "{stat:?}");
        assert_eq!(stat.huge_pages, all[3] - spilled.raw_units, "{stat:?}");
        assert!(stat.mem_used_max >= stat.mem_used_total, "{stat:?}");
        assert!(stat.mem_used_total > stat.compr_data_size, "{stat:?}");
        let without_object = all[2] + all_away + same_apart;
        check_rows(self.store.pool(), usize::try_from(without_object).expect("few"));
    }

    /// Compares the figures of pages apart with a count. Returns the bytes of their objects, and how many are one word.
    fn check_all_apart(&self) -> (u64, u64) {
        let Some(apart) = &self.apart else { return (0, 0) };
        let (mut all, mut away) = ([0; 4], 0);
        apart.each(|pages| {
            let (sums, out) = count(&self.store, pages.iter().flatten());
            all.iter_mut().zip(sums).for_each(|(all, more)| *all += more);
            away += out;
        });
        assert_eq!(away, 0, "APART-5: pages apart are in the pool");
        assert_eq!(all, figures(apart.figures()), "pages apart that were counted, and the figures");
        (all[1], all[2])
    }
}
