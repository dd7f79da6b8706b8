//! The library's interface: a pager with a limit, and how to set it up.
//!
//! While the regions of a pager together are smaller than the limit, they are ordinary memory. Once
//! they are larger, each is registered, and memory that was not touched for a while is compressed.
//!
//! # Invariants
//!
//! - `LIB-1` The engine outlives its threads, every handler that may find it, and every region.
//! - `LIB-2` A child of `fork` has none of the threads, and perhaps locks that no thread will
//!   release. It never waits for anything here, and frees nothing. It changes nothing either: what a pager has open
//!   acts on the memory of the process that made it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use zfolio_core::budget::WriteBudget;
use zfolio_core::ledger::Owner;
use zfolio_core::page::UnitOrder;
use zfolio_core::ranges::Ranges;
use zfolio_core::stats::add;
use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::{ALGORITHM_DEFAULT, Choice};
use zfolio_sys::map::{self, Reservation};
use zfolio_sys::{Errno, process, signal};
use zfolio_workers::Accelerated;

use crate::charge::OverLimit;
use crate::config::{Config, Error, Mode, with_dictionary};
use crate::engine::Engine;
use crate::fatal;
use crate::inline::{self, Registered};
use crate::notice::{Callback, Notice};
use crate::published::Published;
use crate::region::Region;
use crate::report::Stats;
use crate::slice::{Pod, Slice};
use crate::spill::{PlaceError, Places};

/// Settings of a [`Pager`]. All but the limit have defaults: the unit and algorithm of `zfolio run` (4 KiB, and 16 KiB
/// where four pages are used together; auto), and [`Mode::Inline`].
///
/// ```
/// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
/// let pager = zfolio::Pager::builder()
///     .limit(256 << 20)
///     .algorithm("lz4")
///     .unit(4096)
///     .name("tiles")
///     .build()?;
/// # drop(pager);
/// # Ok::<(), zfolio::Error>(())
/// ```
#[derive(Clone)]
pub struct Builder {
    limit_bytes: u64,
    algorithm: String,
    unit_bytes: Option<usize>,
    mode: Mode,
    strict: bool,
    spill: Places,
    workers: usize,
    write_budget: String,
    name: String,
    listed: bool,
    callback: Option<Arc<Callback>>,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("limit", &self.limit_bytes)
            .field("algorithm", &self.algorithm)
            .field("unit", &self.unit_bytes)
            .field("mode", &self.mode)
            .field("strict", &self.strict)
            .field("spill", &self.spill)
            .field("write_budget", &self.write_budget)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Builder {
    /// How much memory all regions may take together: resident, staged and compressed memory, and
    /// tables. Required, and at least [`LIMIT_BYTES_MIN`](crate::LIMIT_BYTES_MIN). The process's
    /// other memory is not counted.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Builder {
        self.limit_bytes = bytes;
        self
    }

    /// The codec, as `"zstd"` or `"zstd,level=3,dict=FILE"`; `zfolio algorithms` lists them.
    /// Default: auto, which is lz4, and zstd while the memory that it saves is worth its time.
    #[must_use]
    pub fn algorithm(mut self, name: &str) -> Builder {
        name.clone_into(&mut self.algorithm);
        self
    }

    /// Bytes compressed as one object: a power of two from 4 KiB to 2 MiB. Default: 4 KiB, and with the
    /// algorithm auto 16 KiB where four pages are used together.
    ///
    /// Large units compress better; with small units a random touch is served faster.
    #[must_use]
    pub fn unit(mut self, bytes: usize) -> Builder {
        self.unit_bytes = Some(bytes);
        self
    }

