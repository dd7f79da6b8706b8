//! `zfolio device`: disks are made, listed, changed and ended; what is wrong is one line.
//!
//! The NBD server has its own tests with real clients; here a client only hears its greeting.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zfolio_block::ram::{self, Ram};
use zfolio_block::testing::ACTIVATE;
use zfolio_block::testing::certificates::{Usage, sign_for};
use zfolio_core::page::UnitOrder;
use zfolio_core::zram::{self, Reader};
use zfolio_pager::PoolMappings;
use zfolio_workers::Accelerated;

use crate::disk::{Disk, write_all};
use crate::run::first_line;
use crate::stage::{kill, output_of, scratch, texts, wait_for, zfolio};

/// Goal: a disk takes more clients than the soft limit of descriptors, which shells have low, as long as the hard one
/// allows them.
#[test]
fn descriptors_are_for_clients() {
    let limited = |command: Command| {
        let mut limited = Command::new("prlimit");
        limited.args(["--nofile=32:512", "--"]).arg(command.get_program()).args(command.get_args());
        limited.stdout(Stdio::piped()).stderr(Stdio::piped());
        limited
    };
    let disk = Disk::start_by("descriptors", &["--size", "8M"], limited);
    let clients: Vec<_> = (0..40).map(|_| disk.client()).collect();
    assert!(disk.is_served());
    drop(clients);
}

