//! Which optimizer trains which variable, and so which slots a checkpoint has of it.

use std::collections::BTreeSet;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::ids::VariableId;
use serde::{Deserialize, Serialize};

use crate::optimizer::VariableRules;

/// The optimizers that a checkpoint was saved under, or that a shard has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Training {
    /// Those that train a variable, each once.
    pub(crate) optimizers: Vec<OptimizerEntry>,
    /// Which of them it is, for each variable of the catalogue in its order; nothing for a plain one.
    of: Vec<Option<u32>>,
}

/// An optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimizerEntry {
    /// The rule's name, such as `adam`.
    pub(crate) kind: String,
    /// Its hyperparameters, for people.
    pub(crate) configuration: String,
    /// The names of its slots, in order.
    pub(crate) slots: Vec<String>,
}

impl Training {
    /// Of the variables of a catalogue by these rules.
    pub(crate) fn new(catalogue: &Catalogue, rules: &VariableRules) -> Training {
        let mut optimizers = Vec::new();
        let mut entries = vec![None; rules.optimizers().len()];
        let mut entry_of = |place: usize| {
            *entries[place].get_or_insert_with(|| {
                let rule = &rules.optimizers()[place];
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
            .map(|(id, variable)| variable.is_trainable().then(|| entry_of(rules.place(id))))
            .collect();
        Training { optimizers, of }
    }

    /// All that are trained by one optimizer of these slots.
    #[cfg(test)]
    pub(crate) fn by_one(catalogue: &Catalogue, kind: &str, slots: &[&str]) -> Training {
        let slots = slots.iter().map(|&slot| slot.to_owned()).collect();
        let optimizer =
            OptimizerEntry { kind: kind.to_owned(), configuration: String::new(), slots };
        let variables = catalogue.variables().iter();
        let of = variables.map(|variable| variable.is_trainable().then_some(0)).collect();
        Training { optimizers: vec![optimizer], of }
    }

    /// The optimizer of a variable; nothing for one that is not trained.
    pub(crate) fn optimizer(&self, variable: VariableId) -> Option<&OptimizerEntry> {
        let entry = (*self.of.get(variable.0 as usize)?)?;
        self.optimizers.get(entry as usize)
    }

    /// The kinds of the optimizers, each once.
    pub(super) fn kinds(&self) -> Vec<String> {
        let kinds = self.optimizers.iter().map(|optimizer| optimizer.kind.clone());
        kinds.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The slots of a variable.
    pub(crate) fn slots(&self, variable: VariableId) -> &[String] {
        self.optimizer(variable).map_or(&[], |optimizer| &optimizer.slots)
    }

    /// The slots of a partition of the catalogue: the variable's.
    pub(super) fn slots_of(&self, partition: &Partition) -> &[String] {
        self.slots(partition.variable)
    }

    /// The most slots that a variable has.
    pub(super) fn most_slots(&self) -> usize {
        self.optimizers.iter().map(|optimizer| optimizer.slots.len()).max().unwrap_or(0)
    }

    /// The first slot whose name is not one, or is another one's of the same optimizer.
    pub(super) fn bad_slot(&self) -> Option<&str> {
        self.optimizers.iter().find_map(|optimizer| bad_slot(&optimizer.slots))
    }

    /// Checks what can be checked without the catalogue: what there must be, and what there is.
    pub(super) fn check(&self) -> Result<(), (String, String)> {
        let fault = |expected: String, found: String| Err((expected, found));
        // Tensors are planned for each partition and slot, so a file may not say how many freely.
        if self.most_slots() > SLOTS_MAX {
            let found = format!("{} slots", self.most_slots());
            return fault(format!("at most {SLOTS_MAX} slots"), found);
        }
        if let Some(name) = self.bad_slot() {
            return fault("slots with names of their own".to_owned(), format!("{name:?}"));
        }
        let optimizers = self.optimizers.len();
        match self.of.iter().flatten().find(|&&entry| entry as usize >= optimizers) {
            Some(entry) => fault(format!("one of {optimizers} optimizers"), format!("{entry}")),
            None => Ok(()),
        }
    }

    /// Checks that this is the training of the variables of a catalogue.
    pub(super) fn check_catalogue(&self, catalogue: &Catalogue) -> Result<(), (String, String)> {
        let variables = catalogue.variables();
        if self.of.len() != variables.len() {
            let expected = format!("how {} variables are trained", variables.len());
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

/// More than any rule keeps.
const SLOTS_MAX: usize = 16;
