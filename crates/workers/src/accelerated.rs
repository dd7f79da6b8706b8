//! What compresses and decompresses beside the threads that have data: workers, or hardware.

use std::fmt;
use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{Backend, Error, Params, Zcomp};

use crate::crew::Crew;
use crate::workers::with_crew;

/// See the module.
#[derive(Clone, Debug)]
pub enum Accelerated {
    /// So many threads of a crew, together with those that submit.
    Workers(usize),
    /// Hardware, in the place of the codecs that it has.
    Hardware(Arc<dyn Hardware>),
}

/// An accelerator that has some codecs, with its driver.
pub trait Hardware: Send + Sync + fmt::Debug {
    /// The accelerator as the codec with these parameters, whose format it reads and writes; `None`: it does not have
    /// that codec.
    fn codec(&self, params: &Params) -> Option<Box<dyn Backend>>;

    /// The figures of this name, in lines: one of [`HARDWARE_STATS`].
    fn stats(&self, name: &str) -> String;

    /// Looks whether hardware has come or gone, if it is time to: to be called several times a second, on a thread
    /// whose files it may open, while no fork of this process is under way. It does not wait for hardware.
    fn look(&self, now_ns: u64);

    /// In a child of `fork`, on its only thread: the child has its parent's codecs in memory. By itself an
    /// accelerator leaves their work to software there; after this call it may use queues of the child's own.
    fn start_over(&self);
}

/// The names of figures of an accelerator: two of the kernel's, and one for what the kernel does not count.
pub const HARDWARE_STATS: [&str; 3] = ["global_stats", "driver_stats", "wq_stats"];

impl Accelerated {
    /// By nothing.
    pub const NONE: Accelerated = Accelerated::Workers(0);

    /// How many threads the crew is to have.
    #[must_use]
    pub fn workers(&self) -> usize {
        match self {
            Accelerated::Workers(workers) => *workers,
            Accelerated::Hardware(_) => 0,
        }
    }

    /// The hardware, if it is that.
    #[must_use]
    pub fn hardware(&self) -> Option<&dyn Hardware> {
        match self {
            Accelerated::Workers(_) => None,
            Accelerated::Hardware(hardware) => Some(&**hardware),
        }
    }

    /// Sets up a codec: by the hardware if it has that codec, else by software, whose batches the crew works on.
    ///
    /// # Errors
    ///
    /// Those of [`Zcomp::new`].
    pub fn zcomp(
        &self,
        params: Params,
        unit: UnitOrder,
        streams: usize,
        crew: &Arc<Crew>,
    ) -> Result<Zcomp, Error> {
        match self.hardware() {
            None => with_crew(params, unit, streams, crew),
            Some(hardware) => {
                let its = params.clone();
                let instead = |software| Ok(hardware.codec(&its).unwrap_or(software));
                Zcomp::around(params, unit, streams, &instead)
            }
        }
    }
}
