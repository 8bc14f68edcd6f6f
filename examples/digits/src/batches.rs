//! [`Batches`]: the batches that a worker trains on.

use pushpull::blocking::Step;
use pushpull::training::data::{Batch, DataSet, GrantedBatches, StaticSplit};

use super::data::{Sample, Split};
use super::options::DigitsOptions;
use super::task::TaskError;
use super::train;

/// The batches of one worker.
pub(crate) enum Batches {
    /// Those that the servers grant, out of the data set that all workers share.
    Granted(GrantedBatches<Sample>),
    /// Those of the worker's own share, which no other worker has.
    OwnShare(StaticSplit<Sample>),
}

impl Batches {
    /// Begins to read.
    pub(crate) fn new(options: &DigitsOptions, split: &Split) -> Result<Batches, TaskError> {
        let pipeline = train::pipeline(options, split);
        Ok(match options.has_own_share {
            false => Batches::Granted(GrantedBatches::new(pipeline.loader()?)),
            true => Batches::OwnShare(pipeline.shard(0, 1)?),
        })
    }

    /// Returns what the worker declares to the servers, if they grant its batches.
    pub(crate) fn declared(&self) -> Option<&DataSet> {
        match self {
            Batches::Granted(batches) => Some(batches.data_set()),
            Batches::OwnShare(_) => None,
        }
    }

    /// Returns the batch of a step.
    pub(crate) fn of_step(&mut self, step: &Step<'_>) -> Result<Batch<Sample>, TaskError> {
        match self {
            Batches::Granted(batches) => Ok(step.load(batches)?),
            Batches::OwnShare(batches) => Ok(batches.next().ok_or("the share has ended")??),
        }
    }
}
