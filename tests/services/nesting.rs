//! Functions that call other functions.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use pushpull::services::{Call, Functions, ServiceError};

use crate::cluster::{LONG, connect, start, start_one};

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
    let (began, told) = (sender.clone(), sender);
    let functions = Functions::new()
        .add("outer", move |call| {
            let error = call.client().call(on("inner", 1)).unwrap_err();
            assert!(matches!(error, ServiceError::Cancelled { .. }), "{error}");
            told.send("outer")?;
            // The client of a cancelled call makes no further ones.
            Ok(call.client().call(on("inner", 1)).map(drop)?)
        })
        .add_async("inner", move |call| {
            let began = began.clone();
            async move {
                began.send("begun")?;
                call.cancelled().await;
                began.send("inner")?;
                Ok(())
            }
        });
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let running = client.inner().start(Call::new("outer")).unwrap();
    assert_eq!(receiver.recv_timeout(LONG), Ok("begun"));
    drop(running);
    let mut ended = [(); 2].map(|()| receiver.recv_timeout(LONG).unwrap());
    ended.sort_unstable();
    assert_eq!(ended, ["inner", "outer"]);
}

#[test]
fn a_nested_call_has_the_deadline_of_the_outer_one() {
    let functions = Functions::new()
        .add("left", |call| {
            let until = call.deadline().ok_or(ServiceError::Ended { doing: "wait".to_owned() })?;
            Ok(until.saturating_duration_since(Instant::now()).as_secs() as i64)
        })
        .add("outer", |call| Ok(call.client().call(on("left", 1).timeout(10 * LONG))?));
    let (_, servers) = start("local", 2, &functions, |config| config);
    let client = connect(servers[0].target());
    let left = |function: &str, seconds| {
        let call = Call::new(function).timeout(Duration::from_secs(seconds));
        client.call(call).unwrap().element::<i64>().unwrap()
    };
    assert!((61..=100).contains(&left("left", 100)));
    assert!((61..=100).contains(&left("outer", 100)), "the outer deadline comes first");
}
