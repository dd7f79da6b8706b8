//! Entries on their way to the backing and back.
//!
//! [`Store::write_back`] is a clock: a **hand** goes over the rows of the pool's table, in a circle. An entry that
//! is in the pool becomes older at each look, and an old one is written. An entry that was just stored is
//! passed once, one that was just loaded three times: this is its second chance. One that was fetched stays until it
//! was loaded, or others were fetched after it (`fresh.rs`). Handles are given out in
//! rising order while the table grows, by eights to each size class, so the oldest entries go first;
//! later, when handles are used again, the order is that of the ages only.
//!
//! [`Store::write_back_chosen`] takes the same way with entries that somebody else has chosen, of any age. What is
//! compressed with one codec may stay in the pool for good ([`Store::keep_in_pool`]).
//!
//! # Why no byte is lost
//!
//! The object of an entry leaves the pool only after the backing has said that the bytes are written, and a
//! location is discarded only after the object is in the pool again or the entry has ended.
//!
//! *Load against write-back.* A load that sees `pool` or `writing` pins the object. If the pin succeeds, the
//! object stays where it is until the load is done: `Pool::send_away` refuses a pinned object, and then the
//! entry stays in the pool and the new location is discarded. If the pin fails, the object was sent away
//! before, so its bytes are on the backing: the load reports `Away`. Between `send_away` and the step to
//! `backing` the lock is held, and `wait` begins by taking the lock, so the caller's next try finds a state
//! that is true. `fetch` takes none: it may find `writing`, and asks for nothing; then the caller tries again later.
//!
//! *Invalidate against write-back.* Both move the state by compare-and-swap. If the owner comes first, the
//! walker's step from `pool` fails, and the row is no concern of the walker's. If the walker comes first, the
//! owner's step leads to `dead`, and the owner touches neither row nor object from then on (`ROW-5`); the
//! completion finds `dead`, discards the location, and frees object and handle. A request has one completion,
//! so that happens once. No load is in progress, since it would borrow the id that the owner gave up; so
//! the object is not pinned.
//!
//! *Fetch against invalidate.* The same with `backing` and `reading`. Several waiters: one step from `backing`
//! to `reading` succeeds, the others wait for the completion. A ticket may be older than the entry with its
//! handle: `wait` compares checksums, and if they differ the caller's entry has ended, which is not the
//! waiter's failure. To fetch an entry for nobody does no harm.
//!
//! *Completions against each other.* All are handled under the lock, and all writes are submitted under it
//! too, so no completion of a batch is handled while objects of the batch are pinned by `submit`. A read is submitted
//! without it: only who moved the entry to `reading` submits one, and a completion finds the entry there.
//!
//! # Concurrency
//!
//! One lock, of [`RANK_BACKING`]: hand and completions. Reads are submitted without it, and `pause` is called without
//! it. Invalidating takes it never; loading takes it never.
//!
//! Who forks while requests are in flight calls [`Store::drain`] first.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::backing::{
    Backing, Completed, Completion, Failure, Location, Operation, RANK_BACKING, Request, Token,
    Usage,
};
use super::batch::{Error, Ticket};
use super::entry::{AGES, Cell, NotRead, Place, State};
use super::fresh::Fresh;
use super::in_flight::InFlight;
use super::kept::Kept;
use super::{EntryId, Store};
use crate::stats::{add, subtract};
use crate::sync::{Guard, Mutex};
use crate::zcomp::BATCH_MAX;
use crate::zsmalloc::{Handle, PageSource};

/// Times that one `wait` has an entry read, if each read fails but may succeed later.
const TRIES: usize = 3;

/// Times that one `wait` has an entry read in all: others that load it may put it away again each time.
const TURNS: usize = 1000;

/// Pauses of the backing, of a millisecond each unless something ends, in which nothing ends: it is stuck. So long do
/// the kernel's disks wait for a command, too (30 s). A disk that others keep busy may end nothing for seconds.
pub(crate) const STUCK_PAUSES: u32 = 30_000;

/// Walks that find nothing, while nothing is fetched, until what was fetched last may leave. Who lacks memory walks
/// again and again, and a read takes as long as about a hundred walks. With 2 walks a quarter of what was prefetched
/// left before it was used, and was read again. While a read is on its way no walk counts, however long the disk takes:
/// what is held meanwhile is bounded (`fresh.rs`).
const VAIN_WALKS: u32 = 256;

/// The same where entries were chosen: somebody wants these to leave.
const VAIN_REQUESTS: u32 = 2;

/// How many entries give up their locations when the backing refuses a write.
const GIVEN_UP: usize = 64;

/// What a store with a backing has beside it.
#[derive(Debug)]
pub(super) struct Spill {
    backing: Box<dyn Backing>,
    side: Mutex<RANK_BACKING, Side>,
    kept: Kept,
    counters: Counters,
    in_flight: InFlight,
    /// Something was to be written back: from then on ages count.
    is_walked: AtomicBool,
    /// The pool had no room for an entry that came.
    lacks_room: AtomicBool,
}

