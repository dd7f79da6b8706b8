//! The work queues of this machine as they come and go: a driver, and a look at sysfs now and then.
//!
//! Devices are set up (`zfolio iaa setup`) while programs run. A thread that has a turn every so often anyway calls
//! [`Machine::look`]. Most looks end at the **glance**: the files of queues and their states are as they were.
//! Otherwise all of sysfs is read, the driver forgets the queues that are gone, and those that have come are opened.
//!
//! # Invariants
//!
//! - `MACH-1` A queue is forgotten only if sysfs says that it is not what was opened. Where sysfs cannot be read at
//!   all, as after `chroot`, nothing is concluded; nor where a read fails for another reason than that the file is not
//!   there, as without a free descriptor.
//! - `MACH-2` A look opens files only where the thread's system calls are filtered as they were when the queues were
//!   opened first: a filter (seccomp) that was set up later may end the process for it. How they are filtered is read
//!   from `/proc`, whatever a filter says to that.
//!
//! # Concurrency
//!
//! `known` is held during a look, also while files are opened. Nobody but who looks, or starts over, takes it.
//!
//! # Cost
//!
//! A look that ends at the glance took 0.1 ms for 8 queues, 0.01 % of a CPU: a listing, and for each queue a `stat` and
//! a read of its state, 10 us on a virtual machine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use zfolio_core::sync::{Guard, Mutex};
use zfolio_sys::{files, process};

use crate::discover::{self, ADVICE, DEVICES, Found, Sight, Unusable};
use crate::driver::{Driver, WorkQueue};
use crate::queues::{QUEUES_MAX, Refused};
use crate::settings::Settings;
use crate::setup::NO_DEVICE;

/// Rank of the lock that is held during a look, below that of the driver's placement.
const RANK_MACHINE: u8 = 37;

/// How long after a look the next one is due.
const INTERVAL_NS: u64 = 1_000_000_000;

/// Maps a queue: [`Found::open`], but for tests.
type Open = Box<dyn Fn(&Found) -> Result<WorkQueue, Unusable> + Send + Sync>;

/// A driver on the queues of a machine.
pub(crate) struct Machine {
    pub(crate) driver: Arc<Driver>,
    /// `/sys` and `/dev/iax`.
    sysfs: PathBuf,
    dev: PathBuf,
    open: Open,
    /// When the next look is due.
    due_ns: AtomicU64,
    /// The filters of MACH-2; [`NO_FILTERS`]: their number cannot be read.
    filters: AtomicU32,
    /// Whether it was said that jobs which were never answered leave no room for a queue.
    is_told: AtomicBool,
    known: Mutex<RANK_MACHINE, Known>,
}

const NO_FILTERS: u32 = u32::MAX;

/// What the last look found.
#[derive(Debug, Default)]
struct Known {
    /// The queues that may be used. The driver has those of them that could be opened.
    usable: Vec<Found>,
    glance: Vec<Glance>,
}

/// What a glance sees of a queue: its name, its file, and its state.
type Glance = (String, Option<[u64; 2]>, Option<String>);

