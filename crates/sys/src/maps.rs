//! The mappings of files in `/proc/self/maps`, read without any allocation.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

/// A mapping of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileMapping {
    /// Where it begins.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
    /// It may be written to (`PROT_WRITE`).
    pub is_writable: bool,
    /// It may be executed (`PROT_EXEC`).
    pub is_executable: bool,
    /// What is written to it is written to the file (`MAP_SHARED`).
    pub is_shared: bool,
}

/// A line without the path: two addresses, rights, offset, device and inode.
const LINE_BYTES: usize = 128;

/// Calls `each` for the mappings of files, in rising order, until it returns false.
///
/// A mapping may have changed by the time of the call. Nothing is called if the list cannot be read.
pub fn each_file_mapping(each: &mut dyn FnMut(&FileMapping) -> bool) {
    if let Some(list) = List::open() {
        list.each_file_mapping(each);
    }
}

/// The list, opened and not read yet.
#[derive(Debug)]
pub struct List(OwnedFd);

impl List {
    /// `None`: it cannot be read.
    pub fn open() -> Option<List> {
        crate::files::open_read(c"/proc/self/maps").ok().map(List)
    }

    /// As [`each_file_mapping`], of the mappings that there are now; once for each list.
    pub fn each_file_mapping(&self, each: &mut dyn FnMut(&FileMapping) -> bool) {
        let mut text = [0_u8; 4096];
        let mut lines = Lines::default();
        loop {
            let length = match rustix::io::read(&self.0, &mut text) {
                Ok(0) => return,
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            if !lines.feed(&text[..length], each) {
                return;
            }
        }
    }
}

/// Cuts what is read into lines, and keeps the beginning of a line until its end is read.
struct Lines {
    line: [u8; LINE_BYTES],
    length: usize,
}

impl Default for Lines {
    fn default() -> Lines {
        Lines { line: [0; LINE_BYTES], length: 0 }
    }
}

impl Lines {
    /// Handles the next bytes. False once `each` has returned false.
    fn feed(&mut self, text: &[u8], each: &mut dyn FnMut(&FileMapping) -> bool) -> bool {
        for byte in text {
            match byte {
                b'\n' => {
                    let mapping = parse(&self.line[..self.length]);
                    self.length = 0;
                    if mapping.is_some_and(|mapping| !each(&mapping)) {
                        return false;
                    }
                }
                // The path does not matter, only that there is one.
                _ if self.length == LINE_BYTES => {}
                _ => {
                    self.line[self.length] = *byte;
                    self.length += 1;
                }
            }
        }
        true
    }
}

/// `start-end rights offset device inode path`; `None` unless a file is mapped.
fn parse(line: &[u8]) -> Option<FileMapping> {
    let line = std::str::from_utf8(line).unwrap_or_else(|error| {
        // A path that is no text, or was cut in a character.
        std::str::from_utf8(&line[..error.valid_up_to()]).unwrap_or_default()
    });
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let inode = words.nth(2)?;
    if inode.parse::<u64>().ok()? == 0 {
        return None;
    }
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some(FileMapping {
        start: address(start)?,
        end: address(end)?,
        is_writable: rights.get(1) == Some(&b'w'),
        is_executable: rights.get(2) == Some(&b'x'),
        is_shared: rights.get(3) == Some(&b's'),
    })
}

#[cfg(test)]
mod tests {
    use super::{FileMapping, Lines, each_file_mapping};

    const MAPS: &str = "\
55d0c0000000-55d0c0001000 r-xp 00001000 fe:00 326414                     /usr/bin/true
7f0000000000-7f0000100000 rw-p 00000000 00:00 0                          [heap]
7f1000000000-7f1000200000 rw-s 00000000 00:01 5                          /memfd:a name
7f2000000000-7f2000001000 r--p 00000000 fe:00 7                          /tmp/LONG
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    fn read(maps: &str, piece: usize) -> Vec<FileMapping> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for piece in maps.as_bytes().chunks(piece) {
            assert!(lines.feed(piece, &mut |mapping| {
                found.push(*mapping);
                true
            }));
        }
        found
    }

    /// Goal: lines are found however they are cut, also with a path longer than what is kept.
    #[test]
    fn files_are_found_however_the_text_is_cut() {
        let long = "\u{e9}".repeat(3000);
        let maps = MAPS.replace("LONG", &long);
        for piece in [1, 7, 127, 128, 129, 4096] {
            let found = read(&maps, piece);
            let starts: Vec<usize> = found.iter().map(|mapping| mapping.start).collect();
            assert_eq!(starts, [0x55d0_c000_0000, 0x7f10_0000_0000, 0x7f20_0000_0000], "{piece}");
            let code = FileMapping {
                start: 0x55d0_c000_0000,
                end: 0x55d0_c000_1000,
                is_writable: false,
                is_executable: true,
                is_shared: false,
            };
            assert_eq!(found[0], code);
            assert!(found[1].is_writable && found[1].is_shared && !found[1].is_executable);
        }
    }

    #[test]
    fn what_is_no_line_of_maps_is_left_out() {
        for text in ["\n", "a\n", "1-2 r--p 0 0\n", "x-y r--p 0 0 1 /a\n", "1-2 r--p 0 0 z /a\n"] {
            assert_eq!(read(text, 1), [], "{text:?}");
        }
    }

    /// Goal: this program's own code is found, and the caller can stop.
    #[test]
    fn own_mappings_are_found() {
        let here = own_mappings_are_found as *const () as usize;
        let (mut seen, mut stopped) = (false, 0);
        each_file_mapping(&mut |mapping| {
            seen |= (mapping.start..mapping.end).contains(&here) && mapping.is_executable;
            true
        });
        assert!(seen);
        each_file_mapping(&mut |_| {
            stopped += 1;
            false
        });
        assert_eq!(stopped, 1);
    }
}
