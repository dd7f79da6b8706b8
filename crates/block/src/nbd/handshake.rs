//! The handshake: flags, and then options until one of them begins the transmission.
//!
//! An option has a header with the length of its data. All of an option is in the input before it is answered, and data
//! beyond [`OPTION_BYTES_MAX`] end the connection (`NBD-1`).
//!
//! `OPT_STARTTLS` begins the options anew: what was agreed on in clear could have been somebody else's (`TLS-1`).

use super::OPTION_BYTES_MAX;
use super::exports::{Export, Exports};
use super::options::{self, Answer, Chosen};
use super::output::Output;
use super::session::Step;
use super::tls::Tls;
use super::transmission::Transmission;
use super::wire::{self, Reader};

/// What client and server have agreed on.
#[derive(Debug)]
pub(super) struct Handshake {
    /// The client wants no padding in the reply to `OPT_EXPORT_NAME`.
    no_zeroes: bool,
    tls: Tls,
    /// TLS has begun.
    pub(super) is_secured: bool,
    pub(super) is_structured: bool,
    /// The index of the export for which `base:allocation` was asked for.
    pub(super) with_allocation: Option<usize>,
}

/// The header of an option.
#[derive(Clone, Copy, Debug)]
struct Header {
    option: u32,
    data_bytes: usize,
}

impl Header {
    /// `Err`: what to do since there is no header here.
    fn read(input: &[u8]) -> Result<Header, Step> {
        let mut reader = Reader(input);
        match reader.u64() {
            None => return Err(Step::Needs(wire::OPTION_BYTES)),
            Some(wire::OPTION_MAGIC) => {}
            Some(_) => return Err(Step::Ends(0)),
        }
        match (reader.u32(), reader.u32()) {
            (Some(option), Some(bytes)) => {
                let data_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                Ok(Header { option, data_bytes })
            }
            _ => Err(Step::Needs(wire::OPTION_BYTES)),
        }
    }
}

impl Handshake {
    /// Reads the client's flags. `Err`: what to do since they are not there or not known.
    pub(super) fn begin(input: &[u8], tls: Tls) -> Result<Handshake, Step> {
        let flags = Reader(input).u32().ok_or(Step::Needs(wire::CLIENT_FLAGS_BYTES))?;
        // A client without FIXED_NEWSTYLE sends OPT_EXPORT_NAME only. One that sends others is answered all the same.
        if flags & !(wire::FLAG_C_FIXED_NEWSTYLE | wire::FLAG_C_NO_ZEROES) != 0 {
            return Err(Step::Ends(wire::CLIENT_FLAGS_BYTES));
        }
        let no_zeroes = flags & wire::FLAG_C_NO_ZEROES != 0;
        Ok(Handshake::new(no_zeroes, tls, false))
    }

    fn new(no_zeroes: bool, tls: Tls, is_secured: bool) -> Handshake {
        Handshake { no_zeroes, tls, is_secured, is_structured: false, with_allocation: None }
    }

    /// Whether options other than `OPT_STARTTLS` have to wait for it.
    pub(super) fn needs_tls(&self) -> bool {
        self.tls == Tls::Require && !self.is_secured
    }

    /// Whether TLS can begin.
    pub(super) fn can_begin_tls(&self) -> bool {
        self.tls != Tls::Off && !self.is_secured
    }

    /// Answers the option at the front of the input.
    pub(super) fn step(&mut self, exports: &Exports, input: &[u8], output: &mut Output) -> Step {
        let header = match Header::read(input) {
            Ok(header) => header,
            Err(step) => return step,
        };
        if header.data_bytes > OPTION_BYTES_MAX {
            // To read past them could take as long as the client likes.
            if header.option != wire::OPT_EXPORT_NAME {
                let why = "more data than any option has";
                options::reply(output, header.option, wire::REP_ERR_TOO_BIG, why.as_bytes());
            }
            return Step::Ends(wire::OPTION_BYTES);
        }
        let total = wire::OPTION_BYTES + header.data_bytes;
        let Some(data) = input.get(wire::OPTION_BYTES..total) else { return Step::Needs(total) };
        if self.is_injected(header, input.len() - total) {
            return Step::Ends(total);
        }
        match options::answer(self, exports, header.option, data, output) {
            Answer::Done => Step::Took(total),
            Answer::Secures => {
                // What else was agreed on is forgotten. The client's flags are not sent again.
                *self = Handshake::new(self.no_zeroes, self.tls, true);
                Step::Secures(total)
            }
            Answer::Ends => Step::Ends(total),
            Answer::Begins(chosen) => Step::Begins(total, self.transmit(exports, chosen, output)),
        }
    }

    /// Whether there are bytes that would be served as if they had come by TLS. A client waits for the reply before it
    /// sends more, so somebody else has sent them, or it is no client.
    fn is_injected(&self, header: Header, bytes_behind: usize) -> bool {
        let begins = header.option == wire::OPT_STARTTLS && self.can_begin_tls();
        begins && header.data_bytes == 0 && bytes_behind > 0
    }

    /// The last words of the handshake.
    fn transmit(&self, exports: &Exports, chosen: Chosen, output: &mut Output) -> Transmission {
        let export = exports.get(chosen.index);
        if chosen.is_old_style {
            output.push_u64(export.device.size_bytes());
            output.push_u16(self.transmission_flags(export));
            if !self.no_zeroes {
                output.push(&[0; 124]);
            }
        }
        // Contexts that were set for another export are not this one's.
        let has_contexts = self.with_allocation == Some(chosen.index);
        Transmission::new(export.device.clone(), self.is_structured, has_contexts)
    }

    pub(super) fn transmission_flags(&self, export: &Export) -> u16 {
        // All connections share the device, so what one has flushed the others see.
        let mut flags = wire::FLAG_HAS_FLAGS
            | wire::FLAG_SEND_FLUSH
            | wire::FLAG_CAN_MULTI_CONN
            | wire::FLAG_SEND_CACHE;
        if self.is_structured {
            flags |= wire::FLAG_SEND_DF;
        }
        if export.device.is_read_only() {
            return flags | wire::FLAG_READ_ONLY;
        }
        flags
            | wire::FLAG_SEND_FUA
            | wire::FLAG_SEND_TRIM
            | wire::FLAG_SEND_WRITE_ZEROES
            | wire::FLAG_SEND_FAST_ZERO
    }
}
