//! A whole training as one file, for the daemon, for programs and for launchers. Needs the feature
//! `job`.
//!
//! `docs/job.md` has every key. Each key is the setting of a flag of `pushpull-ps`, so a file and a
//! command line build servers in the same way.
//!
//! ```
//! use pushpull::TaskId;
//! use pushpull::job::Job;
//!
//! let text = r#"
//! [cluster]
//! ps_hosts = ["127.0.0.1:2222"]
//! worker_hosts = ["127.0.0.1:2223", "127.0.0.1:2224"]
//!
//! [optimizer]
//! name = "adam"
//! learning_rate = 1e-3
//!
//! [training]
//! last_step = 1000
//! lease = "5s"
//! "#;
//! let job = Job::parse(text, "job.toml")?;
//! let config = job.ps_config(TaskId::ps(0))?; // for `PsListener::start`
//! assert_eq!(job.num_workers(), Some(2));
//!
//! let error = Job::parse("[optimizer]\nlearning_rat = 0.1", "job.toml").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "job.toml:2: unknown key \"learning_rat\": the nearest is \"learning_rate\""
//! );
//! # drop(config);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod byte_size;
mod error;
mod file;
mod keys;
mod mode;
mod rule;
mod schedule;
mod server;
mod settings;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::cluster::resolve::{Known, Resolver};
use pushpull_common::ids::TaskId;
use pushpull_ps::PsConfig;
use pushpull_worker::WorkerConfig;

pub use byte_size::{ByteSizeError, parse_byte_size};
pub use error::JobError;
pub use mode::{ModeError, Replicas, listed_workers};
pub use rule::{OPTIMIZERS, optimizer_list};
pub use settings::{Setting, Settings};

/// A job file: the settings of a training, and the program that its workers run.
#[derive(Clone, Debug)]
pub struct Job {
    file: PathBuf,
    settings: Settings,
    /// The cluster in place of that of the file.
    resolved: Option<ClusterSpec>,
}

impl Job {
    /// Reads a job file of at most 1 MiB.
    ///
    /// # Errors
    /// If the file cannot be read, is no TOML in UTF-8, or has an unknown key or an invalid value.
    /// Errors of the contents name the line.
    pub fn read(file: impl AsRef<Path>) -> Result<Job, JobError> {
        let file = file.as_ref();
        Job::parse(&file::read(file)?, file)
    }

    /// Reads the text of a job file. Errors name it as `file`.
    ///
    /// # Errors
    /// As [`Job::read`].
    pub fn parse(text: &str, file: impl AsRef<Path>) -> Result<Job, JobError> {
        let file = file.as_ref();
        let settings = file::parse(text, file)?;
        let job = Job { file: file.to_owned(), settings, resolved: None };
        job.check_sizes()?;
        Ok(job)
    }

    /// Returns the path of the file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the settings of the file.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the launcher that tells the cluster, if the file names one.
    ///
    /// # Errors
    /// If it is not known.
    pub fn resolver(&self) -> Result<Option<Resolver>, JobError> {
        self.settings.value("resolve")
    }

    /// Returns what the file tells beside a launcher, for
    /// [`resolve`](pushpull_common::cluster::resolve::resolve).
    ///
    /// # Errors
    /// If an address or a number is invalid.
    pub fn known(&self) -> Result<Known, JobError> {
        let mut known = Known::default();
        let hosts =
            [("ps-hosts", "ps_hosts", TaskId::PS_JOB), ("worker-hosts", "worker_hosts", "worker")];
        for (flag, key, job) in hosts {
            let addresses = self.settings.texts(flag);
            if !addresses.is_empty() {
                let jobs = ClusterSpec::builder().job(job, addresses).build();
                known.jobs.push((key, jobs.map_err(|error| self.settings.fault(flag, error))?));
            }
        }
        known.num_ps = self.settings.value("num-ps")?;
        known.num_workers = self.settings.value("num-workers")?;
        known.base_port = self.settings.value("base-port")?.unwrap_or(Known::BASE_PORT);
        known.ps_service = self.settings.text("ps-service").map(str::to_owned);
        known.rendezvous = self.settings.text("rendezvous").map(str::to_owned);
        Ok(known)
    }

    /// Takes the cluster that a launcher has told in place of that of the file.
    #[must_use]
    pub fn with_cluster(self, cluster: ClusterSpec) -> Job {
        Job { resolved: Some(cluster), ..self }
    }

