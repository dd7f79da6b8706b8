//! The file of a saved disk: written beside its place, and put there whole.
//!
//! ```text
//! FILE.saving    created, or what a save has left whose process was killed; locked, so that two saves do not meet
//!                written, synced
//! FILE           FILE.saving, renamed; its directory synced
//! ```
//!
//! So FILE is what it was before or what was saved, at any moment and whenever the process or the machine ends.
//!
//! A disk that is saved when it ends ([`Kept`]) has FILE.saving open and locked from before its first client on. So a
//! directory that cannot be written to is known at the start, and two disks do not have one file. A FILE.saving that is
//! not empty and that nobody has locked says that a disk, or a save, has ended too early: FILE is older than what
//! clients had written, and nobody goes on from it unasked (`SAVE-1`). So while it is written it is never shortened:
//! contents are written over the note, and it gets its length at the end.
//!
//! While such a disk is served, a save to FILE is a **checkpoint**: it is written to FILE.saving.saving and renamed to
//! FILE, and FILE.saving stays, since clients go on to write. What a killed process leaves of a checkpoint is removed
//! by the next disk that has the file. Names that end with .saving are refused for FILE, so both files are always ours.
//!
//! # Concurrency
//!
//! A lock (`Kept::writes`) is held while FILE is replaced. The save at the end makes a checkpoint give up and waits for
//! that, so the last contents are those that stay, and a checkpoint does not take the room that they need.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Seek as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::{FlockOperation, OFlags, flock};
use zfolio_core::sync::Mutex;
use zfolio_core::zram::{FormatError, LoadError, Reader, SaveError, Saved, Unread};
use zfolio_sys::cpu;

use crate::ram::Ram;

/// What the name of a file that is being written ends with.
const SUFFIX: &str = ".saving";

/// What is in the file that is written while a disk is served that is to be saved in it.
const NOTE: &[u8] = b"a disk is served, or has ended without being saved\n";

/// The mode of a saved disk: its contents are in clear.
const MODE: u32 = 0o600;

/// The rank of the lock of a kept file. Locks of units are taken while it is held.
const RANK_WRITES: u8 = 1;

/// Bytes that are written and read together.
const BUFFER_BYTES: usize = 1 << 20;

/// Why there is no file.
#[derive(Debug)]
#[non_exhaustive]
pub enum Unsaved {
    /// There is something of this name that is no file.
    OtherKind(PathBuf),
    /// The name is one of those that files have while they are being written.
    Reserved(PathBuf),
    /// Another save to this name is under way.
    Busy(PathBuf),
    /// The disk that had this file was not saved when it ended: the file is older than what clients had written.
    Stale {
        /// The file.
        path: PathBuf,
        /// What the disk has left.
        partial: PathBuf,
    },
    /// The contents cannot be saved.
    Contents(SaveError),
    /// The system's.
    System(PathBuf, io::Error),
}

impl Unsaved {
    /// Whether another name would do: there is no such directory, or something else has that name.
    #[must_use]
    pub fn is_about_the_name(&self) -> bool {
        use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, PermissionDenied};
        match self {
            Unsaved::OtherKind(_) | Unsaved::Reserved(_) => true,
            Unsaved::System(_, error) => {
                matches!(error.kind(), IsADirectory | NotADirectory | NotFound | PermissionDenied)
            }
            Unsaved::Busy(_) | Unsaved::Stale { .. } | Unsaved::Contents(_) => false,
        }
    }
}

impl fmt::Display for Unsaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unsaved::OtherKind(path) => {
                write!(
                    f,
                    "'{}' is no file; accepted: a file, or a name that is free",
                    path.display()
                )
            }
            Unsaved::Reserved(path) => write!(
                f,
                "'{}': files have such a name while they are saved; accepted: a name without {SUFFIX} at its end",
                path.display()
            ),
            Unsaved::Busy(path) => {
                write!(f, "'{}' belongs to another save, or to a disk", path.display())
            }
            Unsaved::Stale { path, partial } => {
                let (path, partial) = (path.display(), partial.display());
                write!(
                    f,
                    "the disk has ended without being saved, and '{path}' is older; accepted: remove '{partial}' to \
                     go on from there, or both to begin empty"
                )
            }
            Unsaved::Contents(error) => write!(f, "{error}"),
            Unsaved::System(path, error) => write!(f, "'{}': {error}", path.display()),
        }
    }
}

impl std::error::Error for Unsaved {}

/// Saves the contents of a disk as the file `path`, while clients go on. `kept`: the file that the disk has for its
/// end; if that is `path`, this is a checkpoint (see the module).
///
/// # Errors
///
/// See [`Unsaved`]. What was at `path` before is still there.
pub fn save(ram: &Ram, path: &Path, kept: Option<&Kept>) -> Result<Saved, Unsaved> {
    // Whoever continues from this file has not seen all that the clients write.
    save_with(ram, path, kept, &[])
}

