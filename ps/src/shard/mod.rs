//! A shard, as a pure state machine: what it is told and what it wants done.
//!
//! There is no socket, thread or clock in here. The runtime and the simulator both drive a
//! [`Shard`] through its two doors: [`Shard::handle`] takes what happened, [`Shard::poll_output`]
//! gives what to do. Two more exist because bulk bytes and long work should not pass through
//! doors: [`Shard::body_target`] lends the memory a body is received into, and [`Shard::work`]
//! does a slice of an update, so that small requests stay alive beside it.

mod buffer_pool;
pub(crate) mod changed;
mod checkpoint_cut;
pub(crate) mod checkpoints;
mod checks;
mod chief;
pub(crate) mod durable;
mod encoded;
pub(crate) mod frames;
mod fused_ranges;
pub(crate) mod generation;
mod grad_norm;
mod growth;
mod handshake;
#[cfg(any(test, fuzzing, feature = "simulation"))]
mod invariants;
mod mean;
mod membership;
pub(crate) mod output;
mod parked;
mod persist;
pub(crate) mod poison;
pub(crate) mod power;
mod pulls;
mod push_buffers;
mod push_slots;
mod pushes;
mod recalls;
pub(crate) mod record;
pub(crate) mod reopenable;
pub(crate) mod replicas;
mod rows;
mod scan;
mod shared;
mod stale_pushes;
mod staleness;
mod step_messages;
mod step_work;
mod stragglers;
mod streaming_apply;
mod synchronous;
mod tables;
mod tokens;
mod two_pass;
mod variables;
pub(crate) mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, PartitionId, RestoreEpoch, Sequence, ShardId, TaskId,
};
use pushpull_common::protocol::message::{Hello, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Header, Message, Refusal, message};

use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::StepOwner;
use crate::arena::{Arena, Budget};
use crate::commit::Journal;
use crate::config::PsConfig;
use crate::inbox::Inbox;
use crate::metrics::Counters;
use crate::optimizer::VariableRules;
use crate::planted::Bug;
use crate::store::Store;
use buffer_pool::BufferPool;
use checkpoint_cut::{CheckpointCut, SaveRequest};
use checkpoints::{Asker, News, Restoring, Saving, ShardRestored};
use encoded::{Encoded, Form};
use fused_ranges::FusedRanges;
use growth::AwaitedGrowth;
pub(crate) use handshake::Way;
use output::{Body, EncodedValuesPart, Output};
use parked::{Entry, Parked, Wait};
use power::Power;
use replicas::{ClientKey, Presence, Replicas};
use rows::RowWork;
use staleness::Backups;
use streaming_apply::StreamingApply;
use work::Job;

/// Something that happened to a shard.
#[derive(Debug)]
pub(crate) enum Input<'a> {
    /// A peer has said hello. The connection's number is new.
    Connected {
        /// The number.
        connection: u64,
        /// What it said.
        hello: &'a Hello,
        /// The header it came under.
        header: &'a Header,
        /// How it has come.
        way: Way,
    },
    /// A message has come. If it has a body, that comes next.
    Message {
        /// Over this connection.
        connection: u64,
        /// Its header.
        header: &'a Header,
        /// What it says.
        message: Message,
    },
    /// Bytes of a frame have come, but not all of it.
    Progress {
        /// Over this connection.
        connection: u64,
    },
    /// The body of the last message has come whole into [`Shard::body_target`].
    Body {
        /// Over this connection.
        connection: u64,
    },
    /// A connection is gone.
    Disconnected {
        /// Which.
        connection: u64,
    },
    /// The saver says something.
    News(News),
    /// What came of [`Output::SaveShard`].
    ShardSaved {
        /// Over this connection it was asked for.
        connection: u64,
        /// By this request.
        request: Envelope,
        /// What the manifest is to say of it, or why it is not written.
        result: Result<Vec<u8>, String>,
    },
    /// There is a connection to the step owner's shard, or there is none any more.
    OwnerLink {
        /// Whether there is.
        up: bool,
    },
    /// The step owner says something over that connection.
    Owner {
        /// Its header.
        header: &'a Header,
        /// What it says.
        message: Message,
    },
    /// What came of [`Output::Flush`].
    Flushed(Result<(), String>),
    /// What came of [`Output::RestoreShard`].
    ShardRestored(Box<ShardRestored>),
    /// Time has passed. Comes at least every [`TICK`].
    Tick,
}

