//! Manual pages, generated from the definition of the command line, so that `man` and `--help`
//! agree.
//!
//! Each command has a page, named in the way of git: `zfolio(1)`, `zfolio-run(1)`,
//! `zfolio-bench-usemem(1)`. The texts after a command's options become sections: a paragraph whose
//! first line is one word with a colon and whose other lines are indented ("Examples:") becomes a
//! section of its own; every other paragraph becomes part of the description. Indented lines are
//! printed unchanged.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::{Arg, ArgAction, Args, Command, CommandFactory, ValueHint};

use crate::arguments::{Arguments, command_path};
use crate::failure::Failure;
use crate::output::print;

/// Arguments of `zfolio man`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio man run | man -l -
  zfolio man --output share/man/man1")]
pub(crate) struct ManArgs {
    /// A command, and its own command if it has some
    #[arg(value_name = "COMMAND", conflicts_with = "output")]
    pub(crate) commands: Vec<String>,

    /// Write the pages of all commands into a folder
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) output: Option<PathBuf>,
}

/// A section that is not in the help.
struct Section {
    /// The command whose page has the section.
    of: &'static str,
    heading: &'static str,
    /// Terms and what they mean.
    entries: &'static [(&'static str, &'static str)],
}

/// Sections that `--help` does not have.
const MORE: [Section; 4] = [
    Section {
        of: "zfolio",
        heading: "EXIT STATUS",
        entries: &[
            ("0", "Done. doctor: 'zfolio run' can work here."),
            (
                "1",
                "doctor: it cannot. bench: a result is wrong, or a part of the measurement failed. Every command: \
                 standard output cannot be written.",
            ),
            (
                "2",
                "An argument was not accepted, or a PID is not managed, not one's own or not there.",
            ),
            ("122", "run --strict: a program's limit could not be held, and zfolio ended it."),
            (
                "125",
                "This machine or this installation can't: the kernel, a permission, the library.",
            ),
            ("126", "PROGRAM is there, but cannot be executed or cannot be managed."),
            ("127", "PROGRAM was not found, or the interpreter or loader that it names."),
            (
                "130",
                "bench, corpus: Ctrl-C. suggest: Ctrl-C ended the program. After another signal: 128 and its number.",
            ),
            (
                "that of PROGRAM",
                "It was started. If a signal ended it, the same signal ends zfolio.",
            ),
        ],
    },
    Section {
        of: "zfolio",
        heading: "FILES",
        entries: &[
            (
                "/dev/userfaultfd",
                "Read and write permission on it lets 'zfolio run' work without root.",
            ),
            (
                "/dev/shm/zfolio-UID/",
                "The figures of managed processes of the user UID, a file each.",
            ),
            ("../lib/zfolio/libzfolio_preload.so", "The library that managed programs load."),
            (
                "/etc/zfolio/devices.conf",
                "The disks of 'zfolio device daemon'; others beside it, see zfolio-device-daemon(1).",
            ),
            (
                "../lib/udev/rules.d/60-zfolio.rules",
                "The udev rule: members of the group zfolio may open /dev/userfaultfd.",
            ),
        ],
    },
    Section {
        of: "zfolio run",
        heading: "ENVIRONMENT OF ZFOLIO",
        entries: &[(
            "ZFOLIO_PRELOAD",
            "The library, if it is neither beside zfolio nor in ../lib/zfolio/.",
        )],
    },
    Section {
        of: "zfolio run",
        heading: "ENVIRONMENT OF THE PROGRAM",
        entries: &[
            ("LD_PRELOAD", "The library, before what is there already."),
            ("ZFOLIO_LIMIT, ZFOLIO_UNIT", "In bytes."),
            (
                "ZFOLIO_ALGORITHM, ZFOLIO_ACCELERATE, ZFOLIO_PER_PROCESS, ZFOLIO_STRICT, ZFOLIO_QUIET",
                "As the options say.",
            ),
            ("ZFOLIO_SPILL", "Where to spill to, a place a line; or none."),
            ("ZFOLIO_STALL", "In percent of the time; 0% without --stall."),
            ("ZFOLIO_SPILL_LIMIT", "In bytes."),
            (
                "ZFOLIO_MAX_POOL_PERCENT, ZFOLIO_ACCEPT_THRESHOLD_PERCENT, ZFOLIO_WRITE_BUDGET",
                "As the options say.",
            ),
            ("ZFOLIO_FALLS", "1 with --limit auto, for zfolio's library alone."),
            ("ZFOLIO_RUN", "The PID of zfolio."),
        ],
    },
];

