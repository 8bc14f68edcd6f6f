//! The decisions of a coordinator, by tables and at random.

use pushpull_common::ids::EffectNumber;
use pushpull_worker::simulation::SeededRandom;

use super::*;
use crate::planted::PlantedServiceBugs;

const RETRY_FOR: Duration = Duration::from_secs(10);

/// A dispatch, the time, and what it has decided.
struct World {
    dispatch: Dispatch<&'static str>,
    now: Instant,
    started: Vec<Attempt>,
    cancelled: Vec<Attempt>,
    made: Vec<(u32, u32)>,
    ended: Vec<(u64, CallEnding)>,
}

fn world(workers: u32) -> World {
    world_after(workers, 0, [])
}

fn world_after<const N: usize>(workers: u32, settled: u64, also: [u64; N]) -> World {
    let config = DispatchConfig {
        workers,
        queue_max: 100,
        calls_per_worker: 1,
        window: 4,
        retry_for: RETRY_FOR,
        timeouts_max: 1,
        planted: PlantedServiceBugs::default(),
    };
    let mut window = EffectWindow::default();
    for number in (1..=settled).chain(also) {
        window.settle(EffectNumber(number));
    }
    let mut world = World {
        dispatch: Dispatch::new(config, window),
        now: Instant::now(),
        started: Vec::new(),
        cancelled: Vec::new(),
        made: Vec::new(),
        ended: Vec::new(),
    };
    for worker in 0..workers {
        world.input(DispatchInput::WorkerUp { worker: WorkerId(worker) });
    }
    world
}

impl World {
    fn input(&mut self, input: DispatchInput<&'static str>) {
        self.dispatch.handle(self.now, input);
        self.dispatch.check_invariants();
        while let Some(output) = self.dispatch.poll_output() {
            match output {
                DispatchOutput::Start { attempt, settled } => {
                    assert!(settled < attempt.number);
                    self.started.push(attempt);
                }
                DispatchOutput::Cancel { attempt } => self.cancelled.push(attempt),
                DispatchOutput::Make { worker, resource } => {
                    self.made.push((worker.0, resource.0));
                }
                DispatchOutput::Ended { number, ending } => self.ended.push((number, ending)),
            }
        }
    }

    fn schedule(&mut self, number: u64) {
        self.input(DispatchInput::Schedule { number, pinned: None, resources: Vec::new() });
    }

    fn pin(&mut self, number: u64, worker: u32) {
        let pinned = Some(WorkerId(worker));
        self.input(DispatchInput::Schedule { number, pinned, resources: Vec::new() });
    }

    fn end(&mut self, attempt: Attempt, end: AttemptEnd<&'static str>) {
        self.input(DispatchInput::AttemptEnded { attempt, end });
    }

    fn lose(&mut self, worker: u32) {
        self.input(DispatchInput::WorkerLost { worker: WorkerId(worker) });
    }

    fn up(&mut self, worker: u32) {
        self.input(DispatchInput::WorkerUp { worker: WorkerId(worker) });
    }

    /// Takes the attempts that have begun: the numbers and the workers.
    fn started(&mut self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.started).iter().map(|a| (a.number, a.worker.0)).collect()
    }
}

#[test]
fn calls_run_in_order_on_free_workers() {
    let mut world = world(2);
    for number in 1..=3 {
        world.schedule(number);
    }
    let first = world.started[0];
    assert_eq!(world.started(), [(1, 0), (2, 1)]);
    world.end(first, AttemptEnd::Done);
    assert_eq!((world.started(), &world.ended[..]), (vec![(3, 0)], &[(1, CallEnding::Done)][..]));
    assert_eq!(world.dispatch.settled(), 1);
}

