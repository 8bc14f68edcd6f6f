//! [`PushPull`]: what takes the place of burn's optimizer.

use burn_core::module::Module;
use burn_optim::GradientsParams;
use pushpull::blocking::TrainingSession;
use pushpull::error::VariableError;
use pushpull::training::{DetachedStep, GradientOutcome, TrainingConfig, TrainingEnd};
use pushpull::variable::{NamePattern, Shape};
use pushpull::worker::SampleRange;
use pushpull::{VariableSpec, WorkerConfig};

use crate::elements::{dtype_of, elements, with_element};
use crate::error::AdapterError;
use crate::parameters::{collect, load, parameters};

/// Settings of a [`PushPull`], from [`PushPull::builder`].
#[derive(Debug)]
pub struct PushPullBuilder {
    config: TrainingConfig,
    means: Vec<(NamePattern, u64)>,
}

impl PushPullBuilder {
    /// Averages parameters without gradients among the workers every `steps` steps of each: those
    /// that a pattern matches, of f32 or f64. Others stay on each worker.
    pub fn mean_every_steps(
        mut self,
        pattern: impl Into<NamePattern>,
        steps: u64,
    ) -> PushPullBuilder {
        self.means.push((pattern.into(), steps));
        self
    }

    /// Joins the training with the parameters of a module. Returns the module with the values of
    /// the first step.
    ///
    /// # Errors
    /// [`AdapterError::DType`], [`AdapterError::Twice`], [`AdapterError::NothingToTrain`],
    /// [`AdapterError::Pattern`], [`AdapterError::Read`] and [`AdapterError::Variable`];
    /// [`AdapterError::Training`] as [`TrainingSession::start`].
    pub fn from_module<M: Module>(self, module: M) -> Result<(PushPull, M), AdapterError> {
        let PushPullBuilder { config, means } = self;
        let found = parameters(&module)?;
        if !found.values().any(|parameter| parameter.is_trained) {
            return Err(AdapterError::NothingToTrain);
        }
        for (pattern, _) in &means {
            let is_meant = |(name, parameter): (&String, &crate::parameters::ModuleParameter)| {
                !parameter.is_trained && pattern.matches(name)
            };
            if !found.iter().any(is_meant) {
                return Err(AdapterError::Pattern { pattern: pattern.to_string() });
            }
        }
        let mut specs = Vec::with_capacity(found.len());
        for (name, parameter) in &found {
            let dtype = dtype_of(parameter.dtype).ok_or_else(|| AdapterError::DType {
                name: name.clone(),
                dtype: parameter.dtype,
            })?;
            let shape = Shape::new(parameter.shape.clone())
                .map_err(|source| VariableError::Shape { name: name.clone(), source })?;
            let spec = VariableSpec::new(name, dtype, shape)?;
            let mean = means.iter().rev().find(|(pattern, _)| pattern.matches(name));
            specs.push(match (parameter.is_trained, mean) {
                (true, _) => spec,
                (false, Some((_, steps))) => spec.mean_every_steps(*steps),
                (false, None) => spec.local(),
            });
            // Read here, where a fault can be returned.
            with_element!(parameter.dtype, T => { elements::<T>(name, &parameter.values)?; });
        }
        let config = config.variables(specs).initialize(move |initial| {
            for (name, parameter) in &found {
                with_element!(parameter.dtype, T => {
                    let values = elements::<T>(name, &parameter.values);
                    initial.set(name, values.expect("they were read before"));
                });
            }
        });
        let session = TrainingSession::start(config)?;
        let mut optimizer = PushPull { session, step: None, outcome: None };
        let module = optimizer.next(module)?;
        Ok((optimizer, module))
    }
}

impl From<WorkerConfig> for PushPullBuilder {
    fn from(worker: WorkerConfig) -> PushPullBuilder {
        TrainingConfig::new(worker).into()
    }
}

impl From<TrainingConfig> for PushPullBuilder {
    fn from(config: TrainingConfig) -> PushPullBuilder {
        PushPullBuilder { config, means: Vec::new() }
    }
}

/// An optimizer whose rule is applied by parameter servers.
///
/// Each [`PushPull::step`] pushes gradients and waits for the values of the next step, with which
/// it returns the module. [`PushPull::ready`] tells whether the training goes on.
#[derive(Debug)]
pub struct PushPull {
    session: TrainingSession,
    /// The step whose values the module has; `None` after the last.
    step: Option<DetachedStep>,
    outcome: Option<GradientOutcome>,
}

impl PushPull {
    /// Joins a training with the parameters of a module, as [`PushPullBuilder::from_module`].
    ///
    /// # Errors
    /// Those of the builder.
    pub fn from_module<M: Module>(
        module: M,
        config: TrainingConfig,
    ) -> Result<(PushPull, M), AdapterError> {
        PushPull::builder(config).from_module(module)
    }

    /// Returns settings for a training.
    pub fn builder(config: TrainingConfig) -> PushPullBuilder {
        config.into()
    }

    /// Returns whether there is a step to compute: the module has its values then.
    pub fn ready(&self) -> bool {
        self.step.is_some()
    }

    /// The global step of the module's values: that at which the servers granted the step.
    pub fn global_step(&self) -> u64 {
        self.step.as_ref().map_or(self.session.global_step(), DetachedStep::step)
    }

    /// The samples of the step, if the training has a data set.
    pub fn samples(&self) -> Option<SampleRange> {
        self.step.as_ref().and_then(DetachedStep::samples)
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

    /// Pushes gradients, takes the next step, and returns the module with its values. In the place
    /// of the `step` of burn's optimizer.
    ///
    /// # Errors
    /// [`AdapterError::Ended`], [`AdapterError::NoGradient`], [`AdapterError::Read`] and
    /// [`AdapterError::Training`].
    pub fn step<M: Module>(
        &mut self,
        module: M,
        gradients: GradientsParams,
    ) -> Result<M, AdapterError> {
        let step = self.step.take().and_then(|step| self.session.attach(step));
        let Some(mut step) = step else {
            return Err(AdapterError::Ended { step: self.session.global_step() });
        };
        // Running statistics have an update in waiting, which would replace what is loaded next.
        // Making a module for validation completes it.
        drop(module.valid());
        let (params, out) = step.parts();
        if !collect(&module, gradients, params, out)? {
            self.step = Some(step.detach());
            return Err(AdapterError::NoGradient);
        }
        self.outcome = Some(step.push()?);
        self.next(module)
    }

    /// Takes the next step. Returns the module with its values.
    fn next<M: Module>(&mut self, module: M) -> Result<M, AdapterError> {
        let Some(mut step) = self.session.step()? else { return Ok(module) };
        let module = load(module, step.parts().0)?;
        self.step = Some(step.detach());
        Ok(module)
    }

    /// Ends the training of this worker, as [`TrainingSession::close`]. Returns the module with the
    /// final values, which are the same on all workers, if the training has ended for all.
    ///
    /// # Errors
    /// [`AdapterError::Training`].
    pub fn close<M: Module>(self, module: M) -> Result<(TrainingEnd, M), AdapterError> {
        drop(self.step);
        let end = self.session.close()?;
        let module = match &end.params {
            Some(params) => load(module, params)?,
            None => module,
        };
        Ok((end, module))
    }
}
