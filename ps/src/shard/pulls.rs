//! Answers pulls.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::{Codec, Encoding};
use pushpull_common::ids::PartitionId;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{PullEncoded, PullRowsEncoded, Selection};
use pushpull_common::protocol::{Header, Refusal, message};
use pushpull_common::rows::{self, Numbers};
use pushpull_common::tensor::{DType, Element, elements_of};

use super::output::{AnswerBody, EncodeBuffers, PullEncoder, PulledParts, ShardOutput};
use super::parked_requests::{ParkedRequest, WaitReason};
use super::staleness::LastPulls;
use super::{Detail, ExpectedBody, Shard, VariablesState};

/// The most [`EncodeBuffers`](super::output::EncodeBuffers) that are kept for later pulls.
const ENCODE_BUFFERS_MAX: usize = 8;

/// What a shard keeps of the pulls that it has answered.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    /// Pooled buffers that encode values.
    pub(super) encode_buffers: Vec<EncodeBuffers>,
    /// The values of each client's last pull, for delay compensation.
    pub(super) last_pulls: LastPulls,
}

impl Shard {
    /// Handles a pull whose values are sent encoded.
    pub(super) fn pull_encoded(
        &mut self,
        entry: ParkedRequest,
        header: &Header,
        asked: &PullEncoded,
    ) {
        match ValueEncoding::from_code(asked.encoding) {
            Some(form) => self.pull(entry, header, &asked.pull.selection, Some(form)),
            None => self.refuse_encoding(&entry, header, asked.encoding),
        }
    }

    fn refuse_encoding(&mut self, entry: &ParkedRequest, header: &Header, encoding: u8) {
        let detail = Detail::clipped(format!("values are not sent in encoding {encoding}"));
        let refusal = Refusal::Unsupported { kind: header.kind, detail };
        self.out.refuse(entry.connection, entry.request, refusal);
    }

    pub(super) fn pull(
        &mut self,
        entry: ParkedRequest,
        header: &Header,
        selection: &Selection,
        form: Option<ValueEncoding>,
    ) {
        let (connection, request) = (entry.connection, entry.request);
        let mut ranges = Vec::new();
        let Some(store) = self.variables.store().filter(|_| self.variables.is_ready()) else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        match selection {
            Selection::All {} => ranges.push(0..store.layout().bytes()),
            Selection::Dense {} => ranges.extend_from_slice(store.layout().dense()),
            Selection::Partitions { partitions } => {
                if let Err(partition) = store.select(partitions.items(), &mut ranges) {
                    let refusal = Refusal::UnknownPartition { partition };
                    return self.out.refuse(connection, request, refusal);
                }
            }
        }
        let wait = WaitReason::Pull { at_least: header.step.0, ranges, form };
        let entry = ParkedRequest { wait, ..entry };
        match self.can_pull(&entry) {
            true => self.send_values(entry),
            false => self.peers.park(&mut self.out, entry),
        }
    }

    /// The answer to a pull has been sent. Its buffers return to the pool.
    pub(crate) fn pull_sent(&mut self, buffers: EncodeBuffers) {
        if buffers.has_memory() && self.pulls.encode_buffers.len() < ENCODE_BUFFERS_MAX {
            self.pulls.encode_buffers.push(buffers);
        }
    }

    /// The answer to a pull of rows has been sent. Its buffer returns to the pool.
    pub(crate) fn rows_sent(&mut self, rows: Vec<u8>) {
        self.intake.buffer_pool.put(rows);
    }

