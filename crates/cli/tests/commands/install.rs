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

fn script(arguments: &[&str]) -> bool {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/install");
    Command::new(script).args(arguments).status().expect("it can be executed").success()
}

/// Goal: what was installed runs; `uninstall` removes all of it, however often it was installed,
/// and keeps files of others. Method: a folder instead of `/`, with a manual page of another
/// program.
#[test]
fn uninstall_removes_what_install_put_there() {
    if Command::new("objcopy").arg("--version").output().is_err() {
        eprintln!("SKIPPED: objcopy is not installed (binutils)");
        return;
    }
    let (built, root) = (scratch("built"), scratch("root"));
    for (file, name) in
        [(Path::new(env!("CARGO_BIN_EXE_zfolio")), "zfolio"), (stand_in(), "libzfolio_preload.so")]
    {
        symlink(file, built.join(name)).expect("it is ours");
    }
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
        "lib/udev/rules.d/60-zfolio.rules",
        "lib/systemd/system/zfolio-devices.service",
        "share/doc/zfolio/examples/devices.conf",
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

    assert!(script(&["uninstall", root_name, "/opt"]));
    assert_eq!(paths(&root), before);
    assert!(!script(&["uninstall", root_name, "/opt"]), "nothing is there any more");
}
