//! `zfolio device save`, and `--load`: contents that survive their disk.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use zfolio_block::control::REQUEST_BYTES_MAX;
use zfolio_block::ram::Ram;
use zfolio_block::saved::{self, SavedDisk};
use zfolio_core::size;
use zfolio_core::zram::{FormatError, LoadError};
use zfolio_sys::probe::child::Signals;

use super::arguments::SaveArgs;
use super::ask;
use super::serve::ENDS;
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
            "'{}' is not a file; accepted: a path of UTF-8 without line breaks, up to 4000 bytes",
            file.display()
        ))
    })?;
    let done = ask(name, &request)?;
    let mut sizes = done.split_whitespace().skip(1).map(|bytes| bytes.parse().unwrap_or(0));
    let [contents, bytes] = [(); 2].map(|()| size::display(sizes.next().unwrap_or(0)));
    output::print(&format!("disk {name}: {contents} of contents saved, {bytes} in the file\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Opens a saved disk.
///
/// # Errors
///
/// It is none, or cannot be read.
pub(super) fn open(path: &Path) -> Result<SavedDisk, Failure> {
    saved::open(path).map_err(|error| match error {
        FormatError::Io(error) => {
            Failure::argument(format!("--load: '{}': {error}", path.display()))
        }
        error => unloaded(path, &error.into()),
    })
}

/// Fills a disk with the contents of a saved one. A signal that ends a disk ends that too.
///
/// # Errors
///
/// The file is not what was saved, there is no room, or a signal came. The disk is to be dropped.
pub(super) fn load(
    ram: &Ram,
    path: &Path,
    disk: &mut SavedDisk,
    signals: &Signals,
) -> Result<(), Failure> {
    let done = std::thread::scope(|scope| {
        let loads = scope.spawn(|| saved::load(ram, disk));
        while !loads.is_finished() {
            match signals.next(TURN) {
                Ok(Some(signal)) if ENDS.contains(&signal.number) => ram.zram().halt(),
                Ok(_) => {}
                // It is loaded, then; the disk's own loop sees the error too.
                Err(_) => break,
            }
        }
        loads.join().expect("a load does not panic")
    });
    done.map(|_| ()).map_err(|error| unloaded(path, &error))
}

/// Why a saved disk is not loaded.
fn unloaded(path: &Path, error: &LoadError) -> Failure {
    let path = path.display();
    match error {
        LoadError::NoSpace { limit_bytes } => Failure::argument(format!(
            "--mem-limit: {} are not enough for '{path}'; accepted: more, or a place with --writeback",
            size::display(*limit_bytes)
        )),
        error => Failure::machine(format!("--load: '{path}': {error}")),
    }
}
