//! Checkpoints on real stores: a server is killed in mid-save, the training is restored bit-equal, and
//! other programs read the checkpoints.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pushpull::blocking::Worker;
use pushpull::checkpoint::{CheckpointStorage, list};
use pushpull::remote::{RemoteOptions, RemoteStorage};
use pushpull::{ClusterSpec, Params, TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;

#[path = "../ps/remote/tests/engines/mod.rs"]
mod engines;
#[path = "support/test_process.rs"]
mod test_process;

use engines::Engine;
use test_process::{LONG, TestProcess, free_addresses};

/// The model: 6 MiB of values and twice as many of slots, so that a file is uploaded in parts.
const ROWS: usize = 1536;
const COLUMNS: usize = 1024;

fn variables() -> [VariableSpec; 2] {
    let weights = VariableSpec::f32("w", [ROWS as u64, COLUMNS as u64]).unwrap();
    [weights, VariableSpec::f32("b", [7]).unwrap()]
}

/// One server with two shards, whose checkpoints are at a URL.
struct Server {
    process: TestProcess,
    address: String,
}

impl Server {
    /// Starts the daemon without a state directory, so that only its checkpoints outlive it.
    fn start(url: Option<&str>, settings: &[(&'static str, String)]) -> Server {
        let address = free_addresses(1).remove(0);
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command
            .args(["--ps-hosts", &address, "--worker-hosts", "127.0.0.1:1"])
            .args(["--shards", "2", "--bytes-max", "268435456", "--optimizer", "adam"])
            .args(["--learning-rate", "0.01"])
            .envs(settings.iter().map(|(name, value)| (*name, value.as_str())))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        if let Some(url) = url {
            command.args(["--checkpoint-dir", url]);
        }
        let process = TestProcess::start("daemon", &mut command);
        Server { process, address }
    }

    fn worker(&self) -> Worker {
        let cluster = ClusterSpec::builder().job("ps", [&self.address]);
        let cluster = cluster.job("worker", ["127.0.0.1:1"]).build().unwrap();
        Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap()
    }
}

fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in ["w", "b"] {
            let values = gradients.view_mut::<f32>(name).unwrap();
            for (index, gradient) in values.iter_mut().enumerate() {
                let word = (index as u64 + 1).wrapping_mul(step * 2 + 1);
                *gradient = (word % 997) as f32 / 500.0 - 1.0;
            }
        }
        worker.push(token, gradients).unwrap();
    }
}

/// Returns the bits of all values.
fn pulled(worker: &mut Worker, params: &mut Params) -> Vec<u32> {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let bits = |name| params.view::<f32>(name).unwrap().iter().map(|value| value.to_bits());
    bits("w").chain(bits("b")).collect()
}

/// Passes connections on to a store, and holds back what a save sends once it is under way.
struct Proxy {
    address: String,
    /// The bytes that may still be sent.
    allowed: Arc<AtomicU64>,
}

impl Proxy {
    fn start(target: String) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let allowed = Arc::new(AtomicU64::new(u64::MAX));
        let limit = allowed.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let Ok(store) = TcpStream::connect(&target) else { continue };
                let back = (store.try_clone().unwrap(), client.try_clone().unwrap());
                let limit = limit.clone();
                std::thread::spawn(move || copy(client, store, &limit));
                std::thread::spawn(move || copy(back.0, back.1, &AtomicU64::new(u64::MAX)));
            }
        });
        Proxy { address, allowed }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, allowed: &AtomicU64) {
    let mut buffer = vec![0; 1 << 14];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let spent = |left: u64| left.checked_sub(bytes as u64);
        if allowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spent).is_err() {
            // The connection stays open, as that of a store that has stopped.
            std::thread::park();
        }
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// Something that stops a save midway.
enum Brake {
    Proxy(Proxy),
    DataNode,
}

