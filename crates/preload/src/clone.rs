//! `clone(3)` and `syscall(3)`: forks that do not come through `fork`.
//!
//! A child that does not share its parent's memory gets its copy of everything by copy-on-write, so it
//! needs an engine of its own, as after `fork`. A thread, or a child that borrows the parent's memory
//! (`CLONE_VM`), needs nothing of us.
//!
//! ```text
//! clone(f, stack, flags)    without CLONE_VM: prepare; the child sets up, then runs f
//! syscall(SYS_fork ...)     the same; SYS_clone with a stack of its own goes to the kernel as it is
//! syscall(anything else)    to the kernel, by the same instructions as in the C library
//! ```

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use zfolio_sys::map;

use crate::allocator::{interpose, next};
use crate::{fork, mappings, settings};

/// As much of its stack as a child uses before faults are served.
const STACK_BYTES: usize = 64 << 10;

/// What the child runs.
type Life = extern "C" fn(*mut c_void) -> c_int;

/// The seven arguments: the last three are there as the flags say.
type Clone = unsafe extern "C" fn(
    Life,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// What the program wants its child to run. On the parent's stack, of which the child has a copy.
struct Start {
    life: Life,
    argument: *mut c_void,
}

extern "C" fn start(start: *mut c_void) -> c_int {
    // SAFETY: clone() passes a `Start`, which this process has its own copy of.
    let Start { life, argument } = unsafe { start.cast::<Start>().read() };
    fork::child();
    life(argument)
}

/// Words that the kernel reads and writes while the engine is held still, or in the child before faults
/// are served: none of them may be compressed. What is no address is nobody's.
fn give_up_words(words: [*mut c_void; 3]) {
    for word in words.into_iter().filter(|word| !word.is_null()) {
        mappings::give_up(word as usize, (word as usize).saturating_add(map::PAGE_BYTES));
    }
}

interpose! {
    /// `clone(3)`.
    ///
    /// It is variadic: what the caller left out is read all the same, from registers and from the
    /// caller's frame, and is passed on unlooked at.
    fn clone(life: Life, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent_word: *mut c_void, storage: *mut c_void, child_word: *mut c_void) -> c_int {
        let next = next!(c"clone" as Clone);
        let managed = settings::get().is_some();
        if managed && flags & libc::CLONE_CHILD_CLEARTID != 0 {
            // The kernel clears this word when the child exits, and waits for no fault then.
            give_up_words([child_word, null_mut(), null_mut()]);
        }
        let ours = managed && flags & libc::CLONE_VM == 0;
        if !ours || stack.is_null() {
            // SAFETY: the program's own call, with its own arguments.
            return unsafe { next(life, stack, flags, argument, parent_word, storage, child_word) };
        }
        if !fork::child_has_room() {
            return -1;
        }
        let given = |flag: c_int, word| if flags & flag != 0 { word } else { null_mut() };
        // The child runs on its stack before faults are served.
        let top = stack as usize;
        mappings::give_up(top.saturating_sub(STACK_BYTES), top.saturating_add(map::PAGE_BYTES));
        give_up_words([
            given(libc::CLONE_PARENT_SETTID | libc::CLONE_PIDFD, parent_word),
            given(libc::CLONE_SETTLS, storage),
            given(libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID, child_word),
        ]);
        let mut about = Start { life, argument };
        let about = (&raw mut about).cast();
        fork::prepare_bare();
        // SAFETY: the program's own call, but for what the child runs first.
        let answer = unsafe { next(start, stack, flags, about, parent_word, storage, child_word) };
        fork::parent();
        answer
    }
}

#[cfg(target_arch = "x86_64")]
mod raw {
    //! `syscall(3)`, for the architecture that we can test it on.

    use std::ffi::{c_int, c_long, c_void};

    use super::give_up_words;
    use crate::allocator::{interpose, set_errno};
    use crate::{fork, mappings, settings};

    // As in the C library, but for the comparisons before it: fork (57) and vfork (58), clone (56) and
    // clone3 (435) without CLONE_VM (0x100) and with no stack of the child's, and madvise (28) with
    // MADV_WIPEONFORK (18).
    std::arch::global_asm!(
        ".globl zfolio_syscall",
        ".hidden zfolio_syscall",
        ".type zfolio_syscall, @function",
        "zfolio_syscall:",
        "    lea eax, [rdi - 56]",
        "    cmp eax, 3",
        "    jb 20f",
        "    cmp edi, 435",
        "    je 30f",
        "    cmp edi, 28",
        "    je 40f",
        "10:",
        "    mov rax, rdi",
        "    mov rdi, rsi",
        "    mov rsi, rdx",
        "    mov rdx, rcx",
        "    mov r10, r8",
        "    mov r8, r9",
        "    mov r9, [rsp + 8]",
        "    syscall",
        "    cmp rax, -4095",
        "    jae 60f",
        "    ret",
        "20:",
        "    cmp edi, 56",
        "    jne 50f",
        "    test esi, 0x100",
        "    jnz 10b",
        "    test rdx, rdx",
        "    jnz 10b",
        "    jmp 50f",
        "30:",
        // A `struct clone_args` of its first version is 64 bytes; its stack is at 40.
        "    test rsi, rsi",
        "    jz 10b",
        "    cmp rdx, 64",
        "    jb 10b",
        "    test dword ptr [rsi], 0x100",
        "    jnz 10b",
        "    cmp qword ptr [rsi + 40], 0",
        "    jne 10b",
        "    jmp 50f",
        "40:",
        "    cmp ecx, 18",
        "    jne 10b",
        "50:",
        "    jmp {special}",
        "60:",
        "    neg eax",
        "    mov edi, eax",
        "    push rax",
        "    call {fail}",
        "    pop rcx",
        "    ret",
        ".size zfolio_syscall, . - zfolio_syscall",
        special = sym special,
        fail = sym fail,
    );

    unsafe extern "C" {
        fn zfolio_syscall(
            number: c_long,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> c_long;
    }

    interpose! {
        /// `syscall(2)`: variadic, so that what the caller left out is read all the same. The compiler makes a
        /// jump of it, and the frame is the caller's.
        fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            // SAFETY: the program's own call, with its own words.
            unsafe { zfolio_syscall(number, a, b, c, d, e, f) }
        }
    }

    extern "C" fn fail(error: c_int) -> c_long {
        set_errno(error);
        -1
    }

    /// One system call, whose child if it has one goes on here, on its own copy of the stack.
    fn call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> c_long {
        let answer: c_long;
        // SAFETY: the program's own call, with its own words; the kernel leaves all registers but these.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") number => answer,
                in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
                lateout("rcx") _, lateout("r11") _,
            );
        }
        answer
    }

    /// An answer as the C library gives it.
    fn told(answer: c_long) -> c_long {
        if (-4095..0).contains(&answer) {
            return fail(c_int::try_from(-answer).unwrap_or(libc::EINVAL));
        }
        answer
    }

    /// The calls that are not the kernel's alone.
    extern "C" fn special(
        number: c_long,
        a: usize,
        b: usize,
        c: usize,
        d: usize,
        e: usize,
    ) -> c_long {
        if number == libc::SYS_madvise {
            mappings::give_up(a, mappings::page_end(a, b));
            return told(call(number, [a, b, c, d, e]));
        }
        // A child that borrowed its parent's memory would return from here into frames that it then
        // overwrites: what is asked for as vfork is done as fork, as the standard allows.
        let number = if number == libc::SYS_vfork { libc::SYS_fork } else { number };
        if settings::get().is_none() {
            return told(call(number, [a, b, c, d, e]));
        }
        if !fork::child_has_room() {
            return -1;
        }
        let pointer = |word: usize| word as *mut c_void;
        match number {
            libc::SYS_clone => give_up_words([pointer(c), pointer(d), pointer(e)]),
            libc::SYS_clone3 => {
                // SAFETY: at least 64 bytes, of which the assembly has read the first and the 40th.
                let [_, pidfd, child, parent, _, _, _, storage] =
                    unsafe { (a as *const [u64; 8]).read_unaligned() };
                let place = |word: u64| pointer(usize::try_from(word).unwrap_or(0));
                give_up_words([place(child), place(parent), place(storage)]);
                give_up_words([place(pidfd), pointer(a), pointer(a)]);
            }
            _ => {}
        }
        fork::prepare_bare();
        let answer = call(number, [a, b, c, d, e]);
        if answer == 0 {
            fork::child()
        } else {
            fork::parent()
        }
        told(answer)
    }
}
