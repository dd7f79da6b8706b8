//! The mover on the real kernel.

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_sys::map::{self, Reservation};

use super::{Full, Mover, Refusal, Shared};
use crate::config::Mode;
use crate::folio::{Geometry, Units};
use crate::system::Linux;

const FOLIO_BYTES: usize = 64 << 10;

fn world(unit_bytes: usize) -> (Mover, Reservation, Geometry) {
    let geometry = Geometry::new(UnitOrder::from_bytes(unit_bytes).unwrap());
    let system = Box::new(Linux::open(Mode::Inline).unwrap());
    let mover = Mover::new(system, 4, 1, geometry).unwrap();
    let space = Reservation::new(2 * FOLIO_BYTES, FOLIO_BYTES).unwrap();
    mover.register(space.address(), space.address() + space.bytes()).unwrap();
    (mover, space, geometry)
}

/// A bit for each page that is resident.
fn pages(address: usize) -> u16 {
    let mut present = [0_u8; 16];
    map::residency(address, FOLIO_BYTES, &mut present).unwrap();
    (0..16).filter(|page| present[*page] & 1 == 1).map(|page| 1 << page).sum()
}

/// Makes the pages of `mask` resident in the folio at `base`; page `p` begins with `p + 1`.
fn populate(mover: &Mover, base: usize, mask: u16) {
    for page in (0..16_usize).filter(|page| mask >> page & 1 == 1) {
        let contents = vec![u8::try_from(page).unwrap() + 1; PAGE_BYTES];
        mover.copy_in(contents.as_ptr() as usize, base + page * PAGE_BYTES, PAGE_BYTES);
    }
    assert_eq!(pages(base), mask);
}

/// The units of a mask.
fn units_of(mask: u16) -> Units {
    (0..16).filter(|unit| mask >> unit & 1 == 1).map(Units::one).collect()
}

fn first_byte(mover: &Mover, slot: &Full, geometry: Geometry, page: usize) -> u8 {
    let address = page * PAGE_BYTES;
    let index = geometry.index(address);
    mover.part(slot, index..index + 1)[address % geometry.unit_bytes()]
}

/// Goal: a folio with holes goes out whole and comes back as it was. Method: each bit of a mask
/// says whether a page is present.
#[test]
fn a_folio_with_holes_goes_out_and_comes_back() {
    for mask in [1_u16, 0x8000, 0xFFFF, 0x00FF, 0xFF00, 0x5555, 0xAAAA, 0x8001, 0x7FFE, 0x0180] {
        let (mover, space, geometry) = world(FOLIO_BYTES);
        populate(&mover, space.address(), mask);
        for round in 0..3 {
            let slot = mover.take_hollow().unwrap();
            let answer = mover.capture(space.address(), geometry.all(), slot, Shared::Copied);
            let (full, refused) = answer.expect("something is there");
            assert_eq!(refused, None);
            assert_eq!(pages(space.address()), 0, "mask {mask:#x} round {round}");
            let at = mover.staging.full_address(&full);
            assert_eq!(pages(at), 0xFFFF, "mask {mask:#x} round {round}");
            for page in 0..16 {
                let expected =
                    if mask >> page & 1 == 1 { u8::try_from(page).unwrap() + 1 } else { 0 };
                assert_eq!(first_byte(&mover, &full, geometry, page), expected, "{mask:#x} {page}");
            }
            mover.place(full, space.address());
            assert_eq!(pages(at), 0, "mask {mask:#x} round {round}: the slot is not hollow");
            assert_eq!(pages(space.address()), 0xFFFF, "mask {mask:#x} round {round}");
        }
    }
}

/// Goal: a move of adjacent folios that stops within one of them leaves that one as it was, and it goes
/// out by itself. Method: the second folio lacks a page.
#[test]
fn adjacent_folios_go_out_up_to_a_hole() {
    let (mover, space, geometry) = world(PAGE_BYTES);
    let bases = [space.address(), space.address() + FOLIO_BYTES];
    populate(&mover, bases[0], 0xFFFF);
    populate(&mover, bases[1], !(1 << 7));
    let first = mover.take_hollow().unwrap();
    let second = mover.take_hollow_above(&first).unwrap();
    assert_eq!(mover.capture_many(bases[0], 2, &first), 1);
    assert_eq!(bases.map(pages), [0, !(1 << 7)]);
    let full = mover.captured(first);
    let (other, refused) = mover.capture(bases[1], geometry.all(), second, Shared::Copied).unwrap();
    assert_eq!((refused, bases.map(pages)), (None, [0, 0]));
    for page in 0..16 {
        let expected = u8::try_from(page).unwrap() + 1;
        assert_eq!(first_byte(&mover, &full, geometry, page), expected);
        let expected = if page == 7 { 0 } else { expected };
        assert_eq!(first_byte(&mover, &other, geometry, page), expected);
    }
}

