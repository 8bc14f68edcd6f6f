//! Commands on their way to the session's thread, replies on their way back, and what becomes of
//! those that do not arrive.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use pushpull_common::protocol::Outcome;

use super::leadership::OpenOperation;
use crate::error::Error;
use crate::session::{Command, OpId, Reply};
use crate::token::{Dropped, Returns};

/// An operation on its way to the session. If it does not arrive, what it was to spend goes back.
#[derive(Debug)]
pub(super) struct PendingReply {
    pub(super) op: OpId,
    pub(super) command: Option<Command>,
    pub(super) deadline: Instant,
    /// The way to the caller, until it is taken.
    pub(super) answer: Option<Answer>,
    pub(super) returns: Arc<Returns>,
    /// Until it has been taken, there is something to do.
    pub(super) _open: OpenOperation,
}

impl PendingReply {
    /// Takes the command and the way to its caller; `None` if the caller has gone.
    pub(super) fn take(&mut self) -> Option<(Command, Answer)> {
        let answer = self.answer.take().filter(|answer| !answer.is_for_nobody())?;
        Some((self.command.take()?, answer))
    }
}

impl Drop for PendingReply {
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

/// Where the reply to one operation is left and picked up.
#[derive(Debug, Default)]
struct Slot(Mutex<Left>);

/// What lies in a slot.
#[derive(Debug, Default)]
struct Left {
    reply: Option<Result<Reply, Error>>,
    /// Who is to be told of the reply.
    waker: Option<Waker>,
    /// The session will not leave a reply any more.
    unanswered: bool,
    /// Nobody will pick the reply up.
    for_nobody: bool,
    /// Who waits need not be told that a push counts.
    quiet: bool,
}

impl Slot {
    fn left(&self) -> MutexGuard<'_, Left> {
        // What lies in it is whole at any time, whatever a panic elsewhere interrupted.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Slots, used again once both ends have let go of them.
#[derive(Debug, Default)]
pub(super) struct Slots(Mutex<Vec<Arc<Slot>>>);

/// As many as a caller usually has in use, and some that the session is about to let go of.
const SLOTS_MAX: usize = 16;

impl Slots {
    /// Both ends of the way back of one operation.
    pub(super) fn open(
        &self,
        op: OpId,
        doing: &'static str,
        returns: &Arc<Returns>,
    ) -> (Answer, Call) {
        let slot = self.take();
        let open = returns.leadership().open();
        let answer =
            Answer { slot: slot.clone(), returns: returns.clone(), sent: false, _open: open };
        let (state, returns) = (State::Waiting(slot), returns.clone());
        let call = Call { op, doing, state, returns, quiet: false };
        (answer, call)
    }

    fn take(&self) -> Arc<Slot> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in slots.iter_mut() {
            if let Some(slot) = Arc::get_mut(slot) {
                *slot = Slot::default();
            } else {
                continue;
            }
            return slot.clone();
        }
        let slot = Arc::new(Slot::default());
        if slots.len() < SLOTS_MAX {
            slots.push(slot.clone());
        }
        slot
    }
}

/// The session's end: leaves the reply. Dropping it tells the caller that there will be none.
#[derive(Debug)]
pub(super) struct Answer {
    slot: Arc<Slot>,
    returns: Arc<Returns>,
    sent: bool,
    /// Until it has been sent, there is something to do.
    _open: OpenOperation,
}

impl Answer {
    /// Whether the caller has gone.
    fn is_for_nobody(&self) -> bool {
        self.slot.left().for_nobody
    }

