//! Futures of the operations under way, and their results.
//!
//! The futures do not borrow the worker, so other operations can begin meanwhile; await them in any
//! order.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::{Message, Outcome, Refusal};

use crate::client::PullCall;
use crate::error::Error;
use crate::gradients::params::Params;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::metrics::OperationTimer;
use crate::runtime::OperationFuture;
use crate::session::Reply;
use crate::token::Token;

/// A push under way, from [`crate::Worker::push`]: a future of its outcome.
///
/// The push proceeds whether or not the handle is polled. Dropping the handle before any shard can
/// have the whole of its share withdraws the push and returns the token. After that the push
/// completes in the background.
#[derive(Debug)]
#[must_use = "a push whose handle is dropped is withdrawn"]
pub struct PushHandle {
    call: OperationFuture,
    /// Names the variables of refusals.
    plan: Option<Arc<ShardingPlan>>,
    /// `Some` for a gradient, until it is done.
    timer: Option<OperationTimer>,
}

impl PushHandle {
    pub(crate) fn new(call: OperationFuture, plan: Option<Arc<ShardingPlan>>) -> PushHandle {
        PushHandle { call, plan, timer: None }
    }

    /// Counts the push and its time.
    pub(crate) fn timed(self, timer: OperationTimer) -> PushHandle {
        PushHandle { timer: Some(timer), ..self }
    }
}

impl Future for PushHandle {
    type Output = Result<Push, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.timer.iter_mut().for_each(OperationTimer::start);
        let pushed = match ready!(Pin::new(&mut self.call).poll(context)) {
            Ok(Reply::Pushed { outcome }) => {
                Push::of(outcome).ok_or(Error::Ended { doing: "push" })
            }
            Ok(_) => Err(Error::Ended { doing: "push" }),
            Err(error) => Err(name_variable(self.plan.as_deref(), error)),
        };
        if let Some(timer) = self.timer.take() {
            timer.times().count_push(&pushed);
        }
        Poll::Ready(pushed)
    }
}

/// A pull under way, from [`crate::Worker::pull`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it replaces the
/// parameters; if the handle is dropped before, they are unchanged.
#[derive(Debug)]
#[must_use = "parameters are replaced when the pull is awaited"]
pub struct PullHandle<'a> {
    pub(crate) call: PullCall,
    pub(crate) token: &'a Token,
    pub(crate) params: &'a mut Params,
    pub(crate) timer: Option<OperationTimer>,
}

impl Future for PullHandle<'_> {
    type Output = Result<Pulled, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let PullHandle { call, token, params, timer } = self.get_mut();
        timer.iter_mut().for_each(OperationTimer::start);
        let result = ready!(call.poll_into(context, params));
        let pulled = result.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                token.record_pull(read);
                Pulled::Pulled { step }
            }
        });
        if let Some(timer) = timer.take() {
            timer.times().count_pull(&pulled);
        }
        Poll::Ready(pulled)
    }
}

/// A pull of one variable under way, from [`crate::Worker::pull_variable`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it copies the
/// values; if the handle is dropped before, they are unchanged.
#[derive(Debug)]
#[must_use = "values are copied when the pull is awaited"]
pub struct VariableHandle<'a> {
    pub(crate) call: PullCall,
    pub(crate) token: &'a Token,
    pub(crate) values: &'a mut [u8],
    pub(crate) timer: Option<OperationTimer>,
}

impl Future for VariableHandle<'_> {
    type Output = Result<Pulled, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let VariableHandle { call, token, values, timer } = self.get_mut();
        timer.iter_mut().for_each(OperationTimer::start);
        let result = ready!(call.poll_copied(context, values));
        let pulled = result.map(|read| match read {
            None => Pulled::Stale,
            Some(read) => {
                let step = read.step.0;
                // A gradient is as stale as the oldest variable that it was computed from.
                token.record_partial_pull(read);
                Pulled::Pulled { step }
            }
        });
        if let Some(timer) = timer.take() {
            timer.times().count_pull(&pulled);
        }
        Poll::Ready(pulled)
    }
}

/// The result of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pulled {
    /// The values were pulled. In asynchronous mode they are of at least this global step; in
    /// synchronous mode all are of this step, the token's.
    Pulled {
        /// The global step.
        step: u64,
    },
    /// The token's step was made without it (synchronous mode). The values are unchanged. Drop the
    /// token and take another.
    Stale,
}

impl Pulled {
    /// Whether the token's step has passed.
    pub fn is_stale(self) -> bool {
        self == Pulled::Stale
    }
}

/// The outcome of a push.
///
/// Asynchronous mode: `Applied`, or `Stale` if the servers bound the age of gradients. Synchronous
/// mode: `Accepted`, or `Stale` if enough other replicas were faster. In every case the token is
/// gone, and the loop continues with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Push {
    /// The variables were updated (asynchronous mode; assignments in both modes).
    Applied {
        /// The number of steps made, including this push.
        step: u64,
        /// The number of steps by other workers since values were pulled under the token, or since
        /// it was granted if none were.
        staleness: u64,
    },
    /// The push is part of a step (synchronous mode). Every shard holds it, and the step includes
    /// it even if this worker dies. The values of the next token's step include it.
    Accepted {
        /// The number of steps made, including the one that the push is part of.
        step: u64,
    },
    /// No shard applied the gradient: its step was made without it (synchronous mode), or it was
    /// older than the servers' bound (asynchronous mode). This is not an error; this replica was
    /// among the slowest.
    Stale {
        /// The current global step.
        current: u64,
    },
    /// The worker withdrew the push before any shard had all of its share.
    Withdrawn,
    /// Another execution of the call that made the gradient had counted before, so this one did not
    /// advance the step. Every shard has counted the call once.
    Repeated,
}