#[derive(Debug)]
struct Side {
    /// The row that the walker looks at next.
    hand: u32,
    /// The writes that were accepted and are not completed, and their bytes.
    writing: usize,
    writing_bytes: usize,
    fresh: Fresh,
    /// Entries that had been fetched when a walk found nothing, and how many walks have found nothing since then.
    fetched: u64,
    vain_walks: u32,
    /// The pool had no room for what came last.
    lacked_room: bool,
}

type Held<'a> = Guard<'a, RANK_BACKING, Side>;

#[derive(Debug, Default)]
struct Counters {
    units: AtomicU64,
    bytes: AtomicU64,
    raw_units: AtomicU64,
    kept: AtomicU64,
    kept_bytes: AtomicU64,
    completed: AtomicU64,
    writes_ended: AtomicU64,
    written: AtomicU64,
    written_bytes: AtomicU64,
    written_unit_bytes: AtomicU64,
    written_oldest: AtomicU64,
    returned: AtomicU64,
    not_written: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    read: AtomicU64,
    read_unit_bytes: AtomicU64,
    not_read: AtomicU64,
}

/// What is on the backing, and what went to it and came back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SpillStats {
    /// Entries that are on the backing now, and not in the pool.
    pub units: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those of `units` that are incompressible.
    pub raw_units: u64,
    /// Entries that are in the pool, and on the backing too.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// Entries that were written.
    pub written: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// What they were compressed from.
    pub written_unit_bytes: u64,
    /// Those of them that nobody had chosen ([`Store::write_back`]).
    pub written_oldest: u64,
    /// Entries that left the pool without being written, since the backing still had them.
    pub returned: u64,
    /// Writes that were refused, failed, or came to nothing: the entry was wanted meanwhile.
    pub not_written: u64,
    /// Those of them that the backing did not accept: it is busy, or full.
    pub refused: u64,
    /// Writes that were accepted and failed.
    pub failed: u64,
    /// Entries that were fetched.
    pub read: u64,
    /// What they were compressed from.
    pub read_unit_bytes: u64,
    /// Reads that failed.
    pub not_read: u64,
}

/// What one call of [`Store::write_back`] did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WrittenBack {
    /// Writes that the backing accepted.
    pub started: usize,
    /// Writes that it did not accept. The walk ends at the first.
    pub refused: usize,
    /// Entries that left the pool, of this call's writes or of earlier ones.
    pub written: usize,
    /// The bytes of their objects.
    pub bytes: usize,
    /// Entries that stay in the pool: the write failed, or somebody reads the entry.
    pub kept: usize,
    /// Entries in the pool whose places on the backing were given up to make room there: another call may succeed.
    pub given_up: usize,
}

impl Spill {
    pub(super) fn new(backing: Box<dyn Backing>) -> Spill {
        let side = Mutex::new(Side {
            hand: 0,
            writing: 0,
            writing_bytes: 0,
            fresh: Fresh::new(),
            fetched: 0,
            vain_walks: 0,
            lacked_room: false,
        });
        let (kept, counters) = (Kept::new(), Counters::default());
        let [is_walked, lacks_room] = [const { AtomicBool::new(false) }; 2];
        let in_flight = InFlight::default();
        Spill { backing, side, kept, counters, in_flight, is_walked, lacks_room }
    }

    /// Something is to be written back.
    fn note_walk(&self) {
        // Relaxed: who sees it late makes an entry no younger.
        if !self.is_walked.load(Relaxed) {
            self.is_walked.store(true, Relaxed);
        }
    }
}

impl<S: PageSource> Store<S> {
    /// Moves up to `most` entries to the backing, those first that were used least lately; and handles what the
    /// backing has completed. Does nothing without a backing. Does not wait for the backing.
    pub fn write_back(&self, most: usize) -> WrittenBack {
        let mut done = WrittenBack::default();
        let Some(spill) = &self.spill else { return done };
        spill.note_walk();
        let mut side = spill.side.lock();
        self.complete(spill, &mut side, &mut done);
        // Every entry is looked at as often as its age can ask for; the first round may be a short one.
        let (mut rounds, returned) = (AGES + 1, done.written);
        while done.refused == 0 && rounds > 0 {
            let left = most.saturating_sub(done.started + (done.written - returned));
            let mut next = |side: &mut Side| self.next_old(side, &mut rounds);
            if left == 0 || !self.write_some(spill, &mut side, left, &mut next, &mut done) {
                break;
            }
        }
        self.end_write_back(spill, &mut side, &mut done);
        // What is being read may have no room before others leave.
        let is_reading = spill.in_flight.count() > side.writing;
        if !is_reading || side.lacked_room {
            self.note_vain_walk(spill, &mut side, &done, VAIN_WALKS);
        }
        done
    }

    /// Moves the entries of these tickets to the backing, however lately they were used; and handles what the backing
    /// has completed. Passed over are entries that have ended, that somebody waits to load, and that are away or on
    /// their way: so who was refused calls again with the same tickets. Does not wait for the backing.
    pub fn write_back_chosen(&self, chosen: &[Ticket]) -> WrittenBack {
        let mut done = WrittenBack::default();
        let Some(spill) = &self.spill else { return done };
        if !chosen.is_empty() {
            spill.note_walk();
        }
        let mut side = spill.side.lock();
        self.complete(spill, &mut side, &mut done);
        let mut rest = chosen.iter();
        let mut next = |_: &mut Side| rest.find_map(|ticket| self.begin_chosen(*ticket));
        while done.refused == 0
            && self.write_some(spill, &mut side, BATCH_MAX, &mut next, &mut done)
        {}
        self.end_write_back(spill, &mut side, &mut done);
        if !chosen.is_empty() && done.refused == 0 {
            self.note_vain_walk(spill, &mut side, &done, VAIN_REQUESTS);
        }
        done
    }

