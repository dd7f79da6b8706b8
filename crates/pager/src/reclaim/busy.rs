//! How busy the background thread is: which part of the time that it takes to compress is waited for.
//!
//! The background thread compresses while the program runs on another CPU, and nobody waits for that as
//! long as the thread keeps up and has a CPU. So compression costs
//!
//! - what the background thread cannot do in time, and threads that wait for memory do instead: now, the
//!   share of the units that these reclaim; with more to compress, what the background thread would need
//!   beyond all of its time;
//! - the share of its time that the background thread waits for a CPU: so much the program waits for one
//!   too.
//!
//! Two decisions rest on it: the codec of `auto` (`density.rs`), and what stored copies are worth
//! (`copies.rs`).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zfolio_core::sync::Mutex;

use crate::engine::Engine;
use crate::folio::Table;
use crate::rank;

/// What was done in a span of time.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Done {
    /// How long the span is. In the sum since the start: the time of the last look.
    pub(crate) span_ns: u64,
    /// What the background thread spent on reclaim, and how long it waited for a CPU.
    pub(crate) busy_ns: u64,
    pub(crate) delay_ns: u64,
    /// Units compressed by anyone, and units that went out unchanged.
    pub(crate) compressed: u64,
    pub(crate) clean: u64,
    /// Units reclaimed by the background thread, and by threads that wait.
    pub(crate) background: u64,
    pub(crate) direct: u64,
}

/// Shares are in 256ths.
pub(crate) const ALL: u64 = 256;

/// The time from one look to the next, at least.
const SPAN_NS: u64 = 20_000_000;

/// A span counts only if at least so many units went out in it.
const UNITS_MIN: u64 = 64;

/// What was done lately: the sum of the spans that count. Each new one halves it first.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Lately(Done);

/// All that was done when it was last looked at, and what was done lately.
#[derive(Default, Debug)]
struct Spans {
    all: Done,
    lately: Lately,
}

/// See the module.
#[derive(Default, Debug)]
pub(crate) struct Busy {
    /// What the background thread has spent on reclaim.
    background_ns: AtomicU64,
    /// How long the background thread waited for a CPU while it had nothing to do.
    away_ns: AtomicU64,
    compressed: AtomicU64,
    spans: Mutex<{ rank::BUSY }, Spans>,
}

impl Done {
    fn each(self, other: Done, of: impl Fn(u64, u64) -> u64) -> Done {
        Done {
            span_ns: of(self.span_ns, other.span_ns),
            busy_ns: of(self.busy_ns, other.busy_ns),
            delay_ns: of(self.delay_ns, other.delay_ns),
            compressed: of(self.compressed, other.compressed),
            clean: of(self.clean, other.clean),
            background: of(self.background, other.background),
            direct: of(self.direct, other.direct),
        }
    }
}

impl Spans {
    /// Whether it is time for [`Spans::note`].
    fn is_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.all.span_ns) >= SPAN_NS
    }

    /// Notes all that was done since the start. A span in which little went out says nothing.
    fn note(&mut self, all: Done) {
        let new = all.each(self.all, u64::saturating_sub);
        if new.background + new.direct >= UNITS_MIN {
            self.lately = Lately(self.lately.0.each(new, |lately, new| lately / 2 + new));
        }
        self.all = all;
    }
}

impl Lately {
    /// After one span.
    #[cfg(test)]
    pub(crate) fn one(span: Done) -> Lately {
        Lately(span)
    }

    /// What the background thread spends on a unit that is reclaimed, by whomever.
    pub(crate) fn reclaim_ns(&self) -> u64 {
        self.0.busy_ns / (self.0.background + self.0.direct).max(1)
    }

    /// Which part of the time that compressing with the dense codec takes is waited for, in 256ths. A unit
    /// takes `more_ns` longer with it than with the fast one, and `left` of the last `loads` would remain.
    pub(crate) fn dense_share(
        &self,
        is_dense: bool,
        more_ns: u64,
        (left, loads): (u64, u64),
    ) -> u64 {
        let Done { busy_ns, compressed, .. } = self.0;
        if is_dense {
            return self.waited_share(self.direct_share());
        }
        let more_ns = more_ns * compressed;
        let needed_ns = (busy_ns + more_ns) / loads.max(1) * left;
        self.waited_share(self.late_share(needed_ns, more_ns))
    }

    /// Which part of the time would be waited for that compressing the clean units would take too if they had
    /// no copies, in 256ths. A unit takes `compress_ns`.
    pub(crate) fn clean_share(&self, compress_ns: u64) -> u64 {
        let more_ns = self.0.clean * compress_ns;
        let late = self.late_share(self.0.busy_ns + more_ns, more_ns);
        self.waited_share(late.max(self.direct_share()))
    }

    /// The share that waiting threads reclaim.
    fn direct_share(&self) -> u64 {
        ALL * self.0.direct / (self.0.background + self.0.direct).max(1)
    }

    /// If the background thread needed so much time, which part of the last `more_ns` of it would be late.
    fn late_share(&self, needed_ns: u64, more_ns: u64) -> u64 {
        ALL * needed_ns.saturating_sub(self.0.span_ns) / more_ns.max(1)
    }

    /// The share that is waited for if so much of it is `late`. As long as nothing is known, that is all.
    fn waited_share(&self, late: u64) -> u64 {
        let Done { span_ns, busy_ns, delay_ns, .. } = self.0;
        if span_ns == 0 {
            return ALL;
        }
        let delayed = ALL * delay_ns / (busy_ns + delay_ns).max(1);
        late.max(delayed).min(ALL)
    }
}

