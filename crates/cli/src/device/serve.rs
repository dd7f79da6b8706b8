//! `zfolio device run`: a disk, served by this process until somebody ends it.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use zfolio_block::address::Address;
use zfolio_block::control::{Asked, Control, Guard, Guarded};
use zfolio_block::listen::{Listener, Protection, Unusable};
use zfolio_block::metrics::{self, Metrics};
use zfolio_block::nbd::{Config, Exports, Server, Tls, Watch};
use zfolio_block::ram::{self, Ram, Unmade};
use zfolio_block::saved::{Kept, before};
use zfolio_block::ublk::Unstarted;
use zfolio_block::vhost_user::{self, Marks};
use zfolio_block::{Counts, Held, Refusals, Report, ublk};
use zfolio_core::size;
use zfolio_core::zram;
use zfolio_iaa::accelerate;
use zfolio_pager::PoolMappings;
use zfolio_pager::spill::{PlaceError, Site, Sites};
use zfolio_sys::errno_text::ErrnoText;
use zfolio_sys::probe::child::{self, Signals};
use zfolio_sys::{files, process};

use super::arguments::{AddArgs, Number, TlsArgs, UNUSED_CERTIFICATES, YesNo, unfit, unprotected};
use super::saved::{self, Origin};
use super::{directory, socket};
use crate::failure::Failure;
use crate::metrics::take_address;
use crate::notify;
use crate::output::escaped;

/// How long to wait for a page of figures that is being made.
const PAGE_TURN: Duration = Duration::from_millis(1);

/// So long the end of a disk waits for what its places have under way. What is there is of no use after the end, since
/// the key is gone.
const UNANSWERED: Duration = Duration::from_secs(5);

/// How long a turn of the main loop takes at most.
const TURN_MS: u16 = 200;

/// Turns between two looks at the files of certificates: two seconds.
const LOOK_TURNS: u32 = 10;

/// After so many lines about units that are lost, they come now and then only.
const LOST_LINES_MAX: u64 = 10;

/// What ends a disk, by the numbers of signals.
pub(super) const ENDS: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Prints a line for the user, if anybody still reads it.
pub(super) fn say(line: &str) {
    writeln!(io::stderr(), "zfolio: {}", escaped(line)).ok();
}

