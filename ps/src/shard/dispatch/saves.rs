//! Checkpoints: saves of this shard's part, and of all shards on the step owner.
//!
//! In asynchronous mode the step owner cuts when it orders the save, so that its part has exactly
//! the step in the checkpoint's name. Every other shard cuts when its part is requested.
//!
//! In synchronous mode all shards cut after the same step. The step owner sends `KeepCut` over the
//! connections that also carry commits, when all shards have applied that step and none can have
//! applied the next. A shard that connects during the save receives it before the next commit. A
//! shard keeps its cut until its part is requested, and training continues meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pushpull_checkpoint::{CheckpointFault, CheckpointName, CheckpointTraining, DataEntry};
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal, message};

use crate::aggregate::token_issuer::TokenIssuer;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::checkpoints::NO_PLACE;
use crate::shard::checkpoints::save_requests::{CUT_WAIT_MAX, SaveRequest, has_expired};
use crate::shard::file_work::RESTORED_LIMIT;
use crate::shard::file_work::saver_order::{SaveRequester, SaverEvent, SaverOrder};
use crate::shard::file_work::shard_save::{CheckpointCut, ShardSave};
use crate::shard::output::ShardOutput;
use crate::shard::request::PeerRequest;
use crate::shard::values::variables::VariablesState;

impl Shard {
    /// Takes a cut of this shard, and starts to write it to a checkpoint.
    pub(super) fn save_shard(&mut self, request: &PeerRequest, name: &str) {
        match self.begin_shard_save(request, name) {
            Ok(save) => self.out.push(ShardOutput::SaveShard(Box::new(save))),
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }

    fn begin_shard_save(
        &mut self,
        request: &PeerRequest,
        name: &str,
    ) -> Result<ShardSave, Refusal> {
        let unfit = || CheckpointFault::Unfit(format!("{name:?} is not the name of a checkpoint"));
        let name = name.parse::<CheckpointName>().map_err(|_| unfit().refusal())?;
        self.checkpoints.check_place()?;
        let store = self.variables.ready().ok_or(Refusal::NotInitialized {})?;
        let catalogue = store.catalogue().clone();
        self.checkpoints.check_idle()?;
        let cut = self.cut_for(request.since, name);
        let cut = cut.map_err(|cause| CheckpointFault::Unavailable(cause).refusal())?;
        let training = CheckpointTraining::new(&catalogue, &self.variables.rules);
        Ok(self.checkpoints.begin_save(request, name, catalogue, training, cut))
    }

    /// Returns the cut for this checkpoint, or why there is none.
    fn cut_for(&mut self, now: Instant, name: CheckpointName) -> Result<CheckpointCut, String> {
        let step = GlobalStep(name.global_step);
        if self.steps.counts_steps() {
            let kept = self.checkpoints.kept_cut.take_if(|cut| cut.step == step);
            // At the same step, a new cut also has the values that were assigned since.
            let found = self.steps.step();
            if found != step {
                let none =
                    || format!("it has values of step {found}, and kept none of step {step}");
                return kept.ok_or_else(none);
            }
        }
        self.cut(now, step).ok_or_else(|| "the variables have no values".to_owned())
    }

    /// Cuts the current values, for a checkpoint of a global step that the shard need not know.
    fn cut(&mut self, now: Instant, of: GlobalStep) -> Option<CheckpointCut> {
        let Shard { variables, peers, steps, .. } = self;
        let step = steps.step();
        let VariablesState::Ready(store) = &mut variables.state else { return None };
        let memory_needed = Arc::new(AtomicBool::new(false));
        Some(CheckpointCut {
            step,
            image: store.image(of.0.max(step.0).min(RESTORED_LIMIT), memory_needed.clone()),
            memory_needed,
            version: variables.version,
            gradients: variables.gradients,
            clients: peers.registry.windows(),
            data: steps.owner.as_ref().and_then(data_entry),
            coordinators: steps.coordinators.entries().map(|(_, entry)| entry.into()).collect(),
            since: now,
        })
    }

    /// Keeps a cut of the values after this step, by order of the step owner.
    pub(super) fn keep_cut(&mut self, now: Instant, step: GlobalStep) {
        if self.steps.counts_steps() && self.steps.step() == step {
            self.checkpoints.kept_cut = self.cut(now, step);
        }
    }

    /// Keeps a cut of the current values under any step.
    #[cfg(test)]
    pub(in crate::shard) fn keep_cut_as_of(&mut self, now: Instant, step: GlobalStep) {
        self.checkpoints.kept_cut = self.cut(now, step).map(|cut| CheckpointCut { step, ..cut });
    }

    /// Requests a checkpoint of all shards, or refuses the request.
    pub(super) fn save(&mut self, now: Instant, requester: SaveRequester, user: Vec<u8>) {
        let requested = match (&self.steps.owner, &self.config.checkpoints) {
            (None, _) => Err(CheckpointFault::Unfit(format!("{} does not own the step", self.id))),
            (_, None) => Err(CheckpointFault::Unfit(NO_PLACE.to_owned())),
            _ if !self.variables.is_ready() => Err(CheckpointFault::NotInitialized),
            _ => self.checkpoints.requests.add(now, requester, user),
        };
        if let Err(fault) = requested {
            self.checkpoints.saved(&mut self.out, requester, Err(fault));
        }
    }

    /// Begins the next requested save if none is running and all shards have applied the same
    /// steps.
    pub(in crate::shard) fn begin_requested_save(&mut self, now: Instant) {
        let is_behind = self.steps.coordinator().is_some_and(|it| it.is_behind());
        if is_behind || !self.checkpoints.requests.are_due() {
            return;
        }
        let Some(request) = self.checkpoints.requests.begin() else { return };
        let SaveRequest { requester, user, .. } = request;
        let step = self.steps.step();
        if self.steps.is_synchronous() {
            self.steps.shards.order_cut(&mut self.out, step);
        }
        self.keep_cut(now, step);
        if let Some(catalogue) = self.variables.store().map(|store| store.catalogue().clone()) {
            let epoch = self.variables.epoch;
            let order = SaverOrder::Save { requester, user, catalogue, epoch, step };
            self.out.push(ShardOutput::SaverOrder(order));
        }
    }

    /// Drops a cut and refuses saves that have waited for too long. Returns what has changed.
    pub(super) fn expire_saves(&mut self, now: Instant) -> Changes {
        let kept = self.checkpoints.kept_cut.as_ref().map(|cut| cut.since);
        if !self.checkpoints.requests.have_expired(now, kept) {
            return Changes::NONE;
        }
        let awaited = self.awaited_step(now).unwrap_or_default().text;
        self.checkpoints.kept_cut.take_if(|cut| has_expired(now, cut.since));
        for requester in self.checkpoints.requests.take_expired(now) {
            let error = format!("it has waited {CUT_WAIT_MAX:?} for {awaited}");
            let fault = CheckpointFault::Unavailable(error);
            self.checkpoints.saved(&mut self.out, requester, Err(fault));
        }
        Changes::ALL
    }

    /// Orders a search for the newest sound checkpoint.
    pub(super) fn find_checkpoint(&mut self, request: &PeerRequest) {
        if self.steps.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            let refusal = Refusal::Unsupported { kind: request.kind, detail };
            return request.refuse(&mut self.out, refusal);
        }
        let connection = request.connection;
        let request = request.envelope;
        match self.config.checkpoints {
            Some(_) => {
                let order = SaverOrder::Find { connection, request };
                self.out.push(ShardOutput::SaverOrder(order));
            }
            None => self.checkpoint_found((connection, request), Ok((None, RestoreEpoch(0)))),
        }
    }

