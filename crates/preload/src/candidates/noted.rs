//! The sets of ranges themselves (`CAND-1`, `CAND-3`): no lock, no engine. All ranges are whole pages: one that was cut
//! within a page would name a page that the engine does not manage as a whole.

use zfolio_core::ranges::Ranges;
use zfolio_pager::moved_parts;
use zfolio_sys::map::PAGE_BYTES;

/// See [`super`]. `fresh` and `reserved` are parts of `noted`.
pub(super) struct Noted {
    noted: Ranges,
    fresh: Ranges,
    reserved: Ranges,
}

/// What [`Noted::take`] removed.
pub(crate) struct Taken {
    noted: Vec<(usize, usize)>,
    fresh: Vec<(usize, usize)>,
    reserved: Vec<(usize, usize)>,
}

impl Taken {
    /// Where the ranges are that were removed, once all of `old` has moved to `new`.
    pub(crate) fn moved(
        &self,
        old: (usize, usize),
        new: (usize, usize),
    ) -> impl Iterator<Item = (usize, usize)> {
        moved_parts(self.noted.iter().copied(), old, new)
    }

    /// The ranges that were removed.
    pub(crate) fn noted(&self) -> &[(usize, usize)] {
        &self.noted
    }
}

/// A caller has rounded both to pages; `usize::MAX` is the end of all addresses.
fn check_pages(start: usize, end: usize) {
    debug_assert!(start % PAGE_BYTES == 0, "{start:#x} is within a page");
    debug_assert!(end % PAGE_BYTES == 0 || end == usize::MAX, "{end:#x} is within a page");
}

impl Noted {
    pub(super) const fn new() -> Noted {
        Noted { noted: Ranges::new(), fresh: Ranges::new(), reserved: Ranges::new() }
    }

    /// Adds a range that is accessible.
    pub(super) fn insert(&mut self, start: usize, end: usize, fresh: bool) {
        check_pages(start, end);
        self.noted.join(start, end);
        self.reserved.remove(start, end);
        if fresh {
            self.fresh.join(start, end);
        }
    }

    /// Adds a range that is not accessible yet.
    pub(super) fn reserve(&mut self, start: usize, end: usize) {
        check_pages(start, end);
        self.noted.join(start, end);
        self.reserved.insert(start, end);
    }

    /// A range has become accessible.
    pub(super) fn allow(&mut self, start: usize, end: usize) {
        check_pages(start, end);
        self.reserved.remove(start, end);
    }

    /// Removes a range; returns how many bytes of it were there.
    pub(super) fn remove(&mut self, start: usize, end: usize) -> usize {
        check_pages(start, end);
        self.fresh.remove(start, end);
        self.reserved.remove(start, end);
        self.noted.remove(start, end)
    }

    /// Removes a range, and remembers what of it was there.
    pub(super) fn take(&mut self, start: usize, end: usize) -> Taken {
        let taken = Taken {
            noted: self.noted.pieces(start, end).collect(),
            fresh: self.fresh.pieces(start, end).collect(),
            reserved: self.reserved.pieces(start, end).collect(),
        };
        self.remove(start, end);
        taken
    }

    /// Undoes [`Noted::take`].
    pub(super) fn put_back(&mut self, taken: &Taken) {
        taken.noted.iter().for_each(|(start, end)| self.noted.join(*start, *end));
        taken.fresh.iter().for_each(|(start, end)| self.fresh.join(*start, *end));
        taken.reserved.iter().for_each(|(start, end)| self.reserved.insert(*start, *end));
    }

    /// Whether an engine that has taken over manages any of a range.
    pub(super) fn is_managed(&self, start: usize, end: usize) -> bool {
        self.noted.bytes_in(start, end) > self.fresh.bytes_in(start, end)
    }

    /// All ranges.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.noted.iter()
    }

    /// What is fresh, if that is `bytes` or more; afterwards nothing is.
    pub(super) fn take_fresh(&mut self, bytes: usize) -> Option<Ranges> {
        (self.fresh.bytes() >= bytes).then(|| std::mem::take(&mut self.fresh))
    }

    pub(super) fn has_reserved(&self) -> bool {
        self.reserved.bytes() > 0
    }

    /// Bytes that are accessible.
    pub(super) fn manageable_bytes(&self) -> usize {
        self.noted.bytes() - self.reserved.bytes()
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::Random;

    use super::Noted;

    const PAGE: usize = 4096;
    const PAGES: usize = 96;

    /// What is known of one page.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    struct Page {
        noted: bool,
        fresh: bool,
        reserved: bool,
    }

    fn pages(noted: &Noted) -> Vec<Page> {
        let is = |ranges: &zfolio_core::ranges::Ranges, page: usize| ranges.contains(page * PAGE);
        let page = |at| Page {
            noted: is(&noted.noted, at),
            fresh: is(&noted.fresh, at),
            reserved: is(&noted.reserved, at),
        };
        (0..PAGES).map(page).collect()
    }

    /// Goal: the three sets say of each page what a table of the pages says, whatever happens. Method: random
    /// operations on both; `fresh` and `reserved` stay parts of `noted`.
    #[test]
    fn ranges_agree_with_a_table_of_pages() {
        let mut random = Random::new(7);
        for _ in 0..200 {
            let (mut noted, mut model) = (Noted::new(), [Page::default(); PAGES]);
            for _ in 0..60 {
                let first = random.below(PAGES);
                let last = (first + 1 + random.below(20)).min(PAGES);
                let (start, end) = (first * PAGE, last * PAGE);
                let part = &mut model[first..last];
                match random.below(6) {
                    0 => {
                        let fresh = random.below(2) == 0;
                        noted.insert(start, end, fresh);
                        part.iter_mut().for_each(|page| {
                            *page =
                                Page { noted: true, fresh: page.fresh || fresh, reserved: false }
                        });
                    }
                    // A mapping comes where nothing is.
                    1 if part.iter().all(|page| !page.noted) => {
                        noted.reserve(start, end);
                        part.fill(Page { noted: true, fresh: false, reserved: true });
                    }
                    2 => {
                        noted.allow(start, end);
                        part.iter_mut().for_each(|page| page.reserved = false);
                    }
                    3 => {
                        let gone = part.iter().filter(|page| page.noted).count();
                        assert_eq!(noted.remove(start, end), gone * PAGE);
                        part.fill(Page::default());
                    }
                    4 => {
                        let taken = noted.take(start, end);
                        assert_eq!(taken.noted().is_empty(), part.iter().all(|page| !page.noted));
                        assert!(!noted.is_managed(start, end));
                        noted.put_back(&taken);
                    }
                    _ => {
                        let fresh = model.iter().filter(|page| page.fresh).count() * PAGE;
                        let wanted = 1 + random.below(8) * PAGE;
                        let taken = noted.take_fresh(wanted).map(|ranges| ranges.bytes());
                        assert_eq!(taken, (fresh >= wanted).then_some(fresh));
                        if taken.is_some() {
                            model.iter_mut().for_each(|page| page.fresh = false);
                        }
                    }
                }
                assert_eq!(pages(&noted), model);
                let managed = model[first..last].iter().any(|page| page.noted && !page.fresh);
                assert_eq!(noted.is_managed(start, end), managed);
                let open = model.iter().filter(|page| page.noted && !page.reserved).count();
                assert_eq!(noted.manageable_bytes(), open * PAGE);
                assert_eq!(noted.has_reserved(), model.iter().any(|page| page.reserved));
            }
        }
    }
}
