//! The work queues that this machine has for us, from sysfs.
//!
//! `/sys/bus/dsa/devices` has a directory for each device (`iax1`) and for each of its queues (`wq1.0`). A queue is
//! used if it is enabled and of type `user`. For every other one there is a line that says why, and what to do.
//!
//! Nothing here calls the C library's `malloc`, as `opendir` would: under `zfolio run` that is the program's.

pub mod script;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::driver::WorkQueue;
use crate::portal::Portal;
use crate::portal::hardware::{self, Hardware, Mode};
use zfolio_sys::{Errno, files};

/// Where the devices and their queues are, below `/sys`.
pub(crate) const DEVICES: &str = "bus/dsa/devices";

/// What to do about a queue that is not set up, and about one that the kernel uses.
pub(crate) const ADVICE: &str = "run 'zfolio iaa setup' as root";
const ADVICE_KERNEL: &str = "run 'zfolio iaa setup --replace' as root";

/// A queue that may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its name, `wq1.0`.
    pub name: String,
    /// The device's number.
    pub device: usize,
    /// The package of the CPUs that are near the device.
    pub package: usize,
    /// Its kind.
    pub mode: Mode,
    /// Descriptors that it holds; of a shared one, those that users may put there.
    pub depth: u32,
    /// The file to map.
    pub path: PathBuf,
    /// What tells the file from the one that there is when the queue was disabled and enabled meanwhile; `None` if it
    /// cannot be looked at.
    pub file: Option<[u64; 2]>,
}

/// A queue that may not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Its name.
    pub name: String,
    /// One line: why, and what to do.
    pub why: String,
}

impl Found {
    /// Maps the queue.
    ///
    /// # Errors
    ///
    /// Why not, and what to do.
    pub fn open(&self) -> Result<WorkQueue, Unusable> {
        let name = self.name.clone();
        match Hardware::open(&self.path, self.mode) {
            Ok(portal) => Ok(self.with(Box::new(portal))),
            Err(error) => Err(Unusable { name, why: refusal(&self.path, &error) }),
        }
    }

    /// Whether this user may open the queue, as far as its file says. It is not opened, since a dedicated queue is one
    /// program's.
    ///
    /// # Errors
    ///
    /// Why not, and what to do.
    pub fn may_open(&self) -> Result<(), Unusable> {
        files::may_change(&self.path).map_err(|errno| {
            let why = refusal(&self.path, &hardware::Error::Map(errno));
            Unusable { name: self.name.clone(), why }
        })
    }

    /// The queue behind this portal.
    pub(crate) fn with(&self, portal: Box<dyn Portal>) -> WorkQueue {
        let Found { device, package, depth, .. } = *self;
        WorkQueue { name: self.name.clone(), device, package, depth, portal }
    }

    /// Whether the queue is still the one that `old` was, enabled since, with the same configuration. A file that
    /// cannot be looked at, as after `chroot`, says nothing.
    pub(crate) fn is_same(&self, old: &Found) -> bool {
        let is_file = self.file.zip(old.file).is_none_or(|(new, old)| new == old);
        is_file && Found { file: None, ..self.clone() } == Found { file: None, ..old.clone() }
    }
}

/// Why a queue cannot be opened, and what to do.
fn refusal(path: &Path, error: &hardware::Error) -> String {
    let directory;
    let advice = match error {
        hardware::Error::Instruction(_) => "no processor with the device lacks it",
        hardware::Error::Map(Errno::BUSY) => {
            "another program has it: end that, or run 'zfolio iaa setup --mode shared' as root"
        }
        // The kernel lets other programs map no queue of such a device, whatever the file's permissions are.
        hardware::Error::Map(Errno::PERM) => {
            "this device is only for programs with CAP_SYS_RAWIO (INTEL-SA-01084): run this as root"
        }
        hardware::Error::Map(Errno::NOTTY) => {
            "remove it: the kernel makes the device when the queue is enabled"
        }
        hardware::Error::Map(Errno::ACCESS) => "give this user read and write permission",
        // The kernel has enabled the queue, and makes a file for each one.
        hardware::Error::Map(Errno::NOENT | Errno::NOTDIR) => {
            let parent = path.parent().unwrap_or(path).display();
            directory = format!("pass {parent} into this container or sandbox");
            &directory
        }
        hardware::Error::Map(_) => "the kernel's log (dmesg) may say more",
    };
    format!("{}: {error}; {advice}", path.display())
}

