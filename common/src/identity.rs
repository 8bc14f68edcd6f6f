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

    /// The name of the fact of all settings of the update mode. A difference is one of
    /// [`Identity::MODE`], the setting that has them.
    pub const MODE_SETTINGS: &'static str = "mode_settings";

    /// The name of the fact of the update mode without the settings that may change between runs.
    pub const MODE: &'static str = "mode";

    /// The name of the fact of the global step at which training ends.
    pub const LAST_STEP: &'static str = "last_step";

    /// The name of the fact of the lease of workers, in milliseconds.
    pub const LEASE_MS: &'static str = "lease_ms";

    /// The name of the fact of the maximum age of a token, in milliseconds.
    pub const TOKEN_TIMEOUT_MS: &'static str = "token_timeout_ms";

    /// The name of the fact of the time that settled effects of a silent coordinator are kept, in
    /// seconds.
    pub const EFFECTS_KEPT_S: &'static str = "effects_kept_s";

    /// The facts that servers share while they run together. They may change between two runs, so a
    /// state is not bound to them.
    const OF_A_RUN: [&'static str; 6] = [
        Identity::PROTOCOL,
        Identity::MODE_SETTINGS,
        Identity::LAST_STEP,
        Identity::LEASE_MS,
        Identity::TOKEN_TIMEOUT_MS,
        Identity::EFFECTS_KEPT_S,
    ];

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
            let name = if part == 1 { name.to_owned() } else { part_name(name, part) };
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
            let is_of_run = Identity::OF_A_RUN.iter().any(|of| is(name, of));
            !name.starts_with(Identity::MAY_DIFFER) && !is_of_run
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

    /// Returns the first fact known to both that must agree and does not.
    pub fn difference(&self, other: &Identity) -> Option<FactDifference> {
        let mut names = self.names().filter(|name| !name.starts_with(Identity::MAY_DIFFER));
        names.find_map(|name| self.difference_in(name, other))
    }

    /// Returns the facts that may differ and do.
    pub fn free_differences(&self, other: &Identity) -> impl Iterator<Item = FactDifference> {
        let names = self.names().filter(|name| name.starts_with(Identity::MAY_DIFFER));
        names.filter_map(|name| self.difference_in(name, other))
    }

    /// Returns the names of facts, without those of the further parts of long values.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str).filter(|name| !name.contains(' '))
    }

    /// Returns the whole value of a fact, of which a long one has several parts.
    fn value(&self, name: &str) -> Option<String> {
        let mut value = self.field(name)?.to_owned();
        let parts = (2..=Identity::PARTS_MAX).map_while(|part| self.field(&part_name(name, part)));
        parts.for_each(|part| value.push_str(part));
        Some(value)
    }

    fn difference_in(&self, name: &str, other: &Identity) -> Option<FactDifference> {
        let ours = self.value(name)?;
        let theirs = other.value(name)?;
        if ours == theirs {
            return None;
        }
        let setting = match name.trim_start_matches(Identity::MAY_DIFFER) {
            Identity::MODE_SETTINGS => Identity::MODE,
            setting => setting,
        };
        let (ours, theirs) = excerpts(&ours, &theirs);
        Some(FactDifference { setting: setting.to_owned(), ours, theirs })
    }

    /// Returns the refusal for a client whose identity differs from this server's; `None` if they
    /// agree.
    pub fn refusal(&self, client: &Identity) -> Option<Refusal> {
        let FactDifference { setting, ours, theirs } = self.difference(client)?;
        Some(Refusal::Identity {
            field: Detail::clipped(setting),
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

/// A fact whose values differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactDifference {
    /// The name of the setting.
    pub setting: String,
    /// This side's value; of a long one, the text around the first difference.
    pub ours: String,
    /// The other side's value, likewise.
    pub theirs: String,
}

/// The name of a further part of a long value.
fn part_name(name: &str, part: usize) -> String {
    format!("{name} {part}")
}

/// Cuts two texts that differ around their first difference, if one is too long for an error.
fn excerpts(ours: &str, theirs: &str) -> (String, String) {
    if ours.len().max(theirs.len()) <= EXCERPT_BYTES_MAX {
        return (ours.to_owned(), theirs.to_owned());
    }
    let mut pairs = ours.char_indices().zip(theirs.chars());
    let at = pairs.find(|((_, a), b)| a != b).map(|((at, _), _)| at);
    let at = at.unwrap_or(ours.len().min(theirs.len()));
    // The text before is the same on both sides. The cut is behind the end of a setting.
    let from = boundary(ours, at.saturating_sub(EXCERPT_BYTES_BEFORE));
    let start = match ours[from..at].find(", ") {
        Some(end) if from > 0 => from + end + 2,
        _ => from,
    };
    let excerpt = |text: &str| {
        let end = boundary(text, text.len().min(start + EXCERPT_BYTES_MAX));
        let before = if start > 0 { ".. " } else { "" };
        let after = if end < text.len() { " .." } else { "" };
        format!("{before}{}{after}", &text[start..end])
    };
    (excerpt(ours), excerpt(theirs))
}

/// Returns the last border of a character that is not behind a position.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The longest text of a difference that is not cut.
const EXCERPT_BYTES_MAX: usize = 240;

/// The bytes before a difference that give it a context.
const EXCERPT_BYTES_BEFORE: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(setting: &str, ours: &str, theirs: &str) -> FactDifference {
        let [setting, ours, theirs] = [setting, ours, theirs].map(str::to_owned);
        FactDifference { setting, ours, theirs }
    }

    #[test]
    fn only_facts_known_to_both_are_compared() {
        let server = Identity::new().with("ps", "0,1").with("optimizer", "adam");
        let worker = Identity::new().with("ps", "0,1").with("placement", "round robin");
        assert_eq!(server.difference(&worker), None);
        let other = Identity::new().with("optimizer", "sgd");
        assert_eq!(server.difference(&other), Some(difference("optimizer", "adam", "sgd")));
        assert_ne!(server.hash(), other.hash());
        assert!(server.refusal(&other).unwrap().to_string().contains("optimizer"));
    }

    #[test]
    fn facts_that_may_differ_are_reported_and_not_refused() {
        let ours = Identity::new().with("ps", "0").with_free("checkpoints", "none");
        let theirs = Identity::new().with("ps", "0").with_free("checkpoints", "configured");
        assert_eq!(ours.difference(&theirs), None);
        let found: Vec<_> = ours.free_differences(&theirs).collect();
        assert_eq!(found, [difference("checkpoints", "none", "configured")]);
    }

    #[test]
    fn a_long_value_is_named_as_one_setting() {
        let of = |beta: &str| format!("{} beta1: {beta}", "schedule, ".repeat(30));
        let identity = |beta| Identity::new().with_long(Identity::RULES, &of(beta));
        assert!(identity("0.9").field("rules 2").is_some());
        let before = ".. ".to_owned() + &"schedule, ".repeat(6);
        let expected =
            difference("rules", &format!("{before} beta1: 0.9"), &format!("{before} beta1: 0.8"));
        assert_eq!(identity("0.9").difference(&identity("0.8")), Some(expected));
        let same = Identity::new().with_long("rules", &of("0.9"));
        assert_eq!(identity("0.9").difference(&same), None);
        // One value is the start of the other, at the end of a part.
        let whole = "r".repeat(limits::IDENTITY_VALUE_BYTES_MAX);
        let ours = Identity::new().with_long("rules", &whole);
        let theirs = Identity::new().with_long("rules", &format!("{whole}, more"));
        let found = ours.difference(&theirs).unwrap();
        assert_eq!(found, difference("rules", &whole, &format!("{whole}, more")));
        let endless = Identity::new().with_long("rules", &"x".repeat(10_000));
        assert_eq!(endless.fields().count(), Identity::PARTS_MAX);
        assert!(endless.field("rules 5").unwrap().starts_with("sha256:"));
    }

    #[test]
    fn a_setting_of_the_mode_is_named_by_the_mode() {
        let of = |count: u64| {
            let settings = "a_setting_with_a_long_name: Some(Duration(60s)), ".repeat(8);
            let text = format!("Synchronous {{ {settings}backup_workers: {count} }}");
            Identity::new().with("mode", "synchronous").with_long(Identity::MODE_SETTINGS, &text)
        };
        let refusal = of(1).refusal(&of(2)).unwrap().to_string();
        assert!(refusal.starts_with("the identities differ in mode: "), "{refusal}");
        assert!(!refusal.contains("mode_settings"), "{refusal}");
        for value in ["backup_workers: 1 }", "backup_workers: 2 }"] {
            assert!(refusal.contains(value), "{refusal}");
        }
        let settings = |name: &str| Identity::new().with_long(Identity::MODE_SETTINGS, name);
        let german = difference("mode", "größe", "größer");
        assert_eq!(settings("größe").difference(&settings("größer")), Some(german));
        // Cuts are at the borders of characters.
        for length in 150..170 {
            let text =
                |end: &str| settings(&format!("{}{}{end}", "x".repeat(length), "ö".repeat(200)));
            assert!(text("a").difference(&text("b")).is_some());
        }
    }

    #[test]
    fn a_state_is_not_bound_to_what_may_change_between_runs() {
        let run = Identity::new().with("ps", "0").with_protocol().with_free("checkpoints", "none");
        let run = run.with_long(Identity::MODE_SETTINGS, "Asynchronous");
        let run = run.with(Identity::LAST_STEP, "7").with(Identity::LEASE_MS, "5000");
        let run = run.with(Identity::TOKEN_TIMEOUT_MS, "none").with(Identity::EFFECTS_KEPT_S, "9");
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
