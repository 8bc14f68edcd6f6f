//! [`ModelError`]: why a model computed no gradients.

use std::error::Error as StdError;

use pushpull_common::variable::VariableError;
use pushpull_device::ComputeError;
use thiserror::Error;

use crate::error::ViewError;

/// Why a model computed no gradients.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A variable of the model is refused.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// The model uses a variable that is not declared like this.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The device refused a kernel, or failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// The towers are not all of one model.
    #[error("tower {tower} of a model declares other variables than tower 0")]
    Differs {
        /// The tower, counted from 0.
        tower: usize,
    },
    /// One of several towers failed.
    #[error("tower {tower} of the model failed")]
    Tower {
        /// The tower, counted from 0.
        tower: usize,
        /// Its error.
        source: Box<ModelError>,
    },
    /// The model's own error.
    #[error(transparent)]
    Model(Box<dyn StdError + Send + Sync>),
}

impl ModelError {
    /// Wraps an error of a model.
    pub fn model(error: impl Into<Box<dyn StdError + Send + Sync>>) -> ModelError {
        ModelError::Model(error.into())
    }
}
