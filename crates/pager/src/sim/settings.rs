//! What a seed chooses before a run begins.

use zfolio_core::page::{PAGE_BYTES, UnitOrder};

use super::random::Random;
use super::space::Refusals;
use crate::config::{Config, Mode};

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) mode: Mode,
    pub(super) unit: UnitOrder,
    pub(super) algorithm: &'static str,
    /// The limit, without the bytes that codec streams take.
    pub(super) limit_bytes: u64,
    pub(super) cpus: usize,
    /// Threads of the program.
    pub(super) threads: usize,
    /// Steps of each thread.
    pub(super) steps: usize,
    /// Pages of address space.
    pub(super) pages: usize,
    /// Pages of the mapping that the program begins with.
    pub(super) pages_first: usize,
    pub(super) refusals: Refusals,
    /// The pool gets no memory once in so many requests; 0 is never.
    pub(super) pool_refuses: usize,
    /// One of so many written pages does not compress; 0 is none.
    pub(super) noise: usize,
    /// Mappings change, also without the engine's knowledge in handler mode.
    pub(super) changes: bool,
    /// Pages are pinned, shared with children and made read-only.
    pub(super) fixed: bool,
    /// Bits of the pool flip.
    pub(super) flips: bool,
}

impl Settings {
    /// The settings of a seed.
    pub(super) fn of(seed: u64) -> Settings {
        let random = &mut Random::new(seed, 1);
        let mode = random.of(&[Mode::Handler, Mode::Handler, Mode::Inline]);
        let unit = UnitOrder::from_bytes(random.of(&[4, 16, 16, 64]) << 10).expect("a unit");
        let hostile = random.one_in(2);
        let mut sometimes = |chances: &[usize]| {
            let chosen = random.of(chances);
            if hostile { chosen } else { 0 }
        };
        let refusals = Refusals {
            again: sometimes(&[0, 20, 200]),
            short: sometimes(&[0, 4, 30]),
            denied: sometimes(&[0, 20, 200]),
            register: sometimes(&[0, 0, 10]),
            signal: sometimes(&[0, 1]) == 1,
            swap: sometimes(&[0, 0, 20]),
        };
        let pool_refuses = sometimes(&[0, 3, 20]);
        // 1.5 to 4 MiB of room, for 3 to 10 MiB of memory.
        let limit_bytes = (6 + random.below(11) as u64) << 18;
        let pages_first = (3 << 8) + random.below(7 << 8);
        Settings {
            mode,
            unit,
            algorithm: random.of(&["auto", "auto", "lz4", "zstd", "deflate"]),
            limit_bytes,
            cpus: random.of(&[1, 2, 3]),
            threads: 1 + random.below(3),
            steps: random.of(&[20, 60, 120]),
            pages: 4096,
            pages_first,
            refusals,
            pool_refuses,
            noise: random.of(&[0, 0, 2, 10]),
            changes: random.one_in(2),
            fixed: random.one_in(2),
            flips: false,
        }
    }

    /// Whether the engine must be able to hold its limit.
    pub(super) fn is_calm(&self) -> bool {
        self.noise == 0 && self.pool_refuses == 0 && !self.fixed && self.refusals.register == 0
    }

    /// The engine's settings.
    pub(super) fn config(&self, stream_bytes: usize) -> Config {
        Config {
            limit_bytes: self.limit_bytes + stream_bytes as u64,
            algorithm: self.algorithm.parse().expect("the name of an algorithm"),
            unit: self.unit,
            mode: self.mode,
            whole_process: false,
            strict: false,
        }
    }

    /// Mapped ranges are a multiple of so many pages: regions of the library consist of whole
    /// folios.
    pub(super) fn grain(&self) -> usize {
        match self.mode {
            Mode::Inline => self.unit.folio().bytes() / PAGE_BYTES,
            Mode::Handler => 1,
        }
    }
}
