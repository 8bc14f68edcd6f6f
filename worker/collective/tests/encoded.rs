//! Encoded reductions on rings of threads over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pushpull_collective::{
    EncodedTensor, Launch, Reduction, RingConfig, RingError, Transport, blocking,
};
use pushpull_common::codec::{Codec, Residual};

const CODECS: [Codec; 6] = [
    Codec::F16,
    Codec::Bf16,
    Codec::Int8,
    Codec::OneBit,
    Codec::TopK { fraction: 0.01 },
    Codec::TopK { fraction: 0.5 },
];

static JOBS: AtomicU32 = AtomicU32::new(0);

/// Runs a ring of this many threads. Returns the results in order of ranks.
fn run<R: Send>(
    size: u32,
    transport: Option<Transport>,
    rank: impl Fn(blocking::Ring) -> R + Sync,
) -> Vec<R> {
    let folder = tempfile::tempdir().unwrap();
    let job = JOBS.fetch_add(1, Ordering::Relaxed);
    let config = |index: u32| {
        let lookup = |name: &str| match name {
            "OMPI_COMM_WORLD_RANK" => Some(index.to_string()),
            "OMPI_COMM_WORLD_SIZE" => Some(size.to_string()),
            "PMIX_NAMESPACE" => Some(format!("encoded-{}-{job}", std::process::id())),
            _ => None,
        };
        let config = RingConfig::new(Launch::from_lookup(lookup).unwrap()).folder(folder.path());
        let config = config.lease(Duration::from_secs(2)).join_timeout(Duration::from_secs(20));
        transport.map_or(config.clone(), |transport| config.transport(transport))
    };
    let all_joined = std::sync::Barrier::new(size as usize);
    std::thread::scope(|scope| {
        let start = |index: u32| {
            let config = config(index);
            let (rank, all_joined) = (&rank, &all_joined);
            scope.spawn(move || {
                let joined = blocking::Ring::join(config);
                // A rank that gives the ring up ends the barrier of a rank that is still in it.
                let joined = joined.and_then(|mut ring| ring.barrier().map(|()| ring));
                all_joined.wait();
                rank(joined.unwrap())
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What a rank contributes at an element: integers, whose sums are exact.
fn value(rank: u32, step: usize, element: usize) -> f32 {
    ((element * 7919 + step * 104_729 + rank as usize * 31) % 2001) as f32 - 1000.0
}

fn reduce(
    ring: &mut blocking::Ring,
    codec: Codec,
    values: &mut [f32],
    residual: &mut Residual<f32>,
    reduction: Reduction,
) -> Result<(), RingError> {
    ring.all_reduce_encoded(EncodedTensor { name: "w", codec, values, residual }, reduction)
}

#[test]
fn sums_are_bit_equal_on_all_ranks_and_lose_nothing() {
    const STEPS: usize = 6;
    let lengths = [0, 1, 255, 257, 5000, 100_003];
    for (size, transport) in [(1, None), (2, Some(Transport::Tcp)), (3, None), (4, None)] {
        for codec in CODECS {
            let ranks = run(size, transport, |mut ring| {
                let rank = ring.rank();
                let mut found = Vec::new();
                for length in lengths {
                    let mut residual = Residual::new(length);
                    let mut sums = Vec::new();
                    for step in 0..STEPS {
                        let mut values: Vec<f32> =
                            (0..length).map(|at| value(rank, step, at)).collect();
                        reduce(&mut ring, codec, &mut values, &mut residual, Reduction::Sum)
                            .unwrap();
                        sums.push(values);
                    }
                    found.push((sums, residual.left().to_vec()));
                }
                ring.barrier().unwrap();
                ring.leave();
                found
            });
            for (nth, length) in lengths.into_iter().enumerate() {
                let (sums, _) = &ranks[0][nth];
                let bits = |sums: &[Vec<f32>]| -> Vec<u32> {
                    sums.iter().flatten().map(|sum| sum.to_bits()).collect()
                };
                assert!(ranks.iter().all(|rank| bits(&rank[nth].0) == bits(sums)), "{codec}");
                for at in 0..length {
                    let given: f64 = (0..size)
                        .flat_map(|rank| (0..STEPS).map(move |step| (rank, step)))
                        .map(|(rank, step)| f64::from(value(rank, step, at)))
                        .sum();
                    let arrived: f64 = sums.iter().map(|sum| f64::from(sum[at])).sum();
                    let left: f64 = ranks.iter().map(|rank| f64::from(rank[nth].1[at])).sum();
                    let off = (given - arrived - left).abs();
                    assert!(off < 0.1, "{codec}, {size} ranks: element {at} is off by {off}");
                }
            }
        }
    }
}

#[test]
fn an_encoded_reduction_sends_the_bytes_of_the_codec() {
    let sent = |codec: Codec| {
        let bytes = run(4, None, |mut ring| {
            let mut values = vec![1.0_f32; 1 << 20];
            let mut residual = Residual::new(values.len());
            reduce(&mut ring, codec, &mut values, &mut residual, Reduction::Mean).unwrap();
            assert!(values.iter().all(|mean| (0.0..=1.01).contains(mean)));
            let sent = ring.metrics().bytes_sent;
            ring.barrier().unwrap();
            ring.leave();
            sent
        });
        // Without the barrier before: 3 passes of an i32.
        bytes[0] - 3 * 4
    };
    let plain = 6 * (1_u64 << 20);
    assert_eq!(sent(Codec::Bf16), plain / 2);
    assert_eq!(sent(Codec::Int8), plain / 4 + 6 * 4 * 1024);
    // For each stretch of 16,384 elements the head, and 164 indices and values.
    assert_eq!(sent(Codec::TopK { fraction: 0.01 }), 6 * 16 * (8 + 8 * 164));
}

#[test]
fn a_rank_with_another_codec_is_named_with_both() {
    let others = [Some(Codec::Int8), Some(Codec::TopK { fraction: 0.2 }), None];
    for other in others {
        let errors = run(3, None, |mut ring| {
            let mut values = [1.0_f32; 300];
            let mut residual = Residual::new(300);
            let codec = match ring.rank() {
                1 => other,
                _ => Some(Codec::TopK { fraction: 0.1 }),
            };
            let reduced = match codec {
                Some(codec) => reduce(&mut ring, codec, &mut values, &mut residual, Reduction::Sum),
                None => ring.all_reduce_as("w", &mut values, Reduction::Sum),
            };
            reduced.unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, RingError::Difference { .. }), "{error}");
            let text = error.to_string();
            let named = other.map_or("300 x f32".to_owned(), |other| format!("f32 as {other}"));
            assert!(text.contains("f32 as topk(0.1)") && text.contains(&named), "{text}");
        }
    }
}

#[test]
fn non_finite_values_arrive_or_end_the_ring_with_their_place() {
    for codec in CODECS {
        let errors = run(3, None, |mut ring| {
            let rank = ring.rank();
            let mut values = vec![1.0_f32; 700];
            values[513] = if rank == 1 { f32::NAN } else { 1.0 };
            let mut residual = Residual::new(700);
            let reduced = reduce(&mut ring, codec, &mut values, &mut residual, Reduction::Mean);
            assert!(residual.left().iter().all(|left| left.is_finite()), "{codec}");
            if reduced.is_ok() {
                assert!(values[513].is_nan() && values[512] == 1.0, "{codec}");
                ring.barrier().unwrap();
                ring.leave();
            }
            reduced.err()
        });
        match codec.encoding().takes_non_finite() {
            true => assert!(errors.iter().all(Option::is_none), "{codec}: {errors:?}"),
            false => {
                let own = errors[1].as_ref().unwrap();
                assert!(matches!(own, RingError::NonFinite { element: 513, .. }), "{own}");
                for error in [&errors[0], &errors[2]] {
                    let text = error.as_ref().unwrap().to_string();
                    assert!(text.contains("rank 1") && text.contains("513 is NaN"), "{text}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_encoded_is_named_and_sends_nothing() {
    run(1, None, |mut ring| {
        let mut refused = |codec, elements, reduction| {
            let mut residual = Residual::new(elements);
            reduce(&mut ring, codec, &mut [1.0; 3], &mut residual, reduction)
                .unwrap_err()
                .to_string()
        };
        let threshold = refused(Codec::Threshold { magnitude: 0.5 }, 3, Reduction::Sum);
        assert!(threshold.contains("threshold(0.5)"), "{threshold}");
        let invalid = refused(Codec::TopK { fraction: 2.0 }, 3, Reduction::Sum);
        assert!(invalid.contains("topk(2)"), "{invalid}");
        let shorter = refused(Codec::F16, 2, Reduction::Sum);
        assert!(shorter.contains("3 elements have a residual of 2"), "{shorter}");
        let maximum = refused(Codec::F16, 3, Reduction::Max);
        assert!(maximum.contains("max"), "{maximum}");
        ring.barrier().unwrap();
    });
}
