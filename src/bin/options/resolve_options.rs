//! [`ResolveOptions`]: the cluster and the task of this process, as its launcher tells them.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, Args};
use pushpull::cluster::rendezvous::{ClusterRendezvous, RendezvousEvent};
use pushpull::cluster::resolve::{
    Known, RendezvousPlan, Resolution, ResolveError, Resolver, resolve,
};
use pushpull::error::{Chain, ClusterError, ListenError};
use pushpull::server::enter_private_folder;
use pushpull::{ClusterSpec, TaskId};

use super::{ClusterMeeting, MeetingAccess, MeetingError, TaskOptions};

/// The flags by which a launcher's variables become a cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ResolveOptions {
    /// Source of the cluster: auto, flags, tf-config, tony, dmlc, slurm, mpi, kubernetes
    #[arg(long, value_name = "LAUNCHER")]
    pub(crate) resolve: Option<Resolver>,
    /// Number of ps tasks, which are the first ranks of the launcher
    #[arg(long, value_name = "N")]
    num_ps: Option<u32>,
    /// Number of workers, if the launcher does not tell it
    #[arg(long, value_name = "M")]
    num_workers: Option<u32>,
    /// Port of the first task on each host
    #[arg(long, value_name = "PORT", default_value_t = Known::BASE_PORT)]
    base_port: u16,
    /// StatefulSet and headless Service of the ps tasks in Kubernetes
    #[arg(long, value_name = "NAME", value_parser = dns_label)]
    ps_service: Option<String>,
    /// Address host:port at which tasks learn the cluster; rank 0 listens there
    #[arg(long, value_name = "ADDRESS", value_parser = host_and_port)]
    rendezvous: Option<String>,
    /// Host at which others reach this task [default: its address there]
    #[arg(long, value_name = "HOST", value_parser = host)]
    advertise: Option<String>,
    /// Stable id of this task at the rendezvous, if no launcher numbers it
    #[arg(long, value_name = "ID", value_parser = task_id, conflicts_with = "task_index")]
    task_id: Option<String>,
    /// Maximum time for all tasks to register at the rendezvous, in ms
    #[arg(long, value_name = "MS", default_value_t = 300_000)]
    rendezvous_timeout_ms: u64,
}

/// The flags that complete a launcher, and have no effect without `--resolve`.
pub(crate) const BESIDE_LAUNCHER: [&str; 8] = [
    "num-ps",
    "num-workers",
    "base-port",
    "ps-service",
    "rendezvous",
    "advertise",
    "task-id",
    "rendezvous-timeout-ms",
];

/// The ways in which a task can be reached, by other flags of the program.
#[derive(Clone, Debug)]
pub(crate) struct JoinAccess<'a> {
    /// Who reaches a rendezvous that this process serves.
    pub(crate) meeting: MeetingAccess,
    /// The address that the task listens on, if it is not that of the cluster.
    pub(crate) listen: Option<&'a str>,
    /// Prints a line about what the task waits for.
    pub(crate) line: fn(&dyn fmt::Display),
}

/// A process that finds its place in a cluster.
#[derive(Debug)]
pub(crate) struct Joining(JoinStage);

#[derive(Debug)]
enum JoinStage {
    Resolved(Box<Resolution>),
    Meeting(Box<Resolution>, ClusterMeeting),
    Scheduler(RendezvousPlan, ClusterRendezvous, fn(&dyn fmt::Display)),
}

/// The place of a process in a cluster.
#[derive(Debug)]
pub(crate) enum Joined {
    /// It is a task. The meeting, if there is one, ends with the process.
    Task(Box<Resolution>, Option<ClusterMeeting>),
    /// It has served the rendezvous, and all tasks have ended.
    Scheduler,
}

/// Lets a flag of [`BESIDE_LAUNCHER`] be given only beside `--resolve`.
pub(crate) fn needs_launcher(flag: Arg) -> Arg {
    match flag.get_long().is_some_and(|name| BESIDE_LAUNCHER.contains(&name)) {
        true => flag.requires("resolve"),
        false => flag,
    }
}

