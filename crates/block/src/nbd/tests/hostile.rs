//! Clients that keep no rule: nothing they send makes a session panic, or hold more than its bound.
//!
//! `Driver` checks after each step what a session may consume and need (`NBD-1`, `NBD-5`).

use std::sync::Arc;

use zfolio_core::testing::{Random, seed};

use super::client::{Client, READ, TRIM, WRITE, exporting, go_data, option, request};
use crate::nbd::Tls;
use crate::nbd::script::{self, Driver};
use crate::testing::Memory;

/// Goal: any script of options, requests and noise. Method: random scripts; the fuzz target plays more of them.
#[test]
fn random_scripts_keep_the_bounds() {
    let seed = seed();
    let (mut random, mut answered) = (Random::new(seed), 0);
    for round in 0..400 {
        let bytes = 20 + random.below(2000);
        let mut script = random.bytes(bytes);
        if round % 2 == 0 {
            // A client's flags, TLS where it is, structured replies, and an export: then requests are understood.
            let tls = u8::try_from(round / 2 % 3).unwrap();
            let go = [
                &[tls, 1, 3, 0, 0][..],
                &[4, 5, 0, 0, 0, 0, 0],
                &[4, 8, 0, 0, 0, 0, 0, 4, 10, 1, 0, 0, 0, 0, 4, 7, 1, 0, 0, 0, 0, 0],
            ];
            script.splice(0..0, go.concat());
        }
        let result = std::panic::catch_unwind(|| script::play_counting(&script));
        let replied = result.unwrap_or_else(|_| panic!("seed {seed}, round {round}"));
        answered += usize::from(replied > 200);
    }
    assert!(answered > 100, "seed {seed}: of 400 scripts only {answered} came to requests");
}

/// Goal: a valid stream in which some bytes were changed. Method: each position of the handshake and of the headers.
#[test]
fn a_damaged_stream_keeps_the_bounds() {
    let (seed, mut stream) = (seed(), 3_u32.to_be_bytes().to_vec());
    let mut random = Random::new(seed);
    stream.extend(option(8, &[]));
    stream.extend(option(7, &go_data("disk", &[3])));
    for (command, bytes) in
        [(WRITE, 512), (READ, 4096), (TRIM, 8192), (WRITE, 70 << 10), (READ, 300 << 10)]
    {
        stream.extend(request(command, 0, 9, 0, bytes));
        if command == WRITE {
            stream.resize(stream.len() + bytes as usize, 0xa5);
        }
    }
    let disk = Arc::new(Memory::new(1 << 20));
    for position in (0..200).chain((200..stream.len()).step_by(499)) {
        for value in [0, 255, random.byte()] {
            let mut damaged = stream.clone();
            damaged[position] = value;
            let mut driver = Driver::new(exporting(disk.clone()), Tls::Off);
            for part in damaged.chunks(1 + random.below(40_000)) {
                driver.push(part);
            }
        }
    }
}

/// Goal: a request that asks for the most with the fewest bytes costs no more than any other step.
#[test]
fn requests_for_all_of_a_large_disk_are_served_in_pieces() {
    let mut client = Client::of(Arc::new(Memory::new(256 << 20)), true);
    let cookie = 3;
    for _ in 0..3 {
        client.send(&request(TRIM, 0, cookie, 0, 256 << 20));
        assert_eq!(client.incoming.reply(cookie, 0).error, 0);
    }
    // A hole of 32 MiB is one chunk, also if it is asked for many times at once.
    let many: Vec<u8> = (0..100).flat_map(|_| request(READ, 0, cookie, 0, 32 << 20)).collect();
    client.send(&many);
    for _ in 0..100 {
        assert_eq!(client.incoming.reply(cookie, 0).holes, [(0, 32 << 20)]);
    }
}
