//! `zfolio device daemon`: disks of a file start, end, fail and come back, each on its own.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use zfolio_core::testing::Random;

use crate::disk::{Disk, numbered, read_all, write_all};
use crate::run::first_line;
use crate::stage::{
    Nobody, free_address, kill, output_of, scratch, state, texts, wait_for, zfolio,
};

const BYTES: usize = 4 << 20;

/// A daemon of a test, with its file; it ends with its disks when this is dropped.
struct Daemon {
    folder: PathBuf,
    child: Option<Child>,
    /// What systemd would be told.
    told: UnixDatagram,
    address: String,
}

impl Daemon {
    fn new(name: &str) -> Daemon {
        let folder = scratch(&format!("daemon-{name}"));
        let address = folder.join("notify");
        fs::remove_file(&address).ok();
        let told = UnixDatagram::bind(&address).expect("the folder is ours");
        let address = address.to_str().expect("plain").to_owned();
        Daemon { folder, child: None, told, address }
    }

    fn conf(&self) -> PathBuf {
        self.folder.join("devices.conf")
    }

    /// Writes the file: a section for each disk, with its socket.
    fn write(&self, disks: &[(&Disk, &str)]) {
        let section = |(disk, keys): &(&Disk, &str)| {
            format!("[{}]\nnbd = {}\n{keys}\n", disk.name, disk.socket.display())
        };
        fs::write(self.conf(), disks.iter().map(section).collect::<String>()).expect("it is ours");
    }

    fn command(&self, options: &[&str]) -> Command {
        let conf = self.conf();
        let fixed = ["device", "daemon", "--config", conf.to_str().expect("plain")];
        zfolio(&[&fixed, options].concat())
    }

    /// What it prints of a configuration that is refused, with FILE for its path.
    fn refusal(&self, text: &str) -> String {
        fs::write(self.conf(), text).expect("it is ours");
        let output = self.command(&["--check"]).output().expect("it can be started");
        let (out, err) = texts(&output);
        assert!(output.status.code() == Some(2) && out.is_empty(), "{text}: {err}");
        err.replace(&self.conf().display().to_string(), "FILE")
    }

    /// Starts it, and returns the status that it tells once all disks have started or failed.
    fn start(&mut self) -> String {
        let file = |name: &str| {
            File::options().create(true).append(true).open(self.folder.join(name)).expect("ours")
        };
        let mut command = self.command(&[]);
        command.env("NOTIFY_SOCKET", &self.address).stdout(file("out")).stderr(file("err"));
        self.child = Some(command.spawn().expect("it was built"));
        let status = self.told();
        assert!(status.ends_with("\nREADY=1"), "{status}");
        status.lines().next().expect("a line").to_owned()
    }

    /// The next message to systemd.
    fn told(&self) -> String {
        self.told.set_read_timeout(Some(Duration::from_secs(60))).expect("not zero");
        let mut message = [0; 1000];
        loop {
            match self.told.recv(&mut message) {
                Ok(count) => return String::from_utf8_lossy(&message[..count]).into_owned(),
                // A wait with a timeout ends at any signal that has a handler.
                Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
                Err(why) => panic!("{why}: {}", self.printed()),
            }
        }
    }

    /// What it has printed on standard error.
    fn printed(&self) -> String {
        fs::read_to_string(self.folder.join("err")).expect("it was started")
    }

    fn signal(&self, signal: &str) {
        kill(signal, self.child.as_ref().expect("it runs").id().into());
    }

    /// Sends a signal, and waits for the end. Returns the status, and what it has printed since the last call.
    fn end(&mut self, signal: &str) -> (Option<i32>, String) {
        self.signal(signal);
        let status = self.child.take().expect("it runs").wait().expect("it is our child");
        let printed = self.printed();
        fs::write(self.folder.join("err"), "").expect("it is ours");
        while self.told.set_nonblocking(true).is_ok() && self.told.recv(&mut [0; 1000]).is_ok() {}
        self.told.set_nonblocking(false).expect("a socket");
        (status.code(), printed)
    }

