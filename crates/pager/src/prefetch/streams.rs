//! Streams: what will be wanted next, by where the faults are.
//!
//! A program that walks through its memory faults at addresses that rise or fall, mostly by small
//! steps, now and then by a step back; often it walks in several places by turns. Each such walk is
//! a **stream**, with an extent: what was brought in for it, or is about to be.
//!
//! ```text
//!          near               extent                near
//!     <-----------> start =================== end <------>
//!     a fault here: it falls                 a fault here: it rises
//! ```
//!
//! A fault near the extent, or in it and beyond the last fault, continues the stream: the stream's
//! **window** doubles, and so many more units are brought in beyond the fault, in the direction of
//! the walk. So a walk that ends has brought in vain about as much as it has passed, at most. A
//! fault that is near no extent begins a stream, in the place of the one that has not been continued
//! for longest, for the size of its window.
//!
//! Windows need **credit**: units that were used give it, units that were brought in vain take it. No one
//! tells which units a program touches that are there already. But where the walk goes on beyond its window
//! shows how dense it is: right behind the window, or only some units further. Without this a program that
//! touches its objects in no order at all, but many of them in the same places, brought in 160,000 units that
//! saved 80,000 faults.
//!
//! A walk by equal **steps** of more than a unit, as down a column of a matrix or an image, gets what lies at its next
//! steps and nothing of what is between. (Where it got that too, an image of 72 MiB was blurred 14 times slower than
//! without any windows: a column lies in 12 MiB of its pages, which stay until the next column comes; the whole image
//! does not.) The distances of its faults are multiples of the step, whatever is there already; so their greatest
//! common divisor is the step.
//!
//! It does not matter which thread faults. There are no system calls here, no locks and no clock.

use std::cmp::Reverse;
use std::ops::Range;

use crate::folio::{Geometry, Units};

/// How many streams are kept. A collector of node that marks with four threads has about 60; with
/// 32 there are a tenth more faults.
const STREAMS: usize = 64;

/// A fault continues a stream at most so far from its extent: the objects of a program lie almost,
/// but not quite, in the order in which it walks over them. With 16 KiB ruby has twice as many
/// faults.
const NEAR_BYTES: usize = 32 << 10;

/// The largest window, if a 64th of the limit is not less; it has at least two units. A window grows
/// beyond half of this only as far as an eighth of what its walk has passed.
const WINDOW_BYTES: u64 = 1 << 20;

/// Windows are free to open while the credit is at least this. At first it is twice as much.
const CREDIT_ENOUGH_BYTES: usize = 2 << 20;

/// The most credit, so that it follows what the program does now. With less, a few walks that end
/// suddenly would count for too much.
const CREDIT_MAX_BYTES: usize = 34 << 20;

/// What a unit of a walk that goes on costs, if it was brought in vain: this part (1/2) of what one saves that
/// was used. A fault is waited for; a unit too many mostly is not.
const VAIN_SHARE: usize = 2;

/// The step of a walk is found from so many distances between faults: as many of a walk without equal steps hardly have
/// a common divisor by chance.
const STEP_FAULTS: u32 = 8;

/// Windows of twice as many units or more differ by less than this many: otherwise a walk by the smallest steps, which
/// faults behind each window, would seem to have steps of that length.
const JITTER: usize = 8;

/// Without enough credit one in so many faults that could open a window does: to see whether that
/// pays again.
const TRY_EVERY: u32 = 16;

/// One walk. All positions are in units: an address divided by the size of a unit.
#[derive(Clone, Default, Debug)]
struct Stream {
    extent: Range<usize>,
    /// The part of the extent that the prefetching thread has still to look at.
    ahead: Range<usize>,
    rises: bool,
    /// The unit of the last fault.
    last: usize,
    steps: Steps,
    /// How many units of its windows the walk has used.
    passed: usize,
    /// 1 while a fault follows one on a unit that was gone again ([`Streams::was_gone`]).
    gone: u8,
    /// So many units of the extent lie beyond the last fault.
    window: usize,
    /// When the stream was continued last. 0: there is no stream here.
    at: u64,
}

/// What is known of the steps of a walk.
#[derive(Clone, Default, Debug)]
struct Steps {
    /// The address of the last fault.
    last: usize,
    /// The length of the steps in bytes, by the last [`STEP_FAULTS`] distances; 0: not known, or not so any more.
    bytes: usize,
    /// The greatest common divisor of the distances since then; 0: there was none. And how many there were.
    divisor: usize,
    count: u32,
}

