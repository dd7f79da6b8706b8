//! Where a pager spills to: areas on its files and devices, each with a disk, a thread and a key of its own.

use std::cmp::Reverse;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use zfolio_core::budget::WriteBudget;
use zfolio_core::size;
use zfolio_core::store::Backing;
use zfolio_core::store::backing::{Completion, Failure, Location, Request, Usage};
use zfolio_core::swap::disk::{Disk, SLOT_BYTES, Transfer};
use zfolio_core::swap::{
    AREAS_MAX, AreaId, Areas, AreasStats, Config, KeyMemory, KeyRoom, NewArea, SECRET_BYTES,
    SLOTS_MAX, Seal,
};
use zfolio_core::sync::Mutex;
use zfolio_sys::custody::Asked;
use zfolio_sys::disk::Kind;
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::files::Exposed;
use zfolio_sys::secret::Secret;
use zfolio_sys::{Errno, disk, random, thread};

use super::any::SpillDisk;
use super::file::{Medium, Refusal, not_opened};
use super::parts::Parts;
use super::plain::Plain;
use super::pool_limit::PoolLimit;
use super::uring::{DEPTH, Sender};
use crate::rank;

/// The smallest limit of what may be spilled: a few clusters.
pub const SPILL_BYTES_MIN: u64 = 16 << 20;

/// Buffers take this share of the pager's limit, within bounds.
const BUFFERS_SHARE: u64 = 64;
const BUFFERS_MIN: u64 = 256 << 10;
pub(super) const BUFFERS_MAX: u64 = 2 << 20;

/// So often somebody who must not wait for long tries to lock the list of disks, with a pause after each try. Others
/// have it for microseconds, or longer if the kernel gives their CPU to somebody else.
const LIST_TRIES: u32 = 20;
const LIST_PAUSE: Duration = Duration::from_millis(1);

/// What to spill to.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Places {
    /// Directories and block devices, each with a priority: higher ones are filled first, equal ones in turn.
    pub paths: Vec<(PathBuf, i32)>,
    /// How much may be spilled in all; `None`: half of what is free in the first directory's file system, or all of
    /// a device.
    pub limit_bytes: Option<u64>,
    /// How much of the pager's limit the pool may take.
    pub pool: PoolLimit,
    /// How much may be written, and in what time.
    pub write_budget: WriteBudget,
}

impl Places {
    /// What the variable `ZFOLIO_SPILL` says where nothing is to be spilled; otherwise it has a path a line.
    pub const NONE: &str = "none";

    /// Whether what may go to disk is bounded although nothing goes there.
    pub(crate) fn is_for_nowhere(&self) -> bool {
        let is_bounded = self.pool != PoolLimit::default() || !self.write_budget.is_none();
        self.paths.is_empty() && is_bounded
    }

    /// A path with its priority, as people write it: `/var/tmp`, or `/dev/sdb,prio=5`. Without one it is 0.
    ///
    /// # Errors
    ///
    /// The text behind the comma.
    pub fn parse(text: &str) -> Result<(PathBuf, i32), &str> {
        match text.rsplit_once(",prio=") {
            None => Ok((text.into(), 0)),
            Some((path, priority)) => {
                parse_priority(priority).map(|number| (path.into(), number)).ok_or(priority)
            }
        }
    }
}

/// A priority that is accepted.
pub(super) fn parse_priority(given: &str) -> Option<i32> {
    given.parse().ok().filter(|number| (-1..=32767).contains(number))
}

/// How much may be on disk.
///
/// # Errors
///
/// A message: what was given, and what is accepted.
pub fn parse_bytes(given: &str) -> Result<u64, String> {
    let bytes = size::parse(given).map_err(|error| error.to_string())?;
    if bytes < SPILL_BYTES_MIN {
        let least = size::display(SPILL_BYTES_MIN);
        return Err(format!("'{given}' is too small; accepted: {least} or more"));
    }
    Ok(bytes)
}

