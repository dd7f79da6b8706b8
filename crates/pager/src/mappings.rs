//! Mappings: how memory comes under management (`adopt`), and what happens when it changes, by the engine itself
//! (`change`) or behind its back (`event`).

mod adopt;
mod change;
pub(crate) mod event;
