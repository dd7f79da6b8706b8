//! The terminal as a screen that is drawn repeatedly, and restored at the end.
//!
//! A key counts as soon as it is pressed, and is not shown. Ctrl-C and Ctrl-Z are still signals.
//! They are reported as [`Wake`]s, so that the terminal can be restored first.
//!
//! # Invariants
//!
//! - `TERM-1` What [`Screen::open`] changed is put back by `Drop`: the terminal's settings, its
//!   ordinary contents, the cursor, and the signal mask.
//! - `TERM-2` The caller has one thread: a signal that is blocked here cannot reach another thread.

use std::io::{self, IsTerminal};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};

use crate::probe::child;

/// Switches to the terminal's second screen, and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Switches back to the first screen.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The assumed size of a terminal that does not report its own.
const SIZE_UNKNOWN: (usize, usize) = (80, 24);

/// The character of Ctrl-C, where the terminal sends it as a character.
const CONTROL_C: u8 = 3;
const ESCAPE: u8 = 27;

/// Why a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// The time has passed.
    Time,
    /// The window has changed its size, or a key without a meaning was pressed.
    Draw,
    /// `q`, or the keyboard has been closed.
    Quit,
    /// A signal that should end the process.
    Ended(i32),
}

/// A terminal that is used as a screen.
#[derive(Debug)]
pub struct Screen {
    signals: OwnedFd,
    mask_before: Mask,
    /// The original settings of standard input; `None` if it is not a terminal.
    keys_before: Option<Termios>,
}

struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mask")
    }
}

/// The signals on which the terminal must be restored first.
const TAKEN: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGTSTP, libc::SIGWINCH];

/// Whether standard output is a terminal that can be drawn on.
#[must_use]
pub fn is_screen() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|name| name.is_empty() || name == "dumb");
    io::stdout().is_terminal() && !dumb
}

