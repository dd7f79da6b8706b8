//! The work queues that there are, and which of them each CPU uses.
//!
//! The way to a queue has no lock: a CPU's row has a bit for each queue that it may use, and a cursor; each queue has
//! one word in which its jobs are counted, and which says whether it is open. Who has counted himself has a
//! **ticket**. A queue with a ticket out is not taken away.
//!
//! # Invariants
//!
//! - `QUEUE-1` The portal of a cell is written only while the cell is neither open nor has a ticket out, by who holds
//!   `control`.
//! - `QUEUE-2` A ticket is given out only by a cell that is open, and at most `depth` at a time: a dedicated queue does
//!   not say when it is full.
//!
//! # Concurrency
//!
//! `state` of a cell: bit 63 open, bit 62 gone (`Fate::IsGone`), bits 32 to 61 the depth, bits 0 to 31 the count. Who
//! wants a ticket adds one, and takes it back if the word was closed or full; so the count of a closed cell may be
//! above zero for a moment, and only `control` opens a cell. A cell is never open and gone. `make loom` tries every
//! order.

use std::fmt;
// Not loom's: a figure means nothing to any other word, and each would multiply the orders of steps.
use std::sync::atomic::AtomicU64 as Figure;
#[cfg(not(all(test, feature = "loom")))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(all(test, feature = "loom"))]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zfolio_core::sync::Mutex;

use crate::portal::Portal;
use crate::stats::{Count, WQ_COUNTS, Wq};
use shared::Shared;

/// The most queues: one bit each of a word.
pub const QUEUES_MAX: usize = 64;

/// Rank of the lock that is held while queues come and go, and while their figures are read. It may be taken under that
/// of the placement. Who submits a job takes neither.
pub const RANK_CONTROL: u8 = 42;

const OPEN: u64 = 1 << 63;
const GONE: u64 = 1 << 62;
const DEPTH_SHIFT: u32 = 32;
const DEPTH_MAX: u64 = (1 << 30) - 1;
const COUNT: u64 = (1 << DEPTH_SHIFT) - 1;

const _: () = assert!((DEPTH_MAX << DEPTH_SHIFT) & (OPEN | GONE | COUNT) == 0);

/// What a queue is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Compression.
    Compress,
    /// Decompression.
    Decompress,
}

/// A queue and what it is called.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) name: String,
    pub(crate) device: usize,
    pub(crate) package: usize,
    pub(crate) portal: Box<dyn Portal>,
}

impl Queue {
    /// Its number among those of its device, from its name: 3 of `wq1.3`.
    fn number(&self) -> usize {
        let number = self.name.rsplit('.').next().and_then(|number| number.parse().ok());
        number.unwrap_or(0)
    }
}

/// The right to one descriptor in a queue. It goes back by [`Queues::give_back`]; until then the queue stays.
#[derive(Debug)]
#[must_use = "a ticket that is lost keeps its queue for ever"]
pub(crate) struct Ticket {
    index: u8,
}

impl Ticket {
    /// The queue's place in the table.
    pub(crate) fn index(&self) -> usize {
        usize::from(self.index)
    }
}

/// Why there is no ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoTicket {
    /// All queues are full.
    Full,
    /// No queue is open.
    Closed,
}

/// A queue's part, on cache lines of its own: CPUs that use different queues do not meet.
#[derive(Debug)]
#[repr(align(128))]
struct Cell {
    state: AtomicU64,
    /// How many of the tickets nobody has any more.
    abandoned: AtomicU32,
    /// QUEUE-1.
    queue: Shared<Option<Queue>>,
}

/// One CPU's part, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Row {
    /// The queues for each direction.
    masks: [AtomicU64; 2],
    /// The queue after the one used last.
    cursors: [AtomicU32; 2],
    counts: [Figure; Count::ALL],
    /// What this CPU adds to the figures of each queue. In the cells all who share a queue would wait for each other.
    wqs: [[Figure; WQ_COUNTS]; QUEUES_MAX],
}

