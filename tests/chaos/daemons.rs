//! The servers of a cluster: the daemon's binary, one process per task, restarted on its state.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::{Role, Selection};

use crate::chance::Chance;
use crate::links::Links;
use crate::probe;
use crate::process::{LoggedProcess, POLL_INTERVAL, TIMEOUT};
use crate::setting::{
    ADAM_RATE, ChaosSetting, LEASE, MOMENTUM, MOMENTUM_RATE, SHARDS, TOKEN_TIMEOUT, worker_hosts,
};

/// The kind of addresses on which the servers of a cluster listen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DaemonTransport {
    Unix,
    Tcp,
}

impl DaemonTransport {
    /// Returns `count` free addresses.
    pub(crate) fn addresses(self, folder: &Path, count: usize, chance: &mut Chance) -> Vec<String> {
        match self {
            DaemonTransport::Unix => (0..count)
                .map(|task| format!("unix:{}", folder.join(format!("ps-{task}.sock")).display()))
                .collect(),
            DaemonTransport::Tcp => free_ports(count, chance),
        }
    }
}

/// Returns `count` free addresses on ports below the ephemeral range.
///
/// Port 0 would return a port of that range, from which the kernel also takes the source ports of
/// connections. While a server is dead, a client that connects to it could get the server's port as
/// its source port, connect to itself, and keep the restarted server from binding it.
fn free_ports(count: usize, chance: &mut Chance) -> Vec<String> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    while listeners.len() < count {
        let port = 10_000 + chance.below(20_000);
        listeners.extend(TcpListener::bind(format!("127.0.0.1:{port}")));
    }
    let address =
        |listener: &TcpListener| listener.local_addr().expect("a bound listener").to_string();
    listeners.iter().map(address).collect()
}

/// The servers of one cluster.
#[derive(Debug)]
pub(crate) struct Daemons {
    setting: ChaosSetting,
    links: Option<Arc<Links>>,
    running: Vec<Option<LoggedProcess>>,
}

impl Daemons {
    /// Starts a server for each task.
    pub(crate) fn start(setting: &ChaosSetting, links: Option<Arc<Links>>) -> Daemons {
        let running = setting.hosts.iter().map(|_| None).collect();
        let mut daemons = Daemons { setting: setting.clone(), links, running };
        (0..daemons.tasks()).for_each(|task| _ = daemons.restart(task));
        daemons
    }

    pub(crate) fn tasks(&self) -> usize {
        self.running.len()
    }

