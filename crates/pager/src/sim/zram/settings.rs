//! What a seed chooses before a disk's run begins.

use zfolio_core::budget::{Period, WriteBudget};
use zfolio_core::page::UnitOrder;

use super::super::disk::Faults;
use super::super::random::Random;

/// The backing of a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spill {
    /// How much it keeps.
    pub(super) bytes_max: usize,
    pub(super) faults: Faults,
    /// What the disk may write to it by itself.
    pub(super) budget: WriteBudget,
    /// The real areas are there, and not a disk that keeps objects one by one.
    pub(super) areas: bool,
}

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) unit: UnitOrder,
    /// Units at first.
    pub(super) units: usize,
    /// Units of the largest disk.
    pub(super) units_max: usize,
    /// By their priority.
    pub(super) algorithms: &'static [&'static str],
    /// Pages that are written in part of a unit are kept apart.
    pub(super) apart: bool,
    /// Units that the codecs take at once.
    pub(super) batch: usize,
    /// The codecs begin to fail once in so many units; 0 is never.
    pub(super) codec_fails: usize,
    pub(super) cpus: usize,
    pub(super) clients: usize,
    /// Requests of each client.
    pub(super) steps: usize,
    /// Most requests are for the first units, so many.
    pub(super) hot_units: usize,
    /// The pool gets no memory once in so many requests; 0 is never.
    pub(super) pool_refuses: usize,
    /// Memory is limited now and then.
    pub(super) limits: bool,
    /// The disk grows and shrinks.
    pub(super) resizes: bool,
    /// All contents are dropped now and then.
    pub(super) resets: bool,
    pub(super) spill: Option<Spill>,
}

impl Settings {
    /// The settings of a seed.
    pub(super) fn of(seed: u64) -> Settings {
        let random = &mut Random::new(seed, 41);
        let unit_bytes = random.of(&[4, 16, 16, 32, 64]) << 10;
        // At most 1 MiB.
        let units_max = random.of(&[6, 16, 16, 40]).min((1 << 20) / unit_bytes);
        let hostile = random.one_in(2);
        let mut sometimes = |chances: &[usize]| {
            let chosen = random.of(chances);
            if hostile { chosen } else { 0 }
        };
        let (codec_fails, pool_refuses) = (sometimes(&[0, 0, 10, 100]), sometimes(&[0, 3, 20]));
        Settings {
            unit: UnitOrder::from_bytes(unit_bytes).expect("a unit"),
            units: units_max.div_ceil(2) + random.below(units_max / 2 + 1),
            units_max,
            algorithms: random.of(&[
                &["lz4", "zstd"][..],
                &["lz4", "zstd"],
                &["lzo-rle"],
                &["zstd"],
            ]),
            apart: !random.one_in(4),
            batch: random.of(&[1, 1, 5]),
            codec_fails,
            cpus: random.of(&[1, 2, 3]),
            clients: random.of(&[1, 2, 3, 4]),
            steps: random.of(&[20, 60, 120]),
            hot_units: random.of(&[1, 2, 4, units_max]).min(units_max),
            pool_refuses,
            limits: random.one_in(2),
            resizes: random.one_in(2),
            resets: random.one_in(3),
            spill: if random.one_in(2) { None } else { Some(Spill::of(random)) },
        }
    }

    pub(super) fn sectors_max(&self) -> usize {
        self.units_max * self.unit_sectors()
    }

    pub(super) fn unit_sectors(&self) -> usize {
        self.unit.bytes() / super::model::SECTOR_BYTES
    }
}

impl Spill {
    fn of(random: &mut Random) -> Spill {
        let refuses = random.of(&[0, 0, 5, 50]);
        // Requests that fail besides could make a wait too long.
        let outages = if refuses == 0 { random.of(&[0, 10, 100]) } else { 0 };
        let faults =
            Faults { refuses, outages, is_lasting: false, stalls: random.of(&[0, 100, 1000]) };
        let budget = WriteBudget::new(random.of(&[0, 0, 0, 1 << 18]), Period::Run);
        Spill {
            bytes_max: random.of(&[1 << 16, 1 << 18, 64 << 20, 64 << 20]),
            faults,
            budget: budget.unwrap_or_default(),
            areas: random.one_in(3),
        }
    }
}
