//! Records the accesses of a program with lackey, a tool of valgrind that prints a line for each
//! access to memory.
//!
//! # What is kept
//!
//! Loads and stores, not the fetching of instructions: the pager does not manage code. Of each page
//! one access in [`WINDOW`] accesses of the program is kept, and one more if that was a read and a
//! write follows: a policy for pages would see nothing in the others but hits.
//!
//! # Cost
//!
//! The program runs 100 times slower and more, so the recording ends after some seconds.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use zfolio_core::testing::recording::{ACCESSES_MAX, Touch};

use crate::os;

/// A capacity has far more pages than a program can access in this many accesses, in general: so
/// what is left out would have been hits.
const WINDOW: u64 = 256;

/// Accesses are handed over in pieces of this length, and at most so many pieces wait.
const PIECE: usize = 1 << 14;
const PIECES_WAITING: usize = 16;

/// How often a signal is looked for.
const LOOK: Duration = Duration::from_millis(100);

/// What the thread that reads, or the thread that waits, has to say.
enum Message {
    Piece(Vec<Touch>),
    End,
    TimeUp,
}

/// Whether valgrind is there.
pub(crate) fn is_possible() -> bool {
    let version = Command::new("valgrind").arg("--version").stderr(Stdio::null()).output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs a program for `seconds` at most, and returns its accesses. With `quiet` the program's
/// output is dropped; else it goes to standard error. Only the process itself is recorded, no
/// child.
///
/// # Errors
///
/// If valgrind or the program cannot be run.
pub(crate) fn record(
    program: &[OsString],
    seconds: u64,
    quiet: bool,
) -> Result<Vec<Touch>, String> {
    if !is_possible() {
        return Err("recording needs valgrind, which is not installed".to_owned());
    }
    // The shell's standard output is the pipe. The lines of lackey get it as descriptor 9; the
    // program gets another standard output. Nobody debugs: the pipes for that stay in $TMPDIR where
    // valgrind is killed, as it is when the time is up.
    let mut command = Command::new("sh");
    let output = if quiet { "/dev/null 2>&1" } else { "&2" };
    command.arg("-c").arg(format!(
        "exec 9>&1 1>{output}; exec valgrind -q --vgdb=no --tool=lackey --trace-mem=yes --log-fd=9 \
         --child-silent-after-fork=yes \"$@\""
    ));
    command.arg("sh").args(program).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("sh: {error}"))?;
    let touches = receive(&mut child, seconds);
    let status = child.wait().map_err(|error| format!("valgrind: {error}"))?;
    if touches.is_empty() {
        let name = program.first().map(|name| name.to_string_lossy()).unwrap_or_default();
        return Err(format!("{name}: no access was recorded ({status})"));
    }
    Ok(touches)
}

/// Collects the accesses until the program ends, the time is up, or a signal requests a stop; then the program has
/// ended.
fn receive(child: &mut Child, seconds: u64) -> Vec<Touch> {
    let pipe = child.stdout.take().expect("standard output is a pipe");
    let (sender, receiver) = mpsc::sync_channel(PIECES_WAITING);
    let timer = sender.clone();
    // Neither thread is waited for. The reader ends with the pipe, or when nobody receives; a child
    // of the program may keep the pipe open for longer.
    thread::spawn(move || read_lines(pipe, &sender));
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(seconds));
        // Nobody receives any more if the program ended before.
        let _over = timer.send(Message::TimeUp);
    });
    let mut touches = Vec::new();
    while os::stop_signal().is_none() {
        match receiver.recv_timeout(LOOK) {
            Ok(Message::Piece(piece)) => touches.extend(piece),
            Ok(Message::End | Message::TimeUp) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if touches.len() + PIECE > ACCESSES_MAX {
            break;
        }
    }
    // An error means that it has ended.
    let _ended = child.kill();
    touches
}

/// Sends the accesses that are to be kept, in pieces.
fn read_lines(pipe: impl Read, sender: &SyncSender<Message>) {
    let mut pipe = BufReader::with_capacity(1 << 16, pipe);
    let (mut line, mut piece) = (Vec::new(), Vec::new());
    let mut filter = Filter::default();
    loop {
        line.clear();
        let more = pipe.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0);
        for touch in parse(&line).into_iter().flatten().flatten() {
            if filter.keeps(touch) {
                piece.push(touch);
            }
        }
        if piece.len() < PIECE && more {
            continue;
        }
        let sent = sender.send(Message::Piece(std::mem::take(&mut piece)));
        if !more {
            // Nobody receives any more if the time is up.
            let _over = sender.send(Message::End);
        }
        if sent.is_err() || !more {
            return;
        }
    }
}

