//! Bad input to servers and workers: a typed error names the culprit, and the server keeps
//! running.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use pushpull::blocking::{Reader, Worker};
use pushpull::error::{ConfigError, ListenError, StartError, ViewError};
use pushpull::protocol::Refusal;
use pushpull::server::{Network, NonFinite};
use pushpull::variable::{DType, Partitioner, Shape};
use pushpull::{
    Adam, ClusterSpec, Error, Mode, Ps, PsConfig, Push, Sgd, Storage, Synchronous, TaskId,
    VariableSpec, WorkerConfig,
};

use super::cluster::{LONG, TestCluster, block_on, listen, spec, vector};

#[test]
fn an_address_in_use_is_named() {
    let listener = listen();
    let address = listener.address();
    match block_on(Ps::listen(&address)) {
        Err(ListenError::InUse { address: named }) => assert_eq!(named, address),
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_beyond_loopback_need_listen_insecure() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let error = block_on(Ps::listen(address)).unwrap_err();
        assert!(matches!(error, ListenError::Exposed { .. }), "{error}");
    }
    block_on(Ps::listen_insecure("0.0.0.0:0")).unwrap();
    let bad = ["nonsense", "127.0.0.1", "unix:", "127.0.0.1:99999", "http://127.0.0.1:0"];
    for address in bad.into_iter().chain(["grpc://grpc://127.0.0.1:0", "http://127.0.0.1:0/"]) {
        let error = block_on(Ps::listen(address)).unwrap_err();
        assert!(matches!(error, ListenError::Address { .. }), "{error}");
    }
    // The classic scheme is accepted, as in a target of a client.
    let listener = block_on(Ps::listen("grpc://127.0.0.1:0")).unwrap();
    assert!(listener.address().starts_with("127.0.0.1:"), "{}", listener.address());
}

#[test]
fn a_server_must_be_a_ps_task_of_its_cluster() {
    let start = |task| {
        let listener = listen();
        let cluster = spec([listener.address()], 1);
        listener.start(PsConfig::new(cluster, task, Sgd::new(1.0))).unwrap_err()
    };
    assert!(matches!(start(TaskId::ps(1)), StartError::UnknownTask { .. }));
    assert!(matches!(start(TaskId::new("gateway", 0)), StartError::UnknownTask { .. }));
    assert!(matches!(start(TaskId::worker(0)), StartError::NotPs { .. }));
    let refused = |configure: fn(PsConfig) -> PsConfig| {
        let listener = listen();
        let cluster = spec([listener.address()], 1);
        let config = PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.1));
        listener.start(configure(config)).unwrap_err().to_string()
    };
    assert!(refused(|config| config.shards(0)).contains("shards"));
    assert!(refused(|config| config.inbox_pushes(0)).contains("inbox_pushes"));
    assert!(refused(|config| config.lease(Duration::ZERO)).contains("lease"));
    let listener = listen();
    let cluster = spec([listener.address()], 1);
    let config = PsConfig::new(cluster, TaskId::ps(0), Adam::new(f64::NAN));
    assert!(listener.start(config).unwrap_err().to_string().contains("learning_rate"));
}

#[test]
fn duplicate_addresses_and_absent_tasks_are_refused() {
    let error = ClusterSpec::builder().job("ps", ["a:1", "a:1"]).build().unwrap_err();
    assert!(error.to_string().contains("a:1"), "{error}");
    let sparse = ClusterSpec::builder()
        .sparse_job("ps", [(1, "127.0.0.1:1"), (3, "127.0.0.1:2")])
        .job("worker", ["127.0.0.1:3"])
        .build()
        .unwrap();
    let error = sparse.task_address("ps", 2).unwrap_err().to_string();
    assert!(error.contains('2'), "{error}");
    let error = sparse.task_address("gateway", 0).unwrap_err().to_string();
    assert!(error.contains("gateway"), "{error}");
}

#[test]
fn a_refused_identity_names_the_field_that_differs() {
    let cluster = TestCluster::sgd(1, |config| config);
    let other = spec([cluster.handle().address().to_owned(), "127.0.0.1:9".into()], 1);
    let error = Worker::connect(WorkerConfig::new(other, TaskId::worker(0))).unwrap_err();
    let Error::Refused { refusal, .. } = &error else { panic!("{error}") };
    let Refusal::Identity { field, server, client, server_hash, client_hash } = refusal else {
        panic!("{error}")
    };
    assert_eq!((field.as_str(), server.as_str(), client.as_str()), ("ps", "0", "0,1"));
    assert_ne!(server_hash, client_hash);
    cluster.stop();
}

