//! Every raw system call that zfolio makes. No policy: what to do is decided above.

pub mod probe;