/// Why there is nothing to spill to.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PlaceError {
    /// A path is not accepted.
    Path(Refusal),
    /// The limit is too small.
    Limit {
        /// What was given.
        given: u64,
    },
    /// More paths than areas.
    TooMany {
        /// How many are accepted.
        most: usize,
    },
    /// A percentage is none.
    Percent {
        /// What was given.
        given: PoolLimit,
    },
    /// A budget for writes is none.
    Budget {
        /// What was given, and what is accepted.
        why: String,
    },
    /// What may go to disk is bounded, and there is no disk.
    Nowhere,
    /// There are as many areas as there can be: this process still reads files of its ancestors.
    Busy,
    /// The run has not answered yet whether this process may use a device.
    Unanswered,
    /// The system has none.
    System {
        /// Of what.
        what: &'static str,
        /// The system's answer.
        errno: Errno,
    },
}

impl std::fmt::Display for PlaceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PlaceError::Path(refusal) => write!(f, "spill: {refusal}"),
            PlaceError::Limit { given } => {
                write!(f, "spill limit {given}: at least {SPILL_BYTES_MIN} bytes are needed")
            }
            PlaceError::TooMany { most } => write!(f, "spill: more than {most} places"),
            PlaceError::Percent { given } => write!(
                f,
                "max_pool_percent {}, accept_threshold_percent {}: 1 to 100 is accepted",
                given.max_pool_percent, given.accept_threshold_percent
            ),
            PlaceError::Budget { why } => write!(f, "write budget: {why}"),
            PlaceError::Nowhere => write!(
                f,
                "max_pool_percent, accept_threshold_percent and a write budget are for what goes to \
                 disk, and nothing does: a place to spill to is needed"
            ),
            PlaceError::Busy => {
                write!(f, "spill: {AREAS_MAX} files of its ancestors are still in use")
            }
            PlaceError::Unanswered => write!(f, "spill: 'zfolio run' has not answered yet"),
            PlaceError::System { what, errno } => {
                let why = zfolio_sys::errno_text::ErrnoText(*errno);
                write!(f, "spill: {what}: {why}")
            }
        }
    }
}

impl std::error::Error for PlaceError {}

/// The key's memory: see [`Secret`].
#[derive(Debug)]
struct KeyPage(Secret<KeyRoom>);

impl Deref for KeyPage {
    type Target = KeyRoom;
    fn deref(&self) -> &KeyRoom {
        &self.0
    }
}

impl DerefMut for KeyPage {
    fn deref_mut(&mut self) -> &mut KeyRoom {
        &mut self.0
    }
}

impl KeyMemory for KeyPage {
    fn lock_again(&self) -> bool {
        self.0.lock().is_ok()
    }
}

/// A disk that an area and its thread share. It says where on the medium a slot of the area is.
#[derive(Debug)]
struct Shared(Arc<SpillDisk>);

impl Disk for Shared {
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        let first = transfer.first;
        let there = Transfer { first: self.0.medium().on_medium(first), ..transfer };
        self.0.begin(there).map_err(|refused| Transfer { first, ..refused })
    }

    fn flush(&self) {
        self.0.flush();
    }

    fn poll(&self, each: &mut dyn FnMut(Transfer)) {
        self.0.poll(each);
    }

    fn pause(&self) {
        self.0.pause();
    }

    fn discard(&self, first: u64, count: u64) {
        self.0.discard(self.0.medium().on_medium(first), count);
    }

    fn discard_room(&self) -> usize {
        self.0.discard_room()
    }

    fn stretch_slots(&self) -> u32 {
        self.0.medium().parts().map_or(SLOTS_MAX, Parts::part_slots)
    }
}

/// The areas, as the store has them. Until the first is opened there are none, and nothing is accepted.
#[derive(Clone, Default, Debug)]
pub(crate) struct SharedAreas(Arc<OnceLock<Areas>>);

impl SharedAreas {
    fn get(&self) -> Option<&Areas> {
        self.0.get()
    }
}

