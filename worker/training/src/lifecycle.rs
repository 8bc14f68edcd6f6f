//! [`Lifecycle`]: the order of all that a training session does.

mod ending;
mod next_action;
mod recovery;
mod replica_value_plan;
mod settings;
mod training_phase;

use std::time::Duration;

use ending::Ending;
pub(crate) use next_action::NextAction;
use pushpull_worker::{
    Advice, Error, Gradients, Params, Pulled, RestoredCheckpoint, SavedCheckpoint, WorkerMetrics,
};
pub(crate) use recovery::PushRecovery;
use recovery::TrainingRecovery;
use replica_value_plan::ReplicaValuePlan;
pub(super) use settings::LifecycleSettings;
use training_phase::LifecyclePhase;

use super::checkpoint_plan::CheckpointPlan;
use super::gradient_outcome::GradientOutcome;
use super::hook::{
    ComputedStep, FinishedStep, GrantedStep, Hook, JoinReport, StepTiming, TrainingSetup,
};
use super::hook_list::{GateAnswer, HookList};
use super::known_steps::KnownSteps;
use super::scalars::Scalars;
use super::training_end::{FinalValues, StopReason, TrainingEnd};
use super::training_error::TrainingError;

/// The order of joins, steps, checkpoints, recoveries and hooks in a training.
///
/// **In**: the result of each operation, by the method named after it, with the time since the
/// session started. **Out**: [`Lifecycle::next_action`] names the next operation. The hooks are
/// called from within these methods. **Time**: an action may be to wait. Nothing happens by itself.
///
/// A method that returns an error has failed the training, and the hooks have heard of it.
/// [`Lifecycle::next_action`] then still asks for what winds the session up.
///
/// **What may never happen.** Tests cite these by their numbers.
///
/// - T-1: Without a joined worker, nothing is asked for but a join, a wait or the end.
/// - T-2: No token is asked for once the end has begun, unless a join voids that end.
/// - T-3: A gradient is pushed once, with the token of its step and after the hooks were asked. A
///   push that timed out is waited for instead.
/// - T-4: At most one checkpoint is under way. Between two joins none is asked for of a step that
///   is saved.
/// - T-5: A hook that has begun and not failed hears of the end once, of its success or its error.
/// - T-6: The first reason for the end is kept, unless it is one of the servers' and a join
///   follows.
/// - T-7: No attempt begins within the pause after a failure, unless the training fails or is
///   interrupted. A failure once the time to recover is over ends the training.
/// - T-8: An interrupted training asks for no average, and waits for no other worker.
/// - T-9: The values of the end are final only if they were pulled after all workers had ended.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    settings: LifecycleSettings,
    hooks: HookList,
    recovery: TrainingRecovery,
    checkpoints: CheckpointPlan,
    replica_values: ReplicaValuePlan,
    steps: KnownSteps,
    phase: LifecyclePhase,
    ending: Ending,
}

impl Lifecycle {
    pub(super) fn new(settings: LifecycleSettings, hooks: Vec<Box<dyn Hook>>) -> Lifecycle {
        let interval = settings.checkpoints.filter(|_| settings.is_chief);
        Lifecycle {
            settings,
            hooks: HookList::new(hooks),
            recovery: TrainingRecovery::new(&settings),
            checkpoints: CheckpointPlan::new(interval),
            replica_values: ReplicaValuePlan::default(),
            steps: KnownSteps::default(),
            phase: LifecyclePhase::Apart,
            ending: Ending::default(),
        }
    }

    /// Begins, before the session connects.
    pub(super) fn begin(&mut self, setup: &mut TrainingSetup<'_>) -> Result<(), TrainingError> {
        self.hooks.begin(setup).map_err(|error| self.fail(error))?;
        self.replica_values = ReplicaValuePlan::new(setup.variables, self.settings.is_chief);
        Ok(())
    }

    /// Returns the next operation.
    pub(crate) fn next_action(&mut self, now: Duration) -> NextAction {
        if let Some(pause) = self.recovery.pause(now)
            && self.phase != LifecyclePhase::Over
        {
            return NextAction::Wait(pause);
        }
        match self.phase {
            LifecyclePhase::Apart => self.next_apart(now),
            LifecyclePhase::Granted if self.ending.reason.is_none() => NextAction::Pull,
            // The caller has dropped its step.
            LifecyclePhase::Between | LifecyclePhase::Granted | LifecyclePhase::Computing => {
                self.next_between(now)
            }
            LifecyclePhase::Leaving => NextAction::Leave,
            LifecyclePhase::Over => NextAction::Over,
        }
    }

