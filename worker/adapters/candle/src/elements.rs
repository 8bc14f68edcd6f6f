//! Copies between tensors of candle and slices.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor, Var, WithDType};
use pushpull::variable::{Element, bf16, f16};

/// An element of variables that both sides have.
pub(crate) trait SharedElement: Element + WithDType {
    /// Returns the elements of a storage of this type.
    fn of(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! shared_element {
    ($type:ty, $variant:ident) => {
        impl SharedElement for $type {
            fn of(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

shared_element!(f32, F32);
shared_element!(f64, F64);
shared_element!(f16, F16);
shared_element!(bf16, BF16);

/// Runs code with `$element` as the type of a variable that is known to be shared.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $code:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $code
            }
            candle_core::DType::F64 => {
                type $element = f64;
                $code
            }
            candle_core::DType::F16 => {
                type $element = pushpull::variable::f16;
                $code
            }
            candle_core::DType::BF16 => {
                type $element = pushpull::variable::bf16;
                $code
            }
            other => unreachable!("a variable of {other:?} is refused when it is declared"),
        }
    };
}
pub(crate) use with_element;

/// Returns the type that servers give to a variable, if they train it.
pub(crate) fn dtype_of(dtype: DType) -> Option<pushpull::variable::DType> {
    match dtype {
        DType::F32 => Some(pushpull::variable::DType::F32),
        DType::F64 => Some(pushpull::variable::DType::F64),
        DType::F16 => Some(pushpull::variable::DType::F16),
        DType::BF16 => Some(pushpull::variable::DType::Bf16),
        _ => None,
    }
}

/// Calls `read` with the elements of a tensor, in row-major order. Copies only those of another
/// device, and those that are not contiguous.
pub(crate) fn with_elements<T: SharedElement, R>(
    tensor: &Tensor,
    read: impl FnOnce(&[T]) -> R,
) -> candle_core::Result<R> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("a tensor that was moved to the CPU is not there")
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("a tensor that was made contiguous is not")
    };
    Ok(read(&storage.as_slice::<T>()?[start..end]))
}

/// Replaces the elements of a variable. In place on the CPU, and by one copy on another device.
pub(crate) fn set_elements<T: SharedElement>(
    variable: &Var,
    values: &[T],
) -> candle_core::Result<()> {
    match variable.device() {
        Device::Cpu => variable.inplace_op1(&SetElements(RefCell::new(values))),
        device => variable.set(&Tensor::from_slice(values, variable.shape(), device)?),
    }
}

/// Replaces the elements of a tensor in place.
struct SetElements<'a, T>(RefCell<&'a [T]>);

impl<T: SharedElement> InplaceOp1 for SetElements<'_, T> {
    fn name(&self) -> &'static str {
        "pushpull-set"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (Some(elements), Some((start, end))) = (T::of(storage), layout.contiguous_offsets())
        else {
            candle_core::bail!("a variable has another type, or is not contiguous")
        };
        elements[start..end].copy_from_slice(&self.0.borrow());
        Ok(())
    }
}
