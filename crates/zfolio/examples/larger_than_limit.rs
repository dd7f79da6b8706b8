//! A region four times as large as its limit: filled, read back, and counted.
//!
//! `cargo run --release --example larger_than_limit`

use zfolio::Pager;

fn main() -> Result<(), zfolio::Error> {
    let pager = Pager::builder().limit(64 << 20).unit(64 << 10).build()?;
    let mut region = pager.map(256 << 20)?;

    // Values that repeat from time to time, as in real data.
    for (index, byte) in region.iter_mut().enumerate() {
        *byte = value(index);
    }
    let wrong = region.iter().enumerate().filter(|(index, byte)| **byte != value(*index)).count();

    println!("{} bytes wrong of {}", wrong, region.len());
    println!("{}", pager.stats());
    assert_eq!(wrong, 0);
    Ok(())
}

fn value(index: usize) -> u8 {
    ((index / 50) % 251).to_le_bytes()[0]
}
