//! Certificates and the key of a server: files in a directory, with the names that QEMU and nbdkit have for them.
//!
//! A [`Watch`] reads the files again when they have changed. Connections that have begun keep what they began with; the
//! next ones are shown the new certificates. Files that do not fit each other, as in the middle of a renewal, change
//! nothing.
//!
//! # Concurrency
//!
//! A lock (`Certificates`) protects the configuration that new connections get; it is held to copy a pointer.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    NoServerSessionStorage, ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier,
};
use rustls::{CertificateError, RootCertStore, ServerConfig};
use zfolio_core::sync::Mutex;

/// The authorities whose certificates clients have to show.
const AUTHORITIES: &str = "ca-cert.pem";

/// Certificates that the authorities have taken back; it need not be there.
const REVOKED: &str = "ca-crl.pem";

/// What the server shows, with the certificates between it and the authority.
const SHOWN: &str = "server-cert.pem";

/// The server's key.
const KEY: &str = "server-key.pem";

/// A file that is longer is none of these.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What everybody on a machine may do with a file, of its mode.
const MODE_OTHERS: u32 = 0o007;

/// All of them.
const FILES: [&str; 4] = [AUTHORITIES, REVOKED, SHOWN, KEY];

const DAY_S: u64 = 24 * 60 * 60;

/// A certificate that is valid for less than this is worth a line.
const SOON_S: u64 = 30 * DAY_S;

/// The rank of the lock of a configuration. Nothing is called while it is held.
const RANK_CERTIFICATES: u8 = 1;

/// What a server shows to its clients, and what it wants to see. Clones are the same, and cheap.
#[derive(Clone, Debug)]
pub struct Certificates(Arc<Mutex<RANK_CERTIFICATES, Arc<ServerConfig>>>);

/// Looks after the files that certificates were read from.
#[derive(Debug)]
pub struct Watch {
    directory: PathBuf,
    verify_peer: bool,
    certificates: Certificates,
    /// The first moment at which one of the certificates that are shown is not valid any more, in seconds since 1970.
    ends_s: u64,
    /// How the files were when they were read, and at the last look.
    read: Stamps,
    seen: Stamps,
    /// How they were when a line said that they cannot be read.
    refused: Option<Stamps>,
    /// What was said about the end.
    said: Age,
}

/// How long the certificates are still valid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Age {
    Good,
    Soon,
    Over,
}

/// A file by what changes with its contents: device and inode, length, and when it and its inode were changed.
type Stamp = Option<(u64, u64, u64, [i64; 4])>;

type Stamps = [Stamp; FILES.len()];

/// Why there are no certificates.
#[derive(Debug)]
pub struct BadCertificates {
    /// The file.
    pub file: PathBuf,
    why: String,
}

impl fmt::Display for BadCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.why)
    }
}

impl std::error::Error for BadCertificates {}

impl Certificates {
    /// Reads them from a directory. With `verify_peer` a client has to show a certificate that an authority of
    /// `ca-cert.pem` has signed; else anybody may connect.
    ///
    /// # Errors
    ///
    /// A file is missing, damaged, or does not fit the others; everybody on this machine can read the key; or a
    /// certificate that the server would show is not valid today.
    pub fn open(directory: &Path, verify_peer: bool) -> Result<Certificates, BadCertificates> {
        Watch::open(directory, verify_peer).map(|watch| watch.certificates)
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.lock())
    }
}

impl Watch {
    /// Reads certificates as [`Certificates::open`] does.
    ///
    /// # Errors
    ///
    /// See [`Certificates::open`].
    pub fn open(directory: &Path, verify_peer: bool) -> Result<Watch, BadCertificates> {
        // Before they are read, so that no change goes unnoticed.
        let read = stamps(directory);
        let (config, ends_s) = read_all(directory, verify_peer, now_s())?;
        Ok(Watch {
            directory: directory.to_owned(),
            verify_peer,
            certificates: Certificates(Arc::new(Mutex::new(config))),
            ends_s,
            read,
            seen: read,
            refused: None,
            said: Age::Good,
        })
    }

    /// What servers are given. What this value reads later is in it, too.
    #[must_use]
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// Reads the files again if they have changed, and are the same as at the last look: somebody may still write them.
    /// Files that cannot be read are tried at each look, since time alone may mend that: a certificate that is not
    /// valid yet, or no descriptor that is free. To be called every few seconds. Returns a line for people if there is
    /// something to say.
    pub fn look(&mut self) -> Option<String> {
        self.look_at(now_s())
    }

