//! Parses the command line, and turns clap's errors into one line each.

use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use zfolio_sys::files;

use super::Arguments;
use crate::failure::Failure;
use crate::output;
use crate::spelling;

/// Parses the command line. Help and version are printed here, and end the process.
///
/// # Errors
///
/// If an argument is not accepted, or if help cannot be written.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Arguments, Failure> {
    let words: Vec<OsString> = words.collect();
    Arguments::try_parse_from(&words).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => match print_help(&error) {
            Err(failure) => failure,
            Ok(()) => std::process::exit(error.exit_code()),
        },
        _ => Failure::argument(one_line(&error, &words)),
    })
}

/// Prints clap's help or version. If the reader has closed the pipe, that is not an error.
fn print_help(error: &clap::Error) -> Result<(), Failure> {
    let is_open = if error.use_stderr() { Ok(()) } else { files::check_output() };
    match is_open.and_then(|()| error.print()) {
        Err(why) if why.kind() != io::ErrorKind::BrokenPipe => Err(output::failed(&why)),
        _ => Ok(()),
    }
}

/// Parses words that are no command line of a user's.
///
/// # Errors
///
/// One line, as for a command line.
pub(crate) fn parse_words(words: &[OsString]) -> Result<Arguments, String> {
    Arguments::try_parse_from(words).map_err(|error| one_line(&error, words))
}

/// Prints the help of the command named by `words`, as its `--help` does, and ends the process.
///
/// # Errors
///
/// If there is no such command, or if its help cannot be written.
pub(crate) fn help(words: &[String]) -> Result<ExitCode, Failure> {
    let mut definition = Arguments::command();
    let path = command_path(&mut definition, words)?;
    let line = ["zfolio"].into_iter().chain(path.iter().map(String::as_str)).chain(["--help"]);
    parse(line.map(OsString::from)).map(|_| ExitCode::SUCCESS)
}

/// Returns `words` if they name a command or a subcommand.
///
/// # Errors
///
/// If they do not: the same message as for an unknown command, with a similar name if there is one.
pub(crate) fn command_path<'a>(
    definition: &mut clap::Command,
    words: &'a [String],
) -> Result<&'a [String], Failure> {
    let mut command = &*definition;
    for (index, word) in words.iter().enumerate() {
        if let Some(inner) = command.find_subcommand(word) {
            command = inner;
            continue;
        }
        if !command.has_subcommands() {
            let path = words[..index].join(" ");
            let wrong = format!("'{word}': 'zfolio {path}' has no commands of its own");
            return Err(Failure::argument(format!("{wrong}; accepted: zfolio help {path}")));
        }
        let line = ["zfolio"].into_iter().chain(words[..=index].iter().map(String::as_str));
        let line: Vec<OsString> = line.map(OsString::from).collect();
        let error = definition.try_get_matches_from_mut(&line).expect_err("no such command");
        return Err(Failure::argument(one_line(&error, &line)));
    }
    Ok(words)
}

/// What is accepted where nothing closer is known: what the help of the command lists that `words` name.
fn hint(words: &[OsString]) -> String {
    let mut path = "zfolio".to_owned();
    let mut command = &Arguments::command();
    for word in words.iter().skip(1) {
        let Some(inner) = command.find_subcommand(word) else { break };
        path = format!("{path} {}", inner.get_name());
        command = inner;
    }
    format!("accepted: what '{path} --help' lists")
}

/// No program is given to a command that starts one.
fn program_missing(words: &[OsString]) -> String {
    let example = match words.get(1).and_then(|word| word.to_str()) {
        Some("suggest") => "suggest",
        Some("bench") => "bench replacement --record FILE",
        _ => "run --limit 2G",
    };
    format!(
        "PROGRAM: missing; accepted: a program and its arguments, as in 'zfolio {example} -- python3 train.py'"
    )
}

