//! The program to run: found as a shell finds it, and checked before it starts.
//!
//! The loader silently ignores LD_PRELOAD for a static program, and for one that gains rights which
//! its user does not have. Such a program would run without a limit, so it is refused here, with
//! what to do. For a script the same applies to its interpreter, so `#!` lines are followed.
//!
//! Everything that is read is checked: a file may contain anything.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use zfolio_sys::probe;

use super::elf::{self, read_up_to};
use crate::failure::Failure;

/// Interpreters that are scripts themselves: the kernel follows this many.
const SCRIPTS_MAX: usize = 5;

/// Bytes of a script's first line that the kernel reads.
const HEAD_BYTES: usize = 256;

/// The search path of a shell if PATH is not set.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The program to execute.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Program {
    /// The file.
    pub(crate) path: PathBuf,
    /// Its arguments, the name first.
    pub(crate) arguments: Vec<OsString>,
}

impl Program {
    /// Finds the program that the first of `words` names, and checks it.
    ///
    /// # Errors
    ///
    /// 127 if there is none, or no interpreter for it, 126 if it cannot be executed or cannot be managed.
    pub(crate) fn find(words: &[OsString]) -> Result<Program, Failure> {
        let path = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        let name = words.first().map_or(OsStr::new(""), OsString::as_os_str);
        let found = search(name, &path)?;
        let mut arguments = words.to_vec();
        match look_at(&found, &path, 0)? {
            Kind::Executable => Ok(Program { path: found, arguments }),
            Kind::PlainText => {
                // As in a shell: a text without `#!` is a shell script.
                arguments[0] = found.into();
                arguments.insert(0, "/bin/sh".into());
                Ok(Program { path: "/bin/sh".into(), arguments })
            }
        }
    }
}

/// How a file is started.
#[derive(PartialEq, Eq, Debug)]
enum Kind {
    /// By the kernel.
    Executable,
    /// By a shell, since it is a text.
    PlainText,
}

/// The file that `name` refers to.
fn search(name: &OsStr, path: &OsStr) -> Result<PathBuf, Failure> {
    let shown = name.to_string_lossy();
    if name.as_bytes().contains(&b'/') {
        let file = PathBuf::from(name);
        return match executable(&file) {
            Ok(()) => Ok(file),
            Err(error) if is_absent(&error) => Err(Failure::not_found(format!(
                "PROGRAM: '{shown}' is not there; accepted: the path of a program, or a name in PATH"
            ))),
            Err(error) => Err(not_executable(&shown, &error)),
        };
    }
    let mut refused = None;
    for directory in env::split_paths(path).filter(|_| !name.is_empty()) {
        // An empty element of PATH is the current directory.
        let file = Path::new(".").join(directory).join(name);
        match executable(&file) {
            Ok(()) => return Ok(file),
            Err(error) if is_absent(&error) => {}
            Err(error) => refused = refused.or(Some((file, error))),
        }
    }
    Err(match refused {
        Some((file, error)) => not_executable(&file.to_string_lossy(), &error),
        None => Failure::not_found(format!(
            "PROGRAM: '{shown}' was not found in PATH; accepted: a program in PATH, or its path"
        )),
    })
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn not_executable(shown: &str, error: &io::Error) -> Failure {
    Failure::program(format!(
        "PROGRAM: '{shown}' cannot be executed: {error}; accepted: a file that 'ls -l' shows with x"
    ))
}

/// Fails unless `file` is a regular file that this process may execute.
fn executable(file: &Path) -> io::Result<()> {
    let metadata = fs::metadata(file)?;
    if metadata.is_dir() {
        return Err(io::Error::other("it is a directory"));
    }
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    probe::may_execute(file)
}

/// Refuses a file that cannot be managed; `scripts` interpreters were followed to reach it.
fn look_at(file: &Path, path: &OsStr, scripts: usize) -> Result<Kind, Failure> {
    let shown = file.to_string_lossy();
    let opened = match File::open(file) {
        Ok(opened) => opened,
        // The file is executable, but not readable: the kernel will start it, but it cannot be
        // checked here.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(Kind::Executable);
        }
        Err(error) => return Err(not_executable(&shown, &error)),
    };
    let mut head = [0; HEAD_BYTES];
    let length =
        read_up_to(&opened, &mut head, 0).map_err(|error| not_executable(&shown, &error))?;
    let head = &head[..length];
    if head.starts_with(b"\x7fELF") {
        check_rights(&opened, &shown)?;
        return check_elf(&opened, &shown).map(|()| Kind::Executable);
    }
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if let Some(command) = line.strip_prefix(b"#!") {
        if scripts == SCRIPTS_MAX {
            return Err(Failure::program(format!(
                "PROGRAM: '{shown}': more than {SCRIPTS_MAX} interpreters, each a script"
            )));
        }
        return follow(command, &shown, path, scripts).map(|()| Kind::Executable);
    }
    if line.contains(&0) {
        return Err(Failure::program(format!(
            "PROGRAM: '{shown}' is neither a program for this machine nor a script"
        )));
    }
    look_at(Path::new("/bin/sh"), path, scripts + 1).map(|_| Kind::PlainText)
}

