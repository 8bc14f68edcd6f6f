//! Encoded gradients and pulls: decoded values, residuals, and refused codecs.

use std::net::TcpListener;

use pushpull::blocking::{Reader, Worker};
use pushpull::error::{Chain, ConfigError};
use pushpull::server::NonFinite;
use pushpull::variable::{DType, Partitioner, Shape};
use pushpull::worker::Codec;
use pushpull::{Error, PsConfig, Push, Sgd, TaskId, VariableSpec, WorkerConfig};
use pushpull_common::codec::{Residual, ScaleBlocks};

use super::cluster::{TestCluster, listen, spec, vector};
use super::proxy::Proxy;

const CODECS: [Codec; 6] = [
    Codec::F16,
    Codec::Bf16,
    Codec::Int8,
    Codec::OneBit,
    Codec::TopK { fraction: 0.1 },
    Codec::Threshold { magnitude: 2.0 },
];

/// Returns the gradient of a step: numbers between -1 and 1 that differ per step.
fn gradient(step: u64, elements: usize) -> Vec<f32> {
    let number = |index: usize| {
        let mixed = (index as u64 * 31 + step * 977).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        mixed as f32 / (1 << 23) as f32 - 1.0
    };
    (0..elements).map(number).collect()
}

/// Computes the values that gradient descent at rate 1 from zeros reaches after these steps, and
/// the residual.
fn descend(codec: Codec, steps: std::ops::Range<u64>, elements: usize) -> (Vec<f32>, Vec<f32>) {
    let mut residual = Residual::new(elements);
    let mut values = vec![0f32; elements];
    let mut decoded = vec![0f32; elements];
    for step in steps {
        let mut bytes = Vec::new();
        residual
            .encode(&codec, ScaleBlocks::THROUGH, 0, &gradient(step, elements), &mut bytes)
            .unwrap();
        codec.encoding().decode(&bytes, &mut decoded).unwrap();
        values.iter_mut().zip(&decoded).for_each(|(value, decoded)| *value -= decoded);
    }
    (values, residual.left().to_vec())
}

fn push(worker: &mut Worker, step: u64, names: &[&str]) {
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    for name in names {
        let view = gradients.view_mut::<f32>(name).unwrap();
        view.copy_from_slice(&gradient(step, view.len()));
    }
    assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
}

fn values(cluster: &TestCluster, name: &str) -> Vec<f32> {
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut params = reader.params();
    reader.pull(&mut params).unwrap();
    params.view::<f32>(name).unwrap().to_vec()
}

#[test]
fn servers_apply_decoded_gradients_and_the_residual_keeps_the_rest() {
    for codec in CODECS {
        let cluster = TestCluster::sgd(1, |config| config);
        let config = cluster.config(0).codec("*", codec).codec("plain/*", None);
        let mut worker = Worker::connect(config).unwrap();
        let count = VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap();
        let variables = [vector("w", 5001), vector("plain/b", 7), count];
        worker.join(&variables, |_| ()).unwrap();
        (0..4).for_each(|step| push(&mut worker, step, &["w", "plain/b"]));
        // One variable in a streamed push.
        let token = worker.token().unwrap().unwrap();
        let mut streamed = worker.begin(token).unwrap();
        streamed.variable("w", &gradient(4, 5001)).unwrap();
        streamed.finish().unwrap();

        let (expected, _) = descend(codec, 0..5, 5001);
        assert_eq!(values(&cluster, "w"), expected, "{codec}");
        let mut plain = [0f32; 7];
        for step in 0..4 {
            plain.iter_mut().zip(gradient(step, 7)).for_each(|(b, g)| *b -= g);
        }
        assert_eq!(values(&cluster, "plain/b"), plain, "{codec}");
        let bytes = cluster.handle().metrics().push_bytes;
        assert!(bytes < 5 * 4 * 5001 * 13 / 20, "{codec}: {bytes}");
        cluster.stop();
    }
}

/// Checks two shards with a partition of one variable on each, encoded in several stretches, and an
/// f64 variable.
#[test]
fn large_and_partitioned_variables_are_encoded_stretch_by_stretch() {
    for codec in CODECS {
        let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
        let mut worker = Worker::connect(cluster.config(0).codec("*", codec)).unwrap();
        let parts = Partitioner::Fixed { shards: 2 };
        let doubles = VariableSpec::new("d", DType::F64, Shape::new([3]).unwrap()).unwrap();
        let variables = [vector("w", 700_003).partitioner(parts), doubles];
        worker.join(&variables, |_| ()).unwrap();
        let mut sum = vec![0f64; 700_003];
        for step in 0..3 {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            let given = gradient(step, 700_003);
            gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&given);
            gradients.view_mut::<f64>("d").unwrap().copy_from_slice(&[1.0, -2.0, 0.25]);
            worker.push(token, gradients).unwrap();
            sum.iter_mut().zip(given).for_each(|(sum, given)| *sum += f64::from(given));
        }
        let off = values(&cluster, "w")
            .iter()
            .zip(&sum)
            .fold(0f64, |most, (&value, sum)| most.max((f64::from(value) + sum).abs()));
        // The residual is at most the sum of three gradients.
        let most = match codec {
            Codec::F16 | Codec::Bf16 | Codec::Int8 => 0.02,
            _ => 3.0,
        };
        assert!(off <= most, "{codec}: off by {off}");
        cluster.stop();
    }
}

