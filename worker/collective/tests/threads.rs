//! Rings that another thread has for a while.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::time::Duration;

use pushpull_collective::{Launch, Reduction, Ring, RingConfig, RingError};

/// Runs a ring of threads, whose operations wait as tasks.
fn run<R: Send>(size: u32, key: &str, rank: impl Fn(Ring) -> R + Sync) -> Vec<R> {
    let folder = tempfile::tempdir().unwrap();
    let config = |index: u32| {
        let lookup = |name: &str| match name {
            "OMPI_COMM_WORLD_RANK" => Some(index.to_string()),
            "OMPI_COMM_WORLD_SIZE" => Some(size.to_string()),
            "PMIX_NAMESPACE" => Some(format!("{key}-{}", std::process::id())),
            _ => None,
        };
        let config = RingConfig::new(Launch::from_lookup(lookup).unwrap()).folder(folder.path());
        config.lease(Duration::from_secs(2)).join_timeout(Duration::from_secs(20))
    };
    std::thread::scope(|scope| {
        let start = |index: u32| {
            let config = config(index);
            let rank = &rank;
            scope.spawn(move || rank(block_on(Ring::join(config)).unwrap()))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn sum(ring: &mut Ring) -> f32 {
    let mut values = vec![1.0 + ring.rank() as f32; 70_000];
    block_on(ring.all_reduce(&mut values, Reduction::Sum)).unwrap();
    assert!(values.iter().all(|value| *value == values[0]));
    values[0]
}

#[test]
fn a_ring_serves_another_thread_and_then_its_own_again() {
    let sums = run(2, "lent", |mut ring| {
        let first = sum(&mut ring);
        let mut taken = ring.take();
        let place = (ring.rank(), ring.size(), ring.epoch());
        assert_eq!(place, (taken.rank(), taken.size(), taken.epoch()));
        let error = block_on(ring.barrier()).unwrap_err();
        assert!(matches!(error, RingError::Fenced { .. }), "{error}");
        let error = block_on(ring.shrink()).unwrap_err();
        assert!(matches!(error, RingError::Fenced { .. }), "{error}");
        let thread = std::thread::spawn(move || {
            taken.set_blocking(true).unwrap();
            assert!(taken.is_blocking());
            let second = sum(&mut taken);
            taken.set_blocking(false).unwrap();
            (taken, second)
        });
        let (returned, second) = thread.join().unwrap();
        ring = returned;
        assert!(!ring.is_blocking());
        let third = sum(&mut ring);
        block_on(ring.leave());
        [first, second, third]
    });
    assert_eq!(sums, [[3.0; 3]; 2]);
}

/// Waits until all ranks have come. The first to go on may end the ring before the others do.
fn meet(ring: &mut Ring) {
    let met = block_on(ring.barrier());
    assert!(matches!(met, Ok(()) | Err(RingError::GivenUp { .. })), "{met:?}");
}

#[test]
fn a_ring_that_is_given_up_without_waiting_tells_the_others_and_forms_again() {
    let errors = run(2, "given-up", |mut ring| {
        meet(&mut ring);
        if ring.rank() == 0 {
            ring.try_give_up("enough");
        }
        let error = loop {
            if let Err(error) = block_on(ring.barrier()) {
                break error;
            }
        };
        // The reason may not have come back to that rank yet.
        block_on(ring.shrink()).unwrap();
        assert_eq!(sum(&mut ring), 3.0);
        block_on(ring.leave());
        error
    });
    for error in errors {
        assert_eq!(error, RingError::GivenUp { rank: 0, detail: "enough".to_owned() });
    }
}

#[test]
fn ranks_go_on_together_when_one_gives_up_and_leaves() {
    for pause in 0..20 {
        let sizes = run(3, &format!("gone-{pause}"), |mut ring| {
            meet(&mut ring);
            if ring.rank() == 1 {
                ring.try_give_up("enough");
                // It may serve the rendezvous, where others may ask for the next ring meanwhile.
                std::thread::sleep(Duration::from_micros(50 * pause));
                return None;
            }
            while block_on(ring.barrier()).is_ok() {}
            block_on(ring.shrink()).unwrap();
            let size = ring.size();
            block_on(ring.leave());
            Some(size)
        });
        assert_eq!(sizes, [Some(2), None, Some(2)], "{pause}");
    }
}
