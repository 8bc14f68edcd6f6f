//! NCCL: NVIDIA's collectives among CUDA devices, on machines that have the library.
//!
//! `library` opens it at run time, `communicator` runs its collectives under deadlines, and
//! `nccl_error` names what went wrong. The first two alone are unsafe.

mod communicator;
mod library;
mod nccl_error;

pub use communicator::{Nccl, NcclElement, NcclReduction};
pub use library::NcclId;
pub use nccl_error::NcclError;