/// Makes a disk and serves it.
///
/// # Errors
///
/// The disk cannot be made as asked for, and nothing is left behind; or it is not saved at its end as asked for.
pub(super) fn run(arguments: &AddArgs) -> Result<ExitCode, Failure> {
    arguments.check().map_err(Failure::argument)?;
    if arguments.background {
        leave_shell()?;
    }
    // Before any thread is started, so that none of them gets a signal.
    let signals =
        Signals::block().map_err(|error| Failure::machine(format!("signals: {error}")))?;
    // Each client has descriptors of its own.
    files::raise_limit();
    let name = &arguments.name;
    let unkept = arguments.ublk.and_then(|_| keep_in_memory());
    let mut watch = watch(&arguments.tls)?;
    let certificates = watch.as_ref().map(|watch| watch.certificates().clone());
    let protection = Protection { certificates, local: arguments.tls.tls.into() };
    let kept = saved::take(arguments)?;
    let mut origin = Origin::open(arguments, kept.as_ref())?;
    let (ram, sites) = with_writeback(make(arguments, origin.as_ref())?, arguments)?;
    if let Some(origin) = &mut origin {
        origin.fill(&ram, arguments, &signals)?;
    }
    let ram = Arc::new(ram);
    let path = socket(&directory()?, name);
    let kept = kept.map(saved::note_served).transpose()?;
    let note_unserved = |_: &_| kept.iter().for_each(|kept| kept.note_unserved(&ram));
    // From its first client on the control socket knows of the file: whoever asks for the end waits for the save.
    let control = Control::start_kept(&path, Arc::clone(&ram), kept.clone());
    let control = control.map_err(|error| unheard(name, &path, &error));
    let control = control.inspect_err(note_unserved)?;
    let marks = origin.as_ref().map(|origin| Marks::from_notes(&origin.header().notes));
    let started = serve(arguments, &ram, &protection, marks.unwrap_or_default());
    let started = started.inspect_err(note_unserved).inspect_err(|why| {
        control.note_unsaved(&format!("the disk could not be served: {}", why.message()));
    });
    let (servers, metrics, places) = started?;
    let addresses = places.addresses.join(" ");
    control.set_addresses(addresses.clone());
    control.set_guard(guard(&servers));
    if arguments.background {
        // The file system of the shell's directory can be unmounted.
        std::env::set_current_dir("/").map_err(|error| Failure::machine(format!("/: {error}")))?;
    } else {
        notify::send("READY=1");
    }
    // Only of a disk that there is: where it cannot be made, the line that says why is the only one.
    if let Some(why) = unkept {
        say(&format!("disk {name} must not be used as swap: {why}"));
    }
    places.note_replaced(name);
    let line = watch.as_mut().and_then(Watch::look);
    let lost = kept.as_deref().and_then(saved::lost_before);
    let differs = origin.and_then(|origin| origin.differs(arguments));
    line.iter().chain(&lost).chain(&differs).for_each(|line| say(&format!("disk {name}: {line}")));
    let made = format!(
        "disk {name}: {}, {}, units of {}, at {}",
        size::display(ram.zram().disk_bytes()),
        algorithm(&ram),
        ram.zram().unit(),
        addresses + &figures_at(arguments, metrics.as_ref())
    );
    // Where `add` waits for it. If that was killed, the disk ends as by a signal: a command that fails leaves nothing
    // behind.
    let told = writeln!(io::stdout(), "{made}").and_then(|()| io::stdout().flush());
    if arguments.background && told.is_err() {
        let own = i32::try_from(process::id()).unwrap_or(i32::MAX);
        child::send(own, libc::SIGTERM).ok();
    }
    let life =
        Life { name, ram: &ram, control: &control, signals: &signals, kept: kept.as_deref() };
    let ended = life.until_end(servers, metrics, watch.as_mut());
    drop(control);
    sites.into_iter().for_each(|sites| end_sites(name, sites));
    say(&format!("disk {name} has ended; {}", ended?));
    Ok(ExitCode::SUCCESS)
}

/// Ends the places that the disk wrote back to, and says which have not answered.
fn end_sites(name: &str, sites: Sites) {
    let seconds = UNANSWERED.as_secs();
    for place in sites.end(UNANSWERED) {
        let place = place.display();
        say(&format!(
            "disk {name}: '{place}' has not answered for {seconds} s, and is not waited for"
        ));
    }
}

/// The end of the line about a new disk, where `--metrics` asks for any free port: the port is told.
fn figures_at(arguments: &AddArgs, metrics: Option<&Metrics>) -> String {
    let metrics = metrics.filter(|_| arguments.metrics.is_some_and(|asked| asked.port() == 0));
    metrics.map(|metrics| format!(", figures at {}", metrics.address())).unwrap_or_default()
}

/// Leaves what this process has of the shell that started it: open files, and the terminal.
fn leave_shell() -> Result<(), Failure> {
    let kept = files::leave_program_files(&[
        io::stdin().as_fd(),
        io::stdout().as_fd(),
        io::stderr().as_fd(),
    ]);
    let kept = kept.map_err(|error| Failure::machine(format!("open files: {error}")))?;
    // They are those of this process for its life.
    std::mem::forget(kept);
    process::leave_session()
        .map_err(|error| Failure::machine(format!("the terminal cannot be left: {error}")))
}

/// The memory of a disk of this machine must not be swapped out, since the swap may be on that disk. And no thread may
/// wait for memory that a write to the disk would free, with a lock that this write needs: threads that are started
/// from here on inherit that. Returns why that is not so.
fn keep_in_memory() -> Option<String> {
    let kept = process::lock_memory().map_err(|error| ("mlockall", error));
    let served = process::serve_disk().map_err(|error| ("PR_SET_IO_FLUSHER", error));
    let unkept = kept.and(served).err();
    unkept.map(|(call, error)| format!("{call}: {}", ErrnoText(error)))
}

