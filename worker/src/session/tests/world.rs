//! What surrounds a session in a test: a clock that is set by hand, callers whose replies are
//! kept, and servers that say what the test says.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, Incarnation, RequestId, RestoreEpoch, TaskId};
use pushpull_common::protocol::message::{self, Hello, ModeIs, PushPart, Role, Welcome};
use pushpull_common::protocol::{Envelope, Message};

pub(super) use super::samples::*;
use crate::config::Checksums;
use crate::error::{Error, UnresponsiveShards};
use crate::params::Buffer;
use crate::push_buffers::PushBufferId;
use crate::session::{Command, Input, OpId, Output, Reply, Session, Start};
use crate::sharding_plan::ShardingPlan;
use crate::shared::MappedShard;

/// A frame that the session has sent.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) link: usize,
    pub(super) envelope: Envelope,
    pub(super) message: Message,
    pub(super) body: Vec<u8>,
}

impl Frame {
    pub(super) fn request(&self) -> RequestId {
        self.envelope.request
    }

    pub(super) fn part(&self) -> &PushPart {
        let Message::PushPart(part) = &self.message else { panic!("no part: {self:?}") };
        part
    }
}

pub(super) struct World {
    pub(super) session: Session,
    pub(super) now: Instant,
    pub(super) start: Instant,
    /// What was sent and not looked at yet.
    pub(super) sent: VecDeque<Frame>,
    pub(super) replies: BTreeMap<OpId, Result<Reply, Error>>,
    /// What was told of silent shards, and when.
    pub(super) progress: Vec<(Duration, UnresponsiveShards)>,
    /// The links that are to be connected.
    pub(super) connects: Vec<usize>,
    /// How often each link was closed by the session.
    pub(super) closed: BTreeMap<usize, usize>,
    /// Whether heartbeats are answered, and not shown, while time passes.
    pub(super) beats: bool,
    /// The epoch that the shard of each link lives in.
    pub(super) epochs: BTreeMap<usize, RestoreEpoch>,
    /// The mode of the servers.
    pub(super) mode: ModeIs,
    /// Whether transports pass descriptors.
    pub(super) same_host: bool,
    /// What was lent over the links.
    pub(super) shared: Vec<(usize, MappedShard)>,
    /// The trays that were lent over the links.
    pub(super) push_buffers: Vec<(usize, PushBufferId)>,
    alive: BTreeMap<usize, bool>,
    next_op: u64,
}

impl World {
    /// A session of the chief, with nothing connected.
    pub(super) fn new() -> World {
        World::with(|_| {})
    }

    pub(super) fn with(change: impl FnOnce(&mut Start)) -> World {
        let addresses = (0..4).map(|task| (task, format!("host{task}:1")));
        let mut start = Start {
            task: TaskId::worker(0),
            role: Role::Chief {},
            owner: shard(0),
            incarnation: Incarnation(7),
            checksums: Checksums::Remote,
            shared_memory: true,
            values: None,
            identity: Identity::new().with("ps", "0,1"),
            addresses: addresses.collect(),
            progress_interval: Some(Duration::from_secs(10)),
        };
        change(&mut start);
        let now = Instant::now();
        World {
            session: Session::new(start),
            now,
            start: now,
            sent: VecDeque::new(),
            replies: BTreeMap::new(),
            progress: Vec::new(),
            connects: Vec::new(),
            closed: BTreeMap::new(),
            beats: true,
            epochs: BTreeMap::new(),
            mode: ModeIs::Asynchronous { owner_first: false },
            same_host: false,
            shared: Vec::new(),
            push_buffers: Vec::new(),
            alive: BTreeMap::new(),
            next_op: 1,
        }
    }

    /// A session that is connected to the shards of a plan and has joined.
    pub(super) fn joined(plan: &Arc<ShardingPlan>) -> World {
        World::new().join(plan)
    }

    /// Connects to the shards of a plan, and joins.
    pub(super) fn join(self, plan: &Arc<ShardingPlan>) -> World {
        let mut world = self;
        let open = world.call(Command::Open { shards: plan.shards().to_vec() });
        for link in 0..plan.shards().len() {
            world.accept(link);
        }
        world.reply(open).unwrap();
        let joined = world.call(Command::Joined { plan: plan.clone() });
        assert!(matches!(world.reply(joined), Ok(Reply::Done)));
        world
    }

    /// Has something done within a minute.
    pub(super) fn call(&mut self, command: Command) -> OpId {
        self.call_within(command, Duration::from_secs(60))
    }

    pub(super) fn call_within(&mut self, command: Command, timeout: Duration) -> OpId {
        let op = OpId(self.next_op);
        self.next_op += 1;
        let deadline = self.now + timeout;
        self.input(Input::Command { op, command, deadline });
        op
    }

    pub(super) fn pull(&mut self, plan: &Arc<ShardingPlan>) -> OpId {
        let (plan, buffer) = (plan.clone(), Buffer::new(plan));
        self.call(Command::Pull { plan, buffer, token: None })
    }

    pub(super) fn push(&mut self, plan: &ShardingPlan, token: u64) -> OpId {
        self.call(Command::Push { order: order(plan, Some(grant(token, 0)), 1) })
    }

    pub(super) fn cancel(&mut self, op: OpId) {
        self.input(Input::Cancelled { op });
    }

    /// What an operation was answered; it must have been.
    pub(super) fn reply(&mut self, op: OpId) -> Result<Reply, Error> {
        self.replies.remove(&op).unwrap_or_else(|| panic!("{op:?} is not answered"))
    }

    pub(super) fn waits(&self, op: OpId) -> bool {
        !self.replies.contains_key(&op)
    }

    pub(super) fn input(&mut self, input: Input) {
        self.session.handle(self.now, input);
        self.collect();
    }

