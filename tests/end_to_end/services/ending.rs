//! Servers that stop or are lost.

use std::sync::mpsc;
use std::time::Duration;

use pushpull::blocking::FunctionServer;
use pushpull::error::Chain;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError};
use pushpull::{ClusterSpec, TaskId};

use crate::services::cluster::{connect, listen, start};

#[test]
fn a_stopping_server_ends_the_calls_that_it_has_accepted() {
    let (started, starts) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let functions = Functions::new().add("wait", move |_| {
        started.send(())?;
        released.lock().unwrap_or_else(|poison| poison.into_inner()).recv()?;
        Ok(7_i64)
    });
    let (_cluster, mut servers) = start("local", 1, &functions, |config| config);
    let server = servers.remove(0);
    let client = connect(server.target());
    let running = client.inner().start(Call::new("wait")).unwrap();
    starts.recv().unwrap();
    let handle = server.handle();
    handle.stop();
    // New calls are refused, the one under way ends.
    let refused = client.call(Call::new("wait")).unwrap_err().to_string();
    assert!(refused.contains("the server is stopping"), "{refused}");
    release.send(()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let outputs = runtime.block_on(running).unwrap();
    assert_eq!(outputs.element::<i64>(), Ok(7));
    server.serve();
    let error = client.call(Call::new("wait").timeout(Duration::from_millis(100))).unwrap_err();
    assert!(matches!(error, ServiceError::Unavailable { .. }), "{error}");
}

#[test]
fn a_lost_server_is_named_and_the_client_goes_elsewhere() {
    let functions = Functions::new()
        .add("wait", |call| {
            while !call.is_cancelled() {
                std::thread::yield_now();
            }
            Ok(())
        })
        .add("fine", |_| Ok(1_i64));
    let configure = |config: FunctionServerConfig| config.grace(Duration::ZERO);
    let (_cluster, mut servers) = start("local", 2, &functions, configure);
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("wait")).unwrap();
    assert!(client.call(Call::new("fine")).is_ok());
    servers.remove(0).stop();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    match runtime.block_on(running) {
        Err(ServiceError::Lost { task, .. } | ServiceError::Cancelled { doing: task }) => {
            assert!(task.contains("/job:local/task:0") || task.contains("wait"), "{task}");
        }
        other => panic!("{other:?}"),
    }
    // The other task is called through the same client, and is a target itself.
    assert!(client.call(Call::new("fine").on("/job:local/task:1")).is_ok());
    assert!(connect(servers[0].target()).call(Call::new("fine")).is_ok());
}

#[test]
fn a_call_to_a_restarted_server_runs() {
    let listener = listen(1).remove(0);
    let address = listener.address();
    let cluster = ClusterSpec::builder().job("local", [address.clone()]).build().unwrap();
    let functions = Functions::new().add("fine", |_| Ok(1_i64));
    let config =
        || FunctionServerConfig::new(cluster.clone(), TaskId::new("local", 0), functions.clone());
    let server = FunctionServer::start(listener, config()).unwrap();
    let client = connect(server.target());
    assert!(client.call(Call::new("fine")).is_ok());
    server.stop();
    let listener = FunctionServer::listen(&address).unwrap();
    let _server = FunctionServer::start(listener, config()).unwrap();
    assert!(client.call(Call::new("fine")).is_ok());
}

#[test]
fn a_server_of_an_unknown_task_does_not_start() {
    let listener = listen(1).remove(0);
    let cluster = ClusterSpec::builder().job("local", [listener.address()]).build().unwrap();
    let error = listener
        .start(FunctionServerConfig::new(cluster, TaskId::worker(0), Functions::new()))
        .unwrap_err();
    assert_eq!(
        Chain(&error).to_string(),
        "cannot start /job:worker/task:0: cannot find the job \"worker\": the cluster has the jobs \
         local"
    );
    let error = Chain(&FunctionServer::listen("nonsense").unwrap_err()).to_string();
    assert!(error.contains("it is not host:port or unix:/path"), "{error}");
}
