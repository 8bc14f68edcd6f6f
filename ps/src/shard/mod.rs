//! One shard of a parameter server, as a pure state machine.
//!
//! A shard has no socket, thread or clock. The runtime and the simulator drive a [`Shard`] in the
//! same way: [`Shard::handle`] takes an input, and [`Shard::poll_output`] returns the next output.
//! Two more entry points keep bulk bytes and long work out of these: [`Shard::body_target`] returns
//! the memory that receives a body, and [`Shard::work`] does one slice of an update, so that small
//! requests are served between slices.

mod applier;
mod buffer_pool;
mod checkpoint_cut;
pub(crate) mod checkpoints;
mod checks;
mod chief;
pub(crate) mod client_registry;
pub(crate) mod control_file;
mod encoded_parts;
mod fused_ranges;
pub(crate) mod generation;
mod grad_norm;
mod growth;
mod handshake;
mod held_push;
mod initialization;
mod intake;
#[cfg(any(test, fuzzing, feature = "simulation"))]
mod invariants;
mod mean;
mod membership;
pub(crate) mod output;
mod parked_requests;
mod peer_shards;
mod peers;
mod persist;
pub(crate) mod poison;
pub(crate) mod power;
mod pulls;
mod push_buffers;
mod push_job;
mod push_slots;
mod pushes;
mod recalls;
pub(crate) mod record;
mod rows;
mod scan;
pub(crate) mod shard_files;
mod shared_values;
mod stale_pushes;
mod staleness;
mod step_job;
mod steps;
mod stragglers;
mod streaming_apply;
mod tables;
mod to_owner;
mod tokens;
mod two_pass;
mod update;
mod variables;
pub(crate) mod work;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Encoding;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{RestoreEpoch, Sequence, ShardId};
use pushpull_common::protocol::message::{Hello, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, FrameEvent, Header, Message, Refusal, message};
use pushpull_store::testing::planted::Bug;

use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::metrics::Counters;
use crate::shard::output::EncodeBuffers;
use crate::shard::pulls::{wait_for_values, wrong_encoding};
use applier::Applier;
use checkpoints::{SaveRequester, SaverEvent, ShardCheckpoints, ShardRestored};
use client_registry::ClientPresence;
use encoded_parts::{EncodedPart, PartEncoding};
use intake::Intake;
use output::{Outputs, ShardOutput};
use parked_requests::{ParkedRequest, WaitReason};
use peers::Peers;
use power::Power;
use pulls::Pulls;
use shard_files::ShardFiles;
use steps::Steps;
use tokens::ClientTokenRequest;
use variables::{Variables, VariablesState};

pub(crate) use handshake::PeerOrigin;

/// An input of a shard.
#[derive(Debug)]
pub(crate) enum ShardInput<'a> {
    /// A peer has said hello. Its connection has a new number.
    Connected {
        /// The number of the connection.
        connection: u64,
        /// The hello.
        hello: &'a Hello,
        /// The header of the hello.
        header: &'a Header,
        /// Where the peer connects from.
        origin: PeerOrigin,
    },
    /// A message has arrived. Its body follows, if it has one.
    Message {
        /// The connection.
        connection: u64,
        /// The header of the message.
        header: &'a Header,
        /// The meta of the message.
        message: Message,
    },
    /// Bytes of an incomplete frame have arrived.
    Progress {
        /// The connection.
        connection: u64,
    },
    /// The body of the last message is complete in [`Shard::body_target`].
    Body {
        /// The connection.
        connection: u64,
    },
    /// A connection has ended.
    Disconnected {
        /// The connection.
        connection: u64,
    },
    /// The saver reports an event.
    SaverEvent(SaverEvent),
    /// The result of [`ShardOutput::SaveShard`].
    ShardSaved {
        /// The connection of the request.
        connection: u64,
        /// The request.
        request: Envelope,
        /// The shard's entry for the manifest, or why the shard is not saved.
        result: Result<Vec<u8>, String>,
    },
    /// The connection to the step owner's shard is up or down.
    OwnerLink {
        /// Whether it is up.
        up: bool,
    },
    /// The step owner has sent a message over that connection.
    Owner {
        /// The header of the message.
        header: &'a Header,
        /// The meta of the message.
        message: Message,
    },
    /// The result of [`ShardOutput::Flush`].
    Flushed(Result<(), String>),
    /// The result of [`ShardOutput::RestoreShard`].
    ShardRestored(Box<ShardRestored>),
    /// The time has advanced. This input comes at least every [`TICK`].
    Tick,
}

