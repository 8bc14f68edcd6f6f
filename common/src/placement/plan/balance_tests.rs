//! Tests of the balance of [`PlacementStrategy::Balanced`]: a table of models, and properties over
//! random ones.

// Imported by name, because the prelude has a trait called Strategy.
use proptest::prelude::{prop_assert, prop_assert_eq, prop_compose, proptest};

use super::*;
use crate::partition::Partitioner;
use crate::table::TableSpec;
use crate::tensor::DType;

fn dense(name: &str, extents: &[u64]) -> VariableSpec {
    VariableSpec::f32(name, extents).unwrap()
}

fn table(name: &str, bytes_max: u64) -> VariableSpec {
    VariableSpec::table(name, DType::F32, [16], TableSpec::new(bytes_max)).unwrap()
}

fn plan(variables: &[VariableSpec], tasks: u32, shards_per_task: u16) -> Placement {
    let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards_per_task).unwrap();
    Placement::plan(variables, &map, &PlacementStrategy::default()).unwrap()
}

/// Weights and biases of a network of these layers.
fn mlp(layers: &[u64]) -> Vec<VariableSpec> {
    let pairs = layers.windows(2).enumerate().flat_map(|(index, sizes)| {
        let weights = dense(&format!("w{index}"), sizes);
        [weights, dense(&format!("b{index}"), &sizes[1..])]
    });
    pairs.collect()
}

/// Returns the bytes of the fullest shard over the mean of all shards.
fn shard_skew(placement: &Placement) -> f64 {
    let shards = placement.map().shards();
    let loads = shards.map(|shard| placement.of_shard(shard).map(|p| p.bytes).sum::<u64>());
    let loads: Vec<u64> = loads.collect();
    let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
    *loads.iter().max().unwrap() as f64 / mean
}

const MIB: u64 = 1 << 20;

#[test]
fn common_models_are_balanced() {
    let embedding = |rows| dense("embedding", &[rows, 64]).sparse();
    let many_small = (0..2000).map(|index| dense(&format!("v{index}"), &[index % 97 + 1, 16]));
    let named = |name: &str, variables: Vec<VariableSpec>| (name.to_owned(), variables);
    let models = [
        named("an MLP 784-1024-10", mlp(&[784, 1024, 10])),
        named("a deep MLP", mlp(&[784, 512, 512, 256, 128, 10])),
        named("one huge variable", vec![dense("w", &[1 << 20, 64])]),
        named("an embedding", [vec![embedding(1 << 20)], mlp(&[1024, 2048, 1])].concat()),
        named("a table", [vec![table("t", 1 << 40)], mlp(&[1024, 2048, 1])].concat()),
        named("many small variables", many_small.collect()),
    ];
    for (name, variables) in &models {
        for (tasks, shards) in [(1, 1), (2, 1), (3, 1), (2, 4), (8, 1)] {
            let placement = plan(variables, tasks, shards);
            let skews = [placement.skew(), shard_skew(&placement)];
            println!("{name} on {tasks} x {shards}: {skews:.3?}");
            // A share of a few parts of 64 KiB is balanced to one of them.
            let share = placement.task_loads().mean() as f64 / f64::from(shards);
            let bound = 1.1_f64.max(1.0 + 65_536.0 / share);
            assert!(skews.iter().all(|&skew| skew <= bound), "{name} on {tasks}: {skews:?}");
            assert!(!placement.task_loads().is_skewed());
        }
    }
    let classic = ShardMap::new([0, 1], 1).unwrap();
    let classic = Placement::plan(&models[0].1, &classic, &PlacementStrategy::RoundRobin).unwrap();
    assert!(classic.skew() > 1.9 && classic.task_loads().is_skewed(), "{}", classic.table());
}

/// Each kind is balanced by itself, independently of the bytes of the others.
#[test]
fn dense_variables_are_balanced_beside_larger_kinds() {
    for large in [dense("embedding", &[10 << 20, 64]).sparse(), table("t", 1 << 40)] {
        let variables = [vec![large], mlp(&[1024, 2048, 1024, 1])].concat();
        let placement = plan(&variables, 4, 1);
        let is_dense = |p: &&PlacedPartition| !variables[p.variable.0 as usize].is_sparse();
        let loads = placement
            .map()
            .shards()
            .map(|shard| placement.of_shard(shard).filter(is_dense).map(|p| p.bytes).sum::<u64>());
        let loads: Vec<u64> = loads.collect();
        let mean = loads.iter().sum::<u64>() as f64 / 4.0;
        assert!(*loads.iter().max().unwrap() as f64 <= 1.1 * mean, "{loads:?}");
    }
}

#[test]
fn small_models_and_single_shards_stay_whole() {
    let parts = |variables: &[VariableSpec], tasks, shards| {
        let placement = plan(variables, tasks, shards);
        (placement.partitions().len() == variables.len()).then(|| placement.task_bytes())
    };
    assert!(parts(&mlp(&[64, 128, 10]), 4, 1).is_some());
    assert!(parts(&mlp(&[784, 1024, 10]), 1, 1).is_some());
    // More shards than rows: a part for each row.
    let placement = plan(&[dense("w", &[3, 10 << 20])], 8, 1);
    assert_eq!(placement.partitions().len(), 3);
    // Of equal variables, the first is on the first task.
    let equal: Vec<_> = ["a", "b", "c"].map(|name| dense(name, &[100])).into();
    let placement = plan(&equal, 3, 1);
    let tasks: Vec<u32> = placement.partitions().iter().map(|p| p.shard.task).collect();
    assert_eq!(tasks, [0, 1, 2]);
}

