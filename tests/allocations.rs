//! What a step of training allocates: nothing, on either side.
//!
//! Every allocation is counted for the thread that makes it, so that the caller, the session's thread
//! and the shards' are told apart.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use pushpull::blocking::Worker;
use pushpull::{
    ClusterSpec, Gradients, Mode, Params, Partitioner, Ps, PsConfig, Push, Sgd, TaskId, Token,
    VariableSpec, WorkerConfig,
};

/// Whose thread it is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    /// Not known yet.
    New,
    /// The caller's, or the session's.
    Worker,
    Server,
    /// Anything else: the harness, other tests.
    Other,
}

/// Allocations of the two sides while they are counted.
static COUNTED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Whether allocations are counted.
static ARMED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SIDE: Cell<Side> = const { Cell::new(Side::New) };
}

struct Counting;

// SAFETY: every call is handed on to the system's allocator as it is; what is done beside it allocates
// nothing that is not handed on in turn.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this call.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() {
    if ARMED.load(Ordering::Relaxed) == 0 {
        return;
    }
    // A thread that ends has no side any more.
    let _ = SIDE.try_with(|side| {
        if side.get() == Side::New {
            // Asking for the name may allocate: that is not counted.
            side.set(Side::Other);
            side.set(match std::thread::current().name() {
                Some(name) if name.starts_with("worker-") => Side::Worker,
                Some(name) if name.starts_with("ps-") => Side::Server,
                _ => Side::Other,
            });
        }
        match side.get() {
            Side::Worker => _ = COUNTED[0].fetch_add(1, Ordering::Relaxed),
            Side::Server => _ = COUNTED[1].fetch_add(1, Ordering::Relaxed),
            Side::New | Side::Other => {}
        }
    });
}

/// Steps that fill what is kept.
const WARM_UP: usize = 100;

/// One setting: the mode, the transport, how many shards, and how many elements its variables have.
struct Case {
    synchronous: bool,
    unix: bool,
    shards: u16,
    elements: u64,
    /// Steps that are counted.
    steps: usize,
}

#[test]
fn a_step_allocates_nothing() {
    SIDE.set(Side::Worker);
    let mut broken = Vec::new();
    // In one part for each shard, and in several.
    for (elements, steps) in [(1_001, 1_000), (150_001, 200)] {
        for (synchronous, shards) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            for unix in [false, true] {
                let [[worker, server], [at_once, server_at_once]] =
                    per_step(&Case { synchronous, unix, shards, elements, steps });
                let mode = if synchronous { "synchronous" } else { "asynchronous" };
                let transport = if unix { "uds" } else { "tcp" };
                let told = format!(
                    "{mode}, {transport}, {shards} shards, {elements} elements: {worker}, {server}; \
                     at once {at_once}, {server_at_once}"
                );
                println!("{told}");
                if [worker, server, at_once, server_at_once]
                    .iter()
                    .any(|&each| each > ONCE_IN_A_WHILE)
                {
                    broken.push(told);
                }
            }
        }
    }
    assert!(broken.is_empty(), "allocations of worker and servers in a step: {broken:#?}");
}

/// What worker and servers allocate in a step, verb by verb and as one operation.
fn per_step(case: &Case) -> [[f64; 2]; 2] {
    let directory = tempfile::tempdir().unwrap();
    let address = match case.unix {
        true => format!("unix:{}", directory.path().join("ps.sock").display()),
        false => "127.0.0.1:0".to_owned(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(Ps::listen(&address)).unwrap();
    let (ps, workers) = ([listener.address()], ["127.0.0.1:1"]);
    let cluster = ClusterSpec::builder().job("ps", ps).job("worker", workers).build().unwrap();
    let mode = match case.synchronous {
        true => Mode::Synchronous { replicas_to_aggregate: 1, total_num_replicas: 1 },
        false => Mode::Asynchronous,
    };
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let server = listener.start(config.mode(mode).shards(case.shards)).unwrap();
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    // One that is whole, one that is split with padding between, and more than one part of each shard.
    let split = Partitioner::Fixed { shards: u32::from(case.shards) };
    let variables = [
        VariableSpec::f32("small", [3]).unwrap(),
        VariableSpec::f32("split", [case.elements]).unwrap().partitioner(split.clone()),
        VariableSpec::f32("other", [case.elements]).unwrap().partitioner(split),
    ];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    (0..WARM_UP).for_each(|_| step(&mut worker, &mut params));
    let verb_by_verb = counted(case.steps, || step(&mut worker, &mut params));
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    let mut token = Some(token);
    (0..WARM_UP).for_each(|_| token = whole_step(&mut worker, token.take(), &mut params));
    let at_once = counted(case.steps, || {
        token = whole_step(&mut worker, token.take(), &mut params);
    });
    drop(token);
    worker.leave().unwrap();
    runtime.block_on(server.serve(async {})).unwrap();
    [verb_by_verb, at_once]
}

/// What worker and servers allocate while a step is taken so many times, for each. Again if it is something,
/// a few times: what is kept grows to its end, and what a step takes is taken in all of them.
fn counted(steps: usize, mut step: impl FnMut()) -> [f64; 2] {
    let mut least = [f64::INFINITY; 2];
    for _ in 0..ROUNDS_MAX {
        COUNTED.iter().for_each(|counted| counted.store(0, Ordering::Relaxed));
        ARMED.store(1, Ordering::SeqCst);
        (0..steps).for_each(|_| step());
        ARMED.store(0, Ordering::SeqCst);
        let counts = [0, 1].map(|side| COUNTED[side].load(Ordering::Relaxed) as f64 / steps as f64);
        if counts.iter().sum::<f64>() < least.iter().sum::<f64>() {
            least = counts;
        }
        if least.iter().all(|&count| count <= ONCE_IN_A_WHILE) {
            break;
        }
    }
    least
}

/// How often steps are counted at the most.
const ROUNDS_MAX: usize = 5;

fn step(worker: &mut Worker, params: &mut Params) {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let gradients = ones(worker);
    match worker.push(token, gradients).unwrap() {
        Push::Applied { .. } | Push::Accepted { .. } => {}
        other => panic!("{other:?}"),
    }
}

/// The same as one operation.
fn whole_step(worker: &mut Worker, token: Option<Token>, params: &mut Params) -> Option<Token> {
    let gradients = ones(worker);
    worker.push_and_pull(token.unwrap(), gradients, params).unwrap().next.unwrap()
}

fn ones(worker: &mut Worker) -> Gradients {
    let mut gradients = worker.gradients();
    for name in ["small", "split", "other"] {
        gradients.view_mut::<f32>(name).unwrap()[0] = 1.0;
    }
    gradients
}

/// What is kept may have to grow once more, when threads meet as they have not met before.
const ONCE_IN_A_WHILE: f64 = 0.01;
