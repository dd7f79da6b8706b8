//! What `--accelerate` names, the algorithms that the accelerator adds, and the accelerator as the codecs of a disk or
//! of a program.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use zfolio_core::zcomp::{Backend, Params};
use zfolio_sys::cpu;
use zfolio_workers::{Accelerated, Accelerator, Hardware};

use crate::backend::{Codes, Iaa, SOFTWARE, has_format_of};
use crate::discover::Found;
use crate::driver::{Driver, WorkQueue};
use crate::machine::Machine;
use crate::model::{Model, Setup};
use crate::settings::Settings;

/// What compresses and decompresses beside the threads that have data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accelerate {
    /// Threads.
    Cpu(Accelerator),
    /// The In-Memory Analytics Accelerator.
    Iaa(Devices, Settings),
}

/// Which devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Devices {
    /// Those of this machine.
    Machine,
    /// Models of the device, in this process.
    Model,
}

impl Accelerate {
    /// Reads what a user has written.
    ///
    /// # Errors
    ///
    /// One line: what was given, and what is accepted.
    pub fn parse(given: &str) -> Result<Accelerate, String> {
        let (name, attributes) = given.split_once(',').unzip();
        let devices = match name.unwrap_or(given) {
            "iaa" => Devices::Machine,
            "iaa=model" => Devices::Model,
            _ => {
                return Accelerator::parse(given).map(Accelerate::Cpu).map_err(|accepted| {
                    format!(
                        "'{given}' is no accelerator; {accepted}; or iaa, or iaa=model for its model"
                    )
                });
            }
        };
        let settings = attributes.map_or(Some(Settings::default()), Settings::parse);
        let settings = settings.ok_or_else(|| {
            format!("'{given}' is no accelerator; accepted: iaa with {}", Settings::ACCEPTED)
        })?;
        Ok(Accelerate::Iaa(devices, settings))
    }
}

impl fmt::Display for Accelerate {
    /// As [`Accelerate::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Accelerate::Cpu(cpu) => cpu.fmt(f),
            Accelerate::Iaa(Devices::Machine, settings) => write!(f, "iaa{settings}"),
            Accelerate::Iaa(Devices::Model, settings) => write!(f, "iaa=model{settings}"),
        }
    }
}

/// An algorithm by its own name, or by the accelerator's; `A` has the algorithms that there are without one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named<A> {
    /// The software that reads and writes its format.
    pub algorithm: A,
    /// How the accelerator compresses, if it was named so.
    pub codes: Option<Codes>,
}

impl<A: From<Params>> Named<A> {
    /// What the accelerator does, by these codes.
    ///
    /// # Panics
    ///
    /// Never: the format is one of this build.
    #[must_use]
    pub fn on_iaa(codes: Codes) -> Named<A> {
        let params: Params = SOFTWARE.parse().expect("parameters of this build");
        Named { algorithm: A::from(params), codes: Some(codes) }
    }

    /// Reads what a user has written; `parse` reads names of software.
    ///
    /// # Errors
    ///
    /// Those of `parse`.
    pub fn parse<E>(given: &str, parse: impl Fn(&str) -> Result<A, E>) -> Result<Named<A>, E> {
        match Codes::ALL.into_iter().find(|codes| codes.name() == given) {
            Some(codes) => Ok(Named::on_iaa(codes)),
            None => Ok(Named { algorithm: parse(given)?, codes: None }),
        }
    }
}

impl<A: fmt::Display> fmt::Display for Named<A> {
    /// As [`Named::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes {
            Some(codes) => f.write_str(codes.name()),
            None => self.algorithm.fmt(f),
        }
    }
}

