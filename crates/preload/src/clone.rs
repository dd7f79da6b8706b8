//! `clone(3)` and `syscall(3)`: ways to fork without `fork`.
//!
//! A child that does not share its parent's memory gets a copy of it by copy-on-write. So it needs its own
//! engine, as after `fork`. A thread, or a child that shares the parent's memory (`CLONE_VM`), needs none.
//!
//! ```text
//! clone(f, stack, flags)    without CLONE_VM: prepare; the child sets up, then runs f
//! syscall(SYS_fork ...)     the same; SYS_clone with a stack for the child is passed on unchanged
//! syscall(anything else)    passed on, by the same instructions as in the C library
//! ```

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use zfolio_sys::map;

use crate::interpose::{interpose, next};
use crate::{fork, mappings, settings};

/// Bytes of its stack that a child may use before faults are served.
const STACK_BYTES: usize = 64 << 10;

/// The function that the child runs.
type Life = extern "C" fn(*mut c_void) -> c_int;

/// What the program wants its child to run. It is on the parent's stack, of which the child has a copy.
struct Start {
    life: Life,
    argument: *mut c_void,
}

extern "C" fn start(start: *mut c_void) -> c_int {
    // SAFETY: clone() passes the address of a `Start`, of which this process has its own copy.
    let Start { life, argument } = unsafe { start.cast::<Start>().read() };
    fork::child();
    life(argument)
}

/// Stops managing words that the kernel reads and writes while the engine is held still, or in the child before
/// faults are served: none of them may be compressed then. A word that is not an address has no effect.
fn give_up_words(words: [*mut c_void; 3]) {
    for word in words.into_iter().filter(|word| !word.is_null()) {
        mappings::give_up(word as usize, (word as usize).saturating_add(map::PAGE_BYTES));
    }
}

interpose! {
    /// `clone(3)`.
    ///
    /// It is variadic. Arguments that the caller left out are read all the same, from registers and from the
    /// caller's frame, and passed on without being used.
    fn clone(
        life: Life,
        stack: *mut c_void,
        flags: c_int,
        argument: *mut c_void,
        parent_word: *mut c_void,
        storage: *mut c_void,
        child_word: *mut c_void
    ) -> c_int {
        let next = next!(clone);
        let managed = settings::get().is_some();
        if managed && flags & libc::CLONE_CHILD_CLEARTID != 0 {
            // The kernel clears this word when the child exits, and cannot wait for a fault then.
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
        // SAFETY: the program's own call, except that the child runs `start` first.
        let answer = unsafe { next(start, stack, flags, about, parent_word, storage, child_word) };
        fork::parent();
        answer
    }
}

#[cfg(target_arch = "x86_64")]
mod raw {
    //! `syscall(3)`, for the one architecture on which it is tested.

    use std::ffi::{c_int, c_long, c_void};

    use super::give_up_words;
    use crate::interpose::{interpose, set_errno};
    use crate::{fork, mappings, settings};

    // As in the C library, after comparisons that find the special calls: fork (57) and vfork (58); clone
    // (56) and clone3 (435) without CLONE_VM (0x100) and without a stack for the child; madvise (28) with
    // MADV_WIPEONFORK (18) or MADV_DONTFORK (10).
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
        // The first version of `struct clone_args` has 64 bytes, and the stack at byte 40.
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
        "    je 50f",
        "    cmp ecx, 10",
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
        /// The instructions above, to be called with the arguments of `syscall`.
        fn zfolio_syscall();
    }

    interpose! {
        /// `syscall(2)`: variadic, so that arguments that the caller left out are read all the same. The
        /// compiler makes a jump of the call, and so the frame that is read is the caller's.
        fn syscall(
            number: c_long,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize
        ) -> c_long {
            let instructions = zfolio_syscall as *const ();
            // SAFETY: the instructions take the arguments of `syscall`, and return its result.
            let kernel = unsafe { std::mem::transmute::<*const (), syscall>(instructions) };
            // SAFETY: the program's own call, with its own words.
            unsafe { kernel(number, a, b, c, d, e, f) }
        }
    }

    extern "C" fn fail(error: c_int) -> c_long {
        set_errno(error);
        -1
    }

    /// Makes one system call. If it forks, both processes return from here, each on its own copy of the stack.
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

    /// Turns the kernel's answer into a result of the C library: -1 and `errno` for an error.
    fn to_result(answer: c_long) -> c_long {
        if (-4095..0).contains(&answer) {
            return fail(c_int::try_from(-answer).unwrap_or(libc::EINVAL));
        }
        answer
    }

    /// The calls that concern the engine.
    extern "C" fn special(
        number: c_long,
        a: usize,
        b: usize,
        c: usize,
        d: usize,
        e: usize,
    ) -> c_long {
        if number == libc::SYS_madvise {
            // The low half of the word, as the kernel reads it, and the assembly, which lets two kinds of advice come
            // here.
            let advice = c_int::try_from(c & 0xFFFF_FFFF).unwrap_or(0);
            mappings::note_for_children(advice, a, mappings::page_end(a, b));
            return to_result(call(number, [a, b, c, d, e]));
        }
        // A child that shared its parent's memory would return from here, and then overwrite the parent's
        // stack frames. So vfork is made as fork, which the standard allows.
        let number = if number == libc::SYS_vfork { libc::SYS_fork } else { number };
        if settings::get().is_none() {
            return to_result(call(number, [a, b, c, d, e]));
        }
        if !fork::child_has_room() {
            return -1;
        }
        let pointer = |word: usize| word as *mut c_void;
        match number {
            libc::SYS_clone => give_up_words([pointer(c), pointer(d), pointer(e)]),
            libc::SYS_clone3 => {
                // SAFETY: at least 64 bytes: the assembly above has compared the length, and read some of them.
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
        to_result(answer)
    }
}
