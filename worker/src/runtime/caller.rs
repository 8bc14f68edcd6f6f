//! The callers' end of a session: sends commands and receives replies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::protocol::Grant;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::mapped_shards::MappedShards;
use super::push_buffers::PushBuffers;
use super::reply::{Answer, Call, QueuedCommand, reply_channel};
use super::runner::SessionRunner;
use crate::error::Error;
use crate::session::{OpId, SessionCommand, UnclaimedTokens};
use crate::token::ReturnQueue;

/// The most operations queued for the session. A caller that waits for some of its operations stays
/// below this.
pub(super) const COMMANDS_MAX: usize = 1024;

/// The timeout used when the requested one overflows [`Instant`].
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Submits operations to a session. All users of the session share it.
#[derive(Debug)]
pub(crate) struct Caller {
    /// Sends commands to the session; `None` once the session has ended.
    commands: Mutex<Option<mpsc::Sender<QueuedCommand>>>,
    returns: Arc<ReturnQueue>,
    unclaimed: Arc<UnclaimedTokens>,
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
    next_op: AtomicU64,
    runner: Arc<SessionRunner>,
}

impl Caller {
    pub(super) fn new(
        commands: mpsc::Sender<QueuedCommand>,
        returns: Arc<ReturnQueue>,
        unclaimed: Arc<UnclaimedTokens>,
        mapped_shards: Arc<MappedShards>,
        push_buffers: Arc<PushBuffers>,
        runner: Arc<SessionRunner>,
    ) -> Caller {
        let next_op = AtomicU64::new(1);
        let commands = Mutex::new(Some(commands));
        Caller { commands, returns, unclaimed, mapped_shards, push_buffers, next_op, runner }
    }

    pub(crate) fn returns(&self) -> &Arc<ReturnQueue> {
        &self.returns
    }

    /// Takes a token that was granted without a request. Does not block.
    pub(crate) fn claim(&self) -> Option<Grant> {
        self.unclaimed.claim()
    }

    /// Returns the runner of the session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        &self.runner
    }

    /// Returns the shards whose values the caller can read from shared memory.
    pub(crate) fn mapped_shards(&self) -> &MappedShards {
        &self.mapped_shards
    }

    /// Returns the push buffers that the shards share.
    pub(crate) fn push_buffers(&self) -> &PushBuffers {
        &self.push_buffers
    }

    /// Submits a command and returns a future of its reply. The operation fails after `timeout`.
    /// Dropping the future cancels the operation.
    pub(crate) fn call(
        &self,
        doing: &'static str,
        command: SessionCommand,
        timeout: Duration,
    ) -> Call {
        let op = OpId(self.next_op.fetch_add(1, Ordering::Relaxed));
        let (answer, mut call) = reply_channel(op, doing, &self.returns);
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + FOREVER);
        let queued_command = self.queued_command(op, command, deadline, answer);
        if let Err(error) = self.submit(doing, queued_command) {
            call.fail(error);
        }
        call
    }

    fn queued_command(
        &self,
        op: OpId,
        command: SessionCommand,
        deadline: Instant,
        answer: Answer,
    ) -> QueuedCommand {
        let (returns, _open) = (self.returns.clone(), self.returns.leadership().open());
        QueuedCommand { op, command: Some(command), deadline, answer: Some(answer), returns, _open }
    }

    fn submit(&self, doing: &'static str, queued_command: QueuedCommand) -> Result<(), Error> {
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(commands) = &*commands else { return Err(Error::Ended { doing }) };
        match commands.try_send(queued_command) {
            Ok(()) => {
                self.returns.leadership().call();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(Error::Busy { doing, limit: COMMANDS_MAX }),
            Err(TrySendError::Closed(_)) => Err(Error::Ended { doing }),
        }
    }

    /// Returns an operation that failed before it was submitted.
    pub(crate) fn failed(&self, doing: &'static str, error: Error) -> Call {
        Call::failed(doing, error, &self.returns)
    }

    /// Ends the session for all callers.
    pub(super) fn end(&self) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.returns.leadership().end();
    }
}

/// The operations that callers submit; a test answers them in place of a session.
#[cfg(test)]
pub(crate) struct SubmittedOperations(mpsc::Receiver<QueuedCommand>);

/// One submitted operation.
#[cfg(test)]
pub(crate) struct SubmittedOperation(QueuedCommand);

#[cfg(test)]
impl Caller {
    /// Returns a caller without a session, and the operations that it submits.
    pub(crate) fn without_session() -> (Caller, SubmittedOperations) {
        let (commands, orders) = mpsc::channel(COMMANDS_MAX);
        let returns = Arc::new(ReturnQueue::default());
        let runner = Arc::new(
            SessionRunner::new(returns.leadership().clone(), Duration::ZERO).expect("a runtime"),
        );
        let (unclaimed, mapped_shards, push_buffers) =
            (Arc::default(), Arc::default(), Arc::default());
        let caller = Caller::new(commands, returns, unclaimed, mapped_shards, push_buffers, runner);
        (caller, SubmittedOperations(orders))
    }
}

#[cfg(test)]
impl SubmittedOperations {
    pub(crate) fn next(&mut self) -> SubmittedOperation {
        SubmittedOperation(self.0.try_recv().expect("an operation was submitted"))
    }
}

#[cfg(test)]
impl SubmittedOperation {
    pub(crate) fn answer(mut self, reply: Result<crate::session::Reply, Error>) {
        let (_, answer) = self.0.take().expect("the caller waits");
        answer.send(reply);
    }
}
