//! Counters: each shard counts for itself, and a reader adds them up.

mod histogram;
mod saves;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use histogram::Histogram;
pub use histogram::StalenessHistogram;
pub(crate) use saves::SaveRecord;
pub use saves::SaveStatus;

/// One number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        // Nothing is ordered by a counter: it is read for people.
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value that an update has made infinite or NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overflowed {
    /// Its variable.
    pub variable: String,
    /// The element, counted over the whole variable; of a table that grows, within its row.
    pub element: u64,
    /// What it became: `inf`, `-inf` or `NaN`.
    pub value: String,
}

impl std::fmt::Display for Overflowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Overflowed { variable, element, value } = self;
        write!(f, "element {element} of {variable:?} became {value}")
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What one shard counts.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
            pub(crate) staleness: Histogram,
            /// What the first of `overflows` was.
            pub(crate) first_overflow: OnceLock<Overflowed>,
        }

        /// What a server has done so far: one of its shards, or all of them added up. Counted by the
        /// process, from 0 at its start.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Metrics {
            $($(#[$doc])* pub $name: u64,)*
            /// How stale the gradients were, in asynchronous mode.
            pub staleness: StalenessHistogram,
            /// The first value of all that an update has made infinite or NaN, if one has: of the first shard
            /// that has one.
            pub first_overflow: Option<Overflowed>,
        }

        impl Metrics {
            pub(crate) fn sum<'a>(shards: impl IntoIterator<Item = &'a Counters>) -> Metrics {
                let mut sum = Metrics::default();
                for shard in shards {
                    $(sum.$name += shard.$name.read();)*
                    shard.staleness.add_to(&mut sum.staleness);
                    let first = shard.first_overflow.get();
                    sum.first_overflow = sum.first_overflow.or_else(|| first.cloned());
                }
                sum
            }
        }
    };
}

counters! {
    /// The global step; 0 unless the task owns it.
    global_step,
    /// Gradients applied. A push over several shards counts on each.
    gradients_applied,
    /// Synchronous steps applied. A step over several shards counts on each.
    steps_applied,
    /// Times that a shard was told of a synchronous step without having all its gradients, as one has
    /// that lost its state; it does not make the step.
    steps_missed,
    /// Gradients admitted to synchronous steps, by the step owner.
    gradients_admitted,
    /// Gradients dropped because their synchronous step had passed, by the step owner.
    gradients_stale,
    /// Gradients applied in asynchronous mode of which the shard did not know how stale they were:
    /// nothing was pulled under their token, or the server was killed between their arrival and their
    /// application. They are not in `staleness`. None on the step owner's shard.
    staleness_unknown,
    /// Gradients that [`crate::StalenessPolicy::DelayCompensation`] was to change and could not, as
    /// the values that they were computed from were not kept: there was no memory, the server was
    /// started since, or nothing was pulled under their token. Applied as they were.
    gradients_uncompensated,
    /// Pushes of other kinds applied: `assign` and `assign_add`.
    assigns_applied,
    /// Pushes that came again after they were settled, and were answered and not applied.
    duplicates,
    /// Pushes refused, and pushes given up before they were whole.
    pushes_dropped,
    /// Bytes of pushes received, as they came: of what is encoded fewer than of its elements.
    push_bytes,
    /// Pulls answered.
    pulls,
    /// Bytes of values sent.
    pull_bytes,
    /// Rows of tables that grow, as they are now.
    table_rows,
    /// Bytes of memory reserved for their rows, in use or not.
    table_bytes,
    /// Ids of pulls and pushes of such tables that had a row.
    table_hits,
    /// Those that had none.
    table_misses,
    /// Rows that were given to ids.
    table_rows_admitted,
    /// Rows of pushes whose ids were given none: their gradients are dropped.
    table_rows_turned_away,
    /// Rows that were evicted: expired, or for want of room.
    table_rows_evicted,
    /// Times that a table or an index could not grow, for want of space or of `bytes_max`; see
    /// [`crate::Event::GrowthFailed`]. Each attempt counts.
    growths_failed,
    /// Shards that wait for such memory now, and apply nothing meanwhile. A gauge.
    shards_waiting_to_grow,
    /// NaN and infinite elements taken, with the policy `Count`.
    non_finite,
    /// Updates that have made a value infinite or NaN though what was pushed was finite: pushes, and
    /// synchronous steps. One over several shards counts on each that has such a value. Rows of tables that
    /// are changed where they lie count whenever they are changed and hold one. Not with the policy `Allow`.
    overflows,
    /// Pushes refused because they would have: see [`crate::NonFinite::Reject`].
    overflows_refused,
    /// Pulls that clients have made from memory that they were lent, as they say themselves; not among
    /// the others.
    direct_pulls,
    /// The bytes of those.
    direct_pull_bytes,
    /// Pushes that came whole of which something lay in memory that their clients were lent, so that it was not
    /// sent. A push over several shards counts on each.
    direct_pushes,
    /// Checkpoints saved by this task as the step owner.
    checkpoints_saved,
    /// Saves that have failed, for whomever they were.
    saves_failed,
    /// Saves that have failed since one succeeded, or since the start; 0 if the last did not fail. A gauge: see
    /// [`crate::PsHandle::saves`] for the cause, and for how long ago that was.
    saves_failed_in_a_row,
    /// Checkpoints that were saved, while older ones that need not be kept could not be deleted.
    retentions_failed,
    /// Checkpoints that were not sound, and were passed over when the newest sound one was looked for: counted by
    /// each search, on the step owner.
    checkpoints_passed_over,
    /// Members lost by silence.
    members_lost,
    /// Tokens taken back from members that were lost, left, or held them too long.
    tokens_taken_back,
    /// Clients that were given up, by the step owner: one shard had applied their push, and the step
    /// owner never got its share.
    clients_retired,
    /// Connections to the step owner that shards of this task have lost, in synchronous mode; see
    /// [`crate::Event::OwnerLost`].
    owner_connections_lost,
    /// Shards that have no connection to the step owner now, though they have had one. A gauge.
    shards_without_owner,
    /// Connections closed because the peer broke the protocol or stalled.
    connections_faulted,
    /// Connections closed before their hello, as others came
    /// ([`crate::PsConfig::waiting_connections_max`]) or descriptors were lacking. Counted by the task: this
    /// one and the two that follow are on its first shard.
    waiting_evicted,
    /// Connections closed because their hello had not come in time ([`crate::PsConfig::handshake_timeout`]).
    waiting_timed_out,
    /// Connections closed because what came first was no hello.
    waiting_faulted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_summed() {
        let shards = [Counters::default(), Counters::default()];
        shards[0].global_step.set(7);
        shards[0].pulls.add(2);
        shards[1].pulls.add(3);
        let overflowed =
            |element| Overflowed { variable: "w".to_owned(), element, value: "inf".to_owned() };
        let (first, last) = (overflowed(7), overflowed(8));
        assert!(shards[1].first_overflow.set(first.clone()).is_ok());
        assert!(shards[1].first_overflow.set(last).is_err(), "it is the first");
        let first_overflow = Some(first);
        let expected = Metrics { global_step: 7, pulls: 5, first_overflow, ..Metrics::default() };
        assert_eq!(Metrics::sum(&shards), expected);
    }
}
