//! A codec that fails now and then, like an accelerator that loses its connection: some units in a row are not
//! compressed. With [`Damage::Decoder`] it also gives back something else than what it was given.

use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{
    Answer, Backend, Bare, Compressor, Corrupt, Decompressor, Error, Params, Zcomp,
};

use super::accelerator::{self, Accelerator};
use super::random::Random;
use super::settings::{Damage, Settings};

/// The most units in a row that are not compressed.
const FAILURES_MAX: usize = 12;

/// A damaged decoder damages one unit in so many.
const DAMAGE_IN: usize = 20;

/// See the module.
struct Faulty {
    params: Params,
    unit: UnitOrder,
    seed: u64,
    fails: usize,
    damage: bool,
    /// Units that it takes at once.
    batch: usize,
}

/// One direction of one stream.
struct Stream {
    codec: Bare,
    random: Random,
    /// It begins to fail once in so many units.
    fails: usize,
    /// Units that will still fail.
    failures_left: usize,
    damage: bool,
}

/// The codecs of a run.
pub(super) fn codecs(
    seed: u64,
    settings: &Settings,
    accelerator: Option<&Arc<Accelerator>>,
    streams: usize,
) -> Vec<Zcomp> {
    let all = settings.config(0).algorithm.codecs().into_iter();
    let codec = |params| match accelerator {
        Some(accelerator) if settings.damage != Some(Damage::Decoder) => {
            accelerated(accelerator, (params, settings.unit), streams)
        }
        _ => codec(seed, settings, (params, settings.unit), streams),
    };
    all.map(codec).collect()
}

/// The codec for wide units, if there are any.
pub(super) fn wide(seed: u64, settings: &Settings, streams: usize) -> Option<Zcomp> {
    let config = settings.config(0);
    let (unit, params) = (config.wide_unit()?, config.algorithm.codecs().pop()?);
    Some(codec(seed, settings, (params, unit), streams))
}

fn codec(
    seed: u64,
    settings: &Settings,
    (params, unit): (Params, UnitOrder),
    streams: usize,
) -> Zcomp {
    let damage = settings.damage == Some(Damage::Decoder);
    let zcomp = if damage || settings.codec_fails > 0 {
        let fails = settings.codec_fails;
        Zcomp::with_backend(&Faulty { params, unit, seed, fails, damage, batch: 1 }, unit, streams)
    } else {
        Zcomp::new(params, unit, streams)
    };
    zcomp.expect("the parameters are accepted")
}

fn accelerated(
    accelerator: &Arc<Accelerator>,
    (params, unit): (Params, UnitOrder),
    streams: usize,
) -> Zcomp {
    let codec = || accelerator::Codec(Arc::clone(accelerator));
    let accelerate = |_| Ok(Box::new(codec()) as Box<dyn Backend>);
    Zcomp::around(params, unit, streams, &accelerate).expect("the parameters are accepted")
}

/// A codec of a disk, which begins to fail once in `fails` units, and takes `batch` units at once.
pub(super) fn of_disk(
    seed: u64,
    (params, unit): (Params, UnitOrder),
    streams: usize,
    (fails, batch): (usize, usize),
) -> Zcomp {
    let faulty = |params| Faulty { params, unit, seed, fails, damage: false, batch };
    let accelerate = |_| Ok(Box::new(faulty(params.clone())) as Box<dyn Backend>);
    Zcomp::around(params.clone(), unit, streams, &accelerate).expect("the parameters are accepted")
}

impl Faulty {
    fn stream(&self, direction: u64) -> Result<Box<Stream>, Error> {
        Ok(Box::new(Stream {
            codec: Bare::new(&self.params, self.unit)?,
            random: Random::new(self.seed, direction),
            fails: self.fails,
            failures_left: 0,
            damage: self.damage,
        }))
    }
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn batch_max(&self) -> usize {
        self.batch
    }

    fn compressor(&self, _: usize) -> Result<Box<dyn Compressor>, Error> {
        Ok(self.stream(4)?)
    }

    fn decompressor(&self, _: usize) -> Result<Box<dyn Decompressor>, Error> {
        Ok(self.stream(5)?)
    }
}

impl Compressor for Stream {
    fn compress_unit(&mut self, source: &[u8], dest: &mut [u8]) -> Answer {
        if self.failures_left == 0 && self.random.one_in(self.fails) {
            self.failures_left = 1 + self.random.below(FAILURES_MAX);
        }
        if self.failures_left > 0 {
            self.failures_left -= 1;
            dest.fill(0xA5);
            // A device may also report a length that cannot be.
            let lengths = [Answer::Failed, Answer::Compressed(0), Answer::Compressed(usize::MAX)];
            return self.random.of(&lengths);
        }
        self.codec.compress(source, dest).map_or(Answer::Incompressible, Answer::Compressed)
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

impl Decompressor for Stream {
    fn decompress(&mut self, source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
        let whole = self.codec.decompress(source, dest);
        if self.damage && self.random.one_in(DAMAGE_IN) {
            if self.random.one_in(2) {
                return Err(Corrupt);
            }
            let at = self.random.below(dest.len());
            dest[at] ^= 1;
        }
        if whole { Ok(()) } else { Err(Corrupt) }
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}
