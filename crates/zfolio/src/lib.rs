//! Compressed memory for Linux programs, in user space.
#![forbid(unsafe_code)]

pub use zfolio_core::page::UnitOrder;
pub use zfolio_core::stats::{Figures, Histogram, Stats};
pub use zfolio_pager::{Builder, Error, LIMIT_BYTES_MIN, Pager, Region};
