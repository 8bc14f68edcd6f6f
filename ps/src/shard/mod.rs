//! One shard of a parameter server, as a pure state machine.
//!
//! A shard has no socket, thread or clock. The runtime and the simulator drive a [`Shard`] in the
//! same way: [`Shard::handle`] takes an input, and [`Shard::poll_output`] returns the next output.
//! Two more entry points keep bulk bytes and long work out of these: [`Shard::body_target`] returns
//! the memory that receives a body, and [`Shard::work`] does one slice of an update, so that small
//! requests are served between slices.
//!
//! Each type owns its state, in the files named here. `peers/peer_request.rs` checks who may send a
//! message, and hands it to its owner.
//!
//! - [`Peers`]: connections, leases, the hellos and requests of clients, what waits.
//! - [`Intake`]: push slots, parts on their way in, whole pushes; `scan`.
//! - [`Applier`]: what changes values. It runs the jobs `push_job`, `step_job`, `initialization`
//!   and `grad_norm`; `push_job` also applies on arrival. The loop is in `update`, `mean` and
//!   `rows`.
//! - [`Steps`]: tokens and steps. `data`, `calls`, `calls_heard`, `recalls`, `held_push`, `peer_shards`,
//!   `to_owner`, `stragglers`, `awaited`, `training_watch`.
//! - [`Pulls`]: buffers, and the last pull of each client; `staleness`.
//! - [`Variables`]: the store, the rules, the counts; `fused_ranges`, `untrained_variables`.
//! - [`ShardFiles`]: arena and journal; opening, recovery, generations of variables, images.
//! - [`ShardCheckpoints`]: cuts, saves, restores, orders to the saver.
//! - [`ShardOutputs`]: what leaves the shard, with its stamp.

pub(crate) mod applier;
mod awaited;
mod buffer_pool;
mod calls;
mod calls_heard;
pub(crate) mod checkpoints;
mod data;
mod fused_ranges;
mod grad_norm;
mod held_push;
mod initialization;
mod input;
mod intake;
#[cfg(any(test, fuzzing, feature = "simulation"))]
mod invariants;
mod mean;
pub(crate) mod output;
mod peer_shards;
pub(crate) mod peers;
mod pulls;
mod push_audits;
mod push_job;
mod recalls;
mod rows;
mod scan;
pub(crate) mod shard_files;
mod staleness;
mod step_job;
mod steps;
mod stragglers;
mod to_owner;
mod tokens;
mod training_watch;
mod untrained_variables;
mod update;
mod variables;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, ShardId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::EndReason;
use pushpull_common::protocol::refusal::Detail;
use pushpull_store::testing::planted::Bug;

use crate::aggregate::current_step::PerPush;
use crate::aggregate::data_position::DataPosition;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::metrics::Counters;
use crate::status::{HeldToken, MemberStatus, Status, TrainingPhase};
use applier::Applier;
use checkpoints::ShardCheckpoints;
use intake::Intake;
use output::{EncodeBuffers, ShardOutput, ShardOutputs};
use peers::Peers;
use peers::handshake::IncomingHello;
use peers::parked_requests::{ParkedRequest, WaitReason};
use peers::peer_request::PeerRequest;
use pulls::Pulls;
use shard_files::ShardFiles;
use shard_files::power::Power;
use steps::Steps;
use variables::{Variables, VariablesState};

pub(crate) use input::{ShardInput, TICK};
pub(crate) use pushpull_common::peer_origin::PeerOrigin;

/// One shard of a ps task.
///
/// **What goes in.** [`Shard::handle`] takes every event: a hello, a message, a received body, the
/// end of a connection, a result of work that other threads did, the passage of time. A message
/// with a body is followed by its body and by no other message of the same connection; the body is
/// received into the memory that [`Shard::body_target`] returns. [`Shard::work`] does one slice of
/// a long update, whenever [`Shard::has_work`].
///
/// **What comes out.** [`Shard::poll_output`] returns the actions in the order in which they must
/// be carried out. Call it until it returns `None` after every event and every slice. All changes
/// of an event are committed in one transaction before its outputs are returned. With
/// [`Durability::Power`](crate::Durability::Power) they are returned once an image of that
/// transaction is on disk. Every request of a client gets one answer, and a push gets one for all
/// its parts, unless the connection is closed.
///
/// **What time does.** The shard has no clock: each event comes with the time, which never falls. A
/// [`ShardInput::Tick`] is due every [`TICK`] at the latest. It expires leases, requests, tokens
/// and stalled pushes, and repeats reports to the step owner. A late tick delays these, and breaks
/// nothing: leases are extended by a pause of the server.
///
/// **What may never happen.** No message of a peer and no word of a file makes the shard panic. No
/// answer to a push leaves before the push is applied and durably settled in its client's window.
/// No push is applied twice, and no pinned block is overwritten. A fenced or lost client holds no
/// push slots, and no tokens except those of complete pushes. After a failed flush nothing but
/// reads is answered. The durable words are a function of the shard's state. Each owner's type
/// states its own invariants.
#[derive(Debug)]
pub(crate) struct Shard {
    id: ShardId,
    config: Arc<PsConfig>,
    identity: Arc<Identity>,
    counters: Arc<Counters>,
    files: ShardFiles,
    variables: Variables,
    peers: Peers,
    intake: Intake,
    applier: Applier,
    steps: Steps,
    pulls: Pulls,
    checkpoints: ShardCheckpoints,
    out: ShardOutputs,
}

