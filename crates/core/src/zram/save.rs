//! Save and load: the contents of a disk as a file.
//!
//! Units are in the file as they are stored, compressed, wherever they are: those on the backing are fetched for
//! that, some at a time. Each is decompressed and compared with its checksum before it is saved, and again when it is
//! loaded: so a disk that was saved can be loaded, and what is loaded is what clients had written (`ZRAM-1`). A unit
//! that is lost is noted as such, and cannot be read from the loaded disk either: one bad unit does not cost the
//! others. One that cannot be read now is noted so too by the last save of a disk that ends anyway
//! ([`Unread::IsLost`]); any other save fails.
//!
//! Clients go on meanwhile. The file has each unit as it was at some moment between begin and end of the save; what was
//! written before the begin, and not since, is as it was written. It is no snapshot: of two writes during the save it
//! may have the later one only.

mod format;
#[cfg(any(test, fuzzing))]
pub mod script;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::atomic::Ordering::Relaxed;

use super::slot::SlotLock;
use super::table::UNITS_MAX;
use super::writeback::Why;
use super::{FETCH_BYTES, Zram};
use crate::store::{self, CodecId, Form, Incoming, Loaded, Ticket};
use crate::zcomp::{Params, Zcomp};
use crate::zsmalloc::PageSource;

pub use format::{Error as FormatError, Header, NOTES_BYTES_MAX, Reader};
use format::{Record, Writer};

/// Units that are looked at together, so that those on the backing are fetched together.
const UNITS_AT_ONCE: usize = 256;

/// What a save does with a unit that cannot be read now, and perhaps later. One that is lost is noted as lost anyway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unread {
    /// The save fails: another one may succeed.
    Fails,
    /// The unit is noted as lost: there is no other save, and the other units need not be lost too.
    IsLost,
}

/// Why a disk is not saved.
#[derive(Debug)]
#[non_exhaustive]
pub enum SaveError {
    /// A unit cannot be read now.
    Unread {
        /// The unit's index.
        unit: u64,
        /// Why.
        error: store::Error,
    },
    /// An algorithm of the disk is of another implementer, and has no name that could be looked up.
    Algorithm,
    /// The disk is about to end.
    Halted,
    /// The system's.
    Io(io::Error),
}

impl fmt::Display for SaveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SaveError::Unread { unit, error } => write!(f, "unit {unit} {error}"),
            SaveError::Algorithm => f.write_str("an algorithm of the disk cannot be named"),
            SaveError::Halted => f.write_str("the disk ends"),
            SaveError::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for SaveError {}

/// Why a saved disk is not loaded. The disk is to be dropped then.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is not what was saved.
    Format(FormatError),
    /// A unit is not what its checksum says.
    Unit {
        /// The unit's index.
        unit: u64,
        /// Why.
        error: store::Error,
    },
    /// It needs more memory than the limit allows.
    NoSpace {
        /// The limit.
        limit_bytes: u64,
    },
    /// The system has no memory.
    NoMemory,
    /// The disk is about to end.
    Halted,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Format(error) => write!(f, "{error}"),
            LoadError::Unit { unit, error } => write!(f, "unit {unit} {error}"),
            LoadError::NoSpace { limit_bytes } => {
                write!(f, "the contents need more memory than the limit of {limit_bytes} bytes")
            }
            LoadError::NoMemory => f.write_str("the system has no memory"),
            LoadError::Halted => f.write_str("the disk ends"),
        }
    }
}

impl std::error::Error for LoadError {}

impl From<FormatError> for LoadError {
    fn from(error: FormatError) -> LoadError {
        LoadError::Format(error)
    }
}

/// What was saved or loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Saved {
    /// Units.
    pub units: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Units that are lost, of those.
    pub lost: u64,
    /// Units that this save could not read, of those: they were not lost before.
    pub unread: u64,
}

impl<S: PageSource> Zram<S> {
    /// Writes the contents of the disk, and the [`notes`](Header::notes) of its servers.
    ///
    /// # Errors
    ///
    /// See [`SaveError`]. What was written is not a saved disk then.
    ///
    /// # Panics
    ///
    /// If there are more than [`NOTES_BYTES_MAX`] bytes of notes.
    pub fn save(&self, cpu: usize, notes: &[u8], to: &mut dyn Write) -> Result<Saved, SaveError> {
        self.save_as(cpu, notes, Unread::Fails, to)
    }

