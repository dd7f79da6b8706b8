//! Certificates and the key of a server: files in a directory, with the names that QEMU and nbdkit have for them.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

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

/// What a server shows to its clients, and what it wants to see. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct Certificates(Arc<ServerConfig>);

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
    /// A file is missing, damaged, or does not fit the others; or everybody on this machine can read the key.
    pub fn open(directory: &Path, verify_peer: bool) -> Result<Certificates, BadCertificates> {
        let provider = Arc::new(ring::default_provider());
        let shown = items(&directory.join(SHOWN), "certificate")?;
        let key = key(&directory.join(KEY))?;
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
            why => {
                bad(&directory.join(KEY), &format!("{why}; accepted: RSA, P-256, P-384, Ed25519"))
            }
        })?;
        // A client that comes back shows its certificate again. That is a millisecond, and nothing is kept of a client.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Certificates(Arc::new(config)))
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0)
    }
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