#[test]
fn servers_with_different_optimizers_are_refused() {
    let listeners = [listen(), listen()];
    let cluster = spec(listeners.iter().map(|listener| listener.address()), 1);
    let [first, second] = listeners;
    let first = first.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0))).unwrap();
    let second =
        second.start(PsConfig::new(cluster.clone(), TaskId::ps(1), Adam::default())).unwrap();
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    let error = worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap_err();
    match error {
        Error::Identity { field, left_value, right_value, left_hash, right_hash, .. } => {
            assert_eq!(field, "optimizer");
            assert_eq!((left_value.as_str(), right_value.as_str()), ("sgd", "adam"));
            assert_ne!(left_hash, right_hash);
        }
        other => panic!("{other}"),
    }
    drop((first, second));
}

#[test]
fn a_join_with_other_variables_names_the_first_difference() {
    let cluster = TestCluster::sgd(2, |config| config);
    let mut chief = cluster.worker(0);
    chief.join(&[vector("w", 3), vector("b", 4)], |_| ()).unwrap();
    let cases: [(Vec<VariableSpec>, &[&str]); 3] = [
        (vec![vector("w", 3), vector("b", 5)], &["\"b\"", "[5]", "[4]"]),
        (vec![vector("w", 3)], &["\"b\""]),
        (
            vec![VariableSpec::new("w", DType::F64, Shape::new([3]).unwrap()).unwrap()],
            &["\"w\"", "f64", "f32"],
        ),
    ];
    for (variables, expected) in cases {
        for worker in [0, 1] {
            let mut worker = cluster.worker(worker);
            let error = worker.join(&variables, |_| ()).unwrap_err();
            assert!(matches!(error, Error::Differs { .. }), "{error}");
            let error = error.to_string();
            assert!(expected.iter().all(|word| error.contains(word)), "{error}");
        }
    }
    cluster.stop();
}

#[test]
fn variables_are_checked_by_name_type_and_shape() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    assert_eq!(worker.token().unwrap_err(), Error::NotJoined { doing: "take a token" });
    let error = worker.join(&[vector("w", 3), vector("w", 3)], |_| ()).unwrap_err();
    assert!(error.to_string().contains("\"w\""), "{error}");
    let wrong = worker.join(&[vector("w", 3)], |initial| {
        initial.set("w", &[1.0_f32; 4]);
    });
    let error = wrong.unwrap_err().to_string();
    assert!(error.contains("4 elements") && error.contains("[3]"), "{error}");

    let count = VariableSpec::new("count", DType::I64, Shape::scalar()).unwrap();
    let params = worker.join(&[vector("w", 3), count], |_| ()).unwrap();
    let unknown = ViewError::Unknown { name: "x".into() };
    assert_eq!(params.view::<f32>("x").unwrap_err(), unknown);
    let wrong = ViewError::Type { name: "w".into(), asked: DType::F64, dtype: DType::F32 };
    assert_eq!(params.view::<f64>("w").unwrap_err(), wrong);
    let mut gradients = worker.gradients();
    let plain = ViewError::Plain { name: "count".into() };
    assert_eq!(gradients.view_mut::<i64>("count").unwrap_err(), plain);
    let twice = gradients.views_mut::<f32, 2>(["w", "w"]).unwrap_err();
    assert_eq!(twice, ViewError::Twice { name: "w".into() });
    let length = ViewError::Length { name: "w".into(), elements: 2, shape: "[3]".into() };
    assert_eq!(worker.assign("w", &[1.0_f32; 2]).unwrap_err(), Error::View(length));
    cluster.stop();
}

#[test]
fn non_finite_gradients_are_refused_counted_or_allowed() {
    let push = |policy| {
        let cluster = TestCluster::sgd(1, |config| config.non_finite(policy));
        let mut worker = cluster.worker(0);
        worker.join(&[vector("w", 5000)], |_| ()).unwrap();
        let result = push_bad(&mut worker);
        let metrics = cluster.handle().metrics();
        cluster.stop();
        (result, metrics)
    };
    let (result, metrics) = push(NonFinite::Reject);
    assert_eq!(bad_element(result), 4321);
    assert_eq!((metrics.pushes_dropped, metrics.global_step), (1, 0), "the shard drops the push");
    let (result, metrics) = push(NonFinite::Count);
    result.unwrap();
    assert_eq!((metrics.non_finite, metrics.global_step), (2, 1));
    let (result, metrics) = push(NonFinite::Allow);
    result.unwrap();
    assert_eq!((metrics.non_finite, metrics.global_step), (0, 1));
}

