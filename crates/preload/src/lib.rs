//! The library that `zfolio run` injects into a program with `LD_PRELOAD`.
//!
//! It serves the program's `malloc` from mimalloc, whose memory comes from `mmap`, and it *is* the
//! program's `mmap`: large private anonymous mappings are noted as manageable. Nothing else happens
//! until there are enough of them to pass half of the limit. Then a thread watches the process's size, and
//! when it comes near the limit the engine starts, registers the mappings, and serves their faults.
//!
//! # Invariants
//!
//! - `PRE-1` The engine's threads touch no managed memory: their heap (`heap`), their stacks and
//!   their thread-local storage (`sys::thread`) are apart, and they never call the program's `malloc`. Nor
//!   does any function of this library that the program calls, but for `malloc` and its family themselves.
//! - `PRE-2` A thread of the program never waits for an engine's lock while it holds memory's place:
//!   what changes a mapping is handed to the `keeper`, which does it. `fork` alone takes the table, and
//!   holds nothing else then.
//! - `PRE-3` The engine's descriptors are in a table of their own: the program can neither see nor
//!   close them (closing a userfaultfd would make missing pages read as zeros).
//!
//! The modules are declared in the order in which things happen in a program's life.

#![allow(unreachable_pub, reason = "what is interposed is public to the linker, not to Rust")]
#![allow(
    unsafe_code,
    reason = "an interposed C library is all raw pointers; each block has its proof"
)]

mod heap;

mod sanitizer;
mod settings;
mod statistics;

mod allocator;
mod mappings;

mod lent;
mod loader;

mod native;

mod home;
mod keeper;

mod clone;
mod fork;
mod identity;
