//! Sizes as people write them: `256M`, `1.5G`, `1048576`.
//!
//! A bare letter is a power of 1024, as everywhere in the kernel; `KiB` is the same, spelled out;
//! `KB` is a power of 1000, as in `zramctl`. A `B` alone means bytes. Case does not matter.
//!
//! # Invariants
//!
//! - `SIZE-1` `parse(display(n))` is within 5 % of `n`, and exactly `n` when `n` is a whole number
//!   of the unit that `display` chose.

use std::error::Error;
use std::fmt;

/// What [`parse`] accepts, for a message.
pub const ACCEPTED: &str =
    "a number with K, M, G or T (powers of 1024), KB, MB, ... (powers of 1000) or nothing (bytes)";

/// A size that could not be read.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SizeError {
    /// The text is not a number with a known suffix.
    Malformed {
        /// What was given.
        given: String,
    },
    /// It does not fit in 64 bits.
    TooLarge {
        /// What was given.
        given: String,
    },
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeError::Malformed { given } => {
                write!(
                    f,
                    "'{given}' is not a size; accepted: {ACCEPTED}, as in 256M, 1.5G, 1048576"
                )
            }
            SizeError::TooLarge { given } => {
                write!(f, "'{given}' is too large; accepted: less than 16 EiB")
            }
        }
    }
}

impl Error for SizeError {}

/// Reads a size, in bytes. A fraction of a byte is cut off.
///
/// # Errors
///
/// When `given` is not a size, or does not fit.
pub fn parse(given: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed { given: given.to_owned() };
    let trimmed = given.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(digits);
    let scale = scale(suffix.trim_start()).ok_or_else(malformed)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
        return Err(malformed());
    }

    let too_large = || SizeError::TooLarge { given: given.to_owned() };
    // Only digits are left, so that parsing fails only if there are too many of them.
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = whole.checked_mul(scale).ok_or_else(too_large)?;
    bytes.checked_add(fraction_bytes(fraction, scale)).ok_or_else(too_large)
}

/// Reads a share of a time, `1%` or `0.25%`, in millionths. `0` and `0%` are none.
///
/// # Errors
///
/// A message: the text is no percentage, or one above 50.
pub fn parse_stall(given: &str) -> Result<u32, String> {
    let refused =
        || format!("'{given}' is not a share of the time; accepted: 0.01% to 50%, or 0 for none");
    let text = given.trim();
    let (number, is_share) = text.strip_suffix('%').map_or((text, false), |number| (number, true));
    let number = number.trim_end();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) || number.ends_with('.') {
        return Err(refused());
    }
    let whole: u32 = whole.parse().ok().filter(|whole| *whole <= 50).ok_or_else(refused)?;
    let fraction = u32::try_from(fraction_bytes(fraction, 10_000)).map_err(|_| refused())?;
    let ppm = whole * 10_000 + fraction;
    let accepted = if is_share { ppm == 0 || (100..=500_000).contains(&ppm) } else { ppm == 0 };
    if accepted { Ok(ppm) } else { Err(refused()) }
}

/// A share as [`parse_stall`] reads it.
#[must_use]
pub fn display_stall(ppm: u32) -> String {
    let (whole, fraction) = (ppm / 10_000, ppm % 10_000);
    match fraction {
        0 => format!("{whole}%"),
        _ => format!("{whole}.{}%", format!("{fraction:04}").trim_end_matches('0')),
    }
}

/// Bytes of `0.fraction` of `scale`. Digits after the eighteenth are ignored: they are less than a
/// byte of any scale.
fn fraction_bytes(fraction: &str, scale: u64) -> u64 {
    let (mut numerator, mut denominator) = (0u128, 1u128);
    for digit in fraction.bytes().take(18) {
        numerator = numerator * 10 + u128::from(digit - b'0');
        denominator *= 10;
    }
    // numerator < 10^18 and scale <= 2^40: below 2^100; the quotient is below `scale`.
    u64::try_from(numerator * u128::from(scale) / denominator).expect("less than the scale")
}

/// The number of bytes that a suffix stands for.
fn scale(suffix: &str) -> Option<u64> {
    let lower = suffix.to_ascii_lowercase();
    let (letter, rest) = match lower.chars().next() {
        None | Some('b') => return matches!(lower.as_str(), "" | "b").then_some(1),
        Some(letter) => lower.split_at(letter.len_utf8()),
    };
    let power = match letter {
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    };
    match rest {
        "" | "ib" => Some(1024u64.pow(power)),
        "b" => Some(1000u64.pow(power)),
        _ => None,
    }
}

