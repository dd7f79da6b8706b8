//! A transfer on its way: which of its bytes are done, and what the system's answers mean for it.

use zfolio_core::swap::disk::{Direction, Error, SLOT_BYTES, Slot, Transfer};
use zfolio_sys::Errno;

/// How often in a row a transfer is tried without any progress. After that it has failed.
const TRIES_MAX: u32 = 8;

/// So often by a ring; the rest by plain calls, which need no memory and no worker of the kernel's.
const RING_TRIES_MAX: u32 = 4;

/// See the module.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) transfer: Transfer,
    /// When it was accepted: transfers and discards are counted together.
    pub(super) number: u64,
    /// Bytes done, from the first slot on.
    done: usize,
    /// Tries since the last progress.
    tries: u32,
    /// A ring has failed at it.
    pub(super) is_for_calls: bool,
}

/// Who has given an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum By {
    /// A ring.
    Ring,
    /// A plain system call.
    Call,
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// The transfer has ended.
    Ended(Result<(), Error>),
    /// What is left is to be tried, at once.
    Again,
}

impl Flight {
    pub(super) fn new(transfer: Transfer, number: u64) -> Flight {
        assert!((1..=transfer.buffer.slots().len()).contains(&transfer.count), "{transfer:?}");
        Flight { transfer, number, done: 0, tries: 0, is_for_calls: false }
    }

    /// Whether it reads.
    pub(super) fn is_read(&self) -> bool {
        self.transfer.direction == Direction::Read
    }

    /// Its slots on the disk: the first, and how many.
    pub(super) fn slots(&self) -> (u64, u64) {
        (self.transfer.first, self.transfer.count as u64)
    }

    /// Where the bytes that are left begin on the disk.
    pub(super) fn offset(&self) -> u64 {
        self.transfer.first * SLOT_BYTES as u64 + self.done as u64
    }

    /// The bytes that are left, in the buffer.
    pub(super) fn rest(&mut self) -> &mut [u8] {
        let slots = &mut self.transfer.buffer.slots_mut()[..self.transfer.count];
        &mut bytes_mut(slots)[self.done..]
    }

    /// Takes an answer to [`Flight::rest`]. With `is_direct` the rest begins with a whole slot.
    pub(super) fn note(&mut self, answer: Result<usize, Errno>, is_direct: bool, by: By) -> Next {
        let bytes = self.transfer.count * SLOT_BYTES;
        let before = self.done;
        match answer {
            Ok(0) if self.is_read() => return Next::Ended(Err(Error::Failed { errno: 0 })),
            // More than was asked for: nobody knows what was done.
            Ok(more) if more > bytes - before => return Next::Ended(Err(self.error(Errno::IO))),
            Ok(more) => {
                self.done += more;
                if self.done == bytes {
                    return Next::Ended(Ok(()));
                }
                if is_direct {
                    self.done -= self.done % SLOT_BYTES;
                }
            }
            // It was cancelled because the thread that submitted it has ended, or there is no worker for it.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::BUSY | Errno::CANCELED) => {}
            // A ring may lack what a call has. The call's answer counts.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS | Errno::NOSYS)
                if by == By::Ring =>
            {
                self.tries = RING_TRIES_MAX;
            }
            Err(error) => return Next::Ended(Err(self.error(error))),
        }
        self.tries = if self.done > before { 0 } else { self.tries + 1 };
        self.is_for_calls |= by == By::Ring && self.tries > RING_TRIES_MAX;
        let is_over = by == By::Call && self.tries > TRIES_MAX;
        match (is_over, answer) {
            (false, _) => Next::Again,
            // The rest of a slot is never read: the file ends in the middle of it.
            (true, Ok(_)) if self.is_read() => Next::Ended(Err(Error::Failed { errno: 0 })),
            (true, _) => Next::Ended(Err(Error::Busy)),
        }
    }

    /// What an error means that no other try will change.
    fn error(&self, error: Errno) -> Error {
        let end = (self.transfer.first + self.transfer.count as u64) * SLOT_BYTES as u64;
        let is_limited = || zfolio_sys::disk::file_bytes_limit().is_some_and(|limit| limit < end);
        match error {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Error::Full,
            // RLIMIT_FSIZE shortens a write that crosses it, and direct writes of part of a block are refused.
            Errno::INVAL if !self.is_read() && is_limited() => Error::Full,
            error => Error::Failed { errno: error.raw_os_error() },
        }
    }
}

/// The bytes of slots.
#[allow(unsafe_code, reason = "slots are bytes")]
fn bytes_mut(slots: &mut [Slot]) -> &mut [u8] {
    let bytes = size_of_val(slots);
    // SAFETY: a `Slot` is 4096 bytes and nothing else (asserted where it is declared), any bytes are a `Slot`, and the
    // borrow of the slots goes on in that of the bytes.
    unsafe { std::slice::from_raw_parts_mut(slots.as_mut_ptr().cast::<u8>(), bytes) }
}

