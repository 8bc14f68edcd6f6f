//! Pushes: gradients for all shards, complete or streamed, and the handles of those under way.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pushpull_common::ids::{Sequence, VariableId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{EffectRef, Refusal};

use super::{POOL_MAX, Worker};
use crate::error::Error;
use crate::gradients::gradient_buffer::BufferRun;
use crate::gradients::params::{GradientMemory, Gradients};
use crate::gradients::scatter::{Scatter, ScatteredGradients};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::joined_model::JoinedModel;
use crate::metrics::{OperationTimer, TimedOperation};
use crate::outcome::Push;
use crate::runtime::{Caller, OperationFuture};
use crate::session::{PushOrder, Reply, SessionCommand};
use crate::streaming_push::StreamingPush;
use crate::token::Token;

impl Worker {
    /// Pushes gradients and spends the token. The handle returns the outcome.
    ///
    /// - In asynchronous mode the push completes once every shard has applied its share:
    ///   [`Push::Applied`].
    /// - In synchronous mode it completes once the step owner has decided. [`Push::Accepted`]:
    ///   every shard holds the push, and it is part of the step. This does not wait for the
    ///   gradients of other workers. With deterministic steps it does wait for the workers with
    ///   lower indices.
    /// - In either mode [`Push::Stale`]: no shard applies the gradient. Take another token.
    ///
    /// The worker checks variables, types and shapes before it sends a byte. It also scans the
    /// values for NaN and infinity, if the servers reject those (their default); with a single
    /// shard, that shard scans them. A push that fails with [`Error::NonFinite`] changes nothing,
    /// and its token is returned.
    ///
    /// If a connection is lost, the push continues after the reconnect and counts once. On
    /// [`Error::Timeout`] it continues in the background: [`Worker::outcome`] returns its state,
    /// [`Worker::resume`] continues to wait. In synchronous mode the error names what the step
    /// owner waits for.
    ///
    /// The push has started when this returns, and does not borrow the worker: compute, pull or
    /// push meanwhile, and await the handle for the outcome. Dropping the handle before any shard
    /// can have the whole of its share withdraws the push and returns the token. After that the
    /// push completes in the background.
    ///
    /// # Errors
    /// [`Error::EmptyPush`] without a gradient, [`Error::ForeignBuffer`] for gradients of another
    /// model, [`Error::Window`] if too many pushes are unsettled, [`Error::NonFinite`],
    /// [`Error::Overflow`], [`Error::TableFull`], and those of the session.
    pub fn push(&mut self, token: Token, gradients: Gradients) -> PushHandle {
        self.push_under(token, gradients, None)
    }

    /// Pushes gradients that count once for an effect, however often its call is executed.
    ///
    /// Otherwise like [`Worker::push`], with these differences:
    ///
    /// - The step owner decides first, which costs a round trip with several shards.
    /// - [`Push::Repeated`]: another execution of its call had counted there. The token goes back,
    ///   and the step does not advance. The shards that the other execution did not reach count
    ///   this one.
    /// - Every shard of the variables has a share, if an empty one.
    ///
    /// # Errors
    /// Those of [`Worker::push`], and [`Error::Refused`] with
    /// [`Refusal::UnknownCoordinator`](pushpull_common::protocol::Refusal::UnknownCoordinator) if
    /// the coordinator is closed,
    /// [`Refusal::CoordinatorEpoch`](pushpull_common::protocol::Refusal::CoordinatorEpoch) if
    /// another has taken its place,
    /// [`Refusal::EffectWindow`](pushpull_common::protocol::Refusal::EffectWindow) for a number
    /// behind the effect window, and
    /// [`Refusal::Unsupported`](pushpull_common::protocol::Refusal::Unsupported) in synchronous
    /// mode.
    pub fn push_for_effect(
        &mut self,
        token: Token,
        gradients: Gradients,
        effect: EffectRef,
    ) -> PushHandle {
        self.push_under(token, gradients, Some(effect))
    }

    fn push_under(
        &mut self,
        token: Token,
        gradients: Gradients,
        effect: Option<EffectRef>,
    ) -> PushHandle {
        match gradients.is_empty() {
            true => PushHandle::failed(&self.client.caller, Error::EmptyPush),
            false => self.submit(token, gradients, effect),
        }
    }

    /// Pushes gradients, of which there may be none.
    pub(super) fn submit(
        &mut self,
        token: Token,
        gradients: Gradients,
        effect: Option<EffectRef>,
    ) -> PushHandle {
        let model = match self.model("push") {
            Ok(model) => model.clone(),
            Err(error) => return PushHandle::failed(&self.client.caller, error),
        };
        match self.order(&model, token, gradients) {
            Ok(order) => {
                let command = SessionCommand::Push { order: PushOrder { effect, ..order } };
                PushHandle::submit(&model, command)
            }
            Err(error) => PushHandle::failed(&model.caller, error),
        }
    }

    /// Returns `memory` if this worker made it, and a copy in memory of its own otherwise.
    /// Gradients of another worker may be in buffer slots of another session, whose ids mean
    /// something else in this one.
    fn adopt(
        &mut self,
        plan: &ShardingPlan,
        runs: &Arc<[BufferRun]>,
        memory: GradientMemory,
    ) -> GradientMemory {
        if memory.buffer.is_of(runs) {
            return memory;
        }
        let mut copy = self.memory(plan, runs);
        for id in memory.present() {
            let range = plan.range(id);
            copy.buffer_mut().slice_mut(range.clone()).copy_from_slice(memory.buffer.slice(range));
        }
        copy.present = memory.present;
        copy.staged = memory.staged;
        copy
    }

