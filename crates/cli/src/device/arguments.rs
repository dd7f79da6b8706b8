//! The arguments of `zfolio device`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand, ValueEnum, ValueHint};
use zfolio_block::address::{self, Address};
use zfolio_block::control::REQUEST_BYTES_MAX;
use zfolio_block::listen::Unusable;
use zfolio_block::nbd::{NAME_BYTES_MAX, Tls};
use zfolio_block::saved::Kept;
use zfolio_core::budget::WriteBudget;
use zfolio_core::page::UnitOrder;
use zfolio_core::size;
use zfolio_core::size_expression;
use zfolio_core::zcomp::{self, Algorithm, Params};
use zfolio_core::zram::{self, ALGORITHMS_MAX};
use zfolio_iaa::Codes;
use zfolio_iaa::accelerate::{self, Accelerate, Named};
use zfolio_pager::spill::Site;
use zfolio_sys::ublk::NUMBERS;

use super::list::Column;
use super::saved::unsaved;
use crate::allowance;
use crate::arguments::{
    Accelerator, check_places, parse_accelerator, parse_unit, parse_write_budget,
};
use crate::metrics::parse_metrics;

/// Arguments of `zfolio device`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio device add cache --size 4G --nbd /run/cache.sock
  nbdinfo nbd+unix:///cache?socket=/run/cache.sock
  zfolio device list
  zfolio device set cache mem_limit=1G
  zfolio device remove cache")]
pub(crate) struct DeviceArgs {
    /// What to do.
    #[command(subcommand)]
    pub(super) command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Make a disk, and serve it in the background
    Add(AddArgs),
    /// Make a disk, and serve it until Ctrl-C
    Run(AddArgs),
    /// Make and serve all disks of a configuration file, until Ctrl-C; for systemd
    Daemon(DaemonArgs),
    /// List the disks, in the columns of zramctl
    List(ListArgs),
    /// Show the figures of a disk, or one attribute as the kernel shows it
    Stat(StatArgs),
    /// Change attributes of a disk, by the kernel's names
    Set(SetArgs),
    /// Save the contents of a disk to a file, from which 'add' and 'run' load them
    Save(SaveArgs),
    /// Drop the contents of a disk: it reads as zeros
    #[command(after_help = "Examples:
  zfolio device reset cache")]
    Reset(NameArgs),
    /// End a disk; its contents are dropped, or saved if it has --save
    Remove(RemoveArgs),
}

/// Arguments of `zfolio device add` and `run`.
#[derive(Args, Debug)]
#[command(
    after_help = "ADDRESS is a path with a / (a Unix socket), localhost or an address of this machine, each of the
last two with :PORT or without (10809), or 'systemd' for the sockets that systemd hands over. Where other machines can
connect (any address but 127.0.0.1, [::1] and their like), clients have to speak TLS: --tls-certificates.

Examples:
  zfolio device add cache --size 4G --nbd /run/cache.sock
  zfolio device run scratch --size 64G --algorithm zstd --unit 64K --mem-limit 8G --nbd localhost
  zfolio device add vm --size 8G --recompress zstd,level=9 --vhost-user /run/vm.sock
  zfolio device set vm idle=3600 recompress='type=idle'
  zfolio device add shared --size 8G --nbd 0.0.0.0 --tls-certificates /etc/pki/zfolio
  zfolio device add fast --size 8G --ublk && mkfs.ext4 /dev/ublkb0
  zfolio device add big --size 64G --mem-limit 4G --writeback /var/tmp,size=40G --nbd /run/big.sock"
)]
#[command(group(ArgGroup::new("front-end").required(true).multiple(true).args(["nbd", "vhost_user", "ublk"])))]
pub(crate) struct AddArgs {
    /// The name of the disk, and of its export
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(super) name: String,

    /// How large the disk is: 4G, 512M, 'min(ram / 2, 4G)'; a multiple of the unit
    #[arg(long, short, value_name = "SIZE", required_unless_present = "load", value_parser = parse_size)]
    pub(super) size: Option<u64>,

    /// Start with the contents that 'zfolio device save' has saved
    ///
    /// The disk has the size, the unit and the algorithms of the one that was saved.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["size", "unit", "algorithm", "recompress"])]
    pub(super) load: Option<PathBuf>,

