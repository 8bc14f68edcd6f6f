//! The functions of a server by name, as its service knows them.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::signature::Signature;

/// What a service knows of a function.
#[derive(Clone, Debug)]
pub(crate) struct FunctionFacts {
    /// What it takes and returns; `None` for anything.
    pub(crate) signature: Option<Signature>,
    /// Whether it needs a thread of its own while it runs.
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
    digest: [u8; 32],
}

impl FunctionTable {
    pub(crate) fn new(functions: BTreeMap<String, FunctionFacts>) -> FunctionTable {
        let mut hasher = Sha256::new();
        for (name, facts) in &functions {
            let text = format!("{name}{}\n", facts.signature_text());
            hasher.update(text.as_bytes());
        }
        FunctionTable { functions, digest: hasher.finalize().into() }
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

    /// Returns the SHA-256 of the names and signatures.
    pub(crate) fn digest(&self) -> [u8; 32] {
        self.digest
    }
}
