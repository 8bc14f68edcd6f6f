//! [`ServerVariables`]: the variables of the parameter servers, as functions read them.

use std::sync::{Arc, PoisonError};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::device::DeviceFilters;
use pushpull_common::error::Chain;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Refusal;
use pushpull_common::tensor::{DType, Element, bf16, f16};
use pushpull_net::auth::Credentials;
use pushpull_worker::internal::SERVERS;
use pushpull_worker::{Advice, Gradients, Params, Reader, WorkerConfig};
use tokio::sync::Mutex;

use super::call_session::Admission;
use super::execution_waits::ExecutionWaits;
use super::functions::FunctionError;
use super::params_pool::ParamsPool;
use super::trainer::{Trainer, TrainingStep, function_error};
use super::value::{Elements, Value, ValueType};

/// The reason why a variable cannot be an input.
#[derive(Debug)]
pub(crate) enum VariablePullError {
    /// The parameter servers failed. `retry` says that another execution may succeed.
    Servers { detail: String, retry: bool },
    /// The variable does not exist, or is no tensor.
    Unsuitable { detail: String },
    /// The variable is larger than the memory that the client of the call may use.
    Refused(Refusal),
}

impl From<VariablePullError> for FunctionError {
    fn from(error: VariablePullError) -> FunctionError {
        match error {
            VariablePullError::Servers { detail, retry: true } => {
                FunctionError::new(detail).retryable()
            }
            VariablePullError::Servers { detail, .. }
            | VariablePullError::Unsuitable { detail } => FunctionError::new(detail),
            VariablePullError::Refused(refusal) => FunctionError::new(refusal.to_string()),
        }
    }
}

/// Reads variables of the parameter servers of a cluster. The first use of a function connects.
#[derive(Debug)]
pub(crate) struct ServerVariables {
    /// The settings of connections to the servers, or the reason why there are none.
    config: Result<WorkerConfig, String>,
    reader: Mutex<Option<Arc<Reader>>>,
    trainer: Mutex<Option<Arc<Trainer>>>,
    pool: ParamsPool,
    /// The cause of the wait of the call that connects. Other calls wait for that call.
    connecting: std::sync::Mutex<&'static str>,
}

impl ServerVariables {
    /// Creates the variables of the servers of this cluster; without servers there are none.
    ///
    /// `is_alone` says that the function server has addresses of its own. If its job could hold
    /// the variables, that job then serves functions alone. A task of the job `ps` always has
    /// variables, wherever its functions are.
    pub(crate) fn new(
        cluster: &ClusterSpec,
        task: &TaskId,
        is_alone: bool,
        filters: &DeviceFilters,
        credentials: Option<Credentials>,
    ) -> ServerVariables {
        let excluded = |job: &str| {
            let mut tasks = cluster.ps_tasks().map(|(index, _)| TaskId::new(job, index));
            tasks.find(|task| !filters.allow(task))
        };
        let config = match cluster.variables_job() {
            Err(error) => Err(error.to_string()),
            Ok(job) if is_alone && job != TaskId::PS_JOB && *job == *task.job => {
                Err(format!("the job {job} serves functions alone"))
            }
            Ok(job) if cluster.step_owner().is_none() => Err(format!("the job {job} has no tasks")),
            Ok(job) => match excluded(job) {
                // Variables may be on each of the tasks.
                Some(excluded) => Err(format!("the device filters exclude {excluded}")),
                None => {
                    let config = WorkerConfig::new(cluster.clone(), task.clone());
                    Ok(config.credentials(credentials))
                }
            },
        };
        let config = config.map_err(|why| format!("there are no parameter servers: {why}"));
        ServerVariables {
            config,
            reader: Mutex::default(),
            trainer: Mutex::default(),
            pool: ParamsPool::default(),
            connecting: std::sync::Mutex::new(SERVERS),
        }
    }

    /// Reports the next cause of a function's wait.
    fn set_awaited(&self, waits: &ExecutionWaits, awaited: &'static str) {
        *self.connecting.lock().unwrap_or_else(PoisonError::into_inner) = awaited;
        waits.say(&self.awaited());
    }

    /// Returns the cause of a wait for the servers, which names their step owner.
    fn awaited(&self) -> String {
        let awaited = *self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = self.config.as_ref().ok().and_then(|config| {
            let owner = config.cluster.step_owner()?;
            let address = config.cluster.task_address(&owner.job, owner.index).ok()?;
            Some(format!("{awaited}, {owner} at {address}"))
        });
        owner.unwrap_or_else(|| awaited.to_owned())
    }

    /// Pulls the newest values of a variable, after its admission.
    pub(crate) async fn pull(
        &self,
        name: &str,
        admission: &Admission,
        waits: &ExecutionWaits,
    ) -> Result<Value, VariablePullError> {
        let reader = self.reader(waits).await?;
        let awaited = || format!("the values of variable {name:?}");
        let pulled = waits.during(awaited, pull(&reader, name, admission)).await;
        if let Err(VariablePullError::Servers { .. }) = &pulled {
            // The next call connects again: the servers may have other variables by then.
            self.reader.lock().await.take_if(|current| Arc::ptr_eq(current, &reader));
        }
        pulled
    }

