//! The library's face: a pager with a limit, and regions that are larger than it.
//!
//! A [`Region`] derefs to `[u8]`. Below the limit it is ordinary memory; once the regions of a pager
//! together are larger than the limit, each is registered, and what was not touched for a while is
//! compressed.
//!
//! # What inline mode cannot do
//!
//! The *kernel's* own accesses to a compressed page fail: `read(2)` into a region, or `write(2)` from
//! one, returns `EFAULT` (or a short count). Call [`Region::prefault`] on the part first, or
//! [`Region::pin`] it for good; `std::io::Read::read` into a region's slice is such an access. A child
//! of `fork` must not touch a region: it would read zeros where data was compressed.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::thread::JoinHandle;

use zfolio_core::page::{PAGE_BYTES, UnitOrder};
use zfolio_core::stats::Stats;
use zfolio_core::sync::Mutex;
use zfolio_core::zcomp::ALGORITHM_DEFAULT;
use zfolio_sys::map::Reservation;
use zfolio_sys::{Errno, signal};

use crate::config::{Config, Error, Mode, with_dictionary};
use crate::engine::Engine;
use crate::inline::{self, Registered};

/// Settings of a [`Pager`], with defaults: those of `zfolio run`, 16 KiB units and zstd.
#[derive(Clone, Debug)]
pub struct Builder {
    limit_bytes: u64,
    algorithm: String,
    unit_bytes: usize,
    strict: bool,
}

impl Builder {
    /// What the regions may hold in all: resident, staged, compressed, and tables. Required.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Builder {
        self.limit_bytes = bytes;
        self
    }

    /// The codec, as `"zstd"` or `"zstd,level=3,dict=FILE"`.
    #[must_use]
    pub fn algorithm(mut self, name: &str) -> Builder {
        name.clone_into(&mut self.algorithm);
        self
    }

    /// Bytes compressed as one object: a power of two from 4 KiB to 2 MiB.
    #[must_use]
    pub fn unit(mut self, bytes: usize) -> Builder {
        self.unit_bytes = bytes;
        self
    }

    /// End the process rather than go over the limit.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Builder {
        self.strict = strict;
        self
    }

    /// Sets the pager up.
    ///
    /// # Errors
    ///
    /// A setting is not accepted, or the kernel cannot do it: see [`Error`].
    pub fn build(self) -> Result<Pager, Error> {
        let params = self
            .algorithm
            .parse()
            .and_then(with_dictionary)
            .map_err(|error| Error::Algorithm(format!("algorithm: {error}")))?;
        let unit =
            UnitOrder::from_bytes(self.unit_bytes).ok_or(Error::Unit { given: self.unit_bytes })?;
        let config = Config {
            limit_bytes: self.limit_bytes,
            params,
            unit,
            mode: Mode::Inline,
            whole_process: false,
            strict: self.strict,
        };
        let algorithm = config.params.to_string();
        let engine = Engine::new(config, Box::new(Box::<Stats>::default()))?;
        engine.stats().publish(zfolio_sys::process::id(), 0, 0, &algorithm, "");
        Ok(Pager(Arc::new(Core::start(engine)?)))
    }
}

/// Managed memory with a limit. Cheap to clone; everything is given back when the last clone and the
/// last region are gone.
#[derive(Clone, Debug)]
pub struct Pager(Arc<Core>);

/// The engine with its threads.
#[derive(Debug)]
struct Core {
    /// Owned: made by `Box::leak`, freed in `drop` once nobody can reach it.
    engine: &'static Engine,
    registered: Option<Registered>,
    threads: Vec<JoinHandle<()>>,
    /// Regions that are not registered yet: together they fit.
    native: Mutex<1, Native>,
}

#[derive(Debug, Default)]
struct Native {
    bytes: u64,
    engaged: bool,
    regions: Vec<(usize, usize)>,
}

impl Core {
    fn start(engine: Engine) -> Result<Core, Error> {
        let engine: &'static Engine = Box::leak(Box::new(engine));
        let registered = inline::register(engine);
        let mut core =
            Core { engine, registered, threads: Vec::new(), native: Mutex::new(Native::default()) };
        if core.registered.is_none() {
            return Err(Error::Codec(format!(
                "more than {} pagers in one process",
                inline::ENGINES
            )));
        }
        let mask = signal::block_all();
        let spawn = |name: &str, life: fn(&Engine)| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || life(engine)).map_err(|_| Error::Memory {
                what: "starting a thread",
                errno: zfolio_sys::Errno::AGAIN,
            })
        };
        let threads = [
            spawn("zfolio-reclaim", Engine::reclaim_in_background),
            spawn("zfolio-prefetch", Engine::prefetch_in_background),
        ];
        signal::restore(&mask);
        for thread in threads {
            core.threads.push(thread?);
        }
        Ok(core)
    }

    /// Registers every region, the first time that they do not fit together.
    fn engage(&self, native: &mut Native) -> Result<(), Error> {
        native.engaged = true;
        self.engine.engage();
        native.regions.drain(..).try_for_each(|(start, end)| self.engine.adopt(start, end))
    }
}

