//! Why a module cannot be trained.

use burn_core::tensor::DType;
use pushpull::error::{TrainingError, VariableError};
use thiserror::Error;

/// The reason why a module cannot be trained over parameter servers.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// Servers do not keep parameters of this type.
    #[error("cannot train {name:?}: its elements are {dtype:?}; expected F32, F64, F16 or BF16")]
    DType {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// Two parameters have one name.
    #[error("two parameters have the name {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// The module has no parameter that requires a gradient.
    #[error("cannot train a module without parameters that require gradients")]
    NothingToTrain,
    /// A pattern of averaged parameters names none that is not trained.
    #[error("no parameter without gradients matches the pattern {pattern:?}")]
    Pattern {
        /// The pattern.
        pattern: String,
    },
    /// None of the gradients is of a trained parameter.
    #[error("cannot push gradients of which none is of a trained parameter")]
    NoGradient,
    /// The learner has a scheduler that changes its learning rate, which the servers do not use.
    #[error(
        "cannot follow a scheduler of the learner, which changes the rate from {first} to {rate} at \
         step {step}: give the learner a constant rate, and the servers a schedule"
    )]
    Scheduler {
        /// The learning rate of the first step.
        first: f64,
        /// The first step that has another, counted from 1.
        step: u32,
        /// The other rate.
        rate: f64,
    },
    /// There is no step to push for.
    #[error("the training has ended: there is no step after the global step {step}")]
    Ended {
        /// The global step at which it has ended.
        step: u64,
    },
    /// Values cannot be read from the device.
    #[error("cannot read {name:?} from its device: {reason}")]
    Read {
        /// The parameter.
        name: String,
        /// What the device says.
        reason: String,
    },
    /// A parameter cannot be declared.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// The training has failed.
    #[error(transparent)]
    Training(#[from] TrainingError),
}

impl From<pushpull::Error> for AdapterError {
    fn from(error: pushpull::Error) -> AdapterError {
        AdapterError::Training(error.into())
    }
}

impl From<pushpull::error::ViewError> for AdapterError {
    fn from(error: pushpull::error::ViewError) -> AdapterError {
        pushpull::Error::from(error).into()
    }
}
