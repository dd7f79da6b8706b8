//! The driver: the devices that come and go, and its figures. What a stream does is in `flights.rs`.

use std::sync::atomic::{AtomicU64, Ordering};

use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::lineage;

use crate::placement;
use crate::portal::Portal;
use crate::queues::{Fate, QUEUES_MAX, Queue, Queues, Refused};
use crate::settings::Settings;
use crate::stats::{DeviceStats, DriverStats, GlobalStats};

/// Rank of the lock that is held while the table is built anew, below that of the queues.
pub const RANK_PLACEMENT: u8 = 38;

/// Tries for a descriptor, as the published driver has them.
pub(crate) const TRIES_COMPRESS: u32 = 1000;
pub(crate) const TRIES_DECOMPRESS: u32 = 500;
pub(crate) const TRIES_DYNAMIC: u32 = 2000;

/// Held while queues come and go: the package of each CPU.
type Packages<'a> = Guard<'a, RANK_PLACEMENT, Vec<usize>>;

/// A work queue to be used.
#[derive(Debug)]
pub struct WorkQueue {
    /// Its name, `wq1.0`.
    pub name: String,
    /// The device's number.
    pub device: usize,
    /// The package that the device is in.
    pub package: usize,
    /// Descriptors that it holds; for a shared queue, at which it says that it is full.
    pub depth: u32,
    /// Where descriptors go.
    pub portal: Box<dyn Portal>,
}

/// The accelerators of a machine, for all streams.
///
/// In a child of `fork` it has no queues, since they work in the memory of the process that opened them: all is done by
/// software until the child adds queues that it has opened itself.
#[derive(Debug)]
pub struct Driver {
    pub(crate) queues: Queues,
    pub(crate) settings: Settings,
    /// The process that has opened the queues.
    process: AtomicU64,
    /// The package of each CPU; held while the masks follow from the queues.
    packages: Mutex<RANK_PLACEMENT, Vec<usize>>,
}

impl Driver {
    /// A driver without devices: all is done by software. `packages` has the package of each CPU.
    #[must_use]
    pub fn new(settings: Settings, packages: Vec<usize>) -> Driver {
        let queues = Queues::new(packages.len(), QUEUES_MAX);
        let process = AtomicU64::new(lineage::current());
        Driver { queues, settings, process, packages: Mutex::new(packages) }
    }

    /// Whether the queues are those of this process: they are the parent's in a child of `fork`.
    pub(crate) fn is_ours(&self) -> bool {
        // Acquire: pairs with the Release in disinherit().
        let process = self.process.load(Ordering::Acquire);
        process == lineage::current() && process != lineage::UNKNOWN
    }

    /// In a child of `fork`: forgets the parent's queues, and counts from 0.
    fn disinherit(&self, _: &Packages<'_>) {
        if !self.is_ours() {
            self.queues.sweep(|_| Fate::IsGone);
            self.queues.clear_counts();
            // Release: pairs with the Acquire in is_ours().
            self.process.store(lineage::current(), Ordering::Release);
        }
    }

    /// Uses these queues too, from now on. Streams may be at work.
    ///
    /// In a child of `fork` they take the place of the parent's queues.
    ///
    /// # Errors
    ///
    /// Why the first one is refused that is; all others are used.
    pub fn add(&self, queues: impl IntoIterator<Item = WorkQueue>) -> Result<(), Refused> {
        let packages = self.packages.lock();
        self.disinherit(&packages);
        let mut added = Ok(());
        for WorkQueue { name, device, package, depth, portal } in queues {
            let queue = Queue { name, device, package, portal };
            // Those behind one that is refused are used too.
            added = added.and(self.queues.install(queue, depth).map(|_| ()));
        }
        self.place(&packages, |_| Fate::Stays);
        added
    }

    /// Uses the queues of a device no more. Those with jobs in flight stay until a later call finds them idle.
    pub fn remove(&self, device: usize) {
        self.change(|queue| Fate::when(queue.device == device, Fate::Leaves));
    }

    /// The same for the queues of these names, which the system has disabled. One of the same name may be added at
    /// once: it is another one, without the jobs that this one may have forgotten.
    pub fn forget(&self, names: &[String]) {
        self.change(|queue| Fate::when(names.contains(&queue.name), Fate::IsGone));
    }

    /// The names of the queues that are in use.
    #[must_use]
    pub fn open_queues(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.queues.each(|queue, is_open, _| {
            if is_open {
                names.push(queue.name.clone());
            }
        });
        names
    }

    /// How many queues more it can use.
    pub(crate) fn room(&self) -> usize {
        self.queues.room()
    }

    /// Drops the queues of devices that are gone, and spreads the CPUs over the others.
    pub fn refresh(&self) {
        self.change(|_| Fate::Stays);
    }

    fn change(&self, fate: impl FnMut(&Queue) -> Fate) {
        let packages = self.packages.lock();
        self.disinherit(&packages);
        self.place(&packages, fate);
    }

    fn place(&self, packages: &Packages<'_>, fate: impl FnMut(&Queue) -> Fate) {
        let open = self.queues.sweep(fate);
        let masks = placement::masks(packages, &open, &self.settings);
        masks.into_iter().enumerate().for_each(|(cpu, masks)| self.queues.assign(cpu, masks));
    }

    /// The kernel's `global_stats`.
    #[must_use]
    pub fn global_stats(&self) -> GlobalStats {
        GlobalStats::of(&self.queues)
    }

    /// What the kernel does not count.
    #[must_use]
    pub fn driver_stats(&self) -> DriverStats {
        DriverStats::of(&self.queues)
    }

    /// The kernel's `wq_stats`.
    #[must_use]
    pub fn wq_stats(&self) -> Vec<DeviceStats> {
        DeviceStats::of(&self.queues)
    }
}