impl Drop for Core {
    #[allow(unsafe_code, reason = "frees what start() leaked")]
    fn drop(&mut self) {
        self.engine.stop();
        for thread in self.threads.drain(..) {
            // A thread that panicked has told so; there is nothing to add.
            drop(thread.join());
        }
        self.registered = None;
        // SAFETY: leaked by start(); its threads have ended, no handler can find it any more
        // (Registered::drop waited), and every region is gone, since each holds an Arc of us.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(self.engine).cast_mut()) });
    }
}

impl Pager {
    /// Settings to start from.
    #[must_use]
    pub fn builder() -> Builder {
        Builder {
            limit_bytes: 0,
            algorithm: ALGORITHM_DEFAULT.to_owned(),
            unit_bytes: UnitOrder::DEFAULT.bytes(),
            strict: false,
        }
    }

    /// Maps a region of `bytes` zeros.
    ///
    /// # Errors
    ///
    /// No address space, or the kernel refuses to register it.
    pub fn map(&self, bytes: usize) -> Result<Region, Error> {
        let folio = self.0.engine.shape.folio_bytes();
        let refused = |errno| Error::Memory { what: "mapping a region", errno };
        // A slice is at most isize::MAX long.
        let whole = bytes.max(1).checked_next_multiple_of(folio);
        let whole = whole.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or(Errno::NOMEM);
        let whole = whole.map_err(refused)?;
        let space = Reservation::for_program(whole, folio).map_err(refused)?;
        let (start, end) = (space.address(), space.address() + whole);
        let mut native = self.0.native.lock();
        native.bytes += whole as u64;
        native.regions.push((start, end));
        if native.engaged || native.bytes > self.0.engine.config().limit_bytes {
            self.0.engage(&mut native)?;
        }
        drop(native);
        Ok(Region { core: Arc::clone(&self.0), space, bytes })
    }

    /// The figures so far.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        self.0.engine.sample();
        self.0.engine.stats()
    }
}

/// Memory of a [`Pager`]; derefs to `[u8]`. Unmapped when dropped.
#[derive(Debug)]
pub struct Region {
    core: Arc<Core>,
    space: Reservation,
    bytes: usize,
}

impl Region {
    /// Makes the pages of `range` resident, so that the kernel can reach them in the next moments.
    ///
    /// They can be taken again at any time: for a call that may block, [`Region::pin`] them.
    pub fn prefault(&self, range: Range<usize>) {
        for at in (range.start..range.end.min(self.bytes))
            .step_by(PAGE_BYTES)
            .chain(range.end.checked_sub(1))
        {
            if let Some(byte) = self.get(at) {
                std::hint::black_box(*byte);
            }
        }
    }

    /// Keeps the folios of `range` resident for good, outside of the limit's reach.
    pub fn pin(&self, range: Range<usize>) {
        let start = self.space.address();
        let (from, to) = (start + range.start.min(self.bytes), start + range.end.min(self.bytes));
        self.core.engine.pin(from, to);
    }

    /// Drops the contents of the whole units in `range`: they read as zeros.
    #[allow(unsafe_code, reason = "the pages are the region's own")]
    pub fn clear(&mut self, range: Range<usize>) {
        let unit = self.core.engine.shape.unit_bytes();
        let start = self.space.address();
        let from = start + range.start.min(self.bytes).next_multiple_of(unit);
        let to = start + range.end.min(self.bytes) / unit * unit;
        if from < to {
            // SAFETY: `&mut self`: nobody else looks at the region's bytes.
            let call = |at, bytes| unsafe { zfolio_sys::map::release(at, bytes) };
            // It fails for ranges that are not mapped only.
            self.core.engine.discard(from, to, call).ok();
        }
    }
}

impl Deref for Region {
    type Target = [u8];
    #[allow(unsafe_code, reason = "the view of the mapping")]
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is at least `bytes` long, readable, and lives as long as `self`; a
        // missing page is served by the engine, which `core` keeps alive.
        unsafe { std::slice::from_raw_parts(self.space.base().as_ptr(), self.bytes) }
    }
}

impl DerefMut for Region {
    #[allow(unsafe_code, reason = "the view of the mapping")]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref(), and `&mut self` is the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.space.base().as_ptr(), self.bytes) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let (start, end) = (self.space.address(), self.space.address() + self.space.bytes());
        let mut native = self.core.native.lock();
        native.bytes -= self.space.bytes() as u64;
        native.regions.retain(|region| *region != (start, end));
        drop(native);
        // Forgotten before the mapping goes (fields drop after this), so that no folio moves there.
        let forgotten: Result<(), std::convert::Infallible> =
            self.core.engine.unmap(start, end, || Ok(()));
        debug_assert!(forgotten.is_ok());
    }
}
