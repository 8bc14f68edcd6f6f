//! Tests of each operation of a worker.

use pushpull::blocking::Reader;
use pushpull::error::ViewError;
use pushpull::variable::{DType, Initializer, Partitioner, Shape};
use pushpull::worker::Checksums;
use pushpull::{Adam, Error, Pulled, Push, Sgd, VariableSpec, WorkerConfig};

use super::cluster::{TestCluster, block_on, spec, vector};

#[test]
fn asynchronous_updates_do_not_wait_for_each_other() {
    // Loss w^2/2 from w = 1 at rate 0.1: both read 1.0, so both gradients are 1.0.
    let cluster = TestCluster::start(1, 2, Sgd::new(0.1), |config| config);
    let mut a = cluster.worker(0);
    let mut b = cluster.worker(1);
    let variables = [vector("w", 1)];
    let fill = |initial: &mut pushpull::worker::InitialValues<'_>| {
        initial.set("w", &[1.0_f32]);
    };
    let mut params_a = a.join(&variables, fill).unwrap();
    let mut params_b = b.join(&variables, |_| panic!("only the chief initializes")).unwrap();
    let token_a = a.token().unwrap().unwrap();
    let token_b = b.token().unwrap().unwrap();
    assert_eq!(a.pull(&token_a, &mut params_a).unwrap(), Pulled::Pulled { step: 0 });
    b.pull(&token_b, &mut params_b).unwrap();
    let mut staleness = Vec::new();
    for (worker, token, params) in [(&mut a, token_a, &params_a), (&mut b, token_b, &params_b)] {
        let mut gradients = worker.gradients();
        gradients.view_mut("w").unwrap().copy_from_slice(params.view::<f32>("w").unwrap());
        let Push::Applied { step, staleness: behind } = worker.push(token, gradients).unwrap()
        else {
            panic!("the push was not applied")
        };
        staleness.push((step, behind));
    }
    assert_eq!(staleness, [(1, 0), (2, 1)]);
    let token = a.token().unwrap().unwrap();
    a.pull(&token, &mut params_a).unwrap();
    assert!((params_a.view::<f32>("w").unwrap()[0] - 0.8).abs() < 1e-6);
    cluster.stop();
}

#[test]
fn initial_values_do_not_depend_on_the_layout() {
    let variables = || {
        let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
        let parts = Partitioner::Fixed { shards: 5 };
        vec![
            VariableSpec::f32("w", [97, 33])
                .unwrap()
                .initializer(normal)
                .seed(3)
                .partitioner(parts),
            VariableSpec::new("d", DType::F64, Shape::new([1000]).unwrap())
                .unwrap()
                .initializer(Initializer::GlorotUniform),
            VariableSpec::new("n", DType::I64, Shape::scalar())
                .unwrap()
                .initializer(Initializer::Constant(7.0)),
        ]
    };
    let values = |ps, shards| {
        let cluster = TestCluster::start(ps, 1, Adam::default(), |config| config.shards(shards));
        let mut worker = cluster.worker(0);
        let params = worker.join(&variables(), |_| ()).unwrap();
        let values = (
            params.view::<f32>("w").unwrap().to_vec(),
            params.view::<f64>("d").unwrap().to_vec(),
            params.view::<i64>("n").unwrap().to_vec(),
        );
        cluster.stop();
        values
    };
    let alone = values(1, 1);
    assert_eq!(alone, values(2, 3));
    assert_eq!(alone.2, [7]);
    assert!(alone.0.iter().any(|value| *value != 0.0));
}

#[test]
fn a_partitioned_variable_is_pushed_and_pulled_whole() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config.shards(2));
    let mut worker = cluster.worker(0);
    let spec =
        VariableSpec::f32("w", [11, 3]).unwrap().partitioner(Partitioner::Fixed { shards: 4 });
    let mut params = worker.join(&[vector("b", 5), spec], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let [w, b] = gradients.views_mut::<f32, 2>(["w", "b"]).unwrap();
    for (index, value) in w.iter_mut().enumerate() {
        *value = index as f32;
    }
    b.fill(-1.0);
    worker.push(token, gradients).unwrap();
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    let expected: Vec<f32> = (0..33).map(|index| -(index as f32)).collect();
    assert_eq!(params.view::<f32>("w").unwrap(), expected);
    assert_eq!(params.view::<f32>("b").unwrap(), [1.0; 5]);
    cluster.stop();
}