    pub(super) fn look_at(&mut self, now_s: u64) -> Option<String> {
        let stamps = stamps(&self.directory);
        let has_settled = std::mem::replace(&mut self.seen, stamps) == stamps;
        let mut line = None;
        if stamps != self.read && has_settled {
            match read_all(&self.directory, self.verify_peer, now_s) {
                Ok((config, ends_s)) => {
                    self.read = stamps;
                    *self.certificates.0.lock() = config;
                    (self.ends_s, self.said) = (ends_s, Age::Good);
                    let directory = self.directory.display();
                    line = Some(format!("{directory}: new certificates, for new connections"));
                }
                // Once for the same files.
                Err(_) if self.refused == Some(stamps) => {}
                Err(why) => {
                    self.refused = Some(stamps);
                    line = Some(format!("{why}; new connections get the certificates of before"));
                }
            }
        }
        let (age, file) = (age(self.ends_s, now_s), self.directory.join(SHOWN));
        if age <= self.said {
            return line;
        }
        self.said = age;
        let file = file.display();
        let end = match age {
            Age::Over => format!("{file}: the certificate has expired"),
            _ => format!("{file}: the certificate expires {}", when(self.ends_s - now_s)),
        };
        Some(match line {
            None => end,
            Some(line) => format!("{line}; {end}"),
        })
    }
}

/// Seconds since 1970.
fn now_s() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

fn age(ends_s: u64, now_s: u64) -> Age {
    match ends_s.checked_sub(now_s) {
        None => Age::Over,
        Some(left_s) if left_s < SOON_S => Age::Soon,
        Some(_) => Age::Good,
    }
}

/// A time from now on, for people.
fn when(seconds: u64) -> String {
    match seconds / DAY_S {
        0 => "in less than a day".to_owned(),
        1 => "in a day".to_owned(),
        days => format!("in {days} days"),
    }
}

fn stamps(directory: &Path) -> Stamps {
    FILES.map(|name| {
        let file = fs::metadata(directory.join(name)).ok()?;
        let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
        Some((file.dev(), file.ino(), file.len(), times))
    })
}

/// Reads all files. Returns until when what is shown is valid, too.
fn read_all(
    directory: &Path,
    verify_peer: bool,
    now_s: u64,
) -> Result<(Arc<ServerConfig>, u64), BadCertificates> {
    let provider = Arc::new(ring::default_provider());
    let shown = items(&directory.join(SHOWN), "certificate")?;
    let key = key(&directory.join(KEY))?;
    let valid = shown.iter().map(|one| validity(one, &provider)).collect::<Vec<_>>();
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|why| bad(directory, &why))?;
    let config = if verify_peer {
        config.with_client_cert_verifier(verifier(directory, provider)?)
    } else {
        config.with_no_client_auth()
    };
    let mut config = config.with_single_cert(shown, key).map_err(|why| match why {
        rustls::Error::InconsistentKeys(_) => {
            bad(&directory.join(KEY), &format!("this is not the key of {SHOWN}"))
        }
        rustls::Error::InvalidCertificate(_) => {
            bad(&directory.join(SHOWN), &format!("{why} (version 3 is accepted)"))
        }
        // Which algorithms there are rustls says in the other cases.
        why => bad(&directory.join(KEY), &format!("{why}; accepted: RSA, P-256, P-384, Ed25519")),
    })?;
    // A client that comes back shows its certificate again. That is a millisecond, and nothing is kept of a client.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    let ends_s = valid_until(&valid, now_s).map_err(|why| bad(&directory.join(SHOWN), &why))?;
    Ok((Arc::new(config), ends_s))
}

