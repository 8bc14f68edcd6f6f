//! Outputs that stay on their servers and go from task to task.

use std::time::Duration;

use pushpull::TaskId;
use pushpull::blocking::FunctionServer;
use pushpull::services::{Call, FunctionServerConfig, Functions, ServiceError, Value};

use crate::services::cluster::{block_on, connect, start, until};

fn functions() -> Functions {
    Functions::new().elementwise().add("slow_two", |_| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(2.0_f32)
    })
}

#[test]
fn outputs_go_from_task_to_task_without_the_client() {
    let (_cluster, servers) = start("worker", 3, &functions(), |config| config);
    let client = connect(servers[0].target());
    let on = |name: &str, task: u32| Call::new(name).on(&format!("/job:worker/task:{task}"));
    let ones = Value::tensor(&[1 << 20], &vec![1.0_f32; 1 << 20]).unwrap();
    let kept = client.keep(on("identity", 0).feed("x", ones)).unwrap();
    // Used on another task, and on the same one.
    for task in [1, 0] {
        let call = on("add", task).kept("a", &kept, "x").kept("b", &kept, "x");
        let sum = client.call(call).unwrap();
        assert!(sum.view::<f32>().unwrap().iter().all(|&x| x == 2.0));
    }
    assert_eq!(client.fetch(&kept, "x").unwrap().shape().extents(), [1 << 20]);
    let error = client.fetch(&kept, "y").unwrap_err().to_string();
    assert!(error.contains("call 1 has left no output \"y\""), "{error}");
    // Another client may use what it is told of.
    let other = connect(servers[2].target());
    assert_eq!(other.fetch(&kept, "x").unwrap().shape().extents(), [1 << 20]);
    let call = on("add", 1).kept("a", &kept, "x").kept("b", &kept, "x");
    assert!(other.call(call).unwrap().view::<f32>().unwrap().iter().all(|&x| x == 2.0));
}

#[test]
fn an_output_of_another_client_may_be_used_before_its_call_has_come() {
    for user in [0, 1] {
        let (_cluster, servers) = start("worker", 2, &functions(), |config| config);
        let on = |name: &str, task: u32| Call::new(name).on(&format!("/job:worker/task:{task}"));
        let other = connect(servers[1].target());
        other.call(on("identity", user).feed("x", 1.0_f32)).unwrap();
        for _ in 0..5 {
            let maker = connect(servers[0].target());
            let keeping = maker.inner().keep(on("slow_two", 1)).unwrap();
            let uses = on("identity", user).kept("x", keeping.kept(), "value");
            assert_eq!(other.call(uses).unwrap().element::<f32>(), Ok(2.0));
        }
    }
}

#[test]
fn a_fetch_says_how_its_call_has_failed() {
    let functions = functions()
        .add("bad", |_| Err::<(), _>(pushpull::services::FunctionError::new("the disk is full")));
    let (_cluster, servers) = start("worker", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let keeping = client.inner().keep(Call::new("bad").on("/task:1")).unwrap();
    let kept = keeping.kept().clone();
    block_on(keeping).unwrap_err();
    let errors = [
        client.fetch(&kept, "value").unwrap_err(),
        client.call(Call::new("identity").kept("x", &kept, "value")).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("the disk is full"), "{error}");
    }
}

#[test]
fn a_fetch_ends_if_the_client_that_has_kept_is_gone() {
    let (_cluster, servers) =
        start("worker", 2, &functions(), |config| config.lease(Duration::from_millis(200)));
    let first = connect(servers[0].target());
    let other = connect(servers[0].target());
    let on = Call::new("identity").on("/task:1").feed("x", 1.0_f32);
    let kept = first.keep(on).unwrap();
    drop(first);
    // The server may not have noticed yet.
    until(|| other.fetch(&kept, "x").is_err());
    let error = other.fetch(&kept, "x").unwrap_err();
    assert!(error.to_string().contains("its client is gone"), "{error}");
}

#[test]
fn what_a_restarted_server_has_lost_is_refused_at_once() {
    let (cluster, mut servers) = start("worker", 2, &functions(), |config| config);
    let client = connect(servers[0].target());
    let one = Call::new("identity").feed("x", 1.0_f32);
    let kept = client.keep(one.on("/job:worker/task:1")).unwrap();
    let address = servers[1].target().to_owned();
    drop(servers.pop());
    let listener = FunctionServer::listen(&address).unwrap();
    let config = FunctionServerConfig::new(cluster, TaskId::worker(1), functions());
    let _again = listener.start(config).unwrap();
    // Without a refusal, each of these would wait for its deadline.
    let uses = || Call::new("identity").kept("x", &kept, "x");
    let other = connect(servers[0].target());
    let mut errors = vec![
        other.call(uses()).unwrap_err(),
        client.call(uses()).unwrap_err(),
        client.fetch(&kept, "x").unwrap_err(),
    ];
    // The client knows by now.
    client.describe(&TaskId::worker(1)).unwrap();
    errors.extend([
        other.call(uses()).unwrap_err(),
        client.call(uses()).unwrap_err(),
        client.fetch(&kept, "x").unwrap_err(),
        other.fetch(&kept, "x").unwrap_err(),
    ]);
    for error in errors {
        assert!(matches!(error, ServiceError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("call 1 has left no output \"x\""), "{error}");
    }
}

#[test]
fn calls_may_depend_on_calls_that_have_not_ended() {
    let (_cluster, servers) = start("worker", 2, &functions(), |config| config);
    let client = connect(servers[0].target());
    let slow = client.inner().keep(Call::new("slow_two").on("/task:1")).unwrap();
    let kept = slow.kept().clone();
    let call = Call::new("mul").feed("a", 4.0_f32).kept("b", &kept, "value");
    assert_eq!(client.call(call).unwrap().element::<f32>(), Ok(8.0));
    drop(slow);
}

#[test]
fn what_nobody_holds_any_more_is_dropped() {
    let (_cluster, servers) =
        start("worker", 1, &functions(), |config| config.client_bytes_max(1 << 20));
    let client = connect(servers[0].target());
    let half = Value::zeros::<f32>(&[100_000]).unwrap();
    let keep = || client.keep(Call::new("identity").feed("x", half.clone()));
    let first = keep().unwrap();
    let second = keep().unwrap();
    match keep() {
        Err(ServiceError::Refused { refusal, .. }) => {
            assert!(refusal.to_string().contains("the client may use"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
    drop(first);
    let third = keep().unwrap();
    drop((second, third));
    for _ in 0..20 {
        drop(keep().unwrap());
    }
}
