//! `make install` and `make uninstall`, by the script that both run.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stage::{scratch, stand_in};

/// Every path below `folder`.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("it is ours") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path.clone());
            }
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Whether the script did this, and what it said.
fn told(arguments: &[&str]) -> (bool, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/install");
    let output = Command::new(script).args(arguments).output().expect("it can be executed");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn script(arguments: &[&str]) -> bool {
    told(arguments).0
}

/// A folder with the built programs. `None`, with a message: there are no tools to install them.
fn built(name: &str) -> Option<PathBuf> {
    if Command::new("objcopy").arg("--version").output().is_err() {
        eprintln!("SKIPPED: objcopy is not installed (binutils)");
        return None;
    }
    let (folder, program) = (scratch(name), Path::new(env!("CARGO_BIN_EXE_zfolio")));
    // Anything stands in for usemem: it is looked for, and not run.
    for (file, name) in
        [(program, "zfolio"), (stand_in(), "usemem"), (stand_in(), "libzfolio_preload.so")]
    {
        symlink(file, folder.join(name)).expect("it is ours");
    }
    Some(folder)
}

/// Goal: the package's list of licenses has everything that is linked.
#[test]
fn every_linked_crate_is_in_the_copyright_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let listed = fs::read_to_string(root.join("packaging/debian/copyright")).expect("it is there");
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--locked", "--offline", "-e", "normal,no-proc-macro", "--prefix", "none"]);
    tree.args(["-p", "zfolio-cli", "-p", "zfolio-preload", "-p", "zfolio-bench"]).current_dir(root);
    let output = tree.output().expect("it built this");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let crates = String::from_utf8_lossy(&output.stdout);
    let linked = crates.lines().filter_map(|line| line.split(' ').next());
    let mut linked: Vec<_> =
        linked.filter(|name| !name.is_empty() && !name.starts_with("zfolio")).collect();
    linked.sort_unstable();
    linked.dedup();
    assert!(linked.len() > 40, "{linked:?}");
    linked.retain(|name| {
        !listed.split_whitespace().any(|word| word.strip_suffix("/*") == Some(name))
    });
    assert!(linked.is_empty(), "not named: {linked:?}");
}

