//! `zfolio device save`, `--load` and `--save`: contents that survive their disk.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use zfolio_block::control::REQUEST_BYTES_MAX;
use zfolio_block::ram::Ram;
use zfolio_block::saved::{self, Kept, SavedDisk, Unsaved};
use zfolio_core::size;
use zfolio_core::zcomp::Params;
use zfolio_core::zram::{self, FormatError, Header, LoadError};
use zfolio_sys::probe::child::Signals;

use super::arguments::{AddArgs, SaveArgs, unfit};
use super::ask;
use super::serve::{ENDS, say};
use crate::failure::Failure;
use crate::output;

/// How long to wait for a signal before the next look at what is loaded.
const TURN: Duration = Duration::from_millis(50);

/// Has a disk save itself, and says what was saved.
///
/// # Errors
///
/// There is no such disk, or it cannot be saved; then the file is what it was.
pub(super) fn save(arguments: &SaveArgs) -> Result<ExitCode, Failure> {
    let SaveArgs { name, file } = arguments;
    // The disk has another directory.
    let path = std::path::absolute(file)
        .map_err(|error| Failure::argument(format!("'{}': {error}", file.display())))?;
    let request =
        path.to_str().filter(|path| !path.contains('\n')).map(|path| format!("save {path}"));
    let request = request.filter(|request| request.len() < REQUEST_BYTES_MAX);
    let request = request.ok_or_else(|| {
        Failure::argument(format!(
            "'{}' is not a file; accepted: a path of UTF-8 without line breaks, up to {} bytes",
            file.display(),
            REQUEST_BYTES_MAX - "save \n".len()
        ))
    })?;
    let done = ask(name, &request)?;
    let mut sizes = done.split_whitespace().skip(1).map(|bytes| bytes.parse().unwrap_or(0));
    let [contents, bytes, lost] = [(); 3].map(|()| sizes.next().unwrap_or(0));
    let [contents, bytes] = [contents, bytes].map(size::display);
    output::print(&format!("disk {name}: {contents} of contents saved, {bytes} in the file\n"))?;
    say_lost(name, lost);
    Ok(ExitCode::SUCCESS)
}

/// What to say about a disk that was saved or loaded with units that are lost; `None`: there are none.
pub(super) fn lost_units(count: u64) -> Option<String> {
    let line =
        || format!("units that are lost, and cannot be read until they are written: {count}");
    (count > 0).then(line)
}

/// Says so, if there are any.
fn say_lost(name: &str, count: u64) {
    if let Some(line) = lost_units(count) {
        say(&format!("disk {name}: {line}"));
    }
}

/// A saved disk that a disk goes on from.
pub(super) struct Origin {
    /// The option that names it.
    option: &'static str,
    path: PathBuf,
    disk: SavedDisk,
}

impl Origin {
    /// Opens the file that the disk goes on from, if there is one.
    ///
    /// # Errors
    ///
    /// It is no saved disk, or cannot be read; or nobody knows whether it is there; or a disk in its units cannot grow
    /// to the size that is asked for.
    pub(super) fn open(
        arguments: &AddArgs,
        kept: Option<&Kept>,
    ) -> Result<Option<Origin>, Failure> {
        let asked = arguments.load.as_deref().map(|path| ("--load", path));
        let kept = kept.map(Kept::loaded).transpose().map_err(|error| untaken(&error))?.flatten();
        let kept = kept.map(|path| ("--save", path));
        let Some((option, path)) = asked.or(kept) else { return Ok(None) };
        match saved::open(path) {
            Ok(disk) => {
                let origin = Origin { option, path: path.to_owned(), disk };
                let unit = origin.header().unit;
                match origin.larger(arguments).filter(|size| !zram::is_size(*size, unit)) {
                    // Before all of it is read.
                    Some(size) => Err(Failure::argument(unfit(size, unit))),
                    None => Ok(Some(origin)),
                }
            }
            Err(FormatError::Io(error)) => {
                Err(Failure::argument(format!("{option}: '{}': {error}", path.display())))
            }
            Err(error) => Err(unloaded(option, path, &error.into())),
        }
    }

    /// What the disk is made of.
    pub(super) fn header(&self) -> &Header {
        self.disk.header()
    }

    /// The size that is asked for, if that is more than the file's.
    fn larger(&self, arguments: &AddArgs) -> Option<u64> {
        arguments.size.filter(|size| *size > self.header().disk_bytes)
    }

