//! Rings of threads over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pushpull_collective::{
    Launch, Reduction, Ring, RingConfig, RingError, Tensor, Transport, blocking,
};

/// A folder of its own for each test, in which the ranks meet.
struct Meeting {
    folder: tempfile::TempDir,
    key: String,
    transport: Option<Transport>,
}

static JOBS: AtomicU32 = AtomicU32::new(0);

impl Meeting {
    fn new() -> Meeting {
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        Meeting {
            folder: tempfile::tempdir().unwrap(),
            key: format!("test-{}-{number}", std::process::id()),
            transport: None,
        }
    }

    fn config(&self, rank: u32, size: u32) -> RingConfig {
        let variables = [
            ("PMIX_NAMESPACE", self.key.clone()),
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", size.to_string()),
        ];
        let lookup = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        };
        let launch = Launch::from_lookup(lookup).unwrap();
        let config = RingConfig::new(launch)
            .folder(PathBuf::from(self.folder.path()))
            .lease(Duration::from_secs(2))
            .join_timeout(Duration::from_secs(20));
        match self.transport {
            Some(transport) => config.transport(transport),
            None => config,
        }
    }

    /// Runs a ring of this many threads. Returns what each has returned, in order of ranks.
    fn run<R: Send>(&self, size: u32, rank: impl Fn(blocking::Ring) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let start = |index: u32| {
                let config = self.config(index, size);
                let rank = &rank;
                scope.spawn(move || rank(blocking::Ring::join(config).unwrap()))
            };
            let threads: Vec<_> = (0..size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// What rank `rank` contributes at `element`: no sum of these is exact in f32.
fn value(rank: u32, element: usize) -> f32 {
    let number = (rank as usize * 7919 + element * 104_729) % 10_007;
    (number as f32 - 5000.0) / 3.0
}

/// The sum in the order of the fold: chunk `c` begins at rank `c`.
fn expected(size: u32, length: usize, element: usize) -> f32 {
    let share = length / size as usize;
    let longer = length % size as usize;
    let chunk_of = |element: usize| match element < longer * (share + 1) {
        true => element / (share + 1),
        false => longer + (element - longer * (share + 1)) / share,
    };
    let first = chunk_of(element) as u32;
    let ranks = (0..size).map(|step| (first + step) % size);
    ranks.map(|rank| value(rank, element)).reduce(|sum, value| sum + value).unwrap()
}

#[test]
fn sums_are_folded_in_rank_order_on_all_ranks() {
    for transport in [None, Some(Transport::Tcp)] {
        for size in [1, 2, 3, 4, 7] {
            let meeting = Meeting { transport, ..Meeting::new() };
            let lengths = [0, 1, 2, 3, 7, 1000, 4096, 4097, 100_003, 1_000_003];
            let sums = meeting.run(size, |mut ring| {
                let rank = ring.rank();
                let mut all = Vec::new();
                for length in lengths {
                    let mut values: Vec<f32> = (0..length).map(|at| value(rank, at)).collect();
                    ring.all_reduce(&mut values, Reduction::Sum).unwrap();
                    all.push(values);
                }
                ring.barrier().unwrap();
                ring.leave();
                all
            });
            for (rank, all) in sums.iter().enumerate() {
                for (length, values) in lengths.iter().zip(all) {
                    let wrong = (0..*length).find(|&at| values[at] != expected(size, *length, at));
                    assert_eq!(wrong, None, "rank {rank} of {size}, {length} elements");
                }
            }
        }
    }
}

#[test]
fn links_within_a_host_use_memory_or_the_socket_that_is_asked_for() {
    let cases = [
        (None, "shared memory"),
        (Some(Transport::SharedMemory), "shared memory"),
        (Some(Transport::Unix), "a Unix socket"),
        (Some(Transport::Tcp), "TCP"),
    ];
    for (transport, name) in cases {
        let meeting = Meeting { transport, ..Meeting::new() };
        let sums = meeting.run(2, |mut ring| {
            let text = ring.to_string();
            assert_eq!(text.matches(&format!(" over {name}, ")).count(), 2, "{text}");
            let mut values = [1.0_f32; 100];
            ring.all_reduce(&mut values, Reduction::Sum).unwrap();
            ring.leave();
            values[99]
        });
        assert_eq!(sums, [2.0; 2], "{transport:?}");
    }
}

/// Joins a ring that ends. A rank whose own links have opened hears of the end later than the one at
/// fault.
fn fault_of(config: RingConfig) -> String {
    match blocking::Ring::join(config) {
        Ok(mut ring) => failure(&mut ring).to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_rank_that_must_share_memory_joins_no_ring_without() {
    for other in [Transport::Unix, Transport::Tcp] {
        let meeting = Meeting::new();
        let address = free_address();
        let join = |rank: u32, transport: Transport| {
            let config = meeting.config(rank, 2).rendezvous(&address).transport(transport);
            move || fault_of(config)
        };
        let faults = std::thread::scope(|scope| {
            let must = scope.spawn(join(0, Transport::SharedMemory));
            let cannot = scope.spawn(join(1, other));
            [must, cannot].map(|rank| rank.join().unwrap())
        });
        for fault in faults {
            assert!(fault.contains("rank 0"), "{other}: {fault}");
            assert!(fault.contains("no memory is shared"), "{other}: {fault}");
        }
    }
}

#[test]
fn a_rank_names_a_neighbour_of_which_it_can_use_no_address() {
    // Both meet in a folder. One is on a network as well, so the other may be on another host.
    let meeting = Meeting::new();
    let faults = std::thread::scope(|scope| {
        let ranks = [(0, Transport::Unix), (1, Transport::Tcp)].map(|(rank, transport)| {
            let config = meeting.config(rank, 2).transport(transport);
            scope.spawn(move || fault_of(config))
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for fault in faults {
        assert!(fault.contains("rank 1 can use none of its addresses"), "{fault}");
    }
}

/// Performs sums until one fails.
fn failure(ring: &mut blocking::Ring) -> RingError {
    loop {
        if let Err(error) = ring.all_reduce(&mut [1.0_f32; 10], Reduction::Sum) {
            return error;
        }
    }
}

#[test]
fn every_operation_does_what_it_says() {
    for size in [1, 2, 3, 5] {
        Meeting::new().run(size, |mut ring| {
            let rank = ring.rank();
            let ranks = 0..size;
            // Every rank has its number at each place.
            let filled = |length: usize| vec![i64::from(rank) + 1; length];
            let sum = i64::from(ranks.clone().map(|rank| rank + 1).sum::<u32>());
            for length in [0, 1, 4, 7, 100_000] {
                for (reduction, expected) in
                    [(Reduction::Sum, sum), (Reduction::Min, 1), (Reduction::Max, size.into())]
                {
                    let mut values = filled(length);
                    ring.all_reduce(&mut values, reduction).unwrap();
                    assert!(values.iter().all(|value| *value == expected), "{reduction}");
                    let mut values = filled(length);
                    let own = ring.reduce_scatter(&mut values, reduction).unwrap();
                    assert!(own.len().abs_diff(length / size as usize) <= 1);
                    assert!(values[own].iter().all(|value| *value == expected), "{reduction}");
                }
                let mut all = vec![0; length * size as usize];
                ring.all_gather(&filled(length), &mut all).unwrap();
                let expected = ranks.clone().flat_map(|rank| vec![i64::from(rank) + 1; length]);
                assert!(all.iter().copied().eq(expected));
                for root in ranks.clone() {
                    let mut values = filled(length);
                    ring.broadcast(&mut values, root).unwrap();
                    assert!(values.iter().all(|value| *value == i64::from(root) + 1));
                }
            }
            let mut means = [f64::from(rank), 1.0];
            ring.all_reduce(&mut means, Reduction::Mean).unwrap();
            assert_eq!(means, [f64::from(size - 1) / 2.0, 1.0]);
            ring.leave();
        });
    }
}

#[test]
fn small_tensors_travel_together() {
    Meeting::new().run(3, |mut ring| {
        let mut first = [1.0_f32; 10];
        let mut second = [2.0_f32; 5];
        let mut large = vec![3.0_f32; 1 << 20];
        let mut tensors = [
            Tensor { name: "first", values: &mut first },
            Tensor { name: "second", values: &mut second },
            Tensor { name: "large", values: &mut large },
        ];
        ring.all_reduce_fused(&mut tensors, Reduction::Sum).unwrap();
        assert_eq!((first, second), ([3.0; 10], [6.0; 5]));
        assert!(large.iter().all(|value| *value == 9.0));
        let metrics = ring.metrics();
        assert_eq!(
            (metrics.fused_tensors, metrics.fused_operations, metrics.operations),
            (2, 1, 2)
        );
        assert!(metrics.bytes_sent > 2 << 20, "{metrics:?}");
        ring.leave();
    });
}

#[test]
fn a_rank_that_drops_its_ring_is_named_on_every_other_rank() {
    let errors = Meeting::new().run(4, |mut ring| {
        // A rank whose ring is dropped before the others have joined would fail their join.
        let met = ring.barrier();
        match ring.rank() {
            2 => met.map(|()| None).unwrap(),
            _ => Some(met.err().unwrap_or_else(|| failure(&mut ring))),
        }
    });
    for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let expected = matches!(error, Some(RingError::GivenUp { rank: 2, .. }));
        assert!(expected, "rank {rank}: {error:?}");
    }
}

#[test]
fn ranks_that_are_left_go_on() {
    // The rank that came first serves the rendezvous, whichever that is.
    for lost in 0..4 {
        let sums = Meeting::new().run(4, |mut ring| {
            // The lost rank may drop its ring while others still wait for bytes that it would pass on.
            let met = ring.barrier();
            if ring.index() == lost {
                met.unwrap();
                return None;
            }
            let error = met.err().unwrap_or_else(|| failure(&mut ring));
            assert!(error.may_shrink(), "{error}");
            ring.shrink().unwrap();
            let mut values = [1.0 + ring.index() as f32];
            ring.all_reduce(&mut values, Reduction::Sum).unwrap();
            let place = (ring.rank(), ring.size(), ring.epoch(), values[0]);
            ring.leave();
            Some(place)
        });
        let left = (0..4).filter(|index| *index != lost);
        for (rank, index) in left.enumerate() {
            let expected = Some((rank as u32, 3, 2, 10.0 - (lost as f32 + 1.0)));
            assert_eq!(sums[index as usize], expected, "index {index} without {lost}");
        }
    }
}

/// Loses one rank of three, which comes again once the others have shrunk.
fn lose_and_take_back(config: impl Fn(u32) -> RingConfig + Sync, lost: u32) {
    std::thread::scope(|scope| {
        let (has_shrunk, shrunk) = std::sync::mpsc::channel();
        let stay = move |mut ring: blocking::Ring| {
            let error = ring.barrier().err().unwrap_or_else(|| failure(&mut ring));
            assert!(error.may_shrink(), "{error}");
            ring.shrink().unwrap();
            assert_eq!(ring.size(), 2);
            has_shrunk.send(()).unwrap();
            let mut steps = 0.0_f32;
            while !ring.regroup().unwrap() {
                steps += 1.0;
            }
            ring.broadcast(std::slice::from_mut(&mut steps), 0).unwrap();
            let place = (ring.rank(), ring.index(), ring.size(), steps);
            ring.leave();
            place
        };
        let others: Vec<u32> = (0..3).filter(|index| *index != lost).collect();
        let threads = others.iter().map(|&index| {
            let stay = stay.clone();
            let config = config(index);
            scope.spawn(move || stay(blocking::Ring::join(config).unwrap()))
        });
        let threads: Vec<_> = threads.collect();
        let mut ring = blocking::Ring::join(config(lost)).unwrap();
        ring.barrier().unwrap();
        drop(ring);
        shrunk.recv().unwrap();
        shrunk.recv().unwrap();
        let mut late = blocking::Ring::join(config(lost)).unwrap();
        let mut steps = [-1.0_f32];
        late.broadcast(&mut steps, 0).unwrap();
        assert_eq!((late.rank(), late.index(), late.size()), (lost, lost, 3));
        late.leave();
        for (index, thread) in others.iter().zip(threads) {
            assert_eq!(thread.join().unwrap(), (*index, *index, 3, steps[0]));
        }
    });
}

#[test]
fn a_rank_that_comes_later_gets_its_index_and_the_values_of_the_others() {
    let meeting = Meeting::new();
    lose_and_take_back(|index| meeting.config(index, 3), 1);
}

#[test]
fn a_rank_finds_the_ring_after_the_one_at_its_address_was_lost() {
    let address = free_address();
    let config = |index| {
        // Only rank 0 listens at the address at first.
        let config = RingConfig::new(Launch::new(index, 3).unwrap()).rendezvous(&address);
        config.size_min(2).join_window(Duration::from_secs(60)).lease(Duration::from_secs(2))
    };
    lose_and_take_back(config, 0);
}

#[test]
fn ranks_that_leave_do_not_keep_a_slow_one_from_the_last_operation() {
    let meeting = Meeting::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut slow = std::pin::pin!(Ring::join(meeting.config(2, 3)));
    // It has asked to join, and does not see that its ring has formed.
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(slow.as_mut().poll(&mut context).is_pending());
    // It serves the rendezvous: a rank that serves leaves last.
    let begin = std::time::Instant::now();
    let key = format!("pushpull-ring-open-mpi-{}/rendezvous", meeting.key);
    while !meeting.folder.path().join(&key).exists() {
        assert!(begin.elapsed() < Duration::from_secs(20), "rank 2 does not serve");
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let others = [0, 1].map(|index| {
            let config = meeting.config(index, 3);
            scope.spawn(move || {
                let mut ring = blocking::Ring::join(config).unwrap();
                let mut values = [7.0_f32 - index as f32];
                ring.broadcast(&mut values, 0).unwrap();
                ring.leave();
            })
        });
        let [first, second] = others;
        // Rank 1 needs nothing of rank 2.
        second.join().unwrap();
        runtime.block_on(async {
            let mut ring = slow.await.unwrap();
            let mut values = [0.0_f32];
            ring.broadcast(&mut values, 0).await.unwrap();
            assert_eq!(values, [7.0]);
            ring.leave().await;
        });
        first.join().unwrap();
    });
}

#[test]
fn all_ranks_name_the_first_difference() {
    type Perform = fn(&mut blocking::Ring, &str, usize) -> Result<(), RingError>;
    let sum: Perform =
        |ring, name, length| ring.all_reduce_as(name, &mut vec![0.0_f32; length], Reduction::Sum);
    let double: Perform =
        |ring, name, length| ring.all_reduce_as(name, &mut vec![0.0_f64; length], Reduction::Sum);
    let mean: Perform =
        |ring, name, length| ring.all_reduce_as(name, &mut vec![0.0_f32; length], Reduction::Mean);
    let barrier: Perform = |ring, _, _| ring.barrier();
    // What rank 1 does, and how it is described.
    let others: &[(Perform, &str, usize, &str)] = &[
        (sum, "v", 10, "all-reduce (sum) of \"v\": 10 x f32"),
        (sum, "w", 11, "all-reduce (sum) of \"w\": 11 x f32"),
        (double, "w", 10, "all-reduce (sum) of \"w\": 10 x f64"),
        (mean, "w", 10, "all-reduce (mean) of \"w\": 10 x f32"),
        (barrier, "w", 10, "barrier"),
    ];
    for (perform, name, length, described) in others {
        let errors = Meeting::new().run(3, |mut ring| {
            ring.barrier().unwrap();
            match ring.rank() {
                1 => perform(&mut ring, name, *length).unwrap_err(),
                _ => sum(&mut ring, "w", 10).unwrap_err(),
            }
        });
        for error in &errors {
            let RingError::Difference { number: 2, .. } = error else { panic!("{error:?}") };
            let text = error.to_string();
            assert!(text.contains(&format!("rank 1 performs {described}")), "{text}");
            assert!(text.contains("performs all-reduce (sum) of \"w\": 10 x f32"), "{text}");
            assert_eq!(error, &errors[0], "all ranks get one reason");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let meeting = Meeting::new();
    let config = meeting.config(1, 3).join_timeout(Duration::from_millis(300));
    let error = blocking::Ring::join(config).unwrap_err();
    let RingError::NotFormed { came: 1, size: 3, missing, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(missing, &[0, 2]);
}

#[test]
fn a_rank_that_does_not_come_to_an_operation_is_named() {
    let meeting = Meeting::new();
    let (stalled, stalls) = std::sync::mpsc::channel();
    let errors = std::thread::scope(|scope| {
        let ranks = (0..2).map(|index| {
            let limit = Duration::from_millis(300);
            let stalled = stalled.clone();
            let config = meeting.config(index, 2).operation_timeout(limit);
            let config = config.on_stall(limit / 3, move |stall| _ = stalled.send(stall.clone()));
            scope.spawn(move || {
                let mut ring = blocking::Ring::join(config).unwrap();
                match ring.rank() {
                    0 => failure(&mut ring),
                    // It comes once the other has given up.
                    _ => loop {
                        std::thread::park_timeout(Duration::from_millis(400));
                        if let Err(error) = ring.barrier() {
                            return error;
                        }
                    },
                }
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        let RingError::GivenUp { rank: 0, detail } = &error else { panic!("{error:?}") };
        assert!(detail.contains("waited for rank 1"), "{detail}");
    }
    let stall = stalls.try_recv().unwrap();
    assert_eq!((stall.rank, stall.number), (1, 1), "{stall}");
    assert!(stall.since >= Duration::from_millis(100), "{stall}");
    assert!(!stall.host.is_empty() && stall.operation.contains("all-reduce"), "{stall}");
}

#[test]
fn two_processes_of_one_number_do_not_form_a_ring() {
    let meeting = Meeting::new();
    std::thread::scope(|scope| {
        let limit = Duration::from_secs(2);
        let join = |id: &str| {
            let config = meeting.config(0, 2).id(id).join_timeout(limit);
            scope.spawn(move || blocking::Ring::join(config).unwrap_err().to_string())
        };
        let errors = [join("a"), join("b")].map(|thread| thread.join().unwrap());
        let refused = errors.iter().filter(|error| error.starts_with("cannot join the ring"));
        assert_eq!(refused.count(), 1, "{errors:?}");
    });
}

#[test]
fn ranks_must_agree_on_facts() {
    let meeting = Meeting::new();
    std::thread::scope(|scope| {
        let join = |index: u32| {
            let model = format!("model {index}");
            let config = meeting.config(index, 2).fact("model", model);
            let config = config.join_timeout(Duration::from_secs(2));
            scope.spawn(move || blocking::Ring::join(config).unwrap_err().to_string())
        };
        let errors = [join(0), join(1)].map(|thread| thread.join().unwrap());
        let named = errors.iter().any(|error| {
            error.contains("model") && error.contains("model 0") && error.contains("model 1")
        });
        assert!(named, "{errors:?}");
    });
}

#[test]
fn what_a_ring_cannot_do_is_refused_before_it_begins() {
    Meeting::new().run(2, |mut ring| {
        let mean = ring.all_reduce(&mut [1_i32], Reduction::Mean).unwrap_err();
        assert!(matches!(mean, RingError::Argument { .. }), "{mean}");
        let gather = ring.all_gather(&[1.0_f32], &mut [0.0; 3]).unwrap_err();
        assert!(matches!(gather, RingError::Argument { .. }), "{gather}");
        let root = ring.broadcast(&mut [1.0_f32], 2).unwrap_err();
        assert!(matches!(root, RingError::Argument { .. }), "{root}");
        // The ring is as good as before.
        ring.barrier().unwrap();
        ring.leave();
    });
}

#[test]
fn values_that_are_not_finite_end_the_ring_if_they_are_rejected() {
    let meeting = Meeting::new();
    let errors = std::thread::scope(|scope| {
        let ranks = (0..2).map(|index| {
            let config = meeting.config(index, 2).reject_non_finite();
            scope.spawn(move || {
                let mut ring = blocking::Ring::join(config).unwrap();
                // Before it, the other rank may still join, and its ring never form.
                if let Err(error) = ring.barrier() {
                    return error;
                }
                let mut values = [1.0_f32, 2.0, 3.0];
                if ring.rank() == 1 {
                    values[2] = f32::NAN;
                }
                ring.all_reduce_as("w", &mut values, Reduction::Sum).unwrap_err()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(matches!(errors[1], RingError::NonFinite { element: 2, .. }), "{:?}", errors[1]);
    let RingError::GivenUp { rank: 1, detail } = &errors[0] else { panic!("{:?}", errors[0]) };
    assert!(detail.contains("element 2 is NaN"), "{detail}");
}

#[test]
fn a_sum_that_overflows_ends_the_ring() {
    for length in [1, 100_000] {
        let errors = Meeting::new().run(2, |mut ring| {
            let mut values = vec![1_i32; length];
            values[length / 2] = i32::MAX;
            ring.all_reduce(&mut values, Reduction::Sum).unwrap_err()
        });
        for error in errors {
            let RingError::GivenUp { detail, .. } = &error else { panic!("{error:?}") };
            assert!(detail.contains(&format!("element {}", length / 2)), "{detail}");
        }
    }
}

#[test]
fn a_dropped_future_ends_the_ring_for_all() {
    let meeting = Meeting::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let errors = std::thread::scope(|scope| {
        let ranks = (0..2).map(|index| {
            let config = meeting.config(index, 2);
            scope.spawn(move || {
                runtime().block_on(async {
                    let mut ring = Ring::join(config).await.unwrap();
                    let mut values = vec![1.0_f32; 1 << 20];
                    ring.all_reduce(&mut values, Reduction::Sum).await.unwrap();
                    assert!(values.iter().all(|value| *value == 2.0));
                    if index == 1 {
                        let operation = ring.barrier();
                        let limit = Duration::from_millis(50);
                        let _ = tokio::time::timeout(limit, operation).await.unwrap_err();
                    } else {
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                    let error = ring.barrier().await.unwrap_err();
                    // The end has one reason, and is none of the next ring.
                    ring.shrink().await.unwrap();
                    ring.barrier().await.unwrap();
                    ring.leave().await;
                    error
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        let RingError::GivenUp { rank: 1, detail } = &error else { panic!("{error:?}") };
        assert!(detail.contains("dropped"), "{detail}");
    }
}

/// Returns an address at which nobody listens.
fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_rank_that_starts_again_forms_no_elastic_ring_of_its_own() {
    let config = RingConfig::new(Launch::new(1, 3).unwrap()).rendezvous(free_address()).size_min(1);
    let error = blocking::Ring::join(config.join_timeout(Duration::from_millis(300))).unwrap_err();
    assert!(matches!(error, RingError::NoRendezvous { .. }), "{error}");
}

#[test]
fn ranks_meet_at_an_address() {
    let address = free_address();
    std::thread::scope(|scope| {
        // The rank on the host of the address need not be rank 0.
        for rank in [1, 0, 2] {
            let launch = Launch::new(rank, 3).unwrap();
            let config = RingConfig::new(launch).rendezvous(&address).lease(Duration::from_secs(2));
            scope.spawn(move || {
                let mut ring = blocking::Ring::join(config).unwrap();
                let text = ring.to_string();
                assert!(text.starts_with(&format!("rank {rank} of 3 on ")), "{text}");
                assert!(
                    text.ends_with("over shared memory, epoch 1, rendezvous in rank 1"),
                    "{text}"
                );
                ring.barrier().unwrap();
                ring.leave();
            });
            let begin = std::time::Instant::now();
            while std::net::TcpStream::connect(&address).is_err() {
                assert!(begin.elapsed() < Duration::from_secs(20), "rank {rank} does not listen");
                std::thread::yield_now();
            }
        }
    });
}
