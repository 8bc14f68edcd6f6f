//! Checkpoints of rings that servers continue, and of servers that a ring continues.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::{Ring, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory, Retention, export};
use pushpull::collective::{Launch, RingConfig, RingTrainer, RingTrainerConfig};
use pushpull::optim::{Adam, Optimizer};
use pushpull::variable::{DType, Partitioner, Shape, bf16};
use pushpull::worker::DataSet;
use pushpull::{Gradients, Sgd, VariableSpec};
use safetensors::SafeTensors;

use crate::cluster::{TestCluster, block_on, vector};

/// Servers cut the matrix, a ring does not.
fn variables() -> Vec<VariableSpec> {
    let half = VariableSpec::new("half", DType::Bf16, Shape::new([9]).unwrap()).unwrap();
    vec![
        VariableSpec::f32("matrix", [37, 11])
            .unwrap()
            .partitioner(Partitioner::Fixed { shards: 3 }),
        vector("bias", 5),
        half,
        VariableSpec::f32("count", [3]).unwrap().plain(),
    ]
}

/// Fills the gradients of a step, the same on every rank and worker.
fn fill(gradients: &mut Gradients, step: u64) {
    for name in ["matrix", "bias"] {
        let gradient = gradients.view_mut::<f32>(name).unwrap();
        for (index, value) in gradient.iter_mut().enumerate() {
            *value = ((index as f32 + 1.0) * (step as f32 + 0.5)).sin();
        }
    }
    gradients.view_mut::<bf16>("half").unwrap().fill(bf16::from_f32(0.25 * step as f32));
}

/// Trains on servers up to this step, and saves.
fn train_servers(directory: &Path, rule: impl Optimizer + Clone, from: u64, to: u64) {
    let cluster = TestCluster::start(2, 1, rule, |config| {
        let storage = LocalDirectory::create(directory).unwrap();
        config.shards(2).checkpoints(Checkpoints::new(storage))
    });
    let mut worker: Worker = cluster.worker(0);
    let params = worker.join(&variables(), |_| ()).unwrap();
    assert_eq!(params.step(), from);
    if from == 0 {
        worker.assign_add("count", &[1.0_f32, 2.0, 3.0]).unwrap();
    }
    for step in from..to {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        fill(&mut gradients, step);
        worker.push(token, gradients).unwrap();
    }
    assert_eq!(worker.save(b"").unwrap().step, to);
    worker.leave().unwrap();
    cluster.stop();
}

/// Trains on a ring of two ranks up to this step, and saves.
fn train_ring(directory: &Path, rule: impl Optimizer + Clone, from: u64, to: u64) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let config = RingConfig::new(Launch::new(rank, 2).unwrap()).rendezvous(&address);
            let rule = rule.clone();
            scope.spawn(move || {
                let ring = Ring::join(config).unwrap().into_inner();
                let storage = Arc::new(LocalDirectory::create(directory).unwrap());
                let config = RingTrainerConfig::new(rule).variables(variables());
                let config = config.checkpoints(storage, Retention::default());
                block_on(async {
                    let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
                    assert_eq!(trainer.global_step(), from);
                    for step in from..to {
                        fill(trainer.parts().1, step);
                        trainer.apply().await.unwrap();
                    }
                    trainer.save(b"").unwrap();
                    trainer.leave().await;
                });
            });
        }
    });
}

/// Exports the newest checkpoint. Returns the bytes of its values and slots by name.
pub(crate) fn exported(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = directory.with_extension("safetensors");
    let storage = Arc::new(LocalDirectory::create(directory).unwrap());
    export(storage, None, &file, true).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

#[test]
fn servers_and_rings_continue_each_others_checkpoints_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let servers = folder.path().join("servers");
    let mixed = folder.path().join("mixed");
    for directory in [&servers, &mixed] {
        train_servers(directory, Adam::new(0.25), 0, 4);
    }
    train_servers(&servers, Adam::new(0.25), 4, 8);
    train_ring(&mixed, Adam::new(0.25), 4, 8);
    let of_servers = exported(&servers);
    assert_eq!(of_servers.len(), 10, "{:?}", of_servers.keys());
    assert!(exported(&mixed) == of_servers, "a ring continues a checkpoint of servers");
    train_servers(&servers, Adam::new(0.25), 8, 11);
    train_servers(&mixed, Adam::new(0.25), 8, 11);
    assert!(exported(&mixed) == exported(&servers), "servers continue a checkpoint of a ring");
}

#[test]
fn a_checkpoint_with_granted_data_is_refused_by_a_ring() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("servers");
    let cluster = TestCluster::sgd(1, |config| {
        let storage = LocalDirectory::create(&directory).unwrap();
        config.checkpoints(Checkpoints::new(storage))
    });
    let set = DataSet::new("images", 100, 10).unwrap();
    let mut worker = Worker::connect(cluster.config(0).data(set)).unwrap();
    let _ = worker.join(&variables(), |_| ()).unwrap();
    worker.save(b"").unwrap();
    worker.leave().unwrap();
    cluster.stop();
    let ring = Ring::join(RingConfig::new(Launch::new(0, 1).unwrap())).unwrap().into_inner();
    let storage = Arc::new(LocalDirectory::create(&directory).unwrap());
    let config = RingTrainerConfig::new(Sgd::new(1.0)).variables(variables());
    let config = config.checkpoints(storage, Retention::default());
    let error = block_on(RingTrainer::start(ring, config, |_| ())).unwrap_err().to_string();
    assert!(error.contains("a ring grants no samples"), "{error}");
}
