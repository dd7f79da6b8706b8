//! Options, one by one.

use std::sync::Arc;

use super::client::{BLOCK_STATUS, Client, READ, context_data, counted, go_data, option};
use crate::nbd::{EXPORTS_MAX, Exports, Refusal, Tls};
use crate::testing::Memory;

const ACK: u64 = 1;
const UNSUP: u64 = (1 << 31) + 1;
const INVALID: u64 = (1 << 31) + 3;
const TLS_REQD: u64 = (1 << 31) + 5;
const UNKNOWN: u64 = (1 << 31) + 6;
const TOO_BIG: u64 = (1 << 31) + 9;

/// HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, CAN_MULTI_CONN, CACHE, FAST_ZERO.
const FLAGS: u64 = 1 | 4 | 8 | 32 | 64 | 256 | 1024 | 2048;
const FLAG_DF: u64 = 128;

fn two_exports() -> Exports {
    let mut exports = Exports::new();
    let first = Arc::new(Memory::new(1 << 20).preferring(64 << 10));
    exports.add("first", "the larger one", first).unwrap();
    exports.add("second", "", Arc::new(Memory::new(4096).read_only())).unwrap();
    exports
}

fn client() -> Client {
    Client::greeted(two_exports(), 3)
}

/// The replies to an option up to the final one, each with its type and data.
fn answers(client: &mut Client, number: u32, data: &[u8]) -> Vec<(u64, Vec<u8>)> {
    client.send(&option(number, data));
    let mut answers = Vec::new();
    while !client.incoming.0.is_empty() {
        let (option, kind, data) = client.incoming.option_reply();
        assert_eq!(option, u64::from(number));
        answers.push((kind, data));
    }
    answers
}

fn kinds(answers: &[(u64, Vec<u8>)]) -> Vec<u64> {
    answers.iter().map(|answer| answer.0).collect()
}

/// Goal: `OPT_EXPORT_NAME` begins the transmission, with padding unless both sides know better.
#[test]
fn export_name_begins_the_transmission() {
    for (flags, padding) in [(1, 124), (3, 0), (0, 124)] {
        for (name, size, transmission) in [
            ("", 1 << 20, FLAGS),
            ("first", 1 << 20, FLAGS),
            ("second", 4096, 1 | 2 | 4 | 256 | 1024),
        ] {
            let mut client = Client::greeted(two_exports(), flags);
            client.send(&option(1, name.as_bytes()));
            assert_eq!(client.incoming.number::<8>(), size);
            assert_eq!(client.incoming.number::<2>(), transmission, "{name}");
            assert_eq!(client.incoming.bytes(client.incoming.0.len()), vec![0; padding]);
            assert_eq!(client.ask(READ, 0, 0, 512).contents(0, 512), [0; 512]);
        }
    }
    let mut client = client();
    client.send(&option(1, b"third"));
    assert!(client.driver.is_closed && client.incoming.0.is_empty());
}

/// Goal: `OPT_INFO` and `OPT_GO` describe the export; only the latter begins the transmission.
#[test]
fn info_and_go_describe_an_export() {
    let mut client = client();
    let told = answers(&mut client, 6, &go_data("", &[1, 2, 3, 999]));
    let mut export = vec![0, 0];
    export.extend_from_slice(&(1_u64 << 20).to_be_bytes());
    export.extend_from_slice(&u16::try_from(FLAGS).unwrap().to_be_bytes());
    let sizes = [0, 3, 0, 0, 2, 0, 0, 1, 0, 0, 2, 0, 0, 0].to_vec();
    let named = |kind: u8, text: &str| [&[0, kind], text.as_bytes()].concat();
    let expected =
        [(3, export), (3, sizes), (3, named(1, "first")), (3, named(2, "the larger one"))];
    assert_eq!(told[..4], expected);
    assert_eq!(told[4..], [(ACK, Vec::new())]);
    assert!(!client.driver.is_transmitting());
    assert_eq!(kinds(&answers(&mut client, 8, &[])), [ACK]);
    // Structured replies may be cut, or not.
    let told = answers(&mut client, 7, &go_data("first", &[]));
    assert_eq!(kinds(&told), [3, 3, ACK]);
    assert_eq!(told[0].1[10..], u16::try_from(FLAGS | FLAG_DF).unwrap().to_be_bytes());
    assert!(client.driver.is_transmitting());
}

/// Goal: what is wrong with an option is said, and the handshake goes on.
#[test]
fn a_refused_option_leaves_the_handshake_as_it_was() {
    let mut client = client();
    let long = "x".repeat(4096);
    for (number, data, kind) in [
        (6, go_data("third", &[]), UNKNOWN),
        (7, go_data(&long, &[]), UNKNOWN),
        (7, Vec::new(), INVALID),
        (7, counted("first"), INVALID),
        (7, [go_data("first", &[3]), vec![0]].concat(), INVALID),
        (7, [&[255; 4][..], b"first"].concat(), INVALID),
        (3, vec![0], INVALID),
        (8, vec![0], INVALID),
        (9, context_data("first", &[]), INVALID),
        (10, context_data("first", &["base:allocation"]), INVALID),
        (5, Vec::new(), UNSUP),
        (4, Vec::new(), UNSUP),
        (11, Vec::new(), UNSUP),
        (0, vec![1, 2, 3], UNSUP),
        (u32::MAX, vec![7; 16 << 10], UNSUP),
    ] {
        let told = answers(&mut client, number, &data);
        assert_eq!(kinds(&told), [kind], "option {number}");
        assert!(!told[0].1.is_empty() && std::str::from_utf8(&told[0].1).is_ok(), "a text");
        assert!(!client.driver.is_closed && !client.driver.is_transmitting());
    }
    assert_eq!(*kinds(&answers(&mut client, 7, &go_data("", &[]))).last().unwrap(), ACK);
}

