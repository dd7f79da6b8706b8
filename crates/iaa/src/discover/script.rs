//! A made-up sysfs whose attributes a script of bytes writes, for fuzzing: whatever they say, reading them ends, a
//! driver that looks at them has the queues which they name, and a plan keeps to what the device has.

use std::fs;
use std::path::Path;

use super::{DEVICES, Found, Queue};
use crate::machine::Machine;
use crate::portal::Nowhere;
use crate::portal::hardware::Mode;
use crate::settings::Settings;
use crate::setup::{Plan, Wanted};

/// Attributes of a device.
const OF_DEVICE: [&str; 5] =
    ["numa_node", "state", "configurable", "pasid_enabled", "max_work_queues_size"];

/// Values that get far; a script may write any other.
const USUAL: [&str; 12] = [
    "1",
    "0",
    "enabled",
    "disabled",
    "user",
    "kernel",
    "dedicated",
    "shared",
    "128",
    "-1",
    "",
    "4294967295",
];

/// Fills `root`, an empty directory, as `data` says, and reads it.
///
/// # Panics
///
/// A plan gives the queues of a device more descriptors than it has, or `root` is not writable.
pub fn play(root: &Path, data: &[u8]) {
    let mut bytes = data.iter().copied();
    fill(root, &mut bytes);
    look(root, &mut bytes);
    let found = super::queues(root, Path::new("/dev/iax"));
    found.iter().flatten().for_each(|found| assert!(found.depth > 0, "{found:?}"));
    let wanted = Wanted { devices: None, queues: 2, mode: Mode::Shared, replace: true };
    let Ok(plan) = Plan::new(root, &wanted) else { return };
    assert!(!plan.writes().is_empty());
    let sizes = plan.writes().into_iter().filter(|(path, _)| path.ends_with("wq1.0/size"));
    let size: u64 = sizes.filter_map(|(_, text)| text.parse::<u64>().ok()).max().unwrap_or(0);
    let most = super::read(&root.join(DEVICES).join("iax1"), "max_work_queues_size");
    let most: u64 = most.and_then(|text| text.parse().ok()).unwrap_or(0);
    assert!(2 * size <= most, "{size} of {most} descriptors for each of 2 queues");
}

/// Writes all attributes.
fn fill(root: &Path, bytes: &mut impl Iterator<Item = u8>) {
    for number in [1, 3] {
        let own = format!("iax{number}");
        OF_DEVICE.iter().for_each(|attribute| write(root, &own, attribute, bytes));
        for name in [format!("wq{number}.0"), format!("wq{number}.1")] {
            Queue::attributes().for_each(|attribute| write(root, &name, attribute, bytes));
        }
        write(root, &format!("engine{number}.0"), "group_id", bytes);
    }
}

/// A driver that begins with one half of the script, and sees the other.
fn look(root: &Path, bytes: &mut impl Iterator<Item = u8>) {
    let open = |found: &Found| Ok(found.with(Box::new(Nowhere)));
    let dev = root.join("dev");
    enable(&dev);
    let (machine, _) = Machine::new(root, &dev, Settings::default(), Box::new(open));
    for now_ns in [0, u64::MAX / 2] {
        machine.look(now_ns);
        let mut usable: Vec<String> =
            super::queues(root, &dev).into_iter().flatten().map(|found| found.name).collect();
        let mut open = machine.driver.open_queues();
        usable.sort_unstable();
        open.sort_unstable();
        assert_eq!(open, usable);
        fill(root, bytes);
        enable(&dev);
    }
}

/// Makes other files of the queues, as the kernel does it whenever their attributes may have changed.
fn enable(dev: &Path) {
    fs::create_dir_all(dev).expect("the directory of the script is writable");
    for name in ["wq1.0", "wq1.1", "wq3.0", "wq3.1"] {
        let new = dev.join("new");
        fs::write(&new, "").expect("the directory of the script is writable");
        fs::rename(new, dev.join(name)).expect("the directory of the script is writable");
    }
}

/// Writes one attribute: a usual value, some bytes, or none at all.
fn write(root: &Path, owner: &str, attribute: &str, bytes: &mut impl Iterator<Item = u8>) {
    let what = usize::from(bytes.next().unwrap_or(255));
    let text = match what {
        255 => return,
        200.. => bytes.take(what - 200).collect(),
        _ => USUAL[what % USUAL.len()].as_bytes().to_vec(),
    };
    let directory = root.join(DEVICES).join(owner);
    fs::create_dir_all(&directory).expect("the directory of the script is writable");
    fs::write(directory.join(attribute), text).expect("the directory of the script is writable");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use zfolio_core::testing::{Random, seed};

    /// Goal: the fuzz target's run holds for random scripts.
    #[test]
    fn any_attributes_are_read_or_refused() {
        let mut random = Random::new(seed());
        let root = std::env::temp_dir().join(format!("zfolio-iaa-script-{}", std::process::id()));
        for length in 0..200 {
            super::play(&root, &random.bytes(length));
            drop(fs::remove_dir_all(&root));
        }
        // Nothing but the queues' states differs, so that many can be used.
        for _ in 0..20 {
            let mut queue = || [6, 8, 1, 0, 0, 0, 4, 0, 0, [2, 3][random.below(2)], 1];
            let mut device = || [&[1; 5][..], &queue(), &queue(), &[1]].concat();
            let script: Vec<u8> = (0..6).flat_map(|_| device()).collect();
            super::play(&root, &script);
            drop(fs::remove_dir_all(&root));
        }
    }
}
