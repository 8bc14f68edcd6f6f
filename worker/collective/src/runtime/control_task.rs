//! [`ControlTask`]: keeps the membership of a rank while the program computes.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::{RankAddresses, RingEnd};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{FrameReader, Message};
use pushpull_net::{FrameStream, Stream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, spawn_local};

use super::control::{Command, ControlConfig, ControlView, NewRing, RingStage, lock};
use super::door::DoorState;
use super::link_setup::{self, MemoryUse, OwnLink};
use super::meeting::{self, Meeting};
use super::peer::{UNSENT_MAX, exchange};
use super::rank_listener::RankListener;
use super::reach::{Unreached, connect, connect_any};
use super::server::RendezvousServer;
use super::wake::WakeFlag;
use crate::error::RingError;
use crate::formed_ring::FormedRing;
use crate::member::{Member, MemberInput, MemberOutput, Place};
use crate::rendezvous::{Rendezvous, RendezvousConfig};

/// The tasks of a control thread.
pub(super) struct ControlTask {
    config: Rc<ControlConfig>,
    member: RefCell<Member>,
    listener: RankListener,
    door: Rc<DoorState>,
    view: watch::Sender<ControlView>,
    wake: Arc<WakeFlag>,
    formed: Arc<Mutex<Option<NewRing>>>,
    /// The way to the connection, and its number.
    connection: RefCell<Option<mpsc::Sender<Message>>>,
    connection_number: Cell<u64>,
    /// The task that opens links.
    setup: RefCell<Option<AbortHandle>>,
    /// The end of a ring of which a rank has left before the links of this one were open.
    left_early: RefCell<Option<RingError>>,
    /// The wait of the rendezvous, or the reason why it cannot be reached.
    wait: RefCell<FormingWait>,
    /// Whether a ring has formed that is not over.
    in_ring: Cell<bool>,
    rank: Cell<u32>,
    /// The epoch of the last ring that has formed; 0 for none.
    epoch: Cell<u64>,
    /// The epoch of the last ring that the program is done with: it has asked for the next.
    done_epoch: Cell<u64>,
    changed: Notify,
}

/// The wait of a forming ring.
#[derive(Clone, Debug, Default)]
struct FormingWait {
    came: u32,
    size: u32,
    missing: Vec<u32>,
    /// The reason why there is no rendezvous; `None` while there is one.
    fault: Option<String>,
}

impl ControlTask {
    pub(super) fn new(
        config: ControlConfig,
        view: watch::Sender<ControlView>,
        wake: Arc<WakeFlag>,
        formed: Arc<Mutex<Option<NewRing>>>,
    ) -> Rc<ControlTask> {
        let member = Member::new(Instant::now(), config.facts.clone());
        let door = Rc::new(DoorState::new(config.facts.incarnation, config.access.clone()));
        let config = Rc::new(config);
        Rc::new(ControlTask {
            listener: RankListener::new(config.clone(), door.clone()),
            config,
            member: RefCell::new(member),
            door,
            view,
            wake,
            formed,
            connection: RefCell::default(),
            connection_number: Cell::new(0),
            setup: RefCell::default(),
            left_early: RefCell::default(),
            wait: RefCell::default(),
            in_ring: Cell::new(false),
            rank: Cell::new(0),
            epoch: Cell::new(0),
            done_epoch: Cell::new(0),
            changed: Notify::new(),
        })
    }

