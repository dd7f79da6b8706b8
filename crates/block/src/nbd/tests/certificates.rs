//! Files of certificates that are missing, damaged, or another's.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::nbd::Certificates;
use crate::nbd::tests::tls::Pki;
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