    /// Starts a server on the state that is there, if any. Returns the time just before the start.
    pub(crate) fn restart(&mut self, task: usize) -> Instant {
        let setting = &self.setting;
        let hosts = match &self.links {
            Some(links) => links.of_server(task, &setting.hosts[task]),
            None => setting.hosts.clone(),
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command
            .args(["--ps-hosts", &hosts.join(",")])
            .args(["--worker-hosts", &worker_hosts().join(",")])
            .args(["--task-index", &task.to_string()])
            .args(["--shards", &setting.shards_per_task().to_string()])
            .args(["--optimizer", "sgd", "--learning-rate", "1"])
            .arg(format!("--optimizer-for=adam=adam --learning-rate {ADAM_RATE}"))
            .arg(format!(
                "--optimizer-for=momentum/*=momentum --learning-rate {MOMENTUM_RATE} --momentum {MOMENTUM}"
            ))
            .arg("--integrity-full")
            .arg("--checkpoint-dir")
            .arg(self.checkpoints())
            .args(["--checkpoint-every-ms", CHECKPOINT_EVERY_MS])
            .args(["--bytes-max", &BYTES_MAX.to_string()])
            .args(["--connections-max", &CONNECTIONS_MAX.to_string()])
            .arg("--state-dir")
            .arg(self.state(task));
        if setting.synchronous {
            let mode = format!("{}/{}", setting.gradients_per_step(), crate::setting::WORKERS);
            let min = format!("shrink:{}", setting.gradients_per_step());
            command.args(["--synchronous", &mode, "--on-loss", &min]);
        }
        if setting.expires {
            command
                .args(["--lease-ms", &LEASE.as_millis().to_string()])
                .args(["--token-timeout-ms", &TOKEN_TIMEOUT.as_millis().to_string()]);
        }
        if self.links.is_some() {
            command.arg("--no-shared-memory");
        }
        let log = self.log(task);
        let now = Instant::now();
        self.running[task] = Some(LoggedProcess::start(format!("ps {task}"), &mut command, log));
        now
    }

    /// Kills a server with SIGKILL. On return its locks and connections are gone too.
    pub(crate) fn kill(&mut self, task: usize) {
        let mut process = self.running[task].take().expect("the server runs");
        process.kill();
        process.wait_killed();
    }

    /// Stops a server with SIGSTOP, until [`Daemons::resume`].
    pub(crate) fn pause(&self, task: usize) {
        self.process(task).stop();
    }

    pub(crate) fn resume(&self, task: usize) {
        self.process(task).resume();
    }

    /// Limits the files of all servers to `bytes`; `None` removes the limit.
    pub(crate) fn limit_files(&self, bytes: Option<u64>) {
        self.running.iter().flatten().for_each(|process| process.limit_files(bytes));
    }

    fn process(&self, task: usize) -> &LoggedProcess {
        self.running[task].as_ref().expect("the server runs")
    }

    /// Waits until all shards of a started server answer or its process ends.
    ///
    /// Returns the status of a process that has ended. The caller must start it again.
    pub(crate) fn await_answers_or_end(&mut self, task: usize) -> Option<ExitStatus> {
        let since = Instant::now();
        let cluster = self.setting.cluster();
        loop {
            let mut shards = self.setting.shards_of(task);
            let answers = |shard| probe::answers(&cluster, shard, Selection::All {});
            if shards.all(|shard| matches!(answers(shard), Ok(true))) {
                return None;
            }
            if let Some(status) = self.running[task].as_mut().expect("the server runs").has_ended()
            {
                self.running[task] = None;
                return Some(status);
            }
            assert!(since.elapsed() < TIMEOUT, "ps {task} neither answers nor ends");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until a server ends that cannot open its state.
    pub(crate) fn await_end(&mut self, task: usize) -> ExitStatus {
        let since = Instant::now();
        let mut process = self.running[task].take().expect("the server runs");
        loop {
            if let Some(status) = process.has_ended() {
                return status;
            }
            assert!(since.elapsed() < TIMEOUT, "ps {task} serves without its state");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until all shards of a server have answered a request. Returns the time from `since`.
    pub(crate) fn await_answers(&mut self, task: usize, since: Instant) -> Duration {
        let cluster = self.setting.cluster();
        for shard in self.setting.shards_of(task) {
            loop {
                let last = match probe::answers(&cluster, shard, Selection::All {}) {
                    Ok(true) => break,
                    Ok(false) => "unexpected answer".to_owned(),
                    Err(error) => error.to_string(),
                };
                self.running[task].as_mut().expect("the server runs").assert_alive();
                assert!(since.elapsed() < TIMEOUT, "{shard} does not answer: {last}");
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        since.elapsed()
    }

    /// Waits until the servers have unmapped the shared memory of clients that are gone. Only the
    /// block table of each shard remains.
    pub(crate) fn await_memory_released(&mut self) {
        let since = Instant::now();
        let block_tables = usize::from(self.setting.shards_per_task());
        for process in self.running.iter_mut().flatten() {
            while process.shared_memories() > block_tables {
                process.assert_alive();
                let shared = process.shared_memories();
                assert!(since.elapsed() < TIMEOUT, "{shared} shared mappings without a client");
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Returns how many connections fewer than the maximum the shards accept while no worker runs.
    ///
    /// Waits for the shards to notice the ends of old connections.
    pub(crate) fn slots_lost(&self) -> u64 {
        let cluster = self.setting.cluster();
        let lost = |index| {
            let shard = self.setting.shard(index);
            // Each other shard has a connection to the step owner.
            let peers = if index == 0 { SHARDS - 1 } else { 0 };
            let since = Instant::now();
            loop {
                let open = || probe::ProbeConnection::open(&cluster, shard, Role::Reader {});
                let mut lines = Vec::new();
                while let Some(line) = open().expect("a server that is up answers a hello") {
                    lines.push(line);
                }
                let lost = CONNECTIONS_MAX.saturating_sub(peers + lines.len());
                if lost == 0 || since.elapsed() > TIMEOUT {
                    return lost as u64;
                }
            }
        };
        (0..SHARDS).map(lost).sum()
    }

    /// Returns how many panics the servers have logged, those of killed processes included.
    pub(crate) fn panics(&self) -> u64 {
        let panics = |task| {
            let log = fs::read(self.log(task)).expect("a server has a log");
            String::from_utf8_lossy(&log).matches("panicked").count() as u64
        };
        (0..self.tasks()).map(panics).sum()
    }

    /// Returns the path of a server's log, which all its processes append to.
    fn log(&self, task: usize) -> PathBuf {
        self.setting.folder.join(format!("ps-{task}.log"))
    }

    pub(crate) fn assert_alive(&mut self) {
        self.running.iter_mut().flatten().for_each(LoggedProcess::assert_alive);
    }

    /// Shuts all servers down with SIGTERM.
    pub(crate) fn stop(&mut self) {
        let running: Vec<LoggedProcess> =
            self.running.iter_mut().filter_map(Option::take).collect();
        running.iter().for_each(LoggedProcess::ask_to_end);
        running.into_iter().for_each(LoggedProcess::finish);
    }

    /// Whether every task has state files.
    pub(crate) fn have_states(&self) -> bool {
        let holds =
            |task| fs::read_dir(self.state(task)).is_ok_and(|mut files| files.any(is_shard));
        (0..self.tasks()).all(holds)
    }

    /// Returns the state directory of a task.
    pub(crate) fn state(&self, task: usize) -> PathBuf {
        self.setting.folder.join(format!("state-{task}"))
    }

    /// Returns the checkpoint directory.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.setting.folder.join("checkpoints")
    }
}

/// The interval at which the servers save checkpoints.
const CHECKPOINT_EVERY_MS: &str = "250";

/// The maximum number of connections per shard: small, so that leaked connections are noticed soon.
const CONNECTIONS_MAX: usize = 64;

/// The memory limit of a server: many times the variables, four whole pushes and their copies, and
/// more than all tables may need, so that push slots and push buffers have memory too.
const BYTES_MAX: u64 = 2 << 30;

fn is_shard(entry: std::io::Result<fs::DirEntry>) -> bool {
    entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("shard"))
}
