//! Compares clusters, devices, placement and partitions with `vectors/semantics.json`.
//!
//! Its tables record the observed behaviour of the classic system, except for the fields that name
//! a difference of pushpull.

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::cluster::resolve::{
    Known, Resolution, ResolveError, Resolver, expand_node_list, resolve, union,
};
use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::VariableId;
use pushpull_common::partition::{Partitioner, max_size_parts, min_size_parts, split_rows};
use pushpull_common::placement::{DeviceSetter, Placement, PlacementStrategy, ShardMap};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use serde_json::Value;

fn vectors(section: &str) -> Value {
    let text = include_str!("vectors/semantics.json");
    let all: Value = serde_json::from_str(text).expect("the vectors are not JSON");
    all.get(section).expect("the vectors lack the section").clone()
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list")
}

fn map(value: &Value) -> &serde_json::Map<String, Value> {
    value.as_object().expect("a map")
}

fn numbers(value: &Value) -> Vec<u64> {
    list(value).iter().map(|number| number.as_u64().expect("a number")).collect()
}

fn device(name: &str) -> DeviceSpec {
    name.parse().expect("a device name")
}

#[test]
fn device_names_parse_and_print() {
    let section = vectors("device_spec");
    for (name, expected) in map(&section["ok"]) {
        let spec = device(name);
        assert_eq!(spec.to_string(), text(expected), "{name}");
        assert_eq!(device(&spec.to_string()), spec, "{name}");
    }
    for name in list(&section["error"]) {
        assert!(DeviceSpec::parse(text(name)).is_err(), "{name}");
    }
}

#[test]
fn an_inner_device_scope_overrides_the_outer() {
    let section = vectors("device_spec");
    let merges = list(&section["merge_outer_then_inner"]);
    assert_eq!(merges.len(), 2);
    for merge in merges {
        let outer = device(text(&merge[0]));
        let inner = device(text(&merge[1]));
        assert_eq!(outer.merge_tf(&inner).to_string(), text(&merge[2]), "{merge}");
    }
    // A difference of pushpull: the device type of an inner scope comes with its own open index.
    let outer = device(text(&merges[1][0]));
    let inner = device(text(&merges[1][1]));
    assert_eq!(outer.merge(&inner).to_string(), "/job:worker/task:1/device:CPU:*");
}

#[test]
fn a_sparse_cluster_keeps_its_task_indices() {
    let section = &vectors("cluster_spec")["sparse"];
    let cluster = ClusterSpec::from_json(&section["in"].to_string()).expect("a cluster");
    let tasks = cluster.num_tasks("worker").expect("a job");
    assert_eq!(tasks as u64, section["num_tasks_worker"].as_u64().expect("a number"));
    let indices = cluster.task_indices("worker").expect("a job");
    assert_eq!(Value::from(indices), section["task_indices_worker"]);
    let addresses = cluster.job_tasks("worker").expect("a job");
    assert_eq!(Value::from(addresses), section["job_tasks_worker"]);
    assert!(cluster.task_address("worker", 0).is_err());
    let written: Value = serde_json::from_str(&cluster.to_json()).expect("JSON");
    assert_eq!(written, section["as_dict"]);
}

#[test]
fn equal_clusters_print_alike() {
    let section = &vectors("cluster_spec")["equal"];
    // A difference of pushpull: it refuses an address without a port, so the test adds one.
    assert!(ClusterSpec::from_json(&section[0].to_string()).is_err());
    let with_port = |value: &Value| value.to_string().replace("\"x\"", "\"x:1\"");
    let clusters: Vec<_> = list(section)
        .iter()
        .map(|value| ClusterSpec::from_json(&with_port(value)).expect("a cluster"))
        .collect();
    assert_eq!(clusters[0], clusters[1]);
    assert_eq!(clusters[0].to_string(), clusters[1].to_string());
}

fn setter(section: &Value) -> DeviceSetter {
    let ps = section["cluster"]["ps"].as_u64().expect("a number") as u32;
    DeviceSetter::new((0..ps).collect::<Vec<_>>())
        .expect("ps tasks")
        .worker_device(device(text(&section["worker_device"])))
}

