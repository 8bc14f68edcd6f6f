//! The training data: random inputs, and the classes that a fixed teacher assigns to them.

use pushpull::compute::{ComputeError, Device, Matrix, Samples};
use pushpull::variable::{Initializer, Shape};

/// Batches of labelled samples, the same in every run.
#[derive(Debug)]
pub(super) struct Data {
    features: Vec<f32>,
    labels: Vec<u32>,
    batch_rows: usize,
    width: usize,
}

impl Data {
    /// Generates `batches` batches of `batch_rows` samples, each of `width` values of magnitude at
    /// most 1. The class of a sample is the index of the greatest of `classes` linear functions of
    /// it.
    ///
    /// # Errors
    /// [`ComputeError::Spawn`].
    pub(super) fn generate(
        batches: usize,
        batch_rows: usize,
        width: usize,
        classes: usize,
    ) -> Result<Data, ComputeError> {
        let rows = batches * batch_rows;
        let features =
            random("features", rows, width, Initializer::Uniform { low: -1.0, high: 1.0 });
        let teacher =
            random("teacher", width, classes, Initializer::Normal { mean: 0.0, stddev: 1.0 });
        let mut scores = vec![0.0; rows * classes];
        let samples = Matrix::new(&features, rows, width)?;
        let teacher = Matrix::new(&teacher, width, classes)?;
        Device::cpu()?.multiply(samples, teacher, 0.0, &mut scores)?;
        let labels = scores.chunks_exact(classes).map(greatest).collect();
        Ok(Data { features, labels, batch_rows, width })
    }

    /// Returns the number of batches.
    pub(super) fn batches(&self) -> usize {
        self.labels.len() / self.batch_rows
    }

    /// Returns the samples of a batch. The index wraps around.
    pub(super) fn batch(&self, index: usize) -> Samples<'_> {
        let rows = self.batch_rows;
        let first = index % self.batches() * rows;
        Samples {
            features: &self.features[first * self.width..][..rows * self.width],
            labels: &self.labels[first..][..rows],
        }
    }
}

fn random(name: &str, rows: usize, columns: usize, initializer: Initializer) -> Vec<f32> {
    let mut values = vec![0.0; rows * columns];
    // One long row suffices: only the last four initializers depend on the shape.
    let shape = Shape::new([values.len() as u64]).unwrap_or(Shape::scalar());
    initializer.fill(SEED, name, &shape, 0, &mut values);
    values
}

/// Returns the index of the greatest score.
fn greatest(scores: &[f32]) -> u32 {
    let best = (0..scores.len()).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    best.unwrap_or(0) as u32
}

const SEED: u64 = 784;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classes_are_reproducible_and_balanced() {
        let data = Data::generate(6, 50, 20, 4).unwrap();
        assert_eq!((data.batches(), data.labels.len(), data.features.len()), (6, 300, 6000));
        assert!(data.features.iter().all(|value| value.abs() <= 1.0));
        // Balanced: predicting one class always must not pay.
        for class in 0..4 {
            let count = data.labels.iter().filter(|&&label| label == class).count();
            assert!((30..150).contains(&count), "{count} samples of class {class}");
        }
        let again = Data::generate(6, 50, 20, 4).unwrap();
        assert_eq!((again.features, again.labels), (data.features, data.labels));
    }

    #[test]
    fn batches_are_consecutive_and_wrap_around() {
        let data = Data::generate(3, 2, 5, 4).unwrap();
        let [first, last, again] = [0, 2, 3].map(|index| data.batch(index));
        assert_eq!((first.features, first.labels), (&data.features[..10], &data.labels[..2]));
        assert_eq!((last.features, last.labels), (&data.features[20..], &data.labels[4..]));
        assert_eq!((again.features, again.labels), (first.features, first.labels));
    }

    #[test]
    fn the_greatest_score_wins() {
        assert_eq!(greatest(&[-3.0, 2.5, 2.0]), 1);
        assert_eq!(greatest(&[-1.0]), 0);
    }
}
