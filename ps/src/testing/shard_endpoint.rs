//! An endpoint of one shard, for the simulator of whole clusters.
//!
//! The [`ShardEndpoint`] does for its shard what `runtime` does, without a socket, a thread or a
//! clock. Bytes of connections go in and out, and the caller passes the time. Files of a killed
//! process are kept. The shard's invariants are checked after every input.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::access::Principal;
use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::{RequestId, ShardId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{self, Hello};
use pushpull_common::protocol::{
    BodyStamp, Envelope, Features, FrameEvent, FrameProgress, FrameReader, FrameSink, Header,
    Message, Poll, encode_for,
};
use pushpull_net::auth::simulated_tokens::{SimulatedTokens, principal_of};
use pushpull_net::auth::{ClientHandshake, ServerHandshake};
use pushpull_store::arena::{ArenaStorage, Budget, Reservation};
use pushpull_store::testing::test_files::TestFiles;

use super::shard_event::{PulledFrames, ShardEvent};
use crate::config::PsConfig;
use crate::event::Event;
use crate::metrics::{Counters, Metrics};
use crate::peer_hello::PeerHello;
use crate::shard::opening::shard_setup::{ServerRun, ShardSetup};
use crate::shard::output::ShardOutput;
use crate::shard::values::applier::WorkOutcome;
use crate::shard::{Shard, ShardInput};
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::status::TrainingPhase;

/// The interval at which a shard needs [`ShardEndpoint::tick`].
pub const TICK: Duration = crate::shard::TICK;

/// The maximum memory of a shard.
const BYTES_MAX: u64 = 16 << 20;
/// The bytes of a block: few, so that small variables have several blocks.
const BLOCK_BYTES: usize = 256;

/// More outputs than one input can cause.
const OUTPUTS_MAX: usize = 4096;

/// A shard's files as a killed process leaves them.
#[derive(Debug, Default)]
pub struct KilledFiles(TestFiles);

/// The host of the client of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientHost {
    /// Possibly another host.
    Remote,
    /// This host, over TCP.
    Loopback,
    /// This host, over a Unix socket, which passes descriptors.
    Same,
}

/// The state of a shard's work after a slice of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkState {
    /// No work is left.
    Idle,
    /// Work is left.
    More,
    /// Work is left, and waits until values that are being sent are unpinned.
    Blocked,
}

/// One shard of a ps task with its connections.
#[derive(Debug)]
pub struct ShardEndpoint {
    shard: Shard,
    id: ShardId,
    config: Arc<PsConfig>,
    test_files: TestFiles,
    connections: BTreeMap<u64, ConnectionReader>,
    /// The reader of the step owner's connection, and whether the step owner has welcomed this
    /// shard.
    owner: Option<(FrameReader, bool)>,
    /// The features that are agreed with the step owner.
    owner_features: Features,
    requests: u64,
    part_bytes: u64,
    counters: Arc<Counters>,
    /// The tokens by which peers prove who they are, if they are asked.
    tokens: Option<SimulatedTokens>,
    budget: Budget,
    /// The memory that other shards of the task leave to this one.
    spare_bytes: Option<u64>,
    /// The rest of the budget, which other shards take once the variables are ready.
    of_others: Option<Reservation>,
    /// What this shard proves to the step owner.
    own_proof: Option<(Envelope, ClientHandshake)>,
    events: VecDeque<ShardEvent>,
}

/// The reading side of a connection.
#[derive(Debug, Default)]
struct ConnectionReader {
    reader: FrameReader,
    /// Whether the client has said hello.
    greeted: bool,
    /// The features that are agreed with it.
    features: Features,
    closing: bool,
    /// The challenge that the client has not answered, and its hello.
    challenged: Option<Box<ChallengedClient>>,
}

/// A client that has said hello, and has not proved who it is.
#[derive(Debug)]
struct ChallengedClient {
    header: Header,
    hello: Hello,
    handshake: ServerHandshake,
}

/// A hello that has arrived on a connection.
struct ArrivedHello {
    connection: u64,
    host: ClientHost,
    header: Header,
    hello: Hello,
}