impl<'a> ShardInput<'a> {
    /// Returns the input for an event of a connection.
    pub(crate) fn of_frame(connection: u64, event: FrameEvent<'a>) -> ShardInput<'a> {
        match event {
            FrameEvent::Message(header, message) => {
                ShardInput::Message { connection, header, message }
            }
            FrameEvent::Progress => ShardInput::Progress { connection },
            FrameEvent::Body => ShardInput::Body { connection },
        }
    }
}

/// The longest time between two [`ShardInput::Tick`].
pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(50);

/// The use of the body that a connection is receiving.
#[derive(Debug)]
enum ExpectedBody {
    /// A part of a push.
    Part(IncomingPart),
    /// A catalogue.
    Catalogue { request: Envelope, digest: [u8; 32], bytes: Vec<u8> },
    /// A user's data, to be stored with a checkpoint.
    User { request: Envelope, bytes: Vec<u8> },
    /// The row numbers of a pull of rows.
    Rows(ParkedRequest),
}

/// A part of a push whose message has arrived.
#[derive(Clone, Debug)]
struct IncomingPart {
    connection: u64,
    client: ClientKey,
    push_slot: u32,
    /// The range in the shard's layout. Empty for a part without a body.
    range: Range<u64>,
    request: Envelope,
    /// The encoding of the body, if it is encoded.
    encoded: Option<EncodedPart>,
    /// On the last part, the bytes of all parts.
    whole: Option<u64>,
    next: bool,
    /// When the client stops waiting for the answer.
    deadline: Option<Instant>,
}

/// The shard's state of one connection.
#[derive(Debug)]
struct ConnectionState {
    role: Role,
    client: Option<ClientKey>,
    origin: PeerOrigin,
    /// How many times shared memory was sent over it.
    shared: u32,
    crc: bool,
    expected_body: Option<ExpectedBody>,
    /// The push that was refused. Its other parts are skipped without an answer.
    refused: Option<(Sequence, u32)>,
}

/// One shard of a ps task.
///
/// Inputs go to [`Shard::handle`] and [`Shard::body_target`]. [`Shard::poll_output`] and
/// [`Shard::work`] return what to do next.
///
/// Invariants:
///
/// - All changes of an input are committed in one transaction before its outputs are returned. The
///   answer to a push leaves after the push is applied and durably settled in its client's window.
/// - The durable words are a function of the shard's state.
/// - A fenced or lost client holds no push slots, and no tokens except those of complete pushes.
#[derive(Debug)]
pub(crate) struct Shard {
    id: ShardId,
    config: Arc<PsConfig>,
    identity: Arc<Identity>,
    counters: Arc<Counters>,
    files: ShardFiles,
    /// `Some` if answers must survive a loss of power.
    power: Option<Power>,
    variables: Variables,
    peers: Peers,
    intake: Intake,
    applier: Applier,
    steps: Steps,
    pulls: Pulls,
    checkpoints: ShardCheckpoints,
    out: Outputs,
}

impl Shard {
    /// Handles an input.
    pub(crate) fn handle(&mut self, now: Instant, input: ShardInput<'_>) {
        self.persist_late();
        match input {
            ShardInput::Connected { connection, hello, header, origin } => {
                self.connected(now, connection, hello, header, origin);
            }
            ShardInput::Message { connection, header, message } => {
                self.message(now, connection, header, message);
            }
            ShardInput::Progress { connection } => self.progress(now, connection),
            ShardInput::Body { connection } => self.body(now, connection),
            ShardInput::Disconnected { connection } => self.disconnected(connection),
            ShardInput::SaverEvent(news) => self.checkpoints.on_saver_message(
                &self.variables,
                &self.steps,
                &mut self.out,
                now,
                news,
            ),
            ShardInput::ShardSaved { connection, request, result } => {
                self.checkpoints.shard_saved(&mut self.out, connection, request, result);
            }
            ShardInput::ShardRestored(restored) => self.restored(*restored),
            ShardInput::Flushed(result) => self.flushed(result),
            ShardInput::OwnerLink { up } => self.owner_link(now, up),
            ShardInput::Owner { header, message } => self.on_owner_message(now, header, message),
            ShardInput::Tick => self.tick(now),
        }
        self.follow_up(now);
    }

