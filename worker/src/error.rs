//! What can go wrong for a worker, and what its caller can do about it.

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

/// A shard that has not answered, and the last that was heard of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnresponsiveShard {
    /// The shard.
    pub shard: ShardId,
    /// Its address.
    pub address: String,
    /// The last transport error, or what it is waiting in, or for whom.
    pub last: String,
}

impl fmt::Display for UnresponsiveShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ({})", self.shard, self.address, self.last)
    }
}

/// Shards that have not answered.
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
    /// The cluster has no such task.
    #[error("cannot connect {task}: {source}")]
    UnknownTask {
        /// The worker's task.
        task: TaskId,
        /// Why not.
        source: ClusterError,
    },
    /// A codec of the configuration cannot be used.
    #[error("cannot connect: {source}")]
    Codec {
        /// Why not.
        #[from]
        source: CodecError,
    },
    /// Values cannot be pulled in this form.
    #[error("cannot connect: values are not pulled as {codec}, only as f16 or bf16")]
    PullCodec {
        /// The codec.
        codec: Codec,
    },
    /// The operating system gave no thread.
    #[error("cannot connect: no thread for the session: {source}")]
    Thread {
        /// What it said.
        source: std::io::Error,
    },
    /// The session failed.
    #[error(transparent)]
    Session(#[from] Error),
}

/// Why a worker could not join.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The variables cannot be placed.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The variables make no catalogue.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// The servers hold other variables: another model, or an older one.
    #[error("cannot join: the variables differ from those on {shard}: {differs}")]
    Differs {
        /// Where the others are.
        shard: ShardId,
        /// The first difference, this side first.
        differs: String,
    },
    /// The chief's closure gave a variable values it cannot have.
    #[error(transparent)]
    InitialValues(ViewError),
    /// A server does not know the codec of a variable. Choose another, or update the server.
    #[error("cannot push {variable:?} as {codec}: {shard} does not know it")]
    UnknownCodec {
        /// The variable.
        variable: String,
        /// Its codec.
        codec: Codec,
        /// Who does not know it.
        shard: ShardId,
    },
    /// A codec was chosen for a variable that takes no gradients, or takes them as rows, which are
    /// pushed as f16, bf16 or int8 only.
    #[error(
        "cannot push {variable:?} as {codec}: it takes no gradients, or takes them as rows, which \
         are pushed as f16, bf16 or int8 only"
    )]
    NotCompressible {
        /// The variable.
        variable: String,
        /// The codec.
        codec: Codec,
    },
    /// A codec was chosen for variables that there are none of: a misspelt name.
    #[error("cannot choose a codec for {names:?}: no variable is called that")]
    NothingToCompress {
        /// The name, or how names begin.
        names: String,
    },
    /// A server says a restore epoch after which there is no other: it is not one of this system's, or its
    /// state is damaged.
    #[error("cannot join: {shard} says restore epoch {epoch}, and none can follow it")]
    NoEpoch {
        /// The shard.
        shard: ShardId,
        /// The epoch.
        epoch: u32,
    },
    /// The worker has joined already.
    #[error("cannot join twice")]
    Twice,
    /// The session failed.
    #[error(transparent)]
    Session(#[from] Error),
}

/// Why gradients are not clipped.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("cannot clip to {bound}: it must be above 0 and finite")]
#[non_exhaustive]
pub struct ClipError {
    /// The bound.
    pub bound: f64,
}

/// Why losses cannot be scaled like this.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LossScaleError {
    /// The scale is too small, too large, or no number.
    #[error("cannot scale losses by {scale}: it must be 1 to 2^32")]
    Scale {
        /// The scale.
        scale: f64,
    },
    /// The scale would grow all the time.
    #[error("cannot let the scale grow after 0 gradients")]
    GrowthInterval,
    /// The scale would not shrink, or not grow.
    #[error("cannot multiply the scale with {backoff}: it must be between 0 and 1")]
    Backoff {
        /// The factor.
        backoff: f64,
    },
}

