//! mimalloc's calls of `pthread_mutex_lock` and `pthread_mutex_unlock` come to this library: see `allocator_locks`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["pthread_mutex_lock", "pthread_mutex_unlock"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
}
