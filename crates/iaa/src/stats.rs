//! Figures, by the names and in the form of the kernel's `global_stats` and `wq_stats`.

use std::fmt;

use crate::queues::Queues;

/// What is counted for each CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    CompCalls,
    DecompCalls,
    SwCompCalls,
    SwDecompCalls,
    CompBytesOut,
    DecompBytesIn,
    Einval,
    Timeout,
    Overflow,
    BusyComps,
    BusyDecomps,
    Full,
    PageFaults,
    LateRecords,
    LeakedBuffers,
    Implausible,
    Checksum,
    WqAdded,
    WqRemoved,
}

impl Count {
    /// How many there are.
    pub(crate) const ALL: usize = Count::WqRemoved as usize + 1;
}

/// What is counted for each queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wq {
    CompCalls,
    CompBytes,
    DecompCalls,
    DecompBytes,
}

/// How many there are.
pub(crate) const WQ_COUNTS: usize = Wq::DecompBytes as usize + 1;

/// The kernel's `global_stats`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GlobalStats {
    /// Compressions that a device did or failed at: each unit once, however often it was submitted.
    pub total_comp_calls: u64,
    /// Decompressions that a device did or failed at: each unit once, and none that only verified a compression.
    pub total_decomp_calls: u64,
    /// Compressions by software instead.
    pub total_sw_comp_calls: u64,
    /// Decompressions by software instead.
    pub total_sw_decomp_calls: u64,
    /// Compressed bytes that devices wrote.
    pub total_comp_bytes_out: u64,
    /// Compressed bytes that devices read.
    pub total_decomp_bytes_in: u64,
    /// Jobs that ended with any other error.
    pub total_completion_einval_errors: u64,
    /// Jobs without a record in time, or stopped by the watchdog.
    pub total_completion_timeout_errors: u64,
    /// Units that do not shrink to the room for them.
    pub total_completion_comp_buf_overflow_errors: u64,
}

impl GlobalStats {
    pub(crate) fn of(queues: &Queues) -> GlobalStats {
        GlobalStats {
            total_comp_calls: queues.total(Count::CompCalls),
            total_decomp_calls: queues.total(Count::DecompCalls),
            total_sw_comp_calls: queues.total(Count::SwCompCalls),
            total_sw_decomp_calls: queues.total(Count::SwDecompCalls),
            total_comp_bytes_out: queues.total(Count::CompBytesOut),
            total_decomp_bytes_in: queues.total(Count::DecompBytesIn),
            total_completion_einval_errors: queues.total(Count::Einval),
            total_completion_timeout_errors: queues.total(Count::Timeout),
            total_completion_comp_buf_overflow_errors: queues.total(Count::Overflow),
        }
    }
}

/// Writes `name: value` lines.
fn lines<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    indent: &str,
    lines: &[(&str, T)],
) -> fmt::Result {
    lines.iter().try_for_each(|(name, value)| writeln!(f, "{indent}{name}: {value}"))
}

impl fmt::Display for GlobalStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "global stats:")?;
        let overflows = self.total_completion_comp_buf_overflow_errors;
        let rows = [
            ("total_comp_calls", self.total_comp_calls),
            ("total_decomp_calls", self.total_decomp_calls),
            ("total_sw_comp_calls", self.total_sw_comp_calls),
            ("total_sw_decomp_calls", self.total_sw_decomp_calls),
            ("total_comp_bytes_out", self.total_comp_bytes_out),
            ("total_decomp_bytes_in", self.total_decomp_bytes_in),
            ("total_completion_einval_errors", self.total_completion_einval_errors),
            ("total_completion_timeout_errors", self.total_completion_timeout_errors),
            ("total_completion_comp_buf_overflow_errors", overflows),
        ];
        lines(f, "  ", &rows)
    }
}

/// What the kernel does not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverStats {
    /// Compressions for which no descriptor was free in time.
    pub busy_comps: u64,
    /// Decompressions for which no descriptor was free in time.
    pub busy_decomps: u64,
    /// Tries that found queues full; not those that met a device which is gone.
    pub full_retries: u64,
    /// Page faults of devices, after each of which the job was submitted again. One that cannot be believed, or comes
    /// too often, ends the job and is not counted here.
    pub page_faults: u64,
    /// Records that came after their job was given up, so that its buffers could be used again.
    pub late_records: u64,
    /// Jobs whose buffers are left to a device for good, because it has not answered and may still write to them: 12
    /// KiB for each of them with units of 4 KiB, or all buffers of a stream that has ended. No figure of memory has
    /// what a stream got in their place.
    pub leaked_buffers: u64,
    /// Records that say what cannot be.
    pub implausible_records: u64,
    /// Results whose checksum is wrong.
    pub checksum_errors: u64,
    /// Queues that were put to use, those at the start included.
    pub wq_added: u64,
    /// Queues that are used no more: the difference are those in use now.
    pub wq_removed: u64,
    /// Descriptors in queues now. Those of jobs that were given up stay until their records come, or the system has
    /// disabled their queue.
    pub in_flight: u64,
}

