//! [`SessionEndpoint`]: a worker's session for the simulator of whole clusters.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{Incarnation, RestoreEpoch, Sequence, ShardId, TaskId, VariableId};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{self, Declared, Operation, Role};
use pushpull_common::protocol::{
    BodyStamp, Envelope, Features, FrameEvent, FrameProgress, FrameReader, FrameSink, Grant,
    Message, encode, encode_for,
};
use pushpull_net::auth::ClientHandshake;
use pushpull_net::auth::simulated_tokens::SimulatedTokens;

use super::coordinator_rounds::{CoordinatorRounds, RoundStep};
use super::operations::{EndpointEvent, WorkerAnswer, WorkerOperation};
use super::shared_memory::SimulatedSharedMemory;
use super::stepwise_reader::{MappedPull, ReadProgress};
use crate::client::is_outdated;
use crate::config::Checksums;
use crate::coordinators::{CoordinatorRound, RoundKind};
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::Expectations;
use crate::session::{
    GradientCounts, OpId, PushOrder, ReadPoint, Reply, Session, SessionCommand, SessionConfig,
    SessionInput, SessionOutput,
};
use crate::start::{self, DeclaredShard, StartDecision};

/// A worker's session and the links it uses. Its operations are those that a training loop is made
/// of.
#[derive(Debug)]
pub struct SessionEndpoint {
    session: Session,
    plan: Arc<ShardingPlan>,
    owner: ShardId,
    links: BTreeMap<usize, FrameReader>,
    /// The features of this side, and those agreed on each link.
    features: Features,
    agreed: BTreeMap<usize, Features>,
    /// The tokens by which both sides prove who they are, if servers ask.
    tokens: Option<SimulatedTokens>,
    /// The proofs that servers have not asked for yet, by their links.
    proofs: BTreeMap<usize, (Envelope, ClientHandshake)>,
    shared_memory: SimulatedSharedMemory,
    /// Planted bug: pushes go to every shard at once, even over a connection newer than the token.
    skips_owner: bool,
    mapped_pull: Option<MappedPull>,
    rounds: CoordinatorRounds,
    /// How many pulls have read shared memory instead of sending requests.
    direct_pulls: u64,
    next_op: u64,
    /// How many gradients each shard had applied to the values of the last pull.
    pulled_gradients: GradientCounts,
    events: VecDeque<EndpointEvent>,
}

/// Passes the frames of a link to the session, at a fixed time.
struct LinkSink<'a> {
    endpoint: &'a mut SessionEndpoint,
    now: Instant,
    link: usize,
}

impl FrameSink for LinkSink<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        if let FrameEvent::Message(_, message) = &event
            && let Some((envelope, proof)) = self.endpoint.proofs.remove(&self.link)
        {
            let Message::Challenge(challenge) = message else {
                panic!("a server has not asked for a proof, but sent {}", message.name())
            };
            let answer = proof.answer(challenge).expect("a server proves who it is");
            let mut frame = Vec::new();
            encode(&mut frame, &envelope, &answer.into(), BodyStamp::NONE);
            let link = self.link;
            return self.endpoint.events.push_back(EndpointEvent::Send { link, frame });
        }
        if let FrameEvent::Message(_, message) = &event
            && let Some(peer) = Features::of_peer(message)
        {
            let agreed = self.endpoint.features.agreed(peer);
            self.endpoint.agreed.insert(self.link, agreed);
        }
        self.endpoint.handle(self.now, SessionInput::of_frame(self.link, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.endpoint.session.with_targets(self.link, receive)
    }
}

impl SessionEndpoint {
    /// Has it prove who it is, and expect that of the servers.
    #[must_use]
    pub fn with_tokens(self, tokens: SimulatedTokens) -> SessionEndpoint {
        SessionEndpoint { tokens: Some(tokens), ..self }
    }