#[cfg(test)]
mod tests {
    use zfolio_core::swap::disk::{Buffer, Direction, Error, SLOT_BYTES, Transfer};
    use zfolio_core::testing::{Random, seed};
    use zfolio_sys::Errno;

    use super::{By, Flight, Next, RING_TRIES_MAX, TRIES_MAX};

    fn flight(direction: Direction, count: usize) -> Flight {
        let buffer = Buffer::new(count);
        Flight::new(Transfer { token: 7, direction, first: 5, count, buffer, result: Ok(()) }, 1)
    }

    /// Goal: a transfer that comes in pieces moves each byte once and in order, and ends when all are done. Method:
    /// random lengths, with refusals in between; buffered transfers go on at any byte, direct ones at a slot.
    #[test]
    fn pieces_make_a_whole() {
        let seed = seed();
        let mut random = Random::new(seed);
        for _ in 0..2000 {
            let (count, is_direct) = (1 + random.below(16), random.below(2) == 0);
            let direction = [Direction::Read, Direction::Write][random.below(2)];
            let mut flight = flight(direction, count);
            let mut next = 0;
            loop {
                let at = usize::try_from(flight.offset()).unwrap() - 5 * SLOT_BYTES;
                assert!(at <= next && (is_direct || at == next), "seed {seed}");
                assert!(!is_direct || (at % SLOT_BYTES == 0 && next - at < SLOT_BYTES));
                assert_eq!(flight.rest().len(), count * SLOT_BYTES - at, "seed {seed}");
                let refusals = [Errno::AGAIN, Errno::INTR, Errno::CANCELED, Errno::NOMEM];
                if random.below(4) == 0 {
                    let refusal = refusals[random.below(4)];
                    assert_eq!(flight.note(Err(refusal), is_direct, By::Call), Next::Again);
                }
                let left = count * SLOT_BYTES - at;
                let least = if is_direct { SLOT_BYTES.min(left) } else { 1 };
                let moved = least + random.below(left - least + 1);
                next = at + moved;
                let then = flight.note(Ok(moved), is_direct, By::Call);
                if moved == left {
                    assert_eq!(then, Next::Ended(Ok(())), "seed {seed}");
                    break;
                }
                assert_eq!(then, Next::Again, "seed {seed}");
            }
        }
    }

    /// Goal: what cannot be done ends with the right error, after few tries.
    #[test]
    fn a_transfer_without_progress_ends() {
        let end = |direction, answer: Result<usize, Errno>| {
            let mut flight = flight(direction, 2);
            for _ in 0..=TRIES_MAX {
                if let Next::Ended(result) = flight.note(answer, true, By::Call) {
                    return result;
                }
            }
            panic!("it goes on for ever: {answer:?}");
        };
        let (read, write) = (Direction::Read, Direction::Write);
        assert_eq!(end(read, Ok(0)), Err(Error::Failed { errno: 0 }), "the end of the file");
        assert_eq!(end(read, Ok(100)), Err(Error::Failed { errno: 0 }), "in the middle of a slot");
        assert_eq!(end(write, Ok(0)), Err(Error::Busy));
        assert_eq!(end(write, Ok(100)), Err(Error::Busy));
        assert_eq!(end(read, Err(Errno::AGAIN)), Err(Error::Busy));
        for error in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
            assert_eq!(end(write, Err(error)), Err(Error::Full));
        }
        assert_eq!(
            end(read, Err(Errno::IO)),
            Err(Error::Failed { errno: Errno::IO.raw_os_error() })
        );
        for more in [2 * SLOT_BYTES + 1, usize::MAX] {
            let failed = Err(Error::Failed { errno: Errno::IO.raw_os_error() });
            assert_eq!([read, write].map(|way| end(way, Ok(more))), [failed; 2], "more than all");
        }
        let invalid = Err(Error::Failed { errno: Errno::INVAL.raw_os_error() });
        assert_eq!(end(write, Err(Errno::INVAL)), invalid, "no limit of the process");
    }

    /// Goal: what a ring cannot do is left to plain calls, and only their answer counts.
    #[test]
    fn a_ring_that_fails_leaves_the_transfer_to_calls() {
        let mut slow = flight(Direction::Write, 1);
        for _ in 0..RING_TRIES_MAX {
            assert_eq!(slow.note(Err(Errno::CANCELED), true, By::Ring), Next::Again);
            assert!(!slow.is_for_calls);
        }
        assert_eq!(slow.note(Err(Errno::CANCELED), true, By::Ring), Next::Again);
        assert!(slow.is_for_calls);
        assert_eq!(slow.note(Ok(SLOT_BYTES), true, By::Call), Next::Ended(Ok(())));
        let mut odd = flight(Direction::Read, 1);
        assert_eq!(odd.note(Err(Errno::OPNOTSUPP), true, By::Ring), Next::Again);
        assert!(odd.is_for_calls);
        let mut broken = flight(Direction::Read, 1);
        let failed = Error::Failed { errno: Errno::IO.raw_os_error() };
        assert_eq!(broken.note(Err(Errno::IO), true, By::Ring), Next::Ended(Err(failed)));
    }
}
