//! How the simulated program changes its mappings: through the engine, as the preloaded library
//! does, or without the engine, as a program does that makes the system call itself.

use std::ops::Range;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::Errno;

use super::program::Program;
use super::world::Claimed;
use crate::config::Mode;

impl<'w> Program<'w> {
    /// A range of up to `most` pages that begins near a random page, widened to whole grains.
    fn some_range(&mut self, most: usize) -> Range<usize> {
        let (grain, pages) = (self.world.settings.grain(), self.world.settings.pages);
        let aimed = self.world.settings.aimed && self.random.one_in(2);
        let page = if aimed { self.page_on_its_way() } else { None };
        let first = page.unwrap_or_else(|| self.some_page()) / grain * grain;
        let length = (1 + self.random.below(most)).next_multiple_of(grain);
        first..(first + length).min(pages)
    }

    /// The addresses where a range of pages begins and ends.
    fn addresses(&self, pages: &Range<usize>) -> (usize, usize) {
        (self.world.space.address(pages.start), self.world.space.address(pages.end))
    }

    fn is_all_mapped(&self, pages: &Range<usize>) -> bool {
        pages.clone().all(|page| self.world.space.is_mapped(self.world.space.address(page)))
    }

    fn is_all_free(&self, pages: &Range<usize>) -> bool {
        !pages.clone().any(|page| self.world.space.is_mapped(self.world.space.address(page)))
    }

    /// One change of a random kind.
    pub(super) fn change_mappings(&mut self) {
        let behind = self.world.settings.mode == Mode::Handler && self.random.one_in(2);
        match self.random.below(8) {
            0..2 if behind => self.discard_behind(),
            2..4 if behind => self.unmap_behind(),
            4..6 if behind => self.relocate_behind(),
            0..2 => self.unmap(),
            2 if self.random.one_in(4) => self.give_up(),
            3 => match self.random.below(3) {
                0 => self.relocate(),
                1 => self.carry(),
                _ => self.stretch(),
            },
            4..6 => self.map(),
            6 if self.random.one_in(3) => self.adopt_again(),
            _ => self.discard(),
        }
    }

    /// `madvise(MADV_DONTNEED)` through the engine. A page may be sealed, so that the kernel stops
    /// there.
    pub(super) fn discard(&mut self) {
        let (pages, grain) = (self.some_range(100), self.world.settings.discard_grain());
        let pages = pages.start.next_multiple_of(grain)..pages.end / grain * grain;
        if pages.is_empty() {
            return;
        }
        let Some(_claimed) = self.world.claim(pages.clone(), false) else { return };
        let is_sealed = self.random.one_in(6) && !self.world.settings.is_capped();
        let sealed = is_sealed.then(|| pages.start + self.random.below(pages.len()));
        let sealed = sealed.map(|page| self.world.space.address(page));
        let (start, end) = self.addresses(&pages);
        let call = |at, bytes| {
            self.world.space.drop_contents(at, bytes, sealed, &|page| self.world.forget(page))
        };
        // The answer is the kernel's, which the program would get.
        self.world.engine.discard(start, end, call).ok();
    }

    /// `munmap` through the engine.
    fn unmap(&mut self) {
        let pages = self.some_range(300);
        let Some(_claimed) = self.world.claim(pages.clone(), true) else { return };
        if self.is_all_mapped(&pages) {
            self.unmap_now(&pages);
        }
    }

    fn unmap_now(&mut self, pages: &Range<usize>) {
        let (start, end) = self.addresses(pages);
        let call = || {
            self.world.space.unmap(start, end - start, &|page| self.world.forget(page));
            Ok::<(), Errno>(())
        };
        self.world.engine.unmap(start, end, call).expect("it was mapped");
    }

    /// Unmaps everything, in several steps.
    pub(super) fn unmap_all(&mut self) {
        let all = self.world.settings.pages;
        let mut at = 0;
        while at < all {
            let mapped = self.is_all_mapped(&(at..at + 1));
            let alike = |page: &usize| self.is_all_mapped(&(*page..*page + 1)) == mapped;
            let mut length = (at..all).take_while(alike).count();
            if mapped && self.random.one_in(2) {
                let grain = self.world.settings.grain();
                length = (1 + self.random.below(length)).next_multiple_of(grain).min(length);
            }
            if mapped {
                self.unmap_now(&(at..at + length));
            }
            at += length;
        }
    }

    /// `mmap`; now and then the new mapping is touched before the engine adopts it.
    fn map(&mut self) {
        let (grain, all) = (self.world.settings.grain(), self.world.settings.pages);
        let first = self.random.below(all / grain) * grain;
        let length = (1 + self.random.below(400)).next_multiple_of(grain);
        self.adopt_new(first..(first + length).min(all));
    }

