//! The kernel's side of the comparison: zram swap, zswap over a swap file, a memory cgroup, and a folio size.
//!
//! # Invariants
//!
//! - `KRN-1` All changes go through the [`Journal`], so that dropping it undoes all of them in any
//!   case.
//! - `KRN-2` The changes exist only during one run of the kernel; a run with zfolio never sees
//!   them.

pub(crate) mod cgroup;
pub(crate) mod journal;
pub(crate) mod swap_file;
pub(crate) mod zram;
pub(crate) mod zswap;

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};
use std::str::FromStr;

use cgroup::{Cgroup, Hierarchy};
use journal::{Journal, at};

use crate::os;
use crate::watch::{Ended, Look, WatchError, watch};

/// The largest folio in the comparison.
pub(crate) const FOLIO_BYTES_MAX: u64 = 64 << 10;

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Room on the device in addition to the workload, for the program's other pages.
const DISK_SLACK_BYTES: u64 = 128 << 20;

/// The settings of the kernel for one run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KernelSetting {
    /// The value for `comp_algorithm`.
    pub(crate) algorithm: String,
    /// The size of folios of anonymous memory: 4 or 64.
    pub(crate) folio_kib: u32,
}

impl FromStr for KernelSetting {
    type Err = String;
    fn from_str(text: &str) -> Result<KernelSetting, String> {
        let accepted = || format!("{text}: accepted: ALGORITHM:4K or ALGORITHM:64K, as in lz4:4K");
        let (algorithm, folio) = text.split_once(':').ok_or_else(accepted)?;
        // A word of letters, digits and dashes: it is written to the journal, and to a device.
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if algorithm.is_empty() || !algorithm.chars().all(is_word) {
            return Err(accepted());
        }
        let folio_kib = match folio {
            "4K" => 4,
            "64K" => 64,
            _ => return Err(accepted()),
        };
        Ok(KernelSetting { algorithm: algorithm.to_owned(), folio_kib })
    }
}

impl fmt::Display for KernelSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} {}K", self.algorithm, self.folio_kib)
    }
}

/// What the comparison requires; checked before anything is changed.
#[derive(Debug)]
pub(crate) struct Kernel {
    hierarchy: Hierarchy,
}

impl Kernel {
    /// Checks that the comparison is possible here; otherwise returns the reason, in one line.
    pub(crate) fn find() -> Result<Kernel, String> {
        may_change()?;
        zram::available()?;
        Ok(Kernel { hierarchy: Hierarchy::find()? })
    }

    /// One line that describes what is used.
    pub(crate) fn describe(&self) -> String {
        format!("zram swap, memory cgroup {}", self.hierarchy)
    }

    /// lz4 and lzo-rle, if the kernel has them, with 4 KiB and with 64 KiB folios; and one line for
    /// each that is missing.
    pub(crate) fn settings() -> (Vec<KernelSetting>, Vec<String>) {
        let (mut settings, mut missing) = (Vec::new(), Vec::new());
        let offered = zram::algorithms();
        for name in ["lz4", "lzo-rle"] {
            // Without a device the list is not known: the run itself will fail then.
            if !offered.is_empty() && !offered.iter().any(|offer| offer == name) {
                missing.push(format!("the kernel's zram has no {name}"));
                continue;
            }
            for folio_kib in [4, 64] {
                settings.push(KernelSetting { algorithm: name.to_owned(), folio_kib });
            }
        }
        if !folio_chooser(64).exists() {
            settings.retain(|setting| setting.folio_kib == 4);
            missing.push("the kernel cannot choose 64 KiB folios (needs 6.8)".to_owned());
        }
        (settings, missing)
    }
}

/// A program that ran under the kernel's swap.
#[derive(Debug)]
pub(crate) struct Swapped<T> {
    pub(crate) ended: Ended<T>,
    /// The most that zram (`mem_used_max`) or the pool of zswap held. The cgroup is not charged for it.
    pub(crate) beside_bytes_max: u64,
}