/// How often a shard must be told the time.
pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(50);

/// What a body that is being received is for.
#[derive(Debug)]
enum Receiving {
    /// A part of a push.
    Part(Part),
    /// A catalogue.
    Catalogue { request: Envelope, digest: [u8; 32], bytes: Vec<u8> },
    /// What a user wants kept with a checkpoint.
    User { request: Envelope, bytes: Vec<u8> },
    /// The numbers of rows that are pulled.
    Rows(Entry),
}

/// A part of a push that has been announced.
#[derive(Clone, Debug)]
struct Part {
    connection: u64,
    client: ClientKey,
    push_slot: u32,
    /// Where it lies in the shard's layout; empty for a part without a body.
    range: Range<u64>,
    request: Envelope,
    /// If its body comes encoded.
    encoded: Option<Encoded>,
    /// On the last part, the bytes of all of them.
    whole: Option<u64>,
    next: bool,
    /// How long the answer is waited for.
    deadline: Option<Instant>,
}

/// What a shard knows of a connection.
#[derive(Debug)]
struct Conversation {
    role: Role,
    client: Option<ClientKey>,
    way: Way,
    /// How often it has been lent memory.
    shared: u32,
    crc: bool,
    receiving: Option<Receiving>,
    /// The push whose refusal has been sent: its other parts are passed over in silence.
    refused: Option<(Sequence, u32)>,
}

/// How far the variables are.
#[derive(Debug)]
enum Variables {
    Absent,
    Declared(Box<Store>),
    Ready(Box<Store>),
}

/// One shard of a ps task.
///
/// Getters: [`Shard::body_target`], [`Shard::has_work`]. What happened: [`Shard::handle`].
/// What to do next: [`Shard::poll_output`], [`Shard::work`].
///
/// Invariants: what an input changes is committed, in one transaction, before what it causes is put
/// out: an answer to a push leaves after the push is applied and settled in its client's window for
/// good; the durable words are what the tables make them; a client that is fenced or lost has no
/// rooms and no tokens but those of pushes that were whole.
#[derive(Debug)]
pub(crate) struct Shard {
    id: ShardId,
    config: Arc<PsConfig>,
    identity: Arc<Identity>,
    arena: Arena,
    budget: Budget,
    journal: Journal,
    variables: Variables,
    /// What trains them.
    rules: VariableRules,
    /// What of the variables is changed alike.
    fused_ranges: FusedRanges,
    /// Goes up with each restore, and when variables first have values; and the step it began at.
    epoch: RestoreEpoch,
    restored_step: GlobalStep,
    /// Counts the declarations of variables: each has files of its own.
    generation: u64,
    /// How many processes have opened the arena.
    lives: u64,
    /// The number of the next inbox's first room.
    next_push_slot: u32,
    inbox: Option<Inbox>,
    replicas: Replicas,
    /// The epoch of the newest chief; those of older ones are fenced.
    chief: ClientEpoch,
    /// Which client that is; none where it is not known, as in arenas of before.
    chief_client: Option<ClientKey>,
    owner: Option<StepOwner>,
    /// In synchronous mode.
    follower: Option<StepFollower>,
    /// Where a few elements of a gradient are computed from what was pushed.
    tile: Vec<u64>,
    /// Where what lies in a tray is copied to, before it is used.
    shared_tile: Vec<u64>,
    /// What clients have read, where that is needed later.
    backups: Backups,
    /// On the step owner: the connections over which other shards take part, and the last step that
    /// they were told is committed.
    parts: BTreeMap<ShardId, u64>,
    told: Option<u64>,
    /// The epoch of the last `ChiefIs` over the present connection to the step owner. None on the step owner.
    chief_told: Option<ClientEpoch>,
    /// When the others were last asked for all tokens that are recalled.
    asked_for_recalls: Option<Instant>,
    /// When those shards said something last.
    parts_heard: BTreeMap<ShardId, Instant>,
    /// On the others: whether there is a connection to the step owner, and when it was told last.
    owner_is_up: bool,
    /// Since when there is none any more.
    owner_lost: Option<Instant>,
    told_owner: Option<Instant>,
    /// Since when a synchronous step lacks replicas.
    short_since: Option<Instant>,
    /// When the first replica of this life came, in synchronous mode.
    first_join: Option<Instant>,
    parked: Parked,
    conversations: HashMap<u64, Conversation>,
    jobs: VecDeque<Job>,
    /// The push that is applied as its parts come, into blocks that nothing names yet.
    streaming_apply: Option<StreamingApply>,
    /// The part of a checkpoint that is being written, and the ways to give it up.
    saving: Option<Saving>,
    /// What is kept for a checkpoint of a step that may have passed: in synchronous mode on every shard, in
    /// asynchronous mode on the step owner.
    kept_cut: Option<CheckpointCut>,
    /// On the step owner: whether one is being saved, and those that wait for the right moment.
    saves_a_cut: bool,
    save_requests: VecDeque<SaveRequest>,
    restoring: Option<Restoring>,
    /// On the step owner: what was passed over when the newest sound checkpoint was looked for last.
    passed_over: Vec<message::PassedOver>,
    /// If what is answered is to survive the loss of power.
    power: Option<Power>,
    /// Pushes applied, of every kind.
    version: u64,
    /// Gradients applied.
    gradients: u64,
    /// Partitions that were given values before the shard was initialized.
    assigned: BTreeSet<PartitionId>,
    /// Since memory that must be made cannot be had.
    growth: Option<AwaitedGrowth>,
    members: (usize, usize),
    counters: Arc<Counters>,
    outputs: VecDeque<Output>,
    /// Memory for lists of clients that have changed.
    changed: Vec<ClientKey>,
    /// Buffers in which values were encoded for pulls that are sent.
    encoded_values: Vec<EncodedValuesPart>,
    /// The rows that are changed by the push or the step under way.
    rows: RowWork,
    /// Memory of other work that is done.
    buffer_pool: BufferPool,
}

