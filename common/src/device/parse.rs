//! Parsers of device names: lenient as TensorFlow's Python client, or strict as its C++ runtime.

use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use super::DeviceSpec;
use crate::cluster::is_job_name;

/// A text that is not the name of a device. Texts are at most [`DeviceSpec::TEXT_BYTES_MAX`] long.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text is longer than [`DeviceSpec::TEXT_BYTES_MAX`].
    #[error(
        "cannot read a device name of {bytes} bytes: the limit is {}",
        DeviceSpec::TEXT_BYTES_MAX
    )]
    TooLong {
        /// The length of the text.
        bytes: usize,
    },
    /// A part between slashes is not a field. Keys are lower case.
    #[error("cannot read the device name {text:?}: {part:?} is not a field")]
    Field {
        /// The whole text.
        text: String,
        /// The part at fault.
        part: String,
    },
    /// An index is not a number, or is too large.
    #[error("cannot read the device name {text:?}: {part:?} does not end in a number below 2^32")]
    Number {
        /// The whole text.
        text: String,
        /// The part at fault.
        part: String,
    },
    /// A second device type or, in the strict form, a second value of any field.
    #[error("cannot read the device name {text:?}: {part:?} gives a field a second time")]
    Duplicate {
        /// The whole text.
        text: String,
        /// The part at fault.
        part: String,
    },
    /// In the strict form, a job or type name that is not a letter followed by letters, digits and
    /// underscores.
    #[error("cannot read the device name {text:?}: {part:?} has no well-formed name")]
    Name {
        /// The whole text.
        text: String,
        /// The part at fault.
        part: String,
    },
    /// In the strict form, a text that does not start with a slash.
    #[error("cannot read the device name {text:?}: it does not start with a slash")]
    NoSlash {
        /// The whole text.
        text: String,
    },
}

/// Parses leniently, as [`DeviceSpec::parse`].
impl FromStr for DeviceSpec {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<DeviceSpec, DeviceError> {
        DeviceSpec::parse(text)
    }
}

impl DeviceSpec {
    /// Parses a device name leniently, as TensorFlow's client does.
    ///
    /// Fields come in any order and empty parts are ignored, so a leading slash is optional. Of a
    /// repeated job, replica or task the last counts. A bare type (`cpu`, `gpu:1`, `tpu:*`) is one
    /// of CPU, GPU, TPU, CUSTOM and EPU in any case; `device:TYPE:INDEX` accepts any type. Job
    /// names are not checked.
    pub fn parse(text: &str) -> Result<DeviceSpec, DeviceError> {
        let mut reader = DeviceReader::new(text)?;
        for part in text.split('/').filter(|part| !part.is_empty()) {
            reader.lenient(part)?;
        }
        Ok(reader.spec)
    }

    /// Parses a device name strictly, as TensorFlow's runtime does; for names from untrusted
    /// sources.
    ///
    /// Every part starts with a slash, no field is given twice, job and type are well-formed names,
    /// and `*` leaves a field open.
    pub fn parse_strict(text: &str) -> Result<DeviceSpec, DeviceError> {
        let mut reader = DeviceReader::new(text)?;
        if text.is_empty() || text == "/" {
            return Ok(reader.spec);
        }
        let parts =
            text.strip_prefix('/').ok_or_else(|| DeviceError::NoSlash { text: text.to_owned() })?;
        let mut seen = Vec::new();
        for part in parts.split('/') {
            let field = reader.strict(part)?;
            if seen.contains(&field) {
                return Err(reader.duplicate(part));
            }
            seen.push(field);
        }
        Ok(reader.spec)
    }
}

/// The fields parsed so far, and the whole text for error messages.
struct DeviceReader<'a> {
    text: &'a str,
    spec: DeviceSpec,
}

