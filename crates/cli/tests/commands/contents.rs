//! `zfolio device` with contents: what is written to a disk is there, also when it was written back to a file.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use zfolio_core::testing::{Random, seed};

use crate::disk::{Disk, numbered, read_all, write_all};
use crate::stage::{kill, output_of, scratch, wait_for, zfolio};

/// NBD's request to discard.
const TRIM: u16 = 4;

/// A directory on a disk, where the build is.
fn place(options: &str) -> String {
    format!("{}{options}", scratch("contents").display())
}

/// Goal: a disk takes more than its memory, all of which comes back; the figures and attributes say what is where; and
/// nothing is left behind.
#[test]
fn a_disk_writes_back_what_memory_has_no_room_for() {
    let place = place(",size=64M");
    let options = ["--size", "64M", "--mem-limit", "4M", "--writeback", &place];
    let disk = Disk::start("wider", &options);
    assert_eq!(disk.ask("stat", &["backing_dev"]).1, format!("{place}\n"));
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    let contents: Vec<Vec<u8>> = (0..128).map(|_| random.bytes(256 << 10)).collect();
    for (at, bytes) in (0_u64..).zip(&contents) {
        assert_eq!(client.write(at << 18, bytes).unwrap(), 0, "32 MiB in 4");
    }
    let [count, reads, writes] = disk.columns("bd_stat")[..] else { panic!("three columns") };
    assert_eq!(client.flush().unwrap(), 0);
    // What is on its way is in use, and not written yet.
    assert!(count > 28 << 8 && writes > 27 << 8 && reads == 0, "{count} {reads} {writes}");
    let room = disk.columns("writeback_stat");
    assert!(room.len() == 6 && room[3] > 27 << 8, "{room:?}");
    for (at, bytes) in (0_u64..).zip(&contents) {
        assert!(client.read(at << 18, 256 << 10).unwrap() == *bytes, "seed {}, at {at}", seed());
    }
    assert_eq!(client.read((5 << 18) + 512, 512).unwrap(), contents[5][512..1024]);
    let (_, out, _) = disk.ask("stat", &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(json["bd_reads"].as_u64() >= Some(28 << 8), "{out}");
    assert!(json["writeback_room_units"].as_u64() >= Some(room[3]), "{out}");
    // LIM-1: beyond the limit are what one thread fetches at once, 256K, and a step of the pool's tables, 64K. How much
    // of that depends on whether writes are still under way when it is fetched.
    assert!(json["mem_used_max"].as_u64() <= Some((4 << 20) + (320 << 10)), "{out}");
    for request in ["writeback=huge", "writeback=page_indexes=0-99", "writeback_limit=9"] {
        let (code, _, err) = disk.ask("set", &[request]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{request}");
    }
    assert_eq!(disk.ask("stat", &["writeback_limit"]).1, "9\n");
    assert_eq!(disk.columns("mm_stat")[7], 0, "no huge unit is in memory");
    drop(client);
    let output = disk.end("TERM");
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && err.contains("32M of contents are dropped"), "{err}");
}

/// Goal: what is discarded gives its room on the disk back, although nothing is written any more.
#[test]
fn what_is_discarded_frees_its_file() {
    let place = place(",size=64M");
    let disk =
        Disk::start("trimmed", &["--size", "64M", "--mem-limit", "2M", "--writeback", &place]);
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    for at in 0..128 {
        assert_eq!(client.write(at << 18, &random.bytes(256 << 10)).unwrap(), 0);
    }
    let pid = disk.pid();
    let room = || -> u64 {
        let files =
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|file| file.unwrap().path());
        let is_gone = |file: &PathBuf| {
            fs::read_link(file).is_ok_and(|target| target.to_string_lossy().ends_with("(deleted)"))
        };
        files.filter(is_gone).map(|file| fs::metadata(file).unwrap().blocks() * 512).sum()
    };
    assert!(room() > 28 << 20, "{} bytes", room());
    assert_eq!(client.request(TRIM, 0, 32 << 20, &[]).unwrap(), 0);
    wait_for("the file to shrink", || room() < 8 << 20);
    assert_eq!(disk.columns("bd_stat")[0], 0);
}