#[test]
fn plain_variables_are_placed_round_robin() {
    let section = vectors("replica_device_setter");
    let mut setter = setter(&section);
    for row in list(&section["plain"]) {
        let found = setter.variable(text(&row[0]), 4, &device(""));
        assert_eq!(found.to_string(), text(&row[1]), "{row}");
    }
}

#[test]
fn nested_scopes_override_the_setter() {
    let section = vectors("replica_device_setter");
    let mut merging = setter(&section);
    for row in list(&section["nested"]) {
        let found = merging.variable(text(&row[0]), 4, &device(text(&row[1])));
        assert_eq!(found.to_string(), text(&row[2]), "{row}");
    }
    for row in list(&section["nested_non_variable"]) {
        assert_eq!(merging.operation(&device(text(&row[0]))).to_string(), text(&row[1]), "{row}");
    }
    let mut leaving = setter(&section).merge_devices(false);
    let inner = list(&section["nested"]).iter().map(|row| device(text(&row[1])));
    for (row, inner) in list(&section["merge_devices_false"]).iter().zip(inner) {
        assert_eq!(leaving.variable(text(&row[0]), 4, &inner).to_string(), text(&row[1]), "{row}");
    }
}

/// Slots are placed with their variable and do not advance the round robin, so the test asks for
/// variables only.
#[test]
fn slots_follow_their_variable() {
    let section = vectors("replica_device_setter");
    let expected = map(&section["adam_slots_colocated"]);
    let mut setter = setter(&section);
    for name in ["x", "y", "z", "global_step"] {
        let task = setter.variable(name, 4, &device("")).task().expect("a task");
        for (slot, slot_task) in expected.iter().filter(|(slot, _)| {
            slot.split('/').next() == Some(name) || (name == "x" && slot.ends_with("_power"))
        }) {
            assert_eq!(slot_task.as_u64(), Some(u64::from(task)), "{slot}");
        }
    }
}

#[test]
fn greedy_placement_matches_the_table() {
    let section = vectors("replica_device_setter");
    let greedy = &section["greedy_bytes_2ps"];
    let mut setter = setter(&section).strategy(PlacementStrategy::GreedyBytes).expect("built in");
    let mut variables = Vec::new();
    let mut drawn = Vec::new();
    for row in list(&greedy["sizes_floats"]) {
        let floats = row[1].as_u64().expect("a number");
        drawn.push(setter.variable(text(&row[0]), 4 * floats, &device("")).task());
        variables.push(VariableSpec::f32(text(&row[0]), [floats]).expect("a variable"));
    }
    let expected: Vec<_> = numbers(&greedy["task"]).iter().map(|&task| task as u32).collect();
    assert_eq!(drawn, expected.iter().copied().map(Some).collect::<Vec<_>>());
    assert_eq!(planned(&variables, &[0, 1], PlacementStrategy::GreedyBytes), expected);
}

fn planned(variables: &[VariableSpec], tasks: &[u32], strategy: PlacementStrategy) -> Vec<u32> {
    let map = ShardMap::new(tasks, 1).expect("shards");
    let placement = Placement::plan(variables, &map, &strategy).expect("a placement");
    placement.partitions().iter().map(|placed| placed.shard.task).collect()
}

#[test]
fn partitions_are_placed_round_robin() {
    let section = vectors("replica_device_setter");
    let variable = VariableSpec::f32("v", [8]).expect("a variable");
    let variable = variable.partitioner(Partitioner::Fixed { shards: 4 });
    let tasks = planned(&[variable], &[0, 1], PlacementStrategy::RoundRobin);
    assert_eq!(Value::from(tasks), section["fixed_partition_4_over_2ps"]);

    let expected = &vectors("partitioners")["tf2_placement_2ps_fixed3"]["task"];
    let extents: [&[u64]; 3] = [&[], &[10, 2], &[2]];
    let names = ["scalar", "wide", "short"];
    let variables: Vec<_> = std::iter::zip(names, extents)
        .map(|(name, extents)| VariableSpec::f32(name, extents).expect("a variable"))
        .map(|variable| variable.partitioner(Partitioner::Fixed { shards: 3 }))
        .collect();
    let map = ShardMap::new([0, 1], 1).expect("shards");
    let placement =
        Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).expect("a placement");
    let tasks = |id| {
        let parts = placement.of_variable(VariableId(id)).iter();
        parts.map(|placed| placed.shard.task).collect::<Vec<_>>()
    };
    assert_eq!(Value::from(tasks(0)[0]), expected[0]);
    assert_eq!([Value::from(tasks(1)), Value::from(tasks(2))], list(expected)[1..]);
}

