//! What an ELF file says about how it is loaded. Everything that is read is checked: a file may
//! contain anything.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub(super) const EM_THIS: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
pub(super) const PT_INTERP: u32 = 3;
pub(super) const PT_LOAD: u32 = 1;
pub(super) const PT_DYNAMIC: u32 = 2;
pub(super) const DT_NEEDED: u64 = 1;
pub(super) const DT_STRTAB: u64 = 5;

/// Libraries of sanitizers, which replace `malloc` and `mmap` and must be loaded first. gcc's, then
/// clang's.
const SANITIZERS: [&str; 7] = [
    "libasan.so",
    "libtsan.so",
    "libhwasan.so",
    "libclang_rt.asan",
    "libclang_rt.tsan",
    "libclang_rt.hwasan",
    "libclang_rt.msan",
];

/// The most program headers: the kernel accepts as many as fit into 64 KiB.
const HEADERS_MAX: u64 = 65536 / 56;

/// The most entries of the dynamic section that are read.
const ENTRIES_MAX: u64 = 4096;

/// The contents of a file, as far as they matter here.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct About {
    /// The loader that the file names; `None` if it is statically linked.
    pub(super) loader: Option<String>,
    /// The sanitizer's library that the file needs.
    pub(super) sanitizer: Option<String>,
}

/// A part of the file: an entry in the table of program headers.
#[derive(Clone, Copy)]
struct Part {
    kind: u32,
    at: u64,
    address: u64,
    bytes: u64,
}

/// Reads an ELF file.
pub(super) fn look(file: &File) -> Result<About, String> {
    let parts = parts(file)?;
    let first = |kind| parts.iter().find(|part| part.kind == kind);
    let Some(loader) = first(PT_INTERP) else { return Ok(About::default()) };
    let loader = text(file, loader.at, loader.bytes).map_err(|_| damaged())?;
    // If a file is damaged after this point, the loader will refuse it.
    let sanitizer = first(PT_DYNAMIC).and_then(|dynamic| sanitizer(file, &parts, *dynamic).ok()?);
    Ok(About { loader: Some(loader), sanitizer })
}

fn damaged() -> String {
    "is a damaged program".to_owned()
}

fn parts(file: &File) -> Result<Vec<Part>, String> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).map_err(|_| damaged())?;
    if header[4] != 2 {
        return Err("is a 32-bit program".to_owned());
    }
    let machine = u16_at(&header, 18);
    if header[5] != 1 || machine != EM_THIS {
        return Err(format!("is a program for another machine (ELF machine {machine})"));
    }
    let (table, entry_bytes) = (u64_at(&header, 32), u64::from(u16_at(&header, 54)));
    let part = |index: u64| {
        let mut entry = [0; 56];
        let at = table.checked_add(index * entry_bytes).ok_or_else(damaged)?;
        file.read_exact_at(&mut entry, at).map_err(|_| damaged())?;
        Ok(Part {
            kind: u32_at(&entry, 0),
            at: u64_at(&entry, 8),
            address: u64_at(&entry, 16),
            bytes: u64_at(&entry, 32),
        })
    };
    (0..u64::from(u16_at(&header, 56)).min(HEADERS_MAX)).map(part).collect()
}

/// The first sanitizer among the libraries that the dynamic section names.
fn sanitizer(file: &File, parts: &[Part], dynamic: Part) -> io::Result<Option<String>> {
    let mut needed = Vec::new();
    let mut names = None;
    for index in 0..(dynamic.bytes / 16).min(ENTRIES_MAX) {
        let mut entry = [0; 16];
        file.read_exact_at(&mut entry, dynamic.at.saturating_add(index * 16))?;
        match u64_at(&entry, 0) {
            0 => break,
            DT_NEEDED => needed.push(u64_at(&entry, 8)),
            DT_STRTAB => names = Some(u64_at(&entry, 8)),
            _ => {}
        }
    }
    // The table of names is given by its address: find the part of the file that is loaded there.
    let place = names.and_then(|address| {
        let holds = |part: &&Part| {
            part.kind == PT_LOAD
                && address.checked_sub(part.address).is_some_and(|at| at < part.bytes)
        };
        let part = parts.iter().find(holds)?;
        part.at.checked_add(address - part.address)
    });
    let Some(place) = place else { return Ok(None) };
    for offset in needed {
        let name = text(file, place.saturating_add(offset), 256)?;
        if SANITIZERS.iter().any(|known| name.starts_with(known)) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Text that ends with a zero byte, at most 256 bytes long.
fn text(file: &File, at: u64, bytes: u64) -> io::Result<String> {
    let mut name = [0; 256];
    let length = usize::try_from(bytes).unwrap_or(usize::MAX).min(name.len());
    let length = read_up_to(file, &mut name[..length], at)?;
    let name = name[..length].split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Reads as many bytes as exist, up to the length of `into`.
pub(super) fn read_up_to(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < into.len() {
        match file.read_at(&mut into[length..], at.saturating_add(length as u64)) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