/// The reason why no cluster is resolved.
#[derive(Debug)]
pub(crate) enum ResolveFault {
    /// The flag has an invalid value.
    Flag(&'static str, ClusterError),
    /// The variables or the flags beside them give no cluster.
    Resolve(ResolveError),
    /// The folder of the Unix sockets cannot be used.
    Folder(PathBuf, io::Error),
    /// The address of `--listen` has no port that other tasks can be told.
    Listen(String),
    /// The tasks have not met at the rendezvous.
    Meeting(MeetingError),
}

impl ResolveOptions {
    /// Resolves the cluster and the task from the environment of this process.
    pub(crate) fn resolution(
        &self,
        resolver: Resolver,
        tasks: &TaskOptions,
    ) -> Result<Resolution, ResolveFault> {
        let known = self.known(tasks).map_err(|(flag, error)| ResolveFault::Flag(flag, error))?;
        let lookup = |name: &str| std::env::var(name).ok();
        resolve(resolver, &lookup, &known).map_err(ResolveFault::Resolve)
    }

    /// Resolves the cluster and the task of a process that serves or trains. Creates the private
    /// folder of the Unix sockets of the ps tasks, if they have one, and goes to the rendezvous if
    /// there is one.
    ///
    /// # Errors
    /// Every [`ResolveFault`].
    pub(crate) fn join(
        &self,
        resolver: Resolver,
        tasks: &TaskOptions,
        access: JoinAccess<'_>,
    ) -> Result<Joining, ResolveFault> {
        let resolution = self.resolution(resolver, tasks)?;
        if let Some(folder) = own_folder(&resolution, tasks) {
            enter_private_folder(&folder).map_err(|error| ResolveFault::Folder(folder, error))?;
        }
        self.go_to_rendezvous(resolution, access)
    }

    /// Goes to the rendezvous of a resolution, if there is one.
    ///
    /// # Errors
    /// [`ResolveFault::Meeting`].
    pub(crate) fn go_to_rendezvous(
        &self,
        resolution: Resolution,
        access: JoinAccess<'_>,
    ) -> Result<Joining, ResolveFault> {
        let Some(mut plan) = resolution.rendezvous.clone() else {
            return Ok(Joining(JoinStage::Resolved(Box::new(resolution))));
        };
        let JoinAccess { meeting, listen, line } = access;
        let Some(task) = &mut plan.task else {
            let open = meeting.is_open();
            let rendezvous = ClusterRendezvous::listen(&plan.address, plan.size, open);
            let rendezvous = rendezvous.map(|it| it.credentials(meeting.credentials));
            let rendezvous = rendezvous.map_err(MeetingError::Listen);
            let rendezvous = rendezvous.map_err(ResolveFault::Meeting)?;
            return Ok(Joining(JoinStage::Scheduler(plan, rendezvous, line)));
        };
        if let (Some(port), Some(listen)) = (&mut task.port, listen) {
            let given = listen.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
            let given = given.filter(|&port| port > 0 && !listen.starts_with("unix:"));
            *port = given.ok_or_else(|| ResolveFault::Listen(listen.to_owned()))?;
        }
        let within = Duration::from_millis(self.rendezvous_timeout_ms);
        let meeting = ClusterMeeting::start(plan, within, meeting, line);
        let meeting = meeting.map_err(ResolveFault::Meeting)?;
        Ok(Joining(JoinStage::Meeting(Box::new(resolution), meeting)))
    }

    /// Returns the values of the flags.
    fn known(&self, tasks: &TaskOptions) -> Result<Known, (&'static str, ClusterError)> {
        let hosts = [
            ("--ps-hosts", TaskId::PS_JOB, &tasks.ps_hosts),
            ("--worker-hosts", "worker", &tasks.worker_hosts),
        ];
        let mut known = Known::default();
        for (flag, job, addresses) in hosts.into_iter().filter(|(.., given)| !given.is_empty()) {
            let jobs = ClusterSpec::builder().job(job, addresses).build();
            known.jobs.push((flag, jobs.map_err(|error| (flag, error))?));
        }
        known.job = tasks.job_name.clone();
        known.index = tasks.task_index;
        known.num_ps = self.num_ps;
        known.num_workers = self.num_workers;
        known.base_port = self.base_port;
        known.ps_service = self.ps_service.clone();
        known.rendezvous = self.rendezvous.clone();
        known.advertised_host = self.advertise.clone();
        known.task_id = self.task_id.clone();
        known.socket_folder = Some(runtime_folder());
        known.parent_process = Some(std::os::unix::process::parent_id());
        Ok(known)
    }
}

impl Joining {
    /// Waits until the process has its place: until all tasks have registered, or of a process that
    /// only serves the rendezvous until all have ended.
    ///
    /// # Errors
    /// [`ResolveFault::Meeting`].
    pub(crate) async fn joined(self) -> Result<Joined, ResolveFault> {
        match self.0 {
            JoinStage::Resolved(resolution) => Ok(Joined::Task(resolution, None)),
            JoinStage::Meeting(resolution, mut meeting) => {
                let gathered = meeting.gathered().await.map_err(ResolveFault::Meeting)?;
                let resolution = resolution.gathered(gathered.cluster, gathered.index);
                Ok(Joined::Task(Box::new(resolution), Some(meeting)))
            }
            JoinStage::Scheduler(plan, rendezvous, line) => {
                line(&format_args!("the rendezvous is at {}", plan.address));
                let mut last = None;
                let print = move |event: RendezvousEvent| {
                    // One line for each change, not for each report of it.
                    if last.as_ref() != Some(&event) {
                        line(&event);
                        last = Some(event);
                    }
                };
                rendezvous.serve(print).await;
                line(&"all tasks have ended");
                Ok(Joined::Scheduler)
            }
        }
    }

