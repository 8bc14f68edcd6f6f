//! Synchronous steps, with the cases in which the classic system hangs. Time is virtual.

use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::{self, Role};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Peer, Push, bytes_of, chief, f32s, f64s, pack, variables, worker};
use super::world::{ConnectionId, Received, World};
use crate::config::{Mode, OnLoss, PsConfig, Synchronous};
use crate::shard::{ShardInput, TICK};

const LEASE: Duration = Duration::from_secs(5);

/// A worker task and its connections to all shards.
pub(super) struct Replica {
    pub(super) peer: Peer,
    pub(super) lines: Vec<ConnectionId>,
    pub(super) sequence: u64,
    newest: u64,
}

/// Shards that exchange messages about steps, and replicas, of which the first is the chief.
pub(super) struct ShardCluster {
    pub(super) world: World,
    /// The connections of the other shards to the step owner's.
    pub(super) links: Vec<Option<ConnectionId>>,
    pub(super) replicas: Vec<Replica>,
}

pub(super) fn synchronous(replicas_to_aggregate: u32, total_num_replicas: u32) -> Synchronous {
    Synchronous::new(replicas_to_aggregate).total_num_replicas(total_num_replicas)
}

impl ShardCluster {
    pub(super) fn new(
        shards: u16,
        mode: impl Into<Mode>,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> ShardCluster {
        let mode = mode.into();
        let configure = |config: PsConfig| {
            configure(config.shards(shards).mode(mode).lease(LEASE).inbox_pushes(1))
        };
        ShardCluster::of(World::bare(variables(), Sgd::new(1.0), configure), mode)
    }

    /// Forms a cluster of the shards of this world, in which nothing is declared yet.
    pub(super) fn of(mut world: World, mode: impl Into<Mode>) -> ShardCluster {
        let shards = world.shards.len();
        let lines = world.begin();
        let first = Replica { peer: chief(), lines, sequence: 0, newest: 0 };
        let mut cluster = ShardCluster { world, links: vec![None; shards], replicas: vec![first] };
        (1..shards).for_each(|shard| cluster.link(shard));
        let mode = mode.into();
        let total_num_replicas = mode.synchronous().map_or(3, |mode| mode.total_num_replicas);
        (1..total_num_replicas).for_each(|task| cluster.add(task));
        cluster.settle();
        cluster
    }

    /// Adds a worker task as a replica.
    fn add(&mut self, task: u32) {
        self.replicas.push(Replica { peer: worker(task), lines: vec![], sequence: 0, newest: 0 });
        self.connect(task as usize);
    }

    /// Connects a replica to every shard.
    pub(super) fn connect(&mut self, replica: usize) {
        self.replicas[replica].lines.clear();
        for shard in 0..self.links.len() {
            let joined = self.world.try_join(shard, &mut self.replicas[replica].peer);
            if let Err(Refusal::Busy { .. }) = joined {
                // In asynchronous mode an older incarnation is ended on all shards first.
                self.settle();
            }
            let Replica { peer, lines, .. } = &mut self.replicas[replica];
            let joined = joined.or_else(|_| self.world.try_join(shard, peer));
            lines.push(joined.unwrap());
            // The step owner announces a chief to the other shards.
            self.settle();
        }
    }

    /// Kills and restarts the process of a replica.
    pub(super) fn restart(&mut self, replica: usize) {
        for line in std::mem::take(&mut self.replicas[replica].lines) {
            self.world.disconnect(line);
        }
        let peer = self.replicas[replica].peer.restarted();
        self.replicas[replica] = Replica { peer, lines: vec![], sequence: 0, newest: 0 };
        self.connect(replica);
    }

    /// Connects a shard to the step owner's.
    pub(super) fn link(&mut self, shard: usize) {
        let peer = Peer { role: Role::Peer {}, ..worker(90 + shard as u32) };
        let (line, _) = self.world.handshake(0, peer.hello(0), false).unwrap();
        self.links[shard] = Some(line);
        self.world.input(shard, ShardInput::OwnerLink { up: true });
        self.world.input(shard, ShardInput::Tick);
        self.settle();
    }

    /// Kills and restarts the process of a shard. All clients and shards connect to it again.
    pub(super) fn kill_shard(&mut self, shard: usize) {
        self.world.restart(shard).unwrap();
        for replica in &mut self.replicas {
            if let Some(line) = replica.lines.get_mut(shard) {
                *line = self.world.join(shard, &mut replica.peer);
            }
        }
        match shard {
            0 => {
                for other in 1..self.links.len() {
                    self.world.input(other, ShardInput::OwnerLink { up: false });
                    self.link(other);
                }
            }
            _ => {
                if let Some(line) = self.links[shard].take() {
                    self.world.disconnect(line);
                }
                self.link(shard);
            }
        }
        self.settle();
    }

    /// Delivers the messages between shards and does all work, until nothing is left to do.
    pub(super) fn settle(&mut self) {
        loop {
            self.world.work();
            if !self.deliver() {
                return;
            }
        }
    }

    /// Delivers the messages between shards, without the work that they cause. Returns whether there
    /// were any.
    pub(super) fn deliver(&mut self) -> bool {
        let messages = std::mem::take(&mut self.world.to_owner);
        let mut moved = !messages.is_empty();
        for (shard, envelope, message) in messages {
            if let Some(line) = self.links[shard] {
                self.world.send(line, envelope, message, &[]);
            }
        }
        for shard in 1..self.links.len() {
            let Some(line) = self.links[shard] else { continue };
            for received in self.world.received.remove(&line).unwrap_or_default() {
                let Received::Message { envelope, message, .. } = received else { continue };
                assert!(!matches!(message, Message::Refused(_)), "{message:?}");
                let (header, message) = pack(&envelope, &message, 0);
                self.world.input(shard, ShardInput::Owner { header: &header, message });
                moved = true;
            }
        }
        moved
    }

    /// Returns the connections of the other shards to the step owner's.
    pub(super) fn peer_lines(&self) -> Vec<ConnectionId> {
        self.links.iter().flatten().copied().collect()
    }

    /// Lets this much time pass, while these replicas and all shards send heartbeats.
    pub(super) fn pass(&mut self, time: Duration, alive: &[usize]) {
        let lines = alive.iter().flat_map(|&replica| self.replicas[replica].lines.clone());
        // Shards send heartbeats to the step owner as long as they are connected.
        let lines: Vec<ConnectionId> = lines.chain(self.peer_lines()).collect();
        self.world.pass(time, &lines);
        self.settle();
    }

    /// Requests a token. Returns `None` if the request waits.
    pub(super) fn try_token(&mut self, replica: usize) -> Result<Option<Grant>, Message> {
        let newest = TokenId(self.replicas[replica].newest);
        let line = self.replicas[replica].lines[0];
        let request = self.world.say(line, message::TokenRequest { newest }.into());
        match self.world.answer(line, request) {
            Some(Message::Granted(granted)) => {
                self.replicas[replica].newest = granted.grant.token.0;
                Ok(Some(granted.grant))
            }
            None => Ok(None),
            Some(other) => Err(other),
        }
    }

    pub(super) fn token(&mut self, replica: usize) -> Grant {
        self.try_token(replica).unwrap().expect("a token")
    }

    /// Sends a gradient with this value in every element to one shard. Returns the outcome, if it
    /// is known by now.
    pub(super) fn push_to(
        &mut self,
        shard: usize,
        replica: usize,
        grant: Grant,
        value: f32,
    ) -> Option<Outcome> {
        let line = self.replicas[replica].lines[shard];
        let sequence = self.replicas[replica].sequence;
        let push_slot = self.world.push_slot(line);
        let w = bytes_of(&[value; 3]);
        let d = bytes_of(&[f64::from(value); 2]);
        let body = match (self.links.len(), shard) {
            (1, _) => [w, d].concat(),
            (_, 0) => w,
            _ => d,
        };
        let push = Push::gradient(sequence, grant, push_slot);
        let request = self.world.push(line, &push, &[(0, &body)]);
        self.settle();
        match self.world.answer(line, request) {
            None => None,
            Some(Message::PushAnswer(answer)) => Some(answer.outcome),
            other => panic!("{other:?}"),
        }
    }

    /// Sends a gradient to every shard, last to the step owner's. Returns the outcome there, if it
    /// is known by now.
    pub(super) fn push(&mut self, replica: usize, grant: Grant, value: f32) -> Option<Outcome> {
        self.replicas[replica].sequence += 1;
        for shard in (1..self.links.len()).rev() {
            self.push_to(shard, replica, grant, value);
        }
        self.push_to(0, replica, grant, value)
    }

    /// Queries the state of this replica's last push on the step owner's shard.
    fn outcome(&mut self, replica: usize) -> message::OutcomeIs {
        let line = self.replicas[replica].lines[0];
        let sequence = self.replicas[replica].sequence;
        let about = Envelope { sequence: sequence.into(), ..Envelope::default() };
        let request = self.world.send(line, about, message::OutcomeQuery {}.into(), &[]);
        match self.world.answer(line, request) {
            Some(Message::OutcomeIs(is)) => is,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the first element of `w` and of `d`, after this many steps on every shard.
    pub(super) fn values(&mut self, steps: u64) -> (f32, f64) {
        let mut values = Vec::new();
        for line in self.replicas[0].lines.clone() {
            self.world.pull(line, steps);
            let parts = self.world.streamed(line).expect("every shard has applied the step");
            values.push(super::peers::unpack(parts).0);
        }
        let d = match values.len() {
            1 => &values[0][16..],
            _ => &values[1][..],
        };
        (f32s(&values[0])[0], f64s(&d[..8])[0])
    }

    pub(super) fn leave(&mut self, replica: usize) {
        for line in self.replicas[replica].lines.clone() {
            let left = self.world.ask(line, message::Leave {}.into());
            assert!(matches!(left, Message::Left(_)));
        }
        self.settle();
    }
}

pub(super) const ACCEPTED: fn(u64) -> Option<Outcome> =
    |step| Some(Outcome::Accepted { step: step.into() });
pub(super) const STALE: fn(u64) -> Option<Outcome> =
    |step| Some(Outcome::Stale { current: step.into() });

#[test]
fn a_step_is_the_mean_of_its_gradients_on_every_shard() {
    for shards in [1, 2] {
        let mut cluster =
            ShardCluster::new(shards, synchronous(2, 2), |config| config.last_step(2));
        let a = cluster.token(0);
        let b = cluster.token(1);
        assert_eq!(
            (a.step.0, cluster.try_token(0)),
            (0, Ok(None)),
            "one gradient from each replica"
        );
        assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
        assert_eq!(cluster.values(0), (0.0, 0.0));
        assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(0));
        assert_eq!(cluster.values(1), (-2.0, -2.0), "{shards} shards");
        let a = cluster.token(0);
        let b = cluster.token(1);
        assert_eq!((a.step.0, b.step.0), (1, 1));
        cluster.push(1, b, 4.0);
        cluster.push(0, a, 0.0);
        assert_eq!(cluster.values(2), (-4.0, -4.0));
        let ended = cluster.try_token(1).unwrap_err();
        assert!(matches!(ended, Message::Ended(_)), "{ended:?}");
        let metrics = cluster.world.metrics();
        assert_eq!((metrics.global_step, metrics.gradients_admitted), (2, 4));
        assert_eq!(metrics.steps_applied, 2 * u64::from(shards));
    }
}

#[test]
fn an_answer_to_a_push_is_corked_while_its_replica_waits_for_a_token() {
    let mut cluster = ShardCluster::new(1, synchronous(3, 3), |config| config);
    let tokens = [0, 1, 2].map(|replica| cluster.token(replica));
    // The replica may read more data before it requests a token.
    assert_eq!(cluster.push(0, tokens[0], 1.0), ACCEPTED(0));
    assert_eq!(cluster.world.corked, []);
    for replica in [1, 2] {
        assert_eq!(cluster.try_token(replica), Ok(None));
        assert_eq!(cluster.push(replica, tokens[replica], 1.0), ACCEPTED(0));
    }
    // Nothing else is corked, and tokens least of all.
    let lines = [1, 2].map(|replica: usize| cluster.replicas[replica].lines[0]);
    assert_eq!(cluster.world.corked, lines);
    cluster.token(0);
    // A stale outcome is sent at once.
    cluster.replicas[1].sequence += 1;
    assert_eq!(cluster.push_to(0, 1, tokens[1], 1.0), STALE(1));
    assert_eq!(cluster.world.corked, lines);
}

#[test]
fn a_gradient_that_comes_too_late_is_stale_and_its_worker_continues_at_once() {
    for shards in [1, 2] {
        let mut cluster = ShardCluster::new(shards, synchronous(2, 3), |config| config);
        let tokens = [cluster.token(0), cluster.token(1), cluster.token(2)];
        cluster.push(0, tokens[0], 1.0);
        cluster.push(1, tokens[1], 3.0);
        assert_eq!(cluster.push(2, tokens[2], 100.0), STALE(1));
        assert_eq!(cluster.values(1), (-2.0, -2.0));
        let slow = cluster.token(2);
        let fast = cluster.token(0);
        assert_eq!((slow.step.0, fast.step.0), (1, 1));
        cluster.push(0, fast, 5.0);
        assert_eq!(cluster.push(2, slow, 7.0), ACCEPTED(1));
        assert_eq!(cluster.values(2), (-8.0, -8.0), "as in the classic trace");
    }
}

#[test]
fn a_replica_killed_with_a_token_blocks_a_step_for_one_lease_at_most() {
    for shards in [1, 2] {
        let mut cluster = ShardCluster::new(shards, synchronous(2, 2), |config| config);
        let a = cluster.token(0);
        let _held = cluster.token(1);
        assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
        cluster.pass(LEASE - TICK, &[0]);
        assert_eq!(cluster.try_token(0), Ok(None), "the killed replica may still come back");
        cluster.pass(2 * TICK, &[0]);
        assert_eq!(cluster.values(1), (-1.0, -1.0));
        let a = cluster.token(0);
        cluster.push(0, a, 1.0);
        assert_eq!(cluster.values(2), (-2.0, -2.0), "the last replica continues alone");
    }
}

#[test]
fn a_replica_that_runs_out_of_data_leaves_the_others_training() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(1, b, 3.0);
    cluster.leave(1);
    assert_eq!(
        cluster.world.metrics().steps_applied,
        0,
        "its gradient stays, and another is expected"
    );
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    assert_eq!(cluster.values(1), (-2.0, -2.0));
    let a = cluster.token(0);
    cluster.push(0, a, 1.0);
    assert_eq!(cluster.values(2), (-3.0, -3.0));
}

#[test]
fn two_departures_with_one_backup_end_in_smaller_steps() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 3), |config| config);
    let a = cluster.token(0);
    cluster.leave(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    assert_eq!(cluster.world.metrics().steps_applied, 0, "two replicas are left for two gradients");
    cluster.leave(2);
    assert_eq!(cluster.values(1), (-1.0, -1.0));
}

