//! [`BatchReader`]: reads the samples of a range.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pushpull_common::data_set::{DataSet, SampleRange};

use super::samples::{SampleError, SampleReader};
use super::{Batch, DataError, Permutation};

/// The samples of a pipeline, and the data set that they were declared as.
pub(super) struct BatchReader<T> {
    pub(super) samples: Arc<dyn SampleReader<T>>,
    pub(super) data_set: DataSet,
}

impl<T> BatchReader<T> {
    /// Reads a batch. Stops between two samples once `is_stopped`.
    ///
    /// A panic of the source or of a function becomes an error.
    pub(super) fn read(
        &self,
        range: SampleRange,
        is_stopped: &AtomicBool,
    ) -> Result<Batch<T>, DataError> {
        let reached = Cell::new(range.start);
        // After a panic nothing of this crate is used that the panic may have left unfinished: the
        // incomplete batch is dropped. The states of source and functions are their authors'.
        let read = AssertUnwindSafe(|| self.read_samples(range, is_stopped, &reached));
        catch_unwind(read).unwrap_or_else(|payload| {
            Err(DataError::Panicked {
                data_set: self.name(),
                epoch: range.epoch,
                index: reached.get(),
                message: message(payload),
            })
        })
    }

    /// Checks that a range is part of the data set.
    pub(super) fn check(&self, range: SampleRange) -> Result<(), DataError> {
        let samples = self.data_set.samples();
        let batch = self.data_set.batch();
        let epochs = self.data_set.epoch_limit();
        let end = range.start.checked_add(u64::from(range.len));
        let is_inside = (1..=batch).contains(&range.len)
            && end.is_some_and(|end| end <= samples)
            && epochs.is_none_or(|epochs| range.epoch < epochs);
        match is_inside {
            true => Ok(()),
            false => Err(DataError::Range { data_set: self.name(), range, samples, batch, epochs }),
        }
    }

    /// The name of the data set, for errors.
    pub(super) fn name(&self) -> String {
        self.data_set.name().to_owned()
    }

    fn read_samples(
        &self,
        range: SampleRange,
        is_stopped: &AtomicBool,
        reached: &Cell<u64>,
    ) -> Result<Batch<T>, DataError> {
        let declared = self.data_set.samples();
        let found = self.samples.len();
        if found != declared {
            return Err(DataError::LengthChanged { data_set: self.name(), declared, found });
        }
        let order = self.data_set.seed().map(|seed| Permutation::new(seed, range.epoch, declared));
        let capacity = (range.len as usize).min(CAPACITY_MAX);
        let mut indices = Vec::with_capacity(capacity);
        let mut samples = Vec::with_capacity(capacity);
        for position in range.start..range.start + u64::from(range.len) {
            if is_stopped.load(Ordering::Relaxed) {
                return Err(DataError::Stopped { data_set: self.name() });
            }
            let index = order.and_then(|order| order.index(position)).unwrap_or(position);
            reached.set(index);
            let sample = self.samples.sample(index);
            samples.push(sample.map_err(|error| self.sample_error(range, index, error))?);
            indices.push(index);
        }
        Ok(Batch { range, indices, samples })
    }

    fn sample_error(&self, range: SampleRange, index: u64, error: SampleError) -> DataError {
        let data_set = self.name();
        let epoch = range.epoch;
        match error {
            SampleError::Source(source) => DataError::Source { data_set, epoch, index, source },
            SampleError::Map(source) => DataError::Map { data_set, epoch, index, source },
        }
    }
}

/// Returns the message of a panic.
fn message(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<&str>() {
        Ok(text) => return (*text).to_owned(),
        Err(payload) => payload,
    };
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => {
            // The drop of a foreign type may panic in turn, so the value is leaked.
            std::mem::forget(payload);
            "without a message".to_owned()
        }
    }
}

/// The most samples of a batch for which memory is allocated before they are read.
const CAPACITY_MAX: usize = 1 << 16;
