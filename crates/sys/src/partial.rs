//! A file that gets its name only when it is complete.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// See the module. Until then it is beside that name; dropped, it is removed.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    partial: PathBuf,
}

impl Partial {
    /// Makes a file that only this user may read, for contents that are nobody else's business.
    ///
    /// # Errors
    ///
    /// Those of `open`; the path names no file.
    pub fn create(path: &Path) -> io::Result<(Partial, File)> {
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let partial = path.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        Ok((Partial { path: path.to_owned(), partial }, file))
    }

    /// The name that it is to have.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its name, in place of a file that has it.
    ///
    /// # Errors
    ///
    /// Those of `rename`.
    pub fn finish(self) -> io::Result<()> {
        fs::rename(&self.partial, &self.path)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `finish` this file does not exist; before, it is an incomplete one, and useless.
        fs::remove_file(&self.partial).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::Partial;

    /// Goal: the name is that of the old file until the new one is complete, which nobody else may read; what is given
    /// up leaves nothing.
    #[test]
    fn a_file_has_its_name_when_it_is_complete() {
        let folder = std::env::temp_dir().join(format!("zfolio-partial-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("file");
        fs::write(&path, "old").unwrap();
        for (text, is_finished) in [("given up", false), ("new", true)] {
            let (partial, mut file) = Partial::create(&path).unwrap();
            assert_eq!(partial.path(), path);
            file.write_all(text.as_bytes()).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"old");
            if is_finished {
                partial.finish().unwrap();
            }
        }
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(Partial::create(&folder.join("..")).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