#[test]
fn a_disk_is_made_listed_changed_and_ended() {
    let disk = Disk::add("life", &["--mem-limit", "4M"]);
    assert!(disk.is_served());
    let (code, out, _) = output_of(&["device", "list", "--bytes", "--output-all"]);
    let line = out.lines().find(|line| line.starts_with(&disk.name)).expect(&out);
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((code, &words[1..5]), (Some(0), &["lz4", "8388608", "0", "0"][..]), "{out}");
    let (_, out, _) = output_of(&["device", "list", "--raw", "-n", "-o", "MEM-LIMIT,NAME"]);
    assert!(out.lines().any(|line| line == format!("4M {}", disk.name)), "{out}");
    let (_, out, _) = output_of(&["device", "list", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let is_it =
        |one: &serde_json::Value| one["name"] == disk.name.as_str() && one["mem_limit"] == 4 << 20;
    assert!(json.as_array().unwrap().iter().any(is_it), "{out}");
    let (_, out, _) = output_of(&["device", "list", "--json", "-o", "NAME,MEM-LIMIT"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let row = serde_json::json!({"name": disk.name, "mem-limit": "4M"});
    assert!(json.as_array().unwrap().contains(&row), "{out}");
    let (code, out, err) = disk.ask("set", &["mem_limit=1M", "disksize=16M", "idle=all"]);
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    let (_, out, _) = disk.ask("stat", &["disksize"]);
    assert_eq!(out, "16777216\n");
    let (_, out, _) = disk.ask("stat", &[]);
    assert!(
        out.contains("disksize                  16777216\n")
            && out.contains("mem_limit                 1048576\n"),
        "{out}"
    );
    // 3600 s by default, less the nearer memory is to its limit: tables are not nothing.
    let age = out.lines().find_map(|line| line.strip_prefix("policy_age_s ")).expect(&out);
    assert!((1000..=3600).contains(&age.trim().parse::<u32>().unwrap()), "{out}");
    assert_eq!(disk.ask("reset", &[]).0, Some(0));
    let (_, out, _) = disk.ask("stat", &["recomp_algorithm"]);
    assert!(out.contains("#1: ") && out.contains("[zstd]"), "the default: {out}");
    let (code, out, err) = disk.ask("remove", &[]);
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    assert!(!disk.is_served() && !disk.socket.exists());
    let (code, _, err) = disk.ask("stat", &[]);
    assert!(code == Some(2) && err.contains("is not a disk"), "{err}");
}

#[test]
fn what_is_wrong_is_one_line_and_leaves_nothing() {
    let disk = Disk::add("taken", &[]);
    let (code, out, err) = disk.try_add(&[]);
    assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
    assert!(
        err.contains("is a disk already; accepted: another name") && err.lines().count() == 1,
        "{err}"
    );
    let other = Disk::named("other");
    let socket = disk.socket.to_str().unwrap();
    let (code, _, err) =
        output_of(&["device", "add", &other.name, "--size", "1M", "--nbd", socket]);
    assert!(code == Some(125) && err.contains("--nbd: ") && err.lines().count() == 1, "{err}");
    fs::write(&other.socket, "a file of the user").unwrap();
    let (code, _, err) = other.try_add(&[]);
    assert!(code == Some(125) && err.contains("--nbd: ") && err.lines().count() == 1, "{err}");
    assert_eq!(fs::read_to_string(&other.socket).unwrap(), "a file of the user");
    fs::remove_file(&other.socket).unwrap();
    for (options, part) in [
        (&["--size", "1000"][..], "--size"),
        (&["--unit", "12K"], "power of two"),
        (&["--algorithm", "rar"], "'rar'"),
        (&["--accelerate", "gpu"], "accepted: cpu, or cpu=N"),
        (&["--algorithm", "deflate-iaa"], "with --accelerate iaa, or deflate,window=12, the same"),
        (&["--accelerate", "cpu", "--algorithm", "deflate-iaa-dynamic"], "is an accelerator's"),
        (&["--accelerate", "iaa=model", "--algorithm", "lz4"], "none of the algorithms of this"),
        (&["--mem-limit", "0"], "'0' is too small"),
        (&["--nbd", "192.0.2.1:10809"], "--nbd"),
        (
            &[
                "--recompress",
                "lzo",
                "--recompress",
                "lz4hc",
                "--recompress",
                "842",
                "--recompress",
                "zstd",
            ],
            "3 at most",
        ),
    ] {
        let given = if options[0] == "--size" { &[] } else { &["--size", "8M"][..] };
        let socket = other.socket.to_str().unwrap();
        let fixed = ["device", "add", &other.name, "--nbd", socket];
        let (code, out, err) = output_of(&[&fixed, given, options].concat());
        assert!(
            matches!(code, Some(2 | 125)) && out.is_empty() && err.lines().count() == 1,
            "{options:?}: {err}"
        );
        assert!(err.contains(part), "{options:?}: no '{part}' in: {err}");
        assert!(!other.socket.exists(), "{options:?} left a socket");
    }
    for (name, part) in
        [("a b", "'a b' is not a name"), ("../x", "is not a name"), ("", "is not a name")]
    {
        let (code, _, err) =
            output_of(&["device", "add", name, "--size", "1M", "--nbd", "localhost"]);
        assert!(code == Some(2) && err.contains(part), "{err}");
    }
    let (code, _, err) = disk.ask("set", &["mem_limt=1M"]);
    assert!(
        code == Some(2) && err.contains("accepted: compact, compressed_writeback, disksize"),
        "{err}"
    );
    let (code, _, err) = disk.ask("stat", &["idle"]);
    assert!(code == Some(2) && err.contains("can only be written"), "{err}");
    let (code, _, err) = output_of(&["device", "list", "-o", "SIZE"]);
    assert!(code == Some(2) && err.contains("accepted: NAME, ALGORITHM"), "{err}");
    assert!(disk.is_served());
}

/// Goal: `remove` returns once the disk's process has ended. It returned when the control socket was gone, while the
/// process had its memory and its places still, and an `add` with the same ones failed. Method: a client of the control
/// socket that does not read its answer, for which the end waits a while.
#[test]
fn a_disk_that_was_removed_has_ended() {
    let mut disk = Disk::start("lingers", &["--size", "64M"]);
    write_all(&mut disk.client(), &vec![1; 64 << 20]);
    let user = zfolio_sys::probe::effective_uid();
    let control = PathBuf::from(format!("/dev/shm/zfolio-{user}/device.{}", disk.name));
    let mut slow = UnixStream::connect(&control).unwrap();
    slow.write_all(b"read block_state\n").unwrap();
    slow.read_exact(&mut [0; 3]).unwrap();
    assert_eq!(disk.ask("remove", &[]), (Some(0), String::new(), String::new()));
    assert!(disk.has_ended() && !control.exists());
    drop(slow);
}

/// Goal: a disk is served to NBD clients and to QEMU at once, says where, and leaves no socket.
#[test]
fn a_disk_is_served_as_vhost_user() {
    let disk = Disk::named("guest");
    let path = disk.socket.with_extension("vhost");
    let given = path.to_str().unwrap();
    let (code, out, err) = disk.try_add(&["--vhost-user", given]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let at = out.trim_end().split_once(" at ").expect(&out).1;
    assert!(at.starts_with(&format!("vhost-user:{given} nbd+unix:///")), "{out}");
    // GET_FEATURES (1) is answered by a message of eight bytes.
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(&[1, 1, 0].map(u32::to_le_bytes).concat()).unwrap();
    let mut reply = [0; 20];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [1, 5, 8].map(u32::to_le_bytes).concat());
    assert!(disk.is_served());
    assert_eq!(disk.ask("stat", &["address"]).1.trim_end(), at);
    let (_, out, _) = output_of(&["device", "list", "--raw", "-n", "-o", "NAME,ADDRESS"]);
    let line = format!("{} {}", disk.name, at.replace(' ', ","));
    assert!(out.lines().any(|one| one == line), "{out}");
    assert_eq!(disk.ask("remove", &[]).0, Some(0));
    assert!(!path.exists() && !disk.socket.exists());
    // Alone.
    let fixed = ["device", "add", &disk.name, "--size", "8M", "--vhost-user", given];
    let (code, out, err) = output_of(&fixed);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    assert!(path.exists());
    // The address is in use, there is a file, there is no folder, or none may be written.
    let other = format!("{}-2", disk.name);
    let file = disk.socket.with_extension("file");
    fs::write(&file, "a file of the user").unwrap();
    for (given, status, part) in [
        (given, 125, "another server listens on this socket"),
        (file.to_str().unwrap(), 125, "there is a file here that is not a socket"),
        ("/nowhere/at/all", 125, "/nowhere/at/all: No such file or directory"),
        ("/proc/disk", 125, "/proc/disk: "),
        ("", 2, "'' is not a path"),
    ] {
        let (code, out, err) =
            output_of(&["device", "add", &other, "--size", "8M", "--vhost-user", given]);
        assert!(code == Some(status) && out.is_empty(), "{given}: {err}");
        assert!(err.contains(part) && err.contains("--vhost-user"), "{given}: {err}");
        assert_eq!(err.lines().count(), 1, "{given}: {err}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "a file of the user");
    fs::remove_file(&file).unwrap();
    let (code, _, err) = output_of(&["device", "add", &other, "--size", "8M"]);
    assert!(code == Some(2) && err.contains("--nbd") && err.lines().count() == 1, "{err}");
    let (_, out, _) = output_of(&["device", "list", "-n"]);
    assert!(!out.contains(&other), "{out}");
}

/// A front end that goes on where its queue 0 stands. Returns whether it is served.
fn goes_on(path: &Path, next: u32) -> bool {
    let mut client = UnixStream::connect(path).expect("the disk is served");
    // SET_VRING_BASE (10), and GET_FEATURES (1), which is answered.
    let messages = [10, 1, 8, 0, next, 1, 1, 0].map(u32::to_le_bytes).concat();
    client.write_all(&messages).is_ok() && client.read_exact(&mut [0; 20]).is_ok()
}

/// A saved disk of zeros that its guest has left.
fn saved_disk(notes: &[u8]) -> Vec<u8> {
    let config = ram::Config {
        disk_bytes: 8 << 20,
        algorithms: vec!["lz4".parse().expect("a name")],
        unit: UnitOrder::DEFAULT,
        limit_bytes: 0,
        age_s: 600,
        accelerated: Accelerated::NONE,
    };
    let (source, report) = (Arc::new(PoolMappings::default()), Box::new(|_: &zram::Error| {}));
    let disk = Ram::new(&config, source, report).expect("a good size");
    let mut file = Vec::new();
    disk.zram().save(0, notes, &mut file).expect("a vector takes everything");
    file
}

/// Goal: a guest that goes on is served by the disk that it has used, also over a restart that saves, and by no other
/// one; a line says so.
#[test]
fn a_guest_goes_on_with_its_own_disk_only() {
    let directory = scratch("guests");
    let [path, file] = ["socket", "file"].map(|name| directory.join(name));
    let notes = [0, 0, 5, 0, 1, 0, 9, 0];
    fs::write(&file, saved_disk(&notes)).unwrap();
    let [given, kept] = [&path, &file].map(|path| path.to_str().unwrap());
    let options = ["--vhost-user", given, "--recompress", "none", "--size", "8M"];
    let new = Disk::start("new", &options);
    assert!(goes_on(&path, 0));
    assert!(!goes_on(&path, 5) && !goes_on(&path, 5));
    let output = new.end("TERM");
    let err = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = err.lines().filter(|line| line.contains("is refused")).collect();
    assert!(lines.len() == 1 && lines[0].contains("queue 0 goes on at request 5"), "{err}");
    assert!(lines[0].contains(&format!("a guest at {given} ")), "{err}");
    for _ in 0..2 {
        let disk = Disk::start("kept", &[&options[..], &["--save", kept]].concat());
        assert!(goes_on(&path, 5) && goes_on(&path, 5), "it leaves its queue where that stood");
        assert!(!goes_on(&path, 6));
        // A checkpoint is older than what is written behind it: it has no notes.
        let beside = directory.join("checkpoint");
        assert_eq!(disk.ask("save", &[beside.to_str().unwrap()]).0, Some(0));
        let header = |path| Reader::open(fs::File::open(path).unwrap()).unwrap().header().clone();
        assert!(header(&beside).notes.is_empty());
        assert_eq!(disk.end("TERM").status.code(), Some(0));
        let mut marks: Vec<[u8; 4]> =
            header(&file).notes.chunks(4).map(|mark| mark.try_into().unwrap()).collect();
        marks.sort_unstable();
        assert_eq!(marks.concat(), notes);
    }
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: a guest goes on with what its disk has saved elsewhere, since it could not be saved in its own file: that has
/// all that the guest has written. It was refused. What was reset since is nobody's. Method: the file's directory is
/// removed.
#[test]
fn a_guest_goes_on_with_what_was_saved_elsewhere() {
    let directory = scratch("elsewhere");
    let [path, other, place] = ["socket", "other", "place"].map(|name| directory.join(name));
    let file = place.join("file");
    let notes = [0, 0, 5, 0];
    fs::create_dir(&place).unwrap();
    fs::write(&file, saved_disk(&notes)).unwrap();
    let [given, kept, beside] = [&path, &file, &other].map(|path| path.to_str().unwrap());
    let options = ["--vhost-user", given, "--size", "8M", "--save", kept, "--recompress", "none"];
    let disk = Disk::start("elsewhere", &options);
    fs::remove_dir_all(&place).unwrap();
    assert_eq!(disk.ask("remove", &[]).0, Some(125));
    let saved = || {
        assert_eq!(disk.ask("save", &[beside]).0, Some(0));
        Reader::open(fs::File::open(&other).unwrap()).unwrap().header().notes.clone()
    };
    assert_eq!(saved(), notes);
    let next = Disk::start("elsewhere-next", &["--vhost-user", given, "--load", beside]);
    assert!(goes_on(&path, 5) && !goes_on(&path, 6));
    drop(next);
    assert_eq!(disk.ask("reset", &[]).0, Some(0));
    assert!(saved().is_empty());
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: a disk is not reset under clients, who would find zeros where they have written; nor does a guest that has
/// left go on with a disk that was reset since. Both happened. Method: an NBD client and a front end, which leave in
/// turn.
#[test]
fn a_disk_is_not_reset_under_its_clients() {
    let directory = scratch("resets");
    let [path, file] = ["socket", "file"].map(|name| directory.join(name));
    fs::write(&file, saved_disk(&[0, 0, 5, 0])).unwrap();
    let [given, kept] = [&path, &file].map(|path| path.to_str().unwrap());
    let options = ["--vhost-user", given, "--size", "8M", "--save", kept, "--recompress", "none"];
    let disk = Disk::start("reset", &options);
    let mut client = disk.client();
    assert_eq!(client.write(0, &[7; 4096]).unwrap(), 0);
    let guest = UnixStream::connect(&path).unwrap();
    let refused = |expected: &str| {
        let answer = disk.ask("reset", &[]);
        assert_eq!((answer.0, answer.1.as_str()), (Some(2), ""), "{answer:?}");
        answer.2 == format!("zfolio: {expected}\n")
    };
    let both = "2 clients are connected; accepted: after they have ended";
    wait_for("the guest's beginning", || refused(both));
    drop(guest);
    wait_for("the guest's end", || refused("1 client is connected; accepted: after it has ended"));
    assert_eq!(client.read(0, 4096).unwrap(), [7; 4096]);
    assert!(goes_on(&path, 5), "nothing was forgotten");
    drop(client);
    wait_for("their end", || disk.ask("reset", &[]) == (Some(0), String::new(), String::new()));
    assert!(!goes_on(&path, 5) && goes_on(&path, 0));
    assert_eq!(disk.client().read(0, 4096).unwrap(), [0; 4096]);
    let output = disk.end("TERM");
    assert!(texts(&output).1.contains("queue 0 goes on at request 5"), "{output:?}");
    assert!(Reader::open(fs::File::open(&file).unwrap()).unwrap().header().notes.is_empty());
    fs::remove_dir_all(&directory).unwrap();
}

/// Goal: a machine that cannot make a block device says so in one line, with what to do, and no disk is left; a number
/// that is none is refused. The guests of `scripts/guest-device` have the rest.
#[test]
fn a_machine_without_ublk_says_so() {
    let disk = Disk::named("block");
    for given in ["--ublk=x", "--ublk=", "--ublk=1048576", "--ublk=-1"] {
        let (code, out, err) = disk.try_add(&[given]);
        assert!(code == Some(2) && out.is_empty(), "{given}: {err}");
        assert!(err.contains("--ublk") && err.lines().count() == 1, "{given}: {err}");
    }
    if std::path::Path::new("/dev/ublk-control").exists() {
        eprintln!("SKIPPED: this machine has ublk");
        return;
    }
    // What follows the option is the name.
    let (code, out, err) = output_of(&["device", "add", "--size", "8M", "--ublk", &disk.name]);
    assert!(code == Some(125) && out.is_empty(), "{err}");
    assert!(err.starts_with("zfolio: --ublk: ") && err.lines().count() == 1, "{err}");
    assert!(err.contains("modprobe ublk_drv") || err.contains("accepted: "), "{err}");
    let (_, out, _) = output_of(&["device", "list", "-n"]);
    assert!(!out.contains(&disk.name), "{out}");
}

/// Goal: Ctrl-C and SIGTERM end a disk in the foreground, which says what is dropped; a disk that was killed is not
/// listed, leaves no control socket behind once somebody has listed the disks, and its name and socket can be used
/// again.
#[test]
fn signals_end_a_disk() {
    for signal in ["INT", "TERM", "KILL"] {
        let disk = Disk::named("signalled");
        let socket = disk.socket.to_str().unwrap();
        let mut run = zfolio(&["device", "run", &disk.name, "--size", "8M", "--nbd", socket]);
        let mut run = run.stderr(Stdio::piped()).spawn().unwrap();
        assert!(first_line(&mut run).starts_with(&format!("disk {}: 8M", disk.name)));
        kill(signal, run.id().into());
        let output = run.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        let user = zfolio_sys::probe::effective_uid();
        let control = PathBuf::from(format!("/dev/shm/zfolio-{user}/device.{}", disk.name));
        if signal == "KILL" {
            assert!(disk.socket.exists(), "nobody removed it");
        } else {
            let expected =
                format!("zfolio: disk {} has ended; 0 of contents are dropped\n", disk.name);
            assert_eq!((output.status.code(), err), (Some(0), expected));
            assert!(!disk.socket.exists());
        }
        let (_, out, _) = output_of(&["device", "list", "-n"]);
        assert!(!out.contains(&disk.name) && !control.exists(), "{out}");
        // Clients of a disk that was killed may connect again.
        let (code, out, err) = disk.try_add(&[]);
        assert!(code == Some(0) && out.lines().count() == 1, "{err}");
        let line = format!("zfolio: disk {}: the disk that was at nbd+unix:///", disk.name);
        let lines = usize::from(signal == "KILL");
        assert!(err.lines().count() == lines && (lines == 0 || err.starts_with(&line)), "{err}");
    }
}

/// Goal: a disk in the background stays when nobody reads its output any more, and what it prints then does no harm.
#[test]
fn a_disk_in_the_background_outlives_who_added_it() {
    let disk = Disk::named("alone");
    let socket = disk.socket.to_str().unwrap();
    let fixed = ["device", "add", &disk.name, "--size", "8M", "--nbd", socket];
    let mut add = zfolio(&fixed).spawn().unwrap();
    drop(add.stdout.take());
    drop(add.stderr.take());
    add.wait().unwrap();
    wait_for("the disk", || disk.is_served());
    assert_eq!(disk.ask("stat", &["initstate"]).1, "1\n");
}

/// Goal: a disk that was made is one also where its notes cannot be printed: the command was aborted, and left the
/// disk. Method: a socket that a killed disk has left, of which there is a note, and a full disk for standard error;
/// then a command that fails, whose status still says so.
#[test]
fn a_note_that_cannot_be_printed_does_no_harm() {
    let disk = Disk::named("full");
    drop(UnixListener::bind(&disk.socket).unwrap());
    let socket = disk.socket.to_str().unwrap();
    let add = || {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let fixed = ["device", "add", &disk.name, "--size", "8M", "--nbd", socket];
        zfolio(&fixed).stderr(full).output().unwrap()
    };
    let output = add();
    let (out, _) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{out}");
    assert!(out.starts_with(&format!("disk {}: 8M, ", disk.name)), "{out}");
    assert!(disk.is_served());
    let output = add();
    assert_eq!((output.status.code(), texts(&output).0.as_str()), (Some(2), ""));
}

/// Goal: a process that is not a disk, at the place of a control socket, is told from one.
#[test]
fn a_stranger_at_the_control_socket_is_no_disk() {
    let disk = Disk::add("real", &[]);
    let name = format!("stranger-{}", std::process::id());
    let user = zfolio_sys::probe::effective_uid();
    let folder = PathBuf::from(format!("/dev/shm/zfolio-{user}"));
    let (made, path) = (folder.join(&name), folder.join(format!("device.{name}")));
    let listener = UnixListener::bind(&made).unwrap();
    // Other tests list all disks: they remove what nobody listens on yet, and may connect later.
    fs::rename(&made, &path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let (code, _, err) = output_of(&["device", "stat", &name, "mm_stat"]);
    fs::remove_file(&path).unwrap();
    assert!(
        code == Some(125) && err.contains("does not answer") && err.lines().count() == 1,
        "{err}"
    );
    assert!(disk.is_served());
}

/// Goal: a disk of an older version is listed, without what it does not know. It was left out, without a word. Method:
/// a process that answers as one, and refuses some attributes.
#[test]
fn a_disk_that_does_not_know_an_attribute_is_listed() {
    let name = format!("older-{}", std::process::id());
    let user = zfolio_sys::probe::effective_uid();
    let folder = PathBuf::from(format!("/dev/shm/zfolio-{user}"));
    let disk = Disk::add("newer", &[]);
    let (made, path) = (folder.join(&name), folder.join(format!("device.{name}")));
    let listener = UnixListener::bind(&made).unwrap();
    fs::rename(&made, &path).unwrap();
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let mut line = String::new();
            BufReader::new(&client).read_line(&mut line).ok();
            let answer = match line.trim_end() {
                "read comp_algorithm" => "ok\nlzo [lz4]\n",
                "read disksize" => "ok\n8388608\n",
                "read address" | "read policy_stat" => "refused an attribute of later\n",
                _ => "ok\n1\n",
            };
            client.write_all(answer.as_bytes()).ok();
        }
    });
    let listed = output_of(&["device", "list", "--raw", "-n", "-o", "NAME,ADDRESS,DISKSIZE"]);
    let (_, stat, _) = output_of(&["device", "stat", &name]);
    fs::remove_file(&path).unwrap();
    let (_, out, err) = listed;
    assert!(out.lines().any(|line| line == format!("{name} - 8M")), "{out}{err}");
    assert!(out.contains(&disk.name), "{out}");
    assert!(stat.contains("policy_tried              0\n"), "{stat}");
}

/// A directory with certificates. `None`: openssl is not installed, which was printed.
fn certificates(name: &str) -> Option<PathBuf> {
    let directory = scratch("device").join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("the folder is ours");
    zfolio_block::testing::certificates::make(&directory).then_some(directory)
}

/// How many descriptors and threads a process has.
fn kept(pid: u32) -> [usize; 2] {
    ["fd", "task"]
        .map(|what| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count))
}

/// Goal: a disk is served by TLS where other machines connect, with one line where that is not possible; a thousand
/// clients that stop in the middle of the handshake leave neither a thread nor a descriptor.
#[test]
fn a_disk_is_served_to_other_machines_by_tls_only() {
    let disk = Disk::named("remote");
    let Some(pki) = certificates("pki") else { return };
    let directory = pki.to_str().unwrap();
    let fixed = ["device", "run", &disk.name, "--size", "8M", "--nbd", "0.0.0.0:0"];
    let with = ["--tls-certificates", directory];
    for (given, part) in [
        (
            &[][..],
            "there are no certificates for TLS; accepted: 127.0.0.1, [::1], or any with --tls-certificates DIR",
        ),
        (&["--tls", "on"], "--tls-certificates"),
        (&["--tls-verify-peer=no"], "--tls-certificates"),
        (&["--tls-certificates", directory, "--tls", "sometimes"], "off, on, require"),
        (&["--tls-certificates", "/nowhere"], "/nowhere/server-cert.pem: No such file"),
        (&["--tls-certificates", directory, "--tls-verify-peer=perhaps"], "yes, no"),
    ] {
        let (code, out, err) = output_of(&[&fixed, given].concat());
        assert!(code == Some(2) && out.is_empty() && err.lines().count() == 1, "{given:?}: {err}");
        assert!(err.contains(part), "{given:?}: no '{part}' in: {err}");
    }
    // Certificates that nobody would see.
    let (code, out, err) = disk.try_add(&with);
    assert!(code == Some(2) && out.is_empty() && err.lines().count() == 1, "{err}");
    assert!(err.contains("no --nbd of this disk uses them") && !disk.socket.exists(), "{err}");
    let (code, out, err) = disk.try_add(&[&with[..], &["--tls", "require"]].concat());
    assert!(code == Some(0) && out.contains(" at nbds+unix:///"), "{out}{err}");
    assert_eq!(disk.ask("remove", &[]).0, Some(0));
    // nbdkit's form of the flag, and its default here.
    let mut run = zfolio(&[&fixed[..], &with, &["--tls-verify-peer"]].concat());
    let mut run = run.stderr(Stdio::piped()).spawn().unwrap();
    let line = first_line(&mut run);
    let at = line.split_once(" at nbds://0.0.0.0:").expect(&line).1;
    let port: u16 = at.split('/').next().unwrap().parse().unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let starttls = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 5, 0, 0, 0, 0]].concat();
    // A hello with half of its body.
    let hello = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &[7; 250]].concat();
    connect().read_exact(&mut [0; 18]).unwrap();
    let before = kept(run.id());
    for number in 0..1000 {
        let mut client = connect();
        let all = starttls.len() + hello.len();
        let cut = number % (all + 1);
        client.write_all(&starttls[..cut.min(starttls.len())]).unwrap();
        if cut > starttls.len() {
            client.read_exact(&mut [0; 18 + 20]).unwrap();
            client.write_all(&hello[..cut - starttls.len()]).unwrap();
        }
    }
    wait_for("the clients' threads", || {
        let now = kept(run.id());
        now[0] <= before[0] && now[1] <= before[1]
    });
    // Contents, with a real client.
    let uri = format!("nbds://localhost:{port}/{}?tls-certificates={directory}", disk.name);
    let told = Command::new("nbdinfo").args(["--size", &uri]).output();
    match told {
        Ok(told) => assert_eq!(String::from_utf8_lossy(&told.stdout), "8388608\n"),
        Err(_) => eprintln!("SKIPPED: nbdinfo is not installed (make setup)"),
    }
    kill("TERM", run.id().into());
    assert_eq!(run.wait().unwrap().code(), Some(0));
    fs::remove_dir_all(&pki).unwrap();
}

/// Goal: certificates that end soon are said when a disk starts, and those that are renewed are read without a new
/// start; a client that TLS refuses is said and counted.
#[test]
fn certificates_are_looked_after() {
    let Some(pki) = certificates("pki-renewed") else { return };
    let directory = pki.to_str().unwrap();
    let sign = |days| sign_for(&pki, "server", Usage::Server, days);
    assert!(sign(10));
    let tls = ["--tls-certificates", directory, "--tls", "require"];
    let soon = "server-cert.pem: the certificate expires in ";
    let added = Disk::named("soon");
    let (code, out, err) = added.try_add(&tls);
    assert!(code == Some(0) && out.lines().count() == 1, "{out}{err}");
    assert!(err.starts_with(&format!("zfolio: disk {}: {directory}", added.name)), "{err}");
    assert!(err.contains(soon) && err.lines().count() == 1, "{err}");
    drop(added);
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let metrics = metrics.to_string();
    let options = [&["--size", "8M", "--metrics", &metrics], &tls[..]].concat();
    let disk = Disk::start("renewed", &options);
    let mut client = UnixStream::connect(&disk.socket).unwrap();
    let starttls = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 5, 0, 0, 0, 0]].concat();
    client.write_all(&starttls).unwrap();
    client.read_exact(&mut [0; 18 + 20]).unwrap();
    client.write_all(b"this is not TLS").unwrap();
    client.read_to_end(&mut Vec::new()).ok();
    let page = || {
        let mut stream = TcpStream::connect(&metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    };
    wait_for("the count", || page().contains("reason=\"tls\"} 1\n"));
    assert!(sign(60));
    // Two looks, two seconds each.
    std::thread::sleep(Duration::from_secs(8));
    let err = texts(&disk.end("TERM")).1;
    let lines: Vec<&str> = err.lines().collect();
    let [first, refused, renewed, _] = &lines[..] else { panic!("{err}") };
    assert!(first.contains(soon), "{err}");
    assert!(refused.contains("TLS has failed with a client at a Unix socket: "), "{err}");
    assert!(renewed.ends_with(": new certificates, for new connections"), "{err}");
    fs::remove_dir_all(&pki).unwrap();
}

/// Goal: a disk of which nobody can be told is not left behind.
#[test]
fn a_disk_that_cannot_be_reported_has_ended() {
    let disk = Disk::named("unheard");
    let socket = disk.socket.to_str().unwrap();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut add = zfolio(&["device", "add", &disk.name, "--size", "8M", "--nbd", socket]);
    let output = add.stdout(full).output().unwrap();
    let err = texts(&output).1;
    assert!(output.status.code() == Some(1) && err.lines().count() == 1, "{err}");
    assert!(err.contains("standard output: No space left"), "{err}");
    assert!(!disk.socket.exists() && disk.ask("stat", &[]).0 == Some(2));
}

/// Goal: a port of systemd's is served by TLS only, where other machines reach it.
#[test]
fn a_port_of_systemd_needs_tls_too() {
    let disk = Disk::named("activated");
    let Some(pki) = certificates("pki-activated") else { return };
    let program = zfolio(&[]).get_program().to_owned();
    let start = |rest: &[&str]| {
        let mut python = Command::new("python3");
        python.args(["-c", ACTIVATE, "0.0.0.0"]).arg(&program);
        python.args(["device", "run", &disk.name, "--size", "8M", "--nbd", "systemd"]).args(rest);
        python.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let Ok(refused) = start(&[]) else {
        return eprintln!("SKIPPED: python3 is not installed (make setup)");
    };
    let refused = refused.wait_with_output().unwrap();
    let err = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && err.lines().count() == 1, "{err}");
    assert!(err.contains("other machines reach this address"), "{err}");
    let mut run = start(&["--tls-certificates", pki.to_str().unwrap()]).unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let port: u16 = lines.next().unwrap().unwrap().parse().unwrap();
    assert!(lines.next().unwrap().unwrap().contains(&disk.name));
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    // OPT_LIST
    let list = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 3, 0, 0, 0, 0]].concat();
    client.write_all(&list).unwrap();
    let mut reply = [0; 18 + 20];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[30..34], [0x80, 0, 0, 5], "TLS_REQD");
    kill("TERM", run.id().into());
    assert_eq!(run.wait().unwrap().code(), Some(0));
    fs::remove_dir_all(&pki).unwrap();
}
