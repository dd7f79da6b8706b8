//! The instructions by which a program hands descriptors to a device, and waits for it.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _rdtsc};

use crate::layout::Descriptor;

/// Leaf 7 of CPUID, register ECX.
#[allow(unused_unsafe, reason = "newer compilers call it safe")]
pub(super) fn features() -> u32 {
    // SAFETY: every x86-64 processor has the instruction.
    if unsafe { __cpuid_count(0, 0) }.eax < 7 {
        return 0;
    }
    // SAFETY: the same.
    unsafe { __cpuid_count(7, 0) }.ecx
}

/// Stores 64 bytes at `portal` in one step, after all stores before it.
///
/// # Safety
///
/// The processor has `movdir64b`; `portal` is aligned by 64 bytes and belongs to a device.
pub(super) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
    // SAFETY: the caller's contract. No Rust object changes; what the device does is the submitter's contract.
    // `sfence`, because the store is not ordered with those before it.
    unsafe {
        asm!("sfence", "movdir64b {portal}, [{from}]", portal = in(reg) portal, from = in(reg) descriptor,
            options(nostack, preserves_flags));
    }
}

/// Offers 64 bytes to `portal`; false if it does not take them.
///
/// # Safety
///
/// As [`movdir64b`], for `enqcmd`.
pub(super) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> bool {
    let is_refused: u8;
    // SAFETY: as for `movdir64b`. `enqcmd` sets the zero flag if the queue did not take the descriptor.
    unsafe {
        asm!("sfence", "enqcmd {portal}, [{from}]", "setz {is_refused}", portal = in(reg) portal,
            from = in(reg) descriptor, is_refused = out(reg_byte) is_refused, options(nostack));
    }
    is_refused == 0
}

/// Watches the cache line of `address`.
///
/// # Safety
///
/// The processor has WAITPKG.
pub(super) unsafe fn umonitor(address: *const u8) {
    // SAFETY: it accesses nothing; the caller's contract.
    unsafe { asm!("umonitor {}", in(reg) address, options(nostack, preserves_flags)) };
}

/// Waits for a write to the line that is watched, in the state from which the processor wakes fastest (C0.1), for at
/// most `cycles`.
///
/// # Safety
///
/// The processor has WAITPKG.
pub(super) unsafe fn umwait(cycles: u64) {
    // SAFETY: every x86-64 processor has the instruction.
    let deadline = unsafe { _rdtsc() }.wrapping_add(cycles);
    let [low, high] = [deadline & 0xFFFF_FFFF, deadline >> 32];
    // SAFETY: it accesses nothing; the caller's contract.
    unsafe {
        asm!("umwait {state:e}", state = in(reg) 1, in("rax") low, in("rdx") high, options(nostack))
    };
}
