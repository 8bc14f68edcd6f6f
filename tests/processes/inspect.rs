//! `pushpull inspect` on the files of a running server, of a stopped one, and on damaged files.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pushpull::blocking::Worker;
use pushpull::cluster::PlacementStrategy;
use pushpull::error::{StartError, StorageError};
use pushpull::inspect::{FileReport, Presence, VariablesStage, Verdict};
use pushpull::optim::{Adagrad, Optimizer};
use pushpull::server::Durability;
use pushpull::variable::{DType, TableSpec, f16};
use pushpull::worker::{DataSet, GlobalStep};
use pushpull::{
    Adam, ClusterSpec, Ps, PsConfig, Push, Storage, TaskId, VariableSpec, WorkerConfig,
};
use serde_json::Value;

/// Starts a server of two shards on a state directory, and returns it with its cluster.
fn serve(runtime: &tokio::runtime::Runtime, state: &Path) -> (Ps, ClusterSpec) {
    try_serve(runtime, state, Adam::new(0.1), Durability::Process).unwrap()
}

fn try_serve(
    runtime: &tokio::runtime::Runtime,
    state: &Path,
    optimizer: impl Optimizer,
    durability: Durability,
) -> Result<(Ps, ClusterSpec), StartError> {
    let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
    let cluster = ClusterSpec::builder()
        .job("ps", [listener.address()])
        .job("worker", ["127.0.0.1:1"])
        .build()
        .unwrap();
    let storage = Storage::directory(state).bytes_max(1 << 28);
    let storage = storage.integrity_full(true).durability(durability);
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), optimizer);
    let config = config.storage(storage).shards(2);
    Ok((listener.start(config)?, cluster))
}

/// Joins, pushes `pushes` times, and returns the worker.
fn train(cluster: &ClusterSpec, pushes: usize) -> Worker {
    let set = DataSet::new("train", 100_000, 32).unwrap().shuffle(7);
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0)).data(set);
    let mut worker = Worker::connect(config).unwrap();
    let variables =
        [VariableSpec::f32("w", [40, 3]).unwrap(), VariableSpec::f32("b", [7]).unwrap()];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    for _ in 0..pushes {
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        gradients.view_mut::<f32>("b").unwrap().fill(1.0);
        assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
    }
    worker
}

fn tool(directory: &Path, json: bool) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    command.arg("inspect").arg(directory);
    if json {
        command.arg("--json");
    }
    command.output().unwrap()
}

