//! The checker of synchronous mode: all shards apply the same steps, made of the accepted pushes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::Outcome;
use pushpull_ps::OnLoss;

use super::final_values::FinalValues;
use super::samples::SamplesChecker;
use super::{CheckedPull, Elements, Pushed, Tensors};
use crate::setting::Setting;

/// A step as the first shard applied it.
#[derive(Debug)]
struct AppliedStep {
    tokens: Vec<u64>,
    /// All values after the step, from a replay of the steps in order.
    values: Vec<Elements>,
}

/// The checker of a run in synchronous mode.
#[derive(Debug)]
pub(crate) struct SynchronousChecker {
    begin: Vec<Elements>,
    steps: Vec<AppliedStep>,
    /// How many steps each shard has applied.
    applied: BTreeMap<ShardId, u64>,
    /// By token: the step that its push is part of.
    step_of: BTreeMap<u64, u64>,
    /// By token: the worker task and its gradient, clipped.
    pushed: BTreeMap<u64, (u32, Tensors)>,
    /// The number of workers in deterministic mode. A step takes one gradient of each, in task
    /// order.
    ordered: Option<u32>,
    accepted: BTreeMap<u64, u64>,
    dropped: BTreeSet<u64>,
    on_loss: OnLoss,
    clip: Option<f64>,
    pub(super) early_errors: u64,
    pub(super) pulls: u64,
    pub(super) final_values: FinalValues,
    pub(super) samples: SamplesChecker,
}

impl SynchronousChecker {
    pub(super) fn new(setting: &Setting) -> SynchronousChecker {
        let zeros = setting.catalogue.variables().iter().map(|variable| {
            let size = variable.dtype().size() as u64;
            Elements::zeros(variable.dtype(), (variable.bytes() / size) as usize)
        });
        SynchronousChecker {
            begin: zeros.collect(),
            steps: Vec::new(),
            applied: BTreeMap::new(),
            step_of: BTreeMap::new(),
            pushed: BTreeMap::new(),
            ordered: setting.deterministic.then_some(setting.workers),
            accepted: BTreeMap::new(),
            dropped: BTreeSet::new(),
            on_loss: setting.on_loss,
            clip: setting.clip,
            early_errors: 0,
            pulls: 0,
            final_values: FinalValues::default(),
            samples: SamplesChecker::new(setting.data.clone()),
        }
    }

    /// Returns how many steps at least one shard has applied.
    pub(super) fn steps(&self) -> u64 {
        self.steps.len() as u64
    }

    pub(super) fn pushes(&mut self, push: Pushed) {
        let Pushed { token, task, mut gradient, samples, .. } = push;
        self.samples.pushed(token, samples);
        // The elements are integers, so the sum is exact in any order.
        let norm = gradient.iter().flatten().map(Elements::squares).sum::<f64>().sqrt();
        if let Some(bound) = self.clip.filter(|&bound| norm > bound) {
            gradient.iter_mut().flatten().for_each(|line| line.scale(bound / norm));
        }
        let before = self.pushed.insert(token, (task, gradient));
        assert!(before.is_none(), "token {token} is granted twice");
    }

    pub(super) fn settled(&mut self, token: u64, outcome: Outcome) {
        match outcome {
            Outcome::Accepted { step } => {
                let before = self.accepted.insert(token, step.0);
                assert!(before.is_none_or(|before| before == step.0), "token {token}: {outcome:?}");
            }
            Outcome::Stale { .. } | Outcome::Withdrawn {} => _ = self.dropped.insert(token),
            Outcome::Applied { .. } | Outcome::Held {} | Outcome::Repeated {} => {
                panic!("token {token}: {outcome:?} is no outcome of a synchronous push")
            }
        }
    }

    /// Records a push that no shard may apply.
    pub(super) fn refused(&mut self, token: u64) {
        self.dropped.insert(token);
    }

    pub(super) fn early_error(&mut self, awaited: &str) {
        self.early_errors += 1;
        let policy = self.on_loss;
        assert!(
            !matches!(policy, OnLoss::Shrink { .. }),
            "{policy:?} names stragglers early: {awaited}"
        );
        let words = ["lost", "left", "not joined"];
        assert!(words.iter().any(|word| awaited.contains(word)), "no replica is named: {awaited}");
    }

    pub(super) fn opened(&mut self, shard: ShardId, steps: u64) {
        let before = *self.applied.entry(shard).or_default();
        assert_eq!(steps, before, "{shard} resumes at the step at which it was killed");
    }

    pub(super) fn applied(&mut self, shard: ShardId, step: u64, tokens: Vec<u64>) {
        let before = self.applied.entry(shard).or_default();
        assert_eq!(*before, step, "{shard} applies its steps in order");
        *before = step + 1;
        if let Some(first) = self.steps.get(step as usize) {
            assert_eq!(first.tokens, tokens, "step {step} has the same tokens on {shard}");
            return;
        }
        assert_eq!(self.steps.len() as u64, step, "no step is skipped");
        assert!(!tokens.is_empty(), "step {step} has no gradient");
        for &token in &tokens {
            let before = self.step_of.insert(token, step);
            assert_eq!(before, None, "token {token} counts again in step {step}");
            assert!(self.pushed.contains_key(&token), "token {token} was never pushed");
        }
        if let Some(workers) = self.ordered {
            let tasks = tokens.iter().map(|token| self.pushed[token].0);
            let expected = match self.samples.is_consumed() {
                // At the end of the data a step lacks the last replicas, or skipped batches.
                true => tasks.clone().is_sorted(),
                false => tasks.clone().eq(0..workers),
            };
            assert!(expected, "step {step} is not in task order: {tokens:?}");
        }
        let mut values = self.values(step).expect("the step before").clone();
        for (variable, line) in values.iter_mut().enumerate() {
            let gradients =
                tokens.iter().filter_map(|token| self.pushed[token].1[variable].as_ref());
            line.descend(&gradients.collect::<Vec<_>>());
        }
        self.steps.push(AppliedStep { tokens, values });
    }

    /// Returns all values after `steps` steps; `None` if no shard has made that many.
    fn values(&self, steps: u64) -> Option<&Vec<Elements>> {
        match steps.checked_sub(1) {
            None => Some(&self.begin),
            Some(last) => self.steps.get(last as usize).map(|step| &step.values),
        }
    }

    pub(super) fn pulled(&mut self, pulled: CheckedPull<'_, impl Fn(VariableId) -> Range<usize>>) {
        self.pulls += 1;
        let CheckedPull { step, bytes, range, .. } = pulled;
        let values = self.values(step.0);
        let values =
            values.unwrap_or_else(|| panic!("values of step {step}, which no shard has made"));
        for (id, line) in values.iter().enumerate() {
            let found = &bytes[range(VariableId(id as u32))];
            assert_eq!(found, line.to_bytes(), "variable {id} pulled at step {step}: {line:?}");
        }
    }

    pub(super) fn finish(&self, last_step: u64) {
        assert_eq!(self.steps(), last_step, "the run ends at its last step");
        for (shard, &steps) in &self.applied {
            assert_eq!(steps, last_step, "{shard} has applied all steps");
        }
        for (token, step) in &self.accepted {
            assert_eq!(self.step_of.get(token), Some(step), "token {token} was accepted");
        }
        for token in &self.dropped {
            assert_eq!(self.step_of.get(token), None, "token {token} was stale or refused");
        }
        self.samples.finish(self.step_of.keys().copied(), None);
    }
}
