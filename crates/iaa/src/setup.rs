//! Queues for programs, set up through sysfs: what the published script `enable_iaa.sh` does for the kernel's own use.
//!
//! For each device: its queues and then the device are unbound from their drivers, its engines and queues are
//! configured, and it and its new queues are bound again, the queues to the driver `user`.
//!
//! # Invariants
//!
//! - `SU-1` Everything that can be checked is checked before the first write.
//! - `SU-2` A step that fails is undone, and all before it, in reverse order. The undo of a step does nothing where the
//!   step had no effect, so it does not matter how far the failed one got.
//! - `SU-3` The old configuration is read before anything is unbound. When a queue is unbound the kernel forgets all of
//!   its settings but size and group, and when a device is, all settings of whatever belongs to it, also of queues
//!   which are not asked for. They are put back before the queue or the device is bound again.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::discover::{self, DEVICES, Device, Queue, read};
use crate::portal::hardware::Mode;
use zfolio_sys::files;

/// The driver of devices, and that of queues for programs.
const DEVICE_DRIVER: &str = "idxd";
const QUEUE_DRIVER: &str = "user";

/// What the script gives to each queue.
const PRIORITY: &str = "10";

/// Attributes of a queue that are only put back. They are not among [`Queue::SETTINGS`], which each look of a driver
/// reads: the kernel answers with an error where one of them has no meaning, such as the retries of a dedicated queue,
/// and a look that meets an error concludes nothing.
const OF_QUEUE: [&str; 6] = [
    "max_transfer_size",
    "max_batch_size",
    "ats_disable",
    "prs_disable",
    "op_config",
    "enqcmds_retries",
];

/// Those of a group. (This device has no settings of read buffers.)
const OF_GROUP: [&str; 4] =
    ["traffic_class_a", "traffic_class_b", "desc_progress_limit", "batch_progress_limit"];

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// How many devices of each package; `None`: all.
    pub devices: Option<usize>,
    /// Queues of each device. They share its descriptors equally.
    pub queues: usize,
    /// The kind of these queues.
    pub mode: Mode,
    /// Whether queues that the kernel uses may be taken from it.
    pub replace: bool,
}

/// Why nothing was done: one line, with what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// What is asked for is more than there is.
    Argument(String),
    /// The machine is not ready for it.
    Machine(String),
}

/// What a failure says of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The user lacks the permission.
    Permission,
    /// Nobody may write there, as in a container: the file system is mounted read-only.
    ReadOnly,
    /// Something else.
    Other,
}

impl Cause {
    fn of(error: &io::Error) -> Cause {
        match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => Cause::ReadOnly,
            _ if error.raw_os_error() == Some(EACCES) => Cause::Permission,
            _ => Cause::Other,
        }
    }
}

/// A step failed, and was undone with all before it.
#[derive(Debug, PartialEq, Eq)]
pub struct Failed {
    /// What failed, and what the system said.
    pub why: String,
    /// What that says of this machine.
    pub cause: Cause,
    /// What could not be put back: nothing, unless the device is broken.
    pub left: Vec<String>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; ", self.why)?;
        match (&self.left[..], self.cause) {
            ([], Cause::Permission) => f.write_str("nothing was changed: run it as root"),
            ([], Cause::ReadOnly) => {
                f.write_str("nothing was changed: /sys is read-only here, so run it on the host")
            }
            ([], Cause::Other) => {
                f.write_str("everything is as before: the kernel's log (dmesg) may say more")
            }
            (left, _) => write!(f, "these could not be put back: {}", left.join(", ")),
        }
    }
}

/// An attribute of a queue, an engine or a group, and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Setting {
    owner: String,
    attribute: &'static str,
    value: String,
}

impl Setting {
    fn new(owner: &str, attribute: &'static str, value: impl Into<String>) -> Setting {
        Setting { owner: owner.to_owned(), attribute, value: value.into() }
    }

    /// As it is; `None` if it is not readable.
    fn read(sysfs: &Path, owner: &str, attribute: &'static str) -> Option<Setting> {
        let value = read(&sysfs.join(DEVICES).join(owner), attribute)?;
        Some(Setting::new(owner, attribute, value))
    }

    /// Its file, below sysfs.
    fn path(&self) -> PathBuf {
        Path::new(DEVICES).join(&self.owner).join(self.attribute)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// `old`: what the kernel forgets by it, of a queue.
    Unbind {
        driver: String,
        name: String,
        old: Vec<Setting>,
    },
    Configure {
        new: Vec<Setting>,
        old: Vec<Setting>,
    },
    Bind {
        driver: String,
        name: String,
    },
}

/// The steps for all devices that are set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    steps: Vec<Step>,
    /// The names of the queues that there will be.
    pub queues: Vec<String>,
}

