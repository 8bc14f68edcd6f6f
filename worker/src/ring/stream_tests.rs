//! Streams steps on rings of threads, over real sockets.

use std::sync::Barrier;
use std::time::Duration;

use pushpull_collective::{Ring, RingError};
use pushpull_common::codec::Codec;
use pushpull_common::tensor::bf16;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::{Adam, Sgd};

use super::tests::{block_on, bytes, fill, run, variables};
use super::*;
use crate::error::{Error, ViewError};

/// The trainable variables of [`variables`], in two orders.
const ORDERS: [[&str; 4]; 2] = [["half", "wide", "b", "w"], ["b", "w", "half", "wide"]];

async fn start(ring: Ring) -> RingTrainer {
    start_encoding(ring, None).await
}

/// Starts a training in which the gradient of `w` travels in a codec.
async fn start_encoding(ring: Ring, codec: Option<Codec>) -> RingTrainer {
    let config = RingTrainerConfig::new(Adam::new(0.1)).variables(variables()).codec("w", codec);
    RingTrainer::start(ring, config, |_| ()).await.unwrap()
}

/// Gives the gradient that [`fill`] fills.
async fn give(step: &mut StreamedStep<'_>, name: &str, rank: u32) {
    let mut gradients = step.trainer.worker.gradients();
    fill(&step.trainer.params, &mut gradients, rank);
    let given = match name {
        "wide" => step.variable::<f64>(name, gradients.view_mut(name).unwrap()).await,
        "half" => step.variable::<bf16>(name, gradients.view_mut(name).unwrap()).await,
        _ => step.variable::<f32>(name, gradients.view_mut(name).unwrap()).await,
    };
    given.unwrap();
}

/// Streams a step with the gradients that [`fill`] fills.
async fn stream(trainer: &mut RingTrainer, order: &[&str]) -> Result<u64, Error> {
    let rank = trainer.ring().rank();
    let mut step = trainer.begin()?;
    for name in order {
        give(&mut step, name, rank).await;
    }
    step.finish().await
}

async fn apply(trainer: &mut RingTrainer) -> Result<u64, Error> {
    let rank = trainer.ring().rank();
    let (params, gradients) = trainer.parts();
    fill(params, gradients, rank);
    trainer.apply().await
}

#[test]
fn streamed_steps_have_the_bits_of_applied_ones() {
    // Whether a rank streams a step, by its rank and the step.
    let cases: [fn(u32, u64) -> bool; 3] =
        [|_, _| false, |_, _| true, |rank, step| u64::from(rank) % 2 == step % 2];
    for codec in [None, Some(Codec::OneBit)] {
        let values = cases.map(|streams| {
            run(3, |ring| {
                block_on(async {
                    let rank = ring.rank();
                    let mut trainer = start_encoding(ring, codec).await;
                    for step in 1..=6 {
                        let made = match streams(rank, step) {
                            true => stream(&mut trainer, &ORDERS[(rank % 2) as usize]).await,
                            false => apply(&mut trainer).await,
                        };
                        assert_eq!(made.unwrap(), step);
                    }
                    bytes(&trainer.leave().await)
                })
            })
        });
        let first = &values[0][0];
        assert!(values.iter().flatten().all(|rank| rank == first), "{codec:?}: all are equal");
    }
}

#[test]
fn a_ring_whose_operations_wait_as_tasks_streams_too() {
    let values = run(2, |mut ring| {
        ring.set_blocking(false).unwrap();
        block_on(async {
            let mut trainer = start(ring).await;
            for step in [1, 3, 5] {
                assert_eq!(stream(&mut trainer, &ORDERS[0]).await.unwrap(), step);
                assert!(!trainer.ring().is_blocking());
                assert_eq!(apply(&mut trainer).await.unwrap(), step + 1);
            }
            bytes(&trainer.leave().await)
        })
    });
    assert_eq!(values[0], values[1]);
}

