//! Block devices and small file systems, where the machine allows them: loop devices over small files.

use std::path::{Path, PathBuf};
use std::process::Command;

use zfolio_core::swap::disk::{Disk, Error, SLOT_BYTES};
use zfolio_core::testing::{Random, seed};
use zfolio_sys::{Errno, disk};

use super::faults::{await_room, fill};
use super::{
    KINDS, Kind, Medium, Sender, alone, assert_holds, directory, make, medium, model, on_each_kind,
    read, write,
};
use crate::spill::Refusal;

const SLOT: u64 = SLOT_BYTES as u64;

/// Runs a program; `None`, with a reason, if it is not there or fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output();
    match output {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr);
            eprintln!("SKIPPED: {program}: {}", why.trim());
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: {program}: {error}");
            None
        }
    }
}

/// A directory of its own, removed with all that it has.
struct Scratch(PathBuf);

impl Scratch {
    fn new(place: &Path, name: &str) -> Scratch {
        let path = place.join(format!("zfolio-spill-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A loop device over a file, detached in the end.
struct Loop {
    device: PathBuf,
    file: std::fs::File,
    _scratch: Scratch,
}

impl Loop {
    fn new(name: &str, bytes: u64) -> Option<Loop> {
        Loop::with(name, bytes, &[])
    }

    /// With options of `losetup`.
    fn with(name: &str, bytes: u64, options: &[&str]) -> Option<Loop> {
        let scratch = Scratch::new(&directory()?, name);
        let path = scratch.0.join("device");
        let file = std::fs::File::create_new(&path).unwrap();
        file.set_len(bytes).unwrap();
        let arguments = [options, &["--find", "--show", path.to_str()?]].concat();
        let device = output("losetup", &arguments)?;
        Some(Loop { device: PathBuf::from(device), file, _scratch: scratch })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let device = self.device.display().to_string();
        Command::new("losetup").args(["--detach", &device]).status().ok();
    }
}

/// Gives the calling thread mounts of its own, which end with it. False, with a reason, where that is not allowed.
fn own_mounts() -> bool {
    // SAFETY: the thread gets mounts, a root and a working directory of its own. No memory changes.
    let answer = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    let is_private =
        answer == 0 && mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, "");
    if !is_private {
        eprintln!("SKIPPED: no mounts of its own: {}", std::io::Error::last_os_error());
    }
    is_private
}

/// mount(2).
fn mount(what: Option<&Path>, at: &Path, kind: Option<&str>, flags: u64, data: &str) -> bool {
    let text = |text: &str| std::ffi::CString::new(text).unwrap();
    let (what, at) = (what.map(|path| text(path.to_str().unwrap())), text(at.to_str().unwrap()));
    let (kind, data) = (kind.map(text), text(data));
    let pointer = |text: &Option<std::ffi::CString>| {
        text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr())
    };
    // SAFETY: all texts end with zero and outlive the call.
    let answer = unsafe {
        libc::mount(pointer(&what), at.as_ptr(), pointer(&kind), flags, data.as_ptr().cast())
    };
    answer == 0
}

/// A directory on a tmpfs that only this thread sees.
pub(super) fn private_tmpfs(options: &str) -> Option<PathBuf> {
    if !own_mounts() {
        return None;
    }
    // In this thread's mounts only.
    let place = PathBuf::from("/mnt");
    if !mount(Some(Path::new("tmpfs")), &place, Some("tmpfs"), 0, options) {
        eprintln!("SKIPPED: no tmpfs: {}", std::io::Error::last_os_error());
        return None;
    }
    Some(place)
}

/// Goal: a block device works as a file does, discards included. Method: the model, on a loop device.
#[test]
fn a_device_agrees_with_a_model() {
    let seed = seed();
    let Some(device) = Loop::new("model", 512 * SLOT) else { return };
    on_each_kind(
        || {
            // The model begins with a disk of zeros.
            std::fs::write(&device.device, vec![0; 512 * SLOT_BYTES]).unwrap();
            let medium = Medium::open(&device.device, 1 << 40, 2 << 20).unwrap();
            assert!(medium.is_device() && medium.slots() == 512, "{medium:?}");
            medium
        },
        |disk, _| model::play(disk, &mut Random::new(seed), 1000),
    );
}

/// Goal: a disk is given a thread for what plain calls carry out, and a device one more, so that nobody who reads waits
/// for a discard.
#[test]
fn a_device_has_a_thread_for_its_discards() {
    let Some(directory) = directory() else { return };
    let needed = |medium: Medium, kind| make(kind, medium).map(|disk| disk.threads_needed());
    let by_file = |kind| match kind {
        Kind::Plain(_) | Kind::Uring(Sender::Thread, _) => 1,
        Kind::Uring(Sender::Caller, _) => 0,
    };
    for kind in KINDS {
        let found = needed(medium(&directory, 64 * SLOT), kind);
        assert!(found.is_none_or(|found| found == by_file(kind)), "{kind:?}: {found:?}");
    }
    let Some(device) = Loop::new("threads", 64 * SLOT) else { return };
    for kind in KINDS {
        let found = needed(Medium::open(&device.device, 1 << 40, 0).unwrap(), kind);
        assert!(found.is_none_or(|found| found == by_file(kind) + 1), "{kind:?}: {found:?}");
    }
}

/// Goal: an error of the medium is an error of the transfer, and only of that one. Method: a loop device over a file
/// that is shortened: the kernel answers `EIO` beyond.
#[test]
fn an_error_of_the_medium_is_reported() {
    let Some(device) = Loop::new("eio", 64 * SLOT) else { return };
    on_each_kind(
        || {
            device.file.set_len(64 * SLOT).unwrap();
            Medium::open(&device.device, 1 << 40, 0).unwrap()
        },
        |disk, kind| {
            assert_eq!(alone(disk, write(1, 0, 16, 1)).result, Ok(()));
            assert_eq!(alone(disk, write(1, 16, 16, 1)).result, Ok(()));
            device.file.set_len(16 * SLOT).unwrap();
            let failed = Err(Error::Failed { errno: Errno::IO.raw_os_error() });
            disk.begin(read(1, 20, 4)).unwrap();
            disk.begin(read(2, 4, 4)).unwrap();
            disk.begin(read(3, 30, 2)).unwrap();
            disk.flush();
            for ended in super::drain(disk, 3) {
                match ended.token {
                    2 => assert_holds(&ended, 1),
                    _ => assert_eq!(ended.result, failed, "{kind:?}"),
                }
            }
            assert_holds(&alone(disk, read(4, 0, 16)), 1);
            assert_eq!(disk.read_error(), failed.err(), "{kind:?}: the last that failed");
        },
    );
}

/// Goal: a small file system that is full refuses writes past the page cache too, and takes them when it has room
/// again. Method: ext4 in a loop device, mounted for one thread.
#[test]
fn a_full_disk_refuses_and_has_room_again() {
    let thread = std::thread::spawn(|| {
        let Some(device) = Loop::new("full", 8 << 20) else { return };
        let name = device.device.to_str().unwrap();
        if output("mkfs.ext4", &["-q", "-O", "^has_journal", "-m", "0", name]).is_none()
            || !own_mounts()
        {
            return;
        }
        let place = Path::new("/mnt");
        if !mount(Some(&device.device), place, Some("ext4"), 0, "") {
            eprintln!("SKIPPED: ext4 cannot be mounted: {}", std::io::Error::last_os_error());
            return;
        }
        assert!(matches!(Medium::open(&device.device, 1 << 20, 0), Err(Refusal::Mounted { .. })));
        let direct = Medium::open(place, 1 << 30, 2 << 20).unwrap();
        assert!(direct.is_direct(), "{direct:?}");
        drop(direct);
        let room = disk::free_bytes(place).unwrap();
        on_each_kind(
            || {
                await_room(place, room);
                Medium::open(place, 1 << 30, 2 << 20).unwrap()
            },
            |disk, kind| fill(disk, kind, 2048),
        );
        // SAFETY: the path ends with zero. In this thread's mounts only.
        assert_eq!(unsafe { libc::umount2(c"/mnt".as_ptr(), libc::MNT_DETACH) }, 0);
    });
    thread.join().unwrap();
}

/// A device in use as swap, until the end.
struct Swap<'a>(&'a Loop);

impl Drop for Swap<'_> {
    fn drop(&mut self) {
        Command::new("swapoff").arg(&self.0.device).status().ok();
    }
}

