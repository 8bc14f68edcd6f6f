//! Commands on their way to the session's thread, replies on their way back, and what becomes of
//! those that do not arrive.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::error::Error;
use crate::session::{Command, OpId, Reply};
use crate::token::{Dropped, Returns};

pub(super) type Answer = oneshot::Sender<Delivery>;

/// An operation on its way to the session. If it does not arrive, what it was to spend goes back.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) op: OpId,
    pub(super) command: Option<Command>,
    pub(super) deadline: Instant,
    pub(super) answer: Option<Answer>,
    pub(super) returns: Arc<Returns>,
}

impl Posted {
    /// The command and the way to its caller; `None` if the caller has gone.
    pub(super) fn take(&mut self) -> Option<(Command, Answer)> {
        let answer = self.answer.take().filter(|answer| !answer.is_closed())?;
        Some((self.command.take()?, answer))
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        match self.command.take() {
            Some(Command::Push { order } | Command::Begin { order }) => {
                if let Some(grant) = order.grant {
                    self.returns.add(Dropped::Token(grant));
                }
            }
            Some(Command::End { sequence }) => self.returns.add(Dropped::Push(sequence)),
            _ => {}
        }
    }
}

/// A reply on its way to its caller. If it does not arrive, what it hands over goes back.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) reply: Option<Result<Reply, Error>>,
    pub(super) returns: Arc<Returns>,
}

impl Delivery {
    pub(super) fn take(mut self) -> Option<Result<Reply, Error>> {
        self.reply.take()
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        match self.reply.take() {
            Some(Ok(Reply::Token(Some(grant)))) => self.returns.add(Dropped::Token(grant)),
            Some(Ok(Reply::Begun { sequence })) => self.returns.add(Dropped::Push(sequence)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::{GlobalStep, Sequence, TokenId};
    use pushpull_common::protocol::Grant;
    use pushpull_common::protocol::message::Operation;

    use super::*;
    use crate::session::{PushOrder, Read};

    fn grant() -> Grant {
        Grant { token: TokenId(1), generation: 1, step: GlobalStep(0), room: 0 }
    }

    fn posted(command: Command, returns: &Arc<Returns>) -> (Posted, oneshot::Receiver<Delivery>) {
        let (answer, answered) = oneshot::channel();
        let (deadline, returns) = (Instant::now(), returns.clone());
        let (command, answer) = (Some(command), Some(answer));
        (Posted { op: OpId(1), command, deadline, answer, returns }, answered)
    }

    fn push() -> Command {
        let (operation, grant) = (Operation::Gradient {}, Some(grant()));
        let order = PushOrder::of_parts(operation, grant, Read::default(), Vec::new());
        Command::Push { order }
    }

    #[test]
    fn a_command_whose_caller_has_gone_gives_back_what_it_was_to_spend() {
        let returns = Arc::new(Returns::default());
        let (mut command, answered) = posted(push(), &returns);
        drop(answered);
        assert!(command.take().is_none());
        drop(command);
        assert!(matches!(returns.take()[..], [Dropped::Token(_)]));
        let sequence = Sequence(3);
        drop(posted(Command::End { sequence }, &returns));
        assert!(matches!(returns.take()[..], [Dropped::Push(Sequence(3))]));
        let (mut command, _answered) = posted(push(), &returns);
        assert!(command.take().is_some());
        drop(command);
        assert!(returns.take().is_empty(), "it has arrived");
    }

    #[test]
    fn a_reply_that_nobody_takes_gives_back_what_it_hands_over() {
        let returns = Arc::new(Returns::default());
        let deliver = |reply| Delivery { reply: Some(Ok(reply)), returns: returns.clone() };
        let (answer, answered) = oneshot::channel();
        answer.send(deliver(Reply::Token(Some(grant())))).unwrap();
        // The future is dropped between the answer and its caller's next turn.
        drop(answered);
        assert!(matches!(returns.take()[..], [Dropped::Token(_)]));
        drop(deliver(Reply::Begun { sequence: Sequence(5) }));
        assert!(matches!(returns.take()[..], [Dropped::Push(Sequence(5))]));
        let taken = deliver(Reply::Token(Some(grant()))).take();
        assert!(matches!(taken, Some(Ok(Reply::Token(Some(_))))) && returns.take().is_empty());
    }
}
