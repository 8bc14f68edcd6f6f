//! Plans, pushes and messages for the tests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::Encodings;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, ConfigEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence, ShardId, TokenId,
    VariableId,
};
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::message::{
    self, BodyCrc, CatalogueState, ModeIs, NonFinitePolicy, Operation, Welcome,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Grant, Header, Message, Outcome, Refusal, version};
use pushpull_common::variable::VariableSpec;

use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{PushOrder, ReadPoint};

pub(super) const LEASE: Duration = Duration::from_secs(5);

/// The link to the step owner, which is opened first.
pub(super) const OWNER: usize = 0;

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(super) fn shard(task: u32) -> ShardId {
    ShardId { task, shard: 0 }
}

pub(super) fn grant(token: u64, push_slot: u32) -> Grant {
    Grant {
        token: TokenId(token),
        generation: 1,
        step: GlobalStep(token),
        push_slot,
        samples: None,
        ahead: None,
    }
}

pub(super) fn applied(step: u64) -> Outcome {
    Outcome::Applied { version: step, step: GlobalStep(step), staleness: 0 }
}

pub(super) fn refused(refusal: Refusal) -> Message {
    message::Refused { refusal }.into()
}

/// Returns variables `v0`, `v1`, … of `f32`, one on each of `tasks` ps tasks.
pub(super) fn plan(tasks: u32, elements: u64) -> Arc<ShardingPlan> {
    let variables = (0..tasks).map(|i| VariableSpec::f32(format!("v{i}"), [elements]).unwrap());
    place(variables.collect(), tasks)
}

/// Returns one variable of five `bf16` on one task.
pub(super) fn halves_plan() -> Arc<ShardingPlan> {
    place(vec![VariableSpec::bf16("halves", [5]).unwrap()], 1)
}

/// Returns one variable of seven rows of three, split over two tasks, and a small one on the first.
pub(super) fn split_plan() -> Arc<ShardingPlan> {
    let split = VariableSpec::f32("split", [7, 3]).unwrap();
    let split = split.partitioner(Partitioner::Fixed { shards: 2 });
    place(vec![split, VariableSpec::f32("small", [1]).unwrap()], 2)
}

pub(super) fn place(variables: Vec<VariableSpec>, tasks: u32) -> Arc<ShardingPlan> {
    let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    Arc::new(ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap())))
}

/// Returns a push of all variables; every byte is `fill`.
pub(super) fn order(plan: &ShardingPlan, grant: Option<Grant>, fill: u8) -> PushOrder {
    let all = (0..plan.catalogue().variables().len() as u32).map(VariableId);
    let parts = Scatter::new(plan, all).parts(|range| Bytes::from(vec![fill; range.len()]));
    let operation = match grant {
        Some(_) => Operation::Gradient {},
        None => Operation::Assign {},
    };
    PushOrder::of_parts(operation, grant, ReadPoint::default(), parts)
}

/// Returns the header of an answer.
pub(super) fn header(
    request: RequestId,
    restore_epoch: RestoreEpoch,
    step: GlobalStep,
    message: &Message,
    body_bytes: usize,
) -> Header {
    assert!(Message::body_limit(message.kind()) >= Some(body_bytes as u64), "{message:?}");
    Header {
        version: version::NEWEST,
        kind: message.kind(),
        meta_bytes: 0,
        flags: 0,
        body_bytes: body_bytes as u64,
        request,
        restore_epoch,
        config_epoch: ConfigEpoch(0),
        step,
        sequence: Sequence(0),
        deadline_ms: 0,
        body_crc: 0,
        auth: 0,
        meta_crc: 0,
    }
}

/// Returns the welcome of a server whose variables are ready.
pub(super) fn welcome() -> Welcome {
    Welcome {
        version: version::NEWEST,
        shards: 1,
        client_epoch: ClientEpoch(3),
        mode: ModeIs::Asynchronous { owner_first: false },
        lease_ms: LEASE.as_millis() as u32,
        part_bytes_max: 1 << 20,
        body_crc: BodyCrc::Off {},
        non_finite: NonFinitePolicy::Reject {},
        encodings: Encodings::all(),
        catalogue: CatalogueState::Ready { digest: [0; 32] },
        restore_epoch: RestoreEpoch(0),
        restored_step: GlobalStep(0),
        arena: 1,
        unix_address: Text::default(),
        identity: Identity::new().with("ps", "0,1").to_wire(),
        features: Default::default(),
    }
}

/// Returns the answer to a push.
pub(super) fn push_answer(outcome: Outcome) -> message::PushAnswer {
    message::PushAnswer { outcome, duplicate: false, next: None, ended: None, push_slot: 0 }
}