/// Checks that a push is encoded once and applied once, wherever connections are cut.
#[test]
fn encoded_pushes_count_once_through_cut_connections() {
    let mut cuts = 0;
    let steps = 40;
    let elements = 60_000;
    for codec in [Codec::Int8, Codec::TopK { fraction: 0.05 }] {
        let listener = listen();
        let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cluster = spec([proxy_listener.local_addr().unwrap().to_string()], 1);
        let proxy = Proxy::start(proxy_listener, listener.address(), 150_000, 7);
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
        let server = listener.start(config).unwrap();
        let config = WorkerConfig::new(cluster, TaskId::worker(0)).codec("w", codec);
        let mut worker = Worker::connect(config).unwrap();
        let mut params = worker.join(&[vector("w", elements)], |_| ()).unwrap();
        (0..steps).for_each(|step| push(&mut worker, step, &["w"]));
        proxy.heal();
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        let (expected, _) = descend(codec, 0..steps, elements as usize);
        assert!(params.view::<f32>("w").unwrap() == expected, "{codec}");
        cuts += proxy.cuts();
        drop(server);
    }
    assert!(cuts > 10, "only {cuts} cuts");
}

#[test]
fn residuals_are_restored_by_another_worker() {
    let codec = Codec::OneBit;
    let cluster = TestCluster::sgd(1, |config| config);
    let connect = || {
        let mut worker = Worker::connect(cluster.config(0).codec("w", codec)).unwrap();
        worker.join(&[vector("w", 1000), vector("b", 3)], |_| ()).unwrap();
        worker
    };
    let mut worker = connect();
    (0..3).for_each(|step| push(&mut worker, step, &["w", "b"]));
    let saved = worker.residuals().unwrap();
    worker.leave().unwrap();

    let mut worker = connect();
    let damaged = Err(Error::DamagedResiduals);
    for at in 0..saved.len() {
        let mut other = saved.clone();
        other[at] ^= 1;
        assert_eq!(worker.restore_residuals(&other), damaged, "a bit at {at}");
        assert_eq!(worker.restore_residuals(&saved[..at]), damaged, "cut at {at}");
    }
    worker.restore_residuals(&saved).unwrap();
    assert_eq!(worker.residuals().unwrap(), saved);
    (3..6).for_each(|step| push(&mut worker, step, &["w", "b"]));
    assert_eq!(values(&cluster, "w"), descend(codec, 0..6, 1000).0);

    let mut plain = Worker::connect(cluster.config(0).codec("b", codec)).unwrap();
    assert_eq!(
        plain.restore_residuals(&saved),
        Err(Error::NotJoined { doing: "restore residuals" })
    );
    plain.join(&[vector("w", 1000), vector("b", 3)], |_| ()).unwrap();
    let variable = "w".to_owned();
    let error = Err(Error::ResidualWithoutCodec { variable });
    assert_eq!(plain.restore_residuals(&saved), error);
    cluster.stop();

    let cluster = TestCluster::sgd(1, |config| config);
    let mut other = Worker::connect(cluster.config(0).codec("w", codec)).unwrap();
    other.join(&[vector("w", 1001)], |_| ()).unwrap();
    assert_eq!(other.restore_residuals(&saved), Err(Error::ForeignResiduals));
    cluster.stop();
}

