//! The setting of the tests: the built command, a stand-in for the preload library, and places for
//! files.

use std::fs;
use std::mem::offset_of;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use zfolio_core::refault::BUCKETS;
use zfolio_core::stats::{STATS_MAGIC, Stats};

/// The uid of the user nobody.
pub(crate) const NOBODY: u32 = 65_534;

/// The name of the stand-in, in the copies for the user nobody.
const LIBRARY: &str = "stand_in.so";

/// Writes the statistics of its process, with made-up figures.
const STAND_IN: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static char page[STATS_BYTES];
static void word(int at, unsigned long long value, int bytes) { memcpy(page + at, &value, bytes); }
static void figure(int index, unsigned long long value) { word(160 + 8 * index, value, 8); }
/* Of one bucket: times, and nanoseconds behind all buckets' times. */
static void refault(int at, int bucket, unsigned long long waited) {
  word(at + 8 * bucket, 1, 8);
  word(at + 8 * (BUCKETS + bucket), waited, 8);
}
__attribute__((constructor)) static void start(void) {
  const char *run = getenv("ZFOLIO_RUN"), *limit = getenv("ZFOLIO_LIMIT");
  const char *alone = getenv("ZFOLIO_PER_PROCESS");
  char text[1024] = {0}, path[64];
  int fd = open("/proc/self/stat", O_RDONLY);
  if (!run || !limit || getenv("STAND_IN_MUTE") || fd < 0) return;
  if (read(fd, text, sizeof text - 1) <= 0) return;
  close(fd);
  char *field = strrchr(text, ')') + 2;
  for (int skip = 3; skip < 22; skip++) field = strchr(field, ' ') + 1;
  word(8, STATS_BYTES, 4);
  word(12, getpid(), 4);
  word(16, strtoull(field, 0, 10), 8);
  word(24, strtoull(run, 0, 10), 8);
  snprintf(page + 32, 64, "%s", getenv("ZFOLIO_ALGORITHM"));
  snprintf(page + 96, 64, "%.*s", (int)strcspn(strchr(text, '(') + 1, ")"), strchr(text, '(') + 1);
  word(HAS_SHARE_AT, !alone || strcmp(alone, "1"), 8);
  figure(LIMIT_BYTES, strtoull(limit, 0, 10));
  if (getenv("STAND_IN_NEEDS")) figure(DEMAND_BYTES_MAX, 1ull << 30);
  if (getenv("STAND_IN_ENGAGED")) {
    figure(ENGAGED, 1);
    figure(RECLAIM_COMPRESSED, 1);
    figure(DEMAND_BYTES_MAX, 1ull << 30);
    figure(DEMAND_STORED_BYTES, 700ull << 20);
    if (!getenv("STAND_IN_BLIND")) figure(PROCESS_BYTES_MAX, 250ull << 20);
    figure(STALL_NS, 5200000000ull);
    figure(STALL_DECOMPRESS_NS, 4100000000ull);
    figure(STALL_RECLAIM_NS, 700000000ull);
    if (getenv("STAND_IN_SPILLED")) {
      figure(WRITTEN_BACK_UNITS, 9);
      figure(SPILL_WAY, 2);
      figure(SPILLED_BYTES_MAX, 300ull << 20);
      figure(SPILL_WRITTEN_BYTES, 400ull << 20);
      figure(SPILL_READ_BYTES, 500ull << 20);
      figure(WRITE_BUDGET_USED_UP, 2);
    }
    if (getenv("STAND_IN_BUFFERED")) figure(SPILL_BUFFERED, 1);
    if (getenv("STAND_IN_REFUSED")) {
      figure(WRITTEN_BACK_LIMIT, 41);
      figure(WRITTEN_BACK_FULL, 1);
      figure(WRITTEN_BACK_FAIL, 12);
    }
    if (getenv("STAND_IN_OVER")) figure(OVER_LIMIT, 3);
    refault(REFAULTS_AT, 55, 5000000000ull);
  }
  figure(STORED_BYTES, 800ull << 20);
  figure(POOL_BYTES, 200ull << 20);
  /* The same for a second. */
  figure(STORED_KIB_MS, (800ull << 10) * 1000);
  figure(POOL_KIB_MS, (200ull << 10) * 1000);
  word(0, MAGIC, 8);
  snprintf(path, sizeof path, "/dev/shm/zfolio-%d/%d", geteuid(), getpid());
  fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
  if (fd >= 0 && write(fd, page, sizeof page) > 0) close(fd);
}
"#;

