//! The settings of a coordinator.

use std::time::Duration;

use crate::planted::PlantedServiceBugs;

/// The settings of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    pub(super) job: String,
    pub(super) queue_max: usize,
    pub(super) calls_per_worker: usize,
    pub(super) retry_for: Duration,
    pub(super) timeouts_max: u32,
    pub(super) planted: PlantedServiceBugs,
}

impl CoordinatorConfig {
    /// A coordinator of the tasks of the job `worker`.
    pub fn new() -> CoordinatorConfig {
        CoordinatorConfig {
            job: "worker".to_owned(),
            queue_max: 262_144,
            calls_per_worker: 1,
            retry_for: Duration::from_secs(60),
            timeouts_max: 0,
            planted: PlantedServiceBugs::default(),
        }
    }

    /// The job whose tasks run the calls. Default `worker`.
    pub fn job(self, job: &str) -> CoordinatorConfig {
        CoordinatorConfig { job: job.to_owned(), ..self }
    }

    /// The number of scheduled calls that may not have ended. Default 262,144. Beyond that
    /// [`Coordinator::schedule`] waits.
    ///
    /// [`Coordinator::schedule`]: super::Coordinator::schedule
    pub fn queue_max(self, calls: usize) -> CoordinatorConfig {
        CoordinatorConfig { queue_max: calls.max(1), ..self }
    }

    /// The number of calls that one worker runs at once. Default 1.
    pub fn calls_per_worker(self, calls: usize) -> CoordinatorConfig {
        CoordinatorConfig { calls_per_worker: calls.max(1), ..self }
    }

    /// The longest time for which a call is tried again after errors that another execution may not
    /// meet, such as a lost parameter server. Lost workers do not count. Default 60 s.
    pub fn retry_for(self, time: Duration) -> CoordinatorConfig {
        CoordinatorConfig { retry_for: time, ..self }
    }

    /// The number of times that a call is executed again after a timeout, for example because its
    /// worker is slow. Default 0: the first timeout is final. The function may still run. So with a
    /// name its push counts once, and other effects may happen twice.
    pub fn timeouts_max(self, timeouts: u32) -> CoordinatorConfig {
        CoordinatorConfig { timeouts_max: timeouts, ..self }
    }
}

#[cfg(feature = "simulation")]
impl CoordinatorConfig {
    /// Plants a bug, which tests of the simulator must find.
    #[doc(hidden)]
    pub fn planted(self, planted: PlantedServiceBugs) -> CoordinatorConfig {
        CoordinatorConfig { planted, ..self }
    }
}

impl Default for CoordinatorConfig {
    fn default() -> CoordinatorConfig {
        CoordinatorConfig::new()
    }
}
