//! Trains modules of burn over servers in this process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::thread;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use pushpull::local::Cluster;
use pushpull::optim::{AdamW, Optimizer as Rule};
use pushpull::training::TrainingConfig;
use pushpull::{Adam, Mode, PsConfig, Sgd, Synchronous};
use pushpull_burn::{AdapterError, PushPull};

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

fn device() -> Device {
    Device::default().autodiff()
}

/// Two layers.
#[derive(Module, Debug)]
struct LayeredNetwork {
    first: Linear,
    layers: Vec<Linear>,
}

impl LayeredNetwork {
    /// Makes a network with values that follow from their positions.
    fn new() -> LayeredNetwork {
        let network = LayeredNetwork {
            first: LinearConfig::new(3, 8).init(&device()),
            layers: vec![LinearConfig::new(8, 2).init(&device())],
        };
        network.map(&mut FixedValues { next: 0 })
    }

    fn loss(&self, (features, labels): &(Tensor<2>, Tensor<1, Int>)) -> Tensor<1> {
        let hidden = self.first.forward(features.clone()).tanh();
        let logits = self.layers[0].forward(hidden);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels.clone())
    }

    fn values(&self) -> Vec<f32> {
        let LayeredNetwork { first, layers } = self;
        let layers = [first, &layers[0]].into_iter();
        layers
            .flat_map(|layer| {
                let bias = layer.bias.as_ref().unwrap().val().into_data();
                let weight = layer.weight.val().into_data();
                [bias, weight].map(|data| data.as_slice::<f32>().unwrap().to_vec()).concat()
            })
            .collect()
    }
}

/// Gives parameters fixed values.
struct FixedValues {
    next: usize,
}

impl ModuleMapper for FixedValues {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let count = old.shape().num_elements();
            let value = |i: usize| ((i + self.next) as f32 * 0.7).sin() * 0.4;
            let values = TensorData::new((0..count).map(value).collect(), old.dims());
            self.next += 1;
            Tensor::from_data(values, &old.device()).require_grad()
        })
    }
}

/// Returns the samples of a step: rows of three features, and their classes.
fn batch(step: u64, rows: std::ops::Range<usize>) -> (Tensor<2>, Tensor<1, Int>) {
    let count = rows.len();
    let feature = |n: usize| ((n + 31 * step as usize) as f32 * 0.9).sin();
    let features: Vec<f32> = (rows.start * 3..rows.end * 3).map(feature).collect();
    let labels: Vec<i64> = features.chunks(3).map(|row| (row[0] > row[1]).into()).collect();
    let features = Tensor::from_data(TensorData::new(features, [count, 3]), &device());
    (features, Tensor::from_data(TensorData::new(labels, [count]), &device()))
}

fn gradients<M: Module>(loss: &Tensor<1>, module: &M) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), module)
}

/// Trains replicas, each on its part of every batch of 12, and returns the values of the first.
fn train_replicas(rule: impl Rule + Clone, workers: u32, steps: u64) -> Vec<f32> {
    let cluster = cluster_of(rule, workers, steps);
    let train = |worker: u32| {
        let config = config(&cluster, worker);
        thread::spawn(move || {
            let (mut optimizer, mut network) =
                PushPull::from_module(LayeredNetwork::new(), config).unwrap();
            let rows = 12 / workers as usize;
            let first = worker as usize * rows;
            while optimizer.ready() {
                let batch = batch(optimizer.global_step(), first..first + rows);
                let loss = network.loss(&batch);
                optimizer.scalar("loss", loss.clone().into_scalar::<f32>());
                let gradients = gradients(&loss, &network);
                network = optimizer.step(network, gradients).unwrap();
            }
            let (end, network) = optimizer.close(network).unwrap();
            assert!(end.is_final && end.step == steps, "{end:?}");
            network.values()
        })
    };
    let workers: Vec<_> = (0..workers).map(train).collect();
    let values: Vec<Vec<f32>> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    cluster.stop().unwrap();
    assert!(values.iter().all(|other| *other == values[0]), "all have the final values");
    values.into_iter().next().unwrap()
}

/// Trains in this process with whole batches, and an optimizer of burn.
fn train_alone(mut optimizer: ModuleOptimizer, rate: f64, steps: u64) -> Vec<f32> {
    let mut network = LayeredNetwork::new();
    for step in 0..steps {
        let loss = network.loss(&batch(step, 0..12));
        let gradients = gradients(&loss, &network);
        network = optimizer.step(ModuleLearningRate::from(rate), network, gradients);
    }
    network.values()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < tolerance, "{index}: {found} instead of {expected}");
    }
}

