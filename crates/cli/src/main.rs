//! The `zfolio` command.
//!
//! Each command is a module. All system calls go through `zfolio_sys`.

#![deny(unsafe_code)]

mod algorithms;
mod allowance;
mod arguments;
mod completion;
mod device;
mod dictionary;
mod doctor;
mod duration;
mod failure;
mod iaa;
mod ledger_file;
mod manual;
mod metrics;
mod notify;
mod output;
mod requirements;
mod run;
mod set;
mod spelling;
mod stat;
mod stats_file;
mod suggest;
mod table;

use std::io::{self, Write as _};
use std::process::ExitCode;

use arguments::Command;
use failure::Failure;
use zfolio_sys::inherited;

/// Before Rust's runtime changes what this process has inherited: the program of `zfolio run` gets that.
#[used]
#[allow(unsafe_code, reason = "the C library runs the functions of this section before `main`")]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = inherited::look;

fn main() -> ExitCode {
    match command() {
        Ok(status) => status,
        Err(failure) => {
            // Where nobody can read it the status says what has failed.
            writeln!(io::stderr(), "{failure}").ok();
            ExitCode::from(failure.status())
        }
    }
}

fn command() -> Result<ExitCode, Failure> {
    match arguments::parse(std::env::args_os())?.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Stat(arguments) => stat::stat(&arguments),
        Command::Set(arguments) => set::set(&arguments),
        Command::Device(arguments) => device::device(&arguments),
        Command::Iaa(arguments) => iaa::iaa(&arguments),
        Command::Suggest(arguments) => suggest::suggest(&arguments),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Algorithms(_) => algorithms::algorithms(),
        Command::Bench(arguments) => Ok(zfolio_bench::bench(arguments)),
        Command::Dict(arguments) => dictionary::dict(&arguments),
        Command::Completions(arguments) => completion::script(arguments.shell),
        Command::Help(arguments) => arguments::help(&arguments.commands),
        Command::Man(arguments) => manual::man(&arguments),
        Command::Complete(arguments) => completion::complete(&arguments),
        Command::Corpus(arguments) => Ok(zfolio_bench::corpus(arguments)),
    }
}