/// Goal: swap is never written over; the line says that it is swap.
#[test]
fn a_device_in_use_as_swap_is_refused() {
    let Some(device) = Loop::new("swap", 16 << 20) else { return };
    let path = device.device.to_str().unwrap();
    if output("mkswap", &[path]).and_then(|_| output("swapon", &[path])).is_none() {
        return;
    }
    let _swap = Swap(&device);
    let refusal = Medium::open(&device.device, 16 << 20, 0).unwrap_err();
    assert_eq!(refusal, Refusal::Swap(device.device.clone()));
    let refusal = Medium::open_part(&device.device, None).unwrap_err();
    assert_eq!(refusal, Refusal::Swap(device.device.clone()));
    assert!(crate::spill::claim(&device.device).is_err());
}

/// Goal: a device that cannot be written to is refused before anything is written. (Linux 6.18 opens it for writing.)
#[test]
fn a_device_that_is_read_only_is_refused() {
    let Some(device) = Loop::with("read-only", 16 << 20, &["--read-only"]) else { return };
    let refused = Refusal::NotWritable { path: device.device.clone(), errno: Errno::ROFS };
    assert_eq!(Medium::open(&device.device, 16 << 20, 0).unwrap_err(), refused);
    assert_eq!(Medium::open_part(&device.device, None).unwrap_err(), refused);
}

