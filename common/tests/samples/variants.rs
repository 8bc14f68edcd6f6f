//! A sample of every variant of every sum type on the wire, and a check that none is missing.

use std::collections::BTreeSet;

use pushpull_common::ids::{
    ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, Incarnation,
    PartitionId, RestoreEpoch, Sequence, ShardId, TokenId, VariableId,
};
use pushpull_common::protocol::message::*;
use pushpull_common::protocol::refusal::{Detail, Refusal};
use pushpull_common::protocol::wire::{FieldReader, List, Text, Wire};
use pushpull_common::protocol::{Features, Outcome, ProtocolError, PushState};

/// A sum type with a list of its variants.
pub(crate) trait Variants: Wire {
    /// The name of the type in [`ProtocolError::Invalid`].
    const NAME: &'static str;
    /// Returns each variant at least once, with its name.
    fn named() -> Vec<(&'static str, Self)>;
}

macro_rules! variants {
    ($($type:ty: $($name:literal => $value:expr),*;)*) => {
        $(impl Variants for $type {
            const NAME: &'static str = stringify!($type);
            fn named() -> Vec<(&'static str, Self)> {
                vec![$(($name, $value)),*]
            }
        })*

        /// Checks that every tag that decodes has a sample.
        pub(crate) fn check_complete() {
            $(check::<$type>();)*
        }
    };
}

variants! {
    Role:
        "worker" => Role::Worker {}, "chief" => Role::Chief {}, "reader" => Role::Reader {},
        "admin" => Role::Admin {}, "peer" => Role::Peer {}, "client" => Role::Client {},
        "rank" => Role::Rank {}, "task" => Role::Task {};
    TaskKey:
        "index" => TaskKey::Index { index: 3 },
        "id" => TaskKey::Id { id: Text::clipped("container_17_02") };
    BodyCrc: "on" => BodyCrc::On {}, "off" => BodyCrc::Off {}, "auto" => BodyCrc::Auto {};
    ModeIs:
        "asynchronous" => ModeIs::Asynchronous { owner_first: false },
        "synchronous" => ModeIs::Synchronous { replicas_to_aggregate: 4, total_num_replicas: 5 };
    NonFinitePolicy:
        "reject" => NonFinitePolicy::Reject {}, "count" => NonFinitePolicy::Count {},
        "allow" => NonFinitePolicy::Allow {};
    CatalogueState:
        "absent" => CatalogueState::Absent {},
        "declared" => CatalogueState::Declared { digest: filled(0xd0) },
        "ready" => CatalogueState::Ready { digest: filled(0xd0) };
    Operation:
        "gradient" => Operation::Gradient {}, "assign" => Operation::Assign {},
        "assign_add" => Operation::AssignAdd {};
    Selection:
        "all" => Selection::All {},
        "partitions" => Selection::Partitions { partitions: partitions() },
        "dense" => Selection::Dense {};
    PhaseIs:
        "no_variables" => PhaseIs::NoVariables {}, "declared" => PhaseIs::Declared {},
        "training" => PhaseIs::Training {}, "finished" => PhaseIs::Finished {},
        "last_step" => PhaseIs::LastStep {}, "data_end" => PhaseIs::DataEnd {};
    PresenceIs:
        "present" => PresenceIs::Present {}, "left" => PresenceIs::Left {},
        "lost" => PresenceIs::Lost {};
    EndReason: "last_step" => EndReason::LastStep {}, "finished" => EndReason::Finished {},
        "data_end" => EndReason::DataEnd {};
    Outcome:
        "applied" => Outcome::Applied { version: 7, step: GlobalStep(8), staleness: 2 },
        "accepted" => Outcome::Accepted { step: GlobalStep(8) },
        "stale" => Outcome::Stale { current: GlobalStep(9) },
        "withdrawn" => Outcome::Withdrawn {}, "held" => Outcome::Held {},
        "repeated" => Outcome::Repeated {};
    PushState:
        "unknown" => PushState::Unknown {}, "receiving" => PushState::Receiving { bytes: 4096 },
        "settled applied" => settled(0), "settled accepted" => settled(1),
        "settled stale" => settled(2), "settled withdrawn" => settled(3),
        "settled held" => settled(4), "settled repeated" => settled(5),
        "too_old" => PushState::TooOld { oldest: 65 };
    Refusal:
        "version" => Refusal::Version { oldest: 1, newest: 2 },
        "identity" => Refusal::Identity {
            field: detail("optimizer"), server: detail("adam"), client: detail("sgd"),
            server_hash: filled(0xa0), client_hash: filled(0xb0),
        },
        "catalogue" => Refusal::Catalogue {
            server: filled(0xa0), client: filled(0xb0), differs: detail("größe"),
        },
        "wrong_shard" => Refusal::WrongShard {
            wanted: ShardId { task: 1, shard: 2 }, task: 3, shards: 4,
        },
        "not_initialized" => Refusal::NotInitialized {},
        "fenced" => Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) },
        "role" => Refusal::Role { role: 3, kind: 32 },
        "does_not_fit" => Refusal::DoesNotFit {
            need: 1 << 40, limit: 1 << 30, made_of: Detail::clipped("4 push slots"),
        },
        "unknown_partition" => Refusal::UnknownPartition { partition: PartitionId(17) },
        "range" => Refusal::Range { offset: 8, bytes: 16, limit: 20 },
        "non_finite" => Refusal::NonFinite {
            variable: VariableId(18), element: 19, value: f64::INFINITY,
        },
        "push_slot_taken" => Refusal::PushSlotTaken { push_slot: 14 },
        "deadline" => Refusal::Deadline { waited_ms: 1500, awaited: detail("a token") },
        "busy" => Refusal::Busy { what: detail("connections"), limit: 4096 },
        "unsupported" => Refusal::Unsupported { kind: 60, detail: detail("no") },
        "stopping" => Refusal::Stopping {},
        "token" => Refusal::Token { token: TokenId(11), generation: 12 },
        "restore_epoch" => Refusal::RestoreEpoch {
            found: RestoreEpoch(1), current: RestoreEpoch(2), step: GlobalStep(3),
        },
        "storage" => Refusal::Storage { detail: detail("disk full") },
        "window" => Refusal::Window {
            sequence: Sequence(1), oldest: Sequence(2), newest: Sequence(65),
        },
        "incomplete" => Refusal::Incomplete {
            partition: PartitionId(17), bytes: 8, expected: 16,
        },
        "operation" => Refusal::Operation { variable: VariableId(18), tried: detail("add") },
        "denied" => Refusal::Denied {},
        "length" => Refusal::Length { named: 16, received: 8 },
        "row" => Refusal::Row { variable: VariableId(18), place: 3, row: 9, from: 5, last: 6 },
        "rows" => Refusal::Rows { variable: VariableId(18), rows: 9, limit: 7 },
        "encoding" => Refusal::Encoding {
            variable: VariableId(18),
            encoding: 9,
            detail: detail("unknown"),
        },
        "bucket" => Refusal::Bucket {
            variable: VariableId(18), place: 3, row: 1 << 60, bucket: 7, from: 8, to: 16,
        },
        "table_full" => Refusal::TableFull {
            variable: VariableId(18), rows: 90, more: 11, limit: 100,
        },
        "untrainable" => Refusal::Untrainable { variable: detail("emb*"), detail: detail("no") },
        "unknown_epoch" => Refusal::UnknownEpoch { epoch: ClientEpoch(9), newest: ClientEpoch(2) },
        "unknown_task" => Refusal::UnknownTask {
            job: Text::clipped("worker"), task: 7, detail: detail("tasks 0-3"),
        },
        "overflow" => Refusal::Overflow {
            variable: VariableId(18), element: 19, value: f64::NEG_INFINITY,
        },
        "data_set" => Refusal::DataSet { differs: detail("batch is 1, not 2") },
        "unknown_coordinator" => Refusal::UnknownCoordinator { coordinator: CoordinatorId(31) },
        "coordinator_epoch" => Refusal::CoordinatorEpoch {
            coordinator: CoordinatorId(31), epoch: CoordinatorEpoch(32), current: CoordinatorEpoch(33),
        },
        "effect_window" => Refusal::EffectWindow {
            number: EffectNumber(99), settled: EffectNumber(34), newest: EffectNumber(98),
        },
        "not_final" => Refusal::NotFinal { pushes: 2 },
        "feature" => Refusal::Feature { number: 40, has: Features(0x3) },
        "checkpoint" => Refusal::Checkpoint { detail: detail("it has other variables") },
        "replicas_absent" => Refusal::ReplicasAbsent { waited_ms: 250, awaited: detail("a replica") },
        "unavailable" => Refusal::Unavailable { detail: detail("ps task 1 is away") },
        "unknown_function" => Refusal::UnknownFunction {
            function: detail("f"), known: detail("g, h"),
        },
        "input" => Refusal::Input {
            function: detail("f"), input: detail("x"), detail: detail("it is missing"),
        },
        "no_device" => Refusal::NoDevice { device: detail("/gpu:0"), detail: detail("no driver") },
        "no_output" => Refusal::NoOutput {
            call: 31, output: detail("loss"), detail: detail("it is released"),
        },
        "depth" => Refusal::Depth { depth: 9, limit: 8 },
        "memory" => Refusal::Memory { what: detail("the inputs"), bytes: 4096, left: 1024 },
        "unreturned" => Refusal::Unreturned { function: detail("f"), executions: 4 },
        "settled" => Refusal::Settled { call: 31, settled: 32 };
    Input:
        "value" => Input::Value { is: value_is() },
        "variable" => Input::Variable { variable: Text::clipped("w") },
        "output" => Input::Output {
            job: Text::clipped("worker"), task: 3, of: output_ref(),
        };
    CallOutcome:
        "done" => CallOutcome::Done {
            outputs: List::new(vec![NamedValue { name: Text::clipped("loss"), is: value_is() }])
                .expect("the list is within its limit"),
        },
        "failed" => CallOutcome::Failed { retry: true, detail: detail("no luck") },
        "panicked" => CallOutcome::Panicked { detail: detail("index out of bounds") },
        "cancelled" => CallOutcome::Cancelled {};
    RingEnd:
        "lost" => RingEnd::Lost {
            rank: 2, host: Text::clipped("node-2"), silent_ms: 5000, detail: detail("reset"),
        },
        "difference" => RingEnd::Difference {
            number: 41, rank: 1, operation: ring_operation(Collective::ReduceSum {}),
            other_rank: 2, other: ring_operation(Collective::Barrier {}),
        },
        "given_up" => RingEnd::GivenUp { rank: 2, detail: detail("NaN in w") },
        "left" => RingEnd::Left { rank: 2 },
        "regrouped" => RingEnd::Regrouped {};
    Collective:
        "reduce_sum" => Collective::ReduceSum {}, "reduce_mean" => Collective::ReduceMean {},
        "reduce_min" => Collective::ReduceMin {}, "reduce_max" => Collective::ReduceMax {},
        "scatter_sum" => Collective::ScatterSum {}, "scatter_mean" => Collective::ScatterMean {},
        "scatter_min" => Collective::ScatterMin {}, "scatter_max" => Collective::ScatterMax {},
        "gather" => Collective::Gather {}, "broadcast" => Collective::Broadcast { root: 3 },
        "barrier" => Collective::Barrier {};
    RingCodec:
        "f16" => RingCodec::F16 {}, "bf16" => RingCodec::Bf16 {}, "int8" => RingCodec::Int8 {},
        "onebit" => RingCodec::OneBit {}, "topk" => RingCodec::TopK { fraction: 0.01 };
}