/// What becomes of a queue when the table is built anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is used as before.
    Stays,
    /// It is used no more. Its name is free when its last job has ended.
    Leaves,
    /// The same, and the system has disabled it: one of the same name is another queue, with none of its jobs. So the
    /// name is free at once, though a job may never end. Whoever has lost such a job need not keep its ticket: the
    /// portal leads nowhere.
    IsGone,
}

impl Fate {
    /// `fate`, if `it_meets`.
    pub(crate) fn when(it_meets: bool, fate: Fate) -> Fate {
        if it_meets { fate } else { Fate::Stays }
    }
}

/// Why a queue cannot be used.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// There are [`QUEUES_MAX`] queues. Configure fewer for each device.
    TooMany {
        /// The queue.
        name: String,
    },
    /// It is used already, or was and its last job is still under way. Try again later.
    InUse {
        /// The queue.
        name: String,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::TooMany { name } => {
                write!(f, "{name} cannot be used: there are {QUEUES_MAX} work queues already")
            }
            Refused::InUse { name } => write!(f, "{name} is in use already"),
        }
    }
}

impl std::error::Error for Refused {}

/// What a queue is, for those who place them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) index: usize,
    /// Its number among the queues of its device.
    pub(crate) number: usize,
    pub(crate) device: usize,
    pub(crate) package: usize,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Queues {
    cells: Box<[Cell]>,
    rows: Box<[Row]>,
    control: Mutex<RANK_CONTROL, Taken>,
}

/// Which cells have a queue, a bit each.
#[derive(Debug, Default)]
struct Taken(u64);

impl Taken {
    fn has(&self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }
}

impl Queues {
    /// An empty table for so many CPUs and queues.
    pub(crate) fn new(cpus: usize, queues: usize) -> Queues {
        assert!((1..=QUEUES_MAX).contains(&queues));
        let zero = |_| AtomicU64::new(0);
        let none = |_| Figure::new(0);
        let cell = |_| Cell {
            state: AtomicU64::new(0),
            abandoned: AtomicU32::new(0),
            queue: Shared::new(None),
        };
        let row = |cpu| Row {
            masks: std::array::from_fn(zero),
            // CPUs begin at different queues.
            cursors: std::array::from_fn(|_| AtomicU32::new(cpu)),
            counts: std::array::from_fn(none),
            wqs: std::array::from_fn(|_| std::array::from_fn(none)),
        };
        Queues {
            cells: (0..queues).map(cell).collect(),
            rows: (0..).take(cpus.max(1)).map(row).collect(),
            control: Mutex::new(Taken::default()),
        }
    }

    fn row(&self, cpu: usize) -> &Row {
        &self.rows[cpu % self.rows.len()]
    }

    /// Whether `cpu` has any queue for this direction, open or not.
    pub(crate) fn has_any(&self, cpu: usize, direction: Direction) -> bool {
        // Relaxed: as in `next`.
        self.row(cpu).masks[direction as usize].load(Ordering::Relaxed) != 0
    }

    /// The next queue of `cpu`, round robin, with room in it.
    pub(crate) fn next(&self, cpu: usize, direction: Direction) -> Result<Ticket, NoTicket> {
        let row = self.row(cpu);
        // Relaxed: a mask is a word that means nothing but itself; whether a queue may be used its cell says.
        let mask = row.masks[direction as usize].load(Ordering::Relaxed);
        let cursor = &row.cursors[direction as usize];
        let start = cursor.load(Ordering::Relaxed) % u64::BITS;
        let mut left = mask.rotate_right(start);
        let mut why = NoTicket::Closed;
        while left != 0 {
            let index = (start + left.trailing_zeros()) % u64::BITS;
            left &= left - 1;
            match self.ticket(index) {
                Ok(ticket) => {
                    // Two threads of one CPU may choose the same queue: it only spreads less.
                    cursor.store(index + 1, Ordering::Relaxed);
                    return Ok(ticket);
                }
                Err(NoTicket::Full) => why = NoTicket::Full,
                Err(NoTicket::Closed) => {}
            }
        }
        Err(why)
    }

