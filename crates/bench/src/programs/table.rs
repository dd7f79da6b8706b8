//! The results as text and as JSON.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};
use zfolio_core::size;

use super::results::{Cell, Mean, Measured, Slowdown, Way, number};
use super::run::{End, Run};
use super::share::Share;

/// The whole comparison.
#[derive(Debug)]
pub(crate) struct Table {
    /// What was measured and on what, in one line.
    pub(crate) title: String,
    /// The same as JSON.
    pub(crate) context: Value,
    pub(crate) shares: Vec<Share>,
    pub(crate) programs: Vec<Measured>,
    /// Programs without results, and why.
    pub(crate) failures: Vec<String>,
    /// What was omitted, one line each.
    pub(crate) notes: Vec<String>,
}

impl Table {
    /// Whether every program ran to its end under zfolio, or was only slow, with the right output.
    /// That the kernel kills a program is a result, too.
    pub(crate) fn all_right(&self) -> bool {
        let bad = |run: &Run| match run.end {
            End::Done | End::Late => false,
            End::Killed => run.cost.is_none(),
            End::Failed(_) => true,
        };
        self.failures.is_empty() && !self.runs().any(|(_, _, _, run)| bad(run))
    }

    /// Every run with its program, way and cell.
    fn runs(&self) -> impl Iterator<Item = (&Measured, usize, &Cell, &Run)> {
        self.programs.iter().flat_map(|program| {
            let rows = program.rows.iter().enumerate();
            let cells = rows.flat_map(|(way, row)| row.cells.iter().map(move |cell| (way, cell)));
            cells.flat_map(move |(way, cell)| {
                cell.runs.iter().map(move |run| (program, way, cell, run))
            })
        })
    }

    /// The names of the ways, which all programs share.
    fn ways(&self) -> Vec<String> {
        let first = self.programs.first();
        first.map_or(Vec::new(), |program| {
            program.rows.iter().map(|row| row.way.to_string()).collect()
        })
    }

    fn slowdowns(&self, way: usize, share: usize) -> Vec<Slowdown> {
        self.programs.iter().map(|program| program.slowdown(way, share)).collect()
    }

    fn mean(&self, way: usize, share: usize) -> Option<Mean> {
        Mean::of(&self.slowdowns(way, share))
    }

