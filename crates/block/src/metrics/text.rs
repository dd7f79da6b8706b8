//! The page's format.

use std::fmt::{Display, Write as _};

use zfolio_core::stats::Histogram;

/// The ends of the buckets of [`Durations`]: powers of two in nanoseconds, 1 us to 1.1 s, each four times the last.
const POWERS: [u32; 11] = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];

/// A page that is being written.
#[derive(Clone, Debug)]
pub struct Text {
    /// The begin of all names.
    prefix: &'static str,
    /// A label that all samples have, or nothing.
    label: String,
    text: String,
}

/// A label of a sample: `name="value"`, with what may not stand in a value as the format wants it.
#[must_use]
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// How long something took, each time: a histogram of the page.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Durations {
    below: [u64; POWERS.len()],
    count: u64,
    sum_ns: u64,
}

impl Durations {
    /// Adds the durations of `histogram`, in nanoseconds.
    pub fn add(&mut self, histogram: &Histogram) {
        // Others count meanwhile: what is read later has at least as much.
        for (below, power) in self.below.iter_mut().zip(POWERS) {
            *below = below.saturating_add(histogram.count_below(power));
        }
        self.sum_ns = self.sum_ns.saturating_add(histogram.sum());
        self.count = self.count.saturating_add(histogram.count());
    }
}

/// Nanoseconds in seconds, exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seconds(
    /// The nanoseconds.
    pub u64,
);

impl Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SECOND_NS: u64 = 1_000_000_000;
        write!(f, "{}.{:09}", self.0 / SECOND_NS, self.0 % SECOND_NS)
    }
}

impl Text {
    /// An empty page. All names begin with `prefix`; all samples have the label `label`, unless it is empty.
    #[must_use]
    pub fn new(prefix: &'static str, label: String) -> Text {
        Text { prefix, label, text: String::new() }
    }

    /// The page.
    #[must_use]
    pub fn finish(self) -> String {
        self.text
    }

    /// Adds a metric, with the labels and the value of each of its samples.
    ///
    /// # Panics
    ///
    /// Never: a string takes everything.
    pub fn metric<L: AsRef<str>, V: Display>(
        &mut self,
        (name, kind): (&str, &str),
        meaning: &str,
        samples: &[(L, V)],
    ) {
        let name = self.head(name, kind, meaning);
        for (labels, value) in samples {
            self.sample(&name, labels.as_ref(), value);
        }
    }

    /// Adds a metric that may fall.
    pub fn gauge<L: AsRef<str>>(&mut self, name: &str, meaning: &str, samples: &[(L, u64)]) {
        self.metric((name, "gauge"), meaning, samples);
    }

    /// Adds a metric that only grows. The name gets its `_total` here.
    pub fn counter<L: AsRef<str>>(&mut self, name: &str, meaning: &str, samples: &[(L, u64)]) {
        self.metric((&format!("{name}_total"), "counter"), meaning, samples);
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, name: &str, meaning: &str, samples: &[(String, Durations)]) {
        let name = self.head(name, "histogram", meaning);
        let (bucket, sum, count) =
            (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
        for (labels, durations) in samples {
            let end = |end: &str| {
                let comma = if labels.is_empty() { "" } else { "," };
                format!("{labels}{comma}le=\"{end}\"")
            };
            for (below, power) in durations.below.iter().zip(POWERS) {
                self.sample(&bucket, &end(&Seconds(1 << power).to_string()), below);
            }
            self.sample(&bucket, &end("+Inf"), &durations.count);
            self.sample(&sum, labels, &Seconds(durations.sum_ns));
            self.sample(&count, labels, &durations.count);
        }
    }

    /// Adds what stands before the samples of a metric. Returns its whole name.
    fn head(&mut self, name: &str, kind: &str, meaning: &str) -> String {
        let name = format!("{}_{name}", self.prefix);
        writeln!(self.text, "# HELP {name} {meaning}").expect("a string takes everything");
        writeln!(self.text, "# TYPE {name} {kind}").expect("a string takes everything");
        name
    }

    fn sample(&mut self, name: &str, labels: &str, value: &impl Display) {
        let comma = if self.label.is_empty() || labels.is_empty() { "" } else { "," };
        let all = format!("{}{comma}{labels}", self.label);
        let all = if all.is_empty() { all } else { format!("{{{all}}}") };
        writeln!(self.text, "{name}{all} {value}").expect("a string takes everything");
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use zfolio_core::stats::Histogram;

    use super::{Durations, Text, label};

    /// Asserts that a page is what Prometheus reads: each metric once, with its meaning and kind before its values,
    /// names of the allowed letters, counters that end in `_total`.
    pub(in crate::metrics) fn check(page: &str) {
        let (mut seen, mut kind, mut of) = (BTreeSet::new(), "", "");
        for line in page.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "HELP", name, _] => {
                    assert!(seen.insert(name.to_owned()), "{name} twice");
                    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
                    assert!(name.bytes().all(is_good), "{name}");
                }
                ["#", "TYPE", name, is] => {
                    (kind, of) = (is, name);
                    assert!(seen.contains(of));
                    assert_eq!(kind == "counter", of.ends_with("_total"), "{of}");
                }
                _ => {
                    let (sample, value) = line.rsplit_once(' ').unwrap();
                    let name = sample.split('{').next().unwrap();
                    let end = name.strip_prefix(of).unwrap();
                    let ends = if kind == "histogram" {
                        &["_bucket", "_sum", "_count"][..]
                    } else {
                        &[""]
                    };
                    assert!(ends.contains(&end), "{line}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                }
            }
        }
    }

    /// Goal: the format, by hand.
    #[test]
    fn a_page_is_written_as_the_format_wants_it() {
        let mut page = Text::new("a", label("of", "x\"\\\ny"));
        page.gauge("size_bytes", "A size.", &[("", 7), ("k=\"v\"", 8)]);
        let (histogram, mut durations) = (Histogram::default(), Durations::default());
        [900, 1024, 5_000_000_000].iter().for_each(|value| histogram.add(*value));
        durations.add(&histogram);
        page.histogram("took_seconds", "Times.", &[(String::new(), durations)]);
        let text = page.finish();
        check(&text);
        let of = r#"of="x\"\\\ny""#;
        assert!(text.starts_with(&format!(
            "# HELP a_size_bytes A size.\n# TYPE a_size_bytes gauge\n\
             a_size_bytes{{{of}}} 7\na_size_bytes{{{of},k=\"v\"}} 8\n"
        )));
        for (end, count) in
            [("0.000001024", 1), ("0.000004096", 2), ("1.073741824", 2), ("+Inf", 3)]
        {
            let line = format!("a_took_seconds_bucket{{{of},le=\"{end}\"}} {count}\n");
            assert!(text.contains(&line), "{line} in {text}");
        }
        assert!(text.ends_with(&format!("a_took_seconds_count{{{of}}} 3\n")));
        let mut bare = Text::new("b", String::new());
        bare.counter("events", "Events.", &[("", 1)]);
        assert!(bare.finish().ends_with("\nb_events_total 1\n"));
    }
}