    /// Makes everything that an input or a job has made possible, and commits it. Push slots and
    /// tokens that it freed go to the requests that wait for them.
    fn follow_up(&mut self, now: Instant) {
        self.applier.drop_stale_streaming(&self.intake, &mut self.variables);
        // A shard that has failed to flush trains no more. Its saves still report their failure.
        let trains = self.poisoned().is_none();
        let Shard { variables, peers, intake, applier, steps, checkpoints, out, .. } = self;
        if trains {
            steps.decide(applier, intake, peers, out, now);
        }
        checkpoints.begin_requested_save(variables, peers, steps, out, now);
        if trains {
            intake.give_parked_push_slots(peers, out, now);
            steps.grant_parked_tokens(intake, peers, out, now);
        }
        self.send_parked_values();
        self.peers.report_members(&mut self.out);
        self.persist_in_time();
        #[cfg(any(test, fuzzing))]
        self.check_invariants();
    }

    /// Commits the changes of this input before its outputs are returned.
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

    /// Counts a connection that was closed because of a protocol error of its peer.
    pub(crate) fn count_fault(&self) {
        self.counters.connections_faulted.add(1);
    }

    /// Returns the next output.
    pub(crate) fn poll_output(&mut self) -> Option<ShardOutput> {
        self.out.queue.pop_front()
    }

    /// Returns whether [`Shard::work`] has a job to do.
    pub(crate) fn has_work(&self) -> bool {
        self.applier.has_work()
    }

    /// Returns whether a client reads shared values. Such a reader does not report that it has
    /// unpinned a block, which work may be waiting for.
    pub(crate) fn is_shared(&self) -> bool {
        self.variables.is_shared()
    }

    /// Revokes the shared values of readers that have been in one pull for `stall_timeout`. Returns
    /// their connections, which must be closed.
    pub(crate) fn revoke_stalled_readers(
        &mut self,
        now: Instant,
        stall_timeout: Duration,
    ) -> Vec<u64> {
        self.variables.revoke_stalled_readers(now, stall_timeout)
    }

    /// Revokes the shared values of readers that pin blocks an update needs, because they have read
    /// for too long. Returns their connections, which must be closed.
    pub(crate) fn revoke_slow_readers(&mut self) -> Vec<u64> {
        self.variables.revoke_slow_readers()
    }

    /// The answer to a pull has been sent. Its buffers return to the pool.
    pub(crate) fn pull_sent(&mut self, buffers: EncodeBuffers) {
        self.pulls.values_sent(buffers);
    }

    /// The answer to a pull of rows has been sent. Its buffer returns to the pool.
    pub(crate) fn rows_sent(&mut self, rows: Vec<u8>) {
        self.pulls.rows_sent(rows);
    }

    /// Abandons all work on checkpoint files, because the server ends.
    pub(crate) fn abandon_files(&self) {
        self.checkpoints.abandon_files();
    }

    /// Calls `receive` with [`Shard::body_target`].
    pub(crate) fn with_body<R>(
        &mut self,
        connection: u64,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        match self.body_target(connection) {
            Some(target) => receive(Some(&mut [target])),
            None => receive(None),
        }
    }

    /// Returns the memory that receives the body of the connection's last message. The body fills
    /// all of it. `None` if the body is to be read and discarded.
    pub(crate) fn body_target(&mut self, connection: u64) -> Option<&mut [u8]> {
        match &mut self.peers.connections.get_mut(&connection)?.expected_body {
            None => None,
            Some(ExpectedBody::Catalogue { bytes, .. } | ExpectedBody::User { bytes, .. }) => {
                Some(bytes)
            }
            Some(ExpectedBody::Rows(ParkedRequest {
                wait: WaitReason::Rows { numbers, .. },
                ..
            })) => Some(numbers),
            Some(ExpectedBody::Rows(_)) => None,
            Some(ExpectedBody::Part(IncomingPart { encoded: Some(encoded), .. })) => {
                Some(&mut encoded.bytes)
            }
            Some(ExpectedBody::Part(IncomingPart { client, push_slot, range, .. })) => {
                let inbox =
                    self.intake.inbox.as_mut().filter(|inbox| inbox.holds(*client, *push_slot))?;
                inbox.bytes_mut(*push_slot, range.clone())
            }
        }
    }

