//! Which queues each CPU uses.
//!
//! The devices of a package belong to the CPUs of that package, wherever its memory is. With `distribute` a CPU goes
//! round robin through all of them; otherwise the CPUs are divided evenly over the devices, and each uses its own.
//! CPUs of a package without a device use those of all packages.

use crate::queues::{Direction, Placed};
use crate::settings::Settings;

/// The masks of each CPU, whose packages are `packages`, for both directions.
pub(crate) fn masks(packages: &[usize], queues: &[Placed], settings: &Settings) -> Vec<[u64; 2]> {
    let mut masks = vec![[0; 2]; packages.len()];
    for (cpu, package) in packages.iter().enumerate() {
        let is_near = |of: usize| of == *package;
        let has_device = queues.iter().any(|queue| is_near(queue.package));
        let mut devices: Vec<usize> = queues
            .iter()
            .filter(|queue| !has_device || is_near(queue.package))
            .map(|queue| queue.device)
            .collect();
        devices.sort_unstable();
        devices.dedup();
        if devices.is_empty() {
            continue;
        }
        // This CPU is number `place` of `count` that share the devices.
        let sharers = || packages.iter().enumerate().filter(|it| !has_device || is_near(*it.1));
        let place = sharers().filter(|it| it.0 < cpu).count();
        let own = devices[place * devices.len() / sharers().count()];
        let directions = [
            (Direction::Compress, settings.distribute_comps),
            (Direction::Decompress, settings.distribute_decomps),
        ];
        for (direction, distributes) in directions {
            let chosen = devices.iter().filter(|device| distributes || **device == own);
            masks[cpu][direction as usize] = chosen
                .map(|device| of_device(*device, queues, direction, settings.comp_wqs_per_iaa))
                .fold(0, |sum, mask| sum | mask);
        }
    }
    masks
}

/// The queues of a device for a direction: the last `comp_wqs` by their numbers compress and the others decompress, if
/// there are others and any are for compression; otherwise all do both.
fn of_device(device: usize, queues: &[Placed], direction: Direction, comp_wqs: usize) -> u64 {
    let mut own: Vec<&Placed> = queues.iter().filter(|queue| queue.device == device).collect();
    // A queue that was disabled and is back lies behind the others in the table.
    own.sort_unstable_by_key(|queue| (queue.number, queue.index));
    let first_comp = own.len().saturating_sub(comp_wqs);
    let chosen = match direction {
        _ if comp_wqs == 0 || first_comp == 0 => &own[..],
        Direction::Compress => &own[first_comp..],
        Direction::Decompress => &own[..first_comp],
    };
    chosen.iter().fold(0, |mask, queue| mask | 1 << queue.index)
}

#[cfg(test)]
mod tests {
    use super::masks;
    use crate::queues::Placed;
    use crate::settings::Settings;

    /// Queues of devices, in the order of their indices: for each the device and its package.
    fn placed(of: &[(usize, usize)]) -> Vec<Placed> {
        let each = |(index, (device, package)): (usize, &(usize, usize))| Placed {
            index,
            number: index,
            device: *device,
            package: *package,
        };
        of.iter().enumerate().map(each).collect()
    }

    fn settings(comp_wqs: usize, comps: bool, decomps: bool) -> Settings {
        Settings {
            comp_wqs_per_iaa: comp_wqs,
            distribute_comps: comps,
            distribute_decomps: decomps,
            ..Settings::default()
        }
    }

    #[test]
    fn mapped_cpus_are_divided_evenly_over_the_devices_of_their_package() {
        let queues = placed(&[(1, 0), (3, 0), (5, 1), (7, 1)]);
        let masks = masks(&[0, 0, 0, 0, 1, 1, 1, 1], &queues, &settings(0, false, false));
        let of_comp: Vec<u64> = masks.iter().map(|mask| mask[0]).collect();
        assert_eq!(of_comp, [1, 1, 2, 2, 4, 4, 8, 8]);
    }

    #[test]
    fn distribution_stays_in_the_package() {
        let queues = placed(&[(1, 0), (3, 0), (5, 1)]);
        let masks = masks(&[0, 1, 0], &queues, &settings(0, true, false));
        assert_eq!(masks, [[0b011, 0b001], [0b100, 0b100], [0b011, 0b010]]);
    }

    #[test]
    fn the_last_queues_of_a_device_compress_if_there_are_others() {
        let queues = placed(&[(1, 0), (1, 0), (1, 0), (3, 0)]);
        let masks = masks(&[0], &queues, &settings(1, true, true));
        assert_eq!(masks, [[0b1100, 0b1011]], "the one queue of device 3 does both");
    }

    /// Goal: which queues are the last ones says their number, also when another one was put to use last.
    #[test]
    fn a_queue_that_is_back_does_what_it_did() {
        let mut queues = placed(&[(1, 0), (1, 0), (1, 0)]);
        (queues[0].number, queues[1].number, queues[2].number) = (2, 1, 0);
        let masks = masks(&[0], &queues, &settings(1, true, true));
        assert_eq!(masks, [[0b001, 0b110]]);
    }

    #[test]
    fn a_package_without_a_device_uses_those_of_others() {
        let masks = masks(&[0, 7], &placed(&[(1, 0)]), &settings(0, false, false));
        assert_eq!(masks, [[1, 1], [1, 1]]);
        assert_eq!(super::masks(&[0], &[], &settings(0, true, true)), [[0, 0]]);
    }
}
