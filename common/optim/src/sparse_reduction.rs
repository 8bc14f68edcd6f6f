//! The reduction of rows that several gradients of one step contain.

/// Rule by which the rows of a step's gradients are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SparseReduction {
    /// Each row's sum divided by the number of gradients. A dense variable becomes the same with
    /// absent rows as zeros. The default.
    #[default]
    ReplicaMean,
    /// Each row's sum divided by the number of gradients that contain the row: the mean of
    /// TensorFlow's `SparseConditionalAccumulator`. Rows that few replicas touch move further than
    /// under `ReplicaMean`.
    #[doc(alias = "SparseConditionalAccumulator")]
    RowMean,
    /// Each row's sum.
    Sum,
}
