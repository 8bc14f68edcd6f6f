//! A test world around shards: virtual time, and clients that exchange messages with the shards.
//! Bodies are delivered in pieces of any size.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_checkpoint::CheckpointStorage;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{RequestId, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{self, Hello, Welcome};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Optimizer;
use pushpull_store::arena::{ArenaStorage, Budget, Reservation};
use pushpull_store::testing::test_files::{Content, TestFiles};

use super::peers::{Peer, chief, identity, pack, place};
use crate::config::PsConfig;
use crate::error::StorageError;
use crate::metrics::{Counters, Metrics};
use crate::shard::file_work::flush::Flush;
use crate::shard::file_work::restore_work::RestoreWork;
use crate::shard::file_work::saver_order::SaverOrder;
use crate::shard::file_work::shard_save::ShardSave;
use crate::shard::opening::shard_setup::{ServerRun, ShardSetup};
use crate::shard::output::{PulledParts, ShardOutput};
use crate::shard::values::applier::WorkOutcome;
use crate::shard::{Shard, ShardInput, TICK};
use pushpull_common::peer_origin::PeerOrigin;

/// A connection to one of the world's shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionId {
    pub(super) shard: usize,
    pub(super) connection: u64,
}

/// A message, or the values of a pull, that a client has received.
#[derive(Debug)]
pub(super) enum Received {
    Message { envelope: Envelope, message: Message, body: Vec<u8> },
    Values(PulledParts),
}

/// A callback that inspects a shard.
pub(super) type Observer = Box<dyn FnMut(&Shard)>;

pub(super) struct World {
    pub(super) shards: Vec<Shard>,
    pub(super) counters: Vec<Arc<Counters>>,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) received: BTreeMap<ConnectionId, Vec<Received>>,
    /// The connections of corked messages, which may wait for the next one; one entry a message.
    pub(super) corked: Vec<ConnectionId>,
    /// The descriptors that were sent last over each connection.
    pub(super) shared: BTreeMap<ConnectionId, Vec<OwnedFd>>,
    /// The connections that a shard has closed.
    pub(super) closed: BTreeSet<ConnectionId>,
    /// The events that the shards have reported, with the index of the shard.
    pub(super) events: Vec<(usize, crate::event::Event)>,
    /// Who the peers that connect have proved to be.
    pub(super) principal: Option<std::sync::Arc<pushpull_common::access::Principal>>,
    /// The shards whose task an administrator has stopped.
    pub(super) stopped: Vec<usize>,
    /// The members that have joined and those present, as each shard reported last.
    pub(super) members: Vec<(usize, usize)>,
    pub(super) now: Instant,
    pub(super) shard_files: Vec<TestFiles>,
    life: ServerRun,
    /// Images that wait to be flushed to the disk.
    pub(super) flushes: Vec<(usize, Flush)>,
    /// Whether images wait for [`World::flush`] and are not flushed at once.
    pub(super) holds_flushes: bool,
    /// Whether work begins before the outputs of an input are taken, as in the runtime.
    pub(super) works_at_once: bool,
    /// The storage of checkpoints, if there is one.
    pub(super) storage: Option<Arc<dyn CheckpointStorage>>,
    /// Messages from shards to the step owner.
    pub(super) to_owner: Vec<(usize, Envelope, Message)>,
    /// Orders for the saver. A world has no saver.
    pub(super) orders: Vec<(usize, SaverOrder)>,
    saves: Vec<(usize, ShardSave)>,
    restores: Vec<(usize, RestoreWork)>,
    pub(super) config: Arc<PsConfig>,
    budget: Budget,
    boots: u8,
    boot: [u8; 16],
    /// How many bytes of a body are delivered at a time.
    pub(super) chop: usize,
    /// Called after each input and each slice of work, once the outputs are taken.
    pub(super) observer: Option<Observer>,
    next_connection: u64,
    next_request: u64,
}

/// Boot, arena and epoch base of a world's processes.
pub(super) const LIFE: ServerRun = ServerRun { boot: [7; 16], arena: 1, epoch_base: 0 };

