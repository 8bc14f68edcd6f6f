//! [`StaticSplit`]: one worker's share of the data, without a session.

use pushpull_common::data_set::DataSet;

use super::{Batch, DataError, Loader};

/// The batches of one of `count` workers, over all epochs: an iterator, from
/// [`Pipeline::shard`](super::Pipeline::shard).
///
/// The batches of all epochs are numbered in one sequence. Worker `index` reads those whose number
/// is `index` modulo `count`. So every batch belongs to one worker. The numbers of batches of two
/// workers differ by at most one, in each epoch and over all.
///
/// The share is fixed: if a worker is lost, so are its samples, and a worker that starts again
/// repeats its own. A training session grants ranges instead.
///
/// Batches are read ahead as the pipeline says. An item that is an error stands for its batch. The
/// next item is the next batch.
#[derive(Debug)]
#[must_use = "an iterator reads when it is advanced"]
pub struct StaticSplit<T> {
    loader: Loader<T>,
    /// The next batch to submit, by its number among the batches of all epochs.
    next: u64,
    /// The number of workers, which share the samples.
    count: u64,
    /// Whether nothing more can be submitted, because the loader has stopped.
    is_stopped: bool,
}

impl<T> StaticSplit<T> {
    pub(super) fn start(
        loader: Loader<T>,
        index: u64,
        count: u64,
    ) -> Result<StaticSplit<T>, DataError> {
        if index >= count {
            let data_set = loader.data_set().name().to_owned();
            return Err(DataError::Split { data_set, index, count });
        }
        Ok(StaticSplit { loader, next: index, count, is_stopped: false })
    }

    /// The declaration of the data.
    pub fn data_set(&self) -> &DataSet {
        self.loader.data_set()
    }

    /// Submits ranges while there are any, and room for them.
    fn fill(&mut self) -> Result<(), DataError> {
        let all = self.loader.data_set().all_batches();
        while self.next < all && self.loader.has_room() && !self.is_stopped {
            let range = self.loader.data_set().range(self.next);
            self.loader.submit(range).inspect_err(|_| self.is_stopped = true)?;
            self.next = self.next.saturating_add(self.count);
        }
        Ok(())
    }
}

impl<T> Iterator for StaticSplit<T> {
    type Item = Result<Batch<T>, DataError>;

    fn next(&mut self) -> Option<Result<Batch<T>, DataError>> {
        match self.fill() {
            Ok(()) => self.loader.blocking_take(),
            Err(error) => Some(Err(error)),
        }
    }
}
