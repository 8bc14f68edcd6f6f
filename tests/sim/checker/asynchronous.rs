//! The checker of asynchronous mode: each shard applies a push once and loses no acknowledged push.
//!
//! Pushes are numbered. Each adds 1 to a base-4 digit of its own in every variable that it has, so
//! a value shows of which pushes it is the sum. A digit of 2 or 3 means that a push counts twice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::Outcome;
use pushpull_common::tensor::DType;

use super::digits::{counts, place, sums};
use super::final_values::FinalValues;
use super::samples::SamplesChecker;
use super::{CheckedPull, Elements, Pushed};
use crate::setting::Setting;

/// The pushes that each shard is known to have applied.
pub(crate) type Known = BTreeMap<ShardId, BTreeSet<usize>>;

/// What the checker knows of a push.
#[derive(Debug)]
struct CheckedPush {
    read: u64,
    variables: Vec<bool>,
    /// The step that the push made, once its worker has received the outcome.
    step: Option<u64>,
    /// Whether the push was refused, withdrawn or stale: then no shard may apply it.
    dropped: bool,
}

/// The checker of a run in asynchronous mode.
#[derive(Debug)]
pub(crate) struct AsynchronousChecker {
    catalogue: Arc<Catalogue>,
    owner: ShardId,
    reject_older: Option<u64>,
    pushes: Vec<CheckedPush>,
    numbers: BTreeMap<u64, usize>,
    known: Known,
    /// By step: the number of the push that made it.
    push_of_step: BTreeMap<u64, usize>,
    /// The newest step that any answer has named.
    step: u64,
    pub(super) pulls: u64,
    pub(super) final_values: FinalValues,
    /// The tokens of gradients that the step owner has reported as applied on some shards only.
    partly_applied: BTreeSet<u64>,
    pub(super) samples: SamplesChecker,
}

impl AsynchronousChecker {
    pub(super) fn new(setting: &Setting) -> AsynchronousChecker {
        let catalogue = setting.catalogue.clone();
        AsynchronousChecker {
            known: catalogue.shards().map(|shard| (shard, BTreeSet::new())).collect(),
            catalogue,
            owner: ShardId { task: 0, shard: 0 },
            reject_older: setting.reject_older,
            pushes: Vec::new(),
            numbers: BTreeMap::new(),
            push_of_step: BTreeMap::new(),
            step: 0,
            pulls: 0,
            final_values: FinalValues::default(),
            partly_applied: BTreeSet::new(),
            samples: SamplesChecker::new(setting.data.clone()),
        }
    }

    pub(super) fn line(&self, dtype: DType, length: usize) -> Elements {
        let (element, digit) = place(self.pushes.len(), dtype);
        assert!(element < length, "{length} elements hold no digit for another push");
        Elements::of(dtype, length, |other| if other == element { 1 << (2 * digit) } else { 0 })
    }

    pub(super) fn pushes(&mut self, push: Pushed) {
        let before = self.numbers.insert(push.token, self.pushes.len());
        assert!(before.is_none(), "token {} is granted twice", push.token);
        self.samples.pushed(push.token, push.samples);
        let variables = push.gradient.iter().map(Option::is_some).collect();
        let read = push.read.0;
        let step = None;
        self.pushes.push(CheckedPush { read, variables, step, dropped: false });
    }

    pub(super) fn settled(&mut self, token: u64, outcome: Outcome) {
        let number = self.numbers[&token];
        let (step, staleness) = match (outcome, self.reject_older) {
            (Outcome::Applied { step, staleness, .. }, bound) => {
                assert!(bound.is_none_or(|bound| staleness <= bound), "token {token}: {outcome:?}");
                (step, staleness)
            }
            (Outcome::Stale { .. }, Some(_)) => {
                self.pushes[number].dropped = true;
                return;
            }
            _ => panic!("token {token}: {outcome:?} is no outcome of an asynchronous push"),
        };
        let push = &mut self.pushes[number];
        let step = step.0;
        assert!(push.step.is_none_or(|before| before == step), "token {token}: {outcome:?}");
        let passed = step.checked_sub(push.read + 1);
        assert_eq!(Some(staleness), passed, "token {token}, read at {}", push.read);
        push.step = Some(step);
        let other = self.push_of_step.insert(step, number);
        assert!(other.is_none_or(|other| other == number), "step {step} is made twice");
        self.step = self.step.max(step);
        for (shard, known) in &mut self.known {
            if has_part(&self.catalogue, *shard, &self.pushes[number]) {
                known.insert(number);
            }
        }
    }

    pub(super) fn refused(&mut self, token: u64, shard: ShardId) {
        let push = &mut self.pushes[self.numbers[&token]];
        assert!(push.step.is_none(), "{shard} refuses token {token}, which has made a step");
        push.dropped = true;
    }

    pub(super) fn withdrawn(&mut self, token: u64) {
        self.pushes[self.numbers[&token]].dropped = true;
    }

