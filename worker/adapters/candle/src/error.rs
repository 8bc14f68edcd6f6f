//! [`AdapterError`]: why a model of candle cannot train over servers.

use candle_core::DType;
use pushpull::error::{Chain, TrainingError, VariableError, ViewError};
use thiserror::Error;

/// Why a model of candle cannot train over servers, or why a step of it failed.
///
/// Candle's own traits return [`candle_core::Error`], which has the text of this and of its causes.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// A variable has a type that servers do not train.
    #[error("cannot train {name:?}: its elements are {dtype:?}; expected f32, f64, f16 or bf16")]
    DType {
        /// The variable.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// A variable was declared as an embedding that is not one of f32 by rows.
    #[error("cannot look up rows of {name:?}, a variable of {dtype}: expected a sparse one of f32")]
    NotEmbedding {
        /// The variable.
        name: String,
        /// Its type.
        dtype: pushpull::variable::DType,
    },
    /// A pattern of local or mean variables names none.
    #[error("no variable matches the pattern {pattern:?}")]
    Pattern {
        /// The pattern.
        pattern: String,
    },
    /// No embedding of this name is declared.
    #[error("no embedding {name:?} is declared")]
    Embedding {
        /// The name.
        name: String,
    },
    /// The training has ended: there is no step whose gradients could be pushed.
    #[error("the training has ended: {reason}")]
    Ended {
        /// Why it ended.
        reason: String,
    },
    /// The loss has a gradient by none of the variables.
    #[error("the loss depends on none of the variables")]
    NoGradient,
    /// The learning rate was set on the worker.
    #[error(
        "cannot set the learning rate to {asked} on a worker: the optimizer of the servers owns it \
         (it is declared as {declared})"
    )]
    LearningRate {
        /// The rate asked for.
        asked: f64,
        /// The rate that the builder was told.
        declared: f64,
    },
    /// A variable cannot be declared.
    #[error(transparent)]
    Variable(#[from] VariableError),
    /// A variable is used in a way that its declaration does not allow.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The training failed.
    #[error(transparent)]
    Training(#[from] TrainingError),
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<AdapterError> for candle_core::Error {
    fn from(error: AdapterError) -> candle_core::Error {
        match error {
            AdapterError::Candle(error) => error,
            error => candle_core::Error::wrap(Chain(&error).to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull::VariableSpec;

    use super::*;

    #[test]
    fn candles_error_has_the_causes() {
        let error = VariableSpec::f32("w", [0; 40]).unwrap_err();
        let chain = Chain(&error).to_string();
        assert_ne!(chain, error.to_string());
        // A backtrace may follow.
        let error = candle_core::Error::from(AdapterError::from(error)).to_string();
        assert!(error.starts_with(&chain), "{error}");
    }
}