#[test]
fn a_sparse_ps_job_places_variables_on_its_own_tasks() {
    let section = vectors("replica_device_setter");
    let cluster: ClusterSpec = "ps=1@a:1,3@b:1".parse().expect("a cluster");
    let mut setter = DeviceSetter::of_cluster(&cluster, device("/job:ps")).expect("ps tasks");
    let names = ["a", "b", "c", "d"];
    let tasks: Vec<_> =
        names.iter().map(|name| setter.variable(name, 4, &device("")).task()).collect();
    assert_eq!(Value::from(tasks), section["sparse_ps_job_1_3"]["pushpull_strict"]);
    let variables = names.map(|name| VariableSpec::f32(name, [1]).expect("a variable"));
    let tasks = planned(&variables, &[1, 3], PlacementStrategy::RoundRobin);
    assert_eq!(Value::from(tasks), section["sparse_ps_job_1_3"]["pushpull_strict"]);
}

fn partitioner(kind: &str, params: &Value) -> Partitioner {
    let number = |name: &str| params.get(name).and_then(Value::as_u64);
    let shards = |name: &str| number(name).map(|shards| shards as u32);
    match kind {
        "fixed" => Partitioner::Fixed { shards: shards("num_shards").expect("a number") },
        "min" => Partitioner::MinSize {
            bytes_min: number("min_shard_bytes").unwrap_or(262_144),
            shards_max: shards("max_shards").unwrap_or(1),
            strict: false,
        },
        "max" => Partitioner::MaxSize {
            bytes_max: number("max_shard_bytes").expect("a number"),
            shards_max: shards("max_shards"),
        },
        _ => panic!("unknown partitioner {kind}"),
    }
}

#[test]
fn partitioners_match_the_table() {
    let section = vectors("partitioners");
    let cases = list(&section["cases"]);
    assert_eq!(cases.len(), 15);
    for case in cases {
        let partitioner = partitioner(text(&case[0]), &case[1]);
        let shape = Shape::new(numbers(&case[2])).expect("a shape");
        let element_bytes = case[3].as_u64().expect("a number");
        if element_bytes == DType::F32.size() as u64 {
            let parts = partitioner.parts_per_axis(&shape, DType::F32).expect("parts");
            assert_eq!(Value::from(parts), case[4], "{case}");
        }
        // One case has elements of 16 bytes, which no `DType` has: call the size rules directly.
        let rows = shape.rows();
        let row_bytes = shape.row_elements() * element_bytes;
        let parts = match partitioner {
            Partitioner::MinSize { bytes_min, shards_max, strict } => {
                min_size_parts(rows, row_bytes, bytes_min, shards_max, strict)
            }
            Partitioner::MaxSize { bytes_max, shards_max } => {
                max_size_parts(rows, row_bytes, bytes_max, shards_max)
            }
            _ => continue,
        };
        assert_eq!(Some(parts), case[4][0].as_u64(), "{case}");
    }
}

#[test]
fn row_ranges_match_the_table() {
    for (rows_over_parts, expected) in map(&vectors("partitioners")["div_sizes"]) {
        let (rows, parts) = rows_over_parts.split_once('/').expect("rows/parts");
        let ranges = split_rows(rows.parse().expect("rows"), parts.parse().expect("parts"));
        let sizes: Vec<u64> = ranges.iter().map(|range| range.end - range.start).collect();
        assert_eq!(Value::from(sizes), *expected, "{rows_over_parts}");
    }
    let starts: Vec<_> = split_rows(10, 4).iter().map(|range| range.start).collect();
    assert_eq!(starts, [0, 3, 6, 8]);
}

