//! Where a pager spills to: areas on its files and devices, each with a disk, a thread and a key of its own.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zfolio_core::store::Backing;
use zfolio_core::store::backing::{Completion, Location, Request};
use zfolio_core::swap::disk::{Disk, SLOT_BYTES, Transfer};
use zfolio_core::swap::{
    AREAS_MAX, Areas, Config, KeyMemory, KeyRoom, NewArea, SECRET_BYTES, SLOTS_MAX, Seal,
};
use zfolio_sys::disk::Kind;
use zfolio_sys::eventfd::EventFd;
use zfolio_sys::secret::Secret;
use zfolio_sys::{Errno, disk, random};

use super::any::SpillDisk;
use super::file::{Medium, Refusal};
use super::uring::{DEPTH, Sender};

/// The smallest limit of what may be spilled: a few clusters.
pub const SPILL_BYTES_MIN: u64 = 16 << 20;

/// Buffers take this share of the pager's limit, within bounds.
const BUFFERS_SHARE: u64 = 64;
const BUFFERS_MIN: u64 = 256 << 10;
const BUFFERS_MAX: u64 = 2 << 20;

/// What to spill to.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Places {
    /// Directories and block devices, each with a priority: higher ones are filled first, equal ones in turn.
    pub paths: Vec<(PathBuf, i32)>,
    /// How much may be spilled in all; `None`: half of what is free in the first directory's file system, or all of
    /// a device.
    pub limit_bytes: Option<u64>,
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

impl KeyMemory for KeyPage {}

/// A disk that an area and its thread share.
#[derive(Debug)]
struct Shared(Arc<SpillDisk>);

impl Disk for Shared {
    fn begin(&self, transfer: Transfer) -> Result<(), Transfer> {
        self.0.begin(transfer)
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
        self.0.discard(first, count);
    }
}

/// The areas, as the store has them.
#[derive(Clone, Debug)]
pub(crate) struct SharedAreas(Arc<Areas>);

impl Backing for SharedAreas {
    fn submit(&self, requests: &mut [Request<'_>]) {
        self.0.submit(requests);
    }

    fn flush(&self) {
        self.0.flush();
    }

    fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
        self.0.poll(each);
    }

    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    fn discard(&self, location: Location, length: usize) {
        self.0.discard(location, length);
    }

    fn pause(&self) {
        self.0.pause();
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Place {
    areas: Arc<Areas>,
    disks: Vec<Arc<SpillDisk>>,
    ended: Arc<EventFd>,
}

impl Place {
    /// Opens everything, in the calling thread's table of files.
    ///
    /// # Errors
    ///
    /// See [`PlaceError`].
    pub(crate) fn open(
        places: &Places,
        limit_bytes: u64,
        unit_bytes: usize,
    ) -> Result<Place, PlaceError> {
        let system = |what| move |errno| PlaceError::System { what, errno };
        if let Some(given) = places.limit_bytes.filter(|given| *given < SPILL_BYTES_MIN) {
            return Err(PlaceError::Limit { given });
        }
        let most = AREAS_MAX;
        if places.paths.len() > most {
            return Err(PlaceError::TooMany { most });
        }
        let spill_bytes = places.limit_bytes.unwrap_or_else(|| default_limit(&places.paths));
        let buffers = (limit_bytes / BUFFERS_SHARE).clamp(BUFFERS_MIN, BUFFERS_MAX);
        let areas = Arc::new(Areas::new(Config {
            object_bytes_max: unit_bytes,
            buffer_bytes: usize::try_from(buffers).unwrap_or(usize::MAX),
            limit_bytes: spill_bytes,
        }));
        let ended = Arc::new(EventFd::new().map_err(system("an event descriptor"))?);
        let mut disks = Vec::new();
        for (path, priority) in &places.paths {
            let bytes = spill_bytes.min(u64::from(SLOTS_MAX) * SLOT_BYTES as u64);
            let bytes = bytes - bytes % SLOT_BYTES as u64;
            let medium = Medium::open(path, bytes, SPILL_BYTES_MIN).map_err(PlaceError::Path)?;
            let slots = u32::try_from(medium.slots()).unwrap_or(SLOTS_MAX).min(SLOTS_MAX);
            let disk = SpillDisk::new(medium, DEPTH, Arc::clone(&ended), Sender::Thread);
            let disk = Arc::new(disk);
            let seal = new_key().map_err(system("locked memory for a key"))?;
            disks.push(Arc::clone(&disk));
            let disk = Box::new(Shared(disk));
            let new = NewArea { disk, slots, priority: *priority, seal };
            areas.add(new).map_err(|_| PlaceError::TooMany { most })?;
        }
        Ok(Place { areas, disks, ended })
    }

    /// What the store is given.
    pub(crate) fn backing(&self) -> SharedAreas {
        SharedAreas(Arc::clone(&self.areas))
    }

    /// Each needs a thread that calls [`SpillDisk::serve`].
    pub(crate) fn disks(&self) -> &[Arc<SpillDisk>] {
        &self.disks
    }

    /// Readable while a transfer has ended that nobody has asked for yet.
    pub(crate) fn ended(&self) -> &EventFd {
        &self.ended
    }

    /// Reads that did not open: what is on the disk is not what was written.
    pub(crate) fn tampered(&self) -> u64 {
        self.areas.stats().tampered
    }
}

/// A random key, in memory of its own.
fn new_key() -> Result<Seal, Errno> {
    let memory = Box::new(KeyPage(Secret::new()?));
    let mut secret = [0; SECRET_BYTES];
    random::fill(&mut secret)?;
    Ok(Seal::new(memory, &mut secret))
}

/// Half of what is free where the first path is, since other users of the disk need some too; of a device all.
fn default_limit(paths: &[(PathBuf, i32)]) -> u64 {
    let has = |path: &Path| match disk::kind(path) {
        Ok(Kind::Device(_)) => u64::from(SLOTS_MAX) * SLOT_BYTES as u64,
        _ => disk::free_bytes(path).unwrap_or(0) / 2,
    };
    paths.first().map_or(0, |(path, _)| has(path)).max(SPILL_BYTES_MIN)
}
