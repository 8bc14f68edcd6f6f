//! Names of event files.

use std::fmt;

/// The name of a new event file: `events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER`.
///
/// TensorBoard reads the event files of a directory in the order of their names, and does not go
/// back. So a new name must come after the names that are there, also if the clock was set back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventFileName {
    seconds: u64,
    host: String,
    process: u32,
    number: u32,
}

impl EventFileName {
    /// Makes a name for a file that is created at a time, in seconds since 1970.
    ///
    /// `existing` are the names of all files in the directory.
    pub(crate) fn new(
        seconds: u64,
        host: &str,
        process: u32,
        existing: impl IntoIterator<Item = String>,
    ) -> EventFileName {
        let host = host.chars().take(HOST_CHARS_MAX);
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        let host: String = host.map(|c| if is_plain(c) { c } else { '_' }).collect();
        let host = if host.is_empty() { "localhost".to_owned() } else { host };
        let mut name = EventFileName { seconds, host, process, number: 0 };
        let newest = existing.into_iter().filter_map(|other| seconds_of(&other)).max();
        // A file of the same second may come from a process with a higher number.
        if let Some(newest) = newest.filter(|&newest| newest >= seconds) {
            name.seconds = newest + 1;
        }
        name
    }

    /// Returns the name to try if another process has taken this one.
    pub(crate) fn with_next_number(mut self) -> EventFileName {
        match self.number.checked_add(1).filter(|&number| number < NUMBERS) {
            Some(number) => self.number = number,
            None => (self.seconds, self.number) = (self.seconds + 1, 0),
        }
        self
    }

    /// Returns the name of the file of JSON lines beside the event file. TensorBoard takes every
    /// file for an event file whose name contains `tfevents`.
    pub(crate) fn json_lines(&self) -> String {
        let EventFileName { seconds, host, process, number } = self;
        format!("summaries.{seconds:010}.{host}.{process}.{number:03}.jsonl")
    }
}

impl fmt::Display for EventFileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EventFileName { seconds, host, process, number } = self;
        write!(f, "{PREFIX}{seconds:010}.{host}.{process}.{number:03}")
    }
}

/// Returns the seconds in the name of an event file. A number of another length is ignored: names
/// with it sort elsewhere.
fn seconds_of(name: &str) -> Option<u64> {
    let (seconds, _) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let is_number = seconds.len() == 10 && seconds.bytes().all(|byte| byte.is_ascii_digit());
    seconds.parse().ok().filter(|&seconds: &u64| is_number && seconds < 9_999_999_999)
}

/// The prefix of the names of event files, which is TensorFlow's.
const PREFIX: &str = "events.out.tfevents.";

/// Files of one process that have the same seconds, in three digits.
const NUMBERS: u32 = 1000;

/// Letters of a host's name that are used.
const HOST_CHARS_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(seconds: u64, existing: &[&str]) -> String {
        let existing = existing.iter().map(|name| (*name).to_owned());
        EventFileName::new(seconds, "node-1.lan", 77, existing).to_string()
    }

    #[test]
    fn a_name_has_time_host_and_process() {
        let expected = "events.out.tfevents.1795000000.node-1.lan.77.000";
        assert_eq!(name(1_795_000_000, &[]), expected);
        assert_eq!(name(1_795_000_000, &["events.out.tfevents.1794999999.x"]), expected);
        let json = EventFileName::new(5, "a/b", 1, []).json_lines();
        assert_eq!(json, "summaries.0000000005.a_b.1.000.jsonl");
        assert!(!json.contains("tfevents"));
    }

    #[test]
    fn a_new_name_comes_last() {
        let table = [
            "events.out.tfevents.1795000000.node-1.lan.99.000",
            "events.out.tfevents.1795000007.other.1.v2",
            "events.out.tfevents.9999999998.z",
        ];
        for existing in table {
            let name = name(1_795_000_000, &[existing]);
            assert!(name.as_str() > existing, "{name}");
        }
    }

    #[test]
    fn other_files_do_not_count() {
        let others = [
            "events.out.tfevents.9999999999.host",
            "events.out.tfevents.99999999999999999999999.host",
            "events.out.tfevents.host.1",
            "events.out.tfevents.+999999999.host",
            "checkpoint",
            "",
        ];
        assert!(name(1_795_000_000, &others).starts_with("events.out.tfevents.1795000000."));
    }

    #[test]
    fn the_next_name_comes_later() {
        let mut name = EventFileName::new(1_795_000_000, "", 7, []);
        assert!(name.to_string().contains(".localhost."));
        for _ in 0..2500 {
            let next = name.clone().with_next_number();
            assert!(next.to_string() > name.to_string(), "{next}");
            name = next;
        }
    }
}
