//! [`Hook`]: the caller's code at fixed points of a training, and what it sees there.

use std::time::Duration;

use pushpull_common::ids::TaskId;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::{Error, Gradients, Params, RestoredCheckpoint, SavedCheckpoint};

use super::gradient_outcome::GradientOutcome;
use super::scalars::Scalars;
use super::training_end::FinalValues;
use super::training_error::TrainingError;

/// The error of a hook: any error, or a text (`"cannot ...".into()`).
pub type HookError = Box<dyn std::error::Error + Send + Sync>;

/// Code that a training session calls at fixed points. Every method has an empty body.
///
/// The order for hooks `a` and `b`, in a training of two steps:
///
/// ```text
/// a.begin b.begin                  once, before the session connects
/// a.joined b.joined                after each join: at the start, and after a lost server
///   a.before_step b.before_step    with a token, before the values are pulled
///   a.before_push b.before_push    with the gradients
///   a.after_step  b.after_step     with the outcome of the push
///   ... the same for step 2
///   a.saved b.saved                after a checkpoint, between two steps
/// a.end b.end                      once, after the final checkpoint
/// ```
///
/// Each hook that has begun hears of the end once: by [`Hook::end`], or by [`Hook::failed`] if the
/// training fails. A hook whose method returns an error or panics fails the training with an error
/// that names it. That hook is not called again.
///
/// A step may end between these calls: its values may be too old by the time they are pulled, or
/// the caller may drop it. The next step begins with `before_step` again. After a restore the
/// global step may be lower than before: `joined` tells.
///
/// ```
/// use pushpull_training::{Flow, FinishedStep, Hook, HookError};
///
/// /// Ends the training once the loss is low enough.
/// struct GoodEnough(f64);
///
/// impl Hook for GoodEnough {
///     fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
///         match step.scalars.get("loss") {
///             Some(loss) if loss < self.0 => Ok(Flow::Stop(format!("the loss is {loss}"))),
///             _ => Ok(Flow::Continue),
///         }
///     }
/// }
/// ```
#[doc(alias = "SessionRunHook")]
pub trait Hook: Send {
    /// The name in errors and reasons. Default: the name of the type.
    fn name(&self) -> &str {
        let name = std::any::type_name::<Self>();
        let path = name.split('<').next().unwrap_or(name);
        path.rsplit("::").next().unwrap_or(path)
    }

    /// Called once, before the session connects. May still add variables.
    fn begin(&mut self, setup: &mut TrainingSetup<'_>) -> Result<(), HookError> {
        _ = setup;
        Ok(())
    }

    /// Called after each join. A training that recovers from a lost server joins again.
    #[doc(alias = "after_create_session")]
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        _ = at;
        Ok(Flow::Continue)
    }

    /// Called with a token, before the values are pulled. The gate may send the token back. The
    /// hooks behind one that does not let the step begin are not called.
    #[doc(alias = "before_run")]
    fn before_step(&mut self, step: &GrantedStep) -> Result<StepGate, HookError> {
        _ = step;
        Ok(StepGate::Begin)
    }

    /// Called with the gradients, before they are pushed. [`Flow::Stop`] withholds the push, and
    /// the hooks behind are not called. A streamed step calls it in
    /// [`Step::begin`](super::Step::begin), before it has gradients.
    fn before_push(&mut self, step: &ComputedStep<'_>) -> Result<Flow, HookError> {
        _ = step;
        Ok(Flow::Continue)
    }

    /// Called after the push of a step. All hooks are called, also if one ends the training. A hook
    /// may set scalars for those behind it.
    #[doc(alias = "after_run")]
    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        _ = step;
        Ok(Flow::Continue)
    }

    /// Called on the chief when the servers have saved a checkpoint. The steps do not wait for it,
    /// so a few may have passed since it was due.
    fn saved(&mut self, checkpoint: &SavedCheckpoint) -> Result<Flow, HookError> {
        _ = checkpoint;
        Ok(Flow::Continue)
    }

    /// Called on the chief when the servers could not save a checkpoint, but may succeed later. The
    /// training goes on unless a hook returns an error. `Chain` displays the error with its causes.
    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        _ = error;
        Ok(Flow::Continue)
    }

    /// Called for each failure from which the session tries to recover, before the pause. The
    /// report has the cause. The training goes on unless the hook ends it.
    ///
    /// [`Flow::Stop`] ends a session that has no joined worker at once, without a final checkpoint.
    /// Otherwise the calls of the end are due.
    ///
    /// A failed save that is only due again after its interval is [`Hook::save_failed`].
    fn retrying(&mut self, retry: &RetryReport) -> Result<Flow, HookError> {
        _ = retry;
        Ok(Flow::Continue)
    }

    /// Called once if the training ends without an error, after the final checkpoint.
    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        _ = at;
        Ok(())
    }

    /// Called once if the training fails. `Chain` displays the error with its causes. A panic here
    /// has no effect.
    fn failed(&mut self, error: &TrainingError) {
        _ = error;
    }
}