type Held<'a> = Guard<'a, RANK_MACHINE, Known>;

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl Machine {
    /// A driver on all queues that may be used, below `sysfs` and `dev`, and why there is none, if so: one line that
    /// says what to do. It goes on by software, and uses queues that come.
    pub(crate) fn new(
        sysfs: &Path,
        dev: &Path,
        settings: Settings,
        open: Open,
    ) -> (Machine, Result<(), String>) {
        let machine = Machine {
            driver: Arc::new(Driver::new(settings, discover::packages(sysfs))),
            sysfs: sysfs.to_owned(),
            dev: dev.to_owned(),
            open,
            due_ns: AtomicU64::new(0),
            filters: AtomicU32::new(NO_FILTERS),
            is_told: AtomicBool::new(false),
            known: Mutex::new(Known::default()),
        };
        machine.note_filters();
        let mut known = machine.known.lock();
        // What cannot be read is seen by a later look.
        let sight = Sight::default();
        known.glance = machine.glance(&sight, &known);
        let found = discover::queues_in(&sight, sysfs, dev);
        if sight.has_missed() {
            known.glance.clear();
        }
        let unusable = machine.follow(&mut known, found);
        let found = machine.why_none(&known, unusable);
        drop(known);
        (machine, found)
    }

    fn why_none(&self, _: &Held<'_>, unusable: Option<Unusable>) -> Result<(), String> {
        if !self.driver.open_queues().is_empty() {
            return Ok(());
        }
        if discover::devices(&self.sysfs).is_empty() {
            return Err(NO_DEVICE.to_owned());
        }
        Err(unusable.map_or_else(
            || format!("no queue of the accelerator is configured: {ADVICE}"),
            |Unusable { name, why }| {
                format!("no queue of the accelerator can be used: {name}: {why}")
            },
        ))
    }

    fn note_filters(&self) {
        self.filters.store(process::filters().unwrap_or(NO_FILTERS), Relaxed);
    }

    /// Looks whether queues have come or gone, if a look is due. No fork of this process may be under way.
    pub(crate) fn look(&self, now_ns: u64) {
        if now_ns < self.due_ns.load(Relaxed) {
            return;
        }
        self.due_ns.store(now_ns + INTERVAL_NS, Relaxed);
        // MACH-2.
        if process::filters() != Some(self.filters.load(Relaxed)) {
            return;
        }
        let mut known = self.known.lock();
        // Before all is read: what changes meanwhile is seen by the next glance.
        let sight = Sight::default();
        let glance = self.glance(&sight, &known);
        if sight.has_missed() {
            return;
        }
        if glance == known.glance {
            // The last job of a queue that left may have ended, and one that another program had may be free now.
            self.driver.refresh();
            self.open_closed(&known);
        } else if self.is_readable() {
            let found = discover::queues_in(&sight, &self.sysfs, &self.dev);
            if !sight.has_missed() {
                known.glance = glance;
                self.follow(&mut known, found);
            }
        }
    }

    /// MACH-1.
    fn is_readable(&self) -> bool {
        files::exists(&self.sysfs.join("bus"))
    }

    /// The queues that have files, and those that are known.
    fn glance(&self, sight: &Sight, known: &Known) -> Vec<Glance> {
        let listed = sight.children(&self.dev);
        let known = known.usable.iter().map(|found| found.name.clone());
        let mut names: Vec<String> = listed.into_iter().chain(known).collect();
        names.sort_unstable();
        names.dedup();
        let devices = self.sysfs.join(DEVICES);
        let look = |name: String| {
            let file = sight.file(&self.dev.join(&name));
            let state = sight.read(&devices.join(&name), "state");
            (name, file, state)
        };
        names.into_iter().map(look).collect()
    }

    /// Forgets what is gone, by what was found in all of sysfs, and opens what has come. Returns the first queue that
    /// cannot be used.
    fn follow(
        &self,
        known: &mut Held<'_>,
        found: Vec<Result<Found, Unusable>>,
    ) -> Option<Unusable> {
        let (mut usable, mut unusable) = (Vec::new(), None);
        for queue in found {
            match queue {
                Ok(found) => usable.push(found),
                Err(refused) => _ = unusable.get_or_insert(refused),
            }
        }
        let is_gone = |old: &&Found| !usable.iter().any(|new| new.is_same(old));
        let gone: Vec<String> =
            known.usable.iter().filter(is_gone).map(|found| found.name.clone()).collect();
        self.driver.forget(&gone);
        known.usable = usable;
        // One that is meant for programs, and cannot be opened, says more than those that are not set up.
        self.open_closed(known).or(unusable)
    }

    /// Opens all that may be used and is not open. Returns the last one that cannot be opened.
    fn open_closed(&self, known: &Known) -> Option<Unusable> {
        let open = self.driver.open_queues();
        let room = self.driver.room();
        let (mut opened, mut unusable) = (Vec::new(), None);
        for found in known.usable.iter().filter(|found| !open.contains(&found.name)) {
            // Before it is mapped: it would be unmapped again, at each look.
            if opened.len() >= room {
                if open.len() + opened.len() < QUEUES_MAX {
                    self.tell_of_no_room(found);
                }
                break;
            }
            match (self.open)(found) {
                Ok(queue) => opened.push(queue),
                Err(refused) => unusable = Some(refused),
            }
        }
        if !opened.is_empty() {
            // There is room, and no name is in use: those that are gone were forgotten.
            self.driver.add(opened).ok();
        }
        unusable
    }

    /// Says once why the accelerator is used less than it could be.
    #[cold]
    fn tell_of_no_room(&self, found: &Found) {
        if !self.is_told.swap(true, Relaxed) {
            let refused = Refused::TooMany { name: found.name.clone() };
            files::tell_program(&format!(
                "zfolio: --accelerate iaa: {refused}, with those whose jobs were never answered\n"
            ));
        }
    }

    /// In a child of `fork`: opens all queues that the parent knew, for the child. Another process's dedicated queue
    /// stays that process's.
    pub(crate) fn start_over(&self) {
        self.note_filters();
        let known = self.known.lock();
        // Forgets the parent's.
        self.driver.refresh();
        self.open_closed(&known);
    }
}

#[cfg(test)]
mod tests;
