//! The userfaultfds of the run's processes, kept open until all threads of their process have ended.
//!
//! A killed thread that is still in a `write` then finds no page of zeros where memory was compressed: its `write`
//! ends. But whoever else looks at the memory of a process without a handler would wait, the end of a virtual
//! machine's process among them. So a userfaultfd is closed a second after its handler has gone.
//!
//! And the claims of the block devices that the run spills to. Who has one keeps the device from all others; each
//! process that uses a part of the device asks for a copy, since this process may end before it.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::{fs, io};

use zfolio_sys::custody::{Custodian, Entrusted};
use zfolio_sys::{clock, files, process};

use crate::stats_file;

/// The end of a custodian's name, behind the run's process id.
const SUFFIX: &str = ".custody";

/// How long a userfaultfd is kept after its handler has gone: killed threads that wait for a CPU get one meanwhile.
const KEPT_NS: u64 = 1_000_000_000;

/// Userfaultfds kept at once: a descriptor each, and never more than a quarter of those that this process may have.
const KEPT_MAX: u64 = 512;

/// See the module.
#[derive(Debug)]
pub(super) struct Keep {
    custodian: Option<Custodian>,
    most: usize,
    /// Each with the time since when its handler has been seen gone.
    kept: Vec<(Entrusted, Option<u64>)>,
    /// For each place that is spilled to, in their order; `None`: a directory.
    claims: Vec<Option<OwnedFd>>,
}

impl Keep {
    /// Keeps what processes entrust to this run, and gives them what they ask for. Without a custodian it claims
    /// nothing: then the first process that needs a device has it alone.
    pub(super) fn new(mut claims: Vec<Option<OwnedFd>>) -> Keep {
        let name = format!("{}{SUFFIX}", std::process::id());
        // A filter may end this process for a socket.
        let custodian = if process::is_filtered() { None } else { Custodian::new(&name) };
        if custodian.is_none() {
            claims.clear();
        }
        let most = usize::try_from(KEPT_MAX.min(files::limit() / 4)).unwrap_or(0);
        Keep { custodian, most, kept: Vec::new(), claims }
    }

    /// Takes what has come, and closes what is no longer needed.
    pub(super) fn look(&mut self) {
        let Some(custodian) = &mut self.custodian else { return };
        for entrusted in custodian.receive() {
            let Some(place) = entrusted.asked() else {
                self.kept.push((entrusted, None));
                continue;
            };
            let claim = usize::try_from(place).ok().and_then(|place| self.claims.get(place));
            if let Some(claim) = claim.and_then(Option::as_ref) {
                entrusted.answer(claim.as_fd());
            }
        }
        // The oldest go first: a new one's process has the longest to live.
        let excess = self.kept.len().saturating_sub(self.most);
        self.kept.drain(..excess);
        let now = clock::monotonic_ns();
        self.kept.retain_mut(|(entrusted, gone_since)| {
            if has_handler(entrusted) {
                return true;
            }
            now - *gone_since.get_or_insert(now) < KEPT_NS
        });
    }
}

/// Removes the file at `path` if it is the socket of a run that was killed.
pub(super) fn sweep(path: &Path) {
    let name = path.file_name().and_then(OsStr::to_str);
    let run: Option<u32> = name.and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok());
    let is_gone = run.is_some_and(|run| stats_file::start_ticks(run).is_none());
    // As in Keep::new().
    if !is_gone || process::is_filtered() {
        return;
    }
    // A run in another PID namespace is not seen, and answers.
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if UnixStream::connect(path).is_err_and(refused) {
        fs::remove_file(path).ok();
    }
}

/// Whether the thread that sent it, one of the engine's, is there still.
fn has_handler(entrusted: &Entrusted) -> bool {
    let Entrusted { process, number: thread, .. } = entrusted;
    std::path::Path::new(&format!("/proc/{process}/task/{thread}")).exists()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    use super::{KEPT_NS, Keep, SUFFIX, sweep};
    use zfolio_sys::{cpu, custody};

    /// Goal: what a living thread sent is kept; a second after the thread has gone it is not.
    #[test]
    fn a_file_is_kept_a_second_longer_than_its_thread() {
        let mut keep = Keep::new(Vec::new());
        if keep.custodian.is_none() {
            eprintln!("SKIPPED: no /dev/shm, or a sandbox");
            return;
        }
        let name = format!("{}.custody", std::process::id());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(custody::entrust(&name, std::process::id(), file.as_fd(), cpu::thread_id()));
        // No thread has this number.
        assert!(custody::entrust(&name, std::process::id(), file.as_fd(), u32::MAX >> 1));
        keep.look();
        assert_eq!(keep.kept.len(), 2);
        let gone_since = keep.kept[1].1.expect("its thread is gone");
        keep.kept[1].1 = gone_since.checked_sub(KEPT_NS);
        keep.look();
        assert_eq!(keep.kept.len(), 1);
        assert_eq!(keep.kept[0].0.number, cpu::thread_id());
    }

    /// Goal: of the sockets of runs that are no more those go on which nobody listens.
    #[test]
    fn sockets_of_killed_runs_are_removed() {
        // Above every PID that the kernel assigns.
        let name = |run: u32| format!("{run}{SUFFIX}");
        let directory = std::env::temp_dir().join(format!("zfolio-keep-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let listen = |run| UnixListener::bind(directory.join(name(run))).unwrap();
        drop(listen(5_000_001));
        let _elsewhere = listen(5_000_002);
        drop(listen(std::process::id()));
        std::fs::read_dir(&directory).unwrap().for_each(|entry| sweep(&entry.unwrap().path()));
        let is_there = |run| directory.join(name(run)).exists();
        assert!(!is_there(5_000_001), "nobody listens");
        assert!(is_there(5_000_002), "somebody listens, perhaps in another PID namespace");
        assert!(is_there(std::process::id()), "the run is alive");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
