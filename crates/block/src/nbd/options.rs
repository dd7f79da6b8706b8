//! What each option of the handshake is answered with.

use super::REQUEST_BYTES_MAX;
use super::exports::{Exports, NAME_BYTES_MAX};
use super::handshake::Handshake;
use super::output::Output;
use super::wire::{self, Reader};
use crate::device::SECTOR_BYTES;

/// The only metadata context.
const ALLOCATION: &[u8] = b"base:allocation";

/// Its number in a connection.
pub(super) const ALLOCATION_ID: u32 = 1;

/// What follows an option.
#[derive(Debug)]
pub(super) enum Answer {
    /// The next option.
    Done,
    /// TLS, and then the next option.
    Secures,
    /// The transmission of an export.
    Begins(Chosen),
    /// The end of the connection.
    Ends,
}

/// The export that a client has chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub(super) index: usize,
    /// By `OPT_EXPORT_NAME`, whose reply has a form of its own.
    pub(super) is_old_style: bool,
}

/// Why an option is refused: the type of the reply, and a text for people.
type Refused = (u32, &'static str);

const MALFORMED: Refused = (wire::REP_ERR_INVALID, "the data of this option are malformed");
const NO_SUCH_EXPORT: Refused = (wire::REP_ERR_UNKNOWN, "there is no export of this name");
const NOT_STRUCTURED: Refused =
    (wire::REP_ERR_INVALID, "contexts need structured replies, which were not asked for");
const NO_TLS: Refused = (wire::REP_ERR_UNSUP, "this server has no TLS; go on without it");
const TLS_BEGAN: Refused = (wire::REP_ERR_INVALID, "TLS has begun already");
const TLS_REQUIRED: Refused =
    (wire::REP_ERR_TLS_REQD, "this server requires TLS; begin with NBD_OPT_STARTTLS");
const UNKNOWN: Refused = (wire::REP_ERR_UNSUP, "this server does not know this option");

/// Adds a reply to an option.
pub(super) fn reply(output: &mut Output, option: u32, kind: u32, data: &[u8]) {
    let header = begin_reply(output, option, kind);
    output.push(data);
    end_reply(output, header);
}

/// Adds a reply without its data. Returns where it begins.
fn begin_reply(output: &mut Output, option: u32, kind: u32) -> usize {
    let from = output.len();
    output.push_u64(wire::OPTION_REPLY_MAGIC);
    output.push_u32(option);
    output.push_u32(kind);
    output.push_u32(0);
    from
}

/// Notes in a reply's header how much data follows it.
fn end_reply(output: &mut Output, from: usize) {
    let bytes = output.len() - from - 20;
    let bytes = u32::try_from(bytes).expect("the output is smaller than 4 GiB");
    output.overwrite(from + 16, &bytes.to_be_bytes());
}

/// Adds a text with its length before it.
fn push_counted(output: &mut Output, text: &str) {
    output.push_u32(u32::try_from(text.len()).expect("names are short"));
    output.push(text.as_bytes());
}

/// Answers an option.
pub(super) fn answer(
    handshake: &mut Handshake,
    exports: &Exports,
    option: u32,
    data: &[u8],
    output: &mut Output,
) -> Answer {
    let refused = match option {
        // This option has no way to say no, and nothing about exports is said in clear.
        wire::OPT_EXPORT_NAME if handshake.needs_tls() => return Answer::Ends,
        wire::OPT_STARTTLS => match begin_tls(handshake, data) {
            Ok(()) => {
                reply(output, option, wire::REP_ACK, &[]);
                return Answer::Secures;
            }
            Err(refused) => Err(refused),
        },
        wire::OPT_ABORT => {
            reply(output, option, wire::REP_ACK, &[]);
            return Answer::Ends;
        }
        _ if handshake.needs_tls() => Err(TLS_REQUIRED),
        wire::OPT_EXPORT_NAME => {
            // This option has no way to say no.
            return exports.find(data).map_or(Answer::Ends, |index| {
                Answer::Begins(Chosen { index, is_old_style: true })
            });
        }
        wire::OPT_INFO | wire::OPT_GO => match info(handshake, exports, option, data, output) {
            Ok(index) => {
                reply(output, option, wire::REP_ACK, &[]);
                if option == wire::OPT_INFO {
                    return Answer::Done;
                }
                return Answer::Begins(Chosen { index, is_old_style: false });
            }
            Err(refused) => Err(refused),
        },
        wire::OPT_LIST => list(exports, data, output),
        wire::OPT_STRUCTURED_REPLY if data.is_empty() => {
            handshake.is_structured = true;
            Ok(())
        }
        wire::OPT_STRUCTURED_REPLY => Err(MALFORMED),
        wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => {
            contexts(handshake, exports, option, data, output)
        }
        _ => Err(UNKNOWN),
    };
    match refused {
        Ok(()) => reply(output, option, wire::REP_ACK, &[]),
        Err((kind, why)) => reply(output, option, kind, why.as_bytes()),
    }
    Answer::Done
}

fn begin_tls(handshake: &Handshake, data: &[u8]) -> Result<(), Refused> {
    if !data.is_empty() {
        return Err(MALFORMED);
    }
    if handshake.can_begin_tls() {
        return Ok(());
    }
    Err(if handshake.is_secured { TLS_BEGAN } else { NO_TLS })
}

fn list(exports: &Exports, data: &[u8], output: &mut Output) -> Result<(), Refused> {
    if !data.is_empty() {
        return Err(MALFORMED);
    }
    for export in exports.iter() {
        let from = begin_reply(output, wire::OPT_LIST, wire::REP_SERVER);
        push_counted(output, &export.name);
        output.push(export.description.as_bytes());
        end_reply(output, from);
    }
    Ok(())
}

/// A name in an option: where it is, if an export has it.
fn named(exports: &Exports, name: &[u8]) -> Result<usize, Refused> {
    if name.len() > NAME_BYTES_MAX {
        return Err(NO_SUCH_EXPORT);
    }
    exports.find(name).ok_or(NO_SUCH_EXPORT)
}

/// Describes the export that is named. Returns its index.
fn info(
    handshake: &Handshake,
    exports: &Exports,
    option: u32,
    data: &[u8],
    output: &mut Output,
) -> Result<usize, Refused> {
    let mut reader = Reader(data);
    let name = reader.counted().ok_or(MALFORMED)?;
    let count = reader.u16().ok_or(MALFORMED)?;
    if reader.0.len() != 2 * usize::from(count) {
        return Err(MALFORMED);
    }
    let index = named(exports, name)?;
    let (mut wants_name, mut wants_description) = (false, false);
    while let Some(wanted) = reader.u16() {
        // Types that are not known are left out, as the protocol has it.
        wants_name |= wanted == wire::INFO_NAME;
        wants_description |= wanted == wire::INFO_DESCRIPTION;
    }
    let export = exports.get(index);
    let mut describe = |kind: u16, write: &dyn Fn(&mut Output)| {
        let from = begin_reply(output, option, wire::REP_INFO);
        output.push_u16(kind);
        write(output);
        end_reply(output, from);
    };
    describe(wire::INFO_EXPORT, &|output| {
        output.push_u64(export.device.size_bytes());
        output.push_u16(handshake.transmission_flags(export));
    });
    // Also for clients that have not asked, which may obey all the same.
    describe(wire::INFO_BLOCK_SIZE, &|output| {
        let preferred = export.device.preferred_bytes().clamp(SECTOR_BYTES, REQUEST_BYTES_MAX);
        for bytes in [SECTOR_BYTES, preferred, REQUEST_BYTES_MAX] {
            output.push_u32(bytes);
        }
    });
    if wants_name {
        describe(wire::INFO_NAME, &|output| output.push(export.name.as_bytes()));
    }
    if wants_description && !export.description.is_empty() {
        describe(wire::INFO_DESCRIPTION, &|output| output.push(export.description.as_bytes()));
    }
    Ok(index)
}

/// Lists the contexts that are asked for, and with `OPT_SET_META_CONTEXT` chooses them.
fn contexts(
    handshake: &mut Handshake,
    exports: &Exports,
    option: u32,
    data: &[u8],
    output: &mut Output,
) -> Result<(), Refused> {
    let sets = option == wire::OPT_SET_META_CONTEXT;
    if sets {
        // What was set before is gone, even if this fails.
        handshake.with_allocation = None;
    }
    if !handshake.is_structured {
        return Err(NOT_STRUCTURED);
    }
    let mut reader = Reader(data);
    let name = reader.counted().ok_or(MALFORMED)?;
    let count = reader.u32().ok_or(MALFORMED)?;
    // A client that lists without a query asks for everything.
    let mut is_wanted = !sets && count == 0;
    for _ in 0..count {
        let query = reader.counted().ok_or(MALFORMED)?;
        is_wanted |= query == ALLOCATION || (!sets && query == b"base:");
    }
    if !reader.0.is_empty() {
        return Err(MALFORMED);
    }
    let index = named(exports, name)?;
    if is_wanted {
        let from = begin_reply(output, option, wire::REP_META_CONTEXT);
        output.push_u32(if sets { ALLOCATION_ID } else { 0 });
        output.push(ALLOCATION);
        end_reply(output, from);
        if sets {
            handshake.with_allocation = Some(index);
        }
    }
    Ok(())
}
