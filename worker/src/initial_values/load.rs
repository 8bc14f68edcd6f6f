//! [`load`]: finds the tensors of variables in files, and reads those of dense variables.

use std::collections::BTreeSet;
use std::path::Path;

use pushpull_common::ids::VariableId;
use pushpull_common::variable::VariableSpec;

use super::{FileRows, InitialTensors, LoadOptions};
use crate::error::LoadError;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::safetensors_file::{can_cast, dtype_of};
use crate::tensor_files::{FileTensor, TensorFiles};

/// Reads the values of dense variables, and checks the rows of the others.
pub(super) fn load(
    plan: &ShardingPlan,
    path: &Path,
    options: &LoadOptions,
) -> Result<InitialTensors, LoadError> {
    let files = TensorFiles::open(path, options.allows_extra)?;
    let path = || path.to_owned();
    if let Some(variable) = options.renames.keys().find(|name| plan.find(name).is_err()) {
        return Err(LoadError::Rename { path: path(), variable: variable.clone() });
    }
    let mut values = InitialTensors::default();
    let mut used = BTreeSet::new();
    for (index, variable) in plan.catalogue().variables().iter().enumerate() {
        let id = VariableId(index as u32);
        let name = options.tensor_of(variable.name());
        let Some(tensor) = files.tensor(name) else {
            if options.allows_missing {
                continue;
            }
            let variable = variable.name().to_owned();
            return Err(LoadError::Missing { path: path(), variable, tensor: name.to_owned() });
        };
        used.insert(name.to_owned());
        check_type(&tensor, variable, options.casts)?;
        check_shape(&tensor, variable)?;
        match (variable.is_sparse(), variable.as_table()) {
            (false, _) => {
                let mut bytes = tensor.read(0..variable.shape().elements(), variable.dtype())?;
                bytes.resize(bytes.len().next_multiple_of(8), 0);
                values.dense.insert(id, bytes.into());
            }
            (true, None) => _ = values.rows.insert(id, FileRows::numbered(tensor)),
            (true, Some(_)) => {
                let ids = format!("{name}:ids");
                let rows = FileRows::of_table(tensor, files.tensor(&ids), &ids, variable.name())?;
                values.rows.insert(id, rows);
                used.insert(ids);
            }
        }
    }
    let mut extra = files.names().filter(|&name| !options.allows_extra && !used.contains(name));
    match extra.next() {
        Some(tensor) => Err(LoadError::Extra { path: path(), tensor: tensor.to_owned() }),
        None => Ok(values),
    }
}

fn check_type(tensor: &FileTensor, variable: &VariableSpec, casts: bool) -> Result<(), LoadError> {
    let info = tensor.info();
    let dtype = variable.dtype();
    let found = dtype_of(info);
    if found == Some(dtype) || casts && found.is_some_and(|found| can_cast(found, dtype)) {
        return Ok(());
    }
    Err(LoadError::Type {
        path: tensor.path(),
        tensor: tensor.name().to_owned(),
        found: info.dtype.to_string(),
        variable: variable.name().to_owned(),
        dtype,
    })
}

/// Checks that a tensor has the shape of its variable. A table has any number of rows.
fn check_shape(tensor: &FileTensor, variable: &VariableSpec) -> Result<(), LoadError> {
    let found: Vec<u64> = tensor.info().shape.iter().map(|&extent| extent as u64).collect();
    let mut expected = variable.shape().extents().to_vec();
    let is_table = variable.as_table().is_some();
    if let (true, Some(&rows)) = (is_table, found.first()) {
        expected[0] = rows;
    }
    if found == expected {
        return Ok(());
    }
    let shape = match is_table {
        true => format!("{:?} with any number of rows", expected),
        false => variable.shape().to_string(),
    };
    Err(LoadError::Shape {
        path: tensor.path(),
        tensor: tensor.name().to_owned(),
        found: format!("{found:?}"),
        variable: variable.name().to_owned(),
        shape,
    })
}
