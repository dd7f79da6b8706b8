//! Certificates for tests, made by openssl.

use std::path::Path;
use std::process::{Command, Stdio};

/// How long certificates are valid: longer than what a server warns of.
const DAYS: u32 = 60;

/// What a certificate is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Usage {
    /// A server at localhost and at 127.0.0.1.
    Server,
    /// A client.
    Client,
}

/// Makes an authority, and a certificate and a key for each of a server and a client, in files with QEMU's names.
/// `false`: openssl is not installed, which was printed.
pub fn make(directory: &Path) -> bool {
    authority(directory)
        && sign(directory, "server", Usage::Server)
        && sign(directory, "client", Usage::Client)
}

/// Makes `ca-cert.pem` and `ca-key.pem`. `false`: as [`make`].
pub fn authority(directory: &Path) -> bool {
    request(directory, "ca", &["-subj", "/CN=authority", "-days", &DAYS.to_string()])
}

/// Makes `NAME-cert.pem` and `NAME-key.pem`, signed by the authority. `false`: as [`make`].
pub fn sign(directory: &Path, name: &str, usage: Usage) -> bool {
    sign_for(directory, name, usage, DAYS)
}

/// The same, valid for so many days.
pub fn sign_for(directory: &Path, name: &str, usage: Usage, days: u32) -> bool {
    let days = days.to_string();
    let subject = format!("/CN={name}");
    let common = [
        "-subj",
        &subject,
        "-days",
        &days,
        "-CA",
        "ca-cert.pem",
        "-CAkey",
        "ca-key.pem",
        "-addext",
        "basicConstraints=critical,CA:false",
    ];
    let own: &[&str] = match usage {
        Usage::Server => &[
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext",
            "extendedKeyUsage=serverAuth",
        ],
        Usage::Client => &["-addext", "extendedKeyUsage=clientAuth"],
    };
    request(directory, name, &[&common, own].concat())
}

/// A new key, and a certificate for it.
fn request(directory: &Path, name: &str, arguments: &[&str]) -> bool {
    let (cert, key) = (format!("{name}-cert.pem"), format!("{name}-key.pem"));
    openssl(
        directory,
        &[
            &["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"],
            arguments,
            &["-out", &cert, "-keyout", &key],
        ]
        .concat(),
    )
}

/// Runs openssl in a directory. `false`: it is not installed, which was printed.
///
/// # Panics
///
/// If it fails.
pub fn openssl(directory: &Path, arguments: &[&str]) -> bool {
    let run = Command::new("openssl")
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null())
        .output();
    let Ok(output) = run else {
        eprintln!("SKIPPED: openssl is not installed (make setup)");
        return false;
    };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "openssl {arguments:?}: {told}");
    true
}
