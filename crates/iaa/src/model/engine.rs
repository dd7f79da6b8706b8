//! What the device makes of one descriptor: checks, then one of the two codecs.

use super::deflate;
use super::inflate::{Limits, Stop, inflate};
use crate::checksum::{crc, xor};
use crate::layout::{AECS_BYTES, AecsCompress, Descriptor, ONE_PASS_BYTES_MAX, Record};
use crate::layout::{compress, decompress, error, flag, opcode, status};

/// The longest source or destination, as `max_transfer_size` of a device is by default.
const TRANSFER_BYTES_MAX: u32 = 2 << 20;

/// What a job gives.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// To be written to the descriptor's record.
    pub(super) record: Record,
    /// To be written to its destination.
    pub(super) output: Vec<u8>,
}

impl Done {
    /// A job that failed, with the output up to there.
    pub(super) fn failed(status: u8, error: u8, output: Vec<u8>) -> Done {
        let output_bytes = length(&output);
        Done { record: Record { status, error, output_bytes, ..Record::default() }, output }
    }

    /// A job that processed all of `source`, where `data` is what it is before compression.
    fn succeeded(source_bytes: usize, data: &[u8], output: Vec<u8>) -> Done {
        let record = Record {
            status: status::SUCCESS,
            bytes_completed: u32::try_from(source_bytes).expect("TRANSFER_BYTES_MAX"),
            output_bytes: length(&output),
            crc: crc(data),
            xor: xor(data),
            ..Record::default()
        };
        Done { record, output }
    }
}

fn length(output: &[u8]) -> u32 {
    u32::try_from(output.len()).expect("no output is longer than TRANSFER_BYTES_MAX")
}

/// The status with which a descriptor is refused before a byte is read; `None` if it is accepted.
pub(super) fn refusal(descriptor: &Descriptor) -> Option<u8> {
    let wants_aecs = descriptor.flags() & flag::READ_AECS != 0;
    let (source, dest) = (descriptor.source, descriptor.dest);
    let [source_bytes, dest_bytes] =
        [descriptor.source_bytes, descriptor.dest_bytes_max].map(u64::from);
    let known = flag::RECORD_VALID | flag::RECORD_WANTED | flag::CACHE | flag::READ_AECS;
    let sizes = [descriptor.source_bytes, descriptor.dest_bytes_max];
    let known_codec_flags = match descriptor.opcode() {
        opcode::NOOP => return None,
        opcode::COMPRESS => compress::FLUSH_OUTPUT | compress::APPEND_END | compress::ONE_PASS_LAST,
        opcode::DECOMPRESS => {
            let ends = decompress::STOP_AND_CHECK | decompress::LAST_BLOCK;
            let rest = decompress::FLUSH_OUTPUT | decompress::SUPPRESS_OUTPUT;
            decompress::ENABLE | ends | rest
        }
        _ => return Some(status::BAD_OPCODE),
    };
    let has_source = sizes.iter().all(|bytes| (1..=TRANSFER_BYTES_MAX).contains(bytes));
    let is_aecs_right = descriptor.aecs_bytes == AECS_BYTES || !wants_aecs;
    let checks = [
        (descriptor.flags() & !(known | flag::BLOCK_ON_FAULT) == 0, status::INVALID_FLAGS),
        (has_source && is_aecs_right, status::INVALID_SIZE),
        (source + source_bytes <= dest || dest + dest_bytes <= source, status::OVERLAPPING),
        (!wants_aecs || descriptor.aecs % 32 == 0, status::ADDRESS_ALIGNMENT),
        (descriptor.codec_flags & !known_codec_flags == 0, status::INVALID_CODEC_FLAGS),
        (descriptor.filter_flags == 0 && descriptor.inputs == 0, status::INVALID_FILTER_FLAGS),
    ];
    checks.iter().find(|(holds, _)| !holds).map(|(_, status)| *status)
}

/// Does the work of a descriptor that was not refused.
pub(super) fn execute(
    descriptor: &Descriptor,
    source: &[u8],
    aecs: Option<&AecsCompress>,
    steps_max: usize,
) -> Done {
    let room = usize::try_from(descriptor.dest_bytes_max).expect("TRANSFER_BYTES_MAX");
    match descriptor.opcode() {
        opcode::COMPRESS => compressed(descriptor.codec_flags, source, aecs, room),
        opcode::DECOMPRESS => decompressed(descriptor.codec_flags, source, room, steps_max),
        _ => Done::succeeded(0, &[], Vec::new()),
    }
}

fn compressed(flags: u16, source: &[u8], aecs: Option<&AecsCompress>, room: usize) -> Done {
    let ends = flags & compress::APPEND_END != 0;
    let is_one_pass = flags & compress::ONE_PASS_LAST == compress::ONE_PASS_LAST;
    let output = match aecs {
        None if is_one_pass && source.len() <= ONE_PASS_BYTES_MAX => {
            Ok(deflate::with_header(source, ends))
        }
        Some(aecs) if !is_one_pass => deflate::with_aecs(source, aecs, ends),
        _ => return Done::failed(status::INVALID_CODEC_FLAGS, 0, Vec::new()),
    };
    match output {
        Ok(output) if output.len() <= room => Done::succeeded(source.len(), source, output),
        Ok(mut output) => {
            output.truncate(room);
            Done::failed(status::ANALYTICS_ERROR, error::OUTPUT_OVERFLOW, output)
        }
        Err(code) => Done::failed(status::ANALYTICS_ERROR, code, Vec::new()),
    }
}

fn decompressed(flags: u16, source: &[u8], room: usize, steps_max: usize) -> Done {
    if flags & decompress::ENABLE == 0 || flags & decompress::STOP_AND_CHECK == 0 {
        return Done::failed(status::INVALID_CODEC_FLAGS, 0, Vec::new());
    }
    let is_last_block_meant = flags & decompress::LAST_BLOCK != 0;
    let is_suppressed = flags & decompress::SUPPRESS_OUTPUT != 0;
    match inflate(source, Limits { output_bytes_max: room, steps_max, is_last_block_meant }) {
        Ok((data, used)) => {
            let done = Done::succeeded(used, &data, Vec::new());
            let record = Record { output_bytes: length(&data), ..done.record };
            Done { record, output: if is_suppressed { Vec::new() } else { data } }
        }
        Err((stop, output)) => {
            let (status, error) = match stop {
                Stop::Refused(code) => (status::ANALYTICS_ERROR, code),
                Stop::Overflow => (status::OUTPUT_OVERFLOW, 0),
                Stop::Watchdog => (status::WATCHDOG, 0),
            };
            Done::failed(status, error, if is_suppressed { Vec::new() } else { output })
        }
    }
}
