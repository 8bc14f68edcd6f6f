//! Checkpoints: saved, found, restored.

use crate::ids::{GlobalStep, RestoreEpoch};
use crate::protocol::limits;
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{List, Text, wire_struct};

wire_struct! {
    /// The identity of a checkpoint.
    #[derive(Eq)]
    CheckpointId {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// The restore epoch in which it was saved.
        epoch: RestoreEpoch,
        /// The global step that it holds.
        step: GlobalStep,
    }
}

wire_struct! {
    /// A corrupt checkpoint that was passed over for an older one.
    #[derive(Eq)]
    PassedOver {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// The fault in it.
        cause: Detail,
    }
}

wire_struct! {
    /// Requests the newest valid checkpoint from the step owner (chief).
    FindCheckpoint {}
}
wire_struct! {
    /// The newest valid checkpoint.
    CheckpointFound {
        /// The checkpoint; absent if there is none, or if the servers keep no checkpoints.
        checkpoint: Option<CheckpointId>,
        /// The highest restore epoch that any checkpoint names, also a corrupt or unfinished one; 0
        /// without any.
        named: RestoreEpoch,
    }
}
wire_struct! {
    /// Requests the corrupt checkpoints that the last search for the newest valid one passed over
    /// (chief, to the step owner).
    PassedOverQuery {}
}
wire_struct! {
    /// The corrupt checkpoints that are newer than the newest valid one.
    PassedOverAre {
        /// The newest of them, newest first.
        checkpoints: List<PassedOver, { limits::PASSED_OVER_MAX }>,
    }
}
wire_struct! {
    /// Checks that the shard can restore its part of a checkpoint (chief). Nothing changes.
    PrepareRestore {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The restore epoch that is to begin, as in [`Restore`].
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// The checkpoint fits the shard, and every file that has some of its part is intact.
    RestorePrepared {}
}
wire_struct! {
    /// Restores every variable and optimizer slot from a checkpoint and opens the shard (chief).
    ///
    /// The shard checks the checkpoint first, unless it has just done so. A refused checkpoint
    /// changes nothing. Then a new restore epoch begins, and messages of older epochs are dropped.
    /// The answer is `Ready`.
    Restore {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The restore epoch that begins: higher than that of every shard and of the checkpoint.
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// Requests a checkpoint of all shards from the step owner (chief, admin). The checkpoint keeps
    /// the body for the user, for example the positions of the data readers.
    Save {}
}
wire_struct! {
    /// A checkpoint is saved, verified and published.
    Saved {
        /// The checkpoint.
        checkpoint: CheckpointId,
    }
}
wire_struct! {
    /// Requests that a shard write its part of a checkpoint (peer: the step owner's task).
    SaveShard {
        /// The name of the checkpoint.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// A shard's part is written and verified. The body is its entry in the manifest.
    ShardSaved {}
}
