//! `pushpull bench`: measures a server, interleaved with the ceilings of the machine.

pub(crate) mod bed;
pub(crate) mod ceiling;
pub(crate) mod options;
pub(crate) mod plot;
pub(crate) mod processors;
pub(crate) mod report;
pub(crate) mod tls;
pub(crate) mod transport;
pub(crate) mod turns;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use pushpull::job::parse_byte_size;
use pushpull::server::Network;

pub(crate) use self::options::BenchOptions;

use self::options::{Suite, TransportOptions};
use self::report::Report;

/// A transport; the help of the command describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    Tcp,
    Tls,
    Uds,
    Shm,
}

impl Transport {
    /// Those that are measured unless others are named.
    const USUAL: [Transport; 3] = [Transport::Tcp, Transport::Uds, Transport::Shm];

    /// Returns whether a client can use this transport with the address.
    fn fits(self, address: &str) -> bool {
        matches!(self, Transport::Tcp | Transport::Tls) != address.starts_with("unix:")
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
            Transport::Tls => "tls",
            Transport::Uds => "uds",
            Transport::Shm => "shm",
        }
    }

    /// Returns an address for a server in this process, and the private folder of its socket.
    pub(crate) fn address(self, what: &str) -> std::io::Result<(String, Option<BenchFolder>)> {
        Ok(match self {
            Transport::Tcp | Transport::Tls => ("127.0.0.1:0".to_owned(), None),
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
    for suite in &options.suite {
        match suite {
            Suite::Quick => quick(&options.bench, &mut report),
            Suite::Transport => {
                let sizes = &options.bench.transport_suite.sizes;
                transport::run(&options.bench, sizes, options.bench.pace(), &mut report)
            }
        }?;
    }
    options.output.draw(&report)
}

/// Runs short rounds of a few sizes.
pub(crate) fn quick(options: &TransportOptions, report: &mut Report) -> Result<(), BenchError> {
    let sizes = ["64B", "4KiB", "1MiB", "16MiB"].map(str::to_owned);
    transport::run(options, &sizes, options.quick_pace(), report)
}

/// Validates a size on the command line and returns its text.
pub(crate) fn size(text: &str) -> Result<String, String> {
    let bytes = bytes_of(text).map_err(|error| error.to_string())?;
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let whole = units.into_iter().find(|(_, shift)| bytes.trailing_zeros() >= *shift);
    let (unit, shift) = whole.unwrap_or(("B", 0));
    Ok(format!("{}{unit}", bytes >> shift))
}

/// Parses a size, such as 4K, to bytes.
pub(crate) fn bytes_of(size: &str) -> Result<usize, BenchError> {
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