    /// The same; `unread` says what becomes of units that cannot be read now.
    ///
    /// # Errors
    ///
    /// As [`Zram::save`].
    ///
    /// # Panics
    ///
    /// As [`Zram::save`].
    pub fn save_as(
        &self,
        cpu: usize,
        notes: &[u8],
        unread: Unread,
        to: &mut dyn Write,
    ) -> Result<Saved, SaveError> {
        let params = |codec: &Zcomp| codec.params().cloned().ok_or(SaveError::Algorithm);
        let algorithms: Vec<Params> = self.codecs().map(params).collect::<Result<_, _>>()?;
        let key = self.store.key().clone();
        let (disk_bytes, unit, notes) = (self.disk_bytes(), self.unit, notes.to_vec());
        let header = Header { disk_bytes, unit, algorithms, key, notes };
        // A disk that grows meanwhile has more units.
        let units = header.disk_bytes / self.unit.bytes() as u64;
        let mut writer = Writer::begin(&header, to).map_err(SaveError::Io)?;
        let mut scratch = vec![0; self.unit.bytes()];
        let mut all = self.table.slots(0, units.min(UNITS_MAX));
        let at_once = (4 * FETCH_BYTES / self.unit.bytes()).clamp(1, UNITS_AT_ONCE);
        let (mut saved, mut stuck_at) = (Saved::default(), None);
        loop {
            let some: Vec<(u64, &SlotLock)> = all.by_ref().take(at_once).collect();
            if some.is_empty() {
                break;
            }
            let away = |(_, lock): &(u64, &SlotLock)| self.away(&lock.lock());
            // Whoever notes one waits for it. If that fails, the others need not stay in memory.
            self.store.fetch(some.iter().filter_map(away), |_| false);
            for (unit, lock) in some {
                if self.is_halted.load(Relaxed) {
                    return Err(SaveError::Halted);
                }
                let mut wait = |ticket| self.await_saved(ticket, &mut stuck_at);
                let noted = self.save_unit(cpu, unit, lock, &mut scratch, &mut writer, &mut wait);
                let noted = noted.or_else(|error| {
                    if error.is_transient() && unread == Unread::Fails {
                        return Err(SaveError::Unread { unit, error });
                    }
                    saved.lost += 1;
                    saved.unread += u64::from(error.is_transient());
                    scratch.fill(0);
                    self.note_lost(unit, &scratch, &mut writer);
                    Ok(true)
                });
                if noted? {
                    writer.put().map_err(SaveError::Io)?;
                    saved.units += 1;
                }
            }
        }
        saved.bytes = writer.end().map_err(SaveError::Io)?;
        Ok(saved)
    }

    /// Waits for a unit. After one such wait for a backing that ends nothing there is no other until it has ended
    /// something: else each unit that is there would take as long. `stuck_at`: how much it had ended by then.
    fn await_saved(&self, ticket: Ticket, stuck_at: &mut Option<u64>) -> Result<(), store::Error> {
        self.store.poll();
        let before = self.store.completions();
        if *stuck_at == Some(before) {
            let expected = ticket.checksum();
            return Err(store::Error::Unreadable { expected, is_transient: true });
        }
        self.store.wait(ticket).inspect_err(|error| {
            let is_stuck = error.is_transient() && self.store.completions() == before;
            *stuck_at = is_stuck.then_some(before);
        })
    }

    /// Notes a unit as it is now. False: it has no entry.
    fn save_unit(
        &self,
        cpu: usize,
        unit: u64,
        lock: &SlotLock,
        scratch: &mut [u8],
        writer: &mut Writer<'_>,
        wait: &mut dyn FnMut(Ticket) -> Result<(), store::Error>,
    ) -> Result<bool, store::Error> {
        loop {
            let mut slot = lock.lock();
            if slot.is_apart() {
                let whole = 0..scratch.len();
                let away = self.read_apart(cpu, unit, &slot, whole, scratch)?;
                if let Some(ticket) = away {
                    drop(slot);
                    wait(ticket)?;
                    continue;
                }
                // A unit whose copy was away takes more memory than its pages did.
                let has_room = self.away(&slot).is_none()
                    || self.limit.reserve(self, 1, scratch.len(), 0).is_some();
                if !has_room || self.join_as(cpu, unit, &mut slot, scratch).is_err() {
                    self.note_as_it_is(unit, scratch, writer);
                    return Ok(true);
                }
            }
            let Some(entry) = &slot.entry else { return Ok(false) };
            let mut incoming = [Incoming::new(entry, scratch)];
            self.store.load(cpu, &mut incoming);
            let ticket: Ticket = match incoming[0].outcome {
                Loaded::Whole => match self.store.image(entry) {
                    Ok((form, checksum, object)) => {
                        let has_no_codec = slot.has_no_codec();
                        let bytes = object.as_deref().unwrap_or_default();
                        writer.note(&Record {
                            unit,
                            form,
                            has_no_codec,
                            is_lost: false,
                            checksum,
                            object: bytes,
                        });
                        // While it is pinned it cannot leave the pool.
                        drop(object);
                        self.store.put_away(entry);
                        return Ok(true);
                    }
                    // It was on its way, and has just left.
                    Err(ticket) => ticket,
                },
                Loaded::Away(ticket) => ticket,
                Loaded::Lost(error) => return Err(error),
                Loaded::Pending => unreachable!("a load says what became of each unit"),
            };
            drop(slot);
            wait(ticket)?;
        }
    }

