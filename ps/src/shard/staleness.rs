//! How stale a gradient is on this shard, and what is made of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;

use super::replicas::{ClientKey, Presence};
use super::{Shard, Variables};
use crate::aggregate::staleness::{StalenessPolicy, compensate};
use crate::arena::{Budget, Loan};
use crate::inbox::Arrival;
use crate::optimizer::ApplyAt;
use crate::store::{Input, NoFreeBlock, Store};

/// The bytes of a gradient that are computed at a time: they stay in the fastest cache until they
/// are applied. A multiple of every element's size.
pub(super) const TILE_BYTES: u64 = 16 << 10;

/// How a push is taken, decided when its first byte is applied.
///
/// That is before it is whole, if it is applied as its parts come. Nothing is committed in between,
/// or the draft is dropped: so the count of gradients, and the staleness with it, are the same at
/// its commit. Values that are kept for it stay as long as it does.
#[derive(Debug)]
pub(super) struct StalenessAdjustment {
    /// Which update it is.
    pub(super) at: ApplyAt,
    /// How many gradients the shard has applied since it gave the values that this one was computed
    /// from; `None` if nobody knows.
    pub(super) staleness: Option<u64>,
    compensation: Compensation,
}

/// Whether a gradient is compensated for its delay.
#[derive(Debug)]
enum Compensation {
    /// It need not be.
    None,
    /// It should be, and cannot: the values that it was computed from are not there.
    Lacking,
    By {
        lambda: f64,
        read: Arc<Backup>,
    },
}

impl Default for StalenessAdjustment {
    fn default() -> StalenessAdjustment {
        let (at, compensation) = (ApplyAt::new(0, 0), Compensation::None);
        StalenessAdjustment { at, staleness: None, compensation }
    }
}

impl StalenessAdjustment {
    /// Has a range, which lies within one partition of this type, taken with what the push has for it, or with
    /// what is made of that, tile by tile.
    pub(super) fn each(
        &self,
        store: &mut Store,
        dtype: DType,
        range: Range<u64>,
        mut input: Input<'_>,
        tile: &mut Vec<u64>,
        mut take: impl FnMut(&mut Store, Range<u64>, Input<'_>) -> Result<(), NoFreeBlock>,
    ) -> Result<(), NoFreeBlock> {
        let Compensation::By { lambda, read } = &self.compensation else {
            return take(store, range, input);
        };
        for start in range.clone().step_by(TILE_BYTES as usize) {
            let range = start..range.end.min(start + TILE_BYTES);
            tile.resize(tile.len().max(TILE_BYTES as usize / 8), 0);
            let length = (range.end - range.start) as usize;
            let gradient = &mut bytemuck::cast_slice_mut(tile)[..length];
            input.fill(gradient);
            let (read, mut done) = (read.bytes(&range), 0);
            for now in store.before(range.clone()) {
                let piece = done..done + now.len();
                let gradient = &mut gradient[piece.clone()];
                compensate(dtype, *lambda, gradient, &read[piece.clone()], now);
                done = piece.end;
            }
            take(store, range, (&*gradient).into())?;
        }
        Ok(())
    }
}

/// The values that a client has pulled last, as a gradient of its will have been computed from them.
#[derive(Debug)]
struct Backup {
    /// The shard's layout, aligned for every type.
    words: Vec<u64>,
    /// How many gradients the shard had applied to them.
    gradients: u64,
    /// They count for the memory of the task.
    _loan: Loan,
}

impl Backup {
    fn bytes(&self, range: &Range<u64>) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[range.start as usize..range.end as usize]
    }

    fn fill(&mut self, store: &Store, gradients: u64) {
        let (bytes, mut done): (&mut [u8], _) = (bytemuck::cast_slice_mut(&mut self.words), 0);
        for now in store.before(0..store.layout().bytes()) {
            let piece = done..done + now.len();
            bytes[piece.clone()].copy_from_slice(now);
            done = piece.end;
        }
        self.gradients = gradients;
    }
}

