//! Carries out what comes in a queue.

use zfolio_sys::Errno;
use zfolio_sys::ublk::{Event, IoDescriptor};

use super::kernel::Queue;
use super::request::{Limits, Request};
use crate::device::{Device, Error};

/// Serves a queue that has fetched, until the kernel has no more requests for it.
///
/// # Errors
///
/// The queue is of no use any more.
pub(super) fn run(queue: &mut impl Queue, device: &dyn Device) -> Result<(), Errno> {
    let mut live = queue.depth();
    let mut results = vec![0; live.into()];
    while live > 0 {
        queue.wait()?;
        while let Some(event) = queue.event() {
            match event {
                Event::Request(tag) => {
                    let (descriptor, buffer) = queue.request(tag);
                    let result = serve(device, &descriptor, buffer);
                    results[usize::from(tag)] = result;
                    queue.commit(tag, result);
                }
                // The kernel had no memory to look at the commit.
                Event::Failed(tag, Errno::AGAIN | Errno::NOMEM | Errno::INTR) => {
                    queue.commit(tag, results[usize::from(tag)]);
                }
                // There are no more requests with this tag.
                Event::Failed(..) => live -= 1,
            }
        }
    }
    Ok(())
}

/// Serves a request. Returns how many bytes of data it has had, or an error below 0.
fn serve(device: &dyn Device, descriptor: &IoDescriptor, buffer: &mut [u8]) -> i32 {
    let limits = Limits {
        size_bytes: device.size_bytes(),
        is_read_only: device.is_read_only(),
        buffer_bytes: buffer.len(),
    };
    let request = Request::read(descriptor, limits);
    if request == Err(Errno::INVAL) {
        device.note_invalid();
    }
    let done = request.and_then(|request| carry_out(device, request, buffer).map_err(errno));
    match done {
        // A buffer is far below 2 GiB.
        Ok(bytes) => i32::try_from(bytes).unwrap_or(0),
        Err(error) => -error.raw_os_error(),
    }
}

fn carry_out(device: &dyn Device, request: Request, buffer: &mut [u8]) -> Result<usize, Error> {
    match request {
        Request::Read { at, bytes } => {
            device.read(at, &mut buffer[..bytes])?;
            Ok(bytes)
        }
        Request::Write { at, bytes, is_durable } => {
            device.write(at, &buffer[..bytes])?;
            finish(device, is_durable)?;
            Ok(bytes)
        }
        Request::Flush => finish(device, true),
        Request::Discard { at, bytes } => {
            device.discard(at, bytes)?;
            Ok(0)
        }
        Request::WriteZeroes { at, bytes, keeps_room, is_durable } => {
            device.write_zeroes(at, bytes, keeps_room)?;
            finish(device, is_durable)
        }
    }
}

fn finish(device: &dyn Device, is_durable: bool) -> Result<usize, Error> {
    if is_durable {
        device.flush()?;
    }
    Ok(0)
}

/// What the kernel is told, and a program behind it sees.
fn errno(error: Error) -> Errno {
    match error {
        Error::Invalid => Errno::INVAL,
        Error::NoSpace => Errno::NOSPC,
        Error::Io => Errno::IO,
        Error::NotPermitted => Errno::ROFS,
        Error::NoMemory => Errno::NOMEM,
    }
}