/// The same of a disk that clients have left, and of which the file has all that they have written. `notes`: as of
/// [`Kept::save`].
///
/// # Errors
///
/// As those of [`save`].
pub fn save_with(
    ram: &Ram,
    path: &Path,
    kept: Option<&Kept>,
    notes: &[u8],
) -> Result<Saved, Unsaved> {
    let (path, partial) = places(path)?;
    // By name too: after the last save there is no such file any more.
    match kept.filter(|kept| kept.path == path || kept.is_written_at(&partial)) {
        Some(kept) => kept.checkpoint(ram, notes),
        None => save_by(ram, notes, Unread::Fails, &path, &partial, &AtomicBool::new(false)),
    }
}

/// Saves the contents of a disk. If that fails, what was written is removed, unless there was something before: that
/// said that `path` is older than what clients had written, and the note that is left says it still (`SAVE-1`).
fn save_by(
    ram: &Ram,
    notes: &[u8],
    unread: Unread,
    path: &Path,
    partial: &Path,
    ends: &AtomicBool,
) -> Result<Saved, Unsaved> {
    let file = open_partial(partial)?;
    let about = file.metadata().map_err(|error| Unsaved::System(partial.to_owned(), error))?;
    let done = write(ram, notes, unread, &file, path, partial, ends);
    // If only the directory could not be synced, the file has its name already, and another save may have this one.
    if done.is_err() && is_named(&file, partial) {
        // It is ours as long as the lock is held. If this fails, the part that is left is as good a note.
        let left = if about.len() > 0 { mark(&file) } else { fs::remove_file(partial) };
        left.ok();
    }
    done
}

/// Leaves only the note in the file that is written. It is never shorter than that meanwhile (`SAVE-1`).
fn mark(file: &File) -> io::Result<()> {
    file.write_all_at(NOTE, 0)?;
    file.set_len(NOTE.len() as u64)?;
    file.sync_all()
}

/// The file that is written before it gets the name `path`.
fn partial_of(path: &Path) -> PathBuf {
    beside(path, SUFFIX)
}