    /// Creates the session of a process of this task. Pushes travel in parts of at most
    /// `part_bytes` bytes. Each process has its own incarnation, and these features of the
    /// protocol.
    ///
    /// # Panics
    /// If the cluster has no ps task.
    pub fn new(
        cluster: &ClusterSpec,
        task: TaskId,
        role: Role,
        incarnation: u64,
        catalogue: Arc<Catalogue>,
        part_bytes: u64,
        features: Features,
    ) -> SessionEndpoint {
        let owner = cluster.step_owner().expect("a cluster has a ps task");
        let owner = ShardId { task: owner.index, shard: 0 };
        let config = SessionConfig {
            task,
            role,
            owner,
            incarnation: Incarnation(incarnation),
            checksums: Checksums::Remote,
            shared_memory: true,
            values: None,
            identity: Identity::new().with("ps", cluster.ps_identity()).with_protocol(),
            expectations: Expectations::default(),
            features,
            addresses: BTreeMap::new(),
            progress_interval: None,
        };
        let plan = Arc::new(ShardingPlan::new(catalogue).with_parts_of(part_bytes));
        SessionEndpoint {
            session: Session::new(config),
            shared_memory: SimulatedSharedMemory::new(plan.clone()),
            skips_owner: false,
            plan,
            owner,
            links: BTreeMap::new(),
            features,
            agreed: BTreeMap::new(),
            tokens: None,
            proofs: BTreeMap::new(),
            mapped_pull: None,
            rounds: CoordinatorRounds::default(),
            direct_pulls: 0,
            next_op: 1,
            pulled_gradients: GradientCounts::default(),
            events: VecDeque::new(),
        }
    }

    /// Returns the step owner's shard and the other shards of the variables.
    pub fn shards(&self) -> Vec<ShardId> {
        let others = self.plan.shards().iter().copied().filter(|&shard| shard != self.owner);
        std::iter::once(self.owner).chain(others).collect()
    }

    /// Returns all variables.
    pub fn variables(&self) -> Vec<VariableId> {
        (0..self.plan.catalogue().variables().len() as u32).map(VariableId).collect()
    }

    /// Returns the range of a variable in the bytes of all variables.
    pub fn range(&self, variable: VariableId) -> Range<usize> {
        self.plan.range(variable)
    }

    /// Returns the length of all variables in bytes.
    pub fn bytes(&self) -> usize {
        self.plan.bytes()
    }

    /// Decides as the chief what to do with the shards it has found. Returns the shards to
    /// initialize and their restore epoch; none if all have values.
    ///
    /// # Panics
    /// If a shard has lost its values, which cannot happen while its files are kept.
    pub fn begin(&self, found: &[(ShardId, Declared)]) -> Vec<(ShardId, RestoreEpoch)> {
        let found: Vec<DeclaredShard> =
            found.iter().map(|(shard, declared)| DeclaredShard::new(*shard, declared)).collect();
        if start::common_epoch(&found).is_some() {
            return Vec::new();
        }
        match start::decide(&found, None, RestoreEpoch(0)) {
            StartDecision::Initialize { shards, epoch } => {
                shards.into_iter().map(|shard| (shard, epoch)).collect()
            }
            other => panic!("cannot begin with {found:?}: {other:?}"),
        }
    }

    /// Returns whether a process that joins starts over after this error.
    pub fn has_moved_on(error: &Error) -> bool {
        is_outdated(error)
    }