/// The access of a line like ` S 1fff0006e8,8`, and the access to the next page if it reaches into
/// that. `None` for every other line, such as those of instructions (`I  0401ab70,3`).
fn parse(line: &[u8]) -> Option<[Option<Touch>; 2]> {
    let line = std::str::from_utf8(line).ok()?.trim_end();
    let (kind, place) = line.strip_prefix(' ')?.split_once(' ')?;
    let write = match kind {
        "L" => false,
        // M is a load and a store of the same place.
        "S" | "M" => true,
        _ => return None,
    };
    let (address, bytes) = place.split_once(',')?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let bytes: u64 = bytes.parse().ok().filter(|bytes| (1..=4096).contains(bytes))?;
    let last = address.checked_add(bytes - 1)?;
    let touch = |address: u64| Touch { page: address / 4096, write };
    let second = (last / 4096 > address / 4096).then(|| touch(last));
    Some([Some(touch(address)), second])
}

/// Decides which accesses are kept.
#[derive(Default)]
struct Filter {
    now: u64,
    /// The last access that was kept of each page: when it was, and whether it was a write.
    kept: BTreeMap<u64, (u64, bool)>,
}

impl Filter {
    fn keeps(&mut self, touch: Touch) -> bool {
        self.now += 1;
        let (time, write) = self.kept.entry(touch.page).or_insert((0, false));
        let new = *time == 0 || self.now - *time >= WINDOW || (touch.write && !*write);
        if new {
            (*time, *write) = (self.now, touch.write);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Filter, Message, PIECE, PIECES_WAITING, WINDOW, is_possible, parse, read_lines, record,
    };
    use std::sync::mpsc;
    use zfolio_core::testing::recording::Touch;

    fn touch(page: u64, write: bool) -> Touch {
        Touch { page, write }
    }

    /// Goal: a recording has the accesses of the program and nothing of its output, which looks
    /// like lackey's lines here. A program that does not exist is an error.
    #[test]
    fn a_program_is_recorded() {
        if !is_possible() {
            return eprintln!("SKIPPED: valgrind is not installed");
        }
        let echo = ["echo", " S 7fff7fff7000,8"].map(Into::into);
        let touches = record(&echo, 300, true).unwrap();
        assert!(touches.len() > 10 && touches.iter().any(|touch| touch.write));
        assert!(!touches.iter().any(|touch| touch.page == 0x7_fff7_fff7), "output was recorded");
        assert!(record(&["no-such-program".into()], 300, true).is_err());
    }

    #[test]
    fn lines_of_lackey_are_parsed() {
        let one = |page, write| Some([Some(touch(page, write)), None]);
        assert_eq!(parse(b" L 1fff0006e8,8\n"), one(0x1ff_f000, false));
        assert_eq!(parse(b" S 1000,1\n"), one(1, true));
        assert_eq!(parse(b" M 1fff,1"), one(1, true));
        assert_eq!(parse(b" S 1fff,2\n"), Some([Some(touch(1, true)), Some(touch(2, true))]));
        for line in [
            "",
            "\n",
            "I  0401ab70,3\n",
            "==12== text\n",
            " S 1000\n",
            " S ,8\n",
            " S x,8\n",
            " S 1000,\n",
            " S 1000,0\n",
            " S 1000,9999\n",
            " X 1000,8\n",
            " S ffffffffffffffff,2\n",
            " S 1000,8 more\n",
        ] {
            assert_eq!(parse(line.as_bytes()), None, "{line:?}");
        }
        assert_eq!(parse(b" S \xff\xff,8\n"), None);
    }

    #[test]
    fn one_access_in_a_window_is_kept_and_the_first_write() {
        let mut filter = Filter::default();
        assert!(filter.keeps(touch(1, false)));
        assert!(filter.keeps(touch(2, false)));
        assert!(!filter.keeps(touch(1, false)));
        assert!(filter.keeps(touch(1, true)));
        assert!(!filter.keeps(touch(1, true)));
        (0..WINDOW - 2).for_each(|_| assert!(!filter.keeps(touch(1, false))));
        assert!(filter.keeps(touch(1, false)));
    }

    /// Goal: every access arrives, in order, and the last message is the end. Method: more lines
    /// than a piece has, each of a page of its own, and a last line without an end.
    #[test]
    fn all_pieces_arrive() {
        let pages = PIECE as u64 * 2 + 10;
        let lines: String = (0..pages).map(|page| format!(" S {:x},8\n", page * 4096)).collect();
        let (sender, receiver) = mpsc::sync_channel(PIECES_WAITING);
        read_lines(lines.trim_end().as_bytes(), &sender);
        drop(sender);
        let messages: Vec<Message> = receiver.into_iter().collect();
        assert!(matches!(messages.last(), Some(Message::End)));
        let pieces = messages.into_iter().filter_map(|message| match message {
            Message::Piece(piece) => Some(piece),
            _ => None,
        });
        let found: Vec<u64> = pieces.flatten().map(|touch| touch.page).collect();
        assert_eq!(found, (0..pages).collect::<Vec<_>>());
    }
}