    /// Lets up to `most` entries leave the pool whose bytes the backing has too, so that nothing is written; and
    /// handles what the backing has completed. Entries stay that somebody waits to load.
    pub fn return_kept(&self, most: usize) -> WrittenBack {
        let mut done = WrittenBack::default();
        let Some(spill) = &self.spill else { return done };
        if spill.counters.kept.load(Relaxed) == 0 {
            return done;
        }
        let mut side = spill.side.lock();
        self.complete(spill, &mut side, &mut done);
        // Writes that have failed count as kept, too: only what happens below says when to stop.
        let completed = done;
        // What was fetched last leaves if there is nothing else.
        for with_fresh in [false, true] {
            if with_fresh {
                self.let_fresh_go(&mut side);
            }
            // One that is being read stays, and would be found again.
            while done.written - completed.written < most && done.kept == completed.kept {
                let begin = |handle| self.row(handle).cell().begin_return_unused();
                let Some(handle) = spill.kept.find(begin) else { break };
                self.send_back(spill, handle, &mut done);
            }
            if done.written > 0 || done.kept > completed.kept {
                break;
            }
        }
        done
    }

    /// The entry of a ticket is being written from now on, if it is in the pool. Another entry may have got its handle:
    /// then that one is written, if their checksums agree in the 16 bits of the state, which does no harm.
    fn begin_chosen(&self, ticket: Ticket) -> Option<(Handle, State)> {
        let row = self.row(ticket.handle);
        let is_same = row.checksum(row.cell().load()) == ticket.checksum;
        let before = if is_same { row.cell().begin_write_chosen(self.in_pool) } else { None };
        before.map(|before| (ticket.handle, before))
    }

    /// What was accepted is on its way, and what was completed is handled.
    fn end_write_back(&self, spill: &Spill, side: &mut Held<'_>, done: &mut WrittenBack) {
        spill.backing.flush();
        self.complete(spill, side, done);
        if done.refused > 0 && side.writing_bytes == 0 {
            // Perhaps for want of room: what is in the pool can do without its location. While any write is on its way,
            // the backing may only be busy.
            done.given_up = self.give_up_some(spill);
        }
    }

    /// What was fetched last and not used may leave, too.
    fn let_fresh_go(&self, side: &mut Side) {
        side.fresh.clear(|handle| self.row(handle).cell().let_go());
    }

    /// After a walk: if it has found nothing, and so have `vain` of them since something was fetched, what was fetched
    /// last may leave, too.
    fn note_vain_walk(&self, spill: &Spill, side: &mut Side, done: &WrittenBack, vain: u32) {
        if done.started > 0 || done.written > 0 {
            return;
        }
        let fetched = spill.counters.read.load(Relaxed);
        side.vain_walks = if fetched == side.fetched { side.vain_walks + 1 } else { 1 };
        side.fetched = fetched;
        if side.vain_walks >= vain {
            side.vain_walks = 0;
            self.let_fresh_go(side);
        }
    }

    /// Gives up the locations of some entries that are in the pool too. Returns how many.
    fn give_up_some(&self, spill: &Spill) -> usize {
        for given_up in 0..GIVEN_UP {
            let mut length = 0;
            let give_up = |handle: Handle| {
                length = self.pool.length_anywhere(handle);
                self.row(handle).cell().give_up()
            };
            let Some(location) = spill.kept.take_one(give_up) else { return given_up };
            self.given_up(spill, location, length);
        }
        GIVEN_UP
    }