    fn next_apart(&mut self, now: Duration) -> NextAction {
        if self.ending.has_failed {
            self.phase = LifecyclePhase::Over;
            return NextAction::Over;
        }
        // An interrupted training waits for no lost server. Nor does one that a hook has ended
        // instead of another attempt: its final checkpoint would need the join.
        if self.ending.is_interrupted || self.ending.is_apart {
            self.ending.lost_servers();
            return NextAction::End;
        }
        NextAction::Join { within: self.recovery.join_within(now) }
    }

    fn next_between(&mut self, now: Duration) -> NextAction {
        self.phase = LifecyclePhase::Between;
        if let Some(steps) = self.replica_values.due()
            && !(self.ending.has_failed || self.ending.is_interrupted)
        {
            return NextAction::Average { steps };
        }
        match self.ending.has_begun() {
            false if self.checkpoints.is_due(now, self.steps.applied) => {
                self.replica_values.next_save()
            }
            false => NextAction::Token,
            true if self.checkpoints.is_under_way && self.waits_for_save() => NextAction::AwaitSave,
            true => self.next_ending(),
        }
    }

    /// Whether the end waits for the save under way. A training that fails while its servers do not
    /// answer leaves at once, unless it wants a checkpoint after an error.
    fn waits_for_save(&self) -> bool {
        let may_be_silent = self.ending.has_failed && self.recovery.is_under_way();
        !may_be_silent || self.settings.final_checkpoint_on_error
    }

    fn next_ending(&mut self) -> NextAction {
        let is_due = self.checkpoints.is_due_at_end(self.steps.applied);
        if self.ending.has_failed {
            if is_due && self.settings.final_checkpoint_on_error {
                return self.replica_values.next_save();
            }
            self.phase = LifecyclePhase::Leaving;
            return NextAction::Leave;
        }
        let finishes = match self.settings.ends_together {
            true => !self.ending.is_interrupted,
            false => self.settings.is_chief && self.settings.finish_for_all,
        };
        // The values of the step that this worker's last gradient was accepted for.
        let ending = self.ending.next_action(finishes, self.steps.newest);
        // Readers need the local values, too, with or without a checkpoint.
        ending.unwrap_or(match is_due || self.replica_values.must_publish() {
            true => self.replica_values.next_save(),
            false => NextAction::End,
        })
    }

    /// Records whether this replica is the chief: on a ring another rank may become it.
    pub(super) fn set_chief(&mut self, is_chief: bool) {
        if is_chief != std::mem::replace(&mut self.settings.is_chief, is_chief) {
            self.checkpoints.set_interval(self.settings.checkpoints.filter(|_| is_chief));
        }
    }

    /// Whether the end on the chief ends the training on the servers.
    pub(super) fn finishes_for_all(&self) -> bool {
        self.settings.finish_for_all
    }

    /// Records a join of the worker with the servers.
    pub(super) fn joined(
        &mut self,
        now: Duration,
        params: &Params,
        restored: Option<&RestoredCheckpoint>,
    ) -> Result<(), TrainingError> {
        let step = params.step();
        let (is_later, cause) = self.recovery.joined();
        let from_step = is_later.then_some(self.steps.newest);
        self.replica_values.joined(!is_later);
        self.phase = LifecyclePhase::Between;
        self.steps.joined(step);
        self.ending.joined();
        let restored_step = restored.map(|restored| restored.step);
        self.checkpoints.joined(now, step, restored_step);
        let cause = cause.as_ref();
        let report = JoinReport { step, from_step, restored, cause, params, at: now };
        let stop = self.hooks.joined(&report);
        self.follow(stop)
    }

    /// Records a failed attempt to join.
    pub(super) fn join_failed(&mut self, now: Duration, error: Error) -> Result<(), TrainingError> {
        let decided = self.recovery.join_failed(now, error, &mut self.phase);
        self.recovered(decided)
    }

