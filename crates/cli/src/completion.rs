//! Completions for bash, zsh and fish.
//!
//! The script of a shell (`completion/zfolio.*`) asks `zfolio __complete -- WORD...` for the words
//! that could replace the last one. So commands and options are defined in one place, the
//! definition of the command line, and a new one is completed at once.
//!
//! The answer is lines of text. The first line says what the shell must do:
//!
//! | first line | meaning |
//! | --- | --- |
//! | `words` | offer the words that follow: one a line, a tab, what it means |
//! | `files`, `folders` | offer the names of files, of folders |
//! | `program N` | word N (counted from 0, after `zfolio`) is a program: complete it and its arguments |
//!
//! No error is ever printed: it would appear in the middle of the line that the user is typing.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Arg, ArgAction, Args, Command, CommandFactory, ValueEnum, ValueHint};
use zfolio_core::page::{UNIT_ORDER_MAX, UnitOrder};
use zfolio_core::size;
use zfolio_core::zcomp::{Algorithm, Choice};
use zfolio_sys::probe;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::output::print;
use crate::stats_file;

/// The name of the command that the scripts call.
pub(crate) const COMMAND: &str = "__complete";

/// Arguments of `zfolio completions`.
#[derive(Args, Debug)]
#[command(
    after_help = "'make install' and the Debian package put them where each shell looks for them.

Examples:
  source <(zfolio completions bash)                    in this shell
  zfolio completions bash > ~/.local/share/bash-completion/completions/zfolio
  zfolio completions fish > ~/.config/fish/completions/zfolio.fish
  zfolio completions zsh > ~/.zfunc/_zfolio            a folder of your fpath"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// The shells that there are completions for.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shell {
    /// GNU bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

/// Arguments of `zfolio __complete`.
#[derive(Args, Debug)]
pub(crate) struct CompleteArgs {
    /// What stands on the line after `zfolio`, up to the word that is to be completed
    #[arg(last = true)]
    words: Vec<OsString>,
}