impl Backing for SharedAreas {
    fn submit(&self, requests: &mut [Request<'_>]) {
        match self.get() {
            Some(areas) => areas.submit(requests),
            None => {
                requests.iter_mut().for_each(|request| request.refused = Some(Failure::Transient))
            }
        }
    }

    fn flush(&self) {
        self.get().into_iter().for_each(Areas::flush);
    }

    fn tidy(&self) {
        self.get().into_iter().for_each(Areas::tidy);
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.get().into_iter().for_each(|areas| areas.poll(each));
    }

    fn memory_bytes(&self) -> usize {
        self.get().map_or(0, Areas::memory_bytes)
    }

    fn usage(&self) -> Usage {
        self.get().map_or_else(Usage::default, Areas::usage)
    }

    fn discard(&self, location: Location, length: usize) {
        self.get().expect("who has a location has areas").discard(location, length);
    }

    fn pause(&self) {
        match self.get() {
            Some(areas) => areas.pause(),
            None => zfolio_core::sync::pause(),
        }
    }
}

/// What a managed process gives to disks that are opened when they are needed.
#[derive(Clone, Copy, Debug)]
pub struct Hooks {
    /// Starts a thread that calls [`SpillDisk::serve`]. False: there is none to be had.
    pub start: fn(Arc<SpillDisk>) -> bool,
    /// Asks for the run's claim of a block device, of which this process then uses parts ([`claim`]). `None`: there is
    /// nobody to ask.
    pub claim: fn(&Path) -> Option<Asked>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Place {
    areas: SharedAreas,
    ended: Arc<EventFd>,
    sender: Sender,
    places: Places,
    config: Config,
    /// What disks need that are opened later.
    hooks: OnceLock<Hooks>,
    open: Mutex<{ rank::PLACE }, Open>,
    /// There is an area that is written to: one of this process's own.
    is_open: AtomicBool,
    /// There are areas that a fork has shared or frozen.
    is_forked: AtomicBool,
    /// There are areas that are written to, of parts of a device.
    has_parts: AtomicBool,
    /// Writes that had found no room at the last look.
    refused: AtomicU64,
}

/// How disks are read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ways {
    /// All of them by io_uring; otherwise one at least by plain calls.
    pub(crate) by_ring: bool,
    /// All of them past the page cache; otherwise one at least through it.
    pub(crate) is_direct: bool,
    /// Transfers that plain calls have ended.
    pub(crate) calls: u64,
}

/// The disks of the areas that there are.
#[derive(Debug, Default)]
struct Open {
    disks: Vec<(AreaId, Arc<SpillDisk>)>,
    /// Transfers that plain calls have ended on disks that are closed now.
    calls_closed: u64,
    /// A thread that has the disks' files in its table.
    thread: u32,
    /// For each path, if it is a device: what the run was asked, as long as it has not answered all.
    asked: Vec<Option<Asked>>,
}

impl Open {
    /// Those of the areas that have objects.
    fn with_objects(&self, areas: &Areas) -> impl Iterator<Item = &(AreaId, Arc<SpillDisk>)> {
        let has_objects = |id| areas.status(id).is_some_and(|area| area.objects > 0);
        self.disks.iter().filter(move |(id, _)| has_objects(*id))
    }
}

/// The files of the areas, in the table of files of a thread that forks, and then of its child.
#[derive(Debug, Default)]
pub struct Lent(Vec<(AreaId, Exposed)>);

impl Lent {
    /// The files.
    pub fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, file)| file.as_fd())
    }

    /// Whether all of them are still there: another thread of the program may close them, or put its own in their
    /// place. In a child there is no such thread.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.0.iter().all(|(_, file)| file.is_same())
    }
}

/// Which paths are to be opened, by their numbers, and the run's claims of those that are devices.
#[derive(Debug)]
pub(crate) struct Plan(Vec<(usize, Option<OwnedFd>)>);