/// A disk is neither ended nor reset by a command while something of this machine is on it, nor reset while clients are
/// connected: file systems that they have mounted would be gone under them. (An end, which they see, stays possible.)
/// Once its servers end, or somebody has deleted its device, the number may be another program's device, and nothing is
/// looked at.
fn guard(servers: &Arc<Servers>) -> Guard {
    let servers = Arc::downgrade(servers);
    Box::new(move |asked| {
        let Some(servers) = servers.upgrade() else { return Ok(Vec::new()) };
        servers.check_unused()?;
        match asked {
            Guarded::End => Ok(Vec::new()),
            Guarded::Reset => servers.hold(),
        }
    })
}

/// Looks until nobody is found, for half a second: a program that looks at a device for a moment, as udev does, and a
/// client that has just left are waited for.
fn lasting<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    const TURNS: u32 = 10;
    const TURN: Duration = Duration::from_millis(50);
    for _ in 1..TURNS {
        look()?;
        std::thread::sleep(TURN);
    }
    look()
}

/// What a disk is as long as it is served.
struct Life<'l> {
    name: &'l str,
    ram: &'l Ram,
    control: &'l Control,
    signals: &'l Signals,
    /// The file that it is saved in at its end.
    kept: Option<&'l Kept>,
}

impl Life<'_> {
    /// Works for the disk until it ends, saves the contents if that is asked for, and returns what became of them. A
    /// command does not end it if it cannot be saved: it stays, without clients.
    fn until_end(
        &self,
        mut servers: Arc<Servers>,
        mut metrics: Option<Metrics>,
        mut watch: Option<&mut Watch>,
    ) -> Result<String, Failure> {
        let Life { name, ram, control, .. } = *self;
        loop {
            let asked = self.work(&servers, watch.as_deref_mut());
            servers.note_end(name);
            control.set_ending(true);
            // It has the other handle of the servers.
            drop(metrics.take());
            let Stopped { busy, marks, kernel } = Servers::stop(std::mem::take(&mut servers));
            control.set_addresses(String::new());
            if busy > 0 {
                say(&format!("disk {name}: {busy} clients did not end in time"));
            }
            // Clients have left: they find all that they have written in whatever is saved from now on. A later turn
            // has no servers.
            if !marks.is_empty() {
                control.set_notes(marks);
            }
            let is_saved = self.kept.is_some() && asked.as_ref().is_none_or(Asked::is_saved);
            if let Some(server) = kernel.as_ref().filter(|_| !is_saved) {
                say(&format!("disk {name}: the kernel still writes to {}", server.node()));
            }
            let kept = self.kept.filter(|_| is_saved && self.has_left(kernel));
            let data = size::display(ram.zram().mm_stat().orig_data_size);
            let Some(kept) = kept else {
                // Whoever has asked for the end as usual waits for a save.
                if self.kept.is_some() {
                    control.note_unsaved(&format!(
                        "the disk has ended without being saved: another command has asked for that, with --no-save; \
                         {data} of contents are dropped"
                    ));
                }
                return Ok(format!("{data} of contents are dropped"));
            };
            // A command may come again, a signal ends the disk.
            let saved = match asked {
                Some(_) => kept.save(ram, &control.notes()),
                None => kept.save_last(ram, &control.notes()),
            };
            let error = match saved {
                Ok((done, path)) => {
                    let mut line = format!("{data} of contents are saved in '{}'", path.display());
                    if let Some(lost) = saved::lost_units(done.lost) {
                        line += &format!("; {lost}");
                        let before = Some(before(path)).filter(|it| done.unread > 0 && it.exists());
                        let told =
                            |it: PathBuf| format!("; the file of before is '{}'", it.display());
                        line += &before.map_or_else(String::new, told);
                    }
                    return Ok(line);
                }
                Err(error) => error,
            };
            let Some(asked) = asked else {
                let line = format!(
                    "disk {name} has ended without being saved: {error}; {data} of contents are dropped"
                );
                // Who has asked since the signal came.
                control.note_unsaved(&line);
                return Err(Failure::machine(line));
            };
            let line = format!(
                "it stays, without clients, since it cannot be saved: {error}; accepted: the same once it can, \
                 'zfolio device save {name} FILE' with another file, 'zfolio device remove --no-save {name}'"
            );
            say(&format!("disk {name}: {line}"));
            control.set_ending(false);
            asked.refuse(&line);
        }
    }

    /// Waits until the kernel does not write to the disk any more, however long that takes: a save meanwhile would have
    /// some of what it writes and not the rest. False: a command says that nobody needs the contents.
    fn has_left(&self, kernel: Option<ublk::Server>) -> bool {
        let Life { name, ram, control, .. } = *self;
        let Some(mut server) = kernel else { return true };
        say(&format!(
            "disk {name}: waiting for the kernel, which still writes to {}, to save all of it; 'zfolio device remove \
             --no-save {name}' ends the disk without",
            server.node()
        ));
        while server.wait(Duration::from_millis(TURN_MS.into())) > 0 {
            if control.is_unsaved_asked() {
                return false;
            }
            ram.work(u64::from(TURN_MS) * 1_000_000);
        }
        true
    }

    /// Works for the disk until a client of its control socket asks for the end, or a signal comes: `None`.
    fn work(&self, servers: &Servers, mut watch: Option<&mut Watch>) -> Option<Asked> {
        let Life { name, ram, control, signals, .. } = *self;
        let (mut is_gone, mut turn) = (false, 0_u32);
        loop {
            if let Some(asked) = control.stop_within(TURN_MS) {
                return Some(asked);
            }
            turn = turn.wrapping_add(1);
            if let Some(watch) = watch.as_mut().filter(|_| turn % LOOK_TURNS == 0) {
                watch.look().iter().for_each(|line| say(&format!("disk {name}: {line}")));
            }
            ram.work(u64::from(TURN_MS) * 1_000_000);
            if let Some(server) =
                servers.ublk.as_ref().filter(|server| !is_gone && server.is_gone())
            {
                is_gone = true;
                let node = server.node();
                say(&format!(
                    "disk {name}: {node} has gone: another program has deleted it, or the kernel refuses its queues; \
                     the contents are there until the disk ends, for 'zfolio device save {name} FILE'"
                ));
            }
            match signals.next(Duration::ZERO) {
                Ok(Some(signal)) if ENDS.contains(&signal.number) => return None,
                Ok(Some(signal)) if signal.number == libc::SIGTSTP => child::stop_here(),
                Ok(_) => {}
                Err(error) => {
                    say(&format!("signals: {error}"));
                    return None;
                }
            }
        }
    }
}