#[test]
fn a_replica_that_comes_late_makes_the_next_step_larger() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    cluster.leave(1);
    let a = cluster.token(0);
    cluster.push(0, a, 1.0);
    assert_eq!(cluster.values(1), (-1.0, -1.0));
    cluster.connect(1);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    assert_eq!(cluster.try_token(0), Ok(None));
    cluster.push(1, b, 3.0);
    assert_eq!(cluster.values(2), (-3.0, -3.0));
}

#[test]
fn absent_replicas_are_waited_for_until_the_join_timeout() {
    let wait = Duration::from_secs(20);
    let mode = synchronous(2, 2).join_timeout(wait);
    let mut cluster = ShardCluster::new(1, mode, |config| config);
    // Another world, in which only the chief has joined.
    let (world, lines) =
        World::ready(variables(), Sgd::new(1.0), |config| config.mode(mode).lease(LEASE));
    cluster.world = world;
    cluster.replicas = vec![Replica { peer: chief(), lines, sequence: 0, newest: 0 }];
    let a = cluster.token(0);
    cluster.push(0, a, 1.0);
    cluster.pass(wait - TICK, &[0]);
    assert_eq!(cluster.world.metrics().steps_applied, 0);
    cluster.pass(2 * TICK, &[0]);
    assert_eq!(cluster.values(1), (-1.0, -1.0));
}

