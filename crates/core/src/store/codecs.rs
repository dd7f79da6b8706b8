//! The codecs of one store. An entry names the one that it was compressed with.

#![forbid(unsafe_code)]

use crate::page::UnitOrder;
use crate::zcomp::Zcomp;

/// The most codecs of a store: an entry's row has 4 bits for the number of its codec.
pub const CODECS_MAX: usize = 16;

/// One of a store's codecs: its place in the list that the store was made with.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct CodecId(u8);

impl CodecId {
    /// The first codec of a store.
    pub const FIRST: CodecId = CodecId(0);

    /// The second codec of a store.
    pub const SECOND: CodecId = CodecId(1);

    /// The codec with this number, or `None` if no store has so many.
    #[must_use]
    pub fn new(number: usize) -> Option<CodecId> {
        u8::try_from(number).ok().filter(|_| number < CODECS_MAX).map(CodecId)
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// The list.
#[derive(Debug)]
pub(super) struct Codecs(Box<[Zcomp]>);

impl Codecs {
    /// # Panics
    ///
    /// If there is none, or more than [`CODECS_MAX`].
    pub(super) fn new(codecs: Vec<Zcomp>) -> Codecs {
        assert!((1..=CODECS_MAX).contains(&codecs.len()), "{} codecs", codecs.len());
        Codecs(codecs.into_boxed_slice())
    }

    /// The codec of this number.
    ///
    /// # Panics
    ///
    /// If the store has no such codec.
    pub(super) fn get(&self, id: CodecId) -> &Zcomp {
        &self.0[id.get()]
    }

    /// The largest unit of any of them.
    pub(super) fn unit_max(&self) -> UnitOrder {
        self.0.iter().map(Zcomp::unit).max().expect("there is one")
    }

    /// The longest batch of any of them.
    pub(super) fn batch_max(&self) -> usize {
        self.0.iter().map(Zcomp::batch_max).max().expect("there is one")
    }

    /// The memory of all streams.
    pub(super) fn memory_bytes(&self) -> usize {
        self.0.iter().map(Zcomp::memory_bytes).sum()
    }
}
