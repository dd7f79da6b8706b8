//! Bytes go between regions and readers, writers, files and sockets, in both modes; contents are verified.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::net::UnixStream;

use zfolio_pager::{Mode, Pager, Region};

const MIB: usize = 1 << 20;

/// The modes that this process may use.
fn modes() -> Vec<Mode> {
    let may =
        |mode: &Mode| mode.check().inspect_err(|why| eprintln!("SKIPPED: {mode:?}: {why}")).is_ok();
    [Mode::Inline, Mode::Handler].into_iter().filter(may).collect()
}

/// A region of 32 MiB with a limit of 8 MiB. All of it is written, so most of it is compressed.
fn region(mode: Mode) -> (Pager, Region) {
    let pager = Pager::builder().limit(8 << 20).mode(mode).listed(false).build().unwrap();
    let mut region = pager.map(32 * MIB).unwrap();
    region.iter_mut().enumerate().for_each(|(index, byte)| *byte = byte_at(index, 0));
    (pager, region)
}

/// A byte that depends on the place and the round in which it is written; a row of them compresses.
fn byte_at(index: usize, round: u8) -> u8 {
    u8::try_from((index / 97) % 251).unwrap().wrapping_add(round)
}

fn bytes(round: u8, count: usize) -> Vec<u8> {
    (0..count).map(|index| byte_at(index, round)).collect()
}

/// What a [`Faulty`] does next.
enum Step {
    /// Moves so many bytes at most.
    Short(usize),
    Fail(ErrorKind),
    /// Claims more than there was room for.
    Claim,
    End,
}

/// A reader and writer that follows a list of steps, and after the last one transfers all it is asked
/// for.
struct Faulty {
    steps: std::vec::IntoIter<Step>,
    data: Vec<u8>,
    at: usize,
}

impl Faulty {
    fn new(data: Vec<u8>, steps: Vec<Step>) -> Faulty {
        Faulty { steps: steps.into_iter(), data, at: 0 }
    }

    fn step(&mut self, room: usize) -> io::Result<usize> {
        match self.steps.next() {
            Some(Step::Short(most)) => Ok(most.min(room)),
            Some(Step::Fail(kind)) => Err(kind.into()),
            Some(Step::Claim) => Ok(room + 1),
            Some(Step::End) => Ok(0),
            None => Ok(room),
        }
    }
}

