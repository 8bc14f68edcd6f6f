//! Validation of settings, alone and in combination. Each error names the setting.

use std::time::Duration;

use pushpull_store::change::SLOTS_MAX;

use super::{Durability, Network, OnLoss, PsConfig, StalenessPolicy, Storage};
use crate::error::StartError;

impl PsConfig {
    /// Returns an error for the first invalid setting.
    pub(crate) fn check(&self) -> Result<(), StartError> {
        if !self.cluster.contains(&self.task) {
            let cluster = self.cluster.to_string();
            return Err(StartError::UnknownTask { task: self.task.clone(), cluster });
        }
        match self.cluster.variables_job() {
            Ok(job) if *job == *self.task.job => {}
            Ok(job) => {
                return Err(StartError::NotPs { task: self.task.clone(), job: job.to_owned() });
            }
            Err(source) => {
                return Err(StartError::NoVariablesJob { task: self.task.clone(), source });
            }
        }
        let setting =
            |setting, value: String, reason| Err(StartError::Setting { setting, value, reason });
        if !(1..=PsConfig::SHARDS_MAX).contains(&self.shards) {
            return setting("shards", self.shards.to_string(), "it must be 1 to 256");
        }
        let bytes_max = self.storage.bytes_max;
        if let Some(bytes) = bytes_max.filter(|&bytes| bytes < Storage::BYTES_MAX_MIN) {
            return setting("bytes_max", bytes.to_string(), "it must be at least 65536 (64K)");
        }
        if !(1..=PsConfig::INBOX_PUSHES_MAX).contains(&self.inbox_pushes) {
            return setting("inbox_pushes", self.inbox_pushes.to_string(), "it must be 1 to 1024");
        }
        if !(LEASE_MIN..=LEASE_MAX).contains(&self.lease) {
            let reason = "it must be 100 ms to 30 days";
            return setting("lease", format!("{:?}", self.lease), reason);
        }
        let mode_fault = self.synchronous_fault().or_else(|| self.asynchronous_fault());
        let fault = mode_fault.or_else(|| self.network.fault());
        if let Some((setting, value, reason)) = fault {
            return Err(StartError::Setting { setting, value, reason });
        }
        let is_power = self.storage.durability == Durability::Power;
        if is_power && self.storage.directory.is_none() {
            let reason = "it needs a state directory";
            return setting("durability", "power".into(), reason);
        }
        let every = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.every);
        if let Some(every) = every.filter(|&every| every < Duration::from_millis(10)) {
            let reason = "it must be at least 10 ms";
            return setting("checkpoints.every", format!("{every:?}"), reason);
        }
        let slots = self.rules.optimizers().map(|rule| rule.slots().len()).max().unwrap_or(0);
        if slots > SLOTS_MAX {
            return setting("optimizer", slots.to_string() + " slots", "at most 8 are supported");
        }
        match self.rules.fault() {
            Some((name, value, reason)) => setting(name, value, reason),
            None => Ok(()),
        }
    }

    /// Returns the first invalid setting of synchronous mode.
    fn synchronous_fault(&self) -> Option<ConfigFault> {
        let settings = self.mode.synchronous()?;
        let aggregate = settings.replicas_to_aggregate;
        let total = settings.total_num_replicas;
        let mode = format!("{aggregate} of {total}");
        if aggregate == 0 || total == 0 {
            return Some(("mode", mode, "both numbers must be at least 1"));
        }
        if self.push_slots() > PsConfig::INBOX_PUSHES_MAX {
            return Some((
                "mode",
                mode,
                "inbox_pushes and the gradients of a step may be at most 1024",
            ));
        }
        if let OnLoss::Shrink { min } = settings.on_loss
            && !(1..=aggregate).contains(&min)
        {
            let reason = "it must be 1 to replicas_to_aggregate";
            return Some(("on_loss.min", min.to_string(), reason));
        }
        if self.storage.durability == Durability::Power {
            let reason = "durable images do not contain what synchronous steps need of the inbox";
            return Some(("durability", "power".to_owned(), reason));
        }
        if settings.deterministic && aggregate != total {
            let reason = "deterministic steps need exactly one gradient of each replica";
            return Some(("mode", mode, reason));
        }
        let bound = settings.clip_by_global_norm?;
        let reason = "it must be above 0 and finite";
        let is_valid = bound > 0.0 && bound.is_finite();
        (!is_valid).then(|| ("clip_by_global_norm", bound.to_string(), reason))
    }

    /// Returns the first invalid setting of asynchronous mode.
    fn asynchronous_fault(&self) -> Option<ConfigFault> {
        let settings = self.mode.asynchronous()?;
        if settings.wait_ahead == Some(0) {
            return Some(("wait_ahead", "0".to_owned(), "it must be at least 1"));
        }
        let policy = settings.staleness;
        if let Some((value, reason)) = policy.fault() {
            return Some(("staleness", value, reason));
        }
        let damps_all = self.rules.optimizers().all(|rule| rule.scales_rate());
        let damps_nothing = policy == StalenessPolicy::Damp && !damps_all;
        let reason = "an optimizer does not scale its learning rate";
        damps_nothing.then(|| ("staleness", format!("{policy:?}"), reason))
    }
}

