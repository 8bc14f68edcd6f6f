//! Tests of plans: pins, draws, typed errors, full coverage, and independence of order under
//! HashName.

// Imported by name, because the prelude has a trait called Strategy.
use proptest::prelude::{prop_assert, prop_assert_eq, prop_compose, proptest};

use super::*;
use crate::cluster::ClusterSpec;
use crate::device::DeviceSpec;
use crate::error::Chain;
use crate::initializer::Initializer;
use crate::partition::Partitioner;
use crate::table::TableSpec;
use crate::tensor::DType;

fn variable(name: &str, extents: &[u64]) -> VariableSpec {
    VariableSpec::f32(name, extents).unwrap()
}

fn pinned(name: &str, device: &str) -> VariableSpec {
    variable(name, &[10]).device(device.parse().unwrap())
}

fn map(tasks: &[u32], shards_per_task: u16) -> ShardMap {
    ShardMap::new(tasks, shards_per_task).unwrap()
}

fn tasks(variables: &[VariableSpec], on: &[u32], strategy: &PlacementStrategy) -> Vec<u32> {
    let placement = Placement::plan(variables, &map(on, 1), strategy).unwrap();
    placement.partitions().iter().map(|placed| placed.shard.task).collect()
}

#[test]
fn a_pinned_variable_draws_from_the_strategy() {
    let variables = [
        pinned("a", "/job:ps/task:3"),
        variable("b", &[10]),
        pinned("c", "/task:1"),
        pinned("d", "/job:ps/cpu:0"),
    ];
    assert_eq!(tasks(&variables, &[1, 3], &PlacementStrategy::RoundRobin), [3, 3, 1, 3]);
    assert_eq!(tasks(&variables, &[1, 3], &PlacementStrategy::GreedyBytes), [3, 1, 1, 3]);
    let last = PlacementStrategy::custom(|_, _, tasks| tasks[tasks.len() - 1]);
    assert_eq!(tasks(&variables, &[1, 3], &last), [3, 3, 1, 3]);
}

#[test]
fn faults_name_the_variable_and_the_tasks() {
    let plan = |variable: VariableSpec, strategy: &PlacementStrategy| {
        let planned = Placement::plan(&[variable], &map(&[1, 2, 5], 1), strategy);
        Chain(&planned.unwrap_err()).to_string()
    };
    let table = [
        (
            pinned("w", "/job:ps/task:0"),
            "cannot place the variable \"w\" on ps task 0: there are only 1-2, 5",
        ),
        (
            pinned("w", "/job:worker/task:1"),
            "cannot place the variable \"w\" on /job:worker/task:1: \
             only the ps tasks 1-2, 5 hold variables",
        ),
        (
            variable("w", &[10]).partitioner(Partitioner::Fixed { shards: 0 }),
            "cannot place variables: cannot declare the variable \"w\": \
             cannot partition by Fixed { shards: 0 }: shards must be at least 1",
        ),
    ];
    for (variable, expected) in table {
        assert_eq!(plan(variable, &PlacementStrategy::RoundRobin), expected);
    }
    let nan = variable("w", &[1]).initializer(Initializer::Constant(f64::NAN));
    assert!(plan(nan, &PlacementStrategy::RoundRobin).contains("\"w\""));
    assert_eq!(
        plan(variable("w", &[10]), &PlacementStrategy::custom(|_, _, _| 3)),
        "cannot place part 0 of the variable \"w\" on ps task 3, as the custom strategy chose: \
         there are only 1-2, 5"
    );
}

#[test]
fn the_job_of_the_map_holds_the_variables() {
    let cluster: ClusterSpec = "local=a:1,b:1,c:1".parse().unwrap();
    let map = ShardMap::of_cluster(&cluster, 1).unwrap();
    let plan = |variable: VariableSpec, strategy: &PlacementStrategy| {
        Placement::plan(&[variable], &map, strategy).map_err(|error| error.to_string())
    };
    let round_robin = &PlacementStrategy::RoundRobin;
    for (device, task) in [("/job:local/task:1", 1), ("/task:2", 2), ("/job:local", 0), ("", 0)] {
        let placement = plan(pinned("w", device), round_robin).unwrap();
        assert_eq!(placement.partitions()[0].shard.task, task, "{device}");
    }
    let table = [
        (
            "/job:local/task:3",
            "cannot place the variable \"w\" on local task 3: there are only 0-2",
        ),
        (
            "/job:ps/task:0",
            "cannot place the variable \"w\" on /job:ps/task:0: only the local tasks 0-2 hold \
             variables",
        ),
    ];
    for (device, expected) in table {
        assert_eq!(plan(pinned("w", device), round_robin).unwrap_err(), expected);
    }
    let custom = PlacementStrategy::custom(|_, _, _| 3);
    let error = plan(variable("w", &[10]), &custom).unwrap_err();
    assert!(error.contains("on local task 3, as the custom strategy chose"), "{error}");
}