    /// Starts up to `wanted` writes, at most [`BATCH_MAX`], of the entries that `next` has begun to write; an entry
    /// that needs no write counts as one. False: `next` has no more.
    fn write_some(
        &self,
        spill: &Spill,
        side: &mut Held<'_>,
        wanted: usize,
        next: &mut dyn FnMut(&mut Side) -> Option<(Handle, State)>,
        done: &mut WrittenBack,
    ) -> bool {
        let mut pinned = [const { None }; BATCH_MAX];
        let (mut count, mut sent) = (0, 0);
        let wanted = wanted.min(BATCH_MAX);
        while count + sent < wanted {
            let Some((handle, before)) = next(side) else { break };
            if before.is_kept() {
                self.send_back(spill, handle, done);
                sent += 1;
            } else {
                let pin = self.pool.pin(handle).expect("ROW-3: an entry in the pool has an object");
                pinned[count] = Some((handle, pin));
                count += 1;
            }
        }
        if count == 0 {
            return sent > 0;
        }
        let mut requests = pinned.iter().flatten().map(|(handle, pin)| Request {
            token: Token(*handle),
            operation: Operation::Write(pin),
            refused: None,
        });
        let none = || Request {
            token: Token(Handle::FIRST),
            operation: Operation::Write(&[]),
            refused: None,
        };
        let mut requests: [Request<'_>; BATCH_MAX] =
            std::array::from_fn(|_| requests.next().unwrap_or_else(none));
        spill.in_flight.begin(count);
        spill.backing.submit(&mut requests[..count]);
        let refused = requests.map(|request| request.refused);
        let handles = pinned.map(|pinned| pinned.map(|(handle, _)| handle));
        // The pins are gone: an entry that has died meanwhile can be freed.
        for (handle, refused) in handles.into_iter().flatten().zip(refused) {
            match refused {
                None => {
                    side.writing += 1;
                    side.writing_bytes += self.pool.length_anywhere(handle);
                    done.started += 1;
                }
                Some(_) => {
                    spill.in_flight.end();
                    let lives = self.stay(spill, handle);
                    add(&spill.counters.refused, lives.into());
                    done.refused += 1;
                }
            }
        }
        count + sent == wanted
    }

    /// The walker's next entry: the hand moves on to one that is old, which is being written from now on.
    fn next_old(&self, side: &mut Side, rounds: &mut u32) -> Option<(Handle, State)> {
        loop {
            let handle = self.next_in_pool(side, rounds)?;
            if let Some(before) = self.row(handle).cell().begin_write(self.in_pool) {
                return Some((handle, before));
            }
        }
    }

    /// The next entry in the pool that need not stay there for good; the hand moves on. `None`: there is none, or the
    /// hand has gone round so many times.
    fn next_in_pool(&self, side: &mut Side, rounds: &mut u32) -> Option<Handle> {
        loop {
            let Some(handle) = self.pool.next_marked(side.hand) else {
                *rounds -= 1;
                if side.hand == 0 || *rounds == 0 {
                    return None;
                }
                side.hand = 0;
                continue;
            };
            side.hand = handle.to_raw();
            if self.is_for_walks(handle) {
                return Some(handle);
            }
            self.pool.unmark(handle);
            // An entry may just have come there: its mark may be the one that was removed.
            if self.is_for_walks(handle) {
                self.pool.mark(handle);
            }
        }
    }

    /// Whether an entry is in the pool, and not to stay there for good.
    fn is_for_walks(&self, handle: Handle) -> bool {
        let state = self.row(handle).cell().load();
        state.place() == Place::Pool && Some(state.codec()) != self.in_pool
    }

    /// Whether the ages of entries count: a store that never writes back pays nothing for them.
    pub(super) fn is_walked(&self) -> bool {
        self.spill.as_ref().is_some_and(|spill| spill.is_walked.load(Relaxed))
    }

    /// Lets the walker find an entry that is in the pool from now on.
    pub(super) fn mark(&self, handle: Handle) {
        if self.spill.is_some() {
            self.pool.mark(handle);
        }
    }

    /// Handles the requests that the backing has completed.
    fn complete(&self, spill: &Spill, side: &mut Held<'_>, done: &mut WrittenBack) {
        spill.backing.poll(&mut |Completion { token: Token(handle), result }| {
            spill.in_flight.end();
            add(&spill.counters.completed, 1);
            let place = self.row(handle).cell().load().place();
            if matches!(place, Place::Writing | Place::WritingDead) {
                side.writing -= 1;
                side.writing_bytes -= self.pool.length_anywhere(handle);
                add(&spill.counters.writes_ended, 1);
            }
            match (place, result) {
                (Place::Writing | Place::WritingDead, Ok(Completed::Written(location))) => {
                    self.written(spill, handle, location, done);
                }
                (Place::Writing | Place::WritingDead, Err(_)) => {
                    add(&spill.counters.failed, 1);
                    self.stay(spill, handle);
                    done.kept += 1;
                }
                (Place::Reading | Place::ReadingDead, Ok(Completed::Read(bytes))) => {
                    self.fetched(spill, side, handle, bytes);
                }
                (Place::Reading | Place::ReadingDead, Err(failure)) => {
                    let is_final = failure == Failure::Final;
                    let why = if is_final { NotRead::Lost } else { NotRead::Failed };
                    self.not_fetched(spill, handle, why);
                }
                (place, result) => {
                    panic!("{result:?} of handle {} which is {place:?}", handle.to_raw())
                }
            }
        });
    }

    /// An entry was written: its object leaves the pool, unless somebody reads it.
    fn written(&self, spill: &Spill, handle: Handle, location: Location, done: &mut WrittenBack) {
        let cell = self.row(handle).cell();
        let length = self.pool.length_anywhere(handle);
        if cell.load().place() == Place::WritingDead {
            spill.backing.discard(location, length);
            self.stay(spill, handle);
        } else if !self.pool.send_away(handle, location.get()) {
            spill.backing.discard(location, length);
            self.stay(spill, handle);
            done.kept += 1;
        } else {
            add(&spill.counters.written, 1);
            add(&spill.counters.written_bytes, length as u64);
            add(&spill.counters.written_unit_bytes, self.unit_bytes(cell));
            add(&spill.counters.written_oldest, (!cell.load().is_chosen()).into());
            self.leave_pool(spill, handle, length, done);
        }
    }

    /// An entry whose object of `length` bytes has left the pool is on the backing only; a dead one ends. The lock is
    /// held.
    fn leave_pool(&self, spill: &Spill, handle: Handle, length: usize, done: &mut WrittenBack) {
        // Before the step: the owner may end the entry right after it.
        add(&spill.counters.units, 1);
        add(&spill.counters.bytes, length as u64);
        add(&spill.counters.raw_units, self.row(handle).cell().load().is_raw().into());
        done.written += 1;
        done.bytes += length;
        if self.row(handle).cell().written().is_err() {
            self.bury(spill, handle);
        }
    }

    /// An entry was not written: it stays in the pool; a dead one ends, and counts nowhere. Returns whether it lives.
    fn stay(&self, spill: &Spill, handle: Handle) -> bool {
        let cell = self.row(handle).cell();
        if cell.not_written().is_err() {
            let state = cell.load();
            cell.vacate();
            self.give_up_location(state, handle);
            self.pool.free(handle);
            return false;
        }
        add(&spill.counters.not_written, 1);
        self.pool.mark(handle);
        true
    }

    /// An entry that keeps its location, and is being written, leaves the pool at once, unless somebody reads it.
    /// The lock is held.
    fn send_back(&self, spill: &Spill, handle: Handle, done: &mut WrittenBack) {
        let location = spill.kept.get(handle).expect("KEPT-1: its state says so");
        let length = self.pool.length_anywhere(handle);
        if !self.pool.send_away(handle, location.get()) {
            done.kept += 1;
            self.stay(spill, handle);
            return;
        }
        spill.kept.remove(handle);
        subtract(&spill.counters.kept, 1);
        subtract(&spill.counters.kept_bytes, length as u64);
        add(&spill.counters.returned, 1);
        self.leave_pool(spill, handle, length, done);
    }

    /// Lets an entry leave the pool whose bytes the backing has too. True: it is on the backing only, whoever sent it
    /// there; to load it means to wait again. The owner calls this, after the load that the entry was fetched for, or
    /// if he has its bytes from elsewhere.
    pub fn put_away(&self, entry: &EntryId) -> bool {
        let Some(spill) = &self.spill else { return false };
        let cell = self.row(entry.0).cell();
        // Without a location it stays in the pool, where the walker may take it.
        cell.forget_waiters();
        if cell.load().is_kept() {
            let _side = spill.side.lock();
            if cell.begin_return() {
                self.send_back(spill, entry.0, &mut WrittenBack::default());
            }
        }
        // The walker may have been first.
        self.away(entry).is_some()
    }

    /// Whether an entry that is in the pool is on the backing too: it was fetched, and keeps its location.
    #[must_use]
    pub fn keeps_location(&self, entry: &EntryId) -> bool {
        self.row(entry.0).cell().load().is_kept()
    }

    /// From now on an entry that was fetched is in the pool only, so that it does not wait for the backing when it is
    /// used again. One that is on its way out, or away, stays as it is. The owner calls this.
    pub fn give_up_backing(&self, entry: &EntryId) {
        let Some(spill) = &self.spill else { return };
        let cell = self.row(entry.0).cell();
        let state = cell.load();
        if state.is_kept() {
            let _side = spill.side.lock();
            if cell.give_up() {
                self.give_up_location(state, entry.0);
            }
        }
    }

    /// The ticket of an entry that is on the backing and not in the pool.
    #[must_use]
    pub fn away(&self, entry: &EntryId) -> Option<Ticket> {
        let row = self.row(entry.0);
        let state = row.cell().load();
        let is_away = matches!(state.place(), Place::Backing | Place::Reading);
        is_away.then(|| Ticket { handle: entry.0, checksum: row.checksum(state) })
    }

    /// Gives up the location of an entry that was in the pool in this `state`. Now it has ended, but its handle is not
    /// free yet; or its state says that it has no location.
    pub(super) fn give_up_location(&self, state: State, handle: Handle) {
        let Some(spill) = self.spill.as_ref().filter(|_| state.is_kept()) else { return };
        let location = spill.kept.remove(handle).expect("KEPT-1: its state said so");
        let length = self.pool.length_anywhere(handle);
        self.given_up(spill, location, length);
    }

    /// What an entry in the pool had on the backing is not needed any more.
    fn given_up(&self, spill: &Spill, location: Location, length: usize) {
        subtract(&spill.counters.kept, 1);
        subtract(&spill.counters.kept_bytes, length as u64);
        spill.backing.discard(location, length);
    }

    /// Notes where an entry is on the backing that is about to be in the pool. False: there is no room for that.
    fn keep_location(&self, spill: &Spill, handle: Handle, location: Location) -> bool {
        let mut other_length = 0;
        let give_up = |other: Handle| {
            // Before the step: after it the entry may end.
            other_length = self.pool.length_anywhere(other);
            self.row(other).cell().give_up()
        };
        let Ok(other) = spill.kept.insert(handle, location, give_up) else { return false };
        if let Some(other) = other {
            self.given_up(spill, other, other_length);
        }
        add(&spill.counters.kept, 1);
        add(&spill.counters.kept_bytes, self.pool.length_anywhere(handle) as u64);
        true
    }

    /// The bytes of an entry came from the backing.
    fn fetched(&self, spill: &Spill, side: &mut Side, handle: Handle, bytes: &[u8]) {
        let cell = self.row(handle).cell();
        let away = self.pool.away(handle);
        if cell.load().place() == Place::ReadingDead {
            self.bury(spill, handle);
        } else if bytes.len() != away.length {
            self.not_fetched(spill, handle, NotRead::Lost);
        } else if self.pool.bring_back(handle, bytes).is_err() {
            spill.lacks_room.store(true, Relaxed);
            side.lacked_room = true;
            self.not_fetched(spill, handle, NotRead::NoRoom);
        } else {
            side.lacked_room = false;
            let location = Location::new(away.place).expect("a slot keeps a location");
            let is_kept = self.keep_location(spill, handle, location);
            self.count_left(spill, away.length, cell.load());
            if !is_kept {
                spill.backing.discard(location, away.length);
            }
            add(&spill.counters.read, 1);
            add(&spill.counters.read_unit_bytes, self.unit_bytes(cell));
            if cell.read(is_kept).is_err() {
                cell.vacate();
                if is_kept {
                    let location = spill.kept.remove(handle).expect("it was just inserted");
                    self.given_up(spill, location, away.length);
                }
                self.pool.free(handle);
            } else {
                self.pool.mark(handle);
                side.fresh.push(handle, bytes.len(), |old| self.row(old).cell().let_go());
            }
        }
    }

    /// The bytes of an entry did not come.
    fn not_fetched(&self, spill: &Spill, handle: Handle, why: NotRead) {
        // Not a request that the backing has not taken yet, nor one that was read and finds no room.
        let has_failed = matches!(why, NotRead::Failed | NotRead::Lost);
        add(&spill.counters.not_read, u64::from(has_failed));
        if self.row(handle).cell().not_read(why).is_err() {
            self.bury(spill, handle);
        }
    }

    /// Ends an entry that is on the backing and dead.
    fn bury(&self, spill: &Spill, handle: Handle) {
        let cell = self.row(handle).cell();
        let state = cell.load();
        cell.vacate();
        self.forget_at(spill, handle, state);
    }

    /// Gives back what an entry has that was on the backing in this `state`, and is vacant now.
    pub(super) fn forget(&self, handle: Handle, state: State) {
        let spill = self.spill.as_ref().expect("what is on the backing was written to it");
        self.forget_at(spill, handle, state);
    }

    fn forget_at(&self, spill: &Spill, handle: Handle, state: State) {
        let away = self.pool.away(handle);
        self.count_left(spill, away.length, state);
        let location = Location::new(away.place).expect("a slot keeps a location");
        spill.backing.discard(location, away.length);
        self.pool.give_handle(handle);
    }

    /// An entry in this `state`, which is vacant by now perhaps, is not on the backing alone any more.
    fn count_left(&self, spill: &Spill, length: usize, state: State) {
        subtract(&spill.counters.units, 1);
        subtract(&spill.counters.bytes, length as u64);
        subtract(&spill.counters.raw_units, state.is_raw().into());
    }

    /// The bytes of the unit that an entry has.
    fn unit_bytes(&self, cell: Cell<'_, AtomicU32>) -> u64 {
        self.codec(cell.load().codec()).unit().bytes() as u64
    }

    /// Has the entries of these tickets fetched, as far as they still are on the backing. The next [`Store::poll`] of
    /// any thread sends them, so that one submission serves several calls. Does not wait: see [`Store::is_coming`].
    /// Those that somebody `waits` for stay in the pool until they were loaded once.
    pub fn fetch(&self, tickets: impl IntoIterator<Item = Ticket>, waits: impl Fn(Ticket) -> bool) {
        let Some(spill) = &self.spill else { return };
        for ticket in tickets {
            let row = self.row(ticket.handle);
            let state = row.cell().load();
            if row.checksum(state) != ticket.checksum {
                continue;
            }
            if state.place() == Place::Backing {
                self.request(spill, ticket.handle, waits(ticket));
            } else if waits(ticket) {
                row.cell().want();
            }
        }
    }

    /// Who waited for the entry of a ticket ([`Store::fetch`]) has stopped: it need not stay in the pool for him, if it
    /// comes after all.
    pub fn stop_waiting(&self, ticket: Ticket) {
        let row = self.row(ticket.handle);
        if row.checksum(row.cell().load()) == ticket.checksum {
            row.cell().unwant();
        }
    }

    /// Whether the entry of a ticket is still on the backing, and can be fetched as far as is known.
    #[must_use]
    pub fn is_away(&self, ticket: Ticket) -> bool {
        let row = self.row(ticket.handle);
        let state = row.cell().load();
        matches!(state.place(), Place::Backing | Place::Reading)
            && row.checksum(state) == ticket.checksum
            && !state.has_failed()
    }

    /// Where the entry of a ticket is on the backing, if it is not in the pool.
    #[must_use]
    pub fn location(&self, ticket: Ticket) -> Option<Location> {
        let row = self.row(ticket.handle);
        let state = row.cell().load();
        let is_there = matches!(state.place(), Place::Backing | Place::Reading)
            && row.checksum(state) == ticket.checksum;
        // An entry that ends just now gives a number of nothing: who does not own it may use it for messages only.
        let away = if is_there { self.pool.try_away(ticket.handle) } else { None };
        away.and_then(|away| Location::new(away.place))
    }

    /// Whether the last read of a ticket's entry failed, and another may succeed: the backing may be good again after a
    /// while. Not so of a read that the backing refused.
    #[must_use]
    pub fn is_unread(&self, ticket: Ticket) -> bool {
        let row = self.row(ticket.handle);
        let state = row.cell().load();
        state.place() == Place::Backing
            && state.is_unread()
            && row.checksum(state) == ticket.checksum
    }

    /// Whether the bytes of a ticket's entry have come since the last read that failed: the entry is not away any more,
    /// or the pool had no room for them.
    #[must_use]
    pub fn has_come(&self, ticket: Ticket) -> bool {
        !self.is_away(ticket) || self.row(ticket.handle).cell().load().has_come()
    }

    /// Names an entry for [`Store::write_back_chosen`], also when its owner may end it meanwhile.
    #[must_use]
    pub fn ticket(&self, entry: &EntryId) -> Ticket {
        Ticket { handle: entry.0, checksum: self.checksum(entry) }
    }

    /// Whether the entry of a ticket is being written to the backing.
    #[must_use]
    pub fn is_leaving(&self, ticket: Ticket) -> bool {
        let row = self.row(ticket.handle);
        let state = row.cell().load();
        state.place() == Place::Writing && row.checksum(state) == ticket.checksum
    }

    /// Whether the entry of a ticket is being fetched; if not, it is worth another try to load it.
    #[must_use]
    pub fn is_coming(&self, ticket: Ticket) -> bool {
        let row = self.row(ticket.handle);
        let state = row.cell().load();
        state.place() == Place::Reading && row.checksum(state) == ticket.checksum
    }

    /// Sends what is to be fetched, and handles what the backing has completed. Does not wait. Returns how many
    /// requests are still in flight.
    pub fn poll(&self) -> usize {
        let Some(spill) = &self.spill else { return 0 };
        let mut side = spill.side.lock();
        self.complete(spill, &mut side, &mut WrittenBack::default());
        spill.in_flight.count()
    }

    /// Has the backing's medium forget some of what was discarded: for whoever writes nothing for a while, since a
    /// write does this by the way. Few at a time, so the owner calls this now and then.
    pub fn tidy(&self) {
        let Some(spill) = &self.spill else { return };
        let _side = spill.side.lock();
        spill.backing.tidy();
    }

    /// Whether the pool had no memory for an entry that came: it stays away until others have left. The source has no
    /// more pages, though the pool has reached no limit that anybody has set.
    #[must_use]
    pub fn lacks_room(&self) -> bool {
        self.spill.as_ref().is_some_and(|spill| spill.lacks_room.load(Relaxed))
    }

    /// The same; and room is being made, so that it is true again only once another entry comes for which there is
    /// none.
    pub fn take_lack_of_room(&self) -> bool {
        self.spill.as_ref().is_some_and(|spill| spill.lacks_room.swap(false, Relaxed))
    }

    /// Requests that were completed since the start: it changes when [`Store::poll`], by any thread, handled some.
    #[must_use]
    pub fn completions(&self) -> u64 {
        self.spill.as_ref().map_or(0, |spill| spill.counters.completed.load(Relaxed))
    }

    /// Writes among them, whatever came of them.
    #[must_use]
    pub fn writes_ended(&self) -> u64 {
        self.spill.as_ref().map_or(0, |spill| spill.counters.writes_ended.load(Relaxed))
    }

    /// Waits for a moment, or until the backing has completed a request. The caller holds no lock of the store.
    pub fn pause(&self) {
        self.spill.as_ref().map_or_else(crate::sync::pause, |spill| spill.backing.pause());
    }

    /// Requests that are in flight, and the bytes that leave the pool with the writes among them.
    #[must_use]
    pub fn in_flight(&self) -> (usize, usize) {
        self.spill.as_ref().map_or((0, 0), |spill| {
            let side = spill.side.lock();
            (spill.in_flight.count(), side.writing_bytes)
        })
    }

    /// What the backing has and did, in bytes of its medium.
    #[must_use]
    pub fn backing_usage(&self) -> Usage {
        self.spill.as_ref().map_or_else(Usage::default, |spill| spill.backing.usage())
    }

    /// Bytes of tables and buffers of the backing.
    #[must_use]
    pub fn backing_bytes(&self) -> usize {
        self.spill.as_ref().map_or(0, |spill| spill.backing.memory_bytes())
    }

    /// Whether anything is on the backing and not in the pool.
    #[must_use]
    pub fn has_away(&self) -> bool {
        self.spill.as_ref().is_some_and(|spill| spill.counters.units.load(Relaxed) > 0)
    }

    /// Whether there is a backing.
    #[must_use]
    pub fn has_backing(&self) -> bool {
        self.spill.is_some()
    }

    /// Has the entry of a ticket fetched, and waits until it is in the pool; then it is worth another try to
    /// load it. The caller holds no lock.
    ///
    /// # Errors
    ///
    /// [`Error::Unreadable`], with the checksum of what was stored. A backing that has the request and ends nothing for
    /// `STUCK_PAUSES` pauses counts as one that failed for now; it may end the request later.
    pub fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        let Some(spill) = &self.spill else { return Ok(()) };
        let (mut turns, mut failed) = (0, 0);
        let (mut idle, mut completed) = (0, self.completions());
        loop {
            let mut side = spill.side.lock();
            self.complete(spill, &mut side, &mut WrittenBack::default());
            let row = self.row(ticket.handle);
            let state = row.cell().load();
            let is_same = row.checksum(state) == ticket.checksum;
            let is_stuck = idle == STUCK_PAUSES;
            match state.place() {
                Place::Backing if is_same => {
                    failed += usize::from(turns > 0 && state.is_unread());
                    let is_over = failed == TRIES || turns == TURNS || is_stuck;
                    if state.has_failed() || is_over {
                        let (expected, is_transient) = (ticket.checksum, !state.has_failed());
                        return Err(Error::Unreadable { expected, is_transient });
                    }
                    turns += usize::from(self.request(spill, ticket.handle, true));
                    spill.backing.flush();
                }
                Place::Reading if is_same && is_stuck => {
                    row.cell().unwant();
                    let expected = ticket.checksum;
                    return Err(Error::Unreadable { expected, is_transient: true });
                }
                // Another one who waited may have stopped, and said for all that nobody does.
                Place::Reading if is_same => row.cell().want(),
                // It is in the pool; or it has ended, whoever has the handle now.
                _ => return Ok(()),
            }
            drop(side);
            spill.backing.pause();
            let before = std::mem::replace(&mut completed, self.completions());
            idle = if completed == before { idle + 1 } else { 0 };
        }
    }