/// The algorithm that compresses what is written: with its parameters, or by the accelerator's name.
fn algorithm(ram: &Ram) -> String {
    let first = ram.zram().codecs().next().expect("a disk has an algorithm");
    match first.params() {
        Some(params) if params.algorithm.name() == first.name() => params.to_string(),
        _ => first.name().to_owned(),
    }
}

fn make(arguments: &AddArgs, origin: Option<&Origin>) -> Result<Ram, Failure> {
    let header = origin.map(Origin::header);
    let algorithms = match header {
        Some(header) => header.algorithms.clone(),
        None => arguments.algorithms().map_err(Failure::argument)?,
    };
    let (accelerate, codes) = (arguments.accelerate.0, arguments.codes());
    accelerate::check(accelerate, codes, &algorithms, "this disk").map_err(Failure::argument)?;
    let accelerated = accelerate::open(accelerate, codes).map_err(Failure::machine)?;
    let config = ram::Config {
        // One of them is given.
        disk_bytes: header.map(|header| header.disk_bytes).or(arguments.size).unwrap_or(0),
        algorithms,
        unit: header.map_or(arguments.unit, |header| header.unit),
        limit_bytes: arguments.mem_limit.unwrap_or(0),
        age_s: arguments.recompress_age,
        accelerated,
    };
    let (source, report) =
        (Arc::new(PoolMappings::default()), Box::new(lost(report(&arguments.name))));
    let made = match header {
        Some(header) => Ram::with_key(&config, header.key.clone(), source, report),
        None => Ram::new(&config, source, report),
    };
    made.map_err(|error| match error {
        Unmade::Size => Failure::argument(unfit(config.disk_bytes, config.unit)),
        Unmade::Codec(error) => Failure::argument(format!("--algorithm: {error}")),
        error => Failure::machine(error.to_string()),
    })
}

