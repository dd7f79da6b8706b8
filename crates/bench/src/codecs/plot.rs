//! A drawing of ratio over speed.

use zfolio_core::size;

use super::choice::Choice;
use super::measure::Measured;
use crate::plot::{Axis, Plot, STRONG, WEAK};

/// An SVG of all rows; a line joins the best ones.
pub(crate) fn draw(title: &str, rows: &[Measured], choice: &Choice) -> String {
    let ends = |value: fn(&Measured) -> f64| {
        let values = || rows.iter().map(value);
        (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max))
    };
    let (slow, fast) = ends(Measured::both_mb_s);
    let (low, high) = ends(|row| row.ratio);
    let speed = Axis {
        name: "stored and loaded again, MB/s of data",
        from: slow / 1.2,
        to: fast * 1.6,
        logarithmic: true,
    };
    let ratio =
        Axis { name: "ratio", from: (low - 0.2).max(0.0), to: high + 0.2, logarithmic: false };
    let mut plot = Plot::new(title, speed, ratio);
    let best = rows.iter().enumerate().filter(|(index, _)| choice.is_best(*index));
    let mut front: Vec<(f64, f64)> = best.map(|(_, row)| (row.both_mb_s(), row.ratio)).collect();
    front.sort_by(|one, other| one.0.total_cmp(&other.0));
    plot.line(&front, STRONG);
    for (index, row) in rows.iter().enumerate() {
        let colour = if choice.is_best(index) { STRONG } else { WEAK };
        let unit = size::display(row.setting.unit_bytes() as u64);
        let name = format!("{} {unit}", row.setting.algorithm);
        plot.point(row.both_mb_s(), row.ratio, colour, &name);
    }
    plot.finish()
}
