//! Functions that call other functions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use pushpull::blocking::{Coordinator, FunctionClient, FunctionServer};
use pushpull::services::{Call, CoordinatorConfig, FunctionError, Functions, Kept, ServiceError};

use crate::services::cluster::{LONG, block_on, connect, start, start_one, until};

fn on(function: &str, task: u32) -> Call {
    Call::new(function).on(&format!("/job:local/task:{task}"))
}

#[test]
fn a_function_calls_functions_of_other_tasks_and_its_own() {
    let functions = Functions::new()
        .elementwise()
        .add("sum", |call| {
            let client = call.client();
            let x = call.input("x")?;
            let square = |task| on("mul", task).feed("a", x.clone()).feed("b", x.clone());
            let [first, second] = client.run([square(1), square(2)])?;
            let add = Call::new("add");
            let add = add.feed("a", first.value()?.clone()).feed("b", second.value()?.clone());
            Ok(client.call(add)?)
        })
        .add_async("sum_async", |call| async move {
            let client = call.client_async();
            let x = call.input("x")?.clone();
            let left = client.keep(on("mul", 1).feed("a", x.clone()).feed("b", x.clone()))?;
            let add = on("add", 2).kept("a", left.kept(), "value").feed("b", 16.0_f32);
            Ok(client.call(add).await?)
        });
    let (_, servers) = start("local", 3, &functions, |config| config.threads(2));
    let client = connect(servers[0].target());
    for function in ["sum", "sum_async"] {
        let outputs = client.call(Call::new(function).feed("x", 4.0_f32)).unwrap();
        assert_eq!(outputs.element::<f32>().unwrap(), 32.0, "{function}");
    }
}

#[test]
fn recursion_ends_at_the_depth_limit() {
    let functions = Functions::new().add_async("down", |call| async move {
        let left = call.input("left")?.element::<i64>()?;
        if left == 0 {
            return Ok(i64::from(call.depth()));
        }
        let next = call.client_async().call(Call::new("down").feed("left", left - 1)).await?;
        Ok(next.element::<i64>()?)
    });
    let (_server, client) = start_one(functions);
    let down = |left: i64| client.call(Call::new("down").feed("left", left));
    assert_eq!(down(8).unwrap().element::<i64>().unwrap(), 8);
    let error = down(9).unwrap_err().to_string();
    assert!(error.contains("nested in 9 others: the limit is 8"), "{error}");
}

#[test]
fn nested_calls_end_with_the_outer_call() {
    let (sender, receiver) = mpsc::channel();
    let began = sender.clone();
    let told = sender;
    let functions = Functions::new()
        .add("outer", move |call| {
            told.send(call.client().call(on("inner", 1)).unwrap_err().to_string())?;
            Ok(())
        })
        .add_async("inner", move |call| {
            let began = began.clone();
            async move {
                began.send("begun".to_owned())?;
                call.cancelled().await;
                began.send("inner ended".to_owned())?;
                Ok(())
            }
        });
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("outer")).unwrap();
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), "begun");
    drop(running);
    let mut ended = [(); 2].map(|()| receiver.recv_timeout(LONG).unwrap());
    ended.sort();
    assert_eq!(ended, ["cannot call \"inner\": it was cancelled", "inner ended"]);
}

#[test]
fn a_nested_call_that_nobody_waits_for_ends_with_the_outer_call() {
    let (sender, receiver) = mpsc::channel();
    let receiver = Mutex::new(receiver);
    let functions = Functions::new()
        .add("outer", |call| {
            let client = call.client();
            let running = client.inner().start(on("inner", 1))?;
            // It computes as long as anybody wants the result, and does not look at the nested
            // call.
            while !call.is_cancelled() {
                std::thread::yield_now();
            }
            std::mem::forget(running);
            Ok(())
        })
        // This one returns with a call under way.
        .add("brief", move |call| {
            std::mem::forget(call.client().inner().start(on("inner", 1))?);
            assert_eq!(receiver.lock().unwrap().recv_timeout(LONG), Ok("begun"));
            Ok(())
        })
        .add_async("inner", {
            let sender = sender.clone();
            move |call| {
                let sender = sender.clone();
                async move {
                    sender.send("begun")?;
                    call.cancelled().await;
                    *call.state::<u32>().lock() += 1;
                    Ok(())
                }
            }
        })
        .add("ended", |call| Ok(i64::from(*call.state::<u32>().lock())));
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let ended = || client.call(on("ended", 1)).unwrap().element::<i64>().unwrap();
    client.call(Call::new("brief")).unwrap();
    until(|| ended() == 1);
    let outer = client.inner().start(Call::new("outer").timeout(Duration::from_millis(500)));
    assert!(block_on(outer.unwrap()).is_err());
    until(|| ended() == 2);
}