/// An accelerator of this machine, with whatever sysfs says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name, `iax1`.
    pub name: String,
    /// Its number.
    pub number: usize,
    /// The NUMA node, if the system says which.
    pub node: Option<usize>,
    /// The package of the CPUs that are near it, if the system says which.
    pub package: Option<usize>,
    /// Its state: `enabled`, `disabled` or `halted`; empty if it is not readable.
    pub state: String,
    /// Its queues, by their numbers, enabled or not.
    pub queues: Vec<Queue>,
    /// The names of its engines, by their numbers.
    pub engines: Vec<String>,
}

impl Device {
    /// Its queues as [`Queue::usable`] says of each.
    pub fn usable(&self, dev: &Path) -> impl Iterator<Item = Result<Found, Unusable>> {
        self.queues.iter().map(|queue| queue.usable(self, dev))
    }
}

/// A queue of a device, with its attributes as sysfs has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// Its name, `wq1.0`.
    pub name: String,
    /// The driver that it is bound to: `user` for programs, `crypto` for the kernel.
    pub driver: Option<String>,
    attributes: BTreeMap<&'static str, String>,
}

impl Queue {
    /// Attributes by which a queue is configured, in the order in which the kernel accepts them.
    pub const SETTINGS: [&'static str; 9] = [
        "mode",
        "size",
        "group_id",
        "threshold",
        "priority",
        "block_on_fault",
        "type",
        "name",
        "driver_name",
    ];

    /// Attributes by which the kernel tells what became of it.
    const FACTS: [&'static str; 2] = ["state", "clients"];

    /// The names of all attributes that are read.
    pub fn attributes() -> impl Iterator<Item = &'static str> {
        Queue::SETTINGS.into_iter().chain(Queue::FACTS)
    }

    fn read(directory: &Path, name: String, sight: &Sight) -> Queue {
        let own = directory.join(&name);
        let link = files::link(&own.join("driver")).ok().and_then(|link| link.into_string().ok());
        let driver = link.and_then(|link| link.rsplit('/').next().map(str::to_owned));
        let value = |attribute: &'static str| Some((attribute, sight.read(&own, attribute)?));
        let attributes = Queue::attributes().filter_map(value).collect();
        Queue { name, driver, attributes }
    }

    /// The value of one of its [`attributes`](Queue::attributes), if it is readable.
    #[must_use]
    pub fn get(&self, attribute: &str) -> Option<&str> {
        self.attributes.get(attribute).map(String::as_str)
    }

    /// What a driver needs to know, or why the queue cannot be used.
    ///
    /// # Errors
    ///
    /// Why not, and what to do.
    pub fn usable(&self, device: &Device, dev: &Path) -> Result<Found, Unusable> {
        self.usable_in(&Sight::default(), device, dev)
    }

    fn usable_in(&self, sight: &Sight, device: &Device, dev: &Path) -> Result<Found, Unusable> {
        let unusable = |why| Unusable { name: self.name.clone(), why };
        let (mode, depth) = self.mode_and_depth().map_err(unusable)?;
        Ok(Found {
            name: self.name.clone(),
            device: device.number,
            package: device.package.unwrap_or(0),
            mode,
            depth,
            file: sight.file(&dev.join(&self.name)),
            path: dev.join(&self.name),
        })
    }

