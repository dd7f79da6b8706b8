//! `zfolio bench`: the same work under the kernel's zram swap, under `zfolio run`, and inline.
//!
//! # How the comparison is kept fair
//!
//! - **Equal total memory.** The kernel does not charge zram's memory to the cgroup. So the cost of
//!   a kernel run is the cgroup's limit plus `mem_used_max` of `mm_stat`. The kernel's settings run
//!   first, and zfolio's limit, for everything, is the *smallest* total that any of them needed.
//! - **Interleaved rounds.** A B C A B C, and the median of each figure, so that a temporary
//!   slowdown of the machine affects all settings alike.
//! - **The same program.** `usemem` does not know zfolio. The inline rows run the same source in a
//!   process of their own.
//! - **The kernel's best.** Ratios are relative to the kernel's best setting in each phase.

mod arguments;
pub(crate) mod outcome;
pub(crate) mod rounds;
pub(crate) mod setting;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use zfolio_sys::files;

use crate::codecs;
use crate::corpus::make;
use crate::iaa;
use crate::inline::{self, InlineJob};
use crate::kernel::zswap::Zswap;
use crate::kernel::{self, Kernel};
use crate::os;
use crate::programs;
use crate::recompress;
use crate::replacement;
use crate::spill;
use crate::swap;
use crate::usemem::Corpus;
use crate::zram;
pub(crate) use arguments::Against;
pub use arguments::BenchArgs;
use arguments::{UsememArgs, What};
use rounds::Bench;
use table::Table;

/// Why the comparison ended early.
pub(crate) enum Failure {
    /// The user must change an argument.
    Refused(String),
    /// The system returned an error: it cannot be run here.
    Failed(String),
    /// A result is wrong, a part of the measurement failed, or the output cannot be written.
    Wrong(String),
    /// A signal requested a stop.
    Stopped(i32),
}

/// Runs `zfolio bench`.
#[must_use]
pub fn bench(args: BenchArgs) -> ExitCode {
    let outcome = match args.what {
        What::Usemem(args) if args.inline_child => inline_child(&args),
        What::Usemem(args) => compare(&args),
        What::Programs(args) => programs::programs(&args),
        What::Auto(mut args) => {
            args.set_all_settings();
            programs::programs(&args)
        }
        What::Codecs(args) => codecs::codecs(&args),
        What::Replacement(args) => replacement::replacement(&args),
        What::Spill(args) => spill::spill(&args),
        What::Swap(args) => swap::swap(&args),
        What::Zram(args) => zram::zram(&args),
        What::Iaa(args) => iaa::iaa(&args),
        What::Recompress(args) => recompress::recompress(&args),
    };
    let (line, status) = match outcome {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => return ExitCode::FAILURE,
        Err(Failure::Refused(line)) => (line, 2),
        Err(Failure::Failed(line)) => (line, 125),
        Err(Failure::Wrong(line)) => (line, 1),
        Err(Failure::Stopped(signal)) => {
            // As in a shell.
            (
                "interrupted; everything was put back".to_owned(),
                u8::try_from(128 + signal).unwrap_or(1),
            )
        }
    };
    eprintln!("zfolio: {line}");
    ExitCode::from(status)
}

/// An error if a signal requested a stop.
pub(crate) fn go_on() -> Result<(), Failure> {
    os::stop_signal().map_or(Ok(()), |signal| Err(Failure::Stopped(signal)))
}

/// Prints the results. If the reader has closed the pipe, that is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let printed = files::print(text).map(|_read| ());
    printed.map_err(|error| Failure::Wrong(format!("standard output: {error}")))
}

/// The hidden mode, which a parent starts for each inline row.
fn inline_child(args: &UsememArgs) -> Result<bool, Failure> {
    let (Some(compression), Some(limit_bytes), Some(corpus)) =
        (args.setting.first(), args.total, args.corpus.as_deref())
    else {
        let line = "--inline-child: needs --setting, --total and --corpus";
        return Err(Failure::Refused(line.to_owned()));
    };
    let (workers, reads) = (args.workers as usize, args.reads as usize);
    let (bytes, seed) = (args.bytes, args.seed);
    let job = InlineJob { corpus, bytes, limit_bytes, workers, seed, reads, compression };
    let report = inline::run(&job).map_err(Failure::Failed)?;
    print(&format!("{}\n", report.json()))?;
    Ok(report.mismatch.is_none())
}

