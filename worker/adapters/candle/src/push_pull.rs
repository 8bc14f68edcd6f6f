//! [`PushPull`]: an optimizer of candle whose rule is applied by servers.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use pushpull::blocking::TrainingSession;
use pushpull::compute::Bags;
use pushpull::training::{DetachedStep, GradientOutcome, TrainingConfig, TrainingEnd};
use pushpull::worker::SampleRange;

use crate::builder::PushPullBuilder;
use crate::elements::{set_elements, with_element, with_elements};
use crate::error::AdapterError;

/// A variable of the model.
#[derive(Debug)]
pub(crate) struct BoundVariable {
    pub(crate) name: String,
    pub(crate) variable: Var,
    /// Whether gradients train it. Otherwise each worker changes it by itself.
    pub(crate) is_trained: bool,
}

/// An optimizer of candle whose rule is applied by parameter servers.
///
/// Each [`Optimizer::step`] pushes gradients and waits for the values of the next step, which it
/// copies to the variables. Call [`PushPull::ready`] before each forward pass: it tells whether the
/// training goes on.
#[derive(Debug)]
pub struct PushPull {
    session: TrainingSession,
    /// The step whose values are in the variables; `None` before the first and after the last.
    step: Option<DetachedStep>,
    has_ended: bool,
    variables: Vec<BoundVariable>,
    /// The elements of a row of each embedding.
    widths: BTreeMap<String, usize>,
    /// The rows that were looked up for this step.
    lookups: Vec<EmbeddingLookup>,
    learning_rate: f64,
    /// A rate that was set and differs.
    asked_rate: Option<f64>,
    outcome: Option<GradientOutcome>,
}

/// Rows of an embedding, as a variable whose gradient is pushed.
#[derive(Debug)]
struct EmbeddingLookup {
    embedding: String,
    ids: Vec<u64>,
    rows: Var,
}

impl PushPull {
    /// Joins a training with the variables of a map. The variables then hold the values of the
    /// first step.
    ///
    /// # Errors
    /// Those of [`PushPullBuilder::from_varmap`].
    pub fn from_varmap(map: &VarMap, config: TrainingConfig) -> Result<PushPull, AdapterError> {
        PushPull::builder(config).from_varmap(map)
    }

    /// Returns settings for a training.
    pub fn builder(config: TrainingConfig) -> PushPullBuilder {
        PushPullBuilder::new(config)
    }

    pub(crate) fn start(
        session: TrainingSession,
        variables: Vec<BoundVariable>,
        widths: BTreeMap<String, usize>,
        learning_rate: f64,
    ) -> Result<PushPull, AdapterError> {
        let mut optimizer = PushPull {
            session,
            step: None,
            has_ended: false,
            variables,
            widths,
            lookups: Vec::new(),
            learning_rate,
            asked_rate: None,
            outcome: None,
        };
        optimizer.ready()?;
        Ok(optimizer)
    }

    /// Returns whether there is a step to compute. If so, the variables hold its values. Waits for
    /// the step if there is none yet.
    ///
    /// # Errors
    /// [`AdapterError::Training`] as [`TrainingSession::step`].
    pub fn ready(&mut self) -> Result<bool, AdapterError> {
        if self.step.is_none() && !self.has_ended {
            self.lookups.clear();
            match self.session.step()? {
                None => self.has_ended = true,
                Some(mut step) => {
                    let (params, _) = step.parts();
                    for BoundVariable { name, variable, .. } in &self.variables {
                        with_element!(variable.dtype(), T => {
                            set_elements::<T>(variable, params.view(name)?)?;
                        });
                    }
                    self.step = Some(step.detach());
                }
            }
        }
        Ok(self.step.is_some())
    }

    /// The global step of the values in the variables: that at which the servers granted the step.
    pub fn global_step(&self) -> u64 {
        self.step.as_ref().map_or(self.session.global_step(), DetachedStep::step)
    }

    /// The samples of the step, if the training has a data set.
    pub fn samples(&self) -> Option<SampleRange> {
        self.step.as_ref().and_then(DetachedStep::samples)
    }

    /// The samples that this worker will probably be granted next.
    pub fn samples_ahead(&self) -> Option<SampleRange> {
        self.step.as_ref().and_then(DetachedStep::samples_ahead)
    }

    /// What became of the last gradients.
    pub fn outcome(&self) -> Option<&GradientOutcome> {
        self.outcome.as_ref()
    }

    /// The session, for what it tells.
    pub fn session(&self) -> &TrainingSession {
        &self.session
    }

    /// Reports a number of this step, such as its loss, to the hooks.
    pub fn scalar(&mut self, name: &str, value: impl Into<f64>) {
        if let Some(step) = self.step.take()
            && let Some(mut step) = self.session.attach(step)
        {
            step.scalar(name, value);
            self.step = Some(step.detach());
        }
    }

