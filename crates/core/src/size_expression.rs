//! Sizes that depend on the machine: `ram / 2`, `min(ram / 2, 4G)`.
//!
//! ```text
//! sum      product, then any number of + product, - product
//! product  value, then any number of * value, / value
//! value    a size, a number (2, 0.75), ram, min(sum, sum, ..), max(sum, sum, ..), (sum)
//! ```
//!
//! The result is rounded down to a multiple of 2 MiB, which is a multiple of every unit.

use crate::size::parse;

/// What is accepted, for a message.
const ACCEPTED: &str = "sizes, numbers and ram with + - * /, min(..), max(..) and parentheses, as in \
                        min(ram / 2, 4G)";

/// Results are multiples of this.
const STEP_BYTES: u64 = 2 << 20;

/// Parentheses within parentheses: the stack is not used up by a text.
const DEPTH_MAX: u32 = 32;

/// Whether a text is an expression: it names the memory of the machine.
#[must_use]
pub fn is_expression(given: &str) -> bool {
    given.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == "ram")
}

/// The value of an expression, in bytes, on a machine with so much memory.
///
/// # Errors
///
/// A message: the text is no expression, or its value is negative, or too large for a size.
pub fn evaluate(given: &str, ram_bytes: u64) -> Result<u64, String> {
    let mut rest = Rest { text: given, ram_bytes, depth: 0 };
    let value = rest.sum().filter(|_| rest.peek().is_none());
    let value = value.ok_or_else(|| format!("'{given}' is not a size; accepted: {ACCEPTED}"))?;
    // 2^63: far above any memory, and exact.
    #[expect(clippy::cast_precision_loss, reason = "a power of two is exact")]
    let is_size = (0.0..(1_u64 << 63) as f64).contains(&value);
    if !is_size {
        return Err(format!("'{given}' is {value} here; accepted: 0 to 8 EiB"));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked above; a fraction of a byte is cut off"
    )]
    let bytes = value as u64;
    Ok(bytes / STEP_BYTES * STEP_BYTES)
}

/// What of a text is not read yet.
struct Rest<'t> {
    text: &'t str,
    ram_bytes: u64,
    depth: u32,
}

impl<'t> Rest<'t> {
    /// The next character that is not a space.
    fn peek(&mut self) -> Option<char> {
        self.text = self.text.trim_start();
        self.text.chars().next()
    }

    /// Takes the next character if it is this one.
    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.text = &self.text[wanted.len_utf8()..];
        }
        found
    }

    /// Takes letters, digits and points.
    fn word(&mut self) -> &'t str {
        let is_inside = |c: char| c.is_ascii_alphanumeric() || c == '.';
        self.peek();
        let length = self.text.find(|c| !is_inside(c)).unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(length);
        self.text = rest;
        word
    }

    fn sum(&mut self) -> Option<f64> {
        let mut value = self.product()?;
        loop {
            if self.take('+') {
                value += self.product()?;
            } else if self.take('-') {
                value -= self.product()?;
            } else {
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<f64> {
        let mut value = self.value()?;
        loop {
            if self.take('*') {
                value *= self.value()?;
            } else if self.take('/') {
                // Else min(1 / 0, 4G) were a size.
                value /= self.value().filter(|by| *by != 0.0)?;
            } else {
                return Some(value);
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "exact below 8 PiB")]
    fn value(&mut self) -> Option<f64> {
        if self.peek()? == '(' {
            return self.parentheses(None);
        }
        match self.word() {
            "ram" => Some(self.ram_bytes as f64),
            "min" => self.parentheses(Some(f64::min)),
            "max" => self.parentheses(Some(f64::max)),
            number => match number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
                // As a size, 0.75 would be 0 bytes.
                true if parse(number).is_ok() => number.parse().ok(),
                _ => parse(number).ok().map(|bytes| bytes as f64),
            },
        }
    }

    /// A sum in parentheses; with `fold` several, which become one value.
    fn parentheses(&mut self, fold: Option<fn(f64, f64) -> f64>) -> Option<f64> {
        self.depth += 1;
        if self.depth > DEPTH_MAX || !self.take('(') {
            return None;
        }
        let mut value = self.sum()?;
        while self.take(',') {
            value = fold?(value, self.sum()?);
        }
        self.depth -= 1;
        self.take(')').then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::{evaluate, is_expression};

    const GIB: u64 = 1 << 30;

    #[test]
    fn an_expression_has_the_value_that_arithmetic_gives_it() {
        for (given, bytes) in [
            ("ram", 16 * GIB),
            ("ram / 2", 8 * GIB),
            ("ram/2", 8 * GIB),
            ("min(ram / 2, 4G)", 4 * GIB),
            ("min ( ram / 2 , 4G , 1G )", GIB),
            ("max(ram * 0.25, 512M)", 4 * GIB),
            ("0.75 * ram", 12 * GIB),
            ("ram - 1G - 2G", 13 * GIB),
            ("ram - (2G - 1G)", 15 * GIB),
            ("1G + ram / 4 * 2", 9 * GIB),
            ("ram / 3", (16 * GIB / 3) >> 21 << 21),
            ("ram - ram", 0),
            ("((ram))", 16 * GIB),
        ] {
            assert!(is_expression(given));
            assert_eq!(evaluate(given, 16 * GIB), Ok(bytes), "{given}");
        }
        for given in ["4G", "", "1ram", "program", "RAM"] {
            assert!(!is_expression(given), "{given}");
        }
    }

    #[test]
    fn nonsense_is_one_line() {
        let deep = "(".repeat(100_000) + "ram";
        for given in [
            "",
            "ram ram",
            "ram /",
            "/ ram",
            "min ram",
            "min(ram",
            "min()",
            "(ram))",
            "ram, 1G",
            "(ram, 1G)",
            "ram % 2",
            "1..2 * ram",
            "ram * 1Q",
            "-ram",
            "ram * é",
            "ram / 0",
            "min(ram / (1G - 1G), 4G)",
            &deep,
        ] {
            let why = evaluate(given, GIB).expect_err(given);
            assert!(why.contains("is not a size; accepted: sizes, numbers and ram"), "{why}");
        }
        for given in ["ram - 2G", "ram * ram * ram"] {
            let why = evaluate(given, GIB).expect_err(given);
            assert!(why.contains("accepted: 0 to 8 EiB"), "{why}");
        }
    }
}
