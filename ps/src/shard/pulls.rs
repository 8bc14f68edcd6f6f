//! Answers pulls.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Codec;
use pushpull_common::ids::PartitionId;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::Selection;
use pushpull_common::protocol::{Header, Refusal, message};
use pushpull_common::rows;
use pushpull_common::rows::Numbers;
use pushpull_common::tensor::{DType, Element, elements_of};
use pushpull_store::arena::Budget;
use pushpull_store::commit::Journal;

use super::Detail;
use super::buffer_pool::BufferPool;
use super::output::{
    AnswerBody, EncodeBuffers, PullEncoder, PulledParts, ShardOutput, ShardOutputs,
};
use super::peers::Peers;
use super::peers::client_registry::ClientPresence;
use super::peers::parked_requests::{ParkedRequest, WaitReason};
use super::shard_files::ShardFiles;
use super::staleness::LastPulls;
use super::steps::Steps;
use super::variables::Variables;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::metrics::Counters;

/// The most [`EncodeBuffers`] that are kept for later pulls.
const ENCODE_BUFFERS_MAX: usize = 8;

/// The pulls of a shard.
#[derive(Debug)]
pub(super) struct Pulls {
    config: Arc<PsConfig>,
    counters: Arc<Counters>,
    /// Pooled buffers for row numbers and rows.
    row_buffers: BufferPool,
    /// Pooled buffers that encode values.
    encode_buffers: Vec<EncodeBuffers>,
    /// Scratch memory for initial rows of tables.
    tile: Vec<u64>,
    /// The values of each client's last pull, for delay compensation.
    pub(super) last_pulls: LastPulls,
}

impl Pulls {
    pub(super) fn new(config: Arc<PsConfig>, counters: Arc<Counters>) -> Pulls {
        Pulls {
            config,
            counters,
            row_buffers: BufferPool::default(),
            encode_buffers: Vec::new(),
            tile: Vec::new(),
            last_pulls: LastPulls::default(),
        }
    }

    /// Returns what a pull of rows waits for: first its row numbers, which follow as the body.
    pub(super) fn wait_for_rows(
        &mut self,
        variables: &Variables,
        header: &Header,
        id: PartitionId,
        codec: Option<Codec>,
    ) -> Result<WaitReason, Refusal> {
        let store = variables.ready().ok_or(Refusal::NotInitialized {})?;
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
            let (variable, encoding) = (partition.variable, codec.encoding().code());
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

    /// Answers a pull, or parks it until its step is served.
    pub(super) fn serve(
        &mut self,
        variables: &Variables,
        files: &ShardFiles,
        peers: &mut Peers,
        steps: &Steps,
        out: &mut ShardOutputs,
        entry: ParkedRequest,
    ) {
        match entry.wait.is_served(steps.served_step()) {
            true => self.send(variables, files, peers, out, entry),
            false => peers.park(out, entry),
        }
    }

    /// Answers the parked pulls whose step is served.
    pub(super) fn send_parked(
        &mut self,
        variables: &Variables,
        files: &ShardFiles,
        peers: &mut Peers,
        steps: &Steps,
        out: &mut ShardOutputs,
    ) {
        let served = steps.served_step();
        for entry in peers.parked.take(|entry| entry.wait.is_served(served)) {
            self.send(variables, files, peers, out, entry);
        }
    }

    fn send(
        &mut self,
        variables: &Variables,
        files: &ShardFiles,
        peers: &Peers,
        out: &mut ShardOutputs,
        entry: ParkedRequest,
    ) {
        match entry.wait {
            WaitReason::Rows { .. } => {
                self.send_rows(variables, &files.journal, peers, out, entry);
            }
            _ => self.send_values(variables, peers, &files.budget, out, entry),
        }
    }

    /// Sends the values that a pull has requested.
    fn send_values(
        &mut self,
        variables: &Variables,
        peers: &Peers,
        budget: &Budget,
        out: &mut ShardOutputs,
        entry: ParkedRequest,
    ) {
        let ParkedRequest { request, wait: WaitReason::Pull { ranges, form, .. } } = entry else {
            return;
        };
        let encoded = form.and_then(|_| self.encode_buffers.pop()).unwrap_or_default();
        let Some(store) = variables.store() else { return };
        let snapshot = store.snapshot(&ranges);
        let bytes = |range: &Range<u64>| match form {
            None => range.end - range.start,
            Some(form) => store.layout().encoded_bytes(form, range.clone()),
        };
        let bytes = ranges.iter().map(bytes).sum();
        let (catalogue, shard) = (store.catalogue(), variables.id);
        let encoder = form.map(|form| PullEncoder { catalogue: catalogue.clone(), shard, form });
        let all = ranges == store.layout().dense();
        if let Some(client) = request.client.filter(|_| all) {
            // Values of a client that has left would never be dropped.
            let present = peers.registry.client(client).presence == ClientPresence::Present;
            self.keep_last_pull(variables, budget, client, present);
        }
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(bytes);
        let crc = peers.connections.get(&request.connection).is_some_and(|c| c.crc);
        let envelope = out.stamped(request.envelope);
        let counts = (variables.version, variables.gradients);
        let parts = PulledParts::new(snapshot, ranges, envelope, counts, crc, (encoder, encoded));
        out.push(ShardOutput::Stream { connection: request.connection, parts });
    }

    /// Stores the values of a pull if its client's next gradient may need compensation.
    fn keep_last_pull(
        &mut self,
        variables: &Variables,
        budget: &Budget,
        client: ClientKey,
        present: bool,
    ) {
        let compensates = self.config.compensates();
        // Rows are read by other pulls, and a copy of all of them would be too large.
        if let Some(store) = variables.ready()
            && compensates
            && present
            && store.layout().sparse().len() == 0
        {
            self.last_pulls.keep(client, store, variables.gradients, budget);
        }
    }

    /// Sends the rows that a pull has requested.
    fn send_rows(
        &mut self,
        variables: &Variables,
        journal: &Journal,
        peers: &Peers,
        out: &mut ShardOutputs,
        entry: ParkedRequest,
    ) {
        let ParkedRequest { request, wait } = entry;
        let WaitReason::Rows { partition, numbers, codec, answer_bytes, .. } = wait else {
            return;
        };
        let mut rows = self.row_buffers.take(answer_bytes as usize);
        let gathered = self.gather(variables, journal, (partition, &numbers), codec, &mut rows);
        self.row_buffers.put(numbers);
        if let Err(refusal) = gathered {
            self.row_buffers.put(rows);
            return request.refuse(out, refusal);
        }
        self.counters.pulls.add(1);
        self.counters.pull_bytes.add(rows.len() as u64);
        let message = message::Rows { version: variables.version, gradients: variables.gradients };
        let checked = peers.connections.get(&request.connection).is_some_and(|c| c.crc);
        let crc = checked.then(|| crc32c::crc32c(&rows));
        let (connection, body) = (request.connection, AnswerBody::Rows(rows));
        out.answer_with(connection, request.envelope, message.into(), body, crc);
    }

    /// Appends the rows with these numbers, in the order of the numbers.
    fn gather(
        &mut self,
        variables: &Variables,
        journal: &Journal,
        (id, numbers): (PartitionId, &[u8]),
        codec: Option<Codec>,
        rows: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let store = variables.store().ok_or(Refusal::NotInitialized {})?;
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
    variables: &Variables,
    header: &Header,
    selection: &Selection,
    form: Option<ValueEncoding>,
) -> Result<WaitReason, Refusal> {
    let store = variables.ready().ok_or(Refusal::NotInitialized {})?;
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
