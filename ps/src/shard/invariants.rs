//! The invariants of a shard between two inputs, asserted in tests, the simulator and the fuzzer.

use std::collections::BTreeSet;

#[cfg(feature = "simulation")]
use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::ShardId;
#[cfg(any(test, fuzzing))]
use pushpull_common::ids::{ClientEpoch, Incarnation, TaskId};
use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::message::Operation;

use super::Shard;
use super::request::parked_request::{ParkedRequest, WaitReason};
#[cfg(any(test, fuzzing))]
use super::shard_files::record::ShardRecord;
use super::values::applier::ShardJob;
use crate::aggregate::current_step::PerPush;
use crate::client_entry::ClientPresence;
use crate::inbox::PushArrival;

/// The state of a shard that a kill must not change: its own words, its clients with the newest
/// sequence each has settled, and its values.
#[cfg(any(test, fuzzing))]
#[derive(Debug, PartialEq)]
pub(crate) struct DurableState {
    record: ShardRecord,
    clients: Vec<(TaskId, ClientEpoch, Incarnation, ClientPresence, u64)>,
    values: Vec<u8>,
    table_rows: Vec<u64>,
}

impl Shard {
    /// Returns the state that must exist after a kill, if no work is queued.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn durable_state(&self) -> DurableState {
        // Each process increments `lives`. The goal of a step follows from the present clients.
        let lives = 0;
        let goal = 0;
        let applying = false;
        let record = ShardRecord { lives, goal, applying, ..self.record() };
        let clients = self.peers.registry.keys().map(|key| {
            let client = self.peers.registry.client(key);
            // Recovery may settle held gradients.
            let newest = if self.steps.follower.is_some() { 0 } else { client.window.newest() };
            (client.task.clone(), client.epoch, client.incarnation, client.presence, newest)
        });
        let clients = clients.collect();
        let store = self.variables.store().filter(|_| self.variables.is_ready());
        let pieces = store.into_iter().flat_map(|store| store.before(0..store.layout().bytes()));
        let values = pieces.flatten().copied().collect();
        let tables = self.variables.store().into_iter().flat_map(|store| store.tables());
        let table_rows = tables.map(|table| table.rows()).collect();
        DurableState { record, clients, values, table_rows }
    }

    /// Returns the global step as this shard knows it.
    pub(crate) fn step(&self) -> GlobalStep {
        self.steps.step()
    }

    /// Returns the number of steps applied here, and the pushes of the committed step that is not
    /// applied.
    #[cfg(feature = "simulation")]
    pub(crate) fn steps_and_due(&self) -> (u64, Option<&[u64]>) {
        self.steps.steps_and_due()
    }

    /// Returns the values before the update under way, in the order of the layout; none without
    /// variables. Elements that the update changes in place may have changed.
    #[cfg(feature = "simulation")]
    pub(crate) fn committed_values(&self) -> Vec<u8> {
        let store = self.variables.ready();
        store.map_or_else(Vec::new, |store| {
            store.before(0..store.layout().bytes()).flatten().copied().collect()
        })
    }

    /// Returns the effects of a coordinator that have settled here; `None` if it is not open.
    #[cfg(feature = "simulation")]
    pub(crate) fn settled_effects(&self, name: &str) -> Option<EffectWindow> {
        let coordinators = self.steps.coordinators.query(name).ok()?;
        EffectWindow::of(coordinators.settled, coordinators.window)
    }

    /// Returns the tokens whose pushes are complete here.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn whole_tokens(&self) -> PerPush<TokenId> {
        self.intake.whole_tokens()
    }

    /// Asserts the invariants.
    pub(crate) fn check_invariants(&self) {
        let stamp = self.out.stamped(Envelope::default());
        let mut participants: BTreeSet<ShardId> = self
            .variables
            .store()
            .into_iter()
            .flat_map(|store| store.catalogue().shards())
            .collect();
        participants.extend(self.steps.owner.iter().map(|_| self.id));
        assert!(participants.iter().eq(&self.steps.participants), "{:?}", self.steps.participants);
        assert_eq!((stamp.step, stamp.restore_epoch), (self.steps.step(), self.variables.epoch));
        if let Some(store) = self.variables.store() {
            store.check_invariants();
            store.tables().iter().for_each(|table| table.check_invariants(&self.files.journal));
        }
        if let Some(owner) = &self.steps.owner {
            owner.check_invariants();
        }
        assert!(
            self.applier.jobs.iter().skip(1).all(|job| !job.has_begun()),
            "one update at a time"
        );
        let idle = !self.applier.jobs.front().is_some_and(|job| job.has_begun());
        assert!(idle || self.applier.streaming.is_none(), "one dirty update at a time");
        let dirty = self.variables.store().is_some_and(|store| store.is_dirty());
        assert!(
            !dirty || !idle || self.applier.streaming.is_some(),
            "shadows without an update are discarded"
        );
        self.check_waits();
        self.check_held();
        self.check_tokens();
        #[cfg(any(test, fuzzing))]
        {
            self.check_windows_are_saved();
            self.check_coordinators_are_saved();
        }
    }

    /// S-6, S-7: asserts that an input that is said to have changed nothing has changed no durable
    /// word, and has freed nothing that a request waits for.
    pub(super) fn check_unchanged(&mut self) {
        self.check_waits();
        self.check_all_is_saved();
    }

    /// S-7: asserts that no request waits for something that is available.
    fn check_waits(&self) {
        let waits_for_push_slot =
            self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot));
        if let Some(inbox) = &self.intake.inbox {
            inbox.check_invariants();
            assert!(
                !(waits_for_push_slot && inbox.has_free()),
                "a request waits although a push slot is free"
            );
        }
        let none_for =
            |client| self.steps.owner.as_ref().is_some_and(|owner| owner.has_none_for(client));
        let in_vain = |entry: &ParkedRequest| {
            matches!(entry.wait, WaitReason::Token) && !entry.request.client.is_some_and(none_for)
        };
        assert!(!self.peers.parked.any(in_vain), "a request waits although a token is available");
        let waits_for_end = self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::End));
        assert!(
            !(waits_for_end && self.ended_for_all().is_some()),
            "a request waits although the training has ended on all workers"
        );
        let waits_for_ready =
            self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::Ready));
        assert!(
            !(waits_for_ready && self.variables.is_ready()),
            "a request waits although the variables are ready"
        );
        let served = self.steps.served_step();
        assert!(
            !self.peers.parked.any(|entry| entry.wait.is_served(served)),
            "a pull waits although its step is served"
        );
        let is_behind = self.steps.coordinator().is_some_and(|it| it.is_behind());
        assert!(
            is_behind || !self.checkpoints.requests.are_due(),
            "a save waits although it may begin"
        );
        let listens = |connection| self.peers.connections.contains_key(&connection);
        assert!(
            !self.peers.parked.any(|entry| !listens(entry.request.connection)),
            "a parked request has no connection"
        );
        let current = |entry: &ParkedRequest| {
            entry.request.client.is_none_or(|client| {
                let connection = self.peers.registry.client(client).connection;
                connection.is_none_or(|connection| connection == entry.request.connection)
            })
        };
        assert!(
            !self.peers.parked.any(|entry| !current(entry)),
            "a request of a replaced connection waits"
        );
    }

    /// S-4: asserts that the holder of every token is present, or the token is being recalled, or its
    /// push is complete, and that no two pushes spend one token.
    fn check_tokens(&self) {
        let Some(owner) = &self.steps.owner else { return };
        let mut whole = BTreeSet::new();
        for token in self.intake.inbox.iter().flat_map(|inbox| inbox.whole_tokens()) {
            assert!(whole.insert(token), "token {token} is spent twice");
        }
        for out in owner.ledger().iter() {
            let token = out.issued.token;
            let holder = out.holder;
            let present = self.peers.registry.client(holder).presence == ClientPresence::Present;
            let tokens = owner.asynchronous_tokens();
            let recalled = tokens.is_some_and(|tokens| tokens.recalls.has(token));
            assert!(present || recalled || whole.contains(&token), "token {token} is lost");
        }
        let mut known: BTreeSet<TokenId> =
            owner.ledger().iter().map(|out| out.issued.token).collect();
        let admitted = owner.coordinator().into_iter().flat_map(|a| a.current.admitted());
        known.extend(admitted.map(|grant| TokenId(grant.token)));
        assert!(whole.is_subset(&known), "a whole push spends a token that is not out");
    }

    /// Asserts the invariants of complete pushes on the step owner.
    fn check_held(&self) {
        let coordinator = self.steps.coordinator();
        let (Some(coordinator), Some(inbox)) = (coordinator, &self.intake.inbox) else { return };
        for token in inbox.whole_tokens() {
            assert!(coordinator.is_of_use(token.0), "the push of token {token} is over");
        }
        let passed = self
            .steps
            .follower
            .as_ref()
            .is_some_and(|follower| follower.step() == coordinator.step());
        for grant in coordinator.current.admitted().iter().filter(|_| !passed) {
            let whole = inbox.whole_tokens().any(|token| token.0 == grant.token);
            assert!(whole, "the push of token {} is admitted but not complete here", grant.token);
        }
        let due = self.steps.follower.as_ref().and_then(|follower| follower.tokens_to_apply());
        let job = self.applier.jobs.iter().any(|job| matches!(job, ShardJob::Step(_)));
        let trains = self.files.poisoned().is_none();
        assert_eq!(due.is_some() && trains, job, "the committed step has a job");
        let pushes = self.applier.jobs.iter().filter_map(|job| inbox.arrival(job.push_slot()?));
        let by_itself = |push: &PushArrival| push.operation == Operation::Gradient {};
        assert!(!pushes.into_iter().any(by_itself), "a gradient is applied outside its step");
    }
}