#[test]
fn omitted_variables_are_not_pushed() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&[vector("a", 3), vector("b", 3)], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("a").unwrap().fill(1.0);
    gradients.view_mut::<f32>("b").unwrap().fill(1.0);
    gradients.omit("b").unwrap();
    worker.push(token, gradients).unwrap();
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    assert_eq!(params.view::<f32>("a").unwrap(), [-1.0; 3]);
    assert_eq!(params.view::<f32>("b").unwrap(), [0.0; 3]);
    let gradients = worker.gradients();
    assert_eq!(worker.push(token, gradients), Err(Error::EmptyPush));
    cluster.stop();
}

#[test]
fn a_streamed_push_is_one_update_and_a_dropped_one_is_none() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config.last_step(2));
    let mut worker = cluster.worker(0);
    let large = 600_000;
    let mut params = worker.join(&[vector("a", 3), vector("b", large)], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut push = worker.begin(token).unwrap();
    push.variable("b", &vec![2.0_f32; large as usize]).unwrap();
    push.variable("a", &[1.0_f32; 3]).unwrap();
    let twice = push.variable("a", &[1.0_f32; 3]).unwrap_err();
    assert_eq!(twice, Error::View(ViewError::Twice { name: "a".into() }));
    assert_eq!(push.finish().unwrap(), Push::Applied { step: 1, staleness: 0 });

    let token = worker.token().unwrap().unwrap();
    let mut push = worker.begin(token).unwrap();
    push.variable("a", &[1.0_f32; 3]).unwrap();
    drop(push);
    // One step is left. If its token were not returned, this would wait forever.
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    assert_eq!(params.view::<f32>("a").unwrap(), [-1.0; 3]);
    assert!(params.view::<f32>("b").unwrap().iter().all(|value| *value == -2.0));
    let mut push = worker.begin(token).unwrap();
    push.variable("a", &[1.0_f32; 3]).unwrap();
    assert_eq!(push.finish().unwrap(), Push::Applied { step: 2, staleness: 0 });
    assert!(worker.token().unwrap().is_none());
    cluster.stop();
}

#[test]
fn plain_variables_are_assigned_and_added_to() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    let count = VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap();
    let table =
        VariableSpec::new("table", DType::F64, Shape::new([2, 2]).unwrap()).unwrap().plain();
    let variables = [vector("w", 2), count, table];
    worker.join(&variables, |_| ()).unwrap();
    for _ in 0..10 {
        worker.assign_add("count", &[3_i64]).unwrap();
    }
    worker.assign("table", &[1.0_f64, 2.0, 3.0, 4.0]).unwrap();
    worker.assign_add("table", &[0.5_f64; 4]).unwrap();
    worker.assign("w", &[9.0_f32, 8.0]).unwrap();
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut params = reader.params();
    assert_eq!(reader.pull(&mut params).unwrap(), 0, "no step was applied");
    assert_eq!(params.view::<i64>("count").unwrap(), [30]);
    assert_eq!(params.view::<f64>("table").unwrap(), [1.5, 2.5, 3.5, 4.5]);
    assert_eq!(params.view::<f32>("w").unwrap(), [9.0, 8.0]);
    let error = worker.assign_add("w", &[1.0_f32; 2]).unwrap_err();
    assert_eq!(error, Error::View(ViewError::Trainable { name: "w".into() }));
    cluster.stop();
}