impl Steps {
    fn note(&mut self, address: usize) {
        let distance = address.abs_diff(self.last);
        self.last = address;
        if distance == 0 {
            return;
        }
        if self.bytes > 0 && distance % self.bytes != 0 {
            self.bytes = 0;
        }
        self.divisor = common_divisor(self.divisor, distance);
        self.count += 1;
        if self.count == STEP_FAULTS {
            (self.bytes, self.divisor, self.count) = (self.divisor, 0, 0);
        }
    }
}

/// The greatest common divisor; with 0 it is the other number.
fn common_divisor(mut one: usize, mut other: usize) -> usize {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

impl Stream {
    /// How far a unit is from the extent; 0 inside.
    fn distance(&self, unit: usize) -> usize {
        match unit {
            _ if unit < self.extent.start => self.extent.start - unit,
            _ if unit >= self.extent.end => unit - self.extent.end + 1,
            _ => 0,
        }
    }

    /// The length of its steps in bytes, if they are equal and longer than a unit. Beyond [`NEAR_BYTES`] the walk would
    /// be no stream; such a number is a window's.
    fn step(&self, near: usize, unit_bytes: usize) -> Option<usize> {
        let steps = unit_bytes + 1..=(near + 1) * unit_bytes;
        steps.contains(&self.steps.bytes).then_some(self.steps.bytes)
    }

    /// The unit of the next step in `ahead`.
    fn next_step(&self, step: usize, unit_bytes: usize) -> Option<usize> {
        let (ahead, last) = (&self.ahead, self.steps.last);
        // The first byte of the range in the direction of the walk.
        let address = if self.rises {
            let edge = ahead.start * unit_bytes;
            last + edge.saturating_sub(last).div_ceil(step) * step
        } else {
            let edge = ahead.end * unit_bytes - 1;
            last.checked_sub(last.saturating_sub(edge).div_ceil(step) * step)?
        };
        Some(address / unit_bytes).filter(|unit| ahead.contains(unit))
    }

    /// Whether the walk has passed a unit: it was left out, or is gone again.
    fn is_behind(&self, unit: usize) -> bool {
        let is_passed = if self.rises { unit < self.last } else { unit > self.last };
        self.extent.contains(&unit) && (is_passed || unit == self.last)
    }
}

/// What a fault should bring in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// The fault's unit, and others around it, also of other folios.
    pub(crate) units: Range<usize>,
    /// The fault continues a stream that rises, and has done so before.
    pub(crate) rises: bool,
    /// The prefetching thread has something to do.
    pub(crate) has_ahead: bool,
    /// The prefetching thread has taken this unit before.
    pub(crate) is_expected: bool,
    /// So many units were planned in vain, for a walk that has ended or turned.
    pub(crate) vain: usize,
    stream: usize,
    at: u64,
}

impl Plan {
    /// The planned units that lie in a folio of `units` units, whose first is unit `first`.
    pub(crate) fn within(&self, first: usize, units: usize) -> Units {
        let inside = |unit: usize| unit.clamp(first, first + units) - first;
        Units::from(inside(self.units.start)..inside(self.units.end))
    }
}

/// What the prefetching thread should bring in next: units of one folio.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) units: Range<usize>,
    /// So many whole folios above are wanted too.
    pub(crate) folios_above: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Streams {
    streams: [Stream; STREAMS],
    clock: u64,
    /// Rises by the units that were used, falls by those that were brought in vain.
    credit: usize,
    credit_enough: usize,
    credit_max: usize,
    /// Units that were used, since the start.
    used: u64,
    /// Faults that could have opened a window, since the credit became too low.
    refused: u32,
    near: usize,
    window_max: usize,
    unit_bytes: usize,
    /// Units of a folio.
    folio: usize,
}