/// Goal: a disk that is killed leaves nothing at the place that it has written to.
#[test]
fn a_killed_disk_leaves_nothing_on_its_place() {
    let directory = scratch("killed-place");
    let place = format!("{},size=16M", directory.display());
    let disk =
        Disk::start("killed", &["--size", "64M", "--mem-limit", "1M", "--writeback", &place]);
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    for at in 0..16 {
        assert_eq!(client.write(at << 18, &random.bytes(256 << 10)).unwrap(), 0);
    }
    assert!(disk.columns("bd_stat")[0] > 0);
    disk.end("KILL");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    assert!(client.read(0, 512).is_err(), "nobody answers");
}

/// Goal: a disk that is killed at any moment of clients' requests, of writeback and of its policy leaves nothing at its
/// place, and begins anew with the same name, socket and place, empty. Method: what a client writes, reads again and
/// discards is compared until the disk is gone; its socket stays, as a killed disk leaves it.
#[test]
fn a_disk_that_is_killed_at_any_moment_begins_anew() {
    const UNIT: usize = 64 << 10;
    let (seed, directory) = (seed(), scratch("killed-anytime"));
    let place = format!("{},size=32M", directory.display());
    let all = ["--size", "16M", "--mem-limit", "2M", "--writeback", &place, "--writeback-age", "1"];
    let (mut random, mut requests) = (Random::new(seed), 0);
    for round in 0..8 {
        let disk =
            Disk::start("killed-anytime", &all[..if round % 2 == 0 { 2 } else { all.len() }]);
        let mut client = disk.client();
        let is_empty = read_all(&mut client, 16 << 20).iter().all(|byte| *byte == 0);
        assert!(is_empty, "seed {seed}, round {round}: contents of an earlier disk");
        let (pid, delay) = (disk.pid().into(), Duration::from_millis(random.below_u64(150)));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            kill("KILL", pid);
        });
        let mut model = vec![vec![0; UNIT]; 256];
        loop {
            let unit = usize::try_from(random.below_u64(256)).unwrap();
            let at = (unit * UNIT) as u64;
            let Ok(found) = client.read(at, UNIT) else { break };
            assert!(found == model[unit], "seed {seed}, round {round}, unit {unit}");
            let bytes = if random.below_u64(4) == 0 { vec![0; UNIT] } else { random.bytes(UNIT) };
            let kind = if bytes[..16] == [0; 16] { TRIM } else { 1 };
            let data = if kind == TRIM { &[][..] } else { &bytes };
            match client.request(kind, at, UNIT, data) {
                Ok(0) => model[unit] = bytes,
                Ok(error) => panic!("seed {seed}, round {round}: error {error}"),
                Err(_) => break,
            }
            requests += 2;
        }
        killer.join().unwrap();
        // `Disk::end` removes the socket, which a killed disk leaves: it is put aside meanwhile.
        let (socket, aside) = (disk.socket.clone(), directory.with_extension("sock"));
        fs::hard_link(&socket, &aside).unwrap();
        disk.end("KILL");
        fs::rename(&aside, &socket).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "seed {seed}, round {round}");
    }
    println!("seed {seed}: {requests} requests");
    // Removes the socket.
    drop(Disk::named("killed-anytime"));
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: when memory and file are full, writes fail with "no space", and nothing else does.
#[test]
fn a_full_file_is_no_space() {
    const ENOSPC: u32 = 28;
    let place = place(",size=16M");
    let disk = Disk::start("full", &["--size", "64M", "--mem-limit", "2M", "--writeback", &place]);
    let (mut client, mut random) = (disk.client(), Random::new(seed()));
    let mut written = Vec::new();
    let error = loop {
        let bytes = random.bytes(64 << 10);
        match client.write((written.len() as u64) << 16, &bytes).unwrap() {
            0 => written.push(bytes),
            error => break error,
        }
    };
    assert_eq!(error, ENOSPC);
    assert!((16 << 4..=18 << 4).contains(&written.len()), "{} of 64 KiB", written.len());
    for (at, bytes) in (0_u64..).zip(&written) {
        assert!(client.read(at << 16, 64 << 10).unwrap() == *bytes, "at {at}");
    }
}

