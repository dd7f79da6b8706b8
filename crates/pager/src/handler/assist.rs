//! Assistants: threads that serve faults beside the handler.
//!
//! ```text
//! handler     reads messages; while two are left beside the fault that it serves: call()
//! assistant   takes a fault out of the inbox, serves it, and looks for the next; sleeps if there is none
//! ```
//!
//! An assistant serves as the handler does, and compresses to make room as the handler does at the hard limit. What is
//! the handler's alone: messages are read, changes of mappings applied, and faults that wait for the backing tried
//! again. An assistant serves nothing while a change waits (`EVT-4`), and sends what it wants of the backing.
//!
//! No fault is lost if a call is missed: the handler serves whatever is in the inbox.

use std::sync::atomic::Ordering::Relaxed;

use zfolio_core::stats::add;
use zfolio_sys::thread;
use zfolio_sys::uffd::Message;

use crate::bell::Bell;
use crate::engine::Engine;
use crate::fault::Turn;

/// The most assistants.
const ASSISTANTS_MAX: usize = 7;

/// How many assistants a process with so many CPUs has. With two CPUs a second thread that serves faults makes them
/// slower, since it takes the CPU of the program or of the reclaiming thread (docs/design/pager.md, "One handler").
fn count(cpus: usize) -> usize {
    (cpus / 2).saturating_sub(1)
}

/// An assistant is called when so many faults wait beside the one that the handler serves. To wake it takes about as
/// long as to serve one, which the handler does meanwhile.
const LEFT_MIN: usize = 2;

/// The bells of the assistants.
#[derive(Debug)]
pub(crate) struct Assistants(Box<[Bell]>);

impl Assistants {
    /// As many as are asked for, or as a process with so many CPUs has.
    pub(crate) fn new(asked: Option<usize>, cpus: usize) -> Assistants {
        let count = asked.unwrap_or_else(|| count(cpus)).min(ASSISTANTS_MAX);
        Assistants((0..count).map(|_| Bell::default()).collect())
    }

    /// So many faults wait: wakes an assistant that sleeps, if they are enough.
    pub(super) fn call(&self, left: usize) {
        if left >= LEFT_MIN {
            self.0.iter().find(|bell| bell.wake_sleeper());
        }
    }

    /// Wakes all of them.
    pub(crate) fn ring(&self) {
        self.0.iter().for_each(Bell::ring);
    }
}

impl Engine {
    /// How many threads are to be given to [`Engine::assist`], in handler mode.
    pub fn assistants(&self) -> usize {
        self.work.assistants.0.len()
    }

    /// The life of an assistant, until the engine stops.
    ///
    /// # Panics
    ///
    /// If there is no assistant of this number.
    pub fn assist(&self, number: usize) {
        let bell = &self.work.assistants.0[number];
        while !self.work.stopping.load(Relaxed) {
            let heard = bell.heard();
            // After that look at the bell: who changes the process's identity rings it.
            thread::follow();
            if self.assist_turn() {
                continue;
            }
            bell.will_sleep();
            if !self.assist_turn() && !self.work.stopping.load(Relaxed) {
                bell.sleep(heard, None);
            }
        }
    }

    /// Serves one fault. False: there is none, or the handler has to apply a change first.
    pub(crate) fn assist_turn(&self) -> bool {
        let inbox = &self.mover.inbox;
        let Some(table) = self.table.try_read() else { return false };
        if inbox.has_change() {
            return false;
        }
        // With the table, so that no thread forks while a fault is in no list.
        let Some(event) = inbox.take_in_hand() else { return false };
        if let Message::Fault { address, .. } = event.message {
            let (since, mut turn) = (self.now_ns(), Turn::new(event.at));
            if let Err(later) = self.serve(table, address, &mut turn) {
                self.put_aside_fault(event, later, since, turn);
                // What it wants of the backing is sent; the handler may be asleep.
                self.table.try_read().iter().for_each(|table| self.poll_backing(table));
            } else {
                add(&self.figures().faults_assisted, 1);
            }
        }
        inbox.let_go();
        true
    }
}