/// The stand-in, compiled once.
pub(crate) fn stand_in() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let directory = scratch("stand-in");
        let (source, library) = (directory.join("stand_in.c"), directory.join("stand_in.so"));
        fs::write(&source, STAND_IN).expect("the temporary directory is writable");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source);
        cc.arg(format!("-DSTATS_BYTES={}", size_of::<Stats>()));
        cc.arg(format!("-DMAGIC={STATS_MAGIC}ull"));
        cc.arg(format!("-DBUCKETS={BUCKETS}"));
        cc.arg(format!("-DREFAULTS_AT={}", offset_of!(Stats, refaults)));
        cc.arg(format!("-DHAS_SHARE_AT={}", offset_of!(Stats, has_share)));
        let mut index = 0;
        Stats::default().figures.each(|name, _, _| {
            cc.arg(format!("-D{}={index}", name.to_uppercase()));
            index += 1;
        });
        let output = cc.output().expect("a C compiler: it built zfolio's codecs, too");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("it is ours");
        library
    })
}

/// A directory for the files of a test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&path).expect("cargo's directory for tests is writable");
    path
}

/// Makes a program with three arguments: how many MiB it touches, in mappings of 64K; how many
/// milliseconds it waits; its exit status. `None`, with a message, if it cannot be linked with
/// `flags`. With `-DSLOW_LOADER` (x86-64) its loader takes 0.7 s.
pub(crate) fn holder(name: &str, flags: &[&str]) -> Option<PathBuf> {
    const SOURCE: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef SLOW_LOADER
#include <time.h>
static int nothing(void) { return 0; }
/* The loader calls this before any library is initialized; so the C library's functions are not there yet. */
static int (*pick(void))(void) {
  struct timespec time = {0, 700000000};
  long answer;
  __asm__ volatile("syscall" : "=a"(answer) : "a"(35L), "D"(&time), "S"(0L) : "rcx", "r11", "memory");
  return nothing;
}
int slow(void) __attribute__((ifunc("pick")));
#else
static int slow(void) { return 0; }
#endif
int main(int argc, char **argv) {
  if (slow()) return 9;
  for (long blocks = argc > 1 ? 16 * atol(argv[1]) : 0; blocks > 0; blocks--) {
    char *block = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return 9;
    memset(block, 1, 65536);
  }
  usleep(argc > 2 ? 1000 * atoi(argv[2]) : 0);
  return argc > 3 ? atoi(argv[3]) : 0;
}
"#;
    let directory = scratch(name);
    let (source, program) = (directory.join("holder.c"), directory.join(name));
    fs::write(&source, SOURCE).expect("the temporary directory is writable");
    let mut cc = Command::new("cc");
    let output = cc.args(flags).arg("-o").arg(&program).arg(&source).output().expect("there is cc");
    if !output.status.success() {
        eprintln!("SKIPPED: cc {flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    output.status.success().then_some(program)
}

/// `zfolio` with the stand-in; its output is captured.
pub(crate) fn zfolio(arguments: &[&str]) -> Command {
    let mut command = beside_the_stand_in(env!("CARGO_BIN_EXE_zfolio"));
    command.args(arguments);
    command
}

/// A shell with this script, in the environment of [`zfolio`]. `$ZFOLIO` is the command's path.
pub(crate) fn script(text: &str) -> Command {
    let mut command = beside_the_stand_in("sh");
    command.args(["-c", text]).env("ZFOLIO", env!("CARGO_BIN_EXE_zfolio"));
    command
}

fn beside_the_stand_in(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("ZFOLIO_PRELOAD", stand_in()).env_remove("LD_PRELOAD");
    for variable in ["LIMIT", "ALGORITHM", "UNIT", "STRICT", "QUIET", "RUN"] {
        command.env_remove(format!("ZFOLIO_{variable}"));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs `zfolio` as the user nobody, from copies of the files, which are removed when this is
/// dropped.
pub(crate) struct Nobody {
    folder: PathBuf,
}

impl Nobody {
    /// `None`, with a message, if this is not possible: not root, or the temporary directory is
    /// closed to others.
    ///
    /// The built files themselves cannot be used: they may lie in root's home, which is closed to
    /// others. A trial run of them would prove nothing, since setpriv has root's capabilities until
    /// the `exec`.
    pub(crate) fn stage() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("zfolio-nobody-{}-{count}", std::process::id());
        let nobody = Self { folder: std::env::temp_dir().join(name) };
        fs::create_dir(&nobody.folder).expect("the temporary directory is writable");
        fs::set_permissions(&nobody.folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
        // By another process. A file that this process writes is busy until every child that other
        // tests forked in the meantime has called `exec`.
        let mut install = Command::new("install");
        install.args(["-m", "755", "-t"]).arg(&nobody.folder);
        install.arg(env!("CARGO_BIN_EXE_zfolio")).arg(stand_in());
        assert!(install.status().expect("install is there").success(), "there is room in /tmp");
        // `sh` no longer has capabilities.
        let mut trial = nobody.start(Path::new("sh"));
        let script = r#"test -r "$ZFOLIO_PRELOAD" && exec "$1" --version"#;
        trial.args(["-c", script, "sh"]).arg(nobody.folder.join("zfolio"));
        let status = trial.stdout(Stdio::null()).stderr(Stdio::null()).status();
        if status.is_ok_and(|status| status.success()) {
            return Some(nobody);
        }
        eprintln!("SKIPPED: nobody cannot run zfolio here (not root, or the path is closed)");
        None
    }

    /// The output of `zfolio` with these arguments.
    pub(crate) fn output(&self, arguments: &[&str]) -> Output {
        let mut command = self.start(&self.folder.join("zfolio"));
        command.args(arguments).stdin(Stdio::null()).output().expect("the trial started")
    }

    /// A copy of the library that nobody can read.
    pub(crate) fn library(&self) -> PathBuf {
        self.folder.join(LIBRARY)
    }

    /// Starts `zfolio` with these arguments; its output is read by the test.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = self.start(&self.folder.join("zfolio"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the trial started")
    }

    fn start(&self, program: &Path) -> Command {
        let id = NOBODY.to_string();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]);
        command.args(["--bounding-set", "-all", "--inh-caps", "-all"]).arg(program);
        command.env("ZFOLIO_PRELOAD", self.library()).env_remove("LD_PRELOAD");
        command
    }
}

impl Drop for Nobody {
    fn drop(&mut self) {
        // A panic here would hide the panic of the test.
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("{} stays behind: {error}", self.folder.display());
        }
    }
}

/// The text on standard output and on standard error.
pub(crate) fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Runs `zfolio` to its end: exit status, standard output, standard error.
pub(crate) fn output_of(arguments: &[&str]) -> (Option<i32>, String, String) {
    output_of_command(&mut zfolio(arguments))
}

/// Runs a command of [`zfolio`] to its end.
pub(crate) fn output_of_command(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().expect("it was built");
    let (out, err) = texts(&output);
    (output.status.code(), out, err)
}

/// Sends a signal by name to a process, or to a group if the number is negative.
pub(crate) fn kill(signal: &str, pid: i64) {
    let command = format!("kill -s {signal} -- {pid}");
    let status = Command::new("sh").args(["-c", &command]).status().expect("there is a shell");
    assert!(status.success(), "{command}");
}

/// An address of this machine whose port was free a moment ago.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").expect("there are ports").local_addr().expect("it is bound")
}

/// Waits up to ten seconds for `condition`.
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("waited ten seconds for {what}");
}

/// The letter of a process's state, as in `ps`.
pub(crate) fn state(pid: u32) -> Option<char> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit(')').next()?.trim().chars().next()
}