/// Prints the units that are lost: the first ones, and then a line now and then. A place that comes back and goes away
/// again, days later, is still told.
fn lost(report: Report) -> impl Fn(&zram::Error) + Send + Sync {
    let report = Arc::new(report);
    let later = Arc::clone(&report);
    let (lost, rest) = (AtomicU64::new(0), Refusals::new(Box::new(move |line| later(line))));
    move |error| {
        let line = error.to_string();
        let is_first = lost.fetch_add(1, Relaxed) < LOST_LINES_MAX;
        if is_first { report(&line) } else { rest.note(&line) }
    }
}

/// Opens the places that the disk writes units back to.
fn with_writeback(ram: Ram, arguments: &AddArgs) -> Result<(Ram, Option<Sites>), Failure> {
    let AddArgs { writeback, writeback_age, writeback_budget, .. } = arguments;
    if writeback.is_empty() {
        return Ok((ram, None));
    }
    let sites = Sites::open(writeback, ram.zram().unit().bytes()).map_err(|error| match error {
        PlaceError::Path(refusal) => Failure::argument(format!("--writeback: {refusal}")),
        error => Failure::machine(error.to_string()),
    })?;
    let ram = ram.with_writeback(ram::Writeback {
        backing: sites.backing(),
        name: writeback.iter().map(Site::to_string).collect::<Vec<_>>().join(" "),
        age_s: *writeback_age,
        budget: *writeback_budget,
    });
    Ok((ram, Some(sites)))
}

/// Why the control socket is not served.
fn unheard(name: &str, path: &Path, error: &Unusable) -> Failure {
    match error {
        Unusable::InUse(_) => Failure::argument(format!(
            "'{name}' is a disk already; accepted: another name, or 'zfolio device remove {name}' first"
        )),
        error => Failure::machine(format!("{}: {error}", path.display())),
    }
}

/// What serves the disk.
#[derive(Default)]
struct Servers {
    nbd: Option<Server>,
    vhost_user: Option<vhost_user::Server>,
    ublk: Option<ublk::Server>,
}

impl Servers {
    /// What they have counted.
    fn counts(&self) -> Counts {
        let nbd = self.nbd.as_ref().map(Server::counts).unwrap_or_default();
        let ublk = self.ublk.as_ref().map(ublk::Server::counts).unwrap_or_default();
        nbd + ublk + self.vhost_user.as_ref().map(vhost_user::Server::counts).unwrap_or_default()
    }

    /// An error says why the disk must be neither ended nor reset: something of this machine is on it.
    fn check_unused(&self) -> Result<(), String> {
        let Some(server) = &self.ublk else { return Ok(()) };
        let Some(user) = lasting(|| server.user()) else { return Ok(()) };
        Err(format!(
            "{} is in use: {user}; accepted: after umount, swapoff, losetup -d or the end of that process",
            server.node()
        ))
    }

    /// Keeps clients from connecting, so that the disk can be reset. Guests that have left do not go on with it any
    /// more, since its contents go now. An error says why it must not be reset: clients are connected.
    fn hold(&self) -> Result<Vec<Held>, String> {
        let mut held = Vec::new();
        let count = lasting(|| self.try_hold().map(|now| held = now).err());
        if let Some(count) = count {
            return Err(match count {
                1 => "1 client is connected; accepted: after it has ended".to_owned(),
                _ => format!("{count} clients are connected; accepted: after they have ended"),
            });
        }
        // Whoever has begun to use the device while clients were waited for. (One that opens it a moment later is not
        // seen, see `docs/design/ublk.md`.)
        self.check_unused()?;
        self.vhost_user.iter().for_each(vhost_user::Server::forget_marks);
        Ok(held)
    }

    /// An error: so many clients are connected.
    fn try_hold(&self) -> Result<Vec<Held>, usize> {
        let nbd = self.nbd.iter().map(Server::hold);
        let all: Vec<_> = nbd.chain(self.vhost_user.iter().map(vhost_user::Server::hold)).collect();
        let count: usize = all.iter().filter_map(|held| held.as_ref().err()).sum();
        if count > 0 { Err(count) } else { Ok(all.into_iter().flatten().collect()) }
    }

    /// A signal ends the disk whoever uses it: says who does.
    fn note_end(&self, name: &str) {
        let Some(server) = &self.ublk else { return };
        if let Some(user) = server.user() {
            let node = server.node();
            say(&format!(
                "disk {name}: {node} ends in use: {user}; from now on it gets I/O errors"
            ));
        }
    }

