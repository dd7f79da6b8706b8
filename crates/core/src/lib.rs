//! The data path of zfolio: pages are compressed, placed, kept, and given back.
//!
//! No system call, no thread, no clock lives here, except in [`zcomp::conformance`], which is a test. What the data
//! path needs from the world (runs of pages, the number of the CPU) comes in through small traits and arguments, so
//! that a test can run all of it in a simulated world with injected faults.
//!
//! The modules are declared in the order in which a page passes them.

pub mod number;
pub mod page;
pub mod size;
pub mod size_expression;
pub mod store;
pub mod swap;
pub mod zcomp;
pub mod zram;
pub mod zsmalloc;

pub mod budget;
pub mod economy;
pub mod gate;
pub mod ledger;
mod prefetch;
pub mod ranges;
pub mod refault;
pub mod replacement;
pub mod stats;
pub mod sync;

#[doc(hidden)]
pub mod testing;
