//! Whole numbers as people write them, each in a range.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Returns what reads a number in `range`. Its error names what was given and what is accepted.
pub fn within<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |given| {
        let number = given.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let what = if given.parse::<i128>().is_ok() { "accepted" } else { "a whole number" };
            let (least, most) = (range.start(), range.end());
            format!("'{given}' is not {what}; accepted: {least} to {most}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn a_number_is_in_its_range_or_refused_with_it() {
        let read = within(2_u8..=9);
        assert_eq!((read("2"), read("9")), (Ok(2), Ok(9)));
        for number in ["1", "10", "-3", "256", "99999999999999999999"] {
            assert_eq!(read(number), Err(format!("'{number}' is not accepted; accepted: 2 to 9")));
        }
        for text in ["", "x", "2x", "2.5", "0x5", " 3"] {
            assert_eq!(
                read(text),
                Err(format!("'{text}' is not a whole number; accepted: 2 to 9"))
            );
        }
    }
}
