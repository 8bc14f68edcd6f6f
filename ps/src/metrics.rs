//! Counters: each shard has its own, and a reader adds them up.

mod histogram;
mod saves;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use histogram::Histogram;
pub use histogram::StalenessHistogram;
pub(crate) use saves::SaveRecord;
pub use saves::SaveStatus;

/// A counter or gauge, written by one thread and read by any.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        // Relaxed: no other memory access depends on a counter.
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value that an update made infinite or NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overflowed {
    /// The name of the variable.
    pub variable: String,
    /// The index of the element in the whole variable, or, for a growing table, in its row.
    pub element: u64,
    /// The new value: `inf`, `-inf` or `NaN`.
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
        /// The counters of one shard.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
            pub(crate) staleness: Histogram,
            /// The first of the `overflows`.
            pub(crate) first_overflow: OnceLock<Overflowed>,
        }

        /// Counters of one shard, or of all shards of a server added up. They start at 0 with the
        /// process.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Metrics {
            $($(#[$doc])* pub $name: u64,)*
            /// The staleness of the applied gradients, in asynchronous mode.
            pub staleness: StalenessHistogram,
            /// The first value that an update made infinite or NaN, if any: that of the first shard
            /// that has one.
            pub first_overflow: Option<Overflowed>,
        }

        impl Metrics {
            /// Yields every counter with the name of its field, for an exporter.
            /// [`Metrics::staleness`] and [`Metrics::first_overflow`] are no counters.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

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
    /// The global step; 0 unless the task is the step owner. A gauge.
    global_step,
    /// Gradients applied. A push to several shards counts on each.
    gradients_applied,
    /// Synchronous steps applied. A step on several shards counts on each.
    steps_applied,
    /// Synchronous steps that a shard could not apply because it did not hold all their gradients,
    /// for example after it lost its state.
    steps_missed,
    /// Gradients that the step owner admitted to synchronous steps.
    gradients_admitted,
    /// Stale gradients that the step owner dropped: their synchronous step had passed, or, in
    /// asynchronous mode, they were older than [`crate::Asynchronous::reject_older`] allows.
    gradients_stale,
    /// Gradients that were not applied, because their effects had counted before. A push to
    /// several shards counts on each that had.
    gradients_repeated,
    /// Gradients applied in asynchronous mode whose staleness the shard did not know: nothing was
    /// pulled under their token, or the server was killed between their arrival and their
    /// application. They are not in `staleness`. Always 0 on the step owner's shard.
    staleness_unknown,
    /// Gradients that [`crate::StalenessPolicy::DelayCompensation`] could not compensate and that
    /// were applied unchanged. The values that they were computed from were not kept: memory was
    /// short, the server had restarted, or nothing was pulled under their token.
    gradients_uncompensated,
    /// Pushes of the other kinds applied: `assign` and `assign_add`.
    assigns_applied,
    /// Repeated pushes that were already settled. They were answered and not applied again.
    duplicates,
    /// Pushes refused, and pushes abandoned before they were complete.
    pushes_dropped,
    /// Bytes of pushes received. Encoded pushes count with their encoded size.
    push_bytes,
    /// Pulls answered.
    pulls,
    /// Bytes of values sent.
    pull_bytes,
    /// Rows of growing tables. A gauge.
    table_rows,
    /// Bytes of memory reserved for rows of growing tables, used or not. A gauge.
    table_bytes,
    /// Ids in pulls and pushes of growing tables that had a row.
    table_hits,
    /// Ids in pulls and pushes of growing tables that had no row.
    table_misses,
    /// Rows added to growing tables.
    table_rows_admitted,
    /// Rows of pushes whose ids got no row. Their gradients were dropped.
    table_rows_turned_away,
    /// Rows evicted because they expired or to make space for others.
    table_rows_evicted,
    /// Failed attempts to grow a table or an index, for lack of disk space or of `bytes_max`. See
    /// [`crate::Event::GrowthFailed`].
    growths_failed,
    /// Shards that wait for memory to grow, and apply nothing meanwhile. A gauge.
    shards_waiting_to_grow,
    /// NaN and infinite elements accepted under [`crate::NonFinite::Count`].
    non_finite,
    /// Updates, pushes or synchronous steps, that made a value infinite or NaN although the pushed
    /// elements were finite. An update of several shards counts on each that has such a value. A
    /// table row changed in place counts whenever it is changed and holds such a value. Always 0
    /// under [`crate::NonFinite::Allow`].
    overflows,
    /// Pushes refused because they would have made a value infinite or NaN. See
    /// [`crate::NonFinite::Reject`].
    overflows_refused,
    /// Pulls that clients made directly from shared memory, as reported by the clients. Not
    /// included in `pulls`.
    direct_pulls,
    /// Bytes of values that clients pulled directly from shared memory. Not included in
    /// `pull_bytes`.
    direct_pull_bytes,
    /// Complete pushes with at least some elements in a shared push buffer, which were not sent. A
    /// push to several shards counts on each.
    direct_pushes,
    /// Checkpoints saved by this task as the step owner.
    checkpoints_saved,
    /// Failed checkpoint saves, automatic and requested.
    saves_failed,
    /// Checkpoint saves that failed since the last success or the start; 0 if the last one
    /// succeeded. A gauge. See [`crate::PsHandle::saves`] for the cause and the time of the last
    /// success.
    saves_failed_in_a_row,
    /// Checkpoints that were saved while older ones, no longer retained, could not be deleted.
    retentions_failed,
    /// Damaged checkpoints skipped by searches for the newest sound one, on the step owner. Each
    /// search counts again.
    checkpoints_passed_over,
    /// Declarations of variables whose placement is uneven, on the step owner. See
    /// [`crate::Event::SkewedPlacement`].
    skewed_placements,
    /// Members whose lease expired.
    members_lost,
    /// Tokens taken back from members that were lost, left, or held them too long.
    tokens_taken_back,
    /// Batches of the declared data set that were granted or reserved at least once, on the step
    /// owner. A gauge.
    batches_begun,
    /// Batches among them that are not spent yet, on the step owner. A gauge.
    batches_unspent,
    /// Batches that workers spent without a gradient.
    batches_skipped,
    /// Clients retired by the step owner: some shards had applied their push, and the others did not
    /// receive their parts within two leases.
    clients_retired,
    /// Gradients that some shards have applied and the others never will, because their worker was
    /// lost or restarted, counted by the step owner. See [`crate::Event::PartlyApplied`].
    gradients_partly_applied,
    /// Connections to the step owner lost by shards of this task, in synchronous mode. See
    /// [`crate::Event::OwnerLost`].
    owner_connections_lost,
    /// Shards that had a connection to the step owner and have none now. A gauge.
    shards_without_owner,
    /// Connections closed because the peer violated the protocol or stalled.
    connections_faulted,
    /// Connections of readers and of other shards closed because they were silent for a lease.
    connections_silent,
    /// Connections of readers closed because a member needed the place
    /// ([`crate::Network::connections_max`]).
    readers_displaced,
    /// Connections that were not accepted, or were lost, because the process or the system had no
    /// file descriptor left. Those before a hello count on the task's first shard.
    out_of_descriptors,
    /// Connections closed before their hello to make space for others
    /// ([`crate::Network::waiting_connections_max`]), or for lack of descriptors. This counter and
    /// the next two belong to the task and are counted on its first shard.
    waiting_evicted,
    /// Connections closed because no hello arrived in time
    /// ([`crate::Network::handshake_timeout`]).
    waiting_timed_out,
    /// Connections closed because their first message was not a valid hello.
    waiting_faulted,
    /// Connections refused because the peer has not proved that it may connect. See
    /// [`crate::Event::Access`]. Counted on the task's first shard.
    peers_denied,
    /// Connections closed because what had let the peer in was taken back: its access token was
    /// removed from the file, or gives something else. See [`crate::Event::Access`].
    peers_revoked,
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
        let first = overflowed(7);
        let last = overflowed(8);
        assert!(shards[1].first_overflow.set(first.clone()).is_ok());
        assert!(shards[1].first_overflow.set(last).is_err(), "only the first overflow is kept");
        let first_overflow = Some(first);
        let expected = Metrics { global_step: 7, pulls: 5, first_overflow, ..Metrics::default() };
        let sum = Metrics::sum(&shards);
        assert_eq!(sum, expected);
        // An exporter needs no list of its own.
        let counted: Vec<_> = sum.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("global_step", 7), ("pulls", 5)]);
    }
}
