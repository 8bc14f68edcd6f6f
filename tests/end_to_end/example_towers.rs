//! The example `towers`: it learns, and its weights do not depend on the number of towers.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/towers.rs"]
mod towers;

#[tokio::test(flavor = "current_thread")]
async fn four_towers_learn_the_ring() {
    let outcome = towers::train(4, 600).await.unwrap();
    assert_eq!(outcome.params.step(), 600);
    assert!(outcome.accuracy > 0.95, "accuracy {}", outcome.accuracy);
    assert!(outcome.loss < 0.2, "loss {}", outcome.loss);
}

#[tokio::test(flavor = "current_thread")]
async fn one_tower_and_four_end_with_the_same_weights() {
    let alone = towers::train(1, 60).await.unwrap().params;
    let divided = towers::train(4, 60).await.unwrap().params;
    for name in towers::NAMES {
        let alone = alone.view::<f32>(name).unwrap();
        let divided = divided.view::<f32>(name);
        for (found, expected) in divided.unwrap().iter().zip(alone) {
            assert!((found - expected).abs() < 1e-4, "{name}: {found} instead of {expected}");
        }
        assert!(alone.iter().any(|value| value.abs() > 1e-3), "{name} was not trained");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_number_of_towers_that_divides_no_batch_is_refused() {
    for towers in [0, 3] {
        let error = towers::train(towers, 1).await.err().unwrap().to_string();
        assert!(error.contains("do not divide a batch of 256 equally"), "{error}");
    }
}
