//! The attributes of a disk, by the names that they have in `/sys/block/zramN`, with the kernel's values and columns.
//!
//! ```text
//! read    comp_algorithm recomp_algorithm max_comp_streams initstate io_stat mm_stat bd_stat debug_stat block_state
//!         stat apart_stat backing_dev policy_stat writeback_stat driver_stats global_stats wq_stats
//! both    disksize mem_limit writeback_limit writeback_limit_enable writeback_batch_size compressed_writeback
//! write   mem_used_max compact idle recompress reset writeback
//! neither algorithm_params
//! ```
//!
//! `algorithm_params` can be written in the kernel until a disk has its size, which here it always has. `stat` is the
//! block layer's. Of its columns those are counted that say how many requests there were, how many sectors they had,
//! and how long they took; the others are 0.
//!
//! `apart_stat`, `policy_stat` and `writeback_stat` are not the kernel's, which has no policy, and no units larger than
//! a page. `apart_stat`: units of which pages are apart, those of them that are split, the pages, their bytes, and how
//! many units were joined because they were idle. `policy_stat`: the age in seconds at which units are recompressed
//! now, how many were tried, how many shrank, and by how many bytes together. `writeback_stat`: the age in seconds at
//! which units are written back now; how many units were written because somebody asked, because they were old, and to
//! make room; how many writes came to nothing; how often the budget was used up. [`APART_STAT`], [`POLICY_STAT`] and
//! [`WRITEBACK_STAT`] are the names of their columns.
//!
//! `global_stats` and `wq_stats` are those of the kernel's driver of the accelerator, for this disk's own driver, and
//! `driver_stats` is what the kernel does not count; a disk has them if its accelerator is hardware.
//!
//! `compressed_writeback` is 1: what is written back is as compressed as it is in memory.

use std::fmt;

use zfolio_core::size;
use zfolio_core::zcomp::{Algorithm, Zcomp};
use zfolio_core::zram::{
    self, ApartStat, Chosen, Recompression, Stop, WRITEBACK_BATCH_MAX, What, WroteBack,
};
use zfolio_sys::cpu;
use zfolio_workers::HARDWARE_STATS;

use crate::ram::Ram;

const READABLE: [&str; 23] = [
    "apart_stat",
    "backing_dev",
    "bd_stat",
    "block_state",
    "comp_algorithm",
    "compressed_writeback",
    "debug_stat",
    "disksize",
    "driver_stats",
    "global_stats",
    "initstate",
    "io_stat",
    "max_comp_streams",
    "mem_limit",
    "mm_stat",
    "policy_stat",
    "recomp_algorithm",
    "stat",
    "writeback_batch_size",
    "writeback_limit",
    "writeback_limit_enable",
    "writeback_stat",
    "wq_stats",
];
const WRITABLE: [&str; 12] = [
    "compact",
    "compressed_writeback",
    "disksize",
    "idle",
    "mem_limit",
    "mem_used_max",
    "recompress",
    "reset",
    "writeback",
    "writeback_batch_size",
    "writeback_limit",
    "writeback_limit_enable",
];

/// What the kernel lets be written before a disk has its size.
const FIXED: &str = "algorithm_params";

/// Further settings that a disk has for good.
const SETTINGS: [&str; 4] =
    ["backing_dev", "comp_algorithm", "max_comp_streams", "recomp_algorithm"];

/// The names of the columns of `apart_stat`.
pub const APART_STAT: [&str; 5] = [
    "apart_units",
    "apart_split_units",
    "apart_pages",
    "apart_compressed_bytes",
    "apart_joined_units",
];

/// The names of the columns of `policy_stat`.
pub const POLICY_STAT: [&str; 4] =
    ["policy_age_s", "policy_tried", "policy_shrank", "policy_bytes_saved"];

/// The names of the columns of `writeback_stat`.
pub const WRITEBACK_STAT: [&str; 6] = [
    "writeback_age_s",
    "writeback_asked_units",
    "writeback_old_units",
    "writeback_room_units",
    "writeback_not_written",
    "writeback_budget_used_up",
];

