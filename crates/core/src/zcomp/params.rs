//! The choice of a codec and its parameters, as a user writes it: `zstd`, or
//! `zstd,level=3,dict=FILE`.

#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use super::backend::Software;
use super::{Dictionary, Error, deflate, lz4, lz4hc, lzo, sw842, zstd};

/// The default algorithm: of the command, of the library that it injects, and of the Rust library.
pub const ALGORITHM_DEFAULT: &str = Choice::AUTO;

/// A codec, named as in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Fastest. Its level is its acceleration: a higher one is faster and shrinks less.
    Lz4,
    /// LZ4 with a slower search: shrinks more, and decompresses as fast.
    Lz4hc,
    /// LZO1X-1: every LZO1X decoder reads it.
    Lzo,
    /// LZO1X-1 with runs of zeros: the kernel's default for zram.
    LzoRle,
    /// Shrinks most for the time it takes. A negative level is faster and shrinks less.
    Zstd,
    /// Raw deflate, which hardware accelerators support.
    Deflate,
    /// The format of the compression engines of IBM's POWER processors. Slow in software.
    Sw842,
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
        Algorithm::Sw842,
    ];

    pub(super) fn backend(self) -> &'static Software {
        match self {
            Algorithm::Lz4 => &lz4::BACKEND,
            Algorithm::Lz4hc => &lz4hc::BACKEND,
            Algorithm::Lzo => &lzo::LZO,
            Algorithm::LzoRle => &lzo::LZO_RLE,
            Algorithm::Zstd => &zstd::BACKEND,
            Algorithm::Deflate => &deflate::BACKEND,
            Algorithm::Sw842 => &sw842::BACKEND,
        }
    }

    /// The name in the kernel.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.backend().name
    }

    /// The accepted levels.
    #[must_use]
    pub fn levels(self) -> RangeInclusive<i32> {
        self.backend().levels.clone()
    }

    /// The default level.
    #[must_use]
    pub fn level_default(self) -> i32 {
        self.backend().level_default
    }

    /// The accepted windows, if the algorithm has any: log2 of how many bytes back a unit may
    /// refer.
    #[must_use]
    pub fn windows(self) -> Option<RangeInclusive<u8>> {
        self.backend().extended.as_ref()?.windows.clone()
    }

    /// Whether a dictionary is accepted.
    #[must_use]
    pub fn takes_dictionary(self) -> bool {
        self.backend().extended.is_some()
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

/// An algorithm and its parameters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Params {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The level; `None` is [`Algorithm::level_default`].
    pub level: Option<i32>,
    /// log2 of how many bytes back a unit may refer; `None` is the most that the format allows.
    pub window: Option<u8>,
    /// The bytes that come before every unit.
    pub dictionary: Option<Arc<Dictionary>>,
}

impl Params {
    /// The level to use. Checks all parameters, since the fields are public.
    ///
    /// # Errors
    ///
    /// [`Error::Level`] or [`Error::Window`] if one is out of range, [`Error::Parameter`] if the
    /// algorithm has no such parameter.
    pub(super) fn checked(&self) -> Result<i32, Error> {
        let Params { algorithm, level, window, dictionary } = self;
        let algorithm = *algorithm;
        let has_no = |given: &str| Error::Parameter { algorithm, given: given.to_owned() };
        if let Some(window) = window {
            let windows = algorithm.windows().ok_or_else(|| has_no("window"))?;
            if !windows.contains(window) {
                return Err(Error::Window { algorithm, windows, given: window.to_string() });
            }
        }
        if dictionary.is_some() && !algorithm.takes_dictionary() {
            return Err(has_no("dict"));
        }
        let levels = self.levels();
        let level = level.unwrap_or(algorithm.level_default());
        if levels.contains(&level) {
            Ok(level)
        } else {
            Err(Error::Level { algorithm, levels, given: level.to_string() })
        }
    }

    /// The accepted levels, given the other parameters.
    fn levels(&self) -> RangeInclusive<i32> {
        match &self.algorithm.backend().extended {
            Some(extended) if self.window.is_some() || self.dictionary.is_some() => {
                extended.levels.clone()
            }
            _ => self.algorithm.levels(),
        }
    }

