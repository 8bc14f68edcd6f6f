//! Functions that fail, panic or do not return, and what it means for others.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use pushpull::blocking::{FunctionClient, Ps};
use pushpull::services::{
    Call, FunctionClientConfig, FunctionError, FunctionServerConfig, Functions, ServiceError,
};
use pushpull::variable::Initializer;
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId, VariableSpec};

use crate::services::cluster::{LONG, connect, listen, start, start_one};

#[test]
fn an_error_or_a_panic_is_that_of_its_call() {
    let functions = Functions::new()
        .add::<()>("fail", |_| Err(FunctionError::new("no such user").retryable()))
        .add::<()>("panic", |_| panic!("index {} out of bounds", 7))
        .add_async::<(), _>("panic_async", |_| async { panic!("later") })
        .add_async("panic_first", |call| {
            assert!(call.depth() > 0, "at once");
            async { Ok(()) }
        })
        .add("fine", |_| Ok(1_i64));
    let (_server, client) = start_one(functions);
    for _ in 0..3 {
        match client.call(Call::new("fail")) {
            Err(ServiceError::Failed { retry: true, detail, .. }) => {
                assert_eq!(detail, "no such user")
            }
            other => panic!("{other:?}"),
        }
        for (name, text) in [
            ("panic", "index 7 out of bounds"),
            ("panic_async", "later"),
            ("panic_first", "at once"),
        ] {
            match client.call(Call::new(name)) {
                Err(ServiceError::Panicked { detail, .. }) => assert_eq!(detail, text),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(client.call(Call::new("fine")).unwrap().element::<i64>(), Ok(1));
    }
}

#[test]
fn a_target_whose_name_has_no_address_is_reported_at_once() {
    let (sender, reports) = mpsc::channel();
    let target = "no-such-host.invalid:1";
    let config =
        FunctionClientConfig::new(target).connect_timeout(LONG).on_unreachable(move |server| {
            // The reports outlast the test.
            let _ = sender.send(server.clone());
        });
    // It tries until the program ends.
    std::thread::spawn(move || FunctionClient::connect(config));
    let report = reports.recv_timeout(LONG / 2).unwrap();
    assert_eq!(report.address, target);
    assert!(report.reason.contains("cannot resolve \"no-such-host.invalid:1\""), "{report}");
}

#[test]
fn a_panic_in_the_report_of_an_unreachable_server_is_contained() {
    let (sender, reports) = mpsc::channel();
    let target = "unix:/no-such-directory/server";
    let timeout = Duration::from_secs(1);
    let config =
        FunctionClientConfig::new(target).connect_timeout(timeout).on_unreachable(move |_| {
            sender.send(()).unwrap();
            panic!("the log is full");
        });
    let error = FunctionClient::connect(config).unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().ends_with("on_unreachable panicked: the log is full"), "{error}");
    assert!(reports.iter().count() > 1, "it is tried again");
}

#[test]
fn a_function_that_does_not_return_keeps_no_other_out() {
    let (release, stuck) = mpsc::channel::<()>();
    let stuck = Arc::new(std::sync::Mutex::new(stuck));
    let functions = Functions::new()
        .add("stuck", move |_| {
            let _ = stuck.lock().unwrap_or_else(|poison| poison.into_inner()).recv();
            Ok(())
        })
        .add("fine", |_| Ok(1_i64));
    let (_cluster, servers) = start("local", 1, &functions, |config| config.threads(1));
    let client = connect(servers[0].target());
    let stuck = || client.call(Call::new("stuck").timeout(Duration::from_millis(50)));
    for _ in 0..4 {
        let error = stuck().unwrap_err();
        assert!(matches!(&error, ServiceError::Timeout { .. }), "{error}");
        // The one thread of the server is taken, and another has its place.
        assert_eq!(client.call(Call::new("fine")).unwrap().element::<i64>(), Ok(1));
    }
    let refused = loop {
        // The deadline of the client may pass a moment before that of the server.
        let error = client.call(Call::new("stuck")).unwrap_err().to_string();
        if error.contains("have passed their deadlines") {
            break error;
        }
    };
    assert!(refused.contains("4 executions of function \"stuck\""), "{refused}");
    drop(release);
}

#[test]
fn a_function_learns_that_nobody_waits() {
    let (sender, told) = mpsc::channel();
    let functions = Functions::new()
        .add("wait", {
            let sender = sender.clone();
            move |call| {
                sender.send("begun")?;
                while !call.is_cancelled() {
                    std::thread::yield_now();
                }
                sender.send("blocking")?;
                Ok(())
            }
        })
        .add_async("wait_async", move |call| {
            let sender = sender.clone();
            async move {
                sender.send("begun")?;
                call.cancelled().await;
                sender.send("asynchronous")?;
                Ok(())
            }
        });
    let (_server, client) = start_one(functions);
    for (name, expected) in [("wait", "blocking"), ("wait_async", "asynchronous")] {
        // The caller drops it.
        let running = client.inner().start(Call::new(name)).unwrap();
        assert_eq!(told.recv_timeout(LONG), Ok("begun"));
        drop(running);
        assert_eq!(told.recv_timeout(LONG), Ok(expected));
        // Its deadline passes.
        let late = client.call(Call::new(name).timeout(Duration::from_millis(20)));
        assert!(late.is_err());
        assert_eq!(told.recv_timeout(LONG), Ok("begun"));
        assert_eq!(told.recv_timeout(LONG), Ok(expected));
    }
}

#[test]
fn a_client_that_vanishes_in_mid_call_is_forgotten() {
    let (sender, told) = mpsc::channel();
    let functions = Functions::new().add("wait", move |call| {
        sender.send("begun")?;
        while !call.is_cancelled() {
            std::thread::yield_now();
        }
        sender.send("cancelled")?;
        Ok(())
    });
    let lease = Duration::from_millis(100);
    let (_cluster, servers) = start("local", 1, &functions, |config| config.lease(lease));
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("wait")).unwrap();
    assert_eq!(told.recv_timeout(LONG), Ok("begun"));
    // Nobody cancels the call.
    std::mem::forget(running);
    drop(client);
    assert_eq!(told.recv_timeout(LONG), Ok("cancelled"));
}

