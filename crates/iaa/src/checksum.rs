//! The two checksums of a record, over the data before compression.

/// The polynomial of CRC-32 as in gzip, reflected.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// How many bytes are looked up at once.
const WIDTH: usize = 8;

/// `TABLES[n][b]`: what byte `b` followed by `n` zeros adds to the CRC.
static TABLES: [[u32; 256]; WIDTH] = tables();

#[expect(clippy::cast_possible_truncation, reason = "an index below 256")]
#[expect(clippy::large_stack_arrays, reason = "8 KiB on the compiler's stack")]
const fn tables() -> [[u32; 256]; WIDTH] {
    let mut tables = [[0; 256]; WIDTH];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ ((crc & 1) * POLYNOMIAL);
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut width = 1;
    while width < WIDTH {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[width - 1][byte];
            tables[width][byte] = before >> 8 ^ tables[0][(before & 0xFF) as usize];
            byte += 1;
        }
        width += 1;
    }
    tables
}

/// CRC-32 as in gzip.
#[must_use]
pub fn crc(data: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| crc >> 8 ^ TABLES[0][usize::from(crc.to_le_bytes()[0] ^ byte)];
    let mut words = data.chunks_exact(WIDTH);
    let crc = words.by_ref().fold(u32::MAX, |crc, word| {
        let word = u64::from_le_bytes(word.try_into().expect("a chunk of WIDTH"));
        let bytes = (word ^ u64::from(crc)).to_le_bytes();
        let looked_up = bytes.iter().zip(TABLES.iter().rev());
        looked_up.fold(0, |sum, (byte, table)| sum ^ table[usize::from(*byte)])
    });
    !words.remainder().iter().fold(crc, step)
}

/// Exclusive or of the little-endian 16-bit words; a last single byte counts as a word with a zero.
#[must_use]
pub fn xor(data: &[u8]) -> u16 {
    data.chunks(2)
        .fold(0, |sum, pair| sum ^ u16::from_le_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
}

#[cfg(test)]
mod tests {
    use super::{crc, xor};

    /// Goal: the known CRC of the usual example, and one step per byte gives the same for every length.
    #[test]
    fn checksums_are_the_known_ones() {
        assert_eq!(crc(b"123456789"), 0xCBF4_3926);
        assert_eq!(xor(b"123456789"), 0x3231 ^ 0x3433 ^ 0x3635 ^ 0x3837 ^ 0x39);
        let data: Vec<u8> = (0..100_u8).map(|byte| byte.wrapping_mul(37)).collect();
        for length in 0..data.len() {
            let slow = data[..length].iter().fold(u32::MAX, |crc, byte| {
                (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0xEDB8_8320))
            });
            assert_eq!(crc(&data[..length]), !slow, "{length}");
        }
    }
}
