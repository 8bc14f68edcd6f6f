//! Every sample of every epoch counts exactly once while servers, workers and the chief are killed:
//! some at a time, or all at once with nothing but checkpoints left.
//!
//! Each gradient adds 1 to the elements of its samples in a ledger on the servers. A step has one
//! gradient, so no mean changes the sum.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../src/random.rs"]
mod random;
#[path = "../../../tests/support/test_process.rs"]
mod test_process;

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pushpull::blocking::Reader;
use pushpull::{ClusterSpec, Params, TaskId, WorkerConfig};
use random::SplitMix64;
use rustix::process::Signal;
use test_process::{LONG, TestProcess, free_addresses};

const EPOCHS: u64 = 3;
const SAMPLES: u64 = 1437;
/// A step has one sample.
const LAST_STEP: u64 = EPOCHS * SAMPLES;
const TASKS: [(&str, u32); 5] = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2)];
const CHIEF: usize = 2;

/// What survives a kill of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// The state of each.
    State,
    /// The checkpoints, one every 100 steps.
    Checkpoints,
}

/// The processes of a cluster, in the order of `TASKS`.
struct KilledCluster {
    folder: tempfile::TempDir,
    hosts: Vec<String>,
    kept: Kept,
    step_delay_ms: u64,
    processes: Vec<TestProcess>,
}

impl KilledCluster {
    fn start(kept: Kept, step_delay_ms: u64) -> KilledCluster {
        let folder = tempfile::tempdir().unwrap();
        let hosts = free_addresses(TASKS.len());
        let processes = Vec::new();
        let mut cluster = KilledCluster { folder, hosts, kept, step_delay_ms, processes };
        cluster.processes = (0..TASKS.len()).map(|task| cluster.process(task)).collect();
        cluster
    }

    /// Starts a task, with the command line of its first start.
    fn process(&self, task: usize) -> TestProcess {
        let (job, index) = TASKS[task];
        let mut command = Command::new(env!("CARGO_BIN_EXE_digits"));
        command
            .args(["--ps-hosts", &self.hosts[..2].join(",")])
            .args(["--worker-hosts", &self.hosts[2..].join(",")])
            .args(["--job-name", job, "--task-index", &index.to_string()])
            .args(["--epochs", &EPOCHS.to_string(), "--synchronous", "1/3", "--ledger"]);
        if job == "ps" {
            command.args(["--learning-rate", "3e-3", "--decay-steps", &LAST_STEP.to_string()]);
            command.arg("--keep-serving");
        } else {
            command.args(["--batch", "1", "--step-delay-ms", &self.step_delay_ms.to_string()]);
        }
        match self.kept {
            Kept::State if job == "ps" => {
                let state = self.folder.path().join(format!("state-{index}"));
                command.arg("--state-dir").arg(state);
            }
            Kept::State => {}
            Kept::Checkpoints => {
                let checkpoints = self.folder.path().join("checkpoints");
                command.arg("--checkpoint-dir").arg(checkpoints);
                if job == "worker" {
                    command.args(["--checkpoint-steps", "100"]);
                }
            }
        }
        let log = File::options().create(true).append(true).open(self.log(task)).unwrap();
        TestProcess::start(format!("{job} {index}"), command.stdout(Stdio::piped()).stderr(log))
    }

    /// The errors of all starts of a task.
    fn log(&self, task: usize) -> PathBuf {
        let (job, index) = TASKS[task];
        self.folder.path().join(format!("{job}-{index}.log"))
    }

    /// Kills these tasks, and starts them again.
    fn kill(&mut self, tasks: &[usize]) {
        for &task in tasks {
            let ended = self.processes[task].child.try_wait().unwrap();
            assert_eq!(ended, None, "{:?} ended by itself: {}", TASKS[task], self.read_log(task));
            self.processes[task].child.kill().unwrap();
        }
        for &task in tasks {
            self.processes[task].child.wait().unwrap();
            self.processes[task] = self.process(task);
        }
    }

