//! What clients may choose from.

use std::fmt;
use std::sync::Arc;

use super::BESIDE_BYTES;
use crate::device::Device;
use crate::pieces::{PIECE_BYTES, Pieces};

/// As many as there may be: a list of all of them fits into the room for one step (`NBD-1`).
pub const EXPORTS_MAX: usize = 256;

/// The longest name and description. The protocol recommends no more than this, and allows 4096.
pub const NAME_BYTES_MAX: usize = 256;

const _: () = {
    // The header of a reply, the length of the name, name and description.
    let listed = 20 + 4 + 2 * NAME_BYTES_MAX;
    assert!(EXPORTS_MAX * listed + 20 <= PIECE_BYTES);
};

/// A device with the name that clients ask for.
pub(super) struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) device: Arc<dyn Device>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The exports of a server. The first one is also what a client gets that gives an empty name.
#[derive(Debug, Default)]
pub struct Exports(Vec<Export>);

/// Why an export is not added.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// There is one of this name.
    Exists(String),
    /// The name or the description has more than [`NAME_BYTES_MAX`] bytes, or a NUL.
    BadText(String),
    /// There are [`EXPORTS_MAX`] already.
    TooMany,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Exists(name) => write!(f, "there is an export named '{name}' already"),
            Refusal::BadText(text) => write!(
                f,
                "'{}' is not the name or description of an export; accepted: up to {NAME_BYTES_MAX} bytes without NUL",
                text.escape_debug()
            ),
            Refusal::TooMany => write!(f, "a server has {EXPORTS_MAX} exports at most"),
        }
    }
}

impl std::error::Error for Refusal {}

impl Exports {
    /// None.
    #[must_use]
    pub fn new() -> Exports {
        Exports::default()
    }

    /// Adds a device. The description is for people; it may be empty.
    ///
    /// # Errors
    ///
    /// See [`Refusal`].
    pub fn add(
        &mut self,
        name: &str,
        description: &str,
        device: Arc<dyn Device>,
    ) -> Result<(), Refusal> {
        let is_bad = |text: &&str| text.len() > NAME_BYTES_MAX || text.contains('\0');
        if let Some(text) = [name, description].into_iter().find(is_bad) {
            return Err(Refusal::BadText(text.to_owned()));
        }
        if self.0.iter().any(|export| export.name == name) {
            return Err(Refusal::Exists(name.to_owned()));
        }
        if self.0.len() == EXPORTS_MAX {
            return Err(Refusal::TooMany);
        }
        let (name, description) = (name.to_owned(), description.to_owned());
        self.0.push(Export { name, description, device });
        Ok(())
    }

    /// The longest piece of a large request.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        let pieces = self.0.iter().map(|export| Pieces::of(&*export.device).bytes_max());
        pieces.max().unwrap_or(PIECE_BYTES)
    }

    /// The most bytes that a session needs before it goes on.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.piece_bytes() + BESIDE_BYTES
    }

    /// The index of the export that a client means by `name`.
    pub(super) fn find(&self, name: &[u8]) -> Option<usize> {
        let named = self.0.iter().position(|export| export.name.as_bytes() == name);
        named.or((name.is_empty() && !self.0.is_empty()).then_some(0))
    }

    pub(super) fn get(&self, index: usize) -> &Export {
        &self.0[index]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Export> {
        self.0.iter()
    }
}