#[test]
fn replicas_train_as_one_process_with_a_batch_of_all() {
    let expected = train_alone(SgdConfig::new().init(), RATE, 40);
    let first = LayeredNetwork::new().values();
    assert!(first.iter().zip(&expected).any(|(a, b)| (a - b).abs() > 0.05), "nothing is learned");
    for replicas in 1..=3 {
        let found = train_replicas(Sgd::new(RATE), replicas, 40);
        let error = largest_difference(&found, &expected);
        println!("{replicas} replicas differ by at most {error:e}");
        assert_close(&found, &expected, 1e-4);
    }
}

/// Returns the largest difference between two lists of values.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The servers' Adam and AdamW with epsilon after the correction are burn's, to the rounding of
/// f32. Epsilon is so large that the other form differs.
#[test]
fn replicas_train_with_adam_as_burn_does() {
    let rate = 0.02;
    let epsilon = 1e-2_f32;
    let decay = 0.1_f32;
    let steps = 20;
    let adam = Adam::new(rate).epsilon(epsilon.into());
    let adamw = AdamW::new(rate).epsilon(epsilon.into()).weight_decay(decay.into());
    let config = AdamConfig::new().with_beta_2(0.999).with_epsilon(epsilon);
    let by_adam = train_alone(config.init(), rate, steps);
    let config = AdamWConfig::new().with_beta_2(0.999).with_epsilon(epsilon);
    let by_adamw = train_alone(config.with_weight_decay(decay).init(), rate, steps);
    let start = LayeredNetwork::new().values();
    for replicas in 1..=3 {
        let found = [
            train_replicas(adam.clone().epsilon_after_correction(), replicas, steps),
            train_replicas(adamw.clone().epsilon_after_correction(), replicas, steps),
        ];
        for (found, expected) in found.iter().zip([&by_adam, &by_adamw]) {
            let difference = largest_difference(found, expected);
            println!("{replicas} replicas differ by at most {difference:e}");
            assert!(difference < 2e-6, "{difference}");
            assert!(largest_difference(found, &start) > 0.1, "hardly anything was trained");
        }
    }
    let other = train_replicas(adam, 1, steps);
    assert!(largest_difference(&other, &by_adam) > 1e-3, "the other form differs");
}

#[derive(Module, Debug)]
struct Normalized {
    normalize: BatchNorm,
    last: Linear,
}

/// The statistics of batch normalization require no gradient, and each worker has its own: here of
/// data around another point.
#[test]
fn running_statistics_stay_with_their_worker() {
    let cluster = cluster(2, 30);
    let train = |worker: u32| {
        let config = config(&cluster, worker);
        let shift = [5.0, -3.0][worker as usize];
        thread::spawn(move || {
            let module = Normalized {
                normalize: BatchNormConfig::new(3).init(&device()),
                last: LinearConfig::new(3, 2).init(&device()),
            };
            let (mut optimizer, mut module) = PushPull::from_module(module, config).unwrap();
            let mut losses = Vec::new();
            while optimizer.ready() {
                let (features, labels) = batch(optimizer.global_step(), 0..24);
                let normal = module.normalize.forward(features * 2.0 + shift);
                let logits = module.last.forward(normal);
                let loss = CrossEntropyLossConfig::new().init(&device()).forward(logits, labels);
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = gradients(&loss, &module);
                module = optimizer.step(module, gradients).unwrap();
            }
            let mean = module.normalize.running_mean.value_sync().into_data();
            optimizer.close(module).unwrap();
            (shift, mean.as_slice::<f32>().unwrap().to_vec(), losses)
        })
    };
    for worker in [0, 1].map(train) {
        let (shift, mean, losses) = worker.join().unwrap();
        assert!(mean.iter().all(|mean| (mean - shift).abs() < 0.5), "{mean:?} around {shift}");
        assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
    }
    cluster.stop().unwrap();
}