/// Prints the script for `shell`.
///
/// # Errors
///
/// If it cannot be written.
pub(crate) fn script(shell: Shell) -> Result<ExitCode, Failure> {
    print(match shell {
        Shell::Bash => include_str!("completion/zfolio.bash"),
        Shell::Zsh => include_str!("completion/zfolio.zsh"),
        Shell::Fish => include_str!("completion/zfolio.fish"),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Answers the script of a shell.
///
/// # Errors
///
/// If the answer cannot be written.
pub(crate) fn complete(arguments: &CompleteArgs) -> Result<ExitCode, Failure> {
    let words: Vec<String> =
        arguments.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    print(&answer(&mut Arguments::command(), &words).text())?;
    Ok(ExitCode::SUCCESS)
}

/// What could replace the last word.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// Words and their meanings.
    Words(Vec<(String, String)>),
    Files,
    Folders,
    /// The number of the word that is a program, whose own completions are needed.
    Program(usize),
}

impl Answer {
    fn text(&self) -> String {
        match self {
            Answer::Words(words) => {
                let lines = words.iter().map(|(word, meaning)| format!("{word}\t{meaning}\n"));
                format!("words\n{}", lines.collect::<String>())
            }
            Answer::Files => "files\n".to_owned(),
            Answer::Folders => "folders\n".to_owned(),
            Answer::Program(place) => format!("program {place}\n"),
        }
    }
}

/// The state after the words so far.
struct Place<'a> {
    command: &'a Command,
    /// Options that were given.
    given: Vec<&'a Arg>,
    /// How many positional arguments were given.
    positionals: usize,
    /// The option whose value comes next.
    waiting: Option<&'a Arg>,
    /// Whether `--` was given: there are no options after it.
    options_ended: bool,
}

fn answer(definition: &mut Command, words: &[String]) -> Answer {
    definition.build();
    let Some((last, before)) = words.split_last() else { return Answer::Words(Vec::new()) };
    if before.first().is_some_and(|first| first == "help") {
        return commands_to_help(definition, &before[1..], last);
    }
    let mut place = Place {
        command: definition,
        given: Vec::new(),
        positionals: 0,
        waiting: None,
        options_ended: false,
    };
    for (index, word) in before.iter().enumerate() {
        if place.pass(word).is_none() {
            return Answer::Words(Vec::new());
        }
        if place.positional(place.positionals.wrapping_sub(1)).is_some_and(takes_a_program) {
            return Answer::Program(index);
        }
    }
    place.complete(last, before.len())
}

/// Whether `argument` is a program, so that all words after it are its arguments.
fn takes_a_program(argument: &Arg) -> bool {
    argument.get_value_hint() == ValueHint::CommandWithArguments
}

impl<'a> Place<'a> {
    fn positional(&self, index: usize) -> Option<&'a Arg> {
        self.command.get_positionals().nth(index)
    }

    fn option(&self, long: &str) -> Option<&'a Arg> {
        self.command.get_arguments().find(|arg| arg.get_long() == Some(long))
    }

    /// Processes a complete word; `None` if no valid line begins like this.
    fn pass(&mut self, word: &str) -> Option<()> {
        if self.waiting.take().is_some_and(|option| is_value(option, word)) {
            return Some(());
        }
        if !self.options_ended && word == "--" {
            self.options_ended = true;
        } else if !self.options_ended && word.len() > 1 && word.starts_with('-') {
            match word.strip_prefix("--") {
                Some(long) => self.pass_long(long),
                None => self.pass_short(&word[1..]),
            }
        } else if self.command.has_subcommands() {
            self.command = self.command.find_subcommand(word)?;
        } else {
            self.positionals += 1;
        }
        Some(())
    }

    fn pass_long(&mut self, long: &str) {
        let name = long.split('=').next().unwrap_or_default();
        let Some(option) = self.option(name) else { return };
        self.given.push(option);
        self.waiting = (takes_value(option) && name == long).then_some(option);
    }

    /// Processes the letters of short options. The first option that takes a value has the rest as
    /// its value.
    fn pass_short(&mut self, letters: &str) {
        for (index, letter) in letters.char_indices() {
            let mut arguments = self.command.get_arguments();
            let found = arguments.find(|argument| argument.get_short() == Some(letter));
            let Some(option) = found else { return };
            self.given.push(option);
            if takes_value(option) {
                let at_the_end = index + letter.len_utf8() == letters.len();
                self.waiting = at_the_end.then_some(option);
                return;
            }
        }
    }

    /// What could replace `word`, which is word number `index`.
    fn complete(&self, word: &str, index: usize) -> Answer {
        if let Some(option) = self.waiting.filter(|option| is_value(option, word)) {
            return values(option, "", word);
        }
        if !self.options_ended && word.starts_with('-') {
            if let Some((option, value)) = word.split_once('=') {
                let found = self.option(option.trim_start_matches('-'));
                let prefix = format!("{option}=");
                let nothing = Answer::Words(Vec::new());
                return found.map_or(nothing, |found| values(found, &prefix, value));
            }
            return Answer::Words(self.options(word));
        }
        match self.positional(self.positionals) {
            Some(argument) if takes_a_program(argument) => Answer::Program(index),
            Some(argument) => values(argument, "", word),
            None => Answer::Words(commands(self.command, word)),
        }
    }

    /// The options that begin with `word`, without options that were given and cannot be repeated.
    fn options(&self, word: &str) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for option in self.command.get_opts().chain(flags(self.command)) {
            let given = self.given.iter().any(|given| given.get_id() == option.get_id());
            if option.is_hide_set() || (given && !is_repeated(option)) {
                continue;
            }
            let long = option.get_long().map(|long| format!("--{long}"));
            // Short options are offered only if nothing but the dash was typed: the long ones
            // explain themselves.
            let short = option.get_short().filter(|_| word == "-").map(|short| format!("-{short}"));
            let names = [short, long].into_iter().flatten().filter(|name| name.starts_with(word));
            found.extend(names.map(|name| (name, meaning(option.get_help()))));
        }
        found
    }
}

/// The options that take no value.
fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|argument| !argument.is_positional() && !takes_value(argument))
}

fn takes_value(option: &Arg) -> bool {
    option.get_action().takes_values()
}

/// Whether `word` after `option` is its value. If the value is optional, a word that begins with a
/// dash is not.
fn is_value(option: &Arg, word: &str) -> bool {
    let optional = option.get_num_args().is_some_and(|count| count.min_values() == 0);
    !(optional && word.starts_with('-'))
}

fn is_repeated(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::Append | ArgAction::Count)
}

/// The subcommands of `command` that begin with `word`.
fn commands(command: &Command, word: &str) -> Vec<(String, String)> {
    let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
    let named = shown.map(|inner| (inner.get_name().to_owned(), meaning(inner.get_about())));
    named.filter(|(name, _)| name.starts_with(word)).collect()
}

/// The commands that can follow `zfolio help WORD...`.
fn commands_to_help(definition: &Command, before: &[String], word: &str) -> Answer {
    let mut command = Some(definition);
    for name in before {
        command = command.and_then(|outer| outer.find_subcommand(name));
    }
    Answer::Words(command.map_or_else(Vec::new, |command| commands(command, word)))
}

/// A help text as one line.
fn meaning(text: Option<&clap::builder::StyledStr>) -> String {
    text.map_or_else(String::new, |text| text.to_string().replace(['\n', '\t'], " "))
}

