//! The front end against its guest: requests in memory, and whole connections.

mod again;
mod connections;
mod frontend;
mod hostile;
mod model;
mod refusals;
mod rig;
mod speed;
