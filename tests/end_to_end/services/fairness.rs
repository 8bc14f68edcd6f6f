//! What one client does keeps no other out, and functions that wait keep no thread.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use pushpull::protocol::Refusal;
use pushpull::services::{Call, FunctionError, Functions, ServiceError};

use crate::services::cluster::{LONG, block_on, connect, start};

/// The function `hold`, which says that it has begun and returns once the sender is dropped,
/// whether it is cancelled or not; and `fine`.
fn holding() -> (Functions, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (begun, begins) = mpsc::channel();
    let (release, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let functions = Functions::new()
        .add("hold", move |_| {
            begun.send(())?;
            // Several wait in turn, each until the sender is dropped.
            let _ = held.lock().map_err(|_| FunctionError::new("poisoned"))?.recv();
            Ok(())
        })
        .add("fine", |_| Ok(1_i64));
    (functions, begins, release)
}

#[test]
fn long_calls_of_one_client_keep_no_other_out() {
    let (functions, begun, release) = holding();
    let (_, servers) = start("local", 1, &functions, |config| config.threads(2));
    let holder = connect(servers[0].target());
    let other = connect(servers[0].target());
    let held: Vec<_> = (0..4).map(|_| holder.inner().start(Call::new("hold")).unwrap()).collect();
    (0..2).for_each(|_| begun.recv_timeout(LONG).unwrap());
    for _ in 0..10 {
        assert_eq!(other.call(Call::new("fine")).unwrap().element::<i64>(), Ok(1));
    }
    drop(release);
    held.into_iter().for_each(|held| _ = block_on(held).unwrap());
}

#[test]
fn a_cancelled_function_gives_its_thread_back_at_once() {
    let (functions, begun, release) = holding();
    let (_, servers) = start("local", 1, &functions, |config| config.threads(1));
    let client = connect(servers[0].target());
    for _ in 0..8 {
        let running = client.inner().start(Call::new("hold")).unwrap();
        begun.recv_timeout(LONG).unwrap();
        drop(running);
        assert_eq!(client.call(Call::new("fine")).unwrap().element::<i64>(), Ok(1));
    }
    drop(release);
}

#[test]
fn calls_with_short_deadlines_are_unreturned_for_their_client_alone() {
    let (functions, begun, release) = holding();
    let (_, servers) = start("local", 1, &functions, |config| config.threads(2));
    let hasty = connect(servers[0].target());
    let other = connect(servers[0].target());
    let hold = || hasty.call(Call::new("hold").timeout(Duration::from_millis(30))).unwrap_err();
    let is_unreturned = |error: &ServiceError| {
        matches!(error, ServiceError::Refused { refusal: Refusal::Unreturned { .. }, .. })
    };
    let errors: Vec<ServiceError> = (0..40).map(|_| hold()).collect();
    assert!(errors.last().is_some_and(is_unreturned), "{errors:?}");
    while begun.try_recv().is_ok() {}
    // The other client's call begins while all of these are held.
    let running = other.inner().start(Call::new("hold")).unwrap();
    begun.recv_timeout(LONG).unwrap();
    drop(release);
    block_on(running).unwrap();
}

#[test]
fn functions_call_their_own_server_at_any_depth() {
    let functions = Functions::new()
        .add("leaf", |_| Ok(1_i64))
        .add("middle", |call| Ok(call.client().call(Call::new("leaf"))?.element::<i64>()? + 1))
        .add("outer", |call| Ok(call.client().call(Call::new("middle"))?.element::<i64>()? + 1));
    let (_, servers) = start("local", 1, &functions, |config| config.threads(1));
    let client = connect(servers[0].target());
    let outputs = client.run_all((0..40).map(|_| Call::new("outer"))).unwrap();
    assert!(outputs.iter().all(|outputs| outputs.element::<i64>() == Ok(3)));
}

#[test]
fn twenty_thousand_calls_may_be_open() {
    let functions = Functions::new()
        .add_async("echo", |call| async move { Ok(call.input("n")?.element::<i64>()?) });
    let (_, servers) = start("local", 1, &functions, |config| config);
    let client = connect(servers[0].target());
    let calls = 20_000_i64;
    let start_all = || -> Vec<_> {
        (0..calls).map(|n| client.inner().start(Call::new("echo").feed("n", n)).unwrap()).collect()
    };
    let begun = Instant::now();
    block_on(async {
        for (n, running) in (0_i64..).zip(start_all()) {
            assert_eq!(running.await.unwrap().element::<i64>(), Ok(n));
        }
    });
    println!("{calls} calls of `start` within {:?}", begun.elapsed());
    let begun = Instant::now();
    let all = client.run_all((0..calls).map(|n| Call::new("echo").feed("n", n))).unwrap();
    assert!((0_i64..).zip(all).all(|(n, outputs)| outputs.element::<i64>() == Ok(n)));
    println!("{calls} calls of `run_all` within {:?}", begun.elapsed());
    // Calls that are given up leave nothing behind.
    drop(start_all());
    assert_eq!(client.call(Call::new("echo").feed("n", 7_i64)).unwrap().element::<i64>(), Ok(7));
}

#[test]
fn an_error_of_many_calls_is_that_of_the_first() {
    let functions = Functions::new().add_async("check", |call| async move {
        match call.input("n")?.element::<i64>()? {
            n if n >= 3 => Err(FunctionError::new(format!("{n} is too large"))),
            n => Ok(n),
        }
    });
    let (_, servers) = start("local", 1, &functions, |config| config.calls_max(1));
    let client = connect(servers[0].target());
    let calls = (0..8).map(|n| Call::new("check").feed("n", n as i64));
    match client.run_all(calls) {
        Err(ServiceError::Failed { detail, .. }) => assert_eq!(detail, "3 is too large"),
        other => panic!("{other:?}"),
    }
}
