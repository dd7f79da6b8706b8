//! What leaves memory is encrypted and authenticated: AES-256-GCM of one slot, in place.
//!
//! The **nonce** is the slot's number (4 bytes) and its generation (8 bytes), both little-endian. The **tag** of
//! 16 bytes stays in memory (`table`). Neither generation nor tag is on the disk, so a flipped bit, the bytes of
//! another slot, and the slot's own bytes of an earlier generation all fail to open.
//!
//! # The key
//!
//! The 32 secret bytes come from outside: this crate makes no system call, so it has no random numbers. They are
//! expanded to 544 bytes (round keys and the powers of the hash key), which live in [`KeyMemory`] that the owner
//! provides: a page that is locked and that no core file contains. What is guaranteed:
//!
//! - `SEAL-1` After [`Seal::new`] the key is in the owner's memory and nowhere else on heap or stack: the caller's
//!   32 bytes are zeros, and the stack below is overwritten, where the expanded key was moved.
//! - `SEAL-2` When a [`Seal`] ends, its room is overwritten with the expansion of 32 zero bytes, and given back to the
//!   owner, who overwrites it with zeros. So the key is gone even if the owner forgets.
//!
//! `tests/key.rs` looks for both in all of the process's memory. Not guaranteed: what the processor's vector
//! registers hold between two calls. The system may write these to the stack of a thread that a signal
//! interrupts, and to a core file.
//!
//! # Concurrency
//!
//! Sealing and opening take `&self` and no lock.
//!
//! # Cost
//!
//! 0.4 us for a slot with AES and carry-less multiplication on vectors of 256 bits. GCM's bounds hold for
//! 2^40 slots (4 PiB) under one key: an attacker's advantage stays below 2^-32 (2^48 blocks of 2^128).

use std::fmt;
use std::hint::black_box;
use std::ops::DerefMut;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag as RingTag, UnboundKey};

use super::disk::SLOT_BYTES;

/// Bytes of the secret that a key is made of.
pub const SECRET_BYTES: usize = 32;

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// Proves a slot's contents.
pub type Tag = [u8; TAG_BYTES];

/// Room for one expanded key.
#[derive(Default)]
pub struct KeyRoom(Option<LessSafeKey>);

const _: () = assert!(size_of::<KeyRoom>() <= 1024, "several fit into one locked page");

impl fmt::Debug for KeyRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "KeyRoom(a key)" } else { "KeyRoom(empty)" })
    }
}

/// Memory with room for a key, which the owner of an area provides.
///
/// The owner should take it from a mapping that is locked (`mlock`) and excluded from core files
/// (`MADV_DONTDUMP`), and overwrite it with zeros when the value is dropped. A child of `fork` inherits the
/// contents and the exclusion, but not the lock.
pub trait KeyMemory: DerefMut<Target = KeyRoom> + Send + Sync + fmt::Debug {
    /// In a child of `fork`: locks its copy. False: the system refuses.
    fn lock_again(&self) -> bool {
        true
    }
}

/// Memory of the heap, neither locked nor excluded: for tests.
impl KeyMemory for Box<KeyRoom> {}

/// A slot does not open: its bytes are not those that were sealed with this slot, generation and tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tampered;

/// The key of one area.
#[derive(Debug)]
pub struct Seal {
    room: Box<dyn KeyMemory>,
    /// Each (slot, generation) that was sealed (`SWAP-2`).
    #[cfg(all(any(test, fuzzing), debug_assertions))]
    nonces: crate::sync::Mutex<RANK_NONCES, std::collections::BTreeSet<(u32, u64)>>,
}

/// Rank of a lock that exists in tests only; nothing is locked under it.
#[cfg(all(any(test, fuzzing), debug_assertions))]
const RANK_NONCES: u8 = 49;

impl Seal {
    /// Expands `secret` into the memory. The secret is zeros afterwards (`SEAL-1`).
    #[must_use]
    pub fn new(mut memory: Box<dyn KeyMemory>, secret: &mut [u8; SECRET_BYTES]) -> Seal {
        expand(&mut memory, secret);
        secret.fill(0);
        black_box(secret);
        overwrite_stack();
        Seal {
            room: memory,
            #[cfg(all(any(test, fuzzing), debug_assertions))]
            nonces: crate::sync::Mutex::default(),
        }
    }

