//! `--accelerate`: what compresses beside the threads that have data to compress.

use zfolio_sys::cpu;
use zfolio_workers::CREW_MAX;

/// The CPU's other cores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Accelerator {
    /// `None`: a thread for each CPU but one, at least one.
    workers: Option<usize>,
}

impl Accelerator {
    /// Reads what a user has written.
    ///
    /// # Errors
    ///
    /// What is accepted, in one line.
    pub(crate) fn parse(text: &str) -> Result<Accelerator, String> {
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
    pub(crate) fn workers(self) -> usize {
        self.workers.unwrap_or_else(|| (cpu::online() - 1).clamp(1, CREW_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::Accelerator;

    #[test]
    fn what_is_not_known_is_refused() {
        assert_eq!(Accelerator::parse("cpu=7").map(Accelerator::workers), Ok(7));
        assert!(Accelerator::parse("cpu").is_ok_and(|accelerator| accelerator.workers() >= 1));
        for text in ["", "cpu=", "cpu=0", "cpu=65", "cpu=x", "cpu=-1", "iaa", "CPU", "gpu=2"] {
            let refused = Accelerator::parse(text).unwrap_err();
            assert!(refused.starts_with("accepted: cpu, or cpu=N"), "{text}: {refused}");
        }
    }
}
