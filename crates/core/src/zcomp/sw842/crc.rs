//! The CRC of 842: polynomial 0x04C11DB7, highest bit first, starting with 0, not inverted.
//!
//! It takes 16 bytes at a time. The CRC is linear, so each byte contributes a value from a table
//! that depends on how many bytes of the block follow it.

#![forbid(unsafe_code)]

const POLYNOMIAL: u32 = 0x04C1_1DB7;

const BLOCK_BYTES: usize = 16;

/// `TABLES[k][b]` is the CRC of byte `b` followed by `k` zero bytes.
static TABLES: [[u32; 256]; BLOCK_BYTES] = {
    let mut tables = [[0; 256]; BLOCK_BYTES];
    let mut byte = 0_u32;
    while byte < 256 {
        let mut crc = byte << 24;
        let mut zeros = 0;
        while zeros < BLOCK_BYTES {
            let mut bit = 0;
            while bit < 8 {
                crc = (crc << 1) ^ if crc >> 31 == 1 { POLYNOMIAL } else { 0 };
                bit += 1;
            }
            tables[zeros][byte as usize] = crc;
            zeros += 1;
        }
        byte += 1;
    }
    tables
};

/// The CRC of `bytes`.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    let mut blocks = bytes.chunks_exact(BLOCK_BYTES);
    let mut crc = 0_u32;
    for block in &mut blocks {
        let before = crc.to_be_bytes();
        crc = 0;
        for (at, byte) in block.iter().enumerate() {
            // The CRC so far is combined with the first 4 bytes.
            let byte = byte ^ before.get(at).copied().unwrap_or(0);
            crc ^= TABLES[BLOCK_BYTES - 1 - at][usize::from(byte)];
        }
    }
    for byte in blocks.remainder() {
        crc = (crc << 8) ^ TABLES[0][usize::from(crc.to_be_bytes()[0] ^ byte)];
    }
    crc
}
