//! A folder for temporary files, removed with its contents.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder; dropping this removes it.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes a folder of this process, whose name contains `purpose`, in the system's one for
    /// temporary files.
    pub(crate) fn create(purpose: &str) -> io::Result<Scratch> {
        let name = format!("zfolio-{purpose}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder)?;
        Ok(Scratch(folder))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("zfolio: {}: not removed: {error}", self.0.display());
        }
    }
}