impl Busy {
    /// Notes that the background thread spent so much on reclaim.
    pub(super) fn note_background(&self, took_ns: u64) {
        self.background_ns.fetch_add(took_ns, Relaxed);
    }

    /// Notes that the background thread waited for a CPU, and had nothing to do.
    pub(super) fn note_away(&self, away_ns: u64) {
        self.away_ns.fetch_add(away_ns, Relaxed);
    }

    /// Notes that `more` units were compressed. Returns how many that makes since the start.
    pub(crate) fn note_compressed(&self, more: usize) -> u64 {
        self.compressed.fetch_add(more as u64, Relaxed) + more as u64
    }

    pub(crate) fn lately(&self) -> Lately {
        self.spans.lock().lately
    }
}

impl Engine {
    /// Notes from time to time what was done, for the decisions to come. Called by the background thread.
    ///
    /// The table's guard proves that no fork is under way (`ENG-4`).
    pub(super) fn note_done(&self, _table: &Table) {
        let busy = &self.work.reclaimer.busy;
        let now_ns = self.now_ns();
        if !busy.spans.lock().is_due(now_ns) {
            return;
        }
        // The kernel counts both: waits with work to do, and waits while the thread only polled.
        let away_ns = busy.away_ns.load(Relaxed);
        let delay_ns = self.mover.system.run_delay_ns().saturating_sub(away_ns);
        let figures = self.figures();
        let all = Done {
            span_ns: now_ns,
            busy_ns: busy.background_ns.load(Relaxed),
            delay_ns,
            compressed: busy.compressed.load(Relaxed),
            clean: figures.reclaim_clean.load(Relaxed),
            background: figures.reclaim_background.load(Relaxed),
            direct: figures.reclaim_direct.load(Relaxed),
        };
        busy.spans.lock().note(all);
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, Done, Lately, SPAN_NS, Spans};

    const MS: u64 = 1_000_000;

    /// 100 ms in which 1000 units went out, all of them compressed.
    fn done(busy_ms: u64, delay_ms: u64, direct: u64) -> Done {
        Done {
            span_ns: 100 * MS,
            busy_ns: busy_ms * MS,
            delay_ns: delay_ms * MS,
            compressed: 1000,
            background: 1000 - direct,
            direct,
            ..Done::default()
        }
    }

    /// Goal: compression costs nothing while the background thread keeps up, by figures that can be checked by
    /// hand.
    #[test]
    fn what_the_background_thread_has_time_for_costs_nothing() {
        // The dense codec takes 20 us longer, so 20 ms for all units.
        let share = |done, left| Lately(done).dense_share(false, 20_000, (left, 10));
        assert_eq!(share(done(70, 0, 0), 10), 0, "90 of 100 ms");
        assert_eq!(
            share(done(90, 0, 0), 10),
            ALL / 2,
            "110 of 100 ms: half of what is more is late"
        );
        assert_eq!(share(done(100, 0, 0), 10), ALL, "all of what is more is late");
        assert_eq!(share(done(90, 0, 0), 9), 0, "with a tenth less to do it is 99 of 100 ms");
        assert_eq!(share(done(70, 70, 0), 10), ALL / 2, "it waits for a CPU for half of its time");
    }

    /// Goal: copies save what would be late without them, by figures that can be checked by hand.
    #[test]
    fn copies_save_what_would_be_late() {
        // 1000 more units of 20 us: 20 ms.
        let share = |done| Lately(Done { clean: 1000, ..done }).clean_share(20_000);
        assert_eq!(share(done(70, 0, 0)), 0, "90 of 100 ms");
        assert_eq!(share(done(90, 0, 0)), ALL / 2, "110 of 100 ms: half of what is more is late");
        assert_eq!(share(done(100, 0, 0)), ALL, "all of what is more is late");
        assert_eq!(share(done(70, 70, 0)), ALL / 2, "it waits for a CPU for half of its time");
        assert_eq!(share(done(70, 0, 250)), ALL / 4, "waiting threads reclaim a quarter");
        assert_eq!(Lately::default().clean_share(20_000), ALL, "nothing is known");
    }

    /// Goal: with the dense codec in use, what waiting threads reclaim is late.
    #[test]
    fn what_others_reclaim_is_late() {
        let share = |done| Lately(done).dense_share(true, 20_000, (10, 10));
        assert_eq!(share(done(100, 0, 0)), 0);
        assert_eq!(share(done(100, 0, 250)), ALL / 4);
        assert_eq!(share(done(100, 300, 250)), ALL * 3 / 4);
    }

    /// Goal: as long as nothing is known, all is waited for; spans in which little goes out change nothing; old
    /// ones are forgotten.
    #[test]
    fn the_latest_spans_count() {
        let mut spans = Spans::default();
        assert_eq!(spans.lately.dense_share(true, 20_000, (10, 10)), ALL);
        let mut all = done(100, 0, 1000);
        spans.note(all);
        let mut more = |of: Done, times| {
            for _ in 0..times {
                all = all.each(of, |all, of| all + of);
                spans.note(all);
            }
            spans.lately.dense_share(true, 20_000, (10, 10))
        };
        assert_eq!(more(Done { background: 10, ..Done::default() }, 100), ALL);
        assert_eq!(more(done(100, 0, 0), 1), ALL / 3, "1000 of 3000: half of the first counts");
        assert!(more(done(100, 0, 0), 10) < 2);
        assert!(!spans.is_due(all.span_ns + SPAN_NS - 1) && spans.is_due(all.span_ns + SPAN_NS));
    }
}
