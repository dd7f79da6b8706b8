//! A table of text: columns as wide as their widest cell, numbers aligned to the right.

use std::fmt;

/// Rows of cells under headings.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    headings: bool,
}

#[derive(Clone, Copy, Debug)]
struct Column {
    heading: &'static str,
    left: bool,
}

impl Table {
    /// A table without rows. A heading that starts with `<` aligns its column to the left.
    pub(crate) fn new(headings: &[&'static str]) -> Table {
        let column = |heading: &&'static str| match heading.strip_prefix('<') {
            Some(heading) => Column { heading, left: true },
            None => Column { heading, left: false },
        };
        Table { columns: headings.iter().map(column).collect(), rows: Vec::new(), headings: true }
    }

    /// Leaves the headings out.
    pub(crate) fn without_headings(mut self) -> Table {
        self.headings = false;
        self
    }

    /// Adds a row: a cell for each column.
    pub(crate) fn push(&mut self, row: Vec<String>) {
        assert_eq!(row.len(), self.columns.len(), "a cell for each column");
        self.rows.push(row.iter().map(|cell| printable(cell)).collect());
    }

    fn width(&self, index: usize) -> usize {
        let heading = if self.headings { self.columns[index].heading.len() } else { 0 };
        let cells = self.rows.iter().map(|row| width(&row[index]));
        cells.max().unwrap_or(0).max(heading)
    }
}

/// Shows control characters as `?`: a name may contain anything, and a terminal obeys control
/// characters.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The most columns that `text` takes on a terminal.
///
/// East Asian characters take two columns. Some others above U+1100 take one: counting two for them
/// leaves a gap, while counting too few would break the line.
pub(crate) fn width(text: &str) -> usize {
    text.chars().map(character_width).sum()
}

fn character_width(character: char) -> usize {
    if character < '\u{1100}' { 1 } else { 2 }
}

/// `text` cut to this many columns; a `+` at its end marks that it was longer.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (mut kept, mut taken) = (String::new(), 0);
    for character in text.chars() {
        taken += character_width(character);
        // The last column is for the `+`.
        if taken >= columns {
            break;
        }
        kept.push(character);
    }
    if columns > 0 {
        kept.push('+');
    }
    kept
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<usize> = (0..self.columns.len()).map(|index| self.width(index)).collect();
        let headings: Vec<String> =
            self.columns.iter().map(|column| column.heading.to_owned()).collect();
        for row in self.headings.then_some(&headings).into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, column), &column_width) in row.iter().zip(&self.columns).zip(&widths) {
                let padding = " ".repeat(column_width - width(cell));
                let (before, after) = if column.left { ("", &*padding) } else { (&*padding, "") };
                line.extend([before, cell, after, "  "]);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Table, cut, width};

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["PID", "<COMMAND", "LIMIT"]);
        table.push(vec!["7".into(), "python3".into(), "256M".into()]);
        table.push(vec!["12345".into(), "é".into(), "1G".into()]);
        let expected = "  PID  COMMAND  LIMIT\n    7  python3   256M\n12345  é           1G\n";
        assert_eq!(table.to_string(), expected);
        assert!(!table.without_headings().to_string().contains("PID"));
    }

    #[test]
    fn a_name_cannot_command_the_terminal() {
        let mut table = Table::new(&["<COMMAND"]).without_headings();
        table.push(vec!["a\x1b[2J\nb".into()]);
        assert_eq!(table.to_string(), "a?[2J?b\n");
    }

    #[test]
    fn what_is_cut_fits_and_says_so() {
        let known = [
            ("python3", 7, "python3"),
            ("python3", 6, "pytho+"),
            ("python3", 1, "+"),
            ("python3", 0, ""),
            ("日本語", 6, "日本語"),
            ("日本語", 5, "日本+"),
            ("日本語", 4, "日+"),
        ];
        for (text, columns, expected) in known {
            assert_eq!(cut(text, columns), expected);
            assert!(width(&cut(text, columns)) <= columns);
        }
    }
}
