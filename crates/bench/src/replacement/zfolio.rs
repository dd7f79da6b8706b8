//! zfolio's own rule: no access is seen but a fault.
//!
//! The queues and the clock of the ghosts are the pager's own code ([`zfolio_core::replacement`]);
//! the rest of the pager is modelled:
//!
//! - A page is a unit. A fault brings one unit in.
//! - A capture takes all resident units of the next folio to the staging area, first in, first out.
//!   What leaves the staging area is out. Staged units count against the capacity.
//! - A fault on a staged unit is a rescue: all staged units of the folio come back.
//! - Reclaim happens at a fault that finds no room. There is no background thread, no prefetch, no
//!   copy, and no lower bound for the size of the staging area in bytes.
//! - `watch=N` is what the pager does not do: the pages of the oldest folios are write-protected so that the kernel
//!   notes a write (`UFFD_FEATURE_WP_ASYNC`, `PAGEMAP_SCAN`), and a folio that was written to gets another turn. The
//!   first write to a page that is watched is a fault, which the kernel serves by itself.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use zfolio_core::replacement::{Queue, Queues, came_back_soon};

use super::policy::{Access, Policy};
use super::trace::Trace;

/// The most units in a folio, as in the pager.
const UNITS_MAX: usize = 16;

/// Which folios have a ghost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ghosts {
    /// The product: every captured folio, by a clock of captures from probation.
    Both,
    /// Only folios captured from probation; others never come back soon.
    Probation,
    /// Every captured folio, by a clock of all captures.
    All,
}

/// What the variants differ in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rule {
    /// Where a folio goes that did not come back soon, once the memory was full. The product has
    /// `Probation` for whole folios, `Main` for single units of a folio.
    enter: Queue,
    ghosts: Ghosts,
    /// The staging area has one part in `staging` of the capacity.
    staging: usize,
    /// Probation has one part in `probation` of the capacity.
    probation: usize,
    /// Units of a folio.
    folio: usize,
    /// A rescue brings back one unit instead of all staged units of the folio.
    one_unit: bool,
    /// The oldest folios of each queue are watched, one part in so many; 0: none is.
    watch: usize,
}

/// What is the oldest is found anew after so many misses: one part in this of the capacity.
const LOOKS: usize = 20;

impl Rule {
    /// The product's rule for whole folios.
    pub(crate) const PRODUCT: Rule = Rule {
        enter: Queue::Probation,
        ghosts: Ghosts::Both,
        staging: 64,
        probation: 32,
        folio: 1,
        one_unit: false,
        watch: 0,
    };

    /// The product's rule for single units, with folios of one unit.
    pub(crate) const SINGLE: Rule = Rule { enter: Queue::Main, ..Rule::PRODUCT };

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = |most: usize| {
            let number = value.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or(format!("{key}={value}: accepted: 1 to {most}"))
        };
        match (key, value) {
            ("enter", "probation") => self.enter = Queue::Probation,
            ("enter", "main") => self.enter = Queue::Main,
            ("ghosts", "both") => self.ghosts = Ghosts::Both,
            ("ghosts", "probation") => self.ghosts = Ghosts::Probation,
            ("ghosts", "all") => self.ghosts = Ghosts::All,
            ("rescue", "folio") => self.one_unit = false,
            ("rescue", "page") => self.one_unit = true,
            ("staging", _) => self.staging = number(1 << 20)?,
            ("probation", _) => self.probation = number(1 << 20)?,
            ("folio", _) => self.folio = number(UNITS_MAX)?,
            ("watch", _) => self.watch = number(1 << 20)?,
            _ => {
                let line = "accepted: enter=probation|main, ghosts=both|probation|all, \
                            rescue=folio|page, staging=N, probation=N, folio=N, watch=N";
                return Err(format!("{key}={value}: {line}"));
            }
        }
        Ok(())
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Rule, String> {
        let mut rule = Rule::PRODUCT;
        for parameter in text.split(',') {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            rule.set(key, value)?;
        }
        Ok(rule)
    }
}

impl fmt::Display for Rule {
    /// The parameters that differ from the product's rule, each after a comma.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.enter == Queue::Main {
            f.write_str(",enter=main")?;
        }
        match self.ghosts {
            Ghosts::Both => {}
            Ghosts::Probation => f.write_str(",ghosts=probation")?,
            Ghosts::All => f.write_str(",ghosts=all")?,
        }
        let numbers = [
            ("staging", self.staging, Rule::PRODUCT.staging),
            ("probation", self.probation, Rule::PRODUCT.probation),
            ("folio", self.folio, Rule::PRODUCT.folio),
            ("watch", self.watch, Rule::PRODUCT.watch),
        ];
        for (key, number, default) in numbers {
            if number != default {
                write!(f, ",{key}={number}")?;
            }
        }
        if self.one_unit { f.write_str(",rescue=page") } else { Ok(()) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Out,
    Resident,
    Staged,
}

