//! [`LastPulls`]: the values that stale gradients were computed from.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pushpull_store::arena::{Budget, Reservation};
use pushpull_store::store::Store;

use crate::client_key::ClientKey;

/// The values of a client's last pull, from which its next gradient is computed.
#[derive(Debug)]
pub(super) struct PulledValues {
    /// The values in the shard's layout, aligned for every type.
    words: Vec<u64>,
    /// How many gradients the shard had applied to them.
    gradients: u64,
    /// The bytes count towards the memory of the task.
    _reservation: Reservation,
}

impl PulledValues {
    pub(super) fn bytes(&self, range: &Range<u64>) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[range.start as usize..range.end as usize]
    }

    fn fill(&mut self, store: &Store, gradients: u64) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        let mut done = 0;
        for now in store.before(0..store.layout().bytes()) {
            let piece = done..done + now.len();
            bytes[piece.clone()].copy_from_slice(now);
            done = piece.end;
        }
        self.gradients = gradients;
    }
}

/// The last pull of each client, where stale gradients are compensated. It is not in the arena, and
/// is lost with the process.
#[derive(Debug, Default)]
pub(in crate::shard) struct LastPulls(BTreeMap<ClientKey, Arc<PulledValues>>);

impl LastPulls {
    /// Stores the current values for a client, in place of its earlier ones. Stores nothing if
    /// there is no memory.
    pub(in crate::shard) fn keep(
        &mut self,
        client: ClientKey,
        store: &Store,
        gradients: u64,
        budget: &Budget,
    ) {
        let previous = self.0.remove(&client);
        // Values that the current update uses are not overwritten.
        let values = previous.and_then(Arc::into_inner).or_else(|| {
            let bytes = store.layout().bytes();
            let reservation = budget.reserve_unpromised(bytes).ok()?;
            let words = vec![0; bytes.div_ceil(8) as usize];
            Some(PulledValues { words, gradients, _reservation: reservation })
        });
        if let Some(mut values) = values {
            values.fill(store, gradients);
            self.0.insert(client, Arc::new(values));
        }
    }

    /// Returns the client's values, if a gradient was computed from them.
    pub(super) fn of(
        &self,
        client: Option<ClientKey>,
        read: Option<u64>,
    ) -> Option<&Arc<PulledValues>> {
        self.0.get(&client?).filter(|values| Some(values.gradients) == read)
    }

    /// Drops the values of a client that is absent.
    pub(in crate::shard) fn drop_client(&mut self, client: ClientKey) {
        self.0.remove(&client);
    }

    /// Drops all values, because the variables are forgotten.
    pub(in crate::shard) fn clear(&mut self) {
        self.0.clear();
    }
}