/// Columns and lines of the terminal on standard output.
#[must_use]
pub fn size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            (usize::from(size.ws_col), usize::from(size.ws_row))
        }
        _ => SIZE_UNKNOWN,
    }
}

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    ///
    /// The kernel's error; nothing is changed then.
    pub fn open() -> io::Result<Screen> {
        let taken = set_of(&TAKEN);
        let mut before = taken;
        // SAFETY: the set is valid, and the kernel makes a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, &raw const taken, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it, and no other code has it.
        let signals = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: both sets are valid, ours, and outlive the call; it fails only for a bad `how`.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const taken, &raw mut before) };
        let input = io::stdin();
        let keys_before = input.is_terminal().then(|| rustix::termios::tcgetattr(&input).ok());
        let screen =
            Screen { signals, mask_before: Mask(before), keys_before: keys_before.flatten() };
        screen.enter();
        Ok(screen)
    }

    /// Shows `lines` from the top, over what was shown before.
    ///
    /// The caller must make them fit: see [`size`].
    ///
    /// # Errors
    ///
    /// If standard output cannot be written.
    pub fn draw(&self, lines: &[String]) -> io::Result<bool> {
        // Each line clears the rest of an older line, so that nothing flickers. `\n` also returns
        // to the first column, since the terminal's output settings are unchanged.
        let text = lines.join("\x1b[K\n");
        crate::files::print(&format!("\x1b[H{text}\x1b[K\x1b[J"))
    }

    /// Waits for `time`, a key or a signal.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn wait(&self, time: Duration) -> io::Result<Wake> {
        let input = io::stdin();
        let mut waits = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if self.keys_before.is_some() {
            waits.push(PollFd::new(&input, PollFlags::IN));
        }
        let time = Timespec::try_from(time).map_err(io::Error::other)?;
        match rustix::event::poll(&mut waits, Some(&time)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Wake::Draw),
            Err(error) => return Err(error.into()),
        }
        let ready = |index: usize| waits.get(index).is_some_and(|wait| !wait.revents().is_empty());
        let (signal, key) = (ready(0), ready(1));
        if signal {
            return Ok(self.take_signal());
        }
        Ok(if key { read_keys(input.as_fd()) } else { Wake::Time })
    }

    fn take_signal(&self) -> Wake {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let bytes = size_of::<libc::signalfd_siginfo>();
        let fd = self.signals.as_raw_fd();
        // SAFETY: `info` has room for the `bytes` that the kernel writes at most.
        let read = unsafe { libc::read(fd, info.as_mut_ptr().cast(), bytes) };
        if usize::try_from(read) != Ok(bytes) {
            return Wake::Draw;
        }
        // SAFETY: the kernel wrote all of it (above).
        let number = unsafe { info.assume_init() }.ssi_signo;
        match i32::try_from(number).unwrap_or(0) {
            libc::SIGWINCH => Wake::Draw,
            libc::SIGTSTP => {
                self.leave();
                child::stop_here();
                self.enter();
                Wake::Draw
            }
            number => Wake::Ended(number),
        }
    }

    fn enter(&self) {
        if let Some(before) = &self.keys_before {
            let mut settings = before.clone();
            settings.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            settings.special_codes[SpecialCodeIndex::VMIN] = 1;
            settings.special_codes[SpecialCodeIndex::VTIME] = 0;
            // If this fails, keys only need Enter.
            rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &settings).ok();
        }
        crate::files::print(ENTER).ok();
    }

    fn leave(&self) {
        crate::files::print(LEAVE).ok();
        let Some(before) = &self.keys_before else { return };
        // In the background the terminal belongs to another process, and changing it would stop
        // this one.
        if rustix::termios::tcgetpgrp(io::stdin()) == Ok(rustix::process::getpgrp()) {
            // Characters that were typed and not read stay for the next reader.
            rustix::termios::tcsetattr(io::stdin(), OptionalActions::Drain, before).ok();
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.leave();
        let before = &raw const self.mask_before.0;
        // SAFETY: the kernel returned this mask before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

/// The meaning of the keys that were pressed.
fn read_keys(input: BorrowedFd<'_>) -> Wake {
    let mut keys = [0_u8; 64];
    match rustix::io::read(input, &mut keys) {
        Ok(length) if length > 0 => {
            if quits(&keys[..length]) {
                Wake::Quit
            } else {
                Wake::Draw
            }
        }
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Wake::Draw,
        Ok(_) | Err(_) => Wake::Quit,
    }
}

/// Whether one of `keys` means quit. Arrow keys and the like send sequences (`ESC [ 1 ; 5 q`, `ESC
/// O q`), whose letters are not keys.
fn quits(keys: &[u8]) -> bool {
    let mut keys = keys.iter().copied().peekable();
    while let Some(key) = keys.next() {
        match key {
            b'q' | b'Q' | CONTROL_C => return true,
            ESCAPE => match keys.next_if(|next| matches!(next, b'[' | b'O')) {
                Some(b'[') => {
                    while keys.next().is_some_and(|next| !(0x40..=0x7e).contains(&next)) {}
                }
                Some(_) => drop(keys.next()),
                None => {}
            },
            _ => {}
        }
    }
    false
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` writes the whole set that it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: written whole above.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: `set` is a valid set of ours, and `signal` a signal's number.
        unsafe { libc::sigaddset(&raw mut set, *signal) };
    }
    set
}

#[cfg(test)]
mod tests {
    use super::quits;

    #[test]
    fn only_the_key_itself_quits() {
        for keys in
            [&b"q"[..], b"Q", b"xq", b"\x03", b"\x1b[Bq", b"\x1b[1;5Aq", b"\x1bOAq", b"\x1bq"]
        {
            assert!(quits(keys), "{keys:?}");
        }
        for keys in
            [&b"x"[..], b"\x1b[q", b"\x1b[1;5q", b"\x1bOq", b"\x1b", b"\x1b[", b"\x1bO", b""]
        {
            assert!(!quits(keys), "{keys:?}");
        }
    }
}
