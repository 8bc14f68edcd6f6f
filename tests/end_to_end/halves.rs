//! Variables of f16 and bf16: two bytes per element on workers and on the wire, f32 on servers.

use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::{Reader, Worker};
use pushpull::checkpoint::export;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::ViewError;
use pushpull::optim::Optimizer;
use pushpull::server::NonFinite;
use pushpull::variable::{DType, Element, Initializer, Partitioner, Shape, VariableId, bf16, f16};
use pushpull::worker::{Codec, LossScale};
use pushpull::{
    Adam, Error, Gradients, Mode, Params, PsConfig, Push, Sgd, Synchronous, VariableSpec,
};
use safetensors::{Dtype, SafeTensors};

use crate::cluster::{TestCluster, vector};

/// Starts one ps task with `shards` shards.
fn cluster(
    shards: u16,
    optimizer: impl Optimizer + Clone,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> TestCluster {
    TestCluster::start(1, 1, optimizer, |config| configure(config.shards(shards)))
}

/// A partitioned bf16 matrix and an f16 vector, each with an f32 twin.
fn variables() -> Vec<VariableSpec> {
    let parts = Partitioner::Fixed { shards: 5 };
    vec![
        VariableSpec::bf16("brain", [37, 11]).unwrap().partitioner(parts.clone()),
        VariableSpec::f32("brain/twin", [37, 11]).unwrap().partitioner(parts),
        VariableSpec::f16("half", [7]).unwrap(),
        vector("half/twin", 7),
    ]
}

/// Returns the variables with type f32, the type of their masters in a checkpoint.
fn as_f32(variables: &[VariableSpec]) -> Vec<VariableSpec> {
    let single = |variable: &VariableSpec| {
        let shape = variable.shape().clone();
        let single = VariableSpec::new(variable.name(), DType::F32, shape).unwrap();
        single.partitioner(variable.partitioner.clone())
    };
    variables.iter().map(single).collect()
}

/// Returns a number between -1 and 1 that bf16 represents exactly.
fn number(step: u64, index: usize) -> f32 {
    let mixed = (index as u64 * 31 + step * 977 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    bf16::from_f32(mixed as f32 / (1_u64 << 31) as f32 - 1.0).to_f32()
}

/// Fills the gradients of a step with the same numbers for each variable and its twin.
fn fill(gradients: &mut Gradients, step: u64) {
    let brain = gradients.view_mut::<bf16>("brain").unwrap();
    (0..).zip(brain).for_each(|(i, g)| *g = bf16::from_f32(number(step, i)));
    let half = gradients.view_mut::<f16>("half").unwrap();
    (0..).zip(half).for_each(|(i, g)| *g = f16::from_f32(number(step, i)));
    for name in ["brain/twin", "half/twin"] {
        let twin = gradients.view_mut::<f32>(name).unwrap();
        (0..).zip(twin).for_each(|(i, g)| *g = number(step, i));
    }
}

fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        fill(&mut gradients, step);
        if step % 2 == 1 {
            gradients.scale(1.0 / 3.0);
        }
        worker.push(token, gradients).unwrap();
    }
}

fn pull(worker: &mut Worker, params: &mut Params) {
    let token = worker.token().unwrap().unwrap();
    assert!(!worker.pull(&token, params).unwrap().is_stale());
}

/// Checks that pulled values equal their rounded twins.
fn check_rounding(params: &Params) {
    let brain = params.view::<f32>("brain/twin").unwrap().iter().map(|&twin| bf16::from_f32(twin));
    assert!(params.view::<bf16>("brain").unwrap().iter().copied().eq(brain));
    let half = params.view::<f32>("half/twin").unwrap().iter().map(|&twin| f16::from_f32(twin));
    assert!(params.view::<f16>("half").unwrap().iter().copied().eq(half));
}

