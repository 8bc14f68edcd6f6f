//! Sessions that stream their steps on rings of threads, over real sockets.

use pushpull_collective::{Ring, RingError};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::Sgd;
use pushpull_worker::{Error, Push, ViewError};

use crate::ring_tests::{Job, StopAfter, block_on};
use crate::{
    GradientOutcome, Step, StopReason, TrainingConfig, TrainingEnd, TrainingError, TrainingSession,
    hooks,
};

/// Variables of two types, so that they are two buckets: `wide` is the first one.
fn config(ring: Ring) -> TrainingConfig {
    let w = VariableSpec::f32("w", [3, 5]).unwrap();
    let wide = VariableSpec::new("wide", DType::F64, Shape::new([4]).unwrap()).unwrap();
    TrainingConfig::ring(ring, Sgd::new(0.25)).variables([w, wide]).jitter_seed(1)
}

fn values(end: &TrainingEnd) -> (Vec<f32>, Vec<f64>) {
    let params = end.params.as_ref().unwrap();
    (params.view("w").unwrap().to_vec(), params.view("wide").unwrap().to_vec())
}

/// Pushes the gradients of a step at once.
async fn push(mut step: Step<'_>, index: u32) -> Result<GradientOutcome, TrainingError> {
    let (params, gradients) = step.parts();
    let w: Vec<f32> = params.view::<f32>("w").unwrap().iter().map(|w| w + index as f32).collect();
    gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&w);
    gradients.view_mut::<f64>("wide").unwrap().fill(f64::from(index) + 0.5);
    step.push().await
}

/// Streams the same gradients: the first `sent` of two. With 2 it finishes the step; otherwise it drops
/// it, with 3 after both gradients.
async fn stream(
    step: Step<'_>,
    index: u32,
    sent: usize,
) -> Result<Option<GradientOutcome>, TrainingError> {
    let mut step = step.begin().await?;
    let w = step.params().view::<f32>("w").unwrap();
    let w: Vec<f32> = w.iter().map(|w| w + index as f32).collect();
    if sent > 0 {
        step.variable("wide", &[f64::from(index) + 0.5; 4]).await?;
    }
    if sent > 1 {
        step.variable("w", &w).await?;
    }
    match sent {
        2 => step.finish().await.map(Some),
        _ => Ok(None),
    }
}

#[test]
fn streamed_steps_train_as_pushed_ones_do() {
    let cases: [fn(u32, u64) -> bool; 3] =
        [|_, _| false, |_, _| true, |rank, step| u64::from(rank) % 2 == step % 2];
    let ends = cases.map(|streams| {
        Job::new(3).run(|ring| {
            let index = ring.index();
            block_on(async {
                let config = config(ring).hook(hooks::StopAtStep::last(12));
                let mut session = TrainingSession::start(config).await.unwrap();
                while let Some(step) = session.step().await.unwrap() {
                    let outcome = match streams(index, step.step()) {
                        true => stream(step, index, 2).await.unwrap().unwrap(),
                        false => push(step, index).await.unwrap(),
                    };
                    assert!(outcome.counts(), "{outcome:?}");
                }
                session.close().await.unwrap()
            })
        })
    });
    for end in ends.iter().flatten() {
        assert_eq!((end.step, end.metrics.pushes), (12, 12), "{}", end.reason);
        assert_eq!(values(end), values(&ends[0][0]));
    }
}

#[test]
fn a_streamed_step_that_one_rank_drops_counts_on_none() {
    // Without a complete bucket it is dropped like any other. With one, or all, the ring is given up.
    for sent in [0, 1, 3] {
        let ends = Job::new(2).run(|ring| {
            let index = ring.index();
            block_on(async {
                let config = config(ring).hook(hooks::StopAtStep::last(6));
                let mut session = TrainingSession::start(config).await.unwrap();
                let mut steps = 0;
                let mut fates = Vec::new();
                while let Some(step) = session.step().await.unwrap() {
                    steps += 1;
                    let sent = if index == 1 && steps == 3 { sent } else { 2 };
                    fates.extend(stream(step, index, sent).await.unwrap());
                }
                (fates, session.close().await.unwrap())
            })
        });
        let fates = &ends[0].0;
        let void: Vec<_> = fates.iter().filter(|fate| !fate.counts()).collect();
        match (sent, &void[..]) {
            (0, [GradientOutcome::Pushed(Push::Stale { current: 2 })]) => {}
            (1 | 3, [GradientOutcome::Lost(Error::Ring(RingError::GivenUp { rank: 1, .. }))]) => {}
            _ => panic!("{sent}: {fates:?}"),
        }
        assert_eq!((ends[0].1.step, values(&ends[0].1)), (6, values(&ends[1].1)), "{sent}");
        // Both have made the same steps: each is the mean of 0.5 and 1.5.
        assert_eq!(values(&ends[0].1).1, [-1.5; 4], "{sent}");
    }
}

