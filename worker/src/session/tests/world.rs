//! The world around a session under test: a clock set by hand, recorded replies, and servers
//! scripted by the test.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, Incarnation, RequestId, RestoreEpoch, TaskId};
use pushpull_common::protocol::message::{self, Hello, ModeIs, PushPart, Role, Welcome};
use pushpull_common::protocol::{Envelope, Features, Message};

pub(super) use super::samples::*;
use crate::config::Checksums;
use crate::error::{Error, UnresponsiveShards};
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::MappedShard;
use crate::session::Expectations;
use crate::session::{
    OpId, Reply, Session, SessionCommand, SessionConfig, SessionInput, SessionOutput,
};

/// A frame that the session has sent.
#[derive(Clone, Debug)]
pub(super) struct SentFrame {
    pub(super) link: usize,
    pub(super) envelope: Envelope,
    pub(super) message: Message,
    pub(super) body: Vec<u8>,
}

impl SentFrame {
    pub(super) fn request(&self) -> RequestId {
        self.envelope.request
    }

    pub(super) fn part(&self) -> &PushPart {
        let Message::PushPart(part) = &self.message else { panic!("no part: {self:?}") };
        part
    }
}

pub(super) struct SessionWorld {
    pub(super) session: Session,
    pub(super) now: Instant,
    pub(super) start: Instant,
    /// The sent frames that the test has not taken yet.
    pub(super) sent: VecDeque<SentFrame>,
    pub(super) replies: BTreeMap<OpId, Result<Reply, Error>>,
    /// The progress reports, with their times.
    pub(super) progress: Vec<(Duration, UnresponsiveShards)>,
    /// The links that the session wants connected.
    pub(super) connects: Vec<usize>,
    /// How often the session has closed each link.
    pub(super) closed: BTreeMap<usize, usize>,
    /// Whether heartbeats are answered, and hidden from the test, while time passes.
    pub(super) answers_heartbeats: bool,
    /// The restore epoch of each link's shard.
    pub(super) epochs: BTreeMap<usize, RestoreEpoch>,
    /// The mode of the servers.
    pub(super) mode: ModeIs,
    /// Whether transports pass descriptors.
    pub(super) same_host: bool,
    /// The shared values received over the links.
    pub(super) shared: Vec<(usize, MappedShard)>,
    /// The push buffers received over the links.
    pub(super) push_buffers: Vec<(usize, PushBufferId)>,
    connected: BTreeMap<usize, bool>,
    next_op: u64,
}

impl SessionWorld {
    /// Creates a session of the chief, with nothing connected.
    pub(super) fn new() -> SessionWorld {
        SessionWorld::with(|_| {})
    }

    pub(super) fn with(change: impl FnOnce(&mut SessionConfig)) -> SessionWorld {
        let addresses = (0..4).map(|task| (task, format!("host{task}:1")));
        let mut config = SessionConfig {
            task: TaskId::worker(0),
            role: Role::Chief {},
            owner: shard(0),
            incarnation: Incarnation(7),
            checksums: Checksums::Remote,
            shared_memory: true,
            values: None,
            identity: Identity::new().with("ps", "0,1"),
            expectations: Expectations::default(),
            features: Features::ALL,
            addresses: addresses.collect(),
            progress_interval: Some(Duration::from_secs(10)),
        };
        change(&mut config);
        let now = Instant::now();
        SessionWorld {
            session: Session::new(config),
            now,
            start: now,
            sent: VecDeque::new(),
            replies: BTreeMap::new(),
            progress: Vec::new(),
            connects: Vec::new(),
            closed: BTreeMap::new(),
            answers_heartbeats: true,
            epochs: BTreeMap::new(),
            mode: ModeIs::Asynchronous { owner_first: false },
            same_host: false,
            shared: Vec::new(),
            push_buffers: Vec::new(),
            connected: BTreeMap::new(),
            next_op: 1,
        }
    }

    /// Creates a session that is connected to the shards of a plan and has joined.
    pub(super) fn joined(plan: &Arc<ShardingPlan>) -> SessionWorld {
        SessionWorld::new().join(plan)
    }

    /// Connects to the shards of a plan, and joins.
    pub(super) fn join(self, plan: &Arc<ShardingPlan>) -> SessionWorld {
        let mut world = self;
        let open = world.call(SessionCommand::Open { shards: plan.shards().to_vec() });
        for link in 0..plan.shards().len() {
            world.accept(link);
        }
        world.reply(open).unwrap();
        let joined = world.call(SessionCommand::Join { plan: plan.clone() });
        assert!(matches!(world.reply(joined), Ok(Reply::Joined(_))));
        world
    }

