//! Connections that break: a call is executed once, and its answer arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pushpull::blocking::FunctionServer;
use pushpull::services::{Call, Functions, ServiceError, Value};

use crate::secured::is_secured;
use crate::services::cluster::{connect, start};
use crate::services::proxy::Proxy;

#[test]
fn a_call_is_executed_once_however_often_the_connection_breaks() {
    let executions = Arc::new(AtomicU64::new(0));
    let functions = Functions::new().add("count", {
        let executions = executions.clone();
        move |call| {
            let count = executions.fetch_add(1, Ordering::SeqCst) + 1;
            std::thread::yield_now();
            Ok(call.input("x")?.zip(&Value::scalar(count as f32), |x: f32, n| x + n)?)
        }
    });
    let server = FunctionServer::local(functions).unwrap();
    let proxy = Proxy::to(server.target());
    let client = connect(&proxy.address);
    const CALLS: u64 = 20;
    std::thread::scope(|scope| {
        let breaking = scope.spawn(|| {
            while executions.load(Ordering::SeqCst) < CALLS {
                proxy.break_all();
                // A handshake and its ciphers take longer.
                let pause = if is_secured() { 200 } else { 20 };
                std::thread::sleep(Duration::from_millis(pause));
            }
        });
        for number in 1..=CALLS {
            // Large enough that connections break in the middle of it.
            let x = Value::zeros::<f32>(&[500_000]).unwrap();
            let outputs = client.call(Call::new("count").feed("x", x)).unwrap();
            assert_eq!(outputs.view::<f32>().unwrap()[499_999], number as f32);
        }
        breaking.join().unwrap();
    });
    assert_eq!(executions.load(Ordering::SeqCst), CALLS);
}

#[test]
fn a_call_that_ends_with_its_connection_says_that_it_is_lost() {
    let (sender, started) = std::sync::mpsc::channel();
    let functions = Functions::new().add("wait", move |call| {
        sender.send(())?;
        while !call.is_cancelled() {
            std::thread::yield_now();
        }
        Ok(())
    });
    // The server learns from the lease that nobody waits any more.
    let lease = Duration::from_millis(100);
    let (_cluster, servers) = start("local", 1, &functions, |config| config.lease(lease));
    let proxy = Proxy::to(servers[0].target());
    let client = connect(&proxy.address);
    let running = client.inner().start(Call::new("wait").ends_with_connection()).unwrap();
    started.recv().unwrap();
    proxy.break_all();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let error = runtime.block_on(running).unwrap_err();
    assert!(matches!(error, ServiceError::Lost { .. }), "{error:?}");
}
