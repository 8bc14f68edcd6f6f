//! `pushpull inspect`: prints the contents of a state directory as a page or as one JSON object.

use std::error::Error;
use std::fmt::Write;

use clap::Args;
use pushpull::inspect::{
    ArenaReport, ClientReport, DataReport, Inspection, Presence, SavesFailing, ShardInspection,
    ShardState, VariableReport, VariablesStage, Verdict,
};
use pushpull::variable::Replication;
use serde_json::{Value, json};

use super::output::print_lines;
use super::place::{Place, place};
use super::saved;

/// Options of `pushpull inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectOptions {
    /// State directory, folder of one shard in it, directory or URL of checkpoints, or folder of one
    #[arg(value_parser = place())]
    directory: Place,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(options: &InspectOptions) -> Result<(), Box<dyn Error>> {
    if let Some((directory, name)) = saved::checkpoint_folder(&options.directory) {
        return saved::run(&directory, Some(&name), options.json);
    }
    let path = match &options.directory {
        Place::Directory(path) if !saved::holds_checkpoints(path)? => path,
        place => return saved::run(place, None, options.json),
    };
    let found = pushpull::inspect(path)?;
    match options.json {
        true => print_lines(&json_of(&found).to_string())?,
        false => print_lines(page_of(&found)?.trim_end())?,
    }
    match found.is_sound() {
        true => Ok(()),
        false => Err(format!("{} is not sound", path.display()).into()),
    }
}

fn page_of(found: &Inspection) -> Result<String, std::fmt::Error> {
    let mut page = String::new();
    let state = if found.live { "a server is running on it" } else { "no server is running on it" };
    writeln!(page, "{}: {state}", found.path.display())?;
    if let Some(SavesFailing { in_a_row, cause, .. }) = &found.saves_failing {
        writeln!(page, "CHECKPOINTS FAIL: the last {in_a_row} were not saved: {cause}")?;
    }
    for folder in &found.missing {
        writeln!(page, "MISSING: {}, a shard of the same task", folder.display())?;
    }
    for shard in &found.shards {
        writeln!(page, "\n{}", shard.path.display())?;
        if let Some(arena) = &shard.arena {
            write_arena(&mut page, arena)?;
        }
        if let Some(reason) = &shard.poisoned {
            writeln!(page, "  POISONED   a flush has failed: {reason}")?;
        }
        if let Some(state) = &shard.state {
            write_state(&mut page, state, shard)?;
        }
        write_variables(&mut page, &shard.variables)?;
        write_clients(&mut page, &shard.clients)?;
        for push in &shard.whole {
            let client =
                push.client.as_ref().map_or("an older incarnation".into(), ToString::to_string);
            writeln!(
                page,
                "  whole      push {} of {client}: {}, {} bytes, token {}, push slot {}",
                push.sequence, push.operation, push.bytes, push.token, push.push_slot
            )?;
        }
        write_files(&mut page, shard)?;
    }
    Ok(page)
}

fn write_arena(page: &mut String, arena: &ArenaReport) -> std::fmt::Result {
    let boot = if arena.this_boot { "this boot" } else { "another boot" };
    writeln!(
        page,
        "  arena      {:016x} of {}, format {}, {boot}",
        arena.arena, arena.shard, arena.format
    )?;
    let fields: Vec<String> = arena.identity.iter().map(|(n, v)| format!("{n} {v}")).collect();
    writeln!(page, "  identity   {}", fields.join(", "))
}

