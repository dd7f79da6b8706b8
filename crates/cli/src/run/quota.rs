//! Which process of a tree gives memory to the others. Pure: the supervisor passes the state of the
//! processes in, and sets the targets that come out.
//!
//! Memory goes to the process that waits most per byte of its share, a step at a time. A process
//! gets its next target when it has reached the last one, so each step has its effect before the
//! next is judged.

use std::collections::BTreeMap;

use zfolio_core::ledger::{SMALL_BYTES, SMALL_MARGIN_BYTES, signed};

const SECOND_NS: u64 = 1_000_000_000;

/// How long waiting is observed before it is judged.
const WINDOW_NS: u64 = SECOND_NS / 4;

/// A process that waits for more than this in a second is in need.
const NEED_NS: u64 = SECOND_NS / 20;

/// It gets memory from one that waits less than a quarter as much per byte.
const LESS: u64 = 4;

/// How long a target stays after it was reached.
const HOLD_NS: u64 = SECOND_NS / 2;

/// A process whose share has not fallen for so long cannot come down, and is left alone for as long.
const REST_NS: u64 = 2 * SECOND_NS;

/// It has fallen if that is more than an 8th of what the process still has to give. That is not asked of the others
/// meanwhile, so it must become half of itself within 10 s or so.
const FALL_SHARE: u64 = 8;

/// What is no slack: a 16th of the share, within these bounds.
const MARGIN_SHARE: u64 = 16;
const MARGIN_BYTES_MIN: u64 = 2 << 20;
const MARGIN_BYTES_MAX: u64 = 32 << 20;

/// A process gives a 16th of its share at a time; where less than the reserve is free, a quarter if it does not wait.
const STEP_SHARE: u64 = 16;
const STEP_SHARE_URGENT: u64 = 4;
const STEP_BYTES_MIN: u64 = 1 << 20;

/// One process at one moment, by the number of its slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) index: usize,
    pub(super) share: u64,
    pub(super) target: Option<u64>,
    pub(super) charge: u64,
    /// Whether it comes down to a target.
    pub(super) watches: bool,
    /// Whether it can come down below what it uses.
    pub(super) reclaims: bool,
    pub(super) waited_ns: u64,
    /// How often it took what was not free.
    pub(super) forced: u32,
}

impl View {
    /// What the process still has to give back.
    fn pending(&self) -> u64 {
        self.target.map_or(0, |target| self.share.saturating_sub(target))
    }

    /// The least slack that is worth a target.
    fn slack_min(&self) -> u64 {
        if self.charge < SMALL_BYTES { SMALL_MARGIN_BYTES } else { STEP_BYTES_MIN }
    }

    /// What it has and does not use.
    fn slack(&self) -> u64 {
        let margin = (self.share / MARGIN_SHARE).clamp(MARGIN_BYTES_MIN, MARGIN_BYTES_MAX);
        let kept = match self.charge < SMALL_BYTES {
            // An engine has its tables and streams besides.
            true if self.reclaims => SMALL_BYTES,
            true => self.charge + SMALL_MARGIN_BYTES,
            false => self.charge + margin,
        };
        self.share.saturating_sub(kept)
    }
}

/// What is remembered of a process.
#[derive(Clone, Copy, Debug)]
struct Track {
    window_ns: u64,
    window_waited_ns: u64,
    forced: u32,
    /// Nanoseconds waited in a second, lately.
    pressure: u64,
    /// When its target was set, or its share last fell since then; and its share at that time.
    fallen_ns: u64,
    fallen_share: u64,
    rest_until_ns: u64,
}

impl Track {
    fn new(now_ns: u64, view: &View) -> Track {
        Track {
            window_ns: now_ns,
            window_waited_ns: view.waited_ns,
            forced: view.forced,
            pressure: 0,
            fallen_ns: now_ns,
            fallen_share: view.share,
            rest_until_ns: 0,
        }
    }

    fn update(&mut self, now_ns: u64, view: &View) {
        let passed = now_ns.saturating_sub(self.window_ns);
        if passed >= WINDOW_NS {
            // A new program in the same process has waited less than the one before.
            let waited = view.waited_ns.saturating_sub(self.window_waited_ns);
            let rate = u128::from(waited) * u128::from(SECOND_NS) / u128::from(passed);
            self.pressure = u64::midpoint(self.pressure, u64::try_from(rate).unwrap_or(u64::MAX));
            (self.window_ns, self.window_waited_ns) = (now_ns, view.waited_ns);
        }
        let fallen = self.fallen_share.saturating_sub(view.share);
        if fallen > view.pending() / FALL_SHARE {
            (self.fallen_ns, self.fallen_share) = (now_ns, view.share);
        }
        let is_stuck = view.pending() > 0 && now_ns > self.fallen_ns + REST_NS;
        if view.forced != self.forced || is_stuck {
            self.rest_until_ns = now_ns + REST_NS;
        }
        self.forced = view.forced;
    }
}

