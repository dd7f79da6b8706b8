//! The configuration of the daemon: its files, and the disks that they describe.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind::{InvalidData, IsADirectory, NotADirectory, NotFound};
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, CommandFactory as _};
use zfolio_block::conf::{Conf, Entry, Section};

use super::super::arguments::{self, AddArgs};
use super::resolved;
use crate::arguments::{Arguments, Command, parse_words};
use crate::device::serve::say;
use crate::failure::Failure;
use crate::spelling;

/// Where the file is looked for; the first that is there counts.
const PLACES: [&str; 3] =
    ["/etc/zfolio/devices.conf", "/run/zfolio/devices.conf", "/usr/lib/zfolio/devices.conf"];

/// A longer file is none of ours.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What zram-generator calls it, and what to write here. They are no other names of our keys: its numbers are MiB, and
/// it makes devices of the kernel, which a file system or swap can be on at once.
const OTHER_NAMES: [(&str, &str); 9] = [
    ("zram-size", "size, in bytes or with a suffix: 4096M for its 4096"),
    ("zram-resident-limit", "mem-limit, in bytes or with a suffix"),
    (
        "compression-algorithm",
        "algorithm, and recompress for others: zstd,level=3 for its zstd(level=3)",
    ),
    ("writeback-device", "writeback"),
    ("host-memory-limit", "nothing: leave the section out"),
    ("mount-point", "nothing: a client of the disk mounts it"),
    ("fs-type", "nothing: a client of the disk formats it"),
    ("options", "nothing: a client of the disk mounts it"),
    ("swap-priority", "nothing: a client of the disk uses it as swap"),
];

/// A disk as it is configured.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// Its name.
    pub(super) name: String,
    /// The place of its section.
    pub(super) at: String,
    /// The options of `zfolio device run`; or what is wrong with the section, in one line.
    pub(super) options: Result<Vec<String>, String>,
}

/// The files of a configuration.
#[derive(Debug)]
pub(super) struct Files {
    /// The main file, at any of these places.
    places: Vec<PathBuf>,
    /// Whether a user has named it, and so it has to be there.
    is_named: bool,
}

impl Files {
    pub(super) fn of(given: Option<&Path>) -> Files {
        let places = match given {
            Some(path) => vec![resolved(path)],
            None => PLACES.map(PathBuf::from).to_vec(),
        };
        Files { places, is_named: given.is_some() }
    }

    /// A path that stands for the configuration.
    pub(super) fn identity(&self) -> &Path {
        &self.places[0]
    }

    /// Reads all files. What is wrong with one disk is left for its settings.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or a line of it is not understood, or there is no disk. Only the last of several lines is
    /// returned, and the others are printed.
    pub(super) fn read(&self) -> Result<Vec<Settings>, Failure> {
        let mut conf = Conf::default();
        for path in self.paths()? {
            let shown = path.display().to_string();
            let text = read_text(&path).map_err(|error| {
                let line = format!("'{shown}': {error}");
                match error.kind() {
                    NotFound | InvalidData | IsADirectory => Failure::argument(line),
                    _ => Failure::machine(line),
                }
            })?;
            conf.read(&shown, &text).map_err(|faults| {
                let (last, others) = faults.split_last().expect("it is refused for something");
                others.iter().for_each(|fault| say(&fault.to_string()));
                Failure::argument(last.to_string())
            })?;
        }
        if conf.sections.is_empty() {
            let path = self.identity().display();
            return Err(Failure::argument(format!(
                "no disk is configured; accepted: [NAME] in {path}"
            )));
        }
        let mut owners = BTreeMap::new();
        Ok(conf.sections.iter().map(|section| Settings::of(section, &mut owners)).collect())
    }

    /// The files, in the order in which they are read.
    fn paths(&self) -> Result<Vec<PathBuf>, Failure> {
        let main = self.places.iter().find(|path| path.exists());
        // A file that has to be there and is not: whoever opens it says so.
        let main = main.or(self.is_named.then(|| &self.places[0]));
        let mut rest: Vec<PathBuf> = Vec::new();
        for place in &self.places {
            let mut directory = place.clone().into_os_string();
            directory.push(".d");
            let entries = match fs::read_dir(&directory) {
                Err(error) if matches!(error.kind(), NotFound | NotADirectory) => continue,
                entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
            };
            let entries = entries.map_err(|error| {
                Failure::machine(format!("'{}': {error}", Path::new(&directory).display()))
            })?;
            let is_conf = |path: &PathBuf| path.extension().is_some_and(|end| end == "conf");
            for path in entries.iter().map(fs::DirEntry::path).filter(is_conf) {
                if rest.iter().all(|before| before.file_name() != path.file_name()) {
                    rest.push(path);
                }
            }
        }
        rest.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
        Ok(main.cloned().into_iter().chain(rest).collect())
    }
}

/// The text of a file.
fn read_text(path: &Path) -> io::Result<String> {
    let invalid = |why| io::Error::new(InvalidData, why);
    let mut bytes = Vec::new();
    // A pipe can be read once. At SIGHUP the configuration is read again, and would wait for somebody who writes.
    if fs::metadata(path)?.file_type().is_fifo() {
        return Err(invalid("a pipe; accepted: a configuration"));
    }
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(invalid("more than 1M; accepted: a configuration"));
    }
    String::from_utf8(bytes).map_err(|_| invalid("not UTF-8; accepted: text"))
}