/// Writes a value to a file of sysfs.
///
/// # Errors
///
/// The system's: the kernel accepts only some values, and some only in some states.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    // Without `create`: a missing attribute is an error that says so.
    let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
    file.write_all(format!("{text}\n").as_bytes())
}

impl Plan {
    /// What is to be done on the machine whose sysfs is at `sysfs` (`/sys`). Nothing is written.
    ///
    /// # Errors
    ///
    /// Why it cannot be done.
    pub fn new(sysfs: &Path, wanted: &Wanted) -> Result<Plan, Refused> {
        let mut plan = Plan { steps: Vec::new(), queues: Vec::new() };
        for device in chosen(discover::devices(sysfs), wanted.devices)? {
            let size = check(&sysfs.join(DEVICES).join(&device.name), &device, wanted)?;
            plan.add(sysfs, &device, wanted, size);
        }
        Ok(plan)
    }

    fn add(&mut self, sysfs: &Path, device: &Device, wanted: &Wanted, size: u32) {
        let enabled = |queue: &&Queue| queue.get("state") == Some("enabled");
        for queue in device.queues.iter().filter(enabled) {
            let driver = queue.driver.as_deref().or(queue.get("driver_name"));
            let driver = driver.unwrap_or(QUEUE_DRIVER).to_owned();
            let mut old = as_it_is(sysfs, queue);
            // These two stay; and the kernel would refuse the size while the device is enabled.
            old.retain(|setting| !["size", "group_id"].contains(&setting.attribute));
            self.steps.push(Step::Unbind { driver, name: queue.name.clone(), old });
        }
        let own = || (DEVICE_DRIVER.to_owned(), device.name.clone());
        if device.state == "enabled" {
            let (driver, name) = own();
            // Its configuration is that of the next step.
            self.steps.push(Step::Unbind { driver, name, old: Vec::new() });
        }
        self.steps.push(configure(sysfs, device, wanted, size));
        let (driver, name) = own();
        self.steps.push(Step::Bind { driver, name });
        for queue in &device.queues[..wanted.queues] {
            let (driver, name) = (QUEUE_DRIVER.to_owned(), queue.name.clone());
            self.steps.push(Step::Bind { driver, name });
            self.queues.push(queue.name.clone());
        }
    }

    /// All files below sysfs that are written, with the values, in this order. An attribute that has its value already
    /// is left alone.
    #[must_use]
    pub fn writes(&self) -> Vec<(PathBuf, String)> {
        self.steps.iter().flat_map(Step::writes).collect()
    }

    /// Does it all, by calling `write` with a path and a value.
    ///
    /// # Errors
    ///
    /// A step failed. It and all before it are undone (`SU-2`).
    pub fn apply(
        &self,
        sysfs: &Path,
        mut write: impl FnMut(&Path, &str) -> io::Result<()>,
    ) -> Result<(), Failed> {
        for (at, step) in self.steps.iter().enumerate() {
            let Err((why, cause)) = step.apply(sysfs, &mut write) else { continue };
            let mut left = Vec::new();
            for lost in self.steps[..=at].iter().rev().flat_map(|step| step.undo(sysfs, &mut write))
            {
                if !left.contains(&lost) {
                    left.push(lost);
                }
            }
            return Err(Failed { why, cause, left });
        }
        Ok(())
    }
}

/// The first `most` devices of each package.
fn chosen(devices: Vec<Device>, most: Option<usize>) -> Result<Vec<Device>, Refused> {
    if devices.is_empty() {
        return Err(Refused::Machine(NO_DEVICE.to_owned()));
    }
    let Some(most) = most else { return Ok(devices) };
    let of = |package| devices.iter().filter(move |device| device.package == package).count();
    let fewest = devices.iter().map(|device| of(device.package)).min().unwrap_or(0);
    if !(1..=fewest).contains(&most) {
        return Err(Refused::Argument(format!(
            "--devices: {most} of each package; accepted: 1 to {fewest}, as many as there are"
        )));
    }
    let mut chosen: Vec<Device> = Vec::new();
    for device in devices {
        if chosen.iter().filter(|other| other.package == device.package).count() < most {
            chosen.push(device);
        }
    }
    Ok(chosen)
}

/// What is said where there is none.
pub const NO_DEVICE: &str = "this machine has no Intel In-Memory Analytics Accelerator that its kernel knows \
                             (no iax* in /sys/bus/dsa/devices): if it has the hardware, run 'modprobe idxd'";

