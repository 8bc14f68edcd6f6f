//! The save of a shard's part of a checkpoint. Another thread, which may wait for a disk, does the
//! work.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pushpull_checkpoint::{
    AbandonFlag, CheckpointError, CheckpointFault, CheckpointName, CheckpointStorage,
    CheckpointTraining, ClientWindow, DataEntry, SavedCoordinator, ShardEntry, TableEntry,
    write_shard, write_table,
};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, ShardId, TaskId};
use pushpull_common::protocol::Envelope;
use pushpull_store::store::StoreImage;

use crate::checkpoint_source::{ImageSource, TableImageSource};

/// The values of a shard at one moment, pinned, with its counts.
#[derive(Debug)]
pub(crate) struct CheckpointCut {
    /// The global step, as the shard knew it.
    pub(in crate::shard) step: GlobalStep,
    pub(in crate::shard) image: StoreImage,
    /// Set when the memory that the cut pins is needed.
    pub(in crate::shard) memory_needed: Arc<AtomicBool>,
    pub(in crate::shard) version: u64,
    pub(in crate::shard) gradients: u64,
    pub(in crate::shard) clients: Vec<ClientWindow>,
    /// The data position at that moment, on the step owner.
    pub(in crate::shard) data: Option<DataEntry>,
    /// The effects that have counted in the values, by coordinator.
    pub(in crate::shard) coordinators: Vec<SavedCoordinator>,
    pub(in crate::shard) since: Instant,
}

/// The work of writing a shard's part of a checkpoint.
#[derive(Debug)]
pub(crate) struct ShardSave {
    pub(crate) connection: u64,
    pub(crate) request: Envelope,
    pub(in crate::shard) name: CheckpointName,
    pub(in crate::shard) catalogue: Arc<Catalogue>,
    pub(in crate::shard) shard: ShardId,
    /// The task that has asked for the part.
    pub(in crate::shard) step_owner: TaskId,
    pub(in crate::shard) training: CheckpointTraining,
    pub(in crate::shard) cut: CheckpointCut,
    pub(in crate::shard) abandon_flag: AbandonFlag,
}

impl ShardSave {
    /// Writes the part, and reads it back. May wait for a disk. Returns the shard's entry for the
    /// manifest.
    pub(crate) fn run(
        self,
        storage: Arc<dyn CheckpointStorage>,
    ) -> Result<Vec<u8>, CheckpointFault> {
        let storage = &*self.abandon_flag.watch(storage);
        let catalogue = &*self.catalogue;
        let shard = self.shard;
        let training = &self.training;
        let CheckpointCut { mut image, version, gradients, clients, data, coordinators, .. } =
            self.cut;
        let tables = std::mem::take(&mut image.tables);
        let image = ImageSource(image);
        let file = write_shard(storage, self.name, catalogue, shard, training, image);
        let file = file.map_err(|error| part_fault(&self.step_owner, error))?;
        let layout = catalogue.layout(shard);
        let tables = layout.tables().iter().zip(tables).map(|(partition, source)| {
            let source = TableImageSource(source);
            write_table(storage, self.name, catalogue, partition, training, source)
        });
        let tables: Result<Vec<TableEntry>, CheckpointError> = tables.collect();
        let entry = ShardEntry {
            task: shard.task,
            shard: shard.shard,
            file,
            tables: tables?,
            version,
            gradients,
            clients,
            data,
            coordinators,
        };
        serde_json::to_vec(&entry).map_err(|error| CheckpointFault::Storage(error.to_string()))
    }
}

/// Returns the fault of a part that was not written. The step owner has created the folder before it
/// asked for the part: if there is none here, the two tasks have different directories.
fn part_fault(step_owner: &TaskId, error: CheckpointError) -> CheckpointFault {
    match &error {
        CheckpointError::Storage(fault) if fault.is_not_found() => CheckpointFault::Unfit(format!(
            "{}; {step_owner} has created this folder in another directory: all ps tasks \
                 need one (--checkpoint-dir)",
            Chain(&error)
        )),
        _ => error.into(),
    }
}
