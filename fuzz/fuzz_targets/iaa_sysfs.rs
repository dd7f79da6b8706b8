//! Any text as the attributes of accelerators and queues in sysfs: read or refused.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let root = std::env::temp_dir().join(format!("zfolio-iaa-sysfs-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("the temporary directory is writable");
    zfolio_iaa::discover::script::play(&root, data);
    drop(std::fs::remove_dir_all(&root));
});
