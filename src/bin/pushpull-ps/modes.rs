//! The flags of the two update modes.

use std::time::Duration;

use clap::Args;
use pushpull::optim::SparseReduction;
use pushpull::server::{OnLoss, StalenessPolicy};
use pushpull::{Asynchronous, ClusterSpec, Synchronous};

use super::shared::{ModeOptions, listed_workers};

#[derive(Debug, Args)]
#[command(next_help_heading = "Synchronous training")]
pub(crate) struct SynchronousOptions {
    #[command(flatten)]
    replicas: ModeOptions,
    /// Step of a lost replica: shrink:MIN, wait:SECONDS or fail [default: shrink:1]
    #[arg(long, value_name = "POLICY", value_parser = on_loss, requires = "mode")]
    on_loss: Option<OnLoss>,
    /// Time that the first step waits for replicas, in ms [default: 60000]
    #[arg(long, value_name = "MS", requires = "mode")]
    join_timeout_ms: Option<u64>,
    /// Sum in the order of the workers, so that two runs give equal bits; requires A = R
    #[arg(long, requires = "mode")]
    deterministic: bool,
    /// Norm over all servers to which longer gradients are scaled [default: none]
    #[arg(long, value_name = "NORM", requires = "mode")]
    clip_by_global_norm: Option<f64>,
    /// Sparse rows of a step: replica-mean, row-mean or sum [default: replica-mean]
    #[arg(long, value_name = "KIND", value_parser = sparse_reduction, requires = "mode")]
    sparse_reduction: Option<SparseReduction>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Asynchronous training (the default)")]
pub(crate) struct AsynchronousOptions {
    /// Stale gradients: ignore, damp, compensate[:LAMBDA] [default: ignore]
    #[arg(long, value_name = "POLICY", value_parser = staleness, conflicts_with = "synchronous")]
    staleness: Option<StalenessPolicy>,
    /// Lead over the slowest worker at which a worker waits, in gradients [default: none]
    #[arg(long, value_name = "GRADIENTS", conflicts_with = "synchronous")]
    wait_ahead: Option<u64>,
    /// Maximum age of the values of a gradient, in steps; older are dropped [default: none]
    #[arg(long, value_name = "STEPS", conflicts_with = "synchronous")]
    reject_older: Option<u64>,
}

impl SynchronousOptions {
    /// Returns the mode, if the flags choose it.
    ///
    /// # Errors
    /// Returns the text to print if the flags contradict each other.
    pub(crate) fn mode(&self, cluster: &ClusterSpec) -> Result<Option<Synchronous>, String> {
        let replicas = self.replicas.replicas(listed_workers(cluster));
        let Some(replicas) = replicas.map_err(|error| error.to_string())? else {
            let given = [
                ("--on-loss", self.on_loss.is_some()),
                ("--join-timeout-ms", self.join_timeout_ms.is_some()),
                ("--deterministic", self.deterministic),
                ("--clip-by-global-norm", self.clip_by_global_norm.is_some()),
                ("--sparse-reduction", self.sparse_reduction.is_some()),
            ];
            return match first_given(given) {
                Some(flag) => Err(format!("--issync 0: {flag} is for synchronous training")),
                None => Ok(None),
            };
        };
        let mut mode = replicas.mode().deterministic(self.deterministic);
        if let Some(policy) = self.on_loss {
            mode = mode.on_loss(policy);
        }
        if let Some(millis) = self.join_timeout_ms {
            mode = mode.join_timeout(Duration::from_millis(millis));
        }
        if let Some(bound) = self.clip_by_global_norm {
            mode = mode.clip_by_global_norm(bound);
        }
        if let Some(reduction) = self.sparse_reduction {
            mode = mode.sparse_reduction(reduction);
        }
        Ok(Some(mode))
    }
}

impl AsynchronousOptions {
    /// Checks that none of the flags is given, which clap does only beside `--synchronous`.
    ///
    /// # Errors
    /// Returns the text to print.
    pub(crate) fn check_absent(&self) -> Result<(), String> {
        let given = [
            ("--staleness", self.staleness.is_some()),
            ("--wait-ahead", self.wait_ahead.is_some()),
            ("--reject-older", self.reject_older.is_some()),
        ];
        match first_given(given) {
            Some(flag) => Err(format!("--issync 1: {flag} is for asynchronous training")),
            None => Ok(()),
        }
    }