impl Shard {
    /// Takes in what happened.
    pub(crate) fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.persist_late();
        match input {
            Input::Connected { connection, hello, header, way } => {
                self.connected(now, connection, hello, header, way);
            }
            Input::Message { connection, header, message } => {
                self.message(now, connection, header, message);
            }
            Input::Progress { connection } => self.progress(now, connection),
            Input::Body { connection } => self.body(now, connection),
            Input::Disconnected { connection } => self.disconnected(now, connection),
            Input::News(news) => self.on_saver_message(now, news),
            Input::ShardSaved { connection, request, result } => {
                self.shard_saved(connection, request, result);
            }
            Input::ShardRestored(restored) => self.restored(now, *restored),
            Input::Flushed(result) => self.flushed(result),
            Input::OwnerLink { up } => self.owner_link(now, up),
            Input::Owner { header, message } => self.on_owner_message(now, header, message),
            Input::Tick => self.tick(now),
        }
        self.drop_stale_streaming();
        self.report_members();
        self.persist_in_time();
        #[cfg(any(test, fuzzing))]
        self.check_invariants();
    }

    /// Commits what this input has changed, before what it caused is put out.
    fn persist_in_time(&mut self) {
        if !self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
        self.hold_outputs();
    }

    fn persist_late(&mut self) {
        if self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
    }

    /// A connection was closed for its peer's fault.
    pub(crate) fn count_fault(&self) {
        self.counters.connections_faulted.add(1);
    }

    /// The next thing to do.
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// The memory that the body of the connection's last message is received into, the whole of
    /// which it fills; `None` if the body is to be read and forgotten.
    pub(crate) fn body_target(&mut self, connection: u64) -> Option<&mut [u8]> {
        match &mut self.conversations.get_mut(&connection)?.receiving {
            None => None,
            Some(Receiving::Catalogue { bytes, .. } | Receiving::User { bytes, .. }) => Some(bytes),
            Some(Receiving::Rows(Entry { wait: Wait::Rows { numbers, .. }, .. })) => Some(numbers),
            Some(Receiving::Rows(_)) => None,
            Some(Receiving::Part(Part { encoded: Some(encoded), .. })) => Some(&mut encoded.bytes),
            Some(Receiving::Part(Part { client, push_slot, range, .. })) => {
                let inbox = self.inbox.as_mut().filter(|inbox| inbox.holds(*client, *push_slot))?;
                inbox.bytes_mut(*push_slot, range.clone())
            }
        }
    }

    fn message(&mut self, now: Instant, connection: u64, header: &Header, message: Message) {
        let request = answer_to(header);
        let Some(conversation) = self.conversations.get_mut(&connection) else {
            return;
        };
        conversation.receiving = None;
        let (role, client) = (conversation.role, conversation.client);
        let kind = message.kind();
        if let Some(client) = client {
            let current = self.replicas.client(client);
            if current.connection.is_none() {
                // Its end is queued, and may wait for an image. `Fenced` would end a session that lives.
                return;
            }
            if current.connection != Some(connection) {
                // Another connection of the same task has taken over: an older self, or an older
                // line of the same.
                let (epoch, current) = (current.epoch, current.epoch);
                self.refuse(connection, request, Refusal::Fenced { epoch, current });
                self.outputs.push_back(Output::Close { connection });
                return;
            }
            self.replicas.heard(client, now);
            let joins = matches!(
                message,
                Message::TokenRequest(_)
                    | Message::Reserve(_)
                    | Message::SharePushBuffer(_)
                    | Message::PushPart(_)
                    | Message::PushEncoded(_)
                    | Message::PushShared(_)
            );
            if joins && self.replicas.client(client).presence != Presence::Present {
                // Nobody would take back what it were given.
                let detail = Detail::clipped("this client has left; it may connect again");
                return self.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
        let allowed = match &message {
            Message::Heartbeat(_)
            | Message::Pull(_)
            | Message::PullEncoded(_)
            | Message::PullRows(_)
            | Message::PullRowsEncoded(_) => true,
            Message::AwaitReady(_) | Message::FetchCatalogue(_) => true,
            Message::ShareValues(_) => role != Role::Peer {},
            message if chief::is_for_chiefs(message) => role == Role::Chief {},
            Message::SaveShard(_)
            | Message::Held(_)
            | Message::StepApplied(_)
            | Message::Recalled(_) => role == Role::Peer {},
            Message::TokenRequest(_)
            | Message::ReturnToken(_)
            | Message::Reserve(_)
            | Message::SharePushBuffer(_)
            | Message::PushPart(_)
            | Message::PushEncoded(_)
            | Message::PushShared(_)
            | Message::Withdraw(_)
            | Message::OutcomeQuery(_)
            | Message::Leave(_) => role.is_member(),
            _ => false,
        };
        let reads = matches!(
            message,
            Message::Heartbeat(_)
                | Message::Pull(_)
                | Message::PullEncoded(_)
                | Message::PullRows(_)
                | Message::PullRowsEncoded(_)
                | Message::FetchCatalogue(_)
                | Message::ShareValues(_)
                | Message::Leave(_)
        );
        // The outcome of a push is no read: one that is not on the disk would be answered so.
        if let Some(refusal) = self.poisoned().filter(|_| !reads) {
            return self.refuse(connection, request, refusal);
        }
        if !allowed {
            let refusal = Refusal::Role { role: role.code(), kind };
            return self.refuse(connection, request, refusal);
        }
        if chief::is_of_chiefs(&message)
            && let Some(refusal) = self.chief_refusal(connection)
        {
            return self.refuse(connection, request, refusal);
        }
        // A client that does not know the epoch yet says 0.
        if header.restore_epoch != RestoreEpoch(0) && header.restore_epoch != self.epoch {
            let refusal = self.other_epoch(header.restore_epoch);
            return self.refuse(connection, request, refusal);
        }
        let deadline = deadline_of(now, header);
        let entry = |wait| Entry { connection, client, request, since: now, deadline, wait };
        match (message, client) {
            (Message::Heartbeat(_), _) => match self.growth_refusal() {
                None => self.answer(connection, request, message::HeartbeatAnswer {}.into()),
                Some(refusal) => self.refuse(connection, request, refusal),
            },
            (Message::ShareValues(asked), _) => self.share(connection, request, kind, asked.wants),
            (Message::Declare(declare), _) => {
                let bytes = vec![0; header.body_bytes as usize];
                let digest = declare.digest;
                let receiving = Receiving::Catalogue { request, digest, bytes };
                self.receive(now, connection, receiving, header);
            }
            (Message::Initialize(asked), _) => {
                self.initialize(now, connection, request, asked.epoch);
            }
            (Message::FindCheckpoint(_), _) => self.find_checkpoint(connection, request),
            (Message::PassedOverQuery(_), _) => self.tell_passed_over(connection, request),
            (Message::Restore(restore), _) => self.restore(now, connection, request, restore),
            (Message::Save(_), _) => {
                let bytes = vec![0; header.body_bytes as usize];
                self.receive(now, connection, Receiving::User { request, bytes }, header);
            }
            (Message::SaveShard(save), _) => {
                self.save_shard(now, connection, request, save.name.as_str());
            }
            (Message::AwaitReady(_), _) => self.wait(entry(Wait::Ready)),
            (Message::FetchCatalogue(_), _) => self.send_catalogue(connection, request),
            (Message::Pull(pull), _) => {
                self.pull(entry(Wait::Ready), header, &pull.selection, None);
            }
            (Message::PullEncoded(asked), _) => {
                self.pull_encoded(entry(Wait::Ready), header, &asked);
            }
            (Message::PullRows(pull), _) => {
                self.pull_rows(now, entry(Wait::Ready), header, pull.partition, None);
            }
            (Message::PullRowsEncoded(asked), _) => {
                self.pull_rows_encoded(now, entry(Wait::Ready), header, &asked);
            }
            (Message::TokenRequest(token), Some(_)) => {
                self.token_request(now, entry(Wait::Token), token.newest);
            }
            (Message::ReturnToken(token), Some(client)) => {
                self.return_token(now, connection, client, request, &token);
            }
            (Message::Reserve(_), Some(_)) => self.reserve(now, entry(Wait::PushSlot)),
            (Message::PushPart(part), Some(client)) => {
                self.part(now, connection, client, header, &part, None);
            }
            (Message::PushEncoded(encoded), Some(client)) => {
                let message::PushEncoded { part, encoding, elements, factor } = encoded;
                let form = Form { encoding, elements, factor };
                self.part(now, connection, client, header, &part, Some(form));
            }
            (Message::SharePushBuffer(_), Some(client)) => {
                let shared = self.share_push_buffer(now, connection, client, request, kind);
                if let Err(refusal) = shared {
                    self.refuse(connection, request, refusal);
                }
            }
            (Message::PushShared(shared), Some(client)) => {
                self.push_shared(now, connection, client, header, &shared);
            }
            (Message::Withdraw(_), Some(client)) => {
                self.withdraw(now, connection, client, request);
            }
            (Message::OutcomeQuery(_), Some(client)) => {
                self.outcome_query(connection, client, request);
            }
            (Message::Held(held), _) => {
                self.shard_holds(now, connection, &held);
            }
            (Message::StepApplied(applied), _) => {
                self.shard_has_applied(now, connection, applied.shard, header.step.0);
            }
            (Message::Recalled(answer), _) => self.recall_answered(now, connection, &answer),
            (Message::Finish(_), _) => self.finish(now, connection, request),
            (Message::Leave(_), Some(client)) => self.leave(now, connection, client, request),
            (message, _) => {
                let detail = Detail::clipped(format!("a {} is not for a server", message.name()));
                self.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
    }

    fn progress(&mut self, now: Instant, connection: u64) {
        let Some(conversation) = self.conversations.get(&connection) else {
            return;
        };
        if let Some(client) = conversation.client
            && self.replicas.client(client).connection == Some(connection)
        {
            self.replicas.heard(client, now);
        }
        if let Some(Receiving::Part(Part { push_slot, .. })) = &conversation.receiving
            && let Some(inbox) = &mut self.inbox
        {
            inbox.touch(*push_slot, now);
        }
    }

    fn body(&mut self, now: Instant, connection: u64) {
        self.progress(now, connection);
        let Some(conversation) = self.conversations.get_mut(&connection) else {
            return;
        };
        match conversation.receiving.take() {
            None => {}
            Some(Receiving::Catalogue { request, digest, bytes }) => {
                match self.body_refusal(connection) {
                    Some(refusal) => self.refuse(connection, request, refusal),
                    None => {
                        self.declare(connection, request, digest, &bytes);
                        self.give_parked_push_slots(now);
                    }
                }
            }
            Some(Receiving::User { request, bytes }) => match self.body_refusal(connection) {
                Some(refusal) => self.refuse(connection, request, refusal),
                None => self.save(now, Asker::Connection { connection, request }, bytes),
            },
            Some(Receiving::Rows(entry)) => self.rows_asked(entry),
            Some(Receiving::Part(part)) => self.part_received(now, part),
        }
    }

    /// Why nothing is done with a chief's body: what has happened since it was announced.
    fn body_refusal(&self, connection: u64) -> Option<Refusal> {
        self.poisoned().or_else(|| self.chief_refusal(connection))
    }

    /// Remembers what the body that comes next is for; a message without a body is whole.
    fn receive(&mut self, now: Instant, connection: u64, receiving: Receiving, header: &Header) {
        if let Some(conversation) = self.conversations.get_mut(&connection) {
            conversation.receiving = Some(receiving);
        }
        if header.body_bytes == 0 {
            self.body(now, connection);
        }
    }

    /// Parks a request, or refuses it if the connection has too many.
    fn park(&mut self, entry: Entry) {
        let (connection, request) = (entry.connection, entry.request);
        if self.parked.park(entry).is_err() {
            let limit = pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX as u64;
            let what = Detail::clipped("requests waiting on one connection");
            self.refuse(connection, request, Refusal::Busy { what, limit });
        }
    }

    fn answer(&mut self, connection: u64, request: Envelope, message: Message) {
        self.answer_with(connection, request, message, Body::EMPTY, None);
    }

    /// Answers with a body, and its checksum if it has one.
    fn answer_with(
        &mut self,
        connection: u64,
        request: Envelope,
        message: Message,
        body: Body,
        crc: Option<u32>,
    ) {
        let (envelope, can_wait) = (self.stamped(request), false);
        let output = Output::Send { connection, envelope, message, body, crc, can_wait };
        self.outputs.push_back(output);
    }

    /// Answers what can wait for what comes next to the same client.
    fn answer_corked(&mut self, connection: u64, request: Envelope, message: Message) {
        let (envelope, body) = (self.stamped(request), Body::EMPTY);
        let (crc, can_wait) = (None, true);
        let output = Output::Send { connection, envelope, message, body, crc, can_wait };
        self.outputs.push_back(output);
    }

    /// Sends what answers nothing.
    fn send(&mut self, connection: u64, envelope: Envelope, message: Message) {
        let (body, crc, can_wait) = (Body::EMPTY, None, false);
        let output = Output::Send { connection, envelope, message, body, crc, can_wait };
        self.outputs.push_back(output);
    }

    /// With what every answer tells of the shard.
    fn stamped(&self, request: Envelope) -> Envelope {
        Envelope { step: self.step(), restore_epoch: self.epoch, ..request }
    }

    fn refuse(&mut self, connection: u64, request: Envelope, refusal: Refusal) {
        self.answer(connection, request, message::Refused { refusal }.into());
    }

    /// The refusal for who speaks of another restore epoch.
    fn other_epoch(&self, found: RestoreEpoch) -> Refusal {
        Refusal::RestoreEpoch { found, current: self.epoch, step: self.restored_step }
    }

    /// The global step, as far as this shard knows it; in synchronous mode, the steps it has applied.
    pub(crate) fn step(&self) -> pushpull_common::ids::GlobalStep {
        match &self.follower {
            Some(follower) => GlobalStep(follower.step()),
            None => self.owner.as_ref().map_or_else(Default::default, StepOwner::step),
        }
    }

    fn store(&self) -> Option<&Store> {
        match &self.variables {
            Variables::Absent => None,
            Variables::Declared(store) | Variables::Ready(store) => Some(store),
        }
    }

    fn is_ready(&self) -> bool {
        matches!(self.variables, Variables::Ready(_))
    }

    fn task_of(&self, client: ClientKey) -> &TaskId {
        &self.replicas.client(client).task
    }
}

/// The envelope of an answer to this request.
fn answer_to(header: &Header) -> Envelope {
    Envelope {
        request: header.request,
        restore_epoch: header.restore_epoch,
        step: header.step,
        sequence: header.sequence,
        deadline_ms: 0,
    }
}

fn deadline_of(now: Instant, header: &Header) -> Option<Instant> {
    let wait = std::time::Duration::from_millis(header.deadline_ms.into());
    (header.deadline_ms > 0).then(|| now + wait)
}

#[cfg(test)]
mod tests;
