//! A session behind a public door, for the simulator of whole clusters: bytes of links go in and out,
//! and the time is told.
//!
//! The [`Door`] does for its session what `runtime` does, without a socket, a thread or a clock, and
//! names the operations that the verbs of a training loop are made of.

mod mapped_reads;
mod push_buffers;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    GlobalStep, Incarnation, RestoreEpoch, Sequence, ShardId, TaskId, VariableId,
};
use pushpull_common::protocol::message::{self, Declared, Operation, Role};
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, FrameReader, Grant, Message, Outcome, Poll, encode,
};

use crate::client::has_moved_on;
use crate::config::Checksums;
use crate::error::Error;
use crate::params::Buffer;
use crate::session::{
    Command, Counts, Input, OpId, Output, PushOrder, Read, Reply, Session, Start,
};
use crate::sharding_plan::ShardingPlan;
use crate::start::{self, Begin, Found};
use mapped_reads::{MappedShards, Reading, Step};
use push_buffers::BufferSlots;

/// What a training loop wants done.
#[derive(Clone, Debug)]
pub enum Want {
    /// Connect to every shard with variables, and to the step owner's.
    Open,
    /// Declare the variables on a shard, as the chief.
    Declare(ShardId),
    /// Have a shard give its variables their first values, in this restore epoch.
    Initialize(ShardId, RestoreEpoch),
    /// Wait until a shard's variables have values.
    AwaitReady(ShardId),
    /// Join the variables.
    Joined,
    /// Take a token.
    Token,
    /// Pull all values, for the step of a token or of whatever step they are.
    Pull(Option<GlobalStep>),
    /// Pull the values of one variable, likewise.
    PullVariable(VariableId, Option<GlobalStep>),
    /// Push, spending a token.
    Push {
        /// The token.
        grant: Grant,
        /// The step at which values were read.
        read: GlobalStep,
        /// The variables that have a gradient.
        variables: Vec<VariableId>,
        /// The gradients, as long as all variables.
        bytes: Vec<u8>,
    },
    /// Begin a push whose gradients come one by one, spending a token.
    Begin {
        /// The token.
        grant: Grant,
        /// The step at which values were read.
        read: GlobalStep,
    },
    /// Push more of it.
    More {
        /// Which push.
        sequence: Sequence,
        /// The variables whose gradients these are.
        variables: Vec<VariableId>,
        /// The gradients, as long as all variables.
        bytes: Vec<u8>,
    },
    /// Nothing more of it comes: wait for what becomes of it.
    End(Sequence),
    /// Wait on for the push that ended with a timeout.
    Resume(Error),
    /// Tell a shard that this worker leaves.
    Leave(ShardId),
}

/// What came of it.
#[derive(Clone, Debug)]
pub enum Answer {
    /// It is done.
    Done,
    /// What the chief has found a shard in.
    Found(Declared),
    /// A token; none if there are no more.
    Token(Option<Grant>),
    /// All values, or those of one variable and their padding, of this step.
    Pulled(Vec<u8>, GlobalStep),
    /// The step of the token has passed.
    Stale,
    /// A push is begun.
    Begun(Sequence),
    /// A push was settled.
    Pushed(Outcome),
}

/// Something the session wants done.
#[derive(Debug)]
pub enum Event {
    /// Connect a link.
    Connect {
        /// Which.
        link: usize,
        /// To this shard.
        shard: ShardId,
    },
    /// Close a link; what waits to be sent on it is forgotten.
    Disconnect {
        /// Which.
        link: usize,
    },
    /// Send a frame.
    Send {
        /// Over this link.
        link: usize,
        /// Its bytes.
        frame: Vec<u8>,
    },
    /// Values are being read in memory that is lent: [`Door::read_on`] is due after a while.
    Reads,
    /// An operation is answered.
    Reply {
        /// Which.
        op: u64,
        /// With what.
        reply: Result<Answer, Error>,
    },
}