    /// Asks the backing for an entry. The lock need not be held: the step to `reading` succeeds for one caller only.
    /// False: the backing has no room for the request.
    fn request(&self, spill: &Spill, handle: Handle, is_wanted: bool) -> bool {
        if self.row(handle).cell().begin_read(is_wanted).is_err() {
            return true;
        }
        let away = self.pool.away(handle);
        let location = Location::new(away.place).expect("a slot keeps a location");
        let operation = Operation::Read { location, length: away.length };
        let mut request = [Request { token: Token(handle), operation, refused: None }];
        spill.in_flight.begin(1);
        spill.backing.submit(&mut request);
        if let Some(failure) = request[0].refused {
            let is_final = failure == Failure::Final;
            self.not_fetched(
                spill,
                handle,
                if is_final { NotRead::Lost } else { NotRead::Untried },
            );
            spill.in_flight.end();
            return is_final;
        }
        true
    }

    /// Waits until no request is in flight. The caller holds no lock, and nobody starts more.
    pub fn drain(&self) {
        let Some(spill) = &self.spill else { return };
        loop {
            let mut side = spill.side.lock();
            self.complete(spill, &mut side, &mut WrittenBack::default());
            if spill.in_flight.count() == 0 {
                return;
            }
            drop(side);
            spill.backing.pause();
        }
    }

