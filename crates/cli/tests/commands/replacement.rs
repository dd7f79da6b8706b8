//! `zfolio bench replacement`, as far as it is more than counting.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use crate::stage::{kill, scratch, zfolio};

/// Goal: a signal in the middle of a recording ends the command with its number, and the folder for temporary files
/// goes. It stayed, since the signal killed the command.
#[test]
fn a_signal_removes_the_temporary_folder() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: valgrind is not installed");
    }
    for (signal, status) in [("TERM", 143), ("INT", 130)] {
        let folder = scratch("recordings");
        let mut bench = zfolio(&["bench", "replacement"]);
        bench.env("TMPDIR", &folder).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut bench = bench.spawn().expect("it can be executed");
        let mut told =
            BufReader::new(bench.stderr.take().expect("piped")).lines().map_while(Result::ok);
        assert!(told.any(|line| line.starts_with("zfolio: recording ")), "something is recorded");
        assert_eq!(fs::read_dir(&folder).expect("it is ours").count(), 1);
        kill(signal, bench.id().into());
        assert_eq!(told.last().as_deref(), Some("zfolio: interrupted; everything was put back"));
        assert_eq!(bench.wait().expect("it ends").code(), Some(status));
        assert_eq!(fs::read_dir(&folder).expect("it is ours").count(), 0);
    }
}