/// Why a variable's elements are not to be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ViewError {
    /// No variable of this name has been declared.
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
        /// The type asked for.
        asked: DType,
        /// The variable's type.
        dtype: DType,
    },
    /// The data has another number of elements.
    #[error("cannot take {elements} elements for {name:?}: its shape is {shape}")]
    Length {
        /// The variable.
        name: String,
        /// The elements given.
        elements: usize,
        /// The variable's shape.
        shape: String,
    },
    /// The variable is plain: it takes `assign` and `assign_add`, not gradients.
    #[error("cannot push a gradient for {name:?}: it is a plain variable")]
    Plain {
        /// The variable.
        name: String,
    },
    /// The variable is trained by the optimizer: it takes gradients and `assign`.
    #[error("cannot add to {name:?}: it is trained by the optimizer")]
    Trainable {
        /// The variable.
        name: String,
    },
    /// The variable is sparse: it is pulled and pushed by rows, and nobody has a copy of all of it.
    #[error("cannot use {name:?} whole: it is sparse, and pulled and pushed by rows")]
    Sparse {
        /// The variable.
        name: String,
    },
    /// The variable is not sparse: it is pulled and pushed whole.
    #[error("cannot use rows of {name:?}: it is not sparse")]
    Dense {
        /// The variable.
        name: String,
    },
    /// The data has not a whole row for each number.
    #[error("cannot take {elements} elements for {rows} rows of {name:?}: a row has {width}")]
    Width {
        /// The variable.
        name: String,
        /// The rows named.
        rows: usize,
        /// The elements given.
        elements: usize,
        /// The elements of one row.
        width: u64,
    },
    /// The variable has no such row.
    #[error("cannot use row {row} of {name:?}, at place {place}: it has {rows} rows")]
    Row {
        /// The variable.
        name: String,
        /// The first such number.
        row: u64,
        /// Its place among those given, from 0.
        place: usize,
        /// The rows of the variable.
        rows: u64,
    },
    /// A push has more rows of a table on one shard than that takes at once.
    #[error("cannot push {rows} rows of table {name:?} to one shard: it takes {limit} at once")]
    RowsAtOnce {
        /// The table.
        name: String,
        /// The rows, each once.
        rows: usize,
        /// The most.
        limit: u32,
    },
    /// A row is to be given two values.
    #[error("cannot assign row {row} of {name:?} twice at once: it is at place {place} again")]
    RowTwice {
        /// The variable.
        name: String,
        /// The row.
        row: u64,
        /// Where among the numbers it is the second time, from 0.
        place: usize,
    },
    /// The variable has a gradient in this push already, or is named twice.
    #[error("cannot use {name:?} twice at once")]
    Twice {
        /// The variable.
        name: String,
    },
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A row of a table that is pushed or assigned has a NaN or an infinity.
    #[error("cannot push {value} in row {row} of {variable:?}, as element {element} of the row")]
    NonFiniteRow {
        /// The table.
        variable: String,
        /// The id of the row.
        row: u64,
        /// The first bad element of the row.
        element: usize,
        /// The value.
        value: f64,
    },
    /// The deadline has passed. A push goes on in the background: ask with
    /// [`crate::Worker::outcome`].
    #[error("cannot {doing}: waited {waited:?} for {awaited}")]
    Timeout {
        /// What was being done.
        doing: &'static str,
        /// How long.
        waited: Duration,
        /// Who has not answered.
        awaited: UnresponsiveShards,
        /// The push, if it was one.
        sequence: Option<Sequence>,
    },
    /// A server said no, and why.
    #[error("cannot {doing}: {shard} refuses: {refusal}")]
    Refused {
        /// What was being done.
        doing: &'static str,
        /// Who refuses.
        shard: ShardId,
        /// Why.
        refusal: Refusal,
    },
    /// Two servers are configured differently; correct one and restart it.
    #[error(
        "cannot work with {left} and {right} together: {field} is {left_value:?} on the one \
         (identity {left_hash}) and {right_value:?} on the other (identity {right_hash})"
    )]
    Identity {
        /// One server.
        left: ShardId,
        /// The other.
        right: ShardId,
        /// What differs.
        field: String,
        /// Its value on the one.
        left_value: String,
        /// Its value on the other.
        right_value: String,
        /// The one's identity, shortened.
        left_hash: String,
        /// The other's identity, shortened.
        right_hash: String,
    },
    /// Another worker has taken this one's task: a restart of it; or another chief this one's place. Or this
    /// worker was silent for three leases with a push half made, and the step owner has given it up.
    /// Stop this one.
    #[error(
        "cannot go on: a newer worker has taken this one's place, or it was given up as dead with a push half made"
    )]
    Fenced,
    /// A checkpoint was restored, because a server had lost its state. What this session held of
    /// later steps is void: its tokens, and pushes that were not answered; those that were answered
    /// are lost as well, as far as they are newer than the checkpoint.
    ///
    /// Set the data readers to where they were at `to_step`, connect and join anew.
    #[error(
        "cannot go on: a checkpoint was restored, training goes on from step {to_step}, and the \
         newest step this worker had seen was {from_step}"
    )]
    RolledBack {
        /// The newest step that this session has heard of. Below `to_step` if other workers had gone
        /// on since, and the checkpoint was saved after that.
        from_step: u64,
        /// The step from which the training goes on: that of the checkpoint.
        to_step: u64,
    },
    /// A server was restarted and has lost its variables, and nobody has restored them yet: what a
    /// living worker usually meets, as it is back sooner than the chief. Connect and join anew: the
    /// chief restores the newest checkpoint then, and the others wait for it. From `join` of the
    /// chief: there is no checkpoint, and other servers still hold what this one has lost. Restart
    /// all servers to begin from the start.
    #[error("cannot go on: {shard} has lost its variables")]
    StateLost {
        /// The server.
        shard: ShardId,
    },
    /// A gradient or a value is NaN or infinite. It counts nowhere, and its token goes back.
    #[error("cannot push: element {element} of {variable:?} is {value}")]
    NonFinite {
        /// The variable.
        variable: String,
        /// The first bad element.
        element: usize,
        /// Its value.
        value: f64,
    },
    /// The gradient is finite, and would have made a value NaN or infinite: the learning rate may be too
    /// large. The push has changed nothing, and its token goes back. Told by a cluster of one shard in
    /// asynchronous mode; elsewhere the servers count it in their metrics.
    #[error("cannot push: element {element} of {variable:?} would become {value}")]
    Overflow {
        /// The variable.
        variable: String,
        /// The first such element.
        element: usize,
        /// What it would become.
        value: f64,
    },
    /// More rows of a table than there may be: new ones of one that evicts none, or such as are given
    /// values. The push has changed nothing on this shard, and may have on others.
    #[error(
        "cannot push {more} new rows of {variable:?}: {shard} has {rows} of it, and {limit} at most"
    )]
    TableFull {
        /// The table.
        variable: String,
        /// Who has no room.
        shard: ShardId,
        /// How many rows it has.
        rows: u64,
        /// How many more the push has.
        more: u64,
        /// How many there may be.
        limit: u64,
    },
    /// A gradient cannot be encoded. Nothing was sent.
    #[error("cannot push {variable:?}: {error}")]
    Encode {
        /// The variable.
        variable: String,
        /// Why not.
        error: EncodeError,
    },
    /// What a checkpoint is to keep for its user is too long. Nothing was sent.
    #[error("cannot save a checkpoint: {bytes} bytes of the user's, the limit is {limit}")]
    UserBlob {
        /// Its length.
        bytes: u64,
        /// The longest it may be.
        limit: u64,
    },
    /// No variable has a gradient in this push.
    #[error("cannot push: no variable has a gradient")]
    EmptyPush,
    /// The future of [`crate::StreamingPush::variable`] was dropped: nobody knows whether the variable is
    /// in the push. Begin another.
    #[error("cannot push: a variable of it was interrupted")]
    Interrupted,
    /// Buffers of another worker, or of another join.
    #[error("cannot use these buffers: they are for other variables")]
    ForeignBuffer,
    /// The worker has not joined.
    #[error("cannot {doing} before joining")]
    NotJoined {
        /// What was being done.
        doing: &'static str,
    },
    /// No push of this number is under way or among the last that ended.
    #[error("cannot tell what became of push {sequence}: it is not among the last 64")]
    UnknownPush {
        /// The number.
        sequence: Sequence,
    },
    /// Too many pushes are unsettled.
    #[error("cannot push: {limit} pushes are unsettled already")]
    Window {
        /// How many there may be.
        limit: u64,
    },
    /// More operations are on their way to the session than it takes at once, because their futures
    /// were not awaited. Nothing was done: await some, and do this again.
    #[error("cannot {doing}: {limit} operations are on their way already")]
    Busy {
        /// What was to be done.
        doing: &'static str,
        /// How many there may be.
        limit: usize,
    },
    /// A variable cannot be used like this.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The session has ended: the worker has left, or its thread is gone.
    #[error("cannot {doing}: the session has ended")]
    Ended {
        /// What was being done.
        doing: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn a_restore_is_told_by_its_step_whichever_is_higher() {
        for (from_step, to_step) in [(448, 372), (372, 448), (7, 7)] {
            let said = Error::RolledBack { from_step, to_step }.to_string();
            assert!(said.contains(&format!("goes on from step {to_step},")), "{said}");
            assert!(said.contains(&format!("had seen was {from_step}")), "{said}");
            assert!(!said.contains("back"), "{said}");
        }
    }
}
