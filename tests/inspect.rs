//! `pushpull inspect` on the files of a server that runs, that has stopped, and that were damaged.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pushpull::blocking::Worker;
use pushpull::inspect::{FileIs, Presence, VariablesAre, Verdict};
use pushpull::{
    Adagrad, Adam, ClusterSpec, DType, Durability, GlobalStep, Optimizer, Ps, PsConfig, Push,
    StartError, Storage, StorageError, TableSpec, TaskId, VariableSpec, WorkerConfig, f16,
};
use serde_json::Value;

/// A server of two shards on a state directory, and its cluster.
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
    let storage = Storage::Directory { state: state.to_owned(), bytes_max: 1 << 28 };
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), optimizer);
    let config = config.storage(storage).shards(2).integrity_full(true).durability(durability);
    Ok((listener.start(config)?, cluster))
}

/// Joins, pushes so often, and holds one token more.
fn train(cluster: &ClusterSpec, pushes: usize) -> Worker {
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0));
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
fn tables_that_grow_are_told_with_their_rows() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (server, cluster) =
        try_serve(&runtime, &state, Adagrad::new(0.1), Durability::Process).unwrap();
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
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
    // 28 bytes of f32: what a server keeps is no half.
    assert_eq!((&*half.name, half.dtype, half.bytes), ("half", DType::Bf16, 28));
    assert!(page.contains("bf16 [7]"), "{page}");
    drop(worker);
    runtime.block_on(server.serve(async {})).unwrap();

    // A damaged row is found, as the files hold checksums.
    let file = state.join("shard-0/rows-1-0-0");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[4096 + 24] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let found = pushpull::inspect(&state).unwrap();
    assert!(!found.is_sound());
    // What a damaged index or catalogue leaves of the rest is told all the same.
    for name in ["index-1-0", "catalogue-1"] {
        let file = state.join("shard-0").join(name);
        let right = std::fs::read(&file).unwrap();
        std::fs::write(&file, &right[..100]).unwrap();
        let found = pushpull::inspect(&state).unwrap();
        let verdict = |file: &FileIs| file.name == name && !file.verdict.is_sound();
        assert!(found.shards[0].files.iter().any(verdict), "{:?}", found.shards[0].files);
        assert_eq!(found.shards[0].clients.len(), 1, "without {name}");
        std::fs::write(&file, right).unwrap();
    }
    // A table is no variable for a server that promises to survive a loss of power.
    let power = try_serve(&runtime, &state, Adagrad::new(0.1), Durability::Power).unwrap_err();
    assert!(power.to_string().contains("\"users\""), "{power}");
}

/// When each file below was last written.
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
fn a_running_server_and_its_files_afterwards_are_told() {
    let root = tempfile::tempdir().unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = serve(&runtime, &state);
    let worker = train(&cluster, 5);

    let found = pushpull::inspect(&state).unwrap();
    assert!(found.live && found.is_sound(), "{found:?}");
    let [owner, other] = &found.shards[..] else { panic!("two shards: {found:?}") };
    let shard = owner.state.as_ref().unwrap();
    assert_eq!((shard.step, shard.version, shard.gradients), (GlobalStep(5), 5, 5));
    assert_eq!((shard.variables, shard.slots, shard.lives), (VariablesAre::Ready, 2, 1));
    assert_eq!(other.state.as_ref().unwrap().version, 5);
    let names: Vec<&str> =
        found.shards.iter().flat_map(|s| &s.variables).map(|v| v.name.as_str()).collect();
    assert!(names.contains(&"w") && names.contains(&"b"), "{names:?}");
    let client = &owner.clients[0];
    assert_eq!((client.task.clone(), client.newest), (TaskId::worker(0), 5));
    assert_eq!(client.presence, Presence::Present);
    let identity = &owner.arena.as_ref().unwrap().identity;
    assert!(identity.iter().any(|(name, value)| name == "optimizer" && value == "adam"));
    assert!(owner.files.iter().all(|file| file.verdict == Verdict::Sound), "{:?}", owner.files);

    // While pushes go on, too: a look never falls into a commit.
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
    let told = json(&state);
    assert_eq!((&told["live"], &told["sound"]), (&Value::Bool(false), &Value::Bool(true)));
    assert_eq!(told["shards"][0]["state"]["step"], 205);
    assert_eq!(told["shards"][0]["clients"][0]["presence"], "left");
    assert_eq!(told["shards"][0]["arena"]["this_boot"], true);
    let one = json(&state.join("shard-1"));
    assert_eq!(one["shards"][0]["arena"]["shard"], 1);
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    assert!(page.contains("step 205") && page.contains("/job:worker/task:0"), "{page}");
    assert_eq!(written(&state), before, "nothing is written");

    let error = tool(root.path(), false);
    assert!(!error.status.success());
    assert!(String::from_utf8_lossy(&error.stderr).contains("holds neither"));
}

#[test]
fn what_is_wrong_is_told_by_file_and_place() {
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
        // Values lie in either of two places: each is damaged.
        damage(&mut bytes);
        if name == "values-1" {
            bytes[4096..].iter_mut().for_each(|byte| *byte ^= 1);
        }
        std::fs::write(folder.join(name), bytes).unwrap();
        let output = tool(folder.parent().unwrap(), true);
        assert!(!output.status.success(), "{name}");
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let files = told["shards"][0]["files"].as_array().unwrap();
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

#[test]
fn a_flush_that_failed_is_told_and_refused_until_the_machine_is_started_anew() {
    // Temporary files may lie in memory, which a loss of power takes.
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let state = root.path().join("state");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (ps, cluster) = try_serve(&runtime, &state, Adam::new(0.1), Durability::Power).unwrap();
    let mut worker = train(&cluster, 2);
    let token = worker.token().unwrap().unwrap();
    // What cannot be found cannot be flushed.
    let (file, aside) = (state.join("shard-0/undo-1"), root.path().join("undo-1"));
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
    assert_eq!(written(&state), before, "what is refused is left as it was");
    let output = tool(&state, true);
    assert!(!output.status.success());
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [owner, other] = [0, 1].map(|shard| &told["shards"][shard]["poisoned"]);
    assert!(owner.as_str().unwrap().contains("undo-1"), "{owner}");
    assert_eq!(*other, Value::Null);
    let page = String::from_utf8(tool(&state, false).stdout).unwrap();
    assert!(page.contains("POISONED"), "{page}");
}

#[test]
fn whoever_has_read_enough_is_told_no_more() {
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