    /// Starts an operation with a timeout. Returns its number.
    pub fn submit(&mut self, now: Instant, operation: WorkerOperation, timeout: Duration) -> u64 {
        let request = |shard, message: Message, body| SessionCommand::Request {
            shard,
            message,
            body,
            wait_ms: None,
        };
        let plan = self.plan.clone();
        let command = match operation {
            WorkerOperation::Open => SessionCommand::Open { shards: self.shards() },
            WorkerOperation::Declare(shard) => {
                let declare = message::Declare { digest: plan.catalogue().digest() };
                let body = Bytes::copy_from_slice(plan.catalogue().encode());
                request(shard, declare.into(), body)
            }
            WorkerOperation::Initialize(shard, epoch) => {
                request(shard, message::Initialize { epoch }.into(), Bytes::new())
            }
            WorkerOperation::AwaitReady(shard) => {
                request(shard, message::AwaitReady {}.into(), Bytes::new())
            }
            WorkerOperation::AwaitEnd => {
                request(self.owner, message::AwaitEnd {}.into(), Bytes::new())
            }
            WorkerOperation::Leave(shard) => request(shard, message::Leave {}.into(), Bytes::new()),
            WorkerOperation::Join => SessionCommand::Join { plan },
            WorkerOperation::DeclareData(set) => {
                let owner = self.shards()[0];
                request(owner, message::DeclareData::from(&set).into(), Bytes::new())
            }
            WorkerOperation::Token => match self.session.unclaimed().claim() {
                Some(grant) => return self.answered(WorkerAnswer::Token(Some(grant))),
                None => SessionCommand::Token,
            },
            WorkerOperation::Pull(token)
                if self.shared_memory.readers.has_all(plan.shards())
                    && self.mapped_pull.is_none() =>
            {
                let op = self.number();
                self.mapped_pull = Some(MappedPull::new(&plan, op, token, now + timeout));
                self.events.push_back(EndpointEvent::ContinueRead);
                return op.0;
            }
            WorkerOperation::Pull(token) => {
                let buffer = AlignedBuffer::of_bytes(plan.bytes());
                SessionCommand::Pull { plan, buffer, token }
            }
            WorkerOperation::PullVariable(variable, token) => {
                let buffer = AlignedBuffer::of_bytes(plan.range(variable).len());
                SessionCommand::PullVariable { plan, variable, buffer, token }
            }
            WorkerOperation::Push { grant, effect, read, variables, bytes } => {
                let operation = Operation::Gradient {};
                let grant = Some(grant);
                let read = ReadPoint { step: read, gradients: self.pulled_gradients.clone() };
                let scattered = self.shared_memory.push_buffers.write(&variables, &bytes);
                let bytes = Bytes::from(bytes);
                let parts = match scattered {
                    Some(_) => Vec::new(),
                    None => {
                        Scatter::new(&plan, variables.into_iter()).parts(|range| bytes.slice(range))
                    }
                };
                let order = PushOrder::of_parts(operation, grant, read, parts);
                SessionCommand::Push { order: PushOrder { effect, scattered, ..order } }
            }
            WorkerOperation::Begin { grant, read } => {
                let operation = Operation::Gradient {};
                let parts = Vec::new();
                let read = ReadPoint { step: read, gradients: self.pulled_gradients.clone() };
                SessionCommand::Begin {
                    order: PushOrder::of_parts(operation, Some(grant), read, parts),
                }
            }
            WorkerOperation::AddGradients { sequence, variables, bytes } => {
                let bytes = Bytes::from(bytes);
                let parts =
                    Scatter::new(&plan, variables.into_iter()).parts(|range| bytes.slice(range));
                SessionCommand::AddParts { sequence, staged: None, parts }
            }
            WorkerOperation::End(sequence) => SessionCommand::End { sequence },
            WorkerOperation::Resume(error) => match error {
                Error::Timeout { sequence: Some(sequence), .. }
                | Error::ReplicasAbsent { sequence: Some(sequence), .. } => {
                    SessionCommand::Await { sequence }
                }
                other => panic!("cannot resume a push after {other}"),
            },
            WorkerOperation::OpenCoordinator(name) => {
                return self.begin_round(now, RoundKind::Open, &name, timeout);
            }
            WorkerOperation::SettledEffects(name) => {
                return self.begin_round(now, RoundKind::Query, &name, timeout);
            }
            WorkerOperation::CloseCoordinator(name, epoch) => {
                return self.begin_round(now, RoundKind::Close(epoch), &name, timeout);
            }
        };
        let op = self.number();
        let deadline = now + timeout;
        self.handle(now, SessionInput::Command { op, command, deadline });
        op.0
    }

    /// Begins a round of requests about a coordinator, one shard after the other.
    fn begin_round(&mut self, now: Instant, kind: RoundKind, name: &str, timeout: Duration) -> u64 {
        let op = self.number();
        let round = CoordinatorRound::new(kind, name, self.owner, &self.plan);
        let round = round.expect("the name of the coordinator is valid");
        let request = self.number();
        let step = self.rounds.begin(op, round, now + timeout, request);
        self.follow_round(now, step);
        op.0
    }

    fn follow_round(&mut self, now: Instant, step: RoundStep) {
        match step {
            RoundStep::Command { op, command, deadline } => {
                self.handle(now, SessionInput::Command { op, command, deadline });
            }
            RoundStep::Reply { op, reply } => {
                self.events.push_back(EndpointEvent::Reply { op: op.0, reply });
            }
        }
    }

