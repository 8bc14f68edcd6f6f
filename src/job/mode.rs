//! Builds the update mode from its settings.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_ps::optim::SparseReduction;
use pushpull_ps::{Asynchronous, Mode, OnLoss, StalenessPolicy, Synchronous};

use super::error::JobError;
use super::settings::Settings;

/// The number of gradients in a synchronous step, and the number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// The number of gradients in a step.
    pub aggregate: u32,
    /// The number of replicas.
    pub total: u32,
}

/// The reason why `issync` and `synchronous` choose no mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModeError {
    /// `--issync 1` for a cluster that lists no workers.
    NoWorkers,
    /// `--issync` and `--synchronous` choose different modes.
    Disagreement {
        /// The value of `--issync`.
        issync: u8,
        /// The value of `--synchronous`.
        synchronous: Replicas,
        /// The number of workers that the cluster lists.
        workers: u32,
    },
}

impl Replicas {
    /// Returns the mode with these replicas.
    pub fn mode(self) -> Synchronous {
        Synchronous::new(self.aggregate).total_num_replicas(self.total)
    }

    /// Returns the replicas of a synchronous step; `None` in asynchronous mode. `issync` is the
    /// classic choice of a mode: all workers or none. `workers` is the number of workers that the
    /// cluster lists.
    ///
    /// # Errors
    /// If the two contradict each other, or if there are no workers for `--issync 1`.
    pub fn choose(
        synchronous: Option<Replicas>,
        issync: Option<u8>,
        workers: u32,
    ) -> Result<Option<Replicas>, ModeError> {
        let implied = match issync {
            None => return Ok(synchronous),
            Some(0) => None,
            Some(_) if workers == 0 => return Err(ModeError::NoWorkers),
            Some(_) => Some(Replicas { aggregate: workers, total: workers }),
        };
        match (issync, synchronous) {
            (Some(issync), Some(synchronous)) if implied != Some(synchronous) => {
                Err(ModeError::Disagreement { issync, synchronous, workers })
            }
            _ => Ok(implied),
        }
    }
}

impl FromStr for Replicas {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Replicas, &'static str> {
        let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
        match text.split_once('/').map(|(a, r)| (number(a), number(r))) {
            Some((Some(aggregate), Some(total))) => Ok(Replicas { aggregate, total }),
            _ => Err("expected A/R, two whole numbers from 1 on, such as 4/5"),
        }
    }
}

impl fmt::Display for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.aggregate, self.total)
    }
}

impl fmt::Display for ModeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModeError::NoWorkers => f.write_str(
                "the cluster lists 0 workers, so no gradient can be aggregated: give \
                 --worker-hosts, or --synchronous A/R",
            ),
            ModeError::Disagreement { issync: 0, synchronous, .. } => {
                write!(f, "it is the asynchronous mode, and --synchronous {synchronous} is given")
            }
            ModeError::Disagreement { synchronous, workers, .. } => write!(
                f,
                "with {workers} workers it is --synchronous {workers}/{workers}, and --synchronous \
                 {synchronous} is given"
            ),
        }
    }
}

impl Error for ModeError {}

/// Returns the number of replicas that a cluster lists: its workers, and its chief if that is a job
/// of its own.
pub fn listed_workers(cluster: &ClusterSpec) -> u32 {
    let jobs = ["chief", "worker"].map(|job| cluster.num_tasks(job).unwrap_or(0));
    // A job has at most `ClusterSpec::TASKS_MAX` tasks.
    jobs.iter().sum::<usize>() as u32
}

/// The settings of synchronous steps alone.
const OF_SYNCHRONOUS: [&str; 5] =
    ["on-loss", "join-timeout-ms", "deterministic", "clip-by-global-norm", "sparse-reduction"];

/// The settings of asynchronous training alone.
const OF_ASYNCHRONOUS: [&str; 3] = ["staleness", "wait-ahead", "reject-older"];

impl Settings {
    /// Returns the replicas of a synchronous step; `None` in asynchronous mode.
    ///
    /// # Errors
    /// If the settings contradict each other or the cluster.
    pub fn replicas(&self, cluster: &ClusterSpec) -> Result<Option<Replicas>, JobError> {
        let issync = self.value::<u8>("issync")?;
        if issync.is_some_and(|issync| issync > 1) {
            return Err(self.fault("issync", "expected 0 or 1"));
        }
        let synchronous = self.value("synchronous")?;
        let chosen = Replicas::choose(synchronous, issync, listed_workers(cluster));
        chosen.map_err(|error| self.fault("issync", error))
    }

