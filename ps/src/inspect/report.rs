//! The result of an inspection.

use std::path::PathBuf;

use pushpull_common::data_set::DataSet;
use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::{
    CoordinatorEpoch, CoordinatorId, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId,
};
use pushpull_common::status::Presence;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::Replication;

/// The contents of a state directory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The directory.
    pub path: PathBuf,
    /// Whether a server holds its lock.
    pub live: bool,
    /// The server's note about failing checkpoint saves; `None` if the last save succeeded.
    /// Independent of the soundness of the state.
    pub saves_failing: Option<SavesFailing>,
    /// The shards, in ascending order.
    pub shards: Vec<ShardInspection>,
    /// The folders that are missing of the shards that the identity of the others counts. Empty for
    /// the folder of one shard.
    pub missing: Vec<PathBuf>,
}

impl Inspection {
    /// Returns whether all files are sound, no shard is poisoned, and none is missing.
    ///
    /// After a reboot poisoning no longer counts: the contents of the disk decide.
    pub fn is_sound(&self) -> bool {
        let is_whole = self.missing.is_empty();
        is_whole
            && self.shards.iter().all(|shard| {
                // After a reboot, the contents of the disk decide.
                let decides = shard.arena.as_ref().is_some_and(|arena| !arena.this_boot);
                let sound = shard.files.iter().all(|file| file.verdict.is_sound());
                sound && (decides || shard.poisoned.is_none())
            })
    }
}

/// A series of failed checkpoint saves.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavesFailing {
    /// The number of saves that have failed since one succeeded.
    pub in_a_row: u64,
    /// The cause of the last failure.
    pub cause: String,
}

/// The arena of one shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardInspection {
    /// The folder of the arena.
    pub path: PathBuf,
    /// The arena's identity; `None` if the first page of the control file is unreadable.
    pub arena: Option<ArenaReport>,
    /// The cause of a failed flush, if any. No server opens the arena again until the machine is
    /// rebooted.
    pub poisoned: Option<String>,
    /// The shard's state; `None` if it cannot be read.
    pub state: Option<ShardState>,
    /// The variables; empty if there are none or they cannot be read.
    pub variables: Vec<VariableReport>,
    /// The declared data set, on the step owner.
    pub data: Option<DataReport>,
    /// The open coordinators.
    pub coordinators: Vec<CoordinatorReport>,
    /// The known clients.
    pub clients: Vec<ClientReport>,
    /// The complete pushes in the inbox, in the order of arrival.
    pub whole: Vec<CompletePush>,
    /// The number of words in a committed intent that is not completed; `None` if the intent is
    /// idle.
    pub committed_words: Option<usize>,
    /// The number of rows in the undo of an uncommitted change.
    pub prepared_rows: Option<usize>,
    /// The number of the newest durable image; `None` without [`crate::Durability::Power`].
    pub newest_image: Option<u64>,
    /// The files.
    pub files: Vec<FileReport>,
}

/// The identity of an arena, from the first page of its control file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaReport {
    /// The format of the files.
    pub format: u32,
    /// The shard.
    pub shard: ShardId,
    /// The random number drawn when the arena was created.
    pub arena: u64,
    /// The boot id of the machine under which the arena was created or last recovered.
    pub boot: [u8; 16],
    /// Whether it is the current boot.
    pub this_boot: bool,
    /// The settings that must match the configuration: names and values.
    pub identity: Vec<(String, String)>,
}

/// The stage of a shard's variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariablesStage {
    /// No variables are declared.
    Absent,
    /// The variables are declared and have no values yet.
    Declared,
    /// The variables have values.
    Ready,
}

