//! Numbers that a peer names: none of them harms what comes later.

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::RESTORE_EPOCHS_AHEAD;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal, message};
use pushpull_common::table::{TableSpec, bucket};
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, chief, index_of, pack};
use super::world::World;
use crate::shard::ShardInput;

/// The step owner counts the steps. Another shard learns its count over their connection.
#[test]
fn a_step_that_a_client_names_expires_no_rows_on_a_shard_that_does_not_own_the_step() {
    let users = TableSpec::new(1 << 20).expire_after(2000);
    let table = VariableSpec::table("users", DType::F32, [3], users).unwrap();
    let variables = vec![VariableSpec::f32("w", [3]).unwrap(), table];
    let (mut world, lines) = World::ready(variables, Sgd::new(1.0), |config| config.shards(2));
    let layout = world.catalogue.layout(ShardId { task: 0, shard: 1 });
    let part = layout.tables().first().expect("the second shard has rows").clone();
    let ids = (0..).filter(|&id| part.rows.contains(&bucket(id)));
    let ids: Vec<u64> = ids.take(4).collect();
    let mut sequence = 0;
    let mut assign = |world: &mut World, ids: &[u64], step: u64| {
        sequence += 1;
        let push = Push::plain(sequence, Operation::Assign {}, world.push_slot(lines[1]));
        let push = Push { grant: Grant { step: GlobalStep(step), ..push.grant }, ..push };
        let index = index_of(ids);
        let values = bytes_of(&vec![1_f32; 3 * ids.len()]);
        let at = part.index.expect("a table has an index");
        match world.push_answer(lines[1], &push, &[(at, &index), (part.offset, &values)]) {
            Message::PushAnswer(answer) => {
                assert!(matches!(answer.outcome, Outcome::Applied { .. }), "{answer:?}");
            }
            other => panic!("{other:?}"),
        }
        world.shards[1].table_rows()
    };
    assert_eq!(assign(&mut world, &ids[..3], 0), 3);
    for step in [2001, 1 << 20, 1 << 40, 1 << 62, u64::MAX, 2001] {
        assert_eq!(assign(&mut world, &ids[3..], step), 4, "no step {step} was made");
    }
    // Another epoch's steps say nothing about this one.
    for (epoch, expected) in [(2, 4), (1, 1)] {
        let restore_epoch = RestoreEpoch(epoch);
        let step = GlobalStep(3000);
        let envelope = Envelope { restore_epoch, step, ..Envelope::default() };
        let (header, message) = pack(&envelope, &message::HeartbeatAnswer {}.into(), 0);
        world.input(1, ShardInput::Owner { header: &header, message });
        assert_eq!(assign(&mut world, &ids[3..], 1 << 62), expected);
    }
}

#[test]
fn an_epoch_that_leaves_none_to_restore_is_refused() {
    let variables = || vec![VariableSpec::f32("w", [3]).unwrap()];
    for epoch in [0, RESTORE_EPOCHS_AHEAD + 1, 1 << 31, u32::MAX - 1, u32::MAX] {
        let mut world = World::bare(variables(), Sgd::new(1.0), |config| config);
        let line = world.join(0, &mut chief());
        let catalogue = world.catalogue.clone();
        world.declare(line, &catalogue);
        let found = RestoreEpoch(epoch);
        let refusal = world.refused(line, message::Initialize { epoch: found }.into());
        let current = RestoreEpoch(0);
        let step = GlobalStep(0);
        assert_eq!(refusal, Refusal::RestoreEpoch { found, current, step });
        let last = message::Initialize { epoch: RestoreEpoch(RESTORE_EPOCHS_AHEAD) };
        assert!(matches!(world.ask(line, last.into()), Message::Ready(_)));
    }
}
