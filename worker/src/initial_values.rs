//! The first values that the chief sets instead of the initializers of the variables.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bytes::Bytes;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;

use crate::error::{Error, LoadError, ViewError};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::safetensors_file::{SafetensorsFile, can_cast, dtype_of};

/// The first values of variables, set by the closure that the chief passes to
/// [`crate::Worker::join`].
///
/// The servers initialize the other variables with their initializers.
#[derive(Debug)]
#[doc(alias = "init_fn")]
pub struct InitialValues<'a> {
    plan: &'a ShardingPlan,
    values: BTreeMap<VariableId, Bytes>,
    fault: Option<Error>,
}

impl<'a> InitialValues<'a> {
    pub(crate) fn new(plan: &'a ShardingPlan) -> InitialValues<'a> {
        InitialValues { plan, values: BTreeMap::new(), fault: None }
    }

    /// Sets the first values of a dense variable, in row-major order. A later call replaces an
    /// earlier one. Wrong names, types and lengths are errors of `join`: [`crate::Error::View`].
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> &mut Self {
        match padded_bytes(self.plan, name, values) {
            Ok((id, bytes)) => {
                self.values.insert(id, bytes);
            }
            Err(fault) => {
                self.fault.get_or_insert(fault.into());
            }
        }
        self
    }

    /// Sets the first values of all dense variables from a safetensors file, by their names.
    ///
    /// The file must have a tensor of the same type and shape for each of them, and no others. An
    /// error is one of `join`: [`Error::Load`].
    ///
    /// Cost: reads the file once, tensor by tensor.
    pub fn load(&mut self, path: impl AsRef<Path>) {
        self.load_with(path, &LoadOptions::new());
    }

    /// Sets the first values of variables from a safetensors file, as [`InitialValues::load`] does,
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
        match read(self.plan, path.as_ref(), options) {
            Ok(values) => self.values.extend(values),
            Err(fault) => {
                self.fault.get_or_insert(fault.into());
            }
        }
    }

    /// Returns the values that are set. An error is kept for [`InitialValues::finish`].
    pub(crate) fn values(&self) -> &BTreeMap<VariableId, Bytes> {
        &self.values
    }

    /// Sets values that were taken from another attempt with the same variables.
    pub(crate) fn set_values(&mut self, values: BTreeMap<VariableId, Bytes>) {
        self.values = values;
    }

    /// Returns the values, or the first error.
    pub(crate) fn finish(self) -> Result<BTreeMap<VariableId, Bytes>, Error> {
        match self.fault {
            None => Ok(self.values),
            Some(fault) => Err(fault),
        }
    }
}

/// Which tensors of a file fill which variables. By default those of equal names, and each
/// dense variable has one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The names of tensors, by variable.
    renames: BTreeMap<String, String>,
    allows_missing: bool,
    allows_extra: bool,
    casts: bool,
}

impl LoadOptions {
    /// Returns the default options.
    pub fn new() -> LoadOptions {
        LoadOptions::default()
    }

    /// Fills a variable from a tensor of another name.
    pub fn rename(mut self, variable: impl Into<String>, tensor: impl Into<String>) -> LoadOptions {
        self.renames.insert(variable.into(), tensor.into());
        self
    }

    /// Whether variables may be missing in the file. They keep their initializers. Default: no.
    pub fn allow_missing(self, allows: bool) -> LoadOptions {
        LoadOptions { allows_missing: allows, ..self }
    }

    /// Whether the file may have tensors for which there is no variable. Default: no.
    pub fn allow_extra(self, allows: bool) -> LoadOptions {
        LoadOptions { allows_extra: allows, ..self }
    }

    /// Whether elements of `f16`, `bf16`, `f32` and `f64` are cast to the type of their variable,
    /// rounded to the nearest number of it. A finite number beyond its range is an error. Default:
    /// no, the types are the same.
    pub fn cast(self, casts: bool) -> LoadOptions {
        LoadOptions { casts, ..self }
    }

    /// Returns the name of a variable's tensor.
    fn tensor_of<'a>(&'a self, variable: &'a str) -> &'a str {
        self.renames.get(variable).map_or(variable, String::as_str)
    }
}

/// Reads the values of variables from a file.
fn read(
    plan: &ShardingPlan,
    path: &Path,
    options: &LoadOptions,
) -> Result<BTreeMap<VariableId, Bytes>, LoadError> {
    let mut file = SafetensorsFile::open(path)?;
    let path = || path.to_owned();
    if let Some(variable) = options.renames.keys().find(|name| plan.find(name).is_err()) {
        return Err(LoadError::Rename { path: path(), variable: variable.clone() });
    }
    let mut values = BTreeMap::new();
    let mut used = BTreeSet::new();
    for (index, variable) in plan.catalogue().variables().iter().enumerate() {
        let (name, tensor) = (variable.name().to_owned(), options.tensor_of(variable.name()));
        let Some(info) = file.info(tensor) else {
            if variable.is_sparse() || options.allows_missing {
                continue;
            }
            return Err(LoadError::Missing { path: path(), variable: name, tensor: tensor.into() });
        };
        if variable.is_sparse() {
            return Err(LoadError::Sparse { path: path(), variable: name });
        }
        let found = dtype_of(info);
        let is_cast = options.casts && found.is_some_and(|found| can_cast(found, variable.dtype()));
        if found != Some(variable.dtype()) && !is_cast {
            let tensor = tensor.to_owned();
            let found = info.dtype.to_string();
            let dtype = variable.dtype();
            return Err(LoadError::Type { path: path(), tensor, found, variable: name, dtype });
        }
        let extents = info.shape.iter().map(|&extent| extent as u64);
        let same = extents.eq(variable.shape().extents().iter().copied());
        if !same {
            let tensor = tensor.to_owned();
            let shape = variable.shape().to_string();
            let found = format!("{:?}", info.shape);
            return Err(LoadError::Shape { path: path(), tensor, found, variable: name, shape });
        }
        let elements = match found.filter(|&found| found != variable.dtype()) {
            None => file.read_padded(tensor)?,
            Some(found) => file.read_cast(tensor, found, variable.dtype())?,
        };
        values.insert(VariableId(index as u32), elements.into());
        used.insert(tensor.to_owned());
    }
    let mut names = file.names().into_iter();
    match names.find(|name| !options.allows_extra && !used.contains(name)) {
        Some(tensor) => Err(LoadError::Extra { path: path(), tensor }),
        None => Ok(values),
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