    fn mode_and_depth(&self) -> Result<(Mode, u32), String> {
        let unreadable = |attribute: &str| {
            let advice = "let this user, or this container, read /sys/bus/dsa/devices";
            format!("{attribute} is not readable: {advice}")
        };
        let read = |attribute: &str| self.get(attribute).ok_or_else(|| unreadable(attribute));
        let state = read("state")?;
        if state != "enabled" {
            return Err(format!("its state is '{state}': {ADVICE}"));
        }
        let kind = read("type")?;
        if kind != "user" {
            return Err(format!("its type is '{kind}', not 'user': {ADVICE_KERNEL}"));
        }
        let number = |attribute| {
            let text = read(attribute)?;
            text.parse::<u32>()
                .map_err(|_| format!("{attribute} is '{text}': a number is expected"))
        };
        let size = number("size")?;
        if size == 0 {
            return Err(format!("its size is 0: {ADVICE}"));
        }
        match read("mode")? {
            "dedicated" => Ok((Mode::Dedicated, size)),
            // Users may fill it up to its threshold.
            "shared" => {
                let depth = number("threshold").map_or(size, |most| most.clamp(1, size));
                Ok((Mode::Shared, depth))
            }
            mode => Err(format!("its mode is '{mode}'; accepted: dedicated and shared")),
        }
    }
}

/// The accelerators below `sysfs` (`/sys`), by their numbers. None at all: the machine has no such device, or its
/// driver (`idxd`) is not loaded.
#[must_use]
pub fn devices(sysfs: &Path) -> Vec<Device> {
    devices_in(&Sight::default(), sysfs)
}

fn devices_in(sight: &Sight, sysfs: &Path) -> Vec<Device> {
    let directory = sysfs.join(DEVICES);
    let names = sight.children(&directory);
    // The numbers are those of all devices of the family; only an IAA is called so.
    let mut found: Vec<Device> = names
        .iter()
        .filter_map(|name| Some((number(name.strip_prefix("iax")?)?, name)))
        .map(|(number, name)| device(sight, sysfs, &directory, number, name))
        .collect();
    found.sort_unstable_by_key(|device| device.number);
    for device in &mut found {
        let of = |kind: &str| {
            let prefix = format!("{kind}{}.", device.number);
            let of = |name: &String| Some((number(name.strip_prefix(&prefix)?)?, name.clone()));
            let mut all: Vec<(usize, String)> = names.iter().filter_map(of).collect();
            all.sort_unstable();
            all.into_iter().map(|(_, name)| name)
        };
        let engines = of("engine").collect();
        let queues = of("wq").map(|name| Queue::read(&directory, name, sight)).collect();
        (device.engines, device.queues) = (engines, queues);
    }
    found
}

/// One device, without what belongs to it.
fn device(sight: &Sight, sysfs: &Path, directory: &Path, number: usize, name: &str) -> Device {
    let own = directory.join(name);
    Device {
        name: name.to_owned(),
        number,
        node: sight.read(&own, "numa_node").and_then(|node| node.parse().ok()),
        package: package_of(sight, sysfs, &own),
        state: sight.read(&own, "state").unwrap_or_default(),
        queues: Vec::new(),
        engines: Vec::new(),
    }
}

/// The queues below `sysfs` (`/sys`), in the order of their names, whose files are in `dev` (`/dev/iax`).
#[must_use]
pub fn queues(sysfs: &Path, dev: &Path) -> Vec<Result<Found, Unusable>> {
    queues_in(&Sight::default(), sysfs, dev)
}

/// The same, as far as they can be seen.
pub(crate) fn queues_in(sight: &Sight, sysfs: &Path, dev: &Path) -> Vec<Result<Found, Unusable>> {
    let of = |device: &Device| -> Vec<_> {
        device.queues.iter().map(|queue| queue.usable_in(sight, device, dev)).collect()
    };
    devices_in(sight, sysfs).iter().flat_map(of).collect()
}

/// One look at files of the system, and whether it has missed any. That a file is not there is seen, too; but a read
/// that fails for another reason, as without a free descriptor or memory, says nothing of the file.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    has_missed: Cell<bool>,
}

impl Sight {
    pub(crate) fn has_missed(&self) -> bool {
        self.has_missed.get()
    }

    fn seen<T>(&self, found: Result<T, Errno>) -> Option<T> {
        let is_absent = |error| [Errno::NOENT, Errno::NOTDIR, Errno::NODEV].contains(&error);
        found.inspect_err(|error| self.has_missed.set(self.has_missed() || !is_absent(*error))).ok()
    }

    /// The names in a directory.
    pub(crate) fn children(&self, directory: &Path) -> Vec<String> {
        let names = self.seen(files::names(directory)).unwrap_or_default();
        names.into_iter().filter_map(|name| name.into_string().ok()).collect()
    }

