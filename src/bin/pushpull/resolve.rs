//! `pushpull resolve`: prints the cluster and the task that the launcher of this process tells, and
//! why it passed over other sources.

use std::error::Error;
use std::fmt::Write;

use clap::Args;
use pushpull::cluster::resolve::{Resolution, Resolver};
use pushpull::{ClusterSpec, TaskId};
use serde_json::{Map, Value, json};

use super::options::{
    ClusterMeeting, JoinAccess, Joined, MeetingAccess, ResolveOptions, SecurityOptions, TaskOptions,
};
use super::output::{print_error, print_lines};

/// Options of `pushpull resolve`.
#[derive(Debug, Args)]
pub(crate) struct ResolveCommand {
    #[command(flatten)]
    tasks: TaskOptions,
    #[command(flatten)]
    resolve: ResolveOptions,
    /// Let everybody reach the rendezvous, without encryption
    #[arg(long, requires = "resolve", help_heading = "Network")]
    insecure: bool,
    #[command(flatten)]
    security: SecurityOptions,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(command: &ResolveCommand) -> Result<(), Box<dyn Error>> {
    let resolver = command.resolve.resolve.unwrap_or(Resolver::Auto);
    let resolution = command.resolve.resolution(resolver, &command.tasks)?;
    let credentials = command.security.credentials(&command.tasks.joining_task())?;
    let meeting = MeetingAccess { insecure: command.insecure, credentials };
    let access = JoinAccess { meeting, listen: None, line: print_error };
    let joining = command.resolve.go_to_rendezvous(resolution, access)?;
    let Joined::Task(resolution, meeting) = joining.wait()? else { return Ok(()) };
    let text = match command.json {
        true => json_of(&resolution).to_string(),
        false => lines_of(&resolution),
    };
    print_lines(&text)?;
    // The others may still need the rendezvous.
    meeting.into_iter().for_each(ClusterMeeting::leave);
    Ok(())
}

fn lines_of(resolution: &Resolution) -> String {
    let Resolution { cluster, task, source, taken, passed, .. } = resolution;
    let mut text = format!("source   {source}\ncluster  {cluster}\n");
    if let Some(task) = task {
        let _ = writeln!(text, "task     {task}");
        let _ = writeln!(text, "flags    {}", flags_of(resolution, task));
    }
    taken.iter().for_each(|(name, value)| _ = writeln!(text, "read     {name}={value}"));
    passed.iter().for_each(|(source, reason)| _ = writeln!(text, "passed   {source}: {reason}"));
    text.truncate(text.trim_end().len());
    text
}

/// Returns the flags that make a program the same task without a launcher.
fn flags_of(resolution: &Resolution, task: &TaskId) -> String {
    let cluster = cluster_flags(&resolution.cluster);
    format!("{cluster} --job-name {} --task-index {}", task.job, task.index)
}

/// Returns the flags that give a cluster.
pub(crate) fn cluster_flags(cluster: &ClusterSpec) -> String {
    let hosts = |job: &str| {
        let tasks = cluster.tasks().filter(|(task, _)| *task.job == *job);
        tasks.map(|(_, address)| address.to_owned()).collect::<Vec<_>>().join(",")
    };
    let jobs = [("--ps-hosts", TaskId::PS_JOB), ("--worker-hosts", "worker")];
    let is_plain = cluster.jobs().all(|job| jobs.iter().any(|(_, name)| *name == job))
        && !cluster.to_string().contains('@');
    if !is_plain {
        return format!("--cluster '{cluster}'");
    }
    let given = jobs.iter().map(|(flag, job)| (flag, hosts(job)));
    let given = given.filter(|(_, hosts)| !hosts.is_empty());
    given.map(|(flag, hosts)| format!("{flag} {hosts}")).collect::<Vec<_>>().join(" ")
}

fn json_of(resolution: &Resolution) -> Value {
    let Resolution { cluster, task, source, taken, passed, .. } = resolution;
    let jobs: Value = serde_json::from_str(&cluster.to_json()).unwrap_or_default();
    let task = task.as_ref().map(|task| json!({"type": &*task.job, "index": task.index}));
    let taken = taken.iter().map(|(name, value)| (name.clone(), Value::from(value.clone())));
    let passed = passed.iter().map(|(source, reason)| (source.to_string(), reason.clone().into()));
    json!({
        "source": source.name(),
        "cluster": jobs,
        "task": task,
        "read": taken.collect::<Map<_, _>>(),
        "passed": passed.collect::<Map<_, _>>(),
    })
}
