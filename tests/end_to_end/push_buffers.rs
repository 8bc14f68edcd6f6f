//! Gradients written in push buffers: they give the same values as sent gradients, bit for bit, and
//! survive drops, refusals and restarts of servers.

use std::path::Path;

use pushpull::blocking::Worker;
use pushpull::server::Network;
use pushpull::variable::{DType, Partitioner, Shape};
use pushpull::worker::Codec;
use pushpull::{
    Adam, Error, Mode, Params, PsConfig, Pulled, Push, Storage, Synchronous, VariableSpec,
    WorkerConfig,
};

use super::cluster::{TestCluster, block_on, spec, vector};
use super::shared_values::{await_counts, same_host_only, start};

const SYNCHRONOUS: Synchronous = Synchronous::new(1);

/// Variables of every kind: some are in a push buffer, the others are sent with the push.
fn variables() -> Vec<VariableSpec> {
    let split = Partitioner::Fixed { shards: 2 };
    vec![
        vector("small", 3),
        vector("large", 300_001),
        vector("split", 5_000).partitioner(split),
        vector("encoded", 1_000),
        VariableSpec::f32("rows", [50, 4]).unwrap().sparse(),
        VariableSpec::bf16("halves", [700]).unwrap(),
        VariableSpec::new("wide", DType::F64, Shape::new([999]).unwrap()).unwrap(),
        vector("last", 70_000),
    ]
}

/// Returns a number between -1 and 1 that depends only on `at`.
fn noise(at: u64) -> f64 {
    let mut x = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 27)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// Returns the clipped gradients of a step. Every third step omits `last`.
fn gradients(worker: &mut Worker, step: u64) -> pushpull::Gradients {
    let mut gradients = worker.gradients();
    let value = |index: usize| noise(step * 1_000_003 + index as u64);
    for name in ["small", "large", "split", "encoded", "last"] {
        let view = gradients.view_mut::<f32>(name).unwrap();
        view.iter_mut().enumerate().for_each(|(index, g)| *g = value(index) as f32);
    }
    let wide = gradients.view_mut::<f64>("wide").unwrap();
    wide.iter_mut().enumerate().for_each(|(index, g)| *g = value(index));
    let halves = gradients.view_mut::<pushpull::variable::bf16>("halves").unwrap();
    halves
        .iter_mut()
        .enumerate()
        .for_each(|(index, g)| *g = pushpull::variable::bf16::from_f64(value(index)));
    let rows: Vec<f32> = (0..12).map(|index| value(index) as f32).collect();
    gradients.set_rows("rows", &[step % 7, 9, 40], &rows).unwrap();
    if step.is_multiple_of(3) {
        gradients.omit("last").unwrap();
    }
    gradients.clip_by_norm(25.0).unwrap();
    gradients.clip_by_global_norm(40.0).unwrap();
    gradients
}

fn bits(params: &Params) -> Vec<u64> {
    let names = ["small", "large", "split", "encoded", "last"];
    let narrow = names.iter().flat_map(|name| params.view::<f32>(name).unwrap());
    let wide = params.view::<f64>("wide").unwrap().iter().map(|value| value.to_bits());
    let halves = params.view::<pushpull::variable::bf16>("halves").unwrap();
    let halves = halves.iter().map(|value| u64::from(value.to_bits()));
    narrow.map(|value| u64::from(value.to_bits())).chain(wide).chain(halves).collect()
}

const STEPS: u64 = 12;

