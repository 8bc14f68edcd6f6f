//! The data position: which batches of a data set are granted, and which will be granted next.
//!
//! The step owner grants a batch with each token. The batch is *spent* with the token's gradient:
//! in the same commit. A token that is taken back, or whose gradient is stale, gives its batch
//! back, and another token gets it. So every batch of an epoch counts exactly once.
//!
//! Free batches are granted before new ones, so that epochs end early. Each client reserves one
//! batch, to read its samples ahead of the grant. A reservation is a hint: it is not durable, and
//! another client takes the batch if no other is left.

use std::collections::BTreeMap;

use pushpull_common::data_set::{DataSet, SampleRange, UNSPENT_BATCHES_MAX};
use pushpull_common::status::DataStatus;
use pushpull_store::planted::{Bug, PlantedBugs};

use crate::client_key::ClientKey;

/// A batch of a data set, by its number among the batches of all epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DataBatch(pub(crate) u64);

/// Who asks for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchTaker {
    /// A client that takes any batch.
    Client(ClientKey),
    /// The replica of this rank among `ranks`, where every run adds the same gradients in the same
    /// order: it takes the batches whose number is its rank modulo `ranks`.
    Rank { rank: u32, ranks: u32 },
}

/// The batches of a data set that no token holds and none has spent.
///
/// Invariants:
///
/// - A free batch is before `next`. No token holds it or has spent it.
/// - A client reserves at most one batch.
/// - At most [`UNSPENT_BATCHES_MAX`] batches before `next` are free or held.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DataPosition {
    set: DataSet,
    /// The first batch that was neither granted nor reserved.
    next: DataBatch,
    /// The batches before `next` that can be granted, with the clients that reserve them.
    free: BTreeMap<DataBatch, Option<ClientKey>>,
    /// The number of batches that tokens and admitted pushes hold.
    held: usize,
    /// Whether the position has changed since the last commit.
    changed: bool,
    planted: PlantedBugs,
}

impl DataPosition {
    /// Creates the position before the first batch.
    pub(crate) fn new(set: DataSet, planted: PlantedBugs) -> DataPosition {
        DataPosition::restored(set, DataBatch(0), [], planted)
    }

    /// Creates a saved position: its first batch that was not granted, and the free ones before.
    pub(crate) fn restored(
        set: DataSet,
        next: DataBatch,
        free: impl IntoIterator<Item = DataBatch>,
        planted: PlantedBugs,
    ) -> DataPosition {
        let free = free.into_iter().map(|batch| (batch, None)).collect();
        DataPosition { set, next, free, held: 0, changed: true, planted }
    }

    /// The declared data set.
    pub(crate) fn set(&self) -> &DataSet {
        &self.set
    }

    /// Continues with more epochs of the same data.
    pub(crate) fn extend(&mut self, set: DataSet) {
        debug_assert!(set.extends(&self.set), "the batches before keep their samples");
        self.set = set;
        self.changed = true;
    }

    /// The first batch that was neither granted nor reserved.
    pub(crate) fn next(&self) -> DataBatch {
        self.next
    }

    /// Yields the batches before [`DataPosition::next`] that can be granted, in ascending order.
    pub(crate) fn free(&self) -> impl ExactSizeIterator<Item = DataBatch> {
        self.free.keys().copied()
    }

    /// Returns the samples of a batch.
    pub(crate) fn range(&self, batch: DataBatch) -> SampleRange {
        self.set.range(batch.0)
    }

    /// Returns the position as users see it.
    pub(crate) fn status(&self) -> DataStatus {
        let last = self.set.all_batches().saturating_sub(1);
        DataStatus {
            name: self.set.name().to_owned(),
            epoch: self.range(DataBatch(self.next.0.min(last))).epoch,
            begun: self.next.0,
            unspent: self.unspent() as u64,
        }
    }

