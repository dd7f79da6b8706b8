//! What `zfolio run` asked for, from the environment.

use std::sync::OnceLock;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::Params;
use zfolio_pager::{Config, Mode, fatal};

/// The settings; `None` inside: this process is not to be managed.
static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();

/// Checked by `zfolio run` before; whatever is wrong here means "not managed", and is told.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    /// The PID of `zfolio run`.
    pub(crate) run: u64,
    /// Thousandths of the need that the limit rises to, for `zfolio suggest`; 0: it stays.
    pub(crate) follow_per_mille: u64,
}

/// Reads the environment, once.
pub(crate) fn read() {
    SETTINGS.get_or_init(from_environment);
}

/// The settings, if this process is managed.
pub(crate) fn get() -> Option<&'static Settings> {
    SETTINGS.get().and_then(Option::as_ref)
}

fn from_environment() -> Option<Settings> {
    let text = |name| std::env::var(name).ok();
    let number = |name| text(name).and_then(|value| value.parse::<u64>().ok());
    let limit_bytes = number("ZFOLIO_LIMIT")?;
    // Not told from here: it would take a system call that Valgrind does not know, and complains about.
    // `zfolio run` says that the tool was not managed.
    if text("LD_PRELOAD").is_some_and(|preload| is_valgrind(&preload)) {
        return None;
    }
    let unit =
        number("ZFOLIO_UNIT").and_then(|bytes| UnitOrder::from_bytes(usize::try_from(bytes).ok()?));
    let params = text("ZFOLIO_ALGORITHM").and_then(|name| name.parse::<Params>().ok()).map(usable);
    let config = Config {
        limit_bytes,
        params: params.unwrap_or_default(),
        unit: unit.unwrap_or(UnitOrder::DEFAULT),
        mode: Mode::Handler,
        whole_process: true,
        strict: text("ZFOLIO_STRICT").is_some_and(|value| value == "1"),
    };
    Some(Settings {
        config,
        run: number("ZFOLIO_RUN").unwrap_or(0),
        follow_per_mille: number("ZFOLIO_FOLLOW").unwrap_or(0).min(1000),
    })
}

/// Whether the libraries that are loaded first are Valgrind's.
///
/// Its tools replace `malloc` and the kernel's view of the process by their own: nothing of ours would see the
/// program's memory, and raw system calls for it would be against what the tool knows.
fn is_valgrind(preload: &str) -> bool {
    preload
        .split([':', ' '])
        .any(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("vgpreload_")))
}

/// With the dictionary that is named, or without one: `zfolio run` has read it before, so that a file which
/// is gone now is worth a line, but not the program.
fn usable(params: Params) -> Params {
    let without = Params { dictionary: None, ..params.clone() };
    zfolio_pager::with_dictionary(params).unwrap_or_else(|error| {
        fatal::tell(format_args!("{error}; compressed without it"));
        without
    })
}