#[test]
fn the_calls_of_a_lost_worker_run_elsewhere_and_a_late_end_means_nothing() {
    let mut world = world(2);
    world.schedule(1);
    world.schedule(2);
    let late = world.started[0];
    world.started.clear();
    world.lose(0);
    assert_eq!((world.started(), world.cancelled.len()), (vec![], 1));
    world.up(0);
    assert_eq!(world.started(), [(1, 0)]);
    world.end(late, AttemptEnd::Done);
    assert!(world.ended.is_empty(), "the attempt was given up");
    // A worker that restarts without having been lost gives its calls back as well.
    world.up(1);
    assert_eq!(world.started(), [(2, 1)]);
    // One that an attempt finds lost.
    let attempt = Attempt { number: 2, worker: WorkerId(1), attempt: late.attempt + 3 };
    world.end(attempt, AttemptEnd::Lost);
    assert_eq!(world.started(), [], "the other worker is busy");
}

#[test]
fn a_pinned_call_waits_for_its_worker() {
    let mut world = world(2);
    world.pin(1, 1);
    assert_eq!(world.started(), [(1, 1)]);
    world.lose(1);
    assert_eq!(world.started(), []);
    world.schedule(2);
    assert_eq!(world.started(), [(2, 0)]);
    world.up(1);
    assert_eq!(world.started(), [(1, 1)]);
    world.pin(3, 7);
    assert_eq!(world.started(), [], "a worker that has never been there");
    world.up(7);
    assert_eq!(world.started(), [(3, 7)]);
}

#[test]
fn the_first_final_error_cancels_what_has_not_begun_and_is_given_once() {
    let mut world = world(2);
    for number in 1..=5 {
        world.schedule(number);
    }
    let first = world.started[0];
    let second = world.started[1];
    world.started.clear();
    world.end(first, AttemptEnd::Final("no such user"));
    assert_eq!((world.started(), world.dispatch.has_room()), (vec![], false));
    assert_eq!(world.dispatch.take_error(), None, "the program has not looked");
    world.input(DispatchInput::Look);
    let cancelled = [3, 4, 5].map(|number| (number, CallEnding::Cancelled));
    assert_eq!(world.ended[0], (1, CallEnding::Failed));
    assert_eq!(world.ended[1..], cancelled);
    assert_eq!(world.dispatch.take_error(), None, "a call is under way");
    world.end(second, AttemptEnd::Final("another"));
    assert_eq!(world.dispatch.take_error(), Some("no such user"));
    assert_eq!((world.dispatch.take_error(), world.dispatch.is_idle()), (None, true));
    // It may be used again.
    world.schedule(6);
    assert_eq!(world.started(), [(6, 0)]);
}

#[test]
fn a_call_that_loses_its_worker_after_the_error_is_cancelled() {
    for end in [None, Some(AttemptEnd::Lost)] {
        let mut world = world(2);
        world.schedule(1);
        world.schedule(2);
        let first = world.started[0];
        let second = world.started[1];
        world.end(first, AttemptEnd::Final("no such user"));
        world.input(DispatchInput::Look);
        assert_eq!(world.dispatch.take_error(), None, "a call is under way");
        match end {
            Some(end) => world.end(second, end),
            None => world.lose(1),
        }
        assert_eq!(world.ended, [(1, CallEnding::Failed), (2, CallEnding::Cancelled)]);
        assert_eq!(world.dispatch.take_error(), Some("no such user"));
    }
}

#[test]
fn a_failure_that_may_pass_is_tried_again_for_a_while() {
    let mut world = world(1);
    world.schedule(1);
    let mut attempts = 0;
    while let Some(attempt) = world.started.pop() {
        attempts += 1;
        world.end(attempt, AttemptEnd::Retry("busy"));
        assert!(world.started.is_empty(), "there is a pause");
        if let Some(wake) = world.dispatch.wake_at() {
            world.now = wake;
            world.input(DispatchInput::Tick);
        }
    }
    assert!((8..16).contains(&attempts), "{attempts} attempts in {RETRY_FOR:?}");
    assert_eq!(world.ended, [(1, CallEnding::Failed)]);
    world.input(DispatchInput::Look);
    assert_eq!(world.dispatch.take_error(), Some("busy"));
}

