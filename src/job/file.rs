//! Reads a job file into [`Settings`]: every key is known, and every value is of its kind.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use pushpull_common::local_path;
use pushpull_common::regular_file::not_regular;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::JobError;
use super::keys::{KEYS, Key, Kind, TABLES, TimeUnit, bytes};
use super::settings::{Origin, Setting, Settings};

/// The maximum length of a job file.
pub(super) const BYTES_MAX: u64 = 1 << 20;

/// The keys that every process gives itself.
const OF_A_PROCESS: [&str; 2] = ["job_name", "task_index"];

/// Reads the text of a job file.
pub(super) fn read(file: &Path) -> Result<String, JobError> {
    let unreadable = |source| JobError::Unreadable { file: file.to_owned(), source };
    local_path::check(file).map_err(unreadable)?;
    // Opening a pipe would wait for its writer.
    let metadata = std::fs::metadata(file).map_err(unreadable)?;
    if let Some(what) = not_regular(&metadata) {
        return Err(unreadable(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it is {what}"),
        )));
    }
    let too_large =
        |found| Err(JobError::TooLarge { file: file.to_owned(), found, limit: BYTES_MAX });
    if metadata.len() > BYTES_MAX {
        return too_large(metadata.len());
    }
    let mut read = Vec::new();
    // The file may grow meanwhile.
    let opened = File::open(file).map_err(unreadable)?;
    opened.take(BYTES_MAX + 1).read_to_end(&mut read).map_err(unreadable)?;
    if read.len() as u64 > BYTES_MAX {
        return too_large(read.len() as u64);
    }
    String::from_utf8(read).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|&&byte| byte == b'\n').count();
        let at = format!("{}:{line}", file.display());
        JobError::Syntax { at, reason: "the line is not UTF-8".to_owned() }
    })
}

/// Reads the settings of a text. Errors name it as `file`.
pub(super) fn parse(text: &str, file: &Path) -> Result<Settings, JobError> {
    let source = Source { text, file };
    let root = DeTable::parse(text).map_err(|error| {
        let at = source.at(error.span().map_or(text.len(), |span| span.start));
        JobError::Syntax { at, reason: error.message().to_owned() }
    })?;
    let mut settings = Settings::default();
    for (name, value) in root.get_ref() {
        let table = name.get_ref().as_ref();
        let DeValue::Table(keys) = value.get_ref() else {
            return Err(source.not_a_table(name.span(), table));
        };
        if !TABLES.contains(&table) {
            return Err(source.unknown("table", name.span(), table, TABLES.into_iter()));
        }
        for (name, value) in keys {
            source.add(table, name.get_ref(), name.span(), value, &mut settings)?;
        }
    }
    Ok(settings)
}

/// The text of a job file, for errors.
#[derive(Clone, Copy)]
struct Source<'a> {
    text: &'a str,
    file: &'a Path,
}

impl Source<'_> {
    /// Returns the file with the line of this byte.
    fn at(self, byte: usize) -> String {
        let before = self.text.as_bytes().iter().take(byte);
        let line = 1 + before.filter(|&&byte| byte == b'\n').count();
        format!("{}:{line}", self.file.display())
    }

    fn add(
        self,
        table: &str,
        name: &str,
        span: Range<usize>,
        value: &Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) -> Result<(), JobError> {
        let of_table = || KEYS.iter().filter(|key| key.table == table);
        let Some(key) = of_table().find(|key| key.is_called(name)) else {
            return Err(self.unknown_key(table, span, name));
        };
        let written = format!("{name} = {}", self.excerpt(value.span()));
        let at = self.at(span.start);
        let fault = |reason: String| {
            let culprit = format!("{at}: {written}");
            JobError::Setting { culprit, reason }
        };
        if let Some(other) = settings.get(key.flag) {
            return Err(fault(format!("{} is the same setting", other.culprit(key.flag))));
        }
        let is_text_of_time = key.name != name;
        let texts = texts(key, is_text_of_time, value.get_ref()).map_err(fault)?;
        settings.insert(key, Setting { texts, origin: Origin::File { at, written } });
        Ok(())
    }

    /// Returns a value as it is written, cut to one line of an error.
    fn excerpt(self, span: Range<usize>) -> String {
        let text = self.text.get(span).unwrap_or_default();
        let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        match line.char_indices().nth(WRITTEN_CHARS_MAX) {
            Some((end, _)) => format!("{} ..", &line[..end]),
            None => line,
        }
    }

    fn unknown(
        self,
        what: &'static str,
        span: Range<usize>,
        name: &str,
        known: impl Iterator<Item = &'static str>,
    ) -> JobError {
        let known: Vec<_> = known.collect();
        let advice = match nearest(name, known.iter().copied()) {
            Some(nearest) => format!("the nearest is {nearest:?}"),
            None => format!("expected one of {}", known.join(", ")),
        };
        let name = name.chars().take(WRITTEN_CHARS_MAX).collect();
        JobError::Unknown { at: self.at(span.start), what, name, advice }
    }

    fn unknown_key(self, table: &str, span: Range<usize>, name: &str) -> JobError {
        let advice = match () {
            () if OF_A_PROCESS.contains(&name) => {
                Some(format!("each process has its own --{}", name.replace('_', "-")))
            }
            () => KEYS
                .iter()
                .find(|key| key.is_called(name))
                .map(|key| format!("it belongs to the table [{}]", key.table)),
        };
        match advice {
            Some(advice) => {
                let at = self.at(span.start);
                JobError::Unknown { at, what: "key", name: name.to_owned(), advice }
            }
            None => self.unknown("key", span, name, names_of(table)),
        }
    }

    /// Returns the error for a name without a table around it.
    fn not_a_table(self, span: Range<usize>, name: &str) -> JobError {
        if TABLES.contains(&name) {
            let culprit = format!("{}: {name}", self.at(span.start));
            return JobError::Setting { culprit, reason: format!("expected a table: [{name}]") };
        }
        match KEYS.iter().any(|key| key.is_called(name)) {
            true => self.unknown_key("", span, name),
            false => self.unknown("table", span, name, TABLES.into_iter()),
        }
    }
}

