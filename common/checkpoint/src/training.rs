//! The optimizers of a checkpoint's variables; they determine the slots that it contains.

use std::collections::BTreeSet;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::ids::VariableId;
use pushpull_optim::optimizer::VariableRules;
use serde::{Deserialize, Serialize};

/// The optimizers of a catalogue's variables, in a checkpoint or on a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointTraining {
    /// The optimizers that train at least one variable, each once.
    pub optimizers: Vec<OptimizerEntry>,
    /// For each variable of the catalogue, in order, the index of its optimizer; `None` for a plain
    /// one.
    of: Vec<Option<u32>>,
}

/// An optimizer as the manifest describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerEntry {
    /// The optimizer's name, such as `adam`.
    pub kind: String,
    /// The hyperparameters, for display.
    pub configuration: String,
    /// The names of the slots, in order.
    pub slots: Vec<String>,
}

impl CheckpointTraining {
    /// Returns the optimizers that these rules assign to the variables of a catalogue.
    pub fn new(catalogue: &Catalogue, rules: &VariableRules) -> CheckpointTraining {
        let mut optimizers = Vec::new();
        let mut entries = vec![None; rules.optimizers().len()];
        let mut entry_of = |index: usize| {
            *entries[index].get_or_insert_with(|| {
                let rule = &rules.optimizers()[index];
                optimizers.push(OptimizerEntry {
                    kind: rule.kind().to_owned(),
                    configuration: format!("{rule:?}"),
                    slots: rule.slots().iter().map(|slot| slot.name.to_owned()).collect(),
                });
                optimizers.len() as u32 - 1
            })
        };
        let variables = (0..).map(VariableId).zip(catalogue.variables());
        let of = variables
            .map(|(id, variable)| variable.is_trainable().then(|| entry_of(rules.rule_index(id))))
            .collect();
        CheckpointTraining { optimizers, of }
    }

    /// Returns a training of all trainable variables by one optimizer with these slots.
    #[cfg(test)]
    pub(crate) fn by_one(catalogue: &Catalogue, kind: &str, slots: &[&str]) -> CheckpointTraining {
        let slots = slots.iter().map(|&slot| slot.to_owned()).collect();
        let optimizer =
            OptimizerEntry { kind: kind.to_owned(), configuration: String::new(), slots };
        let variables = catalogue.variables().iter();
        let of = variables.map(|variable| variable.is_trainable().then_some(0)).collect();
        CheckpointTraining { optimizers: vec![optimizer], of }
    }

    /// Returns the optimizer of a variable; `None` if the variable is not trained.
    pub(crate) fn optimizer(&self, variable: VariableId) -> Option<&OptimizerEntry> {
        let entry = (*self.of.get(variable.0 as usize)?)?;
        self.optimizers.get(entry as usize)
    }

    /// Returns the kinds of the optimizers, each once.
    pub(crate) fn kinds(&self) -> Vec<String> {
        let kinds = self.optimizers.iter().map(|optimizer| optimizer.kind.clone());
        kinds.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the slots of a variable.
    pub(crate) fn slots(&self, variable: VariableId) -> &[String] {
        self.optimizer(variable).map_or(&[], |optimizer| &optimizer.slots)
    }

    /// Returns the slots of a partition, which are those of its variable.
    pub(crate) fn slots_of(&self, partition: &Partition) -> &[String] {
        self.slots(partition.variable)
    }

    /// Returns the largest number of slots of a variable.
    pub(crate) fn most_slots(&self) -> usize {
        self.optimizers.iter().map(|optimizer| optimizer.slots.len()).max().unwrap_or(0)
    }

    /// Returns the first slot name that is invalid, or not unique within its optimizer.
    pub(crate) fn bad_slot(&self) -> Option<&str> {
        self.optimizers.iter().find_map(|optimizer| bad_slot(&optimizer.slots))
    }

    /// Checks everything that does not need the catalogue. An error has the expected and the found
    /// contents.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let fault = |expected: String, found: String| Err((expected, found));
        // A tensor is planned for each partition and slot, so their number must not be the file's
        // choice.
        if self.most_slots() > SLOTS_MAX {
            let found = format!("{} slots", self.most_slots());
            return fault(format!("at most {SLOTS_MAX} slots"), found);
        }
        if let Some(name) = self.bad_slot() {
            return fault("slots with unique names".to_owned(), format!("{name:?}"));
        }
        let optimizers = self.optimizers.len();
        match self.of.iter().flatten().find(|&&entry| entry as usize >= optimizers) {
            Some(entry) => fault(format!("one of {optimizers} optimizers"), format!("{entry}")),
            None => Ok(()),
        }
    }

    /// Checks that this is the training of a catalogue's variables. Errors as in
    /// [`CheckpointTraining::check`].
    pub(crate) fn check_catalogue(&self, catalogue: &Catalogue) -> Result<(), (String, String)> {
        let variables = catalogue.variables();
        if self.of.len() != variables.len() {
            let expected = format!("{} optimizer entries", variables.len());
            return Err((expected, self.of.len().to_string()));
        }
        let mut both = variables.iter().zip(&self.of);
        match both.find(|(variable, entry)| variable.is_trainable() != entry.is_some()) {
            Some((variable, entry)) => {
                let say = |trained| if trained { "an optimizer" } else { "no optimizer" };
                let expected =
                    format!("{} for {:?}", say(variable.is_trainable()), variable.name());
                Err((expected, say(entry.is_some()).to_owned()))
            }
            None => Ok(()),
        }
    }
}

fn bad_slot(slots: &[String]) -> Option<&str> {
    let valid = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let mut names = slots.iter().enumerate();
    let bad = names.find(|&(index, name)| !valid(name) || slots[..index].contains(name));
    bad.map(|(_, name)| name.as_str())
}

/// More slots than any optimizer keeps.
const SLOTS_MAX: usize = 16;
