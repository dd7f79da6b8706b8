//! Data that does not compress, four times as large as the limit: what does not fit goes to a disk, encrypted.
//!
//! ```text
//! cargo run --release -p zfolio --example spill [DIRECTORY [MEBIBYTES]]
//! ```
//!
//! Writes a region of 1 GiB in order, reads it back in order and here and there, compares every byte, and prints how
//! fast that was.

#![allow(clippy::disallowed_methods, reason = "a program of its own, which measures itself")]

use std::error::Error;
use std::time::Instant;

const PAGE: usize = 4096;
const THREADS: usize = 16;

/// Noise: the word at `index`.
fn word(index: usize) -> u64 {
    let seed = (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let seed = (seed ^ seed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let seed = (seed ^ seed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    seed ^ seed >> 31
}

/// Whether a page of the slice is as it was written.
fn is_whole(words: &[u64], page: usize) -> bool {
    let range = page * (PAGE / 8)..(page + 1) * (PAGE / 8);
    range.clone().all(|index| words[index] == word(index))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| "/var/tmp".to_owned());
    let bytes = arguments.next().map_or(Ok(1024), |text| text.parse::<usize>())? << 20;
    let limit = (bytes as u64 / 4).max(zfolio::LIMIT_BYTES_MIN);
    let pager = zfolio::Pager::builder().limit(limit).spill(&directory).build()?;
    let mut words = pager.map_slice::<u64>(bytes / 8)?;
    let pages = bytes / PAGE;
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let speed = |name: &str, bytes: usize, began: Instant| {
        let seconds = began.elapsed().as_secs_f64();
        println!("{name:<16}{:6.0} MB/s, {seconds:.2} s", bytes as f64 / 1e6 / seconds);
    };
    let began = Instant::now();
    for (index, place) in words.iter_mut().enumerate() {
        *place = word(index);
    }
    speed("write in order", bytes, began);
    let began = Instant::now();
    assert!((0..pages).all(|page| is_whole(&words, page)), "a page is not what was written");
    speed("read in order", bytes, began);
    let (began, reads) = (Instant::now(), pages / 16);
    let page = |step: usize| usize::try_from(word(step) % pages as u64).expect("a page");
    assert!((0..reads).all(|step| is_whole(&words, page(step))), "a page is not what was written");
    speed("read at random", reads * PAGE, began);
    let began = Instant::now();
    let words = &*words;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mine =
                move || (0..reads / 4).all(|step| is_whole(words, page(step * THREADS + thread)));
            let check = move || assert!(mine(), "a page is not what was written");
            scope.spawn(check);
        }
    });
    speed("by 16 threads", reads / 4 * THREADS * PAGE, began);
    let stats = pager.stats();
    println!("{stats}");
    let over = stats.figures.over_limit_bytes_max;
    println!(
        "every byte was right; at most {} KiB above the limit of {} MiB",
        over >> 10,
        limit >> 20
    );
    Ok(())
}