/// Whether these algorithms can be accelerated so; `codes` is how one of them was named, and `whose` says whose
/// algorithms they are.
///
/// # Errors
///
/// One line: the accelerator has none of the algorithms, or there is none for the one that is named so.
pub fn check(
    accelerate: Option<Accelerate>,
    codes: Option<Codes>,
    algorithms: &[Params],
    whose: &str,
) -> Result<(), String> {
    match (accelerate, codes) {
        (Some(Accelerate::Iaa(..)), _) if !algorithms.iter().any(has_format_of) => {
            let all: Vec<String> = algorithms.iter().map(Params::to_string).collect();
            let [fixed, dynamic] = Codes::ALL.map(Codes::name);
            Err(format!(
                "--accelerate: iaa has none of the algorithms of {whose}, {}; accepted: {fixed}, {dynamic}, and \
                 {SOFTWARE}",
                all.join(", ")
            ))
        }
        (None | Some(Accelerate::Cpu(_)), Some(codes)) => Err(format!(
            "--algorithm: '{}' is an accelerator's; accepted: with --accelerate iaa, or {SOFTWARE}, the same format \
             by software",
            codes.name()
        )),
        _ => Ok(()),
    }
}

/// Sets up what accelerates. Hardware compresses by `codes`, or by fixed ones.
///
/// It may be called on a thread that has no `malloc` of the C library.
///
/// # Errors
///
/// There is no such hardware: one line that says why, and what to do.
pub fn open(accelerate: Option<Accelerate>, codes: Option<Codes>) -> Result<Accelerated, String> {
    let (accelerated, found) = prepare(accelerate, codes);
    found.map(|()| accelerated)
}

/// As [`open`], but hardware that is not there is waited for: software does its work until it comes. The line says why
/// there is none.
pub fn prepare(
    accelerate: Option<Accelerate>,
    codes: Option<Codes>,
) -> (Accelerated, Result<(), String>) {
    let (devices, settings) = match accelerate {
        None => return (Accelerated::NONE, Ok(())),
        Some(Accelerate::Cpu(cpu)) => return (Accelerated::Workers(cpu.workers()), Ok(())),
        Some(Accelerate::Iaa(devices, settings)) => (devices, settings),
    };
    let codes = codes.unwrap_or(Codes::Fixed);
    let (queues, found) = match devices {
        Devices::Machine => {
            let (sysfs, dev) = (Path::new("/sys"), Path::new("/dev/iax"));
            let (machine, found) = Machine::new(sysfs, dev, settings, Box::new(Found::open));
            (Source::Machine(machine), found.map_err(|why| format!("--accelerate iaa: {why}")))
        }
        Devices::Model => {
            let driver = Driver::new(settings, vec![0; cpu::online()]);
            driver.add(modelled()).expect("a driver has room for two queues");
            (Source::Model(Arc::new(driver)), Ok(()))
        }
    };
    (Accelerated::Hardware(Arc::new(OnIaa { queues, codes })), found)
}

/// Queues of two modelled devices.
fn modelled() -> impl Iterator<Item = WorkQueue> {
    [1, 3].into_iter().map(|device| WorkQueue {
        name: format!("wq{device}.0"),
        device,
        package: 0,
        depth: u32::try_from(Setup::default().depth).expect("a queue is short"),
        portal: Box::new(Model::new(Setup::default())),
    })
}

/// The accelerator, for the codecs of a disk or a program.
#[derive(Debug)]
struct OnIaa {
    queues: Source,
    codes: Codes,
}

/// A driver, and where its queues are from.
#[derive(Debug)]
enum Source {
    Machine(Machine),
    Model(Arc<Driver>),
}

impl OnIaa {
    fn driver(&self) -> &Arc<Driver> {
        match &self.queues {
            Source::Machine(machine) => &machine.driver,
            Source::Model(driver) => driver,
        }
    }
}

impl Hardware for OnIaa {
    fn codec(&self, params: &Params) -> Option<Box<dyn Backend>> {
        has_format_of(params).then(|| Box::new(Iaa::new(self.driver(), self.codes)) as _)
    }

    fn stats(&self, name: &str) -> String {
        let driver = self.driver();
        match name {
            "global_stats" => driver.global_stats().to_string(),
            "wq_stats" => driver.wq_stats().iter().map(ToString::to_string).collect(),
            _ => driver.driver_stats().to_string(),
        }
    }