/// Why an attribute is not read or written.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no such attribute, or not in this direction.
    Name {
        /// The name that was given.
        given: String,
        /// Those that are accepted.
        accepted: &'static [&'static str],
    },
    /// The value is not accepted.
    Value {
        /// The attribute.
        name: &'static str,
        /// The value that was given.
        given: String,
        /// What is accepted.
        accepted: String,
    },
    /// The disk could not do it.
    Failed {
        /// The attribute.
        name: &'static str,
        /// Why.
        why: String,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Name { given, accepted }
                if WRITABLE.contains(&given.as_str())
                    || given == FIXED && accepted.contains(&READABLE[0]) =>
            {
                write!(f, "{given} can only be written; accepted: {}", accepted.join(", "))
            }
            Refusal::Name { given, accepted }
                if SETTINGS.contains(&given.as_str()) || given == FIXED =>
            {
                write!(f, "{given} is set when the disk is made; accepted: {}", accepted.join(", "))
            }
            Refusal::Name { given, accepted } if READABLE.contains(&given.as_str()) => {
                write!(f, "{given} can only be read; accepted: {}", accepted.join(", "))
            }
            Refusal::Name { given, accepted } => {
                write!(f, "'{given}' is not an attribute; accepted: {}", accepted.join(", "))
            }
            Refusal::Value { name, given, accepted } => {
                write!(f, "{name}: '{given}' is not accepted; accepted: {accepted}")
            }
            Refusal::Failed { name, why } => write!(f, "{name}: {why}"),
        }
    }
}

impl std::error::Error for Refusal {}

fn failed(name: &'static str, why: impl fmt::Display) -> Refusal {
    Refusal::Failed { name, why: why.to_string() }
}

/// The kernel's line of all algorithms, with the one that is in use in brackets.
fn algorithms(used: &Zcomp) -> String {
    let mark = |algorithm: &Algorithm| match algorithm.name() == used.name() {
        true => format!("[{}]", algorithm.name()),
        false => algorithm.name().to_owned(),
    };
    let mut all: Vec<String> = Algorithm::ALL.iter().map(mark).collect();
    if Algorithm::ALL.iter().all(|algorithm| algorithm.name() != used.name()) {
        all.push(format!("[{}]", used.name()));
    }
    all.join(" ")
}

/// The kernel's line of figures.
fn columns<const N: usize>(counts: [u64; N]) -> String {
    counts.map(|count| format!("{count:8}")).join(" ") + "\n"
}

/// The value of an attribute; it ends with a line break.
///
/// # Errors
///
/// [`Refusal::Name`].
pub fn read(ram: &Ram, name: &str) -> Result<String, Refusal> {
    let zram = ram.zram();
    let mut codecs = zram.codecs().map(algorithms);
    Ok(match name {
        "disksize" => format!("{}\n", zram.disk_bytes()),
        "mem_limit" => format!("{}\n", zram.mm_stat().mem_limit),
        "initstate" => "1\n".to_owned(),
        "max_comp_streams" => format!("{}\n", zram.streams()),
        "comp_algorithm" => codecs.next().unwrap_or_default() + "\n",
        "recomp_algorithm" => {
            let line = |(priority, line): (usize, String)| format!("#{priority}: {line}\n");
            codecs.enumerate().skip(1).map(line).collect()
        }
        "mm_stat" => format!("{}\n", zram.mm_stat()),
        "io_stat" => format!("{}\n", zram.io_stat()),
        "stat" => format!("{}\n", ram.requests()),
        "apart_stat" => {
            let ApartStat { units, split_units, pages, compressed_bytes, joined_units } =
                zram.apart_stat();
            let counts = [units, split_units, pages, compressed_bytes, joined_units];
            columns::<{ APART_STAT.len() }>(counts)
        }
        "policy_stat" => {
            let done = ram.policy_stat();
            let counts = [u64::from(ram.age_s()), done.tried, done.shrank, done.bytes_saved];
            columns::<{ POLICY_STAT.len() }>(counts)
        }
        "bd_stat" => format!("{}\n", zram.bd_stat()),
        "backing_dev" => format!("{}\n", ram.backing_name()),
        "compressed_writeback" => "1\n".to_owned(),
        "writeback_batch_size" => format!("{}\n", zram.writeback_batch()),
        "writeback_limit" => format!("{}\n", zram.writeback_limit()),
        "writeback_limit_enable" => format!("{}\n", u8::from(zram.is_writeback_limited())),
        "writeback_stat" => {
            let done = zram.writeback_stat();
            columns::<{ WRITEBACK_STAT.len() }>([
                u64::from(ram.writeback_age_s()),
                done.asked_units,
                done.old_units,
                done.room_units,
                done.not_written,
                done.budget_used_up,
            ])
        }
        "debug_stat" => "version: 1\n       0        0\n".to_owned(),
        "block_state" => {
            let mut state = String::new();
            zram.block_state(&mut state).expect("a string takes everything");
            state
        }
        _ => return hardware(ram, name),
    })
}

