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

    fs::write(&corpus, &lines[..5000]).unwrap();
    let (code, out, err) = output_of(&train);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.starts_with("zfolio: --corpus: ") && err.lines().count() == 1, "{err}");
}
