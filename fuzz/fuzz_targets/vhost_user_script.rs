//! Whatever a vhost-user front end sends, and whatever its guest puts into its rings.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| zfolio_block::vhost_user::script::play(data));
