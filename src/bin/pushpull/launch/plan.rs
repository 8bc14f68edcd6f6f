//! [`Plan`]: the cluster of a launch, and the command of each of its tasks. It starts nothing.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::error::Error;

use pushpull::{ClusterSpec, TaskId};
use serde_json::json;

use super::keys::LaunchKeys;
use super::options::{LaunchOptions, ProgramOptions, Words};

/// A task with its command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedTask {
    pub(super) task: TaskId,
    /// The program and its arguments.
    pub(super) command: Vec<String>,
    /// The value of `TF_CONFIG`.
    pub(super) tf_config: String,
}

/// The cluster and the tasks that the launcher starts.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) cluster: ClusterSpec,
    /// The flags that name the cluster.
    pub(super) hosts_flags: Vec<String>,
    /// The ps tasks, then the workers, each in the order of their indices.
    pub(super) tasks: Vec<PlannedTask>,
    /// The keys of a secure launch.
    pub(super) keys: Option<LaunchKeys>,
}

impl Plan {
    /// Plans a cluster at these addresses. `daemon` is the path of `pushpull-ps`.
    ///
    /// # Errors
    /// Returns an error if the addresses make no cluster, or no directory is above that of the keys.
    pub(super) fn new(
        options: &LaunchOptions,
        ps: &[String],
        workers: &[String],
        daemon: &str,
    ) -> Result<Plan, Box<dyn Error>> {
        let cluster = ClusterSpec::builder().job(TaskId::PS_JOB, ps);
        let cluster = match workers.is_empty() {
            true => cluster,
            false => cluster.job("worker", workers),
        };
        let mut hosts_flags = vec![format!("--ps_hosts={}", ps.join(","))];
        if !workers.is_empty() {
            hosts_flags.push(format!("--worker_hosts={}", workers.join(",")));
        }
        let keys = options.hosts.secure.as_deref().map(LaunchKeys::new).transpose()?;
        let mut plan = Plan { cluster: cluster.build()?, hosts_flags, tasks: Vec::new(), keys };
        let of_job = |count: usize, task: fn(u32) -> TaskId| (0..).take(count).map(task);
        let started = if options.program.is_empty() { 0 } else { workers.len() };
        let tasks = of_job(ps.len(), TaskId::ps).chain(of_job(started, TaskId::worker));
        plan.tasks = tasks.map(|task| plan.task(task, options, daemon)).collect();
        Ok(plan)
    }

    fn task(&self, task: TaskId, options: &LaunchOptions, daemon: &str) -> PlannedTask {
        let ProgramOptions { ps_daemon, ps_args, worker_args, no_flags, .. } = &options.programs;
        let is_ps = &*task.job == TaskId::PS_JOB;
        let is_daemon = is_ps && (*ps_daemon || options.program.is_empty());
        let further = if is_ps { ps_args } else { worker_args };
        let further = further.iter().flat_map(|Words(words)| words);
        let mut command: Vec<String> = match is_daemon {
            true => vec![daemon.to_owned()],
            false => options.program.clone(),
        };
        command.extend(further.cloned());
        for argument in &mut command[1..] {
            *argument = filled_in(argument, &task);
        }
        // The daemon reads no environment.
        if is_daemon || !no_flags {
            command.extend(self.hosts_flags.iter().cloned());
            command.push(format!("--job_name={}", task.job));
            command.push(format!("--task_index={}", task.index));
            command.extend(self.keys.iter().flat_map(|keys| keys.flags(is_ps)));
        }
        let tf_config = json!({
            "cluster": self.addresses(),
            "task": { "type": &*task.job, "index": task.index },
        });
        PlannedTask { task, command, tf_config: tf_config.to_string() }
    }