    /// Ends them, so that nobody writes any more, except for the kernel where it needs longer.
    fn stop(mut servers: Arc<Servers>) -> Stopped {
        let Servers { nbd, vhost_user, ublk } = loop {
            match Arc::try_unwrap(servers) {
                Ok(servers) => break servers,
                // A page is being made of them, or somebody looks whether the device is in use.
                Err(shared) => servers = shared,
            }
            std::thread::sleep(PAGE_TURN);
        };
        let nbd = nbd.map_or(0, |mut server| server.stop());
        // What the kernel still writes back comes before anything else ends.
        let kernel = ublk.and_then(|mut server| (server.stop() > 0).then_some(server));
        let (guests, marks) = vhost_user.map_or((0, Vec::new()), |mut server| {
            let busy = server.stop();
            (busy, server.marks().to_notes())
        });
        Stopped { busy: nbd + guests, marks, kernel }
    }
}

/// What is left of servers that have ended.
struct Stopped {
    /// Clients that did not end in time. What they have under way was not answered, and nothing more is done for them.
    busy: usize,
    /// The notes that are saved with the contents.
    marks: Vec<u8>,
    /// The server of the device of the kernel, which still writes to the disk.
    kernel: Option<ublk::Server>,
}

/// What clients connect to.
#[derive(Default)]
struct Places {
    addresses: Vec<String>,
    /// Those whose disk was killed before.
    replaced: Vec<String>,
}

impl Places {
    fn add(&mut self, address: String, listeners: &[Listener]) {
        if listeners.iter().any(Listener::has_replaced) {
            self.replaced.push(address.clone());
        }
        self.addresses.push(address);
    }

    /// Says what clients find here that were another disk's.
    fn note_replaced(&self, name: &str) {
        for address in &self.replaced {
            say(&format!(
                "disk {name}: the disk that was at {address} before was killed: a client that connects again does not \
                 find what it has written"
            ));
        }
    }
}

/// What serves the disk and its figures, and where.
type Started = (Arc<Servers>, Option<Metrics>, Places);

/// Serves the disk and its figures.
fn serve(
    arguments: &AddArgs,
    ram: &Arc<Ram>,
    protection: &Protection,
    marks: Marks,
) -> Result<Started, Failure> {
    // Before clients can write: what they write is lost if something fails after that. With --save the next start then
    // refuses the older file.
    let page = take_address(arguments.metrics)?;
    let mut places = Places::default();
    let vhost_user = listen_vhost_user(arguments, ram, marks, &mut places)?;
    let nbd = listen_nbd(arguments, ram, protection, &mut places)?;
    let ublk = make_ublk(arguments, ram, &mut places)?;
    let servers = Arc::new(Servers { nbd, vhost_user, ublk });
    let metrics = page.map(|page| serve_metrics(page, arguments, ram, &servers)).transpose()?;
    Ok((servers, metrics, places))
}

fn no_server(error: io::Error) -> Failure {
    Failure::machine(format!("no server: {error}"))
}

/// Reads the certificates.
fn watch(arguments: &TlsArgs) -> Result<Option<Watch>, Failure> {
    let verify_peer = arguments.tls_verify_peer == YesNo::Yes;
    // Wherever this process goes.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let directory = arguments.tls_certificates.as_deref().map(absolute);
    let opened = directory.map(|directory| Watch::open(&directory, verify_peer)).transpose();
    opened.map_err(|error| Failure::argument(format!("--tls-certificates: {error}")))
}

/// Why an address is not listened on.
fn unlistened(error: &Unusable) -> Failure {
    match error {
        Unusable::NotLoopback(_) => Failure::argument(unprotected(error)),
        error => Failure::machine(format!("--nbd: {error}")),
    }
}

/// Prints what a server of the disk has to report.
fn report(name: &str) -> Report {
    let name = name.to_owned();
    Box::new(move |line| say(&format!("disk {name}: {line}")))
}

