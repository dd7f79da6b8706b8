//! How much memory a program gets: a share of what it needs (3/4, 50%, 0.3), or a size (128M).

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};
use zfolio_core::page::PAGE_BYTES;
use zfolio_core::size;

/// A program's share of memory. Text is read as a part of its need; [`size`](self::size()) reads a size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Share {
    /// A part of its need, at most all of it, in thousandths, so that shares have an order and equal shares are
    /// equal.
    Part(u32),
    /// As many bytes, whatever it needs.
    Bytes(u64),
}

/// Reads a size.
pub(crate) fn size(text: &str) -> Result<Share, String> {
    size::parse(text).map(Share::Bytes).map_err(|error| error.to_string())
}

/// The shares that are measured unless `--share` says otherwise.
pub(crate) const DEFAULTS: [&str; 4] = ["3/4", "1/2", "1/3", "1/4"];

impl Share {
    /// The limit for a program that needs `need_bytes`: whole pages, rounded down.
    pub(crate) fn limit_bytes(self, need_bytes: u64) -> u64 {
        let bytes = match self {
            Share::Part(thousandths) => {
                let exact = u128::from(need_bytes) * u128::from(thousandths) / 1000;
                u64::try_from(exact).expect("a part of a u64 is a u64")
            }
            Share::Bytes(bytes) => bytes,
        };
        bytes & !(PAGE_BYTES as u64 - 1)
    }

    /// A part as a number between 0 and 1, and a size as text.
    pub(crate) fn json(self) -> Value {
        match self {
            Share::Part(thousandths) => json!(f64::from(thousandths) / 1000.0),
            Share::Bytes(_) => json!(self.to_string()),
        }
    }

    fn of(text: &str) -> Option<f64> {
        let number = |text: &str| text.trim().parse::<f64>().ok();
        if let Some((part, whole)) = text.split_once('/') {
            return Some(number(part)? / number(whole)?);
        }
        match text.strip_suffix('%') {
            Some(percent) => Some(number(percent)? / 100.0),
            None => number(text),
        }
    }
}

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Share, String> {
        let accepted = || format!("{text}: accepted: 0.1 to 1, as in 1/2, 50% or 0.5");
        let share = Share::of(text).filter(|share| (0.1..=1.0).contains(share));
        let thousandths = (share.ok_or_else(accepted)? * 1000.0).round();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is a whole number from 100 to 1000"
        )]
        Ok(Share::Part(thousandths as u32))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let thousandths = match self {
            Share::Part(thousandths) => *thousandths,
            Share::Bytes(bytes) => return f.write_str(&size::display(*bytes)),
        };
        for whole in 2..10 {
            for part in 1..whole {
                if (part * 1000 + whole / 2) / whole == thousandths {
                    return write!(f, "{part}/{whole}");
                }
            }
        }
        write!(f, "{}", f64::from(thousandths) / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{DEFAULTS, Share, size};

    fn share(text: &str) -> Share {
        text.parse().expect(text)
    }

    #[test]
    fn shares_are_fractions_percent_or_numbers() {
        assert_eq!(share("1/2"), share("50%"));
        assert_eq!(share("0.75"), share("3/4"));
        for text in DEFAULTS {
            assert_eq!(share(text).to_string(), text);
        }
        assert_eq!(share("45%").to_string(), "0.45");
        assert_eq!(share("1").to_string(), "1");
        for bad in ["0", "2", "3/2", "1/0", "0/0", "-1/-2/", "half", "", "5 %%", "NaN", "1/20"] {
            let line = bad.parse::<Share>().expect_err(bad);
            assert!(line.contains("accepted"), "{bad}: {line}");
        }
    }

    #[test]
    fn sizes_do_not_depend_on_the_need() {
        let both = [size("85M"), size("1G")].map(|share| share.expect("a size"));
        assert_eq!(both.map(|share| share.to_string()), ["85M", "1G"]);
        assert_eq!(both[0].limit_bytes(3), 85 << 20);
        assert_eq!(size("5001").expect("a size").limit_bytes(0), 4096);
        assert!(both[0] < both[1] && both[0].json() == "85M" && share("1/2").json() == 0.5);
        assert!(size("1/2").is_err());
    }

    #[test]
    fn a_limit_is_whole_pages_and_at_most_its_share() {
        const MIB: u64 = 1 << 20;
        assert_eq!(share("1/2").limit_bytes(200 * MIB), 100 * MIB);
        assert_eq!(share("1/2").limit_bytes(200 * MIB + 1), 100 * MIB);
        assert_eq!(share("1").limit_bytes(8191), 4096);
        for bytes in [0, 4095, 123_456_789, u64::MAX] {
            for text in DEFAULTS {
                let limit = share(text).limit_bytes(bytes);
                assert!(limit % 4096 == 0 && limit <= bytes, "{text} of {bytes}: {limit}");
            }
        }
        // 0.333, not a third exactly, and the part of a page is left out: 102297 KiB.
        assert_eq!(share("1/3").limit_bytes(300 * MIB), 102_296 << 10);
    }
}
