//! A coordinator: calls run once on whichever worker is there, and their effects count once.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use pushpull::blocking::{Coordinator, FunctionClient, FunctionServer, Worker};
use pushpull::local::Cluster;
use pushpull::services::{
    Call, CoordinatorConfig, FunctionClientConfig, FunctionError, FunctionServerConfig,
    FunctionServerListener, Functions, ServiceError, Signature,
};
use pushpull::variable::DType;
use pushpull::{ClusterSpec, PsConfig, Reader, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::services::cluster::{LONG, block_on, listen};

/// Parameter servers with the variables `a` and `b`, and addresses for workers.
struct Place {
    _ps: Cluster,
    cluster: ClusterSpec,
    listeners: Vec<FunctionServerListener>,
}

fn place(ps: u32, workers: usize) -> Place {
    let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(1.0)).elastic_workers(true);
    let ps = Cluster::start(ps, 1, start).unwrap();
    let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap());
    let mut chief = Worker::connect(ps.worker_config(0)).unwrap();
    chief.join(&variables, |_| ()).unwrap();
    chief.leave().unwrap();
    let listeners = listen(workers);
    let cluster = ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", listeners.iter().map(FunctionServerListener::address))
        .build()
        .unwrap();
    Place { _ps: ps, cluster, listeners }
}

impl Place {
    fn start(&mut self, functions: &Functions) -> Vec<FunctionServer> {
        let listeners = std::mem::take(&mut self.listeners).into_iter().enumerate();
        listeners.map(|(index, listener)| self.start_at(index, listener, functions)).collect()
    }

    fn start_at(
        &self,
        index: usize,
        listener: FunctionServerListener,
        functions: &Functions,
    ) -> FunctionServer {
        let task = TaskId::worker(index as u32);
        let config = FunctionServerConfig::new(self.cluster.clone(), task, functions.clone());
        FunctionServer::start(listener, config.grace(Duration::ZERO)).unwrap()
    }

    fn values(&self) -> [Vec<f32>; 2] {
        let config = WorkerConfig::new(self.cluster.clone(), TaskId::worker(99));
        block_on(async {
            let mut reader = Reader::connect(config).await.unwrap();
            let mut params = reader.params();
            reader.pull(&mut params).await.unwrap();
            ["a", "b"].map(|name| params.view::<f32>(name).unwrap().to_vec())
        })
    }
}

/// Adds 1 to every variable.
fn increment() -> Functions {
    Functions::new().add("increment", |call| {
        let mut gradients = call.gradients()?;
        for name in ["a", "b"] {
            gradients.view_mut::<f32>(name)?.fill(-1.0);
        }
        call.push(gradients)
    })
}

fn coordinator(target: &str, config: CoordinatorConfig) -> Coordinator {
    let client = FunctionClientConfig::new(target).timeout(LONG);
    Coordinator::start(FunctionClient::connect(client).unwrap(), config).unwrap()
}

fn resume(target: &str, name: &str) -> Coordinator {
    let client = FunctionClientConfig::new(target).timeout(LONG);
    let client = FunctionClient::connect(client).unwrap();
    Coordinator::resume(client, name, CoordinatorConfig::new()).unwrap()
}

#[test]
fn a_function_trains_through_its_server() {
    let mut place = place(2, 1);
    let servers = place.start(&increment());
    let client = crate::services::cluster::connect(servers[0].target());
    for step in 1..=3 {
        let outputs = client.call(Call::new("increment")).unwrap();
        assert_eq!(outputs.get("outcome").unwrap().text(), Ok("applied"));
        assert_eq!(outputs.get("step").unwrap().element::<i64>(), Ok(step));
    }
    assert_eq!(place.values(), [vec![3.0; 3], vec![3.0; 3]]);
}

#[test]
fn five_increments_give_the_values_one_to_five() {
    let functions = Functions::new().add("count", |call| {
        let count = call.state::<i64>();
        let mut count = count.lock();
        *count += 1;
        Ok(*count)
    });
    let mut place = place(1, 1);
    let servers = place.start(&functions);
    let coordinator = coordinator(servers[0].target(), CoordinatorConfig::new());
    let values: Vec<_> =
        (0..5).map(|_| coordinator.schedule(Call::new("count")).unwrap()).collect();
    coordinator.join().unwrap();
    assert!(coordinator.done().unwrap());
    let mut fetched: Vec<i64> =
        values.iter().map(|v| v.fetch().unwrap().element().unwrap()).collect();
    fetched.sort_unstable();
    assert_eq!((fetched, coordinator.settled()), (vec![1, 2, 3, 4, 5], 5));
}