fn write_state(page: &mut String, state: &ShardState, shard: &ShardInspection) -> std::fmt::Result {
    let integrity = if state.integrity { "full" } else { "words only" };
    writeln!(
        page,
        "  state      step {}{}, version {}, {} gradients, restore epoch {}, life {}",
        state.step,
        if state.finished { " (finished)" } else { "" },
        state.version,
        state.gradients,
        state.restore_epoch,
        state.lives
    )?;
    writeln!(
        page,
        "  memory     variables {}, generation {}, blocks of {}, {} slots, integrity {integrity}",
        stage(state.variables),
        state.generation,
        state.block_bytes,
        state.slots
    )?;
    let intent = match shard.committed_words {
        None => "idle".to_owned(),
        Some(words) => format!("committed, {words} words to store"),
    };
    let undo = match shard.prepared_rows {
        None => "idle".to_owned(),
        Some(rows) => format!("prepared, {rows} rows to restore"),
    };
    if let Some(data) = &shard.data {
        let (set, all) = (&data.set, data.set.all_batches());
        let of = set.epoch_limit().map_or(String::new(), |_| format!(" of {all}"));
        writeln!(
            page,
            "  data       {:?}, {} samples in batches of {}; {}{of} batches granted, {} held by \
             tokens, {} to grant again",
            set.name(),
            set.samples(),
            set.batch(),
            data.begun,
            data.held,
            data.free,
        )?;
    }
    for coordinator in &shard.coordinators {
        let name = &coordinator.name;
        let settled = coordinator.window.settled();
        let epoch = coordinator.epoch;
        let behind = coordinator.window.bits().count_ones();
        writeln!(
            page,
            "  effects    {name:?}, epoch {epoch}; settled up to {settled}, {behind} behind it"
        )?;
    }
    writeln!(page, "  intent     {intent}")?;
    writeln!(page, "  undo       {undo}")?;
    if let Some(number) = shard.newest_image {
        writeln!(page, "  image      {number}")?;
    }
    writeln!(
        page,
        "  inbox      {} of {} push slots hold whole pushes",
        shard.whole.len(),
        state.push_slots
    )
}

fn write_variables(page: &mut String, variables: &[VariableReport]) -> std::fmt::Result {
    let width = variables.iter().map(|variable| variable.name.len()).max().unwrap_or(0);
    for variable in variables {
        let rows: Vec<String> = variable
            .partitions
            .iter()
            .map(|rows| format!("{}..{}", rows.start, rows.end))
            .collect();
        writeln!(
            page,
            "  variable   {:width$}  {} {}, rows {} here, {} bytes{}",
            variable.name,
            variable.dtype,
            variable.shape,
            rows.join(" "),
            variable.bytes,
            match (variable.table_rows, variable.trainable) {
                (Some(rows), _) => format!(", a table of {rows} rows"),
                (None, true) => String::new(),
                (None, false) if variable.replication.is_replicated() => {
                    format!(", {}", variable.replication)
                }
                (None, false) => ", plain".to_owned(),
            },
        )?;
    }
    Ok(())
}

fn write_clients(page: &mut String, clients: &[ClientReport]) -> std::fmt::Result {
    for client in clients {
        let tokens: Vec<String> = client.tokens.iter().map(u64::to_string).collect();
        let tokens = if tokens.is_empty() { "no token".into() } else { tokens.join(" ") };
        writeln!(
            page,
            "  client     {}  {}, epoch {}, incarnation {}, newest push {}, holds {tokens}",
            client.task,
            presence(client.presence),
            client.epoch,
            client.incarnation,
            client.newest,
        )?;
    }
    Ok(())
}

fn write_files(page: &mut String, shard: &ShardInspection) -> std::fmt::Result {
    let width = shard.files.iter().map(|file| file.name.len()).max().unwrap_or(0);
    for file in &shard.files {
        let verdict = match &file.verdict {
            Verdict::Fault { offset, expected } => {
                format!("CORRUPT: expected {expected} at byte {offset}")
            }
            Verdict::OtherFormat { found, format } => {
                format!("format {found}: this version reads format {format}")
            }
            other => verdict(other).to_owned(),
        };
        writeln!(page, "  file       {:width$}  {:>12}  {verdict}", file.name, file.bytes)?;
    }
    Ok(())
}

fn json_of(found: &Inspection) -> Value {
    json!({
        "path": found.path.display().to_string(),
        "live": found.live,
        "sound": found.is_sound(),
        "saves_failing": found.saves_failing.as_ref().map(|saves| json!({
            "in_a_row": saves.in_a_row,
            "cause": saves.cause,
        })),
        "missing": found.missing.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>(),
        "shards": found.shards.iter().map(json_of_shard).collect::<Vec<_>>(),
    })
}