    /// Records the result of the request for a token: its step, or why there are no more. Returns
    /// whether the session keeps the token.
    pub(super) fn token_taken(
        &mut self,
        now: Duration,
        taken: Result<Result<u64, StopReason>, Error>,
    ) -> Result<bool, TrainingError> {
        let step = match taken {
            Ok(Ok(step)) => step,
            Ok(Err(end)) => {
                self.recovery.progressed();
                self.ending.ended_for_all();
                self.stop(end);
                return Ok(false);
            }
            Err(error) => return self.operation_failed(now, error).map(|()| false),
        };
        self.steps.granted(step);
        let granted = GrantedStep { step, local_steps: self.steps.local, at: now };
        let answer = self.hooks.before_step(&granted).map_err(|error| self.fail(error))?;
        match answer {
            GateAnswer::Begin => self.phase = LifecyclePhase::Granted,
            GateAnswer::Wait(pause) => self.recovery.delay_step(now, pause),
            GateAnswer::Stop(reason) => self.stop(reason),
        }
        Ok(self.phase == LifecyclePhase::Granted)
    }

    /// Records the result of the pull. Returns whether the caller may compute.
    pub(super) fn pulled(
        &mut self,
        now: Duration,
        pulled: Result<Pulled, Error>,
    ) -> Result<bool, TrainingError> {
        match pulled {
            Ok(Pulled::Pulled { step }) => {
                self.steps.learn(step);
                self.replica_values.computing();
                self.phase = LifecyclePhase::Computing;
                Ok(true)
            }
            Ok(_) => {
                // It is stale: the servers have answered, if too late.
                self.recovery.progressed();
                self.phase = LifecyclePhase::Between;
                Ok(false)
            }
            Err(error) => self.operation_failed(now, error).map(|()| false),
        }
    }

    /// Records that the token went back before the pull.
    pub(super) fn step_dropped(&mut self) {
        if self.phase == LifecyclePhase::Granted {
            self.phase = LifecyclePhase::Between;
        }
    }

    /// Calls the hooks before a push. Returns whether to push.
    pub(super) fn before_push(
        &mut self,
        now: Duration,
        params: &Params,
        gradients: &Gradients,
        scalars: &Scalars,
    ) -> Result<bool, TrainingError> {
        let step = ComputedStep { step: self.steps.granted, params, gradients, scalars, at: now };
        let withheld = self.hooks.before_push(&step).map_err(|error| self.fail(error))?;
        let Some(reason) = withheld else { return Ok(true) };
        self.phase = LifecyclePhase::Between;
        self.stop(reason);
        Ok(false)
    }

    /// Records a failed push, and returns what follows it.
    pub(super) fn push_failed(
        &mut self,
        now: Duration,
        error: Error,
    ) -> Result<PushRecovery, TrainingError> {
        let is_interrupted = self.ending.is_interrupted;
        let recovered = self.recovery.push_failed(now, error, is_interrupted, &mut self.phase);
        self.recovered(recovered)
    }

    /// Records the end of a step.
    pub(super) fn after_step(
        &mut self,
        now: Duration,
        outcome: &GradientOutcome,
        params: &Params,
        scalars: &mut Scalars,
        timing: StepTiming,
    ) -> Result<(), TrainingError> {
        if let GradientOutcome::Pushed(_) = outcome {
            self.recovery.progressed();
        }
        if self.phase == LifecyclePhase::Computing {
            self.phase = LifecyclePhase::Between;
        }
        self.steps.finished(outcome);
        self.replica_values.stepped(self.steps.local);
        let KnownSteps { granted: step, newest: global_step, local: local_steps, .. } = self.steps;
        let mut finished = FinishedStep {
            step,
            global_step,
            local_steps,
            outcome,
            params,
            scalars,
            timing,
            at: now,
        };
        let stop = self.hooks.after_step(&mut finished);
        self.follow(stop)?;
        let checked = self.steps.check_finite(outcome, self.settings.non_finite_max);
        checked.map_err(|error| self.fail(error))
    }

    /// Records an average of the replicas' means.
    pub(super) fn averaged(
        &mut self,
        now: Duration,
        result: Result<(), Error>,
    ) -> Result<(), TrainingError> {
        let averaged = result.map(|()| self.replica_values.averaged());
        averaged.or_else(|error| self.values_failed(now, error))
    }

    /// Records that the servers were given the local values.
    pub(super) fn published(
        &mut self,
        now: Duration,
        result: Result<(), Error>,
    ) -> Result<(), TrainingError> {
        // An interrupted training waits for nobody, but no checkpoint of it lacks these values.
        let is_needed =
            !self.ending.is_interrupted || self.checkpoints.is_due_at_end(self.steps.applied);
        match result {
            Err(error) if is_needed && !self.ending.has_failed => {
                return self.values_failed(now, error);
            }
            // The checkpoint after a failure is saved with what the servers have.
            _ => self.replica_values.published(),
        }
        Ok(())
    }

