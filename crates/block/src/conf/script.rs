//! Any bytes as files that name disks: the fuzz target reads what the fuzzer writes, the tests what seeded numbers
//! write.
//!
//! The first byte says where the second file begins. What is read is written down and read again: that gives the same.
//! Values are also evaluated as sizes.

use zfolio_core::size_expression;

use super::{Conf, Fault, Section};

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When what is read is not what the text says, as far as this can be told.
pub fn play(script: &[u8]) {
    let Some((first, rest)) = script.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    let mut at = usize::from(*first).min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    let mut conf = Conf::default();
    for (file, text) in [("one", &text[..at]), ("two", &text[at..])] {
        let before = conf.clone();
        if let Err(faults) = conf.read(file, text) {
            assert!(conf == before && !faults.is_empty(), "CONF-2");
            faults.iter().for_each(|fault| check_fault(fault, text));
        }
    }
    conf.sections.iter().enumerate().for_each(|(index, section)| {
        assert!(conf.sections[..index].iter().all(|other| other.name != section.name), "CONF-1");
        check_section(section);
    });
    let written: String = conf.sections.iter().map(written).collect();
    let mut again = Conf::default();
    again.read("again", &written).expect("it was read before");
    assert_eq!(written, again.sections.iter().map(self::written).collect::<String>());
}

fn check_fault(fault: &Fault, text: &str) {
    assert!((1..=text.lines().count()).contains(&fault.at.line));
    assert!(fault.to_string().lines().count() == 1, "{fault}");
}

fn check_section(section: &Section) {
    let texts = section.entries.iter().flat_map(|entry| [&entry.key, &entry.value]);
    for text in texts.chain([&section.name]) {
        assert!(!text.is_empty() && text.trim() == text, "CONF-1: {text:?}");
        assert!(!text.contains(char::is_control), "CONF-1: {text:?}");
    }
    for entry in &section.entries {
        let value = size_expression::evaluate(&entry.value, 16 << 30);
        assert!(value.is_err() || value.is_ok_and(|bytes| bytes % (2 << 20) == 0));
    }
}

/// A section as its text.
fn written(section: &Section) -> String {
    let entry = |entry: &super::Entry| format!("{}={}\n", entry.key, entry.value);
    format!("[{}]\n{}", section.name, section.entries.iter().map(entry).collect::<String>())
}
