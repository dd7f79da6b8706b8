//! Reads and block status: requests whose replies have data.
//!
//! | replies | up to a piece | longer | a failure |
//! | --- | --- | --- | --- |
//! | simple | header and data | the header, data piece by piece | instead of the header; later it ends the connection |
//! | structured | chunks, each a hole or data | the same, piece by piece | a chunk with its offset, the last one |
//! | structured, DF | one chunk | one chunk, piece by piece | the rest of the chunk is zeros, then as above |

use super::options::ALLOCATION_ID;
use super::output::{HEADERS_BYTES, Output};
use super::reply::{Failure, Recipient};
use super::session::Step;
use super::transmission::{Job, Request};
use super::wire;
use crate::device::Device;
use crate::pieces::{PIECE_BYTES, Pieces};

/// A hole that is shorter is sent as zeros: a chunk costs the client more than so many bytes.
const HOLE_BYTES_MIN: u64 = 4096;

/// A reply to a block status describes so many runs at most; the client asks again for what is behind them.
const DESCRIPTORS_MAX: u32 = 4096;

const _: () = {
    assert!(wire::CHUNK_BYTES + 4 + 8 * DESCRIPTORS_MAX as usize <= PIECE_BYTES);
    // Beside data its header, and a chunk that ends the reply: an error with its text, or nothing.
    assert!(wire::CHUNK_BYTES + 8 + wire::CHUNK_BYTES + 14 + 100 <= HEADERS_BYTES);
};

/// Reads a piece of a request.
pub(super) fn piece(device: &dyn Device, job: &mut Job, output: &mut Output) -> Step {
    if !job.to.is_structured {
        return simple_piece(device, job, output);
    }
    if job.request.has(wire::CMD_FLAG_DF) {
        whole_chunk_piece(device, job, output);
    } else {
        chunk(device, job, output);
    }
    Step::Took(0)
}

/// The length of the next piece of data.
fn piece_bytes(device: &dyn Device, at: u64, left: u32) -> u32 {
    let bytes = Pieces::of(device).next(at, left.into());
    u32::try_from(bytes).expect("no more than what is left")
}

fn simple_piece(device: &dyn Device, job: &mut Job, output: &mut Output) -> Step {
    let bytes = piece_bytes(device, job.at(), job.left());
    let before = output.len();
    if job.done == 0 {
        job.to.simple(output, 0);
    }
    match device.read(job.at(), output.extend(bytes as usize)) {
        Ok(()) => job.done += bytes,
        Err(error) => {
            output.truncate(before);
            if job.done > 0 {
                // The header has promised data, so there is no way left to say that there are none.
                return Step::Ends(0);
            }
            job.to.simple(output, Failure::from(error).code);
            job.done = job.request.bytes;
        }
    }
    Step::Took(0)
}

/// The first run of a range: its length, and whether it is a hole that is worth a chunk. Runs of a kind are joined:
/// holes up to the end of the range, and data up to a piece.
fn first_run(device: &dyn Device, at: u64, left: u32) -> (u32, bool) {
    // A device reports a run at its end, and looks at all of it before. Data behind the piece would be looked at again
    // for each piece.
    let most = piece_bytes(device, at, left);
    let (bytes, is_hole) = run_within(device, at, most, true);
    if !is_hole || bytes < most || most == left {
        return (bytes, is_hole);
    }
    // Whether data come next is enough.
    let (more, goes_on) = run_within(device, at + u64::from(most), left - most, false);
    let bytes = if goes_on { most + more } else { most };
    (bytes, u64::from(bytes) >= HOLE_BYTES_MIN)
}

/// The first run of a range, up to the end of the range. `joins_data`: runs of data are joined too.
fn run_within(device: &dyn Device, at: u64, left: u32, joins_data: bool) -> (u32, bool) {
    let range_bytes = u64::from(left);
    let (mut bytes, mut is_hole) = (0, false);
    let result = device.runs(at, range_bytes, &mut |run_bytes, run_is_hole| {
        // A short hole at the end of a longer range is data too, so that the reply has one chunk less.
        let run_is_hole = run_is_hole && (run_bytes >= HOLE_BYTES_MIN || run_bytes >= range_bytes);
        if bytes == 0 {
            is_hole = run_is_hole;
        } else if is_hole != run_is_hole {
            return false;
        }
        bytes += run_bytes;
        bytes < range_bytes && (is_hole || joins_data)
    });
    if result.is_err() || bytes == 0 {
        // A read says what is wrong.
        return (left, false);
    }
    (u32::try_from(bytes.min(range_bytes)).expect("no more than what is left"), is_hole)
}

