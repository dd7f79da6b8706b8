//! The workload on a region of the library, in its own process.

use std::path::Path;

use crate::compare::setting::Compression;
use crate::usemem::{self, Corpus, Report, Workload};

/// Whether this build has the library's `Pager`.
pub(crate) const AVAILABLE: bool = cfg!(feature = "inline");

/// The parameters of the workload.
#[derive(Debug)]
pub(crate) struct InlineJob<'a> {
    pub(crate) corpus: &'a Path,
    pub(crate) bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) workers: usize,
    pub(crate) seed: u64,
    pub(crate) reads: usize,
    pub(crate) compression: &'a Compression,
}

/// Runs it; an error is one line.
pub(crate) fn run(job: &InlineJob<'_>) -> Result<Report, String> {
    let corpus = Corpus::open(job.corpus).map_err(|error| error.to_string())?;
    let InlineJob { seed, reads, workers, .. } = *job;
    let bytes = usemem::share_bytes(job.bytes, workers) * workers;
    let whole = Workload { corpus: &corpus, start: 0, salt: false, seed, reads };
    let outcome = with_region(job.compression, job.limit_bytes, bytes, |region| {
        usemem::run_threads(region, &whole, workers)
    })?;
    let measured = outcome.map_err(|error| error.to_string())?;
    Ok(Report::of(bytes as u64, measured, usemem::resident_bytes_max()))
}

/// Gives `work` a region of `bytes` that the library keeps within `limit_bytes`.
///
/// This is the only use of the library.
#[cfg(feature = "inline")]
fn with_region<T>(
    compression: &Compression,
    limit_bytes: u64,
    bytes: usize,
    work: impl FnOnce(&mut [u8]) -> T,
) -> Result<T, String> {
    let mut builder = zfolio::Pager::builder().limit(limit_bytes).algorithm(&compression.algorithm);
    if let Some(unit_bytes) = compression.unit_bytes {
        builder = builder.unit(unit_bytes);
    }
    let pager = builder.build().map_err(|error| error.to_string())?;
    let mut region = pager.map(bytes).map_err(|error| error.to_string())?;
    Ok(work(&mut region))
}

#[cfg(not(feature = "inline"))]
fn with_region<T>(
    _compression: &Compression,
    _limit_bytes: u64,
    _bytes: usize,
    _work: impl FnOnce(&mut [u8]) -> T,
) -> Result<T, String> {
    Err("this build has no inline mode".to_owned())
}
