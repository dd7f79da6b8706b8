//! How the model reads and writes the memory that a descriptor names: the one place of the model with raw addresses.
//!
//! Every function has the contract of [`Portal::submit`](crate::portal::Portal::submit), which the model's caller has
//! promised to keep: the addresses of a descriptor are valid, and the driver touches neither source nor destination,
//! until the record has its status.

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::layout::Record;

fn pointer<T>(address: u64) -> *mut T {
    with_exposed_provenance_mut(usize::try_from(address).expect("addresses have 64 bits"))
}

/// Copies `bytes` bytes from `address`.
///
/// # Safety
///
/// They may be read, and nobody writes them meanwhile.
pub(super) unsafe fn read(address: u64, bytes: u32) -> Vec<u8> {
    let bytes = usize::try_from(bytes).expect("addresses have 64 bits");
    let mut copy = vec![0; bytes];
    // SAFETY: the source is readable by the contract; the destination is a new vector of this length.
    unsafe { std::ptr::copy_nonoverlapping(pointer(address), copy.as_mut_ptr(), bytes) };
    copy
}

/// Copies a `T` from `address`.
///
/// # Safety
///
/// It is one, aligned or not, and nobody writes it meanwhile.
pub(super) unsafe fn read_one<T: Copy>(address: u64) -> T {
    // SAFETY: by the contract a `T` is there.
    unsafe { pointer::<T>(address).read_unaligned() }
}

/// Copies `bytes` to `address`.
///
/// # Safety
///
/// There is room, and nobody reads or writes it meanwhile.
pub(super) unsafe fn write(address: u64, bytes: &[u8]) {
    // SAFETY: the destination is writable by the contract, and not part of `bytes`, which is the model's own.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(address), bytes.len()) };
}

/// Writes a record: all of it, and at last its status, which publishes the output too.
///
/// # Safety
///
/// `address` is that of a [`Record`], of which nobody else writes a byte, or reads one but the status.
pub(super) unsafe fn complete(address: u64, record: &Record) {
    let place = pointer::<Record>(address);
    // SAFETY: the place is a record by the contract.
    let status = unsafe { &raw mut (*place).status };
    // SAFETY: an atomic byte has size and alignment of a byte, and the status is accessed as one everywhere.
    let status = unsafe { AtomicU8::from_ptr(status) };
    let body = Record { status: status.load(Ordering::Relaxed), ..*record };
    let bytes = body_bytes(&body);
    // SAFETY: bytes 1 to 63 of the record; nobody else accesses them by the contract.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(address + 1), bytes.len()) };
    // Release: pairs with the Acquire of `Slots::poll`.
    status.store(record.status, Ordering::Release);
}

/// The bytes of a record after its status.
fn body_bytes(record: &Record) -> [u8; 63] {
    let mut bytes = [0; 63];
    let mut put =
        |at: usize, field: &[u8]| bytes[at - 1..at - 1 + field.len()].copy_from_slice(field);
    put(1, &[record.error, record.fault_info, record.reserved]);
    put(4, &record.bytes_completed.to_le_bytes());
    put(8, &record.fault_address.to_le_bytes());
    put(16, &record.invalid_flags.to_le_bytes());
    put(20, &record.reserved2.to_le_bytes());
    put(24, &record.output_bytes.to_le_bytes());
    put(28, &[record.output_bits, record.reserved3]);
    put(30, &record.xor.to_le_bytes());
    put(32, &record.crc.to_le_bytes());
    put(36, &record.min.to_le_bytes());
    put(40, &record.max.to_le_bytes());
    put(44, &record.sum.to_le_bytes());
    bytes
}