impl DriverStats {
    pub(crate) fn of(queues: &Queues) -> DriverStats {
        DriverStats {
            busy_comps: queues.total(Count::BusyComps),
            busy_decomps: queues.total(Count::BusyDecomps),
            full_retries: queues.total(Count::Full),
            page_faults: queues.total(Count::PageFaults),
            late_records: queues.total(Count::LateRecords),
            leaked_buffers: queues.total(Count::LeakedBuffers),
            implausible_records: queues.total(Count::Implausible),
            checksum_errors: queues.total(Count::Checksum),
            wq_added: queues.total(Count::WqAdded),
            wq_removed: queues.total(Count::WqRemoved),
            in_flight: queues.in_flight(),
        }
    }
}

impl fmt::Display for DriverStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "driver stats:")?;
        let rows = [
            ("busy_comps", self.busy_comps),
            ("busy_decomps", self.busy_decomps),
            ("full_retries", self.full_retries),
            ("page_faults", self.page_faults),
            ("late_records", self.late_records),
            ("leaked_buffers", self.leaked_buffers),
            ("implausible_records", self.implausible_records),
            ("checksum_errors", self.checksum_errors),
            ("wq_added", self.wq_added),
            ("wq_removed", self.wq_removed),
            ("in_flight", self.in_flight),
        ];
        lines(f, "  ", &rows)
    }
}

/// A queue in `wq_stats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WqStats {
    /// Its name.
    pub name: String,
    /// Compressions, counted as [`GlobalStats`] counts them.
    pub comp_calls: u64,
    /// Compressed bytes that those which succeeded wrote.
    pub comp_bytes: u64,
    /// Decompressions.
    pub decomp_calls: u64,
    /// Compressed bytes that those which succeeded read.
    pub decomp_bytes: u64,
}

impl WqStats {
    /// Adds the figures of another queue.
    fn add(&mut self, other: &WqStats) {
        self.comp_calls += other.comp_calls;
        self.comp_bytes += other.comp_bytes;
        self.decomp_calls += other.decomp_calls;
        self.decomp_bytes += other.decomp_bytes;
    }

    fn lines(&self, f: &mut fmt::Formatter<'_>, indent: &str) -> fmt::Result {
        let rows = [
            ("comp_calls", self.comp_calls),
            ("comp_bytes", self.comp_bytes),
            ("decomp_calls", self.decomp_calls),
            ("decomp_bytes", self.decomp_bytes),
        ];
        lines(f, indent, &rows)
    }
}

/// A device in `wq_stats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Its number.
    pub id: usize,
    /// Its queues.
    pub wqs: Vec<WqStats>,
}

impl DeviceStats {
    /// The devices with queues, by number.
    pub(crate) fn of(queues: &Queues) -> Vec<DeviceStats> {
        let mut devices: Vec<DeviceStats> = Vec::new();
        queues.each(|queue, _, counts| {
            let place = devices.iter().position(|device| device.id == queue.device);
            let place = place.unwrap_or_else(|| {
                devices.push(DeviceStats { id: queue.device, wqs: Vec::new() });
                devices.len() - 1
            });
            devices[place].wqs.push(WqStats {
                name: queue.name.clone(),
                comp_calls: counts[Wq::CompCalls as usize],
                comp_bytes: counts[Wq::CompBytes as usize],
                decomp_calls: counts[Wq::DecompCalls as usize],
                decomp_bytes: counts[Wq::DecompBytes as usize],
            });
        });
        devices.sort_by_key(|device| device.id);
        devices
    }
}

impl fmt::Display for DeviceStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "iaa device:\n  id: {}\n  n_wqs: {}", self.id, self.wqs.len())?;
        let mut all = WqStats::default();
        self.wqs.iter().for_each(|wq| all.add(wq));
        all.lines(f, "  ")?;
        writeln!(f, "  wqs:")?;
        for wq in &self.wqs {
            writeln!(f, "    name: {}", wq.name)?;
            wq.lines(f, "    ")?;
            writeln!(f)?;
        }
        Ok(())
    }
}
