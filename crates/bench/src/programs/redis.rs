//! The client of the redis workload: it fills the server over its socket, reads, and shuts it down.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use zfolio_core::testing::Random;

use super::digest::Digest;
use super::generate;

/// How many commands are sent before their answers are read.
const BATCH: usize = 64;

/// Writes a command: an array of strings.
fn command(words: &[&[u8]], out: &mut Vec<u8>) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

/// Reads an answer: a line, or a string; an error of the server is an error.
fn answer(from: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let line = line.trim_end();
    let broken = |line: &str| io::Error::other(format!("redis-server answered '{line}'"));
    match line.split_at_checked(1) {
        Some(("+" | ":", rest)) => Ok(rest.as_bytes().to_vec()),
        Some(("$", rest)) => {
            // A missing key has the length -1: every key that is read was written.
            let length: usize = rest.parse().map_err(|_| broken(line))?;
            let mut value = vec![0; length + 2];
            from.read_exact(&mut value)?;
            value.truncate(length);
            Ok(value)
        }
        _ => Err(broken(line)),
    }
}

struct Client {
    socket: UnixStream,
    answers: BufReader<UnixStream>,
    batch: Vec<u8>,
    digest: Digest,
}

impl Client {
    /// Sends `commands` in batches; each answer enters the digest.
    fn send(&mut self, count: usize, each: impl Fn(usize, &mut Vec<u8>)) -> io::Result<()> {
        for first in (0..count).step_by(BATCH) {
            self.batch.clear();
            let batch = first..(first + BATCH).min(count);
            batch.clone().for_each(|nth| each(nth, &mut self.batch));
            self.socket.write_all(&self.batch)?;
            for _ in batch {
                self.digest.add(&answer(&mut self.answers)?);
            }
        }
        Ok(())
    }
}

/// Uses the server at `path` with `keys` keys, and shuts it down; returns the digest of all answers.
/// Gives up once the server has `ended`.
pub(crate) fn work(path: &Path, keys: usize, ended: &AtomicBool) -> io::Result<Digest> {
    let worked = fill_and_read(path, keys, ended);
    // After an error, too: nobody else would end the server.
    if let Ok(mut socket) = UnixStream::connect(path) {
        let mut last = Vec::new();
        command(&[b"SHUTDOWN", b"NOSAVE"], &mut last);
        // The server may have ended by itself.
        let _gone = socket.write_all(&last);
    }
    worked
}

fn fill_and_read(path: &Path, keys: usize, ended: &AtomicBool) -> io::Result<Digest> {
    let socket = loop {
        match UnixStream::connect(path) {
            Ok(socket) => break socket,
            Err(error) if ended.load(Relaxed) => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let answers = BufReader::new(socket.try_clone()?);
    let mut client = Client { socket, answers, batch: Vec::new(), digest: Digest::default() };
    let name = |key: usize| format!("key:{key:08}").into_bytes();
    client.send(keys, |key, out| command(&[b"SET", &name(key), &generate::value(key)], out))?;
    // Most of the reads are among a part of the keys: the smallest of three random keys.
    let chosen = |nth: usize| {
        let mut random = Random::new(nth as u64 + 9);
        (0..3).map(|_| random.below(keys)).min().expect("three keys")
    };
    client.send(keys, |nth, out| command(&[b"GET", &name(chosen(nth))], out))?;
    client.send(keys / 4, |nth, out| {
        command(&[b"APPEND", &name(chosen(nth)), b" and a little more"], out);
    })?;
    client.send(keys / 4, |nth, out| command(&[b"GET", &name(chosen(nth + keys))], out))?;
    Ok(client.digest)
}

#[cfg(test)]
mod tests {
    use super::{answer, command};

    #[test]
    fn commands_and_answers_are_in_the_protocol() {
        let mut out = Vec::new();
        command(&[b"SET", b"key", b"two\r\nlines"], &mut out);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$10\r\ntwo\r\nlines\r\n");
        let mut given: &[u8] = b"+OK\r\n$10\r\ntwo\r\nlines\r\n:7\r\n$-1\r\n";
        assert_eq!(answer(&mut given).expect("a line"), b"OK");
        assert_eq!(answer(&mut given).expect("a string"), b"two\r\nlines");
        assert_eq!(answer(&mut given).expect("a number"), b"7");
        for mut bad in [given, b"-ERR no\r\n", b"", b"$5\r\nab"] {
            assert!(answer(&mut bad).is_err(), "{bad:?}");
        }
    }
}