    /// Notes a unit that cannot be joined now, uncompressed.
    fn note_as_it_is(&self, unit: u64, bytes: &[u8], writer: &mut Writer<'_>) {
        let checksum = self.store.key().checksum(bytes);
        let (form, object) = match checksum.is_of_word() {
            true => (Form::SameFilled, &[][..]),
            false => (Form::Incompressible(CodecId::FIRST), bytes),
        };
        let (has_no_codec, is_lost) = (false, false);
        writer.note(&Record { unit, form, has_no_codec, is_lost, checksum, object });
    }

    /// Notes a unit that is lost, with a checksum that no unit has: the hash of zeros, which as a unit have their word
    /// instead. With its own checksum a client that writes the lost contents again would find them there already.
    fn note_lost(&self, unit: u64, zeros: &[u8], writer: &mut Writer<'_>) {
        let (form, checksum) = (Form::Incompressible(CodecId::FIRST), self.store.key().hash(zeros));
        let (has_no_codec, is_lost) = (false, true);
        writer.note(&Record { unit, form, has_no_codec, is_lost, checksum, object: &[] });
    }

    /// Fills an empty disk with what a saved one had. Its size, unit, codecs and key are those of the reader's header.
    ///
    /// # Errors
    ///
    /// See [`LoadError`].
    ///
    /// # Panics
    ///
    /// If unit or codecs are others.
    pub fn load_saved<R: Read>(
        &self,
        cpu: usize,
        reader: &mut Reader<R>,
    ) -> Result<Saved, LoadError> {
        let header = reader.header();
        assert_eq!((self.unit, self.codecs().count()), (header.unit, header.algorithms.len()));
        assert_eq!(self.disk_bytes(), header.disk_bytes);
        let (mut saved, mut scratch) = (Saved::default(), vec![0; self.unit.bytes()]);
        while let Some(record) = reader.next()? {
            if self.is_halted.load(Relaxed) {
                return Err(LoadError::Halted);
            }
            self.load_unit(cpu, &record, &mut scratch)?;
            saved.units += 1;
            saved.lost += u64::from(record.is_lost);
        }
        saved.bytes = reader.position();
        Ok(saved)
    }

    fn load_unit(
        &self,
        cpu: usize,
        record: &Record<'_>,
        scratch: &mut [u8],
    ) -> Result<(), LoadError> {
        let limit_bytes = self.limit.get();
        // Nothing is reserved: all of this was below the limit when it was saved, in another order (LIM-1). What was on
        // the backing has to go there again, whatever the budget says.
        let look = || {
            if !self.limit.is_passed(self) {
                return Ok(());
            }
            // What has left for the backing leaves pages behind that the pool keeps.
            self.make_room();
            let is_passed = self.limit.is_passed(self);
            if is_passed { Err(super::Error::NoSpace { limit_bytes }) } else { Ok(()) }
        };
        let has_room = self.with_room(cpu, Why::Asked, look);
        has_room.map_err(|_| LoadError::NoSpace { limit_bytes })?;
        let Record { unit, form, has_no_codec, is_lost, checksum, object } = *record;
        let lock = self.table.make(unit).map_err(|_| LoadError::NoMemory)?;
        let object = if is_lost { in_place_of_lost(scratch) } else { object };
        let entry = self.store.insert(form, checksum, object, &self.figures);
        let entry = entry.map_err(|_| LoadError::NoMemory)?;
        let mut slot = lock.lock();
        debug_assert!(slot.entry.is_none(), "the disk was empty");
        // From here on reset() and the end of the disk find it.
        let entry = slot.entry.insert(entry);
        let mut incoming = [Incoming::new(entry, scratch)];
        self.store.load(cpu, &mut incoming);
        match incoming[0].outcome {
            Loaded::Lost(_) if is_lost => {}
            Loaded::Lost(error) => return Err(LoadError::Unit { unit, error }),
            _ => {}
        }
        slot.renew(self.now_s.load(Relaxed));
        if has_no_codec {
            slot.note_no_codec();
        }
        let is_huge = matches!(form, store::Form::Incompressible(CodecId::FIRST));
        self.huge_since.fetch_add(u64::from(is_huge), Relaxed);
        Ok(())
    }
}

/// An object for a unit that is lost. Its checksum is another than the one that is noted for such a unit: so each read
/// of it fails.
fn in_place_of_lost(scratch: &mut [u8]) -> &[u8] {
    scratch.fill(0);
    scratch[0] = 1;
    scratch
}
