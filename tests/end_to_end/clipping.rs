//! Clipping by global norm on the servers of a synchronous cluster.

use pushpull::variable::{DType, Partitioner, Shape, TableSpec};
use pushpull::{Gradients, PsConfig, Push, Sgd, Synchronous, VariableSpec};

use crate::cluster::TestCluster;

/// Variables on every shard: f32 and f64, partitioned, sparse, and a table.
fn variables() -> [VariableSpec; 4] {
    let cut = Partitioner::Fixed { shards: 3 };
    let wide = VariableSpec::new("wide", DType::F64, Shape::new([3]).unwrap()).unwrap();
    let rows = VariableSpec::f32("rows", [10, 2]).unwrap().sparse().partitioner(cut.clone());
    let table = VariableSpec::table("table", DType::F32, [2], TableSpec::new(1 << 24)).unwrap();
    let table = table.partitioner(cut.clone());
    [VariableSpec::f32("parts", [7, 3]).unwrap().partitioner(cut), rows, wide, table]
}

/// Fills gradients with whole numbers, so that sums of their squares are exact in any order.
fn fill(gradients: &mut Gradients, worker: u32, step: u64) {
    let number =
        |index: usize| ((index as u64 * 7 + step + 3 * u64::from(worker)) % 5) as f32 - 2.0;
    for (index, value) in gradients.view_mut::<f32>("parts").unwrap().iter_mut().enumerate() {
        *value = number(index);
    }
    for (index, value) in gradients.view_mut::<f64>("wide").unwrap().iter_mut().enumerate() {
        *value = f64::from(number(index + 1));
    }
    let ids = [step % 10, u64::from(worker) + 3, 8];
    let rows: Vec<f32> = (0..6).map(number).collect();
    gradients.set_rows("rows", &ids, &rows).unwrap();
    gradients.set_rows("table", &ids, &rows).unwrap();
}

/// Returns all values after four steps of two workers, which apply `change` to each gradient before
/// they push it.
fn trained(
    configure: impl Fn(Synchronous) -> Synchronous,
    change: impl Fn(&mut Gradients),
) -> (Vec<f32>, Vec<f64>, [Vec<f32>; 2]) {
    let mode = configure(Synchronous::new(2));
    let configure = |config: PsConfig| config.mode(mode).shards(2);
    let cluster = TestCluster::start(2, 2, Sgd::new(0.5), configure);
    let join = |index| {
        let mut worker = cluster.worker(index);
        let params = worker.join(&variables(), |_| ()).unwrap();
        (worker, params)
    };
    let mut workers = [join(0), join(1)];
    for step in 0..4 {
        for (index, (worker, _)) in (0..).zip(&mut workers) {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            fill(&mut gradients, index, step);
            change(&mut gradients);
            assert_eq!(worker.push(token, gradients).unwrap(), Push::Accepted { step: step + 1 });
        }
    }
    let (worker, params) = &mut workers[0];
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let ids: Vec<u64> = (0..10).collect();
    let rows = ["rows", "table"].map(|name| {
        let mut rows = vec![0.0; 20];
        worker.pull_rows(&token, name, &ids, &mut rows).unwrap();
        rows
    });
    let parts = params.view::<f32>("parts").unwrap().to_vec();
    let values = (parts, params.view::<f64>("wide").unwrap().to_vec(), rows);
    cluster.stop();
    values
}

#[test]
fn clipping_on_servers_equals_clipping_on_workers() {
    const BOUND: f64 = 6.5;
    let by_servers = trained(|mode| mode.clip_by_global_norm(BOUND), |_| ());
    let by_workers = trained(
        |mode| mode,
        |gradients| {
            let norm = gradients.clip_by_global_norm(BOUND).unwrap();
            assert!(norm > BOUND, "{norm}");
        },
    );
    assert_eq!(by_servers, by_workers);
    let unclipped = trained(|mode| mode, |_| ());
    assert_ne!(by_servers, unclipped);
    let below_bound = trained(|mode| mode.clip_by_global_norm(1e6), |_| ());
    assert_eq!(below_bound, unclipped);
}
