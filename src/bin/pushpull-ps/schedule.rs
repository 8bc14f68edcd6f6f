//! How the learning rate goes on from its first value, as a flag says it.

use std::str::FromStr;

use pushpull::Schedule;

/// A schedule but for the rate it begins with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Course {
    Steps(Vec<(u64, f64)>),
    Exponential(f64, u64),
    Staircase(f64, u64),
    Cosine(f64, u64),
}

impl Course {
    /// The schedule that begins with a rate.
    pub(crate) fn starting_at(&self, rate: f64) -> Schedule {
        match self {
            Course::Steps(then) => Schedule::steps(rate, then.iter().copied()),
            Course::Exponential(decay, steps) => Schedule::exponential(rate, *decay, *steps),
            Course::Staircase(decay, steps) => Schedule::staircase(rate, *decay, *steps),
            Course::Cosine(last, steps) => Schedule::cosine(rate, *last, *steps),
        }
    }
}

impl FromStr for Course {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, terms) = text.split_once(':').ok_or("no ':' behind its name")?;
        let (number, steps) = (parsed::<f64>, parsed::<u64>);
        if name == "steps" {
            let then = terms.split(',').map(|then| {
                let (boundary, rate) = pair(then, '=')?;
                Ok((steps(boundary)?, number(rate)?))
            });
            return Ok(Course::Steps(then.collect::<Result<_, String>>()?));
        }
        let (first, last) = pair(terms, '/')?;
        let (first, last) = (number(first)?, steps(last)?);
        match name {
            "exponential" => Ok(Course::Exponential(first, last)),
            "staircase" => Ok(Course::Staircase(first, last)),
            "cosine" => Ok(Course::Cosine(first, last)),
            _ => Err(format!("no {name:?}, only steps, exponential, staircase and cosine")),
        }
    }
}

fn pair(text: &str, between: char) -> Result<(&str, &str), String> {
    text.split_once(between).ok_or_else(|| format!("no {between:?} in {text:?}"))
}

fn parsed<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("no number: {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_flag_says_is_a_schedule() {
        let cases = [
            ("steps:10=0.5,20=1e-3", Schedule::steps(0.1, [(10, 0.5), (20, 1e-3)])),
            ("exponential:0.96/1000", Schedule::exponential(0.1, 0.96, 1000)),
            ("staircase:0.5/7", Schedule::staircase(0.1, 0.5, 7)),
            ("cosine:0/10000", Schedule::cosine(0.1, 0.0, 10_000)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<Course>().unwrap().starting_at(0.1), expected);
        }
    }

    #[test]
    fn what_is_no_schedule_is_said() {
        for (text, part) in [
            ("cosine", "':'"),
            ("sine:0/10", "\"sine\""),
            ("cosine:10", "'/' in \"10\""),
            ("cosine:x/10", "\"x\""),
            ("staircase:0.5/-1", "\"-1\""),
            ("steps:10=0.5,20", "'=' in \"20\""),
            ("steps:10.5=0.5", "\"10.5\""),
        ] {
            let error = text.parse::<Course>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