    /// Save the contents in FILE when the disk ends, and go on from FILE if it is there
    ///
    /// The disk then has the unit and the algorithms of FILE, and its size unless --size is more. Where the disk is
    /// killed FILE stays what it was, and a disk that is to go on from it is refused, since clients had written more.
    #[arg(long, value_name = "FILE", conflicts_with = "load", value_parser = parse_path)]
    pub(super) save: Option<PathBuf>,

    /// The algorithm, and its parameters: see 'zfolio algorithms' [default: lz4]
    ///
    /// With --accelerate iaa: deflate-iaa (the default there) or deflate-iaa-dynamic, which are deflate,window=12 by
    /// the accelerator, with fixed codes or with codes made for each unit.
    #[arg(long, short, value_name = "NAME[,level=N]", value_parser = parse_first)]
    pub(super) algorithm: Option<Named<Params>>,

    /// An algorithm for what is not used for long; up to three, each with the next priority [default: zstd]
    ///
    /// The first is tried by itself; 'zfolio device set NAME recompress=..' tries any. With none, or where the
    /// algorithm is zstd already, the default is none.
    #[arg(long, value_name = "NAME[,level=N]|none", value_parser = parse_recompress)]
    pub(super) recompress: Vec<Recompress>,

    /// How many seconds a unit must not have been used before it is recompressed by itself
    ///
    /// That is while memory is empty; with --mem-limit it is less the nearer memory is to it, down to a 60th.
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = parse_age)]
    pub(super) recompress_age: u32,

    /// What is compressed as one object: a power of two, 4K to 2M
    ///
    /// Large units compress better and serve large requests faster; small ones serve small random requests sooner.
    /// A unit that is larger than a client's requests is compressed anew for each of them: nbdcopy's are 256K, unless
    /// --request-size says more.
    #[arg(long, short, value_name = "SIZE", default_value = "4K", value_parser = parse_unit)]
    pub(super) unit: UnitOrder,

    /// What compresses and decompresses beside the threads that serve clients: cpu, cpu=N for N threads, or iaa
    ///
    /// cpu: requests of several units are divided among threads, if they take long enough to be worth it. Without a
    /// number there is a thread for each CPU but one. It helps where fewer clients than CPUs make large requests.
    ///
    /// iaa: Intel's In-Memory Analytics Accelerator, on all queues of this machine that are for programs: see 'zfolio
    /// iaa'. It does what deflate,window=12 does, in the same format, and software does what it does not. iaa=model
    /// is a model of the device in software: slow, for tests and trials. Attributes of its driver follow:
    /// iaa,verify_compress=1 (sync_mode, verify_compress, distribute_comps, distribute_decomps, g_comp_wqs_per_iaa,
    /// check_crc, when_busy).
    #[arg(long, value_name = "cpu[=N]|iaa[=model][,ATTR=VALUE]...|none", default_value = "none",
          value_parser = parse_accelerator)]
    pub(super) accelerate: Accelerator,

    /// The most memory that the disk may take; then writes fail with "no space" [default: any amount]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) mem_limit: Option<u64>,

    /// Where units go that are not used for long, or that memory has no room for; may be given several times
    ///
    /// A directory on a disk, in which a file without a name is made, or a block device that nobody uses. What is
    /// written is encrypted, as compressed as it is in memory, and gone when the disk ends. SIZE is how much may be
    /// used, half of what is free in the directory by default. Places with a higher N are filled first.
    #[arg(long, value_name = "DIR|DEV[,size=SIZE][,prio=N]", value_parser = Site::parse,
          value_hint = ValueHint::AnyPath)]
    pub(super) writeback: Vec<Site>,

    /// How many seconds a unit must not have been used before it is written back by itself
    ///
    /// That is while memory is empty; with --mem-limit it is less the nearer memory is to it, down to a 60th.
    #[arg(long, value_name = "SECONDS", default_value = "14400", requires = "writeback", value_parser = parse_age)]
    pub(super) writeback_age: u32,

    /// How much the disk may write back by itself: 10G/day, 1G, or none for any amount
    ///
    /// Once it is used up, what memory has no room for is refused. What 'device set NAME writeback=..' asks for counts
    /// too, and is written all the same.
    #[arg(long, value_name = "SIZE[/PERIOD]", default_value = "none", requires = "writeback",
          value_parser = parse_write_budget)]
    pub(super) writeback_budget: WriteBudget,

    /// Where NBD clients connect; may be given several times
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    pub(super) nbd: Vec<Address>,

    #[command(flatten)]
    pub(super) tls: TlsArgs,

    /// The socket at which QEMU finds the disk as vhost-user-blk; may be given several times
    ///
    /// The guest's memory has to be shared: -object memory-backend-memfd,id=m,size=2G,share=on
    /// -machine memory-backend=m -chardev socket,id=c,path=PATH -device vhost-user-blk-pci,chardev=c
    #[arg(long, value_name = "PATH", value_parser = parse_socket)]
    pub(super) vhost_user: Vec<PathBuf>,

    /// Make the disk a block device of this machine, /dev/ublkbN, by the kernel's ublk (root)
    ///
    /// N is the one given, or one that is free. File systems and swap can be on it; it is gone when the disk ends.
    #[arg(long, value_name = "auto|N", num_args = 0..=1, default_missing_value = "auto", require_equals = true,
          value_parser = parse_ublk)]
    pub(super) ublk: Option<Number>,

    /// Serve figures for Prometheus at this address of this machine: localhost:9100
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_metrics)]
    pub(super) metrics: Option<SocketAddr>,

    /// Set by `add`: leave the terminal
    #[arg(long, hide = true)]
    pub(super) background: bool,
}