    /// Returns the mode.
    pub(crate) fn mode(&self) -> Asynchronous {
        let mut mode = Asynchronous::default();
        if let Some(policy) = self.staleness {
            mode = mode.staleness(policy);
        }
        if let Some(gradients) = self.wait_ahead {
            mode = mode.wait_ahead(gradients);
        }
        if let Some(steps) = self.reject_older {
            mode = mode.reject_older(steps);
        }
        mode
    }
}

/// Returns the first flag that is given.
fn first_given<const N: usize>(flags: [(&'static str, bool); N]) -> Option<&'static str> {
    flags.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
}

/// Parses the policy for the loss of a replica.
fn on_loss(text: &str) -> Result<OnLoss, String> {
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
fn sparse_reduction(text: &str) -> Result<SparseReduction, String> {
    match text {
        "replica-mean" => Ok(SparseReduction::ReplicaMean),
        "row-mean" => Ok(SparseReduction::RowMean),
        "sum" => Ok(SparseReduction::Sum),
        _ => Err("expected replica-mean, row-mean, or sum".to_owned()),
    }
}

/// Parses a staleness policy.
fn staleness(text: &str) -> Result<StalenessPolicy, String> {
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
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct ModeLine {
        #[command(flatten)]
        synchronous: SynchronousOptions,
        #[command(flatten)]
        asynchronous: AsynchronousOptions,
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
    fn synchronous_flags_require_the_mode_and_errors_name_the_value() {
        let parse = |flags: &[&str]| ModeLine::try_parse_from(["pushpull-ps"].iter().chain(flags));
        for flags in [
            &["--on-loss", "fail"][..],
            &["--join-timeout-ms", "5"],
            &["--deterministic"],
            &["--clip-by-global-norm", "5"],
            &["--sparse-reduction", "sum"],
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains("--synchronous"), "{error}");
        }
        let cluster = "ps=a:1;worker=b:1,c:1".parse().unwrap();
        let issync = |value: &str, flags: &[&str]| {
            let line = parse(&[&["--issync", value], flags].concat()).unwrap();
            let mode = line.synchronous.mode(&cluster)?;
            if mode.is_some() {
                line.asynchronous.check_absent()?;
            }
            Ok::<_, String>(mode)
        };
        let two = Synchronous::new(2).total_num_replicas(2);
        assert_eq!(issync("0", &["--staleness", "damp"]), Ok(None));
        assert_eq!(issync("1", &["--deterministic"]), Ok(Some(two.deterministic(true))));
        for (value, reduction) in [
            ("replica-mean", SparseReduction::ReplicaMean),
            ("row-mean", SparseReduction::RowMean),
            ("sum", SparseReduction::Sum),
        ] {
            let mode = issync("1", &["--sparse-reduction", value]);
            assert_eq!(mode, Ok(Some(two.sparse_reduction(reduction))));
        }
        for (value, flags) in [
            ("0", &["--on-loss", "fail"][..]),
            ("0", &["--deterministic"]),
            ("0", &["--sparse-reduction", "sum"]),
            ("1", &["--staleness", "damp"]),
            ("1", &["--wait-ahead", "1"]),
            ("1", &["--reject-older", "1"]),
        ] {
            let error = issync(value, flags).unwrap_err();
            assert!(
                error.starts_with(&format!("--issync {value}: {} is for", flags[0])),
                "{error}"
            );
        }
        let error = parse(&["--synchronous", "2/2", "--staleness", "damp"]).unwrap_err();
        assert!(error.to_string().contains("--staleness"), "{error}");
        let error = parse(&["--synchronous", "3:4"]).unwrap_err().to_string();
        assert!(error.contains("3:4") && error.contains("4/5"), "{error}");
        let options = parse(&["--synchronous", "2/2", "--deterministic"]).unwrap().synchronous;
        assert!(options.deterministic && options.on_loss.is_none());
    }
}