/// Prints a page, or writes all of them.
///
/// # Errors
///
/// If there is no such command, or a page cannot be written.
pub(crate) fn man(arguments: &ManArgs) -> Result<ExitCode, Failure> {
    let mut definition = Arguments::command();
    let path = command_path(&mut definition, &arguments.commands)?;
    definition.build();
    let Some(folder) = &arguments.output else {
        let mut command = &definition;
        for name in path {
            command = command.find_subcommand(name).expect("command_path found it");
        }
        print(&page(command, &definition))?;
        return Ok(ExitCode::SUCCESS);
    };
    write_pages(folder, &definition, &definition)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of `command` and of its subcommands.
fn write_pages(folder: &Path, command: &Command, definition: &Command) -> Result<(), Failure> {
    let path = folder.join(format!("{}.1", page_name(command)));
    fs::write(&path, page(command, definition))
        .map_err(|error| Failure::output(format!("'{}': {error}", path.display())))?;
    shown(command).try_for_each(|inner| write_pages(folder, inner, definition))
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|inner| !inner.is_hide_set())
}

/// The name with spaces: `zfolio bench usemem`.
fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or(command.get_name())
}

/// The name with dashes: `zfolio-bench-usemem`.
fn page_name(command: &Command) -> String {
    full_name(command).replace(' ', "-")
}

/// The page of `command`, as a source for troff with the macros of man(7).
///
/// Words are not hyphenated: names of options, variables and files are copied from a page.
fn page(command: &Command, definition: &Command) -> String {
    let name = page_name(command);
    let version = definition.get_version().unwrap_or_default();
    let mut page = format!(
        ".\\\" Written by 'zfolio man'.\n.TH {} 1 \"\" \"zfolio {version}\" \"zfolio\"\n.nh\n.ad l\n",
        quoted(&name.to_uppercase())
    );
    let mut line = |text: &str| {
        page.push_str(text);
        page.push('\n');
    };
    line(".SH NAME");
    line(&format!("{} \\- {}", escaped(&name), escaped(&one_line(command.get_about()))));
    line(".SH SYNOPSIS");
    line(&synopsis(command));
    line(".SH DESCRIPTION");
    let about = command.get_long_about().or(command.get_about());
    line(&paragraphs(&about.map(ToString::to_string).unwrap_or_default()));
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (sections, prose): (Vec<&str>, Vec<&str>) =
        after.split("\n\n").filter(|text| !text.is_empty()).partition(|text| is_section(text));
    for text in prose {
        line(".PP");
        line(&paragraphs(text));
    }
    if shown(command).next().is_some() {
        line(".SH COMMANDS");
        for inner in shown(command) {
            line(&entry(
                &format!("\\fB{}\\fR(1)", escaped(&page_name(inner))),
                &one_line(inner.get_about()),
            ));
        }
    }
    let (positionals, options): (Vec<&Arg>, Vec<&Arg>) = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .partition(|arg| arg.is_positional());
    for (heading, arguments) in [("ARGUMENTS", positionals), ("OPTIONS", options)] {
        if !arguments.is_empty() {
            line(&format!(".SH {heading}"));
        }
        arguments.into_iter().for_each(|argument| line(&described(argument)));
    }
    for text in sections {
        let (heading, body) = text.split_once('\n').unwrap_or((text, ""));
        line(&format!(".SH {}", quoted(&heading.trim_end_matches(':').to_uppercase())));
        line(&unfilled(body));
    }
    for Section { heading, entries, .. } in MORE.iter().filter(|more| more.of == full_name(command))
    {
        line(&format!(".SH {}", quoted(heading)));
        for (term, text) in *entries {
            line(&entry(&format!("\\fB{}\\fR", escaped(term)), text));
        }
    }
    line(".SH SEE ALSO");
    line(&see_also(command, definition));
    page
}

/// The other pages to read: those of the sibling commands, and of the parent.
fn see_also(command: &Command, definition: &Command) -> String {
    let mut names: Vec<String> = vec!["zfolio".to_owned()];
    names.extend(shown(definition).map(page_name));
    if full_name(command) != full_name(definition) {
        names.extend(shown(command).map(page_name));
    }
    names.retain(|name| *name != page_name(command));
    let list = names.iter().map(|name| format!("\\fB{}\\fR(1)", escaped(name)));
    list.collect::<Vec<String>>().join(",\n")
}

/// The synopsis: `zfolio run [-l SIZE] PROGRAM...`
fn synopsis(command: &Command) -> String {
    let mut text = format!("\\fB{}\\fR", escaped(full_name(command)));
    if command.has_subcommands() {
        text.push_str("\n\\fICOMMAND\\fR");
    }
    let options = command.get_arguments().filter(|argument| !argument.is_positional());
    let options = options.filter(|option| !option.is_hide_set() && option.get_id() != "help");
    for argument in options.chain(command.get_positionals()) {
        let name = if argument.is_positional() { value(argument) } else { names(argument, "|") };
        let more = if argument.is_trailing_var_arg_set() { " [\\fIARGUMENT\\fR...]" } else { "" };
        let repeats =
            argument.is_positional() && matches!(argument.get_action(), ArgAction::Append);
        let more = if repeats && more.is_empty() { "..." } else { more };
        let (open, close) = if argument.is_required_set() { ("", "") } else { ("[", "]") };
        write!(text, "\n{open}{name}{more}{close}").expect("writing to a string");
    }
    text
}

