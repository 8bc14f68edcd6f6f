//! The declaration of variables by the chief, and their first values.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::message::Declared;
use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_store::store::Store;

use crate::aggregate::token_issuer::TokenIssuer;
use crate::error::StorageError;
use crate::event::Event;
use crate::inbox::Inbox;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};
use crate::shard::request::{PeerRequest, storage_refusal};
use crate::shard::shard_files::generation::Generation;
use crate::shard::values::variables::VariablesState;

impl Shard {
    /// Handles the declaration of a chief, whose catalogue has arrived.
    pub(in crate::shard) fn declare(
        &mut self,
        request: &PeerRequest,
        digest: [u8; 32],
        bytes: &[u8],
    ) {
        match self.try_declare(digest, bytes) {
            Ok(()) => {
                self.out.chief_accepted();
                let state = self.variables.catalogue_state();
                let restore_epoch = self.variables.epoch;
                let trained = self.steps.owner.as_ref().is_some_and(TokenIssuer::has_trained);
                let declared = Declared { state, restore_epoch, trained };
                request.answer(&mut self.out, declared.into());
            }
            Err(refusal) => {
                let connection = request.connection;
                let asked = "declare the variables";
                self.out.refuse_chief(connection, request.envelope, self.id, asked, refusal);
            }
        }
    }

    fn try_declare(&mut self, digest: [u8; 32], bytes: &[u8]) -> Result<(), Refusal> {
        if self.checkpoints.restoring.is_some() {
            // The restore that an older chief requested is under way. The chief declares again after
            // a pause.
            return Err(Refusal::NotInitialized {});
        }
        let is_busy = !self.applier.jobs.is_empty();
        match self.variables.check_declaration(digest, bytes, is_busy)? {
            None => Ok(()),
            Some(catalogue) => {
                let catalogue = Arc::new(catalogue);
                self.replace_variables(catalogue.clone()).map_err(storage_refusal)?;
                self.report_skew(&catalogue);
                Ok(())
            }
        }
    }

    /// Reports an uneven placement. The step owner does, because each shard sees the whole of it.
    fn report_skew(&mut self, catalogue: &Catalogue) {
        if self.steps.owner.is_none() {
            return;
        }
        let tasks: Vec<u32> = self.config.cluster.ps_tasks().map(|(index, _)| index).collect();
        if let Some(event) = Event::skewed_placement(catalogue, &tasks) {
            self.counters.skewed_placements.add(1);
            self.out.push(ShardOutput::Event(event));
        }
    }

    /// Replaces the variables by those of a catalogue, without values.
    fn replace_variables(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        let generation = Generation::new(self.id, &self.config, catalogue);
        // The check covers everything that the shard needs, so that a refusal names the sum. It
        // comes first, so that a refusal changes nothing.
        let need = generation.bytes_min(self.steps.is_synchronous());
        let reserved = self.variables.store().map_or(0, Store::reserved);
        let on_demand = self.intake.inbox.as_ref().map_or(0, Inbox::on_demand_bytes);
        let limit = self.files.budget.left() + reserved + on_demand;
        if need > limit {
            let made_of = generation.made_of(need);
            return Err(StorageError::ModelDoesNotFit { need, limit, made_of });
        }
        self.replace_generation(generation)
    }

    /// Forgets the variables and their files, creates those of a new generation, and switches to
    /// them.
    pub(in crate::shard) fn replace_generation(
        &mut self,
        generation: Generation,
    ) -> Result<(), StorageError> {
        // The memory of the earlier variables is released first, because both may not fit. What
        // takes memory as it needs it, such as a push slot of another shard, leaves it to these.
        let need = generation.bytes_min(self.steps.is_synchronous());
        let _kept = self.files.budget.promise(need);
        self.forget_variables()?;
        let (store, inbox) = generation.create(&mut self.files, self.intake.next_push_slot)?;
        self.intake.inbox = Some(inbox);
        self.steps.count_participants(store.catalogue().shards());
        self.variables.install(VariablesState::Declared(store), generation.rules);
        Ok(())
    }

    /// The initial values are complete.
    pub(in crate::shard) fn initialized(
        &mut self,
        connection: u64,
        request: Envelope,
        epoch: RestoreEpoch,
    ) {
        let step = self.steps.step();
        self.variables.initialized(&mut self.files.journal, step, epoch);
        self.stamp_answers();
        self.announce_ready(connection, request);
    }

    /// Forgets the variables durably, and then removes their files.
    pub(in crate::shard) fn forget_variables(&mut self) -> Result<(), StorageError> {
        self.variables.forget();
        if let Some(owner) = self.steps.owner.as_mut() {
            // Its tokens have been forgotten. A restore brings the position of its checkpoint.
            owner.set_data(None);
        }
        self.steps.coordinators.clear();
        self.steps.set_participants(std::iter::empty());
        if let Some(inbox) = self.intake.inbox.take() {
            self.intake.next_push_slot = inbox.next_number();
        }
        self.persist();
        self.files.remove_forgotten()
    }

    /// Computes the initial values of declared variables, or answers if they have values.
    pub(super) fn initialize(&mut self, request: PeerRequest, epoch: RestoreEpoch) {
        match &self.variables.state {
            VariablesState::Absent => request.refuse(&mut self.out, Refusal::NotInitialized {}),
            VariablesState::Ready(_) => {
                request.answer(&mut self.out, self.variables.ready_message());
            }
            VariablesState::Declared(_) if self.applier.is_initializing() => {
                // A chief that reconnected asks again. The second request waits for the same
                // initialization, however long it takes.
                let request = PeerRequest { client: None, deadline: None, ..request };
                let entry = ParkedRequest { request, wait: WaitReason::Ready };
                self.peers.park(&mut self.out, entry);
            }
            VariablesState::Declared(_) if !self.variables.may_begin(epoch, RestoreEpoch(0)) => {
                request.refuse(&mut self.out, self.variables.other_epoch(epoch));
            }
            VariablesState::Declared(_) => {
                self.applier.begin_initialization(request.connection, request.envelope, epoch);
            }
        }
    }

    /// Answers once all variables have values.
    pub(super) fn await_ready(&mut self, request: PeerRequest) {
        match self.variables.is_ready() {
            true => request.answer(&mut self.out, self.variables.ready_message()),
            false => {
                let entry = ParkedRequest { request, wait: WaitReason::Ready };
                self.peers.park(&mut self.out, entry);
            }
        }
    }

    /// Answers the chief that has made the variables ready, and the requests that wait for that.
    pub(super) fn announce_ready(&mut self, connection: u64, request: Envelope) {
        self.out.answer(connection, request, self.variables.ready_message());
        let ready = self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::Ready));
        for ParkedRequest { request, .. } in ready {
            request.answer(&mut self.out, self.variables.ready_message());
        }
    }
}
