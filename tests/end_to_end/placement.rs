//! The default placement: large variables are cut, optimizers that need whole ones get them so, and
//! the operator hears of an uneven placement.

use std::sync::{Arc, Mutex};

use pushpull::blocking::Worker;
use pushpull::cluster::PlacementStrategy;
use pushpull::optim::Lamb;
use pushpull::variable::Partitioner;
use pushpull::{Error, Params, PsConfig, Push, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::cluster::TestCluster;

/// Weights and biases of a network 784-1024-10: 99.9 % of the bytes are of two variables, 99 % of
/// one.
fn network() -> Vec<VariableSpec> {
    let shapes: [(&str, &[u64]); 4] =
        [("w0", &[784, 1024]), ("b0", &[1024]), ("w1", &[1024, 10]), ("b1", &[10])];
    shapes.map(|(name, extents)| VariableSpec::f32(name, extents).unwrap()).into()
}

/// Takes one step in which every element falls by its index.
fn step(worker: &mut Worker, params: &mut Params) {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let mut gradients = worker.gradients();
    for variable in network() {
        let gradient = gradients.view_mut::<f32>(variable.name()).unwrap();
        gradient.iter_mut().zip(0..).for_each(|(g, index)| *g = index as f32);
    }
    assert!(matches!(worker.push(token, gradients), Ok(Push::Applied { .. })));
}

#[test]
fn a_network_is_balanced_by_default_and_trains_as_one() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&network(), |_| ()).unwrap();
    let placement = worker.placement().unwrap();
    assert_eq!(placement.strategy(), "balanced");
    assert!(placement.skew() <= 1.1, "{}", placement.table());
    step(&mut worker, &mut params);
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    for variable in network() {
        let values = params.view::<f32>(variable.name()).unwrap();
        assert!(values.iter().zip(0..).all(|(&value, index)| value == -(index as f32)));
    }
    drop((token, worker));
    cluster.stop();
}

#[test]
fn optimizers_that_need_whole_variables_get_them() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| {
        config.optimizer_for("w0", Lamb::new(0.1))
    });
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&network(), |_| ()).unwrap();
    assert_eq!(worker.placement().unwrap().partitions().len(), 4);
    step(&mut worker, &mut params);
    worker.leave().unwrap();
    // A partitioner that is given is kept, and then refused with the variable's name.
    let mut cut = network();
    cut[0].partitioner = Partitioner::Fixed { shards: 2 };
    let cluster_of_two = TestCluster::start(2, 1, Lamb::new(0.1), |config| config);
    let error = cluster_of_two.worker(0).join(&cut, |_| ()).unwrap_err();
    assert!(error.to_string().contains("w0"), "{error}");
    cluster_of_two.stop();
    cluster.stop();
}

#[test]
fn an_uneven_placement_is_an_event_of_the_step_owner() {
    for (strategy, is_uneven) in
        [(PlacementStrategy::RoundRobin, true), (PlacementStrategy::default(), false)]
    {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = events.clone();
        let cluster = TestCluster::start(2, 1, Sgd::new(1.0), move |config: PsConfig| {
            let events = sink.clone();
            config.shards(2).on_event(move |event| {
                if event.kind() == "skewed-placement" {
                    events.lock().unwrap().push(event.to_string());
                }
            })
        });
        let config = WorkerConfig::new(cluster.spec.clone(), TaskId::worker(0)).placement(strategy);
        let mut worker = Worker::connect(config).unwrap();
        worker.join(&network(), |_| ()).unwrap();
        let skewed: u64 =
            cluster.servers.iter().map(|ps| ps.handle().metrics().skewed_placements).sum();
        let events = events.lock().unwrap().clone();
        assert_eq!((skewed, events.len()), (u64::from(is_uneven), usize::from(is_uneven)));
        if let Some(text) = events.first() {
            assert!(text.contains("ps task 0 holds") && text.contains("\"w0\""), "{text}");
        }
        assert_eq!(worker.placement().unwrap().task_loads().is_skewed(), is_uneven);
        drop(worker);
        cluster.stop();
    }
}

/// Workers that place differently are told so.
#[test]
fn another_strategy_is_refused_with_the_difference() {
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| config);
    let mut chief = cluster.worker(0);
    chief.join(&network(), |_| ()).unwrap();
    let config = WorkerConfig::new(cluster.spec.clone(), TaskId::worker(1))
        .placement(PlacementStrategy::RoundRobin);
    let mut other = Worker::connect(config).unwrap();
    let error = other.join(&network(), |_| ()).unwrap_err();
    assert!(
        matches!(error, Error::Differs { .. }) && error.to_string().contains("rows"),
        "{error}"
    );
    drop((chief, other));
    cluster.stop();
}
