//! `zfolio device daemon`: all disks of a configuration, each in a process of its own.
//!
//! The daemon starts `zfolio device run` for each disk, passes on what these processes print, and waits for signals. It
//! has one thread, no contents and no clients.
//!
//! # Invariants
//!
//! - `DMN-1` No disk outlives the daemon: however that ends, the kernel sends the disks SIGTERM, which ends them in
//!   order.
//! - `DMN-2` A disk that has ended is never started again unasked: its contents are gone, and clients would take the
//!   new one for it.
//! - `DMN-3` There is one daemon for a configuration.

mod disk;
mod settings;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{IsTerminal as _, stdin};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use zfolio_block::address::Address;
use zfolio_block::listen::{Listener, Unusable};
use zfolio_sys::clock;
use zfolio_sys::probe::child::{self, Change, Signals};

use self::disk::{Disk, State};
use self::settings::{Files, Settings};
use super::arguments::DaemonArgs;
use super::serve::say;
use crate::failure::Failure;
use crate::notify;
use crate::output;

/// How long to wait for a signal: while disks start, which is not told by one; and else.
const TURN_STARTING: Duration = Duration::from_millis(10);
const TURN: Duration = Duration::from_millis(200);

/// Starts the disks, and serves them until a signal.
///
/// # Errors
///
/// The configuration cannot be read, there is another daemon for it, or there is no disk.
pub(super) fn daemon(arguments: &DaemonArgs) -> Result<ExitCode, Failure> {
    let files = Files::of(arguments.config.as_deref());
    let settings = files.read()?;
    if arguments.check {
        return check(&settings);
    }
    let _only = only(&files)?;
    let signals =
        Signals::block().map_err(|error| Failure::machine(format!("signals: {error}")))?;
    let mut daemon = Daemon { files, signals, disks: Vec::new(), is_ending: false, is_told: false };
    daemon.take(settings);
    daemon.serve()
}

