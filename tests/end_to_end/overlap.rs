//! Concurrent operations: pushes and pulls awaited in any order, pulls of single variables, and
//! whole steps.

use std::pin::pin;
use std::task::{Context, Waker};

use pushpull::blocking::Worker;
use pushpull::error::ViewError;
use pushpull::variable::Partitioner;
use pushpull::worker::{PushHandle, StepOutcome};
use pushpull::{
    Error, Gradients, Mode, Params, Pulled, Push, Sgd, Synchronous, Token, VariableSpec,
};

use super::cluster::{TestCluster, block_on, vector};

const ELEMENTS: u64 = 600_000;

/// A large variable with a partition on each shard, and a small variable.
fn variables(shards: u32) -> [VariableSpec; 2] {
    let split = Partitioner::Fixed { shards };
    [vector("large", ELEMENTS).partitioner(split), vector("small", 3)]
}

fn ones(worker: &mut Worker) -> Gradients {
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("large").unwrap().fill(1.0);
    gradients.view_mut::<f32>("small").unwrap().fill(1.0);
    gradients
}

fn all_are(params: &Params, expected: f32) -> bool {
    let all = |name| params.view::<f32>(name).unwrap().iter().all(|value| *value == expected);
    all("large") && all("small")
}

fn synchronous(aggregate: u32, total: u32) -> Mode {
    Synchronous::new(aggregate).total_num_replicas(total).into()
}

#[test]
fn pushes_and_pulls_overlap_and_are_awaited_in_any_order() {
    for ps in [1, 2] {
        let cluster = TestCluster::start(ps, 1, Sgd::new(1.0), |config| config.last_step(3));
        let mut worker = cluster.worker(0);
        let mut params = worker.join(&variables(ps as u32), |_| ()).unwrap();
        let mut other = params.clone();
        let mut token = || worker.token().unwrap().unwrap();
        let first = token();
        let second = token();
        let third = token();
        let gradients = [ones(&mut worker), ones(&mut worker)];
        let [one, two] = gradients;
        let pull = worker.start_pull(&third, &mut params);
        let pushes = [worker.start_push(first, one), worker.start_push(second, two)];
        let again = worker.start_pull(&third, &mut other);
        // The operation that started last is awaited first.
        assert!(matches!(again.wait().unwrap(), Pulled::Pulled { .. }));
        for push in pushes.into_iter().rev() {
            assert!(matches!(push.wait().unwrap(), Push::Applied { .. }));
        }
        assert!(matches!(pull.wait().unwrap(), Pulled::Pulled { .. }));
        worker.pull(&third, &mut params).unwrap();
        assert!(all_are(&params, -2.0));
        let gradients = ones(&mut worker);
        let applied = worker.push(third, gradients).unwrap();
        assert!(matches!(applied, Push::Applied { step: 3, .. }), "{applied:?}");
        cluster.stop();
    }
}

/// Checks that a push is sent before its handle is polled. If the handle is dropped, the push
/// counts whole or not at all: the only token is returned or spent.
#[test]
fn a_push_whose_handle_is_dropped_counts_whole_or_not_at_all() {
    for (ps, waits) in [(1, false), (2, false), (1, true), (2, true)] {
        let cluster = TestCluster::start(ps, 1, Sgd::new(1.0), |config| config.last_step(1));
        block_on(async {
            let mut worker = pushpull::Worker::connect(cluster.config(0)).await.unwrap();
            let mut params = worker.join(&variables(ps as u32), |_| ()).await.unwrap();
            let token = worker.token().await.unwrap().unwrap();
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("large").unwrap().fill(1.0);
            gradients.view_mut::<f32>("small").unwrap().fill(1.0);
            let push: PushHandle = worker.push(token, gradients);
            if waits {
                // The handle is never polled, but the push is applied.
                let mut reader = pushpull::Reader::connect(cluster.config(0)).await.unwrap();
                while reader.pull(&mut params).await.unwrap() == 0 {}
            }
            drop(push);
            let expected = match worker.token().await.unwrap() {
                Some(token) => {
                    assert!(!waits, "its token was returned");
                    worker.pull(&token, &mut params).await.unwrap();
                    0.0
                }
                None => {
                    let mut reader = pushpull::Reader::connect(cluster.config(0)).await.unwrap();
                    reader.pull(&mut params).await.unwrap();
                    -1.0
                }
            };
            let whole = expected == 0.0 || ps == 1;
            assert!(!whole || all_are(&params, expected));
        });
        cluster.stop();
    }
}