/// A word is not in UTF-8, of an argument that has to be; clap does not say which.
fn not_utf8(words: &[OsString]) -> String {
    let at = words.iter().position(|word| word.to_str().is_none()).unwrap_or_default();
    let given = words.get(at).map(|word| word.to_string_lossy()).unwrap_or_default();
    let before = at.checked_sub(1).and_then(|before| words[before].to_str());
    let what = match (given.split_once('='), before) {
        (Some((name, value)), _) if name.starts_with("--") => format!("{name}: '{value}'"),
        (_, Some(name)) if name.starts_with('-') && name != "--" => format!("{name}: '{given}'"),
        _ => format!("'{given}'"),
    };
    format!("{what} is not in UTF-8; accepted: a word in UTF-8")
}

/// clap's error as one line: the argument, what was given, and what is accepted.
fn one_line(error: &clap::Error, words: &[OsString]) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(", "),
        Some(ContextValue::StyledStr(text)) => text.to_string(),
        _ => String::new(),
    };
    let argument = context(ContextKind::InvalidArg);
    // "--limit <SIZE>", "--ublk[=<N>]", "[PID]", "<PROGRAM>...": the name is enough; of several that are missing the
    // first is.
    let name = argument.split("[=").next().unwrap_or_default();
    let name = name.trim_start_matches(['[', '<']).split([' ', ',']).next().unwrap_or_default();
    let name = name.trim_end_matches(['>', ']', '.']);
    let value = context(ContextKind::InvalidValue);
    match error.kind() {
        ErrorKind::ValueValidation => {
            match (Negative::joined(words, name, &value), std::error::Error::source(error)) {
                (Some(negative), _) => negative.line(words),
                // It says of which setting the value is.
                (None, Some(source)) if name == "NAME=VALUE" => source.to_string(),
                (None, Some(source)) => format!("{name}: {source}"),
                (None, None) => format!("{name}: '{value}' is not accepted; {}", hint(words)),
            }
        }
        ErrorKind::UnknownArgument => {
            match (Negative::apart(words, name), spelling::option(words, name)) {
                (Some(negative), _) => negative.line(words),
                (_, Some(meant)) => {
                    format!("argument '{name}' is not known; did you mean '{meant}'?")
                }
                (_, None) => format!("argument '{name}' is not known; {}", hint(words)),
            }
        }
        ErrorKind::InvalidSubcommand => {
            let given = context(ContextKind::InvalidSubcommand);
            match spelling::command(words, &given) {
                Some(meant) => format!("command '{given}' is not known; did you mean '{meant}'?"),
                None => format!("command '{given}' is not known; {}", hint(words)),
            }
        }
        ErrorKind::MissingRequiredArgument if name.starts_with("PROGRAM") => program_missing(words),
        ErrorKind::MissingRequiredArgument => match one_of(&argument) {
            Some(options) => format!("{options}: missing; accepted: one of them"),
            None => format!("{name}: missing; {}", hint(words)),
        },
        ErrorKind::InvalidValue if value.is_empty() => {
            format!("{name}: a value is missing; accepted: {argument}")
        }
        ErrorKind::InvalidValue => {
            let accepted = context(ContextKind::ValidValue);
            format!("{name}: '{value}' is not accepted; accepted: {accepted}")
        }
        ErrorKind::ArgumentConflict => {
            let other = context(ContextKind::PriorArg);
            let inner = other.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
            let other = inner.unwrap_or(&other);
            if other.split([' ', '[', '=']).next() == Some(name) {
                return format!("{name}: given more than once; accepted: once");
            }
            format!("{name}: not together with {other}; accepted: one of them")
        }
        ErrorKind::InvalidUtf8 => not_utf8(words),
        ErrorKind::TooManyValues => {
            format!("{name}: '{value}' is not accepted; accepted: no value")
        }
        _ => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            format!("{}; {}", first.trim_start_matches("error: "), hint(words))
        }
    }
}

/// The options of a group, of which clap names all: "<--nbd <ADDRESS>|--vhost-user <PATH>|--ublk[=<auto|N>]>".
fn one_of(argument: &str) -> Option<String> {
    let name = |option: &str| option.split([' ', '[', '>']).next().map(|name| format!("--{name}"));
    let names: Vec<_> = argument.strip_prefix("<--")?.split("|--").filter_map(name).collect();
    let (last, others) = names.split_last().filter(|(_, others)| !others.is_empty())?;
    Some(format!("{} or {last}", others.join(", ")))
}

