//! The mappings of files in `/proc/self/maps`, and those in `/proc/self/smaps` that a child is not to read: both lists
//! are read without any allocation.

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
        each_line(&self.0, &mut |line| parse(line).is_none_or(|mapping| each(&mapping)));
    }
}

/// Calls `each` for the start and the end of each mapping that a child of `fork` is to find empty
/// (`MADV_WIPEONFORK`), in rising order.
///
/// The kernel counts the pages of every mapping for this list, which takes about as long as a `fork` takes to copy the
/// page tables. Nothing is called if the list cannot be read.
pub fn each_wiped(each: &mut dyn FnMut(usize, usize)) {
    let Ok(list) = crate::files::open_read(c"/proc/self/smaps") else { return };
    let mut wiped = Wiped::default();
    each_line(&list, &mut |line| {
        if let Some((start, end)) = wiped.feed(line) {
            each(start, end);
        }
        true
    });
}

/// Finds in the lines of `/proc/self/smaps` the mappings that are wiped: their addresses are in a mapping's first line,
/// the flags in its last one.
#[derive(Default)]
struct Wiped {
    mapping: Option<(usize, usize)>,
}

impl Wiped {
    /// The mapping whose flags are in this line, if it is wiped.
    fn feed(&mut self, line: &[u8]) -> Option<(usize, usize)> {
        let mut words = text_of(line).split_ascii_whitespace();
        let first = words.next()?;
        if first == "VmFlags:" {
            return words.any(|flag| flag == "wf").then_some(self.mapping?);
        }
        self.mapping = addresses(first).or(self.mapping);
        None
    }
}

/// Reads a list to its end, or until `each` returns false for a line. Of a long line it gets the beginning.
fn each_line(list: &OwnedFd, each: &mut dyn FnMut(&[u8]) -> bool) {
    let mut text = [0_u8; 4096];
    let mut lines = Lines::default();
    loop {
        let length = match rustix::io::read(list, &mut text) {
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
    fn feed(&mut self, text: &[u8], each: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        for byte in text {
            match byte {
                b'\n' => {
                    let length = std::mem::take(&mut self.length);
                    if !each(&self.line[..length]) {
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

/// The text of a line. A path that is no text, or was cut in a character, ends there.
fn text_of(line: &[u8]) -> &str {
    std::str::from_utf8(line).unwrap_or_else(|error| {
        std::str::from_utf8(&line[..error.valid_up_to()]).unwrap_or_default()
    })
}

/// `start-end`.
fn addresses(word: &str) -> Option<(usize, usize)> {
    let (start, end) = word.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((address(start)?, address(end)?))
}

/// `start-end rights offset device inode path`; `None` unless a file is mapped.
fn parse(line: &[u8]) -> Option<FileMapping> {
    let mut words = text_of(line).split_ascii_whitespace();
    let (start, end) = addresses(words.next()?)?;
    let rights = words.next()?.as_bytes();
    let inode = words.nth(2)?;
    if inode.parse::<u64>().ok()? == 0 {
        return None;
    }
    Some(FileMapping {
        start,
        end,
        is_writable: rights.get(1) == Some(&b'w'),
        is_executable: rights.get(2) == Some(&b'x'),
        is_shared: rights.get(3) == Some(&b's'),
    })
}

#[cfg(test)]
mod tests {
    use super::{FileMapping, Lines, Wiped, each_file_mapping, each_wiped, parse};
    use crate::map::{PAGE_BYTES, Reservation};

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
            assert!(lines.feed(piece, &mut |line| {
                found.extend(parse(line));
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

    /// Goal: of the kernel's own list the wiped mapping is found, and no other. Method: two pages are mapped, and one
    /// is wiped; then it is kept again.
    #[test]
    fn own_wiped_mappings_are_found() {
        let pages = Reservation::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let start = pages.address();
        // SAFETY: a page of the reservation, which has no contents.
        let advise = |advice| unsafe { libc::madvise(start as *mut _, PAGE_BYTES, advice) };
        let found = || {
            let mut found = Vec::new();
            each_wiped(&mut |from, to| found.push((from, to)));
            found.contains(&(start, start + PAGE_BYTES))
        };
        assert!(!found());
        assert_eq!(advise(libc::MADV_WIPEONFORK), 0);
        assert!(found());
        assert_eq!(advise(libc::MADV_KEEPONFORK), 0);
        assert!(!found());
    }

    #[test]
    fn flags_belong_to_the_mapping_before_them() {
        let mut wiped = Wiped::default();
        let mut feed = |line: &str| wiped.feed(line.as_bytes());
        assert_eq!(feed("VmFlags: rd wr wf "), None);
        assert_eq!(feed("7f0000000000-7f0000100000 rw-p 00000000 00:00 0 "), None);
        assert_eq!(feed("Size:               1024 kB"), None);
        assert_eq!(feed("VmFlags: rd wr mr wf sd "), Some((0x7f00_0000_0000, 0x7f00_0010_0000)));
        assert_eq!(feed("7f2000000000-7f2000001000 r--p 00000000 fe:00 7    /tmp/a wf"), None);
        assert_eq!(feed("VmFlags: rd mr sd "), None);
        assert_eq!(feed(""), None);
    }
}