/// Where the file is, and where it is written.
fn places(path: &Path) -> Result<(PathBuf, PathBuf), Unsaved> {
    // Of a link what it leads to is written.
    let path = match fs::symlink_metadata(path) {
        Ok(there) if there.is_symlink() => {
            fs::canonicalize(path).map_err(|error| Unsaved::System(path.to_owned(), error))?
        }
        Ok(there) if there.is_file() => path.to_owned(),
        Ok(_) => return Err(Unsaved::OtherKind(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        // It may be there: a disk that began empty would be renamed over it at its end.
        Err(error) => return Err(Unsaved::System(path.to_owned(), error)),
    };
    if path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()) {
        return Err(Unsaved::Reserved(path));
    }
    let partial = partial_of(&path);
    Ok((path, partial))
}

/// The file that a disk goes on from, and that it is saved to when it ends. See the module.
#[derive(Debug)]
pub struct Kept {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    /// The file stays when this is dropped. Relaxed: it carries no data.
    is_served: AtomicBool,
    /// There is a note of a disk before, and no file: so its contents are nowhere.
    follows_unsaved: bool,
    /// Held while FILE is replaced. See the module.
    writes: Mutex<RANK_WRITES, ()>,
    /// The disk is saved for the last time. Relaxed: the lock orders what is written.
    ends: AtomicBool,
}

impl Kept {
    /// Whether a disk could be saved there, as far as that is known without opening anything.
    ///
    /// # Errors
    ///
    /// See [`Unsaved`].
    pub fn check(path: &Path) -> Result<(), Unsaved> {
        places(path).map(drop)
    }

    /// Takes a file for a disk. Dropping this value before [`Kept::note_served`] gives the file back as it was.
    ///
    /// # Errors
    ///
    /// See [`Unsaved`].
    pub fn take(path: &Path) -> Result<Kept, Unsaved> {
        let path =
            std::path::absolute(path).map_err(|error| Unsaved::System(path.to_owned(), error))?;
        let (path, partial) = places(&path)?;
        let file = open_partial(&partial)?;
        // What a killed process has left of a checkpoint. Whoever has the lock of `file` is the only one who makes it.
        fs::remove_file(partial_of(&partial)).ok();
        let length =
            file.metadata().map_err(|error| Unsaved::System(partial.clone(), error))?.len();
        let is_there = path.try_exists().map_err(|error| Unsaved::System(path.clone(), error))?;
        if length > 0 && is_there {
            return Err(Unsaved::Stale { path, partial });
        }
        let (writes, ends) = (Mutex::new(()), AtomicBool::new(false));
        let (is_served, follows_unsaved) = (AtomicBool::new(false), length > 0);
        Ok(Kept { path, partial, file, is_served, follows_unsaved, writes, ends })
    }

    /// The file, if the last disk that had it has ended without being saved and there is nothing older to go on from:
    /// this disk begins empty, and whoever looks for the contents of the last one is to be told.
    #[must_use]
    pub fn lost_before(&self) -> Option<&Path> {
        self.follows_unsaved.then_some(self.path.as_path())
    }

    /// The file, if there is one to go on from.
    ///
    /// # Errors
    ///
    /// The system's: nobody knows whether it is there, so the disk must not begin empty.
    pub fn loaded(&self) -> Result<Option<&Path>, Unsaved> {
        match self.path.try_exists() {
            Ok(is_there) => Ok(is_there.then_some(self.path.as_path())),
            Err(error) => Err(Unsaved::System(self.path.clone(), error)),
        }
    }

    /// Clients may write from now on: the file is older than the disk until that is saved.
    ///
    /// # Errors
    ///
    /// The system's. No client may write.
    pub fn note_served(&mut self) -> Result<(), Unsaved> {
        mark(&self.file).map_err(|error| Unsaved::System(self.partial.clone(), error))?;
        sync_directory(&self.path)?;
        self.is_served.store(true, Relaxed);
        Ok(())
    }

    /// A server could not start, and those that had started have ended. This gives the file back as it was, unless a
    /// client has written meanwhile: clients may connect again by themselves. No checkpoint comes afterwards.
    pub fn note_unserved(&self, ram: &Ram) {
        if ram.is_changed() {
            return;
        }
        self.ends.store(true, Relaxed);
        let _alone = self.writes.lock();
        self.give_back();
    }

    /// Removes the file that is written, which is ours as long as the lock is held: unless somebody else has removed
    /// it, or this has. What says that the last disk was not saved stays, for the next one to tell.
    fn give_back(&self) {
        self.is_served.store(false, Relaxed);
        if !self.follows_unsaved && self.is_written_at(&self.partial) {
            fs::remove_file(&self.partial).ok();
        }
    }

    /// Whether the file that is written is the one of this name.
    fn is_written_at(&self, partial: &Path) -> bool {
        is_named(&self.file, partial)
    }

    /// Saves the contents before the end.
    fn checkpoint(&self, ram: &Ram, notes: &[u8]) -> Result<Saved, Unsaved> {
        let partial = partial_of(&self.partial);
        let Some(_alone) = self.writes.try_lock() else { return Err(Unsaved::Busy(partial)) };
        if self.ends.load(Relaxed) {
            return Err(Unsaved::Contents(SaveError::Halted));
        }
        save_by(ram, notes, Unread::Fails, &self.path, &partial, &self.ends)
    }

    /// Saves the contents of the disk, which clients have left, and returns the file. No checkpoint comes afterwards,
    /// unless this fails; then it may be called again.
    ///
    /// `notes`: what those have to know that serve the disk when it goes on ([`Marks`](crate::vhost_user::Marks)).
    ///
    /// # Errors
    ///
    /// See [`Unsaved`]. The file is what it was before, and nobody goes on from it unasked (`SAVE-1`).
    pub fn save(&self, ram: &Ram, notes: &[u8]) -> Result<(Saved, &Path), Unsaved> {
        self.save_as(ram, notes, Unread::Fails)
    }

    /// The same for a disk that ends anyway: a unit that cannot be read now is saved as lost, and does not cost the
    /// others. If there are any, the file that was there stays beside it ([`before`]); a later save of this kind may
    /// find units lost that are so already, and leaves that file as it is.
    ///
    /// # Errors
    ///
    /// As [`Kept::save`].
    pub fn save_last(&self, ram: &Ram, notes: &[u8]) -> Result<(Saved, &Path), Unsaved> {
        self.save_as(ram, notes, Unread::IsLost)
    }

    fn save_as(&self, ram: &Ram, notes: &[u8], unread: Unread) -> Result<(Saved, &Path), Unsaved> {
        self.ends.store(true, Relaxed);
        let _alone = self.writes.lock();
        let ends = AtomicBool::new(false);
        let done = match self.is_written_at(&self.partial) {
            true => write(ram, notes, unread, &self.file, &self.path, &self.partial, &ends),
            // Somebody has removed it; or an earlier call has given it its name, and could not sync the directory.
            false => save_by(ram, notes, unread, &self.path, &self.partial, &ends),
        };
        // The disk goes on, or ends all the same.
        self.ends.store(done.is_ok(), Relaxed);
        // If only the directory could not be synced, the file has its name already, and is whole.
        if done.is_err() && self.is_written_at(&self.partial) {
            // A part of a disk is of no use, and may be what fills the file system. If this fails, the part is as good
            // a note: it has the note's place at least.
            mark(&self.file).ok();
        }
        done.map(|saved| (saved, self.path.as_path()))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if !self.is_served.load(Relaxed) {
            self.give_back();
        }
    }
}

/// Opens and locks the file that is written. It is its owner's alone: one of that name which others may read, or which
/// has another name too, is removed and made anew.
fn open_partial(partial: &Path) -> Result<File, Unsaved> {
    let system = |error| Unsaved::System(partial.to_owned(), error);
    let (there, is_new) = open_locked(partial)?;
    let about = there.metadata().map_err(system)?;
    let ours = (about.uid(), about.mode() & 0o777, about.nlink());
    if is_new || ours == (rustix::process::geteuid().as_raw(), MODE, 1) {
        return Ok(there);
    }
    fs::remove_file(partial).map_err(system)?;
    let (file, is_new) = open_locked(partial)?;
    if !is_new {
        return Err(Unsaved::Busy(partial.to_owned()));
    }
    if about.len() > 0 {
        // It still says what it said (`SAVE-1`).
        file.write_all_at(NOTE, 0).map_err(system)?;
    }
    Ok(file)
}

/// Opens and locks the file that is written. True: it was not there.
fn open_locked(partial: &Path) -> Result<(File, bool), Unsaved> {
    let system = |error| Unsaved::System(partial.to_owned(), error);
    let mut options = OpenOptions::new();
    // A pipe of that name would wait for its other end.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).expect("flags of open(2)");
    options.write(true).mode(MODE).custom_flags(flags);
    let made = options.clone().create_new(true).open(partial);
    let is_new = made.is_ok();
    let file = match made {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.open(partial).map_err(system)?
        }
        made => made.map_err(system)?,
    };
    if is_new {
        // Whatever the umask is.
        file.set_permissions(fs::Permissions::from_mode(MODE)).map_err(system)?;
    }
    let busy = || Unsaved::Busy(partial.to_owned());
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| busy())?;
    // Another save may have ended since the file was opened: then it has another name now.
    if !is_named(&file, partial) {
        return Err(busy());
    }
    if !file.metadata().map_err(system)?.is_file() {
        return Err(Unsaved::OtherKind(partial.to_owned()));
    }
    Ok((file, is_new))
}

