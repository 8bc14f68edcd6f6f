//! What a checkpoint holds, for people: every byte of it is read.

use std::sync::Arc;

use pushpull_common::ids::VariableId;
use pushpull_common::variable::VariableSpec;

use super::error::CheckpointError;
use super::restore::Opened;
use super::storage::CheckpointStorage;

/// What a sound checkpoint holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckpointContents {
    /// Its variables, in the order they were declared.
    pub variables: Vec<VariableSpec>,
    /// How many parts they are cut into.
    pub partitions: usize,
    /// Of each variable the kind of the optimizer that trains it, if one does, and the names of its
    /// slots.
    pub training: Vec<Option<(String, Vec<String>)>>,
    /// The clients whose pushes it remembers, each once: job and index.
    pub clients: Vec<(String, u32)>,
}

/// Reads and verifies a checkpoint, and says what it holds. Costs reading all of it.
///
/// # Errors
/// If there is none of this name, or a byte of it is not what it must be.
pub fn contents(
    storage: Arc<dyn CheckpointStorage>,
    name: &str,
) -> Result<CheckpointContents, CheckpointError> {
    let not_found = || CheckpointError::NotFound { name: name.to_owned() };
    let mut opened = Opened::open(storage, name.parse().map_err(|_| not_found())?)?;
    opened.verify()?;
    let (manifest, catalogue) = (opened.manifest(), opened.catalogue());
    let clients = manifest.shards.iter().flat_map(|shard| &shard.clients);
    let mut clients: Vec<(String, u32)> =
        clients.map(|client| (client.job.clone(), client.index)).collect();
    clients.sort();
    clients.dedup();
    let trained = |index: usize| {
        let optimizer = manifest.training.optimizer(VariableId(index as u32))?;
        Some((optimizer.kind.clone(), optimizer.slots.clone()))
    };
    Ok(CheckpointContents {
        variables: catalogue.variables().to_vec(),
        partitions: catalogue.partitions().len(),
        training: (0..catalogue.variables().len()).map(trained).collect(),
        clients,
    })
}
