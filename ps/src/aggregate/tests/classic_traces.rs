//! Recorded traces of TensorFlow's `SyncReplicasOptimizer`, replayed on the step owner and a shard.
//!
//! A trace has one number that is trained by gradient descent at rate 1. Its events are pushes and
//! updates. The value, the step, the tokens and who waits must match, except where a test states
//! the difference.

use std::collections::BTreeMap;
use std::time::Instant;

use pushpull_common::ids::ClientEpoch;
use pushpull_store::planted::PlantedBugs;
use serde_json::{Value, json};

use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_rule::StepRule;
use crate::aggregate::token_issuer::TokenResponse;
use crate::client_key::ClientKey;

/// Returns one of the recorded traces.
fn trace(name: &str) -> Value {
    let text = include_str!("../../../../common/tests/vectors/semantics.json");
    let vectors: Value = serde_json::from_str(text).unwrap();
    vectors["sync_replicas"][name].clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// Training of one number by several replicas, with one shard.
struct Training {
    owner: StepCoordinator,
    follower: StepFollower,
    w: f64,
    /// The time of every event: no decision of the step owner depends on time.
    now: Instant,
    /// The gradients that the shard holds, by token.
    held: BTreeMap<u64, f64>,
    replicas: Vec<TrainingReplica>,
}

/// A replica and its last token. The initial token 0 is nobody's.
#[derive(Clone, Copy, Debug, Default)]
struct TrainingReplica {
    token: u64,
    local_step: u64,
    waits: bool,
}

impl Training {
    /// Starts training with one token for each replica.
    fn new(aggregate: u32, total: u32, floor: u32) -> Training {
        let planted = PlantedBugs::default();
        let rule = StepRule {
            aggregate,
            total,
            floor,
            ordered: false,
            push_slots: 64,
            last_step: None,
            clip: None,
        };
        let mut training = Training {
            owner: StepCoordinator::new(rule, 1, planted),
            follower: StepFollower::new(0, planted),
            w: 0.0,
            now: Instant::now(),
            held: BTreeMap::new(),
            replicas: vec![TrainingReplica::default(); total as usize],
        };
        for replica in 0..total {
            training.owner.join(ClientKey(replica), replica);
        }
        for replica in 0..training.replicas.len() {
            training.request(replica);
        }
        training
    }

    /// Requests a token for a replica, which waits if there is none for it.
    fn request(&mut self, replica: usize) {
        let response = self.owner.request(ClientKey(replica as u32), ClientEpoch(0), self.now);
        let replica = &mut self.replicas[replica];
        replica.waits = match response {
            TokenResponse::Granted(issued) => {
                replica.token = issued.token.0;
                replica.local_step = issued.step.0;
                false
            }
            TokenResponse::Wait => true,
            TokenResponse::Ended(reason) => panic!("training has ended: {reason:?}"),
        };
    }

    /// Pushes the gradient of a replica, and requests its next token. Returns whether the gradient
    /// is stale.
    fn push(&mut self, replica: usize, gradient: f64) -> bool {
        assert!(!self.replicas[replica].waits, "replica {replica} waits for a token");
        let token = self.replicas[replica].token;
        let is_fresh = self.owner.held(0, token, BitwiseF64::ONE);
        if is_fresh {
            self.held.insert(token, gradient);
        }
        self.request(replica);
        self.owner.check().unwrap();
        !is_fresh
    }

    /// Applies the committed step, and repeats the requests of the waiting replicas. Returns false
    /// if no step is committed.
    fn update(&mut self) -> bool {
        let Some(committed) = self.owner.committed() else { return false };
        self.follower.receive_commit(&committed);
        let tokens = self.follower.tokens_to_apply().unwrap();
        let sum: f64 = tokens.iter().map(|token| self.held[token]).sum();
        self.w -= sum / tokens.len() as f64;
        self.follower.applied();
        self.held.clear();
        self.owner.applied(0, self.follower.step());
        for replica in 0..self.replicas.len() {
            if self.replicas[replica].waits {
                self.request(replica);
            }
        }
        self.owner.check().unwrap();
        true
    }

    /// Counts the tokens that the step owner would still grant.
    fn tokens_left(&self) -> u64 {
        let mut owner = self.owner.clone();
        let mut granted = 0;
        for replica in 0..self.replicas.len() as u32 {
            while let TokenResponse::Granted(_) =
                owner.request(ClientKey(replica), ClientEpoch(0), self.now)
            {
                granted += 1;
            }
        }
        granted
    }

    /// Checks the values that a trace states.
    fn check(&self, state: &Value, event: &Value) {
        let local_steps: Vec<u64> = self.replicas.iter().map(|r| r.local_step).collect();
        for (field, found) in [
            ("w", json!(self.w)),
            ("gs", json!(self.follower.step())),
            ("tokens", json!(self.tokens_left())),
            ("local", json!(local_steps)),
        ] {
            // The traces write whole numbers as integers.
            let expected = match state.get(field) {
                Some(w) if field == "w" => json!(w.as_f64()),
                Some(expected) => expected.clone(),
                None => continue,
            };
            assert_eq!(found, expected, "{field} after {event}");
        }
    }

    /// Replays a trace, event by event.
    fn run(mut self, trace: &Value) -> Training {
        for event in trace.as_array().unwrap() {
            match &event[0] {
                Value::String(name) if name == "init" => self.check(&event[1], event),
                Value::String(name) if name == "sync" => {
                    assert!(self.update(), "{event}");
                    self.check(&event[1], event);
                }
                replica => {
                    let replica = number(replica) as usize;
                    let is_stale = self.push(replica, event[1].as_f64().unwrap());
                    let state = event.get(3).unwrap_or(&Value::Null);
                    assert_eq!(is_stale, state.get("stale").is_some(), "{event}");
                    assert_eq!(self.replicas[replica].waits, event[2] == true, "{event}");
                    self.check(state, event);
                }
            }
        }
        self
    }
}

#[test]
fn trace_b_a_stale_backup_recovers_in_one_step() {
    let mut trace = trace("B_agg2_total3_tokens0");
    // A token of the classic queue is anybody's: replica 0 takes the one that replica 1 has not
    // taken. The step owner grants a replica at most its share of a step.
    let last = &mut trace[7];
    assert_eq!(last[2], false);
    assert_eq!(last[3]["tokens"], 0);
    last[2] = json!(true);
    last[3]["tokens"] = json!(1);
    let end = Training::new(2, 3, 1).run(&trace);
    // The trace does not state this: the last gradient is in the sum of the next update.
    assert_eq!(end.owner.current.admitted().len(), 1);
}

#[test]
fn trace_c_fewer_replicas_than_gradients() {
    let mut trace = trace("C_agg4_total2_tokens2");
    // Both replicas take the two initial tokens of the classic queue. The step owner grants each
    // replica its share, two tokens of a step: each waits after its second push.
    assert_eq!(trace[2], json!([0, 2.0, false]));
    assert_eq!(trace[3], json!([1, 3.0, true]));
    trace[2][2] = json!(true);
    trace[3][2] = json!(false);
    // An initial token carries the old step into the next; here every token ends with its step.
    assert_eq!(trace[5][1]["local_is_permutation_of"], json!([0, 1]));
    trace[5][1]["local"] = json!([1, 1]);
    Training::new(4, 2, 1).run(&trace);
}

#[test]
fn no_counts_of_replicas_and_gradients_prevent_the_first_step() {
    // Without initial tokens the classic queue can. It refuses such counts.
    let error = trace("num_tokens_1_agg4_total2");
    assert_eq!(error, "ValueError too few tokens: 1 given, 2 needed");
    for aggregate in 1..6 {
        for total in 1..6 {
            let mut training = Training::new(aggregate, total, 1);
            for replica in 0..total as usize {
                while !training.replicas[replica].waits {
                    training.push(replica, 1.0);
                }
            }
            assert!(training.update(), "{aggregate} of {total}");
            assert_eq!((training.w, training.follower.step()), (-1.0, 1));
        }
    }
}

#[test]
fn a_silent_replica_keeps_its_token_until_it_is_lost() {
    // Without a backup replica training stops. With one it continues, until a second replica
    // leaves.
    for (aggregate, total, leave, continues) in
        [(2, 2, 1, false), (2, 3, 1, true), (2, 3, 2, false)]
    {
        let case = format!("{leave} of {total} replicas leave, {aggregate} are needed");
        let mut training = Training::new(aggregate, total, 1);
        for _ in 0..3 {
            for replica in 0..total as usize {
                training.push(replica, 1.0);
            }
            assert!(training.update());
        }
        let stay = (total - leave) as usize;
        let reaches = |training: &mut Training, step: u64| {
            let mut moves = true;
            while moves && training.follower.step() < step {
                moves = training.update();
                for replica in 0..stay {
                    if !training.replicas[replica].waits {
                        training.push(replica, 1.0);
                        moves = true;
                    }
                }
            }
            training.follower.step() == step
        };
        assert_eq!(reaches(&mut training, 10), continues, "{case}");
        // The classic queue has no leases: its training stops for good.
        for replica in stay..total as usize {
            training.owner.lose(ClientKey(replica as u32));
        }
        assert!(reaches(&mut training, 20), "{case}, and are lost");
    }
}