#[test]
fn values_are_pulled_during_a_streamed_push() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&variables(2), |_| ()).unwrap();
    let (token, next) = (worker.token().unwrap().unwrap(), worker.token().unwrap().unwrap());
    let mut push = worker.begin(token).unwrap();
    push.variable("small", &[1.0_f32; 3]).unwrap();
    worker.pull(&next, &mut params).unwrap();
    assert!(all_are(&params, 0.0), "nothing may be applied yet");
    let mut other = worker.begin(next).unwrap();
    push.variable("large", &vec![1.0_f32; ELEMENTS as usize]).unwrap();
    other.variable("large", &vec![1.0_f32; ELEMENTS as usize]).unwrap();
    push.finish().unwrap();
    drop(other);
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    assert!(all_are(&params, -1.0));
    cluster.stop();
}

#[test]
fn variables_are_pulled_one_by_one_and_awaited_in_any_order() {
    for mode in [Mode::default(), synchronous(1, 1)] {
        let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config.mode(mode));
        let mut worker = cluster.worker(0);
        let [large, small] = variables(2);
        let empty = vector("empty", 0);
        let halves = VariableSpec::f16("halves", [5]).unwrap();
        let sparse = VariableSpec::f32("sparse", [4, 2]).unwrap().sparse();
        worker.join(&[large, small, empty, halves, sparse], |_| ()).unwrap();
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("large").unwrap().fill(1.0);
        gradients.view_mut::<f32>("small").unwrap().fill(2.0);
        gradients
            .view_mut::<pushpull::variable::f16>("halves")
            .unwrap()
            .fill(pushpull::variable::f16::ONE);
        worker.push(token, gradients).unwrap();
        let token = worker.token().unwrap().unwrap();
        let mut small = [0.0_f32; 3];
        let mut large = vec![0.0_f32; ELEMENTS as usize];
        let mut empty = [0.0_f32; 0];
        let mut halves = [pushpull::variable::f16::ZERO; 5];
        let first = worker.start_pull_variable(&token, "small", &mut small);
        let second = worker.start_pull_variable(&token, "large", &mut large);
        let third = worker.start_pull_variable(&token, "halves", &mut halves);
        assert_eq!(first.wait().unwrap(), Pulled::Pulled { step: 1 });
        assert_eq!(small, [-2.0; 3]);
        assert_eq!(third.wait().unwrap(), Pulled::Pulled { step: 1 });
        assert_eq!(second.wait().unwrap(), Pulled::Pulled { step: 1 });
        assert!(large.iter().all(|value| *value == -1.0));
        assert_eq!(halves, [-pushpull::variable::f16::ONE; 5]);
        worker.pull_variable(&token, "empty", &mut empty).unwrap();
        let mut one = [7.0_f32];
        for (name, error) in [
            ("x", ViewError::Unknown { name: "x".into() }),
            ("sparse", ViewError::Sparse { name: "sparse".into() }),
            ("small", ViewError::Length { name: "small".into(), elements: 1, shape: "[3]".into() }),
        ] {
            let result = worker.pull_variable(&token, name, &mut one);
            assert_eq!(result.unwrap_err(), Error::View(error));
        }
        assert_eq!(one, [7.0], "it must not be written");
        cluster.stop();
    }
}

/// Checks a pull for a step that another replica has completed in the meantime.
#[test]
fn a_variable_of_a_past_step_is_stale() {
    let cluster = TestCluster::sgd(2, |config| config.mode(synchronous(1, 2)));
    let mut slow = cluster.worker(0);
    let mut fast = cluster.worker(1);
    slow.join(&[vector("small", 3)], |_| ()).unwrap();
    fast.join(&[vector("small", 3)], |_| ()).unwrap();
    let stale = slow.token().unwrap().unwrap();
    let token = fast.token().unwrap().unwrap();
    let mut gradients = fast.gradients();
    gradients.view_mut::<f32>("small").unwrap().fill(1.0);
    fast.push(token, gradients).unwrap();
    assert_eq!(fast.token().unwrap().unwrap().step(), 1);
    let mut small = [5.0_f32; 3];
    assert_eq!(slow.pull_variable(&stale, "small", &mut small).unwrap(), Pulled::Stale);
    assert_eq!(small, [5.0; 3]);
    cluster.stop();
}

/// Runs `push_and_pull` until training ends, and returns how many pushes were not stale.
fn step_to_the_end(
    worker: &mut Worker,
    params: &mut Params,
    check: impl Fn(&Token, &Params),
) -> u64 {
    let mut steps = 0;
    let mut token = worker.token().unwrap();
    // Another worker may have completed the step already, if one gradient is enough.
    while let Some(stale) = token.take() {
        if !worker.pull(&stale, params).unwrap().is_stale() {
            token = Some(stale);
            break;
        }
        drop(stale);
        token = worker.token().unwrap();
    }
    while let Some(spent) = token {
        check(&spent, params);
        let gradients = ones(worker);
        let StepOutcome { push, next, .. } =
            worker.push_and_pull(spent, gradients, params).unwrap();
        steps += u64::from(!matches!(push, Push::Stale { .. }));
        token = next.unwrap();
    }
    steps
}