#[test]
fn a_cancelled_call_makes_no_further_calls() {
    let count = Arc::new(AtomicU64::new(0));
    let counts = count.clone();
    let (sender, receiver) = mpsc::channel();
    let functions = Functions::new()
        .add("effect", move |_| {
            counts.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
        .add("outer", move |call| {
            let client = call.client();
            client.call(on("effect", 1))?;
            sender.send("begun".to_owned())?;
            while !call.is_cancelled() {
                std::thread::yield_now();
            }
            sender.send(client.call(on("effect", 1)).unwrap_err().to_string())?;
            // Nor does a client that it asks for only then.
            sender.send(call.client().call(on("effect", 1)).unwrap_err().to_string())?;
            Ok(())
        });
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    for _ in 0..10 {
        let running = client.inner().start(Call::new("outer")).unwrap();
        assert_eq!(receiver.recv_timeout(LONG).unwrap(), "begun");
        drop(running);
        for _ in 0..2 {
            let error = receiver.recv_timeout(LONG).unwrap();
            assert_eq!(error, "cannot call \"effect\": it was cancelled");
        }
    }
    assert_eq!(count.load(Ordering::SeqCst), 10);
}

/// A client holds few calls at once on a server, 64, and these wait for others of the same server.
#[test]
fn calls_of_different_depths_do_not_wait_for_each_others_places() {
    let functions = Functions::new()
        .add_async("leaf", |_| async { Ok(1_i64) })
        .add_async("middle", |call| async move {
            Ok(call.client_async().call(Call::new("leaf")).await?)
        })
        .add_async("fan", |call| async move {
            let calls = (0..100).map(|_| Call::new("middle"));
            Ok(call.client_async().run_all(calls).await?.len() as i64)
        });
    let (_server, client) = start_one(functions);
    assert_eq!(client.call(Call::new("fan")).unwrap().element::<i64>(), Ok(100));
}

#[test]
fn what_a_function_keeps_outlives_its_call() {
    let functions = Functions::new()
        .elementwise()
        .add("make", |call| {
            let kept = call.client().keep(on("identity", 1).feed("x", 3.0_f32))?;
            *call.state::<Option<Kept>>().lock() = Some(kept);
            Ok(())
        })
        .add("use", |call| {
            let kept = call.state::<Option<Kept>>().lock().clone().unwrap();
            let call_it = on("identity", 0).kept("x", &kept, "x");
            let used = call.client().call(call_it)?.element::<f32>()?;
            Ok(call.client().fetch(&kept, "x")?.element::<f32>()? + used)
        });
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    client.call(Call::new("make")).unwrap();
    assert_eq!(client.call(Call::new("use")).unwrap().element::<f32>(), Ok(6.0));
}

#[test]
fn the_blocking_client_is_refused_to_asynchronous_functions() {
    let functions = Functions::new()
        .add("one", |_| Ok(1.0_f32))
        .add_async("outer", |call| async move { Ok(call.client().call(Call::new("one"))?) });
    let (_server, client) = start_one(functions);
    let error = client.call(Call::new("outer")).unwrap_err().to_string();
    assert!(error.contains("use `client_async` there"), "{error}");
    assert!(client.call(Call::new("one")).is_ok(), "the server goes on");
}

#[test]
fn a_client_of_a_function_ends_with_the_call_and_with_the_server() {
    let (sender, receiver) = mpsc::channel();
    let (to_wait, go) = mpsc::channel::<()>();
    let go = Mutex::new(go);
    let functions = Functions::new().add("one", |_| Ok(1.0_f32)).add("outer", move |call| {
        let client = call.client();
        client.call(Call::new("one"))?;
        sender.send(client)?;
        // Until the server has stopped.
        let _ = go.lock().unwrap().recv_timeout(LONG);
        Ok(())
    });
    let (_, servers) = start("local", 1, &functions, |config| config.grace(Duration::ZERO));
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("outer")).unwrap();
    let nested: FunctionClient = receiver.recv_timeout(LONG).unwrap();
    servers.into_iter().for_each(FunctionServer::stop);
    let error = nested.call(Call::new("one")).unwrap_err();
    let is_end =
        |e: &ServiceError| matches!(e, ServiceError::Cancelled { .. } | ServiceError::Ended { .. });
    assert!(is_end(&error), "{error}");
    drop((running, to_wait));
}

#[test]
fn a_stopping_server_finishes_the_calls_that_its_functions_make() {
    let (sender, receiver) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let may_go = Mutex::new(may_go);
    let functions = Functions::new().add("one", |_| Ok(1.0_f32)).add("outer", move |call| {
        call.client().call(Call::new("one"))?;
        sender.send("begun")?;
        may_go.lock().unwrap().recv()?;
        Ok(call.client().call(Call::new("one"))?)
    });
    let (server, client) = start_one(functions);
    let running = client.inner().start(Call::new("outer")).unwrap();
    assert_eq!(receiver.recv_timeout(LONG), Ok("begun"));
    server.handle().stop();
    until(|| matches!(client.call(Call::new("one")), Err(ServiceError::Refused { .. })));
    go.send(()).unwrap();
    assert_eq!(block_on(running).unwrap().element::<f32>(), Ok(1.0));
}

#[test]
fn a_coordinator_in_a_function_ends_with_the_call() {
    let (sender, receiver) = mpsc::channel();
    let functions = Functions::new()
        .add_async("never", |call| async move {
            call.cancelled().await;
            Ok(())
        })
        .add("outer", move |call| {
            let config = CoordinatorConfig::new().job("local");
            let coordinator = Coordinator::start(call.client(), config)?;
            let value = coordinator.schedule(Call::new("never"))?;
            sender.send("scheduled".to_owned())?;
            sender.send(coordinator.join().unwrap_err().to_string())?;
            sender.send(value.fetch().unwrap_err().to_string())?;
            Ok(())
        });
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("outer")).unwrap();
    assert_eq!(receiver.recv_timeout(LONG).unwrap(), "scheduled");
    drop(running);
    for doing in ["coordinate", "fetch the value of call 1"] {
        let error = receiver.recv_timeout(LONG).unwrap();
        assert!(error.starts_with(&format!("cannot {doing}")), "{error}");
    }
}