impl World {
    /// Creates shards for these variables, with nothing declared.
    pub(super) fn bare(
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> World {
        World::on(LIFE, variables, optimizer, configure, |_| TestFiles::default())
    }

    /// Creates shards with nothing declared, in arenas of this boot and arena number.
    pub(super) fn bare_as(
        life: ServerRun,
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> World {
        World::on(life, variables, optimizer, configure, |_| TestFiles::default())
    }

    /// Creates shards with nothing declared, on these test files.
    pub(super) fn on(
        life: ServerRun,
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
        test_files: impl Fn(usize) -> TestFiles,
    ) -> World {
        let cluster = ClusterSpec::builder().job("ps", ["127.0.0.1:1"]).build().unwrap();
        let config = configure(PsConfig::new(cluster, TaskId::ps(0), optimizer));
        let budget =
            Budget::new(config.storage.bytes_max.unwrap_or(crate::config::Storage::BYTES_MAX));
        let config = Arc::new(config);
        let identity = Arc::new(identity());
        let counters: Vec<_> = (0..config.shards).map(|_| Arc::new(Counters::default())).collect();
        let now = Instant::now();
        let mut shard_files = Vec::new();
        let mut shards = Vec::new();
        for (index, counters) in counters.iter().enumerate() {
            let id = ShardId { task: 0, shard: index as u16 };
            let config = config.clone();
            let identity = identity.clone();
            let budget = budget.clone();
            let counters = counters.clone();
            let test_files = test_files(index);
            let parts = ShardSetup { id, config, identity, budget, counters };
            shards.push(
                Shard::open(parts, ArenaStorage::TestFiles(test_files.clone()), life, now).unwrap(),
            );
            shard_files.push(test_files);
        }
        World {
            shards,
            shard_files,
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
            principal: None,
            stopped: Vec::new(),
            members: vec![(0, 0); counters.len()],
            counters,
            received: BTreeMap::new(),
            corked: Vec::new(),
            shared: BTreeMap::new(),
            closed: BTreeSet::new(),
            now,
            chop: usize::MAX,
            observer: None,
            next_connection: 1,
            next_request: 1,
        }
    }

    /// Creates shards whose variables a chief has declared and initialized. Returns the chief's
    /// connections.
    pub(super) fn ready(
        variables: Vec<VariableSpec>,
        optimizer: impl Optimizer,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> (World, Vec<ConnectionId>) {
        let mut world = World::bare(variables, optimizer, configure);
        let lines = world.begin();
        (world, lines)
    }

    /// Declares and initializes the variables as a chief. Returns the chief's connections.
    pub(super) fn begin(&mut self) -> Vec<ConnectionId> {
        let mut chief = chief();
        let lines: Vec<ConnectionId> =
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

    /// Has the processes to come use no more memory than this.
    pub(super) fn limit_memory(&mut self, bytes_max: u64) {
        self.budget = Budget::new(bytes_max);
    }

    /// Kills the process of a shard and restarts it. Its connections are gone.
    pub(super) fn restart(&mut self, shard: usize) -> Result<(), StorageError> {
        let files = self.shard_files[shard].contents();
        self.reopen(shard, files)
    }

    /// Returns the files that the process of a shard leaves if it is killed now.
    pub(super) fn files(&self, shard: usize) -> BTreeMap<String, Vec<u8>> {
        let files = self.shard_files[shard].contents().into_iter();
        files.map(|(name, content)| (name, content.to_vec())).collect()
    }

    /// Replaces a shard by one that opens these files in the same boot.
    pub(super) fn reopen(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
    ) -> Result<(), StorageError> {
        let boot = self.boot;
        self.reopen_in(shard, files, ServerRun { boot, ..self.life })
    }

    /// Replaces a shard by one that opens these files after a reboot.
    pub(super) fn reboot(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
    ) -> Result<(), StorageError> {
        self.boots += 1;
        self.reopen_in(shard, files, ServerRun { boot: [self.boots; 16], ..self.life })
    }

    fn reopen_in(
        &mut self,
        shard: usize,
        files: BTreeMap<String, impl Into<Content>>,
        life: ServerRun,
    ) -> Result<(), StorageError> {
        let lines: Vec<ConnectionId> =
            self.received.keys().copied().filter(|l| l.shard == shard).collect();
        for line in lines {
            self.received.remove(&line);
            self.closed.insert(line);
        }
        let disk = std::mem::take(&mut *self.shard_files[shard].disk());
        self.shard_files[shard] = TestFiles::with(files);
        // Within a boot, the disk keeps what was flushed. After a reboot, these files are on it.
        *self.shard_files[shard].disk() = match life.boot == self.boot {
            true => disk,
            false => self.files(shard),
        };
        self.boot = life.boot;
        // Releases the memory of the old shard before the new one reserves it.
        let unborn = self.parts(shard);
        let other = ServerRun { arena: self.life.arena + 1, ..self.life };
        self.shards[shard] = Shard::open(unborn, ArenaStorage::Anonymous, other, self.now)?;
        let arena_storage = ArenaStorage::TestFiles(self.shard_files[shard].clone());
        self.shards[shard] = Shard::open(self.parts(shard), arena_storage, life, self.now)?;
        self.flushes.retain(|(of, _)| *of != shard);
        self.collect(shard);
        Ok(())
    }

    pub(super) fn parts(&self, shard: usize) -> ShardSetup {
        ShardSetup {
            id: ShardId { task: 0, shard: shard as u16 },
            config: self.config.clone(),
            identity: Arc::new(identity()),
            budget: self.budget.clone(),
            counters: self.counters[shard].clone(),
        }
    }

    /// Returns the free bytes of the memory budget.
    pub(super) fn bytes_left(&self) -> u64 {
        self.budget.left()
    }

    /// Returns the free bytes of the memory budget that are not promised to tables.
    pub(super) fn bytes_left_unpromised(&self) -> u64 {
        self.budget.left_unpromised()
    }

    /// Takes all free memory until the returned value is dropped.
    pub(super) fn fill(&self) -> Reservation {
        self.take(self.budget.left())
    }

    /// Takes this much memory until the returned value is dropped.
    pub(super) fn take(&self, bytes: u64) -> Reservation {
        self.budget.reserve(bytes).expect("the budget has this many bytes left")
    }

    pub(super) fn metrics(&self) -> Metrics {
        Metrics::sum(self.counters.iter().map(|counters| &**counters))
    }

    /// Sends this hello. Returns the connection if the client is welcome.
    pub(super) fn handshake(
        &mut self,
        shard: usize,
        hello: Hello,
        remote: bool,
    ) -> Result<(ConnectionId, Welcome), Refusal> {
        let origin = if remote { PeerOrigin::Remote } else { PeerOrigin::Unix { same_user: true } };
        self.handshake_over(origin, shard, hello)
    }

    /// Sends this hello over this kind of connection.
    pub(super) fn handshake_over(
        &mut self,
        origin: PeerOrigin,
        shard: usize,
        hello: Hello,
    ) -> Result<(ConnectionId, Welcome), Refusal> {
        let line = ConnectionId { shard, connection: self.next_connection };
        self.next_connection += 1;
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let (header, message) =
            pack(&Envelope { request, ..Envelope::default() }, &hello.into(), 0);
        let Message::Hello(hello) = message else { unreachable!() };
        let connection = line.connection;
        let hello = &hello;
        let header = &header;
        let principal = self.principal.clone();
        let principal = principal.as_ref();
        let connected = ShardInput::Connected { connection, hello, header, origin, principal };
        self.input(shard, connected);
        match self.answer(line, request) {
            Some(Message::Welcome(welcome)) => Ok((line, welcome)),
            Some(Message::Refused(refused)) => {
                assert!(
                    self.closed.contains(&line),
                    "the connection of a refused client is closed"
                );
                self.disconnect(line);
                Err(refused.refusal)
            }
            other => panic!("hello is answered {other:?}"),
        }
    }

    pub(super) fn try_join(
        &mut self,
        shard: usize,
        peer: &mut Peer,
    ) -> Result<ConnectionId, Refusal> {
        let (line, welcome) = self.handshake(shard, peer.hello(shard), false)?;
        peer.epoch = welcome.client_epoch;
        Ok(line)
    }

    pub(super) fn join(&mut self, shard: usize, peer: &mut Peer) -> ConnectionId {
        self.try_join(shard, peer).unwrap()
    }

    pub(super) fn disconnect(&mut self, line: ConnectionId) {
        self.input(line.shard, ShardInput::Disconnected { connection: line.connection });
        self.received.remove(&line);
    }

    /// Sends a message without a body.
    pub(super) fn say(&mut self, line: ConnectionId, message: Message) -> RequestId {
        self.send(line, Envelope::default(), message, &[])
    }

    /// Sends a message with its body, under the next request number.
    pub(super) fn send(
        &mut self,
        line: ConnectionId,
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

    /// Sends a message whose body follows later.
    pub(super) fn announce(
        &mut self,
        line: ConnectionId,
        envelope: Envelope,
        message: Message,
        body_bytes: usize,
    ) -> RequestId {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let (header, message) = pack(&Envelope { request, ..envelope }, &message, body_bytes);
        let connection = line.connection;
        let header = &header;
        self.input(line.shard, ShardInput::Message { connection, header, message });
        request
    }

    /// Delivers the whole body of the message announced last.
    pub(super) fn body(&mut self, line: ConnectionId, body: &[u8]) {
        let delivered = self.body_until(line, body, body.len());
        assert_eq!(delivered, body.len());
        self.input(line.shard, ShardInput::Body { connection: line.connection });
    }

    /// Delivers a body in pieces up to `end`, without [`ShardInput::Body`]. Returns the bytes
    /// delivered.
    pub(super) fn body_until(&mut self, line: ConnectionId, body: &[u8], end: usize) -> usize {
        let mut at = 0;
        while at < end {
            let stop = end.min(at.saturating_add(self.chop));
            if let Some(target) = self.shards[line.shard].body_target(line.connection) {
                assert_eq!(target.len(), body.len(), "a body fills its target");
                target[at..stop].copy_from_slice(&body[at..stop]);
            }
            at = stop;
            if at < body.len() {
                self.input(line.shard, ShardInput::Progress { connection: line.connection });
            }
        }
        at
    }

    /// Takes the answer to a request, if it has come.
    pub(super) fn answer(&mut self, line: ConnectionId, request: RequestId) -> Option<Message> {
        let received = self.received.entry(line).or_default();
        let matches = |received: &Received| matches!(received, Received::Message { envelope, .. } if envelope.request == request);
        match received.remove(received.iter().position(matches)?) {
            Received::Message { message, .. } => Some(message),
            Received::Values(_) => None,
        }
    }

    /// Works until every shard is done or blocked. Returns the last result.
    pub(super) fn work(&mut self) -> WorkOutcome {
        let mut last = WorkOutcome::Idle;
        for shard in 0..self.shards.len() {
            while self.shards[shard].has_work() {
                last = self.slice(shard);
                if last != WorkOutcome::More {
                    break;
                }
            }
        }
        last
    }

    /// Flushes the images that are due.
    pub(super) fn flush(&mut self) {
        while let Some((shard, flush)) = self.flushes.pop() {
            let result = flush.run();
            self.shards[shard].handle(self.now, ShardInput::Flushed(result));
            self.take_outputs(shard);
        }
    }

    /// Runs the saves that are due, and returns the body of the answer to this request.
    pub(super) fn answer_body(&mut self, line: ConnectionId, request: RequestId) -> Vec<u8> {
        let storage = self.storage.clone().expect("the world has checkpoint storage");
        while let Some((shard, save)) = self.saves.pop() {
            let connection = save.connection;
            let request = save.request;
            let result = save.run(storage.clone());
            self.input(shard, ShardInput::ShardSaved { connection, request, result });
        }
        let received = self.received.remove(&line).unwrap_or_default();
        let body = received.into_iter().find_map(|received| match received {
            Received::Message { envelope, body, .. } => {
                (envelope.request == request).then_some(body)
            }
            Received::Values(_) => None,
        });
        body.expect("`SaveShard` is answered")
    }

    /// Takes the answer to a request, with its body.
    pub(super) fn answer_with_body(
        &mut self,
        line: ConnectionId,
        request: RequestId,
    ) -> (Message, Vec<u8>) {
        let received = self.received.entry(line).or_default();
        let is_it = |received: &Received| matches!(received, Received::Message { envelope, .. } if envelope.request == request);
        let index = received.iter().position(is_it).expect("the request is answered");
        match received.remove(index) {
            Received::Message { message, body, .. } => (message, body),
            Received::Values(_) => panic!("the answer is values, not a message"),
        }
    }

    /// Takes the save that a shard has ordered.
    pub(super) fn take_save(&mut self) -> ShardSave {
        self.saves.pop().expect("a save is due").1
    }

    /// Takes the restore that a shard has ordered.
    pub(super) fn take_restore(&mut self) -> RestoreWork {
        self.restores.pop().expect("a restore is due").1
    }

    /// Runs the next step of a restore: the check, or the reading.
    pub(super) fn advance_restore(&mut self) {
        let storage = self.storage.clone().expect("the world has checkpoint storage");
        let (shard, restore) = self.restores.pop().expect("a restore is due");
        let result = Box::new(restore.run(storage));
        self.input(shard, ShardInput::RestoreAdvanced(result));
    }

    /// Runs the restores that are due.
    pub(super) fn finish_restores(&mut self) {
        while !self.restores.is_empty() {
            self.advance_restore();
        }
    }

    /// Fails the flush of the image that is due.
    pub(super) fn fail_flush(&mut self, error: &str) {
        let (shard, _) = self.flushes.pop().expect("an image is due");
        self.shards[shard].handle(self.now, ShardInput::Flushed(Err(error.to_owned())));
        self.take_outputs(shard);
    }

    /// Does one slice of work.
    pub(super) fn slice(&mut self, shard: usize) -> WorkOutcome {
        let work = self.shards[shard].work(self.now);
        self.collect(shard);
        work
    }

    /// Lets this much time pass, while the connections in `alive` send heartbeats.
    pub(super) fn pass(&mut self, time: Duration, alive: &[ConnectionId]) {
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
            self.input(shard, ShardInput::Tick);
        }
    }

    pub(super) fn input(&mut self, shard: usize, input: ShardInput<'_>) {
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
            let line = |connection| ConnectionId { shard, connection };
            match output {
                ShardOutput::Send { connection, envelope, message, body, can_wait, .. } => {
                    self.corked.extend(can_wait.then(|| line(connection)));
                    let received = self.received.entry(line(connection)).or_default();
                    received.push(Received::Message { envelope, message, body: body.to_vec() });
                }
                ShardOutput::Shared { connection, envelope, message, descriptors } => {
                    self.shared.insert(line(connection), descriptors);
                    let received = self.received.entry(line(connection)).or_default();
                    received.push(Received::Message { envelope, message, body: Vec::new() });
                }
                ShardOutput::Stream { connection, parts } => {
                    self.received
                        .entry(line(connection))
                        .or_default()
                        .push(Received::Values(parts));
                }
                ShardOutput::ToOwner { envelope, message } => {
                    self.to_owner.push((shard, envelope, message));
                }
                ShardOutput::Close { connection } => {
                    self.closed.insert(line(connection));
                }
                ShardOutput::Flush(flush) => self.flushes.push((shard, *flush)),
                ShardOutput::SaveShard(save) => self.saves.push((shard, *save)),
                ShardOutput::RestoreShard(restore) => self.restores.push((shard, *restore)),
                ShardOutput::SaverOrder(order) => self.orders.push((shard, order)),
                ShardOutput::Members { joined, present } => self.members[shard] = (joined, present),
                ShardOutput::Event(event) => self.events.push((shard, event)),
                ShardOutput::Stop => self.stopped.push(shard),
            }
        }
        if let Some(observer) = &mut self.observer {
            observer(&self.shards[shard]);
        }
    }
}