/// The figures of the accelerator.
fn hardware(ram: &Ram, name: &str) -> Result<String, Refusal> {
    let Some(name) = HARDWARE_STATS.into_iter().find(|known| *known == name) else {
        return Err(Refusal::Name { given: name.to_owned(), accepted: &READABLE });
    };
    let hardware = ram.hardware().ok_or_else(|| {
        failed(name, "the disk has no accelerator; give it one with --accelerate iaa")
    })?;
    Ok(hardware.stats(name))
}

/// Writes an attribute.
///
/// # Errors
///
/// See [`Refusal`].
pub fn write(ram: &Ram, name: &str, given: &str) -> Result<(), Refusal> {
    let (zram, given) = (ram.zram(), given.trim());
    let value = |name, accepted: &str| Refusal::Value {
        name,
        given: given.to_owned(),
        accepted: accepted.to_owned(),
    };
    match name {
        "disksize" => {
            let accepted = format!("a size that is {}", zram::accepted_sizes(zram.unit()));
            let bytes = size::parse(given).map_err(|_| value("disksize", &accepted))?;
            zram.resize(bytes).map_err(|error| match error {
                zram::Error::Invalid { .. } => value("disksize", &accepted),
                error => failed("disksize", error),
            })?;
        }
        "mem_limit" => {
            let bytes = if given == "0" { Some(0) } else { size::parse(given).ok() };
            zram.set_mem_limit(
                bytes.ok_or_else(|| value("mem_limit", "a size, or 0 for no limit"))?,
            );
        }
        "mem_used_max" if given == "0" => zram.reset_mem_used_max(),
        "mem_used_max" => return Err(value("mem_used_max", "0")),
        "compact" if given == "1" => zram.compact(),
        "compact" => return Err(value("compact", "1")),
        "reset" => {
            check_reset(given)?;
            ram.reset();
        }
        "idle" => {
            ram.tick();
            match (given, given.parse()) {
                ("all", _) => zram.mark_idle(None),
                (_, Ok(age_s)) => zram.mark_idle(Some(age_s)),
                _ => return Err(value("idle", "all, or an age in seconds")),
            }
        }
        "recompress" => {
            let request = recompression(ram, given)?;
            let done = zram.recompress(cpu::current(), request);
            done.map_err(|error| failed("recompress", error))?;
        }
        _ => return write_back(ram, name, given),
    }
    Ok(())
}

/// Whether a value of `reset` is one, before anything is done for it. Any positive number is, as for the kernel.
pub(crate) fn check_reset(given: &str) -> Result<(), Refusal> {
    let given = given.trim();
    if given.parse::<u64>().is_ok_and(|number| number > 0) {
        return Ok(());
    }
    let accepted = "1, or another positive number".to_owned();
    Err(Refusal::Value { name: "reset", given: given.to_owned(), accepted })
}

