//! The settings that are compared: one for each row of the table.

use std::fmt;
use std::str::FromStr;

use zfolio_core::page::UnitOrder;
use zfolio_core::size;
use zfolio_core::zcomp::Choice;

use crate::kernel::KernelSetting;

/// How zfolio compresses: `lz4:64K`, `zstd,level=1:16K`; `auto`, which chooses units too.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Compression {
    /// The value of `--algorithm`.
    pub(crate) algorithm: String,
    /// The value of `--unit`, if there is one.
    pub(crate) unit_bytes: Option<usize>,
}

impl Compression {
    /// The bytes of a unit.
    pub(crate) fn unit_bytes(&self) -> usize {
        self.unit_bytes.unwrap_or(UnitOrder::DEFAULT.bytes())
    }

    /// The options of `zfolio run`.
    pub(crate) fn options(&self) -> impl Iterator<Item = String> {
        let unit = self.unit_bytes.map(|bytes| ["--unit".to_owned(), bytes.to_string()]);
        ["--algorithm".to_owned(), self.algorithm.clone()]
            .into_iter()
            .chain(unit.into_iter().flatten())
    }
}

/// The settings that are compared unless `--setting` says otherwise.
pub(crate) const DEFAULTS: [&str; 4] = ["lz4:4K", "lz4:16K", "zstd,level=1:4K", "zstd,level=1:16K"];

impl FromStr for Compression {
    type Err = String;
    fn from_str(text: &str) -> Result<Compression, String> {
        let accepted =
            "accepted: ALGORITHM[,level=N]:UNIT, as in lz4:64K or zstd,level=1:16K; auto";
        if text.parse() == Ok(Choice::Auto) {
            return Ok(Compression { algorithm: text.to_owned(), unit_bytes: None });
        }
        let (algorithm, unit) = text
            .rsplit_once(':')
            .ok_or_else(|| format!("'{text}' is not a setting; {accepted}"))?;
        let bytes = size::parse(unit).map_err(|error| format!("{error}; {accepted}"))?;
        let order = usize::try_from(bytes).ok().and_then(UnitOrder::from_bytes);
        let order = order.ok_or(format!("unit {unit}: accepted: a power of two from 4K to 2M"))?;
        let known = algorithm.parse::<Choice>();
        known.map_err(|error| format!("{error}; {accepted}"))?;
        Ok(Compression { algorithm: algorithm.to_owned(), unit_bytes: Some(order.bytes()) })
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.algorithm)?;
        self.unit_bytes.map_or(Ok(()), |unit| write!(f, " {}", size::display(unit as u64)))
    }
}

/// A row of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Setting {
    /// Without any limit: the speed of the machine.
    Free,
    /// The kernel's zram swap.
    Kernel(KernelSetting),
    /// The kernel's zswap, with this compressor, over a swap file.
    Zswap(String),
    /// Under `zfolio run`.
    Run(Compression),
    /// In a region of the library.
    Inline(Compression),
}

impl Setting {
    /// Whether it is one of zfolio's, to be compared with the kernel's.
    pub(crate) fn is_zfolio(&self) -> bool {
        matches!(self, Setting::Run(_) | Setting::Inline(_))
    }

    /// Whether it is one of the kernel's.
    pub(crate) fn is_kernel(&self) -> bool {
        matches!(self, Setting::Kernel(_) | Setting::Zswap(_))
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Free => f.write_str("no limit"),
            Setting::Kernel(setting) => setting.fmt(f),
            Setting::Zswap(compressor) => write!(f, "kernel zswap {compressor}"),
            Setting::Run(compression) => write!(f, "run {compression}"),
            Setting::Inline(compression) => write!(f, "inline {compression}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Compression, DEFAULTS};

    #[test]
    fn a_setting_is_an_algorithm_and_a_unit() {
        let setting: Compression = "zstd,level=1:64K".parse().expect("well formed");
        assert_eq!((setting.algorithm.as_str(), setting.unit_bytes), ("zstd,level=1", Some(65536)));
        assert_eq!(setting.to_string(), "zstd,level=1 64K");
        let setting: Compression = "auto".parse().expect("well formed");
        assert_eq!((setting.to_string().as_str(), setting.unit_bytes), ("auto", None));
        assert!(DEFAULTS.iter().all(|text| text.parse::<Compression>().is_ok()));
        for bad in ["lz4", "lz4:", ":64K", "lz4:3K", "lz4:4M", "lz4:2K", "lz4:64Q", "nonsense:64K"]
        {
            let line = bad.parse::<Compression>().expect_err(bad);
            assert!(line.contains("accepted"), "{bad}: {line}");
        }
    }
}
