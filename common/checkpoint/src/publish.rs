//! Saves, from the temporary folder to the rename that publishes a checkpoint.
//!
//! All files are written into a temporary folder; each is made durable and read back. The manifest
//! is written last. Then the folder is renamed. A crash before the rename leaves a folder that is
//! not a checkpoint, and does not affect earlier checkpoints.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};

use crate::error::CheckpointError;
use crate::files::{open_sized, write_whole};
use crate::manifest::{CATALOGUE, Contents, MANIFEST, Manifest};
use crate::name::CheckpointName;
use crate::restore::scan;
use crate::shard_file::ShardFile;
use crate::storage::CheckpointStorage;
use crate::table_file::TableFile;

/// A save in progress. A cluster has at most one; the step owner's task begins and publishes it.
/// Other processes may write the shards' files meanwhile.
///
/// If it is dropped without being published, its temporary folder stays until the next save removes
/// it.
#[derive(Debug)]
pub struct Save {
    storage: Arc<dyn CheckpointStorage>,
    name: CheckpointName,
}

/// A published checkpoint: every file of it was read back after it was written. Only this value
/// permits the deletion of older checkpoints.
#[derive(Debug)]
pub struct PublishedCheckpoint {
    name: CheckpointName,
}

impl PublishedCheckpoint {
    /// Returns the checkpoint's name.
    pub fn name(&self) -> CheckpointName {
        self.name
    }
}

impl Save {
    /// Begins a save of this step under a new name: none of the existing ones, and not `failed`,
    /// which has been removed.
    pub fn begin(
        storage: Arc<dyn CheckpointStorage>,
        epoch: RestoreEpoch,
        step: GlobalStep,
        failed: Option<CheckpointName>,
    ) -> Result<Save, CheckpointError> {
        let mut name = CheckpointName::new(epoch, step, 0);
        let folders = storage.list(None)?;
        let temporary: Vec<CheckpointName> =
            folders.iter().filter_map(|folder| CheckpointName::of_temporary(folder)).collect();
        let published = folders.iter().filter_map(|folder| folder.parse().ok());
        for other in published.chain(temporary.iter().copied()).chain(failed) {
            if name.is_same_step(&other) {
                name.revision = name.revision.max(other.revision.saturating_add(1));
            }
        }
        // An older save is over, or belongs to a step owner that has been replaced; without its
        // folder it fails, as it must. Newer folders are left alone.
        for stale in temporary.iter().filter(|other| **other < name) {
            storage.remove_folder(&stale.temporary())?;
        }
        storage.create_folder(&name.temporary())?;
        Ok(Save { storage, name })
    }

    /// Returns the name under which the shards write their files into this save.
    pub fn name(&self) -> CheckpointName {
        self.name
    }

    /// Publishes a checkpoint of the files that the shards have written.
    pub fn publish(
        self,
        catalogue: &Catalogue,
        contents: Contents,
    ) -> Result<PublishedCheckpoint, CheckpointError> {
        let storage = &*self.storage;
        let folder = self.name.temporary();
        let (firsts, _) = scan(storage, |manifest| manifest.first_saved_unix_ms)?;
        let first_saved = firsts.into_iter().min().unwrap_or(contents.saved_unix_ms);
        let manifest = Manifest::new(self.name, first_saved, catalogue, contents)?;
        manifest.check(&format!("{folder}/{MANIFEST}"))?;
        manifest.check_catalogue(catalogue)?;
        self.check_files(catalogue, &manifest)?;
        write_whole(storage, &folder, CATALOGUE, catalogue.encode())?;
        write_whole(storage, &folder, MANIFEST, &manifest.encode()?)?;
        storage.sync(Some(&folder))?;
        storage.rename_folder(&folder, &self.name.to_string())?;
        storage.sync(None)?;
        Ok(PublishedCheckpoint { name: self.name })
    }

    /// Checks that the shards' files exist and match the catalogue. The process that wrote a file
    /// has read all of it back, so the publisher does not read the model.
    fn check_files(
        &self,
        catalogue: &Catalogue,
        manifest: &Manifest,
    ) -> Result<(), CheckpointError> {
        let folder = self.name.temporary();
        for shard in &manifest.shards {
            let training = &manifest.training;
            let plan = ShardFile::plan(catalogue, shard.id(), training, self.name)?;
            plan.check_entry(&folder, &shard.file)?;
            plan.check_head(&folder, &*open_sized(&*self.storage, &folder, &shard.file)?)?;
            for entry in &shard.tables {
                let partition = &catalogue.partitions()[entry.partition as usize];
                let plan = TableFile::plan(catalogue, partition, training, entry.rows, self.name)?;
                plan.check_entry(&folder, &entry.file)?;
                plan.check_head(&folder, &*open_sized(&*self.storage, &folder, &entry.file)?)?;
            }
        }
        Ok(())
    }
}
