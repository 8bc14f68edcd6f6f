//! The trainer of the examples: all tasks in one process.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/trainer.rs"]
mod trainer;

use pushpull::error::Chain;
use pushpull::training::StopReason;
use pushpull::{ClusterSpec, Ps, TaskId};

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

#[test]
fn a_checkpoint_directory_with_a_scheme_is_refused_and_none_is_made() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
    let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build().unwrap();
    let directory = Some("s3://b/run".to_owned());
    let error = trainer::serve(cluster, TaskId::ps(0), listener, directory).unwrap_err();
    let expected = "the scheme \"s3\" of \"s3://b/run\" is not supported";
    assert!(Chain(&*error).to_string().contains(expected), "{error}");
    assert!(!std::path::Path::new("s3:").exists());
}