/// Whether a device can be set up; how many descriptors each queue gets.
fn check(own: &Path, device: &Device, wanted: &Wanted) -> Result<u32, Refused> {
    let (name, there) = (&device.name, device.queues.len());
    let machine = |why: String| Err(Refused::Machine(format!("{name}: {why}")));
    if !(1..=there).contains(&wanted.queues) {
        return Err(Refused::Argument(format!(
            "--queues: {}; accepted: 1 to {there}, as many as {name} has",
            wanted.queues
        )));
    }
    if read(own, "configurable").as_deref() == Some("0") {
        return machine("its configuration is fixed: set it up in the host".to_owned());
    }
    if read(own, "pasid_enabled").as_deref() != Some("1") {
        return machine(
            "programs cannot use it without shared virtual memory: boot with intel_iommu=on,sm_on"
                .to_owned(),
        );
    }
    if device.state == "halted" {
        return machine("it is halted by an error: reset it, or boot again".to_owned());
    }
    for queue in &device.queues {
        let clients = queue.get("clients").unwrap_or("0");
        let (state, kind) = (queue.get("state"), queue.get("type").unwrap_or("unknown"));
        if clients != "0" && kind == "kernel" {
            // It counts itself, for each of its jobs.
            return machine(format!(
                "{} is in use by the kernel (zswap or zram by deflate-iaa): choose another algorithm there first, or \
                 try again",
                queue.name
            ));
        }
        if clients != "0" {
            return machine(format!(
                "{} is in use by {clients} programs: end them first",
                queue.name
            ));
        }
        if state == Some("enabled") && kind != "user" && !wanted.replace {
            return machine(format!(
                "{} is enabled with type '{kind}', where 'user' is needed: --replace takes it from the kernel",
                queue.name
            ));
        }
    }
    let total = read(own, "max_work_queues_size").and_then(|text| text.parse::<u32>().ok());
    let size = total.unwrap_or(0) / u32::try_from(wanted.queues).unwrap_or(u32::MAX);
    if size == 0 { machine("max_work_queues_size is too small".to_owned()) } else { Ok(size) }
}

/// All settings of a queue as they are, in the order in which the kernel accepts them.
fn as_it_is(sysfs: &Path, queue: &Queue) -> Vec<Setting> {
    let mut all = Vec::new();
    // The kernel refuses a threshold of 0, and sets it where a queue becomes dedicated.
    let has_none = queue.get("threshold") == Some("0");
    for attribute in Queue::SETTINGS {
        // Older kernels lack some attributes.
        let Some(value) = queue.get(attribute) else { continue };
        if attribute == "mode" && has_none && value == "shared" {
            all.push(Setting::new(&queue.name, attribute, "dedicated"));
        }
        if attribute != "threshold" || !has_none {
            all.push(Setting::new(&queue.name, attribute, value));
        }
    }
    all.extend(OF_QUEUE.into_iter().filter_map(|of| Setting::read(sysfs, &queue.name, of)));
    all
}

/// The configuration of all engines, groups and queues of a device, before and after.
fn configure(sysfs: &Path, device: &Device, wanted: &Wanted, size: u32) -> Step {
    let (mut new, mut old) = (Vec::new(), Vec::new());
    for engine in &device.engines {
        new.push(Setting::new(engine, "group_id", "0"));
        old.extend(Setting::read(sysfs, engine, "group_id"));
    }
    let groups = (0..).map(|index| format!("group{}.{index}", device.number));
    for group in groups.take_while(|group| files::exists(&sysfs.join(DEVICES).join(group))) {
        let of_group = OF_GROUP.into_iter().filter_map(|of| Setting::read(sysfs, &group, of));
        // -1: it has not been set, and can be set to nothing else.
        old.extend(of_group.filter(|setting| setting.value != "-1"));
    }
    for (index, queue) in device.queues.iter().enumerate() {
        old.extend(as_it_is(sysfs, queue));
        let size = (index < wanted.queues).then_some(size);
        let there = Queue::SETTINGS.into_iter().filter(|of| queue.get(of).is_some());
        new.extend(there.filter_map(|attribute| {
            Some(Setting::new(&queue.name, attribute, value(attribute, wanted.mode, size)?))
        }));
    }
    Step::Configure { new, old }
}

/// The value of an attribute of a queue with `size` descriptors, or of one that is not used; `None`: left as it is.
fn value(attribute: &str, mode: Mode, size: Option<u32>) -> Option<String> {
    let Some(size) = size else {
        let unused = [("size", "0"), ("group_id", "-1"), ("type", "none")];
        return unused.iter().find(|(name, _)| *name == attribute).map(|(_, v)| (*v).to_owned());
    };
    let text = match (attribute, mode) {
        ("mode", Mode::Dedicated) => "dedicated",
        ("mode", Mode::Shared) => "shared",
        ("size", _) | ("threshold", Mode::Shared) => return Some(size.to_string()),
        // The driver resolves faults itself: a device that waits for one blocks the jobs behind it.
        ("group_id" | "block_on_fault", _) => "0",
        ("priority", _) => PRIORITY,
        ("type" | "driver_name", _) => QUEUE_DRIVER,
        ("name", _) => "zfolio",
        _ => return None,
    };
    Some(text.to_owned())
}

