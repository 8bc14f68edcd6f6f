//! What a model is worth on samples it has not learned from.

use std::fmt;

use super::data::Dataset;
use super::metrics::{auc, log_loss};
use super::model::{Model, Weights};

/// How good the predictions for a dataset are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Score {
    /// The area under the ROC curve; see [`auc`].
    pub(crate) auc: f64,
    /// See [`log_loss`].
    pub(crate) log_loss: f64,
}

impl Score {
    /// The score of a model whose rows are the whole table. None where there is no AUC: the
    /// predictions are not numbers, or all labels are equal.
    pub(crate) fn of<M: Model<N>, const N: usize>(
        model: &mut M,
        weights: Weights<'_, N>,
        dataset: &Dataset,
    ) -> Option<Score> {
        let mut logits = Vec::with_capacity(dataset.rows());
        model.logits(weights, dataset.samples(), &mut logits);
        let auc = auc(&logits, &dataset.late)?;
        Some(Score { auc, log_loss: log_loss(&logits, &dataset.late) })
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4}    {:.4}", self.auc, self.log_loss)
    }
}
