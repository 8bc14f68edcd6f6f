//! A scenario: a seed, with some of its faults left out and its sizes bounded.

use std::collections::BTreeSet;
use std::env::{VarError, var};
use std::fmt;

/// A family of scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Workers train until the last step.
    Training,
    /// A coordinator schedules calls, whose functions train.
    Calls,
}

impl Family {
    pub(crate) const ALL: [Family; 2] = [Family::Training, Family::Calls];

    /// Returns the name by which the environment chooses the family.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Family::Training => "training",
            Family::Calls => "calls",
        }
    }

    /// Reads the family from the environment; `None` unless `PUSHPULL_SIM_FAMILY` is set.
    pub(crate) fn of_environment() -> Option<Family> {
        Family::read(text)
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Option<Family> {
        let name = value(FAMILY)?;
        let found = Family::ALL.into_iter().find(|family| family.name() == name);
        Some(found.unwrap_or_else(|| panic!("{FAMILY} has no family {name:?}")))
    }
}

const FAMILY: &str = "PUSHPULL_SIM_FAMILY";

/// The description of a run. Its [`Display`](fmt::Display) form is the environment that replays it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scenario {
    pub(crate) family: Family,
    pub(crate) seed: u64,
    /// The faults that are left out, by their indices in the seed's plan.
    pub(crate) without: BTreeSet<usize>,
    pub(crate) at_most: Sizes,
}

/// The sizes of a cluster and its training, or bounds on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) steps: u64,
    pub(crate) workers: u64,
    pub(crate) tasks: u64,
    pub(crate) shards: u64,
    pub(crate) variables: u64,
}

impl Sizes {
    /// The sizes that bound nothing.
    pub(crate) const ANY: Sizes = Sizes::all(u64::MAX);

    /// The smallest possible cluster.
    pub(crate) const LEAST: Sizes = Sizes::all(1);

    const fn all(size: u64) -> Sizes {
        Sizes { steps: size, workers: size, tasks: size, shards: size, variables: size }
    }

    /// Returns each size with its name.
    pub(crate) fn named(&mut self) -> [(&'static str, &mut u64); 5] {
        [
            ("steps", &mut self.steps),
            ("workers", &mut self.workers),
            ("tasks", &mut self.tasks),
            ("shards", &mut self.shards),
            ("variables", &mut self.variables),
        ]
    }

    /// Returns the smaller of two sizes for each name.
    pub(crate) fn min(mut self, mut other: Sizes) -> Sizes {
        for ((_, size), (_, bound)) in self.named().into_iter().zip(other.named()) {
            *size = (*size).min(*bound);
        }
        self
    }
}

impl Scenario {
    /// Returns the full scenario of a seed.
    pub(crate) fn of(family: Family, seed: u64) -> Scenario {
        Scenario { family, seed, without: BTreeSet::new(), at_most: Sizes::ANY }
    }

    /// Reads a scenario from the environment; `None` unless `PUSHPULL_SEED` is set.
    pub(crate) fn of_environment() -> Option<Scenario> {
        Scenario::read(text)
    }

    /// Parses a scenario from its printed form.
    #[cfg(feature = "planted")]
    pub(crate) fn of_words(words: &str) -> Scenario {
        let value = |name: &str| {
            let mut variables = words.split(' ').filter_map(|variable| variable.split_once('='));
            variables.find(|(other, _)| *other == name).map(|(_, value)| value.to_owned())
        };
        Scenario::read(value).expect("the text has a seed")
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Option<Scenario> {
        let seed = parse("PUSHPULL_SEED", &value("PUSHPULL_SEED")?);
        let mut scenario = Scenario::of(Family::read(&value).unwrap_or(Family::Training), seed);
        let name = "PUSHPULL_SIM_WITHOUT";
        for fault in value(name).iter().flat_map(|text| text.split(',')) {
            scenario.without.insert(parse(name, fault) as usize);
        }
        let name = "PUSHPULL_SIM_AT_MOST";
        for bound in value(name).iter().flat_map(|text| text.split(',')) {
            let (size, most) = bound.split_once('=').unwrap_or((bound, ""));
            let mut named = scenario.at_most.named().into_iter();
            let place = named.find(|(other, _)| *other == size);
            *place.unwrap_or_else(|| panic!("{name} has an unknown size {size:?}")).1 =
                parse(name, most);
        }
        Some(scenario)
    }
}

/// Prints the environment variables that replay the scenario.
impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.family != Family::Training {
            write!(f, "{FAMILY}={} ", self.family.name())?;
        }
        write!(f, "PUSHPULL_SEED={}", self.seed)?;
        let list = |f: &mut fmt::Formatter<'_>, name: &str, items: Vec<String>| match items[..] {
            [] => Ok(()),
            _ => write!(f, " {name}={}", items.join(",")),
        };
        list(f, "PUSHPULL_SIM_WITHOUT", self.without.iter().map(usize::to_string).collect())?;
        let mut at_most = self.at_most;
        let bounds = at_most.named().into_iter().filter(|(_, size)| **size < u64::MAX);
        let bounds = bounds.map(|(name, size)| format!("{name}={size}"));
        list(f, "PUSHPULL_SIM_AT_MOST", bounds.collect())
    }
}

/// Reads a number from the environment; `None` if the variable is not set.
pub(crate) fn number(name: &str) -> Option<u64> {
    text(name).map(|text| parse(name, &text))
}

pub(crate) fn text(name: &str) -> Option<String> {
    match var(name) {
        Ok(text) => Some(text),
        Err(VarError::NotPresent) => None,
        Err(error) => panic!("{name}: {error}"),
    }
}

fn parse(name: &str, text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}"))
}