fn bits(params: &Params, name: &str) -> Vec<u32> {
    params.view::<f32>(name).unwrap().iter().map(|value| value.to_bits()).collect()
}

fn checkpoints(directory: &Path) -> impl Fn(PsConfig) -> PsConfig {
    move |config| config.checkpoints(Checkpoints::new(LocalDirectory::create(directory).unwrap()))
}

/// Checks, for several numbers of shards and both modes, that the servers' values equal those of
/// f32 variables with the same pushes, bit for bit. Pulled values are their rounding, and a
/// checkpoint holds them unrounded.
#[test]
fn masters_equal_f32_variables() {
    let modes = [Mode::default(), Synchronous::new(1).into()];
    for (shards, mode) in [1, 2, 5].into_iter().flat_map(|n| modes.map(|mode| (n, mode))) {
        let folder = tempfile::tempdir().unwrap();
        let saving = checkpoints(folder.path());
        let first = cluster(shards, Adam::new(0.25), |config| saving(config).mode(mode));
        let mut worker = first.worker(0);
        let mut params = worker.join(&variables(), |_| ()).unwrap();
        for steps in [0..1, 1..2, 2..6] {
            train(&mut worker, steps);
            pull(&mut worker, &mut params);
            check_rounding(&params);
        }
        worker.save(b"").unwrap();
        let trained = [bits(&params, "brain/twin"), bits(&params, "half/twin")];
        let rough = params.view::<bf16>("brain").unwrap().iter().map(|value| value.to_f32());
        assert!(rough.map(f32::to_bits).ne(trained[0].iter().copied()), "some must be rounded");
        first.stop();

        let second = cluster(shards % 5 + 1, Adam::new(0.25), &saving);
        let mut worker = second.worker(0);
        let params = worker.join(&as_f32(&variables()), |_| panic!("already restored")).unwrap();
        assert_eq!([bits(&params, "brain"), bits(&params, "half")], trained);
        second.stop();
    }
}

/// Checks updates that would each be lost if values were kept in bf16.
#[test]
fn tiny_updates_add_up_in_the_master() {
    let cluster = cluster(1, Sgd::new(1.0 / 4096.0), |config| config);
    let mut worker = cluster.worker(0);
    let variables = [VariableSpec::bf16("w", [3]).unwrap().initializer(Initializer::Ones)];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    let one = bf16::ONE;
    let tiny = bf16::from_f32(1.0 / 4096.0);
    assert_eq!(bf16::from_f32(one.to_f32() - tiny.to_f32()), one, "bf16 loses it");
    for _ in 0..64 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<bf16>("w").unwrap().fill(one);
        worker.push(token, gradients).unwrap();
    }
    pull(&mut worker, &mut params);
    assert_eq!(params.view::<bf16>("w").unwrap(), [bf16::from_f32(1.0 - 64.0 / 4096.0); 3]);
    cluster.stop();
}

/// Checks that unscaling does not lose the gradients that loss scaling has preserved: each is below
/// the smallest f16.
#[test]
fn unscaled_gradients_keep_values_below_the_f16_range() {
    let cluster = cluster(1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&[VariableSpec::f16("w", [3]).unwrap()], |_| ()).unwrap();
    let mut scale = LossScale::default();
    let gradient = 2f64.powi(-26);
    assert_eq!(f16::from_f64(gradient), f16::ZERO);
    for _ in 0..64 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f16>("w").unwrap().fill(f16::from_f64(gradient * scale.scale()));
        assert!(scale.unscale(&mut gradients));
        worker.push(token, gradients).unwrap();
    }
    pull(&mut worker, &mut params);
    assert_eq!(params.view::<f16>("w").unwrap(), [f16::from_f64(-64.0 * gradient); 3]);
    cluster.stop();
}