/// A size for people, in the largest unit up to T that leaves at least 1, with one decimal below
/// 10: `0`, `512`, `4K`, `1.5G`, `256M`.
#[must_use]
pub fn display(bytes: u64) -> String {
    const SUFFIXES: [char; 4] = ['K', 'M', 'G', 'T'];
    let mut power = (bytes.max(1).ilog2() as usize / 10).min(SUFFIXES.len());
    if power == 0 {
        return bytes.to_string();
    }
    let rounded = |parts: u128, scale: u128| (u128::from(bytes) * parts + scale / 2) / scale;
    let tenths = rounded(10, 1 << (10 * power));
    if tenths < 100 && tenths % 10 != 0 {
        return format!("{}.{}{}", tenths / 10, tenths % 10, SUFFIXES[power - 1]);
    }
    let mut whole = rounded(1, 1 << (10 * power));
    if whole == 1024 && power < SUFFIXES.len() {
        (whole, power) = (1, power + 1);
    }
    format!("{whole}{}", SUFFIXES[power - 1])
}

#[cfg(test)]
mod tests {
    use super::{SizeError, display, parse};
    use crate::testing::{Random, seed};

    #[test]
    fn letters_are_powers_of_1024_and_kb_is_1000() {
        let known: [(&str, u64); 16] = [
            ("0", 0),
            ("1048576", 1 << 20),
            ("256M", 256 << 20),
            ("256m", 256 << 20),
            ("1.5G", 3 << 29),
            ("1.25K", 1280),
            ("4KiB", 4096),
            ("2MiB", 2 << 20),
            ("1KB", 1000),
            ("1.5MB", 1_500_000),
            ("3gb", 3_000_000_000),
            ("2T", 2 << 40),
            ("64 K", 64 << 10),
            (" 64K ", 64 << 10),
            ("7B", 7),
            ("1.999999999999999999999T", 2_199_023_255_551),
        ];
        for (given, bytes) in known {
            assert_eq!(parse(given), Ok(bytes), "{given}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        for given in
            ["", "M", "1.", ".5G", "1..5G", "1.2.3", "-1", "+1", "12Q", "1MM", "1Kb/s", "é"]
        {
            let error = parse(given).expect_err(given);
            assert_eq!(error, SizeError::Malformed { given: given.to_owned() });
            let text = error.to_string();
            assert!(text.contains(&format!("'{given}'")) && text.contains("accepted"), "{text}");
        }
    }

    #[test]
    fn overflow_is_an_error() {
        for given in ["99999999999999999999", "18014398509481984K", "16777216T", "99999999T"] {
            assert_eq!(parse(given), Err(SizeError::TooLarge { given: given.to_owned() }));
        }
        assert_eq!(parse("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn display_is_short() {
        let known: [(u64, &str); 13] = [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.5K"),
            (64 << 10, "64K"),
            (256 << 20, "256M"),
            ((10 << 20) - 1, "10M"),
            ((1 << 20) - 1, "1M"),
            ((1 << 30) - 1, "1G"),
            (3 << 29, "1.5G"),
            ((10 << 20) + (700 << 10), "11M"),
            (1 << 60, "1048576T"),
            (u64::MAX, "16777216T"),
        ];
        for (bytes, text) in known {
            assert_eq!(display(bytes), text, "{bytes}");
        }
    }

    /// Goal: `SIZE-1`. Method: seeded random sizes of every magnitude.
    #[test]
    fn what_is_displayed_reads_back() {
        let seed = seed();
        let mut random = Random::new(seed);
        for _ in 0..10_000 {
            let bytes = random.word() >> (1 + random.below(59));
            let text = display(bytes);
            let back = parse(&text).expect("a size that display wrote");
            let near = bytes.abs_diff(back) <= bytes / 20;
            assert!(near, "seed {seed}: {bytes} -> {text} -> {back}");
        }
    }

    #[test]
    fn a_share_of_the_time_is_read_and_shown() {
        use super::{display_stall, parse_stall};
        for (given, ppm) in
            [("1%", 10_000), ("0.25%", 2500), ("50 %", 500_000), ("0", 0), ("0.01%", 100)]
        {
            assert_eq!(parse_stall(given), Ok(ppm), "{given}");
        }
        for (ppm, shown) in
            [(10_000, "1%"), (2500, "0.25%"), (100, "0.01%"), (0, "0%"), (12_340, "1.234%")]
        {
            assert_eq!(display_stall(ppm), shown);
            assert_eq!(parse_stall(shown), Ok(ppm));
        }
        for given in
            ["", "%", "1", "51%", "50.1%", "-1%", "0.001%", "1.%", "x%", "1%%", "1.2.3%", "+1%"]
        {
            let line = parse_stall(given).expect_err(given);
            assert!(
                line.starts_with(&format!("'{given}' is not a share of the time; accepted:")),
                "{line}"
            );
        }
    }
}
