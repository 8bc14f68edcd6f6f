//! Trains models of candle over servers in this process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::thread;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Module, ModuleT, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear};
use pushpull::local::Cluster;
use pushpull::optim::Optimizer as Rule;
use pushpull::training::TrainingConfig;
use pushpull::{Adam, Mode, PsConfig, Sgd, Synchronous, VariableSpec, optim};
use pushpull_candle::{AdapterError, PushPull, PushPullBuilder};

const RATE: f64 = 0.2;

/// Starts a server and synchronous replicas.
fn cluster(workers: u32, steps: u64) -> Cluster {
    cluster_of(Sgd::new(RATE), workers, steps)
}

fn cluster_of(rule: impl Rule + Clone, workers: u32, steps: u64) -> Cluster {
    Cluster::start(1, workers, |cluster, task| {
        let mode: Mode = Synchronous::new(workers).deterministic(true).into();
        PsConfig::new(cluster, task, rule.clone()).mode(mode).last_step(steps)
    })
    .unwrap()
}

fn config(cluster: &Cluster, worker: u32) -> TrainingConfig {
    TrainingConfig::new(cluster.worker_config(worker))
}

/// A network of two layers, with values that follow from the names.
fn network(dtype: DType) -> (VarMap, impl Module) {
    let map = VarMap::new();
    let builder = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
    let model = candle_nn::seq()
        .add(linear(3, 8, builder.pp("first")).unwrap())
        .add_fn(|x| x.tanh())
        .add(linear(8, 2, builder.pp("second")).unwrap());
    for (index, (_, variable)) in sorted(&map).into_iter().enumerate() {
        let count = variable.elem_count();
        let values: Vec<f32> = (0..count).map(|i| ((i + index) as f32 * 0.7).sin() * 0.4).collect();
        let values = Tensor::from_vec(values, variable.shape(), &Device::Cpu).unwrap();
        variable.set(&values.to_dtype(dtype).unwrap()).unwrap();
    }
    (map, model)
}

fn sorted(map: &VarMap) -> Vec<(String, Var)> {
    let variables = map.data().lock().unwrap();
    let mut all: Vec<(String, Var)> =
        variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

fn values(map: &VarMap) -> Vec<f32> {
    let each = |(_, variable): (String, Var)| {
        let flat = variable.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
        flat.to_vec1::<f32>().unwrap()
    };
    sorted(map).into_iter().flat_map(each).collect()
}

/// Returns the samples of a step: rows of three features, and their classes.
fn batch(step: u64, rows: std::ops::Range<usize>, dtype: DType) -> (Tensor, Tensor) {
    let count = rows.len();
    let feature = |n: usize| ((n + 31 * step as usize) as f32 * 0.9).sin();
    let features: Vec<f32> = (rows.start * 3..rows.end * 3).map(feature).collect();
    let labels: Vec<u32> = features.chunks(3).map(|row| (row[0] > row[1]).into()).collect();
    let features = Tensor::from_vec(features, (count, 3), &Device::Cpu).unwrap();
    (features.to_dtype(dtype).unwrap(), Tensor::from_vec(labels, count, &Device::Cpu).unwrap())
}

fn loss(model: &impl Module, (features, labels): &(Tensor, Tensor)) -> Tensor {
    let logits = model.forward(features).unwrap().to_dtype(DType::F32).unwrap();
    candle_nn::loss::cross_entropy(&logits, labels).unwrap()
}

/// Trains replicas, each on its part of every batch of 12, and returns the values of the first.
fn train_replicas(workers: u32, steps: u64, dtype: DType) -> Vec<f32> {
    train_replicas_by(Sgd::new(RATE), workers, steps, dtype)
}

fn train_replicas_by(rule: impl Rule + Clone, workers: u32, steps: u64, dtype: DType) -> Vec<f32> {
    let cluster = cluster_of(rule, workers, steps);
    let train = |worker: u32| {
        let config = config(&cluster, worker);
        thread::spawn(move || {
            let (map, model) = network(dtype);
            let mut optimizer = PushPull::from_varmap(&map, config).unwrap();
            let rows = 12 / workers as usize;
            let first = worker as usize * rows;
            while optimizer.ready().unwrap() {
                let batch = batch(optimizer.global_step(), first..first + rows, dtype);
                optimizer.backward_step(&loss(&model, &batch)).unwrap();
            }
            let ended = optimizer.close().unwrap();
            let params = ended.params.unwrap();
            assert_eq!(params.step(), steps);
            // The variables hold the values of the last step that was computed.
            for (name, variable) in sorted(&map) {
                if dtype == DType::F32 {
                    let found = params.view::<f32>(&name).unwrap();
                    let tensor = Tensor::from_slice(found, variable.shape(), &Device::Cpu).unwrap();
                    variable.set(&tensor).unwrap();
                }
            }
            values(&map)
        })
    };
    let running: Vec<_> = (0..workers).map(train).collect();
    let mut all: Vec<Vec<f32>> = running.into_iter().map(|worker| worker.join().unwrap()).collect();
    cluster.stop().unwrap();
    all.swap_remove(0)
}

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
    }
}