fn listen_nbd(
    arguments: &AddArgs,
    ram: &Arc<Ram>,
    protection: &Protection,
    places: &mut Places,
) -> Result<Option<Server>, Failure> {
    if arguments.nbd.is_empty() {
        return Ok(None);
    }
    let (mut exports, name) = (Exports::new(), &arguments.name);
    let description = format!("a compressed disk in memory ({})", algorithm(ram));
    let added = exports.add(name, &description, Arc::<Ram>::clone(ram));
    added.map_err(|error| Failure::argument(error.to_string()))?;
    let mut listeners = Vec::new();
    for address in &arguments.nbd {
        let address = absolute(address);
        let opened =
            Listener::open_with(&address, protection).map_err(|error| unlistened(&error))?;
        let port =
            opened.first().and_then(Listener::port).filter(|_| matches!(address, Address::Tcp(_)));
        let tls = opened.first().map_or(Tls::Off, Listener::tls);
        places.add(uri(&port.map_or(address, Address::Tcp), name, tls), &opened);
        listeners.extend(opened);
    }
    let is_clear = listeners.iter().all(|listener| listener.tls() == Tls::Off);
    if is_clear && protection.certificates.is_some() {
        return Err(Failure::argument(UNUSED_CERTIFICATES));
    }
    let server = Server::start_with(listeners, exports, Config::default(), report(name));
    server.map(Some).map_err(no_server)
}

fn listen_vhost_user(
    arguments: &AddArgs,
    ram: &Arc<Ram>,
    marks: Marks,
    places: &mut Places,
) -> Result<Option<vhost_user::Server>, Failure> {
    if arguments.vhost_user.is_empty() {
        return Ok(None);
    }
    let mut listeners = Vec::new();
    for path in &arguments.vhost_user {
        let address = absolute(&Address::Unix(path.clone()));
        let opened = Listener::open(&address)
            .map_err(|error| Failure::machine(format!("--vhost-user: {error}")))?;
        // `unix:` and the path.
        places.add(address.to_string().replacen("unix", "vhost-user", 1), &opened);
        listeners.extend(opened);
    }
    let (disk, config) = (Arc::<Ram>::clone(ram), vhost_user::Config::default());
    let (name, report) = (&arguments.name, report(&arguments.name));
    let server = vhost_user::Server::start_with(listeners, disk, name, config, marks, report);
    server.map(Some).map_err(no_server)
}

fn make_ublk(
    arguments: &AddArgs,
    ram: &Arc<Ram>,
    places: &mut Places,
) -> Result<Option<ublk::Server>, Failure> {
    let Some(Number(number)) = arguments.ublk else { return Ok(None) };
    let (disk, config) = (Arc::<Ram>::clone(ram), ublk::Config { number, ..Default::default() });
    let server = ublk::Server::start(disk, config).map_err(|error| match error {
        Unstarted::Taken(number) => Failure::argument(format!("--ublk={number}: {error}")),
        error => Failure::machine(format!("--ublk: {error}")),
    })?;
    places.add(server.node().to_string(), &[]);
    Ok(Some(server))
}

/// The same address, wherever this process goes.
fn absolute(address: &Address) -> Address {
    match address {
        Address::Unix(path) => {
            Address::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
        }
        other => other.clone(),
    }
}

/// Serves the figures, if that is asked for.
fn serve_metrics(
    address: metrics::Address,
    arguments: &AddArgs,
    ram: &Arc<Ram>,
    servers: &Arc<Servers>,
) -> Result<Metrics, Failure> {
    let (name, ram, servers) = (arguments.name.clone(), Arc::clone(ram), Arc::clone(servers));
    let page = move || metrics::of_disk(&name, &ram, servers.counts());
    let started = address.serve(Box::new(page));
    started.map_err(|error| Failure::machine(format!("--metrics: {error}")))
}

/// What a client is given to connect.
fn uri(address: &Address, name: &str, tls: Tls) -> String {
    let scheme = if tls == Tls::Require { "nbds" } else { "nbd" };
    match address {
        Address::Unix(path) => format!("{scheme}+unix:///{name}?socket={}", in_uri(path)),
        Address::Tcp(address) => format!("{scheme}://{address}/{name}"),
        Address::Systemd => "the sockets of systemd".to_owned(),
    }
}

