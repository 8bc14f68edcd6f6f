//! What a step of training allocates: nothing, on either side.
//!
//! Every allocation is counted for the thread that makes it, so that the caller, the session's thread
//! and the shards' are told apart.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pushpull::blocking::Worker;
use pushpull::{
    ClusterSpec, DType, Gradients, Mode, Params, Partitioner, Ps, PsConfig, Push, Sgd, TableSpec,
    TaskId, Token, VariableSpec, WorkerConfig,
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

/// Held by the test that counts: all count together.
static ALONE: Mutex<()> = Mutex::new(());

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
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    SIDE.set(Side::Worker);
    let mut told = Told::default();
    // In one part for each shard, and in several.
    for (elements, steps) in [(1_001, 1_000), (150_001, 200)] {
        for case in cases(elements, steps) {
            told.add(&case, &per_step(&case));
        }
    }
    told.end();
}

#[test]
fn a_step_with_rows_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    SIDE.set(Side::Worker);
    let mut told = Told::default();
    for case in cases(8, 500) {
        told.add(&case, &per_step_of_rows(&case));
    }
    told.end();
}

fn cases(elements: u64, steps: usize) -> impl Iterator<Item = Case> {
    let modes = [(false, 1), (false, 2), (true, 1), (true, 2)].into_iter();
    modes.flat_map(move |(synchronous, shards)| {
        [false, true].map(|unix| Case { synchronous, unix, shards, elements, steps })
    })
}

/// What was counted, case by case.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    /// What worker and servers have allocated in each kind of step.
    fn add(&mut self, case: &Case, counts: &[[f64; 2]]) {
        let mode = if case.synchronous { "synchronous" } else { "asynchronous" };
        let transport = if case.unix { "uds" } else { "tcp" };
        let Case { shards, elements, .. } = case;
        let told = format!("{mode}, {transport}, {shards} shards, {elements} elements: {counts:?}");
        println!("{told}");
        if counts.iter().flatten().any(|&each| each > ONCE_IN_A_WHILE) {
            self.0.push(told);
        }
    }

    fn end(self) {
        let broken = self.0;
        assert!(broken.is_empty(), "allocations of worker and servers in a step: {broken:#?}");
    }
}

/// What worker and servers allocate in a step, verb by verb and as one operation.
fn per_step(case: &Case) -> [[f64; 2]; 2] {
    // One that is whole, one that is split with padding between, and more than one part of each shard.
    let split = Partitioner::Fixed { shards: u32::from(case.shards) };
    let variables = [
        VariableSpec::f32("small", [3]).unwrap(),
        VariableSpec::f32("split", [case.elements]).unwrap().partitioner(split.clone()),
        VariableSpec::f32("other", [case.elements]).unwrap().partitioner(split),
    ];
    training(case, &variables, |worker, params| {
        (0..WARM_UP).for_each(|_| step(worker, params));
        let verb_by_verb = counted(case.steps, || step(worker, params));
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, params).unwrap();
        let mut token = Some(token);
        (0..WARM_UP).for_each(|_| token = whole_step(worker, token.take(), params));
        let at_once = counted(case.steps, || {
            token = whole_step(worker, token.take(), params);
        });
        [verb_by_verb, at_once]
    })
}

/// Trains these variables on servers as a case has them.
fn training<R>(
    case: &Case,
    variables: &[VariableSpec],
    train: impl FnOnce(&mut Worker, &mut Params) -> R,
) -> R {
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
    let mut params = worker.join(variables, |_| ()).unwrap();
    let result = train(&mut worker, &mut params);
    worker.leave().unwrap();
    runtime.block_on(server.serve(async {})).unwrap();
    result
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
    counts(&worker.push(token, gradients).unwrap());
}

/// The same as one operation.
fn whole_step(worker: &mut Worker, token: Option<Token>, params: &mut Params) -> Option<Token> {
    let gradients = ones(worker);
    worker.push_and_pull(token.unwrap(), gradients, params).unwrap().next.unwrap()
}

