//! What else a user of the library sees: figures, the report of a passed limit, typed slices, children of `fork`,
//! and the file that `zfolio stat` reads.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]
#![allow(
    clippy::disallowed_types,
    reason = "the tests stand outside: a lock that is none of the engine's"
)]

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use zfolio_pager::{Error, Mode, Pager};

const MIB: usize = 1 << 20;

/// The modes that this process may use.
fn modes() -> Vec<Mode> {
    let may =
        |mode: &Mode| mode.check().inspect_err(|why| eprintln!("SKIPPED: {mode:?}: {why}")).is_ok();
    [Mode::Inline, Mode::Handler].into_iter().filter(may).collect()
}

/// Bytes that do not compress.
fn fill_with_noise(bytes: &mut [u8]) {
    let mut word = 88_172_645_463_325_252_u64;
    for chunk in bytes.chunks_exact_mut(8) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// Goal: a limit that is passed is reported with correct figures, and reported again if it was held in
/// between. Method: twice the limit is filled with noise, cleared, and filled with noise again.
#[test]
fn a_limit_that_is_passed_is_told() {
    for mode in modes() {
        let (sender, receiver) = mpsc::channel();
        let pager = Pager::builder()
            .limit(16 << 20)
            .mode(mode)
            .on_over_limit(move |over| sender.send(*over).unwrap())
            .build()
            .unwrap();
        assert_eq!(pager.over_limit(), None);
        let mut region = pager.map(32 * MIB).unwrap();
        for round in 0..2 {
            fill_with_noise(&mut region);
            let over = receiver.recv().unwrap();
            assert_eq!(over.limit_bytes, 16 << 20);
            assert!(over.charged_bytes > 16 << 20, "{mode:?} {round}: {over:?}");
            let now = pager.over_limit().expect("the noise is there");
            assert!((28..48).contains(&(now.charged_bytes >> 20)), "{mode:?} {round}: {now:?}");
            let stats = pager.stats();
            let most = stats.figures.over_limit_bytes_max;
            assert!((12 << 20..32 << 20).contains(&most), "{mode:?} {round}: {most}");
            assert!(stats.figures.over_limit > 0);
            assert!(stats.to_string().contains("over limit"), "{stats}");
            region.clear(0..32 * MIB);
            assert_eq!(pager.over_limit(), None, "{mode:?} {round}");
            // A look at the figures, here or in the background, arms the next report.
            drop(pager.stats());
            // Meanwhile the limit may have been passed, held and passed again.
            while receiver.try_recv().is_ok() {}
        }
    }
}

/// Goal: with `strict` what does not fit into the limit is refused with an error, what is there stays, and
/// once there is room the pager works again.
#[test]
fn strict_is_an_error_and_no_end() {
    for mode in modes() {
        let pager = Pager::builder().limit(16 << 20).mode(mode).strict(true).build().unwrap();
        let mut region = pager.map(32 * MIB).unwrap();
        let mut noise = vec![0; 32 * MIB];
        fill_with_noise(&mut noise);
        let refused = region.read_from(.., &mut &noise[..]).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::OutOfMemory, "{refused}");
        assert!(refused.to_string().contains("over the limit of 16 MiB"), "{refused}");
        assert!((8 * MIB..24 * MIB).contains(&refused.bytes), "{refused}");
        assert!(region[..refused.bytes] == noise[..refused.bytes]);
        assert!(matches!(pager.map(MIB), Err(Error::OverLimit(_))));
        assert!(matches!(pager.map_slice::<u64>(1), Err(Error::OverLimit(_))));
        region.clear(0..32 * MIB);
        pager.map(MIB).unwrap();
        assert_eq!(region.read_from(..MIB, &mut &noise[..]).unwrap(), MIB);
    }
}

/// Goal: the function that is called when the limit is passed may panic, or drop the last pager, and
/// nothing hangs. Method: one function of each kind.
#[test]
fn what_the_told_function_does_harms_nobody() {
    for mode in modes() {
        let builder = || Pager::builder().limit(8 << 20).mode(mode);
        let pager = builder().on_over_limit(|_| panic!("on purpose")).build().unwrap();
        let mut region = pager.map(16 * MIB).unwrap();
        fill_with_noise(&mut region);
        drop((region, pager));

        let kept: Arc<Mutex<Option<Pager>>> = Arc::default();
        let (alone, is_alone) = mpsc::channel();
        let (done, is_done) = mpsc::channel();
        let (theirs, is_alone) = (Arc::clone(&kept), Mutex::new(is_alone));
        let pager = builder()
            .on_over_limit(move |_| {
                is_alone.lock().unwrap().recv().unwrap();
                drop(theirs.lock().unwrap().take().expect("kept below"));
                done.send(()).unwrap();
            })
            .build()
            .unwrap();
        let mut region = pager.map(16 * MIB).unwrap();
        *kept.lock().unwrap() = Some(pager);
        fill_with_noise(&mut region);
        drop(region);
        alone.send(()).unwrap();
        is_done.recv().unwrap();
    }
}

