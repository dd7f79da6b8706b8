//! The programs: what each needs, reads and is started with.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;

use super::generate;

/// The socket of redis-server, in its folder (`redis.conf`).
pub(crate) const SOCKET: &str = "socket";

/// A program and its work.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Program {
    /// python3: dicts, lists and strings
    Objects,
    /// python3: tables of SQLite in memory
    Sqlite,
    /// sort: lines of a text
    Sort,
    /// node: a Map of objects
    Node,
    /// gcc: one large C file
    Gcc,
    /// redis-server: filled, read and changed by a client
    Redis,
    /// java: a HashMap of objects
    Java,
    /// perl: hashes of arrays
    Perl,
}

impl Program {
    /// The name on the command line and in the table.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no program is hidden");
        value.get_name().to_owned()
    }

    /// The programs that must be installed; the first one is measured.
    pub(crate) fn needs(self) -> &'static [&'static str] {
        match self {
            Program::Objects | Program::Sqlite => &["python3"],
            Program::Sort => &["sort"],
            Program::Node => &["node"],
            Program::Gcc => &["gcc"],
            Program::Redis => &["redis-server"],
            Program::Java => &["java", "javac"],
            Program::Perl => &["perl"],
        }
    }

    /// How much it does, in a unit of its own: chosen so that it needs 130 to 320 MiB.
    fn amount(self) -> usize {
        match self {
            Program::Objects => 180_000,
            Program::Sqlite => 600_000,
            Program::Sort => 1_600_000,
            Program::Node => 180_000,
            Program::Gcc => 1_600,
            Program::Redis => 70_000,
            Program::Java => 150_000,
            Program::Perl => 800_000,
        }
    }

    /// Its arguments, when it runs in its folder.
    fn arguments(self, amount: usize) -> Vec<String> {
        let line = match self {
            Program::Objects => "objects.py AMOUNT",
            Program::Sqlite => "tables.py AMOUNT",
            // With this much memory it sorts everything at once, without temporary files.
            Program::Sort => "-S 1G --parallel=2 lines",
            Program::Node => "--max-old-space-size=2048 heap.js AMOUNT",
            Program::Gcc => "-O0 -S -o - large.c",
            Program::Redis => "redis.conf",
            // The serial collector, and a heap that grows: what is resident is the data.
            Program::Java => "-XX:+UseSerialGC -Xms32m -Xmx320m -XX:-UsePerfData -cp . Heap AMOUNT",
            Program::Perl => "hashes.pl AMOUNT",
        };
        let words = line.split(' ').map(|word| match word {
            "AMOUNT" => amount.to_string(),
            _ => word.to_owned(),
        });
        words.collect()
    }

    /// Writes what it reads into `folder`.
    fn write_input(self, folder: &Path, amount: usize) -> io::Result<()> {
        let file = |name: &str, contents: &str| fs::write(folder.join(name), contents);
        let create =
            |name: &str| Ok::<_, io::Error>(BufWriter::new(File::create(folder.join(name))?));
        match self {
            Program::Objects => file("objects.py", include_str!("../../programs/objects.py")),
            Program::Sqlite => file("tables.py", include_str!("../../programs/tables.py")),
            Program::Sort => generate::lines(amount, &mut create("lines")?),
            Program::Node => file("heap.js", include_str!("../../programs/heap.js")),
            Program::Gcc => generate::c_source(amount, &mut create("large.c")?),
            Program::Redis => file("redis.conf", include_str!("../../programs/redis.conf")),
            Program::Java => {
                file("Heap.java", include_str!("../../programs/Heap.java"))?;
                let javac = find("javac").ok_or(io::ErrorKind::NotFound)?;
                let mut compile = Command::new(javac);
                compile.arg("Heap.java").current_dir(folder).stdin(Stdio::null());
                let compiled = compile.output()?;
                let complaint = String::from_utf8_lossy(&compiled.stderr).into_owned();
                if compiled.status.success() { Ok(()) } else { Err(io::Error::other(complaint)) }
            }
            Program::Perl => file("hashes.pl", include_str!("../../programs/hashes.pl")),
        }
    }
}

