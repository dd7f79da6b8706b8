//! One entry: its row, and the states that the row goes through.
//!
//! An [`EntryId`] is a handle of the pool. The row is what stands beside that handle in the pool's table: the
//! slot, which says where the object is, and four words of the store's:
//!
//! ```text
//! word 0, 1, 2       the lower 96 bits of the checksum; of a same-filled unit, its word
//! word 3   31..16    the upper 16 bits of the checksum
//!          15        came: since its last read that failed its bytes have come, and the pool had no room for them; in
//!                    writing: it was chosen to be written
//!          14        unread: its last read failed, and another may succeed
//!          13        fresh: it was fetched lately, and not loaded since: it stays in the pool (`fresh.rs`)
//!          12        wanted: somebody waits to load it, so it stays in the pool until then
//!          11        kept: the backing has the bytes too (`kept.rs`)
//!          10..9     age: how many looks of the walker it is still protected from
//!          8         failed: it cannot be read: the backing said so, or the object in the pool is damaged
//!          7         raw: the object is the unit as it is
//!          6..3      codec: with which it was compressed, and so how long the unit is
//!          2..0      place
//! ```
//!
//! The place moves as follows. `O` is the owner of the [`EntryId`]. `W` is the walker, or whoever completes a
//! request: both hold the lock of rank `RANK_BACKING`. Two steps are made without it: `begin_read`, which succeeds
//! for one caller only, and the step back if the backing refuses that read.
//!
//! ```text
//!               O: store             W: begin_write            W: written
//!   vacant -------------------> pool ---------------> writing --------------> backing
//!     ^  |                      ^ ^ |     W: failed, or   | |                 |  ^  |
//!     |  | O: store             | | |     somebody reads  | | O: end          |  |  |
//!     |  +--> same-filled --+   | +-|---------------------+ v                 |  |  |
//!     |                     |   |   |                 writing, dead           |  |  |
//!     |       O: end        |   |   | O: end                |                 |  |  |
//!     +---------------------+   |   |                       | W: written,     |  |  |
//!     +-------------------------|---+                       | or failed       |  |  |
//!     +-------------------------|---------------------------+                 |  |  |
//!     |                         |           W: read           W: begin_read   |  |  |
//!     |                         +--------------------- reading <--------------+  |  |
//!     |                                                 | |     W: failed          |  |
//!     |                          reading, dead <--------+ +----------------------+  |
//!     | W: read, or failed            |        O: end                               | O: end
//!     +-------------------------------+                                             |
//!     +-----------------------------------------------------------------------------+
//! ```
//!
//! An entry that was fetched and keeps its location goes from `pool` through `writing` to `backing` without a
//! request, all in one go under the lock.
//!
//! # Invariants
//!
//! - `ROW-2` The state of a handle that no entry has is 0, and nobody but the thread that took the handle
//!   changes it.
//! - `ROW-3` In `pool` the slot has an object. In `writing` it has one too, but for the moment between
//!   `Pool::send_away` and the step to `backing`, both under the lock. In `backing` and `reading` it has the
//!   location; in `reading` it may have the object already, likewise under the lock.
//! - `ROW-4` Words 0 to 2 and the checksum, codec and raw bits of word 3 stay as they are from `store` to the
//!   end of the entry.
//! - `ROW-5` Only the owner makes a living entry dead or vacant; only the walker makes a dead one vacant.

use std::fmt;
use std::sync::atomic::{
    AtomicU32, Ordering, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};

use super::checksum::Checksum;
use super::codecs::{CODECS_MAX, CodecId};
use crate::zsmalloc::Handle;

/// Words of a row, beside the slot.
pub(super) const ROW_WORDS: usize = 4;

/// Names one stored unit, until it is invalidated.
///
/// Not `Copy`: `STORE-1` is kept by moving it into `Store::invalidate`.
#[derive(PartialEq, Eq)]
#[must_use = "an entry that is dropped leaks its memory: invalidate it"]
pub struct EntryId(pub(super) Handle);

const _: () = assert!(size_of::<EntryId>() == 4 && size_of::<Option<EntryId>>() == 4);

impl fmt::Debug for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EntryId({})", self.0.to_raw())
    }
}

/// Where an entry is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Vacant,
    SameFilled,
    Pool,
    Writing,
    WritingDead,
    Backing,
    Reading,
    ReadingDead,
}

