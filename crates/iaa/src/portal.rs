//! Where descriptors go: a work queue of a device, or of the model.

#[allow(unsafe_code, reason = "instructions that write to a device")]
pub mod hardware;

use std::fmt;

use crate::layout::Descriptor;

/// What became of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Submitted {
    /// The device has it. It will write the record, sooner or later, unless it fails.
    Accepted,
    /// The queue is full, and nothing has happened. Try again later.
    Full,
    /// There is no device any more, and nothing has happened.
    Gone,
}

/// A work queue. It holds no lock while it waits for anything, and does not wait for long.
///
/// # Safety
///
/// An implementer accesses only what the descriptor names, and nothing of it after it has written the status of
/// the record, or has refused the descriptor.
#[allow(unsafe_code, reason = "a device works on addresses")]
pub unsafe trait Portal: Send + Sync + fmt::Debug {
    /// Hands one descriptor to the device.
    ///
    /// # Safety
    ///
    /// If the descriptor is accepted: until its record has a status, and for ever if it never gets one, the
    /// source and the AECS stay readable, destination and record writable, and nobody accesses the destination, or of
    /// the record more than the status, or writes to the source.
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submitted;
}

/// A queue without a device, for who models only when descriptors go and come ([`crate::seat`]). It refuses all.
#[derive(Debug)]
pub struct Nowhere;

#[allow(unsafe_code, reason = "implements the trait")]
// SAFETY: it accesses nothing.
unsafe impl Portal for Nowhere {
    unsafe fn submit(&self, _descriptor: &Descriptor) -> Submitted {
        Submitted::Full
    }
}
