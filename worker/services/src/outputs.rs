//! What a function returns: values by name.

use pushpull_common::tensor::Element;
use pushpull_worker::Push;

use super::value::Value;
use super::value_error::ValueError;

/// What a function returns: values by name.
///
/// A function that returns a single value may return it as it is. Its name is
/// [`Outputs::NAME`] then.
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
    /// The name of a single value.
    pub const NAME: &str = "value";

    /// No values.
    pub fn new() -> Outputs {
        Outputs::default()
    }

    /// Adds a value. A value of that name is replaced.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Outputs {
        let value = value.into();
        match self.values.iter_mut().find(|(other, _)| other == name) {
            Some((_, old)) => *old = value,
            None => self.values.push((name.to_owned(), value)),
        }
        self
    }

    /// The value of this name.
    ///
    /// # Errors
    /// [`ValueError::Unknown`].
    pub fn get(&self, name: &str) -> Result<&Value, ValueError> {
        let found = self.values.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value).ok_or_else(|| self.unknown(name))
    }

    /// The single value.
    ///
    /// # Errors
    /// [`ValueError::Unknown`] if there is none, or more than one.
    pub fn value(&self) -> Result<&Value, ValueError> {
        match &self.values[..] {
            [(_, value)] => Ok(value),
            _ => Err(self.unknown(Outputs::NAME)),
        }
    }

    /// The elements of the single value.
    ///
    /// # Errors
    /// Those of [`Outputs::value`] and [`Value::view`].
    pub fn view<T: Element>(&self) -> Result<&[T], ValueError> {
        self.value()?.view()
    }

    /// The text of the single value.
    ///
    /// # Errors
    /// Those of [`Outputs::value`] and [`Value::text`].
    pub fn text(&self) -> Result<&str, ValueError> {
        self.value()?.text()
    }

    /// The single number that the single value has.
    ///
    /// # Errors
    /// Those of [`Outputs::value`] and [`Value::element`].
    pub fn element<T: Element>(&self) -> Result<T, ValueError> {
        self.value()?.element()
    }

    /// The values in the order in which they were added.
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

/// The outcome, such as `applied`, and the step that it names.
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
