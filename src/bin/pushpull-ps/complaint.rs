//! Errors of the daemon, which name the flags as the user typed them.

use std::error::Error;
use std::fmt;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use pushpull::error::{Chain, ListenError, StartError, StorageError};
use pushpull::job::{JobError, Settings};

use super::own_name::elsewhere_advice;
use super::shared::JobLine;

/// An error of the daemon, before or while it serves, as the line to print.
#[derive(Debug)]
pub(crate) struct DaemonError {
    text: String,
    /// Whether a retry may succeed: a predecessor that is exiting still holds the address or the
    /// state.
    pub(crate) is_transient: bool,
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<String> for DaemonError {
    fn from(text: String) -> DaemonError {
        DaemonError { text, is_transient: false }
    }
}

impl From<JobError> for DaemonError {
    fn from(error: JobError) -> DaemonError {
        Chain(&error).to_string().into()
    }
}

/// The parsed command line, with the job file that it names.
#[derive(Debug)]
pub(crate) struct CommandLine {
    matches: ArgMatches,
    settings: Settings,
    line: JobLine,
}

/// Settings whose flag has another name than the setting.
const FLAGS: [(&str, &str); 6] = [
    ("lease", "--lease-ms"),
    ("mode", "--synchronous"),
    ("on_loss.min", "--on-loss"),
    ("checkpoints.every", "--checkpoint-every-ms"),
    ("handshake_timeout", "--handshake-timeout-ms"),
    ("rate_for", "--rate-for"),
];

impl CommandLine {
    /// Returns the command line that the parser has read.
    pub(crate) fn new(command: &Command, line: JobLine, matches: ArgMatches) -> CommandLine {
        let settings = line.settings(command, &matches);
        CommandLine { matches, settings, line }
    }

    /// Returns the settings of the flags and of the job file.
    pub(crate) fn settings(&self) -> Settings {
        self.settings.clone()
    }

    /// Returns all settings as a job file, each with its origin.
    pub(crate) fn printed(&self, command: &Command) -> String {
        self.line.printed(command, &self.matches)
    }

    /// Returns a flag with the value that was typed, such as `--lease-ms 0`, or the flag alone if
    /// it was not given. A setting of the job file is named by its line.
    pub(crate) fn flag(&self, flag: &str) -> String {
        if let Some(setting) = self.line.of_file(flag) {
            return setting.culprit(flag.trim_start_matches('-'));
        }
        let values = self.values(flag);
        let quoted = |value: String| match value.contains(char::is_whitespace) {
            true => format!("'{value}'"),
            false => value,
        };
        match values.is_empty() {
            true => flag.to_owned(),
            false => format!("{flag} {}", quoted(values.join(","))),
        }
    }

    /// Returns whether a flag was typed or is a setting of the job file.
    pub(crate) fn has(&self, flag: &str) -> bool {
        self.matches.value_source(&id_of(flag)) == Some(ValueSource::CommandLine)
    }

    /// Returns whether a flag was typed.
    pub(crate) fn has_typed(&self, flag: &str) -> bool {
        self.has(flag) && self.line.of_file(flag).is_none()
    }

    /// Returns the values that were given for a flag.
    fn values(&self, flag: &str) -> Vec<String> {
        let values = self.matches.get_raw(&id_of(flag)).filter(|_| self.has(flag));
        values.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect()
    }

    /// Returns the flag with its last value for variables of these names.
    fn flag_for(&self, flag: &str, names: &str) -> Option<String> {
        let is_for =
            |value: &String| value.strip_prefix(names).is_some_and(|rest| rest.starts_with('='));
        let value = self.values(flag).into_iter().rev().find(is_for)?;
        Some(match self.line.of_file(flag) {
            Some(setting) => {
                format!("{}: '{value}'", setting.culprit(flag.trim_start_matches('-')))
            }
            None => format!("{flag} '{value}'"),
        })
    }

