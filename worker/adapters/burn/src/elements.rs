//! Elements of burn's types as those of the servers.

use burn_core::tensor::{DType, TensorData};
use pushpull::variable::{DType as Shared, Element};

use crate::error::AdapterError;

/// Evaluates an expression with `T` as the type of elements of a `DType` that [`dtype_of`] knows.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            burn_core::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            burn_core::tensor::DType::F16 => {
                type $T = pushpull::variable::f16;
                $body
            }
            burn_core::tensor::DType::BF16 => {
                type $T = pushpull::variable::bf16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Returns the type in which servers keep elements, if they do.
pub(crate) fn dtype_of(dtype: DType) -> Option<Shared> {
    match dtype {
        DType::F64 => Some(Shared::F64),
        DType::F32 => Some(Shared::F32),
        DType::F16 => Some(Shared::F16),
        DType::BF16 => Some(Shared::Bf16),
        _ => None,
    }
}

/// Returns the elements of a parameter's data.
pub(crate) fn elements<'a, T: Element + burn_core::tensor::Element>(
    name: &str,
    data: &'a TensorData,
) -> Result<&'a [T], AdapterError> {
    data.as_slice::<T>()
        .map_err(|error| AdapterError::Read { name: name.to_owned(), reason: format!("{error:?}") })
}