    /// Returns the cluster as the classic JSON object of lists.
    fn addresses(&self) -> serde_json::Value {
        // The text is JSON by the contract of `to_json`; a text is what is shown otherwise.
        let text = self.cluster.to_json();
        serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text))
    }

    /// Returns the hosts of the ps tasks, each once.
    pub(super) fn ps_hosts(&self) -> Vec<String> {
        let ps = self.cluster.tasks().filter(|(task, _)| &*task.job == TaskId::PS_JOB);
        let host = |address: &str| {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            host.trim_matches(['[', ']']).to_owned()
        };
        let hosts: BTreeSet<String> = ps.map(|(_, address)| host(address)).collect();
        hosts.into_iter().collect()
    }

    /// Returns the cluster as text: as flags, and as JSON.
    pub(super) fn cluster_lines(&self) -> String {
        format!("{}\n{}", self.hosts_flags.join(" "), self.cluster.to_json())
    }
}

impl PlannedTask {
    /// Returns the name that stands before the lines of the task, such as `worker:1`.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.task.job, self.task.index)
    }

    /// Returns the command as one line for a shell.
    pub(super) fn shell_line(&self) -> String {
        let config = format!("TF_CONFIG={}", self.tf_config);
        let words = ["env", &config].into_iter().chain(self.command.iter().map(String::as_str));
        shell_line(words)
    }
}

/// Returns words as one line for a shell. A word with a NUL byte, which no argument can have, loses
/// it.
pub(super) fn shell_line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quote = |word: &'a str| {
        let quoted = shlex::try_quote(word);
        quoted.map_or_else(|_| word.replace('\0', ""), Cow::into_owned)
    };
    let quoted: Vec<String> = words.into_iter().map(quote).collect();
    quoted.join(" ")
}

