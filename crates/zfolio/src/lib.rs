//! Memory larger than its limit: what is not touched for a while is compressed, in this process, on an unmodified
//! Linux kernel. A [`Pager`] has a limit; its regions deref to `[u8]` or `[T]` and are together as large as you
//! like. **What the default mode cannot do:** the kernel's own accesses to a compressed page are not served. A
//! `read(2)` into a region, or a `write(2)` from one, returns `EFAULT` (or a short count), and
//! `std::io::Read::read` into a region's bytes is such a call. Use [`Region::read_from`] and [`Region::write_to`],
//! or [`Mode::Handler`].
//!
//! ```
//! # // Where kernel or sandbox refuse userfaultfd, the examples say so and end.
//! # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
//! use zfolio::Pager;
//!
//! // 64 MiB of numbers in 16 MiB of memory.
//! let pager = Pager::builder().limit(16 << 20).build()?;
//! let mut squares = pager.map_slice::<u64>(8 << 20)?;
//! for (index, square) in squares.iter_mut().enumerate() {
//!     *square = (index / 1000).pow(2) as u64;
//! }
//! assert_eq!(squares[5_000_123], 5000 * 5000);
//!
//! let stats = pager.stats();
//! assert!(stats.charged_bytes() <= 17 << 20);
//! println!("{stats}");
//! // memory      64M mapped, in 16M of the limit of 16M: 12M resident, 1.6M staged, 1.7M compressed, ...
//! # Ok::<(), zfolio::Error>(())
//! ```
//!
//! # What it needs
//!
//! - Linux 6.8 or later (`UFFDIO_MOVE`), pages of 4096 bytes.
//! - A userfaultfd. [`Mode::Inline`], the default, needs no permission; some sandboxes (the default seccomp profile of
//!   Docker) refuse it all the same. [`Mode::Handler`] needs one of: read and write permission on
//!   `/dev/userfaultfd`; root or `CAP_SYS_PTRACE`; `vm.unprivileged_userfaultfd=1`. [`Mode::check`] asks;
//!   `zfolio doctor` lists all of it.
//!
//! # Which mode
//!
//! | | [`Mode::Inline`] | [`Mode::Handler`] |
//! | --- | --- | --- |
//! | who serves a touch of compressed memory | the touching thread, in a handler of SIGBUS | a thread of the pager |
//! | permission | none | as `zfolio run` |
//! | system calls on regions | `EFAULT`; by [`Region::read_from`], [`Region::write_to`], [`Region::pin`] | yes, all |
//! | threads that block SIGBUS | are killed by a touch | may touch |
//! | signal handlers that touch regions | not while they may have interrupted `malloc` or this library | the same |
//! | cost of a touch | lower: no other thread | about 3 us more (8.5 against 5.8 us for 4 KiB with lz4) |
//!
//! In handler mode a file is read straight into a region, by any library that only knows slices:
//!
//! ```
//! use std::fs::File;
//! use std::io::{Read, Seek, Write};
//! use zfolio::{Mode, Pager};
//!
//! # let path = std::env::temp_dir().join(format!("zfolio-doc-{}", std::process::id()));
//! let pager = match Pager::builder().limit(16 << 20).mode(Mode::Handler).build() {
//!     Err(why) if why.is_unsupported() => {
//!         // It says what is missing, and what to do.
//!         eprintln!("SKIPPED: {why}");
//!         return Ok(());
//!     }
//!     pager => pager?,
//! };
//! let mut region = pager.map(48 << 20)?;
//! region.fill(7);
//! let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
//! file.write_all(&region)?; // One system call, on memory that is mostly compressed.
//! region.fill(0);
//! file.rewind()?;
//! file.read_exact(&mut region)?;
//! assert!(region.iter().all(|byte| *byte == 7));
//! # std::fs::remove_file(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits and costs
//!
//! - The limit counts what the regions of one pager have resident, on its way out, compressed, and in tables; at least
//!   [`LIMIT_BYTES_MIN`]. What the process has beside is not counted: its code, its heap, other pagers.
//!   [`Snapshot::process_bytes`] is all of it together.
//! - As long as the regions are smaller than the limit together, the kernel has them alone: nothing is counted, and
//!   nothing costs anything.
//! - Beyond that a touch of a compressed page costs about 10 to 30 us, by codec and unit, and a touch of what is resident nothing. Sequential access is
//!   brought back ahead. Large regions that are visited at random, with much less memory than is visited, are slow as swap is slow.
//! - Data that does not compress stays, and **the limit is passed**: no byte is ever lost for it. That is told by one line on
//!   standard error the first time; or to your function ([`Builder::on_over_limit`]); or as an error of what would add to it
//!   ([`Builder::strict`]); and by [`Pager::over_limit`] and [`Snapshot::over_limit_bytes_max`] at any time.
//! - A pager has 2 threads, in handler mode 3, and 2 file descriptors: a program that closes descriptors which are not its own
//!   (`close_range`) loses its data. Up to 64 pagers can be in inline mode at once.
//! - A process may have 65530 mappings (`vm.max_map_count`): few large regions, not many small ones.
//!
//! # Files and sockets
//!
//! [`Region::read_from`] and [`Region::write_to`] work in both modes, with whatever reads and writes. They go on after short reads
//! and writes, try again when interrupted, and say how many bytes went before an error:
//!
//! ```
//! # if let Err(why) = zfolio::Mode::Inline.check() { eprintln!("SKIPPED: {why}"); return Ok(()); }
//! let pager = zfolio::Pager::builder().limit(16 << 20).build()?;
//! let mut region = pager.map(32 << 20)?;
//! // A reader that ends early: 5 bytes of 32 MiB.
//! assert_eq!(region.read_from(.., &mut &b"hello"[..])?, 5);
//! // A writer that is full: 3 bytes of 5.
//! let mut full = [0; 3];
//! let failed = region.write_to(..5, &mut &mut full[..]).unwrap_err();
//! assert_eq!((failed.bytes, failed.error.kind()), (3, std::io::ErrorKind::WriteZero));
//! assert_eq!(&full, b"hel");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Errors
//!
//! [`Error`] says what was given and what is accepted, or what this machine lacks; [`Error::is_unsupported`] tells the latter
//! apart. What no caller could handle ends the process with a line on standard error and status 125: a stored unit that does not
//! come back as it was (its checksum tells), or a system without a page left for a touch that must be served.
//!
//! # Fork
//!
//! Regions are not inherited: a touch in a child of `fork` is a SIGSEGV in the child, never wrong data. The child may drop what it
//! inherited, and may build pagers of its own. `Command` and everything else that executes a program works as ever.
//!
//! # Looking in
//!
//! `zfolio stat` lists the pagers of running processes with their figures, without root, unless
//! [`Builder::listed`] says no. Their files are in `/dev/shm/zfolio-UID/`, readable by this user only, and go with the pager.
#![forbid(unsafe_code)]

pub use zfolio_core::stats::Snapshot;
pub use zfolio_pager::{
    Builder, Error, FaultTimes, LIMIT_BYTES_MIN, Mode, OverLimit, Pager, Pod, Region, Slice, Stats,
    TransferError,
};
