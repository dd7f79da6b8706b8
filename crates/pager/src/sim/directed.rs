//! Directed tests: orders of events that random seeds seldom meet. Each test sets one order up.
//!
//! There are three threads: the program's first thread, a second thread of the program that changes
//! mappings, and the engine's handler. Until `serves` is set, the handler only reads messages and
//! leaves them in the inbox, like a thread of the engine whose move was refused with `EAGAIN`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_sys::Errno;

use super::schedule::{self, Body};
use super::settings::{Settings, Spill};
use super::space::Halt;
use super::world::World;
use crate::mappings::event::is_change;
use crate::reclaim::{By, Reclaimed};

/// Pages of two whole folios, and two places of the same size.
const OLD: Range<usize> = 0..32;
const NEW: Range<usize> = 128..160;
const OTHER: Range<usize> = 256..288;

/// Pages that are registered together with `OLD`, but are less than a folio: their missing pages
/// read as zeros.
const EDGE: Range<usize> = 32..36;

/// A test's world, and whether the handler serves faults and applies changes.
struct Stage {
    world: World,
    serves: AtomicBool,
}

/// Runs the two threads of the program, until the first one ends.
fn play(first: impl FnOnce(&Stage) + Send, changer: impl FnOnce(&Stage) + Send) {
    play_with(Settings::directed(), first, changer);
}

fn play_with(
    settings: Settings,
    first: impl FnOnce(&Stage) + Send,
    changer: impl FnOnce(&Stage) + Send,
) {
    let world = World::new(1, settings, false);
    let stage = &Stage { world, serves: AtomicBool::new(false) };
    let first = move || {
        first(stage);
        stage.world.engine.work.stopping.store(true, Relaxed);
    };
    let threads: Vec<Body<'_>> = vec![
        ("program".to_owned(), Box::new(first)),
        ("changer".to_owned(), Box::new(move || changer(stage))),
        ("handler".to_owned(), Box::new(|| stage.handle())),
    ];
    let schedule = Arc::clone(&stage.world.schedule);
    schedule.run(threads).unwrap_or_else(|why| panic!("{why}"));
}

impl Stage {
    fn handle(&self) {
        let engine = &self.world.engine;
        while !self.world.is_over() {
            engine.mover.system.wait(20, None);
            if self.serves.load(Relaxed) {
                engine.handle_turn(&mut |_| ());
            } else {
                engine.mover.read_messages();
            }
        }
    }

    /// Waits until a condition holds. Fails if the first thread has ended before.
    fn until(&self, condition: impl Fn() -> bool) {
        while !condition() {
            assert!(!self.world.is_over(), "the other thread has ended, and this one waits");
            schedule::wait("a condition".to_owned(), Some(1000));
        }
    }

    /// The addresses where a range of pages begins and ends.
    fn addresses(&self, pages: &Range<usize>) -> (usize, usize) {
        (self.world.space.address(pages.start), self.world.space.address(pages.end))
    }

    /// Maps a range, and writes to the pages `written` of it.
    fn map(&self, mapped: &Range<usize>, written: &Range<usize>) {
        let (start, end) = self.addresses(mapped);
        self.world.space.map(start, end);
        for page in written.clone() {
            let done = self.world.touch(page, true, |bytes, model| {
                bytes[..8].copy_from_slice(&(page as u64 + 1).to_le_bytes());
                model.copy_from_slice(bytes);
            });
            assert!(done, "it is mapped");
        }
    }

    /// Maps a range, writes to pages of it, and has the engine adopt it.
    fn map_and_adopt(&self, mapped: &Range<usize>, written: &Range<usize>) {
        let (start, end) = self.addresses(mapped);
        self.map(mapped, written);
        self.world.engine.adopt(start, end).expect("the kernel refuses nothing");
    }

    /// The same, and has everything stored that can be.
    fn map_and_store(&self, mapped: &Range<usize>, written: &Range<usize>) {
        self.map_and_adopt(mapped, written);
        let ((start, end), engine) = (self.addresses(mapped), &self.world.engine);
        let table = engine.table.read();
        while engine.reclaim_one(&table, 0, By::Background) != Reclaimed::Nothing {}
        for (_, lock) in table.known_folios(start, end) {
            let folio = lock.lock();
            assert!(!folio.managed || folio.stored == engine.geometry().all());
        }
    }

    /// `mremap` without the engine, to a place where memory in use ends. It returns once the handler has read its
    /// events.
    fn move_raw(&self, from: &Range<usize>, to: &Range<usize>) {
        let ((start, end), (to, _)) = (self.addresses(from), self.addresses(to));
        let forget = |page| self.world.forget(page);
        let follow = |from, to| self.world.follow(from, to);
        self.world.space.remap_onto(start, to, end - start, &forget, &follow).expect("one mapping");
    }

