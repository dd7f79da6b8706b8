//! Which codec, at which level, as a user writes it: `zstd`, or `zstd,level=3`.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::backend::Backend;
use super::{Error, deflate, ibm842, lz4, lz4hc, lzo, zstd};

/// A codec, by the kernel's name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Fastest. Its level is its acceleration: a higher one is faster and shrinks less.
    Lz4,
    /// LZ4 with a slower search: shrinks more, and comes back as fast.
    Lz4hc,
    /// LZO1X-1, which every LZO1X decoder reads.
    Lzo,
    /// LZO1X-1 with runs of zeros: the kernel's default for zram.
    LzoRle,
    /// Shrinks most for its time. A negative level is faster and shrinks less.
    Zstd,
    /// Raw deflate, which accelerators speak.
    Deflate,
    /// What the compression engines of IBM's POWER processors speak. Slow in software.
    Ibm842,
}

impl Algorithm {
    /// Every algorithm of this build, fastest first.
    pub const ALL: &'static [Algorithm] = &[
        Algorithm::Lz4,
        Algorithm::Lz4hc,
        Algorithm::Lzo,
        Algorithm::LzoRle,
        Algorithm::Zstd,
        Algorithm::Deflate,
        Algorithm::Ibm842,
    ];

    pub(super) fn backend(self) -> &'static Backend {
        match self {
            Algorithm::Lz4 => &lz4::BACKEND,
            Algorithm::Lz4hc => &lz4hc::BACKEND,
            Algorithm::Lzo => &lzo::LZO,
            Algorithm::LzoRle => &lzo::LZO_RLE,
            Algorithm::Zstd => &zstd::BACKEND,
            Algorithm::Deflate => &deflate::BACKEND,
            Algorithm::Ibm842 => &ibm842::BACKEND,
        }
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.backend().name
    }

    /// The levels that it accepts.
    #[must_use]
    pub fn levels(self) -> RangeInclusive<i32> {
        self.backend().levels.clone()
    }

    /// The level if none is given.
    #[must_use]
    pub fn level_default(self) -> i32 {
        self.backend().level_default
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        Algorithm::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == given)
            .ok_or_else(|| Error::Algorithm { given: given.to_owned() })
    }
}

/// An algorithm and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Params {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Its level; `None` is [`Algorithm::level_default`].
    pub level: Option<i32>,
}

impl Params {
    /// The level to use.
    ///
    /// # Errors
    ///
    /// [`Error::Level`] if it is out of range: the fields are public, so anything may be there.
    pub(super) fn level_checked(self) -> Result<i32, Error> {
        let Params { algorithm, level } = self;
        let level = level.unwrap_or(algorithm.level_default());
        if algorithm.levels().contains(&level) {
            Ok(level)
        } else {
            Err(Error::Level { algorithm, given: level.to_string() })
        }
    }
}

impl From<Algorithm> for Params {
    fn from(algorithm: Algorithm) -> Self {
        Params { algorithm, level: None }
    }
}

impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.algorithm)?;
        self.level.map_or(Ok(()), |level| write!(f, ",level={level}"))
    }
}

impl FromStr for Params {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        let Some((name, parameter)) = given.split_once(',') else {
            return given.parse().map(|algorithm| Params { algorithm, level: None });
        };
        let algorithm = name.parse()?;
        let Some(level) = parameter.strip_prefix("level=") else {
            return Err(Error::Parameter { algorithm, given: parameter.to_owned() });
        };
        let Ok(number) = level.parse() else {
            return Err(Error::Level { algorithm, given: level.to_owned() });
        };
        let params = Params { algorithm, level: Some(number) };
        params.level_checked().map(|_| params)
    }
}
