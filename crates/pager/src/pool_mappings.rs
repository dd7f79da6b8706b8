//! Runs of pages for the allocator, straight from the kernel.
//!
//! Address space costs little and runs come in few lengths. So the pages of a run that is given
//! back go back to the system at once, and its addresses are kept for the next run of the same
//! length. Only where the process may have no more addresses are they kept for runs of any length.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use zfolio_core::page::PAGE_BYTES;
use zfolio_core::sync::Mutex;
use zfolio_core::zsmalloc::PageSource;
use zfolio_sys::Errno;
use zfolio_sys::map::{self, Reservation};

use crate::{fatal, rank};

/// How much address space is requested at once. It is little, since all of it counts where the
/// address space of a process is limited (`RLIMIT_AS`, `RLIMIT_DATA`): requests of 1 GiB, halved
/// until granted, took up half of the rest.
const CHUNK_BYTES: usize = 8 << 20;

/// How often the request is halved if it is refused: down to 1 MiB.
const CHUNK_SHRINKS: u32 = 3;

#[derive(Debug, Default)]
struct Space {
    /// Addresses not yet used in the newest chunk.
    next: usize,
    end: usize,
    chunks: Vec<Reservation>,
    /// Addresses of runs that were given back, by the length of the run in pages.
    idle: BTreeMap<usize, Vec<usize>>,
}

impl Space {
    fn take(&mut self, pages: usize) -> Option<usize> {
        if let Some(address) = self.idle.get_mut(&pages).and_then(Vec::pop) {
            return Some(address);
        }
        let bytes = pages * PAGE_BYTES;
        if self.end - self.next < bytes && !self.grow(bytes) {
            return self.recut(pages);
        }
        let address = self.next;
        self.next += bytes;
        Some(address)
    }

    /// Takes a new chunk, of `bytes` at least. False: there is none.
    fn grow(&mut self, bytes: usize) -> bool {
        // A shorter one if the process may not have so much address space (RLIMIT_AS).
        let lengths = (0..=CHUNK_SHRINKS).map(|shrink| (CHUNK_BYTES >> shrink).max(bytes));
        let chunk = lengths.map(|length| Reservation::new(length, PAGE_BYTES)).find_map(Result::ok);
        let Some(chunk) = chunk else { return false };
        self.keep_rest();
        (self.next, self.end) = (chunk.address(), chunk.address() + chunk.bytes());
        self.chunks.push(chunk);
        true
    }

    /// What is left of the newest chunk is idle.
    fn keep_rest(&mut self) {
        if self.next < self.end {
            self.keep(self.next, (self.end - self.next) / PAGE_BYTES);
            self.next = self.end;
        }
    }

    fn keep(&mut self, address: usize, pages: usize) {
        self.idle.entry(pages).or_default().push(address);
    }

    /// A run of idle addresses, whatever the lengths of those that were given back.
    fn recut(&mut self, pages: usize) -> Option<usize> {
        self.cut(pages).or_else(|| {
            self.join();
            self.cut(pages)
        })
    }

    /// The beginning of an idle run of `pages` or more, of the shortest; the rest of it stays idle.
    fn cut(&mut self, pages: usize) -> Option<usize> {
        let fits =
            |(length, addresses): (&usize, &mut Vec<usize>)| Some((*length, addresses.pop()?));
        let (length, address) = self.idle.range_mut(pages..).find_map(fits)?;
        if length > pages {
            self.keep(address + pages * PAGE_BYTES, length - pages);
        }
        Some(address)
    }

    /// Makes one run of idle ones that are neighbours, also where they are of two chunks.
    fn join(&mut self) {
        self.keep_rest();
        let mut idle: Vec<(usize, usize)> = Vec::new();
        for (pages, addresses) in &mut self.idle {
            idle.extend(addresses.drain(..).map(|address| (address, *pages)));
        }
        idle.sort_unstable();
        let are_neighbours =
            |left: &(usize, usize), right: &(usize, usize)| left.0 + left.1 * PAGE_BYTES == right.0;
        for run in idle.chunk_by(are_neighbours) {
            self.keep(run[0].0, run.iter().map(|(_, pages)| pages).sum());
        }
    }
}

/// The pool's memory: private mappings, which are unmapped when this is dropped.
#[derive(Debug)]
pub struct PoolMappings(Mutex<{ rank::POOL_MAPPINGS }, Space>);

impl Default for PoolMappings {
    fn default() -> Self {
        PoolMappings(Mutex::new(Space::default()))
    }
}

