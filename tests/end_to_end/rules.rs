//! Optimizers and learning rates per variable, on whole clusters.

use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::Worker;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::checkpoint::{contents, export, list};
use pushpull::optim::{Adagrad, Ftrl, Optimizer};
use pushpull::protocol::Refusal;
use pushpull::variable::Partitioner;
use pushpull::{
    Adam, Error, Params, Ps, PsConfig, Sgd, Storage, TaskId, VariableSpec, WorkerConfig,
};
use safetensors::SafeTensors;

use crate::cluster::{TestCluster, block_on, spec, vector};

/// An embedding and a matrix in `parts` partitions, and a bias.
fn variables(parts: u32) -> Vec<VariableSpec> {
    let cut = Partitioner::Fixed { shards: parts };
    vec![
        VariableSpec::f32("embedding/w", [31, 4]).unwrap().partitioner(cut.clone()),
        VariableSpec::f32("dense/w", [21, 5]).unwrap().partitioner(cut),
        vector("dense/bias", 5),
    ]
}

/// Sets Adagrad for the embedding and half the rate for the bias. The default is Adam at 0.25.
fn with_two_optimizers(config: PsConfig) -> PsConfig {
    config.optimizer_for("embedding/*", Adagrad::new(0.5)).rate_for("dense/b*", 0.5)
}

/// Trains these steps, each with different gradients, and returns the values.
fn train(
    worker: &mut Worker,
    params: &mut Params,
    variables: &[VariableSpec],
    steps: std::ops::Range<u64>,
) -> Vec<Vec<f32>> {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for variable in variables {
            let gradient = gradients.view_mut::<f32>(variable.name()).unwrap();
            for (index, value) in gradient.iter_mut().enumerate() {
                *value = ((index as f32 + 1.0) * (step as f32 + 0.5)).sin();
            }
        }
        worker.push(token, gradients).unwrap();
    }
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let view = |variable: &VariableSpec| params.view::<f32>(variable.name()).unwrap().to_vec();
    variables.iter().map(view).collect()
}

/// Returns the values of a variable after `steps` steps on a cluster with one optimizer and no
/// other variable.
fn trained_alone(variable: VariableSpec, rule: impl Optimizer + Clone, steps: u64) -> Vec<f32> {
    let cluster = TestCluster::start(1, 1, rule, |config| config);
    let mut worker = cluster.worker(0);
    let variables = [variable];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    let values = train(&mut worker, &mut params, &variables, 0..steps).remove(0);
    cluster.stop();
    values
}

/// Returns the values of all variables after `steps` steps, each with its own optimizer and rate.
fn expected(steps: u64) -> Vec<Vec<f32>> {
    let [embedding, dense, bias] = variables(1).try_into().unwrap();
    vec![
        trained_alone(embedding, Adagrad::new(0.5), steps),
        trained_alone(dense, Adam::new(0.25), steps),
        trained_alone(bias, Adam::new(0.125), steps),
    ]
}

#[test]
fn each_variable_has_its_own_optimizer_on_any_number_of_shards() {
    let expected = expected(6);
    for (ps, shards, parts) in [(1, 1, 1), (1, 2, 3), (2, 2, 4)] {
        let configure = |config: PsConfig| with_two_optimizers(config).shards(shards);
        let cluster = TestCluster::start(ps, 1, Adam::new(0.25), configure);
        let mut worker = cluster.worker(0);
        let variables = variables(parts);
        let mut params = worker.join(&variables, |_| ()).unwrap();
        let values = train(&mut worker, &mut params, &variables, 0..6);
        assert!(values == expected, "{ps} tasks of {shards} shards");
        cluster.stop();
    }
}

/// Configures a server on a Unix socket with a state directory.
fn config(folder: &Path) -> PsConfig {
    let cluster = spec([format!("unix:{}", folder.join("ps.sock").display())], 1);
    let storage = Storage::directory(folder.join("state")).bytes_max(1 << 26);
    PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.25)).shards(2).storage(storage)
}

fn serve(folder: &Path, config: PsConfig) -> Result<Ps, pushpull::error::StartError> {
    let address = format!("unix:{}", folder.join("ps.sock").display());
    block_on(Ps::listen(&address)).unwrap().start(config)
}

