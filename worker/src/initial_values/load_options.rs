//! [`LoadOptions`]: the mapping from tensors to variables.

use std::collections::BTreeMap;

/// The mapping from tensors to variables, and the deviations that a load allows. By default names are
/// equal, and each variable has its tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The names of tensors, by variable.
    pub(super) renames: BTreeMap<String, String>,
    pub(super) allows_missing: bool,
    pub(super) allows_extra: bool,
    pub(super) casts: bool,
}

impl LoadOptions {
    /// Returns the default options.
    pub fn new() -> LoadOptions {
        LoadOptions::default()
    }

    /// Fills a variable from a tensor of another name. The ids of a table are in the tensor of that
    /// name and `:ids`.
    pub fn rename(mut self, variable: impl Into<String>, tensor: impl Into<String>) -> LoadOptions {
        self.renames.insert(variable.into(), tensor.into());
        self
    }

    /// Whether variables may have no tensor. They keep their initializers. Default: no.
    pub fn allow_missing(self, allows: bool) -> LoadOptions {
        LoadOptions { allows_missing: allows, ..self }
    }

    /// Whether there may be tensors for which there is no variable, or which the index of a sharded
    /// checkpoint does not name. Default: no.
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
    pub(super) fn tensor_of<'a>(&'a self, variable: &'a str) -> &'a str {
        self.renames.get(variable).map_or(variable, String::as_str)
    }
}