    fn look(&self, now_ns: u64) {
        if let Source::Machine(machine) = &self.queues {
            machine.look(now_ns);
        }
    }

    fn start_over(&self) {
        match &self.queues {
            Source::Machine(machine) => machine.start_over(),
            // A queue that is refused is done without.
            Source::Model(driver) => drop(driver.add(modelled())),
        }
    }
}

#[cfg(test)]
mod tests {
    use zfolio_core::zcomp::{Choice, Params};

    use super::{Accelerate, Devices, Named, Settings, check};
    use crate::backend::Codes;

    #[test]
    fn accelerators_are_read_by_name() {
        let settings = Settings::default();
        assert_eq!(Accelerate::parse("iaa"), Ok(Accelerate::Iaa(Devices::Machine, settings)));
        assert_eq!(Accelerate::parse("iaa=model"), Ok(Accelerate::Iaa(Devices::Model, settings)));
        let verifying = Settings { verify_compress: true, ..settings };
        let model = Accelerate::Iaa(Devices::Model, verifying);
        assert_eq!(Accelerate::parse("iaa=model,verify_compress=1"), Ok(model));
        assert!(matches!(Accelerate::parse("cpu=3"), Ok(Accelerate::Cpu(_))));
        for text in ["iaa", "iaa=model", "cpu=3", "iaa,sync_mode=sync,distribute_comps=0"] {
            assert_eq!(Accelerate::parse(text).unwrap().to_string(), text);
        }
        for text in ["iaa=", "iaa=2", "IAA", "gpu", "cpu,verify_compress=1"] {
            let line = Accelerate::parse(text).unwrap_err();
            assert!(line.contains("; accepted: cpu, ") && line.contains("iaa=model"), "{line}");
        }
        for text in ["iaa,", "iaa=model,verify=1"] {
            let line = Accelerate::parse(text).unwrap_err();
            let start = format!("'{text}' is no accelerator; accepted: iaa with sync_mode=");
            assert!(line.starts_with(&start), "{line}");
        }
    }

    #[test]
    fn algorithms_of_the_accelerator_are_one_format() {
        let names = ["deflate-iaa", "deflate-iaa-dynamic", "deflate,window=12"];
        let named = names.map(|name| Named::<Params>::parse(name, str::parse).unwrap());
        assert!(named.iter().all(|it| it.algorithm == named[0].algorithm));
        assert_eq!(
            named.each_ref().map(|it| it.codes),
            [Some(Codes::Fixed), Some(Codes::Dynamic), None]
        );
        assert_eq!(named.map(|it| it.to_string()), names);
        assert!(Named::<Params>::parse("deflate-iaa,level=2", str::parse).is_err());
        let auto = Named::<Choice>::parse("auto", str::parse).unwrap();
        assert!(auto.algorithm == Choice::Auto && auto.codes.is_none());
    }

    #[test]
    fn what_does_not_fit_together_is_one_line() {
        let params = |name: &str| [name.parse::<Params>().unwrap()];
        let iaa = Some(Accelerate::Iaa(Devices::Model, Settings::default()));
        let ours = params("deflate,window=12");
        assert!(check(iaa, Some(Codes::Dynamic), &ours, "it").is_ok());
        assert!(check(iaa, None, &ours, "it").is_ok() && check(None, None, &ours, "it").is_ok());
        let other = check(iaa, None, &params("zstd"), "this run").unwrap_err();
        assert!(other.contains("of this run, zstd; accepted: deflate-iaa, "), "{other}");
        let cpu = Accelerate::parse("cpu=2").ok();
        for accelerate in [None, cpu] {
            let without = check(accelerate, Some(Codes::Dynamic), &ours, "it").unwrap_err();
            assert!(without.starts_with("--algorithm: 'deflate-iaa-dynamic'"), "{without}");
        }
    }
}
