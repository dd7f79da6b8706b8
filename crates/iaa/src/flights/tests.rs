//! How jobs are waited for.

use std::sync::Arc;

use super::Flights;
use crate::completion::{Kind, Slots};
use crate::driver::{Driver, WorkQueue};
use crate::failure::Failure;
use crate::model::{Faults, Model, Setup};
use crate::settings::Settings;

const UNIT: [u8; 4096] = [0; 4096];

/// Polls that a wait counts as.
const POLLS: u32 = 71;

/// So many jobs, begun at a device that does one at each step.
fn begun(jobs: usize, depth: u32) -> (Flights, Model) {
    begun_at(Settings::default(), Faults::default(), jobs, depth)
}

fn begun_at(settings: Settings, faults: Faults, jobs: usize, depth: u32) -> (Flights, Model) {
    let device = Model::new(Setup { is_stepped: true, faults, ..Setup::default() });
    let driver = Arc::new(Driver::new(settings, vec![0]));
    let portal = Box::new(device.clone());
    let queue = WorkQueue { name: "wq1.0".to_owned(), device: 1, package: 0, depth, portal };
    driver.add([queue]).unwrap();
    let mut flights = Flights::new(&driver, Slots::new(UNIT.len()).unwrap());
    flights.count_a_pause_as(POLLS);
    flights.begin_batch();
    (0..jobs).for_each(|job| flights.begin(job, Kind::Fixed, &UNIT, UNIT.len()).unwrap());
    (flights, device)
}

fn polls(flights: &Flights) -> Vec<u32> {
    flights.flights.iter().flatten().map(|flight| flight.polls).collect()
}

/// Goal: a wait counts for all jobs that waited, and for none if the record came before it was over.
#[test]
fn a_wait_counts_unless_the_record_came() {
    let (mut flights, device) = begun(3, 128);
    flights.pause();
    assert_eq!(polls(&flights), [POLLS - 1; 3]);
    assert!(device.step());
    flights.pause();
    assert_eq!(polls(&flights), [POLLS - 1; 3], "the record of the first job was there");
    assert!(matches!(flights.poll(0), Some(Ok(_))));
    flights.end(0, &mut []);
    flights.pause();
    assert_eq!(polls(&flights), [2 * (POLLS - 1); 2], "the second job is the first one now");
    while device.step() {}
    for job in [1, 2] {
        assert!(matches!(flights.poll(job), Some(Ok(_))));
        flights.end(job, &mut []);
    }
    flights.pause();
    assert_eq!(polls(&flights), [0; 0], "nothing is under way");
}

/// Goal: while a job waits for room nothing is waited for long, since room may come at any time.
#[test]
fn room_is_asked_for_without_a_wait() {
    let (mut flights, device) = begun(3, 2);
    flights.pause();
    assert_eq!(polls(&flights), [0; 3]);
    assert!(device.step());
    assert!(matches!(flights.poll(0), Some(Ok(_))));
    flights.end(0, &mut []);
    assert!(flights.poll(2).is_none(), "it is at the device now");
    flights.pause();
    assert_eq!(polls(&flights), [POLLS - 1; 2]);
    while device.step() {}
    for job in [1, 2] {
        assert!(matches!(flights.poll(job), Some(Ok(_))));
        flights.end(job, &mut []);
    }
}

/// Goal: a device that answers with a page fault at the last moment, each time, holds a job up no longer than one that
/// never answers.
#[test]
fn a_job_has_its_polls_once_however_often_pages_are_missing() {
    let settings = Settings { polls_max: 50, ..Settings::default() };
    let faults = Faults { page: u16::MAX, ..Faults::default() };
    let (mut flights, device) = begun_at(settings, faults, 1, 128);
    let mut polled = 0;
    let failure = loop {
        // Each record comes when half of the polls are over; the first one of them is in time.
        if polled % 25 == 24 {
            assert!(device.step());
        }
        polled += 1;
        if let Some(Err(failure)) = flights.poll(0) {
            break failure;
        }
        assert!(polled < 1000, "it goes on and on");
    };
    assert_eq!(failure, Failure::Timeout);
    assert!((50..=52).contains(&polled), "{polled}");
    assert!(device.counts().faults[0] > 0, "a page was missing");
}