fn json(directory: &Path) -> Value {
    let output = tool(directory, true);
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Copies a folder of files.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn tables_are_reported_with_their_rows() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (server, cluster) =
        try_serve(&runtime, &state, Adagrad::new(0.1), Durability::Process).unwrap();
    // The table is created first, and is then on the first shard.
    let config = WorkerConfig::new(cluster, TaskId::worker(0));
    let mut worker = Worker::connect(config.placement(PlacementStrategy::RoundRobin)).unwrap();
    let spec = TableSpec::new(1 << 20).rows_at_once(500);
    let table = VariableSpec::table("users", DType::F16, [3], spec).unwrap();
    let half = VariableSpec::bf16("half", [7]).unwrap();
    worker.join(&[table, half], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let ids: Vec<u64> = (0..500).collect();
    gradients.set_rows("users", &ids, &[f16::ONE; 1500]).unwrap();
    worker.push(token, gradients).unwrap();

    let found = pushpull::inspect(&state).unwrap();
    assert!(found.is_sound(), "{:?}", found.shards[0].files);
    let names: Vec<&str> = found.shards[0].files.iter().map(|file| &*file.name).collect();
    assert!(names.contains(&"index-1-0") && names.contains(&"rows-1-0-0"), "{names:?}");
    assert_eq!(found.shards[0].variables[0].table_rows, Some(500));
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    assert!(page.contains("a table of 500 rows"), "{page}");
    assert_eq!(found.shards[0].variables[0].dtype, DType::F16);
    let half = &found.shards[1].variables[0];
    // The server keeps f32 masters: 28 bytes for 7 elements.
    assert_eq!((&*half.name, half.dtype, half.bytes), ("half", DType::Bf16, 28));
    assert!(page.contains("bf16 [7]"), "{page}");
    drop(worker);
    runtime.block_on(server.serve(async {})).unwrap();

    // The files hold checksums, so a damaged row is found.
    let file = state.join("shard-0/rows-1-0-0");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[4096 + 24] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let found = pushpull::inspect(&state).unwrap();
    assert!(!found.is_sound());
    // With a damaged index or catalogue, the rest is still reported.
    for name in ["index-1-0", "catalogue-1"] {
        let file = state.join("shard-0").join(name);
        let right = std::fs::read(&file).unwrap();
        std::fs::write(&file, &right[..100]).unwrap();
        let found = pushpull::inspect(&state).unwrap();
        let verdict = |file: &FileReport| file.name == name && !file.verdict.is_sound();
        assert!(found.shards[0].files.iter().any(verdict), "{:?}", found.shards[0].files);
        assert_eq!(found.shards[0].clients.len(), 1, "without {name}");
        std::fs::write(&file, right).unwrap();
    }
    // A server that must survive a loss of power refuses tables.
    let power = try_serve(&runtime, &state, Adagrad::new(0.1), Durability::Power).unwrap_err();
    assert!(power.to_string().contains("\"users\""), "{power}");
}

#[test]
fn variables_that_replicas_change_are_reported() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (server, cluster) = serve(&runtime, &state);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    let f32 = |name| VariableSpec::f32(name, [2]).unwrap();
    let variables = [f32("w"), f32("p").plain(), f32("s").local(), f32("m").mean_every_steps(8)];
    worker.join(&variables, |_| ()).unwrap();
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    for end in ["8 bytes, plain\n", "8 bytes, local\n", "8 bytes, mean every 8 steps\n"] {
        assert_eq!(page.matches(end).count(), 1, "{page}");
    }
    let json: Value = serde_json::from_slice(&tool(&state, true).stdout).unwrap();
    let shards = json["shards"].as_array().unwrap();
    let mut found: Vec<[String; 3]> = shards
        .iter()
        .flat_map(|shard| shard["variables"].as_array().unwrap())
        .map(|it| ["name", "replication", "mean_every"].map(|key| it[key].to_string()))
        .collect();
    found.sort();
    let expected = [
        ["\"m\"", "\"mean\"", "8"],
        ["\"p\"", "\"shared\"", "null"],
        ["\"s\"", "\"local\"", "null"],
        ["\"w\"", "\"shared\"", "null"],
    ];
    assert_eq!(found, expected);
    drop(worker);
    runtime.block_on(server.serve(async {})).unwrap();
}

/// Returns the modification time of each file below `path`.
fn written(path: &Path) -> Vec<(PathBuf, std::time::SystemTime)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(written(&path)),
            false => files.push((path.clone(), path.metadata().unwrap().modified().unwrap())),
        }
    }
    files.sort();
    files
}

