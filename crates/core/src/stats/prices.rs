//! Prices: what a MiB of each use of memory saves.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::economy::Use;

const USES: usize = Use::ALL.len();

/// The prices of one engine, in a layout that another process may read. All zeros: nothing is known.
#[repr(C)]
#[derive(Default)]
pub struct Prices {
    rows: [Row; USES],
}

#[repr(C)]
#[derive(Default)]
struct Row {
    bytes: AtomicU64,
    /// 1 while `price_ns` is known.
    is_known: AtomicU64,
    price_ns: AtomicI64,
    /// 1 once `price_ns` was known.
    was_known: AtomicU64,
    total_ns: AtomicI64,
}

/// What a MiB of a use saves. A negative number: it costs time.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Price {
    /// The memory that the use has now.
    pub bytes: u64,
    /// What the program waits less, in nanoseconds for each second of its time. `None`: it is not known,
    /// because the use has no memory, or because nothing was measured yet.
    pub price_ns: Option<i64>,
    /// What it waited less since the start, in nanoseconds. `None`: nothing was measured.
    pub total_ns: Option<i64>,
}

impl Prices {
    /// Sets how much memory a use has; and, if they are known, its price and what a MiB saved since the last
    /// call.
    pub fn set(&self, of: Use, bytes: u64, price: Option<(i64, i64)>) {
        let row = &self.rows[of as usize];
        row.bytes.store(bytes, Relaxed);
        row.is_known.store(price.is_some().into(), Relaxed);
        if let Some((price_ns, added_ns)) = price {
            row.price_ns.store(price_ns, Relaxed);
            row.total_ns.fetch_add(added_ns, Relaxed);
            row.was_known.store(1, Relaxed);
        }
    }

    /// The price of a use.
    #[must_use]
    pub fn of(&self, of: Use) -> Price {
        let row = &self.rows[of as usize];
        let value = |known: &AtomicU64, value: &AtomicI64| {
            (known.load(Relaxed) != 0).then(|| value.load(Relaxed))
        };
        Price {
            bytes: row.bytes.load(Relaxed),
            price_ns: value(&row.is_known, &row.price_ns),
            total_ns: value(&row.was_known, &row.total_ns),
        }
    }

    /// All uses with their prices.
    pub fn each(&self) -> impl Iterator<Item = (Use, Price)> {
        Use::ALL.into_iter().map(|of| (of, self.of(of)))
    }
}

/// Prints only what is known.
impl fmt::Debug for Prices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.each().filter(|(_, price)| price.total_ns.is_some());
        f.debug_map().entries(known.map(|(of, price)| (of.name(), price))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Price, Prices};
    use crate::economy::Use;

    /// Goal: what is not known is not a number, and what was known once has a sum.
    #[test]
    fn what_is_not_known_is_no_number() {
        let prices = Prices::default();
        assert!(prices.each().all(|(_, price)| price == Price::default()));
        prices.set(Use::Staging, 5, None);
        assert_eq!(prices.of(Use::Staging), Price { bytes: 5, price_ns: None, total_ns: None });
        prices.set(Use::Staging, 6, Some((-70, 10)));
        prices.set(Use::Staging, 7, Some((80, 20)));
        let known = Price { bytes: 7, price_ns: Some(80), total_ns: Some(30) };
        assert_eq!(prices.of(Use::Staging), known);
        prices.set(Use::Staging, 0, None);
        let over = Price { bytes: 0, price_ns: None, total_ns: Some(30) };
        assert_eq!(prices.of(Use::Staging), over);
        assert_eq!(prices.of(Use::Resident), Price::default(), "each has a row of its own");
        let text = format!("{prices:?}");
        assert!(text.contains("staging") && !text.contains("resident"), "{text}");
    }
}
