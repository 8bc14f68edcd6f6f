//! The facts that ps tasks and workers must agree on, as named fields. A mismatch names the field
//! that differs.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::protocol::limits;
use crate::protocol::message::IdentityFields;
use crate::protocol::refusal::{Detail, Refusal};
use crate::protocol::version;
use crate::protocol::wire::{List, Text};

/// Named facts that must be equal on both sides, and some that may differ.
///
/// A fact whose name begins with [`Identity::MAY_DIFFER`] is reported where it differs. Addresses,
/// the worker job and limits are no facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    fields: BTreeMap<String, String>,
}

impl Identity {
    /// The name of the fact that servers give if no variable may be cut by default, because one of
    /// their optimizers needs whole variables. Its value is [`Identity::YES`].
    pub const WHOLE_VARIABLES: &'static str = "whole_variables";

    /// The name of the fact of the revision of the protocol, while that is unreleased.
    pub const PROTOCOL: &'static str = "protocol";

    /// The name of the fact of all optimizers with their hyperparameters and schedules.
    pub const RULES: &'static str = "rules";

    /// The name of the fact of all settings of the update mode.
    pub const MODE_SETTINGS: &'static str = "mode_settings";

    /// The first character of the names of facts that may differ.
    pub const MAY_DIFFER: char = '~';

    /// The value of a fact that is true. It is empty otherwise.
    pub const YES: &'static str = "yes";

    /// Creates an identity without facts.
    pub fn new() -> Self {
        Identity::default()
    }

    /// Adds the revision of the protocol that this program speaks, unless it is released.
    pub fn with_protocol(self) -> Self {
        match version::IS_RELEASED {
            true => self,
            false => self.with(Identity::PROTOCOL, format!("revision {}", version::REVISION)),
        }
    }

    /// Adds a fact that may differ.
    pub fn with_free(self, name: &str, value: impl Into<String>) -> Self {
        self.with(&format!("{}{name}", Identity::MAY_DIFFER), value)
    }

    /// Adds a fact of any length, so that a refusal names its value: what does not fit follows as
    /// the facts `name 2`, `name 3` and so on. The rest of a value of more than
    /// [`Identity::PARTS_MAX`] such facts is replaced by its hash.
    pub fn with_long(mut self, name: &str, value: &str) -> Self {
        let mut rest = value;
        for part in 1..=Identity::PARTS_MAX {
            let name = if part == 1 { name.to_owned() } else { format!("{name} {part}") };
            if part == Identity::PARTS_MAX || rest.len() <= limits::IDENTITY_VALUE_BYTES_MAX {
                return self.with(&name, rest);
            }
            let fits = Text::<{ limits::IDENTITY_VALUE_BYTES_MAX }>::clipped(rest).as_str().len();
            self = self.with(&name, &rest[..fits]);
            rest = &rest[fits..];
        }
        self
    }

    /// The most facts that hold one long value.
    pub const PARTS_MAX: usize = 5;

    /// Returns the facts that a state is bound to: those of a run of the server are left out, and
    /// settings that may change between two runs may differ.
    pub fn of_state(&self) -> Identity {
        let is = |name: &str, of: &str| name.split(' ').next() == Some(of);
        let kept = self.fields.iter().filter(|(name, _)| {
            !name.starts_with(Identity::MAY_DIFFER)
                && !is(name, Identity::PROTOCOL)
                && !is(name, Identity::MODE_SETTINGS)
        });
        let fields = kept.map(|(name, value)| match is(name, Identity::RULES) {
            true => (format!("{}{name}", Identity::MAY_DIFFER), value.clone()),
            false => (name.clone(), value.clone()),
        });
        Identity { fields: fields.collect() }
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

    /// Returns the value of a fact that may differ.
    pub fn free_field(&self, name: &str) -> Option<&str> {
        self.field(&format!("{}{name}", Identity::MAY_DIFFER))
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

    /// Returns the first fact known to both that must agree and does not: name, own value, other
    /// value.
    pub fn difference<'a>(&'a self, other: &'a Identity) -> Option<(&'a str, &'a str, &'a str)> {
        self.differences(other).find(|(name, ..)| !name.starts_with(Identity::MAY_DIFFER))
    }

    /// Returns the facts that may differ and do: name, own value, other value.
    pub fn free_differences<'a>(
        &'a self,
        other: &'a Identity,
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a str)> {
        let differences = self.differences(other);
        differences.filter_map(|(name, ours, theirs)| {
            Some((name.strip_prefix(Identity::MAY_DIFFER)?, ours, theirs))
        })
    }

    fn differences<'a>(
        &'a self,
        other: &'a Identity,
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a str)> {
        self.fields.iter().filter_map(|(name, ours)| {
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
    fn facts_that_may_differ_are_reported_and_not_refused() {
        let ours = Identity::new().with("ps", "0").with_free("lease_ms", "5000");
        let theirs = Identity::new().with("ps", "0").with_free("lease_ms", "800");
        assert_eq!(ours.difference(&theirs), None);
        let found: Vec<_> = ours.free_differences(&theirs).collect();
        assert_eq!(found, [("lease_ms", "5000", "800")]);
    }

    #[test]
    fn a_long_value_is_named_in_parts() {
        let of = |beta: &str| format!("{} beta1: {beta}", "schedule ".repeat(30));
        let identity = |beta| Identity::new().with_long(Identity::RULES, &of(beta));
        let ours = identity("0.9");
        let theirs = identity("0.8");
        let (name, ours_is, theirs_is) = ours.difference(&theirs).unwrap();
        assert_eq!(name, "rules 2");
        assert!(ours_is.contains("beta1: 0.9") && theirs_is.contains("beta1: 0.8"));
        assert_eq!(
            identity("0.9").difference(&Identity::new().with_long("rules", &of("0.9"))),
            None
        );
        let endless = Identity::new().with_long("rules", &"x".repeat(10_000));
        assert_eq!(endless.fields().count(), Identity::PARTS_MAX);
        assert!(endless.field("rules 5").unwrap().starts_with("sha256:"));
    }

    #[test]
    fn a_state_is_not_bound_to_what_may_change_between_runs() {
        let run = Identity::new().with("ps", "0").with_protocol().with_free("lease_ms", "1");
        let run = run.with_long(Identity::MODE_SETTINGS, "Asynchronous");
        let run = run.with_long(Identity::RULES, &"r".repeat(200));
        let state = run.of_state();
        let names: Vec<&str> = state.fields().map(|(name, _)| name).collect();
        assert_eq!(names, ["ps", "~rules", "~rules 2"]);
    }

    #[test]
    fn long_values_travel_as_their_hash() {
        let long = Identity::new().with("ps", "0,".repeat(500));
        let other = Identity::new().with("ps", "1,".repeat(500));
        assert!(long.difference(&other).is_some());
        assert_eq!(Identity::from_wire(&long.to_wire()), long);
    }
}
