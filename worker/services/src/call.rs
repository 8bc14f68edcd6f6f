//! A call of a function, as a client writes it.

use std::time::Duration;

use pushpull_common::call_digest::CallDigest;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::limits;
use pushpull_common::protocol::message::{CallInputs, Input, NamedInput, OutputRef};
use pushpull_common::protocol::wire::Text;

use super::call_session::{CallOrder, OutputId};
use super::dispatch::ResourceId;
use super::error::ServiceError;
use super::kept::Kept;
use super::per_worker::PerWorker;
use super::value::Value;

/// A call of a function: its name, where it runs, and its inputs.
///
/// ```
/// use std::time::Duration;
///
/// use pushpull_services::Call;
///
/// let call = Call::new("add")
///     .on("/job:worker/task:1/cpu:0")
///     .feed("a", 2.0_f32)
///     .variable("b", "b")
///     .timeout(Duration::from_secs(5));
/// ```
#[derive(Clone, Debug)]
#[must_use = "a call does nothing until a client makes it"]
pub struct Call {
    pub(crate) function: String,
    pub(crate) device: String,
    any_device: bool,
    pub(crate) timeout: Option<Duration>,
    pub(crate) ends_with_connection: bool,
    inputs: Vec<(String, CallArgument)>,
}

/// An input of a call.
#[derive(Clone, Debug)]
enum CallArgument {
    Value(Value),
    Variable(String),
    Output { task: TaskId, id: OutputId, output: String },
    PerWorker { resource: ResourceId, output: String },
}

impl Call {
    /// A call of the function of this name, on the client's target.
    pub fn new(function: &str) -> Call {
        Call {
            function: function.to_owned(),
            device: String::new(),
            any_device: false,
            timeout: None,
            ends_with_connection: false,
            inputs: Vec::new(),
        }
    }

    /// The task and the device on which it runs, such as `/job:worker/task:1/cpu:0`. Without a task
    /// it runs on the client's target, and without a device on the first one of the server.
    #[doc(alias = "tf.device")]
    pub fn on(mut self, device: &str) -> Call {
        self.device = device.to_owned();
        self
    }

    /// Runs the call on the first device of its task if the task has no usable device of the name
    /// of [`Call::on`]. Default: such a call is refused.
    #[doc(alias = "allow_soft_placement")]
    pub fn or_any(self) -> Call {
        Call { any_device: true, ..self }
    }

    /// Gives the function a value.
    #[doc(alias = "feed_dict")]
    pub fn feed(self, name: &str, value: impl Into<Value>) -> Call {
        self.input(name, CallArgument::Value(value.into()))
    }

    /// Gives the function the newest values of a dense variable of the parameter servers. The
    /// server of the call pulls them.
    pub fn variable(self, name: &str, variable: &str) -> Call {
        self.input(name, CallArgument::Variable(variable.to_owned()))
    }

    /// Gives the function an output that another call leaves on its server. The server of this call
    /// fetches it from there, once that call has ended.
    pub fn kept(self, name: &str, kept: &Kept, output: &str) -> Call {
        let task = kept.task().clone();
        let id = kept.id();
        let output = output.to_owned();
        self.input(name, CallArgument::Output { task, id, output })
    }

    /// Gives the function a per-worker value: the outputs that the worker of this call has of it.
    /// Only a coordinator can make such a call. See [`super::Coordinator::per_worker`].
    #[doc(alias = "PerWorkerValues")]
    pub fn per_worker(self, name: &str, value: &PerWorker, output: &str) -> Call {
        let resource = value.resource();
        let output = output.to_owned();
        self.input(name, CallArgument::PerWorker { resource, output })
    }

    /// Returns the ids of the per-worker values that the call needs.
    pub(crate) fn resources(&self) -> Vec<ResourceId> {
        let resource = |(_, input): &(String, CallArgument)| match input {
            CallArgument::PerWorker { resource, .. } => Some(*resource),
            _ => None,
        };
        self.inputs.iter().filter_map(resource).collect()
    }

    /// Returns the call without its per-worker values, to compare the inputs that are equal on all
    /// workers.
    pub(crate) fn without_per_worker(&self) -> Call {
        let is_own =
            |(_, input): &&(String, CallArgument)| !matches!(input, CallArgument::PerWorker { .. });
        let inputs = self.inputs.iter().filter(is_own).cloned().collect();
        Call { inputs, ..self.clone() }
    }