    /// Returns the update mode.
    ///
    /// # Errors
    /// If a value is invalid, or a setting is for the other mode.
    pub fn mode(&self, cluster: &ClusterSpec) -> Result<Mode, JobError> {
        let replicas = self.replicas(cluster)?;
        let (others, mode) = match replicas {
            None => (&OF_SYNCHRONOUS[..], "synchronous"),
            Some(_) => (&OF_ASYNCHRONOUS[..], "asynchronous"),
        };
        if let Some(flag) = others.iter().find(|flag| self.is_given(flag)) {
            let by = ["issync", "synchronous"].into_iter().find(|by| self.get(by).is_some());
            let by = by.and_then(|by| Some(self.get(by)?.culprit(by)));
            let by = by.map_or("".to_owned(), |by| format!(", and the mode is that of {by}"));
            return Err(self.fault(flag, format_args!("it is for {mode} training{by}")));
        }
        match replicas {
            Some(replicas) => self.synchronous(replicas).map(Mode::from),
            None => self.asynchronous().map(Mode::from),
        }
    }

    fn synchronous(&self, replicas: Replicas) -> Result<Synchronous, JobError> {
        let mut mode = replicas.mode().deterministic(self.is_given("deterministic"));
        if let Some(policy) = self.read("on-loss", on_loss)? {
            mode = mode.on_loss(policy);
        }
        if let Some(millis) = self.value("join-timeout-ms")? {
            mode = mode.join_timeout(Duration::from_millis(millis));
        }
        if let Some(bound) = self.value("clip-by-global-norm")? {
            mode = mode.clip_by_global_norm(bound);
        }
        if let Some(reduction) = self.read("sparse-reduction", sparse_reduction)? {
            mode = mode.sparse_reduction(reduction);
        }
        Ok(mode)
    }

    fn asynchronous(&self) -> Result<Asynchronous, JobError> {
        let mut mode = Asynchronous::default();
        if let Some(policy) = self.read("staleness", staleness)? {
            mode = mode.staleness(policy);
        }
        if let Some(gradients) = self.value("wait-ahead")? {
            mode = mode.wait_ahead(gradients);
        }
        if let Some(steps) = self.value("reject-older")? {
            mode = mode.reject_older(steps);
        }
        Ok(mode)
    }
}

/// Parses the policy for the loss of a replica.
pub(super) fn on_loss(text: &str) -> Result<OnLoss, String> {
    let seconds = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
    let policy = match text.split_once(':') {
        Some(("shrink", min)) => {
            min.parse().ok().filter(|&min| min > 0).map(|min| OnLoss::Shrink { min })
        }
        Some(("wait", timeout)) => seconds(timeout).map(|timeout| OnLoss::Wait { timeout }),
        None if text == "fail" => Some(OnLoss::Fail),
        _ => None,
    };
    policy.ok_or_else(|| "expected shrink:MIN with MIN from 1 on, wait:SECONDS, or fail".to_owned())
}

/// Parses the reduction of sparse rows.
pub(super) fn sparse_reduction(text: &str) -> Result<SparseReduction, String> {
    match text {
        "replica-mean" => Ok(SparseReduction::ReplicaMean),
        "row-mean" => Ok(SparseReduction::RowMean),
        "sum" => Ok(SparseReduction::Sum),
        _ => Err("expected replica-mean, row-mean, or sum".to_owned()),
    }
}

