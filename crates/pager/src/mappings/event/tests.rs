use std::collections::BTreeMap;

use zfolio_core::page::PAGE_BYTES;
use zfolio_sys::testing::in_child;
use zfolio_sys::uffd::Message;

use super::{Announced, Event, Inbox, Later, Place, Turn};

const PAGES: usize = 32;

/// Puts a message into the inbox, as if it had been read.
fn put(inbox: &Inbox, message: Message) {
    inbox.keep(&mut inbox.changes.write(), Event { message, at: 0 });
}

/// Goal: an event of the engine's own call is skipped, and none that reaches beyond the call's range.
#[test]
fn only_what_lies_within_an_announced_range_is_the_engines_own() {
    let announced = Announced::default();
    let covers = |first: usize, end: usize| announced.covers(first * PAGE_BYTES, end * PAGE_BYTES);
    assert!(!covers(0, 1), "nothing is announced");
    // A length need not be a whole number of pages.
    announced.set((4 * PAGE_BYTES, 8 * PAGE_BYTES - 100), (20 * PAGE_BYTES, 22 * PAGE_BYTES));
    for (first, end) in [(4, 8), (5, 6), (7, 8), (20, 22), (21, 22)] {
        assert!(covers(first, end), "{first}..{end}");
    }
    for (first, end) in [(3, 8), (4, 9), (7, 21), (0, 30), (2, 4), (8, 9), (19, 21)] {
        assert!(!covers(first, end), "{first}..{end}");
    }
    announced.clear();
    assert!(!covers(4, 8) && !covers(0, 1));
}

/// Goal: a fault that its thread repeats, because a signal came, waits once; those of other threads and pages wait,
/// too.
#[test]
fn a_fault_that_is_repeated_waits_once() {
    let inbox = Inbox::default();
    for (address, thread) in [(0, 1), (100, 1), (0, 2), (PAGE_BYTES, 1), (0, 1)] {
        put(&inbox, Message::Fault { address, thread });
        let (event, left) = inbox.take_fault().unwrap();
        assert_eq!(left, 0);
        inbox.put_aside(event, Later::Room, 7, Turn::new(5));
    }
    assert_eq!(inbox.aside(), 3);
    assert!(inbox.first().is_none(), "none is served at once");
    let threads: Vec<_> = std::iter::from_fn(|| inbox.take_aside())
        .map(|aside| match aside.event.message {
            Message::Fault { address, thread } => (address, thread),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(threads, [(0, 1), (0, 2), (PAGE_BYTES, 1)]);
}

/// A regression: a child whose parent's handler tried to read messages at the fork counted that try for ever, and
/// each of its moves waited for that reader. Goal: the child counts nobody. Method: a fork while another thread
/// tries.
#[test]
fn a_child_forgets_who_tried_to_read_messages() {
    let inbox = Inbox::default();
    let mut held = inbox.lock();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(inbox.changes.write_after(u32::MAX)));
        while !inbox.changes.is_tried() {
            std::hint::spin_loop();
        }
        let is_good = in_child(|| {
            let was_tried = inbox.changes.is_tried();
            held.clear();
            was_tried && !inbox.changes.is_tried()
        });
        drop(held);
        assert!(is_good);
    });
    assert!(!inbox.changes.is_tried());
}

/// Goal: memory that is placed while changes wait lands where the program finds it after the
/// changes. Method: random changes, compared with a map from each page to where it went.
#[test]
fn pages_are_placed_where_the_changes_took_them() {
    let mut random = 42_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(random >> 33).map_or(0, |number| number % below)
    };
    for _ in 0..2000 {
        let inbox = Inbox::default();
        let mut went: BTreeMap<usize, usize> = (0..PAGES).map(|page| (page, page)).collect();
        for _ in 0..next(5) {
            let (from, count) = (next(PAGES), 1 + next(4));
            let there = from..from + count;
            let (start, end) = (from * PAGE_BYTES, (from + count) * PAGE_BYTES);
            let message = match next(4) {
                0 => Message::Fault { address: start, thread: 1 },
                1 => Message::Remove { start, end },
                2 => Message::Unmap { start, end },
                _ => {
                    let to = PAGES + next(PAGES);
                    // Pages at the target are replaced, and pages of the source move there.
                    went.retain(|_, now| !(to..to + count).contains(now));
                    for now in went.values_mut().filter(|now| there.contains(now)) {
                        *now = *now - from + to;
                    }
                    Message::Remap { from: start, to: to * PAGE_BYTES, bytes: end - start }
                }
            };
            if matches!(message, Message::Remove { .. } | Message::Unmap { .. }) {
                went.retain(|_, now| !there.contains(now));
            }
            put(&inbox, message);
        }
        let steady = inbox.steady();
        for page in 0..PAGES {
            let now = match steady.place_now(page * PAGE_BYTES, PAGE_BYTES) {
                Place::Here => Some(page),
                Place::There(place) => Some(place / PAGE_BYTES),
                Place::Nowhere => None,
                Place::Apart => unreachable!("one page is never apart"),
            };
            assert_eq!(now, went.get(&page).copied());
        }
        let moved = (0..PAGES).any(|page| went.get(&page) != Some(&page));
        let all = steady.place_now(0, PAGES * PAGE_BYTES);
        assert!(matches!(all, Place::Here | Place::Apart));
        assert!(!moved || matches!(all, Place::Apart));
        assert!(!moved || steady.has_change(0, PAGES * PAGE_BYTES));
    }
}

#[test]
fn changes_go_before_faults_and_faults_keep_their_order() {
    let inbox = Inbox::default();
    let fault = |address| Message::Fault { address, thread: 1 };
    let change = Message::Remove { start: 0, end: PAGE_BYTES };
    for message in [fault(1), fault(2), change, fault(3)] {
        put(&inbox, message);
    }
    let address = |event: Option<Event>| match event.map(|event| event.message) {
        Some(Message::Fault { address, .. }) => Some(address),
        _ => None,
    };
    assert_eq!(address(inbox.first()), None);
    assert!(matches!(inbox.first_change(), Some(Message::Remove { .. })) && inbox.has_change());
    inbox.drop_change();
    assert!(inbox.first_change().is_none() && !inbox.has_change());
    let taken = inbox.take_fault().map(|(event, _)| event);
    assert_eq!(address(taken), Some(1));
    inbox.put_back(taken.unwrap());
    for (expected, left) in [(1, 2), (2, 1), (3, 0)] {
        assert_eq!(address(inbox.first()), Some(expected));
        let taken = inbox.take_fault().unwrap();
        assert_eq!((address(Some(taken.0)), taken.1), (Some(expected), left));
    }
    assert!(inbox.first().is_none() && inbox.take_in_hand().is_none() && !inbox.may_be_aside());
    put(&inbox, fault(4));
    assert_eq!(address(inbox.take_in_hand()), Some(4));
    assert!(inbox.may_be_aside() && inbox.aside() == 0);
    inbox.let_go();
    assert!(!inbox.may_be_aside());
}