impl Network {
    /// Returns the first invalid setting.
    fn fault(&self) -> Option<ConfigFault> {
        if self.connections_max == 0 {
            return Some(("connections_max", "0".into(), "it must be at least 1"));
        }
        let waiting = self.waiting_connections_max;
        if !(1..=Network::WAITING_CONNECTIONS_MAX).contains(&waiting) {
            let reason = "it must be 1 to 65536";
            return Some(("waiting_connections_max", waiting.to_string(), reason));
        }
        let handshake = self.handshake_timeout;
        let is_valid = (Duration::from_millis(100)..=Duration::from_secs(600)).contains(&handshake);
        let reason = "it must be 100 ms to 10 minutes";
        (!is_valid).then(|| ("handshake_timeout", format!("{handshake:?}"), reason))
    }
}

/// The bounds of a lease. Clients learn it in milliseconds, in 32 bits.
const LEASE_MIN: Duration = Duration::from_millis(100);
const LEASE_MAX: Duration = Duration::from_secs(30 * 86_400);

/// The name of an invalid setting, its value and the reason.
type ConfigFault = (&'static str, String, &'static str);

#[cfg(test)]
mod tests {
    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::error::Chain;
    use pushpull_common::ids::TaskId;
    use pushpull_optim::optimizer::{ApplyAt, Optimizer, OptimizerSlot, Run, Sgd};

    use super::*;
    use crate::config::{Asynchronous, Synchronous};

    const DAMP: StalenessPolicy = StalenessPolicy::Damp;

    fn compensation(lambda: f64) -> StalenessPolicy {
        StalenessPolicy::DelayCompensation { lambda }
    }

    /// A user-defined optimizer without learning rates.
    #[derive(Debug)]
    struct Fixed;

    impl Optimizer for Fixed {
        fn kind(&self) -> &'static str {
            "fixed"
        }

        fn slots(&self) -> &[OptimizerSlot] {
            &[]
        }