impl Place {
    /// Nothing is opened yet.
    ///
    /// # Errors
    ///
    /// See [`PlaceError`].
    pub(crate) fn new(
        places: &Places,
        limit_bytes: u64,
        unit_bytes: usize,
        sender: Sender,
    ) -> Result<Place, PlaceError> {
        if let Some(given) = places.limit_bytes.filter(|given| *given < SPILL_BYTES_MIN) {
            return Err(PlaceError::Limit { given });
        }
        if !places.pool.is_valid() {
            return Err(PlaceError::Percent { given: places.pool });
        }
        if places.paths.len() > AREAS_MAX {
            return Err(PlaceError::TooMany { most: AREAS_MAX });
        }
        let first = places.paths.first().map_or(Path::new(""), |(path, _)| path);
        let spill_bytes = places.limit_bytes.unwrap_or_else(|| free_for_us(first));
        let buffers = (limit_bytes / BUFFERS_SHARE).clamp(BUFFERS_MIN, BUFFERS_MAX);
        let config = Config {
            object_bytes_max: unit_bytes,
            buffer_bytes: usize::try_from(buffers).unwrap_or(usize::MAX),
            limit_bytes: spill_bytes,
        };
        let ended = EventFd::new();
        let ended =
            ended.map_err(|errno| PlaceError::System { what: "an event descriptor", errno })?;
        Ok(Place {
            areas: SharedAreas::default(),
            ended: Arc::new(ended),
            sender,
            places: places.clone(),
            config,
            hooks: OnceLock::new(),
            open: Mutex::default(),
            is_open: AtomicBool::new(false),
            is_forked: AtomicBool::new(false),
            has_parts: AtomicBool::new(false),
            refused: AtomicU64::new(0),
        })
    }

    /// From now on areas are opened when they are needed.
    pub(crate) fn open_when_needed(&self, hooks: Hooks) {
        self.hooks.set(hooks).ok();
    }

    /// What [`Place::open`] is to open. No thread forks meanwhile: the list of disks is locked while memory is
    /// allocated, and a child would inherit it locked.
    ///
    /// # Errors
    ///
    /// The run has not answered yet whether this process may use its devices.
    pub(crate) fn plan(&self) -> Result<Plan, PlaceError> {
        let hooks = self.hooks.get();
        let claims = hooks.map_or_else(|| Ok(Vec::new()), |hooks| self.claims(hooks))?;
        let claims = claims.into_iter().chain(std::iter::repeat_with(|| None));
        let chosen = self.chosen();
        let all = claims.enumerate().take(self.places.paths.len());
        Ok(Plan(all.filter(|(at, _)| chosen.contains(at)).collect()))
    }

    /// Opens a file or device for each path of the plan, in the calling thread's table of files. The caller passes
    /// them to [`Place::add`]. Where areas are opened when they are needed ([`Place::open_when_needed`]), devices are
    /// opened by parts, and paths that cannot be opened are left out as long as one can.
    ///
    /// # Errors
    ///
    /// Why the first of those that cannot be opened cannot.
    pub(crate) fn open(&self, plan: Plan) -> Result<Vec<New>, PlaceError> {
        let hooks = self.hooks.get();
        let open = |(at, claim): (usize, Option<OwnedFd>)| {
            let (path, priority) = &self.places.paths[at];
            let medium = match hooks.is_some() && is_device(path) {
                true => Medium::open_part(path, claim),
                false => New::open_medium(path, self.config.limit_bytes),
            };
            let medium = medium.map_err(PlaceError::Path)?;
            Ok(New::on(medium, *priority, self.sender, &self.ended))
        };
        let opened: Vec<Result<New, PlaceError>> = plan.0.into_iter().map(open).collect();
        let is_any = opened.iter().any(Result::is_ok);
        let each = opened.into_iter().filter(|new| new.is_ok() || !is_any || hooks.is_none());
        each.collect()
    }

    /// The run's claims of the devices, if there is a run to ask.
    ///
    /// # Errors
    ///
    /// It has not answered yet.
    fn claims(&self, hooks: &Hooks) -> Result<Vec<Option<OwnedFd>>, PlaceError> {
        let mut open = self.open.lock();
        if open.asked.is_empty() {
            let ask = |(path, _): &(PathBuf, i32)| {
                if is_device(path) { (hooks.claim)(path) } else { None }
            };
            open.asked = self.places.paths.iter().map(ask).collect();
        }
        if open.asked.iter().flatten().any(|asked| !asked.is_answered()) {
            return Err(PlaceError::Unanswered);
        }
        let asked = std::mem::take(&mut open.asked);
        Ok(asked.into_iter().map(|asked| asked?.answer()).collect())
    }

    /// Makes the areas, if there are none yet: their buffers.
    pub(crate) fn new_areas(&self) -> Option<Areas> {
        self.areas.get().is_none().then(|| Areas::new(self.config))
    }