    /// The tables, and a line for everything that is not in them.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{}\n\n", self.title);
        if !self.programs.is_empty() {
            self.write_slowdowns(&mut text);
            self.write_means(&mut text);
            self.write_far(&mut text);
            self.write_auto(&mut text);
            self.write_details(&mut text);
        }
        let failed = self.failures.iter().map(|line| format!("FAILED: {line}"));
        for line in self.remarks().into_iter().chain(failed).chain(self.notes.iter().cloned()) {
            push(&mut text, format_args!("{line}"));
        }
        text
    }

    fn write_heads(&self, text: &mut String, title: &str, columns: [&str; 2]) {
        let shares: String =
            self.shares.iter().map(|share| format!("{:>9}", share.to_string())).collect();
        push(text, format_args!("{title:<30}{:>7}{:>8}{shares}", columns[0], columns[1]));
    }

    fn write_slowdowns(&self, text: &mut String) {
        self.write_heads(text, "time / time alone", ["need", "alone"]);
        push(text, format_args!("{:<30}{:>7}{:>8}", "", "MiB", "s"));
        for program in &self.programs {
            let (need, alone) = (mib(program.alone[0].need_bytes), program.alone_seconds());
            for (way, name) in self.ways().iter().enumerate() {
                let begin = match way {
                    0 => format!("{:<10}{name:<20}{need:>7.0}{alone:>8.2}", program.program.name()),
                    _ => format!("{:<10}{name:<35}", ""),
                };
                let cells = (0..self.shares.len()).map(|share| {
                    let slowdown = program.slowdown(way, share);
                    let far = self.mean(way, share).is_some_and(|m| m.is_far_below(slowdown));
                    format!("{:>8}{}", slowdown.to_string(), if far { "!" } else { " " })
                });
                push(text, format_args!("{}", (begin + &cells.collect::<String>()).trim_end()));
            }
        }
        text.push('\n');
    }

    fn write_means(&self, text: &mut String) {
        for (way, name) in self.ways().iter().enumerate() {
            let title = if way == 0 { "geo mean" } else { "" };
            let means = (0..self.shares.len())
                .map(|share| format!("{:>8} ", mean_text(self.mean(way, share))));
            let line = format!("{title:<10}{name:<35}{}", means.collect::<String>());
            push(text, format_args!("{}", line.trim_end()));
        }
    }

    /// The programs that are far above the mean, for each way and share.
    fn write_far(&self, text: &mut String) {
        for (way, name) in self.ways().iter().enumerate() {
            let far: Vec<String> = self.far(way).collect();
            let far = if far.is_empty() { "none".to_owned() } else { far.join(", ") };
            push(text, format_args!("! above twice the mean ({name}): {far}"));
        }
        text.push('\n');
    }

    /// For each program how the best fixed setting compares with `auto`, if there are both. `ended`: only
    /// `auto` took too long.
    fn write_auto(&self, text: &mut String) {
        let Some(first) = self.programs.first() else { return };
        let mut ways = first.rows.iter().map(|row| &row.way);
        let has_fixed = ways.clone().any(Way::is_fixed);
        let Some(auto) = ways.position(Way::is_auto).filter(|_| has_fixed) else { return };
        self.write_heads(text, "best fixed / auto", ["", ""]);
        let mut write = |name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!("{cell:>8} ")).collect();
            push(text, format_args!("{}", format!("{name:<45}{cells}").trim_end()));
        };
        let mut ratios = vec![Vec::new(); self.shares.len()];
        for program in &self.programs {
            let cells = ratios.iter_mut().enumerate().map(|(share, ratios)| {
                match (program.best_fixed(share), program.slowdown(auto, share)) {
                    (None, _) => "-".to_owned(),
                    (Some(best), Slowdown::Times(times)) => {
                        ratios.push(Slowdown::Times(best / times));
                        number(best / times)
                    }
                    (Some(_), _) => "ended".to_owned(),
                }
            });
            write(&program.program.name(), cells.collect());
        }
        write("geo mean", ratios.iter().map(|all| mean_text(Mean::of(all))).collect());
        text.push('\n');
    }

    fn far(&self, way: usize) -> impl Iterator<Item = String> {
        let shares = self.shares.iter().enumerate();
        shares.flat_map(move |(at, share)| {
            let mean = self.mean(way, at);
            let far = self.programs.iter().filter(move |program| {
                mean.is_some_and(|mean| mean.is_far_below(program.slowdown(way, at)))
            });
            far.map(move |program| format!("{} at {share}", program.program.name()))
        })
    }

    /// One line for each program, way and share: where the time went.
    fn write_details(&self, text: &mut String) {
        push(
            text,
            format_args!(
                "{:<30}{:>6}{:>8}{:>8}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}",
                "",
                "share",
                "limit",
                "peak",
                "faults",
                "waited",
                "for old",
                "in codec",
                "in room",
                "in queue",
                "time",
                "CPU"
            ),
        );
        push(
            text,
            format_args!(
                "{:<30}{:>6}{:>8}{:>8}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}",
                "", "", "MiB", "MiB", "stored", "s", "s", "s", "s", "s", "s", "s"
            ),
        );
        for program in &self.programs {
            for row in &program.rows {
                for (cell, run) in row.cells.iter().filter_map(|c| Some((c, c.typical()?))) {
                    let limit = run.cost.map_or(cell.limit_bytes, |cost| cost.total_bytes());
                    let seconds = |ns: u64| format!("{:.2}", as_f64(ns) / 1e9);
                    let stored = run.figures.map(|f| (f.stored.count + f.disk.count).to_string());
                    let stored = stored.unwrap_or_default();
                    let waited = run.figures.map(|f| {
                        let (all, old) = (f.waited_ns, f.waited_refault_ns);
                        [all, old, f.waited_decompress_ns, f.waited_room_ns, f.waited_queue_ns]
                    });
                    let waited = waited.into_iter().flatten();
                    let waited: String = waited.map(|ns| format!("{:>9}", seconds(ns))).collect();
                    push(
                        text,
                        format_args!(
                            "{:<10}{:<20}{:>6}{:>8.0}{:>8.0}{stored:>10}{waited:>45}{:>8.2}{:>8.2}",
                            program.program.name(),
                            row.way.to_string(),
                            cell.share.to_string(),
                            mib(limit),
                            mib(run.peak_bytes),
                            run.seconds,
                            run.cpu_seconds,
                        ),
                    );
                }
            }
        }
        text.push('\n');
    }

    /// What the tables cannot say.
    fn remarks(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (program, way, cell, run) in self.runs() {
            if let End::Failed(reason) = &run.end {
                let (name, way) = (program.program.name(), &program.rows[way].way);
                lines.push(format!("{name}, {way} at {}: FAILED: {reason}", cell.share));
            }
        }
        for program in &self.programs {
            for row in &program.rows {
                for cell in &row.cells {
                    let name = format!("{}, {} at {}", program.program.name(), row.way, cell.share);
                    if let Some(before) = cell.late_before {
                        lines.push(format!("{name}: not run, because it was ended at {before}"));
                    } else if cell.limit_too_low {
                        let limit = size::display(cell.limit_bytes);
                        lines.push(format!("{name}: not run, because {limit} is no limit of run"));
                    }
                }
            }
        }
        for (way, name) in self.ways().iter().enumerate() {
            for (at, share) in self.shares.iter().enumerate() {
                let programs = self.mean(way, at).map_or(0, |mean| mean.programs);
                let all = self.programs.len();
                if programs < all {
                    let mean = format!("the mean of {name} at {share}");
                    lines.push(format!("{mean} is over {programs} of {all} programs"));
                }
            }
        }
        lines
    }

    /// The same as JSON, with every run.
    pub(crate) fn json(&self) -> Value {
        let programs = self.programs.iter().map(|program| self.program_json(program));
        let means = self.ways().into_iter().enumerate().map(|(way, name)| {
            let shares = self.shares.iter().enumerate().map(|(at, share)| {
                let mean = self.mean(way, at);
                json!({
                    "share": share.json(),
                    "slowdown": mean.map(|mean| mean.times),
                    "at_least": mean.map(|mean| mean.at_least),
                    "programs": mean.map_or(0, |mean| mean.programs),
                })
            });
            let above: Vec<String> = self.far(way).collect();
            json!({
                "way": name,
                "shares": shares.collect::<Vec<_>>(),
                "above_twice_the_mean": above,
            })
        });
        json!({
            "context": self.context,
            "programs": programs.collect::<Vec<_>>(),
            "geometric_means": means.collect::<Vec<_>>(),
            "failures": self.failures,
            "notes": self.notes,
        })
    }

    fn program_json(&self, program: &Measured) -> Value {
        let rows = program.rows.iter().enumerate().map(|(way, row)| {
            let cells = row.cells.iter().enumerate().map(|(share, cell)| {
                let slowdown = program.slowdown(way, share);
                json!({
                    "share": cell.share.json(),
                    "limit_bytes": cell.limit_bytes,
                    "slowdown": slowdown.number().map(|(times, _)| times),
                    "at_least": slowdown.number().map(|(_, at_least)| at_least),
                    "result": slowdown.to_string(),
                    "runs": cell.runs.iter().map(run_json).collect::<Vec<_>>(),
                })
            });
            json!({ "way": row.way.to_string(), "shares": cells.collect::<Vec<_>>() })
        });
        json!({
            "program": program.program.name(),
            "need_bytes": program.alone[0].need_bytes,
            "output": program.alone[0].output.to_string(),
            "alone_seconds": program.alone.iter().map(|alone| alone.seconds).collect::<Vec<_>>(),
            "ways": rows.collect::<Vec<_>>(),
        })
    }
}

