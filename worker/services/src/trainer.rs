//! [`Trainer`]: the worker by which the functions of a server train, one session for all calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::protocol::message::EndReason;
use pushpull_common::protocol::{EffectRef, Refusal};
use pushpull_worker::internal::{SERVERS, VALUES};
use pushpull_worker::{
    Advice, Error, Gradients, Params, Pulled, Push, Token, Worker, WorkerConfig,
};

use super::functions::FunctionError;
use super::params_pool::ParamsPool;

/// A worker that has joined, shared by the calls of a server.
#[derive(Debug)]
pub(crate) struct Trainer {
    worker: Mutex<Worker>,
    pool: ParamsPool,
    /// Whether the session has ended, so that the next call joins again.
    is_over: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each use is one call of the worker, which leaves it valid.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trainer {
    /// Joins with the variables that the servers have, once they have values. The configuration
    /// names the client of the functions ([`TaskId::for_functions`]), never a task. So a program
    /// that joins as the task itself does not fence the functions.
    ///
    /// [`TaskId::for_functions`]: pushpull_common::ids::TaskId::for_functions
    pub(crate) async fn join(
        config: WorkerConfig,
        waits: impl Fn(&'static str),
    ) -> Result<Trainer, Error> {
        waits(SERVERS);
        let mut worker = Worker::connect_client(config).await?;
        waits(VALUES);
        let params = worker.join_declared().await?;
        let pool = ParamsPool::default();
        pool.keep(params);
        Ok(Trainer { worker: Mutex::new(worker), pool, is_over: AtomicBool::new(false) })
    }

    /// Takes a token from the parameter servers.
    pub(crate) async fn begin_step(self: Arc<Self>) -> Result<TrainingStep, FunctionError> {
        let token = self.token().await?;
        Ok(TrainingStep { trainer: self, token, params: None })
    }

    /// Returns whether the session has ended, so that calls need another.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    async fn token(&self) -> Result<Token, FunctionError> {
        let token = lock(&self.worker).request_token();
        let token = self.noted(token.await).map_err(function_error)?;
        token.ok_or_else(|| training_ended(lock(&self.worker).end_reason()))
    }

    /// Records whether an error ends the session. A failed session returns its error for ever, also
    /// once other servers have replaced the stopped ones.
    fn noted<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        let ends = |error: &Error| {
            let has_failed = lock(&self.worker).has_failed();
            has_failed || rejoins(error) || error.advice() == Advice::Rejoin
        };
        if result.as_ref().is_err_and(ends) {
            self.is_over.store(true, Ordering::Relaxed);
        }
        result
    }
}

/// Returns whether the functions join again after an error that would end a program. It is the
/// error of a newer session with the name, perhaps of this server's older process.
fn rejoins(error: &Error) -> bool {
    matches!(error, Error::Fenced)
}

/// A token, with the values of its step once a function asks for them. Dropping it returns the
/// token.
#[derive(Debug)]
pub(crate) struct TrainingStep {
    trainer: Arc<Trainer>,
    token: Token,
    params: Option<Params>,
}

impl TrainingStep {
    /// Returns the values of the step, pulled at the first use. If the step passes meanwhile, the
    /// next one replaces it.
    pub(crate) async fn params(&mut self) -> Result<&Params, FunctionError> {
        let params = match self.params.take() {
            Some(params) => params,
            None => self.pull().await?,
        };
        Ok(self.params.insert(params))
    }

    async fn pull(&mut self) -> Result<Params, FunctionError> {
        let mut params = match self.trainer.pool.take() {
            Some(params) => params,
            None => {
                let made = lock(&self.trainer.worker).new_params();
                made.ok_or(Error::NotJoined { doing: "pull" })?
            }
        };
        loop {
            let pull = lock(&self.trainer.worker).pull(&self.token, &mut params);
            match self.trainer.noted(pull.await).map_err(function_error)? {
                Pulled::Pulled { .. } => return Ok(params),
                // It is stale.
                _ => self.token = self.trainer.token().await?,
            }
        }
    }

    pub(crate) fn gradients(&self) -> Gradients {
        lock(&self.trainer.worker).gradients()
    }

    /// Pushes gradients, which count once for a scheduled call. In such a call a push without
    /// effect is an error.
    pub(crate) async fn push(
        self,
        gradients: Gradients,
        scheduled: Option<EffectRef>,
    ) -> Result<Push, FunctionError> {
        let TrainingStep { trainer, token, params } = self;
        let push = {
            let mut worker = lock(&trainer.worker);
            match scheduled {
                Some(effect) => worker.push_for_effect(token, gradients, effect),
                None => worker.push(token, gradients),
            }
        };
        params.into_iter().for_each(|params| trainer.pool.keep(params));
        let push = trainer.noted(push.await).map_err(function_error)?;
        if scheduled.is_some() { counted(push) } else { Ok(push) }
    }
}

/// Returns the outcome of the push of a scheduled call, if every shard has counted the call.
///
/// A stale or withdrawn push settles the call on no shard. If the call ended well nevertheless, its
/// coordinator would raise the watermark over it, and its effect would be missing for ever. So the
/// execution fails, and the coordinator repeats the call.
pub(crate) fn counted(push: Push) -> Result<Push, FunctionError> {
    let reason = match push {
        Push::Stale { .. } => "its gradient is older than the servers accept",
        Push::Withdrawn => "it was withdrawn",
        Push::Applied { .. } | Push::Accepted { .. } | Push::Repeated => return Ok(push),
        _ => "its outcome is unknown",
    };
    let text = format!("the push of a scheduled call does not count: {reason}");
    Err(FunctionError::new(text).retryable())
}

/// Returns the error of a function that asks for a token after the end of the training. It is final:
/// no other execution gets one.
fn training_ended(reason: Option<EndReason>) -> FunctionError {
    let reason = match reason {
        Some(EndReason::LastStep {}) | None => "the last step is reached",
        Some(EndReason::DataEnd {}) => "all samples of the last epoch are spent",
        Some(EndReason::Finished {}) => "the chief or the servers have finished it",
    };
    FunctionError::new(format!("the training has ended: {reason}"))
}

/// Returns the error of a function that has met an error of its parameter servers.
pub(crate) fn function_error(error: Error) -> FunctionError {
    // Another coordinator has taken the place of the one that has scheduled the call.
    let replaced = matches!(
        &error,
        Error::Refused {
            refusal: Refusal::CoordinatorEpoch { .. } | Refusal::UnknownCoordinator { .. },
            ..
        }
    );
    let stops = replaced || (error.advice() == Advice::Stop && !rejoins(&error));
    let failed = FunctionError::from(error);
    if stops { failed } else { failed.retryable() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_trains_after_the_end_is_not_repeated() {
        for (reason, text) in [
            (EndReason::LastStep {}, "the last step is reached"),
            (EndReason::DataEnd {}, "all samples of the last epoch are spent"),
            (EndReason::Finished {}, "the chief or the servers have finished it"),
        ] {
            let expected = (format!("the training has ended: {text}"), false);
            assert_eq!(training_ended(Some(reason)).into_parts(), expected);
        }
    }

    #[test]
    fn a_scheduled_call_whose_push_has_no_effect_is_repeated() {
        for (push, counts) in [
            (Push::Applied { step: 3, staleness: 1 }, true),
            (Push::Repeated, true),
            (Push::Stale { current: 9 }, false),
            (Push::Withdrawn, false),
        ] {
            match counted(push) {
                Ok(outcome) => assert!(counts && outcome == push, "{push:?}"),
                Err(error) => assert!(!counts && error.into_parts().1, "{push:?}"),
            }
        }
    }
}
