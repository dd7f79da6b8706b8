//! `zfolio algorithms`: what can compress.

use std::io::Write;
use std::process::ExitCode;

use zfolio_core::zcomp::Algorithm;

use crate::arguments::ALGORITHM_DEFAULT;
use crate::table::Table;

/// Lists them, fastest first.
pub(crate) fn algorithms() -> ExitCode {
    let mut table = Table::new(&["<ALGORITHM", "<LEVELS", "DEFAULT", "<WINDOW", "<DICT", "<"]);
    for algorithm in Algorithm::ALL {
        let levels = algorithm.levels();
        let default = if algorithm.name() == ALGORITHM_DEFAULT { "used unless asked" } else { "" };
        table.push(vec![
            algorithm.name().to_owned(),
            format!("{} to {}", levels.start(), levels.end()),
            algorithm.level_default().to_string(),
            algorithm.windows().map_or(String::new(), |windows| {
                format!("{} to {}", windows.start(), windows.end())
            }),
            if algorithm.takes_dictionary() { "yes" } else { "" }.to_owned(),
            default.to_owned(),
        ]);
    }
    // Whoever closed the pipe has read enough.
    std::io::stdout().write_all(table.to_string().as_bytes()).ok();
    ExitCode::SUCCESS
}
