//! A device that does what a script of bytes says, for fuzzing: records that lie, and output that is noise.

use std::sync::Arc;

use zfolio_core::zcomp::{Answer, Backend as _};

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

/// What the streams are made for.
const UNIT: usize = 4096;

/// The unit of a script: short, since a fuzzer's speed is what counts.
const TEXT: [u8; 320] = {
    let words = b"one unit, to be had back ";
    let (mut text, mut at) = ([0; 320], 0);
    while at < text.len() {
        text[at] = words[at % words.len()];
        at += 1;
    }
    text
};

const GUARD: u8 = 0xA5;

/// `TEXT` and some bytes behind it that nobody may write.
const PLACE_BYTES: usize = TEXT.len() + 64;

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
    loop {
        let (lies, is_last) = (model.lies(), model.is_honest());
        let mut packed = [GUARD; PLACE_BYTES];
        let answer = compressor.compress_unit(&TEXT, &mut packed[..TEXT.len()]);
        assert!(packed[TEXT.len()..] == [GUARD; 64], "wrote behind the unit");
        if let Answer::Compressed(bytes) = answer {
            assert!((1..=TEXT.len()).contains(&bytes), "{bytes}");
            let is_sound = model.lies() == lies;
            let mut place = [GUARD; PLACE_BYTES];
            let result = decompressor.decompress(&packed[..bytes], &mut place[..TEXT.len()]);
            assert!(place[TEXT.len()..] == [GUARD; 64], "wrote behind the unit");
            assert!(result.is_ok() || !is_sound, "software reads what an honest device wrote");
            let is_right = result.is_ok() && place[..TEXT.len()] == TEXT;
            assert!(is_right || model.lies() > lies, "honest, and wrong");
        } else {
            assert!(model.lies() > lies, "an honest device failed: {answer:?}");
        }
        if is_last {
            break;
        }
    }
    assert_eq!(driver.driver_stats().in_flight, 0);
}

impl Model {
    /// How often the script has changed something.
    fn lies(&self) -> u64 {
        self.0.lock().counts.faults[4]
    }

    /// Whether the script is over.
    fn is_honest(&self) -> bool {
        self.0.lock().script.bytes.len() == 0
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
