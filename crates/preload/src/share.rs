//! The share of this process in the limit of its run (`zfolio_core::ledger`).
//!
//! ```text
//! constructor   maps the run's ledger, takes a slot and a first share
//! start         more is mapped than the share: takes what covers it if there is plenty, else a
//!               thread watches
//! watch         the thread takes chunks before the process grows into them, and comes down to
//!               targets
//! engage        there is no more to take: from then on the engine does both
//! fork          the child takes a slot of its own; its parent pays for what they share
//! ```
//!
//! A process without a slot has the whole limit for itself: with `--per-process`, outside of a run,
//! or if the ledger cannot be mapped. The run counts such a process from outside.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use zfolio_core::ledger::{Ledger, Member, Owner, SMALL_BYTES, SMALL_MARGIN_BYTES, Seat};
use zfolio_pager::fatal;
use zfolio_sys::{Errno, process, shared};

use crate::allocator::ARENA_BYTES_MIN;
use crate::settings::Settings;
use crate::statistics;

static MEMBER: OnceLock<Member> = OnceLock::new();

/// A process takes what covers its mappings without a thread only if that is at most a 32nd of the
/// total, and while more than three quarters are free.
const COVER_SHARE: u64 = 32;

/// What a process has besides its manageable mappings.
const BESIDES_BYTES: u64 = 8 << 20;

/// Memory goes out below the limit only if the process has at least so much: from a smaller one
/// there is little to gain.
pub(crate) const PROACTIVE_BYTES_MIN: u64 = 64 << 20;

/// This process, if it has a share.
pub(crate) fn member() -> Option<&'static Member> {
    MEMBER.get().filter(|member| member.seat().is_some())
}

fn seat() -> Option<Seat<'static>> {
    MEMBER.get()?.seat()
}

/// Whether a process with that much manageable memory is to give some back long before it is near its limit.
fn gives_early(settings: &Settings, manageable: u64) -> bool {
    let is_early = settings.is_early() || statistics::stall_ppm(settings) > 0;
    // The first arena is mapped, and may be empty.
    is_early && manageable >= PROACTIVE_BYTES_MIN + ARENA_BYTES_MIN
}

/// Whether a process with that much manageable memory need not be watched: all of it, and what the
/// process has besides, is below the share; or it is below half of a limit of the process's own. In
/// both cases there is also too little to go out below the limit.
pub(crate) fn is_small(settings: &Settings, manageable: u64) -> bool {
    let limit = limit_bytes(settings);
    if gives_early(settings, manageable) {
        return false;
    }
    if seat().is_none() {
        return manageable <= limit / 2;
    }
    let limit = limit.max(SMALL_BYTES);
    manageable + BESIDES_BYTES.min(limit / 2) <= limit
}

/// The limit in force.
pub(crate) fn limit_bytes(settings: &Settings) -> u64 {
    match seat() {
        Some(seat) => seat.limit_bytes(),
        None => statistics::limit_asked().unwrap_or(settings.config.limit_bytes),
    }
}

/// This process.
pub(crate) fn owner() -> Owner {
    Owner {
        pid: process::id(),
        namespace: process::pid_namespace(),
        start_ticks: process::start_ticks(),
    }
}

/// Maps the ledger, and takes a slot.
pub(crate) fn open(settings: &Settings, me: Owner) {
    if !settings.tree || MEMBER.get().is_some() {
        return;
    }
    let file = shared::open(&Ledger::file_name(settings.run), size_of::<Ledger>());
    // The run has ended before this process: there is nobody to share with. Or a sandbox forbids to write to files: the
    // run counts the process from outside. In a container all are filtered, also who is another user than the run.
    let is_refusal = |error: &Errno| [Errno::PERM, Errno::ACCESS, Errno::NOSYS].contains(error);
    let is_sandboxed = || file.as_ref().is_err_and(is_refusal) && process::is_filtered();
    if file.is_err() && (is_sandboxed() || !process::exists(settings.run)) {
        return;
    }
    match file.ok().and_then(|file| enter(settings, me, &file)) {
        Some(member) => {
            MEMBER.set(member).ok();
        }
        None => fatal::print_here(format_args!(
            "the ledger of the run cannot be used here: this process has the whole limit for itself"
        )),
    }
}

fn enter(settings: &Settings, me: Owner, file: &OwnedFd) -> Option<Member> {
    // SAFETY: a ledger consists of atomics (`LEDGER-4`), and open() has checked the size.
    let ledger: &'static Ledger = unsafe { shared::map_for_good(file) }?;
    let same = ledger.is_whole() && u64::from(ledger.run()) == settings.run;
    if same { Member::new(ledger, me) } else { None }
}