/// Trains for [`STEPS`] steps. Returns the bits of the values and the number of direct pushes.
fn train(
    folder: &Path,
    configure: impl Fn(PsConfig) -> PsConfig,
    configure_worker: impl Fn(WorkerConfig) -> WorkerConfig,
) -> (Vec<u64>, u64) {
    let cluster =
        same_host_only(folder, |config| configure(config.optimizer_for("*", Adam::new(0.01))));
    let config = configure_worker(cluster.config(0)).codec("encoded", Codec::Int8);
    let mut worker = Worker::connect(config).unwrap();
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    let mut token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    for step in 0..STEPS {
        let gradients = gradients(&mut worker, step);
        token = match step % 3 {
            0 => {
                worker.push_and_pull(token, gradients, &mut params).unwrap().next.unwrap().unwrap()
            }
            1 => {
                worker.push(token, gradients).unwrap();
                worker.token().unwrap().unwrap()
            }
            _ => {
                worker.start_push(token, gradients).wait().unwrap();
                worker.token().unwrap().unwrap()
            }
        };
        assert_eq!(worker.pull(&token, &mut params).unwrap(), Pulled::Pulled { step: step + 1 });
    }
    drop(token);
    let direct = cluster.handle().metrics().direct_pushes;
    worker.leave().unwrap();
    cluster.stop();
    (bits(&params), direct)
}

#[test]
fn gradients_in_push_buffers_give_the_same_values_as_sent_gradients() {
    let folder = tempfile::tempdir().unwrap();
    for mode in [Mode::default(), SYNCHRONOUS.into()] {
        for shards in [1, 2] {
            let server = |config: PsConfig| config.mode(mode).shards(shards);
            let (sent, none) = train(folder.path(), server, |config| config.shared_memory(false));
            let (direct, some) = train(folder.path(), server, |config| config);
            assert!(sent == direct, "{mode:?} with {shards} shards");
            // The first gradients may be written before there is a push buffer.
            assert_eq!(none, 0);
            assert!(some >= (STEPS - 2) * u64::from(shards), "{some} pushes of {shards} shards");
        }
    }
}

#[test]
fn gradients_are_sent_to_a_server_without_push_buffers() {
    let folder = tempfile::tempdir().unwrap();
    let state = tempfile::tempdir().unwrap();
    let (shared, _) = train(folder.path(), |config| config, |config| config);
    let none = |config: PsConfig| config.network(Network::default().shared_memory(false));
    let (sent, direct) = train(folder.path(), none, |config| config);
    assert!(shared == sent && direct == 0);
    // State in files gives the same values.
    let in_files = |config: PsConfig| {
        let state = state.path().to_owned();
        config.storage(Storage::directory(state).bytes_max(1 << 30))
    };
    let (kept, _) = train(folder.path(), in_files, |config| config);
    assert!(shared == kept);
}

/// Two variables that are in a push buffer, and one in two partitions.
fn plain() -> Vec<VariableSpec> {
    let split = Partitioner::Fixed { shards: 2 };
    // Only a whole variable is written in place.
    let whole = vector("w", 200_000).partitioner(Partitioner::None);
    vec![vector("v", 3), whole, vector("split", 100).partitioner(split)]
}

/// Pushes gradients whose elements are all `value`.
fn push(worker: &mut Worker, value: f32) {
    let token = worker.token().unwrap().unwrap();
    let gradients = filled(worker, value);
    assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
}

fn filled(worker: &mut Worker, value: f32) -> pushpull::Gradients {
    let mut gradients = worker.gradients();
    for name in ["v", "w", "split"] {
        gradients.view_mut::<f32>(name).unwrap().fill(value);
    }
    gradients
}

/// Pulls the values, checks that all elements are equal, and returns their value.
fn value(worker: &mut Worker, params: &mut Params) -> f32 {
    let token = worker.token().unwrap().unwrap();
    assert!(!worker.pull(&token, params).unwrap().is_stale());
    let first = params.view::<f32>("v").unwrap()[0];
    for name in ["v", "w", "split"] {
        assert!(params.view::<f32>(name).unwrap().iter().all(|&value| value == first), "{name}");
    }
    first
}

