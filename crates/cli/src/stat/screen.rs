//! The screen of `zfolio stat --watch`: as much as fits, with the process that waits most on top.

use std::cmp::Reverse;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::size;

use super::rates::{Rate, a_second};
use super::{Run, limit_bytes, price_text};
use crate::duration;
use crate::output::escaped;
use crate::run::compression_ratio;
use crate::stats_file::StatsFile;
use crate::table::{Table, cut, width};

/// The least width of the column with the command's name.
const COMMAND_MIN: usize = 8;
/// The width that this column gets before the less important columns are shown.
const COMMAND_WANTED: usize = 15;

/// The columns in their order on the screen: heading and rank. Columns with a rank up to
/// `COLUMNS_ALWAYS` are always shown.
const COLUMNS: [(&str, usize); 14] = [
    ("PID", 0),
    ("<COMMAND", 0),
    ("WAIT", 1),
    ("FAULTS/S", 5),
    ("OUT/S", 7),
    ("P99", 8),
    ("LIMIT", 4),
    ("PROCESS", 2),
    ("DEMAND", 3),
    ("POOL", 6),
    ("RATIO", 9),
    ("RESIDENT", 10),
    ("STAGED", 11),
    ("<ALGORITHM", 12),
];
const COMMAND: usize = 1;

fn of(figure: &AtomicU64) -> u64 {
    figure.load(Relaxed)
}

/// The lines for a window of `size` (columns and lines). Each of `runs` has a line.
pub(super) fn overview(
    files: &[StatsFile],
    rates: &[Option<Rate>],
    runs: &[Run],
    (size, seconds): ((usize, usize), f64),
    headings: bool,
) -> Vec<String> {
    let mut rows: Vec<(&StatsFile, Option<Rate>)> =
        files.iter().zip(rates.iter().copied()).collect();
    rows.sort_by(|(one, rate), (other, other_rate)| {
        let (rate, other_rate) = (rate.unwrap_or_default(), other_rate.unwrap_or_default());
        let by_size = |file: &StatsFile| (Reverse(of(&file.stats.figures.process_bytes)), file.pid);
        (other_rate.stall_ns, other_rate.faults)
            .cmp(&(rate.stall_ns, rate.faults))
            .then(by_size(one).cmp(&by_size(other)))
    });
    let mut lines = vec![totals(files, size.0, seconds)];
    lines.extend(runs.iter().map(|run| cut(&run.to_string(), size.0)));
    lines.push(String::new());
    if rows.is_empty() {
        lines.push("No managed process is running. 'zfolio run -- PROGRAM' starts one.".to_owned());
    } else {
        let cells: Vec<Vec<String>> =
            rows.iter().map(|(file, rate)| cells(file, *rate, runs)).collect();
        lines.extend(table(cells, size.0, headings));
    }
    fit(lines, size)
}

/// The lines for one process: every figure that is not zero, and its increase since the last look.
pub(super) fn one(
    file: &StatsFile,
    before: Option<&StatsFile>,
    size: (usize, usize),
    between_ns: u64,
) -> Vec<String> {
    let mut table = Table::new(&["<FIGURE", "VALUE", "A SECOND", "<MEANING"]);
    // The kinds of faults come first: a window of 24 lines does not show all figures.
    for (kind, histogram) in file.stats.histograms() {
        if histogram.count() > 0 {
            let [p50, p99] =
                [500, 990].map(|per_mille| duration::display(histogram.quantile(per_mille)));
            let meaning = format!("Time to serve a fault of kind '{kind}': p50, p99.");
            let value = format!("{p50}, {p99}");
            table.push(vec![format!("fault_{kind}_ns"), value, String::new(), meaning]);
        }
    }
    let mut rows = Vec::new();
    file.stats.figures.each(|name, meaning, value| {
        if value == 0 {
            return;
        }
        // Counters only rise. Gauges rise and fall; for them only a rise is shown.
        let before = before.and_then(|before| before.stats.figures.get(name)).unwrap_or(value);
        let added = a_second(before, value, between_ns);
        let shown = if added == 0 { String::new() } else { figure_text(name, added) };
        rows.push(vec![name.to_owned(), figure_text(name, value), shown, meaning.to_owned()]);
    });
    rows.sort_by_key(|row| !(row[0] == "stall_ns" || row[0].starts_with("faults")));
    rows.into_iter().for_each(|row| table.push(row));
    for (of, price) in file.stats.prices.each().filter(|(_, price)| price.total_ns.is_some()) {
        let (total, now) = (price_text(price.total_ns), price_text(price.price_ns));
        let meaning = format!("What a MiB saves. {}", of.meaning());
        table.push(vec![format!("price_{}", of.name()), total, now, meaning]);
    }
    let (command, algorithm) = (escaped(&file.stats.command()), file.stats.algorithm());
    let title = format!("process {} ({command}), compressed with {algorithm}", file.pid);
    let mut lines = vec![spread(&title, "q ends", size.0), String::new()];
    lines.extend(table.to_string().lines().map(str::to_owned));
    fit(lines, size)
}

