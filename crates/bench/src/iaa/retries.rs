//! How many cores one device bears: from how many on a queue is full now and then, and jobs are given up.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::simulation::{CONSTANTS, Constants, Machine, simulate};
use super::usemem::scaled;
use super::{IaaArgs, Table, machine, push};

/// Cores are tried up to this number.
const CORES_MAX: usize = 128;

/// With so many cores on one device a queue is full for the first time, and a job is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    full: Option<usize>,
    given_up: Option<usize>,
}

/// Looks from one core upwards. `base` says how the cores work.
fn bounds(base: &Machine, constants: Constants) -> Bounds {
    let mut found = Bounds { full: None, given_up: None };
    for cores in 1..=CORES_MAX {
        let mut one = Machine { devices: 1, busy_cores: cores, cores, ..base.clone() };
        one.folios = one.folios.min(20);
        let outcome = simulate(&one, constants);
        found.full = found.full.or((outcome.retries > 0).then_some(cores));
        found.given_up = found.given_up.or((outcome.given_up > 0).then_some(cores));
        if found.full.is_some() && found.given_up.is_some() {
            break;
        }
    }
    found
}

/// An assumption, and how it is changed.
type Assumption = (&'static str, fn(&mut Machine, &mut Constants));

const ASSUMPTIONS: [Assumption; 17] = [
    ("as assumed: batches of 8, no other work", |_, _| {}),
    ("submit 20 % shorter", |_, it| it.submit_ns = scaled(it.submit_ns, 0.8)),
    ("submit 20 % longer", |_, it| it.submit_ns = scaled(it.submit_ns, 1.2)),
    ("port 20 % shorter", |_, it| it.port_ns = scaled(it.port_ns, 0.8)),
    ("port 20 % longer", |_, it| it.port_ns = scaled(it.port_ns, 1.2)),
    ("latency 20 % shorter", |_, it| it.latency_ns = scaled(it.latency_ns, 0.8)),
    ("latency 20 % longer", |_, it| it.latency_ns = scaled(it.latency_ns, 1.2)),
    ("a try half as long", |_, it| it.try_ns /= 2),
    ("a try twice as long", |_, it| it.try_ns *= 2),
    ("64 entries", |it, _| it.entries = 64),
    ("256 entries", |it, _| it.entries = 256),
    ("batches of 4", |it, _| it.batch = 4),
    ("page by page", |it, _| it.batch = 1),
    ("other work of 5 us a page", |it, _| it.work_ns = work(it, 5_000)),
    ("other work of 14 us a page", |it, _| it.work_ns = work(it, 14_000)),
    ("other work of 25 us a page", |it, _| it.work_ns = work(it, 25_000)),
    ("two queues, one for compression", |it, _| {
        it.queues = 2;
        it.settings.comp_wqs_per_iaa = 1;
    }),
];

fn work(machine: &Machine, ns_page: u64) -> u64 {
    ns_page * machine.folio_pages as u64
}

/// The bounds, by what is assumed.
pub(super) fn retries(args: &IaaArgs) -> Table {
    let text = format!(
        "\nprediction: cores on one device, folios of {} KiB: the first retry, the first job given up\n\
         (published: jobs given up typically with 30 cores and more)\n",
        args.folio / 1024,
    );
    let mut table = Table { name: "retries", text, json: json!([]) };
    for (name, change) in ASSUMPTIONS {
        let mut one = Machine { queues: 1, ..machine(args) };
        let mut constants = CONSTANTS;
        change(&mut one, &mut constants);
        let Bounds { full, given_up } = bounds(&one, constants);
        let show =
            |cores: Option<usize>| cores.map_or(format!("> {CORES_MAX}"), |it| it.to_string());
        writeln!(table.text, "  {name:<42}{:>6}{:>7}", show(full), show(given_up))
            .expect("a string grows");
        let row: Value =
            json!({ "assumption": name, "first_retry": full, "first_given_up": given_up });
        push(&mut table.json, row);
    }
    table
}