    /// Takes a token, whose step has the values that a function asks for.
    pub(crate) async fn begin_step(
        &self,
        waits: &ExecutionWaits,
    ) -> Result<TrainingStep, FunctionError> {
        let trainer = waits.during(|| self.awaited(), self.trainer(waits)).await?;
        let awaited = || "a token of the step owner".to_owned();
        waits.during(awaited, trainer.begin_step()).await
    }

    /// Returns the session by which the functions train, which joins on first use.
    async fn trainer(&self, waits: &ExecutionWaits) -> Result<Arc<Trainer>, FunctionError> {
        let config = self.config.as_ref().map_err(FunctionError::new)?;
        let mut shared = self.trainer.lock().await;
        shared.take_if(|trainer| trainer.is_over());
        if let Some(trainer) = &*shared {
            return Ok(trainer.clone());
        }
        let mut config = config.clone();
        config.task = trainer_of(&config.task)?;
        let joined = Trainer::join(config, |awaited| self.set_awaited(waits, awaited)).await;
        Ok(shared.insert(Arc::new(joined.map_err(function_error)?)).clone())
    }

    /// Pulls the newest values of all dense variables.
    pub(crate) async fn values(&self, waits: &ExecutionWaits) -> Result<Params, FunctionError> {
        let reader = self.reader(waits).await?;
        // Another reader may have other variables.
        let free = self.pool.take().filter(|free| reader.has_made(free));
        let mut params = free.unwrap_or_else(|| reader.params());
        let awaited = || "the values of the variables".to_owned();
        let pulled = waits.during(awaited, reader.pull_shared(&mut params)).await;
        pulled.map_err(function_error)?;
        Ok(params)
    }

    /// Keeps the memory of values for later calls.
    pub(crate) fn keep(&self, values: Params) {
        self.pool.keep(values);
    }

    /// Returns an empty set of gradients of a tower.
    pub(crate) async fn gradients(
        &self,
        waits: &ExecutionWaits,
    ) -> Result<Gradients, FunctionError> {
        Ok(self.reader(waits).await?.gradients_for_bytes())
    }

    async fn reader(&self, waits: &ExecutionWaits) -> Result<Arc<Reader>, VariablePullError> {
        waits.during(|| self.awaited(), self.connected_reader(waits)).await
    }

    /// Returns the reader of the functions, which connects on first use.
    async fn connected_reader(
        &self,
        waits: &ExecutionWaits,
    ) -> Result<Arc<Reader>, VariablePullError> {
        let unsuitable = |detail: &String| VariablePullError::Unsuitable { detail: detail.clone() };
        let config = self.config.as_ref().map_err(unsuitable)?;
        let mut reader = self.reader.lock().await;
        reader.take_if(|reader| reader.has_failed());
        if let Some(reader) = &*reader {
            return Ok(reader.clone());
        }
        let phase = |awaited| self.set_awaited(waits, awaited);
        let connected = Reader::connect_in_phases(config.clone(), phase).await;
        Ok(reader.insert(Arc::new(connected.map_err(of_servers)?)).clone())
    }
}

/// Returns the client by which the functions of a task train.
fn trainer_of(task: &TaskId) -> Result<TaskId, FunctionError> {
    task.for_functions().ok_or_else(|| {
        FunctionError::new(format!("the job {:?} has too long a name to train", task.job))
    })
}

async fn pull(
    reader: &Reader,
    name: &str,
    admission: &Admission,
) -> Result<Value, VariablePullError> {
    let catalogue = reader.catalogue();
    let Some(variable) = catalogue.variables().iter().find(|variable| variable.name() == name)
    else {
        let detail = format!("there is no variable {name:?}");
        return Err(VariablePullError::Unsuitable { detail });
    };
    if variable.is_sparse() || variable.as_table().is_some() {
        let detail = format!("the variable {name:?} is read by rows");
        return Err(VariablePullError::Unsuitable { detail });
    }
    macro_rules! pull_as {
        ($element:ty) => {{
            let is = ValueType::new(Elements::Tensor(<$element>::DTYPE), variable.shape().clone());
            admission.ask(is.padded_bytes()).map_err(VariablePullError::Refused)?;
            let mut value = Value::zeroed(is).map_err(unsuitable)?;
            let elements = value.view_mut::<$element>().map_err(unsuitable)?;
            reader.pull_variable(name, elements).await.map_err(of_servers)?;
            Ok(value)
        }};
    }
    match variable.dtype() {
        DType::F32 => pull_as!(f32),
        DType::F64 => pull_as!(f64),
        DType::I64 => pull_as!(i64),
        DType::F16 => pull_as!(f16),
        DType::Bf16 => pull_as!(bf16),
        other => {
            let detail = format!("the variable {name:?} has elements of {other}");
            Err(VariablePullError::Unsuitable { detail })
        }
    }
}

fn unsuitable(error: super::value_error::ValueError) -> VariablePullError {
    VariablePullError::Unsuitable { detail: Chain(&error).to_string() }
}

fn of_servers(error: pushpull_worker::Error) -> VariablePullError {
    let retry = error.advice() != Advice::Stop;
    VariablePullError::Servers { detail: Chain(&error).to_string(), retry }
}
