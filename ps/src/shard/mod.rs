//! One shard of a parameter server, as a pure state machine.
//!
//! A shard has no socket, thread or clock. The runtime and the simulator drive a [`Shard`] in the
//! same way: [`Shard::handle`] takes an input, and [`Shard::poll_output`] returns the next output.
//! Two more entry points keep bulk bytes and long work out of these: [`Shard::body_target`] returns
//! the memory that receives a body, and [`Shard::work`] does one slice of an update, so that small
//! requests are served between slices.
//!
//! From the bottom up:
//!
//! - `request`, `input`, `output`, `file_work`, `changes`: the vocabulary of what comes in, what goes
//!   out, the work that other threads do, and what has changed. Every owner may name it.
//! - The owners, each a plain struct with its own state, none of which names another:
//!   [`Peers`], connections, clients with their leases, and requests that wait;
//!   [`Intake`], push slots and the parts on their way into them;
//!   [`Steps`], tokens, steps and coordinators;
//!   [`Variables`] and [`Applier`] (`values`), the values and the jobs that change them;
//!   [`Pulls`], the answers with values;
//!   [`ShardCheckpoints`], cuts, saves and restores;
//!   [`ShardFiles`], the arena and the journal of durable words.
//! - `dispatch`: what each input has the owners do.
//! - `opening`: makes a shard of the files that an earlier process left.

mod changes;
pub(crate) mod checkpoints;
mod dispatch;
pub(crate) mod file_work;
mod input;
mod intake;
#[cfg(any(test, fuzzing, feature = "simulation"))]
mod invariants;
pub(crate) mod opening;
pub(crate) mod output;
pub(crate) mod peers;
mod pulls;
mod request;
pub(crate) mod shard_files;
mod steps;
pub(crate) mod values;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, ShardId};
use pushpull_common::protocol::message::EndReason;
use pushpull_common::status::{HeldToken, MemberStatus, Status, TrainingPhase};
use pushpull_store::planted::Bug;

use crate::aggregate::data_position::DataPosition;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::metrics::Counters;
use changes::Changes;
use checkpoints::ShardCheckpoints;
use intake::Intake;
use output::{EncodeBuffers, ShardOutput, ShardOutputs};
use peers::Peers;
use pulls::Pulls;
use request::incoming_hello::IncomingHello;
use shard_files::ShardFiles;
use shard_files::generation::files_of_tables;
use shard_files::power::{FlushOutcome, Power};
use steps::Steps;
use values::applier::Applier;
use values::variables::{Variables, VariablesState};

pub(crate) use input::{ShardInput, TICK};

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
/// **What may never happen.** Tests cite these by their numbers. Each owner's type states its own
/// invariants.
///
/// - S-1: No answer to a push leaves before the push is durably settled in its client's window.
/// - S-2: No push is applied twice.
/// - S-3: No pinned block is overwritten, and no pull sees half of a push.
/// - S-4: A fenced or lost client holds no push slots, and no tokens but those of complete pushes.
/// - S-5: After a failed flush nothing but reads is answered.
/// - S-6: The durable words are a function of the shard's state, and are in the arena after each
///   input. Those that an update under way changes are in the arena once it ends.
/// - S-7: No request waits for something that is available.
/// - S-8: No message of a peer and no word of a file makes the shard panic.
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
    /// What has changed since the last tick.
    changed: Changes,
}

impl Shard {
    /// Handles an input.
    pub(crate) fn handle(&mut self, now: Instant, input: ShardInput<'_>) {
        self.persist_late();
        let changes = self.dispatch(now, input);
        self.follow_up(now, changes);
    }