/// Goal: processes with copies of one claim have parts of the device; who comes too late is told; nobody else gets the
/// device before the last of them has closed it.
#[test]
fn a_device_is_shared_by_parts() {
    let Some(device) = Loop::new("parts", 8 << 20) else { return };
    let claim = crate::spill::claim(&device.device).unwrap().expect("it is a device");
    let part = || Medium::open_part(&device.device, Some(claim.try_clone().unwrap()));
    let (one, other) = (part().unwrap(), part().unwrap());
    assert_eq!((one.slots(), other.slots()), (1024, 1024));
    let mut starts = [one.on_medium(0), other.on_medium(0)];
    starts.sort_unstable();
    assert_eq!(starts, [0, 1024], "PART-1");
    assert_eq!(part().unwrap_err(), Refusal::Full(device.device.clone()));
    assert_eq!(one.take_part(), None);
    drop(other);
    assert_eq!((one.take_part(), one.slots()), (Some(1024), 2048));
    drop(claim);
    let in_use = Refusal::InUse(device.device.clone());
    assert_eq!(Medium::open(&device.device, 8 << 20, 0).unwrap_err(), in_use);
    let unasked = Refusal::NoClaim(device.device.clone());
    assert_eq!(Medium::open_part(&device.device, None).unwrap_err(), unasked);
    drop(one);
    Medium::open(&device.device, 8 << 20, 0).unwrap();
}