/// A number below zero, the option that it was given to, and the words that the two are.
struct Negative<'a> {
    option: String,
    value: &'a str,
    at: Range<usize>,
}

/// Whether a word is a number below zero, possibly with a unit.
fn is_negative(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

impl<'a> Negative<'a> {
    /// The number below zero that clap took for an option of this name: `--limit -5M`.
    fn apart(words: &'a [OsString], name: &str) -> Option<Negative<'a>> {
        let texts = words.iter().map(|word| word.to_str().unwrap_or_default());
        let pairs = texts.clone().zip(texts.skip(1)).enumerate().filter(|_| is_negative(name));
        let mut pairs = pairs.filter(|(_, (_, value))| value.starts_with(name));
        pairs.find_map(|(at, (option, value))| {
            Some(Negative { option: spelling::valued(words, option)?, value, at: at..at + 2 })
        })
    }

    /// The number below zero that an option of this name refuses: `--limit=-5M`.
    fn joined(words: &[OsString], name: &str, value: &'a str) -> Option<Negative<'a>> {
        let at = words.iter().position(|word| {
            word.to_str().is_some_and(|word| word.len() > value.len() && word.ends_with(value))
        })?;
        let is_it = name.starts_with("--") && is_negative(value);
        is_it.then(|| Negative { option: name.to_owned(), value, at: at..at + 1 })
    }

    /// The line about it. Zero is too small, too, and where the option refuses it that says best what is accepted.
    fn line(&self, words: &[OsString]) -> String {
        let Negative { option, value, .. } = self;
        let accepted = ["0", value].into_iter().find_map(|value| self.accepted(words, value));
        let accepted = accepted.map_or_else(|| hint(words), |text| format!("accepted: {text}"));
        format!("{option}: '{value}' is below zero; {accepted}")
    }

    /// What the option accepts, as it says where it refuses `value`.
    fn accepted(&self, words: &[OsString], value: &str) -> Option<String> {
        let mut line = words.to_vec();
        // As one word, so that clap takes the value for one.
        line.splice(self.at.clone(), [format!("{}={value}", self.option).into()]);
        let line = one_line(&Arguments::try_parse_from(line).err()?, &[]);
        let why = line.strip_prefix(&self.option)?;
        why.split_once("; accepted: ").map(|(_, accepted)| accepted.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::{Arguments, Command, Limit};
    use super::{help, parse};

    fn words(line: &str) -> impl Iterator<Item = std::ffi::OsString> {
        ["zfolio"].into_iter().chain(line.split_whitespace()).map(Into::into)
    }

    fn refused(line: &str) -> String {
        let failure = match parse(words(line)) {
            Err(failure) => failure,
            Ok(Arguments { command: Command::Help(asked) }) => {
                help(&asked.commands).expect_err(line)
            }
            Ok(_) => panic!("{line} is accepted"),
        };
        assert_eq!(failure.status(), 2, "{line}");
        failure.to_string()
    }

    #[track_caller]
    fn assert_refused(cases: &[(&str, &str)]) {
        for (line, expected) in cases {
            let refused = refused(line);
            assert!(refused.contains(expected), "{line}: {refused}");
            assert!(refused.starts_with("zfolio: ") && !refused.contains('\n'), "{refused}");
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        fn assert_examples(command: &mut clap::Command) {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{help}");
            // The command `help` of a command is clap's own.
            let inner = command.get_subcommands_mut().filter(|inner| inner.get_name() != "help");
            inner.filter(|inner| !inner.is_hide_set()).for_each(assert_examples);
        }
        let mut definition = Arguments::command();
        let commands = definition.get_subcommands_mut().filter(|command| !command.is_hide_set());
        commands.for_each(assert_examples);
    }

    #[test]
    fn run_takes_what_follows_as_it_is() {
        for line in ["run -l 1G -- ls -l --limit 7", "run -l 1G ls -l --limit 7"] {
            let Command::Run(run) = parse(words(line)).expect(line).command else { panic!() };
            assert_eq!(run.limit, Some(Limit::Bytes(1 << 30)));
            assert_eq!(run.program, ["ls", "-l", "--limit", "7"]);
            assert_eq!(run.unit, None);
        }
    }

    #[test]
    fn refusals_name_the_argument_what_was_given_and_what_is_accepted() {
        let cases = [
            ("run --limit 12Q -- true", "--limit: '12Q' is not a size; accepted:"),
            ("run --limit 0% -- true", "--limit: '0%' is not a share; accepted: 1% to 100%"),
            ("run --limit 101% -- true", "--limit: '101%' is not a share"),
            ("run --limit x% -- true", "--limit: 'x%' is not a share"),
            ("run --limit 0.0001% -- true", "--limit: '0.0001%'"),
            ("run -q -v -- true", "not together with"),
            ("run -l 64M --limit 65M true", "--limit: given more than once; accepted: once"),
            ("corpus capture abc -o x", "PID: 'abc' is not a process id; accepted: 1 or more"),
            ("run --limit 31M -- true", "--limit: '31M' is too small; accepted: 32M or more"),
            ("run --limit -- true", "--limit"),
            ("set", "PID: missing; accepted:"),
            (
                "device add x --size 1M --nbd /y --recompress-age 0",
                "--recompress-age: '0' is not accepted; accepted: seconds, 1 to 1000000000",
            ),
            (
                "device add x --size 1M --nbd /y --writeback /z --writeback-age 1.5",
                "--writeback-age: '1.5' is not accepted; accepted: seconds, 1 to 1000000000",
            ),
            ("device set", "NAME: missing; accepted:"),
            ("device add x --size 1M --ublk=99999999", "--ublk: '99999999' is not the number"),
            ("run --unit 48K -- true", "--unit: '48K' is not a unit; accepted: a power of two"),
            ("run --unit 2K -- true", "--unit: '2K' is not a unit"),
            ("run --unit 4M -- true", "--unit: '4M' is not a unit"),
            ("run --algorithm lz5 -- true", "--algorithm: "),
            ("run --algorithm zstd,level=99 -- true", "--algorithm: "),
            ("run --algorithm zstd,dict=/nowhere -- true", "--algorithm: dictionary '/nowhere': "),
            ("run --algorithm zstd,dict=/ -- true", "--algorithm: dictionary '/': "),
            ("run --algorithm zstd,level=1,level=1 -- true", "--algorithm: zstd has parameter"),
            ("run --frob -- true", "argument '--frob' is not known; accepted:"),
            (
                "run --metrics localhost:99999 true",
                "--metrics: 'localhost:99999' is not an address of this machine with a port; accepted: localhost:PORT, \
                 127.0.0.1:PORT, [::1]:PORT; PORT is 0 to 65535",
            ),
            ("run --quiet -5 true", "argument '-5' is not known; accepted:"),
            ("run -q -5 true", "argument '-5' is not known; accepted:"),
            ("run -5 true", "argument '-5' is not known; accepted:"),
            ("run", "PROGRAM: missing; accepted:"),
            ("run --limit 1G", "PROGRAM: missing; accepted:"),
            ("fly", "command 'fly' is not known; accepted:"),
            ("rnu -- true", "command 'rnu' is not known; did you mean 'run'?"),
            ("bench usmem", "command 'usmem' is not known; did you mean 'usemem'?"),
            (
                "bench codecs --agianst kernel",
                "'--agianst' is not known; did you mean '--against'?",
            ),
            (
                "bench codecs --against krnel",
                "--against: 'krnel' is not accepted; accepted: kernel",
            ),
            ("help bench codex", "command 'codex' is not known; did you mean 'codecs'?"),
            ("help run true", "'true': 'zfolio run' has no commands of its own"),
            ("dict train -o x", "--corpus: missing; accepted:"),
            ("dict train --corpus c -o x --size 2M", "--size: '2M' is not accepted; accepted: 256"),
            ("dict train --corpus c -o x --unit 5K", "--unit: '5K' is not a unit"),
            ("stat abc", "PID: 'abc' is not a process id; accepted:"),
            ("stat 0", "PID: '0' is not a process id"),
            ("stat --watch 0", "--watch: '0' is not a time; accepted:"),
            ("stat --all 7", "not together with"),
            (
                "stat --zswap --watch",
                "--zswap: not together with --watch [<SECONDS>]; accepted: one",
            ),
        ];
        assert_refused(&cases);
    }

    #[test]
    fn what_is_no_number_or_no_name_is_refused_with_what_is() {
        assert_refused(&[
            ("bench spill -n abc", "-n: 'abc' is not a whole number; accepted: 1 to 48"),
            ("suggest --points 1 true", "--points: '1' is not accepted; accepted: 2 to 1000"),
            ("run --limit atuo true", "as in 256M, 1.5G, 1048576; or N% or auto"),
            ("set 1 limit=1X", "as in 256M, 1.5G, 1048576; or N%"),
            ("run --progress=1 true", "--progress: '1' is not accepted; accepted: no value"),
            ("device save x", "FILE: missing; accepted: what 'zfolio device save --help' lists"),
            (
                "bench replacement --share 3/2",
                "--share: '3/2' is not a share; accepted: a fraction",
            ),
            ("bench replacement --policy x", "--policy: 'x' is not a policy; accepted: opt, lru,"),
            ("suggest", "as in 'zfolio suggest -- python3 train.py'"),
            ("run --limit 0.5% -- true", "accepted: 1% to 100%, as in 50% or 12.5%"),
            ("run --limit 1e1% -- true", "--limit: '1e1%' is not a share"),
            ("set 1 colour=red", "accepted: limit=SIZE|N%, stall=N%,"),
            ("bench usemem --setting x", "--setting: 'x' is not a setting; accepted: ALGORITHM"),
        ]);
    }

    /// Goal: no option of any command refuses a value without saying what it accepts.
    #[test]
    fn every_option_says_what_it_accepts() {
        /// The lines about `:::` as the value of each option of the command and of its own commands.
        fn refusals(command: &clap::Command, path: &str) -> Vec<String> {
            let inner = command.get_subcommands().flat_map(|inner| {
                let path = format!("{path} {}", inner.get_name());
                refusals(inner, &path)
            });
            let options = command.get_opts().filter_map(|option| {
                let line = format!("{path} --{}=:::", option.get_long()?);
                Some(format!("{line}: {}", parse(words(&line)).err()?))
            });
            inner.chain(options).collect()
        }
        let refusals = refusals(&Arguments::command(), "");
        // Paths and texts are accepted as they are, and then something else may be missing.
        let about_it = refusals.iter().filter(|line| line.matches(":::").count() > 1).count();
        assert!(about_it > 60, "{about_it}: {refusals:#?}");
        let bad = refusals.iter().filter(|line| !line.contains("accepted: "));
        let bad: Vec<_> = bad.collect();
        assert!(bad.is_empty(), "{bad:#?}");
    }

    /// Goal: a number below zero is refused with what the option accepts, however it is given.
    #[test]
    fn numbers_below_zero_are_too_small() {
        assert_refused(&[
            (
                "run --write-budget -5G -- true",
                "--write-budget: '-5G' is below zero; accepted: a size",
            ),
            ("run --limit -5 true", "--limit: '-5' is below zero; accepted: 32M or more"),
            ("run --limit=-5M true", "--limit: '-5M' is below zero; accepted: 32M or more"),
            ("run --limit -5M", "--limit: '-5M' is below zero; accepted: 32M or more"),
            ("run -l -5 true", "--limit: '-5' is below zero; accepted: 32M or more"),
            ("run -l-5 true", "--limit: '-5' is below zero; accepted: 32M or more"),
            ("run -ql -5G -- true", "--limit: '-5G' is below zero; accepted: 32M or more"),
            ("run --stall=-1% -- true", "--stall: '-1%' is below zero; accepted: 0.01% to 50%, or"),
            ("iaa setup --queues -1", "--queues: '-1' is below zero; accepted: 1 or more"),
            ("suggest --share=-1 true", "--share: '-1' is below zero; accepted: 10 to 90"),
            ("device add x -s -5M", "--size: '-5M' is below zero; accepted: 4K or more"),
        ]);
    }

    #[test]
    fn an_algorithm_is_named_with_what_is_accepted() {
        for (given, accepted) in
            [("lz5", "zstd"), ("zstd,level=99", "accepted"), ("zstd,frob=7", "level")]
        {
            let refused = refused(&format!("run --algorithm {given} -- true"));
            assert!(refused.contains(accepted), "{refused}");
        }
    }
}