impl Settings {
    /// `owners` has what the disks of the sections before own, with their names.
    fn of(section: &Section, owners: &mut BTreeMap<String, String>) -> Settings {
        let options = options(section).and_then(|options| {
            let arguments = check(section, &options)?;
            own(section, &arguments, owners)?;
            Ok(options)
        });
        Settings { name: section.name.clone(), at: section.at.to_string(), options }
    }

    /// The words that start the disk.
    pub(super) fn words(&self, options: &[String]) -> Vec<String> {
        words(&self.name, options)
    }
}

/// The command line of a disk.
fn words(name: &str, options: &[String]) -> Vec<String> {
    let words = ["zfolio", "device", "run", "--background"].map(str::to_owned).into_iter();
    words.chain(options.iter().cloned()).chain(["--".to_owned(), name.to_owned()]).collect()
}

/// The options that a section stands for: `--key=value`.
fn options(section: &Section) -> Result<Vec<String>, String> {
    let mut definition = Arguments::command();
    definition.build();
    let command = ["device", "run"]
        .iter()
        .try_fold(&definition, |command, name| command.find_subcommand(name))
        .expect("there is this command");
    let keys: Vec<&Arg> = command.get_opts().filter(|option| !option.is_hide_set()).collect();
    let mut options = Vec::new();
    for (index, entry) in section.entries.iter().enumerate() {
        let Entry { key, value, .. } = entry;
        let known = keys.iter().find(|known| known.get_long() == Some(key));
        let Some(known) = known else {
            let names: Vec<&str> = keys.iter().filter_map(|known| known.get_long()).collect();
            return Err(wrong(section, Some(entry), &unknown(key, &names)));
        };
        let first = section.entries[..index].iter().find(|before| before.key == *key);
        if let Some(first) = first.filter(|_| !matches!(known.get_action(), ArgAction::Append)) {
            let why = format!("it is there twice, first in line {}; accepted: once", first.at.line);
            return Err(wrong(section, Some(entry), &why));
        }
        options.push(format!("--{key}={value}"));
    }
    Ok(options)
}

/// Why a key is not known.
fn unknown(key: &str, names: &[&str]) -> String {
    if let Some((_, here)) = OTHER_NAMES.iter().find(|(other, _)| *other == key) {
        return format!("a key of zram-generator; accepted here: {here}");
    }
    match spelling::meant(key, names.iter().copied()) {
        Some(meant) => format!("not known; did you mean '{meant}'?"),
        None => format!("not known; accepted: {}", names.join(", ")),
    }
}

/// Notes what the disk of the section owns, unless something of that is owned already.
fn own(
    section: &Section,
    arguments: &AddArgs,
    owners: &mut BTreeMap<String, String>,
) -> Result<(), String> {
    let mut own = BTreeMap::new();
    let all = arguments.owned();
    for (index, (key, what)) in all.iter().enumerate() {
        let Some(what) = what else { continue };
        if let Some(owner) = owners.get(what).or(own.get(what)) {
            let before = all[..index].iter().filter(|(other, _)| other == key).count();
            let entry = section.entries.iter().filter(|entry| entry.key == *key).nth(before);
            let why = format!("'{what}' is that of [{owner}] already; accepted: another one");
            return Err(wrong(section, entry, &why));
        }
        own.insert(what.clone(), section.name.clone());
    }
    owners.append(&mut own);
    Ok(())
}

/// Checks the options as a command line would be.
fn check(section: &Section, options: &[String]) -> Result<AddArgs, String> {
    let line: Vec<OsString> = words(&section.name, options).into_iter().map(Into::into).collect();
    let parsed = parse_words(&line).and_then(|parsed| {
        let arguments = run_arguments(parsed).expect("this is the command");
        arguments.check_sockets().and_then(|()| arguments.check())?;
        Ok(arguments)
    });
    parsed.map_err(|line| {
        // "--size: why", or "NAME: why".
        let (name, why) = line.split_once(": ").unwrap_or(("", &line));
        let entry =
            section.entries.iter().rfind(|entry| name.strip_prefix("--") == Some(&entry.key));
        match (entry, name.strip_prefix("--")) {
            (Some(entry), _) => wrong(section, Some(entry), why),
            (None, Some(keys)) => {
                wrong(section, None, &format!("{}: {why}", keys.replace("--", "")))
            }
            (None, None) => wrong(section, None, &line),
        }
    })
}

fn run_arguments(parsed: Arguments) -> Option<AddArgs> {
    match parsed.command {
        Command::Device(device) => match device.command {
            arguments::Command::Run(arguments) => Some(arguments),
            _ => None,
        },
        _ => None,
    }
}

/// `FILE:LINE: [NAME] KEY: WHY`
fn wrong(section: &Section, entry: Option<&Entry>, why: &str) -> String {
    let at = entry.map_or(&section.at, |entry| &entry.at);
    let key = entry.map_or_else(String::new, |entry| format!("{}: ", entry.key));
    // The hint of a command line without a command.
    let why = why.replace(
        "'zfolio --help' and 'zfolio COMMAND --help' list",
        "'zfolio device add --help' lists",
    );
    format!("{at}: [{}] {key}{why}", section.name)
}