    /// See [`KeyMemory::lock_again`].
    pub(super) fn lock_again(&self) -> bool {
        self.room.lock_again()
    }

    fn key(&self) -> &LessSafeKey {
        self.room.0.as_ref().expect("expanded by new()")
    }

    /// Encrypts a slot of this number in place. Each generation of a slot is sealed once (`SWAP-2`): two contents
    /// with one nonce would betray each other and the hash key.
    ///
    /// # Panics
    ///
    /// In tests with assertions, if it was sealed before.
    #[must_use]
    pub fn seal(&self, slot: u32, generation: u64, bytes: &mut [u8; SLOT_BYTES]) -> Tag {
        #[cfg(all(any(test, fuzzing), debug_assertions))]
        assert!(self.nonces.lock().insert((slot, generation)), "SWAP-2: {slot}, {generation}");
        let sealed =
            self.key().seal_in_place_separate_tag(nonce(slot, generation), Aad::empty(), bytes);
        let tag = sealed.expect("a slot is shorter than what GCM can encrypt");
        tag.as_ref().try_into().expect("the tag of GCM has 16 bytes")
    }

    /// Decrypts a slot in place. The bytes mean nothing if it fails.
    ///
    /// # Errors
    ///
    /// They are not what was sealed with this slot, generation and tag.
    pub fn open(
        &self,
        slot: u32,
        generation: u64,
        tag: Tag,
        bytes: &mut [u8; SLOT_BYTES],
    ) -> Result<(), Tampered> {
        let tag = RingTag::from(tag);
        let nonce = nonce(slot, generation);
        let opened = self.key().open_in_place_separate_tag(nonce, Aad::empty(), tag, bytes, 0..);
        opened.map(|_| ()).map_err(|_| Tampered)
    }
}

impl Drop for Seal {
    /// `SEAL-2`.
    fn drop(&mut self) {
        expand(&mut self.room, &[0; SECRET_BYTES]);
        black_box(&mut *self.room);
    }
}

/// Not inlined, so that its stack is below that of the caller, who overwrites it.
#[inline(never)]
fn expand(memory: &mut Box<dyn KeyMemory>, secret: &[u8; SECRET_BYTES]) {
    let key = UnboundKey::new(&AES_256_GCM, secret).expect("a key of 32 bytes");
    memory.0 = Some(LessSafeKey::new(key));
}

/// Overwrites 32 KiB of stack below the caller's frame. `expand` and what it calls need less than 1 KiB, and 20 in a
/// build without optimisation.
#[inline(never)]
#[expect(clippy::large_stack_arrays, reason = "its place on the stack is what it is for")]
fn overwrite_stack() {
    let mut stack = [0_u8; 32 << 10];
    black_box(&mut stack);
}