/// The longest value in an error, in characters.
const WRITTEN_CHARS_MAX: usize = 60;

/// Returns the names of the keys of a table.
fn names_of(table: &str) -> impl Iterator<Item = &'static str> {
    let keys = KEYS.iter().filter(move |key| key.table == table);
    keys.flat_map(|key| [Some(key.name), key.name_of_text()].into_iter().flatten())
}

/// Returns the nearest of some names, if it is near enough to be meant.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The distance costs the product of the lengths.
    if name.len() > WRITTEN_CHARS_MAX {
        return None;
    }
    let distance = |known: &str| strsim::osa_distance(name, known);
    let found = known.map(|known| (distance(known), known)).min_by_key(|(distance, _)| *distance);
    found.filter(|&(distance, known)| distance <= known.len().max(3) / 3).map(|(_, known)| known)
}

/// Returns the values of a key as a command line has them.
fn texts(key: &Key, is_text_of_time: bool, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let list = || value.as_array().map(|array| array.iter().map(Spanned::get_ref));
    let one = |text: Result<String, String>| text.map(|text| vec![text]);
    match key.kind {
        Kind::Switch => match value.as_bool() {
            Some(on) => Ok(vec![on.to_string()]),
            None => Err("expected true or false".to_owned()),
        },
        Kind::Whole(min) => one(whole(value, min)),
        Kind::Number => one(number(value)),
        Kind::Bytes => match value.as_str() {
            Some(text) => one(bytes(text).map(|bytes| bytes.to_string())),
            None => one(whole(value, 0)
                .map_err(|_| "expected a number of bytes, or a text such as \"16G\"".to_owned())),
        },
        Kind::Time(unit) if is_text_of_time => match value.as_str() {
            Some(text) => one(time(text, unit)),
            None => Err(format!("expected a text such as \"5s\"; {} is a number", key.name)),
        },
        Kind::Time(_) => one(whole(value, 0)),
        Kind::Text(check) => {
            let text = value.as_str().ok_or("expected a text")?;
            check(text).map(|()| vec![text.to_owned()])
        }
        Kind::Path => {
            let text = value.as_str().ok_or("expected the text of a path")?;
            let checked = local_path::check(Path::new(text)).map_err(|error| error.to_string());
            checked.map(|_| vec![text.to_owned()])
        }
        Kind::Place => match value.as_str() {
            Some(text) if !text.is_empty() => Ok(vec![text.to_owned()]),
            _ => Err("expected the text of a path".to_owned()),
        },
        Kind::Texts(check) => {
            let items = list().ok_or("expected a list of texts")?;
            let checked = items.map(|item| {
                let text = item.as_str().ok_or("expected a list of texts")?;
                check(text).map_err(|error| format!("{text:?}: {error}"))?;
                Ok::<_, String>(text.to_owned())
            });
            checked.collect()
        }
        Kind::Addresses => {
            let all: Option<Vec<String>> = match value.as_str() {
                Some(text) => Some(text.split(',').map(str::to_owned).collect()),
                None => list()
                    .and_then(|items| items.map(|item| item.as_str().map(str::to_owned)).collect()),
            };
            let all = all.ok_or("expected a list of addresses")?;
            match all.iter().position(|address| address.trim().is_empty()) {
                _ if all.is_empty() => Err("expected at least one address".to_owned()),
                Some(hole) => Err(format!("address {hole} is empty")),
                None => Ok(all),
            }
        }
    }
}

/// Returns the digits of a whole number of at least `min`.
fn whole(value: &DeValue<'_>, min: u64) -> Result<String, String> {
    let expected = || format!("expected a whole number from {min} on");
    let DeValue::Integer(integer) = value else { return Err(expected()) };
    let number = u64::from_str_radix(integer.as_str(), integer.radix());
    number
        .ok()
        .filter(|&number| number >= min)
        .map(|number| number.to_string())
        .ok_or_else(expected)
}

/// Returns the text of a number.
fn number(value: &DeValue<'_>) -> Result<String, String> {
    let text = match value {
        DeValue::Float(float) => float.as_str(),
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
        _ => return Err("expected a number".to_owned()),
    };
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(text.to_owned()),
        _ => Err("expected a finite number".to_owned()),
    }
}

/// The units of a time in a text, with their microseconds.
const TIME_UNITS: [(&str, u64); 6] = [
    ("us", 1),
    ("ms", 1000),
    ("s", 1_000_000),
    ("min", 60_000_000),
    ("h", 3_600_000_000),
    ("d", 86_400_000_000),
];

/// Returns the number of units of a time such as `5s`.
fn time(text: &str, unit: TimeUnit) -> Result<String, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, name) = text.split_at(digits);
    let name = name.trim();
    let factor = TIME_UNITS.iter().find(|(known, _)| *known == name).map(|(_, factor)| *factor);
    let micros = factor.zip(number.parse::<u64>().ok());
    let micros = micros.and_then(|(factor, number)| number.checked_mul(factor));
    let micros =
        micros.ok_or("expected a whole number with one of the units us, ms, s, min, h and d")?;
    match micros % unit.microseconds() {
        0 => Ok((micros / unit.microseconds()).to_string()),
        _ => Err(format!(
            "expected a multiple of {}",
            match unit {
                TimeUnit::Microseconds => "1us",
                TimeUnit::Milliseconds => "1ms",
                TimeUnit::Hours => "1h",
            }
        )),
    }
}
