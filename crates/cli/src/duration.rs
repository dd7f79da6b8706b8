//! Durations for people: three digits and a unit.

/// `0`, `950ns`, `2.1us`, `34ms`, `1.2s`, `250s`.
pub(crate) fn display(nanoseconds: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    for (scale, unit) in UNITS {
        if nanoseconds >= scale {
            let tenths = (u128::from(nanoseconds) * 10 + u128::from(scale) / 2) / u128::from(scale);
            return if tenths < 100 {
                format!("{}.{}{unit}", tenths / 10, tenths % 10)
            } else {
                format!("{}{unit}", (tenths + 5) / 10)
            };
        }
    }
    if nanoseconds == 0 { "0".to_owned() } else { format!("{nanoseconds}ns") }
}

/// The same for a time that may be negative: `-34ms`.
pub(crate) fn signed(nanoseconds: i64) -> String {
    let sign = if nanoseconds < 0 { "-" } else { "" };
    format!("{sign}{}", display(nanoseconds.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::{display, signed};

    #[test]
    fn a_negative_time_has_a_sign() {
        assert_eq!([signed(-2_100), signed(0), signed(2_100)], ["-2.1us", "0", "2.1us"]);
        assert_eq!(signed(i64::MIN), "-9223372037s");
    }

    #[test]
    fn the_unit_fits_the_size() {
        let known = [
            (0, "0"),
            (999, "999ns"),
            (2_100, "2.1us"),
            (9_940, "9.9us"),
            (9_960, "10us"),
            (34_000_000, "34ms"),
            (1_234_000_000, "1.2s"),
            (250_000_000_000, "250s"),
        ];
        for (nanoseconds, expected) in known {
            assert_eq!(display(nanoseconds), expected);
        }
    }
}