    /// In a child of `fork`: what was done before is counted by its parent. What is stored, and where, stays counted.
    /// Nobody waits for a unit.
    pub fn start_over(&self) {
        self.pool.reset_pages_compacted();
        let Some(spill) = &self.spill else { return };
        // Every counter is named, so that none that is added later is left out.
        let Counters {
            units: _,
            bytes: _,
            raw_units: _,
            kept: _,
            kept_bytes: _,
            completed,
            writes_ended,
            written,
            written_bytes,
            written_unit_bytes,
            written_oldest,
            returned,
            not_written,
            refused,
            failed,
            read,
            read_unit_bytes,
            not_read,
        } = &spill.counters;
        let out = [completed, writes_ended, written, written_bytes, written_unit_bytes, returned];
        let failed = [not_written, refused, failed, written_oldest];
        let back = [read, read_unit_bytes, not_read];
        out.into_iter().chain(failed).chain(back).for_each(|counter| counter.store(0, Relaxed));
        let mut side = spill.side.lock();
        side.fetched = 0;
        // What the parent's threads waited for came last, before the fork.
        side.fresh.clear(|handle| self.row(handle).cell().forget_waiters());
    }

    /// What is on the backing, and what went there and came back; zeros without a backing.
    #[must_use]
    pub fn spill_stats(&self) -> SpillStats {
        let Some(spill) = &self.spill else { return SpillStats::default() };
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let counters = &spill.counters;
        SpillStats {
            units: of(&counters.units),
            bytes: of(&counters.bytes),
            raw_units: of(&counters.raw_units),
            kept: of(&counters.kept),
            kept_bytes: of(&counters.kept_bytes),
            returned: of(&counters.returned),
            written: of(&counters.written),
            written_bytes: of(&counters.written_bytes),
            written_unit_bytes: of(&counters.written_unit_bytes),
            written_oldest: of(&counters.written_oldest),
            not_written: of(&counters.not_written),
            refused: of(&counters.refused),
            failed: of(&counters.failed),
            read: of(&counters.read),
            read_unit_bytes: of(&counters.read_unit_bytes),
            not_read: of(&counters.not_read),
        }
    }
}