/// Candle's own optimizer in this process.
fn train_alone(steps: u64) -> Vec<f32> {
    train_alone_by(|variables| SGD::new(variables, RATE).unwrap(), steps)
}

fn train_alone_by<O: Optimizer>(optimizer: impl FnOnce(Vec<Var>) -> O, steps: u64) -> Vec<f32> {
    let (map, model) = network(DType::F32);
    let mut optimizer = optimizer(map.all_vars());
    for step in 0..steps {
        optimizer.backward_step(&loss(&model, &batch(step, 0..12, DType::F32))).unwrap();
    }
    values(&map)
}

#[test]
fn replicas_train_as_one_process_with_a_batch_of_all() {
    let alone = train_alone(20);
    let (map, _) = network(DType::F32);
    let moved = values(&map).iter().zip(&alone).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(moved > 0.1, "hardly anything was trained: {moved}");
    for workers in [1, 2, 3] {
        assert_close(&train_replicas(workers, 20, DType::F32), &alone, 1e-4);
    }
}

/// Returns the largest difference between two lists of values.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The servers' Adam and AdamW with epsilon after the correction are candle's, to the rounding of
/// f32. Epsilon is so large that the other form differs.
#[test]
fn replicas_train_with_adam_as_candle_does() {
    let rate = 0.02;
    let epsilon = 1e-2;
    let decay = 0.1;
    let steps = 20;
    let alone = |weight_decay: f64| {
        let params = ParamsAdamW { lr: rate, beta1: 0.9, beta2: 0.999, eps: epsilon, weight_decay };
        train_alone_by(|variables| AdamW::new(variables, params).unwrap(), steps)
    };
    let adam = Adam::new(rate).epsilon(epsilon);
    let adamw = optim::AdamW::new(rate).epsilon(epsilon).weight_decay(decay);
    let start = values(&network(DType::F32).0);
    for workers in [1, 2, 3] {
        let by_adam =
            train_replicas_by(adam.clone().epsilon_after_correction(), workers, steps, DType::F32);
        let by_adamw =
            train_replicas_by(adamw.clone().epsilon_after_correction(), workers, steps, DType::F32);
        for (found, expected) in [(by_adam, alone(0.0)), (by_adamw, alone(decay))] {
            let difference = largest_difference(&found, &expected);
            println!("{workers} replicas differ by at most {difference:e}");
            assert!(difference < 2e-6, "{difference}");
            assert!(largest_difference(&found, &start) > 0.1, "hardly anything was trained");
        }
    }
    let other = train_replicas_by(adam, 1, steps, DType::F32);
    assert!(largest_difference(&other, &alone(0.0)) > 1e-3, "the other form differs");
}

