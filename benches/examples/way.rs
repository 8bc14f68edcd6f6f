//! The two processes whose code `benches/ways` counts.
//!
//! `way server WAY` prints its addresses: of a shard, and of the functions beside it. `way worker
//! WAY ADDRESS ADDRESS` is its worker or client. Each line of the input of either is a number of
//! operations. The worker carries them out, or pauses for 0; the server has nothing to do. Both then
//! call [`mark`], print a line, and read the next. They end with their input.
//!
//! The program uses public names only, so that it also compiles in older checkouts.

use std::error::Error;
use std::time::Duration;

use pushpull::blocking::{Ps, TrainingSession, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::services::{
    Call, Coordinator, CoordinatorConfig, FunctionClient, FunctionServer, FunctionServerConfig,
    Functions,
};
use pushpull::training::TrainingConfig;
use pushpull::training::data::{GrantedBatches, Pipeline, SliceSource};
use pushpull::{Adam, ClusterSpec, Gradients, PsConfig, TaskId, VariableSpec, WorkerConfig};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// One operation of a way.
type Operation = Box<dyn FnMut() -> Result<()>>;

/// Elements of the variable. A shard writes so many to new blocks, and one part holds them.
const ELEMENTS: usize = 1 << 16;

/// Duration of an operation of `idle` and `heartbeat`. A heartbeat is due every fifth of a lease.
/// An interval without operations takes half of it, as long as one with operations.
const PAUSE: Duration = Duration::from_millis(200);

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", way] => serve(way),
        ["worker", way, ps, functions] => obey(operation(way, ps, functions)?),
        _ => Err("usage: way server WAY | way worker WAY PS FUNCTIONS".into()),
    }
}

/// Carries out as many operations as each line of the input says.
fn obey(mut operation: Operation) -> Result<()> {
    for line in std::io::stdin().lines() {
        let operations: u32 = line?.parse()?;
        if operations == 0 {
            std::thread::sleep(PAUSE / 2);
        }
        for _ in 0..operations {
            operation()?;
        }
        mark();
        println!("done");
    }
    Ok(())
}

/// Makes callgrind write and clear its counts.
#[inline(never)]
fn mark() {
    std::hint::black_box(());
}

/// Serves one shard, and functions to the ways that call them.
fn serve(way: &str) -> Result<()> {
    let listener = Ps::listen("127.0.0.1:0")?;
    let functions = FunctionServer::listen("127.0.0.1:0")?;
    let addresses = [listener.address(), functions.address()];
    let cluster = cluster(&addresses[0], &addresses[1])?;
    // No heartbeat is due in the other ways.
    let lease = if way == "heartbeat" { 5 * PAUSE } else { Duration::from_secs(3600) };
    let folder = tempfile::tempdir()?;
    let mut config = PsConfig::new(cluster.clone(), TaskId::ps(0), Adam::new(0.1)).lease(lease);
    if way == "save" {
        config = config.checkpoints(Checkpoints::new(LocalDirectory::create(folder.path())?));
    }
    let _ps = Ps::start(listener, config)?;
    let mut server = None;
    if matches!(way, "call" | "scheduled") {
        let offered = Functions::new().elementwise().add("push", |call| {
            let mut gradients = call.gradients()?;
            gradients.view_mut_unfilled::<f32>("w")?.fill(0.5);
            call.push(gradients)
        });
        server = Some(functions.start(FunctionServerConfig::new(
            cluster,
            TaskId::worker(0),
            offered,
        ))?);
    }
    println!("{} {}", addresses[0], addresses[1]);
    obey(Box::new(|| Ok(())))?;
    drop(server);
    Ok(())
}

fn cluster(ps: &str, functions: &str) -> Result<ClusterSpec> {
    Ok(ClusterSpec::builder().job("ps", [ps]).job("worker", [functions]).build()?)
}

/// Connects a worker or a client, and returns its operation.
fn operation(way: &str, ps: &str, functions: &str) -> Result<Operation> {
    let config = WorkerConfig::new(cluster(ps, functions)?, TaskId::worker(0));
    let variables = [VariableSpec::f32("w", [ELEMENTS as u64])?];
    if matches!(way, "session" | "leased") {
        return session(way, config, variables);
    }
    if matches!(way, "call" | "scheduled") {
        return call(way, functions, variables);
    }
    let mut worker = Worker::connect(config)?;
    let mut params = worker.join(&variables, |_| ())?;
    let push = move |worker: &mut Worker| {
        let token = worker.token()?.ok_or("the training has ended")?;
        let mut gradients = worker.gradients();
        fill(&mut gradients)?;
        worker.push(token, gradients)?;
        Ok(())
    };
    Ok(match way {
        "push" => Box::new(move || push(&mut worker)),
        "pull" => {
            let token = worker.token()?.ok_or("the training has ended")?;
            Box::new(move || worker.pull(&token, &mut params).map(drop).map_err(Into::into))
        }
        "save" => Box::new(move || worker.save(b"").map(drop).map_err(Into::into)),
        "idle" | "heartbeat" => Box::new(move || {
            // A member with a connection, which sends nothing else.
            let _ = &worker;
            std::thread::sleep(PAUSE);
            Ok(())
        }),
        _ => return Err(format!("there is no way {way:?}").into()),
    })
}

fn fill(gradients: &mut Gradients) -> Result<()> {
    gradients.view_mut_unfilled::<f32>("w")?.fill(0.5);
    Ok(())
}

/// A step of a training session, with granted samples if it is leased.
fn session(way: &str, config: WorkerConfig, variables: [VariableSpec; 1]) -> Result<Operation> {
    let samples = SliceSource::new("samples", (0..1 << 16).collect::<Vec<u32>>());
    let pipeline = Pipeline::new(samples).shuffle(7).batch(32).repeat();
    let leased = way == "leased";
    let config = if leased { config.data(pipeline.data_set()?) } else { config };
    let mut batches = leased.then(|| pipeline.loader().map(GrantedBatches::new)).transpose()?;
    let mut session = TrainingSession::start(TrainingConfig::new(config).variables(variables))?;
    Ok(Box::new(move || {
        let mut step = session.step()?.ok_or("the training has ended")?;
        if let Some(batches) = &mut batches {
            step.load(batches)?;
        }
        fill(step.parts().1)?;
        step.push()?;
        Ok(())
    }))
}

/// A call of a function, or a scheduled one, which pushes.
fn call(way: &str, functions: &str, variables: [VariableSpec; 1]) -> Result<Operation> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = runtime.block_on(FunctionClient::connect(functions))?;
    if way == "call" {
        return Ok(Box::new(move || {
            let call = Call::new("identity").feed("a", 0.5_f32);
            runtime.block_on(client.call(call))?;
            Ok(())
        }));
    }
    runtime.block_on(client.declare(&variables, |_| ()))?;
    let coordinator = Coordinator::start(client, CoordinatorConfig::new())?;
    Ok(Box::new(move || {
        runtime.block_on(coordinator.schedule(Call::new("push")))?;
        runtime.block_on(coordinator.join())?;
        Ok(())
    }))
}