#[test]
fn a_running_server_and_its_stopped_state_are_reported() {
    let root = tempfile::tempdir().unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = serve(&runtime, &state);
    let worker = train(&cluster, 5);

    let found = pushpull::inspect(&state).unwrap();
    assert!(found.live && found.is_sound(), "{found:?}");
    let [owner, other] = &found.shards[..] else { panic!("expected two shards: {found:?}") };
    let shard = owner.state.as_ref().unwrap();
    assert_eq!((shard.step, shard.version, shard.gradients), (GlobalStep(5), 5, 5));
    assert_eq!((shard.variables, shard.slots, shard.lives), (VariablesStage::Ready, 2, 1));
    assert_eq!(other.state.as_ref().unwrap().version, 5);
    let names: Vec<&str> =
        found.shards.iter().flat_map(|s| &s.variables).map(|v| v.name.as_str()).collect();
    assert!(names.contains(&"w") && names.contains(&"b"), "{names:?}");
    let client = &owner.clients[0];
    assert_eq!((client.task.clone(), client.newest), (TaskId::worker(0), 5));
    let data = owner.data.as_ref().unwrap();
    assert_eq!((data.set.name(), data.set.seed(), data.set.samples()), ("train", Some(7), 100_000));
    assert_eq!((data.begun as usize, other.data.is_none()), (5 + data.held + data.free, true));
    assert_eq!(client.presence, Presence::Present);
    let identity = &owner.arena.as_ref().unwrap().identity;
    assert!(identity.iter().any(|(name, value)| name == "optimizer" && value == "adam"));
    assert!(owner.files.iter().all(|file| file.verdict == Verdict::Sound), "{:?}", owner.files);

    // An inspection during pushes never sees a commit in progress.
    let pushing = std::thread::spawn(move || {
        let mut worker = worker;
        for _ in 0..200 {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("w").unwrap().fill(1.0);
            worker.push(token, gradients).unwrap();
        }
        worker.leave().unwrap();
    });
    while !pushing.is_finished() {
        let found = pushpull::inspect(&state).unwrap();
        assert!(found.is_sound(), "{found:?}");
    }
    pushing.join().unwrap();
    runtime.block_on(ps.serve(async {})).unwrap();

    let before = written(&state);
    let report = json(&state);
    assert_eq!((&report["live"], &report["sound"]), (&Value::Bool(false), &Value::Bool(true)));
    assert_eq!(report["shards"][0]["state"]["step"], 205);
    assert_eq!(report["shards"][0]["clients"][0]["presence"], "left");
    let data = &report["shards"][0]["data"];
    let count = |field: &str| data[field].as_u64().unwrap();
    // The token of a worker that has left is held until the other shard has answered its recall.
    assert_eq!(count("begun"), 205 + count("held") + count("free"), "{data}");
    assert_eq!((&report["shards"][1]["data"], count("batch")), (&Value::Null, 32));
    assert_eq!(report["shards"][0]["arena"]["this_boot"], true);
    let one = json(&state.join("shard-1"));
    assert_eq!(one["shards"][0]["arena"]["shard"], 1);
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    assert!(page.contains("step 205") && page.contains("/job:worker/task:0"), "{page}");
    assert!(page.contains("data       \"train\", 100000 samples in batches of 32; 20"), "{page}");
    assert_eq!(written(&state), before, "inspect writes nothing");

    // A state without one of its shards is not sound, but the folder of the other is.
    std::fs::rename(state.join("shard-1"), root.path().join("elsewhere")).unwrap();
    let missing = state.join("shard-1").display().to_string();
    let report = json(&state);
    assert_eq!((&report["sound"], &report["missing"][0]), (&Value::Bool(false), &missing.into()));
    let said = tool(&state, false);
    let page = String::from_utf8(said.stdout).unwrap();
    assert!(page.contains("MISSING: ") && said.status.code() == Some(1), "{page}");
    assert!(tool(&state.join("shard-0"), false).status.success());

    let error = tool(root.path(), false);
    assert!(!error.status.success());
    assert!(String::from_utf8_lossy(&error.stderr).contains("holds neither"));
}