#[test]
fn state_is_refused_with_other_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ps = serve(folder, with_two_optimizers(config(folder))).unwrap();
    let cluster = spec([format!("unix:{}", folder.join("ps.sock").display())], 1);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    let variables = variables(2);
    let mut params = worker.join(&variables, |_| ()).unwrap();
    train(&mut worker, &mut params, &variables, 0..3);
    block_on(ps.serve(async {})).unwrap();
    let refused = |config: PsConfig| serve(folder, config).unwrap_err().to_string();
    let other = config(folder).optimizer_for("embedding/*", Sgd::new(0.5));
    let said = "whose optimizer_for is \"\\\"embedding/*\\\": adagrad\", and this one's is \
                \"\\\"embedding/*\\\": sgd\"";
    assert!(refused(other).contains(said));
    let unknown = refused(with_two_optimizers(config(folder)).rate_for("dens/*", 0.5));
    assert!(unknown.contains("cannot train \"dens/*\" as configured"), "{unknown}");
    let ps = serve(folder, with_two_optimizers(config(folder))).unwrap();
    assert!(train(&mut worker, &mut params, &variables, 3..6) == expected(6));
    drop((worker, ps));
}

#[test]
fn a_checkpoint_has_the_slots_of_each_optimizer_and_fits_other_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let storage = || LocalDirectory::create(&directory).unwrap();
    let start = |ps, optimizer: Adam, configure: fn(PsConfig) -> PsConfig| {
        TestCluster::start(ps, 1, optimizer, |config| {
            configure(config).shards(2).checkpoints(Checkpoints::new(storage()))
        })
    };
    let first = start(2, Adam::new(0.25), with_two_optimizers);
    let mut worker = first.worker(0);
    let mut params = worker.join(&variables(3), |_| ()).unwrap();
    train(&mut worker, &mut params, &variables(3), 0..3);
    worker.save(b"").unwrap();
    first.stop();

    let file = folder.path().join("export");
    export(Arc::new(storage()), None, &file, true).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    let slots = ["dense/bias:m", "dense/bias:v", "dense/w", "dense/w:m", "dense/w:v"];
    let expected_names =
        [&["dense/bias"][..], &slots, &["embedding/w", "embedding/w:accumulator"]].concat();
    assert_eq!(names, expected_names);
    let summary = list(&storage()).unwrap().checkpoints.remove(0);
    assert_eq!(summary.optimizers, ["adagrad", "adam"]);
    let training = contents(Arc::new(storage()), &summary.name).unwrap().training;
    let kinds: Vec<String> = training.into_iter().map(|trained| trained.unwrap().0).collect();
    assert_eq!(kinds, ["adagrad", "adam", "adam"]);

    // A server with one optimizer for all variables refuses the checkpoint.
    let other = start(1, Adam::new(0.25), |config| config);
    let error = other.worker(0).join(&variables(1), |_| ()).unwrap_err().to_string();
    let said = format!(
        "cannot restore \"embedding/w\": the checkpoint {} has it trained by adagrad, not adam",
        summary.name
    );
    assert!(error.contains(&said), "{error}");
    other.stop();

    let expected = expected(6);
    for (ps, parts) in [(1, 1), (3, 4)] {
        let other = start(ps, Adam::new(0.25), with_two_optimizers);
        let mut worker = other.worker(0);
        let mut params = worker.join(&variables(parts), |_| panic!("already restored")).unwrap();
        assert_eq!(worker.restored().unwrap().step, 3);
        let values = train(&mut worker, &mut params, &variables(parts), 3..6);
        assert!(values == expected, "{ps} tasks, {parts} parts");
        other.stop();
    }
}

#[test]
fn untrainable_variables_are_refused_by_name() {
    type Configure = fn(PsConfig) -> PsConfig;
    let cases: [(Configure, &str, &str); 3] = [
        (|c| c.optimizer_for("emb*", Sgd::new(1.0)).rate_for("d*", 1.0), "d*", "named so"),
        (|c| c.optimizer_for("embeddings", Sgd::new(1.0)), "embeddings", "named so"),
        (|c| c.optimizer_for("*", Ftrl::new(1.0)).rate_for("emb*", 0.5), "embedding", "ftrl"),
    ];
    for (configure, expected, reason) in cases {
        let cluster = TestCluster::start(1, 1, Adam::new(0.25), configure);
        let error = cluster.worker(0).join(&[vector("embedding", 3)], |_| ()).unwrap_err();
        let Error::Refused { refusal, .. } = &error else { panic!("{error}") };
        let Refusal::Untrainable { variable, detail } = refusal else { panic!("{error}") };
        assert_eq!(variable.as_str(), expected);
        assert!(detail.as_str().contains(reason), "{error}");
        cluster.stop();
    }
}
