//! Pushing: gradients on their way to all shards, whole or as they become ready.

use std::sync::Arc;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::Operation;

use super::{POOL_MAX, Worker};
use crate::compression::ResidualsError;
use crate::error::Error;
use crate::handles::PushHandle;
use crate::joined_model::JoinedModel;
use crate::outcome::Push;
use crate::params::Gradients;
use crate::parts::{Scatter, Scattered};
use crate::session::{Command, PushOrder, Reply};
use crate::streaming_push::StreamingPush;
use crate::token::Token;

impl Worker {
    /// Pushes gradients, spending the token, and waits for what became of them.
    ///
    /// In asynchronous mode that is until every shard has applied its share. In synchronous mode it
    /// is until the step owner has answered: [`Push::Accepted`] once every shard holds the push and it
    /// is a part of the step, without waiting for the gradients of others; [`Push::Stale`] once the
    /// step is made without it. With deterministic steps it waits for the workers before this one,
    /// too. A push that has not been decided by the deadline ends with [`Error::Timeout`], which
    /// names whom the step owner waits for.
    ///
    /// Names, types and shapes are checked before a byte is sent. Values are scanned for NaN and infinity
    /// before a byte is sent too; with a single shard, that shard scans them. The error is the same, no push
    /// that has one counts, and its token goes back. If the connection is lost the push continues by
    /// itself after a reconnect, and counts once. On a timeout it continues in the background:
    /// [`Worker::outcome`] tells how it went, [`Worker::resume`] waits on.
    ///
    /// The push is under way once this returns, and borrows nothing of the worker: await the handle when
    /// its outcome is needed, and compute, pull or push meanwhile. If the handle is dropped before any
    /// shard can hold its share whole, the push is withdrawn and the token goes back; after that it is
    /// finished in the background.
    pub fn push(&mut self, token: Token, gradients: Gradients) -> PushHandle {
        let joined = match self.joined("push") {
            Ok(joined) => joined.clone(),
            Err(error) => return PushHandle::new(self.client.caller.failed("push", error), None),
        };
        match self.order(&joined, token, gradients) {
            Ok(order) => joined.push(Command::Push { order }),
            Err(error) => joined.refuse(error),
        }
    }

    /// What is to be pushed, once it has been looked at.
    fn order(
        &mut self,
        joined: &JoinedModel,
        token: Token,
        mut gradients: Gradients,
    ) -> Result<PushOrder, Error> {
        if !joined.plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        if gradients.present().next().is_none() && gradients.memory.rows().is_empty() {
            return Err(Error::EmptyPush);
        }
        let scatter = self.scatter_of(joined, &gradients);
        joined.check(&gradients)?;
        // Rows first: what a shard may apply as it comes is then the end of the push.
        joined.make_parts(&mut gradients)?;
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let Gradients { memory, factors, .. } = gradients;
        let memory = self.own(&joined.plan, &joined.runs, memory);
        let scattered = Some(Scattered { scatter, buffer: memory.buffer.clone(), factors });
        let own = Some(memory.own.clone()).filter(|own| !own.is_empty());
        if self.pool.len() < POOL_MAX {
            self.pool.push(memory);
        }
        let operation = Operation::Gradient {};
        let order = PushOrder::of_parts(operation, Some(grant), read, Vec::new());
        Ok(PushOrder { scattered, own, ..order })
    }

    /// How the variables of a push travel: as those of the last one, if they are the same.
    fn scatter_of(&mut self, joined: &JoinedModel, gradients: &Gradients) -> Arc<Scatter> {
        let present = &gradients.memory.present;
        match &self.scatter {
            Some((last, scatter)) if last == present => scatter.clone(),
            _ => {
                let scatter = Arc::new(joined.scatter(gradients));
                self.scatter = Some((present.clone(), scatter.clone()));
                scatter
            }
        }
    }

    /// What the codecs of this worker's gradients have left out and not made good yet, to be kept
    /// beside a checkpoint: [`Worker::restore_residuals`]. As long as a gradient of the variables that
    /// are encoded, and as what is kept of rows. The variables must be the same there, in the same order and the same places.
    ///
    /// A worker that goes on without them loses what it had not sent, about one step's error.
    pub fn residuals(&self) -> Vec<u8> {
        match &self.joined {
            Some(joined) => joined.compression().save(joined.plan.catalogue()),
            None => Vec::new(),
        }
    }

    /// Goes on with the residuals of [`Worker::residuals`], of this worker or of another with the same
    /// variables in the same places. Variables that are not among them begin anew. On an error nothing
    /// has changed.
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), ResidualsError> {
        let joined = self.joined.as_ref().ok_or(ResidualsError::NotJoined)?;
        joined.compression().restore(joined.plan.catalogue(), bytes)
    }

    /// Begins a push whose gradients are sent as they become ready. It borrows nothing of the worker:
    /// others can be begun meanwhile, and values pulled.
    pub async fn begin(&mut self, token: Token) -> Result<StreamingPush, Error> {
        let joined = self.joined("push")?.clone();
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let operation = Operation::Gradient {};
        let order = PushOrder::of_parts(operation, Some(grant), read, Vec::new());
        match joined.caller.call("push", Command::Begin { order }, joined.timeout).await? {
            Reply::Begun { sequence } => Ok(StreamingPush::new(joined, sequence)),
            _ => Err(Error::Ended { doing: "push" }),
        }
    }

    /// What became of a push that ended with [`Error::Timeout`]: `None` while it is still under
    /// way, by what has been heard so far. Remembers the last 64.
    pub async fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        let (caller, timeout) = (&self.client.caller, self.client.config.timeout);
        match caller.call("ask for an outcome", Command::Outcome { sequence }, timeout).await? {
            Reply::Outcome(outcome) => Ok(outcome.and_then(Push::of)),
            _ => Err(Error::Ended { doing: "ask for an outcome" }),
        }
    }

    /// Waits on for a push that ended with [`Error::Timeout`].
    pub async fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        self.joined("push")?.push(Command::Await { sequence }).await
    }
}