/// A program that is installed, with its input.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) program: Program,
    path: PathBuf,
    /// Where its input is, and where it runs.
    pub(crate) folder: PathBuf,
    amount: usize,
}

impl Workload {
    /// Prepares `program` in a new folder within `scratch`. `scale` is the percentage of the usual
    /// amount of work. The error is the reason why it cannot run.
    pub(crate) fn prepare(
        program: Program,
        scratch: &Path,
        scale: u32,
    ) -> Result<Workload, String> {
        if let Some(name) = program.needs().iter().find(|name| find(name).is_none()) {
            return Err(format!("{name} is not installed"));
        }
        let path = find(program.needs()[0]).ok_or("it is gone")?;
        let folder = scratch.join(program.name());
        let amount = (program.amount() * scale as usize).div_ceil(100);
        let prepared = fs::create_dir(&folder).and_then(|()| program.write_input(&folder, amount));
        prepared.map_err(|error| format!("its input cannot be written: {error}"))?;
        Ok(Workload { program, path, folder, amount })
    }

    /// The program and its arguments.
    pub(crate) fn words(&self) -> Vec<String> {
        let path = self.path.display().to_string();
        std::iter::once(path).chain(self.program.arguments(self.amount)).collect()
    }

    /// Gives `command`, which starts the program, its folder and an environment in which its output
    /// is the same each time.
    pub(crate) fn surround(&self, command: &mut Command) {
        command.current_dir(&self.folder).env("LC_ALL", "C");
        command.env("PYTHONHASHSEED", "0").env("PERL_HASH_SEED", "0").env_remove("NODE_OPTIONS");
        command.env_remove("JAVA_TOOL_OPTIONS").env_remove("_JAVA_OPTIONS");
    }

    /// How many keys the client of redis uses; `None` for programs that need no client.
    pub(crate) fn keys(&self) -> Option<usize> {
        (self.program == Program::Redis).then_some(self.amount)
    }
}

/// The file of a program. The system's own comes first: version managers put scripts into `PATH`
/// that start a program through others.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/bin", "/bin"].map(PathBuf::from).into_iter();
    let folders = system.chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::{Program, Workload, find};
    use crate::scratch::Scratch;
    use clap::ValueEnum;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// All files below `folder`, with their contents.
    fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let entries =
            fs::read_dir(folder).expect("our own folder").map(|entry| entry.expect("read"));
        let mut files: Vec<_> = entries
            .map(|entry| (entry.path(), fs::read(entry.path()).expect("our own file")))
            .map(|(path, bytes)| (PathBuf::from(path.file_name().expect("a file")), bytes))
            .collect();
        files.sort();
        files
    }

    /// Goal: the input of a program is the same each time, and its arguments name it. Method: each
    /// is prepared twice, with a hundredth of the work.
    #[test]
    fn input_is_the_same_each_time() {
        let scratch = Scratch::create("workload-test").expect("a folder of our own");
        for program in Program::value_variants() {
            let prepare = |name: &str| {
                let folder = scratch.path().join(name);
                fs::create_dir_all(&folder).expect("our own folder");
                Workload::prepare(*program, &folder, 1)
            };
            let (one, other) = match (prepare("one"), prepare("other")) {
                (Ok(one), Ok(other)) => (one, other),
                (Err(reason), _) | (_, Err(reason)) => {
                    assert!(reason.contains("is not installed"), "{program:?}: {reason}");
                    continue;
                }
            };
            let files = contents(&one.folder);
            assert_eq!(files, contents(&other.folder), "{program:?}");
            assert_eq!(one.words(), other.words());
            let named = |(path, _): &(PathBuf, Vec<u8>)| {
                let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("our own name");
                one.words().iter().any(|word| word.split('.').next() == Some(stem))
            };
            assert!(files.iter().any(named), "{program:?}: {:?}", one.words());
            assert!(!one.words().iter().any(|word| word.contains("AMOUNT")));
        }
    }

    #[test]
    fn what_is_not_installed_is_not_found() {
        assert!(find("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(find("no-such-program"), None);
    }
}