/// Goal: all exports are listed, and `OPT_ABORT` ends the connection with an answer.
#[test]
fn exports_are_listed() {
    let mut client = client();
    let first = [counted("first"), b"the larger one".to_vec()].concat();
    let expected = [(2, first), (2, counted("second")), (ACK, Vec::new())];
    assert_eq!(answers(&mut client, 3, &[]), expected);
    assert_eq!(answers(&mut client, 2, &[]), [(ACK, Vec::new())]);
    assert!(client.driver.is_closed);
    // As many as there may be, with the longest names.
    let (mut exports, disk) = (Exports::new(), Arc::new(Memory::new(0)));
    for number in 0..EXPORTS_MAX {
        let name = format!("{number:0256}");
        exports.add(&name, &name, disk.clone()).unwrap();
    }
    assert_eq!(exports.add("more", "", disk), Err(Refusal::TooMany));
    let mut client = Client::greeted(exports, 3);
    assert_eq!(answers(&mut client, 3, &[]).len(), EXPORTS_MAX + 1);
}

/// Goal: names are as the protocol has them, and each is there once.
#[test]
fn an_export_needs_a_name_of_its_own() {
    let (mut exports, disk) = (Exports::new(), Arc::new(Memory::new(0)));
    exports.add("", "", disk.clone()).unwrap();
    exports.add("a", "", disk.clone()).unwrap();
    assert_eq!(exports.add("a", "", disk.clone()), Err(Refusal::Exists("a".to_owned())));
    for wrong in ["a\0", &"x".repeat(257)] {
        let why = exports.add(wrong, "", disk.clone()).expect_err(wrong);
        assert_eq!(why, Refusal::BadText(wrong.to_owned()));
        assert_eq!(exports.add("b", wrong, disk.clone()), Err(why.clone()));
        assert!(why.to_string().contains("accepted: up to 256 bytes without NUL"), "{why}");
    }
}

/// Goal: a context is listed or set for one export, and only with structured replies.
#[test]
fn contexts_belong_to_an_export() {
    let with_id = |id: u8| (4, [&[0, 0, 0, id], &b"base:allocation"[..]].concat());
    for (set_for, used, is_set) in
        [("first", "first", true), ("", "first", true), ("second", "first", false)]
    {
        let mut client = client();
        assert_eq!(kinds(&answers(&mut client, 8, &[])), [ACK]);
        let all = [with_id(0), (ACK, Vec::new())];
        for queries in [&[][..], &["base:allocation"], &["base:"], &["x-a:b", "base:"]] {
            assert_eq!(answers(&mut client, 9, &context_data("first", queries)), all);
        }
        for queries in [&["base"][..], &["x-a:"], &["base:allocations", ""]] {
            assert_eq!(kinds(&answers(&mut client, 9, &context_data("first", queries))), [ACK]);
            assert_eq!(kinds(&answers(&mut client, 10, &context_data("first", queries))), [ACK]);
        }
        let bad = context_data("first", &["base:allocation"]);
        assert_eq!(kinds(&answers(&mut client, 10, &bad[..bad.len() - 1])), [INVALID]);
        assert_eq!(kinds(&answers(&mut client, 10, &context_data("third", &[]))), [UNKNOWN]);
        let set = context_data(set_for, &["base:allocation", "base:allocation"]);
        assert_eq!(answers(&mut client, 10, &set), [with_id(1), (ACK, Vec::new())]);
        answers(&mut client, 7, &go_data(used, &[]));
        let reply = client.ask(BLOCK_STATUS, 0, 0, 4096);
        assert_eq!(reply.error == 0, is_set, "{set_for}: {reply:?}");
    }
    // The last one counts, even if it sets nothing.
    let mut client = client();
    answers(&mut client, 8, &[]);
    answers(&mut client, 10, &context_data("first", &["base:allocation"]));
    assert_eq!(kinds(&answers(&mut client, 10, &context_data("first", &[]))), [ACK]);
    answers(&mut client, 7, &go_data("first", &[]));
    assert_eq!(client.ask(BLOCK_STATUS, 0, 0, 4096).error, 22);
}

