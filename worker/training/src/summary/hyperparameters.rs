//! The settings of a run, for TensorBoard's HPARAMS tab.

use super::error::SummaryError;
use super::json_line::JsonLine;
use super::protobuf_writer::ProtobufWriter;

/// The hyperparameters of one run, and the tags of the scalars by which runs are compared.
///
/// TensorBoard takes names and metrics from the first run that it finds. So all runs below one log
/// directory should set the same ones.
///
/// ```
/// use pushpull_training::summary::Hyperparameters;
///
/// let settings = Hyperparameters::new()
///     .set("learning_rate", 0.1)
///     .set("optimizer", "adam")
///     .set("synchronous", true)
///     .metric("loss");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hyperparameters {
    values: Vec<(String, HyperparameterValue)>,
    metrics: Vec<String>,
    group: Option<String>,
}

/// The value of a hyperparameter.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum HyperparameterValue {
    /// A finite number.
    Number(f64),
    /// A text.
    Text(String),
    /// A switch.
    Flag(bool),
}

/// The end of a run, as TensorBoard shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// The training is complete.
    Success,
    /// The training was given up.
    Failure,
}

impl Hyperparameters {
    /// Makes an empty set.
    pub fn new() -> Hyperparameters {
        Hyperparameters::default()
    }

    /// Sets a hyperparameter. A later value of the same name replaces the former.
    #[must_use]
    pub fn set(
        mut self,
        name: impl Into<String>,
        value: impl Into<HyperparameterValue>,
    ) -> Hyperparameters {
        let name = name.into();
        let value = value.into();
        match self.values.iter_mut().find(|(other, _)| *other == name) {
            Some((_, former)) => *former = value,
            None => self.values.push((name, value)),
        }
        self
    }

    /// Adds the tag of a scalar that the HPARAMS tab shows beside the hyperparameters.
    #[must_use]
    pub fn metric(mut self, tag: impl Into<String>) -> Hyperparameters {
        self.metrics.push(tag.into());
        self
    }

    /// Puts the run into a group, for example of repetitions with other seeds. The HPARAMS tab
    /// shows one row for a group. By default each run has its own.
    #[must_use]
    pub fn group(mut self, name: impl Into<String>) -> Hyperparameters {
        self.group = Some(name.into());
        self
    }

    /// Checks that TensorBoard can show the values.
    pub(crate) fn check(&self) -> Result<(), SummaryError> {
        for (name, value) in &self.values {
            match value {
                _ if name.is_empty() => return Err(SummaryError::NoHyperparameterName),
                HyperparameterValue::Number(number) if !number.is_finite() => {
                    let name = name.clone();
                    let value = *number;
                    return Err(SummaryError::Hyperparameter { name, value });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the size of all texts.
    pub(super) fn text_bytes(&self) -> usize {
        let values = self.values.iter().map(|(name, value)| match value {
            HyperparameterValue::Text(text) => name.len() + text.len(),
            _ => name.len(),
        });
        let others = self.metrics.iter().chain(&self.group).map(String::len);
        values.chain(others).sum()
    }

    /// Encodes the fields of an `Experiment`: the names, their types and the metrics.
    pub(super) fn encode_experiment(&self, message: &mut ProtobufWriter, wall_time_s: f64) {
        message.double(3, wall_time_s);
        for (name, value) in &self.values {
            message.message(4, |info| {
                info.text(1, name);
                info.integer(4, value.data_type());
            });
        }
        for tag in &self.metrics {
            message.message(5, |info| info.message(1, |name| name.text(2, tag)));
        }
    }

    /// Encodes the fields of a `SessionStartInfo`: the values.
    pub(super) fn encode_start(&self, message: &mut ProtobufWriter, wall_time_s: f64) {
        for (name, value) in &self.values {
            // An entry of a map is a message of key and value.
            message.message(1, |entry| {
                entry.text(1, name);
                entry.message(2, |message| value.encode(message));
            });
        }
        if let Some(group) = &self.group {
            message.text(4, group);
        }
        message.double(5, wall_time_s);
    }

    pub(super) fn describe(&self, line: &mut JsonLine) {
        for (name, value) in &self.values {
            match value {
                HyperparameterValue::Number(number) => line.number(name, *number),
                HyperparameterValue::Text(text) => line.string(name, text),
                HyperparameterValue::Flag(flag) => line.boolean(name, *flag),
            }
        }
    }
}

impl HyperparameterValue {
    /// Returns the plugin's code of the type.
    fn data_type(&self) -> u64 {
        match self {
            HyperparameterValue::Text(_) => 1,
            HyperparameterValue::Flag(_) => 2,
            HyperparameterValue::Number(_) => 3,
        }
    }

    /// Encodes the fields of a `google.protobuf.Value`.
    fn encode(&self, message: &mut ProtobufWriter) {
        match self {
            HyperparameterValue::Number(number) => message.double(2, *number),
            HyperparameterValue::Text(text) => message.text(3, text),
            HyperparameterValue::Flag(flag) => message.integer(4, u64::from(*flag)),
        }
    }
}

impl RunStatus {
    /// Returns the plugin's code of the status.
    pub(super) fn code(self) -> u64 {
        match self {
            RunStatus::Success => 1,
            RunStatus::Failure => 2,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            RunStatus::Success => "success",
            RunStatus::Failure => "failure",
        }
    }
}

impl From<f64> for HyperparameterValue {
    fn from(value: f64) -> HyperparameterValue {
        HyperparameterValue::Number(value)
    }
}

impl From<f32> for HyperparameterValue {
    /// Takes the decimal number that the `f32` stands for, so that 0.1 is shown as 0.1.
    fn from(value: f32) -> HyperparameterValue {
        let decimal = value.to_string().parse();
        HyperparameterValue::Number(decimal.unwrap_or(f64::from(value)))
    }
}

impl From<u32> for HyperparameterValue {
    fn from(value: u32) -> HyperparameterValue {
        HyperparameterValue::Number(f64::from(value))
    }
}

impl From<i32> for HyperparameterValue {
    fn from(value: i32) -> HyperparameterValue {
        HyperparameterValue::Number(f64::from(value))
    }
}

impl From<bool> for HyperparameterValue {
    fn from(value: bool) -> HyperparameterValue {
        HyperparameterValue::Flag(value)
    }
}

impl From<&str> for HyperparameterValue {
    fn from(value: &str) -> HyperparameterValue {
        HyperparameterValue::Text(value.to_owned())
    }
}

impl From<String> for HyperparameterValue {
    fn from(value: String) -> HyperparameterValue {
        HyperparameterValue::Text(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_value_replaces_the_former() {
        let settings = Hyperparameters::new().set("a", 1).set("b", "x").set("a", true);
        let expected = [
            ("a".to_owned(), HyperparameterValue::Flag(true)),
            ("b".to_owned(), HyperparameterValue::Text("x".to_owned())),
        ];
        assert_eq!(settings.values, expected);
    }

    #[test]
    fn an_f32_is_its_decimal_number() {
        assert_eq!(HyperparameterValue::from(0.1_f32), HyperparameterValue::Number(0.1));
    }

    #[test]
    fn numbers_must_be_finite_and_names_not_empty() {
        let error = Hyperparameters::new().set("rate", f64::NAN).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot write the hyperparameter \"rate\": NaN is not finite"
        );
        let error = Hyperparameters::new().set("", 1).check().unwrap_err();
        assert!(matches!(error, SummaryError::NoHyperparameterName));
        assert!(Hyperparameters::new().set("rate", 0.1).check().is_ok());
    }
}