    /// Returns whether no batch can be granted to anybody until one is given back.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.free.is_empty() && self.next.0 >= self.set.all_batches()
    }

    /// Returns whether [`DataPosition::take`] grants a batch.
    pub(crate) fn has_batch_for(&self, taker: BatchTaker) -> bool {
        match taker {
            BatchTaker::Client(_) => !self.free.is_empty() || self.has_new(),
            BatchTaker::Rank { rank, ranks } => {
                let of_rank = |batch: &DataBatch| batch.0 % u64::from(ranks) == u64::from(rank);
                self.free().any(|batch| of_rank(&batch)) || self.new_of_rank(rank, ranks).is_some()
            }
        }
    }

    /// Returns the first new batch of a rank.
    fn new_of_rank(&self, rank: u32, ranks: u32) -> Option<DataBatch> {
        let rank = u64::from(rank);
        let ranks = u64::from(ranks);
        let ahead = (rank + ranks - self.next.0 % ranks) % ranks;
        let batch = DataBatch(self.next.0 + ahead);
        (batch.0 < self.set.all_batches() && self.unspent() + ahead as usize <= UNSPENT_BATCHES_MAX)
            .then_some(batch)
    }

    /// Returns the number of batches before [`DataPosition::next`] that are free or held.
    pub(crate) fn unspent(&self) -> usize {
        self.free.len() + self.held
    }

    /// Grants a batch.
    ///
    /// A client is granted the first free batch that nobody reserves, else the first that it
    /// reserves itself, else a new one, else the last that another client reserves.
    pub(crate) fn take(&mut self, taker: BatchTaker) -> Option<DataBatch> {
        let batch = match taker {
            BatchTaker::Client(client) => {
                let of = |who: Option<ClientKey>| {
                    self.free.iter().find(|&(_, by)| *by == who).map(|(&batch, _)| batch)
                };
                let free = of(None).or_else(|| of(Some(client)));
                free.or_else(|| self.advance()).or_else(|| self.free.keys().copied().next_back())?
            }
            BatchTaker::Rank { rank, ranks } => {
                let of_rank = |batch: &DataBatch| batch.0 % u64::from(ranks) == u64::from(rank);
                let free = self.free().find(of_rank);
                match free {
                    Some(batch) => batch,
                    None => {
                        let batch = self.new_of_rank(rank, ranks)?;
                        while self.next <= batch
                            && let Some(skipped) = self.advance()
                        {
                            self.free.insert(skipped, None);
                        }
                        batch
                    }
                }
            }
        };
        let unreserved = self.free.remove(&batch) == Some(None);
        if self.planted.has(Bug::GrantReturnedBatchTwice) && unreserved {
            self.free.insert(batch, Some(ClientKey(u32::MAX)));
        }
        self.held += 1;
        self.changed = true;
        Some(batch)
    }

    /// Counts a batch that a token or an admitted push held before a restart.
    pub(crate) fn restore_held(&mut self, batch: DataBatch) {
        // One of several transactions may name a batch as free that a later one grants.
        self.free.remove(&batch);
        self.held += 1;
    }

    /// Gives a held batch back, to be granted again.
    pub(crate) fn put_back(&mut self, batch: DataBatch) {
        self.free.insert(batch, None);
        self.held = self.held.saturating_sub(1);
        self.changed = true;
    }

    /// Spends a held batch.
    pub(crate) fn spend(&mut self) {
        self.held = self.held.saturating_sub(1);
        self.changed = true;
    }

    /// Returns the batch that the holder of this one will probably be granted next, and reserves
    /// it. A rank's next batch needs no reservation.
    pub(crate) fn ahead(
        &mut self,
        holder: ClientKey,
        held: DataBatch,
        ranks: Option<u32>,
    ) -> Option<DataBatch> {
        match ranks {
            Some(ranks) => Some(DataBatch(held.0 + u64::from(ranks)))
                .filter(|next| next.0 < self.set.all_batches()),
            None => self.reserved(holder).or_else(|| {
                let batch = self.advance()?;
                self.free.insert(batch, Some(holder));
                Some(batch)
            }),
        }
    }

    /// Returns the batch that this client reserves.
    pub(crate) fn reserved(&self, client: ClientKey) -> Option<DataBatch> {
        self.free.iter().find(|&(_, by)| *by == Some(client)).map(|(&batch, _)| batch)
    }

    /// Drops the reservations of a client that has left, is lost, or has begun again.
    pub(crate) fn forget(&mut self, client: ClientKey) {
        self.free.values_mut().filter(|by| **by == Some(client)).for_each(|by| *by = None);
    }

    /// Returns the next new batch, and moves past it.
    fn advance(&mut self) -> Option<DataBatch> {
        let batch = self.next;
        let new = self.has_new();
        self.next.0 += u64::from(new);
        self.changed |= new;
        new.then_some(batch)
    }

    /// Returns whether a planted bug counts held batches as spent.
    pub(crate) fn spends_early(&self) -> bool {
        self.planted.has(Bug::SpendBatchEarly)
    }

    fn has_new(&self) -> bool {
        self.next.0 < self.set.all_batches() && self.unspent() < UNSPENT_BATCHES_MAX
    }

    /// Returns whether the position has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Asserts the invariants, given the batches of tokens and of admitted pushes; for tests and
    /// the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self, held: impl Iterator<Item = DataBatch>) {
        let held: Vec<DataBatch> = held.collect();
        assert_eq!(held.len(), self.held, "the held batches are counted");
        assert!(self.unspent() <= UNSPENT_BATCHES_MAX);
        let mut seen = std::collections::BTreeSet::new();
        for batch in self.free().chain(held) {
            assert!(batch < self.next, "{batch:?} is before {:?}", self.next);
            assert!(seen.insert(batch), "{batch:?} is free or held once");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const A: BatchTaker = BatchTaker::Client(ClientKey(0));
    const B: BatchTaker = BatchTaker::Client(ClientKey(1));

    /// Two epochs of four batches, the last of which is short.
    fn position() -> DataPosition {
        let set = DataSet::new("train", 10, 3).unwrap().epochs(2);
        DataPosition::new(set, PlantedBugs::default())
    }

    fn taken(position: &mut DataPosition, taker: BatchTaker) -> Option<u64> {
        assert_eq!(position.has_batch_for(taker), position.clone().take(taker).is_some());
        position.take(taker).map(|batch| batch.0)
    }

    #[test]
    fn batches_are_granted_in_order_across_epochs_until_the_end() {
        let mut position = position();
        let batches: Vec<u64> = std::iter::from_fn(|| taken(&mut position, A)).collect();
        assert_eq!(batches, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(position.is_exhausted());
        let last = position.range(DataBatch(7));
        assert_eq!(last, SampleRange { epoch: 1, start: 9, len: 1 });
    }

    #[test]
    fn a_batch_that_is_given_back_is_granted_first() {
        let mut position = position();
        assert_eq!([taken(&mut position, A), taken(&mut position, B)], [Some(0), Some(1)]);
        position.put_back(DataBatch(1));
        position.put_back(DataBatch(0));
        let batches: Vec<_> = (0..3).map(|_| taken(&mut position, B)).collect();
        assert_eq!(batches, [Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn another_client_takes_a_reserved_batch_only_when_no_other_is_left() {
        let mut position = position();
        let a = ClientKey(0);
        let b = ClientKey(1);
        assert_eq!(taken(&mut position, A), Some(0));
        for _ in 0..2 {
            assert_eq!(position.ahead(a, DataBatch(0), None), Some(DataBatch(1)));
        }
        assert_eq!(position.ahead(b, DataBatch(0), None), Some(DataBatch(2)));
        let others: Vec<_> = (0..6).map(|_| taken(&mut position, B)).collect();
        assert_eq!(others, [2, 3, 4, 5, 6, 7].map(Some));
        assert_eq!(position.ahead(b, DataBatch(7), None), None);
        let mut other = position.clone();
        assert_eq!([taken(&mut position, A), taken(&mut other, B)], [Some(1), Some(1)]);
        assert!(position.is_exhausted());
        position.put_back(DataBatch(7));
        assert_eq!(taken(&mut position, A), Some(7));
    }

    #[test]
    fn the_reservations_of_a_lost_client_are_granted_first() {
        let mut position = position();
        let a = ClientKey(0);
        position.ahead(a, DataBatch(0), None);
        assert_eq!(taken(&mut position, B), Some(1));
        position.forget(a);
        assert_eq!(taken(&mut position, B), Some(0));
    }

    #[test]
    fn each_rank_takes_its_own_batches_in_any_order_of_requests() {
        let rank = |rank| BatchTaker::Rank { rank, ranks: 3 };
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut position = position();
            let ahead = position.ahead(ClientKey(9), DataBatch(4), Some(3));
            assert_eq!(ahead, Some(DataBatch(7)));
            let mut by_rank = [vec![], vec![], vec![]];
            for _ in 0..4 {
                for who in order {
                    by_rank[who as usize].extend(taken(&mut position, rank(who)));
                }
            }
            assert_eq!(by_rank, [vec![0, 3, 6], vec![1, 4, 7], vec![2, 5]]);
            assert!(position.is_exhausted());
            position.put_back(DataBatch(4));
            assert_eq!(taken(&mut position, rank(0)), None);
            assert_eq!(taken(&mut position, rank(1)), Some(4));
        }
    }

    proptest::proptest! {
        /// Free batches, batches of tokens and spent batches make up all that was granted, each
        /// once.
        #[test]
        fn every_batch_is_free_held_or_spent_once(
            events in proptest::collection::vec((0_u8..8, 0_u32..3, 0_usize..8), 0..200),
        ) {
            let set = DataSet::new("train", 50, 3).unwrap().epochs(4);
            let mut position = DataPosition::new(set, PlantedBugs::default());
            let mut held = Vec::new();
            let mut spent = BTreeSet::new();
            for (operation, client, which) in events {
                let client = ClientKey(client);
                match operation {
                    0..3 => held.extend(position.take(BatchTaker::Client(client))),
                    3 => _ = position.ahead(client, DataBatch(which as u64), None),
                    4 => position.forget(client),
                    5 if which < held.len() => position.put_back(held.swap_remove(which)),
                    _ if which < held.len() => {
                        position.spend();
                        proptest::prop_assert!(spent.insert(held.swap_remove(which)));
                    }
                    _ => {}
                }
                position.check_invariants(held.iter().copied());
                proptest::prop_assert!(!position.free().any(|batch| spent.contains(&batch)));
                let all = position.free().len() + held.len() + spent.len();
                proptest::prop_assert_eq!(all as u64, position.next().0, "none is lost");
            }
        }
    }

    #[test]
    fn a_client_waits_if_too_many_batches_are_unspent() {
        let set = DataSet::new("train", 1 << 20, 1).unwrap();
        let mut position = DataPosition::new(set, PlantedBugs::default());
        (0..3_000).for_each(|client| _ = position.ahead(ClientKey(client), DataBatch(0), None));
        assert_eq!(position.unspent(), UNSPENT_BATCHES_MAX);
        assert_eq!(taken(&mut position, B), Some(1), "its own");
        assert_eq!(taken(&mut position, B), Some(1_999), "a reserved one");
        while taken(&mut position, A).is_some() {}
        assert!(!position.is_exhausted(), "the client waits, and the data do not end");
        position.spend();
        assert_eq!(taken(&mut position, A), Some(2_000));
        let rank = BatchTaker::Rank { rank: 3, ranks: 7 };
        assert_eq!(taken(&mut position, rank), None);
        position.put_back(DataBatch(1_998));
        assert_eq!(taken(&mut position, rank), Some(1_998), "1,998 is 3 modulo 7");
    }
}