impl PoolMappings {
    /// Takes the first chunk now, if it can be had: later the program may have taken all address space there is, and a
    /// pool without memory holds no limit.
    #[must_use]
    pub fn with_chunk(self) -> PoolMappings {
        self.0.lock().grow(PAGE_BYTES);
        self
    }
}

/// A sandbox may forbid to give memory back: then the pages keep theirs, and nobody reads them.
fn note_released(released: Result<(), Errno>) {
    debug_assert!(released.is_ok() || released.is_err_and(fatal::is_forbidden), "{released:?}");
}

#[allow(unsafe_code, reason = "the contract of PageSource")]
// SAFETY: a run is cut from a fresh private mapping that only this source knows, or was given back;
// the lock hands it to one caller. Mappings live as long as the source.
unsafe impl PageSource for PoolMappings {
    fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.0.lock().take(pages)? as *mut u8)
    }

    unsafe fn give_back(&self, run: NonNull<u8>, pages: usize) {
        let address = run.as_ptr() as usize;
        // SAFETY: by the contract the run is ours again and nobody reads it.
        let released = unsafe { map::release(address, pages * PAGE_BYTES) };
        note_released(released);
        self.0.lock().keep(address, pages);
    }

    unsafe fn discard(&self, start: NonNull<u8>, pages: usize) {
        // SAFETY: by the contract nobody relies on what these pages of a run hold.
        let released = unsafe { map::release(start.as_ptr() as usize, pages * PAGE_BYTES) };
        note_released(released);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use zfolio_core::page::PAGE_BYTES;
    use zfolio_core::testing::{Random, seed};

    use super::Space;

    /// Where the chunks lie: two are neighbours. Nobody touches them.
    const CHUNKS: [(usize, usize); 3] = [(16, 64), (80, 32), (200, 100)];

    /// A space that has these addresses, all of them idle, and gets no others.
    fn bounded() -> Space {
        let mut space = Space::default();
        for (page, pages) in CHUNKS {
            space.keep(page * PAGE_BYTES, pages);
        }
        space
    }

    /// The longest run of pages that nobody has.
    fn longest(taken: &BTreeMap<usize, usize>) -> usize {
        let is_taken = |page: usize| {
            let before = taken.range(..=page * PAGE_BYTES).next_back();
            before.is_some_and(|(address, pages)| page * PAGE_BYTES < address + pages * PAGE_BYTES)
        };
        let (mut longest, mut run) = (0, 0);
        for page in 0..=300 {
            let is_ours = CHUNKS.iter().any(|(from, pages)| (*from..from + pages).contains(&page));
            run = if is_ours && !is_taken(page) { run + 1 } else { 0 };
            longest = longest.max(run);
        }
        longest
    }

    /// Goal: where there are no more addresses, a run of any length is cut from what was given back if it fits
    /// anywhere, and no address is handed out twice. Method: random takes and returns beside a map of what is taken.
    #[test]
    fn idle_runs_are_cut_and_joined() {
        let random = &mut Random::new(seed());
        let (mut space, mut taken) = (bounded(), BTreeMap::new());
        let mut refused = 0;
        for _ in 0..20_000 {
            if !taken.is_empty() && random.below(2) == 0 {
                let at = random.below(taken.len());
                let (&address, &pages) = taken.iter().nth(at).unwrap();
                taken.remove(&address);
                space.keep(address, pages);
                continue;
            }
            let (pages, longest) = (1 + random.below(40), longest(&taken));
            let address = space.recut(pages);
            assert_eq!(address.is_some(), pages <= longest, "{pages} pages of {longest}");
            let Some(address) = address else {
                refused += 1;
                continue;
            };
            let end = address + pages * PAGE_BYTES;
            let before = taken.range(..end).next_back();
            assert!(before.is_none_or(|(other, pages)| other + pages * PAGE_BYTES <= address));
            taken.insert(address, pages);
        }
        assert!(refused > 100, "only {refused} times there was no run");
    }

    /// Goal: what is left of a chunk that is too short for a run is not lost.
    #[test]
    fn the_rest_of_a_chunk_is_idle() {
        let mut space = Space::default();
        let first = space.take(3).unwrap();
        let rest = space.end - space.next;
        let second = space.take(rest / PAGE_BYTES + 1).unwrap();
        assert_eq!(space.take(rest / PAGE_BYTES), Some(first + 3 * PAGE_BYTES));
        assert_ne!(second, first);
    }
}