#[test]
fn a_worker_that_is_started_a_hundred_times_is_one_replica() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    for round in 0..100 {
        let a = cluster.token(0);
        let b = cluster.token(1);
        if round % 2 == 0 {
            // A part of its push arrives.
            cluster.replicas[1].sequence += 1;
            cluster.push_to(1, 1, b, 50.0);
        }
        cluster.restart(1);
        let b = cluster.token(1);
        assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(round));
        assert_eq!(cluster.world.metrics().steps_applied, 2 * round);
        assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(round));
        let value = -2.0 * (round + 1) as f32;
        assert_eq!(cluster.values(round + 1), (value, value.into()));
    }
    assert_eq!(cluster.world.metrics().members_lost, 0);
}

#[test]
fn a_restarted_chief_continues_at_the_same_step() {
    for admitted in [false, true] {
        let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
        let a = cluster.token(0);
        let b = cluster.token(1);
        cluster.push(0, a, 1.0);
        cluster.push(1, b, 3.0);
        assert_eq!(cluster.values(1), (-2.0, -2.0));
        // In the middle of the next step, the chief restarts. It is the first replica.
        let a = cluster.token(0);
        let b = cluster.token(1);
        if admitted {
            assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(1));
        }
        let before = cluster.world.now;
        cluster.restart(0);
        // It finds the variables declared and with their values.
        let catalogue = cluster.world.catalogue.clone();
        for line in cluster.replicas[0].lines.clone() {
            let declared = cluster.world.declare(line, &catalogue);
            let Message::Declared(declared) = declared else { panic!("{declared:?}") };
            let digest = catalogue.digest();
            assert_eq!(declared.state, message::CatalogueState::Ready { digest });
            assert_eq!(declared.restore_epoch.0, 1, "nothing was initialized again");
        }
        // An admitted gradient stays in the step; otherwise the chief is asked for one again.
        if !admitted {
            let a = cluster.token(0);
            assert_eq!(a.step.0, 1, "the same step");
            assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(1));
        }
        assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(1));
        assert_eq!(cluster.values(2), (-4.0, -4.0));
        assert_eq!(cluster.token(0).step.0, 2);
        assert_eq!(cluster.world.now, before, "no replica has waited for a lease");
    }
}

