//! The library that `zfolio run` injects into a program with `LD_PRELOAD`.
//!
//! The library serves the program's `malloc` from mimalloc, and replaces the program's `mmap`, from which
//! mimalloc also gets its memory. It records each private anonymous mapping as manageable. Nothing else
//! happens until the manageable mappings pass half of the limit. Then a thread starts to watch the size of
//! the process. When the size comes near the limit, the engine registers the mappings and serves their
//! page faults.
//!
//! # Invariants
//!
//! - `PRE-1` The engine's threads touch no managed memory: they have their own heap (`heap`), stacks and
//!   thread-local storage (`sys::thread`), and never call the program's `malloc`. No other function of this
//!   library calls it either, except the `malloc` family itself.
//! - `PRE-2` A thread of the program holds no lock of the engine while it changes a mapping, because it
//!   could then fault and wait for itself: the thread `mapping_proxy` makes the change. `fork` is an exception:
//!   it locks the engine's table, after it has made its own stack resident. So is the last look at the process in
//!   the destructor, with signals blocked.
//! - `PRE-3` The engine's threads have their own table of file descriptors, from their start: the program can
//!   neither see nor close the engine's (if a userfaultfd were closed, missing pages would read as zeros), and
//!   no number that it has freed is taken by the engine.
//!
//! The modules are declared in the order in which a program first needs them.

#![cfg_attr(
    test,
    allow(dead_code, non_snake_case, reason = "a test replaces no function of the C library")
)]
#![allow(unreachable_pub, reason = "what is interposed is public to the linker, not to Rust")]
#![allow(
    unsafe_code,
    reason = "the functions of a C library take raw pointers; each block has its proof"
)]

mod heap;
mod interpose;

mod sanitizer;
mod settings;
mod share;
mod statistics;

mod allocator;
mod allocator_locks;
mod early_blocks;
mod grown_blocks;
mod mappings;

mod loader;
mod zerocopy;

mod candidates;

mod lifecycle;
mod mapping_proxy;
mod remap;

mod clone;
mod fork;
mod identity;
