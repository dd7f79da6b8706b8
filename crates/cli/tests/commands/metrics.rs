//! `--metrics` of runs and disks: figures for Prometheus over HTTP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::disk::Disk;
use crate::run::{first_line, works};
use crate::stage::{free_address, output_of, scratch, zfolio};

fn page_at(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("it reads");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("it answers");
    let (head, page) = reply.split_once("\r\n\r\n").expect("a head and a page");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    page.to_owned()
}

/// Goal: the figures of a run can be read while it runs, and Prometheus's own checker accepts them.
#[test]
fn a_run_serves_its_figures_while_it_runs() {
    if !works() {
        return;
    }
    let arguments =
        ["run", "-l", "256M", "--metrics", "localhost:0", "--", "sh", "-c", "echo $$; read line"];
    let mut run = zfolio(&arguments).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(run.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("zfolio: figures for Prometheus at http://");
    let address = address.and_then(|rest| rest.strip_suffix("/metrics")).expect(&line).to_owned();
    first_line(&mut run);
    let page = page_at(&address);
    assert!(page.contains("\nzfolio_run_limit_bytes 268435456\n"), "{page}");
    assert!(page.contains("\nzfolio_run_processes{command=\"sh\"} 1\n"), "{page}");
    let report = scratch("refused-figures").join("report.json");
    std::fs::write(&report, "earlier").unwrap();
    let stats = ["--stats", report.to_str().unwrap()];
    let taken = ["run", "--metrics", &address, stats[0], stats[1], "--", "echo", "never"];
    let taken = output_of(&taken);
    assert_eq!(
        (taken.0, taken.1.as_str(), taken.2.lines().count()),
        (Some(125), "", 1),
        "{}",
        taken.2
    );
    assert_eq!(std::fs::read_to_string(&report).unwrap(), "earlier", "a refused run keeps them");
    drop(run.stdin.take());
    // Its reader of standard error is gone, which changes nothing.
    run.wait().unwrap();
    assert!(TcpStream::connect(&address).is_err(), "it ends with the run");
    check(&page);
}

/// Goal: a port that the system has chosen is told even with `--quiet`, one that the user has chosen is not.
#[test]
fn a_chosen_port_is_told_to_who_wants_quiet() {
    if !works() {
        return;
    }
    let err_of = |address: &str| {
        let run = ["run", "-q", "-l", "256M", "--metrics", address, "--", "sh", "-c", "exit 7"];
        let (code, _, err) = output_of(&run);
        assert_eq!(code, Some(7), "{err}");
        err
    };
    let err = err_of("localhost:0");
    assert!(err.starts_with("zfolio: figures for Prometheus at http://127.0.0.1:"), "{err}");
    assert_eq!((err.lines().count(), err_of(&free_address().to_string())), (1, String::new()));
}

/// Goal: the same for a disk.
#[test]
fn a_disk_serves_its_figures() {
    let address = free_address().to_string();
    let disk = Disk::start("figures", &["--size", "8M", "--metrics", &address]);
    disk.client().write(4096, &[7; 512]).unwrap();
    let page = page_at(&address);
    let label = format!("device=\"{}\"", disk.name);
    let line = format!("zfolio_device_request_bytes_total{{{label},op=\"write\"}} 512\n");
    assert!(page.contains(&line), "no '{line}' in: {page}");
    check(&page);
}

/// Has `promtool` check a page.
fn check(page: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let promtool = promtool.spawn();
    let Ok(mut promtool) = promtool else {
        return eprintln!("SKIPPED: promtool (package prometheus) is not installed");
    };
    promtool.stdin.take().expect("piped").write_all(page.as_bytes()).expect("it reads");
    let output = promtool.wait_with_output().expect("our child");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Goal: only this machine is served, and what is wrong is told in one line before the program starts.
#[test]
fn other_addresses_are_refused() {
    for wrong in ["0.0.0.0:9100", "localhost", "9100", "example.org:80"] {
        let (code, out, err) = output_of(&["run", "--metrics", wrong, "--", "echo", "never"]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.contains("accepted: localhost:PORT"), "{err}");
    }
}
