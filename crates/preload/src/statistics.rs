//! The page of statistics that `zfolio stat` reads: a file in `/dev/shm`, mapped shared.

use std::ffi::CString;
use std::fmt::Write as _;
use std::ops::Deref;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use zfolio_core::stats::Stats;
use zfolio_core::zsmalloc::ClassStats;
use zfolio_pager::StatsHome;
use zfolio_sys::{files, process};

use crate::settings::Settings;

/// Where the page is mapped: one address for the life of the process, and of its children.
static PAGE: AtomicPtr<Stats> = AtomicPtr::new(std::ptr::null_mut());

/// Where to write figures: the shared page.
pub(crate) struct Home(&'static Stats);

impl Deref for Home {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        self.0
    }
}

impl StatsHome for Home {
    /// Text behind the page in its file, a line for each class that has a zspage.
    fn tell_classes(&self, classes: &[ClassStats]) {
        let mut text = String::new();
        for class in classes.iter().filter(|class| class.obj_allocated > 0) {
            writeln!(text, "{class}").ok();
        }
        if !fits(size_of::<Stats>() + text.len()) {
            return;
        }
        let Some(file) = path().and_then(|path| {
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::open(path, flags, Mode::empty()).ok()
        }) else {
            return;
        };
        // What was told before goes.
        if rustix::fs::ftruncate(&file, size_of::<Stats>() as u64).is_ok() {
            files::write_all(file.as_fd(), text.as_bytes());
        }
    }
}

/// `/dev/shm/zfolio-UID/PID`.
fn path() -> Option<CString> {
    let uid = rustix::process::geteuid().as_raw();
    CString::new(format!("/dev/shm/zfolio-{uid}/{}", process::id())).ok()
}

/// The page, once [`open`] has run.
pub(crate) fn home() -> Option<Home> {
    // SAFETY: null, or the mapping that open() made, which is never unmapped; the type is all
    // atomics, so a shared mapping of it may change under us.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }.map(Home)
}

/// Makes the file and maps it; in a child of `fork`, over its parent's.
///
/// Without `/dev/shm` the page is private: everything works, `zfolio stat` sees nothing.
pub(crate) fn open(settings: &Settings) {
    let bytes = size_of::<Stats>();
    let file = shared_file(bytes);
    let at = PAGE.load(Ordering::Acquire);
    let fixed = if at.is_null() { MapFlags::empty() } else { MapFlags::FIXED };
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let mapped = match &file {
        // SAFETY: fresh address space, or (in a child) exactly our own page again.
        Some(file) => unsafe {
            rustix::mm::mmap(at.cast(), bytes, protection, MapFlags::SHARED | fixed, file, 0)
        },
        // SAFETY: the same.
        None => unsafe {
            rustix::mm::mmap_anonymous(at.cast(), bytes, protection, MapFlags::PRIVATE | fixed)
        },
    };
    let Ok(page) = mapped else { return };
    PAGE.store(page.cast(), Ordering::Release);
    let Some(home) = home() else { return };
    let mut command = [0_u8; 64];
    let length = files::read_small(c"/proc/self/comm", &mut command).unwrap_or(0);
    let command = std::str::from_utf8(&command[..length]).unwrap_or("?").trim_end();
    home.figures.limit_bytes.store(settings.config.limit_bytes, Ordering::Relaxed);
    home.figures.unit_bytes.store(settings.config.unit.bytes() as u64, Ordering::Relaxed);
    let algorithm = settings.config.params.to_string();
    home.publish(process::id(), process::start_ticks(), settings.run, &algorithm, command);
}

/// `/dev/shm/zfolio-UID/PID`, in a directory that is ours alone.
fn shared_file(bytes: usize) -> Option<rustix::fd::OwnedFd> {
    let uid = rustix::process::geteuid().as_raw();
    let folder = CString::new(format!("/dev/shm/zfolio-{uid}")).ok()?;
    rustix::fs::mkdir(&folder, Mode::RWXU).ok();
    // Not through a link, and not into a directory that somebody else made for us.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(&folder, flags, Mode::empty()).ok()?;
    let about = rustix::fs::fstat(&folder).ok()?;
    if about.st_uid != uid || about.st_mode & 0o077 != 0 {
        return None;
    }
    if !fits(bytes) {
        return None;
    }
    let name = CString::new(process::id().to_string()).ok()?;
    // A file left by an earlier process of this number: its reader keeps it, we make our own.
    rustix::fs::unlinkat(&folder, &name, rustix::fs::AtFlags::empty()).ok();
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(&folder, &name, flags, Mode::RUSR | Mode::WUSR).ok()?;
    rustix::fs::ftruncate(&file, bytes as u64).ok()?;
    Some(file)
}

/// Whether this process may make a file of so many bytes (`ulimit -f`): SIGXFSZ ends who tries.
fn fits(bytes: usize) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    limit.is_none_or(|limit| bytes as u64 <= limit)
}

/// At exit: the file goes, unless `zfolio run` wants to read it.
pub(crate) fn close(settings: &Settings) {
    if settings.run == 0 {
        path().map(rustix::fs::unlink);
    }
}
