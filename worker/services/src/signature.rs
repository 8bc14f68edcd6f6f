//! [`Signature`]: the inputs and outputs of a function, checked before it runs.

use std::fmt;

use pushpull_common::protocol::limits;
use pushpull_common::tensor::{DType, Shape};

use super::value::{Elements, Value, ValueType};

/// The inputs and outputs of a function, by name and type.
///
/// A function without a signature takes any inputs. A function with a signature takes exactly its
/// inputs: a call with others is refused before the function runs. Outputs of other types are an
/// error of the call.
///
/// ```
/// use pushpull_common::tensor::DType;
/// use pushpull_services::Signature;
///
/// // Rows of 64 pixels, as many as the caller likes, and one loss.
/// let signature = Signature::new()
///     .input("pixels", DType::F32, [None, Some(64)])
///     .output("loss", DType::F32, []);
/// assert_eq!(signature.to_string(), "(pixels: f32 [?, 64]) -> (loss: f32 [])");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    inputs: Vec<Slot>,
    outputs: Vec<Slot>,
}

/// A named input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slot {
    name: String,
    dtype: DType,
    /// The extents of the axes; `None` for any extent.
    extents: Vec<Option<u64>>,
}

impl Slot {
    /// Returns the reason why a type does not suit.
    fn mismatch(&self, is: &ValueType) -> Option<String> {
        let suits = |(&expected, &found): (&Option<u64>, &u64)| expected.is_none_or(|e| e == found);
        let extents = is.shape().extents();
        let shape =
            extents.len() == self.extents.len() && self.extents.iter().zip(extents).all(suits);
        match is.elements() == Elements::Tensor(self.dtype) && shape {
            true => None,
            false => Some(format!("it is {is}, not {self}")),
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent =
            |extent: &Option<u64>| extent.map_or("?".to_owned(), |extent| extent.to_string());
        let extents: Vec<String> = self.extents.iter().map(extent).collect();
        write!(f, "{} [{}]", Elements::Tensor(self.dtype), extents.join(", "))
    }
}

/// A value that does not suit a signature: its name and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) name: String,
    pub(crate) detail: String,
}

impl Signature {
    /// Returns a signature without inputs and outputs.
    pub fn new() -> Signature {
        Signature { inputs: Vec::new(), outputs: Vec::new() }
    }

    /// Adds a tensor as an input. `None` is any extent.
    ///
    /// # Panics
    /// If the name is empty, too long or there already, or there are more than 64 inputs or 8 axes.
    pub fn input(
        mut self,
        name: &str,
        dtype: DType,
        extents: impl Into<Vec<Option<u64>>>,
    ) -> Signature {
        add(&mut self.inputs, name, dtype, extents.into());
        self
    }

    /// Adds a tensor as an output. `None` is any extent.
    ///
    /// # Panics
    /// Under the conditions of [`Signature::input`].
    pub fn output(
        mut self,
        name: &str,
        dtype: DType,
        extents: impl Into<Vec<Option<u64>>>,
    ) -> Signature {
        add(&mut self.outputs, name, dtype, extents.into());
        self
    }

    /// Checks the names of inputs, and the types of those that are known.
    pub(crate) fn check_inputs<'a>(
        &self,
        inputs: impl Iterator<Item = (&'a str, Option<&'a ValueType>)>,
    ) -> Result<(), Mismatch> {
        check(&self.inputs, inputs)
    }

    /// Checks the names and types of outputs.
    pub(crate) fn check_outputs(&self, outputs: &[(String, Value)]) -> Result<(), Mismatch> {
        let outputs = outputs.iter();
        check(&self.outputs, outputs.map(|(name, value)| (&name[..], Some(value.value_type()))))
    }
}