#[test]
fn each_bucket_is_one_operation() {
    // Layers of 3 MiB, of which no two are in one bucket, with a bias of 12 bytes each.
    let values = run(2, |ring| {
        block_on(async {
            let mut variables = Vec::new();
            for layer in 0..2 {
                variables.push(VariableSpec::f32(format!("w{layer}"), [3, 1 << 18]).unwrap());
                variables.push(VariableSpec::f32(format!("b{layer}"), [3]).unwrap());
            }
            let config = RingTrainerConfig::new(Sgd::new(1.0)).variables(variables);
            let mut trainer = RingTrainer::start(ring, config, |_| ()).await.unwrap();
            let gradient = vec![1.0_f32 + trainer.ring().rank() as f32; 3 << 18];
            let before = trainer.metrics().operations;
            let mut step = trainer.begin().unwrap();
            for layer in [1, 0] {
                step.variable(&format!("b{layer}"), &gradient[..3]).await.unwrap();
                step.variable(&format!("w{layer}"), &gradient).await.unwrap();
            }
            assert_eq!(step.finish().await.unwrap(), 1);
            let operations = trainer.metrics().operations - before;
            let values = trainer.leave().await;
            let names = ["w0", "b0", "w1", "b1"];
            let views = values.views::<f32, 4>(names).unwrap();
            (operations, views.iter().all(|view| view.iter().all(|value| *value == -1.5)))
        })
    });
    // `b0` is with `w1` and `b1`.
    assert_eq!(values, [(2, true); 2]);
}

#[test]
fn a_variable_that_is_missing_is_named_on_every_rank() {
    let errors = run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            let order: &[&str] = if rank == 0 { &["half", "wide", "w"] } else { &ORDERS[0] };
            stream(&mut trainer, order).await.unwrap_err()
        })
    });
    assert_eq!(errors[0], ViewError::Missing { name: "b".to_owned() }.into());
    let Error::Ring(RingError::GivenUp { rank: 0, detail }) = &errors[1] else {
        panic!("{}", errors[1])
    };
    assert!(detail.contains("no gradient of \"b\""), "{detail}");
}

#[test]
fn a_call_that_does_not_fit_is_an_error_and_changes_nothing() {
    run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            assert_eq!(trainer.begin().unwrap().finish().await, Err(Error::EmptyPush));
            let mut step = trainer.begin().unwrap();
            give(&mut step, "half", rank).await;
            let name = || "b".to_owned();
            let length = ViewError::Length { name: name(), elements: 6, shape: "[7]".to_owned() };
            let faults: [(_, Error); 5] = [
                (step.variable("b", &[0.0_f32; 6]).await, length.into()),
                (step.variable("half", &[bf16::ZERO; 9]).await, twice("half")),
                (
                    step.variable("count", &[0_i64; 2]).await,
                    ViewError::Plain { name: "count".to_owned() }.into(),
                ),
                (
                    step.variable("running", &[0.0_f32; 3]).await,
                    ViewError::Plain { name: "running".to_owned() }.into(),
                ),
                (
                    step.variable("bias", &[0.0_f32; 7]).await,
                    ViewError::Unknown { name: "bias".to_owned() }.into(),
                ),
            ];
            for (given, expected) in faults {
                assert_eq!(given, Err(expected));
            }
            assert!(matches!(
                step.variable("b", &[0.0_f64; 7]).await,
                Err(Error::View(ViewError::Type { .. }))
            ));
            for name in ["wide", "b", "w"] {
                give(&mut step, name, rank).await;
            }
            assert_eq!(step.variable("w", &[0.0_f32; 231]).await, Err(twice("w")));
            assert_eq!(step.finish().await, Ok(1));
            trainer.leave().await;
        });
    });
}

fn twice(name: &str) -> Error {
    ViewError::Twice { name: name.to_owned() }.into()
}

#[test]
fn a_step_that_is_dropped_before_a_bucket_is_complete_leaves_the_ring_as_it_is() {
    let values = run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            let mut step = trainer.begin().unwrap();
            give(&mut step, "w", rank).await;
            drop(step);
            assert_eq!(stream(&mut trainer, &ORDERS[0]).await.unwrap(), 1);
            bytes(&trainer.leave().await)
        })
    });
    assert_eq!(values[0], values[1]);
}