impl Streams {
    /// For a limit of so many bytes.
    pub(crate) fn new(geometry: Geometry, limit_bytes: u64) -> Streams {
        let unit_bytes = geometry.unit_bytes();
        let window_bytes = (limit_bytes / 64).min(WINDOW_BYTES) as usize;
        Streams {
            streams: std::array::from_fn(|_| Stream::default()),
            clock: 0,
            credit: 2 * CREDIT_ENOUGH_BYTES / unit_bytes,
            credit_enough: CREDIT_ENOUGH_BYTES / unit_bytes,
            credit_max: CREDIT_MAX_BYTES / unit_bytes,
            used: 0,
            refused: 0,
            near: (NEAR_BYTES / unit_bytes).max(1),
            window_max: (window_bytes / unit_bytes).max(2),
            unit_bytes,
            folio: geometry.units(),
        }
    }

    /// What a fault at `address` should bring in.
    pub(crate) fn fault(&mut self, address: usize) -> Plan {
        self.clock += 1;
        let (at, unit) = (self.clock, address / self.unit_bytes);
        let (index, is_new) = self.find(unit);
        let (mut units, mut rises, mut vain) = (unit..unit + 1, false, 0);
        let mut is_expected = false;
        if is_new {
            let steps = Steps { last: address, ..Steps::default() };
            let new = Stream { extent: units.clone(), last: unit, steps, ..Stream::default() };
            vain = self.brought(index, self.streams[index].window);
            self.streams[index] = new;
            self.credit = self.credit.saturating_sub(vain);
        } else if !self.streams[index].is_behind(unit) {
            let stream = &mut self.streams[index];
            is_expected = stream.extent.contains(&unit) && !stream.ahead.contains(&unit);
            stream.gone = stream.gone.saturating_sub(1);
            stream.steps.note(address);
            (units, rises, vain) = self.go_on(index, unit);
        }
        let stream = &mut self.streams[index];
        stream.at = at;
        let has_ahead = !stream.ahead.is_empty();
        Plan { units, rises, has_ahead, is_expected, vain, stream: index, at }
    }

    /// The stream that a fault on `unit` continues, or the place for a new one and `true`.
    fn find(&self, unit: usize) -> (usize, bool) {
        let (mut best, mut oldest) = (None, (u64::MAX, 0));
        for (index, stream) in self.streams.iter().enumerate() {
            // A large window keeps a walk from faulting for a while.
            oldest = oldest.min((stream.at + 4 * stream.window as u64, index));
            // Where an older walk has been before, this fault rather continues another stream.
            let distance = if stream.is_behind(unit) { self.near } else { stream.distance(unit) };
            if stream.at > 0 && distance <= self.near {
                let this = (distance, Reverse(stream.at), index);
                best = Some(best.map_or(this, |best| this.min(best)));
            }
        }
        best.map_or((oldest.1, true), |(_, _, index)| (index, false))
    }

    /// Continues a stream: moves its extent beyond the fault. Returns what to bring in, whether the
    /// stream rises and has a window already, and how many units were planned in vain.
    fn go_on(&mut self, index: usize, unit: usize) -> (Range<usize>, bool, usize) {
        let stream = &self.streams[index];
        let rises = unit > stream.last;
        let has_turned = stream.window > 0 && rises != stream.rises;
        let (gap, window) = (stream.distance(unit), stream.window);
        let step = self.step(index);
        let step_units = step.map_or(1, |bytes| bytes.div_ceil(self.unit_bytes));
        // Without credit a walk keeps its window only as long as it goes on right where the window ends.
        let keeps = gap <= step_units || self.credit >= self.credit_enough;
        let goes_on = window > 0 && !has_turned && keeps;
        // If the first unit that is touched beyond the window is the third, then about every third unit in it
        // was touched too.
        let (used, vain) = match gap {
            _ if has_turned => (0, self.brought(index, window)),
            // If the prefetching thread is late, the walk has not passed its window yet.
            _ if step.is_some() => (self.brought(index, window.min(unit.abs_diff(stream.last))), 0),
            0 => (unit.abs_diff(stream.last).min(window), 0),
            _ => (window / gap, window - window / gap),
        };
        let loss = if has_turned { vain } else { vain / VAIN_SHARE };
        self.used += used as u64;
        self.credit = (self.credit + used).min(self.credit_max).saturating_sub(loss);
        let tries = goes_on || self.may_open();

        let (folio, window_max, jitter) = (self.folio, self.window_max, self.jitter());
        let stream = &mut self.streams[index];
        stream.passed = if has_turned { 0 } else { stream.passed + used };
        let most = (stream.passed / 8).clamp(window_max / 2, window_max);
        stream.window = if goes_on { (2 * stream.window).min(most) } else { usize::from(tries) };
        if stream.window >= 2 * JITTER {
            stream.window -= jitter;
        }
        // What lies between the extent and the fault is wanted too. So is what was not prefetched
        // yet, unless the walk has left it far behind.
        let is_late = !stream.ahead.is_empty() && !has_turned;
        let edge = if is_late { &stream.ahead } else { &(stream.extent.end..stream.extent.start) };
        let units = if !tries {
            unit..unit + 1
        } else if rises {
            let from = edge.start.max(unit.saturating_sub(stream.window));
            from.min(unit)..unit + 1 + stream.window
        } else {
            let to = edge.end.min(unit + 1 + stream.window);
            unit.saturating_sub(stream.window)..to.max(unit + 1)
        };
        (stream.rises, stream.last, stream.extent) = (rises, unit, units.clone());
        if step.is_some() {
            stream.ahead = if rises { unit + 1..units.end } else { units.start..unit };
            return (unit..unit + 1, false, vain);
        }
        // The fault itself brings in what lies in its folio.
        let start = unit / folio * folio;
        stream.ahead = match (rises, units.start >= start, units.end <= start + folio) {
            (_, true, true) => 0..0,
            (true, true, _) => start + folio..units.end,
            (false, _, true) => units.start..start,
            _ => units.clone(),
        };
        (units, rises && goes_on, vain)
    }

