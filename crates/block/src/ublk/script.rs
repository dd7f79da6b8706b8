//! Plays a kernel that asks for anything, and checks each answer against a naive disk. For tests and the fuzz target.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use zfolio_sys::Errno;
use zfolio_sys::ublk::{Event, IoDescriptor, flag, operation};

use super::kernel::Queue;
use super::worker;
use crate::device::{Device as _, Error, SECTOR_BYTES};
use crate::testing::Memory;

/// The bytes of disks.
const DISKS: [u64; 3] = [64 << 10, 1 << 20, 3 << 20];

const DEPTH: u16 = 4;
const BUFFER_BYTES: usize = 64 << 10;

/// Plays a script: its first byte chooses the disk.
///
/// # Panics
///
/// When something breaks a rule that holds whatever the kernel asks for.
pub fn play(script: &[u8]) {
    let Some((chosen, requests)) = script.split_first() else { return };
    play_requests(*chosen, requests);
}

/// The same. Returns how many requests were carried out.
pub(super) fn play_requests(chosen: u8, script: &[u8]) -> usize {
    let bytes = DISKS[usize::from(chosen % 3)];
    let disk = Memory::new(bytes).preferring(512 << (chosen % 7));
    let disk = if chosen & 32 != 0 { disk.read_only() } else { disk };
    if chosen & 64 != 0 {
        disk.break_from(bytes / 2, Error::NoSpace);
    }
    let disk = Arc::new(disk);
    let mut queue = Scripted::new(script, &disk);
    worker::run(&mut queue, &*disk).expect("a script has no broken ring");
    assert_eq!(queue.asked, queue.answered, "UB-3: one answer for each");
    assert_eq!(disk.flushes.load(Relaxed), queue.flushes, "flushes");
    // The whole disk, as it is if nobody breaks it.
    disk.broken_from.store(u64::MAX, Relaxed);
    let mut contents = vec![0; queue.model.len()];
    disk.read(0, &mut contents).expect("the disk still reads");
    assert!(contents == queue.model, "contents");
    queue.done
}

/// Who has a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tag {
    /// It can have a request.
    Fetched,
    /// The server was told of its request.
    Asked,
    /// It has ended.
    Gone,
}

/// A queue whose requests come from a script.
struct Scripted {
    script: VecDeque<u8>,
    disk: Arc<Memory>,
    model: Vec<u8>,
    tags: Vec<Tag>,
    descriptors: Vec<IoDescriptor>,
    buffers: Vec<Vec<u8>>,
    events: VecDeque<Event>,
    /// Committed, and to be answered as not taken; with the result that has to come again.
    untaken: Vec<Option<i32>>,
    asked: usize,
    answered: usize,
    done: usize,
    flushes: u64,
}

impl Scripted {
    fn new(script: &[u8], disk: &Arc<Memory>) -> Scripted {
        let count = usize::from(DEPTH);
        Scripted {
            script: script.iter().copied().collect(),
            disk: Arc::clone(disk),
            model: vec![0; usize::try_from(disk.size_bytes()).expect("a few MiB")],
            tags: vec![Tag::Fetched; count],
            descriptors: vec![IoDescriptor::default(); count],
            buffers: vec![vec![0xA5; BUFFER_BYTES]; count],
            events: VecDeque::new(),
            untaken: vec![None; count],
            asked: 0,
            answered: 0,
            done: 0,
            flushes: 0,
        }
    }

    /// The next byte; 0 at the end.
    fn byte(&mut self) -> u8 {
        self.script.pop_front().unwrap_or(0)
    }

    fn number(&mut self) -> u32 {
        u32::from(self.byte()) << 8 | u32::from(self.byte())
    }

    /// A request: mostly one that a kernel asks for.
    fn descriptor(&mut self) -> IoDescriptor {
        let kind = self.byte();
        let known = [0, 1, 1, 2, 3, 5];
        let operation = if kind < 240 { known[usize::from(kind % 6)] } else { self.byte() };
        let flags = match self.byte() {
            0..=159 => 0,
            160..=199 => flag::FUA,
            200..=239 => flag::NO_UNMAP | 1 << 8,
            240..=249 => flag::FUA | flag::NO_UNMAP | 1 << 16,
            shift => 1 << (17 + (255 - shift)),
        };
        let sectors = match self.byte() {
            0..=199 => self.number() % 129,
            200..=239 => self.number(),
            _ => self.number() << 16 | self.number(),
        };
        let sector = match self.byte() {
            0..=229 => u64::from(self.number() % 6200),
            230..=244 => u64::from(self.number()) << 48,
            _ => u64::MAX - u64::from(self.number()),
        };
        IoDescriptor { op_flags: u32::from(operation) | flags, sectors, sector, address: 0 }
    }

