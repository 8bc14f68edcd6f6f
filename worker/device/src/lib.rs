//! Compute devices for gradients: a [`Device`], and the kernels that run on it.
//!
//! A model computes gradients from values and samples in its own way. Slices go in and slices come
//! out. The kernels here are the closed set from which the examples and benches build networks
//! whose derivatives are written by hand. They are no tensor library.
//!
//! ```
//! use pushpull_device::{Device, Matrix};
//!
//! let device = Device::pick("auto")?;
//! let (a, b) = ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 1.0]);
//! let mut product = [0.0; 4];
//! device.multiply(Matrix::new(&a, 2, 2)?, Matrix::new(&b, 2, 2)?, 0.0, &mut product)?;
//! assert_eq!(product, a);
//! # Ok::<(), pushpull_device::ComputeError>(())
//! ```
//!
//! Results do not depend on the number of threads. Kernels accept any values: NaN and infinities
//! follow from the arithmetic.

mod cast;
mod codec;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod device_info;
mod error;
#[cfg(feature = "kernels")]
mod kernels;
mod memory;
#[cfg(feature = "kernels")]
mod networks;
mod transfer;

pub use cast::Half;
pub use device::Device;
pub use device_info::{DeviceInfo, cuda_devices, devices};
pub use error::ComputeError;
pub use memory::{Buffer, DeviceElement, Resident, View, ViewMut};
pub use transfer::{HostMemory, PageLock, Pinned, Transfer};

#[cfg(feature = "nccl")]
pub use cuda::nccl::{Nccl, NcclElement, NcclError, NcclId, NcclReduction};

#[cfg(feature = "kernels")]
pub use {
    kernels::activation::Activation,
    kernels::embedding_bag::{Bags, Combiner},
    kernels::gemm::Matrix,
    networks::Network,
    networks::embedding_bag::{EmbeddingBag, LabelledBags},
    networks::logistic::{Logistic, Targets},
    networks::mlp::{Mlp, Samples},
};
