//! `zfolio device list`: the disks in the columns of zramctl.

use std::process::ExitCode;

use serde_json::{Value, json};
use zfolio_block::attributes::{APART_STAT, POLICY_STAT, WRITEBACK_STAT};
use zfolio_core::size;
use zfolio_core::zram::{BdStat, IoStat, MmStat};

use super::arguments::{Columns, ListArgs};
use super::serve::say;
use super::{Unanswered, directory, names, request_of};
use crate::failure::Failure;
use crate::output;
use crate::table::Table;

/// A column of the list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Column {
    Name,
    Algorithm,
    Disksize,
    Data,
    Compr,
    Total,
    Streams,
    ZeroPages,
    MemLimit,
    MemUsed,
    Migrated,
    CompRatio,
    Address,
}

const ALL: [(Column, &str); 13] = [
    (Column::Name, "NAME"),
    (Column::Algorithm, "ALGORITHM"),
    (Column::Disksize, "DISKSIZE"),
    (Column::Data, "DATA"),
    (Column::Compr, "COMPR"),
    (Column::Total, "TOTAL"),
    (Column::Streams, "STREAMS"),
    (Column::Address, "ADDRESS"),
    (Column::ZeroPages, "ZERO-PAGES"),
    (Column::MemLimit, "MEM-LIMIT"),
    (Column::MemUsed, "MEM-USED"),
    (Column::Migrated, "MIGRATED"),
    (Column::CompRatio, "COMP-RATIO"),
];

/// How many of them are shown unless others are asked for: those of zramctl, with ADDRESS in place of
/// MOUNTPOINT.
const DEFAULT: usize = 8;

impl Column {
    fn heading(self) -> &'static str {
        ALL.iter().find(|(column, _)| *column == self).expect("all columns have one").1
    }

    /// Reads a list of columns.
    pub(super) fn parse_all(given: &str) -> Result<Columns, String> {
        let (mut columns, names) = match given.strip_prefix('+') {
            Some(more) => (first(DEFAULT), more),
            None => (Vec::new(), given),
        };
        for name in names.split(',') {
            let known = ALL.iter().find(|(_, heading)| heading.eq_ignore_ascii_case(name));
            let (column, _) = known.ok_or_else(|| {
                let accepted: Vec<&str> = ALL.iter().map(|(_, heading)| *heading).collect();
                format!("'{name}' is not a column; accepted: {}", accepted.join(", "))
            })?;
            columns.push(*column);
        }
        Ok(Columns(columns))
    }
}

/// The figures of a disk.
#[derive(Debug)]
pub(super) struct Disk {
    name: String,
    algorithm: String,
    disk_bytes: u64,
    streams: u64,
    address: String,
    mm: MmStat,
    /// `io_stat`.
    io: [u64; 4],
    /// `bd_stat`.
    bd: [u64; 3],
    /// `apart_stat`.
    apart: [u64; APART_STAT.len()],
    /// `policy_stat`.
    policy: [u64; POLICY_STAT.len()],
    /// `writeback_stat`.
    writeback: [u64; WRITEBACK_STAT.len()],
}

/// The numbers of a line.
fn numbers<const N: usize>(line: &str) -> [u64; N] {
    let mut numbers = line.split_whitespace().map(|word| word.parse().unwrap_or(0));
    [(); N].map(|()| numbers.next().unwrap_or(0))
}

impl Disk {
    /// Asks a disk for its figures. What an older one does not know is 0, or no text.
    ///
    /// # Errors
    ///
    /// There is no such disk, or it does not answer.
    pub(super) fn read(name: &str) -> Result<Disk, Unanswered> {
        let read = |attribute: &str| match request_of(name, &format!("read {attribute}")) {
            Err(Unanswered::Refused(_)) => Ok(String::new()),
            read => read,
        };
        let algorithms = read("comp_algorithm")?;
        let used = algorithms
            .split_whitespace()
            .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
        let [disk_bytes] = numbers(&read("disksize")?);
        let [streams] = numbers(&read("max_comp_streams")?);
        Ok(Disk {
            name: name.to_owned(),
            algorithm: used.unwrap_or("?").to_owned(),
            disk_bytes,
            streams,
            address: read("address")?.trim_end().to_owned(),
            mm: MmStat::from_columns(numbers(&read("mm_stat")?)),
            io: numbers(&read("io_stat")?),
            bd: numbers(&read("bd_stat")?),
            apart: numbers(&read("apart_stat")?),
            policy: numbers(&read("policy_stat")?),
            writeback: numbers(&read("writeback_stat")?),
        })
    }

