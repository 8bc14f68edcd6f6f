//! Reads the contents of a checkpoint for display; every byte of it is verified.

use std::sync::Arc;

use pushpull_common::ids::VariableId;
use pushpull_common::variable::VariableSpec;

use crate::error::CheckpointError;
use crate::restore::Opened;
use crate::storage::CheckpointStorage;

/// The contents of a valid checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckpointContents {
    /// The variables, in the order of their declaration.
    pub variables: Vec<VariableSpec>,
    /// The number of partitions of all variables.
    pub partitions: usize,
    /// For each variable, the kind of its optimizer and the names of its slots; `None` if it is not
    /// trained.
    pub training: Vec<Option<(String, Vec<String>)>>,
    /// The clients whose pushes the checkpoint remembers, each once: job and index.
    pub clients: Vec<(String, u32)>,
}

/// Reads and verifies a checkpoint, and returns its contents. The whole checkpoint is read.
///
/// # Errors
/// If there is no checkpoint of this name, or any byte of it is wrong.
pub fn contents(
    storage: Arc<dyn CheckpointStorage>,
    name: &str,
) -> Result<CheckpointContents, CheckpointError> {
    let not_found = || CheckpointError::NotFound { name: name.to_owned() };
    let mut opened = Opened::open(storage, name.parse().map_err(|_| not_found())?)?;
    opened.verify()?;
    let manifest = opened.manifest();
    let catalogue = opened.catalogue();
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
