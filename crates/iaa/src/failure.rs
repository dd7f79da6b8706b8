//! Why the device did not do a job. None of them loses a unit: software does the job, or the unit is refused.

use std::fmt;

use crate::layout::{Record, error, status};

/// Declares the failures that are statuses of the device, once for the variants, their numbers and their texts.
macro_rules! failures {
    ($($name:ident = $status:expr, $text:literal;)*) => {
        /// Why the device did not do a job.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Failure {
            /// There was no room in any queue, for as many tries as are allowed.
            Busy,
            /// No queue is open for this direction.
            NoQueue,
            /// All buffers of the stream are with devices that have not answered.
            NoBuffer,
            /// The unit is longer, or shorter, than the device takes it.
            Length,
            /// No record came for as many polls as are allowed. The job's memory is kept for the device.
            Timeout,
            /// The compressed form does not fit.
            Overflow,
            /// The stream is longer than its unit.
            Long,
            /// The engine does not read this stream, or cannot write it ([`error`]).
            Analytics(u8),
            /// Pages were missing again and again, or one that is not the job's.
            PageFault,
            /// The record says what cannot be.
            Implausible,
            /// The checksum is not that of the data.
            Checksum,
            /// A status that no document has.
            Unknown(u8),
            $(
                #[doc = concat!("The device says [`", stringify!($status), "`].")]
                $name,
            )*
        }

        impl Failure {
            fn of_status(status: u8) -> Failure {
                match status {
                    $(status if status == $status => Failure::$name,)*
                    unknown => Failure::Unknown(unknown),
                }
            }

            fn text(self) -> &'static str {
                match self {
                    $(Failure::$name => $text,)*
                    Failure::Busy => "all queues are full",
                    Failure::NoQueue => "no queue is open",
                    Failure::NoBuffer => "all buffers are with the device",
                    Failure::Length => "a length that the device does not take",
                    Failure::Timeout => "no record came",
                    Failure::Overflow => "the result does not fit",
                    Failure::Long => "the stream is longer than its unit",
                    Failure::Analytics(_) => "the engine failed",
                    Failure::PageFault => "pages are missing",
                    Failure::Implausible => "an impossible record",
                    Failure::Checksum => "a wrong checksum",
                    Failure::Unknown(_) => "an unknown status",
                }
            }
        }

        /// Every status with a text of its own.
        #[cfg(test)]
        const STATUSES: &[u8] = &[$($status),*];
    };
}

failures! {
    Opcode = status::BAD_OPCODE, "the operation is not supported";
    // Mistakes of a driver, or a device of another kind.
    Flags = status::INVALID_FLAGS, "refused flags";
    Reserved = status::NONZERO_RESERVED, "a reserved field is not zero";
    Size = status::INVALID_SIZE, "a refused size";
    Overlapping = status::OVERLAPPING, "overlapping buffers";
    Interrupt = status::INVALID_INTERRUPT, "an invalid interrupt handle";
    RecordTranslation = status::RECORD_TRANSLATION, "the record's address has no translation";
    RecordAlignment = status::RECORD_ALIGNMENT, "the record is not aligned";
    Alignment = status::ADDRESS_ALIGNMENT, "an address is not aligned";
    Privilege = status::PRIVILEGE, "privileged mode";
    TrafficClass = status::TRAFFIC_CLASS, "the traffic class";
    // Faults of the hardware and of the system.
    RecordPage = status::RECORD_PAGE_FAULT, "the record's page is missing";
    Hardware = status::HARDWARE, "a hardware error";
    Drain = status::HARDWARE_DRAIN, "a hardware error while it drained";
    Translation = status::TRANSLATION, "an address has no translation";
    PageRequest = status::PAGE_REQUEST_TIMEOUT, "a page request timed out";
    Watchdog = status::WATCHDOG, "the watchdog expired";
    // Mistakes in what is asked of the engine; the driver never asks for the filter.
    CodecFlags = status::INVALID_CODEC_FLAGS, "refused flags of the codec";
    FilterFlags = status::INVALID_FILTER_FLAGS, "refused flags of the filter";
    InputSize = status::INVALID_INPUT_SIZE, "a refused size of the input";
    Elements = status::INVALID_ELEMENTS, "a refused number of elements";
    Width = status::INVALID_WIDTH, "a refused width";
    Inversion = status::INVALID_INVERSION, "a refused inversion";
}

impl Failure {
    /// Why a record that is neither a success nor a page fault says that the job failed.
    pub(crate) fn of(record: &Record) -> Failure {
        match (record.status & status::MASK, record.error) {
            (status::OUTPUT_OVERFLOW, _) | (status::ANALYTICS_ERROR, error::OUTPUT_OVERFLOW) => {
                Failure::Overflow
            }
            (status::ANALYTICS_ERROR, error) => Failure::Analytics(error),
            (status, _) => Failure::of_status(status),
        }
    }

    /// Whether there was no room for the job, so that later there may be. Buffers that a device does not give back are
    /// missing later too.
    #[must_use]
    pub fn is_transient(self) -> bool {
        self == Failure::Busy
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())?;
        match self {
            Failure::Analytics(code) | Failure::Unknown(code) => write!(f, " (0x{code:02x})"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Failure, STATUSES};
    use crate::layout::{Record, error, status};

    /// Goal: each status and error code of the documents has a text of its own, and an unknown one its number.
    #[test]
    fn every_status_has_its_own_error() {
        let of = |status, error| Failure::of(&Record { status, error, ..Record::default() });
        let texts: BTreeSet<String> =
            STATUSES.iter().map(|code| of(*code, 0).to_string()).collect();
        assert_eq!(texts.len(), STATUSES.len());
        assert!(STATUSES.iter().all(|code| !matches!(of(*code, 0), Failure::Unknown(_))));
        assert_eq!(
            of(status::WRITE | status::WATCHDOG, 0),
            Failure::Watchdog,
            "bit 7 is no status"
        );
        assert_eq!(of(status::OUTPUT_OVERFLOW, 0), Failure::Overflow);
        assert_eq!(of(status::ANALYTICS_ERROR, error::OUTPUT_OVERFLOW), Failure::Overflow);
        let refused = of(status::ANALYTICS_ERROR, error::BAD_DISTANCE).to_string();
        assert_eq!(refused, "the engine failed (0x11)");
        assert_eq!(of(0x7E, 0).to_string(), "an unknown status (0x7e)");
    }
}