/// Writes one of the attributes of writeback.
fn write_back(ram: &Ram, name: &str, given: &str) -> Result<(), Refusal> {
    let zram = ram.zram();
    let known = WRITABLE.iter().find(|known| **known == name);
    let Some(name) = known.filter(|known| known.contains("writeback")) else {
        return Err(Refusal::Name { given: name.to_owned(), accepted: &WRITABLE });
    };
    let refused = |accepted: String| Refusal::Value { name, given: given.to_owned(), accepted };
    if !zram.has_backing() {
        let accepted = "nothing: the disk has no place to write to; give it one with --writeback";
        return Err(refused(accepted.to_owned()));
    }
    let number = || given.parse::<u64>().ok();
    match *name {
        "writeback_limit" => {
            let pages = number().ok_or_else(|| refused("a number of pages of 4 KiB".to_owned()))?;
            zram.set_writeback_limit(pages);
        }
        "writeback_limit_enable" if matches!(given, "0" | "1") => {
            zram.enable_writeback_limit(given == "1");
        }
        "writeback_limit_enable" => return Err(refused("0, 1".to_owned())),
        "writeback_batch_size" => {
            let units = number().and_then(|units| usize::try_from(units).ok());
            let units = units.filter(|units| (1..=WRITEBACK_BATCH_MAX).contains(units));
            let accepted = || refused(format!("1 to {WRITEBACK_BATCH_MAX} units"));
            zram.set_writeback_batch(units.ok_or_else(accepted)?);
        }
        "compressed_writeback" if given == "1" => {}
        "compressed_writeback" => {
            let accepted = "1: units are written as compressed as they are in memory";
            return Err(refused(accepted.to_owned()));
        }
        _ => {
            ram.tick();
            let mut done = WroteBack::default();
            for chosen in chosen(ram, given)? {
                let WroteBack { units, stayed, stop } = zram.write_back(cpu::current(), &chosen);
                done = WroteBack { units: done.units + units, stayed: done.stayed + stayed, stop };
                if stop.is_some() {
                    break;
                }
            }
            return outcome(done);
        }
    }
    Ok(())
}

/// The kernel's words, in any order and number: `idle`, `type=idle`, `page_index=5`, `page_indexes=1-100`. All of them
/// are read before anything is written. Indices that are neighbours are one choice, so that they share batches.
fn chosen(ram: &Ram, given: &str) -> Result<Vec<Chosen>, Refusal> {
    let units = ram.zram().disk_bytes() / ram.zram().unit().bytes() as u64;
    let refused = |word: &str| Refusal::Value {
        name: "writeback",
        given: word.to_owned(),
        accepted: format!(
            "huge, idle, huge_idle, incompressible, or page_index=N page_indexes=A-B below {units}"
        ),
    };
    let range = |word: &str| {
        let (first, last) = match word.split_once('=')? {
            ("page_index", index) => (index, index),
            ("page_indexes", range) => range.split_once('-')?,
            _ => return None,
        };
        let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
        (first <= last && last < units).then_some(first..=last)
    };
    let mut all = Vec::new();
    for word in given.split_whitespace() {
        let named = match word.strip_prefix("type=").unwrap_or(word) {
            "huge" => Some(Chosen::Huge),
            "idle" => Some(Chosen::Idle),
            "huge_idle" => Some(Chosen::HugeIdle),
            "incompressible" => Some(Chosen::Incompressible),
            _ => None,
        };
        let range = || range(word).ok_or_else(|| refused(word));
        match (named, all.last_mut()) {
            (Some(named), _) => all.push(named),
            (None, Some(Chosen::Indices(ranges))) => ranges.push(range()?),
            (None, _) => all.push(Chosen::Indices(vec![range()?])),
        }
    }
    if all.is_empty() { Err(refused(given)) } else { Ok(all) }
}

/// What was not done is told; what was done stays done.
fn outcome(done: WroteBack) -> Result<(), Refusal> {
    let why = match done.stop {
        None => return Ok(()),
        Some(Stop::Limit) => "writeback_limit is used up",
        Some(Stop::Backing) => "backing_dev is full, fails, or does not answer",
        Some(_) => "the disk ends",
    };
    let units = done.units;
    Err(failed(
        "writeback",
        format!("{why}; {units} units were written, the others stay in memory"),
    ))
}

