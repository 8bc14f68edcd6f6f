//! The variables of a model, the same for the servers and for the run without servers.

use pushpull::VariableSpec;
use pushpull::error::VariableError;
use pushpull::variable::{DType, Initializer, Partitioner, Shape};

use super::model::FlightModel;

/// Name of the table of rows by id.
pub(crate) const TABLE: &str = "table";

/// Name of a plain variable that counts the workers that have trained on their shares.
pub(crate) const FINISHED_COUNT: &str = "workers_finished";

/// The dense tensors of a model and its table.
#[derive(Clone, Debug)]
pub(crate) struct ModelVariables<const N: usize> {
    /// The dense tensors: Glorot weights and zero biases.
    pub(crate) dense: [VariableSpec; N],
    /// A sparse variable with a row per id, in `parts` partitions.
    pub(crate) table: VariableSpec,
    finished: VariableSpec,
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
        let finished = VariableSpec::new(FINISHED_COUNT, DType::I64, Shape::scalar())?;
        Ok(ModelVariables { dense, table, finished })
    }

    /// Returns all variables, as they are declared.
    pub(crate) fn all(&self) -> Vec<VariableSpec> {
        let more = [self.table.clone(), self.finished.clone()];
        self.dense.iter().cloned().chain(more).collect()
    }
}
