//! What must hold between two inputs of a shard; asserted in tests, the simulator and the fuzzer.

use std::collections::BTreeSet;

use pushpull_common::ids::TokenId;
#[cfg(any(test, fuzzing))]
use pushpull_common::ids::{ClientEpoch, Incarnation, TaskId};

use super::Shard;
use super::parked::Wait;
#[cfg(any(test, fuzzing))]
use super::record::ShardRecord;
use super::replicas::Presence;

/// What a shard is after a kill as it was before: its own words, its clients and what each has settled
/// last, and its values.
#[cfg(any(test, fuzzing))]
#[derive(Debug, PartialEq)]
pub(crate) struct DurableState {
    record: ShardRecord,
    clients: Vec<(TaskId, ClientEpoch, Incarnation, Presence, u64)>,
    values: Vec<u8>,
    table_rows: Vec<u64>,
}

impl Shard {
    /// What is to be there after a kill, if no work is due.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn durable_state(&self) -> DurableState {
        // Lives are counted; what a step takes follows from who is there.
        let (lives, goal, applying) = (0, 0, false);
        let record = ShardRecord { lives, goal, applying, ..self.record() };
        let clients = self.replicas.keys().map(|key| {
            let client = self.replicas.client(key);
            // What is held of a step may be settled as it is taken up.
            let newest = if self.follower.is_some() { 0 } else { client.window.newest() };
            (client.task.clone(), client.epoch, client.incarnation, client.presence, newest)
        });
        let clients = clients.collect();
        let store = self.store().filter(|_| self.is_ready());
        let pieces = store.into_iter().flat_map(|store| store.before(0..store.layout().bytes()));
        let values = pieces.flatten().copied().collect();
        let tables = self.store().into_iter().flat_map(|store| store.tables());
        let table_rows = tables.map(|table| table.rows()).collect();
        DurableState { record, clients, values, table_rows }
    }

    /// Asserts the invariants.
    pub(crate) fn check_invariants(&self) {
        if let Some(store) = self.store() {
            store.check_invariants();
            store.tables().iter().for_each(|table| table.check_invariants(&self.journal));
        }
        if let Some(owner) = &self.owner {
            owner.check_invariants();
        }
        assert!(self.jobs.iter().skip(1).all(|job| !job.has_begun()), "one update at a time");
        let idle = !self.jobs.front().is_some_and(|job| job.has_begun());
        assert!(idle || self.streaming_apply.is_none(), "one draft at a time");
        let dirty = self.store().is_some_and(|store| store.is_dirty());
        assert!(
            !dirty || !idle || self.streaming_apply.is_some(),
            "what nobody works on is forgotten"
        );
        self.check_waits();
        self.check_held();
        self.check_tokens();
        #[cfg(any(test, fuzzing))]
        self.check_windows_are_saved();
    }

    /// Nobody waits for what is there.
    fn check_waits(&self) {
        let waits_for_push_slot = self.parked.any(|entry| matches!(entry.wait, Wait::PushSlot));
        if let Some(inbox) = &self.inbox {
            inbox.check_invariants();
            assert!(
                !(waits_for_push_slot && inbox.has_free()),
                "a push slot is free and somebody waits"
            );
        }
        let none_for = |client| self.owner.as_ref().is_some_and(|owner| owner.has_none_for(client));
        let in_vain = |entry: &super::Entry| {
            matches!(entry.wait, Wait::Token) && !entry.client.is_some_and(none_for)
        };
        assert!(!self.parked.any(in_vain), "a token is there and somebody waits");
        let waits_for_ready = self.parked.any(|entry| matches!(entry.wait, Wait::Ready));
        assert!(
            !(waits_for_ready && self.is_ready()),
            "the variables are ready and somebody waits"
        );
        let listens = |connection| self.conversations.contains_key(&connection);
        assert!(!self.parked.any(|entry| !listens(entry.connection)), "nobody hears the answer");
        let current = |entry: &super::Entry| {
            entry.client.is_none_or(|client| {
                let connection = self.replicas.client(client).connection;
                connection.is_none_or(|connection| connection == entry.connection)
            })
        };
        assert!(
            !self.parked.any(|entry| !current(entry)),
            "a request of a replaced connection waits"
        );
    }

    /// Every token is held by a member, or being recalled, or its push is whole; no two pushes spend one.
    fn check_tokens(&self) {
        let Some(owner) = &self.owner else { return };
        let mut whole = BTreeSet::new();
        for token in self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()) {
            assert!(whole.insert(token), "token {token} is spent twice");
        }
        for (token, holder) in owner.outstanding() {
            let present = self.replicas.client(holder).presence == Presence::Present;
            let recalled = owner.recalls().has(token);
            assert!(present || recalled || whole.contains(&token), "token {token} is lost");
        }
        let mut known: BTreeSet<TokenId> = owner.outstanding().map(|(token, _)| token).collect();
        let admitted = owner.coordinator().into_iter().flat_map(|a| a.admitted());
        known.extend(admitted.map(|grant| TokenId(grant.token)));
        assert!(whole.is_subset(&known), "a whole push spends a token that is not out");
    }
}
