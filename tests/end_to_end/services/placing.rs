//! Where calls run: any client of any server calls functions on any task.

use std::time::Duration;

use pushpull::blocking::{Coordinator, FunctionClient, Ps, Worker};
use pushpull::cluster::DeviceFilters;
use pushpull::services::{
    Call, CoordinatorConfig, FunctionClientConfig, FunctionServerConfig, FunctionServerListener,
    Functions, Outputs, ServiceError,
};
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::services::cluster::{connect, listen, start, start_one};

fn functions() -> Functions {
    Functions::new()
        .add("where", |call| Ok(call.device_name().to_string()))
        .add_async("where_async", |call| async move { Ok(call.task().to_string()) })
}

#[test]
fn any_server_is_a_target_for_all_tasks() {
    let (cluster, servers) = start("local", 3, &functions(), |config| config);
    for server in &servers {
        let client = connect(server.target());
        assert_eq!((client.cluster(), client.target()), (cluster.clone(), server.task()));
        let on = |index: u32| Call::new("where").on(&format!("/job:local/task:{index}/cpu:0"));
        let outputs = client.run([on(0), on(1), on(2)]).unwrap();
        for (index, outputs) in outputs.iter().enumerate() {
            let expected = format!("/job:local/task:{index}/device:CPU:0");
            assert_eq!(outputs.text().unwrap(), expected);
        }
        // Without a task a call runs on the target.
        let here = client.call(Call::new("where_async")).unwrap();
        assert_eq!(here.text().unwrap(), server.task().to_string());
    }
}

#[test]
fn a_task_that_is_absent_delays_nobody_who_does_not_call_it() {
    let listeners = listen(2);
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.address()).collect();
    let builder = ClusterSpec::builder().job("worker", addresses);
    let cluster = builder.build().unwrap();
    let mut listeners = listeners.into_iter();
    let config = FunctionServerConfig::new(cluster, TaskId::worker(0), functions());
    let server = listeners.next().unwrap().start(config).unwrap();
    drop(listeners);
    let client = connect(server.target());
    assert!(client.call(Call::new("where")).is_ok());
    let absent = Call::new("where").on("/job:worker/task:1").timeout(Duration::from_millis(200));
    match client.call(absent) {
        Err(ServiceError::Unavailable { task, doing, .. }) => {
            assert_eq!((&task[..], &doing[..]), ("/job:worker/task:1", "call \"where\""));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn device_filters_keep_clients_and_servers_from_other_tasks() {
    let only = |names: &[&str]| DeviceFilters::new(names.iter().copied()).unwrap();
    let functions = functions().add("next", |call| {
        let call_next = Call::new("where").on("/job:worker/task:1");
        let here = call.client().call(Call::new("where"))?.text()?.to_owned();
        Ok(Outputs::new()
            .with("here", &here[..])
            .with("next", &call.client().call(call_next).unwrap_err().to_string()[..])
            .with("values", &call.values().unwrap_err().to_string()[..]))
    });
    // The filters of a server do not exclude itself.
    let filter = only(&["/job:evaluator"]);
    let mut listeners = listen(3);
    let addresses: Vec<String> = listeners.iter().map(FunctionServerListener::address).collect();
    let builder = ClusterSpec::builder().job("ps", [&addresses[2]]).job("worker", &addresses[..2]);
    let cluster = builder.build().unwrap();
    listeners.truncate(2);
    let start = |(index, listener): (u32, FunctionServerListener)| {
        let config =
            FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), functions.clone());
        listener.start(config.device_filters(filter.clone())).unwrap()
    };
    let servers: Vec<_> = (0..).zip(listeners).map(start).collect();

    let config = FunctionClientConfig::new(servers[0].target()).device_filters(only(&["/job:ps"]));
    let client = FunctionClient::connect(config).unwrap();
    let outputs = client.call(Call::new("next")).unwrap();
    let text = |name: &str| outputs.get(name).unwrap().text().unwrap().to_owned();
    assert_eq!(text("here"), "/job:worker/task:0/device:CPU:0");
    let excluded = "the device filters exclude /job:worker/task:1";
    assert!(text("next").contains(excluded), "{}", text("next"));
    assert!(text("values").contains("the device filters exclude /job:ps/task:0"));
    match client.call(Call::new("where").on("/job:worker/task:1")) {
        Err(ServiceError::NoTask { reason, .. }) => assert_eq!(reason, excluded),
        other => panic!("{other:?}"),
    }

    // A coordinator has the workers that its client may call.
    let config = FunctionClientConfig::new(servers[0].target()).device_filters(only(&["/job:ps"]));
    let client = FunctionClient::connect(config).unwrap();
    let coordinator = Coordinator::start(client, CoordinatorConfig::new()).unwrap();
    let schedule = |device: &str| coordinator.schedule(Call::new("where").on(device));
    let value = schedule("/job:worker/task:0").unwrap();
    assert!(value.fetch().is_ok());
    assert!(matches!(schedule("/job:worker/task:1"), Err(ServiceError::NoTask { .. })));
}

