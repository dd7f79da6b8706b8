//! A device that does what a script of bytes says, for fuzzing: records that lie, and output that is noise.

use std::sync::Arc;

use zfolio_core::page::UnitOrder;
use zfolio_core::zcomp::{Answer, Backend as _, Bare};

use super::engine::Done;
use super::{Model, Setup};
use crate::layout::Record;
use crate::{Codes, Driver, Iaa, Settings, WorkQueue};

/// What the model does to its next jobs.
#[derive(Debug, Default)]
pub(super) struct Script {
    bytes: std::vec::IntoIter<u8>,
}

impl Script {
    fn byte(&mut self) -> Option<u8> {
        self.bytes.next()
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte().unwrap_or(0)))
    }

    /// Changes the result of a job, as the next byte says: nothing, the record or the output. True: it did.
    pub(super) fn change(&mut self, done: &mut Done) -> bool {
        let Some(what) = self.byte() else { return false };
        if what & 1 == 1 {
            done.record = Record {
                // A record without a status would never be seen.
                status: self.byte().unwrap_or(1).max(1),
                error: self.byte().unwrap_or(0),
                bytes_completed: self.word(),
                fault_address: u64::from(self.word()) << 32 | u64::from(self.word()),
                output_bytes: self.word(),
                crc: self.word(),
                ..done.record
            };
        }
        if what & 2 == 2 {
            for place in &mut done.output {
                *place = self.bytes.next().unwrap_or(*place);
            }
        }
        what & 3 != 0
    }
}

const UNIT: usize = 4096;
const GUARD: u8 = 0xA5;

/// Runs one script: a unit goes to a hostile device and comes back, as often as the script lasts. The device may give
/// other bytes, which the checksum of a store finds; it never writes outside of the unit, and without lies the same
/// streams give the same bytes.
///
/// # Panics
///
/// If that is not so.
pub fn play(script: &[u8]) {
    let model = Model::new(Setup { script: script.to_vec(), ..Setup::default() });
    let settings = Settings { verify_compress: script.len() % 2 == 1, ..Settings::default() };
    let driver = Arc::new(Driver::new(settings, vec![0]));
    let (name, portal) = ("wq1.0".to_owned(), Box::new(model.clone()));
    let queue = WorkQueue { name, device: 1, package: 0, depth: 8, portal };
    driver.add([queue]).expect("it is the first");
    let codes = if script.len() % 3 == 0 { Codes::Dynamic } else { Codes::Fixed };
    let backend = Iaa::new(&driver, codes);
    let mut compressor = backend.compressor(UNIT).expect("there is memory");
    let mut decompressor = backend.decompressor(UNIT).expect("there is memory");
    let unit: Vec<u8> = b"one unit, to be had back ".iter().copied().cycle().take(UNIT).collect();
    for _ in 0..64 {
        let lies = model.lies();
        let mut packed = vec![GUARD; UNIT + 64];
        let answer = compressor.compress_unit(&unit, &mut packed[..UNIT]);
        assert!(packed[UNIT..] == [GUARD; 64], "wrote behind the unit");
        let Answer::Compressed(bytes) = answer else {
            assert!(model.lies() > lies, "an honest device failed: {answer:?}");
            continue;
        };
        assert!((1..=UNIT).contains(&bytes), "{bytes}");
        let is_honest = model.lies() == lies;
        let mut place = vec![GUARD; UNIT + 64];
        let result = decompressor.decompress(&packed[..bytes], &mut place[..UNIT]);
        assert!(place[UNIT..] == [GUARD; 64], "wrote behind the unit");
        if model.lies() == lies {
            assert!(result.is_ok() && place[..UNIT] == unit, "honest, and wrong");
        } else if is_honest && result.is_err() {
            panic!("software reads what an honest device wrote");
        }
    }
    assert_eq!(driver.driver_stats().in_flight, 0);
    let mut place = vec![0; UNIT];
    let mut packed = vec![0; UNIT];
    let order = UnitOrder::from_bytes(UNIT).expect("a unit's size");
    let mut software =
        Bare::new(&"deflate".parse().expect("a name"), order).expect("there is memory");
    let bytes = software.compress(&unit, &mut packed).expect("it repeats");
    model.end_script();
    assert!(decompressor.decompress(&packed[..bytes], &mut place).is_ok() && place == unit);
}

impl Model {
    /// How often the script has changed something.
    fn lies(&self) -> u64 {
        self.0.lock().counts.faults[4]
    }

    /// From now on the device is honest.
    fn end_script(&self) {
        self.0.lock().script = Script::default();
    }
}

impl From<Vec<u8>> for Script {
    fn from(bytes: Vec<u8>) -> Script {
        Script { bytes: bytes.into_iter() }
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::{Random, seed};

    /// Goal: the fuzz target's run holds for random scripts.
    #[test]
    fn scripts_of_lies_harm_nobody() {
        let mut random = Random::new(seed());
        for length in 0..300 {
            super::play(&random.bytes(length * 3));
        }
    }
}