const PLACES: [Place; 8] = [
    Place::Vacant,
    Place::SameFilled,
    Place::Pool,
    Place::Writing,
    Place::WritingDead,
    Place::Backing,
    Place::Reading,
    Place::ReadingDead,
];

const PLACE: u32 = 0b111;
const CODEC_SHIFT: u32 = 3;
const CODEC: u32 = 0b1111 << CODEC_SHIFT;
const RAW: u32 = 1 << 7;
const FAILED: u32 = 1 << 8;
const AGE_SHIFT: u32 = 9;
const AGE: u32 = 0b11 << AGE_SHIFT;
const KEPT: u32 = 1 << 11;
const WANTED: u32 = 1 << 12;
const FRESH: u32 = 1 << 13;
const UNREAD: u32 = 1 << 14;
const CAME: u32 = 1 << 15;
/// In `writing`, where no read can have failed.
const CHOSEN: u32 = CAME;
/// Either keeps an entry in the pool until it was loaded once.
const STAYS: u32 = WANTED | FRESH;
const CHECKSUM_SHIFT: u32 = 16;

/// The age of an entry that was just stored: the walker passes it once.
const AGE_STORED: u32 = 1 << AGE_SHIFT;

const _: () = {
    assert!(CODECS_MAX == 1 << CODEC.count_ones());
    assert!(AGE < 1 << CHECKSUM_SHIFT && AGE_STORED & !AGE == 0);
    let bits = PLACE | CODEC | RAW | FAILED | AGE | KEPT | WANTED | FRESH | UNREAD | CAME;
    assert!(bits == (1 << CHECKSUM_SHIFT) - 1);
};

/// Looks of the walker after which an entry is taken whose age was the highest.
pub(super) const AGES: u32 = 1 + (AGE >> AGE_SHIFT);

/// Word 3 of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u32);

impl State {
    pub(super) const VACANT: State = State(0);

    fn new(place: Place, codec: CodecId, is_raw: bool, checksum: u16) -> State {
        let codec = u32::try_from(codec.get()).expect("below CODECS_MAX");
        let raw = if is_raw { RAW } else { 0 };
        let checksum = u32::from(checksum) << CHECKSUM_SHIFT;
        State(checksum | AGE_STORED | raw | codec << CODEC_SHIFT | place as u32)
    }

    pub(super) fn place(self) -> Place {
        PLACES[(self.0 & PLACE) as usize]
    }

    pub(super) fn codec(self) -> CodecId {
        CodecId::new(((self.0 & CODEC) >> CODEC_SHIFT) as usize).expect("4 bits")
    }

    pub(super) fn is_same_filled(self) -> bool {
        self.place() == Place::SameFilled
    }

    /// Whether the object is the unit as it is.
    pub(super) fn is_raw(self) -> bool {
        self.0 & RAW != 0
    }

    /// Whether the entry cannot be read: the backing said so, or what is in the pool is damaged.
    pub(super) fn has_failed(self) -> bool {
        self.0 & FAILED != 0
    }

    /// Whether the last read failed, and another may succeed.
    pub(super) fn is_unread(self) -> bool {
        self.0 & UNREAD != 0
    }

    /// Whether the entry may not be handed out again: it cannot be read, could not be read last, or is being read,
    /// which may fail. Whoever has its unit stores that anew.
    pub(super) fn is_in_doubt(self) -> bool {
        self.has_failed() || self.is_unread() || self.place() == Place::Reading
    }

    /// Whether its bytes have come since the last read that failed, and the pool had no room for them.
    pub(super) fn has_come(self) -> bool {
        self.0 & CAME != 0
    }

    /// Of one that is being written: whether somebody has chosen it, and not the walker.
    pub(super) fn is_chosen(self) -> bool {
        self.0 & CHOSEN != 0
    }

    /// Whether the entry is in the pool, and the backing has its bytes too.
    pub(super) fn is_kept(self) -> bool {
        self.0 & KEPT != 0
    }

    /// Whether it stays in the pool until it was loaded once.
    fn stays(self) -> bool {
        self.0 & STAYS != 0
    }

    /// Whether it is in the pool and may leave it: entries of the codec `in_pool` stay for good.
    fn may_leave(self, in_pool: Option<CodecId>) -> bool {
        self.place() == Place::Pool && !self.stays() && Some(self.codec()) != in_pool
    }