fn run_json(run: &Run) -> Value {
    let (end, reason) = match &run.end {
        End::Done => ("done", None),
        End::Late => ("late", None),
        End::Killed => ("killed", None),
        End::Failed(reason) => ("failed", Some(reason)),
    };
    json!({
        "end": end,
        "reason": reason,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "figures": run.figures.map(|figures| figures.json()),
        "cgroup_limit_bytes": run.cost.map(|cost| cost.limit_bytes),
        "zram_bytes_max": run.cost.map(|cost| cost.zram_bytes_max),
    })
}

fn mean_text(mean: Option<Mean>) -> String {
    mean.map_or("-".to_owned(), |mean| mean.to_string())
}

fn push(text: &mut String, line: fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes everything");
}

fn mib(bytes: u64) -> f64 {
    as_f64(bytes) / 1_048_576.0
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds of one run are below 2^53")]
fn as_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::Table;
    use crate::programs::equal::Cost;
    use crate::programs::figures::Figures;
    use crate::programs::results::tests::{cell, measured, run};
    use crate::programs::results::{Cell, Measured, Row, Way};
    use crate::programs::run::{End, Run};
    use crate::programs::workload::Program;

    fn table(programs: Vec<Measured>) -> Table {
        Table {
            title: "programs".to_owned(),
            context: serde_json::Value::Null,
            shares: vec!["1/2".parse().expect("well formed"), "1/4".parse().expect("well formed")],
            programs,
            failures: Vec::new(),
            notes: vec!["redis was skipped: redis-server is not installed".to_owned()],
        }
    }

    /// A program with these times at 1/2, and none at 1/4 because it was ended before.
    fn program(program: Program, seconds: f64, end: End) -> Measured {
        let late_before = Some("1/2".parse().expect("well formed"));
        let share = "1/4".parse().expect("well formed");
        let mut figures = Figures { waited_ns: 1_500_000_000, ..Figures::default() };
        figures.stored.count = 77;
        let first = Run { figures: Some(figures), ..run(seconds, end) };
        measured(program, vec![cell(vec![first]), Cell { share, late_before, ..cell(vec![]) }])
    }

    /// The same with a row of the kernel, which killed it.
    fn killed(mut program: Measured) -> Measured {
        let cost = Cost { limit_bytes: 40 << 20, zram_bytes_max: 9 << 20, killed: true };
        let run = Run { cost: Some(cost), ..run(1.0, End::Killed) };
        let cells = vec![cell(vec![run]), cell(vec![])];
        program.rows.push(Row { way: Way::Kernel("lz4:4K".parse().expect("well formed")), cells });
        program
    }

    #[test]
    fn the_table_shows_slowdowns_means_and_who_is_far_above() {
        let table = table(vec![
            killed(program(Program::Sort, 3.0, End::Done)),
            killed(program(Program::Perl, 40.0, End::Done)),
        ]);
        let text = table.text();
        for part in [
            "sort      run                     100    2.00    1.50     > 30",
            "          kernel lz4 4K                        killed        -\n",
            "perl      run                     100    2.00      20!    > 30",
            "geo mean  run                                    5.48     > 30",
            "! above twice the mean (run): perl at 1/2",
            "! above twice the mean (kernel lz4 4K): none",
            "sort      run                    1/2      50",
            "kernel lz4 4K          1/2      49",
            "sort, run at 1/4: not run, because it was ended at 1/2",
            "the mean of kernel lz4 4K at 1/2 is over 0 of 2 programs",
            "redis was skipped",
        ] {
            assert!(text.contains(part), "'{part}' is missing:\n{text}");
        }
        assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
        // The kernel may kill a program; zfolio may not.
        assert!(table.all_right());
        let json = table.json();
        assert_eq!(json["programs"][0]["ways"][0]["shares"][0]["slowdown"], 1.5);
        assert_eq!(json["programs"][0]["ways"][0]["shares"][1]["at_least"], true);
        assert_eq!(json["programs"][0]["ways"][1]["shares"][0]["result"], "killed");
        assert_eq!(json["geometric_means"][0]["above_twice_the_mean"][0], "perl at 1/2");
        assert_eq!(
            json["programs"][1]["ways"][0]["shares"][0]["runs"][0]["figures"]["faults_stored"],
            77
        );
    }

    /// Goal: the best fixed setting is compared with `auto`, and only where both came to an end.
    #[test]
    fn auto_is_compared_with_the_best_fixed_setting() {
        let mut one = program(Program::Sort, 3.0, End::Done);
        for (setting, seconds) in [("lz4:4K", 6.0), ("zstd:4K", 2.4)] {
            let cells = vec![cell(vec![run(seconds, End::Done)]), cell(vec![run(9.0, End::Done)])];
            let way = Way::Run(Some(setting.parse().expect("well formed")));
            one.rows.push(Row { way, cells });
        }
        let text = table(vec![one]).text();
        let line = text.lines().skip_while(|line| !line.starts_with("best fixed / auto")).nth(1);
        let cells: Vec<&str> = line.expect("a line").split_whitespace().collect();
        // 2.4 s by 3; at 1/4 auto was ended.
        assert_eq!(cells, ["sort", "0.80", "ended"], "{text}");
        let alone = table(vec![program(Program::Sort, 3.0, End::Done)]).text();
        assert!(!alone.contains("best fixed"), "{alone}");
    }

    /// Every way in which zfolio can be wrong.
    #[test]
    fn a_wrong_output_or_a_failure_is_reported() {
        let wrong = End::Failed("WRONG OUTPUT: 12 of 5 bytes".to_owned());
        for end in [wrong, End::Killed] {
            let bad = table(vec![program(Program::Java, 3.0, end.clone())]);
            assert!(!bad.all_right(), "{end:?}");
        }
        let wrong = End::Failed("WRONG OUTPUT: 12 of 5 bytes".to_owned());
        let text = table(vec![program(Program::Java, 3.0, wrong)]).text();
        assert!(text.contains("java, run at 1/2: FAILED: WRONG OUTPUT"), "{text}");
        assert!(table(vec![program(Program::Java, 90.0, End::Late)]).all_right());
        let mut failed = table(Vec::new());
        assert!(failed.all_right());
        failed.failures.push("node: fails alone: exit status: 1".to_owned());
        assert!(!failed.all_right());
        assert!(failed.text().contains("FAILED: node: fails alone"), "{}", failed.text());
    }
}
