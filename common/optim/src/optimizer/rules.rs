//! The assignment of optimizers and learning-rate factors to variables.

use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::ids::VariableId;
use pushpull_common::names::NamePattern;

use super::{Optimizer, not_negative};

/// An optimizer for all variables, and optimizers and learning-rate factors for some. The last
/// match applies.
#[derive(Clone, Debug)]
pub struct OptimizerRules {
    /// The first is for all variables.
    optimizers: Vec<(NamePattern, Arc<dyn Optimizer>)>,
    rates: Vec<(NamePattern, f64)>,
}

/// A variable that cannot be trained, or a pattern that matches none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untrainable {
    /// The variable, or the pattern that matches none.
    pub variable: String,
    /// The reason.
    pub reason: String,
}

impl OptimizerRules {
    /// Assigns an optimizer to all variables.
    pub fn new(optimizer: Arc<dyn Optimizer>) -> OptimizerRules {
        OptimizerRules { optimizers: vec![("*".into(), optimizer)], rates: Vec::new() }
    }

    /// Assigns an optimizer to the variables whose names match.
    pub fn optimizer_for(&mut self, names: NamePattern, optimizer: Arc<dyn Optimizer>) {
        self.optimizers.push((names, optimizer));
    }

    /// Multiplies the learning rate of the variables whose names match by a factor.
    pub fn rate_for(&mut self, names: NamePattern, factor: f64) {
        self.rates.push((names, factor));
    }

    /// Returns the optimizer of all variables that no other pattern matches.
    pub fn default(&self) -> &Arc<dyn Optimizer> {
        &self.optimizers[0].1
    }

    /// Returns the patterns with their own optimizers and the kinds of these, in a form that can be
    /// compared.
    pub fn exceptions(&self) -> String {
        let exception = |(names, rule): &(NamePattern, Arc<dyn Optimizer>)| {
            // Quoted, because a name may contain any character.
            format!("{:?}: {}", names.as_str(), rule.kind())
        };
        self.optimizers[1..].iter().map(exception).collect::<Vec<_>>().join(", ")
    }

    /// Returns all optimizers and factors with their settings, in a form that can be compared: the
    /// debug texts of the rules, which have every hyperparameter.
    pub fn settings(&self) -> String {
        let rule = |(names, rule): &(NamePattern, Arc<dyn Optimizer>)| match names.matches_all() {
            true => format!("{rule:?}"),
            false => format!("{:?}: {rule:?}", names.as_str()),
        };
        let rate =
            |(names, factor): &(NamePattern, f64)| format!("{:?} * {factor}", names.as_str());
        // Factors are short, so a difference in one is in the beginning of the text.
        let all = self.rates.iter().map(rate).chain(self.optimizers.iter().map(rule));
        all.collect::<Vec<_>>().join(", ")
    }

    /// Yields all optimizers, including those that match no variable.
    pub fn optimizers(&self) -> impl Iterator<Item = &dyn Optimizer> {
        self.optimizers.iter().map(|(_, optimizer)| &**optimizer)
    }

    /// Returns the first invalid hyperparameter or factor: its name, its value with the pattern,
    /// and the reason.
    pub fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let rules = self.optimizers.iter().map(|(names, rule)| (names, rule.fault()));
        let rates = self.rates.iter();
        let rates = rates.map(|(names, factor)| (names, not_negative("rate_for", *factor)));
        let (names, (name, value, reason)) =
            rules.chain(rates).find_map(|(names, fault)| Some((names, fault?)))?;
        let value = match names.matches_all() {
            true => value.to_string(),
            false => format!("{value} for {:?}", names.as_str()),
        };
        Some((name, value, reason))
    }

    /// Checks that the variables of a catalogue can be trained with these rules. A pattern that
    /// matches no trained variable is rejected too: it is probably mistyped, and another model
    /// would be trained.
    pub fn check(&self, catalogue: &Catalogue) -> Result<(), Untrainable> {
        let trained = || catalogue.variables().iter().filter(|variable| variable.is_trainable());
        let names = self.optimizers[1..].iter().map(|(names, _)| names);
        for names in names.chain(self.rates.iter().map(|(names, _)| names)) {
            if !trained().any(|variable| names.matches(variable.name())) {
                let variable = names.to_string();
                let reason = "no trained variable is named so";
                return Err(Untrainable { variable, reason: reason.to_owned() });
            }
        }
        for (id, variable) in (0..).map(VariableId).zip(catalogue.variables()) {
            let (rule, factor) = self.of(variable.name());
            let rule = &self.optimizers[rule].1;
            let kind = rule.kind();
            let parts = catalogue.partitions_of(id).len();
            let reason = match rule.sums_whole_variables() {
                _ if !variable.is_trainable() => continue,
                _ if factor != 1.0 && !rule.scales_rate() => {
                    format!("its optimizer {kind} takes no learning-rate factor ({factor})")
                }
                _ if variable.as_table().is_some() && rule.moves_absent_rows() => {
                    format!("it is a table, and its optimizer {kind} moves rows that no push has")
                }
                true if variable.is_sparse() => {
                    format!("its optimizer {kind} needs a dense variable")
                }
                true if parts > 1 => {
                    format!("its optimizer {kind} needs a single partition, not {parts}")
                }
                _ => continue,
            };
            return Err(Untrainable { variable: variable.name().to_owned(), reason });
        }
        Ok(())
    }

    /// Returns the index of the optimizer for a variable of this name, and its learning-rate
    /// factor.
    fn of(&self, name: &str) -> (usize, f64) {
        let rule = self.optimizers.iter().rposition(|(names, _)| names.matches(name));
        let rate = self.rates.iter().rfind(|(names, _)| names.matches(name));
        (rule.unwrap_or(0), rate.map_or(1.0, |&(_, factor)| factor))
    }

    /// Resolves the rules for the variables of a catalogue.
    pub fn of_variables(&self, catalogue: &Catalogue) -> VariableRules {
        let optimizers = self.optimizers.iter().map(|(_, rule)| rule.clone()).collect();
        let of = catalogue.variables().iter().map(|variable| self.of(variable.name())).collect();
        VariableRules { optimizers, of }
    }
}

