//! Training sessions on rings of threads, over real sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pushpull_collective::{Launch, Ring, RingConfig, blocking};
use pushpull_common::codec::Codec;
use pushpull_common::data_set::DataSet;
use pushpull_common::initializer::Initializer;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::{Adam, Sgd};
use pushpull_worker::{ConfigError, Error, Gradients, Interrupt, Params, Push, RingTrainerConfig};

use crate::hook::{FinishedStep, Flow, Hook, HookError};
use crate::{
    GradientOutcome, StopReason, TrainingConfig, TrainingEnd, TrainingError, TrainingSession, hooks,
};

static JOBS: AtomicU32 = AtomicU32::new(0);

/// The ranks of a job, and where they meet.
pub(crate) struct Job {
    folder: tempfile::TempDir,
    key: String,
    size: u32,
}

impl Job {
    pub(crate) fn new(size: u32) -> Job {
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let key = format!("session-{}-{number}", std::process::id());
        Job { folder: tempfile::tempdir().unwrap(), key, size }
    }

    fn join(&self, index: u32) -> Ring {
        let lookup = |name: &str| match name {
            "OMPI_COMM_WORLD_RANK" => Some(index.to_string()),
            "OMPI_COMM_WORLD_SIZE" => Some(self.size.to_string()),
            "PMIX_NAMESPACE" => Some(self.key.clone()),
            _ => None,
        };
        let launch = Launch::from_lookup(lookup).unwrap();
        let config = RingConfig::new(launch).folder(self.folder.path());
        let config = config.lease(Duration::from_secs(2)).join_timeout(Duration::from_secs(20));
        blocking::Ring::join(config).unwrap().into_inner()
    }

