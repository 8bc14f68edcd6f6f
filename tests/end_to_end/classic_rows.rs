//! The recorded results of TensorFlow's `SparseConditionalAccumulator`, beside a synchronous step.

use std::collections::BTreeMap;

use pushpull::optim::SparseReduction;
use pushpull::{Sgd, Synchronous, VariableSpec};
use serde_json::{Value, json};

use super::cluster::TestCluster;

/// Values of rows by their index, without the rows of zeros.
type Rows = BTreeMap<u64, f32>;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn indices(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|index| index.as_u64().unwrap()).collect()
}

/// Returns a recorded result. Duplicate rows are summed, as an optimizer does that subtracts both.
fn recorded(rows: &Value) -> Rows {
    let mut summed = Rows::new();
    for (index, value) in indices(&rows[0]).into_iter().zip(numbers(&rows[1])) {
        *summed.entry(index).or_default() += value;
    }
    summed
}

/// Returns the gradient that a step makes of the pushes of a case.
fn reduced(case: &Value, reduction: SparseReduction) -> Rows {
    let pushes = case["push"].as_array().unwrap();
    assert_eq!(case["take"], pushes.len());
    let replicas = pushes.len() as u32;
    let mode = Synchronous::new(replicas).sparse_reduction(reduction);
    let cluster = TestCluster::start(1, pushes.len(), Sgd::new(1.0), |config| config.mode(mode));
    let table = [VariableSpec::f32("table", [10]).unwrap().sparse()];
    let mut workers: Vec<_> = (0..replicas).map(|index| cluster.worker(index)).collect();
    for worker in &mut workers {
        worker.join(&table, |_| ()).unwrap();
    }
    for (worker, push) in workers.iter_mut().zip(pushes) {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.set_rows("table", &indices(&push[0]), &numbers(&push[1])).unwrap();
        worker.push(token, gradients).unwrap();
    }
    let token = workers[0].token().unwrap().unwrap();
    let rows: Vec<u64> = (0..10).collect();
    let mut values = [0.0_f32; 10];
    workers[0].pull_rows(&token, "table", &rows, &mut values).unwrap();
    drop(token);
    cluster.stop();
    // The variable starts at 0, and the rate is 1.
    rows.into_iter().zip(values.map(|value| -value)).filter(|row| row.1 != 0.0).collect()
}

#[test]
fn the_cases_match_tensorflow_with_its_faults_corrected() {
    use SparseReduction::{ReplicaMean, RowMean, Sum};

    let text = include_str!("../../common/tests/vectors/semantics.json");
    let vectors: Value = serde_json::from_str(text).unwrap();
    let cases = vectors["accumulator_sparse"]["cases"].as_array().unwrap();
    let [sorted, unsorted, duplicates, empty] = &cases[..] else { panic!("four cases") };

    // With ascending indices, TensorFlow's mean is the mean over the pushes that contained a row.
    assert_eq!(reduced(sorted, RowMean), recorded(&sorted["out"]));
    assert_eq!(reduced(sorted, ReplicaMean), Rows::from([(0, 1.0), (2, 5.0), (3, 4.0)]));
    assert_eq!(reduced(sorted, Sum), Rows::from([(0, 2.0), (2, 10.0), (3, 8.0)]));

    // The same rows in another order. TensorFlow's merge misses row 2 and returns its two halves
    // undivided; an optimizer adds them up to twice the mean.
    assert_eq!(unsorted["out"], json!([[2, 0, 3, 2], [4, 2, 8, 6]]));
    assert_eq!(recorded(&unsorted["out"])[&2], 10.0);
    for reduction in [RowMean, ReplicaMean, Sum] {
        assert_eq!(reduced(unsorted, reduction), reduced(sorted, reduction));
    }

    // One push contains row 1 twice. TensorFlow keeps both, and an optimizer adds them up to 6; the
    // mean over two pushes is ((1 + 3) + 5) / 2.
    assert_eq!(recorded(&duplicates["out"]), Rows::from([(1, 6.0)]));
    assert_eq!(reduced(duplicates, RowMean), Rows::from([(1, 4.5)]));
    assert_eq!(reduced(duplicates, ReplicaMean), Rows::from([(1, 4.5)]));
    assert_eq!(reduced(duplicates, Sum), Rows::from([(1, 9.0)]));

    // An empty push counts as a push, but contained no row.
    assert_eq!(reduced(empty, RowMean), recorded(&empty["out"]));
    assert_eq!(reduced(empty, ReplicaMean), Rows::from([(7, 0.5)]));
}
