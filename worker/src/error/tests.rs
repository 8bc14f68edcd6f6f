//! Tables of all errors and refusals, with what a training does about each.
//!
//! A training may end only by what no other attempt can heal. A new error or refusal fails these
//! tests until it is classified.

use pushpull_common::ids::{
    ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, PartitionId,
    RestoreEpoch, ShardId, TokenId, VariableId,
};
use pushpull_common::protocol::Features;
use pushpull_common::protocol::wire::Text;

use super::*;

const SHARD: ShardId = ShardId { task: 0, shard: 0 };

/// Returns the name of a variant, from its debug text.
fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

fn text<const MAX: usize>(text: &str) -> Text<MAX> {
    Text::clipped(text)
}

fn refusals() -> Vec<(Refusal, Advice)> {
    use Advice::{Rejoin, Retry, SkipBatch, Stop};
    let variable = VariableId(1);
    let partition = PartitionId(1);
    let coordinator = CoordinatorId(1);
    vec![
        (Refusal::Version { oldest: 1, newest: 1 }, Stop),
        (
            Refusal::Identity {
                field: text("ps"),
                server: text("a"),
                client: text("b"),
                server_hash: [0; 32],
                client_hash: [1; 32],
            },
            Stop,
        ),
        // To a hello of a worker that has joined: the next join compares the variables.
        (Refusal::Catalogue { server: [0; 32], client: [1; 32], differs: text("w") }, Rejoin),
        (Refusal::WrongShard { wanted: SHARD, task: 1, shards: 1 }, Stop),
        (Refusal::NotInitialized {}, Rejoin),
        // The session reports it as `Error::Fenced`.
        (Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) }, Stop),
        (Refusal::Role { role: 1, kind: 1 }, Stop),
        (Refusal::DoesNotFit { need: 2, limit: 1, made_of: text("the model") }, Stop),
        (Refusal::UnknownPartition { partition }, Stop),
        (Refusal::Range { offset: 1, bytes: 1, limit: 1 }, Stop),
        (Refusal::NonFinite { variable, element: 0, value: f64::NAN }, SkipBatch),
        (Refusal::PushSlotTaken { push_slot: 1 }, Retry),
        (Refusal::Deadline { waited_ms: 1, awaited: text("a token") }, Retry),
        (Refusal::Busy { what: text("saves"), limit: 1 }, Retry),
        (Refusal::Unsupported { kind: 1, detail: text("no") }, Stop),
        (Refusal::Stopping {}, Retry),
        (Refusal::Token { token: TokenId(1), generation: 1 }, SkipBatch),
        (
            Refusal::RestoreEpoch {
                found: RestoreEpoch(1),
                current: RestoreEpoch(2),
                step: GlobalStep(3),
            },
            Rejoin,
        ),
        (Refusal::Storage { detail: text("the disk is full") }, Retry),
        // The next incarnation has a window of its own.
        (
            Refusal::Window { sequence: Sequence(1), oldest: Sequence(2), newest: Sequence(3) },
            Rejoin,
        ),
        (Refusal::Incomplete { partition, bytes: 1, expected: 2 }, Stop),
        (Refusal::Operation { variable, tried: text("add") }, Stop),
        (Refusal::Denied {}, Stop),
        (Refusal::Length { named: 1, received: 2 }, Stop),
        (Refusal::Row { variable, place: 0, row: 1, from: 2, last: 3 }, Stop),
        (Refusal::Rows { variable, rows: 2, limit: 1 }, Stop),
        (Refusal::Encoding { variable, encoding: 1, detail: text("no") }, Stop),
        (Refusal::Bucket { variable, place: 0, row: 1, bucket: 2, from: 3, to: 4 }, Stop),
        // The session reports it as `Error::TableFull`.
        (Refusal::TableFull { variable, rows: 1, more: 1, limit: 1 }, Stop),
        (Refusal::Untrainable { variable: text("w"), detail: text("no") }, Stop),
        (Refusal::UnknownEpoch { epoch: ClientEpoch(2), newest: ClientEpoch(1) }, Rejoin),
        (Refusal::UnknownTask { job: text("worker"), task: 7, detail: text("no") }, Stop),
        (Refusal::Overflow { variable, element: 0, value: f64::INFINITY }, SkipBatch),
        // To a token request of a worker that has a data set: the next join declares it again.
        (Refusal::DataSet { differs: text("not declared") }, Rejoin),
        (Refusal::UnknownCoordinator { coordinator }, SkipBatch),
        // To the end of a training, which is then reported as not final.
        (Refusal::NotFinal { pushes: 1 }, Stop),
        (
            Refusal::CoordinatorEpoch {
                coordinator,
                epoch: CoordinatorEpoch(1),
                current: CoordinatorEpoch(2),
            },
            SkipBatch,
        ),
        (
            Refusal::EffectWindow {
                number: EffectNumber(1),
                settled: EffectNumber(2),
                newest: EffectNumber(3),
            },
            Stop,
        ),
        (Refusal::Feature { number: 1, has: Features(0) }, Stop),
        // Another shape, optimizer or set of variables; no place for checkpoints; none is sound.
        (Refusal::Checkpoint { detail: text("it has no w") }, Stop),
        (Refusal::ReplicasAbsent { waited_ms: 1, awaited: text("a replica") }, Stop),
        (Refusal::Unavailable { detail: text("ps task 1 was killed") }, Retry),
        (Refusal::UnknownFunction { function: text("f"), known: text("g") }, Stop),
        (Refusal::Input { function: text("f"), input: text("x"), detail: text("no") }, Stop),
        (Refusal::NoDevice { device: text("gpu"), detail: text("no") }, Stop),
        (Refusal::NoOutput { call: 1, output: text("y"), detail: text("no") }, Stop),
        (Refusal::Depth { depth: 9, limit: 8 }, Stop),
        (Refusal::Memory { what: text("inputs"), bytes: 2, left: 1 }, Retry),
        (Refusal::Unreturned { function: text("f"), executions: 1 }, Retry),
        (Refusal::Settled { call: 1, settled: 1 }, Stop),
    ]
}