    /// Adds what was opened to the areas. A thread that forks meanwhile waits, since the caller holds the table; or
    /// there is no other thread yet.
    pub(crate) fn add(&self, areas: Option<Areas>, opened: Vec<New>) -> Result<(), PlaceError> {
        if let Some(areas) = areas {
            self.areas.0.set(areas).ok();
        }
        let areas = self.areas.get().expect("set above, or before");
        let mut open = self.open.lock();
        open.thread = zfolio_sys::cpu::thread_id();
        let added = opened.into_iter().try_for_each(|new| {
            let (id, disk) = new.add_to(areas)?;
            self.start_threads_of(&disk);
            open.disks.push((id, disk));
            Ok(())
        });
        self.note(&open);
        // As in open(): what cannot be added is left out as long as there is another area.
        if self.hooks.get().is_some() && self.is_open() { Ok(()) } else { added }
    }

    /// Starts threads for what io_uring does not do: everything where there is none, and discards of a device. False:
    /// one is not to be had.
    fn start_threads_of(&self, disk: &Arc<SpillDisk>) -> bool {
        self.hooks.get().is_none_or(|hooks| disk.start_threads(hooks.start))
    }

    /// Starts the threads that disks have come to need since they were opened: where a ring has stopped working, plain
    /// calls do everything, and whoever flushes, with locks held, must not wait for them. False: one is not to be had.
    /// The caller holds the table, and no thread is about to fork.
    pub(crate) fn start_threads(&self) -> bool {
        self.open.lock().disks.iter().all(|(_, disk)| self.start_threads_of(disk))
    }

    /// Notes which kinds of areas there are.
    fn note(&self, open: &Open) {
        let areas = self.areas.get();
        let status = |(id, disk): &(AreaId, Arc<SpillDisk>)| {
            let has_parts = disk.medium().parts().is_some();
            areas.and_then(|areas| areas.status(*id)).map(|area| (area, has_parts))
        };
        let all: Vec<_> = open.disks.iter().filter_map(status).collect();
        let is_forked = all.iter().any(|(area, _)| area.is_frozen || area.is_shared);
        let has_parts = all.iter().any(|(area, has_parts)| *has_parts && !area.is_frozen);
        self.is_open.store(all.iter().any(|(area, _)| !area.is_frozen), Relaxed);
        self.is_forked.store(is_forked, Relaxed);
        self.has_parts.store(has_parts, Relaxed);
        if !has_parts {
            areas.into_iter().for_each(|areas| areas.set_growing(false));
        }
    }

    /// Whether there are areas that [`Place::grow`] looks at.
    pub(crate) fn has_parts(&self) -> bool {
        self.has_parts.load(Relaxed)
    }

    /// Takes more of the devices that others use too, where this process has used most of what it took, or where a
    /// write found no room since the last call: what is free may be too scattered. False: others have the rest. The
    /// caller holds the table, and no thread is about to fork.
    pub(crate) fn grow(&self) -> bool {
        let Some(areas) = self.areas.get() else { return true };
        let open = self.open.lock();
        let refused = areas.refused_for_room();
        let was_refused = self.refused.swap(refused, Relaxed) < refused;
        let (mut is_enough, mut is_growing) = (true, false);
        for (id, disk) in &open.disks {
            let (medium, area) = (disk.medium(), areas.status(*id));
            let (Some(parts), Some(area)) = (medium.parts(), area) else { continue };
            if area.is_frozen {
                continue;
            }
            if was_refused || area.slots_free < parts.reserve_slots() {
                let Some(slots) = medium.take_part() else {
                    is_enough = false;
                    continue;
                };
                areas.grow(*id, slots);
            }
            is_growing = true;
        }
        // A write that finds no room until the next part is there has not found the device full.
        areas.set_growing(is_growing);
        is_enough
    }

