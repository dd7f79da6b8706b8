//! A new zram device, used as swap.
//!
//! # Invariants
//!
//! - `ZRAM-1` A device that was already initialised is never touched.
//! - `ZRAM-2` Our swap space has the label [`LABEL`], by which a later run recognizes it.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::journal::{Journal, Undo, at};
use crate::os;

/// The label of our swap space, in its header.
const LABEL: &[u8; 12] = b"zfolio-bench";

/// Bytes of a page of the device; the same as the kernel's on all machines that zfolio supports.
const PAGE: usize = 4096;

/// Bytes of the header before the version, which belong to the boot loader.
const VERSION_AT: usize = 1024;
const LABEL_AT: usize = VERSION_AT + 12 + 16;
const MAGIC: &[u8; 10] = b"SWAPSPACE2";

const CONTROL: &str = "/sys/class/zram-control";

fn attribute(id: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{id}/{name}"))
}

/// The path `/dev/zramN`.
fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/zram{id}"))
}

/// A small file of the kernel.
pub(super) fn read(path: &Path) -> io::Result<String> {
    Ok(fs::read_to_string(path).map_err(|error| at(path, &error))?.trim().to_owned())
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|error| at(path, &error))
}

/// Whether zram is available, and if not, what to do.
pub(crate) fn available() -> Result<(), String> {
    if Path::new(CONTROL).join("hot_add").exists() || uninitialised().is_some() {
        return Ok(());
    }
    Err("this kernel has no zram loaded; try 'modprobe zram num_devices=0'".to_owned())
}

/// Whether this process can make a device, and if not, what to do.
pub(crate) fn usable() -> Result<(), String> {
    match zfolio_sys::probe::effective_uid() {
        0 => available(),
        _ => Err("a device needs root; run it with sudo".to_owned()),
    }
}

/// A device that is not initialised.
fn uninitialised() -> Option<u32> {
    let entries = fs::read_dir("/sys/block").ok()?.filter_map(Result::ok);
    let ids = entries.filter_map(|e| e.file_name().to_str()?.strip_prefix("zram")?.parse().ok());
    let mut free: Vec<u32> = ids.filter(|id| is_initialised(*id).is_ok_and(|on| !on)).collect();
    free.sort_unstable();
    free.first().copied()
}

fn is_initialised(id: u32) -> io::Result<bool> {
    Ok(read(&attribute(id, "initstate"))? == "1")
}

/// The compressors of the kernel's zram, the selected one first.
pub(crate) fn algorithms() -> Vec<String> {
    let Some(id) = fs::read_dir("/sys/block").ok().and_then(|entries| {
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix("zram")?.parse::<u32>().ok()).min()
    }) else {
        return Vec::new();
    };
    let list = read(&attribute(id, "comp_algorithm")).unwrap_or_default();
    list.split_whitespace().map(|name| name.trim_matches(['[', ']']).to_owned()).collect()
}

/// A device that we initialised and use as swap.
#[derive(Debug)]
pub(crate) struct Swap {
    id: u32,
}

impl Swap {
    /// Sets up a device of `bytes` with `algorithm`, and swaps to it. The undo of every step is
    /// recorded.
    pub(crate) fn set_up(journal: &Journal, bytes: u64, algorithm: &str) -> io::Result<Swap> {
        let Disk { id } = Disk::set_up(journal, bytes, algorithm)?;
        let swap_on = || os::swapon(&node(id)).map_err(|error| at(&node(id), &error));
        journal.change(&Undo::SwapOff { id }, swap_on)?;
        Ok(Swap { id })
    }

    /// The most of the machine's memory that the device held. The other figures of `mm_stat` drop
    /// to zero when the program ends; this one stays.
    pub(crate) fn used_bytes_max(&self) -> io::Result<u64> {
        mm_stat(self.id).map(|columns| columns[4])
    }
}

/// `orig_data_size compr_data_size mem_used_total mem_limit mem_used_max`, followed by others that
/// are not used.
fn mm_stat(id: u32) -> io::Result<[u64; 5]> {
    let path = attribute(id, "mm_stat");
    let text = read(&path)?;
    let columns: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let first = columns.first_chunk().copied();
    first.ok_or_else(|| at(&path, &io::Error::other(format!("not understood: {text}"))))
}

/// A device that we initialised. Its first page contains our label (`ZRAM-2`); the others are free.
#[derive(Debug)]
pub(crate) struct Disk {
    id: u32,
}

impl Disk {
    /// Bytes at its start that belong to the label.
    pub(crate) const LABEL_BYTES: u64 = PAGE as u64;

