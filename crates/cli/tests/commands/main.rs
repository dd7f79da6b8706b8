//! The `zfolio` command from outside: arguments, errors, exit statuses, signals, statistics.
//!
//! The preload library has its own tests. Here a few lines of C take its place: they write a file
//! of statistics as the library does, and manage nothing.

mod codecs;
mod completions;
mod contents;
mod daemon;
mod device;
mod dict;
mod disk;
mod docs;
mod iaa;
mod install;
mod manual;
mod metrics;
mod options;
mod refusals;
mod replacement;
mod run;
mod screen;
mod stage;
mod stat;
mod suggest;
mod tree;