/// Checks that a worker scans a push for several shards before it sends it. Otherwise one shard
/// could apply a part of a push that another shard refuses.
#[test]
fn non_finite_gradients_for_several_shards_are_not_sent() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    worker.join(&[vector("v", 3), vector("w", 5000)], |_| ()).unwrap();
    assert_eq!(bad_element(push_bad(&mut worker)), 4321);
    for ps in &cluster.servers {
        assert_eq!(ps.handle().metrics().push_bytes, 0, "a refused gradient must not be sent");
    }
    cluster.stop();
}

/// The scan covers all parts of a large push, and the token of a push that it rejects goes back.
#[test]
fn a_large_push_with_a_bad_element_is_not_sent_to_any_shard() {
    let synchronous = Synchronous::new(1);
    for mode in [Mode::default(), synchronous.into()] {
        let configure = |config: PsConfig| config.last_step(1).mode(mode);
        let cluster = TestCluster::start(2, 1, Sgd::new(1.0), configure);
        let mut worker = cluster.worker(0);
        let elements = 2_700_000;
        let split = Partitioner::Fixed { shards: 2 };
        let variables = [vector("v", 5), vector("w", elements as u64).partitioner(split)];
        let mut params = worker.join(&variables, |_| ()).unwrap();
        for bad in [0, 700_001, elements / 2, elements - 1] {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("v").unwrap().fill(1.0);
            let w = gradients.view_mut::<f32>("w").unwrap();
            w.fill(1.0);
            w[bad] = f32::NEG_INFINITY;
            assert_eq!(bad_element(worker.push(token, gradients)), bad);
        }
        for ps in &cluster.servers {
            assert_eq!(ps.handle().metrics().push_bytes, 0, "not a byte was sent");
        }
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        assert!(params.view::<f32>("w").unwrap().iter().all(|value| *value == 0.0));
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("v").unwrap().fill(1.0);
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
        assert!(worker.token().unwrap().is_none());
        let mut reader = Reader::connect(cluster.config(0)).unwrap();
        while reader.pull(&mut params).unwrap() == 0 {}
        for name in ["v", "w"] {
            assert!(params.view::<f32>(name).unwrap().iter().all(|value| *value == -1.0));
        }
        cluster.stop();
    }
}

/// Checks that a refused push is discarded whole, and that its token, the only one, is returned.
/// The shard may find the bad element in any part, after it has applied others to shadow blocks.
#[test]
fn a_push_that_a_shard_refuses_is_discarded_whole() {
    let synchronous = Synchronous::new(1);
    for mode in [Mode::default(), synchronous.into()] {
        let cluster = TestCluster::sgd(1, |config| config.last_step(1).mode(mode));
        let mut worker = cluster.worker(0);
        let elements = 1_500_000;
        let mut params = worker.join(&[vector("w", elements as u64)], |_| ()).unwrap();
        for bad in [0, 600_000, elements - 1] {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            let w = gradients.view_mut::<f32>("w").unwrap();
            w.fill(1.0);
            w[bad] = f32::INFINITY;
            assert_eq!(bad_element(worker.push(token, gradients)), bad);
        }
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        assert!(params.view::<f32>("w").unwrap().iter().all(|value| *value == 0.0));
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
        assert!(worker.token().unwrap().is_none());
        assert_eq!(cluster.handle().metrics().global_step, 1);
        cluster.stop();
    }
}

/// Pushes a gradient of `w` with two non-finite elements, at 4321 and 4999.
fn push_bad(worker: &mut Worker) -> Result<Push, Error> {
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let w = gradients.view_mut::<f32>("w").unwrap();
    w.fill(1.0);
    w[4321] = f32::NAN;
    w[4999] = f32::NEG_INFINITY;
    worker.push(token, gradients)
}

#[test]
fn an_overflowing_update_is_refused_by_one_server_and_counted_by_two() {
    for servers in [1, 2] {
        let cluster = TestCluster::start(servers, 1, Sgd::new(1e30), |config| config);
        let mut worker = cluster.worker(0);
        let variables = [vector("small", 3), vector("large", 50_000)];
        let mut params = worker.join(&variables, |_| ()).unwrap();
        for (name, element) in [("small", 2), ("large", 49_999)] {
            let token = worker.token().unwrap().unwrap();
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>(name).unwrap()[element] = -1e10;
            let pushed = worker.push(token, gradients);
            if servers == 2 {
                assert!(matches!(pushed, Ok(Push::Applied { .. })), "{pushed:?}");
                continue;
            }
            let variable = name.to_owned();
            let value = f64::INFINITY;
            assert_eq!(pushed, Err(Error::Overflow { variable, element, value }));
            let token = worker.token().unwrap().unwrap();
            worker.pull(&token, &mut params).unwrap();
            assert!(params.view::<f32>(name).unwrap().iter().all(|&value| value == 0.0));
            drop(token);
        }
        let metrics: Vec<_> =
            cluster.servers.iter().map(|server| server.handle().metrics()).collect();
        let counted = metrics.iter().map(|metrics| metrics.overflows).sum::<u64>();
        let refused = metrics.iter().map(|metrics| metrics.overflows_refused).sum::<u64>();
        assert_eq!((counted, refused), if servers == 1 { (0, 2) } else { (2, 0) });
        cluster.stop();
    }
}