    fn ticket(&self, index: u32) -> Result<Ticket, NoTicket> {
        let ticket = Ticket { index: index.to_le_bytes()[0] };
        let state = &self.cell(&ticket).state;
        // Acquire: pairs with the Release of `install`: who sees it open sees its portal.
        let before = state.fetch_add(1, Ordering::Acquire);
        if before & OPEN != 0 && before & COUNT < (before & !OPEN) >> DEPTH_SHIFT {
            return Ok(ticket);
        }
        state.fetch_sub(1, Ordering::Relaxed);
        Err(if before & OPEN == 0 { NoTicket::Closed } else { NoTicket::Full })
    }

    fn cell(&self, ticket: &Ticket) -> &Cell {
        &self.cells[ticket.index()]
    }

    /// Whether the queue of a ticket still takes jobs.
    pub(crate) fn is_open(&self, ticket: &Ticket) -> bool {
        // Relaxed: it is a hint, which may be old at once.
        self.cell(ticket).state.load(Ordering::Relaxed) & OPEN != 0
    }

    /// Whether the system has disabled the queue of a ticket: a job that was lost there needs its ticket no more.
    pub(crate) fn is_gone(&self, ticket: &Ticket) -> bool {
        // Relaxed: the bit says nothing of any other word. While the ticket is out it is set once and never cleared.
        self.cell(ticket).state.load(Ordering::Relaxed) & GONE != 0
    }

    /// How many queues more there is room for.
    pub(crate) fn room(&self) -> usize {
        let taken = self.control.lock();
        (0..self.cells.len()).filter(|index| !taken.has(*index)).count()
    }

    /// Gives `use_it` the portal of a ticket.
    pub(crate) fn with_portal<R>(
        &self,
        ticket: &Ticket,
        use_it: impl FnOnce(&dyn Portal) -> R,
    ) -> R {
        let use_it = |queue: &Option<Queue>| {
            use_it(&*queue.as_ref().expect("QUEUE-1: a ticket is out").portal)
        };
        // SAFETY: the ticket is out until it is given back, which takes it by value, so the queue is not replaced
        // meanwhile (QUEUE-1).
        unsafe { self.cell(ticket).queue.with(use_it) }
    }

    /// The job of this ticket has ended, or never began.
    pub(crate) fn give_back(&self, ticket: Ticket) {
        // Release: pairs with the Acquire of `sweep`: what this thread did with the portal is over.
        let before = self.cell(&ticket).state.fetch_sub(1, Ordering::Release);
        debug_assert!(before & COUNT > 0, "a ticket was given back twice");
    }

