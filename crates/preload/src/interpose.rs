//! The functions of the C library that this library replaces, and how to reach the C library's own.

use std::ffi::{CStr, c_void};

/// Declares functions of the C library that this library replaces, each with a type of the same name
/// for [`next`].
macro_rules! interpose {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty $body:block)+) => {
        $(
            #[allow(non_camel_case_types, dead_code, reason = "named after its function")]
            type $name = unsafe extern "C" fn($($type),*) -> $out;

            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// That of the C function of the same name.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $out $body
        )+
    };
}
pub(crate) use interpose;

/// The next definition of a function of the C library, looked up at the first use.
///
/// `$name` is a type too: the one that [`interpose`] declares, or one written by hand.
macro_rules! next {
    ($name:ident) => {{
        use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};
        static FOUND: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());
        let mut found = FOUND.load(Relaxed);
        if found.is_null() {
            const NAME: &str = concat!(stringify!($name), "\0");
            const C_NAME: &std::ffi::CStr =
                match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("an identifier has no zero byte"),
                };
            found = $crate::interpose::look_up(C_NAME);
            FOUND.store(found, Relaxed);
        }
        // SAFETY: not null: the C library's function of this name, which has this type.
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $name>(found) }
    }};
}
pub(crate) use next;

/// Looks up the next definition of a function after this library's.
#[cold]
#[inline(never)]
pub(crate) fn look_up(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!found.is_null(), "the C library has this function");
    found
}

/// Sets `errno`, as the C library does when a call fails.
pub(crate) fn set_errno(value: i32) {
    // SAFETY: the function has no precondition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: glibc returns the address of this thread's `errno`, which is valid while the thread lives.
    unsafe { errno.write(value) };
}
