//! What is run: a seed, or a part of what it says.

use std::collections::BTreeSet;
use std::env::{VarError, var};
use std::fmt;

/// A seed's run, with some of its faults left out and its sizes bounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    /// The faults that do not come, by their numbers in the seed's plan.
    pub(crate) without: BTreeSet<usize>,
    pub(crate) at_most: Sizes,
}

/// How large a cluster and its training are, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) steps: u64,
    pub(crate) workers: u64,
    pub(crate) tasks: u64,
    pub(crate) shards: u64,
    pub(crate) variables: u64,
}

impl Sizes {
    /// No bound.
    pub(crate) const ANY: Sizes = Sizes::all(u64::MAX);

    /// The least that makes a cluster.
    pub(crate) const LEAST: Sizes = Sizes::all(1);

    const fn all(size: u64) -> Sizes {
        Sizes { steps: size, workers: size, tasks: size, shards: size, variables: size }
    }

    /// Each size with its name.
    pub(crate) fn named(&mut self) -> [(&'static str, &mut u64); 5] {
        [
            ("steps", &mut self.steps),
            ("workers", &mut self.workers),
            ("tasks", &mut self.tasks),
            ("shards", &mut self.shards),
            ("variables", &mut self.variables),
        ]
    }

    /// The smaller one of each.
    pub(crate) fn min(mut self, mut other: Sizes) -> Sizes {
        for ((_, size), (_, bound)) in self.named().into_iter().zip(other.named()) {
            *size = (*size).min(*bound);
        }
        self
    }
}

impl Scenario {
    /// All that the seed says.
    pub(crate) fn of(seed: u64) -> Scenario {
        Scenario { seed, without: BTreeSet::new(), at_most: Sizes::ANY }
    }

    /// What the environment asks for, if it names a seed.
    pub(crate) fn of_environment() -> Option<Scenario> {
        Scenario::read(text)
    }

    /// What these variables ask for, as they are printed.
    #[cfg(feature = "planted")]
    pub(crate) fn of_words(words: &str) -> Scenario {
        let value = |name: &str| {
            let mut variables = words.split(' ').filter_map(|variable| variable.split_once('='));
            variables.find(|(other, _)| *other == name).map(|(_, value)| value.to_owned())
        };
        Scenario::read(value).expect("a seed is named")
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Option<Scenario> {
        let mut scenario = Scenario::of(parse("PUSHPULL_SEED", &value("PUSHPULL_SEED")?));
        let name = "PUSHPULL_SIM_WITHOUT";
        for fault in value(name).iter().flat_map(|text| text.split(',')) {
            scenario.without.insert(parse(name, fault) as usize);
        }
        let name = "PUSHPULL_SIM_AT_MOST";
        for bound in value(name).iter().flat_map(|text| text.split(',')) {
            let (size, most) = bound.split_once('=').unwrap_or((bound, ""));
            let mut named = scenario.at_most.named().into_iter();
            let place = named.find(|(other, _)| *other == size);
            *place.unwrap_or_else(|| panic!("{name} knows no {size}")).1 = parse(name, most);
        }
        Some(scenario)
    }
}

/// The variables of the environment that ask for it.
impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// A number in the environment.
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
    text.parse().unwrap_or_else(|_| panic!("{name} must be made of numbers, not {text:?}"))
}
