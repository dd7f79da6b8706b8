//! How busy the background thread is: which part of the time that the dense codec takes to compress is
//! waited for.
//!
//! The background thread compresses while the program runs on another CPU, and nobody waits for that as
//! long as the thread keeps up and has a CPU. So compression costs
//!
//! - what the background thread cannot do in time, and threads that wait for memory do instead: with the
//!   dense codec in use, the share of the units that these reclaim; with the fast one, what the
//!   background thread would need beyond all of its time;
//! - the share of its time that the background thread waits for a CPU: so much the program waits for one
//!   too.

/// What was done in a span of time.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Done {
    /// How long the span is. In the sum since the start: the time of the last look.
    pub(super) span_ns: u64,
    /// What the background thread spent on reclaim, and how long it waited for a CPU.
    pub(super) busy_ns: u64,
    pub(super) delay_ns: u64,
    /// Units compressed by anyone.
    pub(super) compressed: u64,
    /// Units reclaimed by the background thread, and by threads that wait.
    pub(super) background: u64,
    pub(super) direct: u64,
}

/// Shares are in 256ths.
pub(super) const ALL: u64 = 256;

/// The time from one look to the next, at least.
const SPAN_NS: u64 = 20_000_000;

/// A span counts only if at least so many units went out in it.
const UNITS_MIN: u64 = 64;

/// What was done lately.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Busy {
    /// All that was done, when it was last looked at.
    all: Done,
    /// The sum of the spans that count; each new one halves it first.
    lately: Done,
}

impl Done {
    fn each(self, other: Done, of: impl Fn(u64, u64) -> u64) -> Done {
        Done {
            span_ns: of(self.span_ns, other.span_ns),
            busy_ns: of(self.busy_ns, other.busy_ns),
            delay_ns: of(self.delay_ns, other.delay_ns),
            compressed: of(self.compressed, other.compressed),
            background: of(self.background, other.background),
            direct: of(self.direct, other.direct),
        }
    }
}

impl Busy {
    /// Whether it is time for [`Busy::note`].
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.all.span_ns) >= SPAN_NS
    }

    /// Notes all that was done since the start. A span in which little went out says nothing.
    pub(super) fn note(&mut self, all: Done) {
        let new = all.each(self.all, u64::saturating_sub);
        if new.background + new.direct >= UNITS_MIN {
            self.lately = self.lately.each(new, |lately, new| lately / 2 + new);
        }
        self.all = all;
    }

    /// Which part of the time that compressing with the dense codec takes is waited for, in 256ths. A unit
    /// takes `more_ns` longer with it than with the fast one, and `left` of the last `loads` would remain.
    pub(super) fn waited_share(
        &self,
        is_dense: bool,
        more_ns: u64,
        (left, loads): (u64, u64),
    ) -> u64 {
        let Done { span_ns, busy_ns, delay_ns, compressed, background, direct } = self.lately;
        if span_ns == 0 {
            return ALL;
        }
        let late = if is_dense {
            ALL * direct / (background + direct).max(1)
        } else {
            let more_ns = more_ns * compressed;
            let needed = (busy_ns + more_ns) / loads.max(1) * left;
            ALL * needed.saturating_sub(span_ns) / more_ns.max(1)
        };
        let delayed = ALL * delay_ns / (busy_ns + delay_ns).max(1);
        late.max(delayed).min(ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, Busy, Done, SPAN_NS};

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
        }
    }

    fn after(done: Done) -> Busy {
        let mut busy = Busy::default();
        busy.note(done);
        busy
    }

    /// Goal: compression costs nothing while the background thread keeps up, by figures that can be checked by
    /// hand.
    #[test]
    fn what_the_background_thread_has_time_for_costs_nothing() {
        // The dense codec takes 20 us longer, so 20 ms for all units.
        let share = |done, left| after(done).waited_share(false, 20_000, (left, 10));
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

    /// Goal: with the dense codec in use, what waiting threads reclaim is late.
    #[test]
    fn what_others_reclaim_is_late() {
        let share = |done| after(done).waited_share(true, 20_000, (10, 10));
        assert_eq!(share(done(100, 0, 0)), 0);
        assert_eq!(share(done(100, 0, 250)), ALL / 4);
        assert_eq!(share(done(100, 300, 250)), ALL * 3 / 4);
    }

    /// Goal: as long as nothing is known, all is waited for; spans in which little goes out change nothing; old
    /// ones are forgotten.
    #[test]
    fn the_latest_spans_count() {
        let mut busy = Busy::default();
        assert_eq!(busy.waited_share(true, 20_000, (10, 10)), ALL);
        let mut all = done(100, 0, 1000);
        busy.note(all);
        let mut more = |of: Done, spans| {
            for _ in 0..spans {
                all = all.each(of, |all, of| all + of);
                busy.note(all);
            }
            busy.waited_share(true, 20_000, (10, 10))
        };
        assert_eq!(more(Done { background: 10, ..Done::default() }, 100), ALL);
        assert_eq!(more(done(100, 0, 0), 1), ALL / 3, "1000 of 3000: half of the first counts");
        assert!(more(done(100, 0, 0), 10) < 2);
        assert!(!busy.is_due(all.span_ns + SPAN_NS - 1) && busy.is_due(all.span_ns + SPAN_NS));
    }
}
