//! The facts that ps tasks and workers must agree on, as named fields. A mismatch names the field
//! that differs.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::protocol::limits;
use crate::protocol::message::IdentityFields;
use crate::protocol::refusal::{Detail, Refusal};
use crate::protocol::wire::{List, Text};

/// Named facts that must be equal on both sides.
///
/// Addresses, the worker job, learning rates, leases and limits are not included: they may differ
/// or change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    fields: BTreeMap<String, String>,
}

impl Identity {
    /// The name of the fact that servers give if no variable may be cut by default, because one of
    /// their optimizers needs whole variables. Its value is [`Identity::YES`].
    pub const WHOLE_VARIABLES: &'static str = "whole_variables";

    /// The value of a fact that is true. It is empty otherwise.
    pub const YES: &'static str = "yes";

    /// Creates an identity without facts.
    pub fn new() -> Self {
        Identity::default()
    }

    /// Adds a fact. A value that is too long for the wire is replaced by its SHA-256. A name that
    /// is too long is cut; the program's own names are not.
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        let mut value = value.into();
        if value.len() > limits::IDENTITY_VALUE_BYTES_MAX {
            let hash = Sha256::digest(value.as_bytes());
            value = hash.iter().fold(String::from("sha256:"), |text, b| text + &format!("{b:02x}"));
        }
        let name = Text::<{ limits::IDENTITY_NAME_BYTES_MAX }>::clipped(name).as_str().to_owned();
        self.fields.insert(name, value);
        self
    }

    /// Returns the value of a fact.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// Returns all facts in order of their names.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Returns the SHA-256 over names and values in order of names.
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = Sha256::new();
        for (name, value) in &self.fields {
            for text in [name, value] {
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
        hasher.finalize().into()
    }

    /// Returns the first fact known to both whose values differ: name, own value, other value.
    pub fn difference<'a>(&'a self, other: &'a Identity) -> Option<(&'a str, &'a str, &'a str)> {
        self.fields.iter().find_map(|(name, ours)| {
            let theirs = other.field(name)?;
            (ours != theirs).then_some((name.as_str(), ours.as_str(), theirs))
        })
    }

    /// Returns the refusal for a client whose identity differs from this server's; `None` if they
    /// agree.
    pub fn refusal(&self, client: &Identity) -> Option<Refusal> {
        let (field, ours, theirs) = self.difference(client)?;
        Some(Refusal::Identity {
            field: Detail::clipped(field),
            server: Detail::clipped(ours),
            client: Detail::clipped(theirs),
            server_hash: self.hash(),
            client_hash: client.hash(),
        })
    }

    /// Converts the facts to their wire form. Facts beyond [`limits::IDENTITY_FIELDS_MAX`] are
    /// dropped; the program has fewer.
    pub fn to_wire(&self) -> IdentityFields {
        let fields = self.fields.iter().take(limits::IDENTITY_FIELDS_MAX);
        let fields = fields.map(|(name, value)| (Text::clipped(name), Text::clipped(value)));
        List::new(fields.collect()).unwrap_or_default()
    }

    /// Reads the facts from their wire form.
    pub fn from_wire(fields: &IdentityFields) -> Identity {
        let fields = fields.items().iter();
        Identity {
            fields: fields.map(|(n, v)| (n.as_str().to_owned(), v.as_str().to_owned())).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_facts_known_to_both_are_compared() {
        let server = Identity::new().with("ps", "0,1").with("optimizer", "adam");
        let worker = Identity::new().with("ps", "0,1").with("placement", "round robin");
        assert_eq!(server.difference(&worker), None);
        let other = Identity::new().with("optimizer", "sgd");
        assert_eq!(server.difference(&other), Some(("optimizer", "adam", "sgd")));
        assert_ne!(server.hash(), other.hash());
        assert!(server.refusal(&other).unwrap().to_string().contains("optimizer"));
    }

    #[test]
    fn long_values_travel_as_their_hash() {
        let long = Identity::new().with("ps", "0,".repeat(500));
        let other = Identity::new().with("ps", "1,".repeat(500));
        assert!(long.difference(&other).is_some());
        assert_eq!(Identity::from_wire(&long.to_wire()), long);
    }
}
