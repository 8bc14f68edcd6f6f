//! Requests that wait: bounded, each with its deadline.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Codec;
use pushpull_common::ids::PartitionId;
use pushpull_common::protocol::Envelope;
use pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX;
use smallvec::SmallVec;

use super::replicas::ClientKey;

/// What a request waits for.
#[derive(Debug)]
pub(crate) enum Wait {
    /// Values for all variables.
    Ready,
    /// A token.
    Token,
    /// A push slot.
    PushSlot,
    /// Values of at least a step.
    Pull {
        /// The step.
        at_least: u64,
        /// What to send, in bytes of the shard's variables.
        ranges: Vec<Range<u64>>,
        /// In this form.
        form: Option<ValueEncoding>,
    },
    /// Rows of at least a step.
    Rows {
        /// The step.
        at_least: u64,
        /// Of this partition, which is sparse.
        partition: PartitionId,
        /// Their numbers, as they came.
        numbers: Vec<u8>,
        /// In this form.
        codec: Option<Codec>,
        /// The bytes of the rows.
        answer_bytes: u64,
    },
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) connection: u64,
    pub(crate) client: Option<ClientKey>,
    pub(crate) request: Envelope,
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) wait: Wait,
}

/// The requests that wait, in the order they came.
///
/// Invariant: no connection has more than [`PARKED_PER_CONNECTION_MAX`] here, where a pull of many
/// ranges counts for more than one.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    entries: Vec<Entry>,
    per_connection: HashMap<u64, usize>,
}

/// Requests that wait no longer: mostly one, or none.
pub(crate) type Taken = SmallVec<[Entry; 2]>;

/// The connection has too many requests waiting.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Entry {
    /// A request without a client or a deadline.
    pub(crate) fn plain(connection: u64, request: Envelope, since: Instant, wait: Wait) -> Entry {
        Entry { connection, client: None, request, since, deadline: None, wait }
    }
}

impl Entry {
    /// How much of a connection's share it takes: one, and one more for every kilobyte or so of
    /// ranges it remembers; of rows, an eighth of
    /// the bytes of an answer of the largest size: all are made at once when the step comes.
    fn weight(&self) -> usize {
        match &self.wait {
            Wait::Pull { ranges, .. } => 1 + ranges.len() / 64,
            Wait::Rows { answer_bytes, .. } => 1 + (answer_bytes / (128 << 10)) as usize,
            _ => 1,
        }
    }
}

impl Parked {
    /// Puts back, as the first of all, what `take_first` has just taken.
    pub(crate) fn put_back(&mut self, entry: Entry) {
        *self.per_connection.entry(entry.connection).or_default() += entry.weight();
        self.entries.insert(0, entry);
    }

    pub(crate) fn park(&mut self, entry: Entry) -> Result<(), TooMany> {
        let weight = entry.weight();
        let count = self.per_connection.entry(entry.connection).or_default();
        if *count > 0 && *count + weight > PARKED_PER_CONNECTION_MAX {
            return Err(TooMany);
        }
        *count += weight;
        self.entries.push(entry);
        Ok(())
    }

    /// Takes out what `ready` says, in order.
    pub(crate) fn take(&mut self, mut ready: impl FnMut(&Entry) -> bool) -> Taken {
        let taken: Taken = self.entries.extract_if(.., |entry| ready(entry)).collect();
        for entry in &taken {
            self.forget(entry);
        }
        taken
    }

    /// Takes out the first that `ready` says.
    pub(crate) fn take_first(&mut self, ready: impl FnMut(&Entry) -> bool) -> Option<Entry> {
        let index = self.entries.iter().position(ready)?;
        let entry = self.entries.remove(index);
        self.forget(&entry);
        Some(entry)
    }

    /// Takes out what has waited for longer than its requester will.
    pub(crate) fn expire(&mut self, now: Instant) -> Taken {
        self.take(|entry| entry.deadline.is_some_and(|deadline| deadline <= now))
    }

    /// Forgets what a connection waits for: nobody would read the answer.
    pub(crate) fn drop_connection(&mut self, connection: u64) {
        self.take(|entry| entry.connection == connection);
    }

    pub(crate) fn count(&self, which: impl Fn(&&Entry) -> bool) -> usize {
        self.entries.iter().filter(which).count()
    }

    /// Whether a connection waits for something.
    pub(crate) fn waits(&self, connection: u64) -> bool {
        self.per_connection.contains_key(&connection)
    }

    pub(crate) fn any(&self, ready: impl FnMut(&Entry) -> bool) -> bool {
        self.entries.iter().any(ready)
    }

    fn forget(&mut self, entry: &Entry) {
        if let Some(count) = self.per_connection.get_mut(&entry.connection) {
            *count -= entry.weight();
            if *count == 0 {
                self.per_connection.remove(&entry.connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waits_are_bounded_ordered_and_end() {
        let now = Instant::now();
        let mut parked = Parked::default();
        for index in 0..PARKED_PER_CONNECTION_MAX as u64 {
            let entry = Entry {
                connection: 7,
                client: None,
                request: Envelope { sequence: index.into(), ..Envelope::default() },
                since: now,
                deadline: (index % 2 == 0).then(|| now + Duration::from_millis(index)),
                wait: Wait::Token,
            };
            parked.park(entry).unwrap();
        }
        let more = |connection| Entry {
            connection,
            client: None,
            request: Envelope::default(),
            since: now,
            deadline: None,
            wait: Wait::PushSlot,
        };
        assert_eq!(parked.park(more(7)), Err(TooMany));
        parked.park(more(8)).unwrap();
        let expired = parked.expire(now + Duration::from_millis(4));
        let order: Vec<u64> = expired.iter().map(|entry| entry.request.sequence.0).collect();
        assert_eq!(order, [0, 2, 4]);
        parked.park(more(7)).unwrap();
        assert!(parked.waits(7) && parked.waits(8));
        assert_eq!(parked.take_first(|e| matches!(e.wait, Wait::PushSlot)).unwrap().connection, 8);
        assert!(parked.waits(7) && !parked.waits(8));
        parked.drop_connection(7);
        assert!(!parked.any(|_| true) && parked.per_connection.is_empty());
    }
}
