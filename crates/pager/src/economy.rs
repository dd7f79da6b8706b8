//! The prices of memory: what a MiB of each of its uses saves the program, measured while it runs.
//!
//! The background thread looks four times a second at what the controllers have measured, and sets the
//! prices that `zfolio stat` shows. A price is the time that a MiB of the use saves, in nanoseconds for each
//! second of the program's time:
//!
//! ```text
//! resident     near refaults * (time waited for one + time to reclaim a unit) / WINDOW
//! copies       clean units * time to compress one * share waited for          / bytes of copies
//! staging      rescues * (time of a stored fault - time of a staged one)      / bytes of the staging area
//! prefetch     units used * time of a stored fault                            / bytes of open windows
//! dense codec  (loads saved - time that it takes)                             / bytes that the pool takes less
//! disk         - time that faults waited for reads                            / bytes on the disk
//! ```
//!
//! The first two are what `copies.rs` compares, the last is what `density.rs` compares. These three are known
//! for the last 2000 loads or so, and are scaled to the loads of the span between two looks. A **rescue** is
//! a fault that was served from the staging area. For the prefetch both numbers are estimates, since nobody
//! sees which resident unit is touched: the units used are those that a walk has passed
//! (`prefetch/streams.rs`), and what was brought ahead and not yet used is all that the windows of the streams
//! hold beyond the last fault of each. What is on the disk takes no memory; its price, which is never above 0, is to be
//! compared with that of resident memory, which has the MiB instead.
//!
//! The price of resident memory is that of one more MiB. The others are means over the bytes of the use, so
//! that one more MiB would save less. Half of a price is from the last look. A use that has no bytes, or of
//! which nothing was measured, has no price.
//!
//! # Invariants
//!
//! - `PRICE-1` The fault path reads no clock for the prices, and takes no lock.
//!
//! # Concurrency
//!
//! One mutex around what the last look saw, for the background thread. What it reads are counters that
//! others raise meanwhile.
//!
//! # Cost
//!
//! A look reads two histograms of 256 words, and takes the locks of samples and streams once: about 2 us.

#[cfg(test)]
mod replay;

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::economy::{Use, Worth};
use zfolio_core::ledger::signed;
use zfolio_core::stats::{Histogram, Prices};
use zfolio_core::sync::Mutex;

use crate::copies::Account;
use crate::engine::Engine;
use crate::folio::Table;
use crate::rank;

/// The time between two looks, at least.
const LOOK_NS: u64 = 250_000_000;

/// Prices are for so many bytes, and for so much time.
const MIB: i64 = 1 << 20;
const SECOND_NS: i64 = 1_000_000_000;

/// What a use saved, less what it cost, with so many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Balance {
    saved_ns: i64,
    bytes: u64,
}

/// `value * part / whole`, without a loss in between.
fn scaled(value: i64, part: i64, whole: i64) -> i64 {
    let scaled = i128::from(value) * i128::from(part) / i128::from(whole.max(1));
    i64::try_from(scaled).unwrap_or(if scaled < 0 { i64::MIN } else { i64::MAX })
}

impl Balance {
    /// What a MiB saved. `None`: there are no bytes.
    fn per_mib(self) -> Option<i64> {
        (self.bytes > 0).then(|| scaled(self.saved_ns, MIB, signed(self.bytes)))
    }
}

/// Sums that only rise, at a moment.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    now_ns: u64,
    loads: u64,
    rescues: u64,
    /// Units that the prefetch brought in and a walk used.
    prefetched: u64,
    /// How long threads have waited for the disk.
    disk_ns: u64,
}

/// What a look finds.
#[derive(Clone, Copy, Debug)]
struct Seen {
    counts: Counts,
    /// How long a stored and a staged fault take. `None`: there was none.
    stored_ns: Option<u64>,
    staged_ns: Option<u64>,
    account: Account,
    /// What the dense codec saves with the loads of the account, and the bytes that it takes less.
    dense: Option<(i64, u64)>,
    resident_bytes: u64,
    staged_bytes: u64,
    ahead_bytes: u64,
    disk_bytes: u64,
}

/// What a use saved lately, and in how much time: each span halves what was before.
#[derive(Clone, Copy, Default, Debug)]
struct Lately {
    saved_ns: i64,
    span_ns: i64,
}