    fn kept(self, is_kept: bool) -> State {
        State(if is_kept { self.0 | KEPT } else { self.0 & !KEPT })
    }

    fn at(self, place: Place) -> State {
        State(self.0 & !PLACE | place as u32)
    }

    fn protected(self) -> State {
        State(self.0 | AGE)
    }

    /// What a look of the walker makes of it; `None`: it is old.
    ///
    /// An incompressible entry is old one look sooner, so of two of one age it goes first. It frees most memory for a
    /// read later: 4096 bytes for the read of one slot, while a unit that lz4 shrinks to 1615 bytes frees these for the
    /// read of 1.2 slots (`docs/design/spill.md`): 4096 : 1615 / 1.2 is 3 to 1.
    fn older(self) -> Option<State> {
        let young = if self.is_raw() { AGE & !AGE_STORED } else { AGE };
        (self.0 & young != 0).then(|| State(self.0 - (1 << AGE_SHIFT)))
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let age = (self.0 & AGE) >> AGE_SHIFT;
        write!(f, "{:?} {:?} age {age}", self.place(), self.codec())?;
        f.write_str(if self.is_raw() { " raw" } else { "" })?;
        f.write_str(if self.is_kept() { " kept" } else { "" })?;
        f.write_str(if self.0 & WANTED != 0 { " wanted" } else { "" })?;
        f.write_str(if self.0 & FRESH != 0 { " fresh" } else { "" })?;
        f.write_str(if self.is_unread() { " unread" } else { "" })?;
        f.write_str(if self.has_come() { " came" } else { "" })?;
        f.write_str(if self.has_failed() { " failed" } else { "" })
    }
}

/// What a state is kept in: an atomic word, of loom in the tests of `make loom`.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn compare_exchange(&self, now: u32, new: u32) -> Result<u32, u32>;
    fn fetch_or(&self, bits: u32);
    fn fetch_and(&self, bits: u32);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }

    fn compare_exchange(&self, now: u32, new: u32) -> Result<u32, u32> {
        AtomicU32::compare_exchange(self, now, new, AcqRel, Acquire)
    }

    fn fetch_or(&self, bits: u32) {
        AtomicU32::fetch_or(self, bits, Relaxed);
    }

    fn fetch_and(&self, bits: u32) {
        AtomicU32::fetch_and(self, bits, Relaxed);
    }
}

/// The owner has ended an entry while a request for it was in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Dead;

/// Why the bytes of an entry did not come from the backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotRead {
    /// The backing was busy.
    Untried,
    /// They came, and the pool had no room for them.
    NoRoom,
    /// The backing failed. Another try may succeed.
    Failed,
    /// No other try will succeed.
    Lost,
}

/// The state of one row, and the steps of the diagram above.
///
/// A step's compare-and-swap acquires what the step before released: who sees `pool` sees words, slot and
/// object; who sees `backing` sees the location.
#[derive(Debug)]
pub(super) struct Cell<'a, W: Word>(pub(super) &'a W);

impl<W: Word> Clone for Cell<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W: Word> Copy for Cell<'_, W> {}