    pub(super) fn partly_applied(&mut self, token: u64) {
        self.partly_applied.insert(token);
        // Its batch is not granted again.
        self.samples.counts_partly(token);
    }

    pub(super) fn not_final(&self, pushes: u64) {
        // Also after final values were pulled: a chief that returns while a shard cannot be asked has
        // its last gradient reported, since nobody knows whether that shard has applied it.
        assert!(!self.partly_applied.is_empty(), "{pushes} gradients that were not reported");
    }

    /// Checks the step count of a shard that has opened, or that is up at the end of the run: the
    /// last step may have been made by a gradient of a lost worker, and no answer names it.
    pub(super) fn counts(&mut self, shard: ShardId, steps: u64) {
        if shard == self.owner {
            let reported = self.step;
            assert!(steps >= reported, "{shard} is at step {steps}, but {reported} was reported");
            self.step = steps;
        }
    }

    pub(super) fn known(&self) -> Known {
        self.known.clone()
    }

    pub(super) fn pulled(&mut self, pulled: CheckedPull<'_, impl Fn(VariableId) -> Range<usize>>) {
        self.pulls += 1;
        let found: Vec<BTreeSet<usize>> = (0..self.catalogue.variables().len() as u32)
            .map(|id| self.sum_of(VariableId(id), &pulled.bytes[(pulled.range)(VariableId(id))]))
            .collect();
        for shard in self.catalogue.shards().collect::<Vec<_>>() {
            let here = variables_on(&self.catalogue, shard);
            let has: BTreeSet<usize> = here.iter().flat_map(|&id| &found[id]).copied().collect();
            for &number in &has {
                let push = &self.pushes[number];
                for &id in &here {
                    let counts = found[id].contains(&number);
                    assert_eq!(
                        counts, push.variables[id],
                        "push {number} in variable {id}, {shard}"
                    );
                }
                assert!(!push.dropped, "{shard} has applied push {number}, which was dropped");
            }
            let lost: Vec<&usize> = pulled.known[&shard].difference(&has).collect();
            assert!(lost.is_empty(), "{shard} has lost the pushes {lost:?}");
            if shard == self.owner {
                let unseen = |push: &&CheckedPush| !here.iter().any(|&id| push.variables[id]);
                let most = has.len() + self.pushes.iter().filter(unseen).count();
                let steps = has.len() as u64..=most as u64;
                assert!(steps.contains(&pulled.step.0), "step {} of {steps:?}", pulled.step);
            }
            self.known.get_mut(&shard).expect("the shard has variables").extend(has);
        }
        self.step = self.step.max(pulled.step.0);
    }

    /// Decodes the numbers of the pushes of which a variable's values are the sum.
    fn sum_of(&self, variable: VariableId, bytes: &[u8]) -> BTreeSet<usize> {
        let dtype = self.catalogue.variable(variable).dtype();
        let mut pushes = BTreeSet::new();
        for (element, sum) in sums(dtype, bytes).enumerate() {
            for (number, count) in counts(dtype, element, sum) {
                assert!(count < 2, "push {number} counts {count} times in {variable}");
                if count == 1 {
                    assert!(
                        number < self.pushes.len(),
                        "{variable} has push {number}, which was never made"
                    );
                    pushes.insert(number);
                }
            }
        }
        pushes
    }

    pub(super) fn finish(&self, last_step: u64) {
        assert_eq!(self.step, last_step, "the run ends at its last step");
        if let Some((&step, number)) = self.push_of_step.range(last_step + 1..).next() {
            panic!("push {number} has made step {step} after the last step {last_step}");
        }
        self.check_final_values();
        let applied = self.known.get(&self.owner);
        let counts = |number: &usize| {
            self.pushes[*number].step.is_some() || applied.is_some_and(|all| all.contains(number))
        };
        let counted = self.numbers.iter().filter(|(_, number)| counts(number));
        self.samples.finish(counted.map(|(&token, _)| token), Some(self.step));
    }

    /// Checks that each gradient in the final values is on every shard that it has a part for.
    fn check_final_values(&self) {
        if !self.final_values.are_pulled() {
            return;
        }
        for (number, push) in self.pushes.iter().enumerate() {
            let shards =
                self.known.iter().filter(|(shard, _)| has_part(&self.catalogue, **shard, push));
            let has: Vec<bool> = shards.map(|(_, known)| known.contains(&number)).collect();
            let differs = has.windows(2).any(|pair| pair[0] != pair[1]);
            assert!(!differs, "push {number} is on some shards only: {has:?}");
        }
    }

    pub(super) fn steps(&self) -> u64 {
        self.step
    }
}

fn variables_on(catalogue: &Catalogue, shard: ShardId) -> Vec<usize> {
    let layout = catalogue.layout(shard);
    layout.partitions().iter().map(|partition| partition.variable.0 as usize).collect()
}

/// Whether a push has variables on this shard.
fn has_part(catalogue: &Catalogue, shard: ShardId, push: &CheckedPush) -> bool {
    variables_on(catalogue, shard).into_iter().any(|id| push.variables[id])
}
