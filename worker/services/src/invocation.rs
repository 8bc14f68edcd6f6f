//! [`Invocation`]: the inputs and services that the body of a function gets.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::EffectRef;
use pushpull_common::tensor::Element;
use pushpull_device::Device;
use pushpull_net::auth::AccessReport;
use pushpull_worker::{Gradients, Params, Push};

use super::block_on::block_on;
use super::blocking;
use super::cancel::CancelFlag;
use super::execution_waits::ExecutionWaits;
use super::function_client::FunctionClient;
use super::functions::FunctionError;
use super::nested_calls::{NestedCalls, NestedClients};
use super::outputs::{Outputs, unknown_value};
use super::runtime::client_core::ClientCore;
use super::runtime::descriptor_watch::DescriptorWatch;
use super::server_devices::ServerDevices;
use super::states::{State, States};
use super::towers::{GRADIENTS, LOSS};
use super::trainer::TrainingStep;
use super::value::Value;
use super::value_error::ValueError;
use super::variables::ServerVariables;

/// The services of one server that all its functions share.
#[derive(Debug)]
pub(crate) struct ServerShared {
    pub(crate) task: TaskId,
    pub(crate) states: States,
    pub(crate) devices: ServerDevices,
    pub(crate) variables: Arc<ServerVariables>,
    /// The clients by which functions call others.
    pub(crate) clients: NestedClients,
    /// Reports a lack of file descriptors.
    pub(crate) descriptors: DescriptorWatch,
    pub(crate) access: AccessReport,
}

/// One call of a function: its inputs, and the services of its server.
#[derive(Debug)]
pub struct Invocation {
    pub(crate) function: String,
    pub(crate) depth: u8,
    pub(crate) deadline: Option<Instant>,
    pub(crate) device: usize,
    pub(crate) inputs: Vec<(String, Value)>,
    pub(crate) cancelled: Arc<CancelFlag>,
    pub(crate) waits: Arc<ExecutionWaits>,
    pub(crate) scheduled: Option<EffectRef>,
    pub(crate) step: Option<TrainingStep>,
    /// The values that [`Invocation::values`] has returned.
    pub(crate) values: OnceLock<Params>,
    /// Whether the call has pushed, which a scheduled call does at most once.
    pub(crate) has_pushed: bool,
    pub(crate) shared: Arc<ServerShared>,
}

impl Invocation {
    /// Returns the name under which the function was called.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// Returns the task of this server.
    pub fn task(&self) -> &TaskId {
        &self.shared.task
    }

    /// Returns the number of calls that this one is nested in: 0 for a call of a client.
    pub fn depth(&self) -> u8 {
        self.depth
    }