#[test]
fn shards_of_a_task_fill_evenly() {
    let sizes = [100, 10, 20, 50, 60, 0];
    let variables: Vec<_> = sizes.iter().map(|&n| variable(&format!("v{n}"), &[n])).collect();
    let placement =
        Placement::plan(&variables, &map(&[4], 2), &PlacementStrategy::RoundRobin).unwrap();
    let shards: Vec<_> = placement.partitions().iter().map(|placed| placed.shard.shard).collect();
    assert_eq!(shards, [0, 1, 1, 1, 1, 0]);
    let held = placement.of_shard(ShardId { task: 4, shard: 1 });
    assert_eq!(held.map(|placed| placed.bytes).sum::<u64>(), 4 * 140);
}

/// A table counts with its memory limit, not with the rows of its buckets.
#[test]
fn tables_count_with_their_memory_limit() {
    let table = |name: &str, bytes| {
        VariableSpec::table(name, DType::F32, [4], TableSpec::new(bytes)).unwrap()
    };
    let large = || variable("large", &[1 << 21]);
    let greedy =
        |variables: &[VariableSpec]| tasks(variables, &[0, 1], &PlacementStrategy::GreedyBytes);
    // 8 MiB of values beside tables of 64 MiB and 4 KiB; the buckets of both would be 1 MiB.
    assert_eq!(greedy(&[table("t", 64 << 20), large(), variable("w", &[8])]), [0, 1, 1]);
    assert_eq!(greedy(&[table("t", 4 << 10), large(), variable("w", &[8])]), [0, 1, 0]);
    let cut = Partitioner::MaxSize { bytes_max: 16 << 20, shards_max: None };
    let placed = [table("t", 64 << 20).partitioner(cut)];
    let placement =
        Placement::plan(&placed, &map(&[0, 1], 1), &PlacementStrategy::RoundRobin).unwrap();
    let bytes: Vec<u64> = placement.partitions().iter().map(|placed| placed.bytes).collect();
    assert_eq!(bytes, [16 << 20; 4]);
    let cut = |bytes_max| {
        let cut = Partitioner::MaxSize { bytes_max, shards_max: None };
        table("t", 5_000).partitioner(cut).parts()
    };
    assert_eq!((cut(5_000), cut(4_999), cut(1)), (Ok(1), Ok(2), Ok(5_000)));
}

#[test]
fn scalars_and_empty_variables_are_one_partition() {
    let cut = |v: VariableSpec| v.partitioner(Partitioner::Fixed { shards: 3 });
    let variables =
        [cut(variable("s", &[])), cut(variable("e", &[0, 4])), cut(variable("w", &[7]))];
    let placement =
        Placement::plan(&variables, &map(&[0], 1), &PlacementStrategy::RoundRobin).unwrap();
    let rows = |id| {
        let parts = placement.of_variable(VariableId(id)).iter();
        parts.map(|p| (p.rows.start, p.rows.end)).collect()
    };
    let found: [Vec<_>; 4] = [0, 1, 2, 3].map(rows);
    assert_eq!(found, [vec![(0, 1)], vec![(0, 0)], vec![(0, 3), (3, 5), (5, 7)], vec![]]);
    assert_eq!(placement.of_variable(VariableId(2))[1].bytes, 8);
    assert_eq!((placement.strategy(), placement.map().tasks()), ("round_robin", &[0][..]));
}

#[test]
fn bounds_are_enforced() {
    let cut = |name: &str| {
        variable(name, &[1 << 16])
            .partitioner(Partitioner::Fixed { shards: Partitioner::PARTS_MAX })
    };
    let mut variables: Vec<_> = (0..16).map(|i| cut(&format!("v{i}"))).collect();
    let place = |variables: &[VariableSpec]| {
        Placement::plan(variables, &map(&[0, 1], 1), &PlacementStrategy::GreedyBytes)
    };
    assert_eq!(place(&variables).unwrap().partitions().len(), Placement::PARTITIONS_MAX);
    variables.push(variable("more", &[]));
    let error = place(&variables).unwrap_err();
    assert_eq!(error, PlacementError::TooManyPartitions { variable: "more".into() });
    let huge = vec![variable("huge", &[1 << 48]); 1 << 14];
    let error = place(&huge).unwrap_err();
    assert_eq!(error, PlacementError::TooManyBytes { variable: "huge".into() });
}