    fn step(&self, index: usize) -> Option<usize> {
        self.streams[index].step(self.near, self.unit_bytes)
    }

    /// How many of so many units ahead a walk wants.
    fn brought(&self, index: usize, units: usize) -> usize {
        self.step(index).map_or(units, |step| units * self.unit_bytes / step)
    }

    /// Another number for each fault, below [`JITTER`].
    fn jitter(&self) -> usize {
        // The upper bits of multiples of the golden ratio are spread evenly.
        (self.clock.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61) as usize % JITTER
    }

    /// Notes that a fault had to load a unit which the prefetching thread should have loaded before. If
    /// that happens twice in a row, what is brought in goes out again before the walk comes to it:
    /// there is less memory than the windows take.
    pub(crate) fn was_gone(&mut self, plan: &Plan) {
        let stream = &mut self.streams[plan.stream];
        if stream.at != plan.at {
            return;
        }
        if stream.gone > 0 {
            self.credit = self.credit.saturating_sub(stream.window);
            stream.window = (stream.window / 4).max(1);
            stream.ahead = 0..0;
        }
        stream.gone = 2;
    }

    /// Units that were brought in ahead of a walk and used, since the start; and those that are ahead of the
    /// last fault of a walk now.
    pub(crate) fn used_and_ahead(&self) -> (u64, usize) {
        let there = self.streams.iter().enumerate().map(|(index, stream)| {
            self.brought(index, stream.window.saturating_sub(stream.ahead.len()))
        });
        (self.used, there.sum())
    }

    /// Whether a stream without a window may open one.
    fn may_open(&mut self) -> bool {
        self.refused = if self.credit >= self.credit_enough { 0 } else { self.refused + 1 };
        self.refused % TRY_EVERY == 0
    }

    /// Notes that a fault has brought in zeros. That may be more than planned; and above a whole folio
    /// of zeros there is hardly anything to prefetch.
    pub(crate) fn brought_zeros(&mut self, plan: &Plan, units: &Range<usize>) {
        let stream = &mut self.streams[plan.stream];
        if stream.at == plan.at {
            let extent = &mut stream.extent;
            *extent = extent.start.min(units.start)..extent.end.max(units.end);
            if units.len() >= self.folio {
                stream.ahead = 0..0;
            }
        }
    }