    /// Pulls rows of an embedding, one for each id, as a tensor of shape `[ids, width]` on the CPU.
    /// [`Optimizer::step`] pushes its gradient by rows; rows of one id are summed.
    ///
    /// Look up the rows after [`PushPull::ready`], in each step. If the step is too late meanwhile,
    /// this takes the next one; tensors of earlier look-ups then get no gradient.
    ///
    /// # Errors
    /// [`AdapterError::Embedding`], [`AdapterError::Ended`] and [`AdapterError::Training`].
    pub fn lookup(&mut self, embedding: &str, ids: &[u64]) -> Result<Tensor, AdapterError> {
        let Some(&width) = self.widths.get(embedding) else {
            return Err(AdapterError::Embedding { name: embedding.to_owned() });
        };
        let (distinct, positions) = Bags::distinct(ids);
        let mut rows = vec![0.0_f32; distinct.len() * width];
        loop {
            let step = self.step.take().and_then(|step| self.session.attach(step));
            let Some(mut step) = step else { return Err(self.ended()) };
            if !step.pull_rows(embedding, &distinct, &mut rows)?.is_stale() {
                self.step = Some(step.detach());
                break;
            }
            drop(step);
            self.ready()?;
        }
        let rows = Var::from_vec(rows, (distinct.len(), width), &Device::Cpu)?;
        let positions: Vec<u32> = positions.into_iter().map(|position| position as u32).collect();
        let positions = Tensor::from_vec(positions, ids.len(), &Device::Cpu)?;
        let tensor = rows.as_tensor().index_select(&positions, 0)?;
        self.lookups.push(EmbeddingLookup { embedding: embedding.to_owned(), ids: distinct, rows });
        Ok(tensor)
    }

    /// Pushes gradients and takes the next step, as [`Optimizer::step`] does, with typed errors.
    ///
    /// # Errors
    /// [`AdapterError::Ended`], [`AdapterError::NoGradient`], [`AdapterError::LearningRate`] and
    /// [`AdapterError::Training`].
    pub fn push(&mut self, gradients: &GradStore) -> Result<(), AdapterError> {
        if let Some(asked) = self.asked_rate {
            return Err(AdapterError::LearningRate { asked, declared: self.learning_rate });
        }
        let step = self.step.take().and_then(|step| self.session.attach(step));
        let Some(mut step) = step else { return Err(self.ended()) };
        let (params, out) = step.parts();
        let mut found = false;
        for BoundVariable { name, variable, is_trained } in &self.variables {
            with_element!(variable.dtype(), T => match (is_trained, gradients.get(variable)) {
                (true, Some(gradient)) => {
                    found = true;
                    let view = out.view_mut_unfilled::<T>(name)?;
                    with_elements::<T, _>(gradient, |gradient| view.copy_from_slice(gradient))?;
                }
                (true, None) => {}
                // The session keeps these for the next step, and gives the chief's to the servers.
                (false, _) => {
                    let view = params.view_mut::<T>(name)?;
                    with_elements::<T, _>(variable, |values| view.copy_from_slice(values))?;
                }
            });
        }
        let mut rows: BTreeMap<&str, (Vec<u64>, Vec<f32>)> = BTreeMap::new();
        for EmbeddingLookup { embedding, ids, rows: variable } in &self.lookups {
            let Some(gradient) = gradients.get(variable) else { continue };
            let (all_ids, all_rows) = rows.entry(embedding).or_default();
            all_ids.extend_from_slice(ids);
            with_elements::<f32, _>(gradient, |gradient| all_rows.extend_from_slice(gradient))?;
        }
        for (embedding, (ids, rows)) in rows {
            found = true;
            out.set_rows(embedding, &ids, &rows)?;
        }
        if !found {
            self.step = Some(step.detach());
            return Err(AdapterError::NoGradient);
        }
        self.outcome = Some(step.push()?);
        self.ready()?;
        Ok(())
    }

    /// Ends the training of this worker, as [`TrainingSession::close`].
    ///
    /// # Errors
    /// [`AdapterError::Training`].
    pub fn close(self) -> Result<TrainingEnd, AdapterError> {
        drop(self.step);
        Ok(self.session.close()?)
    }

    fn ended(&self) -> AdapterError {
        AdapterError::Ended { reason: format!("at global step {}", self.session.global_step()) }
    }
}

/// The variables get the names of their positions: `variable/0` and so on. All workers must give
/// them in one order. Prefer [`PushPull::from_varmap`].
impl Optimizer for PushPull {
    type Config = PushPullBuilder;

    fn new(variables: Vec<Var>, config: PushPullBuilder) -> candle_core::Result<PushPull> {
        let digits = variables.len().to_string().len();
        let name = |index: usize| format!("variable/{index:0digits$}");
        let named = variables.into_iter().enumerate();
        let named = named.map(|(index, variable)| (name(index), variable)).collect();
        Ok(config.from_variables(named)?)
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        Ok(self.push(gradients)?)
    }

    /// The rate that the builder was told; NaN if it was told none. The servers own the rate.
    fn learning_rate(&self) -> f64 {
        self.asked_rate.unwrap_or(self.learning_rate)
    }

    /// Makes the next step fail if the rate differs from that of the builder: the servers own the
    /// rate, and a schedule is a setting of theirs.
    fn set_learning_rate(&mut self, rate: f64) {
        self.asked_rate = (rate != self.learning_rate).then_some(rate);
    }
}
