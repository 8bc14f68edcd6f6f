//! The errors of a worker, and what the caller can do about each.

mod advice;
mod config_error;
mod load_error;
mod unresponsive_shard;
mod view_error;

use std::time::Duration;

use pushpull_common::codec::{Codec, CodecError};
use pushpull_common::ids::{Sequence, ShardId, TaskId};
use pushpull_common::protocol::Refusal;
use pushpull_common::rounding::rounded;
use thiserror::Error;

pub use advice::Advice;
pub use config_error::ConfigError;
pub use load_error::LoadError;
pub use unresponsive_shard::{UnresponsiveShard, UnresponsiveShards};
pub use view_error::ViewError;

/// Why an operation failed. Every method of a worker and a reader returns this type, so a cause is
/// found at the same place whichever call meets it.
///
/// - [`Error::Config`] and [`Error::View`] are faults of the program, [`Error::Load`] of a file.
/// - [`Error::Refused`], [`Error::Identity`], [`Error::Unexpected`], [`Error::Differs`] and
///   [`Error::DataDiffers`] name the server that disagrees.
/// - [`Error::Timeout`] names the shards that have not answered.
/// - After [`Error::RolledBack`] and [`Error::StateLost`] the program connects and joins again.
/// - [`Error::Panicked`] names a function of the program.
/// - [`Error::Fenced`] ends this process.
///
/// [`Error::advice`] says the same in a form that a program can follow.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting or a declaration of this program is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device that computes refused an operation, or failed.
    #[cfg(feature = "devices")]
    #[error(transparent)]
    Device(#[from] pushpull_device::ComputeError),
    /// The ring of this rank is over, or could not form.
    #[cfg(feature = "ring")]
    #[error(transparent)]
    Ring(#[from] pushpull_collective::RingError),
    /// A checkpoint cannot be read or written.
    #[error("cannot {doing}: {cause}")]
    Checkpoint {
        /// The operation, as in "cannot save a checkpoint".
        doing: &'static str,
        /// The cause.
        cause: String,
    },
    /// A server does not prove that it knows the access token of this client: it is another server, or
    /// the token was taken back.
    #[error("cannot connect to {shard}: {reason}")]
    Unproven {
        /// The shard.
        shard: ShardId,
        /// What the server has not proved.
        reason: String,
    },
    /// The servers hold other variables: another model, or another version of it.
    #[error("cannot join: the variables differ from those on {shard}: {differs}")]
    Differs {
        /// The shard that holds other variables.
        shard: ShardId,
        /// The first difference, this worker's side first.
        differs: String,
    },
    /// The servers have another setting than this worker expects:
    /// [`crate::WorkerConfig::expect_synchronous`], [`crate::WorkerConfig::expect_last_step`] or
    /// [`crate::WorkerConfig::expect_no_last_step`].
    #[error("cannot join: the {setting} of {shard} is {found}, and this worker expects {expected}")]
    Unexpected {
        /// The step owner.
        shard: ShardId,
        /// The setting.
        setting: &'static str,
        /// The value that this worker expects.
        expected: String,
        /// The value of the server.
        found: String,
    },
    /// The servers have another data set than this worker: one that another worker has declared, or
    /// that of a checkpoint.
    #[error("cannot join: the data differ from those on {shard}: {differs}")]
    DataDiffers {
        /// The step owner.
        shard: ShardId,
        /// The first difference.
        differs: String,
    },
    /// A server does not support the codec of a variable. Choose another, or update the server.
    #[error("cannot push {variable:?} as {codec}: {shard} does not support it")]
    UnknownCodec {
        /// The variable.
        variable: String,
        /// Its codec.
        codec: Codec,
        /// The shard that does not support it.
        shard: ShardId,
    },
    /// A shard reports the highest restore epoch. The shard is hostile, or its state is damaged.
    #[error("cannot join: {shard} is in restore epoch {epoch}, and there is no higher one")]
    NoEpoch {
        /// The shard.
        shard: ShardId,
        /// The epoch.
        epoch: u32,
    },
    /// The variables that a shard holds are not a valid catalogue. The shard is hostile, or its
    /// state is damaged.
    #[error("cannot read the variables of {shard}: {reason}")]
    ForeignCatalogue {
        /// The shard.
        shard: ShardId,
        /// The fault.
        reason: String,
    },
    /// The worker has joined already.
    #[error("cannot join twice")]
    AlreadyJoined,
    /// The operating system did not start a thread.
    #[error("cannot start the session's thread: {reason}")]
    Thread {
        /// The operating system's error.
        reason: String,
    },
    /// The bytes are not the result of [`crate::Worker::residuals`], or damaged. Nothing was
    /// restored.
    #[error("cannot restore residuals: the bytes are damaged or no residuals")]
    DamagedResiduals,
    /// The residuals belong to other variables, or to the same with another placement. Nothing was
    /// restored.
    #[error("cannot restore residuals: they are of other variables")]
    ForeignResiduals,
    /// A variable has a saved residual but no codec any more: the residual would be lost. Nothing
    /// was restored.
    #[error("cannot restore residuals: {variable:?} has one, but has no codec")]
    ResidualWithoutCodec {
        /// The variable.
        variable: String,
    },
    /// A pushed or assigned row of a table has a NaN or an infinity. The push changes nothing, and
    /// its token is returned.
    #[error("cannot push {value} in row {row} of {variable:?}, as element {element} of the row")]
    NonFiniteRow {
        /// The table.
        variable: String,
        /// The id of the row.
        row: u64,
        /// The first bad element of the row.
        element: usize,
        /// Its value.
        value: f64,
    },
    /// The deadline has passed. A push continues in the background: see [`crate::Worker::outcome`]
    /// and [`crate::Worker::resume`].
    #[error("cannot {doing}: waited {:?} for {awaited}", rounded(.waited))]
    Timeout {
        /// The operation, as in "cannot push".
        doing: &'static str,
        /// How long the operation waited.
        waited: Duration,
        /// The shards that have not answered.
        awaited: UnresponsiveShards,
        /// The sequence number of the push, if the operation was one.
        sequence: Option<Sequence>,
    },
    /// Too few replicas are left for a synchronous step, and the policy of the servers
    /// (`OnLoss::Wait` or `OnLoss::Fail`) ends the wait for others. A training session ends. A push
    /// stays: [`crate::Worker::outcome`] and [`crate::Worker::resume`] ask for it by its sequence
    /// number.
    #[error(
        "cannot {doing}: too few replicas for {waited:?}, and on_loss ends the wait for {awaited}",
        waited = rounded(waited)
    )]
    ReplicasAbsent {
        /// The operation, as in "cannot push".
        doing: &'static str,
        /// How long the step has had too few replicas.
        waited: Duration,
        /// The step that waits, with the absent replicas.
        awaited: String,
        /// The sequence number of the push, if the operation was one.
        sequence: Option<Sequence>,
    },
    /// A server refused the operation.
    #[error("cannot {doing}: {shard} refuses: {refusal}")]
    Refused {
        /// The operation, as in "cannot push".
        doing: &'static str,
        /// The shard that refused.
        shard: ShardId,
        /// The reason.
        refusal: Refusal,
    },
    /// Two servers are configured differently. Correct one and restart it.
    #[error(
        "cannot use {left} and {right} together: {field} is {left_value:?} on the first \
         (identity {left_hash}) and {right_value:?} on the second (identity {right_hash})"
    )]
    Identity {
        /// The first server.
        left: ShardId,
        /// The second server.
        right: ShardId,
        /// The field of the identity that differs.
        field: String,
        /// Its value on the first server.
        left_value: String,
        /// Its value on the second server.
        right_value: String,
        /// The first server's identity hash, shortened.
        left_hash: String,
        /// The second server's identity hash, shortened.
        right_hash: String,
    },
    /// A newer incarnation has replaced this worker, or a newer chief has replaced this one. Stop
    /// this process.
    #[error("cannot continue: a newer worker has replaced this one")]
    Fenced,
    /// A checkpoint was restored because a server had lost its state. The tokens of this session
    /// and its unanswered pushes are void. Answered pushes that are newer than the checkpoint are
    /// lost.
    ///
    /// Reset the data readers to their positions at `to_step`, then connect and join again.
    #[error(
        "cannot continue: a checkpoint was restored, training resumes at step {to_step}, and the \
         newest step known to this worker was {from_step}"
    )]
    RolledBack {
        /// The newest step known to this session. Below `to_step` if other workers had made steps
        /// since, and the checkpoint was saved after that.
        from_step: u64,
        /// The step at which training resumes: that of the checkpoint.
        to_step: u64,
    },
    /// A server has stopped for good, by order of the program that runs it. Nothing is to be waited
    /// for.
    #[error("cannot continue: {shard} has stopped for good")]
    ServerStopped {
        /// The server's shard.
        shard: ShardId,
    },
    /// A server has restarted without its variables, and they are not restored yet.
    ///
    /// A worker that was training usually meets this first, as it reconnects sooner than the chief.
    /// Connect and join again: the chief restores the newest checkpoint, and the others wait for
    /// that.
    #[error("cannot continue: {shard} has lost its variables")]
    StateLost {
        /// The server without variables.
        shard: ShardId,
    },
    /// A server has lost what others still hold, and there is no checkpoint. Only the chief's
    /// `join` returns this. Restart all servers to begin from the start.
    #[error(
        "cannot join: {shard} has lost its variables, other servers still hold theirs, and there \
         is no checkpoint to restore; restart all servers to begin from the start"
    )]
    NoCheckpoint {
        /// The server without variables.
        shard: ShardId,
    },
    /// A gradient or an assigned value is NaN or infinite. The push changes nothing, and its token
    /// is returned.
    #[error("cannot push: element {element} of {variable:?} is {value}")]
    NonFinite {
        /// The variable.
        variable: String,
        /// The index of the first such element in the variable, in row-major order.
        element: usize,
        /// Its value.
        value: f64,
    },
    /// The gradient is finite, but would have made a value NaN or infinite: the learning rate may
    /// be too large. The push changes nothing, and its token is returned.
    ///
    /// Only a cluster of one shard in asynchronous mode reports this. Elsewhere the servers count
    /// such values in their metrics.
    #[error("cannot push: element {element} of {variable:?} would become {value}")]
    Overflow {
        /// The variable.
        variable: String,
        /// The index of the first such element in the variable, in row-major order.
        element: usize,
        /// What the element would become.
        value: f64,
    },
    /// A push or an assignment adds more rows to a table than it can hold. A push can meet this
    /// only if the table does not evict. It changes nothing on this shard, but may have been
    /// applied on others.
    #[error(
        "cannot push {more} new rows of {variable:?}: {shard} has {rows} of it, and {limit} at most"
    )]
    TableFull {
        /// The table.
        variable: String,
        /// The shard whose part of the table is full.
        shard: ShardId,
        /// The rows that the table has there.
        rows: u64,
        /// The rows that would be added.
        more: u64,
        /// The most rows that the table can have there.
        limit: u64,
    },
    /// The codec cannot encode a gradient. Nothing was sent.
    #[error("cannot push {variable:?}: {error}")]
    Encode {
        /// The variable.
        variable: String,
        /// The reason.
        error: CodecError,
    },
    /// The user data for a checkpoint is too long. Nothing was sent.
    #[error("cannot save a checkpoint: {bytes} bytes of user data: the limit is {limit}")]
    UserBlob {
        /// Its length in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// No variable has a gradient in this push. Nothing was sent.
    #[error("cannot push: no variable has a gradient")]
    EmptyPush,
    /// A future of [`crate::StreamingPush::variable`] or [`crate::StreamingPush::rows`] was
    /// dropped, so it is unknown whether the variable is in the push. Drop the push and begin
    /// another.
    #[error("cannot push: the future that sent a variable was dropped")]
    DroppedVariable,
    /// The params or gradients are of another model: of another worker, or with other variables.
    #[error("cannot use these buffers: they are for other variables")]
    ForeignBuffer,
    /// Only the chief may do this: see [`crate::Worker::is_chief`]. Nothing was sent.
    #[error("cannot {doing}: only the chief may, and this is {task}")]
    NotChief {
        /// The operation, as in "cannot publish".
        doing: &'static str,
        /// The task of this worker.
        task: TaskId,
    },
    /// The worker has not joined: call [`crate::Worker::join`] first.
    #[error("cannot {doing} before joining")]
    NotJoined {
        /// The operation, as in "cannot push".
        doing: &'static str,
    },
    /// The push is neither under way nor among the last 64 that ended.
    #[error("cannot return the outcome of push {sequence}: it is not among the last 64")]
    UnknownPush {
        /// The sequence number.
        sequence: Sequence,
    },
    /// Too many pushes are unsettled. Await some of them first.
    #[error("cannot push: {limit} pushes are unsettled already")]
    Window {
        /// The limit.
        limit: u64,
    },
    /// The queue to the session's thread is full, because futures were not awaited. Nothing was
    /// done: await some, then try again.
    #[error("cannot {doing}: {limit} operations are queued already")]
    Busy {
        /// The operation, as in "cannot push".
        doing: &'static str,
        /// The capacity of the queue.
        limit: usize,
    },
    /// A call cannot use a variable like this.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A file cannot fill variables.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Another thread has raised the [`Interrupt`](crate::Interrupt) of this worker or reader. What
    /// was under way is as if its future were dropped: see [`crate::blocking`].
    #[error("cannot {doing}: interrupted by another thread")]
    Interrupted {
        /// The operation, as in "cannot push".
        doing: &'static str,
    },
    /// The session belongs to another process, which has forked this one. It continues there; a child
    /// connects by itself.
    #[error("cannot {doing} in a child of fork: the session belongs to process {parent}")]
    Forked {
        /// The operation, as in "cannot push".
        doing: &'static str,
        /// The process of the session.
        parent: u32,
    },
    /// A function of the program panicked: that of [`crate::WorkerConfig::on_progress`], or the one
    /// that sets first values. Or the thread did that reduces the gradients of a ring.
    #[error("cannot continue: {callback} panicked: {message}")]
    Panicked {
        /// The function, as in "on_progress".
        callback: &'static str,
        /// The message of the panic, or words that say that it has none.
        message: String,
    },
    /// The session has ended: the worker has left, or its thread has stopped.
    #[error("cannot {doing}: the session has ended")]
    Ended {
        /// The operation, as in "cannot push".
        doing: &'static str,
    },
}

