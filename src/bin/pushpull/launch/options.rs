//! The command line of `pushpull launch`, grouped as its help shows it.

use std::error::Error;
use std::path::PathBuf;

use clap::{ArgGroup, Args, value_parser};
use pushpull::job::Job;

use super::super::options::ExitWithParent;
use super::super::options::accepts_underscores;
use super::super::options::local_path;
use super::hosts::HostSlots;

/// Options of `pushpull launch`.
#[derive(Clone, Debug, Args)]
#[command(after_help = DETAILS, mut_args(accepts_underscores))]
#[command(group(ArgGroup::new("tasks").args(["program", "job"]).multiple(true)))]
pub(crate) struct LaunchOptions {
    /// Job file with the numbers of tasks, the settings of pushpull-ps and the program of the workers
    #[arg(value_name = "JOB", value_parser = local_path())]
    pub(super) job: Option<PathBuf>,
    /// Program of the tasks and its arguments, behind `--` [default: pushpull-ps as ps tasks alone]
    #[arg(last = true, value_name = "PROGRAM")]
    pub(super) program: Vec<String>,
    #[command(flatten)]
    pub(super) size: SizeOptions,
    #[command(flatten)]
    pub(super) programs: ProgramOptions,
    #[command(flatten)]
    pub(super) ends: EndOptions,
    #[command(flatten)]
    pub(super) output: OutputOptions,
    #[command(flatten)]
    pub(super) hosts: HostOptions,
    #[command(flatten)]
    pub(super) parent: ExitWithParent,
}

/// The size of the cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct SizeOptions {
    /// Number of ps tasks [default: that of the job, or 1]
    #[arg(long, value_name = "N", value_parser = tasks(1))]
    num_ps: Option<u32>,
    /// Number of workers [default: that of the job, or 1]
    #[arg(
        long,
        aliases = ["num-worker", "num_worker"],
        value_name = "N",
        value_parser = tasks(0)
    )]
    num_workers: Option<u32>,
    /// First port of each host [default: free ports, or with --hosts 2222]
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub(super) base_port: Option<u16>,
}

/// The programs of the tasks.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Programs")]
pub(super) struct ProgramOptions {
    /// Run pushpull-ps as the ps tasks, and the program as the workers alone
    #[arg(long, requires = "tasks")]
    pub(super) ps_daemon: bool,
    /// Further arguments of the ps tasks, split as a shell does
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, value_parser = words)]
    pub(super) ps_args: Option<Words>,
    /// Further arguments of the workers, split as a shell does
    #[arg(
        long,
        value_name = "ARGS",
        allow_hyphen_values = true,
        requires = "tasks",
        value_parser = words
    )]
    pub(super) worker_args: Option<Words>,
    /// Pass the cluster to the program in TF_CONFIG alone, not as flags
    #[arg(long, requires = "tasks")]
    pub(super) no_flags: bool,
    /// Print the cluster and the command of each task, and start nothing
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// When tasks start again and when they end.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Restarts and ends")]
pub(super) struct EndOptions {
    /// Number of times that a task which fails is started again
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) restart: u32,
    /// Time for ps tasks to end by themselves after the last worker, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = seconds(0))]
    pub(super) grace: u32,
    /// Time from SIGTERM to SIGKILL, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = seconds(1))]
    pub(super) kill_after: u32,
}

/// Logs and TensorBoard.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputOptions {
    /// Directory of log files, one for each task, appended to [default: none]
    #[arg(long, value_name = "DIR", value_parser = local_path())]
    pub(super) logs: Option<PathBuf>,
    /// Start TensorBoard on the summaries in this directory, or in ./summaries
    #[arg(
        long,
        value_name = "DIR",
        num_args = 0..=1,
        default_missing_value = "summaries",
        value_parser = local_path()
    )]
    pub(super) tensorboard: Option<PathBuf>,
}

/// Other machines.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Hosts")]
pub(super) struct HostOptions {
    /// Directory for new TLS keys and an access token, which the tasks get [default: none]
    #[arg(long, help_heading = "Security", value_name = "DIR", value_parser = local_path())]
    pub(super) secure: Option<PathBuf>,
    /// Hosts of the tasks, each with its number of tasks [default: this machine]
    #[arg(long, value_name = "HOST:N,...", value_delimiter = ',')]
    pub(super) hosts: Vec<HostSlots>,
    /// Runs a line on a host, as `COMMAND HOST LINE`
    #[arg(
        long,
        value_name = "COMMAND",
        default_value = "ssh -o BatchMode=yes",
        requires = "hosts",
        value_parser = words
    )]
    pub(super) agent: Words,
    /// Directory to copy to the same path of each host before the start
    #[arg(long, value_name = "DIR", requires = "hosts", value_parser = local_path())]
    pub(super) sync: Option<PathBuf>,
}

