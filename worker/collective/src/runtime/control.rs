//! [`Control`]: the thread of a ring, which keeps its membership while the program computes.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::error::Chain;
use pushpull_common::protocol::message::{RankAddresses, RingEnd};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{FrameReader, Message};
use pushpull_net::{AcceptLimits, Endpoints, FrameStream, ListenError, Stream, accept};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, LocalSet, spawn_local};

use super::door::{Door, DoorState};
use super::link_setup::{self, MemoryUse, OpenLinks};
use super::meeting::{self, Meeting};
use super::peer::{UNSENT_MAX, exchange};
use super::reach::{Unreached, connect, connect_any};
use super::server::RendezvousServer;
use super::wake::WakeFlag;
use crate::error::RingError;
use crate::member::{FormedRing, Member, MemberFacts, MemberInput, MemberOutput, Place};
use crate::rendezvous::{Rendezvous, RendezvousConfig};
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
    /// The least number of members of the first ring.
    pub(crate) first_size_min: u32,
    /// The least number of members of a later ring.
    pub(crate) size_min: u32,
    /// How long a ring that may form waits for more members.
    pub(crate) join_window: Duration,
    /// Chosen at random: identifies the rendezvous if this process serves it.
    pub(crate) rendezvous: u64,
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

#[derive(Debug)]
enum Command {
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

/// The limits of connections that have not said hello.
const ACCEPT_LIMITS: AcceptLimits =
    AcceptLimits { handshake_timeout: Duration::from_secs(10), waiting_connections_max: 256 };

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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