#[test]
fn a_dropped_token_goes_to_another_worker() {
    let cluster = TestCluster::sgd(2, |config| config.last_step(1));
    let mut a = cluster.worker(0);
    let mut b = cluster.worker(1);
    a.join(&[vector("w", 1)], |_| ()).unwrap();
    b.join(&[vector("w", 1)], |_| ()).unwrap();
    let token = a.token().unwrap().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| b.token().unwrap().unwrap());
        drop(token);
        assert_eq!(waiting.join().unwrap().step(), 0);
    });
    cluster.stop();
}

#[test]
fn the_chief_ends_the_training_for_all() {
    let cluster = TestCluster::sgd(2, |config| config);
    let mut chief = cluster.worker(0);
    let mut other = cluster.worker(1);
    assert!(chief.is_chief() && !other.is_chief());
    chief.join(&[vector("w", 1)], |_| ()).unwrap();
    other.join(&[vector("w", 1)], |_| ()).unwrap();
    let refused = other.finish().unwrap_err().to_string();
    assert!(refused.contains("role"), "{refused}");
    chief.finish().unwrap();
    assert!(chief.token().unwrap().is_none());
    assert!(other.token().unwrap().is_none());
    cluster.stop();
}

#[test]
fn a_worker_joins_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ps.sock");
    let address = format!("unix:{}", path.display());
    let listener = block_on(pushpull::Ps::listen(&address)).unwrap();
    let cluster = spec([listener.address()], 1);
    let config = pushpull::PsConfig::new(cluster.clone(), pushpull::TaskId::ps(0), Adam::default());
    let ps = listener.start(config).unwrap();
    let config = WorkerConfig::new(cluster, pushpull::TaskId::worker(0));
    let mut worker = pushpull::blocking::Worker::connect(config).unwrap();
    let params = worker.join(&[vector("w", 1000)], |_| ()).unwrap();
    assert_eq!(params.view::<f32>("w").unwrap(), [0.0; 1000]);
    worker.leave().unwrap();
    block_on(ps.serve(async {})).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_streamed_push_with_an_interrupted_variable_cannot_finish() {
    let cluster = TestCluster::sgd(1, |config| config.last_step(1));
    block_on(async {
        let mut worker = pushpull::Worker::connect(cluster.config(0)).await.unwrap();
        worker.join(&[vector("a", 3)], |_| ()).await.unwrap();
        // The session may answer during the first poll. Then the test tries again.
        let mut interrupted = false;
        while !interrupted {
            let token = worker.token().await.unwrap().unwrap();
            let mut push = worker.begin(token).await.unwrap();
            {
                let mut variable = std::pin::pin!(push.variable("a", &[1.0_f32; 3]));
                std::future::poll_fn(|context| {
                    interrupted = variable.as_mut().poll(context).is_pending();
                    std::task::Poll::Ready(())
                })
                .await;
            }
            if interrupted {
                assert_eq!(push.variable("a", &[1.0_f32; 3]).await, Err(Error::DroppedVariable));
                assert_eq!(push.finish().await, Err(Error::DroppedVariable));
            }
        }
        // The only token was returned, and nothing was applied.
        let token = worker.token().await.unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut("a").unwrap().copy_from_slice(&[1.0_f32; 3]);
        let applied = Push::Applied { step: 1, staleness: 0 };
        assert_eq!(worker.push(token, gradients).await, Ok(applied));
    });
    cluster.stop();
}

#[test]
fn bodies_carry_checksums_if_both_sides_agree() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    for checksums in [Checksums::Always, Checksums::Never] {
        let config = cluster.config(0).checksums(checksums);
        let mut worker = pushpull::blocking::Worker::connect(config).unwrap();
        let parts = Partitioner::Fixed { shards: 3 };
        let spec = VariableSpec::f32("w", [700_001]).unwrap().partitioner(parts);
        let mut params = worker.join(&[spec], |_| ()).unwrap();
        let before = params.view::<f32>("w").unwrap()[0];
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        assert!(params.view::<f32>("w").unwrap().iter().all(|value| *value == before - 1.0));
        worker.leave().unwrap();
    }
    assert_eq!(cluster.handle().metrics().connections_faulted, 0);
    cluster.stop();
}