/// Returns the index of the element of `w` that the error names.
fn bad_element(result: Result<Push, Error>) -> usize {
    match result {
        Err(Error::NonFinite { variable, element, value }) => {
            assert!(variable == "w" && !value.is_finite());
            element
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_join_that_does_not_fit_names_need_and_limit() {
    let cluster =
        TestCluster::sgd(1, |config| config.storage(Storage::memory().bytes_max(1 << 20)));
    let mut worker = cluster.worker(0);
    let error = worker.join(&[vector("w", 1 << 20)], |_| ()).unwrap_err();
    let Error::Refused { refusal, .. } = &error else { panic!("{error}") };
    let Refusal::DoesNotFit { need, limit, .. } = refusal else { panic!("{error}") };
    assert!(*need > 4 << 20 && *limit == 1 << 20, "{error}");
    // A smaller variable fits.
    worker.join(&[vector("w", 1 << 10)], |_| ()).unwrap();
    cluster.stop();
}

#[test]
fn state_without_its_control_file_is_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    std::fs::create_dir_all(state.join("shard-0")).unwrap();
    std::fs::write(state.join("shard-0/values-1"), b"precious").unwrap();
    let listener = listen();
    let cluster = spec([listener.address()], 1);
    let storage = Storage::directory(state.clone()).bytes_max(1 << 20);
    let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0)).storage(storage);
    let error = listener.start(config).unwrap_err().to_string();
    assert!(error.contains("shard-0/control: it is missing"), "{error}");
    assert_eq!(std::fs::read(state.join("shard-0/values-1")).unwrap(), b"precious");
}

#[test]
fn a_reader_waits_for_values_only_until_its_deadline() {
    let cluster = TestCluster::sgd(1, |config| config);
    let config = cluster.config(0).connect_timeout(Duration::from_millis(300));
    let error = Reader::connect(config).unwrap_err().to_string();
    assert!(error.contains("initialize"), "{error}");
    cluster.stop();
}

#[test]
fn connections_without_a_hello_in_time_are_closed() {
    let cluster = TestCluster::sgd(1, |config| {
        config.network(Network::default().handshake_timeout(Duration::from_millis(300)))
    });
    let address = cluster.handle().address().to_owned();
    // One peer sends nothing; the other sends the start of a hello, byte by byte.
    let mut silent = TcpStream::connect(&address).unwrap();
    let mut dripping = TcpStream::connect(&address).unwrap();
    let drip = std::thread::spawn(move || {
        dripping.set_nodelay(true).unwrap();
        // Each byte would satisfy a timeout between bytes: only a deadline for the whole hello
        // ends this.
        for byte in b"ppsh".iter().chain(std::iter::repeat(&0)) {
            if dripping.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    silent.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(silent.read(&mut [0; 16]).unwrap(), 0, "the connection closes without a response");
    drip.join().unwrap();
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 1)], |_| ()).unwrap();
    cluster.stop();
}

#[test]
fn a_regular_file_at_a_socket_path_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("important.txt");
    std::fs::write(&path, b"keep").unwrap();
    let address = format!("unix:{}", path.display());
    let error = block_on(Ps::listen(&address)).unwrap_err();
    assert!(
        matches!(&error, ListenError::Occupied { address: named, .. } if *named == address),
        "{error}"
    );
    // No server will ever listen there, so a worker does not wait for it.
    let cluster = ClusterSpec::builder().job("ps", [&address]).workers(1).build().unwrap();
    let error = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::NoServer { .. })), "{error}");
    let expected = format!("a plain file has the path of {address}");
    assert!(error.to_string().contains(&expected), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"keep");
    // A socket without a listener is replaced; a socket with one is not.
    let orphan = directory.path().join("orphan.sock");
    drop(std::os::unix::net::UnixListener::bind(&orphan).unwrap());
    let address = format!("unix:{}", orphan.display());
    let listener = block_on(Ps::listen(&address)).unwrap();
    assert!(matches!(block_on(Ps::listen(&address)), Err(ListenError::InUse { .. })));
    // Dropping a listener keeps a socket that another process has since bound at its path.
    std::fs::remove_file(&orphan).unwrap();
    let other = std::os::unix::net::UnixListener::bind(&orphan).unwrap();
    drop(listener);
    assert!(orphan.exists());
    drop(other);
}