#[test]
fn a_step_that_is_dropped_after_another_rank_has_ended_the_training_is_the_last() {
    // With the first bucket, or with all: the ranks have agreed on the end before.
    for sent in [1, 3] {
        let ends = Job::new(2).run(|ring| {
            let index = ring.index();
            block_on(async {
                let config =
                    if index == 1 { config(ring).hook(StopAfter(3)) } else { config(ring) };
                let mut session = TrainingSession::start(config).await.unwrap();
                let mut steps = 0;
                while let Some(step) = session.step().await.unwrap() {
                    steps += 1;
                    stream(step, index, if steps == 4 { sent } else { 2 }).await.unwrap();
                }
                (steps, session.close().await.unwrap())
            })
        });
        let steps: Vec<u32> = ends.iter().map(|(steps, _)| *steps).collect();
        assert_eq!(steps, [4, 3], "{sent}");
        assert_eq!((ends[0].1.step, values(&ends[0].1)), (3, values(&ends[1].1)), "{sent}");
        assert_eq!(ends[0].1.reason, StopReason::Finished, "{sent}");
    }
}

#[test]
fn a_hook_withholds_a_streamed_gradient_and_another_ends_all_ranks() {
    let withheld = Job::new(2).run(|ring| {
        let index = ring.index();
        block_on(async {
            let config = config(ring).hook(hooks::NanGuard::stop());
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(mut step) = session.step().await.unwrap() {
                let is_bad = index == 1 && step.step() == 3;
                step.scalar("loss", if is_bad { f64::NAN } else { 1.0 });
                let outcome = stream(step, index, 2).await.unwrap();
                assert_eq!(outcome == Some(GradientOutcome::Withheld), is_bad, "{outcome:?}");
            }
            session.close().await.unwrap()
        })
    });
    let stopped = Job::new(2).run(|ring| {
        let index = ring.index();
        block_on(async {
            let config = if index == 1 { config(ring).hook(StopAfter(3)) } else { config(ring) };
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(step) = session.step().await.unwrap() {
                stream(step, index, 2).await.unwrap();
            }
            session.close().await.unwrap()
        })
    });
    for ends in [withheld, stopped] {
        let is_hook = |end: &TrainingEnd| matches!(end.reason, StopReason::Hook { .. });
        assert_eq!(ends.iter().map(is_hook).collect::<Vec<_>>(), [false, true]);
        assert_eq!((ends[0].step, values(&ends[0])), (3, values(&ends[1])));
    }
}

#[test]
fn a_streamed_step_without_a_variable_fails_the_training_by_name() {
    let errors = Job::new(2).run(|ring| {
        let index = ring.index();
        block_on(async {
            let config = config(ring).recover_for(std::time::Duration::ZERO);
            let mut session = TrainingSession::start(config).await.unwrap();
            let mut step = session.step().await.unwrap().unwrap().begin().await.unwrap();
            step.variable("wide", &[1.0_f64; 4]).await.unwrap();
            if index == 0 {
                step.variable("w", &[1.0_f32; 15]).await.unwrap();
            }
            step.finish().await.unwrap_err().worker_error().cloned().unwrap()
        })
    });
    let Error::Ring(RingError::GivenUp { rank: 1, detail }) = &errors[0] else {
        panic!("{}", errors[0])
    };
    assert!(detail.contains("no gradient of \"w\""), "{detail}");
    assert_eq!(errors[1], ViewError::Missing { name: "w".to_owned() }.into());
}

#[test]
fn a_call_of_a_streamed_step_that_does_not_fit_fails_the_training() {
    let error = Job::new(1).run(|ring| {
        block_on(async {
            let mut session = TrainingSession::start(config(ring)).await.unwrap();
            let mut step = session.step().await.unwrap().unwrap().begin().await.unwrap();
            let error = step.rows("w", &[0], &[1.0_f32; 5]).await.unwrap_err();
            assert_eq!(step.finish().await.unwrap_err().to_string(), {
                TrainingError::Failed.to_string()
            });
            error.worker_error().cloned().unwrap()
        })
    });
    assert_eq!(error, [ViewError::Dense { name: "w".to_owned() }.into()]);
}

#[test]
fn a_blocking_session_streams_as_well() {
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        let config = config(ring).hook(hooks::StopAtStep::last(5));
        let mut session = crate::blocking::TrainingSession::start(config).unwrap();
        while let Some(step) = session.step().unwrap() {
            let mut step = step.begin().unwrap();
            step.variable("wide", &[f64::from(index); 4]).unwrap();
            step.variable("w", &[1.0_f32; 15]).unwrap();
            step.scalar("loss", 1.0);
            assert!(step.finish().unwrap().counts());
        }
        session.close().unwrap()
    });
    assert_eq!((ends[0].step, values(&ends[0])), (5, values(&ends[1])));
    assert_eq!(values(&ends[0]).1, [-0.625; 4]);
}