/// Resolves a cluster from variables.
fn resolved(variables: &serde_json::Map<String, Value>, known: &Known) -> Resolution {
    let lookup = |name: &str| variables.get(name).map(|value| text(value).to_owned());
    resolve(Resolver::Auto, &lookup, known).expect("a cluster")
}

#[test]
fn the_classic_configuration_gives_cluster_and_task() {
    let section = vectors("tf_config");
    let variables = |config: &Value| {
        serde_json::Map::from_iter([("TF_CONFIG".to_owned(), Value::from(config.to_string()))])
    };
    let found = resolved(&variables(&section["in"]), &Known::default());
    let expected = ClusterSpec::from_json(&section["in"]["cluster"].to_string());
    assert_eq!(found.cluster, expected.expect("a cluster"));
    let task = found.task.expect("a task");
    assert_eq!(Value::from(vec![Value::from(&*task.job), task.index.into()]), section["task"]);
    // The address at which a session of the classic system reaches the task.
    let address = found.cluster.task_address(&task.job, task.index).expect("an address");
    assert_eq!(format!("grpc://{address}"), text(&section["master"]));
    assert_eq!(section["unset"]["cluster"], Value::Object(serde_json::Map::new()));
    let unset = resolve(Resolver::Auto, &|_| None, &Known::default());
    assert!(matches!(unset, Err(ResolveError::NoSource { .. })));
}

#[test]
fn a_slurm_step_gives_cluster_and_task() {
    let section = vectors("slurm");
    for (list, hosts) in map(&section["hostlist"]) {
        assert_eq!(Value::from(expand_node_list(list).expect("hosts")), *hosts, "{list}");
    }
    for list in list(&section["hostlist_error"]) {
        // A difference of pushpull: several brackets are a product, as in Slurm itself.
        match text(list) {
            "rack[1-2]x[3-4]" => {
                let hosts = expand_node_list(text(list)).expect("hosts");
                assert_eq!(hosts, ["rack1x3", "rack1x4", "rack2x3", "rack2x4"]);
            }
            list => assert!(expand_node_list(list).is_err(), "{list}"),
        }
    }
    let resolution = &section["resolve"];
    let mut variables = map(&resolution["env"]).clone();
    // srun sets these as well: they tell a task of a step from the batch script.
    let size = variables["SLURM_STEP_NUM_TASKS"].clone();
    variables.extend([
        ("SLURM_JOB_ID".to_owned(), Value::from("1")),
        ("SLURM_STEP_ID".to_owned(), Value::from("0")),
        ("SLURM_NTASKS".to_owned(), size),
    ]);
    let mut known = Known::default();
    known.base_port = 8888;
    known.num_ps = resolution["jobs"]["ps"].as_u64().and_then(|count| u32::try_from(count).ok());
    let found = resolved(&variables, &known);
    assert_eq!(found.cluster.to_json(), resolution["cluster"].to_string());
    let task = found.task.expect("a task");
    assert_eq!(Value::from(vec![Value::from(&*task.job), task.index.into()]), resolution["task"]);
    let address = found.cluster.task_address(&task.job, task.index).expect("an address");
    assert_eq!(format!("grpc://{address}"), text(&resolution["master"]));
}

#[test]
fn clusters_are_united_job_by_job() {
    let section = vectors("union_resolver");
    let cluster = |value: &Value| ClusterSpec::from_json(&value.to_string()).expect("a cluster");
    let lists: Vec<_> = list(&section["lists"]).iter().map(cluster).collect();
    assert_eq!(union(&lists), Ok(cluster(&section["out"])));
    let merge = list(&section["dict_merge"]);
    let (first, second) = (cluster(&merge[0]), cluster(&merge[1]));
    assert_eq!(union([&first, &second]), Ok(cluster(&merge[2])));
    let clash = cluster(&serde_json::json!({"worker": {"0": "x:1", "7": "y:1"}}));
    let error = union([&first, &clash]).expect_err("task 0 is in both");
    assert_eq!(error, ResolveError::TaskTwice { job: "worker".to_owned(), index: 0 });
    assert_eq!(section["conflict"], Value::from("KeyError on task 0"));
}
