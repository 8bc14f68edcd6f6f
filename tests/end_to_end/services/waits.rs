//! An error names what was waited for, and on which task.

use std::time::Duration;

use pushpull::blocking::{FunctionClient, Ps};
use pushpull::local::Cluster;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError};
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId};

use crate::services::cluster::{connect, listen, start};

/// Long enough for a server to answer before its client stops waiting.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn a_variable_before_a_chief_names_the_chief_and_not_the_worker() {
    let ps = Cluster::start(1, 1, |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0)));
    let ps = ps.unwrap();
    let worker = listen(1).remove(0);
    let cluster = ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", [worker.address()])
        .build()
        .unwrap();
    let functions = Functions::new()
        .elementwise()
        .add("train", |call| Ok(call.params()?.step() as i64))
        .add("read", |call| Ok(call.values()?.step() as i64));
    let config = FunctionServerConfig::new(cluster, TaskId::worker(0), functions);
    let server = worker.start(config).unwrap();
    let client = connect(server.target());
    let of_variable = Call::new("identity").variable("x", "w");
    for call in [of_variable, Call::new("train"), Call::new("read")] {
        let error = client.call(call.timeout(SHORT)).unwrap_err();
        assert!(matches!(error, ServiceError::Timeout { .. }), "{error:?}");
        let text = error.to_string();
        let chief = "for a chief to declare the variables and give them values, /job:ps/task:0 at ";
        assert!(text.contains(chief), "{text}");
    }
}

#[test]
fn a_server_without_functions_is_told_from_one_that_is_slow() {
    let listener = Ps::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    let cluster = ClusterSpec::builder().job("ps", [address.clone()]).build().unwrap();
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let _ps = Ps::start(listener, config).unwrap();
    // Not after the minute that a client waits for its target.
    let error = FunctionClient::connect(&address).unwrap_err();
    assert!(matches!(error, ServiceError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("this server offers no functions"), "{error}");
}

#[test]
fn a_call_that_waits_for_a_thread_says_so() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let (begun, begins) = std::sync::mpsc::channel();
    let functions = Functions::new().add("fine", |_| Ok(1_i64)).add("hold", move |_| {
        begun.send(())?;
        let _ = held.lock().unwrap().recv();
        Ok(())
    });
    let (_, servers) = start("local", 1, &functions, |config| config.threads(1));
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("hold")).unwrap();
    begins.recv().unwrap();
    let error = client.call(Call::new("fine").timeout(SHORT)).unwrap_err().to_string();
    assert!(error.contains("for a thread for function \"fine\""), "{error}");
    assert!(error.contains("on /job:local/task:0"), "{error}");
    drop((release, running));
}