#[derive(Clone, Default, Debug)]
struct Folio {
    /// The pages of the trace that belong to the folio.
    pages: Vec<u32>,
    /// The folio has an entry in main or probation.
    queued: bool,
    /// When the folio was captured last, by the clock of the ghosts; `None` if that does not count
    /// as a ghost, or if the folio was never captured.
    captured: Option<u32>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Zfolio {
    rule: Rule,
    capacity: usize,
    staged_target: usize,
    queues: Queues,
    /// Folios that probation may hold.
    share: usize,
    /// Folios in the staging area, oldest first. An entry is stale if the folio was rescued.
    staged: VecDeque<usize>,
    /// The clock of the ghosts.
    captures: u32,
    folios: Vec<Folio>,
    folio_of: Vec<usize>,
    places: Vec<Place>,
    held: usize,
    /// Of each page whether it is watched, and whether it was written to since.
    watched: Vec<bool>,
    written: Vec<bool>,
    write_faults: u64,
    /// Misses since the oldest folios were looked for.
    since_look: usize,
}

impl Zfolio {
    pub(crate) fn new(rule: Rule, trace: &Trace, capacity: usize) -> Zfolio {
        let mut folios: Vec<Folio> = Vec::new();
        let (mut folio_of, mut last) = (Vec::new(), None);
        for (page, number) in (0..).zip(&trace.pages) {
            let number = number / rule.folio as u64;
            if last != Some(number) {
                folios.push(Folio::default());
                last = Some(number);
            }
            let at = folios.len() - 1;
            folios[at].pages.push(page);
            folio_of.push(at);
        }
        let entries = capacity / rule.folio;
        let staged_target = (entries / rule.staging).max(2);
        Zfolio {
            rule,
            capacity,
            staged_target,
            queues: Queues::default(),
            share: (entries / rule.probation).max(staged_target),
            staged: VecDeque::new(),
            captures: 0,
            folios,
            folio_of,
            places: vec![Place::Out; trace.pages.len()],
            held: 0,
            watched: vec![false; trace.pages.len()],
            written: vec![false; trace.pages.len()],
            write_faults: 0,
            since_look: 0,
        }
    }

    /// Watches the oldest folios, as far as they are not watched already.
    fn look(&mut self) {
        for folio in self.queues.oldest(self.rule.watch) {
            for page in &self.folios[folio].pages {
                let at = *page as usize;
                self.watched[at] |= self.places[at] == Place::Resident && !self.written[at];
            }
        }
    }

    /// Whether any page of a folio was written to while it was watched; none is watched any more.
    fn stop_watching(&mut self, folio: usize) -> bool {
        let mut any = false;
        for page in &self.folios[folio].pages {
            self.watched[*page as usize] = false;
            any |= std::mem::take(&mut self.written[*page as usize]);
        }
        any
    }

    fn has_staged(&self, folio: usize) -> bool {
        self.any(folio, Place::Staged)
    }

    fn any(&self, folio: usize, place: Place) -> bool {
        self.folios[folio].pages.iter().any(|page| self.places[*page as usize] == place)
    }

    /// Moves all pages of a folio that are at `from` to another place; returns how many.
    fn move_pages(&mut self, folio: usize, from: Place, to: Place) -> usize {
        let mut moved = 0;
        for page in &self.folios[folio].pages {
            let place = &mut self.places[*page as usize];
            if *place == from {
                *place = to;
                moved += 1;
            }
        }
        moved
    }

    fn enqueue(&mut self, folio: usize, queue: Queue) {
        if !std::mem::replace(&mut self.folios[folio].queued, true) {
            self.queues.push(folio, queue);
        }
    }

    /// Captures the next folio that has no staged units.
    fn capture_next(&mut self) -> bool {
        for _ in 0..2 * self.queues.len() {
            let Some((folio, queue)) = self.queues.pop(self.share) else { return false };
            if self.stop_watching(folio) {
                self.queues.push(folio, Queue::Main);
                continue;
            }
            if self.has_staged(folio) {
                self.queues.push(folio, queue);
                continue;
            }
            self.folios[folio].queued = false;
            self.move_pages(folio, Place::Resident, Place::Staged);
            self.folios[folio].captured = Some(self.captures);
            match (self.rule.ghosts, queue) {
                (Ghosts::Both, Queue::Main) => {}
                (Ghosts::Probation, Queue::Main) => self.folios[folio].captured = None,
                _ => self.captures = self.captures.wrapping_add(1),
            }
            self.staged.push_back(folio);
            return true;
        }
        false
    }

    /// Drops the oldest staged folio.
    fn drop_next(&mut self) {
        while let Some(folio) = self.staged.pop_front() {
            let dropped = self.move_pages(folio, Place::Staged, Place::Out);
            self.held -= dropped;
            if dropped > 0 {
                return;
            }
        }
    }

