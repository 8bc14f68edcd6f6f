//! The daemon as a separate process, and a chief that declares its variables.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pushpull::cluster::{Placement, PlacementStrategy, ShardId, ShardMap};
use pushpull::protocol::Message;
use pushpull::protocol::RestoreEpoch;
use pushpull::protocol::message::{Declare, Initialize, Role};
use pushpull::variable::Catalogue;
use pushpull::{ClusterSpec, VariableSpec};

use super::probe::ProbeConnection;
use crate::bench::{BenchError, BenchFolder};

/// Maximum time for a server to answer before the measurement fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts daemons one after the other on one state directory behind one Unix socket.
pub(crate) struct BenchDaemons {
    program: PathBuf,
    folder: BenchFolder,
    address: String,
    arguments: &'static [&'static str],
    pub(crate) cluster: ClusterSpec,
}

/// A running daemon, killed on drop.
pub(crate) struct Daemon(pub(crate) Child);

impl BenchDaemons {
    /// Prepares daemons that are started with these extra arguments. Starts none.
    pub(crate) fn new(
        what: &str,
        arguments: &'static [&'static str],
    ) -> Result<BenchDaemons, BenchError> {
        let program = program()?;
        let folder = BenchFolder::private(what)?;
        let address = format!("unix:{}/ps.sock", folder.path().display());
        let cluster =
            ClusterSpec::builder().job("ps", [&address]).job("worker", WORKERS).build()?;
        Ok(BenchDaemons { program, folder, address, arguments, cluster })
    }

    /// Returns the state directory.
    pub(crate) fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Returns the path of the daemon's executable.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    pub(crate) fn start(&self) -> std::io::Result<Daemon> {
        let mut command = Command::new(&self.program);
        command.args(["--ps-hosts", &self.address, "--worker-hosts", &WORKERS.join(",")]);
        command.arg("--state-dir").arg(self.state());
        // The chief here sends no heartbeats, and initializing a few GiB takes longer than the
        // default lease.
        command.args(["--lease-ms", "600000"]);
        command.args(["--bytes-max", &(64_u64 << 30).to_string()]);
        command.args(self.arguments).stdout(Stdio::null());
        command.spawn().map(Daemon)
    }

    /// Declares and initializes variables once a daemon answers.
    pub(crate) fn declare(&self, variables: Vec<VariableSpec>) -> Result<(), BenchError> {
        let map = ShardMap::of_cluster(&self.cluster, 1)?;
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin)?;
        let catalogue = Catalogue::new(variables, &placement)?;
        let began = Instant::now();
        let mut chief = loop {
            match ProbeConnection::open(&self.cluster, ShardId::default(), Role::Chief {}) {
                Ok(Some(line)) => break line,
                Ok(None) => return Err("the daemon refused a chief".into()),
                Err(error) if began.elapsed() > TIMEOUT => return Err(error.into()),
                Err(_) => std::thread::yield_now(),
            }
        };
        chief.send(Declare { digest: catalogue.digest() }.into(), catalogue.encode())?;
        chief.send(Initialize { epoch: RestoreEpoch(1) }.into(), &[])?;
        ["Declared", "Ready"].into_iter().try_for_each(|name| expect(&mut chief, name))
    }
}

impl Daemon {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Kills the process and waits until it is gone.
    pub(crate) fn kill(&mut self) -> std::io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.kill();
    }
}

/// Reads the next message. Fails unless it has this name.
pub(crate) fn expect(line: &mut ProbeConnection, name: &str) -> Result<(), BenchError> {
    match line.next()? {
        Message::Refused(refused) => Err(refused.refusal.to_string().into()),
        message if message.name() == name => Ok(()),
        message => Err(format!("received {} instead of {name}", message.name()).into()),
    }
}

/// Finds the daemon in the folder of this program, or in the folder above it.
pub(crate) fn program() -> Result<PathBuf, BenchError> {
    let own = std::env::current_exe()?;
    let folders = own.ancestors().skip(1).take(2);
    let mut found = folders.map(|folder| folder.join("pushpull-ps"));
    let found = found.find(|path| path.is_file());
    found.ok_or_else(|| {
        "cannot measure a daemon: pushpull-ps is not built, as by \
         cargo build --release --features cli --bin pushpull-ps"
            .into()
    })
}

/// Addresses of the workers in the cluster.
const WORKERS: [&str; 2] = ["127.0.0.1:1", "127.0.0.1:2"];