pub(crate) fn ring_operation(collective: Collective) -> RingOperation {
    RingOperation { collective, elements: 16, count: 1000, name: Text::clipped("w"), codec: None }
}

pub(crate) fn output_ref() -> OutputRef {
    OutputRef {
        owner: Incarnation(0x1122_3344_5566_7788),
        server: Incarnation(0x99aa_bbcc_ddee_ff00),
        call: 31,
        output: Text::clipped("loss"),
    }
}

/// Returns the samples of [`Refusal`], each with its name.
pub(crate) fn refusals() -> Vec<(&'static str, Refusal)> {
    Refusal::named()
}

/// Returns the samples of [`Outcome`], each with its name.
pub(crate) fn outcomes() -> Vec<(&'static str, Outcome)> {
    Outcome::named()
}

/// Returns the samples of [`PushState`], each with its name.
pub(crate) fn push_states() -> Vec<(&'static str, PushState)> {
    PushState::named()
}

/// Returns 32 bytes that count up from `first`.
pub(crate) fn filled(first: u8) -> [u8; 32] {
    std::array::from_fn(|index| first.wrapping_add(index as u8))
}

fn settled(outcome: usize) -> PushState {
    PushState::Settled { outcome: Outcome::named()[outcome].1 }
}

fn partitions<const MAX: usize>() -> List<PartitionId, MAX> {
    List::new(vec![PartitionId(0), PartitionId(2), PartitionId(0x0102_0304)]).expect("a short list")
}

fn detail(text: &str) -> Detail {
    Detail::new(text).expect("the text is within its limit")
}

fn check<T: Variants>() {
    let listed: BTreeSet<u8> = T::named()
        .iter()
        .map(|(_, value)| {
            let mut bytes = Vec::new();
            value.put(&mut bytes);
            bytes[0]
        })
        .collect();
    let known: BTreeSet<u8> = (0..=u8::MAX).filter(|&tag| is_known::<T>(tag)).collect();
    assert_eq!(listed, known, "the samples of {} do not cover its tags", T::NAME);
}

fn is_known<T: Variants>(tag: u8) -> bool {
    let mut bytes = [0; 256];
    bytes[0] = tag;
    match T::take(&mut FieldReader::new("sample", &bytes)) {
        Err(ProtocolError::Invalid { field, .. }) => field != T::NAME,
        _ => true,
    }
}

fn value_is() -> ValueIs {
    ValueIs { elements: 1, extents: List::new(vec![2, 2]).expect("the list is within its limit") }
}
