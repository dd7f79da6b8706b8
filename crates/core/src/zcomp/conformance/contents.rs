//! Units of every kind.

use crate::testing::Random;

/// Words of a small vocabulary: they shrink well, but not to nothing.
pub(crate) fn text(random: &mut Random, bytes: usize) -> Vec<u8> {
    let mut text = Vec::new();
    while text.len() < bytes {
        let word = random.below(200).to_string().repeat(1 + random.below(3));
        text.extend_from_slice(word.as_bytes());
        text.push(b' ');
    }
    text.truncate(bytes);
    text
}

/// Every kind of contents, with a name.
pub(crate) fn contents(random: &mut Random, bytes: usize) -> Vec<(&'static str, Vec<u8>)> {
    let word = 0x0123_4567_89AB_CDEF_u64.to_le_bytes();
    let mut half_random = text(random, bytes);
    half_random[..bytes / 2].copy_from_slice(&random.bytes(bytes / 2));
    let mut half_zero = text(random, bytes);
    half_zero[bytes / 2..].fill(0);
    let mut late = vec![0; bytes];
    late[bytes - 1] = 1;
    let period_3 = (0..bytes).map(|at| [7, 8, 9][at % 3]).collect();
    vec![
        ("zeros", vec![0; bytes]),
        ("one word", word.repeat(bytes / 8)),
        ("one byte differs, the last", late),
        ("three bytes repeated", period_3),
        ("text", text(random, bytes)),
        ("text before zeros", half_zero),
        ("half random", half_random),
        ("random", random.bytes(bytes)),
    ]
}
