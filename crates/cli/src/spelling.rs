//! Finds the command or option that was meant by an unknown one.

use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory};

use crate::arguments::Arguments;

/// The command that `given` is a misspelling of, at its place in the line `words` (which starts
/// with `zfolio`).
pub(crate) fn command(words: &[OsString], given: &str) -> Option<String> {
    let definition = Arguments::command();
    let commands = reached(&definition, words).get_subcommands();
    let names = commands.filter(|command| !command.is_hide_set()).map(Command::get_name);
    meant(given, names).map(str::to_owned)
}

/// The option that `given` is a misspelling of, with its dashes.
pub(crate) fn option(words: &[OsString], given: &str) -> Option<String> {
    let given = given.strip_prefix("--")?;
    let mut definition = Arguments::command();
    definition.build();
    let options = reached(&definition, words).get_arguments();
    let names =
        options.filter(|option| !option.is_hide_set()).filter_map(|option| option.get_long());
    // Behind `--` an option's own name is no option.
    meant(given, names).filter(|name| *name != given).map(|name| format!("--{name}"))
}

/// The option that `word` ends with, if that takes a value: `--limit`, `-l` or `-ql` are `--limit`.
pub(crate) fn valued(words: &[OsString], word: &str) -> Option<String> {
    let long = word.strip_prefix("--");
    let short =
        word.strip_prefix('-').filter(|_| long.is_none()).and_then(|word| word.chars().last());
    let is_it = |argument: &&Arg| {
        let is_named = argument.get_long().is_some_and(|name| long == Some(name));
        is_named || argument.get_short().is_some_and(|letter| short == Some(letter))
    };
    let definition = Arguments::command();
    let mut arguments = reached(&definition, words).get_arguments();
    let found = arguments.find(is_it).filter(|argument| argument.get_action().takes_values());
    found.and_then(Arg::get_long).map(|name| format!("--{name}"))
}

/// The innermost command that the words name.
fn reached<'a>(definition: &'a Command, words: &[OsString]) -> &'a Command {
    let mut command = definition;
    for word in words.iter().skip(1) {
        match command.find_subcommand(word) {
            Some(inner) => command = inner,
            None => break,
        }
    }
    command
}

/// The name that is most similar to `given`, if one is similar: at least two letters of its
/// beginning match, or there is at most one typing error in a name of up to four letters, two in a
/// longer name.
pub(crate) fn meant<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let slips = |name: &str| {
        let abbreviated = given.len() >= 2 && name.starts_with(given);
        if abbreviated { 1 } else { distance(given, name) }
    };
    let measured = names.map(|name| (slips(name), name));
    let alike = measured.filter(|(slips, name)| *slips <= if name.len() <= 4 { 1 } else { 2 });
    alike.min_by_key(|(slips, _)| *slips).map(|(_, name)| name)
}

/// How many letters were omitted, added, replaced, or swapped with the next one.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    // rows[i][j]: from the first i letters of `one` to the first j of `other`.
    let mut rows = vec![vec![0; other.len() + 1]; one.len() + 1];
    for i in 0..=one.len() {
        for j in 0..=other.len() {
            if i == 0 || j == 0 {
                rows[i][j] = i + j;
                continue;
            }
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::{distance, meant};

    #[test]
    fn distance_counts_slips() {
        for (one, other, slips) in [
            ("", "", 0),
            ("", "run", 3),
            ("rnu", "run", 1),
            ("usmem", "usemem", 1),
            ("ab", "ba", 1),
        ] {
            assert_eq!(distance(one, other), slips, "{one} {other}");
            assert_eq!(distance(other, one), slips, "{other} {one}");
        }
    }

    #[test]
    fn what_is_not_alike_is_not_meant() {
        let names = ["run", "stat", "doctor", "completions"];
        let meant = |given| meant(given, names.into_iter());
        assert_eq!(meant("stats"), Some("stat"));
        assert_eq!(meant("doc"), Some("doctor"));
        assert_eq!(meant("completion"), Some("completions"));
        assert_eq!(meant("python3"), None);
        assert_eq!(meant("r"), None);
        assert_eq!(meant(""), None);
    }
}
