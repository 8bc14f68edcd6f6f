//! The functions that every daemon offers: arithmetic on tensors, element by element.

use pushpull_common::tensor::{DType, Element};

use super::functions::{FunctionError, Functions};
use super::invocation::Invocation;
use super::outputs::Outputs;
use super::value::{Elements, Value};

/// A number on which the functions compute.
trait Number: Element {
    fn of(count: usize) -> Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Number for $number {
            fn of(count: usize) -> $number {
                count as $number
            }
            fn add(self, other: $number) -> $number {
                self + other
            }
            fn mul(self, other: $number) -> $number {
                self * other
            }
            fn div(self, other: $number) -> $number {
                self / other
            }
        }
    )*};
}
numbers!(f32, f64);

pub(super) fn add_to(functions: Functions) -> Functions {
    functions
        .add("add", |call| pairwise(call, f32::add, f64::add))
        .add("mul", |call| pairwise(call, f32::mul, f64::mul))
        .add("div", |call| pairwise(call, f32::div, f64::div))
        .add("mean", |call| {
            let first = call.inputs().next().map(|(_, value)| value.value_type().elements());
            match first {
                None => Err(FunctionError::new("the mean of no values")),
                Some(Elements::Tensor(DType::F64)) => mean::<f64>(call),
                Some(_) => mean::<f32>(call),
            }
        })
        .add("identity", |call| {
            let inputs = call.inputs();
            Ok(inputs.fold(Outputs::new(), |all, (name, value)| all.with(name, value.clone())))
        })
}

fn pairwise(
    call: &Invocation,
    single: fn(f32, f32) -> f32,
    double: fn(f64, f64) -> f64,
) -> Result<Value, FunctionError> {
    match call.input("a")?.value_type().elements() {
        Elements::Tensor(DType::F64) => call.zip(["a", "b"], double),
        _ => call.zip(["a", "b"], single),
    }
}

fn mean<T: Number>(call: &Invocation) -> Result<Value, FunctionError> {
    let mut values = call.inputs().map(|(_, value)| value);
    let count = T::of(values.len());
    let first = values.next().cloned().unwrap_or_else(|| Value::scalar(T::of(0)));
    let sum = values.try_fold(first, |sum, value| sum.zip(value, T::add))?;
    Ok(sum.zip(&Value::scalar(count), T::div)?)
}
