//! What the accelerator does to a unit: of each 64 bytes it keeps a byte with a bit for each word that is not zero, and
//! these words.

const WORD: usize = 8;
const GROUP: usize = 8 * WORD;

/// Compresses `source`; the length in `dest`, or `None` if there is no room.
pub(crate) fn compress(source: &[u8], dest: &mut [u8]) -> Option<usize> {
    let mut bytes = 0;
    for group in source.chunks_exact(GROUP) {
        let place = bytes;
        *dest.get_mut(place)? = 0;
        bytes += 1;
        for (at, word) in group.chunks_exact(WORD).enumerate() {
            if word != [0; WORD] {
                dest[place] |= 1 << at;
                dest.get_mut(bytes..bytes + WORD)?.copy_from_slice(word);
                bytes += WORD;
            }
        }
    }
    Some(bytes)
}

/// Fills `dest` from `source`; whether all of both was used.
pub(crate) fn decompress(mut source: &[u8], dest: &mut [u8]) -> bool {
    let mut groups = dest.chunks_exact_mut(GROUP);
    for group in &mut groups {
        let Some((bits, mut words)) = source.split_first() else { return false };
        for (at, place) in group.chunks_exact_mut(WORD).enumerate() {
            if bits >> at & 1 == 0 {
                place.fill(0);
                continue;
            }
            let Some((word, rest)) = words.split_at_checked(WORD) else { return false };
            place.copy_from_slice(word);
            words = rest;
        }
        source = words;
    }
    source.is_empty() && groups.into_remainder().is_empty()
}