    /// `munmap` without the engine.
    fn unmap_raw(&self, pages: &Range<usize>) {
        let (start, end) = self.addresses(pages);
        self.world.space.unmap(start, end - start, &|page| self.world.forget(page));
    }

    /// Reads pages, which must be mapped, and compares them with what was written.
    fn read(&self, pages: Range<usize>) {
        for page in pages {
            assert!(self.world.read(page), "page {page:#x} is mapped");
        }
    }
}

/// Stored contents were moved from `OLD` to `NEW` without the engine, which has read the event and has not
/// yet applied it. Then the engine changes mappings itself, and all of `left` must be what was written.
fn change_after_a_move(change: impl FnOnce(&Stage) + Send, left: Range<usize>) {
    let first = |stage: &Stage| {
        stage.map_and_store(&OLD, &OLD);
        stage.move_raw(&OLD, &NEW);
        let waits = stage.world.engine.mover.inbox.first();
        assert!(waits.is_some_and(|event| is_change(event.message)), "the move waits");
        change(stage);
        stage.serves.store(true, Relaxed);
        stage.read(left);
    };
    play(first, |_| ());
}

/// Goal: `madvise(MADV_DONTNEED)` comes after a move that was made before (`EVT-3`). If the move came
/// later, it would bring the old bytes back.
#[test]
fn a_discard_comes_after_a_move_that_waits() {
    let discard = |stage: &Stage| {
        let world = &stage.world;
        let (start, end) = stage.addresses(&NEW);
        let call =
            |at, bytes| world.space.drop_contents(at, bytes, None, &|page| world.forget(page));
        world.engine.discard(start, end, call).expect("mapped");
    };
    change_after_a_move(discard, NEW);
}

/// Goal: the same for `mlock`. If the move came later, the contents could not be placed any more.
#[test]
fn a_pin_comes_after_a_move_that_waits() {
    let pin = |stage: &Stage| {
        let (start, end) = stage.addresses(&NEW);
        stage.world.engine.pin(start, end);
    };
    change_after_a_move(pin, NEW);
}

/// Goal: the same for `munmap` of a part of a folio, whose other part must keep its contents.
#[test]
fn an_unmap_comes_after_a_move_that_waits() {
    let (gone, left) = (NEW.start..NEW.start + 4, NEW.start + 4..NEW.end);
    let unmap = move |stage: &Stage| {
        let (start, end) = stage.addresses(&gone);
        let call = || {
            stage.unmap_raw(&gone);
            Ok::<(), Errno>(())
        };
        stage.world.engine.unmap(start, end, call).expect("mapped");
    };
    change_after_a_move(unmap, left);
}

/// Goal: the same for `mremap`, which must take the contents along.
#[test]
fn a_relocation_comes_after_a_move_that_waits() {
    let relocate = |stage: &Stage| {
        let (from, to) = (stage.addresses(&NEW), stage.addresses(&OTHER));
        let call = || {
            stage.move_raw(&NEW, &OTHER);
            Ok::<_, Errno>(to)
        };
        stage.world.engine.relocate(from, (0, 0), &[], call).expect("mapped");
        assert!(stage.world.engine.table.read().manages(to.0), "the old place was managed");
    };
    change_after_a_move(relocate, OTHER);
}

/// Goal: a page that is copied in is not lost if its mapping moves between the two looks that the
/// kernel takes at the mappings: the first answer is `ENOENT` as if nothing were mapped, and the
/// next one `EAGAIN`.
#[test]
fn a_page_is_not_lost_if_its_mapping_moves_while_the_kernel_copies() {
    let (page, to) = (OLD.start + 3, NEW.start);
    let moved = &AtomicBool::new(false);
    let first = |stage: &Stage| {
        stage.map_and_store(&OLD, &OLD);
        stage.world.space.halt(Halt::Between);
        stage.serves.store(true, Relaxed);
        assert!(!stage.world.read(page), "it moves during this read");
        stage.until(|| moved.load(Relaxed));
        stage.read(to..to + 1);
    };
    let changer = |stage: &Stage| {
        stage.until(|| stage.world.space.has_stopped());
        stage.move_raw(&(page..page + 1), &(to..to + 1));
        moved.store(true, Relaxed);
    };
    play(first, changer);
}