/// Goal: each place that cannot be spilled to is refused in one line that names it and says why.
#[test]
fn places_that_are_of_no_use_are_refused() {
    let Some(directory) = directory() else { return };
    let scratch = Scratch::new(&directory, "refused");
    let line = |path: &Path, bytes, bytes_min| {
        let line = Medium::open(path, bytes, bytes_min).unwrap_err().to_string();
        assert!(!line.contains('\n') && line.contains(path.to_str().unwrap()), "{line}");
        line
    };
    let missing = line(&scratch.0.join("nothing"), 1 << 30, 0);
    assert!(missing.contains("does not exist"), "{missing}");
    let file = scratch.0.join("file");
    std::fs::write(&file, "").unwrap();
    assert!(line(&file.join("below"), 1 << 30, 0).contains("does not exist"));
    let other = line(&file, 1 << 30, 0);
    assert!(other.contains("neither a directory nor a block device"), "{other}");
    let small = line(&scratch.0, 1 << 20, 2 << 20);
    assert!(small.contains("1M") && small.contains("2M is the least"), "{small}");
    let sealed = line(Path::new("/sys"), 1 << 30, 0);
    assert!(sealed.contains("cannot be written to"), "{sealed}");
    match disk::kept_in_memory(Path::new("/dev/shm")) {
        Ok(Some(kind)) => {
            let memory = line(Path::new("/dev/shm"), 1 << 30, 0);
            assert!(memory.contains(&format!("on a {kind}, whose files are memory")), "{memory}");
        }
        other => eprintln!("SKIPPED: /dev/shm is no tmpfs: {other:?}"),
    }
    let zram = Path::new("/dev/zram0");
    match disk::kind(zram) {
        Ok(disk::Kind::Device(_)) => {
            let memory = line(zram, 1 << 30, 0);
            assert!(memory.contains("keeps its data in memory"), "{memory}");
        }
        other => eprintln!("SKIPPED: there is no /dev/zram0: {other:?}"),
    }
}

/// Goal: a directory of another user is refused. Method: a thread with the rights of nobody.
#[test]
fn a_directory_of_another_user_is_refused() {
    let Some(directory) = directory() else { return };
    let scratch = Scratch::new(&directory, "other-user");
    std::fs::set_permissions(&scratch.0, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let path = scratch.0.clone();
    let thread = std::thread::spawn(move || {
        // SAFETY: it changes the rights of this thread to files, which ends.
        unsafe { libc::setfsuid(65_534) };
        // SAFETY: as above; a number that is no user changes nothing, and tells who the thread is.
        if unsafe { libc::setfsuid(u32::MAX) } != 65_534 {
            return eprintln!("SKIPPED: not root");
        }
        let refusal = Medium::open(&path, 1 << 30, 0).unwrap_err();
        assert!(matches!(refusal, Refusal::NotWritable { errno: Errno::ACCESS, .. }), "{refusal}");
        assert!(refusal.to_string().contains("permission denied"), "{refusal}");
    });
    thread.join().unwrap();
}

/// Goal: a device is opened once, and is refused while it is in use; one that is too small is too. Method: a loop
/// device, opened twice.
#[test]
fn a_device_that_is_in_use_is_refused() {
    let Some(device) = Loop::new("in-use", 4 << 20) else { return };
    let open = |bytes_min| Medium::open(&device.device, 1 << 30, bytes_min);
    assert!(matches!(open(8 << 20), Err(Refusal::TooSmall { bytes: 4_194_304, .. })));
    let first = open(2 << 20).unwrap();
    let refusal = open(2 << 20).unwrap_err();
    assert_eq!(refusal, Refusal::InUse(device.device.clone()));
    assert!(refusal.to_string().contains("in use"), "{refusal}");
    drop(first);
    open(2 << 20).unwrap();
}

/// Goal: a file gets no name, is direct where the file system is, and takes no room before it is written.
#[test]
fn a_file_has_no_name_and_takes_no_room() {
    let Some(directory) = directory() else { return };
    let scratch = Scratch::new(&directory, "file");
    let medium = Medium::open(&scratch.0, 1 << 30, 2 << 20).unwrap();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
    assert_eq!(medium.slots(), (1 << 30) / SLOT);
    let file = std::fs::File::from(medium.file().try_clone_to_owned().unwrap());
    let about = file.metadata().unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&about);
    assert!(about.len() == 1 << 30 && blocks < 1024, "{about:?}");
}