impl Shard {
    /// Handles an input.
    pub(crate) fn handle(&mut self, now: Instant, input: ShardInput<'_>) {
        self.persist_late();
        let Shard { variables, steps, checkpoints, peers, out, .. } = self;
        match input {
            ShardInput::Connected { connection, hello, header, origin } => {
                self.connected(IncomingHello { connection, hello, origin, now }, header);
            }
            ShardInput::Message { connection, header, message } => {
                self.message(now, connection, header, message);
            }
            ShardInput::Progress { connection } => self.progress(now, connection),
            ShardInput::Body { connection } => self.body(now, connection),
            ShardInput::Disconnected { connection } => self.disconnected(connection),
            ShardInput::SaverEvent(event) => {
                checkpoints.on_saver_message(variables, steps, out, now, event);
            }
            ShardInput::ShardSaved { connection, request, result } => {
                checkpoints.shard_saved(out, connection, request, result);
            }
            ShardInput::RestoreAdvanced(result) => self.restore_advanced(*result),
            ShardInput::Flushed(result) => self.flushed(result),
            ShardInput::OwnerTime { epoch } => self.peers.registry.learn_owner_time(epoch, now),
            ShardInput::OwnerLink { up } => self.owner_link(now, up),
            ShardInput::Finish => steps.owner.iter_mut().for_each(|owner| owner.finish()),
            ShardInput::Goodbye => peers.say_goodbye(out),
            ShardInput::Owner { header, message } => self.on_owner_message(now, header, message),
            ShardInput::Tick => self.tick(now),
        }
        self.follow_up(now);
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

    /// Returns the next output.
    pub(crate) fn poll_output(&mut self) -> Option<ShardOutput> {
        self.out.queue.pop_front()
    }

    /// Returns whether [`Shard::work`] has a job to do.
    pub(crate) fn has_work(&self) -> bool {
        self.applier.has_work()
    }

    /// Returns whether a commit waits for an image.
    pub(crate) fn waits_for_image(&self) -> bool {
        self.files.waits_for_image()
    }

    /// Returns whether an image is being written.
    pub(crate) fn is_flushing(&self) -> bool {
        self.files.power.as_ref().is_some_and(Power::is_flushing)
    }

    /// Returns whether a client reads shared values.
    pub(crate) fn is_shared(&self) -> bool {
        self.variables.is_shared()
    }

    /// Returns the number of rows in the tables of the shard.
    #[cfg(test)]
    pub(crate) fn table_rows(&self) -> u64 {
        self.variables.store().map_or(0, |store| store.tables().iter().map(|it| it.rows()).sum())
    }

    /// Revokes the shared values of stalled readers. Returns the connections to close.
    pub(crate) fn revoke_stalled_readers(
        &mut self,
        now: Instant,
        stall_timeout: Duration,
    ) -> Vec<u64> {
        self.variables.revoke_stalled_readers(now, stall_timeout)
    }

    /// Revokes the shared values that an update waits for. Returns the connections to close.
    pub(crate) fn revoke_slow_readers(&mut self) -> Vec<u64> {
        self.variables.revoke_slow_readers()
    }

    /// Takes back the buffers of an answer to a pull.
    pub(crate) fn pull_sent(&mut self, buffers: EncodeBuffers) {
        self.pulls.values_sent(buffers);
    }

    /// Takes back the buffer of an answer to a pull of rows.
    pub(crate) fn rows_sent(&mut self, rows: Vec<u8>) {
        self.pulls.rows_sent(rows);
    }

    /// Returns the newest client epoch that this shard has recorded.
    pub(crate) fn newest_epoch(&self) -> ClientEpoch {
        self.peers.registry.newest_recorded()
    }

    /// Abandons all work on checkpoint files, because the server ends.
    pub(crate) fn abandon_files(&self) {
        self.checkpoints.abandon_files();
    }

    /// Returns the counters of the shard.
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Counts a connection that was closed because of a protocol error of its peer.
    pub(crate) fn count_fault(&self) {
        self.counters.connections_faulted.add(1);
    }

    /// Makes everything that an input or a job has made possible, and commits it. Push slots and
    /// tokens that it freed go to the requests that wait for them.
    fn follow_up(&mut self, now: Instant) {
        self.applier.drop_stale_streaming(&self.intake, &mut self.variables);
        // A shard that has failed to flush trains no more. Its saves still report their failure.
        let trains = self.files.poisoned().is_none();
        if trains {
            let Shard { peers, intake, applier, steps, out, .. } = self;
            steps.decide(applier, intake, peers, out, now);
        }
        let Shard { variables, files, peers, intake, steps, pulls, checkpoints, out, .. } = self;
        checkpoints.begin_requested_save(variables, peers, steps, out, now);
        if trains {
            intake.give_parked_push_slots(peers, out, now);
            steps.grant_parked_tokens(intake, peers, out, now);
            steps.announce_end(peers, out);
        }
        pulls.send_parked(variables, files, peers, steps, out);
        peers.report_members(out);
        if !self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
        self.files.hold_outputs(&mut self.variables, &mut self.out);
        #[cfg(any(test, fuzzing))]
        self.check_invariants();
    }

    fn persist_late(&mut self) {
        if self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
    }

    /// Commits all changes in one transaction. Answers sent after it are durable.
    fn persist(&mut self) {
        let Shard { files, variables, peers, intake, steps, .. } = self;
        files.persist(variables, peers, intake, steps);
    }

    /// Takes the result of a flush. After a failure the shard serves pulls only.
    fn flushed(&mut self, result: Result<(), String>) {
        let Shard { files, variables, peers, applier, checkpoints, out, .. } = self;
        let is_restoring = checkpoints.restoring.is_some();
        if files.flushed(variables, is_restoring, out, result) {
            applier.jobs.clear();
            applier.streaming = None;
            peers.connections.keys().for_each(|&connection| out.close(connection));
        }
    }

    /// Expires what has waited for too long, and repeats what may have been lost.
    fn tick(&mut self, now: Instant) {
        let lost = self.peers.registry.expire(now);
        if let Some(pause) = self.peers.registry.paused() {
            self.intake.inbox.iter_mut().for_each(|inbox| inbox.extend_deadlines(pause, now));
            self.steps.owner.iter_mut().for_each(|owner| owner.extend_deadlines(pause, now));
        }
        for client in lost {
            self.counters.members_lost.add(1);
            self.report_lost(now, client);
            if let Some(connection) = self.peers.registry.client_mut(client).connection.take() {
                self.out.close(connection);
                self.intake.drop_client_connection(&mut self.peers, connection, client);
            }
            self.drop_client(now, client, false);
        }
        self.close_silent_connections(now);
        let connections = &self.peers.connections;
        self.steps.calls_heard.refresh(now, |open| connections.contains_key(&open));
        self.steps.stop_expecting(now);
        self.end_straggler_waits(now);
        self.steps.repeat_reports(&self.intake, &self.peers, &self.variables, &mut self.out, now);
        if self.checkpoints.has_expired(now) {
            let awaited = self.awaited_step(now).unwrap_or_default().text;
            self.checkpoints.expire(&mut self.out, now, &awaited);
        }
        self.recall_tokens(now);
        self.applier.forget_growth(&mut self.out, now);
        // In synchronous mode a push that is complete on some shards only never counts.
        let complete =
            if self.steps.is_synchronous() { PerPush::new() } else { self.intake.whole_tokens() };
        let asks = !self.steps.shards_to_ask().is_empty();
        if let Some(owner) = self.steps.owner.as_mut().filter(|_| !asks) {
            let timeout = self.config.token_timeout;
            let expired = owner.expire(now, timeout, |token| complete.contains(&token));
            self.counters.tokens_taken_back.add(expired as u64);
        }
        self.intake.reclaim_stalled(now);
        self.variables.count_direct_pulls();
        for ParkedRequest { request, wait } in self.peers.parked.expire(now) {
            let waited_ms = now.saturating_duration_since(request.since).as_millis() as u64;
            let awaited = self.applier.with_growth(self.awaited(now, &request, &wait));
            let awaited = Detail::clipped(awaited);
            request.refuse(&mut self.out, Refusal::Deadline { waited_ms, awaited });
        }
        self.report_training(now);
    }

    /// Closes the connections of readers and shards that have been silent for a lease. One whose
    /// part of a checkpoint is being written waits for the answer.
    fn close_silent_connections(&mut self, now: Instant) {
        for connection in self.peers.silent_connections(now) {
            if !self.checkpoints.is_saving_for(connection) {
                self.counters.connections_silent.add(1);
                self.disconnected(connection);
                self.out.close(connection);
            }
        }
    }

    /// Describes the event that a request waits for.
    fn awaited(&self, now: Instant, request: &PeerRequest, wait: &WaitReason) -> String {
        match wait {
            WaitReason::Ready => self.awaited_ready(now),
            WaitReason::Token => {
                let tokens = || self.steps.awaited_tokens(&self.peers, now, request.client);
                self.awaited_step(now).unwrap_or_else(tokens).text
            }
            WaitReason::PushSlot => self.steps.awaited_push_slot(now),
            WaitReason::End => self.steps.awaited_end(&self.peers, now).text,
            WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. } => {
                self.awaited_values(now, *at_least)
            }
        }
    }

