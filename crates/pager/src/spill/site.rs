//! Where a process writes back that is no managed program and never forks, such as that of a disk: files and devices
//! that are opened at once, each with an area, a thread and a key of its own, for as long as the process wants.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use zfolio_core::size;
use zfolio_core::store::Backing;
use zfolio_core::swap::disk::SLOT_BYTES;
use zfolio_core::swap::{AREAS_MAX, Areas, Config};
use zfolio_sys::Errno;
use zfolio_sys::eventfd::EventFd;

use super::any::SpillDisk;
use super::place::{BUFFERS_MAX, New, PlaceError, parse_bytes, parse_priority, room};
use super::uring::Sender;
use crate::fatal;

/// A directory or a block device, and how much of it may be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Site {
    /// Where. In a directory the file has no name.
    pub path: PathBuf,
    /// How much; `None`: half of what is free in the directory's file system, or all of the device.
    pub bytes: Option<u64>,
    /// Higher ones are filled first, equal ones in turn.
    pub priority: i32,
}

impl Site {
    /// As people write it: `/var/tmp`, `/var/tmp,size=8G`, `/dev/sdb,prio=5`.
    ///
    /// # Errors
    ///
    /// A message: what was given, and what is accepted.
    pub fn parse(given: &str) -> Result<Site, String> {
        let (mut bytes, mut priority, mut rest) = (None, None, given);
        while let Some((before, option)) = rest.rsplit_once(',') {
            let earlier = match option.split_once('=') {
                Some(("size", value)) => bytes.replace(parse_bytes(value)?).is_some(),
                Some(("prio", value)) => {
                    let read = parse_priority(value).ok_or_else(|| {
                        format!("'{value}' is not a priority; accepted: -1 to 32767")
                    })?;
                    priority.replace(read).is_some()
                }
                // A path may have commas.
                _ => break,
            };
            if earlier {
                return Err(format!(
                    "'{given}' has an option twice; accepted: size= and prio= once each"
                ));
            }
            rest = before;
        }
        Ok(Site { path: rest.into(), bytes, priority: priority.unwrap_or(0) })
    }
}

/// As [`Site::parse`] reads it.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.bytes.map_or(Ok(()), |bytes| write!(f, ",size={}", size::display(bytes)))?;
        if self.priority == 0 { Ok(()) } else { write!(f, ",prio={}", self.priority) }
    }
}

/// Open sites. Dropping them ends their threads, and waits for what is under way ([`Sites::end`] not for ever); what
/// uses the backing is dropped before.
#[derive(Debug)]
pub struct Sites {
    areas: Arc<Areas>,
    disks: Vec<(Arc<SpillDisk>, JoinHandle<()>)>,
    bytes: u64,
}

/// Between two looks whether the sites have ended.
const TURN: Duration = Duration::from_millis(10);

impl Sites {
    /// Opens them, for objects of at most `unit_bytes` bytes.
    ///
    /// # Errors
    ///
    /// See [`PlaceError`].
    pub fn open(sites: &[Site], unit_bytes: usize) -> Result<Sites, PlaceError> {
        if sites.len() > AREAS_MAX {
            return Err(PlaceError::TooMany { most: AREAS_MAX });
        }
        let system = |what| move |errno| PlaceError::System { what, errno };
        let ended = EventFd::new().map_err(system("an event descriptor"))?;
        let (ended, mut opened, mut bytes) = (Arc::new(ended), Vec::new(), 0_u64);
        for site in sites {
            let new = Sites::open_one(site, &ended)?;
            bytes = bytes.saturating_add(new.slots() * SLOT_BYTES as u64);
            opened.push(new);
        }
        let config = Config {
            object_bytes_max: unit_bytes,
            buffer_bytes: usize::try_from(BUFFERS_MAX).unwrap_or(usize::MAX),
            limit_bytes: bytes,
        };
        let areas = Arc::new(Areas::new(config));
        let mut sites = Sites { areas, disks: Vec::new(), bytes };
        for new in opened {
            let (_, disk) = new.add_to(&sites.areas)?;
            let served = Arc::clone(&disk);
            let thread = std::thread::Builder::new().name("disk".to_owned());
            let guarded = move || {
                let _guard = fatal::NoUnwind;
                served.serve();
            };
            let thread = thread.spawn(guarded);
            let thread = thread.map_err(|_| system("a thread of a disk")(Errno::AGAIN))?;
            sites.disks.push((disk, thread));
        }
        Ok(sites)
    }

    fn open_one(site: &Site, ended: &Arc<EventFd>) -> Result<New, PlaceError> {
        let Site { path, bytes, priority } = site;
        let path: &Path = &std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let bytes = bytes.map_or_else(|| room(path).map_err(PlaceError::Path), Ok)?;
        // All threads of the process are its own, and bear a system call that ends with EINTR.
        let medium = New::open_medium(path, bytes).map_err(PlaceError::Path)?;
        Ok(New::on(medium, *priority, Sender::Caller, ended))
    }

    /// What the store is given.
    #[must_use]
    pub fn backing(&self) -> Box<dyn Backing> {
        Box::new(Arc::clone(&self.areas))
    }

    /// Ends the threads. What is under way is waited for, at most for about this time. Then those sites are returned
    /// that have not answered: the kernel may still write to their buffers, so they are there until the process ends,
    /// whatever is dropped, and so are the threads.
    #[must_use]
    pub fn end(self, time: Duration) -> Vec<PathBuf> {
        self.disks.iter().for_each(|(disk, _)| disk.stop());
        let mut turns = time.as_millis() / TURN.as_millis();
        loop {
            let is_busy = |(disk, thread): &&(Arc<SpillDisk>, JoinHandle<()>)| {
                !thread.is_finished() || disk.is_waiting()
            };
            let busy = self.disks.iter().filter(is_busy);
            let busy: Vec<_> = busy.map(|(disk, _)| disk.medium().path().to_owned()).collect();
            if busy.is_empty() {
                return busy;
            }
            if turns == 0 {
                // Dropping it would wait.
                std::mem::forget(self);
                return busy;
            }
            turns -= 1;
            std::thread::sleep(TURN);
        }
    }

