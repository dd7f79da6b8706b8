//! Dictionaries: reading one for `--algorithm`.

use std::path::Path;

use zfolio_core::zcomp::{DICTIONARY_BYTES, Dictionary};
use zfolio_sys::files;

/// The dictionary that `path` names, by the path that it has from every directory: children of a program
/// read it too, wherever they are.
///
/// # Errors
///
/// One line: it cannot be read, or is no dictionary.
pub(crate) fn read(path: &str) -> Result<Dictionary, String> {
    let refused = |why: &dyn std::fmt::Display| format!("dictionary '{path}': {why}");
    let whole = Path::new(path).canonicalize().map_err(|error| refused(&error))?;
    let whole = whole.to_str().ok_or_else(|| refused(&"accepted is a path in UTF-8"))?;
    let bytes = files::read_whole(whole, *DICTIONARY_BYTES.end()).map_err(|errno| match errno {
        zfolio_sys::Errno::FBIG => {
            refused(&format!("accepted are at most {} bytes", DICTIONARY_BYTES.end()))
        }
        other => refused(&std::io::Error::from(other)),
    })?;
    Dictionary::new(whole, bytes).map_err(|error| error.to_string())
}