    /// Starts an operation with a timeout of one minute.
    pub(super) fn call(&mut self, command: SessionCommand) -> OpId {
        self.call_within(command, Duration::from_secs(60))
    }

    pub(super) fn call_within(&mut self, command: SessionCommand, timeout: Duration) -> OpId {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let deadline = self.now + timeout;
        self.input(SessionInput::Command { op, command, deadline });
        op
    }

    pub(super) fn pull(&mut self, plan: &Arc<ShardingPlan>) -> OpId {
        let (plan, buffer) = (plan.clone(), AlignedBuffer::of_bytes(plan.bytes()));
        self.call(SessionCommand::Pull { plan, buffer, token: None })
    }

    pub(super) fn push(&mut self, plan: &ShardingPlan, token: u64) -> OpId {
        self.call(SessionCommand::Push { order: order(plan, Some(grant(token, 0)), 1) })
    }

    pub(super) fn cancel(&mut self, op: OpId) {
        self.input(SessionInput::Cancelled { op });
    }

    /// Returns the reply to an operation, which must have been answered.
    pub(super) fn reply(&mut self, op: OpId) -> Result<Reply, Error> {
        self.replies.remove(&op).unwrap_or_else(|| panic!("{op:?} is not answered"))
    }

    pub(super) fn is_pending(&self, op: OpId) -> bool {
        !self.replies.contains_key(&op)
    }

    pub(super) fn input(&mut self, input: SessionInput) {
        self.session.handle(self.now, input);
        self.session.check_invariants();
        self.collect();
    }

    fn collect(&mut self) {
        while let Some(output) = self.session.poll_output() {
            match output {
                SessionOutput::Connect { link, .. } => {
                    assert!(!self.connected.contains_key(&link), "link {link} is connected twice");
                    self.connected.insert(link, false);
                    self.connects.push(link);
                }
                SessionOutput::Disconnect { link } => {
                    self.connected.remove(&link);
                    self.connects.retain(|&other| other != link);
                    self.sent.retain(|frame| frame.link != link);
                    *self.closed.entry(link).or_default() += 1;
                }
                SessionOutput::Send { link, envelope, message, body, .. } => {
                    assert_eq!(
                        self.connected.get(&link),
                        Some(&true),
                        "{message:?} over a closed link {link}"
                    );
                    let body = body.concat();
                    self.sent.push_back(SentFrame { link, envelope, message, body });
                }
                SessionOutput::Reply { op, reply } => {
                    let before = self.replies.insert(op, reply);
                    assert!(before.is_none(), "{op:?} is answered twice");
                }
                SessionOutput::SharedValues { link, mapped_shard, .. } => {
                    self.shared.push((link, mapped_shard))
                }
                SessionOutput::SharedPushBuffer { link, push_buffer, .. } => {
                    self.push_buffers.push((link, push_buffer))
                }
                SessionOutput::Progress { silent } => {
                    self.progress.push((self.now - self.start, silent));
                }
            }
        }
    }