impl<'a> DeviceReader<'a> {
    fn new(text: &'a str) -> Result<Self, DeviceError> {
        match text.len() <= DeviceSpec::TEXT_BYTES_MAX {
            true => Ok(DeviceReader { text, spec: DeviceSpec::default() }),
            false => Err(DeviceError::TooLong { bytes: text.len() }),
        }
    }

    fn lenient(&mut self, part: &str) -> Result<(), DeviceError> {
        let words: Vec<&str> = part.split(':').collect();
        match words[..] {
            ["job", name] => self.spec.job = Some(name.into()),
            ["replica", number] => self.spec.replica = Some(self.number(part, number)?),
            ["task", number] => self.spec.task = Some(self.number(part, number)?),
            ["device", kind, index] => self.set_type(part, upper_legacy(kind), index)?,
            [kind] if is_bare_type(kind) => self.set_type(part, upper(kind), "*")?,
            [kind, index] if is_bare_type(kind) => self.set_type(part, upper(kind), index)?,
            _ => return Err(self.field(part)),
        }
        Ok(())
    }

    /// Parses a part and returns the name of its field, so that the caller can reject a second one.
    fn strict(&mut self, part: &str) -> Result<&'static str, DeviceError> {
        let words: Vec<&str> = part.split(':').collect();
        match words[..] {
            ["job", "*"] => Ok("job"),
            ["job", name] if is_job_name(name) => {
                self.spec.job = Some(name.into());
                Ok("job")
            }
            ["job", _] => Err(self.name(part)),
            ["replica", number] => {
                self.spec.replica = self.number_or_open(part, number)?;
                Ok("replica")
            }
            ["task", number] => {
                self.spec.task = self.number_or_open(part, number)?;
                Ok("task")
            }
            ["device", "*"] | ["device", "*", "*"] => Ok("device"),
            ["device", kind] => self.strict_type(part, kind, "*"),
            ["device", kind, index] => self.strict_type(part, kind, index),
            [kind @ ("cpu" | "CPU" | "gpu" | "GPU"), index] => self.strict_type(part, kind, index),
            _ => Err(self.field(part)),
        }
    }

    fn strict_type(
        &mut self,
        part: &str,
        kind: &str,
        index: &str,
    ) -> Result<&'static str, DeviceError> {
        // The type has the syntax of a job name. A `*` with an index would leave an index without a
        // type.
        if !is_job_name(kind) {
            return Err(self.name(part));
        }
        self.set_type(part, upper_legacy(kind), index)?;
        Ok("device")
    }

    fn set_type(&mut self, part: &str, kind: Arc<str>, index: &str) -> Result<(), DeviceError> {
        if self.spec.device_type.is_some() {
            return Err(self.duplicate(part));
        }
        self.spec.device_index = self.number_or_open(part, index)?;
        self.spec.device_type = Some(kind);
        Ok(())
    }

    fn number_or_open(&self, part: &str, word: &str) -> Result<Option<u32>, DeviceError> {
        match word {
            "*" => Ok(None),
            _ => self.number(part, word).map(Some),
        }
    }

    fn number(&self, part: &str, word: &str) -> Result<u32, DeviceError> {
        let digits = word.bytes().all(|byte| byte.is_ascii_digit());
        match word.parse() {
            Ok(number) if digits => Ok(number),
            _ => Err(DeviceError::Number { text: self.text.to_owned(), part: part.to_owned() }),
        }
    }

    fn field(&self, part: &str) -> DeviceError {
        DeviceError::Field { text: self.text.to_owned(), part: part.to_owned() }
    }

    fn duplicate(&self, part: &str) -> DeviceError {
        DeviceError::Duplicate { text: self.text.to_owned(), part: part.to_owned() }
    }

    fn name(&self, part: &str) -> DeviceError {
        DeviceError::Name { text: self.text.to_owned(), part: part.to_owned() }
    }
}

fn is_bare_type(kind: &str) -> bool {
    BARE_TYPES.iter().any(|known| known.eq_ignore_ascii_case(kind))
}