/// What the last look saw.
#[derive(Default, Debug)]
struct Meter {
    last: Counts,
    lately: [Lately; Use::ALL.len()],
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Economy(Mutex<{ rank::PRICES }, Meter>);

impl Economy {
    pub(crate) fn new() -> Economy {
        Economy(Mutex::new(Meter::default()))
    }
}

impl Meter {
    fn is_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.last.now_ns) >= LOOK_NS
    }

    /// Sets all prices. The first look only notes the counts.
    fn look(&mut self, seen: &Seen, prices: &Prices) {
        let (now, last) = (seen.counts, self.last);
        if last.now_ns > 0 {
            for of in Use::ALL {
                let (has_bytes, balance) = seen.balance(of, last);
                let span_ns = signed(now.now_ns.saturating_sub(last.now_ns));
                let price = balance.and_then(Balance::per_mib);
                let price = self.lately[of as usize].add(price, span_ns);
                prices.set(of, has_bytes, price);
            }
        }
        self.last = now;
    }
}

impl Lately {
    /// Adds what a MiB saved in a span. Returns the price, and what was added.
    fn add(&mut self, saved_ns: Option<i64>, span_ns: i64) -> Option<(i64, i64)> {
        let Some(saved_ns) = saved_ns else {
            *self = Lately::default();
            return None;
        };
        self.saved_ns = (self.saved_ns / 2).saturating_add(saved_ns);
        self.span_ns = self.span_ns / 2 + span_ns;
        Some((scaled(self.saved_ns, SECOND_NS, self.span_ns), saved_ns))
    }
}

impl Seen {
    /// The memory that a use has now, and what it saved since the last look with how many bytes. `None`:
    /// nothing was measured.
    fn balance(&self, of: Use, last: Counts) -> (u64, Option<Balance>) {
        let account = &self.account;
        let loads = self.counts.loads.saturating_sub(last.loads);
        let of_loads = |saved_ns, bytes| {
            let of = account.span.loads;
            let saved_ns = scaled(saved_ns, signed(loads), signed(of));
            (of > 0).then_some(Balance { saved_ns, bytes })
        };
        let of_worth = |worth: Worth| of_loads(signed(worth.saved_ns), worth.bytes);
        match of {
            Use::Resident => (self.resident_bytes, of_worth(account.resident)),
            Use::Copies => (account.copies_bytes, of_worth(account.copies)),
            Use::Staging => {
                let rescues = self.counts.rescues.saturating_sub(last.rescues);
                (self.staged_bytes, self.rescued(rescues))
            }
            Use::Prefetch => {
                let used = self.counts.prefetched.saturating_sub(last.prefetched);
                (self.ahead_bytes, self.prefetched(used))
            }
            Use::DenseCodec => {
                let bytes = self.dense.map_or(0, |(_, bytes)| bytes);
                (bytes, self.dense.and_then(|(saved_ns, bytes)| of_loads(saved_ns, bytes)))
            }
            Use::Disk => {
                let waited_ns = signed(self.counts.disk_ns.saturating_sub(last.disk_ns));
                let balance = Balance { saved_ns: -waited_ns, bytes: self.disk_bytes };
                (self.disk_bytes, Some(balance))
            }
        }
    }

    /// What so many faults saved that were served from the staging area.
    fn rescued(&self, rescues: u64) -> Option<Balance> {
        let saved_ns = match rescues {
            0 => 0,
            _ => rescues.saturating_mul(self.stored_ns?.saturating_sub(self.staged_ns?)),
        };
        Some(Balance { saved_ns: signed(saved_ns), bytes: self.staged_bytes })
    }

    /// What so many units saved that were there before they were touched.
    fn prefetched(&self, used: u64) -> Option<Balance> {
        let saved_ns = if used == 0 { 0 } else { used.saturating_mul(self.stored_ns?) };
        Some(Balance { saved_ns: signed(saved_ns), bytes: self.ahead_bytes })
    }
}