/// The number of a block device; `None`: one that is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Number(pub(super) Option<u32>);

/// Arguments about TLS, with nbdkit's names.
#[derive(Args, Debug)]
pub(crate) struct TlsArgs {
    /// The directory with server-cert.pem, server-key.pem and ca-cert.pem, for TLS with NBD clients
    ///
    /// The names of the files are those that QEMU and nbdkit have, in PEM form. ca-crl.pem, a list of revoked
    /// certificates, may be there. The key must not be readable for everybody.
    #[arg(long, value_name = "DIR", requires = "nbd", value_hint = ValueHint::DirPath)]
    pub(super) tls_certificates: Option<PathBuf>,

    /// Whether NBD clients on this machine may speak TLS too (on), or have to (require); others always have to
    #[arg(long, value_name = "MODE", default_value = "off", requires = "tls_certificates")]
    pub(super) tls: TlsMode,

    /// Whether NBD clients have to show a certificate that an authority of ca-cert.pem has signed
    ///
    /// If not, everybody who reaches the port can read and write the disk.
    #[arg(long, value_name = "yes|no", default_value = "yes", default_missing_value = "yes", num_args = 0..=1,
          requires = "tls_certificates")]
    pub(super) tls_verify_peer: YesNo,
}

/// What clients on this machine do.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TlsMode {
    /// They speak no TLS.
    Off,
    /// They may.
    On,
    /// They have to.
    Require,
}

/// Yes or no.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum YesNo {
    /// Yes.
    Yes,
    /// No.
    No,
}

impl From<TlsMode> for Tls {
    fn from(mode: TlsMode) -> Tls {
        match mode {
            TlsMode::Off => Tls::Off,
            TlsMode::On => Tls::On,
            TlsMode::Require => Tls::Require,
        }
    }
}

/// Arguments of `zfolio device daemon`.
#[derive(Args, Debug)]
#[command(
    after_help = "FILE has a section [NAME] for each disk, with the options of 'zfolio device add' as keys:

  [cache]
  size = min(ram / 2, 4G)
  nbd = /run/zfolio/cache.sock

