//! Documents that name the sources have all of them.

use std::fs;
use std::path::{Path, PathBuf};

/// The alternatives of a path with braces: `swap/{frame,read}.rs` is two.
fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((inside, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    inside.split(',').flat_map(|one| alternatives(&format!("{before}{one}{after}"))).collect()
}

/// All files below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("it is there").map(|entry| entry.expect("readable"));
    entries
        .flat_map(
            |entry| if entry.path().is_dir() { files(&entry.path()) } else { vec![entry.path()] },
        )
        .collect()
}

/// Goal: whoever looks for a source file finds it in the Map of ARCHITECTURE.md. Method: each file of each crate, but
/// for its tests, is named in the rows of the crate, or is in a folder that is.
#[test]
fn every_source_file_is_in_the_map() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("it is there");
    let map = text.split("\n## ").find(|section| section.starts_with("Map")).expect("it has one");
    let mut missing = Vec::new();
    for entry in fs::read_dir(root.join("crates")).expect("it is there") {
        let crate_path = entry.expect("readable").path();
        let name = crate_path.file_name().expect("it has one").to_string_lossy().into_owned();
        let (_, rows) = map.split_once(&format!("**crates/{name}**")).expect(&name);
        let rows = rows.split("\n| **").next().unwrap_or_default();
        // Between backquotes is every second part.
        let named: Vec<String> =
            rows.split('`').skip(1).step_by(2).flat_map(alternatives).collect();
        let source = crate_path.join("src");
        for file in files(&source) {
            let path = file.strip_prefix(&source).expect("below").to_string_lossy().into_owned();
            let is_test = path.ends_with("tests.rs") || path.contains("tests/");
            let is_named =
                |one: &String| *one == path || (one.ends_with('/') && path.starts_with(one));
            let is_source = path.ends_with(".rs") && path != "lib.rs" && !is_test;
            if is_source && !named.iter().any(is_named) {
                missing.push(format!("crates/{name}: {path}"));
            }
        }
    }
    missing.sort();
    assert!(missing.is_empty(), "not in the Map: {missing:#?}");
}