/// Checks parts of 1 MiB, several stretches per partition, and whole and streamed pushes: half the
/// bytes of f32 in both directions.
#[test]
fn large_half_precision_variables_travel_in_two_bytes_per_element() {
    const ELEMENTS: usize = 1_200_003;
    let cluster = cluster(2, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let parts = Partitioner::Fixed { shards: 2 };
    let variables = [VariableSpec::f16("w", [ELEMENTS as u64]).unwrap().partitioner(parts)];
    let given: Vec<f16> = (0..ELEMENTS).map(|i| f16::from_f32(number(9, i))).collect();
    let mut params = worker
        .join(&variables, |initial| {
            initial.set("w", &given);
        })
        .unwrap();
    assert!(params.view::<f16>("w").unwrap() == given);
    let bytes = || {
        let metrics = cluster.handle().metrics();
        (metrics.push_bytes, metrics.pull_bytes)
    };
    let about = 2 * ELEMENTS as u64..2 * ELEMENTS as u64 + 100;
    let before = bytes();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let gradient: Vec<f16> = (0..ELEMENTS).map(|i| f16::from_f32(number(1, i))).collect();
    gradients.view_mut::<f16>("w").unwrap().copy_from_slice(&gradient);
    worker.push(token, gradients).unwrap();
    assert!(about.contains(&(bytes().0 - before.0)), "{:?}", bytes());
    let token = worker.token().unwrap().unwrap();
    let mut streamed = worker.begin(token).unwrap();
    streamed.variable("w", &gradient).unwrap();
    streamed.finish().unwrap();
    pull(&mut worker, &mut params);
    assert!(about.contains(&(bytes().1 - before.1)), "{:?}", bytes());
    let expected = given.iter().zip(&gradient).map(|(value, gradient)| {
        f16::from_f32(value.to_f32() - gradient.to_f32() - gradient.to_f32())
    });
    assert!(params.view::<f16>("w").unwrap().iter().copied().eq(expected));
    cluster.stop();
}

/// Checks initial values, `assign`, `assign_add`, readers, and pull codecs for f32 variables.
#[test]
fn every_operation_takes_half_precision() {
    let cluster = cluster(2, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let plain = VariableSpec::bf16("plain", [3]).unwrap().plain();
    let glorot = VariableSpec::f16("glorot", [20, 30]).unwrap();
    let glorot = glorot.initializer(Initializer::GlorotUniform).seed(5);
    let variables = [plain, glorot, vector("w", 3)];
    let params = worker
        .join(&variables, |initial| {
            initial.set("w", &[0.1_f32, 0.2, 0.3]);
        })
        .unwrap();
    let mut first = vec![0_f32; 600];
    params.catalogue().fill(VariableId(1), 0, &mut first);
    let first = first.into_iter().map(f16::from_f32);
    assert!(params.view::<f16>("glorot").unwrap().iter().copied().eq(first));

    let brain = |values: [f32; 3]| values.map(bf16::from_f32);
    worker.assign("plain", &brain([1.0, -2.5, 3e38])).unwrap();
    for _ in 0..3 {
        worker.assign_add("plain", &brain([1.0 / 256.0, 0.5, 0.0])).unwrap();
    }
    let short = cluster.config(0).pull_codec(Codec::F16);
    for (config, w) in [
        (cluster.config(0), [0.1, 0.2, 0.3]),
        (short, [0.1, 0.2, 0.3].map(|w| f16::from_f32(w).to_f32())),
    ] {
        let mut reader = Reader::connect(config).unwrap();
        let mut params = reader.params();
        reader.pull(&mut params).unwrap();
        // Each 1/256 would be lost in a bf16 of 1, but three of them add up in f32.
        let expected = brain([1.0 + 3.0 / 256.0, -1.0, 3e38]);
        assert_eq!(params.view::<bf16>("plain").unwrap(), expected);
        assert_eq!(params.view::<f32>("w").unwrap(), w);
    }
    cluster.stop();
}

/// Checks that codecs shorter than two bytes encode the gradient from f32.
#[test]
fn codecs_shorten_half_precision_further() {
    for codec in [Codec::Int8, Codec::TopK { fraction: 0.1 }, Codec::Threshold { magnitude: 0.5 }] {
        let cluster = cluster(2, Sgd::new(1.0), |config| config);
        let mut worker = Worker::connect(cluster.config(0).codec("*", codec)).unwrap();
        let mut params = worker.join(&variables(), |_| ()).unwrap();
        train(&mut worker, 0..4);
        pull(&mut worker, &mut params);
        check_rounding(&params);
        let residuals = worker.residuals().unwrap();
        worker.restore_residuals(&residuals).unwrap();
        train(&mut worker, 4..6);
        pull(&mut worker, &mut params);
        check_rounding(&params);
        cluster.stop();
    }
}

/// Checks that a wrong type, too many elements, NaN and infinity are reported by name, and that
/// nothing is changed.
#[test]
fn bad_half_precision_values_are_reported_by_name() {
    let cluster = cluster(1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let variables = [VariableSpec::f16("w", [4]).unwrap(), VariableSpec::bf16("b", [2]).unwrap()];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    fn wrong(asked: DType, dtype: DType) -> ViewError {
        ViewError::Type { name: "w".to_owned(), asked, dtype }
    }
    fn asked_as<T: Element>(params: &Params, gradients: &mut Gradients) -> [ViewError; 2] {
        [params.view::<T>("w").unwrap_err(), gradients.view_mut::<T>("w").unwrap_err()]
    }
    let mut gradients = worker.gradients();
    let errors = asked_as::<f32>(&params, &mut gradients);
    assert_eq!(errors, [wrong(DType::F32, DType::F16), wrong(DType::F32, DType::F16)]);
    let errors = asked_as::<bf16>(&params, &mut gradients);
    assert_eq!(errors, [wrong(DType::Bf16, DType::F16), wrong(DType::Bf16, DType::F16)]);
    assert_eq!(errors[0].to_string(), "cannot use \"w\" as bf16: its elements are f16");
    let length = worker.assign("w", &[f16::ONE; 5]).unwrap_err();
    assert!(matches!(length, Error::View(ViewError::Length { elements: 5, .. })), "{length}");

    let is_of = |error: Error, at| match error {
        Error::NonFinite { variable, element, value } => {
            assert_eq!((&*variable, element), ("w", at));
            assert!(!value.is_finite());
        }
        error => panic!("{error}"),
    };
    for bad in [f16::INFINITY, f16::NAN, f16::from_f32(1e5)] {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        let view = gradients.view_mut::<f16>("w").unwrap();
        view.copy_from_slice(&[f16::ONE, f16::MAX, bad, f16::ONE]);
        is_of(worker.push(token, gradients).unwrap_err(), 2);
        is_of(worker.assign("w", &[f16::ONE, bad, bad, bad]).unwrap_err(), 1);
    }
    // The last element is finite until the servers multiply it by the scale.
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let view = gradients.view_mut::<f16>("w").unwrap();
    view.copy_from_slice(&[f16::ONE, f16::ONE, f16::ONE, f16::MAX]);
    gradients.scale(1e35);
    is_of(worker.push(token, gradients).unwrap_err(), 3);
    assert_eq!(cluster.handle().metrics().push_bytes, 0, "it must not be sent");
    pull(&mut worker, &mut params);
    assert_eq!(params.view::<f16>("w").unwrap(), [f16::ZERO; 4]);
    cluster.stop();
}

/// Checks that under `NonFinite::Count` the servers count them, and f16 values hold them.
#[test]
fn the_non_finite_policy_applies_to_half_precision() {
    let cluster = TestCluster::sgd(1, |config| config.non_finite(NonFinite::Count));
    let mut worker = cluster.worker(0);
    let variables = [VariableSpec::f16("w", [4]).unwrap()];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let view = gradients.view_mut::<f16>("w").unwrap();
    view.copy_from_slice(&[f16::ONE, f16::NAN, f16::INFINITY, f16::ZERO]);
    assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
    assert_eq!(cluster.handle().metrics().non_finite, 2);
    pull(&mut worker, &mut params);
    let values = params.view::<f16>("w").unwrap();
    assert_eq!((values[0], values[2], values[3]), (f16::NEG_ONE, f16::NEG_INFINITY, f16::ZERO));
    assert!(values[1].is_nan());
    cluster.stop();
}

/// Checks that a master beyond the largest f16 is pulled as the largest f16, and stays on the
/// server.
#[test]
fn masters_beyond_f16_are_pulled_as_the_largest_f16() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    let variables = [VariableSpec::f16("w", [1]).unwrap()];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    for (gradient, expected) in [(-6e4_f32, 6e4_f32), (-6e4, 65504.0), (6e4, 6e4), (6e4, 0.0)] {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f16>("w").unwrap()[0] = f16::from_f32(gradient);
        worker.push(token, gradients).unwrap();
        pull(&mut worker, &mut params);
        assert_eq!(params.view::<f16>("w").unwrap(), [f16::from_f32(expected)]);
    }
    cluster.stop();
}

/// Checks that training continues bit for bit after a restore into any number of shards. An export
/// has the variable's own type.
#[test]
fn checkpoints_keep_masters_and_export_half_precision() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let saving = checkpoints(&directory);
    let first = cluster(2, Adam::new(0.25), &saving);
    let mut worker = first.worker(0);
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    train(&mut worker, 0..4);
    worker.save(b"").unwrap();
    pull(&mut worker, &mut params);
    let file = folder.path().join("model.safetensors");
    let storage = Arc::new(LocalDirectory::create(&directory).unwrap());
    export(storage, None, &file, true).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| tensors.tensor(name).unwrap();
    assert_eq!((tensor("brain").dtype(), tensor("brain").shape()), (Dtype::BF16, &[37, 11][..]));
    assert_eq!(tensor("half").dtype(), Dtype::F16);
    let held: Vec<u8> =
        params.view::<bf16>("brain").unwrap().iter().flat_map(|b| b.to_le_bytes()).collect();
    assert!(tensor("brain").data() == held);
    let held: Vec<u8> =
        params.view::<f16>("half").unwrap().iter().flat_map(|h| h.to_le_bytes()).collect();
    assert!(tensor("half").data() == held);
    for (name, twin) in [("brain:m", "brain/twin:m"), ("half:v", "half/twin:v")] {
        assert_eq!(tensor(name).dtype(), Dtype::F32);
        assert!(tensor(name).data() == tensor(twin).data(), "slots are f32");
    }
    train(&mut worker, 4..8);
    pull(&mut worker, &mut params);
    let expected = params;
    first.stop();

    for shards in [1, 5] {
        let other = cluster(shards, Adam::new(0.25), &saving);
        let mut worker = other.worker(0);
        let mut params = worker.join(&variables(), |_| panic!("already restored")).unwrap();
        train(&mut worker, 4..8);
        pull(&mut worker, &mut params);
        check_rounding(&params);
        assert_eq!(bits(&params, "brain/twin"), bits(&expected, "brain/twin"));
        let brain = |params: &Params| params.view::<bf16>("brain").unwrap().to_vec();
        assert_eq!(brain(&params), brain(&expected));
        other.stop();
    }

    // The masters of f16 do not fit a variable of f64.
    let other = cluster(1, Adam::new(0.25), &saving);
    let mut doubles = variables();
    doubles[2] = VariableSpec::new("half", DType::F64, Shape::new([7]).unwrap()).unwrap();
    let error = other.worker(0).join(&doubles, |_| ()).unwrap_err().to_string();
    assert!(
        error.contains("\"half\"") && error.contains("f16") && error.contains("f64"),
        "{error}"
    );
    other.stop();
}