impl<W: Word> Cell<'_, W> {
    /// The state at this moment.
    pub(super) fn load(self) -> State {
        // Acquire: pairs with the Release in begin() and with change().
        State(self.0.load(Acquire))
    }

    /// Begins an entry: words and slot are written.
    fn begin(self, state: State) {
        debug_assert_eq!(self.0.load(Relaxed), 0, "ROW-2");
        // Release: pairs with the Acquire in load() and change().
        self.0.store(state.0, Ordering::Release);
    }

    /// Ends a dead entry, or one that is nobody else's.
    pub(super) fn vacate(self) {
        // Release: whoever takes the handle next, through the pool's locks, finds 0.
        self.0.store(State::VACANT.0, Ordering::Release);
    }

    /// Moves on as `step` says; returns the state before, or the one for which `step` says `None`.
    fn change(self, step: impl Fn(State) -> Option<State>) -> Result<State, State> {
        let mut now = self.load();
        loop {
            let Some(next) = step(now) else { return Err(now) };
            match self.0.compare_exchange(now.0, next.0) {
                Ok(_) => return Ok(now),
                Err(other) => now = State(other),
            }
        }
    }

    /// The owner ends the entry. What it was: a living entry in flight is dead now, and whoever completes
    /// the request frees what it has; else the entry is vacant, and the caller frees that.
    pub(super) fn end(self) -> State {
        let ended = self.change(|state| match state.place() {
            Place::SameFilled | Place::Pool | Place::Backing => Some(State::VACANT),
            Place::Writing => Some(state.at(Place::WritingDead)),
            Place::Reading => Some(state.at(Place::ReadingDead)),
            Place::Vacant | Place::WritingDead | Place::ReadingDead => None,
        });
        ended.unwrap_or_else(|state| panic!("STORE-1: an entry that is {state:?} is invalidated"))
    }

    /// The owner has just loaded the entry, or stored the same again: the walker passes it for longest.
    pub(super) fn protect(self) {
        self.0.fetch_or(AGE);
        if self.load().stays() {
            self.0.fetch_and(!STAYS);
        }
    }

    /// Enough others were fetched since this entry was: the walker takes it like any other. Another entry may have the
    /// handle by now, or none: nothing is lost by it.
    pub(super) fn let_go(self) {
        let is_fresh = |state: State| state.place() == Place::Pool && state.0 & FRESH != 0;
        self.change(|state| is_fresh(state).then_some(State(state.0 & !FRESH))).ok();
    }

    /// The entry need not stay in the pool until it was loaded: its owner has its bytes; or, in a child of `fork`, who
    /// waits for it are threads of the parent's. As in `let_go`, another entry may have the handle then.
    pub(super) fn forget_waiters(self) {
        let stays = |state: State| state.place() == Place::Pool && state.stays();
        self.change(|state| stays(state).then_some(State(state.0 & !STAYS))).ok();
    }

    /// The walker looks at the entry: one in the pool becomes older, or, if it is old, is being written from
    /// now on; then its state before is returned. One of the codec `in_pool` is passed over.
    pub(super) fn begin_write(self, in_pool: Option<CodecId>) -> Option<State> {
        let looked = self.change(|state| {
            let next = || state.older().unwrap_or_else(|| state.at(Place::Writing));
            state.may_leave(in_pool).then(next)
        });
        looked.ok().filter(|before| before.older().is_none())
    }

    /// An entry was chosen: if it is in the pool, it is being written from now on, however old it is; then its state
    /// before is returned. One that somebody waits to load stays, and so does one of the codec `in_pool`.
    pub(super) fn begin_write_chosen(self, in_pool: Option<CodecId>) -> Option<State> {
        let chosen = |state: State| State(state.at(Place::Writing).0 | CHOSEN);
        self.change(|state| state.may_leave(in_pool).then(|| chosen(state))).ok()
    }

    /// An entry that keeps its location is about to leave the pool, if it need not stay until it was loaded. False: it
    /// is no such entry.
    pub(super) fn begin_return_unused(self) -> bool {
        let may_return = |state: State| state.is_kept() && state.may_leave(None);
        self.change(|state| may_return(state).then(|| state.at(Place::Writing))).is_ok()
    }

    /// The same, whoever waits to load it.
    pub(super) fn begin_return(self) -> bool {
        let is_at_both = |state: State| state.place() == Place::Pool && state.is_kept();
        self.change(|state| is_at_both(state).then(|| state.at(Place::Writing))).is_ok()
    }

    /// The write is done, and the slot says where the bytes are. Those of an entry that kept its location are as they
    /// were, whatever has become of its object.
    pub(super) fn written(self) -> Result<(), Dead> {
        let away = |state: State| {
            let over = if state.is_kept() { STAYS | FAILED } else { STAYS };
            State(state.at(Place::Backing).kept(false).0 & !(over | CHOSEN))
        };
        self.complete(Place::Writing, away)
    }

    /// What is in the pool is not what was stored. An entry that has just left the pool is as good as what the backing
    /// has.
    #[cold]
    pub(super) fn spoil(self) {
        let is_here = |state: State| matches!(state.place(), Place::Pool | Place::Writing);
        self.change(|state| is_here(state).then_some(State(state.0 | FAILED))).ok();
    }

    /// From now on the entry is in the pool only: its location is needed for another, or its owner wants none. False:
    /// the entry is on its way out, or ending; or what is in the pool is damaged, so that the backing has the only good
    /// copy.
    pub(super) fn give_up(self) -> bool {
        let is_at_both = |state: State| state.place() == Place::Pool && state.is_kept();
        let may_give = |state: State| is_at_both(state) && !state.has_failed();
        self.change(|state| may_give(state).then(|| state.kept(false))).is_ok()
    }

    /// The write failed, or somebody reads the object: it stays in the pool.
    pub(super) fn not_written(self) -> Result<(), Dead> {
        let here = |state: State| State(state.at(Place::Pool).protected().0 & !CHOSEN);
        self.complete(Place::Writing, here)
    }

    /// Somebody fetches an entry from the backing. `is_wanted`: he waits to load it. `Err`: the entry is not there, or
    /// cannot be read.
    pub(super) fn begin_read(self, is_wanted: bool) -> Result<(), State> {
        let begun = self.change(|state| {
            let readable = state.place() == Place::Backing && !state.has_failed();
            let wanted = if is_wanted { WANTED } else { 0 };
            readable.then(|| State(state.at(Place::Reading).0 & !UNREAD | wanted))
        });
        begun.map(|_| ())
    }

    /// Somebody waits to load an entry that is being fetched for another reason.
    pub(super) fn want(self) {
        let wanted = |state: State| State(state.0 | WANTED);
        self.change(|state| (state.place() == Place::Reading).then_some(wanted(state))).ok();
    }

    /// Somebody who waited to load the entry has stopped. Others who wait say so again when they look the next time;
    /// until then it stays as long as any other that was fetched. As in `let_go`, another entry may have the handle by
    /// now.
    pub(super) fn unwant(self) {
        let may_be = |state: State| matches!(state.place(), Place::Reading | Place::Pool);
        let is_wanted = |state: State| may_be(state) && state.0 & WANTED != 0;
        self.change(|state| is_wanted(state).then_some(State(state.0 & !WANTED))).ok();
    }

    /// The read is done, and the slot has the object. `is_kept`: the backing has the bytes too.
    pub(super) fn read(self, is_kept: bool) -> Result<(), Dead> {
        self.complete(Place::Reading, |state| {
            State(state.at(Place::Pool).protected().kept(is_kept).0 & !CAME | FRESH)
        })
    }

    /// The bytes did not come. Whoever waits for them says so again when he asks for them again.
    pub(super) fn not_read(self, why: NotRead) -> Result<(), Dead> {
        let (bit, over) = match why {
            NotRead::Untried => (0, 0),
            NotRead::NoRoom => (CAME, 0),
            NotRead::Failed => (UNREAD, CAME),
            NotRead::Lost => (FAILED, CAME),
        };
        let over = over | WANTED;
        self.complete(Place::Reading, |state| State(state.at(Place::Backing).0 & !over | bit))
    }

    fn complete(self, from: Place, to: impl Fn(State) -> State) -> Result<(), Dead> {
        let completed = self.change(|state| (state.place() == from).then(|| to(state)));
        completed.map(|_| ()).map_err(|state| {
            let dead = matches!(state.place(), Place::WritingDead | Place::ReadingDead);
            debug_assert!(dead, "ROW-5: {state:?} while a request from {from:?} was in flight");
            Dead
        })
    }
}

