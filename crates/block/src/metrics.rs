//! Figures for Prometheus: one page of text over HTTP.
//!
//! The format is that of <https://prometheus.io/docs/instrumenting/exposition_formats/>, names follow
//! <https://prometheus.io/docs/practices/naming/>: base units, `_total` for what only grows. Whoever connects gets the
//! page; the address is this machine's.
//!
//! # Concurrency
//!
//! One thread serves one connection after the other; a client that is slow is left after two seconds.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::nbd::Counts;
use crate::ram::Ram;

/// The longest request that is read.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// A client that sends or receives nothing for so long is left.
const PATIENCE: Duration = Duration::from_secs(2);

/// What makes the page.
pub type Page = Box<dyn Fn() -> String + Send>;

/// A page that is served. Dropping it ends that.
#[derive(Debug)]
pub struct Metrics {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Serves what `page` returns at an address of this machine.
    ///
    /// # Errors
    ///
    /// `PermissionDenied`: the address is not this machine's alone. Others: the system's.
    pub fn start(address: SocketAddr, page: Page) -> io::Result<Metrics> {
        if !address.ip().is_loopback() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let listener = TcpListener::bind(address)?;
        let (address, ends) = (listener.local_addr()?, Arc::new(AtomicBool::new(false)));
        let for_thread = Arc::clone(&ends);
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        let thread = thread.spawn(move || {
            for stream in listener.incoming() {
                if for_thread.load(Relaxed) {
                    return;
                }
                match stream {
                    // A client that is gone gets no page.
                    Ok(stream) => _ = answer(stream, &page).ok(),
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            }
        })?;
        Ok(Metrics { address, ends, thread: Some(thread) })
    }

    /// Where it is served, with the port that the system chose for port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
        // The thread waits for a connection.
        TcpStream::connect(self.address).ok();
        self.thread.take().into_iter().for_each(|thread| _ = thread.join().ok());
    }
}

/// Reads a request, and answers it.
fn answer(mut stream: TcpStream, page: &Page) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (mut request, mut length) = (vec![0; REQUEST_BYTES_MAX], 0);
    while length < request.len() && !request[..length].windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut request[length..])? {
            0 => break,
            bytes => length += bytes,
        }
    }
    let line = request[..length].split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let mut words = line.split(|byte| *byte == b' ');
    let (method, path) = (words.next().unwrap_or(&[]), words.next().unwrap_or(&[]));
    let path = path.split(|byte| *byte == b'?').next().unwrap_or(&[]);
    let (status, body) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => ("200 OK", page()),
        (b"GET" | b"HEAD", _) => ("404 Not Found", "accepted: /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "accepted: GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    if method != b"HEAD" {
        stream.write_all(body.as_bytes())?;
    }
    Ok(())
}

/// A page that is being written.
struct Text<'a> {
    /// The disk's. It has no character that would have to be escaped.
    name: &'a str,
    text: String,
}

impl Text<'_> {
    /// Adds a metric, with the labels and the value of each of its samples.
    fn metric(&mut self, name: &str, kind: &str, meaning: &str, samples: &[(&str, u64)]) {
        let (text, disk, full) = (&mut self.text, self.name, format!("zfolio_device_{name}"));
        writeln!(text, "# HELP {full} {meaning}").expect("a string takes everything");
        writeln!(text, "# TYPE {full} {kind}").expect("a string takes everything");
        for (labels, value) in samples {
            writeln!(text, "{full}{{device=\"{disk}\"{labels}}} {value}")
                .expect("a string takes everything");
        }
    }

    fn gauge(&mut self, name: &str, meaning: &str, samples: &[(&str, u64)]) {
        self.metric(name, "gauge", meaning, samples);
    }

    fn counter(&mut self, name: &str, meaning: &str, samples: &[(&str, u64)]) {
        self.metric(&format!("{name}_total"), "counter", meaning, samples);
    }

    /// What the disk has, and what that takes.
    fn contents(&mut self, ram: &Ram) {
        let mm = ram.zram().mm_stat();
        self.gauge("size_bytes", "Size of the disk.", &[("", ram.zram().disk_bytes())]);
        let stored = [
            (",state=\"original\"", mm.orig_data_size),
            (",state=\"compressed\"", mm.compr_data_size),
        ];
        self.gauge("stored_bytes", "Units that are stored, before and after compression.", &stored);
        self.gauge(
            "memory_bytes",
            "Memory that the disk takes, tables included.",
            &[("", mm.mem_used_total)],
        );
        self.gauge("memory_max_bytes", "The most of it.", &[("", mm.mem_used_max)]);
        self.gauge("memory_limit_bytes", "Its limit; 0: none.", &[("", mm.mem_limit)]);
        let units =
            [(",kind=\"same_filled\"", mm.same_pages), (",kind=\"incompressible\"", mm.huge_pages)];
        self.gauge(
            "units",
            "Stored units that are one machine word, and units that do not shrink.",
            &units,
        );
    }

    /// What was done.
    fn events(&mut self, ram: &Ram) {
        let (mm, io, policy) = (ram.zram().mm_stat(), ram.zram().io_stat(), ram.policy_stat());
        self.counter(
            "compacted_pages",
            "Pages that compaction has freed.",
            &[("", mm.pages_compacted)],
        );
        let failed = [
            (",kind=\"read\"", io.failed_reads),
            (",kind=\"write\"", io.failed_writes),
            (",kind=\"invalid\"", io.invalid_io),
        ];
        self.counter(
            "failed_requests",
            "Requests that failed, and requests that were refused.",
            &failed,
        );
        self.counter("discards", "Discards and zeroed ranges.", &[("", io.notify_free)]);
        let tried = [(",outcome=\"tried\"", policy.tried), (",outcome=\"shrank\"", policy.shrank)];
        self.counter(
            "recompressed_units",
            "Units recompressed without request, and those that shrank.",
            &tried,
        );
        self.counter(
            "recompression_saved_bytes",
            "Bytes that this saved.",
            &[("", policy.bytes_saved)],
        );
    }
}

