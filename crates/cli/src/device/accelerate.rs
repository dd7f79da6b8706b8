//! `--accelerate` of a disk, and the algorithms that an accelerator adds.

use std::path::Path;
use std::sync::Arc;

use zfolio_block::ram::{Accelerated, Hardware};
use zfolio_core::zcomp::{Backend, Params};
use zfolio_iaa::backend::has_format_of;
use zfolio_iaa::model::{Model, Setup};
use zfolio_iaa::{Codes, Driver, Iaa, Settings, WorkQueue, discover};
use zfolio_sys::cpu;
use zfolio_workers::Accelerator;

use super::arguments::{AddArgs, parse_params};
use crate::failure::Failure;

/// What compresses and decompresses beside the threads that serve clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Accelerate {
    /// Threads.
    Cpu(Accelerator),
    /// The In-Memory Analytics Accelerator.
    Iaa(Devices),
}

/// Which devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Devices {
    /// Those of this machine.
    Machine,
    /// Models of the device, in this process.
    Model,
}

impl Accelerate {
    /// Reads what a user has written.
    pub(super) fn parse(given: &str) -> Result<Accelerate, String> {
        match given {
            "iaa" => Ok(Accelerate::Iaa(Devices::Machine)),
            "iaa=model" => Ok(Accelerate::Iaa(Devices::Model)),
            _ => {
                let cpu = Accelerator::parse(given).map(Accelerate::Cpu);
                cpu.map_err(|accepted| format!("{accepted}; or iaa, or iaa=model for its model"))
            }
        }
    }
}

/// The algorithm that compresses what is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct First {
    /// The software that reads and writes its format.
    pub(super) params: Params,
    /// How the accelerator compresses, if it is to.
    codes: Option<Codes>,
}

/// The kernel's names of the two.
const ON_IAA: [(&str, Codes); 2] =
    [("deflate-iaa", Codes::Fixed), ("deflate-iaa-dynamic", Codes::Dynamic)];

impl First {
    /// What the accelerator does, by these codes.
    pub(super) fn on_iaa(codes: Codes) -> First {
        let params = "deflate,window=12".parse().expect("parameters of this build");
        First { params, codes: Some(codes) }
    }

    /// Reads what a user has written.
    pub(super) fn parse(given: &str) -> Result<First, String> {
        match ON_IAA.into_iter().find(|(name, _)| *name == given) {
            Some((_, codes)) => Ok(First::on_iaa(codes)),
            None => Ok(First { params: parse_params(given)?, codes: None }),
        }
    }
}

/// What compresses and decompresses for a disk with these algorithms.
///
/// # Errors
///
/// The accelerator has none of the algorithms, or there is none.
pub(super) fn accelerated(
    arguments: &AddArgs,
    algorithms: &[Params],
) -> Result<Accelerated, Failure> {
    let codes = arguments.algorithm.as_ref().and_then(|first| first.codes);
    let devices = match (arguments.accelerate, codes) {
        (Some(Accelerate::Iaa(devices)), _) => devices,
        (_, Some(codes)) => {
            let name = ON_IAA.iter().find(|it| it.1 == codes).map_or("", |it| it.0);
            return Err(Failure::argument(format!(
                "--algorithm: '{name}' is an accelerator's; accepted: with --accelerate iaa, or \
                 deflate,window=12, the same format by software"
            )));
        }
        (Some(Accelerate::Cpu(cpu)), None) => return Ok(Accelerated::Workers(cpu.workers())),
        (None, None) => return Ok(Accelerated::NONE),
    };
    if !algorithms.iter().any(has_format_of) {
        let all: Vec<String> = algorithms.iter().map(Params::to_string).collect();
        return Err(Failure::argument(format!(
            "--accelerate: iaa has none of the algorithms of this disk, {}; accepted: deflate-iaa, \
             deflate-iaa-dynamic, and deflate,window=12",
            all.join(", ")
        )));
    }
    let driver = match devices {
        Devices::Machine => {
            discover::driver(Path::new("/sys"), Path::new("/dev/iax"), Settings::default())
                .map_err(|why| Failure::machine(format!("--accelerate iaa: {why}")))?
        }
        Devices::Model => modelled(),
    };
    let codes = codes.unwrap_or(Codes::Fixed);
    Ok(Accelerated::Hardware(Arc::new(OnIaa { driver: Arc::new(driver), codes })))
}

/// A driver of two devices that are modelled, with a queue each.
fn modelled() -> Driver {
    let driver = Driver::new(Settings::default(), vec![0; cpu::online()]);
    let queue = |device| WorkQueue {
        name: format!("wq{device}.0"),
        device,
        package: 0,
        depth: u32::try_from(Setup::default().depth).expect("a queue is short"),
        portal: Box::new(Model::new(Setup::default())),
    };
    driver.add([1, 3].map(queue)).expect("a driver has room for two queues");
    driver
}

/// The accelerator, for the codecs of a disk.
#[derive(Debug)]
struct OnIaa {
    driver: Arc<Driver>,
    codes: Codes,
}

impl Hardware for OnIaa {
    fn codec(&self, params: &Params) -> Option<Box<dyn Backend>> {
        has_format_of(params).then(|| Box::new(Iaa::new(&self.driver, self.codes)) as _)
    }

    fn stats(&self, name: &str) -> String {
        match name {
            "global_stats" => self.driver.global_stats().to_string(),
            "wq_stats" => self.driver.wq_stats().iter().map(ToString::to_string).collect(),
            _ => self.driver.driver_stats().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use zfolio_iaa::Codes;

    use super::{Accelerate, Devices, First};

    #[test]
    fn accelerators_are_read_by_name() {
        assert_eq!(Accelerate::parse("iaa"), Ok(Accelerate::Iaa(Devices::Machine)));
        assert_eq!(Accelerate::parse("iaa=model"), Ok(Accelerate::Iaa(Devices::Model)));
        assert!(matches!(Accelerate::parse("cpu=3"), Ok(Accelerate::Cpu(_))));
        for text in ["iaa=", "iaa=2", "IAA", "gpu"] {
            let line = Accelerate::parse(text).unwrap_err();
            assert!(line.starts_with("accepted: cpu, ") && line.contains("iaa=model"), "{line}");
        }
    }

    #[test]
    fn algorithms_of_the_accelerator_are_one_format() {
        let [fixed, dynamic, software] =
            ["deflate-iaa", "deflate-iaa-dynamic", "deflate,window=12"]
                .map(|name| First::parse(name).unwrap());
        assert!(fixed.params == software.params && dynamic.params == software.params);
        let codes = [fixed, dynamic, software].map(|first| first.codes);
        assert_eq!(codes, [Some(Codes::Fixed), Some(Codes::Dynamic), None]);
        assert!(First::parse("deflate-iaa,level=2").is_err());
    }
}