    /// The job of this ticket was lost, and nobody looks for its end any more. The ticket stays out until the system
    /// has disabled its queue, or goes back at once if it has.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        if self.is_gone(&ticket) {
            return self.give_back(ticket);
        }
        // Release: pairs with the Acquire of `sweep`, as in `give_back`. If it becomes gone meanwhile, the next sweep
        // sees this.
        self.cell(&ticket).abandoned.fetch_add(1, Ordering::Release);
    }

    /// Adds to what `cpu` has done with a ticket's queue.
    pub(crate) fn count_wq(&self, cpu: usize, ticket: &Ticket, of: Wq, more: usize) {
        self.row(cpu).wqs[ticket.index()][of as usize].fetch_add(more as u64, Ordering::Relaxed);
    }

    /// Adds to the figures of `cpu`.
    pub(crate) fn count(&self, cpu: usize, of: Count, more: usize) {
        self.row(cpu).counts[of as usize].fetch_add(more as u64, Ordering::Relaxed);
    }

    /// A figure of all CPUs.
    pub(crate) fn total(&self, of: Count) -> u64 {
        self.rows.iter().map(|row| row.counts[of as usize].load(Ordering::Relaxed)).sum()
    }

    /// From now on nobody gets a ticket of this ticket's queue: its device is gone.
    pub(crate) fn close(&self, ticket: &Ticket) {
        self.close_cell(ticket.index());
    }

    fn close_cell(&self, index: usize) {
        // Relaxed: it only takes something away.
        let before = self.cells[index].state.fetch_and(COUNT | GONE, Ordering::Relaxed);
        if before & OPEN != 0 {
            self.count(0, Count::WqRemoved, 1);
        }
    }

    /// Adds a queue that holds `depth` descriptors.
    pub(crate) fn install(&self, queue: Queue, depth: u32) -> Result<usize, Refused> {
        let mut taken = self.control.lock();
        let name = || queue.name.clone();
        let is_same = |index: usize| {
            let other =
                |other: &Option<Queue>| other.as_ref().is_some_and(|it| it.name == queue.name);
            // SAFETY: `control` is held, and only who holds it replaces a queue (QUEUE-1).
            unsafe { self.cells[index].queue.with(other) }
        };
        // Relaxed: only who holds `control` sets the bit, or clears it.
        let is_gone = |index: usize| self.cells[index].state.load(Ordering::Relaxed) & GONE != 0;
        let has_name = |index: &usize| taken.has(*index) && !is_gone(*index);
        if (0..self.cells.len()).filter(has_name).any(is_same) {
            return Err(Refused::InUse { name: name() });
        }
        let free = (0..self.cells.len()).find(|index| !taken.has(*index));
        let index = free.ok_or_else(|| Refused::TooMany { name: name() })?;
        let cell = &self.cells[index];
        // No ticket is out, so nobody adds to them.
        let counts = self.rows.iter().flat_map(|row| &row.wqs[index]);
        counts.for_each(|count| count.store(0, Ordering::Relaxed));
        // SAFETY: `control` is held; and `taken` says that the cell has been closed since it was swept or made, so no
        // ticket is out (QUEUE-1, QUEUE-2).
        unsafe { cell.queue.replace(Some(queue)) };
        taken.0 |= 1 << index;
        self.count(0, Count::WqAdded, 1);
        let depth = u64::from(depth).min(DEPTH_MAX) << DEPTH_SHIFT;
        // Release: pairs with the Acquire of `ticket`. An addition, since somebody may have counted himself for a
        // moment.
        cell.state.fetch_add(OPEN | depth, Ordering::Release);
        Ok(index)
    }

    /// Closes the queues that are to leave, as `fate` says, and drops all closed ones that have no job any more.
    /// Returns the queues that stay open.
    pub(crate) fn sweep(&self, mut fate: impl FnMut(&Queue) -> Fate) -> Vec<Placed> {
        let mut open = Vec::new();
        let mut taken = self.control.lock();
        for index in 0..self.cells.len() {
            if !taken.has(index) {
                continue;
            }
            let cell = &self.cells[index];
            let look = |queue: &Option<Queue>| {
                let queue = queue.as_ref().expect("`taken` says so");
                let Queue { device, package, .. } = *queue;
                let placed = Placed { index, number: queue.number(), device, package };
                (placed, fate(queue))
            };
            // SAFETY: `control` is held, and only who holds it replaces a queue (QUEUE-1).
            let (placed, fate) = unsafe { cell.queue.with(look) };
            if fate != Fate::Stays {
                self.close_cell(index);
            }
            if fate == Fate::IsGone {
                // Relaxed: as in `is_gone`.
                cell.state.fetch_or(GONE, Ordering::Relaxed);
            }
            // Acquire: pairs with the Release of `give_back`.
            let mut state = cell.state.load(Ordering::Acquire);
            if state & GONE != 0 {
                // Acquire: pairs with the Release of `abandon`.
                let abandoned = u64::from(cell.abandoned.swap(0, Ordering::Acquire));
                state = cell.state.fetch_sub(abandoned, Ordering::Acquire) - abandoned;
            }
            if state & OPEN != 0 {
                open.push(placed);
            } else if state & COUNT == 0 {
                // SAFETY: `control` is held, and the cell is closed and without a ticket; none will be given out, since
                // only who holds `control` opens it (QUEUE-1, QUEUE-2).
                drop(unsafe { cell.queue.replace(None) });
                taken.0 &= !(1 << index);
                // Relaxed: `install` publishes the cell.
                cell.state.fetch_and(!GONE, Ordering::Relaxed);
            }
        }
        open
    }

    /// Which queues a CPU uses, for each direction.
    pub(crate) fn assign(&self, cpu: usize, masks: [u64; 2]) {
        for (place, mask) in self.rows[cpu].masks.iter().zip(masks) {
            // Relaxed: as in `next`.
            place.store(mask, Ordering::Relaxed);
        }
    }

    /// Calls `each` with every queue that there is, whether it is open, and its figures.
    pub(crate) fn each(&self, mut each: impl FnMut(&Queue, bool, [u64; WQ_COUNTS])) {
        let taken = self.control.lock();
        for (index, cell) in (0..).zip(&self.cells).filter(|it| taken.has(it.0)) {
            let of_row = |row: &Row, of: usize| row.wqs[index][of].load(Ordering::Relaxed);
            let counts =
                std::array::from_fn(|of| self.rows.iter().map(|row| of_row(row, of)).sum());
            // Relaxed: only who holds `control` opens it, and it may close at any time.
            let is_open = cell.state.load(Ordering::Relaxed) & OPEN != 0;
            let each = |queue: &Option<Queue>| {
                each(queue.as_ref().expect("`taken` says so"), is_open, counts);
            };
            // SAFETY: `control` is held, and only who holds it replaces a queue (QUEUE-1).
            unsafe { cell.queue.with(each) };
        }
    }

    /// Sets the figures of all CPUs to 0. Those of a queue begin with it.
    pub(crate) fn clear_counts(&self) {
        let counts = self.rows.iter().flat_map(|row| &row.counts);
        counts.for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// Descriptors that are in queues, or are on their way.
    pub(crate) fn in_flight(&self) -> u64 {
        self.cells.iter().map(|cell| cell.state.load(Ordering::Relaxed) & COUNT).sum()
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        for cell in &self.cells {
            // Relaxed: `&mut self`.
            if cell.state.load(Ordering::Relaxed) & COUNT != 0 {
                // A job was never answered: its queue is left to the device.
                // SAFETY: `&mut self`: nobody else is here.
                std::mem::forget(unsafe { cell.queue.replace(None) });
            }
        }
    }
}

