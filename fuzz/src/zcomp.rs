//! `ZC-4`: whatever `source` contains, `decompress` writes only inside `dest`, returns `Ok` only if
//! it filled `dest`, and leaves a stream that still works.
//!
//! The input is a script. Its first byte chooses what is decompressed: the rest of the input as it
//! is, or a compressed unit made from the rest and then damaged. The second byte chooses the length
//! of the destination.

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{Algorithm, Extent, Outcome, Packed, Params, Zcomp};

/// The bytes around the destination, which also fill it beforehand.
const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 256;

/// A codec, and a unit that must always come back unchanged.
pub struct Target {
    zcomp: Zcomp,
    unit: Vec<u8>,
    compressed: Vec<u8>,
}

impl Target {
    /// A target for 4 KiB units.
    pub fn new(algorithm: Algorithm) -> Target {
        Target::with(algorithm.into())
    }

    /// A target for 4 KiB units with parameters; a dictionary has made-up contents, whatever its
    /// name.
    pub fn with(params: Params) -> Target {
        let order = UnitOrder::from_bytes(4096).expect("a unit's size");
        let dictionary = b"one dictionary, of bytes that units have ".repeat(200);
        let params = params.with_dictionary(|_| Ok(dictionary)).expect("of an accepted length");
        let zcomp = Zcomp::new(params, order, 1).expect("accepted parameters");
        let unit: Vec<u8> =
            b"one unit, to be had back ".iter().copied().cycle().take(4096).collect();
        let compressed = compress(&zcomp, &unit).expect("repeated text shrinks");
        Target { zcomp, unit, compressed }
    }

    /// Runs one script.
    pub fn run(&self, script: &[u8]) {
        let [what, length, rest @ ..] = script else { return };
        let dest_bytes = match length % 8 {
            0 => usize::from(*length),
            1 => 4095,
            2 => 4097,
            3 => 65536,
            _ => 4096,
        };
        let source = if what % 2 == 0 { rest.to_vec() } else { self.damaged(*what, rest) };
        self.decompress(&source, dest_bytes);
        self.decompress_prefix(&source, dest_bytes);
        assert!(self.decompress(&self.compressed, 4096) == Some(self.unit.clone()));
        let prefix = self.decompress_prefix(&self.compressed, 3000).expect("a sound unit");
        assert!(self.unit.starts_with(&prefix), "a prefix of another unit");
    }

    /// A compressed unit made from `rest`, with bytes changed at places that `rest` gives, and cut
    /// or extended according to `what`.
    fn damaged(&self, what: u8, rest: &[u8]) -> Vec<u8> {
        if rest.is_empty() {
            return Vec::new();
        }
        let unit: Vec<u8> = rest.iter().copied().cycle().take(4096).collect();
        let Some(mut bytes) = compress(&self.zcomp, &unit) else { return rest.to_vec() };
        for damage in rest.chunks_exact(3).take(usize::from(what >> 5)) {
            let at = usize::from(u16::from_le_bytes([damage[0], damage[1]])) % bytes.len();
            bytes[at] ^= damage[2];
        }
        match what >> 1 & 3 {
            0 => bytes.truncate(bytes.len() * usize::from(rest[0]) / 256),
            1 => bytes.extend_from_slice(rest),
            _ => {}
        }
        bytes
    }

    /// Decompresses the beginning of a unit into two pieces; `None` if it was refused.
    fn decompress_prefix(&self, source: &[u8], dest_bytes: usize) -> Option<Vec<u8>> {
        let (mut first, mut second) = (vec![GUARD; dest_bytes / 3], vec![GUARD; dest_bytes / 2]);
        let dest: &mut [&mut [u8]] = &mut [&mut first, &mut second];
        let packed = Packed { source, dest, extent: Extent::Prefix };
        let mut is_ok = false;
        self.zcomp.decompress_batch(0, &mut [packed], &mut |_, result| is_ok = result.is_ok());
        is_ok.then(|| [first, second].concat())
    }

    /// Decompresses between guards; `None` if it was refused.
    fn decompress(&self, source: &[u8], dest_bytes: usize) -> Option<Vec<u8>> {
        let mut guarded = vec![GUARD; dest_bytes + 2 * GUARD_BYTES];
        let end = GUARD_BYTES + dest_bytes;
        let result = self.zcomp.decompress(0, source, &mut guarded[GUARD_BYTES..end]);
        let mut guards = guarded[..GUARD_BYTES].iter().chain(&guarded[end..]);
        assert!(guards.all(|byte| *byte == GUARD), "ZC-4: wrote outside of the destination");
        result.is_ok().then(|| guarded[GUARD_BYTES..end].to_vec())
    }
}

/// `unit` after compression; `None` if it is same-filled or does not shrink.
fn compress(zcomp: &Zcomp, unit: &[u8]) -> Option<Vec<u8>> {
    let mut compressed = None;
    zcomp.compress(0, &[unit], &mut |elements| match elements[0].outcome {
        Outcome::Compressed(bytes) => compressed = Some(bytes.to_vec()),
        Outcome::Failed => panic!("the codec failed"),
        _ => {}
    });
    compressed
}
