//! `zfolio iaa list`: devices and queues, by the names of sysfs.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use zfolio_iaa::discover::{self, Device, Queue};
use zfolio_iaa::setup::NO_DEVICE;

use super::ListArgs;
use crate::failure::Failure;
use crate::output::print;
use crate::table::Table;

const HEADINGS: [&str; 12] = [
    "<DEVICE",
    "<QUEUE",
    "NODE",
    "PACKAGE",
    "<TYPE",
    "<MODE",
    "SIZE",
    "THRESHOLD",
    "<STATE",
    "CLIENTS",
    "<FILE",
    "<ACCESS",
];

/// Prints the devices and queues.
///
/// # Errors
///
/// The machine has no device.
pub(super) fn list(arguments: &ListArgs) -> Result<ExitCode, Failure> {
    let devices = discover::devices(&arguments.system.sysfs);
    if devices.is_empty() {
        return Err(Failure::machine(NO_DEVICE));
    }
    let dev = &arguments.system.dev;
    let text = if arguments.json {
        let all = devices.iter().map(|device| device_json(device, arguments, dev)).collect();
        Value::Array(all).to_string() + "\n"
    } else {
        rows(&devices, arguments, dev)
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn shown<'a>(device: &'a Device, arguments: &ListArgs) -> impl Iterator<Item = &'a Queue> {
    let all = arguments.all;
    device.queues.iter().filter(move |queue| all || queue.get("size") != Some("0"))
}

fn rows(devices: &[Device], arguments: &ListArgs, dev: &Path) -> String {
    let mut table = Table::new(&HEADINGS);
    let number = |number: Option<usize>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
    for device in devices {
        let place = || [number(device.node), number(device.package)];
        let mut queues = shown(device, arguments).peekable();
        if queues.peek().is_none() {
            let mut row = vec!["-".to_owned(); HEADINGS.len()];
            row[0].clone_from(&device.name);
            row[8].clone_from(&device.state);
            row[2..4].clone_from_slice(&place());
            table.push(row);
        }
        for queue in queues {
            let get = |attribute| queue.get(attribute).unwrap_or("-").to_owned();
            let mut row = vec![device.name.clone(), queue.name.clone()];
            row.extend(place());
            row.extend(["type", "mode", "size", "threshold", "state", "clients"].map(get));
            let file = dev.join(&queue.name);
            let access = access(&file);
            let file =
                access.as_ref().map_or_else(|| "-".to_owned(), |_| file.display().to_string());
            row.extend([file, access.unwrap_or("-".to_owned())]);
            table.push(row);
        }
    }
    if arguments.noheadings { table.without_headings().to_string() } else { table.to_string() }
}

/// Owner, group and permissions of a file, if it is there.
fn access(file: &Path) -> Option<String> {
    let found = fs::metadata(file).ok()?;
    Some(format!("{}:{} {:04o}", found.uid(), found.gid(), found.mode() & 0o7777))
}

fn device_json(device: &Device, arguments: &ListArgs, dev: &Path) -> Value {
    let queue_json = |queue: &Queue| {
        let mut all = json!({ "queue": queue.name, "driver": queue.driver });
        for attribute in Queue::attributes() {
            let value = queue.get(attribute);
            let number = value.and_then(|text| text.parse::<i64>().ok());
            all[attribute] = number.map_or_else(|| json!(value), |number| json!(number));
        }
        let file = dev.join(&queue.name);
        let access = access(&file);
        all["file"] = json!(access.is_some().then(|| file.display().to_string()));
        all["access"] = json!(access);
        all["obstacle"] = json!(queue.usable(device, dev).err().map(|unusable| unusable.why));
        all
    };
    json!({
        "device": device.name,
        "numa_node": device.node,
        "package": device.package,
        "state": device.state,
        "queues": shown(device, arguments).map(queue_json).collect::<Vec<_>>(),
    })
}
