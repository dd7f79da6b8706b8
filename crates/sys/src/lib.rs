//! Every raw system call that zfolio makes. No policy: what to do is decided above.
//!
//! Calls go through `rustix`, which enters the kernel itself. That matters twice: inside the preload
//! library the C library's `mmap` and friends are *our* functions, and a fault handler must not
//! touch `errno` or any other thread-local variable.

pub mod clock;
pub mod cpu;
pub mod errno_text;
pub mod files;
pub mod futex;
pub mod map;
pub mod probe;
pub mod process;
pub mod random;
pub mod shared;
pub mod signal;
pub mod terminal;
pub mod thread;
pub mod uffd;

pub use rustix::io::Errno;
