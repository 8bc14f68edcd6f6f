//! `pushpull admin`: what an operator asks of a running training.

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use pushpull::server::{Admin, MemberStatus, Presence, Status};
use pushpull::{ClusterSpec, TaskId, WorkerConfig};
use serde_json::{Value, json};

use super::options::SecurityOptions;
use super::output::print_lines;

/// Commands of `pushpull admin`.
#[derive(Debug, Subcommand)]
pub(crate) enum AdminCommand {
    /// Show how far the training is, its workers, and who is waited for.
    Status(StatusOptions),
    /// Save a checkpoint, and print its name.
    Save(Servers),
    /// End the training: no worker gets another token.
    Finish(Servers),
    /// Stop all ps tasks for good, without saving.
    Stop(Servers),
}

/// Options of `pushpull admin status`.
#[derive(Debug, Args)]
pub(crate) struct StatusOptions {
    #[command(flatten)]
    servers: Servers,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The servers of the training.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct Servers {
    /// Addresses of the ps tasks, host:port or unix:/path, separated by commas
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',', required = true)]
    ps_hosts: Vec<String>,
    /// Seconds to wait for a server
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout_s: u32,
    #[command(flatten)]
    security: SecurityOptions,
}

impl Servers {
    async fn connect(&self) -> Result<Admin, Box<dyn Error>> {
        Ok(Admin::connect(self.config()?).await?)
    }

    fn config(&self) -> Result<WorkerConfig, Box<dyn Error>> {
        let cluster = ClusterSpec::builder().job("ps", &self.ps_hosts).build();
        let cluster = cluster.map_err(|error| format!("--ps-hosts: {error}"))?;
        let task = TaskId::new("admin", 0);
        let credentials = self.security.credentials(&task)?;
        let timeout = Duration::from_secs(self.timeout_s.into());
        let config = WorkerConfig::new(cluster, task).credentials(credentials);
        Ok(config.connect_timeout(timeout).timeout(timeout))
    }
}

/// Runs a command.
pub(crate) fn run(command: &AdminCommand) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            AdminCommand::Status(options) => {
                let status = options.servers.connect().await?.status().await?;
                match options.json {
                    true => print_lines(&json_of(&status).to_string())?,
                    false => print_lines(page_of(&status)?.trim_end())?,
                }
            }
            AdminCommand::Save(servers) => {
                let saved = servers.connect().await?.save(&[]).await?;
                print_lines(&format!("saved {} at step {}", saved.name, saved.step))?;
            }
            AdminCommand::Finish(servers) => {
                servers.connect().await?.finish().await?;
                print_lines("finished: no worker gets another token")?;
            }
            AdminCommand::Stop(servers) => {
                let unconfirmed = Admin::stop_servers(&servers.config()?).await;
                if !unconfirmed.is_empty() {
                    let of = |(task, error): (TaskId, _)| format!("{task}: {error}");
                    let lines: Vec<String> = unconfirmed.into_iter().map(of).collect();
                    return Err(format!("not stopped: {}", lines.join("; ")).into());
                }
                print_lines("stopped")?;
            }
        }
        Ok(())
    })
}

fn page_of(status: &Status) -> Result<String, std::fmt::Error> {
    let mut page = String::new();
    let Status { phase, global_step, restore_epoch, .. } = status;
    writeln!(page, "{phase}, at step {global_step}, restore epoch {restore_epoch}")?;
    if let Some(data) = &status.data {
        writeln!(
            page,
            "data {:?}: epoch {}, {} batches begun, {} of them not spent",
            data.name, data.epoch, data.begun, data.unspent
        )?;
    }
    // Strangers may have chosen the names of jobs.
    let named = |task: &TaskId| task.to_string().escape_debug().to_string();
    for member in &status.members {
        let MemberStatus { task, presence, silent, tokens, step_time } = member;
        let (task, presence) = (named(task), name_of(*presence));
        write!(page, "{task}: {presence}, heard {} ms ago", silent.as_millis())?;
        if let Some(oldest) = tokens.iter().max_by_key(|token| token.held) {
            let held = oldest.held.as_millis();
            write!(page, ", {} tokens, the oldest for {held} ms", tokens.len())?;
        }
        if let Some(time) = step_time {
            write!(page, ", {} us a step", time.as_micros())?;
        }
        writeln!(page)?;
    }
    for task in &status.never_joined {
        writeln!(page, "{}: has never joined", named(task))?;
    }
    if let Some(waiting) = &status.waiting {
        let reason = waiting.reason.escape_debug();
        writeln!(page, "waits for {} ms: {reason}", waiting.waited.as_millis())?;
    }
    Ok(page)
}

fn json_of(status: &Status) -> Value {
    let names = |tasks: &[TaskId]| -> Vec<String> { tasks.iter().map(TaskId::to_string).collect() };
    let members = status.members.iter().map(|member| {
        let tokens = member.tokens.iter();
        let tokens = tokens.map(|held| json!({"step": held.step, "ms": millis(held.held)}));
        json!({
            "task": member.task.to_string(),
            "presence": name_of(member.presence),
            "silent_ms": millis(member.silent),
            "tokens": tokens.collect::<Vec<Value>>(),
            "step_us": member.step_time.map(|time| u64::try_from(time.as_micros()).ok()),
        })
    });
    json!({
        "phase": status.phase.to_string(),
        "has_ended": status.phase.has_ended(),
        "step": status.global_step,
        "restore_epoch": status.restore_epoch,
        "members": members.collect::<Vec<Value>>(),
        "never_joined": names(&status.never_joined),
        "waiting": status.waiting.as_ref().map(|waiting| json!({
            "reason": waiting.reason,
            "ms": millis(waiting.waited),
            "workers": names(&waiting.workers),
            "shards": waiting.shards.iter().map(|shard| shard.to_string()).collect::<Vec<String>>(),
        })),
        "data": status.data.as_ref().map(|data| json!({
            "name": data.name,
            "epoch": data.epoch,
            "begun": data.begun,
            "unspent": data.unspent,
        })),
    })
}

fn name_of(presence: Presence) -> &'static str {
    match presence {
        Presence::Present => "present",
        Presence::Left => "left",
        Presence::Lost => "lost",
        _ => "unknown",
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
