//! One task of a cluster of processes, for the examples: its flags, and its server if it is a ps
//! task.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgGroup, ArgMatches, Args, Command, CommandFactory, FromArgMatches};
use pushpull::error::Chain;
use pushpull::job::Settings;
use pushpull::security::Credentials;
use pushpull::{ClusterSpec, Ps, PsConfig, TaskId};

#[path = "../../src/bin/options/mod.rs"]
mod classic;

use classic::{JobLine, JoinAccess, Joined, Joining, MeetingAccess};

#[allow(unused_imports, reason = "each example uses a part")]
pub(crate) use classic::{EndSignals, JobOptions, ModeOptions, Replicas, local_path};

/// An error of any thread.
pub(crate) type TaskError = Box<dyn Error + Send + Sync>;

/// The flags of one process of a cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
#[command(group(ArgGroup::new("task_origin").args(["job_name", "resolve"]).multiple(true)))]
#[command(group(ArgGroup::new("ps_origin").args(["ps_hosts", "resolve"]).multiple(true)))]
#[command(group(ArgGroup::new("worker_origin").args(["worker_hosts", "resolve"]).multiple(true)))]
#[command(mut_arg("ps_hosts", |hosts: Arg| hosts.requires("task_origin")))]
#[command(mut_arg("worker_hosts", |hosts: Arg| hosts.requires("task_origin")))]
#[command(mut_arg("job_name", |job: Arg| job.requires("ps_origin").requires("worker_origin")))]
#[command(mut_arg("task_index", |index: Arg| index.requires("task_origin")))]
pub(crate) struct ProcessOptions {
    #[command(flatten)]
    tasks: classic::TaskOptions,
    #[command(flatten)]
    resolve: classic::ResolveOptions,
    /// Keep a parameter server running when all workers have left
    #[arg(long, requires = "task_origin")]
    keep_serving: bool,
    /// Time for which a parameter server then waits for another worker, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        requires = "task_origin",
        conflicts_with = "keep_serving"
    )]
    exit_grace: u64,
    /// Let in everybody where other machines can reach it, without encryption
    #[arg(long, requires = "task_origin")]
    insecure: bool,
    #[command(flatten)]
    security: classic::SecurityOptions,
    #[command(flatten)]
    parent: classic::ExitWithParent,
}

/// The flags of [`ProcessOptions`] that have an effect on a ps task alone.
const PROCESS_FLAGS_OF_PS: [&str; 3] = ["--keep-serving", "--exit-grace", "--insecure"];

/// The flags that were given on a command line, and the settings of the job file that it names.
#[derive(Clone, Debug)]
pub(crate) struct GivenFlags {
    matches: ArgMatches,
    line: JobLine,
    command: Command,
}

/// The settings of a job file that only a process of a cluster of processes uses.
const OF_A_PROCESS: [&str; 8] = [
    "ps-hosts",
    "worker-hosts",
    "insecure",
    "tls-cert",
    "tls-key",
    "tls-ca",
    "tokens",
    "state-dir",
];

/// The flags of an example that have an effect in the tasks of one job alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobFlags {
    /// Those of a ps task.
    pub(crate) ps: &'static [&'static str],
    /// Those of a worker.
    pub(crate) worker: &'static [&'static str],
}

impl GivenFlags {
    /// Refuses a flag that has no effect in the task of this process.
    pub(crate) fn check(&self, role: Option<&Role>, flags: JobFlags) -> Result<(), TaskError> {
        let (unused, job) = match role {
            None => return Ok(()),
            Some(Role::Ps(..)) => (flags.worker.to_vec(), "workers"),
            Some(Role::Worker(..)) => ([flags.ps, &PROCESS_FLAGS_OF_PS].concat(), "ps tasks"),
        };
        match (role, unused.into_iter().find(|flag| self.has(flag))) {
            (Some(role), Some(flag)) => {
                let task = role.task();
                Err(format!("{flag}: it has no effect in {task}: give it to {job} alone").into())
            }
            _ => Ok(()),
        }
    }

    /// Returns whether a flag was typed.
    fn has(&self, flag: &str) -> bool {
        let id = flag.trim_start_matches('-').replace('-', "_");
        // Not every example has the flags of job files.
        let is_given = self.matches.try_contains_id(&id).is_ok()
            && self.matches.value_source(&id) == Some(ValueSource::CommandLine);
        is_given && self.line.of_file(flag).is_none()
    }

    /// Returns the settings of the job file and of the flags.
    #[allow(dead_code, reason = "not every example reads job files")]
    pub(crate) fn settings(&self) -> Settings {
        self.line.settings(&self.command, &self.matches)
    }
}

/// What a process of a cluster does.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// It serves variables.
    Ps(TaskId, ClusterSpec),
    /// It trains.
    Worker(TaskId, ClusterSpec),
}

impl ProcessOptions {
    /// Ends this process with its parent, if the flag says so.
    pub(crate) fn follow_parent(&self) -> Result<(), TaskError> {
        Ok(self.parent.apply()?)
    }

    /// Returns whether this process ends with its parent.
    #[allow(dead_code, reason = "not every example handles signals")]
    pub(crate) fn follows_parent(&self) -> bool {
        self.parent.exit_with_parent
    }

    /// Returns what this process proves itself with as a task.
    pub(crate) fn credentials(&self, task: &TaskId) -> Result<Option<Credentials>, TaskError> {
        Ok(self.security.credentials(task)?)
    }

