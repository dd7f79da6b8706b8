//! `zfolio dict train`, from a corpus to a dictionary that is accepted.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::stage::{output_of, scratch};

#[test]
fn a_corpus_becomes_a_dictionary() {
    let directory = scratch("dict");
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (corpus, dictionary) = (path("corpus"), path("typical.dict"));
    let lines: String = (0..200_000_u64)
        .map(|number| format!("{{\"id\": {}, \"name\": \"n{}\"}}\n", number * 7919, number % 97))
        .collect();
    fs::write(&corpus, &lines).unwrap();
    // A file that everybody may read is replaced by one that is its owner's.
    fs::write(&dictionary, "of everybody").unwrap();
    fs::set_permissions(&dictionary, fs::Permissions::from_mode(0o644)).unwrap();
    let train = ["dict", "train", "--corpus", &corpus, "-o", &dictionary, "--size", "16K"];
    let (code, out, err) = output_of(&train);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("zstd") && out.contains(" -> "), "{out}");
    assert!((8 << 10..=16 << 10).contains(&fs::read(&dictionary).unwrap().len()));
    // It is made of what was in memory.
    assert_eq!(fs::metadata(&dictionary).unwrap().permissions().mode() & 0o777, 0o600);
    // The dictionary is accepted: only the program is refused.
    let algorithm = format!("zstd,level=1,dict={dictionary}");
    let (code, _, err) = output_of(&["run", "--algorithm", &algorithm, "--", "no-such-program"]);
    assert_eq!(code, Some(127), "{err}");
    let mut names: Vec<_> =
        fs::read_dir(&directory).unwrap().map(|it| it.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["corpus", "typical.dict"], "nothing else is left");
    // What is no file is written to, and stays what it is.
    let (code, _, err) = output_of(&[&train[..4], &["-o", "/dev/null", "--size", "16K"]].concat());
    assert!(code == Some(0) && !fs::metadata("/dev/null").unwrap().is_file(), "{err}");

    // A link hides the comma, and the program would have read a path that ends there.
    let comma = directory.join("a,b");
    fs::create_dir(&comma).unwrap();
    fs::copy(&dictionary, comma.join("it.dict")).unwrap();
    std::os::unix::fs::symlink(comma.join("it.dict"), directory.join("link.dict")).unwrap();
    let algorithm = format!("zstd,level=1,dict={}", path("link.dict"));
    let (code, _, err) = output_of(&["run", "--algorithm", &algorithm, "--", "no-such-program"]);
    assert!(code == Some(2) && err.contains("accepted: a path without a comma"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");

    fs::write(&corpus, &lines[..5000]).unwrap();
    let (code, out, err) = output_of(&train);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.starts_with("zfolio: --corpus: ") && err.lines().count() == 1, "{err}");
}
