//! The script of `examples/deploy/spark` under a real Spark: trainings of workers that are fed an RDD, and
//! one whose process is killed, so that Spark runs the stage again.
//!
//! Spark is the virtual environment in `PUSHPULL_SPARK`, or `target/spark`; it needs Java. With
//! `PUSHPULL_SPARK_CLUSTER=1` there is also a cluster of two executors, one of which is killed. The output
//! names what is absent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../../../../tests/support/case_counts.rs"]
mod case_counts;
mod processes;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::case_counts::CaseCounts;
use self::processes::{MarkedProcesses, Process};

/// The folder of the script.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/spark");

/// Deadline that only ends a hang.
const LONG: Duration = Duration::from_secs(240);

/// The time in which processes end after the one that started them.
const ORPHANS_MAX: Duration = Duration::from_secs(10);

/// The result of a case: a line about what has been seen, or the fault.
type Outcome = Result<String, String>;

/// A training under Spark.
struct SparkCase {
    master: &'static str,
    servers: usize,
    workers: usize,
    steps: u64,
    victim: Option<Victim>,
}

/// The process that is killed once there is a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// The worker that is not the chief.
    Worker,
    /// The executor of the ps task, with all of its tasks.
    Executor,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    let is_wanted = names.peek().is_none() || names.any(|name| "spark".contains(&name[..]));
    if !is_wanted || arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let mut counts = CaseCounts::default();
    let spark = match find_spark() {
        Ok(spark) => spark,
        Err(absent) => {
            counts.skip("Spark", &absent);
            return counts.finish("spark");
        }
    };
    let case = |master, servers, workers, steps, victim| {
        SparkCase { master, servers, workers, steps, victim }.run(&spark)
    };
    counts.count("1 ps task and 3 workers", case("local[4]", 1, 3, 2000, None));
    counts.count("2 ps tasks and 2 workers", case("local[4]", 2, 2, 2000, None));
    let killed = case("local[4]", 1, 3, KILLED_STEPS, Some(Victim::Worker));
    counts.count("a worker that is killed", killed);
    match std::env::var_os("PUSHPULL_SPARK_CLUSTER") {
        Some(_) => {
            let master = "local-cluster[2,2,1024]";
            counts.count("2 executors", case(master, 1, 3, 2000, None));
            let killed = case(master, 1, 3, KILLED_STEPS, Some(Victim::Executor));
            counts.count("an executor that is killed", killed);
        }
        None => counts.skip("2 executors", "PUSHPULL_SPARK_CLUSTER is not set"),
    }
    counts.finish("spark")
}

/// The steps of a training that goes on for seconds after its first checkpoint.
const KILLED_STEPS: u64 = 20_000;

/// Returns the folder of Spark's programs, or says what is absent.
fn find_spark() -> Result<PathBuf, String> {
    let made = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/spark");
    let folder = std::env::var_os("PUSHPULL_SPARK").map_or_else(made, PathBuf::from).join("bin");
    if !folder.join("spark-submit").is_file() {
        return Err(format!("there is no spark-submit in {}", folder.display()));
    }
    let java = Command::new("java").arg("-version").stderr(Stdio::null()).status();
    match java {
        Ok(status) if status.success() => Ok(folder),
        _ => Err("there is no Java".to_owned()),
    }
}

impl SparkCase {
    /// Trains, and checks the result and that no process is left.
    fn run(&self, spark: &Path) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let marked = MarkedProcesses::new(folder.path());
        let begin = Instant::now();
        let mut job = SparkJob::start(self, spark, folder.path(), &marked);
        let killed = match self.victim {
            Some(victim) => Some(job.kill(victim, &marked)?),
            None => None,
        };
        let output = job.finish()?;
        let seconds = begin.elapsed().as_secs();
        let left = wait_until(ORPHANS_MAX, || marked.tasks().is_empty());
        if !left {
            return Err(format!("processes outlive the job: {:?}\n{output}", marked.tasks()));
        }
        let chief = self.check(&output)?;
        let killed = killed.map_or_else(String::new, |what| format!("; {what}"));
        Ok(format!("{} in {seconds} s{killed}; {chief}", self.master))
    }

    /// Checks the lines of all tasks. Returns the result of the chief.
    fn check(&self, output: &str) -> Result<Value, String> {
        let fault = |reason: &str| format!("{reason}\n{output}");
        let line_of = |task: String| output.lines().find(|line| line.starts_with(&task));
        let jobs = [("ps", self.servers), ("worker", self.workers)];
        for (job, count) in jobs {
            for index in 0..count {
                let line = line_of(format!("{job}:{index} at 127.0.0.1:"));
                if !line.is_some_and(|line| line.contains(", exit code 0: ")) {
                    return Err(fault(&format!("{job}:{index} has not ended well")));
                }
            }
        }
        let chief = line_of("worker:0 at ".to_owned()).and_then(|line| line.split_once(": "));
        let chief: Value = chief
            .and_then(|(_, result)| serde_json::from_str(result).ok())
            .ok_or_else(|| fault("the chief has no result"))?;
        let is_whole = chief["ps"] == self.servers && chief["workers"] == self.workers;
        let is_exact = chief["steps"] == self.steps;
        let has_learned = chief["accuracy"].as_f64().is_some_and(|accuracy| accuracy >= 0.9);
        let from_step = chief["from_step"].as_u64().unwrap_or(0);
        let is_resumed = self.victim.is_none() || from_step >= self.checkpoint_steps();
        match is_whole && is_exact && has_learned && is_resumed {
            true => Ok(chief),
            false => Err(fault("the result is another one")),
        }
    }

    /// Returns the steps from one checkpoint to the next.
    fn checkpoint_steps(&self) -> u64 {
        self.steps / 20
    }
}