#[test]
fn the_first_error_cancels_what_waits_and_is_returned_once() {
    let (sender, started) = mpsc::channel();
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let functions = Functions::new()
        .add("wait", move |_| {
            sender.send(())?;
            let _ = gate.lock().unwrap_or_else(|poison| poison.into_inner()).recv();
            Ok(1_i64)
        })
        .add::<()>("fail", |_| Err(FunctionError::new("no such user")))
        .add("fine", |_| Ok(2_i64));
    let mut place = place(1, 2);
    let servers = place.start(&functions);
    let coordinator = coordinator(servers[0].target(), CoordinatorConfig::new());
    let schedule = |name: &str| coordinator.schedule(Call::new(name)).unwrap();
    let under_way = schedule("wait");
    started.recv_timeout(LONG).unwrap();
    let failed = schedule("fail");
    assert!(matches!(failed.fetch(), Err(ServiceError::Failed { .. })));
    drop(release);
    match coordinator.join() {
        Err(ServiceError::Failed { detail, .. }) => assert_eq!(detail, "no such user"),
        other => panic!("{other:?}"),
    }
    assert_eq!(under_way.fetch().unwrap().element::<i64>(), Ok(1));
    coordinator.join().unwrap();
    assert_eq!(schedule("fine").fetch().unwrap().element::<i64>(), Ok(2));
}

#[test]
fn a_pinned_call_runs_on_its_worker_and_others_go_elsewhere() {
    let functions = Functions::new().add("where", |call| Ok(call.task().to_string()));
    let mut place = place(1, 2);
    let mut servers = place.start(&functions);
    let coordinator = coordinator(servers[0].target(), CoordinatorConfig::new());
    let pinned = |index: u32| Call::new("where").on(&format!("/job:worker/task:{index}"));
    let value = coordinator.schedule(pinned(1)).unwrap();
    assert_eq!(value.fetch().unwrap().text(), Ok("/job:worker/task:1"));
    let address = servers[1].target().to_owned();
    servers.pop().unwrap().stop();
    let waits = coordinator.schedule(pinned(1)).unwrap();
    // More than the window of calls that shards count.
    for _ in 0..100 {
        let value = coordinator.schedule(Call::new("where")).unwrap();
        assert_eq!(value.fetch().unwrap().text(), Ok("/job:worker/task:0"));
    }
    assert!(waits.try_fetch().is_none());
    servers.push(place.start_at(1, FunctionServer::listen(&address).unwrap(), &functions));
    assert_eq!(waits.fetch().unwrap().text(), Ok("/job:worker/task:1"));
    let error = coordinator.schedule(pinned(7)).unwrap_err().to_string();
    assert!(error.contains("/job:worker/task:7 is no worker"), "{error}");
}

#[test]
fn each_worker_has_a_value_of_its_own_and_makes_it_again() {
    let functions = Functions::new()
        .add("open", |call| Ok(f64::from(call.task().index) + 10.0))
        .add("use", |call| {
            Ok(format!("{} {}", call.task().index, call.input("data")?.element::<f64>()?))
        });
    let mut place = place(1, 2);
    let mut servers = place.start(&functions);
    let coordinator = coordinator(servers[0].target(), CoordinatorConfig::new());
    let data = coordinator.per_worker(Call::new("open")).unwrap();
    let used = |index: u32| {
        let call = Call::new("use").per_worker("data", &data, "value");
        let call = call.on(&format!("/job:worker/task:{index}"));
        let value = coordinator.schedule(call).unwrap();
        value.fetch().unwrap().text().unwrap().to_owned()
    };
    assert_eq!([used(0), used(1)], ["0 10", "1 11"]);
    let address = servers[1].target().to_owned();
    servers.pop().unwrap().stop();
    servers.push(place.start_at(1, FunctionServer::listen(&address).unwrap(), &functions));
    assert_eq!(used(1), "1 11");
}

/// Tells a thread to end, also if this one panics.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn scheduled_increments_count_once_whoever_is_lost() {
    let calls = match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => 1_000,
        None => 150,
    };
    let mut place = place(2, 3);
    let mut servers = place.start(&increment());
    let addresses: Vec<String> = servers.iter().map(|s| s.target().to_owned()).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let place = &place;
        let losing = scope.spawn(|| {
            let mut lost = 0;
            while !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(30));
                let index = 1 + lost % 2;
                drop(std::mem::replace(
                    &mut servers[index],
                    FunctionServer::local(Functions::new()).unwrap(),
                ));
                let listener = FunctionServer::listen(&addresses[index]).unwrap();
                servers[index] = place.start_at(index, listener, &increment());
                lost += 1;
            }
            lost
        });
        let over = SetOnDrop(&done);
        // The coordinator is given up again and again, in the middle of its calls.
        let mut runs = 0;
        loop {
            runs += 1;
            let coordinator = resume(&addresses[0], "counter");
            let values: Vec<_> =
                (0..calls).map(|_| coordinator.schedule(Call::new("increment")).unwrap()).collect();
            if coordinator.settled() >= calls as u64 {
                break;
            }
            let until = (coordinator.settled() as usize + calls / 5).min(calls - 1);
            let _ = values[until].fetch();
            if until == calls - 1 {
                coordinator.join().unwrap();
            }
        }
        drop(over);
        println!(
            "{calls} increments, {runs} runs of the coordinator, {} lost workers",
            losing.join().unwrap()
        );
    });
    assert_eq!(place.values(), [vec![calls as f32; 3], vec![calls as f32; 3]]);
}

