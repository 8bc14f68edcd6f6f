//! Pulls of all values, of one variable, or of rows, and the handles of those under way.
//!
//! A handle does not borrow the worker, so other operations can begin meanwhile; await them in any
//! order.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Element;

use super::Worker;
use crate::error::{Error, ViewError};
use crate::gradients::params::Params;
use crate::metrics::{OperationTimer, TimedOperation};
use crate::outcome::Pulled;
use crate::pull_client::{ParamsPull, PullCall, ReplicaValues};
use crate::token::Token;
#[cfg(doc)]
use pushpull_common::variable::VariableSpec;

impl Worker {
    /// Replaces `params` with the servers' values, except variables that each replica changes by
    /// itself ([`VariableSpec::local`], [`VariableSpec::mean_every_steps`]): those stay. Sparse
    /// variables are not included: see [`Worker::pull_rows`].
    ///
    /// - In asynchronous mode the values are at least as new as the token's step; different shards
    ///   may have different steps.
    /// - In synchronous mode all values are of the token's step. A shard answers once it has
    ///   applied the steps before. If a shard has applied the token's step already, the result is
    ///   [`Pulled::Stale`]: drop the token.
    ///
    /// The pull has started when this returns, and does not borrow the worker. Await the handle
    /// when the values are needed. On an error, on [`Pulled::Stale`] or if the handle is dropped,
    /// `params` is unchanged, unless pulls are in place
    /// ([`WorkerConfig::in_place_pulls`](crate::WorkerConfig::in_place_pulls)).
    ///
    /// Cost: one request to each shard and the bytes of all values. If all shards are on this host
    /// and share their values ([`crate::WorkerConfig::shared_memory`]), one copy on this thread and
    /// no request.
    pub fn pull<'a>(&mut self, token: &'a Token, params: &'a mut Params) -> PullHandle<'a> {
        let step = Some(GlobalStep(token.step()));
        let pull = match self.model("pull") {
            Err(error) => self.client.pulls.failed_into(params, error),
            Ok(model) if !model.plan.is_same(&params.plan) => {
                self.client.pulls.failed_into(params, Error::ForeignBuffer)
            }
            Ok(_) => self.client.pulls.start(params, step, ReplicaValues::Keep),
        };
        let timer = Some(self.client.caller.times().timer(TimedOperation::Pull));
        PullHandle { pull, token, timer }
    }

    /// Pulls one dense variable into `values`, which must have its length.
    ///
    /// Variables arrive in the order of the calls. So a computation can start with the first while
    /// the others are being received: call this in the order of use, and await each handle before
    /// its use. The values are of the step that [`Worker::pull`] would return; in asynchronous mode
    /// each variable may be of another step. Servers that compensate delayed gradients use the
    /// values of [`Worker::pull`] only, not these.
    ///
    /// This returns the servers' values also of variables that each replica changes by itself.
    ///
    /// The pull has started when this returns, and does not borrow the worker. On an error, on
    /// [`Pulled::Stale`] or if the handle is dropped, `values` is unchanged.
    ///
    /// Cost: one request to each shard that holds part of the variable, and a copy of the values.
    pub fn pull_variable<'a, T: Element>(
        &mut self,
        token: &'a Token,
        name: &str,
        values: &'a mut [T],
    ) -> VariableHandle<'a> {
        let step = Some(GlobalStep(token.step()));
        let elements = values.len();
        let values: &mut [u8] = bytemuck::cast_slice_mut(values);
        let found = self.model("pull").and_then(|model| {
            let (id, range) = model.plan.locate::<T>(name)?;
            if range.len() == values.len() {
                return Ok((&model.plan, id));
            }
            let shape = model.plan.catalogue().variable(id).shape().to_string();
            Err(ViewError::Length { name: name.to_owned(), elements, shape }.into())
        });
        let call = match found {
            Ok((plan, id)) => self.client.pulls.start_variable(plan, id, step),
            Err(error) => self.client.pulls.failed(error),
        };
        let timer = Some(self.client.caller.times().timer(TimedOperation::Pull));
        VariableHandle { call, token, values, timer }
    }

    /// Pulls rows of a sparse variable into `rows`, back to back in the order of `ids`. Ids may be
    /// in any order and may repeat.
    ///
    /// The rows are of the step that [`Worker::pull`] would return. The rows of one request, at
    /// most 1 MiB from one shard, are of one version. On an error, on [`Pulled::Stale`] or if the
    /// future is dropped, `rows` is unchanged.
    ///
    /// Cost: 4 bytes to the servers for each row, 8 for a row of a table, and the bytes of the rows
    /// back.
    pub async fn pull_rows<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        let plan = self.model("pull rows")?.plan.clone();
        let step = Some(GlobalStep(token.step()));
        let timer = self.client.caller.times().timer(TimedOperation::Pull).started();
        let read = self.client.pulls.rows(&plan, name, ids, rows, step).await;
        let pulled = read.map(|read| match read {
            Some(read) => {
                let step = read.step.0;
                token.record_partial_pull(read);
                Pulled::Pulled { step }
            }
            None => Pulled::Stale,
        });
        timer.times().count_pull(&pulled);
        pulled
    }
}

/// A pull under way, from [`Worker::pull`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it replaces the
/// parameters; if the handle is dropped before, they are unchanged, unless pulls are in place.
#[derive(Debug)]
#[must_use = "parameters are replaced when the pull is awaited"]
pub struct PullHandle<'a> {
    pull: ParamsPull<'a>,
    token: &'a Token,
    timer: Option<OperationTimer>,
}

impl Future for PullHandle<'_> {
    type Output = Result<Pulled, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let PullHandle { pull, token, timer } = self.get_mut();
        timer.iter_mut().for_each(OperationTimer::start);
        let result = ready!(Pin::new(pull).poll(context));
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

/// A pull of one variable under way, from [`Worker::pull_variable`].
///
/// The pull proceeds whether or not the handle is polled. The poll that completes it copies the
/// values; if the handle is dropped before, they are unchanged.
#[derive(Debug)]
#[must_use = "values are copied when the pull is awaited"]
pub struct VariableHandle<'a> {
    call: PullCall,
    token: &'a Token,
    values: &'a mut [u8],
    timer: Option<OperationTimer>,
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
