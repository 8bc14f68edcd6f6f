//! Connections cut at any byte: every push still counts exactly once.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use pushpull::blocking::{Reader, Worker};
use pushpull::variable::{DType, Shape};
use pushpull::{Error, PsConfig, Push, Sgd, TaskId, VariableSpec, WorkerConfig};

use super::cluster::{listen, spec, vector};
use super::proxy::Proxy;

use crate::secured::is_secured;

/// Has two workers push ones and add ones through proxies that keep cutting connections. Returns
/// the number of cuts.
fn push_through_cuts(seed: u64, elements: u64, cut_after: u64, last_step: u64) -> u64 {
    let listeners = [listen(), listen()];
    // The cluster spec lists the addresses of the proxies.
    let proxy_listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let cluster = spec(
        proxy_listeners
            .iter()
            .map(|proxy_listener| proxy_listener.local_addr().unwrap().to_string()),
        2,
    );
    let proxies: Vec<Proxy> = proxy_listeners
        .into_iter()
        .zip(&listeners)
        .enumerate()
        .map(|(index, (proxy_listener, listener))| {
            Proxy::start(proxy_listener, listener.address(), cut_after, seed + index as u64)
        })
        .collect();
    let servers: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(index, listener)| {
            let task = TaskId::ps(index as u32);
            let config = PsConfig::new(cluster.clone(), task, Sgd::new(1.0)).last_step(last_step);
            listener.start(config).unwrap()
        })
        .collect();
    let variables = || {
        let count = VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap();
        vec![vector("a", elements), vector("b", elements), count]
    };
    let (pushed, reconnects): (u64, u64) = thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|index| {
                let config = WorkerConfig::new(cluster.clone(), TaskId::worker(index));
                scope.spawn(move || {
                    let mut worker = Worker::connect(config).unwrap();
                    let mut params = worker.join(&variables(), |_| ()).unwrap();
                    let mut pushed = 0;
                    while let Some(token) = worker.token().unwrap() {
                        worker.pull(&token, &mut params).unwrap();
                        let mut gradients = worker.gradients();
                        for view in gradients.views_mut::<f32, 2>(["a", "b"]).unwrap() {
                            view.fill(1.0);
                        }
                        let outcome = worker.push(token, gradients).unwrap();
                        assert!(matches!(outcome, Push::Applied { .. }));
                        worker.assign_add("count", &[1_i64]).unwrap();
                        pushed += 1;
                    }
                    let metrics = worker.metrics();
                    assert_eq!((metrics.pushes, metrics.tokens), (pushed, pushed));
                    (pushed, metrics.reconnects)
                })
            })
            .collect();
        let ended = workers.into_iter().map(|worker| worker.join().unwrap());
        ended.fold((0, 0), |sum, (pushed, reconnects)| (sum.0 + pushed, sum.1 + reconnects))
    });
    let cuts = proxies.iter().map(Proxy::cuts).sum();
    // Two workers have a connection to each of two shards. Any further one replaces another.
    assert!(cuts <= 4 || reconnects > 0, "seed {seed}: {cuts} cuts");
    proxies.iter().for_each(Proxy::heal);
    let mut reader = Reader::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    let mut params = reader.params();
    assert_eq!(reader.pull(&mut params).unwrap(), last_step, "seed {seed}");
    assert_eq!(pushed, last_step, "seed {seed}");
    for name in ["a", "b"] {
        let values = params.view::<f32>(name).unwrap();
        assert!(values.iter().all(|v| *v == -(last_step as f32)), "seed {seed}: {:?}", values[0]);
    }
    assert_eq!(params.view::<i64>("count").unwrap(), [last_step as i64], "seed {seed}");
    drop(servers);
    cuts
}

#[test]
fn small_pushes_count_once_through_cut_connections() {
    let cuts: u64 = (0..4).map(|seed| push_through_cuts(seed, 10, 1500, 60)).sum();
    println!("{cuts} connections were cut");
    // The handshakes of secured connections are not cut.
    let least = if is_secured() { 10 } else { 50 };
    assert!(cuts > least, "only {cuts} cuts");
}

#[test]
fn large_pushes_count_once_through_cut_connections() {
    let cuts: u64 = (0..2).map(|seed| push_through_cuts(seed, 500_000, 6_000_000, 20)).sum();
    println!("{cuts} connections were cut");
    assert!(cuts > 10, "only {cuts} cuts");
}

#[test]
fn a_push_continues_after_a_timeout_and_can_be_resumed() {
    let listener = listen();
    let target = listener.address();
    let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = spec([proxy_listener.local_addr().unwrap().to_string()], 1);
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let server = listener.start(config).unwrap();
    let proxy = Proxy::start(proxy_listener, target, 0, 1);
    let config = WorkerConfig::new(cluster, TaskId::worker(0)).timeout(Duration::from_millis(300));
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&[vector("w", 3)], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    proxy.pause();
    let error = worker.push(token, gradients).unwrap_err();
    let Error::Timeout { sequence: Some(sequence), awaited, .. } = error else { panic!("{error}") };
    assert_eq!(awaited.0.len(), 1);
    assert_eq!(worker.outcome(sequence).unwrap(), None, "still in progress");
    proxy.resume();
    let resumed = loop {
        match worker.resume(sequence) {
            Err(Error::Timeout { .. }) => {}
            other => break other,
        }
    };
    let applied = Push::Applied { step: 1, staleness: 0 };
    assert_eq!(resumed, Ok(applied));
    assert_eq!(worker.outcome(sequence).unwrap(), Some(applied));
    assert_eq!(server.handle().metrics().global_step, 1);
}

#[test]
fn a_push_that_takes_many_leases_is_sent_once() {
    let listener = listen();
    let target = listener.address();
    let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = spec([proxy_listener.local_addr().unwrap().to_string()], 1);
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let server = listener.start(config.lease(Duration::from_millis(300))).unwrap();
    let proxy = Proxy::start(proxy_listener, target, 0, 1);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    // 12 MB at 4 MB/s take three seconds, which is ten leases.
    worker.join(&[vector("w", 3_000_000)], |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    proxy.throttle(4_000_000);
    let applied = Push::Applied { step: 1, staleness: 0 };
    assert_eq!(worker.push(token, gradients), Ok(applied));
    let metrics = server.handle().metrics();
    assert_eq!((metrics.pushes_dropped, metrics.push_bytes), (0, 12_000_000), "sent once");
}
