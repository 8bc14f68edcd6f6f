//! Carries commands to the session and replies to callers. Tokens and pushes in messages that do
//! not arrive are returned.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::oneshot;

use super::leadership::OpenOperation;
use crate::error::Error;
use crate::session::{OpId, Reply, SessionCommand};
use crate::token::{DroppedItem, ReturnQueue};

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
) -> (Answer, Call) {
    let (sender, receiver) = oneshot::channel();
    let open = returns.leadership().open();
    let answer = Answer { sender, returns: returns.clone(), _open: open };
    let (state, returns) = (CallState::Waiting(receiver), returns.clone());
    (answer, Call { op, doing, state, returns })
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
pub(crate) struct Call {
    op: OpId,
    doing: &'static str,
    state: CallState,
    returns: Arc<ReturnQueue>,
}

#[derive(Debug)]
enum CallState {
    Waiting(oneshot::Receiver<Result<Reply, Error>>),
    /// The operation could not be submitted.
    Failed(Error),
    Done,
}

impl Call {
    /// Returns an operation that failed before it was submitted.
    pub(super) fn failed(doing: &'static str, error: Error, returns: &Arc<ReturnQueue>) -> Call {
        let (op, state, returns) = (OpId(0), CallState::Failed(error), returns.clone());
        Call { op, doing, state, returns }
    }

    /// Sets the error of an operation that could not be submitted.
    pub(super) fn fail(&mut self, error: Error) {
        self.state = CallState::Failed(error);
    }
}

impl Future for Call {
    type Output = Result<Reply, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let doing = self.doing;
        let reply = match std::mem::replace(&mut self.state, CallState::Done) {
            CallState::Done => Err(Error::Ended { doing }),
            CallState::Failed(error) => Err(error),
            CallState::Waiting(mut receiver) => match Pin::new(&mut receiver).poll(context) {
                Poll::Ready(reply) => reply.unwrap_or(Err(Error::Ended { doing })),
                Poll::Pending => {
                    self.state = CallState::Waiting(receiver);
                    return Poll::Pending;
                }
            },
        };
        Poll::Ready(reply)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let CallState::Waiting(receiver) = &mut self.state else { return };
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
        Grant { token: TokenId(1), generation: 1, step: GlobalStep(0), push_slot: 0 }
    }

    fn queued_command(
        command: SessionCommand,
        returns: &Arc<ReturnQueue>,
    ) -> (QueuedCommand, Call) {
        let (answer, call) = reply_channel(OpId(1), "test", returns);
        let (deadline, returns, open) =
            (Instant::now(), returns.clone(), returns.leadership().open());
        let (command, answer) = (Some(command), Some(answer));
        (QueuedCommand { op: OpId(1), command, deadline, answer, returns, _open: open }, call)
    }

    fn push() -> SessionCommand {
        let (operation, grant) = (Operation::Gradient {}, Some(grant()));
        let order = PushOrder::of_parts(operation, grant, ReadPoint::default(), Vec::new());
        SessionCommand::Push { order }
    }

    fn poll(call: &mut Call) -> Poll<Result<Reply, Error>> {
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
        let (waited, awaited, sequence) = (Default::default(), Default::default(), None);
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
