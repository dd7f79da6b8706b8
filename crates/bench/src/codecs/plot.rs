//! Ratio over speed, as a drawing.

use std::fmt::Write as _;

use zfolio_core::size;

use super::choice::Choice;
use super::measure::Measured;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 600.0;
const MARGIN: f64 = 70.0;

/// Where values lie in the drawing: speed from left to right on a logarithmic scale, ratio upwards.
struct Scale {
    speed: (f64, f64),
    ratio: (f64, f64),
}

impl Scale {
    fn of(rows: &[Measured]) -> Scale {
        let ends = |value: fn(&Measured) -> f64| {
            let values = || rows.iter().map(value);
            (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max))
        };
        let (slow, fast) = ends(Measured::both_mb_s);
        let (low, high) = ends(|row| row.ratio);
        Scale { speed: (slow / 1.2, fast * 1.6), ratio: ((low - 0.2).max(0.0), high + 0.2) }
    }

    fn x(&self, speed: f64) -> f64 {
        let share = (speed / self.speed.0).ln() / (self.speed.1 / self.speed.0).ln();
        MARGIN + share * (WIDTH - 2.0 * MARGIN)
    }

    fn y(&self, ratio: f64) -> f64 {
        let share = (ratio - self.ratio.0) / (self.ratio.1 - self.ratio.0);
        HEIGHT - MARGIN - share * (HEIGHT - 2.0 * MARGIN)
    }
}

/// An SVG of all rows; the best are joined by a line.
pub(crate) fn draw(title: &str, rows: &[Measured], choice: &Choice) -> String {
    let scale = Scale::of(rows);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{MARGIN}\" y=\"30\" font-size=\"13\">{}</text>\n",
        escaped(title)
    );
    axes(&mut svg, &scale);
    let mut front: Vec<&Measured> = rows
        .iter()
        .enumerate()
        .filter(|(index, _)| choice.is_best(*index))
        .map(|(_, row)| row)
        .collect();
    front.sort_by(|one, other| one.both_mb_s().total_cmp(&other.both_mb_s()));
    let corner =
        |row: &&Measured| format!("{:.1},{:.1}", scale.x(row.both_mb_s()), scale.y(row.ratio));
    let corners = front.iter().map(corner).collect::<Vec<_>>().join(" ");
    line(&mut svg, &format!("<polyline points=\"{corners}\" fill=\"none\" stroke=\"#c33\"/>"));
    for (index, row) in rows.iter().enumerate() {
        let (x, y) = (scale.x(row.both_mb_s()), scale.y(row.ratio));
        let colour = if choice.is_best(index) { "#c33" } else { "#888" };
        let unit = size::display(row.setting.unit_bytes as u64);
        line(&mut svg, &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
        let label = escaped(&format!("{} {unit}", row.setting.algorithm));
        line(
            &mut svg,
            &format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{label}</text>",
                x + 5.0,
                y - 4.0
            ),
        );
    }
    svg + "</svg>\n"
}

fn axes(svg: &mut String, scale: &Scale) {
    let (left, bottom) = (MARGIN, HEIGHT - MARGIN);
    let mut speed = 10.0_f64.powf(scale.speed.0.log10().floor());
    while speed < scale.speed.1 {
        for step in [1.0, 2.0, 5.0].map(|step| step * speed) {
            if (scale.speed.0..scale.speed.1).contains(&step) {
                let x = scale.x(step);
                line(
                    svg,
                    &format!(
                        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{MARGIN}\" y2=\"{bottom}\" stroke=\"#eee\"/>"
                    ),
                );
                line(
                    svg,
                    &format!(
                        "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{step}</text>",
                        bottom + 16.0
                    ),
                );
            }
        }
        speed *= 10.0;
    }
    let mut ratio = (scale.ratio.0 * 2.0).ceil() / 2.0;
    while ratio < scale.ratio.1 {
        let y = scale.y(ratio);
        line(
            svg,
            &format!(
                "<line x1=\"{left}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#eee\"/>",
                WIDTH - MARGIN
            ),
        );
        line(
            svg,
            &format!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{ratio}</text>",
                left - 6.0,
                y + 4.0
            ),
        );
        ratio += 0.5;
    }
    let middle = WIDTH / 2.0;
    line(
        svg,
        &format!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">stored and loaded again, MB/s of data</text>",
            HEIGHT - 25.0
        ),
    );
    line(svg, &format!("<text x=\"{}\" y=\"{}\">ratio</text>", left - 40.0, MARGIN - 12.0));
}

fn line(svg: &mut String, text: &str) {
    writeln!(svg, "{text}").expect("a string takes everything");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