    /// Whether there is an area that is written to.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Relaxed)
    }

    /// How many areas more there can be.
    pub(crate) fn room(&self) -> usize {
        AREAS_MAX - self.open.lock().disks.len()
    }

    /// The paths that are opened: those with the highest priorities. A process that still has areas of its ancestors
    /// takes half of the room, and leaves the other half to its children.
    fn chosen(&self) -> Vec<usize> {
        let (paths, room) = (&self.places.paths, self.room());
        let most = if room == AREAS_MAX { room } else { room.div_ceil(2) };
        let mut chosen: Vec<usize> = (0..paths.len()).collect();
        chosen.sort_by_key(|at| Reverse(paths[*at].1));
        chosen.truncate(most);
        chosen
    }

    /// Whether [`Place::look_after`] has something to look at.
    pub(crate) fn is_forked(&self) -> bool {
        self.is_forked.load(Relaxed)
    }

    /// What the store is given.
    pub(crate) fn backing(&self) -> SharedAreas {
        self.areas.clone()
    }

    /// Each needs threads that call [`SpillDisk::serve`]: see [`SpillDisk::threads_needed`].
    pub(crate) fn disks(&self) -> Vec<Arc<SpillDisk>> {
        self.open.lock().disks.iter().map(|(_, disk)| Arc::clone(disk)).collect()
    }

    /// Wakes the threads of the disks: see [`SpillDisk::wake`]. A thread of the program's may call this, so no disk can
    /// end with what it holds.
    pub(crate) fn wake(&self) {
        self.open.lock().disks.iter().for_each(|(_, disk)| disk.wake());
    }

    /// Readable while a transfer has ended that nobody has asked for yet.
    pub(crate) fn ended(&self) -> &EventFd {
        &self.ended
    }

    /// What the areas have and did.
    pub(crate) fn stats(&self) -> AreasStats {
        self.areas.get().map(Areas::stats).unwrap_or_default()
    }

    /// How much may be spilled, by the settings.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.config.limit_bytes
    }

    /// How the disks are read and written now. `None`: nothing is open.
    pub(crate) fn ways(&self) -> Option<Ways> {
        let open = self.open.lock();
        let disks = || open.disks.iter().map(|(_, disk)| disk);
        (!open.disks.is_empty()).then(|| Ways {
            by_ring: disks().all(|disk| disk.is_by_ring()),
            is_direct: disks().all(|disk| disk.medium().is_direct()),
            calls: disks().map(|disk| disk.counts().by_calls).sum::<u64>() + open.calls_closed,
        })
    }

    /// The disk on which a location is. Whoever asks is about to stop the process, with any locks held: `None` also if
    /// others have the list of disks at each of [`LIST_TRIES`].
    #[cold]
    pub(crate) fn disk_of(&self, location: Location) -> Option<Arc<SpillDisk>> {
        let lock = |_| {
            let open = self.open.try_lock();
            if open.is_none() {
                thread::sleep(LIST_PAUSE);
            }
            open
        };
        let (open, area) = ((0..LIST_TRIES).find_map(lock)?, AreaId::of(location));
        open.disks.iter().find(|(id, _)| *id == area).map(|(_, disk)| Arc::clone(disk))
    }

    /// Changes how much may be spilled.
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.areas.get().into_iter().for_each(|areas| areas.set_limit(bytes));
    }

    /// Frees what was kept for children that have ended, and closes files of the parent's that are not needed any more.
    /// The caller holds the table. What is returned is dropped without it: to close a file may take long.
    #[must_use]
    pub(crate) fn look_after(&self) -> Vec<Arc<SpillDisk>> {
        let mut closed = Vec::new();
        let Some(areas) = self.areas.get() else { return closed };
        let mut open = self.open.lock();
        for (id, disk) in &open.disks {
            let is_shared = areas.status(*id).is_some_and(|area| area.is_shared);
            if is_shared && disk.medium().is_alone() {
                areas.unshare(*id);
            }
        }
        areas.take_done(&mut |id, disk| {
            let at = open.disks.iter().position(|(open, _)| *open == id);
            let at = at.expect("each area has a disk");
            let (_, shared) = open.disks.swap_remove(at);
            open.calls_closed += shared.counts().by_calls;
            shared.stop();
            closed.push(shared);
            drop(disk);
        });
        self.note(&open);
        closed
    }

    /// Before a fork: opens the files of all areas with objects once more, in the calling thread's table of files.
    ///
    /// # Errors
    ///
    /// See [`Medium::lend`]. And a file whose number cannot be told from another's later (`fstat` is forbidden).
    pub(crate) fn lend(&self) -> Result<Lent, Errno> {
        let Some(areas) = self.areas.get() else { return Ok(Lent::default()) };
        let open = self.open.lock();
        let lend = |(id, disk): &(AreaId, Arc<SpillDisk>)| {
            let file = Exposed::from(disk.medium().lend(open.thread)?);
            if file.is_same() { Ok((*id, file)) } else { Err(Errno::PERM) }
        };
        open.with_objects(areas).map(lend).collect::<Result<Vec<_>, _>>().map(Lent)
    }

    /// At a fork, with the table held for writing: shares all areas with objects, and lends the files of no others.
    /// False: requests are in flight, or an area was not lent, or its file is gone.
    pub(crate) fn share(&self, lent: &mut Lent) -> bool {
        let Some(areas) = self.areas.get() else { return true };
        let open = self.open.lock();
        let needed = || open.with_objects(areas).map(|(id, _)| *id);
        // The last object of an area may have ended since it was lent: the child will not have that area.
        lent.0.retain(|(id, _)| needed().any(|needed| needed == *id));
        let are_lent = lent.0.len() == needed().count() && lent.is_whole();
        let is_shared = are_lent && areas.share();
        self.note(&open);
        is_shared
    }

    /// In a child, after its parent's [`Place::share`]: goes on with the files that were lent, as `files` in the
    /// calling thread's table of files. Without `threads` the calling thread carries out all transfers.
    ///
    /// # Errors
    ///
    /// The key's memory cannot be locked, or there is no event descriptor.
    pub(crate) fn start_over(
        &self,
        lent: &Lent,
        files: Vec<OwnedFd>,
        threads: bool,
    ) -> Result<(), Errno> {
        let ended = match threads {
            true => {
                self.ended.reopen()?;
                Arc::clone(&self.ended)
            }
            // The number of the other one means another file here.
            false => Arc::new(EventFd::new()?),
        };
        self.refused.store(0, Relaxed);
        // Nobody else has locks here. The parent gets the answers, which may come before it has an area.
        let mut open = self.open.lock();
        open.asked.clear();
        let Some(areas) = self.areas.get() else { return Ok(()) };
        // What the parent's disks hold is left alone.
        areas.leave_to_parent(&mut |_, disk| std::mem::forget(disk));
        let before = std::mem::take(&mut open.disks);
        // Those of a first try, whose threads are this process's.
        let ours = before.iter().filter(|(_, disk)| !disk.medium().is_inherited());
        ours.for_each(|(_, disk)| disk.stop());
        // The parent's figures have those.
        open.calls_closed = 0;
        open.thread = zfolio_sys::cpu::thread_id();
        let numbers = lent.0.iter().map(|(id, _)| *id);
        for (id, file) in numbers.zip(files) {
            let parents = before.iter().find(|(other, _)| *other == id);
            let Some((_, parents)) = parents else { continue };
            let (medium, ended) = (parents.medium().lent(file), Arc::clone(&ended));
            let disk = match threads {
                true => SpillDisk::new(medium, DEPTH, ended, self.sender),
                false => SpillDisk::Plain(Plain::new(medium, DEPTH, ended), Errno::AGAIN),
            };
            let disk = Arc::new(disk);
            if threads {
                self.start_threads_of(&disk);
            }
            let boxed = Box::new(Shared(Arc::clone(&disk)));
            match areas.replace_disk(id, boxed) {
                Ok(parents) => std::mem::forget(parents),
                Err(_) => unreachable!("no thread of this process uses the areas"),
            }
            open.disks.push((id, disk));
        }
        std::mem::forget(before);
        self.note(&open);
        if !threads || areas.lock_keys_again() { Ok(()) } else { Err(Errno::NOMEM) }
    }

    /// Closes all areas. None has an object any more.
    pub(crate) fn close(&self) {
        let Some(areas) = self.areas.get() else { return };
        areas.take_done(&mut |_, disk| drop(disk));
        self.open.lock().disks.clear();
    }
}

