//! The batches of networks, divided among towers.

use pushpull_device::{Samples, Targets};

use super::Divide;

impl Divide for Samples<'_> {
    fn samples(&self) -> usize {
        self.labels.len()
    }

    fn split_at(self, sample: usize) -> (Self, Self) {
        let features = split_rows(self.features, self.labels.len(), sample);
        let labels = self.labels.split_at(sample);
        let part = |features, labels| Samples { features, labels };
        (part(features.0, labels.0), part(features.1, labels.1))
    }
}

impl Divide for Targets<'_> {
    fn samples(&self) -> usize {
        self.targets.len()
    }

    fn split_at(self, sample: usize) -> (Self, Self) {
        let features = split_rows(self.features, self.targets.len(), sample);
        let targets = self.targets.split_at(sample);
        let part = |features, targets| Targets { features, targets };
        (part(features.0, targets.0), part(features.1, targets.1))
    }
}

/// Cuts values of `rows` rows before a row. A last row that is not whole stays in the second part,
/// whose model refuses it.
fn split_rows(values: &[f32], rows: usize, row: usize) -> (&[f32], &[f32]) {
    let width = values.len().checked_div(rows).unwrap_or(0);
    values.split_at(row * width)
}
