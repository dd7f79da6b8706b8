//! How the driver works, and the attributes by which a user says so.

use std::fmt;

/// What becomes of a compression for which no descriptor is free in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenBusy {
    /// It fails: the caller keeps the unit, and may try again.
    Reject,
    /// Software does it.
    Software,
}

/// How the driver works. The names are those of the kernel's module where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The last so many queues of a device, by their numbers, are for compression only, the others for decompression;
    /// 0: all do both.
    pub comp_wqs_per_iaa: usize,
    /// Whether compressions go round robin over all devices of the package.
    pub distribute_comps: bool,
    /// The same for decompressions.
    pub distribute_decomps: bool,
    /// Jobs of a batch one after the other (`sync_mode=sync`) rather than at once (`async`).
    pub is_sync: bool,
    /// Each compressed unit is decompressed by the device, and the checksums compared.
    pub verify_compress: bool,
    /// The checksum in each record is compared with that of the data, by software: 0.1 us for 4 KiB. A store does
    /// this better.
    pub check_crc: bool,
    /// See there.
    pub when_busy: WhenBusy,
    /// Polls of a record before its job is given up, `IAA_COMPLETION_TIMEOUT`.
    pub polls_max: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            comp_wqs_per_iaa: 0,
            distribute_comps: true,
            distribute_decomps: false,
            is_sync: false,
            verify_compress: false,
            check_crc: false,
            when_busy: WhenBusy::Software,
            polls_max: 1_000_000,
        }
    }
}

impl Settings {
    /// What [`Settings::parse`] accepts, for a message.
    pub const ACCEPTED: &str = "sync_mode=sync|async, verify_compress=0|1, distribute_comps=0|1, \
        distribute_decomps=0|1, g_comp_wqs_per_iaa=N, check_crc=0|1, when_busy=software|reject";

    /// Reads attributes that a user has written, `sync_mode=sync,verify_compress=1`; the others have their defaults.
    /// `None` if one is not known, has a bad value, or is there twice.
    #[must_use]
    pub fn parse(given: &str) -> Option<Settings> {
        let mut settings = Settings::default();
        let mut names = Vec::new();
        for attribute in given.split(',') {
            let (name, value) = attribute.split_once('=')?;
            if names.contains(&name) {
                return None;
            }
            names.push(name);
            settings.set(name, value)?;
        }
        Some(settings)
    }

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        match name {
            "sync_mode" => self.is_sync = either(value, "async", "sync")?,
            "verify_compress" => self.verify_compress = either(value, "0", "1")?,
            "distribute_comps" => self.distribute_comps = either(value, "0", "1")?,
            "distribute_decomps" => self.distribute_decomps = either(value, "0", "1")?,
            "g_comp_wqs_per_iaa" => self.comp_wqs_per_iaa = value.parse().ok()?,
            "check_crc" => self.check_crc = either(value, "0", "1")?,
            "when_busy" => {
                let rejects = either(value, "software", "reject")?;
                self.when_busy = if rejects { WhenBusy::Reject } else { WhenBusy::Software };
            }
            _ => return None,
        }
        Some(())
    }

    /// The attributes by name, each as `set` reads it.
    fn attributes(&self) -> [(&'static str, String); 7] {
        let flag = |is_on: bool| u8::from(is_on).to_string();
        let sync_mode = if self.is_sync { "sync" } else { "async" };
        let when_busy = match self.when_busy {
            WhenBusy::Reject => "reject",
            WhenBusy::Software => "software",
        };
        [
            ("sync_mode", sync_mode.to_owned()),
            ("verify_compress", flag(self.verify_compress)),
            ("distribute_comps", flag(self.distribute_comps)),
            ("distribute_decomps", flag(self.distribute_decomps)),
            ("g_comp_wqs_per_iaa", self.comp_wqs_per_iaa.to_string()),
            ("check_crc", flag(self.check_crc)),
            ("when_busy", when_busy.to_owned()),
        ]
    }
}

/// Whether a value is `on`; `None` if it is not `off` either.
fn either(value: &str, off: &str, on: &str) -> Option<bool> {
    (value == on || value == off).then_some(value == on)
}

/// Writes `,NAME=VALUE` for each attribute that is not the default, as [`Settings::parse`] reads them.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attributes = self.attributes().into_iter().zip(Settings::default().attributes());
        for ((name, value), (_, default)) in attributes {
            if value != default {
                write!(f, ",{name}={value}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Settings, WhenBusy};

    #[test]
    fn attributes_are_read_as_they_are_written() {
        let all = "sync_mode=sync,verify_compress=1,distribute_comps=0,distribute_decomps=1,\
                   g_comp_wqs_per_iaa=2,check_crc=1,when_busy=reject";
        let given = Settings {
            comp_wqs_per_iaa: 2,
            distribute_comps: false,
            distribute_decomps: true,
            is_sync: true,
            verify_compress: true,
            check_crc: true,
            when_busy: WhenBusy::Reject,
            ..Settings::default()
        };
        assert_eq!(Settings::parse(all), Some(given));
        assert_eq!(given.to_string(), format!(",{all}"));
        for one in all.split(',') {
            let settings = Settings::parse(one).unwrap();
            assert_ne!(settings, Settings::default(), "{one}");
            assert_eq!(settings.to_string(), format!(",{one}"));
            let name = one.split_once('=').unwrap().0;
            assert!(Settings::ACCEPTED.contains(&format!("{name}=")), "{name}");
        }
        let defaults =
            Settings::default().attributes().map(|(name, value)| format!("{name}={value}"));
        assert_eq!(Settings::parse(&defaults.join(",")), Some(Settings::default()));
        assert_eq!(Settings::default().to_string(), "");
    }

    #[test]
    fn other_attributes_and_values_are_refused() {
        for given in [
            "",
            ",",
            "sync_mode",
            "sync_mode=",
            "sync_mode=async_irq",
            "verify_compress=2",
            "g_comp_wqs_per_iaa=-1",
            "when_busy=wait",
            "polls_max=3",
            "check_crc=1,",
            "check_crc=1,check_crc=1",
        ] {
            assert_eq!(Settings::parse(given), None, "{given}");
        }
    }
}