/// Goal: units of a slot come back one after the other, each once, with their contents, and the rest
/// stays in the slot.
#[test]
fn a_slot_is_emptied_by_parts() {
    let (mover, space, geometry) = world(PAGE_BYTES);
    populate(&mover, space.address(), 0xFFFF);
    let slot = mover.take_hollow().unwrap();
    let (mut full, _) =
        mover.capture(space.address(), geometry.all(), slot, Shared::Copied).expect("there");
    let at = mover.staging.full_address(&full);
    let mut back = 0_u16;
    for part in [0x0040_u16, 0x8001, 0x0F00] {
        mover.place_units(&mut full, units_of(part), space.address());
        back |= part;
        assert_eq!((pages(space.address()), pages(at)), (back, !back));
        assert_eq!(mover.bytes_used(), (!back).count_ones() as usize * PAGE_BYTES);
    }
    mover.place(full, space.address());
    assert_eq!((pages(space.address()), pages(at), mover.bytes_used()), (0xFFFF, 0, 0));
    for page in 0..16_u8 {
        // SAFETY: all pages are there.
        #[allow(unsafe_code, reason = "reads what the program would")]
        let first = unsafe { *((space.address() + usize::from(page) * PAGE_BYTES) as *const u8) };
        assert_eq!(first, page + 1);
    }
}

/// Goal: of a folio some units go out, the others stay where they are, and the slot has exactly the
/// units that went out.
#[test]
fn some_units_go_out_and_the_others_stay() {
    for mask in [0x1_u16, 0x8000, 0x00F0, 0x5A5A, 0xFFFE] {
        let (mover, space, geometry) = world(PAGE_BYTES);
        populate(&mover, space.address(), 0xFFFF);
        let wanted = units_of(mask);
        let slot = mover.take_hollow().unwrap();
        let (full, refused) =
            mover.capture(space.address(), wanted, slot, Shared::Copied).expect("there");
        assert_eq!(refused, None);
        assert_eq!(
            (pages(space.address()), pages(mover.staging.full_address(&full))),
            (!mask, mask)
        );
        assert_eq!(mover.bytes_used(), geometry.bytes_of(wanted));
        for unit in wanted.iter() {
            assert_eq!(usize::from(first_byte(&mover, &full, geometry, unit)), unit + 1);
        }
        mover.place(full, space.address());
        assert_eq!((pages(space.address()), mover.bytes_used()), (0xFFFF, 0));
    }
}

/// Goal: a copy fills missing pages and leaves present ones as they are (MOVE-2).
#[test]
fn a_copy_does_not_touch_what_is_there() {
    let (mover, space, geometry) = world(PAGE_BYTES);
    populate(&mover, space.address(), 0x0006);
    let slot = mover.take_hollow().unwrap();
    let mut full = mover.fill(slot).unwrap();
    mover.objects_mut(&mut full, geometry.all(), Units::NONE).for_each(|(_, unit)| unit.fill(0x77));
    mover.place_copy(&full, Units::from(0..4), space.address());
    assert_eq!(pages(space.address()), 0x000F);
    assert_eq!(pages(mover.staging.full_address(&full)), 0xFFFF, "the slot keeps its pages");
    let slot = mover.take_hollow().unwrap();
    let back =
        mover.capture(space.address(), Units::from(0..4), slot, Shared::Copied).expect("there").0;
    let firsts = [0, 1, 2, 3].map(|unit| first_byte(&mover, &back, geometry, unit));
    assert_eq!(firsts, [0x77, 2, 3, 0x77]);
}

/// Goal: a folio in several mappings comes back whole. Method: one page is kept from children, so
/// that the kernel splits the mapping there.
#[test]
fn a_copy_crosses_mappings() {
    for mapped_apart in [0, 7, 15] {
        let (mover, space, geometry) = world(PAGE_BYTES);
        let apart = space.address() + mapped_apart * PAGE_BYTES;
        map::keep_from_children(apart, PAGE_BYTES).unwrap();
        let slot = mover.take_hollow().unwrap();
        let full = mover.fill(slot).unwrap();
        mover.place_copy(&full, geometry.all(), space.address());
        assert_eq!(pages(space.address()), 0xFFFF, "page {mapped_apart}");
    }
}

/// Goal: a folio in several mappings goes out whole.
#[test]
fn a_capture_crosses_mappings() {
    for mapped_apart in [0, 7, 15] {
        let (mover, space, geometry) = world(16 << 10);
        populate(&mover, space.address(), 0xFFFF);
        let apart = space.address() + mapped_apart * PAGE_BYTES;
        map::keep_from_children(apart, PAGE_BYTES).unwrap();
        let slot = mover.take_hollow().unwrap();
        let answer = mover.capture(space.address(), geometry.all(), slot, Shared::Copied);
        let (full, refused) = answer.expect("every page can be moved");
        assert_eq!((refused, pages(space.address())), (None, 0), "page {mapped_apart}");
        assert_eq!(pages(mover.staging.full_address(&full)), 0xFFFF);
    }
}

