//! [`Control`]: the thread of a ring, as the ring sees it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::protocol::message::RingEnd;
use pushpull_net::auth::{AccessReport, Credentials};
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;

use super::control_task::ControlTask;
use super::link_setup::OpenLinks;
use super::meeting::Meeting;
use super::wake::WakeFlag;
use crate::error::RingError;
use crate::formed_ring::FormedRing;
use crate::member::MemberFacts;
use crate::transport::Transport;

/// The settings of a control thread.
#[derive(Clone, Debug)]
pub(crate) struct ControlConfig {
    /// The facts of the member. Its addresses are found by the thread.
    pub(crate) facts: MemberFacts,
    /// Where the ranks meet.
    pub(crate) meeting: Meeting,
    /// The folder of Unix sockets, in a meeting at an address.
    pub(crate) socket_folder: PathBuf,
    /// Chosen at random: names the socket there. Others may read its name, so it is not that of the
    /// process.
    pub(crate) socket: u64,
    /// The only transport of links, if it is restricted.
    pub(crate) transport: Option<Transport>,
    /// Whether addresses beyond loopback may be bound.
    pub(crate) insecure: bool,
    /// What the ranks prove themselves with.
    pub(crate) credentials: Option<Credentials>,
    /// Hears who may connect to this rank.
    pub(crate) access: AccessReport,
    /// The least number of members of the first ring.
    pub(crate) first_size_min: u32,
    /// The least number of members of a later ring.
    pub(crate) size_min: u32,
    /// How long a ring that may form waits for more members.
    pub(crate) join_window: Duration,
    /// Chosen at random: identifies the rendezvous if this process serves it.
    pub(crate) rendezvous: u64,
}

impl ControlConfig {
    /// Returns whether other machines may reach the addresses that are bound.
    pub(crate) fn may_be_reached(&self) -> bool {
        self.insecure || self.credentials.as_ref().is_some_and(Credentials::protect)
    }
}

/// The control thread of a ring, as its ring sees it.
#[derive(Debug)]
pub(crate) struct Control {
    commands: mpsc::Sender<Command>,
    view: watch::Receiver<ControlView>,
    wake: Arc<WakeFlag>,
    formed: Arc<Mutex<Option<NewRing>>>,
    runtime: tokio::runtime::Handle,
}

/// What the control thread reports.
#[derive(Clone, Debug)]
pub(crate) struct ControlView {
    /// The stage of the ring.
    pub(crate) stage: RingStage,
    /// The members that wait for the next ring.
    pub(crate) joiners: u32,
}

/// The stage of a ring.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RingStage {
    /// It has not formed.
    Forming,
    /// It has formed, and its links are open.
    Formed {
        /// Its epoch.
        epoch: u64,
    },
    /// It is over.
    Over {
        /// Its epoch.
        epoch: u64,
        /// The reason.
        error: RingError,
    },
    /// It cannot form: this member is out for good.
    Failed {
        /// The reason.
        error: RingError,
    },
    /// This member has left.
    Left,
}

/// A ring that has formed, with the links of this rank.
#[derive(Debug)]
pub(crate) struct NewRing {
    /// The ring.
    pub(crate) ring: Arc<FormedRing>,
    /// The links; `None` in a ring of one.
    pub(crate) links: Option<OpenLinks>,
}

/// A wish of the program.
#[derive(Debug)]
pub(super) enum Command {
    /// Enter the next ring.
    Join {
        /// The time that it may take.
        within: Duration,
    },
    /// End the ring of this epoch for a reason that the program has found.
    Report { epoch: u64, end: RingEnd },
    /// Leave.
    Leave,
}

/// The most commands that wait. A ring has one operation at a time.
const COMMANDS_MAX: usize = 16;

