//! A push that is sent variable by variable, as gradients become ready.

use std::sync::Arc;

use pushpull_common::ids::Sequence;
use pushpull_common::tensor::Element;

use crate::error::{Error, ViewError};
use crate::fanout::Plan;
use crate::initial::padded;
use crate::outcome::Push;
use crate::session::Command;
use crate::worker::Worker;

/// A push under way, from [`Worker::begin`]: one sequence number, one commit on each shard.
///
/// Dropping it before [`Pushing::finish`] withdraws it, and its token goes back.
#[derive(Debug)]
#[must_use = "a push that is not finished is withdrawn"]
pub struct Pushing<'a> {
    worker: &'a mut Worker,
    plan: Arc<Plan>,
    sequence: Sequence,
    sent: Vec<String>,
    /// A future that was to send a variable was dropped: nobody knows whether it did.
    interrupted: bool,
    finished: bool,
}

impl<'a> Pushing<'a> {
    pub(crate) fn new(worker: &'a mut Worker, plan: Arc<Plan>, sequence: Sequence) -> Self {
        Pushing { worker, plan, sequence, sent: Vec::new(), interrupted: false, finished: false }
    }

    /// Sends the gradient of one variable. It is copied, so `gradient` is free at once.
    ///
    /// After an error about this variable the push can go on without it. If the future is dropped,
    /// it cannot: nobody knows whether the variable is in it, and it will not be finished.
    pub async fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        if self.sent.iter().any(|sent| sent == name) {
            return Err(ViewError::Twice { name: name.to_owned() }.into());
        }
        let (_, bytes) = padded(&self.plan, name, gradient)?;
        if std::mem::replace(&mut self.interrupted, true) {
            return Err(Error::Interrupted);
        }
        let aligned = bytemuck::cast_slice(gradient);
        let result = self.worker.more_parts(&self.plan, self.sequence, name, bytes, aligned).await;
        self.has_sent(name, result)
    }

    /// Sends the gradient of a sparse variable: rows as [`crate::Gradients::set_rows`] takes them. All
    /// of its rows go at once. Otherwise as [`Pushing::variable`].
    pub async fn rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), Error> {
        if self.sent.iter().any(|sent| sent == name) {
            return Err(ViewError::Twice { name: name.to_owned() }.into());
        }
        if std::mem::replace(&mut self.interrupted, true) {
            return Err(Error::Interrupted);
        }
        let result = self.worker.more_rows(&self.plan, self.sequence, name, ids, rows).await;
        self.has_sent(name, result)
    }

    fn has_sent(&mut self, name: &str, result: Result<(), Error>) -> Result<(), Error> {
        self.interrupted = false;
        result?;
        self.sent.push(name.to_owned());
        Ok(())
    }

    /// Ends the push and waits for what became of it; as [`Worker::push`].
    pub async fn finish(mut self) -> Result<Push, Error> {
        if self.interrupted {
            return Err(Error::Interrupted);
        }
        if self.sent.is_empty() {
            return Err(Error::EmptyPush);
        }
        self.finished = true;
        self.worker.wait_for_push(Command::End { sequence: self.sequence }).await
    }
}

impl Drop for Pushing<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.worker.abandon(self.sequence);
        }
    }
}
