//! The programs: what each needs, reads and is started with.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
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
    /// OCaml: a Hashtbl of records
    Ocaml,
    /// ruby: a hash of structures
    Ruby,
    /// guile: a hash table of records
    Guile,
    /// Go: a map of pointers
    Go,
    /// luajit: a table of tables
    Luajit,
    /// php: an array of objects
    Php,
    /// mono: a Dictionary of objects
    Mono,
}

/// What a program needs, reads and is started with.
struct Recipe {
    /// How much it does, in a unit of its own: chosen so that it needs 100 to 170 MiB.
    amount: usize,
    /// The file that it reads.
    file: &'static str,
    input: Input,
    /// What turns the file into a program, if that is not done by the program itself; not measured.
    compile: &'static str,
    /// Its command line in its folder. `AMOUNT` stands for a number.
    start: &'static str,
    /// Packages of Debian that contain what `compile` and `start` begin with.
    packages: &'static str,
}

/// The contents of a file.
enum Input {
    Text(&'static str),
    /// Written by this, which gets the amount.
    Generated(fn(usize, &mut BufWriter<File>) -> io::Result<()>),
}

/// The [`Recipe`] of a file of `crates/bench/programs`.
macro_rules! recipe {
    ($amount:literal, $file:literal, $compile:literal, $start:literal, $packages:literal) => {
        Recipe {
            amount: $amount,
            file: $file,
            input: Input::Text(include_str!(concat!("../../programs/", $file))),
            compile: $compile,
            start: $start,
            packages: $packages,
        }
    };
}

impl Program {
    /// What runs unless `--program` or `--languages` says otherwise.
    pub(crate) const DEFAULTS: [Program; 8] = [
        Program::Objects,
        Program::Sqlite,
        Program::Sort,
        Program::Node,
        Program::Gcc,
        Program::Redis,
        Program::Java,
        Program::Perl,
    ];

    /// `--languages`.
    pub(crate) const LANGUAGES: [Program; 7] = [
        Program::Perl,
        Program::Ruby,
        Program::Guile,
        Program::Go,
        Program::Luajit,
        Program::Php,
        Program::Mono,
    ];

    /// The name on the command line and in the table.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no program is hidden");
        value.get_name().to_owned()
    }

    #[rustfmt::skip] // One line for each program, so that they compare.
    fn recipe(self) -> Recipe {
        match self {
            Program::Objects => recipe!(180_000, "objects.py", "", "python3 objects.py AMOUNT", "python3"),
            Program::Sqlite => recipe!(600_000, "tables.py", "", "python3 tables.py AMOUNT", "python3"),
            Program::Sort => Recipe {
                amount: 1_600_000,
                file: "lines",
                input: Input::Generated(generate::lines),
                compile: "",
                // With this much memory it sorts everything at once, without temporary files.
                start: "sort -S 1G --parallel=2 lines",
                packages: "coreutils",
            },
            Program::Node => recipe!(180_000, "heap.js", "", "node --max-old-space-size=2048 heap.js AMOUNT", "nodejs"),
            Program::Gcc => Recipe {
                amount: 1_600,
                file: "large.c",
                input: Input::Generated(generate::c_source),
                compile: "",
                start: "gcc -O0 -S -o - large.c",
                packages: "gcc",
            },
            Program::Redis => recipe!(70_000, "redis.conf", "", "redis-server redis.conf", "redis-server"),
            // The serial collector, and a heap that grows: what is resident is the data.
            Program::Java => recipe!(150_000, "Heap.java", "javac Heap.java",
                "java -XX:+UseSerialGC -Xms32m -Xmx320m -XX:-UsePerfData -cp . Heap AMOUNT", "default-jdk-headless"),
            Program::Perl => recipe!(800_000, "hashes.pl", "", "perl hashes.pl AMOUNT", "perl"),
            Program::Ocaml =>
                recipe!(480_000, "records.ml", "ocamlopt -o records records.ml", "./records AMOUNT", "ocaml-nox"),
            Program::Ruby => recipe!(300_000, "records.rb", "", "ruby records.rb AMOUNT", "ruby"),
            // It compiles the script when it runs first, into the folder (`surround`).
            Program::Guile => recipe!(280_000, "records.scm", "", "guile records.scm AMOUNT", "guile-3.0"),
            Program::Go =>
                recipe!(500_000, "records.go", "go build -o records records.go", "./records AMOUNT", "golang-go"),
            Program::Luajit => recipe!(300_000, "records.lua", "", "luajit records.lua AMOUNT", "luajit"),
            Program::Php => recipe!(250_000, "records.php", "", "php records.php AMOUNT", "php-cli"),
            Program::Mono =>
                recipe!(400_000, "Records.cs", "mcs -optimize Records.cs", "mono Records.exe AMOUNT",
                    "mono-mcs mono-runtime"),
        }
    }
}

impl Recipe {
    /// Writes what the program reads into `folder`.
    fn write_input(&self, folder: &Path, amount: usize) -> io::Result<()> {
        let path = folder.join(self.file);
        match self.input {
            Input::Text(text) => fs::write(path, text),
            Input::Generated(write) => {
                let mut out = BufWriter::new(File::create(path)?);
                write(amount, &mut out)?;
                out.flush()
            }
        }
    }

