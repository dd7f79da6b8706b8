//! A deterministic simulation of the pager: the real engine on a simulated kernel, with simulated threads.
//!
//! A **seed** chooses everything: the sizes and settings, what the program does, what the kernel refuses, and which
//! thread runs when. So a run can be made again, step by step. Every byte that the program reads is compared with a
//! model, and the invariants of the engine are checked while it is held still. `docs/simulation.md` says how to
//! run it and what is simulated.
//!
//! What is not simulated: the memory of the process beside the engine's own, a heap that is full (Rust ends the
//! process then), and an `ENOMEM` of a call where the engine's answer is to end the process.

mod change;
mod check;
mod program;
mod random;
mod schedule;
mod settings;
mod source;
mod space;
mod tests;
mod world;
