//! The ledger of a run as a file: `/dev/shm/zfolio-UID/RUN.ledger`.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use zfolio_core::budget::{Bucket, WriteBudget};
use zfolio_core::ledger::{FILE_SUFFIX, Ledger, Owner};
use zfolio_sys::{process, shared};

use crate::stats_file;

/// Makes and maps the ledger of a run. `None`: there is no `/dev/shm`, or no right to make a file
/// there.
pub(crate) fn create(run: u32, total_bytes: u64) -> Option<&'static Ledger> {
    let file = shared::create(&Ledger::file_name(run.into()), size_of::<Ledger>())?;
    // SAFETY: a ledger consists of atomics (`LEDGER-4`), and the file has its size.
    #[allow(unsafe_code, reason = "memory that other processes change, in this one place")]
    let ledger: &Ledger = unsafe { shared::map_for_good(&file) }?;
    ledger.begin(run, total_bytes);
    Some(ledger)
}

/// Removes the ledger of a run.
pub(crate) fn remove(run: u32) {
    shared::remove(&Ledger::file_name(run.into()));
}

/// A copy of the ledger of `run`, if that has one.
pub(crate) fn read(directory: &Path, run: u32) -> Option<Box<Ledger>> {
    read_file(&directory.join(Ledger::file_name(run.into())))
}

fn read_file(path: &Path) -> Option<Box<Ledger>> {
    // SAFETY: `Ledger` is `repr(C)`, made of atomic integers without padding (asserted beside it).
    #[allow(unsafe_code, reason = "the bytes of a file become a structure")]
    let ledger: Box<Ledger> = unsafe { shared::read(path) }.ok()?;
    ledger.is_whole().then_some(ledger)
}

/// Whether a process is seen from here to run.
fn is_running(owner: Owner) -> bool {
    stats_file::start_ticks(owner.pid) == Some(owner.start_ticks)
}

/// Whether a `zfolio run` may still run: one in another PID namespace is not seen from here.
fn may_run(owner: Owner) -> bool {
    process::is_other_namespace(owner.namespace) || is_running(owner)
}

/// Whether there may still be a `zfolio run` that acts on what is written into this ledger.
pub(crate) fn is_followed(ledger: &Ledger) -> bool {
    let run = ledger.run();
    let owners = ledger.seats().map(|(_, seat)| seat.owner());
    let mut of_run = owners.filter(|owner| owner.pid == run).peekable();
    if of_run.peek().is_none() {
        // The run gets its slot a moment after it has made the ledger.
        return stats_file::start_ticks(run).is_some();
    }
    of_run.any(may_run)
}

/// Asks the `zfolio run` of that ledger for another limit.
pub(crate) fn ask_limit(directory: &Path, run: u32, bytes: u64) -> io::Result<()> {
    write(directory, run, &bytes.to_ne_bytes(), Ledger::LIMIT_ASKED_AT)
}

/// Sets another budget for what the processes of that ledger write.
pub(crate) fn set_write_budget(directory: &Path, run: u32, budget: WriteBudget) -> io::Result<()> {
    let words: Vec<u8> = Bucket::words(budget).into_iter().flat_map(u64::to_ne_bytes).collect();
    write(directory, run, &words, Ledger::WRITES_AT)
}

fn write(directory: &Path, run: u32, bytes: &[u8], at: usize) -> io::Result<()> {
    shared::write_at(&directory.join(Ledger::file_name(run.into())), bytes, at)
}

/// Removes the file at `path` if it is the ledger of a run that was killed, and none of its processes is left.
pub(crate) fn sweep(path: &Path) {
    let name = path.file_name().and_then(OsStr::to_str);
    let run = name.and_then(|name| name.strip_suffix(FILE_SUFFIX)?.parse::<u32>().ok());
    if run.is_none_or(|run| stats_file::start_ticks(run).is_some()) {
        return;
    }
    let is_used = read_file(path).is_some_and(|ledger| {
        ledger.seats().any(|(_, seat)| {
            let owner = seat.owner();
            // The run itself has a slot.
            if Some(owner.pid) == run { may_run(owner) } else { is_running(owner) }
        })
    });
    if !is_used {
        shared::unlink(path).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::{create, process, read, remove, set_write_budget, sweep};
    use crate::stats_file;
    use zfolio_core::ledger::{Ledger, Owner};

    /// Goal: the ledger of a run that was killed goes, and not that of one in another PID namespace, whose numbers mean
    /// nothing here: its new processes had the whole limit each.
    #[test]
    fn the_ledger_of_a_run_elsewhere_stays() {
        let directory = stats_file::directory(zfolio_sys::probe::effective_uid());
        let here = process::pid_namespace();
        for (run, namespace, stays) in [(5_000_003, here, false), (5_000_004, here ^ 1, true)] {
            let Some(ledger) = create(run, 64 << 20) else {
                eprintln!("SKIPPED: no /dev/shm");
                return;
            };
            ledger.enter(Owner { pid: run, namespace, start_ticks: 2 }).unwrap();
            sweep(&directory.join(Ledger::file_name(run.into())));
            assert_eq!(read(&directory, run).is_some(), stays, "{namespace}, here {here}");
            remove(run);
        }
    }

    /// Goal: what one process writes into a ledger another one reads; after the run there is no
    /// file.
    #[test]
    fn a_ledger_is_read_while_its_run_lasts() {
        let directory = stats_file::directory(zfolio_sys::probe::effective_uid());
        // Above every PID that the kernel assigns.
        let run = 5_000_001;
        let Some(ledger) = create(run, 64 << 20) else {
            eprintln!("SKIPPED: no /dev/shm");
            return;
        };
        let owner = Owner { pid: 7, namespace: 1, start_ticks: 2 };
        let index = ledger.enter(owner).unwrap();
        let copy = read(&directory, run).expect("it was just made");
        assert_eq!(copy.total_bytes(), 64 << 20);
        assert_eq!(copy.seats().map(|(at, seat)| (at, seat.owner())).next(), Some((index, owner)));
        let budget = "10M/h".parse().unwrap();
        set_write_budget(&directory, run, budget).unwrap();
        assert_eq!(ledger.writes().budget(), budget);
        assert_eq!(ledger.writes().left(0, 0, || ()), 10 << 20, "it starts full");
        remove(run);
        assert!(read(&directory, run).is_none());
    }
}
