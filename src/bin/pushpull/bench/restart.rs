//! How long a killed server is away: from exec to its first answered pull.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pushpull::common::ids::{PartitionId, RestoreEpoch};
use pushpull::common::protocol::Message;
use pushpull::common::protocol::message::{Declare, Initialize, Role, Selection};
use pushpull::common::protocol::wire::List;
use pushpull::{Catalogue, ClusterSpec, Placement, ShardId, ShardMap, Strategy, VariableSpec};

use super::probe::{Line, answers};
use super::report::{Report, Row, Unit};
use super::{Failure, Folder};

/// How long a server may take to answer before the measurement is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon that ends with this.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The daemon beside this tool.
fn daemon() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()?;
    let folders = own.ancestors().skip(1).take(2);
    let mut found = folders.map(|folder| folder.join("pushpull-ps"));
    let found = found.find(|path| path.is_file());
    found.ok_or_else(|| "cannot measure restarts: pushpull-ps is not beside this tool".into())
}

/// Kills and starts a daemon whose state has so many bytes of values.
pub(crate) fn run(
    size: &str,
    bytes: usize,
    rounds: usize,
    report: &mut Report,
) -> Result<(), Failure> {
    let (folder, daemon) = (Folder::private("restart")?, daemon()?);
    let address = format!("unix:{}/ps.sock", folder.path().display());
    let cluster = ClusterSpec::builder()
        .job("ps", [address.clone()])
        .job("worker", ["127.0.0.1:1"])
        .build()?;
    let start = || {
        let mut command = Command::new(&daemon);
        command.args(["--ps-hosts", &address, "--worker-hosts", "127.0.0.1:1"]);
        command.arg("--state-dir").arg(folder.path().join("state"));
        // One room and no pins, so that the state fits where it is measured.
        command.args(["--inbox-pushes", "1", "--pin-bytes-max", "65536"]);
        // Initializing some GiB takes longer than a lease, and this chief says nothing meanwhile.
        command.args(["--lease-ms", "600000"]);
        command.args(["--bytes-max", &(64_u64 << 30).to_string()]);
        command.stdout(Stdio::null());
        command.spawn().map(Daemon)
    };
    let mut running = start()?;
    fill(&cluster, bytes)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        running.0.kill()?;
        running.0.wait()?;
        let began = Instant::now();
        running = start()?;
        await_answer(&cluster, began)?;
        ours.push(vec![began.elapsed()]);
        let began = Instant::now();
        Command::new(&daemon).arg("--version").stdout(Stdio::null()).status()?;
        theirs.push(vec![began.elapsed()]);
    }
    let (name, unit) = (format!("restart_{size}"), Unit::Latency);
    let beside = "a daemon that prints its version";
    report.row(Row { name, unit, amount: 8, ours, ceiling: theirs, beside })?;
    Ok(())
}

/// Declares and initializes the variables: a small one, and one of so many bytes.
fn fill(cluster: &ClusterSpec, bytes: usize) -> Result<(), Failure> {
    let rows = 1 << 16;
    let small = VariableSpec::f32("small", [16])?;
    let large = VariableSpec::f32("large", [rows, bytes as u64 / 4 / rows])?;
    let variables = vec![small, large];
    let map = ShardMap::of_cluster(cluster, 1)?;
    let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin)?;
    let catalogue = Catalogue::new(variables, &placement)?;
    let began = Instant::now();
    let mut chief = loop {
        match Line::open(cluster, ShardId::default(), Role::Chief {}) {
            Ok(Some(line)) => break line,
            Ok(None) => return Err("the daemon does not welcome a chief".into()),
            Err(error) if began.elapsed() > PATIENCE => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    };
    chief.send(Declare { digest: catalogue.digest() }.into(), catalogue.encode())?;
    chief.send(Initialize { epoch: RestoreEpoch(1) }.into(), &[])?;
    for expected in ["Declared", "Ready"] {
        match chief.next()? {
            Message::Refused(refused) => return Err(refused.refusal.to_string().into()),
            message if message.name() == expected => {}
            message => return Err(format!("a {} and not {expected}", message.name()).into()),
        }
    }
    Ok(())
}

fn await_answer(cluster: &ClusterSpec, began: Instant) -> Result<(), Failure> {
    let small = || List::new(vec![PartitionId(0)]).unwrap_or_default();
    loop {
        let selection = Selection::Partitions { partitions: small() };
        match answers(cluster, ShardId::default(), selection) {
            Ok(true) => return Ok(()),
            Ok(false) => return Err("the daemon has lost its state".into()),
            Err(error) if began.elapsed() > PATIENCE => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}
