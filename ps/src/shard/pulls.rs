//! Sending values.

use std::ops::Range;

use pushpull_common::codec::{Codec, Encoding};
use pushpull_common::protocol::message::{PullEncoded, Selection};
use pushpull_common::protocol::{Header, Refusal};

use super::output::{Output, PulledParts, Short};
use super::parked::{Entry, Wait};
use super::{Detail, Shard};

impl Shard {
    /// The values are asked for in a shorter form.
    pub(super) fn pull_encoded(&mut self, entry: Entry, header: &Header, asked: &PullEncoded) {
        match Encoding::from_code(asked.encoding).and_then(Encoding::codec_of_values) {
            Some(codec) => self.pull(entry, header, &asked.pull.selection, Some(codec)),
            None => {
                let detail = format!("values are not sent in encoding {}", asked.encoding);
                let detail = Detail::clipped(detail);
                let refusal = Refusal::Unsupported { kind: header.kind, detail };
                self.refuse(entry.connection, entry.request, refusal);
            }
        }
    }

    pub(super) fn pull(
        &mut self,
        entry: Entry,
        header: &Header,
        selection: &Selection,
        codec: Option<Codec>,
    ) {
        let (connection, request) = (entry.connection, entry.request);
        let Some(store) = self.store().filter(|_| self.is_ready()) else {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        };
        let ranges = match selection {
            Selection::All {} => Ok(std::iter::once(0..store.layout().bytes()).collect()),
            Selection::Partitions { partitions } => store.select(partitions.items()),
        };
        let ranges = match ranges {
            Ok(ranges) => ranges,
            Err(partition) => {
                let refusal = Refusal::UnknownPartition { partition };
                return self.refuse(connection, request, refusal);
            }
        };
        let wait = Wait::Pull { at_least: header.step.0, ranges, codec };
        let entry = Entry { wait, ..entry };
        match self.can_pull(&entry) {
            true => self.send_values(entry),
            false => self.park(entry),
        }
    }

    /// Whether the values that a pull waits for are there.
    fn can_pull(&self, entry: &Entry) -> bool {
        let Wait::Pull { at_least, .. } = entry.wait else {
            return false;
        };
        if let Some(round) = &self.round {
            return round.step() >= at_least;
        }
        // Only the owner knows the step; the other shards keep versions of their own.
        self.owner.as_ref().is_none_or(|owner| owner.step().0 >= at_least)
    }

    /// Answers the pulls whose values are there now.
    pub(super) fn send_parked_values(&mut self) {
        if !self.parked.any(|entry| self.can_pull(entry)) {
            return;
        }
        let mut parked = std::mem::take(&mut self.parked);
        let ready = parked.take(|entry| self.can_pull(entry));
        self.parked = parked;
        for entry in ready {
            self.send_values(entry);
        }
    }

    fn send_values(&mut self, entry: Entry) {
        let Wait::Pull { ranges, codec, .. } = entry.wait else {
            return;
        };
        let Some(store) = self.store() else { return };
        let snapshot = store.snapshot(&ranges);
        let bytes = |range: &Range<u64>| match codec {
            None => range.end - range.start,
            Some(codec) => store.layout().encoded_bytes(codec.encoding(), range.clone()),
        };
        let bytes = ranges.iter().map(bytes).sum();
        let short = codec.map(|codec| Short::new(store.catalogue().clone(), self.id, codec));
        let whole = 0..store.layout().bytes();
        if let Some(client) = entry.client.filter(|_| ranges.iter().eq([&whole])) {
            self.keep_what_is_read(client);
        }
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(bytes);
        let crc = self.conversations.get(&entry.connection).is_some_and(|c| c.crc);
        let mut envelope = entry.request;
        (envelope.step, envelope.restore_epoch) = (self.step(), self.epoch);
        let counts = (self.version, self.gradients);
        let parts = PulledParts::new(snapshot, ranges, envelope, counts, crc, short);
        self.outputs.push_back(Output::Stream { connection: entry.connection, parts });
    }
}
