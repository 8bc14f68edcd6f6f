//! `pushpull bench`: measures a server, interleaved with the ceilings of the machine.

mod apply;
mod bed;
mod ceiling;
mod daemon;
mod memory;
mod mlp;
mod options;
mod page;
mod plot;
mod probe;
mod report;
mod restart;
mod rows;
mod saving;
mod scale;
mod served;
mod stalled;
mod transport;
mod turns;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use pushpull::server::Network;

pub(crate) use self::options::BenchOptions;

use super::byte_size::parse_byte_size;

use self::options::Suite;
use self::report::Report;
use self::turns::Pace;

/// A transport; the help of the command describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Tcp,
    Uds,
    Shm,
}

impl Transport {
    const ALL: [Transport; 3] = [Transport::Tcp, Transport::Uds, Transport::Shm];

    /// Returns whether a client can use this transport with the address.
    fn fits(self, address: &str) -> bool {
        (self == Transport::Tcp) != address.starts_with("unix:")
    }

    /// Returns whether the server shares memory.
    pub(crate) fn is_shared(self) -> bool {
        self == Transport::Shm
    }

    /// Returns the settings of a server's connections over it.
    pub(crate) fn network(self) -> Network {
        Network::default().shared_memory(self.is_shared())
    }

    /// Returns its name within row names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Uds => "uds",
            Transport::Shm => "shm",
        }
    }

    /// Returns an address for a server in this process, and the private folder of its socket.
    pub(crate) fn address(self, what: &str) -> std::io::Result<(String, Option<BenchFolder>)> {
        Ok(match self {
            Transport::Tcp => ("127.0.0.1:0".to_owned(), None),
            Transport::Uds | Transport::Shm => {
                let folder = BenchFolder::private(what)?;
                (format!("unix:{}/ps.sock", folder.path().display()), Some(folder))
            }
        })
    }
}

pub(crate) type BenchError = Box<dyn Error>;

/// Runs the suites of the options and prints their rows.
pub(crate) fn run(options: &BenchOptions) -> Result<(), BenchError> {
    let mut report = Report::new(options.output.json);
    let pace = options.pace();
    for &suite in &options.suite {
        measure(suite, options, pace, &mut report)?;
    }
    if let Some(path) = &options.output.plot {
        plot::draw(path, report.lines())?;
    }
    if let Some(path) = &options.output.page {
        page::write(path, report.lines())?;
    }
    Ok(())
}

fn measure(
    suite: Suite,
    options: &BenchOptions,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    match suite {
        Suite::Quick => quick(options, report),
        Suite::Transport => transport::run(options, &options.transport_suite.sizes, pace, report),
        Suite::Restart => restart::run(&options.suites.restart_sizes, pace.rounds, report),
        Suite::Memory => {
            memory::run(bytes_of(&options.suites.memory_size)?, report)?;
            stalled::run(&options.suites.stalled_size, pace, report)
        }
        Suite::Scale => scale::run(options, pace, report),
        Suite::Checkpoint => {
            let bytes = bytes_of(&options.suites.checkpoint_size)?;
            saving::run(&options.suites.checkpoint_size, bytes, pace.rounds, report)
        }
        Suite::Mlp => {
            options.transport.iter().try_for_each(|&transport| mlp::run(transport, pace, report))
        }
        Suite::Rows => {
            rows::run(&[16, 64], pace, report)?;
            options
                .transport
                .iter()
                .try_for_each(|&transport| served::run(&[16, 64], transport, pace, report))
        }
        Suite::Apply => {
            let bytes = bytes_of(&options.suites.apply_size)?;
            apply::run(&apply::every_rule(), bytes, pace, report)
        }
    }
}

/// Runs short rounds of the most telling suites.
fn quick(options: &BenchOptions, report: &mut Report) -> Result<(), BenchError> {
    let pace = Pace { rounds: options.pace().rounds.min(5), round: Duration::from_millis(80) };
    let sizes = ["64B", "4KiB", "1MiB", "16MiB"].map(str::to_owned);
    transport::run(options, &sizes, pace, report)?;
    apply::run(&apply::every_rule()[..2], 32 << 20, pace, report)?;
    rows::run(&[16], pace, report)?;
    mlp::run(Transport::Shm, pace, report)?;
    restart::run(&["64MiB".to_owned()], pace.rounds, report)
}

/// Validates a size on the command line and returns its text.
fn size(text: &str) -> Result<String, String> {
    let bytes = bytes_of(text).map_err(|error| error.to_string())?;
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let whole = units.into_iter().find(|(_, shift)| bytes.trailing_zeros() >= *shift);
    let (unit, shift) = whole.unwrap_or(("B", 0));
    Ok(format!("{}{unit}", bytes >> shift))
}

/// Parses a size, such as 4K, to bytes.
fn bytes_of(size: &str) -> Result<usize, BenchError> {
    let bytes = parse_byte_size(size)?;
    if bytes == 0 || bytes % 8 != 0 || bytes > 1 << 33 {
        return Err(format!("cannot measure {size}: not a multiple of 8 bytes up to 8G").into());
    }
    Ok(usize::try_from(bytes)?)
}

/// A private folder, removed with its contents on drop. On tmpfs if /dev/shm exists.
#[derive(Debug)]
pub(crate) struct BenchFolder(PathBuf);

impl BenchFolder {
    pub(crate) fn private(what: &str) -> std::io::Result<BenchFolder> {
        let shared = Path::new("/dev/shm");
        let root = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let path = root.join(format!("pushpull-bench-{what}-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(BenchFolder(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for BenchFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_daemon_and_multiples_of_eight_bytes() {
        let cases = [
            ("64B", 64, "64B"),
            ("4096", 4096, "4KiB"),
            ("64K", 64 << 10, "64KiB"),
            ("4KB", 4000, "4000B"),
            ("1536KiB", 3 << 19, "1536KiB"),
            ("2m", 2 << 20, "2MiB"),
            ("8G", 8 << 30, "8GiB"),
        ];
        for (text, bytes, name) in cases {
            assert_eq!(bytes_of(text).unwrap(), bytes, "{text}");
            assert_eq!(size(text).unwrap(), name, "{text}");
            assert_eq!(bytes_of(name).unwrap(), bytes, "{text}");
        }
        for text in ["", "4", "4kx", "0B", "12B", "9GiB", "-8B", "99999999999999999999B"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