/// A path as a part of a URI, in which some characters mean something else: `%`, `&`, `#`, `+`. One with a space would
/// be two words where addresses are listed.
fn in_uri(path: &Path) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let bytes = path.as_os_str().as_encoded_bytes().iter();
    let letter = |byte: &u8| match is_plain(*byte) {
        true => char::from(*byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    bytes.map(letter).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use zfolio_block::address::Address;
    use zfolio_block::control::{Answer, Control, ask};
    use zfolio_block::nbd::Tls;
    use zfolio_block::ram::{Config, Ram};
    use zfolio_block::saved::Kept;
    use zfolio_core::page::UnitOrder;
    use zfolio_core::sync::Mutex;
    use zfolio_core::zram::Error;
    use zfolio_sys::probe::child::Signals;
    use zfolio_workers::Accelerated;

    use super::{Life, PoolMappings, Servers, lost, uri};

    /// Goal: a client that waits for the end of a disk with --save is refused where another one has asked for the end
    /// without a save: he was told that all was well, and FILE had nothing of the disk. Method: both ask before the
    /// disk looks, or the first one while it ends.
    #[test]
    fn an_end_without_a_save_is_no_success_for_others() {
        let name = format!("zfolio-life-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let (socket, file) = (directory.join("socket"), directory.join("disk"));
        let config = Config {
            disk_bytes: 1 << 20,
            algorithms: vec!["lz4".parse().unwrap()],
            unit: UnitOrder::DEFAULT,
            limit_bytes: 0,
            age_s: 600,
            accelerated: Accelerated::NONE,
        };
        let source = Arc::new(PoolMappings::default());
        let ram = Arc::new(Ram::new(&config, source, Box::new(|_| {})).unwrap());
        let mut kept = Kept::take(&file).unwrap();
        kept.note_served().unwrap();
        let kept = Arc::new(kept);
        let control = Control::start_kept(&socket, Arc::clone(&ram), Some(Arc::clone(&kept)));
        let control = control.unwrap();
        let signals = Signals::block().unwrap();
        assert_eq!(ask(&socket, "stop unsaved").unwrap(), Answer::Done(String::new()));
        while !control.is_unsaved_asked() {
            std::thread::yield_now();
        }
        let life =
            Life { name: "d", ram: &ram, control: &control, signals: &signals, kept: Some(&kept) };
        let (ended, told) = std::thread::scope(|scope| {
            let waits = scope.spawn(|| ask(&socket, "stop"));
            let ended = life.until_end(Arc::new(Servers::default()), None, None);
            while !waits.is_finished() {
                drop(control.stop_within(10));
            }
            (ended, waits.join().unwrap())
        });
        assert_eq!(ended.ok(), Some("0 of contents are dropped".to_owned()));
        let expected = "the disk has ended without being saved: another command has asked for that, with --no-save; 0 \
                        of contents are dropped";
        assert_eq!(told.unwrap(), Answer::Failed(expected.to_owned()));
        drop(control);
        assert!(!file.exists());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Goal: lines about lost units do not fill a log, and do not end either: after ten there were none any more.
    #[test]
    fn lost_units_are_reported_now_and_then() {
        let lines = Arc::new(Mutex::<1, _>::new(Vec::new()));
        let said = Arc::clone(&lines);
        let report = lost(Box::new(move |line| said.lock().push(line.to_owned())));
        (0..30).for_each(|_| report(&Error::NoMemory));
        let lines = lines.lock();
        assert_eq!(lines.len(), 11, "the next one is 10 s away: {lines:?}");
        assert_eq!(lines[10], Error::NoMemory.to_string());
    }

    /// Goal: a client that is given the printed URI finds the socket, whatever its path is.
    #[test]
    fn the_path_of_a_socket_is_encoded_in_a_uri() {
        for (path, encoded) in [
            ("/run/disks/a-b_c.~1", "/run/disks/a-b_c.~1"),
            ("/a b/100%&x=1#2+3?", "/a%20b/100%25%26x%3D1%232%2B3%3F"),
            ("/\u{e4}", "/%C3%A4"),
        ] {
            let address = Address::Unix(PathBuf::from(path));
            let expected = format!("nbd+unix:///disk?socket={encoded}");
            assert_eq!(uri(&address, "disk", Tls::Off), expected);
        }
    }
}