impl SizeOptions {
    /// Returns the number of ps tasks.
    pub(super) fn num_ps(&self) -> u32 {
        self.num_ps.unwrap_or(1)
    }

    /// Returns the number of workers.
    pub(super) fn num_workers(&self) -> u32 {
        self.num_workers.unwrap_or(1)
    }
}

impl LaunchOptions {
    /// Adds what the job file has and the flags do not. The daemons get the file.
    ///
    /// # Errors
    /// Those of the file; a number of tasks for which one machine has no processes.
    pub(super) fn with_job(mut self) -> Result<LaunchOptions, Box<dyn Error>> {
        let Some(file) = self.job.clone() else { return Ok(self) };
        let job = Job::read(&file)?;
        for (name, tasks) in [("num_ps", job.num_ps()), ("num_workers", job.num_workers())] {
            if let Some(tasks) = tasks.filter(|&tasks| i64::from(tasks) > TASKS_MAX) {
                let file = file.display();
                return Err(format!("{file}: {name} is {tasks}, more than {TASKS_MAX}").into());
            }
        }
        self.size.num_ps = self.size.num_ps.or(job.num_ps());
        self.size.num_workers = self.size.num_workers.or(job.num_workers());
        if let Some(program) = job.program().filter(|_| self.program.is_empty()) {
            self.program = [program].into_iter().map(str::to_owned).collect();
            self.program.extend(job.args().iter().cloned());
            self.programs.ps_daemon = true;
        }
        if self.programs.ps_daemon || self.program.is_empty() {
            let typed = self.programs.ps_args.take().unwrap_or_default();
            let words = ["--job".to_owned(), file.display().to_string()];
            self.programs.ps_args = Some(Words(words.into_iter().chain(typed.0).collect()));
        }
        Ok(self)
    }
}

/// Arguments in one text, as a shell splits them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Words(pub(super) Vec<String>);

/// Splits a text as a shell does, without its expansions.
fn words(text: &str) -> Result<Words, &'static str> {
    let words = shlex::split(text).ok_or("a quote or a backslash ends nowhere")?;
    if words.is_empty() { Err("there is no word in it") } else { Ok(Words(words)) }
}

/// The most tasks of a job. Each has a process here, which a machine has no thousands of.
const TASKS_MAX: i64 = 1024;

/// Parses a number of tasks.
fn tasks(min: i64) -> clap::builder::RangedI64ValueParser<u32> {
    value_parser!(u32).range(min..=TASKS_MAX)
}

/// Parses a number of seconds up to a day.
fn seconds(min: i64) -> clap::builder::RangedI64ValueParser<u32> {
    value_parser!(u32).range(min..=86_400)
}

const DETAILS: &str = "\
Tasks:
  Each task gets --ps_hosts, --worker_hosts, --job_name and --task_index behind its arguments, and
  the same in TF_CONFIG. With --secure it gets --tls-ca and --tokens too, and a ps task --tls-cert
  and --tls-key. In arguments, {job} and {index} stand for the task. Each line of a task is
  printed and logged behind its name and its incarnation, the number of its start.

Ends:
  A task fails by a signal or another exit code than 0. The first failure that is not restarted ends
  all tasks, and is the exit code: that of the task, or 128 and the signal. After the last worker has
  ended well, ps tasks get SIGTERM, and the exit code is 0. Ctrl-C ends all; a second one kills.

Job:
  A job file (docs/job.md) has the numbers of tasks under [cluster], and the program of the workers
  under [worker], beside which the ps tasks are pushpull-ps with that file. Flags override the file.

Examples:
  pushpull launch job.toml
  pushpull launch --num-ps 2 --num-workers 3 -- target/release/digits --steps 2000
  pushpull launch --num-workers 3 --ps-daemon --ps-args '--last-step 2000' -- python train.py
  pushpull launch --num-ps 2 --num-workers 6 --hosts a:4,b:4 --secure keys --sync ~/job -- ./train";
