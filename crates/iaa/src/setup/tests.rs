//! A made-up sysfs that answers writes as the kernel's driver does, and a fault at each write in turn.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{DEVICES, Mode, Plan, Refused, Wanted};
use crate::discover;

/// The kernel, with files in a directory that is removed at the end.
struct Kernel {
    root: PathBuf,
    writes: usize,
    /// The write that fails.
    fault: Option<usize>,
}

impl Drop for Kernel {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.root));
    }
}

/// A queue that nobody has set up.
const OFF: [(&str, &str); 16] = [
    ("state", "disabled"),
    ("size", "0"),
    ("group_id", "-1"),
    ("mode", "shared"),
    ("threshold", "0"),
    ("priority", "0"),
    ("block_on_fault", "0"),
    ("type", "none"),
    ("name", ""),
    ("driver_name", ""),
    ("clients", "0"),
    ("max_transfer_size", "2097152"),
    ("ats_disable", "0"),
    ("prs_disable", "0"),
    ("op_config", "000001ff"),
    ("enqcmds_retries", "32"),
];

/// Settings that setup does not change, as a user may have chosen them.
const CHOSEN: [(&str, &str); 4] = [
    ("max_transfer_size", "4096"),
    ("ats_disable", "1"),
    ("prs_disable", "1"),
    ("op_config", "000000f0"),
];

/// A group that nobody has set up: the traffic classes become 0 and 1 when the device is enabled.
const UNSET: [(&str, &str); 4] = [
    ("traffic_class_a", "-1"),
    ("traffic_class_b", "-1"),
    ("desc_progress_limit", "0"),
    ("batch_progress_limit", "0"),
];

impl Kernel {
    /// Two devices of two packages, each with one queue of the kernel's with all descriptors.
    fn new(name: &str) -> Kernel {
        let root = std::env::temp_dir().join(format!("zfolio-setup-{name}-{}", std::process::id()));
        let kernel = Kernel { root, writes: 0, fault: None };
        for (number, node) in [(1, "0"), (3, "1")] {
            let own = format!("iax{number}");
            for (attribute, value) in [
                ("state", "enabled"),
                ("numa_node", node),
                ("configurable", "1"),
                ("pasid_enabled", "1"),
                ("max_work_queues_size", "128"),
            ] {
                kernel.set(&own, attribute, value);
            }
            kernel.set(&format!("engine{number}.0"), "group_id", "0");
            kernel.set(&format!("engine{number}.1"), "group_id", "-1");
            for group in [format!("group{number}.0"), format!("group{number}.1")] {
                UNSET.iter().for_each(|(a, v)| kernel.set(&group, a, v));
                kernel.set(&group, "traffic_class_a", "0");
                kernel.set(&group, "traffic_class_b", "1");
            }
            for queue in 0..4 {
                OFF.iter().for_each(|(a, v)| kernel.set(&format!("wq{number}.{queue}"), a, v));
            }
            let first = format!("wq{number}.0");
            for (attribute, value) in [
                ("size", "128"),
                ("group_id", "0"),
                ("mode", "dedicated"),
                ("priority", "10"),
                ("type", "kernel"),
                ("name", "iaa_crypto"),
                ("driver_name", "crypto"),
                ("state", "enabled"),
            ] {
                kernel.set(&first, attribute, value);
            }
            symlink("../drivers/crypto", kernel.path(&first, "driver")).unwrap();
            let cpu = kernel.root.join(format!("devices/system/cpu/cpu{node}/topology"));
            fs::create_dir_all(&cpu).unwrap();
            fs::write(cpu.join("physical_package_id"), node).unwrap();
            let nodes = kernel.root.join(format!("devices/system/node/node{node}"));
            fs::create_dir_all(&nodes).unwrap();
            fs::write(nodes.join("cpulist"), node).unwrap();
        }
        kernel
    }

    fn path(&self, owner: &str, attribute: &str) -> PathBuf {
        self.root.join(DEVICES).join(owner).join(attribute)
    }

