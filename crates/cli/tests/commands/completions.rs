//! The completions, run by the shells themselves.

use std::path::Path;
use std::process::Command;

use crate::stage::{output_of, scratch};

/// Runs `shell` to complete the end of each line; returns what it offers, one line of words for
/// each.
fn offered(shell: &str, script: &str) -> Option<Vec<String>> {
    let (code, completions, err) = output_of(&["completions", shell]);
    assert_eq!(code, Some(0), "{err}");
    let file = scratch("completions").join(format!("zfolio.{shell}"));
    std::fs::write(&file, completions).expect("it is ours");
    let command = Path::new(env!("CARGO_BIN_EXE_zfolio"));
    let mut paths = vec![command.parent().expect("it is in a folder").to_path_buf()];
    paths.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut run = Command::new(shell);
    if shell == "zsh" {
        run.arg("-f");
    }
    run.arg("-c").arg(script).env("COMPLETIONS", &file).env("HOME", scratch("home"));
    run.env("PATH", std::env::join_paths(paths).expect("no colons")).current_dir(scratch("home"));
    let Ok(output) = run.output() else {
        eprintln!("SKIPPED: {shell} is not installed");
        return None;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.is_empty(), "{shell}: {errors}");
    Some(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Lines, and the offers for the last word of each.
const EXPECTED: [(&str, &str); 9] = [
    ("zfolio doc", "doctor"),
    ("zfolio bench u", "usemem"),
    ("zfolio help bench c", "codecs"),
    ("zfolio run --lim", "--limit"),
    ("zfolio run --algorithm lz4", "lz4 lz4hc"),
    ("zfolio completions ", "bash fish zsh"),
    ("zfolio run --stats a-fi", "a-file"),
    ("zfolio man --output a-fo", "a-folder/"),
    // A file name: shells complete those for unknown commands.
    ("zfolio run --limit 1G -- cat --  a-fi", "a-file"),
];

#[track_caller]
fn assert_offers(shell: &str, script: &str) {
    let home = scratch("home");
    std::fs::write(home.join("a-file"), "").expect("it is ours");
    std::fs::create_dir_all(home.join("a-folder")).expect("it is ours");
    let Some(answers) = offered(shell, script) else { return };
    assert_eq!(answers.len(), EXPECTED.len(), "{shell}: {answers:?}");
    for ((line, expected), answer) in EXPECTED.iter().zip(&answers) {
        let mut words: Vec<&str> = answer.split_whitespace().collect();
        words.sort_unstable();
        let words = words.join(" ");
        // bash adds the slash only when it puts the name on the line.
        assert_eq!(words.trim_end_matches('/'), expected.trim_end_matches('/'), "{shell}: {line}");
    }
}

/// The lines as quoted words, for a loop in a shell.
fn lines() -> String {
    EXPECTED.map(|(line, _)| format!("'{line}'")).join(" ")
}

#[test]
fn bash_completes() {
    let script = format!(
        r#"source "$COMPLETIONS"
        [[ $(complete -p zfolio) == *'-F _zfolio zfolio' ]] || echo 'not registered'
        for line in {}; do
            read -ra COMP_WORDS <<<"$line"
            [[ $line == *' ' ]] && COMP_WORDS+=('')
            COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMP_LINE=$line COMP_POINT=${{#line}}
            _zfolio
            echo "${{COMPREPLY[*]}}"
        done"#,
        lines()
    );
    assert_offers("bash", &script);
}

/// Goal: the same in bash, which splits words at '=' and ':'; compared is what it puts on the line.
#[test]
fn bash_completes_after_an_equals_sign() {
    let script = r#"source "$COMPLETIONS"
        COMP_WORDS=(zfolio run --algorithm = zs) COMP_CWORD=4
        _zfolio; echo "${COMPREPLY[*]}"
        COMP_WORDS=(zfolio run --unit =) COMP_CWORD=3
        _zfolio; echo "${#COMPREPLY[@]}"
        COMP_WORDS=(zfolio run --unit = 4K --algorithm zs) COMP_CWORD=6
        _zfolio; echo "${COMPREPLY[*]}"
        COMP_WORDS=(zfolio run --metrics localhost : 9100 --lim) COMP_CWORD=6
        _zfolio; echo "${COMPREPLY[*]}"
        COMP_WORDS=(zfolio run --metrics = localhost : 9100 --lim) COMP_CWORD=7
        _zfolio; echo "${COMPREPLY[*]}""#;
    let answers = offered("bash", script).expect("the other tests need bash, too");
    assert_eq!(answers, ["zstd", "10", "zstd", "--limit", "--limit"]);
}

#[test]
fn fish_completes() {
    let script = format!(
        r#"source $COMPLETIONS
        for line in {}
            echo (complete -C $line | string split -f 1 \t)
        end"#,
        lines()
    );
    assert_offers("fish", &script);
}

/// Goal: the same in zsh. Its widgets need a terminal, so the test records what they are asked for.
#[test]
fn zsh_completes() {
    let script = format!(
        r#"compdef() {{ :; }}
        source "$COMPLETIONS"
        compset() {{ :; }}
        _describe() {{ print -r -- ${{${{(P)2}}%%:*}}; }}
        _files() {{ if [[ $1 == -/ ]]; then print a-folder; else print a-file; fi; }}
        _normal() {{ [[ $words[1] == cat && $CURRENT == 3 ]] && print a-file; }}
        for line in {}; do
            words=(${{=line}})
            [[ $line == *' ' ]] && words+=('')
            CURRENT=$#words
            _zfolio
        done"#,
        lines()
    );
    assert_offers("zsh", &script);
}