    /// The processes of its disks, in the order in which they were started.
    fn children(&self) -> Vec<u32> {
        let pid = self.child.as_ref().expect("it runs").id();
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
        text.split_whitespace().map(|word| word.parse().expect("a number")).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            kill("TERM", child.id().into());
            // Its disks end before it does. A panic here would hide that of the test.
            let is_left = |child: &mut Child| !matches!(child.try_wait(), Ok(Some(_)));
            for _ in 0..1000 {
                if !is_left(&mut child) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            child.kill().ok();
            child.wait().ok();
        }
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// Goal: the disks of a file are served, each as its section says; SIGTERM ends them and says what is dropped; what is
/// to be saved is there after the next start, with the size that the file then says.
#[test]
fn disks_are_served_and_saved_over_a_restart() {
    let mut daemon = Daemon::new("restart");
    let (kept, dropped) = (Disk::named("kept"), Disk::named("dropped"));
    let file = daemon.folder.join("a disk");
    let save = format!("save = {}", file.display());
    let keys = format!("size = 8M\n{save}");
    let sections =
        [(&kept, keys.as_str()), (&dropped, "size = 8M\nunit = 16K\nalgorithm = zstd,level=2")];
    daemon.write(&sections);
    assert_eq!(daemon.start(), "STATUS=2 of 2 disks are served");
    assert!(dropped.ask("stat", &["comp_algorithm"]).1.contains("[zstd]"));
    let contents = [numbered(BYTES, 1), numbered(BYTES, 2)];
    for (disk, contents) in [&kept, &dropped].into_iter().zip(&contents) {
        write_all(&mut disk.client(), contents);
        assert!(read_all(&mut disk.client(), BYTES) == *contents);
    }
    assert!(!file.exists(), "nothing is saved yet");
    let (code, printed) = daemon.end("TERM");
    let (name, path) = (&kept.name, file.display());
    assert!(
        printed.contains(&format!(
            "zfolio: disk {name} has ended; 4M of contents are saved in '{path}'\n"
        )),
        "{printed}"
    );
    let name = &dropped.name;
    assert!(
        printed.contains(&format!("zfolio: disk {name} has ended; 4M of contents are dropped\n")),
        "{printed}"
    );
    assert_eq!((code, printed.lines().count()), (Some(0), 2), "{printed}");
    assert!(!kept.socket.exists() && !dropped.socket.exists());

    let keys = format!("size = 12M\nalgorithm = zstd\n{save}");
    daemon.write(&[(&kept, &keys), sections[1]]);
    assert_eq!(daemon.start(), "STATUS=2 of 2 disks are served");
    assert!(read_all(&mut kept.client(), BYTES) == contents[0]);
    assert!(read_all(&mut dropped.client(), BYTES).iter().all(|byte| *byte == 0));
    assert_eq!(kept.ask("stat", &["disksize"]).1, "12582912\n");
    let stays = format!(
        "zfolio: disk {}: it stays as it is in '{path}': 8M, units of 4K, lz4, zstd\n",
        kept.name
    );
    assert_eq!(daemon.printed(), stays);
    // Between two clients.
    assert_eq!(kept.client().write(8 << 20, &contents[1][..4096]).unwrap(), 0);
    assert_eq!(kept.ask("remove", &[]).0, Some(0));
    assert!(file.exists() && !file.with_extension("saving").exists());
    let status = loop {
        let told = daemon.told();
        if told.contains("not: ") {
            break told;
        }
    };
    assert_eq!(status, format!("STATUS=1 of 2 disks are served; not: {}", kept.name));
    assert_eq!(daemon.end("INT").0, Some(0), "it has ended in order");
    daemon.write(&[(&kept, &format!("size = 8M\n{save}"))]);
    daemon.start();
    let mut client = kept.client();
    assert!(
        read_all(&mut client, BYTES) == contents[0],
        "a smaller size does not cut anything off"
    );
    assert_eq!(client.read(8 << 20, 4096).unwrap(), contents[1][..4096]);
    daemon.end("TERM");
}

/// Goal: a disk that does not start leaves the others alone, is one line and in the status, and can be started once its
/// section is right.
#[test]
fn a_disk_that_fails_leaves_the_others() {
    let mut daemon = Daemon::new("fails");
    let (running, other) = (Disk::add("running", &[]), Disk::add("other", &[]));
    let [good, bad, again, twice, blocked] =
        ["good", "bad", "again", "twice", "blocked"].map(Disk::named);
    fs::write(&blocked.socket, "a file of the user").unwrap();
    let conf = daemon.conf();
    let conf = conf.display();
    daemon.write(&[
        (&good, "size = 8M"),
        (&bad, "sise = 8M"),
        (&running, "size = 8M"),
        (&blocked, "size = 8M"),
    ]);
    let at = |disk: &Disk, of: &Disk| {
        format!("[{}]\nsize = 8M\nnbd = {}\n", disk.name, of.socket.display())
    };
    let more = at(&again, &good) + &at(&twice, &other);
    fs::write(daemon.conf(), fs::read_to_string(daemon.conf()).unwrap() + &more).unwrap();
    let status = daemon.start();
    let names = [&bad, &running, &blocked, &again, &twice].map(|disk| disk.name.as_str());
    assert_eq!(status, format!("STATUS=1 of 6 disks are served; not: {}", names.join(", ")));
    let printed = daemon.printed();
    assert_eq!(printed.lines().count(), 5, "{printed}");
    for line in [
        format!("zfolio: {conf}:6: [{}] sise: not known; did you mean 'size'?\n", bad.name),
        format!(
            "zfolio: disk {} ({conf}:7) has not started: '{0}' is a disk already; accepted:",
            running.name
        ),
        format!("zfolio: disk {} ({conf}:10) has not started: --nbd: ", blocked.name),
        format!(
            "{conf}:15: [{}] nbd: '{}' is that of [{}] already; accepted: another one\n",
            again.name,
            good.socket.display(),
            good.name
        ),
        format!(
            "zfolio: disk {} ({conf}:16) has not started: --nbd: {}: another server listens on this socket\n",
            twice.name,
            other.socket.display()
        ),
    ] {
        assert!(printed.contains(&line), "no '{line}' in: {printed}");
    }
    assert_eq!(fs::read_to_string(&blocked.socket).unwrap(), "a file of the user");
    fs::remove_file(&blocked.socket).unwrap();
    assert!(running.is_served() && good.is_served() && other.is_served());

    daemon.write(&[(&good, "size = 8M"), (&bad, "size = 8M"), (&blocked, "size = 16M")]);
    write_all(&mut good.client(), &numbered(BYTES, 5));
    daemon.signal("HUP");
    assert!(daemon.told().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    wait_for("the disks", || bad.is_served() && blocked.is_served());
    assert!(daemon.told().starts_with("STATUS=3 of 3 disks are served\nREADY=1"));
    assert!(read_all(&mut good.client(), BYTES) == numbered(BYTES, 5), "it goes on");
    daemon.end("TERM");
    assert!(running.is_served(), "it is not the daemon's");
}

/// Goal: a disk that is killed is said, with what is lost, and stays away, and the others go on; SIGHUP starts it
/// again, unless its clients would find older contents.
#[test]
fn a_disk_that_is_killed_stays_away() {
    let mut daemon = Daemon::new("killed-disk");
    let [plain, kept] = ["plain", "older"].map(Disk::named);
    let file = daemon.folder.join("disk");
    daemon
        .write(&[(&plain, "size = 8M"), (&kept, &format!("size = 8M\nsave = {}", file.display()))]);
    daemon.start();
    write_all(&mut kept.client(), &numbered(BYTES, 1));
    daemon.end("TERM");
    daemon.start();
    write_all(&mut kept.client(), &numbered(BYTES, 2));
    let saved = fs::read(&file).unwrap();
    for (pid, name) in daemon.children().into_iter().zip([&plain.name, &kept.name]) {
        kill("KILL", pid.into());
        let lost = if *name == plain.name {
            "its contents are lost".to_owned()
        } else {
            let file = file.display();
            format!(
                "what was written since '{file}' was saved is lost; it does not start again until '{file}.saving' is \
                 removed"
            )
        };
        let line = format!("zfolio: disk {name} was killed by signal 9; {lost}\n");
        wait_for("the line", || daemon.printed().contains(&line));
        if *name == plain.name {
            assert!(kept.is_served());
            let status = format!("STATUS=1 of 2 disks are served; not: {name}");
            assert_eq!(daemon.told(), status);
            daemon.signal("HUP");
            wait_for("the disk", || plain.is_served());
            assert!(read_all(&mut plain.client(), BYTES).iter().all(|byte| *byte == 0));
        }
    }
    daemon.signal("HUP");
    let older = "the disk has ended without being saved, and '";
    wait_for("the line", || daemon.printed().contains(older));
    assert_eq!(fs::read(&file).unwrap(), saved);
    let (code, printed) = daemon.end("TERM");
    assert_eq!(code, Some(125), "{printed}");
    fs::remove_file(daemon.folder.join("disk.saving")).unwrap();
    daemon.start();
    assert!(read_all(&mut kept.client(), BYTES) == numbered(BYTES, 1), "as was asked for");
}

/// Goal: disks do not outlive a daemon that is killed; they end in order, and what is to be saved is saved.
#[test]
fn a_killed_daemon_leaves_no_disk() {
    let mut daemon = Daemon::new("killed");
    let [plain, kept] = ["orphan", "orphan-kept"].map(Disk::named);
    let save = format!("size = 8M\nsave = {}", daemon.folder.join("disk").display());
    daemon.write(&[(&plain, "size = 8M"), (&kept, &save)]);
    daemon.start();
    write_all(&mut kept.client(), &numbered(BYTES, 3));
    let disks = daemon.children();
    assert_eq!(disks.len(), 2);
    daemon.end("KILL");
    wait_for("the disks to end", || {
        disks.iter().all(|disk| state(*disk).is_none_or(|state| state == 'Z'))
    });
    assert!(!plain.socket.exists() && !kept.socket.exists());
    assert_eq!(plain.ask("stat", &[]).0, Some(2));
    assert_eq!(daemon.start(), "STATUS=2 of 2 disks are served");
    assert!(read_all(&mut kept.client(), BYTES) == numbered(BYTES, 3));
}

#[test]
fn a_second_daemon_is_one_line() {
    let mut daemon = Daemon::new("second");
    let disk = Disk::named("only");
    daemon.write(&[(&disk, "size = 8M")]);
    daemon.start();
    let (other, link) = (daemon.command(&[]).output().unwrap(), daemon.folder.join("link"));
    std::os::unix::fs::symlink(daemon.conf(), &link).unwrap();
    let by_link = zfolio(&["device", "daemon", "--config", link.to_str().unwrap()]).output();
    for output in [other, by_link.unwrap()] {
        let (out, err) = texts(&output);
        assert_eq!((output.status.code(), out.as_str(), err.lines().count()), (Some(2), "", 1));
        let expected = format!(
            "another 'zfolio device daemon' serves the disks of {}",
            daemon.conf().display()
        );
        assert!(err.contains(&expected), "{err}");
    }
    assert!(disk.is_served());
    assert_eq!(daemon.end("QUIT").0, Some(0));
    // A name that begins with @ is one without a file.
    let name = format!("zfolio-daemon-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    daemon.told = UnixDatagram::bind_addr(&address).unwrap();
    daemon.address = format!("@{name}");
    assert_eq!(daemon.start(), "STATUS=1 of 1 disks are served");
    daemon.end("TERM");
}

/// Goal: a file that is damaged, or belongs to another disk, is not written to; a disk that cannot be saved says so.
#[test]
fn contents_that_are_not_loaded_are_not_overwritten() {
    let folder = scratch("daemon-contents");
    let (file, bad) = (folder.join("disk"), folder.join("bad"));
    let [file, bad] = [&file, &bad].map(|path| path.to_str().unwrap());
    let disk = Disk::start("saver-1", &["--size", "8M", "--save", file]);
    write_all(&mut disk.client(), &numbered(BYTES, 4));
    let second = Disk::named("saver-2");
    second.refused(
        &["--size", "8M", "--save", file],
        125,
        "disk.saving' belongs to another save, or to a disk",
    );
    let (code, _, err) = disk.ask("save", &[&format!("{file}.saving")]);
    assert!(code == Some(2) && err.contains("accepted: a name without .saving"), "{err}");
    let output = disk.end("TERM");
    assert!(output.status.success());
    let mut saved = fs::read(file).unwrap();
    saved[BYTES / 4] ^= 1;
    fs::write(bad, &saved).unwrap();
    second.refused(&["--size", "8M", "--save", bad], 125, "--save: '");
    second.refused(&["--size", "8M", "--save", bad, "--load", file], 2, "--load");
    second.refused(
        &["--size", "8M", "--save", "/nowhere/disk"],
        2,
        "--save: '/nowhere/disk.saving': No such",
    );
    second.refused(&["--size", "8M", "--save", "/dev"], 2, "--save: '/dev' is no file");
    second.refused(&["--save", file], 2, "--size");
    second.refused(
        &["--size", "8M", "--save", file, "--mem-limit", "1M"],
        2,
        "--mem-limit: 1M are not enough",
    );
    second.refused(&["--size", "10000K", "--unit", "16K", "--save", bad], 125, "--save: '");
    // A disk in the file's units cannot have that size. It was found out, in words that were not true, after a load.
    second.refused(
        &["--size", "8390656", "--save", bad],
        2,
        "--size: '8390656' bytes are not the size of a disk; accepted: a multiple of the unit, 4K, ",
    );
    // An address that is in use, after the contents were loaded.
    let other = Disk::start("saver-3", &["--size", "8M"]);
    let address = other.socket.to_str().unwrap();
    let options = ["device", "run", &second.name, "--size", "8M", "--save", file, "--nbd", address];
    assert_eq!(output_of(&options).0, Some(125));
    assert_eq!(fs::read(bad).unwrap(), saved);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "nothing is left behind");
    let disk = Disk::start("saver-4", &["--size", "8M", "--save", file]);
    assert!(read_all(&mut disk.client(), BYTES) == numbered(BYTES, 4));
    // Its directory has gone.
    fs::remove_dir_all(&folder).unwrap();
    let output = disk.end("TERM");
    let err = texts(&output).1;
    assert_eq!((output.status.code(), err.lines().count()), (Some(125), 1), "{err}");
    assert!(
        err.contains("has ended without being saved: '")
            && err.contains("4M of contents are dropped"),
        "{err}"
    );
}

/// Goal: a command does not end a disk whose contents cannot be saved; they can be saved elsewhere, or once there is a
/// place; and who does not need them says so. Method: its directory is removed, and made again.
#[test]
fn a_disk_that_cannot_be_saved_is_not_removed() {
    let folder = scratch("daemon-unsaved");
    let (place, other) = (folder.join("place"), folder.join("other"));
    let file = place.join("disk");
    fs::create_dir(&place).unwrap();
    let options = ["--save", file.to_str().unwrap()];
    let disk = Disk::add("unsaved", &options);
    write_all(&mut disk.client(), &numbered(BYTES, 5));
    fs::remove_dir_all(&place).unwrap();
    for _ in 0..2 {
        let (code, out, err) = disk.ask("remove", &[]);
        assert_eq!((code, out.as_str(), err.lines().count()), (Some(125), "", 1), "{err}");
        assert!(err.contains("it stays, without clients, since it cannot be saved: '"), "{err}");
        assert!(!disk.is_served());
        let (_, listed, _) = output_of(&["device", "list", "--raw", "-o", "NAME,ADDRESS"]);
        assert!(listed.lines().any(|line| line == format!("{} -", disk.name)), "{listed}");
    }
    let saved = disk.ask("save", &[other.to_str().unwrap()]);
    assert_eq!(saved.0, Some(0), "{saved:?}");
    fs::create_dir(&place).unwrap();
    assert_eq!(disk.ask("remove", &[]), (Some(0), String::new(), String::new()));
    assert!(fs::read(&file).unwrap().len() > 1000 && other.exists());
    for file in [&file, &other] {
        let disk = Disk::start("unsaved-again", &["--load", file.to_str().unwrap()]);
        assert!(read_all(&mut disk.client(), BYTES) == numbered(BYTES, 5));
    }
    let disk = Disk::add("unsaved", &options);
    fs::remove_dir_all(&place).unwrap();
    assert_eq!(disk.ask("remove", &["--no-save"]), (Some(0), String::new(), String::new()));
    assert!(!place.exists());
}

/// Goal: a disk that begins empty, since the last one with its file was not saved and there is nothing older, says so,
/// and the one behind it, which goes on from the file, does not. It began empty without a word.
#[test]
fn a_disk_that_follows_an_unsaved_one_says_so() {
    let folder = scratch("daemon-follows");
    let file = folder.join("disk");
    let options = ["--save", file.to_str().unwrap()];
    let disk = Disk::add("follows", &options);
    assert_eq!(disk.ask("remove", &["--no-save"]).0, Some(0));
    assert!(!file.exists());
    let line = format!(
        "zfolio: disk {}: the last disk with '{}' ended without being saved; this one begins empty\n",
        disk.name,
        file.display()
    );
    for expected in [line, String::new()] {
        let (code, out, err) = disk.try_add(&options);
        assert_eq!((code, err), (Some(0), expected), "{out}");
        assert_eq!(disk.ask("remove", &[]).0, Some(0));
        assert!(file.exists());
    }
    fs::remove_dir_all(&folder).unwrap();
}

/// Goal: a save to the file that the disk keeps is whole whenever the disk is killed: what was there before, or what
/// was being saved; and the next disk does not go on from it unasked. Method: the disk is killed as soon as there is a
/// part.
#[test]
fn a_killed_checkpoint_leaves_a_whole_file() {
    let folder = scratch("daemon-checkpoint");
    let (file, part) = (folder.join("disk"), folder.join("disk.saving.saving"));
    let options = ["--size", "64M", "--save", file.to_str().unwrap()];
    // Noise, which takes the longer to write: the test sees the part, and kills the disk before it is whole.
    const MUCH: usize = 48 << 20;
    let noise = |number| Random::new(number).bytes(MUCH);
    let save = |disk: &Disk| zfolio(&["device", "save", &disk.name, options[3]]);
    let (mut old, mut in_the_middle) = (1, 0);
    let disk = Disk::start("checkpoint", &options);
    write_all(&mut disk.client(), &noise(old));
    assert!(save(&disk).status().unwrap().success());
    let mut disk = Some(disk);
    for number in 2..7 {
        let served = disk.take().unwrap_or_else(|| Disk::start("checkpoint", &options));
        assert!(!part.exists(), "the next disk removes what was left");
        let mut client = served.client();
        let found = read_all(&mut client, MUCH);
        assert!(found == noise(old), "{number}: {old} is not there");
        write_all(&mut client, &noise(number));
        let before = fs::read(&file).unwrap();
        let mut asks = save(&served).spawn().unwrap();
        wait_for("a part", || {
            fs::metadata(&part).is_ok_and(|part| part.len() > 0)
                || asks.try_wait().unwrap().is_some()
        });
        served.end("KILL");
        let is_done = asks.wait().unwrap().success();
        if fs::read(&file).unwrap() == before {
            assert!(!is_done, "it was said to be saved");
            in_the_middle += u32::from(part.exists());
        } else {
            old = number;
        }
        let next = Disk::named("checkpoint-next");
        next.refused(&options, 125, "the disk has ended without being saved");
        fs::remove_file(folder.join("disk.saving")).unwrap();
    }
    assert!(in_the_middle > 0, "no checkpoint was killed in the middle");
    fs::remove_dir_all(&folder).unwrap();
}

/// Goal: contents that are saved stay, although their directory cannot be synced. The save then took the file, which
/// had its name already, for a part, and overwrote it with a note.
#[test]
fn a_directory_that_cannot_be_synced_costs_no_contents() {
    let Some(nobody) = Nobody::stage() else { return };
    let folder = std::env::temp_dir().join(format!("zfolio-daemon-deaf-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let mode = |mode| fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o777);
    let [file, socket] = ["disk", "a.sock"].map(|name| folder.join(name));
    let name = format!("deaf-{}", std::process::id());
    let [file_name, socket_name] = [&file, &socket].map(|path| path.to_str().unwrap());
    let options = ["--size", "8M", "--nbd", socket_name, "--save", file_name];
    let mut run = nobody.spawn(&[&["device", "run", &name], &options[..]].concat());
    first_line(&mut run);
    write_all(&mut Disk::client_of(&socket, &name), &numbered(BYTES, 6));
    // Names can be changed, and the directory cannot be opened.
    mode(0o733);
    kill("TERM", run.id().into());
    let output = run.wait_with_output().unwrap();
    mode(0o777);
    let err = texts(&output).1;
    assert!(output.status.code() == Some(125) && err.contains("Permission denied"), "{err}");
    let disk = Disk::start("deaf-next", &["--load", file_name]);
    assert!(read_all(&mut disk.client(), BYTES) == numbered(BYTES, 6));
    fs::remove_dir_all(&folder).unwrap();
}

/// Goal: each write that was answered is in the file, however busy clients are when the disk ends, and although
/// somebody reads its figures at that moment and does not finish.
#[test]
fn what_is_written_at_the_end_is_saved() {
    let folder = scratch("daemon-busy");
    let file = folder.join("disk");
    let file = file.to_str().unwrap();
    let port = free_address();
    let metrics = port.to_string();
    let disk = Disk::start("busy", &["--size", "8M", "--save", file, "--metrics", &metrics]);
    let mut slow = TcpStream::connect(port).unwrap();
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    // There is something to save, which takes a while.
    write_all(&mut disk.client(), &numbered(BYTES, 1));
    let mut client = disk.client();
    let writer = std::thread::spawn(move || {
        // One more than the last number whose write was answered.
        let mut write = |number: u64| client.write(4096, &number.to_le_bytes().repeat(64));
        (1..).find(|number| !matches!(write(*number), Ok(0)))
    });
    let output = disk.end("TERM");
    assert!(output.status.success(), "{}", texts(&output).1);
    let end = writer.join().unwrap().expect("the disk has ended");
    drop(slow);
    let disk = Disk::start("busy-again", &["--size", "8M", "--save", file]);
    let found = disk.client().read(4096, 512).unwrap();
    let found = u64::from_le_bytes(found[..8].try_into().unwrap());
    // The last one may have been carried out without an answer.
    assert!(found == end - 1 || found == end, "{found} of {end}");
    drop(disk);
    fs::remove_dir_all(&folder).unwrap();
}

/// Goal: what is wrong with a configuration is a line for each, with its place, and nothing is started.
#[test]
fn a_configuration_that_is_wrong_is_a_line_for_each() {
    let daemon = Daemon::new("wrong");
    let conf = daemon.conf();
    let shown = conf.display().to_string();
    let check = |text: &str| daemon.refusal(text);
    let good = "nbd = /tmp/a.sock\nsize = 8M\n";
    for (text, expected) in [
        ("", "no disk is configured; accepted: [NAME] in FILE"),
        ("size = 1G\n[a]\n", "FILE:1: 'size' is in front of the first section"),
        ("[a]\nsize = 8M\nnbd = /a\n[a]\n", "FILE:4: [a] is there twice, first in line 1"),
        (
            "[a b]\nsize = 8M\nnbd = /a",
            "FILE:1: [a b] NAME: 'a b' is not a name; accepted: up to 64",
        ),
        ("[-x]\nsize = 8M\nnbd = /a", "FILE:1: [-x] NAME: '-x' is not a name"),
        ("[a]\nsize = 8M", "FILE:1: [a] nbd, vhost-user or ublk: missing; accepted: one of them"),
        ("[a]\nnbd = /a", "FILE:1: [a] size: missing"),
        ("[a]\nsize = 12Q\nnbd = /a", "FILE:2: [a] size: '12Q' is not a size; accepted:"),
        (
            "[a]\nsize = ram / x\nnbd = /a",
            "FILE:2: [a] size: 'ram / x' is not a size; accepted: sizes",
        ),
        (
            "[a]\nsize = 8M\nsize = 9M\nnbd = /a",
            "FILE:3: [a] size: it is there twice, first in line 2",
        ),
        (
            "[a]\nnbd = systemd\nsize = 8M",
            "FILE:2: [a] nbd: 'systemd' hands its sockets to one process",
        ),
        ("[a]\nload = /a\nsize = 8M\nnbd = /a", "not together with"),
        ("[a]\nbackground = 1\n", "FILE:2: [a] background: not known; accepted: size, load, save"),
        (
            "[a]\nzram-size = 4096\n",
            "FILE:2: [a] zram-size: a key of zram-generator; accepted here: size, in",
        ),
        ("[a]\nmount-point = /x\n", "accepted here: nothing: a client of the disk mounts it"),
        ("[a]\nalgorithm = rar\nnbd = /a\nsize = 8M", "FILE:2: [a] algorithm: "),
        ("[a]\nunit = 12K\nnbd = /a\nsize = 8M", "FILE:2: [a] unit: '12K' is not a unit"),
    ] {
        let err = check(text);
        assert!(err.starts_with("zfolio: ") && err.contains(expected), "{text}: {err}");
        assert_eq!(err.lines().count(), 1, "{text}: {err}");
    }
    assert_eq!(check("[a]\nx\n=\n[b\n").lines().count(), 3);
    assert_eq!(check(&format!("[a]\nx=1\n[b]\n{good}\n[c]\ny=1\n")).lines().count(), 2);
    fs::remove_file(&conf).unwrap();
    let pipe = daemon.folder.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, status, part) in [
        (pipe.to_str().unwrap(), 2, "a pipe; accepted: a configuration"),
        (shown.as_str(), 2, "No such file"),
        (daemon.folder.to_str().unwrap(), 2, "Is a directory"),
        ("/dev/zero", 2, "more than 1M"),
        (env!("CARGO_BIN_EXE_zfolio"), 2, "more than 1M"),
        ("", 2, "'' is not a path"),
    ] {
        let (code, _, err) = output_of(&["device", "daemon", "--config", path]);
        assert!(code == Some(status) && err.contains(part) && err.lines().count() == 1, "{err}");
    }
    fs::write(&conf, b"[a]\n\xff\n").unwrap();
    let (_, err) = texts(&daemon.command(&[]).output().unwrap());
    assert!(err.contains("not UTF-8"), "{err}");
    let (_, out, _) = output_of(&["device", "list", "-n", "-o", "NAME"]);
    assert!(out.lines().all(|name| name.trim() != "a"), "{out}");
}

/// Goal: so is what no single value says, and the start would refuse.
#[test]
fn what_does_not_fit_together_is_a_line() {
    let daemon = Daemon::new("unfit");
    let long = format!("/{}", "x".repeat(107));
    let long_socket = format!("[a]\nnbd = unix:{long}\nsize = 8M");
    let long_vhost = format!("[a]\nvhost-user = {long}\nsize = 8M");
    let places = format!("[a]\nnbd = /a\n{}size = 8M", "writeback = /var/tmp\n".repeat(17));
    for (text, expected) in [
        (
            "[a]\nnbd = /a\nsize = 5000",
            "FILE:3: [a] size: '5000' bytes are not the size of a disk; accepted: a multiple of the unit, 4K,",
        ),
        (
            "[a]\nnbd = /a\nsize = 68K\nunit = 64K",
            "FILE:3: [a] size: '69632' bytes are not the size of a disk; accepted: a multiple of the unit, 64K,",
        ),
        (
            "[a]\nnbd = /a\nsize = 64T",
            "FILE:3: [a] size: '70368744177664' bytes are not the size of a disk; accepted: a multiple of the unit, \
             4K, up to 16T",
        ),
        (&long_socket, "has 108 bytes; accepted: the path of a socket of up to 107 bytes"),
        (&long_vhost, "has 108 bytes; accepted: the path of a socket of up to 107 bytes"),
        (
            "[a]\nnbd = /tmp/a\nsize = 8M\nsave = /tmp/a",
            "FILE:4: [a] save: '/tmp/a' is the socket of --nbd; accepted: another file",
        ),
        (
            "[a]\nvhost-user = /tmp/a\nsize = 8M\nsave = /tmp/a",
            "FILE:4: [a] save: '/tmp/a' is the socket of --vhost-user; accepted: another file",
        ),
        ("[a]\nnbd = 192.0.2.1\nsize = 8M", "FILE:2: [a] nbd: 192.0.2.1:10809: other machines"),
        (
            "[a]\nnbd = localhost\ntls-certificates = /c\nsize = 8M",
            "FILE:3: [a] tls-certificates: no --nbd of this disk uses them",
        ),
        (
            "[a]\nnbd = /a\naccelerate = iaa=model\nalgorithm = lz4\nsize = 8M",
            "FILE:3: [a] accelerate: iaa has none of the algorithms of this disk",
        ),
        (
            "[a]\nnbd = /a\nalgorithm = deflate-iaa\nsize = 8M",
            "FILE:3: [a] algorithm: 'deflate-iaa' is an accelerator's",
        ),
        ("[a]\nnbd = /a\nsize = 8M\nsave = /a.saving", "FILE:4: [a] save: "),
        (&places, "FILE:19: [a] writeback: 17 places; accepted: 16 at most"),
    ] {
        let err = daemon.refusal(text);
        assert!(err.starts_with("zfolio: ") && err.contains(expected), "{text}: {err}");
        assert_eq!(err.lines().count(), 1, "{text}: {err}");
    }
    // Of a disk that goes on from a file, the file has size, unit and algorithms.
    let file = daemon.folder.join("there");
    fs::write(&file, "").unwrap();
    let text = format!("[a]\nnbd = /a\nsize = 5000\nsave = {}\n", file.display());
    fs::write(daemon.conf(), text).unwrap();
    let output = daemon.command(&["--check"]).output().unwrap();
    assert!(output.status.success(), "{}", texts(&output).1);
}

/// Goal: what only one disk can have is refused where a second disk names it, or the same one again. Others of that
/// kind are fine.
#[test]
fn what_two_disks_cannot_both_have_is_a_line() {
    let daemon = Daemon::new("both");
    let disk = |name: &str, rest: &str| format!("[{name}]\nsize = 8M\n{rest}\n");
    for (first, second, expected) in [
        ("nbd = /a", "nbd = /b\nnbd = /a", "FILE:7: [b] nbd: '/a' is that of [a] already"),
        ("nbd = /a", "vhost-user = /a", "FILE:6: [b] vhost-user: '/a' is that of [a]"),
        ("nbd = localhost", "nbd = 127.0.0.1", "FILE:6: [b] nbd: '127.0.0.1:10809' is"),
        ("ublk = 7", "ublk = 7", "FILE:6: [b] ublk: '/dev/ublkb7' is that of [a]"),
        ("nbd = /a\nsave = /s", "nbd = /b\nsave = /s", "FILE:8: [b] save: '/s' is that"),
        (
            "nbd = /a",
            "nbd = /b\nnbd = localhost:0\nnbd = /b",
            "FILE:8: [b] nbd: '/b' is that of [b]",
        ),
        (
            "nbd = /a\nmetrics = localhost:9100",
            "nbd = /b\nmetrics = localhost:9100",
            "FILE:8: [b] metrics: '127.0.0.1:9100' is that of [a] already; accepted: another one",
        ),
    ] {
        let err = daemon.refusal(&(disk("a", first) + &disk("b", second)));
        assert!(err.starts_with("zfolio: FILE:") && err.contains(expected), "{second}: {err}");
        assert_eq!(err.lines().count(), 1, "{second}: {err}");
    }
    let both = ["nbd = localhost:0\nublk = auto", "nbd = localhost:0\nublk = auto"];
    fs::write(daemon.conf(), disk("a", both[0]) + &disk("b", both[1])).unwrap();
    let output = daemon.command(&["--check"]).output().unwrap();
    assert!(output.status.success(), "{}", texts(&output).1);
}

/// Goal: files beside the main file are read after it, by name, and an empty value takes a key back.
#[test]
fn more_files_replace_keys_and_add_disks() {
    let daemon = Daemon::new("more");
    let folder = daemon.folder.join("devices.conf.d");
    fs::create_dir(&folder).unwrap();
    fs::write(daemon.conf(), "[a]\nsize = 1G\nunit = 64K\nnbd = /a\nnbd = localhost\n").unwrap();
    fs::write(folder.join("20.conf"), "[a]\nsize = ram / 2\n").unwrap();
    fs::write(folder.join("10.conf"), "[a]\nsize = 2G\nunit =\nnbd = /c\n[b]\nsize=1M\nnbd=/b\n")
        .unwrap();
    fs::write(folder.join("30.conf~"), "nonsense").unwrap();
    let (out, err) = texts(&daemon.command(&["--check"]).output().unwrap());
    assert_eq!(
        (out.as_str(), err.as_str()),
        ("a --nbd=/c --size=ram / 2\nb --size=1M --nbd=/b\n", "")
    );
    std::os::unix::fs::symlink("/dev/null", folder.join("40.conf")).unwrap();
    fs::write(folder.join("15.conf"), "[b]\nsise=1\n").unwrap();
    let (_, err) = texts(&daemon.command(&["--check"]).output().unwrap());
    assert_eq!(
        err,
        format!(
            "zfolio: {}/15.conf:2: [b] sise: not known; did you mean 'size'?\n",
            folder.display()
        )
    );
}

/// Goal: who may not read the configuration, or not write the contents, gets one line.
#[test]
fn without_permission_it_is_one_line() {
    let Some(nobody) = Nobody::stage() else { return };
    let folder = std::env::temp_dir().join(format!("zfolio-daemon-closed-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let (conf, socket) = (folder.join("devices.conf"), folder.join("a.sock"));
    fs::write(&conf, "[a]\nsize = 8M\nnbd = /a\n").unwrap();
    let closed = PermissionsExt::from_mode(0o600);
    fs::set_permissions(&conf, closed).unwrap();
    let [conf, socket, file] =
        [conf, socket, folder.join("disk")].map(|path| path.display().to_string());
    let name = format!("closed-{}", std::process::id());
    for (arguments, status, part) in [
        (&["daemon", "--config", &conf][..], 125, "devices.conf': Permission denied"),
        (&["run", &name, "--size", "8M", "--nbd", &socket], 125, "a.sock: Permission denied"),
        (
            &["run", &name, "--size", "8M", "--nbd", "localhost:0", "--save", &file],
            2,
            "disk.saving': Permission denied",
        ),
        (
            &["run", &name, "--nbd", "localhost:0", "--load", &conf],
            2,
            "devices.conf': Permission denied",
        ),
    ] {
        let output = nobody.output(&[&["device"], arguments].concat());
        let (out, err) = texts(&output);
        assert!(output.status.code() == Some(status) && out.is_empty(), "{arguments:?}: {err}");
        assert!(err.contains(part) && err.lines().count() == 1, "{arguments:?}: {err}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    fs::remove_dir_all(&folder).unwrap();
}

fn of_the_sources(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Goal: the example is right line by line, and has every option of a disk.
#[test]
fn the_example_is_accepted_and_complete() {
    let daemon = Daemon::new("example");
    let text = fs::read_to_string(of_the_sources("examples/devices.conf")).unwrap();
    fs::write(daemon.conf(), &text).unwrap();
    let (_, err) = texts(&daemon.command(&["--check"]).output().unwrap());
    assert!(err.contains("no disk is configured"), "as it is it starts nothing: {err}");
    let setting = |line: &str| {
        line.strip_prefix('#').filter(|line| !line.starts_with(' ')).unwrap_or("").to_owned()
    };
    let settings = text.lines().map(setting).collect::<Vec<_>>().join("\n");
    fs::write(daemon.conf(), &settings).unwrap();
    let output = daemon.command(&["--check"]).output().unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success() && out.lines().count() == 5, "{err}");
    let (_, help, _) = output_of(&["device", "add", "--help"]);
    let options = help.lines().filter_map(|line| line.trim_start().split_once("--"));
    let options = options.filter(|(before, _)| before.is_empty() || before.ends_with(", "));
    let options: Vec<&str> =
        options.map(|(_, rest)| rest.split([' ', '[']).next().unwrap()).collect();
    assert!(options.len() > 12, "{options:?}");
    for option in options.into_iter().filter(|option| *option != "help") {
        assert!(settings.contains(&format!("\n{option} = ")), "{option} is not in the example");
    }
}

#[test]
fn systemd_accepts_the_unit() {
    let folder = scratch("unit");
    let text = fs::read_to_string(of_the_sources("packaging/zfolio-devices.service")).unwrap();
    let text = text.replace("@PREFIX@/bin/zfolio", env!("CARGO_BIN_EXE_zfolio"));
    let unit = folder.join("zfolio-devices.service");
    fs::write(&unit, text).unwrap();
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output();
    match verify {
        Ok(output) => {
            let err = texts(&output).1;
            assert!(output.status.success() && !err.contains("zfolio-devices.service:"), "{err}");
        }
        Err(_) => eprintln!("SKIPPED: systemd-analyze is not installed (systemd)"),
    }
    fs::remove_dir_all(&folder).unwrap();
}