#[test]
fn calls_do_not_run_further_ahead_than_the_window() {
    let mut world = world(8);
    for number in 1..=8 {
        world.schedule(number);
    }
    let all = std::mem::take(&mut world.started);
    assert_eq!(all.len(), 4);
    world.end(all[3], AttemptEnd::Done);
    assert!(world.started.is_empty(), "the first has not ended");
    world.end(all[0], AttemptEnd::Done);
    assert_eq!(world.started(), [(5, 0)]);
}

#[test]
fn what_has_ended_before_is_not_run_again() {
    let mut world = world_after(1, 3, [5, 7]);
    for number in 1..=8 {
        world.schedule(number);
    }
    let mut run = Vec::new();
    while let Some(attempt) = world.started.pop() {
        run.push(attempt.number);
        world.end(attempt, AttemptEnd::Done);
    }
    assert_eq!((run, world.dispatch.settled()), (vec![4, 6, 8], 8));
    assert!(world.dispatch.has_ended(7) && !world.dispatch.has_ended(9));
}

#[test]
fn a_worker_runs_what_needs_a_resource_once_it_has_it() {
    let mut world = world(2);
    let resource = ResourceId(1);
    world.input(DispatchInput::Resource { resource });
    assert_eq!(world.made, [(0, 1), (1, 1)]);
    let needs =
        |number| DispatchInput::Schedule { number, pinned: None, resources: vec![resource] };
    world.input(needs(1));
    world.schedule(2);
    assert_eq!(world.started(), [(2, 0)]);
    let made = |worker, end| DispatchInput::MakingEnded { worker: WorkerId(worker), resource, end };
    world.input(made(0, MakingEnd::Failed("no data")));
    world.input(made(1, MakingEnd::Made));
    assert_eq!(world.started(), [(1, 1)]);
    // A worker that comes back makes it again.
    world.lose(1);
    world.up(1);
    assert_eq!((world.made[2], world.started()), ((1, 1), vec![]));
    world.input(made(1, MakingEnd::Made));
    assert_eq!(world.started(), [(1, 1)]);
}

#[test]
fn a_resource_is_made_again_after_a_failure_that_may_pass() {
    let mut world = world(1);
    let resource = ResourceId(1);
    world.input(DispatchInput::Resource { resource });
    let resources = vec![resource];
    world.input(DispatchInput::Schedule { number: 1, pinned: None, resources });
    let ended = |end| DispatchInput::MakingEnded { worker: WorkerId(0), resource, end };
    for times in 1..=3 {
        assert_eq!((world.made.len(), world.started()), (times, vec![]));
        world.input(ended(MakingEnd::Retry));
        assert_eq!(world.made.len(), times, "there is a pause");
        world.now = world.dispatch.wake_at().unwrap();
        world.input(DispatchInput::Tick);
    }
    world.input(ended(MakingEnd::Made));
    assert_eq!((world.made.len(), world.started()), (4, vec![(1, 0)]));
}

#[test]
fn a_call_fails_once_no_worker_can_have_its_resource() {
    let mut world = world(2);
    let resource = ResourceId(1);
    let resources = || vec![resource];
    world.input(DispatchInput::Resource { resource });
    let needs = |number, pinned| DispatchInput::Schedule { number, pinned, resources: resources() };
    let failed = |worker, error| {
        let end = MakingEnd::Failed(error);
        DispatchInput::MakingEnded { worker: WorkerId(worker), resource, end }
    };
    world.input(needs(1, None));
    world.input(failed(0, "no data on 0"));
    assert_eq!(world.ended, [], "the other may have it");
    world.lose(1);
    assert_eq!(world.ended, [], "it may come back");
    world.up(1);
    world.input(failed(1, "no data on 1"));
    let lacks = CallEnding::WithoutResource { resource };
    assert_eq!((world.started(), &world.ended[..]), (vec![], &[(1, lacks)][..]));
    assert_eq!(world.dispatch.resource_error(resource), Some(&"no data on 1"));
    world.input(DispatchInput::Look);
    assert_eq!(world.dispatch.take_error(), Some("no data on 1"));
    // Others run, and such a call fails at once. A worker that restarts tries again.
    world.schedule(2);
    assert_eq!(world.started(), [(2, 0)]);
    world.input(needs(3, Some(WorkerId(1))));
    assert_eq!(world.ended[1..], [(3, lacks)]);
    world.input(DispatchInput::Look);
    world.end(Attempt { number: 2, worker: WorkerId(0), attempt: 1 }, AttemptEnd::Done);
    assert_eq!(world.dispatch.take_error(), Some("no data on 1"));
    world.up(0);
    world.input(needs(4, None));
    assert_eq!(world.ended.len(), 3);
    let end = MakingEnd::Made;
    world.input(DispatchInput::MakingEnded { worker: WorkerId(0), resource, end });
    assert_eq!(world.started(), [(4, 0)]);
}

