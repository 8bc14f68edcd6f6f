//! [`ScheduleSetting`]: the value of the setting `schedule`.

use std::str::FromStr;

use pushpull_ps::optim::Schedule;

/// A learning-rate schedule without its initial rate, which the setting `learning-rate` is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ScheduleSetting {
    Steps(Vec<(u64, f64)>),
    Exponential(f64, u64),
    Staircase(f64, u64),
    Cosine(f64, u64),
}

impl ScheduleSetting {
    /// Returns the schedule with this initial rate.
    pub(super) fn starting_at(&self, rate: f64) -> Schedule {
        match self {
            ScheduleSetting::Steps(then) => Schedule::steps(rate, then.iter().copied()),
            ScheduleSetting::Exponential(decay, steps) => {
                Schedule::exponential(rate, *decay, *steps)
            }
            ScheduleSetting::Staircase(decay, steps) => Schedule::staircase(rate, *decay, *steps),
            ScheduleSetting::Cosine(last, steps) => Schedule::cosine(rate, *last, *steps),
        }
    }
}

impl FromStr for ScheduleSetting {
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
            return Ok(ScheduleSetting::Steps(then.collect::<Result<_, String>>()?));
        }
        let (first, last) = pair(terms, '/')?;
        let first = number(first)?;
        let last = steps(last)?;
        match name {
            "exponential" => Ok(ScheduleSetting::Exponential(first, last)),
            "staircase" => Ok(ScheduleSetting::Staircase(first, last)),
            "cosine" => Ok(ScheduleSetting::Cosine(first, last)),
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
            assert_eq!(text.parse::<ScheduleSetting>().unwrap().starting_at(0.1), expected);
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
            let error = text.parse::<ScheduleSetting>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
