//! What the body of a function is given.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::CallRef;
use pushpull_common::tensor::Element;
use pushpull_device::Device;
use pushpull_worker::{Gradients, Params, Push};

use super::block_on::block_on;
use super::blocking;
use super::cancel::CancelFlag;
use super::client::Client;
use super::execution_waits::ExecutionWaits;
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

/// What the functions of one server share.
#[derive(Debug)]
pub(crate) struct ServerShared {
    pub(crate) task: TaskId,
    pub(crate) states: States,
    pub(crate) devices: ServerDevices,
    pub(crate) variables: Arc<ServerVariables>,
    /// The clients by which functions call others.
    pub(crate) clients: NestedClients,
    /// Reports a lack of descriptors.
    pub(crate) descriptors: DescriptorWatch,
}

/// One call of a function: its inputs, and what the server offers.
#[derive(Debug)]
pub struct Invocation {
    pub(crate) function: String,
    pub(crate) depth: u8,
    pub(crate) deadline: Option<Instant>,
    pub(crate) device: usize,
    pub(crate) inputs: Vec<(String, Value)>,
    pub(crate) cancelled: Arc<CancelFlag>,
    pub(crate) waits: Arc<ExecutionWaits>,
    pub(crate) scheduled: Option<CallRef>,
    pub(crate) step: Option<TrainingStep>,
    /// The values that [`Invocation::values`] has returned.
    pub(crate) values: OnceLock<Params>,
    /// Whether the call has pushed.
    pub(crate) has_pushed: bool,
    pub(crate) shared: Arc<ServerShared>,
}

impl Invocation {
    /// The name under which the function was called.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// The task of this server.
    pub fn task(&self) -> &TaskId {
        &self.shared.task
    }

    /// How many calls this one is nested in: 0 for a call of a client.
    pub fn depth(&self) -> u8 {
        self.depth
    }