#[test]
fn functions_use_the_servers_that_take_the_place_of_others() {
    let listener = Ps::listen("127.0.0.1:0").unwrap();
    let worker = listen(1).remove(0);
    let address = listener.address();
    let cluster = ClusterSpec::builder()
        .job("ps", [address.clone()])
        .job("worker", [worker.address()])
        .build()
        .unwrap();
    let functions = Functions::new()
        .add("train", |call| Ok(call.params()?.view::<f32>("w")?[0]))
        .add("read", |call| Ok(call.values()?.view::<f32>("w")?[0]));
    let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(0), functions);
    let server = worker.start(config).unwrap();
    let client = connect(server.target());
    let start = |listener, shards, value| {
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).shards(shards);
        let ps = Ps::start(listener, config).unwrap();
        let w = VariableSpec::f32("w", [2]).unwrap().initializer(Initializer::Constant(value));
        client.declare(&[w], |_| ()).unwrap();
        ps
    };
    let call = |name| client.call(Call::new(name)).map(|it| it.element::<f32>().unwrap());
    let first = start(listener, 1, 1.0);
    assert_eq!((call("train").unwrap(), call("read").unwrap()), (1.0, 1.0));
    first.stop().unwrap();
    // Of another number of shards, which the sessions of the first refuse.
    let _second = start(Ps::listen(&address).unwrap(), 2, 2.0);
    for name in ["train", "read"] {
        let _ = call(name);
        assert_eq!(call(name).unwrap(), 2.0, "{name}");
    }
}
