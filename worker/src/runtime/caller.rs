//! The callers' end of a session: carries commands to it and replies back. Tokens and pushes in
//! messages that do not arrive are returned.

#[cfg(test)]
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pushpull_common::protocol::Grant;
use pushpull_common::protocol::message::EndReason;
use tokio::sync::oneshot;

use super::command_queue::{COMMANDS_MAX, CommandQueue, NotQueued};
use super::leadership::OpenOperation;
use super::mapped_memory::{MappedShards, PushBuffers};
use super::runner::SessionRunner;
use crate::error::Error;
use crate::metrics::OperationTimes;
use crate::session::{OpId, Reply, SessionCommand, UnclaimedTokens};
use crate::token::{DroppedItem, ReturnQueue};

/// The timeout used when the requested one overflows [`Instant`].
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// The time before its deadline at which a server may end a wait.
const LIMIT_MARGIN: Duration = Duration::from_millis(100);

/// Submits operations to a session. All users of the session share it.
#[derive(Debug)]
pub(crate) struct Caller {
    commands: Arc<CommandQueue>,
    returns: Arc<ReturnQueue>,
    unclaimed: Arc<UnclaimedTokens>,
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
    next_op: AtomicU64,
    runner: Arc<SessionRunner>,
    times: Arc<OperationTimes>,
    /// The deadline of all operations that begin now, beside their own timeouts.
    limit: Mutex<Option<Instant>>,
}

impl Caller {
    pub(super) fn new(
        commands: Arc<CommandQueue>,
        returns: Arc<ReturnQueue>,
        unclaimed: Arc<UnclaimedTokens>,
        mapped_shards: Arc<MappedShards>,
        push_buffers: Arc<PushBuffers>,
        runner: Arc<SessionRunner>,
    ) -> Caller {
        let next_op = AtomicU64::new(1);
        let times = Arc::default();
        Caller {
            commands,
            returns,
            unclaimed,
            mapped_shards,
            push_buffers,
            next_op,
            runner,
            times,
            limit: Mutex::default(),
        }
    }

    pub(crate) fn returns(&self) -> &Arc<ReturnQueue> {
        &self.returns
    }

    /// Takes a token that was granted without a request. Does not block.
    pub(crate) fn claim(&self) -> Option<Grant> {
        match self.is_forked() {
            true => None,
            false => self.unclaimed.claim(),
        }
    }

    /// Returns whether this is a child of `fork`, which has no session.
    pub(crate) fn is_forked(&self) -> bool {
        self.runner.home().is_elsewhere()
    }

    /// Returns why no more tokens will be granted, once the step owner has said so.
    pub(crate) fn end_reason(&self) -> Option<EndReason> {
        self.unclaimed.end_reason()
    }

    /// Returns whether the session has failed, so that every operation fails.
    pub(crate) fn has_failed(&self) -> bool {
        self.unclaimed.has_failed()
    }

    /// Returns the counts and the times of the operations.
    pub(crate) fn times(&self) -> &Arc<OperationTimes> {
        &self.times
    }

