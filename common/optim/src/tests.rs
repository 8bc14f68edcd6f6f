//! The vectors, and `SyncReplicasOptimizer` composed of an accumulator and a token queue.

use std::collections::BTreeMap;

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Shape;
use serde_json::Value;

use super::{
    Accumulator, Applied, Dequeued, Reduction, SynchronousTokens, SynchronousTokensError,
    TokenQueue, WaiterId,
};

/// Returns the recorded results of TensorFlow 2.21.0.
pub(super) fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

pub(super) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Classic synchronous training of one number by gradient descent at rate 1.
struct Classic {
    tokens: SynchronousTokens,
    w: f64,
    step: GlobalStep,
    accumulator: Accumulator<f64>,
    queue: TokenQueue,
    local_steps: Vec<GlobalStep>,
    /// The pushes that wait for a token, each with its replica. A replica may have several, because
    /// it runs its step in several threads.
    blocked: BTreeMap<WaiterId, usize>,
    pushes: u64,
}

impl Classic {
    fn new(replicas_to_aggregate: u32, total_num_replicas: u32, initial_tokens: u32) -> Self {
        let tokens =
            SynchronousTokens::new(replicas_to_aggregate, total_num_replicas, initial_tokens)
                .unwrap();
        let mut queue = TokenQueue::new(16);
        queue.push_many(GlobalStep(0), tokens.initial_tokens()).unwrap();
        Classic {
            tokens,
            w: 0.0,
            step: GlobalStep(0),
            accumulator: Accumulator::new(Shape::scalar(), Reduction::Mean),
            queue,
            local_steps: vec![GlobalStep(0); total_num_replicas as usize],
            blocked: BTreeMap::new(),
            pushes: 0,
        }
    }

    /// Pushes a replica's gradient and takes a token. Returns the outcome of the gradient, and
    /// whether the replica is blocked.
    fn push(&mut self, replica: usize, gradient: f64) -> (Applied, bool) {
        let local_step = self.local_steps[replica];
        let applied = self.accumulator.apply(&Shape::scalar(), &[gradient], local_step).unwrap();
        let waiter = WaiterId(self.pushes);
        self.pushes += 1;
        let taken = self.queue.take(waiter).unwrap();
        match taken {
            Some(Dequeued::Token { step }) => self.local_steps[replica] = step,
            Some(Dequeued::Closed) => panic!("the queue is never closed"),
            None => {
                self.blocked.insert(waiter, replica);
            }
        }
        self.check_invariants();
        (applied, taken.is_none())
    }

    /// Makes the chief's update if there are enough gradients. Returns false and waits no longer if
    /// there are not.
    fn update(&mut self) -> bool {
        let ticket = self.accumulator.take(self.tokens.replicas_to_aggregate().into()).unwrap();
        let Some(taken) = self.accumulator.poll_taken() else {
            assert!(self.accumulator.cancel(ticket));
            return false;
        };
        self.w -= taken.value[0];
        self.step = GlobalStep(self.step.0 + 1);
        self.queue.push_many(self.step, self.tokens.tokens_per_update()).unwrap();
        while let Some((waiter, Dequeued::Token { step })) = self.queue.poll_taken() {
            let replica = self.blocked.remove(&waiter).unwrap();
            self.local_steps[replica] = step;
        }
        self.check_invariants();
        true
    }

    fn check_invariants(&self) {
        self.accumulator.check_invariants();
        self.queue.check_invariants();
    }

    fn local_steps(&self) -> Vec<u64> {
        self.local_steps.iter().map(|step| step.0).collect()
    }

    /// Checks the values that a trace states.
    fn check(&self, state: &Value, event: &Value) {
        let stated = |field: &str| state.get(field);
        if let Some(w) = stated("w") {
            assert_eq!(self.w, w.as_f64().unwrap(), "{event}");
        }
        if let Some(step) = stated("gs") {
            assert_eq!(self.step.0, number(step), "{event}");
        }
        if let Some(tokens) = stated("tokens") {
            assert_eq!(self.queue.len() as u64, number(tokens), "{event}");
        }
        let steps =
            |list: &Value| -> Vec<u64> { list.as_array().unwrap().iter().map(number).collect() };
        if let Some(local) = stated("local") {
            assert_eq!(self.local_steps(), steps(local), "{event}");
        }
        if let Some(local) = stated("local_is_permutation_of") {
            let (mut found, mut expected) = (self.local_steps(), steps(local));
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{event}");
        }
    }

