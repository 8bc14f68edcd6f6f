//! [`Settings`]: the values of flags and of a job file by name, each with its origin.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::error::JobError;
use super::keys::{KEYS, Key, Kind, TABLES, key_of};

/// The settings of a training, by the names of their flags without hyphens, such as `last-step`.
///
/// The flags of the daemon and the keys of a job file are the same settings: both fill this map,
/// from which [`Settings::ps_config`] builds a server. It displays itself as a job file, with the
/// origin of each value in a comment. Defaults are comments themselves.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    values: BTreeMap<&'static str, Setting>,
}

/// The values of one setting, with their origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The values as a command line has them. A switch is `true` or `false`.
    pub(super) texts: Vec<String>,
    pub(super) origin: Origin,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The program.
    Default,
    /// A command line.
    Flag,
    /// A job file.
    File {
        /// The file with the line, such as `job.toml:3`.
        at: String,
        /// The key and its value as the file has them.
        written: String,
    },
}

impl Setting {
    /// Returns whether the value is one of a job file.
    pub fn is_of_file(&self) -> bool {
        matches!(self.origin, Origin::File { .. })
    }

    /// Returns the values as a command line has them. A switch is `true` or `false`.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Returns the flag with its values, or the key with its line and its value as the job file has
    /// them.
    pub fn culprit(&self, flag: &str) -> String {
        let values = self.texts.join(",");
        match &self.origin {
            Origin::File { at, written } => format!("{at}: {written}"),
            _ if values.contains(char::is_whitespace) => format!("--{flag} '{values}'"),
            _ => format!("--{flag} {values}"),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Flag => f.write_str("flag"),
            Origin::File { at, .. } => f.write_str(at),
        }
    }
}

impl Settings {
    /// Returns the settings with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Setting)> {
        self.values.iter().map(|(&flag, setting)| (flag, setting))
    }

    /// Returns a setting by the name of its flag, without hyphens.
    pub fn get(&self, flag: &str) -> Option<&Setting> {
        self.values.get(flag)
    }

    /// Sets the values of a flag, in place of those of a job file. Other names than those of
    /// settings are ignored.
    pub fn set_flag(&mut self, flag: &str, texts: impl IntoIterator<Item = impl Into<String>>) {
        self.set(flag, texts, Origin::Flag);
    }

    /// Sets the default of a program, unless the setting has a value.
    pub fn set_default(&mut self, flag: &str, texts: impl IntoIterator<Item = impl Into<String>>) {
        if !self.values.contains_key(flag) {
            self.set(flag, texts, Origin::Default);
        }
    }

    /// Removes a setting.
    pub fn remove(&mut self, flag: &str) {
        self.values.remove(flag);
    }

    fn set(
        &mut self,
        flag: &str,
        texts: impl IntoIterator<Item = impl Into<String>>,
        origin: Origin,
    ) {
        if let Some(key) = key_of(flag) {
            let texts = texts.into_iter().map(Into::into).collect();
            self.insert(key, Setting { texts, origin });
        }
    }

    pub(super) fn insert(&mut self, key: &Key, setting: Setting) {
        self.values.insert(key.flag, setting);
    }

    /// Returns whether a setting has a value other than `false`.
    pub(super) fn is_given(&self, flag: &str) -> bool {
        self.text(flag).is_some_and(|text| text != "false")
    }

    /// Returns the last value of a setting.
    pub(super) fn text(&self, flag: &str) -> Option<&str> {
        self.get(flag)?.texts.last().map(String::as_str)
    }

    /// Returns all values of a setting.
    pub(super) fn texts(&self, flag: &str) -> &[String] {
        self.get(flag).map_or(&[], |setting| &setting.texts)
    }

    /// Returns the value of a setting.
    pub(super) fn value<T: FromStr>(&self, flag: &str) -> Result<Option<T>, JobError>
    where
        T::Err: fmt::Display,
    {
        let parsed = self.text(flag).map(str::parse).transpose();
        parsed.map_err(|error: T::Err| self.fault(flag, error))
    }

    /// Returns the value of a setting by a function that reads its text.
    pub(super) fn read<T, E: fmt::Display>(
        &self,
        flag: &str,
        read: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, JobError> {
        self.text(flag).map(read).transpose().map_err(|error| self.fault(flag, error))
    }

    /// Returns the path of a setting for a task: `{task}` stands for its index.
    pub(super) fn path(&self, flag: &str, task: u32) -> Option<PathBuf> {
        self.text(flag).map(|text| text.replace("{task}", &task.to_string()).into())
    }

    /// Returns the error of a setting, which names its value and its origin.
    pub(super) fn fault(&self, flag: &str, reason: impl fmt::Display) -> JobError {
        let culprit = match self.get(flag) {
            Some(setting) => setting.culprit(flag),
            None => format!("--{flag}"),
        };
        JobError::Setting { culprit, reason: reason.to_string() }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for table in TABLES {
            let keys = KEYS.iter().filter(|key| key.table == table);
            let given: Vec<_> = keys.filter_map(|key| Some((key, self.get(key.flag)?))).collect();
            if given.is_empty() {
                continue;
            }
            writeln!(f, "{separator}[{table}]")?;
            separator = "\n";
            for (key, setting) in given {
                // A default may have no effect beside the other settings, which a file may not give.
                let comment = if setting.origin == Origin::Default { "# " } else { "" };
                let line = format!("{comment}{} = {}", key.name, literal(key, setting));
                writeln!(f, "{line:<40} # {}", setting.origin)?;
            }
        }
        Ok(())
    }
}

/// Returns a text as TOML has it.
fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04X}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

/// Returns the values of a setting as a job file has them.
fn literal(key: &Key, setting: &Setting) -> String {
    let last = setting.texts.last().cloned().unwrap_or_default();
    match key.kind {
        Kind::Switch | Kind::Whole(_) | Kind::Number | Kind::Time(_) => last,
        Kind::Bytes if last.bytes().all(|byte| byte.is_ascii_digit()) => last,
        Kind::Bytes | Kind::Text(_) | Kind::Path | Kind::Place => quoted(&last),
        Kind::Texts(_) | Kind::Addresses => {
            let all: Vec<_> = setting.texts.iter().map(|text| quoted(text)).collect();
            format!("[{}]", all.join(", "))
        }
    }
}
