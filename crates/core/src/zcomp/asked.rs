//! A choice as one word of shared memory, by which another process asks for it, and the answer.
//!
//! ```text
//! 63..56   of an answer: why it is refused; 0: it is not
//! 55..49   0
//! 48       there is a level
//! 47..16   the level
//! 15..8    the window; 0: none is given
//! 7..0     the place of the algorithm in `Algorithm::ALL`, plus 2; 1: auto; 0: nobody asks
//! ```

#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Algorithm, Choice, Params};

const AUTO: u64 = 1;
const FIRST: u64 = 2;
const WINDOW_SHIFT: u32 = 8;
const LEVEL_SHIFT: u32 = 16;
const HAS_LEVEL: u64 = 1 << 48;
const WHY_SHIFT: u32 = 56;

/// Why a choice that was asked for is not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Refused {
    /// `auto`, where only one codec was set up at the start.
    Auto = 1,
    /// The store has as many codecs as it can.
    Full = 2,
    /// The codec cannot be set up: there is no memory for its streams.
    SetUp = 3,
}

const REFUSED: [Refused; 3] = [Refused::Auto, Refused::Full, Refused::SetUp];

/// The word that asks for a choice. `None`: it has a dictionary, which no word can hold.
#[must_use]
pub fn to_word(choice: &Choice) -> Option<u64> {
    let Choice::Fixed(Params { algorithm, level, window, dictionary: None }) = choice else {
        return (*choice == Choice::Auto).then_some(AUTO);
    };
    let place = Algorithm::ALL.iter().position(|other| other == algorithm)?;
    let level = level.map_or(0, |level| {
        HAS_LEVEL | u64::from(u32::from_ne_bytes(level.to_ne_bytes())) << LEVEL_SHIFT
    });
    Some(level | u64::from(window.unwrap_or(0)) << WINDOW_SHIFT | (place as u64 + FIRST))
}

/// The choice that a word asks for. `None`: none that this build knows.
#[must_use]
pub fn from_word(word: u64) -> Option<Choice> {
    let [place, window, ..] = word.to_le_bytes();
    if u64::from(place) == AUTO {
        return Some(Choice::Auto);
    }
    let place = u64::from(place).checked_sub(FIRST)?;
    let algorithm = *Algorithm::ALL.get(usize::try_from(place).ok()?)?;
    let level = u32::try_from(word >> LEVEL_SHIFT & u64::from(u32::MAX)).ok()?;
    let level = i32::from_ne_bytes(level.to_ne_bytes());
    let level = (word & HAS_LEVEL != 0).then_some(level);
    let params = Params {
        algorithm,
        level,
        window: Some(window).filter(|window| *window > 0),
        dictionary: None,
    };
    params.checked().ok().map(|_| Choice::Fixed(params))
}

/// The answer to a word.
#[must_use]
pub fn answer(word: u64, refused: Option<Refused>) -> u64 {
    word | refused.map_or(0, |why| u64::from(why as u8)) << WHY_SHIFT
}

/// What an answer says to the `word` that was asked. `None`: it is the answer to another one, or none.
#[must_use]
pub fn answered(word: u64, answer: u64) -> Option<Result<(), Refused>> {
    let why = answer >> WHY_SHIFT;
    let is_for_it = word != 0 && answer & ((1 << WHY_SHIFT) - 1) == word;
    let refused = REFUSED.into_iter().find(|refused| u64::from(*refused as u8) == why);
    is_for_it.then(|| refused.map_or(Ok(()), Err))
}

/// Whether two sets of parameters make the same codec, one of them with a default written out.
#[must_use]
pub fn is_same(one: &Params, other: &Params) -> bool {
    let level = |params: &Params| params.level.unwrap_or(params.algorithm.level_default());
    let whole = |params: &Params| {
        (
            params.algorithm,
            level(params),
            params.window,
            params.dictionary.as_ref().map(Arc::as_ptr),
        )
    };
    whole(one) == whole(other)
}

#[cfg(test)]
mod tests {
    use super::{Refused, answer, answered, from_word, is_same, to_word};
    use crate::zcomp::{Choice, Params};

    #[test]
    fn a_word_says_what_was_asked_for() {
        for text in [
            "auto",
            "lz4",
            "zstd",
            "zstd,level=3",
            "zstd,level=-5",
            "842",
            "deflate,level=6,window=12",
            "lzo-rle",
        ] {
            let choice: Choice = text.parse().expect(text);
            let word = to_word(&choice).expect(text);
            assert_eq!(from_word(word), Some(choice), "{text}");
            assert_eq!(answered(word, answer(word, None)), Some(Ok(())));
            let refused = answer(word, Some(Refused::Full));
            assert_eq!(answered(word, refused), Some(Err(Refused::Full)));
            assert_eq!((answered(word + 1, refused), answered(0, 0)), (None, None));
        }
        assert_eq!(to_word(&"zstd,dict=/some".parse().expect("only named")), None);
        assert_eq!(
            [from_word(0), from_word(200), from_word(2 | 1 << 48 | 1 << 40)],
            [None, None, None]
        );
        let params = |text: &str| text.parse::<Params>().expect(text);
        assert!(is_same(&params("zstd"), &params("zstd,level=1")), "its default");
        assert!(!is_same(&params("zstd"), &params("zstd,level=2")));
        assert!(!is_same(&params("lz4"), &params("lz4hc")));
    }
}
