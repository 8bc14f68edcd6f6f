//! A push whose variables are sent one by one.

use std::sync::Arc;

use pushpull_common::ids::{Sequence, VariableId};
use pushpull_common::tensor::Element;
use smallvec::SmallVec;

use crate::error::{Error, ViewError};

use crate::gradients::row_ids;
use crate::gradients::staged_parts::StagedParts;
use crate::initial_values::check_whole;
use crate::joined_model::JoinedModel;
use crate::metrics::TimedOperation;
use crate::outcome::Push;
use crate::runtime::OpenOperation;
use crate::session::SessionCommand;
use crate::token::DroppedItem;
use crate::worker::PushHandle;

/// A push whose gradients are sent as they become ready, from [`crate::Worker::begin`]. It has one
/// sequence number, and each shard applies it in one commit.
///
/// Call [`StreamingPush::variable`] or [`StreamingPush::rows`] for each variable, then
/// [`StreamingPush::finish`]. Dropping it before `finish` withdraws the push and returns the token.
#[derive(Debug)]
#[must_use = "a push that is not finished is withdrawn"]
pub struct StreamingPush {
    model: Arc<JoinedModel>,
    sequence: Sequence,
    sent: Sent,
    /// A future that sent a variable was dropped, so it is unknown whether the variable is in the
    /// push.
    interrupted: bool,
    finished: bool,
    /// Makes the session run while the caller computes, so that it sends the gradients meanwhile.
    _open: OpenOperation,
}

/// The variables that were sent; a few of them need no allocation.
type Sent = SmallVec<[VariableId; 32]>;

impl StreamingPush {
    pub(crate) fn new(model: Arc<JoinedModel>, sequence: Sequence) -> Self {
        let _open = model.caller.returns().leadership().open();
        StreamingPush {
            model,
            sequence,
            sent: Sent::new(),
            interrupted: false,
            finished: false,
            _open,
        }
    }

    /// Sends the gradient of one dense variable. `gradient` has all its elements, in row-major
    /// order, and is copied or encoded before this first waits.
    ///
    /// After an error about this variable the push can continue without it. Dropping the future
    /// makes the push unusable: it is unknown whether the variable was sent, and
    /// [`StreamingPush::finish`] returns [`Error::DroppedVariable`].
    ///
    /// # Errors
    /// [`Error::View`], [`Error::NonFinite`] and [`Error::Encode`]. NaN and infinity are checked
    /// here, even with a single shard.
    pub async fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        self.not_twice(name)?;
        let id = check_whole(&self.model.plan, name, gradient)?;
        self.send(id, |streaming_push, staged| {
            streaming_push.trained(name, id)?;
            let elements = bytemuck::cast_slice(gradient);
            streaming_push.model.variable_parts(id, elements, &mut staged.copies)
        })
        .await
    }

    /// Sends the gradient of a sparse variable, with all its rows at once, as
    /// [`crate::Gradients::set_rows`] describes them. Otherwise like [`StreamingPush::variable`].
    pub async fn rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        let id = self.not_twice(name)?;
        self.send(id, |streaming_push, staged| {
            let plan = &streaming_push.model.plan;
            row_ids::check::<T>(plan, name, ids, rows.len())?;
            streaming_push.trained(name, id)?;
            staged.rows.set(plan, id, ids, rows)?;
            streaming_push.model.rows_parts(staged, id)
        })
        .await
    }

    /// Sends the parts that `make` makes of a variable.
    async fn send(
        &mut self,
        id: VariableId,
        make: impl FnOnce(&StreamingPush, &mut StagedParts) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if std::mem::replace(&mut self.interrupted, true) {
            return Err(Error::DroppedVariable);
        }
        let mut staged = self.model.take_staging(id);
        let free = Arc::get_mut(&mut staged).expect("staging memory from the pool is not shared");
        let result = match make(self, free) {
            Ok(()) => {
                self.model.return_staging(id, &staged);
                self.more(staged).await
            }
            Err(error) => Err(error),
        };
        self.interrupted = false;
        result?;
        self.sent.push(id);
        Ok(())
    }

    /// Returns the id of this variable, if it is not in the push yet.
    fn not_twice(&self, name: &str) -> Result<VariableId, ViewError> {
        let id = self.model.plan.find(name)?;
        match self.sent.contains(&id) {
            true => Err(ViewError::Twice { name: name.to_owned() }),
            false => Ok(id),
        }
    }

    fn trained(&self, name: &str, id: VariableId) -> Result<(), Error> {
        match self.model.plan.catalogue().variable(id).is_trainable() {
            true => Ok(()),
            false => Err(ViewError::Plain { name: name.to_owned() }.into()),
        }
    }

    async fn more(&self, staged: Arc<StagedParts>) -> Result<(), Error> {
        let sequence = self.sequence;
        let JoinedModel { caller, timeout, .. } = &*self.model;
        let command =
            SessionCommand::AddParts { sequence, staged: Some(staged), parts: Vec::new() };
        let _timer = caller.times().timer(TimedOperation::Push).started();
        caller.call("push", command, *timeout).await.map(|_| ())
    }

    /// Ends the push and waits for its outcome, which is as for [`crate::Worker::push`].
    ///
    /// # Errors
    /// [`Error::EmptyPush`] if no variable was sent, [`Error::DroppedVariable`], and those of
    /// [`crate::Worker::push`].
    pub async fn finish(mut self) -> Result<Push, Error> {
        if self.interrupted {
            return Err(Error::DroppedVariable);
        }
        if self.sent.is_empty() {
            return Err(Error::EmptyPush);
        }
        self.finished = true;
        let command = SessionCommand::End { sequence: self.sequence };
        PushHandle::submit(&self.model, command).await
    }
}

impl Drop for StreamingPush {
    fn drop(&mut self) {
        if !self.finished {
            self.model.caller.returns().add(DroppedItem::Push(self.sequence));
        }
    }
}