    /// Returns an error that names the flag, its value and the fault.
    pub(crate) fn blame(&self, flag: &str, fault: &dyn fmt::Display) -> DaemonError {
        format!("{}: {fault}", self.flag(flag)).into()
    }

    /// Returns the error for a failure to listen on the address of this flag.
    pub(crate) fn cannot_listen(&self, flag: &str, error: &ListenError) -> DaemonError {
        let is_transient = matches!(error, ListenError::InUse { .. });
        let daemon_error = match error {
            ListenError::Exposed { address } => self.blame(
                flag,
                &format_args!(
                    "other machines can reach {address}, and everybody would be let in: give --tls-cert \
                     and --tls-key with --tokens or --tls-ca; listen on loopback or a Unix socket; or \
                     give --insecure to allow it"
                ),
            ),
            ListenError::Elsewhere { address, found } => {
                let advice = elsewhere_advice(address);
                self.blame(
                    flag,
                    &format_args!("{address} is {found}, no address of this machine: {advice}"),
                )
            }
            error => self.blame(flag, &Chain(error)),
        };
        DaemonError { is_transient, ..daemon_error }
    }

    /// Returns the error for a failure to start the server.
    pub(crate) fn cannot_start(&self, error: &StartError) -> DaemonError {
        match error {
            StartError::Setting { setting, value, reason } => self.setting(setting, value, reason),
            StartError::Storage(error) => self.storage(error),
            StartError::CheckpointsInUse { source, .. } => {
                DaemonError { is_transient: true, ..self.blame("--checkpoint-dir", &Chain(source)) }
            }
            error => Chain(error).to_string().into(),
        }
    }

    fn setting(&self, setting: &str, value: &str, reason: &str) -> DaemonError {
        if setting == "mode" && !self.values("--issync").is_empty() {
            return self.blame("--issync", &format_args!("--synchronous {value}: {reason}"));
        }
        let known = FLAGS.iter().find(|(name, _)| *name == setting);
        let flag = known.map_or_else(|| flag_called(setting), |(_, flag)| (*flag).to_owned());
        // A setting per variable names has the value `VALUE for "NAMES"`.
        let names = value.split_once(" for ").map(|(_, names)| names.trim_matches('"'));
        let found = names.and_then(|names| self.flag_for(&flag, names));
        match (found, self.values(&flag).is_empty()) {
            (Some(found), _) => format!("{found}: {reason}").into(),
            (None, false) => self.blame(&flag, &reason),
            (None, true) => format!("{flag} {value}: {reason}").into(),
        }
    }

    fn storage(&self, error: &StorageError) -> DaemonError {
        match error {
            StorageError::DoesNotFit { need, limit } => self
                .blame("--bytes-max", &format_args!("{need} bytes are needed, {limit} are left")),
            StorageError::Untrainable { variable, reason } => {
                let flags = ["--optimizer-for", "--rate-for"];
                match flags.iter().find_map(|flag| self.flag_for(flag, variable)) {
                    Some(found) => format!("{found}: {reason}").into(),
                    None => error.to_string().into(),
                }
            }
            error => DaemonError {
                is_transient: matches!(error, StorageError::Locked { .. }),
                ..self.blame("--state-dir", &with_group_hint(error))
            },
        }
    }
}

/// Returns the text of an error, with the flag that accepts a directory which its group may write.
pub(crate) fn with_group_hint(error: &(dyn Error + 'static)) -> String {
    let text = Chain(error).to_string();
    match text.contains("its group may write can be accepted") {
        true => format!("{text}: give --group-writable for a volume with fsGroup"),
        false => text,
    }
}

/// Returns the name by which the parser knows a flag.
fn id_of(flag: &str) -> String {
    flag.trim_start_matches('-').replace('-', "_")
}

/// Returns the flag of a setting that has the same name.
pub(crate) fn flag_called(setting: &str) -> String {
    format!("--{}", setting.replace('_', "-"))
}