    /// Takes the next piece that is to be prefetched, for the stream that was continued last.
    pub(crate) fn take(&mut self) -> Option<Piece> {
        let (folio, near, unit_bytes) = (self.folio, self.near, self.unit_bytes);
        loop {
            let waiting = self.streams.iter_mut().filter(|stream| !stream.ahead.is_empty());
            let stream = waiting.max_by_key(|stream| stream.at)?;
            let ahead = stream.ahead.clone();
            let step = stream.step(near, unit_bytes);
            let units = match (step, stream.rises) {
                (None, true) => ahead.start..ahead.end.min((ahead.start / folio + 1) * folio),
                (None, false) => ahead.start.max((ahead.end - 1) / folio * folio)..ahead.end,
                (Some(step), _) => match stream.next_step(step, unit_bytes) {
                    Some(unit) => unit..unit + 1,
                    None => {
                        stream.ahead = 0..0;
                        continue;
                    }
                },
            };
            stream.ahead =
                if stream.rises { units.end..ahead.end } else { ahead.start..units.start };
            let is_whole = stream.rises && step.is_none();
            let folios_above = if is_whole { stream.ahead.len() / folio } else { 0 };
            return Some(Piece { units, folios_above });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};
    use std::ops::Range;

    use zfolio_core::page::UnitOrder;

    use super::{Streams, WINDOW_BYTES};
    use crate::folio::Geometry;

    const LIMIT: u64 = 1 << 30;
    const UNIT: usize = 4096;

    fn streams() -> Streams {
        Streams::new(Geometry::new(UnitOrder::from_bytes(4096).unwrap()), LIMIT)
    }

    /// Streams with a memory for `room` units, which forgets first what was brought in first. A touch of a
    /// unit that is not there is a fault.
    struct Walker {
        streams: Streams,
        there: BTreeSet<usize>,
        order: VecDeque<usize>,
        room: usize,
        brought: usize,
        faults: usize,
        vain: usize,
    }

    impl Walker {
        fn new() -> Walker {
            let (there, order) = (BTreeSet::new(), VecDeque::new());
            let room = usize::MAX;
            Walker { streams: streams(), there, order, room, brought: 0, faults: 0, vain: 0 }
        }

        fn bring(&mut self, units: Range<usize>) {
            for unit in units {
                if self.there.insert(unit) {
                    self.order.push_back(unit);
                    self.brought += 1;
                }
            }
            while self.there.len() > self.room {
                let first = self.order.pop_front().unwrap();
                self.there.remove(&first);
            }
        }

        /// Touches the start of a unit.
        fn touch(&mut self, unit: usize) {
            self.touch_byte(unit * UNIT);
        }

        /// Touches a byte, and lets the prefetching thread do all its work.
        fn touch_byte(&mut self, address: usize) {
            let unit = address / UNIT;
            if self.there.contains(&unit) {
                return;
            }
            self.faults += 1;
            let plan = self.streams.fault(address);
            if plan.is_expected {
                self.streams.was_gone(&plan);
            }
            assert!(plan.units.contains(&unit), "{plan:?}");
            self.vain += plan.vain;
            let folio = unit / 16 * 16;
            self.bring(plan.units.start.max(folio)..plan.units.end.min(folio + 16));
            while let Some(piece) = self.streams.take() {
                assert_eq!(piece.units.start / 16, (piece.units.end - 1) / 16, "one folio");
                self.bring(piece.units);
            }
        }
    }

    #[test]
    fn walks_in_both_directions_need_few_faults() {
        let up: Vec<usize> = (50_000..60_000).collect();
        let down: Vec<usize> = up.iter().rev().copied().collect();
        for walk in [up, down] {
            let mut walker = Walker::new();
            walk.iter().for_each(|unit| walker.touch(*unit));
            // 9 faults until the window is 128 units, then one for each window.
            assert!(walker.faults < 60, "{}", walker.faults);
            let more = walker.there.len() - walk.len();
            assert!(more as u64 <= WINDOW_BYTES / 4096, "{more} more than were touched");
        }
    }

    /// Goal: steps to and fro, holes, and other walks between do not break a walk. Method: six walks by
    /// turns, each of blocks of four units in the order 2, 0, 3, 1; every ninth block is left out.
    #[test]
    fn walks_that_are_not_straight_and_take_turns_need_few_faults() {
        let mut walker = Walker::new();
        let mut touched = 0;
        for block in (0..2000).filter(|block| block % 9 != 0) {
            for step in [2, 0, 3, 1] {
                for walk in 0..6 {
                    let at = 4 * block + step;
                    let start = walk << 24;
                    walker.touch(if walk % 2 == 0 { start + at } else { start + 9000 - at });
                    touched += 1;
                }
            }
        }
        assert!(walker.faults < touched / 50, "{} of {touched}", walker.faults);
    }

    /// Goal: windows shrink until all of them fit into the memory that there is. Method: 40 walks by turns in
    /// memory for 4096 units, which forgets first what was brought in first.
    #[test]
    fn windows_fit_into_memory() {
        let mut walker = Walker { room: 4096, ..Walker::new() };
        for step in 0..2000 {
            (0..40).for_each(|walk| walker.touch((walk << 24) + step));
        }
        let brought = walker.brought;
        assert!(walker.faults < 20_000 && brought < 400_000, "{} {brought}", walker.faults);
    }

    /// Goal: without credit a walk gets a window all the same, whatever other faults there are between.
    #[test]
    fn without_credit_windows_are_tried() {
        for phase in 0..2 {
            let mut walker = Walker::new();
            walker.streams.credit = 0;
            (0..phase).for_each(|other| walker.touch((5 << 30) + (other << 12)));
            let mut faults = 0;
            for step in 0..20_000 {
                let before = walker.faults;
                walker.touch(step);
                faults += walker.faults - before;
                walker.touch((1 << 30) + (step << 12));
            }
            assert!(faults < 1000, "{faults}");
        }
    }

    /// Goal: what is touched at random brings hardly anything else in.
    #[test]
    fn random_touches_bring_hardly_more_than_themselves() {
        let mut walker = Walker::new();
        let mut state = 1_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            walker.touch((state >> 33) as usize % 200_000);
        }
        let brought = walker.there.len();
        assert!(brought < walker.faults * 11 / 10, "{brought} for {} faults", walker.faults);
    }