    /// Replays a trace, event by event.
    fn run(mut self, trace: &Value) -> Self {
        for event in trace.as_array().unwrap() {
            match &event[0] {
                Value::String(name) if name == "init" => self.check(&event[1], event),
                Value::String(name) if name == "sync" => {
                    assert!(self.update(), "{event}");
                    self.check(&event[1], event);
                }
                replica => {
                    let replica = number(replica) as usize;
                    let (applied, blocked) = self.push(replica, event[1].as_f64().unwrap());
                    assert_eq!(blocked, event[2].as_bool().unwrap(), "{event}");
                    let stale = matches!(applied, Applied::Stale { .. });
                    let expected = event.get(3).and_then(|state| state.get("stale"));
                    assert_eq!(stale, expected.is_some(), "{event}");
                    if let Some(state) = event.get(3) {
                        self.check(state, event);
                    }
                }
            }
        }
        self
    }
}

#[test]
fn trace_b_a_stale_backup_recovers_in_one_step() {
    let vectors = vectors();
    let trace = &vectors["sync_replicas"]["B_agg2_total3_tokens0"];
    let end = Classic::new(2, 3, 0).run(trace);
    // The trace does not state this: the last gradient is in the sum of the next update.
    assert_eq!((end.accumulator.count(), end.blocked.len()), (1, 0));
}

#[test]
fn trace_a_initial_tokens_carry_the_old_step() {
    let vectors = vectors();
    let trace = &vectors["sync_replicas"]["A_agg2_total3_default_tokens"];
    let end = Classic::new(2, 3, 2).run(trace);
    assert_eq!((end.w, end.accumulator.count()), (-2.0, 0), "both gradients of 50 were dropped");
}

#[test]
fn trace_c_fewer_replicas_than_gradients() {
    let vectors = vectors();
    let trace = &vectors["sync_replicas"]["C_agg4_total2_tokens2"];
    let end = Classic::new(4, 2, 2).run(trace);
    // Both blocked pushes are of replica 1; replica 0 continued under the initial tokens.
    assert_eq!(end.local_steps(), [0, 1]);
}

#[test]
fn too_few_tokens_for_the_first_update_are_refused() {
    let vectors = vectors();
    let error = vectors["sync_replicas"]["num_tokens_1_agg4_total2"].as_str().unwrap();
    assert_eq!(error, "ValueError too few tokens: 1 given, 2 needed");
    let refused = SynchronousTokens::new(4, 2, 1).unwrap_err();
    let expected = SynchronousTokensError::TooFewTokens {
        given: 1,
        needed: 2,
        replicas_to_aggregate: 4,
        total_num_replicas: 2,
    };
    assert_eq!(refused, expected);
    assert_eq!(
        refused.to_string(),
        "cannot train synchronously with initial_tokens = 1: 2 replicas need 2 to make the 4 \
         pushes of the first update"
    );
}

/// Returns whether the first update is made when replicas push as often as they may.
fn first_update_comes(aggregate: u32, replicas: usize, initial_tokens: u32) -> bool {
    let mut queue = TokenQueue::new(64);
    queue.push_many(GlobalStep(0), initial_tokens).unwrap();
    let mut accumulator = Accumulator::<f32>::new(Shape::scalar(), Reduction::Mean);
    accumulator.take(aggregate.into()).unwrap();
    for replica in 0..replicas {
        let waiter = WaiterId(replica as u64);
        loop {
            accumulator.apply(&Shape::scalar(), &[1.0], GlobalStep(0)).unwrap();
            if accumulator.poll_taken().is_some() {
                return true;
            }
            if queue.take(waiter).unwrap().is_none() {
                break;
            }
        }
    }
    false
}

#[test]
fn exactly_the_counts_that_would_hang_are_rejected() {
    for (aggregate, replicas) in (1..6).flat_map(|a| (1..6).map(move |r| (a, r))) {
        for initial_tokens in 0..6 {
            let accepted = SynchronousTokens::new(aggregate, replicas, initial_tokens).is_ok();
            let comes = first_update_comes(aggregate, replicas as usize, initial_tokens);
            assert_eq!(accepted, comes, "{aggregate} of {replicas}, {initial_tokens} tokens");
        }
    }
}

#[test]
fn a_replica_that_leaves_keeps_its_token() {
    // Without a backup replica training stops. With one it continues, until a second replica
    // leaves.
    for (aggregate, replicas, leave, continues) in
        [(2, 2, 1, false), (2, 3, 1, true), (2, 3, 2, false)]
    {
        let case = format!("{leave} of {replicas} replicas leave, {aggregate} are needed");
        let mut classic = Classic::new(aggregate, replicas, 0);
        for _ in 0..3 {
            for replica in 0..replicas as usize {
                classic.push(replica, 1.0);
            }
            assert!(classic.update());
        }
        let stay = replicas as usize - leave;
        let mut moves = true;
        while moves && classic.step.0 < 10 {
            moves = false;
            for replica in 0..stay {
                if !classic.blocked.values().any(|&blocked| blocked == replica) {
                    classic.push(replica, 1.0);
                    moves = true;
                }
            }
            moves |= classic.update();
        }
        assert_eq!(classic.step.0 == 10, continues, "{case}");
        assert_eq!(classic.blocked.len() == stay, !continues, "{case}");
    }
}