#[test]
fn damage_is_reported_by_file_and_offset() {
    let root = tempfile::tempdir().unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = serve(&runtime, &state);
    train(&cluster, 3).leave().unwrap();
    runtime.block_on(ps.serve(async {})).unwrap();

    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage, &str, u64); 5] = [
        ("control", |bytes| bytes[4096] ^= 1, "corrupt", 8184),
        ("tables-1", |bytes| bytes[4100] ^= 1, "corrupt", 8184),
        ("intent", |bytes| bytes[4096] ^= 1, "corrupt", 4096),
        ("values-1", |bytes| bytes[4096] ^= 1, "corrupt", 4096),
        ("undo-1", |bytes| bytes.truncate(5000), "corrupt", 5000),
    ];
    for (name, damage, verdict, offset) in damages {
        let folder = root.path().join(name).join("shard-0");
        copy(&state.join("shard-0"), &folder);
        let mut bytes = std::fs::read(folder.join(name)).unwrap();
        // A block of values may be in either of two places, so both are damaged.
        damage(&mut bytes);
        if name == "values-1" {
            bytes[4096..].iter_mut().for_each(|byte| *byte ^= 1);
        }
        std::fs::write(folder.join(name), bytes).unwrap();
        let output = tool(folder.parent().unwrap(), true);
        assert!(!output.status.success(), "{name}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let files = report["shards"][0]["files"].as_array().unwrap();
        let file = files.iter().find(|file| file["name"] == name).unwrap();
        assert_eq!(file["verdict"], verdict, "{file}");
        assert!(name == "values-1" || file["offset"] == offset, "{file}");
        assert!(!file["expected"].as_str().unwrap().is_empty());
    }

    let folder = root.path().join("missing/shard-0");
    copy(&state.join("shard-0"), &folder);
    std::fs::remove_file(folder.join("inbox-1")).unwrap();
    let found = pushpull::inspect(&folder).unwrap();
    let file = found.shards[0].files.iter().find(|file| file.name == "inbox-1").unwrap();
    assert_eq!(file.verdict, Verdict::Missing);
    assert!(!found.is_sound() && !found.live);
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

/// Writes another format into the first page of a file, with its checksum.
fn set_format(path: &Path, format: u32) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[8..12].copy_from_slice(&format.to_le_bytes());
    let crc = u64::from(crc32c(&bytes[..4088]));
    bytes[4088..4096].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_state_of_another_format_is_refused_with_what_to_do_and_is_not_called_corrupt() {
    let root = tempfile::tempdir().unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = serve(&runtime, &state);
    train(&cluster, 3).leave().unwrap();
    runtime.block_on(ps.serve(async {})).unwrap();
    let format = json(&state)["shards"][0]["arena"]["format"].as_u64().unwrap() as u32;
    let expected = [
        (format - 1, "end it with a checkpoint, and remove the directory"),
        (format + 1, "start the newer server that wrote it"),
    ];
    for (other, advice) in expected {
        for shard in ["shard-0", "shard-1"] {
            for file in std::fs::read_dir(state.join(shard)).unwrap() {
                set_format(&file.unwrap().path(), other);
            }
        }
        let refused = try_serve(&runtime, &state, Adam::new(0.1), Durability::Process).unwrap_err();
        let StartError::Storage(error @ StorageError::OtherFormat { found, .. }) = &refused else {
            panic!("{refused}")
        };
        assert_eq!(*found, other);
        let text = error.to_string();
        assert!(text.contains(&format!("written in format {other}")), "{text}");
        assert!(text.contains(advice), "{text}");
        let output = tool(&state, false);
        let page = String::from_utf8(output.stdout).unwrap();
        assert!(!output.status.success(), "{page}");
        assert!(page.contains(&format!("format {other}: this version reads")), "{page}");
        assert!(!page.to_lowercase().contains("corrupt"), "{page}");
        let report = json(&state);
        let file = &report["shards"][0]["files"][0];
        assert_eq!((&file["verdict"], &file["format"]), (&"other format".into(), &other.into()));
    }
}

#[test]
fn state_with_a_failed_flush_is_reported_and_refused() {
    // The default temporary directory may be in memory, which a loss of power erases.
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = try_serve(&runtime, &state, Adam::new(0.1), Durability::Power).unwrap();
    let mut worker = train(&cluster, 2);
    let token = worker.token().unwrap().unwrap();
    // The flush fails because the file cannot be found.
    let file = state.join("shard-0/undo-1");
    let aside = root.path().join("undo-1");
    std::fs::rename(&file, &aside).unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    gradients.view_mut::<f32>("b").unwrap().fill(1.0);
    let error = worker.push(token, gradients).unwrap_err().to_string();
    assert!(error.contains("undo-1"), "{error}");
    drop(worker);
    runtime.block_on(ps.serve(async {})).unwrap();
    std::fs::rename(&aside, &file).unwrap();

    let before = written(&state);
    for durability in [Durability::Power, Durability::Process] {
        let error = try_serve(&runtime, &state, Adam::new(0.1), durability).unwrap_err();
        let StartError::Storage(StorageError::Poisoned { path, reason }) = &error else {
            panic!("{error}")
        };
        assert!(path.ends_with("shard-0/control") && reason.contains("undo-1"), "{error}");
    }
    assert_eq!(written(&state), before, "refused state is left unchanged");
    let output = tool(&state, true);
    assert!(!output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [owner, other] = [0, 1].map(|shard| &report["shards"][shard]["poisoned"]);
    assert!(owner.as_str().unwrap().contains("undo-1"), "{owner}");
    assert_eq!(*other, Value::Null);
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    assert!(page.contains("POISONED"), "{page}");
}

#[test]
fn what_holds_nothing_to_inspect_is_an_error_that_names_it() {
    let root = tempfile::tempdir().unwrap();
    let make = |name: &str| std::fs::create_dir_all(root.path().join(name)).unwrap();
    ["renamed", "unfinished/ckpt-1-30.tmp", "empty"].into_iter().for_each(make);
    std::fs::write(root.path().join("renamed/MANIFEST"), "").unwrap();
    for (name, expected) in [
        ("renamed", "/renamed has a manifest and not the name of a checkpoint"),
        ("unfinished", "/unfinished has no checkpoint"),
        ("empty", "/empty"),
        ("absent", "cannot list"),
    ] {
        let output = tool(&root.path().join(name), false);
        let errors = String::from_utf8(output.stderr).unwrap();
        let path = format!("/{name}");
        assert!(!output.status.success(), "{name}");
        assert!(errors.contains(expected) && errors.contains(&path), "{name}: {errors}");
    }
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (ps, cluster) = serve(&runtime, folder.path());
    drop(train(&cluster, 1));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    command.arg("inspect").arg(folder.path()).arg("--json").stdout(writer);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    drop(ps);
}