    /// Carries out commands until the program leaves.
    pub(super) async fn run(self: Rc<Self>, mut commands: mpsc::Receiver<Command>) {
        match self.listener.listen() {
            Ok(true) => self.serve(),
            Ok(false) => {}
            Err(error) => return self.set_stage(RingStage::Failed { error }),
        }
        self.member.borrow_mut().set_addresses(self.listener.addresses(None));
        let timer = spawn_local(self.clone().run_timer());
        let mut deadline: Option<(Instant, Duration)> = None;
        loop {
            let passed = async {
                match deadline {
                    Some((at, _)) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Join { within }) => {
                        let stage = self.view.borrow().stage.clone();
                        if let RingStage::Failed { .. } = stage {
                            // This member is out for good.
                            self.set_stage(stage);
                            continue;
                        }
                        deadline = Instant::now().checked_add(within).map(|at| (at, within));
                        *lock(&self.formed) = None;
                        self.done_epoch.set(self.epoch.get());
                        self.set_stage(RingStage::Forming);
                        self.handle(MemberInput::Join);
                    }
                    Some(Command::Report { epoch, end }) => {
                        self.handle(MemberInput::Report { epoch, end });
                    }
                    Some(Command::Leave) | None => break,
                },
                () = passed => {
                    let (_, within) = deadline.take().unwrap_or((Instant::now(), Duration::ZERO));
                    self.deadline_passed(within);
                }
            }
        }
        self.leave().await;
        timer.abort();
    }

    async fn run_timer(self: Rc<Self>) {
        loop {
            let wake_at = self.member.borrow().wake_at();
            match wake_at {
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => self.handle(MemberInput::Tick),
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Leaves, and serves the members that are still there.
    async fn leave(self: &Rc<Self>) {
        let lease = self.config.facts.lease;
        let until = Instant::now() + lease;
        self.handle(MemberInput::Leave);
        while self.connection.borrow().is_some() && Instant::now() < until {
            tokio::time::sleep(LEAVE_PAUSE).await;
        }
        let server = self.door.server.borrow().clone();
        while server.as_ref().is_some_and(|server| server.has_members()) && Instant::now() < until {
            tokio::time::sleep(LEAVE_PAUSE).await;
        }
        // The process may end before its listener does, which would remove the socket.
        match &self.config.meeting {
            Meeting::Folder(folder) => {
                let own = self.listener.own_address().unwrap_or_default();
                meeting::leave(folder, &self.listener.socket(folder), &own);
            }
            Meeting::Address(_) => _ = std::fs::remove_file(self.listener.shared_socket()),
        }
        self.set_stage(RingStage::Left);
    }

    fn set_stage(&self, stage: RingStage) {
        self.view.send_modify(|view| view.stage = stage);
    }

    /// Reports the end of the ring.
    fn over(&self, error: RingError) {
        self.in_ring.set(false);
        *self.door.serving.borrow_mut() = None;
        let is_opening = self.setup.borrow().as_ref().is_some_and(|setup| !setup.is_finished());
        if matches!(error, RingError::Left { .. }) {
            // A rank leaves after its last operation, which this one may still perform.
            if is_opening {
                *self.left_early.borrow_mut() = Some(error);
                return;
            }
        } else {
            self.abort_setup();
            // Its links are closed: a rank that waits for one of them is woken.
            *lock(&self.formed) = None;
        }
        self.set_over(error);
    }

    /// Ends the task that opens the links of a ring.
    fn abort_setup(&self) {
        if let Some(setup) = self.setup.borrow_mut().take() {
            setup.abort();
        }
    }

    fn set_over(&self, error: RingError) {
        let is_done = self.epoch.get() <= self.done_epoch.get();
        if is_done && !matches!(error, RingError::Fenced { .. }) {
            // The program has gone on to the next ring, which this end is none of.
            return;
        }
        self.set_stage(match error {
            RingError::Fenced { .. } => RingStage::Failed { error },
            error => RingStage::Over { epoch: self.epoch.get(), error },
        });
        self.wake.raise();
    }

    fn deadline_passed(&self, within: Duration) {
        if self.view.borrow().stage != RingStage::Forming {
            return;
        }
        let FormingWait { came, size, missing, fault } = self.wait.borrow().clone();
        let error = match fault {
            Some(cause) => {
                let address = match &self.config.meeting {
                    Meeting::Address(address) => address.clone(),
                    Meeting::Folder(folder) => folder.display().to_string(),
                };
                RingError::NoRendezvous { address, within, cause }
            }
            None => RingError::NotFormed { came, size, missing, within },
        };
        self.set_stage(RingStage::Failed { error });
    }

    /// Passes an input to the member and carries out its outputs.
    fn handle(self: &Rc<Self>, input: MemberInput) {
        self.member.borrow_mut().handle(Instant::now(), input);
        loop {
            let output = self.member.borrow_mut().poll_output();
            let Some(output) = output else { break };
            self.carry_out(output);
        }
        self.changed.notify_one();
    }

    fn carry_out(self: &Rc<Self>, output: MemberOutput) {
        match output {
            MemberOutput::Connect(place) => {
                let number = self.connection_number.get() + 1;
                self.connection_number.set(number);
                *self.connection.borrow_mut() = None;
                spawn_local(self.clone().run_connection(number, place));
            }
            MemberOutput::Serve => {
                let announced = self.listener.own_address();
                if let (Meeting::Folder(folder), Some(own)) = (&self.config.meeting, announced) {
                    // Later ranks find this one there. The present ones know it already.
                    let seen = meeting::address(folder).ok().flatten();
                    let _ = meeting::replace(folder, seen.as_deref(), &own);
                }
                self.serve();
            }
            MemberOutput::Send(message) => {
                let connection = self.connection.borrow();
                let sender = connection.as_ref();
                if sender.is_some_and(|sender| sender.try_send(message).is_err()) {
                    drop(connection);
                    *self.connection.borrow_mut() = None;
                }
            }
            MemberOutput::Disconnect => {
                self.connection_number.set(self.connection_number.get() + 1);
                *self.connection.borrow_mut() = None;
            }
            MemberOutput::Formed(ring) => {
                *self.wait.borrow_mut() = FormingWait::default();
                self.wake.lower();
                self.left_early.take();
                self.abort_setup();
                self.in_ring.set(true);
                self.rank.set(ring.rank);
                self.epoch.set(ring.epoch);
                *self.door.serving.borrow_mut() = serving_addresses(&ring);
                self.listener.listen_at_meeting();
                self.view.send_modify(|view| view.joiners = 0);
                let task = spawn_local(self.clone().set_up(ring));
                *self.setup.borrow_mut() = Some(task.abort_handle());
            }
            MemberOutput::Over { epoch, end } => {
                self.over(RingError::of_end(&end, self.rank.get(), epoch));
            }
            MemberOutput::RendezvousLost { cause } if self.in_ring.get() => {
                let address = format!("{:?}", self.config.meeting);
                self.over(RingError::NoRendezvous { address, within: Duration::ZERO, cause });
            }
            MemberOutput::RendezvousLost { cause } => {
                self.wait.borrow_mut().fault = Some(cause);
            }
            MemberOutput::Waits { came, size, missing } => {
                *self.wait.borrow_mut() = FormingWait { came, size, missing, fault: None };
            }
            MemberOutput::Joiners(count) => {
                self.view.send_modify(|view| view.joiners = count);
            }
            MemberOutput::Refused(refusal) => {
                self.in_ring.set(false);
                self.abort_setup();
                let id = &self.config.facts.id;
                let error = RingError::of_refusal(&refusal, id, self.epoch.get());
                self.set_stage(RingStage::Failed { error });
                self.wake.raise();
            }
            MemberOutput::Left => *self.connection.borrow_mut() = None,
        }
    }

    /// Opens the links of a ring.
    async fn set_up(self: Rc<Self>, ring: Arc<FormedRing>) {
        let links = match ring.size() {
            1 => None,
            _ => {
                let hello = self.member.borrow().facts().hello();
                let within = 2 * ring.lease;
                let memory = MemoryUse::of(self.config.transport);
                let own = OwnLink { hello, memory, credentials: self.config.credentials.clone() };
                match link_setup::open(&ring, &own, &self.door, within).await {
                    Ok(links) => Some(links),
                    Err(fault) => {
                        if let Some(error) = self.left_early.take() {
                            return self.set_over(error);
                        }
                        let detail = Detail::shortened(fault);
                        let end = RingEnd::GivenUp { rank: ring.rank, detail };
                        return self.handle(MemberInput::Report { epoch: ring.epoch, end });
                    }
                }
            }
        };
        let epoch = ring.epoch;
        *lock(&self.formed) = Some(NewRing { ring, links });
        match self.left_early.take() {
            Some(error) => self.set_over(error),
            None => self.set_stage(RingStage::Formed { epoch }),
        }
    }

    /// Begins to serve the rendezvous in this process.
    fn serve(&self) {
        if self.door.server.borrow().is_some() {
            return;
        }
        let config = &self.config;
        let rendezvous = Rendezvous::new(RendezvousConfig {
            rendezvous: config.rendezvous,
            job: config.facts.job.clone(),
            identity: config.facts.identity.clone(),
            lease: config.facts.lease,
            join_window: config.join_window,
            succession_window: SUCCESSION_LEASES * config.facts.lease,
            first_size_min: config.first_size_min,
            size_min: config.size_min,
            serving: Some(config.facts.incarnation),
        });
        *self.door.server.borrow_mut() = Some(RendezvousServer::start(rendezvous));
    }

    /// Connects to a place and exchanges messages until the connection ends.
    async fn run_connection(self: Rc<Self>, number: u64, place: Place) {
        let is_current = || self.connection_number.get() == number;
        let stream = match self.reach(&place).await {
            Ok(stream) => stream,
            Err(Unreached { cause, gone }) => {
                if is_current() {
                    self.handle(MemberInput::NotConnected { cause, gone });
                }
                return;
            }
        };
        match self.listener.listen_beside(&stream) {
            Ok(Some(addresses)) => self.member.borrow_mut().set_addresses(addresses),
            Ok(None) => {}
            Err(error) => return self.set_stage(RingStage::Failed { error }),
        }
        if !is_current() {
            return;
        }
        let mut frames = FrameStream::new(stream, FrameReader::new());
        frames.open();
        let (sender, unsent) = mpsc::channel(UNSENT_MAX);
        *self.connection.borrow_mut() = Some(sender);
        self.handle(MemberInput::Connected);
        let arrived = |message| {
            if is_current() {
                self.handle(MemberInput::Message(message));
            }
        };
        let credentials = self.config.credentials.as_ref();
        let cause = exchange(frames, credentials, unsent, arrived).await;
        if is_current() {
            *self.connection.borrow_mut() = None;
            self.handle(MemberInput::Closed { cause });
        }
    }

    async fn reach(&self, place: &Place) -> Result<Stream, Unreached> {
        let credentials = self.config.credentials.as_ref();
        match (place, &self.config.meeting) {
            (Place::Meeting, Meeting::Address(address)) => connect(address, credentials).await,
            (Place::Meeting, Meeting::Folder(folder)) => self.meet(folder).await,
            (Place::Own, _) => {
                let own = self.listener.own_address().unwrap_or_default();
                connect(&own, credentials).await
            }
            (Place::Member { addresses }, _) => connect_any(addresses, credentials).await,
        }
    }

    /// Connects to the rendezvous of a folder. Serves it if nobody does.
    async fn meet(&self, folder: &Path) -> Result<Stream, Unreached> {
        let credentials = self.config.credentials.as_ref();
        let fault = |error: std::io::Error| Unreached {
            cause: format!("{}: {error}", folder.display()),
            gone: false,
        };
        let seen = meeting::address(folder).map_err(fault)?;
        let unreached = match &seen {
            Some(address) => match connect(address, credentials).await {
                Ok(stream) => return Ok(stream),
                Err(unreached) => unreached,
            },
            None => Unreached { cause: "no rank has come before".to_owned(), gone: true },
        };
        let own = self.listener.own_address().unwrap_or_default();
        if !unreached.gone || !meeting::replace(folder, seen.as_deref(), &own).map_err(fault)? {
            return Err(unreached);
        }
        self.serve();
        connect(&own, credentials).await
    }
}

/// Returns the addresses of the rank that serves a ring, unless it is this one.
fn serving_addresses(ring: &FormedRing) -> Option<RankAddresses> {
    let serving = ring.serving.filter(|serving| *serving != ring.rank)?;
    RankAddresses::of(ring.place(serving)?.addresses.iter().map(Text::clipped))
}

/// The leases for which a successor of the rendezvous waits for members that it cannot account for:
/// a rank that computes asks for the next ring only after its step.
const SUCCESSION_LEASES: u32 = 3;

/// The pause between two looks at what a rank that leaves waits for.
const LEAVE_PAUSE: Duration = Duration::from_millis(1);
