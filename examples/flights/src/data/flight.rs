//! Parses the flights of the table, one line each, which may be malformed.

use std::ops::RangeInclusive;
use std::str::FromStr;

use super::FlightsError;

/// A flight that arrived: what was planned, and whether it was late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flight<'a> {
    /// Month, 1 to 12.
    pub(super) month: u8,
    /// Day of the week, 0 (Sunday) to 6.
    pub(super) weekday: u8,
    /// Scheduled hour of departure, local time.
    pub(super) hour: u8,
    /// Airline, in two letters or digits.
    pub(super) carrier: &'a str,
    /// Flight number of the airline.
    pub(super) number: u16,
    /// Aircraft, by its tail number.
    pub(super) tail: &'a str,
    /// Airport of departure, in three letters.
    pub(super) origin: &'a str,
    /// Airport of arrival.
    pub(super) destination: &'a str,
    /// Whether it arrived more than 15 minutes late.
    pub(super) late: bool,
}

/// Parses the flights of a table in order. Skips those that never arrived, whose delay is `NA`.
///
/// The first line names the columns; columns other than [`COLUMNS`] are ignored. Fields are
/// separated by commas and never quoted: a quoted comma counts as one field too many.
///
/// # Errors
///
/// A [`FlightsError`] that names the line, the column, the text found and the expectation.
pub(super) fn read(table: &str) -> Result<Vec<Flight<'_>>, FlightsError> {
    let mut lines = (1..).zip(table.lines());
    let (_, names) = lines.next().unwrap_or_default();
    let header = ColumnPlaces::read(names)?;
    lines.filter_map(|(line, text)| header.flight(line, text).transpose()).collect()
}

/// The positions of the columns.
struct ColumnPlaces {
    /// Number of columns.
    count: usize,
    /// Index of each of [`COLUMNS`].
    places: [usize; COLUMNS.len()],
}

impl ColumnPlaces {
    fn read(names: &str) -> Result<ColumnPlaces, FlightsError> {
        let names: Vec<&str> = names.split(',').collect();
        let mut places = [0; COLUMNS.len()];
        for (place, column) in places.iter_mut().zip(COLUMNS) {
            let found = names.iter().position(|&name| name == column);
            *place = found.ok_or(FlightsError::Column { column })?;
        }
        Ok(ColumnPlaces { count: names.len(), places })
    }

    /// Parses a line. Returns `None` if the flight did not arrive.
    fn flight<'a>(&self, line: usize, text: &'a str) -> Result<Option<Flight<'a>>, FlightsError> {
        let texts: Vec<&str> = text.split(',').collect();
        if texts.len() != self.count {
            return Err(FlightsError::Fields { line, found: texts.len(), expected: self.count });
        }
        let field =
            |index: usize| Field { line, column: COLUMNS[index], text: texts[self.places[index]] };
        let [year, month, day, hour, delay, carrier, number, tail, origin, destination] =
            std::array::from_fn(field);
        if delay.text == "NA" {
            return Ok(None);
        }
        let year = year.number(1..=9999)?;
        let month = month.number(1..=12)?;
        let day = day.number(1..=days(year, month))?;
        Ok(Some(Flight {
            month,
            weekday: weekday(year, month, day),
            // 24 is midnight as the end of a day.
            hour: hour.number(0..=24)?,
            carrier: carrier.name()?,
            number: number.number(0..=9999)?,
            tail: tail.name()?,
            origin: origin.name()?,
            destination: destination.name()?,
            late: delay.number(-1440..=10_000)? > LATE_MINUTES,
        }))
    }
}

/// One field of a line.
struct Field<'a> {
    line: usize,
    column: &'static str,
    text: &'a str,
}

impl<'a> Field<'a> {
    /// Parses a name of letters and digits.
    fn name(&self) -> Result<&'a str, FlightsError> {
        let whole = !self.text.is_empty() && self.text.bytes().all(|b| b.is_ascii_alphanumeric());
        if whole { Ok(self.text) } else { Err(self.wrong("letters and digits".to_owned())) }
    }

    /// Parses an integer within bounds.
    fn number<T>(&self, bounds: RangeInclusive<T>) -> Result<T, FlightsError>
    where
        T: FromStr + PartialOrd + std::fmt::Display,
    {
        let number = self.text.parse().ok().filter(|number| bounds.contains(number));
        number.ok_or_else(|| {
            let (low, high) = bounds.into_inner();
            self.wrong(format!("a whole number from {low} to {high}"))
        })
    }

    fn wrong(&self, expected: String) -> FlightsError {
        let Field { line, column, text } = *self;
        FlightsError::Field { line, column, found: text.to_owned(), expected }
    }
}

