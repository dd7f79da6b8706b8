//! The text of a file that names disks, in the style of systemd's: sections, keys, values.
//!
//! ```text
//! # a comment; so is a line that begins with ;
//! [NAME]
//! key = value              the value ends with the line; no quotes, and no comment behind it
//! key = another value      some keys may be repeated: whoever reads the sections decides that
//! key =                    forgets the values of the key
//! ```
//!
//! Several files are read one after the other. What a later file says of a key of a section replaces what earlier
//! files say of that key, and leaves other keys.
//!
//! # Invariants
//!
//! - `CONF-1` A name is there once; a key and a value are not empty, have no space at either end and no control
//!   character. So they can be arguments of a program.
//! - `CONF-2` A file that is refused changes nothing.

#[cfg(any(test, fuzzing))]
pub mod script;

use std::fmt;
use std::sync::Arc;

/// A place in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The file's name.
    pub file: Arc<str>,
    /// The line, counted from 1.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A key with a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
    /// Its line.
    pub at: Place,
}

/// A section.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Section {
    /// What its brackets contain.
    pub name: String,
    /// The line of its first header.
    pub at: Place,
    /// Keys and values, as their lines are.
    pub entries: Vec<Entry>,
}

/// What is wrong with a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The line.
    pub at: Place,
    /// What about it is wrong, and what is accepted.
    pub why: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.why)
    }
}

impl std::error::Error for Fault {}

/// The sections of all files that were read, in the order of their first headers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Conf {
    /// The sections.
    pub sections: Vec<Section>,
}

/// A line that is not empty and no comment.
enum Line<'t> {
    Header(&'t str),
    Entry(&'t str, &'t str),
}

impl Conf {
    /// Reads a file on top of those before.
    ///
    /// # Errors
    ///
    /// Every line that is wrong.
    pub fn read(&mut self, file: &str, text: &str) -> Result<(), Vec<Fault>> {
        let (sections, faults) = sections(file, text);
        if !faults.is_empty() {
            return Err(faults);
        }
        for section in sections {
            self.merge(section);
        }
        Ok(())
    }

    fn merge(&mut self, mut new: Section) {
        let entries = std::mem::take(&mut new.entries);
        let known = self.sections.iter().position(|known| known.name == new.name);
        let index = known.unwrap_or_else(|| {
            self.sections.push(new);
            self.sections.len() - 1
        });
        let old = &mut self.sections[index].entries;
        old.retain(|old| entries.iter().all(|new| new.key != old.key));
        for new in entries {
            if new.value.is_empty() {
                old.retain(|old| old.key != new.key);
            } else {
                old.push(new);
            }
        }
    }
}

/// The sections of one file, and the lines that are wrong.
fn sections(file: &str, text: &str) -> (Vec<Section>, Vec<Fault>) {
    let (mut sections, mut faults) = (Vec::<Section>::new(), Vec::new());
    let file: Arc<str> = file.into();
    // Written by some editors; not a part of the first line.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, line) in text.lines().enumerate() {
        let at = Place { file: Arc::clone(&file), line: index + 1 };
        match read_line(line, &sections) {
            Ok(None) => {}
            Ok(Some(Line::Header(name))) => {
                sections.push(Section { name: name.to_owned(), at, entries: Vec::new() });
            }
            Ok(Some(Line::Entry(key, value))) => {
                let section = sections.last_mut().expect("`read_line` refuses a key before them");
                section.entries.push(Entry { key: key.to_owned(), value: value.to_owned(), at });
            }
            Err(why) => faults.push(Fault { at, why }),
        }
    }
    (sections, faults)
}

/// What a line is; `None` of an empty one and of a comment.
fn read_line<'t>(line: &'t str, before: &[Section]) -> Result<Option<Line<'t>>, String> {
    let line = line.trim();
    if line.is_empty() || line.starts_with(['#', ';']) {
        return Ok(None);
    }
    if line.contains(|c: char| c.is_control() && c != '\t') {
        return Err("there is a control character; accepted: text".to_owned());
    }
    if line.ends_with('\\') {
        let accepted = "a line for each value of a key";
        return Err(format!("a line is not continued by \\; accepted: {accepted}"));
    }
    if let Some(rest) = line.strip_prefix('[') {
        let name = rest.strip_suffix(']').map(str::trim);
        let name = name.filter(|name| !name.is_empty() && !name.contains(['[', ']', '\t']));
        let name = name.ok_or_else(|| format!("'{line}' is not a section; accepted: [NAME]"))?;
        return match before.iter().find(|section| section.name == name) {
            Some(first) => {
                let line = first.at.line;
                Err(format!("[{name}] is there twice, first in line {line}; accepted: once"))
            }
            None => Ok(Some(Line::Header(name))),
        };
    }
    let (key, value) = line.split_once('=').map_or((line, None), |(key, value)| (key, Some(value)));
    let key = key.trim();
    let is_key = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_!".contains(&byte));
    let value = value.filter(|_| is_key && !key.is_empty()).map(str::trim);
    let accepted = "accepted: [NAME], KEY = VALUE, # COMMENT";
    let value = value.ok_or_else(|| format!("'{line}' is not understood; {accepted}"))?;
    if value.contains('\t') {
        return Err(format!("{key}: there is a tab in the value; accepted: text"));
    }
    if before.is_empty() {
        return Err(format!("'{key}' is in front of the first section; accepted: after [NAME]"));
    }
    Ok(Some(Line::Entry(key, value)))
}

