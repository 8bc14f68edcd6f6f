//! `pushpull token`: new access tokens.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use pushpull::security::{check_tokens, new_secret};

use super::options::local_path;
use super::output::print_lines;

/// Commands of `pushpull token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create an access token: one line of the file that --tokens names.
    New(NewToken),
}

/// Options of `pushpull token new`.
#[derive(Debug, Args)]
pub(crate) struct NewToken {
    /// Roles of its owner: worker, chief, reader, admin, peer, client, rank, task
    #[arg(
        long,
        help_heading = "Token",
        value_name = "ROLE",
        required = true,
        value_delimiter = ','
    )]
    role: Vec<String>,
    /// Task that its owner may be, such as /job:worker/task:1 or task:* [default: any]
    #[arg(long, help_heading = "Token", value_name = "TASK", value_delimiter = ',')]
    task: Vec<String>,
    /// Function that its owner may call as a client, such as eval*
    #[arg(long, help_heading = "Token", value_name = "FUNCTION", value_delimiter = ',')]
    function: Vec<String>,
    /// Name of its owner, if that has several tokens [default: that of the token]
    #[arg(long = "as", help_heading = "Token", value_name = "NAME")]
    known_as: Option<String>,
    /// Name of the token [default: the first role, and a random number]
    #[arg(long, help_heading = "Token", value_name = "NAME")]
    name: Option<String>,
    /// File to which it is added; created for this user alone [default: standard output]
    #[arg(long, help_heading = "Token", value_name = "FILE", value_parser = local_path())]
    file: Option<PathBuf>,
}

/// Runs a command.
pub(crate) fn run(command: &TokenCommand) -> Result<(), Box<dyn Error>> {
    let TokenCommand::New(options) = command;
    let first = options.role.first().map_or("", String::as_str);
    let name = match &options.name {
        Some(name) => name.clone(),
        None => format!("{first}-{}", &new_secret()?[..8]),
    };
    let mut line = format!("token {name} {} roles={}", new_secret()?, options.role.join(","));
    for (key, values) in [("tasks", &options.task), ("functions", &options.function)] {
        if !values.is_empty() {
            line += &format!(" {key}={}", values.join(","));
        }
    }
    if let Some(owner) = &options.known_as {
        line += &format!(" as={owner}");
    }
    check_tokens(&line)?;
    let Some(path) = &options.file else { return Ok(print_lines(&line)?) };
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    let mut file = file.map_err(failed)?;
    if file.metadata().map_err(failed)?.permissions().mode() & 0o077 != 0 {
        return Err(format!("{}: others can read it: chmod 600 it", path.display()).into());
    }
    let mut before = String::new();
    file.read_to_string(&mut before).map_err(failed)?;
    let separator = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    let all = format!("{before}{separator}{line}\n");
    check_tokens(&all)
        .map_err(|error| format!("{}: {}", path.display(), pushpull::error::Chain(&error)))?;
    // One write, so that a process that reads the file meanwhile sees the whole line or nothing.
    file.write_all(format!("{separator}{line}\n").as_bytes()).map_err(failed)?;
    Ok(print_lines(&format!("{name} in {}", path.display()))?)
}