    /// Records that values of this replica could not be sent. A NaN among them stays there, so the
    /// next step cannot help.
    fn values_failed(&mut self, now: Duration, error: Error) -> Result<(), TrainingError> {
        match error.advice() {
            Advice::SkipBatch => Err(self.fail(error.into())),
            _ if self.ending.is_interrupted => Err(self.fail(error.into())),
            _ => self.operation_failed(now, error),
        }
    }

    /// Records that the servers were asked for a checkpoint.
    pub(super) fn save_asked(&mut self, now: Duration) {
        let occasion = self.ending.save_occasion();
        self.checkpoints.asked(now, self.steps.applied, occasion);
    }

    /// Records the answer to a save.
    pub(super) fn saved(
        &mut self,
        now: Duration,
        answer: Result<SavedCheckpoint, Error>,
    ) -> Result<(), TrainingError> {
        self.checkpoints.is_under_way = false;
        match answer {
            Ok(checkpoint) => {
                self.steps.learn(checkpoint.step);
                let stop = self.hooks.saved(&checkpoint);
                self.checkpoints.saved(checkpoint);
                self.follow(stop)
            }
            // The training has failed with another error already.
            Err(_) if self.ending.has_failed => Ok(()),
            Err(error) => self.save_failed(now, error),
        }
    }

    fn save_failed(&mut self, now: Duration, error: Error) -> Result<(), TrainingError> {
        match error.advice() {
            Advice::Stop => return Err(self.fail(TrainingError::Save { source: error })),
            _ if self.ending.is_interrupted => {
                return Err(self.fail(TrainingError::Save { source: error }));
            }
            Advice::Rejoin => return self.recover(now, error, LifecyclePhase::Apart),
            Advice::Retry | Advice::SkipBatch => {}
        }
        let is_last = self.ending.reason.is_some();
        let stop = self.hooks.save_failed(&error);
        self.follow(stop)?;
        match is_last {
            // The final checkpoint is tried again, within the window.
            true => self.recover(now, error, LifecyclePhase::Between),
            // The next one is due after the interval.
            false => Ok(()),
        }
    }

    /// Records whether the chief has finished the training for all. It tries again within the window:
    /// workers that have not heard of the end go on.
    pub(super) fn finished(
        &mut self,
        now: Duration,
        answer: Result<(), Error>,
    ) -> Result<(), TrainingError> {
        let Err(error) = answer else {
            self.ending.finished(true);
            return Ok(());
        };
        let next = match error.advice() {
            Advice::Rejoin if !self.ending.is_interrupted => LifecyclePhase::Apart,
            // A training that the servers have ended for all needs no other try.
            Advice::Retry | Advice::SkipBatch
                if !self.ending.is_interrupted && !self.ending.is_for_all() =>
            {
                LifecyclePhase::Between
            }
            _ => {
                self.ending.finished(false);
                return Ok(());
            }
        };
        self.recover(now, error, next)
    }

    /// Records the answer to the wait for the other workers. The end is the end, whichever worker is
    /// missing and whether or not the servers are still there, unless they have gone back.
    pub(super) fn end_awaited(
        &mut self,
        now: Duration,
        answer: Result<(), Error>,
    ) -> Result<(), TrainingError> {
        let is_final = answer.is_ok();
        self.follow_restore(now, answer.err())?;
        if self.phase != LifecyclePhase::Apart {
            self.ending.awaited(is_final);
        }
        Ok(())
    }

    /// Records the pull of the newest values. If it has failed, the values of the last step stay.
    pub(super) fn refreshed(
        &mut self,
        now: Duration,
        step: Result<u64, Error>,
    ) -> Result<(), TrainingError> {
        let newest = step.as_ref().copied().ok();
        self.follow_restore(now, step.err())?;
        if self.phase != LifecyclePhase::Apart {
            self.ending.refreshed(newest.is_some());
            self.steps.learn(newest.unwrap_or(0));
        }
        Ok(())
    }

    /// Joins again if this error at the end says that the servers have lost their state or restored
    /// an older one: a training that had ended for all may go on. A worker that ends alone needs
    /// nothing from them.
    fn follow_restore(&mut self, now: Duration, error: Option<Error>) -> Result<(), TrainingError> {
        let follows = self.ending.is_for_all() && !self.ending.is_interrupted;
        let needs_join = |error: &Error| follows && error.advice() == Advice::Rejoin;
        match error.filter(needs_join) {
            Some(error) => self.recover(now, error, LifecyclePhase::Apart),
            None => Ok(()),
        }
    }

