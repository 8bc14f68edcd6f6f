//! Commands on their way to the session's thread, replies on their way back, and what becomes of
//! those that do not arrive.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::oneshot;

use super::leadership::OpenOperation;
use crate::error::Error;
use crate::session::{OpId, Reply, SessionCommand};
use crate::token::{DroppedItem, ReturnQueue};

/// An operation on its way to the session. If it does not arrive, what it was to spend goes back.
#[derive(Debug)]
pub(super) struct PendingReply {
    pub(super) op: OpId,
    pub(super) command: Option<SessionCommand>,
    pub(super) deadline: Instant,
    /// The way to the caller, until it is taken.
    pub(super) answer: Option<Answer>,
    pub(super) returns: Arc<ReturnQueue>,
    /// Until it has been taken, there is something to do.
    pub(super) _open: OpenOperation,
}

impl PendingReply {
    /// Takes the command and the way to its caller; `None` if the caller has gone.
    pub(super) fn take(&mut self) -> Option<(SessionCommand, Answer)> {
        let answer = self.answer.take().filter(|answer| !answer.is_for_nobody())?;
        Some((self.command.take()?, answer))
    }
}

impl Drop for PendingReply {
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

/// Makes both ends of the way back of one operation.
pub(super) fn way_back(
    op: OpId,
    doing: &'static str,
    returns: &Arc<ReturnQueue>,
) -> (Answer, Call) {
    let (sender, receiver) = oneshot::channel();
    let open = returns.leadership().open();
    let answer = Answer { sender, returns: returns.clone(), _open: open };
    let (state, returns) = (State::Waiting(receiver), returns.clone());
    (answer, Call { op, doing, state, returns })
}

/// The session's end: sends the reply. Dropping it tells the caller that there will be none.
#[derive(Debug)]
pub(super) struct Answer {
    sender: oneshot::Sender<Result<Reply, Error>>,
    returns: Arc<ReturnQueue>,
    /// Until it has been sent, there is something to do.
    _open: OpenOperation,
}

impl Answer {
    /// Whether the caller has gone.
    fn is_for_nobody(&self) -> bool {
        self.sender.is_closed()
    }

    /// Sends the reply. If the caller has gone, what it hands over goes back.
    pub(super) fn send(self, reply: Result<Reply, Error>) {
        if let Err(reply) = self.sender.send(reply) {
            give_back(reply, &self.returns);
        }
    }
}

/// An operation that the session has been told to do: the caller's end, and a future of the reply.
///
/// Dropping it tells the session that nobody waits any more.
#[derive(Debug)]
#[must_use = "an operation nobody waits for is given up"]
pub(crate) struct Call {
    op: OpId,
    doing: &'static str,
    state: State,
    returns: Arc<ReturnQueue>,
}

#[derive(Debug)]
enum State {
    Waiting(oneshot::Receiver<Result<Reply, Error>>),
    /// It could not be posted.
    Failed(Error),
    Over,
}

impl Call {
    /// One that has failed before it was posted.
    pub(super) fn failed(doing: &'static str, error: Error, returns: &Arc<ReturnQueue>) -> Call {
        let (op, state, returns) = (OpId(0), State::Failed(error), returns.clone());
        Call { op, doing, state, returns }
    }

    /// Says why the operation could not be posted.
    pub(super) fn fail(&mut self, error: Error) {
        self.state = State::Failed(error);
    }
}

impl Future for Call {
    type Output = Result<Reply, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let doing = self.doing;
        let reply = match std::mem::replace(&mut self.state, State::Over) {
            State::Over => Err(Error::Ended { doing }),
            State::Failed(error) => Err(error),
            State::Waiting(mut receiver) => match Pin::new(&mut receiver).poll(context) {
                Poll::Ready(reply) => reply.unwrap_or(Err(Error::Ended { doing })),
                Poll::Pending => {
                    self.state = State::Waiting(receiver);
                    return Poll::Pending;
                }
            },
        };
        Poll::Ready(reply)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let State::Waiting(receiver) = &mut self.state else { return };
        // A reply that is sent after this is given back by the session's end.
        receiver.close();
        let reply = receiver.try_recv().ok();
        match reply {
            // A push may still be sent part by part when its time is over: its rest will not come.
            Some(Err(Error::Timeout { .. })) | None => {
                self.returns.add(DroppedItem::Operation(self.op));
            }
            Some(reply) => give_back(reply, &self.returns),
        }
    }
}

/// Gives back what a reply hands over, as nobody takes it.
fn give_back(reply: Result<Reply, Error>, returns: &ReturnQueue) {
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

    fn pending_reply(command: SessionCommand, returns: &Arc<ReturnQueue>) -> (PendingReply, Call) {
        let (answer, call) = way_back(OpId(1), "test", returns);
        let (deadline, returns, open) =
            (Instant::now(), returns.clone(), returns.leadership().open());
        let (command, answer) = (Some(command), Some(answer));
        (PendingReply { op: OpId(1), command, deadline, answer, returns, _open: open }, call)
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
    fn a_command_whose_caller_has_gone_gives_back_what_it_was_to_spend() {
        let returns = Arc::new(ReturnQueue::default());
        let (mut command, call) = pending_reply(push(), &returns);
        drop(call);
        assert!(matches!(returns.take()[..], [(DroppedItem::Operation(OpId(1)), _)]));
        assert!(command.take().is_none());
        drop(command);
        assert!(matches!(returns.take()[..], [(DroppedItem::Token(_), _)]));
        let sequence = Sequence(3);
        let (command, _call) = pending_reply(SessionCommand::End { sequence }, &returns);
        drop(command);
        assert!(matches!(returns.take()[..], [(DroppedItem::Push(Sequence(3)), _)]));
        let (mut command, _call) = pending_reply(push(), &returns);
        assert!(command.take().is_some());
        drop(command);
        assert!(returns.take().is_empty(), "it has arrived");
    }

    #[test]
    fn a_reply_that_nobody_takes_gives_back_what_it_hands_over() {
        let returns = Arc::new(ReturnQueue::default());
        let open = || way_back(OpId(1), "test", &returns);
        // The future is dropped between the answer and its caller's next turn, or before.
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
            "it may not be sent whole"
        );
    }

    #[test]
    fn a_session_that_ends_leaves_no_caller_waiting() {
        let returns = Arc::new(ReturnQueue::default());
        let (command, mut call) = pending_reply(push(), &returns);
        assert!(poll(&mut call).is_pending());
        drop(command);
        assert!(matches!(poll(&mut call), Poll::Ready(Err(Error::Ended { doing: "test" }))));
    }
}