    /// Returns the cluster.
    ///
    /// # Errors
    /// If the file has no addresses, or an invalid one.
    pub fn cluster(&self) -> Result<ClusterSpec, JobError> {
        if let Some(cluster) = &self.resolved {
            return Ok(cluster.clone());
        }
        let fault = |flag| move |error| self.settings.fault(flag, error);
        if let Some(text) = self.settings.text("cluster") {
            let spec = match text.trim_start().starts_with('{') {
                true => ClusterSpec::from_json(text),
                false => text.parse(),
            };
            return spec.map_err(fault("cluster"));
        }
        let [ps, workers] = ["ps-hosts", "worker-hosts"].map(|flag| self.settings.texts(flag));
        if ps.is_empty() {
            return Err(JobError::NoCluster);
        }
        let servers = || ClusterSpec::builder().job(TaskId::PS_JOB, ps);
        let alone = servers().build().map_err(fault("ps-hosts"))?;
        match workers.is_empty() {
            true => Ok(alone),
            false => servers().job("worker", workers).build().map_err(fault("worker-hosts")),
        }
    }

    /// Returns the number of ps tasks, if the file has it.
    pub fn num_ps(&self) -> Option<u32> {
        self.num_tasks("num-ps", |cluster| {
            let job = cluster.variables_job().ok()?;
            cluster.num_tasks(job).ok()
        })
    }

    /// Returns the number of workers, if the file has it.
    pub fn num_workers(&self) -> Option<u32> {
        self.num_tasks("num-workers", |cluster| Some(listed_workers(cluster) as usize))
            .filter(|&workers| workers > 0)
    }

    fn num_tasks(
        &self,
        flag: &str,
        of_cluster: impl Fn(&ClusterSpec) -> Option<usize>,
    ) -> Option<u32> {
        let listed = self.cluster().ok().as_ref().and_then(of_cluster);
        let given = self.settings.text(flag).and_then(|text| text.parse().ok());
        given.or(listed.and_then(|tasks| u32::try_from(tasks).ok()))
    }

    /// Checks that the numbers of tasks are those of the addresses.
    fn check_sizes(&self) -> Result<(), JobError> {
        let settings = &self.settings;
        for hosts in ["ps-hosts", "worker-hosts", "resolve"] {
            if let (Some(spec), Some(_)) = (settings.get("cluster"), settings.get(hosts)) {
                let other = spec.culprit("cluster");
                return Err(settings.fault(hosts, format_args!("{other} is the whole cluster")));
            }
        }
        let Ok(cluster) = self.cluster() else { return Ok(()) };
        let ps = cluster.variables_job().ok().and_then(|job| cluster.num_tasks(job).ok());
        let workers = Some(listed_workers(&cluster) as usize).filter(|&workers| workers > 0);
        for (flag, listed) in [("num-ps", ps), ("num-workers", workers)] {
            let given = settings.value::<u32>(flag)?;
            if let (Some(given), Some(listed)) = (given, listed)
                && usize::try_from(given) != Ok(listed)
            {
                let reason = format_args!("the cluster of this file lists {listed}").to_string();
                return Err(settings.fault(flag, reason));
            }
        }
        Ok(())
    }

    /// Returns the program that workers run, if the file has it.
    pub fn program(&self) -> Option<&str> {
        self.settings.text("program")
    }

    /// Returns the arguments of the program.
    pub fn args(&self) -> &[String] {
        self.settings.texts("args")
    }

    /// Returns the configuration of a ps task. Creates the directory of the checkpoints.
    ///
    /// # Errors
    /// If the cluster is not known, a value is invalid or contradicts another, or the directory cannot
    /// be used.
    pub fn ps_config(&self, task: TaskId) -> Result<PsConfig, JobError> {
        let credentials = self.settings.credentials(&task)?;
        let config = self.settings.ps_config(self.cluster()?, task)?;
        let config = config.credentials(credentials);
        Ok(match self.settings.local_checkpoints()? {
            Some(checkpoints) => config.checkpoints(checkpoints),
            None => config,
        })
    }

    /// Returns the configuration of a worker. It expects servers of the mode and the last step of this
    /// file, and is refused by others.
    ///
    /// # Errors
    /// If the cluster is not known, or the settings of the mode contradict each other.
    pub fn worker_config(&self, task: TaskId) -> Result<WorkerConfig, JobError> {
        let cluster = self.cluster()?;
        let replicas = self.settings.replicas(&cluster)?;
        let credentials = self.settings.credentials(&task)?;
        let config = WorkerConfig::new(cluster, task);
        let config = config.credentials(credentials);
        let config = match replicas {
            Some(Replicas { aggregate, total }) => config.expect_replicas(aggregate, total),
            None => config.expect_synchronous(false),
        };
        Ok(match self.settings.value("last-step")? {
            Some(step) => config.expect_last_step(step),
            None => config.expect_no_last_step(),
        })
    }
}