/// The first thread touches a missing page of `EDGE`, which the engine would serve with zeros. Before it
/// does, `changer` puts a mapping with stored contents there.
fn put_contents_under_a_fault(halts: bool, before: impl FnOnce(&Stage) + Send) {
    let (with_edge, stored) = (OLD.start..EDGE.end, 48..64);
    let first = |stage: &Stage| {
        stage.map_and_store(&stored, &stored);
        stage.map_and_store(&with_edge, &OLD);
        if halts {
            stage.world.space.halt(Halt::Before);
            stage.serves.store(true, Relaxed);
        }
        // Nothing is mapped there for a moment.
        EDGE.for_each(|page| stage.until(|| stage.world.read(page)));
    };
    let changer = |stage: &Stage| {
        before(stage);
        stage.unmap_raw(&EDGE);
        stage.move_raw(&(stored.start..stored.start + EDGE.len()), &EDGE);
        stage.serves.store(true, Relaxed);
    };
    play(first, changer);
}

/// Goal: zeros are not placed where a change that waits has put other contents (`EVT-3`).
#[test]
fn a_page_of_zeros_does_not_replace_what_was_moved_there() {
    put_contents_under_a_fault(true, |stage| stage.until(|| stage.world.space.has_stopped()));
}

/// Goal: a fault whose page was changed after its message was read gets what lies there now (`EVT-4`).
#[test]
fn an_outdated_fault_gets_what_lies_there_now() {
    put_contents_under_a_fault(false, |stage| {
        stage.until(|| stage.world.engine.mover.inbox.first().is_some());
    });
}

/// Goal: what a program maps once a raw `munmap` has returned is not captured in the place of what was
/// there before (`EVT-3`), not even after the process's first raw call. The new memory is not managed, so
/// a page of it could not be put back.
#[test]
fn a_capture_does_not_take_what_was_mapped_after_a_raw_unmap() {
    let first = |stage: &Stage| {
        stage.map_and_adopt(&OLD, &OLD);
        stage.world.space.halt(Halt::Capture);
        let table = stage.world.engine.table.read();
        stage.world.engine.reclaim_one(&table, 0, By::Background);
        drop(table);
        stage.serves.store(true, Relaxed);
        OLD.for_each(|page| stage.until(|| stage.world.read(page)));
    };
    let changer = |stage: &Stage| {
        stage.until(|| stage.world.space.has_stopped());
        stage.unmap_raw(&OLD);
        stage.map(&OLD, &OLD);
    };
    play(first, changer);
}

/// Goal: a mapping that is moved onto memory in use keeps its contents, if that memory is being captured: before the
/// move or after it (`EVT-5`). Method: what is moved is resident, stored, or in part neither.
#[test]
fn a_capture_does_not_take_what_is_moved_there() {
    let part = NEW.start..NEW.start + 8;
    let sources = [(NEW, true), (NEW, false), (part, false), (NEW.start..NEW.start, false)];
    let all =
        sources.into_iter().flat_map(|it| [(Halt::Capture, it.clone()), (Halt::Captured, it)]);
    for (halt, (written, is_stored)) in all {
        let first = |stage: &Stage| {
            if is_stored {
                stage.map_and_store(&NEW, &NEW);
            }
            stage.map_and_adopt(&OLD, &OLD);
            if !is_stored {
                stage.map_and_adopt(&NEW, &written);
            }
            stage.world.space.halt(halt);
            let table = stage.world.engine.table.read();
            stage.world.engine.reclaim_one(&table, 0, By::Background);
            drop(table);
            stage.serves.store(true, Relaxed);
            OLD.for_each(|page| stage.until(|| stage.world.read(page)));
        };
        let changer = |stage: &Stage| {
            stage.until(|| stage.world.space.has_stopped());
            stage.move_raw(&NEW, &OLD);
        };
        play(first, changer);
    }
}

/// Goal: what is stored is not lost if its range, or one around a part of it, is adopted as if it were new
/// (`ADOPT-1`).
#[test]
fn what_is_adopted_again_keeps_its_contents() {
    for again in [OLD, 4..40, 0..36] {
        let first = |stage: &Stage| {
            stage.map_and_store(&OLD, &OLD);
            stage.map(&(OLD.end..40), &(OLD.end..40));
            let (start, end) = stage.addresses(&again);
            stage.world.engine.adopt(start, end).expect("the kernel refuses nothing");
            stage.serves.store(true, Relaxed);
            stage.read(0..40);
        };
        play(first, |_| ());
    }
}

/// Goal: when a registration is refused with all around it, what is managed around it keeps its contents when it is
/// adopted again (`ADOPT-1`).
#[test]
fn what_lies_beside_a_refused_registration_keeps_its_contents() {
    let beside = OLD.end..OLD.end + 16;
    let first = |stage: &Stage| {
        stage.map_and_store(&OLD, &OLD);
        stage.map(&beside, &beside);
        stage.world.space.refuse_next();
        for again in [&beside, &OLD] {
            let (start, end) = stage.addresses(again);
            stage.world.engine.adopt(start, end).expect("refused once");
        }
        stage.serves.store(true, Relaxed);
        stage.read(OLD.start..beside.end);
    };
    play(first, |_| ());
}

