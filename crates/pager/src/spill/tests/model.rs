//! Random transfers against a model in memory.

use std::collections::BTreeMap;
use std::sync::mpsc;

use zfolio_core::swap::disk::{Disk, SLOT_BYTES, Transfer};
use zfolio_core::testing::{Random, seed};

use super::{
    DEPTH, SpillDisk, assert_holds, directory, medium, on_each_kind, pattern, read, write,
};

const SLOTS: usize = 512;

/// What a slot may hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holds {
    Version(u64),
    /// Zeros, since it was never written.
    Nothing,
    /// It was discarded: zeros, or what it held.
    Anything(Option<u64>),
}

struct Model {
    slots: Vec<Holds>,
    /// The slots of transfers that are under way.
    under_way: BTreeMap<u64, (usize, usize)>,
    next: u64,
}

impl Model {
    /// A range of which no slot is under way, as areas take care of (SWAP-1).
    fn range(&self, random: &mut Random) -> Option<(usize, usize)> {
        let count = 1 + random.below(16);
        let first = random.below(SLOTS - count + 1);
        let is_free =
            |(other, more): &(usize, usize)| first >= other + more || first + count <= *other;
        self.under_way.values().all(is_free).then_some((first, count))
    }

    fn begin(&mut self, disk: &SpillDisk, random: &mut Random) {
        let Some((first, count)) = self.range(random) else { return };
        self.next += 1;
        let is_read = random.below(2) == 0;
        let transfer = match is_read {
            true => read(self.next, first as u64, count),
            false => write(self.next, first as u64, count, self.next),
        };
        if disk.begin(transfer).is_err() {
            assert_eq!(self.under_way.len(), DEPTH, "it takes as many as it was made for");
            return;
        }
        self.under_way.insert(self.next, (first, count));
        if !is_read {
            self.slots[first..first + count].fill(Holds::Version(self.next));
        }
    }

    fn discard(&mut self, disk: &SpillDisk, random: &mut Random) {
        let Some((first, count)) = self.range(random) else { return };
        disk.discard(first as u64, count as u64);
        for slot in &mut self.slots[first..first + count] {
            *slot = match *slot {
                Holds::Version(version) => Holds::Anything(Some(version)),
                Holds::Nothing => Holds::Anything(None),
                anything @ Holds::Anything(_) => anything,
            };
        }
    }

    fn poll(&mut self, disk: &SpillDisk) {
        disk.poll(&mut |transfer| {
            let (first, count) = self.under_way.remove(&transfer.token).expect("once (DISK-1)");
            assert_eq!(transfer.result, Ok(()));
            assert_eq!((transfer.first, transfer.count), (first as u64, count));
            let found = transfer.buffer.slots().iter().zip(transfer.first..);
            for ((slot, number), holds) in found.zip(&self.slots[first..]) {
                let is = |version| slot.0 == pattern(number, version);
                let is_right = match *holds {
                    Holds::Version(version) => is(version),
                    Holds::Nothing => slot.0 == [0; SLOT_BYTES],
                    Holds::Anything(old) => slot.0 == [0; SLOT_BYTES] || old.is_some_and(is),
                };
                assert!(is_right, "slot {number} of {}: {holds:?}", transfer.token);
            }
        });
    }
}

/// Plays random transfers and discards on a disk of 512 slots.
pub(super) fn play(disk: &SpillDisk, random: &mut Random, steps: usize) {
    let mut model =
        Model { slots: vec![Holds::Nothing; SLOTS], under_way: BTreeMap::new(), next: 0 };
    for _ in 0..steps {
        match random.below(16) {
            0..10 => model.begin(disk, random),
            10 => model.discard(disk, random),
            11 | 12 => disk.flush(),
            13 => disk.pause(),
            _ => model.poll(disk),
        }
    }
    disk.flush();
    while !model.under_way.is_empty() {
        disk.pause();
        model.poll(disk);
    }
    for first in (0..SLOTS).step_by(16) {
        disk.begin(read(first as u64, first as u64, 16)).expect("few are under way");
        disk.flush();
        model.under_way.insert(first as u64, (first, 16));
        while !model.under_way.is_empty() {
            disk.pause();
            model.poll(disk);
        }
    }
}

/// Goal: whatever was written last is read, in whatever order transfers end, and discards hit what they were meant
/// for (`QUEUE-2`). Method: random transfers of 1 to 16 slots, up to 16 under way, each slot with contents of its own.
#[test]
fn a_disk_agrees_with_a_model() {
    let seed = seed();
    eprintln!("seed {seed}");
    let Some(directory) = directory() else { return };
    let bytes = (SLOTS * SLOT_BYTES) as u64;
    on_each_kind(
        || medium(&directory, bytes),
        |disk, kind| {
            eprintln!("{kind:?}");
            play(disk, &mut Random::new(seed), 3000);
        },
    );
}

/// Has a transfer carried out, while other threads have theirs: whoever polls posts what has ended to its owner.
fn exchange(
    disk: &SpillDisk,
    mut transfer: Transfer,
    posts: &[mpsc::Sender<Transfer>],
    mail: &mpsc::Receiver<Transfer>,
) -> Transfer {
    let post = |transfer: Transfer| {
        let owner = usize::try_from(transfer.token).unwrap();
        posts[owner].send(transfer).expect("owners stay until all is done");
    };
    while let Err(refused) = disk.begin(transfer) {
        transfer = refused;
        disk.flush();
        disk.pause();
        disk.poll(&mut |ended| post(ended));
    }
    disk.flush();
    loop {
        disk.poll(&mut |ended| post(ended));
        if let Ok(ended) = mail.try_recv() {
            return ended;
        }
        disk.pause();
    }
}

/// Goal: several threads may use a disk at the same time. Method: each writes and reads slots of its own, and posts
/// what it finds ended to its owner; contents verified.
#[test]
fn threads_share_a_disk() {
    const THREADS: usize = 4;
    let Some(directory) = directory() else { return };
    on_each_kind(
        || medium(&directory, 4 << 20),
        |disk, _| {
            let (posts, mails): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel()).unzip();
            std::thread::scope(|scope| {
                for (owner, mail) in mails.into_iter().enumerate() {
                    let posts = &posts;
                    scope.spawn(move || {
                        for version in 1..100 {
                            let token = owner as u64;
                            let first = token * 128 + version % 100;
                            let one = |transfer| exchange(disk, transfer, posts, &mail);
                            assert_eq!(one(write(token, first, 4, version)).result, Ok(()));
                            assert_holds(&one(read(token, first, 4)), version);
                        }
                    });
                }
            });
        },
    );
}