#[test]
fn places_that_are_of_no_use_are_one_line() {
    for (options, status, part) in [
        (&["--writeback", "/nowhere"][..], 2, "--writeback: '/nowhere' does not exist"),
        (&["--writeback", "/dev/null"], 2, "--writeback: '/dev/null' is neither a directory nor"),
        (&["--writeback", "/dev/shm,size=64M"], 2, "whose files are memory"),
        (&["--writeback", "/var/tmp,size=1M"], 2, "'1M' is too small; accepted: 16M or more"),
        (&["--writeback", "/var/tmp,prio=x"], 2, "'x' is not a priority"),
        (&["--writeback-age", "60"], 2, "--writeback"),
        (&["--writeback", "/var/tmp", "--writeback-budget", "much"], 2, "'much' is not a budget"),
    ] {
        Disk::named("refused").refused(&[&["--size", "8M"], options].concat(), status, part);
    }
    let disk = Disk::start("without", &["--size", "8M"]);
    let (code, _, err) = disk.ask("set", &["writeback=idle"]);
    assert!(code == Some(2) && err.contains("give it one with --writeback"), "{err}");
    assert_eq!(disk.ask("stat", &["backing_dev"]).1, "none\n");
}

/// Goal: with workers a disk has what was written to it, in the same memory as without. Method: requests of many units,
/// in units of two sizes, some of which shrink and some of which do not.
#[test]
fn workers_change_no_contents() {
    const BYTES: usize = 8 << 20;
    let contents = numbered(BYTES, 3);
    for unit in ["4K", "64K"] {
        let options = ["--size", "8M", "--algorithm", "zstd", "--unit", unit];
        let sizes = [&["--accelerate", "cpu=3"][..], &[]].map(|accelerate| {
            let disk = Disk::start("workers", &[&options[..], accelerate].concat());
            let mut client = disk.client();
            write_all(&mut client, &contents);
            assert!(read_all(&mut client, BYTES) == contents, "{unit} {accelerate:?}");
            disk.columns("mm_stat")[1]
        });
        assert_eq!(sizes[0], sizes[1], "{unit}");
    }
}

/// Goal: what the accelerator has written is read without it, and the other way round; its figures say who did what.
/// Method: a disk on the model of the accelerator is saved, and loaded by one of software; that is written to, saved,
/// and loaded by one on the model.
#[test]
fn a_disk_moves_to_a_machine_without_the_accelerator_and_back() {
    const BYTES: usize = 4 << 20;
    let directory = scratch("moved");
    let files = ["there", "back"].map(|name| directory.join(name).to_str().unwrap().to_owned());
    let figure = |disk: &Disk, name: &str| -> u64 {
        let stats = disk.ask("stat", &["global_stats"]).1;
        let value =
            stats.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {stats}"))
    };
    for algorithm in ["deflate-iaa", "deflate-iaa-dynamic"] {
        let (first, second) = (numbered(BYTES, 4), numbered(BYTES, 5));
        let model = ["--accelerate", "iaa=model,verify_compress=1,sync_mode=sync"];
        let options = ["--size", "4M", "--algorithm", algorithm, "--recompress", "none"];
        let disk = Disk::start("iaa-writes", &[&options[..], &model].concat());
        let mut client = disk.client();
        write_all(&mut client, &first);
        assert!(read_all(&mut client, BYTES) == first, "{algorithm}");
        let in_use = disk.ask("stat", &["comp_algorithm"]).1;
        assert!(in_use.ends_with(&format!(" [{algorithm}]\n")), "{in_use}");
        assert!(
            figure(&disk, "total_comp_calls") >= 512 && figure(&disk, "total_decomp_calls") >= 512
        );
        assert_eq!(
            figure(&disk, "total_sw_comp_calls") + figure(&disk, "total_sw_decomp_calls"),
            0
        );
        let (_, all, _) = output_of(&["stat", "--accelerators"]);
        let own =
            all.split("disk ").find(|part| part.starts_with(&disk.name)).expect("it is listed");
        for part in ["global stats:", "iaa device:", "name: wq3.0", "busy_comps: 0"] {
            assert!(own.contains(part), "{part}: {all}");
        }
        assert_eq!(disk.ask("save", &[&files[0]]).0, Some(0));
        disk.end("TERM");

        let disk = Disk::start("iaa-reads", &["--load", &files[0]]);
        let mut client = disk.client();
        assert!(read_all(&mut client, BYTES) == first, "{algorithm}");
        assert!(disk.ask("stat", &["comp_algorithm"]).1.contains("[deflate]"));
        write_all(&mut client, &second);
        assert_eq!(disk.ask("save", &[&files[1]]).0, Some(0));
        disk.end("TERM");

        let disk = Disk::start("iaa-again", &[&["--load", &files[1]][..], &model].concat());
        assert!(read_all(&mut disk.client(), BYTES) == second, "{algorithm}");
        assert_eq!(figure(&disk, "total_sw_decomp_calls"), 0, "it has the same window");
        assert!(figure(&disk, "total_decomp_calls") >= 512);
    }
}

