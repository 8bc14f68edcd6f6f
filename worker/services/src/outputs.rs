//! [`Outputs`]: the named values that a function returns.

use pushpull_common::tensor::Element;
use pushpull_worker::Push;

use super::value::Value;
use super::value_error::ValueError;

/// The named values that a function returns.
///
/// A function may return a single value as it is, which then has the name [`Outputs::NAME`].
///
/// ```
/// use pushpull_services::{Outputs, Value};
///
/// let outputs = Outputs::new().with("loss", 0.5_f32).with("note", "fine");
/// assert_eq!(outputs.get("loss")?.element::<f32>()?, 0.5);
/// assert_eq!(Outputs::from(7_i64).value()?, &Value::from(7_i64));
/// # Ok::<(), pushpull_services::ValueError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    values: Vec<(String, Value)>,
}

impl Outputs {
    /// The name of an output that is returned as a single value.
    pub const NAME: &str = "value";

    /// Returns an empty set of outputs.
    pub fn new() -> Outputs {
        Outputs::default()
    }

    /// Adds a value, or replaces the value of that name.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Outputs {
        let value = value.into();
        match self.values.iter_mut().find(|(other, _)| other == name) {
            Some((_, old)) => *old = value,
            None => self.values.push((name.to_owned(), value)),
        }
        self
    }

    /// Returns the value of this name.
    ///
    /// # Errors
    /// [`ValueError::Unknown`].
    pub fn get(&self, name: &str) -> Result<&Value, ValueError> {
        let found = self.values.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value).ok_or_else(|| self.unknown(name))
    }

    /// Returns the single value.
    ///
    /// # Errors
    /// [`ValueError::Unknown`] if there is none, or more than one.
    pub fn value(&self) -> Result<&Value, ValueError> {
        match &self.values[..] {
            [(_, value)] => Ok(value),
            _ => Err(self.unknown(Outputs::NAME)),
        }
    }

    /// Returns the elements of the single value.
    ///
    /// # Errors
    /// The errors of [`Outputs::value`] and [`Value::view`].
    pub fn view<T: Element>(&self) -> Result<&[T], ValueError> {
        self.value()?.view()
    }

    /// Returns the text of the single value.
    ///
    /// # Errors
    /// The errors of [`Outputs::value`] and [`Value::text`].
    pub fn text(&self) -> Result<&str, ValueError> {
        self.value()?.text()
    }

    /// Returns the only element of the single value.
    ///
    /// # Errors
    /// The errors of [`Outputs::value`] and [`Value::element`].
    pub fn element<T: Element>(&self) -> Result<T, ValueError> {
        self.value()?.element()
    }

    /// Yields the values in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(name, value)| (&name[..], value))
    }

    pub(crate) fn into_values(self) -> Vec<(String, Value)> {
        self.values
    }

    fn unknown(&self, name: &str) -> ValueError {
        unknown_value(name, self.values.iter().map(|(name, _)| &name[..]))
    }
}

/// Returns the error for a name that is not among the known ones.
pub(crate) fn unknown_value<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> ValueError {
    let known: Vec<&str> = known.collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    ValueError::Unknown { name: name.to_owned(), known }
}

impl From<Vec<(String, Value)>> for Outputs {
    fn from(values: Vec<(String, Value)>) -> Outputs {
        values.into_iter().fold(Outputs::new(), |outputs, (name, value)| outputs.with(&name, value))
    }
}

/// The outcome of a push as outputs: its name, such as `applied`, and its step.
impl From<Push> for Outputs {
    fn from(push: Push) -> Outputs {
        let (outcome, step) = match push {
            Push::Applied { step, .. } => ("applied", step),
            Push::Accepted { step } => ("accepted", step),
            Push::Stale { current } => ("stale", current),
            Push::Withdrawn => ("withdrawn", 0),
            Push::Repeated => ("repeated", 0),
            _ => ("unknown", 0),
        };
        Outputs::new().with("outcome", outcome).with("step", step as i64)
    }
}

impl From<()> for Outputs {
    fn from((): ()) -> Outputs {
        Outputs::new()
    }
}

macro_rules! single {
    ($($type:ty),*) => {$(
        impl From<$type> for Outputs {
            fn from(value: $type) -> Outputs {
                Outputs::new().with(Outputs::NAME, value)
            }
        }
    )*};
}
single!(Value, &str, String, f32, f64, i64);
