//! `pushpull launch`: starts the tasks of a cluster, prints and logs their lines, starts failed ones
//! again, and ends all of them together.
//!
//! `plan` and `hosts` decide what runs where, and `supervisor` when it starts and ends: they are pure.
//! `ports`, `keys`, `sync` and `program` prepare, `process` has one start of a task, and `output` the
//! thread that writes. `child` is the process that becomes a task; `remote` is its shell on another host.

mod child;
mod hosts;
mod keys;
mod lines;
mod options;
mod output;
mod plan;
mod ports;
mod process;
mod program;
mod remote;
mod supervisor;
mod sync;

use std::error::Error;
use std::future::pending;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

pub(crate) use child::{ChildOptions, run as become_child};
pub(crate) use options::LaunchOptions;

use super::options::EndSignals;
use super::output::{print_error, print_lines};
use hosts::{HostSlots, Place};
use options::HostOptions;
use output::{LogFile, Printer};
use plan::{Plan, PlannedTask};
use ports::HeldPorts;
use process::{Orders, TaskProcess, TaskStart};
use program::find_program;
use supervisor::{Action, Policy, Supervisor, TaskEnd, TaskKind};
use sync::HostCopy;

/// First port of a host, as the classic documents have it.
const REMOTE_PORT: u16 = 2222;

/// Time for the last lines after a signal, if nobody reads them.
const LAST_LINES: Duration = Duration::from_secs(5);