fn json_of_shard(shard: &ShardInspection) -> Value {
    json!({
        "path": shard.path.display().to_string(),
        "arena": shard.arena.as_ref().map(json_of_arena),
        "poisoned": shard.poisoned,
        "state": shard.state.as_ref().map(json_of_state),
        "variables": shard.variables.iter().map(json_of_variable).collect::<Vec<_>>(),
        "data": shard.data.as_ref().map(json_of_data),
        "calls": shard.coordinators.iter().map(|it| json!({
            "name": it.name,
            "source": it.coordinator.0,
            "epoch": it.epoch.0,
            "settled": it.window.settled().0,
            "window": it.window.bits(),
        })).collect::<Vec<_>>(),
        "clients": shard.clients.iter().map(json_of_client).collect::<Vec<_>>(),
        "whole": shard.whole.iter().map(|push| json!({
            "push_slot": push.push_slot,
            "client": push.client.as_ref().map(ToString::to_string),
            "sequence": push.sequence,
            "operation": push.operation,
            "token": push.token,
            "bytes": push.bytes,
        })).collect::<Vec<_>>(),
        "committed_words": shard.committed_words,
        "prepared_rows": shard.prepared_rows,
        "newest_image": shard.newest_image,
        "files": shard.files.iter().map(|file| {
            let mut json = json!({
                "name": file.name,
                "bytes": file.bytes,
                "verdict": verdict(&file.verdict),
            });
            if let Verdict::Fault { offset, expected } = &file.verdict {
                json["offset"] = json!(offset);
                json["expected"] = json!(expected);
            }
            if let Verdict::OtherFormat { found, format } = &file.verdict {
                json["format"] = json!(found);
                json["reads_format"] = json!(format);
            }
            json
        }).collect::<Vec<_>>(),
    })
}

fn json_of_arena(arena: &ArenaReport) -> Value {
    let hex = |bytes: &[u8]| bytes.iter().fold(String::new(), |hex, b| hex + &format!("{b:02x}"));
    let identity = arena.identity.iter().map(|(name, value)| (name.clone(), json!(value)));
    json!({
        "format": arena.format,
        "task": arena.shard.task,
        "shard": arena.shard.shard,
        "arena": hex(&arena.arena.to_be_bytes()),
        "boot": hex(&arena.boot),
        "this_boot": arena.this_boot,
        "identity": Value::Object(identity.collect()),
    })
}

fn json_of_state(state: &ShardState) -> Value {
    json!({
        "variables": stage(state.variables),
        "version": state.version,
        "gradients": state.gradients,
        "step": state.step.0,
        "finished": state.finished,
        "restore_epoch": state.restore_epoch.0,
        "restored_step": state.restored_step.0,
        "lives": state.lives,
        "generation": state.generation,
        "block_bytes": state.block_bytes,
        "slots": state.slots,
        "integrity": state.integrity,
        "push_slots": state.push_slots,
    })
}

fn json_of_data(data: &DataReport) -> Value {
    json!({
        "name": data.set.name(),
        "samples": data.set.samples(),
        "batch": data.set.batch(),
        "seed": data.set.seed(),
        "epochs": data.set.epoch_limit(),
        "drop_remainder": data.set.drops_remainder(),
        "begun": data.begun,
        "held": data.held,
        "free": data.free,
    })
}

fn json_of_variable(variable: &VariableReport) -> Value {
    let rows = variable.partitions.iter().map(|rows| json!([rows.start, rows.end]));
    json!({
        "name": variable.name,
        "dtype": variable.dtype.to_string(),
        "shape": variable.shape.extents(),
        "trainable": variable.trainable,
        "replication": match variable.replication {
            Replication::Shared => "shared",
            Replication::Local => "local",
            Replication::Mean { .. } => "mean",
        },
        "mean_every": match variable.replication {
            Replication::Mean { every } => Some(every),
            Replication::Shared | Replication::Local => None,
        },
        "rows": rows.collect::<Vec<_>>(),
        "table_rows": variable.table_rows,
        "bytes": variable.bytes,
    })
}

fn json_of_client(client: &ClientReport) -> Value {
    json!({
        "task": client.task.to_string(),
        "epoch": client.epoch,
        "incarnation": client.incarnation.0,
        "presence": presence(client.presence),
        "newest": client.newest,
        "settled": client.settled,
        "tokens": client.tokens,
    })
}

fn stage(variables: VariablesStage) -> &'static str {
    match variables {
        VariablesStage::Absent => "absent",
        VariablesStage::Declared => "declared",
        VariablesStage::Ready => "ready",
        _ => "unknown",
    }
}

fn presence(presence: Presence) -> &'static str {
    match presence {
        Presence::Present => "present",
        Presence::Left => "left",
        Presence::Lost => "lost",
        _ => "unknown",
    }
}

fn verdict(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Sound => "sound",
        Verdict::Unchecked => "unchecked",
        Verdict::Unused => "unused",
        Verdict::Missing => "missing",
        Verdict::OtherFormat { .. } => "other format",
        Verdict::Fault { .. } => "corrupt",
        _ => "unknown",
    }
}
