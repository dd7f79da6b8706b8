//! Numbers in handler mode: sorted in a slice larger than its limit, written to a file and read
//! back by single system calls, and sent through a socket.
//!
//! `cargo run --release --example file_and_socket`

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::net::UnixStream;

use zfolio::{Mode, Pager};

/// 128 MiB of numbers in 48 MiB of memory.
const COUNT: usize = 16 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pager = match Pager::builder().limit(48 << 20).mode(Mode::Handler).build() {
        Err(why) if why.is_unsupported() => {
            println!("SKIPPED: {why}");
            return Ok(());
        }
        pager => pager?,
    };
    let mut numbers = pager.map_slice::<u64>(COUNT)?;
    for (index, number) in numbers.iter_mut().enumerate() {
        *number = (COUNT - index) as u64 / 16;
    }
    numbers.sort_unstable();
    assert!(numbers.windows(2).all(|pair| pair[0] <= pair[1]));

    // The kernel reads and writes compressed memory, which inline mode would answer with EFAULT.
    let path = std::env::temp_dir().join(format!("zfolio-example-{}", std::process::id()));
    let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(numbers.region())?;
    numbers.fill(0);
    file.rewind()?;
    file.read_exact(numbers.region_mut())?;
    assert_eq!(numbers[COUNT - 1], COUNT as u64 / 16);

    // `write_to` and `read_from` work in both modes.
    let mut copy = pager.map_slice::<u64>(COUNT)?;
    let (mut near, mut far) = UnixStream::pair()?;
    let (numbers, received) = (&numbers, &mut copy);
    std::thread::scope(|scope| {
        scope.spawn(move || numbers.region().write_to(.., &mut near).expect("it is read"));
        received.region_mut().read_from(.., &mut far)
    })?;
    assert!(numbers[..] == copy[..]);
    println!("{}", pager.stats());
    Ok(())
}
