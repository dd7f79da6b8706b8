//! `SEAL-1`, `SEAL-2`: the key of an area is in the memory that its owner provides, and nowhere else.
//!
//! The only test of its process: it looks through all of the process's writable memory for parts of the expanded key.

use std::collections::BTreeSet;
use std::fs::File;
use std::hint::black_box;
use std::ops::{Deref, DerefMut, Range};
use std::os::unix::fs::FileExt;

use zfolio_core::swap::{KeyMemory, KeyRoom, SECRET_BYTES, Seal};

/// What the test keeps of a key is changed by this, so that it does not find itself.
const MASK: u64 = 0xA5C3_96E7_1B4D_D287;

/// Memory for a key that is never given back, so that it can be looked at after the end.
#[derive(Debug)]
struct Room(Option<Box<KeyRoom>>);

impl Deref for Room {
    type Target = KeyRoom;
    fn deref(&self) -> &KeyRoom {
        self.0.as_ref().expect("until the drop")
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut KeyRoom {
        self.0.as_mut().expect("until the drop")
    }
}

impl KeyMemory for Room {}

impl Drop for Room {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

/// The process's own memory, as a file.
struct Memory {
    file: File,
    buffer: Box<[u8]>,
}

impl Memory {
    fn new() -> Memory {
        let file = File::open("/proc/self/mem").expect("a Linux /proc");
        Memory { file, buffer: vec![0; 64 << 10].into() }
    }

    /// Calls `each` with the address of each word.
    fn words(&mut self, range: Range<u64>, each: &mut dyn FnMut(u64, u64)) {
        for at in range.clone().step_by(self.buffer.len()) {
            let length = usize::try_from(range.end - at).expect("64 bits").min(self.buffer.len());
            // A part that is not readable, or not there any more, has no key.
            if self.file.read_exact_at(&mut self.buffer[..length], at).is_err() {
                continue;
            }
            for (address, word) in
                (at..).step_by(4).zip(self.buffer[..length].windows(8).step_by(4))
            {
                each(address, u64::from_le_bytes(word.try_into().expect("8 bytes")));
            }
        }
        self.buffer.fill(0);
        black_box(&mut self.buffer);
    }

    /// The addresses outside of `room` where one of the words is.
    fn find(&mut self, masked: &BTreeSet<u64>, room: &Range<u64>) -> Vec<u64> {
        let buffer = self.buffer.as_ptr_range();
        let own = buffer.start.addr() as u64..buffer.end.addr() as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").expect("a Linux /proc");
        let mut found = Vec::new();
        for line in maps.lines().filter(|line| line.contains(" rw")) {
            let bounds = line
                .split([' ', '-'])
                .take(2)
                .map(|bound| u64::from_str_radix(bound, 16).expect("an address in hexadecimal"));
            let bounds: Vec<u64> = bounds.collect();
            self.words(bounds[0]..bounds[1], &mut |address, word| {
                let is_outside = !room.contains(&address) && !own.contains(&address);
                if is_outside && masked.contains(&(word ^ MASK)) {
                    found.push(address);
                }
            });
        }
        found
    }
}

/// Goal: see the header. Method: the words of the room that look like a key, masked, are looked for after the key was
/// expanded, after it was used, and after it has ended.
#[test]
fn a_key_is_in_its_owners_memory_only() {
    let mut memory = Memory::new();
    let room = Room(Some(Box::default()));
    let start = std::ptr::from_ref::<KeyRoom>(&room).addr() as u64;
    let place = start..start + size_of::<KeyRoom>() as u64;
    let mut secret = Box::new([0; SECRET_BYTES]);
    for (at, byte) in secret.iter_mut().enumerate() {
        *byte = black_box(u8::try_from(at * 37 % 256).expect("a byte") ^ 0x6B);
    }
    let seal = Seal::new(Box::new(room), &mut secret);
    assert_eq!(*secret, [0; SECRET_BYTES]);
    let mut masked = BTreeSet::new();
    memory.words(place.clone(), &mut |_, word| {
        let distinct: BTreeSet<u8> = word.to_le_bytes().into();
        // Neither zeros nor an address.
        if distinct.len() >= 6 && word >> 48 != 0 {
            masked.insert(word ^ MASK);
        }
    });
    assert!(masked.len() > 60, "240 bytes of round keys, and 256 of powers: {}", masked.len());
    assert!(memory.find(&masked, &(0..0)).len() >= masked.len(), "the room is seen");
    let mut nowhere = |room: &Range<u64>, when: &str| {
        let found = memory.find(&masked, room);
        assert!(found.is_empty(), "{when}: {} words, one at {:#x}", found.len(), found[0]);
    };
    nowhere(&place, "SEAL-1");
    let mut slot = Box::new([9; 4096]);
    let tag = seal.seal(3, 1, &mut slot);
    assert_eq!(seal.open(3, 1, tag, &mut slot), Ok(()));
    nowhere(&place, "after it was used");
    drop(seal);
    nowhere(&(0..0), "SEAL-2");
}