/// Passes the frames of a connection to the shard, at a fixed time.
struct ConnectionSink<'a> {
    endpoint: &'a mut ShardEndpoint,
    now: Instant,
    connection: u64,
}

impl FrameSink for ConnectionSink<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        self.endpoint.handle(self.now, ShardInput::of_frame(self.connection, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.endpoint.shard.with_body(self.connection, receive)
    }
}

impl ShardEndpoint {
    /// Opens a shard on the files that an earlier process left, or on new ones.
    ///
    /// `life` must be higher than in all earlier processes. `clock` is the time of the process in
    /// milliseconds, which may be wrong. Values are sent in parts of at most `part_bytes`.
    ///
    /// # Panics
    /// If the configuration is invalid or the files cannot be opened.
    pub fn open(
        config: PsConfig,
        shard: u16,
        files: KilledFiles,
        life: u64,
        clock: u64,
        now: Instant,
        part_bytes: u64,
    ) -> ShardEndpoint {
        let config = PsConfig { block_bytes: BLOCK_BYTES, ..config };
        let setup = setup(config, shard);
        let id = setup.id;
        let config = setup.config.clone();
        let counters = setup.counters.clone();
        let budget = setup.budget.clone();
        let storage = ArenaStorage::TestFiles(files.0.clone());
        let run = ServerRun { boot: [1; 16], arena: life, epoch_base: clock };
        let opened = Shard::open(setup, storage, run, now);
        let mut endpoint = ShardEndpoint {
            shard: opened.expect("a shard recovers from the files that it left"),
            id,
            config,
            test_files: files.0,
            connections: BTreeMap::new(),
            owner: None,
            owner_features: Features::NONE,
            requests: 0,
            part_bytes,
            counters,
            tokens: None,
            budget,
            spare_bytes: None,
            of_others: None,
            own_proof: None,
            events: VecDeque::new(),
        };
        endpoint.settle();
        endpoint
    }

    /// Has its peers prove who they are, and proves to the step owner who it is.
    #[must_use]
    pub fn with_tokens(self, tokens: SimulatedTokens) -> ShardEndpoint {
        ShardEndpoint { tokens: Some(tokens), ..self }
    }

    /// Has other shards of the task take all memory but these bytes, once the variables are ready.
    #[must_use]
    pub fn with_spare_memory(self, bytes: u64) -> ShardEndpoint {
        ShardEndpoint { spare_bytes: Some(bytes), ..self }
    }

    /// Kills the process and returns the files that it leaves.
    pub fn kill(self) -> KilledFiles {
        KilledFiles(TestFiles::with(self.test_files.contents()))
    }

    /// Returns the id of the shard.
    pub fn id(&self) -> ShardId {
        self.id
    }

    /// Whether this shard owns the step.
    pub fn owns_step(&self) -> bool {
        self.config.owns_step() && self.id.shard == 0
    }

    /// Returns how many steps this shard has applied. In asynchronous mode only the step owner
    /// counts them.
    pub fn steps(&self) -> u64 {
        self.shard.step().0
    }

    /// Returns the values before the update under way, in the order of the shard's layout; none
    /// without variables. Elements that the update changes in place may have changed.
    pub fn committed_values(&self) -> Vec<u8> {
        self.shard.committed_values()
    }

    /// Returns the effects of a coordinator that have settled here; `None` if it is not open.
    pub fn settled_effects(&self, name: &str) -> Option<EffectWindow> {
        self.shard.settled_effects(name)
    }