#[test]
fn the_step_owner_may_be_killed_between_admission_and_commit() {
    for shards in [1, 2] {
        let mut cluster = ShardCluster::new(shards, synchronous(2, 2), |config| config);
        let a = cluster.token(0);
        let b = cluster.token(1);
        assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
        cluster.kill_shard(0);
        let settled = cluster.outcome(0).state;
        let outcome = Outcome::Accepted { step: 0.into() };
        assert_eq!(settled, pushpull_common::protocol::PushState::Settled { outcome });
        assert_eq!(cluster.try_token(0), Ok(None), "it has contributed its gradient");
        assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(0));
        assert_eq!(cluster.values(1), (-2.0, -2.0), "{shards} shards");
        assert_eq!(cluster.token(0).step.0, 1);
    }
}

/// Returns the values after a step of the gradients 1 and 3, for each shard and each moment of the
/// step at which that shard is killed.
pub(super) fn with_kills(configure: impl Fn(Synchronous) -> Synchronous) -> Vec<(f32, f64)> {
    let mut found = Vec::new();
    for killed in [0, 1] {
        for at in 0..7 {
            let mut cluster = ShardCluster::new(2, configure(synchronous(2, 2)), |config| config);
            let mut moment = 0;
            let mut kill = |cluster: &mut ShardCluster| {
                if moment == at {
                    cluster.kill_shard(killed);
                }
                moment += 1;
            };
            kill(&mut cluster);
            let a = cluster.token(0);
            kill(&mut cluster);
            let b = cluster.token(1);
            cluster.replicas[0].sequence += 1;
            cluster.replicas[1].sequence += 1;
            for (shard, replica, grant, value) in
                [(1, 0, a, 1.0), (0, 1, b, 3.0), (0, 0, a, 1.0), (1, 1, b, 3.0)]
            {
                kill(&mut cluster);
                cluster.push_to(shard, replica, grant, value);
            }
            kill(&mut cluster);
            cluster.pass(LEASE / 2, &[0, 1]);
            found.push(cluster.values(1));
            let steps = (cluster.token(0).step.0, cluster.token(1).step.0);
            assert_eq!(steps, (1, 1), "shard {killed} is killed at {at}");
        }
    }
    found
}

#[test]
fn any_shard_may_be_killed_anywhere_in_a_step() {
    assert_eq!(with_kills(|config| config), [(-2.0, -2.0); 14]);
}

#[test]
fn a_shard_killed_between_commit_and_apply_applies_the_step_when_it_is_back() {
    for shards in [1, 2] {
        for killed in 0..shards.into() {
            let mut cluster = ShardCluster::new(shards, synchronous(2, 2), |config| config);
            let a = cluster.token(0);
            let b = cluster.token(1);
            cluster.push(0, a, 1.0);
            cluster.replicas[1].sequence += 1;
            for shard in 1..shards.into() {
                cluster.push_to(shard, 1, b, 3.0);
            }
            // The last push arrives, and no work is done.
            let line = cluster.replicas[1].lines[0];
            let push_slot = cluster.world.push_slot(line);
            let push = Push::gradient(1, b, push_slot);
            let w = bytes_of(&[3_f32; 3]);
            let d = bytes_of(&[3_f64; 2]);
            let body = if shards == 1 { [w, d].concat() } else { w };
            cluster.world.push(line, &push, &[(0, &body)]);
            cluster.kill_shard(killed);
            cluster.pass(LEASE / 2, &[0, 1]);
            assert_eq!(cluster.values(1), (-2.0, -2.0), "shard {killed} of {shards}");
        }
    }
}

