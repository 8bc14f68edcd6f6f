//! Answers pulls.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Codec;
use pushpull_common::ids::{PartitionId, ShardId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::Selection;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Header, Refusal, message};
use pushpull_common::rows;
use pushpull_common::rows::Numbers;
use pushpull_common::tensor::{DType, Element, elements_of};
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;

use super::output::{
    AnswerBody, EncodeBuffers, PullEncoder, PulledParts, ShardOutput, ShardOutputs,
};
use super::request::PeerRequest;
use super::request::buffer_pool::BufferPool;
use super::request::parked_request::{ParkedRequest, WaitReason};
use crate::metrics::Counters;

/// The most [`EncodeBuffers`] that are kept for later pulls.
const ENCODE_BUFFERS_MAX: usize = 8;

/// The pulls of a shard.
#[derive(Debug)]
pub(super) struct Pulls {
    id: ShardId,
    counters: Arc<Counters>,
    /// Pooled buffers for row numbers and rows.
    row_buffers: BufferPool,
    /// Pooled buffers that encode values.
    encode_buffers: Vec<EncodeBuffers>,
    /// Scratch memory for initial rows of tables.
    tile: Vec<u64>,
}

/// The values that a pull is answered from.
#[derive(Clone, Copy)]
pub(super) struct PullSource<'a> {
    pub(super) store: &'a Store,
    pub(super) journal: &'a Journal,
    /// The pushes and the gradients that have been applied to them.
    pub(super) version: u64,
    pub(super) gradients: u64,
    /// Whether the bodies have a checksum.
    pub(super) crc: bool,
}

impl Pulls {
    pub(super) fn new(id: ShardId, counters: Arc<Counters>) -> Pulls {
        Pulls {
            id,
            counters,
            row_buffers: BufferPool::default(),
            encode_buffers: Vec::new(),
            tile: Vec::new(),
        }
    }

    /// Returns what a pull of rows waits for: first its row numbers, which follow as the body.
    pub(super) fn wait_for_rows(
        &mut self,
        store: Option<&Store>,
        header: &Header,
        id: PartitionId,
        codec: Option<Codec>,
    ) -> Result<WaitReason, Refusal> {
        let store = store.ok_or(Refusal::NotInitialized {})?;
        let partition =
            store.partition_of_rows(id).ok_or(Refusal::UnknownPartition { partition: id })?;
        let unfit = |codec: Codec| match partition.own_encoding {
            Some(own) if own != codec.encoding() => {
                Some("rows of an f16 or bf16 variable are sent in its own format")
            }
            None if !partition.trainable => Some("rows of a plain variable are sent unencoded"),
            _ => None,
        };
        if let Some((codec, detail)) = codec.and_then(|codec| Some((codec, unfit(codec)?))) {
            let variable = partition.variable;
            let encoding = codec.encoding().code();
            let detail = Detail::clipped(detail);
            return Err(Refusal::Encoding { variable, encoding, detail });
        }
        // Rows of a sparse partition are not empty, and each fits a part.
        let each = rows::number_bytes(partition);
        let limit = PART_BYTES_MAX / partition.row_bytes().max(each);
        let rows = header.body_bytes / each;
        if rows > limit || !header.body_bytes.is_multiple_of(each) {
            return Err(Refusal::Rows { variable: partition.variable, rows, limit });
        }
        let answer_bytes = rows * partition.row_bytes();
        let mut numbers = self.row_buffers.take(header.body_bytes as usize);
        numbers.resize(header.body_bytes as usize, 0);
        let at_least = header.step.0;
        Ok(WaitReason::Rows { at_least, partition: id, numbers, codec, answer_bytes })
    }

    /// Answers a pull whose step is served. Returns whether the answer has all dense values.
    pub(super) fn send(
        &mut self,
        source: PullSource<'_>,
        out: &mut ShardOutputs,
        entry: ParkedRequest,
    ) -> bool {
        let ParkedRequest { request, wait } = entry;
        match wait {
            WaitReason::Pull { ranges, form, .. } => {
                self.send_values(source, out, &request, ranges, form)
            }
            WaitReason::Rows { partition, numbers, codec, answer_bytes, .. } => {
                let mut rows = self.row_buffers.take(answer_bytes as usize);
                let gathered = self.gather(source, partition, &numbers, codec, &mut rows);
                self.row_buffers.put(numbers);
                match gathered {
                    Ok(()) => self.send_rows(source, out, &request, rows),
                    Err(refusal) => {
                        self.row_buffers.put(rows);
                        request.refuse(out, refusal);
                    }
                }
                false
            }
            WaitReason::Ready | WaitReason::Token | WaitReason::PushSlot | WaitReason::End => false,
        }
    }