/// Parses a staleness policy.
pub(super) fn staleness(text: &str) -> Result<StalenessPolicy, String> {
    let compensation = |lambda| StalenessPolicy::DelayCompensation { lambda };
    let usable = |lambda: &f64| lambda.is_finite() && *lambda >= 0.0;
    let policy = match (text, text.split_once(':')) {
        ("ignore", _) => Some(StalenessPolicy::Ignore),
        ("damp", _) => Some(StalenessPolicy::Damp),
        ("compensate", _) => Some(compensation(StalenessPolicy::LAMBDA)),
        (_, Some(("compensate", lambda))) => lambda.parse().ok().filter(usable).map(compensation),
        _ => None,
    };
    policy.ok_or_else(|| "expected ignore, damp, compensate, or compensate:LAMBDA".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        for &(flag, value) in line {
            settings.set_flag(flag, [value]);
        }
        settings
    }

    #[test]
    fn replicas_are_two_positive_integers() {
        assert_eq!("3/4".parse(), Ok(Replicas { aggregate: 3, total: 4 }));
        for text in ["", "3", "3/", "/4", "0/4", "3/0", "3/4/5", "-3/4", "3 / 4", "4294967296/1"] {
            assert!(text.parse::<Replicas>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn issync_is_all_workers_or_none_and_must_agree_with_synchronous() {
        let replicas = |aggregate, total| Some(Replicas { aggregate, total });
        let disagreement = |issync, workers| {
            let synchronous = Replicas { aggregate: 3, total: 4 };
            Err(ModeError::Disagreement { issync, synchronous, workers })
        };
        let cases = [
            (None, None, 2, Ok(None)),
            (None, replicas(3, 4), 2, Ok(replicas(3, 4))),
            (Some(0), None, 0, Ok(None)),
            (Some(1), None, 3, Ok(replicas(3, 3))),
            (Some(1), None, 0, Err(ModeError::NoWorkers)),
            (Some(1), replicas(3, 3), 3, Ok(replicas(3, 3))),
            (Some(1), replicas(3, 4), 4, disagreement(1, 4)),
            (Some(0), replicas(3, 4), 4, disagreement(0, 4)),
        ];
        for (issync, synchronous, workers, expected) in cases {
            let chosen = Replicas::choose(synchronous, issync, workers);
            assert_eq!(chosen, expected, "{issync:?} {synchronous:?}, {workers} workers");
        }
    }

    #[test]
    fn errors_name_the_other_flag_with_its_value() {
        let said = |issync, workers| {
            let synchronous = Replicas { aggregate: 3, total: 4 };
            ModeError::Disagreement { issync, synchronous, workers }.to_string()
        };
        assert!(ModeError::NoWorkers.to_string().starts_with("the cluster lists 0 workers"));
        assert!(said(0, 4).ends_with("--synchronous 3/4 is given"));
        assert!(said(1, 4).starts_with("with 4 workers it is --synchronous 4/4, "));
    }

    #[test]
    fn a_chief_of_its_own_is_a_replica() {
        let listed = |text: &str| listed_workers(&text.parse().unwrap());
        assert_eq!(listed("ps=a:1"), 0);
        assert_eq!(listed("ps=a:1;worker=b:1,c:1"), 2);
        assert_eq!(listed("ps=a:1;chief=d:1;worker=b:1,c:1"), 3);
    }

    #[test]
    fn the_loss_policy_is_shrink_wait_or_fail() {
        assert_eq!(on_loss("shrink:2"), Ok(OnLoss::Shrink { min: 2 }));
        let timeout = Duration::from_millis(1500);
        assert_eq!(on_loss("wait:1.5"), Ok(OnLoss::Wait { timeout }));
        assert_eq!(on_loss("fail"), Ok(OnLoss::Fail));
        for text in ["", "shrink", "shrink:0", "shrink:x", "wait", "wait:-1", "wait:NaN", "fail:1"]
        {
            assert!(on_loss(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_staleness_policy_is_ignore_damp_or_compensate() {
        let compensation = |lambda| Ok(StalenessPolicy::DelayCompensation { lambda });
        assert_eq!(staleness("ignore"), Ok(StalenessPolicy::Ignore));
        assert_eq!(staleness("damp"), Ok(StalenessPolicy::Damp));
        assert_eq!(staleness("compensate"), compensation(0.04));
        assert_eq!(staleness("compensate:0.5"), compensation(0.5));
        for text in ["", "damp:1", "compensate:", "compensate:-1", "compensate:NaN", "0.04"] {
            assert!(staleness(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn each_mode_has_its_own_settings() {
        let cluster = "ps=a:1;worker=b:1,c:1".parse().unwrap();
        let mode = |line: &[(&str, &str)]| settings(line).mode(&cluster);
        let two = Synchronous::new(2).total_num_replicas(2);
        assert_eq!(mode(&[]).unwrap(), Asynchronous::default().into());
        let damp = [("issync", "0"), ("staleness", "damp")];
        let damped = Asynchronous::default().staleness(StalenessPolicy::Damp);
        assert_eq!(mode(&damp).unwrap(), damped.into());
        let ordered = [("issync", "1"), ("deterministic", "true")];
        assert_eq!(mode(&ordered).unwrap(), two.deterministic(true).into());
        for (value, reduction) in [
            ("replica-mean", SparseReduction::ReplicaMean),
            ("row-mean", SparseReduction::RowMean),
            ("sum", SparseReduction::Sum),
        ] {
            let found = mode(&[("synchronous", "2/2"), ("sparse-reduction", value)]).unwrap();
            assert_eq!(found, two.sparse_reduction(reduction).into());
        }
        let faults = [
            (&[("issync", "0"), ("on-loss", "fail")][..], "--on-loss fail: it is for synchronous"),
            (&[("deterministic", "true")], "--deterministic true: it is for synchronous training"),
            (&[("clip-by-global-norm", "x"), ("issync", "1")], "--clip-by-global-norm x: invalid"),
            (
                &[("synchronous", "2/2"), ("wait-ahead", "1")],
                "--wait-ahead 1: it is for asynchronous training, and the mode is that of \
                 --synchronous 2/2",
            ),
            (&[("synchronous", "3:4")], "--synchronous 3:4: expected A/R"),
            (&[("issync", "2")], "--issync 2: expected 0 or 1"),
            (&[("issync", "0"), ("synchronous", "2/2")], "--issync 0: it is the asynchronous mode"),
        ];
        for (line, expected) in faults {
            let error = mode(line).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
