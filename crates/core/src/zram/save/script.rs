//! Any bytes as a saved disk: the fuzz target loads what the fuzzer writes, the tests what seeded numbers write.
//!
//! The first byte says what the others are: a file; or changes of a good file. Either is loaded as it is, or with its
//! checks made right, so that what is behind them is met. A file is refused, or all that it has can be read.

use std::sync::Arc;

use super::format::reseal;
use super::{LoadError, Reader};
use crate::store::Key;
use crate::zcomp::{Params, Zcomp};
use crate::zram::Zram;
use crate::zsmalloc::world::{World, bytes, unit};

/// Bytes of the largest disk that is read through.
const DISK_BYTES_MAX: u64 = 64 << 20;

/// Plays a script as its bytes say.
///
/// # Panics
///
/// When a file is loaded that was changed, or what was loaded cannot be read.
pub fn play(script: &[u8]) {
    let Some((first, rest)) = script.split_first() else { return };
    let good = good_file();
    let mut file = if first % 2 == 0 { rest.to_vec() } else { changed(&good, rest) };
    let is_sealed = first / 2 % 2 == 0;
    if !is_sealed {
        reseal(&mut file);
    }
    match load(&file) {
        Ok(disk) => {
            // A fuzzer does not find a hash of 64 bits, so an unsealed file that is accepted is the good one.
            assert!(!is_sealed || file == good || first % 2 == 0, "a changed file was loaded");
            let unit_bytes = disk.unit().bytes();
            let mut found = vec![0; unit_bytes];
            for at in (0..disk.disk_bytes().min(DISK_BYTES_MAX)).step_by(unit_bytes) {
                disk.read(0, at, &mut found).expect("what was loaded can be read");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A file with other bytes at some places: three bytes for each, or fewer bytes.
fn changed(good: &[u8], script: &[u8]) -> Vec<u8> {
    let mut file = good.to_vec();
    for change in script.chunks_exact(3) {
        let at = usize::from(u16::from_be_bytes([change[0], change[1]])) % file.len();
        match change[2] {
            0 => file.truncate(at.max(1)),
            by => file[at] ^= by,
        }
    }
    file
}

/// A small disk that has everything.
fn good_file() -> Vec<u8> {
    let disk =
        empty(&["lz4", "zstd,level=2"].map(|name| name.parse().expect("a name")), 0, 64 << 12);
    for (at, contents) in [(0, bytes(1, 4096)), (3, bytes(2, 64).repeat(64)), (9, vec![0x55; 4096])]
    {
        disk.write(0, at << 12, &contents).expect("there is memory");
    }
    let mut file = Vec::new();
    disk.save(0, b"notes", &mut file).expect("a vector takes everything");
    file
}

fn empty(algorithms: &[Params], order: u8, disk_bytes: u64) -> Zram<Arc<World>> {
    let codec = |params: &Params| Zcomp::new(params.clone(), unit(order), 1).expect("streams");
    let secret = bytes(42, Key::BYTES).try_into().expect("as many bytes");
    let codecs = algorithms.iter().map(codec).collect();
    Zram::new(codecs, World::new(), Key::new(secret), disk_bytes, 1).expect("a good size")
}

/// The disk of a file.
///
/// # Errors
///
/// Why there is none.
pub(super) fn load(file: &[u8]) -> Result<Zram<Arc<World>>, LoadError> {
    let mut reader = Reader::open(file)?;
    let header = reader.header().clone();
    let codec = |params: &Params| Zcomp::new(params.clone(), header.unit, 1);
    let codecs: Result<Vec<_>, _> = header.algorithms.iter().map(codec).collect();
    // Parameters that can be read and are not accepted with this unit: whoever makes the codecs refuses them.
    let Ok(codecs) = codecs else { return Err(LoadError::NoMemory) };
    let disk = Zram::new(codecs, World::new(), header.key, header.disk_bytes, 1);
    let disk = disk.expect("the reader has looked at the size");
    disk.load_saved(0, &mut reader)?;
    Ok(disk)
}