/// Goal: without the hardware there is one line that says so, for a disk and for a program, and a disk without it has
/// no such figures.
#[test]
fn no_accelerator_is_one_line() {
    let disk = Disk::start("no-iaa", &["--size", "1M"]);
    let (code, _, err) = disk.ask("stat", &["wq_stats"]);
    assert!(code == Some(125) && err.contains("with --accelerate iaa"), "{err}");
    if fs::exists("/sys/bus/dsa/devices/iax1").unwrap() {
        return println!("SKIPPED: this machine may have the accelerator");
    }
    let options = ["--size", "1M", "--accelerate", "iaa"];
    let line = "--accelerate iaa: this machine has no Intel In-Memory Analytics Accelerator";
    Disk::named("refused").refused(&options, 125, line);
    let (code, out, err) = output_of(&["run", "--limit", "64M", "--accelerate", "iaa", "true"]);
    assert!(code == Some(125) && out.is_empty() && err.lines().count() == 1, "{err}");
    assert!(err.contains(line), "{err}");
}

/// Goal: a disk goes on from its file, also one that had written back, with the same size, unit and algorithms; the
/// file is its owner's alone.
#[test]
fn a_disk_goes_on_from_its_file() {
    const BYTES: usize = 16 << 20;
    let (directory, place) = (scratch("saved"), place(",size=64M"));
    let file = directory.join("a disk");
    let file = file.to_str().unwrap();
    let contents = numbered(BYTES, 7);
    let options = ["--size", "20M", "--algorithm", "lzo", "--recompress", "zstd,level=2"];
    let small = ["--unit", "16K", "--mem-limit", "4M", "--writeback", &place];
    let disk = Disk::start("saver", &[&options[..], &small].concat());
    let mut client = disk.client();
    write_all(&mut client, &contents);
    let (code, out, err) = disk.ask("save", &[file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with(&format!("disk {}: 16M of contents saved, ", disk.name)), "{out}");
    assert!(read_all(&mut client, BYTES) == contents, "it goes on");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    disk.end("TERM");
    for options in [&[][..], &small[2..]] {
        let disk = Disk::start("loader", &[&["--load", file], options].concat());
        assert!(read_all(&mut disk.client(), BYTES) == contents);
        assert_eq!(disk.ask("stat", &["disksize"]).1, "20971520\n");
        assert!(disk.ask("stat", &["comp_algorithm"]).1.contains("[lzo]"));
        assert!(disk.ask("stat", &["recomp_algorithm"]).1.contains("#1: "));
        assert_eq!(disk.columns("bd_stat")[0] > 0, !options.is_empty());
        assert_eq!(disk.client().write(16 << 20, &contents[..4096]).unwrap(), 0);
        let again = directory.join("again");
        assert_eq!(disk.ask("save", &[again.to_str().unwrap()]).0, Some(0));
        assert!(fs::metadata(&again).unwrap().len() > fs::metadata(file).unwrap().len());
    }
    let little = Disk::named("little");
    let output = little.command(&["--load", file, "--mem-limit", "1M"]).output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && err.contains("--mem-limit: 1M are not enough"),
        "{err}"
    );
    assert!(!little.socket.exists());
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: a file that is not what was saved is one line that says where, and no disk; so is a save that is not possible.
#[test]
fn a_file_that_is_damaged_is_one_line() {
    let directory = scratch("damaged");
    let (good, bad) = (directory.join("good"), directory.join("bad"));
    let (good, bad) = (good.to_str().unwrap(), bad.to_str().unwrap());
    let disk = Disk::start("damaged", &["--size", "8M"]);
    write_all(&mut disk.client(), &numbered(1 << 20, 3));
    assert_eq!(disk.ask("save", &[good]).0, Some(0));
    let saved = fs::read(good).unwrap();
    let other = Disk::named("never");
    let refused = |options: &[&str], status, part: &str| other.refused(options, status, part);
    let mut altered = saved.clone();
    altered[saved.len() / 2] ^= 4;
    fs::write(bad, &altered).unwrap();
    refused(&["--load", bad], 125, "bad': damaged from byte ");
    fs::write(bad, &saved[..saved.len() - 1]).unwrap();
    refused(&["--load", bad], 125, &format!("the file ends at byte {}", saved.len() - 1));
    fs::write(bad, "a letter").unwrap();
    refused(&["--load", bad], 125, "not a saved disk");
    refused(&["--load", "/nowhere"], 2, "--load: '/nowhere': No such file");
    refused(&["--load", "/"], 2, "--load: '/': not a file");
    refused(&["--load", "/dev/zero"], 2, "--load: '/dev/zero': not a file");
    for option in
        [["--size", "8M"], ["--unit", "4K"], ["--algorithm", "lz4"], ["--recompress", "none"]]
    {
        refused(&[&["--load", good], &option[..]].concat(), 2, option[0]);
    }
    refused(&[], 2, "--size");
    for (path, part) in
        [("/nowhere/disk", "'/nowhere/disk.saving': No such"), ("/dev", "'/dev' is no file")]
    {
        let (code, _, err) = disk.ask("save", &[path]);
        assert!(code == Some(2) && err.contains(part) && err.lines().count() == 1, "{err}");
    }
    assert_eq!(fs::read(good).unwrap(), saved);
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: whenever a disk is killed, its file is whole: what was saved before, or what was being saved; and what was
/// reported as saved is there. Method: a save of one number over that of another, killed after some milliseconds.
#[test]
fn a_killed_disk_leaves_a_whole_file() {
    const BYTES: usize = 4 << 20;
    let (directory, place) = (scratch("whole"), place(",size=32M"));
    let file = directory.join("disk");
    let file = file.to_str().unwrap();
    let small = ["--mem-limit", "1M", "--writeback", &place];
    let first = Disk::start("killed-first", &["--size", "8M"]);
    write_all(&mut first.client(), &numbered(BYTES, 1));
    assert_eq!(first.ask("save", &[file]).0, Some(0));
    drop(first);
    let (seed, mut old, mut news) = (seed(), 1, 0);
    let mut random = Random::new(seed);
    for number in 2..14 {
        let options: &[&str] = if number % 2 == 0 { &[] } else { &small };
        let disk = Disk::start("killed-save", &[&["--load", file], options].concat());
        let mut client = disk.client();
        let (found, known) = (read_all(&mut client, BYTES), [old, number - 1]);
        let is_whole = |number: &&u8| found == numbered(BYTES, **number);
        old = *known.iter().find(is_whole).unwrap_or_else(|| panic!("seed {seed}: {known:?}"));
        news += u32::from(number > 2 && old == number - 1);
        write_all(&mut client, &numbered(BYTES, number));
        assert_eq!(client.flush().unwrap(), 0);
        let save = zfolio(&["device", "save", &disk.name, file]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(random.below_u64(200)));
        disk.end("KILL");
        if save.wait_with_output().unwrap().status.success() {
            old = number;
        }
    }
    println!("seed {seed}: {news} of 11 were saved in time");
    let names: Vec<_> =
        fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.len() <= 2, "{names:?}");
    fs::remove_dir_all(&directory).unwrap();
}
