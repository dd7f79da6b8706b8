//! The memory that the device works on: buffers and completion records of one stream.
//!
//! A **slot** is a record, a source buffer and a destination buffer. Units are copied in and results are copied out, so
//! the device never sees memory of anybody else: not that of a program, whose pages may be away (a missing page of a
//! managed program would wait for the very engine that waits for the device), and none that may be freed. Therefore a
//! job that timed out is no danger: its slot is left to the device.
//!
//! # Invariants
//!
//! - `SLOT-1` While a slot is at the device, from an accepted descriptor to the status of its record, nobody else
//!   accesses its buffers, or of its record more than the status. In a child of `fork` no slot is at the device: a
//!   descriptor names the memory of the process that submitted it.
//! - `SLOT-2` The memory lasts as long as the device may access it: if a slot is at the device when the stream ends, or
//!   when it gets other memory ([`Slots::renew`]), its memory is leaked; that of the slots which were made together is
//!   leaked as one.
//! - `SLOT-3` Slots do not overlap; a slot's buffers have `buffer_bytes` each, whole pages.

use std::sync::atomic::{AtomicU8, Ordering};

use zfolio_core::zcomp::BATCH_MAX;
use zfolio_sys::map::{PAGE_BYTES, Reservation};
use zfolio_sys::{Errno, lineage};

use crate::layout::{AECS_BYTES, Descriptor, FIXED, Record};
use crate::layout::{compress, decompress, flag, opcode};
use crate::portal::hardware::Pause;
use crate::portal::{Portal, Submitted};

/// Slots of a stream: one for each job of a batch.
pub(crate) const SLOTS: usize = BATCH_MAX;

/// The records come first, in a page of their own.
const RECORDS_BYTES: usize = PAGE_BYTES;

const _: () = assert!(SLOTS * size_of::<Record>() <= RECORDS_BYTES && SLOTS <= 8);

/// What the device is to do with a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Compress source to destination, with fixed codes.
    Fixed,
    /// Compress source to destination, with codes made for it.
    OnePass,
    /// Decompress source to destination.
    Decompress,
    /// Decompress the destination to nothing: only the checksum is of interest.
    Verify,
}

/// The slots of a stream.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Of the slots that were not renewed. Always there, but while it is dropped.
    memory: Option<Reservation>,
    /// The memory of each slot that was.
    renewed: [Option<Reservation>; SLOTS],
    /// Whether a device may still access the place that a slot had in `memory` before it was renewed.
    is_left: bool,
    buffer_bytes: usize,
    /// A bit for each slot that is at the device.
    at_device: u8,
    /// The process whose slots they are.
    process: u64,
    /// A bit for each slot that was used before, whose pages are there.
    touched: u8,
}

impl Slots {
    /// Slots for units of at most `unit_bytes`.
    pub(crate) fn new(unit_bytes: usize) -> Result<Slots, Errno> {
        let buffer_bytes = unit_bytes.next_multiple_of(PAGE_BYTES);
        let memory = Reservation::new(RECORDS_BYTES + 2 * SLOTS * buffer_bytes, PAGE_BYTES)?;
        let process = lineage::current();
        Ok(Slots {
            memory: Some(memory),
            renewed: Default::default(),
            is_left: false,
            buffer_bytes,
            at_device: 0,
            process,
            touched: 0,
        })
    }

    /// Gives a slot that is at a device other memory, with which it is ours. The old one is left to the device for good
    /// (SLOT-2).
    ///
    /// # Errors
    ///
    /// There is no memory: the slot is at the device as before.
    pub(crate) fn renew(&mut self, slot: usize) -> Result<(), Errno> {
        debug_assert!(self.is_at_device(slot));
        let new = Reservation::new(RECORDS_BYTES + 2 * self.buffer_bytes, PAGE_BYTES)?;
        match self.renewed[slot].replace(new) {
            Some(old) => _ = old.leak(),
            None => self.is_left = true,
        }
        self.at_device &= !(1 << slot);
        self.touched &= !(1 << slot);
        Ok(())
    }