/// Statistics that are averaged are of the data of all workers.
#[test]
fn averaged_statistics_are_shared() {
    let cluster = cluster(2, 20);
    let train = |worker: u32| {
        let config = config(&cluster, worker);
        let shift = [4.0, -2.0][worker as usize];
        thread::spawn(move || {
            let module = Normalized {
                normalize: BatchNormConfig::new(3).init(&device()),
                last: LinearConfig::new(3, 2).init(&device()),
            };
            let builder = PushPull::builder(config).mean_every_steps("normalize.running_*", 1);
            let (mut optimizer, mut module) = builder.from_module(module).unwrap();
            while optimizer.ready() {
                let (features, labels) = batch(optimizer.global_step(), 0..24);
                let logits = module.last.forward(module.normalize.forward(features + shift));
                let loss = CrossEntropyLossConfig::new().init(&device()).forward(logits, labels);
                let gradients = gradients(&loss, &module);
                module = optimizer.step(module, gradients).unwrap();
            }
            let (_, module) = optimizer.close(module).unwrap();
            let mean = module.normalize.running_mean.value_sync().into_data();
            mean.as_slice::<f32>().unwrap().to_vec()
        })
    };
    let [first, second] = [0, 1].map(train).map(|worker| worker.join().unwrap());
    // By themselves they would reach about 3.5 and -1.8.
    assert!(first.iter().all(|&mean| mean < 2.6), "{first:?}");
    assert!(second.iter().all(|&mean| mean > 0.0), "{second:?}");
    cluster.stop().unwrap();
}

/// Casts all parameters.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let device = old.device();
            let values = old.detach().cast(self.0).into_data();
            Tensor::from_data(values, (&device, self.0)).require_grad()
        })
    }
}

#[test]
fn parameters_keep_their_types() {
    for (dtype, expected) in [(DType::F64, "f64"), (DType::F16, "f16"), (DType::BF16, "bf16")] {
        let cluster = cluster(1, 3);
        let line: Linear = LinearConfig::new(2, 1).init(&device());
        let line = line.map(&mut Cast(dtype));
        let (mut optimizer, mut line) = PushPull::from_module(line, config(&cluster, 0)).unwrap();
        let before = line.weight.val().cast(DType::F32).into_data();
        while optimizer.ready() {
            // The gradient of the sum is 1 everywhere.
            let loss = line.weight.val().sum() + line.bias.as_ref().unwrap().val().sum();
            let gradients = gradients(&loss, &line);
            line = optimizer.step(line, gradients).unwrap();
        }
        let (end, line) = optimizer.close(line).unwrap();
        let spec = end.params.as_ref().unwrap().catalogue().variable(1.into()).clone();
        assert_eq!((spec.name(), spec.dtype().to_string()), ("weight", expected.to_owned()));
        assert_eq!(line.weight.val().dtype(), dtype);
        let after = line.weight.val().cast(DType::F32).into_data();
        let pairs = before.as_slice::<f32>().unwrap().iter().zip(after.as_slice::<f32>().unwrap());
        for (before, after) in pairs {
            assert!((before - after - 0.6).abs() < 0.02, "{dtype:?}: {before} became {after}");
        }
        cluster.stop().unwrap();
    }
}

#[test]
fn what_cannot_be_trained_is_named() {
    let cluster = cluster(1, 1);
    let builder = || PushPull::builder(config(&cluster, 0));
    let error = builder().from_module(LayeredNetwork::new().no_grad()).unwrap_err();
    assert!(matches!(error, AdapterError::NothingToTrain), "{error}");
    // Trained parameters are not averaged.
    let error =
        builder().mean_every_steps("first.*", 1).from_module(LayeredNetwork::new()).unwrap_err();
    let expected = "no parameter without gradients matches the pattern \"first.*\"";
    assert_eq!(error.to_string(), expected);
    let (mut optimizer, network) = builder().from_module(LayeredNetwork::new()).unwrap();
    let loss = network.loss(&batch(0, 0..12));
    let found = gradients(&loss, &network);
    let error = optimizer.step(network.clone(), GradientsParams::new()).unwrap_err();
    assert!(matches!(error, AdapterError::NoGradient), "{error}");
    // Another module has no parameters of these names.
    assert!(optimizer.ready(), "the step is still there");
    let network = optimizer.step(network, found).unwrap();
    assert!(!optimizer.ready());
    let error = optimizer.step(network.clone(), GradientsParams::new()).unwrap_err();
    assert!(matches!(error, AdapterError::Ended { step: 1 }), "{error}");
    optimizer.close(network).unwrap();
    cluster.stop().unwrap();
}

/// A module that grows has parameters that the training does not know.
#[test]
fn another_module_is_refused() {
    let cluster = cluster(1, 5);
    let (mut optimizer, network) =
        PushPull::from_module(LayeredNetwork::new(), config(&cluster, 0)).unwrap();
    let mut other = network.clone();
    other.layers.push(LinearConfig::new(2, 2).init(&device()));
    let loss = other.loss(&batch(0, 0..12)) + other.layers[1].weight.val().sum();
    let found = gradients(&loss, &other);
    let error = optimizer.step(other, found).unwrap_err();
    assert!(error.to_string().contains("layers.1."), "{error}");
    optimizer.close(network).unwrap();
    cluster.stop().unwrap();
}