    /// What tells a queue's file from another one; `None` if there is none.
    pub(crate) fn file(&self, path: &Path) -> Option<[u64; 2]> {
        self.seen(files::device_identity(path))
    }

    /// An attribute without the space around it.
    pub(crate) fn read(&self, directory: &Path, attribute: &str) -> Option<String> {
        let text = files::read_whole(directory.join(attribute), ATTRIBUTE_BYTES_MAX);
        String::from_utf8(self.seen(text)?).ok().map(|text| text.trim().to_owned())
    }
}

/// A number as the kernel writes it in a name: `01` and `+1` are none.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|number: &usize| number.to_string() == text)
}

/// The most bytes of an attribute, by the rules of sysfs.
const ATTRIBUTE_BYTES_MAX: usize = 4096;

/// An attribute without the space around it; `None` if it cannot be read, for whatever reason.
pub(crate) fn read(directory: &Path, attribute: &str) -> Option<String> {
    Sight::default().read(directory, attribute)
}

/// The package of the first CPU of the device's node. A package may have several nodes.
fn package_of(sight: &Sight, sysfs: &Path, device: &Path) -> Option<usize> {
    let node = sight.read(device, "numa_node")?;
    let cpus = sight.read(&sysfs.join(format!("devices/system/node/node{node}")), "cpulist")?;
    let first = cpus.split(['-', ',']).next()?.parse().ok()?;
    package(sight, sysfs, first)
}

fn package(sight: &Sight, sysfs: &Path, cpu: usize) -> Option<usize> {
    let topology = sysfs.join(format!("devices/system/cpu/cpu{cpu}/topology"));
    sight.read(&topology, "physical_package_id")?.parse().ok()
}

