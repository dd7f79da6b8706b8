//! The programs that the default run records: small work of programs that most machines have.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use zfolio_core::testing::Random;

const PYTHON: &str = "
import random
random.seed(1)
table = {i: [str(i), i] for i in range(12000)}
for _ in range(4):
    for key in random.sample(range(12000), 3000):
        table[key][1] += len(table[key][0])
print(sum(row[1] for row in sorted(table.values(), key=lambda row: row[1])))
";

const PERL: &str = "
srand(1);
my %t = map { $_ => \"value $_\" } 1 .. 12000;
my $s = 0;
for (1 .. 4) { for (1 .. 4000) { $s += length $t{1 + int rand 12000} } }
my @sorted = sort { $t{$a} cmp $t{$b} } keys %t;
print \"$s $sorted[0]\\n\";
";

const SQL: &str = "
create table t(k integer primary key, name text, v integer);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000)
  insert into t select i, 'name ' || (i * 7919 % 20000), i * 31 % 1000 from n;
create index by_name on t(name);
select count(*), sum(v) from t where name between 'name 3' and 'name 6';
select v % 10, count(*) from t group by 1;
update t set v = v + 1 where k % 3 = 0;
select sum(v) from t;
";

/// Lines of the file that sort sorts, of 40 bytes each.
const LINES: usize = 40_000;

/// A program to record.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) words: Vec<OsString>,
}

/// The programs that are installed. Their input is written to `folder`.
pub(crate) fn installed(folder: &Path) -> std::io::Result<Vec<Program>> {
    let lines = folder.join("lines");
    std::fs::write(&lines, text())?;
    let mut programs = Vec::new();
    let mut add = |name: &'static str, program: OsString, arguments: &[OsString]| {
        let words = std::iter::once(program).chain(arguments.iter().cloned()).collect();
        programs.push(Program { name, words });
    };
    // The python3 of some installations is a script that starts the real one.
    let python = answer("python3", &["-c", "import sys; print(sys.executable)"]);
    if let Some(python) = python {
        add("python3", python.trim().into(), &["-c".into(), PYTHON.into()]);
    }
    if answer("sort", &["--version"]).is_some() {
        add("sort", "sort".into(), &["-S2M".into(), "--parallel=1".into(), lines.into()]);
    }
    if answer("perl", &["-v"]).is_some() {
        add("perl", "perl".into(), &["-e".into(), PERL.into()]);
    }
    if answer("sqlite3", &["--version"]).is_some() {
        add("sqlite3", "sqlite3".into(), &[":memory:".into(), SQL.into()]);
    }
    Ok(programs)
}

/// What a program prints, if it can be run.
fn answer(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn text() -> String {
    let mut random = Random::new(1);
    let mut text = String::new();
    for line in 0..LINES {
        writeln!(text, "{:016x} line {line:016}", random.word())
            .expect("a String takes everything");
    }
    text
}
