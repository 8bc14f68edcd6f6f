//! Which rule trains which variable, and at which part of its learning rate.

use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::ids::VariableId;
use pushpull_common::names::Names;

use super::{Optimizer, not_negative};
use crate::error::StorageError;

/// A rule for all variables, and other rules and factors of learning rates for some. Of each the last
/// that is for a variable counts.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// The first is for all variables, the others are each for some.
    optimizers: Vec<(Names, Arc<dyn Optimizer>)>,
    rates: Vec<(Names, f64)>,
}

/// A variable that cannot be trained by the rules, or names that are for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Untrainable {
    pub(crate) variable: String,
    pub(crate) reason: String,
}

impl From<Untrainable> for StorageError {
    fn from(Untrainable { variable, reason }: Untrainable) -> StorageError {
        StorageError::Untrainable { variable, reason }
    }
}

impl Rules {
    pub(crate) fn new(optimizer: Arc<dyn Optimizer>) -> Rules {
        Rules { optimizers: vec![("*".into(), optimizer)], rates: Vec::new() }
    }

    pub(crate) fn optimizer_for(&mut self, names: Names, optimizer: Arc<dyn Optimizer>) {
        self.optimizers.push((names, optimizer));
    }

    pub(crate) fn rate_for(&mut self, names: Names, factor: f64) {
        self.rates.push((names, factor));
    }

    /// The rule for all variables that have no other.
    pub(crate) fn default(&self) -> &Arc<dyn Optimizer> {
        &self.optimizers[0].1
    }

    /// The names that have a rule of their own, each with its kind, in a form to be compared.
    pub(crate) fn exceptions(&self) -> String {
        let exception = |(names, rule): &(Names, Arc<dyn Optimizer>)| {
            // Quoted, as names may have any character.
            format!("{:?}: {}", names.as_str(), rule.kind())
        };
        self.optimizers[1..].iter().map(exception).collect::<Vec<_>>().join(", ")
    }

    /// Every rule, whether there is a variable for it or not.
    pub(crate) fn optimizers(&self) -> impl Iterator<Item = &dyn Optimizer> {
        self.optimizers.iter().map(|(_, optimizer)| &**optimizer)
    }

    /// The first hyperparameter or factor that cannot be used: its name, its value with the names that
    /// it is for, and why.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let rules = self.optimizers.iter().map(|(names, rule)| (names, rule.fault()));
        let rates = self.rates.iter();
        let rates = rates.map(|(names, factor)| (names, not_negative("rate_for", *factor)));
        let (names, (name, value, reason)) =
            rules.chain(rates).find_map(|(names, fault)| Some((names, fault?)))?;
        let value = match names.are_all() {
            true => value.to_string(),
            false => format!("{value} for {:?}", names.as_str()),
        };
        Some((name, value, reason))
    }

    /// Whether the variables of a catalogue can be trained so. Names that are for none of them are
    /// refused, too: somebody has mistyped them, and would train another model.
    pub(crate) fn check(&self, catalogue: &Catalogue) -> Result<(), Untrainable> {
        let trained = || catalogue.variables().iter().filter(|variable| variable.is_trainable());
        let names = self.optimizers[1..].iter().map(|(names, _)| names);
        for names in names.chain(self.rates.iter().map(|(names, _)| names)) {
            if !trained().any(|variable| names.contain(variable.name())) {
                let (variable, reason) = (names.to_string(), "no trained variable is named so");
                return Err(Untrainable { variable, reason: reason.to_owned() });
            }
        }
        for (id, variable) in (0..).map(VariableId).zip(catalogue.variables()) {
            let (rule, factor) = self.of(variable.name());
            let rule = &self.optimizers[rule].1;
            let (kind, parts) = (rule.kind(), catalogue.partitions_of(id).len());
            let reason = match rule.sums_whole_variables() {
                _ if !variable.is_trainable() => continue,
                _ if factor != 1.0 && !rule.scales_rate() => {
                    format!("its rule, {kind}, takes no factor of its rate ({factor})")
                }
                _ if variable.as_table().is_some() && rule.moves_absent_rows() => {
                    format!("it is a table, and its rule, {kind}, moves rows that no push has")
                }
                true if variable.is_sparse() => {
                    format!("its rule, {kind}, needs all of it, and it is sparse")
                }
                true if parts > 1 => {
                    format!("its rule, {kind}, needs all of it in one place, not in {parts} parts")
                }
                _ => continue,
            };
            return Err(Untrainable { variable: variable.name().to_owned(), reason });
        }
        Ok(())
    }

    /// Which rule is for a variable of this name, and at which part of its rate.
    fn of(&self, name: &str) -> (usize, f64) {
        let rule = self.optimizers.iter().rposition(|(names, _)| names.contain(name));
        let rate = self.rates.iter().rfind(|(names, _)| names.contain(name));
        (rule.unwrap_or(0), rate.map_or(1.0, |&(_, factor)| factor))
    }

    /// What they come to for the variables of a catalogue.
    pub(crate) fn of_variables(&self, catalogue: &Catalogue) -> VariableRules {
        let optimizers = self.optimizers.iter().map(|(_, rule)| rule.clone()).collect();
        let of = catalogue.variables().iter().map(|variable| self.of(variable.name())).collect();
        VariableRules { optimizers, of }
    }
}