    fn message(&mut self, now: Instant, connection: u64, header: &Header, message: Message) {
        let request = answer_to(header);
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return;
        };
        state.expected_body = None;
        let (role, client) = (state.role, state.client);
        let kind = message.kind();
        if let Some(client) = client {
            let current = self.peers.registry.client(client);
            if current.connection.is_none() {
                // The end of the connection is queued, and may wait for an image. `Fenced` would
                // end a session that is alive.
                return;
            }
            if current.connection != Some(connection) {
                // Another connection of the same task has replaced this one: an older incarnation,
                // or an older connection of this one.
                let (epoch, current) = (current.epoch, current.epoch);
                self.out.refuse(connection, request, Refusal::Fenced { epoch, current });
                self.out.close(connection);
                return;
            }
            self.peers.registry.renew_lease(client, now);
            let joins = matches!(
                message,
                Message::TokenRequest(_)
                    | Message::Reserve(_)
                    | Message::SharePushBuffer(_)
                    | Message::PushPart(_)
                    | Message::PushEncoded(_)
                    | Message::PushShared(_)
            );
            if joins && self.peers.registry.client(client).presence != ClientPresence::Present {
                // A client that has left has no lease, so tokens and push slots would never return.
                let detail = Detail::clipped("this client has left; it may connect again");
                return self.out.refuse(connection, request, Refusal::Unsupported { kind, detail });
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
            message if chief::is_chief_only(message) => role == Role::Chief {},
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
        // Querying the outcome of a push is not a read: the answer could report a push that is not
        // on disk.
        if let Some(refusal) = self.poisoned().filter(|_| !reads) {
            return self.out.refuse(connection, request, refusal);
        }
        if !allowed {
            let refusal = Refusal::Role { role: role.code(), kind };
            return self.out.refuse(connection, request, refusal);
        }
        if chief::acts_as_chief(&message)
            && let Some(refusal) = self.peers.chief_refusal(connection)
        {
            return self.out.refuse(connection, request, refusal);
        }
        // A client that does not know the epoch yet sends 0.
        if header.restore_epoch != RestoreEpoch(0) && header.restore_epoch != self.variables.epoch {
            let refusal = self.variables.other_epoch(header.restore_epoch);
            return self.out.refuse(connection, request, refusal);
        }
        let deadline = deadline_of(now, header);
        let entry =
            |wait| ParkedRequest { connection, client, request, since: now, deadline, wait };
        match (message, client) {
            (Message::Heartbeat(_), _) => match self.applier.growth_refusal() {
                None => self.out.answer(connection, request, message::HeartbeatAnswer {}.into()),
                Some(refusal) => self.out.refuse(connection, request, refusal),
            },
            (Message::ShareValues(asked), _) => {
                let Shard { variables, files, peers, steps, out, .. } = self;
                let shared = peers
                    .check_share_request(connection, kind, asked.wants)
                    .and_then(|()| variables.share(&files.budget, steps, connection, kind));
                match shared {
                    Ok((answer, descriptors)) => {
                        peers.send_shared(out, connection, request, answer, descriptors);
                    }
                    Err(refusal) => out.refuse(connection, request, refusal),
                }
            }
            (Message::Declare(declare), _) => {
                let bytes = vec![0; header.body_bytes as usize];
                let digest = declare.digest;
                let expected_body = ExpectedBody::Catalogue { request, digest, bytes };
                self.receive(now, connection, expected_body, header);
            }
            (Message::Initialize(asked), _) => {
                self.initialize(now, connection, request, asked.epoch);
            }
            (Message::FindCheckpoint(_), _) => {
                self.checkpoints.find_checkpoint(&self.steps, &mut self.out, connection, request)
            }
            (Message::PassedOverQuery(_), _) => {
                self.checkpoints.answer_passed_over(&mut self.out, connection, request)
            }
            (Message::Restore(restore), _) => self.restore(connection, request, restore),
            (Message::Save(_), _) => {
                let bytes = vec![0; header.body_bytes as usize];
                self.receive(now, connection, ExpectedBody::User { request, bytes }, header);
            }
            (Message::SaveShard(save), _) => {
                self.save_shard(now, connection, request, save.name.as_str());
            }
            (Message::AwaitReady(_), _) => {
                self.peers.await_ready(&self.variables, &mut self.out, entry(WaitReason::Ready))
            }
            (Message::FetchCatalogue(_), _) => {
                self.variables.send_catalogue(&mut self.out, connection, request)
            }
            (Message::Pull(pull), _) => {
                let wait = wait_for_values(&self.variables, header, &pull.selection, None);
                self.pull(entry(WaitReason::Ready), wait);
            }
            (Message::PullEncoded(asked), _) => {
                let form = ValueEncoding::from_code(asked.encoding)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let wait = form.and_then(|form| {
                    wait_for_values(&self.variables, header, &asked.pull.selection, Some(form))
                });
                self.pull(entry(WaitReason::Ready), wait);
            }
            (Message::PullRows(pull), _) => {
                let wait = self.pulls.wait_for_rows(&self.variables, header, pull.partition, None);
                self.receive_row_numbers(now, entry(WaitReason::Ready), header, wait);
            }
            (Message::PullRowsEncoded(asked), _) => {
                let codec = Encoding::from_code(asked.encoding)
                    .and_then(Encoding::codec_of_values)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let wait = codec.and_then(|codec| {
                    let partition = asked.pull.partition;
                    self.pulls.wait_for_rows(&self.variables, header, partition, Some(codec))
                });
                self.receive_row_numbers(now, entry(WaitReason::Ready), header, wait);
            }
            (Message::TokenRequest(token), Some(_)) => {
                let Shard { steps, intake, peers, out, checkpoints, .. } = self;
                if checkpoints.restoring.is_some() {
                    return out.refuse(connection, request, Refusal::NotInitialized {});
                }
                let (entry, newest) = (entry(WaitReason::Token), token.newest);
                ClientTokenRequest { entry, newest }.answer(steps, intake, peers, out, now);
            }
            (Message::ReturnToken(token), Some(client)) => {
                self.steps.return_token(
                    &self.intake,
                    &mut self.out,
                    connection,
                    client,
                    request,
                    &token,
                );
            }
            (Message::Reserve(_), Some(_)) => self.intake.reserve(
                &mut self.peers,
                &mut self.out,
                now,
                entry(WaitReason::PushSlot),
            ),
            (Message::PushPart(part), Some(client)) => {
                self.part(now, connection, client, header, &part, None);
            }
            (Message::PushEncoded(encoded), Some(client)) => {
                let message::PushEncoded { part, encoding, elements, factor } = encoded;
                let form = PartEncoding { encoding, elements, factor };
                self.part(now, connection, client, header, &part, Some(form));
            }
            (Message::SharePushBuffer(_), Some(client)) => {
                let shared = self.share_push_buffer(now, connection, client, request, kind);
                if let Err(refusal) = shared {
                    self.out.refuse(connection, request, refusal);
                }
            }
            (Message::PushShared(shared), Some(client)) => {
                self.push_shared(now, connection, client, header, &shared);
            }
            (Message::Withdraw(_), Some(client)) => {
                self.intake.withdraw(
                    &mut self.peers,
                    &mut self.out,
                    now,
                    connection,
                    client,
                    request,
                );
            }
            (Message::OutcomeQuery(_), Some(client)) => {
                self.intake.outcome_query(&self.peers, &mut self.out, connection, client, request);
            }
            (Message::Held(held), _) => {
                self.steps.shard_holds(&self.peers, &mut self.out, now, connection, &held);
            }
            (Message::StepApplied(applied), _) => {
                self.steps.shard_has_applied(
                    &self.peers,
                    &mut self.out,
                    now,
                    connection,
                    applied.shard,
                    header.step.0,
                );
            }
            (Message::Recalled(answer), _) => self.steps.recall_answered(
                &self.intake,
                &self.peers,
                &mut self.out,
                now,
                connection,
                &answer,
            ),
            (Message::Finish(_), _) => self.steps.finish(&mut self.out, connection, request),
            (Message::Leave(_), Some(client)) => self.leave(now, connection, client, request),
            (message, _) => {
                let detail =
                    Detail::clipped(format!("a server does not accept {}", message.name()));
                self.out.refuse(connection, request, Refusal::Unsupported { kind, detail });
            }
        }
    }

    /// Handles a pull that waits for this, or refuses it.
    fn pull(&mut self, entry: ParkedRequest, wait: Result<WaitReason, Refusal>) {
        match wait {
            Ok(wait) => self.serve(ParkedRequest { wait, ..entry }),
            Err(refusal) => self.out.refuse(entry.connection, entry.request, refusal),
        }
    }

    /// Receives the row numbers of a pull, or refuses it.
    fn receive_row_numbers(
        &mut self,
        now: Instant,
        entry: ParkedRequest,
        header: &Header,
        wait: Result<WaitReason, Refusal>,
    ) {
        match wait {
            Ok(wait) => {
                let entry = ParkedRequest { wait, ..entry };
                self.receive(now, entry.connection, ExpectedBody::Rows(entry), header);
            }
            Err(refusal) => self.out.refuse(entry.connection, entry.request, refusal),
        }
    }

    /// Answers a pull, or parks it until its step is served.
    fn serve(&mut self, entry: ParkedRequest) {
        if entry.wait.is_served(self.steps.served_step()) {
            self.send_pulled(entry);
        } else {
            self.peers.park(&mut self.out, entry);
        }
    }

    fn send_pulled(&mut self, entry: ParkedRequest) {
        let Shard { variables, files, peers, out, .. } = self;
        match entry.wait {
            WaitReason::Rows { .. } => {
                self.pulls.send_rows(variables, &files.journal, peers, out, entry);
            }
            _ => self.pulls.send_values(variables, peers, &files.budget, out, entry),
        }
    }

    /// Answers the parked pulls whose step is served.
    fn send_parked_values(&mut self) {
        let served = self.steps.served_step();
        for entry in self.peers.parked.take(|entry| entry.wait.is_served(served)) {
            self.send_pulled(entry);
        }
    }

    fn progress(&mut self, now: Instant, connection: u64) {
        let Some(state) = self.peers.connections.get(&connection) else {
            return;
        };
        if let Some(client) = state.client
            && self.peers.registry.client(client).connection == Some(connection)
        {
            self.peers.registry.renew_lease(client, now);
        }
        if let Some(ExpectedBody::Part(IncomingPart { push_slot, .. })) = &state.expected_body
            && let Some(inbox) = &mut self.intake.inbox
        {
            inbox.touch(*push_slot, now);
        }
    }

    fn body(&mut self, now: Instant, connection: u64) {
        self.progress(now, connection);
        let Some(state) = self.peers.connections.get_mut(&connection) else {
            return;
        };
        match state.expected_body.take() {
            None => {}
            Some(ExpectedBody::Catalogue { request, digest, bytes }) => {
                match self.body_refusal(connection) {
                    Some(refusal) => self.out.refuse(connection, request, refusal),
                    None => {
                        self.declare(connection, request, digest, &bytes);
                    }
                }
            }
            Some(ExpectedBody::User { request, bytes }) => match self.body_refusal(connection) {
                Some(refusal) => self.out.refuse(connection, request, refusal),
                None => self.checkpoints.save(
                    &self.variables,
                    &self.steps,
                    &mut self.out,
                    now,
                    SaveRequester::Connection { connection, request },
                    bytes,
                ),
            },
            Some(ExpectedBody::Rows(entry)) if self.variables.is_ready() => self.serve(entry),
            Some(ExpectedBody::Rows(entry)) => {
                self.out.refuse(entry.connection, entry.request, Refusal::NotInitialized {});
            }
            Some(ExpectedBody::Part(part)) => self.part_received(now, part),
        }
    }

    /// Returns the refusal of a chief's body if something happened since its message that rejects
    /// it.
    fn body_refusal(&self, connection: u64) -> Option<Refusal> {
        self.poisoned().or_else(|| self.peers.chief_refusal(connection))
    }

    /// Stores the use of the next body. A message without a body is complete.
    fn receive(
        &mut self,
        now: Instant,
        connection: u64,
        expected_body: ExpectedBody,
        header: &Header,
    ) {
        if let Some(state) = self.peers.connections.get_mut(&connection) {
            state.expected_body = Some(expected_body);
        }
        if header.body_bytes == 0 {
            self.body(now, connection);
        }
    }

    /// Passes the step and the restore epoch on to the answers, after a change of either.
    fn stamp_answers(&mut self) {
        self.out.stamp(self.steps.step(), self.variables.epoch);
    }
}

/// Returns the envelope of an answer to this request.
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
