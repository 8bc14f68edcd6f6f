//! [`LoadOptions`]: which tensors of a file fill which variables.

use std::collections::BTreeMap;

/// Which tensors of a file fill which variables. By default those of equal names, and each
/// dense variable has one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The names of tensors, by variable.
    pub(crate) renames: BTreeMap<String, String>,
    pub(crate) allows_missing: bool,
    pub(crate) allows_extra: bool,
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

    /// Returns the name of a variable's tensor.
    pub(crate) fn tensor_of<'a>(&'a self, variable: &'a str) -> &'a str {
        self.renames.get(variable).map_or(variable, String::as_str)
    }
}