/// What clients have pulled last, where stale gradients are compensated. It is not in the arena, and
/// goes with the process.
#[derive(Debug, Default)]
pub(super) struct Backups(BTreeMap<ClientKey, Arc<Backup>>);

impl Backups {
    /// Keeps all values as they are now for a client, in place of what was kept for it; nothing if
    /// there is no memory for that.
    fn keep(&mut self, client: ClientKey, store: &Store, gradients: u64, budget: &Budget) {
        let kept = self.0.remove(&client);
        // What an update under way looks at stays as it is.
        let backup = kept.and_then(Arc::into_inner).or_else(|| {
            let bytes = store.layout().bytes();
            let loan = budget.take(bytes).ok()?;
            let words = vec![0; bytes.div_ceil(8) as usize];
            Some(Backup { words, gradients, _loan: loan })
        });
        if let Some(mut backup) = backup {
            backup.fill(store, gradients);
            self.0.insert(client, Arc::new(backup));
        }
    }

    /// Those values, if they are what a gradient was computed from.
    fn of(&self, client: Option<ClientKey>, read: Option<u64>) -> Option<&Arc<Backup>> {
        self.0.get(&client?).filter(|backup| Some(backup.gradients) == read)
    }

    /// The client is gone.
    pub(super) fn drop_client(&mut self, client: ClientKey) {
        self.0.remove(&client);
    }

    /// The variables are gone.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Shard {
    /// How the push in a room is to be taken, if it is applied next.
    pub(super) fn adjustment_of(&self, push_slot: u32) -> StalenessAdjustment {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let Some(push) = push.filter(|push| push.operation == Operation::Gradient {}) else {
            return StalenessAdjustment::default();
        };
        let policy = self.config.staleness;
        let staleness = self.staleness_of(push);
        let at = ApplyAt::new(self.gradients + 1, push.step.0);
        let at = at.at_rate(policy.rate(staleness.unwrap_or(0)));
        let compensation = match policy {
            StalenessPolicy::DelayCompensation { lambda } if staleness != Some(0) => {
                let client = self.inbox.as_ref().and_then(|inbox| inbox.holder(push_slot));
                match self.backups.of(client, push.read) {
                    Some(read) => Compensation::By { lambda, read: read.clone() },
                    None => Compensation::Lacking,
                }
            }
            _ => Compensation::None,
        };
        StalenessAdjustment { at, staleness, compensation }
    }

    fn staleness_of(&self, push: &Arrival) -> Option<u64> {
        match &self.owner {
            // Every gradient has a share here, so steps are gradients. Unlike the client's own count
            // the step outlives this process, and cannot be before the grant.
            Some(owner) => Some(owner.staleness(push.token, push.step)),
            // Nobody can have read what has not been made.
            None => push.read.map(|read| self.gradients.saturating_sub(read)),
        }
    }

    /// A gradient was applied as told.
    pub(super) fn count_staleness(&self, adjustment: &StalenessAdjustment) {
        debug_assert_eq!(adjustment.at.count, self.gradients, "nothing came in between");
        match adjustment.staleness {
            Some(staleness) => self.counters.staleness.add(staleness),
            None => self.counters.staleness_unknown.add(1),
        }
        if matches!(adjustment.compensation, Compensation::Lacking) {
            self.counters.gradients_uncompensated.add(1);
        }
    }

    /// A client pulls all values: keeps them, if a gradient that is computed from them may have to be
    /// compensated.
    pub(super) fn keep_what_is_read(&mut self, client: ClientKey) {
        let compensates =
            matches!(self.config.staleness, StalenessPolicy::DelayCompensation { .. });
        // What is kept for one that has left would stay.
        let present = self.replicas.client(client).presence == Presence::Present;
        // Rows are read in other pulls, and a copy of all of them is what nobody wants to have.
        if let Variables::Ready(store) = &self.variables
            && compensates
            && present
            && store.layout().sparse().len() == 0
        {
            self.backups.keep(client, store, self.gradients, &self.budget);
        }
    }
}