    /// Sends the values that a pull has requested. Returns whether these are all dense ones.
    fn send_values(
        &mut self,
        source: PullSource<'_>,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        ranges: Vec<Range<u64>>,
        form: Option<ValueEncoding>,
    ) -> bool {
        let store = source.store;
        let snapshot = store.snapshot(&ranges);
        let bytes = |range: &Range<u64>| match form {
            None => range.end - range.start,
            Some(form) => store.layout().encoded_bytes(form, range.clone()),
        };
        let bytes = ranges.iter().map(bytes).sum();
        let catalogue = store.catalogue();
        let shard = self.id;
        let are_all = ranges == store.layout().dense();
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(bytes);
        let envelope = out.stamped(request.envelope);
        let PullSource { version, gradients, crc, .. } = source;
        let mut parts = PulledParts::new(snapshot, ranges, envelope, version, gradients, crc);
        if let Some(form) = form {
            let encoder = PullEncoder { catalogue: catalogue.clone(), shard, form };
            parts = parts.encoded(encoder, self.encode_buffers.pop().unwrap_or_default());
        }
        out.push(ShardOutput::Stream { connection: request.connection, parts });
        are_all
    }

    /// Sends the rows that a pull has requested.
    fn send_rows(
        &mut self,
        source: PullSource<'_>,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        rows: Vec<u8>,
    ) {
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(rows.len() as u64);
        let message = message::Rows { version: source.version, gradients: source.gradients };
        let crc = source.crc.then(|| crc32c::crc32c(&rows));
        let body = AnswerBody::Rows(rows);
        out.answer_with(request.connection, request.envelope, message.into(), body, crc);
    }

    /// Appends the rows with these numbers, in the order of the numbers.
    fn gather(
        &mut self,
        PullSource { store, journal, .. }: PullSource<'_>,
        id: PartitionId,
        numbers: &[u8],
        codec: Option<Codec>,
        rows: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        // The variables may have been declared again since the request.
        let partition =
            store.partition_of_rows(id).ok_or(Refusal::UnknownPartition { partition: id })?;
        let numbers = Numbers::of(partition, numbers);
        rows::check_any(numbers.clone(), partition)?;
        let bytes = numbers.len() * partition.row_bytes() as usize;
        let mut plain = codec.map(|_| self.row_buffers.take(bytes));
        let target = plain.as_mut().unwrap_or(rows);
        match store.table(id) {
            None => store.gather(partition, numbers.map(|row| row as u32), target),
            Some(table) => {
                let count = numbers.len() as u64;
                let have = table.gather(journal, numbers, &mut self.tile, target);
                self.counters.table_hits.add(have);
                self.counters.table_misses.add(count - have);
            }
        }
        if let Some((codec, plain)) = codec.zip(plain) {
            shorten(codec, partition.dtype, &plain, rows);
            self.row_buffers.put(plain);
        }
        Ok(())
    }

    /// The answer to a pull has been sent. Its buffers return to the pool.
    pub(super) fn values_sent(&mut self, buffers: EncodeBuffers) {
        if buffers.has_memory() && self.encode_buffers.len() < ENCODE_BUFFERS_MAX {
            self.encode_buffers.push(buffers);
        }
    }

    /// The answer to a pull of rows has been sent. Its buffer returns to the pool.
    pub(super) fn rows_sent(&mut self, rows: Vec<u8>) {
        self.row_buffers.put(rows);
    }
}

/// Returns what a pull of values waits for.
pub(super) fn wait_for_values(
    store: Option<&Store>,
    header: &Header,
    selection: &Selection,
    form: Option<ValueEncoding>,
) -> Result<WaitReason, Refusal> {
    let store = store.ok_or(Refusal::NotInitialized {})?;
    let mut ranges = Vec::new();
    match selection {
        Selection::All {} => ranges.push(0..store.layout().bytes()),
        Selection::Dense {} => ranges.extend_from_slice(store.layout().dense()),
        Selection::Partitions { partitions } => store
            .select(partitions.items(), &mut ranges)
            .map_err(|partition| Refusal::UnknownPartition { partition })?,
    }
    Ok(WaitReason::Pull { at_least: header.step.0, ranges, form })
}

/// Returns the refusal of a pull in an encoding that values are not sent in.
pub(super) fn wrong_encoding(header: &Header, encoding: u8) -> Refusal {
    let detail = Detail::clipped(format!("values are not sent in encoding {encoding}"));
    Refusal::Unsupported { kind: header.kind, detail }
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
