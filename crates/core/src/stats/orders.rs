//! Runs of slots that writes to disk took, by size, in a layout that another process may map and read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::swap::slots::ORDERS;

/// The sizes of runs of 2^order slots of 4 KiB, in the words of `/sys/kernel/mm/transparent_hugepage/hugepages-*kB`.
const SIZES: [&str; ORDERS] =
    ["4kB", "8kB", "16kB", "32kB", "64kB", "128kB", "256kB", "512kB", "1024kB", "2048kB"];

/// The runs of one engine, by order.
#[repr(C)]
#[derive(Default, Debug)]
pub struct Orders {
    swpout: [AtomicU64; ORDERS],
    swpout_fallback: [AtomicU64; ORDERS],
}

/// The runs of one order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OrderCounts {
    /// The size of a run: `64kB`.
    pub size: &'static str,
    /// Runs that were taken.
    pub swpout: u64,
    /// Runs for which there was no room, so that a smaller one was tried.
    pub swpout_fallback: u64,
}

impl OrderCounts {
    /// Nothing was counted.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.swpout == 0 && self.swpout_fallback == 0
    }
}

impl Orders {
    /// Sets all counts.
    pub fn set(&self, swpout: &[u64; ORDERS], swpout_fallback: &[u64; ORDERS]) {
        let set = |counters: &[AtomicU64; ORDERS], values: &[u64; ORDERS]| {
            counters.iter().zip(values).for_each(|(counter, value)| counter.store(*value, Relaxed));
        };
        set(&self.swpout, swpout);
        set(&self.swpout_fallback, swpout_fallback);
    }

    /// The counts of each order, the smallest first.
    #[must_use]
    pub fn counts(&self) -> [OrderCounts; ORDERS] {
        std::array::from_fn(|order| OrderCounts {
            size: SIZES[order],
            swpout: self.swpout[order].load(Relaxed),
            swpout_fallback: self.swpout_fallback[order].load(Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{OrderCounts, Orders, SIZES};

    #[test]
    fn sizes_are_those_of_the_orders() {
        for (order, size) in SIZES.iter().enumerate() {
            assert_eq!(*size, format!("{}kB", 4 << order));
        }
    }

    #[test]
    fn counts_are_those_that_were_set() {
        let orders = Orders::default();
        assert!(orders.counts().iter().all(OrderCounts::is_zero));
        orders.set(&[1, 0, 0, 0, 0, 9, 0, 0, 0, 0], &[0, 0, 0, 0, 2, 5, 0, 0, 0, 0]);
        let counts = orders.counts().into_iter().filter(|counts| !counts.is_zero());
        let counts = counts.map(|counts| (counts.size, counts.swpout, counts.swpout_fallback));
        assert_eq!(counts.collect::<Vec<_>>(), [("4kB", 1, 0), ("64kB", 0, 2), ("128kB", 9, 5)]);
    }
}
