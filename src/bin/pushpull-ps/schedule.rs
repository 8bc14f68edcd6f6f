//! The value of `--schedule`.

use std::str::FromStr;

use pushpull::optim::Schedule;

/// A learning-rate schedule without its initial rate, which `--learning-rate` gives.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ScheduleOption {
    Steps(Vec<(u64, f64)>),
    Exponential(f64, u64),
    Staircase(f64, u64),
    Cosine(f64, u64),
}

impl ScheduleOption {
    /// Returns the schedule with this initial rate.
    pub(crate) fn starting_at(&self, rate: f64) -> Schedule {
        match self {
            ScheduleOption::Steps(then) => Schedule::steps(rate, then.iter().copied()),
            ScheduleOption::Exponential(decay, steps) => {
                Schedule::exponential(rate, *decay, *steps)
            }
            ScheduleOption::Staircase(decay, steps) => Schedule::staircase(rate, *decay, *steps),
            ScheduleOption::Cosine(last, steps) => Schedule::cosine(rate, *last, *steps),
        }
    }
}

impl FromStr for ScheduleOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, terms) = text.split_once(':').ok_or("no ':' after the name")?;
        let number = parsed::<f64>;
        let steps = parsed::<u64>;
        if name == "steps" {
            let then = terms.split(',').map(|then| {
                let (boundary, rate) = pair(then, '=')?;
                Ok((steps(boundary)?, number(rate)?))
            });
            return Ok(ScheduleOption::Steps(then.collect::<Result<_, String>>()?));
        }
        let (first, last) = pair(terms, '/')?;
        let first = number(first)?;
        let last = steps(last)?;
        match name {
            "exponential" => Ok(ScheduleOption::Exponential(first, last)),
            "staircase" => Ok(ScheduleOption::Staircase(first, last)),
            "cosine" => Ok(ScheduleOption::Cosine(first, last)),
            _ => Err(format!(
                "unknown schedule {name:?}: expected steps, exponential, staircase or cosine"
            )),
        }
    }
}

fn pair(text: &str, between: char) -> Result<(&str, &str), String> {
    text.split_once(between).ok_or_else(|| format!("no {between:?} in {text:?}"))
}

fn parsed<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("not a number: {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_schedule_parses() {
        let cases = [
            ("steps:10=0.5,20=1e-3", Schedule::steps(0.1, [(10, 0.5), (20, 1e-3)])),
            ("exponential:0.96/1000", Schedule::exponential(0.1, 0.96, 1000)),
            ("staircase:0.5/7", Schedule::staircase(0.1, 0.5, 7)),
            ("cosine:0/10000", Schedule::cosine(0.1, 0.0, 10_000)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<ScheduleOption>().unwrap().starting_at(0.1), expected);
        }
    }

    #[test]
    fn an_invalid_schedule_is_reported() {
        for (text, part) in [
            ("cosine", "':'"),
            ("sine:0/10", "\"sine\""),
            ("cosine:10", "'/' in \"10\""),
            ("cosine:x/10", "\"x\""),
            ("staircase:0.5/-1", "\"-1\""),
            ("steps:10=0.5,20", "'=' in \"20\""),
            ("steps:10.5=0.5", "\"10.5\""),
        ] {
            let error = text.parse::<ScheduleOption>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
