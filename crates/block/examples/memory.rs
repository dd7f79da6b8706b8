//! A disk in memory over NBD, for tests with real clients and for measurements.
//!
//!     cargo run --release -p zfolio-block --example memory -- 1G /tmp/disk.sock [localhost:10809 ...]
//!
//! Exports `disk`, which is also the default, and `frozen`, a read-only one. Prints a line once clients may connect,
//! and ends with its standard input.

use std::process::ExitCode;
use std::sync::Arc;

use zfolio_block::listen::Listener;
use zfolio_block::nbd::{Config, Exports, Server};
use zfolio_block::testing::Memory;
use zfolio_core::size;

fn serve(arguments: &[String]) -> Result<(), String> {
    let [bytes, addresses @ ..] = arguments else {
        return Err("arguments: SIZE ADDRESS...".to_owned());
    };
    let bytes = size::parse(bytes).map_err(|why| why.to_string())?;
    let mut exports = Exports::new();
    let mut add = |name, description, disk| {
        exports.add(name, description, Arc::new(disk)).map_err(|why| why.to_string())
    };
    add("disk", "a disk in memory", Memory::new(bytes / 512 * 512))?;
    add("frozen", "a disk of zeros that stays so", Memory::new(1 << 20).read_only())?;
    let mut listeners = Vec::new();
    for address in addresses {
        let opened = Listener::open(&address.parse()?).map_err(|why| why.to_string())?;
        listeners.extend(opened);
    }
    let ports: Vec<_> = listeners.iter().filter_map(Listener::port).collect();
    let mut server = Server::start(listeners, exports, Config::default())
        .map_err(|why| format!("no server: {why}"))?;
    println!("ready {ports:?}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).map_err(|why| why.to_string())?;
    println!("{:?}", server.counts());
    match server.stop() {
        0 => Ok(()),
        count => Err(format!("{count} connections did not end")),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("memory: {why}");
            ExitCode::FAILURE
        }
    }
}