#[test]
fn half_types_train_too() {
    let alone = train_alone(20);
    for dtype in [DType::BF16, DType::F16] {
        let found = train_replicas(2, 20, dtype);
        assert_close(&found, &alone, 0.06);
    }
}

/// The statistics of batch normalization have no gradient, and each worker has its own: here of
/// data around another point.
#[test]
fn running_statistics_stay_with_their_worker() {
    let cluster = cluster(2, 30);
    let train = |worker: u32| {
        let config = config(&cluster, worker);
        let shift = [5.0, -3.0][worker as usize];
        thread::spawn(move || {
            let map = VarMap::new();
            let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
            let normalize = candle_nn::batch_norm(3, 1e-5, builder.pp("bn")).unwrap();
            let last = linear(3, 2, builder.pp("last")).unwrap();
            let mut optimizer = PushPull::from_varmap(&map, config).unwrap();
            let mut losses = Vec::new();
            while optimizer.ready().unwrap() {
                let (features, labels) = batch(optimizer.global_step(), 0..24, DType::F32);
                let shifted = ((features * 2.0).unwrap() + shift).unwrap();
                let normal = normalize.forward_t(&shifted, true).unwrap();
                let logits = last.forward(&normal).unwrap();
                let loss = candle_nn::loss::cross_entropy(&logits, &labels).unwrap();
                losses.push(loss.to_scalar::<f32>().unwrap());
                optimizer.backward_step(&loss).unwrap();
            }
            let mean = normalize.running_mean().to_vec1::<f32>().unwrap();
            let ended = optimizer.close().unwrap();
            let kept = ended.params.unwrap().view::<f32>("bn.running_mean").unwrap().to_vec();
            (shift as f32, mean, kept, losses)
        })
    };
    let workers = [0, 1].map(train);
    for worker in workers {
        let (shift, mean, kept, losses) = worker.join().unwrap();
        assert!(mean.iter().all(|mean| (mean - shift).abs() < 0.5), "{mean:?}");
        assert_close(&kept, &mean, 0.3);
        assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
    }
    cluster.stop().unwrap();
}

/// Rows of an embedding train as a dense variable does.
#[test]
fn embeddings_train_by_rows() {
    let rows: usize = 50;
    let width: usize = 4;
    let steps: u64 = 15;
    let ids_of = |step: u64| [10 + step % 5, 7, 10 + step % 5, 40 + step % 2];
    let target = Tensor::full(0.5_f32, (4, width), &Device::Cpu).unwrap();
    // The dense variable in this process.
    let dense = Var::zeros((rows, width), DType::F32, &Device::Cpu).unwrap();
    let mut alone = SGD::new(vec![dense.clone()], RATE).unwrap();
    let mut dense_rows = Vec::new();
    for step in 0..steps {
        let ids = Tensor::new(&ids_of(step).map(|id| id as u32), &Device::Cpu).unwrap();
        let found = dense.as_tensor().index_select(&ids, 0).unwrap();
        dense_rows.push(found.to_vec2::<f32>().unwrap());
        alone.backward_step(&candle_nn::loss::mse(&found, &target).unwrap()).unwrap();
    }
    let cluster = cluster(1, steps);
    let map = VarMap::new();
    let embedding = VariableSpec::f32("user", [rows as u64, width as u64]).unwrap().sparse();
    let builder = PushPull::builder(config(&cluster, 0)).embedding(embedding);
    let mut optimizer = builder.from_varmap(&map).unwrap();
    let mut found_rows = Vec::new();
    while optimizer.ready().unwrap() {
        // In two parts, which have an id in common.
        let ids = ids_of(optimizer.global_step());
        let parts = [&ids[..2], &ids[2..]].map(|ids| optimizer.lookup("user", ids).unwrap());
        let found = Tensor::cat(&parts, 0).unwrap();
        found_rows.push(found.to_vec2::<f32>().unwrap());
        optimizer.backward_step(&candle_nn::loss::mse(&found, &target).unwrap()).unwrap();
    }
    assert_eq!(found_rows.len(), dense_rows.len());
    for (found, expected) in found_rows.iter().flatten().zip(dense_rows.iter().flatten()) {
        assert_close(found, expected, 1e-6);
    }
    let trained = dense.as_tensor().to_vec2::<f32>().unwrap()[7][0];
    assert!(trained > 0.1, "hardly anything was trained: {trained}");
    optimizer.close().unwrap();
    cluster.stop().unwrap();
}