/// A file to which nothing more is written once the disk ends.
struct Output<'f> {
    file: &'f File,
    ends: &'f AtomicBool,
}

impl io::Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.ends.load(Relaxed) {
            return Err(io::Error::other("the disk ends"));
        }
        (&mut &*self.file).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the file is the one of this name.
fn is_named(file: &File, path: &Path) -> bool {
    let place = |file: fs::Metadata| (file.dev(), file.ino());
    let (ours, named) = (file.metadata(), fs::metadata(path));
    ours.is_ok_and(|ours| named.is_ok_and(|named| place(named) == place(ours)))
}

/// Writes the contents to `partial`, which is `file`, and renames that to `path`. It fails once `ends` is true.
fn write(
    ram: &Ram,
    notes: &[u8],
    unread: Unread,
    mut file: &File,
    path: &Path,
    partial: &Path,
    ends: &AtomicBool,
) -> Result<Saved, Unsaved> {
    let system = |error| Unsaved::System(partial.to_owned(), error);
    file.rewind().map_err(system)?;
    let mut buffer = BufWriter::with_capacity(BUFFER_BYTES, Output { file, ends });
    let saved = ram.zram().save_as(cpu::current(), notes, unread, &mut buffer).map_err(
        |error| match error {
            SaveError::Io(error) => system(error),
            error => Unsaved::Contents(error),
        },
    )?;
    buffer.flush().map_err(system)?;
    // What is there beyond was left by an earlier try.
    file.set_len(saved.bytes).and_then(|()| file.sync_all()).map_err(system)?;
    if !is_named(file, partial) {
        // Somebody has removed it, and it may be another disk's now.
        return Err(Unsaved::Busy(partial.to_owned()));
    }
    if saved.unread > 0 {
        // Older, and perhaps whole. Where this fails there was none, or the file system has no links.
        let before = before(path);
        let partial = partial_of(&before);
        // Of a save that was killed just here.
        fs::remove_file(&partial).ok();
        fs::hard_link(path, &partial).and_then(|()| fs::rename(partial, before)).ok();
    }
    fs::rename(partial, path).map_err(|error| Unsaved::System(path.to_owned(), error))?;
    // The file is there, and its name is not yet safe from the end of the machine if this fails.
    sync_directory(path)?;
    Ok(saved)
}

/// Where a file stays that a disk's last save replaces by one without units that could not be read.
#[must_use]
pub fn before(path: &Path) -> PathBuf {
    beside(path, ".before")
}

/// The file with this at the end of its name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Makes sure of the names in the directory of a file.
fn sync_directory(path: &Path) -> Result<(), Unsaved> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| Unsaved::System(directory.to_owned(), error))
}

/// A saved disk that is being read.
pub type SavedDisk = Reader<BufReader<File>>;

