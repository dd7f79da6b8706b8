//! A deterministic simulation of the pager: the real engine on a simulated kernel, with simulated
//! threads. The same threads play a compressed disk (`zram`).
//!
//! A **seed** chooses everything: the sizes and settings, what the program does, what the kernel
//! refuses, and which thread runs when. So a run can be repeated, step by step. Every byte that the
//! program reads is compared with a model, and the invariants of the engine are checked while
//! nothing moves. `docs/simulation.md` says how to run the simulation and what is simulated.
//!
//! Not simulated: the process's other memory, a heap that is full (Rust then ends the process), and
//! an `ENOMEM` that makes the engine end the process.

mod accelerator;
mod areas;
mod change;
mod check;
mod codec;
mod directed;
mod disk;
mod program;
mod random;
mod schedule;
mod settings;
mod source;
mod space;
mod tests;
mod tree;
mod world;
mod zram;