#[cfg(test)]
mod tests {
    use super::{Conf, script};
    use zfolio_core::testing::{Random, seed};

    /// `[name] key=value@line ..`
    fn shown(conf: &Conf) -> String {
        let section = |section: &super::Section| {
            let entry =
                |entry: &super::Entry| format!(" {}={}@{}", entry.key, entry.value, entry.at.line);
            format!("[{}]{}", section.name, section.entries.iter().map(entry).collect::<String>())
        };
        conf.sections.iter().map(section).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_file_is_sections_of_keys() {
        let mut conf = Conf::default();
        let text = "\u{feff}# disks\r\n[ a ]\r\n size=4G \r\n\n; x\n  nbd = /run/a b.sock\nnbd=localhost # 1\n\
                    [b]\nsize =\nwriteback = /d,size=1G";
        conf.read("one", text).unwrap();
        assert_eq!(
            shown(&conf),
            "[a] size=4G@3 nbd=/run/a b.sock@6 nbd=localhost # 1@7 [b] writeback=/d,size=1G@10"
        );
        assert_eq!(conf.sections[1].at.to_string(), "one:8");
    }

    /// Goal: a later file says what it says of a key, and nothing of other keys.
    #[test]
    fn a_later_file_replaces_keys() {
        let mut conf = Conf::default();
        conf.read("one", "[a]\nsize=1G\nnbd=/1\nnbd=/2\nunit=4K\n[b]\nsize=2G").unwrap();
        conf.read("two", "[c]\nsize=3G\n[a]\nnbd=/3\nnbd=/4\nunit=\n").unwrap();
        assert_eq!(shown(&conf), "[a] size=1G@2 nbd=/3@4 nbd=/4@5 [b] size=2G@7 [c] size=3G@2");
        let before = conf.clone();
        assert_eq!(conf.read("three", "[a]\nsize=9G\nnonsense\n").unwrap_err().len(), 1);
        assert_eq!(conf, before, "CONF-2");
        conf.read("four", "[a]\nsize=5G\nsize=\nnbd=\nnbd=/7").unwrap();
        assert_eq!(shown(&conf), "[a] nbd=/7@5 [b] size=2G@7 [c] size=3G@2");
    }

    #[test]
    fn each_line_that_is_wrong_is_named() {
        for (text, expected) in [
            ("size=1G", "f:1: 'size' is in front of the first section; accepted: after [NAME]"),
            ("\n[a", "f:2: '[a' is not a section; accepted: [NAME]"),
            ("[]", "f:1: '[]' is not a section"),
            ("[a] b", "f:1: '[a] b' is not a section"),
            ("[a]\n[b]\n[a]", "f:3: [a] is there twice, first in line 1; accepted: once"),
            ("[a]\nsize", "f:2: 'size' is not understood; accepted: [NAME], KEY = VALUE"),
            ("[a]\n=4", "f:2: '=4' is not understood"),
            ("[a]\nsi ze=4", "f:2: 'si ze=4' is not understood"),
            ("[a]\nsize=4\\", "f:2: a line is not continued by \\; accepted: a line for each"),
            ("[a]\nsize=4\u{0}", "f:2: there is a control character"),
            ("[a]\nsize=4\t4", "f:2: size: there is a tab in the value"),
        ] {
            let faults = Conf::default().read("f", text).unwrap_err();
            assert!(faults.len() == 1 && faults[0].to_string().starts_with(expected), "{faults:?}");
        }
        assert_eq!(Conf::default().read("f", "x\n[a]\ny\nb=1\nz").unwrap_err().len(), 3);
    }

    /// Goal: any text is refused line by line, or read as what it says. Method: seeded texts of parts that mean
    /// something, played as the fuzzer plays its own.
    #[test]
    fn any_text_is_read_or_refused() {
        const PARTS: [&str; 20] = [
            "[a]\n", "[b]\n", "[", "]", "size", "nbd", "=", " ", "\n", "\n", "4G", "#", ";", "\\",
            "\t", "\u{1}", "ram", "min(", ")", ", /x",
        ];
        let seed = seed();
        let mut random = Random::new(seed);
        println!("seed {seed}");
        for _ in 0..2000 {
            let mut text = vec![random.byte()];
            for _ in 0..random.below_u64(40) {
                let part = usize::try_from(random.below_u64(20)).unwrap();
                text.extend(PARTS[part].as_bytes());
            }
            script::play(&text);
        }
    }
}