/// The present state of the ledger.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub(super) now_ns: u64,
    pub(super) free: i64,
    pub(super) reserve: u64,
    /// What is made free at once for a process that waits, beside the reserve.
    pub(super) room: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Quota {
    tracks: BTreeMap<usize, Track>,
}

impl Quota {
    /// The slot has another owner, or none.
    pub(super) fn forget(&mut self, index: usize) {
        self.tracks.remove(&index);
    }

    /// Changes targets; calls `set` for each that changes.
    pub(super) fn step(
        &mut self,
        state: State,
        views: &[View],
        mut set: impl FnMut(usize, Option<u64>),
    ) {
        for view in views {
            let track = self.tracks.entry(view.index);
            track.or_insert_with(|| Track::new(state.now_ns, view)).update(state.now_ns, view);
        }
        let needy = self.needy(views);
        let pending: u64 = views.iter().map(View::pending).sum();
        let wanted = state.reserve + if needy.is_some() { state.room } else { 0 };
        let short = signed(wanted) - state.free - signed(pending);
        self.lift(state, views, needy, short, &mut set);
        if let Ok(short @ 1..) = u64::try_from(short) {
            let urgent = signed(state.reserve) > state.free + signed(pending);
            self.lower(state, views, needy, (short, urgent), &mut set);
        }
    }

    fn track(&self, view: &View) -> Track {
        self.tracks.get(&view.index).copied().unwrap_or_else(|| Track::new(0, view))
    }

    /// Nanoseconds waited in a second for each MiB.
    fn pressure_per_mib(&self, view: &View) -> u64 {
        self.track(view).pressure / ((view.share >> 20) + 1)
    }

    /// The process that waits most per byte, if any waits much.
    fn needy(&self, views: &[View]) -> Option<View> {
        let waiting = views.iter().filter(|view| self.track(view).pressure > NEED_NS);
        waiting.max_by_key(|view| self.pressure_per_mib(view)).copied()
    }

    /// Drops the targets of processes that waited for as long as they should, and need memory as
    /// much as others.
    fn lift(
        &mut self,
        state: State,
        views: &[View],
        needy: Option<View>,
        short: i64,
        set: &mut impl FnMut(usize, Option<u64>),
    ) {
        for view in views.iter().filter(|view| view.target.is_some()) {
            let track = self.track(view);
            if track.rest_until_ns > state.now_ns && view.pending() > 0 {
                set(view.index, None);
                continue;
            }
            let held = view.pending() == 0 && state.now_ns >= track.fallen_ns + HOLD_NS;
            let is_ample = needy.is_none() && short < -signed(state.room);
            let needs = needy.is_some_and(|needy| {
                self.pressure_per_mib(view) >= self.pressure_per_mib(&needy) / 2
            });
            if held && (is_ample || needs) {
                set(view.index, None);
            }
        }
    }

