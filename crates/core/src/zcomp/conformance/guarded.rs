//! A destination between bytes that must not change.

/// Bytes on either side.
const GUARD_BYTES: usize = 256;

/// What they are.
const GUARD: u8 = 0xA5;

/// See the module.
#[derive(Debug)]
pub(crate) struct Guarded(Vec<u8>);

impl Guarded {
    /// A destination of so many bytes, each of which is `fill` at first.
    pub(crate) fn new(bytes: usize, fill: u8) -> Guarded {
        let mut all = vec![GUARD; bytes + 2 * GUARD_BYTES];
        all[GUARD_BYTES..GUARD_BYTES + bytes].fill(fill);
        Guarded(all)
    }

    /// The destination.
    pub(crate) fn dest(&self) -> &[u8] {
        &self.0[GUARD_BYTES..self.0.len() - GUARD_BYTES]
    }

    /// The destination.
    pub(crate) fn dest_mut(&mut self) -> &mut [u8] {
        let end = self.0.len() - GUARD_BYTES;
        &mut self.0[GUARD_BYTES..end]
    }

    /// Whether nothing else was written.
    pub(crate) fn is_intact(&self) -> bool {
        let guards = [&self.0[..GUARD_BYTES], &self.0[self.0.len() - GUARD_BYTES..]];
        guards.into_iter().flatten().all(|byte| *byte == GUARD)
    }
}

#[cfg(test)]
mod tests {
    use super::{GUARD_BYTES, Guarded};

    #[test]
    fn each_byte_outside_is_guarded() {
        for at in 0..2 * GUARD_BYTES + 10 {
            let mut guarded = Guarded::new(10, 7);
            assert!(guarded.is_intact() && guarded.dest() == [7; 10]);
            guarded.0[at] ^= 1;
            let is_inside = (GUARD_BYTES..GUARD_BYTES + 10).contains(&at);
            assert_eq!(guarded.is_intact(), is_inside, "byte {at}");
            assert_eq!(guarded.dest_mut() != [7; 10], is_inside, "byte {at}");
        }
    }
}