impl Error {
    /// Returns whether a wait has ended: by its deadline here, or by that of the server.
    #[doc(hidden)]
    pub fn is_wait(&self) -> bool {
        match self {
            Error::Timeout { .. } => true,
            Error::Refused { refusal, .. } => matches!(refusal, Refusal::Deadline { .. }),
            _ => false,
        }
    }

    /// Returns what a training loop does about this error. A training session follows it.
    ///
    /// ```
    /// use pushpull_worker::{Advice, Error};
    ///
    /// assert_eq!(Error::RolledBack { from_step: 8, to_step: 5 }.advice(), Advice::Rejoin);
    /// assert_eq!(Error::Fenced.advice(), Advice::Stop);
    /// ```
    pub fn advice(&self) -> Advice {
        match self {
            Error::Refused { refusal, .. } => Advice::of_refusal(refusal),
            Error::Timeout { .. } | Error::Busy { .. } | Error::Window { .. } => Advice::Retry,
            // The operating system may have a thread for the next attempt.
            Error::Thread { .. } => Advice::Retry,
            Error::RolledBack { .. } | Error::StateLost { .. } | Error::Ended { .. } => {
                Advice::Rejoin
            }
            Error::NonFinite { .. }
            | Error::NonFiniteRow { .. }
            | Error::Overflow { .. }
            | Error::Encode { error: CodecError::NonFinite { .. }, .. }
            | Error::DroppedVariable => Advice::SkipBatch,
            #[cfg(feature = "devices")]
            Error::Device(_) => Advice::Stop,
            #[cfg(feature = "ring")]
            Error::Ring(error) if error.may_shrink() => Advice::Rejoin,
            #[cfg(feature = "ring")]
            Error::Ring(_) => Advice::Stop,
            Error::Checkpoint { .. } => Advice::Retry,
            Error::ReplicasAbsent { .. }
            | Error::Config(_)
            | Error::View(_)
            | Error::Load(_)
            | Error::Differs { .. }
            | Error::DataDiffers { .. }
            | Error::Unexpected { .. }
            | Error::UnknownCodec { .. }
            | Error::NoEpoch { .. }
            | Error::ForeignCatalogue { .. }
            | Error::AlreadyJoined
            | Error::DamagedResiduals
            | Error::ForeignResiduals
            | Error::ResidualWithoutCodec { .. }
            | Error::Identity { .. }
            | Error::Fenced
            | Error::Forked { .. }
            | Error::NoCheckpoint { .. }
            | Error::Panicked { .. }
            | Error::ServerStopped { .. }
            | Error::TableFull { .. }
            | Error::Encode { .. }
            | Error::UserBlob { .. }
            | Error::EmptyPush
            | Error::ForeignBuffer
            | Error::NotChief { .. }
            | Error::NotJoined { .. }
            | Error::Interrupted { .. }
            | Error::UnknownPush { .. }
            | Error::Unproven { .. } => Advice::Stop,
        }
    }

    /// Returns whether a gradient was refused because it has or would make a NaN or an infinity.
    #[doc(hidden)]
    pub fn is_non_finite(&self) -> bool {
        match self {
            Error::NonFinite { .. } | Error::NonFiniteRow { .. } | Error::Overflow { .. } => true,
            Error::Encode { error: CodecError::NonFinite { .. }, .. } => true,
            Error::Refused { refusal, .. } => {
                matches!(refusal, Refusal::NonFinite { .. } | Refusal::Overflow { .. })
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