#[test]
fn what_cannot_be_trained_is_named() {
    let cluster = cluster(1, 1);
    let builder = || PushPull::builder(config(&cluster, 0));
    let map = VarMap::new();
    map.data()
        .lock()
        .unwrap()
        .insert("count".to_owned(), Var::zeros(2, DType::U32, &Device::Cpu).unwrap());
    let error = builder().from_varmap(&map).unwrap_err();
    let expected = "cannot train \"count\": its elements are U32; expected f32, f64, f16 or bf16";
    assert_eq!(error.to_string(), expected);
    for spec in [
        VariableSpec::bf16("user", [4, 2]).unwrap().sparse(),
        VariableSpec::f32("user", [4, 2]).unwrap(),
    ] {
        let error = builder().embedding(spec).from_varmap(&VarMap::new()).unwrap_err();
        assert!(matches!(error, AdapterError::NotEmbedding { .. }), "{error}");
    }
    let (map, model) = network(DType::F32);
    let error = builder().local("third.*").from_varmap(&map).unwrap_err();
    assert_eq!(error.to_string(), "no variable matches the pattern \"third.*\"");

    let mut optimizer = builder().learning_rate(RATE).from_varmap(&map).unwrap();
    assert!(matches!(optimizer.lookup("user", &[1]), Err(AdapterError::Embedding { .. })));
    assert_eq!(optimizer.learning_rate(), RATE);
    let batch = batch(0, 0..4, DType::F32);
    optimizer.set_learning_rate(0.1);
    let error = optimizer.backward_step(&loss(&model, &batch)).unwrap_err().to_string();
    assert!(error.contains("cannot set the learning rate to 0.1 on a worker"), "{error}");
    optimizer.set_learning_rate(RATE);
    let constant = Tensor::new(1.0_f32, &Device::Cpu).unwrap();
    let error = optimizer.backward_step(&constant).unwrap_err().to_string();
    assert!(error.contains("the loss depends on none of the variables"), "{error}");
    optimizer.backward_step(&loss(&model, &batch)).unwrap();
    assert!(!optimizer.ready().unwrap());
    let gradients = loss(&model, &batch).backward().unwrap();
    assert!(matches!(optimizer.push(&gradients), Err(AdapterError::Ended { .. })));
    optimizer.close().unwrap();
    cluster.stop().unwrap();
}

/// The trait's own constructor names the variables by their positions.
#[test]
fn variables_without_names_are_numbered() {
    let cluster = cluster(1, 3);
    let (map, model) = network(DType::F32);
    let variables: Vec<Var> = sorted(&map).into_iter().map(|(_, variable)| variable).collect();
    let config = PushPullBuilder::from(cluster.worker_config(0));
    let mut optimizer = PushPull::new(variables, config).unwrap();
    let names: Vec<String> = (0..4).map(|index| format!("variable/{index}")).collect();
    let catalogue = optimizer.session().worker().and_then(|worker| worker.catalogue()).unwrap();
    let found: Vec<&str> = catalogue.variables().iter().map(|spec| spec.name()).collect();
    assert_eq!(found, names);
    while optimizer.ready().unwrap() {
        let batch = batch(optimizer.global_step(), 0..12, DType::F32);
        optimizer.step(&loss(&model, &batch).backward().unwrap()).unwrap();
    }
    optimizer.close().unwrap();
    cluster.stop().unwrap();
}
