//! A restore returns the saved values to the bit, in any layout.

use proptest::prelude::*;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::partition::Partitioner;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::samples::{SLOTS, check_restored, place, save, saved, slots, variables};
use crate::{
    CheckpointError, CheckpointName, CheckpointPiece, CheckpointTraining, Opened, list, newest_good,
};

#[test]
fn the_same_layout_restores_everything() {
    let catalogue = place(variables(3), 2, 2);
    let (_, storage) = saved(&catalogue, &[5, 9]);
    let (mut opened, refused) = newest_good(&storage).unwrap().unwrap();
    assert!(refused.is_empty());
    assert_eq!(opened.catalogue().digest(), catalogue.digest());
    let restored = check_restored(&mut opened, &catalogue, &SLOTS, 9);
    let counts: Vec<_> = restored.iter().map(|r| (r.version, r.gradients)).collect();
    assert_eq!(counts, [(9, 18), (10, 19), (19, 28), (20, 29)], "each shard has its own counts");
    assert!(restored.iter().all(|restored| restored.gradients_apart == 29 - 18));
    assert!(restored.iter().all(|restored| restored.clients.len() == 1));
    assert_eq!(opened.manifest().user, [0, 255, 10]);
    let older = CheckpointName::new(RestoreEpoch(1), GlobalStep(5), 0);
    let mut older = Opened::open(storage.clone(), older).unwrap();
    check_restored(&mut older, &catalogue, &SLOTS, 5);
    let listed = list(&*storage).unwrap();
    let names: Vec<&str> = listed.checkpoints.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["ckpt-1-9", "ckpt-1-5"]);
}

#[test]
fn another_layout_restores_the_same_elements() {
    let source = place(variables(3), 2, 1);
    let (_, storage) = saved(&source, &[4]);
    let (mut opened, _) = newest_good(&storage).unwrap().unwrap();
    for (parts, tasks, shards) in [(1, 1, 1), (4, 3, 1), (11, 2, 3), (3, 1, 2)] {
        let target = place(variables(parts), tasks, shards);
        for restored in check_restored(&mut opened, &target, &SLOTS, 4) {
            assert_eq!((restored.version, restored.gradients), (14, 18), "the largest of all");
            assert_eq!(restored.gradients_apart, 18 - 8, "also in another layout");
            assert!(restored.clients.is_empty());
        }
        // Slots are found by name, even if there are fewer, or the order differs.
        check_restored(&mut opened, &target, &["v"], 4);
        check_restored(&mut opened, &target, &["v", "m"], 4);
        check_restored(&mut opened, &target, &[], 4);
    }
    // A subset of the variables can be restored.
    check_restored(&mut opened, &place(variables(2).split_off(2), 2, 1), &SLOTS, 4);
}

#[test]
fn variables_larger_than_a_piece_are_streamed() {
    let large = |parts| {
        let cut = Partitioner::Fixed { shards: parts };
        vec![VariableSpec::f32("large", [400_001]).unwrap().plain().partitioner(cut)]
    };
    let (_, storage) = saved(&place(large(1), 1, 1), &[2]);
    let (mut opened, _) = newest_good(&storage).unwrap().unwrap();
    check_restored(&mut opened, &place(large(1), 1, 1), &SLOTS, 2);
    check_restored(&mut opened, &place(large(3), 2, 1), &SLOTS, 2);
}

#[test]
fn incompatible_variables_are_refused_by_name() {
    let (_, storage) = saved(&place(variables(3), 2, 1), &[4]);
    let (mut opened, _) = newest_good(&storage).unwrap().unwrap();
    let f64s = |extents: [u64; 2]| Shape::new(extents).unwrap();
    let text = "the checkpoint ckpt-1-4 has";
    let cases = [
        (VariableSpec::f32("other", [1]), "\"other\": the checkpoint ckpt-1-4 has no such".into()),
        (VariableSpec::f32("layer/w", [11, 4]), format!("{text} the shape [11, 3], not [11, 4]")),
        (VariableSpec::f32("layer/w", [33]), format!("{text} the shape [11, 3], not [33]")),
        (
            VariableSpec::new("layer/w", DType::F64, f64s([11, 3])),
            format!("{text} it as f32, not f64"),
        ),
        (VariableSpec::f32("größe \"ß\"", [7]), format!("{text} the slots [], not \"m\"")),
    ];
    for (variable, expected) in cases {
        let target = place(vec![variable.unwrap()], 1, 1);
        let shard = target.shards().next().unwrap();
        let training = CheckpointTraining::by_one(&target, "adam", &SLOTS);
        let mut sink = |_: CheckpointPiece<'_>| panic!("nothing may be written");
        let error = opened.restore_shard(&target, shard, &training, &mut sink).unwrap_err();
        assert!(error.to_string().contains(&expected), "{error}");
    }
    let target = place(variables(1), 1, 1);
    let shard = target.shards().next().unwrap();
    let mut refused = |training: &CheckpointTraining| {
        let mut sink = |_: CheckpointPiece<'_>| panic!("nothing may be written");
        opened.restore_shard(&target, shard, training, &mut sink).unwrap_err()
    };
    let error = refused(&CheckpointTraining::by_one(&target, "adam", &["momentum"]));
    let CheckpointError::SlotMissing { variable, found, expected, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((variable.as_str(), found, expected.as_str()), ("layer/w", slots(), "momentum"));
    let error = refused(&CheckpointTraining::by_one(&target, "adagrad", &SLOTS));
    let CheckpointError::OptimizerMismatch { variable, found, expected, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((&*variable, &*found, &*expected), ("layer/w", "adam", "adagrad"));
}

#[test]
fn a_step_saved_again_gets_a_new_name_and_wins() {
    let catalogue = place(variables(1), 1, 1);
    let (memory, storage) = saved(&catalogue, &[4, 4]);
    assert_eq!(newest_good(&storage).unwrap().unwrap().0.manifest().checkpoint.revision, 1);
    memory.remove("ckpt-1-4.1", "CATALOGUE");
    let (opened, refused) = newest_good(&storage).unwrap().unwrap();
    assert_eq!((opened.manifest().checkpoint.revision, refused.len()), (0, 1));
    save(&storage, &catalogue, 4).unwrap();
    assert_eq!(newest_good(&storage).unwrap().unwrap().0.manifest().checkpoint.revision, 2);
}

fn any_variable(index: usize) -> impl Strategy<Value = VariableSpec> {
    let extents = prop::collection::vec(0_u64..9, 0..4);
    (prop::sample::select(DType::ALL.to_vec()), extents, any::<bool>()).prop_map(
        move |(dtype, extents, plain)| {
            let shape = Shape::new(extents).unwrap();
            let variable = VariableSpec::new(format!("v{index}"), dtype, shape).unwrap();
            if plain { variable.plain() } else { variable }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_layout_restores_into_any_other(
        variables in (1_usize..7).prop_flat_map(|n| (0..n).map(any_variable).collect::<Vec<_>>()),
        from in (1_u32..9, 1_u32..4, 1_u16..4),
        to in (1_u32..9, 1_u32..4, 1_u16..4),
    ) {
        let cut = |(parts, tasks, shards): (u32, u32, u16)| {
            let cut = Partitioner::Fixed { shards: parts };
            let variables = variables.iter().map(|v| v.clone().partitioner(cut.clone()));
            place(variables.collect(), tasks, shards)
        };
        let (_, storage) = saved(&cut(from), &[1]);
        let (mut opened, _) = newest_good(&storage).unwrap().unwrap();
        check_restored(&mut opened, &cut(to), &SLOTS, 1);
    }
}