    /// The steps in the lines of the chief that begin like this.
    fn chief_steps(&self, begin: &str) -> Vec<u64> {
        let log = self.read_log(CHIEF);
        let lines = log.lines().filter(|line| line.starts_with(begin));
        let steps = lines.filter_map(|line| line.rsplit_once(" of step ")?.1.parse().ok());
        steps.collect()
    }

    /// Waits until the chief's newest process, the one after `starts - 1` kills, has saved a
    /// checkpoint after the one that it began with.
    fn await_checkpoint(&self, starts: usize) {
        let begin = Instant::now();
        let is_saved = || {
            let saved = self.chief_steps("saved the checkpoint ");
            let restored = self.chief_steps("restored the checkpoint ");
            let first = restored.get(starts.wrapping_sub(2)).copied().unwrap_or(0);
            restored.len() + 1 == starts && saved.last().is_some_and(|&last| last > first)
        };
        while !is_saved() {
            assert!(begin.elapsed() < LONG, "no checkpoint: {}", self.read_log(CHIEF));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn read_log(&self, task: usize) -> String {
        fs::read_to_string(self.log(task)).unwrap()
    }

    /// Waits until a task exits, and returns its last line of output.
    fn finish(&mut self, task: usize) -> String {
        let (status, output, _) = self.processes[task].finish();
        let log = self.read_log(task);
        assert!(status.success(), "{:?} ended with {status}: {log}", TASKS[task]);
        assert!(!log.contains("panicked"), "{:?}: {log}", TASKS[task]);
        output.lines().last().unwrap_or_default().to_owned()
    }
}

/// The values on the servers.
struct Values {
    spec: ClusterSpec,
    reader: Option<(Reader, Params)>,
}

impl Values {
    fn of(cluster: &KilledCluster) -> Values {
        let (servers, workers) = cluster.hosts.split_at(2);
        let spec = ClusterSpec::builder().job("ps", servers).job("worker", workers).build();
        Values { spec: spec.unwrap(), reader: None }
    }

    /// Pulls the values until the global step is at least `step`. Returns it with the values.
    fn at(&mut self, step: u64) -> (u64, &Params) {
        let begin = Instant::now();
        let pulled = loop {
            let (reader, params) = self.reader.get_or_insert_with(|| {
                let config = WorkerConfig::new(self.spec.clone(), TaskId::worker(9));
                let reader = Reader::connect(config).unwrap();
                let params = reader.params();
                (reader, params)
            });
            match reader.pull(params) {
                Ok(pulled) if pulled >= step => break pulled,
                Ok(pulled) => assert!(begin.elapsed() < LONG, "step {pulled} of {step}"),
                Err(error) => {
                    assert!(begin.elapsed() < LONG, "step {step}: {error}");
                    self.reader = None;
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        (pulled, &self.reader.as_ref().unwrap().1)
    }
}

/// Returns a number that an environment variable sets.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, expected a number")))
}

/// Returns the tasks to be killed, in groups that are killed at the same moment. Of five kills,
/// each task is killed once.
fn schedule(kills: u64, random: &mut SplitMix64) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut tasks = Vec::new();
    for _ in 0..kills {
        if tasks.is_empty() {
            tasks = (0..TASKS.len()).collect();
            random.shuffle(&mut tasks);
        }
        let task = tasks.pop().unwrap();
        match groups.last_mut().filter(|group| !group.contains(&task) && random.below(4) == 0) {
            Some(group) => group.push(task),
            None => groups.push(vec![task]),
        }
    }
    groups
}

/// Returns the seed of a test, after a line that repeats it.
fn seed(kills: &str) -> u64 {
    let seed =
        number("PUSHPULL_SEED").unwrap_or_else(|| RandomState::new().build_hasher().finish());
    println!("PUSHPULL_SEED={seed} {kills}");
    seed
}

/// Waits until the training has ended. Asserts that every sample counts once in each epoch, and
/// adds the figures to `figures`.
fn check_end(cluster: &mut KilledCluster, values: &mut Values, mut figures: serde_json::Value) {
    let result = cluster.finish(CHIEF);
    let result: serde_json::Value = serde_json::from_str(&result).unwrap();
    for worker in CHIEF + 1..TASKS.len() {
        cluster.finish(worker);
    }
    let (step, params) = values.at(LAST_STEP);
    let ledger = params.view::<f32>("ledger").unwrap();
    let wrong = ledger.iter().filter(|&&count| count != EPOCHS as f32).count();
    let accuracy = result["accuracy"].as_f64().unwrap();
    figures["samples"] = SAMPLES.into();
    figures["epochs"] = EPOCHS.into();
    figures["counted"] = ledger.iter().sum::<f32>().into();
    figures["wrong"] = wrong.into();
    figures["accuracy"] = accuracy.into();
    println!("{figures}");
    assert_eq!((ledger.len() as u64, wrong, step), (SAMPLES, 0, LAST_STEP), "{ledger:?}");
    assert_eq!(result["steps"], LAST_STEP, "{result}");
    assert!(accuracy >= 0.95, "{result}");
    for server in 0..CHIEF {
        cluster.processes[server].signal(Signal::INT);
        cluster.finish(server);
    }
}

#[test]
fn every_sample_counts_once_an_epoch_while_all_tasks_are_killed() {
    let kills = number("PUSHPULL_DATA_KILLS").unwrap_or(6);
    let seed = seed(&format!("PUSHPULL_DATA_KILLS={kills}"));
    let mut random = SplitMix64::new(seed);
    let groups = schedule(kills, &mut random);
    // The training must last until the last kill.
    let mut cluster = KilledCluster::start(Kept::State, 1 + kills / 8);
    let mut values = Values::of(&cluster);
    let span = LAST_STEP / (groups.len() as u64 + 1);
    let mut killed = [0_u64; TASKS.len()];
    for (group, tasks) in (0..).zip(&groups) {
        let (step, _) = values.at(group * span + random.below(span as usize) as u64);
        assert!(step < LAST_STEP, "the training ended before kill {group}");
        cluster.kill(tasks);
        tasks.iter().for_each(|&task| killed[task] += 1);
    }
    let workers = killed[CHIEF + 1] + killed[CHIEF + 2];
    let figures = serde_json::json!({
        "test": "kills", "seed": seed,
        "kills": { "ps": killed[0] + killed[1], "chief": killed[CHIEF], "workers": workers },
    });
    check_end(&mut cluster, &mut values, figures);
}

/// Values and data position come back from one moment: with any other pair the ledger is wrong.
#[test]
fn every_sample_counts_once_an_epoch_after_all_tasks_have_lost_their_state() {
    let kills = number("PUSHPULL_TOTAL_KILLS").unwrap_or(2);
    let seed = seed(&format!("PUSHPULL_TOTAL_KILLS={kills}"));
    let mut random = SplitMix64::new(seed);
    let mut cluster = KilledCluster::start(Kept::Checkpoints, 2);
    let mut values = Values::of(&cluster);
    let span = LAST_STEP / (kills + 1);
    let everything = Vec::from_iter(0..TASKS.len());
    for kill in 0..kills {
        let (step, _) = values.at(kill * span + random.below(span as usize) as u64);
        assert!(step < LAST_STEP, "the training ended before kill {kill}");
        cluster.await_checkpoint(kill as usize + 1);
        cluster.kill(&everything);
    }
    let figures = serde_json::json!({ "test": "total kills", "seed": seed, "kills": kills });
    check_end(&mut cluster, &mut values, figures);
    let restored = cluster.chief_steps("restored the checkpoint ");
    println!("restored at the steps {restored:?}");
    assert_eq!(restored.len() as u64, kills, "{}", cluster.read_log(CHIEF));
}