/// Checks the interpreter that a script's first line names.
fn follow(command: &[u8], script: &str, path: &OsStr, scripts: usize) -> Result<(), Failure> {
    let mut words = command.split(|byte| matches!(byte, b' ' | b'\t' | b'\r'));
    let mut words = words.by_ref().filter(|word| !word.is_empty());
    let interpreter = Path::new(OsStr::from_bytes(words.next().unwrap_or_default()));
    let shown = interpreter.to_string_lossy();
    executable(interpreter).map_err(|error| {
        let line = format!("PROGRAM: '{script}': its interpreter '{shown}': {error}");
        // Without a name there is nothing to be found.
        if shown.is_empty() { Failure::program(line) } else { Failure::not_executed(line, &error) }
    })?;
    look_at(interpreter, path, scripts + 1)?;
    // `#!/usr/bin/env python3` runs the python3 in PATH. Options of env are not examined.
    let is_env = interpreter.file_name() == Some(OsStr::new("env"));
    match words.next() {
        Some(name) if is_env && !name.starts_with(b"-") && !name.contains(&b'=') => {
            let Ok(found) = search(OsStr::from_bytes(name), path) else { return Ok(()) };
            look_at(&found, path, scripts + 1).map(drop)
        }
        _ => Ok(()),
    }
}

/// Refuses a program that gains rights: the loader ignores LD_PRELOAD then.
fn check_rights(file: &File, shown: &str) -> Result<(), Failure> {
    let metadata = file
        .metadata()
        .map_err(|error| Failure::program(format!("PROGRAM: '{shown}': {error}")))?;
    let mode = metadata.mode();
    let (uid, gid) = (probe::effective_uid(), probe::effective_gid());
    let as_user = mode & 0o4000 != 0 && metadata.uid() != uid;
    // Without the group's x the bit means something else: mandatory locking.
    let as_group = mode & 0o2010 == 0o2010 && metadata.gid() != gid;
    let with_capabilities = uid != 0 && probe::has_file_capabilities(file);
    let how = match (as_user, as_group, with_capabilities) {
        (true, ..) => "as another user (setuid)",
        (_, true, _) => "as another group (setgid)",
        (.., true) => "with capabilities of its file (setcap)",
        _ => return Ok(()),
    };
    Err(Failure::program(format!(
        "PROGRAM: '{shown}' runs {how}, so the system loads no library of ours into it; \
         start zfolio itself with those rights, as in: sudo zfolio run -- COMMAND"
    )))
}

/// Why the library cannot be loaded into this file; `None` if it could, or if the file cannot be
/// read.
pub(super) fn unfit(file: &Path) -> Option<String> {
    match elf::look(&File::open(file).ok()?) {
        Ok(elf::About { loader: None, .. }) => Some("statically linked".to_owned()),
        Ok(elf::About { loader: Some(loader), .. }) if loader.contains("ld-musl") => {
            Some("linked with musl".to_owned())
        }
        Ok(elf::About { sanitizer: Some(_), .. }) => Some("built with a sanitizer".to_owned()),
        Ok(_) => None,
        Err(why) => Some(why.trim_start_matches("is ").to_owned()),
    }
}