/// The writes for a configuration. All sizes become 0 first, as the kernel bounds their sum at each write.
fn writes_of(settings: &[Setting]) -> impl Iterator<Item = (PathBuf, String)> {
    let sizes = settings.iter().filter(|setting| setting.attribute == "size");
    let zeros = sizes.map(|setting| (setting.path(), "0".to_owned()));
    zeros.chain(settings.iter().map(|setting| (setting.path(), setting.value.clone())))
}

/// Puts settings back, each as far as that goes: one that is refused keeps no other one away. Returns what was refused.
fn put_back(
    sysfs: &Path,
    settings: &[Setting],
    write: &mut impl FnMut(&Path, &str) -> io::Result<()>,
) -> Vec<String> {
    // An attribute may have several values on the way to its last one. Where all have that nothing has changed.
    let is_last = |at: usize| !settings[at + 1..].iter().any(|it| it.path() == settings[at].path());
    let mut last = settings.iter().enumerate().filter(|(at, _)| is_last(*at));
    if last.all(|(_, setting)| has(&sysfs.join(setting.path()), &setting.value)) {
        return Vec::new();
    }
    let mut left = Vec::new();
    for (path, text) in writes_of(settings) {
        if has(&sysfs.join(&path), &text) {
            continue;
        }
        if let Err((why, _)) = write_one(sysfs, &path, &text, write) {
            let setting = path.strip_prefix(DEVICES).unwrap_or(&path);
            left.push(format!("{} ({why})", setting.display()));
        }
    }
    left
}

/// Writes `text` to a file below sysfs; why that failed.
fn write_one(
    sysfs: &Path,
    path: &Path,
    text: &str,
    write: &mut impl FnMut(&Path, &str) -> io::Result<()>,
) -> Result<(), (String, Cause)> {
    write(&sysfs.join(path), text).map_err(|error| {
        let path = Path::new("/sys").join(path);
        let why = format!("'{text}' cannot be written to {}: {error}", path.display());
        (why, Cause::of(&error))
    })
}

impl Step {
    fn writes(&self) -> Vec<(PathBuf, String)> {
        let of = |driver, name: &String, what| {
            vec![(Path::new("bus/dsa/drivers").join(driver).join(what), name.clone())]
        };
        match self {
            Step::Unbind { driver, name, .. } => of(driver, name, "unbind"),
            Step::Bind { driver, name } => of(driver, name, "bind"),
            Step::Configure { new, .. } => writes_of(new).collect(),
        }
    }

    /// Does the step, and checks that it has had its effect.
    fn apply(
        &self,
        sysfs: &Path,
        write: &mut impl FnMut(&Path, &str) -> io::Result<()>,
    ) -> Result<(), (String, Cause)> {
        for (path, text) in self.writes() {
            if matches!(self, Step::Configure { .. }) && has(&sysfs.join(&path), &text) {
                continue;
            }
            write_one(sysfs, &path, &text, write)?;
        }
        match self {
            Step::Bind { name, .. } if !is_enabled(sysfs, name) => {
                Err((format!("{name} was not enabled by its driver"), Cause::Other))
            }
            Step::Unbind { name, .. } if is_enabled(sysfs, name) => {
                Err((format!("{name} was not disabled by its driver"), Cause::Other))
            }
            _ => Ok(()),
        }
    }

    /// Undoes what the step has done, and returns what cannot be undone.
    fn undo(
        &self,
        sysfs: &Path,
        write: &mut impl FnMut(&Path, &str) -> io::Result<()>,
    ) -> Vec<String> {
        let (mut left, inverse, name) = match self {
            Step::Unbind { driver, name, old } if !is_enabled(sysfs, name) => {
                // SU-3: without its name, for one, the kernel would not bind the queue.
                let left = put_back(sysfs, old, write);
                (left, Step::Bind { driver: driver.clone(), name: name.clone() }, name)
            }
            Step::Bind { driver, name } if is_enabled(sysfs, name) => {
                let (driver, name_of) = (driver.clone(), name.clone());
                (Vec::new(), Step::Unbind { driver, name: name_of, old: Vec::new() }, name)
            }
            Step::Configure { old, .. } => return put_back(sysfs, old, write),
            _ => return Vec::new(),
        };
        let failed = inverse.apply(sysfs, write).err();
        left.extend(failed.map(|(why, _)| format!("{name} ({why})")));
        left
    }
}

/// "Permission denied": the user may not write there. (`EPERM` is what the kernel says in the wrong state.)
const EACCES: i32 = 13;

/// Whether a file of sysfs has this value.
fn has(path: &Path, text: &str) -> bool {
    std::fs::read_to_string(path).is_ok_and(|found| found.trim() == text)
}

fn is_enabled(sysfs: &Path, name: &str) -> bool {
    has(&sysfs.join(DEVICES).join(name).join("state"), "enabled")
}