/// A loop that adds to its gradients is right in memory that is used again: that of a push buffer,
/// in which other workers have written before, and that of the heap.
#[test]
fn gradients_begin_at_zero_in_memory_that_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    for shared in [true, false] {
        let cluster = same_host_only(folder.path(), |config| config);
        for round in 0..3 {
            let config = cluster.config(0).shared_memory(shared);
            let mut worker = Worker::connect(config).unwrap();
            let mut params = worker.join(&plain(), |_| ()).unwrap();
            for step in 0..4 {
                let before = value(&mut worker, &mut params);
                assert_eq!(before, -(4.0 * round as f32 + step as f32), "shared: {shared}");
                let token = worker.token().unwrap().unwrap();
                let mut gradients = worker.gradients();
                for name in ["v", "w", "split"] {
                    gradients.view_mut::<f32>(name).unwrap().iter_mut().for_each(|g| *g += 0.25);
                    gradients.view_mut::<f32>(name).unwrap().iter_mut().for_each(|g| *g += 0.75);
                }
                worker.push(token, gradients).unwrap();
            }
            worker.leave().unwrap();
        }
        assert_eq!(cluster.handle().metrics().direct_pushes > 0, shared);
        cluster.stop();
    }
}

/// Checks gradients that are pushed to another server than the one that shares their memory. The
/// push buffers of both servers, and their slots, have the same identifiers.
#[test]
fn gradients_of_another_worker_are_applied_as_written() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let clusters = folders.each_ref().map(|folder| same_host_only(folder.path(), |config| config));
    let codecs = [None, Some(Codec::Bf16)];
    let mut workers = [0, 1].map(|index: usize| {
        let config = clusters[index].config(0).codec("v", codecs[index]);
        let mut worker = Worker::connect(config).unwrap();
        let params = worker.join(&plain(), |_| ()).unwrap();
        (worker, params)
    });
    for round in 0..4 {
        for (from, to) in [(0, 1), (1, 0)] {
            let gradients = filled(&mut workers[from].0, 3.0);
            let (worker, params) = &mut workers[to];
            let token = worker.token().unwrap().unwrap();
            assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
            assert_eq!(value(worker, params), -5.0 * round as f32 - 3.0);
            push(worker, 2.0);
            assert_eq!(value(worker, params), -5.0 * (round + 1) as f32);
        }
    }
    for cluster in clusters {
        assert_eq!(cluster.handle().metrics().direct_pushes, 8, "copied gradients count, too");
        cluster.stop();
    }
}

