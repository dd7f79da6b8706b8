//! Mappings: how memory comes under management (`adopt`), and how changes of it are handled: those
//! that the engine makes itself (`change`, `relocate`), and those that it learns of afterwards (`event`).

mod adopt;
pub(crate) mod change;
pub(crate) mod event;
pub(crate) mod relocate;
