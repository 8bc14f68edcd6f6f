//! What tests of the server need of checkpoints, and the names that both crates must agree on.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use pushpull_checkpoint::{
    CheckpointError, CheckpointSource, CheckpointStorage, CheckpointTraining, Contents,
    LocalDirectory, Save, ShardEntry, export, write_shard,
};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{OptimizerRules, Sgd};
use pushpull_store::arena::{StateDirectory, file_name};
use pushpull_store::layout::Kind;

pub(crate) mod gate;

/// Returns the training of all trainable variables by SGD.
pub(crate) fn by_sgd(catalogue: &Catalogue) -> CheckpointTraining {
    let rules = OptimizerRules::new(Arc::new(Sgd::new(1.0)));
    CheckpointTraining::new(catalogue, &rules.of_variables(catalogue))
}

/// Values that are all zero.
#[derive(Debug)]
struct Zeros;

impl CheckpointSource for Zeros {
    fn read(
        &mut self,
        _stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        out(&vec![0; (range.end - range.start) as usize])
    }
}

/// Saves the checkpoint `ckpt-1-9` of a variable on two tasks.
pub(crate) fn save_of_two_tasks(folder: &Path) -> (Arc<dyn CheckpointStorage>, Arc<Catalogue>) {
    let storage: Arc<dyn CheckpointStorage> = Arc::new(LocalDirectory::create(folder).unwrap());
    let cut = Partitioner::Fixed { shards: 2 };
    let variables = vec![VariableSpec::f32("w", [11, 3]).unwrap().partitioner(cut)];
    let map = ShardMap::new([0, 1], 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    let catalogue = Catalogue::new(variables, &placement).unwrap();
    let training = by_sgd(&catalogue);
    let save = Save::begin(storage.clone(), RestoreEpoch(1), GlobalStep(9), None).unwrap();
    let shards = catalogue.shards().map(|id| {
        let file = write_shard(&*storage, save.name(), &catalogue, id, &training, Zeros).unwrap();
        ShardEntry {
            task: id.task,
            shard: id.shard,
            file,
            tables: Vec::new(),
            version: 9,
            gradients: 9,
            clients: Vec::new(),
            data: None,
            coordinators: Vec::new(),
        }
    });
    let shards: Vec<ShardEntry> = shards.collect();
    assert_eq!(shards.len(), 2);
    let contents = Contents { saved_unix_ms: 9_000, training, shards, user: Vec::new() };
    save.publish(&catalogue, contents).unwrap();
    (storage, Arc::new(catalogue))
}

/// The checkpoint format knows a state directory by the names that the store gives.
#[test]
fn an_export_into_the_state_of_a_server_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().canonicalize().unwrap();
    let (storage, _) = save_of_two_tasks(&path.join("saved"));
    let state = path.join("state");
    StateDirectory::open(&state).unwrap().shard(0).unwrap();
    let shard = state.join("shard-0");
    let control = shard.join(file_name(Kind::Control, 0));
    std::fs::write(&control, "").unwrap();
    for (to, folder) in [(&control, &shard), (&state.join("new.safetensors"), &state)] {
        let error = Chain(&export(storage.clone(), None, to, false).unwrap_err()).to_string();
        let expected = format!("{} is the state directory of a server", folder.display());
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn a_state_directory_with_a_scheme_is_refused() {
    let error = Chain(&crate::inspect("hdfs://name/state").unwrap_err()).to_string();
    assert!(error.contains("the scheme \"hdfs\" of"), "{error}");
}
