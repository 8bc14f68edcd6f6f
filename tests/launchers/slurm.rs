//! [`SlurmCluster`]: a controller and four nodes of Slurm on this host.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The number of nodes. Their addresses are `127.0.0.11` and so on.
const NODES: u16 = 4;

/// Deadline that only ends a hang.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The daemons of a cluster, which are killed when the value is dropped.
pub(crate) struct SlurmCluster {
    daemons: Vec<Child>,
    folder: tempfile::TempDir,
}

impl SlurmCluster {
    /// Starts the daemons, and waits until the nodes are idle.
    ///
    /// # Errors
    /// The reason why this machine cannot: no root, a daemon that is not installed or does not start,
    /// a name of a node that nothing resolves.
    pub(crate) fn start() -> Result<SlurmCluster, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("needs root".to_owned());
        }
        let programs = ["munged", "slurmctld", "slurmd", "srun", "sinfo"];
        if let Some(missing) = programs.into_iter().find(|program| find(program).is_none()) {
            return Err(format!("needs {missing}, which is not installed"));
        }
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut cluster = SlurmCluster { daemons: Vec::new(), folder };
        cluster.launch().map_err(|error| error.to_string())?;
        cluster.wait()?;
        Ok(cluster)
    }

    /// Returns a command that starts a step, which is ended after some seconds.
    pub(crate) fn srun(&self, seconds: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", seconds, "srun"]).stdin(Stdio::null());
        command.env("SLURM_CONF", self.configuration());
        command
    }

    /// Sends a signal to the tasks of a job.
    pub(crate) fn signal(&self, job: &str, signal: &str) -> Result<(), String> {
        let mut scancel = self.scancel(job);
        scancel.args(["--signal", signal]);
        match scancel.status().map_err(|error| error.to_string())? {
            status if status.success() => Ok(()),
            status => Err(format!("{scancel:?} ended with {status}")),
        }
    }

    /// Returns the command that ends a job.
    pub(crate) fn scancel(&self, job: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "20", "scancel", "--name", job]).stdin(Stdio::null());
        command.env("SLURM_CONF", self.configuration());
        command
    }

    /// Returns the name of a node, from 1: its address.
    pub(crate) fn node(&self, number: u16) -> String {
        node_name(number)
    }

    fn configuration(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }

    /// Returns a folder for files of a test.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn launch(&mut self) -> io::Result<()> {
        let root = self.folder.path().to_owned();
        // The daemons of munge and the programs of its users pass through.
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755))?;
        ["state", "spool"].iter().try_for_each(|name| fs::create_dir(root.join(name)))?;
        let key = root.join("munge.key");
        fs::write(&key, [7; 1024])?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400))?;
        let ports = Ports::free()?;
        fs::write(self.configuration(), configuration(&root, &ports))?;
        let path = |name: &str| root.join(name).display().to_string();
        self.spawn(
            "munged",
            &[
                "--force",
                "--foreground",
                "--key-file",
                &path("munge.key"),
                "--socket",
                &path("munge.sock"),
                "--pid-file",
                &path("munged.pid"),
                "--log-file",
                &path("munged.log"),
                "--seed-file",
                &path("munge.seed"),
            ],
        )?;
        wait_for(&root.join("munge.sock"))?;
        self.spawn("slurmctld", &["-c", "-D"])?;
        for node in 1..=NODES {
            self.spawn("slurmd", &["-c", "-D", "-N", &node_name(node)])?;
        }
        Ok(())
    }

    fn spawn(&mut self, program: &str, arguments: &[&str]) -> io::Result<()> {
        let log = fs::File::create(self.folder.path().join(format!("{program}.out")))?;
        let mut command = Command::new(find(program).unwrap_or_else(|| program.into()));
        command.args(arguments).env("SLURM_CONF", self.configuration());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.daemons.push(command.spawn()?);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let mut sinfo = Command::new("timeout");
            sinfo.args(["-k", "1", "5", "sinfo", "--noheader", "--format=%T %D"]);
            let output = sinfo.env("SLURM_CONF", self.configuration()).output();
            let output = output.map_err(|error| error.to_string())?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if text.trim() == format!("idle {NODES}") {
                return Ok(());
            }
            if began.elapsed() > READY_TIMEOUT {
                let errors = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(format!("has nodes that are not idle: {text}{errors}"));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Waits until a daemon has created its socket.
fn wait_for(socket: &Path) -> io::Result<()> {
    let began = Instant::now();
    while !socket.exists() {
        if began.elapsed() > READY_TIMEOUT {
            let text = format!("{} is not created", socket.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Free ports of the daemons.
struct Ports {
    controller: u16,
    nodes: Vec<u16>,
}

impl Ports {
    fn free() -> io::Result<Ports> {
        let listen = || std::net::TcpListener::bind("127.0.0.1:0");
        let listeners = (0..=NODES).map(|_| listen()).collect::<io::Result<Vec<_>>>()?;
        let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port()));
        let mut ports = ports.collect::<io::Result<Vec<_>>>()?;
        let controller = ports.remove(0);
        Ok(Ports { controller, nodes: ports })
    }
}

fn configuration(root: &Path, ports: &Ports) -> String {
    let root = root.display();
    let controller = ports.controller;
    let mut text = format!(
        "ClusterName=test\n\
         SlurmctldHost=localhost(127.0.0.1)\n\
         SlurmctldPort={controller}\n\
         SlurmUser=root\n\
         SlurmdUser=root\n\
         AuthType=auth/munge\n\
         AuthInfo=socket={root}/munge.sock\n\
         StateSaveLocation={root}/state\n\
         SlurmdSpoolDir={root}/spool/%n\n\
         SlurmctldPidFile={root}/slurmctld.pid\n\
         SlurmdPidFile={root}/slurmd.%n.pid\n\
         SlurmctldLogFile={root}/slurmctld.log\n\
         SlurmdLogFile={root}/slurmd.%n.log\n\
         ProctrackType=proctrack/pgid\n\
         TaskPlugin=task/none\n\
         JobAcctGatherType=jobacct_gather/none\n\
         SelectType=select/cons_tres\n\
         SelectTypeParameters=CR_CPU\n\
         SlurmdParameters=config_overrides\n\
         MpiDefault=none\n\
         ReturnToService=2\n\
         KillOnBadExit=1\n\
         KillWait=5\n"
    );
    for (node, port) in (1..).zip(&ports.nodes) {
        text += &format!(
            "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 \
             RealMemory=1000\n",
            node_name(node)
        );
    }
    text + "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
}

/// Returns the name of a node: an address, so that nothing need resolve it.
fn node_name(node: u16) -> String {
    format!("127.0.0.{}", 10 + node)
}

/// Returns the path of a program, also in the folders of the system's programs.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|path| path.is_file())
}
