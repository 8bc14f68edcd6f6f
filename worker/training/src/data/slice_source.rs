//! [`SliceSource`]: samples in memory.

use std::fmt;
use std::sync::Arc;

use super::{Source, SourceError};

/// Samples in memory, with or without labels.
///
/// [`Source::get`] clones a sample. Samples of [`SliceSource::rows`] are shared, so a clone copies
/// no values.
///
/// ```
/// use pushpull_training::data::{SliceSource, Source};
///
/// // Three rows of two features.
/// let features = [0.0_f32, 0.1, 1.0, 1.1, 2.0, 2.1];
/// let source = SliceSource::rows("points", &features, vec![0_u8, 1, 0])?;
/// let (row, label) = source.get(1)?;
/// assert_eq!((&row[..], label), (&[1.0, 1.1][..], 1));
/// # Ok::<(), pushpull_training::data::SourceError>(())
/// ```
#[derive(Clone)]
pub struct SliceSource<S> {
    name: String,
    samples: Vec<S>,
}

impl<S> SliceSource<S> {
    /// Names a list of samples.
    pub fn new(name: impl Into<String>, samples: impl Into<Vec<S>>) -> SliceSource<S> {
        SliceSource { name: name.into(), samples: samples.into() }
    }
}

impl<S, L> SliceSource<(S, L)> {
    /// Pairs each sample with its label.
    ///
    /// # Errors
    /// [`SourceError::Labels`] if there are not as many samples as labels.
    pub fn labelled(
        name: impl Into<String>,
        samples: Vec<S>,
        labels: Vec<L>,
    ) -> Result<Self, SourceError> {
        let name = name.into();
        if samples.len() != labels.len() {
            return Err(SourceError::Labels { name, values: samples.len(), labels: labels.len() });
        }
        Ok(SliceSource { name, samples: samples.into_iter().zip(labels).collect() })
    }
}

impl<T: Clone, L> SliceSource<(Arc<[T]>, L)> {
    /// Cuts values into rows of equal length, one for each label.
    ///
    /// # Errors
    /// [`SourceError::Labels`] if the number of values is not a multiple of the number of labels.
    pub fn rows(
        name: impl Into<String>,
        values: &[T],
        labels: Vec<L>,
    ) -> Result<Self, SourceError> {
        let name = name.into();
        let width = values.len().checked_div(labels.len()).unwrap_or(0);
        if width == 0 || width * labels.len() != values.len() {
            return Err(SourceError::Labels { name, values: values.len(), labels: labels.len() });
        }
        Ok(SliceSource {
            name,
            samples: values.chunks_exact(width).map(Arc::from).zip(labels).collect(),
        })
    }
}

impl<S: Clone + Send + Sync> Source for SliceSource<S> {
    type Sample = S;

    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        self.samples.len() as u64
    }

    fn get(&self, index: u64) -> Result<S, SourceError> {
        let sample = usize::try_from(index).ok().and_then(|at| self.samples.get(at));
        sample.cloned().ok_or_else(|| SourceError::Index {
            name: self.name.clone(),
            index,
            len: self.len(),
        })
    }
}

impl<S> fmt::Debug for SliceSource<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SliceSource { name, samples } = self;
        f.debug_struct("SliceSource").field("name", name).field("samples", &samples.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_by_index() {
        let source = SliceSource::new("words", ["a", "b"]);
        assert_eq!((source.name(), source.len(), source.is_empty()), ("words", 2, false));
        assert_eq!(source.get(1).unwrap(), "b");
        for index in [2, u64::MAX] {
            let error = source.get(index).unwrap_err().to_string();
            let expected = format!("cannot read sample {index} of \"words\": it has 2 samples");
            assert_eq!(error, expected);
        }
        assert_eq!(format!("{source:?}"), "SliceSource { name: \"words\", samples: 2 }");
    }

    #[test]
    fn labels_that_do_not_fit_are_refused() {
        let refused =
            |values, labels| format!("cannot pair {values} values of \"d\" with {labels} labels");
        let error = SliceSource::labelled("d", vec![1, 2, 3], vec![1, 2]).unwrap_err();
        assert_eq!(error.to_string(), refused(3, 2));
        for (values, labels) in [(5, 2), (0, 2), (1, 2), (2, 0), (0, 0)] {
            let error = SliceSource::rows("d", &vec![0; values], vec![0; labels]).unwrap_err();
            assert_eq!(error.to_string(), refused(values, labels));
        }
        let source = SliceSource::labelled("d", vec!["x", "y"], vec![3, 4]).unwrap();
        assert_eq!(source.get(1).unwrap(), ("y", 4));
    }
}