/// Runs the tasks. Returns the exit code of the launch.
pub(crate) fn run(options: &LaunchOptions) -> Result<ExitCode, Box<dyn Error>> {
    options.parent.apply()?;
    let options = &options.clone().with_job()?;
    let launch = Launch::prepare(options)?;
    print_lines(&launch.plan.cluster_lines())?;
    launch.note.iter().try_for_each(|note| print_lines(note))?;
    if options.programs.dry_run {
        for start in &launch.starts {
            print_lines(&start.shell_line)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let say = |line: &str| {
        // A copy goes on without readers.
        let _ = print_lines(line);
    };
    let HostOptions { hosts, agent, sync, .. } = &options.hosts;
    let keys = launch.plan.keys.as_ref();
    // Locked until the launch has ended.
    let _lock = keys.map(|keys| keys.create(&launch.plan.ps_hosts())).transpose()?;
    if let Some(keys) = keys {
        let directory = keys.directory();
        let files = &keys::FILES;
        let copy = HostCopy { flag: "--secure", directory, files, is_private: true };
        sync::copy_to_hosts(copy, hosts, agent, say)?;
    }
    if let Some(directory) = sync {
        let copy = HostCopy { flag: "--sync", directory, files: &["."], is_private: false };
        sync::copy_to_hosts(copy, hosts, agent, say)?;
    }
    let logs = launch.logs(options)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // This thread starts the tasks, and lasts as long as this process: the kernel would take its end
    // for that of the launcher.
    let code = runtime.block_on(launch.run(logs))?;
    Ok(ExitCode::from(code))
}

/// A launch that is prepared: nothing has been started.
struct Launch {
    plan: Plan,
    starts: Vec<Start>,
    /// A line to print beside the cluster.
    note: Option<String>,
    policy: Policy,
    /// Held until the launch has ended, so that a task finds its port again at a restart.
    _ports: Option<HeldPorts>,
}

/// What is started, once or several times.
struct Start {
    /// The name in lines of the launcher, such as `/job:worker/task:1`.
    title: String,
    /// The name before each line, such as `worker:1`.
    name: String,
    kind: TaskKind,
    /// The command as a line for a shell on its host.
    shell_line: String,
    /// The program with its arguments.
    words: Vec<String>,
    /// The value of `TF_CONFIG`.
    tf_config: Option<String>,
    orders: Orders,
}

impl Launch {
    fn prepare(options: &LaunchOptions) -> Result<Launch, Box<dyn Error>> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let hosts = &options.hosts.hosts;
        let board = options.output.tensorboard.as_ref();
        let board = board.and_then(|directory| match find_program("tensorboard", &path) {
            Ok(program) => Some((program, directory)),
            Err(error) => {
                print_error(&format_args!("--tensorboard: {error}: the tasks run without"));
                None
            }
        });
        let daemon = daemon_path();
        if hosts.is_empty() {
            let is_daemon = options.programs.ps_daemon || options.program.is_empty();
            let daemon = is_daemon.then_some(&daemon);
            for program in options.program.first().into_iter().chain(daemon) {
                find_program(program, &path)?;
            }
        } else {
            find_program(options.hosts.agent.0.first().map_or("", String::as_str), &path)?;
        }
        let places = Places::of(options, usize::from(board.is_some()))?;
        let plan = Plan::new(options, &places.ps, &places.workers, &daemon)?;
        let kill_after = Duration::from_secs(options.ends.kill_after.into());
        let mut starts = Vec::new();
        let mut note = None;
        for (task, host) in plan.tasks.iter().zip(&places.hosts) {
            let host = host.map(|host| (&hosts[host], &options.hosts.agent, kill_after));
            starts.push(Start::of_task(task, host)?);
        }
        if let (Some((program, directory)), Some(address)) = (board, places.further.first()) {
            let (host, port) = address.rsplit_once(':').unwrap_or((address, "6006"));
            let program = program.to_string_lossy();
            let directory = directory.to_string_lossy();
            let words = [&*program, "--logdir", &*directory, "--host", host, "--port", port];
            note = Some(format!("TensorBoard on http://{address}/ shows {directory}"));
            starts.push(Start {
                title: "tensorboard".to_owned(),
                name: "tensorboard".to_owned(),
                kind: TaskKind::Companion,
                shell_line: plan::shell_line(words),
                words: words.map(str::to_owned).to_vec(),
                tf_config: None,
                orders: Orders::Signals,
            });
        }
        let policy = Policy {
            restarts: options.ends.restart,
            grace: Duration::from_secs(options.ends.grace.into()),
            kill_after,
        };
        Ok(Launch { plan, starts, note, policy, _ports: places.held })
    }

    /// Opens the log files, one for each start.
    fn logs(&self, options: &LaunchOptions) -> Result<Vec<LogFile>, String> {
        let Some(directory) = &options.output.logs else { return Ok(Vec::new()) };
        std::fs::create_dir_all(directory)
            .map_err(|error| format!("--logs {}: {error}", directory.display()))?;
        self.starts.iter().map(|start| LogFile::open(directory, &start.name)).collect()
    }

    /// Starts the tasks, and returns the exit code when all have ended.
    async fn run(&self, logs: Vec<LogFile>) -> std::io::Result<u8> {
        let mut signals = EndSignals::watch()?;
        let is_logged = !logs.is_empty();
        let (printer, written) = Printer::start(logs)?;
        let tasks = self.starts.iter().map(|start| (start.title.clone(), start.kind));
        let mut running = Running {
            launch: self,
            is_logged,
            supervisor: Supervisor::new(tasks, self.policy),
            processes: self.starts.iter().map(|_| None).collect(),
            ends: JoinSet::new(),
            printer,
            is_hurried: false,
        };
        let code = running.run(&mut signals).await;
        let is_hurried = running.is_hurried;
        drop(running);
        wait_for_lines(written, &mut signals, is_hurried).await;
        Ok(code)
    }
}

/// Waits until all lines are written. Who reads slowly loses none, unless a signal has come.
async fn wait_for_lines(
    written: oneshot::Receiver<()>,
    signals: &mut EndSignals,
    is_hurried: bool,
) {
    let limit = async { if is_hurried { sleep(LAST_LINES).await } else { pending().await } };
    tokio::select! {
        _ = written => {}
        () = signals.any() => {}
        () = limit => {}
    }
}

/// The addresses of the tasks.
struct Places {
    ps: Vec<String>,
    workers: Vec<String>,
    /// The host of each task, ps tasks first; `None` for this machine.
    hosts: Vec<Option<usize>>,
    /// Addresses of this machine for companions, such as TensorBoard.
    further: Vec<String>,
    held: Option<HeldPorts>,
}

impl Places {
    /// Places the tasks, and takes `further` more ports.
    fn of(options: &LaunchOptions, further: usize) -> Result<Places, Box<dyn Error>> {
        let size = &options.size;
        // The parser accepts at most 1024 of each.
        let num_ps = size.num_ps() as usize;
        let num_workers = size.num_workers() as usize;
        let tasks = num_ps + num_workers;
        let free = |count| {
            HeldPorts::take(count)
                .map_err(|error| format!("cannot take {count} free ports: {error}"))
        };
        let hosts = &options.hosts.hosts;
        if !hosts.is_empty() {
            let base = size.base_port.unwrap_or(REMOTE_PORT);
            let (ps, workers) = hosts::place(hosts, num_ps, num_workers, base)?;
            let addresses = |places: &[Place]| places.iter().map(|at| at.address.clone()).collect();
            let held = free(further)?;
            return Ok(Places {
                ps: addresses(&ps),
                workers: addresses(&workers),
                hosts: ps.iter().chain(&workers).map(|place| Some(place.host)).collect(),
                further: held.addresses.clone(),
                held: Some(held),
            });
        }
        let held = free(if size.base_port.is_some() { further } else { tasks + further })?;
        let mut addresses = match size.base_port {
            None => held.addresses.clone(),
            Some(base) => HeldPorts::check(base, tasks)
                .map_err(|(port, error)| format!("--base-port {base}: port {port}: {error}"))?
                .into_iter()
                .chain(held.addresses.iter().cloned())
                .collect(),
        };
        let further = addresses.split_off(tasks);
        let workers = addresses.split_off(num_ps);
        Ok(Places { ps: addresses, workers, hosts: vec![None; tasks], further, held: Some(held) })
    }
}

impl Start {
    /// Returns the start of a task, here or by an agent on a host.
    fn of_task(
        task: &PlannedTask,
        host: Option<(&HostSlots, &options::Words, Duration)>,
    ) -> Result<Start, Box<dyn Error>> {
        let start = Start {
            title: task.task.to_string(),
            name: task.name(),
            kind: if &*task.task.job == "ps" { TaskKind::Ps } else { TaskKind::Worker },
            shell_line: task.shell_line(),
            words: task.command.clone(),
            tf_config: Some(task.tf_config.clone()),
            orders: Orders::Signals,
        };
        let Some((host, agent, kill_after)) = host else { return Ok(start) };
        let directory = std::env::current_dir()?;
        let line = remote::remote_line(task, &directory.to_string_lossy(), kill_after);
        let command = sync::agent_command(agent, host, &line);
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(|word| word.to_string_lossy().into_owned()).collect();
        let title = format!("{} on {}", start.title, host.name);
        Ok(Start { title, words, tf_config: None, orders: Orders::Lines, ..start })
    }

    /// Returns the command that starts it.
    fn command(&self) -> Command {
        let mut command = match self.orders {
            // An agent must outlive the launcher, so that it ends what runs on its host.
            Orders::Lines => {
                let mut words = self.words.iter();
                let mut command = Command::new(words.next().map_or("", String::as_str));
                command.args(words);
                command
            }
            Orders::Signals => {
                let mut command = Command::new(own_program());
                command.arg0("pushpull").arg("launch-child");
                command.args(["--parent", &std::process::id().to_string(), "--"]);
                command.args(&self.words);
                command
            }
        };
        command.envs(self.tf_config.iter().map(|config| ("TF_CONFIG", config)));
        command
    }
}

/// A launch whose tasks run.
struct Running<'a> {
    launch: &'a Launch,
    is_logged: bool,
    supervisor: Supervisor,
    /// The last start of each task.
    processes: Vec<Option<TaskProcess>>,
    ends: JoinSet<(usize, TaskEnd)>,
    printer: Printer,
    /// Whether lines are waited for no longer than a few seconds.
    is_hurried: bool,
}