#[test]
fn a_replica_that_does_not_come_back_to_a_restarted_step_owner_is_lost() {
    let mut cluster = ShardCluster::new(1, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    cluster.push(0, a, 1.0);
    // The other replica is killed, too.
    for line in std::mem::take(&mut cluster.replicas[1].lines) {
        cluster.world.disconnect(line);
    }
    cluster.kill_shard(0);
    cluster.pass(LEASE + 2 * TICK, &[0]);
    assert_eq!(cluster.values(1), (-1.0, -1.0));
}

#[test]
fn gradients_that_are_left_at_the_end_of_training_make_a_last_step() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    let line = cluster.replicas[0].lines[0];
    assert!(matches!(cluster.world.ask(line, message::Finish {}.into()), Message::Finished(_)));
    cluster.settle();
    assert_eq!(cluster.world.metrics().steps_applied, 0, "a token is out");
    assert_eq!(cluster.try_token(0), Ok(None), "it may still pull the last step");
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(0));
    assert_eq!(cluster.values(1), (-2.0, -2.0));
    assert!(matches!(cluster.try_token(0), Err(Message::Ended(_))));
}

#[test]
fn a_push_that_waits_for_an_earlier_task_is_kept_beyond_its_deadline() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2).deterministic(true), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.replicas[1].sequence += 1;
    cluster.push_to(1, 1, b, 3.0);
    let line = cluster.replicas[1].lines[0];
    let push_slot = cluster.world.push_slot(line);
    let push = Push::gradient(1, b, push_slot);
    let envelope = Envelope { deadline_ms: 1000, ..push.envelope() };
    let body = bytes_of(&[3_f32; 3]);
    let whole = push.part(0, Some(body.len() as u64));
    let request = cluster.world.send(line, envelope, whole, &body);
    cluster.pass(Duration::from_secs(1) - TICK, &[0, 1]);
    assert_eq!(cluster.world.answer(line, request), None);
    cluster.pass(2 * TICK, &[0, 1]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("the push is not answered")
    };
    let Refusal::Deadline { waited_ms, awaited } = refused.refusal else { panic!("{refused:?}") };
    assert!((1000..1200).contains(&waited_ms), "{waited_ms}");
    assert!(awaited.as_str().contains("/job:worker/task:0"), "{awaited}");
    let state = cluster.outcome(1).state;
    assert_eq!(state, pushpull_common::protocol::PushState::Receiving { bytes: 16 });
    // A resend is answered once the push is decided.
    let request = cluster.world.send(line, push.envelope(), push.part(0, Some(16)), &[]);
    cluster.push(0, a, 1.0);
    let Some(Message::PushAnswer(answer)) = cluster.world.answer(line, request) else {
        panic!("the push is not answered")
    };
    assert_eq!(Some(answer.outcome), ACCEPTED(0));
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn a_push_is_dropped_when_its_token_is_returned() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.replicas[0].sequence += 1;
    assert_eq!(cluster.push_to(0, 0, a, 50.0), None, "the other shard lacks the push");
    let line = cluster.replicas[0].lines[0];
    let back = message::ReturnToken { token: a.token, generation: a.generation };
    assert!(matches!(cluster.world.ask(line, back.into()), Message::Returned(_)));
    let outcome = Outcome::Stale { current: 0.into() };
    let state = pushpull_common::protocol::PushState::Settled { outcome };
    assert_eq!(cluster.outcome(0).state, state);
    let a = cluster.token(0);
    cluster.push(0, a, 1.0);
    cluster.push(1, b, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn another_replica_takes_the_place_of_a_killed_one_while_the_others_wait() {
    let mut cluster = ShardCluster::new(1, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let _held = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    assert_eq!(cluster.try_token(0), Ok(None), "it waits first, and has contributed");
    cluster.add(2);
    let line = cluster.replicas[2].lines[0];
    let newest = TokenId(0);
    let request = cluster.world.say(line, message::TokenRequest { newest }.into());
    assert_eq!(cluster.world.answer(line, request), None, "no token is free yet");
    cluster.pass(LEASE + TICK, &[0, 2]);
    let Some(Message::Granted(granted)) = cluster.world.answer(line, request) else {
        panic!("the token of the killed replica is not free")
    };
    cluster.push(2, granted.grant, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn a_push_on_one_shard_only_is_over_with_its_token() {
    let timeout = Duration::from_secs(60);
    let mut cluster =
        ShardCluster::new(2, synchronous(2, 2), |config| config.token_timeout(Some(timeout)));
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    cluster.replicas[1].sequence += 1;
    assert_eq!(cluster.push_to(0, 1, b, 50.0), None);
    cluster.pass(timeout + TICK, &[0, 1]);
    let outcome = Outcome::Stale { current: 0.into() };
    let state = pushpull_common::protocol::PushState::Settled { outcome };
    assert_eq!(cluster.outcome(1).state, state);
    let b = cluster.token(1);
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(0));
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn a_replica_that_leaves_and_comes_back_is_one_of_the_expected_replicas() {
    let mut cluster = ShardCluster::new(1, synchronous(3, 3), |config| config);
    let (world, lines) = World::ready(variables(), Sgd::new(1.0), |config| {
        config.mode(synchronous(3, 3)).lease(LEASE)
    });
    cluster.world = world;
    cluster.replicas = vec![Replica { peer: chief(), lines, sequence: 0, newest: 0 }];
    cluster.add(1);
    cluster.leave(1);
    cluster.connect(1);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    cluster.push(1, b, 2.0);
    assert_eq!(cluster.world.metrics().steps_applied, 0, "the third replica has not joined");
    cluster.add(2);
    let c = cluster.token(2);
    cluster.push(2, c, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn a_deterministic_last_step_does_without_absent_gradients() {
    let mut cluster = ShardCluster::new(1, synchronous(3, 3).deterministic(true), |config| config);
    let a = cluster.token(0);
    let c = cluster.token(2);
    cluster.push(0, a, 1.0);
    assert_eq!(cluster.push(2, c, 3.0), None, "the gradient of the second task comes first");
    let line = cluster.replicas[0].lines[0];
    let newest = TokenId(a.token.0);
    let waits = cluster.world.say(line, message::TokenRequest { newest }.into());
    assert!(matches!(cluster.world.ask(line, message::Finish {}.into()), Message::Finished(_)));
    cluster.settle();
    assert_eq!(cluster.values(1), (-2.0, -2.0));
    assert!(matches!(cluster.world.answer(line, waits), Some(Message::Ended(_))));
}

#[test]
fn held_and_accepted_pushes_are_not_withdrawn() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    for (shard, outcome) in [(0, Outcome::Accepted { step: 0.into() }), (1, Outcome::Held {})] {
        let line = cluster.replicas[0].lines[shard];
        let about = Envelope { sequence: 1.into(), ..Envelope::default() };
        let request = cluster.world.send(line, about, message::Withdraw {}.into(), &[]);
        let Some(Message::PushAnswer(answer)) = cluster.world.answer(line, request) else {
            panic!("the withdrawal is not answered")
        };
        assert_eq!(answer.outcome, outcome);
    }
    cluster.push(1, b, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn claims_of_a_step_that_was_never_made_are_ignored() {
    let mut cluster = ShardCluster::new(2, synchronous(1, 1), |config| config);
    for round in 0..9 {
        let a = cluster.token(0);
        let claim = Grant { step: 999.into(), ..a };
        assert_eq!(cluster.push(0, claim, 1.0), ACCEPTED(round));
        assert_eq!(cluster.world.metrics().steps_applied, 2 * (round + 1));
        cluster.kill_shard(0);
    }
    // False reports of shards are ignored as well, for themselves and for others. Here the other
    // shard holds a push, sends false reports, and does not receive the commit of the step.
    let a = cluster.token(0);
    cluster.replicas[0].sequence += 1;
    assert_eq!(cluster.push_to(1, 0, a, 1.0), Some(Outcome::Held {}));
    let line = cluster.links[1].unwrap();
    for (shard, step) in [(1, 999), (0, 999)] {
        let shard = pushpull_common::ids::ShardId { task: 0, shard };
        let envelope = Envelope { step: u64::into(step), ..Envelope::default() };
        cluster.world.send(line, envelope, message::StepApplied { shard }.into(), &[]);
    }
    cluster.world.disconnect(line);
    cluster.links[1] = None;
    assert_eq!(cluster.push_to(0, 0, a, 1.0), ACCEPTED(9));
    assert_eq!(cluster.try_token(0), Ok(None), "the other shard has yet to apply the step");
    cluster.link(1);
    assert_eq!(cluster.values(10), (-10.0, -10.0));
}

/// A shard says of which task it is. A peer that has proved to be another task is not believed.
#[test]
fn a_peer_speaks_for_the_shards_of_its_own_task_alone() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let line = cluster.links[1].unwrap();
    let connections = &mut cluster.world.shards[0].peers.connections;
    connections.get_mut(&line.connection).unwrap().peer_task = Some(1);
    cluster.replicas[0].sequence += 1;
    assert_eq!(cluster.push_to(1, 0, a, 1.0), Some(Outcome::Held {}));
    assert_eq!(
        cluster.push_to(0, 0, a, 1.0),
        None,
        "nobody has said that the other shard holds it"
    );
    assert_eq!(cluster.world.metrics().gradients_admitted, 0);
}

#[test]
fn a_push_under_the_token_of_another_replica_adds_nothing() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    // The second replica pushes under the first one's token where the step owner does not see it.
    cluster.replicas[1].sequence += 1;
    assert_eq!(cluster.push_to(1, 1, a, 50.0), Some(Outcome::Held {}));
    cluster.replicas[0].sequence += 1;
    assert_eq!(cluster.push_to(0, 0, a, 1.0), None, "the other shard does not hold it");
    assert_eq!(cluster.world.metrics().gradients_admitted, 0);
    // The holder returns the token, as there is no push slot for it there, and all is as before.
    let line = cluster.replicas[0].lines[0];
    let back = message::ReturnToken { token: a.token, generation: a.generation };
    assert!(matches!(cluster.world.ask(line, back.into()), Message::Returned(_)));
    cluster.settle();
    let a = cluster.token(0);
    assert_eq!((cluster.push(0, a, 1.0), cluster.push(1, b, 3.0)), (ACCEPTED(0), ACCEPTED(0)));
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn a_declaration_says_that_training_has_begun_once_a_gradient_is_accepted() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let declared = |cluster: &mut ShardCluster| {
        let line = cluster.replicas[0].lines[0];
        let catalogue = cluster.world.catalogue.clone();
        match cluster.world.declare(line, &catalogue) {
            Message::Declared(declared) => declared.trained,
            other => panic!("{other:?}"),
        }
    };
    let a = cluster.token(0);
    assert!(!declared(&mut cluster));
    cluster.push(0, a, 1.0);
    assert!(declared(&mut cluster), "a gradient is accepted, although no step is made");
}

#[test]
fn a_lost_replica_that_keeps_pushing_adds_nothing() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 3), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    let c = cluster.token(2);
    cluster.replicas[2].sequence += 1;
    cluster.push_to(1, 2, c, 100.0);
    cluster.pass(LEASE + TICK, &[0, 1]);
    assert_eq!(cluster.world.metrics().members_lost, 2, "on each shard");
    // The replica does not know that it is lost, and sends the rest.
    let line = cluster.replicas[2].lines[0];
    assert!(cluster.world.closed.contains(&line));
    cluster.connect(2);
    assert_eq!(cluster.push_to(0, 2, c, 100.0), STALE(0));
    cluster.push(0, a, 1.0);
    cluster.push(1, b, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
    let push_slots: usize =
        cluster.world.shards.iter().map(|shard| shard.whole_tokens().len()).sum();
    assert_eq!(push_slots, 0, "nothing of it is left");
}

#[test]
fn a_replica_that_has_contributed_does_not_block_those_that_wait_behind_it() {
    let timeout = Duration::from_secs(2);
    let mode = synchronous(2, 2);
    let mut cluster = ShardCluster::new(2, mode, |config| config.token_timeout(Some(timeout)));
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    // The first replica waits for the next step. So does the second, which does not use its token.
    assert_eq!(cluster.try_token(0), Ok(None));
    let line = cluster.replicas[1].lines[0];
    let newest = b.token;
    let request = cluster.world.say(line, message::TokenRequest { newest }.into());
    assert_eq!(cluster.world.answer(line, request), None);
    cluster.pass(timeout + TICK, &[0, 1]);
    let Some(Message::Granted(granted)) = cluster.world.answer(line, request) else {
        panic!("no token replaces the one taken back")
    };
    cluster.push(1, granted.grant, 3.0);
    assert_eq!(cluster.values(1), (-2.0, -2.0));
}

#[test]
fn deterministic_steps_add_gradients_in_the_order_of_tasks() {
    // The sum depends on the order of the addition.
    let gradients = [1.0e8_f32, 1.0, -1.0e8];
    let mut results = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let mode = synchronous(3, 3).deterministic(true);
        let mut cluster = ShardCluster::new(2, mode, |config| config);
        let tokens = [cluster.token(0), cluster.token(1), cluster.token(2)];
        for replica in order {
            cluster.push(replica, tokens[replica], gradients[replica]);
        }
        results.push(cluster.values(1));
    }
    let sum = (gradients[0] + gradients[1]) + gradients[2];
    assert!(
        results.iter().all(|values| values.0.to_bits() == (0.0 - sum / 3.0).to_bits()),
        "{results:?}"
    );
}

#[test]
fn a_wait_for_a_lost_replica_ends_and_names_it() {
    let timeout = Duration::from_secs(30);
    for (policy, timeout) in [(OnLoss::Wait { timeout }, timeout), (OnLoss::Fail, Duration::ZERO)] {
        let mut cluster = ShardCluster::new(1, synchronous(2, 2).on_loss(policy), |config| config);
        let a = cluster.token(0);
        cluster.push(0, a, 1.0);
        let line = cluster.replicas[0].lines[0];
        let newest = TokenId(a.token.0);
        let request = cluster.world.say(line, message::TokenRequest { newest }.into());
        cluster.pass(LEASE + timeout - 2 * TICK, &[0]);
        assert_eq!(cluster.world.answer(line, request), None);
        cluster.pass(4 * TICK, &[0]);
        let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
            panic!("the request is not refused")
        };
        let Refusal::ReplicasAbsent { waited_ms, awaited } = refused.refusal else {
            panic!("{refused:?}")
        };
        let waited = Duration::from_millis(waited_ms);
        assert!((timeout..timeout + 4 * TICK).contains(&waited), "since the loss: {waited:?}");
        assert!(awaited.as_str().contains("/job:worker/task:1 (lost"), "{awaited}");
        assert!(awaited.as_str().contains("1 of 2 gradients"), "{awaited}");
        assert_eq!(cluster.world.answer(line, request), None, "the request is refused once");
        // A new incarnation takes its place.
        cluster.restart(1);
        let b = cluster.token(1);
        cluster.push(1, b, 3.0);
        assert_eq!(cluster.values(1), (-2.0, -2.0));
    }
}

/// Requests a second token as the first replica. Returns what the refusal says is awaited.
fn wait_text(cluster: &mut ShardCluster) -> String {
    let line = cluster.replicas[0].lines[0];
    let newest = cluster.token(0).token;
    let request = cluster.world.say(line, message::TokenRequest { newest }.into());
    cluster.pass(2 * TICK, &[0]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("the request is not refused")
    };
    let Refusal::ReplicasAbsent { awaited, .. } = refused.refusal else { panic!("{refused:?}") };
    awaited.to_string()
}

/// The replicas that have not joined are named by their tasks, as far as the cluster lists them.
#[test]
fn replicas_that_have_not_joined_are_named_by_their_tasks() {
    let tasks = |range: std::ops::Range<u32>| {
        let names: Vec<String> = range.map(|index| format!("/job:worker/task:{index}")).collect();
        names.join(", ")
    };
    for (listed, total, expected) in [
        (1, 2, "1 more than the cluster lists".to_owned()),
        (2, 2, format!("{} (not joined yet)", tasks(1..2))),
        (4, 3, format!("2 of {} (not joined yet)", tasks(1..4))),
        (10, 10, format!("{} and others (not joined yet)", tasks(1..9))),
        (12, 11, format!("10 of {} and others (not joined yet)", tasks(1..9))),
    ] {
        let workers: Vec<String> = (0..listed).map(|index| format!("w{index}:1")).collect();
        let spec: ClusterSpec = format!("ps=a:1;worker={}", workers.join(",")).parse().unwrap();
        let mode = synchronous(total, total).on_loss(OnLoss::Fail).join_timeout(TICK);
        // One replica joins; the mode is that of many.
        let mut cluster = ShardCluster::new(1, synchronous(1, 1), |config| PsConfig {
            cluster: spec.clone(),
            ..config.mode(mode)
        });
        cluster.pass(2 * TICK, &[0]);
        let awaited = wait_text(&mut cluster);
        let begin = format!("step 0, which has 0 of {total} gradients; ");
        assert!(awaited.starts_with(&begin), "{awaited}");
        assert!(awaited.ends_with(&format!(" and {expected}")), "{awaited}");
    }
}

#[test]
fn absent_replicas_are_named_if_they_left_or_contributed_or_never_came() {
    let fails = OnLoss::Fail;
    let mut cluster = ShardCluster::new(1, synchronous(2, 2).on_loss(fails), |config| config);
    cluster.leave(1);
    let awaited = wait_text(&mut cluster);
    assert!(awaited.contains("/job:worker/task:1 (left"), "{awaited}");

    // The replica contributes one of its two gradients.
    let mut cluster = ShardCluster::new(1, synchronous(4, 2).on_loss(fails), |config| config);
    let b = cluster.token(1);
    cluster.push(1, b, 3.0);
    cluster.pass(LEASE + TICK, &[0]);
    cluster.token(0);
    let awaited = wait_text(&mut cluster);
    assert!(awaited.contains("/job:worker/task:1 (lost"), "{awaited}");
    assert!(awaited.contains("1 of 4 gradients"), "{awaited}");

    // The absent replica is no longer expected, but it is named.
    let mut cluster = ShardCluster::new(1, synchronous(2, 1), |config| {
        config.mode(synchronous(2, 2).on_loss(fails).join_timeout(TICK))
    });
    cluster.pass(2 * TICK, &[0]);
    let awaited = wait_text(&mut cluster);
    assert!(awaited.contains("1 not joined yet"), "{awaited}");
}

/// Requests a token with this deadline, which is not granted. Returns what the refusal says is
/// awaited.
fn awaited_after(cluster: &mut ShardCluster, replica: usize, time: Duration) -> String {
    let line = cluster.replicas[replica].lines[0];
    let newest = TokenId(cluster.replicas[replica].newest);
    let deadline_ms = u32::try_from(time.as_millis()).unwrap();
    let envelope = Envelope { deadline_ms, ..Envelope::default() };
    let ask = message::TokenRequest { newest }.into();
    let request = cluster.world.send(line, envelope, ask, &[]);
    cluster.pass(time, &[0, 1]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("the request is not refused")
    };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!("{refused:?}") };
    awaited.to_string()
}

/// Disconnects a shard from the step owner's.
fn cut_off(cluster: &mut ShardCluster, shard: usize) {
    let line = cluster.links[shard].take().unwrap();
    cluster.world.disconnect(line);
    cluster.world.input(shard, ShardInput::OwnerLink { up: false });
}

#[test]
fn a_shard_without_a_report_is_named_before_workers_that_have_contributed() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.pass(Duration::from_secs(1), &[0, 1]);
    cut_off(&mut cluster, 1);
    for (replica, grant) in [(0, a), (1, b)] {
        cluster.replicas[replica].sequence += 1;
        assert_eq!(cluster.push_to(1, replica, grant, 1.0), Some(Outcome::Held {}));
        assert_eq!(cluster.push_to(0, replica, grant, 1.0), None);
    }
    let wait_text = awaited_after(&mut cluster, 0, Duration::from_secs(3));
    let shard = "/job:ps/task:0/shard:1 (not connected, heard from 3";
    let first = wait_text.find(shard);
    let second = wait_text.find("/job:worker");
    assert!(first.is_some() && first < second, "{wait_text}");
    assert!(wait_text.contains("has not reported 2 of the pushes that others hold"), "{wait_text}");
    // Once the shard reports, nothing is missing.
    cluster.link(1);
    assert_eq!(cluster.values(1), (-1.0, -1.0));
}

