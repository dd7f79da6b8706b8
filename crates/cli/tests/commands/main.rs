//! The `zfolio` command from outside: arguments, errors, exit statuses, signals, statistics.
//!
//! The preload library has tests of its own. Here a stand-in of a few lines of C takes its place: it
//! writes a file of statistics as the library does, and manages nothing.

mod codecs;
mod completions;
mod dict;
mod install;
mod manual;
mod options;
mod refusals;
mod run;
mod screen;
mod stage;
mod stat;
mod suggest;
mod tree;
