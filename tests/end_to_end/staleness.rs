//! Stale gradients over sockets: measured on every shard, damped and compensated.

use pushpull::blocking::Worker;
use pushpull::server::StalenessPolicy;
use pushpull::{Asynchronous, Params, PsConfig, PsHandle, Push, Sgd, Token, VariableSpec};

use super::cluster::{TestCluster, vector};

/// Two variables, one on each of two servers.
fn variables() -> [VariableSpec; 2] {
    [vector("a", 3), vector("b", 3)]
}

fn ones(initial: &mut pushpull::worker::InitialValues<'_>) {
    for name in ["a", "b"] {
        initial.set(name, &[1.0_f32; 3]);
    }
}

/// Starts two servers at rate 0.5, and joins two workers.
fn pair(configure: impl Fn(PsConfig) -> PsConfig) -> (TestCluster, [(Worker, Params); 2]) {
    let cluster = TestCluster::start(2, 2, Sgd::new(0.5), configure);
    let workers = [0, 1].map(|index| {
        let mut worker = cluster.worker(index);
        let params = worker.join(&variables(), ones).unwrap();
        (worker, params)
    });
    (cluster, workers)
}

fn token(worker: &mut Worker) -> Token {
    worker.token().unwrap().expect("training continues")
}

/// Takes a token and pulls under it.
fn read(worker: &mut Worker, params: &mut Params) -> Token {
    let token = token(worker);
    worker.pull(&token, params).unwrap();
    token
}

/// Pushes `gradient` as every element of these variables, and returns its staleness.
fn push(worker: &mut Worker, token: Token, names: &[&str], gradient: f32) -> u64 {
    let mut gradients = worker.gradients();
    for name in names {
        gradients.view_mut::<f32>(name).unwrap().fill(gradient);
    }
    match worker.push(token, gradients).unwrap() {
        Push::Applied { staleness, .. } => staleness,
        other => panic!("{other:?}"),
    }
}

fn histogram(handle: &PsHandle) -> String {
    handle.metrics().staleness.to_string()
}

#[test]
fn every_server_counts_the_staleness_of_every_gradient() {
    let (cluster, [(mut a, mut params_a), (mut b, mut params_b)]) = pair(|config| config);
    let stale = read(&mut a, &mut params_a);
    for names in [&["a", "b"][..], &["a"], &["a"]] {
        let fresh = read(&mut b, &mut params_b);
        assert_eq!(push(&mut b, fresh, names, 1.0), 0);
    }
    assert_eq!(push(&mut a, stale, &["a", "b"], 1.0), 3);
    // Nothing is pulled under this token, so only the step owner knows when it was granted.
    let blind = token(&mut a);
    assert_eq!(push(&mut a, blind, &["a", "b"], 1.0), 0);
    let [first, second] = [0, 1].map(|server| cluster.servers[server].handle());
    assert_eq!(
        (histogram(&first), histogram(&second)),
        ("0: 4, 2-3: 1".into(), "0: 3, 2-3: 1".into())
    );
    let unknown = [&first, &second].map(|handle| handle.metrics().staleness_unknown);
    assert_eq!(unknown, [0, 1]);
    cluster.stop();
}

#[test]
fn the_histograms_of_all_shards_add_up_to_the_pushes() {
    const PUSHES: u64 = 100;
    let cluster = TestCluster::start(2, 3, Sgd::new(0.001), |c| c.shards(2).last_step(PUSHES));
    let variables: Vec<VariableSpec> =
        ["a", "b", "c", "d"].map(|name| vector(name, 5)).into_iter().collect();
    std::thread::scope(|scope| {
        for index in 0..3 {
            let cluster = &cluster;
            let variables = &variables;
            scope.spawn(move || {
                let mut worker = cluster.worker(index);
                let mut params = worker.join(variables, |_| {}).unwrap();
                while let Some(token) = worker.token().unwrap() {
                    worker.pull(&token, &mut params).unwrap();
                    push(&mut worker, token, &["a", "b", "c", "d"], 1.0);
                }
            });
        }
    });
    for server in &cluster.servers {
        let shards = server.handle().metrics_by_shard();
        assert_eq!(shards.len(), 2);
        for shard in &shards {
            let counts = (shard.staleness.count(), shard.staleness_unknown);
            assert_eq!((counts, shard.gradients_applied), ((PUSHES, 0), PUSHES));
        }
        let all = server.handle().metrics();
        assert_eq!((all.staleness.count(), all.gradients_applied), (2 * PUSHES, 2 * PUSHES));
    }
    cluster.stop();
}

/// Returns the values of both variables after two gradients of 2. The first brings them from 1 to
/// 0; the second was computed from the same values.
fn after_two(policy: StalenessPolicy) -> [f32; 2] {
    let (cluster, [(mut a, mut params_a), (mut b, mut params_b)]) =
        pair(|config| config.mode(Asynchronous::default().staleness(policy)));
    let stale = read(&mut a, &mut params_a);
    let fresh = read(&mut b, &mut params_b);
    assert_eq!(push(&mut b, fresh, &["a", "b"], 2.0), 0);
    assert_eq!(push(&mut a, stale, &["a", "b"], 2.0), 1);
    drop(read(&mut b, &mut params_b));
    let found = ["a", "b"].map(|name| params_b.view::<f32>(name).unwrap().to_vec());
    let uncompensated =
        cluster.servers.iter().map(|s| s.handle().metrics().gradients_uncompensated);
    assert_eq!(uncompensated.sum::<u64>(), 0);
    cluster.stop();
    found.map(|values| {
        assert_eq!(values, [values[0]; 3]);
        values[0]
    })
}

#[test]
fn policies_reach_every_server() {
    assert_eq!(after_two(StalenessPolicy::Ignore), [-1.0; 2]);
    assert_eq!(after_two(StalenessPolicy::Damp), [-0.5; 2]);
    // The compensated gradient is 2 + 0.5 * 4 * (0 - 1) = 0.
    assert_eq!(after_two(StalenessPolicy::DelayCompensation { lambda: 0.5 }), [0.0; 2]);
}