    /// Waits like [`Joining::joined`], in a thread without a runtime.
    ///
    /// # Errors
    /// [`ResolveFault::Meeting`].
    pub(crate) fn wait(self) -> Result<Joined, ResolveFault> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime =
            runtime.map_err(|error| ResolveFault::Meeting(MeetingError::Thread(error)))?;
        runtime.block_on(self.joined())
    }
}

/// Parses a name that Kubernetes can give to a Service: a label of DNS.
fn dns_label(text: &str) -> Result<String, &'static str> {
    let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = (1..=63).contains(&text.len()) && text.bytes().all(is_part);
    match is_label && !text.starts_with('-') && !text.ends_with('-') {
        true => Ok(text.to_owned()),
        false => Err("a name is lower-case letters, digits and inner hyphens, at most 63"),
    }
}

/// Parses the address `host:port` of a rendezvous.
fn host_and_port(text: &str) -> Result<String, String> {
    match ClusterSpec::check_address(text) {
        Ok(()) if !text.starts_with("unix:") => Ok(text.to_owned()),
        Ok(()) => Err("a rendezvous has the address host:port".to_owned()),
        Err(problem) => Err(problem.to_string()),
    }
}

/// Parses a host without a port.
fn host(text: &str) -> Result<String, String> {
    host_and_port(&format!("{text}:1")).map(|_| text.to_owned())
}

/// Parses the stable id of a task.
fn task_id(text: &str) -> Result<String, &'static str> {
    let is_id = (1..=128).contains(&text.len()) && !text.contains(char::is_whitespace);
    if is_id { Ok(text.to_owned()) } else { Err("an id has 1 to 128 bytes and no spaces") }
}

/// Returns the folder for the sockets of this user's processes.
fn runtime_folder() -> PathBuf {
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    folder.map_or_else(std::env::temp_dir, PathBuf::from)
}

/// Returns the private folder of the job's Unix sockets, unless flags give the ps tasks.
fn own_folder(resolution: &Resolution, tasks: &TaskOptions) -> Option<PathBuf> {
    let (_, first) = resolution.cluster.ps_tasks().next().filter(|_| tasks.ps_hosts.is_empty())?;
    let folder = Path::new(first.strip_prefix("unix:")?).parent()?;
    (folder.parent() == Some(&runtime_folder())).then(|| folder.to_owned())
}

impl fmt::Display for ResolveFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ResolveFault::Flag(flag, error) => write!(f, "{flag}: {error}"),
            ResolveFault::Resolve(error) => error.fmt(f),
            ResolveFault::Folder(folder, error) => {
                write!(f, "cannot use the folder {}: {error}", folder.display())
            }
            ResolveFault::Listen(listen) => write!(
                f,
                "--listen {listen}: the other tasks learn the port at the rendezvous: give host:port \
                 with a port above 0"
            ),
            ResolveFault::Meeting(MeetingError::Listen(error @ ListenError::Exposed { .. })) => {
                write!(f, "{error}: give --insecure")
            }
            ResolveFault::Meeting(MeetingError::Listen(error @ ListenError::Elsewhere { .. })) => {
                write!(f, "{error}: the rendezvous must be on the host of this process")
            }
            ResolveFault::Meeting(MeetingError::Listen(error)) => Chain(error).fmt(f),
            ResolveFault::Meeting(MeetingError::Register(error)) => Chain(error).fmt(f),
            ResolveFault::Meeting(MeetingError::Thread(error)) => {
                write!(f, "cannot start a thread for the rendezvous: {error}")
            }
        }
    }
}

impl Error for ResolveFault {}