    /// Returns the status of the training, as this shard knows it.
    pub(crate) fn status(&self, now: Instant) -> Status {
        let owner = self.steps.owner.as_ref();
        let data = owner.and_then(|owner| owner.ledger().data.as_ref());
        Status {
            phase: self.phase(),
            global_step: self.steps.step().0,
            restore_epoch: self.variables.epoch.0,
            members: self.peers.registry.keys().map(|key| self.member(now, key)).collect(),
            never_joined: self.peers.registry.never_joined(&self.config.cluster).collect(),
            waiting: self.oldest_wait(now),
            data: data.map(DataPosition::status),
        }
    }

    fn phase(&self) -> TrainingPhase {
        let ended = self.steps.owner.as_ref().and_then(TokenIssuer::end_reason);
        match (&self.variables.state, ended) {
            (VariablesState::Absent, _) if self.checkpoints.restoring.is_none() => {
                TrainingPhase::NoVariables
            }
            (VariablesState::Absent | VariablesState::Declared(_), _) => TrainingPhase::Declared,
            (VariablesState::Ready(_), None) => TrainingPhase::Training,
            (VariablesState::Ready(_), Some(EndReason::LastStep {})) => TrainingPhase::LastStep,
            (VariablesState::Ready(_), Some(EndReason::DataEnd {})) => TrainingPhase::DataEnd,
            (VariablesState::Ready(_), Some(_)) => TrainingPhase::Finished,
        }
    }