impl Running<'_> {
    async fn run(&mut self, signals: &mut EndSignals) -> u8 {
        loop {
            while let Some(action) = self.supervisor.next_action() {
                self.carry_out(action);
            }
            if let Some(code) = self.supervisor.exit_code() {
                return code;
            }
            let due = self.supervisor.deadline();
            let due = async {
                match due {
                    Some(due) => sleep_until(due.into()).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                signal = signals.next() => {
                    let number = u8::try_from(signal.as_raw_value()).unwrap_or(u8::MAX);
                    self.signalled(number);
                }
                Some(ended) = self.ends.join_next() => match ended {
                    Ok((task, end)) => self.supervisor.ended(Instant::now(), task, &end),
                    // A start whose end nobody will tell: all end, and it is given up.
                    Err(error) => {
                        self.printer.complain(&format!("cannot watch a task: {error}"));
                        self.signalled(SIGTERM);
                    }
                },
                () = due => self.supervisor.tick(Instant::now()),
            }
        }
    }

    fn signalled(&mut self, number: u8) {
        self.is_hurried = true;
        self.supervisor.signalled(Instant::now(), number);
    }

    fn carry_out(&mut self, action: Action) {
        let process = |task: usize| self.processes[task].as_ref();
        match action {
            Action::Start { task, incarnation } => self.start(task, incarnation),
            Action::Terminate(task) => process(task).into_iter().for_each(TaskProcess::terminate),
            Action::Kill(task) => process(task).into_iter().for_each(TaskProcess::kill),
            Action::GiveUp(task) => {
                process(task).into_iter().for_each(TaskProcess::give_up);
                self.is_hurried = true;
            }
            Action::Say(line) => self.printer.say(&line),
            Action::Complain(line) => self.printer.complain(&line),
        }
    }

    fn start(&mut self, task: usize, incarnation: u32) {
        let start = &self.launch.starts[task];
        let log = self.is_logged.then_some(task);
        let task_start = TaskStart {
            index: task,
            name: start.name.clone(),
            incarnation,
            log,
            orders: start.orders,
            kill_after: self.launch.policy.kill_after,
        };
        match TaskProcess::start(start.command(), task_start, &self.printer, &mut self.ends) {
            Ok(process) => {
                let pid = rustix::process::Pid::as_raw(Some(process.pid));
                let title = &start.title;
                self.printer.say(&format!("started {title} pid {pid} incarnation {incarnation}"));
                self.processes[task] = Some(process);
            }
            Err(error) => {
                let end = TaskEnd::NotStarted(error.to_string());
                self.supervisor.ended(Instant::now(), task, &end);
            }
        }
    }
}

/// The number of SIGTERM.
const SIGTERM: u8 = 15;

/// Returns the path of this program. On Linux it is right also after an upgrade has replaced the file.
fn own_program() -> PathBuf {
    const LINUX: &str = "/proc/self/exe";
    let own = || std::env::current_exe().unwrap_or_else(|_| LINUX.into());
    if cfg!(target_os = "linux") { LINUX.into() } else { own() }
}

/// Returns the daemon beside this program, or its name for `PATH` if there is none.
fn daemon_path() -> String {
    const DAEMON: &str = "pushpull-ps";
    let own = std::env::current_exe().ok();
    let beside = own.map(|own| own.with_file_name(DAEMON)).filter(|daemon| daemon.is_file());
    let beside = beside.and_then(|daemon| daemon.into_os_string().into_string().ok());
    beside.unwrap_or_else(|| DAEMON.to_owned())
}
