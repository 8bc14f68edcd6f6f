//! [`ResolveOptions`]: the cluster and the task of this process, as its launcher tells them.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Arg, Args};
use pushpull::cluster::resolve::{Known, Resolution, ResolveError, Resolver, resolve};
use pushpull::error::ClusterError;
use pushpull::server::enter_private_folder;
use pushpull::{ClusterSpec, TaskId};

use super::TaskOptions;

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
}

/// The flags that complete a launcher, and have no effect without `--resolve`.
pub(crate) const BESIDE_LAUNCHER: [&str; 4] = ["num-ps", "num-workers", "base-port", "ps-service"];

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
    /// folder of the Unix sockets of the ps tasks, if they have one.
    pub(crate) fn join(
        &self,
        resolver: Resolver,
        tasks: &TaskOptions,
    ) -> Result<Resolution, ResolveFault> {
        let resolution = self.resolution(resolver, tasks)?;
        let Some(folder) = own_folder(&resolution, tasks) else {
            return Ok(resolution);
        };
        match enter_private_folder(&folder) {
            Ok(()) => Ok(resolution),
            Err(error) => Err(ResolveFault::Folder(folder, error)),
        }
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
        known.socket_folder = Some(runtime_folder());
        known.parent_process = Some(std::os::unix::process::parent_id());
        Ok(known)
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
        }
    }
}

impl Error for ResolveFault {}