    fn member(&self, now: Instant, key: ClientKey) -> MemberStatus {
        let client = self.peers.registry.client(key);
        let tokens = self.steps.owner.iter().flat_map(|owner| owner.ledger().held_by(key));
        let tokens = tokens.map(|token| HeldToken {
            step: token.issued.step.0,
            held: now.saturating_duration_since(token.since),
        });
        MemberStatus {
            task: client.task.clone(),
            presence: client.presence.into(),
            silent: client.silent(now),
            tokens: tokens.collect(),
            step_time: client.step_time,
        }
    }

    pub(in crate::shard) fn disconnected(&mut self, connection: u64) {
        let Shard { variables, peers, intake, steps, checkpoints, .. } = self;
        let Some(state) = peers.connections.remove(&connection) else { return };
        variables.revoke_shared(connection);
        peers.parked.drop_connection(connection);
        checkpoints.abandon_save_of(connection);
        checkpoints.forget_checked_for(connection);
        steps.shards.forget_connection(connection);
        checkpoints.drop_save_requests_of(connection);
        // The client stays a member for its lease: it may reconnect and continue.
        if let Some(client) = state.client
            && peers.registry.client(client).connection == Some(connection)
        {
            peers.registry.client_mut(client).connection = None;
            intake.drop_client_connection(peers, connection, client);
        }
    }

    /// Drops the state of a client that has left, is lost, or is fenced by a newer incarnation. Its
    /// tokens and push slots go to other clients.
    ///
    /// Complete pushes stay; in synchronous mode only admitted ones do. In asynchronous mode the
    /// other shards are asked about its tokens first, except for a fenced incarnation, which cannot
    /// push any more.
    fn drop_client(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        // A token or push slot that it is waiting for would never be returned.
        self.peers.parked.take(|ParkedRequest { request, wait }| {
            request.client == Some(client)
                && matches!(wait, WaitReason::Token | WaitReason::PushSlot)
        });
        if let Some(inbox) = &mut self.intake.inbox {
            inbox.drop_client(client);
        }
        self.pulls.last_pulls.drop_client(client);
        if !fenced && !self.steps.shards_to_ask().is_empty() {
            if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
                tokens.leave(client);
            }
            self.steps.watch_absent(&self.peers, now, client);
            self.recall_tokens(now);
        } else if let Some(owner) = &mut self.steps.owner {
            let complete = self.intake.whole_tokens();
            let returned = owner.drop_client(client, fenced, |token| complete.contains(&token));
            self.counters.tokens_taken_back.add(returned as u64);
        }
    }

    /// Passes the step and the restore epoch on to the answers, after a change of either.
    fn stamp_answers(&mut self) {
        self.out.stamp(self.steps.step(), self.variables.epoch);
    }
}

#[cfg(test)]
mod tests;
