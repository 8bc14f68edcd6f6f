//! [`Source`]: a numbered collection of samples.

use std::sync::Arc;

use super::SourceError;

/// A numbered collection of samples.
///
/// The threads of a [`Loader`](super::Loader) call [`Source::get`] concurrently. An error or a
/// panic of one call fails the batch that needs the sample, and no other batch.
///
/// All workers of a cluster must have the same samples under the same indices, because the servers
/// grant ranges of indices. [`Pipeline::data_set`](super::Pipeline::data_set) declares the name and
/// the length, which the workers must agree on.
///
/// ```
/// use pushpull_training::data::{Pipeline, Source, SourceError};
///
/// /// The numbers below 1,000 with their squares.
/// struct Squares;
///
/// impl Source for Squares {
///     type Sample = (f32, f32);
///     fn name(&self) -> &str {
///         "squares"
///     }
///     fn len(&self) -> u64 {
///         1_000
///     }
///     fn get(&self, index: u64) -> Result<(f32, f32), SourceError> {
///         let x = index as f32;
///         Ok((x, x * x))
///     }
/// }
///
/// let mut batches = Pipeline::new(Squares).batch(2).shard(0, 1)?;
/// let first = batches.next().ok_or("there are 500 batches")??;
/// assert_eq!(first.samples, [(0.0, 0.0), (1.0, 1.0)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Source: Send + Sync {
    /// The type of a sample.
    type Sample: Send;

    /// The name of the data set, by which errors and the servers call it: 1 to 128 bytes.
    fn name(&self) -> &str;

    /// The number of samples. It must not change while a pipeline uses the source:
    /// [`DataError::LengthChanged`](super::DataError::LengthChanged) otherwise.
    fn len(&self) -> u64;

    /// Reads a sample, by its index below [`Source::len`].
    ///
    /// # Errors
    /// [`SourceError::other`] wraps any error of a source of your own.
    fn get(&self, index: u64) -> Result<Self::Sample, SourceError>;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<S: Source + ?Sized> Source for Arc<S> {
    type Sample = S::Sample;

    fn name(&self) -> &str {
        (**self).name()
    }

    fn len(&self) -> u64 {
        (**self).len()
    }

    fn get(&self, index: u64) -> Result<S::Sample, SourceError> {
        (**self).get(index)
    }
}