impl Kernel {
    /// Runs `command` in a cgroup of `limit_bytes`, with swap for `bytes`, and restores the system
    /// (`KRN-2`).
    pub(crate) fn run<T: Default + Send + 'static>(
        &self,
        (setting, bytes, limit_bytes): (&KernelSetting, u64, u64),
        command: Command,
        look: &Look<'_>,
        read: fn(ChildStdout) -> T,
    ) -> Result<Swapped<T>, WatchError> {
        let journal = begin(setting.folio_kib)?;
        let disk_bytes = (bytes + DISK_SLACK_BYTES).next_multiple_of(1 << 20);
        let swap = zram::Swap::set_up(&journal, disk_bytes, &setting.algorithm)?;
        let ended = run_in_cgroup((&journal, &self.hierarchy, limit_bytes), command, look, read)?;
        let beside_bytes_max = swap.used_bytes_max()?;
        journal.undo()?;
        Ok(Swapped { ended, beside_bytes_max })
    }
}

/// Whether this process may change swap and cgroups, and if not, what to do.
fn may_change() -> Result<(), String> {
    match zfolio_sys::probe::effective_uid() {
        0 => Ok(()),
        _ => Err("swap and cgroups need root; run it with sudo".to_owned()),
    }
}

/// Begins the changes for one run: without zswap, and with folios of `folio_kib`.
fn begin(folio_kib: u32) -> io::Result<Journal> {
    let journal = Journal::open(Path::new(journal::PATH))?;
    keep_zswap_out(&journal)?;
    choose_folio(&journal, folio_kib)?;
    Ok(journal)
}

/// How much more than its limit a cgroup may be charged: a process that is being killed gets the pages that it asks
/// for meanwhile. (Go, killed at 47 MiB, passed its limit.) A cgroup without a limit would be charged far more.
const PAST_LIMIT_BYTES: u64 = 1 << 20;

/// Runs `command` in a cgroup of `limit_bytes`.
fn run_in_cgroup<T: Default + Send + 'static>(
    (journal, hierarchy, limit_bytes): (&Journal, &Hierarchy, u64),
    mut command: Command,
    look: &Look<'_>,
    read: fn(ChildStdout) -> T,
) -> Result<Ended<T>, WatchError> {
    let cgroup = Cgroup::set_up(journal, hierarchy, limit_bytes)?;
    os::tie(&mut command, Some(cgroup.members()?));
    let ended = watch(command, look, read)?;
    let charged_bytes_max = cgroup.bytes_max();
    if charged_bytes_max > limit_bytes + PAST_LIMIT_BYTES {
        let line = format!("the cgroup was charged {charged_bytes_max} bytes, over its limit");
        return Err(io::Error::other(line).into());
    }
    Ok(ended)
}

/// If zswap is on, it would be between the program and the swap area, and would be measured instead.
fn keep_zswap_out(journal: &Journal) -> io::Result<()> {
    let path = zswap::parameter("enabled");
    match fs::read_to_string(&path) {
        Ok(state) if state.trim() == "Y" => journal.write(&path, "Y", "N"),
        _ => Ok(()),
    }
}

fn folio_chooser(kib: u32) -> PathBuf {
    PathBuf::from(format!("{THP}/hugepages-{kib}kB/enabled"))
}

/// Allows anonymous memory in folios of `kib` and of a page, and in no other size.
fn choose_folio(journal: &Journal, kib: u32) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(THP) else {
        // A kernel without huge pages has only 4 KiB folios.
        return if kib == 4 { Ok(()) } else { Err(io::Error::other("no transparent huge pages")) };
    };
    let mut choosers: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path().join("enabled")))
        .filter(|path| path.exists())
        .collect();
    choosers.sort();
    let wanted = folio_chooser(kib);
    if choosers.is_empty() {
        // Before 6.8 there is one switch, for 2 MiB folios only.
        choosers.push(Path::new(THP).join("enabled"));
    }
    for path in choosers {
        let text = fs::read_to_string(&path).map_err(|error| at(&path, &error))?;
        let before = text.split_whitespace().find_map(|word| word.strip_prefix('['));
        let Some(before) = before.map(|word| word.trim_end_matches(']')) else { continue };
        let value = if path == wanted { "always" } else { "never" };
        if before != value {
            journal.write(&path, before, value)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::KernelSetting;

    #[test]
    fn a_setting_of_the_kernel_is_an_algorithm_and_a_folio() {
        let setting: KernelSetting = "lzo-rle:64K".parse().expect("well formed");
        assert_eq!(setting.to_string(), "kernel lzo-rle 64K");
        for bad in ["lz4", "lz4:16K", ":4K", "lz4 x:4K", "../x:4K", "lz4:4K:4K"] {
            let line = bad.parse::<KernelSetting>().expect_err(bad);
            assert!(line.contains("accepted"), "{bad}: {line}");
        }
    }
}
