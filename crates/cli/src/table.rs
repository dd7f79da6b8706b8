//! A table of text: columns as wide as their widest cell, numbers to the right.

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
        self.rows.push(row);
    }

    fn width(&self, index: usize) -> usize {
        let heading = if self.headings { self.columns[index].heading.len() } else { 0 };
        let cells = self.rows.iter().map(|row| row[index].chars().count());
        cells.max().unwrap_or(0).max(heading)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<usize> = (0..self.columns.len()).map(|index| self.width(index)).collect();
        let headings: Vec<String> =
            self.columns.iter().map(|column| column.heading.to_owned()).collect();
        for row in self.headings.then_some(&headings).into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, column), &width) in row.iter().zip(&self.columns).zip(&widths) {
                let padding = " ".repeat(width - cell.chars().count());
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
    use super::Table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["PID", "<COMMAND", "LIMIT"]);
        table.push(vec!["7".into(), "python3".into(), "256M".into()]);
        table.push(vec!["12345".into(), "é".into(), "1G".into()]);
        let told = "  PID  COMMAND  LIMIT\n    7  python3   256M\n12345  é           1G\n";
        assert_eq!(table.to_string(), told);
        assert!(!table.without_headings().to_string().contains("PID"));
    }
}