    /// Returns the time at which the caller stops waiting; `None` for no deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Yields the inputs by name, in the order of the call.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.inputs.iter().map(|(name, value)| (&name[..], value))
    }

    /// Returns the input of this name.
    ///
    /// # Errors
    /// [`ValueError::Unknown`] if the call has none of this name.
    pub fn input(&self, name: &str) -> Result<&Value, ValueError> {
        let found = self.inputs.iter().find(|(other, _)| other == name);
        let names = self.inputs.iter().map(|(name, _)| &name[..]);
        found.map(|(_, value)| value).ok_or_else(|| unknown_value(name, names))
    }

    /// Returns the elements of an input.
    ///
    /// # Errors
    /// The errors of [`Invocation::input`] and [`Value::view`].
    #[doc(alias = "feed_dict")]
    pub fn feed<T: Element>(&self, name: &str) -> Result<&[T], ValueError> {
        self.input(name)?.view()
    }

    /// Combines two inputs element by element: see [`Value::zip`].
    ///
    /// # Errors
    /// The errors of [`Invocation::input`] and [`Value::zip`].
    pub fn zip<T: Element>(
        &self,
        names: [&str; 2],
        combine: impl FnMut(T, T) -> T,
    ) -> Result<Value, FunctionError> {
        let [left, right] = names;
        Ok(self.input(left)?.zip(self.input(right)?, combine)?)
    }

    /// Returns the state of this type, which all functions of this server share between calls. The
    /// state begins with the default of the type at each start of the server.
    pub fn state<T: Default + Send + 'static>(&self) -> Arc<State<T>> {
        self.shared.states.get()
    }

    /// Returns the values of all dense variables, to compute gradients from. The first use takes a
    /// token from the parameter servers. [`Invocation::push`] spends the token, and the end of the
    /// call returns it. Blocks the thread: an asynchronous function uses
    /// [`Invocation::params_async`].
    ///
    /// # Errors
    /// The errors of taking a token and pulling, which are retryable.
    pub fn params(&mut self) -> Result<&Params, FunctionError> {
        block_on(self.params_async())
    }

    /// Future form of [`Invocation::params`], for asynchronous functions.
    ///
    /// # Errors
    /// The errors of [`Invocation::params`].
    pub async fn params_async(&mut self) -> Result<&Params, FunctionError> {
        let mut step = self.take_step().await?;
        let awaited = || "the values of the variables".to_owned();
        let pulled = self.waits.during(awaited, step.params());
        self.unless_cancelled(pulled).await.map(|_| ())?;
        self.step.insert(step).params().await
    }

    /// Waits for a future, unless the call is cancelled meanwhile. A cancelled function has no
    /// caller, and its thread is for others.
    async fn unless_cancelled<T>(
        &self,
        future: impl Future<Output = Result<T, FunctionError>>,
    ) -> Result<T, FunctionError> {
        tokio::select! {
            biased;
            done = future => done,
            () = self.cancelled.raised() => {
                Err(FunctionError::new("the call has ended: nobody waits for it any more"))
            }
        }
    }

    /// Takes the step that the call has begun, or begins one.
    async fn take_step(&mut self) -> Result<TrainingStep, FunctionError> {
        match self.step.take() {
            Some(step) => Ok(step),
            None => self.unless_cancelled(self.shared.variables.begin_step(&self.waits)).await,
        }
    }

    /// Returns an empty set of gradients for [`Invocation::push`].
    ///
    /// # Errors
    /// The errors of [`Invocation::params`].
    pub fn gradients(&mut self) -> Result<Gradients, FunctionError> {
        block_on(self.gradients_async())
    }

    /// Future form of [`Invocation::gradients`], for asynchronous functions.
    ///
    /// # Errors
    /// The errors of [`Invocation::params`].
    pub async fn gradients_async(&mut self) -> Result<Gradients, FunctionError> {
        let step = self.take_step().await?;
        Ok(self.step.insert(step).gradients())
    }

    /// Pushes gradients of the values that [`Invocation::params`] has returned, and waits for the
    /// outcome. In a call that a coordinator has scheduled the gradients count once, however often
    /// the call is executed. The result is [`Push::Repeated`] if another execution was first.
    ///
    /// The wait goes on if the call is cancelled: the servers may have the gradient already.
    ///
    /// Blocks the thread: an asynchronous function uses [`Invocation::push_async`].
    ///
    /// # Errors
    /// The errors of [`pushpull_worker::Worker::push`]. In a call that a coordinator has scheduled
    /// also an error for a second push, and for a push without effect (stale or withdrawn). After
    /// the latter the coordinator repeats the call.
    pub fn push(&mut self, gradients: Gradients) -> Result<Push, FunctionError> {
        block_on(self.push_async(gradients))
    }

    /// Future form of [`Invocation::push`], for asynchronous functions.
    ///
    /// # Errors
    /// The errors of [`Invocation::push`].
    pub async fn push_async(&mut self, gradients: Gradients) -> Result<Push, FunctionError> {
        if self.has_pushed && self.scheduled.is_some() {
            return Err(FunctionError::new("a scheduled call may push only once"));
        }
        let step = self.take_step().await?;
        self.has_pushed = true;
        let awaited = || "the outcome of a push".to_owned();
        self.waits.during(awaited, step.push(gradients, self.scheduled)).await
    }

    /// Returns the newest values of all dense variables, without a token: for evaluation, and for
    /// the towers of [`super::Towers`]. The first use in a call pulls them. Blocks the thread.
    ///
    /// # Errors
    /// The errors of connecting and pulling, which are retryable.
    pub fn values(&self) -> Result<&Params, FunctionError> {
        match self.values.get() {
            Some(values) => Ok(values),
            None => {
                let values = self.shared.variables.values(&self.waits);
                let values = block_on(self.unless_cancelled(values))?;
                Ok(self.values.get_or_init(|| values))
            }
        }
    }

    /// Returns an empty set of gradients for [`Invocation::tower`]. Blocks the thread the first
    /// time.
    ///
    /// # Errors
    /// The errors of [`Invocation::values`].
    pub fn tower_gradients(&self) -> Result<Gradients, FunctionError> {
        block_on(self.unless_cancelled(self.shared.variables.gradients(&self.waits)))
    }

    /// Returns the gradients and the loss of a tower, for [`super::Towers`].
    ///
    /// # Errors
    /// An error for gradients of sparse variables and tables, which have no mean over towers here.
    pub fn tower(&self, gradients: Gradients, loss: f32) -> Result<Outputs, FunctionError> {
        let (memory, bytes) = gradients.into_bytes()?;
        let gradients = Value::of_bytes(memory, bytes);
        let gradients = gradients.ok_or_else(|| FunctionError::new("too many gradients"))?;
        Ok(Outputs::new().with(GRADIENTS, gradients).with(LOSS, loss))
    }

    /// Returns a client for calls of other functions, whose target is this server. Its calls end
    /// with this one: when the function returns, at the deadline, and when the call is cancelled.
    /// Outputs that it keeps stay as long as one clone of [`super::Kept`] exists.
    ///
    /// A call may be nested in at most 8 others. The functions of a server whose calls have the
    /// same depth share a client. So they share its places, its threads and its budget on each
    /// server. A blocking function lends its thread to other calls while it waits.
    ///
    /// Its operations block the thread. An asynchronous function uses [`Invocation::client_async`];
    /// here it is given [`super::ServiceError::Invalid`].
    pub fn client(&self) -> blocking::FunctionClient {
        blocking::FunctionClient::of_function(self.client_async())
    }

    /// Future form of [`Invocation::client`], for asynchronous functions.
    pub fn client_async(&self) -> FunctionClient {
        let calls = self.cancelled.nested(|| {
            let core = self.shared.clients.of_depth(self.depth);
            NestedCalls::new(core, self.depth, self.deadline, self.waits.clone())
        });
        let core = ClientCore::of_execution(calls.clone());
        FunctionClient::of_function(core, self.shared.task.clone(), self.deadline)
    }

    /// Returns whether the caller has stopped waiting for the result. A function that computes for
    /// long should check now and then, and return.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.is_raised()
    }

    /// Returns once the caller has stopped waiting for the result.
    pub async fn cancelled(&self) {
        self.cancelled.raised().await;
    }

    /// Returns the full name of the device that the call runs on, such as
    /// `/job:worker/task:0/device:CPU:0`.
    pub fn device_name(&self) -> &DeviceSpec {
        self.shared.devices.name(self.device)
    }

    /// Returns the device that the call runs on, which the first use opens.
    ///
    /// # Errors
    /// The error of the first opening of the device.
    pub fn device(&self) -> Result<Device, FunctionError> {
        Ok(self.shared.devices.open(self.device)?)
    }
}

impl Drop for Invocation {
    fn drop(&mut self) {
        self.cancelled.end_nested();
        if let Some(values) = self.values.take() {
            self.shared.variables.keep(values);
        }
    }
}