    fn set(&self, owner: &str, attribute: &str, value: &str) {
        let (path, text) = (self.path(owner, attribute), format!("{value}\n"));
        // A read is cheap, and a write of what is there already may not be.
        if fs::read_to_string(&path).is_ok_and(|there| there == text) {
            return;
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn get(&self, owner: &str, attribute: &str) -> String {
        fs::read_to_string(self.path(owner, attribute)).unwrap().trim().to_owned()
    }

    /// A user has chosen what setup does not change, of the first queue and of the first group of each device.
    fn choose(&self) {
        for number in [1, 3] {
            let queue = format!("wq{number}.0");
            CHOSEN.iter().for_each(|(attribute, value)| self.set(&queue, attribute, value));
            if self.get(&queue, "mode") == "shared" {
                self.set(&queue, "enqcmds_retries", "7");
            }
            let group = format!("group{number}.0");
            self.set(&group, "traffic_class_a", "3");
            self.set(&group, "desc_progress_limit", "2");
        }
    }

    fn queues_of(&self, name: &str) -> Vec<String> {
        let device = discover::devices(&self.root).into_iter().find(|d| name == d.name).unwrap();
        device.queues.into_iter().map(|queue| queue.name).collect()
    }

    /// All there is below the devices.
    fn contents(&self) -> BTreeMap<PathBuf, String> {
        let mut all = BTreeMap::new();
        for owner in fs::read_dir(self.root.join(DEVICES)).unwrap() {
            for file in fs::read_dir(owner.unwrap().path()).unwrap() {
                let path = file.unwrap().path();
                let link = fs::read_link(&path).map(|link| link.file_name().unwrap().into());
                let link = link.map(|name: PathBuf| name.display().to_string());
                let text = link.unwrap_or_else(|_| fs::read_to_string(&path).unwrap());
                all.insert(path, text);
            }
        }
        all
    }

    /// Answers a write as the driver does, in `drivers/dma/idxd/sysfs.c` and `device.c`.
    fn write(&mut self, path: &Path, text: &str) -> io::Result<()> {
        self.writes += 1;
        if self.fault == Some(self.writes) {
            return Err(io::Error::other("injected"));
        }
        let refuse = |why: &str| Err(io::Error::other(why.to_owned()));
        let mut names = path.iter().rev().map(|name| name.to_str().unwrap());
        let (attribute, owner) = (names.next().unwrap(), names.next().unwrap());
        match attribute {
            "bind" => return self.bind(owner, text),
            "unbind" => {
                if self.get(text, "state") != "enabled" {
                    return refuse("it is not bound");
                }
                self.unbind(text);
                return Ok(());
            }
            _ => {}
        }
        let number =
            owner.trim_start_matches(|c: char| c.is_alphabetic()).split('.').next().unwrap();
        let device = format!("iax{number}");
        let is_queue = owner.starts_with("wq");
        if (!is_queue || attribute == "size") && self.get(&device, "state") == "enabled" {
            return refuse("the device is enabled");
        }
        if is_queue && self.get(owner, "state") == "enabled" {
            return refuse("the queue is enabled");
        }
        match attribute {
            "size" => {
                let others = self.queues_of(&device).into_iter().filter(|name| name != owner);
                let others: u32 =
                    others.map(|n| self.get(&n, "size").parse::<u32>().unwrap()).sum();
                if others + text.parse::<u32>().unwrap() > 128 {
                    return refuse("more than the device has");
                }
            }
            "threshold" => {
                let size: u32 = self.get(owner, "size").parse().unwrap();
                let accepted = 1..=size;
                if self.get(owner, "mode") == "dedicated"
                    || !accepted.contains(&text.parse().unwrap())
                {
                    return refuse("not this threshold");
                }
            }
            "mode" if text == "dedicated" => self.set(owner, "threshold", "0"),
            "enqcmds_retries" if self.get(owner, "mode") == "dedicated" => {
                return refuse("it is for shared queues");
            }
            "traffic_class_a" | "traffic_class_b" if !"01234567".contains(text) => {
                return refuse("no traffic class");
            }
            "type" => self.set(owner, "name", ""),
            _ => {}
        }
        self.set(owner, attribute, text);
        Ok(())
    }

    fn bind(&self, driver: &str, name: &str) -> io::Result<()> {
        let refuse = |why: &str| Err(io::Error::other(why.to_owned()));
        if let Some(queue) = name.strip_prefix("wq") {
            let device = format!("iax{}", queue.split('.').next().unwrap());
            let size = self.get(name, "size");
            let kind = if driver == "crypto" { "kernel" } else { "user" };
            let fits = self.get(name, "type") == kind && self.get(name, "driver_name") == driver;
            let shared = self.get(name, "mode") == "shared" && self.get(name, "threshold") == "0";
            let is_ready = self.get(&device, "state") == "enabled" && size != "0";
            let has_name = !self.get(name, "name").is_empty();
            if !is_ready || !fits || shared || !has_name || self.get(name, "group_id") == "-1" {
                return refuse("the queue is not configured");
            }
            symlink(format!("../drivers/{driver}"), self.path(name, "driver"))?;
        } else {
            for (attribute, value) in [("traffic_class_a", "0"), ("traffic_class_b", "1")] {
                self.each_group(name, |group| {
                    if self.get(group, attribute) == "-1" {
                        self.set(group, attribute, value);
                    }
                });
            }
        }
        self.set(name, "state", "enabled");
        Ok(())
    }

    /// A queue that is disabled forgets its configuration but for size and group (`idxd_wq_disable_cleanup`), and a
    /// device that of all that belongs to it.
    fn unbind(&self, name: &str) {
        self.set(name, "state", "disabled");
        drop(fs::remove_file(self.path(name, "driver")));
        if name.starts_with("iax") {
            for queue in self.queues_of(name) {
                self.unbind(&queue);
                OFF.iter().for_each(|(attribute, value)| self.set(&queue, attribute, value));
            }
            self.each_group(name, |group| {
                UNSET.iter().for_each(|(attribute, value)| self.set(group, attribute, value));
            });
        } else {
            let stays = |attribute: &str| ["size", "group_id"].contains(&attribute);
            let forgotten = OFF.iter().filter(|(attribute, _)| !stays(attribute));
            forgotten.for_each(|(attribute, value)| self.set(name, attribute, value));
        }
    }

    fn each_group(&self, device: &str, each: impl Fn(&str)) {
        let number = device.trim_start_matches("iax");
        (0..2).for_each(|index| each(&format!("group{number}.{index}")));
    }

    fn apply(&mut self, plan: &Plan) -> Result<(), super::Failed> {
        let root = self.root.clone();
        plan.apply(&root, |path, text| self.write(path, text))
    }
}

fn wanted(queues: usize, mode: Mode) -> Wanted {
    Wanted { devices: None, queues, mode, replace: true }
}

#[test]
fn queues_are_ready_for_programs_afterwards() {
    for (name, mode) in [("dedicated", Mode::Dedicated), ("shared", Mode::Shared)] {
        let mut kernel = Kernel::new(name);
        let plan = Plan::new(&kernel.root, &wanted(3, mode)).unwrap();
        kernel.apply(&plan).unwrap();
        let found = discover::queues(&kernel.root, Path::new("/dev/iax"));
        let found: Vec<_> = found.into_iter().flatten().collect();
        let names: Vec<&str> = found.iter().map(|found| &*found.name).collect();
        assert_eq!(names, ["wq1.0", "wq1.1", "wq1.2", "wq3.0", "wq3.1", "wq3.2"]);
        assert_eq!(names, plan.queues);
        assert!(
            found.iter().all(|found| (found.mode, found.depth) == (mode, 128 / 3)),
            "{found:?}"
        );
        assert_eq!(kernel.get("wq1.0", "name"), "zfolio");
        assert_eq!(kernel.get("engine1.1", "group_id"), "0");
        // Once more, with fewer: the same way from another configuration.
        let fewer = Plan::new(&kernel.root, &Wanted { replace: false, ..wanted(1, mode) }).unwrap();
        kernel.apply(&fewer).unwrap();
        let found = discover::queues(&kernel.root, Path::new("/dev/iax")).into_iter().flatten();
        assert_eq!(found.map(|found| found.depth).collect::<Vec<_>>(), [128, 128]);
    }
}

/// Goal: nothing half done stays. Method: a fault at each write in turn, from two configurations.
#[test]
fn a_fault_at_any_write_leaves_everything_as_it_was() {
    for (name, mode) in [("fault-1", Mode::Dedicated), ("fault-2", Mode::Shared)] {
        let mut kernel = Kernel::new(name);
        for queues in [2, 3] {
            kernel.choose();
            let before = kernel.contents();
            let plan = Plan::new(&kernel.root, &wanted(queues, mode)).unwrap();
            let mut faults = 0;
            loop {
                (kernel.writes, kernel.fault) = (0, Some(faults + 1));
                let Err(failed) = kernel.apply(&plan) else { break };
                faults += 1;
                assert!(failed.why.contains("injected"), "{failed}");
                assert_eq!(failed.left, [""; 0], "fault at write {faults}");
                assert!(kernel.contents() == before, "fault at write {faults}");
            }
            // Two devices: a queue or more and the device off and on, and some attributes of each.
            assert!(faults >= 30, "only {faults} writes");
        }
    }
}

#[test]
fn a_queue_that_does_not_start_is_undone_too() {
    let mut kernel = Kernel::new("state");
    let before = kernel.contents();
    let plan = Plan::new(&kernel.root, &wanted(1, Mode::Dedicated)).unwrap();
    let root = kernel.root.clone();
    let failed = plan
        .apply(&root, |path, text| match text {
            // The write is accepted, and nothing happens.
            "wq3.0" if path.ends_with("user/bind") => Ok(()),
            _ => kernel.write(path, text),
        })
        .unwrap_err();
    assert_eq!(
        failed.to_string(),
        "wq3.0 was not enabled by its driver; everything is as before: the kernel's log (dmesg) may say more"
    );
    assert_eq!(kernel.contents(), before);
}

/// Goal: an attribute that the kernel does not take back is named, once, and keeps no other one from being put back.
#[test]
fn what_cannot_be_put_back_is_one_attribute() {
    let mut kernel = Kernel::new("attribute");
    kernel.choose();
    let mut before = kernel.contents();
    let plan = Plan::new(&kernel.root, &wanted(2, Mode::Shared)).unwrap();
    let root = kernel.root.clone();
    let failed = plan
        .apply(&root, |path, text| match text {
            "4096" => Err(io::Error::other("broken")),
            "wq3.1" => Err(io::Error::other("injected")),
            _ => kernel.write(path, text),
        })
        .unwrap_err();
    let lost = |queue: &str| {
        let path = format!("/sys/bus/dsa/devices/{queue}/max_transfer_size");
        format!("{queue}/max_transfer_size ('4096' cannot be written to {path}: broken)")
    };
    assert_eq!(failed.left, [lost("wq3.0"), lost("wq1.0")]);
    for queue in ["wq1.0", "wq3.0"] {
        before.insert(kernel.path(queue, "max_transfer_size"), "2097152\n".to_owned());
    }
    assert_eq!(kernel.contents(), before);
}

#[test]
fn what_cannot_be_put_back_is_said() {
    let mut kernel = Kernel::new("broken");
    let plan = Plan::new(&kernel.root, &wanted(1, Mode::Dedicated)).unwrap();
    let root = kernel.root.clone();
    let failed = plan
        .apply(&root, |path, text| match path.ends_with("bind") {
            true => Err(io::Error::other("broken")),
            false => kernel.write(path, text),
        })
        .unwrap_err();
    assert!(failed.to_string().contains("these could not be put back: iax1 ("), "{failed}");
}

#[test]
fn bad_requests_are_refused_before_anything_is_written() {
    let kernel = Kernel::new("refused");
    let refused = |wanted: &Wanted| match Plan::new(&kernel.root, wanted).unwrap_err() {
        Refused::Argument(why) => format!("argument {why}"),
        Refused::Machine(why) => why,
    };
    let one = wanted(1, Mode::Dedicated);
    assert_eq!(
        refused(&Wanted { queues: 5, ..one.clone() }),
        "argument --queues: 5; accepted: 1 to 4, as many as iax1 has"
    );
    assert_eq!(
        refused(&Wanted { devices: Some(2), ..one.clone() }),
        "argument --devices: 2 of each package; accepted: 1 to 1, as many as there are"
    );
    assert_eq!(
        refused(&Wanted { replace: false, ..one.clone() }),
        "iax1: wq1.0 is enabled with type 'kernel', where 'user' is needed: --replace takes it from the kernel"
    );
    kernel.set("wq1.0", "clients", "2");
    assert_eq!(
        refused(&one),
        "iax1: wq1.0 is in use by the kernel (zswap or zram by deflate-iaa): choose another algorithm there first, or \
         try again"
    );
    kernel.set("wq1.0", "type", "user");
    assert_eq!(refused(&one), "iax1: wq1.0 is in use by 2 programs: end them first");
    kernel.set("iax1", "pasid_enabled", "0");
    assert!(refused(&one).contains("intel_iommu=on,sm_on"));
    kernel.set("iax1", "configurable", "0");
    assert!(refused(&one).contains("its configuration is fixed"));
    let none = Plan::new(Path::new("/nonexistent"), &one).unwrap_err();
    assert_eq!(none, Refused::Machine(super::NO_DEVICE.to_owned()));
}

#[test]
fn in_a_container_the_answer_is_the_host() {
    let kernel = Kernel::new("container");
    let plan = Plan::new(&kernel.root, &wanted(1, Mode::Dedicated)).unwrap();
    let read_only = |_: &Path, _: &str| Err(io::Error::from_raw_os_error(30));
    let failed = plan.apply(&kernel.root, read_only).unwrap_err().to_string();
    assert_eq!(
        failed,
        "'wq1.0' cannot be written to /sys/bus/dsa/drivers/crypto/unbind: Read-only file system (os error 30); \
         nothing was changed: /sys is read-only here, so run it on the host"
    );
}

/// A regression: where nothing was set up before, it said for each queue that its mode could not be put back.
#[test]
fn where_nothing_was_set_up_the_answer_is_root_too() {
    let kernel = Kernel::new("unset");
    for number in [1, 3] {
        kernel.unbind(&format!("wq{number}.0"));
        kernel.unbind(&format!("iax{number}"));
    }
    let before = kernel.contents();
    let plan = Plan::new(&kernel.root, &wanted(1, Mode::Dedicated)).unwrap();
    let denied = |_: &Path, _: &str| Err(io::Error::from_raw_os_error(13));
    let failed = plan.apply(&kernel.root, denied).unwrap_err().to_string();
    assert!(
        failed.ends_with(": Permission denied (os error 13); nothing was changed: run it as root"),
        "{failed}"
    );
    assert_eq!(kernel.contents(), before);
}

#[test]
fn without_permission_the_answer_is_root() {
    let kernel = Kernel::new("permission");
    let before = kernel.contents();
    let plan = Plan::new(&kernel.root, &wanted(1, Mode::Dedicated)).unwrap();
    let denied = |_: &Path, _: &str| Err(io::Error::from_raw_os_error(13));
    let failed = plan.apply(&kernel.root, denied).unwrap_err().to_string();
    assert_eq!(
        failed,
        "'wq1.0' cannot be written to /sys/bus/dsa/drivers/crypto/unbind: Permission denied (os error 13); \
         nothing was changed: run it as root"
    );
    assert_eq!(kernel.contents(), before);
}