    fn ratio(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a ratio to two places")]
        let [data, total] = [self.mm.orig_data_size as f64, self.mm.mem_used_total as f64];
        if self.mm.orig_data_size == 0 { 0.0 } else { data / total }
    }

    fn cell(&self, column: Column, exact: bool) -> String {
        let size = |bytes: u64| if exact { bytes.to_string() } else { size::display(bytes) };
        match column {
            Column::Name => self.name.clone(),
            Column::Algorithm => self.algorithm.clone(),
            Column::Disksize => size(self.disk_bytes),
            Column::Data => size(self.mm.orig_data_size),
            Column::Compr => size(self.mm.compr_data_size),
            Column::Total => size(self.mm.mem_used_total),
            Column::Streams => self.streams.to_string(),
            Column::ZeroPages => self.mm.same_pages.to_string(),
            Column::MemLimit => size(self.mm.mem_limit),
            Column::MemUsed => size(self.mm.mem_used_max),
            Column::Migrated => self.mm.pages_compacted.to_string(),
            // In one word, as all cells are: also of a disk that is just starting, or does not know it.
            Column::Address if self.address.is_empty() => "-".to_owned(),
            Column::Address => self.address.replace(' ', ","),
            Column::CompRatio => format!("{:.2}", self.ratio()),
        }
    }

    fn figures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let first = [("disksize", self.disk_bytes), ("max_comp_streams", self.streams)];
        let rest = MmStat::NAMES
            .into_iter()
            .zip(self.mm.columns())
            .chain(IoStat::NAMES.into_iter().zip(self.io))
            .chain(BdStat::NAMES.into_iter().zip(self.bd))
            .chain(APART_STAT.into_iter().zip(self.apart))
            .chain(POLICY_STAT.into_iter().zip(self.policy))
            .chain(WRITEBACK_STAT.into_iter().zip(self.writeback));
        first.into_iter().chain(rest)
    }

    /// A line for each figure.
    pub(super) fn lines(&self) -> String {
        let line = |(name, value): (&str, u64)| format!("{name:26}{value}\n");
        let first = format!(
            "{:26}{}\n{:26}{}\n",
            "comp_algorithm", self.algorithm, "address", self.address
        );
        first + &self.figures().map(line).collect::<String>()
    }

    /// The cells of these columns, by the columns' names.
    fn cells(&self, columns: &[Column], exact: bool) -> Value {
        let cell = |column: &Column| {
            (column.heading().to_lowercase(), Value::from(self.cell(*column, exact)))
        };
        Value::Object(columns.iter().map(cell).collect())
    }

    pub(super) fn json(&self) -> Value {
        let mut all = json!({
            "name": self.name, "comp_algorithm": self.algorithm, "address": self.address
        });
        self.figures().for_each(|(name, value)| all[name] = json!(value));
        all
    }
}