/// Tells which processes are gone, where nobody else frees their slots: the run does that until it has ended, as it
/// does before a server that goes to the background. Without this each child of the server would leave a slot behind.
///
/// Where process ids mean something else than in the run, or a sandbox may forbid to look, none is said to be gone.
fn is_gone(ledger: &Ledger, me: Owner) -> impl Fn(Owner) -> bool + use<> {
    let can_look = ledger.sees_the_same(me.namespace, process::filters);
    let is_orphan = can_look && !process::exists(ledger.run().into());
    move |other: Owner| {
        is_orphan && other.namespace == me.namespace && !process::exists(other.pid.into())
    }
}

/// In a child of `fork`: takes a slot in place of the parent's.
pub(crate) fn start_over(me: Owner) {
    let Some(member) = member() else { return };
    let resident = process::ResidentMeter::new().read().unwrap_or_default();
    if !member.enter(me, resident.memory_bytes, is_gone(member.ledger(), me)) {
        fatal::print_here(format_args!(
            "the ledger of the run is full: this process has the whole limit for itself"
        ));
    }
}

/// Gives the slot up: nobody watches this process, and the run counts it from outside.
pub(crate) fn leave() {
    if let Some(member) = MEMBER.get() {
        member.leave();
    }
}

/// A thread watches the process from now on.
pub(crate) fn set_watches() {
    if let Some(seat) = seat() {
        seat.set_watches();
    }
}

/// Takes what covers all of `manageable` bytes, so that nobody needs to watch the process. False:
/// there is not plenty, or the process is to give memory back also where there is.
pub(crate) fn covers(settings: &Settings, manageable: u64) -> bool {
    if gives_early(settings, manageable) {
        return false;
    }
    let (Some(member), Some(seat)) = (member(), seat()) else { return false };
    let total = member.ledger().total_bytes();
    let wanted = manageable + BESIDES_BYTES;
    let plenty = u64::try_from(member.ledger().free_bytes()).is_ok_and(|free| free > total / 4 * 3);
    let missing = wanted.saturating_sub(seat.share_bytes());
    plenty && wanted <= total / COVER_SHARE && seat.take(missing, missing) > 0
}

/// The process reclaims its memory from now on.
pub(crate) fn set_reclaims() {
    if let Some(seat) = seat() {
        seat.set_reclaims();
    }
}

/// Whether a process of that size is to be watched further, although it has reached its share: it
/// could give nothing back.
pub(crate) fn is_below_notice(resident: u64) -> bool {
    seat().is_some_and(|seat| resident < SMALL_BYTES + seat.shared_bytes())
}

/// For a process that has `resident` bytes and may have `ahead` more soon: takes what it lacks, or
/// gives back what is above its target. The limit in force after that.
pub(crate) fn follow(settings: &Settings, resident: u64, ahead: u64) -> u64 {
    let (Some(member), Some(seat)) = (member(), seat()) else {
        return limit_bytes(settings);
    };
    seat.note(resident, 0);
    let (limit, wanted) = (seat.limit_bytes(), resident + ahead + 1);
    // What it keeps, and what it takes also if it is not free.
    let is_small = is_below_notice(resident);
    let least = if is_small { resident + SMALL_MARGIN_BYTES } else { wanted };
    let target = seat.target_bytes().filter(|target| *target < seat.share_bytes());
    match target {
        Some(target) => {
            seat.give_down_to(target.max(least.saturating_sub(seat.shared_bytes())));
        }
        None if limit < wanted => {
            let lacking = wanted - limit;
            // If so much is not free, the limit stays, and the caller engages.
            let taken = seat.take_watching(lacking, lacking.max(member.ledger().chunk_bytes()));
            if taken == 0 && is_small && limit < resident {
                seat.force(least - limit);
            }
        }
        None => {}
    }
    seat.limit_bytes()
}

/// Whether the process has half of what it could get, so that the engine should be made; or half of
/// an equal part, where less than half of the total is free. Other processes may take the rest
/// before this one looks again.
pub(crate) fn is_large(resident: u64) -> bool {
    let (Some(member), Some(seat)) = (member(), seat()) else { return true };
    let ledger = member.ledger();
    let free = u64::try_from(ledger.free_bytes()).unwrap_or(0);
    let is_scarce = free < ledger.total_bytes() / 2;
    let is_large = resident >= (seat.limit_bytes() + free) / 2
        || is_scarce && resident >= ledger.fair_bytes() / 2;
    is_large && !is_below_notice(resident)
}

/// How much growth is foreseen at most.
pub(crate) fn ahead_max(settings: &Settings, limit: u64) -> u64 {
    match seat() {
        Some(_) => (settings.config.limit_bytes / 16).max(limit / 2),
        None => limit / 2,
    }
}