    /// Returns what the session has under way, in words; `None` if nothing.
    pub fn unfinished(&self) -> Option<String> {
        self.session.unfinished()
    }

    fn number(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op - 1)
    }

    /// Answers an operation without involving the session.
    fn answered(&mut self, answer: WorkerAnswer) -> u64 {
        let op = self.number().0;
        self.events.push_back(EndpointEvent::Reply { op, reply: Ok(answer) });
        op
    }

    /// Cancels an operation.
    pub fn cancel(&mut self, now: Instant, op: u64) {
        if let Some(mapped_pull) = self.mapped_pull.take_if(|mapped_pull| mapped_pull.op.0 == op) {
            return mapped_pull.give_up();
        }
        self.handle(now, SessionInput::Cancelled { op: OpId(op) });
    }

    /// Gives up a push that was begun.
    pub fn abandon(&mut self, now: Instant, sequence: Sequence) {
        self.handle(now, SessionInput::Abandoned { sequence });
    }

    /// Drops a token, which returns it.
    pub fn drop_token(&mut self, now: Instant, grant: Grant) {
        self.handle(now, SessionInput::TokenDropped { grant });
    }

    /// Spends the batch of a token without a gradient.
    pub fn skip_token(&mut self, now: Instant, grant: Grant) {
        self.handle(now, SessionInput::TokenSkipped { grant });
    }

    /// Continues the pull that reads shared memory, if there is one, by one step.
    pub fn continue_read(&mut self, now: Instant) {
        let Some(mut mapped_pull) = self.mapped_pull.take() else { return };
        let step = mapped_pull.step(&self.plan, &self.shared_memory.readers);
        let op = mapped_pull.op;
        let token = mapped_pull.token;
        let deadline = mapped_pull.deadline;
        let answer = match step {
            ReadProgress::More => {
                self.mapped_pull = Some(mapped_pull);
                return self.events.push_back(EndpointEvent::ContinueRead);
            }
            ReadProgress::SendRequests => {
                let buffer = AlignedBuffer::of_bytes(self.plan.bytes());
                let command = SessionCommand::Pull { plan: self.plan.clone(), buffer, token };
                return self.handle(now, SessionInput::Command { op, command, deadline });
            }
            ReadProgress::Stale => WorkerAnswer::Stale,
            ReadProgress::Pulled(buffer, read) => {
                self.direct_pulls += 1;
                self.pulled_gradients = read.gradients.clone();
                WorkerAnswer::Pulled(buffer.bytes().to_vec(), read.step)
            }
        };
        self.events.push_back(EndpointEvent::Reply { op: op.0, reply: Ok(answer) });
    }

    /// Returns how many pulls have read shared memory.
    pub fn direct_pulls(&self) -> u64 {
        self.direct_pulls
    }

    /// Returns how many frames have referenced gradients in push buffers.
    pub fn shared_push_frames(&self) -> u64 {
        self.shared_memory.push_frames
    }

    /// Plants a bug: push slots are overwritten while they are being pushed.
    pub fn overwrite_push_slots(&mut self) {
        self.shared_memory.overwrites_push_slots = true;
    }

    /// Plants a bug: pushes go to every shard before the step owner has answered.
    pub fn skip_owner(&mut self) {
        self.skips_owner = true;
    }

    /// Receives descriptors over a link, before the frame that describes them or with it.
    pub fn descriptors_received(&mut self, link: usize, descriptors: Vec<OwnedFd>) {
        self.shared_memory.receive(link, descriptors);
    }

    /// Reports a connected link; `same_host` if it is a Unix socket.
    pub fn connected(&mut self, now: Instant, link: usize, same_host: bool) {
        let mut reader = FrameReader::new();
        reader.open();
        reader.set_features(self.features);
        self.agreed.remove(&link);
        self.proofs.remove(&link);
        self.links.insert(link, reader);
        self.shared_memory.connected(link);
        self.handle(now, SessionInput::Connected { link, same_host });
    }

    /// Reports a link that failed to connect or is lost.
    pub fn disconnected(&mut self, now: Instant, link: usize, error: &str) {
        self.links.remove(&link);
        self.shared_memory.lost(link);
        self.handle(now, SessionInput::Disconnected { link, error: error.to_owned() });
    }

    /// Reports that the transport has accepted bytes after it was full.
    pub fn written(&mut self, now: Instant, link: usize) {
        self.handle(now, SessionInput::BytesSent { link });
    }

    /// Receives bytes over a link. Returns false if they break the protocol and the link must be
    /// closed.
    pub fn receive(&mut self, now: Instant, link: usize, bytes: &[u8]) -> bool {
        // The entry stays in the map: its absence afterwards means that the session has closed the
        // link.
        let Some(place) = self.links.get_mut(&link) else { return true };
        let mut reader = std::mem::take(place);
        let mut source = slice_source(bytes);
        let mut sink = LinkSink { endpoint: self, now, link };
        let sound = loop {
            match reader.receive(&mut source, &mut sink) {
                Err(_) => break false,
                Ok(FrameProgress::Whole) if sink.endpoint.links.contains_key(&link) => {}
                Ok(_) => break true,
            }
        };
        if let Some(place) = self.links.get_mut(&link) {
            *place = reader;
        }
        sound
    }

    /// Reports that time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.handle(now, SessionInput::Tick);
    }

    /// Returns when the next [`SessionEndpoint::tick`] is due at the latest.
    pub fn wake_at(&self, now: Instant) -> Instant {
        self.session.wake_at(now)
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<EndpointEvent> {
        self.events.pop_front()
    }

    fn handle(&mut self, now: Instant, input: SessionInput) {
        if self.skips_owner {
            self.session.trust_connections();
        }
        self.session.handle(now, input);
        while let Some(output) = self.session.poll_output() {
            let event = match output {
                SessionOutput::Connect { link, shard } => EndpointEvent::Connect { link, shard },
                SessionOutput::Disconnect { link } => {
                    self.links.remove(&link);
                    self.shared_memory.lost(link);
                    EndpointEvent::Disconnect { link }
                }
                SessionOutput::Send { link, envelope, mut message, body, crc } => {
                    if let (Message::Hello(hello), Some(tokens)) = (&mut message, &mut self.tokens)
                    {
                        let proof = tokens.offer(&envelope, hello);
                        self.proofs.insert(link, (envelope, proof));
                    }
                    self.shared_memory.sent(link, &message);
                    let body = body.concat();
                    let crc = (crc && !body.is_empty()).then(|| crc32c::crc32c(&body));
                    let mut frame = Vec::new();
                    let stamp = BodyStamp { bytes: body.len() as u64, crc };
                    let agreed = self.agreed.get(&link).copied().unwrap_or_default();
                    encode_for(agreed, &mut frame, &envelope, &message, stamp);
                    frame.extend_from_slice(&body);
                    EndpointEvent::Send { link, frame }
                }
                SessionOutput::Reply { op, reply } => {
                    if let Some(round) = self.rounds.take(op) {
                        let next = self.number();
                        let step = self.rounds.answered(round, reply, next);
                        self.follow_round(now, step);
                        continue;
                    }
                    if let Ok(Reply::Pulled { read, .. }) = &reply {
                        self.pulled_gradients = read.gradients.clone();
                    }
                    EndpointEvent::Reply { op: op.0, reply: reply.map(answer) }
                }
                SessionOutput::Progress { .. } => continue,
                SessionOutput::SharedValues { link, mapped_shard, shared } => {
                    self.shared_memory.add_values(link, mapped_shard, &shared);
                    continue;
                }
                SessionOutput::SharedPushBuffer { link, shard, push_buffer, shared } => {
                    self.shared_memory.add_push_buffer(link, shard, push_buffer, shared);
                    continue;
                }
            };
            self.events.push_back(event);
        }
        self.shared_memory.push_buffers.overwrite_free_memory();
    }
}

fn answer(reply: Reply) -> WorkerAnswer {
    match reply {
        Reply::Answer { message: Message::Declared(declared), .. } => WorkerAnswer::Found(declared),
        Reply::Token(grant) => WorkerAnswer::Token(grant),
        Reply::Pulled { buffer, read } => WorkerAnswer::Pulled(buffer.bytes().to_vec(), read.step),
        Reply::Stale { .. } => WorkerAnswer::Stale,
        Reply::Begun { sequence } => WorkerAnswer::Begun(sequence),
        Reply::Pushed { outcome } => WorkerAnswer::Pushed(outcome),
        _ => WorkerAnswer::Done,
    }
}
