//! Input that is too large for a file of the sources. It follows from its arguments alone.

use std::io::{self, Write};

use zfolio_core::testing::Random;

const WORDS: [&str; 16] = [
    "this", "text", "has", "few", "words", "but", "they", "come", "in", "many", "orders", "and",
    "each", "line", "is", "another",
];

/// Writes `count` lines for `sort`: a key in random order, then words.
pub(crate) fn lines(count: usize, out: &mut impl Write) -> io::Result<()> {
    let mut random = Random::new(5);
    for _ in 0..count {
        write!(out, "{:012x}", random.word() >> 16)?;
        words(&mut random, 5, out)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

/// Writes a C file of `functions` functions, each with a table, loops and a `switch`.
pub(crate) fn c_source(functions: usize, out: &mut impl Write) -> io::Result<()> {
    let mut random = Random::new(6);
    writeln!(out, "typedef unsigned long word;\nword step_0(word x) {{ return x; }}")?;
    for i in 1..functions {
        write!(out, "static const unsigned table_{i}[64] = {{")?;
        for _ in 0..64 {
            write!(out, "{},", random.below(65536))?;
        }
        let (other, shift) = (random.below(i), i % 9);
        write!(
            out,
            "}};\nword step_{i}(word x) {{\n  word sum = {i};\n  for (int j = 0; j < 64; j++) {{\n    \
             sum += table_{i}[(x + j) & 63] * (word)j;\n    \
             if (sum % {divisor} == 1) sum ^= x << (j & 7); else sum -= x >> {shift};\n  }}\n  \
             switch (x % 5) {{\n  case 0: return sum;\n  case 1: return sum * 3;\n  \
             case 2: return step_{other}(x ^ {i});\n  case 3: return sum / (x | 1);\n  \
             default: return x - sum;\n  }}\n}}\n",
            divisor = i + 3,
        )?;
    }
    Ok(())
}

/// The value of a key of redis: words, about 2 KiB.
pub(crate) fn value(key: usize) -> Vec<u8> {
    let mut random = Random::new(key as u64 + 7);
    let mut value = format!("value of {key}").into_bytes();
    words(&mut random, 380, &mut value).expect("a Vec takes everything");
    value
}

/// Writes `count` words, each after a blank. One random number chooses four.
fn words(random: &mut Random, count: usize, out: &mut impl Write) -> io::Result<()> {
    let mut bits = 0;
    for nth in 0..count {
        bits = if nth % 4 == 0 { random.word() >> 24 } else { bits >> 4 };
        let word = WORDS[usize::try_from(bits & 15).expect("four bits")];
        out.write_all(b" ")?;
        out.write_all(word.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{c_source, lines, value};

    fn text(write: impl Fn(&mut Vec<u8>) -> std::io::Result<()>) -> String {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        write(&mut one).expect("a Vec takes everything");
        write(&mut other).expect("a Vec takes everything");
        assert_eq!(one, other, "the same arguments give the same input");
        String::from_utf8(one).expect("ASCII")
    }

    #[test]
    fn lines_are_the_same_each_time_and_in_no_order() {
        let text = text(|out| lines(1000, out));
        let all: Vec<&str> = text.lines().collect();
        assert_eq!(all.len(), 1000);
        let falls = all.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!((300..700).contains(&falls), "{falls} of 999");
    }

    #[test]
    fn the_source_is_the_same_each_time_and_calls_only_what_precedes() {
        let text = text(|out| c_source(50, out));
        assert_eq!(text.matches("word step_").count(), 50);
        let mut defined = 0;
        for line in text.lines() {
            if line.starts_with("word step_") {
                defined += 1;
            }
            if let Some(call) = line.split("return step_").nth(1) {
                let called: usize = call.split('(').next().expect("split").parse().expect("number");
                assert!(called + 1 < defined, "{line}");
            }
        }
    }

    #[test]
    fn values_follow_from_their_keys() {
        assert_eq!(value(3), value(3));
        assert_ne!(value(3), value(4));
        for key in [0, 9, 12345] {
            assert!((1500..3000).contains(&value(key).len()), "{}", value(key).len());
        }
    }
}