/// Goal: when `mremap` of several mappings fails midway, each page has what the kernel left there. The pages that
/// moved were not all touched, and something else is stored for them at the new place; their old place is free.
#[test]
fn what_a_failed_move_has_moved_is_taken_as_it_is() {
    let (moved, stays) = (OLD.start..OLD.start + 24, OLD.start + 24..OLD.end);
    let at = NEW.start..NEW.start + moved.len();
    let first = |stage: &Stage| {
        stage.map_and_store(&NEW, &NEW);
        stage.map(&moved, &(moved.start..moved.end - 4));
        stage.map_and_store(&stays, &stays);
        let call = || {
            stage.unmap_raw(&at);
            stage.move_raw(&moved, &at);
            Err::<(usize, usize), _>(Errno::NOMEM)
        };
        let engine = &stage.world.engine;
        let (from, to) = (stage.addresses(&OLD), stage.addresses(&NEW));
        engine.relocate(from, to, &[], call).expect_err("it has failed midway");
        // The program maps something new where the first part was.
        stage.map(&moved, &(0..0));
        for again in [&moved, &NEW] {
            let (start, end) = stage.addresses(again);
            engine.adopt(start, end).expect("the kernel refuses nothing");
        }
        stage.serves.store(true, Relaxed);
        stage.read(OLD);
        stage.read(NEW);
    };
    play(first, |_| ());
}

/// Goal: no folio is managed with a hole left by a mapping too small to be registered (`ADOPT-2`): what is mapped
/// there next would be captured, and read as zeros.
#[test]
fn what_is_mapped_in_a_hole_is_not_captured() {
    // The hole ends within a unit of four pages, which is captured as a whole.
    let (small, rest) = (OLD.start..OLD.start + 6, OLD.start + 6..OLD.end);
    let unit = UnitOrder::from_bytes(4 * PAGE_BYTES).expect("a unit");
    let first = |stage: &Stage| {
        let adopt = |pages| {
            let (start, end) = stage.addresses(pages);
            stage.world.engine.adopt(start, end).expect("the kernel refuses nothing");
        };
        stage.map(&small, &small);
        adopt(&small);
        stage.unmap_raw(&small);
        stage.map(&rest, &rest);
        adopt(&rest);
        stage.map(&small, &small);
        let table = stage.world.engine.table.read();
        while stage.world.engine.reclaim_one(&table, 0, By::Background) != Reclaimed::Nothing {}
        drop(table);
        stage.serves.store(true, Relaxed);
        stage.read(OLD);
    };
    play_with(Settings { unit, ..Settings::directed() }, first, |_| ());
}

/// A regression: while a fork waited for one disk that stalled, nobody could read from another. Goal: a fault on what
/// another disk has is served before the fork. Method: the request under way takes 2 s, and later ones do not.
#[test]
fn a_fork_that_waits_for_a_disk_does_not_keep_others_waiting() {
    const STALL_NS: u64 = 2_000_000_000;
    let is_settled = AtomicBool::new(false);
    let first = |stage: &Stage| {
        let engine = &stage.world.engine;
        stage.map_and_store(&OLD, &OLD);
        let (start, end) = stage.addresses(&OLD);
        let table = engine.table.read();
        let folios = || table.known_folios(start, end);
        let copies = folios().flat_map(|(_, lock)| {
            let folio = lock.lock();
            let ticket = |index| folio.copy_of(index).map(|copy| engine.store.ticket(copy));
            engine.geometry().all().iter().filter_map(ticket).collect::<Vec<_>>()
        });
        let tickets: Vec<_> = copies.collect();
        engine.store.write_back_chosen(&tickets);
        engine.store.drain();
        assert!(tickets.iter().all(|ticket| engine.store.is_away(*ticket)));
        engine.store.fetch([tickets[0]], |_| false);
        engine.store.poll();
        stage.world.disk.iter().for_each(|disk| disk.delay(STALL_NS));
        drop(table);
        let began_ns = stage.world.schedule.now_ns();
        stage.serves.store(true, Relaxed);
        engine.settle_for_fork();
        is_settled.store(true, Relaxed);
        assert!(stage.world.schedule.now_ns() - began_ns >= STALL_NS);
        assert!(engine.quiet(crate::spill::Lent::default()).is_some());
    };
    let other = |stage: &Stage| {
        stage.until(|| stage.world.engine.work.settling.load(Relaxed));
        stage.read(OLD.end - 1..OLD.end);
        assert!(!is_settled.load(Relaxed), "it has waited for the fork");
    };
    play_with(Settings { spill: Some(Spill::good(false)), ..Settings::directed() }, first, other);
}

const _: () = assert!(PAGE_BYTES == 4096, "the folios above are of 16 pages");