fn upper(kind: &str) -> Arc<str> {
    kind.to_ascii_uppercase().into()
}

/// In the long form, only the two oldest types may be written in lower case.
fn upper_legacy(kind: &str) -> Arc<str> {
    match kind {
        "cpu" | "gpu" => upper(kind),
        _ => kind.into(),
    }
}

/// The types that may be written without `device:`.
const BARE_TYPES: [&str; 5] = ["CPU", "GPU", "TPU", "CUSTOM", "EPU"];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lenient_parsing_accepts_odd_names() {
        let table = [
            ("/task:1/task:2", "/task:2"),
            ("custom", "/device:CUSTOM:*"),
            ("/device:fpga:0", "/device:fpga:0"),
            ("/job:a-b", "/job:a-b"),
        ];
        for (text, expected) in table {
            assert_eq!(DeviceSpec::parse(text).unwrap().to_string(), expected);
        }
        let bad = ["/device:CPU", "/task:", "/task:-1", "/task:+1", "/task:4294967296", "/fpga:0"];
        for text in bad.into_iter().chain(["/task:*", "/job:a:b", "/:0", "/cpu/gpu", "/Task:1"]) {
            assert!(DeviceSpec::parse(text).is_err(), "{text}");
        }
        let long = "/".repeat(DeviceSpec::TEXT_BYTES_MAX + 1);
        assert_eq!(DeviceSpec::parse(&long), Err(DeviceError::TooLong { bytes: 1025 }));
        assert!(DeviceSpec::parse(&long[1..]).is_ok());
    }

    #[test]
    fn strict_parsing_accepts_stars() {
        let table = [
            ("", ""),
            ("/", ""),
            ("/job:ps/replica:0/task:1/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"),
            ("/job:*/replica:*/task:*/device:*:*", ""),
            ("/device:*", ""),
            ("/job:ps/device:gpu", "/job:ps/device:GPU:*"),
            ("/job:ps/cpu:1", "/job:ps/device:CPU:1"),
        ];
        for (text, expected) in table {
            assert_eq!(DeviceSpec::parse_strict(text).unwrap().to_string(), expected, "{text}");
        }
        let bad = [
            ("job:ps", "cannot read the device name \"job:ps\": it does not start with a slash"),
            ("/job:", "cannot read the device name \"/job:\": \"job:\" has no well-formed name"),
            (
                "/job:a/job:*",
                "cannot read the device name \"/job:a/job:*\": \
                 \"job:*\" gives a field a second time",
            ),
            (
                "/task:x",
                "cannot read the device name \"/task:x\": \
                 \"task:x\" does not end in a number below 2^32",
            ),
            (
                "/job:a//task:1",
                "cannot read the device name \"/job:a//task:1\": \"\" is not a field",
            ),
        ];
        for (text, expected) in bad {
            assert_eq!(DeviceSpec::parse_strict(text).unwrap_err().to_string(), expected);
        }
        for text in ["/device:*:0", "/tpu:0", "/job:a-b", "/cpu:0/gpu:0", "/device::0"] {
            assert!(DeviceSpec::parse_strict(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsed_names_round_trip(
            parts in proptest::collection::vec(
                "job:[a-c]{0,2}|task:[0-9]{1,2}|replica:1|cpu:1|GPU|device:X:\\*|x",
                0..4,
            ),
        ) {
            let text: String = parts.iter().map(|part| format!("/{part}")).collect();
            if let Ok(spec) = DeviceSpec::parse(&text) {
                prop_assert_eq!(DeviceSpec::parse(&spec.to_string()), Ok(spec));
            }
            if let Ok(spec) = DeviceSpec::parse_strict(&text) {
                prop_assert_eq!(DeviceSpec::parse_strict(&spec.to_string()), Ok(spec.clone()));
                prop_assert_eq!(DeviceSpec::parse(&text), Ok(spec));
            }
        }
    }
}
