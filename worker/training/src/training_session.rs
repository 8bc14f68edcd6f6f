//! [`TrainingSession`]: a training loop that joins, recovers, saves and ends by itself.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pushpull_common::ids::Sequence;
use pushpull_worker::internal::{Pause, SaveHandle, SessionRunner};
use pushpull_worker::{Error, Gradients, Pulled, Push, Token, Worker, WorkerMetrics};

use super::gradient_outcome::GradientOutcome;
use super::hook::{StepTiming, TrainingSetup};
use super::lifecycle::{Lifecycle, NextAction, PushRecovery};
use super::progress_hook::ProgressHook;
use super::scalars::Scalars;
use super::session_replica::{JoinedWorker, SessionReplica};
use super::step::{DetachedStep, Step};
use super::step_grant::{StepGrant, StepNumbers};
use super::training_config::TrainingConfig;
use super::training_end::{StopReason, TrainingEnd};
use super::training_error::TrainingError;
#[cfg(doc)]
use pushpull_worker::WorkerConfig;

/// A training loop of one replica, with all that surrounds its steps: it joins, recovers from lost
/// servers, saves checkpoints, calls hooks and ends.
///
/// ```no_run
/// # use pushpull_training::{TrainingConfig, TrainingSession};
/// # fn gradients(_: &pushpull_worker::Params, _: &mut pushpull_worker::Gradients) -> f64 { 0.0 }
/// # async fn run(config: TrainingConfig) -> Result<(), Box<dyn std::error::Error>> {
/// let mut session = TrainingSession::start(config).await?;
/// while let Some(mut step) = session.step().await? {
///     let (params, out) = step.parts();
///     let loss = gradients(params, out);
///     step.scalar("loss", loss);
///     step.push().await?;
/// }
/// println!("{}", session.close().await?.reason);
/// # Ok(()) }
/// ```
///
/// - **Start.** The chief restores a checkpoint or initializes the variables; the others wait for
///   it. [`WorkerConfig::on_progress`] names what a wait is for.
/// - **Steps.** [`TrainingSession::step`] returns a token with values. No step is played again:
///   after a lost server the next step begins with the values that the servers have then, and the
///   servers count each push at most once.
/// - **Recovery.** The session follows [`Error::advice`], for as long as
///   [`TrainingConfig::recover_for`]. Hooks see each join.
/// - **End.** [`TrainingSession::step`] returns `None` once the training has ended for any reason:
///   the final checkpoint is saved, the hooks have heard of the end, and the worker has left.
///
/// A session that is dropped before its end tells its hooks that it failed. Its servers notice when
/// its lease expires.
#[derive(Debug)]
#[doc(alias = "MonitoredTrainingSession")]
#[doc(alias = "MonitoredSession")]
#[doc(alias = "Supervisor")]
#[doc(alias = "SessionManager")]
pub struct TrainingSession {
    pub(super) lifecycle: Lifecycle,
    pub(super) replica: SessionReplica,
    /// The memory of the device that computed the last step, if it has its own.
    #[cfg(feature = "devices")]
    pub(super) device_copy: Option<pushpull_worker::internal::DeviceCopy>,
    pub(super) scalars: Scalars,
    pub(super) timing: StepTiming,
    started: Instant,
    numbers: StepNumbers,
    /// The token of a step that has not begun to compute.
    token: Option<Token>,
    save: Option<SaveHandle>,
}

impl TrainingSession {
    /// Starts a session: calls the hooks' `begin`, connects and joins.
    ///
    /// # Errors
    /// The errors of [`Worker::connect`] and [`Worker::join`], and those of hooks. A server or a
    /// chief that is absent for longer than [`WorkerConfig::connect_timeout`] is named by
    /// [`Error::Timeout`].
    ///
    /// Dropping the future ends the session.
    #[doc(alias = "prepare_or_wait_for_session")]
    #[doc(alias = "managed_session")]
    #[doc(alias = "prepare_session")]
    #[doc(alias = "wait_for_session")]
    pub async fn start(config: TrainingConfig) -> Result<TrainingSession, TrainingError> {
        let mut session = TrainingSession::begin(config)?;
        match session.join_first().await {
            Ok(()) => Ok(session),
            Err(error) => {
                session.wind_up().await;
                Err(error)
            }
        }
    }

