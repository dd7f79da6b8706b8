//! A made-up sysfs in a directory, for tests.

use std::fs;
use std::path::PathBuf;

/// A directory that is removed at the end.
pub(crate) struct Tree(pub(crate) PathBuf);

impl Tree {
    pub(crate) fn new(name: &str) -> Tree {
        let path = std::env::temp_dir().join(format!("zfolio-iaa-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Tree(path)
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    pub(crate) fn queue(&self, name: &str, attributes: &[(&str, &str)]) {
        let usual = [("state", "enabled"), ("type", "user"), ("mode", "dedicated"), ("size", "64")];
        for (attribute, value) in usual.iter().chain(attributes) {
            self.write(&format!("bus/dsa/devices/{name}/{attribute}"), value);
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}