/// The package of each CPU, 0 where the system does not say.
#[must_use]
pub fn packages(sysfs: &Path) -> Vec<usize> {
    let cpus = sysfs.join("devices/system/cpu");
    let exists = |cpu: &usize| files::exists(&cpus.join(format!("cpu{cpu}")));
    let sight = Sight::default();
    (0..).take_while(exists).map(|cpu| package(&sight, sysfs, cpu).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Errno, Found, Mode, hardware, packages, queues, refusal};
    use crate::machine::Machine;
    use crate::settings::Settings;
    use crate::testing::Tree;

    /// Why the driver has no queue.
    fn why(sysfs: &Path, dev: &Path) -> String {
        Machine::new(sysfs, dev, Settings::default(), Box::new(Found::open)).1.unwrap_err()
    }

    #[test]
    fn queues_are_found_with_mode_depth_and_package() {
        let tree = Tree::new("found");
        for (cpu, package) in [(0, "0"), (1, "1"), (2, "0"), (3, "1")] {
            tree.write(
                &format!("devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
                package,
            );
        }
        tree.write("devices/system/node/node2/cpulist", "3,7");
        tree.write("bus/dsa/devices/iax1/numa_node", "-1");
        tree.write("bus/dsa/devices/iax3/numa_node", "2");
        tree.write("bus/dsa/devices/dsa0/numa_node", "0");
        tree.queue("wq3.1", &[("mode", "shared"), ("threshold", "10"), ("size", "16")]);
        tree.queue("wq1.10", &[]);
        tree.queue("wq1.9", &[]);
        tree.queue("wq0.0", &[]);
        let found = queues(&tree.0, Path::new("/dev/iax"));
        let found: Vec<_> = found.into_iter().map(|found| found.unwrap()).collect();
        let names: Vec<&str> = found.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["wq1.9", "wq1.10", "wq3.1"], "that of dsa0 is no accelerator of ours");
        assert_eq!((found[0].mode, found[0].depth, found[0].package), (Mode::Dedicated, 64, 0));
        assert_eq!((found[2].mode, found[2].depth, found[2].package), (Mode::Shared, 10, 1));
        assert_eq!(found[2].path, Path::new("/dev/iax/wq3.1"));
        assert_eq!(packages(&tree.0), [0, 1, 0, 1]);
        let refused = found[0].open().expect_err("there is no such file");
        let is_no_file = |why: &str| why.ends_with("pass /dev/iax into this container or sandbox");
        assert!(refused.why.contains("movdir64b") || is_no_file(&refused.why), "{}", refused.why);
        let refused = found[0].may_open().expect_err("there is no such file");
        assert!(refused.name == "wq1.9" && is_no_file(&refused.why), "{}", refused.why);
        tree.write("wq1.9", "");
        let there = Found { path: tree.0.join("wq1.9"), ..found[0].clone() };
        assert_eq!(there.may_open(), Ok(()));
    }

    #[test]
    fn what_cannot_be_opened_says_what_to_do() {
        let path = Path::new("/dev/iax/wq1.0");
        for (error, advice) in [
            (hardware::Error::Map(Errno::ACCESS), "give this user read and write permission"),
            (hardware::Error::Map(Errno::PERM), "(INTEL-SA-01084): run this as root"),
            (hardware::Error::Map(Errno::NOENT), "pass /dev/iax into this container or sandbox"),
            (hardware::Error::Map(Errno::NXIO), "the kernel's log (dmesg) may say more"),
            (
                hardware::Error::Map(Errno::NOTTY),
                "it is no character device; remove it: the kernel makes the device when the queue is enabled",
            ),
            (hardware::Error::Map(Errno::BUSY), "run 'zfolio iaa setup --mode shared' as root"),
            (hardware::Error::Instruction(Mode::Shared), "no processor with the device lacks it"),
        ] {
            let line = refusal(path, &error);
            assert!(line.starts_with("/dev/iax/wq1.0: ") && line.ends_with(advice), "{line}");
        }
        // An enabled queue of the right type without a file says more than the others.
        let tree = Tree::new("opened");
        tree.write("bus/dsa/devices/iax1/numa_node", "0");
        tree.queue("wq1.0", &[("state", "disabled")]);
        tree.queue("wq1.1", &[]);
        tree.queue("wq1.2", &[("type", "kernel")]);
        let line = why(&tree.0, &tree.0);
        assert!(line.contains("can be used: wq1.1: ") && line.contains("/wq1.1: "), "{line}");
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        let tree = Tree::new("refused");
        tree.write("bus/dsa/devices/iax1/numa_node", "0");
        for (at, attributes) in [
            [("type", "kernel")],
            [("state", "disabled")],
            [("mode", "other")],
            [("size", "0")],
            [("size", "many")],
        ]
        .iter()
        .enumerate()
        {
            tree.queue(&format!("wq1.{at}"), attributes);
        }
        tree.write("bus/dsa/devices/wq1.5/state", "enabled");
        let whys: Vec<String> = queues(&tree.0, Path::new("/dev/iax"))
            .into_iter()
            .map(|found| found.expect_err("none can be used").why)
            .collect();
        assert_eq!(
            whys,
            [
                "its type is 'kernel', not 'user': run 'zfolio iaa setup --replace' as root",
                "its state is 'disabled': run 'zfolio iaa setup' as root",
                "its mode is 'other'; accepted: dedicated and shared",
                "its size is 0: run 'zfolio iaa setup' as root",
                "size is 'many': a number is expected",
                "type is not readable: let this user, or this container, read /sys/bus/dsa/devices",
            ]
        );
        let why = |sysfs: &Path| why(sysfs, Path::new("/dev/iax"));
        let line = why(&tree.0);
        let expected = "no queue of the accelerator can be used: wq1.0: its type is 'kernel', not";
        assert!(line.starts_with(expected), "{line}");
        assert!(why(Path::new("/nonexistent")).contains("has no Intel In-Memory"));
        let bare = Tree::new("bare");
        bare.write("bus/dsa/devices/iax1/numa_node", "0");
        assert!(why(&bare.0).ends_with("is configured: run 'zfolio iaa setup' as root"));
        assert_eq!(queues(Path::new("/nonexistent"), Path::new("/dev/iax")), []);
        tree.queue("wq1.06", &[]);
        tree.queue("wq1.+6", &[]);
        assert_eq!(
            queues(&tree.0, Path::new("/dev/iax")).len(),
            6,
            "these are no names of the kernel's"
        );
    }
}