/// The result of [`crate::Worker::push_and_pull`].
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutcome {
    /// The outcome of the push.
    pub push: Push,
    /// The token for the next step, whose values have been pulled; `None` if there are no more
    /// tokens.
    ///
    /// An error is one of [`crate::Worker::token`] or [`crate::Worker::pull`]. It does not affect
    /// the push; call them again.
    pub next: Result<Option<Token>, Error>,
}

/// A checkpoint under way: a future of its name and step.
///
/// Dropping the handle does not stop a save that the servers have begun.
#[derive(Debug)]
#[must_use = "only the handle tells whether the checkpoint was saved"]
pub(crate) struct SaveHandle {
    call: OperationFuture,
}

impl SaveHandle {
    pub(crate) fn new(call: OperationFuture) -> SaveHandle {
        SaveHandle { call }
    }
}

impl Future for SaveHandle {
    type Output = Result<SavedCheckpoint, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match ready!(Pin::new(&mut self.call).poll(context)) {
            Ok(Reply::Answer { message: Message::Saved(saved), .. }) => Ok(saved.checkpoint.into()),
            Ok(_) => Err(Error::Ended { doing: "save a checkpoint" }),
            Err(error) => Err(error),
        })
    }
}

/// A checkpoint that is saved, verified and published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedCheckpoint {
    /// The name of its folder.
    pub name: String,
    /// The global step of its values.
    pub step: u64,
}

impl From<CheckpointId> for SavedCheckpoint {
    fn from(checkpoint: CheckpointId) -> SavedCheckpoint {
        SavedCheckpoint { name: checkpoint.name.to_string(), step: checkpoint.step.0 }
    }
}

/// How much of the declared data set had been granted when a worker joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataBegun {
    /// The number of batches, of all epochs, that were granted or reserved at least once.
    pub batches: u64,
    /// The number of those that were not spent yet.
    pub unspent: u64,
}

/// The checkpoint from which the variables were restored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredCheckpoint {
    /// The name of its folder, which also contains the user data of [`crate::Worker::save`].
    pub name: String,
    /// The global step at which training resumes.
    pub step: u64,
    /// The restore epoch that has begun. Each restore increases it.
    pub epoch: u32,
    /// Damaged newer checkpoints, the newest first, at most 16. Empty if the server does not report
    /// them.
    pub passed_over: Vec<PassedOver>,
}

/// A damaged checkpoint that was passed over for an older one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// The name of its folder.
    pub checkpoint: String,
    /// The damage: the file, what it contains, and what was expected.
    pub cause: String,
}

impl Push {
    /// Converts the outcome of a whole push; `None` for an outcome of a single shard.
    pub(crate) fn of(outcome: Outcome) -> Option<Push> {
        Some(match outcome {
            Outcome::Applied { step, staleness, .. } => Push::Applied { step: step.0, staleness },
            // The wire counts steps from 0, and names the one that the push is part of.
            Outcome::Accepted { step } => Push::Accepted { step: step.0.saturating_add(1) },
            Outcome::Stale { current } => Push::Stale { current: current.0 },
            Outcome::Withdrawn {} => Push::Withdrawn,
            Outcome::Repeated {} => Push::Repeated,
            Outcome::Held {} => return None,
        })
    }
}

/// Turns a refusal that names a variable by id into the error that names it by name. Refusals about
/// sparse rows count elements differently and are kept as they are.
fn name_variable(plan: Option<&ShardingPlan>, error: Error) -> Error {
    let Error::Refused { shard, ref refusal, .. } = error else { return error };
    let variables = plan.map_or(&[][..], |plan| plan.catalogue().variables());
    let spec = |variable: &VariableId| variables.get(variable.0 as usize);
    match refusal {
        Refusal::NonFinite { variable, element, value } => {
            match spec(variable).filter(|variable| !variable.is_sparse()) {
                Some(variable) => Error::NonFinite {
                    variable: variable.name().to_owned(),
                    element: *element as usize,
                    value: *value,
                },
                None => error,
            }
        }
        Refusal::Overflow { variable, element, value } => {
            match spec(variable).filter(|variable| !variable.is_sparse()) {
                Some(variable) => Error::Overflow {
                    variable: variable.name().to_owned(),
                    element: *element as usize,
                    value: *value,
                },
                None => error,
            }
        }
        &Refusal::TableFull { ref variable, rows, more, limit } => match spec(variable) {
            Some(variable) => {
                let variable = variable.name().to_owned();
                Error::TableFull { variable, shard, rows, more, limit }
            }
            None => error,
        },
        _ => error,
    }
}