    /// Returns the runner of the session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        &self.runner
    }

    /// Returns the shards whose values the caller can read from shared memory. A child of `fork` has
    /// none: it would pin values in the reader slots of its parent.
    pub(crate) fn mapped_shards(&self) -> Option<&MappedShards> {
        (!self.is_forked()).then_some(&*self.mapped_shards)
    }

    /// Returns the push buffers that the shards share. A child of `fork` has none: those that it
    /// has inherited are its parent's.
    pub(crate) fn push_buffers(&self) -> Option<&PushBuffers> {
        (!self.is_forked()).then_some(&*self.push_buffers)
    }

    /// Sets a deadline for all later calls, beside their own timeouts; `None` removes it.
    pub(crate) fn limit(&self, limit: Option<Instant>) {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = limit;
    }

    /// Returns whether the limit of all calls is reached, or within the margin by which a server
    /// answers before a deadline.
    pub(crate) fn is_at_limit(&self) -> bool {
        let limit = *self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        limit.is_some_and(|limit| limit <= Instant::now() + LIMIT_MARGIN)
    }

    /// Submits a command and returns a future of its reply. The operation fails after `timeout`, or
    /// at the limit of all calls. Dropping the future cancels the operation.
    pub(crate) fn call(
        &self,
        doing: &'static str,
        command: SessionCommand,
        timeout: Duration,
    ) -> OperationFuture {
        let limit = *self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let remaining = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
        self.call_without_limit(doing, command, remaining.map_or(timeout, |it| it.min(timeout)))
    }

    /// Submits a command as [`Caller::call`] does, for an operation whose length has nothing to do
    /// with a recovery.
    pub(crate) fn call_without_limit(
        &self,
        doing: &'static str,
        command: SessionCommand,
        timeout: Duration,
    ) -> OperationFuture {
        if self.is_forked() {
            let parent = self.runner.home().id();
            return self.failed(doing, Error::Forked { doing, parent });
        }
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
        self.commands.add(queued_command).map_err(|refused| match refused {
            NotQueued::Full => Error::Busy { doing, limit: COMMANDS_MAX },
            NotQueued::Ended => Error::Ended { doing },
        })?;
        self.returns.leadership().call();
        Ok(())
    }

    /// Returns an operation that failed before it was submitted.
    pub(crate) fn failed(&self, doing: &'static str, error: Error) -> OperationFuture {
        OperationFuture::failed(doing, error, &self.returns)
    }

    /// Ends the session for all callers.
    pub(super) fn end(&self) {
        self.commands.end();
        self.returns.leadership().end();
    }
}

/// An operation on its way to the session. If it does not arrive, its token or push is returned.
#[derive(Debug)]
pub(super) struct QueuedCommand {
    pub(super) op: OpId,
    pub(super) command: Option<SessionCommand>,
    pub(super) deadline: Instant,
    /// Sends the reply to the caller, until taken.
    pub(super) answer: Option<Answer>,
    pub(super) returns: Arc<ReturnQueue>,
    /// Counts the operation as open while it is queued.
    pub(super) _open: OpenOperation,
}

impl QueuedCommand {
    /// Takes the command and the sender of its reply; `None` if the caller has dropped its future.
    pub(super) fn take(&mut self) -> Option<(SessionCommand, Answer)> {
        let answer = self.answer.take().filter(|answer| !answer.is_cancelled())?;
        Some((self.command.take()?, answer))
    }
}

impl Drop for QueuedCommand {
    fn drop(&mut self) {
        match self.command.take() {
            Some(SessionCommand::Push { order } | SessionCommand::Begin { order }) => {
                if let Some(grant) = order.grant {
                    self.returns.add(DroppedItem::Token(grant));
                }
            }
            Some(SessionCommand::End { sequence }) => self.returns.add(DroppedItem::Push(sequence)),
            _ => {}
        }
    }
}

/// Creates the reply channel of one operation.
pub(super) fn reply_channel(
    op: OpId,
    doing: &'static str,
    returns: &Arc<ReturnQueue>,
) -> (Answer, OperationFuture) {
    let (sender, receiver) = oneshot::channel();
    let open = returns.leadership().open();
    let answer = Answer { sender, returns: returns.clone(), _open: open };
    let state = OperationState::Waiting(receiver);
    let returns = returns.clone();
    (answer, OperationFuture { op, doing, state, returns })
}

/// The session's end of a reply channel. Dropping it without a reply fails the operation with
/// [`Error::Ended`].
#[derive(Debug)]
pub(super) struct Answer {
    sender: oneshot::Sender<Result<Reply, Error>>,
    returns: Arc<ReturnQueue>,
    /// Counts the operation as open until the reply is sent.
    _open: OpenOperation,
}

impl Answer {
    /// Returns whether the caller has dropped its future.
    fn is_cancelled(&self) -> bool {
        self.sender.is_closed()
    }

    /// Sends the reply. If the caller has dropped its future, a token or push in the reply is
    /// returned.
    pub(super) fn send(self, reply: Result<Reply, Error>) {
        if let Err(reply) = self.sender.send(reply) {
            return_unclaimed(reply, &self.returns);
        }
    }
}

