//! `--accelerate`: what compresses beside the threads that have data to compress.

use std::fmt;

use zfolio_sys::cpu;

use crate::crew::CREW_MAX;

/// So many workers: the machine's other CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Accelerator {
    /// `None`: a thread for each CPU but one, at least one.
    workers: Option<usize>,
}

impl Accelerator {
    /// Reads what a user has written.
    ///
    /// # Errors
    ///
    /// What is accepted, in one line.
    pub fn parse(text: &str) -> Result<Accelerator, String> {
        let accepted = || format!("accepted: cpu, or cpu=N with 1 to {CREW_MAX} threads");
        let workers = match text.split_once('=') {
            None if text == "cpu" => return Ok(Accelerator { workers: None }),
            Some(("cpu", number)) => number.parse().map_err(|_| accepted())?,
            _ => return Err(accepted()),
        };
        let is_good = (1..=CREW_MAX).contains(&workers);
        is_good.then_some(Accelerator { workers: Some(workers) }).ok_or_else(accepted)
    }

    /// How many threads there are to be on this machine.
    #[must_use]
    pub fn workers(self) -> usize {
        self.workers.unwrap_or_else(|| (cpu::online() - 1).clamp(1, CREW_MAX))
    }
}

impl fmt::Display for Accelerator {
    /// As [`Accelerator::parse`] reads it, with the number for this machine.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu={}", self.workers())
    }
}

#[cfg(test)]
mod tests {
    use super::Accelerator;

    #[test]
    fn what_is_not_known_is_refused() {
        assert_eq!(Accelerator::parse("cpu=7").map(Accelerator::workers), Ok(7));
        let here = Accelerator::parse("cpu").unwrap();
        assert!(here.workers() >= 1);
        let again = Accelerator::parse(&here.to_string());
        assert_eq!(again.map(Accelerator::workers), Ok(here.workers()));
        for text in ["", "cpu=", "cpu=0", "cpu=65", "cpu=x", "cpu=-1", "iaa", "CPU", "gpu=2"] {
            let refused = Accelerator::parse(text).unwrap_err();
            assert!(refused.starts_with("accepted: cpu, or cpu=N"), "{text}: {refused}");
        }
    }
}
