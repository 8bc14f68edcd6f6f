//! What functions are given, and what they keep.

use pushpull::blocking::{FunctionClient, FunctionServer, Worker};
use pushpull::local::Cluster;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError, Signature, Value};
use pushpull::variable::{DType, Initializer};
use pushpull::{PsConfig, Sgd, TaskId, VariableSpec};

use crate::services::cluster::{connect, listen, start, start_one};

#[test]
fn values_of_every_size_arrive_and_return_equal() {
    let (_server, client) = start_one(Functions::new().elementwise());
    for elements in [0, 1, 3, 262_144, 262_145, 3_000_000] {
        let numbers: Vec<f32> = (0..elements).map(|n| n as f32).collect();
        let value = Value::tensor(&[elements], &numbers).unwrap();
        let call = Call::new("identity").feed("x", value.clone()).feed("note", "as it was");
        let outputs = client.call(call).unwrap();
        assert_eq!(outputs.get("x").unwrap(), &value);
        assert_eq!(outputs.get("note").unwrap().text().unwrap(), "as it was");
    }
}

#[test]
fn elementwise_functions_compute_in_both_types() {
    let (_server, client) = start_one(Functions::new().elementwise());
    let pair = |a: f64, b: f64| Value::tensor(&[2], &[a, b]).unwrap();
    let call = |name: &str| {
        let call = Call::new(name).feed("a", pair(6.0, 9.0)).feed("b", pair(2.0, 3.0));
        client.call(call).unwrap().view::<f64>().unwrap().to_vec()
    };
    assert_eq!(call("add"), [8.0, 12.0]);
    assert_eq!(call("mul"), [12.0, 27.0]);
    assert_eq!(call("div"), [3.0, 3.0]);
    assert_eq!(call("mean"), [4.0, 6.0]);
    let scaled =
        Call::new("mul").feed("a", 2.0_f32).feed("b", Value::tensor(&[1], &[4.0_f32]).unwrap());
    assert_eq!(client.call(scaled).unwrap().view::<f32>().unwrap(), [8.0]);
    let error = client.call(Call::new("mean")).unwrap_err().to_string();
    assert!(error.contains("the mean of no values"), "{error}");
    let error = client.call(Call::new("add").feed("a", 1.0_f32)).unwrap_err().to_string();
    assert!(error.contains("cannot find the value \"b\": there are a"), "{error}");
}

#[test]
fn variables_go_from_their_servers_to_the_task_that_computes() {
    let ps =
        Cluster::start(2, 1, |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0))).unwrap();
    let constant = |name: &str, value| {
        VariableSpec::f32(name, [2, 2]).unwrap().initializer(Initializer::Constant(value))
    };
    let variables = [constant("w", 2.0), constant("b", 5.0)];
    let mut chief = Worker::connect(ps.worker_config(0)).unwrap();
    chief.join(&variables, |_| ()).unwrap();
    let listener = listen(1).remove(0);
    let cluster = pushpull::ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", [listener.address()])
        .build()
        .unwrap();
    let functions = Functions::new().elementwise();
    let config = FunctionServerConfig::new(cluster, TaskId::worker(0), functions);
    let server = listener.start(config).unwrap();
    let client = connect(server.target());
    let of = |name: &str| Call::new(name).variable("a", "w").variable("b", "b");
    let [sum, product, ratio] = client.run([of("add"), of("mul"), of("div")]).unwrap();
    assert_eq!(sum.view::<f32>().unwrap(), [7.0; 4]);
    assert_eq!(product.view::<f32>().unwrap(), [10.0; 4]);
    assert_eq!(ratio.view::<f32>().unwrap(), [0.4; 4]);
    assert_eq!(sum.value().unwrap().to_string(), "f32 [2, 2]");
    let error = client.call(Call::new("identity").variable("x", "nothing")).unwrap_err();
    assert!(matches!(error, ServiceError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("there is no variable \"nothing\""), "{error}");
}

#[test]
fn without_parameter_servers_there_are_no_variables() {
    let (_server, client) = start_one(Functions::new().elementwise());
    let error = client.call(Call::new("identity").variable("x", "w")).unwrap_err().to_string();
    let expected = "there are no parameter servers: the job local serves functions alone";
    assert!(error.contains(expected), "{error}");
    let cluster = "alone=a:1;too=b:1;worker=c:1".parse().unwrap();
    let listener = listen(1).remove(0);
    let functions = Functions::new().elementwise();
    let server =
        listener.start(FunctionServerConfig::new(cluster, TaskId::worker(0), functions)).unwrap();
    let call = Call::new("identity").variable("x", "w");
    let error = connect(server.target()).call(call).unwrap_err().to_string();
    assert!(error.contains("cannot choose the job that holds the variables among"), "{error}");
}