/// A worker's session, with its links.
#[derive(Debug)]
pub struct Door {
    session: Session,
    plan: Arc<ShardingPlan>,
    owner: ShardId,
    links: BTreeMap<usize, (FrameReader, bool)>,
    /// What was passed over each link and not taken yet, in the order of the answers that it belongs to.
    passed: BTreeMap<usize, VecDeque<Vec<OwnedFd>>>,
    mapped_shards: MappedShards,
    push_slots: BufferSlots,
    /// Rooms are written while they are being pushed: a bug that the simulator plants.
    spoils_push_slots: bool,
    /// Pushes go to every shard at once, however new its connection is: another.
    never_asks_owner: bool,
    /// How many frames have named gradients where they lie.
    named: u64,
    reading: Option<Reading>,
    /// How many pulls have asked nobody.
    direct_pulls: u64,
    next_op: u64,
    /// How many gradients each shard had applied to what was pulled last.
    read: Counts,
    events: VecDeque<Event>,
}

impl Door {
    /// The session of a process of this worker task, whose pushes travel in parts of at most so many
    /// bytes. The incarnation tells processes apart.
    ///
    /// # Panics
    /// If the cluster has no ps task.
    pub fn new(
        cluster: &ClusterSpec,
        task: u32,
        chief: bool,
        incarnation: u64,
        catalogue: Arc<Catalogue>,
        part_bytes: u64,
    ) -> Door {
        let owner = cluster.step_owner().expect("a cluster has a ps task");
        let owner = ShardId { task: owner.index, shard: 0 };
        let start = Start {
            task: TaskId::worker(task),
            role: if chief { Role::Chief {} } else { Role::Worker {} },
            owner,
            incarnation: Incarnation(incarnation),
            checksums: Checksums::Remote,
            shared_memory: true,
            values: None,
            identity: Identity::new().with("ps", cluster.ps_identity()),
            addresses: BTreeMap::new(),
            progress_interval: None,
        };
        let plan = Arc::new(ShardingPlan::new(catalogue).with_parts_of(part_bytes));
        Door {
            session: Session::new(start),
            push_slots: BufferSlots::new(plan.clone()),
            spoils_push_slots: false,
            never_asks_owner: false,
            named: 0,
            plan,
            owner,
            links: BTreeMap::new(),
            passed: BTreeMap::new(),
            mapped_shards: MappedShards::default(),
            reading: None,
            direct_pulls: 0,
            next_op: 1,
            read: Counts::default(),
            events: VecDeque::new(),
        }
    }

    /// The shards of the variables, the step owner's first.
    pub fn shards(&self) -> Vec<ShardId> {
        let others = self.plan.shards().iter().copied().filter(|&shard| shard != self.owner);
        std::iter::once(self.owner).chain(others).collect()
    }

    /// All variables.
    pub fn variables(&self) -> Vec<VariableId> {
        (0..self.plan.catalogue().variables().len() as u32).map(VariableId).collect()
    }

    /// Where a variable lies in the bytes of all variables.
    pub fn range(&self, variable: VariableId) -> Range<usize> {
        self.plan.range(variable)
    }

    /// The length of all variables.
    pub fn bytes(&self) -> usize {
        self.plan.bytes()
    }

    /// What the chief does with the shards as it has found them: those that are to be initialized,
    /// and in which restore epoch; none if all live.
    ///
    /// # Panics
    /// If a shard has lost its values, which none does whose files are kept.
    pub fn begin(&self, found: &[(ShardId, Declared)]) -> Vec<(ShardId, RestoreEpoch)> {
        let found: Vec<Found> =
            found.iter().map(|(shard, declared)| Found::new(*shard, declared)).collect();
        if start::living(&found).is_some() {
            return Vec::new();
        }
        match start::begin(&found, None) {
            Begin::Initialize { shards, epoch } => {
                shards.into_iter().map(|shard| (shard, epoch)).collect()
            }
            other => panic!("{found:?} are to be {other:?}"),
        }
    }