    /// Sets up a device of `bytes` with `algorithm`. The undo of every step is recorded.
    pub(crate) fn set_up(journal: &Journal, bytes: u64, algorithm: &str) -> io::Result<Disk> {
        let id = obtain(journal)?;
        let chooser = attribute(id, "comp_algorithm");
        let offered = read(&chooser)?;
        let before = offered.split_whitespace().find_map(|name| name.strip_prefix('['));
        let before = before.map_or("", |name| name.trim_end_matches(']')).to_owned();
        journal.change(&Undo::Choose { id, before }, || write(&chooser, algorithm))?;
        journal.change(&Undo::Reset { id }, || {
            write(&attribute(id, "disksize"), &bytes.to_string())?;
            write_header(id, bytes)
        })?;
        Ok(Disk { id })
    }

    /// Opens it without the page cache, so that data is compressed before a write returns.
    pub(crate) fn open(&self) -> io::Result<fs::File> {
        let path = node(self.id);
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(&path).map_err(|error| at(&path, &error))
    }

    /// Bytes after compression, and the bytes of memory that they occupy.
    pub(crate) fn compressed_and_used(&self) -> io::Result<(u64, u64)> {
        mm_stat(self.id).map(|columns| (columns[1], columns[2]))
    }
}

/// A new device, or one that is not initialised (`ZRAM-1`).
fn obtain(journal: &Journal) -> io::Result<u32> {
    let hot_add = Path::new(CONTROL).join("hot_add");
    if hot_add.exists() {
        // Reading creates the device. If this process is killed before the next line, the device
        // stays, uninitialised. That is harmless, and a later run can use it.
        let text = read(&hot_add)?;
        let id = text.parse().map_err(|_| io::Error::other(format!("hot_add said {text}")))?;
        journal.change(&Undo::Remove { id }, || Ok(()))?;
        return Ok(id);
    }
    uninitialised().ok_or_else(|| io::Error::other("every zram device is in use"))
}

/// The first page of a swap area of `bytes`, as `mkswap` writes it, with our label.
pub(super) fn header(bytes: u64) -> io::Result<Vec<u8>> {
    let last_page = u32::try_from(bytes / PAGE as u64 - 1).map_err(io::Error::other)?;
    let mut header = vec![0; PAGE];
    header[VERSION_AT..VERSION_AT + 4].copy_from_slice(&1_u32.to_ne_bytes());
    header[VERSION_AT + 4..VERSION_AT + 8].copy_from_slice(&last_page.to_ne_bytes());
    header[LABEL_AT..LABEL_AT + LABEL.len()].copy_from_slice(LABEL);
    header[PAGE - MAGIC.len()..].copy_from_slice(MAGIC);
    Ok(header)
}

fn write_header(id: u32, bytes: u64) -> io::Result<()> {
    let (path, header) = (node(id), header(bytes)?);
    let written = OpenOptions::new().write(true).open(&path).and_then(|mut device| {
        device.write_all(&header)?;
        device.sync_all()
    });
    written.map_err(|error| at(&path, &error))
}

/// Whether the device's swap space is ours (`ZRAM-2`).
fn is_ours(id: u32) -> bool {
    let mut header = vec![0; PAGE];
    let read = fs::File::open(node(id)).and_then(|device| device.read_exact_at(&mut header, 0));
    read.is_ok() && &header[LABEL_AT..LABEL_AT + LABEL.len()] == LABEL
}

/// Whether the kernel is swapping to the device.
fn is_swap(id: u32) -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let node = node(id);
    swaps.lines().any(|line| line.split_whitespace().next().is_some_and(|p| Path::new(p) == node))
}

/// Undoes `swapon`, for our own swap space only (`JRN-3`).
pub(super) fn swap_off(id: u32) -> io::Result<()> {
    if is_swap(id) && is_ours(id) {
        return os::swapoff(&node(id)).map_err(|error| at(&node(id), &error));
    }
    Ok(())
}

/// Undoes the initialisation of our own device, or of one without data (`JRN-3`).
pub(super) fn reset(id: u32) -> io::Result<()> {
    let path = attribute(id, "reset");
    if !path.exists() || !is_initialised(id)? {
        return Ok(());
    }
    let stored = read(&attribute(id, "mm_stat"))?;
    let holds_nothing = stored.split_whitespace().next() == Some("0");
    if holds_nothing || is_ours(id) {
        // The kernel refuses with EBUSY while the device is swap, or is open.
        return write(&path, "1");
    }
    Ok(())
}

/// Undoes `hot_add`, unless another process uses the device.
pub(super) fn remove(id: u32) -> io::Result<()> {
    if !attribute(id, "initstate").exists() || (is_initialised(id)? && !is_ours(id)) {
        return Ok(());
    }
    // The kernel refuses with EBUSY while the device is open.
    write(&Path::new(CONTROL).join("hot_remove"), &id.to_string())
}

/// Undoes the choice of `algorithm` on a device that existed before.
pub(super) fn choose_again(id: u32, algorithm: &str) -> io::Result<()> {
    if !attribute(id, "initstate").exists() || is_initialised(id)? {
        return Ok(());
    }
    write(&attribute(id, "comp_algorithm"), algorithm)
}