        fn apply_f32(&self, _: ApplyAt, _: Run<'_, f32>) {}

        fn apply_f64(&self, _: ApplyAt, _: Run<'_, f64>) {}
    }

    fn synchronous(replicas_to_aggregate: u32, total_num_replicas: u32) -> Synchronous {
        Synchronous::new(replicas_to_aggregate).total_num_replicas(total_num_replicas)
    }

    fn hello_within(timeout: Duration) -> Network {
        Network::default().handshake_timeout(timeout)
    }

    fn stale(policy: StalenessPolicy) -> Asynchronous {
        Asynchronous::default().staleness(policy)
    }

    fn config(task: TaskId) -> PsConfig {
        let cluster = ClusterSpec::builder().job("ps", ["a:1", "b:1"]).job("worker", ["c:1"]);
        PsConfig::new(cluster.build().unwrap(), task, Sgd::new(0.1))
    }

    /// Returns the configuration with another optimizer.
    fn trained_by(config: PsConfig, optimizer: impl Optimizer) -> PsConfig {
        let rules = PsConfig::new(config.cluster.clone(), config.task.clone(), optimizer).rules;
        PsConfig { rules, ..config }
    }

    #[test]
    fn invalid_settings_are_rejected_by_name() {
        type Change = fn(PsConfig) -> PsConfig;
        let changes: [(Change, &str); 27] = [
            (|c| c.shards(0), "shards"),
            (|c| c.shards(257), "shards"),
            (|c| c.storage(Storage::memory().bytes_max(0)), "bytes_max"),
            (|c| c.storage(Storage::memory().bytes_max((64 << 10) - 1)), "bytes_max"),
            (|c| c.inbox_pushes(0), "inbox_pushes"),
            (|c| c.mode(synchronous(0, 2)), "mode"),
            (|c| c.mode(synchronous(2, 0)), "mode"),
            (|c| c.mode(synchronous(u32::MAX, 3)), "mode"),
            (|c| c.mode(synchronous(2, 3).on_loss(OnLoss::Shrink { min: 3 })), "on_loss.min"),
            (|c| c.mode(synchronous(2, 3).deterministic(true)), "mode"),
            (|c| c.mode(Asynchronous::default().wait_ahead(0)), "wait_ahead"),
            (|c| c.mode(synchronous(2, 3).clip_by_global_norm(0.0)), "clip_by_global_norm"),
            (|c| c.mode(synchronous(2, 3).clip_by_global_norm(f64::NAN)), "clip_by_global_norm"),
            (|c| c.lease(Duration::from_millis(99)), "lease"),
            (|c| c.lease(Duration::MAX), "lease"),
            (|c| c.network(Network::default().connections_max(0)), "connections_max"),
            (
                |c| c.network(Network::default().waiting_connections_max(0)),
                "waiting_connections_max",
            ),
            (
                |c| c.network(Network::default().waiting_connections_max(65_537)),
                "waiting_connections_max",
            ),
            (|c| c.network(hello_within(Duration::from_millis(99))), "handshake_timeout"),
            (|c| c.network(hello_within(Duration::from_secs(601))), "handshake_timeout"),
            (|c| trained_by(c, Sgd::new(f64::NAN)), "learning_rate"),
            (|c| c.optimizer_for("w", Sgd::new(-1.0)), "learning_rate"),
            (|c| c.rate_for("w", f64::INFINITY), "rate_for"),
            (|c| c.mode(stale(DAMP)).optimizer_for("w", Fixed), "staleness"),
            (|c| c.mode(stale(compensation(f64::NAN))), "staleness"),
            (|c| c.mode(stale(compensation(-0.04))), "staleness"),
            (|c| trained_by(c.mode(stale(DAMP)), Fixed), "staleness"),
        ];
        for (change, name) in changes {
            let error = change(config(TaskId::ps(0))).check().unwrap_err();
            let named = matches!(error, StartError::Setting { setting, .. } if setting == name);
            assert!(named, "{error}");
        }
        config(TaskId::ps(1)).shards(256).check().unwrap();
        config(TaskId::ps(1)).mode(stale(DAMP)).check().unwrap();
        config(TaskId::ps(1)).mode(stale(compensation(0.0))).check().unwrap();
        let error = config(TaskId::ps(2)).check().unwrap_err();
        assert!(matches!(error, StartError::UnknownTask { .. }), "{error}");
        let error = config(TaskId::worker(0)).check().unwrap_err();
        assert!(matches!(error, StartError::NotPs { .. }), "{error}");
    }

    #[test]
    fn only_tasks_of_the_job_that_holds_the_variables_start() {
        let table = [
            ("ps=a:1;local=b:1", "ps", ""),
            (
                "ps=a:1;local=b:1",
                "local",
                "cannot start /job:local/task:0: only tasks of the job ps hold variables",
            ),
            ("local=a:1", "local", ""),
            ("local=a:1;worker=b:1", "local", ""),
            (
                "local=a:1;worker=b:1",
                "worker",
                "cannot start /job:worker/task:0: only tasks of the job local hold variables",
            ),
            (
                "cache=a:1;local=b:1",
                "local",
                "cannot start /job:local/task:0: cannot choose the job that holds the variables \
                 among cache, local: name one of them ps",
            ),
            (
                "worker=a:1",
                "worker",
                "cannot start /job:worker/task:0: cannot find the job that holds the variables: the \
                 cluster has the jobs worker; name a job ps, or list one job beside chief, worker \
                 and evaluator whose tasks all have addresses",
            ),
        ];
        for (cluster, job, expected) in table {
            let task = TaskId::new(job, 0);
            let checked = PsConfig::new(cluster.parse().unwrap(), task, Sgd::new(0.1)).check();
            let error = checked.err().map(|error| Chain(&error).to_string());
            assert_eq!(error.unwrap_or_default(), expected, "{cluster} {job}");
        }
    }
}