    /// Checks the gradients and turns them into an order for the session.
    fn order(
        &mut self,
        model: &JoinedModel,
        token: Token,
        mut gradients: Gradients,
    ) -> Result<PushOrder, Error> {
        if !model.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        let scatter = self.scatter_for(model, &gradients);
        model.check(&gradients)?;
        // Rows come first, so that the parts that a shard may apply on arrival are at the end of
        // the push.
        model.make_parts(&mut gradients)?;
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let Gradients { memory, factors, .. } = gradients;
        let memory = self.adopt(&model.plan, &model.runs, memory);
        let scattered =
            Some(ScatteredGradients { scatter, buffer: memory.buffer.clone(), factors });
        let staged = Some(memory.staged.clone()).filter(|staged| !staged.is_empty());
        if self.pool.len() < POOL_MAX {
            self.pool.push(memory);
        }
        let operation = Operation::Gradient {};
        let order = PushOrder::of_parts(operation, Some(grant), read, Vec::new());
        Ok(PushOrder { scattered, staged, ..order })
    }

    /// Returns the scatter of the last push, if that had the same variables, or else computes one.
    fn scatter_for(&mut self, model: &JoinedModel, gradients: &Gradients) -> Arc<Scatter> {
        let present = &gradients.memory.present;
        match &self.scatter {
            Some((last, scatter)) if last == present => scatter.clone(),
            _ => {
                let scatter = Arc::new(model.scatter(gradients));
                self.scatter = Some((present.clone(), scatter.clone()));
                scatter
            }
        }
    }

    /// Returns what this worker's codecs have left out so far, as bytes to be stored beside a
    /// checkpoint. [`Worker::restore_residuals`] takes them back.
    ///
    /// Their length is that of one gradient of the encoded variables, plus the residuals kept for
    /// rows. A worker that resumes without them loses what it had not sent: about the error of one
    /// step.
    ///
    /// # Errors
    /// [`Error::Device`] if residuals are on a device that fails.
    pub fn residuals(&self) -> Result<Vec<u8>, Error> {
        match &self.model {
            Some(model) => model.compression().save(model.plan.catalogue()),
            None => Ok(Vec::new()),
        }
    }

    /// Restores the residuals of [`Worker::residuals`], of this worker or of another one. The
    /// variables must be the same, with the same placement. Variables without a saved residual
    /// start at zero.
    ///
    /// # Errors
    /// [`Error::DamagedResiduals`], [`Error::ForeignResiduals`], [`Error::ResidualWithoutCodec`]
    /// and [`Error::NotJoined`]; nothing has changed then.
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let model = self.model.as_ref().ok_or(Error::NotJoined { doing: "restore residuals" })?;
        model.compression().restore(model.plan.catalogue(), bytes)
    }

    /// Begins a push whose gradients are sent as they become ready, and spends the token.
    ///
    /// The result does not borrow the worker: pull values or begin other pushes meanwhile. Dropping
    /// the future withdraws the push and returns the token.
    pub async fn begin(&mut self, token: Token) -> Result<StreamingPush, Error> {
        let model = self.model("push")?.clone();
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let operation = Operation::Gradient {};
        let order = PushOrder::of_parts(operation, Some(grant), read, Vec::new());
        let _timer = model.caller.times().timer(TimedOperation::Push).started();
        match model.caller.call("push", SessionCommand::Begin { order }, model.timeout).await? {
            Reply::Begun { sequence } => Ok(StreamingPush::new(model, sequence)),
            _ => Err(Error::Ended { doing: "push" }),
        }
    }

    /// Returns the outcome of a push that ended with [`Error::Timeout`], or `None` while it is
    /// unsettled. Does not ask the servers.
    ///
    /// # Errors
    /// [`Error::UnknownPush`] if the push is not among the last 64.
    pub async fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        let caller = &self.client.caller;
        let timeout = self.client.config.timeout;
        match caller
            .call("ask for an outcome", SessionCommand::Outcome { sequence }, timeout)
            .await?
        {
            Reply::Outcome(outcome) => Ok(outcome.and_then(Push::of)),
            _ => Err(Error::Ended { doing: "ask for an outcome" }),
        }
    }

    /// Continues to wait for a push that ended with [`Error::Timeout`], for at most
    /// [`crate::WorkerConfig::timeout`]. Dropping the future does not withdraw the push.
    pub async fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        PushHandle::submit(self.model("push")?, SessionCommand::Await { sequence }).await
    }
}

/// A push under way, from [`Worker::push`]: a future of its outcome.
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

    /// Submits a command about a gradient, and counts the push and its time.
    pub(crate) fn submit(model: &JoinedModel, command: SessionCommand) -> PushHandle {
        let call = model.caller.call("push", command, model.timeout);
        let timer = Some(model.caller.times().timer(TimedOperation::Push));
        PushHandle { call, plan: Some(model.plan.clone()), timer }
    }

    /// Returns a push that failed before it began.
    fn failed(caller: &Caller, error: Error) -> PushHandle {
        PushHandle::new(caller.failed("push", error), None)
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