/// Goal: slices begin as zeros, are aligned, and keep their values. Method: types of all sizes, under a limit
/// that is smaller than the slices.
#[test]
fn slices_keep_values_of_every_type() {
    for mode in modes() {
        let pager = Pager::builder().limit(8 << 20).mode(mode).build().unwrap();
        let mut words = pager.map_slice::<u64>(3 * MIB).unwrap();
        assert!(words.iter().all(|word| *word == 0));
        words.iter_mut().zip(0..).for_each(|(word, index)| *word = index / 100);
        let mut points = pager.map_slice::<[f64; 3]>(MIB / 2 + 1).unwrap();
        points.iter_mut().zip(0_u32..).for_each(|(point, index)| point[2] = f64::from(index / 50));
        let mut wide = pager.map_slice::<i128>(1000).unwrap();
        wide.fill(-1);
        assert!(words.iter().zip(0..).all(|(word, index)| *word == index / 100));
        let third = |index: u32| [0.0, 0.0, f64::from(index / 50)];
        assert!(points.iter().zip(0..).all(|(point, index)| *point == third(index)));
        assert!(wide.iter().all(|value| *value == -1));
        assert_eq!((points.len(), points.region().len()), (MIB / 2 + 1, (MIB / 2 + 1) * 24));
        assert!(pager.stats().figures.faults_stored > 0, "{mode:?}: nothing was compressed");
        let told = format!("{words:?}");
        assert!(told.contains("u64") && told.len() < 200, "{told}");
        assert_eq!(pager.map_slice::<u8>(0).unwrap().len(), 0);
        assert_eq!(pager.map_slice::<[u64; 0]>(5).unwrap().len(), 5);
        for length in [usize::MAX, usize::MAX / 8, usize::MAX / 8 + 2] {
            assert!(matches!(pager.map_slice::<u64>(length), Err(Error::Memory { .. })));
        }
    }
}

#[test]
fn figures_are_for_people() {
    for mode in modes() {
        let pager = Pager::builder().limit(8 << 20).mode(mode).build().unwrap();
        let mut region = pager.map(4 * MIB).unwrap();
        let told = pager.stats().to_string();
        assert_eq!(told, "4M mapped, within the limit of 8M: nothing is compressed");
        let mut second = pager.map(32 * MIB).unwrap();
        second.iter_mut().zip(0_usize..).for_each(|(byte, at)| *byte = at.to_le_bytes()[1]);
        region.fill(1);
        assert!(second.iter().zip(0_usize..).all(|(byte, at)| *byte == at.to_le_bytes()[1]));
        let told = pager.stats().to_string();
        for part in ["36M mapped", "of the limit of 8M", "auto in units of 4K", "compressed (p50"] {
            assert!(told.contains(part), "no '{part}' in:\n{told}");
        }
        assert!(told.lines().count() <= 4 && told.lines().all(|line| line.len() < 160), "{told}");
        let debug = format!("{:?} {pager:?} {region:?}", pager.stats());
        assert!(debug.len() < 2500 && !debug.contains("decompress_fail"), "{debug}");
    }
}