/// Locks a slot.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A slot is valid after each change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`RingError::System`] if there is no thread or no descriptor left.
    pub(crate) fn start(config: ControlConfig) -> Result<Control, RingError> {
        let system = |doing: &str, error: std::io::Error| RingError::System {
            doing: doing.to_owned(),
            cause: error.to_string(),
        };
        let wake = WakeFlag::new().map_err(|error| system("create an event descriptor", error))?;
        let wake = Arc::new(wake);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| system("start a runtime", error))?;
        let handle = runtime.handle().clone();
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let first = ControlView { stage: RingStage::Forming, joiners: 0 };
        let (reports, view) = watch::channel(first);
        let formed = Arc::new(Mutex::new(None));
        let slot = formed.clone();
        let flag = wake.clone();
        let run = move || {
            // An operation that waits must not outlive the thread that knows the ring.
            let _ended = RaisedAtEnd(flag.clone());
            let local = LocalSet::new();
            local.block_on(&runtime, async move {
                let task = ControlTask::new(config, reports, flag, slot);
                task.run(received).await;
            });
        };
        let thread = std::thread::Builder::new().name("pushpull-ring".to_owned());
        thread.spawn(run).map_err(|error| system("start the thread of the ring", error))?;
        Ok(Control { commands, view, wake, formed, runtime: handle })
    }

    /// Enters the next ring after that of an epoch, within this time.
    ///
    /// # Errors
    /// Why there is none, or why this member is out.
    pub(crate) async fn join(
        &mut self,
        after: u64,
        within: Duration,
    ) -> Result<NewRing, RingError> {
        let is_formed = matches!(self.view.borrow().stage, RingStage::Formed { .. });
        let formed = lock(&self.formed).take().filter(|_| is_formed);
        if let Some(ring) = formed {
            // The future of an earlier join was dropped before.
            return Ok(ring);
        }
        self.view.mark_unchanged();
        self.send(Command::Join { within }).await;
        loop {
            if self.view.changed().await.is_err() {
                // It may have failed before it was asked.
                return Err(match &self.view.borrow().stage {
                    RingStage::Failed { error } => error.clone(),
                    _ => ended(),
                });
            }
            let stage = self.view.borrow_and_update().stage.clone();
            match stage {
                RingStage::Forming => {}
                // The end of the last ring, which this rank has given up without waiting.
                RingStage::Over { epoch, .. } if epoch <= after => {}
                RingStage::Formed { .. } => {
                    if let Some(ring) = lock(&self.formed).take() {
                        return Ok(ring);
                    }
                }
                // The others may have performed the first operation and left. What this rank needs
                // of them has been sent.
                RingStage::Over { error, .. } => return lock(&self.formed).take().ok_or(error),
                RingStage::Failed { error } => return Err(error),
                RingStage::Left => return Err(ended()),
            }
        }
    }

    /// Waits until the ring is over. Returns the reason.
    pub(crate) async fn over(&mut self) -> RingError {
        loop {
            let stage = self.view.borrow_and_update().stage.clone();
            match stage {
                RingStage::Over { error, .. } | RingStage::Failed { error } => return error,
                RingStage::Left => return ended(),
                RingStage::Forming | RingStage::Formed { .. } => {}
            }
            if self.view.changed().await.is_err() {
                return ended();
            }
        }
    }

    /// Ends the ring for a reason that this rank has found.
    pub(crate) async fn report(&self, epoch: u64, end: RingEnd) {
        self.send(Command::Report { epoch, end }).await;
    }

    /// Leaves, and waits for the confirmation.
    pub(crate) async fn leave(mut self) {
        self.send(Command::Leave).await;
        while self.view.borrow_and_update().stage != RingStage::Left {
            if self.view.changed().await.is_err() {
                return;
            }
        }
    }

    /// Ends the ring for a reason that this rank has found, without waiting.
    pub(crate) fn try_report(&self, epoch: u64, end: RingEnd) {
        // A full queue means that the thread hangs; the others see that by its lease.
        let _ = self.commands.try_send(Command::Report { epoch, end });
    }

    /// Gives the ring up without waiting: it is dropped.
    pub(crate) fn abandon(&self, epoch: u64, end: RingEnd) {
        self.try_report(epoch, end);
        let _ = self.commands.try_send(Command::Leave);
    }

    /// Returns the flag that is raised when the ring is over.
    pub(crate) fn wake(&self) -> &Arc<WakeFlag> {
        &self.wake
    }

    /// Returns whether the ring is over because a rank has left.
    pub(crate) fn is_left(&self) -> bool {
        matches!(self.view.borrow().stage, RingStage::Over { error: RingError::Left { .. }, .. })
    }

    /// Returns the number of members that wait for the next ring.
    pub(crate) fn joiners(&self) -> u32 {
        self.view.borrow().joiners
    }

    /// Returns the runtime of the thread, which drives sockets and timers for any executor.
    pub(crate) fn runtime(&self) -> &tokio::runtime::Handle {
        &self.runtime
    }

    async fn send(&self, command: Command) {
        // Without its thread the view has no sender, which the caller sees.
        let _ = self.commands.send(command).await;
    }
}

/// Raises a flag when it is dropped, also by a panic.
struct RaisedAtEnd(Arc<WakeFlag>);

impl Drop for RaisedAtEnd {
    fn drop(&mut self) {
        self.0.raise();
    }
}

/// The error of a ring whose thread has ended.
fn ended() -> RingError {
    RingError::Fenced { detail: "its control thread has ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use pushpull_common::identity::Identity;
    use pushpull_common::ids::Incarnation;

    use super::*;

    #[test]
    fn a_thread_that_failed_before_it_was_asked_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let lease = Duration::from_secs(1);
        let mut control = Control::start(ControlConfig {
            facts: MemberFacts {
                job: "ring".to_owned(),
                id: "rank 0".to_owned(),
                index: Some(0),
                size: 2,
                host: "host".to_owned(),
                addresses: Vec::new(),
                incarnation: Incarnation(1),
                identity: Identity::new(),
                lease,
            },
            meeting: Meeting::Folder(folder.path().join("absent/job")),
            socket_folder: folder.path().to_owned(),
            socket: 1,
            transport: None,
            insecure: false,
            credentials: None,
            access: AccessReport::default(),
            first_size_min: 2,
            size_min: 1,
            join_window: lease,
            rendezvous: 1,
        })
        .unwrap();
        let error = crate::block_on::block_on(async {
            control.commands.closed().await;
            control.join(0, lease).await.unwrap_err()
        });
        assert!(matches!(error, RingError::System { .. }), "{error}");
    }
}