/// Which rule trains each variable of a catalogue.
#[derive(Clone, Debug, Default)]
pub(crate) struct VariableRules {
    optimizers: Vec<Arc<dyn Optimizer>>,
    /// For each variable, the rule's place among them and the factor of its learning rate.
    of: Vec<(usize, f64)>,
}

impl VariableRules {
    /// The rule of a variable of the catalogue, whether it is trained or not.
    pub(crate) fn optimizer(&self, variable: VariableId) -> &dyn Optimizer {
        &*self.optimizers[self.place(variable)]
    }

    /// The factor of the learning rate with which a variable is trained.
    pub(crate) fn rate(&self, variable: VariableId) -> f64 {
        self.of[variable.0 as usize].1
    }

    /// All rules, some of which may be for no variable.
    pub(crate) fn optimizers(&self) -> &[Arc<dyn Optimizer>] {
        &self.optimizers
    }

    /// The place of a variable's rule among them.
    pub(crate) fn place(&self, variable: VariableId) -> usize {
        self.of[variable.0 as usize].0
    }

    /// Whether a partition, which is all of its variable then, is changed by sums over it.
    pub(crate) fn sums(&self, partition: &Partition) -> bool {
        partition.trainable && self.optimizer(partition.variable).sums_whole_variables()
    }

    /// Whether some partition of a layout is.
    pub(crate) fn sum_any(&self, layout: &ShardLayout) -> bool {
        self.optimizers.iter().any(|rule| rule.sums_whole_variables())
            && layout.partitions().iter().any(|partition| self.sums(partition))
    }

    /// How many slots a partition has.
    pub(crate) fn slots(&self, partition: &Partition) -> usize {
        match partition.trainable {
            true => self.optimizer(partition.variable).slots().len(),
            false => 0,
        }
    }

