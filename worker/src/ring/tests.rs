//! Trains on rings of threads, over real sockets.

mod codecs;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pushpull_checkpoint::{LocalDirectory, Retention};
use pushpull_collective::{Launch, Ring, RingConfig, RingError, blocking};
use pushpull_common::initializer::Initializer;
use pushpull_common::tensor::{DType, Shape, bf16};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::{Adam, Lamb, Momentum, Sgd};

use super::*;
use crate::error::Error;
use crate::gradients::params::{Gradients, Params};

static JOBS: AtomicU32 = AtomicU32::new(0);

/// Runs a ring of this many threads, whose rings begin with this one.
pub(super) fn run<R: Send>(size: u32, rank: impl Fn(Ring) -> R + Sync) -> Vec<R> {
    let folder = tempfile::tempdir().unwrap();
    let job = JOBS.fetch_add(1, Ordering::Relaxed);
    let config = |index: u32| {
        let lookup = |name: &str| match name {
            "OMPI_COMM_WORLD_RANK" => Some(index.to_string()),
            "OMPI_COMM_WORLD_SIZE" => Some(size.to_string()),
            "PMIX_NAMESPACE" => Some(format!("trainer-{}-{job}", std::process::id())),
            _ => None,
        };
        let config = RingConfig::new(Launch::from_lookup(lookup).unwrap()).folder(folder.path());
        config.lease(Duration::from_secs(2)).join_timeout(Duration::from_secs(20))
    };
    std::thread::scope(|scope| {
        let start = |index: u32| {
            let config = config(index);
            let rank = &rank;
            scope.spawn(move || rank(blocking::Ring::join(config).unwrap().into_inner()))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The operations of such a ring never wait for another thread of this process.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

pub(super) fn variables() -> Vec<VariableSpec> {
    let shape = |extents: &[u64]| Shape::new(extents).unwrap();
    vec![
        VariableSpec::f32("w", [33, 7]).unwrap().initializer(Initializer::HeNormal),
        VariableSpec::f32("b", [7]).unwrap(),
        VariableSpec::new("wide", DType::F64, shape(&[5])).unwrap(),
        VariableSpec::new("half", DType::Bf16, shape(&[9])).unwrap(),
        VariableSpec::new("count", DType::I64, shape(&[2])).unwrap().plain(),
        VariableSpec::f32("running", [3]).unwrap().local(),
    ]
}

/// Fills the gradients of a step from the values: each rank has another share of one batch.
pub(super) fn fill(params: &Params, gradients: &mut Gradients, rank: u32) {
    let share = |at: usize| (at as f32 + 1.0) * (rank as f32 + 1.0) / 64.0;
    let w: Vec<f32> = params.view::<f32>("w").unwrap().to_vec();
    let out = gradients.view_mut::<f32>("w").unwrap();
    out.iter_mut().enumerate().for_each(|(at, g)| *g = w[at] + share(at));
    let out = gradients.view_mut::<f32>("b").unwrap();
    out.iter_mut().enumerate().for_each(|(at, g)| *g = share(at));
    gradients.view_mut::<f64>("wide").unwrap().fill(f64::from(rank) + 0.5);
    gradients.view_mut::<bf16>("half").unwrap().fill(bf16::from_f32(share(1)));
}

/// The bytes of all values.
pub(super) fn bytes(params: &Params) -> Vec<u8> {
    params.buffer.bytes().to_vec()
}

#[test]
fn all_ranks_have_the_same_values_after_each_step() {
    let rules: Vec<fn() -> RingTrainerConfig> = vec![
        || RingTrainerConfig::new(Sgd::new(0.1)),
        || RingTrainerConfig::new(Adam::new(0.1)).rate_for("b", 0.5),
        || RingTrainerConfig::new(Momentum::new(0.1, 0.9)).rule_for("b", Adam::new(0.01)),
        || RingTrainerConfig::new(Lamb::new(0.1)),
    ];
    for rule in rules {
        let values = run(3, |ring| {
            block_on(async {
                let rank = ring.rank();
                let config = rule().variables(variables());
                let mut trainer =
                    RingTrainer::start(ring, config, |_| assert_eq!(rank, 0)).await.unwrap();
                let first = bytes(trainer.parts().0);
                for step in 1..=5 {
                    let (params, gradients) = trainer.parts();
                    fill(params, gradients, rank);
                    assert_eq!(trainer.apply().await.unwrap(), step);
                }
                let last = trainer.leave().await;
                assert_eq!(last.step(), 5);
                (first, bytes(&last))
            })
        });
        assert_ne!(values[0].0, values[0].1);
        assert!(values.iter().all(|rank| *rank == values[0]), "all ranks are equal");
    }
}

#[test]
fn the_mean_of_shares_trains_as_the_joined_batch_does() {
    let train = |size: u32, shares: &'static [u32]| {
        let values = run(size, move |ring| {
            block_on(async {
                let rank = ring.rank();
                let config = RingTrainerConfig::new(Sgd::new(0.25)).variables(variables());
                let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
                for _ in 0..3 {
                    let (_, gradients) = trainer.parts();
                    // Sums and means of these numbers are exact.
                    let mine = shares.iter().filter(|&&share| share % size == rank);
                    let mean = mine.clone().sum::<u32>() as f32 / mine.count() as f32;
                    gradients.view_mut::<f32>("w").unwrap().fill(mean);
                    trainer.apply().await.unwrap();
                }
                bytes(&trainer.leave().await)
            })
        });
        values.into_iter().next().unwrap()
    };
    assert!(train(1, &[0, 1, 2, 3]) == train(2, &[0, 1, 2, 3]));
    assert!(train(1, &[0, 1, 2, 3]) == train(4, &[0, 1, 2, 3]));
}

#[test]
fn a_checkpoint_of_a_ring_continues_on_a_ring_of_another_size() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(LocalDirectory::create(folder.path()).unwrap());
    let steps = |ring: Ring, from: u64, to: u64, saves: bool| {
        let storage = storage.clone();
        block_on(async move {
            let rank = ring.rank();
            let config = RingTrainerConfig::new(Adam::new(0.1)).variables(variables());
            let config = config.checkpoints(storage, Retention::default());
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            assert_eq!(trainer.global_step(), from);
            let restored = trainer.restored().map(|restored| restored.step);
            assert_eq!(restored, (rank == 0 && from > 0).then_some(from));
            while trainer.global_step() < to {
                let (params, gradients) = trainer.parts();
                fill(params, gradients, 0);
                trainer.apply().await.unwrap();
            }
            if saves {
                let saved = trainer.save(b"").unwrap();
                assert_eq!(saved.is_some(), rank == 0, "rank 0 saves");
            }
            bytes(&trainer.leave().await)
        })
    };
    // All ranks have equal gradients, so their number does not matter.
    run(2, |ring| steps(ring, 0, 4, true));
    let continued = run(4, |ring| steps(ring, 4, 8, true));
    let through = run(1, |ring| {
        let empty = tempfile::tempdir().unwrap();
        let storage = Arc::new(LocalDirectory::create(empty.path()).unwrap());
        block_on(async move {
            let config = RingTrainerConfig::new(Adam::new(0.1)).variables(variables());
            let config = config.checkpoints(storage, Retention::default());
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            for _ in 0..8 {
                let (params, gradients) = trainer.parts();
                fill(params, gradients, 0);
                trainer.apply().await.unwrap();
            }
            bytes(&trainer.leave().await)
        })
    });
    assert!(continued.iter().all(|values| *values == through[0]));
}

#[test]
fn ranks_that_are_left_continue_from_the_newest_values() {
    let values = run(3, |ring| {
        block_on(async {
            let index = ring.index();
            let config = RingTrainerConfig::new(Sgd::new(0.5)).variables(variables());
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            while trainer.global_step() < 20 {
                let (params, gradients) = trainer.parts();
                fill(params, gradients, 1);
                if index == 0 && trainer.global_step() == 7 {
                    return None;
                }
                match trainer.apply().await {
                    Ok(_) => {}
                    Err(Error::Ring(error)) if error.may_shrink() => {
                        trainer.recover().await.unwrap();
                        assert_eq!(trainer.ring().size(), 2);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Some(bytes(&trainer.leave().await))
        })
    });
    assert!(values[0].is_none() && values[1].is_some() && values[1] == values[2]);
}

#[test]
fn ranks_with_other_variables_or_rules_are_named() {
    let start = |others: fn() -> RingTrainerConfig| {
        run(2, |ring| {
            block_on(async {
                let config = match ring.rank() {
                    0 => RingTrainerConfig::new(Sgd::new(0.5)).variables(variables()),
                    _ => others(),
                };
                RingTrainer::start(ring, config, |_| ()).await.unwrap_err()
            })
        })
    };
    for errors in [
        start(|| RingTrainerConfig::new(Sgd::new(0.25)).variables(variables())),
        start(|| RingTrainerConfig::new(Sgd::new(0.5)).variables(variables().split_off(1))),
    ] {
        for error in errors {
            assert!(matches!(error, Error::Ring(RingError::Difference { .. })), "{error}");
        }
    }
}

#[test]
fn a_mean_that_is_not_finite_changes_nothing_on_any_rank() {
    run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let config = RingTrainerConfig::new(Sgd::new(0.5)).variables(variables());
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            let before = bytes(trainer.parts().0);
            let (_, gradients) = trainer.parts();
            gradients.view_mut::<f32>("b").unwrap()[3] = if rank == 1 { f32::NAN } else { 1.0 };
            let error = trainer.apply().await.unwrap_err();
            assert!(matches!(error, Error::NonFinite { element: 3, .. }), "{error}");
            assert_eq!((bytes(trainer.parts().0), trainer.global_step()), (before, 0));
            trainer.parts().1.view_mut::<f32>("b").unwrap()[3] = 1.0;
            assert_eq!(trainer.apply().await.unwrap(), 1);
            trainer.leave().await;
        });
    });
}

#[test]
fn what_a_ring_cannot_train_is_named() {
    let start = |config: fn(RingTrainerConfig) -> RingTrainerConfig| {
        let errors = run(1, |ring| {
            let config = config(RingTrainerConfig::new(Sgd::new(0.5)).variables(variables()));
            block_on(RingTrainer::start(ring, config, |_| ())).unwrap_err().to_string()
        });
        errors.into_iter().next().unwrap()
    };
    let sparse =
        start(|config| config.variables([VariableSpec::f32("rows", [9, 2]).unwrap().sparse()]));
    assert!(sparse.contains("\"rows\"") && sparse.contains("servers hold rows"), "{sparse}");
    let mistyped = start(|config| config.rate_for("bias", 0.5));
    assert!(mistyped.contains("\"bias\""), "{mistyped}");
    let negative = start(|config| config.rate_for("b", -1.0));
    assert!(negative.contains("-1"), "{negative}");
}