/// Adds the next chunk of a read, which is the last one if nothing is left.
fn chunk(device: &dyn Device, job: &mut Job, output: &mut Output) {
    let (run_bytes, is_hole) = first_run(device, job.at(), job.left());
    let bytes = if is_hole { run_bytes } else { piece_bytes(device, job.at(), run_bytes) };
    let flags = if bytes == job.left() { wire::REPLY_FLAG_DONE } else { 0 };
    if is_hole {
        job.to.chunk(output, flags, wire::REPLY_TYPE_OFFSET_HOLE, 12);
        output.push_u64(job.at());
        output.push_u32(bytes);
        job.done += bytes;
        return;
    }
    let before = output.len();
    job.to.chunk(output, flags, wire::REPLY_TYPE_OFFSET_DATA, 8 + bytes);
    output.push_u64(job.at());
    match device.read(job.at(), output.extend(bytes as usize)) {
        Ok(()) => job.done += bytes,
        Err(error) => {
            output.truncate(before);
            job.to.failure_at(output, error.into(), job.at());
            job.done = job.request.bytes;
        }
    }
}

/// Adds a piece of the only chunk of a read.
fn whole_chunk_piece(device: &dyn Device, job: &mut Job, output: &mut Output) {
    let bytes = piece_bytes(device, job.at(), job.left());
    if bytes == job.request.bytes {
        // The result is known before the chunk is sent, so the chunk can be the last one.
        return one_chunk(device, job, output);
    }
    if job.done == 0 {
        job.to.chunk(output, 0, wire::REPLY_TYPE_OFFSET_DATA, 8 + job.request.bytes);
        output.push_u64(job.at());
    }
    let data = output.extend(bytes as usize);
    let result = if job.failure.is_some() { Ok(()) } else { device.read(job.at(), data) };
    if let Err(error) = result {
        job.failure = Some((error.into(), job.at()));
    }
    if job.failure.is_some() {
        data.fill(0);
    }
    job.done += bytes;
    if job.left() > 0 {
        return;
    }
    match job.failure {
        Some((failure, at)) => job.to.failure_at(output, failure, at),
        None => job.to.chunk(output, wire::REPLY_FLAG_DONE, wire::REPLY_TYPE_NONE, 0),
    }
}

fn one_chunk(device: &dyn Device, job: &mut Job, output: &mut Output) {
    let (before, bytes) = (output.len(), job.request.bytes);
    job.to.chunk(output, wire::REPLY_FLAG_DONE, wire::REPLY_TYPE_OFFSET_DATA, 8 + bytes);
    output.push_u64(job.at());
    if let Err(error) = device.read(job.at(), output.extend(bytes as usize)) {
        output.truncate(before);
        job.to.failure_at(output, error.into(), job.at());
    }
    job.done = bytes;
}

/// Answers a block status: one chunk with the runs of the range, neighbours of a kind joined.
pub(super) fn block_status(
    device: &dyn Device,
    request: &Request,
    to: Recipient,
    output: &mut Output,
) {
    let before = output.len();
    to.chunk(output, wire::REPLY_FLAG_DONE, wire::REPLY_TYPE_BLOCK_STATUS, 0);
    output.push_u32(ALLOCATION_ID);
    let most = if request.has(wire::CMD_FLAG_REQ_ONE) { 1 } else { DESCRIPTORS_MAX };
    let (mut left, mut run, mut count) = (request.bytes, (0, false), 0);
    let result = device.runs(request.at, u64::from(request.bytes), &mut |bytes, is_hole| {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(left);
        left -= bytes;
        if run.0 > 0 && run.1 != is_hole {
            push_descriptor(output, run);
            count += 1;
            if count == most {
                run.0 = 0;
                return false;
            }
            run.0 = 0;
        }
        run = (run.0 + bytes, is_hole);
        left > 0
    });
    if let Err(error) = result {
        output.truncate(before);
        return to.failure(output, error.into());
    }
    if run.0 > 0 {
        push_descriptor(output, run);
        count += 1;
    }
    if count == 0 {
        // A device that says nothing of the range.
        push_descriptor(output, (request.bytes, false));
        count = 1;
    }
    output.overwrite(before + wire::CHUNK_BYTES - 4, &(4 + 8 * count).to_be_bytes());
}

fn push_descriptor(output: &mut Output, (bytes, is_hole): (u32, bool)) {
    output.push_u32(bytes);
    output.push_u32(if is_hole { wire::STATE_HOLE | wire::STATE_ZERO } else { 0 });
}
