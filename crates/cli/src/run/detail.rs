//! All details of one process, printed below the summary with `--verbose`.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::economy::Use;
use zfolio_core::size;
use zfolio_core::stats::{Figures, Price, Prices, Stats};

use crate::duration;
use crate::stat::price_text;
use crate::table::Table;

/// Descriptions of the kinds of faults, in the order of [`Stats::histograms`].
const KINDS: [&str; 4] = ["fresh memory", "just moved out", "compressed", "on disk"];

pub(super) fn of(figure: &AtomicU64) -> u64 {
    figure.load(Relaxed)
}

/// `part` of `whole` as a percentage with one decimal.
fn percent(part: u64, whole: u64) -> String {
    let tenths = (u128::from(part) * 1000).checked_div(u128::from(whole)).unwrap_or(0);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// `whole / part` with one decimal.
pub(super) fn ratio(whole: u64, part: u64) -> Option<String> {
    let tenths = (u128::from(whole) * 10 + u128::from(part) / 2).checked_div(u128::from(part))?;
    Some(format!("{}.{}", tenths / 10, tenths % 10))
}

/// The size of what is stored before compression, over what it takes in memory and on disk.
pub(crate) fn compression_ratio(figures: &Figures) -> Option<String> {
    ratio(of(&figures.stored_bytes), of(&figures.pool_bytes) + of(&figures.spilled_bytes))
}

/// Writes the details, each line indented.
pub(super) fn write(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let figures = &stats.figures;
    tell_memory(f, stats)?;
    tell_faults(f, stats)?;
    tell_reclaim(f, figures)?;
    tell_prices(f, stats)?;
    tell_over_limit(f, figures)
}

fn tell_memory(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let figures = &stats.figures;
    writeln!(
        f,
        "  peaks       {} managed and mapped, {} compressed; at the end {} of tables, {} not managed",
        size::display(of(&figures.resident_bytes_max)),
        size::display(of(&figures.pool_bytes_max)),
        size::display(of(&figures.metadata_bytes)),
        size::display(of(&figures.unmanaged_bytes))
    )?;
    let stored = of(&figures.stored_bytes);
    let pool = of(&figures.pool_bytes) + of(&figures.spilled_bytes);
    let unit = size::display(of(&figures.unit_bytes));
    write!(f, "  compressed  with {} in units of {unit}", stats.algorithm())?;
    match ratio(stored, pool) {
        Some(ratio) if stored > 0 => writeln!(
            f,
            "; at the end {} took {}, {ratio} to 1",
            size::display(stored),
            size::display(pool)
        ),
        _ => writeln!(f, "; nothing was at the end"),
    }
}

fn tell_faults(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let mut table = Table::new(&["<  waits for", "times", "p50", "p99", "in all"]);
    for (told, (kind, histogram)) in KINDS.iter().zip(stats.histograms()) {
        // Most programs wait for no disk.
        if kind == "disk" && histogram.count() == 0 {
            continue;
        }
        table.push(vec![
            format!("    {told}"),
            histogram.count().to_string(),
            duration::display(histogram.quantile(500)),
            duration::display(histogram.quantile(990)),
            duration::display(histogram.sum()),
        ]);
    }
    write!(f, "{table}")?;
    let figures = &stats.figures;
    let prefetched = of(&figures.prefetch_units);
    if prefetched > 0 {
        let unused = of(&figures.prefetch_unused);
        writeln!(
            f,
            "  ahead       {prefetched} units were brought back ahead of faults; {unused} were planned in vain"
        )?;
    }
    match of(&figures.faults_raced) {
        0 => Ok(()),
        raced => {
            writeln!(f, "  besides     {raced} waits ended by what another thread had brought")
        }
    }
}

fn tell_reclaim(f: &mut fmt::Formatter<'_>, figures: &Figures) -> fmt::Result {
    let clean = of(&figures.reclaim_clean);
    let compressed = of(&figures.reclaim_compressed);
    let same_filled = of(&figures.reclaim_same_filled);
    let incompressible = of(&figures.reclaim_incompressible);
    let (direct, background) = (of(&figures.reclaim_direct), of(&figures.reclaim_background));
    writeln!(
        f,
        "  moved out   {} units: {compressed} compressed, {clean} unchanged since they were, \
         {same_filled} of one value, {incompressible} that do not shrink; {} by threads that waited",
        compressed + clean + same_filled + incompressible,
        percent(direct, direct + background)
    )
}

fn tell_prices(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    writeln!(f, "  prices      1M of each use of memory saved: {}", prices_text(&stats.prices))
}

/// What a MiB of each use of memory saved in the whole run. A use of which nothing is known has a `-`.
fn prices_text(prices: &Prices) -> String {
    let text = |(of, price): (Use, Price)| {
        let name = of.name().replace('_', " ");
        format!("{name} {}", price_text(price.total_ns))
    };
    prices.each().map(text).collect::<Vec<_>>().join(", ")
}

fn tell_over_limit(f: &mut fmt::Formatter<'_>, figures: &Figures) -> fmt::Result {
    match of(&figures.over_limit) {
        0 => Ok(()),
        times => writeln!(
            f,
            "  no room     {times} times a wait ended without room below the limit; {} above it at most",
            size::display(of(&figures.over_limit_bytes_max))
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{KINDS, percent, prices_text, ratio};
    use zfolio_core::economy::Use;
    use zfolio_core::stats::Prices;

    #[test]
    fn each_use_of_memory_is_told() {
        let prices = Prices::default();
        prices.set(Use::Resident, 1, Some((1, 2_100_000_000)));
        prices.set(Use::DenseCodec, 1, Some((1, -34_000_000)));
        let text = "resident 2.1s, copies -, staging -, prefetch -, dense codec -34ms, disk -";
        assert_eq!(prices_text(&prices), text);
    }

    #[test]
    fn parts_of_nothing_are_no_panic() {
        assert_eq!(percent(1, 0), "0.0 %");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(ratio(1, 0), None);
        assert_eq!(ratio(41, 10).as_deref(), Some("4.1"));
        assert_eq!(ratio(u64::MAX, 1).as_deref(), Some("18446744073709551615.0"));
    }

    #[test]
    fn each_histogram_has_a_name_for_people() {
        let names = zfolio_core::stats::Stats::default().histograms().map(|(name, _)| name);
        assert_eq!((names, KINDS.len()), (["zero", "staged", "stored", "disk"], 4));
    }
}
