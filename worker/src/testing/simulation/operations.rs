//! The operations of a training loop, their answers, and the events of a session's endpoint.

use pushpull_common::data_set::DataSet;
use pushpull_common::ids::{
    CoordinatorEpoch, GlobalStep, RestoreEpoch, Sequence, ShardId, VariableId,
};
use pushpull_common::protocol::message::Declared;
use pushpull_common::protocol::{EffectRef, Grant, Outcome};

use crate::coordinators::OpenedCoordinator;
use crate::error::Error;

/// An operation of a training loop.
#[derive(Clone, Debug)]
pub enum WorkerOperation {
    /// Connect to every shard with variables, and to the step owner's.
    Open,
    /// Declare the variables on a shard, as the chief.
    Declare(ShardId),
    /// Initialize the variables of a shard in this restore epoch.
    Initialize(ShardId, RestoreEpoch),
    /// Wait until a shard's variables have values.
    AwaitReady(ShardId),
    /// Join the variables.
    Join,
    /// Declare the data set on the step owner.
    DeclareData(DataSet),
    /// Take a token.
    Token,
    /// Pull all values: for the step of a token, or without one of any step.
    Pull(Option<GlobalStep>),
    /// Pull the values of one variable: for the step of a token, or without one of any step.
    PullVariable(VariableId, Option<GlobalStep>),
    /// Push, spending a token.
    Push {
        /// The token.
        grant: Grant,
        /// The effect of the gradient, if it counts once for one.
        effect: Option<EffectRef>,
        /// The step at which the values were read.
        read: GlobalStep,
        /// The variables that have a gradient.
        variables: Vec<VariableId>,
        /// The gradients, as long as all variables.
        bytes: Vec<u8>,
    },
    /// Begin a push whose gradients come one by one, spending a token.
    Begin {
        /// The token.
        grant: Grant,
        /// The step at which the values were read.
        read: GlobalStep,
    },
    /// Add gradients to a push.
    AddGradients {
        /// The push.
        sequence: Sequence,
        /// The variables that these gradients are for.
        variables: Vec<VariableId>,
        /// The gradients, as long as all variables.
        bytes: Vec<u8>,
    },
    /// Complete a push, and wait for its outcome.
    End(Sequence),
    /// Continue to wait for the push that ended with this timeout.
    Resume(Error),
    /// Wait until the training has ended on all workers.
    AwaitEnd,
    /// Tell a shard that this worker leaves.
    Leave(ShardId),
    /// Open a coordinator on every shard, under a new epoch.
    OpenCoordinator(String),
    /// Ask every shard which effects of a coordinator have settled.
    SettledEffects(String),
    /// Close a coordinator on every shard.
    CloseCoordinator(String, CoordinatorEpoch),
}

/// The result of an operation.
#[derive(Clone, Debug)]
pub enum WorkerAnswer {
    /// The operation is done.
    Done,
    /// The state in which the chief has found a shard.
    Found(Declared),
    /// A token; `None` if there are no more.
    Token(Option<Grant>),
    /// All values, or those of one variable and their padding, and their step.
    Pulled(Vec<u8>, GlobalStep),
    /// The step of the token has passed.
    Stale,
    /// A push is begun.
    Begun(Sequence),
    /// A push was settled.
    Pushed(Outcome),
    /// A coordinator, with its effects that have settled on every shard.
    Calls(OpenedCoordinator),
}

/// An action that the session requests.
#[derive(Debug)]
pub enum EndpointEvent {
    /// Connect a link.
    Connect {
        /// The link.
        link: usize,
        /// The shard to connect to.
        shard: ShardId,
    },
    /// Close a link and drop its unsent frames.
    Disconnect {
        /// The link.
        link: usize,
    },
    /// Send a frame.
    Send {
        /// The link.
        link: usize,
        /// The bytes of the frame.
        frame: Vec<u8>,
    },
    /// Call [`SessionEndpoint::continue_read`](super::SessionEndpoint::continue_read) after a
    /// while: a pull reads shared memory in steps.
    ContinueRead,
    /// Answer an operation.
    Reply {
        /// The number of the operation.
        op: u64,
        /// The result.
        reply: Result<WorkerAnswer, Error>,
    },
}
