//! [`PushPullBuilder`]: which variables are trained, and how.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use pushpull::blocking::TrainingSession;
use pushpull::training::TrainingConfig;
use pushpull::variable::{DType, NamePattern, Shape};
use pushpull::worker::InitialValues;
use pushpull::{VariableSpec, WorkerConfig};

use crate::elements::{dtype_of, with_element, with_elements};
use crate::error::AdapterError;
use crate::push_pull::{BoundVariable, PushPull};

/// How the names of running statistics end in the layers of candle.
const STATISTICS: [&str; 2] = ["running_mean", "running_var"];

/// Settings of a [`PushPull`], from [`PushPull::builder`].
#[derive(Debug)]
pub struct PushPullBuilder {
    config: TrainingConfig,
    local: Vec<NamePattern>,
    means: Vec<(NamePattern, u64)>,
    embeddings: Vec<VariableSpec>,
    learning_rate: f64,
}

impl PushPullBuilder {
    pub(crate) fn new(config: TrainingConfig) -> PushPullBuilder {
        PushPullBuilder {
            config,
            local: Vec::new(),
            means: Vec::new(),
            embeddings: Vec::new(),
            learning_rate: f64::NAN,
        }
    }

    /// Keeps variables on each worker: those that a pattern matches. They get no gradient. The
    /// servers hold the values of the chief. A later setting counts.
    pub fn local(mut self, pattern: impl Into<NamePattern>) -> PushPullBuilder {
        self.local.push(pattern.into());
        self
    }

    /// Averages variables among the workers every `steps` steps of each: those that a pattern
    /// matches, of f32 or f64. They get no gradient.
    pub fn mean_every_steps(
        mut self,
        pattern: impl Into<NamePattern>,
        steps: u64,
    ) -> PushPullBuilder {
        self.means.push((pattern.into(), steps));
        self
    }

    /// Declares an embedding of f32 for [`PushPull::lookup`]: a sparse variable
    /// ([`VariableSpec::sparse`]) or a growing table ([`VariableSpec::table`]).
    pub fn embedding(mut self, embedding: VariableSpec) -> PushPullBuilder {
        self.embeddings.push(embedding);
        self
    }

    /// Sets what [`candle_nn::Optimizer::learning_rate`] returns. The rate itself is a setting of
    /// the servers.
    pub fn learning_rate(mut self, rate: f64) -> PushPullBuilder {
        self.learning_rate = rate;
        self
    }

    /// Joins the training with the variables of a map.
    ///
    /// # Errors
    /// [`AdapterError::DType`], [`AdapterError::NotEmbedding`], [`AdapterError::Pattern`] and
    /// [`AdapterError::Variable`];
    /// [`AdapterError::Training`] as [`TrainingSession::start`].
    pub fn from_varmap(self, map: &VarMap) -> Result<PushPull, AdapterError> {
        let variables = map.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // The map has no order, and the order decides where a variable is.
        let sorted: BTreeMap<String, Var> =
            variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
        drop(variables);
        self.from_variables(sorted)
    }

    /// Joins the training with named variables.
    ///
    /// # Errors
    /// As [`PushPullBuilder::from_varmap`].
    pub fn from_variables(
        self,
        variables: BTreeMap<String, Var>,
    ) -> Result<PushPull, AdapterError> {
        let PushPullBuilder { config, local, means, embeddings, learning_rate } = self;
        let named = local.iter().chain(means.iter().map(|(pattern, _)| pattern));
        for pattern in named {
            if !variables.keys().any(|name| pattern.matches(name)) {
                return Err(AdapterError::Pattern { pattern: pattern.to_string() });
            }
        }
        let mut specs = Vec::with_capacity(variables.len() + embeddings.len());
        let mut bound = Vec::with_capacity(variables.len());
        for (name, variable) in variables {
            let dtype = variable.dtype();
            let Some(shared) = dtype_of(dtype) else {
                return Err(AdapterError::DType { name, dtype });
            };
            let extents: Vec<u64> = variable.dims().iter().map(|&extent| extent as u64).collect();
            let shape = Shape::new(extents).map_err(|source| {
                pushpull::error::VariableError::Shape { name: name.clone(), source }
            })?;
            let spec = VariableSpec::new(&name, shared, shape)?;
            let mean = means.iter().rev().find(|(pattern, _)| pattern.matches(&name));
            let is_local = local.iter().any(|pattern| pattern.matches(&name))
                || STATISTICS.iter().any(|end| name.ends_with(end));
            let (spec, is_trained) = match (mean, is_local) {
                (Some((_, steps)), _) => (spec.mean_every_steps(*steps), false),
                (None, true) => (spec.local(), false),
                (None, false) => (spec, true),
            };
            specs.push(spec);
            bound.push(BoundVariable { name, variable, is_trained });
        }
        for spec in &embeddings {
            if !spec.is_sparse() || spec.dtype() != DType::F32 {
                let name = spec.name().to_owned();
                let dtype = spec.dtype();
                return Err(AdapterError::NotEmbedding { name, dtype });
            }
        }
        let widths = embeddings
            .iter()
            .map(|spec| (spec.name().to_owned(), spec.shape().row_elements() as usize));
        let widths: BTreeMap<String, usize> = widths.collect();
        specs.extend(embeddings);
        // Read here, where a fault can be returned.
        let first = |BoundVariable { name, variable, .. }: &BoundVariable| {
            let values = variable.to_device(&Device::Cpu)?.contiguous()?;
            Ok::<_, AdapterError>((name.clone(), values))
        };
        let first = bound.iter().map(first).collect::<Result<Vec<_>, _>>()?;
        let config = config.variables(specs).initialize(move |initial| set_first(&first, initial));
        let session = TrainingSession::start(config)?;
        PushPull::start(session, bound, widths, learning_rate)
    }
}

/// Sets the first values to those of the chief's variables.
fn set_first(first: &[(String, Tensor)], initial: &mut InitialValues<'_>) {
    for (name, values) in first {
        with_element!(values.dtype(), T => {
            with_elements::<T, _>(values, |values| { initial.set(name, values); })
                .expect("the values are contiguous, on the processor and of their type");
        });
    }
}

impl From<WorkerConfig> for PushPullBuilder {
    fn from(worker: WorkerConfig) -> PushPullBuilder {
        PushPullBuilder::new(TrainingConfig::new(worker))
    }
}
