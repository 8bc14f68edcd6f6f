//! The session's thread: it lives beside the caller's, so that ten seconds of computing on the
//! caller's thread are not a death.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::{Notify, mpsc};
use tokio::task::LocalSet;

use super::caller::{COMMANDS_MAX, Caller};
use super::connection;
use super::lenders::Lenders;
use super::outbox::Outbox;
use super::post::{Answer, Posted};
use super::shared_memory;
use super::trays::Trays;
use crate::config::Progress;
use crate::session::{Input, OpId, Output, Session, Start};
use crate::token::{Dropped, Returns};

/// A session's thread. Dropping it ends the session and waits for its thread.
#[derive(Debug)]
pub(crate) struct SessionThread {
    caller: Arc<Caller>,
    thread: Option<JoinHandle<()>>,
}

impl SessionThread {
    pub(crate) fn start(start: Start, progress: Option<Progress>) -> io::Result<SessionThread> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let returns = Arc::new(Returns::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let name = format!("worker-{}", start.task.index);
        let addresses = start.addresses.clone();
        let session = Session::new(start);
        let lenders = Arc::new(Lenders::default());
        let unclaimed = session.unclaimed().clone();
        let trays = Arc::new(Trays::default());
        let (way_back, to_read, to_write) = (returns.clone(), lenders.clone(), trays.clone());
        let caller = Caller::new(commands, way_back, unclaimed, to_read, to_write);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let lent = (lenders, trays);
            let core = Rc::new(Core::new(session, addresses, progress, returns, lent));
            LocalSet::new().block_on(&runtime, core.run(receiver));
            // A look-up of a name that still runs is not waited for.
            runtime.shutdown_background();
        })?;
        Ok(SessionThread { caller: Arc::new(caller), thread: Some(thread) })
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        self.caller.end();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been seen by every caller, as an ended session.
            let _ = thread.join();
        }
    }
}

/// The session and its connections, shared by the tasks of its thread.
pub(super) struct Core {
    session: RefCell<Session>,
    addresses: BTreeMap<u32, String>,
    answers: RefCell<HashMap<OpId, Answer>>,
    outboxes: RefCell<HashMap<usize, Rc<Outbox>>>,
    progress: Option<Progress>,
    returns: Arc<Returns>,
    lenders: Arc<Lenders>,
    trays: Arc<Trays>,
    /// When the clock's task will wake, and what makes it look again.
    armed: Cell<Option<Instant>>,
    rearm: Notify,
    /// Connections to be made, by the task that may spawn.
    connects: RefCell<Vec<(usize, String, Rc<Outbox>)>>,
    connect: Notify,
}

impl Core {
    fn new(
        session: Session,
        addresses: BTreeMap<u32, String>,
        progress: Option<Progress>,
        returns: Arc<Returns>,
        (lenders, trays): (Arc<Lenders>, Arc<Trays>),
    ) -> Core {
        Core {
            addresses,
            session: RefCell::new(session),
            answers: RefCell::default(),
            outboxes: RefCell::default(),
            progress,
            returns,
            lenders,
            trays,
            armed: Cell::new(None),
            rearm: Notify::new(),
            connects: RefCell::default(),
            connect: Notify::new(),
        }
    }

