//! Files of certificates that are missing, damaged, or another's.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::nbd::tests::tls::Pki;
use crate::nbd::{Certificates, Watch};
use crate::testing::certificates::{self, Usage};

/// What is said about the directory, without its name.
fn said(directory: &Path, verify_peer: bool) -> String {
    let why = Certificates::open(directory, verify_peer).expect_err("it is bad").to_string();
    why.replace(&directory.display().to_string(), "DIR")
}

/// Goal: each file that is bad is named, in one line.
#[test]
fn a_bad_file_is_named() {
    let Some(pki) = Pki::new("files") else { return };
    let directory = &pki.directory;
    Certificates::open(directory, true).unwrap();
    let file = |name: &str| directory.join(name);
    let with = |name: &str, contents: &[u8], part: &str| {
        let kept = fs::read(file(name)).ok();
        fs::write(file(name), contents).unwrap();
        let why = said(directory, true);
        match kept {
            Some(kept) => fs::write(file(name), kept).unwrap(),
            None => fs::remove_file(file(name)).unwrap(),
        }
        assert!(why.starts_with(&format!("DIR/{name}: ")) && why.contains(part), "{name}: {why}");
        assert_eq!(why.lines().count(), 1, "{why}");
    };
    let cut = |name: &str| {
        let bytes = fs::read(file(name)).unwrap();
        bytes[..bytes.len() / 2].to_vec()
    };
    let damaged = |name: &str| {
        let mut bytes = fs::read(file(name)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] = if bytes[middle] == b'A' { b'B' } else { b'A' };
        bytes
    };
    for name in ["server-cert.pem", "ca-cert.pem"] {
        with(name, b"", "there is no certificate in it");
        with(name, b"anything", "there is no certificate in it");
        with(name, &fs::read(file("server-key.pem")).unwrap(), "there is no certificate in it");
        with(name, &cut(name), "damaged");
    }
    with("server-key.pem", b"", "there is no key without a password");
    with("server-key.pem", &cut("server-key.pem"), "damaged");
    with("server-key.pem", &damaged("server-key.pem"), "");
    with(
        "server-key.pem",
        &fs::read(file("client-key.pem")).unwrap(),
        "not the key of server-cert",
    );
    with("ca-crl.pem", b"nothing", "there is no list of revoked certificates");
    with("ca-crl.pem", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "damaged");
    // What is not there, or is no file.
    for name in ["server-key.pem", "ca-cert.pem", "server-cert.pem"] {
        fs::rename(file(name), file("kept")).unwrap();
        assert_eq!(
            said(directory, true),
            format!("DIR/{name}: No such file or directory (os error 2)")
        );
        fs::create_dir(file(name)).unwrap();
        fs::set_permissions(file(name), Permissions::from_mode(0o700)).unwrap();
        assert!(said(directory, true).starts_with(&format!("DIR/{name}: this is not a file")));
        fs::remove_dir(file(name)).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            file(name),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(said(directory, true).starts_with(&format!("DIR/{name}: this is not a file")));
        fs::remove_file(file(name)).unwrap();
        if name == "ca-cert.pem" {
            // Nobody is looked at, so it is not needed.
            Certificates::open(directory, false).unwrap();
        }
        fs::rename(file("kept"), file(name)).unwrap();
    }
    Certificates::open(directory, true).unwrap();
}

/// Goal: a key that everybody may read or write is refused; a group may have it.
#[test]
fn a_key_of_everybody_is_refused() {
    let Some(pki) = Pki::new("mode") else { return };
    let key = pki.directory.join("server-key.pem");
    for (mode, is_good) in [(0o644, false), (0o602, false), (0o640, true), (0o400, true)] {
        fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
        let opened = Certificates::open(&pki.directory, true);
        assert_eq!(opened.is_ok(), is_good, "{mode:o}");
        if !is_good {
            let why = said(&pki.directory, true);
            let begin = format!(
                "DIR/server-key.pem: everybody on this machine may use this key (mode {mode:o})"
            );
            assert_eq!(why, format!("{begin}; accepted: after chmod o= DIR/server-key.pem"));
        }
    }
}