/// The values of `argument` that begin with `word`, each with `prefix` before it.
fn values(argument: &Arg, prefix: &str, word: &str) -> Answer {
    let mut found: Vec<(String, String)> = argument
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| (value.get_name().to_owned(), meaning(value.get_help())))
        .collect();
    match (argument.get_id().as_str(), argument.get_value_hint()) {
        ("algorithm", _) => found.extend(algorithms()),
        ("unit", _) => found.extend(units()),
        ("pid", _) => found.extend(managed_processes()),
        (_, ValueHint::DirPath) => return Answer::Folders,
        (_, ValueHint::AnyPath | ValueHint::FilePath) => return Answer::Files,
        _ => {}
    }
    found.retain(|(value, _)| value.starts_with(word));
    let prefixed = found.into_iter().map(|(value, meaning)| (format!("{prefix}{value}"), meaning));
    Answer::Words(prefixed.collect())
}

fn algorithms() -> impl Iterator<Item = (String, String)> {
    let auto = (Choice::AUTO.to_owned(), "lz4, or zstd while memory is short".to_owned());
    std::iter::once(auto).chain(Algorithm::ALL.iter().map(|algorithm| {
        let levels = algorithm.levels();
        let meaning = format!("levels {} to {}", levels.start(), levels.end());
        (algorithm.name().to_owned(), meaning)
    }))
}

fn units() -> impl Iterator<Item = (String, String)> {
    let orders = (0..=UNIT_ORDER_MAX).filter_map(|order| UnitOrder::from_bytes(4096 << order));
    orders.map(|order| {
        let meaning = if order == UnitOrder::DEFAULT { "the default" } else { "" };
        (size::display(order.bytes() as u64), meaning.to_owned())
    })
}

/// The processes that `zfolio stat` lists.
fn managed_processes() -> impl Iterator<Item = (String, String)> {
    let me = probe::effective_uid();
    let directories = stats_file::directories().into_iter().filter(move |(uid, _)| *uid == me);
    let files = directories.flat_map(|(_, directory)| stats_file::list(&directory));
    files.filter(|file| file.live).map(|file| (file.pid.to_string(), file.stats.command()))
}

#[cfg(test)]
mod tests {
    use super::{Answer, answer};
    use crate::arguments::Arguments;
    use clap::CommandFactory;

    fn answered(line: &str) -> Answer {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        answer(&mut Arguments::command(), &words)
    }

    #[track_caller]
    fn offered(line: &str) -> Vec<String> {
        match answered(line) {
            Answer::Words(words) => words.into_iter().map(|(word, _)| word).collect(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn commands_are_offered_where_a_command_can_stand() {
        assert_eq!(offered("do"), ["doctor"]);
        assert_eq!(
            offered("bench "),
            [
                "usemem",
                "programs",
                "auto",
                "codecs",
                "replacement",
                "spill",
                "swap",
                "zram",
                "recompress",
                "iaa"
            ]
        );
        assert_eq!(offered("help bench u"), ["usemem"]);
        assert_eq!(offered("help "), offered(""));
        assert!(offered("doctor ").is_empty() && offered("help run ").is_empty());
        assert!(!offered("").iter().any(|word| word == "man" || word.starts_with('_')));
    }

    #[test]
    fn options_are_offered_once() {
        assert_eq!(offered("run --li"), ["--limit"]);
        assert!(offered("run --limit 1G --li").is_empty());
        assert!(offered("run -ql1G --li").is_empty() && offered("run -ql1G --qu").is_empty());
        assert_eq!(offered("bench codecs --setting lz4:4K --set"), ["--setting"]);
        assert!(offered("stat -").contains(&"-w".to_owned()));
        assert!(offered("stat -- -").is_empty() && offered("nonsense -").is_empty());
    }

    #[test]
    fn values_are_offered_by_what_the_option_takes() {
        assert_eq!(offered("run --algorithm lz4"), ["lz4", "lz4hc"]);
        assert_eq!(offered("run --algorithm=zs"), ["--algorithm=zstd"]);
        assert_eq!(offered("run -a zs"), ["zstd"]);
        assert_eq!(offered("run --unit 1"), ["16K", "128K", "1M"]);
        assert_eq!(offered("bench usemem --against "), ["kernel"]);
        assert_eq!(offered("bench programs --program so"), ["sort"]);
        assert_eq!(offered("completions z"), ["zsh"]);
        assert_eq!(answered("run --stats x"), Answer::Files);
        assert_eq!(answered("man --output "), Answer::Folders);
        assert!(offered("run --limit ").is_empty());
        // The value of --watch is optional.
        assert_eq!(offered("stat --watch --js"), ["--json"]);
    }

    #[test]
    fn the_program_and_what_follows_is_left_to_the_shell() {
        assert_eq!(answered("run py"), Answer::Program(1));
        assert_eq!(answered("run -- py"), Answer::Program(2));
        assert_eq!(answered("run -l 1G python3 --"), Answer::Program(3));
        assert_eq!(answered("run -q -- git commit --am"), Answer::Program(3));
    }
}