/// Goal: a page that cannot be moved keeps its own unit in the program, and no other unit. Method:
/// the page is read-only.
#[test]
fn what_cannot_be_moved_stays_and_the_rest_goes() {
    for fixed in [0, 5, 15] {
        let (mover, space, geometry) = world(16 << 10);
        populate(&mover, space.address(), 0xFFFF);
        let at = space.base().as_ptr().wrapping_add(fixed * PAGE_BYTES).cast();
        // SAFETY: a page of our own mapping.
        #[allow(unsafe_code, reason = "what a program may do")]
        let changed = unsafe { libc::mprotect(at, PAGE_BYTES, libc::PROT_READ) };
        assert_eq!(changed, 0);
        let slot = mover.take_hollow().unwrap();
        let answer = mover.capture(space.address(), geometry.all(), slot, Shared::Copied);
        let (full, refused) = answer.expect("three units can be moved");
        let stays = 0xF << (fixed / 4 * 4);
        assert_eq!((refused, pages(space.address())), (Some(Refusal::Mapping), stays));
        assert_eq!(full.units(), geometry.all() - Units::one(fixed / 4));
        assert_eq!(pages(mover.staging.full_address(&full)), !stays);
        mover.place(full, space.address());
        assert_eq!(pages(space.address()), 0xFFFF);
    }
}

/// Goal: a slot that a stranger touched costs a refusal, never a byte. Method: there is a page of
/// zeros in the middle of a hollow slot; the unit must be whole after the refusal, and go out the
/// next time.
#[test]
fn a_slot_that_a_stranger_touched_loses_nothing() {
    for unit_bytes in [PAGE_BYTES, FOLIO_BYTES] {
        let (mover, space, geometry) = world(unit_bytes);
        populate(&mover, space.address(), 0xFFFF);
        let slot = mover.take_hollow().unwrap();
        let touched = mover.staging.hollow_address(&slot);
        mover.answer_stranger(touched + 5 * PAGE_BYTES + 9);
        assert_eq!(pages(touched), 1 << 5);
        match mover.capture(space.address(), geometry.all(), slot, Shared::Copied) {
            Ok((full, refused)) => {
                assert_eq!((refused, geometry.units()), (Some(Refusal::Busy), 16));
                assert_eq!(pages(space.address()), 1 << 5);
                mover.place(full, space.address());
            }
            Err(refusal) => assert_eq!((refusal, geometry.units()), (Refusal::Busy, 1)),
        }
        assert_eq!(pages(space.address()), 0xFFFF);
        let mut slots = std::iter::from_fn(|| mover.take_hollow());
        let slot = slots.find(|slot| mover.staging.hollow_address(slot) == touched).unwrap();
        let answer = mover.capture(space.address(), geometry.all(), slot, Shared::Copied);
        let (full, refused) = answer.expect("clean now");
        assert_eq!(refused, None);
        for page in 0..16 {
            assert_eq!(usize::from(first_byte(&mover, &full, geometry, page)), page + 1);
        }
    }
}

/// Goal: the capture of a folio without pages is refused with a reason of its own, and leaves
/// nothing in the slot.
#[test]
fn a_folio_without_a_page_is_refused() {
    let (mover, space, geometry) = world(16 << 10);
    let slot = mover.take_hollow().unwrap();
    let at = mover.staging.hollow_address(&slot);
    let refusal = mover.capture(space.address(), geometry.all(), slot, Shared::Copied).unwrap_err();
    assert_eq!(refusal, Refusal::Nothing);
    assert_eq!((pages(at), mover.bytes_used()), (0, 0));
}

/// A child that has all pages of this process until it is dropped.
struct Child(i32);

#[allow(unsafe_code, reason = "a child that makes one system call")]
impl Child {
    fn new() -> Child {
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            loop {
                // SAFETY: no precondition.
                unsafe { libc::pause() };
            }
        }
        Child(child)
    }
}

#[allow(unsafe_code, reason = "ends its own child")]
impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, which was not waited for yet.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above; its status is not asked for.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// Goal: what a child has too stays if that is wanted, and is copied and goes if not; once the child is gone it counts
/// as shared no longer, and goes.
#[test]
fn what_a_child_has_is_left_or_copied() {
    let (mover, space, geometry) = world(16 << 10);
    let bases = [space.address(), space.address() + FOLIO_BYTES];
    bases.iter().for_each(|base| populate(&mover, *base, 0xFFFF));
    let child = Child::new();
    let capture =
        |base, shared| mover.capture(base, geometry.all(), mover.take_hollow().unwrap(), shared);
    assert_eq!(capture(bases[0], Shared::Left).unwrap_err(), Refusal::Busy);
    assert_eq!(bases.map(pages), [0xFFFF, 0xFFFF]);
    let (copied, refused) = capture(bases[0], Shared::Copied).unwrap();
    assert_eq!((refused, bases.map(pages)), (None, [0, 0xFFFF]));
    drop(child);
    let (moved, refused) = capture(bases[1], Shared::Left).unwrap();
    assert_eq!((refused, bases.map(pages)), (None, [0, 0]));
    for page in 0..16 {
        let expected = u8::try_from(page).unwrap() + 1;
        for full in [&copied, &moved] {
            assert_eq!(first_byte(&mover, full, geometry, page), expected);
        }
    }
}