/// Goal: keys of each kind that the documents name.
#[test]
fn keys_of_all_kinds_are_read() {
    let Some(pki) = Pki::new("kinds") else { return };
    for (kind, option) in [
        ("rsa", "rsa_keygen_bits:2048"),
        ("ec", "ec_paramgen_curve:P-384"),
        ("ec", "ec_paramgen_curve:P-521"),
        ("ed25519", ""),
    ] {
        let mut arguments = vec!["req", "-x509", "-newkey", kind, "-nodes", "-subj", "/CN=server"];
        if !option.is_empty() {
            arguments.extend(["-pkeyopt", option]);
        }
        arguments.extend(["-out", "server-cert.pem", "-keyout", "server-key.pem"]);
        certificates::openssl(&pki.directory, &arguments);
        let opened = Certificates::open(&pki.directory, false);
        if option.ends_with("P-521") {
            let why = opened.expect_err("ring has no such curve").to_string();
            assert!(why.ends_with("accepted: RSA, P-256, P-384, Ed25519"), "{why}");
        } else {
            opened.unwrap();
        }
    }
    assert!(certificates::sign(&pki.directory, "server", Usage::Server));
}

const DAY_S: u64 = 24 * 60 * 60;

fn now_s() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

/// Goal: a certificate that is not valid today is refused, wherever it is in the file, and one that ends soon is said
/// once. Method: clocks that are early and late.
#[test]
fn the_end_of_a_certificate_is_said() {
    let Some(pki) = Pki::new("valid") else { return };
    let directory = &pki.directory;
    let mut watch = Watch::open(directory, true).unwrap();
    let now = now_s();
    for (day, expected) in [
        (0, None),
        (29, None),
        (31, Some("the certificate expires in 28 days")),
        (32, None),
        (61, Some("the certificate has expired")),
        (62, None),
    ] {
        let line = watch.look_at(now + day * DAY_S + DAY_S / 2);
        let ends = expected.map(|end| format!("{}/server-cert.pem: {end}", directory.display()));
        assert_eq!(line, ends, "day {day}");
    }
    let file = directory.join("server-cert.pem");
    let good = fs::read_to_string(&file).unwrap();
    // Of another time, which is not what was signed: only the server looks at it.
    let at = |begin: &[u8; 13], end: &[u8; 13]| {
        let mut bytes = CertificateDer::from_pem_file(&file).unwrap().to_vec();
        let place = bytes.windows(2).position(|tag| tag == [0x17, 13]).expect("a time");
        bytes[place + 2..][..13].copy_from_slice(begin);
        bytes[place + 17..][..13].copy_from_slice(end);
        fs::write(directory.join("odd.der"), bytes).unwrap();
        let convert = ["x509", "-inform", "DER", "-in", "odd.der", "-out", "odd.pem"];
        certificates::openssl(directory, &convert);
        fs::read_to_string(directory.join("odd.pem")).unwrap()
    };
    let past = at(b"990101000000Z", b"010203000000Z");
    let future = at(b"480101000000Z", b"490101000000Z");
    let backwards = at(b"490101000000Z", b"480101000000Z");
    for (contents, begin, end) in [
        (past.clone(), "the certificate has expired, ", " days ago"),
        (future.clone(), "the certificate is not valid yet; it will be in ", " days"),
        (backwards, "the certificate has expired, ", " days ago"),
        (good.clone() + &past, "certificate 2 in it has expired, ", " days ago"),
        (good.clone() + &future, "certificate 2 in it is not valid yet; it will be in ", " days"),
    ] {
        fs::write(&file, contents).unwrap();
        let why = said(directory, false);
        let rest =
            why.strip_prefix("DIR/server-cert.pem: ").and_then(|why| why.strip_prefix(begin));
        let days = rest.and_then(|rest| rest.strip_suffix(end)).unwrap_or_else(|| panic!("{why}"));
        assert!(days.parse::<u64>().unwrap() > 7000, "{why}");
    }
    // Its end has four digits for the year.
    certificates::sign_for(directory, "server", Usage::Server, 20_000);
    assert_eq!(Watch::open(directory, true).unwrap().look(), None);
}