    /// Goal: a walk that leaves out most units brings in hardly more than it touches, and goes on to do so when
    /// another walk has given credit before. Method: every sixth unit or so, at random, of places far apart.
    #[test]
    fn a_walk_with_many_holes_gets_small_windows() {
        let mut walker = Walker::new();
        (0..20_000).for_each(|unit| walker.touch((1 << 30) + unit));
        let mut state = 1_u64;
        let mut sparse = |walker: &mut Walker, walks: std::ops::Range<usize>| {
            let mut touched = 0;
            for walk in walks {
                let mut at = walk << 12;
                for _ in 0..100 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    at += 1 + (state >> 33) as usize % 11;
                    walker.touch(at);
                    touched += 1;
                }
            }
            touched
        };
        sparse(&mut walker, 0..500);
        let before = walker.brought;
        let touched = sparse(&mut walker, 500..1000);
        let brought = walker.brought - before;
        assert!(brought < touched * 13 / 10, "{brought} for {touched}");
    }

    /// Goal: a walk by equal steps, up or down, brings in hardly more than it touches, whatever is there already, with
    /// few faults; and it has a window of the usual kind again once it leaves nothing out. Method: images of several
    /// widths, walked along every 16th pixel's column, where the pages of one column are still there when the next one
    /// comes; before it a walk that has given credit.
    #[test]
    fn a_walk_along_the_columns_of_an_image_brings_nothing_between() {
        let rows = [6_000, 11_200, 3 * UNIT, 17_000, 24_000, 7 * UNIT, 32_000];
        for (row, rises) in rows.into_iter().flat_map(|row| [(row, true), (row, false)]) {
            let mut walker = Walker::new();
            (0..40_000).for_each(|unit| walker.touch((1 << 30) + unit));
            let (brought, faults) = (walker.brought, walker.faults);
            let mut touched = BTreeSet::new();
            for column in 0..32 {
                for y in 0..3000 {
                    let y = if rises { y } else { 2999 - y };
                    let at = y * row + column * 16 * 8;
                    touched.insert(at / UNIT);
                    walker.touch_byte(at);
                }
                // Of later columns a page here and there is not there.
                let faults = walker.faults - faults;
                assert!(column > 0 || faults < 300, "{faults} faults, rows of {row}, {rises}");
            }
            let (brought, touched) = (walker.brought - brought, touched.len());
            assert!(brought < touched * 5 / 4, "{brought} for {touched}, rows of {row}");
            let (before, next) = (walker.faults, 3000 * row / UNIT);
            (next..next + 20_000).for_each(|unit| walker.touch(unit));
            assert!(walker.faults - before < 300, "{} faults", walker.faults - before);
        }
    }

    /// Goal: of a walk without holes nearly all units count as used, and of random touches none; what is ahead
    /// is no more than the window.
    #[test]
    fn what_a_walk_passes_counts_as_used() {
        let mut walker = Walker::new();
        (0..10_000).for_each(|unit| walker.touch(unit));
        let (used, ahead) = walker.streams.used_and_ahead();
        assert!((9_000..=10_000).contains(&used), "{used}");
        assert!(ahead as u64 <= WINDOW_BYTES / 4096 && ahead > 0, "{ahead}");
        (0..10_000).for_each(|unit| walker.touch((1 << 30) + (unit << 12)));
        assert_eq!(walker.streams.used_and_ahead(), (used, 0));
    }

    /// Goal: of a walk by equal steps no more counts as used than it has passed, also while the prefetching thread does
    /// nothing. Method: nothing is taken.
    #[test]
    fn steps_count_once_if_nothing_was_brought() {
        let mut streams = streams();
        (0..200).for_each(|step| _ = streams.fault(step * 24_000));
        assert!((100..=200).contains(&streams.used), "{}", streams.used);
    }

    /// Goal: walks that end soon make windows small. Method: walks of five units, far from each other.
    #[test]
    fn walks_that_end_soon_make_windows_small() {
        let mut walker = Walker::new();
        for walk in 0..10_000 {
            (0..5).for_each(|unit| walker.touch((walk << 12) + unit));
        }
        let before = walker.there.len();
        for walk in 10_000..11_000 {
            (0..5).for_each(|unit| walker.touch((walk << 12) + unit));
        }
        let brought = walker.there.len() - before;
        assert!(walker.vain > 500 && brought <= 5300, "{brought} for 5000");
        // And a long walk makes them large again.
        let before = walker.faults;
        (0..20_000).for_each(|unit| walker.touch((1 << 30) + unit));
        assert!(walker.faults - before < 1000, "{} faults", walker.faults - before);
    }

    /// Goal: a thread that is faster than the prefetch finds the rest of its folio planned, and a run of
    /// zeros that brings more than planned is continued where it ends.
    #[test]
    fn a_walk_goes_on_where_its_faults_end() {
        let mut streams = streams();
        for unit in [100, 101, 102, 104] {
            streams.fault(unit * UNIT);
        }
        let plan = streams.fault(109 * UNIT);
        assert!(plan.rises && plan.has_ahead && plan.units.end > 112, "{plan:?}");
        let late = streams.fault(115 * UNIT);
        assert!(late.rises && late.units.contains(&115) && late.units.end > plan.units.end);

        let plan = streams.fault(UNIT << 20);
        streams.brought_zeros(&plan, &((1 << 20)..(1 << 20) + 64));
        let next = streams.fault(((1 << 20) + 64) * UNIT);
        assert!(!next.rises && next.units.start == (1 << 20) + 64, "{next:?}");
        streams.brought_zeros(&next, &((1 << 20) + 64..(1 << 20) + 128));
        let next = streams.fault(((1 << 20) + 128) * UNIT);
        assert!(next.rises && next.units.start == (1 << 20) + 128, "{next:?}");
    }

    /// Goal: any faults in any order get plans that contain them, within the window, and pieces that were
    /// planned. Method: random steps in a few places, also at both ends of the address space.
    #[test]
    fn plans_and_pieces_agree() {
        let mut state = 7_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for _ in 0..50 {
            let mut streams = streams();
            let mut planned = BTreeSet::new();
            let mut places = [0, 300, 1 << 20, (1 << 35) - 2000];
            for _ in 0..500 {
                let place = random(places.len());
                let at = places[place] + random(40);
                places[place] = at.saturating_sub(random(40));
                let plan = streams.fault(at * UNIT);
                assert!(plan.units.contains(&at) && plan.units.len() <= 600, "{at} {plan:?}");
                planned.extend(streams.streams[plan.stream].extent.clone());
                if random(2) == 0 {
                    streams.brought_zeros(&plan, &(at / 16 * 16..at / 16 * 16 + 16));
                }
                for _ in 0..random(4) {
                    let Some(piece) = streams.take() else { break };
                    assert!(
                        !piece.units.is_empty()
                            && piece.units.clone().all(|unit| planned.contains(&unit))
                    );
                    assert_eq!(piece.units.start / 16, (piece.units.end - 1) / 16);
                }
            }
        }
    }
}
