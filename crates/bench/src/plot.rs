//! A drawing of points over two axes, as SVG.

use std::fmt::Write as _;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 600.0;
const MARGIN: f64 = 70.0;

/// The colour of important points.
pub const STRONG: &str = "#c33";
/// The colour of all other points.
pub const WEAK: &str = "#888";

/// One axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis<'a> {
    /// What the numbers mean.
    pub name: &'a str,
    /// The smallest number.
    pub from: f64,
    /// The largest number.
    pub to: f64,
    /// Whether the axis is logarithmic; then both ends are above 0.
    pub logarithmic: bool,
}

impl Axis<'_> {
    /// The position of a number between the two ends: 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let (from, to) = (self.from, self.to);
        let share = if self.logarithmic {
            (value / from).ln() / (to / from).ln()
        } else {
            (value - from) / (to - from)
        };
        // Both ends are the same number.
        if share.is_finite() { share } else { 0.5 }
    }

    /// Round numbers between the ends: 1, 2, 5, 10, ... or multiples of such a number.
    fn ticks(&self) -> Vec<f64> {
        let mut ticks = Vec::new();
        let range = self.from..=self.to;
        if self.logarithmic {
            let mut decade = 10.0_f64.powf(self.from.log10().floor());
            while decade < self.to {
                ticks.extend([1.0, 2.0, 5.0].map(|step| step * decade));
                decade *= 10.0;
            }
            ticks.retain(|tick| range.contains(tick));
        } else if self.to > self.from {
            let step = round_step((self.to - self.from) / 8.0);
            let mut index = (self.from / step).ceil();
            while index * step <= self.to {
                ticks.push(index * step);
                index += 1.0;
            }
        }
        ticks
    }
}

/// The smallest round number that is at least `least`: 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10.0_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= least * 0.999).unwrap_or(10.0 * power)
}

/// A drawing, to which points and lines are added.
#[derive(Debug)]
pub struct Plot<'a> {
    svg: String,
    x: Axis<'a>,
    y: Axis<'a>,
}

impl<'a> Plot<'a> {
    /// Draws a title and two axes.
    #[must_use]
    pub fn new(title: &str, x: Axis<'a>, y: Axis<'a>) -> Plot<'a> {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"30\" font-size=\"13\">{}</text>\n",
            escaped(title)
        );
        let mut plot = Plot { svg, x, y };
        plot.axes();
        plot
    }

    fn place(&self, x: f64, y: f64) -> (f64, f64) {
        let (right, up) = (self.x.share(x), self.y.share(y));
        (MARGIN + right * (WIDTH - 2.0 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2.0 * MARGIN))
    }

    fn axes(&mut self) {
        let (left, right, top, bottom) = (MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN);
        for tick in self.x.ticks() {
            let (x, _) = self.place(tick, self.y.from);
            let text = rounded(tick);
            self.add(&format!(
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#eee\"/>"
            ));
            self.text((x, bottom + 16.0), "middle", "black", &text);
        }
        for tick in self.y.ticks() {
            let (_, y) = self.place(self.x.from, tick);
            let text = rounded(tick);
            self.add(&format!(
                "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#eee\"/>"
            ));
            self.text((left - 6.0, y + 4.0), "end", "black", &text);
        }
        self.text((WIDTH / 2.0, HEIGHT - 25.0), "middle", "black", self.x.name);
        self.text((left - 40.0, top - 12.0), "start", "black", self.y.name);
    }

    /// Draws a line through points.
    pub fn line(&mut self, points: &[(f64, f64)], colour: &str) {
        let corner = |point: &(f64, f64)| {
            let (x, y) = self.place(point.0, point.1);
            format!("{x:.1},{y:.1}")
        };
        let corners = points.iter().map(corner).collect::<Vec<_>>().join(" ");
        self.add(&format!("<polyline points=\"{corners}\" fill=\"none\" stroke=\"{colour}\"/>"));
    }

    /// Draws a point with its name.
    pub fn point(&mut self, x: f64, y: f64, colour: &str, name: &str) {
        let (x, y) = self.place(x, y);
        self.add(&format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
        self.text((x + 5.0, y - 4.0), "start", colour, name);
    }

    fn text(&mut self, (x, y): (f64, f64), anchor: &str, colour: &str, text: &str) {
        let text = escaped(text);
        self.add(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{text}</text>"
        ));
    }

    fn add(&mut self, element: &str) {
        writeln!(self.svg, "{element}").expect("a string takes everything");
    }

    /// The complete drawing.
    #[must_use]
    pub fn finish(self) -> String {
        self.svg + "</svg>\n"
    }
}

/// At most three decimals, since sums of steps are not exact.
fn rounded(number: f64) -> String {
    format!("{}", (number * 1000.0).round() / 1000.0)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::{Axis, Plot, STRONG};

    const X: Axis<'_> = Axis { name: "MiB", from: 100.0, to: 900.0, logarithmic: false };

    #[test]
    fn ticks_are_round_numbers_between_the_ends() {
        assert_eq!(X.ticks(), [100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0]);
        let speed = Axis { name: "", from: 3.0, to: 120.0, logarithmic: true };
        assert_eq!(speed.ticks(), [5.0, 10.0, 20.0, 50.0, 100.0]);
        let one = Axis { name: "", from: 5.0, to: 5.0, logarithmic: false };
        assert!(one.ticks().is_empty());
    }

    #[test]
    fn points_lie_within_the_drawing_and_names_are_text() {
        let y = Axis { name: "s", from: 0.0, to: 2.0, logarithmic: false };
        let mut plot = Plot::new("a < b & c", X, y);
        plot.line(&[(100.0, 2.0), (900.0, 0.0)], STRONG);
        plot.point(500.0, 1.0, STRONG, "<best>");
        let svg = plot.finish();
        for part in ["a &lt; b &amp; c", "70.0,70.0 890.0,530.0", "cx=\"480.0\" cy=\"300.0\""] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        assert!(svg.contains("&lt;best&gt;") && svg.ends_with("</svg>\n"), "{svg}");
    }

    #[test]
    fn an_axis_of_one_number_is_no_panic() {
        let one = Axis { name: "", from: 5.0, to: 5.0, logarithmic: false };
        let mut plot = Plot::new("", one, one);
        plot.point(5.0, 5.0, STRONG, "");
        assert!(!plot.finish().contains("NaN"));
    }
}
