//! Random bytes from the kernel.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes`. Never waits: early at boot the bytes may be less random.
///
/// # Errors
///
/// `NOSYS` or `PERM` in a sandbox that forbids the call.
pub fn fill(bytes: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match getrandom(&mut bytes[done..], GetRandomFlags::INSECURE) {
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_two_fills_are_the_same() {
        let (mut one, mut other) = ([0; 192], [0; 192]);
        super::fill(&mut one).unwrap();
        super::fill(&mut other).unwrap();
        assert!(one != other && one != [0; 192]);
    }
}
