//! The variables of a model, the same for the servers and for the run without servers.

use std::num::NonZeroUsize;

use pushpull::VariableSpec;
use pushpull::error::VariableError;
use pushpull::variable::{DType, Initializer, Partitioner, Shape};

use super::model::FlightModel;
use super::task::TaskError;

/// Name of the table of rows by id.
pub(crate) const TABLE: &str = "table";

/// Name of a plain variable with an element for each worker: above 0 once the worker has trained on
/// its share.
pub(crate) const FINISHED: &str = "workers_finished";

/// The dense tensors of a model and its table.
#[derive(Clone, Debug)]
pub(crate) struct ModelVariables<const N: usize> {
    /// The dense tensors: Glorot weights and zero biases.
    pub(crate) dense: [VariableSpec; N],
    /// A sparse variable with a row per id, in `parts` partitions.
    pub(crate) table: VariableSpec,
    /// Plain variables of the tasks of a cluster.
    of_tasks: Vec<VariableSpec>,
}

impl<const N: usize> ModelVariables<N> {
    /// Returns the variables of a model for `ids` ids. Their initial values depend on `seed`.
    pub(crate) fn of<M: FlightModel<N>>(
        model: &M,
        ids: usize,
        parts: u32,
        seed: u64,
    ) -> Result<ModelVariables<N>, VariableError> {
        let dense = M::NAMES.into_iter().zip(model.shapes()).map(|(name, extents)| {
            let spec = VariableSpec::f32(name, extents)?.seed(seed);
            Ok(match spec.shape().rank() {
                2 => spec.initializer(Initializer::GlorotUniform),
                _ => spec,
            })
        });
        let dense: Vec<VariableSpec> = dense.collect::<Result<_, _>>()?;
        let table = VariableSpec::f32(TABLE, [ids as u64, model.width() as u64])?
            .sparse()
            .initializer(model.rows_initializer())
            .partitioner(Partitioner::Fixed { shards: parts })
            .seed(seed);
        let dense = dense.try_into().expect("a specification for each name");
        Ok(ModelVariables { dense, table, of_tasks: Vec::new() })
    }

    /// Declares the variables of `workers` worker tasks as well: [`FINISHED`], and the numbers of
    /// epochs and of rows in a batch. Each worker takes its share of the batches, so the join of a
    /// worker with other numbers fails with both values.
    pub(crate) fn with_tasks(
        mut self,
        workers: usize,
        epochs: u64,
        batch: NonZeroUsize,
    ) -> Result<ModelVariables<N>, TaskError> {
        let shape = Shape::new([workers as u64])?;
        self.of_tasks.push(VariableSpec::new(FINISHED, DType::I64, shape)?);
        for (name, number) in [("epochs", epochs), ("batch", batch.get() as u64)] {
            let variable = VariableSpec::new(name, DType::I64, Shape::scalar())?;
            // Numbers above 2^53 are equal here if they are nearly equal.
            self.of_tasks.push(variable.initializer(Initializer::Constant(number as f64)));
        }
        Ok(self)
    }

    /// Returns all variables, as they are declared.
    pub(crate) fn all(&self) -> Vec<VariableSpec> {
        let dense = self.dense.iter().cloned();
        dense.chain([self.table.clone()]).chain(self.of_tasks.clone()).collect()
    }
}
