//! All raw system calls of zfolio. No policy: the crates above decide what to do.
//!
//! Calls go through `rustix`, which enters the kernel directly. This matters for two reasons:
//! inside the preload library `mmap` and its family are *our* functions, and a fault handler must
//! not touch `errno` or any other thread-local variable.

pub mod clock;
pub mod cpu;
pub mod custody;
pub mod descriptor;
pub mod device_memory;
pub mod disk;
pub mod errno_text;
pub mod eventfd;
pub mod files;
pub mod foreign;
pub mod futex;
pub mod inherited;
pub mod lineage;
pub mod map;
pub mod maps;
pub mod mounts;
pub mod pagemap;
pub mod partial;
pub mod probe;
pub mod process;
pub mod random;
pub mod secret;
pub mod shared;
pub mod signal;
pub mod terminal;
pub mod testing;
pub mod thread;
pub mod ublk;
pub mod uffd;
pub mod uring;
pub mod zeroed;

pub use rustix::io::Errno;