/// A figure for display.
pub(super) fn figure_text(name: &str, value: u64) -> String {
    match name {
        _ if name.ends_with("_bytes") || name.ends_with("_bytes_max") => size::display(value),
        _ if name.ends_with("_ns") => duration::display(value),
        _ => value.to_string(),
    }
}

/// The sum of all processes, and the key to quit.
fn totals(files: &[StatsFile], columns: usize, seconds: f64) -> String {
    let sum = |figure: fn(&StatsFile) -> u64| size::display(files.iter().map(figure).sum());
    let count = files.len();
    let what = if count == 1 { "process" } else { "processes" };
    let left = format!(
        "{count} {what}: {} resident, {} of it pool; {} saved",
        sum(|file| of(&file.stats.figures.process_bytes)),
        sum(|file| of(&file.stats.figures.pool_bytes)),
        sum(saved_bytes),
    );
    spread(&left, &format!("each {seconds} s; q ends"), columns)
}

/// What the process would have resident without zfolio, minus what it has.
fn saved_bytes(file: &StatsFile) -> u64 {
    let figures = &file.stats.figures;
    of(&figures.demand_bytes).saturating_sub(of(&figures.process_bytes))
}

/// `left` and `right` at the two ends of a line; `right` only if there is room.
fn spread(left: &str, right: &str, columns: usize) -> String {
    let (left, right_width) = (cut(left, columns), width(right));
    match columns.checked_sub(width(&left) + right_width) {
        Some(gap) if gap >= 2 => format!("{left}{}{right}", " ".repeat(gap)),
        _ => left,
    }
}

/// The cells of one process, in the order of [`COLUMNS`].
fn cells(file: &StatsFile, rate: Option<Rate>, runs: &[Run]) -> Vec<String> {
    let figures = &file.stats.figures;
    let bytes = |figure: &AtomicU64| size::display(of(figure));
    let rated = |show: fn(&Rate) -> String| rate.as_ref().map_or("-".to_owned(), show);
    // A hundredth of a second per second is one percent.
    let percent = |stall_ns: u64| format!("{}%", (stall_ns + 5_000_000) / 10_000_000);
    vec![
        file.pid.to_string(),
        file.stats.command(),
        rate.as_ref().map_or("-".to_owned(), |rate| percent(rate.stall_ns)),
        rated(|rate| rate.faults.to_string()),
        rated(|rate| size::display(rate.reclaimed_bytes)),
        duration::display(file.stats.fault_stored_ns.quantile(990)),
        size::display(limit_bytes(file, runs)),
        bytes(&figures.process_bytes),
        bytes(&figures.demand_bytes),
        bytes(&figures.pool_bytes),
        compression_ratio(figures).unwrap_or("-".to_owned()),
        bytes(&figures.resident_bytes),
        bytes(&figures.staged_bytes),
        file.stats.algorithm(),
    ]
}

/// The most important columns that fit; the command's name gets the rest of the line.
fn table(rows: Vec<Vec<String>>, columns: usize, headings: bool) -> Vec<String> {
    let widest = |index: usize| {
        let heading = if headings { COLUMNS[index].0.trim_start_matches('<').len() } else { 0 };
        rows.iter().map(|row| width(&row[index])).max().unwrap_or(0).max(heading)
    };
    let command_widest = widest(COMMAND);
    let mut chosen = vec![0, COMMAND];
    let mut taken = widest(0);
    let mut by_importance: Vec<usize> = (2..COLUMNS.len()).collect();
    by_importance.sort_by_key(|index| COLUMNS[*index].1);
    for index in by_importance {
        // PROCESS, DEMAND, LIMIT and the columns before them are shown even if names must be cut.
        let room = if COLUMNS[index].1 <= 5 { COMMAND_MIN } else { COMMAND_WANTED };
        let with = taken + 2 + widest(index);
        if with + 2 + room.min(command_widest) > columns {
            break;
        }
        taken = with;
        chosen.push(index);
    }
    chosen.sort_unstable();
    let command_columns = columns.saturating_sub(taken + 2).max(COMMAND_MIN);
    let names: Vec<&'static str> = chosen.iter().map(|index| COLUMNS[*index].0).collect();
    let mut table = Table::new(&names);
    if !headings {
        table = table.without_headings();
    }
    for mut row in rows {
        row[COMMAND] = cut(&row[COMMAND], command_columns);
        table.push(chosen.iter().map(|index| std::mem::take(&mut row[*index])).collect());
    }
    table.to_string().lines().map(str::to_owned).collect()
}