    /// Fills a disk with the contents, and gives it the size that is asked for if that is more. A signal that ends a
    /// disk ends that too.
    ///
    /// # Errors
    ///
    /// The file is not what was saved, there is no room, or a signal came. The disk is to be dropped.
    pub(super) fn fill(
        &mut self,
        ram: &Ram,
        arguments: &AddArgs,
        signals: &Signals,
    ) -> Result<(), Failure> {
        let disk = &mut self.disk;
        let mut is_ended = false;
        let done = std::thread::scope(|scope| {
            let loads = scope.spawn(|| saved::load(ram, disk));
            while !loads.is_finished() {
                match signals.next(TURN) {
                    Ok(Some(signal)) if ENDS.contains(&signal.number) => {
                        is_ended = true;
                        ram.zram().halt();
                    }
                    Ok(_) => {}
                    // It is loaded, then; the disk's own loop sees the error too.
                    Err(_) => break,
                }
            }
            loads.join().expect("a load does not panic")
        });
        // The signal may come when the load has just ended: nobody else hears it, and the disk stays halted.
        let done = if is_ended { done.and(Err(LoadError::Halted)) } else { done };
        let loaded = done.map_err(|error| unloaded(self.option, &self.path, &error))?;
        say_lost(&arguments.name, loaded.lost);
        let resized = self.larger(arguments).map(|size| ram.zram().resize(size)).transpose();
        resized.map(drop).map_err(|error| Failure::argument(format!("--size: {error}")))
    }

    /// What the disk has of the file although the options say otherwise; `None`: nothing.
    pub(super) fn differs(&self, arguments: &AddArgs) -> Option<String> {
        if self.option == "--load" {
            // It refuses these options.
            return None;
        }
        let header = self.header();
        let asked = arguments.algorithms().unwrap_or_default();
        let [asked, found] = [&asked, &header.algorithms]
            .map(|all| all.iter().map(Params::to_string).collect::<Vec<_>>().join(", "));
        let is_smaller = arguments.size.is_some_and(|size| size < header.disk_bytes);
        let differs = is_smaller || arguments.unit != header.unit || asked != found;
        differs.then(|| {
            let (bytes, unit) = (size::display(header.disk_bytes), header.unit);
            let path = self.path.display();
            format!("it stays as it is in '{path}': {bytes}, units of {unit}, {found}")
        })
    }
}

/// Takes the file that the disk is to be saved in.
///
/// # Errors
///
/// It cannot be written, another disk has it, or it is older than what clients had written.
pub(super) fn take(arguments: &AddArgs) -> Result<Option<Kept>, Failure> {
    let kept = arguments.save.as_deref().map(Kept::take).transpose();
    kept.map_err(|error| untaken(&error))
}

/// Notes that clients may write from now on, and that the file is older until the disk is saved.
///
/// # Errors
///
/// The file system's. No client may write.
pub(super) fn note_served(mut kept: Kept) -> Result<Arc<Kept>, Failure> {
    let noted = kept.note_served();
    noted.map_err(|error| Failure::machine(format!("--save: {error}")))?;
    Ok(Arc::new(kept))
}

/// What to say about a disk that begins empty, although another one had its file; `None`: nothing.
pub(super) fn lost_before(kept: &Kept) -> Option<String> {
    let path = kept.lost_before()?.display();
    Some(format!("the last disk with '{path}' ended without being saved; this one begins empty"))
}

fn untaken(error: &Unsaved) -> Failure {
    let line = unsaved(error);
    match error {
        Unsaved::System(..) | Unsaved::OtherKind(_) | Unsaved::Reserved(_) => {
            Failure::argument(line)
        }
        _ => Failure::machine(line),
    }
}

/// Why a disk cannot be saved.
pub(super) fn unsaved(error: &Unsaved) -> String {
    format!("--save: {error}")
}

/// Why a saved disk is not loaded.
fn unloaded(option: &str, path: &Path, error: &LoadError) -> Failure {
    let path = path.display();
    match error {
        LoadError::NoSpace { limit_bytes } => Failure::argument(format!(
            "--mem-limit: {} are not enough for '{path}'; accepted: more, or a place with --writeback that has room",
            size::display(*limit_bytes)
        )),
        error => Failure::machine(format!("{option}: '{path}': {error}")),
    }
}
