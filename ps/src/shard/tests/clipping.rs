//! Clipping of the gradients of synchronous steps by their norm over all shards.

use super::synchronous::{ACCEPTED, ShardCluster, synchronous, with_kills};

/// The norm of a gradient of ones: three elements on one shard, two on another.
fn norm() -> f64 {
    5.0_f64.sqrt()
}

#[test]
fn a_gradient_is_scaled_by_its_norm_over_all_shards() {
    for shards in [1, 2] {
        let mode = synchronous(2, 2).clip_by_global_norm(norm());
        let mut cluster = ShardCluster::new(shards, mode, |config| config);
        let a = cluster.token(0);
        let b = cluster.token(1);
        assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
        assert_eq!(cluster.push(1, b, 4.0), ACCEPTED(0));
        // The norm on one shard alone would give another value there.
        assert_eq!(cluster.values(1), (-1.0, -1.0), "{shards} shards");
        let a = cluster.token(0);
        let b = cluster.token(1);
        cluster.push(0, a, 0.5);
        cluster.push(1, b, 0.25);
        assert_eq!(cluster.values(2), (-1.375, -1.375), "no gradient exceeds the bound");
    }
}

#[test]
fn kills_do_not_change_the_bits_of_a_clipped_step() {
    // With this bound no clipping factor is exact.
    let found = with_kills(|mode| mode.clip_by_global_norm(0.7));
    let factor = 0.7 / (45.0_f64.sqrt());
    let one = 0.7 / norm();
    let expected = ((one + 3.0 * factor) / -2.0) as f32;
    assert!((found[0].0 - expected).abs() < 1e-6, "{found:?}, not {expected}");
    assert_eq!(found, [found[0]; 14]);
}
