//! Drawing on a terminal by `zfolio stat --watch` and `zfolio run --progress`: a pseudo terminal,
//! with this test at its other end.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use crate::run::works;
use crate::stage::{kill, wait_for, zfolio};
use crate::stat::Waiting;

/// A pseudo terminal, and a program that uses it.
struct Terminal {
    /// The test's side: writing to it is typing.
    keys: File,
    /// The program's side, kept open so that its settings can be read after the program's end.
    side: OwnedFd,
    before: libc::termios,
    child: Child,
    written: Receiver<Vec<u8>>,
    text: String,
}

fn settings(of: &OwnedFd) -> libc::termios {
    // SAFETY: a `termios` is integers: zeroes are a valid one.
    let mut settings = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `termios`, which outlives the call.
    let result = unsafe { libc::tcgetattr(of.as_raw_fd(), &raw mut settings) };
    assert_eq!(result, 0, "it is a terminal");
    settings
}

fn window(columns: u16, rows: u16) -> libc::winsize {
    libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Starts a session whose terminal is standard input, so that Ctrl-C reaches the program.
fn take_terminal() -> std::io::Result<()> {
    // SAFETY: the function has no argument.
    let session = unsafe { libc::setsid() };
    // SAFETY: a descriptor and two numbers.
    let taken = unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) };
    if session < 0 || taken < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

impl Terminal {
    fn start(arguments: &[&str], columns: u16, rows: u16) -> Terminal {
        let (mut keys, mut side) = (0, 0);
        let size = window(columns, rows);
        let none = std::ptr::null_mut();
        // SAFETY: the two descriptors are written, the size is read; no name and settings are asked.
        let result = unsafe {
            libc::openpty(&raw mut keys, &raw mut side, none, std::ptr::null(), &raw const size)
        };
        assert_eq!(result, 0, "there are pseudo terminals");
        // SAFETY: openpty has just opened it, and no other code has it.
        let keys = unsafe { File::from_raw_fd(keys) };
        // SAFETY: as above.
        let side = unsafe { OwnedFd::from_raw_fd(side) };
        let before = settings(&side);
        let ours = || Stdio::from(side.try_clone().expect("a descriptor is left"));
        let mut command = zfolio(arguments);
        command.env("TERM", "xterm").stdin(ours()).stdout(ours()).stderr(ours());
        // SAFETY: between fork and exec only the two system calls of `take_terminal` are made.
        unsafe { command.pre_exec(take_terminal) };
        let child = command.spawn().expect("it was built");
        let mut screen = keys.try_clone().expect("a descriptor is left");
        let (send, written) = mpsc::channel();
        // The thread ends with the test: reading fails once the other side is closed.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                if send.send(bytes[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Terminal { keys, side, before, child, written, text: String::new() }
    }

