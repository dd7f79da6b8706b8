//! The manual pages: every command has one, and formatters accept them without complaint.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::stage::{output_of, scratch};

/// All pages. They are written once: a test would read what another one is just writing again.
fn pages() -> &'static [PathBuf] {
    static PAGES: OnceLock<Vec<PathBuf>> = OnceLock::new();
    PAGES.get_or_init(|| {
        let folder = scratch("man");
        let (code, _, err) = output_of(&["man", "--output", folder.to_str().expect("plain")]);
        assert_eq!(code, Some(0), "{err}");
        let entries = fs::read_dir(folder).expect("it is ours");
        entries.map(|entry| entry.expect("readable").path()).collect()
    })
}

#[test]
fn every_command_has_a_page_and_every_option_is_on_it() {
    let pages = pages();
    for page in pages {
        let name = page.file_stem().expect("it has a name").to_str().expect("plain");
        let words: Vec<&str> = name.split('-').skip(1).chain(["--help"]).collect();
        let (code, help, err) = output_of(&words);
        assert_eq!(code, Some(0), "{words:?}: {err}");
        let text = fs::read_to_string(page).expect("it was written").replace('\\', "");
        let options =
            help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 2);
        for option in options {
            let option = option.trim_end_matches([',', '.', ']', ')', ':', ';', '\'']);
            // A value that needs an equals sign is part of the word.
            let option = option.split('[').next().expect("there is a first part");
            assert!(text.contains(option), "{name}: {option}");
        }
    }
    let run = |path: &PathBuf| path.ends_with("zfolio-run.1");
    assert!(pages.len() >= 14 && pages.iter().any(run), "{pages:?}");
}

#[test]
fn a_page_can_be_printed_and_a_wrong_name_is_refused() {
    let (code, out, _) = output_of(&["man", "bench", "codecs"]);
    assert!(code == Some(0) && out.contains(".TH \"ZFOLIO\\-BENCH\\-CODECS\" 1"), "{out}");
    let (code, _, err) = output_of(&["man", "bench", "codec"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("did you mean 'codecs'?"), "{err}");
    let (code, _, err) = output_of(&["man", "--output", "/nonexistent"]);
    assert!(code == Some(1) && err.contains("'/nonexistent/zfolio.1'"), "{err}");
}

/// Goal: what is set apart in the help is set apart on the page, and the rest is no heading. An example of a
/// configuration became one line of prose, and the sentence before it the heading of a section.
#[test]
fn prose_is_no_heading_and_examples_keep_their_lines() {
    let daemon = output_of(&["man", "device", "daemon"]).1;
    let example = "as keys:\n.PP\n.RS 4\n.nf\n[cache]\nsize = min(ram / 2, 4G)\n";
    assert!(daemon.contains(example), "{daemon}");
    for page in pages() {
        let text = fs::read_to_string(page).expect("it was written");
        for heading in text.lines().filter_map(|line| line.strip_prefix(".SH ")) {
            assert!(heading.len() <= 28, "{}: {heading}", page.display());
        }
        let (_, others) = text.rsplit_once(".SH SEE ALSO\n").expect("each page has it");
        let mut names: Vec<&str> = others.lines().map(|line| line.trim_end_matches(',')).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "{}: a page is named twice", page.display());
    }
}

#[test]
fn the_formatters_have_nothing_to_say() {
    // A page has no date, so that all pages of one version are the same, wherever they were made.
    let formatters: [&[&str]; 2] =
        [&["groff", "-man", "-ww", "-z", "-Tutf8"], &["mandoc", "-Tlint", "-Wwarning"]];
    for formatter in formatters {
        for page in pages() {
            let Ok(output) = Command::new(formatter[0]).args(&formatter[1..]).arg(page).output()
            else {
                eprintln!("SKIPPED: {} is not installed", formatter[0]);
                break;
            };
            let printed = [output.stdout, output.stderr].concat();
            let printed = String::from_utf8_lossy(&printed);
            let printed: Vec<&str> =
                printed.lines().filter(|line| !line.contains("missing date")).collect();
            assert!(printed.is_empty(), "{}: {printed:?}", page.display());
        }
    }
}