impl Read for Faulty {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.step(into.len())?;
        if count > into.len() {
            return Ok(count);
        }
        let count = count.min(self.data.len() - self.at);
        into[..count].copy_from_slice(&self.data[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}

impl Write for Faulty {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let count = self.step(from.len())?;
        self.data.extend_from_slice(&from[..count.min(from.len())]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Goal: if a reader is interrupted, gives little, fails, lies or ends, exactly the bytes that it gave
/// arrive, and the count is right. Method: each kind, at odd places; the bytes behind must be the old ones.
#[test]
fn a_faulty_reader_leaves_what_it_gave() {
    use Step::{Claim, End, Fail, Short};
    for mode in modes() {
        let (_pager, mut region) = region(mode);
        let start = 5 * MIB + 123;
        let data = bytes(1, MIB);
        // Steps, then how many bytes arrive, and the error if there is one.
        let cases: [(Vec<Step>, usize, Option<ErrorKind>); 8] = [
            (vec![], MIB, None),
            (vec![Short(1), Fail(ErrorKind::Interrupted), Short(70_000)], MIB, None),
            (vec![Fail(ErrorKind::Interrupted), Fail(ErrorKind::Interrupted)], MIB, None),
            (vec![Short(1000), End], 1000, None),
            (vec![End], 0, None),
            (vec![Short(4097), Fail(ErrorKind::WouldBlock)], 4097, Some(ErrorKind::WouldBlock)),
            (vec![Fail(ErrorKind::ConnectionReset)], 0, Some(ErrorKind::ConnectionReset)),
            (vec![Short(8191), Claim], 8191, Some(ErrorKind::InvalidData)),
        ];
        for (case, (steps, arrived, error)) in cases.into_iter().enumerate() {
            let before = region[start..start + MIB].to_vec();
            let mut reader = Faulty::new(data.clone(), steps);
            let answer = region.read_from(start..start + MIB, &mut reader);
            let told = match (&answer, error) {
                (Ok(count), None) => *count,
                (Err(failed), Some(kind)) if failed.error.kind() == kind => failed.bytes,
                _ => panic!("{mode:?} case {case}: {answer:?}"),
            };
            assert_eq!(told, arrived, "{mode:?} case {case}");
            assert!(region[start..start + arrived] == data[..arrived], "{mode:?} case {case}");
            // A reader that lied may have written anything to the rest of its buffer.
            let rest = start + arrived..start + MIB;
            assert!(region[rest] == before[arrived..], "{mode:?} case {case}");
            region[start..start + MIB].copy_from_slice(&before);
        }
        let all = region.read_from(.., &mut &data[..]).unwrap();
        assert_eq!(all, MIB, "a reader that ends before the range");
        assert!(region[..MIB] == data && region[MIB] == byte_at(MIB, 0));
        assert_eq!(region.read_from(7..7, &mut Faulty::new(vec![], vec![])).unwrap(), 0);
    }
}

/// Goal: if a writer is interrupted, takes little, fails, lies or ends, the count is exactly what it got.
#[test]
fn a_faulty_writer_got_what_is_counted() {
    use Step::{Claim, End, Fail, Short};
    for mode in modes() {
        let (_pager, region) = region(mode);
        let cases: [(Vec<Step>, usize, Option<ErrorKind>); 5] = [
            (vec![Short(1), Fail(ErrorKind::Interrupted), Short(99_999)], 20 * MIB, None),
            (vec![Short(4097), End], 4097, Some(ErrorKind::WriteZero)),
            (vec![Short(5), Fail(ErrorKind::BrokenPipe)], 5, Some(ErrorKind::BrokenPipe)),
            (vec![Fail(ErrorKind::StorageFull)], 0, Some(ErrorKind::StorageFull)),
            (vec![Short(17), Claim], 17, Some(ErrorKind::InvalidData)),
        ];
        for (case, (steps, count, error)) in cases.into_iter().enumerate() {
            let mut writer = Faulty::new(Vec::new(), steps);
            let answer = region.write_to(3..20 * MIB + 3, &mut writer);
            let told = match (&answer, error) {
                (Ok(()), None) => 20 * MIB,
                (Err(failed), Some(kind)) if failed.error.kind() == kind => failed.bytes,
                _ => panic!("{mode:?} case {case}: {answer:?}"),
            };
            assert_eq!(told, count, "{mode:?} case {case}");
            assert!(writer.data[..count] == region[3..count + 3], "{mode:?} case {case}");
        }
    }
}

/// A file without a name.
fn file(name: &str) -> File {
    let path = std::env::temp_dir().join(format!("zfolio-{name}-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

/// Goal: files and sockets work on compressed memory in both modes. Method: bytes go to a file, are changed, and
/// come back; and through a socket, whose other end is another thread with a region.
#[test]
fn files_and_sockets_reach_compressed_memory() {
    for mode in modes() {
        let (pager, mut first) = region(mode);
        let mut file = file("transfer");
        first.write_to(.., &mut file).unwrap();
        assert_eq!(file.stream_position().unwrap(), 32 << 20);
        first.clear(0..32 * MIB);
        file.rewind().unwrap();
        assert_eq!(first.read_from(.., &mut file).unwrap(), 32 * MIB);
        assert!(first[..] == bytes(0, 32 * MIB));
        let mut second = pager.map(32 * MIB + 1).unwrap();
        let (mut one, mut other) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                first.write_to(.., &mut one).unwrap();
                one.shutdown(std::net::Shutdown::Write).unwrap();
            });
            assert_eq!(second.read_from(.., &mut other).unwrap(), 32 * MIB);
        });
        assert!(second[..32 * MIB] == first[..] && second[32 * MIB] == 0);
        assert!(pager.stats().figures.faults_stored > 0, "{mode:?}: nothing was compressed");
    }
}

/// Goal: in handler mode a system call can use compressed memory directly; in inline mode it gets EFAULT, as
/// the documentation says in its first paragraph. Method: `read(2)` and `write(2)` of whole regions.
#[test]
fn system_calls_work_in_handler_mode_only() {
    for mode in modes() {
        let (_pager, mut region) = region(mode);
        let mut file = file("direct");
        let written = file.write_all(&region);
        match mode {
            Mode::Inline => {
                assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EFAULT));
            }
            Mode::Handler => {
                written.unwrap();
                region.fill(9);
                file.rewind().unwrap();
                file.read_exact(&mut region).unwrap();
                assert!(region[..] == bytes(0, 32 * MIB));
            }
        }
    }
}

#[test]
fn ranges_are_those_of_slices() {
    for mode in modes() {
        let (_pager, mut region) = region(mode);
        let mut out = Vec::new();
        region.write_to(..=2, &mut out).unwrap();
        region.write_to(32 * MIB - 1.., &mut out).unwrap();
        region.write_to(5..5, &mut out).unwrap();
        assert_eq!(out.len(), 4);
        for (start, end) in [(32 * MIB, 32 * MIB + 1), (usize::MAX, usize::MAX)] {
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                region.read_from(start..end, &mut io::empty())
            }));
            assert!(refused.is_err(), "{start}..{end}");
        }
    }
}