#[test]
fn devices_and_partitioners_come_first() {
    let variables = [
        dense("whole", &[1 << 20, 4]).partitioner(Partitioner::None),
        dense("three", &[1 << 20, 4]).partitioner(Partitioner::Fixed { shards: 3 }),
        dense("pinned", &[1 << 20, 4]).device("/job:ps/task:1".parse().unwrap()),
        dense("free", &[1 << 20, 4]),
    ];
    let placement = plan(&variables, 2, 2);
    let tasks = |id| {
        let parts = placement.of_variable(VariableId(id)).iter();
        parts.map(|p| p.shard.task).collect::<Vec<_>>()
    };
    assert_eq!((tasks(0).len(), tasks(1).len()), (1, 3));
    assert_eq!(tasks(2), [1, 1]);
    assert_eq!(tasks(3).len(), 4);
    assert!(placement.skew() < 1.2, "{}", placement.table());
}

prop_compose! {
    fn any_variable()(
        rows in 0u64..3000,
        width in 0u64..400,
        which in 0..8,
        pin in proptest::option::weighted(0.1, 0u32..4),
    ) -> (u64, u64, i32, Option<u32>) {
        (rows, width, which, pin)
    }
}

/// Declares a variable of any kind, size and partitioner.
fn declare(index: usize, rows: u64, width: u64, which: i32, pin: Option<u32>) -> VariableSpec {
    let name = format!("v{index}");
    let variable = match which {
        0 => dense(&name, &[rows.max(1), width.max(1)]).sparse(),
        1 => table(&name, 256 + rows * width),
        2 => dense(&name, &[rows, width]).partitioner(Partitioner::Fixed { shards: 3 }),
        3 => dense(&name, &[rows, width]).partitioner(Partitioner::None),
        4 => dense(&name, &[]),
        5 => dense(&name, &[rows % 4, 256 * width]),
        _ => dense(&name, &[rows, width]),
    };
    match pin {
        Some(task) => variable.device(format!("/task:{task}").parse().unwrap()),
        None => variable,
    }
}

/// Returns the bytes of one kind on the fullest task, and the largest part of that kind that no
/// device pins.
fn fullest_of(kind: VariableKind, variables: &[VariableSpec], placement: &Placement) -> (u64, u64) {
    let mut loads = [0; 4];
    let mut largest = 0;
    for placed in placement.partitions() {
        let variable = &variables[placed.variable.0 as usize];
        if VariableKind::of(variable) == kind {
            loads[placed.shard.task as usize] += placed.bytes;
            if variable.device.task().is_none() {
                largest = placed.bytes.max(largest);
            }
        }
    }
    (loads.into_iter().max().unwrap_or(0), largest)
}

proptest! {
    /// In each kind, never worse than round robin by more than its largest part.
    #[test]
    fn the_fullest_task_is_bounded(
        all in proptest::collection::vec(any_variable(), 0..20),
        shards in 1u16..4,
    ) {
        let declared = all.into_iter().enumerate();
        let declared = declared.map(|(index, (rows, width, which, pin))| {
            declare(index, rows, width, which, pin)
        });
        let variables: Vec<VariableSpec> = declared.collect();
        let placement = plan(&variables, 4, shards);
        prop_assert_eq!(&placement, &plan(&variables, 4, shards));
        let classic =
            Placement::plan(&variables, placement.map(), &PlacementStrategy::RoundRobin).unwrap();
        for kind in [VariableKind::Dense, VariableKind::Sparse, VariableKind::Table] {
            let (ours, largest) = fullest_of(kind, &variables, &placement);
            let (theirs, _) = fullest_of(kind, &variables, &classic);
            let tables = || placement.table() + &classic.table();
            prop_assert!(ours <= theirs + largest, "{kind:?}: {ours} > {theirs}\n{}", tables());
        }
    }

    /// Without pins, explicit partitioners and large rows, a model of some MiB is balanced to a
    /// tenth on any number of shards.
    #[test]
    fn large_models_are_balanced_to_a_tenth(
        sizes in proptest::collection::vec((1u64..20_000, 1u64..64), 1..30),
        tasks in 1u32..6,
        shards in 1u16..4,
    ) {
        let shards_of_all = u64::from(tasks) * u64::from(shards);
        let mut variables: Vec<VariableSpec> = sizes
            .iter()
            .enumerate()
            .map(|(index, &(rows, width))| dense(&format!("v{index}"), &[rows, width]))
            .collect();
        variables.push(dense("w", &[shards_of_all * 8192, 64]));
        let placement = plan(&variables, tasks, shards);
        let total: u64 = variables.iter().map(VariableSpec::bytes).sum();
        prop_assert!(total / shards_of_all >= 2 * MIB);
        let skews = [placement.skew(), shard_skew(&placement)];
        prop_assert!(skews.iter().all(|&skew| skew <= 1.101), "{skews:?}\n{}", placement.table());
    }

    #[test]
    fn the_order_of_creation_does_not_change_the_loads(
        all in proptest::collection::vec(any_variable(), 0..20),
    ) {
        let declared = all.into_iter().enumerate();
        let unpinned = declared.map(|(index, (rows, width, which, _))| {
            declare(index, rows, width, which, None)
        });
        let mut variables: Vec<VariableSpec> = unpinned.collect();
        let loads = |variables: &[VariableSpec]| {
            let mut loads = plan(variables, 4, 1).task_bytes();
            loads.sort_by_key(|&(_, bytes)| bytes);
            loads.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>()
        };
        let before = loads(&variables);
        variables.reverse();
        prop_assert_eq!(before, loads(&variables));
    }
}