/// The words of one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a>(pub(super) &'a [AtomicU32]);

impl<'a> Row<'a> {
    /// The state.
    pub(super) fn cell(self) -> Cell<'a, AtomicU32> {
        Cell(&self.0[ROW_WORDS - 1])
    }

    /// Begins an entry whose handle was just taken, and whose object is stored if it has one. Returns its state.
    pub(super) fn begin(
        self,
        place: Place,
        codec: CodecId,
        is_raw: bool,
        checksum: Checksum,
    ) -> State {
        let (words, rest) = checksum.to_words();
        for (cell, word) in self.0.iter().zip(words) {
            // Relaxed: released with the state, by begin().
            cell.store(word, Relaxed);
        }
        let state = State::new(place, codec, is_raw, rest);
        self.cell().begin(state);
        state
    }

    /// The checksum of an entry in this state.
    pub(super) fn checksum(self, state: State) -> Checksum {
        // Relaxed: acquired with the state; they never change (ROW-4).
        let word = |index: usize| self.0[index].load(Relaxed);
        let rest = u16::try_from(state.0 >> CHECKSUM_SHIFT).expect("16 bits are left");
        Checksum::from_words([word(0), word(1), word(2)], rest, state.is_same_filled())
    }
}

#[cfg(test)]
mod tests;