/// Runs the comparison; returns whether every run gave a result without a wrong byte.
fn compare(args: &UsememArgs) -> Result<bool, Failure> {
    os::catch_stop_signals();
    args.check_sizes()?;
    let corpus_path = corpus_path(args.corpus.as_deref())?;
    let corpus = Corpus::open(&corpus_path).map_err(|error| Failure::Refused(error.to_string()))?;
    let mut notes = Vec::new();
    let bench = Bench {
        args,
        usemem: find_usemem(args)?,
        zfolio: own_program(args.zfolio.as_deref())?,
        kernel: args.against.and_then(|_| find_kernel(&mut notes)),
        zswap: args.zswap.as_deref().and_then(|dir| find_zswap(dir, &mut notes)),
        corpus: corpus_path,
    };
    let (title, context) = (bench.title(&corpus), bench.context(&corpus));
    let mut table = Table { title, context, rows: bench.rows(&mut notes), notes };
    if table.rows.is_empty() {
        return Err(Failure::Refused("--without: nothing is left to run".to_owned()));
    }
    kernel::journal::undo_on_panic();
    let mut total = args.total;
    for round in 1..=args.repeats {
        bench.round(round, &corpus, &mut table.rows, &mut total)?;
    }
    if args.json {
        print(&format!("{:#}\n", table.json()))?;
    } else {
        print(&table.text())?;
    }
    Ok(table.all_right())
}

/// The corpus that was given, or the one in the cache, which is made if it does not exist.
pub(crate) fn corpus_path(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    // An empty variable counts as not set.
    let folder_in =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = folder_in("XDG_CACHE_HOME").or_else(|| Some(folder_in("HOME")?.join(".cache")));
    let no_home = || Failure::Refused("--corpus FILE: needed where HOME is not set".to_owned());
    let folder = cache.ok_or_else(no_home)?.join("zfolio");
    let path = folder.join("corpus.bin");
    if !path.exists() {
        eprintln!("zfolio: making a corpus in {}", path.display());
        let failed = |error| Failure::Failed(format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(failed)?;
        make::make(&path, 400 << 20, false)?;
    }
    Ok(path)
}

/// The program `zfolio`: the given one, or this program.
pub(crate) fn own_program(given: Option<&Path>) -> Result<PathBuf, Failure> {
    let own = given.map(Path::to_owned).map_or_else(std::env::current_exe, Ok);
    own.map_err(|error| Failure::Failed(format!("cannot find this program: {error}")))
}

fn find_usemem(args: &UsememArgs) -> Result<PathBuf, Failure> {
    if let Some(path) = &args.usemem {
        let missing = || Failure::Refused(format!("--usemem {}: no such file", path.display()));
        return if path.is_file() { Ok(path.clone()) } else { Err(missing()) };
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    // The second is where `make install` puts it.
    let own = beside.map(|folder| [folder.to_owned(), folder.join("../lib/zfolio")]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = own.into_iter().flatten().chain(std::env::split_paths(&path));
    let found = folders.map(|folder| folder.join("usemem")).find(|file| file.is_file());
    let line = "the program usemem is neither beside zfolio, nor in ../lib/zfolio, nor in PATH; name it with \
                --usemem FILE";
    found.ok_or(Failure::Failed(line.to_owned()))
}

/// The kernel's zswap over a file in `dir`, if that is possible; a note if it is not.
fn find_zswap(dir: &Path, notes: &mut Vec<String>) -> Option<Zswap> {
    Zswap::find(dir).map_err(|reason| notes.push(format!("zswap was left out: {reason}"))).ok()
}

/// The kernel's side, if it is possible; a note if it is not.
pub(crate) fn find_kernel(notes: &mut Vec<String>) -> Option<Kernel> {
    match Kernel::find() {
        Ok(kernel) => Some(kernel),
        Err(reason) => {
            let note = format!("the kernel's zram was left out: {reason}");
            eprintln!("zfolio: {note}");
            notes.push(note);
            None
        }
    }
}