    /// Runs each rank in a thread.
    pub(crate) fn run<R: Send>(&self, rank: impl Fn(Ring) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let start = |index: u32| {
                let rank = &rank;
                scope.spawn(move || rank(self.join(index)))
            };
            let threads: Vec<_> = (0..self.size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn config(ring: Ring) -> TrainingConfig {
    with_variables(TrainingConfig::ring(ring, Sgd::new(0.25)))
}

fn with_variables(config: TrainingConfig) -> TrainingConfig {
    let w = VariableSpec::f32("w", [3, 5]).unwrap().initializer(Initializer::HeNormal);
    config.variables([w, VariableSpec::f32("b", [5]).unwrap()]).jitter_seed(1)
}

/// Fills the gradients of a step: each rank has another one.
fn fill(params: &Params, gradients: &mut Gradients, index: u32) {
    let w = params.view::<f32>("w").unwrap();
    gradients.view_mut::<f32>("w").unwrap().copy_from_slice(w);
    gradients.view_mut::<f32>("b").unwrap().fill(index as f32);
}

async fn train(config: TrainingConfig, index: u32) -> Result<TrainingEnd, TrainingError> {
    let mut session = TrainingSession::start(config).await?;
    while let Some(mut step) = session.step().await? {
        let (params, gradients) = step.parts();
        fill(params, gradients, index);
        step.push().await?;
    }
    session.close().await
}

fn values(end: &TrainingEnd) -> Vec<u32> {
    let params = end.params.as_ref().unwrap();
    let [w, b] = params.views::<f32, 2>(["w", "b"]).unwrap();
    w.iter().chain(b).map(|value| value.to_bits()).collect()
}

#[test]
fn all_ranks_end_with_the_same_values() {
    let ends = Job::new(3).run(|ring| {
        let index = ring.index();
        let config = config(ring).hook(hooks::StopAtStep::last(20));
        block_on(train(config, index)).unwrap()
    });
    for end in &ends {
        assert_eq!((end.step, end.is_final), (20, true), "{}", end.reason);
        assert_eq!(values(end), values(&ends[0]));
        assert_eq!(end.metrics.pushes, 20);
    }
    // The mean of 0, 1 and 2 is 1.
    assert_eq!(ends[0].params.as_ref().unwrap().view::<f32>("b").unwrap(), [-5.0; 5]);
}

#[test]
fn a_session_whose_gradients_travel_encoded_skips_what_one_rank_cannot_encode() {
    let ends = Job::new(3).run(|ring| {
        let index = ring.index();
        let rule = RingTrainerConfig::new(Sgd::new(0.25)).codec("*", Codec::Int8);
        let config = with_variables(TrainingConfig::ring_with(ring, rule));
        let config = config.hook(hooks::StopAtStep::last(20));
        block_on(async {
            let mut session = TrainingSession::start(config).await.unwrap();
            let mut skipped = 0;
            while let Some(mut step) = session.step().await.unwrap() {
                let (params, gradients) = step.parts();
                fill(params, gradients, index);
                if index == 1 && params.step() == 7 && skipped == 0 {
                    gradients.view_mut::<f32>("b").unwrap()[2] = f32::INFINITY;
                }
                let outcome = step.push().await.unwrap();
                skipped += u32::from(matches!(outcome, GradientOutcome::Skipped(_)));
            }
            assert_eq!(skipped, 1);
            session.close().await.unwrap()
        })
    });
    for end in &ends {
        assert_eq!((end.step, values(end)), (20, values(&ends[0])));
    }
    // The mean of 0, 1 and 2 is 1.
    let b = ends[0].params.as_ref().unwrap().view::<f32>("b").unwrap();
    assert!(b.iter().all(|b| (b + 5.0).abs() < 0.01), "{b:?}");
}

/// A hook that stops at a step.
pub(crate) struct StopAfter(pub(crate) u64);

impl Hook for StopAfter {
    fn name(&self) -> &str {
        "stop_after"
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        match step.local_steps >= self.0 {
            true => Ok(Flow::Stop("enough".to_owned())),
            false => Ok(Flow::Continue),
        }
    }
}

#[test]
fn a_hook_that_stops_one_rank_stops_all() {
    let ends = Job::new(3).run(|ring| {
        let index = ring.index();
        let config = match index {
            1 => config(ring).hook(StopAfter(7)),
            _ => config(ring),
        };
        block_on(train(config, index)).unwrap()
    });
    for (index, end) in ends.iter().enumerate() {
        assert_eq!((end.step, values(end)), (7, values(&ends[0])), "{index}");
        let is_own = matches!(end.reason, StopReason::Hook { .. });
        assert_eq!(is_own, index == 1, "{index}: {}", end.reason);
        assert!(end.is_final);
    }
}

#[test]
fn a_gradient_that_is_withheld_counts_on_no_rank() {
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        block_on(async {
            let config = config(ring).hook(hooks::NanGuard::stop());
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(mut step) = session.step().await.unwrap() {
                let (params, gradients) = step.parts();
                fill(params, gradients, index);
                let is_bad = index == 1 && step.step() == 3;
                step.scalar("loss", if is_bad { f64::NAN } else { 1.0 });
                let outcome = step.push().await.unwrap();
                if session.global_step() == 3 && index == 0 {
                    let stale = GradientOutcome::Pushed(Push::Stale { current: 3 });
                    let accepted = GradientOutcome::Pushed(Push::Accepted { step: 3 });
                    assert!(outcome == stale || outcome == accepted, "{outcome:?}");
                }
            }
            session.close().await.unwrap()
        })
    });
    assert_eq!(ends.iter().map(|end| end.step).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(values(&ends[0]), values(&ends[1]));
}

#[test]
fn a_step_that_one_rank_drops_counts_on_none() {
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        block_on(async {
            let config = config(ring).hook(hooks::StopAtStep::last(10));
            let mut session = TrainingSession::start(config).await.unwrap();
            let mut steps = 0;
            let mut stale = 0;
            while let Some(mut step) = session.step().await.unwrap() {
                steps += 1;
                if index == 1 && steps % 3 == 0 {
                    continue;
                }
                let (params, gradients) = step.parts();
                fill(params, gradients, index);
                if let GradientOutcome::Pushed(Push::Stale { .. }) = step.push().await.unwrap() {
                    stale += 1;
                }
            }
            (stale, session.close().await.unwrap())
        })
    });
    assert_eq!((ends[0].0, ends[1].0), (4, 0), "rank 1 drops four of 14 steps");
    assert_eq!((ends[0].1.step, values(&ends[0].1)), (10, values(&ends[1].1)));
}