/// Prints the disks that run. For one that does not answer there is a line on standard error instead.
///
/// # Errors
///
/// The output cannot be written; or a disk does not answer, after the others were printed.
pub(super) fn list(arguments: &ListArgs) -> Result<ExitCode, Failure> {
    let directory = directory()?;
    let mut silent = Vec::new();
    let disk = |name: &String| match Disk::read(name) {
        Ok(disk) => Some(disk),
        // One that has just ended.
        Err(Unanswered::Nobody(_)) => None,
        Err(why) => {
            silent.push(Failure::from(why));
            None
        }
    };
    let disks: Vec<Disk> = names(&directory).iter().filter_map(disk).collect();
    let text = if arguments.json {
        let of = |disk: &Disk| {
            arguments
                .columns()
                .map_or_else(|| disk.json(), |columns| disk.cells(&columns, arguments.bytes))
        };
        Value::Array(disks.iter().map(of).collect()).to_string() + "\n"
    } else {
        rows(arguments, &disks)
    };
    output::print(&text)?;
    let last = silent.pop();
    silent.iter().for_each(|failure| say(&failure.to_string()));
    last.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// The first columns of all.
fn first(count: usize) -> Vec<Column> {
    ALL[..count].iter().map(|(column, _)| *column).collect()
}

impl ListArgs {
    /// The columns that are asked for.
    fn columns(&self) -> Option<Vec<Column>> {
        let all = self.output_all.then(|| first(ALL.len()));
        all.or_else(|| self.output.as_ref().map(|columns| columns.0.clone()))
    }
}

fn rows(arguments: &ListArgs, disks: &[Disk]) -> String {
    let columns = arguments.columns().unwrap_or_else(|| first(DEFAULT));
    let row = |disk: &Disk| {
        columns.iter().map(|column| disk.cell(*column, arguments.bytes)).collect::<Vec<_>>()
    };
    if arguments.raw {
        let headings: Vec<String> =
            columns.iter().map(|column| column.heading().to_owned()).collect();
        let headings = (!arguments.noheadings).then_some(headings);
        let lines = headings.into_iter().chain(disks.iter().map(row));
        return lines.map(|line| line.join(" ") + "\n").collect();
    }
    let left = |column: &Column| match column {
        Column::Name => "<NAME",
        Column::Algorithm => "<ALGORITHM",
        Column::Address => "<ADDRESS",
        other => other.heading(),
    };
    let mut table = Table::new(&columns.iter().map(left).collect::<Vec<_>>());
    disks.iter().for_each(|disk| table.push(row(disk)));
    let table = if arguments.noheadings { table.without_headings() } else { table };
    // Without disks there is nothing to head.
    if disks.is_empty() { String::new() } else { table.to_string() }
}

#[cfg(test)]
mod tests {
    use super::{ALL, Column, DEFAULT, Disk, MmStat};

    fn disk() -> Disk {
        let mm = [4 << 20, 1 << 20, 2 << 20, 0, 3 << 20, 7, 8, 9, 10];
        Disk {
            name: "cache".into(),
            algorithm: "lz4".into(),
            disk_bytes: 4 << 30,
            streams: 2,
            address: "nbd://127.0.0.1:1/cache vhost-user:/a".into(),
            mm: MmStat::from_columns(mm),
            io: [1, 2, 3, 4],
            bd: [5, 6, 7],
            apart: [8, 9, 10, 11, 12],
            policy: [13, 14, 15, 16],
            writeback: [17, 18, 19, 20, 21, 22],
        }
    }

    #[test]
    fn cells_are_the_columns_of_zramctl() {
        const ADDRESSES: &str = "nbd://127.0.0.1:1/cache,vhost-user:/a";
        let cells: Vec<String> =
            ALL.iter().map(|(column, _)| disk().cell(*column, false)).collect();
        let expected =
            ["cache", "lz4", "4G", "4M", "1M", "2M", "2", ADDRESSES, "7", "0", "3M", "8", "2.00"];
        assert_eq!(cells, expected);
        assert_eq!(disk().cell(Column::Disksize, true), "4294967296");
        assert_eq!(disk().json()["same_pages"], 7);
        assert_eq!(disk().json()["bd_writes"], 7);
        let lines = disk().lines();
        for line in [
            "huge_pages_since          10\n",
            "apart_joined_units        12\n",
            "policy_bytes_saved        16\n",
            "writeback_age_s           17\n",
            "writeback_budget_used_up  22\n",
        ] {
            assert!(lines.contains(line), "{line}{lines}");
        }
        // Each figure has a name of its own.
        assert_eq!(disk().json().as_object().unwrap().len(), lines.lines().count() + 1);
    }

    #[test]
    fn columns_are_read_by_name() {
        let named = Column::parse_all("name,comp-ratio").unwrap().0;
        assert_eq!(named, [Column::Name, Column::CompRatio]);
        assert_eq!(Column::parse_all("+MIGRATED").unwrap().0.len(), DEFAULT + 1);
        let refused = Column::parse_all("NAME,SIZE").unwrap_err();
        assert!(
            refused.starts_with("'SIZE' is not a column; accepted: NAME, ALGORITHM"),
            "{refused}"
        );
    }
}