/// Refuses an ELF file into which the library cannot be loaded.
fn check_elf(file: &File, shown: &str) -> Result<(), Failure> {
    let refused = match elf::look(file) {
        Ok(elf::About { loader: None, .. }) => {
            "is statically linked, so no library can be loaded into it; use a dynamically linked build of it"
                .to_owned()
        }
        Ok(elf::About { loader: Some(loader), .. }) if loader.contains("ld-musl") => {
            "is linked with musl; accepted: programs linked with the GNU C library".to_owned()
        }
        Ok(elf::About { sanitizer: Some(library), .. }) => format!(
            "is built with a sanitizer, whose library ({library}) must have the program's memory to itself; \
             use a build without it, or run it without zfolio"
        ),
        Ok(_) => return Ok(()),
        Err(why) => format!("{why}; accepted: 64-bit programs for {}", std::env::consts::ARCH),
    };
    Err(Failure::program(format!("PROGRAM: '{shown}' {refused}")))
}

#[cfg(test)]
mod tests {
    use super::super::elf::{DT_NEEDED, DT_STRTAB, EM_THIS, PT_DYNAMIC, PT_INTERP, PT_LOAD};
    use super::{Kind, look_at, search};
    use crate::failure::Failure;
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    const PATH: &str = "/usr/bin:/bin";

    struct Files(PathBuf);

