//! Workloads and comparisons: `zfolio corpus` and `zfolio bench`.
//!
//! | module | contents |
//! | --- | --- |
//! | [`mod@corpus`] | the memory of real processes as a file: capture one, or start some and capture them |
//! | [`usemem`] | the workload, on any `&mut [u8]`; the program `usemem` runs it on plain memory |
//! | [`report`] | the results of the workload |
//! | [`compare`] | the same workload under the kernel's zram swap, under `zfolio run`, and inline |
//! | `programs` | real programs with less memory than they need, under both |
//! | `codecs` | each algorithm on units of that memory: ratio, speed, latency |
//! | `swap` | the slot allocator: speed, fragmentation, folios split and whole |
//! | `spill` | noise that does not fit: zfolio, the kernel's swap, and the file system itself |
//! | `zram` | the compressed disk beside the kernel's zram device |
//! | `recompress` | a disk whose idle part is recompressed while another part is read |
//! | `iaa` | a timed simulation of accelerators, with the driver's policy |
//! | `replacement` | how often replacement policies miss, on recorded and generated accesses |
//! | `kernel` | the kernel's side: a zram device, a memory cgroup and folio sizes, all restored at the end |
//! | [`plot`] | points over two axes, as SVG; `zfolio suggest` draws with it too |
//! | `watch` | one program, run to its end, with its memory as seen from outside |
//! | `scratch` | a folder for temporary files |
//! | `os`, [`mapping`] | the system calls that the standard library does not have |

#![deny(unsafe_code)]

mod codecs;
pub mod compare;
pub mod corpus;
mod iaa;
mod inline;
mod kernel;
#[allow(unsafe_code, reason = "wraps mmap; usemem must not depend on zfolio-sys")]
pub mod mapping;
#[allow(unsafe_code, reason = "wraps system calls that only the comparison needs")]
mod os;
pub mod plot;
mod programs;
mod recompress;
mod replacement;
pub mod report;
mod scratch;
mod spill;
mod swap;
pub mod usemem;
mod watch;
mod zram;

pub use compare::{BenchArgs, bench};
pub use corpus::{CorpusArgs, corpus};

const _: () = assert!(usemem::PAGE_BYTES == zfolio_core::page::PAGE_BYTES);