/// Opens the file of a saved disk, and reads what the disk was made of.
///
/// # Errors
///
/// See [`FormatError`].
pub fn open(path: &Path) -> Result<SavedDisk, FormatError> {
    // Nobody could end a load that waits for the other end of a pipe.
    if !fs::metadata(path).map_err(FormatError::Io)?.is_file() {
        let why = "not a file";
        return Err(FormatError::Io(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    let file = File::open(path).map_err(FormatError::Io)?;
    Reader::open(BufReader::with_capacity(BUFFER_BYTES, file))
}

/// Fills an empty disk, which was made of what the header says.
///
/// # Errors
///
/// See [`LoadError`].
pub fn load(ram: &Ram, saved: &mut SavedDisk) -> Result<Saved, LoadError> {
    ram.zram().load_saved(cpu::current(), saved)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::Duration;

    use zfolio_core::budget::WriteBudget;
    use zfolio_core::store::Backing;
    use zfolio_core::store::backing::memory::Memory;
    use zfolio_core::store::backing::{Completed, Completion, Failure, Location, Request};
    use zfolio_core::testing::{Random, seed};
    use zfolio_core::zram::Chosen;
    use zfolio_workers::Accelerated;

    use super::{
        Kept, NOTE, Unread, Unsaved, before, load, open, open_partial, save, save_by, write,
    };
    use crate::device::Device as _;
    use crate::ram::{Config, Ram, Writeback};
    use crate::testing::ram;

    fn directory(name: &str) -> PathBuf {
        let name = format!("zfolio-saved-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn loaded(path: &std::path::Path) -> Ram {
        let mut saved = open(path).unwrap();
        let header = saved.header().clone();
        let config = Config {
            disk_bytes: header.disk_bytes,
            algorithms: header.algorithms,
            unit: header.unit,
            limit_bytes: 0,
            age_s: 600,
            accelerated: Accelerated::NONE,
        };
        let source = Arc::new(zfolio_pager::PoolMappings::default());
        let report = Box::new(|error: &_| panic!("{error}"));
        let ram = Ram::with_key(&config, header.key, source, report).unwrap();
        load(&ram, &mut saved).unwrap();
        ram
    }

    /// Goal: a file is there whole or not at all, its name alone is in the directory, and a second save replaces it.
    #[test]
    fn a_file_is_written_beside_its_place() {
        let (directory, disk) = (directory("beside"), ram(1 << 20, &["lz4", "zstd"]));
        let path = directory.join("a disk");
        disk.write(4096, &[7; 4096]).unwrap();
        // What a killed save has left.
        fs::write(directory.join("a disk.saving"), vec![1; 1 << 20]).unwrap();
        for part in [1_u8, 2] {
            disk.write(8192, &vec![part; 512]).unwrap();
            let saved = save(&disk, &path, None).unwrap();
            assert_eq!(saved.bytes, fs::metadata(&path).unwrap().len());
            let again = loaded(&path);
            let mut found = [0; 512];
            again.read(8192, &mut found).unwrap();
            assert_eq!(found, [part; 512]);
            assert_eq!(again.size_bytes(), 1 << 20);
        }
        let link = directory.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        save(&disk, &link, None).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: what is saved is its owner's alone, whatever lies where it is written. Method: that file has another mode,
    /// or a second name, whose contents must stay; a disk that is kept still finds that it is not empty.
    #[test]
    fn a_saved_disk_is_its_owners_alone() {
        let (directory, disk) = (directory("alone"), ram(1 << 20, &["lz4"]));
        let (path, other) = (directory.join("disk"), directory.join("other"));
        let partial = directory.join("disk.saving");
        let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        fs::write(&other, "other").unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&other, &partial).unwrap();
        save(&disk, &path, None).unwrap();
        assert_eq!((mode(&path), fs::read_to_string(&other).unwrap().as_str()), (0o600, "other"));

        fs::write(&partial, "a note").unwrap();
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        assert_eq!((mode(&partial), fs::read(&partial).unwrap()), (0o600, NOTE.to_vec()));
        fs::set_permissions(&partial, fs::Permissions::from_mode(0o666)).unwrap();
        save(&disk, &path, None).unwrap();
        assert_eq!(mode(&path), 0o600);
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a save that fails leaves what was there, and nothing else.
    #[test]
    fn a_save_that_fails_leaves_what_was_there() {
        let (directory, disk) = (directory("fails"), ram(1 << 20, &["lz4", "zstd"]));
        let path = directory.join("disk");
        fs::write(&path, "before").unwrap();
        let partial = directory.join("disk.saving");
        let other = open_partial(&partial).unwrap();
        assert!(matches!(save(&disk, &path, None), Err(Unsaved::Busy(_))));
        drop(other);
        disk.write(0, &[1; 512]).unwrap();
        disk.zram().halt();
        assert!(matches!(save(&disk, &path, None), Err(Unsaved::Contents(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        assert!(matches!(save(&disk, &directory, None), Err(Unsaved::OtherKind(_))));
        let nowhere = save(&disk, &directory.join("no/disk"), None).unwrap_err().to_string();
        assert!(nowhere.contains("no/disk.saving"), "{nowhere}");
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a save that fails where a killed disk has left its note leaves the note (`SAVE-1`). It was removed, and
    /// the next disk went on from the older file without a word. Method: the save fails at its begin, and in its
    /// middle.
    #[test]
    fn a_save_that_fails_leaves_the_note_of_a_killed_disk() {
        let (directory, disk) = (directory("failed-note"), ram(1 << 20, &["lz4"]));
        let (path, partial) = (directory.join("disk"), directory.join("disk.saving"));
        save(&disk, &path, None).unwrap();
        let before = fs::read(&path).unwrap();
        let mut killed = Kept::take(&path).unwrap();
        killed.note_served().unwrap();
        drop(killed);
        disk.write(0, &Random::new(3).bytes(1 << 20)).unwrap();
        let late = save_by(&disk, &[], Unread::Fails, &path, &partial, &AtomicBool::new(true))
            .unwrap_err();
        assert!(matches!(late, Unsaved::System(..)), "{late:?}");
        assert!(fs::read(&partial).unwrap() == NOTE);
        disk.zram().halt();
        assert!(matches!(save(&disk, &path, None), Err(Unsaved::Contents(_))));
        assert!(fs::read(&partial).unwrap() == NOTE && fs::read(&path).unwrap() == before);
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a file that cannot be looked at is not taken for one that is not there: the disk began empty, and its end
    /// replaced the file. Method: names that no file can have stand for file systems that fail.
    #[test]
    fn a_file_that_cannot_be_looked_at_is_not_absent() {
        let directory = directory("unseen");
        let file = directory.join("file");
        fs::write(&file, "a file").unwrap();
        Kept::check(&directory.join("free")).unwrap();
        for unseen in [file.join("disk"), directory.join("x".repeat(300))] {
            let checked = Kept::check(&unseen);
            assert!(
                matches!(&checked, Err(Unsaved::System(at, _)) if *at == unseen),
                "{checked:?}"
            );
            assert!(
                Kept::take(&unseen).is_err()
                    && save(&ram(1 << 20, &["lz4"]), &unseen, None).is_err()
            );
        }
        // It goes away from where a disk has found it.
        let kept = Kept::take(&directory.join("below/disk"));
        assert!(matches!(kept, Err(Unsaved::System(..))), "{kept:?}");
        let below = directory.join("below");
        fs::create_dir(&below).unwrap();
        let kept = Kept::take(&below.join("disk")).unwrap();
        fs::rename(&below, directory.join("away")).unwrap();
        fs::write(&below, "no directory").unwrap();
        assert!(kept.loaded().is_err(), "nobody knows");
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a file that is older than what clients had written is never gone on from unasked (`SAVE-1`), one disk has
    /// it at a time, and whoever does not serve gives it back as it was.
    #[test]
    fn a_disk_goes_on_from_the_file_that_it_kept() {
        let (directory, disk) = (directory("kept"), ram(1 << 20, &["lz4"]));
        let (path, partial) = (directory.join("disk"), directory.join("disk.saving"));
        let kept = Kept::take(&path).unwrap();
        assert!(kept.loaded().unwrap().is_none() && kept.lost_before().is_none());
        assert!(matches!(Kept::take(&path), Err(Unsaved::Busy(_))));
        assert!(matches!(save(&disk, &path, None), Err(Unsaved::Busy(_))));
        drop(kept);
        assert!(!partial.exists());
        for number in 1..4 {
            // What a process leaves that was killed before its disk was served.
            fs::write(&partial, "").unwrap();
            let mut kept = Kept::take(&path).unwrap();
            assert_eq!(kept.loaded().unwrap().is_some(), number > 1);
            kept.note_served().unwrap();
            disk.write(0, &[number; 512]).unwrap();
            let (saved, file) = kept.save(&disk, &[]).unwrap();
            assert_eq!((saved.bytes, file), (fs::metadata(&path).unwrap().len(), path.as_path()));
            assert!(!partial.exists());
            let mut found = [0; 512];
            loaded(&path).read(0, &mut found).unwrap();
            assert_eq!(found, [number; 512]);
        }
        // Killed while it was served.
        let mut kept = Kept::take(&path).unwrap();
        kept.note_served().unwrap();
        drop(kept);
        let stale = Kept::take(&path).unwrap_err().to_string();
        assert!(stale.contains("is older; accepted: remove '") && partial.exists(), "{stale}");
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        fs::remove_file(&path).unwrap();
        // Nothing that is older: it begins empty. A start that fails does not keep the next one from saying so.
        drop(Kept::take(&path).unwrap());
        let mut kept = Kept::take(&path).unwrap();
        assert_eq!(kept.lost_before(), Some(path.as_path()));
        kept.note_served().unwrap();
        assert!(kept.loaded().unwrap().is_none());
        kept.save(&disk, &[]).unwrap();
        // A save that fails.
        let mut kept = Kept::take(&path).unwrap();
        assert_eq!(kept.lost_before(), None);
        kept.note_served().unwrap();
        let before = fs::read(&path).unwrap();
        disk.write(0, &[9; 512]).unwrap();
        disk.zram().halt();
        assert!(matches!(kept.save(&disk, &[]), Err(Unsaved::Contents(_))));
        drop(kept);
        assert_eq!(fs::read(&path).unwrap(), before);
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        assert!(matches!(Kept::take(&directory), Err(Unsaved::OtherKind(_))));
        assert!(matches!(Kept::take(&partial), Err(Unsaved::Reserved(_))));
        assert!(matches!(Kept::check(&partial), Err(Unsaved::Reserved(_))));
        fs::remove_dir_all(&directory).unwrap();
    }

    /// A place that can be written and not read, as a disk with bad sectors.
    #[derive(Debug)]
    struct Unreadable(Memory);

    impl Backing for Unreadable {
        fn submit(&self, requests: &mut [Request<'_>]) {
            self.0.submit(requests);
        }
        fn poll(&self, each: &mut dyn FnMut(Completion<'_>)) {
            self.0.poll(&mut |Completion { token, result }| {
                let is_read = matches!(result, Ok(Completed::Read(_)));
                let result = if is_read { Err(Failure::Transient) } else { result };
                each(Completion { token, result });
            });
        }
        fn discard(&self, location: Location, length: usize) {
            self.0.discard(location, length);
        }
    }

    /// Goal: one unit that cannot be read does not cost the others where there is no other save: a signal dropped all
    /// of the disk. A save by command fails, as its disk stays.
    #[test]
    fn the_last_save_leaves_out_what_cannot_be_read() {
        let directory = directory("unread");
        let path = directory.join("disk");
        let disk = ram(1 << 20, &["lz4"]).with_writeback(Writeback {
            backing: Box::new(Unreadable(Memory::new(1 << 20))),
            name: String::new(),
            age_s: 0,
            budget: WriteBudget::NONE,
        });
        let noise = Random::new(7).bytes(4 * 4096);
        disk.write(0, &noise).unwrap();
        assert_eq!(disk.zram().write_back(0, &Chosen::Indices(vec![2..=2])).units, 1);
        let mut kept = Kept::take(&path).unwrap();
        kept.note_served().unwrap();
        assert!(matches!(kept.save(&disk, &[]), Err(Unsaved::Contents(_))) && !path.exists());
        fs::write(&path, "older").unwrap();
        let (saved, _) = kept.save_last(&disk, &[]).unwrap();
        assert_eq!((saved.units, saved.lost, saved.unread), (4, 1, 1));
        assert_eq!(fs::read(before(&path)).unwrap(), b"older");
        let (again, mut found) = (loaded(&path), vec![0; 4096]);
        for at in [0, 4096, 3 * 4096] {
            again.read(at as u64, &mut found).unwrap();
            assert!(found == noise[at..at + 4096]);
        }
        drop(kept);
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a disk of which a server could not start gives its file back as it was, but not if a client of another
    /// server has written.
    #[test]
    fn what_was_written_before_a_disk_could_not_start_is_not_forgotten() {
        let (directory, disk) = (directory("unserved"), ram(1 << 20, &["lz4"]));
        let (path, partial) = (directory.join("disk"), directory.join("disk.saving"));
        save(&disk, &path, None).unwrap();
        for is_written in [false, true] {
            let mut kept = Kept::take(&path).unwrap();
            kept.note_served().unwrap();
            if is_written {
                disk.write(0, &[1; 512]).unwrap();
            }
            kept.note_unserved(&disk);
            // At once: a client of the control socket, whom nobody waits for any more, may have it too.
            assert_eq!(partial.exists(), is_written);
            assert!(is_written || matches!(kept.checkpoint(&disk, &[]), Err(Unsaved::Contents(_))));
            drop(kept);
            assert_eq!(partial.exists(), is_written);
        }
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: FILE.saving is never empty while a disk is not saved (`SAVE-1`), and no disk renames another one's.
    /// Method: a save that fails at its first byte; then a user removes the file, another disk makes its own, and the
    /// first one is saved.
    #[test]
    fn a_note_is_never_empty_and_never_a_disk() {
        let (directory, disk) = (directory("note"), ram(1 << 20, &["lz4"]));
        let (path, partial) = (directory.join("disk"), directory.join("disk.saving"));
        disk.write(0, &[1; 512]).unwrap();
        save(&disk, &path, None).unwrap();
        let before = fs::read(&path).unwrap();
        let mut first = Kept::take(&path).unwrap();
        first.note_served().unwrap();
        let failed =
            write(&disk, &[], Unread::Fails, &first.file, &path, &partial, &AtomicBool::new(true));
        assert!(matches!(failed, Err(Unsaved::System(..))), "{failed:?}");
        assert!(fs::metadata(&partial).unwrap().len() >= NOTE.len() as u64);
        assert!(matches!(Kept::take(&path), Err(Unsaved::Busy(_))));
        fs::remove_file(&partial).unwrap();
        let mut second = Kept::take(&path).unwrap();
        second.note_served().unwrap();
        disk.write(0, &[2; 512]).unwrap();
        assert!(matches!(first.save(&disk, &[]), Err(Unsaved::Busy(_))));
        let late =
            write(&disk, &[], Unread::Fails, &first.file, &path, &partial, &AtomicBool::new(false));
        assert!(matches!(late, Err(Unsaved::Busy(_))), "{late:?}");
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(fs::read(&partial).unwrap(), NOTE);
        // Once that is gone the first one can be saved.
        drop(second);
        fs::remove_file(&partial).unwrap();
        first.save(&disk, &[]).unwrap();
        assert!(fs::read(&path).unwrap() != before && !partial.exists());
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: a save to the file that the disk keeps replaces it, by whatever name it is given, and the disk still
    /// counts as not saved; one that fails leaves what was there; none comes after the last one.
    #[test]
    fn a_checkpoint_replaces_the_kept_file() {
        let (directory, disk) = (directory("checkpoint"), ram(1 << 20, &["lz4"]));
        let (path, partial) = (directory.join("disk"), directory.join("disk.saving"));
        let beside = directory.join("disk.saving.saving");
        // What a killed checkpoint has left.
        fs::write(&beside, "a part").unwrap();
        let mut kept = Kept::take(&path).unwrap();
        assert!(!beside.exists());
        kept.note_served().unwrap();
        let found = || {
            let mut found = [0; 512];
            loaded(&path).read(0, &mut found).unwrap();
            found
        };
        let link = directory.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let roundabout = directory.join("..").join(directory.file_name().unwrap()).join("disk");
        for (number, name) in [(1, &path), (2, &link), (3, &roundabout)] {
            disk.write(0, &[number; 512]).unwrap();
            let saved = save(&disk, name, Some(&kept)).unwrap();
            assert_eq!(saved.bytes, fs::metadata(&path).unwrap().len());
            assert_eq!(found(), [number; 512]);
            assert!(partial.exists() && !beside.exists());
            assert!(matches!(Kept::take(&path), Err(Unsaved::Busy(_))), "it is still locked");
        }
        assert!(matches!(save(&disk, &partial, Some(&kept)), Err(Unsaved::Reserved(_))));
        let other = directory.join("other");
        save(&disk, &other, Some(&kept)).unwrap();
        assert!(other.exists() && partial.exists());
        // Another one is under way.
        disk.write(0, &[9; 512]).unwrap();
        let alone = kept.writes.try_lock();
        assert!(matches!(save(&disk, &path, Some(&kept)), Err(Unsaved::Busy(_))));
        drop(alone);
        // The last one comes while it is written.
        kept.ends.store(true, Relaxed);
        assert!(matches!(
            save_by(&disk, &[], Unread::Fails, &path, &beside, &kept.ends),
            Err(Unsaved::System(..))
        ));
        assert!(matches!(save(&disk, &path, Some(&kept)), Err(Unsaved::Contents(_))));
        assert_eq!(found(), [3; 512]);
        assert!(!beside.exists());
        kept.save(&disk, &[]).unwrap();
        assert_eq!(found(), [9; 512]);
        assert!(matches!(save(&disk, &path, Some(&kept)), Err(Unsaved::Contents(_))));
        drop(kept);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 3);
        // A disk that is killed after a checkpoint: its clients had written more, perhaps.
        let mut kept = Kept::take(&path).unwrap();
        kept.note_served().unwrap();
        save(&disk, &path, Some(&kept)).unwrap();
        drop(kept);
        assert!(matches!(Kept::take(&path), Err(Unsaved::Stale { .. })));
        fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: whatever a checkpoint does when the disk ends, the last contents are those that stay. Method: checkpoints
    /// without a pause, ended at different moments.
    #[test]
    fn the_last_save_wins() {
        let (directory, disk) = (directory("last"), ram(4 << 20, &["lz4"]));
        let (path, seed) = (directory.join("disk"), seed());
        let mut random = Random::new(seed);
        disk.write(0, &random.bytes(4 << 20)).unwrap();
        for number in 1..9 {
            let mut kept = Kept::take(&path).unwrap();
            kept.note_served().unwrap();
            std::thread::scope(|scope| {
                let saves = scope.spawn(|| while save(&disk, &path, Some(&kept)).is_ok() {});
                std::thread::sleep(Duration::from_micros(random.below_u64(30_000)));
                disk.write(0, &[number; 512]).unwrap();
                kept.save(&disk, &[]).unwrap();
                saves.join().unwrap();
            });
            let mut found = [0; 512];
            loaded(&path).read(0, &mut found).unwrap();
            assert_eq!(found, [number; 512], "seed {seed}");
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "seed {seed}");
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
