//! The page of statistics that `zfolio stat` reads: a file in `/dev/shm`, mapped shared.

use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, Ordering};

use zfolio_core::stats::Stats;
use zfolio_core::zsmalloc::{self, ClassStats};
use zfolio_pager::StatsHome;
use zfolio_sys::{process, shared};

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
        shared::replace_tail(&name(), size_of::<Stats>(), &zsmalloc::lines(classes));
    }
}

/// The file of this process.
fn name() -> String {
    process::id().to_string()
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
    let file = shared::create(&name(), bytes);
    let at = PAGE.load(Ordering::Acquire);
    // SAFETY: fresh address space, or (in a child) exactly our own page again.
    let mapped = unsafe { shared::map(file.as_ref(), bytes, at.cast()) };
    let Ok(page) = mapped else { return };
    PAGE.store(page.cast(), Ordering::Release);
    let Some(home) = home() else { return };
    home.figures.limit_bytes.store(settings.config.limit_bytes, Ordering::Relaxed);
    home.figures.unit_bytes.store(settings.config.unit.bytes() as u64, Ordering::Relaxed);
    let algorithm = settings.config.params.to_string();
    let (pid, started) = (process::id(), process::start_ticks());
    home.publish(pid, started, settings.run, &algorithm, &process::command());
}

/// At exit: the file goes, unless `zfolio run` wants to read it.
pub(crate) fn close(settings: &Settings) {
    if settings.run == 0 {
        shared::remove(&name());
    }
}