    /// Whether a chief or a worker that joins begins again after this error.
    pub fn has_moved_on(error: &Error) -> bool {
        has_moved_on(error)
    }

    /// Has something done by the deadline; the number of the operation.
    pub fn ask(&mut self, now: Instant, want: Want, timeout: Duration) -> u64 {
        let request = |shard, message: Message, body| Command::Request { shard, message, body };
        let plan = self.plan.clone();
        let command = match want {
            Want::Open => Command::Open { shards: self.shards() },
            Want::Declare(shard) => {
                let declare = message::Declare { digest: plan.catalogue().digest() };
                let body = Bytes::copy_from_slice(plan.catalogue().encode());
                request(shard, declare.into(), body)
            }
            Want::Initialize(shard, epoch) => {
                request(shard, message::Initialize { epoch }.into(), Bytes::new())
            }
            Want::AwaitReady(shard) => request(shard, message::AwaitReady {}.into(), Bytes::new()),
            Want::Leave(shard) => request(shard, message::Leave {}.into(), Bytes::new()),
            Want::Joined => Command::Joined { plan },
            Want::Token => match self.session.unclaimed().claim() {
                Some(grant) => return self.answered(Answer::Token(Some(grant))),
                None => Command::Token,
            },
            Want::Pull(token)
                if self.mapped_shards.share(plan.shards()) && self.reading.is_none() =>
            {
                let op = self.number();
                self.reading = Some(Reading::new(&plan, op, token, now + timeout));
                self.events.push_back(Event::Reads);
                return op.0;
            }
            Want::Pull(token) => {
                let buffer = Buffer::new(&plan);
                Command::Pull { plan, buffer, token }
            }
            Want::PullVariable(variable, token) => {
                let buffer = Buffer::of_bytes(plan.range(variable).len());
                Command::PullVariable { plan, variable, buffer, token }
            }
            Want::Push { grant, read, variables, bytes } => {
                let (operation, grant) = (Operation::Gradient {}, Some(grant));
                let read = Read { step: read, gradients: self.read.clone() };
                let scattered = self.push_slots.write(&variables, &bytes);
                let bytes = Bytes::from(bytes);
                let parts = match scattered {
                    Some(_) => Vec::new(),
                    None => plan.parts(variables.into_iter(), |range| bytes.slice(range)),
                };
                let order = PushOrder::of_parts(operation, grant, read, parts);
                Command::Push { order: PushOrder { scattered, ..order } }
            }
            Want::Begin { grant, read } => {
                let (operation, parts) = (Operation::Gradient {}, Vec::new());
                let read = Read { step: read, gradients: self.read.clone() };
                Command::Begin { order: PushOrder::of_parts(operation, Some(grant), read, parts) }
            }
            Want::More { sequence, variables, bytes } => {
                let bytes = Bytes::from(bytes);
                let parts = plan.parts(variables.into_iter(), |range| bytes.slice(range));
                Command::More { sequence, own: None, parts }
            }
            Want::End(sequence) => Command::End { sequence },
            Want::Resume(error) => match error {
                Error::Timeout { sequence: Some(sequence), .. } => Command::Await { sequence },
                other => panic!("no push can be resumed after {other}"),
            },
        };
        let op = self.number();
        let deadline = now + timeout;
        self.handle(now, Input::Command { op, command, deadline });
        op.0
    }