#[test]
fn every_refusal_is_classified() {
    let table = refusals();
    for (refusal, advice) in &table {
        let doing = "push";
        let refusal = refusal.clone();
        let error = Error::Refused { doing, shard: SHARD, refusal };
        assert_eq!(error.advice(), *advice, "{error}");
    }
    let names: Vec<String> = table.iter().map(|(refusal, _)| variant(refusal)).collect();
    let unlisted = |name: &&str| !names.iter().any(|listed| listed == name);
    let unlisted: Vec<&str> = Refusal::VARIANTS.iter().copied().filter(unlisted).collect();
    assert!(unlisted.is_empty(), "what does a training do about {unlisted:?}?");
    assert_eq!(names.len(), Refusal::VARIANTS.len(), "each is listed once");
}

/// `Error::advice` has no default, so a new error does not compile until it is classified there.
#[test]
fn an_error_has_the_advice_that_its_text_gives() {
    use Advice::{Rejoin, Retry, SkipBatch, Stop};
    let name = || "w".to_owned();
    let doing = "push";
    let waited = Duration::from_secs(1);
    let awaited = UnresponsiveShards::default();
    let sequence = Sequence(1);
    let codec_error = |value: f64| CodecError::NonFinite { codec: Codec::F16, element: 0, value };
    for (error, advice) in [
        (ConfigError::NothingToCompress { names: name() }.into(), Stop),
        (Error::Device(pushpull_device::ComputeError::Name { name: name() }), Stop),
        (Error::Differs { shard: SHARD, differs: name() }, Stop),
        (Error::DataDiffers { shard: SHARD, differs: name() }, Stop),
        (
            Error::Unexpected { shard: SHARD, setting: "mode", expected: name(), found: name() },
            Stop,
        ),
        (Error::UnknownCodec { variable: name(), codec: Codec::F16, shard: SHARD }, Stop),
        (Error::NoEpoch { shard: SHARD, epoch: 1 }, Stop),
        (Error::ForeignCatalogue { shard: SHARD, reason: name() }, Stop),
        (Error::AlreadyJoined, Stop),
        (Error::Thread { reason: name() }, Retry),
        (Error::DamagedResiduals, Stop),
        (Error::ForeignResiduals, Stop),
        (Error::ResidualWithoutCodec { variable: name() }, Stop),
        (Error::NonFiniteRow { variable: name(), row: 1, element: 0, value: f64::NAN }, SkipBatch),
        (Error::Timeout { doing, waited, awaited, sequence: None }, Retry),
        (Error::Refused { doing, shard: SHARD, refusal: Refusal::Stopping {} }, Retry),
        (
            Error::Identity {
                left: SHARD,
                right: SHARD,
                field: name(),
                left_value: name(),
                right_value: name(),
                left_hash: name(),
                right_hash: name(),
            },
            Stop,
        ),
        (Error::ReplicasAbsent { doing, waited, awaited: name(), sequence: None }, Stop),
        (Error::Fenced, Stop),
        (Error::RolledBack { from_step: 2, to_step: 1 }, Rejoin),
        (Error::ServerStopped { shard: SHARD }, Stop),
        (Error::StateLost { shard: SHARD }, Rejoin),
        (Error::NoCheckpoint { shard: SHARD }, Stop),
        (Error::NonFinite { variable: name(), element: 0, value: f64::NAN }, SkipBatch),
        (Error::Overflow { variable: name(), element: 0, value: f64::INFINITY }, SkipBatch),
        (Error::TableFull { variable: name(), shard: SHARD, rows: 1, more: 1, limit: 1 }, Stop),
        (Error::Encode { variable: name(), error: codec_error(f64::NAN) }, SkipBatch),
        (Error::Encode { variable: name(), error: CodecError::Text { text: name() } }, Stop),
        (Error::UserBlob { bytes: 2, limit: 1 }, Stop),
        (Error::EmptyPush, Stop),
        (Error::DroppedVariable, SkipBatch),
        (Error::ForeignBuffer, Stop),
        (Error::NotChief { doing, task: TaskId::worker(1) }, Stop),
        (Error::NotJoined { doing }, Stop),
        (Error::UnknownPush { sequence }, Stop),
        (Error::Window { limit: 1 }, Retry),
        (Error::Busy { doing, limit: 1 }, Retry),
        (ViewError::Unknown { name: name() }.into(), Stop),
        (Error::Interrupted { doing }, Stop),
        (Error::Panicked { callback: "on_progress", message: name() }, Stop),
        (Error::Ended { doing }, Rejoin),
    ] {
        assert_eq!(error.advice(), advice, "{error}");
    }
}

#[test]
fn the_text_of_a_restore_suits_either_order_of_steps() {
    for (from_step, to_step) in [(448, 372), (372, 448), (7, 7)] {
        let text = Error::RolledBack { from_step, to_step }.to_string();
        assert!(text.contains(&format!("resumes at step {to_step},")), "{text}");
        assert!(text.contains(&format!("this worker was {from_step}")), "{text}");
        assert!(!text.contains("back"), "{text}");
    }
}