impl Brake {
    /// Returns the brake of a store, and the settings of a client that goes through it.
    fn of(engine: &Engine) -> (Brake, Vec<(&'static str, String)>) {
        let mut settings = engine.settings.clone();
        let is_endpoint =
            |name: &str| matches!(name, "AWS_ENDPOINT_URL" | "AZURE_STORAGE_ENDPOINT");
        let Some((_, url)) = settings.iter_mut().find(|(name, _)| is_endpoint(name)) else {
            return (Brake::DataNode, settings);
        };
        let (_, rest) = url.split_once("://").unwrap();
        let target = rest.split('/').next().unwrap().to_owned();
        let proxy = Proxy::start(target.clone());
        *url = url.replace(&target, &proxy.address);
        (Brake::Proxy(proxy), settings)
    }

    /// Lets no more pass than the beginning of a save.
    fn pull(&self, engine: &Engine) {
        match self {
            Brake::Proxy(proxy) => proxy.allowed.store(2 << 20, Ordering::Relaxed),
            Brake::DataNode => engine.signal_data_node(Signal::STOP),
        }
    }

    fn release(&self, engine: &Engine) {
        if let Brake::DataNode = self {
            engine.signal_data_node(Signal::CONT);
        }
    }
}

/// Waits until a save has begun: its folder is in the store and has a file, and is not published.
fn wait_for_mid_save(storage: &RemoteStorage) {
    let start = Instant::now();
    loop {
        let folders = storage.list(None).unwrap();
        let begun = folders.iter().find(|folder| folder.ends_with(".tmp"));
        if begun.is_some_and(|folder| !storage.list(Some(folder)).unwrap().is_empty()) {
            return;
        }
        assert!(start.elapsed() < LONG, "no save begins");
    }
}

/// Trains 20 steps with a checkpoint at step 10, and a server that is killed while it saves step 15.
/// The rest is trained again from the checkpoint.
fn is_restored_bit_equal(engine: &Engine) {
    let url = format!("{}/job/checkpoints", engine.url);
    let undisturbed = {
        let server = Server::start(None, &[]);
        let mut worker = server.worker();
        let mut params = worker.join(&variables(), |_| ()).unwrap();
        train(&mut worker, 0..20);
        pulled(&mut worker, &mut params)
    };
    let (brake, settings) = Brake::of(engine);
    let mut server = Server::start(Some(&url), &settings);
    let mut worker = server.worker();
    worker.join(&variables(), |_| ()).unwrap();
    train(&mut worker, 0..10);
    assert_eq!(worker.save(b"after ten").unwrap().step, 10);
    train(&mut worker, 10..15);
    let storage = RemoteStorage::open(&url, engine.options()).unwrap();
    brake.pull(engine);
    std::thread::scope(|scope| {
        let interrupt = worker.interrupt();
        let saving = scope.spawn(|| worker.save(b"").is_err());
        wait_for_mid_save(&storage);
        server.process.child.kill().unwrap();
        server.process.child.wait().unwrap();
        interrupt.raise();
        assert!(saving.join().unwrap(), "the save has ended before the kill");
    });
    brake.release(engine);
    drop(worker);
    assert!(storage.list(None).unwrap().iter().any(|folder| folder.ends_with(".tmp")));
    let saved = list(&storage).unwrap();
    assert_eq!(saved.checkpoints.iter().map(|saved| saved.global_step).collect::<Vec<_>>(), [10]);
    assert!(saved.refused.is_empty(), "{:?}", saved.refused);
    // Another server, which has nothing but the URL.
    let server = Server::start(Some(&url), &engine.settings);
    let mut worker = server.worker();
    let mut params = worker.join(&variables(), |_| panic!("already restored")).unwrap();
    assert_eq!(worker.restored().unwrap().step, 10);
    let folders = storage.list(None).unwrap();
    assert!(folders.iter().all(|folder| !folder.ends_with(".tmp")), "orphans: {folders:?}");
    train(&mut worker, 10..20);
    let restored = pulled(&mut worker, &mut params);
    assert!(restored == undisturbed, "restored values differ");
    let last = worker.save(b"at the end").unwrap();
    assert_eq!(last.step, 20);
    drop((worker, server));
    the_tool_reads(engine, &url, &last.name);
    safetensors_reads(&exported(engine, &url), &restored);
}

/// Runs the tool with the settings of a store. Returns what it prints.
fn tool(engine: &Engine, arguments: &[&str]) -> String {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    tool.args(arguments).envs(engine.settings.iter().map(|(name, value)| (*name, value)));
    let output = tool.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "pushpull {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn the_tool_reads(engine: &Engine, url: &str, newest: &str) {
    let page = tool(engine, &["inspect", url]);
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("ckpt-")).collect();
    assert_eq!((lines.len(), lines[0]), (2, newest), "{page}");
    assert_eq!(page.matches("  sound ").count(), 2, "{page}");
    let one = tool(engine, &["inspect", "--json", &format!("{url}/{newest}")]);
    let value: serde_json::Value = serde_json::from_str(&one).unwrap();
    assert_eq!(value["checkpoints"][0]["name"], newest, "{one}");
    assert_eq!(value["checkpoints"][0]["sound"], true, "{one}");
}

/// Exports the newest checkpoint to a file of this machine.
fn exported(engine: &Engine, url: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    tool(engine, &["export", url, "--to", file.to_str().unwrap()]);
    std::fs::read(file).unwrap()
}

