//! Back: what is wanted is read, opened, and reported.

use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;

use super::super::disk::{self, Direction, SLOT_BYTES, Transfer};
use super::super::location::Place;
use super::super::read::{Read, Wanted};
use super::{Area, Areas, READ};
use crate::stats::add;
use crate::store::backing::{Completed, Completion, Failure, Location, Token};

impl Areas {
    /// Notes that an object is wanted.
    pub(super) fn want(
        &self,
        token: Token,
        location: Location,
        length: usize,
    ) -> Result<(), Failure> {
        assert!((1..=self.object_bytes_max).contains(&length), "{length} bytes");
        let place = Place::of(location);
        let wanted = Wanted { token, place, length, is_again: false, was_damaged: false };
        if self.inner.lock().queue.push(wanted) {
            return Ok(());
        }
        add(&self.counters.refused_busy, 1);
        Err(Failure::Transient)
    }

    /// Makes transfers of what is wanted, as long as there are buffers.
    pub(super) fn start_reads(&self) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.queue.end_batch();
        loop {
            let free = inner.free_reads.iter().map(|index| inner.reads[*index].capacity());
            let Some(largest) = free.max() else { break };
            let area = |id| self.area(id).expect("an area with objects is not closed");
            let stretch_of = |id| area(id).stretch_slots;
            let next = inner.queue.next(largest, stretch_of, &mut inner.batch);
            let Some((from, count)) = next else { break };
            let index = inner.take_read(count);
            let read = &mut inner.reads[index];
            read.requests.append(&mut inner.batch);
            let area = area(from.area);
            let transfer = Transfer {
                token: READ | index as u64,
                direction: Direction::Read,
                first: u64::from(from.slot),
                count,
                buffer: read.begin(Arc::clone(&area), from.slot),
                result: Ok(()),
            };
            area.in_flight.fetch_add(1, AcqRel);
            inner.waiting.push_back((area, transfer));
        }
    }

    /// Slots were read, or not: the objects in them are reported, or are wanted again.
    pub(super) fn read(
        &self,
        area: &Arc<Area>,
        index: usize,
        mut transfer: Transfer,
        scratch: &mut [u8],
        each: &mut dyn FnMut(Completion<'_>),
    ) {
        let mut read = std::mem::take(&mut self.inner.lock().reads[index]);
        let requests = std::mem::take(&mut read.requests);
        add(&self.counters.reads, 1);
        match transfer.result {
            Ok(()) => add(&self.counters.bytes_read, (transfer.count * SLOT_BYTES) as u64),
            Err(error) => self.counters.failed(error),
        }
        for wanted in &requests {
            let result = match transfer.result {
                Ok(()) => {
                    let slots = transfer.buffer.slots_mut();
                    match read.object(wanted, slots, scratch) {
                        Ok(bytes) => Ok(Completed::Read(bytes)),
                        Err(_) if !wanted.was_damaged => {
                            self.want_again(Wanted { was_damaged: true, ..*wanted });
                            continue;
                        }
                        Err(_) => Err(Failure::Final),
                    }
                }
                Err(disk::Error::Failed { .. }) if requests.len() > 1 => {
                    self.want_again(*wanted);
                    continue;
                }
                // The file is shorter than it was: it does not grow back. A medium that fails may be good again.
                Err(disk::Error::Failed { errno: 0 }) => Err(Failure::Final),
                Err(_) => Err(Failure::Transient),
            };
            each(Completion { token: wanted.token, result });
        }
        add(&self.counters.tampered, read.tampered() as u64);
        read.requests = requests;
        read.reset(transfer.buffer);
        let mut inner = self.inner.lock();
        inner.reads[index] = read;
        inner.free_reads.push(index);
        area.in_flight.fetch_sub(1, AcqRel);
    }

    /// The object is to be read again, alone.
    fn want_again(&self, wanted: Wanted) {
        add(&self.counters.reads_again, 1);
        let has_room = self.inner.lock().queue.push(Wanted { is_again: true, ..wanted });
        assert!(has_room, "there is room for all that come back");
    }
}

impl super::Inner {
    /// The smallest free read that has room for `count` slots and the requests of the batch.
    fn take_read(&mut self, count: usize) -> usize {
        let requests = self.batch.len();
        let has_room =
            |read: &Read| read.capacity() >= count && read.requests.capacity() >= requests;
        let free = self.free_reads.iter().enumerate();
        let fitting = free.filter(|(_, index)| has_room(&self.reads[**index]));
        let smallest = fitting.min_by_key(|(_, index)| self.reads[**index].capacity());
        let at = smallest.map(|(at, _)| at).expect("next() kept to the largest");
        self.free_reads.swap_remove(at)
    }
}