    /// How touches of compressed pages are served. Default: [`Mode::Inline`], which needs no
    /// permission.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Builder {
        self.mode = mode;
        self
    }

    /// Whether going over the limit is an error: while the limit is passed, [`Pager::map`],
    /// [`Pager::map_slice`] and [`Region::read_from`] then return [`Error::OverLimit`]. Touches of
    /// memory are still served: no byte is lost, and the process goes on. Default: false.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Builder {
        self.strict = strict;
        self
    }

    /// Writes what does not fit compressed to a file in the directory `path`, or to the block device `path`; with
    /// several calls, to all of them in turn. Then the limit holds for data that does not compress. Default: nothing
    /// is written to any disk.
    ///
    /// The file has no name, and is gone when the process has ended, however it ends. What is written is encrypted and
    /// authenticated with a key that is in this process's memory only. A device's contents are overwritten; one
    /// that is mounted or used as swap is refused. So is a directory whose files are kept in memory (tmpfs).
    ///
    /// ```no_run
    /// let pager = zfolio::Pager::builder().limit(256 << 20).spill("/var/tmp").build()?;
    /// # Ok::<(), zfolio::Error>(())
    /// ```
    #[must_use]
    pub fn spill(mut self, path: impl Into<PathBuf>) -> Builder {
        self.spill.paths.push((path.into(), 0));
        self
    }

    /// How much may be written to the places of [`Builder::spill`] in all, at least 16 MiB. Default: half of what is
    /// free in the file system of the first.
    #[must_use]
    pub fn spill_limit(mut self, bytes: u64) -> Builder {
        self.spill.limit_bytes = Some(bytes);
        self
    }

    /// The most that compressed memory may take, in percent of the limit: 1 to 100. What is beyond that goes to the
    /// places of [`Builder::spill`], as the kernel's `max_pool_percent` says. Default: 100, so that only the limit
    /// counts.
    #[must_use]
    pub fn max_pool_percent(mut self, percent: u8) -> Builder {
        self.spill.pool.max_pool_percent = percent;
        self
    }

    /// What compressed memory comes down to once it has passed [`Builder::max_pool_percent`], in percent of that: 1 to
    /// 100. Default: 90, the kernel's.
    #[must_use]
    pub fn accept_threshold_percent(mut self, percent: u8) -> Builder {
        self.spill.pool.accept_threshold_percent = percent;
        self
    }

    /// How much may be written to the places of [`Builder::spill`], and in what time: `"10G/day"`, or `"1G"` in all.
    /// Periods are `s`, `min`, `h` and `day`. Once that is used up, memory stays in memory, and the limit is passed,
    /// until some of the budget is there again. Default: any amount.
    #[must_use]
    pub fn write_budget(mut self, budget: &str) -> Builder {
        budget.clone_into(&mut self.write_budget);
        self
    }

    /// So many threads compress and decompress batches together with those of the pager, where that takes long enough
    /// to be worth it: for programs that leave CPUs idle. At most 64; more counts as 64. Default: 0.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Builder {
        self.workers = workers.min(zfolio_workers::CREW_MAX);
        self
    }

    /// Calls `function` when the limit is passed, and again each time it is passed after it was
    /// held. Without a function, one line on standard error reports the first time.
    ///
    /// The limit is passed when data does not compress. `function` runs on a thread of its own,
    /// which blocks signals that are sent to the process; it may touch regions. A [`Pager`] or
    /// [`Region`] that `function` owns is never freed. If `function` panics, that ends its thread only:
    /// the pager works on, and `function` is not called again.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// use std::sync::mpsc;
    ///
    /// let (sender, receiver) = mpsc::sync_channel(1);
    /// let pager = zfolio::Pager::builder()
    ///     .limit(8 << 20)
    ///     .on_over_limit(move |over| drop(sender.try_send(*over)))
    ///     .build()?;
    /// let mut region = pager.map(24 << 20)?;
    /// let mut noise = 1_u64;
    /// for byte in region.iter_mut() {
    ///     noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    ///     *byte = (noise >> 56) as u8; // It does not compress.
    /// }
    /// let over = receiver.recv().expect("24 MiB of noise do not fit in 8");
    /// assert!(over.charged_bytes > over.limit_bytes);
    /// # Ok::<(), zfolio::Error>(())
    /// ```
    #[must_use]
    pub fn on_over_limit(
        mut self,
        function: impl Fn(&OverLimit) + Send + Sync + 'static,
    ) -> Builder {
        self.callback = Some(Arc::new(function));
        self
    }

    /// The name that `zfolio stat` shows beside the name of the process, to distinguish several
    /// pagers.
    #[must_use]
    pub fn name(mut self, name: &str) -> Builder {
        name.clone_into(&mut self.name);
        self
    }

    /// Whether `zfolio stat` lists this pager, by a file in `/dev/shm/zfolio-UID/` that only this
    /// user may read. Default: true.
    #[must_use]
    pub fn listed(mut self, listed: bool) -> Builder {
        self.listed = listed;
        self
    }

    /// Sets the pager up.
    ///
    /// # Errors
    ///
    /// A setting is not accepted, or the kernel or a permission does not allow it: see [`Error`].
    pub fn build(mut self) -> Result<Pager, Error> {
        self.spill.write_budget =
            self.write_budget.parse().map_err(|why| Error::Spill(PlaceError::Budget { why }))?;
        if self.spill.is_for_nowhere() {
            return Err(Error::Spill(PlaceError::Nowhere));
        }
        let algorithm = self
            .algorithm
            .parse::<Choice>()
            .and_then(|choice| choice.try_map(with_dictionary))
            .map_err(|error| Error::Algorithm(format!("algorithm: {error}")))?;
        let given = self.unit_bytes.unwrap_or(UnitOrder::DEFAULT.bytes());
        let unit = UnitOrder::from_bytes(given).ok_or(Error::Unit { given })?;
        let config = Config {
            limit_bytes: self.limit_bytes,
            algorithm,
            unit,
            wide_units: self.unit_bytes.is_none(),
            mode: self.mode,
            whole_process: false,
            // A library does not end its program; `Core::strict` returns errors instead.
            strict: false,
            stall_ppm: 0,
            spill: self.spill,
            accelerated: Accelerated::Workers(self.workers),
            assistants: None,
        };
        let algorithm = config.algorithm.to_string();
        let notice = self.callback.is_some().then(|| Arc::new(Notice::new()));
        let published = Published::new(self.listed, notice.clone())
            .map_err(|errno| Error::Memory { what: "the page of figures", errno })?;
        let engine = Engine::new(config, Box::new(published))?;
        let mut command = process::command();
        if !self.name.is_empty() {
            command = format!("{command}:{}", self.name);
        }
        let (pid, namespace) = (process::id(), process::pid_namespace());
        let owner = Owner { pid, namespace, start_ticks: process::start_ticks() };
        engine.stats().publish(owner, 0, &algorithm, &command);
        let listener = notice.zip(self.callback);
        Ok(Pager(Arc::new(Core::start(engine, self.strict, listener)?)))
    }
}