/// Checks that pulled values are rounded, partitioned or not. Plain variables are pulled exactly,
/// and the servers keep full precision.
#[test]
fn values_are_pulled_in_half_as_many_bytes() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = Worker::connect(cluster.config(0).pull_codec(Codec::Bf16)).unwrap();
    let shape = |extent| Shape::new([extent]).unwrap();
    let variables = [
        vector("w", 700_001).partitioner(Partitioner::Fixed { shards: 2 }),
        VariableSpec::new("d", DType::F64, shape(3)).unwrap(),
        VariableSpec::new("n", DType::I64, shape(2)).unwrap(),
        vector("ledger", 3).plain(),
    ];
    let given = gradient(1, 700_001);
    let mut params = worker
        .join(&variables, |initial| {
            initial.set("w", &given).set("d", &[0.1, 1e300, -2.0]);
            initial.set("n", &[i64::MAX, -1]).set("ledger", &[0.1_f32, 1e-9, 7.0]);
        })
        .unwrap();
    let before = cluster.servers.iter().map(|server| server.handle().metrics().pull_bytes);
    let before: u64 = before.sum();
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    let after = cluster.servers.iter().map(|server| server.handle().metrics().pull_bytes);
    assert!(after.sum::<u64>() - before < 2 * 700_001 + 200);
    let bf16 = |value: f64| {
        let mut bytes = Vec::new();
        let mut rounded = [0f64];
        Codec::Bf16.encode(&[value], &mut bytes).unwrap();
        Codec::Bf16.encoding().decode(&bytes, &mut rounded).unwrap();
        rounded[0]
    };
    let pulled = params.view::<f32>("w").unwrap();
    let rounded = given.iter().map(|&value| bf16(value.into()) as f32);
    assert!(pulled.iter().copied().eq(rounded));
    assert_eq!(params.view::<f64>("d").unwrap(), [0.1, 1e300, -2.0].map(bf16));
    assert_eq!(params.view::<i64>("n").unwrap(), [i64::MAX, -1]);
    assert_eq!(params.view::<f32>("ledger").unwrap(), [0.1, 1e-9, 7.0]);
    assert!(values(&cluster, "w") == given, "the servers keep full precision");

    let mut reader = Reader::connect(cluster.config(0).pull_codec(Codec::F16)).unwrap();
    let mut short = reader.params();
    reader.pull(&mut short).unwrap();
    assert_eq!(short.view::<f64>("d").unwrap()[1..], [65504.0, -2.0]);
    let error = Reader::connect(cluster.config(0).pull_codec(Codec::Int8)).unwrap_err();
    assert!(error.to_string().contains("int8"), "{error}");
    cluster.stop();
}

#[test]
fn invalid_codecs_are_named() {
    let cluster = TestCluster::sgd(1, |config| config);
    let config = cluster.config(0).codec("*", Codec::TopK { fraction: 0.0 });
    let error = Chain(&Worker::connect(config).unwrap_err()).to_string();
    assert!(error.contains("topk(0)"), "{error}");
    let join = |config: WorkerConfig| {
        let count = VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap();
        let rows = VariableSpec::f32("rows", [4, 2]).unwrap().sparse();
        let variables = [vector("w", 3), vector("rest", 3), count, rows];
        Worker::connect(config).unwrap().join(&variables, |_| ()).map(|_| ())
    };
    let error = join(cluster.config(0).codec("dense/*", Codec::F16)).unwrap_err();
    assert!(
        matches!(&error, Error::Config(ConfigError::NothingToCompress { names }) if names == "dense/*")
    );
    // Rows support few codecs: with the others, a row's residual might never be sent.
    let topk = Codec::TopK { fraction: 0.1 };
    let refused = [
        ("count", "count", Codec::F16),
        ("rows", "rows", Codec::OneBit),
        ("ro*", "rows", topk),
        // A pattern must fit every trainable variable that it matches.
        ("r*", "rows", topk),
    ];
    for (names, name, tried) in refused {
        match join(cluster.config(0).codec(names, tried)).unwrap_err() {
            Error::Config(ConfigError::NotCompressible { variable, codec }) => {
                assert_eq!((&variable[..], codec), (name, tried));
            }
            error => panic!("{error}"),
        }
    }
    // Only "*" skips variables that do not support the codec.
    join(cluster.config(0).codec("*", topk)).unwrap();
    join(cluster.config(0).codec("rows", Codec::F16)).unwrap();
    cluster.stop();
}

/// Checks that the policy applies to the values that servers decode. A codec that cannot represent
/// NaN and infinity makes the worker refuse them before it sends.
#[test]
fn non_finite_gradients_are_reported_with_codecs_as_without() {
    let cluster = TestCluster::sgd(1, |config| config.non_finite(NonFinite::Count));
    let config = cluster.config(0).codec("half", Codec::Bf16).codec("int", Codec::Int8);
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&[vector("half", 300), vector("int", 300)], |_| ()).unwrap();
    let mut push = |names: &[&str]| {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in names {
            let view = gradients.view_mut::<f32>(name).unwrap();
            view.fill(1.0);
            view[270] = f32::INFINITY;
        }
        worker.push(token, gradients)
    };
    let variable = "int".to_owned();
    let element = 270;
    let value = f64::INFINITY;
    let error = Err(Error::NonFinite { variable, element, value });
    assert_eq!(push(&["half", "int"]).map(|_| ()), error);
    assert_eq!(cluster.handle().metrics().push_bytes, 0, "it must not be sent");
    push(&["half"]).unwrap();
    assert_eq!(cluster.handle().metrics().non_finite, 1);
    cluster.stop();
}
