//! The errors of a worker, and what the caller can do about each.

use std::fmt;
use std::time::Duration;

use pushpull_common::catalogue::CatalogueError;
use pushpull_common::cluster::ClusterError;
use pushpull_common::codec::{Codec, CodecError, EncodeError};
use pushpull_common::ids::{Sequence, ShardId, TaskId};
use pushpull_common::placement::PlacementError;
use pushpull_common::protocol::Refusal;
use pushpull_common::tensor::DType;
use thiserror::Error;

/// A shard that has not answered, with its last known state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnresponsiveShard {
    /// The shard.
    pub shard: ShardId,
    /// Its address.
    pub address: String,
    /// The last transport error, the state of the connection, or what the shard waits for.
    pub last: String,
}

impl fmt::Display for UnresponsiveShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ({})", self.shard, self.address, self.last)
    }
}

/// Shards that have not answered. `Display` lists them, separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnresponsiveShards(pub Vec<UnresponsiveShard>);

impl fmt::Display for UnresponsiveShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, silent) in self.0.iter().enumerate() {
            write!(f, "{}{silent}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// Why a worker could not connect. Correct the configuration, or try again later.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The cluster has no ps task.
    #[error("cannot connect {task}: the cluster has no ps task")]
    NoPs {
        /// The worker's task.
        task: TaskId,
    },
    /// The cluster does not have this task.
    #[error("cannot connect {task}: {source}")]
    UnknownTask {
        /// The worker's task.
        task: TaskId,
        /// The cause.
        source: ClusterError,
    },
    /// A codec of the configuration has parameters out of range.
    #[error("cannot connect: {source}")]
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
    /// The operating system did not start a thread.
    #[error("cannot start the session's thread: {source}")]
    Thread {
        /// The cause.
        source: std::io::Error,
    },
    /// The session failed, for example because the step owner did not answer in time.
    #[error(transparent)]
    Session(#[from] Error),
}

/// Why a worker could not join.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The placement strategy cannot place the variables.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The variables do not form a valid catalogue.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// The servers hold other variables: another model, or another version of it.
    #[error("cannot join: the variables differ from those on {shard}: {differs}")]
    Differs {
        /// The shard that holds other variables.
        shard: ShardId,
        /// The first difference, this worker's side first.
        differs: String,
    },
    /// The chief's `fill` set values that do not fit their variable.
    #[error(transparent)]
    InitialValues(ViewError),
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
    /// A codec was chosen for names that match no variable.
    #[error("cannot choose a codec for {names:?}: no variable has that name")]
    NothingToCompress {
        /// The name, or the prefix of names.
        names: String,
    },
    /// A shard reports the highest restore epoch. The shard is hostile, or its state is damaged.
    #[error("cannot join: {shard} is in restore epoch {epoch}, and there is no higher one")]
    NoEpoch {
        /// The shard.
        shard: ShardId,
        /// The epoch.
        epoch: u32,
    },
    /// The worker has joined already.
    #[error("cannot join twice")]
    Twice,
    /// The session failed, or the servers have lost state: see [`Error::StateLost`].
    #[error(transparent)]
    Session(#[from] Error),
}

/// The bound of a clipping call is not positive and finite.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("cannot clip to {bound}: it must be above 0 and finite")]
#[non_exhaustive]
pub struct ClipError {
    /// The bound.
    pub bound: f64,
}

/// Why a [`crate::LossScale`] cannot have these parameters.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LossScaleError {
    /// The scale is out of range or NaN.
    #[error("cannot scale losses by {scale}: it must be 1 to 2^32")]
    Scale {
        /// The scale.
        scale: f64,
    },
    /// The scale would grow with every gradient.
    #[error("cannot let the scale grow after 0 gradients")]
    GrowthInterval,
    /// The factor would not shrink the scale.
    #[error("cannot multiply the scale by {backoff}: it must be between 0 and 1")]
    Backoff {
        /// The factor.
        backoff: f64,
    },
}

/// Why a call cannot use a variable like this. Nothing was sent or changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ViewError {
    /// No declared variable has this name.
    #[error("cannot use the variable {name:?}: none of this name is declared")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The variable's elements are of another type.
    #[error("cannot use {name:?} as {asked}: its elements are {dtype}")]
    Type {
        /// The variable.
        name: String,
        /// The requested type.
        asked: DType,
        /// The variable's type.
        dtype: DType,
    },
    /// The number of elements is not the variable's.
    #[error("cannot take {elements} elements for {name:?}: its shape is {shape}")]
    Length {
        /// The variable.
        name: String,
        /// The elements given.
        elements: usize,
        /// The variable's shape.
        shape: String,
    },
    /// The variable is plain: it supports `assign` and `assign_add`, and has no gradients.
    #[error("cannot push a gradient for {name:?}: it is a plain variable")]
    Plain {
        /// The variable.
        name: String,
    },
    /// The optimizer trains the variable: it supports gradients and `assign`.
    #[error("cannot add to {name:?}: it is trained by the optimizer")]
    Trainable {
        /// The variable.
        name: String,
    },
    /// The variable is sparse: it is pulled and pushed by rows, and workers have no copy of it.
    #[error("cannot use {name:?} whole: it is sparse, and pulled and pushed by rows")]
    Sparse {
        /// The variable.
        name: String,
    },
    /// The variable is dense: it is pulled and pushed whole.
    #[error("cannot use rows of {name:?}: it is not sparse")]
    Dense {
        /// The variable.
        name: String,
    },
    /// The number of elements is not a whole row for each id.
    #[error("cannot take {elements} elements for {rows} rows of {name:?}: a row has {width}")]
    Width {
        /// The variable.
        name: String,
        /// The number of ids.
        rows: usize,
        /// The number of elements.
        elements: usize,
        /// The elements of one row.
        width: u64,
    },
    /// The variable has no such row.
    #[error("cannot use row {row} of {name:?}, at index {place}: it has {rows} rows")]
    Row {
        /// The variable.
        name: String,
        /// The first invalid id.
        row: u64,
        /// Its index among the ids, from 0.
        place: usize,
        /// The number of rows of the variable.
        rows: u64,
    },
    /// The push has more rows of a table for one shard than the table's `rows_at_once`.
    #[error("cannot push {rows} rows of table {name:?} to one shard: it takes {limit} at once")]
    RowsAtOnce {
        /// The table.
        name: String,
        /// The number of different rows.
        rows: usize,
        /// The limit.
        limit: u32,
    },
    /// An assignment names a row twice.
    #[error("cannot assign row {row} of {name:?} twice: it is repeated at index {place}")]
    RowTwice {
        /// The variable.
        name: String,
        /// The row.
        row: u64,
        /// The index of its second occurrence among the ids, from 0.
        place: usize,
    },
    /// The variable already has a gradient in this push, or is named twice in one call.
    #[error("cannot use {name:?} twice in one push")]
    Twice {
        /// The variable.
        name: String,
    },
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
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
    #[error("cannot {doing}: waited {waited:?} for {awaited}")]
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
    /// A newer incarnation has replaced this worker, or a newer chief has replaced this one. Or
    /// this worker was silent for three leases while a push was incomplete, and the step owner
    /// dropped its token. Stop this process.
    #[error(
        "cannot continue: a newer worker has replaced this one, or it was silent for too long with an incomplete push"
    )]
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
    /// A server has restarted without its variables, and they are not restored yet.
    ///
    /// A worker that was training usually meets this first, as it reconnects sooner than the chief.
    /// Connect and join again: the chief restores the newest checkpoint, and the others wait for
    /// that.
    ///
    /// If the chief's `join` returns this, there is no checkpoint, and other servers still hold
    /// what this one has lost. Restart all servers to begin from the start.
    #[error("cannot continue: {shard} has lost its variables")]
    StateLost {
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
        error: EncodeError,
    },
    /// The user data for a checkpoint is too long. Nothing was sent.
    #[error("cannot save a checkpoint: {bytes} bytes of user data, the limit is {limit}")]
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
    Interrupted,
    /// The params or gradients are of another model: of another worker, or with other variables.
    #[error("cannot use these buffers: they are for other variables")]
    ForeignBuffer,
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
    /// The session has ended: the worker has left, or its thread has stopped.
    #[error("cannot {doing}: the session has ended")]
    Ended {
        /// The operation, as in "cannot push".
        doing: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn the_text_of_a_restore_suits_either_order_of_steps() {
        for (from_step, to_step) in [(448, 372), (372, 448), (7, 7)] {
            let text = Error::RolledBack { from_step, to_step }.to_string();
            assert!(text.contains(&format!("resumes at step {to_step},")), "{text}");
            assert!(text.contains(&format!("this worker was {from_step}")), "{text}");
            assert!(!text.contains("back"), "{text}");
        }
    }
}