    /// One step of reclaim, as in the pager's `reclaim_one`.
    fn reclaim(&mut self) {
        let captured = self.staged.len() <= self.staged_target && self.capture_next();
        if !captured || self.staged.len() > self.staged_target {
            self.drop_next();
        }
    }
}

impl Policy for Zfolio {
    fn access(&mut self, page: u32) -> Access {
        let folio = self.folio_of[page as usize];
        let found = self.places[page as usize];
        if found == Place::Resident {
            return Access::Hit;
        }
        if found == Place::Staged && self.rule.one_unit {
            self.places[page as usize] = Place::Resident;
            self.enqueue(folio, Queue::Main);
            return Access::Rescue;
        }
        // A fault on a unit that is out brings the staged units of its folio back too.
        if !self.rule.one_unit && self.move_pages(folio, Place::Staged, Place::Resident) > 0 {
            self.enqueue(folio, Queue::Main);
        }
        if found == Place::Staged {
            return Access::Rescue;
        }
        let room = self.held < self.capacity;
        self.since_look += usize::from(!room && self.rule.watch > 0);
        if self.since_look > self.capacity / LOOKS {
            self.since_look = 0;
            self.look();
        }
        while self.held >= self.capacity {
            self.reclaim();
        }
        let main = self.queues.main_len();
        let soon = |time| came_back_soon(time, self.captures, main);
        let soon = self.folios[folio].captured.is_some_and(soon);
        let queue = if soon || room { Queue::Main } else { self.rule.enter };
        self.places[page as usize] = Place::Resident;
        self.held += 1;
        self.enqueue(folio, queue);
        Access::Miss
    }

    fn wrote(&mut self, page: u32) {
        let at = page as usize;
        if std::mem::take(&mut self.watched[at]) {
            self.written[at] = true;
            self.write_faults += 1;
        }
    }

    fn write_faults(&self) -> u64 {
        self.write_faults
    }

    fn held(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use crate::replacement::policy::{Access, Name, Policy};
    use crate::replacement::trace::Trace;

    fn started(name: &str, pages: u64, capacity: usize) -> Box<dyn Policy> {
        let name: Name = name.parse().unwrap();
        name.start(&Trace::of("all", 0..pages), capacity)
    }

    /// Goal: the oldest pages of main wait in the staging area, and a fault there is a rescue.
    /// Method: capacity 8 has staging areas of two folios.
    #[test]
    fn a_staged_page_is_rescued() {
        let mut policy = started("zfolio", 20, 8);
        (0..9).for_each(|page| assert_eq!(policy.access(page), Access::Miss));
        // Pages 0, 1 and 2 were captured, and 0 left the staging area.
        assert_eq!(policy.access(1), Access::Rescue);
        assert_eq!(policy.access(1), Access::Hit);
        assert_eq!(policy.access(0), Access::Miss);
    }

    /// Goal: a rescue brings the whole folio, or one page in that variant.
    #[test]
    fn a_rescue_brings_the_folio_or_one_page() {
        for (name, second) in
            [("zfolio,folio=2", Access::Hit), ("zfolio,folio=2,rescue=page", Access::Rescue)]
        {
            let mut policy = started(name, 20, 8);
            (0..9).for_each(|page| assert_eq!(policy.access(page), Access::Miss));
            // Three folios were captured: 0 and 1 left together, 2 to 5 are staged.
            assert_eq!(policy.access(2), Access::Rescue, "{name}");
            assert_eq!(policy.access(3), second, "{name}");
        }
    }

    /// Goal: what is written to while it is watched gets another turn, once; the first write to it is a fault.
    #[test]
    fn a_page_that_is_written_to_gets_another_turn() {
        for (name, kept) in [("zfolio,enter=main", false), ("zfolio,enter=main,watch=2", true)] {
            let mut policy = started(name, 1_000, 64);
            (0..70).for_each(|page| _ = policy.access(page));
            // Misses had page 20 looked at, which is among the older half.
            assert_eq!(policy.access(20), Access::Hit);
            (0..2).for_each(|_| policy.wrote(20));
            assert_eq!(policy.write_faults(), u64::from(kept), "{name}");
            (100..140).for_each(|page| _ = policy.access(page));
            assert_eq!(policy.access(20) == Access::Hit, kept, "{name}");
            (200..300).for_each(|page| _ = policy.access(page));
            assert_eq!(policy.access(20), Access::Miss, "{name}");
        }
    }

    /// Goal: a scan passes through probation, and main keeps what came before it; a rule that lets
    /// everything into main loses main to the scan.
    #[test]
    fn a_scan_leaves_main_alone() {
        for (name, kept) in [("zfolio", true), ("zfolio,enter=main", false)] {
            let mut policy = started(name, 1_000, 64);
            (0..1_000).for_each(|page| assert_eq!(policy.access(page), Access::Miss));
            let hit = policy.access(40) == Access::Hit;
            assert_eq!(hit, kept, "{name}");
        }
    }
}
