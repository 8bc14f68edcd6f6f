//! The score of a model on samples it was not trained on.

use std::fmt;

use super::data::FlightData;
use super::metrics::{auc, log_loss};
use super::model::{FlightModel, Weights};

/// The quality of the predictions for a dataset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Score {
    /// Area under the ROC curve; see [`auc`].
    pub(crate) auc: f64,
    /// Mean cross entropy; see [`log_loss`].
    pub(crate) log_loss: f64,
}

impl Score {
    /// Returns the score of a model whose rows are the whole table. `None` if there is no AUC: a
    /// prediction is NaN, or all labels are equal.
    pub(crate) fn of<M: FlightModel<N>, const N: usize>(
        model: &mut M,
        weights: Weights<'_, N>,
        dataset: &FlightData,
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
