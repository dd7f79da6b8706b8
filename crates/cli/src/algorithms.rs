//! `zfolio algorithms`: the list of compression algorithms.

use std::process::ExitCode;

use zfolio_core::zcomp::Algorithm;

use crate::arguments::ALGORITHM_DEFAULT;
use crate::failure::Failure;
use crate::output::print;
use crate::table::Table;

/// Prints the algorithms, fastest first.
///
/// # Errors
///
/// If the output cannot be written.
pub(crate) fn algorithms() -> Result<ExitCode, Failure> {
    print(&format!(
        "{ALGORITHM_DEFAULT}: lz4, and zstd while the memory that it saves is worth its time (used unless asked)\n\n"
    ))?;
    let mut table = Table::new(&["<ALGORITHM", "<LEVELS", "DEFAULT", "<WINDOW", "<DICT"]);
    for algorithm in Algorithm::ALL {
        let levels = algorithm.levels();
        table.push(vec![
            algorithm.name().to_owned(),
            format!("{} to {}", levels.start(), levels.end()),
            algorithm.level_default().to_string(),
            algorithm.windows().map_or(String::new(), |windows| {
                format!("{} to {}", windows.start(), windows.end())
            }),
            if algorithm.takes_dictionary() { "yes" } else { "" }.to_owned(),
        ]);
    }
    print(&table.to_string())?;
    Ok(ExitCode::SUCCESS)
}