/// Says what is wrong, or what would be started.
fn check(settings: &[Settings]) -> Result<ExitCode, Failure> {
    let wrong: Vec<&str> = settings
        .iter()
        .filter_map(|disk| disk.options.as_ref().err())
        .map(String::as_str)
        .collect();
    if let Some((last, others)) = wrong.split_last() {
        others.iter().for_each(|line| say(line));
        return Err(Failure::argument(*last));
    }
    let line = |disk: &Settings| {
        let options = disk.options.as_ref().map(|options| options.join(" ")).unwrap_or_default();
        format!("{} {options}\n", disk.name)
    };
    output::print(&settings.iter().map(line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// The socket that stands for the daemon of a configuration (`DMN-3`). Nobody connects to it.
fn only(files: &Files) -> Result<Vec<Listener>, Failure> {
    let mut hash = DefaultHasher::new();
    files.identity().hash(&mut hash);
    let path = super::directory()?.join(format!("daemon.{:016x}", hash.finish()));
    Listener::open(&Address::Unix(path)).map_err(|error| match error {
        Unusable::InUse(_) => Failure::argument(format!(
            "another 'zfolio device daemon' serves the disks of {}; accepted: one, which SIGHUP makes read it again",
            files.identity().display()
        )),
        error => Failure::machine(error.to_string()),
    })
}

struct Daemon {
    files: Files,
    signals: Signals,
    disks: Vec<Disk>,
    is_ending: bool,
    /// Whether systemd knows that the disks are served.
    is_told: bool,
}

impl Daemon {
    /// Starts the disks that do not run yet, and says what becomes of the others.
    fn take(&mut self, settings: Vec<Settings>) {
        for gone in &self.disks {
            if gone.is_alive() && settings.iter().all(|one| one.name != gone.settings.name) {
                let name = &gone.settings.name;
                say(&format!(
                    "disk {name} is not configured any more, and goes on; 'zfolio device remove {name}' ends it"
                ));
            }
        }
        self.disks.retain(|disk| {
            disk.is_alive() || settings.iter().any(|one| one.name == disk.settings.name)
        });
        for settings in settings {
            let known = self.disks.iter().position(|disk| disk.settings.name == settings.name);
            match known.map(|index| &mut self.disks[index]) {
                Some(disk) if disk.is_alive() => {
                    if let Err(why) = &settings.options {
                        say(why);
                    } else if disk.settings.options != settings.options {
                        let (name, at) = (&settings.name, &settings.at);
                        say(&format!(
                            "disk {name}: what has changed at {at} counts from its next start on"
                        ));
                    }
                }
                Some(disk) => *disk = Disk::start(settings, &self.signals),
                None => self.disks.push(Disk::start(settings, &self.signals)),
            }
        }
    }

    /// Serves until all disks have ended.
    fn serve(mut self) -> Result<ExitCode, Failure> {
        self.tell();
        while self.disks.iter().any(Disk::is_alive) {
            let is_starting = self.disks.iter().any(|disk| disk.state == State::Starting);
            let turn = if is_starting { TURN_STARTING } else { TURN };
            match self.signals.next(turn) {
                Ok(Some(signal)) => self.obey(signal.number),
                Ok(None) => {}
                Err(error) => {
                    say(&format!("signals: {error}"));
                    self.end();
                }
            }
            let mut has_changed = false;
            self.disks.iter_mut().for_each(|disk| has_changed |= disk.read());
            // ECHILD: there is none left.
            while let Ok(Some((pid, change, _))) = child::changed() {
                has_changed |= self.note(pid, change);
            }
            if has_changed {
                self.tell();
            }
        }
        let failed = self.disks.iter().filter_map(Disk::failure).max();
        Ok(failed.map_or(ExitCode::SUCCESS, ExitCode::from))
    }

    fn obey(&mut self, signal: i32) {
        match signal {
            libc::SIGINT | libc::SIGQUIT | libc::SIGTERM => self.end(),
            // The terminal is gone, and with it whoever has started the daemon there.
            libc::SIGHUP if stdin().is_terminal() => self.end(),
            libc::SIGHUP if !self.is_ending => self.reload(),
            libc::SIGTSTP => child::stop_here(),
            _ => {}
        }
    }

    /// Ends all disks, at the same time. A disk that starts ends too.
    fn end(&mut self) {
        if !self.is_ending {
            notify::send("STOPPING=1");
        }
        self.is_ending = true;
        for pid in self.disks.iter().filter_map(|disk| disk.pid) {
            child::send(pid, libc::SIGTERM).ok();
        }
    }

    fn reload(&mut self) {
        let now_us = clock::monotonic_ns() / 1000;
        notify::send(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}"));
        self.is_told = false;
        match self.files.read() {
            Ok(settings) => self.take(settings),
            Err(failure) => say(&format!("{}; everything stays as it is", failure.message())),
        }
        self.tell();
    }

    /// Notes what has become of a process. Returns whether that was a disk's end.
    fn note(&mut self, pid: i32, change: Change) -> bool {
        let disk = self.disks.iter_mut().find(|disk| disk.pid == Some(pid));
        match (disk, change) {
            // It is continued by whoever has stopped it.
            (_, Change::Stopped(_)) | (None, _) => false,
            (Some(disk), change) => {
                disk.note_end(change, self.is_ending);
                true
            }
        }
    }

    /// Tells systemd how the disks are, once each has started or failed.
    fn tell(&mut self) {
        if self.is_ending || self.disks.iter().any(|disk| disk.state == State::Starting) {
            return;
        }
        let is_served = |disk: &&Disk| disk.state == State::Served;
        let served = self.disks.iter().filter(is_served).count();
        let not: Vec<&str> =
            self.disks.iter().filter(|disk| !is_served(disk)).map(Disk::name).collect();
        let mut status = format!("STATUS={served} of {} disks are served", self.disks.len());
        if !not.is_empty() {
            status += &format!("; not: {}", not.join(", "));
        }
        if served > 0 && !self.is_told {
            status += "\nREADY=1";
            self.is_told = true;
        }
        notify::send(&status);
    }
}

/// A path without links and dots, where there is one.
fn resolved(path: &Path) -> std::path::PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}