    /// Asks for something with a tag.
    fn ask(&mut self, tag: u16) {
        let index = usize::from(tag);
        let descriptor = self.descriptor();
        let (first, step) = (self.byte(), self.byte() | 1);
        let mut byte = first;
        self.buffers[index].fill_with(|| {
            byte = byte.wrapping_mul(5).wrapping_add(step);
            byte
        });
        self.descriptors[index] = descriptor;
        self.tags[index] = Tag::Asked;
        self.asked += 1;
        self.events.push_back(Event::Request(tag));
    }

    /// What has to be answered, from the bytes of the descriptor alone; carries it out on the model. `data` is the
    /// buffer as it is at the end.
    fn expected(&mut self, index: usize) -> Option<i32> {
        let descriptor = self.descriptors[index];
        let kind = u8::try_from(descriptor.op_flags & 255).expect("a byte");
        if descriptor.op_flags & (7 << 17) != 0 {
            return None;
        }
        let durable = u64::from(descriptor.op_flags >> 13 & 1);
        if kind == operation::FLUSH {
            self.flushes += 1;
            return Some(0);
        }
        let length = u128::from(descriptor.sectors) * u128::from(SECTOR_BYTES);
        let at = u128::from(descriptor.sector) * u128::from(SECTOR_BYTES);
        let end = at + length;
        let is_data = kind == operation::READ || kind == operation::WRITE;
        let is_known = is_data || kind == operation::DISCARD || kind == operation::WRITE_ZEROES;
        let is_refused = kind != operation::READ && self.disk.is_read_only()
            || !is_known
            || length == 0
            || end > self.model.len() as u128
            || is_data && length > BUFFER_BYTES as u128
            || end > u128::from(self.disk.broken_from.load(Relaxed));
        if is_refused {
            return None;
        }
        let place = |number: u128| usize::try_from(number).expect("on the disk");
        let (range, length) = (place(at)..place(end), place(length));
        let data = &self.buffers[index][..length.min(BUFFER_BYTES)];
        match kind {
            operation::READ => assert!(data == &self.model[range], "UB-3: contents that are read"),
            operation::WRITE => self.model[range].copy_from_slice(data),
            _ => self.model[range].fill(0),
        }
        if kind == operation::WRITE || kind == operation::WRITE_ZEROES {
            self.flushes += durable;
        }
        Some(if is_data { i32::try_from(length).expect("64 KiB") } else { 0 })
    }
}

impl Queue for Scripted {
    fn depth(&self) -> u16 {
        DEPTH
    }

    fn fetch(&mut self) -> Result<(), Errno> {
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Errno> {
        assert!(self.events.is_empty(), "all events are looked at");
        let fetched: Vec<u16> =
            (0..DEPTH).filter(|tag| self.tags[usize::from(*tag)] == Tag::Fetched).collect();
        for tag in fetched {
            let index = usize::from(tag);
            if self.untaken[index].is_some() {
                let errors = [Errno::AGAIN, Errno::NOMEM, Errno::INTR];
                self.events.push_back(Event::Failed(tag, errors[index % 3]));
            } else if self.script.is_empty() {
                self.tags[index] = Tag::Gone;
                self.events.push_back(Event::Failed(tag, Errno::NODEV));
            } else {
                match self.byte() {
                    // A signal, or a request of another tag: nothing of this one.
                    0..=19 => {}
                    20 => {
                        self.tags[index] = Tag::Gone;
                        self.events.push_back(Event::Failed(tag, Errno::NODEV));
                    }
                    _ => self.ask(tag),
                }
            }
        }
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn request(&mut self, tag: u16) -> (IoDescriptor, &mut [u8]) {
        let index = usize::from(tag);
        assert_eq!(self.tags[index], Tag::Asked, "UC-1: the kernel has tag {tag}");
        (self.descriptors[index], &mut self.buffers[index])
    }

    fn commit(&mut self, tag: u16, result: i32) {
        let index = usize::from(tag);
        if let Some(before) = self.untaken[index].take() {
            assert_eq!(result, before, "the same answer again");
            return;
        }
        assert_eq!(self.tags[index], Tag::Asked, "UB-3: tag {tag} is answered twice");
        self.tags[index] = Tag::Fetched;
        self.answered += 1;
        let expected = self.expected(index);
        match expected {
            Some(expected) => assert_eq!(result, expected, "{:?}", self.descriptors[index]),
            None => assert!(result < 0, "UB-2: {result} for {:?}", self.descriptors[index]),
        }
        self.done += usize::from(expected.is_some());
        if self.byte() > 250 {
            self.untaken[index] = Some(result);
        }
    }
}
