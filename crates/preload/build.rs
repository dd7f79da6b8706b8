//! How the library is linked.
//!
//! - mimalloc's calls of `pthread_mutex_lock` and `pthread_mutex_unlock` come to this library: see `allocator_locks`.
//! - What Rust needs of `libgcc_s.so.1` is linked into the library: each process of a run would load that library,
//!   which takes 0.14 ms of the 0.7 that a small program takes. Rust's standard library asks for `-lgcc_s`; the linker
//!   finds a file of that name here first, which names the archive with the same functions.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["pthread_mutex_lock", "pthread_mutex_unlock"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    let folder = std::env::var("OUT_DIR").expect("cargo sets it");
    let script = Path::new(&folder).join("libgcc_s.so");
    std::fs::write(&script, "INPUT(-lgcc_eh)\n").expect("the folder is ours");
    println!("cargo:rustc-link-search=native={folder}");
}