    /// Compiles it, if it has to be compiled.
    fn compile(&self, folder: &Path) -> io::Result<()> {
        let mut words = self.compile.split_whitespace();
        let Some(compiler) = words.next() else { return Ok(()) };
        let mut compile = Command::new(find(compiler).ok_or(io::ErrorKind::NotFound)?);
        let compiled = compile.args(words).current_dir(folder).stdin(Stdio::null()).output()?;
        if compiled.status.success() {
            return Ok(());
        }
        Err(io::Error::other(String::from_utf8_lossy(&compiled.stderr).into_owned()))
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
        let recipe = program.recipe();
        let mut commands = [recipe.compile, recipe.start].into_iter().filter_map(first_word);
        let missing = commands.find(|name| !name.starts_with("./") && find(name).is_none());
        if let Some(name) = missing {
            return Err(format!("{name} is not installed (Debian: {})", recipe.packages));
        }
        let folder = scratch.join(program.name());
        let amount = (recipe.amount * scale as usize).div_ceil(100);
        let written = fs::create_dir(&folder).and_then(|()| recipe.write_input(&folder, amount));
        written.map_err(|error| format!("its input cannot be written: {error}"))?;
        recipe.compile(&folder).map_err(|error| format!("it cannot be compiled: {error}"))?;
        let name = first_word(recipe.start).expect("a program is started by its name");
        let compiled = name.strip_prefix("./").map(|name| folder.join(name));
        let path = compiled.or_else(|| find(name)).ok_or("it is gone")?;
        Ok(Workload { program, path, folder, amount })
    }

    /// The program and its arguments.
    pub(crate) fn words(&self) -> Vec<String> {
        let path = self.path.display().to_string();
        let arguments = self.program.recipe().start.split_whitespace().skip(1);
        let arguments = arguments.map(|word| match word {
            "AMOUNT" => self.amount.to_string(),
            _ => word.to_owned(),
        });
        std::iter::once(path).chain(arguments).collect()
    }

    /// Gives `command`, which starts the program, its folder and an environment in which its output
    /// is the same each time.
    pub(crate) fn surround(&self, command: &mut Command) {
        command.current_dir(&self.folder).env("LC_ALL", "C");
        command.env("PYTHONHASHSEED", "0").env("PERL_HASH_SEED", "0").env_remove("NODE_OPTIONS");
        for name in
            ["JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "RUBYOPT", "GOGC", "GOMEMLIMIT", "OCAMLRUNPARAM"]
        {
            command.env_remove(name);
        }
        // What guile compiles is kept there.
        command.env("XDG_CACHE_HOME", &self.folder);
    }

    /// How many keys the client of redis uses; `None` for programs that need no client.
    pub(crate) fn keys(&self) -> Option<usize> {
        (self.program == Program::Redis).then_some(self.amount)
    }
}

fn first_word(line: &'static str) -> Option<&'static str> {
    line.split_whitespace().next()
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
    use super::{Program, Workload, find, first_word};
    use crate::programs::digest::Digest;
    use crate::scratch::Scratch;
    use clap::ValueEnum;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Goal: nobody forgets a new program. OCaml is only run if it is named.
    #[test]
    fn every_program_but_ocaml_is_in_a_set() {
        for program in Program::value_variants() {
            let default = Program::DEFAULTS.contains(program);
            let language = Program::LANGUAGES.contains(program);
            assert!(default || language || *program == Program::Ocaml, "{program:?}");
        }
    }

    /// Goal: the input of a program is the same each time, and its arguments name it or what was compiled of it.
    /// Method: each is written twice, with a hundredth of the work.
    #[test]
    fn input_is_the_same_each_time() {
        let scratch = Scratch::create("workload-test").expect("a folder of our own");
        for program in Program::value_variants() {
            let recipe = program.recipe();
            let input = |name: &str| {
                let folder = scratch.path().join(name);
                fs::create_dir_all(&folder).expect("our own folder");
                recipe.write_input(&folder, recipe.amount / 100).expect("our own folder");
                fs::read(folder.join(recipe.file)).expect("our own file")
            };
            assert_eq!(input("one"), input("other"), "{program:?}");
            let (path, folder) =
                (PathBuf::from(first_word(recipe.start).expect("a name")), PathBuf::new());
            let words = Workload { program: *program, path, folder, amount: 5 }.words();
            let stem = Path::new(recipe.file).file_stem();
            assert!(
                words.iter().any(|word| Path::new(word).file_stem() == stem),
                "{program:?}: {words:?}"
            );
            assert!(!words.iter().any(|word| word.contains("AMOUNT")));
        }
    }

    /// Goal: each program does its work, and the records are the same in each language, so that no program does less
    /// than another. Method: each that is installed runs with a hundredth of the work, or with 1000 records.
    #[test]
    fn every_program_does_its_work() {
        let scratch = Scratch::create("work-test").expect("a folder of our own");
        // redis-server ends when its client says so: `bench programs` runs both.
        for program in Program::value_variants().iter().filter(|one| **one != Program::Redis) {
            let mut workload = match Workload::prepare(*program, scratch.path(), 1) {
                Ok(workload) => workload,
                Err(reason) => {
                    assert!(reason.contains("is not installed (Debian: "), "{program:?}: {reason}");
                    continue;
                }
            };
            let records = program.recipe().file.to_lowercase().starts_with("records.");
            if records {
                workload.amount = 1000;
            }
            let words = workload.words();
            let mut command = Command::new(&words[0]);
            workload.surround(command.args(&words[1..]));
            let done = command.output().expect("it is installed");
            assert!(done.status.success() && !done.stdout.is_empty(), "{program:?}: {done:?}");
            if records {
                let text = String::from_utf8_lossy(&done.stdout);
                assert!(text.ends_with("1000 records, 164190881\n"), "{program:?}: {text}");
                let digest = Digest::of(&done.stdout[..]).to_string();
                assert_eq!(digest, "4a91b738a9ac36b0 of 303 bytes", "{program:?}: {text}");
            }
        }
    }

    #[test]
    fn what_is_not_installed_is_not_found() {
        assert!(find("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(find("no-such-program"), None);
    }
}