/// Returns the number of days of a month in the Gregorian calendar.
fn days(year: u16, month: u8) -> u8 {
    let leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Returns the day of the week, 0 for Sunday: the days since the last Sunday before the year 1,
/// modulo 7.
fn weekday(year: u16, month: u8, day: u8) -> u8 {
    let years = u32::from(year) - 1;
    let months = (1..month).map(|month| u32::from(days(year, month))).sum::<u32>();
    let all = 365 * years + years / 4 - years / 100 + years / 400 + months + u32::from(day);
    (all % 7) as u8
}

/// Columns that are read.
const COLUMNS: [&str; 10] =
    ["year", "month", "day", "hour", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest"];

/// Delay in minutes above which a flight counts as late.
const LATE_MINUTES: i32 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "year,month,day,arr_delay,carrier,flight,tailnum,origin,dest,hour,extra";

    fn table(line: &str) -> String {
        format!("{HEADER}\n{line}\n")
    }

    #[test]
    fn a_line_is_a_flight() {
        let cancelled = table("2013,1,1,NA,UA,1545,NA,EWR,IAH,5,x");
        assert_eq!(read(&cancelled).unwrap(), []);
        let text = table("2013,1,2,16,UA,1545,N14228,EWR,IAH,5,x\r");
        let expected = Flight {
            month: 1,
            weekday: 3,
            hour: 5,
            carrier: "UA",
            number: 1545,
            tail: "N14228",
            origin: "EWR",
            destination: "IAH",
            late: true,
        };
        assert_eq!(read(&text).unwrap(), [expected]);
        for (delay, late) in [("-20", false), ("15", false), ("16", true), ("1272", true)] {
            let text = table(&format!("2013,1,2,{delay},UA,1545,N14228,EWR,IAH,5,x"));
            assert_eq!(read(&text).unwrap(), [Flight { late, ..expected }]);
        }
        assert_eq!(read(HEADER).unwrap(), []);
    }

    #[test]
    fn malformed_lines_are_named() {
        let good = "2013,1,1,3,UA,1545,N14228,EWR,IAH,5,x";
        let changed = |place: usize, field: &str| {
            let mut fields: Vec<&str> = good.split(',').collect();
            fields[place] = field;
            read(&format!("{HEADER}\n{good}\n{}", fields.join(","))).unwrap_err().to_string()
        };
        for (place, field, expected) in [
            (0, "0", "line 3 has \"0\" as year, expected a whole number from 1 to 9999"),
            (1, "13", "line 3 has \"13\" as month, expected a whole number from 1 to 12"),
            (2, "32", "line 3 has \"32\" as day, expected a whole number from 1 to 31"),
            (3, "", "line 3 has \"\" as arr_delay, expected a whole number from -1440 to 10000"),
            (4, "U A", "line 3 has \"U A\" as carrier, expected letters and digits"),
            (5, "-1", "line 3 has \"-1\" as flight, expected a whole number from 0 to 9999"),
            (6, "", "line 3 has \"\" as tailnum, expected letters and digits"),
            (8, "\"IAH\"", "line 3 has \"\\\"IAH\\\"\" as dest, expected letters and digits"),
            (9, "25", "line 3 has \"25\" as hour, expected a whole number from 0 to 24"),
            (10, "x,y", "line 3 has 12 fields, expected 11"),
        ] {
            assert_eq!(changed(place, field), format!("cannot read the flights: {expected}"));
        }
        let short = read(&table("2013,1,1")).unwrap_err().to_string();
        assert_eq!(short, "cannot read the flights: line 2 has 3 fields, expected 11");
        for header in ["", "year,month,day,arr_delay,carrier,flight,tailnum,dest,hour"] {
            let missing = read(header).unwrap_err();
            assert!(matches!(missing, FlightsError::Column { column: "year" | "origin" }));
        }
    }

    #[test]
    fn dates_have_their_day_of_the_week() {
        for ((year, month, day), expected) in [
            ((1, 1, 1), 1),
            ((1900, 3, 1), 4),
            ((2000, 2, 29), 2),
            ((2013, 1, 1), 2),
            ((2013, 12, 31), 2),
            ((2024, 3, 1), 5),
        ] {
            assert_eq!(weekday(year, month, day), expected, "{year}-{month}-{day}");
        }
        assert_eq!([days(2013, 2), days(1900, 2), days(2000, 2), days(2024, 2)], [28, 28, 29, 29]);
        let year: u16 = (1..=12).map(|month| u16::from(days(2013, month))).sum();
        assert_eq!(year, 365);
    }
}
