//! Many servers and many clients at once, in a process of their own, so that what they leave behind
//! can be counted.

use std::time::Duration;

use pushpull::blocking::{FunctionClient, FunctionServer};
use pushpull::services::{Call, FunctionServerConfig, FunctionServerListener, Functions};
use pushpull::{ClusterSpec, TaskId};

/// The servers, the clients, and the calls of all clients together. `PUSHPULL_THOROUGH=1` makes it
/// as large as the documents say.
fn size() -> (usize, usize, usize) {
    match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => (50, 20, 100_000),
        None => (10, 5, 4_000),
    }
}

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).expect("a directory of /proc").count()
}

/// The descriptors and the threads of this process.
fn held() -> (usize, usize) {
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("a file of /proc");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("a number of pages") * 4096
}

fn start(count: usize, functions: &Functions) -> Vec<FunctionServer> {
    let listeners: Vec<_> =
        (0..count).map(|_| FunctionServer::listen("127.0.0.1:0").expect("a free port")).collect();
    let addresses = listeners.iter().map(FunctionServerListener::address);
    let cluster = ClusterSpec::builder().job("local", addresses).build();
    let cluster = cluster.expect("a valid cluster");
    let start = |(index, listener): (usize, FunctionServerListener)| {
        let task = TaskId::new("local", index as u32);
        let config = FunctionServerConfig::new(cluster.clone(), task, functions.clone()).threads(2);
        FunctionServer::start(listener, config).expect("a server")
    };
    listeners.into_iter().enumerate().map(start).collect()
}

/// The sum of two numbers on a task, by a blocking or an asynchronous function.
fn add(task: usize, number: usize) -> Call {
    let name = if number.is_multiple_of(2) { "add" } else { "add_async" };
    let call = Call::new(name).on(&format!("/job:local/task:{task}"));
    call.feed("a", number as f32).feed("b", 1.0_f32)
}

#[test]
fn many_clients_call_many_servers_and_nothing_is_left() {
    let (servers, clients, calls) = size();
    let functions = Functions::new()
        .add_async("add_async", |call| async move { call.zip(["a", "b"], |a: f32, b| a + b) })
        .add("add", |call| call.zip(["a", "b"], |a: f32, b| a + b));
    // The first runtime of a process opens descriptors for signals, which stay.
    drop(start(1, &functions));
    let before = held();
    let running = start(servers, &functions);
    let connected: Vec<FunctionClient> = (0..clients)
        .map(|client| FunctionClient::connect(running[client % servers].target()).unwrap())
        .collect();
    let call_all = |calls: usize| {
        std::thread::scope(|scope| {
            for (index, client) in connected.iter().enumerate() {
                scope.spawn(move || {
                    for number in 0..calls / clients {
                        let sum = client.call(add((index + number) % servers, number)).unwrap();
                        assert_eq!(sum.element::<f32>().unwrap(), number as f32 + 1.0);
                    }
                });
            }
        });
        resident_bytes()
    };
    let halfway = call_all(calls / 2);
    let end = call_all(calls / 2);
    println!(
        "{servers} servers, {clients} clients, {calls} calls: {} MiB after half of them, {} MiB at \
         the end",
        halfway >> 20,
        end >> 20
    );
    assert!(end < halfway + halfway / 8 + (4 << 20), "memory grows with the calls");
    // The servers stop while calls are in flight.
    let in_flight: Vec<_> = connected
        .iter()
        .flat_map(|client| (0..servers).map(|task| client.inner().start(add(task, 2)).unwrap()))
        .collect();
    for server in &running {
        server.handle().stop();
    }
    drop(running);
    drop(in_flight);
    drop(connected);
    // The system removes a thread a moment after it has been joined.
    for _ in 0..1_000 {
        if held() <= before {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let (descriptors, threads) = held();
    println!("{descriptors} descriptors and {threads} threads at the end, {before:?} at the start");
    assert!(descriptors <= before.0 && threads <= before.1, "something is left");
}
