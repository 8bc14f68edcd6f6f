//! What a look into a state directory finds.

use std::path::PathBuf;

use pushpull_common::ids::{GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::tensor::{DType, Shape};

/// What a state directory holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The directory.
    pub path: PathBuf,
    /// Whether a server holds its lock.
    pub live: bool,
    /// If the last checkpoint that the server has tried to save was not saved: what it has noted of that. Says
    /// nothing about the state.
    pub saves_failing: Option<SavesFailing>,
    /// Its shards, in order.
    pub shards: Vec<ShardInspection>,
}

impl Inspection {
    /// Whether every file is what it must be, and no shard is poisoned.
    pub fn is_sound(&self) -> bool {
        self.shards.iter().all(|shard| {
            // Once the machine was started anew, what is on the disk decides.
            let decides = shard.arena.as_ref().is_some_and(|arena| !arena.this_boot);
            let sound = shard.files.iter().all(|file| file.verdict.is_sound());
            sound && (decides || shard.poisoned.is_none())
        })
    }
}

/// Saves of checkpoints that have failed, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavesFailing {
    /// How many.
    pub in_a_row: u64,
    /// Why the last has failed.
    pub cause: String,
}

/// The arena of one shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardInspection {
    /// Its folder.
    pub path: PathBuf,
    /// Whose it is; `None` if the first page of its control file does not say.
    pub arena: Option<ArenaIs>,
    /// Why a flush has failed, if one has: no server of that boot opens the arena again.
    pub poisoned: Option<String>,
    /// What the shard remembers; `None` if that cannot be read.
    pub state: Option<ShardState>,
    /// Its variables; empty if there are none or they cannot be read.
    pub variables: Vec<VariableIs>,
    /// The clients it knows.
    pub clients: Vec<ClientIs>,
    /// The pushes that lie whole in its inbox, in the order they came.
    pub whole: Vec<WholePushIs>,
    /// The words of a commit that was made and is not done.
    pub committed_words: Option<usize>,
    /// The rows that were kept for a change that was not committed.
    pub prepared_rows: Option<usize>,
    /// The number of the newest durable image, if the server keeps such.
    pub newest_image: Option<u64>,
    /// The files.
    pub files: Vec<FileIs>,
}

/// What the first page of the control file says.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaIs {
    /// The format of the files.
    pub format: u32,
    /// The shard.
    pub shard: ShardId,
    /// Drawn when the arena was made.
    pub arena: u64,
    /// The boot of the machine that it was made or last put right under.
    pub boot: [u8; 16],
    /// Whether that is this boot.
    pub this_boot: bool,
    /// What must agree with the configuration: names and values.
    pub identity: Vec<(String, String)>,
}

/// How far the variables of a shard are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariablesAre {
    /// Nobody has declared any.
    Absent,
    /// They have their places.
    Declared,
    /// They have their values.
    Ready,
}

/// What a shard remembers of itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardState {
    /// How far its variables are.
    pub variables: VariablesAre,
    /// Pushes applied, of every kind.
    pub version: u64,
    /// Gradients applied.
    pub gradients: u64,
    /// The global step; 0 on shards that do not own it.
    pub step: GlobalStep,
    /// Whether training has ended.
    pub finished: bool,
    /// The restore epoch, and the step that it began at.
    pub restore_epoch: RestoreEpoch,
    /// The step that the restore epoch began at.
    pub restored_step: GlobalStep,
    /// How many processes have opened the arena.
    pub lives: u64,
    /// How many declarations of variables there were.
    pub generation: u64,
    /// The bytes of a block.
    pub block_bytes: usize,
    /// The slots of each variable.
    pub slots: usize,
    /// Whether blocks and bodies have checksums.
    pub integrity: bool,
    /// The rooms of the inbox.
    pub push_slots: usize,
}

/// A variable, as far as this shard holds it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VariableIs {
    /// If it is a table that grows, how many rows the shard has of it; 0 if they cannot be read.
    pub table_rows: Option<u64>,
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its whole shape.
    pub shape: Shape,
    /// Whether the optimizer trains it.
    pub trainable: bool,
    /// The rows that are here.
    pub partitions: Vec<std::ops::Range<u64>>,
    /// Their bytes, as they are kept: those of `f16` and `bf16` in `f32`.
    pub bytes: u64,
}

/// Where a client stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// It has joined.
    Present,
    /// It has left.
    Left,
    /// Its lease ran out.
    Lost,
}

/// A client.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientIs {
    /// Its task.
    pub task: TaskId,
    /// Its epoch.
    pub epoch: u64,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Where it stands.
    pub presence: Presence,
    /// The newest push that is settled; 0 if none is.
    pub newest: u64,
    /// How many outcomes are remembered.
    pub settled: usize,
    /// The tokens it holds.
    pub tokens: Vec<u64>,
}

/// A push that lies whole in the inbox and is not applied yet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WholePushIs {
    /// Its room.
    pub push_slot: u32,
    /// Whose it is; `None` if its client has started anew since.
    pub client: Option<TaskId>,
    /// Its number.
    pub sequence: u64,
    /// `gradient`, `assign` or `assign_add`.
    pub operation: &'static str,
    /// The token it spends; 0 for none.
    pub token: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// All that is in use is covered by checksums, and they are right.
    Sound,
    /// Its first page and its length are right; what lies behind has no checksums.
    Unchecked,
    /// Nothing names it, or it was never whole: a process was killed while it made or removed it.
    Unused,
    /// It is not there, and must be.
    Missing,
    /// It is not what it must be.
    Fault {
        /// Where.
        offset: u64,
        /// What must be there.
        expected: String,
    },
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        !matches!(self, Verdict::Missing | Verdict::Fault { .. })
    }
}

/// A file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileIs {
    /// Its name.
    pub name: String,
    /// Its length; 0 if it is missing.
    pub bytes: u64,
    /// What is known of it.
    pub verdict: Verdict,
}