/// `bench usemem` of the installed program, with nothing to run: its status, and its line.
fn bench_usemem(prefix: &Path) -> (Option<i32>, String) {
    let corpus = scratch("built").join("corpus");
    fs::write(&corpus, vec![7; 1 << 20]).expect("it is ours");
    let mut command = Command::new(prefix.join("bin/zfolio"));
    command.args([
        "bench",
        "usemem",
        "--without",
        "free",
        "--without",
        "run",
        "--without",
        "inline",
    ]);
    let output = command.arg("--corpus").arg(corpus).env("PATH", "").output();
    let output = output.expect("it can be executed");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Goal: what is said at the end is true where udev and systemd look, and elsewhere.
#[test]
fn files_for_udev_and_systemd_are_copied_from_elsewhere() {
    let Some(built) = built("built-elsewhere") else { return };
    let prefix = scratch("elsewhere");
    let (built, prefix_name) = (built.to_str().expect("plain"), prefix.to_str().expect("plain"));
    let (_, told) = told(&["install", built, "", prefix_name]);
    for file in ["lib/udev/rules.d/60-zfolio.rules", "share/doc/zfolio/docs/recipes.md"] {
        let named = prefix.join(file);
        assert!(named.exists() && told.contains(named.to_str().expect("plain")), "{file}: {told}");
    }
    assert!(script(&["uninstall", "", prefix_name]));
    assert!(!prefix.join("bin/zfolio").exists());
}

/// Goal: an install that fails in the middle leaves nothing that `uninstall` does not find. It left programs that
/// were in no list, since the list was written last. Method: a folder stands where a program is expected.
#[test]
fn what_a_failed_install_has_put_there_can_be_uninstalled() {
    let Some(built) = built("built-half") else { return };
    let root = scratch("half");
    fs::create_dir(root.join("opt")).expect("it is ours");
    let before = paths(&root);
    let (built_name, root_name) = (built.to_str().expect("plain"), root.to_str().expect("plain"));
    assert!(script(&["install", built_name, root_name, "/opt"]));
    fs::remove_file(built.join("usemem")).expect("it is ours");
    fs::create_dir(built.join("usemem")).expect("it is ours");
    assert!(!script(&["install", built_name, root_name, "/opt"]));
    assert!(root.join("opt/bin/zfolio").exists(), "it fails after the first program");
    assert!(script(&["uninstall", root_name, "/opt"]));
    assert_eq!(paths(&root), before);
}

/// Goal: what an administrator has made for zfolio stays, and a line says so with the command that removes it.
#[test]
fn uninstall_says_what_stays() {
    let Some(built) = built("built-stays") else { return };
    let root = scratch("stays");
    let (built, root_name) = (built.to_str().expect("plain"), root.to_str().expect("plain"));
    assert!(script(&["install", built, root_name, "/opt"]));
    let (_, nothing) = told(&["uninstall", root_name, "/opt"]);
    assert_eq!(nothing, "");

    assert!(script(&["install", built, root_name, "/opt"]));
    let link = "etc/systemd/system/multi-user.target.wants/zfolio-devices.service";
    let rule = "etc/udev/rules.d/60-zfolio.rules";
    for file in [link, rule, "etc/zfolio/devices.conf"] {
        let parent = root.join(file).parent().expect("it has one").to_path_buf();
        fs::create_dir_all(parent).expect("it is ours");
    }
    symlink("/opt/lib/systemd/system/zfolio-devices.service", root.join(link)).expect("it is ours");
    fs::write(root.join(rule), "").expect("it is ours");
    let (uninstalled, told) = told(&["uninstall", root_name, "/opt"]);
    let lines: Vec<&str> = told.lines().collect();
    let expected = [
        format!("uninstall: the service stays: sudo rm {root_name}/{link}"),
        format!("uninstall: the udev rule stays: sudo rm {root_name}/{rule}"),
        format!("uninstall: the configuration stays: sudo rm -r {root_name}/etc/zfolio"),
    ];
    assert!(uninstalled);
    assert_eq!(lines, expected);
}

/// Goal: the same programs give the same package, byte for byte: without `SOURCE_DATE_EPOCH` its files have the date of
/// the last commit. They had the time at which it was made.
#[test]
fn a_package_can_be_made_again() {
    let Some(built) = built("built-deb") else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let is_there = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(&root).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !is_there("dpkg-deb", &["--version"]) || !is_there("git", &["log", "-1"]) {
        eprintln!("SKIPPED: dpkg-deb is not installed, or this is no clone with git");
        return;
    }
    let [first, again] = ["deb-first", "deb-again"].map(|name| {
        let folder = scratch(name);
        let mut deb = Command::new(root.join("packaging/deb"));
        deb.arg(&built).arg(&folder).env_remove("SOURCE_DATE_EPOCH");
        // To compress takes a minute.
        let output =
            deb.env("DPKG_DEB_COMPRESSOR_TYPE", "none").output().expect("it can be executed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let made = paths(&folder);
        let bytes: Vec<_> = made.iter().map(|file| fs::read(file).expect("it was made")).collect();
        fs::remove_dir_all(folder).expect("it is ours");
        bytes
    });
    assert_eq!(first.len(), 2);
    assert!(first == again);
}

/// Goal: what was installed runs; `uninstall` removes all of it, however often it was installed,
/// and keeps files of others. Method: a folder instead of `/`, with a manual page of another
/// program.
#[test]
fn uninstall_removes_what_install_put_there() {
    let Some(built) = built("built") else { return };
    let root = scratch("root");
    let others = root.join("opt/share/man/man1/other.1");
    fs::create_dir_all(others.parent().expect("it has one")).expect("it is ours");
    fs::write(&others, "").expect("it is ours");
    let before = paths(&root);
    let (built, root_name) = (built.to_str().expect("plain"), root.to_str().expect("plain"));

    assert!(script(&["install", built, root_name, "/opt"]));
    let installed = paths(&root);
    assert!(script(&["install", built, root_name, "/opt"]));
    assert_eq!(paths(&root), installed, "the second time there is neither more nor less");
    for file in [
        "bin/zfolio",
        "lib/zfolio/libzfolio_preload.so",
        "lib/zfolio/usemem",
        "lib/udev/rules.d/60-zfolio.rules",
        "lib/systemd/system/zfolio-devices.service",
        "share/doc/zfolio/examples/devices.conf",
        "share/doc/zfolio/README.md",
        "share/doc/zfolio/docs/recipes.md",
        "share/doc/zfolio/docs/limits.md",
        "share/doc/zfolio/docs/cli.md",
        "share/man/man1/zfolio-run.1",
        "share/bash-completion/completions/zfolio",
        "share/zsh/site-functions/_zfolio",
        "share/fish/vendor_completions.d/zfolio.fish",
    ] {
        assert!(installed.contains(&root.join("opt").join(file)), "{file}: {installed:?}");
    }
    let unit = fs::read_to_string(root.join("opt/lib/systemd/system/zfolio-devices.service"));
    assert!(
        unit.expect("it was installed").contains("\nExecStart=/opt/bin/zfolio device daemon\n")
    );
    let output = Command::new(root.join("opt/bin/zfolio")).arg("--version").output();
    assert!(output.expect("it can be executed").status.success());
    assert_eq!(
        bench_usemem(&root.join("opt")).0,
        Some(2),
        "it is found, and nothing is left to run"
    );
    fs::remove_file(root.join("opt/lib/zfolio/usemem")).expect("it was installed");
    let (code, err) = bench_usemem(&root.join("opt"));
    assert!(code == Some(125) && err.contains("nor in ../lib/zfolio"), "{err}");

    assert!(script(&["uninstall", root_name, "/opt"]));
    assert_eq!(paths(&root), before);
    assert!(!script(&["uninstall", root_name, "/opt"]), "nothing is there any more");
}