#[test]
fn shards_without_reports_do_not_crowd_out_the_workers() {
    let mut cluster = ShardCluster::new(4, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    for shard in 1..4 {
        cut_off(&mut cluster, shard);
    }
    for (replica, grant) in [(0, a), (1, b)] {
        cluster.replicas[replica].sequence += 1;
        cluster.push_to(0, replica, grant, 1.0);
    }
    let wait_text = awaited_after(&mut cluster, 0, Duration::from_secs(3));
    assert!(wait_text.contains("1 more of the shards"), "{wait_text}");
    assert!(wait_text.contains("/job:worker"), "{wait_text}");
}

#[test]
fn a_shard_that_has_not_reported_a_step_as_applied_is_named() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    cluster.replicas[1].sequence += 1;
    assert_eq!(cluster.push_to(1, 1, b, 1.0), Some(Outcome::Held {}));
    // The shard does not receive the commit.
    cut_off(&mut cluster, 1);
    cluster.push_to(0, 1, b, 1.0);
    let wait_text = awaited_after(&mut cluster, 0, Duration::from_secs(3));
    assert!(
        wait_text.starts_with("step 0 to be applied by every shard; not yet by "),
        "{wait_text}"
    );
    assert!(
        wait_text.contains("/job:ps/task:0/shard:1 (not connected, heard from 3"),
        "{wait_text}"
    );
    assert!(!wait_text.contains("/job:worker"), "{wait_text}");
}

#[test]
fn a_shard_without_the_step_owner_reports_that_to_waiting_clients() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| config);
    cut_off(&mut cluster, 1);
    let metrics = cluster.world.metrics();
    assert_eq!((metrics.owner_connections_lost, metrics.shards_without_owner), (1, 1));
    let line = cluster.replicas[0].lines[1];
    let envelope = Envelope {
        deadline_ms: 2000,
        step: pushpull_common::ids::GlobalStep(1),
        ..Envelope::default()
    };
    let pull = message::Pull { selection: message::Selection::All {} };
    let request = cluster.world.send(line, envelope, pull.into(), &[]);
    cluster.pass(Duration::from_secs(2), &[0, 1]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("the request is not refused")
    };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!("{refused:?}") };
    let expected = "global step 1; this shard has applied 0; /job:ps/task:0/shard:1 has had no \
                    connection to the step owner for 2000 ms";
    assert_eq!(awaited.as_str(), expected);
    cluster.link(1);
    assert_eq!(cluster.world.metrics().shards_without_owner, 0);
}
