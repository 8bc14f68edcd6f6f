//! What must be true of every run: the steps are the same everywhere, and made of what was accepted.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, ShardId, VariableId};
use pushpull_common::protocol::Outcome;
use pushpull_common::tensor::DType;

use crate::setting::RATE;

/// All values, or a gradient: by variable; none where a gradient leaves a variable out.
type Numbers = Vec<Option<Line>>;

/// The elements of one variable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Line {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

/// A step as the first shard has applied it.
#[derive(Debug)]
struct Step {
    tokens: Vec<u64>,
    /// All values after it, by a replay of the steps in order.
    values: Vec<Line>,
}

/// Watches a run.
#[derive(Debug)]
pub(crate) struct Checker {
    begin: Vec<Line>,
    steps: Vec<Step>,
    /// Steps that each shard has applied.
    applied: BTreeMap<ShardId, u64>,
    /// The step that a token's push is a part of.
    step_of: BTreeMap<u64, u64>,
    /// By token: the worker task and its gradient.
    pushed: BTreeMap<u64, (u32, Numbers)>,
    /// Whether gradients are taken in the order of the worker tasks, one of each.
    ordered: Option<u32>,
    accepted: BTreeMap<u64, u64>,
    dropped: BTreeSet<u64>,
    pub(crate) pulls: u64,
}

impl Line {
    fn zeros(dtype: DType, length: usize) -> Line {
        match dtype {
            DType::F64 => Line::Double(vec![0.0; length]),
            _ => Line::Single(vec![0.0; length]),
        }
    }

    /// The elements, each a small integer that this function gives.
    pub(crate) fn of(dtype: DType, length: usize, element: impl Fn(usize) -> i32) -> Line {
        match dtype {
            DType::F64 => Line::Double((0..length).map(|e| element(e).into()).collect()),
            _ => Line::Single((0..length).map(|e| element(e) as f32).collect()),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Line::Single(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
            Line::Double(line) => line.iter().flat_map(|e| e.to_le_bytes()).collect(),
        }
    }

    /// Takes one step along the mean of these gradients, added up in their order.
    fn descend(&mut self, gradients: &[&Line]) {
        match self {
            Line::Single(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f32>, line| {
                        let Line::Single(line) = line else { unreachable!("of one type") };
                        Some(sum.map_or(line[at], |sum| sum + line[at]))
                    });
                    if let Some(sum) = sum {
                        *value -= RATE as f32 * (sum / gradients.len() as f32);
                    }
                }
            }
            Line::Double(values) => {
                for (at, value) in values.iter_mut().enumerate() {
                    let sum = gradients.iter().fold(None, |sum: Option<f64>, line| {
                        let Line::Double(line) = line else { unreachable!("of one type") };
                        Some(sum.map_or(line[at], |sum| sum + line[at]))
                    });
                    if let Some(sum) = sum {
                        *value -= RATE * (sum / gradients.len() as f64);
                    }
                }
            }
        }
    }
}

impl Checker {
    pub(crate) fn new(catalogue: &Catalogue, ordered: Option<u32>) -> Checker {
        let zeros = catalogue.variables().iter().map(|variable| {
            let size = variable.dtype().size() as u64;
            Line::zeros(variable.dtype(), (variable.bytes() / size) as usize)
        });
        Checker {
            begin: zeros.collect(),
            steps: Vec::new(),
            applied: BTreeMap::new(),
            step_of: BTreeMap::new(),
            pushed: BTreeMap::new(),
            ordered,
            accepted: BTreeMap::new(),
            dropped: BTreeSet::new(),
            pulls: 0,
        }
    }