/// Goal: what means nothing any more ends the connection, after an answer where there is one.
#[test]
fn a_handshake_that_cannot_go_on_ends() {
    for flags in [4, 1 << 31, u32::MAX] {
        let client = Client::greeted(two_exports(), flags);
        assert!(client.driver.is_closed && client.incoming.0.is_empty());
    }
    let mut wrong = client();
    wrong.send(b"IHAVEOPX");
    assert!(wrong.driver.is_closed && wrong.incoming.0.is_empty());
    for (number, is_told) in [(7, true), (999, true), (1, false)] {
        for length in [(16 << 10) + 1, u32::MAX] {
            let mut client = client();
            let mut message = option(number, &[]);
            message[12..].copy_from_slice(&length.to_be_bytes());
            client.send(&message);
            assert!(client.driver.is_closed);
            assert_eq!(!client.incoming.0.is_empty(), is_told);
            if is_told {
                assert_eq!(client.incoming.option_reply().1, TOO_BIG);
            }
        }
    }
}

/// Goal: where TLS is required, no option but it is answered in clear, and nothing about exports is said.
#[test]
fn nothing_is_served_before_tls_that_is_required() {
    let start = || Client::greeted_with(two_exports(), 3, Tls::Require);
    let mut client = start();
    for (number, data, kind) in [
        (3, Vec::new(), TLS_REQD),
        (6, go_data("first", &[]), TLS_REQD),
        (7, go_data("first", &[]), TLS_REQD),
        (7, go_data("third", &[]), TLS_REQD),
        (8, Vec::new(), TLS_REQD),
        (9, context_data("first", &[]), TLS_REQD),
        (10, context_data("first", &["base:allocation"]), TLS_REQD),
        (0, vec![1], TLS_REQD),
        (999, Vec::new(), TLS_REQD),
        (5, vec![0], INVALID),
    ] {
        assert_eq!(kinds(&answers(&mut client, number, &data)), [kind], "option {number}");
        assert!(!client.driver.is_closed && !client.driver.is_secured, "option {number}");
    }
    assert_eq!(answers(&mut client, 5, &[]), [(ACK, Vec::new())]);
    assert!(client.driver.is_secured);
    assert_eq!(kinds(&answers(&mut client, 5, &[])), [INVALID], "once");
    assert_eq!(kinds(&answers(&mut client, 3, &[])), [2, 2, ACK]);
    assert_eq!(*kinds(&answers(&mut client, 7, &go_data("first", &[]))).last().unwrap(), ACK);
    assert_eq!(client.ask(READ, 0, 0, 512).contents(0, 512), [0; 512]);
    // The option that has no way to say no, and the end.
    let mut old = start();
    old.send(&option(1, b"first"));
    assert!(old.driver.is_closed && old.incoming.0.is_empty());
    let mut ends = start();
    assert_eq!(answers(&mut ends, 2, &[]), [(ACK, Vec::new())]);
    assert!(ends.driver.is_closed);
}

/// Goal: what was agreed on in clear is forgotten, since anybody could have sent it; but the flags stay.
#[test]
fn tls_begins_the_options_anew() {
    let mut client = Client::greeted_with(two_exports(), 3, Tls::On);
    answers(&mut client, 8, &[]);
    let set = context_data("first", &["base:allocation"]);
    assert_eq!(kinds(&answers(&mut client, 10, &set)), [4, ACK]);
    assert_eq!(kinds(&answers(&mut client, 5, &[])), [ACK]);
    assert_eq!(kinds(&answers(&mut client, 10, &set)), [INVALID], "no structured replies");
    answers(&mut client, 8, &[]);
    let told = answers(&mut client, 7, &go_data("first", &[]));
    assert_eq!(told[0].1[10..], u16::try_from(FLAGS | FLAG_DF).unwrap().to_be_bytes());
    assert_eq!(client.ask(BLOCK_STATUS, 0, 0, 4096).error, 22, "no context was set since");
    // No padding was agreed on by the flags.
    let mut old = Client::greeted_with(two_exports(), 3, Tls::On);
    answers(&mut old, 5, &[]);
    old.send(&option(1, b"first"));
    assert_eq!(old.incoming.0.len(), 10);
    // Where it is on, it may be left.
    let mut clear = Client::greeted_with(two_exports(), 3, Tls::On);
    assert_eq!(*kinds(&answers(&mut clear, 7, &go_data("first", &[]))).last().unwrap(), ACK);
}

/// Goal: bytes that came in clear are not served as if they had come by TLS. Method: options behind `OPT_STARTTLS` in
/// one message, whole and cut; then there is no answer, so that a client knows that somebody was between.
#[test]
fn what_comes_behind_starttls_in_clear_ends_the_connection() {
    let injected = [option(8, &[]), option(7, &go_data("first", &[]))].concat();
    for bytes in [1, 16, injected.len()] {
        for tls in [Tls::On, Tls::Require] {
            let mut client = Client::greeted_with(two_exports(), 3, tls);
            client.send(&[&option(5, &[]), &injected[..bytes]].concat());
            assert!(client.driver.is_closed && !client.driver.is_secured);
            assert!(client.incoming.0.is_empty());
        }
    }
    // Without TLS the option is one like others.
    let mut client = client();
    client.send(&[option(5, &[]), option(8, &[])].concat());
    assert_eq!(client.incoming.option_reply().1, UNSUP);
    assert_eq!(client.incoming.option_reply(), (8, ACK, Vec::new()));
}
