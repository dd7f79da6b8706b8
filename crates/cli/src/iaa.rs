//! `zfolio iaa`: the In-Memory Analytics Accelerators of this machine, and queues on them for programs.

mod list;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use zfolio_iaa::portal::hardware::Mode;
use zfolio_iaa::setup::{self, Plan, Refused, Wanted};
use zfolio_sys::signal;

use crate::failure::Failure;
use crate::output::print;

/// Arguments of `zfolio iaa`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio iaa list
  zfolio iaa setup --dry-run
  sudo zfolio iaa setup --devices 4 --queues 2")]
pub(crate) struct IaaArgs {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
enum Command {
    /// List the devices and their queues, and who may use them
    List(ListArgs),
    /// Set up queues for programs, as root
    Setup(SetupArgs),
}

/// Arguments of `zfolio iaa list`.
#[derive(Args, Debug)]
#[command(after_help = "Columns:
  DEVICE, QUEUE  their names in sysfs        NODE, PACKAGE  the NUMA node and the package of CPUs nearby
  TYPE   user: for programs; kernel          MODE    dedicated: for one program; shared: for several
  SIZE   descriptors that it holds           THRESHOLD  those that programs may put into a shared one
  STATE  enabled or disabled                 CLIENTS programs that have it open
  FILE   what programs open                  ACCESS  owner:group and permissions of the file, as numbers

Queues without descriptors are left out unless --all is given.

Examples:
  zfolio iaa list
  zfolio iaa list --json")]
struct ListArgs {
    /// Queues without descriptors too
    #[arg(long, short)]
    all: bool,

    /// No headings
    #[arg(long, short)]
    noheadings: bool,

    /// Write JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    system: System,
}

/// Arguments of `zfolio iaa setup`.
#[derive(Args, Debug)]
#[command(
    after_help = "All queues of the devices are configured anew, with type user, driver user, one group with all
engines; a device's descriptors are shared equally. If a step fails, all is put back as it was. Ctrl-C
waits until it is done. What was set up is gone after the next boot.

Examples:
  zfolio iaa setup --dry-run
  sudo zfolio iaa setup --devices 4 --queues 2
  sudo zfolio iaa setup --mode shared --replace"
)]
struct SetupArgs {
    /// How many devices of each package of CPUs [default: all]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    devices: Option<usize>,

    /// How many queues each device gets
    #[arg(long, value_name = "N", default_value = "2", value_parser = parse_count)]
    queues: usize,

    /// Whether a queue is for one program or for several
    #[arg(long, value_name = "MODE", default_value = "dedicated")]
    mode: GivenMode,

    /// Take queues that are enabled for the kernel from it
    #[arg(long)]
    replace: bool,

    /// Print what would be written, and change nothing
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    system: System,
}

/// Where the system's files are; elsewhere in tests.
#[derive(Args, Debug)]
struct System {
    #[arg(long, hide = true, value_name = "DIR", default_value = "/sys")]
    sysfs: PathBuf,

    #[arg(long, hide = true, value_name = "DIR", default_value = "/dev/iax")]
    dev: PathBuf,
}

/// The kinds of queues.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum GivenMode {
    /// For one program
    Dedicated,
    /// For several
    Shared,
}

fn parse_count(given: &str) -> Result<usize, String> {
    given.parse().map_err(|_| format!("'{given}' is not a number; accepted: 1 or more"))
}

/// Runs one of the commands.
///
/// # Errors
///
/// There is no device, or it cannot be set up.
pub(crate) fn iaa(arguments: &IaaArgs) -> Result<ExitCode, Failure> {
    match &arguments.command {
        Command::List(arguments) => list::list(arguments),
        Command::Setup(arguments) => set_up(arguments),
    }
}

fn set_up(arguments: &SetupArgs) -> Result<ExitCode, Failure> {
    let SetupArgs { devices, queues, mode, replace, .. } = *arguments;
    let mode = match mode {
        GivenMode::Dedicated => Mode::Dedicated,
        GivenMode::Shared => Mode::Shared,
    };
    let sysfs = &arguments.system.sysfs;
    let wanted = Wanted { devices, queues, mode, replace };
    let plan = Plan::new(sysfs, &wanted).map_err(|refused| match refused {
        Refused::Argument(why) => Failure::argument(why),
        Refused::Machine(why) => Failure::machine(why),
    })?;
    if arguments.dry_run {
        let writes = plan.writes().into_iter();
        let lines =
            writes.map(|(path, text)| format!("echo {text} > {}\n", sysfs.join(path).display()));
        print(&lines.collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    // Whoever ended this in the middle would leave devices half set up, and only this process knows how they were.
    let mask = signal::block_sent();
    // After a failure the signals stay blocked: `main` says what was put back, and ends.
    plan.apply(sysfs, setup::write).map_err(|failed| Failure::machine(failed.to_string()))?;
    let files = plan.queues.iter().map(|name| arguments.system.dev.join(name));
    let printed = print(&files.map(|file| format!("{}\n", file.display())).collect::<String>());
    signal::restore(&mask);
    printed?;
    Ok(ExitCode::SUCCESS)
}