    /// Leaves the reply. If the caller has gone, what it hands over goes back.
    pub(super) fn send(mut self, reply: Result<Reply, Error>) {
        self.sent = true;
        let mut left = self.slot.left();
        if left.for_nobody {
            drop(left);
            return give_back(reply, &self.returns);
        }
        let waker = left.waker.take().filter(|_| !(left.quiet && counts(&reply)));
        left.reply = Some(reply);
        drop(left);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.sent {
            let mut left = self.slot.left();
            left.unanswered = true;
            let waker = left.waker.take();
            drop(left);
            waker.into_iter().for_each(Waker::wake);
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
    returns: Arc<Returns>,
    quiet: bool,
}

#[derive(Debug)]
enum State {
    Waiting(Arc<Slot>),
    /// It could not be posted.
    Failed(Error),
    Over,
}

impl Call {
    /// One that has failed before it was posted.
    pub(super) fn failed(doing: &'static str, error: Error, returns: &Arc<Returns>) -> Call {
        let (op, state, returns) = (OpId(0), State::Failed(error), returns.clone());
        Call { op, doing, state, returns, quiet: false }
    }

    /// Whether whoever polls it next is told that a push counts, or only if it does not: for those who
    /// wait for something else that comes later.
    pub(crate) fn wakes_if_applied(&mut self, wakes: bool) {
        self.quiet = !wakes;
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
            State::Waiting(slot) => {
                let mut left = slot.left();
                match left.reply.take() {
                    Some(reply) => reply,
                    None if left.unanswered => Err(Error::Ended { doing }),
                    None => {
                        left.quiet = self.quiet;
                        match &mut left.waker {
                            Some(waker) => waker.clone_from(context.waker()),
                            none => *none = Some(context.waker().clone()),
                        }
                        drop(left);
                        self.state = State::Waiting(slot);
                        return Poll::Pending;
                    }
                }
            }
        };
        Poll::Ready(reply)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let State::Waiting(slot) = std::mem::replace(&mut self.state, State::Over) else { return };
        let mut left = slot.left();
        left.for_nobody = true;
        let reply = left.reply.take();
        drop(left);
        match reply {
            // A push may still be sent part by part when its time is over: its rest will not come.
            Some(Err(Error::Timeout { .. })) | None => {
                self.returns.add(Dropped::Operation(self.op));
            }
            Some(reply) => give_back(reply, &self.returns),
        }
    }
}

/// Whether it says that a push counts.
fn counts(reply: &Result<Reply, Error>) -> bool {
    matches!(
        reply,
        Ok(Reply::Pushed { outcome: Outcome::Applied { .. } | Outcome::Accepted { .. } })
    )
}

/// Gives back what a reply hands over, as nobody takes it.
fn give_back(reply: Result<Reply, Error>, returns: &Returns) {
    match reply {
        Ok(Reply::Token(Some(grant))) => returns.add(Dropped::Token(grant)),
        Ok(Reply::Begun { sequence }) => returns.add(Dropped::Push(sequence)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use pushpull_common::ids::{GlobalStep, Sequence, TokenId};
    use pushpull_common::protocol::Grant;
    use pushpull_common::protocol::message::Operation;

    use super::*;
    use crate::session::{PushOrder, Read};

    fn grant() -> Grant {
        Grant { token: TokenId(1), generation: 1, step: GlobalStep(0), push_slot: 0 }
    }

    fn pending_reply(command: Command, returns: &Arc<Returns>) -> (PendingReply, Call) {
        let (answer, call) = Slots::default().open(OpId(1), "test", returns);
        let (deadline, returns, open) =
            (Instant::now(), returns.clone(), returns.leadership().open());
        let (command, answer) = (Some(command), Some(answer));
        (PendingReply { op: OpId(1), command, deadline, answer, returns, _open: open }, call)
    }

    fn push() -> Command {
        let (operation, grant) = (Operation::Gradient {}, Some(grant()));
        let order = PushOrder::of_parts(operation, grant, Read::default(), Vec::new());
        Command::Push { order }
    }

    fn poll(call: &mut Call) -> Poll<Result<Reply, Error>> {
        pin!(call).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_command_whose_caller_has_gone_gives_back_what_it_was_to_spend() {
        let returns = Arc::new(Returns::default());
        let (mut command, call) = pending_reply(push(), &returns);
        drop(call);
        assert!(matches!(returns.take()[..], [(Dropped::Operation(OpId(1)), _)]));
        assert!(command.take().is_none());
        drop(command);
        assert!(matches!(returns.take()[..], [(Dropped::Token(_), _)]));
        let sequence = Sequence(3);
        let (command, _call) = pending_reply(Command::End { sequence }, &returns);
        drop(command);
        assert!(matches!(returns.take()[..], [(Dropped::Push(Sequence(3)), _)]));
        let (mut command, _call) = pending_reply(push(), &returns);
        assert!(command.take().is_some());
        drop(command);
        assert!(returns.take().is_empty(), "it has arrived");
    }

    #[test]
    fn a_reply_that_nobody_takes_gives_back_what_it_hands_over() {
        let returns = Arc::new(Returns::default());
        let slots = Slots::default();
        let open = || slots.open(OpId(1), "test", &returns);
        // The future is dropped between the answer and its caller's next turn, or before.
        let (answer, call) = open();
        answer.send(Ok(Reply::Token(Some(grant()))));
        drop(call);
        assert!(matches!(returns.take()[..], [(Dropped::Token(_), _)]));
        let (answer, call) = open();
        drop(call);
        answer.send(Ok(Reply::Begun { sequence: Sequence(5) }));
        let dropped = returns.take();
        assert!(matches!(
            dropped[..],
            [(Dropped::Operation(_), _), (Dropped::Push(Sequence(5)), _)]
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
            matches!(returns.take()[..], [(Dropped::Operation(_), _)]),
            "it may not be sent whole"
        );
    }

    /// Whoever waits for the values that come behind a push is woken by those, or if they will not come.
    #[test]
    fn of_a_push_that_counts_nobody_need_be_told_who_waits_for_something_later() {
        #[derive(Default)]
        struct Wakes(std::sync::atomic::AtomicUsize);
        impl std::task::Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let (returns, slots) = (Arc::new(Returns::default()), Slots::default());
        let (step, current) = (GlobalStep(1), GlobalStep(2));
        let pushed = |outcome| Ok(Reply::Pushed { outcome });
        let cases = [
            (true, pushed(Outcome::Accepted { step }), 0),
            (false, pushed(Outcome::Accepted { step }), 1),
            (true, pushed(Outcome::Stale { current }), 1),
            (true, Err(Error::Fenced), 1),
        ];
        for (quiet, reply, woken) in cases {
            let wakes = Arc::new(Wakes::default());
            let (answer, mut call) = slots.open(OpId(1), "test", &returns);
            call.wakes_if_applied(!quiet);
            let waker = Waker::from(wakes.clone());
            let mut context = Context::from_waker(&waker);
            assert!(pin!(&mut call).poll(&mut context).is_pending());
            answer.send(reply);
            assert_eq!(wakes.0.load(std::sync::atomic::Ordering::Relaxed), woken);
            assert!(poll(&mut call).is_ready(), "it is there all the same");
        }
    }

    #[test]
    fn a_session_that_ends_leaves_no_caller_waiting() {
        let returns = Arc::new(Returns::default());
        let (command, mut call) = pending_reply(push(), &returns);
        assert!(poll(&mut call).is_pending());
        drop(command);
        assert!(matches!(poll(&mut call), Poll::Ready(Err(Error::Ended { doing: "test" }))));
    }

    #[test]
    fn a_slot_serves_again_only_when_both_ends_have_let_go() {
        let (returns, slots) = (Arc::new(Returns::default()), Slots::default());
        let place = |call: &Call| match &call.state {
            State::Waiting(slot) => Arc::as_ptr(slot),
            _ => unreachable!("it waits"),
        };
        let (answer, call) = slots.open(OpId(1), "test", &returns);
        let first = place(&call);
        drop(call);
        let (other, mut call) = slots.open(OpId(2), "test", &returns);
        assert_ne!(place(&call), first, "the session may still leave a reply there");
        answer.send(Ok(Reply::Done));
        assert!(poll(&mut call).is_pending(), "that was for the other");
        other.send(Ok(Reply::Done));
        let (_answer, again) = slots.open(OpId(3), "test", &returns);
        assert_eq!(place(&again), first);
        assert!(matches!(poll(&mut call), Poll::Ready(Ok(Reply::Done))));
    }
}
