//! Helper tasks: named threads beside a training loop.

mod error;
mod shared_ledger;
mod stop_flag;
mod task_ledger;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub use error::{SpawnError, StopCause, TaskFailure, TasksError};
use shared_ledger::SharedLedger;
pub use stop_flag::StopFlag;
use task_ledger::{JoinStep, JoinWait, TaskOutcome};

use pushpull_common::panic_message::message_of;

/// A group of helper tasks that stop together, such as those that read data, evaluate or report.
///
/// - A helper task is a function with a name, on a thread of its own.
/// - The first failure, an error or a panic, stops all tasks, and [`join`](Self::join) returns it.
/// - A stop is a request. Each task polls its [`StopFlag`], or waits on it instead of sleeping.
/// - `join` waits for all tasks, and names those that do not stop.
///
/// A clean stop ([`request_stop`](Self::request_stop)) is no failure, but hides none: an error that
/// a task returns after it is the result of `join`. This differs from TensorFlow's `Coordinator`,
/// which keeps nothing after the first request.
///
/// Dropping the group requests a stop and does not wait: a task that ignores it keeps its thread.
///
/// ```
/// use std::time::Duration;
/// use pushpull_training::Tasks;
///
/// let tasks: Tasks = Tasks::new();
/// tasks.spawn("report", |stop| {
///     while !stop.wait(Duration::from_millis(10)) {
///         // Report something.
///     }
///     Ok(())
/// })?;
/// tasks.spawn("read", |_| Err("the file is gone".into()))?;
/// let error = tasks.join(Duration::from_secs(120)).unwrap_err();
/// assert_eq!(error.to_string(), "cannot finish the tasks: task \"read\" failed: the file is gone");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "Coordinator")]
#[derive(Debug)]
pub struct Tasks<E = Box<dyn std::error::Error + Send + Sync>>
where
    E: Send + Sync + 'static,
{
    shared: Arc<SharedLedger<E>>,
}