    /// Enters the next ring, within this time.
    ///
    /// # Errors
    /// Why there is none, or why this member is out.
    pub(crate) async fn join(&mut self, within: Duration) -> Result<NewRing, RingError> {
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
                RingStage::Formed { .. } => {
                    if let Some(ring) = lock(&self.formed).take() {
                        return Ok(ring);
                    }
                }
                // The others may have performed the first operation and left. What this rank needs
                // of them has been sent.
                RingStage::Over { error } => return lock(&self.formed).take().ok_or(error),
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
                RingStage::Over { error } | RingStage::Failed { error } => return error,
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
        matches!(self.view.borrow().stage, RingStage::Over { error: RingError::Left { .. } })
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

/// The tasks of a control thread.
struct ControlTask {
    config: ControlConfig,
    member: RefCell<Member>,
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
    addresses: RefCell<Vec<String>>,
    is_listening: Cell<bool>,
    /// Whether this process listens at the address where the program meets.
    is_at_meeting: Cell<bool>,
    /// What the rendezvous waits for, or why it cannot be reached.
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

/// What a forming ring waits for.
#[derive(Clone, Debug, Default)]
struct FormingWait {
    came: u32,
    size: u32,
    missing: Vec<u32>,
    /// Why there is no rendezvous; `None` while there is one.
    fault: Option<String>,
}

impl ControlTask {
    fn new(
        config: ControlConfig,
        view: watch::Sender<ControlView>,
        wake: Arc<WakeFlag>,
        formed: Arc<Mutex<Option<NewRing>>>,
    ) -> Rc<ControlTask> {
        let member = Member::new(Instant::now(), config.facts.clone());
        let door = Rc::new(DoorState::new(config.facts.incarnation));
        Rc::new(ControlTask {
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
            addresses: RefCell::default(),
            is_listening: Cell::new(false),
            is_at_meeting: Cell::new(false),
            wait: RefCell::default(),
            in_ring: Cell::new(false),
            rank: Cell::new(0),
            epoch: Cell::new(0),
            done_epoch: Cell::new(0),
            changed: Notify::new(),
        })
    }

    async fn run(self: Rc<Self>, mut commands: mpsc::Receiver<Command>) {
        if let Err(error) = self.listen() {
            return self.set_stage(RingStage::Failed { error });
        }
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
                let own = self.own_address().unwrap_or_default();
                meeting::leave(folder, &self.socket(folder), &own);
            }
            Meeting::Address(_) => _ = std::fs::remove_file(self.shared_socket()),
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
            error => RingStage::Over { error },
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
                let announced = self.own_address();
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
                self.listen_at_meeting();
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
                match link_setup::open(&ring, hello, &self.door, memory, within).await {
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
        if let Err(error) = self.listen_beside(&stream) {
            return self.set_stage(RingStage::Failed { error });
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
        let cause = exchange(frames, unsent, arrived).await;
        if is_current() {
            *self.connection.borrow_mut() = None;
            self.handle(MemberInput::Closed { cause });
        }
    }

    async fn reach(&self, place: &Place) -> Result<Stream, Unreached> {
        match (place, &self.config.meeting) {
            (Place::Meeting, Meeting::Address(address)) => connect(address).await,
            (Place::Meeting, Meeting::Folder(folder)) => self.meet(folder).await,
            (Place::Own, _) => connect(&self.own_address().unwrap_or_default()).await,
            (Place::Member { addresses }, _) => connect_any(addresses).await,
        }
    }

    /// Connects to the rendezvous of a folder. Serves it if nobody does.
    async fn meet(&self, folder: &Path) -> Result<Stream, Unreached> {
        let fault = |error: std::io::Error| Unreached {
            cause: format!("{}: {error}", folder.display()),
            gone: false,
        };
        let seen = meeting::address(folder).map_err(fault)?;
        let unreached = match &seen {
            Some(address) => match connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(unreached) => unreached,
            },
            None => Unreached { cause: "no rank has come before".to_owned(), gone: true },
        };
        let own = self.own_address().unwrap_or_default();
        if !unreached.gone || !meeting::replace(folder, seen.as_deref(), &own).map_err(fault)? {
            return Err(unreached);
        }
        self.serve();
        connect(&own).await
    }

    fn own_address(&self) -> Option<String> {
        self.addresses.borrow().first().cloned()
    }

    /// Binds what can be bound before the rendezvous is reached.
    fn listen(&self) -> Result<(), RingError> {
        match &self.config.meeting {
            Meeting::Folder(folder) => {
                let unix = self.enter(folder)?;
                let endpoints = match self.config.transport {
                    Some(Transport::Tcp) => unix.also(self.bind("127.0.0.1:0")?),
                    _ => unix,
                };
                self.accept(endpoints, None);
            }
            Meeting::Address(address) if self.may_serve_address() => {
                match Endpoints::bind(address, self.config.insecure) {
                    Ok(endpoints) => {
                        let endpoints = match self.config.transport {
                            Some(Transport::Tcp) => endpoints,
                            _ => endpoints.also(self.bind_shared_socket()?),
                        };
                        self.accept(endpoints, None);
                        self.is_at_meeting.set(true);
                        self.serve();
                    }
                    // Another process serves there.
                    Err(ListenError::InUse { .. } | ListenError::Elsewhere { .. }) => {}
                    Err(error) => return Err(not_bound(address, &error)),
                }
            }
            Meeting::Address(_) => {}
        }
        Ok(())
    }

    /// Listens where the program meets, once the process that did is lost. Processes that are started
    /// again are served there, or told where the rendezvous is.
    fn listen_at_meeting(&self) {
        let Meeting::Address(address) = &self.config.meeting else { return };
        if !self.is_at_meeting.get()
            && let Ok(endpoints) = Endpoints::bind(address, self.config.insecure)
        {
            accept(endpoints, ACCEPT_LIMITS, Door(self.door.clone()));
            self.is_at_meeting.set(true);
        }
    }

    /// Binds the addresses of this rank on the network of the connection to the rendezvous.
    fn listen_beside(&self, stream: &Stream) -> Result<(), RingError> {
        let Stream::Tcp(stream) = stream else { return Ok(()) };
        let local = stream.local_addr().map_err(|error| RingError::System {
            doing: "find the address of this rank".to_owned(),
            cause: error.to_string(),
        })?;
        if !self.is_listening.get() {
            let own = SocketAddr::new(local.ip(), 0).to_string();
            let endpoints = self.bind(&own)?;
            let endpoints = match self.config.transport {
                Some(Transport::Tcp) => endpoints,
                _ => endpoints.also(self.bind_shared_socket()?),
            };
            self.accept(endpoints, Some(local));
        } else {
            self.name_addresses(Some(local));
        }
        Ok(())
    }

    fn bind(&self, address: &str) -> Result<Endpoints, RingError> {
        Endpoints::bind(address, self.config.insecure).map_err(|error| not_bound(address, &error))
    }

    /// Returns whether this rank serves an address of its host.
    ///
    /// Any rank may be on that host, for launchers place rank 0 as they like. But if an elastic ring
    /// has lost the process that served the address, a rank that is started again there would form
    /// a second ring.
    fn may_serve_address(&self) -> bool {
        let needs_all = self.config.first_size_min == self.config.facts.size;
        needs_all || self.config.facts.index.unwrap_or(0) == 0
    }

    /// Binds a socket in the private folder of a job.
    fn enter(&self, folder: &Path) -> Result<Endpoints, RingError> {
        let address = format!("unix:{}", self.socket(folder).display());
        let mut tries = 0;
        loop {
            meeting::enter(folder).map_err(|error| RingError::System {
                doing: format!("meet in {}", folder.display()),
                cause: error.to_string(),
            })?;
            let bound = self.bind(&address);
            tries += 1;
            // The last rank of a ring before may have removed the folder since.
            if bound.is_ok() || folder.exists() || tries == ENTER_TRIES_MAX {
                return bound;
            }
        }
    }

    /// Returns the path of this rank's socket in the private folder of a job.
    fn socket(&self, folder: &Path) -> PathBuf {
        meeting::socket(folder, self.config.facts.incarnation.0)
    }

    /// Returns the path of this rank's socket in the folder that all jobs of this host share.
    fn shared_socket(&self) -> PathBuf {
        let name = format!("pushpull-rank-{:016x}.sock", self.config.socket);
        self.config.socket_folder.join(name)
    }

    fn bind_shared_socket(&self) -> Result<Endpoints, RingError> {
        self.bind(&format!("unix:{}", self.shared_socket().display()))
    }

    fn accept(&self, endpoints: Endpoints, local: Option<SocketAddr>) {
        self.addresses.borrow_mut().extend(endpoints.addresses());
        accept(endpoints, ACCEPT_LIMITS, Door(self.door.clone()));
        self.is_listening.set(true);
        self.name_addresses(local);
    }

    /// Tells the member its addresses: those that others can use.
    fn name_addresses(&self, local: Option<SocketAddr>) {
        let mut addresses = self.addresses.borrow_mut();
        for address in addresses.iter_mut() {
            let parsed = address.parse::<SocketAddr>().ok();
            if let (Some(bound), Some(local)) =
                (parsed.filter(|at| at.ip().is_unspecified()), local)
            {
                *address = SocketAddr::new(local.ip(), bound.port()).to_string();
            }
        }
        let is_tcp = self.config.transport == Some(Transport::Tcp);
        let mut named = addresses.clone();
        if is_tcp {
            named.retain(|address| !address.starts_with("unix:"));
        } else {
            // The shorter way first.
            named.sort_by_key(|address| !address.starts_with("unix:"));
        }
        self.member.borrow_mut().set_addresses(named);
    }
}

/// Returns the addresses of the rank that serves a ring, unless it is this one.
fn serving_addresses(ring: &FormedRing) -> Option<RankAddresses> {
    let serving = ring.serving.filter(|serving| *serving != ring.rank)?;
    RankAddresses::of(ring.place(serving)?.addresses.iter().map(Text::clipped))
}

fn not_bound(address: &str, error: &ListenError) -> RingError {
    RingError::System { doing: format!("listen at {address}"), cause: Chain(error).to_string() }
}

/// The leases for which a successor of the rendezvous waits for members that it cannot account for:
/// a rank that computes asks for the next ring only after its step.
const SUCCESSION_LEASES: u32 = 3;

/// The pause between two looks at what a rank that leaves waits for.
const LEAVE_PAUSE: Duration = Duration::from_millis(1);

/// How often a rank enters a folder that others remove.
const ENTER_TRIES_MAX: u32 = 10;

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
            first_size_min: 2,
            size_min: 1,
            join_window: lease,
            rendezvous: 1,
        })
        .unwrap();
        let error = crate::block_on::block_on(async {
            control.commands.closed().await;
            control.join(lease).await.unwrap_err()
        });
        assert!(matches!(error, RingError::System { .. }), "{error}");
    }
}
