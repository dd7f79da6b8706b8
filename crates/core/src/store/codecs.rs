//! The codecs of one store. An entry names the one that it was compressed with.

#![forbid(unsafe_code)]

use std::sync::OnceLock;

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

/// The list. A codec that is in it stays.
#[derive(Debug)]
pub(super) struct Codecs {
    all: Box<[OnceLock<Zcomp>]>,
    unit_max: UnitOrder,
    batch_max: usize,
}

impl Codecs {
    /// These, and others later with units of at most `unit_max`.
    ///
    /// # Panics
    ///
    /// If there is none, or more than [`CODECS_MAX`].
    pub(super) fn new(codecs: Vec<Zcomp>, unit_max: UnitOrder) -> Codecs {
        assert!((1..=CODECS_MAX).contains(&codecs.len()), "{} codecs", codecs.len());
        let unit_max = codecs.iter().map(Zcomp::unit).max().expect("there is one").max(unit_max);
        let batch_max = codecs.iter().map(Zcomp::batch_max).max().expect("there is one");
        let mut codecs = codecs.into_iter();
        let place = |_| codecs.next().map_or_else(OnceLock::new, OnceLock::from);
        Codecs { all: (0..CODECS_MAX).map(place).collect(), unit_max, batch_max }
    }

    /// Adds a codec. `None`: there are [`CODECS_MAX`], or its units or batches are longer than those of the others.
    pub(super) fn add(&self, codec: Zcomp) -> Option<CodecId> {
        if codec.unit() > self.unit_max || codec.batch_max() > self.batch_max {
            return None;
        }
        let mut codec = Some(codec);
        let takes = |place: &OnceLock<Zcomp>| {
            let Some(given) = codec.take() else { return false };
            codec = place.set(given).err();
            codec.is_none()
        };
        self.all.iter().position(takes).and_then(CodecId::new)
    }

    /// The codecs with their numbers.
    pub(super) fn each(&self) -> impl Iterator<Item = (CodecId, &Zcomp)> {
        let all = self.all.iter().enumerate();
        all.filter_map(|(number, codec)| Some((CodecId::new(number)?, codec.get()?)))
    }

    /// The codec of this number.
    ///
    /// # Panics
    ///
    /// If the store has no such codec.
    pub(super) fn get(&self, id: CodecId) -> &Zcomp {
        self.all[id.get()].get().expect("an id is that of a codec")
    }

    /// The largest unit that any of them may have.
    pub(super) fn unit_max(&self) -> UnitOrder {
        self.unit_max
    }

    /// The longest batch of any of them.
    pub(super) fn batch_max(&self) -> usize {
        self.batch_max
    }

    /// The memory of the streams that were used.
    pub(super) fn memory_bytes(&self) -> usize {
        self.each().map(|(_, codec)| codec.memory_bytes()).sum()
    }
}
