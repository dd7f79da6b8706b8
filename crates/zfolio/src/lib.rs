//! Memory larger than its limit: pages that were not used for a while are compressed, in this
//! process, on an unmodified Linux kernel. A [`Pager`] has a limit. Its regions deref to `[u8]` or
//! `[T]`, and together they may be as large as you like.
//!
//! **What the default mode cannot do:** the kernel's own accesses to a compressed page are not
//! served. A `read(2)` into a region, or a `write(2)` from one, returns `EFAULT` (or a short
//! count), and `std::io::Read::read` into a region's bytes is such a call. Use
//! [`Region::read_from`] and [`Region::write_to`], or [`Mode::Handler`].
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
//! - Linux 6.8 or later (`UFFDIO_MOVE`), with pages of 4096 bytes.
//! - A userfaultfd. [`Mode::Inline`], the default, needs no permission, but some sandboxes
//!   (Docker's default seccomp profile) refuse it. [`Mode::Handler`] needs one of: read and write
//!   permission on `/dev/userfaultfd`; root or `CAP_SYS_PTRACE`; `vm.unprivileged_userfaultfd=1`.
//!   [`Mode::check`] tests it; `zfolio doctor` lists all requirements.
//!
//! # Which mode
//!
//! | | [`Mode::Inline`] | [`Mode::Handler`] |
//! | --- | --- | --- |
//! | access to compressed memory is served by | the accessing thread, in a handler of SIGBUS | a thread of the pager |
//! | permission | none | as `zfolio run` |
//! | system calls on regions | `EFAULT`; use [`Region::read_from`], [`Region::write_to`], [`Region::pin`] | all work |
//! | threads that block SIGBUS | are killed by an access | may access regions |
//! | signal handlers that access regions | not if they may have interrupted `malloc` or this library | the same |
//! | needs the stack of the accessing thread | yes: see below | no |
//! | cost of an access | lower: no other thread | about 3 us more (8.5 against 5.8 us for 4 KiB with lz4) |
//!
//! Inline, two things must be known:
//!
//! - The handler of SIGBUS is installed with the first pager of the process. It passes on what is not in
//!   a region to the handler that was there before. A handler that the program installs *afterwards* takes
//!   the accesses to compressed memory. So install yours before the first pager, or have it call the one
//!   that `sigaction` returned to you.
//! - An access may reclaim, compress, decompress and hand data to the disk, all on the stack of the
//!   accessing thread: 12 KiB of it were measured, and some CPUs need up to 10 more. Where stacks are
//!   below 256 KiB, and in goroutines and other coroutines, use handler mode.
//!
//! In handler mode a file can be read directly into a region, by any library that works on slices:
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
//! - The limit counts the memory of one pager's regions: resident, on its way out, compressed, and
//!   in tables. It is at least [`LIMIT_BYTES_MIN`]. The rest of the process is not counted: its
//!   code, its heap, other pagers. [`Snapshot::process_bytes`] is the whole process.
//! - As long as the regions together are smaller than the limit, the kernel alone serves them.
//!   Nothing is counted, and there is no cost.
//! - Above the limit an access to a compressed page takes about 10 to 30 us, depending on codec and
//!   unit. An access to a resident page costs nothing. Sequential accesses are prefetched. Large
//!   regions with random accesses are slow, as with swap, if the limit is much smaller than the
//!   memory in use.
//! - Without [`Builder::spill`] data that does not compress stays resident, and **the limit is
//!   exceeded**: data is never lost because of the limit. The first time, one line on standard error
//!   reports it. Instead your function can be called ([`Builder::on_over_limit`]), or a call that
//!   would add to the excess can fail ([`Builder::strict`]). [`Pager::over_limit`] and
//!   [`Snapshot::over_limit_bytes_max`] are available at any time.
//! - A pager has 2 threads, which reclaim and prefetch. Handler mode has one more, which serves faults,
//!   and with four CPUs or more up to 7 that help it; [`Builder::workers`] adds as many as it asks for,
//!   [`Builder::spill`] one for each place, [`Builder::on_over_limit`] one that calls the function.
//! - A pager has 2 file descriptors, and more for what it spills to. A program that closes
//!   descriptors which it did not open (`close_range`) loses its data. At most 64 pagers can be in
//!   inline mode at once.
//! - A process may have 65530 mappings (`vm.max_map_count`): use few large regions, not many small
//!   ones.
//!
//! # Files and sockets
//!
//! [`Region::read_from`] and [`Region::write_to`] work in both modes, with any reader and writer.
//! They continue after short reads and writes, retry when interrupted, and return how many bytes
//! were transferred before an error:
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
//! In neither mode does a pager notice calls that keep using pages without pinning them: `MSG_ZEROCOPY`,
//! `vmsplice`, `IORING_OP_SEND_ZC`, and `O_DIRECT` on NFS, Ceph or 9p. They may send or store other data
//! than the region has. [`Region::pin`] the range before such a call.
//!
//! # Errors
//!
//! [`Error`] contains what was given and what is accepted, or what this machine lacks;
//! [`Error::is_unsupported`] distinguishes the latter. Failures that no caller could handle end the
//! process, with a line on standard error and status 125:
//!
//! - a stored unit does not match its checksum;
//! - a unit on disk cannot be read for 10 seconds ([`Builder::spill`]);
//! - the system has no free page for an access that must be served;
//! - a sandbox of the program forbids a system call without which compressed memory cannot come
//!   back.
//!
//! A thread of a pager that panics aborts the process: that is a bug of zfolio.
//!
//! # Data that does not compress
//!
//! It goes over the limit, unless [`Builder::spill`] names a directory: then what does not fit is written to a file
//! there that has no name and is encrypted.
//!
//! # Fork
//!
//! Regions are not inherited: an access in a child of `fork` is a SIGSEGV in the child, never wrong
//! data. The child may drop the inherited values, and may build its own pagers. [`Pager::map`] of an
//! inherited pager returns [`Error::Inherited`]; no call changes the parent's memory. `Command`, and
//! everything else that executes a program, works as usual.
//!
//! # Statistics
//!
//! `zfolio stat` lists the pagers of running processes with their figures, without root, unless
//! [`Builder::listed`] disables it. The files are in `/dev/shm/zfolio-UID/`, readable by this user
//! only, and are removed with the pager.
#![forbid(unsafe_code)]

pub use zfolio_core::stats::Snapshot;
pub use zfolio_pager::{
    Builder, Error, FaultTimes, LIMIT_BYTES_MIN, Mode, OverLimit, Pager, Pod, Region, Slice, Stats,
    TransferError,
};
