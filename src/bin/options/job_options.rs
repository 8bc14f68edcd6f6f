//! [`JobLine`]: a command line with the settings of its job file, which typed flags override.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};
use pushpull::job::{Job, JobError, Setting, Settings};

use super::local_path::local_path;
use super::resolve_options::BESIDE_LAUNCHER;

/// The flags of a job file.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Job")]
pub(crate) struct JobOptions {
    /// Job file with the settings, which flags override [default: none]
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    job: Option<PathBuf>,
    /// Print all settings as a job file, each with its origin, and exit
    #[arg(long)]
    pub(crate) print_config: bool,
}

/// Flags that choose the same thing: a typed one overrides the other of a job file.
const RIVALS: [[&str; 2]; 4] = [
    ["cluster", "ps-hosts"],
    ["cluster", "worker-hosts"],
    ["cluster", "resolve"],
    ["issync", "synchronous"],
];

/// A command line, in front of whose flags are those of its job file.
#[derive(Clone, Debug)]
pub(crate) struct JobLine {
    /// The words, for the parser.
    pub(crate) words: Vec<OsString>,
    settings: Settings,
    /// The settings of the job file that became flags, by the name of the flag.
    of_file: BTreeMap<String, Setting>,
    renamed: &'static [(&'static str, &'static str)],
}

impl JobLine {
    /// Reads the job file that a command line names, if it does. `renamed` has the settings whose
    /// flag has another name, each with that. Settings for which `is_used` returns `false` do not
    /// become flags; it is asked with the names of all flags that are typed or settings.
    ///
    /// # Errors
    /// If the job file cannot be used.
    pub(crate) fn read(
        command: &Command,
        words: impl IntoIterator<Item = impl Into<OsString>>,
        renamed: &'static [(&'static str, &'static str)],
        is_used: impl Fn(&str, &BTreeSet<String>) -> bool,
    ) -> Result<JobLine, JobError> {
        let mut words: Vec<OsString> = words.into_iter().map(Into::into).collect();
        let (typed, file) = typed_flags(command, &words);
        let mut settings = match file {
            Some(file) => Job::read(PathBuf::from(file))?.settings().clone(),
            None => Settings::default(),
        };
        let of_settings = settings.iter().map(|(setting, _)| flag_of(renamed, setting));
        let named = typed.iter().cloned().chain(of_settings.map(str::to_owned)).collect();
        let mut of_file = BTreeMap::new();
        let has_launcher = typed.contains("resolve") || settings.get("resolve").is_some();
        let is_used = |flag: &str, typed: &_| {
            (has_launcher || !BESIDE_LAUNCHER.contains(&flag)) && is_used(flag, typed)
        };
        for (setting, value) in settings.clone().iter() {
            let flag = flag_of(renamed, setting);
            let mut rivals = RIVALS.iter().filter(|rivals| rivals.contains(&flag)).flatten();
            if rivals.any(|rival| typed.contains(*rival)) || typed.contains(flag) {
                settings.remove(setting);
                continue;
            }
            let argument = command.get_arguments().find(|known| known.get_long() == Some(flag));
            if let Some(argument) = argument.filter(|_| is_used(flag, &named)) {
                let at = words.len().min(1);
                words.splice(at..at, flags(argument, flag, value.texts()));
                of_file.insert(flag.to_owned(), value.clone());
            }
        }
        Ok(JobLine { words, settings, of_file, renamed })
    }

    /// Returns the setting of the job file that became this flag.
    pub(crate) fn of_file(&self, flag: &str) -> Option<&Setting> {
        self.of_file.get(flag.trim_start_matches('-'))
    }

    /// Returns the lines about the flags that an error names and nobody has typed.
    pub(crate) fn notes(&self, error: &str) -> String {
        let is_named = |flag: &str| {
            let mut words = error.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
            words.any(|word| word.strip_prefix("--") == Some(flag))
        };
        let named = self.of_file.iter().filter(|(flag, _)| is_named(flag));
        named.map(|(flag, value)| format!("  --{flag} is {}\n", value.culprit(flag))).collect()
    }

    /// Returns the settings of the job file and of the flags.
    pub(crate) fn settings(&self, command: &Command, matches: &ArgMatches) -> Settings {
        let mut settings = self.settings.clone();
        for (flag, values) in self.given(command, matches, ValueSource::CommandLine) {
            if !self.of_file.contains_key(&flag) {
                settings.set_flag(self.setting_of(&flag), values);
            }
        }
        settings
    }

    /// Returns all settings as a job file, with those that have defaults, and the flags that are no
    /// settings as comments.
    pub(crate) fn printed(&self, command: &Command, matches: &ArgMatches) -> String {
        let mut settings = self.settings(command, matches);
        for (flag, values) in self.given(command, matches, ValueSource::DefaultValue) {
            settings.set_default(self.setting_of(&flag), values);
        }
        let typed = self.given(command, matches, ValueSource::CommandLine).into_iter();
        let others = typed.filter(|(flag, _)| {
            settings.get(self.setting_of(flag)).is_none() && flag != "print-config"
        });
        let others = others.map(|(flag, values)| format!("# --{flag} {}\n", values.join(",")));
        format!("{}{settings}", others.collect::<String>())
    }

    /// Returns the flags whose values come from this source.
    fn given(
        &self,
        command: &Command,
        matches: &ArgMatches,
        source: ValueSource,
    ) -> Vec<(String, Vec<String>)> {
        let given = command.get_arguments().filter_map(|argument| {
            let id = argument.get_id().as_str();
            let flag = argument.get_long()?;
            let is_of_source = matches.value_source(id) == Some(source);
            if !argument.get_action().takes_values() {
                let is_on = source == ValueSource::CommandLine;
                return is_of_source.then(|| (flag.to_owned(), vec![is_on.to_string()]));
            }
            let values = matches.get_raw(id).filter(|_| is_of_source)?;
            let values = values.map(|value| value.to_string_lossy().into_owned());
            Some((flag.to_owned(), values.collect()))
        });
        given.collect()
    }