    /// The most slots that a partition of a layout has.
    pub(crate) fn most_slots(&self, layout: &ShardLayout) -> usize {
        layout.partitions().iter().map(|partition| self.slots(partition)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::optimizer::{Adagrad, Adam, Ftrl, Lamb, Sgd};

    fn catalogue(names: &[&str]) -> Catalogue {
        let variable = |name: &&str| VariableSpec::f32(*name, [2]).unwrap();
        let mut variables: Vec<VariableSpec> = names.iter().map(variable).collect();
        variables.push(VariableSpec::f32("plain/b", [2]).unwrap().plain());
        placed(variables)
    }

    fn placed(variables: Vec<VariableSpec>) -> Catalogue {
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        Catalogue::new(variables, &placement).unwrap()
    }

    fn rules() -> Rules {
        let mut rules = Rules::new(Arc::new(Adam::new(0.1)));
        rules.optimizer_for("embedding/*".into(), Arc::new(Adagrad::new(0.5)));
        rules.optimizer_for("embedding/b".into(), Arc::new(Sgd::new(0.5)));
        rules
    }

    #[test]
    fn the_last_that_is_for_a_variable_counts() {
        let mut rules = rules();
        rules.rate_for("*".into(), 0.125);
        rules.rate_for("embedding/*".into(), 0.5);
        rules.rate_for("embedding/b".into(), 0.25);
        let catalogue = catalogue(&["w", "embedding/w", "embedding/b"]);
        let found = rules.of_variables(&catalogue);
        let of = |id| (found.optimizer(VariableId(id)).kind(), found.rate(VariableId(id)));
        let expected = [("adam", 0.125), ("adagrad", 0.5), ("sgd", 0.25), ("adam", 0.125)];
        assert_eq!([0, 1, 2, 3].map(of), expected);
        let layout = catalogue.layout(catalogue.shards().next().unwrap());
        let slots = layout.partitions().iter().map(|partition| found.slots(partition));
        assert_eq!(slots.collect::<Vec<_>>(), [2, 1, 0, 0], "what is plain has none");
        assert_eq!(found.most_slots(&layout), 2);
        assert_eq!(rules.exceptions(), "\"embedding/*\": adagrad, \"embedding/b\": sgd");
    }

    #[test]
    fn what_needs_a_whole_variable_takes_no_parts_and_no_rows() {
        let rows = |name| VariableSpec::f32(name, [6, 2]).unwrap();
        let parts = rows("parts").partitioner(Partitioner::Fixed { shards: 3 });
        let catalogue = placed(vec![rows("whole"), rows("sparse").sparse(), parts]);
        let checked = |names: &str| {
            let mut rules = Rules::new(Arc::new(Sgd::new(0.5)));
            rules.optimizer_for(names.into(), Arc::new(Lamb::default()));
            rules.check(&catalogue).map_err(|error| (error.variable, error.reason))
        };
        assert_eq!(checked("whole"), Ok(()));
        for (variable, reason) in [
            ("sparse", "its rule, lamb, needs all of it, and it is sparse"),
            ("parts", "its rule, lamb, needs all of it in one place, not in 3 parts"),
        ] {
            assert_eq!(checked(variable), Err((variable.to_owned(), reason.to_owned())));
        }
    }

    #[test]
    fn what_cannot_be_trained_so_is_named() {
        let catalogue = catalogue(&["w", "embedding/w", "embedding/b"]);
        let checked = |change: fn(&mut Rules)| {
            let mut rules = rules();
            change(&mut rules);
            rules.check(&catalogue).map_err(|error| (error.variable, error.reason))
        };
        let refused = |variable: &str, reason: &str| Err((variable.to_owned(), reason.to_owned()));
        assert_eq!(checked(|rules| rules.rate_for("*".into(), 0.5)), Ok(()));
        let nobody = "no trained variable is named so";
        assert_eq!(checked(|rules| rules.rate_for("v".into(), 0.5)), refused("v", nobody));
        let plain = |rules: &mut Rules| {
            rules.optimizer_for("plain/*".into(), Arc::new(Sgd::new(0.5)));
        };
        assert_eq!(checked(plain), refused("plain/*", nobody));
        let ftrl = |rules: &mut Rules| {
            rules.optimizer_for("w".into(), Arc::new(Ftrl::new(0.5)));
            rules.rate_for("*".into(), 0.5);
        };
        assert_eq!(
            checked(ftrl),
            refused("w", "its rule, ftrl, takes no factor of its rate (0.5)")
        );
    }

    #[test]
    fn the_fault_of_any_rule_or_factor_is_found() {
        assert_eq!(rules().fault(), None);
        let reason = "it must be finite and not negative";
        for (factor, value) in [(-0.5, "-0.5"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let mut rules = rules();
            rules.rate_for("w".into(), factor);
            let value = format!("{value} for \"w\"");
            assert_eq!(rules.fault(), Some(("rate_for", value, reason)));
        }
        let mut rules = rules();
        rules.optimizer_for("w*".into(), Arc::new(Sgd::new(-1.0)));
        assert_eq!(rules.fault(), Some(("learning_rate", "-1 for \"w*\"".to_owned(), reason)));
        let rules = Rules::new(Arc::new(Sgd::new(-1.0)));
        assert_eq!(rules.fault(), Some(("learning_rate", "-1".to_owned(), reason)));
    }
}