    fn collect(&mut self) {
        while let Some(output) = self.session.poll_output() {
            match output {
                Output::Connect { link, .. } => {
                    assert!(!self.alive.contains_key(&link), "link {link} is connected twice");
                    self.alive.insert(link, false);
                    self.connects.push(link);
                }
                Output::Disconnect { link } => {
                    self.alive.remove(&link);
                    self.connects.retain(|&other| other != link);
                    self.sent.retain(|frame| frame.link != link);
                    *self.closed.entry(link).or_default() += 1;
                }
                Output::Send { link, envelope, message, body, .. } => {
                    assert_eq!(self.alive.get(&link), Some(&true), "{message:?} to nowhere");
                    let body = body.concat();
                    self.sent.push_back(Frame { link, envelope, message, body });
                }
                Output::Reply { op, reply } => {
                    let before = self.replies.insert(op, reply);
                    assert!(before.is_none(), "{op:?} is answered twice");
                }
                Output::SharedValues { link, mapped_shard, .. } => {
                    self.shared.push((link, mapped_shard))
                }
                Output::SharedPushBuffer { link, push_buffer, .. } => {
                    self.push_buffers.push((link, push_buffer))
                }
                Output::Progress { silent } => {
                    self.progress.push((self.now - self.start, silent));
                }
            }
        }
    }

    /// Lets the clock run, and tells the session the time whenever it wants to know.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let wake = self.session.wake_at(self.now).max(self.now);
            if wake > end {
                break;
            }
            self.now = wake;
            self.input(Input::Tick);
            let again = self.session.wake_at(self.now);
            assert!(again > self.now, "the session would spin");
            if self.beats {
                self.beat();
            }
        }
        self.now = end;
    }

    /// Answers all heartbeats.
    fn beat(&mut self) {
        let is_beat = |frame: &Frame| matches!(frame.message, Message::Heartbeat(_));
        while let Some(at) = self.sent.iter().position(is_beat) {
            let frame = self.sent.remove(at).unwrap();
            self.answer(&frame, message::HeartbeatAnswer {});
        }
    }

    /// The next frame sent over a link, which must be of this kind.
    pub(super) fn heard(&mut self, link: usize, name: &str) -> Frame {
        let at = self.sent.iter().position(|frame| frame.link == link);
        let frame = at.and_then(|at| self.sent.remove(at));
        let frame = frame.unwrap_or_else(|| panic!("no {name} was sent over link {link}"));
        assert_eq!(frame.message.name(), name, "{frame:?}");
        frame
    }

    /// Nothing was sent over this link.
    pub(super) fn is_quiet(&self, link: usize) -> bool {
        self.sent.iter().all(|frame| frame.link != link)
    }

    pub(super) fn answer(&mut self, frame: &Frame, message: impl Into<Message>) {
        self.answer_body(frame, GlobalStep(0), message, &[]);
    }

    pub(super) fn answer_body(
        &mut self,
        frame: &Frame,
        step: GlobalStep,
        message: impl Into<Message>,
        body: &[u8],
    ) {
        self.announce(frame, step, message, body.len());
        if !body.is_empty() {
            self.body(frame.link, body);
        }
    }

    /// An answer whose body is still to come.
    pub(super) fn announce(
        &mut self,
        frame: &Frame,
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
        self.input(Input::Message { link: frame.link, header, message });
    }

    /// The whole body of the last message; whether the session wants it.
    pub(super) fn body(&mut self, link: usize, body: &[u8]) -> bool {
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
        self.input(Input::Body { link });
        wanted
    }

    /// The transport is connected; returns the hello.
    pub(super) fn connect(&mut self, link: usize) -> Frame {
        let at = self.connects.iter().position(|&other| other == link);
        self.connects.remove(at.unwrap_or_else(|| panic!("link {link} is not to be connected")));
        self.alive.insert(link, true);
        let same_host = self.same_host;
        self.input(Input::Connected { link, same_host });
        self.heard(link, "Hello")
    }

    /// The transport is connected, and the server welcomes the session.
    pub(super) fn accept(&mut self, link: usize) -> Hello {
        let frame = self.connect(link);
        self.answer(&frame, Welcome { mode: self.mode, ..welcome() });
        let Message::Hello(hello) = frame.message else { unreachable!() };
        hello
    }

    /// The connection is lost, with all that was on its way.
    pub(super) fn cut(&mut self, link: usize) {
        self.alive.remove(&link);
        self.sent.retain(|frame| frame.link != link);
        self.connects.retain(|&other| other != link);
        let error = "connection reset".to_owned();
        self.input(Input::Disconnected { link, error });
    }

    /// The connection is lost, and is there again.
    pub(super) fn reconnect(&mut self, link: usize) {
        self.cut(link);
        self.wait_for_connect(link);
        self.accept(link);
    }

    /// Waits until the session wants the link connected; how long that was.
    pub(super) fn wait_for_connect(&mut self, link: usize) -> Duration {
        let before = self.now;
        while !self.connects.contains(&link) {
            assert!(self.now - before <= Duration::from_secs(1), "the pause is bounded");
            self.pass(ms(1));
        }
        self.now - before
    }

    /// Answers a reservation and takes the parts that follow.
    pub(super) fn give_push_slot(&mut self, link: usize, push_slot: u32) -> Vec<Frame> {
        let reserve = self.heard(link, "Reserve");
        self.answer(&reserve, message::Reserved { push_slot });
        self.parts(link)
    }

    /// The parts that were sent over a link.
    pub(super) fn parts(&mut self, link: usize) -> Vec<Frame> {
        let mut parts = Vec::new();
        while !self.is_quiet(link) {
            parts.push(self.heard(link, "PushPart"));
        }
        parts
    }
}