#[test]
fn signatures_are_checked_before_the_function_runs() {
    let signature = Signature::new().input("x", DType::F32, [None]).output("value", DType::F32, []);
    let functions = Functions::new().typed("sum", signature, |call| {
        let x = call.feed::<f32>("x")?;
        assert!(x[0] >= 0.0, "the function runs");
        Ok(x.iter().sum::<f32>())
    });
    let (_server, client) = start_one(functions);
    let sum = |value: Value| client.call(Call::new("sum").feed("x", value));
    assert_eq!(
        sum(Value::tensor(&[2], &[1.0_f32, 2.0]).unwrap()).unwrap().element::<f32>(),
        Ok(3.0)
    );
    let error = sum(Value::tensor(&[1], &[-1.0_f64]).unwrap()).unwrap_err().to_string();
    assert!(error.contains("it is f64 [1], not f32 [?]"), "{error}");
    let description = client.describe(client.target()).unwrap();
    assert_eq!(description.functions["sum"], "(x: f32 [?]) -> (value: f32 [])");
    // An output that a call has left is checked as well, once it is fetched.
    let kept =
        client.keep(Call::new("sum").feed("x", Value::tensor(&[1], &[1.0_f32]).unwrap())).unwrap();
    let error = client.call(Call::new("sum").kept("x", &kept, "value")).unwrap_err().to_string();
    assert!(error.contains("it is f32 [], not f32 [?]"), "{error}");
}

#[test]
fn a_server_keeps_state_between_calls_but_not_over_a_restart() {
    #[derive(Default)]
    struct Counter(i64);
    let functions = Functions::new().add("count", |call| {
        let state = call.state::<Counter>();
        let mut counter = state.lock();
        counter.0 += 1;
        Ok(counter.0)
    });
    let (server, client) = start_one(functions.clone());
    let count = |client: &FunctionClient| {
        client.call(Call::new("count")).unwrap().element::<i64>().unwrap()
    };
    assert_eq!([count(&client), count(&client)], [1, 2]);
    assert_eq!(count(&connect(server.target())), 3, "all clients share it");
    server.stop();
    let again = FunctionServer::local(functions).unwrap();
    assert_eq!(count(&connect(again.target())), 1);
}

/// Starts a parameter server with the variable `big` of 1 MiB, and a function server whose
/// clients may use this many bytes.
fn start_with_big(bytes: u64) -> (Cluster, FunctionServer) {
    let ps = Cluster::start(1, 1, |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0)));
    let ps = ps.unwrap();
    let listener = listen(1).remove(0);
    let cluster = pushpull::ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", [listener.address()])
        .build()
        .unwrap();
    let functions = Functions::new().elementwise();
    let config =
        FunctionServerConfig::new(cluster, TaskId::worker(0), functions).client_bytes_max(bytes);
    let server = FunctionServer::start(listener, config).unwrap();
    let big = VariableSpec::f32("big", [1 << 18]).unwrap().initializer(Initializer::Constant(2.0));
    connect(server.target()).declare(&[big], |_| ()).unwrap();
    (ps, server)
}

#[test]
fn variables_are_charged_to_the_client_before_they_are_pulled() {
    let (_ps, server) = start_with_big(3 << 19);
    let client = connect(server.target());
    for _ in 0..3 {
        let mean = client.call(Call::new("mean").variable("x", "big")).unwrap();
        assert_eq!(mean.view::<f32>().unwrap()[0], 2.0, "what is charged is given back");
        let twice = Call::new("mean").variable("x", "big").variable("y", "big");
        let error = client.call(twice).unwrap_err().to_string();
        let expected = "the inputs of function \"mean\" need 1048576 bytes, and the client may \
                        use 524288 more";
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn outputs_of_other_tasks_are_charged_to_the_client_before_they_are_received() {
    let functions = Functions::new().elementwise();
    let (_, servers) = start("local", 2, &functions, |config| config.client_bytes_max(3 << 19));
    let client = connect(servers[0].target());
    let big = Value::zeros::<f32>(&[1 << 18]).unwrap();
    let kept = client.keep(Call::new("identity").feed("x", big)).unwrap();
    let on = |task: u32| Call::new("mean").on(&format!("/job:local/task:{task}"));
    for _ in 0..3 {
        client.call(on(1).kept("x", &kept, "x")).unwrap();
        let twice = |task| on(task).kept("x", &kept, "x").kept("y", &kept, "x");
        let error = client.call(twice(1)).unwrap_err();
        assert!(matches!(error, ServiceError::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("need 1048576 bytes"), "{error}");
        // On its own task it is charged once. Its mean needs the rest of the budget.
        let error = client.call(twice(0)).unwrap_err().to_string();
        assert!(error.contains("the outputs of function \"mean\""), "{error}");
    }
}
