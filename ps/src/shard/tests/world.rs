//! A small world around shards: virtual time, peers that speak messages, bodies in any chop.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{RequestId, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{self, Hello, Welcome};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::variable::VariableSpec;

use super::peers::{Peer, chief, identity, pack, place};
use crate::arena::shelf::{Content, Shelf};
use crate::arena::{Budget, Place};
use crate::checkpoint::CheckpointStorage;
use crate::config::PsConfig;
use crate::error::StorageError;
use crate::metrics::{Counters, Metrics};
use crate::optimizer::Optimizer;
use crate::shard::checkpoints::{Order, ShardRestore, ShardSave};
use crate::shard::durable::{Life, Parts};
use crate::shard::output::{Output, PulledParts};
use crate::shard::power::Flush;
use crate::shard::work::Work;
use crate::shard::{Input, Shard, TICK, Way};

/// A connection to one of the world's shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) shard: usize,
    pub(super) connection: u64,
}

/// Something a peer has heard.
#[derive(Debug)]
pub(super) enum Heard {
    Message { envelope: Envelope, message: Message, body: Vec<u8> },
    Values(PulledParts),
}

/// Somebody who is shown a shard.
pub(super) type Observer = Box<dyn FnMut(&Shard)>;

pub(super) struct World {
    pub(super) shards: Vec<Shard>,
    pub(super) counters: Vec<Arc<Counters>>,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) heard: BTreeMap<Line, Vec<Heard>>,
    /// Over which lines something was sent that can wait for more.
    pub(super) leisurely: Vec<Line>,
    /// The descriptors that a line was sent last.
    pub(super) shared: BTreeMap<Line, Vec<OwnedFd>>,
    /// The connections that a shard has closed.
    pub(super) closed: BTreeSet<Line>,
    /// What whoever runs the shards was told.
    pub(super) events: Vec<(usize, crate::event::Event)>,
    /// The last numbers of members, by shard.
    pub(super) members: Vec<(usize, usize)>,
    pub(super) now: Instant,
    pub(super) shelves: Vec<Shelf>,
    life: Life,
    /// Images that are to be put on the disk.
    pub(super) flushes: Vec<(usize, Flush)>,
    /// Whether they wait to be told, and are not put there at once.
    pub(super) holds_flushes: bool,
    /// Whether work is begun before what an input has caused is taken, as the runtime does.
    pub(super) works_at_once: bool,
    /// Where checkpoints are kept, if they are.
    pub(super) storage: Option<Arc<dyn CheckpointStorage>>,
    /// What shards say to the step owner, in synchronous mode.
    pub(super) to_owner: Vec<(usize, Envelope, Message)>,
    /// What the saver is to do: no world has one.
    pub(super) orders: Vec<(usize, Order)>,
    saves: Vec<(usize, ShardSave)>,
    restores: Vec<(usize, ShardRestore)>,
    pub(super) config: Arc<PsConfig>,
    budget: Budget,
    boots: u8,
    boot: [u8; 16],
    /// Bytes that a body is delivered in at a time.
    pub(super) chop: usize,
    /// Is shown a shard after each input and each slice of work, once its outputs are out.
    pub(super) observer: Option<Observer>,
    next_connection: u64,
    next_request: u64,
}

/// What the processes of the world bring along.
pub(super) const LIFE: Life = Life { boot: [7; 16], arena: 1, epoch_base: 0 };