    /// These parameters with the bytes of their dictionary, if they name one. `read` returns the
    /// contents of a path.
    ///
    /// # Errors
    ///
    /// [`Error::Dictionary`] if `read` fails, with its reason, or if the bytes cannot be a
    /// dictionary.
    pub fn with_dictionary(
        mut self,
        read: impl FnOnce(&str) -> Result<Vec<u8>, String>,
    ) -> Result<Params, Error> {
        if let Some(dictionary) = &self.dictionary {
            let path = dictionary.path();
            let bytes =
                read(path).map_err(|why| Error::Dictionary { path: path.to_owned(), why })?;
            self.dictionary = Some(Arc::new(Dictionary::new(path, bytes)?));
        }
        Ok(self)
    }

    /// Reads one `name=value`.
    fn set(&mut self, word: &str) -> Result<(), Error> {
        let algorithm = self.algorithm;
        let parameter = || Error::Parameter { algorithm, given: word.to_owned() };
        let (name, value) = word.split_once('=').ok_or_else(parameter)?;
        let given = value.to_owned();
        let twice = match name {
            "level" => {
                let levels = self.levels();
                let bad = |_| Error::Level { algorithm, levels, given };
                self.level.replace(value.parse().map_err(bad)?).is_some()
            }
            "window" => {
                let windows = algorithm.windows().ok_or_else(parameter)?;
                let bad = |_| Error::Window { algorithm, windows, given };
                self.window.replace(value.parse().map_err(bad)?).is_some()
            }
            "dict" if algorithm.takes_dictionary() && !value.is_empty() => {
                self.dictionary.replace(Arc::new(Dictionary::unread(value))).is_some()
            }
            _ => return Err(parameter()),
        };
        if twice { Err(Error::Repeated { algorithm, given: name.to_owned() }) } else { Ok(()) }
    }
}

impl From<Algorithm> for Params {
    fn from(algorithm: Algorithm) -> Self {
        Params { algorithm, level: None, window: None, dictionary: None }
    }
}

impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.algorithm)?;
        if let Some(level) = self.level {
            write!(f, ",level={level}")?;
        }
        if let Some(window) = self.window {
            write!(f, ",window={window}")?;
        }
        self.dictionary
            .as_ref()
            .map_or(Ok(()), |dictionary| write!(f, ",dict={}", dictionary.path()))
    }
}

impl FromStr for Params {
    type Err = Error;

    /// A dictionary is only named afterwards: [`Params::with_dictionary`] adds its bytes.
    fn from_str(given: &str) -> Result<Self, Error> {
        let mut words = given.split(',');
        let mut params = Params::from(words.next().unwrap_or_default().parse::<Algorithm>()?);
        words.try_for_each(|word| params.set(word))?;
        params.checked().map(|_| params)
    }
}

/// What compresses: one algorithm, or whichever of two pays at the time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Choice {
    /// [`Algorithm::Lz4`] while memory is plenty, [`Algorithm::Zstd`] while it is short.
    #[default]
    Auto,
    /// This algorithm.
    Fixed(Params),
}

impl Choice {
    /// The name of [`Choice::Auto`].
    pub const AUTO: &str = "auto";

    /// The codecs that are needed, the fastest first.
    #[must_use]
    pub fn codecs(&self) -> Vec<Params> {
        match self {
            Choice::Auto => vec![Algorithm::Lz4.into(), Algorithm::Zstd.into()],
            Choice::Fixed(params) => vec![params.clone()],
        }
    }

    /// The same with `change` applied to the parameters that the user gave, if there are any.
    ///
    /// # Errors
    ///
    /// That of `change`.
    pub fn try_map<E>(self, change: impl FnOnce(Params) -> Result<Params, E>) -> Result<Self, E> {
        match self {
            Choice::Auto => Ok(Choice::Auto),
            Choice::Fixed(params) => change(params).map(Choice::Fixed),
        }
    }
}

impl From<Params> for Choice {
    fn from(params: Params) -> Choice {
        Choice::Fixed(params)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Auto => f.pad(Choice::AUTO),
            Choice::Fixed(params) => params.fmt(f),
        }
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        match given.parse() {
            _ if given == Choice::AUTO => Ok(Choice::Auto),
            Err(Error::Algorithm { given: name }) if name == Choice::AUTO => {
                Err(Error::Choice { given: given.to_owned() })
            }
            Err(Error::Algorithm { given }) => Err(Error::Choice { given }),
            params => params.map(Choice::Fixed),
        }
    }
}
