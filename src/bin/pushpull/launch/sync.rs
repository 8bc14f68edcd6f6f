//! The copy of a directory to each host, before anything starts.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use super::hosts::HostSlots;
use super::options::Words;
use super::plan::shell_line;

/// Returns the command by which an agent runs a line on a host.
pub(super) fn agent_command(Words(agent): &Words, host: &HostSlots, line: &str) -> Command {
    // The parser takes no agent without a word.
    let mut command = Command::new(agent.first().map_or("", String::as_str));
    command.args(agent.iter().skip(1)).args([&host.name, line]);
    command
}

/// A copy of files to the same directory of each host.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostCopy<'a> {
    /// The flag that has named the directory.
    pub(super) flag: &'a str,
    pub(super) directory: &'a Path,
    /// The files of the directory.
    pub(super) files: &'a [&'a str],
    /// Whether the directory is of the user of the host alone.
    pub(super) is_private: bool,
}

/// Copies a directory to the same path of each host. Prints a line for each.
///
/// A host that shares the directory, by NFS for example, is left out: a file would be overwritten by
/// what has just been read of it. A file in the directory, which the host sees or not, tells which.
///
/// # Errors
/// Returns an error that names the directory or the host.
pub(super) fn copy_to_hosts(
    of: HostCopy<'_>,
    hosts: &[HostSlots],
    agent: &Words,
    mut say: impl FnMut(&str),
) -> Result<(), String> {
    let HostCopy { flag, directory, .. } = of;
    let blame = |error: &dyn std::fmt::Display| format!("{flag} {}: {error}", directory.display());
    let path = directory.canonicalize().map_err(|error| blame(&error))?;
    let path = path.to_str().ok_or_else(|| blame(&"the path is no text in UTF-8"))?;
    let marker = Marker::new(path).map_err(|error| blame(&error))?;
    let mut targets = Vec::new();
    for host in hosts {
        match shares(agent, host, &marker).map_err(|error| blame(&error))? {
            true => say(&format!("{} has {path} already: it is shared", host.name)),
            false => targets.push(host),
        }
    }
    drop(marker);
    for host in targets {
        copy(agent, host, path, of).map_err(|error| blame(&error))?;
        say(&format!("copied {path} to {}", host.name));
    }
    Ok(())
}

/// A file with a name of its own, which is removed when dropped.
struct Marker(PathBuf);

impl Marker {
    fn new(directory: &str) -> std::io::Result<Marker> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let nanos = since.map_or(0, |since| since.as_nanos());
        let name = format!(".pushpull-sync-{}-{nanos}", std::process::id());
        let path = Path::new(directory).join(name);
        File::create_new(&path)?;
        Ok(Marker(path))
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // Who removes the directory meanwhile, removes the file.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns whether a host sees the marker.
fn shares(agent: &Words, host: &HostSlots, marker: &Marker) -> Result<bool, String> {
    let path = shell_line([&*marker.0.to_string_lossy()]);
    let line = format!("if test -e {path}; then echo shared; else echo own; fi");
    let name = &host.name;
    let mut command = agent_command(agent, host, &line);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cannot run the agent for {name}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    // A shell may greet before.
    match said.lines().last() {
        Some("shared") => Ok(true),
        Some("own") => Ok(false),
        _ => Err(format!("the agent for {name} ended with {}: {}", output.status, said.trim())),
    }
}

/// Copies a directory to a host.
fn copy(
    agent: &Words,
    host: &HostSlots,
    path: &str,
    HostCopy { files, is_private, .. }: HostCopy<'_>,
) -> Result<(), String> {
    let name = &host.name;
    let quoted = shell_line([path]);
    // Files belong to the user of the host, also if that is root.
    let unpack = format!("mkdir -p {quoted} && tar -C {quoted} -xof -");
    // What another user has put there, a link for example, is not written to.
    let line = match is_private {
        false => unpack,
        true => format!(
            "umask 077; test -h {quoted} || mkdir -p {quoted}; \
             if test -O {quoted} && ! test -h {quoted}; then chmod 700 {quoted} && {unpack}; \
             else echo {quoted} is not of this user >&2; exit 1; fi"
        ),
    };
    let mut tar = Command::new("tar");
    tar.args(["-C", path, "-cf", "-"]).args(files).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut tar = tar.spawn().map_err(|error| format!("cannot run tar: {error}"))?;
    let archive = tar.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let unpacked = agent_command(agent, host, &line).stdin(archive).status();
    let packed = tar.wait().map_err(|error| format!("cannot wait for tar: {error}"))?;
    let unpacked = unpacked.map_err(|error| format!("cannot run the agent for {name}: {error}"))?;
    match (unpacked.success(), packed.code()) {
        // With 1, tar says that a file has changed meanwhile.
        (true, Some(0 | 1)) => Ok(()),
        (true, _) => Err(format!("tar ended with {packed}")),
        (false, _) => Err(format!("the agent for {name} ended with {unpacked}")),
    }
}