/// Goal: files that have changed are read again once they are at rest; what does not fit changes nothing and is said
/// once.
#[test]
fn changed_files_are_read_again() {
    let Some(pki) = Pki::new("changed") else { return };
    let directory = &pki.directory;
    let mut watch = Watch::open(directory, true).unwrap();
    let now = now_s();
    let config = |watch: &Watch| watch.certificates().config();
    let first = config(&watch);
    let same = |watch: &Watch| std::sync::Arc::ptr_eq(&first, &config(watch));
    assert_eq!((watch.look_at(now), watch.look_at(now)), (None, None));
    // A key without its certificate, as in the middle of a renewal.
    let kept = fs::read(directory.join("server-cert.pem")).unwrap();
    certificates::sign(directory, "server", Usage::Server);
    let renewed = fs::read(directory.join("server-cert.pem")).unwrap();
    // It is valid from its own second on.
    let now = now_s();
    fs::write(directory.join("server-cert.pem"), &kept).unwrap();
    assert_eq!(watch.look_at(now), None, "somebody may still write them");
    let line = watch.look_at(now).unwrap();
    let end =
        "this is not the key of server-cert.pem; new connections get the certificates of before";
    assert!(line.ends_with(end), "{line}");
    assert!(same(&watch) && watch.look_at(now).is_none());
    fs::write(directory.join("server-cert.pem"), &renewed).unwrap();
    assert_eq!(watch.look_at(now), None);
    let line = watch.look_at(now);
    assert_eq!(
        line,
        Some(format!("{}: new certificates, for new connections", directory.display()))
    );
    assert!(!same(&watch));
    // A list that was not there.
    let second = config(&watch);
    fs::write(directory.join("ca-crl.pem"), "nothing").unwrap();
    assert_eq!(watch.look_at(now), None);
    assert!(watch.look_at(now).unwrap().contains("ca-crl.pem: there is no list"));
    assert!(std::sync::Arc::ptr_eq(&second, &config(&watch)));
    // One that ends soon, instead.
    fs::remove_file(directory.join("ca-crl.pem")).unwrap();
    certificates::sign_for(directory, "server", Usage::Server, 10);
    assert_eq!(watch.look_at(now), None);
    let line = watch.look_at(now_s()).unwrap();
    assert!(line.contains(": new certificates, for new connections; "), "{line}");
    assert!(
        line.ends_with("server-cert.pem: the certificate expires in 9 days")
            || line.ends_with("in 10 days"),
        "{line}"
    );
}

/// Goal: new certificates that cannot be used yet are said once, and used as soon as they can be. They were never tried
/// again. Method: ones that are valid from a second on that a clock has not reached.
#[test]
fn files_that_cannot_be_used_yet_are_tried_again() {
    let Some(pki) = Pki::new("later") else { return };
    let directory = &pki.directory;
    let mut watch = Watch::open(directory, true).unwrap();
    let config = |watch: &Watch| watch.certificates().config();
    let first = config(&watch);
    let early = now_s() - DAY_S;
    certificates::sign(directory, "server", Usage::Server);
    assert_eq!(watch.look_at(early), None, "somebody may still write them");
    let line = watch.look_at(early).unwrap();
    assert!(line.contains("is not valid yet; it will be in "), "{line}");
    assert_eq!((watch.look_at(early), watch.look_at(early + 3600)), (None, None));
    assert!(std::sync::Arc::ptr_eq(&first, &config(&watch)));
    let line = watch.look_at(now_s()).unwrap();
    assert!(line.ends_with(": new certificates, for new connections"), "{line}");
    assert!(!std::sync::Arc::ptr_eq(&first, &config(&watch)));
    assert_eq!(watch.look_at(now_s()), None);
}