    fn number(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op - 1)
    }

    /// What is answered without the session being asked.
    fn answered(&mut self, answer: Answer) -> u64 {
        let op = self.number().0;
        self.events.push_back(Event::Reply { op, reply: Ok(answer) });
        op
    }

    /// Whoever waits for an operation waits no longer.
    pub fn cancel(&mut self, now: Instant, op: u64) {
        if let Some(reading) = self.reading.take_if(|reading| reading.op.0 == op) {
            return reading.give_up();
        }
        self.handle(now, Input::Cancelled { op: OpId(op) });
    }

    /// A push that was begun is given up.
    pub fn abandon(&mut self, now: Instant, sequence: Sequence) {
        self.handle(now, Input::Abandoned { sequence });
    }

    /// A token is dropped, and goes back.
    pub fn drop_token(&mut self, now: Instant, grant: Grant) {
        self.handle(now, Input::TokenDropped { grant });
    }

    /// Reads a little more of the values that are being read, if some are.
    pub fn read_on(&mut self, now: Instant) {
        let Some(mut reading) = self.reading.take() else { return };
        let step = reading.step(&self.plan, &self.mapped_shards);
        let (op, token, deadline) = (reading.op, reading.token, reading.deadline);
        let answer = match step {
            Step::More => {
                self.reading = Some(reading);
                return self.events.push_back(Event::Reads);
            }
            Step::Ask => {
                let buffer = Buffer::new(&self.plan);
                let command = Command::Pull { plan: self.plan.clone(), buffer, token };
                return self.handle(now, Input::Command { op, command, deadline });
            }
            Step::Stale => Answer::Stale,
            Step::Pulled(buffer, read) => {
                self.direct_pulls += 1;
                self.read = read.gradients.clone();
                Answer::Pulled(buffer.bytes().to_vec(), read.step)
            }
        };
        self.events.push_back(Event::Reply { op: op.0, reply: Ok(answer) });
    }

    /// How many pulls were of values in lent memory.
    pub fn direct_pulls(&self) -> u64 {
        self.direct_pulls
    }

    /// How many frames of pushes have said where gradients lie.
    pub fn named(&self) -> u64 {
        self.named
    }

    /// Has rooms written while they are being pushed, as a bug would.
    pub fn spoil_push_slots(&mut self) {
        self.spoils_push_slots = true;
    }

    /// Has pushes sent to every shard without the step owner's word, as a bug would.
    pub fn never_ask_owner(&mut self) {
        self.never_asks_owner = true;
    }

    /// Descriptors have come over a link, before the frame that tells what they are of, or with it.
    pub fn passed(&mut self, link: usize, descriptors: Vec<OwnedFd>) {
        self.passed.entry(link).or_default().push_back(descriptors);
    }

    fn take_passed(&mut self, link: usize) -> Vec<OwnedFd> {
        let passed = self.passed.get_mut(&link).and_then(VecDeque::pop_front);
        passed.expect("descriptors come with shared memory")
    }

    /// A link is connected; `same_host` if it is a Unix socket.
    pub fn connected(&mut self, now: Instant, link: usize, same_host: bool) {
        let mut reader = FrameReader::new();
        reader.open();
        self.links.insert(link, (reader, false));
        self.passed.remove(&link);
        self.handle(now, Input::Connected { link, same_host: same_host });
    }

    /// A link could not be connected, or is lost.
    pub fn disconnected(&mut self, now: Instant, link: usize, error: &str) {
        self.links.remove(&link);
        self.mapped_shards.remove(link);
        self.push_slots.remove(link);
        self.handle(now, Input::Disconnected { link, error: error.to_owned() });
    }

    /// The transport has taken bytes after it had been full.
    pub fn written(&mut self, now: Instant, link: usize) {
        self.handle(now, Input::Written { link });
    }

    /// Bytes come over a link. False if they break the protocol: the link is to be cut.
    pub fn receive(&mut self, now: Instant, link: usize, bytes: &[u8]) -> bool {
        // What stays in its place tells whether the session gives the link up meanwhile.
        let Some(place) = self.links.get_mut(&link) else { return true };
        let (mut reader, mut in_body) = std::mem::take(place);
        let sound = self.read(now, link, (&mut reader, &mut in_body), bytes);
        if let Some(place) = self.links.get_mut(&link) {
            *place = (reader, in_body);
        }
        sound
    }

    fn read(
        &mut self,
        now: Instant,
        link: usize,
        (reader, in_body): (&mut FrameReader, &mut bool),
        bytes: &[u8],
    ) -> bool {
        let mut rest = bytes;
        let mut source = |slices: &mut [IoSliceMut<'_>]| {
            if rest.is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut count = 0;
            for slice in slices {
                let taken = slice.len().min(rest.len());
                let (head, tail) = rest.split_at(taken);
                slice[..taken].copy_from_slice(head);
                rest = tail;
                count += taken;
            }
            Ok(count)
        };
        loop {
            if !self.links.contains_key(&link) {
                return true;
            }
            if *in_body {
                let before = reader.bytes();
                let polled = self.session.with_targets(link, |targets| match targets {
                    Some(targets) => reader.poll_body_scattered(&mut source, targets),
                    None => reader.skip_body(&mut source),
                });
                match polled {
                    Err(_) => return false,
                    Ok(BodyPoll::Done) => {
                        *in_body = false;
                        self.handle(now, Input::Body { link });
                    }
                    Ok(BodyPoll::Pending) => {
                        if reader.bytes() != before {
                            self.handle(now, Input::Heard { link });
                        }
                        return true;
                    }
                }
                continue;
            }
            match reader.poll(&mut source) {
                Err(_) => return false,
                Ok(Poll::Pending | Poll::Closed) => return true,
                Ok(Poll::Frame(header, message)) => {
                    *in_body = header.body_bytes > 0;
                    self.handle(now, Input::Message { link, header, message });
                }
            }
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.handle(now, Input::Tick);
    }

    /// When [`Door::tick`] is due at the latest.
    pub fn wake_at(&self, now: Instant) -> Instant {
        self.session.wake_at(now)
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn handle(&mut self, now: Instant, input: Input) {
        if self.never_asks_owner {
            self.session.trust_connections();
        }
        self.session.handle(now, input);
        while let Some(output) = self.session.poll_output() {
            let event = match output {
                Output::Connect { link, shard } => Event::Connect { link, shard },
                Output::Disconnect { link } => {
                    self.links.remove(&link);
                    self.mapped_shards.remove(link);
                    self.push_slots.remove(link);
                    Event::Disconnect { link }
                }
                Output::Send { link, envelope, message, body, crc } => {
                    if let Message::PushShared(shared) = &message {
                        self.named += 1;
                        if self.spoils_push_slots {
                            self.push_slots.spoil(link, shared.push_slot);
                        }
                    }
                    let body = body.concat();
                    let crc = (crc && !body.is_empty()).then(|| crc32c::crc32c(&body));
                    let mut frame = Vec::new();
                    let stamp = BodyStamp { bytes: body.len() as u64, crc };
                    encode(&mut frame, &envelope, &message, stamp);
                    frame.extend_from_slice(&body);
                    Event::Send { link, frame }
                }
                Output::Reply { op, reply } => {
                    if let Ok(Reply::Pulled { read, .. }) = &reply {
                        self.read = read.gradients.clone();
                    }
                    Event::Reply { op: op.0, reply: reply.map(answer) }
                }
                Output::Progress { .. } => continue,
                Output::SharedValues { link, mapped_shard, shared } => {
                    let descriptors = self.take_passed(link);
                    self.mapped_shards.add(&self.plan, link, mapped_shard, (&shared, descriptors));
                    continue;
                }
                Output::SharedPushBuffer { link, shard, push_buffer, shared } => {
                    let descriptors = self.take_passed(link);
                    self.push_slots.add((link, shard, push_buffer), shared, descriptors);
                    continue;
                }
            };
            self.events.push_back(event);
        }
        self.push_slots.scribble();
    }
}

fn answer(reply: Reply) -> Answer {
    match reply {
        Reply::Answer { message: Message::Declared(declared), .. } => Answer::Found(declared),
        Reply::Token(grant) => Answer::Token(grant),
        Reply::Pulled { buffer, read } => Answer::Pulled(buffer.bytes().to_vec(), read.step),
        Reply::Stale { .. } => Answer::Stale,
        Reply::Begun { sequence } => Answer::Begun(sequence),
        Reply::Pushed { outcome } => Answer::Pushed(outcome),
        _ => Answer::Done,
    }
}
