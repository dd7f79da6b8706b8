//! What a program wrote, as one number: FNV-1a of 64 bits, and the length.

use std::fmt;
use std::io::{self, Read, Write};

/// A digest of bytes. It does not depend on the pieces in which they came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Digest {
    hash: u64,
    bytes: u64,
}

impl Default for Digest {
    fn default() -> Digest {
        Digest { hash: 0xcbf2_9ce4_8422_2325, bytes: 0 }
    }
}

impl Digest {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.bytes += bytes.len() as u64;
    }

    /// Reads `pipe` to its end.
    pub(crate) fn of(mut pipe: impl Read) -> Digest {
        let mut digest = Digest::default();
        // An error ends the output early, and the digest of a part differs from that of the whole.
        let _error = io::copy(&mut pipe, &mut digest);
        digest
    }
}

impl Write for Digest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x} of {} bytes", self.hash, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn a_digest_depends_on_every_byte_and_on_no_piece() {
        let data: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
        let whole = Digest::of(&data[..]);
        let mut pieces = Digest::default();
        data.chunks(777).for_each(|piece| pieces.add(piece));
        assert_eq!(whole, pieces);
        let mut other = data.clone();
        other[123_456] ^= 1;
        assert_ne!(Digest::of(&other[..]), whole);
        assert_ne!(Digest::of(&data[1..]), whole);
        // The published value of FNV-1a for "a".
        assert_eq!(Digest::of(&b"a"[..]).to_string(), "af63dc4c8601ec8c of 1 bytes");
    }
}
