//! Entries as they are stored, for whoever keeps them elsewhere: a disk that is saved, and loaded again.

#![forbid(unsafe_code)]

use super::batch::{Outgoing, Reject, Tally, Ticket};
use super::checksum::{Checksum, Key};
use super::codecs::CodecId;
use super::entry::{EntryId, Place};
use super::{Form, Store};
use crate::stats::Figures;
use crate::zsmalloc::{PageSource, Pinned};

/// How a unit is stored, its checksum, and its object; a same-filled unit has none.
pub(crate) type Image<'s> = (Form, Checksum, Option<Pinned<'s>>);

impl<S: PageSource> Store<S> {
    /// With which checksums are taken.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// How an entry's unit is stored, and its object, which stays where it is meanwhile. That these are the bytes that
    /// were stored is known only after a load.
    ///
    /// # Errors
    ///
    /// It is on the backing.
    pub(crate) fn image(&self, entry: &EntryId) -> Result<Image<'_>, Ticket> {
        let (form, checksum) = (self.form(entry), self.checksum(entry));
        if form == Form::SameFilled {
            return Ok((form, checksum, None));
        }
        match self.away(entry) {
            Some(ticket) => Err(ticket),
            None => match self.pool.pin(entry.0) {
                Some(object) => Ok((form, checksum, Some(object))),
                // It has just left (ROW-3).
                None => Err(self.ticket(entry)),
            },
        }
    }

    /// Makes an entry of what [`Store::image`] of a store with this key and these codecs has returned. Whether it is
    /// that is known only after a load.
    ///
    /// # Errors
    ///
    /// The pool got no memory.
    ///
    /// # Panics
    ///
    /// If the object is longer than a unit, or a unit that has one has an empty one.
    pub(crate) fn insert(
        &self,
        form: Form,
        checksum: Checksum,
        object: &[u8],
        figures: &Figures,
    ) -> Result<EntryId, Reject> {
        let (place, codec, is_raw) = match form {
            Form::SameFilled => (Place::SameFilled, CodecId::FIRST, false),
            Form::Compressed(codec) => (Place::Pool, codec, false),
            Form::Incompressible(codec) => (Place::Pool, codec, true),
        };
        let handle = match place {
            Place::SameFilled => self.pool.take_handle(),
            _ => self.pool.store(object),
        };
        let handle = handle.map_err(|_| Reject::AllocFail)?;
        let (mut unit, mut stored) = (Outgoing::default(), Tally::default());
        unit.checksum = checksum;
        self.begin(handle, (place, codec, is_raw), object.len(), &mut unit, &mut stored);
        stored.add_to(figures);
        if place == Place::Pool {
            self.mark(handle);
        }
        Ok(unit.stored.take().expect("begin() sets it"))
    }
}