    /// Maps a range that is free, and claims it. Also returns its addresses.
    pub(super) fn map_free(&self, pages: &Range<usize>) -> Option<(Claimed<'w>, usize, usize)> {
        let claimed = self.world.claim(pages.clone(), true)?;
        if !self.is_all_free(pages) {
            return None;
        }
        let (start, end) = self.addresses(pages);
        self.world.space.map(start, end);
        Some((claimed, start, end))
    }

    /// Maps a range, if it is free, and has the engine adopt it.
    pub(super) fn adopt_new(&mut self, pages: Range<usize>) {
        let Some((_claimed, start, end)) = self.map_free(&pages) else { return };
        let touches: &[usize] =
            if self.world.settings.storm.is_some() { &[100] } else { &[0, 0, 10, 300] };
        for _ in 0..self.random.of(touches) {
            let page = pages.start + self.random.below(pages.len());
            self.touch_early(page);
        }
        self.adopt(start, end);
    }

    fn touch_early(&mut self, page: usize) {
        let word = self.random.next();
        self.world.touch(page, word % 2 == 0, |bytes, model| {
            if word % 2 == 0 {
                bytes[..8].copy_from_slice(&word.to_le_bytes());
                model.copy_from_slice(bytes);
            }
        });
    }

    fn adopt(&mut self, start: usize, end: usize) {
        let adopted = self.world.engine.adopt(start, end);
        let refusals = self.world.settings.refusals.register > 0;
        assert!(adopted.is_ok() || refusals, "{adopted:?}");
        self.world.engine.make_room(end - start);
    }

    /// The preloaded library takes for new what the engine manages already (`ADOPT-1`), all of a range or a part of
    /// it: it does not hear of a raw `mremap`.
    fn adopt_again(&mut self) {
        let pages = self.some_range(200);
        let Some(_claimed) = self.world.claim(pages.clone(), false) else { return };
        if self.is_all_mapped(&pages) {
            let (start, end) = self.addresses(&pages);
            self.adopt(start, end);
        }
    }

    /// `mlock` and the like: the engine leaves the pages to the kernel.
    fn give_up(&mut self) {
        let pages = self.some_range(20);
        let Some(_claimed) = self.world.claim(pages.clone(), false) else { return };
        let (start, end) = self.addresses(&pages);
        self.world.engine.pin(start, end);
    }

    /// `mremap` through the engine: of one mapping to where the kernel likes, or of all mappings in a range to a
    /// place of the program's own choice. Then it may fail when some have moved.
    fn relocate(&mut self) {
        let Some((from, to)) = self.two_ranges() else { return };
        let Some(_from) = self.world.claim(from.clone(), true) else { return };
        let Some(_to) = self.world.claim(to.clone(), true) else { return };
        let is_fixed = !self.is_all_free(&to) || self.random.one_in(2);
        let fails_at = from.start + self.random.below(3 * from.len());
        let ((start, end), target) = (self.addresses(&from), self.addresses(&to));
        let is_one = self.world.space.is_one_without_engine(start, end - start);
        let call = || {
            let is_joined = self.world.space.is_one_mapping(start, end - start);
            assert!(is_joined || !is_one, "the program's one mapping is still registered in part");
            if !is_fixed && !is_joined {
                return Err(Errno::FAULT);
            }
            for part in self.mappings_of(&from) {
                let (first, last) = self.addresses(&part);
                let (to, bytes) = (target.0 + first - start, last - first);
                self.world.space.unmap(to, bytes, &|page| self.world.forget(page));
                if is_fixed && part.end > fails_at {
                    return Err(Errno::NOMEM);
                }
                let follow = |from, to| self.world.follow(from, to);
                self.world.space.remap(first, to, bytes, &follow)?;
            }
            Ok(target)
        };
        let onto = if is_fixed { target } else { (0, 0) };
        self.world.engine.relocate((start, end), onto, &[], call).ok();
    }

    /// `mremap` of one mapping to a place that was reserved for it, a whole number of folios away where that can be. It
    /// may grow by that, if there is room behind its new place.
    fn carry(&mut self) {
        let Some((from, to)) = self.two_ranges() else { return };
        let folio = self.world.engine.geometry().folio_bytes() / PAGE_BYTES;
        let aligned = to.start / folio * folio + from.start % folio;
        let most = self.world.settings.pages;
        let to = aligned..(aligned + from.len() + self.random.of(&[0, 0, 1, 40])).min(most);
        let overlaps = from.start < to.end && to.start < from.end;
        if overlaps || to.len() < from.len() || self.random.one_in(8) {
            return;
        }
        let Some(_from) = self.world.claim(from.clone(), true) else { return };
        let Some(_to) = self.world.claim(to.clone(), true) else { return };
        if !self.is_all_mapped(&from) || !self.is_all_free(&to) {
            return;
        }
        let ((start, end), target) = (self.addresses(&from), self.addresses(&to));
        let fails = self.random.one_in(8);
        let call = || {
            if fails {
                return Err(Errno::NOMEM);
            }
            let follow = |from, to| self.world.follow(from, to);
            self.world.space.remap(start, target.0, end - start, &follow)?;
            self.world.space.grow(target.0 + (end - start), target.1);
            Ok(())
        };
        if self.world.engine.carry((start, end), target, call).is_some_and(|moved| moved.is_ok()) {
            if self.random.one_in(2) {
                self.world.audit();
            }
            self.read_some(&to);
        }
    }