/// Replaces `{job}` and `{index}` by those of a task.
fn filled_in(argument: &str, task: &TaskId) -> String {
    argument.replace("{job}", &task.job).replace("{index}", &task.index.to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: LaunchOptions,
    }

    /// Plans the tasks of a command line. Returns the command of each.
    fn planned(line: &[&str]) -> Vec<String> {
        let line = Line::try_parse_from(["launch"].iter().chain(line)).unwrap();
        let addresses = |letter: char, count| (1..=count).map(move |at| format!("{letter}:{at}"));
        let ps: Vec<String> = addresses('p', line.options.size.num_ps()).collect();
        let workers: Vec<String> = addresses('w', line.options.size.num_workers()).collect();
        let plan = Plan::new(&line.options, &ps, &workers, "bin/pushpull-ps").unwrap();
        plan.tasks.iter().map(|task| task.command.join(" ")).collect()
    }

    #[test]
    fn one_program_has_both_roles() {
        let line = ["--num_ps=2", "--num_worker=1", "--", "train", "--steps", "5"];
        let hosts = "--ps_hosts=p:1,p:2 --worker_hosts=w:1";
        let expected = [("ps", 0), ("ps", 1), ("worker", 0)].map(|(job, index)| {
            format!("train --steps 5 {hosts} --job_name={job} --task_index={index}")
        });
        assert_eq!(planned(&line), expected);
    }

    #[test]
    fn the_daemon_holds_the_variables_where_that_is_asked_for_or_there_is_no_program() {
        let ps = "bin/pushpull-ps --last-step 5 --ps_hosts=p:1 --worker_hosts=w:1 --job_name=ps \
                  --task_index=0";
        assert_eq!(planned(&["--ps-args", "--last-step 5"]), [ps]);
        let line = ["--ps-daemon", "--ps-args=--last-step 5", "--no-flags", "--", "train"];
        assert_eq!(planned(&line), [ps, "train"]);
        let alone = "bin/pushpull-ps --ps_hosts=p:1 --job_name=ps --task_index=0";
        assert_eq!(planned(&["--num-workers=0"]), [alone]);
    }

    #[test]
    fn every_task_gets_the_keys_of_its_job() {
        let line = ["--secure=/keys", "--ps-daemon", "--num-workers=2", "--", "train"];
        let hosts = "--ps_hosts=p:1 --worker_hosts=w:1,w:2";
        let keys = "--tls-ca=/keys/ca.pem --tokens=/keys/tokens";
        let own = "--tls-cert=/keys/ps.pem --tls-key=/keys/ps.key";
        let expected = [
            format!("bin/pushpull-ps {hosts} --job_name=ps --task_index=0 {keys} {own}"),
            format!("train {hosts} --job_name=worker --task_index=0 {keys}"),
            format!("train {hosts} --job_name=worker --task_index=1 {keys}"),
        ];
        assert_eq!(planned(&line), expected);
        let line = [&["--no-flags"], &line[..]].concat();
        assert_eq!(planned(&line)[1], "train");
    }

    #[test]
    fn arguments_of_a_job_are_split_and_name_the_task() {
        let line = ["--ps-args", "--state-dir '/dev/shm/a b/{job}-{index}'", "--no-flags"];
        let line = [&line[..], &["--num-ps=2", "--worker-args", "-v", "--", "{job}", "{index}"]];
        let expected = [
            "{job} 0 --state-dir /dev/shm/a b/ps-0",
            "{job} 1 --state-dir /dev/shm/a b/ps-1",
            "{job} 0 -v",
        ];
        assert_eq!(planned(&line.concat()), expected);
    }

    #[test]
    fn a_job_file_has_what_the_flags_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.toml");
        let text = "[cluster]\nnum_ps = 2\nnum_workers = 3\n\
                    [worker]\nprogram = \"train\"\nargs = [\"-v\"]\n";
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let options = |line: &[&str]| {
            let line = Line::try_parse_from(["launch", file].iter().chain(line)).unwrap();
            line.options.with_job()
        };
        let of_file = options(&["--num-workers=1", "--ps-args=--shards 2"]).unwrap();
        assert_eq!((of_file.size.num_ps(), of_file.size.num_workers()), (2, 1));
        let plan = Plan::new(&of_file, &["p:1".into()], &["w:1".into()], "pushpull-ps").unwrap();
        let hosts = "--ps_hosts=p:1 --worker_hosts=w:1";
        let expected = [
            format!("pushpull-ps --job {file} --shards 2 {hosts} --job_name=ps --task_index=0"),
            format!("train -v {hosts} --job_name=worker --task_index=0"),
        ];
        assert_eq!([0, 1].map(|task| plan.tasks[task].command.join(" ")), expected);
        let typed = options(&["--", "other"]).unwrap();
        assert_eq!((typed.program, typed.programs.ps_daemon), (vec!["other".to_owned()], false));
        std::fs::write(file, "[cluster]\nnum_workers = 2000\n").unwrap();
        let error = options(&[]).unwrap_err().to_string();
        assert_eq!(error, format!("{file}: num_workers is 2000, more than 1024"));
    }

    #[test]
    fn the_environment_has_the_cluster_and_the_task() {
        let line = Line::try_parse_from(["launch", "--", "train", "it's"]).unwrap();
        let plan = Plan::new(&line.options, &["p:1".into()], &["w:1".into()], "x").unwrap();
        let cluster = r#"{"ps":["p:1"],"worker":["w:1"]}"#;
        let lines = format!("--ps_hosts=p:1 --worker_hosts=w:1\n{cluster}");
        assert_eq!(plan.cluster_lines(), lines);
        let worker = &plan.tasks[1];
        let named = ClusterSpec::task_of_json(&worker.tf_config);
        assert_eq!(named, Ok(Some(TaskId::worker(0))), "{}", worker.tf_config);
        assert_eq!(ClusterSpec::from_json(&worker.tf_config), Ok(plan.cluster.clone()));
        let words = shlex::split(&worker.shell_line()).unwrap();
        assert_eq!(words[1], format!("TF_CONFIG={}", worker.tf_config));
        assert_eq!(words[2..4], ["train", "it's"]);
    }

    #[test]
    fn arguments_that_contradict_each_other_are_refused() {
        for line in [
            &["--ps-daemon"][..],
            &["--no-flags"],
            &["--worker-args=-v"],
            &["--sync=/tmp", "--", "train"],
            &["--agent=rsh", "--", "train"],
            &["--ps-args='"],
            &["--ps-args="],
            &["--num-ps=0"],
            &["--num-ps=-1"],
            &["--base-port=0"],
            &["--hosts=a:0"],
            &["job.toml", "train"],
        ] {
            let parsed = Line::try_parse_from(["launch"].iter().chain(line));
            assert!(parsed.is_err(), "{line:?}");
        }
    }
}