    fn setting_of<'a>(&self, flag: &'a str) -> &'a str {
        let renamed = self.renamed.iter().find(|(_, other)| *other == flag);
        renamed.map_or(flag, |(setting, _)| setting)
    }
}

/// Returns the name of the flag of a setting.
fn flag_of(renamed: &[(&'static str, &'static str)], setting: &'static str) -> &'static str {
    renamed.iter().find(|(name, _)| *name == setting).map_or(setting, |(_, flag)| flag)
}

/// Returns a flag with its values as words.
fn flags(argument: &Arg, flag: &str, values: &[String]) -> Vec<OsString> {
    let takes_values = argument.get_action().takes_values();
    let words = values.iter().filter_map(|value| match (takes_values, &**value) {
        (true, value) => Some(format!("--{flag}={value}")),
        (false, "true") => Some(format!("--{flag}")),
        (false, _) => None,
    });
    words.map(OsString::from).collect()
}

/// Returns the names of the flags of a command line, and the value of `--job`.
fn typed_flags(command: &Command, words: &[OsString]) -> (BTreeSet<String>, Option<OsString>) {
    let mut typed = BTreeSet::new();
    let mut file = None;
    let mut rest = words.iter().skip(1).take_while(|word| *word != "--");
    while let Some(word) = rest.next() {
        let Some(text) = word.to_str().and_then(|word| word.strip_prefix("--")) else { continue };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let is_called = |argument: &&Arg| {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            argument.get_long() == Some(name) || aliases.contains(&name)
        };
        let found = command.get_arguments().find(is_called).and_then(Arg::get_long);
        if found == Some("job") {
            file = value.map(OsString::from).or_else(|| rest.next().cloned());
        }
        typed.extend(found.map(str::to_owned));
    }
    (typed, file)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::super::underscores::accepts_underscores;
    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "line")]
    struct Line {
        #[command(flatten)]
        job: JobOptions,
        /// The addresses
        #[arg(long, value_delimiter = ',')]
        ps_hosts: Vec<String>,
        /// The cluster
        #[arg(long)]
        cluster: Option<String>,
        /// The end
        #[arg(long)]
        steps: Option<u64>,
        /// The lease
        #[arg(long, default_value_t = 5000)]
        lease_ms: u64,
        /// The switch
        #[arg(long, requires = "state_dir")]
        integrity_full: bool,
        /// The state
        #[arg(long)]
        state_dir: Option<String>,
    }

    const RENAMED: &[(&str, &str)] = &[("last-step", "steps")];

    /// Returns the words that the parser gets, and what is printed of them or the error.
    fn read(file: &str, typed: &[&str]) -> (Vec<String>, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        std::fs::write(&path, file).unwrap();
        let path = path.to_str().unwrap();
        let command = Line::command().mut_args(accepts_underscores);
        let words = [&["line", "--job", path], typed].concat();
        let line = JobLine::read(&command, words, RENAMED, |_, _| true).unwrap();
        let words = line.words.iter().map(|word| word.to_str().unwrap().replace(path, "FILE"));
        let said = match command.clone().try_get_matches_from(&line.words) {
            Ok(matches) => line.printed(&command, &matches),
            Err(error) => {
                let error = error.to_string();
                format!("{error}{}", line.notes(&error))
            }
        };
        // Columns are no part of the tests.
        let lines = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        let said: String = lines.map(|line| line + "\n").collect();
        (words.collect(), said.replace(path, "FILE"))
    }

    #[test]
    fn flags_override_the_file_and_their_origin_is_printed() {
        let file = "[cluster]\nps_hosts = [\"a:1\", \"b:1\"]\n[training]\nlast_step = 9\nlease = \"7s\"\n\
                    [storage]\nshards = 2\nintegrity_full = false\n";
        let (words, said) = read(file, &["--lease_ms", "800"]);
        assert_eq!(words[..4], ["line", "--ps-hosts=a:1", "--ps-hosts=b:1", "--steps=9"]);
        for expected in [
            "# --job FILE\n",
            "lease_ms = 800 # flag\n",
            "last_step = 9 # FILE:4\n",
            "ps_hosts = [\"a:1\", \"b:1\"] # FILE:2\n",
            "shards = 2 # FILE:7\n",
        ] {
            assert!(said.contains(expected), "{expected}{said}");
        }
        let (words, said) = read(file, &["--cluster=ps=c:1", "--steps", "3"]);
        assert_eq!(
            words[1..],
            ["--lease-ms=7000", "--job", "FILE", "--cluster=ps=c:1", "--steps", "3"]
        );
        assert!(said.contains("last_step = 3 ") && said.contains("lease_ms = 7000 "), "{said}");
        let (_, said) = read("[optimizer]\nname = \"adam\"\n", &[]);
        assert!(said.contains("# lease_ms = 5000 # default\n"), "{said}");
        assert!(said.contains("name = \"adam\""), "a setting without a flag: {said}");
    }

    #[test]
    fn an_error_of_the_parser_names_the_line_of_the_file() {
        let (_, said) = read("[storage]\n\nintegrity_full = true\n", &[]);
        assert!(said.contains("--state-dir <STATE_DIR>"), "{said}");
        // The parser names the flag in its usage.
        assert!(said.contains("--integrity-full is FILE:3: integrity_full = true\n"), "{said}");
    }
}
