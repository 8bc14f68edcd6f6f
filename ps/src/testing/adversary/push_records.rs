//! The pushes of an adversary with their outcomes, and the properties that peers can check.

use std::collections::BTreeMap;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::{ClientEpoch, Sequence};
use pushpull_common::protocol::message::{Hello, Operation, OutcomeIs};
use pushpull_common::protocol::{Features, Header, Message, Outcome, PushState};
use pushpull_common::tensor::DType;

use crate::shard::output::PulledParts;

/// A push: the task and the epoch of its client, and its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PushKey {
    pub(super) task: u32,
    pub(super) epoch: ClientEpoch,
    pub(super) sequence: Sequence,
}

/// The pushes sent under a key, and the outcome.
#[derive(Debug, Default)]
struct PushRecord {
    has_gradient: bool,
    has_other_operation: bool,
    /// Whether the last part was sent.
    is_whole: bool,
    outcome: Option<Outcome>,
}

/// The pushes that peers have sent.
///
/// Invariants: a push has one outcome; a version belongs to one push.
#[derive(Debug, Default)]
pub(super) struct PushRecords {
    pushes: BTreeMap<PushKey, PushRecord>,
    versions: BTreeMap<u64, PushKey>,
    /// The newest welcomed process of each task.
    newest: BTreeMap<u32, Hello>,
    /// Whether peers send nothing more.
    has_ended: bool,
}

impl PushRecords {
    /// Records a hello that the shard has welcomed, with the epoch of the welcome.
    pub(super) fn welcomed(&mut self, hello: &Hello) {
        if hello.role.is_member() {
            self.newest.insert(hello.task, hello.clone());
        }
    }

    /// Records a message that a peer sends, if it is a part of a push.
    pub(super) fn sent(&mut self, key: PushKey, message: &Message) {
        let (operation, whole) = match message {
            Message::PushPart(part) => (part.operation, part.whole),
            Message::PushEncoded(encoded) => (encoded.part.operation, encoded.part.whole),
            Message::PushShared(shared) => (shared.operation, shared.whole),
            Message::EffectPart(effect) => (effect.part.operation, effect.part.whole),
            Message::EffectEncoded(effect) => {
                (effect.encoded.part.operation, effect.encoded.part.whole)
            }
            Message::EffectShared(effect) => (effect.shared.operation, effect.shared.whole),
            _ => return,
        };
        let push = self.pushes.entry(key).or_default();
        match operation {
            Operation::Gradient {} => push.has_gradient = true,
            Operation::Assign {} | Operation::AssignAdd {} => push.has_other_operation = true,
        }
        push.is_whole |= whole.is_some();
    }

    /// Records the answer to a push, if the message is one.
    pub(super) fn answered(&mut self, key: PushKey, message: &Message) {
        let outcome = match message {
            Message::PushAnswer(answer) => answer.outcome,
            Message::OutcomeIs(OutcomeIs { state: PushState::Settled { outcome } }) => *outcome,
            Message::OutcomeIs(OutcomeIs { state: PushState::Unknown {} }) if self.has_ended => {
                // Nothing of it can still arrive.
                self.pushes.remove(&key);
                return;
            }
            _ => return,
        };
        let push = self.pushes.entry(key).or_default();
        let before = *push.outcome.get_or_insert(outcome);
        assert_eq!(before, outcome, "{key:?} has one outcome");
        if let Outcome::Applied { version, .. } = outcome {
            let owner = *self.versions.entry(version).or_insert(key);
            assert_eq!(owner, key, "version {version} belongs to one push");
        }
    }

    /// Ends all pushes. Returns the newest processes of the tasks, each with its pushes that have
    /// no outcome.
    pub(super) fn end(&mut self) -> Vec<(Hello, Vec<Sequence>)> {
        self.has_ended = true;
        let mut unsettled = Vec::new();
        for hello in self.newest.values() {
            let pushes = self.pushes.iter().filter(|(key, push)| {
                key.task == hello.task && key.epoch == hello.client_epoch && push.outcome.is_none()
            });
            unsettled.push((hello.clone(), pushes.map(|(key, _)| key.sequence).collect()));
        }
        unsettled
    }

    /// Checks the number of gradients that the shard has applied.
    pub(super) fn check_count(&self, gradients: u64) {
        let mut applied = 0;
        let mut unknown = 0;
        for push in self.pushes.values().filter(|push| push.has_gradient) {
            match push.outcome {
                Some(Outcome::Applied { .. }) if !push.has_other_operation => applied += 1,
                // Sent as more than one operation, or by a process that was fenced.
                Some(Outcome::Applied { .. }) => unknown += 1,
                None if push.is_whole => unknown += 1,
                _ => {}
            }
        }
        assert!(
            (applied..=applied + unknown).contains(&gradients),
            "{gradients} gradients are applied, {applied} are known and {unknown} unknown"
        );
    }
}

/// Reads all parts of the values that answer a pull. If every push `is_uniform`, all elements of a
/// partition are equal; otherwise the pull is torn.
pub(super) fn check_values(mut parts: PulledParts, layout: &ShardLayout, is_uniform: bool) {
    let mut head = Vec::new();
    while let Some(range) = parts.next_part(Features::NONE, &mut head) {
        let message = parsed(&std::mem::take(&mut head));
        let mut body = Vec::new();
        parts.slices(range.clone()).for_each(|slice| body.extend_from_slice(slice));
        // Encoded values are rounded.
        if !is_uniform || !matches!(message, Message::Pulled(_)) {
            continue;
        }
        for partition in layout.partitions() {
            let end = partition.offset + partition.bytes;
            // Gradients of rows train some of a partition.
            let is_dense = !partition.is_sparse();
            if is_dense && range.start <= partition.offset && end <= range.end {
                let values = &body[(partition.offset - range.start) as usize..];
                let values = &values[..partition.bytes as usize];
                let torn = differing(partition.dtype, values);
                assert_eq!(torn, None, "all elements of partition {} are equal", partition.id);
            }
        }
    }
}

/// Parses the head of a part, which is valid.
fn parsed(head: &[u8]) -> Message {
    let (header, meta) = head.split_first_chunk().expect("a part has a header");
    let header = Header::take(header).expect("the header of a part is valid");
    Message::take(header.kind, Features::NONE, meta).expect("the meta of a part is valid")
}

/// Finds an element that differs from the first one: its index and its bits. All NaN are equal.
fn differing(dtype: DType, bytes: &[u8]) -> Option<(usize, u64)> {
    let bits = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let bits = u64::from_le_bytes(word);
        let is_nan = match dtype {
            DType::F32 => f32::from_bits(bits as u32).is_nan(),
            DType::F64 => f64::from_bits(bits).is_nan(),
            _ => false,
        };
        if is_nan { u64::MAX } else { bits }
    };
    let mut elements = bytes.chunks(dtype.size()).map(bits).enumerate();
    let (_, first) = elements.next()?;
    elements.find(|&(_, bits)| bits != first)
}