#[test]
fn every_call_ends_once_while_workers_come_and_go() {
    for seed in 0..300 {
        let mut chance = SeededRandom(seed);
        let mut world = world(3);
        let mut next = 1;
        let mut open = Vec::new();
        for _ in 0..600 {
            open.append(&mut world.started);
            match chance.below(9) {
                0 | 1 if next <= 40 && world.dispatch.has_room() => {
                    match chance.below(4) {
                        0 => world.pin(next, chance.below(3) as u32),
                        _ => world.schedule(next),
                    }
                    next += 1;
                }
                2 => world.lose(chance.below(3) as u32),
                3 => world.up(chance.below(3) as u32),
                4 => {
                    world.now += Duration::from_millis(chance.below(500));
                    world.input(DispatchInput::Tick);
                }
                5 => {
                    world.input(DispatchInput::Look);
                    let _ = world.dispatch.take_error();
                }
                _ if !open.is_empty() => {
                    let index = chance.below(open.len() as u64) as usize;
                    let attempt: Attempt = open.swap_remove(index);
                    let end = match chance.below(24) {
                        0..3 => AttemptEnd::Lost,
                        3..6 => AttemptEnd::Retry("again"),
                        6 => AttemptEnd::Final("for good"),
                        _ => AttemptEnd::Done,
                    };
                    world.end(attempt, end);
                }
                _ => {}
            }
        }
        // Everything comes back and ends well.
        for worker in 0..3 {
            world.up(worker);
        }
        while !world.dispatch.is_idle() {
            world.input(DispatchInput::Look);
            let _ = world.dispatch.take_error();
            open.append(&mut world.started);
            match open.pop() {
                Some(attempt) => world.end(attempt, AttemptEnd::Done),
                None => {
                    world.now += Duration::from_secs(2);
                    world.input(DispatchInput::Tick);
                }
            }
        }
        let mut ended: Vec<u64> = world.ended.iter().map(|&(number, _)| number).collect();
        ended.sort_unstable();
        assert_eq!(ended, (1..next).collect::<Vec<u64>>(), "seed {seed}");
        assert_eq!(world.dispatch.settled(), next - 1, "seed {seed}");
    }
}

#[test]
fn a_call_may_be_too_slow_as_often_as_is_set() {
    let mut world = world(1);
    world.schedule(1);
    world.schedule(2);
    let slow = world.started[0];
    world.end(slow, AttemptEnd::TimedOut("slow"));
    assert_eq!(world.started[1].number, 2, "the worker goes on with the next");
    let next = world.started[1];
    world.end(next, AttemptEnd::Done);
    world.now += Duration::from_millis(50);
    world.input(DispatchInput::Tick);
    let again = world.started[2];
    assert_eq!(again.number, 1);
    world.end(again, AttemptEnd::TimedOut("slow again"));
    assert_eq!(world.ended, [(2, CallEnding::Done), (1, CallEnding::Failed)]);
    world.input(DispatchInput::Look);
    assert_eq!(world.dispatch.take_error(), Some("slow again"));
}
