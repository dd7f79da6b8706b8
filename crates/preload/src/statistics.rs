//! The page of statistics that `zfolio stat` reads: a file in `/dev/shm`, mapped shared.

use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use zfolio_core::budget::WriteBudget;
use zfolio_core::ledger::Owner;
use zfolio_core::stats::{Stats, stall_of_asked};
use zfolio_pager::StatsHome;
use zfolio_sys::{process, shared};

use crate::settings::Settings;
use crate::share;

/// The address of the page, which never changes in a process and its forked children.
static MAPPED: AtomicPtr<Stats> = AtomicPtr::new(std::ptr::null_mut());

/// The shared page, into which the figures are written.
pub(crate) struct Page(&'static Stats);

impl Deref for Page {
    type Target = Stats;
    fn deref(&self) -> &Stats {
        self.0
    }
}

impl StatsHome for Page {
    /// Writes text after the page in its file.
    fn publish_tables(&self, text: &str) {
        shared::replace_tail(&name(), size_of::<Stats>(), text);
    }
}

/// The file of this process.
fn name() -> String {
    process::id().to_string()
}

/// The page, once [`open`] has run.
pub(crate) fn page() -> Option<Page> {
    // SAFETY: null, or the mapping that open() made, which is never unmapped. The type consists of
    // atomics, so another process may change the shared mapping.
    unsafe { MAPPED.load(Ordering::Acquire).as_ref() }.map(Page)
}

/// The limit that another process asks for (`zfolio set`).
pub(crate) fn limit_asked() -> Option<u64> {
    let asked = page()?.limit_asked.load(Ordering::Relaxed);
    (asked > 0).then_some(asked)
}

/// The share of its time that the program may wait, in millionths: by the settings, or what another
/// process asks for. Above 0 memory goes out below the limit too.
pub(crate) fn stall_ppm(settings: &Settings) -> u32 {
    let asked = page().and_then(|page| stall_of_asked(page.stall_asked.load(Ordering::Relaxed)));
    asked.unwrap_or(settings.config.stall_ppm)
}

/// Makes the file and maps it; in a child of `fork`, in place of the parent's page.
///
/// Without `/dev/shm` the page is private: all else works, and `zfolio stat` does not see the process.
pub(crate) fn open(settings: &Settings, me: Owner) {
    let bytes = size_of::<Stats>();
    let file = shared::create(&name(), bytes);
    let at = MAPPED.load(Ordering::Acquire);
    // In a child of `fork`: what its parent was asked for.
    let asked = page().map(|parent| parent.asked().map(|word| word.load(Ordering::Relaxed)));
    // SAFETY: new address space, or (in a child) exactly the page that open() mapped in the parent.
    let mapped = unsafe { shared::map(file.as_ref(), bytes, at.cast()) };
    let Ok(mapped) = mapped else { return };
    MAPPED.store(mapped.cast(), Ordering::Release);
    let Some(page) = page() else { return };
    for (word, asked) in page.asked().into_iter().zip(asked.unwrap_or_default()) {
        word.store(asked, Ordering::Relaxed);
    }
    set_rules(&page, settings);
    page.has_share.store(share::member().is_some().into(), Ordering::Relaxed);
    page.figures.limit_bytes.store(share::limit_bytes(settings), Ordering::Relaxed);
    page.figures.stall_ppm.store(stall_ppm(settings).into(), Ordering::Relaxed);
    page.figures.unit_bytes.store(settings.config.unit.bytes() as u64, Ordering::Relaxed);
    let algorithm = page.algorithm_in_force().map(|choice| choice.to_string());
    let algorithm = algorithm.unwrap_or_else(|| settings.algorithm());
    page.publish(me, settings.run, &algorithm, &process::command());
}

/// What is asked for, or else in the settings, for what goes to disk. The engine sets these figures too, once there is
/// one.
fn set_rules(page: &Page, settings: &Settings) {
    let spill = &settings.config.spill;
    if spill.paths.is_empty() {
        return;
    }
    let asked = |word: &AtomicU64| Some(word.load(Ordering::Relaxed)).filter(|asked| *asked > 0);
    let max = asked(&page.max_pool_percent_asked);
    let accept = asked(&page.accept_threshold_percent_asked);
    let budget = asked(&page.write_budget_asked).and_then(WriteBudget::from_asked);
    page.figures.set_disk_bounds(
        max.unwrap_or(spill.pool.max_pool_percent.into()),
        accept.unwrap_or(spill.pool.accept_threshold_percent.into()),
        budget.unwrap_or(spill.write_budget),
    );
}

/// At exit: removes the file, unless `zfolio run` is going to read it.
pub(crate) fn close(settings: &Settings) {
    if settings.run == 0 {
        shared::remove(&name());
    }
}