impl Engine {
    /// Sets the prices, four times a second. Called by the background thread.
    ///
    /// The table's guard proves that no fork is under way (`ENG-4`).
    pub(crate) fn set_prices(&self, _table: &Table) {
        let Economy(meter) = &self.work.economy;
        let now_ns = self.now_ns();
        if !meter.lock().is_due(now_ns) {
            return;
        }
        let (account, loads) = self.account();
        let (prefetched, ahead_bytes) = self.prefetched();
        let stats = self.stats();
        let rescues = stats.figures.faults_staged.load(Relaxed);
        let disk_ns = stats.figures.stall_spill_ns.load(Relaxed);
        let mean = |times: &Histogram| times.sum().checked_div(times.count());
        let seen = Seen {
            counts: Counts { now_ns, loads, rescues, prefetched, disk_ns },
            stored_ns: stats.refault_ns(),
            staged_ns: mean(&stats.fault_staged_ns),
            dense: self.dense_balance(&account.span),
            account,
            resident_bytes: stats.figures.resident_bytes.load(Relaxed),
            staged_bytes: stats.figures.staged_bytes.load(Relaxed),
            ahead_bytes,
            disk_bytes: self.store.spill_stats().bytes,
        };
        meter.lock().look(&seen, &stats.prices);
        self.look_at_cold();
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::economy::{Use, Worth};
    use zfolio_core::stats::{Price, Prices};

    use super::{Counts, LOOK_NS, Lately, MIB, Meter, SECOND_NS, Seen};
    use crate::copies::{Account, Span};

    const MIB_BYTES: u64 = 1 << 20;

    /// 2000 loads in which 2 MiB more of resident memory would have saved 30 ms, 1 MiB of copies saved 5 ms,
    /// and the dense codec would have taken 4 MiB less and 8 ms more. A stored fault takes 50 us, a staged
    /// one 10.
    fn seen(now_ns: u64, loads: u64) -> Seen {
        let lately = crate::reclaim::busy::Lately::default();
        let span =
            Span { loads: 2000, saved: 0, together: 0, compressed: 0, refault_ns: 0, lately };
        let account = Account {
            resident: Worth { saved_ns: 30_000_000, bytes: 2 * MIB_BYTES },
            copies: Worth { saved_ns: 5_000_000, bytes: MIB_BYTES },
            copies_bytes: 3 * MIB_BYTES,
            span,
        };
        Seen {
            counts: Counts { now_ns, loads, ..Counts::default() },
            stored_ns: Some(50_000),
            staged_ns: Some(10_000),
            account,
            dense: Some((-8_000_000, 4 * MIB_BYTES)),
            resident_bytes: 32 * MIB_BYTES,
            staged_bytes: MIB_BYTES / 2,
            ahead_bytes: MIB_BYTES / 4,
            disk_bytes: 8 * MIB_BYTES,
        }
    }

    /// The prices after a second with so many loads, rescues and units used, in which each load waited for 1 us for the
    /// disk.
    fn after_a_second(loads: u64, rescues: u64, prefetched: u64) -> Prices {
        let (mut meter, prices) = (Meter::default(), Prices::default());
        meter.look(&seen(1, 0), &prices);
        let mut then = seen(1 + 1_000_000_000, loads);
        then.counts = Counts { rescues, prefetched, disk_ns: loads * 1000, ..then.counts };
        meter.look(&then, &prices);
        prices
    }

    fn known(bytes: u64, price_ns: i64) -> Price {
        Price { bytes, price_ns: Some(price_ns), total_ns: Some(price_ns) }
    }

    /// Goal: prices are what can be computed by hand. Method: one second with 4000 loads, twice what the
    /// account covers.
    #[test]
    fn a_price_is_what_a_mib_saves_in_a_second() {
        let prices = after_a_second(4000, 100, 10);
        let us = |us: i64| us * 1000;
        // 30 ms in 2000 loads by 2 MiB: 15 ms by one, so 30 in 4000 loads.
        assert_eq!(prices.of(Use::Resident), known(32 * MIB_BYTES, us(30_000)));
        assert_eq!(prices.of(Use::Copies), known(3 * MIB_BYTES, us(10_000)));
        // 100 times 40 us, by half a MiB.
        assert_eq!(prices.of(Use::Staging), known(MIB_BYTES / 2, us(8_000)));
        // 10 times 50 us, by a quarter of a MiB.
        assert_eq!(prices.of(Use::Prefetch), known(MIB_BYTES / 4, us(2_000)));
        assert_eq!(prices.of(Use::DenseCodec), known(4 * MIB_BYTES, us(-4_000)));
        // 4 ms, by 8 MiB.
        assert_eq!(prices.of(Use::Disk), known(8 * MIB_BYTES, us(-500)));
    }

    /// Goal: a program that does not fault would save nothing, which is known.
    #[test]
    fn without_loads_more_memory_saves_nothing() {
        let prices = after_a_second(0, 0, 0);
        assert!(prices.each().all(|(_, price)| price.price_ns == Some(0)), "{prices:?}");
    }

    /// Goal: no price is invented: not without bytes, not without a measurement, and not before there are two
    /// looks.
    #[test]
    fn what_was_not_measured_has_no_price() {
        let unknown = |change: fn(&mut Seen)| {
            let (mut meter, prices) = (Meter::default(), Prices::default());
            let mut first = seen(1, 0);
            change(&mut first);
            meter.look(&first, &prices);
            assert!(prices.each().all(|(_, price)| price == Price::default()), "one look");
            let mut then = Seen { counts: Counts { now_ns: 1 + LOOK_NS, ..first.counts }, ..first };
            then.counts.rescues += 1;
            then.counts.prefetched += 1;
            meter.look(&then, &prices);
            let unknown = prices.each().filter(|(_, price)| price.price_ns.is_none());
            unknown.map(|(of, _)| of).collect::<Vec<_>>()
        };
        assert_eq!(unknown(|_| ()), []);
        let of_loads = [Use::Resident, Use::Copies, Use::DenseCodec];
        assert_eq!(unknown(|seen| seen.account.span.loads = 0), of_loads);
        assert_eq!(unknown(|seen| seen.account.copies.bytes = 0), [Use::Copies]);
        assert_eq!(unknown(|seen| seen.dense = None), [Use::DenseCodec]);
        assert_eq!(unknown(|seen| seen.dense = Some((5, 0))), [Use::DenseCodec]);
        assert_eq!(unknown(|seen| seen.staged_bytes = 0), [Use::Staging]);
        assert_eq!(unknown(|seen| seen.ahead_bytes = 0), [Use::Prefetch]);
        assert_eq!(unknown(|seen| seen.disk_bytes = 0), [Use::Disk]);
        assert_eq!(unknown(|seen| seen.staged_ns = None), [Use::Staging]);
        assert_eq!(unknown(|seen| seen.stored_ns = None), [Use::Staging, Use::Prefetch]);
    }

    /// Goal: the price follows what happens now, and the sum does not forget.
    #[test]
    fn a_price_is_half_from_the_last_look() {
        let mut lately = Lately::default();
        let second = |saved_ns| (Some(saved_ns), SECOND_NS);
        let mut add = |(saved_ns, span_ns)| lately.add(saved_ns, span_ns);
        assert_eq!(add(second(600)), Some((600, 600)));
        assert_eq!(add(second(0)), Some((200, 0)), "300 in a second and a half");
        for _ in 0..20 {
            add(second(0));
        }
        assert_eq!(add(second(0)), Some((0, 0)));
        assert_eq!(add((None, SECOND_NS)), None);
        assert_eq!(add(second(-7)), Some((-7, -7)), "what was before is forgotten");
    }

    /// Goal: extreme numbers give extreme prices, and no wrong ones.
    #[test]
    fn extreme_numbers_do_not_wrap() {
        let (mut meter, prices) = (Meter::default(), Prices::default());
        meter.look(&seen(1, 0), &prices);
        let mut far = seen(u64::MAX, u64::MAX);
        far.counts =
            Counts { rescues: u64::MAX, prefetched: u64::MAX, disk_ns: u64::MAX, ..far.counts };
        far.account.resident = Worth { saved_ns: u64::MAX, bytes: 1 };
        far.dense = Some((i64::MIN, 1));
        meter.look(&far, &prices);
        far.counts.now_ns = u64::MAX;
        meter.look(&far, &prices);
        assert!(prices.each().all(|(_, price)| price.total_ns.is_some()), "{prices:?}");
        assert_eq!(prices.of(Use::DenseCodec).total_ns.map(|total| total < 0), Some(true));
        assert_eq!(MIB.unsigned_abs(), MIB_BYTES);
    }
}
