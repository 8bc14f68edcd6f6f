//! [`SampleReader`]: a source with the functions that map its samples.

use std::error::Error as StdError;
use std::sync::Arc;

use super::{Source, SourceError};

/// The samples that a pipeline reads, from a source through its functions.
pub(super) trait SampleReader<T>: Send + Sync {
    /// The name of the data set.
    fn name(&self) -> &str;

    /// Returns the number of samples in the source.
    fn len(&self) -> u64;

    /// Reads and maps a sample.
    fn sample(&self, index: u64) -> Result<T, SampleError>;
}

/// The reason why a sample cannot be read or mapped.
#[derive(Debug)]
pub(super) enum SampleError {
    /// The source failed to read the sample.
    Source(SourceError),
    /// A function failed to map the sample.
    Map(Box<dyn StdError + Send + Sync>),
}

impl<S: Source> SampleReader<S::Sample> for S {
    fn name(&self) -> &str {
        Source::name(self)
    }

    fn len(&self) -> u64 {
        Source::len(self)
    }

    fn sample(&self, index: u64) -> Result<S::Sample, SampleError> {
        self.get(index).map_err(SampleError::Source)
    }
}

/// The results of a function of other samples.
pub(super) struct MappedSamples<T, F> {
    pub(super) samples: Arc<dyn SampleReader<T>>,
    pub(super) map: F,
}

impl<T, U, F> SampleReader<U> for MappedSamples<T, F>
where
    F: Fn(T) -> Result<U, Box<dyn StdError + Send + Sync>> + Send + Sync,
{
    fn name(&self) -> &str {
        self.samples.name()
    }

    fn len(&self) -> u64 {
        self.samples.len()
    }

    fn sample(&self, index: u64) -> Result<U, SampleError> {
        (self.map)(self.samples.sample(index)?).map_err(SampleError::Map)
    }
}