/// Whether a training goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The training goes on with the next call.
    Continue,
    /// Ends for this reason, after the calls that are due.
    Stop(String),
}

/// Whether a step begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepGate {
    /// The step begins now.
    Begin,
    /// The token goes back, and the session asks for another after this time.
    Wait(Duration),
    /// The token goes back, and the training ends for this reason.
    Stop(String),
}

/// The variables and the task of a training that is about to begin.
#[derive(Debug)]
#[non_exhaustive]
pub struct TrainingSetup<'a> {
    /// The variables that the session will declare. All workers must add the same.
    pub variables: &'a mut Vec<VariableSpec>,
    /// The task of this worker.
    pub task: &'a TaskId,
    /// Whether this worker is the chief.
    pub is_chief: bool,
}

/// A join of the worker, the first or one after a loss.
#[derive(Debug)]
#[non_exhaustive]
pub struct JoinReport<'a> {
    /// The global step of the values.
    pub step: u64,
    /// The newest step that this worker knew before it joined again; `None` at the first join.
    /// Higher than `step` if a checkpoint was restored that lacks the steps between.
    pub from_step: Option<u64>,
    /// The checkpoint that this worker restored. Only the chief restores.
    pub restored: Option<&'a RestoredCheckpoint>,
    /// The error that made the session join again.
    pub cause: Option<&'a Error>,
    /// The values that the worker has pulled.
    pub params: &'a Params,
    /// The time since the session started.
    pub at: Duration,
}

impl JoinReport<'_> {
    /// Whether the training has gone back to an older step.
    pub fn has_gone_back(&self) -> bool {
        self.from_step.is_some_and(|from| from > self.step)
    }
}

/// A failure from which a session tries to recover.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RetryReport {
    /// The failure. [`Error::advice`] tells whether the session joins again.
    pub cause: Error,
    /// The number of failures since the last settled push, this one included.
    pub attempts: u32,
    /// The time since the first of them. The session gives up after
    /// [`TrainingConfig::recover_for`](super::TrainingConfig::recover_for).
    pub waited: Duration,
    /// The pause before the next attempt.
    pub pause: Duration,
    /// The time since the session started.
    pub at: Duration,
}

/// A step whose token has been granted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GrantedStep {
    /// The global step at which the token was granted.
    pub step: u64,
    /// The number of steps that this worker has finished.
    pub local_steps: u64,
    /// The time since the session started.
    pub at: Duration,
}

/// A step whose gradients are computed.
#[derive(Debug)]
#[non_exhaustive]
pub struct ComputedStep<'a> {
    /// The global step at which the token was granted.
    pub step: u64,
    /// The values from which the gradients were computed.
    pub params: &'a Params,
    /// The gradients that are about to be pushed.
    pub gradients: &'a Gradients,
    /// The numbers of the step.
    pub scalars: &'a Scalars,
    /// The time since the session started.
    pub at: Duration,
}

impl ComputedStep<'_> {
    /// Scans the gradients for NaN and infinity.
    ///
    /// Cost: a pass over the gradients.
    ///
    /// # Errors
    /// [`Error::NonFinite`] and [`Error::NonFiniteRow`] name the first such element.
    pub fn check_finite(&self) -> Result<(), Error> {
        self.gradients.check_finite()
    }
}

/// A step whose push has ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct FinishedStep<'a> {
    /// The global step at which the token was granted.
    pub step: u64,
    /// The newest global step that this worker knows, including this one if it counts.
    pub global_step: u64,
    /// The number of steps that this worker has finished, this one included.
    pub local_steps: u64,
    /// The fate of the gradient.
    pub outcome: &'a GradientOutcome,
    /// The values from which the gradient was computed.
    pub params: &'a Params,
    /// The numbers of the step.
    pub scalars: &'a mut Scalars,
    /// The times at which the phases of the step began, and their durations.
    pub timing: StepTiming,
    /// The time since the session started.
    pub at: Duration,
}

/// The phases of a step, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepTiming {
    /// The time from the start of the session to the start of the step.
    pub begin: Duration,
    /// The wait for the token.
    pub token: Duration,
    /// The pull of the values.
    pub pull: Duration,
    /// The computation by the caller.
    pub compute: Duration,
    /// The push, until its outcome.
    pub push: Duration,
}