/// A job of Spark, which is killed when the test ends.
struct SparkJob {
    child: Child,
    folder: PathBuf,
    /// The number of its processes.
    tasks: usize,
}

impl Drop for SparkJob {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl SparkJob {
    fn start(case: &SparkCase, spark: &Path, folder: &Path, marked: &MarkedProcesses) -> SparkJob {
        let digits = env!("CARGO_BIN_EXE_digits");
        let table = folder.join("digits.csv");
        let to_table = File::create(&table).unwrap();
        let printed = Command::new(digits).arg("--print-samples").stdout(to_table).status();
        assert!(printed.unwrap().success());
        let mut command = Command::new(spark.join("spark-submit"));
        command.args(["--master", case.master, "--conf", "spark.ui.enabled=false"]);
        command.arg(format!("{SCRIPTS}/train_digits.py")).arg("--csv").arg(table);
        command.arg(format!("--num-ps={}", case.servers));
        command.arg(format!("--num-workers={}", case.workers));
        command.arg("--ps-args=--exit-grace 3");
        command.arg(format!("--worker-args=--checkpoint-steps {}", case.checkpoint_steps()));
        command.args(["--", digits, &format!("--steps={}", case.steps), "--checkpoint-dir"]);
        command.arg(folder.join("checkpoints"));
        command.env("PYSPARK_PYTHON", spark.join("python")).env("SPARK_LOCAL_IP", "127.0.0.1");
        command.env("SPARK_LOCAL_DIRS", folder).env_remove("SPARK_HOME");
        marked.mark(&mut command);
        let output = File::create(folder.join("output")).unwrap();
        let errors = File::create(folder.join("errors")).unwrap();
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let tasks = case.servers + case.workers;
        SparkJob { child: command.spawn().unwrap(), folder: folder.to_owned(), tasks }
    }

    /// Returns the output and the errors.
    fn said(&self) -> String {
        let read = |name| std::fs::read(self.folder.join(name)).unwrap_or_default();
        String::from_utf8_lossy(&[read("output"), read("errors")].concat()).into_owned()
    }

    /// Waits for the end of the job, which must be a good one. Returns its output.
    fn finish(&mut self) -> Outcome {
        let mut status = None;
        wait_until(LONG, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        match status {
            Some(status) if status.success() => Ok(self.said()),
            Some(status) => Err(format!("the job ended with {status}\n{}", self.said())),
            None => Err(format!("the job does not end\n{}", self.said())),
        }
    }

    /// Kills a process once there is a checkpoint. Returns what has ended, and when.
    fn kill(&mut self, victim: Victim, marked: &MarkedProcesses) -> Outcome {
        let has_checkpoint = || {
            let entries = std::fs::read_dir(self.folder.join("checkpoints")).into_iter().flatten();
            let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            // The first one is of step 0, and one that is being saved has another name.
            let step = |name: String| name.strip_prefix("ckpt-1-")?.parse::<u64>().ok();
            names.filter_map(step).any(|step| step > 0)
        };
        let mut tasks = Vec::new();
        let trains = || {
            tasks = marked.tasks();
            has_checkpoint() && tasks.len() == self.tasks
        };
        if !wait_until(LONG, trains) {
            return Err(format!("not all tasks train, or nothing is saved\n{}", self.said()));
        }
        let of_job = |job: &str, index: &str| {
            let task = tasks.iter().find(|task| task.has(job) && task.has(index)).cloned();
            task.ok_or_else(|| format!("there is no {job} {index}\n{}", self.said()))
        };
        let killed = match victim {
            Victim::Worker => of_job("--job_name=worker", "--task_index=1")?,
            Victim::Executor => {
                let server = of_job("--job_name=ps", "--task_index=0")?;
                let executor = marked.ancestor(&server, "CoarseGrainedExecutorBackend");
                executor.ok_or_else(|| format!("the ps task has no executor\n{}", self.said()))?
            }
        };
        let of_killed: Vec<Process> =
            tasks.iter().filter(|task| marked.is_below(task, &killed)).cloned().collect();
        let begin = Instant::now();
        killed.kill();
        let within = |limit, tasks: &[Process]| {
            let have_ended = wait_until(limit, || !tasks.iter().any(Process::lives));
            let left = || format!("{tasks:?} live on after {limit:?}\n{}", self.said());
            if have_ended { Ok(begin.elapsed().as_secs_f64()) } else { Err(left()) }
        };
        let own = within(ORPHANS_MAX, &of_killed)?;
        // The others are ended by Spark, once it knows.
        let all = within(LONG, &tasks)?;
        let number = of_killed.len();
        Ok(format!(
            "{number} processes ended after {own:.1} s, all {} after {all:.1} s",
            tasks.len()
        ))
    }
}

/// Waits for a condition. Returns whether it has become true.
fn wait_until(limit: Duration, mut is_met: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !is_met() {
        if begin.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