    /// Has the owners do what an input asks for. Returns what that has changed.
    fn dispatch(&mut self, now: Instant, input: ShardInput<'_>) -> Changes {
        match input {
            ShardInput::Connected { connection, hello, header, origin, principal } => {
                let incoming = IncomingHello { connection, hello, origin, principal, now };
                self.connected(incoming, header);
            }
            ShardInput::Message { connection, header, message } => {
                return self.message(now, connection, header, message);
            }
            ShardInput::Progress { connection } => {
                self.progress(now, connection);
                return Changes::NONE;
            }
            ShardInput::Body { connection } => return self.body(now, connection),
            ShardInput::Disconnected { connection } => self.disconnected(connection),
            ShardInput::SaverEvent(event) => self.on_saver_event(now, event),
            ShardInput::ShardSaved { connection, request, result } => {
                self.checkpoints.shard_saved(&mut self.out, connection, request, result);
            }
            ShardInput::RestoreAdvanced(result) => self.restore_advanced(*result),
            ShardInput::Flushed(result) => self.flushed(result),
            ShardInput::OwnerTime { epoch } => self.peers.registry.learn_owner_time(epoch, now),
            ShardInput::OwnerLink { up } => self.owner_link(now, up),
            ShardInput::Finish => self.finish(),
            ShardInput::Goodbye => self.peers.say_goodbye(&mut self.out),
            ShardInput::Owner { header, message } => self.on_owner_message(now, header, message),
            ShardInput::Tick => return self.tick(now),
        }
        Changes::ALL
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

    /// Makes everything that these changes have made possible, and commits them. Push slots and
    /// tokens that were freed go to the requests that wait for them.
    fn follow_up(&mut self, now: Instant, changes: Changes) {
        self.changed |= changes;
        if changes == Changes::NONE {
            self.hold_outputs();
            #[cfg(any(test, fuzzing, all(feature = "simulation", debug_assertions)))]
            self.check_unchanged();
            return;
        }
        if changes.any(Changes::SLOTS) {
            let inbox = self.intake.inbox.as_ref();
            self.applier.drop_stale_streaming(inbox, &mut self.variables);
        }
        // A shard that has failed to flush trains no more. Its saves still report their failure.
        let trains = self.files.poisoned().is_none();
        let is_synchronous = self.steps.is_synchronous();
        if trains && is_synchronous {
            self.decide(now);
        }
        // In synchronous mode a save begins when every shard has applied the same steps.
        if changes.any(Changes::FILES) || is_synchronous {
            self.begin_requested_save(now);
        }
        if trains {
            self.serve_parked(now, changes);
        }
        if changes.any(Changes::STEP | Changes::VALUES) && self.peers.parked.is_any() {
            self.send_parked();
        }
        self.steps.note_tokens();
        if changes.any(Changes::MEMBERS) {
            self.peers.report_members(&mut self.out);
        }
        if !self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
        self.hold_outputs();
        #[cfg(any(test, fuzzing))]
        self.check_invariants();
    }

    /// Gives what was freed to the requests that wait for it.
    fn serve_parked(&mut self, now: Instant, changes: Changes) {
        if !self.peers.parked.is_any() {
            return;
        }
        if changes.any(Changes::SLOTS | Changes::MEMBERS) {
            self.give_parked_push_slots(now);
        }
        if changes.any(Changes::TOKENS | Changes::STEP | Changes::MEMBERS) {
            self.grant_parked_tokens(now);
            self.announce_end();
        }
    }

    /// Holds outputs back until their commit is on disk, if answers must survive a loss of power.
    fn hold_outputs(&mut self) {
        if self.files.power.is_some() {
            self.files.hold_outputs(self.variables.store_mut(), &mut self.out);
        }
    }

    fn persist_late(&mut self) {
        if self.config.planted.has(Bug::AcknowledgeBeforeCommit) {
            self.persist();
        }
    }

    /// Takes the result of a flush. After a failure the shard serves pulls only.
    fn flushed(&mut self, result: Result<(), String>) {
        let Shard { files, variables, peers, applier, checkpoints, out, .. } = self;
        let store = variables.store_mut();
        let is_named = checkpoints.restoring.is_some() || store.is_some();
        let of_tables = store.as_deref().map(files_of_tables).unwrap_or_default();
        let of_tables = is_named.then_some(&of_tables[..]);
        if let FlushOutcome::Failed(_) = files.flushed(store, of_tables, out, result) {
            applier.drop_jobs();
            peers.connections.keys().for_each(|&connection| out.close(connection));
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

    /// Passes the step and the restore epoch on to the answers, after a change of either.
    fn stamp_answers(&mut self) {
        self.out.stamp(self.steps.step(), self.variables.epoch);
    }
}

#[cfg(test)]
mod tests;