/// What was opened for an area that is not there yet.
#[derive(Debug)]
pub(crate) struct New {
    disk: Arc<SpillDisk>,
    pub(super) priority: i32,
    sender: Sender,
}

impl New {
    /// Opens a file of at most so many bytes in a directory, or a device for this process alone.
    pub(super) fn open_medium(path: &Path, bytes: u64) -> Result<Medium, Refusal> {
        let bytes = bytes.min(u64::from(SLOTS_MAX) * SLOT_BYTES as u64);
        let bytes = bytes - bytes % SLOT_BYTES as u64;
        Medium::open(path, bytes, SPILL_BYTES_MIN)
    }

    /// Makes a disk on what was opened.
    pub(super) fn on(medium: Medium, priority: i32, sender: Sender, ended: &Arc<EventFd>) -> New {
        let disk = SpillDisk::new(medium, DEPTH, Arc::clone(ended), sender);
        New { disk: Arc::new(disk), priority, sender }
    }

    /// Slots of the file or device.
    pub(super) fn slots(&self) -> u64 {
        self.disk.medium().slots()
    }

    /// Makes an area of it, with a new key. No thread forks meanwhile: a child has the area with its key, or neither.
    pub(super) fn add_to(self, areas: &Areas) -> Result<(AreaId, Arc<SpillDisk>), PlaceError> {
        let New { disk, priority, sender } = self;
        let what = "locked memory for a key";
        let seal = new_key(sender).map_err(|errno| PlaceError::System { what, errno })?;
        let slots = u32::try_from(disk.medium().slots()).unwrap_or(SLOTS_MAX).min(SLOTS_MAX);
        let boxed = Box::new(Shared(Arc::clone(&disk)));
        let new = NewArea { disk: boxed, slots, priority, seal };
        let id = areas.add(new).map_err(|_| PlaceError::TooMany { most: AREAS_MAX })?;
        Ok((id, disk))
    }
}