/// Managed memory with a limit.
///
/// It is cheap to clone; everything is given back when the last clone and the last region are gone.
///
/// ```
/// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
/// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
/// let mut region = pager.map(64 << 20)?;
/// region.fill(7);
/// assert!(region.iter().all(|byte| *byte == 7));
/// # Ok::<(), zfolio::Error>(())
/// ```
#[derive(Clone)]
pub struct Pager(Arc<Core>);

/// The engine with its threads.
pub(crate) struct Core {
    /// Owned: made by `Box::leak`, freed in `drop` once no thread can reach it (`LIB-1`).
    pub(crate) engine: &'static Engine,
    registered: Option<Registered>,
    threads: Vec<JoinHandle<()>>,
    notice: Option<Arc<Notice>>,
    strict: bool,
    /// The process that has the threads (`LIB-2`).
    process: u32,
    /// What is not registered yet, because all regions fit under the limit together.
    native: Mutex<1, Native>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("engine", &self.engine).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Native {
    /// The size of all regions, registered or not.
    bytes: u64,
    engaged: bool,
    /// What is to be registered, a range for each region, without the parts that were pinned before.
    waiting: Ranges,
}

/// The function that a thread of the engine runs until the engine stops.
type Life = fn(&Engine);

/// Starts a thread with the signals that `mask` leaves open.
fn spawn(
    name: &str,
    mask: fn() -> signal::Mask,
    life: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Error> {
    let before = mask();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(life);
    signal::restore(&before);
    thread.map_err(|error| Error::Memory {
        what: "starting a thread",
        errno: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
    })
}

impl Core {
    fn start(
        engine: Engine,
        strict: bool,
        listener: Option<(Arc<Notice>, Arc<Callback>)>,
    ) -> Result<Core, Error> {
        let engine: &'static Engine = Box::leak(Box::new(engine));
        let mode = engine.config().mode;
        let registered = if mode == Mode::Inline { inline::register(engine) } else { None };
        let mut core = Core {
            engine,
            registered,
            threads: Vec::new(),
            notice: None,
            strict,
            process: process::id(),
            native: Mutex::new(Native::default()),
        };
        // From here on, an error drops the core, which ends the threads that were started.
        if mode == Mode::Inline && core.registered.is_none() {
            return Err(Error::TooManyPagers { most: inline::ENGINES });
        }
        if let Some((notice, callback)) = listener {
            core.notice = Some(Arc::clone(&notice));
            let life = move || notice.listen(&*callback);
            core.threads.push(spawn("zfolio-notice", signal::block_sent, life)?);
        }
        let lives: [(&str, Life); 3] = [
            ("zfolio-reclaim", Engine::reclaim_in_background),
            ("zfolio-prefetch", Engine::prefetch_in_background),
            ("zfolio-handler", Engine::handle_faults),
        ];
        let count = if mode == Mode::Handler { 3 } else { 2 };
        for &(name, life) in &lives[..count] {
            let guarded = move || {
                let _guard = fatal::NoUnwind;
                life(engine);
            };
            core.threads.push(spawn(name, signal::block_all, guarded)?);
        }
        let assistants = if mode == Mode::Handler { engine.assistants() } else { 0 };
        for number in 0..assistants {
            let guarded = move || {
                let _guard = fatal::NoUnwind;
                engine.assist(number);
            };
            core.threads.push(spawn("zfolio-assist", signal::block_all, guarded)?);
        }
        let crew = engine.crew();
        for worker in 0..crew.len() {
            let guarded = move || {
                let _guard = fatal::NoUnwind;
                crew.serve(worker);
            };
            core.threads.push(spawn("zfolio-worker", signal::block_all, guarded)?);
        }
        for disk in engine.disks() {
            for _ in 0..disk.threads_needed() {
                let disk = Arc::clone(&disk);
                let guarded = move || {
                    let _guard = fatal::NoUnwind;
                    disk.serve();
                };
                core.threads.push(spawn("zfolio-disk", signal::block_all, guarded)?);
            }
        }
        Ok(core)
    }

    /// Registers every region, once they no longer fit under the limit together.
    fn engage(&self, native: &mut Native) -> Result<(), Error> {
        native.engaged = true;
        self.engine.engage();
        while let Some((start, end)) = native.first_waiting() {
            self.engine.adopt(start, end)?;
            native.waiting.remove(start, end);
        }
        Ok(())
    }

    /// Leaves a range of a region to the kernel for good, registered or not. Folios that are in the range in part
    /// are left whole.
    pub(crate) fn pin(&self, start: usize, end: usize) {
        let geometry = self.engine.geometry();
        let (start, end) = (geometry.base(start), geometry.base_above(end));
        // The lock is not held below, so another region may be registered meanwhile. What is taken out here never is.
        let waited = self.native.lock().waiting.remove(start, end);
        add(&self.engine.figures().pinned_bytes, waited as u64);
        if waited < end - start {
            self.engine.pin(start, end);
        }
    }

    /// Adds a mapped region, and registers the regions if they no longer fit under the limit. If any cannot be
    /// registered, the new one is unmapped: it may be registered by then. The others are tried again when the next
    /// region is added.
    fn add(&self, space: Reservation) -> Result<Reservation, Error> {
        let (start, end) = (space.address(), space.address() + space.bytes());
        let mut native = self.native.lock();
        native.bytes += (end - start) as u64;
        native.waiting.insert(start, end);
        let must_engage = native.engaged || native.bytes > self.engine.limit_bytes();
        let engaged = if must_engage { self.engage(&mut native) } else { Ok(()) };
        drop(native);
        if let Err(error) = engaged {
            self.remove(start, end, || drop(space));
            return Err(error);
        }
        Ok(space)
    }

    /// Forgets a region, and calls `unmap` to unmap it while no folio is moving in or out.
    pub(crate) fn remove(&self, start: usize, end: usize, unmap: impl FnOnce()) {
        self.native.lock().remove(start, end);
        let gone: Result<(), std::convert::Infallible> = self.engine.unmap(start, end, || {
            unmap();
            Ok(())
        });
        debug_assert!(gone.is_ok());
    }

    /// Whether this is a child of the process that made the pager (`LIB-2`).
    pub(crate) fn is_a_childs(&self) -> bool {
        self.process != process::id()
    }

    /// In strict mode: an error while the limit is passed.
    pub(crate) fn check_strict(&self) -> Result<(), Error> {
        if self.strict && !self.is_a_childs() { self.engine.check_limit() } else { Ok(()) }
    }
}

impl Native {
    fn first_waiting(&self) -> Option<(usize, usize)> {
        self.waiting.iter().next()
    }

    fn remove(&mut self, start: usize, end: usize) {
        self.bytes -= (end - start) as u64;
        self.waiting.remove(start, end);
    }
}

impl Drop for Core {
    #[allow(unsafe_code, reason = "frees what start() leaked")]
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if self.is_a_childs() {
            // The child has no thread to wait for, and frees nothing of the parent's (LIB-2).
            std::mem::forget((self.registered.take(), threads, self.notice.take()));
            return;
        }
        self.engine.stop();
        if let Some(notice) = self.notice.take() {
            notice.stop();
        }
        let this = std::thread::current().id();
        // If the program's function drops the last pager, this is the notice thread: it cannot join
        // itself, ends on its own, and does not use the engine. A thread that panicked has printed
        // its panic, so the result of `join` is not needed.
        threads
            .into_iter()
            .filter(|thread| thread.thread().id() != this)
            .for_each(|thread| drop(thread.join()));
        self.registered = None;
        // The thread that would have said so may have ended before its next turn.
        self.engine.tell_over_limit();
        // SAFETY: leaked by start(); its threads have ended, no handler can find it any more
        // (Registered::drop waited), and every region is gone, since each holds an Arc of us.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(self.engine).cast_mut()) });
    }
}

impl Pager {
    /// The default settings.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {
            limit_bytes: 0,
            algorithm: ALGORITHM_DEFAULT.to_owned(),
            unit_bytes: None,
            mode: Mode::default(),
            strict: false,
            spill: Places::default(),
            workers: 0,
            write_budget: WriteBudget::NONE.to_string(),
            name: String::new(),
            listed: true,
            callback: None,
        }
    }

    /// Maps a region of `bytes` zeros. It takes address space only, until it is touched.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`]: no address space, or too many mappings (`vm.max_map_count`).
    /// [`Error::OverLimit`] with [`Builder::strict`]. [`Error::Inherited`] in a child of `fork`.
    pub fn map(&self, bytes: usize) -> Result<Region, Error> {
        if self.0.is_a_childs() {
            return Err(Error::Inherited);
        }
        self.0.check_strict()?;
        let folio = self.0.engine.geometry().folio_bytes();
        let refused = |errno| Error::Memory { what: "mapping a region", errno };
        // A slice is at most isize::MAX long.
        let whole = bytes.max(1).checked_next_multiple_of(folio);
        let whole = whole.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or(Errno::NOMEM);
        let whole = whole.map_err(refused)?;
        let space = Reservation::for_program(whole, folio).map_err(refused)?;
        // A child would read zeros instead of compressed data, so it does not inherit the region:
        // its touch is an error instead. Besides, pages shared with a child could not be moved out.
        map::keep_from_children(space.address(), whole).map_err(refused)?;
        let space = self.0.add(space)?;
        Ok(Region::new(Arc::clone(&self.0), space, bytes))
    }

    /// Maps a slice of `length` values, all of them zero.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut distances = pager.map_slice::<f64>(1 << 20)?;
    /// distances[12345] = 0.5;
    /// let mut points = pager.map_slice::<[f32; 3]>(1000)?;
    /// points[7][2] = 1.0;
    /// assert_eq!(distances.iter().sum::<f64>(), 0.5);
    /// # Ok::<(), zfolio::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Pager::map`].
    pub fn map_slice<T: Pod>(&self, length: usize) -> Result<Slice<T>, Error> {
        let too_long = Error::Memory { what: "mapping a slice", errno: Errno::NOMEM };
        let bytes = length.checked_mul(size_of::<T>()).ok_or(too_long)?;
        Ok(Slice::new(self.map(bytes)?, length))
    }

    /// The figures so far; `{}` prints them as a few lines.
    ///
    /// ```
    /// # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
    /// let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
    /// let mut region = pager.map(64 << 20)?;
    /// region.fill(7);
    /// let stats = pager.stats();
    /// assert!(stats.charged_bytes() <= 18 << 20 && stats.figures.reclaim_same_filled > 0);
    /// println!("{stats}");
    /// # Ok::<(), zfolio::Error>(())
    /// ```
    ///
    /// In a child of `fork` they are those of the process that made the pager, as far as it has published them, with
    /// nothing mapped.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if self.0.is_a_childs() {
            return Stats::of(self.0.engine, 0);
        }
        self.0.engine.sample();
        Stats::of(self.0.engine, self.0.native.lock().bytes)
    }

    /// By how much the limit is passed now; `None` while it is held, and in a child of `fork`.
    #[must_use]
    pub fn over_limit(&self) -> Option<OverLimit> {
        if self.0.is_a_childs() { None } else { self.0.engine.excess() }
    }
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.0.engine.config();
        f.debug_struct("Pager")
            .field("limit_bytes", &config.limit_bytes)
            .field("mode", &config.mode)
            .field("algorithm", &format_args!("{}", config.algorithm))
            .field("unit_bytes", &config.unit.bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::Arc;

    use zfolio_core::page::PAGE_BYTES;

    use super::{Error, Mode, Pager, Region, Reservation};

    const MIB: usize = 1 << 20;

    /// Goal: a region that was refused is not managed once it is gone. Method: of an older region, in which a file is
    /// mapped, the registration fails, after that of the new one, which is at a lower address. The new one stayed in
    /// the table, so what the program mapped there later was taken for managed memory.
    #[test]
    #[allow(unsafe_code, reason = "maps a file in a region")]
    fn a_refused_region_is_not_managed() {
        if let Err(why) = Mode::Inline.check() {
            return eprintln!("SKIPPED: {why}");
        }
        let pager = Pager::builder().limit(8 << 20).build().unwrap();
        let core = &pager.0;
        let folio = core.engine.geometry().folio_bytes();
        let mut spaces = [(); 2].map(|()| Reservation::for_program(6 * MIB, folio).unwrap());
        spaces.sort_by_key(Reservation::address);
        let [new, old] = spaces;
        let old = Region::new(Arc::clone(core), core.add(old).unwrap(), 6 * MIB);

        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let place = std::ptr::from_ref(&old[MIB]).cast_mut();
        let (read, fixed) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_FIXED);
        // SAFETY: the page is the region's, and nobody looks at it.
        let mapped =
            unsafe { libc::mmap(place.cast(), PAGE_BYTES, read, fixed, file.as_raw_fd(), 0) };
        assert_eq!(mapped, place.cast());

        let new_at = new.address();
        let refused = core.add(new);
        assert!(matches!(refused, Err(Error::Memory { .. })), "{refused:?}");
        assert!(!core.engine.table.read().manages(new_at));
        assert_eq!(pager.stats().mapped_bytes, 6 << 20);
        drop(old);
        let mut region = pager.map(16 * MIB).unwrap();
        region.fill(7);
        assert!(region.iter().all(|byte| *byte == 7));
    }
}
