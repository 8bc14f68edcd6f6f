//! [`JsonEntries`]: the entries of a JSON object, including those of repeated keys.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

/// The entries of a JSON object, in their order. A map would keep one of those with equal keys.
pub(crate) struct JsonEntries<V>(pub(crate) Vec<(String, V)>);

impl<V> JsonEntries<V> {
    /// Returns the first key that occurs a second time.
    pub(crate) fn repeated(&self) -> Option<&str> {
        let mut keys = BTreeSet::new();
        self.0.iter().map(|(key, _)| key.as_str()).find(|&key| !keys.insert(key))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for JsonEntries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

struct EntriesVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
    type Value = JsonEntries<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the names of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(JsonEntries(entries))
    }
}