/// `type=idle threshold=3000 max_pages=100 priority=1 algo=zstd`, in any order.
fn recompression(ram: &Ram, given: &str) -> Result<Recompression, Refusal> {
    let names: Vec<&str> = ram.zram().codecs().map(Zcomp::name).collect();
    let refused = |word: &str| Refusal::Value {
        name: "recompress",
        given: word.to_owned(),
        accepted: format!(
            "type=idle|huge|huge_idle threshold=0..{} max_pages=N priority=1..{} algo={}",
            ram.zram().unit().bytes(),
            names.len() - 1,
            names[1..].join("|")
        ),
    };
    if names.len() == 1 {
        let accepted =
            "nothing: the disk has one algorithm; give it another with --recompress".to_owned();
        return Err(Refusal::Value { name: "recompress", given: given.to_owned(), accepted });
    }
    let mut request = Recompression::default();
    for word in given.split_whitespace() {
        let (key, value) = word.split_once('=').ok_or_else(|| refused(word))?;
        let number = || value.parse::<usize>().map_err(|_| refused(word));
        match (key, value) {
            ("type", "idle") => request.what = What::Idle,
            ("type", "huge") => request.what = What::Huge,
            ("type", "huge_idle") => request.what = What::HugeIdle,
            ("threshold", _) => {
                // No object is larger than a unit. The kernel refuses what no object that has shrunk can have.
                let bytes = Some(number()?).filter(|bytes| *bytes <= ram.zram().unit().bytes());
                request.threshold = bytes.ok_or_else(|| refused(word))?;
            }
            ("max_pages", _) => request.max_pages = number()? as u64,
            ("priority", _) => request.priority = number()?,
            ("algo", _) => {
                let place = names[1..].iter().position(|name| *name == value);
                request.priority = 1 + place.ok_or_else(|| refused(word))?;
            }
            _ => return Err(refused(word)),
        }
    }
    if !(1..names.len()).contains(&request.priority) {
        return Err(refused(given));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use zfolio_core::testing::Random;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use zfolio_core::page::UnitOrder;
    use zfolio_core::zcomp::{
        self, Algorithm, Backend, Compressor, Decompressor, Params, software,
    };
    use zfolio_workers::{Accelerated, Hardware};

    use super::{HARDWARE_STATS, READABLE, Refusal, WRITABLE, read, write};
    use crate::device::{Device as _, Error};
    use crate::ram::{Config, Ram};
    use crate::testing::{ram, written_back};

    /// Goal: each attribute can be read or written or both, and a refusal names what is accepted.
    #[test]
    fn every_attribute_has_a_direction() {
        let ram = written_back(ram(1 << 20, &["lz4", "zstd"]));
        for name in READABLE.into_iter().chain(WRITABLE) {
            let value = match name {
                "disksize" => "2M",
                "mem_limit" | "mem_used_max" => "0",
                "idle" => "all",
                "recompress" => "type=idle priority=1",
                "writeback" => "idle",
                _ => "1",
            };
            let (can_read, can_write) = (read(&ram, name), write(&ram, name, value));
            let is_hardware = HARDWARE_STATS.contains(&name);
            assert!(can_read.is_ok() || can_write.is_ok() || is_hardware, "{name}");
            assert!(
                can_read.is_err() || name == "block_state" || can_read.unwrap().ends_with('\n')
            );
        }
        assert_eq!(ram.size_bytes(), 2 << 20);
        let unknown = read(&ram, "mm_stats").unwrap_err().to_string();
        assert!(
            unknown
                .starts_with("'mm_stats' is not an attribute; accepted: apart_stat, backing_dev, "),
            "{unknown}"
        );
        for (name, value) in [("comp_algorithm", "zstd"), ("algorithm_params", "level=9")] {
            let fixed = write(&ram, name, value).unwrap_err().to_string();
            let start = format!("{name} is set when the disk is made; accepted: compact");
            assert!(fixed.starts_with(&start), "{fixed}");
        }
        let figure = write(&ram, "mm_stat", "1").unwrap_err().to_string();
        assert!(figure.starts_with("mm_stat can only be read; accepted: compact"), "{figure}");
        for name in ["idle", "algorithm_params"] {
            let deaf = read(&ram, name).unwrap_err().to_string();
            let start = format!("{name} can only be written; accepted: apart_stat, backing_dev");
            assert!(deaf.starts_with(&start), "{deaf}");
        }
    }

    /// Goal: requests and their sectors are in the kernel's columns, also those that fail, and no mistakes. What they
    /// took depends on the machine.
    #[test]
    fn requests_are_counted_as_the_block_layer_does() {
        let ram = ram(1 << 20, &["lz4"]);
        let noise = Random::new(1).bytes(8192);
        ram.write(0, &noise).unwrap();
        ram.read(512, &mut [0; 512]).unwrap();
        ram.read(4096, &mut [0; 1024]).unwrap();
        ram.discard(0, 4096).unwrap();
        ram.write_zeroes(4096, 4096, false).unwrap();
        ram.flush().unwrap();
        write(&ram, "mem_limit", "4K").unwrap();
        assert_eq!(ram.write(8192, &noise), Err(Error::NoSpace));
        assert_eq!(ram.write(1 << 20, &noise), Err(Error::Invalid));
        assert_eq!(ram.read(1, &mut [0; 512]), Err(Error::Invalid));
        let line = read(&ram, "stat").unwrap();
        let mut columns: Vec<u64> =
            line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let [read_ms, write_ms, all_ms, discard_ms, flush_ms] =
            [3, 7, 10, 14, 16].map(|at| std::mem::take(&mut columns[at]));
        assert!(all_ms >= read_ms + write_ms + discard_ms + flush_ms, "{line}");
        let expected = [2, 0, 3, 0, 3, 0, 16 + 8 + 16, 0, 0, 0, 0, 1, 0, 8, 0, 1, 0];
        assert_eq!(columns, expected);
    }

    /// Hardware that has lz4, and when it looked last.
    #[derive(Debug)]
    struct Chip(AtomicU64);

    /// lz4 under another name.
    struct OnChip(Box<dyn Backend>);

    impl Hardware for Chip {
        fn codec(&self, params: &Params) -> Option<Box<dyn Backend>> {
            let software = software(params, UnitOrder::DEFAULT).ok()?;
            (params.algorithm == Algorithm::Lz4).then(|| Box::new(OnChip(software)) as _)
        }

        fn stats(&self, name: &str) -> String {
            format!("{name} of a chip\n")
        }

        fn look(&self, now_ns: u64) {
            self.0.store(now_ns, Relaxed);
        }

        fn start_over(&self) {}
    }

    impl Backend for OnChip {
        fn name(&self) -> &'static str {
            "lz4-chip"
        }

        fn compressor(&self, unit_bytes: usize) -> Result<Box<dyn Compressor>, zcomp::Error> {
            self.0.compressor(unit_bytes)
        }

        fn decompressor(&self, unit_bytes: usize) -> Result<Box<dyn Decompressor>, zcomp::Error> {
            self.0.decompressor(unit_bytes)
        }
    }

    /// Goal: hardware takes the place of the codecs that it has and no other's; the disk's contents are named after the
    /// software that reads them; and its figures are attributes. It has a turn when the disk has one.
    #[test]
    fn hardware_takes_the_place_of_its_codecs() {
        let hardware = Arc::new(Chip(AtomicU64::new(0)));
        let config = Config {
            disk_bytes: 1 << 20,
            algorithms: ["lz4", "zstd"].map(|name| name.parse().unwrap()).into(),
            unit: UnitOrder::DEFAULT,
            limit_bytes: 0,
            age_s: 600,
            accelerated: Accelerated::Hardware(Arc::clone(&hardware) as _),
        };
        let source = Arc::new(zfolio_pager::PoolMappings::default());
        let chip = Ram::new(&config, source, Box::new(|error| panic!("{error}"))).unwrap();
        assert!(read(&chip, "comp_algorithm").unwrap().ends_with(" [lz4-chip]\n"));
        assert!(read(&chip, "recomp_algorithm").unwrap().contains("[zstd]"));
        let params = chip.zram().codecs().map(|codec| codec.params().unwrap().to_string());
        assert_eq!(params.collect::<Vec<_>>(), ["lz4", "zstd"]);
        for name in HARDWARE_STATS {
            assert_eq!(read(&chip, name).unwrap(), format!("{name} of a chip\n"));
            let line = read(&ram(1 << 20, &["lz4"]), name).unwrap_err().to_string();
            assert!(line.starts_with(&format!("{name}: the disk has no accelerator")), "{line}");
        }
        chip.work(200_000_000);
        assert!(hardware.0.load(Relaxed) > 0, "it looks for devices when the disk has time");
    }

    /// Contents that shrink.
    fn letters(bytes: u32) -> Vec<u8> {
        (0..bytes).map(|at| b'a' + (at * at % 13) as u8).collect()
    }

    /// Goal: what is written to an attribute happens.
    #[test]
    fn attributes_do_what_they_say() {
        let ram = ram(1 << 20, &["lz4", "zstd"]);
        assert!(read(&ram, "comp_algorithm").unwrap().contains("[lz4]"));
        let second = read(&ram, "recomp_algorithm").unwrap();
        assert!(second.starts_with("#1: ") && second.contains("[zstd]"), "{second}");
        let text = letters(4096);
        ram.write(0, &text).unwrap();
        ram.write(8192, &text).unwrap();
        write(&ram, "idle", "all").unwrap();
        ram.read(8192, &mut [0; 512]).unwrap();
        write(&ram, "recompress", "type=idle algo=zstd").unwrap();
        let state = read(&ram, "block_state").unwrap();
        let letters: Vec<_> = state.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
        assert_eq!(letters, ["....r.", "......"], "what was tried is not idle any more");
        write(&ram, "mem_limit", "64K").unwrap();
        assert_eq!(read(&ram, "mem_limit").unwrap(), "65536\n");
        assert!(matches!(write(&ram, "disksize", "4096"), Err(Refusal::Failed { .. })));
        // Any positive number, as for the kernel.
        write(&ram, "reset", "2").unwrap();
        write(&ram, "disksize", "4096").unwrap();
        let stat = read(&ram, "mm_stat").unwrap();
        assert_eq!(stat.split_whitespace().take(2).collect::<Vec<_>>(), ["0", "0"]);
    }

    /// Goal: units are written back as the kernel's words say, within `writeback_limit`, and the figures say so.
    #[test]
    fn units_are_written_back_as_asked() {
        let ram = written_back(ram(1 << 20, &["lz4", "zstd"]));
        assert_eq!(read(&ram, "backing_dev").unwrap(), "memory\n");
        let noise = Random::new(1).bytes(8 * 4096);
        ram.write(0, &noise).unwrap();
        write(&ram, "writeback_limit_enable", "1").unwrap();
        write(&ram, "writeback_limit", "2").unwrap();
        let line = write(&ram, "writeback", "page_indexes=0-7").unwrap_err();
        assert!(matches!(line, Refusal::Failed { .. }));
        let expected = "writeback: writeback_limit is used up; 2 units were written, the others";
        assert!(line.to_string().starts_with(expected), "{line}");
        assert_eq!(read(&ram, "writeback_limit").unwrap(), "0\n");
        write(&ram, "writeback_limit_enable", "0").unwrap();
        // Units that are named twice are written and counted once.
        write(&ram, "writeback", "page_index=6 page_index=3 page_indexes=5-6 page_index=3")
            .unwrap();
        let columns = |name| -> Vec<u64> {
            let value = read(&ram, name).unwrap();
            value.split_whitespace().map(|word| word.parse().unwrap()).collect()
        };
        assert_eq!(columns("bd_stat"), [5, 0, 5]);
        let mut found = vec![0; noise.len()];
        ram.read(0, &mut found).unwrap();
        assert!(found == noise);
        assert_eq!(columns("bd_stat"), [5, 5, 5]);
        assert_eq!(columns("writeback_stat")[1..4], [5, 0, 0]);
        let state = read(&ram, "block_state").unwrap();
        assert_eq!(state.lines().filter(|line| line.contains('w')).count(), 5, "{state}");
        write(&ram, "reset", "1").unwrap();
        assert_eq!(columns("bd_stat"), [0; 3]);
        assert_eq!(columns("writeback_stat")[1..5], [0; 4]);
    }

    /// Goal: the words of `writeback` can be mixed, as in the kernel since 6.16, and each is done; a word that is wrong
    /// leaves all of them undone. Method: noise, which no algorithm shrinks, and letters, which shrink.
    #[test]
    fn words_of_writeback_are_mixed() {
        let ram = written_back(ram(1 << 20, &["lz4", "zstd"]));
        let letters = letters(8192);
        ram.write(0, &letters).unwrap();
        ram.write(4 << 12, &Random::new(1).bytes(2 * 4096)).unwrap();
        let away = || -> Vec<String> {
            let state = read(&ram, "block_state").unwrap();
            let index = |line: &str| line.split_whitespace().next().unwrap().to_owned();
            state.lines().filter(|line| line.contains('w')).map(index).collect()
        };
        for wrong in ["page_index=1 type=huge idle=3", "huge page_index=256", "page_index=1 type="]
        {
            let line = write(&ram, "writeback", wrong).unwrap_err().to_string();
            assert!(line.contains("is not accepted; accepted: huge, idle, "), "{line}");
            assert!(away().is_empty(), "{wrong}");
        }
        write(&ram, "writeback", "page_index=1 type=huge page_indexes=2-3").unwrap();
        assert_eq!(away(), ["1", "4", "5"]);
        assert!(read(&ram, "writeback_stat").unwrap().split_whitespace().nth(1) == Some("3"));
        // What was written before the limit is in the line, whichever word it came from.
        write(&ram, "reset", "1").unwrap();
        ram.write(0, &letters).unwrap();
        ram.write(4 << 12, &Random::new(1).bytes(2 * 4096)).unwrap();
        write(&ram, "writeback_limit_enable", "1").unwrap();
        write(&ram, "writeback_limit", "2").unwrap();
        let line = write(&ram, "writeback", "page_index=4 huge page_index=0").unwrap_err();
        let expected = "writeback: writeback_limit is used up; 2 units were written, the others";
        assert!(line.to_string().starts_with(expected), "{line}");
        assert_eq!(away(), ["4", "5"]);
    }

    /// Goal: a value that is not accepted changes nothing, and the line says what is.
    #[test]
    fn values_are_checked() {
        let ram = ram(1 << 20, &["lz4", "zstd"]);
        for (name, given, expected) in [
            (
                "disksize",
                "1000",
                "disksize: '1000' is not accepted; accepted: a size that is a multiple",
            ),
            ("mem_limit", "many", "mem_limit: 'many' is not accepted; accepted: a size, or 0"),
            ("idle", "-1", "idle: '-1' is not accepted; accepted: all, or an age in seconds"),
            (
                "recompress",
                "type=all",
                "recompress: 'type=all' is not accepted; accepted: type=idle|",
            ),
            ("recompress", "priority=2", "recompress: 'priority=2' is not accepted"),
            ("recompress", "algo=lz4", "recompress: 'algo=lz4' is not accepted"),
            ("recompress", "idle", "recompress: 'idle' is not accepted"),
            (
                "recompress",
                "threshold=4097",
                "recompress: 'threshold=4097' is not accepted; accepted: type=idle|huge|huge_idle threshold=0..4096 ",
            ),
            ("compact", "0", "compact: '0' is not accepted; accepted: 1"),
            ("reset", "0", "reset: '0' is not accepted; accepted: 1, or another positive number"),
            ("reset", "yes", "reset: 'yes' is not accepted"),
            ("writeback", "idle", "writeback: 'idle' is not accepted; accepted: nothing: the disk"),
        ] {
            let line = write(&ram, name, given).unwrap_err().to_string();
            assert!(line.starts_with(expected), "{line}");
        }
        let ram = written_back(ram);
        for (name, given, expected) in [
            ("writeback", "", "writeback: '' is not accepted; accepted: huge, idle, "),
            ("writeback", "type=same", "writeback: 'type=same' is not accepted; accepted: huge, "),
            ("writeback", "page_index=256", "writeback: 'page_index=256' is not accepted"),
            ("writeback", "page_index=1 page_indexes=9-8", "writeback: 'page_indexes=9-8' is"),
            ("writeback_limit", "1M", "writeback_limit: '1M' is not accepted; accepted: a number"),
            ("writeback_limit_enable", "2", "writeback_limit_enable: '2' is not accepted"),
            ("writeback_batch_size", "0", "writeback_batch_size: '0' is not accepted; accepted: 1"),
            ("compressed_writeback", "0", "compressed_writeback: '0' is not accepted; accepted: 1"),
            ("backing_dev", "/x", "backing_dev is set when the disk is made; accepted: compact"),
        ] {
            let line = write(&ram, name, given).unwrap_err().to_string();
            assert!(line.starts_with(expected), "{line}");
        }
        let alone = super::super::testing::ram(1 << 20, &["lz4"]);
        let line = write(&alone, "recompress", "").unwrap_err().to_string();
        assert!(line.contains("has one algorithm"), "{line}");
    }
}