impl Text<'_> {
    /// What was written back.
    fn writeback(&mut self, ram: &Ram) {
        const PAGE_BYTES: u64 = 4096;
        let (bd, done) = (ram.zram().bd_stat(), ram.zram().writeback_stat());
        self.gauge(
            "backing_bytes",
            "Bytes in use where units are written back to (bd_count).",
            &[("", bd.bd_count * PAGE_BYTES)],
        );
        self.counter(
            "backing_read_bytes",
            "Bytes that were read there (bd_reads).",
            &[("", bd.bd_reads * PAGE_BYTES)],
        );
        self.counter(
            "backing_written_bytes",
            "Bytes that were written there (bd_writes).",
            &[("", bd.bd_writes * PAGE_BYTES)],
        );
        let units = [
            (",reason=\"asked\"", done.asked_units),
            (",reason=\"old\"", done.old_units),
            (",reason=\"room\"", done.room_units),
        ];
        self.counter("written_back_units", "Units that were written back, and why.", &units);
        self.counter(
            "failed_writebacks",
            "Writes that were refused or failed, or whose unit was used meanwhile.",
            &[("", done.not_written)],
        );
        self.counter(
            "write_budget_used_up",
            "How often the budget for writes was used up.",
            &[("", done.budget_used_up)],
        );
    }
}

/// The page of a disk that a server serves.
#[must_use]
pub fn of_disk(name: &str, ram: &Ram, server: Counts) -> String {
    let mut page = Text { name, text: String::new() };
    let algorithm = ram.zram().codecs().next().map_or("?", |codec| codec.name());
    let (unit, version) = (ram.zram().unit(), env!("CARGO_PKG_VERSION"));
    let info = format!(",algorithm=\"{algorithm}\",unit=\"{unit}\",version=\"{version}\"");
    page.gauge("info", "What the disk is made of.", &[(&info, 1)]);
    page.contents(ram);
    page.events(ram);
    page.writeback(ram);
    page.gauge("connections", "Clients that are connected.", &[("", server.live)]);
    page.counter(
        "accepted_connections",
        "Connections that were accepted.",
        &[("", server.accepted)],
    );
    page.text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::{Metrics, of_disk};
    use crate::device::Device as _;
    use crate::nbd::Counts;
    use crate::testing::ram;

    /// Goal: the page is what Prometheus reads: each metric once, with its meaning and kind before its values, names of
    /// the allowed letters, counters that end in `_total`.
    #[test]
    fn the_page_is_what_prometheus_reads() {
        let ram = ram(1 << 20, &["lz4", "zstd"]);
        ram.write(0, &vec![7; 8192]).unwrap();
        let page = of_disk("cache", &ram, Counts::default());
        let (mut seen, mut kind) = (BTreeSet::new(), "");
        for line in page.lines() {
            let mut words = line.split(' ');
            match (words.next(), words.next()) {
                (Some("#"), Some("HELP")) => {
                    let name = words.next().unwrap();
                    assert!(seen.insert(name.to_owned()), "{name} twice");
                    assert!(
                        name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                        "{name}"
                    );
                    assert!(words.next().is_some(), "{name} has a meaning");
                }
                (Some("#"), Some("TYPE")) => {
                    let name = words.next().unwrap();
                    kind = words.next().unwrap();
                    assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
                }
                (Some(sample), Some(value)) => {
                    let (name, labels) = sample.split_once('{').unwrap();
                    assert!(seen.contains(name) && !kind.is_empty(), "{line}");
                    assert!(
                        labels.starts_with("device=\"cache\"") && labels.ends_with('}'),
                        "{line}"
                    );
                    assert!(value.parse::<u64>().is_ok(), "{line}");
                }
                _ => panic!("{line}"),
            }
        }
        assert!(
            page.contains("zfolio_device_units{device=\"cache\",kind=\"same_filled\"} 2\n"),
            "{page}"
        );
        assert!(
            page.contains("zfolio_device_stored_bytes{device=\"cache\",state=\"original\"} 8192\n")
        );
    }

    fn get(metrics: &Metrics, request: &str) -> String {
        let mut stream = TcpStream::connect(metrics.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    /// Goal: only GET and HEAD of the page are answered with it, odd requests end their connection alone, and no other
    /// machine is served.
    #[test]
    fn requests_are_answered() {
        let refused = Metrics::start("0.0.0.0:0".parse().unwrap(), Box::new(String::new));
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        let page = || Box::new(|| "a 1\n".to_owned());
        let metrics = Metrics::start("127.0.0.1:0".parse().unwrap(), page()).unwrap();
        let good = get(&metrics, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            good.starts_with("HTTP/1.1 200 OK\r\n") && good.ends_with("\r\n\r\na 1\n"),
            "{good}"
        );
        assert!(good.contains("Content-Length: 4\r\n"));
        let head = get(&metrics, "HEAD / HTTP/1.0\r\n\r\n");
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(get(&metrics, "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(get(&metrics, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(get(&metrics, "\r\n\r\n").starts_with("HTTP/1.1 405 "));
        // Longer than any request that is read: the rest is not waited for.
        let mut long = TcpStream::connect(metrics.address()).unwrap();
        long.write_all(&vec![b'x'; 100_000]).ok();
        drop(long);
        assert!(get(&metrics, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        let second = Metrics::start(metrics.address(), page());
        assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    }
}