/// The optimizer of each variable of a catalogue.
#[derive(Clone, Debug, Default)]
pub struct VariableRules {
    optimizers: Vec<Arc<dyn Optimizer>>,
    /// For each variable, the index of its optimizer and its learning-rate factor.
    of: Vec<(usize, f64)>,
}

impl VariableRules {
    /// Returns the optimizer of a variable, whether the variable is trained or not.
    #[inline]
    pub fn optimizer(&self, variable: VariableId) -> &dyn Optimizer {
        &*self.optimizers[self.rule_index(variable)]
    }

    /// Returns the learning-rate factor of a variable.
    #[inline]
    pub fn rate(&self, variable: VariableId) -> f64 {
        self.of[variable.0 as usize].1
    }

    /// Returns all optimizers, including those of no variable.
    #[inline]
    pub fn optimizers(&self) -> &[Arc<dyn Optimizer>] {
        &self.optimizers
    }

    /// Returns the index of a variable's optimizer.
    #[inline]
    pub fn rule_index(&self, variable: VariableId) -> usize {
        self.of[variable.0 as usize].0
    }

    /// Returns whether updates of a partition need sums over its variable. The partition is then
    /// the whole variable.
    #[inline]
    pub fn sums(&self, partition: &Partition) -> bool {
        partition.trainable && self.optimizer(partition.variable).sums_whole_variables()
    }

    /// Returns whether any partition of a layout needs sums.
    pub fn sum_any(&self, layout: &ShardLayout) -> bool {
        self.optimizers.iter().any(|rule| rule.sums_whole_variables())
            && layout.partitions().iter().any(|partition| self.sums(partition))
    }

    /// Returns the number of slots of a partition.
    #[inline]
    pub fn slots(&self, partition: &Partition) -> usize {
        match partition.trainable {
            true => self.optimizer(partition.variable).slots().len(),
            false => 0,
        }
    }

    /// Returns the number of slots of the partition that has most.
    pub fn most_slots(&self, layout: &ShardLayout) -> usize {
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

    fn rules() -> OptimizerRules {
        let mut rules = OptimizerRules::new(Arc::new(Adam::new(0.1)));
        rules.optimizer_for("embedding/*".into(), Arc::new(Adagrad::new(0.5)));
        rules.optimizer_for("embedding/b".into(), Arc::new(Sgd::new(0.5)));
        rules
    }

    #[test]
    fn the_last_matching_rule_and_factor_apply() {
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
        assert_eq!(slots.collect::<Vec<_>>(), [2, 1, 0, 0], "a plain variable has none");
        assert_eq!(found.most_slots(&layout), 2);
        assert_eq!(rules.exceptions(), "\"embedding/*\": adagrad, \"embedding/b\": sgd");
    }

    #[test]
    fn whole_variable_rules_reject_partitioned_and_sparse_variables() {
        let rows = |name| VariableSpec::f32(name, [6, 2]).unwrap();
        let parts = rows("parts").partitioner(Partitioner::Fixed { shards: 3 });
        let catalogue = placed(vec![rows("whole"), rows("sparse").sparse(), parts]);
        let checked = |names: &str| {
            let mut rules = OptimizerRules::new(Arc::new(Sgd::new(0.5)));
            rules.optimizer_for(names.into(), Arc::new(Lamb::default()));
            rules.check(&catalogue).map_err(|error| (error.variable, error.reason))
        };
        assert_eq!(checked("whole"), Ok(()));
        for (variable, reason) in [
            ("sparse", "its optimizer lamb needs a dense variable"),
            ("parts", "its optimizer lamb needs a single partition, not 3"),
        ] {
            assert_eq!(checked(variable), Err((variable.to_owned(), reason.to_owned())));
        }
    }

    #[test]
    fn untrainable_variables_and_unmatched_patterns_are_rejected() {
        let catalogue = catalogue(&["w", "embedding/w", "embedding/b"]);
        let checked = |change: fn(&mut OptimizerRules)| {
            let mut rules = rules();
            change(&mut rules);
            rules.check(&catalogue).map_err(|error| (error.variable, error.reason))
        };
        let rejected = |variable: &str, reason: &str| Err((variable.to_owned(), reason.to_owned()));
        assert_eq!(checked(|rules| rules.rate_for("*".into(), 0.5)), Ok(()));
        let unmatched = "no trained variable is named so";
        assert_eq!(checked(|rules| rules.rate_for("v".into(), 0.5)), rejected("v", unmatched));
        let plain = |rules: &mut OptimizerRules| {
            rules.optimizer_for("plain/*".into(), Arc::new(Sgd::new(0.5)));
        };
        assert_eq!(checked(plain), rejected("plain/*", unmatched));
        let ftrl = |rules: &mut OptimizerRules| {
            rules.optimizer_for("w".into(), Arc::new(Ftrl::new(0.5)));
            rules.rate_for("*".into(), 0.5);
        };
        assert_eq!(
            checked(ftrl),
            rejected("w", "its optimizer ftrl takes no learning-rate factor (0.5)")
        );
    }

    #[test]
    fn invalid_hyperparameters_of_any_rule_are_found() {
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
        let rules = OptimizerRules::new(Arc::new(Sgd::new(-1.0)));
        assert_eq!(rules.fault(), Some(("learning_rate", "-1".to_owned(), reason)));
    }
}