/// Reads a file with the reference reader, and in Python if `PUSHPULL_SAFETENSORS` names one that has
/// it.
fn safetensors_reads(file: &[u8], expected: &[u32]) {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let bytes = ["w", "b"].map(|name| tensors.tensor(name).unwrap().data().to_vec()).concat();
    let bits = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    assert!(bits.eq(expected.iter().copied()), "the exported values differ");
    let Some(python) = std::env::var_os("PUSHPULL_SAFETENSORS") else {
        return println!("skipped: PUSHPULL_SAFETENSORS names no Python with safetensors");
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, file).unwrap();
    let program = "import sys; from safetensors.numpy import load_file; t = load_file(sys.argv[1]); \
                   sys.stdout.buffer.write(t['w'].tobytes() + t['b'].tobytes())";
    let read = Command::new(python).args(["-c", program]).arg(&path).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    assert!(read.stdout == bytes, "Python reads other values");
}

#[test]
fn training_on_s3_is_restored_bit_equal_after_a_kill_in_mid_save() {
    let Some(engine) = Engine::moto() else { return };
    is_restored_bit_equal(&engine);
}

#[test]
fn training_on_azure_is_restored_bit_equal_after_a_kill_in_mid_save() {
    let Some(engine) = Engine::azurite() else { return };
    is_restored_bit_equal(&engine);
}

#[test]
fn training_on_hdfs_is_restored_bit_equal_after_a_kill_in_mid_save() {
    let Some(engine) = Engine::hdfs() else { return };
    is_restored_bit_equal(&engine);
    // Hadoop's own shell reads the files, one of them a safetensors file.
    let listing = engine.hdfs_shell(&["-ls", "/job/checkpoints"]);
    let listing = String::from_utf8(listing).unwrap();
    let newest = listing.lines().filter_map(|line| line.split('/').next_back());
    let newest = newest.filter(|name| name.starts_with("ckpt-")).next_back().unwrap().to_owned();
    let file = format!("/job/checkpoints/{newest}/shard-0-0.safetensors");
    let shard = engine.hdfs_shell(&["-cat", &file]);
    let tensors = safetensors::SafeTensors::deserialize(&shard).unwrap();
    assert!(tensors.names().iter().any(|name| name.starts_with('w')), "{:?}", tensors.names());
}

/// A bucket that denies or is missing ends the daemon, with the URL and the cause in its last words.
#[test]
fn a_daemon_with_a_bucket_that_is_missing_says_so() {
    let Some(engine) = Engine::moto() else { return };
    let address = free_addresses(1).remove(0);
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    daemon.args(["--ps-hosts", &address, "--checkpoint-dir", "s3://missing/run"]);
    daemon.envs(engine.settings.iter().map(|(name, value)| (*name, value)));
    let output = daemon.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    for part in ["--checkpoint-dir", "cannot open s3://missing/run", "NoSuchBucket"] {
        assert!(errors.contains(part), "{errors}");
    }
}

/// Two clusters that save at one URL would delete checkpoints of each other.
#[test]
fn a_second_cluster_at_a_url_does_not_start() {
    let Some(engine) = Engine::moto() else { return };
    let url = format!("{}/shared", engine.url);
    let first = Server::start(Some(&url), &engine.settings);
    first.worker().join(&variables(), |_| ()).unwrap();
    let address = free_addresses(1).remove(0);
    let mut second = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    second.args(["--ps-hosts", &address, "--checkpoint-dir", &url]);
    second.envs(engine.settings.iter().map(|(name, value)| (*name, value)));
    let output = second.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("another cluster saves its checkpoints there"), "{errors}");
    drop(first);
}

/// A failed save ends the daemon with exit code 3, if it is told so.
#[test]
fn a_failed_save_stops_the_daemon_by_its_setting() {
    let Some(engine) = Engine::moto() else { return };
    let url = format!("{}/stopped", engine.url);
    let address = free_addresses(1).remove(0);
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    daemon.args(["--ps-hosts", &address, "--worker-hosts", "127.0.0.1:1"]);
    daemon.args(["--checkpoint-dir", &url, "--on-save-failure", "stop"]);
    daemon.envs(engine.settings.iter().map(|(name, value)| (*name, value)));
    daemon.stdout(Stdio::piped()).stderr(Stdio::null());
    let process = TestProcess::start("daemon", &mut daemon);
    let mut server = Server { process, address };
    let mut worker = server.worker();
    worker.join(&variables(), |_| ()).unwrap();
    train(&mut worker, 0..1);
    worker.save(b"").unwrap();
    // The store is gone.
    drop(engine);
    let error = worker.save(b"").unwrap_err().to_string();
    assert!(error.contains(&url), "{error}");
    let output = server.process.fail_with(3);
    assert!(output.contains("saves of checkpoints failed"), "{output}");
}
