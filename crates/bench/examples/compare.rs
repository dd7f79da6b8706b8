//! The two commands of this crate without the rest of `zfolio`: `cargo run --release --example
//! compare -- bench usemem --against kernel --without run`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare
    Bench(zfolio_bench::BenchArgs),
    /// Make data
    Corpus(zfolio_bench::CorpusArgs),
}

fn main() -> ExitCode {
    match Line::parse().command {
        Command::Bench(args) => zfolio_bench::bench(args),
        Command::Corpus(args) => zfolio_bench::corpus(args),
    }
}