    /// Whether these are a copy of another process's slots, made by `fork`. From now on they are this process's own,
    /// and none is at a device (SLOT-1).
    pub(crate) fn disinherit(&mut self) -> bool {
        let process = lineage::current();
        let is_copy = process != self.process;
        if is_copy {
            (self.process, self.at_device, self.is_left) = (process, 0, false);
        }
        is_copy
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory().bytes() + self.renewed.iter().flatten().map(Reservation::bytes).sum::<usize>()
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    fn memory(&self) -> &Reservation {
        self.memory.as_ref().expect("it is taken in drop only")
    }

    fn is_at_device(&self, slot: usize) -> bool {
        self.at_device >> slot & 1 == 1
    }

    /// How many slots are at a device: if the stream ends now their memory is leaked (SLOT-2).
    pub(crate) fn at_devices(&self) -> usize {
        (0..SLOTS).filter(|slot| self.is_at_device(*slot)).count()
    }

    fn assert_ours(&self, slot: usize) {
        assert!(slot < SLOTS && !self.is_at_device(slot), "SLOT-1: slot {slot} is at the device");
    }

    /// The memory that a slot is in, and its place among the slots there.
    fn place(&self, slot: usize) -> (&Reservation, usize) {
        self.renewed[slot].as_ref().map_or_else(|| (self.memory(), slot), |own| (own, 0))
    }

    fn record(&self, slot: usize) -> *mut Record {
        let (memory, place) = self.place(slot);
        // SAFETY: `SLOTS` records fit into the first page (asserted above).
        unsafe { memory.base().as_ptr().cast::<Record>().add(place) }
    }

    /// The buffers of a slot: source and destination.
    fn buffers(&self, slot: usize) -> [*mut u8; 2] {
        let (memory, place) = self.place(slot);
        [0, 1].map(|which| {
            let at = RECORDS_BYTES + (2 * place + which) * self.buffer_bytes;
            // SAFETY: the memory has `RECORDS_BYTES + 2 * SLOTS * buffer_bytes`, or those for one slot, which is the
            // first there; so it is inside.
            unsafe { memory.base().as_ptr().add(at) }
        })
    }

    /// The status byte of a record, which device and driver share.
    fn status(&self, slot: usize) -> &AtomicU8 {
        // SAFETY: the record is inside of the memory.
        let status = unsafe { &raw mut (*self.record(slot)).status };
        // SAFETY: a mapped byte, alive as long as `self`; driver and model access it by atomic operations only, and
        // the device writes it in one step.
        unsafe { AtomicU8::from_ptr(status) }
    }

    /// Copies `source` to the slot.
    pub(crate) fn fill(&mut self, slot: usize, source: &[u8]) {
        self.assert_ours(slot);
        assert!(source.len() <= self.buffer_bytes, "SLOT-3");
        let [to, dest] = self.buffers(slot);
        if self.touched >> slot & 1 == 0 {
            self.touched |= 1 << slot;
            for page in (0..self.buffer_bytes).step_by(PAGE_BYTES) {
                // SAFETY: inside of the slot's destination (SLOT-3).
                let byte = unsafe { dest.add(page) };
                // SAFETY: it is mapped, and ours (asserted above).
                unsafe { byte.write_volatile(0) };
            }
        }
        // SAFETY: there is room (asserted above); the buffer is ours (SLOT-1) and nobody has a reference into it.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len()) };
    }

    /// Copies the beginning of the slot's destination to `dest`.
    pub(crate) fn take(&self, slot: usize, dest: &mut [u8]) {
        self.assert_ours(slot);
        assert!(dest.len() <= self.buffer_bytes, "SLOT-3");
        let [_, from] = self.buffers(slot);
        // SAFETY: so many bytes are there (asserted above), and the buffer is ours (SLOT-1). A device that breaks its
        // specification and still writes there can only change what is copied, once; the copy is what is checked.
        unsafe { std::ptr::copy_nonoverlapping(from, dest.as_mut_ptr(), dest.len()) };
    }

    /// Hands a slot to a device.
    pub(crate) fn launch(
        &mut self,
        slot: usize,
        kind: Kind,
        [source_bytes, dest_bytes]: [usize; 2],
        portal: &dyn Portal,
    ) -> Submitted {
        self.assert_ours(slot);
        assert!(source_bytes.max(dest_bytes) <= self.buffer_bytes, "SLOT-3");
        let descriptor = self.descriptor(slot, kind, [source_bytes, dest_bytes]);
        // Relaxed: the device learns of the slot by the descriptor.
        self.status(slot).store(0, Ordering::Relaxed);
        // SAFETY: the descriptor names the slot, whose bytes nobody accesses from now on (SLOT-1) and which is never
        // freed before the device has answered (SLOT-2), and `FIXED`, a static.
        let submitted = unsafe { portal.submit(&descriptor) };
        if submitted == Submitted::Accepted {
            self.at_device |= 1 << slot;
        }
        submitted
    }

    fn descriptor(&self, slot: usize, kind: Kind, lengths: [usize; 2]) -> Descriptor {
        let mut ends = self.buffers(slot).map(|buffer| buffer.expose_provenance() as u64);
        if kind == Kind::Verify {
            ends.reverse();
        }
        let [source_bytes, dest_bytes_max] =
            lengths.map(|bytes| u32::try_from(bytes).expect("a unit has 2 MiB at most"));
        let (opcode, codec_flags) = match kind {
            Kind::Fixed => (opcode::COMPRESS, compress::FLUSH_OUTPUT | compress::APPEND_END),
            Kind::OnePass => {
                let ends = compress::FLUSH_OUTPUT | compress::APPEND_END;
                (opcode::COMPRESS, ends | compress::ONE_PASS_LAST)
            }
            Kind::Decompress => (opcode::DECOMPRESS, DECOMPRESS),
            Kind::Verify => (opcode::DECOMPRESS, DECOMPRESS | decompress::SUPPRESS_OUTPUT),
        };
        let mut flags = flag::RECORD_VALID | flag::RECORD_WANTED | flag::CACHE;
        let (mut aecs, mut aecs_bytes) = (0, 0);
        if kind == Kind::Fixed {
            flags |= flag::READ_AECS;
            aecs = (&raw const FIXED).expose_provenance() as u64;
            aecs_bytes = AECS_BYTES;
        }
        Descriptor {
            flags_opcode: u32::from(opcode) << 24 | flags,
            record: self.record(slot).expose_provenance() as u64,
            source: ends[0],
            dest: ends[1],
            source_bytes,
            codec_flags,
            aecs,
            dest_bytes_max,
            aecs_bytes,
            ..Descriptor::default()
        }
    }

    /// The record of a slot that is at the device, once it has a status. Then the slot is ours again.
    pub(crate) fn poll(&mut self, slot: usize) -> Option<Record> {
        debug_assert!(self.is_at_device(slot));
        // Acquire: pairs with the device's write of the status, its last; in the model with the Release of
        // `memory::complete`.
        if self.status(slot).load(Ordering::Acquire) == 0 {
            return None;
        }
        self.at_device &= !(1 << slot);
        // SAFETY: the record is inside of the memory, any bytes are one, and the device has written the last of them.
        // Volatile: if a device that breaks its specification writes on, what was read is read once.
        Some(unsafe { self.record(slot).read_volatile() })
    }

    /// Makes the page at `address` present; false if it is no page of the slot, or of what a job of it reads.
    pub(crate) fn touch(&mut self, slot: usize, address: u64) -> bool {
        self.assert_ours(slot);
        let Ok(address) = usize::try_from(address) else { return false };
        let [source, _] = self.buffers(slot);
        if let Some(offset) = address.checked_sub(source.addr()) {
            if offset < 2 * self.buffer_bytes {
                // SAFETY: inside of the slot's two buffers, which follow each other.
                let byte = unsafe { source.add(offset) };
                // SAFETY: the buffers are mapped, and ours (SLOT-1).
                let value = unsafe { byte.read_volatile() };
                // SAFETY: the same.
                unsafe { byte.write_volatile(value) };
                return true;
            }
        }
        let codes = &raw const FIXED;
        let begin = codes.addr();
        let is_of_codes =
            (begin & !(PAGE_BYTES - 1)..begin + size_of_val(&FIXED)).contains(&address);
        if is_of_codes {
            // The codes may lie in two pages: the first byte of theirs in the one that is missing.
            let byte = codes.cast::<u8>().wrapping_add(address.saturating_sub(begin));
            // SAFETY: inside of the static, whose bytes are all initialised.
            unsafe { byte.read_volatile() };
        }
        is_of_codes
    }

    /// Waits a moment for a slot's record; whether it has come.
    pub(crate) fn pause(&self, slot: usize, pause: Pause) -> bool {
        let status = self.status(slot);
        pause.wait(status);
        // Relaxed: whoever uses the record polls it first.
        status.load(Ordering::Relaxed) != 0
    }
}

/// All of a stream, whose last block says that it is.
const DECOMPRESS: u16 = decompress::ENABLE
    | decompress::FLUSH_OUTPUT
    | decompress::STOP_AND_CHECK
    | decompress::LAST_BLOCK;

impl Drop for Slots {
    fn drop(&mut self) {
        // SLOT-2.
        for slot in (0..SLOTS).filter(|slot| self.at_device >> slot & 1 == 1) {
            match self.renewed[slot].take() {
                Some(own) => _ = own.leak(),
                None => self.is_left = true,
            }
        }
        if self.is_left {
            self.memory.take().map(Reservation::leak);
        }
    }
}
