//! The connections of principals, whose entries may limit them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::access::Principal;

/// The places that principals with a limit have taken, by their names.
#[derive(Debug, Default)]
pub(crate) struct ConnectionPlaces(Mutex<BTreeMap<String, Arc<()>>>);

/// A place among the connections of a principal, free again when this is dropped. `None` without a
/// limit.
#[derive(Debug)]
pub(crate) struct ConnectionPlace(#[expect(dead_code, reason = "it counts")] Option<Arc<()>>);

/// A principal that has as many connections as its entry allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoPlace {
    /// The name of the principal.
    pub(crate) principal: String,
    /// The number.
    pub(crate) limit: u32,
}

impl ConnectionPlaces {
    /// Takes a place for a connection of a principal.
    pub(crate) fn take(&self, principal: &Principal) -> Result<ConnectionPlace, NoPlace> {
        let Some(limit) = principal.rights.connections_max else {
            return Ok(ConnectionPlace(None));
        };
        // It is valid after each step.
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.retain(|_, of| Arc::strong_count(of) > 1);
        let of = places.entry(principal.name.clone()).or_default();
        // One more is the entry's own.
        match Arc::strong_count(of) > limit as usize {
            true => Err(NoPlace { principal: principal.name.clone(), limit }),
            false => Ok(ConnectionPlace(Some(of.clone()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::access::AccessRights;

    use super::*;

    fn principal(name: &str, connections_max: Option<u32>) -> Principal {
        let rights = AccessRights { connections_max, ..AccessRights::default() };
        Principal { name: name.to_owned(), rights }
    }

    #[test]
    fn a_principal_has_as_many_places_as_its_entry_gives_it() {
        let places = ConnectionPlaces::default();
        let [few, other, all] =
            [principal("few", Some(2)), principal("other", Some(1)), principal("all", None)];
        let first = places.take(&few).unwrap();
        let _second = places.take(&few).unwrap();
        assert_eq!(
            places.take(&few).unwrap_err(),
            NoPlace { principal: "few".to_owned(), limit: 2 }
        );
        let other_place = places.take(&other).unwrap();
        for _ in 0..100 {
            std::mem::forget(places.take(&all).unwrap());
        }
        drop(first);
        let third = places.take(&few).unwrap();
        assert!(places.take(&few).is_err());
        assert_eq!(places.0.lock().unwrap().len(), 2, "only those with a limit are kept");
        drop((other_place, third));
        let _few = places.take(&few).unwrap();
        assert_eq!(places.0.lock().unwrap().len(), 1, "and only while they are connected");
    }
}
