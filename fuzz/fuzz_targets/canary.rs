//! A decoder with a planted bug. `make fuzz` requires that the bug is found: if coverage or the
//! sanitizer were missing, the fuzzer would find nothing here, and nothing elsewhere either.

#![no_main]

/// Bytes that one unit of this format decodes to.
const UNIT_BYTES: usize = 64;

/// Decodes `zf`, a version, and then pairs of a count and a byte. Version 2 has an "extended" count, whose check
/// is the planted bug: it lets a run end one byte past the unit.
fn decode(data: &[u8], unit: &mut [u8; UNIT_BYTES]) -> Option<usize> {
    let [b'z', b'f', version, runs @ ..] = data else { return None };
    let mut at = 0;
    for pair in runs.chunks_exact(2) {
        let extended = *version == 2 && pair[0] & 0x80 != 0;
        let count = usize::from(pair[0] & 0x7f);
        let room = UNIT_BYTES - at + usize::from(extended);
        if count > room {
            return None;
        }
        unit[at..at + count].fill(pair[1]);
        at += count;
    }
    Some(at)
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut unit = [0; UNIT_BYTES];
    std::hint::black_box(decode(data, &mut unit));
});
