//! The flags of the two update modes.

use std::time::Duration;

use clap::Args;
use pushpull::server::{OnLoss, StalenessPolicy};
use pushpull::{Asynchronous, Mode, Synchronous};

#[derive(Debug, Args)]
#[command(next_help_heading = "Synchronous training")]
pub(crate) struct SynchronousOptions {
    /// Make each step of the mean of A gradients of R replicas, such as 4/5 [default: none]
    #[arg(long, value_name = "A/R", value_parser = synchronous)]
    pub(crate) synchronous: Option<Synchronous>,
    /// Step of a lost replica: shrink:MIN, wait:SECONDS or fail [default: shrink:1]
    #[arg(long, value_name = "POLICY", value_parser = on_loss, requires = "synchronous")]
    on_loss: Option<OnLoss>,
    /// Time that the first step waits for replicas, in ms [default: 60000]
    #[arg(long, value_name = "MS", requires = "synchronous")]
    join_timeout_ms: Option<u64>,
    /// Sum in the order of the workers, so that two runs give equal bits; requires A = R
    #[arg(long, requires = "synchronous")]
    deterministic: bool,
    /// Norm over all servers to which longer gradients are scaled [default: none]
    #[arg(long, value_name = "NORM", requires = "synchronous")]
    clip_by_global_norm: Option<f64>,
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
    pub(crate) fn mode(&self) -> Option<Mode> {
        let mut mode = self.synchronous?.deterministic(self.deterministic);
        if let Some(policy) = self.on_loss {
            mode = mode.on_loss(policy);
        }
        if let Some(millis) = self.join_timeout_ms {
            mode = mode.join_timeout(Duration::from_millis(millis));
        }
        if let Some(bound) = self.clip_by_global_norm {
            mode = mode.clip_by_global_norm(bound);
        }
        Some(mode.into())
    }
}

impl AsynchronousOptions {
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

/// Parses `A/R`, two positive integers, as a synchronous mode.
fn synchronous(text: &str) -> Result<Synchronous, String> {
    let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
    let parts = text.split_once('/').map(|(a, r)| (number(a), number(r)));
    let Some((Some(replicas_to_aggregate), Some(total_num_replicas))) = parts else {
        return Err("expected A/R, two whole numbers from 1 on, such as 4/5".to_owned());
    };
    Ok(Synchronous::new(replicas_to_aggregate).total_num_replicas(total_num_replicas))
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
        _asynchronous: AsynchronousOptions,
    }

    #[test]
    fn a_synchronous_mode_is_two_positive_integers() {
        let mode = Synchronous::new(3).total_num_replicas(4);
        assert_eq!(synchronous("3/4"), Ok(mode));
        for text in ["", "3", "3/", "/4", "0/4", "3/0", "3/4/5", "-3/4", "3 / 4", "4294967296/1"] {
            assert!(synchronous(text).is_err(), "{text:?}");
        }
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
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains("--synchronous"), "{error}");
        }
        let error = parse(&["--synchronous", "2/2", "--staleness", "damp"]).unwrap_err();
        assert!(error.to_string().contains("--staleness"), "{error}");
        let error = parse(&["--synchronous", "3:4"]).unwrap_err().to_string();
        assert!(error.contains("3:4") && error.contains("4/5"), "{error}");
        let options = parse(&["--synchronous", "2/2", "--deterministic"]).unwrap().synchronous;
        assert!(options.deterministic && options.on_loss.is_none());
    }
}