    impl Files {
        fn new(name: &str) -> Files {
            let path =
                std::env::temp_dir().join(format!("zfolio-program-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Files(path)
        }

        fn write(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }

        fn look(&self, name: &str, bytes: &[u8]) -> Result<Kind, Failure> {
            look_at(&self.write(name, bytes, 0o755), OsStr::new(PATH), 0)
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// A minimal ELF file with one program header of type `kind`, which names `loader`.
    fn elf(class: u8, machine: u16, kind: u32, loader: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1]);
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes[72..80].copy_from_slice(&120u64.to_le_bytes());
        bytes[96..104].copy_from_slice(&(loader.len() as u64).to_le_bytes());
        bytes.extend(loader);
        bytes
    }

    fn refusal(result: Result<Kind, Failure>) -> String {
        let failure = result.expect_err("must be refused");
        assert_eq!(failure.status(), 126);
        failure.to_string()
    }

    #[test]
    fn dynamic_programs_are_accepted_and_others_say_why_not() {
        let files = Files::new("elf");
        let glibc = b"/lib64/ld-linux-x86-64.so.2\0";
        let good = elf(2, EM_THIS, PT_INTERP, glibc);
        assert_eq!(files.look("good", &good), Ok(Kind::Executable));
        let cases: [(&str, Vec<u8>, &str); 6] = [
            ("static", elf(2, EM_THIS, 1, b""), "statically linked"),
            ("musl", elf(2, EM_THIS, PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0"), "musl"),
            ("old", elf(1, 3, PT_INTERP, glibc), "32-bit"),
            ("foreign", elf(2, 243, PT_INTERP, glibc), "another machine (ELF machine 243)"),
            ("short", good[..100].to_vec(), "damaged"),
            ("stub", b"\x7fELF".to_vec(), "damaged"),
        ];
        for (name, bytes, reason) in cases {
            let refused = refusal(files.look(name, &bytes));
            assert!(refused.contains(reason) && refused.contains(name), "{refused}");
        }
    }

    /// A minimal program that needs `library`: a loader, a dynamic section, and the names in a
    /// loaded part.
    fn needing(library: &str) -> Vec<u8> {
        let mut bytes = elf(2, EM_THIS, PT_INTERP, b"");
        bytes[56..58].copy_from_slice(&3_u16.to_le_bytes());
        bytes.resize(64 + 3 * 56, 0);
        let (dynamic, names) = (bytes.len() as u64, bytes.len() as u64 + 48);
        let loader = b"/lib64/ld-linux-x86-64.so.2\0";
        let text = [b"\0".as_slice(), library.as_bytes(), b"\0"].concat();
        // Kind, position in the file, address, length.
        let parts = [
            (PT_INTERP, names + text.len() as u64, 0, loader.len() as u64),
            (PT_DYNAMIC, dynamic, 0, 48),
            (PT_LOAD, names, 0x5000, text.len() as u64),
        ];
        for (index, (kind, at, address, length)) in parts.into_iter().enumerate() {
            let entry = &mut bytes[64 + index * 56..][..56];
            entry[..4].copy_from_slice(&kind.to_le_bytes());
            entry[8..16].copy_from_slice(&at.to_le_bytes());
            entry[16..24].copy_from_slice(&u64::to_le_bytes(address));
            entry[32..40].copy_from_slice(&length.to_le_bytes());
        }
        for word in [DT_NEEDED, 1, DT_STRTAB, 0x5000, 0, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(text);
        bytes.extend(loader);
        bytes
    }

    #[test]
    fn programs_with_a_sanitizer_are_refused() {
        let files = Files::new("sanitizer");
        for library in ["libc.so.6", "libubsan.so.1", "liblsan.so.0", "my-libasan.so.8"] {
            assert_eq!(files.look("plain", &needing(library)), Ok(Kind::Executable), "{library}");
        }
        for library in ["libasan.so.8", "libtsan.so.2", "libclang_rt.asan-x86_64.so"] {
            let refused = refusal(files.look("built", &needing(library)));
            assert!(refused.contains(library) && refused.contains("sanitizer"), "{refused}");
        }
    }

    /// Goal: a damaged file gives a result, never a panic. Method: seeded changes of every byte of
    /// the header.
    #[test]
    fn damaged_headers_do_not_panic() {
        let files = Files::new("damage");
        let good = needing("libasan.so.8");
        for at in 4..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                // Both results are right.
                drop(files.look("damaged", &bytes));
            }
        }
    }

    #[test]
    fn scripts_are_followed_to_their_interpreter() {
        let files = Files::new("script");
        let fixed = files.write("static", &elf(2, EM_THIS, 1, b""), 0o755);
        assert_eq!(files.look("sh", b"#!/bin/sh\necho\n"), Ok(Kind::Executable));
        assert_eq!(files.look("env", b"#! /usr/bin/env -S sh -x\n"), Ok(Kind::Executable));
        assert_eq!(files.look("text", b"echo hello\n"), Ok(Kind::PlainText));
        assert_eq!(files.look("empty", b""), Ok(Kind::PlainText));
        let script = format!("#!{} -x\n", fixed.display());
        assert!(refusal(files.look("by-static", script.as_bytes())).contains("statically"));
        let lost = files.look("lost", b"#!/nonexistent/sh\n").expect_err("must be refused");
        assert!(lost.status() == 127 && lost.message().contains("'/nonexistent/sh'"), "{lost}");
        assert!(refusal(files.look("odd", b"#!/dev/null\n")).contains("'/dev/null'"));
        assert!(refusal(files.look("bare", b"#!\n")).contains("interpreter"));
        assert!(refusal(files.look("binary", b"\0\x01\x02")).contains("neither"));
        let own = files.0.join("loop");
        let script = format!("#!{}\n", own.display());
        assert!(refusal(files.look("loop", script.as_bytes())).contains("interpreters"));
        let path = OsStr::new(files.0.as_os_str());
        let by_env = files.write("by-env", b"#!/usr/bin/env static\n", 0o755);
        assert!(refusal(look_at(&by_env, path, 0)).contains("statically"));
    }

    #[test]
    fn path_is_searched_as_a_shell_does() {
        let files = Files::new("path");
        let (first, second) = (files.0.join("first"), files.0.join("second"));
        fs::create_dir_all(first.join("folder")).unwrap();
        fs::create_dir_all(&second).unwrap();
        files.write("first/tool", b"", 0o644);
        files.write("second/tool", b"", 0o755);
        files.write("first/data", b"", 0o644);
        let path = std::env::join_paths([&first, &second]).unwrap();
        let status = |name: &str| search(OsStr::new(name), &path).map_err(|f| f.status());
        assert_eq!(status("tool"), Ok(second.join("tool")), "the first that is executable");
        assert_eq!(status("data"), Err(126));
        assert_eq!(status("folder"), Err(126));
        assert_eq!(status("nothing"), Err(127));
        assert_eq!(status(""), Err(127));
        assert_eq!(status("/nonexistent/tool"), Err(127));
        assert_eq!(status("/dev/null/tool"), Err(127));
        assert_eq!(status("/dev/null"), Err(126));
        assert_eq!(status("/"), Err(126));
    }
}
