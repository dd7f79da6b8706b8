//! `mremap` of memory that the engine manages, made by the mapping proxy: the way that brings least back.
//!
//! ```text
//! shorter            shrink      unmaps the end
//! as long, longer    stretch     stays or grows where it is
//!                    carry       moves to a place reserved for it, a whole number of folios away
//! all that is left   relocate    the program's call as it is, with everything brought back
//! ```

use zfolio_pager::Engine;
use zfolio_sys::{Errno, map, maps};

use crate::candidates::{self, Taken};
use crate::mappings::{folio_bytes, page_end};

/// The words of the call: old start, old and new length, flags, new start if the program has chosen it; then the
/// address of a `Taken`: what of the range was noted.
pub(crate) fn remap(engine: &Engine, words: [usize; 6]) -> Result<usize, Errno> {
    let [start, bytes, new_bytes, flags, ..] = words;
    let (end, new_end) = (page_end(start, bytes), page_end(start, new_bytes));
    let flags = i32::try_from(flags).unwrap_or(!0);
    // Of no length, or to a place of the program's choice: the kernel decides.
    if flags & !libc::MREMAP_MAYMOVE != 0 || new_end <= start {
        return relocate(engine, words);
    }
    if new_end < end {
        // SAFETY: the program's own call, with its own words. It unmaps the end of the range.
        return engine.unmap(new_end, end, || unsafe { map::forward(libc::SYS_mremap, words) });
    }
    // SAFETY: the program's own call, but nothing moves.
    let stretch = || unsafe { map::forward(libc::SYS_mremap, [start, bytes, new_bytes, 0, 0, 0]) };
    match engine.stretch((start, end), new_end, || stretch().map(drop)) {
        Some(Ok(())) => Ok(start),
        Some(Err(Errno::NOMEM)) if flags & libc::MREMAP_MAYMOVE == 0 => Err(Errno::NOMEM),
        Some(Err(Errno::NOMEM)) => carry(engine, words).map_or_else(|| relocate(engine, words), Ok),
        // What is wrong with the range, or the new length, the kernel tells.
        Some(Err(_)) | None => relocate(engine, words),
    }
}

/// Moves the range to a place that is reserved for it. `None`: this cannot be done, and nothing has changed.
fn carry(engine: &Engine, words: [usize; 6]) -> Option<usize> {
    let [start, bytes, new_bytes, ..] = words;
    let length = page_end(0, new_bytes);
    let place = Place::reserve(length, start, folio_bytes())?;
    let at = place.at;
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).unsigned_abs() as usize;
    // SAFETY: the program's own call, to addresses that are reserved for it.
    let call =
        || unsafe { map::forward(libc::SYS_mremap, [start, bytes, new_bytes, flags, at, 0]) };
    match engine.carry((start, page_end(start, bytes)), (at, at + length), || call().map(drop)) {
        Some(Ok(())) => {
            place.taken();
            Some(at)
        }
        Some(Err(_)) => {
            place.perhaps_taken();
            None
        }
        None => {
            place.give_up();
            None
        }
    }
}

/// The program's call as it is.
fn relocate(engine: &Engine, words: [usize; 6]) -> Result<usize, Errno> {
    let [start, bytes, new_bytes, flags, to, noted] = words;
    let length = page_end(0, new_bytes);
    let move_it = || {
        let call = [start, bytes, new_bytes, flags, to, 0];
        // SAFETY: the program's own call, with its own words.
        let at = unsafe { map::forward(libc::SYS_mremap, call) }?;
        Ok::<_, Errno>((at, at + length))
    };
    let fixed = i32::try_from(flags).unwrap_or(0) & libc::MREMAP_FIXED != 0;
    let onto = if fixed { (to, page_end(to, new_bytes)) } else { (0, 0) };
    let taken = noted as *const Taken;
    // SAFETY: mremap_words() passes a `Taken` of its own, which lives and stays unchanged until it has the answer.
    let noted = unsafe { &*taken }.noted();
    // An engine that has given up manages none of what is noted, and is not to begin.
    let noted = if candidates::has_given_up() { &[][..] } else { noted };
    let (at, _) = engine.relocate((start, page_end(start, bytes)), onto, noted, move_it)?;
    Ok(at)
}

/// Addresses that are reserved for a mapping which is to move there.
///
/// The reservation is of shared memory, which is a mapping of a file to the kernel, and never becomes one with a
/// neighbour: so it can be recognized. It takes no memory.
struct Place {
    /// The list of mappings, opened before: afterwards it might not be possible.
    list: maps::List,
    /// Where the reservation begins: at a whole folio.
    start: usize,
    /// The place: as far into a folio as the mapping is.
    at: usize,
    end: usize,
}

impl Place {
    /// Reserves a place of `bytes` for what is at `from`. `None`: there is no address space, or no list of mappings.
    fn reserve(bytes: usize, from: usize, folio_bytes: usize) -> Option<Place> {
        let list = maps::List::open()?;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let flags = flags.unsigned_abs() as usize;
        let (before, no_access, no_file) = (from % folio_bytes, 0, usize::MAX);
        let words = [0, before.checked_add(bytes)?, no_access, flags, no_file, 0];
        let start = map::map_aligned_for(words, folio_bytes).ok()?;
        let place = Place { list, start, at: start + before, end: start + before + bytes };
        // A child of another thread's `fork` would keep it for good.
        if map::keep_from_children(start, place.end - start).is_err() {
            place.give_up();
            return None;
        }
        Some(place)
    }

    /// The mapping has moved to the place.
    fn taken(self) {
        unmap(self.start, self.at);
    }

    /// No call has tried to move the mapping.
    fn give_up(self) {
        unmap(self.start, self.end);
    }

    /// The mapping could not be moved. The kernel may have unmapped the place before it found that out, and another
    /// thread may have mapped something there since.
    fn perhaps_taken(self) {
        let mut is_ours = false;
        self.list.each_file_mapping(&mut |mapping| {
            is_ours = (mapping.start, mapping.end) == (self.start, self.end)
                && mapping.is_shared
                && !mapping.is_writable;
            !is_ours && mapping.start < self.end
        });
        if is_ours { self.give_up() } else { self.taken() }
    }
}

/// Unmaps a part of a reservation, which may be empty.
fn unmap(start: usize, end: usize) {
    if start < end {
        // SAFETY: addresses that are reserved, and that no other code has.
        unsafe { map::forward(libc::SYS_munmap, [start, end - start, 0, 0, 0, 0]) }.ok();
    }
}