/// The names of an option and its value (`--limit`, `-l`), in bold and italics.
fn names(option: &Arg, between: &str) -> String {
    let short = option.get_short().map(|short| format!("\\fB\\-{short}\\fR"));
    let long = option.get_long().map(|long| format!("\\fB\\-\\-{}\\fR", escaped(long)));
    let names: Vec<String> = [short, long].into_iter().flatten().collect();
    let mut value = value(option);
    let needs_equals = option.is_require_equals_set();
    let space = if value.is_empty() || needs_equals { "" } else { " " };
    if needs_equals {
        value = value.replacen('[', "[=", 1);
    }
    format!("{}{space}{value}", names.join(between))
}

/// The name of the value of an argument.
fn value(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let optional = argument.get_num_args().is_some_and(|count| count.min_values() == 0);
    let names = argument.get_value_names().unwrap_or_default();
    let names: Vec<String> =
        names.iter().map(|name| format!("\\fI{}\\fR", escaped(name))).collect();
    let name = names.join(" ");
    if optional && !argument.is_positional() { format!("[{name}]") } else { name }
}

/// An argument with all of its help.
fn described(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string);
    // clap's text for --help explains the difference between -h and --help; here there is only one
    // text.
    let is_help = argument.get_id() == "help";
    let mut text = if is_help { "Print help".to_owned() } else { help.unwrap_or_default() };
    let default: Vec<String> = argument
        .get_default_values()
        .iter()
        .filter(|_| argument.get_action().takes_values() && !argument.is_hide_default_value_set())
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    if !default.is_empty() {
        write!(text, " [default: {}]", default.join(" ")).expect("writing to a string");
    }
    for value in argument.get_possible_values() {
        if argument.get_action().takes_values() && !value.is_hide_set() {
            write!(text, "\n\n{}: {}", value.get_name(), one_line(value.get_help()))
                .expect("writing to a string");
        }
    }
    let name = if argument.is_positional() { value(argument) } else { names(argument, ", ") };
    entry(&name, &text)
}

/// A term, and its meaning below it.
fn entry(term: &str, text: &str) -> String {
    let paragraphs = text.split("\n\n").map(paragraphs);
    format!(".TP\n{term}\n{}", paragraphs.collect::<Vec<String>>().join("\n.IP\n"))
}

fn one_line(text: Option<&StyledStr>) -> String {
    text.map_or_else(String::new, |text| text.to_string().replace('\n', " "))
}

/// Whether a paragraph is a heading of one word, followed by indented lines.
fn is_section(text: &str) -> bool {
    let mut lines = text.lines();
    lines.next().is_some_and(|first| first.ends_with(':') && !first.contains(' '))
        && lines.all(|line| line.starts_with(' '))
}

/// Paragraphs of prose, whose lines troff fills; but not those of indented lines.
fn paragraphs(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let runs = lines.chunk_by(|line, next| line.starts_with(' ') == next.starts_with(' '));
    let runs = runs.map(|run| match run[0].starts_with(' ') {
        true => format!(".RS 4\n{}\n.RE", unfilled(&run.join("\n"))),
        false => run.iter().map(filled).collect::<Vec<String>>().join("\n"),
    });
    runs.collect::<Vec<String>>().join("\n")
}

/// A line of prose, or the space between two paragraphs.
fn filled(line: &&str) -> String {
    if line.is_empty() { ".PP".to_owned() } else { escaped_line(line.trim()) }
}

/// Lines that stay as they are, without the two spaces at the beginning of each.
fn unfilled(text: &str) -> String {
    let lines = text.lines().map(|line| escaped_line(line.strip_prefix("  ").unwrap_or(line)));
    format!(".nf\n{}\n.fi", lines.collect::<Vec<String>>().join("\n"))
}

/// A whole line. A dot or a quote at its beginning would be a troff request.
fn escaped_line(line: &str) -> String {
    let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
    format!("{guard}{}", escaped(line))
}

/// Makes dashes that can be copied, and quotes that stay straight.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '\\' => escaped.push_str("\\e"),
            '-' => escaped.push_str("\\-"),
            '\'' => escaped.push_str("\\(aq"),
            '`' => escaped.push_str("\\(ga"),
            '^' => escaped.push_str("\\(ha"),
            '~' => escaped.push_str("\\(ti"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// An argument of a troff request.
fn quoted(text: &str) -> String {
    format!("\"{}\"", escaped(text).replace('"', "\\(dq"))
}