    /// `mremap` of a mapping that grows where it is.
    fn stretch(&mut self) {
        let pages = self.some_range(200);
        let grain = self.world.settings.grain();
        let grown = (1 + self.random.below(60)).next_multiple_of(grain);
        let grown = pages.end..(pages.end + grown).min(self.world.settings.pages);
        let Some(_claimed) = self.world.claim(pages.start..grown.end, true) else { return };
        if grown.is_empty() || !self.is_all_mapped(&pages) || !self.is_all_free(&grown) {
            return;
        }
        let ((start, end), (_, new_end)) = (self.addresses(&pages), self.addresses(&grown));
        let fails = self.random.one_in(8);
        let call = || {
            if !self.world.space.is_one_mapping(start, end - start) {
                return Err(Errno::FAULT);
            }
            if fails {
                return Err(Errno::NOMEM);
            }
            self.world.space.grow(end, new_end);
            Ok(())
        };
        if self.world.engine.stretch((start, end), new_end, call).is_some_and(|grown| grown.is_ok())
        {
            self.read_some(&(pages.start..grown.end));
        }
    }

    /// The mappings of a range of pages, without the holes between them.
    fn mappings_of(&self, pages: &Range<usize>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for page in pages.clone().filter(|page| self.is_all_mapped(&(*page..*page + 1))) {
            let last = parts.last().map_or(page..page, Clone::clone);
            let (start, end) = self.addresses(&(last.start..page + 1));
            match parts.last_mut() {
                Some(part)
                    if part.end == page && self.world.space.is_one_mapping(start, end - start) =>
                {
                    part.end += 1
                }
                _ => parts.push(page..page + 1),
            }
        }
        parts
    }

    /// Two ranges of the same length that do not overlap.
    fn two_ranges(&mut self) -> Option<(Range<usize>, Range<usize>)> {
        let (grain, all) = (self.world.settings.grain(), self.world.settings.pages);
        let from = self.some_range(200);
        let first = self.random.below((all - from.len()) / grain) * grain;
        let to = first..first + from.len();
        (to.end <= from.start || from.end <= to.start).then_some((from, to))
    }

    pub(super) fn discard_behind(&mut self) {
        let pages = self.some_range(60);
        let Some(_claimed) = self.world.claim(pages.clone(), true) else { return };
        let (start, end) = self.addresses(&pages);
        // It returns NOMEM if part of the range is not mapped, and drops the rest.
        self.world
            .space
            .drop_contents(start, end - start, None, &|page| self.world.forget(page))
            .ok();
        self.read_some(&pages);
    }

    pub(super) fn unmap_behind(&mut self) {
        let pages = self.some_range(100);
        let claimed = self.world.claim(pages.clone(), true);
        if claimed.is_none() || !self.is_all_mapped(&pages) {
            return;
        }
        let (start, end) = self.addresses(&pages);
        self.world.space.unmap(start, end - start, &|page| self.world.forget(page));
        drop(claimed);
        if self.world.settings.storm.is_some() || self.random.one_in(2) {
            self.adopt_new(pages);
        }
    }

    pub(super) fn relocate_behind(&mut self) {
        let Some((mut from, mut to)) = self.two_ranges() else { return };
        if self.random.one_in(2) {
            // Where it is moved to is what may be on its way.
            (from, to) = (to, from);
        }
        let Some(_from) = self.world.claim(from.clone(), true) else { return };
        let Some(_to) = self.world.claim(to.clone(), true) else { return };
        if !self.is_all_mapped(&from) {
            return;
        }
        let ((start, end), target) = (self.addresses(&from), self.addresses(&to));
        // Onto memory in use, only what was touched: see "What is not simulated" in docs/simulation.md.
        if !self.is_all_free(&to) {
            from.clone().for_each(|page| _ = self.world.read(page));
        }
        let forget = |page| self.world.forget(page);
        let follow = |from, to| self.world.follow(from, to);
        if self.world.space.remap_onto(start, target.0, end - start, &forget, &follow).is_ok() {
            self.read_some(&to);
        }
    }

    /// The thread that made a change must see the change at once.
    fn read_some(&mut self, pages: &Range<usize>) {
        for _ in 0..self.random.below(8) {
            self.world.read(pages.start + self.random.below(pages.len()));
        }
    }
}

const _: () = assert!(PAGE_BYTES == 4096, "sizes above are in pages of 4 KiB");