impl World {
    /// Shards for these variables, nothing declared.
    pub(super) fn bare(
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> World {
        World::on(LIFE, variables, optimizer, configure, |_| Shelf::default())
    }

    /// The same, in arenas that are made by another process.
    pub(super) fn bare_as(
        life: Life,
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> World {
        World::on(life, variables, optimizer, configure, |_| Shelf::default())
    }

    /// The same on these shelves.
    pub(super) fn on(
        life: Life,
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
        shelf: impl Fn(usize) -> Shelf,
    ) -> World {
        let cluster = ClusterSpec::builder().job("ps", ["127.0.0.1:1"]).build().unwrap();
        let config = configure(PsConfig::new(cluster, TaskId::ps(0), optimizer));
        let budget = Budget::new(config.storage.bytes_max());
        let (config, identity) = (Arc::new(config), Arc::new(identity()));
        let counters: Vec<_> = (0..config.shards).map(|_| Arc::new(Counters::default())).collect();
        let now = Instant::now();
        let mut shelves = Vec::new();
        let mut shards = Vec::new();
        for (index, counters) in counters.iter().enumerate() {
            let id = ShardId { task: 0, shard: index as u16 };
            let (config, identity) = (config.clone(), identity.clone());
            let (budget, counters, shelf) = (budget.clone(), counters.clone(), shelf(index));
            let parts = Parts { id, config, identity, budget, counters };
            shards.push(Shard::open(parts, Place::Shelf(shelf.clone()), life, now).unwrap());
            shelves.push(shelf);
        }
        World {
            shards,
            shelves,
            life,
            flushes: Vec::new(),
            holds_flushes: false,
            works_at_once: false,
            storage: None,
            to_owner: Vec::new(),
            orders: Vec::new(),
            saves: Vec::new(),
            restores: Vec::new(),
            config: config.clone(),
            budget,
            boots: 100,
            boot: life.boot,
            catalogue: place(variables, config.shards),
            events: Vec::new(),
            members: vec![(0, 0); counters.len()],
            counters,
            heard: BTreeMap::new(),
            leisurely: Vec::new(),
            shared: BTreeMap::new(),
            closed: BTreeSet::new(),
            now,
            chop: usize::MAX,
            observer: None,
            next_connection: 1,
            next_request: 1,
        }
    }

    /// The same, declared and initialized by a chief, whose lines it returns.
    pub(super) fn ready(
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> (World, Vec<Line>) {
        let mut world = World::bare(variables, optimizer, configure);
        let lines = world.begin();
        (world, lines)
    }

    /// Declares the variables and initializes them, as a chief, whose lines it returns.
    pub(super) fn begin(&mut self) -> Vec<Line> {
        let mut chief = chief();
        let lines: Vec<Line> =
            (0..self.shards.len()).map(|shard| self.join(shard, &mut chief)).collect();
        for &line in &lines {
            let catalogue = self.catalogue.clone();
            let declared = self.declare(line, &catalogue);
            assert!(matches!(declared, Message::Declared(_)), "{declared:?}");
            let ready = self.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
            assert!(matches!(ready, Message::Ready(_)), "{ready:?}");
        }
        lines
    }

    /// Kills the process of a shard and starts it again: its connections are gone.
    pub(super) fn restart(&mut self, shard: usize) -> Result<(), StorageError> {
        let files = self.shelves[shard].contents();
        self.reopen(shard, files)
    }

    /// What the process of a shard leaves if it is killed now.
    pub(super) fn files(&self, shard: usize) -> BTreeMap<String, Vec<u8>> {
        let files = self.shelves[shard].contents().into_iter();
        files.map(|(name, content)| (name, content.to_vec())).collect()
    }

    /// Replaces a shard by one that opens these files.
    pub(super) fn reopen(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
    ) -> Result<(), StorageError> {
        let boot = self.boot;
        self.reopen_in(shard, files, Life { boot, ..self.life })
    }

    /// The same after the machine was started anew.
    pub(super) fn reboot(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
    ) -> Result<(), StorageError> {
        self.boots += 1;
        self.reopen_in(shard, files, Life { boot: [self.boots; 16], ..self.life })
    }

    fn reopen_in(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
        life: Life,
    ) -> Result<(), StorageError> {
        let lines: Vec<Line> = self.heard.keys().copied().filter(|l| l.shard == shard).collect();
        for line in lines {
            self.heard.remove(&line);
            self.closed.insert(line);
        }
        let disk = std::mem::take(&mut *self.shelves[shard].disk());
        self.shelves[shard] = Shelf::with(files);
        // What this boot has put on the disk is there; after another it is what there is at all.
        *self.shelves[shard].disk() = match life.boot == self.boot {
            true => disk,
            false => self.files(shard),
        };
        self.boot = life.boot;
        // Its memory is given back before it is taken again.
        let unborn = self.parts(shard);
        let other = Life { arena: self.life.arena + 1, ..self.life };
        self.shards[shard] = Shard::open(unborn, Place::Anonymous, other, self.now)?;
        let place = Place::Shelf(self.shelves[shard].clone());
        self.shards[shard] = Shard::open(self.parts(shard), place, life, self.now)?;
        self.flushes.retain(|(of, _)| *of != shard);
        self.collect(shard);
        Ok(())
    }

    pub(super) fn parts(&self, shard: usize) -> Parts {
        Parts {
            id: ShardId { task: 0, shard: shard as u16 },
            config: self.config.clone(),
            identity: Arc::new(identity()),
            budget: self.budget.clone(),
            counters: self.counters[shard].clone(),
        }
    }

    /// The bytes of memory that nobody has taken.
    pub(super) fn left(&self) -> u64 {
        self.budget.left()
    }

    /// Takes all memory that nobody has taken, until what this returns is dropped.
    pub(super) fn fill(&self) -> crate::arena::Loan {
        self.budget.take(self.budget.left()).expect("so much is left")
    }

    pub(super) fn metrics(&self) -> Metrics {
        Metrics::sum(self.counters.iter().map(|counters| &**counters))
    }

    /// Says hello as told; the line exists only if it is welcome.
    pub(super) fn greet(
        &mut self,
        shard: usize,
        hello: Hello,
        remote: bool,
    ) -> Result<(Line, Welcome), Refusal> {
        let way = if remote { Way::Remote } else { Way::Unix { same_user: true } };
        self.greet_by(way, shard, hello)
    }

    /// The same as who has come this way.
    pub(super) fn greet_by(
        &mut self,
        way: Way,
        shard: usize,
        hello: Hello,
    ) -> Result<(Line, Welcome), Refusal> {
        let line = Line { shard, connection: self.next_connection };
        self.next_connection += 1;
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let (header, message) =
            pack(&Envelope { request, ..Envelope::default() }, &hello.into(), 0);
        let Message::Hello(hello) = message else { unreachable!() };
        let (connection, hello, header) = (line.connection, &hello, &header);
        self.input(shard, Input::Connected { connection, hello, header, way });
        match self.answer(line, request) {
            Some(Message::Welcome(welcome)) => Ok((line, welcome)),
            Some(Message::Refused(refused)) => {
                assert!(self.closed.contains(&line), "who is not welcome is closed");
                self.disconnect(line);
                Err(refused.refusal)
            }
            other => panic!("hello is answered {other:?}"),
        }
    }

    pub(super) fn try_join(&mut self, shard: usize, peer: &mut Peer) -> Result<Line, Refusal> {
        let (line, welcome) = self.greet(shard, peer.hello(shard), false)?;
        peer.epoch = welcome.client_epoch;
        Ok(line)
    }

    pub(super) fn join(&mut self, shard: usize, peer: &mut Peer) -> Line {
        self.try_join(shard, peer).unwrap()
    }

    pub(super) fn disconnect(&mut self, line: Line) {
        self.input(line.shard, Input::Disconnected { connection: line.connection });
        self.heard.remove(&line);
    }

    /// Sends a message without a body.
    pub(super) fn say(&mut self, line: Line, message: Message) -> RequestId {
        self.send(line, Envelope::default(), message, &[])
    }

    /// Sends a message with its body; the envelope's request is chosen here.
    pub(super) fn send(
        &mut self,
        line: Line,
        envelope: Envelope,
        message: Message,
        body: &[u8],
    ) -> RequestId {
        let request = self.announce(line, envelope, message, body.len());
        if !body.is_empty() {
            self.body(line, body);
        }
        request
    }

    /// Sends a message whose body is still to come.
    pub(super) fn announce(
        &mut self,
        line: Line,
        envelope: Envelope,
        message: Message,
        body_bytes: usize,
    ) -> RequestId {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let (header, message) = pack(&Envelope { request, ..envelope }, &message, body_bytes);
        let (connection, header) = (line.connection, &header);
        self.input(line.shard, Input::Message { connection, header, message });
        request
    }

    /// Delivers the whole body of the message announced last.
    pub(super) fn body(&mut self, line: Line, body: &[u8]) {
        let delivered = self.body_until(line, body, body.len());
        assert_eq!(delivered, body.len());
        self.input(line.shard, Input::Body { connection: line.connection });
    }

    /// Delivers a body chop by chop up to `end`, without its end; returns how far it came.
    pub(super) fn body_until(&mut self, line: Line, body: &[u8], end: usize) -> usize {
        let mut at = 0;
        while at < end {
            let stop = end.min(at.saturating_add(self.chop));
            if let Some(target) = self.shards[line.shard].body_target(line.connection) {
                assert_eq!(target.len(), body.len(), "a body fills its target");
                target[at..stop].copy_from_slice(&body[at..stop]);
            }
            at = stop;
            if at < body.len() {
                self.input(line.shard, Input::Progress { connection: line.connection });
            }
        }
        at
    }

    /// What was answered to a request, if it was.
    pub(super) fn answer(&mut self, line: Line, request: RequestId) -> Option<Message> {
        let heard = self.heard.entry(line).or_default();
        let matches = |heard: &Heard| matches!(heard, Heard::Message { envelope, .. } if envelope.request == request);
        match heard.remove(heard.iter().position(matches)?) {
            Heard::Message { message, .. } => Some(message),
            Heard::Values(_) => None,
        }
    }

    /// Does all the work there is, until it is done or blocked.
    pub(super) fn work(&mut self) -> Work {
        let mut last = Work::Idle;
        for shard in 0..self.shards.len() {
            while self.shards[shard].has_work() {
                last = self.slice(shard);
                if last != Work::More {
                    break;
                }
            }
        }
        last
    }

    /// Puts the images that are due on the disk.
    pub(super) fn flush(&mut self) {
        while let Some((shard, flush)) = self.flushes.pop() {
            let result = flush.run();
            self.shards[shard].handle(self.now, Input::Flushed(result));
            self.take_outputs(shard);
        }
    }

    /// The body of the answer to a shard that was told to save its part.
    pub(super) fn answer_body(&mut self, line: Line, request: RequestId) -> Vec<u8> {
        let storage = self.storage.clone().expect("a place for checkpoints");
        while let Some((shard, save)) = self.saves.pop() {
            let (connection, request) = (save.connection, save.request);
            let result = save.run(storage.clone());
            self.input(shard, Input::ShardSaved { connection, request, result });
        }
        let heard = self.heard.remove(&line).unwrap_or_default();
        let body = heard.into_iter().find_map(|heard| match heard {
            Heard::Message { envelope, body, .. } => (envelope.request == request).then_some(body),
            Heard::Values(_) => None,
        });
        body.expect("it has saved its part")
    }

    /// What a shard is to write to a checkpoint.
    /// The answer to a request with its body.
    pub(super) fn heard_body(&mut self, line: Line, request: RequestId) -> (Message, Vec<u8>) {
        let heard = self.heard.entry(line).or_default();
        let is_it = |heard: &Heard| matches!(heard, Heard::Message { envelope, .. } if envelope.request == request);
        let index = heard.iter().position(is_it).expect("it is answered");
        match heard.remove(index) {
            Heard::Message { message, body, .. } => (message, body),
            Heard::Values(_) => panic!("values are not what was asked for"),
        }
    }

    pub(super) fn take_save(&mut self) -> ShardSave {
        self.saves.pop().expect("a shard is to save its part").1
    }

    /// What a shard is to read of a checkpoint.
    pub(super) fn take_restore(&mut self) -> ShardRestore {
        self.restores.pop().expect("a shard is to restore").1
    }

    /// Reads the checkpoints that are to be restored, to the end.
    pub(super) fn finish_restores(&mut self) {
        let storage = self.storage.clone().expect("a place for checkpoints");
        while let Some((shard, restore)) = self.restores.pop() {
            let restored = Box::new(restore.run(storage.clone()));
            self.input(shard, Input::ShardRestored(restored));
        }
    }

    /// The image that is due cannot be put there.
    pub(super) fn fail_flush(&mut self, error: &str) {
        let (shard, _) = self.flushes.pop().expect("an image is due");
        self.shards[shard].handle(self.now, Input::Flushed(Err(error.to_owned())));
        self.take_outputs(shard);
    }

    /// Does one slice of work.
    pub(super) fn slice(&mut self, shard: usize) -> Work {
        let work = self.shards[shard].work(self.now);
        self.collect(shard);
        work
    }

    /// Lets so much time pass; those with a line send heartbeats.
    pub(super) fn pass(&mut self, time: Duration, alive: &[Line]) {
        let end = self.now + time;
        while self.now < end {
            self.now = end.min(self.now + TICK);
            for &line in alive {
                let request = self.say(line, message::Heartbeat {}.into());
                assert!(matches!(self.answer(line, request), Some(Message::HeartbeatAnswer(_))));
            }
            self.tick();
        }
    }

    pub(super) fn tick(&mut self) {
        for shard in 0..self.shards.len() {
            self.input(shard, Input::Tick);
        }
    }

    pub(super) fn input(&mut self, shard: usize, input: Input<'_>) {
        self.shards[shard].handle(self.now, input);
        if self.works_at_once && self.shards[shard].has_work() {
            self.shards[shard].work(self.now);
        }
        self.collect(shard);
    }

    fn collect(&mut self, shard: usize) {
        self.take_outputs(shard);
        while !self.holds_flushes && !self.flushes.is_empty() {
            self.flush();
        }
    }

    fn take_outputs(&mut self, shard: usize) {
        while let Some(output) = self.shards[shard].poll_output() {
            let line = |connection| Line { shard, connection };
            match output {
                Output::Send { connection, envelope, message, body, can_wait, .. } => {
                    self.leisurely.extend(can_wait.then(|| line(connection)));
                    let heard = self.heard.entry(line(connection)).or_default();
                    heard.push(Heard::Message { envelope, message, body: body.to_vec() });
                }
                Output::Shared { connection, envelope, message, descriptors } => {
                    self.shared.insert(line(connection), descriptors);
                    let heard = self.heard.entry(line(connection)).or_default();
                    heard.push(Heard::Message { envelope, message, body: Vec::new() });
                }
                Output::Stream { connection, parts } => {
                    self.heard.entry(line(connection)).or_default().push(Heard::Values(parts));
                }
                Output::ToOwner { envelope, message } => {
                    self.to_owner.push((shard, envelope, message));
                }
                Output::Close { connection } => {
                    self.closed.insert(line(connection));
                }
                Output::Flush(flush) => self.flushes.push((shard, *flush)),
                Output::SaveShard(save) => self.saves.push((shard, *save)),
                Output::RestoreShard(restore) => self.restores.push((shard, *restore)),
                Output::Order(order) => self.orders.push((shard, order)),
                Output::Members { joined, present } => self.members[shard] = (joined, present),
                Output::Event(event) => self.events.push((shard, event)),
            }
        }
        if let Some(observer) = &mut self.observer {
            observer(&self.shards[shard]);
        }
    }
}
