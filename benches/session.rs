//! The cost of a training session (`cargo bench -p benches --bench session`): a step of a session
//! beside the same step of a bare worker, against one server in this process.
//!
//! The three loops take turns, each with a server of its own, so that a busy machine slows them
//! alike. The model is small and its memory shared: the shortest step that there is.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::time::{Duration, Instant};

use pushpull::blocking::{TrainingSession, Worker};
use pushpull::server::PsListener;
use pushpull::training::{TrainingConfig, hooks};
use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

/// The steps of a loop in one round.
const STEPS: usize = 100;

/// A server with one shard on a Unix socket, and the variables of its worker.
struct BenchServer {
    _ps: Ps,
    _folder: tempfile::TempDir,
    cluster: ClusterSpec,
}

impl BenchServer {
    fn start(runtime: &tokio::runtime::Runtime) -> BenchServer {
        let folder = tempfile::tempdir().unwrap();
        let address = format!("unix:{}", folder.path().join("ps.sock").display());
        let listener: PsListener = runtime.block_on(Ps::listen(&address)).unwrap();
        let cluster = ClusterSpec::builder().job("ps", [address]).job("worker", ["127.0.0.1:1"]);
        let cluster = cluster.build().unwrap();
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.1));
        BenchServer { _ps: listener.start(config).unwrap(), _folder: folder, cluster }
    }

    fn config(&self) -> WorkerConfig {
        WorkerConfig::new(self.cluster.clone(), TaskId::worker(0))
    }
}

fn variables() -> [VariableSpec; 1] {
    [VariableSpec::f32("w", [16]).unwrap()]
}

/// Returns the time of a step of a bare worker.
fn bare(worker: &mut Worker, params: &mut pushpull::Params) -> Duration {
    let start = Instant::now();
    for _ in 0..STEPS {
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, params).unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut_unfilled("w").unwrap().copy_from_slice(params.view::<f32>("w").unwrap());
        worker.push(token, gradients).unwrap();
    }
    start.elapsed() / STEPS as u32
}

/// Returns the time of a step of a session.
fn in_session(session: &mut TrainingSession) -> Duration {
    let start = Instant::now();
    for _ in 0..STEPS {
        let mut step = session.step().unwrap().unwrap();
        let (params, gradients) = step.parts();
        gradients.view_mut_unfilled("w").unwrap().copy_from_slice(params.view::<f32>("w").unwrap());
        step.scalar("loss", 0.5);
        step.push().unwrap();
    }
    start.elapsed() / STEPS as u32
}

/// Returns the time in microseconds that a tenth of the rounds were below. Other programs only make
/// rounds longer.
fn fast(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 10].as_secs_f64() * 1e6
}

fn main() {
    // As the tests of a bench run it.
    let rounds = if std::env::args().any(|argument| argument == "--test") { 1 } else { 400 };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let servers = [(); 3].map(|()| BenchServer::start(&runtime));
    let mut worker = Worker::connect(servers[0].config()).unwrap();
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    let config = |server: &BenchServer| TrainingConfig::new(server.config()).variables(variables());
    let mut session = TrainingSession::start(config(&servers[1])).unwrap();
    let hooked = config(&servers[2])
        .hook(hooks::StepCounter::every_steps(100))
        .hook(hooks::StopAtStep::last(u64::MAX))
        .hook(hooks::NanGuard::fail())
        .hook(hooks::EarlyStopping::new("none", 1));
    let mut hooked = TrainingSession::start(hooked).unwrap();
    let mut times: [Vec<Duration>; 3] = Default::default();
    for round in 0..=rounds {
        let round_times =
            [bare(&mut worker, &mut params), in_session(&mut session), in_session(&mut hooked)];
        // The first round warms up.
        for (times, time) in times.iter_mut().zip(round_times).filter(|_| round > 0) {
            times.push(time);
        }
    }
    let [bare, session, hooked] = times.map(fast);
    println!(
        "a step, the fastest tenth of {rounds} rounds of {STEPS}: bare {bare:.2} us, session \
         {session:.2} us ({:+.2}), session with 4 hooks {hooked:.2} us ({:+.2})",
        session - bare,
        hooked - bare
    );
}