/// The cell of a queue that many read and one may write, as QUEUE-1 says.
#[allow(unsafe_code, reason = "a count says who may read")]
mod shared {
    #[cfg(all(test, feature = "loom"))]
    use loom::cell::UnsafeCell;
    #[cfg(not(all(test, feature = "loom")))]
    use plain::UnsafeCell;

    #[derive(Debug)]
    pub(super) struct Shared<T>(UnsafeCell<T>);

    // SAFETY: `with` gives out references to several threads, for which `T: Sync`, and `replace` moves values from one
    // thread to another, for which `T: Send`. Their contracts keep them apart.
    unsafe impl<T: Send + Sync> Sync for Shared<T> {}

    impl<T> Shared<T> {
        pub(super) fn new(value: T) -> Self {
            Shared(UnsafeCell::new(value))
        }

        /// Gives `look` the value.
        ///
        /// # Safety
        ///
        /// Until `look` has returned nobody calls [`Shared::replace`]: the caller has a ticket of the cell, or holds
        /// `control`.
        pub(super) unsafe fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
            // SAFETY: the pointer is to a value, and by the contract it is not written meanwhile.
            self.0.with(|value| look(unsafe { &*value }))
        }

        /// Puts a value in the place of the old one.
        ///
        /// # Safety
        ///
        /// Nobody else calls this or is in [`Shared::with`]: the caller holds `control`, or has the table for itself,
        /// and no ticket of the cell is out that may still be used.
        pub(super) unsafe fn replace(&self, new: T) -> T {
            self.0.with_mut(|value| {
                // SAFETY: the pointer is to a value, and by the contract nobody else reads or writes it.
                std::mem::replace(unsafe { &mut *value }, new)
            })
        }
    }

    #[cfg(not(all(test, feature = "loom")))]
    mod plain {
        /// `std::cell::UnsafeCell` with loom's interface.
        #[derive(Debug)]
        pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

        impl<T> UnsafeCell<T> {
            pub(super) fn new(value: T) -> Self {
                UnsafeCell(std::cell::UnsafeCell::new(value))
            }

            pub(super) fn with<R>(&self, look: impl FnOnce(*const T) -> R) -> R {
                look(self.0.get())
            }

            pub(super) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
                change(self.0.get())
            }
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;

/// Every order of steps: `make loom`.
#[cfg(all(test, feature = "loom"))]
mod loom_tests;
