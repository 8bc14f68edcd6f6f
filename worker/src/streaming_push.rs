//! A push that is sent variable by variable, as gradients become ready.

use std::sync::Arc;

use pushpull_common::ids::{Sequence, VariableId};
use pushpull_common::tensor::Element;
use smallvec::SmallVec;

use crate::error::{Error, ViewError};
use crate::initial_values::whole;
use crate::joined_model::JoinedModel;
use crate::outcome::Push;
use crate::params::find;
use crate::rows;
use crate::runtime::OpenOperation;
use crate::session::Command;
use crate::staging::StagedParts;
use crate::token::Dropped;

/// A push under way, from [`crate::Worker::begin`]: one sequence number, one commit on each shard.
///
/// Dropping it before [`StreamingPush::finish`] withdraws it, and its token goes back.
#[derive(Debug)]
#[must_use = "a push that is not finished is withdrawn"]
pub struct StreamingPush {
    joined: Arc<JoinedModel>,
    sequence: Sequence,
    sent: Sent,
    /// A future that was to send a variable was dropped: nobody knows whether it did.
    interrupted: bool,
    finished: bool,
    /// What has been taken over is sent while its caller computes.
    _open: OpenOperation,
}

/// Variables that were sent: a few take no memory.
type Sent = SmallVec<[VariableId; 32]>;

impl StreamingPush {
    pub(crate) fn new(joined: Arc<JoinedModel>, sequence: Sequence) -> Self {
        let _open = joined.caller.returns().leadership().open();
        StreamingPush {
            joined,
            sequence,
            sent: Sent::new(),
            interrupted: false,
            finished: false,
            _open,
        }
    }

    /// Sends the gradient of one variable. It is copied, so `gradient` is free at once.
    ///
    /// After an error about this variable the push can go on without it. If the future is dropped,
    /// it cannot: nobody knows whether the variable is in it, and it will not be finished.
    pub async fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        self.not_twice(name)?;
        let id = whole(&self.joined.plan, name, gradient)?;
        self.send(id, |streaming_push, own| {
            streaming_push.trained(name, id)?;
            let elements = bytemuck::cast_slice(gradient);
            streaming_push.joined.variable_parts(id, elements, &mut own.copies)
        })
        .await
    }

    /// Sends the gradient of a sparse variable: rows as [`crate::Gradients::set_rows`] takes them. All
    /// of its rows go at once. Otherwise as [`StreamingPush::variable`].
    pub async fn rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let id = self.not_twice(name)?;
        self.send(id, |streaming_push, own| {
            let plan = &streaming_push.joined.plan;
            rows::check::<T>(plan, name, ids, rows.len())?;
            streaming_push.trained(name, id)?;
            own.rows.set(plan, id, ids, rows)?;
            streaming_push.joined.rows_parts(own, id)
        })
        .await
    }

    /// Sends a variable in the parts that `make` makes.
    async fn send(
        &mut self,
        id: VariableId,
        make: impl FnOnce(&StreamingPush, &mut StagedParts) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if std::mem::replace(&mut self.interrupted, true) {
            return Err(Error::Interrupted);
        }
        let mut own = self.joined.spare(id);
        let free = Arc::get_mut(&mut own).expect("nobody else has memory that is spare");
        let result = match make(self, free) {
            Ok(()) => {
                self.joined.keep(id, &own);
                self.more(own).await
            }
            Err(error) => Err(error),
        };
        self.interrupted = false;
        result?;
        self.sent.push(id);
        Ok(())
    }

    /// The variable of this name, if it is not in the push yet.
    fn not_twice(&self, name: &str) -> Result<VariableId, ViewError> {
        let id = find(&self.joined.plan, name)?;
        match self.sent.contains(&id) {
            true => Err(ViewError::Twice { name: name.to_owned() }),
            false => Ok(id),
        }
    }

    fn trained(&self, name: &str, id: VariableId) -> Result<(), Error> {
        match self.joined.plan.catalogue().variable(id).is_trainable() {
            true => Ok(()),
            false => Err(ViewError::Plain { name: name.to_owned() }.into()),
        }
    }

    async fn more(&self, own: Arc<StagedParts>) -> Result<(), Error> {
        let (sequence, JoinedModel { caller, timeout, .. }) = (self.sequence, &*self.joined);
        let command = Command::More { sequence, own: Some(own), parts: Vec::new() };
        caller.call("push", command, *timeout).await.map(|_| ())
    }

    /// Ends the push and waits for what became of it; as [`crate::Worker::push`].
    pub async fn finish(mut self) -> Result<Push, Error> {
        if self.interrupted {
            return Err(Error::Interrupted);
        }
        if self.sent.is_empty() {
            return Err(Error::EmptyPush);
        }
        self.finished = true;
        self.joined.push(Command::End { sequence: self.sequence }).await
    }
}

impl Drop for StreamingPush {
    fn drop(&mut self) {
        if !self.finished {
            self.joined.caller.returns().add(Dropped::Push(self.sequence));
        }
    }
}