    /// Lowers targets by `short` bytes in all, as far as processes have something to give. `urgent`:
    /// less than the reserve is free, so a process gives even if it waits as much as the others.
    fn lower(
        &mut self,
        state: State,
        views: &[View],
        needy: Option<View>,
        (mut short, urgent): (u64, bool),
        set: &mut impl FnMut(usize, Option<u64>),
    ) {
        let may_give = |view: &&View| {
            let rests = self.track(view).rest_until_ns > state.now_ns;
            view.watches && view.pending() == 0 && !rests
        };
        let mut givers: Vec<View> = views.iter().filter(may_give).copied().collect();
        let mut lowered = Vec::new();
        let is_needy = |view: &View| needy.is_some_and(|needy| needy.index == view.index);
        givers.sort_by_key(|view| std::cmp::Reverse(view.slack()));
        // The memory is for the one that waits: it gives nothing unless the reserve is lacking.
        let slack = |view: &&View| view.slack() >= view.slack_min() && (urgent || !is_needy(view));
        for view in givers.iter().filter(slack) {
            // A target at its share would only keep the process from growing.
            if short == 0 {
                break;
            }
            let bytes = view.slack().min(short);
            lowered.push((*view, view.share - bytes));
            short -= bytes;
        }
        givers.retain(|view| {
            view.share > SMALL_BYTES && lowered.iter().all(|(other, _)| other.index != view.index)
        });
        givers.sort_by_key(|view| self.pressure_per_mib(view));
        let bound = needy.map_or(0, |needy| self.pressure_per_mib(&needy) / LESS);
        for view in givers {
            let waits_less = !is_needy(&view) && self.pressure_per_mib(&view) <= bound;
            if short == 0 || !(urgent || waits_less) {
                break;
            }
            let is_idle = self.track(&view).pressure < NEED_NS;
            let part = if urgent && is_idle { STEP_SHARE_URGENT } else { STEP_SHARE };
            let step = (view.share / part).max(STEP_BYTES_MIN);
            let bytes = step.min(short.max(STEP_BYTES_MIN)).min(view.share - SMALL_BYTES);
            lowered.push((view, view.share - bytes));
            short = short.saturating_sub(bytes);
        }
        for (view, target) in lowered.into_iter().filter(|(_, target)| *target > 0) {
            if let Some(track) = self.tracks.get_mut(&view.index) {
                (track.fallen_ns, track.fallen_share) = (state.now_ns, view.share);
            }
            set(view.index, Some(target));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NEED_NS, Quota, SECOND_NS, SMALL_BYTES, SMALL_MARGIN_BYTES, State, View, signed};

    const MIB: u64 = 1 << 20;
    const TOTAL: u64 = 256 * MIB;
    const CHUNK: u64 = 4 * MIB;
    const ROOM: u64 = 16 * MIB;

    /// A tree of made-up processes: each waits in proportion to what it lacks, and comes down to
    /// targets at once unless a test says otherwise.
    struct World {
        now_ns: u64,
        reserve: u64,
        quota: Quota,
        /// What each process wants.
        wants: Vec<u64>,
        /// By how much each comes down between two looks.
        falls: Vec<u64>,
        views: Vec<View>,
    }

    impl World {
        fn new(shares: &[u64], wants: &[u64]) -> World {
            let view = |(index, share): (usize, &u64)| View {
                index,
                share: *share,
                target: None,
                charge: *share,
                watches: true,
                reclaims: true,
                waited_ns: 0,
                forced: 0,
            };
            World {
                now_ns: SECOND_NS,
                reserve: 8 * MIB,
                quota: Quota::default(),
                wants: wants.to_vec(),
                falls: vec![u64::MAX; shares.len()],
                views: shares.iter().enumerate().map(view).collect(),
            }
        }

        fn free(&self) -> i64 {
            let shares: u64 = self.views.iter().map(|view| view.share).sum();
            signed(TOTAL) - signed(shares)
        }

        fn look(&mut self) {
            self.now_ns += SECOND_NS / 20;
            let (free, reserve, room) = (self.free(), self.reserve, ROOM);
            let state = State { now_ns: self.now_ns, free, reserve, room };
            let views = self.views.clone();
            let targets = &mut self.views;
            self.quota.step(state, &views, |index, target| targets[index].target = target);
            for at in 0..self.views.len() {
                let spare = u64::try_from(self.free() - signed(self.reserve)).unwrap_or(0);
                let view = &mut self.views[at];
                let target = view.target.unwrap_or(u64::MAX);
                view.share -= view.share.saturating_sub(target).min(self.falls[at]);
                let lacks = self.wants[at].saturating_sub(view.share);
                if lacks > 0 && view.share < target {
                    view.share += spare.min(lacks).min(CHUNK).min(target - view.share);
                }
                view.charge = self.wants[at].min(view.share);
                // All of the time where half is lacking.
                view.waited_ns += SECOND_NS / 20 * 2 * lacks / self.wants[at].max(1);
            }
        }

        fn shares(&self) -> Vec<u64> {
            self.views.iter().map(|view| view.share / MIB).collect()
        }
    }

    #[test]
    fn slack_is_given_first_and_a_reserve_is_kept() {
        let mut world = World::new(&[100 * MIB, 156 * MIB], &[40 * MIB, 156 * MIB]);
        (0..40).for_each(|_| world.look());
        assert!(world.free() >= signed(8 * MIB), "{:?}", world.shares());
        assert!(world.views[1].share >= 150 * MIB, "{:?}", world.shares());
        assert!(world.views[0].share >= 40 * MIB, "{:?}", world.shares());
    }

    /// A regression: when one process had all that was lacking to spare, every other one with slack got a target at its
    /// share, could not grow, and engaged its engine for nothing.
    #[test]
    fn nobody_gets_a_target_once_enough_is_given() {
        let mut world = World::new(&[100 * MIB, 80 * MIB, 72 * MIB], &[40 * MIB; 3]);
        world.views.iter_mut().for_each(|view| view.charge = 40 * MIB);
        world.look();
        let targets: Vec<_> = world.views.iter().map(|view| view.target).collect();
        assert_eq!(targets, [Some(96 * MIB), None, None], "4 of 8 MiB were free");
    }

    #[test]
    fn a_small_process_gives_what_it_does_not_use_and_no_more() {
        let mut world = World::new(&[7 * MIB, 249 * MIB], &[MIB, 400 * MIB]);
        world.views[0].reclaims = false;
        (0..100).for_each(|_| world.look());
        assert_eq!(world.views[0].share, MIB + SMALL_MARGIN_BYTES);
    }

    #[test]
    fn a_process_alone_keeps_what_it_does_not_use_while_it_waits() {
        let mut world = World::new(&[TOTAL], &[2 * TOTAL]);
        world.reserve = 0;
        for _ in 0..100 {
            world.views[0].charge = TOTAL / 2;
            let state = State { now_ns: world.now_ns, free: 0, reserve: 0, room: ROOM };
            world.now_ns += SECOND_NS / 20;
            world.views[0].waited_ns += SECOND_NS / 20;
            let views = world.views.clone();
            world.quota.step(state, &views, |_, target| assert_eq!(target, None));
        }
    }

    /// Goal: a reserve that is lacking is there at the next look, if a process does not wait: forked processes copy
    /// pages faster than a 16th of a share at a time. Method: a reserve that is suddenly large, and two processes that
    /// never wait.
    #[test]
    fn an_idle_process_gives_more_where_the_reserve_is_lacking() {
        let mut world = World::new(&[200 * MIB, 56 * MIB], &[200 * MIB, 56 * MIB]);
        world.reserve = 32 * MIB;
        world.look();
        assert!(world.free() >= signed(32 * MIB), "{:?}", world.shares());
        assert!(world.views[0].share >= 150 * MIB, "{:?}", world.shares());
    }

    #[test]
    fn an_idle_process_gives_way_to_one_that_waits() {
        let mut world = World::new(&[200 * MIB, 48 * MIB], &[200 * MIB, 240 * MIB]);
        // It never touches what it has again, so it never waits.
        for _ in 0..1_000 {
            world.look();
            world.views[0].waited_ns = 0;
        }
        let shares = world.shares();
        assert!(shares[0] <= 16 && shares[0] >= SMALL_BYTES / MIB, "{shares:?}");
        assert!(shares[1] >= 220, "{shares:?}");
    }

    #[test]
    fn processes_that_need_the_same_have_the_same_and_keep_it() {
        let mut world = World::new(&[220 * MIB, 36 * MIB], &[256 * MIB, 256 * MIB]);
        (0..1_000).for_each(|_| world.look());
        let before = world.shares();
        assert!(before[1] >= 60, "{before:?}");
        let mut changes = 0;
        for _ in 0..200 {
            let shares = world.shares();
            world.look();
            changes += usize::from(shares != world.shares());
        }
        assert!(changes < 40, "{changes} changes from {before:?} to {:?}", world.shares());
    }

    /// Two processes after 400 looks, between each two of which the first comes down by so many bytes; the other gives
    /// what is lacking.
    fn where_one_comes_down_by(bytes: u64) -> World {
        let mut world = World::new(&[120 * MIB, 136 * MIB], &[120 * MIB, 136 * MIB]);
        world.falls[0] = bytes;
        (0..400).for_each(|_| world.look());
        assert!(world.free() >= signed(8 * MIB), "the other gives: {:?}", world.shares());
        world
    }

    #[test]
    fn a_process_that_cannot_come_down_is_left_alone() {
        assert_eq!(where_one_comes_down_by(0).shares()[0], 120);
    }

    /// A regression: a process that took more than two seconds to come down lost its target, did nothing for two
    /// seconds, and was only then asked again. Method: a quarter of a share, at 5 MiB in a second.
    #[test]
    fn a_process_that_comes_down_slowly_keeps_its_target() {
        let mut world = World::new(&[200 * MIB, 56 * MIB], &[200 * MIB, 56 * MIB]);
        (world.reserve, world.falls[0]) = (32 * MIB, MIB / 4);
        for look in 1..=4 * 32 {
            world.look();
            world.views[0].waited_ns = 0;
            let target = world.views[0].target;
            assert_eq!(target, Some(168 * MIB), "{look} looks: {:?}", world.shares());
        }
        assert_eq!(world.shares(), [168, 56]);
    }

    /// Goal: who gives next to nothing is one that cannot come down, so the others are asked.
    #[test]
    fn a_process_that_hardly_comes_down_is_left_alone_too() {
        let world = where_one_comes_down_by(256);
        assert!(world.views[0].share > 119 * MIB, "{:?}", world.shares());
    }

    #[test]
    fn nobody_gives_while_enough_is_free() {
        let mut world = World::new(&[100 * MIB, 100 * MIB], &[100 * MIB, 100 * MIB]);
        (0..100).for_each(|_| world.look());
        assert_eq!(world.shares(), [100, 100]);
        assert!(NEED_NS > 0 && world.views.iter().all(|view| view.target.is_none()));
    }
}