/// The same of rows: whole gradients, and variable by variable. Of a sparse variable, of one that is split,
/// and of a table that has all its rows.
fn per_step_of_rows(case: &Case) -> [[f64; 2]; 2] {
    let split = Partitioner::Fixed { shards: u32::from(case.shards) };
    let width = case.elements;
    // It has room for few more: every push is looked at for new ones.
    let table = TableSpec::new(80 * ROWS);
    let rows = |name| VariableSpec::f32(name, [ROWS, width]).unwrap().sparse();
    // So many, with others between, that a push is of many stretches.
    let mut variables = Vec::from(SPARSE.map(|name| rows(name).partitioner(split.clone())));
    variables[0] = rows("whole");
    variables[1] =
        VariableSpec::table("table", DType::F32, [width], table).unwrap().partitioner(split);
    let dense = DENSE.map(|name| VariableSpec::f32(name, [3]).unwrap());
    dense.into_iter().enumerate().for_each(|(index, dense)| variables.insert(2 * index, dense));
    training(case, &variables, |worker, _| {
        let mut rows = Rows::new(width as usize);
        rows.fill(worker);
        (0..WARM_UP).for_each(|_| rows.step(worker));
        let whole = counted(case.steps, || rows.step(worker));
        (0..WARM_UP).for_each(|_| rows.streamed(worker));
        let streamed = counted(case.steps, || rows.streamed(worker));
        [whole, streamed]
    })
}

/// The rows of each of the variables.
const ROWS: u64 = 300;

/// The most rows that a step has of one.
const MOST: usize = 64;

const SPARSE: [&str; 7] = ["whole", "table", "a", "b", "c", "d", "e"];

/// As many as can be named in a tray without a list of them being made.
const DENSE: [&str; 4] = ["1", "2", "3", "4"];

/// What steps have of rows: more and fewer, rising or not, some twice.
struct Rows {
    width: usize,
    step: usize,
    ids: [u64; MOST],
    values: Vec<f32>,
}

impl Rows {
    fn new(width: usize) -> Rows {
        let values = vec![1.0; ROWS as usize * width];
        Rows { width, step: 0, ids: [0; MOST], values }
    }

    /// Gives the table all rows that it will have.
    fn fill(&self, worker: &mut Worker) {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        let ids: Vec<u64> = (0..ROWS).collect();
        gradients.set_rows("table", &ids, &self.values).unwrap();
        worker.push(token, gradients).unwrap();
    }

    /// How many ids the next step has.
    fn draw(&mut self) -> usize {
        self.step += 1;
        let count = MOST - self.step % 7;
        let each = if self.step.is_multiple_of(2) { 4 } else { 37 };
        let start = self.step as u64;
        for (place, id) in self.ids.iter_mut().enumerate() {
            *id = (start + place as u64 * each) % ROWS;
        }
        self.ids[count - 1] = self.ids[if self.step.is_multiple_of(3) { 0 } else { count - 1 }];
        count
    }

    fn pull(&mut self, worker: &mut Worker, token: &Token, count: usize) {
        for name in SPARSE {
            let values = &mut self.values[..count * self.width];
            worker.pull_rows(token, name, &self.ids[..count], values).unwrap();
        }
        self.values.fill(1.0);
    }

    fn step(&mut self, worker: &mut Worker) {
        let (token, count) = (worker.token().unwrap().unwrap(), self.draw());
        self.pull(worker, &token, count);
        let mut gradients = worker.gradients();
        for name in DENSE {
            gradients.view_mut::<f32>(name).unwrap()[0] = 1.0;
        }
        for name in SPARSE {
            let values = &self.values[..count * self.width];
            gradients.set_rows(name, &self.ids[..count], values).unwrap();
        }
        counts(&worker.push(token, gradients).unwrap());
    }

    fn streamed(&mut self, worker: &mut Worker) {
        let (token, count) = (worker.token().unwrap().unwrap(), self.draw());
        self.pull(worker, &token, count);
        let mut push = worker.begin(token).unwrap();
        for name in SPARSE {
            push.rows(name, &self.ids[..count], &self.values[..count * self.width]).unwrap();
        }
        counts(&push.finish().unwrap());
    }
}

/// Checks that a push is a part of what the servers have.
fn counts(push: &Push) {
    assert!(matches!(push, Push::Applied { .. } | Push::Accepted { .. }), "{push:?}");
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
