//! The vectors.

use serde_json::Value;

/// What TensorFlow 2.21.0 was seen to do.
pub(super) fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

pub(super) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}