#[test]
fn the_error_of_a_nested_call_says_that_another_execution_may_succeed() {
    let count = AtomicU64::new(0);
    let functions = Functions::new()
        .add("flaky", move |_| match count.fetch_add(1, Ordering::SeqCst) {
            0 => Err(FunctionError::new("busy").retryable()),
            _ => Ok(1.0_f32),
        })
        .add("outer", |call| Ok(call.client().call(on("flaky", 1))?));
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = FunctionClient::connect(servers[0].target()).unwrap();
    let coordinator = Coordinator::start(client, CoordinatorConfig::new().job("local")).unwrap();
    let value = coordinator.schedule(Call::new("outer")).unwrap();
    coordinator.join().unwrap();
    assert_eq!(value.fetch().unwrap().element::<f32>(), Ok(1.0));
}

#[test]
fn a_nested_call_has_the_time_of_the_outer_one() {
    let functions = Functions::new()
        .add("left", |call| {
            let until = call.deadline().ok_or(ServiceError::Ended { doing: "wait".to_owned() })?;
            Ok(until.saturating_duration_since(Instant::now()).as_secs() as i64)
        })
        .add("longer", |call| Ok(call.client().call(on("left", 1).timeout(10 * LONG))?))
        .add("outer", |call| Ok(call.client().call(on("left", 1))?));
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    for function in ["left", "longer", "outer"] {
        let call = Call::new(function).timeout(Duration::from_secs(500));
        let left = client.call(call).unwrap().element::<i64>().unwrap();
        assert!((401..=500).contains(&left), "{function} leaves {left} s");
    }
}