/// The lines that fit into the window; the last line says how many do not.
fn fit(mut lines: Vec<String>, (columns, rows): (usize, usize)) -> Vec<String> {
    if lines.len() > rows {
        let kept = rows.saturating_sub(1);
        let left_out = lines.len() - kept;
        lines.truncate(kept);
        lines.push(format!("... and {left_out} more lines"));
    }
    lines.iter().map(|line| cut(line, columns)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Run, one, overview};
    use crate::stat::rates::Rate;
    use crate::stats_file::StatsFile;
    use crate::table::width;
    use std::sync::atomic::Ordering::Relaxed;
    use zfolio_core::economy::Use;

    /// Processes with long names and the widest figures.
    fn processes() -> (Vec<StatsFile>, Vec<Option<Rate>>) {
        let names = ["sh", "a-command-of-a-length-that-nobody-expects", "日本語日本語日本語日本語"];
        let mut files = Vec::new();
        let mut rates = Vec::new();
        for (index, name) in (0_u32..).zip(names) {
            let file = StatsFile::made_up(4_194_300 + index, name);
            file.stats.figures.process_bytes.store(1023 << 20, Relaxed);
            file.stats.figures.demand_bytes.store(1023 << 30, Relaxed);
            file.stats.figures.pool_bytes.store(999 << 20, Relaxed);
            file.stats.figures.stall_ns.store(u64::MAX / 2, Relaxed);
            files.push(file);
            let stall_ns = u64::from(index) * 16_000_000_000;
            let rate = Rate { stall_ns, faults: 999_999, reclaimed_bytes: 1023 << 20 };
            rates.push((index > 0).then_some(rate));
        }
        (files, rates)
    }

    fn a_run() -> Run {
        Run { run: 7, processes: 2, sum_bytes: 900 << 20, limit_bytes: 777 << 20 }
    }

    /// Goal: the processes of a run show the limit that they share, others their own.
    #[test]
    fn a_shared_limit_is_shown() {
        let (files, rates) = processes();
        files[1].stats.run.store(7, Relaxed);
        let lines = overview(&files, &rates, &[a_run()], ((240, 24), 1.0), true);
        assert!(lines[1].contains("run 7: 2 processes, 900M of 777M"), "{}", lines[1]);
        let with = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        assert_eq!((with("777M"), with("4194301")), (2, 1), "{lines:?}");
        let row = lines.iter().find(|line| line.contains("4194301")).expect("a row for each");
        assert!(row.contains("777M"), "{row}");
    }

    /// Goal: no line is too long for a terminal, and none is lost below its end.
    #[test]
    fn everything_fits_into_any_window() {
        let (files, rates) = processes();
        for columns in 1..250 {
            for rows in [1, 2, 5, 24, 60] {
                let size = (columns, rows);
                let many = overview(&files, &rates, &[a_run()], (size, 1.0), true);
                let single = one(&files[1], Some(&files[0]), size, 1);
                for lines in [many, single] {
                    assert!(lines.len() <= rows, "{size:?}: {} lines", lines.len());
                    for line in lines {
                        assert!(width(&line) <= columns, "{size:?}: {line}");
                    }
                }
            }
        }
    }

    /// Goal: a price is shown once it is known, with its sum and what it is now.
    #[test]
    fn known_prices_are_shown() {
        let (files, _) = processes();
        files[1].stats.prices.set(Use::Staging, 5, Some((2_000_000, 30_000_000)));
        let lines = one(&files[1], None, (240, 60), 1);
        let shown: Vec<&String> = lines.iter().filter(|line| line.contains("price_")).collect();
        assert_eq!(shown.len(), 1, "{lines:?}");
        let words: Vec<&str> = shown[0].split_whitespace().take(3).collect();
        assert_eq!(words, ["price_staging", "30ms", "2.0ms"]);
    }

    #[test]
    fn who_waits_most_is_on_top() {
        let (files, rates) = processes();
        let lines = overview(&files, &rates, &[], ((80, 24), 2.0), true);
        assert!(lines[0].starts_with("3 processes: 3G resident"), "{}", lines[0]);
        assert!(lines[0].contains("saved") && lines[0].ends_with("each 2 s; q ends"));
        let pids: Vec<&str> =
            lines[3..].iter().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(pids, ["4194302", "4194301", "4194300"]);
        for part in ["PID", "COMMAND", "WAIT", "FAULTS/S", "LIMIT", "PROCESS", "DEMAND"] {
            assert!(lines[2].contains(part), "no {part} in 80 columns: {}", lines[2]);
        }
        assert!(lines[3].contains("3200%") && lines[3].contains("999999"), "{}", lines[3]);
        assert!(lines[4].contains("a-command") && lines[4].contains('+'), "{}", lines[4]);
    }

    #[test]
    fn a_wide_window_has_every_column_and_the_whole_name() {
        let (files, rates) = processes();
        let lines = overview(&files, &rates, &[], ((240, 24), 1.0), true);
        assert!(lines[2].contains("ALGORITHM") && lines[2].contains("P99"), "{}", lines[2]);
        assert!(lines[4].contains("a-command-of-a-length-that-nobody-expects"), "{}", lines[4]);
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let (files, rates) = processes();
        let lines = overview(&files, &rates, &[], ((80, 5), 1.0), true);
        assert_eq!(lines[4], "... and 2 more lines");
    }

    #[test]
    fn nobody_there_is_told() {
        assert!(overview(&[], &[], &[], ((80, 24), 1.0), true)[2].contains("zfolio run"));
    }
}