#[test]
fn non_finite_elements_in_push_buffers_are_refused_with_their_index() {
    let folder = tempfile::tempdir().unwrap();
    for mode in [Mode::default(), SYNCHRONOUS.into()] {
        for shards in [1, 2] {
            let cluster = same_host_only(folder.path(), |config| config.mode(mode).shards(shards));
            let mut worker = cluster.worker(0);
            let mut params = worker.join(&plain(), |_| ()).unwrap();
            let before = value(&mut worker, &mut params);
            for bad in [0, 70_000, 199_999] {
                let token = worker.token().unwrap().unwrap();
                let mut gradients = filled(&mut worker, 1.0);
                gradients.view_mut::<f32>("w").unwrap()[bad] = f32::NAN;
                match worker.push(token, gradients) {
                    Err(Error::NonFinite { variable, element, .. }) => {
                        assert_eq!((variable.as_str(), element), ("w", bad));
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(value(&mut worker, &mut params), before, "refused pushes change nothing");
            let token = worker.token().unwrap().unwrap();
            let gradients = filled(&mut worker, 1.0);
            worker.push(token, gradients).unwrap();
            assert_eq!(value(&mut worker, &mut params), before - 1.0);
            cluster.stop();
        }
    }
}

#[test]
fn dropped_gradients_free_their_slots_and_excess_gradients_are_sent() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = same_host_only(folder.path(), |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&plain(), |_| ()).unwrap();
    (0..3).for_each(|_| push(&mut worker, 1.0));
    for _ in 0..10 {
        drop([filled(&mut worker, 9.0), filled(&mut worker, 9.0), filled(&mut worker, 9.0)]);
    }
    let before = cluster.handle().metrics().direct_pushes;
    let all = [1.0, 2.0, 4.0].map(|value| filled(&mut worker, value));
    let tokens = [0; 3].map(|_| worker.token().unwrap().unwrap());
    let pushes: Vec<_> =
        tokens.into_iter().zip(all).map(|(token, all)| worker.start_push(token, all)).collect();
    for push in pushes {
        assert!(matches!(push.wait().unwrap(), Push::Applied { .. }));
    }
    assert_eq!(cluster.handle().metrics().direct_pushes - before, 2, "there are two buffer slots");
    assert_eq!(value(&mut worker, &mut params), -10.0);
    (0..4).for_each(|_| push(&mut worker, 0.5));
    assert_eq!(cluster.handle().metrics().direct_pushes - before, 6);
    assert_eq!(value(&mut worker, &mut params), -12.0);
    cluster.stop();
}

/// Checks that a gradient in a step is not overwritten before the step is applied, however early
/// the next gradient is started.
#[test]
fn an_accepted_gradient_is_not_overwritten_before_all_shards_apply_it() {
    let folder = tempfile::tempdir().unwrap();
    let mode = Synchronous::new(2);
    let cluster = same_host_only(folder.path(), |config| config.mode(mode).shards(2));
    let replicas = [0, 1].map(|index| {
        let config = cluster.config(index);
        std::thread::spawn(move || {
            let mut worker = Worker::connect(config).unwrap();
            let mut params = worker.join(&plain(), |_| ()).unwrap();
            for step in 0..30 {
                let token = worker.token().unwrap().unwrap();
                assert_eq!(worker.pull(&token, &mut params).unwrap(), Pulled::Pulled { step });
                for name in ["v", "w", "split"] {
                    let values = params.view::<f32>(name).unwrap();
                    assert!(values.iter().all(|&value| value == -(step as f32)), "{name}");
                }
                let gradients = filled(&mut worker, 1.0);
                assert!(matches!(worker.push(token, gradients).unwrap(), Push::Accepted { .. }));
                drop([filled(&mut worker, 1e9), filled(&mut worker, 1e9)]);
            }
            worker.leave().unwrap();
        })
    });
    replicas.into_iter().for_each(|replica| replica.join().unwrap());
    await_counts(&cluster, |metrics| metrics.direct_pushes > 60);
    cluster.stop();
}

#[test]
fn gradients_outlive_the_server_that_shares_their_memory() {
    let folder = tempfile::tempdir().unwrap();
    let state = tempfile::tempdir().unwrap();
    let stored = |config: PsConfig| {
        let state = state.path().to_owned();
        config.storage(Storage::directory(state).bytes_max(1 << 30))
    };
    let mut cluster = same_host_only(folder.path(), stored);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&plain(), |_| ()).unwrap();
    for life in 0..3 {
        (0..3).for_each(|_| push(&mut worker, 1.0));
        let mut held = filled(&mut worker, 1.0);
        let token = worker.token().unwrap().unwrap();
        let spec = cluster.spec.clone();
        cluster.suspend();
        held.view_mut::<f32>("w").unwrap()[7] = 1.0;
        let address = spec.task_address("ps", 0).unwrap();
        let listener = block_on(pushpull::Ps::listen(address)).unwrap();
        let servers = vec![start(listener, &spec, stored)];
        cluster = TestCluster { spec, servers };
        assert!(matches!(worker.push(token, held).unwrap(), Push::Applied { .. }));
        assert_eq!(value(&mut worker, &mut params), -4.0 * (life + 1) as f32);
    }
    cluster.stop();
}

#[test]
fn gradients_outlive_a_server_that_loses_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = same_host_only(folder.path(), |config| config);
    let mut worker = cluster.worker(0);
    worker.join(&plain(), |_| ()).unwrap();
    (0..3).for_each(|_| push(&mut worker, 1.0));
    let mut held = filled(&mut worker, 1.0);
    let token = worker.token().unwrap().unwrap();
    let address = cluster.spec.task_address("ps", 0).unwrap().to_owned();
    cluster.stop();
    let listener = block_on(pushpull::Ps::listen(&address)).unwrap();
    let spec = spec([listener.address()], 2);
    let cluster = TestCluster { servers: vec![start(listener, &spec, |config| config)], spec };
    held.view_mut::<f32>("w").unwrap().fill(2.0);
    let error = worker.push(token, held).unwrap_err();
    assert!(matches!(error, Error::StateLost { .. }), "{error}");
    filled(&mut worker, 3.0).scale(0.5);
    cluster.stop();
}
