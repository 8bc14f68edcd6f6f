//! The ids of the values that flights have in common.

use std::collections::HashMap;

use super::flight::Flight;

/// Number of fields of a flight that a model uses. In the order of the ids: aircraft, flight
/// (airline and number), destination, hour, airline, day of the week, origin.
///
/// The month is not one of them: no held-out month occurs in the training set.
pub(crate) const FIELDS: usize = 7;

/// An id per value of each field, and one per field for all values unknown at training. Ids run
/// from 0 without gaps, so they are rows of a table.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    /// By field: the known values, numbered from 1 in the order of their first appearance.
    known: [HashMap<Value<'a>, u32>; FIELDS],
    /// By field: the id of unknown values, which is the base of the numbers of the known ones.
    unknown: [u32; FIELDS],
}

impl<'a> Vocabulary<'a> {
    /// Builds the vocabulary of some flights.
    pub(super) fn learn<'f>(flights: impl Iterator<Item = &'f Flight<'a>>) -> Vocabulary<'a>
    where
        'a: 'f,
    {
        let mut known: [HashMap<Value<'a>, u32>; FIELDS] = Default::default();
        for flight in flights {
            for (known, value) in known.iter_mut().zip(values(flight)) {
                let next = known.len() as u32 + 1;
                known.entry(value).or_insert(next);
            }
        }
        let mut unknown = [0; FIELDS];
        for field in 1..FIELDS {
            unknown[field] = unknown[field - 1] + known[field - 1].len() as u32 + 1;
        }
        Vocabulary { known, unknown }
    }

    /// Returns the number of ids.
    pub(super) fn ids(&self) -> usize {
        self.known.iter().map(|known| known.len() + 1).sum()
    }

    /// Returns the ids of a flight, one per field.
    pub(super) fn encode(&self, flight: &Flight<'a>) -> [u32; FIELDS] {
        let values = values(flight);
        std::array::from_fn(|field| {
            self.unknown[field] + self.known[field].get(&values[field]).copied().unwrap_or(0)
        })
    }
}

/// The value of a field: a name, a number, or both.
type Value<'a> = (&'a str, u16);

fn values<'a>(flight: &Flight<'a>) -> [Value<'a>; FIELDS] {
    [
        (flight.tail, 0),
        (flight.carrier, flight.number),
        (flight.destination, 0),
        ("", u16::from(flight.hour)),
        (flight.carrier, 0),
        ("", u16::from(flight.weekday)),
        (flight.origin, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLIGHT: Flight<'static> = Flight {
        month: 1,
        weekday: 2,
        hour: 5,
        carrier: "UA",
        number: 1,
        tail: "N1",
        origin: "EWR",
        destination: "IAH",
        late: false,
    };

    #[test]
    fn ids_are_rows_of_one_table() {
        let other = Flight { number: 2, tail: "N2", destination: "EWR", ..FLIGHT };
        let vocabulary = Vocabulary::learn([FLIGHT, other, FLIGHT].iter());
        assert_eq!(vocabulary.ids(), 3 + 3 + 3 + 2 + 2 + 2 + 2);
        assert_eq!(vocabulary.encode(&FLIGHT), [1, 4, 7, 10, 12, 14, 16]);
        assert_eq!(vocabulary.encode(&other), [2, 5, 8, 10, 12, 14, 16]);
    }

    #[test]
    fn unknown_values_have_one_id_per_field() {
        let vocabulary = Vocabulary::learn([FLIGHT].iter());
        let unknown = Flight {
            weekday: 3,
            hour: 6,
            carrier: "AA",
            tail: "N9",
            origin: "IAH",
            destination: "EWR",
            ..FLIGHT
        };
        assert_eq!(vocabulary.encode(&unknown), [0, 2, 4, 6, 8, 10, 12]);
        assert_eq!(vocabulary.encode(&Flight { month: 2, late: true, ..FLIGHT })[0], 1);
        assert_eq!(Vocabulary::learn([].iter()).encode(&FLIGHT), [0, 1, 2, 3, 4, 5, 6]);
    }
}