    /// Reads until `part` has been printed.
    fn expect(&mut self, part: &str) {
        // A bound: a program that draws all the time is never silent.
        for _ in 0..2000 {
            if self.text.contains(part) {
                return;
            }
            let more = self.written.recv_timeout(Duration::from_secs(20));
            let more = more.unwrap_or_else(|_| panic!("no {part:?} in {:?}", self.text));
            self.text.push_str(&String::from_utf8_lossy(&more));
        }
        panic!("no {part:?} in {:?}", self.text);
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).expect("the terminal is there");
    }

    /// Waits for the program's end, and checks that the terminal is restored.
    fn end(mut self) -> ExitStatus {
        self.expect("\x1b[?1049l");
        assert!(self.text.contains("\x1b[?25h"), "the cursor is back");
        let status = self.child.wait().expect("our child");
        let after = settings(&self.side);
        assert_eq!(after.c_lflag, self.before.c_lflag);
        assert_eq!(after.c_iflag, self.before.c_iflag);
        assert_eq!(after.c_oflag, self.before.c_oflag);
        assert_eq!(after.c_cc, self.before.c_cc);
        status
    }

    /// Waits for a whole screen, and drops all output up to its end.
    fn next_screen(&mut self) -> Vec<String> {
        const END: &str = "\x1b[J";
        loop {
            if let Some(screen) = self.screens().into_iter().next() {
                let start = self.text.find("\x1b[H").expect("a screen begins so");
                let end = self.text[start..].find(END).expect("and ends so");
                self.text.drain(..start + end + END.len());
                return screen;
            }
            let more = self.written.recv_timeout(Duration::from_secs(20));
            let more = more.unwrap_or_else(|_| panic!("no screen in {:?}", self.text));
            self.text.push_str(&String::from_utf8_lossy(&more));
        }
    }

    /// The screens that were drawn: each from its first line to the sequence that clears the rest.
    fn screens(&self) -> Vec<Vec<String>> {
        let drawn = self.text.split("\x1b[H").skip(1);
        drawn
            .filter_map(|screen| screen.split_once("\x1b[J"))
            .map(|(lines, _)| lines.split("\r\n").map(|line| line.replace("\x1b[K", "")).collect())
            .collect()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The program has ended already, unless the test failed.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn assert_fits(screens: &[Vec<String>], columns: usize, rows: usize) {
    assert!(!screens.is_empty());
    for screen in screens {
        assert!(screen.len() <= rows, "{screen:#?}");
        for line in screen {
            assert!(line.chars().count() <= columns, "{columns} columns: {line:?}");
            assert!(!line.contains('\x1b'), "{line:?}");
        }
    }
}

#[test]
fn the_screen_fits_its_window_and_q_gives_the_terminal_back() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    for (columns, rows) in [(80, 24), (40, 10), (20, 3)] {
        let mut terminal = Terminal::start(&["stat", "--watch", "0.05"], columns, rows);
        terminal.expect(" process");
        terminal.expect("\x1b[J");
        terminal.text.clear();
        // Three more drawings.
        for _ in 0..3 {
            terminal.expect("\x1b[J");
            assert_fits(&terminal.screens(), columns.into(), rows.into());
            if rows > 3 {
                let shown = terminal.screens().iter().flatten().any(|line| {
                    line.split_whitespace().next() == Some(waiting.pid.as_str())
                        || line.contains("more lines")
                });
                assert!(shown, "{}", terminal.text);
            }
            terminal.text.clear();
        }
        terminal.press(b"\x1b[B");
        terminal.press(b"q");
        assert_eq!(terminal.end().code(), Some(0));
    }
}

#[test]
fn another_size_of_the_window_is_seen_at_once() {
    if !works() {
        return;
    }
    let _waiting = Waiting::start();
    // The interval is a minute: an earlier drawing is for the change of the window.
    let mut terminal = Terminal::start(&["stat", "--watch", "60"], 80, 24);
    terminal.next_screen();
    let size = window(50, 7);
    // SAFETY: the kernel reads one `winsize`.
    let result =
        unsafe { libc::ioctl(terminal.side.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(result, 0);
    let mut screen = terminal.next_screen();
    // The drawing after a quarter of a second may still be for the old window.
    if screen.iter().any(|line| line.chars().count() > 50) {
        screen = terminal.next_screen();
    }
    assert_fits(&[screen], 50, 7);
    terminal.press(b"q");
    assert_eq!(terminal.end().code(), Some(0));
}

#[test]
fn a_signal_ends_it_and_gives_the_terminal_back() {
    if !works() {
        return;
    }
    let mut terminal = Terminal::start(&["stat", "--watch"], 80, 24);
    terminal.expect("q ends");
    terminal.press(&[3]);
    assert_eq!(terminal.end().signal(), Some(libc::SIGINT));

    let mut terminal = Terminal::start(&["stat", "--watch"], 80, 24);
    terminal.expect("q ends");
    kill("TERM", terminal.child.id().into());
    assert_eq!(terminal.end().signal(), Some(libc::SIGTERM));
}

#[test]
fn a_process_that_is_watched_is_shown_and_its_end_ends_the_watch() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    let mut terminal = Terminal::start(&["stat", &waiting.pid, "--watch", "0.05"], 80, 24);
    terminal.expect("limit_bytes");
    terminal.expect("A SECOND");
    terminal.expect("\x1b[J");
    assert_fits(&terminal.screens(), 80, 24);
    drop(waiting);
    assert_eq!(terminal.end().code(), Some(0));
}

#[test]
fn a_process_that_ended_is_gone_from_the_screen() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    let mut terminal = Terminal::start(&["stat", "--watch", "0.05"], 80, 60);
    let pid = waiting.pid.clone();
    let listed = |terminal: &Terminal| {
        let screens = terminal.screens();
        let is_it = |line: &String| line.split_whitespace().next() == Some(pid.as_str());
        screens.last().is_some_and(|screen| screen.iter().any(is_it))
    };
    wait_for("the process to be shown", || {
        terminal.text.clear();
        terminal.expect("\x1b[J");
        listed(&terminal)
    });
    drop(waiting);
    wait_for("the process to be gone", || {
        terminal.text.clear();
        terminal.expect("\x1b[J");
        !listed(&terminal)
    });
    terminal.press(b"q");
    assert_eq!(terminal.end().code(), Some(0));
}

