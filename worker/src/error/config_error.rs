//! Faults in what the program configures or declares.

use pushpull_common::catalogue::CatalogueError;
use pushpull_common::cluster::ClusterError;
use pushpull_common::codec::{Codec, CodecError};
use pushpull_common::ids::TaskId;
use pushpull_common::placement::PlacementError;
use thiserror::Error;

/// Why a setting or a declaration of this program is invalid. Correct the program.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The cluster has the job `ps`, and that has no task.
    #[error("cannot connect {task}: the cluster has no ps task")]
    NoPs {
        /// The worker's task.
        task: TaskId,
    },
    /// No job of the cluster holds variables, or several could.
    #[error("cannot connect {task}")]
    NoVariablesJob {
        /// The worker's task.
        task: TaskId,
        /// The cause.
        source: ClusterError,
    },
    /// No server can have the address of a ps task: something else has the path of its Unix socket.
    #[error("cannot connect {task}: {reason}")]
    NoServer {
        /// The worker's task.
        task: TaskId,
        /// The address, and what has its path.
        reason: String,
    },
    /// The cluster does not have this task.
    #[error("cannot connect {task}")]
    UnknownTask {
        /// The worker's task.
        task: TaskId,
        /// The cause.
        source: ClusterError,
    },
    /// A codec of the configuration has parameters out of range.
    #[error("cannot encode gradients")]
    Codec {
        /// The cause.
        #[from]
        source: CodecError,
    },
    /// Pulled values cannot be encoded with this codec.
    #[error("cannot pull values as {codec}: only f16 and bf16 are possible")]
    PullCodec {
        /// The codec.
        codec: Codec,
    },
    /// A codec was chosen for names that match no variable.
    #[error("cannot choose a codec for {names:?}: no variable has that name")]
    NothingToCompress {
        /// The name, or the prefix of names.
        names: String,
    },
    /// The codec cannot encode the variable. Plain variables have no gradients; rows support only
    /// f16, bf16 and int8.
    #[error(
        "cannot push {variable:?} as {codec}: it is plain, or it is pushed by rows, which support \
         only f16, bf16 and int8"
    )]
    NotCompressible {
        /// The variable.
        variable: String,
        /// The codec.
        codec: Codec,
    },
    /// The cluster lists no task of the jobs `chief` and `worker`, so contributions to a mean
    /// cannot be divided by their number.
    #[error(
        "cannot join with the mean {variable:?}: the cluster lists no task of the jobs chief and \
         worker, whose number is its divisor"
    )]
    NoReplicas {
        /// The first variable that is a mean.
        variable: String,
    },
    /// A coordinator's name is empty or too long.
    #[error(
        "cannot open the coordinator {name:?}: its name must have 1 to {} bytes",
        pushpull_common::protocol::limits::COORDINATOR_NAME_BYTES_MAX
    )]
    CoordinatorName {
        /// The name.
        name: String,
    },
    /// The placement strategy cannot place the variables.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The variables do not form a valid catalogue.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A hyperparameter of a rule is invalid.
    #[error("cannot train by a rule whose {name} is {value}: {reason}")]
    Hyperparameter {
        /// The hyperparameter.
        name: &'static str,
        /// Its value.
        value: String,
        /// The reason.
        reason: &'static str,
    },
    /// A variable cannot be trained without servers, or a rule names none.
    #[error("cannot train {variable:?} on a ring: {reason}")]
    Untrainable {
        /// The variable, or the pattern that matches none.
        variable: String,
        /// The reason.
        reason: String,
    },
    /// A codec whose encoded length depends on the gradient was chosen on a ring, where all ranks must
    /// know it.
    #[error("cannot average gradients as {codec} on a ring: its length depends on the gradient")]
    NoRingCodec {
        /// The codec.
        codec: Codec,
    },
    /// A data set whose samples count exactly once was declared for a training on a ring. Each rank
    /// reads its own share instead.
    #[error("cannot grant samples of {data_set:?} on a ring: each rank reads its own share")]
    GrantedData {
        /// The name of the data set.
        data_set: String,
    },
    /// The workers of a cluster are to average dense gradients around a ring, and the ring has been
    /// launched with another number of ranks. Each worker is one rank.
    #[error(
        "cannot average dense gradients around a ring of {ranks} ranks: the cluster has {replicas} \
         workers"
    )]
    RingSize {
        /// The ranks with which the ring was launched.
        ranks: u32,
        /// The tasks of the jobs `chief` and `worker`.
        replicas: usize,
    },
    /// The bound of a clipping call is not positive and finite.
    #[error("cannot clip to {bound}: it must be above 0 and finite")]
    ClipBound {
        /// The bound.
        bound: f64,
    },
    /// The scale of a [`crate::LossScale`] is out of range or NaN.
    #[error("cannot scale losses by {scale}: it must be 1 to 2^32")]
    LossScale {
        /// The scale.
        scale: f64,
    },
    /// The scale of a [`crate::LossScale`] would grow with every gradient.
    #[error("cannot let the scale grow after 0 gradients")]
    GrowthInterval,
    /// The factor of a [`crate::LossScale`] would not shrink the scale.
    #[error("cannot multiply the scale by {backoff}: it must be between 0 and 1")]
    Backoff {
        /// The factor.
        backoff: f64,
    },
}