Files FILE.d/*.conf are read after it, in the order of their names; keys replace those of files before. Without
--config, FILE is the first of /etc/zfolio/devices.conf, /run/zfolio/devices.conf and
/usr/lib/zfolio/devices.conf, and files FILE.d/*.conf are read from all three places; of one name the first.

SIGTERM ends all disks. SIGHUP reads the files again, and starts the disks that do not run.

Examples:
  zfolio device daemon --check
  systemctl enable --now zfolio-devices
  zfolio device daemon --config disks.conf"
)]
pub(crate) struct DaemonArgs {
    /// The configuration file [default: /etc/zfolio/devices.conf]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = parse_path)]
    pub(super) config: Option<PathBuf>,

    /// Check the configuration, print the disks with their options, and end
    #[arg(long)]
    pub(super) check: bool,
}

/// Arguments of `zfolio device list`.
#[derive(Args, Debug)]
#[command(after_help = "Columns:
  NAME       of the disk                    DISKSIZE   how large it is
  DATA       bytes stored, uncompressed     COMPR      the same, compressed
  TOTAL      memory that it takes           ALGORITHM  that compresses what is written
  STREAMS    threads that can compress      ZERO-PAGES units that are one machine word, repeated
  MEM-LIMIT  the most memory allowed        MEM-USED   the most memory that it took
  MIGRATED   pages freed by compaction      COMP-RATIO DATA / TOTAL
  ADDRESS    where clients connect

Examples:
  zfolio device list
  zfolio device list --json -o NAME,DATA,COMPR")]
pub(crate) struct ListArgs {
    /// Exact numbers: bytes
    #[arg(long, short)]
    pub(super) bytes: bool,

    /// No headings
    #[arg(long, short)]
    pub(super) noheadings: bool,

    /// The columns, separated by commas; +COLUMN adds to the default ones
    #[arg(long, short, value_name = "COLUMNS", value_parser = Column::parse_all)]
    pub(super) output: Option<Columns>,

    /// All columns
    #[arg(long, conflicts_with = "output")]
    pub(super) output_all: bool,

    /// Columns separated by one space
    #[arg(long, conflicts_with = "json")]
    pub(super) raw: bool,

    /// Write JSON: all figures by the kernel's names, or the columns that are asked for
    #[arg(long)]
    pub(super) json: bool,
}

/// An algorithm for recompression, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recompress(Option<Params>);

/// Columns of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns(pub(super) Vec<Column>);

/// Arguments of `zfolio device stat`.
#[derive(Args, Debug)]
#[command(after_help = "\
Attributes:
  backing_dev, bd_stat, block_state, comp_algorithm, compressed_writeback, debug_stat, disksize, initstate, io_stat,
  max_comp_streams, mem_limit, mm_stat, recomp_algorithm, writeback_batch_size, writeback_limit,
  writeback_limit_enable
                  the kernel's documentation of zram has their columns
  stat            the block layer's columns: requests, sectors and milliseconds of reads, writes, discards and
                  flushes, and of all
  global_stats, wq_stats, driver_stats
                  of the accelerator, with --accelerate iaa
  apart_stat      units of which pages are apart, those of them that are split, the pages, their bytes; units that
                  were joined because they were idle
  policy_stat     age in seconds at which units are recompressed now; units tried, units that shrank, bytes saved
  writeback_stat  age in seconds at which units are written back now; units that were because somebody asked,
                  because they were old, and to make room; writes that came to nothing; how often the budget was
                  used up

Examples:
  zfolio device stat cache
  zfolio device stat cache mm_stat")]
pub(crate) struct StatArgs {
    /// The disk
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(super) name: String,

    /// An attribute, as the kernel shows it
    #[arg(value_name = "ATTRIBUTE", value_parser = parse_attribute_name)]
    pub(super) attribute: Option<String>,

    /// Write JSON
    #[arg(long, conflicts_with = "attribute")]
    pub(super) json: bool,
}

/// Arguments of `zfolio device set`.
#[derive(Args, Debug)]
#[command(after_help = "Attributes:
  disksize=SIZE         grow the disk, or shrink it by what has no data
  mem_limit=SIZE        the most memory; 0: any amount
  mem_used_max=0        begin that figure anew
  compact=1             give back what fragmentation takes
  idle=all|SECONDS      mark what was not used for so long
  recompress='type=idle|huge|huge_idle threshold=BYTES max_pages=N priority=N algo=NAME'
                        compress again with another algorithm of the disk
  writeback=huge|idle|huge_idle|incompressible
  writeback='page_index=N page_indexes=A-B ..'
                        write units of the disk back, by kind or by index
  writeback_limit=N     how many pages of 4 KiB may be written, if writeback_limit_enable=1
  writeback_batch_size=N  units that are written together
  reset=1               drop the contents; stat, io_stat, mm_stat and bd_stat begin anew

Examples:
  zfolio device set cache mem_limit=1G
  zfolio device set cache idle=3600 recompress='type=idle priority=1'
  zfolio device set cache idle=all writeback=idle")]
pub(crate) struct SetArgs {
    /// The disk
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(super) name: String,

    /// The attributes, in this order
    #[arg(value_name = "ATTRIBUTE=VALUE", required = true, value_parser = parse_attribute)]
    pub(super) attributes: Vec<(String, String)>,
}

/// Arguments of `zfolio device save`.
#[derive(Args, Debug)]
#[command(
    after_help = "Clients go on meanwhile: the file has each unit of the disk as it was at some moment of the save,
and all that was written before. FILE is replaced once all of it is on the disk. It has the contents
in clear, compressed, and is readable for its owner alone.

Examples:
  zfolio device save cache /var/lib/cache.disk
  zfolio device add cache --load /var/lib/cache.disk --nbd /run/cache.sock"
)]
pub(crate) struct SaveArgs {
    /// The disk
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(super) name: String,

    /// The file
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,
}

/// Arguments of `zfolio device remove`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  zfolio device remove cache
  zfolio device remove kept --no-save")]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    pub(super) disk: NameArgs,

    /// Drop the contents of a disk that has --save, too. Without it such a disk stays, without clients, if it cannot be
    /// saved
    #[arg(long)]
    pub(super) no_save: bool,
}

/// Arguments of `zfolio device reset`.
#[derive(Args, Debug)]
pub(crate) struct NameArgs {
    /// The disk
    #[arg(value_name = "NAME", value_parser = parse_name)]
    pub(super) name: String,
}

impl AddArgs {
    /// The disk is served by another process than the one that systemd hands sockets to.
    pub(super) fn check_sockets(&self) -> Result<(), String> {
        const WHY: &str =
            "--nbd: 'systemd' hands its sockets to one process; accepted: with 'zfolio device run'";
        if self.nbd.contains(&Address::Systemd) { Err(WHY.to_owned()) } else { Ok(()) }
    }

    /// What only one disk can have, behind the name of its option and in the order of the command line: sockets,
    /// addresses, a device, the file that it is saved in. `None`: one that is free is chosen, or handed over.
    pub(super) fn owned(&self) -> Vec<(&'static str, Option<String>)> {
        let path = |path: &PathBuf| {
            std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string()
        };
        let port = |address: &SocketAddr| (address.port() != 0).then(|| address.to_string());
        let nbd = self.nbd.iter().map(|address| match address {
            Address::Unix(socket) => Some(path(socket)),
            Address::Tcp(address) => port(address),
            Address::Systemd => None,
        });
        let nbd = nbd.map(|what| ("nbd", what));
        let vhost_user = self.vhost_user.iter().map(|socket| ("vhost-user", Some(path(socket))));
        let number = |number: Number| number.0.map(|number| format!("/dev/ublkb{number}"));
        let ublk = self.ublk.map(|asked| ("ublk", number(asked)));
        let save = self.save.iter().map(|file| ("save", Some(path(file))));
        let metrics = self.metrics.iter().map(|address| ("metrics", port(address)));
        nbd.chain(vhost_user).chain(ublk).chain(save).chain(metrics).collect()
    }

    /// Whether the disk can be made as asked for, as far as that is known without opening anything.
    ///
    /// # Errors
    ///
    /// One line that begins with the option, `--size: `.
    pub(super) fn check(&self) -> Result<(), String> {
        let algorithms = self.algorithms()?;
        // Else what the file says of them counts.
        if !self.is_from_file() {
            accelerate::check(self.accelerate.0, self.codes(), &algorithms, "this disk")?;
            if let Some(bytes) = self.size.filter(|bytes| !zram::is_size(*bytes, self.unit)) {
                return Err(unfit(bytes, self.unit));
            }
        }
        check_places("--writeback", self.writeback.len())?;
        self.save.as_deref().map_or(Ok(()), Kept::check).map_err(|error| unsaved(&error))?;
        self.check_save()?;
        self.check_tls()
    }

    /// The file that the disk is saved in would take the place of a socket, and the socket that of the file.
    fn check_save(&self) -> Result<(), String> {
        let Some(save) = &self.save else { return Ok(()) };
        let is_it = |address: &&Address| matches!(address, Address::Unix(path) if path == save);
        let of_nbd = self.nbd.iter().find(is_it).map(|_| "--nbd");
        match of_nbd.or(self.vhost_user.contains(save).then_some("--vhost-user")) {
            None => Ok(()),
            Some(option) => Err(format!(
                "--save: '{}' is the socket of {option}; accepted: another file",
                save.display()
            )),
        }
    }

    /// Whether the disk goes on from contents that were saved.
    fn is_from_file(&self) -> bool {
        // One that cannot be looked at `Kept::check` refuses.
        let is_there = |path: &PathBuf| path.try_exists().unwrap_or(true);
        self.load.is_some() || self.save.as_ref().is_some_and(is_there)
    }

    /// Certificates are there where they are needed, and used where they are there. What the sockets of systemd need,
    /// the process finds out that has them.
    fn check_tls(&self) -> Result<(), String> {
        let are_given = self.tls.tls_certificates.is_some();
        let others = |address: &Address| match address {
            Address::Tcp(address) => Some(*address).filter(|address| !address.ip().is_loopback()),
            Address::Unix(_) | Address::Systemd => None,
        };
        match self.nbd.iter().find_map(others) {
            Some(address) if !are_given => Err(unprotected(&Unusable::NotLoopback(address))),
            None if are_given
                && self.tls.tls == TlsMode::Off
                && !self.nbd.contains(&Address::Systemd) =>
            {
                Err(UNUSED_CERTIFICATES.to_owned())
            }
            _ => Ok(()),
        }
    }

    /// The algorithm that compresses what is written.
    fn first(&self) -> Params {
        match (&self.algorithm, self.accelerate.0) {
            (Some(Named { algorithm, .. }), _) => algorithm.clone(),
            (None, Some(Accelerate::Iaa(..))) => Named::on_iaa(Codes::Fixed).algorithm,
            (None, _) => Params::from(Algorithm::Lz4),
        }
    }

    /// How an accelerator is to compress, if the algorithm was named so.
    pub(super) fn codes(&self) -> Option<Codes> {
        self.algorithm.as_ref().and_then(|named| named.codes)
    }

    /// The algorithms, by their priority.
    pub(super) fn algorithms(&self) -> Result<Vec<Params>, String> {
        let first = self.first();
        let dense = Params::from(Algorithm::Zstd);
        let is_dense = first.algorithm == dense.algorithm;
        let default = (self.recompress.is_empty() && !is_dense).then_some(dense);
        let asked: Vec<Params> =
            self.recompress.iter().filter_map(|Recompress(params)| params.clone()).collect();
        if !asked.is_empty() && asked.len() < self.recompress.len() {
            return Err("--recompress: none and an algorithm; accepted: one of them".to_owned());
        }
        let all: Vec<Params> = [first].into_iter().chain(default).chain(asked).collect();
        if all.len() <= ALGORITHMS_MAX {
            return Ok(all);
        }
        let (given, most) = (self.recompress.len(), ALGORITHMS_MAX - 1);
        Err(format!("--recompress: {given} algorithms; accepted: {most} at most"))
    }
}

/// Why a disk in these units cannot have this size.
pub(super) fn unfit(disk_bytes: u64, unit: UnitOrder) -> String {
    let accepted = zram::accepted_sizes(unit);
    format!("--size: '{disk_bytes}' bytes are not the size of a disk; accepted: {accepted}")
}

/// Why an address is not served without certificates.
pub(super) fn unprotected(error: &Unusable) -> String {
    format!("--nbd: {error}, or any with --tls-certificates DIR")
}

/// Why certificates are not taken that nobody uses: who gives them expects TLS.
pub(super) const UNUSED_CERTIFICATES: &str = "\
--tls-certificates: no --nbd of this disk uses them; accepted: with an address that other machines reach, or with \
--tls on or --tls require";

fn parse_name(given: &str) -> Result<String, String> {
    const LETTERS_MAX: usize = 64;
    const _: () = assert!(LETTERS_MAX <= NAME_BYTES_MAX);
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let is_good = !given.is_empty() && given.len() <= LETTERS_MAX && given.bytes().all(is_letter);
    let is_good = is_good && !given.starts_with(['-', '.']);
    is_good.then(|| given.to_owned()).ok_or_else(|| {
        format!("'{given}' is not a name; accepted: up to {LETTERS_MAX} letters, digits, _ - and . (not first)")
    })
}

fn parse_size(given: &str) -> Result<u64, String> {
    let bytes = if size_expression::is_expression(given) {
        let ram = allowance::memory_bytes().ok_or("the memory of this machine is not known")?;
        size_expression::evaluate(given, ram)?
    } else {
        size::parse(given).map_err(|error| error.to_string())?
    };
    match bytes {
        0 if size_expression::is_expression(given) => {
            Err(format!("'{given}' is less than 2M here; accepted: 2M or more"))
        }
        0 => Err(format!("'{given}' is too small; accepted: 4K or more")),
        bytes => Ok(bytes),
    }
}

/// The longest age, in seconds.
const AGE_MAX: u32 = 1_000_000_000;

/// How long something must not have been used, in seconds.
fn parse_age(given: &str) -> Result<u32, String> {
    let age = given.parse().ok().filter(|age| (1..=AGE_MAX).contains(age));
    age.ok_or_else(|| format!("'{given}' is not accepted; accepted: seconds, 1 to {AGE_MAX}"))
}

fn parse_first(given: &str) -> Result<Named<Params>, String> {
    Named::parse(given, parse_params)
}

fn parse_params(given: &str) -> Result<Params, String> {
    let params: Params = given.parse().map_err(|error: zcomp::Error| error.to_string())?;
    match params.dictionary {
        None => Ok(params),
        Some(_) => {
            Err(format!("'{given}': a disk has no dictionary; accepted: NAME[,level=N][,window=N]"))
        }
    }
}

fn parse_recompress(given: &str) -> Result<Recompress, String> {
    let params = if given == "none" { None } else { Some(parse_params(given)?) };
    Ok(Recompress(params))
}

fn parse_address(given: &str) -> Result<Address, String> {
    given.parse()
}

fn parse_ublk(given: &str) -> Result<Number, String> {
    let number = || given.parse().ok().filter(|number| *number < NUMBERS);
    let given_number = if given == "auto" {
        Some(Number(None))
    } else {
        number().map(|number| Number(Some(number)))
    };
    given_number.ok_or_else(|| {
        format!("'{given}' is not the number of a device; accepted: auto, or 0 to {}", NUMBERS - 1)
    })
}

fn parse_path(given: &str) -> Result<PathBuf, String> {
    let path = (!given.is_empty()).then(|| PathBuf::from(given));
    path.ok_or_else(|| "'' is not a path; accepted: the path of a file".to_owned())
}

fn parse_socket(given: &str) -> Result<PathBuf, String> {
    let path = parse_path(given)?;
    address::check_path(&path)?;
    Ok(path)
}

/// Which of them there are the disk says.
fn parse_attribute_name(given: &str) -> Result<String, String> {
    let is_good =
        !given.is_empty() && given.len() <= 64 && given.bytes().all(|byte| byte.is_ascii_graphic());
    is_good.then(|| given.to_owned()).ok_or_else(|| {
        format!(
            "'{}' is not an attribute; accepted: as in mm_stat",
            given.chars().take(64).collect::<String>()
        )
    })
}

fn parse_attribute(given: &str) -> Result<(String, String), String> {
    const VALUE_BYTES_MAX: usize = 1024;
    const _: () = assert!(VALUE_BYTES_MAX + 100 <= REQUEST_BYTES_MAX);
    let (name, value) = given.split_once('=').unwrap_or((given, ""));
    if value.len() > VALUE_BYTES_MAX {
        return Err(format!(
            "{name}: a value of {} bytes; accepted: {VALUE_BYTES_MAX} at most",
            value.len()
        ));
    }
    let is_good = parse_attribute_name(name).is_ok() && !value.contains('\n');
    if is_good && given.contains('=') {
        return Ok((name.to_owned(), value.to_owned()));
    }
    Err(format!("'{given}' is not a setting; accepted: ATTRIBUTE=VALUE, as in mem_limit=1G"))
}
