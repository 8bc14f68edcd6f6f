//! Why the daemon does not start, by the flags as they were typed.

use std::fmt;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use pushpull::{ListenError, StartError, StorageError};

/// Why the daemon does not start.
#[derive(Debug)]
pub(crate) struct Complaint {
    text: String,
    /// It may be over soon: a process that is going still has what this one needs.
    pub(crate) may_pass: bool,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<String> for Complaint {
    fn from(text: String) -> Complaint {
        Complaint { text, may_pass: false }
    }
}

/// The command line.
#[derive(Debug)]
pub(crate) struct Typed(pub(crate) ArgMatches);

/// The flags of the settings whose flag is not called as they are.
const FLAGS: [(&str, &str); 6] = [
    ("lease", "--lease-ms"),
    ("mode", "--synchronous"),
    ("on_loss.min", "--on-loss"),
    ("checkpoints.every", "--checkpoint-every-ms"),
    ("handshake_timeout", "--handshake-timeout-ms"),
    ("rate_for", "--rate-for"),
];

impl Typed {
    /// A flag with what was typed behind it, such as `--lease-ms 0`; by itself if it was not given.
    pub(crate) fn flag(&self, flag: &str) -> String {
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

    /// What was typed behind a flag.
    fn values(&self, flag: &str) -> Vec<String> {
        let id = flag.trim_start_matches('-').replace('-', "_");
        let was_typed = self.0.value_source(&id) == Some(ValueSource::CommandLine);
        let values = self.0.get_raw(&id).filter(|_| was_typed);
        values.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect()
    }

    /// The last value of a flag that is for variables of these names.
    fn flag_for(&self, flag: &str, names: &str) -> Option<String> {
        let is_for =
            |value: &String| value.strip_prefix(names).is_some_and(|rest| rest.starts_with('='));
        let value = self.values(flag).into_iter().rev().find(is_for)?;
        Some(format!("{flag} '{value}'"))
    }

    /// What is wrong with a flag.
    pub(crate) fn blame(&self, flag: &str, fault: &dyn fmt::Display) -> Complaint {
        format!("{}: {fault}", self.flag(flag)).into()
    }

    /// Why nobody can listen on the address that a flag gives.
    pub(crate) fn cannot_listen(&self, flag: &str, error: &ListenError) -> Complaint {
        let may_pass = matches!(error, ListenError::InUse { .. });
        let complaint = match error {
            ListenError::Exposed { address } => self.blame(
                flag,
                &format_args!(
                    "other machines can reach {address} and peers are not authenticated; listen on \
                     loopback or a Unix socket, or give --insecure if that is meant"
                ),
            ),
            error => self.blame(flag, error),
        };
        Complaint { may_pass, ..complaint }
    }

    /// Why the server does not start.
    pub(crate) fn cannot_start(&self, error: &StartError) -> Complaint {
        match error {
            StartError::Setting { setting, value, reason } => self.setting(setting, value, reason),
            StartError::Storage(error) => self.storage(error),
            error => error.to_string().into(),
        }
    }

    fn setting(&self, setting: &str, value: &str, reason: &str) -> Complaint {
        let known = FLAGS.iter().find(|(name, _)| *name == setting);
        let flag = known.map_or_else(|| flag_called(setting), |(_, flag)| (*flag).to_owned());
        // The value of what can be set for some variables has their names behind it.
        let names = value.split_once(" for ").map(|(_, names)| names.trim_matches('"'));
        let found = names.and_then(|names| self.flag_for(&flag, names));
        match (found, self.values(&flag).is_empty()) {
            (Some(found), _) => format!("{found}: {reason}").into(),
            (None, false) => self.blame(&flag, &reason),
            (None, true) => format!("{flag} {value}: {reason}").into(),
        }
    }

    fn storage(&self, error: &StorageError) -> Complaint {
        match error {
            StorageError::DoesNotFit { need, limit } => self.blame(
                "--bytes-max",
                &format_args!("{need} bytes are needed, and {limit} are left of it"),
            ),
            StorageError::Untrainable { variable, reason } => {
                let flags = ["--optimizer-for", "--rate-for"];
                match flags.iter().find_map(|flag| self.flag_for(flag, variable)) {
                    Some(found) => format!("{found}: {reason}").into(),
                    None => error.to_string().into(),
                }
            }
            error => Complaint {
                may_pass: matches!(error, StorageError::Locked { .. }),
                ..self.blame("--state-dir", error)
            },
        }
    }
}

/// A flag that takes `-1` for its value, and can say what is wrong with that: else it were taken for another
/// flag.
pub(crate) fn takes_negative(flag: Arg) -> Arg {
    let takes_values = flag.get_action().takes_values();
    flag.allow_negative_numbers(takes_values)
}

/// The flag that is called as a setting is.
pub(crate) fn flag_called(setting: &str) -> String {
    format!("--{}", setting.replace('_', "-"))
}