/// Runs `child` in a child of `fork`, and returns its status as `waitpid` does.
fn in_child(child: impl FnOnce()) -> i32 {
    // SAFETY: the child calls the given function and ends. The C library and the standard library keep
    // their locks and their allocator usable in a child.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: no preconditions. It ends a child that hangs.
        unsafe { libc::alarm(30) };
        child();
        // SAFETY: ends the child.
        unsafe { libc::_exit(7) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for a write, and the child is ours.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// Goal: a child of `fork` never reads wrong data, and can drop what it inherited; the parent's data stays.
/// Method: the child touches a region, drops it, and makes a pager, while the parent's region is compressed.
#[test]
fn a_child_is_stopped_at_a_touch_and_may_drop() {
    for mode in modes() {
        let pager = Pager::builder().limit(8 << 20).mode(mode).build().unwrap();
        let mut region = pager.map(24 * MIB).unwrap();
        let fill = |bytes: &mut [u8]| {
            bytes.iter_mut().zip(0_usize..).for_each(|(byte, at)| *byte = at.to_le_bytes()[1]);
        };
        fill(&mut region);
        let touched = in_child(|| assert_eq!(region[20 * MIB], 0, "not there"));
        assert!(libc::WIFSIGNALED(touched), "{mode:?}: {touched:#x}");
        assert_eq!(libc::WTERMSIG(touched), libc::SIGSEGV, "{mode:?}");
        let mut both = Some((pager, region));
        let dropped = in_child(|| drop(both.take()));
        assert!(libc::WIFEXITED(dropped), "{mode:?}: {dropped:#x}");
        let of_its_own = in_child(|| {
            let pager = Pager::builder().limit(8 << 20).mode(mode).build().unwrap();
            let mut region = pager.map(24 * MIB).unwrap();
            fill(&mut region);
            assert!(region.iter().zip(0_usize..).all(|(byte, at)| *byte == at.to_le_bytes()[1]));
        });
        assert_eq!(libc::WEXITSTATUS(of_its_own), 7, "{mode:?}: {of_its_own:#x}");
        let (_pager, region) = both.unwrap();
        assert!(region.iter().zip(0_usize..).all(|(byte, at)| *byte == at.to_le_bytes()[1]));
    }
}

/// Goal: a child of `fork` that uses what it inherited changes nothing of its parent's, and nothing ends it. What the
/// pager has open acts on the parent's memory: `pin` in the child unregistered the parent's pages.
#[test]
fn a_child_changes_nothing_of_its_parents() {
    for mode in modes() {
        let pager = Pager::builder().limit(8 << 20).mode(mode).strict(true).build().unwrap();
        let mut region = pager.map(24 * MIB).unwrap();
        let pattern = |at: usize| at.to_le_bytes()[1];
        region.iter_mut().zip(0_usize..).for_each(|(byte, at)| *byte = pattern(at));
        let used = in_child(|| {
            region.pin(0..24 * MIB);
            region.prefault(0..24 * MIB);
            region.clear(0..24 * MIB);
            let refused = pager.map(MIB).unwrap_err();
            let io = std::io::Error::from(pager.map_slice::<u64>(5).unwrap_err());
            let stats = pager.stats();
            let is_as_expected = matches!(refused, Error::Inherited)
                && refused.to_string().contains("another process")
                && io.kind() == ErrorKind::InvalidInput
                && stats.mapped_bytes == 0
                && stats.figures.limit_bytes == 8 << 20
                && pager.over_limit().is_none();
            if !is_as_expected {
                // SAFETY: ends the child.
                unsafe { libc::_exit(8) };
            }
        });
        assert!(libc::WIFEXITED(used) && libc::WEXITSTATUS(used) == 7, "{mode:?}: {used:#x}");
        let figures = pager.stats().figures;
        assert_eq!((figures.pinned_bytes, figures.removes), (0, 0), "{mode:?}");
        assert!(region.iter().zip(0_usize..).all(|(byte, at)| *byte == pattern(at)), "{mode:?}");
    }
}

/// Runs the test `name` again in a process of its own, with `MARK` set.
fn again(name: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(MARK, name);
    command
}

/// Set in a process that [`again`] starts.
const MARK: &str = "ZFOLIO_TEST_AGAIN";

/// Goal: the line about a passed limit holds up no fault, and not the end of the pager; and it comes where it can.
/// Method: a process whose standard error is a full pipe passes its limit, says so on standard output, and drops the
/// pager: with the pipe as it is, or once it was read. The faulting thread wrote the line, and waited for a reader
/// while it had the table locked.
#[test]
fn the_line_about_the_limit_holds_nobody_up() {
    use std::io::{BufRead as _, Read as _, Write as _};
    const READ: &str = "ZFOLIO_TEST_READ";
    if std::env::var_os(MARK).is_some() {
        // SAFETY: no preconditions. It ends a process that hangs.
        unsafe { libc::alarm(60) };
        // SAFETY: no preconditions.
        let size = unsafe { libc::fcntl(2, libc::F_GETPIPE_SZ) };
        let full = vec![b'.'; usize::try_from(size).unwrap()];
        std::io::stderr().write_all(&full).unwrap();
        let pager = Pager::builder().limit(8 << 20).build().unwrap();
        let mut region = pager.map(24 * MIB).unwrap();
        fill_with_noise(&mut region);
        println!("\nfilled {size}");
        if std::env::var_os(READ).is_some() {
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        drop((region, pager));
        println!("dropped");
        return;
    }
    for is_read in [false, true] {
        let mut child = again("the_line_about_the_limit_holds_nobody_up");
        if is_read {
            child.env(READ, "1");
        }
        let piped = || std::process::Stdio::piped();
        let mut child = child.stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap();
        let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let mut line_of = |word: &str| {
            let line = lines.by_ref().map(Result::unwrap).find(|line| line.starts_with(word));
            line.unwrap_or_else(|| panic!("the process stood still: nothing is {word}"))
        };
        let size: usize = line_of("filled").split_once(' ').unwrap().1.parse().unwrap();
        let mut pipe = child.stderr.take().unwrap();
        if is_read {
            pipe.read_exact(&mut vec![0; size]).unwrap();
            child.stdin.take().unwrap().write_all(b"\n").unwrap();
        }
        line_of("dropped");
        let mut told = String::new();
        pipe.read_to_string(&mut told).unwrap();
        let told = told.trim_matches('.');
        assert_eq!(told.matches("over the limit of 8 MiB").count(), is_read.into(), "{told}");
        assert!(child.wait().unwrap().success());
    }
}

/// Where [`on_defect`] was called: 0, or the address that it was told.
static DEFECT_AT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_defect(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let about = unsafe { &*info };
    assert_eq!(about.si_code, libc::BUS_MCEERR_AR);
    // SAFETY: SIGBUS has an address.
    DEFECT_AT.store(unsafe { about.si_addr() }.addr(), Ordering::Relaxed);
}

/// Goal: defective memory in a region is a matter of the handler that was there before. Method: in a process of its
/// own, which has a handler, the signal that the kernel sends for a page whose memory is defective. The pager answered
/// that the page is there, so the access was repeated, and failed again, for ever.
#[test]
fn defective_memory_is_passed_on() {
    const NAME: &str = "defective_memory_is_passed_on";
    if std::env::var_os(MARK).is_none() {
        assert!(again(NAME).status().unwrap().success());
        return;
    }
    let signal = libc::SIGBUS;
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_defect as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the signature of SA_SIGINFO, and only stores a word.
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
    let pager = Pager::builder().limit(8 << 20).build().unwrap();
    let mut region = pager.map(24 * MIB).unwrap();
    region.iter_mut().zip(0_usize..).for_each(|(byte, at)| *byte = at.to_le_bytes()[1]);
    let place = region[24 * MIB - 4096..].as_ptr().addr();

    // Signal, error, code, and after a word of padding the address.
    let mut words = [0_u64; 16];
    words[0] = u64::from(signal.unsigned_abs());
    words[1] = u64::from(libc::BUS_MCEERR_AR.unsigned_abs());
    words[2] = place as u64;
    // SAFETY: no preconditions.
    let thread = unsafe { libc::gettid() };
    let call = libc::SYS_rt_tgsigqueueinfo;
    // SAFETY: the words are as long as a siginfo, and the signal has a handler.
    let sent = unsafe { libc::syscall(call, std::process::id(), thread, signal, words.as_ptr()) };
    if sent != 0 {
        return eprintln!("SKIPPED: {}", std::io::Error::last_os_error());
    }
    assert_eq!(DEFECT_AT.load(Ordering::Relaxed), place);
    assert!(region.iter().zip(0_usize..).all(|(byte, at)| *byte == at.to_le_bytes()[1]));
}

/// The files of the pagers of process `pid` that contain `name`.
fn published(pid: u32, name: &str) -> Vec<PathBuf> {
    let folder = format!("/dev/shm/zfolio-{}", zfolio_sys::probe::effective_uid());
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_ours = |path: &PathBuf| {
        let file = path.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read(path).unwrap_or_default();
        file.starts_with(&format!("{pid}."))
            && text.windows(name.len()).any(|part| part == name.as_bytes())
    };
    entries.map(|entry| entry.path()).filter(is_ours).collect()
}

/// Goal: each pager has a file while it lives, except a pager that is not to be listed.
#[test]
fn a_pager_is_listed_while_it_lives() {
    let me = std::process::id();
    let build = |listed| {
        Pager::builder().limit(8 << 20).name("listed-here").listed(listed).build().unwrap()
    };
    let (first, second, hidden) = (build(true), build(true), build(false));
    let found = published(me, ":listed-here");
    if found.is_empty() && !std::path::Path::new("/dev/shm").exists() {
        eprintln!("SKIPPED: there is no /dev/shm");
        return;
    }
    assert_eq!(found.len(), 2, "{found:?}");
    drop(first);
    assert_eq!(published(me, ":listed-here").len(), 1);
    drop((second, hidden));
    assert!(published(me, ":listed-here").is_empty());
}

/// Goal: a process that exits without dropping its pager leaves no file behind. Method: this test is run
/// again, in a child process.
#[test]
fn an_exit_leaves_no_file() {
    const MARK: &str = "ZFOLIO_TEST_EXIT";
    if std::env::var_os(MARK).is_some() {
        let pager = Pager::builder().limit(8 << 20).name("exits").build().unwrap();
        println!("files: {}", published(std::process::id(), ":exits").len());
        std::mem::forget(pager);
        std::process::exit(0);
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "an_exit_leaves_no_file", "--nocapture"])
        .env(MARK, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = output.id();
    let output = output.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("files: 1"), "{text}");
    assert!(published(pid, ":exits").is_empty());
}