impl<E: Send + Sync + 'static> Tasks<E> {
    /// Makes a group without tasks.
    pub fn new() -> Tasks<E> {
        Tasks { shared: Arc::new(SharedLedger::new()) }
    }

    /// Starts a task on a thread of its own, which has the same name. After a stop the task starts
    /// as well, and sees the stop at once.
    ///
    /// # Errors
    /// If a running task has the name, if the name is empty or contains a zero byte, or if the
    /// system starts no thread.
    pub fn spawn(
        &self,
        name: impl Into<String>,
        task: impl FnOnce(StopFlag) -> Result<(), E> + Send + 'static,
    ) -> Result<(), SpawnError> {
        let name = name.into();
        if name.is_empty() || name.contains('\0') {
            return Err(SpawnError::Name { name });
        }
        if !self.shared.change(|ledger| ledger.begin(&name)) {
            return Err(SpawnError::NameInUse { name });
        }
        let (shared, own_name) = (self.shared.clone(), name.clone());
        let run = move || run(&shared, &own_name, task);
        match thread::Builder::new().name(name.clone()).spawn(run) {
            Ok(_detached) => Ok(()),
            Err(source) => {
                self.shared.change(|ledger| ledger.end(&name, TaskOutcome::Done));
                Err(SpawnError::Thread { name, source })
            }
        }
    }

    /// Returns a handle for code that is not a task, such as the training loop.
    pub fn stop(&self) -> StopFlag {
        StopFlag::new(self.shared.clone())
    }

    /// Whether a stop was requested, or a task has failed.
    pub fn should_stop(&self) -> bool {
        self.shared.read(|ledger| ledger.stop_cause().is_some())
    }

    /// Returns why the tasks are to stop: the first reason counts.
    pub fn stop_cause(&self) -> Option<StopCause> {
        self.shared.read(|ledger| ledger.stop_cause().cloned())
    }

    /// Asks all tasks to stop, for a reason that is no failure. Later reasons are ignored.
    pub fn request_stop(&self, reason: impl Into<String>) {
        self.shared.change(|ledger| ledger.request_stop(reason.into()));
    }

    /// Stops all tasks because of an error outside of them. `name` stands for the task that failed.
    pub fn fail(&self, name: impl Into<String>, error: E) {
        let failure = TaskFailure::Error { task: name.into(), error };
        self.shared.change(|ledger| ledger.fail(failure));
    }

    /// Returns the names of the running tasks, in the order of their start.
    pub fn running(&self) -> Vec<String> {
        self.shared.read(|ledger| ledger.running().to_vec())
    }

    /// Returns how many failures came after the first, and are lost.
    pub fn later_failures(&self) -> u64 {
        self.shared.read(task_ledger::TaskLedger::later_failures)
    }

    /// Waits until all tasks have ended, and returns the reason of a clean stop. Without a reason
    /// the tasks have ended by themselves.
    ///
    /// As long as nothing stops the tasks, this call waits for them without a limit. From a stop on
    /// it waits at most for `grace`; TensorFlow's default is 120 seconds. What a task owns is
    /// dropped before it counts as ended.
    ///
    /// A second call gives the same result, until [`clear_stop`](Self::clear_stop). After
    /// stragglers it waits for them again.
    ///
    /// # Errors
    /// [`TasksError::Failed`] with the first failure, else [`TasksError::Stragglers`].
    pub fn join(&self, grace: Duration) -> Result<Option<String>, TasksError<E>> {
        let mut wait = JoinWait::new(grace);
        let stragglers = self.shared.wait(|ledger, now| match wait.poll(ledger, now) {
            JoinStep::Wait => Err(None),
            JoinStep::WaitUntil(deadline) => Err(Some(deadline)),
            JoinStep::Ended => Ok(Vec::new()),
            JoinStep::Stragglers(names) => Ok(names),
        });
        self.shared.read(|ledger| match (ledger.failure(), ledger.stop_cause()) {
            (Some(failure), _) => Err(TasksError::Failed { failure: failure.clone(), stragglers }),
            (None, _) if !stragglers.is_empty() => {
                Err(TasksError::Stragglers { stragglers, grace })
            }
            (None, Some(StopCause::Requested(reason))) => Ok(Some(reason.clone())),
            (None, _) => Ok(None),
        })
    }

    /// Forgets the stop and the first failure, so that new tasks can run. Running tasks go on, also
    /// those that have not seen the stop.
    pub fn clear_stop(&self) {
        self.shared.change(task_ledger::TaskLedger::clear_stop);
    }
}

impl<E: Send + Sync + 'static> Default for Tasks<E> {
    fn default() -> Tasks<E> {
        Tasks::new()
    }
}

impl<E: Send + Sync + 'static> Drop for Tasks<E> {
    fn drop(&mut self) {
        self.request_stop("the group of tasks was dropped");
    }
}

/// Runs a task, and records how it ended.
fn run<E: Send + Sync + 'static>(
    shared: &Arc<SharedLedger<E>>,
    name: &str,
    task: impl FnOnce(StopFlag) -> Result<(), E>,
) {
    let stop = StopFlag::new(shared.clone());
    // The task is gone after a panic, so nothing of it is seen in a broken state.
    let ended = catch_unwind(AssertUnwindSafe(|| task(stop)));
    // A panic's payload is dropped last: it may panic itself.
    let (outcome, _payload) = match ended {
        Ok(Ok(())) => (TaskOutcome::Done, None),
        Ok(Err(error)) => {
            (TaskOutcome::Failed(TaskFailure::Error { task: name.to_owned(), error }), None)
        }
        Err(payload) => {
            let text = message_of(payload.as_ref());
            let failure = TaskFailure::Panic { task: name.to_owned(), text };
            (TaskOutcome::Failed(failure), Some(payload))
        }
    };
    let refused = shared.change(|ledger| ledger.end(name, outcome));
    drop(refused);
}

#[cfg(test)]
mod tests;