/// The state of a shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardState {
    /// The stage of the variables.
    pub variables: VariablesStage,
    /// The number of pushes applied, of every kind.
    pub version: u64,
    /// The number of gradients applied.
    pub gradients: u64,
    /// The global step; 0 on shards that do not own it.
    pub step: GlobalStep,
    /// Whether training has ended.
    pub finished: bool,
    /// The restore epoch.
    pub restore_epoch: RestoreEpoch,
    /// The step at which the restore epoch began.
    pub restored_step: GlobalStep,
    /// The number of processes that have opened the arena.
    pub lives: u64,
    /// The number of declarations of variables.
    pub generation: u64,
    /// The size of a block in bytes.
    pub block_bytes: usize,
    /// The number of optimizer slots of the variable that has most.
    pub slots: usize,
    /// Whether blocks and push bodies have checksums.
    pub integrity: bool,
    /// The number of push slots in the inbox.
    pub push_slots: usize,
}

/// The part of a variable that a shard holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VariableReport {
    /// The number of rows on this shard; `None` if the variable is not a growing table, and 0 if
    /// the rows cannot be read.
    pub table_rows: Option<u64>,
    /// The name.
    pub name: String,
    /// The type of the elements.
    pub dtype: DType,
    /// The shape of the whole variable.
    pub shape: Shape,
    /// Whether the optimizer trains it.
    pub trainable: bool,
    /// Whose values replicas use.
    pub replication: Replication,
    /// The row ranges on this shard.
    pub partitions: Vec<std::ops::Range<u64>>,
    /// The stored size in bytes. `f16` and `bf16` are stored as `f32`.
    pub bytes: u64,
}

/// The declared data set and the position in it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataReport {
    /// The data set.
    pub set: DataSet,
    /// The number of batches, of all epochs, that were granted or reserved at least once.
    pub begun: u64,
    /// The number of those that will be granted again.
    pub free: usize,
    /// The number of those that tokens hold.
    pub held: usize,
}

/// The effects of a coordinator that have settled on a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CoordinatorReport {
    /// The coordinator's name.
    pub name: String,
    /// The id of the coordinator, under which its effects are numbered.
    pub coordinator: CoordinatorId,
    /// The newest epoch.
    pub epoch: CoordinatorEpoch,
    /// The settled effects.
    pub window: EffectWindow,
}

/// A client of a shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientReport {
    /// The client's task.
    pub task: TaskId,
    /// The client epoch.
    pub epoch: u64,
    /// The incarnation.
    pub incarnation: Incarnation,
    /// The membership.
    pub presence: Presence,
    /// The sequence number of the newest settled push; 0 if there is none.
    pub newest: u64,
    /// The number of outcomes in the push window.
    pub settled: usize,
    /// The tokens that the client holds.
    pub tokens: Vec<u64>,
}

/// A complete push in the inbox that is not applied yet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompletePush {
    /// The push slot.
    pub push_slot: u32,
    /// The client; `None` if a newer incarnation of it has joined since.
    pub client: Option<TaskId>,
    /// The sequence number of the push.
    pub sequence: u64,
    /// `gradient`, `assign` or `assign_add`.
    pub operation: &'static str,
    /// The token that the push spends; 0 for none.
    pub token: u64,
    /// The size in bytes.
    pub bytes: u64,
}

/// The verdict on a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Everything in use is covered by checksums, and they are correct.
    Sound,
    /// The first page and the length are correct. The contents have no checksums.
    Unchecked,
    /// No committed word names the file, or it was never complete: a process was killed while it
    /// created or removed the file.
    Unused,
    /// The file is intact, and of another format: an older or a newer server has written it.
    OtherFormat {
        /// Its format.
        found: u32,
        /// The format that this version reads.
        format: u32,
    },
    /// The file is missing.
    Missing,
    /// The file deviates from its expected contents.
    Fault {
        /// The byte offset.
        offset: u64,
        /// The expected contents.
        expected: String,
    },
}

impl Verdict {
    /// Returns whether the file is neither missing nor faulty, and can be read.
    pub fn is_sound(&self) -> bool {
        !matches!(self, Verdict::Missing | Verdict::Fault { .. } | Verdict::OtherFormat { .. })
    }
}

/// A file of a shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// The name.
    pub name: String,
    /// The length in bytes; 0 if the file is missing.
    pub bytes: u64,
    /// The verdict on the file.
    pub verdict: Verdict,
}
