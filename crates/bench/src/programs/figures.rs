//! The figures that `zfolio run --stats FILE` wrote, summed over the processes of the run.

use serde_json::{Value, json};

/// Figures of one run. Sums over its processes, except the peak and the quantiles.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Figures {
    /// Faults that decompressed, without a wait for the disk.
    pub(crate) stored: Faults,
    /// Faults that waited for the disk to read.
    pub(crate) disk: Faults,
    /// Faults on memory that had just been moved out, and was not yet compressed.
    pub(crate) faults_staged: u64,
    /// Faults on memory that was never touched before.
    pub(crate) faults_zero: u64,
    /// The peak of the largest process, as zfolio saw it.
    pub(crate) process_bytes_max: u64,
    /// How long threads waited for faults.
    pub(crate) waited_ns: u64,
    /// The part of it for memory that had been moved out, with room made for it.
    pub(crate) waited_refault_ns: u64,
    /// The part of it in which room was made, for memory of any kind.
    pub(crate) waited_room_ns: u64,
    /// The part of it in which units were decompressed.
    pub(crate) waited_decompress_ns: u64,
    /// The part of it in which other faults were served, or other threads of zfolio had the memory.
    pub(crate) waited_queue_ns: u64,
}

/// Faults of a kind.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) count: u64,
    /// How long one takes from the moment when its message was read, in the process with most of them.
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    /// How many that process has.
    most: u64,
}

impl Faults {
    fn add(&mut self, of_process: &Value) -> Result<(), String> {
        let number = |name: &str| of_process[name].as_u64().ok_or("no times of faults");
        let count = number("count")?;
        if count > self.most {
            (self.most, self.p50_ns, self.p99_ns) = (count, number("p50_ns")?, number("p99_ns")?);
        }
        self.count += count;
        Ok(())
    }
}

impl Figures {
    /// Reads the JSON. The product may rename a figure or add one, so a missing one is an error
    /// that names it, and others are ignored.
    pub(crate) fn parse(text: &str) -> Result<Figures, String> {
        let report: Value = serde_json::from_str(text)
            .map_err(|error| format!("the figures are not understood: {error}"))?;
        let processes = report["processes"].as_array().ok_or("the figures have no processes")?;
        let mut sum = Figures::default();
        for process in processes {
            let figures = &process["figures"];
            let of = |name: &str| figures[name].as_u64().ok_or(format!("no figure {name}"));
            sum.stored.add(&process["faults"]["stored"])?;
            sum.disk.add(&process["faults"]["disk"])?;
            sum.faults_staged += of("faults_staged")?;
            sum.faults_zero += of("faults_zero")?;
            sum.process_bytes_max = sum.process_bytes_max.max(of("process_bytes_max")?);
            sum.waited_ns += of("stall_ns")?;
            sum.waited_room_ns += of("stall_reclaim_ns")?;
            sum.waited_decompress_ns += of("stall_decompress_ns")?;
            sum.waited_queue_ns += of("stall_queue_ns")? + of("stall_lock_ns")?;
            let refaults = process["refaults"].as_array().ok_or("no refaults")?;
            let waited = refaults.iter().filter_map(|step| step["waited_ns"].as_u64());
            sum.waited_refault_ns += waited.sum::<u64>();
        }
        Ok(sum)
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "faults_stored": self.stored.count,
            "stored_ns_p50": self.stored.p50_ns,
            "stored_ns_p99": self.stored.p99_ns,
            "faults_disk": self.disk.count,
            "disk_ns_p50": self.disk.p50_ns,
            "disk_ns_p99": self.disk.p99_ns,
            "faults_staged": self.faults_staged,
            "faults_zero": self.faults_zero,
            "process_bytes_max": self.process_bytes_max,
            "waited_ns": self.waited_ns,
            "waited_refault_ns": self.waited_refault_ns,
            "waited_room_ns": self.waited_room_ns,
            "waited_decompress_ns": self.waited_decompress_ns,
            "waited_queue_ns": self.waited_queue_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Faults, Figures};
    use serde_json::json;

    fn process(bytes: u64, stored: u64) -> serde_json::Value {
        json!({
            "command": "python3",
            "figures": {
                "faults_staged": 2, "faults_zero": 1, "stall_ns": 100,
                "stall_reclaim_ns": 30, "stall_decompress_ns": 20, "stall_queue_ns": 8,
                "stall_lock_ns": 7, "process_bytes_max": bytes, "new_in_a_later_version": 5,
            },
            "faults": {
                "stored": { "count": stored, "p50_ns": bytes, "p99_ns": 2 * bytes },
                "disk": { "count": 10 - stored, "p50_ns": 7, "p99_ns": 9 * stored },
            },
            "refaults": [{ "waited_ns": 20 }, { "waited_ns": 40 }],
        })
    }

    #[test]
    fn figures_are_summed_over_processes() {
        let report = json!({ "exit_status": 0, "processes": [process(500, 2), process(300, 4)] });
        let figures = Figures::parse(&report.to_string()).expect("complete");
        let expected = Figures {
            stored: Faults { count: 6, p50_ns: 300, p99_ns: 600, most: 4 },
            disk: Faults { count: 14, p50_ns: 7, p99_ns: 18, most: 8 },
            faults_staged: 4,
            faults_zero: 2,
            process_bytes_max: 500,
            waited_ns: 200,
            waited_refault_ns: 120,
            waited_room_ns: 60,
            waited_decompress_ns: 40,
            waited_queue_ns: 30,
        };
        assert_eq!(figures, expected);
        assert_eq!(figures.json()["waited_room_ns"], 60);
        let none = Figures::parse("{\"processes\":[]}").expect("nothing was compressed");
        assert_eq!(none, Figures::default());
    }

    #[test]
    fn a_missing_figure_is_named() {
        let mut broken = process(1, 1);
        broken["figures"].as_object_mut().expect("an object").remove("stall_ns");
        let report = json!({ "processes": [broken] });
        assert_eq!(Figures::parse(&report.to_string()), Err("no figure stall_ns".to_owned()));
        let mut broken = process(1, 1);
        broken["faults"] = json!({});
        let report = json!({ "processes": [broken] });
        assert_eq!(Figures::parse(&report.to_string()), Err("no times of faults".to_owned()));
        assert!(Figures::parse("{}").is_err_and(|line| line.contains("processes")));
        assert!(Figures::parse("hello").is_err_and(|line| line.contains("not understood")));
    }
}
