//! `zfolio bench codecs`: what it refuses before it measures, and what it prints.

use std::fs;

use crate::stage::{output_of, scratch, zfolio};

/// A corpus for measurements in units of 2M, which take the least time.
fn corpus(directory: &std::path::Path) -> String {
    let corpus = directory.join("corpus").to_str().expect("UTF-8").to_owned();
    let lines = (0..400_000_u64).map(|number| format!("{}: {}\n", number * 7919, number % 97));
    let mut bytes = lines.collect::<String>().into_bytes();
    bytes.resize(8 << 20, b'\n');
    fs::write(&corpus, bytes).expect("there is room");
    corpus
}

#[test]
fn a_dictionary_is_read_and_a_plot_drawn() {
    let directory = scratch("codecs");
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (corpus, dictionary, plot) = (corpus(&directory), path("typical.dict"), path("plot.svg"));
    let train =
        ["dict", "train", "--corpus", &corpus, "-u", "4K", "-o", &dictionary, "--size", "256"];
    let (code, _, err) = output_of(&train);
    assert_eq!(code, Some(0), "the smallest that is accepted: {err}");
    let bench = ["bench", "codecs", "--corpus", &corpus, "-r", "1", "--json", "--plot", &plot];
    let setting = format!("zstd,dict={dictionary}:2M");
    let (code, out, err) = output_of(&[&bench[..], &["--setting", &setting]].concat());
    assert_eq!(code, Some(0), "{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(report["settings"][0]["ratio"].as_f64().unwrap() > 2.0, "{out}");
    assert!(fs::read_to_string(&plot).unwrap().trim_end().ends_with("</svg>"));

    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let bench = zfolio(&[&bench[..], &["--setting", &setting]].concat()).stdout(full).output();
    let err = String::from_utf8(bench.as_ref().unwrap().stderr.clone()).unwrap();
    assert_eq!(bench.unwrap().status.code(), Some(1), "{err}");
    assert!(err.ends_with("standard output: No space left on device (os error 28)\n"), "{err}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_measured() {
    let directory = scratch("codecs-refused");
    let corpus = corpus(&directory);
    let nowhere = directory.join("none/plot.svg").to_str().unwrap().to_owned();
    let missing = format!("zstd,dict={}:2M", directory.join("none").display());
    for wrong in [["--plot", &nowhere], ["--setting", &missing]] {
        let bench = ["bench", "codecs", "--corpus", &corpus, "--setting", "lz4:2M"];
        let (code, out, err) = output_of(&[&bench[..], &wrong].concat());
        assert_eq!((code, out.as_str(), err.lines().count()), (Some(2), "", 1), "{wrong:?}: {err}");
        assert!(err.contains(wrong[0]), "{err}");
    }
}