/// The caller's end of an operation: a future of the reply.
///
/// Dropping it cancels the operation.
#[derive(Debug)]
#[must_use = "dropping it cancels the operation"]
pub(crate) struct OperationFuture {
    op: OpId,
    doing: &'static str,
    state: OperationState,
    returns: Arc<ReturnQueue>,
}

#[derive(Debug)]
enum OperationState {
    Waiting(oneshot::Receiver<Result<Reply, Error>>),
    /// The operation could not be submitted.
    Failed(Error),
    Done,
}

impl OperationFuture {
    /// Returns an operation that failed before it was submitted.
    pub(super) fn failed(
        doing: &'static str,
        error: Error,
        returns: &Arc<ReturnQueue>,
    ) -> OperationFuture {
        let op = OpId(0);
        let state = OperationState::Failed(error);
        let returns = returns.clone();
        OperationFuture { op, doing, state, returns }
    }

    /// Sets the error of an operation that could not be submitted.
    pub(super) fn fail(&mut self, error: Error) {
        self.state = OperationState::Failed(error);
    }
}

impl Future for OperationFuture {
    type Output = Result<Reply, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let doing = self.doing;
        let reply = match std::mem::replace(&mut self.state, OperationState::Done) {
            OperationState::Done => Err(Error::Ended { doing }),
            OperationState::Failed(error) => Err(error),
            OperationState::Waiting(mut receiver) => match Pin::new(&mut receiver).poll(context) {
                Poll::Ready(reply) => reply.unwrap_or(Err(Error::Ended { doing })),
                Poll::Pending => {
                    self.state = OperationState::Waiting(receiver);
                    return Poll::Pending;
                }
            },
        };
        Poll::Ready(reply)
    }
}

impl Drop for OperationFuture {
    fn drop(&mut self) {
        let OperationState::Waiting(receiver) = &mut self.state else { return };
        // If a reply is sent after this, `Answer::send` returns what it carries.
        receiver.close();
        let reply = receiver.try_recv().ok();
        match reply {
            // After a timeout a push may still be half sent; the session must abandon it.
            Some(Err(Error::Timeout { .. })) | None => {
                self.returns.add(DroppedItem::Operation(self.op));
            }
            Some(reply) => return_unclaimed(reply, &self.returns),
        }
    }
}

/// Returns the token or push in a reply that no caller takes.
fn return_unclaimed(reply: Result<Reply, Error>, returns: &ReturnQueue) {
    match reply {
        Ok(Reply::Token(Some(grant))) => returns.add(DroppedItem::Token(grant)),
        Ok(Reply::Begun { sequence }) => returns.add(DroppedItem::Push(sequence)),
        _ => {}
    }
}

/// The operations that callers submit; a test answers them in place of a session.
#[cfg(test)]
pub(crate) struct SubmittedOperations(Arc<CommandQueue>, VecDeque<QueuedCommand>);

/// One submitted operation.
#[cfg(test)]
pub(crate) struct SubmittedOperation(QueuedCommand);

#[cfg(test)]
impl Caller {
    /// Returns a caller without a session, and the operations that it submits.
    pub(crate) fn without_session() -> (Caller, SubmittedOperations) {
        let commands = Arc::<CommandQueue>::default();
        let submitted = SubmittedOperations(commands.clone(), VecDeque::new());
        let returns = Arc::new(ReturnQueue::default());
        let runner = Arc::new(
            SessionRunner::new(returns.leadership().clone(), Duration::ZERO).expect("a runtime"),
        );
        let unclaimed = Arc::default();
        let mapped_shards = Arc::default();
        let push_buffers = Arc::default();
        let caller = Caller::new(commands, returns, unclaimed, mapped_shards, push_buffers, runner);
        (caller, submitted)
    }
}

#[cfg(test)]
impl SubmittedOperations {
    pub(crate) fn next(&mut self) -> SubmittedOperation {
        self.1.append(&mut self.0.take());
        SubmittedOperation(self.1.pop_front().expect("an operation was submitted"))
    }
}

#[cfg(test)]
impl SubmittedOperation {
    pub(crate) fn answer(self, reply: Result<crate::session::Reply, Error>) {
        self.answer_with(|_| reply);
    }