    /// When the caller stops waiting; `None` for never.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The inputs in the order of the call.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.inputs.iter().map(|(name, value)| (&name[..], value))
    }

    /// The input of this name.
    ///
    /// # Errors
    /// [`ValueError::Unknown`] if the call has none of this name.
    pub fn input(&self, name: &str) -> Result<&Value, ValueError> {
        let found = self.inputs.iter().find(|(other, _)| other == name);
        let names = self.inputs.iter().map(|(name, _)| &name[..]);
        found.map(|(_, value)| value).ok_or_else(|| unknown_value(name, names))
    }

    /// The elements of an input.
    ///
    /// # Errors
    /// Those of [`Invocation::input`] and [`Value::view`].
    #[doc(alias = "feed_dict")]
    pub fn feed<T: Element>(&self, name: &str) -> Result<&[T], ValueError> {
        self.input(name)?.view()
    }

    /// Combines two inputs element by element: see [`Value::zip`].
    ///
    /// # Errors
    /// Those of [`Invocation::input`] and [`Value::zip`].
    pub fn zip<T: Element>(
        &self,
        names: [&str; 2],
        combine: impl FnMut(T, T) -> T,
    ) -> Result<Value, FunctionError> {
        let [left, right] = names;
        Ok(self.input(left)?.zip(self.input(right)?, combine)?)
    }

    /// What the functions of this server keep between calls, by its type. It begins with the
    /// default of the type, and again when the server is started again.
    pub fn state<T: Default + Send + 'static>(&self) -> Arc<State<T>> {
        self.shared.states.get()
    }

    /// The values of all dense variables, to compute gradients from. Takes a token from the
    /// parameter servers the first time; [`Invocation::push`] spends it, and the end of the call
    /// returns it. Blocks the thread: an asynchronous function uses [`Invocation::params_async`].
    ///
    /// # Errors
    /// Those of taking a token and pulling, as errors that another execution may not meet.
    pub fn params(&mut self) -> Result<&Params, FunctionError> {
        block_on(self.params_async())
    }

    /// As [`Invocation::params`], as a future.
    ///
    /// # Errors
    /// As [`Invocation::params`].
    pub async fn params_async(&mut self) -> Result<&Params, FunctionError> {
        let mut step = self.take_step().await?;
        let awaited = || "the values of the variables".to_owned();
        let pulled = self.waits.during(awaited, step.params());
        self.unless_cancelled(pulled).await.map(|_| ())?;
        self.step.insert(step).params().await
    }

    /// Waits for a future, unless the call is cancelled meanwhile: nobody waits for the function
    /// then, and its thread is for others.
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
    /// As [`Invocation::params`].
    pub fn gradients(&mut self) -> Result<Gradients, FunctionError> {
        block_on(self.gradients_async())
    }

    /// As [`Invocation::gradients`], as a future.
    ///
    /// # Errors
    /// As [`Invocation::params`].
    pub async fn gradients_async(&mut self) -> Result<Gradients, FunctionError> {
        let step = self.take_step().await?;
        Ok(self.step.insert(step).gradients())
    }

    /// Pushes gradients of the values that [`Invocation::params`] has returned, and waits for the
    /// outcome. In a call that a coordinator has scheduled they count once, however often the call
    /// is executed: [`Push::Repeated`] if another execution was first.
    ///
    /// The wait goes on if the call is cancelled: the servers may have the gradient already.
    ///
    /// Blocks the thread: an asynchronous function uses [`Invocation::push_async`].
    ///
    /// # Errors
    /// Those of [`pushpull_worker::Worker::push`]. In a call that a coordinator has scheduled also a second
    /// push, and a push without effect, which is stale or withdrawn: then the coordinator repeats
    /// the call.
    pub fn push(&mut self, gradients: Gradients) -> Result<Push, FunctionError> {
        block_on(self.push_async(gradients))
    }

    /// As [`Invocation::push`], as a future.
    ///
    /// # Errors
    /// As [`Invocation::push`].
    pub async fn push_async(&mut self, gradients: Gradients) -> Result<Push, FunctionError> {
        if self.has_pushed && self.scheduled.is_some() {
            return Err(FunctionError::new("a scheduled call pushes once"));
        }
        let step = self.take_step().await?;
        self.has_pushed = true;
        let awaited = || "the outcome of a push".to_owned();
        self.waits.during(awaited, step.push(gradients, self.scheduled)).await
    }

    /// The newest values of all dense variables, without a token: for evaluation, and for the
    /// towers of [`super::Towers`]. They are pulled the first time in a call. Blocks the thread.
    ///
    /// # Errors
    /// Those of connecting and pulling, as errors that another execution may not meet.
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
    /// As [`Invocation::values`].
    pub fn tower_gradients(&self) -> Result<Gradients, FunctionError> {
        block_on(self.unless_cancelled(self.shared.variables.gradients(&self.waits)))
    }

    /// Returns the gradients and the loss of a tower, for [`super::Towers`].
    ///
    /// # Errors
    /// Gradients of sparse variables and tables, which have no mean over towers here.
    pub fn tower(&self, gradients: Gradients, loss: f32) -> Result<Outputs, FunctionError> {
        let (memory, bytes) = gradients.into_bytes()?;
        let gradients = Value::of_bytes(memory, bytes);
        let gradients = gradients.ok_or_else(|| FunctionError::new("too many gradients"))?;
        Ok(Outputs::new().with(GRADIENTS, gradients).with(LOSS, loss))
    }

    /// A client for calls of other functions, which has this server as its target. Its calls end
    /// with this one: when it returns, at its deadline, and when it is cancelled. Outputs that it
    /// keeps stay as long as one clone of [`super::Kept`] exists.
    ///
    /// A call may be nested in at most 8 others. The functions of a server whose calls have the
    /// same depth share a client, with its places, its threads and its budget on each server. A
    /// blocking function lends its thread to other calls while it waits.
    ///
    /// Its operations block the thread. An asynchronous function uses [`Invocation::client_async`];
    /// here it is given [`super::ServiceError::Invalid`].
    pub fn client(&self) -> blocking::Client {
        blocking::Client::of_function(self.client_async())
    }

    /// As [`Invocation::client`], with futures.
    pub fn client_async(&self) -> Client {
        let calls = self.cancelled.nested(|| {
            let core = self.shared.clients.of_depth(self.depth);
            NestedCalls::new(core, self.depth, self.deadline, self.waits.clone())
        });
        let core = ClientCore::of_execution(calls.clone());
        Client::of_function(core, self.shared.task.clone(), self.deadline)
    }

    /// Whether nobody waits for the result any more. A function that computes for long should ask
    /// now and then, and return.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.is_raised()
    }

    /// Returns once nobody waits for the result any more.
    pub async fn cancelled(&self) {
        self.cancelled.raised().await;
    }

    /// The full name of the device that the call runs on, such as
    /// `/job:worker/task:0/device:CPU:0`.
    pub fn device_name(&self) -> &DeviceSpec {
        self.shared.devices.name(self.device)
    }

    /// The device that the call runs on.
    ///
    /// # Errors
    /// That of opening the device, the first time that it is used.
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