/// The first and the last second in which a certificate is valid, of the years since 1970.
fn validity(certificate: &CertificateDer<'_>, provider: &CryptoProvider) -> (u64, u64) {
    // rustls has no name for these fields. It compares them with the time before it looks at the issuer, and says in
    // its error what they are.
    let refusal = |second| {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let (nobody, time) = (RootCertStore::empty(), UnixTime::since_unix_epoch(second));
        let algorithms = provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &nobody, &[], time, algorithms)
    };
    let why = |second| match refusal(second) {
        Err(rustls::Error::InvalidCertificate(why)) => Some(why),
        _ => None,
    };
    let begins = match why(Duration::ZERO) {
        Some(CertificateError::NotValidYetContext { not_before, .. }) => not_before.as_secs(),
        _ => 0,
    };
    let ends = match why(Duration::MAX) {
        Some(CertificateError::ExpiredContext { not_after, .. }) => not_after.as_secs(),
        // It ends before it begins, or rustls has changed: no client would accept the one, and a test finds the other.
        _ => 0,
    };
    (begins, ends)
}

/// Until when all of these certificates are valid, which they have to be now.
fn valid_until(valid: &[(u64, u64)], now_s: u64) -> Result<u64, String> {
    for (index, (begins_s, ends_s)) in valid.iter().enumerate() {
        let which = match index {
            0 => "the certificate".to_owned(),
            others => format!("certificate {} in it", others + 1),
        };
        if now_s < *begins_s {
            return Err(format!("{which} is not valid yet; it will be {}", when(begins_s - now_s)));
        }
        if now_s > *ends_s {
            let days = (now_s - ends_s) / DAY_S;
            return Err(format!("{which} has expired, {days} days ago"));
        }
    }
    Ok(valid.iter().map(|(_, ends_s)| *ends_s).min().unwrap_or(0))
}

fn bad(file: &Path, why: &dyn fmt::Display) -> BadCertificates {
    BadCertificates { file: file.to_owned(), why: why.to_string() }
}

/// Opens a file, without waiting for the other side of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn contents(path: &Path, file: &File) -> Result<Vec<u8>, BadCertificates> {
    let about = file.metadata().map_err(|why| bad(path, &why))?;
    if !about.is_file() || about.len() > FILE_BYTES_MAX {
        return Err(bad(path, &"this is not a file of certificates or keys"));
    }
    let mut bytes = Vec::new();
    // A file that grows meanwhile is cut, and then damaged.
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(|why| bad(path, &why))?;
    Ok(bytes)
}

/// All things of a kind in a file, one at least.
fn items<T: PemObject>(path: &Path, kind: &str) -> Result<Vec<T>, BadCertificates> {
    let file = open(path).map_err(|why| bad(path, &why))?;
    let bytes = contents(path, &file)?;
    let all: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&bytes).collect();
    let all = all.map_err(|why| bad(path, &format!("damaged: {why}")))?;
    let is_empty = all.is_empty();
    (!is_empty).then_some(all).ok_or_else(|| bad(path, &format!("there is no {kind} in it (PEM)")))
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, BadCertificates> {
    let file = open(path).map_err(|why| bad(path, &why))?;
    let mode = file.metadata().map_err(|why| bad(path, &why))?.mode();
    if mode & MODE_OTHERS != 0 {
        // Who has the key can be the server for its clients.
        let why = format!(
            "everybody on this machine may use this key (mode {:03o}); accepted: after chmod o= {}",
            mode & 0o777,
            path.display()
        );
        return Err(bad(path, &why));
    }
    let bytes = contents(path, &file)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|why| match why {
        pem::Error::NoItemsFound => bad(path, &"there is no key without a password in it (PEM)"),
        why => bad(path, &format!("damaged: {why}")),
    })
}

/// Accepts the clients that an authority has signed, and did not take back.
fn verifier(
    directory: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, BadCertificates> {
    let path = directory.join(AUTHORITIES);
    let mut authorities = RootCertStore::empty();
    let all: Vec<CertificateDer<'static>> = items(&path, "certificate")?;
    for one in all {
        authorities.add(one).map_err(|why| bad(&path, &why))?;
    }
    let revoked = directory.join(REVOKED);
    let lists: Vec<CertificateRevocationListDer<'static>> = match open(&revoked) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Vec::new(),
        _ => items(&revoked, "list of revoked certificates")?,
    };
    // As nbdkit and QEMU have it: a list counts for the authority that has signed it, and other authorities need none.
    WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider)
        .with_crls(lists)
        .allow_unknown_revocation_status()
        .build()
        .map_err(|why| match why {
            VerifierBuilderError::InvalidCrl(why) => bad(&revoked, &format!("damaged: {why:?}")),
            why => bad(&path, &why),
        })
}