    /// Takes an event of the saver.
    pub(in crate::shard) fn on_saver_event(&mut self, now: Instant, event: SaverEvent) {
        match event {
            SaverEvent::Found { connection, request, result, passed_over, named } => {
                self.checkpoints.passed_over = passed_over;
                self.checkpoint_found((connection, request), result.map(|it| (it, named)));
            }
            SaverEvent::SaveRequested { ticket, user } => {
                self.save(now, SaveRequester::Ticket(ticket), user);
            }
            SaverEvent::Saved { requester, result } => {
                // The saver keeps the status of periodic saves.
                if !requester.is_periodic() {
                    self.checkpoints.saved(&mut self.out, requester, result);
                }
                self.checkpoints.requests.end(now);
                // The saver may not have requested it.
                self.checkpoints.kept_cut = None;
                self.steps.shards.forget_cut();
            }
        }
    }

    /// Answers with the checkpoint that was found.
    fn checkpoint_found(
        &mut self,
        of: (u64, Envelope),
        result: Result<(Option<CheckpointId>, RestoreEpoch), CheckpointFault>,
    ) {
        match result {
            Ok((checkpoint, named)) => {
                let found = message::CheckpointFound { checkpoint, named };
                self.out.answer(of.0, of.1, found.into());
            }
            Err(fault) => {
                let (connection, request) = of;
                let asked = "look for a checkpoint";
                self.out.refuse_chief(connection, request, self.id, asked, fault.refusal());
            }
        }
    }
}

/// Returns the data position of the committed values: the batches of tokens, and of pushes that are
/// admitted to the next step, are not spent.
fn data_entry(owner: &TokenIssuer) -> Option<DataEntry> {
    let (data, unspent) = owner.unspent_batches()?;
    let unspent = unspent.into_iter().map(|batch| batch.0).collect();
    Some(DataEntry::new(data.set(), data.next().0, unspent))
}
