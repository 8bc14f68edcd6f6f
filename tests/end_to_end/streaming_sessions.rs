//! Training sessions that stream the gradients of their steps to servers.

use pushpull::blocking::{Step, TrainingSession};
use pushpull::training::{GradientOutcome, TrainingConfig, hooks};
use pushpull::{Error, VariableSpec};

use super::cluster::{LONG, TestCluster, vector};

fn config(cluster: &TestCluster) -> TrainingConfig {
    let rows = VariableSpec::f32("rows", [8, 2]).unwrap().sparse();
    let config = TrainingConfig::new(cluster.config(0).connect_timeout(LONG));
    config.variables([vector("w", 3), vector("b", 1), rows])
}

/// Streams gradients of ones: `b` and rows 2 and 5, and `w` in each second step.
fn stream(step: Step<'_>, w: f32) -> GradientOutcome {
    let number = step.step();
    let mut step = step.begin().unwrap();
    step.variable("b", &[1.0_f32]).unwrap();
    step.rows("rows", &[2, 5], &[1.0_f32; 4]).unwrap();
    if number.is_multiple_of(2) {
        step.variable("w", &[w; 3]).unwrap();
    }
    step.scalar("loss", 1.0);
    step.finish().unwrap()
}

#[test]
fn a_session_streams_its_steps_to_servers() {
    let cluster = TestCluster::sgd(2, |config| config);
    let config = config(&cluster).hook(hooks::StopAtStep::last(10));
    let mut session = TrainingSession::start(config).unwrap();
    while let Some(step) = session.step().unwrap() {
        assert!(stream(step, 1.0).counts());
    }
    let end = session.close().unwrap();
    let values = end.params.unwrap();
    assert_eq!((end.step, end.metrics.pushes), (10, 10));
    assert_eq!(values.view::<f32>("w").unwrap(), [-5.0; 3], "variables may be left out");
    assert_eq!(values.view::<f32>("b").unwrap(), [-10.0]);
    cluster.stop();
}

#[test]
fn a_streamed_gradient_that_is_not_finite_is_skipped_and_a_dropped_step_counts_nowhere() {
    let cluster = TestCluster::sgd(2, |config| config);
    let config = config(&cluster).hook(hooks::StopAtStep::last(4));
    let mut session = TrainingSession::start(config).unwrap();
    let mut skipped = 0;
    let mut steps = 0;
    while let Some(step) = session.step().unwrap() {
        steps += 1;
        if steps == 2 {
            let mut step = step.begin().unwrap();
            step.variable("b", &[1.0_f32]).unwrap();
            continue;
        }
        let w = if steps == 3 || steps == 4 { f32::NAN } else { 1.0 };
        match stream(step, w) {
            GradientOutcome::Skipped(Error::NonFinite { .. }) => skipped += 1,
            outcome => assert!(outcome.counts(), "{outcome:?}"),
        }
        assert!(steps < 20, "the session goes on");
    }
    let end = session.close().unwrap();
    assert_eq!((end.step, skipped > 0), (4, true));
    assert_eq!(end.params.unwrap().view::<f32>("b").unwrap(), [-4.0]);
    cluster.stop();
}