    /// Answers with what `serve` makes of the command.
    pub(crate) fn answer_with(
        mut self,
        serve: impl FnOnce(SessionCommand) -> Result<crate::session::Reply, Error>,
    ) {
        let (command, answer) = self.0.take().expect("the caller waits");
        answer.send(serve(command));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;

    use pushpull_common::ids::{GlobalStep, Sequence, TokenId};
    use pushpull_common::protocol::Grant;
    use pushpull_common::protocol::message::Operation;

    use super::*;
    use crate::session::{PushOrder, ReadPoint};

    fn grant() -> Grant {
        Grant {
            token: TokenId(1),
            generation: 1,
            step: GlobalStep(0),
            push_slot: 0,
            samples: None,
            ahead: None,
        }
    }

    fn queued_command(
        command: SessionCommand,
        returns: &Arc<ReturnQueue>,
    ) -> (QueuedCommand, OperationFuture) {
        let (answer, call) = reply_channel(OpId(1), "test", returns);
        let (deadline, returns, open) =
            (Instant::now(), returns.clone(), returns.leadership().open());
        let command = Some(command);
        let answer = Some(answer);
        (QueuedCommand { op: OpId(1), command, deadline, answer, returns, _open: open }, call)
    }

    fn push() -> SessionCommand {
        let operation = Operation::Gradient {};
        let grant = Some(grant());
        let order = PushOrder::of_parts(operation, grant, ReadPoint::default(), Vec::new());
        SessionCommand::Push { order }
    }

    fn poll(call: &mut OperationFuture) -> Poll<Result<Reply, Error>> {
        pin!(call).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn an_undelivered_command_returns_its_token_or_push() {
        let returns = Arc::new(ReturnQueue::default());
        let (mut command, call) = queued_command(push(), &returns);
        drop(call);
        assert!(matches!(returns.take()[..], [(DroppedItem::Operation(OpId(1)), _)]));
        assert!(command.take().is_none());
        drop(command);
        assert!(matches!(returns.take()[..], [(DroppedItem::Token(_), _)]));
        let sequence = Sequence(3);
        let (command, _call) = queued_command(SessionCommand::End { sequence }, &returns);
        drop(command);
        assert!(matches!(returns.take()[..], [(DroppedItem::Push(Sequence(3)), _)]));
        let (mut command, _call) = queued_command(push(), &returns);
        assert!(command.take().is_some());
        drop(command);
        assert!(returns.take().is_empty(), "a delivered command returns nothing");
    }

    #[test]
    fn an_undelivered_reply_returns_its_token_or_push() {
        let returns = Arc::new(ReturnQueue::default());
        let open = || reply_channel(OpId(1), "test", &returns);
        // The future is dropped after the reply is sent, or before.
        let (answer, call) = open();
        answer.send(Ok(Reply::Token(Some(grant()))));
        drop(call);
        assert!(matches!(returns.take()[..], [(DroppedItem::Token(_), _)]));
        let (answer, call) = open();
        drop(call);
        answer.send(Ok(Reply::Begun { sequence: Sequence(5) }));
        let dropped = returns.take();
        assert!(matches!(
            dropped[..],
            [(DroppedItem::Operation(_), _), (DroppedItem::Push(Sequence(5)), _)]
        ));
        let (answer, mut call) = open();
        answer.send(Ok(Reply::Token(Some(grant()))));
        assert!(matches!(poll(&mut call), Poll::Ready(Ok(Reply::Token(Some(_))))));
        drop(call);
        assert!(returns.take().is_empty());
        let (answer, call) = open();
        let waited = Default::default();
        let awaited = Default::default();
        let sequence = None;
        answer.send(Err(Error::Timeout { doing: "test", waited, awaited, sequence }));
        drop(call);
        assert!(
            matches!(returns.take()[..], [(DroppedItem::Operation(_), _)]),
            "the push may be half sent"
        );
    }

    #[test]
    fn the_end_of_a_session_fails_open_operations() {
        let returns = Arc::new(ReturnQueue::default());
        let (command, mut call) = queued_command(push(), &returns);
        assert!(poll(&mut call).is_pending());
        drop(command);
        assert!(matches!(poll(&mut call), Poll::Ready(Err(Error::Ended { doing: "test" }))));
    }
}
