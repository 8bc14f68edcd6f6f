//! Pushing: gradients on their way to all shards, whole or as they become ready.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{Sequence, ShardId, VariableId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{NonFinitePolicy, Operation};
use pushpull_common::tensor::{DType, Element, first_non_finite};

use super::{POOL_MAX, Worker};
use crate::compression::{ResidualsError, singles};
use crate::error::{Error, ViewError};
use crate::fanout::Plan;
use crate::outcome::Push;
use crate::params::{Gradients, find};
use crate::parts::{Part, Scattered};
use crate::pushing::Pushing;
use crate::rows::{self, RowSet};
use crate::session::{Command, PushOrder, Reply};
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
    /// Names, types and shapes are checked before a byte is sent. So are values, unless the push goes to
    /// one shard alone, which looks for NaN and infinities as it comes: the error is the same, no push
    /// that has one counts, and its token goes back. If the connection is lost the push goes on by
    /// itself after a reconnect, and counts once. On a timeout it goes on in the background:
    /// [`Worker::outcome`] tells how it went, [`Worker::resume`] waits on.
    ///
    /// If the future is dropped before any shard can hold its share whole, the push is withdrawn
    /// and the token goes back; after that it is finished in the background.
    pub async fn push(&mut self, token: Token, gradients: Gradients) -> Result<Push, Error> {
        let plan = self.joined("push")?.clone();
        if !plan.is_same(&gradients.plan) {
            return Err(Error::ForeignBuffer);
        }
        for id in gradients.present() {
            let (bytes, factor) = (&gradients.buffer.bytes()[plan.range(id)], gradients.factor(id));
            if !self.is_looked_at_there(&plan, id) {
                self.check_finite(&plan, id, bytes, factor)?;
            }
            self.compression.check(&plan, id, bytes, factor)?;
        }
        for rows in gradients.rows.values() {
            let factor = gradients.factor(rows.variable());
            self.check_rows_finite(&plan, rows, factor)?;
            self.compression.check_rows(&plan, rows, factor)?;
        }
        let present: Vec<VariableId> = gradients.present().collect();
        if present.is_empty() && gradients.rows.is_empty() {
            return Err(Error::EmptyPush);
        }
        let factors = gradients.factors;
        let factor = |id| factors.get(&id).copied().unwrap_or(1.0);
        let buffer = Arc::new(gradients.buffer);
        // Rows first: what a shard may apply as it comes is then the end of the push.
        let mut parts: Vec<(ShardId, Vec<Part>)> = Vec::new();
        for rows in gradients.rows.values() {
            parts.extend(self.compression.rows(&plan, rows, factor(rows.variable()))?);
        }
        for &id in &present {
            let bytes = &buffer.bytes()[plan.range(id)];
            parts.extend(self.compression.parts(&plan, id, bytes, factor(id))?);
        }
        if self.pool.len() < POOL_MAX {
            self.pool.push(buffer.clone());
        }
        let operation = Operation::Gradient {};
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let plain = present.iter().copied().filter(|&id| !self.compression.covers(id));
        let scatter = Arc::new(plan.scatter(plain));
        let scattered = Some(Scattered { scatter, buffer, factors });
        let order = PushOrder { operation, grant: Some(grant), read, scattered, parts };
        self.push_order(order).await
    }

    /// What the codecs of this worker's gradients have left out and not made good yet, to be kept
    /// beside a checkpoint: [`Worker::restore_residuals`]. As long as a gradient of the variables that
    /// are encoded, and as what is kept of rows. The variables must be the same there, in the same order and the same places.
    ///
    /// A worker that goes on without them loses what it had not sent, about one step's error.
    pub fn residuals(&self) -> Vec<u8> {
        match &self.plan {
            Some(plan) => self.compression.save(plan.catalogue()),
            None => Vec::new(),
        }
    }

    /// Goes on with the residuals of [`Worker::residuals`], of this worker or of another with the same
    /// variables in the same places. Variables that are not among them begin anew. On an error nothing
    /// has changed.
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), ResidualsError> {
        let plan = self.plan.as_ref().ok_or(ResidualsError::NotJoined)?;
        self.compression.restore(plan.catalogue(), bytes)
    }

    /// Begins a push whose gradients are sent as they become ready.
    pub async fn begin(&mut self, token: Token) -> Result<Pushing<'_>, Error> {
        let plan = self.joined("push")?.clone();
        let Some((grant, read)) = token.spend() else {
            return Err(Error::EmptyPush);
        };
        let operation = Operation::Gradient {};
        let order = PushOrder::of_parts(operation, Some(grant), read, Vec::new());
        let timeout = self.client.config.timeout;
        match self.client.session.call("push", Command::Begin { order }, timeout).await? {
            Reply::Begun { sequence } => Ok(Pushing::new(self, plan, sequence)),
            _ => Err(Error::Ended { doing: "push" }),
        }
    }

    pub(super) async fn push_order(&self, order: PushOrder) -> Result<Push, Error> {
        self.wait_for_push(Command::Push { order }).await
    }

    pub(crate) async fn wait_for_push(&self, command: Command) -> Result<Push, Error> {
        match self.client.session.call("push", command, self.client.config.timeout).await {
            Ok(Reply::Pushed { outcome }) => {
                Push::of(outcome).ok_or(Error::Ended { doing: "push" })
            }
            Ok(_) => Err(Error::Ended { doing: "push" }),
            Err(error) => Err(named(self.plan.as_deref(), error)),
        }
    }

    /// What became of a push that ended with [`Error::Timeout`]: `None` while it is still under
    /// way, by what has been heard so far. Remembers the last 64.
    pub async fn outcome(&mut self, sequence: Sequence) -> Result<Option<Push>, Error> {
        let command = Command::Outcome { sequence };
        let timeout = self.client.config.timeout;
        match self.client.session.call("ask for an outcome", command, timeout).await? {
            Reply::Outcome(outcome) => Ok(outcome.and_then(Push::of)),
            _ => Err(Error::Ended { doing: "ask for an outcome" }),
        }
    }

    /// Waits on for a push that ended with [`Error::Timeout`].
    pub async fn resume(&mut self, sequence: Sequence) -> Result<Push, Error> {
        self.wait_for_push(Command::Await { sequence }).await
    }

    pub(crate) async fn more_parts(
        &mut self,
        plan: &Plan,
        sequence: Sequence,
        name: &str,
        bytes: Bytes,
        aligned: &[u8],
    ) -> Result<(), Error> {
        let id = find(plan, name)?;
        if !plan.catalogue().variable(id).is_trainable() {
            return Err(ViewError::Plain { name: name.to_owned() }.into());
        }
        self.check_finite(plan, id, &bytes, 1.0)?;
        self.compression.check(plan, id, aligned, 1.0)?;
        let start = plan.range(id).start;
        let body =
            |range: std::ops::Range<usize>| bytes.slice(range.start - start..range.end - start);
        let parts = match self.compression.covers(id) {
            true => self.compression.parts(plan, id, aligned, 1.0)?,
            false => plan.parts([id].into_iter(), body),
        };
        self.more(sequence, parts).await
    }

    pub(crate) async fn more_rows<T: Element>(
        &mut self,
        plan: &Plan,
        sequence: Sequence,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let id = rows::check::<T>(plan, name, ids, rows.len())?;
        if !plan.catalogue().variable(id).is_trainable() {
            return Err(ViewError::Plain { name: name.to_owned() }.into());
        }
        let rows = RowSet::sum(plan, id, ids, rows)?;
        self.check_rows_finite(plan, &rows, 1.0)?;
        self.compression.check_rows(plan, &rows, 1.0)?;
        let parts = self.compression.rows(plan, &rows, 1.0)?;
        self.more(sequence, parts).await
    }

    async fn more(
        &self,
        sequence: Sequence,
        parts: Vec<(ShardId, Vec<Part>)>,
    ) -> Result<(), Error> {
        let command = Command::More { sequence, parts };
        self.client.session.call("push", command, self.client.config.timeout).await.map(|_| ())
    }

    pub(crate) fn abandon(&self, sequence: Sequence) {
        self.client.session.returns().add(crate::token::Dropped::Push(sequence));
    }

    /// Whether looking for NaN and infinities in the gradient of a variable can be left to its shard,
    /// which does so as the parts come. It can where the whole push goes to the step owner alone: what
    /// that refuses has been counted nowhere. What is encoded is looked at here, as it is now.
    fn is_looked_at_there(&self, plan: &Plan, id: VariableId) -> bool {
        plan.shards() == [self.client.owner]
            && !self.compression.covers(id)
            && plan.catalogue().partitions_of(id).iter().all(|partition| partition.own.is_none())
    }

    /// Looks for NaN and infinities, by the servers' policy, among what they multiply with `factor`.
    pub(super) fn check_finite(
        &self,
        plan: &Plan,
        id: VariableId,
        bytes: &[u8],
        factor: f64,
    ) -> Result<(), Error> {
        if self.client.welcomed.non_finite != (NonFinitePolicy::Reject {}) {
            return Ok(());
        }
        let variable = plan.catalogue().variable(id);
        let bytes = &bytes[..variable.bytes() as usize];
        match first_bad(variable.dtype(), bytes, factor) {
            None => Ok(()),
            Some((element, value)) => {
                let variable = variable.name().to_owned();
                Err(Error::NonFinite { variable, element, value })
            }
        }
    }

    /// The same for rows.
    pub(super) fn check_rows_finite(
        &self,
        plan: &Plan,
        rows: &RowSet,
        factor: f64,
    ) -> Result<(), Error> {
        if self.client.welcomed.non_finite != (NonFinitePolicy::Reject {}) || rows.len() == 0 {
            return Ok(());
        }
        let dtype = plan.catalogue().variable(rows.variable()).dtype();
        match first_bad(dtype, rows.values(), factor) {
            None => Ok(()),
            Some((element, value)) => Err(rows.non_finite(plan, element, value)),
        }
    }
}

/// What a shard has found in a gradient that was left to it, told as it is told of one that was looked
/// at here. Elements of rows have other numbers there, and stay with the refusal.
fn named(plan: Option<&Plan>, error: Error) -> Error {
    let Error::Refused { refusal: Refusal::NonFinite { variable, element, value }, .. } = &error
    else {
        return error;
    };
    let variables = plan.map_or(&[][..], |plan| plan.catalogue().variables());
    match variables.get(variable.0 as usize).filter(|variable| !variable.is_sparse()) {
        Some(variable) => Error::NonFinite {
            variable: variable.name().to_owned(),
            element: *element as usize,
            value: *value,
        },
        None => error,
    }
}

/// The first element that is NaN or infinite, or is once it is multiplied.
fn first_bad(dtype: DType, bytes: &[u8], factor: f64) -> Option<(usize, f64)> {
    if factor.abs() <= 1.0 {
        return first_non_finite(dtype, bytes);
    }
    let products = singles(dtype, bytes, factor);
    first_non_finite(DType::F32, bytemuck::cast_slice(&products))
}
