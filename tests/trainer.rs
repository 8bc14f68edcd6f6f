//! The trainer of the examples: all tasks in one process.

#![allow(dead_code, reason = "the example has a main of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../examples/trainer.rs"]
mod trainer;

use pushpull::training::StopReason;

#[test]
fn the_trainer_ends_by_its_hook_or_at_its_last_step() {
    let ends = trainer::train_in_one_process().unwrap();
    assert_eq!(ends.len(), 2);
    for end in ends {
        match &end.reason {
            StopReason::Hook { hook, .. } => assert!(hook == "LowLoss" || hook == "StopAtStep"),
            StopReason::LastStep => assert_eq!(end.step, 2_000),
            other => panic!("{other}"),
        }
        assert!(end.step > 20, "{end:?}");
    }
}