/// Must not change: it would move the variables of every cluster placed by name.
#[test]
fn hashed_placements_are_stable() {
    let variables = ["a", "b", "c", "d", "e", "f"].map(|name| variable(name, &[4]));
    assert_eq!(tasks(&variables, &[0, 1, 2], &PlacementStrategy::HashName), [0, 2, 1, 1, 1, 1]);
}

prop_compose! {
    fn any_variable()(
        extents in proptest::collection::vec(0u64..12, 0..3),
        shards in 1u32..6,
        bytes in 1u64..60,
        which in 0..4,
        pin in proptest::option::weighted(0.2, 0u32..3),
    ) -> (Vec<u64>, Partitioner, Option<u32>) {
        let partitioner = match which {
            0 => Partitioner::None,
            1 => Partitioner::Fixed { shards },
            2 => Partitioner::MinSize { bytes_min: bytes, shards_max: shards, strict: true },
            _ => Partitioner::MaxSize { bytes_max: bytes, shards_max: Some(shards) },
        };
        (extents, partitioner, pin)
    }
}

fn declare(all: Vec<(Vec<u64>, Partitioner, Option<u32>)>) -> Vec<VariableSpec> {
    let declare = |(index, (extents, partitioner, pin)): (usize, (Vec<u64>, _, Option<u32>))| {
        let device = match pin {
            Some(task) => DeviceSpec::default().with_task(task),
            None => DeviceSpec::default(),
        };
        variable(&format!("v{index}"), &extents).partitioner(partitioner).device(device)
    };
    all.into_iter().enumerate().map(declare).collect()
}

proptest! {
    #[test]
    fn every_element_is_placed_once(
        all in proptest::collection::vec(any_variable(), 0..8),
        shards in 1u16..4,
        which in 0usize..5,
    ) {
        let variables = declare(all);
        let strategy = [
            PlacementStrategy::Balanced,
            PlacementStrategy::RoundRobin,
            PlacementStrategy::GreedyBytes,
            PlacementStrategy::HashName,
            PlacementStrategy::custom(|_, part, tasks| tasks[part as usize % tasks.len()]),
        ][which].clone();
        let map = map(&[0, 1, 2], shards);
        let placement = Placement::plan(&variables, &map, &strategy).unwrap();
        for (index, variable) in (0u32..).zip(&variables) {
            let parts = placement.of_variable(VariableId(index));
            let mut next = 0;
            for (part, placed) in (0u32..).zip(parts) {
                prop_assert_eq!(placed.rows.start, next);
                prop_assert_eq!((placed.part, placed.parts as usize), (part, parts.len()));
                prop_assert!(map.shards().any(|shard| shard == placed.shard));
                prop_assert!(variable.device.task().is_none_or(|task| task == placed.shard.task));
                next = placed.rows.end;
            }
            prop_assert_eq!(next, variable.shape().rows());
            prop_assert_eq!(parts.iter().map(|p| p.bytes).sum::<u64>(), variable.bytes());
        }
        let held: usize = map.shards().map(|shard| placement.of_shard(shard).count()).sum();
        prop_assert_eq!(held, placement.partitions().len());
    }

    #[test]
    fn hashed_placements_do_not_depend_on_order(
        all in proptest::collection::vec(any_variable(), 0..8),
        keep in proptest::collection::vec(proptest::bool::ANY, 8),
    ) {
        let variables = declare(all);
        let shards_of = |variables: &[VariableSpec]| {
            let placement = Placement::plan(variables, &map(&[0, 1, 2], 2), &PlacementStrategy::HashName);
            let placed = placement.unwrap().partitions().to_vec();
            let name = |p: &PlacedPartition| variables[p.variable.0 as usize].name().to_owned();
            placed.iter().map(|p| (name(p), p.part, p.shard)).collect::<Vec<_>>()
        };
        let all = shards_of(&variables);
        let kept = variables.iter().rev().zip(&keep).filter(|(_, keep)| **keep);
        let fewer: Vec<_> = kept.map(|(variable, _)| variable.clone()).collect();
        for placed in shards_of(&fewer) {
            prop_assert!(all.contains(&placed));
        }
    }
}