    /// Returns the shard's metrics.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum([&*self.counters])
    }

    /// Describes the shard's step, the pushes it holds, and the replicas it waits for.
    pub fn waits(&self, now: Instant) -> String {
        let (steps, due) = self.shard.steps_and_due();
        let held = self.shard.whole_tokens();
        let awaited = self.shard.awaited_step(now).unwrap_or_default().text;
        format!("{}: {steps} steps applied, due {due:?}, held {held:?}; {awaited}", self.id)
    }

    /// Receives bytes over a connection; the first bytes of a connection open it. Returns false if
    /// they violate the protocol: the caller must cut the connection.
    pub fn receive(
        &mut self,
        now: Instant,
        connection: u64,
        host: ClientHost,
        bytes: &[u8],
    ) -> bool {
        // The entry that stays in the map records whether an output closes the connection
        // meanwhile.
        let place = self.connections.entry(connection).or_default();
        let mut reader = std::mem::take(&mut place.reader);
        let mut greeted = place.greeted;
        let mut source = slice_source(bytes);
        let is_closing = |endpoint: &ShardEndpoint| {
            endpoint.connections.get(&connection).is_some_and(|stream| stream.closing)
        };
        let sound = loop {
            // A connection that is being closed is not read.
            if is_closing(self) {
                break true;
            }
            if greeted {
                let mut sink = ConnectionSink { endpoint: self, now, connection };
                match reader.receive(&mut source, &mut sink) {
                    Err(_) => break false,
                    Ok(FrameProgress::Blocked | FrameProgress::Closed) => break true,
                    Ok(FrameProgress::Whole) => continue,
                }
            }
            match reader.poll(&mut source) {
                Err(_) => break false,
                Ok(Poll::Pending | Poll::Closed) => break true,
                Ok(Poll::Frame(header, Message::Hello(mut hello))) => {
                    let tokens = self.tokens.as_mut();
                    let challenged = tokens.map(|tokens| {
                        tokens.challenge(&header, &mut hello).expect("a token is offered")
                    });
                    match challenged {
                        Some((handshake, challenge)) => {
                            let client = ChallengedClient { header, hello, handshake };
                            if let Some(place) = self.connections.get_mut(&connection) {
                                place.challenged = Some(client.into());
                            }
                            let request = header.request;
                            let envelope = Envelope { request, ..Envelope::default() };
                            let frame = frame_of(Features::NONE, &envelope, &challenge.into(), &[]);
                            self.events.push_back(ShardEvent::Send { connection, frame });
                        }
                        None => {
                            greeted = true;
                            let arrived = ArrivedHello { connection, host, header, hello };
                            self.greet(now, &mut reader, arrived, None);
                        }
                    }
                }
                Ok(Poll::Frame(_, Message::ChallengeAnswer(answer))) => {
                    let place = self.connections.get_mut(&connection);
                    let Some(client) = place.and_then(|place| place.challenged.take()) else {
                        break false;
                    };
                    let ChallengedClient { header, hello, handshake } = *client;
                    let principal = principal_of(&handshake, &answer, &hello);
                    let principal = principal.expect("an honest peer proves who it is");
                    greeted = true;
                    let arrived = ArrivedHello { connection, host, header, hello };
                    self.greet(now, &mut reader, arrived, Some(&principal));
                }
                Ok(Poll::Frame(..)) => break false,
            }
        };
        if let Some(place) = self.connections.get_mut(&connection) {
            place.reader = reader;
            place.greeted = greeted;
        }
        sound
    }

    /// Hands the hello of a peer that may connect to the shard.
    fn greet(
        &mut self,
        now: Instant,
        reader: &mut FrameReader,
        arrived: ArrivedHello,
        principal: Option<&Arc<Principal>>,
    ) {
        let ArrivedHello { connection, host, header, hello } = arrived;
        reader.open();
        reader.set_features(self.config.features);
        if let Some(place) = self.connections.get_mut(&connection) {
            place.features = reader.features();
        }
        let hello = &hello;
        let header = &header;
        let origin = match host {
            ClientHost::Remote => PeerOrigin::Remote,
            ClientHost::Loopback => PeerOrigin::Loopback,
            ClientHost::Same => PeerOrigin::Unix { same_user: true },
        };
        let connected = ShardInput::Connected { connection, hello, header, origin, principal };
        self.handle(now, connected);
    }

    /// Ends a connection that is gone.
    pub fn disconnect(&mut self, now: Instant, connection: u64) {
        if self.connections.remove(&connection).is_some_and(|stream| stream.greeted) {
            self.handle(now, ShardInput::Disconnected { connection });
        }
    }

    /// Advances the shard's time. Due at least every [`TICK`].
    pub fn tick(&mut self, now: Instant) {
        if let Some(spare) = self.spare_bytes
            && self.of_others.is_none()
            && self.shard.status(now).phase == TrainingPhase::Training
        {
            let taken = self.budget.left().saturating_sub(spare);
            self.of_others = self.budget.reserve(taken).ok();
        }
        self.handle(now, ShardInput::Tick);
        let stall_timeout = self.config.network.stall_timeout;
        for connection in self.shard.revoke_stalled_readers(now, stall_timeout) {
            if let Some(stream) = self.connections.get_mut(&connection) {
                stream.closing = true;
            }
            self.events.push_back(ShardEvent::Close { connection });
        }
    }

    /// Sends the hello over a new connection to the step owner.
    pub fn owner_connected(&mut self) {
        let mut reader = FrameReader::new();
        reader.set_features(self.config.features);
        self.owner = Some((reader, false));
        let owner = self.config.cluster.step_owner().expect("a cluster has a ps task");
        let task = self.config.task.clone();
        let identity = self.config.identity();
        let features = self.config.features;
        let owner = ShardId { task: owner.index, shard: 0 };
        let hello = PeerHello { task, identity, features, credentials: None };
        let mut hello = hello.hello(owner, self.shard.newest_epoch());
        self.requests += 1;
        let request = RequestId(self.requests);
        let envelope = Envelope { request, ..Envelope::default() };
        let tokens = self.tokens.as_mut();
        self.own_proof = tokens.map(|tokens| (envelope, tokens.offer(&envelope, &mut hello)));
        self.send_to_owner(&envelope, &hello.into());
    }

    /// Receives bytes from the step owner. Returns false if the connection is unusable.
    pub fn on_owner_message(&mut self, now: Instant, bytes: &[u8]) -> bool {
        let Some((mut reader, mut welcome)) = self.owner.take() else { return false };
        let mut source = slice_source(bytes);
        let sound = loop {
            match reader.poll(&mut source) {
                Err(_) => break false,
                Ok(Poll::Pending | Poll::Closed) => break true,
                Ok(Poll::Frame(_, Message::Welcome(message))) if !welcome => {
                    welcome = true;
                    reader.open();
                    self.owner_features = reader.features();
                    let epoch = message.client_epoch;
                    self.handle(now, ShardInput::OwnerTime { epoch });
                    self.handle(now, ShardInput::OwnerLink { up: true });
                    self.handle(now, ShardInput::Tick);
                }
                Ok(Poll::Frame(_, Message::Challenge(challenge))) if !welcome => {
                    let Some((envelope, proof)) = self.own_proof.take() else { break false };
                    let answer = proof.answer(&challenge).expect("the owner proves who it is");
                    self.send_to_owner(&envelope, &answer.into());
                }
                Ok(Poll::Frame(..)) if !welcome => break false,
                Ok(Poll::Frame(header, message)) => {
                    self.handle(now, ShardInput::Owner { header: &header, message });
                }
            }
        };
        self.owner = Some((reader, welcome));
        sound
    }

    /// Ends the connection to the step owner, which is gone.
    pub fn owner_lost(&mut self, now: Instant) {
        if self.owner.take().is_some_and(|(_, welcome)| welcome) {
            self.handle(now, ShardInput::OwnerLink { up: false });
        }
    }

    /// Sends a heartbeat to the step owner, if it has welcomed this shard.
    pub fn send_heartbeat(&mut self) {
        if self.owner.as_ref().is_some_and(|(_, welcome)| *welcome) {
            self.send_to_owner(&Envelope::default(), &message::Heartbeat {}.into());
        }
    }

    fn send_to_owner(&mut self, envelope: &Envelope, message: &Message) {
        let frame = frame_of(self.owner_features, envelope, message, &[]);
        self.events.push_back(ShardEvent::ToOwner { frame });
    }

    /// Whether work is due.
    pub fn has_work(&self) -> bool {
        self.shard.has_work()
    }

    /// Does one slice of the work that is due.
    pub fn work(&mut self, now: Instant) -> WorkState {
        let (step, due) = self.shard.steps_and_due();
        let due = due.map(<[u64]>::to_vec);
        let work = self.shard.work(now);
        self.shard.check_invariants();
        let applied = self.shard.steps_and_due().0;
        if applied != step {
            assert_eq!(applied, step + 1, "a slice of work applies at most one step");
            let tokens = due.expect("an applied step was due");
            self.events.push_back(ShardEvent::Applied { step, tokens });
        }
        self.settle();
        match work {
            WorkOutcome::Idle => WorkState::Idle,
            WorkOutcome::More => WorkState::More,
            WorkOutcome::Blocked | WorkOutcome::Flushing | WorkOutcome::Growing => {
                WorkState::Blocked
            }
        }
    }

    /// Takes the next output.
    pub fn poll(&mut self) -> Option<ShardEvent> {
        self.events.pop_front()
    }

    fn handle(&mut self, now: Instant, input: ShardInput<'_>) {
        self.shard.handle(now, input);
        self.shard.check_invariants();
        self.settle();
    }

    /// Returns the features that are agreed with a client.
    fn features(&self, connection: u64) -> Features {
        self.connections.get(&connection).map_or(Features::NONE, |stream| stream.features)
    }

    /// Converts the shard's outputs to events.
    fn settle(&mut self) {
        for count in 0.. {
            assert!(count < OUTPUTS_MAX, "the outputs of one input are bounded");
            let Some(output) = self.shard.poll_output() else { break };
            let event = match output {
                ShardOutput::Send { connection, envelope, message, body, .. } => {
                    let features = self.features(connection);
                    let frame = frame_of(features, &envelope, &message, &body);
                    ShardEvent::Send { connection, frame }
                }
                ShardOutput::Stream { connection, parts } => {
                    let part_bytes = self.part_bytes;
                    let features = self.features(connection);
                    let values = PulledFrames { parts, part_bytes, features };
                    ShardEvent::Values { connection, values: Box::new(values) }
                }
                ShardOutput::Close { connection } => {
                    if let Some(stream) = self.connections.get_mut(&connection) {
                        stream.closing = true;
                    }
                    ShardEvent::Close { connection }
                }
                ShardOutput::ToOwner { envelope, message } => ShardEvent::ToOwner {
                    frame: frame_of(self.owner_features, &envelope, &message, &[]),
                },
                ShardOutput::Event(Event::PartlyApplied { token, .. }) => {
                    ShardEvent::PartlyApplied { token }
                }
                ShardOutput::Event(_) | ShardOutput::Stop => continue,
                ShardOutput::Members { joined, present } => {
                    assert!(present <= joined, "{present} of {joined} members are present");
                    continue;
                }
                ShardOutput::Shared { connection, envelope, message, descriptors } => {
                    let frame = frame_of(self.features(connection), &envelope, &message, &[]);
                    ShardEvent::Shared { connection, frame, descriptors }
                }
                ShardOutput::SaverOrder(_)
                | ShardOutput::SaveShard(_)
                | ShardOutput::Flush(_)
                | ShardOutput::RestoreShard(_) => {
                    unreachable!("no checkpoint directory is configured")
                }
            };
            self.events.push_back(event);
        }
    }
}

fn frame_of(features: Features, envelope: &Envelope, message: &Message, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    encode_for(features, &mut frame, envelope, message, BodyStamp::plain(body.len() as u64));
    frame.extend_from_slice(body);
    frame
}

/// Returns the configuration of a task that has only these features of the protocol: another build.
pub fn with_features(config: PsConfig, features: Features) -> PsConfig {
    PsConfig { features, ..config }
}

/// Checks a configuration and returns the setup of one of its shards.
fn setup(config: PsConfig, shard: u16) -> ShardSetup {
    config.check().expect("the configuration is valid");
    ShardSetup {
        id: ShardId { task: config.task.index, shard },
        identity: Arc::new(config.identity()),
        config: Arc::new(config),
        budget: Budget::new(BYTES_MAX),
        counters: Arc::default(),
    }
}