/// A random key, in memory of its own. Children of a process that sends by the engine's own threads go on with it.
fn new_key(sender: Sender) -> Result<Seal, Errno> {
    let memory = match sender {
        Sender::Thread => Secret::new(),
        Sender::Caller => Secret::inherited(),
    };
    let memory = Box::new(KeyPage(memory?));
    let mut secret = [0; SECRET_BYTES];
    random::fill(&mut secret)?;
    Ok(Seal::new(memory, &mut secret))
}

/// How much may be spilled to a directory or block device, if nobody says: half of what is free there, or all of it.
///
/// # Errors
///
/// Nothing can be spilled there.
pub fn room(path: &Path) -> Result<u64, Refusal> {
    let room = free_for_us(path);
    // What is wrong with the path comes first.
    let medium = Medium::open(path, room.max(SPILL_BYTES_MIN), SPILL_BYTES_MIN)?;
    let bytes = room.min(medium.slots() * SLOT_BYTES as u64);
    if bytes < SPILL_BYTES_MIN {
        return Err(Refusal::TooSmall { path: path.to_owned(), bytes, bytes_min: SPILL_BYTES_MIN });
    }
    Ok(bytes)
}

/// Whether what is spilled to a directory or block device goes past the page cache.
///
/// # Errors
///
/// Nothing can be spilled there.
pub fn is_direct(path: &Path) -> Result<bool, Refusal> {
    Medium::open(path, SPILL_BYTES_MIN, SPILL_BYTES_MIN).map(|medium| medium.is_direct())
}

/// Claims a block device for the processes of a run: whoever has the answer, or a copy of it, keeps it from all others.
/// `None`: a directory, which anybody may use too.
///
/// # Errors
///
/// Somebody else has it, or it cannot be opened.
pub fn claim(path: &Path) -> Result<Option<OwnedFd>, Refusal> {
    if !is_device(path) {
        return Ok(None);
    }
    disk::claim_device(path).map(Some).map_err(|errno| not_opened(path, errno))
}

fn is_device(path: &Path) -> bool {
    matches!(disk::kind(path), Ok(Kind::Device(_)))
}

/// Half of what is free where a path is, since other users of the disk need some too; of a device as much as an area
/// can have. 0 if nothing is there.
fn free_for_us(path: &Path) -> u64 {
    match is_device(path) {
        true => u64::from(SLOTS_MAX) * SLOT_BYTES as u64,
        false => disk::free_bytes(path).unwrap_or(0) / 2,
    }
}