#[test]
fn a_coordinator_with_a_name_needs_the_parameter_servers() {
    let ps = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = ps.local_addr().unwrap().to_string();
    let listener = listen(1).remove(0);
    let builder = ClusterSpec::builder().job("ps", [address]).job("worker", [listener.address()]);
    let config =
        FunctionServerConfig::new(builder.build().unwrap(), TaskId::worker(0), functions());
    let server = listener.start(config).unwrap();
    let filters = DeviceFilters::new(["/job:worker"]).unwrap();
    let config = FunctionClientConfig::new(server.target()).device_filters(filters);
    let client = FunctionClient::connect(config).unwrap();
    let error = Coordinator::resume(client, "name", CoordinatorConfig::new()).unwrap_err();
    match error {
        ServiceError::NoTask { reason, .. } => {
            assert_eq!(reason, "the device filters exclude /job:ps/task:0");
        }
        other => panic!("{other:?}"),
    }
    ps.set_nonblocking(true).unwrap();
    assert!(ps.accept().is_err(), "nobody has connected");
}

/// Neither the ps nor worker 0 waits for worker 1, as with the device filters of the classic
/// system.
#[test]
fn a_worker_trains_and_computes_while_another_is_absent() {
    let ps = Ps::listen("127.0.0.1:0").unwrap();
    let workers = listen(2);
    let cluster = ClusterSpec::builder()
        .job("ps", [ps.address()])
        .job("worker", workers.iter().map(FunctionServerListener::address))
        .build()
        .unwrap();
    // Nobody listens at the address of worker 1.
    let listener = workers.into_iter().next().unwrap();
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).last_step(3);
    let _ps = Ps::start(ps, config).unwrap();
    let functions = Functions::new().elementwise();
    let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(0), functions);
    let server = listener.start(config).unwrap();
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    worker.join(&[VariableSpec::f32("w", [2]).unwrap()], |_| ()).unwrap();
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(-1.0);
        worker.push(token, gradients).unwrap();
    }
    let double = Call::new("add").variable("a", "w").variable("b", "w");
    let outputs = connect(server.target()).call(double).unwrap();
    assert_eq!(outputs.view::<f32>().unwrap(), [6.0; 2]);
    worker.leave().unwrap();
}

#[test]
fn a_device_is_chosen_by_its_name_or_refused_with_the_reason() {
    let (_server, client) = start_one(functions());
    let on = |device: &str| {
        client.call(Call::new("where").on(device)).map(|o| o.text().unwrap().to_owned())
    };
    assert_eq!(on("/cpu:0").unwrap(), "/job:local/task:0/device:CPU:0");
    let refused = on("/gpu:7").unwrap_err().to_string();
    assert!(
        refused.starts_with(
            "cannot call \"where\": /job:local/task:0 refuses: there is no device \"/gpu:7\""
        ),
        "{refused}"
    );
    for (device, expected) in [
        ("/job:ps/task:0", "cannot find the job \"ps\": the cluster has the jobs local"),
        ("/job:local/task:9", "cannot find /job:local/task:9: no task with this index, only 0"),
        ("/task:x", "cannot call \"where\""),
    ] {
        let error = on(device).unwrap_err();
        assert!(matches!(error, ServiceError::NoTask { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn without_a_driver_a_gpu_is_refused_and_says_why() {
    let (_server, client) = start_one(functions());
    let description = client.describe(&TaskId::new("local", 0)).unwrap();
    let gpu = description.devices.iter().find(|(name, _)| name.ends_with("GPU:0"));
    let Some((_, Some(reason))) = gpu else {
        println!("SKIPPED: this machine has a CUDA device");
        return;
    };
    let error = client.call(Call::new("where").on("/gpu:0")).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
    assert_eq!(description.functions["where"], "(..)");
}

#[test]
fn a_call_runs_on_another_device_only_if_it_says_so() {
    let (_server, client) = start_one(functions());
    let call = Call::new("where").on("/gpu:99");
    let error = client.call(call.clone()).unwrap_err().to_string();
    assert!(error.contains("/gpu:99"), "{error}");
    let ran_on = client.call(call.or_any()).unwrap();
    assert_eq!(ran_on.text().unwrap(), "/job:local/task:0/device:CPU:0");
}

#[test]
fn a_client_goes_to_the_next_target() {
    let (_cluster, servers) = start("local", 1, &functions(), |config| config);
    let nobody = listen(1).remove(0).address();
    let config = FunctionClientConfig::new(&nobody).or(servers[0].target());
    let client =
        FunctionClient::connect(config.connect_timeout(crate::services::cluster::LONG)).unwrap();
    assert!(client.call(Call::new("where")).is_ok());
    let config = FunctionClientConfig::new(&nobody).connect_timeout(Duration::from_millis(100));
    let error = FunctionClient::connect(config).unwrap_err();
    assert!(matches!(&error, ServiceError::Unavailable { task, .. } if *task == nobody), "{error}");
}