/// Nothing begins after an error, so a fetch would wait for ever.
#[test]
fn a_fetch_of_a_call_that_begins_no_more_says_that_it_is_cancelled() {
    let functions = Functions::new()
        .add::<()>("fail", |_| Err(FunctionError::new("no such user")))
        .add("one", |_| Ok(1_i64));
    let mut place = place(1, 1);
    let servers = place.start(&functions);
    let client = FunctionClient::connect(servers[0].target()).unwrap();
    let config = CoordinatorConfig::new().calls_per_worker(1);
    let coordinator = Coordinator::start(client, config).unwrap();
    let schedule = |name| coordinator.schedule(Call::new(name)).unwrap();
    let failed = schedule("fail");
    let mut errors = Vec::new();
    let mut values = Vec::new();
    for _ in 0..20 {
        match coordinator.schedule(Call::new("one")) {
            Ok(value) => values.push(value),
            Err(error) => errors.push(error),
        }
    }
    let error = failed.fetch().unwrap_err();
    assert!(error.to_string().contains("no such user"), "{error}");
    // What was scheduled before the error is cancelled as soon as it is asked for.
    for value in values {
        let fetched = value.fetch();
        assert!(matches!(fetched, Ok(_) | Err(ServiceError::Cancelled { .. })), "{fetched:?}");
    }
    // A call that is scheduled after the failure has the error in place of the join.
    errors.extend(coordinator.join().err());
    let [error] = &errors[..] else { panic!("{errors:?}") };
    assert!(error.to_string().contains("no such user"), "{error}");
}

#[test]
fn a_program_may_leave_out_what_has_ended() {
    let mut place = place(2, 1);
    let servers = place.start(&increment());
    let schedule = |coordinator: &Coordinator| {
        let value = coordinator.schedule(Call::new("increment")).unwrap();
        value.fetch().unwrap();
        value.number()
    };
    let first = resume(servers[0].target(), "counter");
    assert_eq!([schedule(&first), schedule(&first)], [1, 2]);
    drop(first);
    let again = resume(servers[0].target(), "counter");
    again.skip_to(again.settled() + 1);
    assert_eq!(schedule(&again), 3);
    again.skip_to(1);
    assert_eq!((schedule(&again), place.values()[1][0]), (4, 4.0));
}