    /// Returns whether the step that a pull waits for is served.
    fn can_pull(&self, entry: &ParkedRequest) -> bool {
        let (WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. }) = entry.wait
        else {
            return false;
        };
        self.steps.served_step() >= at_least
    }

    /// Answers the parked pulls whose step is served.
    pub(super) fn send_parked_values(&mut self) {
        if !self.peers.parked.any(|entry| self.can_pull(entry)) {
            return;
        }
        let mut parked = std::mem::take(&mut self.peers.parked);
        let ready = parked.take(|entry| self.can_pull(entry));
        self.peers.parked = parked;
        for entry in ready {
            match entry.wait {
                WaitReason::Rows { .. } => self.send_rows(entry),
                _ => self.send_values(entry),
            }
        }
    }

    /// Handles a pull of rows that are sent encoded.
    pub(super) fn pull_rows_encoded(
        &mut self,
        now: Instant,
        entry: ParkedRequest,
        header: &Header,
        asked: &PullRowsEncoded,
    ) {
        match Encoding::from_code(asked.encoding).and_then(Encoding::codec_of_values) {
            Some(codec) => self.pull_rows(now, entry, header, asked.pull.partition, Some(codec)),
            None => self.refuse_encoding(&entry, header, asked.encoding),
        }
    }

    /// Handles a pull of rows. The row numbers follow as the body.
    pub(super) fn pull_rows(
        &mut self,
        now: Instant,
        entry: ParkedRequest,
        header: &Header,
        id: PartitionId,
        codec: Option<Codec>,
    ) {
        let (connection, request) = (entry.connection, entry.request);
        let Some(store) = self.variables.store().filter(|_| self.variables.is_ready()) else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        let Some(partition) = store.partition_of_rows(id) else {
            return self.out.refuse(
                connection,
                request,
                Refusal::UnknownPartition { partition: id },
            );
        };
        let unfit = |codec: Codec| match partition.own_encoding {
            Some(own) if own != codec.encoding() => {
                Some("rows of an f16 or bf16 variable are sent in its own format")
            }
            None if !partition.trainable => Some("rows of a plain variable are sent unencoded"),
            _ => None,
        };
        if let Some((codec, detail)) = codec.and_then(|codec| Some((codec, unfit(codec)?))) {
            let (variable, encoding) = (partition.variable, codec.encoding().code());
            let detail = Detail::clipped(detail);
            let refusal = Refusal::Encoding { variable, encoding, detail };
            return self.out.refuse(connection, request, refusal);
        }
        // Rows of a sparse partition are not empty, and each fits a part.
        let each = rows::number_bytes(partition);
        let limit = PART_BYTES_MAX / partition.row_bytes().max(each);
        let rows = header.body_bytes / each;
        if rows > limit || !header.body_bytes.is_multiple_of(each) {
            let refusal = Refusal::Rows { variable: partition.variable, rows, limit };
            return self.out.refuse(connection, request, refusal);
        }
        let answer_bytes = rows * partition.row_bytes();
        let mut numbers = self.intake.buffer_pool.take(header.body_bytes as usize);
        numbers.resize(header.body_bytes as usize, 0);
        let at_least = header.step.0;
        let wait = WaitReason::Rows { at_least, partition: id, numbers, codec, answer_bytes };
        self.receive(now, connection, ExpectedBody::Rows(ParkedRequest { wait, ..entry }), header);
    }

    /// The row numbers have arrived.
    pub(super) fn rows_requested(&mut self, entry: ParkedRequest) {
        if !self.variables.is_ready() {
            let (connection, request) = (entry.connection, entry.request);
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        }
        match self.can_pull(&entry) {
            true => self.send_rows(entry),
            false => self.peers.park(&mut self.out, entry),
        }
    }

    fn send_rows(&mut self, entry: ParkedRequest) {
        let (connection, request) = (entry.connection, entry.request);
        let WaitReason::Rows { partition, numbers, codec, answer_bytes, .. } = entry.wait else {
            return;
        };
        let mut rows = self.intake.buffer_pool.take(answer_bytes as usize);
        let gathered = self.gather(partition, &numbers, codec, &mut rows);
        self.intake.buffer_pool.put(numbers);
        if let Err(refusal) = gathered {
            self.intake.buffer_pool.put(rows);
            return self.out.refuse(connection, request, refusal);
        }
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(rows.len() as u64);
        let message =
            message::Rows { version: self.variables.version, gradients: self.variables.gradients };
        let checked = self.peers.connections.get(&connection).is_some_and(|c| c.crc);
        let crc = checked.then(|| crc32c::crc32c(&rows));
        self.out.answer_with(connection, request, message.into(), AnswerBody::Rows(rows), crc);
    }

    /// Appends the rows with these numbers, in the order of the numbers.
    fn gather(
        &mut self,
        id: PartitionId,
        numbers: &[u8],
        codec: Option<Codec>,
        rows: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) =
            &self.variables.state
        else {
            return Err(Refusal::NotInitialized {});
        };
        // The variables may have been declared again since the request.
        let partition =
            store.partition_of_rows(id).ok_or(Refusal::UnknownPartition { partition: id })?;
        let numbers = Numbers::of(partition, numbers);
        rows::check_any(numbers.clone(), partition)?;
        let bytes = numbers.len() * partition.row_bytes() as usize;
        let mut plain = codec.map(|_| self.intake.buffer_pool.take(bytes));
        let target = plain.as_mut().unwrap_or(rows);
        match store.table(id) {
            None => store.gather(partition, numbers.map(|row| row as u32), target),
            Some(table) => {
                let count = numbers.len() as u64;
                let have =
                    table.gather(&self.files.journal, numbers, &mut self.applier.tile, target);
                self.counters.table_hits.add(have);
                self.counters.table_misses.add(count - have);
            }
        }
        if let Some((codec, plain)) = codec.zip(plain) {
            shorten(codec, partition.dtype, &plain, rows);
            self.intake.buffer_pool.put(plain);
        }
        Ok(())
    }

    fn send_values(&mut self, entry: ParkedRequest) {
        let WaitReason::Pull { ranges, form, .. } = entry.wait else {
            return;
        };
        let encoded = form.and_then(|_| self.pulls.encode_buffers.pop()).unwrap_or_default();
        let Some(store) = self.variables.store() else { return };
        let snapshot = store.snapshot(&ranges);
        let bytes = |range: &Range<u64>| match form {
            None => range.end - range.start,
            Some(form) => store.layout().encoded_bytes(form, range.clone()),
        };
        let bytes = ranges.iter().map(bytes).sum();
        let (catalogue, shard) = (store.catalogue(), self.id);
        let encoder = form.map(|form| PullEncoder { catalogue: catalogue.clone(), shard, form });
        let all = ranges == store.layout().dense();
        if let Some(client) = entry.client.filter(|_| all) {
            self.keep_last_pull(client);
        }
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(bytes);
        let crc = self.peers.connections.get(&entry.connection).is_some_and(|c| c.crc);
        let envelope = self.out.stamped(entry.request);
        let counts = (self.variables.version, self.variables.gradients);
        let parts = PulledParts::new(snapshot, ranges, envelope, counts, crc, (encoder, encoded));
        self.out.push(ShardOutput::Stream { connection: entry.connection, parts });
    }
}

/// Appends the encoding of these rows, as one range.
fn shorten(codec: Codec, dtype: DType, rows: &[u8], out: &mut Vec<u8>) {
    let encoded = match dtype {
        DType::F64 => codec.encode(&elements::<f64>(rows), out),
        _ => codec.encode(&elements::<f32>(rows), out),
    };
    encoded.expect("codecs of values encode any element");
}

/// Returns the elements of rows, without a copy if they are aligned.
fn elements<T: Element>(rows: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(rows).map_or_else(|_| elements_of(rows).into(), Cow::Borrowed)
}