    /// Replaces per-worker values by those of one worker: the outputs of these calls.
    pub(crate) fn on_worker(
        &self,
        worker: &TaskId,
        kept: impl Fn(ResourceId) -> Option<OutputId>,
    ) -> Call {
        let inputs = self.inputs.iter().map(|(name, input)| {
            let input = match input {
                CallArgument::PerWorker { resource, output } => match kept(*resource) {
                    Some(id) => {
                        let task = worker.clone();
                        let output = output.clone();
                        CallArgument::Output { task, id, output }
                    }
                    None => input.clone(),
                },
                other => other.clone(),
            };
            (name.clone(), input)
        });
        Call { inputs: inputs.collect(), ..self.clone() }
    }

    /// The longest time that the client waits for the end of the call. The function is told to stop
    /// then. Default: [`super::FunctionClientConfig::timeout`].
    pub fn timeout(self, timeout: Duration) -> Call {
        Call { timeout: Some(timeout), ..self }
    }

    /// Ends the call with [`super::ServiceError::Lost`] as soon as the connection to its server
    /// breaks. Default: the client connects again, and the call goes on.
    pub fn ends_with_connection(self) -> Call {
        Call { ends_with_connection: true, ..self }
    }

    fn input(mut self, name: &str, input: CallArgument) -> Call {
        self.inputs.push((name.to_owned(), input));
        self
    }

    /// Returns the digest of this call and all before it. `before` is the digest of the calls
    /// before. It covers the function and the inputs, and is equal in every process. It excludes
    /// where the call runs, and which server has a kept output.
    pub(crate) fn digest(&self, before: u64) -> u64 {
        let mut digest = CallDigest::after(before);
        digest.add(self.function.as_bytes());
        for (name, input) in &self.inputs {
            digest.add(name.as_bytes());
            match input {
                CallArgument::Value(value) => {
                    digest.add(format!("value {}", value.value_type()).as_bytes());
                    digest.add(value.as_bytes());
                }
                CallArgument::Variable(variable) => {
                    digest.add(b"variable");
                    digest.add(variable.as_bytes());
                }
                CallArgument::Output { output, .. } => {
                    digest.add(b"output");
                    digest.add(output.as_bytes());
                }
                CallArgument::PerWorker { resource, output } => {
                    digest.add(format!("per-worker value {}", resource.0).as_bytes());
                    digest.add(output.as_bytes());
                }
            }
        }
        digest.finish()
    }

    /// Returns the operation, as in "cannot call \"add\"".
    pub(crate) fn doing(&self) -> String {
        format!("call {:?}", self.function)
    }

    /// Returns the order that a session carries out. With `retain` the outputs stay on the server.
    pub(crate) fn order(&self, retain: bool) -> Result<CallOrder, ServiceError> {
        let invalid = |reason| ServiceError::Invalid { doing: self.doing(), reason };
        let (inputs, values) = self.wire_inputs().map_err(invalid)?;
        Ok(CallOrder {
            function: self.function.clone(),
            device: self.device.clone(),
            any_device: self.any_device,
            depth: 0,
            retain,
            scheduled: None,
            ends_with_connection: self.ends_with_connection,
            inputs,
            values,
        })
    }

    /// Returns the inputs on the wire with the values among them, or the reason why they are
    /// invalid.
    fn wire_inputs(&self) -> Result<(CallInputs, Vec<Value>), String> {
        let text_of =
            |name: &str| Text::new(name).ok_or_else(|| format!("the name {name:?} is too long"));
        if self.function.len() > limits::FUNCTION_NAME_BYTES_MAX {
            return Err("the name of the function is too long".to_owned());
        }
        let mut named = Vec::new();
        let mut values = Vec::new();
        for (name, input) in &self.inputs {
            let input = match input {
                CallArgument::Value(value) => {
                    values.push(value.clone());
                    Input::Value { is: value.value_type().to_wire() }
                }
                CallArgument::Variable(variable) => {
                    let variable = Text::new(variable.as_str());
                    let variable = variable.ok_or("the name of a variable is too long")?;
                    Input::Variable { variable }
                }
                CallArgument::PerWorker { .. } => {
                    return Err(format!("{name:?} is a per-worker value, for a coordinator"));
                }
                CallArgument::Output { task, id, output } => {
                    let job = Text::new(&*task.job).ok_or("the name of a job is too long")?;
                    let OutputId { owner, server, call } = *id;
                    let of = OutputRef { owner, server, call, output: text_of(output)? };
                    Input::Output { job, task: task.index, of }
                }
            };
            named.push(NamedInput { name: text_of(name)?, input });
        }
        let count = named.len();
        let inputs = CallInputs::new(named)
            .ok_or_else(|| format!("{count} inputs: the limit is {}", limits::CALL_VALUES_MAX))?;
        Ok((inputs, values))
    }
}
