//! The functions of a server by name, as its service knows them.

use std::collections::BTreeMap;

use super::signature::Signature;

/// The properties of a function that its service needs: its signature and its kind.
#[derive(Clone, Debug)]
pub(crate) struct FunctionFacts {
    /// The inputs and outputs that the function declares; `None` for any.
    pub(crate) signature: Option<Signature>,
    /// Whether the function needs a thread of its own while it runs.
    pub(crate) blocking: bool,
}

impl FunctionFacts {
    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking
    }

    /// Returns the signature as text; that of a function without one is `(..)`.
    pub(crate) fn signature_text(&self) -> String {
        self.signature.as_ref().map_or("(..)".to_owned(), Signature::to_string)
    }
}

/// The functions of a server by name.
#[derive(Debug)]
pub(crate) struct FunctionTable {
    functions: BTreeMap<String, FunctionFacts>,
}

impl FunctionTable {
    pub(crate) fn new(functions: BTreeMap<String, FunctionFacts>) -> FunctionTable {
        FunctionTable { functions }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&FunctionFacts> {
        self.functions.get(name)
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.functions.keys().map(String::as_str).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &FunctionFacts)> {
        self.functions.iter().map(|(name, facts)| (&name[..], facts))
    }
}