    /// Steps that some shard has applied.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.len() as u64
    }

    /// A worker is about to push this gradient under a token.
    pub(crate) fn pushes(&mut self, token: u64, task: u32, gradient: Numbers) {
        let before = self.pushed.insert(token, (task, gradient));
        assert!(before.is_none(), "token {token} is given out twice");
    }

    /// A worker was told what became of its push.
    pub(crate) fn settled(&mut self, token: u64, outcome: Outcome) {
        match outcome {
            Outcome::Accepted { step } => {
                let before = self.accepted.insert(token, step.0);
                assert!(before.is_none_or(|before| before == step.0), "token {token}: {outcome:?}");
            }
            Outcome::Stale { .. } | Outcome::Withdrawn {} => _ = self.dropped.insert(token),
            Outcome::Applied { .. } | Outcome::Held {} => {
                panic!("token {token}: {outcome:?} is no outcome of a synchronous push")
            }
        }
    }

    /// A push was refused: no shard may count it.
    pub(crate) fn refused(&mut self, token: u64) {
        self.dropped.insert(token);
    }

    /// A process has opened a shard.
    pub(crate) fn opened(&mut self, shard: ShardId, steps: u64) {
        let before = *self.applied.entry(shard).or_default();
        assert_eq!(steps, before, "{shard} goes on where it was killed");
    }

    /// A shard has applied a step.
    pub(crate) fn applied(&mut self, shard: ShardId, step: u64, tokens: Vec<u64>) {
        let before = self.applied.entry(shard).or_default();
        assert_eq!(*before, step, "{shard} applies its steps in order");
        *before = step + 1;
        if let Some(first) = self.steps.get(step as usize) {
            assert_eq!(first.tokens, tokens, "step {step} is made of the same on {shard}");
            return;
        }
        assert_eq!(self.steps.len() as u64, step, "no step is left out");
        assert!(!tokens.is_empty(), "step {step} is made of nothing");
        for &token in &tokens {
            let before = self.step_of.insert(token, step);
            assert_eq!(before, None, "token {token} counts in step {step} again");
            assert!(self.pushed.contains_key(&token), "token {token} was never pushed");
        }
        if let Some(workers) = self.ordered {
            let tasks = tokens.iter().map(|token| self.pushed[token].0);
            assert!(tasks.eq(0..workers), "step {step} is made of {tokens:?}, in another order");
        }
        let mut values = self.values(step).expect("the step before").clone();
        for (variable, line) in values.iter_mut().enumerate() {
            let gradients =
                tokens.iter().filter_map(|token| self.pushed[token].1[variable].as_ref());
            line.descend(&gradients.collect::<Vec<_>>());
        }
        self.steps.push(Step { tokens, values });
    }

    /// All values after so many steps.
    fn values(&self, steps: u64) -> Option<&Vec<Line>> {
        match steps.checked_sub(1) {
            None => Some(&self.begin),
            Some(last) => self.steps.get(last as usize).map(|step| &step.values),
        }
    }

    /// A worker has pulled these values, which it was told are of this step.
    pub(crate) fn pulled(
        &mut self,
        step: GlobalStep,
        bytes: &[u8],
        range: impl Fn(VariableId) -> Range<usize>,
    ) {
        self.pulls += 1;
        let values = self.values(step.0);
        let values = values.unwrap_or_else(|| panic!("values of step {step}, which nobody made"));
        for (id, line) in values.iter().enumerate() {
            let found = &bytes[range(VariableId(id as u32))];
            assert_eq!(found, line.to_bytes(), "variable {id} pulled at step {step}: {line:?}");
        }
    }

    /// The run is over: what was told agrees with what was done.
    pub(crate) fn finish(&self, last_step: u64) {
        assert_eq!(self.steps(), last_step, "the last step is reached, and none after it");
        for (shard, &steps) in &self.applied {
            assert_eq!(steps, last_step, "{shard} has applied all steps");
        }
        for (token, step) in &self.accepted {
            assert_eq!(self.step_of.get(token), Some(step), "token {token} was accepted");
        }
        for token in &self.dropped {
            assert_eq!(self.step_of.get(token), None, "token {token} was stale or refused");
        }
    }
}
