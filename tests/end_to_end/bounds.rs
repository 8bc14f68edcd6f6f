//! Bounded staleness over sockets and two ps tasks.

use pushpull::{Asynchronous, Push, Sgd, VariableSpec};

use crate::cluster::{TestCluster, vector};

/// Two variables, one on each ps task.
fn variables() -> [VariableSpec; 2] {
    [vector("a", 4), vector("b", 4)]
}

#[test]
fn stale_pushes_are_dropped_on_every_shard() {
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| {
        config.mode(Asynchronous::default().reject_older(2))
    });
    let mut workers = [cluster.worker(0), cluster.worker(1)];
    let mut params = workers.each_mut().map(|worker| worker.join(&variables(), |_| ()).unwrap());
    let push = |worker: &mut pushpull::blocking::Worker, token| {
        let mut gradients = worker.gradients();
        for name in ["a", "b"] {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0);
        }
        worker.push(token, gradients).unwrap()
    };
    let [slow, fast] = &mut workers;
    let old = slow.token().unwrap().unwrap();
    let older = slow.token().unwrap().unwrap();
    for step in 1..=2 {
        let token = fast.token().unwrap().unwrap();
        assert_eq!(push(fast, token), Push::Applied { step, staleness: 0 });
    }
    assert_eq!(push(slow, old), Push::Applied { step: 3, staleness: 2 });
    assert_eq!(push(slow, older), Push::Stale { current: 3 });
    let token = slow.token().unwrap().unwrap();
    slow.pull(&token, &mut params[0]).unwrap();
    for name in ["a", "b"] {
        assert_eq!(params[0].view::<f32>(name).unwrap(), [-3.0; 4], "{name}");
    }
    assert_eq!(push(slow, token), Push::Applied { step: 4, staleness: 0 });
    workers.into_iter().for_each(|worker| worker.leave().unwrap());
}

#[test]
fn a_fast_worker_stays_within_the_bound_of_a_slow_one() {
    const BOUND: u64 = 3;
    const GRADIENTS: u64 = 40;
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| {
        config.mode(Asynchronous::default().wait_ahead(BOUND))
    });
    let made = [0, 1].map(|_| std::sync::atomic::AtomicU64::new(0));
    let ready = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for index in 0..2 {
            let cluster = &cluster;
            let made = &made;
            let ready = &ready;
            scope.spawn(move || {
                use std::sync::atomic::Ordering::SeqCst;
                let mut worker = cluster.worker(index as u32);
                worker.join(&variables(), |_| ()).unwrap();
                let mut token = worker.token().unwrap();
                // Both workers have joined and hold a token before either starts to count.
                ready.wait();
                for gradient in 1..=GRADIENTS {
                    // The other's count only grows, so a gradient within the bound stays there.
                    let other = made[1 - index].load(SeqCst);
                    assert!(gradient <= other + BOUND, "gradient {gradient}, the other {other}");
                    if index == 0 {
                        std::thread::sleep(std::time::Duration::from_millis(2));
                    }
                    let mut gradients = worker.gradients();
                    gradients.view_mut::<f32>("a").unwrap().fill(1.0);
                    // Count before the push: the server may apply it and let the other worker
                    // continue before this one receives the outcome.
                    made[index].store(gradient, SeqCst);
                    worker.push(token.take().unwrap(), gradients).unwrap();
                    token = worker.token().unwrap();
                }
                drop(token);
                worker.leave().unwrap();
            });
        }
    });
}