    /// Begins a session that has not joined.
    pub(crate) fn begin(config: TrainingConfig) -> Result<TrainingSession, TrainingError> {
        let settings = config.lifecycle()?;
        let TrainingConfig { worker, mut variables, fill, mut hooks, place, .. } = config;
        hooks.extend(ProgressHook::of(&worker));
        let mut lifecycle = Lifecycle::new(settings, hooks);
        let task = &worker.task;
        let is_chief = settings.is_chief;
        lifecycle.begin(&mut TrainingSetup { variables: &mut variables, task, is_chief })?;
        Ok(TrainingSession {
            lifecycle,
            replica: SessionReplica::new(worker, variables, fill, place),
            #[cfg(feature = "devices")]
            device_copy: None,
            scalars: Scalars::default(),
            timing: StepTiming::default(),
            started: Instant::now(),
            numbers: StepNumbers::default(),
            token: None,
            save: None,
        })
    }

    /// Carries actions out until the session has joined or is over.
    pub(crate) async fn join_first(&mut self) -> Result<(), TrainingError> {
        while self.replica.joined.is_none() && !self.lifecycle.is_over() {
            let action = self.next_action()?;
            self.act(action).await?;
        }
        Ok(())
    }

    /// Returns the next step, or `None` once the training has ended. Another call after the end
    /// returns `None` again.
    ///
    /// Waits as [`Worker::token`] does. Values that arrive too late are handled here.
    ///
    /// # Errors
    /// An error ends the training: its hooks have heard of it and the worker has left. Every later
    /// call returns [`TrainingError::Failed`].
    ///
    /// Dropping the future loses no token.
    #[doc(alias = "should_stop")]
    pub async fn step(&mut self) -> Result<Option<Step<'_>>, TrainingError> {
        match self.advance().await {
            Ok(Some(grant)) => Ok(Some(Step::new(self, grant))),
            Ok(None) => Ok(None),
            Err(error) => {
                self.wind_up().await;
                Err(error)
            }
        }
    }

    /// Returns a step that was taken from this session by [`Step::detach`]. `None` if it is of
    /// another session, or if this one has begun another step since or has ended; the token of the
    /// step is returned then.
    pub fn attach(&mut self, step: DetachedStep) -> Option<Step<'_>> {
        let grant = step.grant;
        let is_current = self.numbers.is_last(&grant) && self.replica.joined.is_some();
        (is_current && !self.lifecycle.is_over()).then(|| Step::new(self, grant))
    }

    async fn advance(&mut self) -> Result<Option<StepGrant>, TrainingError> {
        loop {
            match self.next_action()? {
                NextAction::Token => {
                    let taken = self.take_token().await;
                    self.token_taken(taken)?;
                }
                NextAction::Pull => {
                    let pulled = self.pull().await;
                    if let Some(grant) = self.pulled(pulled)? {
                        return Ok(Some(grant));
                    }
                }
                NextAction::Average { steps } => {
                    let averaged = self.average(steps).await;
                    self.averaged(averaged)?;
                }
                NextAction::Over => return Ok(None),
                action => self.act(action).await?,
            }
        }
    }

    /// Runs the loop: calls `train` with each step and pushes its gradients, until the training
    /// ends.
    ///
    /// # Errors
    /// The errors of [`TrainingSession::step`] and [`Step::push`]. An error of `train` ends the
    /// training as [`TrainingError::Step`].
    ///
    /// Dropping the future drops the session.
    pub async fn run<E>(
        mut self,
        mut train: impl FnMut(&mut Step<'_>) -> Result<(), E>,
    ) -> Result<TrainingEnd, TrainingError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        while let Some(mut step) = self.step().await? {
            match train(&mut step) {
                Ok(()) => _ = step.push().await?,
                Err(error) => {
                    let error = step.fail(error.into());
                    self.wind_up().await;
                    return Err(error);
                }
            }
        }
        self.close().await
    }

    /// Ends the training, unless it has ended, and returns how it ended.
    ///
    /// # Errors
    /// The errors of hooks and of the final checkpoint; [`TrainingError::Failed`] if the training
    /// has failed before.
    pub async fn close(mut self) -> Result<TrainingEnd, TrainingError> {
        self.follow_interrupt();
        self.lifecycle.stop(StopReason::Closed);
        match self.advance().await {
            Err(error) => {
                self.wind_up().await;
                Err(error)
            }
            // No step begins after the stop.
            Ok(_) => self.lifecycle.take_end().ok_or(TrainingError::Failed),
        }
    }

    /// Whether this worker is the chief.
    pub fn is_chief(&self) -> bool {
        self.replica.is_chief()
    }

    /// The newest global step that this worker knows.
    pub fn global_step(&self) -> u64 {
        self.lifecycle.newest_step()
    }

    /// Returns the metrics of this worker since the session started, through all its joins.
    pub fn metrics(&self) -> WorkerMetrics {
        self.replica.metrics()
    }

    /// The worker, for what it knows of variables and their places; `None` once it has left, and
    /// while it recovers.
    ///
    /// A rank of a ring has no worker.
    pub fn worker(&self) -> Option<&Worker> {
        self.replica.joined.as_ref()?.worker.of_servers()
    }

    /// The runner of the worker's session.
    pub(crate) fn runner(&self) -> Option<&std::sync::Arc<SessionRunner>> {
        self.worker().map(Worker::runner)
    }

    /// The time since the session started.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the next operation, after a look at the save under way and the interrupt.
    pub(crate) fn next_action(&mut self) -> Result<NextAction, TrainingError> {
        if self.lifecycle.has_failed() && self.lifecycle.is_over() {
            return Err(TrainingError::Failed);
        }
        self.follow_interrupt();
        let now = self.now();
        if let Some(save) = &mut self.save
            && let Poll::Ready(answer) =
                Pin::new(save).poll(&mut Context::from_waker(Waker::noop()))
        {
            self.save = None;
            self.lifecycle.saved(now, answer)?;
        }
        if let Some(joined) = &self.replica.joined {
            // Another rank of a ring may have become the chief since.
            self.lifecycle.set_chief(joined.worker.is_chief());
        }
        let action = self.lifecycle.next_action(now);
        self.limit_operations(now);
        if action != NextAction::Pull {
            // A token without its step goes back.
            self.token = None;
        }
        Ok(action)
    }

    /// Ends the operations of a recovery with its window.
    fn limit_operations(&self, now: Duration) {
        let deadline = self.lifecycle.deadline(now);
        self.replica.limit(deadline.and_then(|deadline| self.started.checked_add(deadline)));
    }

    fn follow_interrupt(&mut self) {
        if self.replica.interrupt.is_raised() {
            self.lifecycle.stop(StopReason::Interrupted);
        }
    }

    /// Takes a token; `None` if the interrupt was raised.
    pub(crate) async fn take_token(&mut self) -> Option<Result<Option<Token>, Error>> {
        self.timing = StepTiming { begin: self.now(), ..StepTiming::default() };
        let SessionReplica { joined, interrupt, .. } = &mut self.replica;
        let JoinedWorker { worker, params } = joined.as_mut()?;
        interrupt.race(worker.token(params)).await
    }

    /// Records a token, and calls the hooks before the step.
    pub(crate) fn token_taken(
        &mut self,
        taken: Option<Result<Option<Token>, Error>>,
    ) -> Result<(), TrainingError> {
        let now = self.now();
        self.timing.token = now - self.timing.begin;
        let Some(taken) = taken else { return Ok(()) };
        let (token, taken) = match taken {
            Ok(token) => {
                let joined = self.replica.joined.as_ref();
                let reason = || joined.and_then(|joined| joined.worker.end_reason());
                let end = || reason().unwrap_or(StopReason::LastStep);
                let step = token.as_ref().map(Token::step).ok_or_else(end);
                (token, Ok(step))
            }
            Err(error) => (None, Err(error)),
        };
        if self.lifecycle.token_taken(now, taken)? {
            self.token = token;
            self.scalars.clear();
        }
        Ok(())
    }

    /// Pulls the values for the token; `None` if there is none, or if the interrupt was raised.
    pub(crate) async fn pull(&mut self) -> Option<Result<Pulled, Error>> {
        let SessionReplica { joined, interrupt, .. } = &mut self.replica;
        let JoinedWorker { worker, params } = joined.as_mut()?;
        let token = self.token.as_ref()?;
        interrupt.race(worker.pull(token, params)).await
    }

    /// Records a pull. Returns what a step owns, if the caller may compute.
    pub(crate) fn pulled(
        &mut self,
        pulled: Option<Result<Pulled, Error>>,
    ) -> Result<Option<StepGrant>, TrainingError> {
        let now = self.now();
        self.timing.pull = now.saturating_sub(self.timing.begin + self.timing.token);
        let (Some(pulled), Some(token)) = (pulled, self.token.take()) else {
            self.lifecycle.step_dropped();
            return Ok(None);
        };
        if !self.lifecycle.pulled(now, pulled)? {
            return Ok(None);
        }
        let Some(joined) = &mut self.replica.joined else { return Ok(None) };
        Ok(Some(self.numbers.grant(token, joined.worker.gradients())))
    }

    /// Averages the means after this many steps; `None` if the interrupt was raised.
    pub(crate) async fn average(&mut self, steps: u64) -> Option<Result<(), Error>> {
        self.replica.average(steps).await
    }

    /// Records an average of the replicas' means.
    pub(crate) fn averaged(
        &mut self,
        averaged: Option<Result<(), Error>>,
    ) -> Result<(), TrainingError> {
        averaged.map_or(Ok(()), |result| self.lifecycle.averaged(self.now(), result))
    }

    /// Calls the hooks before a push. Returns whether to push.
    pub(crate) fn before_push(&mut self, gradients: &Gradients) -> Result<bool, TrainingError> {
        if self.lifecycle.has_failed() {
            return Err(TrainingError::Failed);
        }
        let now = self.now();
        self.computed();
        let params = &self.replica.of_step().params;
        self.lifecycle.before_push(now, params, gradients, &self.scalars)
    }

    /// Records that the gradients of a step are computed.
    pub(super) fn computed(&mut self) {
        let StepTiming { begin, token, pull, .. } = self.timing;
        self.timing.compute = self.now().saturating_sub(begin + token + pull);
    }

    /// Records that rows could not be pulled for a step.
    pub(super) fn rows_failed(&mut self, error: Error) -> Result<(), TrainingError> {
        self.lifecycle.operation_failed(self.now(), error)
    }

    /// Pushes the gradients of a step.
    pub(crate) async fn push(&mut self, grant: StepGrant) -> Result<Push, Error> {
        let SessionReplica { joined, interrupt, .. } = &mut self.replica;
        let Some(JoinedWorker { worker, params }) = joined else { return Err(INTERRUPTED_PUSH) };
        let push = worker.push(grant.token, grant.gradients, params);
        // The end counts the gradient if a server that lives settles it.
        interrupt.race_with_grace(push).await.unwrap_or(Err(INTERRUPTED_PUSH))
    }

    /// Waits, then for a push that has timed out.
    pub(crate) async fn resume_push(
        &mut self,
        sequence: Sequence,
        pause: Duration,
    ) -> Result<Push, Error> {
        let interrupt = self.replica.interrupt.clone();
        _ = interrupt.race(Pause::new(pause)).await;
        self.limit_operations(self.now());
        let resumed = self.replica.of_step().worker.resume(sequence);
        let resumed = interrupt.race_with_grace(resumed).await;
        resumed.unwrap_or(Err(INTERRUPTED_PUSH))
    }

    /// Records the result of a push, and calls the hooks after the step once it has ended.
    pub(crate) fn push_settled(
        &mut self,
        result: Result<Push, Error>,
    ) -> Result<PushRecovery, TrainingError> {
        let now = self.now();
        let recovery = match result {
            Ok(push) => PushRecovery::Ended(GradientOutcome::Pushed(push)),
            Err(error) => {
                self.follow_interrupt();
                self.lifecycle.push_failed(now, error)?
            }
        };
        if let PushRecovery::Ended(outcome) = &recovery {
            let StepTiming { begin, token, pull, compute, .. } = self.timing;
            self.timing.push = now.saturating_sub(begin + token + pull + compute);
            let params = &self.replica.of_step().params;
            let scalars = &mut self.scalars;
            let timing = self.timing;
            self.lifecycle.after_step(now, outcome, params, scalars, timing)?;
        }
        Ok(recovery)
    }

    /// Carries out an action that takes no step. Calls hooks.
    pub(crate) async fn act(&mut self, action: NextAction) -> Result<(), TrainingError> {
        match action {
            NextAction::Join { within } => return self.join(within).await,
            NextAction::Wait(pause) => _ = self.replica.interrupt.race(Pause::new(pause)).await,
            NextAction::Publish => {
                let Some(published) = self.replica.publish().await else { return Ok(()) };
                return self.lifecycle.published(self.now(), published);
            }
            NextAction::Save => {
                self.lifecycle.save_asked(self.now());
                self.save = self.replica.start_save();
            }
            NextAction::AwaitSave => {
                let answer = match &mut self.save {
                    Some(save) => save.await,
                    None => Err(Error::Ended { doing: "save a checkpoint" }),
                };
                self.save = None;
                return self.lifecycle.saved(self.now(), answer);
            }
            NextAction::Finish => {
                let finished = self.replica.finish(self.lifecycle.finishes_for_all()).await;
                return self.lifecycle.finished(self.now(), finished);
            }
            NextAction::AwaitEnd => {
                let ended = self.replica.await_end().await;
                return self.lifecycle.end_awaited(self.now(), ended);
            }
            NextAction::Refresh { at_least } => {
                let refreshed = self.replica.refresh(at_least).await;
                return self.lifecycle.refreshed(self.now(), refreshed);
            }
            NextAction::End => {
                let params = self.replica.end();
                let metrics = self.replica.metrics();
                return self.lifecycle.end(params, metrics, &self.scalars);
            }
            NextAction::Leave => {
                self.replica.leave().await;
                self.lifecycle.has_left();
            }
            NextAction::Token | NextAction::Pull | NextAction::Over => {}
            NextAction::Average { .. } => {}
        }
        Ok(())
    }

    async fn join(&mut self, within: Duration) -> Result<(), TrainingError> {
        self.save = None;
        let joined = self.replica.join(within, self.lifecycle.has_lost_state()).await;
        let now = self.started.elapsed();
        match joined {
            None => Ok(()),
            Some(Err(error)) => self.lifecycle.join_failed(now, error),
            Some(Ok(JoinedWorker { worker, params })) => {
                self.lifecycle.set_chief(worker.is_chief());
                self.lifecycle.joined(now, params, worker.restored())
            }
        }
    }

    /// Does what remains after an error: the checkpoint, if it is wanted, and the leave.
    pub(crate) async fn wind_up(&mut self) {
        self.token = None;
        while let Ok(action) = self.next_action()
            && action != NextAction::Over
        {
            // The training has failed already, with the error that is returned.
            let _ = self.act(action).await;
        }
    }
}

impl Drop for TrainingSession {
    fn drop(&mut self) {
        if !self.lifecycle.is_over() && !self.lifecycle.has_failed() {
            let _ = self.lifecycle.fail(TrainingError::Dropped);
        }
    }
}

pub(super) const INTERRUPTED_PUSH: Error = Error::Interrupted { doing: "push" };
