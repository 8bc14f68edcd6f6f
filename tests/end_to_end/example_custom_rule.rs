//! The custom optimizer of the examples: its arithmetic, and training with it.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/custom_rule.rs"]
mod custom_rule;

use pushpull::optim::Optimizer;
use pushpull::optim::{ApplyAt, Run};

use custom_rule::Lion;

#[test]
fn the_optimizer_steps_by_the_sign_of_its_momentum() {
    let rule = Lion::new(0.5);
    assert_eq!(rule.fault(), None);
    let mut values = [1.0_f64, 1.0, 1.0, 1.0];
    let mut momentum = [0.0, 0.0, -1.0, 0.0];
    let slots: &mut [&mut [f64]] = &mut [&mut momentum];
    let gradient = &[3.0, -0.1, 1.0, 0.0];
    rule.apply_f64(ApplyAt::new(1, 0), Run { values: &mut values, slots, gradient });
    assert_eq!(values, [0.5, 1.5, 1.5, 1.0]);
    for (found, expected) in momentum.iter().zip([0.03, -0.001, -0.98, 0.0]) {
        assert!((found - expected).abs() < 1e-15, "{momentum:?}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn servers_train_with_the_optimizer() {
    let loss = custom_rule::train().await.unwrap();
    assert!(loss < 1e-6, "a loss of {loss} is left");
}