#[test]
fn on_a_pipe_it_is_plain_tables() {
    if !works() {
        return;
    }
    let waiting = Waiting::start();
    let mut watch = zfolio(&["stat", "--watch", "0.01"]).spawn().unwrap();
    let mut out = watch.stdout.take().expect("piped");
    let mut text = String::new();
    while text.matches("RESIDENT").count() < 3 {
        let mut bytes = [0; 1024];
        let length = out.read(&mut bytes).unwrap();
        assert!(length > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&bytes[..length]));
    }
    drop(out);
    assert!(watch.wait().unwrap().success(), "nobody reads any more");
    assert!(text.contains(&waiting.pid) && !text.contains('\x1b'), "{text}");
}

/// Erases a line of progress.
const CLEAR: &str = "\r\x1b[K";

/// Goal: on a terminal `zfolio run --progress` keeps a single line, and erases it at the end.
#[test]
fn progress_is_one_line_of_a_terminal_and_gone_at_the_end() {
    if !works() {
        return;
    }
    let script = "read line; exit 4";
    let arguments = ["run", "--progress", "-l", "256M", "--", "sh", "-c", script];
    let mut terminal = Terminal::start(&arguments, 80, 24);
    for seconds in 1..3 {
        terminal.expect(&format!("{CLEAR}zfolio: {seconds}s sh: "));
    }
    terminal.press(b"\n");
    // The summary takes the place of the line of progress.
    terminal.expect(&format!("{CLEAR}zfolio: sh stayed below"));
    assert_eq!(terminal.child.wait().unwrap().code(), Some(4));
    let lines = terminal.text.split(CLEAR).filter(|text| text.contains("s sh: "));
    for line in lines {
        assert!(!line.trim_end_matches("\r\n").contains('\n'), "not one line: {line:?}");
        assert!(line.contains(" of 256M"), "{line:?}");
    }
}

/// Goal: without a terminal lines are whole, and nothing is erased.
#[test]
fn progress_is_lines_of_a_file() {
    if !works() {
        return;
    }
    let arguments = ["run", "--progress", "-l", "256M", "--", "sh", "-c", "read line"];
    let mut run = zfolio(&arguments).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stderr.take().expect("piped")).lines();
    let first = lines.next().expect("a line comes within the first seconds").unwrap();
    assert!(first.starts_with("zfolio: ") && first.contains("s sh: "), "{first}");
    drop(run.stdin.take());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(run.wait().unwrap().code().is_some());
    assert!(rest.iter().all(|line| !line.contains('\x1b')) && !rest.is_empty(), "{rest:?}");
}