#[test]
fn functions_that_differ_between_workers_are_named() {
    let typed = |dtype| {
        let signature = Signature::new().output("value", dtype, []);
        Functions::new().typed("one", signature, |_| Ok(1.0_f32)).add("fine", |_| Ok(1_i64))
    };
    let mut place = place(1, 2);
    let mut listeners = std::mem::take(&mut place.listeners).into_iter();
    let first = place.start_at(0, listeners.next().unwrap(), &typed(DType::F32));
    let _second = place.start_at(1, listeners.next().unwrap(), &typed(DType::F64));
    let coordinator = coordinator(first.target(), CoordinatorConfig::new());
    // Both workers are known once each has run a call.
    for index in 0..2 {
        let call = Call::new("fine").on(&format!("/job:worker/task:{index}"));
        coordinator.schedule(call).unwrap().fetch().unwrap();
    }
    let error = coordinator.schedule(Call::new("one")).unwrap_err();
    assert!(matches!(error, ServiceError::SignaturesDiffer { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("() -> (value: f32 [])") && text.contains("() -> (value: f64 [])"),
        "{text}"
    );
}

#[test]
fn an_earlier_coordinator_of_the_name_is_shut_out() {
    let mut place = place(2, 1);
    let servers = place.start(&increment());
    let old = resume(servers[0].target(), "counter");
    old.schedule(Call::new("increment")).unwrap().fetch().unwrap();
    let new = resume(servers[0].target(), "counter");
    old.schedule(Call::new("increment")).unwrap();
    let error = old.join().unwrap_err().to_string();
    assert!(error.contains("epoch"), "{error}");
    // The first call has counted, and is not executed again.
    let first = new.schedule(Call::new("increment")).unwrap();
    assert_eq!(first.fetch(), Err(ServiceError::EndedBefore { number: 1 }));
    new.schedule(Call::new("increment")).unwrap().fetch().unwrap();
    assert_eq!(place.values()[0], vec![2.0; 3]);
    new.close().unwrap();
    let again = resume(servers[0].target(), "counter");
    assert_eq!(again.settled(), 0);
}

#[test]
fn a_coordinator_that_resumes_with_other_inputs_is_refused() {
    let functions = increment().add("decrement", |call| {
        let mut gradients = call.gradients()?;
        for name in ["a", "b"] {
            gradients.view_mut::<f32>(name)?.fill(1.0);
        }
        call.push(gradients)
    });
    let mut place = place(2, 2);
    let servers = place.start(&functions);
    let schedule = |coordinator: &Coordinator, function: &str, inputs: &[i64]| {
        let call = |&input: &i64| Call::new(function).feed("batch", input);
        inputs.iter().try_for_each(|input| coordinator.schedule(call(input)).map(|_| ()))
    };
    let first = resume(servers[0].target(), "counter");
    schedule(&first, "increment", &[1, 2, 3, 4]).unwrap();
    first.join().unwrap();
    drop(first);
    for (function, inputs) in
        [("increment", [10, 20, 30, 40]), ("decrement", [1, 2, 3, 4]), ("increment", [1, 2, 3, 5])]
    {
        let resumed = resume(servers[0].target(), "counter");
        let error = schedule(&resumed, function, &inputs).unwrap_err();
        assert!(matches!(error, ServiceError::CallsDiffer { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{function:?}")), "{error}");
        // Nor does the program take it for done.
        assert_eq!(resumed.join(), Err(error.clone()));
        assert_eq!(resumed.done(), Err(error.clone()));
        assert_eq!(resumed.close(), Err(error));
    }
    let same = resume(servers[0].target(), "counter");
    schedule(&same, "increment", &[1, 2, 3, 4, 5]).unwrap();
    same.join().unwrap();
    assert_eq!(place.values(), [vec![5.0; 3], vec![5.0; 3]]);
}

#[test]
fn a_slow_call_is_tried_again_if_the_program_says_so() {
    let seen = Mutex::new(HashSet::new());
    let functions = Functions::new().add_async("slow_once", move |call| {
        let number = call.input("number").and_then(|number| number.element::<i64>());
        let is_slow = number.is_ok_and(|number| seen.lock().unwrap().insert(number));
        async move {
            if is_slow {
                call.cancelled().await;
            }
            Ok(1_i64)
        }
    });
    let mut place = place(1, 1);
    let servers = place.start(&functions);
    let slow = |number: i64| {
        Call::new("slow_once").feed("number", number).timeout(Duration::from_millis(200))
    };
    let patient = coordinator(servers[0].target(), CoordinatorConfig::new().timeouts_max(1));
    let values = [1, 2, 3].map(|number| patient.schedule(slow(number)).unwrap());
    patient.join().unwrap();
    assert!(values.iter().all(|value| value.fetch().is_ok()));
    let hasty = coordinator(servers[0].target(), CoordinatorConfig::new());
    let _ = hasty.schedule(slow(4)).unwrap();
    let error = hasty.join().unwrap_err();
    assert!(matches!(error, ServiceError::Timeout { .. }), "{error:?}");
}

#[test]
fn a_coordinator_that_is_dropped_executes_nothing_more() {
    let (sender, opening) = mpsc::channel();
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let (ran, runs) = mpsc::channel();
    let functions = Functions::new()
        .add("open", move |_| {
            sender.send(())?;
            let _ = gate.lock().unwrap_or_else(|poison| poison.into_inner()).recv();
            Ok(1.0_f64)
        })
        .add("use", move |_| {
            ran.send(())?;
            Ok(2_i64)
        });
    let mut place = place(1, 1);
    let servers = place.start(&functions);
    let coordinator = coordinator(servers[0].target(), CoordinatorConfig::new());
    let data = coordinator.per_worker(Call::new("open")).unwrap();
    let call = || Call::new("use").per_worker("data", &data, "value");
    let values = [(); 3].map(|()| coordinator.schedule(call()).unwrap());
    opening.recv_timeout(LONG).unwrap();
    drop(coordinator);
    for value in values {
        let error = value.fetch().unwrap_err();
        assert!(matches!(error, ServiceError::Ended { .. }), "{error:?}");
    }
    // What the calls wait for is there now.
    drop(release);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(runs.try_iter().count(), 0);
}
