//! The two checksums of a record, over the data before compression.

pub use zfolio_core::zcomp::crc32 as crc;

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