fn add(slots: &mut Vec<Slot>, name: &str, dtype: DType, extents: Vec<Option<u64>>) {
    assert!(
        !name.is_empty() && name.len() <= limits::VALUE_NAME_BYTES_MAX,
        "a name of an input or output has 1 to {} bytes: {name:?}",
        limits::VALUE_NAME_BYTES_MAX
    );
    assert!(slots.iter().all(|slot| slot.name != name), "{name:?} is there already");
    assert!(slots.len() < limits::CALL_VALUES_MAX, "a function has too many inputs or outputs");
    assert!(extents.len() <= Shape::RANK_MAX, "{name:?} has too many axes");
    slots.push(Slot { name: name.to_owned(), dtype, extents });
}

fn check<'a>(
    slots: &[Slot],
    values: impl Iterator<Item = (&'a str, Option<&'a ValueType>)>,
) -> Result<(), Mismatch> {
    let mismatch = |name: &str, detail: String| Mismatch { name: name.to_owned(), detail };
    let mut found = vec![false; slots.len()];
    for (name, is) in values {
        let Some(index) = slots.iter().position(|slot| slot.name == name) else {
            return Err(mismatch(name, "the function has none of this name".to_owned()));
        };
        found[index] = true;
        if let Some(detail) = is.and_then(|is| slots[index].mismatch(is)) {
            return Err(mismatch(name, detail));
        }
    }
    match found.iter().position(|found| !found) {
        None => Ok(()),
        Some(missing) => {
            let slot = &slots[missing];
            Err(mismatch(&slot.name, format!("it is missing, and is {slot}")))
        }
    }
}

impl Default for Signature {
    fn default() -> Signature {
        Signature::new()
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |slots: &[Slot]| {
            let slots = slots.iter().map(|slot| format!("{}: {slot}", slot.name));
            slots.collect::<Vec<_>>().join(", ")
        };
        write!(f, "({}) -> ({})", list(&self.inputs), list(&self.outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature() -> Signature {
        let inputs = Signature::new().input("x", DType::F32, [None, Some(2)]);
        inputs.input("rate", DType::F64, []).output("loss", DType::F32, [])
    }

    #[test]
    fn inputs_are_checked_by_name_type_and_shape() {
        let signature = signature();
        let right = Value::zeros::<f32>(&[5, 2]).unwrap();
        let wide = Value::zeros::<f32>(&[5, 3]).unwrap();
        let double = Value::zeros::<f64>(&[5, 2]).unwrap();
        let rate = Value::scalar(0.5_f64);
        let text = Value::from("n");
        let problem = |values: &[(&str, Option<&Value>)]| {
            let types = values.iter().map(|(name, value)| (*name, value.map(Value::value_type)));
            signature.check_inputs(types).err().map(|m| format!("{}: {}", m.name, m.detail))
        };
        assert_eq!(problem(&[("x", Some(&right)), ("rate", Some(&rate))]), None);
        assert_eq!(problem(&[("rate", Some(&rate)), ("x", None)]), None);
        let table = [
            (vec![("x", Some(&wide)), ("rate", None)], "x: it is f32 [5, 3], not f32 [?, 2]"),
            (vec![("x", Some(&double)), ("rate", None)], "x: it is f64 [5, 2], not f32 [?, 2]"),
            (vec![("x", Some(&text)), ("rate", None)], "x: it is bytes [1], not f32 [?, 2]"),
            (vec![("x", Some(&right))], "rate: it is missing, and is f64 []"),
            (vec![("y", None)], "y: the function has none of this name"),
        ];
        for (values, expected) in table {
            assert_eq!(problem(&values).as_deref(), Some(expected));
        }
    }

    #[test]
    fn outputs_are_checked_likewise() {
        let signature = signature();
        let outputs = |value: Value| [("loss".to_owned(), value)];
        assert_eq!(signature.check_outputs(&outputs(Value::scalar(1.0_f32))), Ok(()));
        assert!(signature.check_outputs(&outputs(Value::scalar(1.0_f64))).is_err());
        assert!(signature.check_outputs(&[]).is_err());
    }

    #[test]
    #[should_panic = "\"x\" is there already"]
    fn a_name_is_given_once() {
        let _ = Signature::new().input("x", DType::F32, []).input("x", DType::F64, []);
    }
}