    /// Returns the role of this process; `None` if the whole cluster runs in it.
    pub(crate) fn role(&self) -> Result<Option<Role>, TaskError> {
        if let Some(resolver) = self.resolve.resolve {
            let credentials = self.security.credentials(&self.tasks.joining_task())?;
            let access = JoinAccess {
                meeting: MeetingAccess { insecure: self.insecure, credentials },
                listen: None,
                line: |line| _ = writeln!(io::stderr(), "{line}"),
            };
            let joined = self.resolve.join(resolver, &self.tasks, access);
            let joined = joined.and_then(Joining::wait);
            let resolution = match joined.map_err(|fault| format!("--resolve: {fault}"))? {
                Joined::Task(resolution, _) => resolution,
                // The scheduler of a cluster trains nothing.
                Joined::Scheduler => std::process::exit(0),
            };
            let task = resolution.task.ok_or("--resolve: give --job-name and --task-index")?;
            return Role::of(task, resolution.cluster).map(Some);
        }
        let Some(job) = &self.tasks.job_name else {
            return Ok(None);
        };
        let cluster = self.tasks.cluster().map_err(|(flag, error)| format!("{flag}: {error}"))?;
        let index = self.tasks.index();
        let role = Role::of(TaskId::new(job.as_str(), index), cluster)?;
        let found = role.cluster().require(job, index);
        found.map_err(|error| format!("--task-index {index}: {error}"))?;
        Ok(Some(role))
    }

    /// Runs the parameter server of a ps task: until all workers have left, or with
    /// `--keep-serving` until a signal, such as Ctrl-C.
    pub(crate) fn serve(&self, config: PsConfig, role: &Role) -> Result<(), TaskError> {
        let task = role.task();
        let cluster = role.cluster();
        let address = cluster.task_address(&task.job, task.index)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            // From the beginning, so that a signal never kills a server that has answered a worker.
            let mut signals = EndSignals::watch()?;
            let credentials = self.credentials(task)?;
            let listener = match &credentials {
                _ if self.insecure => Ps::listen_insecure(address).await?,
                Some(credentials) => Ps::listen_secured(address, credentials).await?,
                None => Ps::listen(address).await?,
            };
            let config = config.credentials(credentials);
            // The server runs even if its lines cannot be written.
            let _ = writeln!(io::stdout(), "{task} serves on {}", listener.address());
            let config = match self.keep_serving {
                true => config,
                false => config.exit_when_done(Duration::from_secs(self.exit_grace)),
            };
            let config = config.on_event(|event| _ = writeln!(io::stderr(), "{event}"));
            let server = listener.start(config)?;
            let handle = server.handle();
            server.serve(async move { signals.any().await }).await?;
            if let Some(error) = handle.saves().last_error {
                return Err(format!("the last save of a checkpoint failed: {error}").into());
            }
            let _ = writeln!(io::stdout(), "{task} is done");
            Ok(())
        })
    }
}

impl Role {
    /// Returns the role of a task of the job `ps` or `worker`.
    fn of(task: TaskId, cluster: ClusterSpec) -> Result<Role, TaskError> {
        match &*task.job {
            "ps" => Ok(Role::Ps(task, cluster)),
            "worker" => Ok(Role::Worker(task, cluster)),
            job => Err(format!("--job-name {job}: the jobs are ps and worker").into()),
        }
    }

    /// Returns the task of this process.
    pub(crate) fn task(&self) -> &TaskId {
        let (Role::Ps(task, _) | Role::Worker(task, _)) = self;
        task
    }

    /// Returns the cluster.
    pub(crate) fn cluster(&self) -> &ClusterSpec {
        let (Role::Ps(_, cluster) | Role::Worker(_, cluster)) = self;
        cluster
    }
}

/// Returns the number of workers of the cluster of a process, or `here` if the whole cluster runs
/// in it.
pub(crate) fn workers(role: Option<&Role>, here: u32) -> u32 {
    role.map_or(here, |role| classic::listed_workers(role.cluster()))
}

/// Parses a command line, each flag with hyphens or with underscores, and the job file that it names.
/// `renamed` has the settings whose flag has another name, each with that. Prints help and errors,
/// and exits, as [`clap::Parser::parse_from`] does.
pub(crate) fn parse<T: CommandFactory + FromArgMatches>(
    line: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    renamed: &'static [(&'static str, &'static str)],
) -> (T, GivenFlags) {
    let command =
        T::command().mut_args(classic::takes_hyphen).mut_args(classic::accepts_underscores);
    let command = command.mut_args(classic::needs_launcher);
    let line = JobLine::read(&command, line, renamed, |flag, named| {
        let is_process = ["job-name", "resolve"].iter().any(|name| named.contains(*name));
        is_process || !OF_A_PROCESS.contains(&flag)
    });
    let line = line.unwrap_or_else(|error| {
        command.clone().error(ErrorKind::ValueValidation, Chain(&error)).exit()
    });
    let matches = command.clone().try_get_matches_from(&line.words);
    let parsed = matches.and_then(|matches| Ok((T::from_arg_matches(&matches)?, matches)));
    let (options, matches) = parsed.unwrap_or_else(|error| {
        let notes = line.notes(&error.to_string());
        if error.use_stderr() && !notes.is_empty() {
            // The error itself follows, even if this cannot be written.
            let _ = write!(io::stderr(), "of the job file:\n{notes}");
        }
        error.exit()
    });
    let given = GivenFlags { matches, line, command };
    if given.has("--print-config") {
        let printed = given.line.printed(&given.command, &given.matches);
        let mut output = io::stdout();
        let written = output.write_all(printed.as_bytes()).and_then(|()| output.flush());
        std::process::exit(i32::from(written.is_err()));
    }
    (options, given)
}
