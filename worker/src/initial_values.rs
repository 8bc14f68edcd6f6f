//! The first values that the chief sets instead of the initializers of the variables.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;

use crate::error::{Error, ViewError};
use crate::gradients::sharding_plan::ShardingPlan;
pub(crate) use file_rows::{FileRows, RowPiece};
pub use load_options::LoadOptions;

mod file_rows;
mod load;
mod load_options;

/// The first values of variables, set by the closure that the chief passes to
/// [`crate::Worker::join`].
///
/// The servers initialize the other variables with their initializers.
#[derive(Debug)]
#[doc(alias = "init_fn")]
pub struct InitialValues<'a> {
    plan: &'a ShardingPlan,
    tensors: InitialTensors,
    fault: Option<Error>,
}

/// The first values that are set: dense variables in memory, rows in the files that have them.
#[derive(Clone, Debug, Default)]
pub(crate) struct InitialTensors {
    pub(crate) dense: BTreeMap<VariableId, Bytes>,
    pub(crate) rows: BTreeMap<VariableId, FileRows>,
}

impl<'a> InitialValues<'a> {
    pub(crate) fn new(plan: &'a ShardingPlan) -> InitialValues<'a> {
        InitialValues { plan, tensors: InitialTensors::default(), fault: None }
    }

    /// Sets the first values of a dense variable, in row-major order. A later call replaces an
    /// earlier one. Wrong names, types and lengths are errors of `join`: [`crate::Error::View`].
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> &mut Self {
        match padded_bytes(self.plan, name, values) {
            Ok((id, bytes)) => {
                self.tensors.dense.insert(id, bytes);
            }
            Err(fault) => {
                self.fault.get_or_insert(fault.into());
            }
        }
        self
    }

    /// Sets the first values of all variables from safetensors files, by their names.
    ///
    /// `path` is one of these:
    ///
    /// - a file in the safetensors format;
    /// - the index of a sharded checkpoint, as Hugging Face writes it: a JSON file whose
    ///   `weight_map` names the file below its folder that has each tensor;
    /// - a folder with a `model.safetensors`, or else with a `model.safetensors.index.json`.
    ///
    /// Each variable has a tensor of its name, and there are no others:
    ///
    /// - A dense or sparse variable has a tensor of its type and shape.
    /// - A table has two, as `pushpull export` writes them: its rows, and under its name and `:ids`
    ///   as many 64-bit ids. The rows are admitted without the table's
    ///   [`RowAdmission`](pushpull_common::table::RowAdmission), and have the age of step 0.
    ///
    /// The files must not change before `join` returns. An error is one of `join`: [`Error::Load`].
    /// Rows that the servers refuse are errors as in [`crate::Worker::assign_rows`].
    ///
    /// Cost: reads each tensor once, and the ids of a table twice. Dense variables are kept in memory
    /// until `join` returns. Rows are read and sent in pieces of 4 MiB. The check of a table's ids
    /// takes 8 bytes of memory for each. The other workers wait for the chief, for at most
    /// [`crate::WorkerConfig::connect_timeout`].
    pub fn load(&mut self, path: impl AsRef<Path>) {
        self.load_with(path, &LoadOptions::new());
    }

    /// Sets the first values of variables from safetensors files, as [`InitialValues::load`] does,
    /// with other names, or only of some.
    ///
    /// ```no_run
    /// # use pushpull_worker::{InitialValues, LoadOptions};
    /// # fn fill(initial: &mut InitialValues<'_>) {
    /// let options = LoadOptions::new()
    ///     .rename("hidden/weights", "encoder.layers.0.weight")
    ///     .allow_extra(true);
    /// initial.load_with("pretrained.safetensors", &options);
    /// # }
    /// ```
    pub fn load_with(&mut self, path: impl AsRef<Path>, options: &LoadOptions) {
        match load::load(self.plan, path.as_ref(), options) {
            Ok(InitialTensors { dense, rows }) => {
                self.tensors.dense.extend(dense);
                self.tensors.rows.extend(rows);
            }
            Err(fault) => {
                self.fault.get_or_insert(fault.into());
            }
        }
    }

    /// Returns the values that are set. An error is kept for [`InitialValues::finish`].
    pub(crate) fn tensors(&self) -> &InitialTensors {
        &self.tensors
    }

    /// Sets values that were taken from another attempt with the same variables.
    pub(crate) fn set_tensors(&mut self, tensors: InitialTensors) {
        self.tensors = tensors;
    }

    /// Returns the values, or the first error.
    pub(crate) fn finish(self) -> Result<InitialTensors, Error> {
        match self.fault {
            None => Ok(self.tensors),
            Some(fault) => Err(fault),
        }
    }
}

/// Returns the id of a variable, if `values` are all its elements.
pub(crate) fn check_whole<T: Element>(
    plan: &ShardingPlan,
    name: &str,
    values: &[T],
) -> Result<VariableId, ViewError> {
    let (id, range) = plan.locate::<T>(name)?;
    if size_of_val(values) != range.len() {
        let shape = plan.catalogue().variable(id).shape().to_string();
        let name = name.to_owned();
        let elements = values.len();
        return Err(ViewError::Length { name, elements, shape });
    }
    Ok(id)
}

/// Returns the id of a variable and its elements as bytes, with the padding that is sent behind
/// them.
pub(crate) fn padded_bytes<T: Element>(
    plan: &ShardingPlan,
    name: &str,
    values: &[T],
) -> Result<(VariableId, Bytes), ViewError> {
    let id = check_whole(plan, name, values)?;
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let mut copy = Vec::with_capacity(bytes.len().next_multiple_of(8));
    copy.extend_from_slice(bytes);
    copy.resize(bytes.len().next_multiple_of(8), 0);
    Ok((id, copy.into()))
}

#[cfg(test)]
mod tests;