    /// Ends the training for the hooks, with the values of the end.
    pub(super) fn end(
        &mut self,
        params: Option<Params>,
        metrics: WorkerMetrics,
        scalars: &Scalars,
    ) -> Result<(), TrainingError> {
        let step = self.steps.newest;
        let checkpoint = self.checkpoints.newest.clone();
        let end = self.ending.end(step, checkpoint, params, metrics);
        let told = self.hooks.end(&FinalValues { end, scalars });
        told.map_err(|error| self.fail(error))?;
        self.phase = self.phase.after_end();
        Ok(())
    }

    /// Records that the worker has left, or could not be heard.
    pub(super) fn has_left(&mut self) {
        self.phase = LifecyclePhase::Over;
    }

    /// Asks for the end. The first reason is kept.
    pub(super) fn stop(&mut self, reason: StopReason) {
        if self.ending.stop(reason) {
            match self.ending.is_interrupted {
                true => self.recovery.end_pauses(),
                // The next attempt still has its pause after a failure.
                false => self.recovery.end_delay(),
            }
        }
    }

    /// Ends the training by an error: tells the hooks, and returns the error.
    pub(super) fn fail(&mut self, error: TrainingError) -> TrainingError {
        self.hooks.failed(&error);
        self.ending.has_failed = true;
        self.recovery.end_pauses();
        self.phase = self.phase.after_step();
        error
    }

    /// Whether the training has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.ending.has_failed
    }

    /// Returns until when an operation that begins now may last; `None` if its own timeout decides.
    pub(super) fn deadline(&self, now: Duration) -> Option<Duration> {
        match self.ending.has_failed {
            // A server that answers needs no longer, and the time to recover may be over.
            true => self.recovery.deadline_after_failure(now),
            false => self.recovery.deadline(now),
        }
    }

    /// Returns whether the servers have lost their state: see [`TrainingRecovery::has_lost_state`].
    pub(super) fn has_lost_state(&self) -> bool {
        self.recovery.has_lost_state()
    }

    /// Whether there is nothing left to do.
    pub(super) fn is_over(&self) -> bool {
        self.phase == LifecyclePhase::Over
    }

    /// The newest global step that this worker knows.
    pub(super) fn newest_step(&self) -> u64 {
        self.steps.newest
    }

    /// Takes how the training ended; `None` before its end, and if it has failed.
    pub(super) fn take_end(&mut self) -> Option<TrainingEnd> {
        self.ending.take_end()
    }

    /// Records a failed operation outside of a push. If it was within a step, that step is void.
    pub(super) fn operation_failed(
        &mut self,
        now: Duration,
        error: Error,
    ) -> Result<(), TrainingError> {
        let recovered = self.recovery.operation_failed(now, error, &mut self.phase);
        self.recovered(recovered)
    }

    /// Continues in a phase after a pause, or gives up.
    fn recover(
        &mut self,
        now: Duration,
        error: Error,
        phase: LifecyclePhase,
    ) -> Result<(), TrainingError> {
        let recovered = self.recovery.retry_in(phase, now, error, &mut self.phase);
        self.recovered(recovered)
    }

    /// Fails the training, or tells the hooks of the retry that was decided, if there is one.
    fn recovered<R>(&mut self, decided: Result<R, TrainingError>) -> Result<R, TrainingError> {
        let decided = decided.map_err(|error| self.fail(error))?;
        if let Some(retry) = self.recovery.take_retry() {
            let stop = self.hooks.retrying(&retry).map_err(|error| self.fail(error))?;
            if let Some(reason) = stop {
                self.stop(reason);
                self.end_attempts_to_join();
            }
        }
        Ok(decided)
    }

    /// Follows a hook that ends the training instead of another attempt. An operation with a joined
    /// worker has no attempt to end: the calls that are due follow.
    fn end_attempts_to_join(&mut self) {
        if self.phase == LifecyclePhase::Apart {
            self.ending.is_apart = true;
            self.recovery.end_pauses();
        }
    }

    /// Follows the answer of the hooks.
    fn follow(
        &mut self,
        stop: Result<Option<StopReason>, TrainingError>,
    ) -> Result<(), TrainingError> {
        if let Some(reason) = stop.map_err(|error| self.fail(error))? {
            self.stop(reason);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