fn nonce(slot: u32, generation: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..4].copy_from_slice(&slot.to_le_bytes());
    nonce[4..].copy_from_slice(&generation.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::{KeyRoom, SLOT_BYTES, Seal, Tag, Tampered};
    use crate::testing::{Random, seed};

    fn seal(mut secret: [u8; 32]) -> Seal {
        let seal = Seal::new(Box::new(Box::<KeyRoom>::default()), &mut secret);
        assert_eq!(secret, [0; 32], "SEAL-1");
        seal
    }

    fn number(hex: &str) -> [u8; 16] {
        u128::from_str_radix(hex, 16).expect("16 bytes in hexadecimal").to_be_bytes()
    }

    /// A slot's contents, by the place of each byte.
    fn contents(byte: impl Fn(usize) -> usize) -> [u8; SLOT_BYTES] {
        std::array::from_fn(|at| (byte(at) % 256).try_into().expect("a byte"))
    }

    /// Seals contents, compares the first and last 16 bytes and the tag, and opens them again.
    fn check(
        secret: [u8; 32],
        (slot, generation): (u32, u64),
        plain: [u8; SLOT_BYTES],
        ends: [&str; 2],
        tag: &str,
    ) {
        let seal = seal(secret);
        let mut bytes = plain;
        let found = seal.seal(slot, generation, &mut bytes);
        assert_eq!([&bytes[..16], &bytes[SLOT_BYTES - 16..]], ends.map(number), "{slot}");
        assert_eq!(found, number(tag), "{slot}");
        assert_eq!(seal.open(slot, generation, found, &mut bytes), Ok(()));
        assert!(bytes == plain, "{slot}");
    }

    /// Goal: it is AES-256-GCM. Method: first and last 16 bytes and tag of three slots, as another
    /// implementation (OpenSSL 3.0) has them; the first block of the first is that of test case 14 of GCM's
    /// specification.
    #[test]
    fn slots_are_sealed_as_gcm_says() {
        check(
            [0; 32],
            (0, 0),
            contents(|_| 0),
            ["cea7403d4d606b6e074ec5d3baf39d18", "4caf3c8ebeb9f248d67203d78a437eee"],
            "02f2e46a9e9e45511dcd94ac24f1f9b6",
        );
        check(
            std::array::from_fn(|at| u8::try_from(at).expect("below 32")),
            (0x0102_0304, 0x0A_0B0C_0D0E),
            contents(|at| at * 7 + at / 256),
            ["906f96f6585d9b270cfaace186fd31c6", "a38a99a8af9cf8845fc35c0aa20e7544"],
            "ebc31b7fad041147237b979ef96b3728",
        );
        check(
            [0xFF; 32],
            ((1 << 26) - 1, (1 << 40) - 1),
            contents(|_| 0x5A),
            ["fa549c35683ef5c3076d3b576f4de64d", "f870d6e4eeb1b7ca6734d9354f9200e6"],
            "9d58d114bd5263b442853803199ed350",
        );
    }

    /// Goal: whatever is changed, a slot does not open. Method: seeded contents; each bit of the tag, bits all over
    /// the slot, slot and generation in each bit, another key.
    #[test]
    fn what_was_changed_does_not_open() {
        let seed = seed();
        let mut random = Random::new(seed);
        let plain: [u8; SLOT_BYTES] =
            random.bytes(SLOT_BYTES).try_into().expect("as many as a slot has");
        let (key, other) = (seal([3; 32]), seal([4; 32]));
        let (slot, generation) = (77, 1 << 33 | 5);
        let mut sealed = plain;
        let tag = key.seal(slot, generation, &mut sealed);
        let opens = |key: &Seal, slot, generation, tag: Tag, bytes: &[u8; SLOT_BYTES]| {
            let mut bytes = *bytes;
            let result = key.open(slot, generation, tag, &mut bytes);
            assert!(result == Err(Tampered) || bytes == plain, "seed {seed}");
            result.is_ok()
        };
        assert!(opens(&key, slot, generation, tag, &sealed));
        assert!(!opens(&other, slot, generation, tag, &sealed));
        for bit in 0..tag.len() * 8 {
            let mut tag = tag;
            tag[bit / 8] ^= 1 << (bit % 8);
            assert!(!opens(&key, slot, generation, tag, &sealed), "bit {bit} of the tag");
        }
        for bit in (0..SLOT_BYTES * 8).step_by(61) {
            let mut sealed = sealed;
            sealed[bit / 8] ^= 1 << (bit % 8);
            assert!(!opens(&key, slot, generation, tag, &sealed), "bit {bit}");
        }
        for bit in 0..32 {
            assert!(!opens(&key, slot ^ 1 << bit, generation, tag, &sealed), "bit {bit} of slot");
        }
        for bit in 0..64 {
            assert!(!opens(&key, slot, generation ^ 1 << bit, tag, &sealed), "bit {bit}");
        }
    }

    /// Goal: `SWAP-2` is watched in tests.
    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "SWAP-2")]
    fn a_generation_is_sealed_once() {
        let seal = seal([1; 32]);
        let first = seal.seal(5, 6, &mut [0; SLOT_BYTES]);
        let second = seal.seal(5, 6, &mut [1; SLOT_BYTES]);
        unreachable!("{first:?} {second:?}");
    }
}