/// Checks that a step sees the push of the step before it, although token and values are requested
/// ahead of the outcome.
#[test]
fn push_and_pull_is_a_push_a_token_and_a_pull() {
    for mode in [Mode::default(), synchronous(1, 1), synchronous(2, 1)] {
        for ps in [1, 2] {
            let last = 12;
            let configure = |config: pushpull::PsConfig| config.mode(mode).last_step(last);
            let cluster = TestCluster::start(ps, 1, Sgd::new(1.0), configure);
            let mut worker = cluster.worker(0);
            let mut params = worker.join(&variables(ps as u32), |_| ()).unwrap();
            let steps = step_to_the_end(&mut worker, &mut params, |token, params| {
                assert!(all_are(params, -(token.step() as f32)), "{mode:?}, step {}", token.step());
            });
            // If a step takes two gradients, the only worker contributes both.
            let each = if mode == synchronous(2, 1) { 2 } else { 1 };
            assert_eq!(steps, each * last, "{mode:?}");
            cluster.stop();
        }
    }
}

#[test]
fn several_workers_push_and_pull_together() {
    for (mode, each) in [(Mode::default(), 1), (synchronous(2, 2), 2), (synchronous(1, 2), 1)] {
        for ps in [1, 2] {
            let last = 20;
            let configure = |config: pushpull::PsConfig| config.mode(mode).last_step(last);
            let cluster = TestCluster::start(ps, 2, Sgd::new(1.0), configure);
            let exact = matches!(mode, Mode::Synchronous(_));
            let steps: u64 = std::thread::scope(|scope| {
                let workers = [0, 1].map(|task| {
                    let cluster = &cluster;
                    scope.spawn(move || {
                        let mut worker = cluster.worker(task);
                        let mut params = worker.join(&variables(ps as u32), |_| ()).unwrap();
                        step_to_the_end(&mut worker, &mut params, |token, params| {
                            let step = token.step() as f32;
                            let small = params.view::<f32>("small").unwrap()[0];
                            assert!(!exact || all_are(params, -step));
                            assert!(ps > 1 || small <= -step, "{small} for step {step}");
                        })
                    })
                });
                workers.into_iter().map(|worker| worker.join().unwrap()).sum()
            });
            assert_eq!((steps, cluster.handle().metrics().global_step), (each * last, last));
            let mut reader = pushpull::blocking::Reader::connect(cluster.config(0)).unwrap();
            let mut params = reader.params();
            reader.pull(&mut params).unwrap();
            assert!(all_are(&params, -(last as f32)), "{mode:?}");
            cluster.stop();
        }
    }
}

/// Checks that a failed push does not wait for the requests sent with it, and that its token is not
/// lost.
#[test]
fn a_step_with_a_refused_push_ends_at_once_and_returns_its_token() {
    for mode in [Mode::default(), synchronous(1, 1)] {
        for ps in [1, 2] {
            let configure = |config: pushpull::PsConfig| config.mode(mode).last_step(1);
            let cluster = TestCluster::start(ps, 1, Sgd::new(1.0), configure);
            let mut worker = cluster.worker(0);
            let mut params = worker.join(&variables(ps as u32), |_| ()).unwrap();
            let token = worker.token().unwrap().unwrap();
            let mut gradients = ones(&mut worker);
            gradients.view_mut::<f32>("small").unwrap()[1] = f32::NAN;
            let error = worker.push_and_pull(token, gradients, &mut params).unwrap_err();
            assert!(matches!(&error, Error::NonFinite { element: 1, .. }), "{error}");
            let token = worker.token().unwrap().unwrap();
            let gradients = ones(&mut worker);
            let StepOutcome { next, .. } =
                worker.push_and_pull(token, gradients, &mut params).unwrap();
            assert!(next.unwrap().is_none(), "training ends after the last step");
            cluster.stop();
        }
    }
}

#[test]
fn a_worker_continues_after_a_dropped_step() {
    let cluster = TestCluster::sgd(1, |config| config.mode(synchronous(1, 1)).last_step(2));
    block_on(async {
        let mut worker = pushpull::Worker::connect(cluster.config(0)).await.unwrap();
        let mut params = worker.join(&[vector("small", 3)], |_| ()).await.unwrap();
        let token = worker.token().await.unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("small").unwrap().fill(1.0);
        {
            let mut step = pin!(worker.push_and_pull(token, gradients, &mut params));
            let _ = step.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        // Applied or not, there is a token for the next step, and values of that step.
        let token = worker.token().await.unwrap().unwrap();
        worker.pull(&token, &mut params).await.unwrap();
        let expected = -(token.step() as f32);
        assert_eq!(params.view::<f32>("small").unwrap(), [expected; 3]);
    });
    cluster.stop();
}
