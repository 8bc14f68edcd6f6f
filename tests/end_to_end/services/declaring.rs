//! Clients that declare variables, beside functions and workers that train with them.

use std::time::Duration;

use pushpull::blocking::{FunctionServer, Reader, Worker};
use pushpull::error::Chain;
use pushpull::local::Cluster;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError};
use pushpull::variable::Initializer;
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::services::cluster::{connect, listen};

fn variable() -> VariableSpec {
    VariableSpec::f32("w", [2]).unwrap().initializer(Initializer::Constant(3.0))
}

/// Adds 1 to the variable.
fn step() -> Functions {
    Functions::new().add("step", |call| {
        let mut gradients = call.gradients()?;
        gradients.view_mut::<f32>("w")?.fill(-1.0);
        call.push(gradients)
    })
}

/// Two parameter servers, and one worker task that serves a function.
fn start() -> (Cluster, ClusterSpec, FunctionServer) {
    let ps = Cluster::start(2, 1, |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0)));
    let ps = ps.unwrap();
    let worker = listen(1).remove(0);
    let cluster = ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", [worker.address()])
        .build()
        .unwrap();
    let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(0), step());
    let server = FunctionServer::start(worker, config).unwrap();
    (ps, cluster, server)
}

fn values(cluster: &ClusterSpec) -> Vec<f32> {
    let config = WorkerConfig::new(cluster.clone(), TaskId::new("reader", 0));
    let mut reader = Reader::connect(config).unwrap();
    let mut params = reader.params();
    reader.pull(&mut params).unwrap();
    params.view::<f32>("w").unwrap().to_vec()
}

#[test]
fn a_client_that_runs_a_hundred_times_disturbs_nobody_who_trains() {
    let (_ps, cluster, server) = start();
    connect(server.target()).declare(&[variable()], |_| ()).unwrap();
    // The chief of the cluster trains, too: its task is that of the functions.
    let mut chief = Worker::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(0))).unwrap();
    let _ = chief.join(&[variable()], |_| panic!("the variables have values")).unwrap();
    for run in 0..100_i64 {
        let client = connect(server.target());
        client.declare(&[variable()], |_| panic!("the variables have values")).unwrap();
        let pushed = client.call(Call::new("step")).unwrap();
        assert_eq!(pushed.get("step").unwrap().element::<i64>(), Ok(2 * run + 1));
        let token = chief.token().unwrap().unwrap();
        let mut gradients = chief.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(-1.0);
        chief.push(token, gradients).unwrap();
    }
    assert_eq!(values(&cluster), [203.0; 2]);
    // Only the newest chief may, so no client was one.
    chief.finish().unwrap();
    chief.leave().unwrap();
}

#[test]
fn programs_that_join_as_the_task_of_the_functions_do_not_fence_them() {
    let (_ps, cluster, server) = start();
    let client = connect(server.target());
    for run in 0..10_i64 {
        let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0));
        let mut chief = Worker::connect(config).unwrap();
        let _ = chief.join(&[variable()], |_| ()).unwrap();
        let pushed = client.call(Call::new("step")).unwrap();
        assert_eq!(pushed.get("step").unwrap().element::<i64>(), Ok(run + 1));
        chief.leave().unwrap();
    }
    assert_eq!(values(&cluster), [13.0; 2]);
}

#[test]
fn functions_whose_session_is_fenced_join_again() {
    let (_ps, cluster, server) = start();
    let client = connect(server.target());
    client.declare(&[variable()], |_| ()).unwrap();
    client.call(Call::new("step")).unwrap();
    // A second server of the task, as after a restart that the first has survived.
    let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(0), step());
    let second = listen(1).remove(0).start(config).unwrap();
    let other = connect(second.target());
    for _ in 0..3 {
        let _ = other.call(Call::new("step")).unwrap();
        // The first has lost its session to the second, which the call may still find out.
        match client.call(Call::new("step")) {
            Ok(_) | Err(ServiceError::Failed { retry: true, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        let _ = client.call(Call::new("step")).unwrap();
        match other.call(Call::new("step")) {
            Ok(_) | Err(ServiceError::Failed { retry: true, .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn clients_that_declare_at_once_agree() {
    let (_ps, cluster, server) = start();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| connect(server.target()).declare(&[variable()], |_| ()).unwrap());
        }
    });
    assert_eq!(values(&cluster), [3.0; 2]);
    let other = VariableSpec::f32("other", [2]).unwrap();
    let declared = connect(server.target()).declare(&[other], |_| ());
    let error = Chain(&declared.unwrap_err()).to_string();
    assert!(error.contains("cannot declare the variables: "), "{error}");
    assert!(error.contains("\"w\"") && error.contains("\"other\""), "{error}");
}

#[test]
fn the_values_of_a_client_that_another_displaces_while_it_fills_are_not_lost() {
    let (_ps, cluster, server) = start();
    std::thread::scope(|scope| {
        for delay in [Duration::ZERO, Duration::from_millis(500)] {
            let client = connect(server.target());
            scope.spawn(move || {
                std::thread::sleep(delay);
                // The first is fenced by the second while it fills, and waits for a shorter time.
                let fill = |values: &mut pushpull::worker::InitialValues<'_>| {
                    std::thread::sleep(Duration::from_secs(3));
                    values.set("w", &[7.0_f32; 2]);
                };
                client.declare(&[variable()], fill).unwrap();
            });
        }
    });
    assert_eq!(values(&cluster), [7.0; 2]);
}
