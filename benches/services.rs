//! The cost of a call of a function (`cargo bench -p benches --bench services`): its round trip
//! beside a ping-pong of the same number of bytes over the same transport, calls per second, many
//! calls that are open at once, and a step of a tower beside the same gradients pushed directly.
//!
//! The ceiling is two threads that block on a socket: no runtime, no state, no wake-up of a third.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pushpull::local::Cluster;
use pushpull::services::{
    Call, FunctionClient, FunctionServer, FunctionServerConfig, Functions, Towers,
};
use pushpull::{ClusterSpec, PsConfig, Sgd, TaskId, VariableSpec, blocking};

/// The bytes of the messages of an empty call and of its answer.
const CALL_BYTES: [usize; 2] = [128, 88];

fn is_test() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// Returns the time of one of `count` operations.
fn time_of(count: usize, mut operation: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..count {
        operation();
    }
    start.elapsed() / count as u32
}

/// A peer that answers each message of a client.
fn ping_pong() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    std::thread::spawn(move || {
        let mut request = [0; CALL_BYTES[0]];
        let answer = [0; CALL_BYTES[1]];
        while server.read_exact(&mut request).is_ok() && server.write_all(&answer).is_ok() {}
    });
    client
}

fn calls(rounds: usize, count: usize) {
    let functions =
        Functions::new().add_async("async", |_| async { Ok(()) }).add("blocking", |_| Ok(()));
    let server = FunctionServer::local(functions).unwrap();
    let client = blocking::FunctionClient::connect(server.target()).unwrap();
    let mut ping = ping_pong();
    let request = [0; CALL_BYTES[0]];
    let mut answer = [0; CALL_BYTES[1]];
    let mut times = [const { Vec::new() }; 5];
    for _ in 0..rounds {
        times[0].push(time_of(count, || {
            ping.write_all(&request).unwrap();
            ping.read_exact(&mut answer).unwrap();
        }));
        for (index, name) in [(1, "async"), (2, "blocking")] {
            times[index].push(time_of(count, || _ = client.call(Call::new(name)).unwrap()));
        }
        for (index, name) in [(3, "async"), (4, "blocking")] {
            let batch = || (0..16).map(|_| Call::new(name));
            let together = time_of(count / 16, || _ = client.run_all(batch()).unwrap());
            times[index].push(together / 16);
        }
    }
    let [ping, asynchronous, blocking, async_16, blocking_16] = times.map(median);
    println!("a call without inputs           us    over the ping-pong    calls a second");
    let row = |name: &str, us: f64| {
        println!("{name:<30} {us:>6.1} {:>15.2}x {:>18.0}", us / ping, 1e6 / us);
    };
    row("ping-pong of two threads", ping);
    row("asynchronous function", asynchronous);
    row("blocking function", blocking);
    row("asynchronous, 16 in flight", async_16);
    row("blocking, 16 in flight", blocking_16);
}

/// Starts this many calls at once and waits for all of them. The client holds back what the server
/// does not accept yet.
fn open_calls(count: usize) {
    let functions = Functions::new().add_async("async", |_| async { Ok(()) });
    let server = FunctionServer::local(functions).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(FunctionClient::connect(server.target())).unwrap();
    let begun = Instant::now();
    let started: Vec<_> = (0..count).map(|_| client.start(Call::new("async")).unwrap()).collect();
    let all_started = begun.elapsed();
    for call in started {
        let _ = runtime.block_on(call).unwrap();
    }
    let started = all_started.as_secs_f64();
    let ended = begun.elapsed().as_secs_f64();
    println!("{count} calls at once: started after {started:.3} s, ended after {ended:.3} s");
}

/// A step of one tower beside the push of the same gradients by a worker.
fn towers(rounds: usize, elements: usize) {
    let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.1)).elastic_workers(true);
    let ps = Cluster::start(1, 2, start).unwrap();
    let variables = [VariableSpec::f32("w", [elements as u64]).unwrap()];
    let mut worker = blocking::Worker::connect(ps.worker_config(0)).unwrap();
    let mut params = worker.join(&variables, |_| ()).unwrap();
    let functions = Functions::new().towers().add("tower", |call| {
        let params = call.values()?;
        let mut gradients = call.tower_gradients()?;
        gradients.view_mut_unfilled::<f32>("w")?.copy_from_slice(params.view("w")?);
        call.tower(gradients, 0.0)
    });
    let listener = FunctionServer::listen("127.0.0.1:0").unwrap();
    // The worker is the chief, so the server is another task.
    let cluster = ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", [ClusterSpec::NO_ADDRESS.to_owned(), listener.address()])
        .build()
        .unwrap();
    let server =
        listener.start(FunctionServerConfig::new(cluster, TaskId::worker(1), functions)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(FunctionClient::connect(server.target())).unwrap();
    let towers = Towers::new(&client, "tower", [TaskId::worker(1)]).unwrap();
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..rounds {
        times[0].push(time_of(1, || {
            let token = worker.token().unwrap().unwrap();
            worker.pull(&token, &mut params).unwrap();
            let mut gradients = worker.gradients();
            gradients
                .view_mut_unfilled::<f32>("w")
                .unwrap()
                .copy_from_slice(params.view("w").unwrap());
            worker.push(token, gradients).unwrap();
        }));
        times[1].push(time_of(1, || {
            let _ = runtime.block_on(towers.step(|_, call| Ok(call))).unwrap();
        }));
    }
    let [direct, tower] = times.map(median);
    let kib = elements * 4 / 1024;
    println!(
        "{kib:>8} KiB: pull, push {direct:>9.1} us, step of one tower {tower:>9.1} us, {:.2}x",
        tower / direct
    );
}

fn main() {
    let (rounds, count) = if is_test() { (1, 16) } else { (15, 2_000) };
    calls(rounds, count);
    open_calls(10 * count);
    for elements in [1 << 10, 1 << 18, 1 << 20] {
        towers(if is_test() { 1 } else { 41 }, elements);
    }
}