    /// Advances the clock and ticks the session at every time it asks for.
    pub(super) fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let wake = self.session.wake_at(self.now).max(self.now);
            if wake > end {
                break;
            }
            self.now = wake;
            self.input(SessionInput::Tick);
            let again = self.session.wake_at(self.now);
            assert!(again > self.now, "the session would spin");
            if self.answers_heartbeats {
                self.answer_heartbeats();
            }
        }
        self.now = end;
    }

    /// Answers all heartbeats.
    fn answer_heartbeats(&mut self) {
        let is_beat = |frame: &SentFrame| matches!(frame.message, Message::Heartbeat(_));
        while let Some(at) = self.sent.iter().position(is_beat) {
            let frame = self.sent.remove(at).unwrap();
            self.answer(&frame, message::HeartbeatAnswer {});
        }
    }

    /// Returns the next frame sent over a link, which must be of this kind.
    pub(super) fn next_frame(&mut self, link: usize, name: &str) -> SentFrame {
        let at = self.sent.iter().position(|frame| frame.link == link);
        let frame = at.and_then(|at| self.sent.remove(at));
        let frame = frame.unwrap_or_else(|| panic!("no {name} was sent over link {link}"));
        assert_eq!(frame.message.name(), name, "{frame:?}");
        frame
    }

    /// Returns whether no frame was sent over this link.
    pub(super) fn is_quiet(&self, link: usize) -> bool {
        self.sent.iter().all(|frame| frame.link != link)
    }

    pub(super) fn answer(&mut self, frame: &SentFrame, message: impl Into<Message>) {
        self.answer_body(frame, GlobalStep(0), message, &[]);
    }

    pub(super) fn answer_body(
        &mut self,
        frame: &SentFrame,
        step: GlobalStep,
        message: impl Into<Message>,
        body: &[u8],
    ) {
        self.answer_header(frame, step, message, body.len());
        if !body.is_empty() {
            self.deliver_body(frame.link, body);
        }
    }

    /// Sends an answer whose body is still to come.
    pub(super) fn answer_header(
        &mut self,
        frame: &SentFrame,
        step: GlobalStep,
        message: impl Into<Message>,
        body_bytes: usize,
    ) {
        let message = message.into();
        if let Message::Welcome(welcome) = &message {
            self.epochs.insert(frame.link, welcome.restore_epoch);
        }
        let epoch = self.epochs.get(&frame.link).copied().unwrap_or_default();
        let header = header(frame.request(), epoch, step, &message, body_bytes);
        self.input(SessionInput::Message { link: frame.link, header, message });
    }

    /// Delivers the whole body of the last message. Returns whether the session received it.
    pub(super) fn deliver_body(&mut self, link: usize, body: &[u8]) -> bool {
        let mut rest = body;
        let wanted = self.session.with_targets(link, |targets| {
            let Some(targets) = targets else { return false };
            for target in targets {
                let (head, tail) = rest.split_at(target.len());
                target.copy_from_slice(head);
                rest = tail;
            }
            assert!(rest.is_empty(), "the targets are as long as the body");
            true
        });
        self.input(SessionInput::Body { link });
        wanted
    }

    /// Connects the transport. Returns the hello.
    pub(super) fn connect(&mut self, link: usize) -> SentFrame {
        let at = self.connects.iter().position(|&other| other == link);
        self.connects.remove(at.unwrap_or_else(|| panic!("link {link} is not to be connected")));
        self.connected.insert(link, true);
        let same_host = self.same_host;
        self.input(SessionInput::Connected { link, same_host });
        self.next_frame(link, "Hello")
    }

    /// Connects the transport and welcomes the session.
    pub(super) fn accept(&mut self, link: usize) -> Hello {
        let frame = self.connect(link);
        self.answer(&frame, Welcome { mode: self.mode, ..welcome() });
        let Message::Hello(hello) = frame.message else { unreachable!() };
        hello
    }

    /// Fails to connect, because the name of the server has no address.
    pub(super) fn unresolved(&mut self, link: usize, host: &str) {
        self.connected.remove(&link);
        self.connects.retain(|&other| other != link);
        self.input(SessionInput::Unresolved { link, error: format!("cannot resolve {host:?}") });
    }

    /// Loses the connection with all frames in flight.
    pub(super) fn disconnect(&mut self, link: usize) {
        self.connected.remove(&link);
        self.sent.retain(|frame| frame.link != link);
        self.connects.retain(|&other| other != link);
        let error = "connection reset".to_owned();
        self.input(SessionInput::Disconnected { link, error });
    }

    /// Loses the connection and connects again.
    pub(super) fn reconnect(&mut self, link: usize) {
        self.disconnect(link);
        self.wait_for_connect(link);
        self.accept(link);
    }

    /// Waits until the session wants the link connected. Returns the time it took.
    pub(super) fn wait_for_connect(&mut self, link: usize) -> Duration {
        let before = self.now;
        while !self.connects.contains(&link) {
            assert!(self.now - before <= Duration::from_secs(1), "the pause is bounded");
            self.advance(ms(1));
        }
        self.now - before
    }

    /// Answers a reservation and returns the parts that follow.
    pub(super) fn give_push_slot(&mut self, link: usize, push_slot: u32) -> Vec<SentFrame> {
        let reserve = self.next_frame(link, "Reserve");
        self.answer(&reserve, message::Reserved { push_slot });
        self.parts(link)
    }

    /// Returns the parts sent over a link.
    pub(super) fn parts(&mut self, link: usize) -> Vec<SentFrame> {
        let mut parts = Vec::new();
        while !self.is_quiet(link) {
            parts.push(self.next_frame(link, "PushPart"));
        }
        parts
    }
}