    /// How much may be written there in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        for (disk, thread) in self.disks.drain(..) {
            disk.stop();
            // It does not panic: the process would have ended.
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::ExitStatusExt as _;
    use std::path::Path;
    use std::process::Command;
    use std::sync::Arc;
    use std::time::Duration;

    use zfolio_core::swap::disk::{Buffer, Direction, Disk as _, SLOT_BYTES, Transfer};
    use zfolio_core::swap::{Areas, Config};
    use zfolio_sys::eventfd::EventFd;

    use super::super::file::Medium;
    use super::super::uring::Sender;
    use super::{Site, Sites, SpillDisk};
    use crate::spill::PlaceError;

    #[test]
    fn sites_are_read_as_they_are_written() {
        for text in ["/var/tmp", "/var/tmp,size=8G", "/dev/sdb,prio=5", "/a,b,size=16M,prio=-1"] {
            assert_eq!(Site::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Site::parse("/x,prio=1,size=1G").unwrap().to_string(), "/x,size=1G,prio=1");
        for (text, part) in [
            ("/x,size=1M", "'1M' is too small; accepted: 16M or more"),
            ("/x,size=lots", "lots"),
            ("/x,prio=99999", "'99999' is not a priority"),
            ("/x,size=16M,prio=1,size=32M", "has an option twice"),
            ("/x,prio=1,prio=2", "has an option twice"),
        ] {
            let why = Site::parse(text).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn sites_are_opened_and_closed() {
        let site = Site::parse("/var/tmp,size=16M").unwrap();
        let sites = Sites::open(&[site.clone(), site], 4096).unwrap();
        assert_eq!(sites.bytes(), 32 << 20);
        assert!(sites.end(Duration::from_secs(60)).is_empty());
        let none = Sites::open(&[Site::parse("/nowhere").unwrap()], 4096);
        assert!(matches!(none, Err(PlaceError::Path(_))), "{none:?}");
    }

    /// Goal: a place that never answers is named and not waited for: the process of a disk never ended. What it was
    /// asked to read has its buffer until the answer. Method: a socket in the place of a file, to which nobody writes
    /// at first.
    #[test]
    fn a_site_that_never_answers_is_not_waited_for() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let medium = Medium::played(ours.into(), Path::new("/played"));
        let ended = Arc::new(EventFd::new().unwrap());
        let disk = Arc::new(SpillDisk::new(medium, 4, ended, Sender::Caller));
        if !disk.is_by_ring() {
            return eprintln!("SKIPPED: no io_uring");
        }
        let served = Arc::clone(&disk);
        let thread = std::thread::spawn(move || served.serve());
        while !disk.is_served() {
            std::thread::yield_now();
        }
        let (direction, buffer) = (Direction::Read, Buffer::new(1));
        let read = Transfer { token: 7, direction, first: 0, count: 1, buffer, result: Ok(()) };
        disk.begin(read).unwrap();
        disk.flush();
        let config = Config { object_bytes_max: 4096, buffer_bytes: 1 << 20, limit_bytes: 0 };
        let areas = Arc::new(Areas::new(config));
        let sites = Sites { areas, disks: vec![(Arc::clone(&disk), thread)], bytes: 0 };
        assert_eq!(sites.end(Duration::from_millis(50)), [Path::new("/played")]);
        theirs.write_all(&[9; SLOT_BYTES]).unwrap();
        let mut answered = None;
        for _ in 0..1000 {
            if answered.is_none() {
                disk.pause();
                disk.poll(&mut |transfer| answered = Some(transfer));
            }
        }
        let mut answered = answered.unwrap();
        assert_eq!((answered.token, answered.result), (7, Ok(())));
        assert!(answered.buffer.slots_mut()[0].0.iter().all(|byte| *byte == 9));
    }

    /// Goal: a thread of a disk that panics ends the process with a line, and nobody waits for it for ever. Method: in
    /// a child process, the read of a slot whose end is beyond 2^64 bytes. A ring refuses it and leaves it to the
    /// disk's thread, which computes that end for the error.
    #[test]
    fn a_disk_whose_thread_panics_ends_the_process() {
        const MARK: &str = "ZFOLIO_TEST_DISK_PANICS";
        if std::env::var_os(MARK).is_some() {
            let sites = Sites::open(&[Site::parse("/var/tmp,size=16M").unwrap()], 4096).unwrap();
            let disk = &sites.disks[0].0;
            // Before that the caller carries everything out itself.
            while !disk.is_served() {
                std::thread::yield_now();
            }
            let first = u64::MAX / SLOT_BYTES as u64;
            let (direction, buffer) = (Direction::Read, Buffer::new(1));
            let read = Transfer { token: 0, direction, first, count: 1, buffer, result: Ok(()) };
            disk.begin(read).unwrap();
            disk.flush();
            for _ in 0..10_000 {
                disk.poll(&mut |transfer| panic!("it has ended: {transfer:?}"));
                disk.pause();
            }
            std::process::exit(1);
        }
        let name = "spill::site::tests::a_disk_whose_thread_panics_ends_the_process";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name, "--nocapture"]).env(MARK, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let lines = said.lines().filter(|line| line.starts_with("zfolio:"));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            ["zfolio: a thread of the pager panicked: stopped"],
            "{said}"
        );
        assert!(said.contains("thread 'disk'"), "{said}");
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
    }
}
