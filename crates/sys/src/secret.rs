//! A value in memory that is never written to a disk: a page of its own, locked, in no core file, and overwritten at
//! the end.

use std::mem::{align_of, size_of};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::map::{PAGE_BYTES, Reservation};

/// See the module.
#[derive(Debug)]
pub struct Secret<T> {
    /// Holds an initialised `T` at its beginning, until the value is dropped.
    page: Reservation,
    value: NonNull<T>,
}

// SAFETY: the value is owned, as in a `Box`.
unsafe impl<T: Send> Send for Secret<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Secret<T> {}

impl<T: Default> Secret<T> {
    /// A default value in such a page, which children of `fork` do not have.
    ///
    /// # Errors
    ///
    /// `NOMEM` or `PERM`: no more memory may be locked (`ulimit -l`).
    pub fn new() -> Result<Secret<T>, Errno> {
        let secret = Secret::inherited()?;
        // A child would have it in memory that is not locked.
        crate::map::keep_from_children(secret.page.address(), PAGE_BYTES)?;
        Ok(secret)
    }

    /// A default value in such a page, which children inherit. Each locks its copy: [`Secret::lock`].
    ///
    /// # Errors
    ///
    /// As [`Secret::new`].
    pub fn inherited() -> Result<Secret<T>, Errno> {
        const { assert!(size_of::<T>() <= PAGE_BYTES && align_of::<T>() <= PAGE_BYTES) }
        let page = Reservation::new(PAGE_BYTES, PAGE_BYTES)?;
        lock(&page)?;
        // SAFETY: the page is ours, and the advice changes no contents.
        unsafe {
            rustix::mm::madvise(page.base().as_ptr().cast(), PAGE_BYTES, Advice::LinuxDontDump)
        }?;
        let value = page.base().cast::<T>();
        // SAFETY: a page of zeros that is ours, large and aligned enough (checked above).
        unsafe { value.write(T::default()) };
        Ok(Secret { page, value })
    }
}

impl<T> Secret<T> {
    /// In a child of `fork`: locks its copy of the page.
    ///
    /// # Errors
    ///
    /// As [`Secret::new`].
    pub fn lock(&self) -> Result<(), Errno> {
        lock(&self.page)
    }
}

fn lock(page: &Reservation) -> Result<(), Errno> {
    // SAFETY: the page is the owner's.
    unsafe { rustix::mm::mlock(page.base().as_ptr().cast(), PAGE_BYTES) }
}

impl<T> Deref for Secret<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: initialised in new(), and owned.
        unsafe { self.value.as_ref() }
    }
}

impl<T> DerefMut for Secret<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: initialised in new(), and owned; `&mut self` is the only access.
        unsafe { self.value.as_mut() }
    }
}

impl<T> Drop for Secret<T> {
    fn drop(&mut self) {
        // SAFETY: initialised in new(), and not used after.
        unsafe { self.value.drop_in_place() };
        let words = self.page.base().cast::<u64>();
        for index in 0..PAGE_BYTES / size_of::<u64>() {
            // SAFETY: a word of the page.
            let word = unsafe { words.add(index) };
            // SAFETY: as above. Volatile: the compiler must not leave it out because nobody reads it.
            unsafe { word.write_volatile(0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Secret;

    /// Goal: the value works like a boxed one, and its page is locked and in no core file. Method: what the kernel
    /// says of the mapping.
    #[test]
    fn a_secret_is_locked_and_in_no_core_file() {
        let mut secret = match Secret::<[u8; 32]>::new() {
            Ok(secret) => secret,
            Err(errno) => return eprintln!("SKIPPED: no memory may be locked: {errno}"),
        };
        secret.fill(7);
        assert_eq!(secret.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 224);
        let start = format!("{:x}-", secret.page.address());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let ours = maps.split(&start).nth(1).expect("it is mapped");
        let flags = ours.lines().find(|line| line.starts_with("VmFlags:")).expect("flags");
        assert!(flags.contains(" lo") && flags.contains(" dd"), "{flags}");
    }
}