#[test]
fn an_error_of_one_rank_is_heard_by_all() {
    let errors = Job::new(2).run(|ring| {
        let index = ring.index();
        let config = config(ring).recover_for(Duration::ZERO);
        block_on(async {
            let session = TrainingSession::start(config).await.unwrap();
            let ended = session.run(|step| match (index, step.step()) {
                (1, 5) => Err("no samples"),
                _ => {
                    let (params, gradients) = step.parts();
                    fill(params, gradients, index);
                    Ok(())
                }
            });
            ended.await.unwrap_err()
        })
    });
    assert!(matches!(errors[1], TrainingError::Step { step: 5, .. }), "{:?}", errors[1]);
    let ring = errors[0].worker_error().unwrap();
    assert!(matches!(ring, Error::Ring(_)), "{ring}");
}

#[test]
fn ranks_that_are_left_go_on_and_the_next_one_saves() {
    let storage = tempfile::tempdir().unwrap();
    let checkpoints = || {
        let storage = pushpull_checkpoint::LocalDirectory::create(storage.path()).unwrap();
        let rule = RingTrainerConfig::new(Adam::new(0.1));
        rule.checkpoints(Arc::new(storage), pushpull_checkpoint::Retention::default())
    };
    let ends = Job::new(3).run(|ring| {
        let index = ring.index();
        let config = with_variables(TrainingConfig::ring_with(ring, checkpoints()));
        let config = config.checkpoint_every_steps(5).hook(hooks::StopAtStep::last(22));
        block_on(async {
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(mut step) = session.step().await.unwrap() {
                if index == 0 && step.step() == 12 {
                    // As if its process was killed.
                    return None;
                }
                let (params, gradients) = step.parts();
                fill(params, gradients, index);
                step.push().await.unwrap();
            }
            Some((session.is_chief(), session.close().await.unwrap()))
        })
    });
    let left: Vec<_> = ends.into_iter().flatten().collect();
    assert_eq!(left.iter().map(|(_, end)| end.step).collect::<Vec<_>>(), [22, 22]);
    assert_eq!(values(&left[0].1), values(&left[1].1));
    let saved = left[0].1.checkpoint.as_ref().unwrap();
    assert_eq!((saved.step, left[1].1.checkpoint.as_ref()), (22, None), "the new rank 0 saves");
    // Another job goes on with it.
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        let config = with_variables(TrainingConfig::ring_with(ring, checkpoints()));
        block_on(train(config.hook(hooks::StopAtStep::last(30)), index)).unwrap()
    });
    assert_eq!(ends.iter().map(|end| end.metrics.pushes).collect::<Vec<_>>(), [8, 8]);
}

#[test]
fn an_interrupt_ends_all_ranks() {
    let interrupt = Interrupt::new();
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        let config = config(ring).interrupt(&interrupt);
        let interrupt = &interrupt;
        block_on(async {
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(mut step) = session.step().await.unwrap() {
                let (params, gradients) = step.parts();
                fill(params, gradients, index);
                if step.step() == 9 {
                    interrupt.raise();
                }
                step.push().await.unwrap();
            }
            session.close().await.unwrap()
        })
    });
    for end in ends {
        assert_eq!(end.reason, StopReason::Interrupted);
    }
}

#[test]
fn a_session_blocks_as_well() {
    let ends = Job::new(2).run(|ring| {
        let index = ring.index();
        let config = config(ring).hook(hooks::StopAtStep::last(20));
        let session = crate::blocking::TrainingSession::start(config).unwrap();
        let run = session.run(|step| {
            let (params, gradients) = step.parts();
            fill(params, gradients, index);
            Ok::<(), TrainingError>(())
        });
        run.unwrap()
    });
    assert_eq!((ends[0].step, values(&ends[0])), (20, values(&ends[1])));
}

#[test]
fn a_ring_grants_no_samples() {
    Job::new(1).run(|ring| {
        let config = config(ring).data(DataSet::new("images", 100, 10).unwrap());
        let error = block_on(train(config, 0)).unwrap_err();
        let granted = ConfigError::GrantedData { data_set: "images".to_owned() };
        assert_eq!(error.worker_error(), Some(&Error::Config(granted)), "{error}");
    });
}
