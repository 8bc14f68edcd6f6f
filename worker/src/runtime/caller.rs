//! The callers' end of a session: commands go in, replies come back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::protocol::Grant;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::mapped_shards::MappedShards;
use super::push_buffers::PushBuffers;
use super::reply::{Answer, Call, PendingReply, way_back};
use super::runner::SessionRunner;
use crate::error::Error;
use crate::session::{OpId, SessionCommand, UnclaimedTokens};
use crate::token::ReturnQueue;

/// Operations on their way to the session's thread: more than a caller has under way who waits for
/// some of them.
pub(super) const COMMANDS_MAX: usize = 1024;

/// How long an operation may take whose timeout is longer than the clock can tell.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// What is shared by all who have the session do something.
#[derive(Debug)]
pub(crate) struct Caller {
    /// The way to the session's thread; none once the session has ended.
    commands: Mutex<Option<mpsc::Sender<PendingReply>>>,
    returns: Arc<ReturnQueue>,
    unclaimed: Arc<UnclaimedTokens>,
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
    next_op: AtomicU64,
    runner: Arc<SessionRunner>,
}

impl Caller {
    pub(super) fn new(
        commands: mpsc::Sender<PendingReply>,
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

    /// A token that has come without being asked for, if there is one: at once, on the caller's thread.
    pub(crate) fn claim(&self) -> Option<Grant> {
        self.unclaimed.claim()
    }

    /// What runs the session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        &self.runner
    }

    /// The shards whose values can be read at once, on the caller's thread.
    pub(crate) fn mapped_shards(&self) -> &MappedShards {
        &self.mapped_shards
    }

    /// The shards that have lent memory to write gradients into.
    pub(crate) fn push_buffers(&self) -> &PushBuffers {
        &self.push_buffers
    }

    /// Has something done within `timeout`: the session is told at once, and the future is its reply.
    /// Dropping that tells the session that nobody waits any more.
    pub(crate) fn call(
        &self,
        doing: &'static str,
        command: SessionCommand,
        timeout: Duration,
    ) -> Call {
        let op = OpId(self.next_op.fetch_add(1, Ordering::Relaxed));
        let (answer, mut call) = way_back(op, doing, &self.returns);
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + FOREVER);
        let pending_reply = self.pending_reply(op, command, deadline, answer);
        if let Err(error) = self.reply(doing, pending_reply) {
            call.fail(error);
        }
        call
    }

    fn pending_reply(
        &self,
        op: OpId,
        command: SessionCommand,
        deadline: Instant,
        answer: Answer,
    ) -> PendingReply {
        let (returns, _open) = (self.returns.clone(), self.returns.leadership().open());
        PendingReply { op, command: Some(command), deadline, answer: Some(answer), returns, _open }
    }

    fn reply(&self, doing: &'static str, pending_reply: PendingReply) -> Result<(), Error> {
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(commands) = &*commands else { return Err(Error::Ended { doing }) };
        match commands.try_send(pending_reply) {
            Ok(()) => {
                self.returns.leadership().call();
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(Error::Busy { doing, limit: COMMANDS_MAX }),
            Err(TrySendError::Closed(_)) => Err(Error::Ended { doing }),
        }
    }

    /// What could not even be asked for, and why.
    pub(crate) fn failed(&self, doing: &'static str, error: Error) -> Call {
        Call::failed(doing, error, &self.returns)
    }

    /// Ends the session, for all who share it.
    pub(super) fn end(&self) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.returns.leadership().end();
    }
}

/// What callers have posted, where a test is the session.
#[cfg(test)]
pub(crate) struct Orders(mpsc::Receiver<PendingReply>);

/// One of them.
#[cfg(test)]
pub(crate) struct Order(PendingReply);

#[cfg(test)]
impl Caller {
    /// A caller without a session, and what it posts.
    pub(crate) fn alone() -> (Caller, Orders) {
        let (commands, orders) = mpsc::channel(COMMANDS_MAX);
        let returns = Arc::new(ReturnQueue::default());
        let runner = Arc::new(
            SessionRunner::new(returns.leadership().clone(), Duration::ZERO).expect("a runtime"),
        );
        let (unclaimed, mapped_shards, push_buffers) =
            (Arc::default(), Arc::default(), Arc::default());
        let caller = Caller::new(commands, returns, unclaimed, mapped_shards, push_buffers, runner);
        (caller, Orders(orders))
    }
}

#[cfg(test)]
impl Orders {
    pub(crate) fn next(&mut self) -> Order {
        Order(self.0.try_recv().expect("something was posted"))
    }
}

#[cfg(test)]
impl Order {
    pub(crate) fn answer(mut self, reply: Result<crate::session::Reply, Error>) {
        let (_, answer) = self.0.take().expect("its caller waits");
        answer.send(reply);
    }
}