    async fn run(self: Rc<Core>, mut commands: mpsc::Receiver<Posted>) {
        let serve = async {
            loop {
                tokio::select! {
                    command = commands.recv() => {
                        let Some(mut posted) = command else { return };
                        let (op, deadline) = (posted.op, posted.deadline);
                        if let Some((command, answer)) = posted.take() {
                            if let Some(answer) = answer {
                                self.answers.borrow_mut().insert(op, answer);
                            }
                            self.handle(Input::Command { op, command, deadline });
                        }
                    }
                    () = self.returns.notify.notified() => self.take_back(),
                    () = self.connect.notified() => {
                        for (link, address, outbox) in self.connects.take() {
                            let run = connection::run(self.clone(), link, address, outbox);
                            tokio::task::spawn_local(run);
                        }
                    }
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = self.keep_time() => {}
        }
        // A token that was dropped last goes back while the connection stands.
        self.take_back();
        tokio::task::yield_now().await;
    }

    fn take_back(&self) {
        for dropped in self.returns.take() {
            self.handle(match dropped {
                Dropped::Token(grant) => Input::TokenDropped { grant },
                Dropped::Push(sequence) => Input::Abandoned { sequence },
                Dropped::Operation(op) => {
                    self.answers.borrow_mut().remove(&op);
                    Input::Cancelled { op }
                }
            });
        }
    }

    /// Tells the session the time when it wants to know it.
    async fn keep_time(&self) {
        loop {
            let now = Instant::now();
            let wake = self.session.borrow().wake_at(now);
            self.armed.set(Some(wake));
            tokio::select! {
                () = tokio::time::sleep_until(wake.into()) => self.handle(Input::Tick),
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Tells the session what happened, and does what it wants done.
    pub(super) fn handle(&self, input: Input) {
        let now = Instant::now();
        let mut session = self.session.borrow_mut();
        session.handle(now, input);
        while let Some(output) = session.poll_output() {
            self.deliver(output);
        }
        let wake = session.wake_at(now);
        if self.armed.get().is_some_and(|armed| wake < armed) {
            self.armed.set(Some(wake));
            self.rearm.notify_one();
        }
    }

    /// A connection has ended, and with it what was lent over it, unless another has taken its place.
    pub(super) fn lent_no_longer(&self, link: usize, outbox: &Rc<Outbox>) {
        let outboxes = self.outboxes.borrow();
        if outboxes.get(&link).is_none_or(|current| Rc::ptr_eq(current, outbox)) {
            self.lenders.remove(link);
            self.trays.remove(link);
        }
    }

    /// Lends the memory for a body.
    pub(super) fn with_body<R>(
        &self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        self.session.borrow_mut().with_targets(link, receive)
    }

    fn deliver(&self, output: Output) {
        match output {
            Output::Connect { link, shard } => {
                let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
                let outbox = Rc::new(Outbox::default());
                self.outboxes.borrow_mut().insert(link, outbox.clone());
                self.connects.borrow_mut().push((link, address, outbox));
                self.connect.notify_one();
            }
            Output::Disconnect { link } => {
                if let Some(outbox) = self.outboxes.borrow_mut().remove(&link) {
                    outbox.give_up();
                    self.lenders.remove(link);
                    self.trays.remove(link);
                }
            }
            Output::Send { link, envelope, message, body, crc } => {
                if let Some(outbox) = self.outboxes.borrow().get(&link) {
                    outbox.push(&envelope, &message, body, crc);
                }
            }
            Output::Lent { link, lender, lent } => {
                // What cannot be mapped is not read; all can be asked for over the connection.
                if let Ok(reader) = shared_memory::map(&lent, self.descriptors(link)) {
                    self.lenders.add(link, lender, reader);
                }
            }
            Output::LentTray { link, shard, tray, lent } => {
                // What cannot be mapped is not written; all can be sent over the connection.
                if let Ok(mapped) = shared_memory::map_tray(&lent, self.descriptors(link)) {
                    self.trays.add(link, shard, tray, mapped);
                }
            }
            Output::Reply { op, reply } => {
                if let Some(answer) = self.answers.borrow_mut().remove(&op) {
                    answer.send(reply);
                }
            }
            Output::Progress { silent } => {
                if let Some(progress) = &self.progress {
                    progress(&silent);
                }
            }
        }
    }

    /// The descriptors that have come over a link.
    fn descriptors(&self, link: usize) -> Vec<OwnedFd> {
        let outboxes = self.outboxes.borrow();
        outboxes.get(&link).map(|outbox| outbox.take_descriptors()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use pushpull_common::identity::Identity;
    use pushpull_common::ids::{Incarnation, ShardId, TaskId};
    use pushpull_common::protocol::message::Role;

    use super::*;
    use crate::session::Command;

    #[test]
    fn a_wait_without_end_can_be_given_up_and_the_thread_ends() {
        let owner = ShardId { task: 0, shard: 0 };
        let start = Start {
            task: TaskId::worker(0),
            role: Role::Worker {},
            owner,
            incarnation: Incarnation(1),
            checksums: Default::default(),
            shared_memory: true,
            values: None,
            identity: Identity::new(),
            addresses: [(0, "unix:/nobody/listens/here".to_owned())].into(),
            progress_interval: None,
        };
        let session = SessionThread::start(start, None).unwrap();
        {
            let open = Command::Open { shards: vec![owner] };
            let mut call = pin!(session.caller().call("connect", open, Duration::MAX));
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(session);
    }
}