#[test]
fn a_step_that_is_dropped_under_way_gives_the_ring_up() {
    let parts: [&[&str]; 2] = [&["half"], &["half", "wide"]];
    for given in parts {
        let values = run(2, |ring| {
            block_on(async {
                let rank = ring.rank();
                let mut trainer = start(ring).await;
                if rank == 0 {
                    let mut step = trainer.begin().unwrap();
                    for name in given {
                        give(&mut step, name, rank).await;
                    }
                    drop(step);
                }
                let error = stream(&mut trainer, &ORDERS[0]).await.unwrap_err();
                let given_up = matches!(error, Error::Ring(RingError::GivenUp { rank: 0, .. }));
                assert!(given_up, "rank {rank}: {error}");
                trainer.recover().await.unwrap();
                assert_eq!(trainer.ring().size(), 2);
                assert_eq!(stream(&mut trainer, &ORDERS[0]).await.unwrap(), 1);
                bytes(&trainer.leave().await)
            })
        });
        assert_eq!(values[0], values[1]);
    }
}

#[test]
fn a_step_that_is_dropped_when_it_is_whole_gives_the_ring_up() {
    // Its buckets wait, or all of them are reduced.
    for pause in [Duration::ZERO, Duration::from_millis(200)] {
        let ends = run(2, |ring| {
            block_on(async {
                let rank = ring.rank();
                let mut trainer = start(ring).await;
                if rank == 0 {
                    let mut step = trainer.begin().unwrap();
                    for name in ORDERS[0] {
                        give(&mut step, name, rank).await;
                    }
                    std::thread::sleep(pause);
                    drop(step);
                } else {
                    // It may have all means before it hears of the end.
                    let _ = stream(&mut trainer, &ORDERS[0]).await;
                }
                let error = apply(&mut trainer).await.unwrap_err();
                let given_up = matches!(error, Error::Ring(RingError::GivenUp { rank: 0, .. }));
                assert!(given_up, "rank {rank}: {error}");
                trainer.recover().await.unwrap();
                let step = apply(&mut trainer).await.unwrap();
                (step, bytes(&trainer.leave().await))
            })
        });
        assert!(ends[0] == ends[1], "{pause:?}");
    }
}

#[test]
fn a_forgotten_step_is_dropped_by_the_next_one() {
    run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            let mut step = trainer.begin().unwrap();
            give(&mut step, "w", rank).await;
            std::mem::forget(step);
            let error = apply(&mut trainer).await.unwrap_err();
            assert!(matches!(error, Error::Ring(RingError::Fenced { .. })), "{error}");
            assert_eq!(stream(&mut trainer, &ORDERS[0]).await.unwrap(), 1);
            trainer.leave().await;
        });
    });
}

#[test]
fn a_streamed_mean_that_is_not_finite_changes_nothing_on_any_rank() {
    run(2, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            let before = bytes(trainer.parts().0);
            let mut step = trainer.begin().unwrap();
            for name in ["half", "wide", "w"] {
                give(&mut step, name, rank).await;
            }
            let mut b = [1.0_f32; 7];
            b[3] = if rank == 1 { f32::INFINITY } else { 1.0 };
            step.variable("b", &b).await.unwrap();
            let error = step.finish().await.unwrap_err();
            assert!(matches!(error, Error::NonFinite { element: 3, .. }), "{error}");
            assert_eq!((bytes(trainer.parts().0), trainer.global_step()), (before, 0));
            assert_eq!(stream(&mut trainer, &ORDERS[1]).await.unwrap(), 1);
            trainer.leave().await;
        });
    });
}

#[test]
fn a_rank_that_is_lost_during_a_streamed_step_is_named() {
    let begun = Barrier::new(3);
    let values = run(3, |ring| {
        block_on(async {
            let rank = ring.rank();
            let mut trainer = start(ring).await;
            let mut step = trainer.begin().unwrap();
            give(&mut step, "half", rank).await;
            begun.wait();
            if rank == 1 {
                // Its trainer goes with the step, as that of a program that fails.
                return None;
            }
            for name in ["wide", "b", "w"] {
                give(&mut step, name, rank).await;
            }
            let error = step.finish().await.unwrap_err();
            assert!(matches!(error, Error::Ring(RingError::GivenUp { rank: 1, .. })), "{error}");
            trainer.recover().await.unwrap();
            assert_eq!(trainer.ring().size(), 2);
            assert_eq!(stream(&mut trainer, &ORDERS[0]).await.unwrap(), 1);
            Some(bytes(&trainer.leave().await))
        })
    });
    assert!(values[1].is_none() && values[0].is_some() && values[0] == values[2]);
}
